"""What this rank is doing, written where it can be read when the rank is gone: a few numbers in a file of shared memory.

Writing a number there takes tens of nanoseconds, so that every collective is noted (`entered`, `left`), and who looks at the numbers
pays: the rank's own watchdog, which compares them from time to time, and other ranks of the machine after a death. A rank holds a lock on
its file; the system lets go of it when the process ends in any way. What an exception has left noted stays: it says where that came from.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.axes import AXES, BATCH, axes_over, joint, levels_of
from autopar.errors import AutoparError, LaunchError

__all__ = [
    "AGREEMENT", "ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "AT_ITS_END", "BACKWARD", "BATCH_OF", "BROADCAST", "CHECKPOINT", "ENDED",
    "EXCHANGE", "FAILED", "FOLLOWED", "FORWARD", "GRADIENTS_OF", "LOADING", "NOTHING", "OPTIMIZER", "OUTSIDE", "PLANNING", "PREPARING",
    "REDUCE_SCATTER", "RUNNING", "SAVING", "UNTIMED", "WAITS", "WORKS", "Batch", "Own", "Reads", "Seen", "Wrote", "agreed", "broke",
    "call_of", "calls", "collective", "count", "count_from", "decided", "doing", "end_talks", "entered", "given", "given_in", "gradients",
    "inside", "left", "line", "note_line", "now", "phase", "reads", "saves_beside", "saving_beside", "step", "telling", "was_given",
    "write_to", "wrote",
]  # fmt: skip

_PID, _STATE, _STEP, _PHASE, _AT, _LINE, _COUNT, _BEAT, _WAITS, _LENGTH, _BESIDE, _GIVEN, _BEFORE, _DECIDED, _CALLS, _AGREED = range(16)
_BEGUN, _READS = 16, 17  # in this order: of two numbers, the second one is read later
_WROTE, _TOTAL = 18, 19  # side by side, to be read at once
_BROKE, _BROKE_ODD = 20, 21  # of calls of even numbers, of odd ones
BATCH_OF, GRADIENTS_OF = 0, 1  # a call
_GIVEN_LAST, _LAST = 22, 8  # of each of the last calls three numbers of its batch, and of gradients
_PASSES = 2**16  # more than there are backward passes behind one call
_NUMBERS, _TEXT, _SIZE = 70, 560, 4096  # int64 numbers; where text begins; bytes of a record
NOTHING = bytes(_SIZE)  # the record of a rank that has noted nothing

RUNNING, ENDED, FAILED, FOLLOWED = range(4)  # followed: ended because another did
WORKS, WAITS = 1, 2  # of a save beside training: on this rank's part, or for other ranks
OUTSIDE, FORWARD, BACKWARD, OPTIMIZER, SAVING, LOADING, PREPARING, AT_ITS_END = range(8)
PHASES = (
    "outside of the model", "forward", "backward", "the optimizer's step", "saving a checkpoint", "loading a checkpoint",
    "preparing the model", "at the end of what it was given",
)  # fmt: skip
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, EXCHANGE, AGREEMENT, CHECKPOINT, PLANNING = range(1, 10)
KINDS = (
    "", "an all-reduce", "an all-gather", "a reduce-scatter", "an all-to-all", "a broadcast", "an exchange between stages", "an agreement",
    "a checkpoint's collective", "the wait for rank 0's plan",
)  # fmt: skip
UNTIMED = (CHECKPOINT, PLANNING)  # as long as they take: of rank 0's search, of a slow disk
EVERYONE = "_".join(AXES)  # the axis of all ranks, as Mesh.everyone is named
_AXES = (
    "", *AXES, *levels_of(BATCH), *("_".join(names) for names in joint([row.name for row in axes_over("operators")])), EVERYONE,
)  # fmt: skip
_AXIS = {name: number for number, name in enumerate(_AXES)}

_told: Callable[[str, int], None] | None = None
_computes = False  # whether a call, or its backward pass, is under way
_over = ""  # why this rank takes part in no collective any more
_now: memoryview = memoryview(bytearray(_SIZE)).cast("q")  # of nobody, until the rank has joined others
_gradients = [0, 0]  # the call behind which this rank was given gradients last, and how many before them


def entered(kind: int, axis: str = EVERYONE) -> None:
    """This rank begins to wait for a collective over an axis, by default over all ranks."""
    if torch.compiler.is_compiling():
        return
    if _over:
        raise LaunchError(_over)
    _now[_AT] = kind * len(_AXES) + _AXIS.get(axis, 0)
    _now[_COUNT] += 1
    if _told is not None:
        _told("entered", _now[_AT])


def left() -> None:
    """The collective is over."""
    if not torch.compiler.is_compiling():
        _now[_AT] = 0
        if _told is not None:
            _told("left", 0)


def collective(number: int) -> tuple[int, str]:
    """The kind of collective and the axis that `telling` was told of."""
    kind, axis = divmod(number, len(_AXES))
    return kind, _AXES[axis]


def line(depth: int) -> int:
    """The line from which the caller's caller, or one further up, was called."""
    return 0 if torch.compiler.is_compiling() else sys._getframe(depth + 1).f_lineno


