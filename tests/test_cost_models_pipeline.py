"""Schedules: printing and parsing, validity, the simulator against the closed forms."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import in_flight, schedule, simulate, step_time_s
from cost_models.actions import Action, ScheduleError, parse, render, validate
from cost_models.holds import situations
from cost_models.pipeline import LONG, SCHEDULES, Schedule, exchanged, flow

pytestmark = pytest.mark.pure

kinds = st.sampled_from(["gpipe", "1f1b"])
stage_counts = st.integers(1, 8)
micro_batch_counts = st.integers(1, 20)
seconds = st.floats(0, 10, allow_subnormal=False)
times = st.integers(1, 7).flatmap(lambda n: st.tuples(*(st.lists(seconds, min_size=n, max_size=n),) * 2))


def test_how_actions_and_schedules_look() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse("12B34") == Action(12, "B", 34)
    assert render(schedule("gpipe", 2, 2)) == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"
    assert (
        render(schedule("1f1b", 3, 4))
        == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


@given(kinds, stage_counts, micro_batch_counts)
def test_schedules_are_valid_and_parse_back(kind: str, stages: int, micro_batches: int) -> None:
    ranks = schedule(kind, stages, micro_batches)
    validate(ranks)
    assert parse(render(ranks)) == ranks


@given(kinds, stage_counts, micro_batch_counts, seconds, seconds, seconds)
def test_closed_form_is_exact_for_equal_stages(
    kind: str, stages: int, micro_batches: int, forward: float, backward: float, p2p: float
) -> None:
    line = simulate(schedule(kind, stages, micro_batches), [forward] * stages, [backward] * stages, p2p)
    assert line.makespan_s == pytest.approx(step_time_s(kind, [forward] * stages, [backward] * stages, micro_batches, p2p))
    if p2p == 0 and line.makespan_s > 0:
        assert line.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@given(kinds, times, micro_batch_counts, seconds)
def test_closed_form_bounds_unequal_stages(kind: str, both: tuple[list[float], list[float]], micro_batches: int, p2p: float) -> None:
    forward, backward = both
    makespan_s = simulate(schedule(kind, len(forward), micro_batches), forward, backward, p2p).makespan_s
    closed_s = step_time_s(kind, forward, backward, micro_batches, p2p)
    assert makespan_s <= closed_s * (1 + 1e-9)
    if kind == "gpipe":
        assert makespan_s == pytest.approx(closed_s)
    for stage, (f, b) in enumerate(zip(forward, backward)):
        reach_s = sum(forward[:stage]) + sum(backward[:stage]) + 2 * stage * p2p
        assert makespan_s >= (reach_s + micro_batches * (f + b)) * (1 - 1e-9)


def test_one_stages_forward_and_anothers_backward_are_waited_for() -> None:
    """The middle stage goes forward twice before it goes backward, 0 to 2, 2 to 4, 4 to 6; the first one backward from 4 and from 7."""
    forward, backward = [0.0, 1.0, 0.0], [3.0, 2.0, 0.0]
    assert simulate(schedule("1f1b", 3, 2), forward, backward).makespan_s == 10.0
    assert step_time_s("1f1b", forward, backward, 2) == 10.0


@given(kinds, times, micro_batch_counts, seconds)
def test_timeline_is_consistent(kind: str, both: tuple[list[float], list[float]], micro_batches: int, p2p: float) -> None:
    """No stage does two things at once, nothing starts before what it needs has arrived, idle and busy time add up."""
    forward, backward = both
    stages = len(forward)
    line = simulate(schedule(kind, stages, micro_batches), forward, backward, p2p)
    end_s = {event.action: event.end_s for events in line.events for event in events}
    for stage, events in enumerate(line.events):
        for before, after in zip(events, events[1:]):
            assert before.end_s <= after.start_s
        for event in events:
            for need in event.action.needs(stages):
                assert event.start_s >= end_s[need] + (p2p if need.stage != stage else 0)
        busy_s = micro_batches * (forward[stage] + backward[stage])
        assert line.idle_s[stage] + busy_s == pytest.approx(line.makespan_s)
        assert line.peak_in_flight[stage] == in_flight(kind, stage, stages, micro_batches)


def test_micro_batches_in_flight() -> None:
    assert [in_flight("1f1b", stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("1f1b", stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert [in_flight("gpipe", stage, 4, 8) for stage in range(4)] == [8, 8, 8, 8]


@pytest.mark.parametrize(
    "text,message",
    [
        ("0F0 0B0\n1F0", "stage 1 misses 1B0"),
        ("0F0 0B0 0F0", "0F0 runs twice"),
        ("0F0 1F0\n1B0 0B0", "1B0 is on rank 1, its stage is on rank 0"),
        ("0F0 0B0\n2F0 2B0", "no rank runs stage 1"),
        ("0F0 0B0 0W0 0F1 0B1", "stage 0 misses 0W1"),
        ("0B0 0F0", "deadlocks: 0B0"),
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "deadlocks: 0B0, 1F1"),
        ("0F0 0X0", "'0X0' is not an action"),
    ],
)
def test_invalid_schedules(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(parse(text))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="schedule 'zb' is not one of gpipe, 1f1b"):
        schedule("zb", 2, 2)
    with pytest.raises(ValueError, match="stage 2 is not one of 2"):
        in_flight("gpipe", 2, 2, 2)
    with pytest.raises(ValueError, match="2 forward and 1 backward"):
        step_time_s("gpipe", [1, 1], [1], 2)


def test_a_toy_schedule_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """One micro-batch at a time: no overlap at all; everything else follows from the data."""

    def one_by_one(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Action]:
        return [Action(rank, pass_, i) for i in range(micro_batches) for pass_ in ("F", "B")]

    monkeypatch.setitem(SCHEDULES, "one_by_one", Schedule(name="one_by_one", actions=one_by_one))
    ranks = schedule("one_by_one", 3, 4)
    assert parse(render(ranks)) == ranks
    assert in_flight("one_by_one", 0, 3, 4) == 1
    assert step_time_s("one_by_one", [1, 1, 1], [2, 2, 2], 4) == simulate(ranks, [1] * 3, [2] * 3).makespan_s == 4 * 9


# ------------------------------------------------------------------------------------- several stages on a rank
SHAPES = [(p, v, m) for p in range(2, 9) for v in range(1, 5) for m in (*range(1, 2 * p + 2), 4 * p, 4 * p + 1)]


def _blocking(ranks: list[list[tuple[set[str], set[str]]]]) -> bool:
    """Whether all ranks come to their end if each waits, before each action, until its sends and receives are met by the others'."""
    at = [0] * len(ranks)
    offered: list[set[str]] = [set() for _ in ranks]
    for _ in range(sum(map(len, ranks)) + 1):
        for rank, own in enumerate(ranks):
            while at[rank] < len(own):
                here = own[at[rank]][0] | own[at[rank]][1]
                offered[rank] |= here
                if any(sum(message in other for other in offered) != 2 for message in here):
                    break
                at[rank] += 1
    return all(n == len(own) for n, own in zip(at, ranks, strict=True))


