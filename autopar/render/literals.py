"""Python literals of plan data, and statements laid out within the line length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from autopar.errors import RenderError
from autopar.ir import Ref

__all__ = ["INDENT", "WIDTH", "Code", "filled", "literal", "statement", "string"]

WIDTH = 120  # columns of the emitted file
INDENT = "    "


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """An expression: head + items joined with commas + tail; items may be spread over lines. Without items: head alone."""

    head: str
    items: tuple[str, ...] = ()
    tail: str = ""

    def __str__(self) -> str:
        return self.head + ", ".join(self.items) + self.tail


def string(text: str) -> str:
    """A string literal in double quotes where that needs no escapes; always ASCII, always one line."""
    shown = ascii(text)
    return f'"{shown[1:-1]}"' if shown[0] == "'" and '"' not in shown else shown


def literal(value: object, ref: Callable[[str], str] | None = None) -> str:
    """The Python source of an argument or a manifest value; `ref` gives the source of a Ref.

    Raises RenderError for what has no exact literal.
    """
    if isinstance(value, Ref):
        if ref is None:
            raise RenderError(f"a reference to {value.name!r} stands where only literals can")
        return ref(value.name)
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, str):
        return string(value)
    if isinstance(value, torch.dtype | torch.memory_format):
        return str(value)
    if isinstance(value, tuple):
        inner = ", ".join(literal(v, ref) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(literal(v, ref) for v in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k, ref)}: {literal(v, ref)}" for k, v in value.items()) + "}"
    raise RenderError(f"a value of type {type(value).__name__} has no literal form: {value!r}")


def filled(items: Sequence[str], depth: int) -> list[str]:
    """`item,` after `item,` on as few lines as they need, inside of brackets; an item too long for a line is broken too."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 2 <= WIDTH:
            lines[-1] += f" {item},"
        elif len(INDENT) * depth + len(item) + 1 <= WIDTH:
            lines.append(f"{INDENT * depth}{item},")
        else:
            first, *rest = _broken(f"{item},")
            lines.append(INDENT * depth + first)
            for part in rest:
                if len(lines[-1]) + len(part) + 1 <= WIDTH:
                    lines[-1] += f" {part}"
                else:
                    lines.append(INDENT * (depth + 1) + part)
    return [line.rstrip() for line in lines]


def _broken(text: str) -> list[str]:
    """The text cut behind every comma that is followed by a blank and not in a string."""
    parts, start, quote, escaped = [], 0, "", False
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote and not escaped else quote
            escaped = c == "\\" and not escaped
        elif c in "\"'":
            quote, escaped = c, False
        elif c == "," and text[i + 1 : i + 2] == " ":
            parts.append(text[start : i + 1])
            start = i + 2
    return [*parts, text[start:]]


def statement(targets: str, code: Code, comment: str = "", depth: int = 1) -> list[str]:
    """The lines of `targets = code  # comment` (targets '': an expression statement) at an indentation of depth levels."""
    pad = INDENT * depth
    note = f"  # {comment}" if comment else ""
    start = f"{pad}{targets} = " if targets else pad
    before: list[str] = []
    if len(start) > WIDTH // 2:
        before, start = [f"{pad}(", *filled(_names(targets), depth + 1)], f"{pad}) = "
    line = f"{start}{code}"
    if len(line + note) <= WIDTH:
        return [*before, line + note]
    if not code.items:
        if len(line) <= WIDTH:
            return [f"{pad}# {comment}", *before, line]
        return [*before, f"{start}({note}", f"{pad}{INDENT}{code}", f"{pad})"]
    body = filled(code.items, depth + 1)
    opening = f"{start}{code.head}"
    first = [*before, opening + note] if len(opening + note) <= WIDTH else [f"{pad}# {comment}", *before, opening]
    return [*first, *body, f"{pad}{code.tail}"]


def _names(targets: str) -> list[str]:
    return targets.strip("(,)").split(", ")
