"""Parameters and gradients of which a rank holds a part, and which behave as the whole.

A `Part` is the nn.Parameter of the user's model, whose memory is this rank's part of it. What people do with parameters is exact:

- its shape, size and number of elements are those of the whole;
- elementwise operators (also in place) work on the parts, and give parts;
- sums, means, norms and largest values count every element once over all ranks;
- anything else works on the whole, which is gathered for it; what it writes in place goes back into the parts.

The last two are collective: all ranks do the same with the same parameters, as they do with FSDP2's. A parameter of another pipeline
stage is a part without elements, so that this holds there too. What a copy that was gathered cannot be (written to, pickled) raises.
Elementwise optimizers of torch.optim step on the parts themselves (`stepping`), at the price of plain parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.run import function_names as F
from autopar.run.by_memory import refused
from autopar.run.elementwise import elementwise, foreach, fused, unscale
from autopar.run.given import DATA, GRAD, has_now, leave, note
from autopar.run.part import AnyPart, Part, Parted, PartTensor, alias_of, as_part, copied, is_part, local, memory_of
from autopar.run.part_gradients import gradients, register_after, register_hook, seen_as_itself
from autopar.run.plain import asker, plainly
from autopar.run.reductions import reduced
from autopar.run.sent import COLLECTIVES, not_in_parts
from autopar.run.wholes import cut_as, fresh, of_shape, on_the_whole, view

__all__ = ["Part", "PartTensor"]

_OF_KERNELS = frozenset({"bitsandbytes", "cupy", "numba", "pycuda", "triton"})  # what else asks for an address compares it


def _by_parts(
    cls: type, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """__torch_function__ of parts."""
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    first: Any = args[0] if args else None
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func, name, args)
    if name == "data_ptr" and args[0]._lies.split and _package(asker()) in _OF_KERNELS:
        raise TypeError(refused(args[0]._lies.name, f"a kernel ({_package(asker())})"))
    if name == "data_ptr" and args[0].numel() and not local(args[0]).numel():
        return id(args[0]._lies)  # of no memory here, and another for each parameter
    if name in F.STORAGES and args[0]._lies.split and not _asked_by_torch(asker()):
        raise TypeError(
            f"{args[0]._lies.name} is held in parts by several processes, and no storage here holds the whole, to be written to a "
            f"file. Take full_state_dict() of the parallel module, which has whole tensors under the names of the original, or call its "
            f"save_pretrained() (AutoparTrainer has it as trainer.model_wrapped)"
        )
    if name in COLLECTIVES:
        with torch.no_grad():
            return on_the_whole(func, name, args, kwargs)
    if name == "is_complex":
        not_in_parts(first._lies, asker())
    if name in F.OF_THE_OBJECT or (name == "type" and len(args) == 1 and not kwargs):
        with plainly():
            return func(*args, **kwargs)
    if is_part(first) and _gives_itself(func, name, args, kwargs):
        return first
    if name in F.NOT_COPIED:
        return copied(func, name, args)
    if name == "detach":
        return alias_of(first)
    if name == "detach_" and isinstance(first, Part):
        return first.requires_grad_(False)
    if name == "__iter__":
        return iter(first.unbind(0))
    if name in F.SHOWN and is_part(first):
        lies = first._lies
        return f"Part({lies.name}, shape={tuple(lies.shape)}, here={tuple(local(first).shape)})"
    if name == "register_hook":
        return register_hook(*args, **kwargs)
    if name == "register_post_accumulate_grad_hook":
        return register_after(*args, **kwargs)
    if name in F.OF_THE_SHAPE and is_part(first):
        with plainly():
            return func(torch.empty(first._lies.shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
    if func is torch.autograd.grad:
        return gradients(func, args, kwargs)
    if name in ("expand_as", "view_as") and is_part(first) and len(args) == 2 and args[1] is first:
        return seen_as_itself(func, first)
    if name.startswith("_foreach_"):
        return foreach(func, name, args, kwargs)
    if name.startswith("_fused_") and isinstance(first, (list, tuple)):
        return fused(func, name, args, kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return unscale(func, *args)
    if name in F.ELEMENTWISE or name in F.SCALES_LIKE or name in F.IN_PLACE or name in ("to", "type"):
        found = elementwise(func, name, args, kwargs)
        if found is not NotImplemented:
            return found
    if is_part(first):
        found = reduced(name, first, args[1:], kwargs)
        if found is not NotImplemented:
            return found
    return on_the_whole(func, name, args, kwargs)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _asked_by_torch(frame: FrameType) -> bool:
    """Whether the code that runs is torch's own (torch.compile and torch.export look at the memory of what they are given)."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch.")


