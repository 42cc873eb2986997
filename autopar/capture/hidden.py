"""Parameters and buffers that torch.export need not see: those of submodules whose calls are one operator each while a model is exported.

Each would be an input of the graph that nothing reads. They are out of their registries for the time of the export. Code of the model that
looks for one while it runs is refused, even where it goes on without: what it did was compared with them in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

__all__ = ["Hidden", "Seen", "can_be_hidden"]

_REGISTRIES = ("_parameters", "_buffers")


class Seen(Exception):
    """The model's code looked at a registry that is hidden."""


class Hidden:
    """seen: whether the model's code looked at a registry of these modules."""

    def __init__(self, modules: Collection[nn.Module]) -> None:
        self.seen = False
        registries = [(vars(m), name, vars(m).get(name)) for m in modules for name in _REGISTRIES]
        self._own = [(own, name, table, _Watched(self, table)) for own, name, table in registries if table]

    @contextlib.contextmanager
    def hiding(self) -> Iterator[None]:
        """Inside, the registries are empty."""
        with self._swapped(lambda table, watched: {}, lambda table, watched: table):
            yield

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, where they are hidden, the registries are as they were."""
        with self._swapped(lambda table, watched: table, lambda table, watched: {}):
            yield

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, where they are shown, whoever looks at one is refused."""
        with self._swapped(lambda table, watched: watched, lambda table, watched: table):
            yield

    @contextlib.contextmanager
    def _swapped(self, now: Callable[..., Any], then: Callable[..., Any]) -> Iterator[None]:
        try:
            for own, name, table, watched in self._own:
                own[name] = now(table, watched)
            yield
        finally:
            for own, name, table, watched in self._own:
                own[name] = then(table, watched)


class _Watched(dict[str, Any]):
    """Stands for a registry. Whether it has a name that it has not may be asked: attributes are looked for everywhere."""

    def __init__(self, hidden: Hidden, table: dict[str, Any]) -> None:
        super().__init__()
        self._hidden, self._names = hidden, frozenset(table)

    def _seen(self, *args: Any, **kwargs: Any) -> Any:
        self._hidden.seen = True
        raise Seen

    def __contains__(self, name: object) -> bool:
        return name in self._names and bool(self._seen())

    def get(self, name: str, default: Any = None) -> Any:
        return self._seen() if name in self._names else default

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __reversed__ = __len__ = __eq__ = __ne__ = __or__ = __ior__ = __ror__ = _seen
    keys = values = items = copy = pop = popitem = setdefault = update = clear = _seen


def can_be_hidden(model: nn.Module, modules: Collection[nn.Module]) -> bool:
    """Whether nothing outside of these modules shares memory with their parameters and buffers."""
    ids = set(map(id, modules))
    inside, outside = set[int](), set[int]()
    for module in model.modules():
        found = inside if id(module) in ids else outside
        tensors = [*module._parameters.values(), *module._buffers.values()]
        found |= {t.untyped_storage()._cdata for t in tensors if t is not None}
    return not inside & outside
