"""Several stages on one rank (interleaved 1F1B): priced, accounted for, planned, rendered, run."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.compiler import emit, plan_of
from autopar.errors import Infeasible, PlanError
from autopar.planner import Pins, Plan, make_plan
from autopar.planner.interleave import KnownOfRanks, partition_of_ranks, place_of, rank_bytes
from autopar.planner.modes import Mode
from autopar.planner.partition import Partition
from autopar.planner.solver import OutOfBudget
from autopar.planner.stage_account import Piece, stage_bytes
from autopar.planner.stages import legal_cuts
from autopar.planner.wishes import WishError, for_loss_outside
from autopar.render import load
from autopar.report.text import plan_text
from autopar.run import WorkerPool
from autopar.verify import TOLERANCE, reference, verify, verify_plan
from cost_models.cluster import load_cluster
from cost_models.pipeline import Flow, flow, schedule
from tests.planner_programs import captured_of, program_of


# ---------------------------------------------------------------------------------------------------------------- memory
def plain(kept: float, *, gradient: float = 0.0, rest: float = 0.0, running: float = 0.0, seconds: float = 1.0) -> Piece:
    """A piece that needs `running` beside what it keeps while it runs."""
    most = kept + running
    mode = Mode(name="none", kept_bytes=kept, forward_bytes=most, backward_bytes=most + gradient, later_bytes=most)
    return Piece(forward_s=seconds, backward_s=2 * seconds, rest_bytes=rest, gradient_bytes=gradient, modes=(mode,))


@pytest.mark.pure
def test_the_account_of_a_rank_by_hand() -> None:
    """Two ranks, stages 0 and 2 on the first, four micro-batches: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 and so on. When 0B1 runs,
    both stages hold two others, and all gradients are there."""
    assert " ".join(map(str, schedule("interleaved", 2, 4, 2)[0])).startswith("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1")
    on_rank = flow("interleaved", 2, 4, 2).on_rank(0)
    small, large = plain(10, rest=1), plain(100, rest=2)
    assert rank_bytes([[small], [large]], [[0], [0]], on_rank) == 3 + max(3 * 10 + 1 * 100 + 100, 2 * 10 + 2 * 100 + 10)
    assert rank_bytes([[small], [plain(100, rest=2, gradient=50)]], [[0], [0]], on_rank) == 3 + 2 * 10 + 2 * 100 + 10 + 50
    heavy = plain(10, rest=1, running=500)
    assert rank_bytes([[heavy], [large]], [[0], [0]], on_rank) == 3 + 2 * 10 + 2 * 100 + 510, "what the pass that runs needs"


@pytest.mark.pure
@pytest.mark.parametrize("seed", range(20))
def test_no_action_of_a_rank_holds_more_than_its_account(seed: int) -> None:
    rng = random.Random(seed)
    ranks, chunks, m = rng.choice(((2, 2), (3, 2), (2, 3), (4, 2))) + (rng.randint(1, 9),)
    where = flow("interleaved", ranks, m, chunks)
    rank = rng.randrange(ranks)
    pieces = [[plain(rng.randint(1, 50), gradient=rng.randint(0, 80), running=rng.randint(0, 90)) for _ in range(rng.randint(1, 3))]
              for _ in range(chunks)]  # fmt: skip
    kept = [sum(p.modes[0].kept_bytes for p in own) for own in pieces]
    gradients = [sum(p.gradient_bytes for p in own) for own in pieces]
    held, made, most = [0] * chunks, [0.0] * chunks, 0.0
    for a in schedule("interleaved", ranks, m, chunks)[rank]:
        k = where.on_rank(rank).stages.index(a.stage)
        held[k] -= a.pass_ == "B"
        beside = sum(h * x for h, x in zip(held, kept, strict=True)) + sum(made)
        before = 0.0
        for p in pieces[k]:
            most = max(most, beside + before + p.modes[0].kept_bytes + (p.modes[0].forward_bytes - p.modes[0].kept_bytes))
            before += p.modes[0].kept_bytes
        held[k] += a.pass_ == "F"
        made[k] = gradients[k] if a.pass_ == "B" else made[k]
    said = rank_bytes(pieces, [[0] * len(own) for own in pieces], where.on_rank(rank))
    assert most <= said <= most + max(gradients) + max(p.modes[0].forward_bytes for own in pieces for p in own)


@pytest.mark.pure
@pytest.mark.parametrize("stage,m", [(0, 8), (1, 8), (2, 8), (0, 3), (1, 1)])
def test_one_stage_on_a_rank_has_the_account_of_a_stage(stage: int, m: int) -> None:
    where = flow("1f1b", 3, m)
    pieces = [plain(7, gradient=20, running=3), plain(30, gradient=1, running=11), plain(2, rest=5)]
    alone = stage_bytes(pieces, [0, 0, 0], where.in_flight[stage], m)
    assert rank_bytes([pieces], [[0, 0, 0]], where.on_rank(stage)) == alone


# ------------------------------------------------------------------------------------------------------------------ cuts
def _drawn(rng: random.Random) -> tuple[tuple[Piece, ...], Flow]:
    ranks, chunks = rng.choice(((2, 2), (2, 3), (3, 2)))
    m = rng.choice((1, 2, ranks, 2 * ranks, 2 * ranks + 1))
    kinds = []
    for _ in range(rng.randint(1, 3)):
        kept, again = rng.randint(2, 30), rng.uniform(0.1, 1.0)
        whole = Mode(name="none", kept_bytes=kept, forward_bytes=kept + 2, backward_bytes=kept + 5, later_bytes=kept + 5)
        lean = Mode(name="full", again_s=again, kept_bytes=1, forward_bytes=kept, backward_bytes=kept + 5, later_bytes=kept + 5)
        forward_s, backward_s = rng.uniform(0.5, 2), rng.uniform(0.5, 4)
        kinds.append(Piece(forward_s=forward_s, backward_s=backward_s, rest_bytes=rng.randint(0, 9), modes=(whole, lean)))
    count = rng.randint(ranks * chunks, ranks * chunks + 3)
    return tuple(kinds[k * len(kinds) // count] for k in range(count)), flow("interleaved", ranks, m, chunks)


@pytest.mark.pure
@pytest.mark.parametrize("seed", range(10))
def test_cuts_and_modes_beside_trying_all_of_them(seed: int) -> None:
    """Whatever is found fits and is no faster than the best of all; with memory to spare it is the best; the bound is below the best."""
    rng = random.Random(seed)
    pieces, where = _drawn(rng)

    def step_s(cuts: tuple[int, ...], modes: tuple[int, ...]) -> float:
        bounds = (0, *cuts, len(pieces))
        spans = list(itertools.pairwise(bounds))
        forward = [sum(pieces[k].forward_s for k in range(i, j)) for i, j in spans]
        backward = [sum(pieces[k].backward_s + pieces[k].modes[modes[k]].again_s for k in range(i, j)) for i, j in spans]
        return where.step_time_s(forward, backward, 0.05)

    def bytes_of(cuts: tuple[int, ...], modes: tuple[int, ...]) -> float:
        spans = list(itertools.pairwise((0, *cuts, len(pieces))))
        found = 0.0
        for rank in range(where.ranks):
            own = [spans[s] for s in where.on_rank(rank).stages]
            found = max(found, rank_bytes([pieces[i:j] for i, j in own], [modes[i:j] for i, j in own], where.on_rank(rank)))
        return found

    every = list(itertools.combinations(range(1, len(pieces)), where.stages - 1))
    none = (0,) * len(pieces)

    def found_with(limit: float) -> Partition | None:
        try:
            return partition_of_ranks(pieces, flow=where, limit_bytes=limit, recompute="auto", step_s=step_s, least_ends_s=0.0)
        except Infeasible:
            return None

    ample = found_with(1e9)
    best_s = min(step_s(cuts, none) for cuts in every)
    assert ample is not None and ample.outcome.objective == pytest.approx(best_s) and ample.outcome.bound == pytest.approx(best_s)
    assert found_with(0.0) is None
    limit = rng.uniform(0.5, 1.0) * bytes_of(ample.cuts, none)
    fits = [step_s(c, m) for c in every for m in itertools.product((0, 1), repeat=len(pieces)) if bytes_of(c, m) <= limit]
    tight = found_with(limit)
    assert (tight is None) == (not fits)
    if tight is not None:
        assert bytes_of(tight.cuts, tight.modes) <= limit * (1 + 1e-12)
        assert step_s(tight.cuts, tight.modes) == pytest.approx(tight.outcome.objective)
        assert tight.outcome.bound <= min(fits) * (1 + 1e-9) <= tight.outcome.objective * (1 + 2e-9)
        assert tight.outcome.objective <= 1.1 * min(fits)


@pytest.mark.pure
@pytest.mark.parametrize("seed", range(10))
def test_modes_that_were_looked_for_before_change_no_answer(seed: int) -> None:
    """One table serves other limits, what stages need beside their pieces, and modes that are refused."""
    rng = random.Random(seed)
    pieces, where = _drawn(rng)
    table: KnownOfRanks = {}

    def found(limit: float, known: KnownOfRanks | None, **less: Any) -> object:
        def step_s(cuts: tuple[int, ...], modes: tuple[int, ...]) -> float:
            return where.micro_batches * sum(p.forward_s + p.backward_s + p.modes[m].again_s for p, m in zip(pieces, modes, strict=True))

        try:
            part = partition_of_ranks(
                pieces, flow=where, limit_bytes=limit, recompute="auto", step_s=step_s, least_ends_s=0.0, known=known, **less
            )  # fmt: skip
        except (Infeasible, OutOfBudget) as why:
            return str(why)
        return part and (part.cuts, part.modes, part.outcome.objective, part.outcome.bound, part.outcome.status)

    ample = partition_of_ranks(pieces, flow=where, limit_bytes=1e9, recompute="auto", step_s=lambda c, m: 1.0, least_ends_s=0.0)
    assert ample is not None
    bounds = (0, *ample.cuts, len(pieces))
    places = [place_of(bounds, where, r) for r in range(where.ranks)]
    none = {p: (0,) * sum(j - i for i, j in zip(p[:-1:2], p[1:-1:2], strict=True)) for p in places}
    for limit in (1e9, 60.0, 40.0, 20.0):
        for less in (
            {}, {"over": dict.fromkeys(places, 9.0)}, {"refused": {p: {m} for p, m in none.items()}},
            {"over": {places[0]: 9.0}, "refused": {places[0]: {none[places[0]]}}},
        ):  # fmt: skip
            assert found(limit, table, **less) == found(limit, None, **less)


# ----------------------------------------------------------------------------------------------------------------- plans
@pytest.mark.pure
@pytest.mark.parametrize("cluster", ["cpu", "dgx-a100"])
@pytest.mark.parametrize("m", [2, 4, 8])
def test_what_nobody_pins_is_the_faster_schedule(cluster: str, m: int) -> None:
    captured, _ = captured_of("stack")

    def planned(**pins: Any) -> Plan:
        return make_plan(captured.program, 2, load_cluster(cluster), pins=Pins(pp=2, micro_batches=m, recompute="none", **pins))

    free, one, two = planned(), planned(schedule="1f1b"), planned(schedule="interleaved", virtual_stages=2)
    fastest = min(one.step_time_s, two.step_time_s)
    assert free.step_time_s == pytest.approx(fastest, rel=1e-9) and free.bound_s <= fastest * (1 + 1e-12)
    assert free.schedule == (one if one.step_time_s <= two.step_time_s else two).schedule
    assert planned(virtual_stages=2).step_time_s >= free.step_time_s, "a pin removed is never slower"


@pytest.mark.pure
def test_interleaved_stages_shorten_the_bubble_and_hold_more(tmp_path: Path) -> None:
    captured, _ = captured_of("stack")
    pins: dict[str, Any] = {"pp": 2, "micro_batches": 8, "recompute": "none"}
    one = make_plan(captured.program, 2, load_cluster("dgx-a100"), pins=Pins(schedule="1f1b", **pins))
    two = make_plan(captured.program, 2, load_cluster("dgx-a100"), pins=Pins(virtual_stages=2, **pins))
    assert (one.schedule, one.virtual_stages, two.schedule, two.virtual_stages) == ("1f1b", 1, "interleaved", 2)
    assert len(two.stages) == 4 and two.rank_of == (0, 1, 0, 1)
    assert two.bubble_s < 0.75 * one.bubble_s and two.bound_s <= two.step_time_s < one.step_time_s
    assert [s.micro_batches_in_flight for s in two.stages] == [4, 3, 2, 1]
    assert two.stages[0].memory == two.stages[2].memory, "of the rank that holds both"
    two.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == two
    text = plan_text(two, verbose=True)
    assert "interleaved, 2 stages on each of 2 ranks (rank 0: stages 0 and 2; rank 1: stages 1 and 3)" in text
    emitted = load(emit(captured, two))
    assert len(emitted.STAGES) == 4 and emitted.MANIFEST.places == (0, 1, 0, 1)
    for change, message in (
        ({"virtual_stages": 1}, "4 stages and cuts"),
        ({"schedule": "gpipe"}, "has one stage on each"),
        ({"virtual_stages": 4}, "with 4 stages on each"),
    ):
        damaged = tmp_path / "damaged.json"
        Plan.save(_replaced(two, change), damaged)
        with pytest.raises(PlanError, match=message):
            Plan.load(damaged)


def _replaced(plan: Plan, change: dict[str, Any]) -> Plan:
    import msgspec

    return msgspec.structs.replace(plan, **change)


@pytest.mark.pure
def test_pinned_stages_of_each_rank() -> None:
    program = program_of("stack")
    plan = make_plan(program, 2, load_cluster("dgx-a100"), pins=Pins(virtual_stages=2, pp=2, blocks=(1, 1, 1, 1), micro_batches=4))
    assert [len(s.blocks) for s in plan.stages] == [1, 1, 1, 1]
    with pytest.raises(Infeasible, match="virtual_stages"):
        make_plan(program, 1, load_cluster("dgx-a100"), pins=Pins(virtual_stages=2))
    with pytest.raises(Infeasible, match="places where it can be cut"):
        make_plan(program, 2, load_cluster("dgx-a100"), pins=Pins(virtual_stages=64, pp=2, micro_batches=4))


@pytest.mark.pure
def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(Infeasible, match="2 stages on each pipeline rank"):
        make_plan(program_of("stack"), 2, load_cluster("dgx-a100"), memory_limit_bytes=800 * 2**10, pins=Pins(virtual_stages=2, pp=2))


@pytest.mark.pure
def test_without_a_loss_stages_do_not_interleave() -> None:
    program = dataclasses.replace(program_of("stack"), own_loss=False)
    with pytest.raises(WishError, match="virtual_stages=2: .* returns no loss"):
        for_loss_outside(program, Pins(virtual_stages=2, pp=2))


# ------------------------------------------------------------------------------------------------------------- execution
class Shared(nn.Module):
    """As many layers as pipeline ranks, in turn, twice: stages of one rank share a layer. Tied embeddings, a frozen norm."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(layers))
        self.norm = nn.LayerNorm(256)
        self.norm.weight.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(2):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def _shared(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(16, (12, 6), generator=generator)
    labels = torch.randint(16, (12, 6), generator=generator)
    labels[::3, 1:4] = -100
    return Shared(layers), {"ids": ids, "labels": labels}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "pins",
    [
        {"pp": 2, "dp": 2, "virtual_stages": 2, "micro_batches": 2},
        {"pp": 2, "dp": 2, "virtual_stages": 2, "micro_batches": 3},
        {"pp": 2, "dp": 2, "virtual_stages": 2, "micro_batches": 6, "zero": 2},
        {"pp": 2, "dp": 2, "virtual_stages": 2, "micro_batches": 3, "zero": 3},
        {"pp": 4, "virtual_stages": 2, "micro_batches": 6},
    ],
    ids=str,
)
def test_a_layer_that_stages_of_one_rank_share(pins: dict[str, Any], workers: WorkerPool) -> None:
    """With the embedding tied over ranks, a frozen parameter, an evaluation and a batch of another size."""
    model, inputs = _shared(pins["pp"])
    ref = reference(model, inputs, later=True)
    plan = plan_of(ref.captured, 4, cluster="cpu", pins=pins)
    assert plan.schedule == "interleaved" and len(plan.stages) == 2 * pins["pp"]
    manifest = load(emit(ref.captured, plan, ref.positional)).MANIFEST
    both = [p.name for p in manifest.params if len(p.stages) > len({manifest.places[s] for s in p.stages})]
    assert "zero" in pins or any(name.startswith("layers") for name in both), "a parameter of two stages of one rank"
    report = verify_plan(ref, plan, workers, timeout_s=120)
    found = (report.loss, report.gradient, report.parameter, report.buffer, report.evaluation, report.batches)
    assert all(x is not None and x < TOLERANCE for x in found), (found, report.notes)
    assert report.unequal == () and report.ok


class Rounded(nn.Module):
    """The loss is not differentiated through the encoder, whose results are bytes: its parameters have no gradient, not one of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.Tanh()))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        codes = (self.encoder(x) + 1).mul(100).byte()
        return (self.decoder(codes.to(x.dtype) / 100) - x).square().mean()


@pytest.mark.gloo
@pytest.mark.parametrize("wished", ["1f1b", "interleaved"])
def test_no_stage_ends_where_the_loss_has_no_gradient(wished: str, workers: WorkerPool) -> None:
    """AdamW lets parameters decay whose gradient is zero, and leaves alone those that have none."""
    torch.manual_seed(0)
    pins = {"pp": 2, "dp": 2, "schedule": wished, "micro_batches": 4}
    report = verify(Rounded(), (torch.randn(8, 16),), 4, pins=pins, steps=2, pool=workers)
    assert report.ok and max(report.loss, report.gradient, report.parameter) < TOLERANCE, report
    program = capture(Rounded(), (torch.randn(8, 16),)).program
    first = next(k for k, op in enumerate(program.ops) if op.module.startswith("decoder"))
    assert min(legal_cuts(program).crossing) > first
