"""Recipes of training software: exact terms of memory and time on a tiny program; ranks that equal micro-batches share."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from autopar.capture import capture
from autopar.ir import Program, refs
from autopar.measure import Pricer
from autopar.measure.costs import GATHER
from autopar.planner import Pins, lower, make_plan
from autopar.planner.candidate import Candidate, Draft
from autopar.planner.price import Ledger
from autopar.planner.search import Search
from autopar.planner.space import Mesh
from cost_models.cluster import Cluster, load_cluster
from cost_models.recipe import AUTOPAR, MIB, Recipe
from cost_models.uncertainty import least_upper_bytes
from tests.planner_programs import Mlp, Tied, program_of

pytestmark = pytest.mark.pure

WIDTH, BATCH, BYTES = 8, 8, 2
NUMBERS = 2 * 4 * WIDTH * WIDTH + 4 * WIDTH + WIDTH  # of an Mlp's parameters, all of which divide by 4
INPUTS = 2 * BATCH * WIDTH * BYTES  # bytes of x and y
MIXED = Recipe(gradient_itemsize=4, state_itemsize=4, master_itemsize=4, accumulates=True)


@functools.cache
def half() -> Program:
    """An Mlp in bfloat16."""
    inputs = {"x": torch.ones(BATCH, WIDTH, dtype=torch.bfloat16), "y": torch.zeros(BATCH, WIDTH, dtype=torch.bfloat16)}
    return capture(Mlp(WIDTH).bfloat16(), inputs).program


def cluster(**gpu: float) -> Cluster:
    known = load_cluster("dgx-a100")
    return dataclasses.replace(known, gpu=dataclasses.replace(known.gpu, context_bytes=0, **gpu))


def searched(program: Program, gpus: int, recipe: Recipe = AUTOPAR, **pins: Any) -> Search:
    return Search(
        program=program, gpus=gpus, cluster=cluster(), memory_limit_bytes=2**40, optimizer="adamw", precision="fp32", pins=Pins(**pins),
        recipe=recipe,
    )  # fmt: skip


def priced(recipe: Recipe = AUTOPAR, program: Program | None = None, **pins: Any) -> Candidate:
    """The one candidate that has these pins."""
    pins = {"dp": 1, "tp": 1, "pp": 1, "micro_batches": 1, "zero": 0, "recompute": "none", "schedule": "1f1b"} | pins
    gpus = pins["dp"] * pins["tp"] * pins["pp"]
    (found,) = searched(program or half(), gpus, recipe, **pins).candidates()
    return found


def changed(recipe: Recipe = AUTOPAR, **changes: Any) -> Recipe:
    return dataclasses.replace(recipe, **changes)


# ------------------------------------------------------------------------------------------------------------------ memory
@pytest.mark.parametrize(
    "recipe,per_number",
    [
        (Recipe(accumulates=True), BYTES),
        (Recipe(accumulates=True, gradient_itemsize=4), 4),
        (Recipe(accumulates=True, gradient_itemsize=4, gradient_copies=1), 4 + BYTES),
    ],
)
def test_accumulated_gradients(recipe: Recipe, per_number: int) -> None:
    for pins in ({}, {"micro_batches": 4}, {"dp": 2}, {"dp": 2, "zero": 1}):
        assert priced(recipe, **pins).stages[0].memory.gradients_bytes == per_number * NUMBERS
    assert priced(recipe, dp=2, zero=3).stages[0].memory.gradients_bytes == per_number * NUMBERS // 2


@pytest.mark.parametrize("states,master", [(None, 0), (4, 0), (None, 4), (4, 4), (1, 4)])
def test_optimizer_states(states: int | None, master: int) -> None:
    recipe = Recipe(state_itemsize=states, master_itemsize=master)
    whole = (2 * (states or BYTES) + master) * NUMBERS
    assert priced(recipe).stages[0].memory.optimizer_states_bytes == whole
    assert priced(recipe, dp=4).stages[0].memory.optimizer_states_bytes == whole
    for zero in (1, 3):
        assert priced(recipe, dp=4, zero=zero).stages[0].memory.optimizer_states_bytes == whole // 4


def test_parameters_that_rest_in_parts() -> None:
    """ZeRO-1 with a copy of the optimizer's own holds the whole parameter, of which no part is held twice; without one its part rests
    beside what the step gathers. ZeRO-3 holds a part of it."""
    whole = BYTES * NUMBERS
    assert priced(MIXED).stages[0].memory.parameters_bytes == whole
    assert priced(MIXED, dp=2, zero=1).stages[0].memory.parameters_bytes == whole
    # which moment is the fullest decides whether what was gathered is there: with an update without temporaries it is the forward's
    plain = Recipe(optimizer_passes=1.0)
    assert priced(plain, dp=2, zero=1).stages[0].memory.parameters_bytes == whole // 2 + whole
    assert priced(MIXED, dp=2, zero=3).stages[0].memory.parameters_bytes == whole // 2


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_rank_is_given_its_batch_or_all_of_it(dp: int) -> None:
    given = {local: priced(changed(MIXED, local_batches=local), dp=dp).stages[0].memory.batch_bytes for local in (False, True)}
    assert given == {False: INPUTS, True: INPUTS // dp}


@pytest.mark.parametrize("slack", [0.0, 0.03, 0.5])
def test_slack_is_a_share_of_what_is_allocated(slack: float) -> None:
    memory = priced(changed(MIXED, allocator_slack=slack)).stages[0].memory
    allocated = memory.total_bytes - memory.allocator_slack_bytes - memory.framework_context_bytes
    assert memory.allocator_slack_bytes == math.ceil(allocated * slack)


def test_an_optimizer_in_one_kernel_needs_no_temporaries() -> None:
    fused, foreach = (priced(Recipe(optimizer_passes=passes)) for passes in (1.0, 3.0))
    assert fused.stages[0].memory.total_bytes <= foreach.stages[0].memory.total_bytes
    assert fused.optimizer_s < foreach.optimizer_s


def test_buckets_hold_what_is_reduced_together() -> None:
    sizes = [64, 512, 2048, MIB]
    for zero in (0, 1):
        held = [priced(Recipe(bucket_bytes=n, optimizer_passes=1.0), dp=2, zero=zero).stages[0].memory for n in sizes]
        assert all(memory.communication_buffers_bytes <= BYTES * NUMBERS for memory in held)
    none = priced(Recipe(overlaps_reduction=False), dp=2)
    assert none.stages[0].memory.communication_buffers_bytes == 0
    rest = none.estimator.batch_bytes + sum(program_of("mlp").types[b.value].nbytes for b in program_of("mlp").buffers)
    room = none.estimator.room_bytes(2**30) + rest
    context, more = none.estimator.cluster.gpu.context_bytes, none.estimator.more
    assert least_upper_bytes(room, context, AUTOPAR.allocator_slack, more) == pytest.approx(2**30), "at the upper end of its interval"


# -------------------------------------------------------------------------------------------------------------------- time
@pytest.mark.parametrize("bucket", [100, 500, MIB])
@pytest.mark.parametrize("item", [None, 4])
def test_reduction_after_backward_is_the_sum_of_its_buckets(bucket: int, item: int | None) -> None:
    recipe = Recipe(bucket_bytes=bucket, gradient_itemsize=item, overlaps_reduction=False)
    pricer = Pricer(cluster(), {"pp": 1, "dp": 4, "tp": 1})
    full, rest = divmod(NUMBERS * (item or BYTES), bucket)
    expected = full * pricer.collective_s("all_reduce", bucket, "dp") + pricer.collective_s("all_reduce", rest, "dp")
    after = priced(recipe, dp=4)
    assert after.gradient_sync_s == pytest.approx(expected, rel=1e-12)
    during = priced(changed(recipe, overlaps_reduction=True), dp=4)
    last = pricer.collective_s("all_reduce", rest or bucket, "dp")
    assert last * (1 - 1e-9) <= during.gradient_sync_s < after.gradient_sync_s * (1 + 1e-9)
    assert during.step_time_s - during.gradient_sync_s == pytest.approx(after.step_time_s - after.gradient_sync_s, rel=1e-12)


def test_smaller_buckets_and_wider_gradients_take_longer() -> None:
    times = [priced(Recipe(bucket_bytes=n, overlaps_reduction=False), dp=2).gradient_sync_s for n in (64, 256, 1024, MIB)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    wider = [priced(Recipe(gradient_itemsize=n, overlaps_reduction=False, bucket_bytes=MIB), dp=2).gradient_sync_s for n in (2, 4, 8)]
    assert wider == sorted(wider)
    masters = [priced(Recipe(master_itemsize=n), dp=1).optimizer_s for n in (0, 4, 8)]
    assert masters == sorted(masters)


def test_what_is_gathered_again_is_not_kept_and_takes_its_time_twice() -> None:
    program, pins = program_of("deep"), {"tp": 2, "sequence_parallel": True}
    kept, again = (priced(Recipe(regathers=regathers), program, **pins) for regathers in (False, True))
    assert kept.rank.program == again.rank.program
    assert again.stages[0].memory.saved_activations_bytes < kept.stages[0].memory.saved_activations_bytes
    types, params = kept.rank.program.types, {p.value for p in kept.rank.program.params}
    gathers = [k for k, op in enumerate(kept.rank.program.ops) if op.target == GATHER and types[refs(op)[0]].grad]
    assert any(refs(kept.rank.program.ops[k])[0] not in params for k in gathers)
    for k, (a, b) in enumerate(zip(kept.rank.ledger.costs, again.rank.ledger.costs, strict=True)):
        assert b.forward_s == a.forward_s
        assert b.backward_s == pytest.approx(a.backward_s + (a.forward_s if k in gathers else 0.0), rel=1e-12)
    everything = range(len(kept.rank.program.ops))
    saved = [set().union(*({name for name, _ in c.rank.ledger.saved_by[k]} for k in everything)) for c in (kept, again)]
    made = {kept.rank.program.ops[k].name for k in gathers}
    assert saved[0] & made and not saved[1] & made


def test_gathering_parameters_before_the_step_is_exposed() -> None:
    hidden, exposed = (priced(Recipe(overlaps_gathers=overlaps, bucket_bytes=64), dp=4, zero=1) for overlaps in (True, False))
    assert exposed.gradient_sync_s > hidden.gradient_sync_s
    assert exposed.compute_s == hidden.compute_s and exposed.stages[0].memory == hidden.stages[0].memory
    whole = priced(Recipe(overlaps_gathers=False, bucket_bytes=MIB), dp=4, zero=1)
    parts = [p for p in whole.estimator.params.values() if p.trainable and p.resting_bytes < p.local_bytes]
    pricer = Pricer(cluster(), {"pp": 1, "dp": 4, "tp": 1})
    assert parts and whole.gradient_sync_s >= pricer.collective_s("all_gather", sum(p.local_bytes for p in parts), "dp")


def test_parameters_are_gathered_by_as_many_collectives_as_a_recipe_says() -> None:
    """A full bucket's seconds for each bucket and the rest's, or one collective of all; gradients and memory are as they were."""
    one, other = (priced(Recipe(overlaps_gathers=False, bucket_bytes=64, gather_bytes=n), dp=4, zero=1) for n in (None, MIB))
    nbytes = sum(p.local_bytes for p in one.estimator.params.values() if p.trainable and p.resting_bytes < p.local_bytes)
    pricer = Pricer(cluster(), {"pp": 1, "dp": 4, "tp": 1})
    of = [pricer.collective_s("all_gather", n, "dp") for n in (64, nbytes % 64, nbytes)]
    in_buckets_s = nbytes // 64 * of[0] + (of[1] if nbytes % 64 else 0.0)
    assert nbytes > 2 * 64 and in_buckets_s > of[2]
    assert one.gradient_sync_s - other.gradient_sync_s == pytest.approx(in_buckets_s - of[2], rel=1e-9)
    assert one.stages[0].memory == other.stages[0].memory and one.compute_s == other.compute_s
    assert Recipe(bucket_bytes=7).gathered_bytes == 7 and Recipe(bucket_bytes=7, gather_bytes=9).gathered_bytes == 9


@pytest.mark.parametrize("pp,micro_batches", [(1, 1), (1, 4), (2, 2), (2, 4)])
def test_what_asynchronous_gathers_filled_is_held(pp: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the host runs ahead of the device."""
    quick, slow = cluster(launch_s=0.0), cluster(launch_s=1e-3)
    monkeypatch.setitem(globals(), "cluster", lambda: quick)
    program, pins = program_of("deep"), {"tp": 2, "pp": pp, "micro_batches": micro_batches, "sequence_parallel": True}
    free, held = (priced(Recipe(held_gathers=share), program, **pins) for share in (0.0, 0.5))
    types, params = held.rank.program.types, {p.value for p in held.rank.program.params}
    gathers = [op for op in held.rank.program.ops if op.target == GATHER and refs(op)[0] not in params]
    assert gathers
    rounds = {(2, 4): 1.5}.get((pp, micro_batches), 1.0)  # of the first stage, which alternates forwards and backwards
    second = held.stages[1].first_op if pp > 1 else ""
    ops = [op.name for op in held.rank.program.ops]
    first = set(ops[: ops.index(second)] if second else ops)
    bytes_ = sum(types[op.outputs[0]].nbytes for op in gathers if op.name in first)
    more = [a.memory.allocator_slack_bytes - b.memory.allocator_slack_bytes for a, b in zip(held.stages, free.stages, strict=True)]
    assert more[0] == pytest.approx(0.5 * rounds * bytes_, abs=1)
    monkeypatch.setitem(globals(), "cluster", lambda: slow)
    none, waits = (priced(Recipe(held_gathers=share), program, **pins) for share in (0.0, 0.5))
    assert [s.memory for s in waits.stages] == [s.memory for s in none.stages], "the device waits for the host"
    assert all(a.memory.saved_activations_bytes == b.memory.saved_activations_bytes for a, b in zip(held.stages, free.stages, strict=True))


