"""Selective recompute: what of a block runs again is what is dear to keep and cheap to make; it changes no number."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.compiler import emit, plan_of
from autopar.errors import PlanError
from autopar.ir import Program, Span
from autopar.measure import Pricer
from autopar.measure.launches import AGAIN
from autopar.planner import Plan, lower
from autopar.planner.modes import again_s, issued_s, run_again, spans_at_prices
from autopar.planner.plan import BlockMode
from autopar.planner.price import Ledger
from autopar.run import WorkerPool
from autopar.verify import TOLERANCE, Reference, reference, verify_plan
from cost_models.cluster import load_cluster
from cost_models.recipe import AUTOPAR, Recipe

VOCABULARY, BATCH = 48, 8


class Layer(nn.Module):
    """A layer of a transformer whose attention is spelled out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, width = x_BLD.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.first(x_BLD)).chunk(3, dim=-1))
        scores = q @ k.transpose(2, 3) / (width // self.heads) ** 0.5
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        x_BLD = x_BLD + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x_BLD + self.down(F.gelu(self.up(self.second(x_BLD))))


class Gpt(nn.Module):
    def __init__(self, layers: int = 4, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x_BLD = self.tokens(ids)
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return F.cross_entropy(self.head(self.norm(x_BLD)).flatten(0, 1), labels.flatten(), ignore_index=-100)


@functools.cache
def gpt() -> Reference:
    torch.manual_seed(0)
    model = Gpt()
    ids = torch.randint(VOCABULARY, (BATCH, 8))
    return reference(model, {"ids": ids, "labels": torch.where(torch.rand(ids.shape) < 0.3, -100, ids)}, steps=2)


@functools.cache
def large() -> Program:
    """Two layers of a width and a length at which a GPU computes, with dropout."""
    with torch.device("meta"):
        model = Gpt(layers=2, width=2048, heads=16, dropout=0.1).bfloat16()
    ids = torch.zeros(2, 2048, dtype=torch.long)
    return capture(model, {"ids": ids, "labels": ids}).program


def priced(program: Program) -> Ledger:
    return Ledger(program, Pricer(load_cluster("dgx-a100"), {"pp": 1, "dp": 1, "tp": 1}, None, AUTOPAR))


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2, backend="gloo") as pool:
        yield pool


# ------------------------------------------------------------------------------------------------------------- what is chosen
@pytest.mark.pure
def test_a_host_is_kept_by_what_runs_again() -> None:
    """Where kernels are short, by the checkpoint itself and by what is kept and given back for each operator; where they are long, it is
    ahead of them."""
    program = large()
    cluster = load_cluster("dgx-a100")

    def issued(launch_s: float, *spans: Span, recipe: Recipe = AUTOPAR) -> float:
        slow = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, launch_s=launch_s))
        ledger = Ledger(program, Pricer(slow, {"pp": 1, "dp": 1, "tp": 1}, None, recipe))
        return issued_s(ledger, ledger.liveness, block, spans)

    block, (once, each) = program.blocks[0].spans[0], AGAIN
    ledger = priced(program)
    runs = run_again(ledger, ledger.liveness, block)
    assert issued(1.0, block) == pytest.approx(AUTOPAR.launches * (once + each * len(runs)))
    assert issued(1e-9, block) == issued(1.0) == issued(0.0, block) == 0.0
    assert issued(1.0, block, recipe=dataclasses.replace(AUTOPAR, stops_early=False)) == 0.0


@pytest.mark.pure
def test_what_is_dear_to_keep_and_cheap_to_make_runs_again() -> None:
    program, ledger = large(), priced(large())
    live, block = ledger.liveness, program.blocks[0].spans[0]
    points = spans_at_prices(ledger, live, block)
    assert points, "there is something between nothing and all"
    forward_s = ledger.seconds(range(block.start, block.stop))[0]
    kept = sum(live.kept(block).values())
    said = []
    for spans in points:
        names = {program.ops[k].target for s in spans for k in range(s.start, s.stop)}
        again, less = sum(again_s(ledger, live, s) for s in spans), sum(live.kept(block, spans).values())
        said.append((sorted(names), again / forward_s, less / kept))
    first, last = next(x for x in said if "aten.dropout.default" in x[0]), said[-1]
    assert first[1] < 0.25 and first[2] < 0.6, said
    assert {"aten.softmax.int", "aten.dropout.default", "aten.gelu.default"} <= set(last[0]) and last[1] < 0.7 and last[2] < 0.2, said


@pytest.mark.pure
def test_the_points_are_those_that_trying_all_spans_finds() -> None:
    """At every price between two neighbouring points nothing is cheaper than both."""
    ledger = priced(gpt().captured.program)
    live, block = ledger.liveness, gpt().captured.program.blocks[0].spans[0]
    part = Span(block.start + 10, block.start + 19)  # of so many operators all sets of spans can be tried
    outside = live.kept_outside(part)

    def cost(spans: tuple[Span, ...]) -> tuple[float, int]:
        kept = sum(n for x, n in live.kept(part, spans).items() if x not in outside)
        return sum(again_s(ledger, live, s) for s in spans), kept

    every = [Span(a, b) for a, b in itertools.combinations(range(part.start, part.stop + 1), 2)]
    sets = [(a,) for a in every] + [(a, b) for a in every for b in every if a.stop <= b.start]
    tried = [cost(spans) for spans in sets] + [cost(())]
    points = [cost(()), *map(cost, spans_at_prices(ledger, live, part, points=9)), cost((part,))]
    for (fast_s, much), (slow_s, little) in itertools.pairwise(points):
        assert fast_s <= slow_s and little < much
        price = (slow_s - fast_s) / (much - little)
        assert min(s + price * n for s, n in tried) >= (fast_s + price * much) * (1 - 1e-3)


