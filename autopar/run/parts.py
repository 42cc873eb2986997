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

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.run import comm
from autopar.run import function_names as F
from autopar.run.alike import note_written
from autopar.run.by_memory import not_transformed, refuse_parts
from autopar.run.given import DATA, GRAD, Memory, note
from autopar.run.lies import Lies
from autopar.run.reductions import Power, Root, Whole, any_of, extreme
from autopar.run.sent import COLLECTIVES, finished, not_in_parts
from autopar.run.views import Source, no_parameter_of, sharing, write_whole, writes

__all__ = [
    "AnyPart", "Part", "PartTensor", "as_part", "become_part", "become_whole", "cut_as", "is_part", "lies_of", "local", "part_like",
    "whole_of",
]  # fmt: skip

OF_A_PART = ("_lies", "_memory", DATA, GRAD)  # attributes
_plain = torch._C.DisableTorchFunctionSubclass  # as the documentation of tensor subclasses does it


class _Parted:
    """What both kinds of parts share: how torch functions work on them."""

    takes_views = True  # as operands, beside parts
    _lies: Lies

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first: Any = args[0] if args else None
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(func, name, args)
        if name == "data_ptr" and args[0].numel() and not local(args[0]).numel():
            return id(args[0]._lies)  # of no memory here, and another for each parameter
        if name in F.STORAGES and args[0]._lies.split and not _asked_by_torch(sys._getframe(1)):
            raise TypeError(
                f"{args[0]._lies.name} is held in parts by several processes, and no storage here holds the whole, to be written to a "
                f"file. Take full_state_dict() of the parallel module, which has whole tensors under the names of the original"
            )
        if name in COLLECTIVES:
            with torch.no_grad():
                return _on_the_whole(func, name, args, kwargs)
        if name == "is_complex":
            not_in_parts(first._lies, sys._getframe(1))
        if name in F.OF_THE_OBJECT or (name in ("to", "type") and _changes_nothing(name, args, kwargs)):
            with _plain():
                return func(*args, **kwargs)
        if name in F.NOT_COPIED:
            return _copied(func, name, args)
        if name == "detach":
            return _alias_of(first)
        if name == "__iter__":
            return iter(first.unbind(0))
        if name in ("__repr__", "__format__", "__str__") and is_part(first):
            lies = first._lies
            return f"Part({lies.name}, shape={tuple(lies.shape)}, here={tuple(local(first).shape)})"
        if name == "register_hook":
            return _register_hook(*args, **kwargs)
        if name in F.OF_THE_SHAPE and is_part(first):
            with _plain():
                return func(torch.empty(first._lies.shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
        if func is torch.autograd.grad:
            return _gradients(func, args, kwargs)
        if name in ("expand_as", "view_as") and is_part(first) and len(args) == 2 and args[1] is first:
            return _seen_as_itself(func, first)
        if name.startswith("_foreach_"):
            return _foreach(func, name, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(func, *args)
        if name in F.ELEMENTWISE or name in F.SCALES_LIKE or name in F.IN_PLACE or name in ("to", "type"):
            found = _elementwise(func, name, args, kwargs)
            if found is not NotImplemented:
                return found
        if is_part(first):
            found = _reduced(name, first, args[1:], kwargs)
            if found is not NotImplemented:
                return found
        return _on_the_whole(func, name, args, kwargs)


class PartTensor(_Parted, Tensor):
    """A part that is not a parameter: a gradient, a buffer, or what elementwise operators made of parts."""


class Part(_Parted, nn.Parameter):
    """A parameter of which this rank holds a part."""

    def detach(self) -> Tensor:
        no_parameter_of(
            f"nn.Parameter of {self._lies.name}: each rank holds a part of it, of which no other parameter can be made. Prune, normalise "
            f"or parametrise the model before it is compiled, or compile the changed model"
        )
        return super().detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copied(nn.Parameter.__reduce_ex__, "__reduce_ex__", (self, protocol))

    def __deepcopy__(self, memo: Any) -> Any:
        return _copied(nn.Parameter.__deepcopy__, "__deepcopy__", (self, memo))


AnyPart = Part | PartTensor


def _asked_by_torch(frame: FrameType) -> bool:
    """Whether the code that runs is torch's own (torch.compile and torch.export look at the memory of what they are given)."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch.")


def is_part(x: object) -> bool:
    return isinstance(x, _Parted)


def _held_in_parts(x: object) -> str | None:
    """The name of what is a part, of which no rank has the whole."""
    return x._lies.name if isinstance(x, _Parted) and x._lies.split else None


refuse_parts(_held_in_parts)


def local(x: Tensor) -> Tensor:
    """What of a tensor is on this rank: a plain tensor that shares its memory and has no gradient."""
    with _plain():
        return Tensor.detach(x)  # not that of a part, which asks who calls it


def lies_of(x: AnyPart) -> Lies:
    """How a part lies over the ranks."""
    return x._lies


def become_part(param: nn.Parameter, here: Tensor, lies: Lies) -> None:
    """Let the parameter, the same object, be the part `here` of what it was."""
    become_whole(param, here)
    param.__class__ = Part
    param._lies = lies  # type: ignore[attr-defined]


def become_whole(param: nn.Parameter, whole: Tensor) -> None:
    """Let the parameter, the same object, be a plain one with this memory. It has no gradient afterwards."""
    with _plain():
        param.__class__ = nn.Parameter
        for name in OF_A_PART:
            vars(param).pop(name, None)
        param.grad = None
        if param.requires_grad:  # a change of dtype makes autograd forget the shape that graphs which are alive have given it
            param.data = whole.new_empty(0, dtype=torch.float16 if whole.dtype != torch.float16 else torch.float32)
        param.data = whole


def cut_as(value: Tensor, lies: Lies) -> Tensor:
    """This rank's part of something whole, or of a part that may lie otherwise, as a plain tensor (collective then)."""
    if is_part(value):
        own = lies_of(value)  # type: ignore[arg-type]
        if own.alike(lies):
            return local(value)
        value = own.gather(local(value))
    return lies.cut(value).clone(memory_format=torch.contiguous_format)


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


def _seen_as_itself(func: Callable[..., Any], x: AnyPart) -> Tensor:
    """x.expand_as(x): by what autograd records of it, and of nothing else, the node is found that adds a leaf's gradient up. TypeError
    where gradients are to be asked for by that node: they would be of a part."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in ("__torch_function__", "_get_grad_fn_or_grad_acc"):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name == "get_gradient_edge":
        raise TypeError(f"{x._lies.name} is held in parts: ask torch.autograd.grad for the parameter itself, instead of its gradient edge")
    with _plain():
        found = func(x, x)
    found.__class__ = PartTensor
    found._lies = x._lies
    return found


# ---------------------------------------------------------------------------------------------------------------- attributes
def _attribute(func: Callable[..., Any], access: str, args: tuple[Any, ...]) -> Any:
    name = func.__self__.__name__  # type: ignore[attr-defined]
    x = args[0]
    if access == "__get__":
        if name == "grad":
            with _plain():
                grad = func(*args)
            return None if grad is None else as_part(grad, x._lies)
        if name == "data":
            return _alias_of(x)
        if name in F.ATTRIBUTES_OF_THE_SHAPE:
            return func(torch.empty(x._lies.shape, dtype=x.dtype, device="meta"))
        if name in F.OF_THE_WHOLE_ATTRIBUTES:
            return _view(func, x, (), {})
    if access == "__set__":
        value = args[1]
        if not is_part(x):  # a plain tensor is given a part: all of it
            return func(x, _fresh(value))
        if name == "grad":
            vars(x).pop(GRAD, None)
            if isinstance(value, Tensor):
                mine = _taken(x, value)
                if not is_part(value):
                    note(x, GRAD, value)
                with _plain():
                    return func(x, mine)
        if name == "data":
            return _set_data(func, x, value)
    with _plain():
        return func(*args)


def _alias_of(x: AnyPart, here: Tensor | None = None) -> PartTensor:
    """x.data and x.detach(): another part with its memory, and with its count of versions. here: that memory in autograd's graph."""
    alias = part_like(local(x) if here is None else here, x._lies)
    vars(alias)["_memory"] = _memory(x)
    return alias


def _taken(x: AnyPart, value: Tensor) -> Tensor:
    """This rank's part of what is given in the place of a part: of a part that lies as x, its memory itself."""
    return cut_as(_of_shape(value if is_part(value) else x._lies.agreed(value), x._lies), x._lies)


def _set_data(func: Callable[..., Any], x: AnyPart, value: Tensor) -> None:
    """x.data = value: x has other memory from now on, and its other names keep what they have."""
    with _plain():
        if value.dtype != x.dtype:
            raise ValueError(
                f"{x._lies.name} was compiled in {x.dtype} and cannot become {value.dtype}: the plan counts on it. Cast the model before "
                f"it is compiled"
            )
    mine = _taken(x, value)
    vars(x).pop(DATA, None)
    if is_part(value) and _memory(value) is _memory(x):  # type: ignore[arg-type]  # which all ranks see alike, addresses they do not
        return
    if (memory := vars(x).pop("_memory", None)) is not None:
        memory.left = local(x)._version
    with _plain():
        func(x, mine.to(x.device))
    if not is_part(value):
        note(x, DATA, value)
    elif value._lies is not x._lies:  # type: ignore[attr-defined]
        vars(x)[DATA] = _memory(value)  # type: ignore[arg-type]


def _of_shape(value: Tensor, lies: Lies) -> Tensor:
    if value.shape != lies.shape:
        raise ValueError(
            f"{lies.name} has shape {tuple(lies.shape)}; it cannot be given a tensor of shape {tuple(value.shape)}: make it of that shape "
            f"(resize_token_embeddings) before the model is compiled"
        )
    return value


def _changes_nothing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return name == "type" and len(args) == 1 and not kwargs


def _copied(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    """copy.deepcopy and pickle: of what is whole on every rank, as a plain tensor. A deep copy of a part that is no parameter is another
    part that lies so: a state_dict can be kept in memory and loaded again."""
    x = args[0]
    if not x._lies.split:
        plain = nn.Parameter(local(x), requires_grad=x.requires_grad) if isinstance(x, Part) else local(x)
        return func(plain, *_living_as_long(args[1:], plain))
    if name != "__deepcopy__" or isinstance(x, Part):
        raise TypeError(
            f"{x._lies.name} (or an optimizer's state of it) is held in parts by several processes, so that it cannot be "
            f"{'copied as a parameter' if name == '__deepcopy__' else 'pickled'} by itself. Take "
            f"full_state_dict() of the parallel module, which has whole tensors under the names of the original, or write a checkpoint: "
            f"autopar.save(path, model, optimizer)"
        )
    if x.requires_grad:  # as of any tensor that autograd has made: torch refuses it
        with _plain():
            return func(*args)
    here = local(x)
    return part_like(func(here, *_living_as_long(args[1:], here)), x._lies)


def _living_as_long(memos: tuple[Any, ...], plain: Tensor) -> tuple[Any, ...]:
    """The memo of a deep copy, in which what is copied is known by its address: it must live as long."""
    for memo in memos:
        if isinstance(memo, dict):
            memo.setdefault(id(memo), []).append(plain)
    return memos


def _register_hook(x: AnyPart, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Hooks on gradients are given parts, of which norms are those of the whole."""
    lies = x._lies

    def on_part(grad: Tensor | None) -> Tensor | None:
        if grad is None:  # no gradient reaches it, of which torch tells no hook of a plain parameter
            return None
        with torch._C._EnableTorchFunction():  # which torch.autograd.grad of parts has switched off
            changed = hook(part_like(grad, lies))
            if changed is None:
                return None
            return cut_as(_of_shape(changed if is_part(changed) else lies.agreed(changed), lies), lies)

    with _plain():
        return x.register_hook(on_part)


_GRADIENTS = inspect.signature(torch.autograd.grad)


def _gradients(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad, whose results are parts where the inputs are; gradients of outputs that are parts may be whole."""
    given: dict[str, Any] = _GRADIENTS.bind(*args, **kwargs).arguments
    of: list[Any] = [given.get(name) for name in ("outputs", "inputs", "grad_outputs")]
    outputs, inputs, grads = ([x] if isinstance(x, Tensor) else x for x in of)
    if grads is not None and not given.get("is_grads_batched"):
        given["grad_outputs"] = [_arriving(g, o._lies) if g is not None and is_part(o) else g for o, g in zip(outputs, grads, strict=True)]
    with _plain():
        found = func(**given)
    return tuple(part_like(g, x._lies) if g is not None and is_part(x) else g for g, x in zip(found, inputs, strict=True))


def _arriving(grad: Tensor, lies: Lies) -> Tensor:
    """What of the gradient of a part is here, in autograd's graph. TypeError where a whole one is differentiated by."""
    if is_part(grad) and lies_of(grad).alike(lies):  # type: ignore[arg-type]
        return _here(grad)  # type: ignore[arg-type]
    if grad.requires_grad:
        raise TypeError(
            f"{lies.name} is held in parts, and a gradient of what is computed of it is to be differentiated by, which is whole. Call this "
            f"inside of `with model.full_parameters():`"
        )
    return cut_as(grad, lies)


# ---------------------------------------------------------------------------------------------------------------- elementwise
def _here(x: AnyPart) -> Tensor:
    """The memory of a part as a plain tensor in autograd's graph."""
    with _plain():
        return x.as_subclass(Tensor)


def _elementwise(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the parts; NotImplemented where an operand does not lie as the others or is broadcast."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    parts = [x for x in leaves if is_part(x)]
    lies, in_place = parts[0]._lies, name in F.IN_PLACE
    target = _target(args)
    if not all(x._lies.alike(lies) for x in parts) or (in_place and not is_part(target)) or kwargs.get("out") is not None:
        return NotImplemented
    plain = [x for x in leaves if isinstance(x, Tensor) and not is_part(x)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in plain):
        return NotImplemented  # a gradient of theirs is of all elements
    others = [x for x in plain if x.dim() > 0]
    if any(x.shape != lies.shape for x in others) or (name in F.SCALES_LIKE and others):
        return NotImplemented
    with _plain():
        through_autograd = torch.is_grad_enabled() and any(x.requires_grad for x in parts)
    if others and not in_place and not through_autograd:
        return NotImplemented  # with what is whole the result is, for plain.data = ... takes what it is given as it is

    def operand(x: Any) -> Any:
        if is_part(x):
            return _here(x)
        if isinstance(x, Tensor) and x.dim() > 0:
            return lies.cut(lies.agreed(x) if in_place else x.as_subclass(Tensor))
        return x

    new_args, new_kwargs = pytree.tree_unflatten([operand(x) for x in leaves], tree)
    found = func(*new_args, **new_kwargs)
    if in_place:
        note_written(name, lies.name, leaves)
        return args[0]
    if name in F.MAY_CHANGE_NOTHING and is_part(target) and found.dtype == target.dtype and found.device == target.device:
        return _alias_of(target, found) if not kwargs.get("copy") else part_like(found, lies)
    return pytree.tree_map_only(Tensor, lambda t: part_like(t, lies), found)


def _target(args: tuple[Any, ...]) -> Any:
    first = args[0] if args else None
    return first[0] if isinstance(first, (list, tuple)) and first else first


def _foreach(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            result = _elementwise(func, base, tuple(one), rest) if base in F.ELEMENTWISE | F.IN_PLACE else NotImplemented
            if result is NotImplemented:
                result = _on_the_whole(func, base, tuple(one), rest)
        found.append(result[0] if isinstance(result, (list, tuple)) else result)
    return None if base.endswith("_") else found


def _unscale(func: Callable[..., Any], grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's: what one rank finds not finite is found by all."""
    func([_here(g) if is_part(g) else g for g in grads], found_inf, inv_scale)  # type: ignore[arg-type]
    meshes = [g._lies.mesh for g in grads if is_part(g)]  # type: ignore[attr-defined]
    for mesh in {id(mesh): mesh for mesh in meshes}.values():
        comm.all_reduce_(found_inf, mesh.everyone, torch.distributed.ReduceOp.MAX)


# ----------------------------------------------------------------------------------------------------------------- reductions
def _reduced(name: str, x: AnyPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of all elements to one number; NotImplemented for any other reduction."""
    lies = x._lies
    kwargs = {k: v for k, v in kwargs.items() if v is not None and v is not False}
    if name in F.NORMS:
        given = [*args, *(kwargs[k] for k in ("p", "ord") if k in kwargs)]
        order = given[0] if given else 2
        order = 2 if order in (None, "fro") and (name != "linalg_norm" or order is None) else order
        plain = len(given) <= 1 and not set(kwargs) - {"p", "ord"} and isinstance(order, (int, float)) and x.is_floating_point()
        if not plain or (name == "linalg_norm" and given and len(lies.shape) > 1):
            return NotImplemented
        if order in (math.inf, -math.inf):
            return _reduced("max" if order > 0 else "min", part_like(_here(x).abs(), lies), (), {})
        if order <= 0:
            return NotImplemented
        return Root.apply(Power.apply(_wide(x), lies, float(order)), float(order)).to(x.dtype)
    if args or kwargs:
        return NotImplemented
    if name in ("sum", "mean") and (x.is_floating_point() or name == "sum"):
        total = Power.apply(_wide(x), lies, 0.0)
        total = total / lies.shape.numel() if name == "mean" else total
        return total.to(x.dtype) if x.is_floating_point() else total
    with _plain():
        through_autograd = torch.is_grad_enabled() and x.requires_grad
    if name in F.LARGEST and not through_autograd and x.is_floating_point():
        return extreme(local(x), lies, largest=F.LARGEST[name] is max)
    if name in ("any", "all"):
        here = local(x).bool()
        return any_of(here, lies) if name == "any" else ~any_of(~here, lies)
    return NotImplemented


def _wide(x: AnyPart) -> Tensor:
    """In a dtype in which sums are made, as torch makes them."""
    here = _here(x)
    if here.dtype in (torch.float16, torch.bfloat16):
        return here.float()
    return here if here.dtype.is_floating_point or here.dtype.is_complex else here.long()


# ------------------------------------------------------------------------------------------------------------- on the whole
def whole_of(x: AnyPart) -> Tensor:
    """Collective: all of it, in autograd's graph."""
    not_transformed(x._lies.name)
    found: Tensor = Whole.apply(_here(x), x._lies)
    return found


def _fresh(x: AnyPart) -> Tensor:
    """The whole as memory of its own."""
    return x._lies.gather(local(x))


def _view(func: Callable[..., Any], x: AnyPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a part: of its whole, gathered for it."""
    whole = whole_of(x)
    return sharing(func(whole, *args, **kwargs), [_source(x, whole)])


def _source(x: AnyPart, whole: Tensor) -> Source:
    here = local(x)
    return Source(here, x._lies, _memory(x), here._version, whole.detach())


def _memory(x: AnyPart) -> Memory:
    found: Memory | None = vars(x).get("_memory")
    if found is None:
        found = vars(x)["_memory"] = Memory(weakref.ref(x))
    return found


def _is_size(x: object) -> bool:
    return isinstance(x, torch.Size)  # which would come back as a tuple, and `p.new(size)` takes that for elements


def _on_the_whole(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective: the function of whole tensors. What it writes to a part goes back into the parts, as rank 0 has written it."""
    out = kwargs.get("out")
    written: Any = out if is_part(out) else args[0] if args and writes(name) else None
    if isinstance(written, (list, tuple)):
        written = next((x for x in written if is_part(x)), None)
    if name in F.VIEWS and is_part(args[0] if args else None) and not any(map(is_part, pytree.tree_leaves((args[1:], kwargs)))):
        return _view(func, args[0], args[1:], kwargs)
    if not is_part(written):
        known: dict[int, Tensor] = {}
        whole = pytree.tree_map_only(_Parted, lambda x: known.setdefault(id(x), whole_of(x)), (args, kwargs), is_leaf=_is_size)
        versions = {key: w._version for key, w in known.items()}
        found = finished(func(*whole[0], **whole[1]))
        for x in {id(x): x for x in pytree.tree_leaves((args, kwargs)) if is_part(x)}.values():
            unseen = name in COLLECTIVES or (name in F.WRITES_UNSEEN and not isinstance(x, Part))
            if (changed := known[id(x)])._version != versions[id(x)] or unseen:
                write_whole(local(x), x._lies, changed)
                found = x if found is changed else found
            elif found is not None:
                found = sharing(found, [_source(x, changed)])
        if name in F.RANDOM:
            lies = next(x._lies for x in pytree.tree_leaves((args, kwargs)) if is_part(x))
            found = pytree.tree_map_only(Tensor, lies.agreed, found)
        return found
    with _plain():
        if torch.is_grad_enabled() and written.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    lies = written._lies
    with torch.no_grad():
        whole = pytree.tree_map_only(_Parted, lambda x: _fresh(x) if x is written else whole_of(x), (args, kwargs), is_leaf=_is_size)
        func(*whole[0], **whole[1])
        target = whole[1]["out"] if written is out else _target(whole[0])
        write_whole(local(written), lies, _of_shape(target, lies))
    return out if written is out else args[0]
