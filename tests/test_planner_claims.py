"""What a plan and a refusal claim, on questions that a stranger asks: unusual numbers of GPUs, pins that exclude each other."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import Infeasible
from autopar.planner import Pins, make_plan
from autopar.planner.answer import of_all
from autopar.planner.search import AS_ONE_OF_MANY, Search
from autopar.planner.space import Choice, Mesh
from cost_models.cluster import Cluster, load_cluster, load_link
from cost_models.rests import rest_of
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


def test_of_several_searches_objective_bound_and_gap_are_of_the_fastest_plan() -> None:
    """One search took a simpler plan than its fastest, another one found a plan that is faster than that by less."""
    plan = make_plan(program_of("stack"), 1, load_cluster("dgx-a100"))
    step_s = plan.step_time_s
    tied = msgspec.structs.replace(plan, objective_s=0.98 * step_s, bound_s=0.97 * step_s, gap=1 - 0.97 / 0.98, tie="simpler")
    other = msgspec.structs.replace(plan, bound_s=0.96 * step_s, gap=0.04)
    found = of_all(tied, [tied, other], [])
    assert (found.objective_s, found.bound_s) == (tied.objective_s, other.bound_s)
    assert found.gap == pytest.approx(1 - 0.96 / 0.98)
    found.check()


def _slow_between_nodes() -> Cluster:
    """Nodes of two GPUs on a link of 1 Gb/s: what stages send one another is most of a step."""
    cluster = load_cluster("dgx-a100")
    return dataclasses.replace(cluster, gpus_per_node=2, inter=load_link("ethernet-1"), links_per_node=1)


@pytest.mark.parametrize("sequence", [True, False])
def test_no_form_of_the_tensor_axis_is_faster_than_the_answer_without_that_pin(sequence: bool) -> None:
    """Where stages send one another much, activations in parts between them are what makes a step fast, and need no lack of memory."""
    free = make_plan(program_of("deep"), 12, _slow_between_nodes(), pins=Pins(tp=2, pp=6))
    pinned = make_plan(program_of("deep"), 12, _slow_between_nodes(), pins=Pins(tp=2, pp=6, sequence_parallel=sequence))
    assert free.objective_s <= pinned.objective_s * (1 + 1e-4)


def test_the_bound_knows_that_no_two_cuts_are_in_one_place() -> None:
    """One cut of this program sends little; eleven of them cannot all be there, and the dearest is what each transfer waits for."""
    cluster = _slow_between_nodes()
    plan = make_plan(program_of("deep"), 12, cluster, pins=Pins(pp=12, micro_batches=1))
    assert plan.account is not None
    transfers_s = 2 * 11 * plan.account.transfer_s
    assert transfers_s > 0.5 * plan.step_time_s, "what is to be bounded"
    assert plan.bound_s >= 0.2 * transfers_s


class Narrow(nn.Module):
    """Layers so small that what ranks exchange takes as long as what they compute: whether splitting pays depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((512, 2048), (2048, 2048), (2048, 2048), (2048, 2048), (2048, 10)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return F.cross_entropy(x, y)


@pytest.mark.parametrize("cluster", ["pcie-box", "rtx4090-8x"])
def test_what_is_not_pinned_is_no_slower_where_splitting_hardly_pays(cluster: str) -> None:
    """The assignment of a tensor axis is that of the micro-batch's own size, whatever else is asked."""
    with torch.device("meta"):
        program = capture(Narrow(), (torch.empty(64, 512), torch.empty(64, dtype=torch.long))).program
    free = make_plan(program, 8, load_cluster(cluster))
    for pins in ({"dp": 1}, {"pp": 2}, {"pp": 4}, {"pp": 2, "dp": 1}, {"micro_batches": 1}, {"zero": 0}):
        pinned = make_plan(program, 8, load_cluster(cluster), pins=Pins(**pins))
        assert free.objective_s <= pinned.objective_s * (1 + 1e-4) and free.bound_s <= pinned.objective_s


def test_a_small_micro_batch_does_not_bound_a_large_one() -> None:
    """A sample takes the longer the fewer are computed with it: of what is known of small ones nothing follows for large ones."""
    search = Search(
        program=program_of("deep"), gpus=4, cluster=load_cluster("dgx-a100"), memory_limit_bytes=10**10, optimizer="adamw",
        precision="fp32", pins=Pins(pp=1, dp=1, tp=4),
    )  # fmt: skip
    search._work = {search._sizes_of(Mesh(tp=4)): {3: 1.0}}
    by_size = {
        count: search._work_like_larger_s(Choice(mesh=Mesh(tp=4), micro_batches=count, schedule="1f1b", rest=rest_of("zero0"), shard=1))
        for count in (1, 4, 12)
    }  # fmt: skip
    assert by_size == {1: 0.0, 4: pytest.approx(AS_ONE_OF_MANY), 12: pytest.approx(AS_ONE_OF_MANY / 3)}


class Table(nn.Module):
    """A table of 4 GiB, of which a few rows are read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(1024, 1024, 1024))
        self.layer = nn.Linear(1024, 10)

    def forward(self, rows: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(self.table[rows].mean(1)), y)


@pytest.mark.parametrize("gib", [1.5, 2, 3])
def test_buffers_are_split_where_they_do_not_fit_whole(gib: float) -> None:
    with torch.device("meta"):
        program = capture(Table(), (torch.empty(32, dtype=torch.long), torch.empty(32, dtype=torch.long))).program
    plan = make_plan(program, 8, load_cluster("dgx-a100"), memory_limit_bytes=int(gib * 2**30))
    assert plan.mesh["tp"] >= 4 and max(stage.memory.upper_bytes for stage in plan.stages) <= gib * 2**30
