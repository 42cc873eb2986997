"""What code of a model writes to standard output, to standard error and to logs. Capture runs it several times, and says nothing of that; a
call of the parallel module, which does not run it, says what the original says in a call."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.capture.reach import is_foreign
from autopar.capture.source import running_line
from autopar.errors import CaptureError
from autopar.ir import Program
from autopar.run.region import REGION

__all__ = ["Logged", "Said", "Sayings", "Written", "heard", "sayings_of"]

_WRITES = frozenset("awx+")  # in the mode of a file


@dataclass(frozen=True, slots=True)
class Written:
    """Text on standard output, or on standard error."""

    text: str
    stream: str = "stdout"

    def again(self) -> None:
        """Write it."""
        getattr(sys, self.stream).write(self.text)


@dataclass(frozen=True, slots=True)
class Logged:
    """A record of a logger, with its message as it is shown. line: where in which file, and in which function, it was made."""

    logger: str
    level: int
    message: str
    line: tuple[str, int, str]

    def again(self) -> None:
        """Give it to the logger."""
        logger = logging.getLogger(self.logger)
        file, number, function = self.line
        if logger.isEnabledFor(self.level):
            logger.handle(logger.makeRecord(self.logger, self.level, file, number, self.message, (), None, function))


Said = Written | Logged


@dataclass(slots=True)
class Sayings:
    """What calls say: the next one, and all after it."""

    first: Sequence[Said] = ()
    later: Sequence[Said] = ()
    _called: bool = field(default=False, init=False)

    def again(self) -> None:
        """A call has been made, which says what the original's would."""
        said, self._called = (self.later if self._called else self.first), True
        for one in said:
            one.again()


class _Heard:
    """In the place of a standard stream: keeps what the thread that has put it there writes, but for warnings."""

    def __init__(self, name: str, said: list[Said]) -> None:
        self._stream, self._name, self._said, self._thread = getattr(sys, name), name, said, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread or sys._getframe(1).f_globals.get("__name__") == "warnings":
            return int(self._stream.write(text))
        last = self._said[-1] if self._said else None
        if isinstance(last, Written) and last.stream == self._name:
            self._said[-1] = Written(last.text + text, self._name)
        else:
            self._said.append(Written(text, self._name))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def sayings_of(program: Program, shows: str, said: Sequence[Sequence[Said]]) -> Sayings:
    """What calls of a program are to say. shows: a line that makes text of a tensor, if there is one. said: by the model in two calls, if
    it was called. CaptureError for values of tensors, which no call of the program shows."""
    if not any(said):
        return Sayings()
    if shows:
        raise CaptureError(
            f"the forward of {program.name} prints or logs a tensor, whose values are others in every call\n  at {shows}\n  what to do: "
            f"return it (with outputs='all'), or keep it in an attribute, and print it in the loop"
        )
    if any(op.target == REGION for op in program.ops):
        warnings.warn(
            f"{program.name} prints or logs in its forward, of which the parallel module runs parts alone as they are written: what others "
            f"say is left out. Print in the loop instead",
            stacklevel=2,
        )
        return Sayings()
    return Sayings(*said)


@contextlib.contextmanager
def _no_files_written() -> Iterator[None]:
    """Inside, CaptureError where code of the model, in this thread, opens a file to write to it: no call of a program would."""
    thread, real = threading.get_ident(), builtins.open

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        asker = str(sys._getframe(1).f_globals.get("__name__", ""))
        if _WRITES & set(mode) and threading.get_ident() == thread and (asker == "pathlib" or not is_foreign(asker)):
            raise CaptureError(
                f"the forward writes to a file, {file}, which a graph does not\n  at {running_line()}\n  what to do: return what is to be "
                f"written (with outputs='all'), or keep it in an attribute, and write it in the loop"
            )
        return real(file, mode, *args, **options)

    builtins.open = io.open = opened
    try:
        yield
    finally:
        builtins.open = io.open = real


@contextlib.contextmanager
def heard() -> Iterator[list[Said]]:
    """Inside, what this thread prints and logs is kept in the list, in order, and not said; CaptureError where it writes to a file."""
    said: list[Said] = []
    thread, handle = threading.get_ident(), logging.Logger.handle

    def kept(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != thread or logger.name.partition(".")[0] in ("torch", "autopar"):
            handle(logger, record)
        else:
            said.append(Logged(logger.name, record.levelno, record.getMessage(), (record.pathname, record.lineno, record.funcName)))

    logging.Logger.handle = kept  # type: ignore[assignment, method-assign]
    try:
        out, errors = _Heard("stdout", said), _Heard("stderr", said)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), _no_files_written():
            yield said
    finally:
        logging.Logger.handle = handle  # type: ignore[method-assign]
