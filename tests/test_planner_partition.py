"""Stages and modes: what the program finds equals trying every cut and every mode of every piece; the account of a stage, by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import Infeasible
from autopar.planner import partition as under_test
from autopar.planner.modes import Mode
from autopar.planner.partition import Partition, _Stages, least_bytes, partition
from autopar.planner.solver import OutOfBudget
from autopar.planner.stage_account import Account, EveryStage, Piece, Run, allowed, stage_bytes, stage_modes
from cost_models.pipeline import in_flight, step_time_s

pytestmark = pytest.mark.pure

UNIT = 2**27  # bytes: an eighth of a GiB, so that limits between two multiples are met or missed clearly
NONE = Mode(name="none")


def held(kept: float, spike: float = 0.0, *, name: str = "none", again_s: float = 0.0) -> Mode:
    """A mode that keeps so many bytes and needs so many more in backward."""
    return Mode(name=name, again_s=again_s, kept_bytes=kept, forward_bytes=kept, backward_bytes=kept + spike, later_bytes=kept + spike)


def spelled_out(pieces: tuple[Piece, ...], modes: tuple[int, ...], flights: int, m: int) -> float:
    """What a stage needs, from the moments of a step one after the other: a list of what is alive at each."""
    used = [p.modes[k] for p, k in zip(pieces, modes, strict=True)]
    ends = pieces[0].received_bytes + pieces[-1].sent_bytes
    whole = sum(x.kept_bytes for x in used) + ends
    every = sum(p.gradient_bytes for p in pieces)
    moments = [every + sum(p.reduced_bytes for p in pieces)]
    for number in range(min(m, 2)):  # the first micro-batch whose backward runs, and a later one
        there = every if number else 0.0
        others = flights - 1 if not number or m > flights else max(flights - 2, 0)
        forwards = not (number == m - 1 and m > flights)
        for k, mode in enumerate(used):
            before = sum(x.kept_bytes for x in used[:k])
            if forwards:
                moments.append(others * whole + there + before + mode.forward_bytes)
            behind = 0.0 if number else sum(p.gradient_bytes for p in pieces[k + 1 :])
            needs = mode.later_bytes if number else mode.backward_bytes
            # what the last piece makes when it runs again holds what was sent: that is there once
            once = pieces[-1].sent_bytes if k == len(used) - 1 and mode.again_s > 0 else 0.0
            moments.append(others * whole + there + ends - once + before + needs + behind)
    passes = max(moments) + sum(p.passing_bytes for p in pieces)
    return sum(p.rest_bytes for p in pieces) + max(passes, sum(p.update_bytes for p in pieces))


def _stage_times(pieces: tuple[Piece, ...], cuts: tuple[int, ...], modes: tuple[int, ...]) -> tuple[list[float], list[float]]:
    spans = list(itertools.pairwise((0, *cuts, len(pieces))))
    forward = [sum(pieces[k].forward_s for k in range(i, j)) for i, j in spans]
    backward = [sum(pieces[k].backward_s + pieces[k].modes[modes[k]].again_s for k in range(i, j)) for i, j in spans]
    return forward, backward


def _closed_form_s(pieces: tuple[Piece, ...], cuts: tuple[int, ...], modes: tuple[int, ...], micro_batches: int) -> float:
    forward, backward = _stage_times(pieces, cuts, modes)
    return (micro_batches - 1) * max(f + b for f, b in zip(forward, backward)) + sum(forward) + sum(backward)


def _fullest(pieces: tuple[Piece, ...], cuts: tuple[int, ...], modes: tuple[int, ...], flights: tuple[int, ...], m: int) -> float:
    spans = itertools.pairwise((0, *cuts, len(pieces)))
    return max(spelled_out(pieces[i:j], modes[i:j], flights[s], m) for s, (i, j) in enumerate(spans))


def _brute_s(pieces: tuple[Piece, ...], stages: int, m: int, flights: tuple[int, ...], limit: float, recompute: str) -> float:
    def may(p: Piece) -> list[int]:
        return [k for k, mode in enumerate(p.modes) if recompute in ("auto", mode.name)] or [0]

    best = math.inf
    for cuts in itertools.combinations(range(1, len(pieces)), stages - 1):
        spans = list(itertools.pairwise((0, *cuts, len(pieces))))
        if stages > 1 and any(not any(p.trains for p in pieces[i:j]) for i, j in spans):
            continue
        for modes in itertools.product(*map(may, pieces)):
            if _fullest(pieces, cuts, modes, flights, m) <= limit:
                best = min(best, _closed_form_s(pieces, cuts, modes, m))
    return best


@st.composite
def _problems(draw: st.DrawFn) -> dict[str, object]:
    scale = draw(st.sampled_from([1e-6, 1e-3, 1.0]))  # seconds: from toys to the largest models
    times = st.integers(1, 40).map(lambda k: k * scale / 8)
    units = st.integers(0, 6).map(lambda k: float(k * UNIT))
    few = st.sampled_from([0.0, 0.0, float(UNIT)])
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        forward, kept, spike = draw(times), draw(units) + UNIT, draw(few)
        modes = [held(kept, spike)]
        for name in draw(st.sampled_from([(), ("full",), ("selective", "full"), ("selective", "selective", "full")])):
            less = draw(units)
            if less < kept:
                modes.append(held(less, kept - less + spike + draw(few), name=name, again_s=draw(times) / 2))
        kinds.append(
            Piece(
                forward_s=forward, backward_s=draw(times), rest_bytes=draw(units), passing_bytes=draw(few), gradient_bytes=draw(few),
                reduced_bytes=draw(few), update_bytes=draw(few), received_bytes=draw(few), sent_bytes=draw(few),
                trains=draw(st.sampled_from([True, True, True, False])), modes=tuple(modes),
            )
        )  # fmt: skip
    pieces = tuple(draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 5))))
    stages = draw(st.integers(1, min(4, len(pieces))))
    micro_batches = draw(st.integers(1, 6))
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    return {
        "pieces": pieces,
        "stages": stages,
        "micro_batches": micro_batches,
        "flights": tuple(in_flight(schedule, s, stages, micro_batches) for s in range(stages)),
        "limit": (draw(st.integers(1, 90)) + 0.5) * UNIT,
        "recompute": draw(st.sampled_from(["none", "selective", "full", "auto", "auto", "auto"])),
    }


@settings(max_examples=150, derandomize=True)
@given(_problems())
def test_the_optimum_is_that_of_trying_everything(given_: dict) -> None:
    pieces, stages, m, flights, limit, recompute = given_.values()
    best = _brute_s(pieces, stages, m, flights, limit, recompute)

    def solved(worth_s: float = math.inf) -> Partition | None:
        return partition(
            pieces, stages=stages, micro_batches=m, in_flight=flights, limit_bytes=limit, recompute=recompute, worth_s=worth_s
        )

    least = least_bytes(pieces, stages, flights, m, recompute)
    if best == math.inf:
        with pytest.raises(Infeasible):
            solved()
        return
    assert least <= limit
    part = solved()
    assert part is not None
    assert len(part.cuts) == stages - 1 and list(part.cuts) == sorted(set(part.cuts)) and all(0 < c < len(pieces) for c in part.cuts)
    assert _fullest(pieces, part.cuts, part.modes, flights, m) <= limit
    assert part.recomputed == {k for k, mode in enumerate(part.modes) if mode} and (recompute != "none" or not part.recomputed)
    assert all(recompute in ("auto", p.modes[k].name) or k == 0 for p, k in zip(pieces, part.modes, strict=True))
    mine = _closed_form_s(pieces, part.cuts, part.modes, m)
    assert best * (1 - 1e-9) <= mine <= best * (1 + 2e-4)
    assert part.outcome.objective == pytest.approx(mine, rel=1e-6)
    assert part.outcome.bound <= best * (1 + 1e-6)
    worth = solved(worth_s=best * 1.01)
    assert worth is not None and worth.outcome.objective <= best * (1 + 2e-4), "what is worth its while is found"


@pytest.mark.parametrize("seed", range(3))
def test_where_memory_is_tight_cuts_and_recompute_are_decided_together(seed: int) -> None:
    """Unlike pieces, and less memory than they would keep: what runs again may make a stage the slowest, and other cuts better."""
    rng = random.Random(seed)
    again = moved = 0
    for _ in range(40):
        pieces = tuple(
            Piece(
                forward_s=(f := rng.randint(1, 9)), backward_s=2 * f,
                modes=(held(UNIT * rng.randint(3, 8)), held(UNIT * rng.randint(1, 2), name="full", again_s=rng.randint(1, 9))),
            )
            for _ in range(5)
        )  # fmt: skip
        stages, m = rng.choice((2, 3)), rng.randint(2, 8)
        flights = tuple(in_flight("1f1b", s, stages, m) for s in range(stages))
        given_ = {"stages": stages, "micro_batches": m, "in_flight": flights, "recompute": "auto"}
        free = partition(pieces, limit_bytes=2.0**50, **given_)  # type: ignore[arg-type]
        assert free is not None
        least, most = least_bytes(pieces, stages, flights, m, "auto"), _fullest(pieces, free.cuts, free.modes, flights, m)
        limit = rng.uniform(least, most)
        best = _brute_s(pieces, stages, m, flights, limit, "auto")
        if best == math.inf:
            continue
        part = partition(pieces, limit_bytes=limit, **given_)  # type: ignore[arg-type]
        assert part is not None
        mine = _closed_form_s(pieces, part.cuts, part.modes, m)
        assert mine == pytest.approx(best) == part.outcome.objective and part.outcome.bound <= best * (1 + 1e-9)
        again, moved = again + bool(part.recomputed), moved + (part.cuts != free.cuts)
    assert again > 20 and moved > 5


def test_the_account_of_a_stage_by_hand() -> None:
    """Two pieces that keep 10 and 20, need 3 and 5 more in backward, and whose gradients are 2 and 4; 7 rest, 1 comes in, 6 go out."""
    first = Piece(forward_s=1, backward_s=2, rest_bytes=7, gradient_bytes=2, received_bytes=1, modes=(held(10, 3),))
    second = Piece(forward_s=1, backward_s=2, gradient_bytes=4, reduced_bytes=4, sent_bytes=6, modes=(held(20, 5),))
    pair = (first, second)
    assert stage_bytes(pair, (0, 0), 1, 1) == 7 + 10 + 25 + 1 + 6  # in backward of the second
    assert stage_bytes(pair, (0, 0), 2, 2) == 7 + (10 + 20 + 1 + 6) + 10 + 25 + 1 + 6  # beside a second micro-batch
    assert stage_bytes(pair, (0, 0), 1, 2) == 7 + 6 + 10 + 25 + 1 + 6  # beside all gradients
    assert stage_bytes(pair, (0, 0), 2, 3) == 7 + 37 + 6 + 10 + 25 + 1 + 6  # beside both
    assert stage_bytes((dataclasses.replace(first, update_bytes=90), second), (0, 0), 1, 1) == 7 + 90
    early = dataclasses.replace(first, modes=(held(10, 40),))
    assert stage_bytes((early, second), (0, 0), 1, 1) == 7 + 50 + 4 + 1 + 6  # in backward of the first, what the second kept is gone
    small = tuple(dataclasses.replace(p, modes=(NONE,), received_bytes=0, sent_bytes=0) for p in pair)
    assert stage_bytes(small, (0, 0), 1, 1) == 7 + 6 + 4  # at the end, with the gradients that wait in a bucket
    high = Piece(forward_s=1, backward_s=2, gradient_bytes=2, modes=(held(10, 40),))
    runs = Run(piece=high, count=3, modes=(0,)), Run(piece=second, count=1, modes=(0,))
    account = Account(runs=runs, in_flight=1, micro_batches=1)
    assert account.bytes([(3,), (1,)]) == 2 * 10 + 50 + 6 + 4  # in backward of the last of three equal ones


@settings(max_examples=60, derandomize=True)
@given(_problems())
def test_equal_pieces_are_counted_as_if_each_stood_alone(given_: dict) -> None:
    pieces, _, m, flights, *_ = given_.values()
    rng = random.Random(0)
    for _ in range(3):
        modes = [rng.randrange(len(p.modes)) for p in pieces]
        grouped = [(p, list(g)) for p, g in itertools.groupby(range(len(pieces)), key=lambda k: pieces[k])]
        modes = [m for p, g in grouped for m in sorted((modes[k] for k in g), key=allowed(p.modes, "auto").index)]
        runs = tuple(Run(piece=p, count=len(g), modes=allowed(p.modes, "auto")) for p, g in grouped)
        counts = [[sum(modes[k] == mode for k in g) for mode in run.modes] for run, (_, g) in zip(runs, grouped, strict=True)]
        account = Account(runs=runs, in_flight=flights[0], micro_batches=m)
        expected = spelled_out(pieces, tuple(modes), flights[0], m)
        assert account.bytes(counts) == stage_bytes(pieces, modes, flights[0], m) == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_stage_that_is_cut_short_states_by_how_much_it_may_be_slower(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [
        Piece(
            forward_s=1, backward_s=2,
            modes=(held(20), *(held(rng.randint(1, 15), name="selective", again_s=rng.uniform(1, 5)) for _ in range(rng.randint(1, 3)))),
        )
        for _ in range(3)
    ]  # fmt: skip
    account = Account(runs=tuple(Run(piece=p, count=3, modes=allowed(p.modes, "auto")) for p in kinds), in_flight=1, micro_batches=1)
    for limit in (60.5, 100.5, 140.5, 170.5):
        whole = stage_modes(account, limit, nodes=10**6)
        if whole is None:
            continue
        cut = stage_modes(account, limit, nodes=1)
        assert cut is not None and whole.slack_s == 0
        assert account.bytes(cut.counts) <= limit
        assert cut.again_s - cut.slack_s <= whole.again_s * (1 + 1e-9) <= cut.again_s * (1 + 1e-9)


def test_a_search_that_was_cut_short_proves_nothing() -> None:
    """Off the convex hull there is a mode that fits, and what keeps least does not: who has not looked there may not say that none does."""
    off_the_hull = held(5, name="selective", again_s=1.5)
    piece = Piece(forward_s=1, backward_s=2, modes=(held(10), off_the_hull, held(1, spike=100, name="full", again_s=2.0)))
    account = Account(runs=(Run(piece=piece, count=2, modes=allowed(piece.modes, "auto")),), in_flight=1, micro_batches=1)
    found = stage_modes(account, 12)
    assert found is not None and found.again_s == 3.0
    with pytest.raises(OutOfBudget):
        stage_modes(account, 12, nodes=1)
    assert stage_modes(account, 9) is None
    options = dict(stages=1, micro_batches=1, in_flight=(1,), recompute="auto")
    assert partition((piece, piece), limit_bytes=12, **options) is not None  # type: ignore[arg-type]
    with pytest.raises(OutOfBudget) as why:
        partition((piece, piece), limit_bytes=12, nodes=1, **options)  # type: ignore[arg-type]
    assert why.value.bound == 6.0  # of the work alone
    with pytest.raises(Infeasible):  # which no mode can do
        partition((piece, piece), limit_bytes=1, nodes=1, **options)  # type: ignore[arg-type]


@settings(max_examples=120, derandomize=True, deadline=None)
@given(_problems())
def test_a_stage_runs_no_less_again_than_is_known_before_it_is_looked_at(given_: dict) -> None:
    pieces, stages, m, flights, limit, recompute = given_.values()
    spans = _Stages(pieces, stages, flights, m, limit, recompute, None, {}, {})
    for s, i in itertools.product(range(stages), range(len(pieces))):
        for j in range(i + 1, len(pieces) + 1):
            if stages == 1 and i:
                continue
            at_least_s, again = spans._at_least_s(i, j, s), spans.again(i, j, s)
            assert again is None or at_least_s <= again[0] * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_searches_that_were_cut_short_leave_a_bound_that_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all pieces differ there are more stages than can be searched: the best that is found is no better than the best of all, and
    the bound no higher. What was found out before is taken, and changes nothing of that."""
    rng = random.Random(seed)
    pieces = tuple(
        Piece(
            forward_s=rng.uniform(1, 2), backward_s=rng.uniform(2, 4), rest_bytes=rng.uniform(0, 5), gradient_bytes=rng.uniform(0, 5),
            modes=(
                held(rng.uniform(15, 20), 3),
                held(rng.uniform(8, 12), 6, name="selective", again_s=rng.uniform(0.2, 0.6)),
                held(rng.uniform(1, 4), 18, name="full", again_s=rng.uniform(0.8, 2)),
            ),
        )
        for _ in range(9)
    )  # fmt: skip
    options = dict(stages=3, micro_batches=4, in_flight=(3, 2, 1), recompute="auto", limit_bytes=rng.uniform(90, 130))
    whole = partition(pieces, **options)  # type: ignore[arg-type]
    assert whole is not None and whole.outcome.status == "solved"
    monkeypatch.setattr(under_test, "SEARCHED", 0)
    monkeypatch.setattr(under_test, "FEWER", 1)
    known: dict = {}
    asked = 0
    for _ in range(2):
        found = partition(pieces, known=known, **options)  # type: ignore[arg-type]
        assert found is not None
        best_s = whole.outcome.objective
        assert found.outcome.bound * (1 - 1e-9) <= best_s <= found.outcome.objective * (1 + 1e-9)
        assert found.outcome.objective - found.outcome.bound <= 0.2 * best_s
        assert _fullest(pieces, found.cuts, found.modes, (3, 2, 1), 4) <= options["limit_bytes"]
        assert found.outcome.status == "solved" or found.outcome.gap > 0
        asked = asked or len(known)
    assert len(known) == asked
    worth = partition(pieces, known=known, worth_s=1.1 * whole.outcome.objective, **options)  # type: ignore[arg-type]
    assert worth is not None and worth.outcome.bound <= whole.outcome.objective * (1 + 1e-9)


