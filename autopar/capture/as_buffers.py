"""Tensors in attributes of modules that calls change and read again: followed as buffers are, as ones that no state_dict holds."""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Callable, Collection
from itertools import chain
from types import CodeType

import torch
from torch import nn

from autopar.capture.follow import storage_of
from autopar.capture.reach import codes_of
from autopar.capture.state import State
from autopar.run.region import within

__all__ = ["as_buffers", "foreseen"]


def foreseen(model: nn.Module, loss: object) -> list[Callable[[], None]]:
    """Make buffers of the tensors in attributes of modules that code which may run reads, and assigns or may write to in place, where they
    can be: a call in training mode may do so, where one in evaluation mode does not. Gives what undoes it, one after another."""
    held = [(path, name) for path, m in model.named_modules() for name, x in vars(m).items() if type(x) is torch.Tensor]
    if not held:
        return []
    changed, read = set[str](), set[str]()
    state = State.take(model, loss)
    for function in state.reached.functions:
        for code in codes_of(function.__code__):
            made = list(dis.get_instructions(code))
            changed |= {i.argval for i in made if i.opname == "STORE_ATTR"}
            read |= {i.argval for i in made if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
            writes = any(i.opname == "STORE_SUBSCR" for i in made) or "out" in _words(code)
            if writes or any(name.endswith("_") and not name.endswith("__") for name in code.co_names):
                changed |= {*code.co_names}
    places = [within(path, name) for path, name in held if name in changed & read]
    return [undo for place in places if (undo := as_buffers(model, [place], state))][::-1]


def _words(code: CodeType) -> set[object]:
    """The names of keyword arguments that code gives."""
    return {word for const in code.co_consts if isinstance(const, tuple) for word in const}


def as_buffers(model: nn.Module, places: Collection[str], state: State) -> Callable[[], None] | None:
    """Make buffers of the tensors in attributes of modules at some places of a model's picture, and give what makes them attributes again;
    None where one of them cannot be: it is elsewhere, needs a gradient, shares memory with another tensor, or a class has its name. They
    are in no state_dict, as before."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = chain(model.parameters(), model.buffers(), state.tensors.values())
    sharing = Counter(storage_of(t) for t in tensors if t.layout == torch.strided)
    found: list[tuple[nn.Module, str, torch.Tensor]] = []
    for place in places:
        path, _, name = place.rpartition(".")
        module = modules.get(path)
        tensor = None if module is None else vars(module).get(name)
        if module is None or type(tensor) is not torch.Tensor:
            return None
        if tensor.requires_grad or tensor.layout != torch.strided or sharing[storage_of(tensor)] > 1:
            return None
        found.append((module, name, tensor))
    before = [(module, dict(vars(module))) for module in {id(m): m for m, _, _ in found}.values()]

    def undo() -> None:
        for module, name, tensor in found:
            module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
            vars(module)[name] = tensor
        for module, attributes in before:  # in the order in which they were
            now = vars(module)
            for key in attributes:
                now[key] = now.pop(key)

    for module, name, tensor in found:
        del vars(module)[name]
        if hasattr(module, name):  # by its class, or by a __getattr__ of the user's
            undo()
            return None
        module.register_buffer(name, tensor, persistent=False)
    return undo