@pytest.mark.parametrize(
    "changes",
    [{name: -0.1} for name in ("allocator_slack", "master_itemsize", "gradient_copies", "held_gathers")]
    + [{"bucket_bytes": 0}, {"gather_bytes": 0}, {"optimizer_passes": 0.0}, {"attention_speed": 0.0}],
)
def test_recipes_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="negative or empty"):
        Recipe(**changes)


def test_collectives_beside_products_are_those_of_their_backward_pass() -> None:
    with pytest.raises(ValueError, match="no linear layer's backward pass: \\['broadcast'\\]"):
        Recipe(beside_products=("all_gather", "broadcast"))


# ----------------------------------------------------------------------------------------------------------- shared ranks
def figures(c: Candidate) -> tuple[object, ...]:
    times = (c.step_time_s, c.compute_s, c.bubble_s, c.gradient_sync_s, c.optimizer_s)
    return (c.mesh, c.rest, c.shard, c.rank.micro_batches, c.part.cuts, c.part.recomputed, tuple(s.memory for s in c.stages), times)


@pytest.mark.parametrize("recipe", [AUTOPAR, MIXED], ids=["own", "mixed"])
@pytest.mark.parametrize("gpus,tp,pins", [(4, 1, {}), (8, 2, {"micro_batch": 1, "zero": 0})], ids=str)
def test_equal_micro_batches_cost_what_each_costs_by_itself(gpus: int, tp: int, pins: dict[str, Any], recipe: Recipe) -> None:
    program = program_of("stack")
    sharing, each = searched(program, gpus, recipe, **pins), searched(program, gpus, recipe, **pins)
    compared, shared, folded = 0, 0, 0
    for choice in [c for c in sharing.space.choices() if c.mesh.tp == tp]:
        mesh, count = choice.mesh, choice.micro_batches
        found, own = (f(mesh, count, program.batch_size, recipe) for f in (sharing.known.rank, each.known.whole))
        assert not isinstance(found, str) and not isinstance(own, str)
        assert own.made_for == (mesh.dp, count) and (found.mesh, found.micro_batches) == (mesh, count)
        shared += found.made_for != own.made_for
        folded += len(found.program.ops) < len(own.program.ops)
        estimators = [s.estimator(rank, choice) for s, rank in ((sharing, found), (each, own))]
        assert not isinstance(estimators[0], str) and not isinstance(estimators[1], str)
        assert estimators[0].pieces == estimators[1].pieces and estimators[0].least_s() == pytest.approx(estimators[1].least_s())
        drafts = [s.draft(choice, e) for s, e in zip((sharing, each), estimators, strict=True) if not isinstance(e, str)]
        assert isinstance(drafts[0], Draft) and isinstance(drafts[1], Draft)
        assert (drafts[0].part.cuts, drafts[0].part.recomputed) == (drafts[1].part.cuts, drafts[1].part.recomputed)
        mine, its = (d.times for d in drafts if isinstance(d, Draft))
        assert (*mine.forwards_s, *mine.backwards_s) == pytest.approx((*its.forwards_s, *its.backwards_s))
        assert (mine.sync_s, mine.optimizer_s, mine.step_s) == pytest.approx((its.sync_s, its.optimizer_s, its.step_s))
        compared += 1
    assert compared > 2 and shared and folded, "nothing was shared, or nothing folded"


