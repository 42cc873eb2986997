"""How a choice is said: 'tp 2, dp 4, pipeline of 2, ZeRO-1, 4 micro-batches'. Reports, refusals and notes all say it so."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.axes import AXES, BATCH
from cost_models.rests import Rest

__all__ = ["axis_words", "choice_words"]


def axis_words(axis: str, n: int) -> str:
    """'tp 8', 'pipeline of 2'."""
    return f"pipeline of {n}" if AXES[axis].divides == "layers" else f"{axis} {n}"


def choice_words(sizes: Mapping[str, int], rest: Rest, shard: int, micro_batches: int, virtual_stages: int = 1) -> str:
    """sizes: of the mesh by axis, outermost first. What is as if there were no choice (one rank, one micro-batch) is left out."""
    said = [axis_words(axis, n) for axis, n in reversed(list(sizes.items())) if n > 1] or ["one GPU"]
    ranks = sizes.get(BATCH, 1)
    if ranks > 1:
        said.append(rest.short + (f" of {shard}" if rest.over == "node" and shard > 1 else ""))
    if micro_batches > 1:
        said.append(f"{micro_batches:,} micro-batches")
    if virtual_stages > 1:
        said.append(f"{virtual_stages} stages on each pipeline rank")
    return ", ".join(said)
