"""The peak memory of a stage's training step, from what is alive before, during and after each of its operators.

A forward pass keeps what autograd saves, and beside it what later operators of the stage still read. The backward pass frees what
was saved, operator by operator, makes the gradients of activations, and leaves those of parameters: the peak is often at
its beginning (logits, their logarithms, their gradients), with recomputation where a block runs again, with micro-batches
where the last one's backward begins. Everything is counted by storage: a view is what it views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.ir import Span, refs
from autopar.planner.activity import Activity
from autopar.planner.arriving import Arriving
from autopar.planner.storages import Storages, Store, span_of
from autopar.planner.units import Key, Units, Waiting
from cost_models.holds import OnRank

__all__ = ["POINTS", "KnownPasses", "Liveness", "Moment", "Pass", "Passes", "PieceBytes"]


class Moment(NamedTuple):
    """Bytes alive beside what rests: saved activations (of all micro-batches in flight), gradients of parameters, temporaries
    (results in use, gradients of activations, workspaces), communication buffers."""

    saved: int = 0
    gradients: int = 0
    temporary: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        return self.saved + self.gradients + self.temporary + self.communication

    def counted(self, *, accumulates: bool) -> int:
        """In all. accumulates: without gradients, which are added at once to others that rest."""
        return self.total - self.gradients * accumulates


POINTS = 12  # of the curve of a pass, each the most of a stretch of its moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Of the moments of a pass: those at which most is alive, of which no other has as much of every kind and in all; and the most bytes
    of each of a few stretches."""

    most: list[Moment]
    curve: list[int]

    @staticmethod
    def of(moments: Iterable[Moment], *, accumulates: bool) -> Pass:
        every = list(moments)
        nbytes = [s + t + c + (0 if accumulates else g) for s, g, t, c in every]  # as `counted`
        n = min(POINTS, len(nbytes))
        curve = [max(nbytes[k * len(nbytes) // n : (k + 1) * len(nbytes) // n]) for k in range(n)]
        return Pass(most=_most(every, accumulates=accumulates), curve=curve)


@dataclass(kw_only=True, slots=True)
class KnownPasses:
    """By what stages have that are alike: bytes that a micro-batch keeps, and by the pass too, its passes."""

    kept: dict[Hashable, int] = field(default_factory=dict)
    passes: dict[tuple[Hashable, ...], Pass] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PieceBytes:
    """Of a piece of a stage and one micro-batch. kept: storages that it keeps between forward and backward. The moment at which most is
    alive beside what earlier pieces keep: forward, while its forward pass runs; backward, while its backward pass does, gradients of its
    parameters included as they come; later, the same without these (they are there already)."""

    kept: Mapping[str, int]
    forward: Moment
    backward: Moment
    later: Moment


class Liveness(Storages):
    """The storages of one rank's program over the passes of a step."""

    @functools.cached_property
    def _freed_by(self) -> dict[tuple[Span, tuple[Span, ...]], Mapping[int, Sequence[str]]]:
        return {}

    # ----------------------------------------------------------------------------------------------------------- a stage
    def peaks(self, activity: Activity, known: KnownPasses | None = None) -> list[Moment]:
        """The moments of a step at which most is alive: no other has as much of every kind and in all. known: of the passes of stages that
        may be alike (Activity.alike); takes those of this one."""
        accumulates, passes = activity.accumulates, Passes(self, activity, known)
        units = self.units(activity)
        whole, flights, m = passes.held_bytes, activity.in_flight, activity.micro_batches
        none = Moment()
        all_gradients = Moment(gradients=activity.gradient_bytes)
        first = [(flights - 1, none, m == 1)]
        later = [(flights - 1 if m > flights else max(flights - 2, 0), all_gradients, m == 2)] if m > 1 else []
        last = [(0, all_gradients, True)] if m > 2 else []
        moments: list[Moment] = []
        forward = passes.forward(units).most
        for others, before, final in (*first, *later, *last):
            base = before._replace(saved=others * whole)
            if not (final and m > flights):
                moments += [_plus(base, x) for x in forward]
            moments += [_plus(base, x) for x in passes.backward(units, accumulated=bool(before.gradients), final=final).most]
        return _most([*moments, *self.ends(activity)], accumulates=accumulates)

    def peaks_of_rank(self, stages: Sequence[Activity], on_rank: OnRank, known: KnownPasses | None = None) -> list[Moment]:
        """The moments of a step at which most is alive on a rank that holds several stages. The gradients that a pass begins with are kept
        to its end. known: as of `peaks`."""
        accumulates = stages[0].accumulates
        passes = [Passes(self, a, known) for a in stages]
        held = [x.held_bytes for x in passes]
        gathers = any(a.where_used for a in stages)
        units: dict[object, Units] = {}  # by a pass and what comes after it
        gradients, left = [a.gradient_bytes for a in stages], [a.left_bytes for a in stages]
        waiting = sum(
            f * sum(self.crossing(a.receives).values()) + b * sum(self.crossing(a.sends).values())
            for (f, b), a in zip(on_rank.waiting, stages, strict=True)
        )
        own: dict[tuple[object, ...], list[Moment]] = {}
        found: list[Moment] = []
        for now in on_rank.before if gathers else on_rank.situations:
            k, some = now.stage, now.reduced[now.stage]
            ends = (k, now.pass_), now.after
            if ends not in units:
                follows = [(a, b) for a, b in on_rank.follows if a != ends[0] or b == now.after]
                units[ends] = self.units(*stages, follows=follows)
            key = ends, some, now.last
            if key not in own:
                if now.pass_ == "F":
                    own[key] = passes[k].forward(units[ends]).most
                else:
                    arrived = Moment(communication=sum(self.program.types[v].nbytes for v in stages[k].sends))
                    own[key] = [_plus(x, arrived) for x in passes[k].backward(units[ends], accumulated=some, final=now.last).most]
            beside = Moment(
                saved=sum(n * h for n, h in zip(now.held, held, strict=True)),
                gradients=sum(left[j] if now.done[j] else g for j, g in enumerate(gradients) if now.reduced[j]), communication=waiting,
            )  # fmt: skip
            found += [_plus(beside, x) for x in own[key]]
        return _most([*found, *self.ends(*stages)], accumulates=accumulates)

    def forward(self, activity: Activity, units: Units) -> Iterator[Moment]:
        """The moments of a forward pass, beside what other micro-batches keep and the gradients that are there."""
        return self._forward(activity, units, activity.span, Store())

    def backward(
        self, activity: Activity, units: Units, arriving: Arriving, *, accumulated: bool, final: bool, held: Store | None = None
    ) -> Iterator[Moment]:
        """Those of a backward pass. accumulated: gradients of parameters are there already; final: it is the last one of the step; held:
        what it begins with, if that is known, and it takes from that."""
        held = self.held(activity) if held is None else held
        return self._backward(activity, units, held, arriving, accumulated=accumulated, final=final)

    def ends(self, *stages: Activity) -> Iterator[Moment]:
        """The reduction of what is late, when all passes are over: beside its gradients their parts, and of several a copy."""
        late = {
            r: (a.sent_bytes(r), a.part_bytes(r)) for a in stages for r in a.late
            if r in a.gradients and r in a.scattered and not a.accumulates
        }  # fmt: skip
        if late:
            copied = sum(sent for sent, _ in late.values()) if len(late) > 1 else 0
            parts = sum(part for _, part in late.values())
            yield Moment(gradients=sum(a.left_bytes for a in stages) + parts, communication=copied)

    def piece(self, activity: Activity, units: Units, before: Collection[str], arriving: Arriving) -> PieceBytes:
        """A piece by itself, which keeps nothing because it was received or is sent. units: of the program. before: storages that earlier
        pieces keep, which are not counted again. arriving: from the pieces behind it; then those that it leaves."""
        kept = self.kept(activity.span, activity.recomputed)
        shared = sum(n for name, n in kept.items() if name in before)
        there = Store({name: n for name, n in kept.items() if name in before})
        forward = [Moment(saved=shared), *self._forward(activity, units, activity.span, there)]
        backward = [Moment(saved=kept.total)]
        backward += self._backward(activity, units, Store(kept), arriving, accumulated=False, final=False, ends=False)
        later = [x._replace(gradients=0) for x in backward]
        most = (max(moments, key=lambda x: x.total) for moments in (forward, backward, later))
        return PieceBytes(
            {name: n for name, n in kept.items() if name not in before}, *(x._replace(saved=x.saved - shared) for x in most)
        )

    def held(self, a: Activity) -> Store:
        """What a micro-batch keeps between its forward and its backward pass."""
        return self.kept(a.span, a.recomputed, self.crossing((*a.sends, *a.receives)))

    def _forward(self, a: Activity, units: Units, span: Span, held: Store) -> Iterator[Moment]:
        """Moments of a forward pass over a span; adds to `held` what it keeps (for a span that is run again: all that it saves)."""
        again = span in a.recomputed
        within = {} if again else span_of(a.recomputed)
        primed = bool(a.recomputed)
        own = self.made(span) if again else frozenset()
        let_go, gathered = self.let_go(span), units.forward
        live: dict[str, int] = {}
        for k in self.indices(span):
            for r in self.fresh[k]:
                live[r] = self._bytes[r]
            inside = within.get(k)
            if inside is None:
                held.put(_again(self.saved[k], own))
            elif k == inside.start:
                held.put(self.entering(inside))
            using = self.work[k].forward
            for r, n in live.items():
                if r not in held and not (primed and f"{r}'" in held):
                    using += n
            yield Moment(held.total, 0, using, gathered.get(k, 0))
            for r in let_go.get(k, ()):
                del live[r]

    def _freed(self, span: Span, recomputed: tuple[Span, ...]) -> Mapping[int, Sequence[str]]:
        """Of a span, parts of which run again: operator -> the storages that are kept until its backward pass is over."""
        if (span, recomputed) not in self._freed_by:
            holder: dict[str, int] = {}
            inner, within = {x: self.made(x) for x in recomputed}, span_of(recomputed)
            for k in reversed(self.indices(span)):
                inside = within.get(k)
                holder.update(dict.fromkeys(_again(self.saved[k], inner[inside] if inside is not None else ()), k))
            for x in recomputed:
                for r in self.entering(x):
                    holder[r] = min(holder.get(r, x.start), x.start)
            freed: dict[int, list[str]] = {}
            for r, k in holder.items():
                freed.setdefault(k, []).append(r)
            self._freed_by[span, recomputed] = freed
        return self._freed_by[span, recomputed]

    def units(self, *stages: Activity, follows: Collection[tuple[Key, Key]] = (((0, "F"), (0, "B")),)) -> Units:
        """Of the stages of a rank. follows: the passes that come one after the other."""
        sizes = {v: n for a in stages for v, n in a.where_used.items()}
        trained = {v for a in stages for v in a.gradients}
        passes: dict[Key, list[tuple[int, list[str]]]] = {}
        for j, a in enumerate(stages):
            indices = self.indices(a.span) if a.where_used else range(0)
            passes[j, "F"] = [(k, self._used(a, k, False)) for k in indices]
            passes[j, "B"] = [(k, self._used(a, k, True)) for k in reversed(indices)]
        return Units(sizes, trained, stages[0].units, passes, follows)

    def _used(self, a: Activity, k: int, backward: bool) -> list[str]:
        """The parameters that operator k reads in forward, or needs again in backward."""
        return [r for r in (self.read_again if backward else self.read)[k] if r in a.where_used]

    def _backward(
        self, a: Activity, units: Units, held: Store, arriving: Arriving, *, accumulated: bool, final: bool, ends: bool = True
    ) -> Iterator[Moment]:
        """Moments of a backward pass that begins with `held` and the gradients that arrive, and ends with those that it leaves.
        accumulated: gradients of parameters are there already. ends: no other piece of the stage comes after this one."""
        types, gradients, accumulates = self.program.types, a.gradients, a.accumulates
        within = span_of(a.recomputed)
        freed = self._freed(a.span, a.recomputed)
        complete: dict[str, int] = {}  # parameter -> the operator whose backward gives the last term of its gradient
        for k in reversed(self.indices(a.span)):
            if self.trains[k]:
                complete.update((r, k) for r in self.read[k] if r in gradients)
        own = Store()
        reducing = 0
        filling, scattering = Store(), Store()  # the buckets of the step and of the pass
        last: Store | None = None  # of the buckets of the step that have been sent
        waiting = Waiting(units)
        there = arriving.storage
        for k in reversed(self.indices(a.span)):
            here = [o for o in self.outputs[k] if o in there]
            whole = within.get(k)
            if whole is not None and whole.stop - 1 == k:  # before its last operator's backward all of it runs again
                for moment in self._forward(a, units, whole, held):
                    yield _plus(moment, Moment(gradients=own.total, temporary=arriving.total))
            if here:
                work, gathered = self.work[k], units.backward.get(k, 0)
                yield Moment(held.total, own.total, arriving.total + work.backward, reducing + waiting.bytes + gathered)
                origin = there[here[0]]
                for o in here:
                    arriving.drop(o)
                casting = 0  # the most that a gradient needs until it is in the dtype of rest
                for r, fresh in zip(refs(self.program.ops[k]), work.gradients, strict=True):
                    if r in gradients:
                        made, rests = gradients[r]
                        lower = fresh if r in a.cast else 0
                        casting = max(casting, lower and lower + (made if accumulated and r not in a.where_used else 0))
                        if r in a.where_used and r in a.at_once:
                            added = accumulated or r in own  # of a later micro-batch, or of another use
                            own.put({} if accumulated else {r: rests})
                            for copied, reducing, scattered in waiting.add(r, made, a.sent_bytes(r), rests if added else 0):
                                yield Moment(held.total, own.total, lower + arriving.total, copied + reducing + scattered + gathered)
                        elif accumulates:
                            reducing = made
                        elif r in a.at_once:
                            scattering.put({r: made} if complete[r] == k else {})
                            own.put({r: made})
                        else:
                            filling.put({r: made} if r in a.reduced and r not in a.late and complete[r] == k else {})
                            own.put({} if accumulated else {r: made})
                    elif types[r].grad and r not in there and r not in self._resting:
                        if fresh:
                            arriving.add(r, fresh)
                        else:
                            arriving.share(r, origin)
                if casting:
                    yield Moment(held.total, own.total, arriving.total + casting, reducing + waiting.bytes + gathered)
                full = [filling] if final and 0 < a.bucket_bytes <= filling.total else []
                full += [scattering] if scattering.total >= max(1, a.bucket_bytes) else []
                for bucket in full:  # its copy, beside the gradients that it is made of, and the parts
                    arrived = next(reversed(bucket.values())) if accumulated else 0  # and not added yet
                    yield Moment(
                        saved=held.total, gradients=own.total + a.parts_bytes(bucket), communication=sum(a.sent_bytes(r) for r in bucket),
                        temporary=arriving.total + arrived,
                    )  # fmt: skip
                    own.put(a.left_of(bucket, accumulated=accumulated))
                    if bucket is scattering:
                        reducing, scattering = sum(a.sent_bytes(r) for r in bucket) + (a.parts_bytes(bucket) if accumulated else 0), Store()
                    else:
                        reducing, filling, last = sum(a.sent_bytes(r) for r in bucket if r in a.summed) or reducing, Store(), bucket
            for r in freed.get(k, ()):
                held.drop(r)
        if scattering and ends:
            yield Moment(gradients=own.total + a.parts_bytes(scattering), communication=sum(a.sent_bytes(r) for r in scattering))
            own.put(a.left_of(scattering, accumulated=accumulated))
        if final:
            sent = sum(a.sent_bytes(r) for r in filling) if a.bucket_bytes else 0
            yield Moment(gradients=own.total + a.parts_bytes(filling), communication=max(sent, reducing))
            if a.sent and not a.accumulates:  # then all are brought to the dtype in which they rest, bucket by bucket
                rest = sum(rests for _, rests in a.gradients.values())
                before = sum(g[r in a.at_once] for r, g in a.gradients.items()) if accumulated else 0
                sent = sum(a.part_bytes(r) if r in a.scattered else a.sent_bytes(r) for r in filling or last or ())
                yield Moment(gradients=rest - before, communication=sent)


class Passes:
    """The passes of a stage, each worked out once, and once for all stages that are alike."""

    def __init__(self, liveness: Liveness, activity: Activity, known: KnownPasses | None) -> None:
        self._liveness, self._activity = liveness, activity
        self._known = known if known is not None and activity.alike is not None else KnownPasses()

    @property
    def held_bytes(self) -> int:
        """What a micro-batch keeps between its forward and its backward pass."""
        key = self._activity.alike
        if key not in self._known.kept:
            self._known.kept[key] = self._held.total
        return self._known.kept[key]

    def forward(self, units: Units) -> Pass:
        """A forward pass, as of `Liveness.forward`."""
        return self._of(("F",), units, lambda: self._liveness.forward(self._activity, units))

    def backward(self, units: Units, *, accumulated: bool, final: bool) -> Pass:
        """A backward pass, as of `Liveness.backward`."""

        def moments() -> Iterator[Moment]:
            a, live = self._activity, self._liveness
            sent = Arriving.of(a.sends, live.program)
            return live.backward(a, units, sent, accumulated=accumulated, final=final, held=Store(self._held))

        return self._of(("B", accumulated, final), units, moments)

    @functools.cached_property
    def _held(self) -> Store:
        return self._liveness.held(self._activity)

    def _of(self, which: tuple[Hashable, ...], units: Units, moments: Callable[[], Iterator[Moment]]) -> Pass:
        key = self._activity.alike, *which, units.alike(self._activity.span) if self._activity.where_used else None
        if key not in self._known.passes:
            self._known.passes[key] = Pass.of(moments(), accumulates=self._activity.accumulates)
        return self._known.passes[key]


def _again(saved: Mapping[str, int], made: Collection[str]) -> Mapping[str, int]:
    """What is saved, where it is made a second time by a span that runs again: another storage than the first, which others may keep."""
    return saved if not made else {f"{name}'" if name in made else name: n for name, n in saved.items()}


def _most(moments: Iterable[Moment], *, accumulates: bool) -> list[Moment]:
    """Those of which no other has as much of every kind and in all, whatever the same moment of another pass adds to each."""
    found: list[tuple[int, int, int, int, Moment]] = []
    for x in moments:
        saved, gradients, temporary, communication = x
        total = saved + temporary + communication + (0 if accumulates else gradients)
        for s, t, c, n, _ in found:
            if s >= saved and t >= temporary and c >= communication and n >= total:
                break
        else:
            found = [y for y in found if not (saved >= y[0] and temporary >= y[1] and communication >= y[2] and total >= y[3])]
            found.append((saved, temporary, communication, total, x))
    return [x for *_, x in found]


def _plus(a: Moment, b: Moment) -> Moment:
    return Moment(
        saved=a.saved + b.saved, gradients=a.gradients + b.gradients, temporary=a.temporary + b.temporary,
        communication=a.communication + b.communication,
    )  # fmt: skip
