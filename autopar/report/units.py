"""Amounts as people write and read them: bytes and seconds to text, text to bytes, columns to a table."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["bytes_text", "count_text", "parse_bytes", "seconds_text", "table"]

BYTES = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


def parse_bytes(text: str) -> int:
    """'80GiB', '80 GB', '512M' (binary) or '80e9' to bytes. ValueError, with an example, for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in BYTES.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"not an amount of memory: {text!r}; write it as 80GiB, 80GB or 512MiB")
    amount = int(float(match[1]) * units[match[2].lower()])
    if amount == 0:
        raise ValueError(f"an amount of memory is at least a byte: {text!r}")
    return amount


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
