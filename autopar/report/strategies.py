"""The strategies of a plan in words: which kinds of operators are split, along what."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from autopar.axes import BATCH
from autopar.ir import Strategy
from autopar.planner.plan import AxisPlan, parse_strategy

__all__ = ["Split", "kind_of", "leaves_of", "splits_of", "words_of"]

# The kind of an operator -> (operand, dim) -> what is split when that operand is S on that dim. The first that fits is said.
_SAMPLES = {(0, 0): "samples"}
_WORDS: dict[str, dict[tuple[int, int], str]] = {
    "linear": {(1, 0): "output features", (1, 1): "input features (a sum over ranks)", **_SAMPLES},
    "conv": {(1, 0): "output channels", (1, 1): "input channels (a sum over ranks)", **_SAMPLES},
    "embedding": {(0, 0): "vocabulary", (0, 1): "features", (1, 0): "samples"},
    "scaled_dot_product_attention": {(0, 1): "heads", (0, 2): "queries", **_SAMPLES},
    "cross_entropy": {(0, 1): "classes (vocabulary)", **_SAMPLES},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Operators with one strategy on one axis. operators: kind -> how many (of a repeated block those of one instance)."""

    axis: str
    n: int
    split: str
    strategy: str
    operators: dict[str, int]

    @property
    def count(self) -> int:
        return sum(self.operators.values())


def splits_of(axis: str, made: AxisPlan) -> list[Split]:
    """Grouped by strategy and by what it splits; the largest groups first, what is not split last."""
    groups: dict[tuple[str, str], Counter[str]] = {}
    for name, text in made.ops.items():
        kind = kind_of(name)
        groups.setdefault((words_of(axis, kind, parse_strategy(text)), text), Counter())[kind] += 1
    found = [
        Split(axis=axis, n=made.n, split=split, strategy=text, operators=dict(kinds.most_common()))
        for (split, text), kinds in groups.items()
    ]
    return sorted(found, key=lambda s: (s.split.startswith("not split"), -s.count, s.strategy))


def leaves_of(made: AxisPlan) -> dict[str, list[str]]:
    """Layout -> the parameters, buffers and inputs that rest so."""
    leaves: dict[str, list[str]] = {}
    for name, text in made.leaves.items():
        leaves.setdefault(text, []).append(name)
    return leaves


def kind_of(name: str) -> str:
    """'linear_12' and 'linear' to 'linear'."""
    return re.sub(r"_\d+$", "", name)


def words_of(axis: str, kind: str, strategy: Strategy) -> str:
    if not strategy.splits_work:
        return "not split"
    words = next((w for k, w in _WORDS.items() if kind == k or (k == "conv" and kind.startswith("conv"))), {})
    for (operand, dim), said in words.items():
        if operand < len(strategy.inputs) and strategy.inputs[operand].is_shard and strategy.inputs[operand].dim == dim:
            return said
    dims = sorted({x.dim for x in (*strategy.inputs, *strategy.outputs) if x.is_shard})
    if axis == BATCH and dims == [0]:
        return "samples"
    return "dim " + ", ".join(map(str, dims))
