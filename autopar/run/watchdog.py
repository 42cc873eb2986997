"""Each rank's watchdog: a thread that sees whether other ranks have gone or are waited for too long, and ends this one with one message.

Ranks of one machine read each other's records (`record`), which outlive a killed process; those of other machines are asked for over a
store, to which each watch copies its own. Nothing is done for each collective but to note it. A rank whose collective fails looks for the
rank that has gone before it ends itself, so that the message is of that one; the first on a machine prints it, the others are silent.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import SettingError
from autopar.run import record
from autopar.run.account import culprit, killed, not_by_all, not_equally_often, wait_of, whereabouts
from autopar.run.leaving import Leaving
from autopar.run.record import Other, Own, Seen

__all__ = ["TIMEOUT", "Watchdog", "begin", "current", "end", "followed", "in_pool", "report", "timeout_s"]

TIMEOUT = "AUTOPAR_TIMEOUT"  # seconds that a rank may wait in a collective for others
_DEFAULT_S = 1500.0  # before gloo's process groups give up, which takes 1800 s and names nobody
_SAYS_S = 60.0  # until it is said who waits for whom; a tenth of the timeout where that is less
_PERIOD_S = 0.5
_GRACE_S = 5.0  # for a rank to find out by itself that another has gone
_FOLDER = "autopar-watch-"

T = TypeVar("T")

_watch: Watchdog | None = None
_hooked = False
_pool: Path | None = None  # where the process that started this one looks for records


def begin(group: dist.ProcessGroup) -> None:
    """Collective over all ranks: watch over them. group: of all."""
    global _watch
    end()
    record.end_talks("")
    token: list[Any] = [(secrets.token_hex(8), time.time())]
    dist.broadcast_object_list(token, src=0, group=group)
    folder = _folder(token[0][0])
    own = Own(folder / f"rank-{dist.get_rank()}")
    _watch = Watchdog(own, folder, dist.get_rank(), dist.get_world_size(), token[0][0])
    hosted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosted, _watch.host_store(), group=group)  # a broadcast waits for no rank; after this all records are there
    _watch.start(hosted[0])
    _hook()


def in_pool(folder: str) -> None:
    """This process is a worker of one that reads its record there, and says itself what has happened."""
    global _pool
    _pool = Path(folder) / "watch"


def end(state: int = record.ENDED) -> None:
    """This rank needs the others no more, and they do not need it."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.close(state)


def current() -> Watchdog | None:
    return _watch


def followed() -> bool:
    """Whether this rank ends because another has gone."""
    return _watch is not None and _watch.own.seen().state == record.FOLLOWED


def report(folder: str) -> dict[int, Seen]:
    """What the workers of a pool did last, by rank."""
    found = {int(path.name.removeprefix("rank-")): path.read_bytes() for path in Path(folder).glob("watch/rank-*")}
    return {rank: Seen.of(data) for rank, data in found.items() if data}


def _folder(token: str) -> Path:
    """The same for all ranks of a machine, and of no other job."""
    if _pool is not None:
        _pool.mkdir(mode=0o700, exist_ok=True)
        return _pool
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    mine = f"{_FOLDER}{os.getuid()}-"
    for old in base.glob(f"{mine}*"):  # of jobs that were killed to the last rank
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 3600 and not any(_alive(path) for path in old.glob("rank-*")):
                shutil.rmtree(old, ignore_errors=True)
    folder = base / f"{mine}{token}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _alive(path: Path) -> bool:
    other = Other(path)
    try:
        return other.alive()
    finally:
        other.close()