@pytest.mark.pure
def test_what_stops_early_runs_no_further_than_it_must() -> None:
    """Of a matrix product at the end nothing is needed but its operands."""
    program, ledger = large(), priced(large())
    block = program.blocks[0].spans[0]
    at = next(k for k in range(block.start, block.stop) if program.ops[k].target == "aten.gelu.default")
    activation, product = ledger.seconds((at,))[0], ledger.seconds((at + 1,))[0]
    assert again_s(ledger, ledger.liveness, Span(at, at + 2)) == pytest.approx(activation)
    ledger.stops_early = False
    assert again_s(ledger, ledger.liveness, Span(at, at + 2)) == pytest.approx(activation + product)


# ------------------------------------------------------------------------------------------------------------------ it runs
def planned(gpus: int, **pins: Any) -> Plan:
    return plan_of(gpt().captured, gpus, cluster="dgx-a100", pins=pins)


def check(plan: Plan, pool: WorkerPool) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan and emit(gpt().captured, again) == emit(gpt().captured, plan)
    report = verify_plan(gpt(), again, pool, timeout_s=120)
    assert max(report.loss, report.gradient, report.parameter) < TOLERANCE == 1e-9
    assert report.ok, report.unequal


SPLITS: list[dict[str, Any]] = [
    {"dp": 2}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2, "micro_batches": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "zero": 1},
]  # fmt: skip


@pytest.mark.gloo
@pytest.mark.parametrize("pins", SPLITS, ids=str)
def test_selective_recompute_changes_no_number(pair: WorkerPool, pins: dict[str, Any]) -> None:
    plan = planned(2, recompute="selective", **pins)
    assert [name for stage in plan.stages for name in stage.selective] == [f"layers.{k}" for k in range(4)]
    assert not any(stage.recomputed for stage in plan.stages) and {mode.name for mode in plan.modes} == {"selective"}
    source = emit(gpt().captured, plan)
    assert "recompute(block_0_again_0, w, mesh" in source and "recompute(block_0, " not in source
    check(plan, pair)


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"pp": 2, "micro_batches": 2}], ids=str)
def test_all_modes_stand_beside_each_other(pair: WorkerPool, pins: dict[str, Any]) -> None:
    """One layer keeps all, one a part, one nothing, and one a part of it twice."""
    plan = planned(2, recompute="selective", **pins)
    (first, behind), length = plan.modes[0].spans[0], 12
    modes = [
        plan.modes[0], BlockMode(name="full", block=0, spans=[(0, _length(plan))]),
        BlockMode(name="selective", block=0, spans=[(1, 4), (length, length + 2)]),
    ]  # fmt: skip
    assert first < behind
    mixed = msgspec.structs.replace(plan, modes=modes, recompute=[(0, 0, 1), (0, 1, 0), (0, 3, 2)])
    source = emit(gpt().captured, mixed)
    assert "recompute(block_0, " in source and "_again_1, w, mesh" in source
    check(mixed, pair)


def _length(plan: Plan) -> int:
    (call, *_) = lower(gpt().captured.program, plan).stages[0].calls
    return len(call.span)


@pytest.mark.pure
@pytest.mark.parametrize("spans", [[(2, 1)], [], [(0, 3), (2, 5)], [(0, 10**6)]])
def test_spans_that_a_block_does_not_have_are_refused(spans: list[tuple[int, int]]) -> None:
    plan = planned(2, recompute="selective", dp=2)
    wrong = msgspec.structs.replace(plan, modes=[BlockMode(name="selective", block=0, spans=spans)])
    with pytest.raises(PlanError):
        emit(gpt().captured, Plan.from_json(wrong.to_json()))


@pytest.mark.gloo
def test_dropout_that_runs_again_has_the_same_mask() -> None:
    """With the same seed the gradients are those of the module that keeps all."""
    found = []
    ids = torch.randint(VOCABULARY, (BATCH, 8), generator=torch.Generator().manual_seed(1))
    for recompute in ("none", "selective"):
        torch.manual_seed(0)
        model = Gpt(dropout=0.5)
        module = autopar.compile(
            model, gpus=1, example_inputs={"ids": ids, "labels": ids}, cluster="dgx-a100", pins={"recompute": recompute, "micro_batches": 2}
        )
        torch.manual_seed(5)
        loss = module(ids=ids, labels=ids)
        loss.backward()
        found.append((loss.item(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}))
    (loss, grads), (again_loss, again_grads) = found
    assert loss == pytest.approx(again_loss, rel=1e-6) and grads.keys() == again_grads.keys() and grads
    for name, grad in grads.items():
        torch.testing.assert_close(again_grads[name], grad, rtol=1e-5, atol=1e-7)
