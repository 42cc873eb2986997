"""What a choice costs: seconds and bytes of its pieces, its stages and its step.

Everything here gathers arguments; the arithmetic is that of `cost_models` (memory.stage_memory, step, pipeline), which
checker and explain use too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.axes import AXES, LAYERS
from autopar.errors import Infeasible
from autopar.ir import Span
from autopar.planner.exchange import LeastOnce, Once
from autopar.planner.interleave import KnownOfRanks, least_of_ranks, partition_of_ranks, place_of, rank_bytes
from autopar.planner.partition import UNSOLVED, KnownModes, Over, Partition, Refused, least_bytes, partition
from autopar.planner.pieces import lies_in_parts
from autopar.planner.plan import StagePlan
from autopar.planner.price import Params
from autopar.planner.prologue import prologue_s
from autopar.planner.rank_pieces import RankPieces
from autopar.planner.relaxed import Ends, Relaxed, least_of_stages
from autopar.planner.solver import OutOfBudget
from autopar.planner.stage_account import NODES, stage_bytes
from cost_models.cluster import Gpu
from cost_models.memory import OPTIMIZERS
from cost_models.pipeline import SCHEDULES
from cost_models.step import optimizer_time_s

__all__ = ["FEW", "Estimator", "Times"]

MANY = 3  # pieces for each stage
FINER = 0.05  # by how much another form may be faster than the fastest one with all in parts; of 848 forms of models 0.032 was the most
FEW = 50  # nodes of the search for modes, where their bound alone is asked for or whether there are some: it mostly comes to no end
MUCH = 16.0  # times the price of a byte, at which an assignment is worth its while only where nothing else fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a step: of each stage's forward and backward of one micro-batch, and of the terms that make up the step. transfer_s:
    of the slowest transfer between stages; before_s: of what runs before the micro-batches."""

    forwards_s: tuple[float, ...]
    backwards_s: tuple[float, ...]
    compute_s: float
    bubble_s: float
    sync_s: float
    optimizer_s: float
    step_s: float
    transfer_s: float = 0.0
    before_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfStep:
    """What the parameters of a rank cost once a step, whatever runs again: collectives, those that nothing hides at both ends of a step,
    the update, and casts before the first micro-batch."""

    once: Once
    ends_s: float
    optimizer_s: float
    casts_s: float


