"""The program that a trace is, after all of its passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.capture.batch import batch_size_of, batched_of
from autopar.capture.blocks import find_blocks, without_lead
from autopar.capture.effects import changed_in_place
from autopar.capture.infer import Meta
from autopar.capture.normalise import may_run_earlier
from autopar.capture.routing import with_rows
from autopar.capture.trace import Trace
from autopar.errors import CaptureError
from autopar.ir import Op, Program, TensorType
from autopar.region_paths import paths_of

__all__ = ["differentiable_throughout", "program_of", "with_flows"]


def program_of(trace: Trace, mutations: tuple[tuple[str, str], ...], *, trains: bool) -> Program:
    """The program of a trace. trains: its loss must depend on something that is trained, else CaptureError."""
    ops = tuple(t.op for t in trace.ops)
    types = _types(trace.metas)
    ops = with_rows(ops, types, {trace.loss, *trace.returned, *(value for _, value in mutations)})
    used = {o for op in ops for o in op.outputs if o is not None} | set(trace.given)
    changed = {buffer for buffer, _ in mutations}
    changed |= {buffer for op in ops for buffer in changed_in_place(op)}
    if apart := next(((one, other) for one, other in trace.saved_apart if other in changed), None):
        second, first = (next(b.fqn for b in trace.buffers if b.value == value) for value in apart)
        raise CaptureError(
            f"the forward changes the tensor of two buffers, {first} and {second}, of which only one is in the state_dict\n"
            f"  what to do: register both with the same persistent="
        )
    buffers = tuple(dataclasses.replace(b, mutated=b.value in changed) for b in trace.buffers)
    state: dict[str, object] = {p.value: ("param", p.trainable) for p in trace.params}
    state |= {b.value: ("buffer", b.mutated) for b in buffers}
    calls = [t.calls for t in trace.ops]
    blocks = find_blocks(ops, calls, types, state)
    if not blocks:
        order, calls = without_lead(ops, calls, state, may_run_earlier)
        moved = tuple(ops[i] for i in order)
        blocks = find_blocks(moved, calls, types, state)
        ops = moved if blocks else ops
    if not trains and not types[trace.loss].grad:
        types = _as_if_trained(ops, types)
    if not types[trace.loss].grad:
        raise CaptureError(
            f"the loss of {trace.name} does not depend on any parameter or input that requires a gradient\n  what to do: "
            + (
                "check that no torch.no_grad or .detach() stands between parameters and loss"
                if any(p.trainable for p in trace.params)
                else "a plan is of training: freeze the model after it is compiled, by requires_grad_(False) of what compile returned"
            )
        )
    batch, doubt = batch_size_of(ops, types, [i.value for i in trace.inputs])
    return Program(
        name=trace.name, inputs=trace.inputs, params=trace.params, buffers=buffers, ops=ops, loss=trace.loss,
        outputs=tuple(dict.fromkeys(trace.returned)),
        types={name: t for name, t in types.items() if name in used}, mutations=mutations, blocks=blocks,
        constant_inputs=trace.constant_inputs, batch_size=batch, batched=batched_of(ops, types, [i.value for i in trace.inputs], batch),
        notes=(*trace.notes, *doubt),
    )  # fmt: skip


def with_flows(trace: Trace, program: Program) -> Trace:
    """The trace whose regions know on which ways gradients come to what they are given."""
    names = {p.value: p.fqn for p in program.params}
    tensors = dict[str, Any](trace.tensors)
    for handle, flow in paths_of(program).flows.items():
        upstream = tuple((tuple(names[v] for v in leaves if v in names), handles) for leaves, handles in flow.operands)
        tensors[handle] = dataclasses.replace(tensors[handle], handle=handle, direct=flow.direct, upstream=upstream)
    return dataclasses.replace(trace, tensors=tensors)


def differentiable_throughout(program: Program) -> Program:
    """As if all that it makes had a gradient: of a program that only ever runs forward, which may then be cut anywhere."""
    return dataclasses.replace(program, types=_as_if_trained(program.ops, program.types))


def _as_if_trained(ops: Sequence[Op], types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """With every floating result as one that has a gradient, as what crosses from one stage to the next must be."""
    made = {o for op in ops for o in op.outputs if o is not None and types[o].dtype.is_floating_point}
    return {name: dataclasses.replace(t, grad=True) if name in made else t for name, t in types.items()}


def _types(metas: Mapping[str, Meta]) -> dict[str, TensorType]:
    """The types of values, equal ones being one object, which takes less to compare."""
    known: dict[TensorType, TensorType] = {}
    types = {key: known.setdefault(t, t) for key, t in ((key, meta.type) for key, meta in {id(m): m for m in metas.values()}.items())}
    return {name: types[id(meta)] for name, meta in metas.items()}
