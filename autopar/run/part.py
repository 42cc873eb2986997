"""What a part of a tensor is: the memory of what of it rests on this rank, in an object that stands for the whole.

Here are its classes and what makes parts and takes them apart. How torch functions work on them is in `parts`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.run.by_memory import refuse_parts
from autopar.run.given import DATA, GRAD, Memory
from autopar.run.lies import Lies
from autopar.run.plain import plainly
from autopar.run.views import no_parameter_of

__all__ = [
    "OF_A_PART", "AnyPart", "Part", "PartTensor", "Parted", "alias_of", "as_part", "become_part", "become_whole", "copied", "in_graph",
    "is_part", "lies_of", "local", "memory_of", "own_attributes", "part_like",
]  # fmt: skip

OF_A_PART = ("_lies", "_memory", DATA, GRAD)  # attributes


class Parted:
    """What both kinds of parts share. `parts` gives them their __torch_function__."""

    takes_views = True  # as operands, beside parts
    _lies: Lies

    def set_(self, *source: Any, **more: Any) -> Any:
        """torch asks no subclass here, and would give it the memory of a whole. Of a parameter, as x.data = source."""
        if not isinstance(self, Part) and not self._lies.split:
            return super().set_(*source, **more)  # type: ignore[misc]
        if not (isinstance(self, Part) and len(source) == 1 and isinstance(source[0], Tensor) and not more):
            raise ValueError(
                f"set_() of what belongs to {self._lies.name}, of which each rank holds a part: give the parameter itself a tensor of its "
                f"shape, or write values (copy_)"
            )
        self.data = source[0]
        return self


class PartTensor(Parted, Tensor):
    """A part that is not a parameter: a gradient, a buffer, or what elementwise operators made of parts."""


class Part(Parted, nn.Parameter):
    """A parameter of which this rank holds a part."""

    def detach(self) -> Tensor:
        no_parameter_of(
            f"nn.Parameter of {self._lies.name}: each rank holds a part of it, of which no other parameter can be made. Prune, normalise "
            f"or parametrise the model before it is compiled, or compile the changed model"
        )
        return super().detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copied(nn.Parameter.__reduce_ex__, "__reduce_ex__", (self, protocol))

    def __deepcopy__(self, memo: Any) -> Any:
        return copied(nn.Parameter.__deepcopy__, "__deepcopy__", (self, memo))


AnyPart = Part | PartTensor


def is_part(x: object) -> bool:
    return isinstance(x, Parted)


def _held_in_parts(x: object) -> str | None:
    """The name of what is a part, of which no rank has the whole."""
    return x._lies.name if isinstance(x, Parted) and x._lies.split else None


refuse_parts(_held_in_parts)


def local(x: Tensor) -> Tensor:
    """What of a tensor is on this rank: a plain tensor that shares its memory and has no gradient."""
    with plainly():
        return Tensor.detach(x)  # not that of a part, which asks who calls it


def in_graph(x: AnyPart) -> Tensor:
    """The memory of a part as a plain tensor in autograd's graph."""
    with plainly():
        return x.as_subclass(Tensor)


def lies_of(x: AnyPart) -> Lies:
    """How a part lies over the ranks."""
    return x._lies


def own_attributes(x: Tensor) -> dict[str, Any]:
    """The attributes that the user has given to a tensor."""
    return {name: value for name, value in vars(x).items() if name not in OF_A_PART}


def become_part(param: nn.Parameter, here: Tensor, lies: Lies) -> None:
    """Let the parameter, the same object, be the part `here` of what it was. Graphs of before that reach it raise RuntimeError: they give
    it whole gradients, or would compute with its values, for which torch says that it was written to."""
    if lies.split and param.requires_grad:
        _refuse_gradients_of_before(param, lies)
    become_whole(param, here)
    if lies.split:
        torch.autograd.graph.increment_version(param)
    param.__class__ = Part
    param._lies = lies  # type: ignore[attr-defined]


def _refuse_gradients_of_before(param: nn.Parameter, lies: Lies) -> None:
    """What adds gradients up in graphs that are alive is another node of autograd than that of later ones (`become_whole`)."""

    def refuse(grads: tuple[Tensor, ...]) -> None:
        raise RuntimeError(
            f"a gradient of {lies.name} is of what was computed of it before the first call of the parallel module, when it was whole: "
            f"compute that after the first call, or give autopar.compile example_inputs="
        )

    with plainly(), torch.enable_grad():
        of_view = param.view_as(param).grad_fn
        assert of_view is not None
        of_view.next_functions[0][0].register_prehook(refuse)  # type: ignore[union-attr]


def become_whole(param: nn.Parameter, whole: Tensor) -> None:
    """Let the parameter, the same object, be a plain one with this memory. It has no gradient afterwards."""
    with plainly():
        param.__class__ = nn.Parameter
        for name in OF_A_PART:
            vars(param).pop(name, None)
        param.grad = None
        if param.requires_grad:  # a change of dtype makes autograd forget the shape that graphs which are alive have given it
            param.data = whole.new_empty(0, dtype=torch.float16 if whole.dtype != torch.float16 else torch.float32)
        param.data = whole


def as_part(x: Tensor, lies: Lies) -> Tensor:
    """Let a plain tensor, the same object, be the part of something that lies so."""
    if type(x) is Tensor:
        x.__class__ = PartTensor
        x._lies = lies  # type: ignore[attr-defined]
    return x


def part_like(x: Tensor, lies: Lies) -> PartTensor:
    """A plain tensor as the part of something that lies so; it shares memory and autograd's graph."""
    found = x.as_subclass(PartTensor)
    found._lies = lies
    return found


def alias_of(x: AnyPart, here: Tensor | None = None) -> PartTensor:
    """x.data and x.detach(): another part with its memory, and with its count of versions. here: that memory in autograd's graph."""
    alias = part_like(local(x) if here is None else here, x._lies)
    vars(alias)["_memory"] = memory_of(x)
    return alias


def memory_of(x: AnyPart) -> Memory:
    """Which memory it has, the same for all its names."""
    found: Memory | None = vars(x).get("_memory")
    if found is None:
        found = vars(x)["_memory"] = Memory(weakref.ref(x))
    return found


def copied(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    """copy.deepcopy and pickle: of what is whole on every rank, as a plain tensor. A deep copy of a part that is no parameter is another
    part that lies so: a state_dict can be kept in memory and loaded again."""
    x = args[0]
    if not x._lies.split:
        plain = nn.Parameter(local(x), requires_grad=x.requires_grad) if isinstance(x, Part) else local(x)
        return func(plain, *_living_as_long(args[1:], plain))
    if name != "__deepcopy__" or isinstance(x, Part):
        raise TypeError(
            f"{x._lies.name} is held in parts by several processes, so that it cannot be "
            f"{'copied as a parameter' if name == '__deepcopy__' else 'pickled'} by itself. Take "
            f"full_state_dict() of the parallel module, which has whole tensors under the names of the original (where a library calls "
            f"state_dict(): model.state_dict = model.full_state_dict), or write a checkpoint: autopar.save(path, model, optimizer)"
        )
    if x.requires_grad:  # as of any tensor that autograd has made: torch refuses it
        with plainly():
            return func(*args)
    here = local(x)
    return part_like(func(here, *_living_as_long(args[1:], here)), x._lies)


def _living_as_long(memos: tuple[Any, ...], plain: Tensor) -> tuple[Any, ...]:
    """The memo of a deep copy, in which what is copied is known by its address: it must live as long."""
    for memo in memos:
        if isinstance(memo, dict):
            memo.setdefault(id(memo), []).append(plain)
    return memos
