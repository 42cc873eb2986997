"""Gradients of parts: hooks on them, torch.autograd.grad, and the node of autograd that adds them up."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.run.lies import Lies
from autopar.run.part import AnyPart, PartTensor, in_graph, is_part, lies_of, part_like
from autopar.run.plain import asker, plainly
from autopar.run.wholes import cut_as, of_shape

__all__ = ["gradients", "hooks_aside", "register_after", "register_hook", "seen_as_itself"]

_GRADIENTS = inspect.signature(torch.autograd.grad)


def register_hook(x: AnyPart, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Hooks on gradients are given parts, of which norms are those of the whole."""
    with plainly():
        return x.register_hook(_on_part(hook, x._lies))


def _on_part(hook: Callable[[Tensor], Tensor | None], lies: Lies) -> Callable[[Tensor | None], Tensor | None]:
    def on_part(grad: Tensor | None) -> Tensor | None:
        if grad is None:  # no gradient reaches it, of which torch tells no hook of a plain parameter
            return None
        with torch._C._EnableTorchFunction():  # which torch.autograd.grad of parts has switched off
            changed = hook(part_like(grad, lies))
            if changed is None:
                return None
            return cut_as(of_shape(changed if is_part(changed) else lies.agreed(changed), lies), lies)

    return on_part


def register_after(x: AnyPart, hook: Callable[[Tensor], Any]) -> Any:
    """register_post_accumulate_grad_hook: the hook sees parts, and is called where a gradient has come."""
    with plainly():
        return x.register_post_accumulate_grad_hook(_After(hook))


class _After:
    """A hook that is called when a gradient has been added to .grad. Of a parameter that is in no graph torch calls none; a function of
    ours returns None for it."""

    __slots__ = ("_hook", "_seen")

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook
        self._seen: tuple[weakref.ref[Tensor], int] | None = None  # the gradient of the last time, and how often it had been written to

    def __call__(self, param: Tensor) -> None:
        with plainly():
            grad = param.grad
            if grad is None or (self._seen is not None and self._seen[0]() is grad and self._seen[1] == grad._version):
                return
        with torch._C._EnableTorchFunction():  # which torch.autograd.grad of parts has switched off
            self._hook(param)
        with plainly():
            after = param.grad
            self._seen = None if after is None else (weakref.ref(after), after._version)


@contextlib.contextmanager
def hooks_aside(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, these parameters have no hooks on their gradients; afterwards those that they had, under the same handles. What has become a
    part inside has them as if they were registered on it."""
    tables = [(p, table) for p in params for table in (p._backward_hooks, p._post_accumulate_grad_hooks) if table]
    kept = [(p, table, dict(table)) for p, table in tables]
    for _, table in tables:
        table.clear()
    try:
        yield
    finally:
        for p, table, hooks in kept:
            with plainly():
                on_gradients = table is p._backward_hooks
            table.update({key: _given_to(p, hook, on_gradients=on_gradients) for key, hook in hooks.items()})


def _given_to(param: nn.Parameter, hook: Any, *, on_gradients: bool) -> Any:
    """What is called in the place of a hook of a parameter that may have become a part."""
    if on_gradients:
        _counted_here(param, hook)
    if not is_part(param):
        return hook
    return _on_part(hook, lies_of(param)) if on_gradients else _After(hook)  # type: ignore[arg-type]


def _counted_here(param: nn.Parameter, hook: Any) -> None:
    """torch's register_multi_grad_hook counts the nodes of autograd that add gradients up, as they were when it was called: of a parameter
    that has other memory now, that is another node. (Where it keeps them is private.)"""
    if getattr(hook, "__module__", "") != torch.autograd.graph.__name__ or not isinstance(hook, FunctionType):
        return
    cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    nodes, number = held.get("grad_fns"), held.get("idx")
    if isinstance(nodes, list) and isinstance(number, int) and param.requires_grad:
        with plainly(), torch.enable_grad():
            nodes[number] = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def gradients(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad, whose results are parts where the inputs are; gradients of outputs that are parts may be whole."""
    given: dict[str, Any] = _GRADIENTS.bind(*args, **kwargs).arguments
    of: list[Any] = [given.get(name) for name in ("outputs", "inputs", "grad_outputs")]
    outputs, inputs, grads = ([x] if isinstance(x, Tensor) else x for x in of)
    if grads is not None and not given.get("is_grads_batched"):
        given["grad_outputs"] = [_arriving(g, o._lies) if g is not None and is_part(o) else g for o, g in zip(outputs, grads, strict=True)]
    with plainly():
        found = func(**given)
    return tuple(part_like(g, x._lies) if g is not None and is_part(x) else g for g, x in zip(found, inputs, strict=True))


def _arriving(grad: Tensor, lies: Lies) -> Tensor:
    """What of the gradient of a part is here, in autograd's graph. TypeError where a whole one is differentiated by."""
    if is_part(grad) and lies_of(grad).alike(lies):  # type: ignore[arg-type]
        return in_graph(grad)  # type: ignore[arg-type]
    if grad.requires_grad:
        raise TypeError(
            f"{lies.name} is held in parts, and a gradient of what is computed of it is to be differentiated by, which is whole. Call this "
            f"inside of `with model.full_parameters():`"
        )
    return cut_as(grad, lies)


def seen_as_itself(func: Callable[..., Any], x: AnyPart) -> Tensor:
    """x.expand_as(x): by what autograd records of it, and of nothing else, the node is found that adds a leaf's gradient up. TypeError
    where gradients are to be asked for by that node: they would be of a part."""
    frame: FrameType | None = asker(2)
    while frame is not None and frame.f_code.co_name == "_get_grad_fn_or_grad_acc":
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name == "get_gradient_edge":
        raise TypeError(f"{x._lies.name} is held in parts: ask torch.autograd.grad for the parameter itself, instead of its gradient edge")
    with plainly():
        found = func(x, x)
    found.__class__ = PartTensor
    found._lies = x._lies
    return found
