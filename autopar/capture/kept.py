"""What code gets from a call, though it is made once and anybody may change it: results that an lru_cache keeps, the thread, loggers."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from autopar.capture.held import KEPT, Held, is_plain
from autopar.capture.reach import LruCache, Reached
from autopar.capture.walk import DEPTH, Walk

__all__ = ["visit_kept"]

_FEW = 200  # results of one function
_OF_LOGGERS = frozenset({"getLogger", "isEnabledFor", "getEffectiveLevel"})


def visit_kept(walk: Walk, code: Reached) -> None:
    """Adds to a picture what the code may get so."""
    followed = {id(function) for function in code.functions}
    for cache in {id(cache): cache for cache in code.caches}.values():
        if id(cache.__wrapped__) in followed:
            _results(walk, cache)
    asked = code.names | code.asked
    if "current_thread" in asked:
        own = vars(threading.current_thread())
        _watched(walk, "threading.current_thread().", own, sorted(code.names & own.keys()))
    if not asked.isdisjoint(_OF_LOGGERS):
        _loggers(walk, code.names | {module for _, module, _ in code.scopes.values()})


def _results(walk: Walk, cache: LruCache[Any]) -> None:
    """Objects and containers among the results, by what they were asked for with. Not tensors, of which the trace makes others."""
    table, results = _entries(cache)
    shown = {key: result for key, result in results.items() if not is_plain(result) and not isinstance(result, torch.Tensor)}
    if not 0 < len(shown) <= _FEW:
        return
    function = cache.__wrapped__
    name = f"what {function.__qualname__.replace('.<locals>', '')} of {function.__module__} keeps"
    walk.held.append(Held(name, table, {key: table[key] for key in shown}, frozenset(shown), KEPT))
    before = walk.leaves.keys() | set()
    for key, result in shown.items():
        path = f"{name} for ({_text(key)})"
        walk.kept.append(path)
        walk.visit(path, result, DEPTH)
    for path in walk.leaves.keys() - before:
        if isinstance(walk.leaves[path], torch.Tensor):
            del walk.leaves[path]
            walk.versions.pop(path, None)


def _entries(cache: LruCache[Any]) -> tuple[dict[Any, Any], Mapping[Any, Any]]:
    """The dict of a cache, and its results by what they were asked for with. Where their number is bounded, the dict holds links, and
    the cache itself refers to each one's key, result and type."""
    held = gc.get_referents(cache)
    table = next((x for x in held if isinstance(x, dict) and x is not vars(cache)), {})
    if cache.cache_parameters()["maxsize"] is None:
        return table, dict(table)
    ends = [place for place, x in enumerate(held) if place >= 2 and x is type(next(iter(table.values()), None))][: len(table)]
    found = [(held[place - 2], held[place - 1]) for place in ends]
    return table, {key: result for key, result in found if key in table}


def _text(key: Any) -> str:
    """The arguments of a call, as they are found in a cache."""
    parts = key if isinstance(key, tuple) else (key,)
    return ", ".join(repr(x) if is_plain(x) else "*" if type(x) is object else f"a {type(x).__name__} {id(x)}" for x in parts)


def _loggers(walk: Walk, names: set[str]) -> None:
    """The levels of loggers that have one of these names, and of those above them."""
    known = {logger for name in names for logger in _and_above(logging.root.manager.loggerDict.get(name))}
    for logger in sorted(known, key=lambda logger: logger.name):
        _watched(walk, f"logging.getLogger({logger.name!r}).", vars(logger), ("level", "disabled"))
    _watched(walk, "logging.root.", vars(logging.root), ("level",))
    _watched(walk, "logging.root.manager.", vars(logging.root.manager), ("_disable",))


def _and_above(logger: object) -> Iterator[logging.Logger]:
    while isinstance(logger, logging.Logger) and logger is not logging.root:
        yield logger
        logger = logger.parent


def _watched(walk: Walk, path: str, attributes: dict[str, Any], names: Iterable[str]) -> None:
    """Those of the attributes of an object that have these names."""
    found = {name: attributes[name] for name in names if name in attributes}
    walk.held.append(Held(path, attributes, found, frozenset(found)))
    for name, value in found.items():
        walk.visit(f"{path}{name}", value, DEPTH)
