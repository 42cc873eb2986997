"""Of plans that the predictions cannot tell apart the simplest is taken; what is surely slower is not, and what does not fit is not."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from typing import Any

import pytest

from autopar.planner import Pins, make_plan
from autopar.planner.arriving import Arriving
from autopar.planner.candidate import Candidate, candidate_of
from autopar.planner.interval import spread_of_kind
from autopar.planner.liveness import Moment
from autopar.planner.plan import MemoryPlan, Plan
from autopar.planner.search import Search
from autopar.planner.ties import ORDER, REACH, Tie, Waiting, difference_spread_s, simplest
from autopar.planner.words import choice_words
from autopar.report.explanation import verdict_of
from autopar.report.text import plan_text
from cost_models import Cluster, load_cluster
from cost_models.uncertainty import ACCOUNT, CENTRAL, least_upper_bytes, more_for, room_bytes
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure


def bare() -> Cluster:
    """Whose GPUs have nothing in memory before a program runs."""
    cluster = load_cluster("dgx-a100")
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, context_bytes=0))


def searched(name: str, gpus: int, machine: Cluster | None = None, limit: int = 2**36, **pins: Any) -> Search:
    return Search(
        program=program_of(name), gpus=gpus, cluster=machine or bare(), memory_limit_bytes=limit, optimizer="adamw",
        precision="fp32", pins=Pins(**pins),
    )  # fmt: skip


def order(c: Candidate) -> tuple[int, ...]:
    return (sum(n > 1 for n in c.mesh.sizes().values()), c.rest.zero, bool(c.part.recomputed), c.rank.micro_batches)


def waiting(search: Search, found: list[Candidate]) -> list[Waiting]:
    """These candidates, as a search leaves them behind."""
    choices = {c.simplicity: c for c in search.space.choices()}
    return [
        Waiting(choice=next(x for x in choices.values() if _is(x, c)), least_s=0.0, exact=c, draft=lambda _: None, price=lambda: None)
        for c in found
    ]  # fmt: skip


def _is(choice: Any, c: Candidate) -> bool:
    return (choice.mesh, choice.micro_batches, choice.rest, choice.shard) == (c.mesh, c.rank.micro_batches, c.rest, c.shard)


def moved(c: Candidate, of: Candidate, faster: float, spent: float) -> Candidate:
    """A candidate whose step is that of another, with so much less compute and so much more in its update."""
    passes_s = of.compute_s + of.bubble_s
    return dataclasses.replace(
        c, compute_s=passes_s * (1 - faster), bubble_s=0.0, gradient_sync_s=of.gradient_sync_s,
        optimizer_s=of.optimizer_s + spent * passes_s, step_time_s=of.step_time_s + (spent - faster) * passes_s,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> tuple[Search, Candidate, Candidate]:
    """A plan on two axes, and one on one axis of the same program."""
    search = searched("pair", 4)
    found = list(search.candidates())
    two = next(c for c in found if order(c)[0] == 2)
    one = next(c for c in found if order(c)[0] == 1)
    return search, two, one


def test_what_trades_one_uncertain_term_for_another_ties(pair: tuple[Search, Candidate, Candidate]) -> None:
    search, two, one = pair
    simple = moved(one, two, faster=0.5, spent=0.5 + 1e-3)  # less of one kind, a little more of another
    tie = simplest(two, waiting(search, [simple]), search.cluster)
    assert tie is not None and tie.chosen is simple and tie.fastest is two
    assert 0 < tie.difference_s <= CENTRAL * tie.spread_s
    assert tie.spread_s == difference_spread_s(simple, two, search.cluster) == difference_spread_s(two, simple, search.cluster)


def test_what_is_slower_in_everything_is_no_tie(pair: tuple[Search, Candidate, Candidate]) -> None:
    """However little: common terms cancel, and the sign of what is left is known."""
    search, two, one = pair
    slower = dataclasses.replace(
        two, mesh=one.mesh, compute_s=two.compute_s * 1.001, bubble_s=two.bubble_s * 1.001, gradient_sync_s=two.gradient_sync_s * 1.001,
        optimizer_s=two.optimizer_s * 1.001, step_time_s=two.step_time_s * 1.001,
    )  # fmt: skip
    entry = dataclasses.replace(waiting(search, [one])[0], exact=slower)
    assert simplest(two, [entry], search.cluster) is None


def test_collectives_that_were_measured_apart_have_no_error_in_common() -> None:
    """All-reduces of gradients beside reduce-scatters and gathers: on a link with one error for all of them their difference counts, else
    each counts by itself."""
    def found(zero: int, machine: Cluster) -> Candidate:
        return next(iter(searched("pair", 2, machine, pp=1, dp=2, tp=1, zero=zero, micro_batches=1, recompute="none").candidates()))

    together = bare()
    together = dataclasses.replace(together, gpu=dataclasses.replace(together.gpu, launch_s=0.0))  # or gathers keep the host
    apart = dataclasses.replace(together, intra=dataclasses.replace(together.intra, slower=(("all_reduce", 1.0), ("all_gather", 1.0))))
    for machine in (together, apart):
        whole, parts = (found(zero, machine) for zero in (0, 1))
        update = (whole.optimizer_s - parts.optimizer_s) * math.hypot(ACCOUNT, spread_of_kind("optimizer", machine))
        error = math.hypot(ACCOUNT, spread_of_kind("collectives in nodes", machine))
        sync = (whole.gradient_sync_s, parts.gradient_sync_s)
        assert min(sync) > 0
        expected = math.hypot(update, error * (math.hypot(*sync) if machine is apart else sync[0] - sync[1]))
        assert difference_spread_s(whole, parts, machine) == pytest.approx(expected, rel=1e-6)


def test_nothing_beyond_the_reach_ties_and_nothing_less_simple(pair: tuple[Search, Candidate, Candidate]) -> None:
    search, two, one = pair
    far = moved(one, two, faster=0.5, spent=0.5 + 2 * REACH)
    assert simplest(two, waiting(search, [far]), search.cluster) is None
    close = moved(two, one, faster=0.5, spent=0.5 + 1e-3)
    assert simplest(one, waiting(search, [close]), search.cluster) is None


@pytest.mark.parametrize("name,gpus", [("pair", 4), ("deep", 4), ("mlp", 2)])
def test_a_plan_is_the_fastest_or_says_what_it_ties_with(name: str, gpus: int) -> None:
    for machine in ("dgx-a100", "pcie-box", "cpu"):
        plan = make_plan(program_of(name), gpus, load_cluster(machine))
        assert plan.bound_s <= plan.objective_s <= plan.step_time_s <= plan.objective_s * (1 + REACH)
        assert plan.gap == pytest.approx(1 - plan.bound_s / plan.objective_s)
        assert bool(plan.tie) == (plan.step_time_s > plan.objective_s)
        assert ("less simple" in verdict_of(plan)) == (ORDER in " ".join(plan_text(plan).split())) == bool(plan.tie)
        assert Plan.from_json(plan.to_json()) == plan


def test_a_tie_is_taken_in_the_plan_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searched("pair", 4)
    fastest, *others = list(search.candidates())
    other = others[-1]
    monkeypatch.setattr("autopar.planner.search.simplest", lambda first, *_: Tie(fastest=first, chosen=other, spread_s=other.step_time_s))
    plan = searched("pair", 4).best()
    words = choice_words(fastest.mesh.sizes(), fastest.rest, fastest.shard, fastest.rank.micro_batches, fastest.flow.chunks)
    assert plan.mesh == other.mesh.sizes() and plan.step_time_s == other.step_time_s
    assert plan.objective_s == fastest.step_time_s and f"simpler than the fastest ({words}" in plan.tie
    assert plan.tie in " ".join(plan_text(plan).split())


def test_a_simpler_plan_that_turns_out_faster_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft may be priced with strategies of another size, and be slower than what runs."""
    search = searched("pair", 4)
    first, *others = list(search.candidates())
    other = dataclasses.replace(others[-1], step_time_s=0.9 * first.step_time_s)
    monkeypatch.setattr("autopar.planner.search.simplest", lambda first, *_: Tie(fastest=first, chosen=other, spread_s=other.step_time_s))
    plan = searched("pair", 4).best()
    assert plan.mesh == other.mesh.sizes() and plan.objective_s == plan.step_time_s == other.step_time_s
    assert not plan.tie and plan.bound_s <= plan.objective_s


