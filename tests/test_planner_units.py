"""What ZeRO-3 gathers together."""

from __future__ import annotations

import pytest

from autopar.compiler import emit, plan_of
from autopar.ir import refs
from autopar.planner.units import gather_units
from autopar.render import load
from tests.planner_programs import captured_of, program_of

pytestmark = pytest.mark.pure
LAYERS = 6
IN_LAYER = 6  # norm, up and down, each of a weight and a bias


def _sizes(name: str) -> dict[str, int]:
    program = program_of(name)
    return {p.value: program.types[p.value].nbytes for p in program.params}


def _units(name: str, unit_bytes: int) -> list[list[str]]:
    """The names of the parameters of each unit, in order."""
    program = program_of(name)
    found = gather_units(program, _sizes(name), unit_bytes)
    fqn = {p.value: p.fqn for p in program.params}
    return [[fqn[v] for v, unit in found.items() if unit == k] for k in range(max(found.values()) + 1)]


def test_a_block_is_a_unit() -> None:
    first, *layers = _units("deep", 2**30)
    assert first == ["embed.weight"]  # tied: it belongs to its first reader
    assert len(layers) == LAYERS
    for i, unit in enumerate(layers):
        assert len(unit) == IN_LAYER
        assert all(name.startswith(f"layers.{i}.") for name in unit)


def test_a_unit_is_no_larger_than_allowed_unless_one_parameter_is() -> None:
    sizes, program = _sizes("deep"), program_of("deep")
    limit = max(sizes.values()) // 2
    found = gather_units(program, sizes, limit)
    assert found.keys() == {r for op in program.ops for r in refs(op) if r in sizes}
    members = [[v for v, unit in found.items() if unit == k] for k in range(max(found.values()) + 1)]
    assert all(len(unit) == 1 or sum(sizes[v] for v in unit) <= limit for unit in members)
    assert any(sizes[v] > limit for v in found)
    assert any(len(unit) > 1 for unit in members)


@pytest.mark.parametrize(("zero", "units"), [(1, set()), (3, set(range(LAYERS + 1)))])
def test_the_emitted_file_states_units(zero: int, units: set[int]) -> None:
    captured, _ = captured_of("deep")
    plan = plan_of(captured, 2, cluster="dgx-h100", pins={"dp": 2, "zero": zero, "micro_batches": 1, "recompute": "none"})
    params = load(emit(captured, plan)).MANIFEST.params
    assert {p.unit for p in params if p.unit is not None} == units
    assert all(p.zero_dim is not None and p.rest == "zero3" for p in params if p.unit is not None)