def test_the_objective_is_the_schedules_closed_form() -> None:
    """With equal stages the objective of the program is the time that the schedules' own arithmetic states."""
    pieces = tuple(Piece(forward_s=2e-3, backward_s=4e-3) for _ in range(8))
    for stages, m, schedule in itertools.product((1, 2, 4), (1, 3, 8), ("1f1b", "gpipe")):
        flights = tuple(in_flight(schedule, s, stages, m) for s in range(stages))
        part = partition(pieces, stages=stages, micro_batches=m, in_flight=flights, limit_bytes=2**40, recompute="auto")
        assert part is not None
        forward, backward = _stage_times(pieces, part.cuts, part.modes)
        assert part.outcome.objective == pytest.approx(step_time_s(schedule, forward, backward, m), rel=1e-3)
        assert not part.recomputed, "nothing is recomputed where memory suffices"


def test_recompute_is_the_price_of_memory() -> None:
    """The tighter the memory, the more is recomputed, and the slower the step; below the least there is no plan."""
    pieces = tuple(
        Piece(
            forward_s=1e-3 * k, backward_s=2e-3 * k, rest_bytes=UNIT,
            modes=(held(4.0 * UNIT), held(3.0 * UNIT, name="selective", again_s=1e-4 * k), held(1.0 * UNIT, name="full", again_s=1e-3 * k)),
        )
        for k in range(1, 6)
    )  # fmt: skip
    times, used = [], set()
    for limit in range(26, 9, -1):
        part = partition(pieces, stages=1, micro_batches=1, in_flight=(1,), limit_bytes=(limit + 0.5) * UNIT, recompute="auto")
        assert part is not None
        used.add(frozenset(part.modes))
        times.append(_closed_form_s(pieces, part.cuts, part.modes, 1))
    assert times == sorted(times) and times[0] < times[-1]
    assert frozenset({0, 1, 2}) in used, "all three modes stand beside each other in one plan"
    with pytest.raises(Infeasible):
        partition(pieces, stages=1, micro_batches=1, in_flight=(1,), limit_bytes=9.5 * UNIT, recompute="auto")


