"""The process groups that meshes use, and their end.

A gloo thread that lets go of the last reference to a tensor with a Python object needs the interpreter's lock; if the interpreter
has begun to finalize by then, the thread is ended within a destructor and the process is aborted (signal 6). So groups must be
gone before that: nothing but this module holds them, and an exit hook destroys them, which waits for their threads. The default
process group is not among them, since torch itself keeps it in defaults of functions; so autopar never talks over it.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import weakref
from collections.abc import Callable

import torch.distributed as dist

from autopar.run import watchdog

__all__ = ["Group", "finish_first", "group_of", "release", "released_at_exit", "started"]


class Group:
    """A process group of some global ranks, held here until `release`. gloo: whether that is its backend."""

    __slots__ = ("gloo", "process_group", "ranks")

    def __init__(self, ranks: tuple[int, ...], backend: str | None) -> None:
        self.ranks = ranks
        self.process_group: dist.ProcessGroup | None = dist.new_group(list(ranks), backend=backend)
        self.gloo = (backend or dist.get_backend()) == "gloo"


_groups: dict[tuple[tuple[int, ...], str], Group] = {}
_finish_first: list[Callable[[], None]] = []  # what must be over before groups are destroyed
_world: weakref.ref[dist.ProcessGroup] | None = None  # the default process group that they were made in
_started: weakref.WeakSet[dist.Work] = weakref.WeakSet()  # asynchronous collectives that somebody still waits for
_hooked = False


def group_of(ranks: tuple[int, ...], purpose: str = "", *, backend: str | None = None) -> Group:
    """The process group of these global ranks, made once for each default process group and purpose: what goes on at the same time needs
    groups of its own. backend: by default that of the default process group. Collective over all ranks."""
    global _world
    released_at_exit()
    world = dist.group.WORLD
    assert world is not None
    if _world is None or _world() is not world:
        _let_go()
        _world = weakref.ref(world)
        if dist.get_world_size() > 1 and dist.get_backend() != "fake":
            everyone = tuple(range(dist.get_world_size()))
            _groups[everyone, ""] = one = Group(everyone, None)
            assert one.process_group is not None
            watchdog.begin(one.process_group)
    key = (ranks, purpose)
    if key not in _groups:
        _groups[key] = Group(ranks, backend)
    return _groups[key]


def finish_first(wait: Callable[[], None]) -> None:
    """Have `wait` called before groups are destroyed: it waits for what other threads do with them."""
    if wait not in _finish_first:
        _finish_first.append(wait)


def started(work: dist.Work) -> dist.Work:
    """Note an asynchronous collective: while it is on its way its group cannot be destroyed without waiting for the other ranks."""
    _started.add(work)
    return work


def release() -> None:
    """Destroy all process groups, the default one too, and wait for their threads. Where a rank has failed, the others may never
    answer what is on its way: then nothing is waited for, and the groups are left to the end of the process."""
    for wait in _finish_first:
        wait()
    watchdog.end()  # first: others may find this rank's connections closed as soon as its groups go
    failed = getattr(sys, "last_value", None) is not None or any(not work.is_completed() for work in list(_started))
    if failed:
        for one in _groups.values():
            _keep_forever(one.process_group)
        if dist.is_available() and dist.is_initialized():
            _keep_forever(dist.group.WORLD)
        return
    _let_go()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def released_at_exit() -> None:
    """Have `release` called when the interpreter exits, before the hooks that are registered by now."""
    global _hooked
    if not _hooked:
        atexit.register(release)
        _hooked = True


def _let_go() -> None:
    for one in _groups.values():
        one.process_group = None
    _groups.clear()


def _keep_forever(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
