"""The identity of a captured program: what it computes, not what its modules are called nor in which precision it runs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence

import torch

from autopar.ir import Arg, Op, Program, Ref, TensorType, refs, rename_refs

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
    operators, external = _operators_hash(ops, program.types, state)
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
        op = rename_refs(op, renamed)
        if op.target == "aten.to.dtype" and not op.kwargs and _is_float(program, op.name) and _is_float(program, refs(op)[0]):
            renamed[op.name] = refs(op)[0]
        else:
            ops.append(op)
    return ops, renamed


def _is_float(program: Program, value: str) -> bool:
    return program.types[value].dtype.is_floating_point


def _operators_hash(
    ops: Sequence[Op], types: Mapping[str, TensorType], state: Mapping[str, object]
) -> tuple[str, tuple[str, ...]]:
    """A hash of what some operators compute, and the values they read from elsewhere in order of first use.

    Names of values play no part; constants, shapes, dtypes, wiring, and which operands are state (with its attributes) do. All floating
    dtypes are one, and so are constants that are limits of a floating dtype.
    """
    digest = hashlib.sha256()
    number: dict[str, str] = {}
    external: list[str] = []
    shown: dict[TensorType, str] = {}

    def type_of(name: str) -> str:
        t = types[name]
        if t not in shown:
            dtype = "float" if t.dtype.is_floating_point else str(t.dtype)
            shown[t] = f"{dtype}{list(t.shape)}{t.grad}"
        return shown[t]

    def show(arg: Arg) -> str:
        if isinstance(arg, Ref):
            if arg.name not in number:
                number[arg.name] = f"e{len(external)}:{type_of(arg.name)}:{state.get(arg.name, '')}"
                external.append(arg.name)
            return number[arg.name]
        if isinstance(arg, tuple):
            return "(" + ",".join(show(a) for a in arg) + ")"
        if isinstance(arg, torch.dtype):
            return "float" if arg.is_floating_point else str(arg)
        if isinstance(arg, float):
            return _finite_limits().get(arg, repr(arg))
        return repr(arg)

    for i, op in enumerate(ops):
        operands = [show(a) for a in op.args] + [f"{k}={show(v)}" for k, v in op.kwargs]
        results = [type_of(o) if o is not None and o in types else "-" for o in op.outputs]
        what = (op.target, operands, results, op.multi, op.no_grad) + (() if op.by_rows is None else (str(op.by_rows),))
        digest.update(repr(what).encode())
        number.update((o, f"i{i}.{k}") for k, o in enumerate(op.outputs) if o is not None)
    return digest.hexdigest(), tuple(external)


@functools.cache
def _finite_limits() -> Mapping[float, str]:
    """The constants that code takes from torch.finfo, by value: they differ between dtypes while the code is the same."""
    limits: dict[float, str] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        info = torch.finfo(dtype)
        limits |= {info.min: "finfo.min", info.max: "finfo.max", info.tiny: "finfo.tiny", info.eps: "finfo.eps"}
        limits |= {info.min / 2: "finfo.min/2"}
    return limits
