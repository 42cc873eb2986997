"""What the memory of a rank is made of, as data: one value for each pool of it.

    pool            what is in it                                       divided by          lives             row of the account
    parameters      as they rest                                        their rest          always            parameters
    gathered        whole copies of what is in parts, once a step       nobody              passes            parameters
    cast            copies of what is whole in the dtype of its use     nobody              passes            parameters
    states          optimizer states, and its own copy (master)         their rest          always            optimizer_states
    accumulators    gradients added into buffers of their own           their rest          always            gradients
    gradients       as the update finds them                            their rest          update            gradients
    update          what the update makes beside them                   their rest          update            largest_temporary
    buffers         the module's                                        nobody              always            parameters
    batch           as it is given to a rank                            the data axis       always            batch
    prologue        what is made of the whole batch once a step         the data axis       always            batch
    activations, temporaries, reductions, and gradients while they come: what liveness finds at a moment of the passes, by kind

Lives: always; in the passes, forward and backward; or in the optimizer's update. The most that a rank needs is what is there always, and
the larger of what is there at the fullest moment of the passes and in the update. A pool is stated for one parameter, or for a rank; the
planner sums it over pieces, over stages and over ranks, and takes what a rank has always from the room that stages are cut for. A new
pool is one entry of POOLS; of a larger parameter it must not be smaller (planner/bounds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from cost_models.memory import OPTIMIZERS, MemoryTerms
from cost_models.recipe import Recipe
from cost_models.rests import Rest

__all__ = ["MOMENTS", "POOLS", "How", "Lives", "OfRank", "Parameter", "Pool", "gradient_bytes", "of_parameters", "of_rank", "rows"]

Lives = Literal["always", "passes", "update"]


class Parameter(Protocol):
    """One parameter on one rank: bytes and numbers as it is used (local) and as it rests."""

    @property
    def local_bytes(self) -> int: ...
    @property
    def resting_bytes(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def resting_numel(self) -> int: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def in_parts(self) -> bool: ...
    @property
    def is_cast(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OfRank:
    """What a rank has whatever its stage: bytes."""

    buffers: int
    batch: int
    prologue: int


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """How parameters rest, under which training software and optimizer."""

    rest: Rest
    recipe: Recipe
    optimizer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """One of them. title: in words. lives: when it is there. row: of MemoryTerms, in which plans state it. of_parameter: bytes of one
    parameter; of_rank: bytes of a rank; one of the two."""

    name: str
    title: str
    lives: Lives
    row: str
    of_parameter: Callable[[Parameter, How], int] | None = None
    of_rank: Callable[[OfRank, How], int] | None = None

    def __post_init__(self) -> None:
        if self.row not in MemoryTerms.__dataclass_fields__:
            raise ValueError(f"the pool {self.name} counts in the row {self.row!r}, which is not one of the account's")
        if (self.of_parameter is None) == (self.of_rank is None):
            raise ValueError(f"the pool {self.name} must be of a parameter or of a rank")
        if self.of_rank is not None and self.lives != "always":
            raise ValueError(f"the pool {self.name} of a rank must be there always: it is taken from the room for stages")


# ------------------------------------------------------------------------------------------------------------------ rows
def gradient_bytes(numel: int, p: Parameter, recipe: Recipe) -> int:
    """Of so many numbers of a parameter's gradient, as backward makes it: what is accumulated elsewhere is made as the parameter is."""
    own = recipe.gradient_itemsize is None or recipe.accumulates
    return numel * (p.itemsize if own else recipe.gradient_itemsize or p.itemsize)


def _gathered(p: Parameter, how: How) -> int:
    """Of a parameter in parts that is whole while passes run; what rests of it is in it, unless that is the optimizer's own copy."""
    if not (p.trainable and p.in_parts and how.rest.gathered == "step"):
        return 0
    return p.local_bytes - (p.resting_bytes if how.recipe.master_itemsize else 0)


