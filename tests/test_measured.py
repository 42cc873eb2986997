"""A run that was measured beside its plan: recorded on every rank, written, read, compared; what is no run of the plan is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import autopar
from autopar.measured import Calls, RankRun, Row, Run, RunError, compared, compared_json, compared_text
from autopar.planner import Pins, Plan, make_plan
from autopar.report.columns import WIDTH
from autopar.run import WorkerPool
from cost_models import load_cluster
from cost_models.recipe import AUTOPAR
from tests.checkpoint_model import batch, plain
from tests.planner_programs import program_of


def planned(**pins: Any) -> Plan:
    pins = pins or {"pp": 2, "dp": 2, "tp": 1, "micro_batches": 4}
    return make_plan(program_of("stack"), 4, load_cluster("dgx-a100"), memory_limit_bytes=2**34, pins=Pins(**pins))


def run_of(plan: Plan, scale: float, **changes: Any) -> Run:
    """As predicted, but for `scale`."""
    ranks = []
    for r in range(plan.gpus):
        own = [s for s, of in zip(plan.stages, plan.rank_of, strict=True) if of == r // (plan.gpus // plan.mesh["pp"])]
        forward, backward = sum(s.forward_s for s in own), sum(s.backward_s for s in own)
        passes = {"forward": Calls(count=4, seconds=4 * scale * forward), "backward": Calls(count=4, seconds=4 * scale * backward)}
        ranks.append(RankRun(rank=r, step_s=1.0, passes=passes, collectives={}, memory_bytes=own[0].memory.total_bytes))
    step = scale * (plan.step_time_s - plan.optimizer_s)
    made = Run(
        program_hash=plan.program_hash, mesh=plan.mesh, micro_batches=plan.micro_batches, schedule=plan.schedule, device="cpu",
        steps_s=[step], ranks=ranks,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


@pytest.mark.pure
def test_figures_stand_beside_those_of_the_plan() -> None:
    plan = planned()
    found = compared(plan, run_of(plan, 2.0))
    rows = {row.what: row for row in found.rows}
    assert rows["step without the optimizer"].ratio == pytest.approx(2.0)
    assert {row.ratio_text for row in found.rows if "forward" in row.what or "backward" in row.what} == {"2.00"}
    assert {row.ratio_text for row in found.rows if row.unit == "bytes"} == {"1.00"}
    assert "2.00 times the" in found.verdict
    assert "furthest off is" in found.verdict
    near = compared(plan, run_of(plan, 1.05))
    assert "1.05 times what was predicted" in near.verdict
    assert "furthest" not in near.verdict
    fast = compared(plan, run_of(plan, 0.25))
    assert "4.00 times less than" in fast.verdict
    text = compared_text(found)
    assert found.verdict in " ".join(text.split())
    assert "ratio: measured over predicted" in " ".join(text.split()) and max(map(len, text.splitlines())) <= WIDTH
    assert json.loads(json.dumps(compared_json(found)))["rows"][0]["ratio"] == pytest.approx(2.0)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"program_hash": "0" * 64}, "another model"),
        ({"micro_batches": 2}, "2 micro-batches"),
        ({"mesh": {"pp": 1, "dp": 4, "tp": 1}}, "dp=4"),
    ],
)
def test_a_run_of_another_plan_is_refused(changes: dict[str, Any], says: str) -> None:
    plan = planned()
    with pytest.raises(RunError, match=says):
        compared(plan, run_of(plan, 1.0, **changes))


@pytest.mark.pure
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "x"}', '{"steps_s": [1e999]}', '{"program_hash": "a", "ranks": []}', "[" * 100_000]
)
def test_what_is_no_run_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(RunError, match="no measured run"):
        Run.load(path)
    with pytest.raises(RunError, match="cannot read"):
        Run.load(tmp_path / "none.json")


@pytest.mark.pure
def test_a_run_is_written_and_read_back(tmp_path: Path) -> None:
    made = run_of(planned(), 1.5)
    path = tmp_path / "run.json"
    path.write_bytes(made.to_json())
    assert Run.load(path) == made
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(made, version=9)))
    with pytest.raises(RunError, match="version 9"):
        Run.load(path)


@pytest.mark.pure
def test_groups_of_an_axis_are_that_axis() -> None:
    plan = planned(dp=4, tp=1, pp=1, zero=3, micro_batches=1)
    made = run_of(plan, 1.0)
    axes = {"shard": Calls(count=6, seconds=0.5), "dp": Calls(count=1, seconds=0.25), "pp_dp_tp": Calls(count=1, seconds=0.125)}
    axes |= {"replica_tp": Calls(count=1, seconds=2.0)}
    ranks = [msgspec.structs.replace(rank, axes=axes) for rank in made.ranks]
    rows = {row.what.strip(): row for row in compared(plan, msgspec.structs.replace(made, ranks=ranks)).rows}
    assert rows["over dp, 7 waits in a step"].measured == pytest.approx(0.75)
    assert rows["over dp, 7 waits in a step"].predicted == pytest.approx(plan.account.seconds["communication over dp"])  # type: ignore[union-attr]
    assert rows["over all ranks, 1 wait in a step"].measured == pytest.approx(0.125)
    assert rows["over dp and tp, 1 wait in a step"].measured == pytest.approx(2.0)
    assert not any("shard" in what for what in rows)


@pytest.mark.pure
@pytest.mark.parametrize("pins", [{"dp": 4, "zero": 0}, {"dp": 4, "zero": 1}, {"dp": 2, "tp": 2, "zero": 0}, {"dp": 2, "tp": 2, "zero": 1}])
def test_where_nothing_is_hidden_all_that_is_sent_is_what_the_step_waits_for(pins: dict[str, Any]) -> None:
    """By a software that overlaps nothing, on a machine whose host is its device."""
    alone = dataclasses.replace(AUTOPAR, overlaps_reduction=False, overlaps_gathers=False)
    given = Pins(pp=1, micro_batches=1, recompute="none", **pins)
    plan = make_plan(program_of("stack"), 4, load_cluster("cpu"), memory_limit_bytes=2**36, pins=given, recipe=alone)
    assert plan.account is not None
    waited = sum(s for kind, s in plan.account.seconds.items() if kind.startswith("communication over "))
    assert sum(x.seconds for x in plan.account.sent) == pytest.approx(waited, rel=1e-9) and waited > 0
    assert {x.axis.partition(" and ")[0] for x in plan.account.sent} == {axis for axis, n in plan.mesh.items() if n > 1}


@pytest.mark.pure
def test_kinds_stand_beside_what_the_plan_sends_under_any_name() -> None:
    plan = planned(dp=4, tp=1, pp=1, zero=1, micro_batches=1)
    assert plan.account is not None
    sent = {x.kind: x for x in plan.account.sent}
    assert set(sent) >= {"reduce_scatter", "all_gather"}
    nccl = {"_reduce_scatter_base": Calls(count=1, seconds=0.5), "all_gather_into_tensor_coalesced": Calls(count=2, seconds=0.25)}
    gloo = {"all_reduce": Calls(count=3, seconds=0.5), "broadcast": Calls(count=1, seconds=0.125)}

    def rows(collectives: dict[str, Calls]) -> dict[str, Row]:
        made = run_of(plan, 1.0)
        ranks = [msgspec.structs.replace(rank, collectives=collectives) for rank in made.ranks]
        found = compared(plan, msgspec.structs.replace(made, ranks=ranks)).rows
        return {row.what.strip().removeprefix("of kind ").partition(",")[0]: row for row in found if "of kind" in row.what}

    theirs = rows(nccl)
    assert theirs["reduce_scatter"].predicted == pytest.approx(sent["reduce_scatter"].seconds)
    assert theirs["all_gather"].predicted == pytest.approx(sent["all_gather"].seconds) and theirs["all_gather"].measured == 0.25
    ours = rows(gloo)  # which runs a reduce-scatter as an all-reduce
    both = sum(x.seconds for kind, x in sent.items() if kind in ("reduce_scatter", "all_reduce"))
    assert ours["all_reduce"].predicted == pytest.approx(both)
    assert ours["broadcast"].predicted is None and ours["broadcast"].why
    before = msgspec.structs.replace(plan, account=None)
    assert all(row.why or row.predicted is not None for row in compared(before, run_of(plan, 1.0)).rows if "of kind" in row.what)


def _profiled(pins: dict[str, Any], folder: str) -> tuple[str, Plan]:
    model: Any = autopar.compile(plain(dropout=0.1), 2, example_inputs=batch(0), cluster="cpu", pins=pins)
    model(*batch(1)).backward()
    found = model.profile(*batch(4), steps=2)
    found.save(f"{folder}/run.json")
    return str(found), model.plan


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}])
def test_every_rank_is_recorded(pins: dict[str, Any], tmp_path: Path) -> None:
    with WorkerPool(2, backend="gloo") as pool:
        (_, plan), _ = pool.run(_profiled, pins, str(tmp_path), timeout_s=300)
    run = Run.load(tmp_path / "run.json")
    assert [r.rank for r in run.ranks] == [0, 1]
    assert len(run.steps_s) == 2
    for rank in run.ranks:
        assert rank.passes["forward"].seconds > 0
        assert rank.passes["backward"].seconds > 0
        if "pp" in pins:
            assert min(rank.passes["forward"].count, rank.passes["backward"].count) >= run.micro_batches
        assert rank.passes["forward"].seconds + rank.passes["backward"].seconds <= rank.step_s * 1.001
    if "pp" not in pins:
        assert all(sum(calls.count for calls in rank.collectives.values()) > 0 for rank in run.ranks)
    for rank in run.ranks:
        assert rank.axes["dp"].count > 0 if "dp" in pins else rank.axes["pp"].count > 0
        passes = [span for span in rank.spans if span.what in ("forward", "backward")]
        assert {span.what for span in passes} == {"forward", "backward"}
        assert all(0 <= span.start_s <= span.end_s <= rank.step_s * 1.001 for span in rank.spans)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(sorted(passes, key=lambda span: span.start_s)))
        assert all(span.axis for span in rank.spans if span.what not in ("forward", "backward"))
    found = compared(plan, run)
    assert all(row.measured is not None for row in found.rows if "micro-batch" in row.what)
    assert any(row.what.strip().startswith(f"over {'dp' if 'dp' in pins else 'pp'}") and row.measured for row in found.rows)
    assert all(row.predicted is not None or row.why for row in found.rows if row.what.startswith("  of kind"))
    for what in (row.what for row in found.rows if row.what.startswith("  of kind") and row.predicted is not None):
        ran, planned_too = map(int, re.findall(r"(\d+)", what)[:2])
        assert ran == planned_too or (ran < planned_too and "zero" in pins), what  # what is still whole is not gathered again
    predicted = {row.what.split(",")[0].strip() for row in found.rows if row.predicted is not None}
    assert {f"over {axis}" for axis, n in plan.mesh.items() if n > 1} <= predicted  # under one name, in one row
    assert [r.rank for r in found.ranks] == ([0, 1] if "pp" in pins else [max(run.ranks, key=lambda r: r.step_s).rank])
