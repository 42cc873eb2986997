"""The axes over which a step is laid, as data: one value for each, from the outermost inwards, and the micro-batches.

    axis   divides      inputs            parameters                       collectives
    pp     layers                         each stage has its own           between neighbouring stages
    dp     batch        S(0), else R      R or I, at rest in parts (ZeRO)  gradients, beside the backward pass
    time   batch        S(0), else R      R                                none: moments cannot exchange values
    tp     operators    I                 as their readers want them       activations, in the operators' own time

A program is laid over the axes that divide the batch, then split into micro-batches, then laid over the axes that divide operators, each
in the order of the table: solve, shard, next. Then it is cut into stages. Meshes, process groups, buckets, manifests, prices and reports
go by the names here. One axis divides the layers and one the batch; any number divide operators. A new one is one entry of AXES.

Kinds of parallelism that are not here yet, and where each would stand:

    context parallel   an axis that divides operators, with `leaves` of parameters (R,) and inputs S(1): attention's exchange of keys and
                       values is a strategy with local code in the catalogue, as halo exchange is
    expert parallel    an axis that divides operators, with inputs (S(0), R), so that its ranks have other samples of a micro-batch;
                       experts' weights are S(0) where their operators (catalog/experts.py) can be, all others R, reduced with the step
    zero-bubble        no axis: a row of SCHEDULES (cost_models/pipeline.py) whose actions have W apart from B
    offload            no axis: a row of RESTS (cost_models/rests.py) that says what rests on the host, whose pool (cost_models/pools.py)
                       is then not of the GPU; of activations, a mode of a piece (planner/modes.py) that keeps nothing and costs the copies
    unlike GPUs        no axis: a cluster with several kinds of GPU (cost_models/cluster.py); a piece then has its seconds by kind, and the
                       stages' program (planner/partition.py), which has an account for each stage already, one kind for each
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.ir import I, Layout, R, S

__all__ = ["AXES", "BATCH", "LAYERS", "TIME", "AxisSpec", "Divides", "axes_over", "cut_order", "joint", "levels_of", "spec_of"]

Divides = Literal["layers", "batch", "operators"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSpec:
    """One axis. name: in meshes, pins, plans and emitted code. title: in reports. divides: what its ranks share: the layers, as stages; the
    samples of a step; or the operators of one micro-batch, dim by dim.
    inputs: how inputs lie on it, those that hold the batch and the others. leaves: the layouts that parameters and buffers may have on it;
    None: any that an operator which reads them has a use for. follows: only strategies that split what derives from split inputs.
    work_first: its program splits as much work as can be, and only then saves communication; else it is the fastest.
    beside: gradients of parameters that its ranks use for different work are brought together beside the backward pass, whatever its
    program decides, so that the step prices them alone. in_parts: what rests in parts (cost_models.rests) does so over it.
    forms: its program is also asked for Megatron's forms, and for the best at several prices of memory. within_node: its ranks are in one
    node, unless its size is pinned. levels: the process groups that it is made of, outermost first; by default one of its own name."""

    name: str
    title: str
    divides: Divides
    inputs: tuple[Layout, Layout] = (I, I)
    leaves: tuple[Layout, ...] | None = None
    follows: bool = False
    work_first: bool = False
    beside: bool = False
    in_parts: bool = False
    forms: bool = False
    within_node: bool = False
    levels: tuple[str, ...] = ()


AXES: dict[str, AxisSpec] = {
    row.name: row
    for row in (
        AxisSpec(name="pp", title="pipeline stages", divides="layers"),
        AxisSpec(
            name="dp", title="data parallel", divides="batch", inputs=(S(0), R), leaves=(R, I), follows=True, work_first=True, beside=True,
            in_parts=True, levels=("replica", "shard"),
        ),
        AxisSpec(name="tp", title="tensor parallel", divides="operators", forms=True, within_node=True),
    )
}  # fmt: skip

LAYERS = "pp"  # the axis that divides the layers
BATCH = "dp"  # the axis of GPUs that divides the batch
TIME = "time"  # the axis of moments that divides the batch of each of its ranks: see planner/moments.py


def spec_of(axis: str) -> AxisSpec:
    return AXES[axis]


def axes_over(divides: Divides) -> tuple[AxisSpec, ...]:
    """Those that divide this, outermost first."""
    return tuple(row for row in AXES.values() if row.divides == divides)


def cut_order(*, time: bool = False) -> tuple[str, ...]:
    """The axes over which tensors lie, in the order in which they are cut. time: the micro-batches among them."""
    return (*(row.name for row in axes_over("batch")), *((TIME,) if time else ()), *(row.name for row in axes_over("operators")))


def joint(inner: Sequence[str]) -> list[tuple[str, ...]]:
    """The axes that are one group of ranks where a collective is over several: some of those that divide operators (`inner`), alone or with
    the data axis, or with those of its ranks that hold the same parts."""
    several = [names for k in range(1, len(inner) + 1) for names in itertools.combinations(inner, k)]
    return [(*base, *names) for names in several for base in ((), (BATCH,), levels_of(BATCH)[:1]) if len((*base, *names)) > 1]


def levels_of(axis: str) -> tuple[str, ...]:
    """The process groups that an axis is made of, outermost first."""
    return (spec_of(axis).levels or (axis,)) if axis in AXES else (axis,)
