"""A model computes with the global batch, as on one process: to code of its forward torch.distributed says that there is no other, and a
collective gives what it is given.

Else a sum over ranks in it (of a codebook, a centre, a queue) would count every sample once for each rank.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d  # its _get_default_group and _world, which say what the default group is

from autopar.run import record
from autopar.run.applies import Apply, Function, applied_by

__all__ = ["as_one_process", "is_collective", "written"]

_PAUSE_S = 0.001


def is_collective(function: object) -> bool:
    """Whether a function is one of torch.distributed's that talk to other ranks."""
    return getattr(function, "__module__", None) == c10d.__name__


class _Done:
    """A collective that has ended."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future = torch.futures.Future[Any]()
        future.set_result(None)
        return future


def _as_it_is(*_: object, **__: object) -> _Done:
    return _Done()


def _moves(output: Callable[[Any], Tensor], source: Callable[[Any], Tensor]) -> Callable[..., _Done]:
    """A collective of a group that writes one of its tensors to another. output, source: which, of its first two arguments."""

    def run(_: object, made: Any, given: Any, *__: object, **___: object) -> _Done:
        if isinstance(made, Sequence) and not made:  # of gather, on a rank that is not given any
            return _Done()
        with torch.no_grad():
            output(made).detach().copy_(source(given).detach())
        return _Done()

    return run


def _itself(x: Any) -> Any:
    return x


def _first(x: Any) -> Any:
    return x[0]


def _first_of_first(x: Any) -> Any:
    return x[0][0]


_METHODS: dict[str, Callable[..., Any]] = {  # of a process group of one; torch 2.11 has some under other names than 2.13
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier"), _as_it_is),
    **dict.fromkeys(("allgather", "gather"), _moves(_first_of_first, _first)),
    **dict.fromkeys(("reduce_scatter", "scatter"), _moves(_first, _first_of_first)),
    **dict.fromkeys(("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base"), _moves(_itself, _itself)),
    **dict.fromkeys(("all_to_all_single", "alltoall_base"), _moves(_itself, _itself)),
    "alltoall": _moves(_first, _first),
    "size": lambda _: 1,
    "rank": lambda _: 0,
}
_One: Any = type("_One", (), dict(_METHODS))
_ONE = _One()
_TALK = frozenset(name for name, x in vars(dist).items() if type(x) is FunctionType and is_collective(x))
_derived: weakref.WeakKeyDictionary[Function, Function] = weakref.WeakKeyDictionary()


def written(function: Function) -> Function:
    """The autograd function as its author wrote it."""
    found: Function = vars(function).get("_written", function)
    return found


def _alone(function: Function) -> Function:
    """The same, whose backward, where it talks to other ranks, runs as on one process too."""
    if function not in _derived:
        backward = function.backward
        if "_written" in vars(function) or not _talks(inspect.unwrap(backward)):
            _derived[function] = function
        else:

            def alone(ctx: Any, *gradients: Any) -> Any:
                with as_one_process():
                    return backward(ctx, *gradients)

            own = {"_written": function, "backward": staticmethod(alone), "__module__": function.__module__}
            kind: Any = type(function)
            _derived[function] = kind(function.__name__, (function,), own | {"__qualname__": function.__qualname__})
    return _derived[function]


def _applied_alone(apply: Apply, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return apply(_alone(function), *args, **kwargs)


def _talks(function: Any, depth: int = 3) -> bool:
    """Whether code of a function, or of one that it calls by name, names a collective."""
    code = getattr(function, "__code__", None)
    if code is None or not depth:
        return False
    names = set[str]()
    inner = [code]
    while inner:
        one = inner.pop()
        names |= {*one.co_names}
        inner += [x for x in one.co_consts if isinstance(x, CodeType)]
    called = (function.__globals__.get(name) for name in names)
    return not _TALK.isdisjoint(names) or any(_talks(x, depth - 1) for x in called if isinstance(x, FunctionType))


def _the_one() -> Any:
    return _ONE


_ITS_OWN = tuple(name for name in _METHODS if name in vars(dist.ProcessGroup)) if dist.is_available() else ()  # of any group


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, is_initialized() is False, and whoever does not ask finds groups of one process; what autograd functions do in backward is
    found so too, whenever that runs. Waits for a save that a thread does beside training, which asks for the group of all ranks too."""
    if not dist.is_available() or c10d._get_default_group is _the_one:
        yield
        return
    everyone, asked = dist.group.WORLD, c10d._get_default_group
    ranks: dict[Any, Any] = c10d._world.pg_group_ranks
    kinds: dict[Any, Any] = c10d._world.pg_map
    while everyone is not None and record.saves_beside():
        time.sleep(_PAUSE_S)
    methods = {name: vars(dist.ProcessGroup)[name] for name in _ITS_OWN}
    try:
        dist.group.WORLD = None
        c10d._get_default_group = _the_one
        ranks[_ONE], kinds[_ONE] = {0: 0}, ("gloo", None)
        for name in methods:  # a model may hold a group
            setattr(dist.ProcessGroup, name, _METHODS[name])
        with applied_by(_applied_alone):
            yield
    finally:
        for name, own in methods.items():
            setattr(dist.ProcessGroup, name, own)
        ranks.pop(_ONE, None)
        kinds.pop(_ONE, None)
        c10d._get_default_group = asked
        dist.group.WORLD = everyone
