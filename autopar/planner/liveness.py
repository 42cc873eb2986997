"""The peak memory of a stage's training step, from what is alive before, during and after each of its operators.

A forward pass keeps what autograd saves, and beside it what later operators of the stage still read. The backward pass frees what
was saved, operator by operator, makes the gradients of activations, and leaves those of parameters: the peak is often at
its beginning (logits, their logarithms, their gradients), with recomputation where a block runs again, with micro-batches
where the last one's backward begins. Everything is counted by storage: a view is what it views.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autopar.ir import Op, Program, Span, refs
from autopar.measure.costs import GATHER
from autopar.measure.workspace import Workspace, workspace
from autopar.planner.units import Key, Units, Waiting
from cost_models.holds import OnRank

__all__ = ["Activity", "Arriving", "Liveness", "Moment", "PieceBytes", "gathered_from"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What runs on a stage. span: its operators; recomputed: the spans in it that run again in backward. in_flight, micro_batches:
    of the schedule. gradients: parameter value -> bytes of its gradient as it is made and as it rests. reduced: the parameters whose
    gradients are gathered into buckets for a reduction; scattered: those of them that are reduce-scattered at the end of the step, with a
    bucket that stays until then; late: parameters that other ranks use too, whose gradients are complete when all passes are over;
    at_once: those that are reduce-scattered in every backward pass, by unit or by bucket, of which the parts
    alone stay. bucket_bytes: 0 if gradients are reduced where they lie. accumulates: gradients are added at once into
    buffers that are not counted here. where_used: value -> bytes of the parameters that are gathered where they are used; units:
    value -> what it is gathered with (see units.gather_units). cast: the parameters that are used in a lower dtype, in which backward makes
    their gradients."""

    span: Span
    recomputed: tuple[Span, ...]
    sends: tuple[str, ...]
    receives: tuple[str, ...]
    in_flight: int
    micro_batches: int
    gradients: Mapping[str, tuple[int, int]]
    reduced: Collection[str]
    scattered: Collection[str]
    at_once: Collection[str]
    where_used: Mapping[str, int]
    units: Mapping[str, int]
    bucket_bytes: int
    accumulates: bool = False
    late: Collection[str] = ()
    cast: Collection[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceBytes:
    """Of a piece of a stage and one micro-batch. kept: storages that it keeps between forward and backward. The most that is alive beside
    what earlier pieces keep: forward, while its forward pass runs; backward, while its backward pass does, gradients of its parameters
    included as they come; later, the same without these (they are there already)."""

    kept: Mapping[str, int]
    forward: int
    backward: int
    later: int


@dataclass(kw_only=True, slots=True)
class Arriving:
    """The gradients of activations that are there: value -> its storage, and the storages' bytes. Two values may share one."""

    storage: dict[str, int]
    nbytes: dict[int, int]

    @staticmethod
    def of(values: Sequence[str], program: Program) -> Arriving:
        """One for each of these values."""
        each = dict.fromkeys(values)
        return Arriving(storage={v: k for k, v in enumerate(each)}, nbytes={k: program.types[v].nbytes for k, v in enumerate(each)})

    def copy(self) -> Arriving:
        return Arriving(storage=dict(self.storage), nbytes=dict(self.nbytes))

    @property
    def total(self) -> int:
        return sum(self.nbytes[t] for t in set(self.storage.values()))


class _Store(dict[str, int]):
    """Storages by name, and their bytes in all."""

    def __init__(self, items: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.total = 0
        self.put(items or {})

    def put(self, items: Mapping[str, int]) -> None:
        for name, nbytes in items.items():
            self.total += nbytes - self.get(name, 0)
            self[name] = nbytes

    def drop(self, name: str) -> None:
        self.total -= self.pop(name, 0)


class Liveness:
    """The storages of one rank's program: who makes, saves and last reads each."""

    def __init__(self, program: Program, *, gpu: bool = False, regathers: bool = False) -> None:
        self.program, self.gpu = program, gpu
        self._kept_as = gathered_from(program) if regathers else {}
        self._resting = {x.value for x in program.leaves}
        self._root: dict[str, str] = {v: v for v in self._resting}
        self._bytes: dict[str, int] = {}
        self.work: list[Workspace] = []
        self.saved: list[dict[str, int]] = []
        self.trains: list[bool] = []  # whether a gradient passes through an operator
        strides: dict[str, tuple[int, ...]] = {}
        for v in self._resting:
            strides[v] = _contiguous(program.types[v].shape)
        for op in program.ops:
            self._take(op, strides)
        self._let_go = _line_ends(program.ops)

    def _take(self, op: Op, strides: dict[str, tuple[int, ...]]) -> None:
        types, operands = self.program.types, refs(op)
        results = tuple(o for o in op.outputs if o is not None)
        ins, outs = tuple(types[r] for r in operands), tuple(types[o] for o in results)
        w = workspace(op, ins, tuple(strides[r] for r in operands), outs, self.gpu)
        made = [k for k, o in enumerate(op.outputs) if o is not None]
        for o, k in zip(results, made, strict=True):
            fresh = w.results[k] if k < len(w.results) else 0
            strides[o] = w.strides[k] if k < len(w.strides) else _contiguous(types[o].shape)
            self._root[o] = o if fresh or not operands else self._root[operands[0]]
            if self._root[o] == o:
                self._bytes[o] = fresh
        saves: dict[str, int] = {}
        self.trains.append(not op.no_grad and any(types[o].grad for o in results))
        if self.trains[-1]:
            names = [self._kept_as.get(operands[k], operands[k]) for k in w.saved_inputs] + [op.outputs[k] for k in w.saved_outputs]
            saves = {self._root[v]: self._bytes[self._root[v]] for v in names if v is not None and self._root[v] not in self._resting}
            if w.saved_other:
                saves[f"{op.name}#"] = w.saved_other
        self.work.append(w)
        self.saved.append(saves)

    # ----------------------------------------------------------------------------------------------------------- a stage
    def peak(self, activity: Activity) -> Moment:
        """The moment of a step at which most is alive."""
        held = self._held(activity)
        units = self.units(activity)
        whole, flights, m = held.total, activity.in_flight, activity.micro_batches
        none = Moment()
        there = {} if activity.accumulates else activity.gradients
        all_gradients = Moment(gradients=sum(g[r in activity.at_once] for r, g in there.items()))
        first = [(flights - 1, none, m == 1)]
        later = [(flights - 1 if m > flights else max(flights - 2, 0), all_gradients, m == 2)] if m > 1 else []
        last = [(0, all_gradients, True)] if m > 2 else []
        moments: list[Moment] = []
        for others, before, final in (*first, *later, *last):
            base = before._replace(saved=others * whole)
            if not (final and m > flights):
                moments += [_plus(base, x) for x in self._forward(activity, units, activity.span, _Store())]
            some = bool(before.gradients)
            sent = Arriving.of(activity.sends, self.program)
            moments += [_plus(base, x) for x in self._backward(activity, units, _Store(held), sent, accumulated=some, final=final)]
        moments += self.ends(activity)
        return max(moments, key=lambda x: x.total - x.gradients * activity.accumulates)

    def peak_of_rank(self, stages: Sequence[Activity], on_rank: OnRank) -> Moment:
        """The moment of a step at which most is alive on a rank that holds several stages. The gradients that a pass begins with are kept
        to its end."""
        held = [self._held(a) for a in stages]
        gathers = any(a.where_used for a in stages)
        units: dict[object, Units] = {}  # by a pass and what comes after it
        gradients = [sum(g[r in a.at_once] for r, g in a.gradients.items()) if not a.accumulates else 0 for a in stages]
        left = [self.left_behind(a) for a in stages]
        waiting = sum(
            f * sum(self.crossing(a.receives).values()) + b * sum(self.crossing(a.sends).values())
            for (f, b), a in zip(on_rank.waiting, stages, strict=True)
        )
        known: dict[tuple[object, ...], Moment] = {}
        found: list[Moment] = []
        for now in on_rank.before if gathers else on_rank.situations:
            k, some = now.stage, now.reduced[now.stage]
            ends = (k, now.pass_), now.after
            if ends not in units:
                follows = [(a, b) for a, b in on_rank.follows if a != ends[0] or b == now.after]
                units[ends] = self.units(*stages, follows=follows)
            key = ends, some, now.last
            if key not in known:
                if now.pass_ == "F":
                    own = list(self._forward(stages[k], units[ends], stages[k].span, _Store()))
                else:
                    sent = Arriving.of(stages[k].sends, self.program)
                    own = list(self._backward(stages[k], units[ends], _Store(held[k]), sent, accumulated=some, final=now.last))
                    arrived = sum(self.program.types[v].nbytes for v in stages[k].sends)
                    own = [_plus(x, Moment(communication=arrived)) for x in own]
                known[key] = max(own, key=lambda x: x.total - x.gradients * stages[k].accumulates)
            beside = Moment(
                saved=sum(n * h.total for n, h in zip(now.held, held, strict=True)),
                gradients=sum(left[j] if now.done[j] else g for j, g in enumerate(gradients) if now.reduced[j]), communication=waiting,
            )  # fmt: skip
            found.append(_plus(beside, known[key]))
        return max([*found, *self.ends(*stages)], key=lambda x: x.total - x.gradients * stages[0].accumulates)

    def forward(self, activity: Activity, units: Units) -> Iterator[Moment]:
        """The moments of a forward pass, beside what other micro-batches keep and the gradients that are there."""
        return self._forward(activity, units, activity.span, _Store())

    def backward(self, activity: Activity, units: Units, arriving: Arriving, *, accumulated: bool, final: bool) -> Iterator[Moment]:
        """Those of a backward pass. accumulated: gradients of parameters are there already; final: it is the last one of the step."""
        return self._backward(activity, units, self._held(activity), arriving, accumulated=accumulated, final=final)

    def held_bytes(self, activity: Activity) -> int:
        """What a micro-batch keeps between its forward and its backward pass."""
        return self._held(activity).total

    @staticmethod
    def gradient_bytes(activity: Activity) -> int:
        """Of the gradients of parameters that a backward pass leaves."""
        return 0 if activity.accumulates else sum(g[r in activity.at_once] for r, g in activity.gradients.items())

    @staticmethod
    def left_behind(a: Activity) -> int:
        """Bytes of the gradients of a stage whose passes are over: of what was reduce-scattered, its part and the bucket."""
        if a.accumulates:
            return 0
        kept = {r: rests if r in a.at_once else made for r, (made, rests) in a.gradients.items()}
        return sum(kept.values()) + sum(a.gradients[r][1] for r in a.scattered if r in kept and r not in a.late)

    def ends(self, *stages: Activity) -> Iterator[Moment]:
        """The reduction of what is late, when all passes are over: beside its gradients their parts, and of several a copy."""
        late = {r: a.gradients[r] for a in stages for r in a.late if r in a.gradients and r in a.scattered and not a.accumulates}
        if late:
            copied = sum(made for made, _ in late.values()) if len(late) > 1 else 0
            parts = sum(rests for _, rests in late.values())
            yield Moment(gradients=sum(map(self.left_behind, stages)) + parts, communication=copied)

    def piece(self, activity: Activity, units: Units, before: Collection[str], arriving: Arriving) -> PieceBytes:
        """A piece by itself, which keeps nothing because it was received or is sent. units: of the program. before: storages that earlier
        pieces keep, which are not counted again. arriving: from the pieces behind it; then those that it leaves."""
        kept = self._kept(activity.span, activity.recomputed, _Store())
        shared = sum(n for name, n in kept.items() if name in before)
        there = _Store({name: n for name, n in kept.items() if name in before})
        forward = max((x.total for x in self._forward(activity, units, activity.span, there)), default=0)
        backward = list(self._backward(activity, units, _Store(kept), arriving, accumulated=False, final=False, ends=False))
        return PieceBytes(
            kept={name: n for name, n in kept.items() if name not in before},
            forward=max(0, forward - shared),
            backward=max([kept.total, *(x.total for x in backward)]) - shared,
            later=max([kept.total, *(x.total - x.gradients for x in backward)]) - shared,
        )

    def crossing(self, values: Collection[str]) -> dict[str, int]:
        """The storages of values between stages."""
        return {self._root[v]: self._size(v) for v in values if self._root[v] not in self._resting}

    def kept(self, span: Span, recomputed: Sequence[Span] = ()) -> Mapping[str, int]:
        """The storages that the operators of a span keep between forward and backward."""
        return self._kept(span, recomputed, _Store())

    def kept_outside(self, span: Span) -> Collection[str]:
        """The storages that operators outside of a span keep."""
        return {x for k, saved in enumerate(self.saved) if k not in span for x in saved}

    def keeps(self, k: int) -> bool:
        """Whether operator k keeps anything for backward, a parameter perhaps."""
        return bool(self.saved[k] or (self.trains[k] and self.work[k].saved_inputs))

    def keeps_operands_alone(self, k: int) -> bool:
        """Whether what operator k keeps is there before it runs: an operator of torch notes its operands first."""
        w = self.work[k]
        return self.program.ops[k].target.startswith("aten.") and not w.saved_outputs and not w.saved_other

    def _held(self, a: Activity) -> _Store:
        """What a micro-batch keeps between its forward and its backward pass."""
        return self._kept(a.span, a.recomputed, _Store(self.crossing((*a.sends, *a.receives))))

    def _kept(self, span: Span, recomputed: Sequence[Span], held: _Store) -> _Store:
        again = _span_of(recomputed)
        for k in self._indices(span):
            if k not in again:
                held.put(self.saved[k])
        for s in recomputed:
            held.put(self._entering(s))
        return held

    def _size(self, value: str) -> int:
        return self._bytes.get(self._root[value], self.program.types[value].nbytes)

    def _entering(self, span: Span) -> dict[str, int]:
        ops = self.program.ops
        inside = {o for k in self._indices(span) for o in ops[k].outputs}
        read = dict.fromkeys(r for k in self._indices(span) for r in refs(ops[k]) if r not in inside)
        return {self._root[r]: self._size(r) for r in read if self._root[r] not in self._resting}

    def made(self, span: Span) -> frozenset[str]:
        """The storages that a span makes."""
        return frozenset(self._root[o] for k in self._indices(span) for o in self.program.ops[k].outputs if o is not None)

    @staticmethod
    def _indices(span: Span) -> range:
        return range(span.start, span.stop)

    def _forward(self, a: Activity, units: Units, span: Span, held: _Store) -> Iterator[Moment]:
        """Moments of a forward pass over a span; adds to `held` what it keeps (for a span that is run again: all that it saves)."""
        ops = self.program.ops
        last: dict[str, int] = {}
        for k in self._indices(span):
            for v in (*refs(ops[k]), *(o for o in ops[k].outputs if o is not None)):
                last[self._root[v]] = self._let_go[k]
        again = span in a.recomputed
        within = {} if again else _span_of(a.recomputed)
        primed = bool(a.recomputed)
        own = self.made(span) if again else frozenset()
        live: dict[str, int] = {}
        for k in self._indices(span):
            op, w = ops[k], self.work[k]
            live |= {self._root[o]: self._bytes[o] for o in op.outputs if o is not None and self._root[o] == o}
            inside = within.get(k)
            if inside is None:
                held.put(_again(self.saved[k], own))
            elif k == inside.start:
                held.put(self._entering(inside))
            using = sum(n for r, n in live.items() if r not in held and not (primed and f"{r}'" in held))
            yield Moment(saved=held.total, temporary=using + w.forward, communication=units.forward.get(k, 0))
            for r in [r for r in live if last.get(r, -1) <= k]:
                del live[r]

    def units(self, *stages: Activity, follows: Collection[tuple[Key, Key]] = (((0, "F"), (0, "B")),)) -> Units:
        """Of the stages of a rank. follows: the passes that come one after the other."""
        sizes = {v: n for a in stages for v, n in a.where_used.items()}
        passes: dict[Key, list[tuple[int, list[str]]]] = {}
        for j, a in enumerate(stages):
            indices = self._indices(a.span) if a.where_used else range(0)
            passes[j, "F"] = [(k, self._used(a, k, False)) for k in indices]
            passes[j, "B"] = [(k, self._used(a, k, True)) for k in reversed(indices)]
        return Units(sizes, stages[0].units, passes, follows)

    def _used(self, a: Activity, k: int, backward: bool) -> list[str]:
        """The parameters that operator k reads in forward, or needs again in backward."""
        read = refs(self.program.ops[k])
        found = (read[i] for i in self.work[k].saved_inputs) if backward else read
        return [r for r in dict.fromkeys(found) if r in a.where_used]

    def _backward(
        self, a: Activity, units: Units, held: _Store, arriving: Arriving, *, accumulated: bool, final: bool, ends: bool = True
    ) -> Iterator[Moment]:
        """Moments of a backward pass that begins with `held` and the gradients that arrive, and ends with those that it leaves.
        accumulated: gradients of parameters are there already. ends: no other piece of the stage comes after this one."""
        ops, types = self.program.ops, self.program.types
        holder: dict[str, int] = {}
        inner = {span: self.made(span) for span in a.recomputed}
        within = _span_of(a.recomputed)
        for k in reversed(self._indices(a.span)):
            inside = within.get(k)
            holder.update(dict.fromkeys(_again(self.saved[k], inner[inside] if inside is not None else ()), k))
        for span in a.recomputed:
            for r in self._entering(span):
                holder[r] = min(holder.get(r, span.start), span.start)
        freed: dict[int, list[str]] = {}
        for r, k in holder.items():
            freed.setdefault(k, []).append(r)
        tokens, sizes = arriving.storage, arriving.nbytes
        own = _Store()
        complete: dict[str, int] = {}  # parameter -> the operator whose backward gives the last term of its gradient
        for k in reversed(self._indices(a.span)):
            if not ops[k].no_grad and any(types[o].grad for o in ops[k].outputs if o is not None):
                complete.update((r, k) for r in refs(ops[k]) if r in a.gradients)
        reducing = 0
        filling, scattering = _Store(), _Store()  # the buckets of the step and of the pass
        waiting = Waiting(units)
        for k in reversed(self._indices(a.span)):
            op, w = ops[k], self.work[k]
            here = [o for o in op.outputs if o is not None and o in tokens]
            whole = within.get(k)
            whole = whole if whole is not None and whole.stop - 1 == k else None
            alive = {t: sizes[t] for t in tokens.values()}
            if whole is not None:  # before its last operator's backward all of it runs again
                again = _Store(held)
                for moment in self._forward(a, units, whole, again):
                    yield _plus(moment, Moment(gradients=own.total, temporary=sum(alive.values())))
                held = again
            if here:
                yield Moment(
                    saved=held.total, gradients=own.total, temporary=sum(alive.values()) + w.backward,
                    communication=reducing + waiting.bytes + units.backward.get(k, 0),
                )  # fmt: skip
                origin = tokens[here[0]]
                for o in here:
                    del tokens[o]
                casting = 0  # the most that a gradient needs until it is in the dtype of rest
                for r, fresh in zip(refs(op), w.gradients, strict=True):
                    if r in a.gradients:
                        made, rests = a.gradients[r]
                        lower = fresh if r in a.cast else 0
                        casting = max(casting, lower and lower + (made if accumulated and r not in a.where_used else 0))
                        if r in a.where_used and r in a.at_once:
                            added = accumulated or r in own  # of a later micro-batch, or of another use
                            own.put({} if accumulated else {r: rests})
                            for copied, reducing, scattered in waiting.add(r, made, rests if added else 0):
                                yield Moment(
                                    saved=held.total, gradients=own.total,
                                    temporary=lower + sum(sizes[t] for t in set(tokens.values())),
                                    communication=copied + reducing + scattered + units.backward.get(k, 0),
                                )  # fmt: skip
                        elif a.accumulates:
                            reducing = made
                        elif r in a.at_once:
                            scattering.put({r: made} if complete[r] == k else {})
                            own.put({r: made})
                        else:
                            filling.put({r: made} if r in a.reduced and r not in a.late and complete[r] == k else {})
                            own.put({} if accumulated else {r: made})
                    elif types[r].grad and r not in tokens and r not in self._resting:
                        tokens[r] = len(sizes) if fresh else origin
                        if fresh:
                            sizes[len(sizes)] = fresh
                if casting:
                    yield Moment(
                        saved=held.total, gradients=own.total, temporary=sum(sizes[t] for t in set(tokens.values())) + casting,
                        communication=reducing + waiting.bytes + units.backward.get(k, 0),
                    )  # fmt: skip
                full = [
                    filling if final and 0 < a.bucket_bytes <= filling.total else _Store(),
                    scattering if scattering.total >= max(1, a.bucket_bytes) else _Store(),
                ]
                for bucket in filter(None, full):  # its copy, beside the gradients that it is made of, and the parts
                    arrived = next(reversed(bucket.values())) if accumulated else 0  # and not added yet
                    yield Moment(
                        saved=held.total, gradients=own.total + _parts_bytes(a, bucket), communication=bucket.total,
                        temporary=sum(sizes[t] for t in set(tokens.values())) + arrived,
                    )  # fmt: skip
                    own.put(_left(a, bucket, accumulated=accumulated))
                    if bucket is scattering:
                        reducing, scattering = bucket.total + (_parts_bytes(a, bucket) if accumulated else 0), _Store()
                    else:
                        filling = _Store()
            for r in freed.get(k, ()):
                held.drop(r)
        if scattering and ends:
            yield Moment(gradients=own.total + _parts_bytes(a, scattering), communication=scattering.total)
            own.put(_left(a, scattering, accumulated=accumulated))
        if final:
            sent = filling.total if a.bucket_bytes else 0
            yield Moment(gradients=own.total + _parts_bytes(a, filling), communication=max(sent, reducing))


def _parts_bytes(a: Activity, bucket: _Store) -> int:
    """The parts that are made of a bucket, if it is reduce-scattered."""
    return sum(a.gradients[r][1] for r in bucket if r in a.scattered or r in a.at_once)


def _left(a: Activity, bucket: _Store, *, accumulated: bool) -> dict[str, int]:
    """The gradients that are left of a bucket. At once: the parts, which are added to those of earlier passes. At the end of the step:
    the parts, and the buffer in the place of the gradients."""
    found = {}
    for r in bucket:
        made, rests = a.gradients[r]
        if r in a.at_once:
            found[r] = 0 if accumulated else rests
        elif r in a.scattered:
            found[r] = rests if accumulated else made + rests
    return found


def gathered_from(program: Program) -> dict[str, str]:
    """Gathered activation -> the shard that it was gathered from, which is kept where it is gathered again in backward."""
    params = {p.value for p in program.params}
    gathers = [op for op in program.ops if op.target == GATHER and refs(op)[0] not in params]
    return {op.name: refs(op)[0] for op in gathers}


def _span_of(spans: Sequence[Span]) -> dict[int, Span]:
    """Operator -> the span that it stands in."""
    return {k: span for span in spans for k in range(span.start, span.stop)}


def _line_ends(ops: Sequence[Op]) -> list[int]:
    """For each operator the last one of the same line of the user's: after it the emitted code lets go of what it has read.
    Operators without a line belong to the one that they stand in."""
    ends, place = [0] * len(ops), ("", "")
    start = 0
    for k, op in enumerate(ops):
        here = (op.module, op.source)
        if here not in (place, ("", "")):
            ends[start:k] = [k - 1] * (k - start)
            start, place = k, here
    ends[start:] = [len(ops) - 1] * (len(ops) - start)
    return ends


def _again(saved: Mapping[str, int], made: Collection[str]) -> dict[str, int]:
    """What is saved, where it is made a second time by a span that runs again: another storage than the first, which others may keep."""
    return {f"{name}'" if name in made else name: n for name, n in saved.items()}


def _plus(a: Moment, b: Moment) -> Moment:
    return Moment(
        saved=a.saved + b.saved, gradients=a.gradients + b.gradients, temporary=a.temporary + b.temporary,
        communication=a.communication + b.communication,
    )  # fmt: skip


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()
