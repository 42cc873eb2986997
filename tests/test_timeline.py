"""The predicted step as events, memory and a Perfetto trace: what is drawn is what the plan states."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autopar.planner import Pins, Plan, make_plan
from autopar.report.perfetto import perfetto_trace
from autopar.report.timeline import REDUCTION, STEADY, UPDATE, timeline_of
from cost_models import load_cluster
from cost_models.recipe import AUTOPAR, HELD_GATHERS, Recipe
from tests.planner_programs import program_of
from tests.trace_processor import opened

pytestmark = pytest.mark.pure


@functools.cache
def planned(name: str, gpus: int, recipe: Recipe = AUTOPAR, **pins: Any) -> Plan:
    cluster = load_cluster("dgx-a100")
    return make_plan(program_of(name), gpus, cluster, memory_limit_bytes=2**40, pins=Pins(**pins), recipe=recipe)


MIXED = Recipe(gradient_itemsize=4, state_itemsize=4, master_itemsize=4, accumulates=True, held_gathers=HELD_GATHERS, regathers=True)
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("stack", 1, {"micro_batches": 1}),
    ("stack", 1, {"micro_batches": 4}),
    ("stack", 4, {"pp": 4, "dp": 1, "tp": 1, "micro_batches": 8, "schedule": "1f1b"}),
    ("stack", 4, {"pp": 4, "dp": 1, "tp": 1, "micro_batches": 2, "schedule": "gpipe"}),
    ("stack", 4, {"pp": 2, "dp": 2, "tp": 1, "micro_batches": 2, "zero": 3}),
    ("deep", 4, {"pp": 2, "dp": 2, "tp": 1, "micro_batches": 6, "zero": 2, "recompute": "full"}),
    ("deep", 2, {"pp": 2, "dp": 1, "tp": 1, "micro_batches": 6, "recompute": "selective"}),
    ("deep", 4, {"pp": 2, "dp": 1, "tp": 2, "micro_batches": 4, "sequence_parallel": True}),
    ("deep", 2, {"pp": 2, "dp": 1, "tp": 1, "micro_batches": 4, "schedule": "interleaved", "virtual_stages": 2}),
    ("deep", 4, {"pp": 2, "dp": 2, "tp": 1, "micro_batches": 6, "zero": 3, "schedule": "interleaved", "virtual_stages": 3}),
    ("deep", 4, {"pp": 1, "dp": 4, "tp": 1, "micro_batches": 3, "zero": 1}),
    ("wide", 2, {"pp": 1, "dp": 2, "tp": 1, "micro_batches": 1, "zero": 0}),
]


@pytest.mark.parametrize("recipe", [AUTOPAR, MIXED], ids=["autopar", "mixed"])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_highest_point_of_the_memory_is_the_plans(case: tuple[str, int, dict[str, Any]], recipe: Recipe) -> None:
    name, gpus, pins = case
    plan = planned(name, gpus, recipe, **pins)
    made = timeline_of(plan)
    for rank in made.ranks:
        assert max(level.nbytes for level in rank.memory) == plan.memory_bytes[rank.stages[0]]
        times = [level.at_s for level in rank.memory]
        assert times == sorted(times)
        assert times[-1] == made.end_s
        few = rank.few_levels(7)
        assert len(few) <= 7
        assert max(level.nbytes for level in few) == max(level.nbytes for level in rank.memory)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_step_is_the_priced_one(case: tuple[str, int, dict[str, Any]]) -> None:
    name, gpus, pins = case
    plan = planned(name, gpus, **pins)
    made = timeline_of(plan)
    assert made.end_s <= plan.step_time_s * (1 + 1e-9)
    if plan.schedule == "gpipe" or plan.mesh["pp"] == 1:
        assert made.end_s == pytest.approx(plan.step_time_s)
    passes = Counter((bar.kind, bar.stage) for rank in made.ranks for bar in rank.bars if bar.micro_batch >= 0)
    assert set(passes.values()) == {plan.micro_batches}
    for rank in made.ranks:
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(rank.bars))
        assert rank.ranks[1] - rank.ranks[0] + 1 == plan.gpus // plan.mesh["pp"]
        assert sum(b.end_s - b.start_s for b in rank.bars if b.kind == REDUCTION) == pytest.approx(plan.gradient_sync_s)
        assert sum(b.end_s - b.start_s for b in rank.bars if b.kind == UPDATE) == pytest.approx(plan.optimizer_s)
    for sender, sent_s, receiver, used_s, *_ in made.transfers:
        assert sender != receiver
        assert used_s >= sent_s - 1e-12


def test_many_passes_are_drawn_as_the_first_the_last_and_one_bar_between() -> None:
    rank = timeline_of(planned("stack", 4, pp=4, dp=1, tp=1, micro_batches=8, schedule="1f1b")).ranks[0]
    few = rank.few_bars(6)
    assert sum(bar.micro_batch >= 0 for bar in few) == 6
    (between,) = [bar for bar in few if bar.kind == STEADY]
    assert between.passes == 16 - 6
    assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(few))
    assert rank.few_bars(16) == rank.bars


def test_the_trace_has_what_the_format_asks_for() -> None:
    plan = planned("stack", 4, pp=2, dp=2, tp=1, micro_batches=2, zero=3, schedule="1f1b")
    trace = json.loads(perfetto_trace(plan))
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C", "s", "f"}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["pipeline rank 0 (ranks 0-1; stage 0)", "pipeline rank 1 (ranks 2-3; stage 1)"]
    bars = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and {"pid", "tid", "name", "cat"} <= set(e) for e in bars)
    assert sum(e["cat"] in ("forward", "backward") for e in bars) == 2 * 2 * 2
    assert max(e["ts"] + e["dur"] for e in bars) == pytest.approx(timeline_of(plan).end_s * 1e6)
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert set(starts) == set(ends)
    assert len(starts) == 2 * 2  # activations and gradients of each micro-batch
    for number, start in starts.items():  # an arrow begins and ends in a bar
        for e in (start, ends[number]):
            assert any(b["pid"] == e["pid"] and b["tid"] == e["tid"] and b["ts"] - 1e-6 <= e["ts"] <= b["ts"] + b["dur"] for b in bars)
    peak = max(e["args"]["GiB"] for e in events if e["ph"] == "C")
    assert peak * 2**30 == pytest.approx(max(plan.memory_bytes))


def test_perfettos_trace_processor_reads_it(tmp_path: Path) -> None:
    plan = planned("stack", 4, pp=2, dp=2, tp=1, micro_batches=2, zero=3, schedule="1f1b")
    made = timeline_of(plan)
    with opened(perfetto_trace(plan), tmp_path) as trace:
        (errors,) = trace.query("select coalesce(sum(value), 0) as n from stats where severity in ('error', 'data_loss')")
        assert errors.n == 0
        slices = trace.query("select slice.name as name, slice.dur as dur, slice.category as category from slice")
        assert len(slices) == sum(len(rank.bars) for rank in made.ranks)
        for kind, seconds in (("forward", plan.stages[0].forward_s + plan.stages[1].forward_s),):
            found = sum(x.dur for x in slices if x.category == kind)
            assert found == pytest.approx(2 * seconds * 1e9, rel=1e-3)  # two micro-batches; the processor counts whole nanoseconds
        names = [x.name for x in trace.query("select name from process where name is not null order by upid")]
        assert names == ["pipeline rank 0 (ranks 0-1; stage 0)", "pipeline rank 1 (ranks 2-3; stage 1)"]
        (most,) = trace.query("select max(value) as gib from counter")
        assert most.gib * 2**30 == pytest.approx(max(plan.memory_bytes))
        (flows,) = trace.query("select count(*) as n from flow")
        assert flows.n == len(made.transfers) == 4


def test_a_plan_without_curves_is_drawn_without_memory() -> None:
    plan = planned("stack", 4, pp=2, dp=2, tp=1, micro_batches=2, zero=3, schedule="1f1b")
    old = msgspec.structs.replace(plan, account=None)
    made = timeline_of(old)
    assert all(not rank.memory for rank in made.ranks)
    assert b'"X"' in perfetto_trace(old)
