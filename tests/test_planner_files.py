"""Plans as files: what is written is read back, and nothing that a file says is run unless a rule states it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.capture import program_hash
from autopar.compiler import emit
from autopar.errors import PlanError
from autopar.planner import Pins, Plan, lower, make_plan
from autopar.planner.plan import parse_strategy
from cost_models.cluster import load_cluster
from tests.planner_programs import captured_of, program_of

pytestmark = pytest.mark.pure


@functools.cache
def _text(name: str = "pair", **pins: Any) -> str:
    gpus = pins.get("dp", 1) * pins.get("tp", 1) * pins.get("pp", 1)
    plan = make_plan(program_of(name), gpus, load_cluster("dgx-a100"), pins=Pins(**pins))
    return json.dumps(_json(plan))


def _json(plan: Plan) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(plan))


def _plan(**pins: Any) -> dict[str, Any]:
    return json.loads(_text(**pins))


def _read(data: dict[str, Any]) -> Plan:
    return Plan.from_json(json.dumps(data).encode())


@pytest.mark.parametrize("pins", [{}, {"dp": 2, "tp": 2, "pp": 2, "zero": 1}, {"pp": 2, "blocks": (1, 1)}], ids=str)
def test_a_plan_and_the_same_plan_from_a_file_emit_the_same_bytes(pins: dict[str, Any]) -> None:
    """A file sorts its keys, so that nothing may go by the order of a dict."""
    gpus = pins.get("dp", 1) * pins.get("tp", 1) * pins.get("pp", 1)
    captured, _ = captured_of("pair")
    fresh = make_plan(captured.program, gpus, load_cluster("dgx-a100"), pins=Pins(**pins))
    again = Plan.from_json(fresh.to_json())
    assert again == fresh and list(again.mesh) == list(fresh.mesh) == ["pp", "dp", "tp"]
    source = emit(captured, fresh)
    assert emit(captured, again) == source
    assert f"pp {fresh.mesh['pp']} x dp {fresh.mesh['dp']} x tp {fresh.mesh['tp']}" in source
    assert again.to_json() == fresh.to_json()


WHOLE = {"name": "full", "block": 7, "spans": [(0, 2)]}


def test_what_is_no_path_is_told_what_says_what_a_plan_must_have() -> None:
    with pytest.raises(TypeError, match="the path of its file, not a dict; pins= says what"):
        Plan.load({"dp": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pins", [{}, {"dp": 2, "zero": 1}, {"tp": 2}, {"pp": 2, "micro_batches": 2, "recompute": "full"}, {"dp": 2, "tp": 2}]
)
def test_what_is_saved_is_read_back(tmp_path: Path, pins: dict[str, Any]) -> None:
    plan = _read(_plan(**pins))
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "nothing is left beside it"
    first = path.read_bytes()
    Plan.load(path).save(path)
    assert path.read_bytes() == first
    assert lower(program_of("pair"), Plan.load(path)) == lower(program_of("pair"), plan)
    for axis in plan.axes.values():
        for text in axis.ops.values():
            assert str(parse_strategy(text)) == text


@pytest.mark.parametrize(
    "data,message",
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1, 2]", "not an autopar plan"),
        (b"{}", "not an autopar plan"),
        (b'{"format": "autopar-plan", "version": 99}', "version 99"),
        (b'{"format": "autopar-plan", "version": 5}', "damaged"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(PlanError, match=message):
        Plan.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="absent.json"):
        Plan.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "change,message",
    [
        ({"mesh": {"pp": 1, "dp": -1, "tp": -1}, "gpus": 1}, "mesh"),
        ({"mesh": {"pp": 2, "dp": 2, "tp": 2}}, "mesh"),
        ({"mesh": {"pp": 2}}, "mesh"),
        ({"cuts": []}, "cuts"),
        ({"cuts": [3, 3]}, "cuts"),
        ({"schedule": "dualpipe"}, "schedule"),
        ({"rest": "zero7"}, "rest"),
        ({"rest": "zero1"}, "cannot lie over 1 of 1"),
        ({"shard": 2}, "cannot lie over 2 of 1"),
        ({"model": "\x1b[31mred"}, "to be plain text"),
        ({"gpus": 0}, "damaged"),
        ({"memo": 1}, "damaged"),
        ({"step_time_s": -1.0}, "damaged"),
        ({"step_time_s": 1e-320}, "longer than the step"),
        ({"step_time_s": 1e-3}, "the terms of a step come to"),
        ({"bubble_s": 1.0}, "the terms of a step come to"),
        ({"bound_s": 1.0}, "are not in this order"),
        ({"objective_s": 1.0}, "are not in this order"),
        ({"gap": -0.5}, "by objective and bound"),
        ({"micro_batches": 3}, "does not divide into 3 micro-batches"),
        ({"micro_batches": 10**25, "global_batch": 10**25}, "micro-batches"),
        ({"stages": []}, "stages"),
        ({"recompute": [(7, 0, 0)], "modes": [WHOLE]}, "recomputes blocks that this program does not have"),
        ({"recompute": [(7, 0, 1)], "modes": [WHOLE]}, "not among the block's modes"),
        ({"recompute": [(7, 0, 0)], "modes": [WHOLE | {"spans": [(2, 4), (1, 3)]}]}, "not in order"),
    ],
)
def test_inconsistent_plans_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        lower(program_of("pair"), _read(_plan(pp=2, micro_batches=2) | change))


def _paths(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [p for k, child in children for p in ((*at, k), *_paths(child, (*at, k)))]


_junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=6),
    st.sampled_from(["S(0)", "S(9)", "S(0/3)", "P", "I", "I I -> I", "R S(0) -> S(0)", "P P -> P", "-> S(0)", "S(0) -> P [mean_part]"]),
    st.just([]), st.just({}), st.lists(st.integers(-2, 40), max_size=3),
)  # fmt: skip


@settings(max_examples=150, derandomize=True)
@given(st.data())
def test_damaged_plans_are_refused_or_run_as_they_say(data: st.DataObject) -> None:
    """Whatever a file says: PlanError, or a plan that lowers to a program. Never another error."""
    pins = data.draw(st.sampled_from([{"dp": 2, "tp": 2}, {"pp": 2, "micro_batches": 2}, {"tp": 2, "pp": 2}]))
    plan = _plan(**pins)
    for _ in range(data.draw(st.integers(1, 3))):
        paths = _paths(plan)
        chosen = [p for p in paths if p[0] in ("axes", "cuts", "recompute", "mesh", "micro_batches", "zero_dims") and len(p) > 1]
        path = data.draw(st.sampled_from(chosen if chosen and data.draw(st.booleans()) else paths))
        node = plan
        for key in path[:-1]:
            node = node[key]
        if data.draw(st.integers(0, 4)) == 0:
            del node[path[-1]]
        else:
            node[path[-1]] = copy.deepcopy(data.draw(_junk))
    try:
        read = _read(plan)
        lowered = lower(program_of("pair"), read)
    except PlanError:
        return
    assert len(lowered.stages) == read.mesh["pp"] * read.virtual_stages


@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_damaged_bytes_are_refused(data: st.DataObject) -> None:
    text = bytearray(_text(tp=2).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(PlanError):
        lower(program_of("pair"), Plan.from_json(bytes(text)))


@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}])
def test_a_strategy_that_no_rule_states_is_never_run(pins: dict[str, Any]) -> None:
    """The check is one of production: the plan reads well, every layout divides, and still it would add a bias twice."""
    plan = _plan(**pins)
    (axis,) = plan["axes"]
    linear = next(op.name for op in program_of("pair").ops if op.target == "aten.linear.default" and op.name in plan["axes"][axis]["ops"])
    for wrong in ("S(2) S(1) R -> P", "R S(0) S(0) -> R", "S(0) S(0) S(0) -> S(0)", "P R R -> P", "R R R -> P [mean_part]", "R R -> R"):
        plan["axes"][axis]["ops"][linear] = wrong
        with pytest.raises(PlanError, match="no strategy") as raised:
            lower(program_of("pair"), _read(plan))
        assert linear in str(raised.value) and "aten.linear" in str(raised.value)


@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}])
def test_leaves_are_never_terms_of_a_sum(pins: dict[str, Any]) -> None:
    """A parameter or an input that every rank has whole is no partial value: its sum would be a multiple of it."""
    plan = _plan(**pins)
    (axis,) = plan["axes"]
    for leaf in list(plan["axes"][axis]["leaves"]):
        changed = copy.deepcopy(plan)
        changed["axes"][axis]["leaves"][leaf] = "P"
        with pytest.raises(PlanError, match=leaf):
            lower(program_of("pair"), _read(changed))


def test_a_plan_for_another_program_is_refused() -> None:
    captured, _ = captured_of("stack")
    plan = _read(_plan(tp=2))
    with pytest.raises(PlanError, match="another model or batch"):
        emit(captured, plan)
    with pytest.raises(PlanError, match="another program|no strategy"):
        lower(captured.program, plan)
    with pytest.raises(PlanError, match="another model or batch"):
        emit(captured, _read(_plan()))  # one GPU: no strategy could tell


def test_the_hash_is_of_what_is_computed() -> None:
    names = ("mlp", "wide", "stack", "pair", "skips", "tied")
    hashes = [program_hash(program_of(name)) for name in names]
    assert len(set(hashes)) == len(names)
    assert hashes == [program_hash(program_of(name)) for name in names]


def test_the_hash_is_of_every_constant() -> None:
    """Each number, flag and dtype that an operator is given, changed alone."""
    seen: dict[str, str] = {}
    kinds = set()
    for name in ("stack", "attention", "normed", "balanced"):
        program = program_of(name)
        seen[program_hash(program)] = name
        for k, op in enumerate(program.ops):
            for j, constant in enumerate(op.args):
                match constant:
                    case bool():
                        other: object = not constant
                    case int() | float():
                        other = constant + 1
                    case torch.dtype() if not constant.is_floating_point:  # a program in another floating dtype is the same one
                        other = torch.int16
                    case _:
                        continue
                kinds.add(type(constant))
                changed = dataclasses.replace(op, args=(*op.args[:j], other, *op.args[j + 1 :]))  # type: ignore[arg-type]
                found = program_hash(program.replace(ops=(*program.ops[:k], changed, *program.ops[k + 1 :])))
                assert found not in seen, f"{name}: {op.target} with {other} in the place of {constant} is {seen.get(found)}"
                seen[found] = f"{name}, {op.target} with {other}"
    assert {bool, int, float} <= kinds and len(seen) > 20
