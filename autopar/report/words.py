"""What plans are made of, in words that a reader of the field brings along."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.report.units import figures, seconds_text
from cost_models.rests import rest_of

__all__ = ["MEMORY_TERMS", "counted", "few", "ranges", "rest_words", "scale_text", "share_text"]

MEMORY_TERMS = {  # field of MemoryPlan without its unit -> heading of its column
    "parameters": "parameters", "gradients": "gradients", "optimizer_states": "optimizer", "saved_activations": "activations",
    "batch": "batch", "largest_temporary": "temporary", "communication_buffers": "buffers", "framework_context": "context",
    "allocator_slack": "slack",
}  # fmt: skip


def counted(amount: int, noun: str) -> str:
    """'1 GPU', '1,024 GPUs'."""
    return f"{amount:,} {noun}" + ("" if amount == 1 else "es" if noun.endswith("ch") else "s")


def share_text(share: float) -> str:
    """A share of a whole in per cent: '41%', '0.4%'."""
    return f"{share:.0%}" if share >= 0.095 or not share else f"{share:.1%}" if share >= 0.001 else "under 0.1%"


def scale_text(low_s: float, high_s: float) -> str:
    """An interval in one unit: '1.8-2.1 s'."""
    unit, factor = ("s", 1.0) if high_s >= 1 else ("ms", 1e-3) if high_s >= 1e-3 else ("us", 1e-6)
    if high_s <= 0:
        return seconds_text(high_s)
    return f"{figures(low_s / factor)}-{figures(high_s / factor)} {unit}"


def rest_words(rest: str, ranks: int, shard: int) -> str:
    """How parameters, gradients and optimizer states rest, in a sentence."""
    row = rest_of(rest)
    if not row.states:
        return f"none: parameters, gradients, optimizer states {row.title}"
    return row.title + (f", groups of {shard} of {ranks} ranks" if 1 < shard < ranks else "")


def few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f", ... (+{len(names) - most})" if len(names) > most else "")


def ranges(paths: Iterable[str]) -> str:
    """['h.0', 'h.1', 'h.2', 'ln'] to 'h.0-2, ln': consecutive module paths that differ in their last figure."""
    shown: list[tuple[str, int, int] | str] = []
    for path in paths:
        prefix, _, last = path.rpartition(".")
        previous = shown[-1] if shown else None
        if not last.isdecimal():
            shown.append(path)
        elif isinstance(previous, tuple) and previous[0] == prefix and previous[2] + 1 == int(last):
            shown[-1] = (prefix, previous[1], int(last))
        else:
            shown.append((prefix, int(last), int(last)))

    def written(item: tuple[str, int, int] | str) -> str:
        if isinstance(item, str):
            return item
        prefix, first, last = item
        return (f"{prefix}." if prefix else "") + f"{first}" + (f"-{last}" if last > first else "")

    return ", ".join(map(written, shown))
