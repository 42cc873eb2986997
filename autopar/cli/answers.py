"""What goes to standard output: the answer alone, as text or as one line of JSON."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from autopar.cli.application import UsageError
from autopar.report.columns import WIDTH

__all__ = ["answer", "answers_only", "folded", "json_line"]


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


def folded(text: str) -> str:
    """Of at most WIDTH columns; source lines and commands, which are set in by four blanks or more, as they are."""
    lines = []
    for line in text.splitlines():
        inner = line.lstrip(" -")
        first = line[: len(line) - len(inner)]
        as_it_is = len(line) <= WIDTH or line.startswith("    ")
        lines += [line] if as_it_is else textwrap.wrap(
            inner, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
    return "\n".join(lines)


def json_line(value: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(value).decode()  # json.dumps would write NaN, which is not JSON
    except UnicodeEncodeError:
        return msgspec.json.encode(_as_text(value)).decode()


def _as_text(value: Any) -> Any:
    """With names of files that are no text as Python writes them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(one) for key, one in value.items()}
    return [_as_text(one) for one in value] if isinstance(value, list | tuple) else value