# ------------------------------------------------------------------------------------------------------- the upper end
@pytest.mark.parametrize("slack", [0.0, 0.04, 0.2])
@pytest.mark.parametrize("context", [0.0, 7e8])
def test_room_is_the_inverse_of_what_is_needed_at_least(slack: float, context: float) -> None:
    for allocated in (0.0, 1e6, 3e10):
        limit = least_upper_bytes(allocated, context, slack)
        assert limit >= allocated * (1 + slack) + context
        assert room_bytes(limit, context, slack) == pytest.approx(allocated, rel=1e-9, abs=1e-3)
        for saved, temporary in itertools.product((0.0, 1e6, 2e10, 3e11), (0.0, 1e10)):
            more = more_for(saved, saved + temporary + 1e9, context, slack, temporary)
            limit = least_upper_bytes(allocated, context, slack, more)
            assert room_bytes(limit, context, slack, more) == pytest.approx(allocated, rel=1e-9, abs=1e-3)
    assert room_bytes(1e9, context, slack) < room_bytes(2e9, context, slack)


def test_a_sum_with_more_for_what_is_less_certain_is_a_bound_on_the_upper_end() -> None:
    """Whatever is saved and temporary and whatever it was made for; and it is near where as much of both is there as it was made for."""
    rng = random.Random(0)
    for _ in range(2000):
        slack, context = rng.choice((0.0, 0.03, 0.2)), rng.choice((0.0, 7e8))
        names = ("parameters", "gradients", "optimizer_states", "saved_activations", "batch", "largest_temporary", "communication_buffers")
        terms = {name: rng.choice((0.0, 10 ** rng.uniform(3, 11))) for name in names}
        allocated, saved, passing = sum(terms.values()), terms["saved_activations"], terms["largest_temporary"]
        plan = MemoryPlan(
            **{f"{name}_bytes": int(n) for name, n in terms.items()}, framework_context_bytes=int(context),
            allocator_slack_bytes=int(allocated * slack),
        )  # fmt: skip
        for guess, other in itertools.product((0.0, saved, 10 ** rng.uniform(3, 11)), (0.0, passing, 10 ** rng.uniform(3, 11))):
            more = more_for(guess, max(allocated, guess + other), context, slack, other)
            said = least_upper_bytes(allocated + more.saved * saved + more.temporary * passing, context, slack, more)
            assert said <= plan.upper_bytes + 20, (terms, more)
            if guess == saved and other in (0.0, passing) and saved + other > 0.8 * allocated:
                beside = math.hypot(terms["communication_buffers"], 0.0 if other else passing)
                assert said >= (plan.upper_bytes - 0.36 * 1.2816 * beside) * (0.97 if other else 0.99)


