"""Amounts as people read them: bytes, seconds and counts to text, columns to a table."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["bytes_text", "count_text", "seconds_text", "table"]

def bytes_text(amount: float) -> str:
    """Bytes in the largest binary unit that keeps them above one: '1.50 GiB', '512 B'."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(amount) >= factor:
            return f"{amount / factor:.2f} {unit}"
    return f"{amount:.0f} B"


def seconds_text(amount: float) -> str:
    """Seconds in the unit that keeps them above one: '1.24 s', '12.4 ms', '3.10 us'."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(amount) >= factor:
            return f"{amount / factor:.3g} {unit}" if abs(amount / factor) < 1000 else f"{amount / factor:,.0f} {unit}"
    return f"{amount / 1e-6:.3g} us" if amount else "0 s"


def count_text(amount: float) -> str:
    """A count with three figures: '10.7M', '8.03B', '950'."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(amount) >= factor:
            return f"{amount / factor:.3g}{unit}"
    return f"{amount:.3g}"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Columns separated by two blanks; a column of nothing but figures and amounts is set flush right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(heading), *(len(row[i]) for row in cells)) if cells else len(heading) for i, heading in enumerate(headings)]
    right = [bool(cells) and all(re.match(r"[-+]?[0-9.]|-$|$", row[i]) for row in cells) for i in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        return (indent + "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right))).rstrip()

    return "\n".join(map(line, [list(headings), ["-" * w for w in widths], *cells]))
