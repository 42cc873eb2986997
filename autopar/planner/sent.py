"""The collectives of a step by kind and axis, each as if nothing hid it: what a run has measured of a kind stands beside that.

Of every pipeline rank: those in the program of one micro-batch, in forward, in backward and where it runs again; parameters that are
gathered where they are used, and their gradients; what is brought together once a step (planner.exchange); what stages send one another.
What ranks tell each other beside (that they run the same) is no part of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.axes import LAYERS
from autopar.ir import refs
from autopar.planner.candidate import Candidate
from autopar.planner.exchange import Sent
from autopar.planner.plan_account import SentAccount

__all__ = ["sent_of"]


def sent_of(c: Candidate) -> list[SentAccount]:
    """Of each pipeline rank, kind by kind, those that take longest first."""
    found = []
    for rank in range(c.flow.ranks):
        totals: dict[tuple[str, str], tuple[float, float]] = {}
        for one in _of_rank(c, rank):
            axis = " and ".join(one.axes)
            count, seconds = totals.get((one.kind, axis), (0.0, 0.0))
            totals[one.kind, axis] = count + one.count, seconds + one.count * one.seconds
        listed = sorted(totals.items(), key=lambda x: -x[1][1])
        found += [
            SentAccount(rank=rank, kind=kind, axis=axis, count=round(count), seconds=float(seconds))
            for (kind, axis), (count, seconds) in listed if round(count)
        ]  # fmt: skip
    return found


def _of_rank(c: Candidate, rank: int) -> Iterator[Sent]:
    e, bounds, times = c.estimator, (0, *c.part.cuts, len(c.estimator.segments)), c.rank.micro_batches
    held = [(bounds[s], bounds[s + 1]) for s in c.flow.stages_of(rank)]
    for i, j in held:
        for k in range(i, j):
            yield from _times(times, _of_piece(c, k))
            yield from _times(times, e.exchange.in_a_pass(e.gathered(e.own(k, k + 1)).values()))
        for at in [b for b in (i, j) if 0 < b < len(e.segments)]:  # what comes in, and what goes on, and their gradients
            nbytes = sum(c.rank.program.types[v].nbytes for v in c.rank.cuts.crossing.get(c.segments[at].span.start, ()))
            hop_s = e.pricer.collective_s("p2p", nbytes, LAYERS)
            yield from (Sent(kind=kind, axes=(LAYERS,), count=times, seconds=hop_s) for kind in ("send", "recv"))
    yield from e.exchange.in_a_step(e.params_of(list(dict.fromkeys(x for i, j in held for x in e.own(i, j)))))


def _of_piece(c: Candidate, k: int) -> Iterator[Sent]:
    """Of one micro-batch."""
    program, pricer, span = c.rank.program, c.estimator.pricer, c.segments[k].span
    again = {n for x in c.estimator.again(k, c.part.modes[k]) for n in range(x.start, x.stop)}
    for n in range(span.start, span.stop):
        op = program.ops[n]
        if not op.target.startswith("autopar."):
            continue
        ins, outs = (tuple(program.types[v] for v in values) for values in (refs(op), [o for o in op.outputs if o is not None]))
        forward, backward = pricer.sends(op, ins, outs)
        for kind, seconds in (*forward, *(forward if n in again else ()), *backward):
            yield Sent(kind=kind, axes=(str(op.kwarg("axis")),), count=1, seconds=seconds)


def _times(n: int, sent: Iterable[Sent]) -> Iterator[Sent]:
    return (Sent(kind=x.kind, axes=x.axes, count=n * x.count, seconds=x.seconds) for x in sent)
