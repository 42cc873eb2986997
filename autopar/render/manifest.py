"""Plan and lowered program -> the manifest that the emitted file states."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from autopar.axes import BATCH, TIME
from autopar.capture.batch import samples_of
from autopar.capture.effects import changed_in_place
from autopar.catalog.rule import draws, rule_of, strategies_of
from autopar.catalog.schema import bind, registering_module
from autopar.ir import Buffer, I, Layout, Lowered, Op, Param, Program, R, TensorType, refs
from autopar.planner.moments import batched_inputs
from autopar.planner.plan import Plan
from autopar.planner.price import param_bytes
from autopar.planner.shard import view_of
from autopar.planner.stages import used_on
from autopar.planner.units import gather_units
from autopar.region_paths import paths_of
from autopar.run.dtypes import PRECISIONS
from autopar.run.manifest import BufferSpec, InputSpec, Manifest, OutputSpec, ParamSpec
from autopar.run.region import REGION
from cost_models.recipe import AUTOPAR
from cost_models.rests import WHOLE, rest_of

__all__ = ["make_manifest"]


def _read_for(program: Program, wanted: set[str]) -> set[str]:
    """These values, and what they are computed of; not the running statistics that batch norm reads to move them."""
    found = set(wanted)
    for op in reversed(program.ops):
        if not found.isdisjoint(o for o in op.outputs if o is not None):
            found.update(set(refs(op)).difference(changed_in_place(op)))
    return found


def make_manifest(program: Program, lowered: Lowered, plan: Plan, positional: tuple[str, ...] = (), *, training: bool = True) -> Manifest:
    """program: as captured, whose types are the global shapes. training: the mode in which it was."""
    local = lowered.program
    used = used_on(lowered)
    homes = _homes(program, used)
    writers = {buffer: stage.index for stage in lowered.stages for buffer, _ in stage.mutations}
    parts = {v: p.local_bytes for v, p in param_bytes(local, plan.zero_dims, plan.shard).items() if p.in_parts}
    past_regions = paths_of(program).past_regions
    reread = _read_for(program, {program.loss, *program.outputs})
    units = gather_units(local, parts, AUTOPAR.unit_bytes) if rest_of(plan.rest).gathered == "use" else {}
    params = tuple(
        ParamSpec(
            name=p.fqn,
            shape=program.types[p.value].shape,
            dtype=_name(p.rests or program.types[p.value].dtype),
            computes=None if p.rests is None else _dtype(program.types[p.value]),
            aliases=p.aliases,
            trainable=p.trainable,
            layouts=_layouts(p.layouts),
            stages=used.get(p.value, homes.get(p.value, (0,))),
            zero_dim=plan.zero_dims.get(p.fqn),
            rest=plan.rest if p.fqn in plan.zero_dims else WHOLE.name,
            unit=units.get(p.value),
            regions_only=p.value in past_regions,
            agreed=p.agreed,
        )
        for p in local.params
    )
    buffers = tuple(
        BufferSpec(
            name=b.fqn or b.value,
            shape=program.types[b.value].shape,
            dtype=_dtype(program.types[b.value]),
            persistent=b.persistent and b.fqn is not None,
            constant=b.fqn is None or b.region,
            region=b.region,
            parameter=b.parameter,
            aliases=b.aliases,
            layouts=_layouts(b.layouts),
            stages=(stages := used.get(b.value, homes.get(b.value, (0,)))),
            written=writers.get(b.value, stages[-1] if b.mutated else None),  # batch norm writes to its own
            reread=b.mutated and b.value in reread,
            assigned=b.assigned and b.mutated,
        )
        for b in local.buffers
    )
    inputs = tuple(
        InputSpec(
            name=x.value, path=x.path, shape=program.types[x.value].shape, dtype=_dtype(program.types[x.value]),
            layouts=_layouts(x.layouts), grad=program.types[x.value].grad,
        )
        for x in local.inputs
    )
    over_time = local.layouts.get(TIME, {})
    ranks = plan.mesh[BATCH]
    whole = [v for stage in lowered.stages for v in stage.outputs if ranks > 1 and not local.layouts.get(BATCH, {}).get(v, I).is_shard]
    batched = batched_inputs(program)
    given = [x.value for x in program.inputs if x.value in batched]
    samples = samples_of([v for v in whole if v in program.outputs], program.ops, program.types, given, ranks)
    outputs = tuple(
        OutputSpec(
            name=v, shape=program.types[v].shape, dtype=_dtype(program.types[v]),
            layouts={axis: str(of[v]) for axis, of in local.layouts.items() if of.get(v, I) != I}, stage=stage.index,
            grad=program.types[v].grad, samples=str(samples.get(v, "")),
        )
        for stage in lowered.stages
        for v in stage.outputs
    )  # fmt: skip
    return Manifest(
        model=program.name,
        mesh=dict(plan.mesh),
        micro_batches=plan.micro_batches,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        rest=plan.rest,
        reduce_dtype=None if plan.reduce_dtype is None else PRECISIONS[plan.reduce_dtype],
        shard=plan.shard if 1 < plan.shard < plan.mesh[BATCH] else None,
        params=params,
        buffers=buffers,
        inputs=inputs,
        outputs=outputs,
        positional=positional,
        constant_inputs=program.constant_inputs,
        libraries=_libraries(lowered),
        prologue={v: str(over_time[v]) for v in lowered.prologue_outputs},
        training=training,
        mode_dependent=_mode_dependent(program),
        not_linear=_not_linear(program),
        observed=tuple(dict.fromkeys(op.source for op in program.ops if op.kwarg("observes"))),
    )


def _homes(program: Program, used: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The stage of each parameter and buffer that no operator reads (a branch that is not taken now): where what stands nearest to it
    in the model is used."""
    leaves: tuple[Param | Buffer, ...] = (*program.params, *program.buffers)
    named = [(k, x.value, x.fqn) for k, x in enumerate(leaves) if x.fqn is not None]
    read = [(k, used[value], fqn) for k, value, fqn in named if value in used]
    found: dict[str, tuple[int, ...]] = {}
    for k, value, fqn in named:
        if value not in used and read:
            nearest = max(read, key=lambda other: (_shared(fqn, other[2]), -abs(k - other[0])))  # noqa: B023
            found[value] = nearest[1][:1]
    return found


