"""Tensors that stand in attributes and closures, alone or in tuples, lists and dicts, and that calls read and leave others in the place of:
hidden states of recurrent networks, membrane potentials, memories. A program takes each as an input, as it takes numbers that vary."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autopar.capture.held import ABSENT, REGISTERED, Held, Place, is_in, is_plain, places, put_back, shown_key
from autopar.capture.state import State
from autopar.run.objects import is_tuple, tuple_of

__all__ = ["Elsewhere", "Inside", "around", "begin_anew", "tensors_at"]


_CONTAINERS = (list, deque, dict, OrderedDict, defaultdict)
_TENSOR = object()  # stands for any tensor in the structure of a container


class Inside(NamedTuple):
    """Where a tensor stands: in a container of tensors, in the attribute or closure that `root` is, or there itself. keys: under which,
    from outside in. like: the structure of the container. free: the keys of numbers in it that vary, too."""

    root: Place
    keys: tuple[Any, ...]
    like: object
    free: frozenset[tuple[Any, ...]] = frozenset()

    @property
    def path(self) -> str:
        return self.root.path + "".join(f"[{shown_key(key)}]" for key in self.keys)

    @property
    def around(self) -> str:
        """The path of all of it."""
        return self.root.path

    def now(self) -> Any:
        """What stands there; ABSENT if the container is another one, or there is none."""
        found = self.root.now()
        if _structure(found, self.free) != self.like:
            return ABSENT
        for key in self.keys:
            found = found[key]
        return found

    def put(self, value: object) -> None:
        self.root.put(_with(self.root.now(), self.keys, value))

    def moved(self, now: Mapping[str, Any]) -> Inside | None:
        """The same where the root stands now."""
        root = now.get(self.root.path)
        return None if root is None else self._replace(root=root)


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    yield from container.items() if isinstance(container, dict) else enumerate(container)


def _is_container(value: object) -> bool:
    return type(value) in _CONTAINERS or is_tuple(value)


def _structure(value: Any, free: frozenset[tuple[Any, ...]], keys: tuple[Any, ...] = ()) -> object:
    """Of a container of tensors and plain values: its kinds, keys and plain values, but for the numbers that are free. An object of its own
    of anything else."""
    if isinstance(value, torch.Tensor):
        return _TENSOR
    if _is_container(value):
        return type(value), tuple((key, _structure(x, free, (*keys, key))) for key, x in _items(value))
    if keys in free and type(value) in (int, float):
        return type(value)
    return value if is_plain(value) else object()


def _leaves(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if not _is_container(value):
        yield keys, value
    for key, x in _items(value) if _is_container(value) else ():
        yield from _leaves(x, (*keys, key))


def _with(container: Any, keys: Sequence[Any], value: object) -> Any:
    """A container with something else in it: the same, unless it is a tuple."""
    if not keys:
        return value
    key, *rest = keys
    inner = _with(container[key], rest, value)
    if isinstance(container, tuple):
        return tuple_of(container, (*container[:key], inner, *container[key + 1 :]))
    if container[key] is not inner:
        container[key] = inner
    return container


def tensors_at(state: State, paths: Collection[str]) -> Iterator[tuple[torch.Tensor, Inside]]:
    """Of these places of a picture, those at which there is a tensor, alone or in a container of tensors and plain values. With one of a
    container come all of it, but for parameters: which of them calls replace may change from call to call."""
    for root in _outermost(state.held, paths).values() if paths else ():
        value = root.now()
        leaves = list(_leaves(value))
        named = {keys: Inside(root, keys, None).path in paths for keys, _ in leaves}
        free = frozenset(keys for keys, leaf in leaves if named[keys] and type(leaf) in (int, float))
        like = _structure(value, free)
        found = [(leaf, Inside(root, keys, like, free)) for keys, leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(named[inside.keys] and inside.now() is leaf for leaf, inside in found):
            yield from ((leaf, inside) for leaf, inside in found if named[inside.keys] or not isinstance(leaf, torch.nn.Parameter))


def _outermost(held: Sequence[Held], paths: Collection[str]) -> dict[str, Place]:
    """The attributes and closures in which some places are, by their own paths, in the order of the picture: of containers in one another
    the outermost. (Of an object each attribute is one.)"""
    known = {place.path: place for _, place in places(held)}
    found: set[str | None] = set()
    for path in paths:
        outer = (path[:n] for n, letter in enumerate(path) if letter == "[")
        found.add(next((one for one in (*outer, path) if one in known), None))
    return {path: place for path, place in known.items() if path in found}


class Elsewhere:
    """The attributes, closures, globals and defaults of functions in which parameters and buffers of a model stand, besides its registries:
    in what code that runs in a call may reach."""

    def __init__(self, model: torch.nn.Module, loss: object = None) -> None:
        self._model, self._loss = model, loss
        self._state: State | None = None  # without what it holds: which code there is
        self.paths: frozenset[str] = frozenset()  # of these places, as they were when they were last asked for

    def __call__(self) -> list[Place]:
        """As it is now."""
        state = State.take(self._model, self._loss, self._state)
        self._state = replace(state, leaves={}, versions={}, held=(), arrays=(), kept=())
        known = {place.path: place for _, place in places(state.held)}
        paths = [path for path, leaf in state.leaves.items() if leaf is REGISTERED]
        inner = {next((path[:n] for n in range(len(path), 0, -1) if path[:n] in known), None) for path in paths}
        if None in inner:  # defaults have a path of their own
            inner |= {path for path, place in known.items() if place.key == "__defaults__"}
        self.paths = frozenset(known) & inner
        return [place for path, place in known.items() if path in self.paths]


def around(state: State, paths: Collection[str]) -> frozenset[str]:
    """The paths of the attributes and closures in which some places are."""
    return frozenset(_outermost(state.held, paths))


def begin_anew(start: State, first: State, roots: frozenset[str]) -> None:
    """What stands in these attributes and closures is as it was before a first call, in the objects that stood there. first: after it."""
    if not roots:
        return
    before = {place.path: (value, place) for value, place in places(start.held)}
    for path, (value, place) in before.items():
        if path in roots or any(is_in(root, (path,)) for root in roots):
            place.put(value)
    for place in [place for _, place in places(first.held) if place.path in roots - before.keys()]:
        place.put(ABSENT)
    for held in start.held:
        if is_in(held.path.rstrip("."), roots):
            put_back(held)
