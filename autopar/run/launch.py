"""Processes: joining the group that torchrun made, starting local workers, and a pool of workers that stay.

Workers run functions that can be pickled (defined at the top level of a module that can be imported). On GPUs they have
NCCL and a GPU each, or share GPUs over gloo; else gloo and one thread each.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import LaunchError
from autopar.run import record, watchdog
from autopar.run.account import not_by_all
from autopar.run.groups import release, released_at_exit
from autopar.run.rendezvous import kept_over_restarts, store_of_this_start

__all__ = ["WorkerPool", "default_device", "join_process_group", "launch"]

_GRACE_S = 3.0  # for the other workers to report, once one has failed: most of them wait for it in a collective
_UNGUARDED = 77  # the exit code of a worker that would start workers while it imports the script
_START_S = 120.0  # for all workers to import torch and find each other
_sharing = False  # whether this process is a worker that shares a GPU with others


def default_device() -> torch.device:
    """This process's GPU, or the CPU if there is none or the process group is gloo's, but in workers that share GPUs. The GPU is that of
    LOCAL_RANK, as torchrun sets it; without it the one that torch.cuda.set_device has chosen."""
    gloo = dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"
    if (gloo and not _sharing) or not torch.cuda.is_available():
        return torch.device("cpu")
    number = os.environ.get("LOCAL_RANK", "")
    return torch.device("cuda", int(number) % torch.cuda.device_count() if number.isdecimal() else torch.cuda.current_device())


def join_process_group(device: torch.device) -> None:
    """Under torchrun, initialise the default process group unless that has been done. The device becomes the process's current one: NCCL
    moves objects, and autograd's threads compute, on that."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_available() or dist.is_initialized():
        return
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        backend = "nccl" if device.type == "cuda" else "gloo"
        if kept_over_restarts():
            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(backend, store=store_of_this_start(rank), rank=rank, world_size=ranks)
        else:
            dist.init_process_group(backend)
        released_at_exit()


def launch(fn: Callable[..., Any], *args: Any, gpus: int, timeout_s: float | None = None) -> list[Any]:
    """Run fn(*args) in `gpus` new local processes that form a process group; returns what each returned, by rank.

    fn is defined at the top level of a module or of a script whose call of `launch` is under `if __name__ == "__main__":`, for the
    processes import it again; args and what it returns are pickled. timeout_s: seconds after which they are ended; None: they may take as
    long as they do. Raises LaunchError with the traceback of the process that failed first, or when the time is over; ValueError for a
    number of processes that is none, or a function that the processes cannot import (of a notebook, or of standard input).
    """
    with WorkerPool(gpus, children=True) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


