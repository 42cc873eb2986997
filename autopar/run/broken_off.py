"""A call of the model that an error breaks off: on every rank, all of which may go on, or on one alone, with which the run is over.

A rank whose forward or backward raises takes no part in what the other ranks wait for in that call. If its loop catches the error and goes
on (a batch is left out, there was no memory for it), its next call would answer them, with the loss and gradients of another batch. So a
rank that raises looks into the others' records, whether they raise too; one that does alone talks to no other rank any more.
"""

from __future__ import annotations

import time

from autopar.run import record, watchdog
from autopar.run.record import Seen
from autopar.run.watchdog import Watchdog

__all__ = ["broken_off"]

_WAITS_S = 1.0  # in one collective: then a rank does not come to the error
_GRACE_S = 10.0  # outside of any
_PAUSE_S = 0.002


def broken_off(error: Exception, begun: int, *, staged: bool, lost: bool) -> None:
    """A call has raised this, on this rank at least. begun: `record.count` when it began. staged: whether ranks run different stages, which
    need not make as many collectives. lost: whether messages between stages may be on their way, which the next call would take for
    its own.

    Returns when it is known of all ranks of this machine. If this rank is alone with it, its next collective raises LaunchError, and the
    other ranks, which wait for it, end.
    """
    watch = watchdog.current()
    if watch is None:
        return
    mine = record.broke(0 if staged else record.count() - begun)
    if lost or not _by_all(watch, mine):
        watch.ends_alone(error)


def _by_all(watch: Watchdog, mine: int) -> bool:
    """Wait until each rank has broken off the same call after as many collectives (`record.broke`), or will not."""
    since: dict[int, tuple[object, float]] = {}
    while True:
        others = {rank: seen for rank, other in watch.beside.items() if mine not in (seen := other.seen()).broke}
        if not others:
            return True
        if any(_has_gone_on(seen, mine) for seen in others.values()):
            return False
        now, waiting = time.monotonic(), []
        for rank, seen in others.items():
            state = seen.begun, seen.phase, seen.at, seen.count, seen.line
            if rank not in since or since[rank][0] != state:
                since[rank] = state, now
            waiting.append(now - since[rank][1] > (_WAITS_S if seen.at else _GRACE_S))
        if all(waiting):
            return False
        time.sleep(_PAUSE_S)


def _has_gone_on(seen: Seen, mine: int) -> bool:
    return seen.state != record.RUNNING or seen.begun > record.call_of(mine) or max(seen.broke) > record.call_of(mine) << 32