@pytest.mark.parametrize("ranks,chunks", sorted({(p, v) for p, v, _ in SHAPES}))
def test_interleaved_stages_never_deadlock(ranks: int, chunks: int) -> None:
    """Multiples of the ranks and not; also where a send waits for its receive, and messages of a pair come in one order at both ends."""
    for m in (m for p, v, m in SHAPES if (p, v) == (ranks, chunks)):
        actions = schedule("interleaved", ranks, m, chunks)
        validate(actions)
        assert {(a.stage % ranks, len({b.stage for b in own})) for own, a in zip(actions, (own[0] for own in actions), strict=True)} == {
            (rank, chunks) for rank in range(ranks)
        }
        for passes in ("FB", "F"):
            found = exchanged("interleaved", ranks, m, chunks, passes)
            posted = [[({str(x) for x in e.sends}, {str(x) for x in e.receives}) for e in own] for own in found]
            assert _blocking(posted), (ranks, chunks, m, passes)
            for a in range(ranks):
                for b in {(a + 1) % ranks, (a - 1) % ranks} - {a}:
                    to_b = {x for e in found[b] for x in e.receives if x.stage % ranks == a}
                    assert [x for e in found[a] for x in e.sends if x in to_b] == [x for e in found[b] for x in e.receives if x in to_b]
            needed = {str(n) for own in actions for x in own if x.pass_ in passes for n in x.needs(ranks * chunks) if n.stage != x.stage}
            assert {message for own in posted for sends, _ in own for message in sends} == (needed if ranks > 1 else set())


@pytest.mark.parametrize("ranks,chunks,rounds", [(2, 2, 1), (2, 4, 3), (4, 2, 2), (4, 3, 4), (8, 2, 3), (5, 3, 2)])
def test_interleaving_divides_the_bubble(ranks: int, chunks: int, rounds: int) -> None:
    """Narayanan et al. 2021, section 2.2: the bubble is (p - 1)(f + b) / v for micro-batches that p divides."""
    m, each = rounds * ranks, [1.0 / chunks] * (ranks * chunks)
    line = simulate(schedule("interleaved", ranks, m, chunks), each, [2 * x for x in each])
    assert line.makespan_s == pytest.approx(3 * m + 3 * (ranks - 1) / chunks)
    assert line.makespan_s == pytest.approx(step_time_s("interleaved", each, [2 * x for x in each], m, ranks=ranks))
    assert line.makespan_s < step_time_s("1f1b", [1.0] * ranks, [2.0] * ranks, m)


