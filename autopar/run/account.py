"""What the records of ranks say, in words: who has gone, who waits for whom, and where a rank is in its program."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Set

import torch.distributed as dist

from autopar.run import record
from autopar.run.record import Seen

__all__ = ["culprit", "killed", "not_by_all", "not_equally_often", "wait_of", "whereabouts"]

_PLACES = tuple(os.path.dirname(os.path.dirname(os.path.abspath(path))) for path in (record.__file__, dist.__file__))


def culprit(others: Mapping[int, Seen], dead: Set[int], rank: int, own: Seen, world: int) -> str:
    """Which of the other ranks has gone, and what it was doing; '' if none has. One that was killed before one that failed, and that
    before one that has ended because another did."""
    gone = {r: s for r, s in others.items() if r in dead}
    for r, seen in gone.items():
        if seen.state == record.RUNNING:
            return killed(r, seen, world, _apart(rank, own, {r: seen}) or not_by_all({r: seen, rank: own}))
    for r, seen in others.items():
        if seen.state == record.FAILED:
            if r in dead:
                return (
                    f"rank {r} of {world} has failed {seen.where}: {seen.text} (its own traceback is above, or in its log). The other "
                    f"ranks end"
                )
            return (
                f"rank {r} of {world} has raised {seen.text}, {seen.where}, which other ranks have not, and goes on. They wait for it, and "
                f"end: an error that the loop catches must be the same on all ranks"
            )
    for seen in gone.values():
        if seen.state == record.FOLLOWED and seen.text:
            return seen.text
    for r, seen in gone.items():
        if seen.state == record.ENDED and own.at:
            return (
                f"rank {r} of {world} has ended by itself ({seen.where}), and rank {rank} waits for it, {own.where}: all ranks must make "
                f"the same calls, as many batches, saves and evaluations"
            )
    return ""


def killed(rank: int, seen: Seen, world: int, why: str = "", how: str = "was killed, or crashed,") -> str:
    return (
        f"rank {rank} of {world} (process {seen.pid}) {how} {seen.where}{why}. What came after the last checkpoint is lost; the "
        f"other ranks end"
    )


def _apart(rank: int, own: Seen, others: Mapping[int, Seen]) -> str:
    """What is wrong where two ranks call the model in different ways."""

    def calls(seen: Seen) -> dict[int, int]:
        return {step: given for step, given in zip((seen.step - 1, seen.step), seen.given, strict=True) if given}

    def differs(seen: Seen) -> bool:
        return any(calls(own).get(step, given) != given for step, given in calls(seen).items())

    if (other := next((r for r, seen in others.items() if differs(seen)), None)) is None:
        return ""
    return f"; ranks {min(rank, other)} and {max(rank, other)} are called with inputs of different shapes, or in different modes"


def not_by_all(seen: Mapping[int, Seen]) -> str:
    """What is wrong where some ranks are in a collective of a call of the model, and others in one outside of it."""
    called = [r for r, s in seen.items() if s.at and s.phase in (record.FORWARD, record.BACKWARD)]
    apart = [r for r, s in seen.items() if s.at and s.phase == record.OUTSIDE and s.kind != record.PLANNING]
    if not called or not apart:
        return ""
    asks, has = ("asks" if len(apart) == 1 else "ask"), ("has" if len(called) == 1 else "have")
    return (
        f"; {_ranks(apart)} {asks} for something in which all ranks have a part (whole parameters or gradients, norms of them, a "
        f"state_dict, what a call returns beside its loss), and {_ranks(called)} {has} gone on to call the model: do it on every rank, not "
        f"under `if rank == 0`, and print or write on one"
    )


def not_equally_often(seen: Mapping[int, Seen]) -> str:
    """What is wrong where all ranks wait in collectives, of different calls of the model: none of them goes on."""
    if not all(s.at and s.kind not in record.UNTIMED for s in seen.values()):
        return ""
    most, least = (choose(seen, key=lambda r: seen[r].begun) for choose in (max, min))
    if seen[most].begun == seen[least].begun:
        return ""
    return (
        f"; rank {most} is in a later call of the model than rank {least}, and each waits for the other: all ranks must call it equally "
        f"often (an evaluation on rank 0 alone is to be done by all, of which rank 0 prints the result)"
    )


def wait_of(seen: Mapping[int, Seen], dead: Set[int], rank: int, world: int, waits_s: float) -> str:
    """Which ranks of a machine wait for which. rank: one that waits."""
    waiting = {r: s for r, s in seen.items() if s.waits or r == rank}
    text = f"{_ranks(list(waiting))} of {world} {'has' if len(waiting) == 1 else 'have'} waited {waits_s:.0f} s"
    by_place: dict[str, list[int]] = {}
    for r, s in waiting.items():
        by_place.setdefault(f"{s.where}{f' ({s.text})' if s.text else ''}", []).append(r)
    places = [place if len(by_place) == 1 else f"{_ranks(ranks)} {place}" for place, ranks in by_place.items()]
    text += f"{'' if len(places) == 1 else ':'} {'; '.join(places)}"
    text += _apart(rank, seen[rank], seen) or not_by_all(seen) or not_equally_often(seen)
    for r, s in sorted(seen.items()):
        if r not in waiting:
            text += f"; rank {r} {'has ended' if r in dead else 'is'} {s.where}{f' ({s.text})' if s.text and r not in dead else ''}"
    return text


def whereabouts(thread: int) -> str:
    """The line of the user's program, and of the emitted module, at which a thread is."""
    frames = traceback.extract_stack(sys._current_frames().get(thread))
    emitted = [f for f in frames if f.filename.startswith("<autopar_emitted_")]
    users = [f for f in frames if not f.filename.startswith((*_PLACES, "<"))]
    found = [f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in users[-1:]]
    found += [f"line {f.lineno} of the emitted module (`{f.line}`)" for f in emitted[-1:]]
    return ", ".join(found)


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, sorted(ranks)[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"
