"""Schedules: printing and parsing, validity, the simulator against the closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import in_flight, schedule, simulate, step_time_s
from cost_models.pipeline import SCHEDULES, Action, ScheduleError, parse, render, validate

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
        ("0F0 0B0\n1F0", "rank 1 misses 1B0"),
        ("0F0 0B0 0F0", "0F0 runs twice"),
        ("1F0 1B0\n0F0 0B0", "1F0 is on rank 0"),
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

    def one_by_one(stage: int, stages: int, micro_batches: int) -> list[Action]:
        return [Action(stage, pass_, i) for i in range(micro_batches) for pass_ in ("F", "B")]

    monkeypatch.setitem(SCHEDULES, "one_by_one", one_by_one)
    ranks = schedule("one_by_one", 3, 4)
    assert parse(render(ranks)) == ranks
    assert in_flight("one_by_one", 0, 3, 4) == 1
    assert step_time_s("one_by_one", [1, 1, 1], [2, 2, 2], 4) == simulate(ranks, [1] * 3, [2] * 3).makespan_s == 4 * 9
