"""What differs between two plans: `autopar diff a.json b.json`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.report.units import table

__all__ = ["Difference", "differences", "diff_text"]

Difference = tuple[str, Any, Any]  # path in the plan, value in the first, value in the second
ABSENT = "-"


def differences(first: object, second: object, path: str = "") -> Iterator[Difference]:
    """Every place where two plans, as JSON values, differ: ('stages[1].forward_s', 0.1, 0.2)."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(k for k in second if k not in first)]:
            yield from differences(first.get(key, ABSENT), second.get(key, ABSENT), f"{path}.{key}" if path else str(key))
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        for i in range(max(len(first), len(second))):
            a = first[i] if i < len(first) else ABSENT
            b = second[i] if i < len(second) else ABSENT
            yield from differences(a, b, f"{path}[{i}]")
    elif first != second:
        yield path, first, second


def diff_text(found: list[Difference], names: tuple[str, str]) -> str:
    """A table of the differences, or a line that says there is none."""
    if not found:
        return f"{names[0]} and {names[1]} are the same plan"
    return table(("where", *names), [(path, _short(a), _short(b)) for path, a, b in found], indent="")


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 48 else text[:45] + "..."