def note_line(number: int) -> None:
    """The line of the emitted module for which the next collectives are."""
    if not torch.compiler.is_compiling():
        _now[_LINE] = number


def step(number: int) -> None:
    """The call of the model that begins."""
    _now[_STEP], _now[_BEFORE], _now[_GIVEN] = number, _now[_GIVEN], 0
    _now[_BEGUN] += 1


def given(number: int) -> None:
    """What the call is of, as a number: shapes and modes, which must be the same on all ranks."""
    _now[_GIVEN] = number


def decided(number: int, *, again: bool) -> int:
    """What the call runs: a form that is there, or one that is captured again; number: as of `given`. A number for both, larger for every
    later call: ranks that decide alike note the same."""
    _now[_CALLS] += 1
    _now[_DECIDED] = _now[_CALLS] << 33 | again << 32 | number
    return _now[_DECIDED]


def agreed() -> None:
    """All other ranks have been seen to decide what this one has, for the call of which `decided` was called last."""
    _now[_AGREED] = _now[_CALLS]


def calls() -> int:
    """How often `step` or `decided` was called: the larger number."""
    return max(_now[_BEGUN], _now[_CALLS])


def count_from(number: int) -> None:
    """The number of calls from which the next ones are counted: as many on every rank, and no fewer than on any before."""
    _now[_BEGUN] = _now[_CALLS] = number


def reads(of: int) -> Reads:
    """Something whole is about to be read or written by all ranks. of: which, and how, as a number from 0 to below 2**32."""
    count = (_now[_READS] >> 32) + 1
    _now[_READS] = count << 32 | of  # both at once, for others to read
    return Reads(count=count, of=of, calls=_now[_BEGUN])


def wrote(what: int, total: float) -> Wrote:
    """What this rank has written to parameters before the call that begins. what: as a number below 2**32."""
    _now[_WROTE] = 0  # the total is of no call
    (_now[_TOTAL],) = struct.unpack("q", struct.pack("d", total))
    _now[_WROTE] = _now[_BEGUN] << 32 | what
    return Wrote(call=_now[_BEGUN], what=what, total=total)


def gradients() -> int:
    """The number of the gradients that this rank is given now, in the order of calls: several calls may go backward behind the last one."""
    call = calls()
    _gradients[:] = call, _gradients[1] + 1 if _gradients[0] == call else 0
    return call * _PASSES + min(_gradients[1], _PASSES - 1)


def given_in(number: int, what: int) -> int:
    """The last call that had begun when this rank was given what has this number."""
    return number // _PASSES if what == GRADIENTS_OF else number


def was_given(call: int, what: int, exact: int, rounded: float) -> Batch:
    """Which batch (what: BATCH_OF) this rank was given in one of its last calls, or which gradients (GRADIENTS_OF; call: their number, see
    `gradients`), as two numbers: one that is equal for equal ones, and one within rounding."""
    at = _given_at(call, what)
    _now[at] = 0  # the others are of no call
    _now[at + 1] = exact
    (_now[at + 2],) = struct.unpack("q", struct.pack("d", rounded))
    _now[at] = call
    return Batch(call=call, what=what, exact=exact, rounded=rounded)