@dataclass(frozen=True, kw_only=True)
class Estimator(RankPieces):
    """One rank's program under one schedule: its stages, and the seconds of a step."""

    @property
    def prices(self) -> tuple[float, ...]:
        """Of a byte that a micro-batch keeps, in seconds: what running the pieces again costs for each byte less (running all again, where
        nothing can), and much more. Rounded to powers of two, so that choices that differ little have the same."""
        pairs = [(p.modes[-1].again_s, p.modes[0].kept_bytes - p.modes[-1].kept_bytes) for p in self.kept]
        seconds, nbytes = (sum(x) for x in zip(*pairs, strict=True))
        if not seconds or not nbytes:
            seconds, nbytes = sum(p.forward_s for p in self.kept), sum(p.modes[0].kept_bytes for p in self.kept)
        if not seconds or not nbytes:
            return ()
        price = 2.0 ** round(math.log2(seconds / nbytes))
        return price, MUCH * price

    def partition(
        self, *, limit_bytes: float, cuts: tuple[int, ...] | None = None, worth_s: float = math.inf, over: Over | None = None,
        refused: Refused | None = None, nodes: int = NODES,
    ) -> Partition | None:  # fmt: skip
        """Stages and modes, as of `partition`. worth_s: of a step. nodes: where each rank holds one stage."""
        objective_s = worth_s - self.least_ends_s
        if self.flow.chunks > 1:
            return partition_of_ranks(
                self.pieces, flow=self.flow, limit_bytes=limit_bytes, recompute=self.recompute, step_s=self.step_s,
                least_ends_s=self.least_ends_s, worth_s=objective_s, cuts=cuts, over=over, refused=refused, known=self._modes_of_ranks,
            )  # fmt: skip
        return partition(
            self.pieces, stages=self.flow.stages, micro_batches=self.rank.micro_batches, in_flight=self.flow.in_flight,
            limit_bytes=limit_bytes, recompute=self.recompute, cuts=cuts, worth_s=objective_s, over=over, refused=refused,
            step_s=self.step_s, least_ends_s=self.least_ends_s, nodes=nodes, known=self._modes_of_stages,
        )  # fmt: skip

    @functools.cached_property
    def _modes_of_stages(self) -> KnownModes:
        return {}

    @functools.cached_property
    def _modes_of_ranks(self) -> KnownOfRanks:
        return {} if self.folded is None else self.folded._modes_of_ranks

    @property
    def relaxes(self) -> bool:
        """Whether `least_of_stages` can say more than `least_s`, in less time than it takes to cut the stages. With few pieces on each of
        several stages what counts is that they are whole."""
        flow = self.flow
        return flow.stages == 1 or not flow.closed_form or len(self.segments) >= MANY * flow.stages

    def least_of_stages(self, limit_bytes: float, worth_s: float = math.inf) -> Relaxed:
        """No stages and modes that fit make a faster step, by a bound that knows of memory. worth_s: that it is above this is enough to
        know."""
        ends_s = self.least_ends_s
        if self.flow.stages == 1:
            found = self._least_of_one(limit_bytes)
        else:
            found = least_of_stages(self.lean, self.flow, limit_bytes, self.recompute, self._least_once, worth_s - ends_s)
        return found._replace(seconds=ends_s + max(found.seconds, self._least_way_s))

    def least_of_forms_s(self, limit_bytes: int) -> float:
        """What the other forms of the tensor axis are there for is to keep less: this is the bound above, were all in parts that this one,
        the fastest, keeps whole; with FINER, since what other forms keep may run again in other spans. limit_bytes: of a GPU."""
        parts = self._form_parts
        params = {v: p if lies_in_parts(self.rank.program, v) else p.part(parts) for v, p in self.params.items()}
        other = dataclasses.replace(self, params=params, parts=parts, folded=None)
        return (1 - FINER) * other.least_of_stages(other.room_of_lean_bytes(limit_bytes)).seconds

    def _least_of_one(self, limit_bytes: float) -> Relaxed:
        """Of one stage without what ends a step: of its modes the best ones for what they keep alone."""
        flow = self.flow
        try:
            part = partition(
                self.lean, stages=1, micro_batches=flow.micro_batches, in_flight=flow.in_flight, limit_bytes=limit_bytes,
                recompute=self.recompute, nodes=FEW,
            )  # fmt: skip
        except OutOfBudget:
            return Relaxed(0.0, True)
        except Infeasible:
            return Relaxed(math.inf, True)
        assert part is not None, "only what must be worth something may be of no use"
        return Relaxed(part.outcome.bound, bool(part.recomputed))

    @functools.cached_property
    def _least_once(self) -> Ends:
        """Of the parameters of each piece, where it is the first one that has them."""
        seen, known = set[tuple[str, int]](), dict[tuple[str, ...], LeastOnce]()
        found = []
        for k in range(len(self.segments)):
            own = [x for x in self.own(k, k + 1) if x not in seen]
            seen.update(own)
            key = tuple(v for v, _ in own)
            if key not in known:
                known[key] = self.exchange.least_once(self.params_of(own))
            found.append(known[key])
        overlaps = self.recipe.overlaps_reduction, self.recipe.overlaps_gathers
        return Ends(of_piece=found, taken=self.exchange.taken, overlaps_reduction=overlaps[0], overlaps_gathers=overlaps[1])

    @functools.cached_property
    def least_bytes(self) -> float:
        """What the fullest rank needs at least; where a rank holds several stages, with the cuts that are tried first."""
        if self.flow.chunks == 1:
            return least_bytes(self.pieces, self.flow.stages, self.flow.in_flight, self.rank.micro_batches, self.recompute)
        return least_of_ranks(self.pieces, self.flow, self.recompute)[1]

    def places(self, part: Partition) -> list[tuple[int, ...]]:
        """Of each rank: the first piece and the first piece behind of each of its stages, and its number."""
        bounds = (0, *part.cuts, len(self.segments))
        return [place_of(bounds, self.flow, r) for r in range(self.flow.ranks)]

    def modes_at(self, part: Partition, place: tuple[int, ...]) -> tuple[int, ...]:
        """The modes of the pieces of such a place."""
        return tuple(m for i, j in zip(place[:-1:2], place[1:-1:2], strict=True) for m in part.modes[i:j])

    def unsaid_bytes(self, part: Partition, stages: Sequence[StagePlan]) -> dict[tuple[int, ...], float]:
        """Of each place: the bytes beyond what its pieces say, as far as its memory's interval reaches."""
        found = {}
        for rank, place in enumerate(self.places(part)):
            held = self.flow.on_rank(rank)
            spans = list(zip(place[:-1:2], place[1:-1:2], strict=True))
            if len(spans) == 1:
                i, j = spans[0]
                said = stage_bytes(self.pieces[i:j], part.modes[i:j], self.flow.in_flight[held.stages[0]], self.rank.micro_batches)
            else:
                said = rank_bytes([self.pieces[i:j] for i, j in spans], [part.modes[i:j] for i, j in spans], held)
            found[place] = self.room_bytes(stages[held.stages[0]].memory.upper_bytes) - said
        return found

    def step_s(self, cuts: tuple[int, ...], modes: tuple[int, ...]) -> float:
        """Of these stages and modes."""
        return self.times(Partition(cuts=cuts, modes=modes, outcome=UNSOLVED)).step_s

    def again(self, k: int, mode: int) -> tuple[Span, ...]:
        """The operators of piece k that run again in a mode."""
        start = self.segments[k].span.start
        return tuple(Span(start + x.start, start + x.stop) for x in self.pieces[k].modes[mode].spans)

    def times(self, part: Partition) -> Times:
        """The times of a step of these stages."""
        rank, seconds = self.rank, self.seconds()
        bounds = (0, *part.cuts, len(self.segments))
        forwards, backwards, sync, optimizer, hop = [], [], 0.0, 0.0, 0.0
        taken = self.pricer.taken(LAYERS)
        for s, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
            forwards.append(sum(seconds[k][0] for k in range(i, j)))
            backwards.append(sum(seconds[k][1] + self.pieces[k].modes[part.modes[k]].again_s for k in range(i, j)))
            sent = self._sent_bytes(i) if s else 0
            if sent and self.flow.rank_of[s] != self.flow.rank_of[s - 1]:
                hop = max(hop, to_s := self.pricer.collective_s("p2p", sent, LAYERS))
                for each in (forwards, backwards):  # a host that computes copies too, on either side
                    each[s - 1] += taken * to_s
                    each[s] += taken * to_s
        busiest, casts = 0.0, 0.0
        for r in range(self.flow.ranks):
            held = self.flow.stages_of(r)
            of_step = self._of_step(tuple((bounds[s], bounds[s + 1]) for s in held))
            forward_s, backward_s = (sum(each[s] for s in held) for each in (forwards, backwards))
            busiest = max(busiest, forward_s + backward_s)
            sync = max(sync, of_step.once.exposed_s(forward_s, backward_s) + of_step.ends_s)
            optimizer, casts = max(optimizer, of_step.optimizer_s), max(casts, of_step.casts_s)
        pipeline = self.flow.step_time_s(forwards, backwards, hop)
        before = self._prologue_s + casts
        compute = before + rank.micro_batches * busiest
        return Times(
            forwards_s=tuple(forwards), backwards_s=tuple(backwards), compute_s=compute, sync_s=sync, optimizer_s=optimizer,
            bubble_s=max(0.0, before + pipeline - compute) if len(forwards) > 1 else 0.0, step_s=before + pipeline + sync + optimizer,
            transfer_s=hop, before_s=before,
        )  # fmt: skip

    def transfers_s(self, times: Times) -> float:
        """What of the bubble ranks wait for what stages send one another: by so much a step would be faster, were it sent in no time."""
        if not times.transfer_s:
            return 0.0
        waits_s, at_once_s = (self.flow.step_time_s(times.forwards_s, times.backwards_s, hop) for hop in (times.transfer_s, 0.0))
        return min(times.bubble_s, max(0.0, waits_s - at_once_s))

    def _of_step(self, spans: tuple[tuple[int, int], ...]) -> _OfStep:
        """Of a rank that holds the pieces [i, j) of each of these."""
        if spans not in self._steps:
            params = self.params_of(dict.fromkeys(x for i, j in spans for x in self.own(i, j)))
            self._steps[spans] = _OfStep(
                once=self.exchange.once(params), ends_s=self._ends_s(*spans[0]), optimizer_s=self._optimizer_s(params),
                casts_s=self._casts_of_a_step_s(params),
            )  # fmt: skip
        return self._steps[spans]

    @functools.cached_property
    def _steps(self) -> dict[tuple[tuple[int, int], ...], _OfStep]:
        return {}

    def least_s(self) -> float:
        """No cuts and no recompute of these pieces make a faster step: the pieces spread evenly, and what nothing hides."""
        return max(self.flow.least_s(sum(f + b for f, b in self.seconds())), self._least_way_s) + self.least_ends_s

    @functools.cached_property
    def _least_way_s(self) -> float:
        """As `Flow.least_way_s`; 0 of schedules with a closed form, whose transfers are in `least_ends_s`."""
        if self.flow.ranks == 1 or SCHEDULES[self.flow.schedule].closed_form is not None:
            return 0.0
        hop_s = self.pricer.collective_s("p2p", self._least_sent_bytes(), LAYERS)
        return self.flow.least_way_s(sum(f + b for f, b in self.seconds()), hop_s)

    @functools.cached_property
    def least_ends_s(self) -> float:
        """What the stages' program leaves out, at its least: the update; the transfers between stages, at the dearest of the cheapest
        cuts; and, if there is one stage, the reduction of all gradients beside a backward pass in which everything runs again."""
        update_s, ranks, n = self.least_update_s() + self._prologue_s, self.flow.ranks, len(self.segments)
        if ranks > 1:
            if SCHEDULES[self.flow.schedule].closed_form is None:
                return update_s
            hop_s = self.pricer.collective_s("p2p", self._least_sent_bytes(), LAYERS)
            return update_s + self.flow.step_time_s([0.0] * ranks, [0.0] * ranks, hop_s)
        seconds = self.seconds()
        forward_s, backward_s = sum(f for f, _ in seconds), sum(f + b for f, b in seconds)
        params = self.all_params
        ends_s = self.exchange.step_s(params, forward_s, backward_s) + self._ends_s(0, n)
        return update_s + self._casts_of_a_step_s(params) + ends_s

    def _sent_bytes(self, k: int) -> int:
        """What a stage that begins with piece k is sent of one micro-batch."""
        return sum(self.rank.program.types[v].nbytes for v in self.rank.cuts.crossing.get(self.segments[k].span.start, ()))

    def _least_sent_bytes(self) -> int:
        """At the dearest of the cheapest cuts, of which no two are in one place: whatever the cuts, one of them sends as much; where other
        forms of the tensor axis are counted too, a part of it."""
        cuts = sorted(self._sent_bytes(k) for k in range(1, len(self.segments)))
        return cuts[self.flow.stages - 2] // self.parts if len(cuts) >= self.flow.stages - 1 else 0

    def in_parts_saves_s(self, part: Partition, times: Times) -> float:
        """By how much a step of these stages would be faster at most, were what they send one another in parts over the tensor axis."""
        sent = max((self._sent_bytes(k) for k in part.cuts), default=0)
        hop_s = self.pricer.collective_s("p2p", sent // self._form_parts, LAYERS) if sent else 0.0
        whole_s, parts_s = (self.flow.step_time_s(times.forwards_s, times.backwards_s, x) for x in (times.transfer_s, hop_s))
        return whole_s - parts_s

    @property
    def _form_parts(self) -> int:
        """Ranks of the axes that have other forms."""
        return math.prod(n for axis, n in self.rank.mesh.inner if AXES[axis].forms)

    @functools.cached_property
    def _prologue_s(self) -> float:
        return prologue_s(self.rank, self.pricer)

    def least_update_s(self) -> float:
        """No stage updates less than its share of all parameters, at the rate of the narrowest of them and without launches."""
        trained = {p: n for p, n in self.all_params.items() if p.trainable}
        if not trained:
            return 0.0
        item = min(p.itemsize for p in trained)
        gpu = dataclasses.replace(self.cluster.gpu, launch_s=0.0)
        return self._update_s(sum(n * p.resting_numel for p, n in trained.items()), item, 1, gpu) / self.flow.ranks + self.recipe.once_s

    def span(self, i: int, j: int) -> Span:
        return Span(self.segments[i].span.start, self.segments[j - 1].span.stop)

    def prefix(self, k: int) -> str:
        return self.rank.program.blocks[self.segments[k].block].prefixes[self.segments[k].instance]

    def _optimizer_s(self, params: Params) -> float:
        """Seconds of the update of what rests on this rank, with what its software does once a step."""
        trained = [(p, n) for p, n in params.items() if p.trainable]
        numel = sum(n * p.resting_numel for p, n in trained)
        item = round(sum(n * p.resting_bytes for p, n in trained) / numel) if numel else 0
        gpu, tensors = self.cluster.gpu, max(1, sum(n for _, n in trained))
        issued = gpu if gpu.host else dataclasses.replace(gpu, launch_s=self.recipe.launches * gpu.launch_s)
        return self._update_s(numel, item, tensors, issued) + self.recipe.once_s

    def _update_s(self, numel: int, item: int, tensors: int, gpu: Gpu) -> float:
        return self.pricer.shared * optimizer_time_s(
            trainable_params=numel, gpu=gpu, optimizer=self.optimizer, param_itemsize=item,
            grad_itemsize=self.recipe.gradient_itemsize or item, state_itemsize=self.recipe.state_itemsize or item,
            master_itemsize=self.recipe.master_itemsize, tensors=tensors,
            passes=self.recipe.optimizer_passes if OPTIMIZERS[self.optimizer] else 1.0,
        )  # fmt: skip