@pytest.mark.parametrize("name,gpus,pins", [("stack", 4, {"pp": 1}), ("stack", 2, {"tp": 2}), ("pair", 2, {})])
def test_the_plan_states_its_own_split(name: str, gpus: int, pins: dict[str, Any]) -> None:
    program = program_of(name)
    search = searched(program, gpus, **pins)
    best = next(search.candidates())
    assert best.rank.made_for == (best.mesh.dp, best.rank.micro_batches)
    plan = make_plan(program, gpus, cluster(), pins=Pins(**pins))
    assert plan.mesh == best.mesh.sizes() and plan.micro_batches == best.rank.micro_batches
    assert {axis: plan.axes[axis].n for axis in plan.axes} == {axis: n for axis, n in plan.mesh.items() if n > 1 and axis != "pp"}
    lowered = lower(program, plan)
    assert {p.fqn: p for p in lowered.program.params} == {p.fqn: p for p in best.rank.program.params}
    assert lowered.program.ops == best.rank.program.ops


@functools.cache
def stack_of(batch: int) -> Program:
    ids = torch.arange(batch * 8).reshape(batch, 8) % 32
    return capture(Tied(layers=4), {"input_ids": ids, "labels": torch.where(ids % 3 == 0, -100, ids)}).program


SPLITS = [
    {"dp": 1, "micro_batches": 8},
    {"dp": 2, "micro_batches": 8},
    {"dp": 4, "micro_batches": 4},
    {"pp": 2, "dp": 2, "micro_batches": 8},
]


