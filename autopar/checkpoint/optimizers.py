"""Optimizers by the names of parameters: what is in a checkpoint does not depend on their order, their groups' order, or the plan.

A state that has its parameter's shape (momenta, second moments) lies as the parameter does, and each rank keeps its part. Any other (step
counters, the rows and columns of Adafactor, the vectors of LBFGS) is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autopar.checkpoint.index import Group
from autopar.checkpoint.subjects import Subject
from autopar.checkpoint.values import Keep, decode, encode
from autopar.errors import CheckpointError
from autopar.run.stepping import close_steps

__all__ = ["Optimizers", "as_optimizers", "groups_and_state", "load_state"]

Optimizers = Optimizer | Sequence[Optimizer] | None
_NOT_OPTIONS = ("params", "param_names")


def as_optimizers(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """One, several (each with parameters of its own) or none. CheckpointError for anything else."""
    found = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(found, list | tuple) or not all(isinstance(one, Optimizer) for one in found):
        raise CheckpointError(f"optimizer is of type {type(optimizer).__name__}; needed is a torch.optim.Optimizer, or a list of them")
    return tuple(found)


def groups_and_state(
    optimizers: Iterable[Optimizer], subject: Subject, keep: Keep
) -> tuple[tuple[Group, ...], dict[str, dict[str, Any]]]:
    """The groups by names, and the state of each parameter, encoded. keep: takes the tensors, parts too."""
    close_steps()
    groups: list[Group] = []
    states: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        state_dict = optimizer.state_dict()
        packed = state_dict["state"]
        for number, (group, of_group) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
            names = _names(optimizer, number, group, subject)
            where = f"optimizer.param_groups.{len(groups)}"
            options = {k: encode(v, f"{where}.{k}", keep) for k, v in of_group.items() if k not in _NOT_OPTIONS}
            groups.append(Group(params=names, options=options))
            for name, index in zip(names, of_group["params"], strict=True):
                if name in states:
                    raise CheckpointError(f"parameter {name} is in two groups or optimizers: give each one parameters of its own")
                states[name] = {}
                for key, value in packed.get(index, {}).items():
                    if type(key) is not str:
                        kind = type(optimizer).__name__
                        raise CheckpointError(f"{kind} keeps state of {name} under {key!r}: a checkpoint needs names there")
                    states[name][key] = encode(value, f"optimizer.state.{name}.{key}", keep)
    return tuple(groups), {name: state for name, state in states.items() if state}


def _names(optimizer: Optimizer, number: int, group: Mapping[str, Any], subject: Subject) -> tuple[str, ...]:
    found = []
    for param in group["params"]:
        name = subject.param_names.get(id(param))
        if name is None:
            raise CheckpointError(
                f"group {number} of {type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} that is not one of "
                f"{subject.title}: make it one, or give it an optimizer of its own and its state_dict() as an extra"
            )
        found.append(name)
    return tuple(found)


def load_state(
    optimizers: Sequence[Optimizer],
    subject: Subject,
    groups: Sequence[Group],
    states: Mapping[str, Mapping[str, Any]],
) -> Callable[[Callable[[str], Tensor]], None]:
    """Look whether what was saved fits the optimizers (CheckpointError if not); returns what puts it there, given key -> tensor."""
    saved = {name: group for group in groups for name in group.params}
    present = [
        [_names(optimizer, number, group, subject) for number, group in enumerate(optimizer.param_groups)] for optimizer in optimizers
    ]
    here = [name for of_optimizer in present for names in of_optimizer for name in names]
    missing, unknown = sorted(set(here) - saved.keys()), sorted(saved.keys() - set(here))
    if missing or unknown:
        differs = [f"the checkpoint has no state of {_some(missing)}"] if missing else []
        differs += [f"the checkpoint also has {_some(unknown)}"] if unknown else []
        raise CheckpointError(
            f"the optimizer has other parameters than the one that was saved: {'; '.join(differs)}. Give it the same parameters, or load "
            f"without an optimizer"
        )
    for of_optimizer in present:
        for number, names in enumerate(of_optimizer):
            others = [name for name in names if saved[name].options != saved[names[0]].options]
            if others:
                raise CheckpointError(
                    f"{names[0]} and {others[0]} are in one group now (number {number}), and were saved with different options "
                    f"({_difference(saved[names[0]].options, saved[others[0]].options)}). Make the groups as they were"
                )

    def put(tensor: Callable[[str], Tensor]) -> None:
        for optimizer, of_optimizer in zip(optimizers, present, strict=True):
            _put(optimizer, of_optimizer, saved, states, tensor)

    return put


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}: {one.get(k)} and {other.get(k)}" for k in sorted({*one, *other}) if one.get(k) != other.get(k))


def _put(
    optimizer: Optimizer,
    groups: Sequence[Sequence[str]],
    saved: Mapping[str, Group],
    states: Mapping[str, Mapping[str, Any]],
    tensor: Callable[[str], Tensor],
) -> None:
    close_steps()
    packed: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    of_param: list[tuple[Any, str]] = []
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        options = {k: v for k, v in group.items() if k != "params"}  # of older or other software, some may be missing
        if names:
            options |= {k: decode(v, tensor) for k, v in saved[names[0]].options.items()}
        first = len(of_param)
        of_param += zip(group["params"], names, strict=True)
        packed.append({**options, "params": list(range(first, len(of_param)))})
    for index, (_, name) in enumerate(of_param):
        if name in states:
            state[index] = {k: decode(v, tensor) for k, v in states[name].items()}
    exact = {index: dict(found) for index, found in state.items()}
    optimizer.load_state_dict({"state": state, "param_groups": packed})
    for index, (param, _) in enumerate(of_param):  # torch casts states to the parameter's dtype; what was saved in another was meant so
        for key, value in exact.get(index, {}).items():
            now = optimizer.state[param].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[param][key] = value.to(now.device)