def _shared(one: str, other: str) -> int:
    """How many modules two names have in common, from the outermost."""
    paths = zip(one.split(".")[:-1], other.split(".")[:-1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], paths))


def _mode_dependent(program: Program) -> tuple[str, ...]:
    """The operators that draw random numbers, or read or update running statistics: training and evaluation differ there."""
    found = dict.fromkeys(op.target for op in program.ops if draws(op) or _normalises_by_mode(op))
    return tuple(found)


def _not_linear(program: Program) -> tuple[str, ...]:
    """The operators without a rule, and the regions, that cannot be given terms of a gradient."""
    asked = [op for op in program.ops if rule_of(op.target) is None or (op.target == REGION and not op.kwarg("observes"))]
    differentiated = [op for op in asked if any(o is not None and program.types[o].grad for o in op.outputs)]
    views = [(op, view_of(program, op, 2)) for op in differentiated]
    found = [op for op, view in views if not any({*s.inputs, *s.outputs} == {R} for s in strategies_of(view))]
    return tuple(dict.fromkeys(op.source if op.target == REGION else f"{op.source} ({op.target})" for op in found))


def _normalises_by_mode(op: Op) -> bool:
    return op.target.split(".")[1] in ("batch_norm", "instance_norm") and bind(op).get("running_mean") is not None


def _libraries(lowered: Lowered) -> tuple[str, ...]:
    ops = [op for part in (lowered.prologue, *(s.ops for s in lowered.stages)) for op in part]
    called = {operator for op in ops if isinstance(operator := op.kwarg("operator"), str)}  # by local code that stands in its place
    targets = {op.target for op in ops} | called
    return tuple(sorted({module for t in targets if (module := registering_module(t)) is not None}))


def _layouts(layouts: tuple[tuple[str, Layout], ...]) -> dict[str, str]:
    return {axis: str(layout) for axis, layout in layouts if layout != I and (axis != TIME or layout.is_shard)}


def _dtype(t: TensorType) -> str:
    return _name(t.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