def _given_at(call: int, what: int) -> int:
    place = call // _PASSES + call % _PASSES if what == GRADIENTS_OF else call
    return _GIVEN_LAST + (place % _LAST * 2 + what) * 3


def count() -> int:
    """How many collectives this rank has begun."""
    return _now[_COUNT]


def broke(collectives: int) -> int:
    """An error ends the call that was begun last, in this phase, after so many collectives of it. A number for all: see `call_of`."""
    at = _BROKE + _now[_BEGUN] % 2
    _now[at] = _now[_BEGUN] << 32 | _now[_PHASE] << 28 | collectives + 1
    return _now[at]


def call_of(broken: int) -> int:
    """The number of the call that was broken off."""
    return broken >> 32


def end_talks(why: str) -> None:
    """From now on `entered` raises LaunchError: other ranks would take what this one sends for something else. '': not any more."""
    global _over
    _over = why


def phase(number: int) -> None:
    global _computes
    _computes = number in (FORWARD, BACKWARD)
    _now[_PHASE], _now[_LINE] = number, 0
    if _told is not None and not torch.compiler.is_compiling():
        _told("phase", number)


def computes() -> bool:
    """Whether a call, or its backward pass, is under way."""
    return _computes


def fails() -> None:
    """What is under way ends in an error. The phase stays that in which it was, for those who ask."""
    global _computes
    _computes = False


@contextlib.contextmanager
def telling(told: Callable[[str, int], None]) -> Iterator[None]:
    """While it is open: each phase ('phase', number), and each collective that is waited for ('entered', its kind; 'left', 0)."""
    global _told
    before, _told = _told, told
    try:
        yield
    finally:
        _told = before


def saving_beside(what: int) -> None:
    """What a save that goes on beside training does: WORKS, WAITS; 0: there is none."""
    _now[_BESIDE] = what


def saves_beside() -> bool:
    """Whether a save goes on beside training."""
    return _now[_BESIDE] != 0


@contextlib.contextmanager
def doing(number: int, kind: int = 0) -> Iterator[None]:
    """A phase for the time of a block, and perhaps a collective that all of it is; after an error both stay noted."""
    before = _now[_PHASE]
    phase(number)
    if kind:
        entered(kind)
    try:
        yield
    except AutoparError:  # an error on all ranks alike: none has gone
        left()
        phase(before)
        raise
    if kind:
        left()
    phase(before)


def now() -> int:
    """The phase."""
    return _now[_PHASE]


def inside() -> bool:
    """Whether a collective is being waited for, or has ended in an error."""
    return _now[_AT] != 0


