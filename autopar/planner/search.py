"""Program x Cluster -> Plan: the choices in the order of what they could at best be, each priced only as far as it can still win.

    choice    the work divided by the GPUs, and the pipeline's bubble; what rests on a rank      bounds.Least
    likeness  the work of a rank, by what larger micro-batches of it take                        Search._work_like_larger_s
    pieces    its rank's program priced, spread evenly over the stages                           Estimator.least_s
    memory    what of it must run again for ranks to fit, and what they bring together at the end   Estimator.least_of_stages
    stages    cut, and a mode for each piece, within memory; every term of a step priced         partition, Estimator.times
    exact     of the whole program, memory from liveness at every moment of a step               Estimator.candidate

The choice that is foremost in the queue takes the next of these steps and is put back with what it costs at least now; the first one that
comes out exactly priced is the best. `Plan.bound_s` is the least of what was known of any choice then: explored, left behind, or out of
budget. No plan of the space is faster than that, where the space is: every choice (space.py); on the data axis the assignment that
splits the most work; on the tensor axis the assignments that its program finds (axis.py): the fastest one and, where that needs
recompute, does not fit or sends much from stage to stage, Megatron's forms, one that splits all work, and the best ones at prices of
memory that recompute sets (`Estimator.prices`), unless that one with all that it keeps and sends in parts would be slower than the plan;
every cut between pieces and every mode of each (modes.py: all kept, parts of a block run again as a few points of its Pareto set have it,
or the whole). An assignment is decided before stages and modes are, and sees them through these prices alone: that is the decomposition.
Within it the stages are exact but for two things: their objective leaves out reduction, optimizer and transfers, which `bound_s` counts at
their least, and by which cuts that could be as good are compared as far as a budget reaches (`_Stages.nearby`); and memory is that of
single pieces, which liveness counts one by one: what several share is found out when the plan is priced exactly, and its stages are then
cut anew with what they were short of. `python -m benchmarks joint` compares the answers of small problems with those of trying every plan,
every assignment included.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import operator
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autopar.collector import held_back
from autopar.ir import Program
from autopar.planner.answer import BY_USER, LISTED, of_all, plan_of, refusal
from autopar.planner.candidate import Candidate, Draft
from autopar.planner.estimate import Estimator
from autopar.planner.exchange import Exchange
from autopar.planner.fold import NotAlike
from autopar.planner.moments import Moments
from autopar.planner.plan import Pins, Plan
from autopar.planner.question import NO_BETTER, Elsewhere, Ledgers, Question, Searched, Spaces
from autopar.planner.resources import check_measure, live_on, usable_bytes
from autopar.planner.shard import Assignment
from autopar.planner.solver import Outcome
from autopar.planner.space import Choice, Form, Mesh
from autopar.planner.stage_account import Piece
from autopar.planner.store import FASTEST, Store
from autopar.planner.ties import Waiting, simplest
from autopar.progress import found_so_far
from cost_models.cluster import Cluster
from cost_models.memory import OPTIMIZERS
from cost_models.recipe import AUTOPAR, Recipe

__all__ = ["Search", "answered", "make_plan"]

BUDGET = 4000  # choices whose stages are cut; a step over 1,000 GPUs has about 2,000
WORTH = 1.004  # whatever is slower than the fastest draft by more waits behind it: that may come out so much slower as it will run
AS_ONE_OF_MANY = 0.99  # of what a sample takes in a larger batch: tiles of products are better filled by some sizes than by others
NEAR = 1e-4  # of a step: a draft that promises no more than that beside a plan is not priced as it will run
MEASURED_CANDIDATES = 8  # the front-runners whose operators are measured, where times are measured at all

@dataclass(order=True, slots=True)
class _Entry:
    """A choice in the queue: what it costs at least, how simple it is, and how far it was priced."""

    least_s: float
    simplicity: tuple[float, ...]
    number: int
    choice: Choice = field(compare=False)
    draft: Draft | None = field(compare=False, default=None)
    exact: Candidate | None = field(compare=False, default=None)
    estimator: Estimator | None = field(compare=False, default=None)
    relaxed: bool = field(compare=False, default=False)
    exchanged: bool = field(compare=False, default=False)
    work_s: float = field(compare=False, default=0.0)  # of a micro-batch, with which it was counted what the choice costs at least
    cut: bool = field(compare=False, default=False)


@dataclass(kw_only=True)
class Search(Question):
    """The search for the best choice. measure: 'live' measures the operators of the best candidates on this machine, and the best of these
    is the plan. budget: choices whose stages are cut; time_limit_s: for people in a hurry: after it, or when `stop` says so, the best so
    far is the answer, and what was left is said."""

    budget: int = BUDGET
    time_limit_s: float | None = None
    measure: str = "roofline"

    def on_data_axis(self, dp: int) -> tuple[Program, Assignment | None, tuple[Outcome, ...]]:
        return self.known.on_data_axis(dp)

    def moments(self, dp: int, count: int) -> Moments | str:
        return self.known.moments(dp, count)

    def least_s(self, mesh: Mesh, count: int) -> float:
        """No plan of this mesh and this many micro-batches is faster."""
        choices = (
            Choice(mesh=mesh, micro_batches=count, schedule=schedule, rest=rest, shard=n, chunks=chunks)
            for rest, n in self.space.rests(mesh) for schedule, chunks in self.space.schedules(mesh, count)
        )  # fmt: skip
        return min((self._least.step_s(choice, self.batch_size) for choice in choices), default=math.inf)

    def unexplored(self) -> list[float]:
        """Of each choice of a search that was not begun the seconds that no plan of it is faster than."""
        return [self._least.step_s(choice, self.batch_size) for choice in self.space.choices()]

    # ------------------------------------------------------------------------------------------------------------ the queue
    def candidates(self) -> Iterator[Candidate]:
        """Exactly priced candidates, the fastest first; infeasible ones leave their reason in `refused`."""
        try:
            yield from self._candidates()
        except NotAlike:  # the layers are not as alike as they seemed: each is walked
            self.known = self.new_store(folds=False)
            self.said = Searched()
            yield from self._candidates()

    def _candidates(self) -> Iterator[Candidate]:
        start = time.perf_counter()
        said = self.said
        said.refused |= dict.fromkeys(self.space.refused())
        self._numbers = numbers = itertools.count()
        self.unsure = set[Choice]()
        self._work: dict[Hashable, dict[int, float]] = {}  # by the mesh, and the samples of a micro-batch: seconds of it
        self._forms: dict[Choice, list[_Entry]] = {}  # by the choice without its form: those of different assignments
        self._with_leaner = set[Choice]()
        queue: list[_Entry] = []
        hopeless: list[_Entry] = []  # that cannot fit: what they lack is found out if nothing else fits
        for choice in self.space.choices():
            least_s = self._least.step_s(choice, self.batch_size)
            (queue if self.could_fit(choice) else hopeless).append(_Entry(least_s, choice.simplicity, next(numbers), choice))
        heapq.heapify(queue)
        self._queue = queue
        said.choices = len(queue) + len(hopeless)
        bounds: dict[Choice, float] = {}  # of those that were priced: what no cuts of theirs can be faster than
        nothing = True  # is found yet
        while queue:
            entry = heapq.heappop(queue)
            found_so_far(functools.partial(self._so_far, queue))
            if entry.exact is not None:
                said.left = sum(e.draft is None and e.exact is None for e in queue)
                least = min([entry.least_s, *(e.least_s for e in queue if e.exact is None and e.draft is None)])
                said.bound_s = min([least, *bounds.values()])
                said.drafts = sorted((e.draft for e in queue if e.draft is not None), key=lambda d: d.times.step_s)
                said.behind = [(e.least_s, e.choice) for e in sorted(queue) if e.estimator is not None and e.draft is None]
                nothing = False
                yield entry.exact
                continue
            over_time = self.time_limit_s is not None and time.perf_counter() - start > self.time_limit_s
            by_user = self.stop()
            stopped = said.cut >= self.budget or over_time or by_user
            if stopped and entry.draft is None and any(e.draft is not None or e.exact is not None for e in queue):
                whole = f"its budget of {self.budget} choices"
                said.stopped = BY_USER if by_user else f"{self.time_limit_s:g} s" if over_time else whole
                said.unexplored += 1
                bounds[entry.choice] = entry.least_s
                continue
            if entry.draft is not None:
                if _exact_s(queue) > entry.least_s * (1 + NEAR):  # else what could be gained is in the bound
                    self._exactly(entry, queue, bounds)
            elif entry.estimator is not None and not entry.relaxed and entry.estimator.relaxes:
                self._memory(entry, queue, hopeless)
            elif entry.estimator is not None:
                self._stages(entry, queue, bounds)
            elif not entry.exchanged or entry.work_s < self._work_like_larger_s(entry.choice):
                self._exchange(entry, queue)
            else:
                self._pieces(entry, queue, hopeless)
        if nothing:
            self._say_what_lacks([entry.choice for entry in hopeless])

    def _so_far(self, queue: list[_Entry]) -> str:
        """For people who wait."""
        best = f", best so far {best_s * 1e3:,.4g} ms a step" if (best_s := _fastest_s(queue)) < math.inf else ""
        return f"{self.said.explored} of {self.said.choices} choices priced{best}"

    def _exchange(self, entry: _Entry, queue: list[_Entry]) -> None:
        """What the choice costs at least with what its ranks exchange once a step, and where parameters are used. Its data axis says of
        which. And with the work of a micro-batch, where a larger one is priced."""
        choice, entry.exchanged, several = entry.choice, True, entry.choice.mesh.over("batch") > 1
        entry.work_s = work_s = self._work_like_larger_s(choice)
        alike = self.known.used_alike(choice.mesh, choice.micro_batches, self.batch_size) if several else None
        if alike is not None:
            exchange = Exchange(
                rest=choice.rest, shard=choice.shard, micro_batches=choice.micro_batches,
                pricer=self.known.pricer(choice.mesh, self.recipe), recipe=self.recipe,
            )  # fmt: skip
            least_s = self.known.timed("bound", lambda: self._least.with_exchange_s(choice, self.batch_size, exchange, alike, work_s))
            entry.least_s = max(entry.least_s, least_s)
        elif work_s:
            entry.least_s = max(entry.least_s, self._least.step_s(choice, self.batch_size, work_s))
        heapq.heappush(queue, entry)

    def _pieces(self, entry: _Entry, queue: list[_Entry], hopeless: list[_Entry]) -> None:
        """Price the rank's program, unless it cannot fit as its data axis is."""
        choice, mesh = entry.choice, entry.choice.mesh
        self.said.explored += 1
        rank = self.known.rank(mesh, choice.micro_batches, self.batch_size, self.recipe, choice.form)
        estimator = self.estimator(rank, choice)
        if isinstance(estimator, str):
            if choice.form == self.space.form:  # of a form that nobody asked for nothing need be said
                self.refused[estimator] = None
            if not isinstance(rank, str) and mesh.over("layers") > 1:  # other forms can be cut at other places
                self._try(self.space.leaner(choice, ()), queue)
            return
        if not self.could_fit(choice, rank):
            hopeless.append(entry)
            return
        forms = self._forms.setdefault(self._without_form(choice), [])
        if any(other.estimator is not None and estimator.rank.ledger is other.estimator.rank.ledger for other in forms):
            return
        forms.append(entry)
        entry.estimator = estimator
        if choice.form == FASTEST:
            known = self._work.setdefault(self._sizes_of(mesh), {})
            size = self._samples(choice)
            known[size] = min(known.get(size, math.inf), estimator.operators_s())
        entry.least_s = max(entry.least_s, self.known.timed("stages", estimator.least_s))
        heapq.heappush(queue, entry)

    def _samples(self, choice: Choice) -> int:
        """Of a micro-batch."""
        return (self.batch_size or 1) // choice.mesh.over("batch") // choice.micro_batches

    @staticmethod
    def _sizes_of(mesh: Mesh) -> Hashable:
        """What of a mesh decides what a micro-batch of a size costs."""
        return mesh.inner, mesh.over("batch") > 1

    def _work_like_larger_s(self, choice: Choice) -> float:
        """What one micro-batch of a choice takes at least on a rank of all stages, by what a larger one takes in the fastest form: a sample
        is never cheaper in a smaller batch. 0 if none is known."""
        size, known = self._samples(choice), self._work.get(self._sizes_of(choice.mesh), {})
        return max((AS_ONE_OF_MANY * seconds * size / larger for larger, seconds in known.items() if larger >= size), default=0.0)

    def _memory(self, entry: _Entry, queue: list[_Entry], hopeless: list[_Entry]) -> None:
        """What the choice costs at least, for all that must fit and all that ends the step."""
        if self._relax(entry, _fastest_s(queue)):
            self._leaner(entry, queue)
        if math.isinf(entry.least_s):
            hopeless.append(entry)
        else:
            heapq.heappush(queue, entry)

    def _stages(self, entry: _Entry, queue: list[_Entry], bounds: dict[Choice, float]) -> None:
        """Cut the stages. A choice that is no faster than a draft that there is waits behind it, in case that does not fit after all."""
        estimator = entry.estimator
        assert estimator is not None
        if not entry.cut:  # else it was cut before, beside a draft that did not fit after all
            forms = [e.estimator for e in self._forms[self._without_form(entry.choice)] if e.cut and e.estimator is not None]
            if any(_no_better(estimator, other) for other in forms):
                return
            entry.cut = True
        self.said.cut += 1
        worth_s = min(WORTH * _fastest_s(queue), _exact_s(queue))
        draft = self.known.timed("stages", lambda: self.draft(entry.choice, estimator, worth_s=worth_s))
        if not isinstance(draft, Draft) or draft.part.recomputed or _sends_much(draft):
            self._leaner(entry, queue)
        if draft == NO_BETTER:
            bounds[entry.choice] = max(entry.least_s, worth_s)
            entry.least_s = bounds[entry.choice] * (1 + 1e-9)
            heapq.heappush(queue, entry)
            return
        if isinstance(draft, Draft):
            bounds[entry.choice] = min(max(draft.bound_s, entry.least_s), draft.times.step_s)
            entry.draft, entry.least_s = draft, draft.times.step_s
            heapq.heappush(queue, entry)
        elif entry.choice in self.unsure:
            bounds[entry.choice] = max(entry.least_s, bounds.get(entry.choice, 0.0))
        else:
            bounds.pop(entry.choice, None)

    def _leaner(self, entry: _Entry, queue: list[_Entry]) -> None:
        """Where the fastest form of the tensor axis does not fit, fits with recompute, or sends much between stages, the other forms may be
        faster: they are tried, once for a choice."""
        estimator = entry.estimator
        assert estimator is not None
        if entry.choice in self._with_leaner:
            return
        self._with_leaner.add(entry.choice)
        forms = list(self.space.leaner(entry.choice, estimator.prices))
        if not forms:
            return
        together_s = self.known.timed("stages", lambda: estimator.least_of_forms_s(self.memory_limit_bytes))
        self._try(forms, queue, together_s)

    def _try(self, forms: Iterable[Choice], queue: list[_Entry], together_s: float = 0.0) -> None:
        """together_s: no plan of these forms is faster."""
        for choice in forms:
            self.said.choices += 1
            # of forms that cannot fit it is found out last, form by form, what they lack: if nothing else fits
            least_s = max(self._least.step_s(choice, self.batch_size), together_s)
            heapq.heappush(queue, _Entry(least_s, choice.simplicity, next(self._numbers), choice))

    def _exactly(self, entry: _Entry, queue: list[_Entry], bounds: dict[Choice, float]) -> None:
        """Price the choice as it will run."""
        found = self.exact(entry.choice, drafted=entry.estimator)
        entry.draft = None
        if found is None or found.part.recomputed:
            self._leaner(entry, queue)
        if found is None:
            if entry.choice not in self.unsure:
                bounds.pop(entry.choice, None)
            return
        entry.exact, entry.least_s = found, found.step_time_s
        heapq.heappush(queue, entry)

    def _without_form(self, choice: Choice) -> Choice:
        return dataclasses.replace(choice, form=self.space.form)

    def _say_what_lacks(self, hopeless: list[Choice]) -> None:
        """Of choices that cannot fit, the leanest first, as many as are listed where nothing fits."""
        for choice in sorted(hopeless, key=lambda c: (self._least.bytes(c), c.simplicity)):
            if len(self.said.short) >= LISTED:
                return
            rank = self.known.rank(choice.mesh, choice.micro_batches, self.batch_size, self.recipe, choice.form)
            estimator = self.estimator(rank, choice)
            if isinstance(estimator, str):
                self.refused[estimator] = None
            elif self.draft(choice, estimator) is not None:  # its pieces would just fit, by a bound that what rests alone is above
                nbytes = self._least.bytes(choice, self._alike(rank))
                self.note_shortfall(choice, estimator, self._least.upper_bytes(nbytes, self._batch_bytes(choice.mesh)))

    # ---------------------------------------------------------------------------------------------------------- the answer
    def best(self) -> Plan:
        """The best plan. Raises Infeasible with the binding constraint, the shortfall and what would fix it."""
        plan, said = answered(self)
        if plan is None:
            raise refusal(said)
        return plan

    def answer(self) -> Plan | None:
        """The best plan, or the simplest of those that tie with it; None where nothing fits."""
        found = list(itertools.islice(self.candidates(), MEASURED_CANDIDATES if self.measure == "live" else 1))
        if not found:
            return None
        if self.measure == "live":
            return plan_of(self, self.measured(found)[0])
        tie = simplest(found[0], self._waiting(), self.cluster)
        best = found[0] if tie is None else tie.chosen
        return plan_of(self, best, None if best.step_time_s <= found[0].step_time_s else tie)  # it may be faster than it was drafted

    def _waiting(self) -> Iterator[Waiting]:
        """What was priced by its pieces, and is behind the fastest candidate."""
        for entry in self._queue:
            estimator = entry.estimator
            if estimator is not None or entry.exact is not None:
                yield Waiting(
                    choice=entry.choice, least_s=entry.least_s, exact=entry.exact,
                    draft=functools.partial(self._fresh, entry), price=functools.partial(self.exact, entry.choice),
                )  # fmt: skip

    def _fresh(self, entry: _Entry, worth_s: float) -> object:
        estimator = entry.estimator
        assert estimator is not None, "what is priced exactly needs no stages"
        if not entry.relaxed and estimator.relaxes:
            self._relax(entry, worth_s)
        return self.draft(entry.choice, estimator, worth_s=worth_s) if entry.least_s < worth_s else NO_BETTER

    def _relax(self, entry: _Entry, worth_s: float) -> bool:
        """Count what the choice costs at least for all that must fit. Whether something must run again, or nothing fits."""
        estimator = entry.estimator
        assert estimator is not None
        room = estimator.room_of_lean_bytes(self.memory_limit_bytes)
        least = self.known.timed("stages", lambda: estimator.least_of_stages(room, worth_s))
        entry.least_s, entry.relaxed = max(entry.least_s, least.seconds), True
        return least.runs_again

    def measured(self, found: list[Candidate]) -> list[Candidate]:
        """The front-runners, their operators measured on this machine and their stages decided again from these times."""
        live = live_on(self.cluster, self.gpus)
        ledgers: Ledgers = {}
        again: list[Candidate] = []
        for c in found:
            choice = Choice(
                mesh=c.mesh, micro_batches=c.rank.micro_batches, schedule=c.flow.schedule, rest=c.rest, shard=c.shard,
                form=c.form or Form(), chunks=c.flow.chunks,
            )  # fmt: skip
            priced = self.exact(choice, live, ledgers)
            if again and live.skipped:  # the budget is spent: what is estimated in part is not compared with what was measured
                break
            again += [priced] if priced is not None else []
        self.known.notes |= dict.fromkeys(live.notes())
        self.known.notes[f"the search went by estimates; the operators of its best {len(again)} candidates were then measured"] = None
        self.said.bound_s = math.inf  # of estimates, which says nothing about measured times
        return sorted(again, key=lambda c: c.step_time_s) or found


