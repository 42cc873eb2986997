"""Bounds hold on every GPU, relaxing never hurts, equal layers cost nothing more, and the clock has no say."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from soundness_harness import op_db, op_db_cases
from torch import nn

from autopar.capture import capture
from autopar.catalog import OpView, localized, strategies_of
from autopar.errors import Infeasible
from autopar.ir import I, Op, Program, Strategy, call_text, refs
from autopar.measure import Pricer, count
from autopar.planner import Pins, lower, make_plan
from autopar.planner.bounds import least_op_s
from autopar.planner.candidate import Draft
from autopar.planner.choices import choices
from autopar.planner.estimate import Estimator
from autopar.planner.fold import NotAlike, fold, unfold
from autopar.planner.search import Search
from autopar.planner.shard import Assignment, shard
from autopar.planner.solver import solve
from autopar.planner.space import Choice
from cost_models.cluster import Cluster, list_gpus, load_cluster, load_gpu
from cost_models.recipe import AUTOPAR, WHOLE, Recipe
from tests.planner_programs import Tied, _tokens, program_of

pytestmark = pytest.mark.pure

MIB = 2**20
RECIPES = (
    AUTOPAR, Recipe(fuses=True), Recipe(attention_speed=0.5),
    Recipe(regathers=True, beside_products=("all_gather", "all_reduce", "reduce_scatter")),
)  # fmt: skip


def cluster(gpu: str = "a100-80gb", name: str = "dgx-a100", **changes: float) -> Cluster:
    """A cluster of any GPU of the catalogue, which takes no memory before the first tensor."""
    return dataclasses.replace(load_cluster(name), gpu=dataclasses.replace(load_gpu(gpu), context_bytes=0, **changes))


def searched(program: Program, gpus: int, machine: Cluster, limit: int = 2**40, recipe: Recipe = AUTOPAR, **pins: Any) -> Search:
    return Search(
        program=program, gpus=gpus, cluster=machine, memory_limit_bytes=limit, optimizer="adamw", precision="fp32", pins=Pins(**pins),
        recipe=recipe,
    )  # fmt: skip


def with_exchange_s(search: Search, choice: Choice, estimator: Estimator) -> float:
    alike = search.known.used_alike(choice.mesh, choice.micro_batches, search.batch_size)
    assert alike is not None
    return search._least.with_exchange_s(choice, search.batch_size, estimator.exchange, alike)


# -------------------------------------------------------------------------------------------------------------------- bounds
@pytest.mark.parametrize("gpu", list_gpus())
def test_no_price_is_below_the_bound_that_prunes_it(gpu: str) -> None:
    """Every choice of small models, convolutions in float32 among them, at the price of its own stages."""
    rng = random.Random(gpu)
    compared = 0
    for name in ("normed", rng.choice(("mlp", "attention", "stack", "balanced", "wide"))):
        search = searched(program_of(name), 4, cluster(gpu), recipe=rng.choice(RECIPES))
        every = list(search.space.choices())
        for choice in rng.sample(every, min(18, len(every))):
            rank = search.known.rank(choice.mesh, choice.micro_batches, search.batch_size, search.recipe)
            estimator = search.estimator(rank, choice)
            draft = None if isinstance(estimator, str) else search.draft(choice, estimator)
            if isinstance(draft, Draft) and not isinstance(estimator, str):
                least = search._least.step_s(choice, search.batch_size)
                assert 0 < least <= estimator.least_s() * (1 + 1e-9), (name, choice)
                assert least <= with_exchange_s(search, choice, estimator) <= draft.times.step_s * (1 + 1e-9), (name, choice)
                assert estimator.least_s() <= draft.bound_s * (1 + 1e-9) and draft.bound_s <= draft.times.step_s
                compared += 1
    assert compared > 3


@pytest.mark.parametrize(
    ("name", "machine"),
    [*((name, "dgx-a100") for name in ("mlp", "stack", "adapted", "tied", "normed")),
     *((name, "cpu") for name in ("attention", "deep", "balanced"))],
)  # fmt: skip
def test_no_step_is_faster_than_what_its_ranks_must_exchange(name: str, machine: str) -> None:
    """On links so slow that exchange is what takes time: within a node and over nodes, once a step and in every pass."""
    rng, compared, tighter, rests = random.Random(name), 0, 0, set[str]()
    gpus, where = (16, cluster()) if machine == "dgx-a100" else (4, cluster("cpu", "cpu"))
    slow = [dataclasses.replace(link, bandwidth_bytes_per_s=1e4) for link in (where.intra, where.inter)]
    where = dataclasses.replace(where, intra=slow[0], inter=slow[1])
    mixed = Recipe(gradient_itemsize=4, reduced_itemsize=2, master_itemsize=4, state_itemsize=4)
    apart = Recipe(overlaps_reduction=False, unit_bytes=1 << 12, bucket_bytes=1 << 12, beside_products=("all_reduce",))
    at_once = Recipe(sums_parts_whole=True, gather_bytes=WHOLE, overlaps_gathers=False)
    for recipe in (AUTOPAR, Recipe(overlaps_gathers=False), apart, mixed, at_once):
        search = searched(program_of(name), gpus, where, recipe=recipe)
        every = [c for c in search.space.choices() if c.mesh.over("batch") > 1]
        for choice in rng.sample(every, min(20 if name in ("stack", "deep", "adapted") else 30, len(every))):
            rank = search.known.rank(choice.mesh, choice.micro_batches, search.batch_size, search.recipe)
            estimator = search.estimator(rank, choice)
            draft = None if isinstance(estimator, str) else search.draft(choice, estimator)
            if isinstance(draft, Draft) and not isinstance(estimator, str):
                alone, sent = search._least.step_s(choice, search.batch_size), with_exchange_s(search, choice, estimator)
                assert alone <= sent <= draft.times.step_s * (1 + 1e-9), (choice, recipe)
                compared, tighter = compared + 1, tighter + (sent > 1.5 * alone)
                rests.add(choice.rest.name)
    assert compared > 30 and tighter > compared // 4 and len(rests) > 3, (compared, tighter, rests)


class Unused(nn.Module):
    """A layer that the loss does not depend on, and one that is used without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.beside = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 32)
        self.large = nn.Linear(32, 1 << 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        _ = self.large(x)
        with torch.no_grad():
            beside = self.beside(x)
        return self.leave(x + beside).square().mean()


def test_what_nothing_uses_is_in_no_bound() -> None:
    """It has no gradient, so that it is neither sent nor updated."""
    program, compared = capture(Unused(), (torch.randn(16, 32),)).program, 0
    search = searched(program, 4, cluster("cpu", "cpu"))
    for choice in search.space.choices():
        rank = search.known.rank(choice.mesh, choice.micro_batches, search.batch_size, search.recipe)
        estimator = search.estimator(rank, choice)
        draft = None if isinstance(estimator, str) else search.draft(choice, estimator)
        if isinstance(draft, Draft) and not isinstance(estimator, str):
            alone, sent = search._least.step_s(choice, search.batch_size), with_exchange_s(search, choice, estimator)
            assert alone <= sent <= draft.times.step_s * (1 + 1e-9), choice
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("name", ["mlp", "attention", "stack", "normed", "balanced", "tied", "skips"])
@pytest.mark.parametrize("machine", ["a100-80gb", "v100-32gb", "rtx4090", "cpu"])
def test_parts_of_an_operator_never_cost_less_than_its_bound(name: str, machine: str) -> None:
    """Every strategy of every operator: n times the price of a part is not below the bound of the whole."""
    program, n, where = program_of(name), 2, cluster(machine, "cpu" if machine == "cpu" else "dgx-a100")
    pricer = Pricer(where, {"pp": 1, "dp": 1, "tp": n})
    found = choices(program, n, {})
    seen = 0
    for op in program.ops:
        least = least_op_s(op, program, where, AUTOPAR)
        forward_s = max(least.flops_s, least.moved_s + least.whole_s)
        backward_s = max(least.backward_flops_s, least.backward_moved_s + least.backward_whole_s)
        group = found.groups.get(op.name)
        for s in group.strategies if group is not None else ():
            local = dict(zip(refs(op), s.inputs, strict=True))
            types = dict(program.types)
            outputs = [o for o in op.outputs if o is not None]
            for v, layout in (*local.items(), *zip(outputs, s.outputs, strict=True)):
                types[v] = dataclasses.replace(types[v], shape=layout.local_shape(types[v].shape, n))
            if s.local is not None or count(op, tuple(program.types[r] for r in refs(op)), ()).op_class == "view":
                continue
            if op.target in ("aten.reshape.default", "aten.arange.default", "aten.full.default", "aten.expand.default"):
                continue  # their arguments state sizes
            try:
                part = pricer.op(op, program.replace(types=types))
            except RuntimeError:
                continue  # arguments that state sizes, which sharding rewrites
            launch_s = where.gpu.launch_s if where.gpu.host else 0.0
            assert n * (part.forward_s - launch_s) >= forward_s * (1 - 1e-9), (op, str(s))
            if any(program.types[o].grad for o in outputs) and part.backward_s:
                assert n * (part.backward_s - launch_s) >= backward_s * (1 - 1e-9), (op, str(s))
            seen += 1
    assert seen > 10


@pytest.mark.filterwarnings("ignore")  # op_db calls deprecated operators too
def test_no_operator_of_op_db_costs_less_than_its_bound() -> None:
    """In float32, on every GPU of the catalogue: whole, and n times the parts of each strategy. Every operator of the database."""
    machines = [cluster(gpu, "cpu" if load_gpu(gpu).host else "dgx-a100") for gpu in list_gpus()]
    n, priced, operators, below = 2, 0, set(), list[str]()
    for info in op_db(divisible=True):
        for case in itertools.islice(op_db_cases(info, limit=1), 1):
            view, op = case.view(n), case.op
            if "float64" in repr(op):
                continue
            types = {
                v: dataclasses.replace(t, dtype=torch.float32 if t.dtype == torch.float64 else t.dtype)
                for v, t in zip((*refs(op), *(o for o in op.outputs if o)), (*view.ins, *view.outs), strict=True)
            }
            program = Program(name="one", inputs=(), params=(), buffers=(), ops=(op,), loss=op.name, types=types)
            alone = dataclasses.replace(view, ins=tuple(types[r] for r in refs(op)), outs=tuple(types[o] for o in op.outputs if o))
            parts = [(1, op, program), *((n, *part) for s in strategies_of(alone) if s.splits_work for part in _part(program, alone, s))]
            for where in machines:
                pricer, least = Pricer(where, {"pp": 1, "dp": 1, "tp": n}), least_op_s(op, program, where, AUTOPAR)
                forward_s = max(least.flops_s, least.moved_s + least.whole_s)
                backward_s = max(least.backward_flops_s, least.backward_moved_s + least.backward_whole_s)
                launch_s = where.gpu.launch_s if where.gpu.host else 0.0
                for times, local, of in parts:
                    cost, what = pricer.op(local, of), f"{where.gpu.name}: {times} x {call_text(local)} of {call_text(op)}"
                    forward, backward = (max(0.0, times * (x - launch_s)) for x in (cost.forward_s, cost.backward_s))
                    if forward < forward_s * (1 - 1e-9) or (cost.backward_s and backward < backward_s * (1 - 1e-9)):
                        below.append(f"{what}: {forward}, {backward} s, and the bound is {forward_s}, {backward_s} s")
                    if not where.gpu.host and sum(cost.host_s) < least.launches_s * (1 - 1e-9):
                        below.append(f"{what}: launched in {cost.host_s} s, and the bound is {least.launches_s} s")
                    priced += 1
            operators.add(op.target)
    assert not below, "\n".join(below[:10])
    assert len(operators) > 300 and priced > 500 * len(machines), (len(operators), priced)


def _part(program: Program, view: OpView, s: Strategy) -> Iterator[tuple[Op, Program]]:
    """What one of the ranks runs under a strategy, where that is the operator itself."""
    if s.local is None:
        try:
            (op,) = localized(view, s, "tp")
        except ValueError:  # arguments that no part has
            return
        values = (*refs(view.op), *(o for o in view.op.outputs if o))
        cut = {
            v: dataclasses.replace(program.types[v], shape=x.local_shape(program.types[v].shape, view.n))
            for v, x in zip(values, (*s.inputs, *s.outputs), strict=True)
        }
        yield op, program.replace(types={**program.types, **cut}, ops=(op,))


@pytest.mark.parametrize("name", ["mlp", "attention", "stack", "deep", "adapted", "tied", "balanced"])
def test_no_rank_needs_less_than_the_bound_on_its_memory(name: str) -> None:
    """Every choice of small models: what rests, against the account of the leanest stages; with what the data axis leaves whole too."""
    rng = random.Random(name)
    recipes = (AUTOPAR, Recipe(gradient_itemsize=4, master_itemsize=4, state_itemsize=4), Recipe(gradient_itemsize=4, accumulates=True))
    compared = 0
    for recipe in recipes:
        search = searched(program_of(name), 8, cluster(), recipe=recipe)
        every = list(search.space.choices())
        for choice in rng.sample(every, min(40, len(every))):
            rank = search.known.rank(choice.mesh, choice.micro_batches, search.batch_size, search.recipe, choice.form)
            estimator = search.estimator(rank, choice)
            if isinstance(estimator, str):
                continue
            data = estimator.rank.data
            alike = frozenset(p.value for p in program_of(name).params if data is not None and data.leaves.get(p.value) == I)
            for known in (frozenset[str](), alike):
                assert 0 < search._least.bytes(choice, known) <= estimator.least_bytes * (1 + 1e-9), (choice, known)
            compared += 1
            if compared % 4 == 0 and (found := search.exact(choice)) is not None:
                needs, batch = max(s.memory.upper_bytes for s in found.stages), search._batch_bytes(choice.mesh)
                nbytes = search._least.bytes(choice, alike)
                assert search._least.upper_bytes(nbytes, batch) <= needs * (1 + 1e-9)
                assert search._least.room_bytes(search._least.upper_bytes(nbytes, batch), batch) == pytest.approx(nbytes, rel=1e-6)
    assert compared > 20


@pytest.mark.parametrize("limit", [4, 16, 64])
def test_what_cannot_fit_is_left_out_and_nothing_else(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the same as that of a search that prices every choice; where there is none, both say why."""
    program = program_of("deep")

    def answer() -> tuple[float, str]:
        try:
            return searched(program, 8, cluster(), limit * MIB).best().objective_s, ""
        except Infeasible as e:
            return float("inf"), str(e)

    found = answer()
    monkeypatch.setattr(Search, "could_fit", lambda *_: True)
    every = answer()
    assert found[0] == every[0]
    if found[1]:
        assert "short" in found[1] and found[1].splitlines()[-2:] == every[1].splitlines()[-2:]


def test_the_bound_of_a_plan_is_below_every_plan_of_the_space() -> None:
    program = program_of("pair")
    plan = make_plan(program, 4, cluster())
    times = []
    for pp, dp, tp in itertools.product((1, 2, 4), repeat=3):
        for zero in (0, 1, 2, 3) if dp > 1 else (0,):
            if pp * dp * tp == 4:
                try:
                    times.append(make_plan(program, 4, cluster(), pins=Pins(pp=pp, dp=dp, tp=tp, zero=zero)).objective_s)
                except Infeasible:
                    continue
    assert times and plan.bound_s <= min(times) * (1 + 1e-9) and plan.objective_s <= min(times) * (1 + 1e-9)
    assert plan.gap == pytest.approx(1 - plan.bound_s / plan.objective_s)
    assert plan.searched["choices"] >= plan.searched["explored"] > 0


def test_a_search_that_is_stopped_says_so_and_its_bound_counts_what_it_left() -> None:
    whole, cut = (searched(program_of("deep"), 4, cluster(), 12 * MIB) for _ in range(2))  # the best is among what is left
    cut.budget = 1
    plans = [s.best() for s in (whole, cut)]
    assert not any("stopped" in note for note in plans[0].notes)
    assert any("stopped after its budget of 1 choices" in note for note in plans[1].notes)
    assert plans[1].bound_s <= plans[0].objective_s <= plans[1].objective_s and plans[1].searched["unexplored"] > 0
    assert plans[1].gap > plans[0].gap


# ------------------------------------------------------------------------------------------------------------------ monotone
def test_what_is_relaxed_is_never_slower() -> None:
    """A pin removed, more memory, a faster link: on a model whose memory is tight."""
    program = program_of("deep")

    def step_s(limit: int, machine: Cluster | None = None, **pins: Any) -> float:
        try:
            return make_plan(program, 4, machine or cluster(), memory_limit_bytes=limit * MIB, pins=Pins(**pins)).objective_s
        except Infeasible:
            return float("inf")

    pinned: list[dict[str, Any]] = [
        {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "sequence_parallel": False}, {"pp": 2}, {"pp": 2, "recompute": "full"},
        {"dp": 2, "zero": 3}, {"tp": 4, "micro_batches": 2}, {"tp": 4, "micro_batches": 2, "sequence_parallel": True},
    ]  # fmt: skip
    for limit in (400, 30, 16):
        free = step_s(limit)
        for pins in pinned:
            some = step_s(limit, **pins)
            assert free <= some * (1 + 1e-9), (limit, pins)
            for name in pins if len(pins) > 1 else ():
                fewer = {k: v for k, v in pins.items() if k != name}
                assert step_s(limit, **fewer) <= some * 1.01, (limit, pins, name)  # the axis' program is solved to half a percent
    intra = load_cluster("dgx-a100").intra
    fast = dataclasses.replace(cluster(), intra=dataclasses.replace(intra, bandwidth_bytes_per_s=2 * intra.bandwidth_bytes_per_s))
    assert step_s(400, fast) <= step_s(400) * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------------------- equal layers
@functools.cache
def layers(count: int) -> Program:
    return capture(Tied(vocabulary=64, width=64, layers=count), _tokens(4, 16, 64)).program


def test_equal_layers_are_folded_and_unfolded() -> None:
    for count_ in (4, 9):
        whole = layers(count_)
        few = fold(whole)
        assert [x.times for x in few.repeats] == [count_ - 2] and len(few.ops) == len(fold(layers(4)).ops)
        problem = choices(few, 2, {})
        groups = {k: g for k, g in problem.groups.items() if g.op is not None}
        assert sum(g.times for g in groups.values()) == len(whole.ops)
        known = choices(whole, 2, {})
        assert {k: g.times for k, g in known.groups.items()} == {k: g.times for k, g in problem.groups.items()}
        assert {(e.source, e.consumer, e.operand, e.count) for e in known.edges} >= {
            (e.source, e.consumer, e.operand, e.count) for e in problem.edges if e.source.group in groups
        }
        rng = random.Random(count_)
        drawn = {k: rng.choice(g.strategies) for k, g in problem.groups.items()}
        ops = {m: drawn[k] for k, g in problem.groups.items() if g.op is not None for m in g.members}
        leaves = {m: drawn[k].outputs[0] for k, g in problem.groups.items() if g.op is None for m in g.members}
        every = unfold(Assignment(axis="tp", n=2, ops=ops, leaves=leaves), few, whole)
        assert {op.name for op in whole.ops} == set(every.ops) and {x.value for x in whole.leaves} == set(every.leaves)
        for k, g in known.groups.items():
            for m in g.members:
                assert (every.ops[m] if g.op is not None else every.leaves[m]) == (drawn[k] if g.op is not None else drawn[k].outputs[0])
    with pytest.raises(NotAlike):
        unfold(Assignment(axis="tp", n=2, ops=ops, leaves=leaves), few, layers(4))


class Residual(nn.Module):
    """With batch norm, which counts the batches that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)


class Normed(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual() for _ in range(layers)))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), y)


