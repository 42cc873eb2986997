"""Stages and recompute: the integer program equals trying every cut and every subset of recomputed segments."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import Infeasible
from autopar.planner.partition import Partition, Piece, partition, peak_bytes
from cost_models.pipeline import in_flight, step_time_s

pytestmark = pytest.mark.pure

UNIT = 2**27  # bytes: an eighth of a GiB, so that limits between two multiples are met or missed clearly


def _stage_times(pieces: tuple[Piece, ...], cuts: tuple[int, ...], again: frozenset[int]) -> tuple[list[float], list[float]]:
    bounds = (0, *cuts, len(pieces))
    spans = list(zip(bounds, bounds[1:], strict=False))
    forward = [sum(pieces[k].forward_s for k in range(i, j)) for i, j in spans]
    backward = [sum(pieces[k].backward_s + (pieces[k].forward_s if k in again else 0.0) for k in range(i, j)) for i, j in spans]
    return forward, backward


def _closed_form_s(pieces: tuple[Piece, ...], cuts: tuple[int, ...], again: frozenset[int], micro_batches: int) -> float:
    forward, backward = _stage_times(pieces, cuts, again)
    return (micro_batches - 1) * max(f + b for f, b in zip(forward, backward)) + sum(forward) + sum(backward)


def _brute_s(pieces: tuple[Piece, ...], stages: int, micro_batches: int, flights: tuple[int, ...], limit: float, recompute: str) -> float:
    can = [k for k, p in enumerate(pieces) if p.freed_bytes > 0]
    subsets = [frozenset(c) for size in range(len(can) + 1) for c in itertools.combinations(can, size)]
    allowed = {"none": [frozenset()], "full": [frozenset(can)], "auto": subsets}[recompute]
    best = math.inf
    for cuts in itertools.combinations(range(1, len(pieces)), stages - 1):
        for again in allowed:
            bounds = (0, *cuts, len(pieces))
            idle = stages > 1 and any(not any(p.trains for p in pieces[i:j]) for i, j in zip(bounds, bounds[1:], strict=False))
            if not idle and max(peak_bytes(pieces, cuts, again, flights)) <= limit:
                best = min(best, _closed_form_s(pieces, cuts, again, micro_batches))
    return best


@st.composite
def _problems(draw: st.DrawFn) -> dict[str, object]:
    scale = draw(st.sampled_from([1e-6, 1e-3, 1.0]))  # seconds: from toys to the largest models
    times = st.integers(1, 40).map(lambda k: k * scale / 8)
    units = st.integers(0, 6).map(lambda k: float(k * UNIT))
    pieces = []
    for _ in range(draw(st.integers(1, 6))):
        kept = draw(units)
        freed = min(kept, draw(units)) if draw(st.booleans()) else 0.0
        pieces.append(
            Piece(
                forward_s=draw(times),
                backward_s=draw(times),
                state_bytes=draw(units),
                kept_bytes=kept,
                freed_bytes=freed,
                temporary_bytes=draw(st.sampled_from([0.0, 0.0, float(UNIT)])),
                trains=draw(st.sampled_from([True, True, True, False])),
            )
        )
    stages = draw(st.integers(1, min(4, len(pieces))))
    micro_batches = draw(st.integers(1, 6))
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    return {
        "pieces": tuple(pieces),
        "stages": stages,
        "micro_batches": micro_batches,
        "flights": tuple(in_flight(schedule, s, stages, micro_batches) for s in range(stages)),
        "limit": (draw(st.integers(1, 60)) + 0.5) * UNIT,
        "recompute": draw(st.sampled_from(["none", "full", "auto", "auto"])),
    }


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_problems())
def test_the_optimum_is_that_of_trying_everything(given_: dict) -> None:
    pieces, stages, m, flights, limit, recompute = given_.values()
    best = _brute_s(pieces, stages, m, flights, limit, recompute)

    def solved(worth_s: float = math.inf) -> Partition | None:
        return partition(
            pieces, stages=stages, micro_batches=m, in_flight=flights, limit_bytes=limit, recompute=recompute, worth_s=worth_s
        )

    if best == math.inf:
        with pytest.raises(Infeasible):
            solved()
        return
    part = solved()
    assert part is not None
    assert len(part.cuts) == stages - 1 and list(part.cuts) == sorted(set(part.cuts)) and all(0 < c < len(pieces) for c in part.cuts)
    assert max(peak_bytes(pieces, part.cuts, part.recomputed, flights)) <= limit
    assert all(pieces[k].freed_bytes > 0 for k in part.recomputed) and (recompute != "none" or not part.recomputed)
    mine = _closed_form_s(pieces, part.cuts, part.recomputed, m)
    assert best * (1 - 1e-9) <= mine <= best * (1 + 2e-4)
    assert part.outcome.objective == pytest.approx(mine, rel=1e-6)
    assert part.outcome.bound <= best * (1 + 1e-6)
    worth = solved(worth_s=best * 1.01)
    assert worth is not None and worth.outcome.objective <= best * (1 + 2e-4), "what is worth its while is found"


def test_the_objective_is_the_schedules_closed_form() -> None:
    """With equal stages the objective of the integer program is the time that the schedules' own arithmetic states."""
    pieces = tuple(Piece(forward_s=2e-3, backward_s=4e-3, state_bytes=0.0, kept_bytes=0.0) for _ in range(8))
    for stages, m, schedule in itertools.product((1, 2, 4), (1, 3, 8), ("1f1b", "gpipe")):
        flights = tuple(in_flight(schedule, s, stages, m) for s in range(stages))
        part = partition(pieces, stages=stages, micro_batches=m, in_flight=flights, limit_bytes=2**40, recompute="auto")
        assert part is not None
        forward, backward = _stage_times(pieces, part.cuts, part.recomputed)
        assert part.outcome.objective == pytest.approx(step_time_s(schedule, forward, backward, m), rel=1e-3)
        assert not part.recomputed, "nothing is recomputed where memory suffices"


def test_recompute_is_the_price_of_memory() -> None:
    """The tighter the memory, the more is recomputed, and the slower the step; below the least there is no plan."""
    pieces = tuple(
        Piece(forward_s=1e-3 * k, backward_s=2e-3 * k, state_bytes=UNIT, kept_bytes=4.0 * UNIT, freed_bytes=3.0 * UNIT) for k in range(1, 6)
    )
    times = []
    for limit in range(26, 9, -1):
        part = partition(pieces, stages=1, micro_batches=1, in_flight=(1,), limit_bytes=(limit + 0.5) * UNIT, recompute="auto")
        assert part is not None
        times.append(_closed_form_s(pieces, part.cuts, part.recomputed, 1))
    assert times == sorted(times) and times[0] < times[-1]
    with pytest.raises(Infeasible):
        partition(pieces, stages=1, micro_batches=1, in_flight=(1,), limit_bytes=9.5 * UNIT, recompute="auto")