def write_to(view: memoryview) -> None:
    """From now on note there, with what has been noted."""
    global _now
    view[_PID + 1 : _NUMBERS] = _now[_PID + 1 : _NUMBERS]
    _now = view


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """How often a rank has come to read or write something whole, which it was last (see `reads`), and how many calls it had begun."""

    count: int
    of: int
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrote:
    """What a rank has written to parameters before a call, of this number: to which, in which way, and a total of numbers (see `wrote`)."""

    call: int
    what: int
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Which batch, or gradients, a rank was given in a call (see `was_given`)."""

    call: int
    what: int
    exact: int
    rounded: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A record as it was read. waits: whether its watchdog has found that it waits too long. beside: what a save beside training did; 0:
    there was none. decided: see `decided`. agreed: the number of the last call on which the rank has seen all agree. given: numbers for
    the shapes of the call before this step's, and of this; 0 where there is none. begun: the number of the last call of a module. broke:
    see `broke`, of the last two calls that were broken off; 0 where there is none. text: how it ended, or where it is."""

    pid: int
    state: int
    step: int
    phase: int
    at: int
    line: int
    count: int
    beat: int
    waits: bool
    beside: int
    decided: int
    agreed: int
    given: tuple[int, int]
    begun: int
    broke: tuple[int, int]
    text: str

    @staticmethod
    def of(data: bytes) -> Seen:
        numbers = memoryview(data[: 8 * _NUMBERS]).cast("q").tolist()
        length = min(max(numbers[_LENGTH], 0), _SIZE - _TEXT)
        text = data[_TEXT : _TEXT + length].decode(errors="replace")
        pid, state, at_step, at_phase, at, at_line, count, beat, waits = numbers[:9]
        return Seen(
            pid=pid, state=state, step=at_step, phase=at_phase, at=at, line=at_line, count=count, beat=beat, waits=bool(waits),
            beside=numbers[_BESIDE], decided=numbers[_DECIDED], agreed=numbers[_AGREED], given=(numbers[_BEFORE], numbers[_GIVEN]),
            begun=numbers[_BEGUN], broke=(numbers[_BROKE], numbers[_BROKE_ODD]), text=text,
        )  # fmt: skip

    @property
    def kind(self) -> int:
        return self.at // len(_AXES)

    @property
    def collective(self) -> str:
        """'an all-reduce over dp, line 83 of the emitted module'; '' outside of any."""
        if not self.at:
            return ""
        axis = _AXES[self.at % len(_AXES)]
        over = {"": "", EVERYONE: " over all ranks"}.get(axis, f" over {axis}")
        where = f", line {self.line} of the emitted module" if self.line and self.kind < EXCHANGE else ""
        return f"{KINDS[self.kind] if self.kind < len(KINDS) else 'a collective'}{over}{where}"

    @property
    def where(self) -> str:
        """'in step 12, backward, in an all-reduce over dp, line 83 of the emitted module'."""
        steps = f"in step {self.step}, " if self.step and self.phase in (FORWARD, BACKWARD) else f"after step {self.step}, "
        what = PHASES[self.phase] if self.phase < len(PHASES) else ""
        beside = ("", ", saving a checkpoint beside", ", saving a checkpoint beside, for which it waits for other ranks")[self.beside]
        return f"{steps if self.step else ''}{what}{f', in {self.collective}' if self.at else ''}{beside}"


class Own:
    """This rank's record, held until the process ends or `close`."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, _SIZE)
        self._memory = mmap.mmap(self._file, _SIZE)
        self._view = memoryview(self._memory).cast("q")
        self._view[_PID] = os.getpid()
        write_to(self._view)

    def mark(self, state: int, text: str = "") -> None:
        """How the rank ends, once."""
        if self._view[_STATE] == RUNNING:
            self.tell(text)
            self._view[_STATE] = state

    def tell(self, text: str) -> None:
        data = text.encode()[: _SIZE - _TEXT]
        self._memory[_TEXT : _TEXT + len(data)] = data
        self._view[_LENGTH] = len(data)

    def beats(self, *, waits: bool) -> None:
        self._view[_BEAT] += 1
        self._view[_WAITS] = waits

    def data(self) -> bytes:
        return self._memory[:]

    def seen(self) -> Seen:
        return Seen.of(self.data())

    def close(self) -> None:
        """Let go of the lock: the state is what others read from now on."""
        write_to(memoryview(bytearray(_SIZE)).cast("q"))
        fcntl.lockf(self._file, fcntl.LOCK_UN)


class Other:
    """The record of another rank of this machine."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def alive(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        return False

    def seen(self) -> Seen:
        return Seen.of(os.pread(self._file, _SIZE, 0).ljust(_SIZE, b"\0"))

    def reads(self) -> Reads:
        numbers = memoryview(os.pread(self._file, 8 * _NUMBERS, 0).ljust(8 * _NUMBERS, b"\0")).cast("q")
        return Reads(count=numbers[_READS] >> 32, of=numbers[_READS] & 0xFFFFFFFF, calls=numbers[_BEGUN])

    def wrote(self) -> Wrote:
        """As `wrote`, of this rank's last call."""
        of, total = struct.unpack("qd", os.pread(self._file, 16, 8 * _WROTE).ljust(16, b"\0"))
        return Wrote(call=of >> 32, what=of & 0xFFFFFFFF, total=total)

    def batch(self, call: int, what: int) -> Batch:
        """As `was_given`, of this call or of another one."""
        of, exact, rounded = struct.unpack("qqd", os.pread(self._file, 24, 8 * _given_at(call, what)).ljust(24, b"\0"))
        return Batch(call=of, what=what, exact=exact, rounded=rounded)

    def close(self) -> None:
        os.close(self._file)