class WorkerPool:
    """n local processes in one process group that run one function after another, so that importing torch is paid once.

    device: 'cuda' or 'cpu'; by default GPUs if there are n. Of fewer GPUs each is shared by several workers, over gloo: what they send
    goes through the host. backend: 'nccl' or 'gloo'; by default NCCL for GPUs that are not shared. children: workers may start processes
    of their own (they are then not ended with this process if it is killed). enter: is called first in each worker, with its rank (to
    take its cores, or its network); defined as what is run. Workers start at the first run; a failed function leaves the pool usable.
    Close it, or use it as a context. Raises ValueError for what is no number of workers or no device, and for GPUs where there is none.
    """

    def __init__(
        self,
        n: int,
        *,
        backend: str | None = None,
        device: str | None = None,
        children: bool = False,
        enter: Callable[[int], None] | None = None,
    ) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"gpus must be a whole number of at least one worker; got {n!r}")
        self.n = n
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device not in (None, "cuda", "cpu"):
            raise ValueError(f"device must be 'cuda' or 'cpu'; got {device!r}")
        if device == "cuda" and not there:
            raise ValueError("device='cuda' needs a GPU, and torch sees none on this machine: leave device out, or give 'cpu'")
        self._backend = backend or ("nccl" if device != "cpu" and there >= n else "gloo")
        self._shared = device == "cuda" and self._backend == "gloo"
        self._daemon, self._enter = not children, enter
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
        _check_importable(fn)
        task = pickle.dumps((sys.path, pickle.dumps((fn, args))))
        if not self._workers:
            self._start()
        for _, connection in self._workers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, which its answer will say
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
        _check_main()
        on_cpu = self._backend == "gloo" and not self._shared  # CUDA does not work in a process that was forked of one that has used it
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods and on_cpu else "spawn")
        context.set_forkserver_preload(["autopar.run.preloaded"])
        self._folder = tempfile.mkdtemp(prefix="autopar-")
        for rank in range(self.n):
            ours, theirs = context.Pipe()
            process = context.Process(  # type: ignore[attr-defined]
                target=_worker,
                args=(theirs, rank, self.n, self._backend, self._shared, self._folder, self._enter),
                name=f"autopar-{rank}",
                daemon=self._daemon,
            )
            with _main_of_a_file():
                process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._answers(_START_S, "starting workers")

    def _answers(self, timeout_s: float | None, what: str) -> list[Any]:
        """One answer of each worker. On failure the workers are ended, unless all of them failed alike."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        pending = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str, bool]] = {}  # what, its traceback, and whether it is of a collective that another has left
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
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank][0]
                    process.join(_GRACE_S)
                    ok, value = False, ("died", f"{_ended_with(process.exitcode)}{self._last_of(rank)}", False)
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
            if errors:
                grace = time.monotonic() + _GRACE_S
                deadline = grace if deadline is None else min(deadline, grace)
        seen = watchdog.report(self._folder) if errors or pending else {}
        if len(results) == self.n:
            return [results[rank] for rank in range(self.n)]
        if len(errors) < self.n or len({summary for summary, _, _ in errors.values()}) > 1:
            self._kill()
        if errors:
            rank, (summary, text, _) = min(errors.items(), key=lambda one: _blame(*one[1]))  # of equals the first
            raise LaunchError(f"{what} failed on rank {rank} of {self.n}: {summary}\n{text}")
        where = "".join(f"\nrank {rank} was {seen[rank].where}" for rank in sorted(pending.values()) if rank in seen)
        raise LaunchError(
            f"{what} did not end within {timeout_s} s on ranks {sorted(pending.values())} of {self.n}{where}{not_by_all(seen)}"
        )

    def _last_of(self, rank: int) -> str:
        """What a worker that has died did last."""
        found = watchdog.report(self._folder)
        if (seen := found.get(rank)) is None:
            return ""
        return f"; {seen.text}" if seen.state in (record.FAILED, record.FOLLOWED) and seen.text else f", {seen.where}{not_by_all(found)}"


def _blame(summary: str, text: str, lost: bool) -> int:
    """Who is to be named, of several that failed: one that died; one with an error of its own; one whose collective another has left."""
    return 0 if summary == "died" else 2 if lost else 1


def _ended_with(code: int | None) -> str:
    """The end of a process in words."""
    if code == _UNGUARDED:
        return (
            "the script starts workers when it is imported, and workers import it. Put what it runs, and so autopar.launch, under "
            '`if __name__ == "__main__":`'
        )
    if code is not None and code < 0:
        return f"the process was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"the process ended with exit code {code}"


def _check_importable(fn: Callable[..., Any]) -> None:
    """ValueError for a function that a new process would not find."""
    name, module = getattr(fn, "__qualname__", type(fn).__name__), getattr(fn, "__module__", None)
    if module == "__main__" and not _main_is_a_file():
        raise ValueError(
            f"{name} is defined in a notebook, an interactive session or a script from standard input, which new processes cannot "
            f"import: put it into a file (in a notebook with %%writefile train.py), and import it from there"
        )
    if "<locals>" in name or "<lambda>" in name:
        raise ValueError(f"{name} is defined inside of a function, where no new process finds it: define it at the top level of a module")


def _main_is_a_file() -> bool:
    """Whether new processes can import the main module."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (file is not None and os.path.isfile(file))


@contextlib.contextmanager
def _main_of_a_file() -> Iterator[None]:
    """Inside, a main module that is no file says so: Python calls a script from standard input '<stdin>', which new processes would look
    for."""
    main = sys.modules["__main__"]
    file = None if _main_is_a_file() else main.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file


def _check_main() -> None:
    """End a new process that imports a script which starts workers without a guard. The process that it is of says why."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(_UNGUARDED)


def _worker(
    connection: Connection, rank: int, n: int, backend: str, shared: bool, folder: str, enter: Callable[[int], None] | None
) -> None:
    """The main function of a worker: join the group, then run what is sent until an empty message or the end. shared: it is one of
    several on a GPU."""
    global _sharing
    _sharing = shared
    if enter is not None:
        enter(rank)
    threading.Thread(target=_end_with_parent, name="autopar-parent", daemon=True).start()
    watchdog.in_pool(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    if backend == "nccl" or shared:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if backend == "gloo":
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all workers are on this machine
    dist.init_process_group(
        backend, store=dist.FileStore(os.path.join(folder, "store"), n), rank=rank, world_size=n, timeout=datetime.timedelta(minutes=30)
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


def _end_with_parent() -> None:
    """A worker does not outlive the process that started it, whatever it runs at that time."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(task: bytes) -> bytes:
    try:
        record.left()  # what an earlier task has left noted
        record.phase(record.OUTSIDE)
        paths, call = pickle.loads(task)
        sys.path.extend(path for path in paths if path not in sys.path)
        fn, args = pickle.loads(call)
        answer = pickle.dumps((True, fn(*args)))
        record.phase(record.AT_ITS_END)  # nobody waits for it without end
        return answer
    except BaseException as error:  # whatever the task raises is reported to the process that sent it
        if isinstance(error, KeyboardInterrupt):
            raise
        lost = isinstance(error, RuntimeError) and record.inside()
        return pickle.dumps((False, (f"{type(error).__name__}: {error}", traceback.format_exc(), lost)))
