"""What a plan and a refusal claim, on questions that a stranger asks: unusual numbers of GPUs, pins that exclude each other."""

from __future__ import annotations

import pytest

from autopar.errors import Infeasible
from autopar.planner import Pins, make_plan
from cost_models.cluster import load_cluster
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure


def test_parameters_of_fewer_numbers_than_ranks_are_priced() -> None:
    """A part of a bias may have no byte at all, where other forms of the tensor axis are bounded."""
    plan = make_plan(program_of("stack"), 24, load_cluster("pcie-box"), pins=Pins(recompute="selective"), optimizer="sgd")
    assert plan.mesh["pp"] * plan.mesh["dp"] * plan.mesh["tp"] == 24
    assert plan.pins["recompute"] == "selective"


def test_sizes_that_other_pins_exclude_are_no_remedy() -> None:
    """pp=2 makes no mesh of 3 GPUs, and pp=1, the nearest that does, is excluded by what else is pinned: pp=3 is named."""
    with pytest.raises(Infeasible) as raised:
        make_plan(program_of("stack"), 3, load_cluster("pcie-box"), pins=Pins(pp=2, virtual_stages=2))
    found = str(raised.value)
    assert "no mesh of 3 GPUs has pp=2" in found
    assert "pp=1" not in found
    assert "pp=3" in found or "pp not pinned" in found
