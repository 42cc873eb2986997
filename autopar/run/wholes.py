"""Functions that work on the whole of parts, which is gathered for them. Each is collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.run import function_names as F
from autopar.run.by_memory import not_transformed
from autopar.run.lies import Lies
from autopar.run.part import AnyPart, Parted, in_graph, is_part, lies_of, local, memory_of
from autopar.run.plain import is_size, plainly
from autopar.run.reductions import Whole
from autopar.run.sent import COLLECTIVES, finished
from autopar.run.views import Source, sharing, write_whole, writes

__all__ = ["cut_as", "fresh", "of_shape", "on_the_whole", "target_of", "view", "whole_of"]



def cut_as(value: Tensor, lies: Lies) -> Tensor:
    """This rank's part of something whole, or of a part that may lie otherwise, as a plain tensor (collective then)."""
    if is_part(value):
        own = lies_of(value)  # type: ignore[arg-type]
        if own.alike(lies):
            return local(value)
        value = own.gather(local(value))
    return lies.cut(value).clone(memory_format=torch.contiguous_format)


def of_shape(value: Tensor, lies: Lies) -> Tensor:
    if value.shape != lies.shape:
        raise ValueError(
            f"{lies.name} has shape {tuple(lies.shape)}; it cannot be given a tensor of shape {tuple(value.shape)}: make it of that shape "
            f"(resize_token_embeddings) before the model is compiled"
        )
    return value


def whole_of(x: AnyPart) -> Tensor:
    """Collective: all of it, in autograd's graph. In inference mode too, it counts how often it is written to."""
    not_transformed(x._lies.name)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return fresh(x)
    found: Tensor = Whole.apply(in_graph(x), x._lies)
    return found


def fresh(x: AnyPart) -> Tensor:
    """The whole as memory of its own."""
    return x._lies.gather(local(x))


def view(func: Callable[..., Any], x: AnyPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a part: of its whole, gathered for it."""
    whole = whole_of(x)
    return sharing(func(whole, *args, **kwargs), [_source(x, whole)])


def _source(x: AnyPart, whole: Tensor) -> Source:
    part = local(x)
    return Source(part, x._lies, memory_of(x), part._version, whole.detach())


def on_the_whole(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective: the function of whole tensors. What it writes to a part goes back into the parts, as rank 0 has written it."""
    out = kwargs.get("out")
    written: Any = out if is_part(out) else args[0] if args and writes(name) else None
    if isinstance(written, (list, tuple)):  # and perhaps to further lists behind it
        return _on_lists(func, args, kwargs)
    if name in F.VIEWS and is_part(args[0] if args else None) and not any(map(is_part, pytree.tree_leaves((args[1:], kwargs)))):
        return view(func, args[0], args[1:], kwargs)
    if not is_part(written):
        known: dict[int, Tensor] = {}
        whole = pytree.tree_map_only(Parted, lambda x: known.setdefault(id(x), whole_of(x)), (args, kwargs), is_leaf=is_size)
        versions = {key: w._version for key, w in known.items()}
        told = {id(x) for x in _written_by_schema(func, args, kwargs)}
        statistics = {k: w.detach().clone() for k, w in known.items() if name in F.WRITES_UNSEEN and not w.requires_grad}
        found = finished(func(*whole[0], **whole[1]))
        for x in {id(x): x for x in pytree.tree_leaves((args, kwargs)) if is_part(x)}.values():
            unseen = name in COLLECTIVES or id(x) in told
            if (changed := known[id(x)])._version != versions[id(x)] or unseen:
                write_whole(local(x), x._lies, changed)
                found = x if found is changed else found
            elif id(x) in statistics and not torch.equal(statistics[id(x)], changed):
                write_whole(local(x).data, x._lies, changed)  # by .data, which counts no write either
            elif found is not None:
                found = sharing(found, [_source(x, changed)])
        if name in F.RANDOM:
            lies = next(x._lies for x in pytree.tree_leaves((args, kwargs)) if is_part(x))
            found = pytree.tree_map_only(Tensor, lies.agreed, found)
        return found
    with plainly():
        if torch.is_grad_enabled() and written.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    lies = written._lies
    with torch.no_grad():
        whole = pytree.tree_map_only(Parted, lambda x: fresh(x) if x is written else whole_of(x), (args, kwargs), is_leaf=is_size)
        func(*whole[0], **whole[1])
        target = whole[1]["out"] if written is out else target_of(whole[0])
        write_whole(local(written), lies, of_shape(target, lies))
    return out if written is out else args[0]


def _written_by_schema(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What an operator's schema says that it writes to. Versions may not tell: operators of others that have a kernel and nothing for
    autograd do not raise them."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        schemas = [getattr(func, overload)._schema for overload in func.overloads()]
    else:
        schemas = [func._schema] if isinstance(func, torch._ops.OpOverload) else []
    found = []
    for schema in schemas:
        given = dict(zip((a.name for a in schema.arguments), args)) | kwargs
        found += [given[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write and a.name in given]
    return [x for x in pytree.tree_leaves(found) if is_part(x)]


def _on_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of lists of tensors, some of which it writes to in place: they go back into the parts. Functions of lists may not count writes."""
    known: dict[int, tuple[AnyPart, Tensor]] = {}

    def whole(x: AnyPart) -> Tensor:
        if id(x) not in known:
            known[id(x)] = x, fresh(x)
        return known[id(x)][1]

    with plainly():
        if torch.is_grad_enabled() and any(x.requires_grad for x in pytree.tree_leaves(args[0]) if isinstance(x, Tensor)):
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    with torch.no_grad():
        given = pytree.tree_map_only(Parted, whole, (args, kwargs), is_leaf=is_size)
        found = func(*given[0], **given[1])
        for x, copy in known.values():
            write_whole(local(x), x._lies, copy)
    return found


def target_of(args: tuple[Any, ...]) -> Any:
    first = args[0] if args else None
    return first[0] if isinstance(first, (list, tuple)) and first else first
