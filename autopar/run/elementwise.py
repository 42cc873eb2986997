"""Functions that work on each element by itself: on the parts, and what they give are parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.run import comm
from autopar.run import function_names as F
from autopar.run.alike import note_written
from autopar.run.part import Parted, in_graph, is_part, local, part_like
from autopar.run.plain import plainly
from autopar.run.wholes import on_the_whole, target_of

__all__ = ["elementwise", "foreach", "fused", "unscale"]


def elementwise(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the parts; NotImplemented where an operand does not lie as the others or is broadcast."""
    if name in F.IN_PLACE and not kwargs and is_part(args[0]) and all(map(_is_number, args[1:])):  # as gradients are clipped
        func(in_graph(args[0]), *args[1:])
        note_written(name, args[0]._lies.name, args[1:])
        return args[0]
    leaves, tree = pytree.tree_flatten((args, kwargs))
    parts = [x for x in leaves if is_part(x)]
    lies, in_place = parts[0]._lies, name in F.IN_PLACE
    target = target_of(args)
    if not all(x._lies.alike(lies) for x in parts) or (in_place and not is_part(target)) or kwargs.get("out") is not None:
        return NotImplemented
    plain = [x for x in leaves if isinstance(x, Tensor) and not is_part(x)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in plain):
        return NotImplemented  # a gradient of theirs is of all elements
    others = [x for x in plain if x.dim() > 0]
    if any(x.shape != lies.shape for x in others) or (name in F.SCALES_LIKE and others):
        return NotImplemented
    with plainly():
        through_autograd = torch.is_grad_enabled() and any(x.requires_grad for x in parts)
    if others and not in_place and not through_autograd:
        return NotImplemented  # with what is whole the result is, for plain.data = ... takes what it is given as it is

    def operand(x: Any) -> Any:
        if is_part(x):
            return in_graph(x)
        if isinstance(x, Tensor) and x.dim() > 0:
            return lies.cut(lies.agreed(x) if in_place else x.as_subclass(Tensor))
        return x

    new_args, new_kwargs = pytree.tree_unflatten([operand(x) for x in leaves], tree)
    found = func(*new_args, **new_kwargs)
    if in_place:
        note_written(name, lies.name, leaves)
        return args[0]
    return pytree.tree_map_only(Tensor, lambda t: part_like(t, lies), found)


def _is_number(x: object) -> bool:
    return type(x) in (int, float) or (type(x) is Tensor and x.dim() == 0 and not x.requires_grad)


def foreach(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of lists, one place after the other."""
    base = name.removeprefix("_foreach_")
    tensors = args[0]
    if base == "norm":
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return [torch.linalg.vector_norm(t, order) for t in tensors]
    found = []
    for i in range(len(tensors)):
        one = [[a[i]] if isinstance(a, (list, tuple)) and len(a) == len(tensors) else a for a in args]
        rest = {k: [a[i]] if isinstance(a, (list, tuple)) and len(a) == len(tensors) else a for k, a in kwargs.items()}
        if not any(is_part(x) for x in pytree.tree_leaves((one, rest))):
            result = func(*one, **rest)
        else:
            result = elementwise(func, base, tuple(one), rest) if base in F.ELEMENTWISE | F.IN_PLACE else NotImplemented
            if result is NotImplemented:
                result = on_the_whole(func, base, tuple(one), rest)
        found.append(result[0] if isinstance(result, (list, tuple)) else result)
    return None if base.endswith("_") else found


def fused(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A step of an elementwise optimizer as one function, of lists of parameters, their gradients and states, which it writes to."""
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and len(x) == len(args[0])]
    for place in zip(*lists, strict=True):
        parts = [x for x in place if is_part(x)]
        whole = any(isinstance(x, Tensor) and x.dim() > 0 for x in place if not is_part(x))
        if parts and (whole or not all(x._lies.alike(parts[0]._lies) for x in parts)):
            return on_the_whole(func, name, args, kwargs)
    given = pytree.tree_map_only(Parted, local, (args, kwargs))
    return func(*given[0], **given[1])


def unscale(func: Callable[..., Any], grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's: what one rank finds not finite is found by all."""
    func([in_graph(g) if is_part(g) else g for g in grads], found_inf, inv_scale)  # type: ignore[arg-type]
    meshes = [g._lies.mesh for g in grads if is_part(g)]  # type: ignore[attr-defined]
    for mesh in {id(mesh): mesh for mesh in meshes}.values():
        comm.all_reduce_(found_inf, mesh.everyone, torch.distributed.ReduceOp.MAX)
