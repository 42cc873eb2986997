"""The bound of stages that knows of memory and of what ends a step: never above a price, near it, and in time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import Infeasible
from autopar.measure import Pricer
from autopar.planner import Pins
from autopar.planner.estimate import Estimator
from autopar.planner.exchange import Exchange, LeastOnce
from autopar.planner.interleave import rank_bytes
from autopar.planner.modes import Mode
from autopar.planner.price import ParamBytes
from autopar.planner.relaxed import Ends, least_of_stages
from autopar.planner.search import Search
from autopar.planner.space import Choice
from autopar.planner.stage_account import Piece, stage_bytes
from cost_models.cluster import load_cluster
from cost_models.pipeline import Flow, flow
from cost_models.recipe import AUTOPAR
from cost_models.rests import RESTS
from cost_models.step import exposed_gathers_s, exposed_reduction_s
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure
NOTHING = LeastOnce(reduced_s=0.0, gathers_s=0.0, last_s=0.0)


def no_ends(count: int) -> Ends:
    return Ends(of_piece=[NOTHING] * count, taken=0.0, overlaps_reduction=True, overlaps_gathers=True)


def drawn(rng: random.Random) -> tuple[list[Piece], Flow, Ends]:
    kind, ranks, chunks = rng.choice((("1f1b", 2, 1), ("1f1b", 3, 1), ("gpipe", 2, 1), ("interleaved", 2, 2), ("interleaved", 3, 2)))
    m = rng.choice((1, 2, ranks, 2 * ranks, 2 * ranks + 1))
    kinds, sent = list[Piece](), rng.randint(0, 3)
    for _ in range(rng.randint(1, 3)):
        kept, again = rng.randint(5, 30), rng.uniform(0.1, 1.0)
        whole = Mode(name="none", kept_bytes=kept, forward_bytes=kept + 2, backward_bytes=kept + 5, later_bytes=kept + 4)
        lean = Mode(name="full", again_s=again, kept_bytes=3, forward_bytes=kept, backward_bytes=kept + 5, later_bytes=kept + 4)
        piece = Piece(
            forward_s=rng.uniform(0.5, 2), backward_s=rng.uniform(0.5, 4), rest_bytes=rng.randint(0, 9), passing_bytes=rng.randint(0, 2),
            gradient_bytes=rng.randint(0, 9), reduced_bytes=rng.randint(0, 3), update_bytes=rng.randint(0, 20), received_bytes=sent,
            sent_bytes=sent, modes=(whole, lean),
        )  # fmt: skip
        kinds.append(piece)
    stages = ranks * chunks
    count = rng.randint(stages, stages + (3 if chunks == 1 else 2))
    pieces = [kinds[k * len(kinds) // count] for k in range(count)]
    ends = Ends(
        of_piece=[LeastOnce(reduced_s=rng.uniform(0, 3), gathers_s=rng.choice((0.0, 1.0)), last_s=rng.choice((0.0, 0.4))) for _ in pieces],
        taken=rng.choice((0.0, 0.2)), overlaps_reduction=rng.random() < 0.8, overlaps_gathers=rng.random() < 0.8,
    )  # fmt: skip
    return pieces, flow(kind, ranks, m, chunks), ends


def price_s(pieces: Sequence[Piece], where: Flow, ends: Ends, cuts: tuple[int, ...], modes: tuple[int, ...]) -> float:
    """Of a pipeline, and of what each rank brings together after it, in three buckets."""
    spans = list(itertools.pairwise((0, *cuts, len(pieces))))
    forward = [sum(pieces[k].forward_s for k in range(i, j)) for i, j in spans]
    backward = [sum(pieces[k].backward_s + pieces[k].modes[modes[k]].again_s for k in range(i, j)) for i, j in spans]
    after = 0.0
    for rank in range(where.ranks):
        held = [s for s, r in enumerate(where.rank_of) if r == rank]
        once = [ends.of_piece[k] for s in held for k in range(*spans[s])]
        reduced, gathers = sum(x.reduced_s for x in once), sum(x.gathers_s for x in once)
        f, b = sum(forward[s] for s in held), sum(backward[s] for s in held)
        free_s = exposed_reduction_s([reduced / 3] * 3, b) if ends.overlaps_reduction else reduced
        late_s = exposed_gathers_s([gathers / 3] * 3, f, [1] * 3) if ends.overlaps_gathers else gathers
        own = ends.taken * reduced + (1 - ends.taken) * free_s if ends.overlaps_reduction else reduced
        own += ends.taken * gathers + (1 - ends.taken) * late_s if ends.overlaps_gathers else gathers
        after = max(after, own + sum(x.last_s for x in once))
    return where.step_time_s(forward, backward, 0.0) + after


def bytes_of(pieces: Sequence[Piece], where: Flow, cuts: tuple[int, ...], modes: tuple[int, ...]) -> float:
    spans = list(itertools.pairwise((0, *cuts, len(pieces))))
    if where.chunks == 1:
        each = (stage_bytes(pieces[i:j], modes[i:j], where.in_flight[s], where.micro_batches) for s, (i, j) in enumerate(spans))
        return max(each)
    own = [[spans[s] for s in where.on_rank(rank).stages] for rank in range(where.ranks)]
    return max(
        rank_bytes([pieces[i:j] for i, j in of], [modes[i:j] for i, j in of], where.on_rank(rank)) for rank, of in enumerate(own)
    )


@pytest.mark.parametrize("seed", range(30))
def test_no_stages_that_fit_are_faster(seed: int) -> None:
    rng = random.Random(seed)
    pieces, where, ends = drawn(rng)
    cuts = list(itertools.combinations(range(1, len(pieces)), where.stages - 1))
    every = [(c, m) for c in cuts for m in itertools.product((0, 1), repeat=len(pieces))]
    sizes = {x: bytes_of(pieces, where, *x) for x in every}
    prices = {x: price_s(pieces, where, ends, *x) for x in every}
    for limit in (math.inf, rng.uniform(min(sizes.values()), max(sizes.values())), min(sizes.values()), 0.9 * min(sizes.values())):
        bound_s = least_of_stages(pieces, where, min(limit, 1e9), "auto", ends).seconds
        fits = [prices[x] for x in every if sizes[x] <= limit]
        assert bound_s <= min(fits, default=math.inf)
        assert bound_s >= where.least_s(sum(p.forward_s + p.backward_s for p in pieces)) * (1 - 1e-5)


@pytest.mark.parametrize("kind,chunks", [("1f1b", 1), ("interleaved", 2)])
def test_near_the_best_of_many_equal_layers(kind: str, chunks: int) -> None:
    """32 layers on 4 ranks, 8 micro-batches, half of what they keep: by hand each rank must run so many again that it fits."""
    whole, lean = Mode(name="none", kept_bytes=10.0), Mode(name="full", again_s=1.0, kept_bytes=1.0)
    pieces = [Piece(forward_s=1.0, backward_s=2.0, modes=(whole, lean))] * 32
    where, ample = flow(kind, 4, 8, chunks), 1e6
    evenly = least_of_stages(pieces, where, ample, "auto", no_ends(32)).seconds
    assert evenly == pytest.approx(3 * 32 * (8 + 3 / chunks) / 4, rel=1e-5)
    everything = least_of_stages(pieces, where, ample, "full", no_ends(32)).seconds
    assert everything == pytest.approx(evenly * 4 / 3, rel=1e-5)
    tight = least_of_stages(pieces, where, 160.0, "auto", no_ends(32)).seconds
    assert evenly * 1.05 < tight < everything
    again = [least_of_stages(pieces, where, limit, "auto", no_ends(32)).runs_again for limit in (ample, 160.0, 10.0)]
    assert again == [False, True, True]
    assert least_of_stages(pieces, where, 10.0, "auto", no_ends(32)).seconds == math.inf
    assert least_of_stages(pieces, where, 160.0, "auto", no_ends(32), worth_s=evenly).seconds > evenly


def test_what_ends_a_step_by_hand() -> None:
    """Two layers on two ranks: the one whose gradients take 5 s has 2 s of backward to hide them."""
    pieces = [Piece(forward_s=1.0, backward_s=2.0)] * 2
    once = [NOTHING, LeastOnce(reduced_s=5.0, gathers_s=0.0, last_s=0.25)]
    ends = Ends(of_piece=once, taken=0.0, overlaps_reduction=True, overlaps_gathers=True)
    where = flow("1f1b", 2, 4)
    assert least_of_stages(pieces, where, 1e9, "auto", ends).seconds == pytest.approx(3 * 2 + 3 * 3 + 5 - 2 + 0.25, rel=1e-5)


GIVEN = ("dgx-h100", "dgx-a100")


@settings(max_examples=60)
@given(st.data())
def test_what_is_brought_together_takes_no_less_than_its_parts(data: st.DataObject) -> None:
    """Whatever else a rank holds, and however its collectives fall into buckets."""
    cluster = load_cluster(data.draw(st.sampled_from(GIVEN)))
    dp = data.draw(st.sampled_from((2, 4, 8)))
    rest = RESTS[data.draw(st.sampled_from(sorted(RESTS)))]
    shard = dp if rest.zero else 1
    numbers = st.integers(1, 200_000_000)

    def param(n: int) -> ParamBytes:
        part = n // shard if n % shard == 0 else n
        return ParamBytes(local_bytes=2 * n, resting_bytes=4 * part, numel=n, resting_numel=part, trainable=True)

    sets = [[param(n) for n in data.draw(st.lists(numbers, max_size=4))] for _ in range(3)]
    exchange = Exchange(
        rest=rest, shard=shard, micro_batches=data.draw(st.integers(1, 4)), pricer=Pricer(cluster, {"pp": 2, "dp": dp, "tp": 1}),
        recipe=AUTOPAR,
    )  # fmt: skip
    once, parts = exchange.once(Counter(p for own in sets for p in own)), [exchange.least_once(Counter(own)) for own in sets]
    near = 1 + 1e-6
    assert sum(x.reduced_s for x in parts) <= near * sum(n * s for n, s in once.reduced)
    assert sum(x.gathers_s for x in parts) <= near * sum(n * s for n, s in once.gathers)
    assert sum(x.last_s for x in parts) <= near * once.last_s


@functools.cache
def search_of(program: str, recompute: str | None = None) -> Search:
    return Search(
        program=program_of(program), gpus=4, cluster=load_cluster("dgx-a100"), memory_limit_bytes=2**40, optimizer="adamw",
        precision="fp32", pins=Pins(recompute=recompute),
    )  # fmt: skip


def estimators(program: str, recompute: str | None = None) -> Iterator[tuple[Choice, Estimator]]:
    """Of four GPUs, each choice that can be priced."""
    search = search_of(program, recompute)
    for choice in search.space.choices():
        rank = search.known.rank(choice.mesh, choice.micro_batches, search.batch_size, search.recipe)
        found = search.estimator(rank, choice)
        if isinstance(found, Estimator):
            yield choice, found


@pytest.mark.parametrize("program", ["deep", "pair", "masked", "normed"])
def test_what_is_kept_alone_is_what_pieces_keep_and_no_more_than_they_need(program: str) -> None:
    """The quick account of pieces and liveness' own: the same modes, seconds and bytes between forward and backward."""
    several = 0
    for _, estimator in estimators(program):
        assert len(estimator.kept) == len(estimator.plain)
        for quick, whole in zip(estimator.kept, estimator.plain, strict=True):
            bare = [Mode(name=m.name, again_s=m.again_s, kept_bytes=m.kept_bytes, spans=m.spans) for m in whole.modes]
            assert quick == dataclasses.replace(whole, modes=tuple(bare))
            several += len(bare) > 1
            for m in whole.modes:
                assert m.kept_bytes <= min(m.forward_bytes, m.backward_bytes, m.later_bytes)
    assert several or program in ("masked", "normed"), "no block of these is repeated"