def _cast(p: Parameter, how: How) -> int:
    """Of a parameter that is whole at rest and is cast once a step."""
    return p.local_bytes if p.is_cast and not p.in_parts else 0


def _states(p: Parameter, how: How) -> int:
    recipe = how.recipe
    return (OPTIMIZERS[how.optimizer] * (recipe.state_itemsize or p.itemsize) + recipe.master_itemsize) * p.resting_numel * p.trainable


def _accumulators(p: Parameter, how: How) -> int:
    recipe = how.recipe
    if not (recipe.accumulates and p.trainable):
        return 0
    each = (recipe.gradient_itemsize or p.itemsize) + recipe.gradient_copies * p.itemsize
    return each * (p.resting_numel if how.rest.gradients else p.numel)


def _gradients(p: Parameter, how: How) -> int:
    return 0 if how.recipe.accumulates or not p.trainable else gradient_bytes(p.resting_numel, p, how.recipe)


def _update(p: Parameter, how: How) -> int:
    """An optimizer that updates all parameters together makes as much as their gradients are."""
    together = OPTIMIZERS[how.optimizer] > 1 and how.recipe.optimizer_passes > 1
    return gradient_bytes(p.resting_numel, p, how.recipe) if together and p.trainable else 0


POOLS: dict[str, Pool] = {
    row.name: row
    for row in (
        Pool(name="parameters", title="parameters", lives="always", row="parameters", of_parameter=lambda p, how: p.resting_bytes),
        Pool(name="gathered", title="parameters gathered for a step", lives="passes", row="parameters", of_parameter=_gathered),
        Pool(name="cast", title="parameters cast for a step", lives="passes", row="parameters", of_parameter=_cast),
        Pool(
            name="gathered_in_update", title="parameters gathered for a step, beside the optimizer's own copy of their parts",
            lives="update", row="parameters", of_parameter=lambda p, how: _gathered(p, how) if how.recipe.master_itemsize else 0,
        ),
        Pool(name="states", title="optimizer states", lives="always", row="optimizer_states", of_parameter=_states),
        Pool(name="accumulators", title="accumulated gradients", lives="always", row="gradients", of_parameter=_accumulators),
        Pool(name="gradients", title="gradients in the update", lives="update", row="gradients", of_parameter=_gradients),
        Pool(name="update", title="what the update makes", lives="update", row="largest_temporary", of_parameter=_update),
        Pool(name="buffers", title="buffers", lives="always", row="parameters", of_rank=lambda rank, how: rank.buffers),
        Pool(name="batch", title="the batch", lives="always", row="batch", of_rank=lambda rank, how: rank.batch),
        Pool(name="prologue", title="results of the prologue", lives="always", row="batch", of_rank=lambda rank, how: rank.prologue),
    )
}  # fmt: skip

MOMENTS = {
    "saved": "saved_activations", "gradients": "gradients", "temporary": "largest_temporary", "communication": "communication_buffers",
}  # fmt: skip
"""What liveness finds at a moment of the passes, by kind -> the row in which plans state it."""


# ------------------------------------------------------------------------------------------------------------------ sums
def of_parameters(params: Collection[Parameter], how: How, lives: Lives) -> int:
    """Bytes of all pools of these parameters that live then."""
    pools = [pool.of_parameter for pool in POOLS.values() if pool.of_parameter is not None and pool.lives == lives]
    return sum(each(p, how) for each in pools for p in params)


def of_rank(rank: OfRank, how: How) -> int:
    """Bytes of all pools of a rank."""
    return sum(pool.of_rank(rank, how) for pool in POOLS.values() if pool.of_rank is not None)


def rows(params: Collection[Parameter], rank: OfRank, how: How, lives: Lives) -> Iterator[tuple[str, int]]:
    """(row, bytes) of all pools that live always or then."""
    for pool in POOLS.values():
        if pool.lives in ("always", lives):
            if pool.of_parameter is not None:
                yield pool.row, sum(pool.of_parameter(p, how) for p in params)
            elif pool.of_rank is not None:
                yield pool.row, pool.of_rank(rank, how)
