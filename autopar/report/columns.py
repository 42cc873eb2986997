"""Text of at most WIDTH columns: paragraphs, lists, names with what is said of them, tables with a long last column, bars."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from autopar.report.units import table

__all__ = ["WIDTH", "bar", "cut", "last_cut", "last_wrapped", "listed", "pairs", "with_beneath", "wrapped"]

WIDTH = 100
LEAST = 15  # columns that are left to a last column in any case


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def listed(heading: str, lines: Sequence[str]) -> str:
    return "\n".join([heading, *(wrapped(line, "    ", "  - ") for line in lines)]) if lines else ""


def pairs(lines: Sequence[tuple[str, str]], indent: str = "  ") -> str:
    """Names and what is said of each; of several of one name the first alone has it."""
    width = max(len(name) for name, _ in lines)
    said = [name if k == 0 or name != lines[k - 1][0] else "" for k, (name, _) in enumerate(lines)]
    rest = " " * (len(indent) + width + 2)
    return "\n".join(wrapped(text, rest, f"{indent}{name:<{width}}  ") for name, (_, text) in zip(said, lines, strict=True))


def last_wrapped(headings: Sequence[str], rows: Sequence[Sequence[object]], *, ruled: bool = True) -> str:
    """A table whose last column is broken into lines."""
    cells = [[str(cell) for cell in row] for row in rows]
    left = max(LEAST, WIDTH - 2 - sum(max(len(h), *(len(row[i]) for row in cells)) + 2 for i, h in enumerate(headings[:-1])))
    broken = []
    for row in cells:
        lines = textwrap.wrap(row[-1], left, break_long_words=False, break_on_hyphens=False) or [""]
        broken += [[*row[:-1], lines[0]], *([*[""] * (len(row) - 1), line] for line in lines[1:])]
    return table(headings, broken, ruled=ruled)


def with_beneath(headings: Sequence[str], rows: Sequence[Sequence[object]], said: Sequence[str]) -> str:
    """A table with what is said of each row on lines of their own beneath it ('': nothing)."""
    first, *others = table(headings, rows, ruled=False).splitlines()
    lines = [part for row, text in zip(others, said, strict=True) for part in (row, wrapped(text, " " * 6, " " * 6))]
    return "\n".join(filter(None, [first, *lines]))


def last_cut(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose last column ends at a comma where the line would be too long."""
    left = WIDTH - 2 - sum(max(len(h), *(len(row[i]) for row in rows)) + 2 for i, h in enumerate(headings[:-1]))
    return table(headings, [(*row[:-1], cut(row[-1], left)) for row in rows], ruled=False)


def cut(text: str, width: int) -> str:
    """Of at most so many columns, ended at a comma."""
    if len(text) <= width:
        return text
    whole = text[: width - 3].rpartition(", ")[0]
    return (f"{whole}, " if whole else text[: width - 3]) + "..."


def bar(share: float, width: int) -> str:
    """'######..........': a share of a whole."""
    full = min(width, max(1 if share > 0 else 0, round(share * width)))
    return "#" * full + "." * (width - full)