@functools.cache
def normed(count: int) -> Program:
    return capture(Normed(count), (torch.randn(4, 4, 8, 8), torch.arange(4) % 3)).program


def test_layers_that_change_buffers_of_their_own_are_folded() -> None:
    whole = normed(6)
    few = fold(whole)
    assert [x.times for x in few.repeats] == [3]
    assert len(few.mutations) == 4 < len(whole.mutations) == 6  # the first has no gradient to give
    assert {b for b, _ in few.mutations} <= {b.value for b in few.buffers}
    problem = choices(few, 2, {})
    ops = {m: g.strategies[0] for g in problem.groups.values() if g.op is not None for m in g.members}
    leaves = {m: g.strategies[0].outputs[0] for g in problem.groups.values() if g.op is None for m in g.members}
    every = unfold(Assignment(axis="tp", n=2, ops=ops, leaves=leaves), few, whole)
    assert {op.name for op in whole.ops} == set(every.ops) and {x.value for x in whole.leaves} == set(every.leaves)


def test_a_layer_whose_buffer_does_not_change_is_another_layer() -> None:
    whole = normed(6)
    odd = whole.replace(mutations=(*whole.mutations[:3], *whole.mutations[4:]))
    assert fold(odd) is odd
    buffers, values = zip(*whole.mutations, strict=True)
    crossed = whole.replace(mutations=tuple(zip((*buffers[:2], buffers[3], buffers[2], *buffers[4:]), values, strict=True)))
    assert fold(crossed) is crossed


