"""The pieces of one rank's program, each with its modes: seconds, and bytes as liveness counts them.

A storage that several pieces keep counts at the first of them; a parameter at the first that reads it, its gradient at the last, where
backward makes it first. A stage that begins behind them holds them too (`Piece.received_bytes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.axes import AXES
from autopar.ir import Program, Span
from autopar.planner.activity import Activity
from autopar.planner.arriving import Arriving
from autopar.planner.liveness import Liveness, Moment, PieceBytes
from autopar.planner.modes import RECOMPUTES, Mode, Recompute, Unsure, again_s, issued_s, run_again
from autopar.planner.price import Ledger
from autopar.planner.stage_account import Piece
from autopar.planner.stages import Cuts, Pieces, Segment, recomputable
from autopar.planner.units import Units

__all__ = ["AtRest", "PieceMaker", "lies_in_parts"]

Held = tuple[list[float], list[float], list[tuple[Mode, ...]]]  # of each segment: bytes received, bytes sent, modes


@dataclass(frozen=True, kw_only=True, slots=True)
class AtRest:
    """Bytes of some parameters on one rank: at rest with optimizer states, beyond that while passes run, and beyond that in the update."""

    rest: float
    passing: float
    update: float


@dataclass(kw_only=True)
class PieceMaker:
    """seconds: (forward, backward) of every segment. activity: of the whole program, whose gradients and units pieces share. at_rest: of
    the parameters that first appear in each segment; reads: all that each reads; trains: whether one of them is trained.
    reduced: values whose gradients are copied for a reduction at the end. passes: whether it is worked out what a pass needs beside what is
    kept; without it a piece needs no more than it keeps, which takes little time to know and is a bound from below. parts: of the axes
    that have several forms: storages that lie whole there, and operators that run whole there, count for one of so many parts (without
    passes)."""

    ledger: Ledger
    cuts: Cuts
    segments: Pieces
    activity: Activity
    seconds: Sequence[tuple[float, float]]
    at_rest: Sequence[AtRest]
    reads: Sequence[Collection[str]]
    trains: Sequence[bool]
    reduced: Collection[str]
    recompute: str
    passes: bool = True
    parts: int = 1
    _spans: dict[tuple[str, int], list[tuple[Span, ...]]] = field(default_factory=dict)
    _again: dict[tuple[int, tuple[Span, ...]], float] = field(default_factory=dict)
    _issued: dict[tuple[int, tuple[Span, ...]], float] = field(default_factory=dict)
    _bytes: dict[tuple[object, ...], PieceBytes] = field(default_factory=dict)

    @property
    def liveness(self) -> Liveness:
        return self.ledger.liveness

    def pieces(self) -> tuple[Piece, ...]:
        last = {v: k for k, own in enumerate(self.reads) for v in own}
        gradients = self.activity.gradients
        owned = [{v: gradients[v] for v in own if last[v] == k and v in gradients} for k, own in enumerate(self.reads)]
        received, sent, modes = self._held(owned)
        found: list[Piece] = []
        for k, ((forward_s, backward_s), rest, own) in enumerate(zip(self.seconds, self.at_rest, owned, strict=True)):
            made = {v: rests if v in self.activity.at_once else made for v, (made, rests) in own.items()}
            found.append(
                Piece(
                    forward_s=forward_s, backward_s=backward_s, rest_bytes=rest.rest, passing_bytes=rest.passing, update_bytes=rest.update,
                    gradient_bytes=0.0 if self.activity.accumulates else float(sum(made.values())),
                    reduced_bytes=float(sum(self._copied(v) for v in own if v in self.reduced)),
                    received_bytes=received[k], sent_bytes=sent[k], trains=self.trains[k], modes=modes[k],
                )
            )  # fmt: skip
        return tuple(found[k] for k in self.segments.order)

    def _held(self, owned: Sequence[Mapping[str, tuple[int, int]]]) -> Held:
        """Bytes that each segment receives and sends, and its modes; once for a program, its segments and what it does with gradients. What
        a parameter rests as counts where its gradient is in parts alone."""
        a = self.activity
        made = tuple(tuple((v, x[0], x[1] * (v in a.at_once)) for v, x in own.items()) for own in owned)
        used = (frozenset(a.where_used.items()), frozenset(a.units.items())) if a.where_used else ()
        in_passes = (made, used, a.bucket_bytes, a.accumulates, frozenset(a.sent.items())) if self.passes else (self.parts,)
        key = (self.segments.segments, self.recompute, in_passes)
        if key not in self.ledger.in_modes:
            self.ledger.in_modes[key] = self._found(owned)
        held: Held = self.ledger.in_modes[key]  # type: ignore[assignment]
        return held

    def _found(self, owned: Sequence[Mapping[str, tuple[int, int]]]) -> Held:
        every = self.segments.segments
        kept = [self.liveness.kept(x.span) for x in every]
        first: dict[str, int] = {}
        for k, storages in enumerate(kept):
            for x in storages:
                first.setdefault(x, k)
        entered = self._entered()
        units = self.liveness.units(self.activity) if self.passes else None
        modes: list[tuple[Mode, ...]] = []
        arriving = Arriving.of((self.ledger.program.loss,), self.ledger.program)
        for k in reversed(range(len(every))):
            entering = (x for x in self.liveness.entering(every[k].span) if entered.get(x, k) < k)
            before = {x for x in kept[k] if first[x] < k} | {*entering}
            modes.append(self._modes(every[k], owned[k], before, units, arriving))
        return self._received(kept, entered | first), [self._sent(k, first) for k in range(len(every))], modes[::-1]

    def _entered(self) -> dict[str, int]:
        """Storage -> the first segment that it enters of those whose operators may run again: where they do they keep what enters them,
        though without that they need not."""
        found: dict[str, int] = {}
        for k, x in enumerate(self.segments.segments):
            for name in self.liveness.entering(x.span) if x.block >= 0 else ():
                found.setdefault(name, k)
        return found

    def _copied(self, value: str) -> int:
        """Bytes beside a gradient while a bucket at the end of a step is sent: the copy, and the part that is made of it."""
        a = self.activity
        sent = a.sent_bytes(value)
        if value in a.at_once:
            return a.gradients[value][0] + sent
        return sent + (a.part_bytes(value) if value in a.scattered else 0)

    def _sends(self, k: int) -> tuple[str, ...]:
        stop = self.segments.segments[k].span.stop
        return self.cuts.crossing.get(stop, (self.ledger.program.loss,))

    def _received(self, kept: Sequence[Mapping[str, int]], first: Mapping[str, int]) -> list[float]:
        found = []
        behind: dict[str, int] = {}
        for k in range(len(kept) - 1, -1, -1):
            behind |= kept[k]
            start = self.segments.segments[k].span.start
            held = {x: n for x, n in behind.items() if first[x] < k}
            held |= {x: n for x, n in self.liveness.crossing(self.cuts.crossing.get(start, ())).items() if first.get(x, -1) < k}
            found.append(float(sum(held.values())))
        return found[::-1]

    def _sent(self, k: int, first: Mapping[str, int]) -> float:
        storages = self.liveness.crossing(self._sends(k))
        return float(sum(n for x, n in storages.items() if first.get(x, k + 1) > k))

    def _modes(
        self, segment: Segment, own: Mapping[str, tuple[int, int]], before: set[str], units: Units | None, arriving: Arriving
    ) -> tuple[Mode, ...]:
        """Of a segment; own: the gradients that are counted at it; before: what earlier ones keep of what it keeps; arriving: the
        gradients that those behind it leave, and then those that it leaves. units: none where passes are left out."""
        span = segment.span
        first = arriving.copy()
        choices: list[tuple[str, tuple[Span, ...]]] = [("none", ())]
        if segment.block >= 0 and recomputable(self.ledger.program, segment.span):
            asked = [row for row in RECOMPUTES.values() if self.recompute in ("auto", row.name)]
            choices += [(row.name, spans) for row in asked for spans in self._offered(row, segment) if spans]
        modes: list[Mode] = []
        for name, offsets in choices:
            spans = tuple(Span(span.start + s.start, span.start + s.stop) for s in offsets)
            again_s = sum(self._again_s(segment, s) for s in spans) + self._issued_s(segment, offsets, spans)
            if units is None:
                kept = sum(n / self._parts_of(x) for x, n in self.liveness.kept(span, spans).items() if x not in before)
                mode = Mode(name=name, again_s=again_s, kept_bytes=float(kept), spans=offsets)
            else:
                b = self._of(segment, spans, own, before, units, arriving if not spans else first.copy())
                mode = Mode(
                    name=name, again_s=again_s, kept_bytes=float(sum(b.kept.values())), forward_bytes=float(b.forward.total),
                    backward_bytes=float(b.backward.total), later_bytes=float(b.later.total), spans=offsets,
                    unsure=(_unsure(b.forward), _unsure(b.backward), _unsure(b.later)),
                )  # fmt: skip
            if not modes or mode.kept_bytes < modes[0].kept_bytes:
                modes.append(mode)
        return tuple(modes)

    def _offered(self, row: Recompute, segment: Segment) -> list[tuple[Span, ...]]:
        """Spans of a block's operators, counted from its first; once for a block."""
        key = row.name, segment.block
        if key not in self._spans:
            start = segment.span.start
            found = row.offers(self.ledger, self.liveness, segment.span)
            self._spans[key] = [tuple(Span(s.start - start, s.stop - start) for s in spans) for spans in found]
        return self._spans[key]

    def _again_s(self, segment: Segment, span: Span) -> float:
        offset = Span(span.start - segment.span.start, span.stop - segment.span.start)
        key = (segment.block, (offset,))
        if key not in self._again:
            again = again_s if self.parts == 1 else self._least_again_s
            self._again[key] = again(self.ledger, self.liveness, span)
        return self._again[key]

    def _issued_s(self, segment: Segment, offsets: tuple[Span, ...], spans: tuple[Span, ...]) -> float:
        if self.parts > 1:
            return 0.0
        key = (segment.block, offsets)
        if key not in self._issued:
            self._issued[key] = issued_s(self.ledger, self.liveness, segment.span, spans)
        return self._issued[key]

    def _least_again_s(self, ledger: Ledger, liveness: Liveness, span: Span) -> float:
        """Of a span without what other forms of an axis need not do again: no collectives, and what runs whole in parts."""
        again, ops = run_again(ledger, liveness, span), ledger.program.ops
        own = [k for k in range(again.start, again.stop) if not ops[k].target.startswith("autopar.C.")]
        return sum(ledger.costs[k].forward_s / max((self._parts_of(o) for o in ops[k].outputs if o), default=1) for k in own)

    def _parts_of(self, storage: str) -> int:
        """1 of what lies in parts already."""
        return 1 if self.parts == 1 or lies_in_parts(self.ledger.program, storage) else self.parts

    def _of(
        self, segment: Segment, spans: tuple[Span, ...], own: Mapping[str, tuple[int, int]], before: set[str], units: Units,
        arriving: Arriving,
    ) -> PieceBytes:  # fmt: skip
        """What liveness says; once for instances of a block that keep as much."""
        a, live = self.activity, self.liveness
        kept = live.kept(segment.span, spans)
        shared = sum(n for x, n in kept.items() if x in before)
        offsets = tuple(s.start - segment.span.start for s in spans), tuple(s.stop - segment.span.start for s in spans)
        gathered = sum(units.forward.get(k, 0) + units.backward.get(k, 0) for k in range(segment.span.start, segment.span.stop))
        key = (segment.block, offsets, sum(kept.values()), shared, sum(map(sum, own.values())), arriving.total, gathered)
        if segment.block < 0 or key not in self._bytes or not spans:
            activity = dataclasses.replace(
                a, span=segment.span, recomputed=spans, receives=(), sends=(), gradients=own, reduced=(), scattered=(),
                at_once=[v for v in own if v in a.at_once], where_used={v: n for v, n in a.where_used.items() if v in own},
            )  # fmt: skip
            self._bytes[key] = live.piece(activity, units, before, arriving)
        return self._bytes[key]


def _unsure(moment: Moment) -> Unsure:
    return Unsure(saved=float(moment.saved), temporary=float(moment.temporary))


def lies_in_parts(program: Program, value: str) -> bool:
    """Whether a rank has a part of a value alone, on an axis that has several forms."""
    layouts = (program.layouts.get(axis, {}).get(value) for axis, row in AXES.items() if row.forms)
    return any(x is not None and x.is_shard for x in layouts)