def test_what_a_stage_needs_beyond_its_pieces_is_counted() -> None:
    pieces = tuple(Piece(forward_s=1, backward_s=2, modes=(held(4.0), held(1.0, name="full", again_s=1))) for _ in range(4))
    given_ = {"stages": 2, "micro_batches": 2, "in_flight": (1, 1), "limit_bytes": 10.0, "recompute": "auto"}
    free = partition(pieces, **given_)  # type: ignore[arg-type]
    more = partition(pieces, over={(0, 2, 0): 3.0}, **given_)  # type: ignore[arg-type]
    assert free is not None and more is not None
    assert (free.cuts, free.modes, more.cuts, more.modes) == ((2,), (0, 0, 0, 0), (2,), (1, 0, 0, 0))


@pytest.mark.parametrize("seed", range(30))
def test_all_stages_at_once_need_what_each_needs(seed: int) -> None:
    rng = random.Random(seed)

    def figure() -> float:
        return float(rng.randint(0, 1000))

    kinds = []
    for again_s in (0.0, 1.0, 2.0):
        mode = Mode(name="one", again_s=again_s, kept_bytes=figure(), forward_bytes=figure(), backward_bytes=figure(), later_bytes=figure())
        kinds.append(
            Piece(
                forward_s=1.0, backward_s=1.0, rest_bytes=figure(), passing_bytes=figure(), gradient_bytes=figure(), reduced_bytes=figure(),
                update_bytes=3 * figure(), received_bytes=figure(), sent_bytes=figure(), modes=(mode,),
            )
        )  # fmt: skip
    pieces = [rng.choice(kinds) for _ in range(rng.randint(1, 7))]
    for m in (1, 2, 4):
        modes = [p.modes[0] for p in pieces]
        every, first = EveryStage(pieces, modes, m), EveryStage(pieces, modes, m, first=True)
        for flights in range(1, m + 1):
            found = every.bytes(flights)
            assert first.bytes(flights).tolist() == found[:1].tolist(), "stages that begin with the first piece"
            for i, j in itertools.product(range(len(pieces) + 1), repeat=2):
                one = stage_bytes(pieces[i:j], [0] * (j - i), flights, m) if i < j else math.inf
                assert found[i, j] == one, (i, j, flights, m)
                assert i >= j or one == spelled_out(tuple(pieces[i:j]), (0,) * (j - i), flights, m)
