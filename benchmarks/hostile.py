"""Generated bad inputs: command lines, cluster files, plan files, targets, names, environments, checkpoints, questions about a plan,
configurations of other softwares, recorded runs. Counts what comes of them.

Each input is drawn from a seed of its own (--only N runs one again), by mutating a valid input or from lists of what people and attackers
type, and is given to the command line or to the function that reads it, in this process. What may come of it is a result or an error that
autopar raises on purpose. Anything else is counted: a traceback, a hang (more than a minute of CPU time, or ten minutes of any), a crash of
the process, a program or connection that was started, a file that was written outside of where the output was to go.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._hostile_kinds import KINDS, Given, expected

__all__ = ["main"]

CPU_S, WALL_S = 60, 600


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks hostile")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="one JSON line for each input that was answered badly")
    parser.add_argument("--only", type=int, help="the number of one input, which is shown")
    options = parser.parse_args(argv)
    numbers = range(options.inputs) if options.only is None else range(options.only, options.only + 1)
    home = Path(tempfile.mkdtemp(prefix="autopar-hostile-"))
    found: list[dict[str, Any]] = []
    try:
        at = numbers.start
        while at < numbers.stop:  # in processes of their own, since an input may end one
            report = home / "report"
            report.write_bytes(b"")
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    _Runner(home, options.seed, report).run(range(at, numbers.stop))
                    code = 0
                finally:
                    if code:
                        traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(code)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            lines = [json.loads(line) for line in report.read_text().splitlines()]
            if status == 1 and not lines:
                raise RuntimeError("the inputs could not be prepared")
            found += lines
            at += len(lines)
            if status and at < numbers.stop:
                found.append({"number": at, "kind": "?", "came": "crash", "text": f"the process ended with {status}"})
                at += 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return _told(found, options.results, show=options.only is not None)


def _told(found: list[dict[str, Any]], results: Path | None, *, show: bool) -> int:
    bad = [one for one in found if one["came"] not in ("result", "error")]
    if results is not None:
        results.write_text("".join(json.dumps(one) + "\n" for one in bad))
    for one in found if show else bad[:20]:
        print(json.dumps(one, indent=1) if show else f"{one['number']} ({one['kind']}): {one['came']}: {one['text'][-600:]}")
    came = ("result", "error", "traceback", "hang", "crash", "started", "written outside")
    print(f"{'':<12}" + "".join(f"{name:>17}" for name in came))
    for kind in (*KINDS, "?"):
        counts = Counter(one["came"] for one in found if one["kind"] == kind)
        if counts:
            print(f"{kind:<12}" + "".join(f"{counts[name]:>17}" for name in came))
    total = Counter(one["came"] for one in found)
    print(json.dumps({"inputs": len(found), **{name.replace(" ", "_"): total[name] for name in came}}))
    return int(bool(bad))


class _Hang(BaseException):
    """The input has taken too long."""


class _Runner:
    """Runs inputs in a folder of its own, of which `out` is where output may go."""

    def __init__(self, home: Path, seed: int, report: Path) -> None:
        self._home, self._seed, self._report = home / "work", seed, report
        self._seen: list[str] = []
        self._watching = False
        self._prepare()

    def _prepare(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        self._home.mkdir()
        os.chdir(self._home)
        os.environ.update(HOME=str(self._home / "home"), AUTOPAR_CACHE="off", XDG_CACHE_HOME=str(self._home / "home" / "cache"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._home / "out")
        for folder in ("home", "out", "given"):
            (self._home / folder).mkdir()
        self._given = Given(self._home / "given")
        sys.addaudithook(self._audit)

    # ------------------------------------------------------------------------------------------------------------- watching
    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "pty.spawn"):
            self._seen.append(f"started: {event} {args!r}"[:300])
        elif event == "open" and isinstance(args[0], str | bytes) and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self._wrote(args[0])
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"):
            self._wrote(args[1] if event in ("os.rename", "os.symlink", "os.link") else args[0])

    def _wrote(self, path: object) -> None:
        where = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        if not where.startswith((f"{self._out}{os.sep}", "/dev/null", "/proc/self/")) and where != self._out:
            self._seen.append(f"written outside: {where}"[:300])

    # -------------------------------------------------------------------------------------------------------------- running
    def run(self, numbers: range) -> None:
        signal.signal(signal.SIGPROF, _too_long)
        signal.signal(signal.SIGALRM, _too_long)
        with self._report.open("a") as report:
            for number in numbers:
                report.write(json.dumps({"number": number, **self._one(number)}) + "\n")
                report.flush()

    def _one(self, number: int) -> dict[str, Any]:
        draw = random.Random(f"{self._seed} {number}")
        kind = tuple(KINDS)[number % len(KINDS)]
        out = self._home / "out"
        shutil.rmtree(out)
        out.mkdir()
        self._out, self._seen = str(out), []
        before, modules, paths = dict(os.environ), set(sys.modules), list(sys.path)
        came, text = "result", ""
        what, do = KINDS[kind](self._given, draw, out)
        try:
            with _limits(), warnings.catch_warnings(), self._watched():
                warnings.simplefilter("ignore")
                do()
        except _Hang:
            came, text = "hang", traceback.format_exc()
        except expected() as error:
            came, text = "error", f"{type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001  (whatever it is, it is counted)
            came, text = "traceback", traceback.format_exc()
        finally:
            self._watching = False
            os.environ.clear()
            os.environ.update(before)
            sys.path[:] = paths
            os.chdir(self._home)
            for name in set(sys.modules) - modules:
                if name.startswith("autopar_target_"):
                    del sys.modules[name]
        if came in ("result", "error") and self._seen:
            came, text = self._seen[0].partition(":")[0], self._seen[0]
        if (self._home / "executed").exists():
            came, text = "started", "a text of the input was run"
        return {"kind": kind, "came": came, "text": text.encode("utf-8", "replace").decode()[-2000:], "what": repr(what)[:1000]}

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._watching = True
        try:
            yield
        finally:
            self._watching = False


def _too_long(*_: object) -> None:
    raise _Hang


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