def _fastest_s(queue: list[_Entry]) -> float:
    """Of the drafts that there are."""
    return min((e.draft.times.step_s for e in queue if e.draft is not None), default=math.inf)


def _exact_s(queue: list[_Entry]) -> float:
    """Of the plans that there are."""
    return min((e.least_s for e in queue if e.exact is not None), default=math.inf)


def _sends_much(draft: Draft) -> bool:
    """Whether other forms of the tensor axis, between whose stages activations are in parts, may be faster by more than drafts are off."""
    e = draft.estimator
    return e.rank.mesh.has_forms and e.in_parts_saves_s(draft.part, draft.times) > (WORTH - 1) * draft.times.step_s


def _no_better(form: Estimator, first: Estimator) -> bool:
    """Whether no piece of a form is faster or smaller than that of another one in its place. Most are where what operators keep is
    counted alone, which is quicker."""
    own, others = form.segments, first.segments
    if form.rank.ledger is first.rank.ledger:
        return True
    if len(own) != len(others):
        return False
    places = dict.fromkeys(zip(own.order, others.order, strict=True))
    for a, b in places:
        x, y = own.segments[a].span, others.segments[b].span
        if form.rank.ledger.kept_bytes(x) < first.rank.ledger.kept_bytes(y):
            return False
    if any(x < y for a, b in zip(form.seconds(), first.seconds(), strict=True) for x, y in zip(a, b, strict=True)):
        return False
    pairs, alone = dict.fromkeys(zip(form.plain, first.plain, strict=True)), form.flow.chunks == 1
    return all(len(a.modes) == len(b.modes) and all(map(operator.ge, _costs(a, alone), _costs(b, alone))) for a, b in pairs)


