"""Amounts as people read them: bytes, seconds and counts to text, columns to a table."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["bytes_text", "count_text", "figures", "in_one_unit", "in_own_unit", "seconds_text", "table"]

UNITS = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


def bytes_text(amount: float) -> str:
    """Bytes in the largest binary unit that keeps them above one: '1.50 GiB', '512 B'."""
    for unit, factor in UNITS:
        if abs(amount) >= factor:
            return f"{amount / factor:.2f} {unit}"
    return f"{amount:.0f} B"


def in_one_unit(*amounts: float) -> tuple[list[str], str]:
    """Bytes in the unit of the largest of them, three figures each: (['61.2', '80'], 'GiB')."""
    unit, factor = next(((u, f) for u, f in UNITS if max(map(abs, amounts)) >= f), ("B", 1))
    return [figures(amount / factor) for amount in amounts], unit


def in_own_unit(amount: float) -> tuple[str, str]:
    """('61.2', 'GiB')."""
    (text,), unit = in_one_unit(amount)
    return text, unit


def figures(amount: float) -> str:
    """With three figures, and never fewer than those before the point: '0.52', '61.2', '80', '1,234'."""
    return f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:.3g}"


def seconds_text(amount: float) -> str:
    """Seconds in the unit that keeps them above one: '1.24 s', '12.4 ms', '3.10 us'."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(amount) >= factor:
            return f"{figures(amount / factor)} {unit}"
    return f"{figures(amount / 1e-6)} us" if amount else "0 s"


def count_text(amount: float) -> str:
    """A count with three figures: '10.7M', '8.03B', '950'."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(amount) >= factor:
            return f"{figures(amount / factor)}{unit}"
    return figures(amount)


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ", *, ruled: bool = True) -> str:
    """Columns separated by two blanks; a column of nothing but figures and amounts is set flush right. ruled: a line under the headings;
    else none, and the first of them, which is that of the whole, stands at the margin."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(heading), *(len(row[i]) for row in cells)) if cells else len(heading) for i, heading in enumerate(headings)]
    if not ruled:
        widths[0] = max(len(headings[0]) - len(indent), *(len(row[0]) for row in cells))
    right = [bool(cells) and all(re.match(r"[-+]?[0-9.]|-$|$", row[i]) for row in cells) for i in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        return (indent + "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right))).rstrip()

    if not ruled:
        head = headings[0] + line(["", *headings[1:]])[len(headings[0]) :]
        return "\n".join([*([head] if head else []), *map(line, cells)])
    return "\n".join(map(line, [list(headings), ["-" * w for w in widths], *cells]))
