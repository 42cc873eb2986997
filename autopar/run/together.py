"""Ranks that prepare the same thing: one decides for all, and an error on one of them is an error on every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from autopar import errors
from autopar.errors import LaunchError
from autopar.run import record
from autopar.run.groups import group_of

__all__ = ["decided_by_rank_0", "done_by_all", "talking"]

T = TypeVar("T")
# What preparing ends with where the user's model or wishes are wrong. Anything else is a defect and ends its process.
_EXPECTED = (errors.AutoparError, ValueError, TypeError, RuntimeError)


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
    error: Exception | None = None
    mine = ("", "")
    try:
        made = make()
        mine = ("", same(made))
    except _EXPECTED as e:
        error, mine = e, (type(e).__name__, str(e))
    found: list[tuple[str, str]] = [mine] * dist.get_world_size()
    everyone = _everyone()
    record.entered(record.AGREEMENT)
    dist.all_gather_object(found, mine, group=everyone)
    record.left()
    if error is not None:
        raise error
    for rank, (kind, text) in enumerate(found):
        if kind:
            raise LaunchError(f"{what} failed on rank {rank}: {kind}: {text}")
        if text != found[0][1]:
            raise LaunchError(
                f"{what}: rank {rank} has another result than rank 0. Give every rank the same model and a global batch of the same shapes"
            )
    return made


def decided_by_rank_0(make: Callable[[], bytes]) -> bytes:
    """Collective: make() on rank 0 alone; its result, or its error, on every rank."""
    if not talking():
        return make()
    answer: list[tuple[list[str], str, bytes]] = [([], "", b"")]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer = [([], "", make())]
        except _EXPECTED as e:
            error, answer = e, [([kind.__name__ for kind in type(e).__mro__], str(e), b"")]
    everyone = _everyone()
    record.entered(record.PLANNING)
    dist.broadcast_object_list(answer, src=0, group=everyone)
    record.left()
    if error is not None:
        raise error
    kinds, text, result = answer[0]
    if kinds:
        known = {"ValueError": ValueError, "TypeError": TypeError} | {name: getattr(errors, name) for name in errors.__all__}
        raise next((known[kind] for kind in kinds if kind in known), LaunchError)(text)
    return result