@pytest.mark.parametrize("pins", SPLITS, ids=str)
def test_another_batch_costs_what_its_own_capture_costs(pins: dict[str, Any]) -> None:
    pins = {"pp": 1, "tp": 1, **pins}
    gpus = pins["dp"] * pins["pp"]
    small = searched(program_of("stack"), 1)
    list(small.candidates())  # which leaves ranks behind
    other = small.other(gpus=gpus, pins=Pins(**pins), batch_size=32, recipe=MIXED, memory_limit_bytes=2**40)
    expected = [figures(c) for c in searched(stack_of(32), gpus, MIXED, **pins).candidates()]
    found = list(other.candidates())
    assert [figures(c) for c in found] == expected and expected
    assert all(other.least_s(c.mesh, c.rank.micro_batches) <= c.step_time_s for c in found)
    assert other.least_s(found[0].mesh, 8) == pytest.approx(searched(stack_of(32), gpus, MIXED, **pins).least_s(found[0].mesh, 8))
    assert small.batch_size == 8 and small.recipe == AUTOPAR


@pytest.mark.parametrize("batch,dp,count", [(32, 1, 1), (12, 1, 4), (32, 2, 4)])
def test_a_micro_batch_that_the_program_does_not_hold_is_refused(batch: int, dp: int, count: int) -> None:
    search = searched(program_of("stack"), 1).other(
        gpus=dp, pins=Pins(dp=dp, micro_batches=count), batch_size=batch, recipe=AUTOPAR, memory_limit_bytes=2**40
    )
    assert list(search.candidates()) == []
    assert any("batch of 8 does not divide into" in line for line in search.refused)


