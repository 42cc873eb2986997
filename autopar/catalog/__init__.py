"""What the compiler knows about operators: one file per family, one mechanism (`rule`). The only folder that grows."""

from autopar.catalog import (
    attention,
    contraction,
    convolution,
    embedding,
    experts,
    factories,
    indexing,
    losses,
    norms,
    pointwise,
    random_numbers,
    rearrange,
    reductions,
    regions,
    transitions,
    views,
)
from autopar.catalog.rule import OpView, localized, rule_of, strategies_of
from autopar.catalog.transitions import needs_transition, transition, transition_op

__all__ = ["OpView", "localized", "needs_transition", "rule_of", "strategies_of", "transition", "transition_op"]

FAMILIES = (
    attention, contraction, convolution, embedding, experts, factories, indexing, losses, norms, pointwise, random_numbers,
    rearrange, reductions, regions, transitions, views,
)  # fmt: skip