def _gives_itself(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch gives the tensor itself, as of `p.to(p.device)` and `p.contiguous()`."""
    first, given = args[0], (args[1:], kwargs)
    if name in F.ITSELF or (name in F.ITSELF_OF_PARAMETERS and isinstance(first, Part)):
        like = local(first)
        if not any(isinstance(x, torch.memory_format) for x in pytree.tree_leaves(given)):
            like = like.new_empty(0)  # nothing is converted, to find out
    elif name in F.ITSELF_BY_SHAPE and isinstance(first, Part):
        like = torch.empty(first._lies.shape, dtype=first.dtype, device="meta")
    else:
        return False
    others, named = pytree.tree_map_only(Parted, local, given)
    return func(like, *others, **named) is like


# ---------------------------------------------------------------------------------------------------------------- attributes
def _attribute(func: Callable[..., Any], access: str, args: tuple[Any, ...]) -> Any:
    name = func.__self__.__name__  # type: ignore[attr-defined]
    x = args[0]
    if access == "__get__":
        if name == "grad":
            with plainly():
                grad = func(*args)
            return None if grad is None else as_part(grad, x._lies.of("the gradient"))
        if name == "data":
            return alias_of(x)
        if _gives_itself(func, name, args, {}):
            return x
        if name in F.ATTRIBUTES_OF_THE_SHAPE:
            return func(torch.empty(x._lies.shape, dtype=x.dtype, device="meta"))
        if name in F.OF_THE_WHOLE_ATTRIBUTES:
            return view(func, x, (), {})
    if access == "__set__":
        value = args[1]
        if not is_part(x):  # a plain tensor is given a part: all of it
            return func(x, fresh(value))
        if name == "grad":
            vars(x).pop(GRAD, None)
            if isinstance(value, Tensor):
                mine = _taken(x, value)
                if not is_part(value):
                    note(x, GRAD, value, mine)
                with plainly():
                    return func(x, mine)
        if name == "data":
            return _set_data(func, x, value)
    with plainly():
        return func(*args)


def _taken(x: AnyPart, value: Tensor) -> Tensor:
    """This rank's part of what is given in the place of a part: of a part that lies as x, its memory itself."""
    return cut_as(of_shape(value if is_part(value) else x._lies.agreed(value), x._lies), x._lies)


def _set_data(func: Callable[..., Any], x: AnyPart, value: Tensor) -> None:
    """x.data = value: x has other memory from now on, and its other names keep what they have."""
    with plainly():
        if value.dtype != x.dtype:
            raise ValueError(
                f"{x._lies.name} was compiled in {x.dtype} and cannot become {value.dtype}: the plan counts on it. Cast the model before "
                f"it is compiled"
            )
    if not is_part(value) and has_now(x, value):
        return
    mine = _taken(x, value)
    leave(x, lambda: x._lies.gather(local(x)))
    vars(x).pop(DATA, None)
    if is_part(value) and memory_of(value) is memory_of(x):  # type: ignore[arg-type]  # which all ranks see alike, addresses they do not
        return
    if (memory := vars(x).pop("_memory", None)) is not None:
        memory.left = local(x)._version
    with plainly():
        func(x, mine.to(x.device))
    if not is_part(value):
        note(x, DATA, value, local(x))
    elif value._lies.parameter is not x._lies.parameter:  # type: ignore[attr-defined]
        vars(x)[DATA] = memory_of(value)  # type: ignore[arg-type]


for _kind in (Part, PartTensor):
    _kind.__torch_function__ = classmethod(_by_parts)  # type: ignore[assignment]
