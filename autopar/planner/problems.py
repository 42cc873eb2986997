"""What is asked of the integer program of each axis, as its value in the table of axes says: the layouts that leaves may have, the prices,
and what comes first."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.axes import AXES, BATCH
from autopar.ir import I, Layout, Program
from autopar.measure import Pricer
from autopar.planner.axis import AxisProblem
from autopar.planner.choices import Choices, choices
from autopar.planner.moments import batched_inputs
from cost_models.memory import OPTIMIZERS

__all__ = ["axis_choices", "axis_leaves", "axis_problem", "given_on"]


def given_on(program: Program, axis: str, n: int) -> dict[str, Layout]:
    """How the inputs are given to the n ranks of an axis: whole over tp; over dp each rank takes its part of the batch, or, of a batch that
    does not divide, all of it, for the same work on every rank."""
    of_batch, others = AXES[axis].inputs
    batched = batched_inputs(program) if of_batch != others else frozenset()
    if not all(of_batch.divides(program.types[value].shape, n) for value in batched):
        return {x.value: I for x in program.inputs}
    return {x.value: of_batch if x.value in batched else others for x in program.inputs}


def axis_leaves(program: Program, axis: str, n: int) -> dict[str, tuple[Layout, ...]]:
    """Leaf -> the layouts that it may have on an axis of n ranks; those that are not named may have any."""
    leaves: dict[str, tuple[Layout, ...]] = {v: (x,) for v, x in given_on(program, axis, n).items()}
    allowed = AXES[axis].leaves
    if allowed is None:
        return leaves
    return leaves | dict.fromkeys((*(p.value for p in program.params), *(b.value for b in program.buffers)), allowed)


def axis_choices(program: Program, axis: str, n: int, leaves: Mapping[str, tuple[Layout, ...]]) -> Choices:
    """What is to choose on an axis of n ranks, whatever it costs. leaves: of those that are named, what they may lie as."""
    spec = AXES[axis]
    if spec.follows:
        return choices(program, n, leaves, data=True)
    return choices(program, n, leaves, batched=frozenset() if spec.inputs[0].is_shard else batched_inputs(program))


def axis_problem(
    program: Program, axis: str, n: int, pricer: Pricer, optimizer: str, leaves: Mapping[str, tuple[Layout, ...]],
    known: Choices | None = None, reduced_itemsize: int | None = None,
) -> AxisProblem:  # fmt: skip
    """An axis of n ranks. known: its choices, if they were found before. reduced_itemsize: bytes of a number of a gradient as it is sent
    (None: as it rests)."""
    spec = AXES[axis]
    state_price = sync_price = 0.0
    if not spec.work_first:  # a parameter that is cut is updated, and its gradient brought together over the data axis, in parts
        passes = 3 + 2 * OPTIMIZERS[optimizer]
        sync_price = pricer.bucketed_s("all_reduce", 1.0, BATCH)
        state_price = passes / pricer.cluster.gpu.memory_bandwidth_bytes_per_s + sync_price
    return AxisProblem(
        axis=axis,
        n=n,
        choices=known or axis_choices(program, axis, n, leaves),
        pricer=pricer,
        params=frozenset(p.value for p in program.params),
        wider={p.value: p.rests.itemsize / program.types[p.value].dtype.itemsize for p in program.params if p.rests is not None},
        sent={p.value: reduced_itemsize / program.types[p.value].dtype.itemsize for p in program.params} if reduced_itemsize else {},
        fixed=_fixed(program),
        sync_params=not spec.beside,
        work_first=spec.work_first,
        state_price_s_per_byte=state_price,
        sync_price_s_per_byte=sync_price,
    )


def _fixed(program: Program) -> frozenset[str]:
    return frozenset(b.value for b in program.buffers if b.mutated)