@pytest.mark.parametrize("recompute", [None, "full"])
def test_one_stage_is_no_faster_than_what_it_keeps_allows(recompute: str | None) -> None:
    """Whatever the memory; without a limit the bound is that of the pieces, and where something must run again it is above that."""
    above = infeasible = compared = 0
    for choice, estimator in estimators("deep", recompute):
        if estimator.flow.stages > 1 or choice.mesh.dp not in (1, 4):
            continue
        assert recompute or estimator.least_of_stages(math.inf).seconds == pytest.approx(estimator.least_s(), rel=1e-9)
        whole = stage_bytes(estimator.pieces, [0] * len(estimator.pieces), 1, choice.micro_batches)
        for share in (1.0, 0.9, 0.7, 0.5, 0.3):
            room = share * whole
            bound_s = estimator.least_of_stages(room).seconds
            try:
                part = estimator.partition(limit_bytes=room)
            except Infeasible:
                infeasible += 1
                continue
            assert part is not None
            assert bound_s <= estimator.times(part).step_s * (1 + 1e-9)
            above += bound_s > estimator.least_s() * 1.001
            compared += 1
    assert compared > 20 and above > 5 and infeasible > 5, (compared, above, infeasible)


@pytest.mark.parametrize("program", ["wide", "pair", "masked", "deep"])
def test_other_forms_of_an_axis_are_no_better_than_all_in_parts(program: str) -> None:
    """Beside each choice's first form, each of its other forms, within all of the memory that it takes and less, down to where none of them
    fits."""
    compared = above = impossible = 0
    for choice, estimator in estimators(program):
        if not choice.mesh.has_forms:
            continue
        search, whole = search_of(program), estimator.upper_bytes(sum(p.rest_bytes + p.modes[0].kept_bytes for p in estimator.kept))
        for limit in (round(share * whole) for share in (1.0, 0.5, 0.2, 0.05)):
            bound_s = estimator.least_of_forms_s(limit)
            for other in search.space.leaner(choice, estimator.prices):
                rank = search.known.rank(other.mesh, other.micro_batches, search.batch_size, search.recipe, other.form)
                found = search.estimator(rank, other)
                if isinstance(found, Estimator):
                    least_s = found.least_of_stages(found.room_of_lean_bytes(limit)).seconds
                    assert bound_s <= least_s, (choice.words, other.form, limit / whole)
                    compared += 1
                    impossible += math.isinf(bound_s)
            above += bound_s > estimator.least_s()
    assert compared > 50 and impossible > 10, (compared, impossible)


@pytest.mark.parametrize("fits", [True, False])
def test_forms_that_cannot_fit_are_looked_at_where_nothing_else_fits_alone(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so little memory less than the fastest plan takes that it fits with recompute, and with too little for that."""

    def searched(memory_limit_bytes: int) -> Search:
        given = dataclasses.replace(search_of("deep"), memory_limit_bytes=memory_limit_bytes, pins=Pins(tp=4))
        return dataclasses.replace(given, store=None)

    ample = next(searched(2**40).candidates())
    whole = max(stage.memory.upper_bytes for stage in ample.stages)
    search, looked_at = searched(int(whole) - (100_000 if fits else 500_000)), Counter[bool]()
    rank = search.known.rank

    def counted(*given: object) -> object:
        looked_at[given[-1] != search.space.form] += 1
        return rank(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(search.known, "rank", counted)
    monkeypatch.setattr(Estimator, "least_of_forms_s", lambda *_: math.inf)
    assert (next(search.candidates(), None) is not None) == fits
    assert looked_at[False] and bool(looked_at[True]) != fits, looked_at
