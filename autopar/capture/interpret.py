"""Runs a captured program, operator by operator, on real, meta or fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import torch

from autopar.ir import Arg, Op, Program, Ref
from autopar.run.region import REGION, region

__all__ = ["resolve", "run_op", "run_ops", "run_program", "run_whole_program"]


@functools.cache
def resolve(target: str) -> torch._ops.OpOverload:
    """The operator of torch.ops that 'aten.linear.default' (namespace.name.overload) names. LookupError if there is none."""
    namespace, name, overload = target.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as e:
        raise LookupError(f"no operator {target} is registered with torch; import the package that defines it first") from e


@functools.cache
def _is_factory(target: str) -> bool:
    """Whether the operator makes a tensor from nothing, on a device that has to be said."""
    arguments = resolve(target)._schema.arguments
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


def run_op(op: Op, env: Mapping[str, torch.Tensor], device: torch.device | None = None) -> tuple[torch.Tensor | None, ...]:
    """The results of one operator, one for every element of op.outputs (None for what it does not return).

    env: value -> tensor, for every value that the operator reads. device: where an operator that makes a tensor from
    nothing (arange, zeros) puts it; None for torch's default device. It runs with gradients off if op.no_grad.
    """
    args = [_given(a, env) for a in op.args]
    kwargs = {k: _given(v, env) for k, v in op.kwargs}
    if op.target == REGION:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not op.no_grad):
            return region(*args, **kwargs)  # type: ignore[arg-type]
    if device is not None and _is_factory(op.target):
        kwargs["device"] = device
    with torch.set_grad_enabled(torch.is_grad_enabled() and not op.no_grad):
        result = resolve(op.target)(*args, **kwargs)
    if op.multi:
        assert isinstance(result, Sequence) and len(result) == len(op.outputs), (op, result)
        return tuple(result)
    return (result,)


def _given(arg: Arg, env: Mapping[str, torch.Tensor]) -> object:
    """An argument with the values that it refers to. (A closure that calls itself would keep them until Python looks for cycles.)"""
    if isinstance(arg, Ref):
        return env[arg.name]
    return [_given(a, env) for a in arg] if isinstance(arg, tuple) else arg


def run_ops(
    ops: Sequence[Op], env: MutableMapping[str, torch.Tensor], device: torch.device | None = None
) -> Iterator[tuple[Op, tuple[torch.Tensor | None, ...]]]:
    """Runs the operators in order, adds their results to env, and yields each operator with its results."""
    for op in ops:
        results = run_op(op, env, device)
        env.update((name, r) for name, r in zip(op.outputs, results, strict=True) if name is not None and r is not None)
        yield op, results


def run_program(program: Program, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The program's loss (shape []), differentiable with respect to the parameters in values.

    values: a tensor for each input, parameter and buffer of the program that its operators read, by value name, all on one
    device. Buffers are changed in place as the model's forward changes them (batch norm's running statistics). A program
    that was captured inside lift_to_float64() is to be run inside it too.
    """
    return run_whole_program(program, values)[0]


class _Env(dict[str, torch.Tensor]):
    """Values by name, those of some of which are cast at each use, so that their gradients are added in their own dtypes."""

    def __init__(self, values: Mapping[str, torch.Tensor], casts: Mapping[str, torch.dtype]) -> None:
        super().__init__(values)
        self._casts = casts

    def __getitem__(self, name: str) -> torch.Tensor:
        value = super().__getitem__(name)
        return value.to(self._casts[name]) if name in self._casts else value


def run_whole_program(program: Program, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """As run_program: the loss, and the program's outputs."""
    lower = {p.value: program.types[p.value].dtype for p in program.params if p.rests is not None}
    env = _Env(values, lower)
    device = next((v.device for v in values.values()), None)
    for _ in run_ops(program.ops, env, device):
        pass
    with torch.no_grad():
        for buffer, final in [(values[b], env[v].clone()) for b, v in program.mutations]:
            buffer.copy_(final)
    return tuple(env[v] for v in (program.loss, *program.outputs))
