"""What goes to standard output: the answer alone, as text or as one line of JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from autopar.cli.application import UsageError

__all__ = ["answer", "answers_only", "json_line"]


@contextlib.contextmanager
def answers_only(as_json: bool) -> Iterator[None]:
    """While standard output is for the answer alone, what the model and the passes print goes to standard error. The user's code, which
    is run inside, does not decide the exit code."""
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            yield
    except SystemExit as stop:
        raise UsageError(f"the model's own code ended the program, by sys.exit({'' if stop.code is None else repr(stop.code)})") from stop


def answer(value: dict[str, Any]) -> None:
    print(json_line(value), flush=True)


def json_line(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()  # json.dumps would write NaN, which is not JSON
