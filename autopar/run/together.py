"""Ranks that prepare the same thing: one decides for all, and an error on one of them is an error on every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from autopar import errors
from autopar.errors import LaunchError
from autopar.run import record
from autopar.run.groups import group_of

__all__ = ["decided_by_rank_0", "done_by_all", "talking", "told_by_all"]

T = TypeVar("T")


def talking() -> bool:
    """Whether there are other ranks that can be talked to (a fake process group moves nothing)."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def _everyone() -> dist.ProcessGroup | None:
    return group_of(tuple(range(dist.get_world_size()))).process_group


def done_by_all(make: Callable[[], T], *, same: Callable[[T], str], what: str) -> T:
    """Collective: make() on every rank. If it fails on some, it fails on all; `same` of the results must be equal.

    Raises the rank's own error, else LaunchError which names the rank that failed or differs.
    """
    if not talking():
        return make()
    try:
        made = make()
        mine = ("", same(made))
    except Exception as e:
        _all_gathered((type(e).__name__, str(e)))  # for which the other ranks wait
        raise
    found = _all_gathered(mine)
    for rank, (kind, text) in enumerate(found):
        if kind:
            raise LaunchError(f"{what} failed on rank {rank}: {kind}: {text}")
        if text != found[0][1]:
            raise LaunchError(
                f"{what}: rank {rank} has another result than rank 0. Give every rank the same model and a global batch of the same "
                f"shapes, and make its forward ask for no rank (os.environ, torch.distributed)"
            )
    return made


def told_by_all(mine: T) -> list[T]:
    """Collective: what each rank tells, on every rank."""
    return _all_gathered(mine) if talking() else [mine]


def _all_gathered(mine: T) -> list[T]:
    found: list[T] = [mine] * dist.get_world_size()
    everyone = _everyone()
    record.entered(record.AGREEMENT)
    dist.all_gather_object(found, mine, group=everyone)
    record.left()
    return found


def decided_by_rank_0(make: Callable[[], T]) -> T:
    """Collective: make() on rank 0 alone; its result, or its error, on every rank."""
    if not talking():
        return make()
    mine: tuple[list[str], str, T | None] = ([], "", None)
    if dist.get_rank() == 0:
        try:
            mine = ([], "", make())
        except Exception as e:
            _broadcast(([kind.__name__ for kind in type(e).__mro__], str(e), None))  # for which the other ranks wait
            raise
    kinds, text, result = _broadcast(mine)
    if kinds:
        known = {"ValueError": ValueError, "TypeError": TypeError} | {name: getattr(errors, name) for name in errors.__all__}
        same = next((known[kind] for kind in kinds if kind in known), None)
        raise same(text) if same is not None else LaunchError(f"planning failed on rank 0: {kinds[0]}: {text}")
    return cast(T, result)


def _broadcast(mine: tuple[list[str], str, T | None]) -> tuple[list[str], str, T | None]:
    answer, everyone = [mine], _everyone()
    record.entered(record.PLANNING)
    dist.broadcast_object_list(answer, src=0, group=everyone)
    record.left()
    return answer[0]