def test_what_pieces_say_is_a_bound_on_what_runs() -> None:
    """The account of pieces, with more for what they save and what is temporary, is never above the upper end of the interval of the same
    stages as they run; and near it where little is communicated."""
    compared, far = 0, list[float]()
    for name, gpus in (("deep", 2), ("stack", 2), ("tied", 4), ("attention", 4), ("shifted", 2)):
        search = searched(name, gpus)
        for choice in itertools.islice(search.space.choices(), 0, None, 2):
            estimator = search.estimator(search.known.whole(choice.mesh, choice.micro_batches, search.batch_size), choice)
            if isinstance(estimator, str) or estimator.flow.chunks > 1:
                continue
            fastest = estimator.partition(limit_bytes=math.inf)
            assert fastest is not None
            for fewer in range(max(len(p.modes) for p in estimator.pieces)):
                part = dataclasses.replace(fastest, modes=tuple(max(0, len(p.modes) - 1 - fewer) for p in estimator.pieces))
                found = candidate_of(estimator, part)
                for place, more in estimator.unsaid_bytes(part, found.stages).items():
                    memory = found.stages[place[-1]].memory
                    assert more >= -1e-6 * memory.upper_bytes - 64, (name, choice, place, part.modes)
                    far += [more / memory.upper_bytes] if memory.communication_buffers_bytes < 0.01 * memory.total_bytes else []
                compared += 1
    assert compared > 40 and len(far) >= 10 and statistics.median(far) < 0.02


