"""Processes: joining the group that torchrun made, starting local workers, and a pool of workers that stay.

Workers run functions that can be pickled (defined at the top level of a module that can be imported). On GPUs they have
NCCL and a GPU each, else gloo and one thread each.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import LaunchError
from autopar.run.groups import release, released_at_exit

__all__ = ["WorkerPool", "default_device", "join_process_group", "launch"]

_GRACE_S = 3.0  # for the other workers to report, once one has failed: most of them wait for it in a collective
_START_S = 120.0  # for all workers to import torch and find each other


def default_device() -> torch.device:
    """This process's GPU (LOCAL_RANK), or the CPU if there is none or the process group is gloo's."""
    gloo = dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"
    if gloo or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def join_process_group(device: torch.device) -> None:
    """Under torchrun, initialise the default process group unless that has been done. Elsewhere: nothing."""
    if not dist.is_available() or dist.is_initialized():
        return
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        released_at_exit()


def launch(fn: Callable[..., Any], *args: Any, gpus: int, timeout_s: float | None = None) -> list[Any]:
    """Run fn(*args) in `gpus` new local processes that form a process group; returns what each returned, by rank.

    Raises LaunchError with the traceback of the first process that failed.
    """
    with WorkerPool(gpus, children=True) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


class WorkerPool:
    """n local processes in one process group that run one function after another, so that importing torch is paid once.

    backend: 'nccl' or 'gloo'; by default NCCL if there are n GPUs. children: workers may start processes of their own
    (they are then not ended with this process if it is killed). Workers start at the first run; a failed function
    leaves the pool usable. Close it, or use it as a context.
    """

    def __init__(self, n: int, *, backend: str | None = None, children: bool = False) -> None:
        if n < 1:
            raise ValueError(f"a pool needs at least one worker; got {n}")
        self.n = n
        self._backend = backend or ("nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= n else "gloo")
        self._daemon = not children
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._folder = ""
        pool = weakref.ref(self)
        atexit.register(lambda: p.close() if (p := pool()) is not None else None)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """fn(*args) on every worker; returns the results by rank.

        Raises LaunchError with the traceback of the first worker that failed, or if timeout_s passed. If some workers
        failed and others did not, or hang, the pool starts new ones for the next run.
        """
        task = pickle.dumps((sys.path, pickle.dumps((fn, args))))
        if not self._workers:
            self._start()
        for _, connection in self._workers:
            connection.send_bytes(task)
        return self._answers(timeout_s, f"{getattr(fn, '__name__', fn)}")

    def close(self) -> None:
        """End the workers. The pool may be used again and then starts new ones."""
        for _, connection in self._workers:
            with contextlib.suppress(OSError):  # it has died
                connection.send_bytes(b"")
            connection.close()
        deadline = time.monotonic() + _GRACE_S
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process, connection in self._workers:
            connection.close()
            if process.is_alive():
                process.kill()
            process.join()
        self._workers = []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _start(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods and self._backend == "gloo" else "spawn")
        context.set_forkserver_preload(["autopar.run.launch"])
        self._folder = tempfile.mkdtemp(prefix="autopar-")
        for rank in range(self.n):
            ours, theirs = context.Pipe()
            process = context.Process(  # type: ignore[attr-defined]
                target=_worker,
                args=(theirs, rank, self.n, self._backend, os.path.join(self._folder, "store")),
                name=f"autopar-{rank}",
                daemon=self._daemon,
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._answers(_START_S, "starting workers")

    def _answers(self, timeout_s: float | None, what: str) -> list[Any]:
        """One answer of each worker. On failure the workers are ended, unless all of them failed alike."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        pending = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str]] = {}
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(pending), left)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    process = self._workers[rank][0]
                    process.join(_GRACE_S)
                    ok, value = False, ("died", f"the process ended with exit code {process.exitcode}")
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
            if errors:
                grace = time.monotonic() + _GRACE_S
                deadline = grace if deadline is None else min(deadline, grace)
        if len(results) == self.n:
            return [results[rank] for rank in range(self.n)]
        if len(errors) < self.n or len({summary for summary, _ in errors.values()}) > 1:
            self._kill()
        if errors:
            rank, (summary, text) = next(iter(errors.items()))
            raise LaunchError(f"{what} failed on rank {rank} of {self.n}: {summary}\n{text}")
        raise LaunchError(f"{what} did not end within {timeout_s} s on ranks {sorted(pending.values())} of {self.n}")


def _worker(connection: Connection, rank: int, n: int, backend: str, store: str) -> None:
    """The main function of a worker: join the group, then run what is sent until an empty message or the end."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all workers are on this machine
    dist.init_process_group(
        backend, store=dist.FileStore(store, n), rank=rank, world_size=n, timeout=datetime.timedelta(minutes=30)
    )
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            break
        if not task:
            break
        connection.send_bytes(_answer(task))
    release()


def _answer(task: bytes) -> bytes:
    try:
        paths, call = pickle.loads(task)
        sys.path.extend(path for path in paths if path not in sys.path)
        fn, args = pickle.loads(call)
        return pickle.dumps((True, fn(*args)))
    except BaseException as error:  # whatever the task raises is reported to the process that sent it
        if isinstance(error, KeyboardInterrupt):
            raise
        return pickle.dumps((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))
