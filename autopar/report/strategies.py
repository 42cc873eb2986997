"""The strategies of a plan in words: which kinds of operators are split, along what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.axes import BATCH
from autopar.ir import Strategy, TensorType
from autopar.planner.plan import AxisPlan, parse_strategy

__all__ = [
    "Split", "is_unnamed", "kind_of", "leaves_of", "operator_of", "shape_of", "splits_of", "undivided_words", "without_a_name", "words_of",
]  # fmt: skip

Shapes = Mapping[str, Sequence[int]]
UNNAMED = "dim "  # where nothing is known of what is split but its place, counted from 0
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")

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


def splits_of(axis: str, made: AxisPlan, shapes: Shapes = MappingProxyType({})) -> list[Split]:
    """Grouped by strategy and by what it splits; the largest groups first, what is not split last. shapes: of planner.plan.Account."""
    groups: dict[tuple[str, str], Counter[str]] = {}
    for name, text in made.ops.items():
        kind = kind_of(name)
        groups.setdefault((words_of(axis, kind, parse_strategy(text), shapes.get(name, ())), text), Counter())[kind] += 1
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


def operator_of(target: str) -> str:
    """'aten.add.Tensor' to 'add', 'mine.scan.default' to 'mine::scan'."""
    parts = target.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else "::".join(parts[:2])


def words_of(axis: str, kind: str, strategy: Strategy, shape: Sequence[int] = ()) -> str:
    """What is split. shape: of what is split, whole, where its dim has no name: 'last of 3 dims (4,096)'."""
    if not strategy.splits_work:
        return "not split"
    if named := _name(axis, kind, strategy):
        return named
    along = _along(strategy)
    if shape and along < len(shape):
        ordinal = "last" if along == len(shape) - 1 else ORDINALS[along] if along < len(ORDINALS) else f"{along + 1}th"
        return f"{ordinal} of {len(shape)} dims ({shape[along]:,})" if len(shape) > 1 else f"its {shape[0]:,} numbers"
    return f"{UNNAMED}{along}"


def is_unnamed(axis: str, kind: str, strategy: Strategy) -> bool:
    """Whether work is split along a dim that has no name for this kind of operator."""
    return strategy.splits_work and not _name(axis, kind, strategy)


def without_a_name(words: str) -> bool:
    """Whether words say a dim by its place alone."""
    return words.startswith((UNNAMED, "its ")) or " dims (" in words


def shape_of(strategy: Strategy, ins: Sequence[TensorType], outs: Sequence[TensorType]) -> tuple[int, ...]:
    """The shape of what a strategy splits of an operator: of its first result that is split, else operand."""
    pairs = [*zip(outs, strategy.outputs, strict=False), *zip(ins, strategy.inputs, strict=False)]
    return next((t.shape for t, x in pairs if x.is_shard), ())


def undivided_words(axis: str, kind: str, strategy: Strategy, size: int) -> str:
    """'heads: 4 do not divide', before among how many."""
    words = words_of(axis, kind, strategy)
    return f"a dim of {size:,} does not divide" if without_a_name(words) else f"{words}: {size:,} do not divide"


def _name(axis: str, kind: str, strategy: Strategy) -> str:
    """The name of what is split, '' where it has none."""
    words = next((w for k, w in _WORDS.items() if kind == k or (k == "conv" and kind.startswith("conv"))), {})
    for (operand, dim), said in words.items():
        if operand < len(strategy.inputs) and strategy.inputs[operand].is_shard and strategy.inputs[operand].dim == dim:
            return said
    dims = {x.dim for x in (*strategy.inputs, *strategy.outputs) if x.is_shard}
    return "samples" if axis == BATCH and dims == {0} else ""


def _along(strategy: Strategy) -> int:
    """The dim of the first result that is split, else operand."""
    return next(x.dim for x in (*strategy.outputs, *strategy.inputs) if x.is_shard)