def test_ledgers_at_other_prices() -> None:
    program = program_of("stack")
    mesh = Mesh(pp=1, dp=1, tp=1).sizes()
    slow = cluster(memory_bandwidth_bytes_per_s=1e11, launch_s=7e-5)
    ledger, direct = Ledger(program, Pricer(cluster(), mesh)), Ledger(program, Pricer(slow, mesh))
    again = ledger.repriced(Pricer(slow, mesh))
    assert again.costs == direct.costs != ledger.costs
    assert again.saved_by == ledger.saved_by
    assert ledger.costs == Ledger(program, Pricer(cluster(), mesh)).costs, "the first is as it was"


def test_recipes_with_other_prices_share_no_ranks() -> None:
    program = program_of("attention")
    first = searched(program, 1, micro_batches=1)
    found: dict[float, float] = {}
    for speed in (1.0, 1e-9):
        recipe = dataclasses.replace(AUTOPAR, attention_speed=speed)
        other = first.other(gpus=1, pins=first.pins, batch_size=None, recipe=recipe, memory_limit_bytes=2**40)
        found[speed] = next(iter(other.candidates())).compute_s
    assert found[1e-9] > found[1.0] == next(iter(first.candidates())).compute_s
    mesh = Mesh(pp=1, dp=1, tp=1)
    recipes = (AUTOPAR, Recipe(), *(Recipe(**x) for x in (
        {"regathers": True}, {"fuses": True}, {"attention_speed": 0.5}, {"beside_products": ("all_reduce",)}
    )))  # fmt: skip
    for recipe in (*recipes, *recipes):
        rank = first.known.rank(mesh, 1, first.batch_size, recipe)
        assert not isinstance(rank, str)
        alone = Ledger(rank.program, Pricer(cluster(), mesh.sizes(), None, recipe))
        assert rank.ledger.costs == alone.costs and rank.ledger.stops_early == alone.stops_early, recipe