def _costs(p: Piece, alone: bool) -> tuple[float, ...]:
    """alone: its stage is the only one of its rank, so that each of its forward passes has a backward pass beside as much: what a forward
    pass needs counts as far as it is more."""
    held = (p.rest_bytes, p.passing_bytes, p.gradient_bytes, p.update_bytes, p.received_bytes, p.sent_bytes)
    forward = [max(m.forward_bytes, m.later_bytes) if alone else m.forward_bytes for m in p.modes]
    modes = [x for m in p.modes for x in (m.again_s, m.kept_bytes, m.backward_bytes, m.later_bytes, *(u.temporary for u in m.unsure))]
    return (p.forward_s, p.backward_s, *held, *forward, *modes)


def make_plan(
    program: Program,
    gpus: int,
    cluster: Cluster,
    *,
    memory_limit_bytes: int | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    reduce_dtype: str | None = None,
    pins: Pins | None = None,
    time_limit_s: float | None = None,
    measure: str = "roofline",
    recipe: Recipe = AUTOPAR,
    stated: Pins | None = None,
    spaces: Spaces | None = None,
    elsewhere: Sequence[Elsewhere] = (),
    store: Store | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """Search and return the best plan found. reduce_dtype: in which gradients are brought together, None: as parameters rest. recipe: how
    the training software carries a plan out. stated, spaces, elsewhere: as of a Question; the best plan of all spaces is the answer.
    measure: 'roofline' for times estimated from the cluster's description, 'live' for times of operators measured
    on this machine. time_limit_s: stop after so long; by default budgets are counted in choices and nodes, and the plan is the same on any
    machine. store: what is known of the program; stop: whether the user has enough of it: then the best plan so far is the answer, or the
    first that is found. Raises Infeasible, ValueError for an unknown optimizer or way to measure, and PlanError where this machine is not
    one of the cluster's."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}")
    check_measure(measure, cluster)
    asked = pins or Pins() if stated is None else stated
    search = Search(
        program=program,
        gpus=gpus,
        cluster=cluster,
        memory_limit_bytes=memory_limit_bytes or usable_bytes(cluster.gpu),
        optimizer=optimizer,
        precision=precision,
        reduce_dtype=reduce_dtype,
        pins=pins or Pins(),
        recipe=recipe,
        time_limit_s=time_limit_s,
        measure=measure,
        store=store,
        stop=stop,
        stated=asked,
        spaces=spaces,
        elsewhere=elsewhere,
    )
    return search.best()


def answered(search: Search) -> tuple[Plan | None, Search]:
    """The best plan of all spaces of a search, whose bound is that of all of them together, or None; and the search that can say why."""
    with held_back():
        if search.spaces is None:
            return search.answer(), search
        searches = [dataclasses.replace(search, pins=pins, store=search.known) for pins in search.under(search.asked)]
        found: list[Plan] = []
        left: list[Search] = []
        for each in searches:
            if found and each.stop():
                left.append(each)
            elif (plan := each.answer()) is not None:
                found.append(plan)
    if not found:  # the one that was nearest to fitting says why
        return None, min(searches, key=lambda each: min(each.said.short.values(), default=math.inf), default=search)
    best = min(found, key=lambda plan: plan.step_time_s)
    return of_all(best, found, [least_s for each in left for least_s in each.unexplored()]), search