@pytest.mark.parametrize("share", [1.0, 0.9, 0.7])
def test_a_plan_fits_at_the_upper_end_of_its_interval(share: float) -> None:
    ample = searched("deep", 2).best()
    limit = int(share * max(s.memory.upper_bytes for s in ample.stages))
    plan = searched("deep", 2, limit=limit).best()
    assert all(s.memory.total_bytes < s.memory.upper_bytes <= limit for s in plan.stages)
    assert (plan.step_time_s == ample.step_time_s) == (share == 1.0)
    for fits in searched("deep", 2, limit=limit).candidates():
        assert all(s.memory.upper_bytes <= limit for s in fits.stages)


def test_every_moment_of_a_step_fits_at_the_upper_end() -> None:
    """Forward and backward of every stage, moment by moment: none reaches above what the plan says, and the highest reaches it."""
    beyond = 0
    for name in ("deep", "pair", "attention"):
        search = searched(name, 4)
        for choice in search.space.choices():
            if choice.chunks > 1 or choice.micro_batches > 1 or choice.rest.zero or (found := search.exact(choice)) is None:
                continue
            e, bounds = found.estimator, (0, *found.part.cuts, len(found.segments))
            for s, (i, j) in enumerate(itertools.pairwise(bounds)):
                span, memory = e.span(i, j), found.stages[s].memory
                again = tuple(x for k in range(i, j) for x in e.again(k, found.part.modes[k]))
                activity, live = e.activity(span, again, e.read(span), s), e.rank.ledger.liveness
                units, sent = live.units(activity), Arriving.of(activity.sends, e.rank.program)
                passes = itertools.chain(
                    live.forward(activity, units), live.backward(activity, units, sent, accumulated=False, final=True)
                )  # fmt: skip
                highest = max(_at(memory, moment, e.recipe.allocator_slack).upper_bytes for moment in passes)
                assert highest <= memory.upper_bytes + 2, (choice.words, s)
                beyond += memory.beyond_bytes > 0 and abs(highest - memory.upper_bytes) <= 2
    assert beyond >= 2


def _at(memory: MemoryPlan, moment: Moment, slack: float) -> MemoryPlan:
    """What rests of a stage whose gradients do not, and this beside it."""
    rest = memory.parameters_bytes + memory.optimizer_states_bytes + memory.batch_bytes
    return MemoryPlan(
        batch_bytes=memory.batch_bytes,
        parameters_bytes=memory.parameters_bytes, optimizer_states_bytes=memory.optimizer_states_bytes, gradients_bytes=moment.gradients,
        saved_activations_bytes=moment.saved, largest_temporary_bytes=moment.temporary, communication_buffers_bytes=moment.communication,
        framework_context_bytes=memory.framework_context_bytes, allocator_slack_bytes=math.ceil(slack * (rest + moment.total)),
    )  # fmt: skip