@given(stage_counts.filter(lambda p: p > 1), st.integers(2, 4), micro_batch_counts, st.data())
def test_what_is_priced_of_unequal_stages_is_simulated_or_more(ranks: int, chunks: int, m: int, data: st.DataObject) -> None:
    count = ranks * chunks
    forward, backward = (data.draw(st.lists(seconds, min_size=count, max_size=count)) for _ in range(2))
    p2p = data.draw(seconds)
    line = simulate(schedule("interleaved", ranks, m, chunks), forward, backward, p2p)
    priced = step_time_s("interleaved", forward, backward, m, p2p, ranks)
    work = sum(forward) + sum(backward)
    least = SCHEDULES["interleaved"].least_s(work, ranks, chunks, m)
    assert priced == pytest.approx(max(line.makespan_s, least)) and least <= priced * (1 + 1e-9)
    way = flow("interleaved", ranks, m, chunks).least_way_s(work, p2p)
    assert work + 2 * (count - 1) * p2p <= way <= priced * (1 + 1e-9)
    busy = [m * sum(forward[s] + backward[s] for s in range(r, count, ranks)) for r in range(ranks)]
    assert line.makespan_s >= max(busy) * (1 - 1e-9)
    assert line.peak_in_flight == flow("interleaved", ranks, m, chunks).in_flight


def test_a_long_step_goes_on_at_its_last_rate() -> None:
    forward, m = [1.0, 1.5, 0.7, 1.1], 5200
    assert 2 * m * 4 > LONG
    line = simulate(schedule("interleaved", 2, m, 2), forward, forward, 0.1)
    assert step_time_s("interleaved", forward, forward, m, 0.1, 2) == pytest.approx(line.makespan_s)
    assert flow("interleaved", 2, m, 2).least_way_s(sum(forward) * 2, 0.1) < line.makespan_s


def test_what_is_waited_for_what_is_sent() -> None:
    """Two ranks of two stages and one micro-batch: three transfers forward and three back, and its own work; many wait for more."""
    assert flow("interleaved", 2, 1, 2).least_way_s(5.0, 0.5) == pytest.approx(8.0)
    assert flow("interleaved", 2, 64, 2).least_way_s(0.0, 0.5) > 8.0


@pytest.mark.parametrize("ranks,chunks", [(2, 2), (3, 2), (4, 2), (2, 4), (4, 3)])
@pytest.mark.parametrize("more", [0, 1])
def test_what_a_rank_holds_is_said_by_a_few_rounds(ranks: int, chunks: int, more: int) -> None:
    few, many = (flow("interleaved", ranks, n * ranks + more, chunks) for n in (5, 12))
    assert [few.on_rank(r) for r in range(ranks)] == [many.on_rank(r) for r in range(ranks)]
    rng = random.Random(0)
    sizes = [[float(k == c) for k in range(chunks)] for c in range(chunks)] + [[rng.random() for _ in range(chunks)] for _ in range(20)]
    for r in range(ranks):
        held = many.on_rank(r)
        counted = [0] * chunks
        most = 0
        for a in schedule("interleaved", ranks, 12 * ranks + more, chunks)[r]:
            k = held.stages.index(a.stage)
            counted[k] -= a.pass_ == "B"
            alike = [x.held for x in held.situations if (x.stage, x.pass_) == (k, a.pass_)]
            for nbytes in sizes:
                now = sum(n * c for n, c in zip(nbytes, counted, strict=True))
                assert max(sum(n * h for n, h in zip(nbytes, x, strict=True)) for x in alike) >= now, "whatever a micro-batch of each keeps"
            counted[k] += a.pass_ == "F"
            most = max(most, sum(counted))
        assert max(sum(x.held) + (x.pass_ in "FB") for x in held.situations) == most


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_of_one_stage_each_four_rounds_say_what_a_rank_holds_of_any_number(ranks: int) -> None:
    for m in range(4 * ranks, 9 * ranks + 2):
        whole = situations(schedule("1f1b", ranks, m))
        assert [flow("1f1b", ranks, m).on_rank(r) for r in range(ranks)] == list(whole)


def test_weights_apart_are_data_too() -> None:
    """A zero-bubble order by hand (Qi et al. 2023): what B leaves for W fills the bubble of 1F1B."""
    ranks = parse("0F0 0F1 0B0 0W0 0B1 0W1\n1F0 1B0 1F1 1B1 1W0 1W1")
    validate(ranks)
    line = simulate(ranks, [1, 1], [1, 1], weights_s=[1, 1])
    whole = simulate(schedule("1f1b", 2, 2), [1, 1], [2, 2])
    assert line.makespan_s == 7 and whole.makespan_s == 9
    assert line.peak_in_flight == (2, 2), "activations stay until the gradients of weights are made"