@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 1}], ids=str)
def test_a_folded_program_with_batch_norm_has_the_plan_of_the_whole_one(pins: dict[str, Any]) -> None:
    folded, whole = searched(normed(6), 2, cluster(), **pins), searched(normed(6), 2, cluster(), **pins)
    whole.known.folds = False
    plans = [s.best() for s in (folded, whole)]
    assert len(folded.known.folded.ops) < len(whole.known.folded.ops)
    assert plans[0].stages == plans[1].stages and plans[0].cuts == plans[1].cuts
    assert plans[0].objective_s == plans[1].objective_s and plans[0].bound_s == pytest.approx(plans[1].bound_s)
    assert len(lower(normed(6), plans[0]).stages) == plans[0].mesh["pp"]


@pytest.mark.parametrize("name", ["skips", "normed", "pair", "mlp"])
def test_what_is_no_run_of_equal_layers_stays(name: str) -> None:
    assert fold(program_of(name)) is program_of(name)


@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2, "micro_batches": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_a_folded_program_has_the_plan_of_the_whole_one(pins: dict[str, Any]) -> None:
    folded, whole = searched(layers(9), 2, cluster(), **pins), searched(layers(9), 2, cluster(), **pins)
    whole.known.folds = False
    plans = [s.best() for s in (folded, whole)]
    assert len(folded.known.folded.ops) < len(whole.known.folded.ops)
    assert plans[0].cuts == plans[1].cuts and plans[0].stages == plans[1].stages and plans[0].zero_dims == plans[1].zero_dims
    assert plans[0].axes.get("tp") == plans[1].axes.get("tp"), "on the data axis two forms of the loss cost the same"
    assert plans[0].objective_s == plans[1].objective_s
    assert len(lower(layers(9), plans[0]).stages) == plans[0].mesh["pp"] * plans[0].virtual_stages
    data = folded.known.on_data_axis(2)[1]
    if data is not None:
        assert shard(layers(9), unfold(data, folded.known.folded, layers(9))).blocks


# ------------------------------------------------------------------------------------------------------------- deterministic
PLAN = """
import sys
from autopar.planner import make_plan
from cost_models.cluster import load_cluster
from tests.planner_programs import program_of
for name in ("stack", "attention"):
    sys.stdout.buffer.write(make_plan(program_of(name), 4, load_cluster("dgx-a100")).to_json())
"""


def test_the_same_question_has_the_same_bytes() -> None:
    """In processes that order sets differently."""
    found = [
        subprocess.run([sys.executable, "-c", PLAN], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] and len(found[0]) > 1000


def test_a_slow_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_plan(program_of("deep"), 4, cluster()).to_json()
    ticks = itertools.count(0.0, 1e4)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert make_plan(program_of("deep"), 4, cluster()).to_json() == expected
    limited = make_plan(program_of("deep"), 4, cluster(), memory_limit_bytes=16 * MIB, pins=Pins(pp=2), time_limit_s=1.0)
    assert any("stopped after 1 s" in note for note in limited.notes) and limited.bound_s <= limited.objective_s
    assert solve.__kwdefaults__ == {"gap": 1e-3, "nodes": 500}, "budgets are no seconds"
