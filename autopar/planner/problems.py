"""What is asked of the integer program of each axis: the layouts that leaves may have, the prices, and what comes first."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir import I, Layout, Program, R, S
from autopar.measure import Pricer
from autopar.planner.axis import AxisProblem
from autopar.planner.choices import Choices, choices
from autopar.planner.moments import batched_inputs
from cost_models.memory import OPTIMIZERS

__all__ = ["data_leaves", "data_problem", "given_on", "tensor_choices", "tensor_problem"]


def given_on(program: Program, axis: str) -> dict[str, Layout]:
    """How the inputs are given to the ranks of an axis: whole over tp; over dp each rank takes its part of the batch."""
    batched = batched_inputs(program) if axis == "dp" else frozenset()
    return {x.value: I if axis == "tp" else S(0) if x.value in batched else R for x in program.inputs}


def data_leaves(program: Program) -> dict[str, tuple[Layout, ...]]:
    """Leaf -> the layouts that it may have on a data axis."""
    leaves: dict[str, tuple[Layout, ...]] = {v: (x,) for v, x in given_on(program, "dp").items()}
    return leaves | dict.fromkeys((*(p.value for p in program.params), *(b.value for b in program.buffers)), (R, I))


def data_problem(program: Program, n: int, pricer: Pricer, leaves: Mapping[str, tuple[Layout, ...]]) -> AxisProblem:
    """The data axis of n ranks: as much work split as can be. leaves: what each may lie as; all must be named."""
    return AxisProblem(
        axis="dp",
        n=n,
        choices=choices(program, n, leaves, data=True),
        pricer=pricer,
        params=frozenset(p.value for p in program.params),
        fixed=_fixed(program),
        sync_params=False,
        work_first=True,
    )


def tensor_choices(body: Program, n: int, leaves: Mapping[str, tuple[Layout, ...]]) -> Choices:
    """What is to choose on the tensor axis, whatever it costs."""
    return choices(body, n, leaves, batched=batched_inputs(body))


def tensor_problem(
    body: Program, n: int, pricer: Pricer, optimizer: str, leaves: Mapping[str, tuple[Layout, ...]], known: Choices | None = None
) -> AxisProblem:
    """The tensor axis of n ranks of one micro-batch: the fastest. leaves: of those that are named, what they may lie as. known: its
    choices, if they were found before."""
    passes = 3 + 2 * OPTIMIZERS[optimizer]
    return AxisProblem(
        axis="tp",
        n=n,
        choices=known or tensor_choices(body, n, leaves),
        pricer=pricer,
        state_price_s_per_byte=passes / pricer.cluster.gpu.memory_bandwidth_bytes_per_s + pricer.bucketed_s("all_reduce", 1.0, "dp"),
        params=frozenset(p.value for p in body.params),
        fixed=_fixed(body),
    )


def _fixed(program: Program) -> frozenset[str]:
    return frozenset(b.value for b in program.buffers if b.mutated)
