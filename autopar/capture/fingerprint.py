"""The identity of a captured program: what it computes, not what its modules are called nor in which precision it runs."""

from __future__ import annotations

import hashlib

from autopar.capture.blocks import span_signature
from autopar.ir import Op, Program, Ref, map_refs, refs

__all__ = ["program_hash"]


def program_hash(program: Program) -> str:
    """sha256 of the program's operators, constants, shapes and wiring (64 hexadecimal digits).

    Equal for a model and its float64 form captured inside lift_to_float64(), for renamed modules, and for other values of the
    parameters; different as soon as a shape, an operator, a constant, the wiring, or what is trainable differs. What the
    user is given beside the loss is no part of it.
    """
    state: dict[str, object] = {i.value: ("input", i.path) for i in program.inputs}
    state |= {p.value: ("param", p.trainable, len(p.aliases)) for p in program.params}
    state |= {b.value: ("buffer", b.fqn is not None, b.persistent, b.mutated) for b in program.buffers}
    state |= {b.value: ("written param", b.mutated, len(b.aliases)) for b in program.buffers if b.parameter}
    ops, renamed = _without_float_casts(program)
    operators, external = span_signature(ops, program.types, state, exact_dtypes=False)
    position = {name: f"e{i}" for i, name in enumerate(external)}
    position |= {o: f"{i}.{k}" for i, op in enumerate(ops) for k, o in enumerate(op.outputs) if o is not None}
    unused = sorted(str((state[n], program.types[n].shape)) for n in state if n not in position)
    ends = [position[renamed.get(program.loss, program.loss)]]
    ends += [f"{position.get(b, 'unused')}={position[renamed.get(v, v)]}" for b, v in program.mutations]
    return hashlib.sha256(repr((operators, ends, unused, program.constant_inputs, program.batch_size)).encode()).hexdigest()


def _without_float_casts(program: Program) -> tuple[list[Op], dict[str, str]]:
    """The operators without casts between floating dtypes, and what the results of those are called now."""
    renamed: dict[str, str] = {}
    ops = []
    for op in program.ops:
        op = map_refs(op, lambda n: Ref(renamed.get(n, n)))
        if op.target == "aten.to.dtype" and not op.kwargs and _is_float(program, op.name) and _is_float(program, refs(op)[0]):
            renamed[op.name] = refs(op)[0]
        else:
            ops.append(op)
    return ops, renamed


def _is_float(program: Program, value: str) -> bool:
    return program.types[value].dtype.is_floating_point