class Watchdog:
    """Of one rank. timeout_s: of a collective."""

    def __init__(self, own: Own, folder: Path, rank: int, world: int, token: str) -> None:
        self.own, self.rank, self.world = own, rank, world
        self.timeout_s = timeout_s()
        self._says_s = min(_SAYS_S, self.timeout_s / 10)
        self.leaving = Leaving(rank, world, token)
        self._folder, self._token = folder, token
        self._others: dict[int, Other] = {}
        self._store: dist.Store | None = None
        self._server: dist.Store | None = None
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stop = False
        self._in_pool = _pool is not None
        self._of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self._parent = os.getppid()
        self._main = threading.main_thread().ident
        self._gone_since: float | None = None
        self._last: tuple[int, int] = (0, 0)  # a collective, by its number, and what it is
        self._last_since = 0.0
        self._beside_since: float | None = None  # a save beside training waits for ranks that have none
        self._told = False
        self._thread = threading.Thread(target=self._run, name="autopar-watchdog", daemon=True)

    # ------------------------------------------------------------------------------------------------------ beginning, end
    def host_store(self) -> tuple[str, int] | None:
        """Where all ranks find a store: that of torchrun, or one that rank 0 makes."""
        if self.rank != 0:
            return None
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._server = server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
        return "", server.port

    def start(self, address: tuple[str, int]) -> None:
        for rank in range(self.world):
            path = self._folder / f"rank-{rank}"
            if rank != self.rank and path.exists():
                self._others[rank] = Other(path)
        host, port = address
        if host or self.rank == 0 or 0 in self._others:  # else rank 0 is on another machine, whose address nobody has told
            with contextlib.suppress(RuntimeError):  # a firewall, say
                wait = datetime.timedelta(seconds=10)
                self._store = dist.TCPStore(host or "localhost", port, None, False, timeout=wait, wait_for_workers=False)
        self.leaving.store = self._store
        self.listen()
        if self._of_torchrun and _is_default(signal.SIGTERM):
            signal.signal(signal.SIGTERM, _default_after_a_word)
        self._thread.start()

    def listen(self) -> None:
        """Have the thread woken by signals that Python handles; the main thread may be in a collective for long."""
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            if before not in (-1, self._pipe[1]):  # somebody else's, as asyncio's
                signal.set_wakeup_fd(before)

    def close(self, state: int) -> None:
        self.own.mark(state)
        self._stop = True
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, self._pipe[1]):
                signal.set_wakeup_fd(before)
        for end in self._pipe:
            os.close(end)
        if self._told:
            (self._folder / "waits").unlink(missing_ok=True)
        self.own.close()
        self._tidy()
        for other in self._others.values():
            other.close()

    def _tidy(self) -> None:
        """The last on a machine removes the records."""
        if not self._in_pool and not any(other.alive() for other in self._others.values()):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _exit(self, code: int) -> None:
        self._tidy()
        os._exit(code)

    # ----------------------------------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        asked_to_end: float | None = None
        while not self._stop:
            ready, _, _ = select.select([self._pipe[0]], [], [], self.leaving.period_s or _PERIOD_S)
            now = time.monotonic()
            if ready and signal.SIGTERM in os.read(self._pipe[0], 64) and signal.getsignal(signal.SIGTERM) is _default_after_a_word:
                asked_to_end = now
            self._look(now)
            if asked_to_end is not None and now - asked_to_end > 1.0 and not self._stop:  # the main thread does not come to it
                self.leave_by(signal.SIGTERM)
                self._exit(128 + signal.SIGTERM)

    def _look(self, now: float) -> None:
        if self._of_torchrun and os.getppid() != self._parent:
            self._leave(f"torchrun, which started rank {self.rank}, has gone; the rank ends")
        self.leaving.go_on()
        if self._store is not None and len(self._others) + 1 < self.world:
            self._over_the_store(lambda store: store.set(f"{self._token}/{self.rank}", self.own.data().hex()))
        gone = self.gone() or self._failed()
        if gone:
            self._gone_since = self._gone_since or now
            if now - self._gone_since > _GRACE_S:
                self.own.mark(record.FOLLOWED)
                self.say(self.culprit())
                self._exit(1)
        own = self.own.seen()
        waiting = own.at != 0 and (own.kind not in record.UNTIMED or self._saves_alone(own))
        if not waiting or (own.count, own.at) != self._last:
            self._last, self._last_since = (own.count, own.at), now
        self._beside_since = (self._beside_since or now) if own.beside == record.WAITS and self._without_save() else None
        waits_s = now - self._last_since if waiting else now - self._beside_since if self._beside_since is not None else 0.0
        late = waits_s > self._says_s
        asked = late or any(other.seen().waits for other in self._others.values())
        if asked and own.state == record.RUNNING:
            self.own.tell(whereabouts(self._main or 0))
        self.own.beats(waits=late)
        if late and not gone and waits_s > self._says_s + 3 * _PERIOD_S:  # others have told where they are by now
            if self._without_end():
                self._leave(f"{self.wait_of(waits_s)}. The ranks end")
            if not self._told:
                self._told = True
                self.say(self.wait_of(waits_s), "waits")
        if waits_s > self.timeout_s:
            text = f"{self.wait_of(waits_s)}. That is longer than {TIMEOUT}={self.timeout_s:g} allows: the ranks end"
            self._leave(text)
        if not asked and self._told:
            self._told = False
            (self._folder / "waits").unlink(missing_ok=True)

    def _without_end(self) -> bool:
        """Whether all ranks are seen to wait for one another, or one has done all that it was given to do."""
        seen = self._all()
        if any(s.phase == record.AT_ITS_END for s in seen.values()):
            return True
        return len(seen) == self.world and all(s.waits for s in seen.values()) and bool(not_equally_often(seen) or not_by_all(seen))

    def _saves_alone(self, own: Seen) -> bool:
        """Whether this rank saves a checkpoint, and a rank of this machine is about something else."""
        return (own.kind, own.phase) == (record.CHECKPOINT, record.SAVING) and bool(self._without_save())

    def _without_save(self) -> list[int]:
        """The ranks of this machine that have no save under way."""
        seen = {rank: other.seen() for rank, other in self._others.items()}
        return [rank for rank, s in seen.items() if s.state == record.RUNNING and s.phase != record.SAVING and not s.beside]

    def apart(self, mine: int) -> int | None:
        """A neighbour of this rank on its machine that has decided otherwise for the same call (`record.decided`), if one has: of two that
        differ the later one finds out, before any collective of the call."""
        for rank in dict.fromkeys(((self.rank + 1) % self.world, (self.rank - 1) % self.world)):
            theirs = self._others[rank].seen().decided if rank in self._others else mine
            if theirs >> 33 == mine >> 33 and theirs != mine and not theirs >> 32 & 1:
                return rank
        return None

    def differing(self, mine: int) -> int | None:
        """Wait until all other ranks have decided what their call runs (`record.decided`). A rank that has decided otherwise, or has ended;
        None if there is none. Ranks on other machines are asked over the store, if there is one."""
        left = [rank for rank in range(self.world) if rank != self.rank and (rank in self._others or self._store is not None)]
        while left:
            for rank in tuple(left):
                alive = rank not in self._others or self._others[rank].alive()
                theirs = self._seen(rank)
                if theirs is None or theirs.decided == mine or theirs.agreed >= mine >> 33:
                    left.remove(rank)
                elif theirs.decided >> 33 >= mine >> 33 or not alive:
                    return rank
            time.sleep(0.01)
        record.agreed()
        return None

    @property
    def beside(self) -> Mapping[int, Other]:
        """The records of the other ranks of this machine."""
        return self._others

    def differing_from(self, read: Callable[[Other], T], differs: Callable[[T], bool]) -> int | None:
        """A rank of this machine whose record differs in what is read of it, if there is one: of two the later one finds out."""
        for rank, other in self._others.items():
            theirs = read(other)
            if differs(theirs) and read(other) == theirs:  # it has not gone on meanwhile
                return rank
        return None

    def ends_alone(self, error: Exception) -> None:
        """This rank has raised what the others have not, in a call that they wait in: it talks to none any more, and they end."""
        if not record.inside():  # else a collective has failed: another rank has gone
            self.own.mark(record.FAILED, f"{type(error).__name__}: {error}"[:400])
        record.end_talks(
            f"rank {self.rank} has raised {type(error).__name__} ({error}) in a call of the model, which other ranks have not. They wait "
            f"for it in that call, and would take its next ones for the rest of that. An error that the loop catches must be the same on "
            f"all ranks: look for it in the batch before the call, or start again from the last checkpoint"
        )

    def ended(self, rank: int) -> bool:
        """Whether a rank of this machine has ended well: of one that has not, the thread tells."""
        return self._others[rank].seen().state == record.ENDED

    def where(self, rank: int) -> str:
        """What a rank of this machine does, for a message."""
        return "at its end" if self.ended(rank) else self._others[rank].seen().where

    def _seen(self, rank: int) -> Seen | None:
        """Another rank's record; None if it cannot be asked."""
        if rank in self._others:
            return self._others[rank].seen()

        def read(store: dist.Store) -> Seen:
            key = f"{self._token}/{rank}"
            return Seen.of(bytes.fromhex(store.get(key).decode()) if store.check([key]) else record.NOTHING)

        return self._over_the_store(read) if self._store is not None else None

    def _leave(self, text: str) -> None:
        self.own.mark(record.FOLLOWED, text)
        self.say(text)
        self._exit(1)

    def _over_the_store(self, do: Callable[[dist.Store], Any]) -> Any:
        try:
            return do(self._store)  # type: ignore[arg-type]
        except (RuntimeError, ValueError):  # its process has gone
            self._store = self.leaving.store = None
            return None

    # ------------------------------------------------------------------------------------------------------------- messages
    def gone(self) -> dict[int, Seen]:
        """Ranks of this machine that have ended otherwise than well, with what they did last."""
        found = {}
        for rank, other in self._others.items():
            if not other.alive() and (seen := other.seen()).state != record.ENDED:
                found[rank] = seen
        return found

    def _failed(self) -> bool:
        """Whether a rank of this machine that lives has failed, so that it does nothing for others any more."""
        return any(other.seen().state == record.FAILED for other in self._others.values())

    def culprit(self, wait_s: float = 0.0) -> str:
        """Who has gone, and what it was doing; '' if nobody has. wait_s: for as long."""
        deadline = time.monotonic() + wait_s
        while True:
            if text := self._culprit():
                return text
            if time.monotonic() > deadline:
                return self._far_away() if wait_s else ""
            time.sleep(0.02)

    def _culprit(self) -> str:
        dead = self._dead()
        return culprit({rank: other.seen() for rank, other in self._others.items()}, dead, self.rank, self.own.seen(), self.world)

    def _dead(self) -> frozenset[int]:
        return frozenset(rank for rank, other in self._others.items() if not other.alive())

    def _far_away(self) -> str:
        """Of ranks on other machines: one whose record does not change any more."""
        far = [rank for rank in range(self.world) if rank != self.rank and rank not in self._others]
        if not far or self._store is None:
            return ""

        def read(store: dist.Store) -> dict[int, Seen]:
            keys = {rank: f"{self._token}/{rank}" for rank in far}
            return {rank: Seen.of(bytes.fromhex(store.get(key).decode())) for rank, key in keys.items() if store.check([key])}

        before = self._over_the_store(read) or {}
        time.sleep(6 * _PERIOD_S)
        for rank, seen in (self._over_the_store(read) or {}).items():
            if rank in before and before[rank].beat == seen.beat and seen.state != record.FOLLOWED:
                return killed(rank, seen, self.world, how="on another machine is not heard of any more; it was last")
        return ""

    def wait_of(self, waits_s: float) -> str:
        """Which ranks wait for which."""
        return wait_of(self._all(), self._dead(), self.rank, self.world, waits_s)

    def _all(self) -> dict[int, Seen]:
        """The records of all ranks of this machine."""
        return {rank: other.seen() for rank, other in self._others.items()} | {self.rank: self.own.seen()}

    def say(self, text: str, what: str = "said") -> None:
        """Once for each machine. In a pool of workers the process that started them says how they ended."""
        if not text or (self._in_pool and what == "said"):
            return
        try:
            os.close(os.open(self._folder / what, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        except OSError:
            pass  # said twice, perhaps
        os.write(2, f"autopar: {text}\n".encode())

    def last_word(self, wait_s: float = 0.0) -> bool:
        """Say which rank has gone, if one has."""
        text = self.culprit(wait_s)
        if text:
            self.own.mark(record.FOLLOWED, text)
            self.say(text)
        return bool(text)

    def leave_by(self, number: int) -> None:
        """Say which rank has gone, if one has; else that this one ends by a signal is for the others to read."""
        if not self.last_word():
            self.own.mark(record.FOLLOWED, f"rank {self.rank} of {self.world} was ended by {signal.Signals(number).name}")
        self._tidy()

    def linger(self) -> None:
        """Have torchrun see the rank that has gone before this one."""
        if self._of_torchrun:
            deadline = time.monotonic() + 2 * _GRACE_S
            while not self.gone() and time.monotonic() < deadline:  # it is about to end
                time.sleep(0.02)
            time.sleep(1.0)
        self._tidy()


def timeout_s() -> float:
    """How long a rank waits in a collective. SettingError if the variable says no number of seconds."""
    text = os.environ.get(TIMEOUT, "")
    try:
        value = float(text) if text else _DEFAULT_S  # inf: as long as it takes
    except ValueError:
        value = -1.0
    if not value > 0:
        raise SettingError(f"{TIMEOUT} must be a number of seconds above 0, not {text!r}")
    return value


def _is_default(number: int) -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL


def _default_after_a_word(number: int, frame: FrameType | None) -> None:
    """What a signal does by default, once it has been said why."""
    if _watch is not None:
        _watch.leave_by(number)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# ------------------------------------------------------------------------------------------------------------------ the end
def _hook() -> None:
    global _hooked
    if _hooked:
        return
    _hooked = True
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        watch = _watch
        if watch is not None and record.inside() and issubclass(kind, RuntimeError) and watch.last_word(2.0):
            watch.linger()
            return  # its own traceback says only that somebody has gone
        before(kind, error, trace)
        if watch is not None:
            watch.own.mark(record.FAILED, f"{kind.__name__}: {error}"[:400])

    sys.excepthook = excepthook
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """In a forked child, which is no rank."""
    global _watch
    if _watch is None:
        return
    _watch = None
    record.write_to(memoryview(bytearray(4096)).cast("q"))
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _default_after_a_word:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


atexit.register(end)
