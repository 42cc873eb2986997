"""The whole search: it finds the best of its space, keeps to pins and memory, and says why where there is no plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import Infeasible, PlanError
from autopar.ir import refs
from autopar.planner import Pins, Plan, lower, make_plan
from autopar.planner.candidate import Candidate
from autopar.planner.interleave import rank_bytes
from autopar.planner.modes import Mode
from autopar.planner.search import Search, _costs
from autopar.planner.space import divisors
from autopar.planner.stage_account import Piece, stage_bytes
from cost_models.cluster import Cluster, load_cluster
from cost_models.pipeline import flow
from cost_models.recipe import AUTOPAR
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure

MIB = 2**20
SCARCE = int((50 * MIB + 730 * 1024) * (1 + AUTOPAR.allocator_slack))  # two buckets of gradients, and hardly more than is needed beside


def _cluster(name: str = "dgx-a100", **gpu: float) -> Cluster:
    """A cluster whose GPUs take no memory before the first tensor, so that small programs can fill them."""
    cluster = load_cluster(name)
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, context_bytes=0, **gpu))


def _plan(name: str, gpus: int, cluster: str = "dgx-a100", limit: int | None = None, **pins: object) -> Plan:
    return make_plan(program_of(name), gpus, _cluster(cluster), memory_limit_bytes=limit, pins=Pins(**pins))  # type: ignore[arg-type]


def _meshes(gpus: int) -> list[tuple[int, int, int]]:
    parts = [k for k in range(1, gpus + 1) if gpus % k == 0]
    assert list(divisors(gpus)) == parts
    return [(pp, dp, tp) for pp, dp, tp in itertools.product(parts, repeat=3) if pp * dp * tp == gpus]


@pytest.mark.parametrize(
    "name,gpus,cluster,limit", [("pair", 2, "dgx-a100", None), ("pair", 4, "pcie-box", None), ("pair", 2, "cpu", SCARCE)]
)
def test_the_search_finds_the_best_of_all_pinned_combinations(name: str, gpus: int, cluster: str, limit: int | None) -> None:
    batch = program_of(name).batch_size or 0
    best: dict[tuple[object, ...], float] = {}
    for pp, dp, tp in _meshes(gpus):
        counts = [m for m in range(1, batch // dp + 1) if batch // dp % m == 0] if batch % dp == 0 else []
        for m, zero in itertools.product(counts, [0, 1, 2, 3] if dp > 1 else [0]):
            try:
                plan = _plan(name, gpus, cluster, limit, pp=pp, dp=dp, tp=tp, micro_batches=m, zero=zero)
            except Infeasible:
                continue
            best[pp, dp, tp, m, zero] = plan.objective_s
    free = _plan(name, gpus, cluster, limit)
    assert best and free.objective_s <= min(best.values()) * (1 + 1e-6), (free.mesh, free.micro_batches, free.zero, best)


@pytest.mark.parametrize("name,gpus", [("pair", 4), ("mlp", 4), ("deep", 2)])
def test_no_candidate_is_faster_than_its_lower_bound(name: str, gpus: int) -> None:
    search = Search(
        program=program_of(name), gpus=gpus, cluster=_cluster(), memory_limit_bytes=2**36, optimizer="adamw", precision="fp32", pins=Pins(),
    )  # fmt: skip
    found = list(search.candidates())
    assert found
    for c in found:
        assert search.least_s(c.mesh, c.rank.micro_batches) <= c.step_time_s * (1 + 1e-9)


def test_more_memory_never_makes_the_plan_slower() -> None:
    times, refused = [], 0
    for limit in (400, 120, 92, 76, 64, 52, 24, 20, 18, 16, 14, 12, 10, 8, 6):
        try:
            plan = _plan("deep", 2, limit=limit * MIB)
        except Infeasible as e:
            if "The binding constraint is memory" not in str(e):
                raise
            refused += 1
            continue
        assert not refused, "what fits into less memory fits into more"
        assert max(plan.memory_bytes) <= limit * MIB
        times.append(plan.objective_s)
    assert refused and len(set(times)) > 1, "the limits reach from ample to hopeless"
    assert times == sorted(times)


def test_memory_that_is_short_is_named_with_its_amount() -> None:
    with pytest.raises(Infeasible) as raised:
        _plan("deep", 1, limit=8 * MIB)
    text = str(raised.value)
    short = re.search(r"the leanest candidate is (\d+\.\d+) MiB short of 8\.00 MiB a GPU", text)
    assert short is not None and float(short[1]) > 0, text
    assert "Its fullest GPU needs" in text and "of optimizer states" in text
    assert re.search(r"Tried, and each would do: .*\d+ [GM]iB a GPU", text), text


PINS = [
    {"dp": 2},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "micro_batches": 4, "schedule": "gpipe"},
    {"pp": 2, "micro_batch": 1},
    {"dp": 4, "zero": 3, "micro_batches": 1},
    {"dp": 2, "tp": 2, "zero": 1},
    {"recompute": "full"},
    {"pp": 4, "recompute": "none", "schedule": "1f1b"},
]


@pytest.mark.parametrize("pins", PINS, ids=lambda p: " ".join(f"{k}={v}" for k, v in p.items()))
def test_pins_are_kept(pins: dict[str, object]) -> None:
    plan = _plan("stack", 4, **pins)
    assert plan.pins == pins
    for axis in ("pp", "dp", "tp"):
        assert pins.get(axis, plan.mesh[axis]) == plan.mesh[axis]
    for key in ("zero", "micro_batches", "schedule"):
        assert pins.get(key, getattr(plan, key)) == getattr(plan, key)
    if "micro_batch" in pins:
        assert plan.global_batch // plan.mesh["dp"] // plan.micro_batches == pins["micro_batch"]
    if pins.get("recompute") == "full":
        assert [s.recomputed for s in plan.stages] == [s.blocks for s in plan.stages] and any(s.blocks for s in plan.stages)
    if pins.get("recompute") == "none":
        assert not plan.recompute
    lowered = lower(program_of("stack"), plan)
    assert len(lowered.stages) == plan.mesh["pp"] * plan.virtual_stages and all(s.ops for s in lowered.stages)


@pytest.mark.parametrize(
    "name,gpus,pins,reason",
    [
        ("stack", 4, {"dp": 3}, "no mesh of 4 GPUs has dp=3"),
        ("stack", 4, {"dp": 2, "tp": 4}, "no mesh of 4 GPUs has dp=2, tp=4"),
        ("stack", 16, {"dp": 16}, "a global batch of 8 does not divide into 16 ranks"),
        ("stack", 2, {"dp": 2, "micro_batches": 3}, "does not divide into 2 ranks of 3 micro-batches"),
        ("stack", 2, {"pp": 2, "micro_batch": 3}, "micro-batches of 3"),
        ("stack", 2, {"tp": 2, "zero": 3}, "no data axis to shard parameters over"),
        ("mlp", 16, {"pp": 16}, "cut"),
        ("mlp", 2, {"recompute": "full"}, "no repeated block that can be recomputed"),
        ("normed", 2, {"pp": 2, "micro_batches": 2}, "not split, because the step changes the buffer"),
        ("balanced", 2, {"pp": 2, "micro_batches": 2}, "not split, because"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(name: str, gpus: int, pins: dict[str, object], reason: str) -> None:
    with pytest.raises(Infeasible, match=re.escape(reason)) as refused:
        _plan(name, gpus, **pins)
    changes = re.search(r"Tried, and each (?:would do|gives a mesh): (.*)\.$", str(refused.value))
    assert changes is not None, "a refusal has a remedy that was tried"
    for change in changes[1].split("; "):
        left_out, other = set(re.findall(r"(\w+) not pinned", change)), {k: int(n) for k, n in re.findall(r"(\w+)=(\d+)", change)}
        assert left_out | set(other) <= set(pins) and left_out | set(other)
        _plan(name, gpus, **{pin: value for pin, value in pins.items() if pin not in left_out} | other)


@pytest.mark.parametrize("gpus", [1, 3, 6, 7])
def test_any_number_of_gpus_has_a_plan_or_a_reason(gpus: int) -> None:
    """A batch of 12 and 6 layers of 128: 7 divides neither, so that only a pipeline of 7 is left."""
    plan = _plan("deep", gpus)
    assert math.prod(plan.mesh.values()) == gpus == plan.gpus
    assert plan.step_time_s > 0 and plan.global_batch % plan.mesh["dp"] == 0
    assert sum(s.parameters for s in plan.stages) > 0
    lowered = lower(program_of("deep"), plan)
    assert len(lowered.stages) == plan.mesh["pp"]
    if gpus == 1:
        assert plan.zero == 0 and not plan.axes and plan.tensor_split_share == 0


def test_a_program_without_a_batch_keeps_to_its_pins() -> None:
    """Nothing to split: pinned micro-batches are refused, not ignored."""
    program = program_of("mlp").replace(batch_size=None)
    with pytest.raises(Infeasible, match="batch"):
        make_plan(program, 1, _cluster(), pins=Pins(micro_batches=2))
    assert make_plan(program, 1, _cluster()).micro_batches == 1


@pytest.mark.parametrize(
    "pins,text",
    [
        ({"schedule": "zigzag"}, "schedule"),
        ({"zero": 4}, "zero"),
        ({"zero": 0, "shard": 2}, "leaves every parameter whole"),
        ({"recompute": "maybe"}, "recompute"),
        ({"micro_batch": 1, "micro_batches": 2}, "not both"),
        ({"virtual_stages": 0}, "virtual_stages"),
        ({"virtual_stages": 2, "schedule": "1f1b"}, "1f1b has one stage on each rank"),
        ({"virtual_stages": 1, "schedule": "interleaved"}, "pin schedule=1f1b"),
        ({"virtual_stages": 2, "pp": 1}, "need several pipeline ranks"),
        ({"virtual_stages": 2, "pp": 2, "blocks": (1, 1)}, "the pin pp for 2 with 2 stages on each rank"),
        ({"schedule": "interleaved", "blocks": (1, 1, 1, 1)}, "pin virtual_stages with blocks"),
    ],
)
def test_unknown_pins_are_refused(pins: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Pins(**pins)  # type: ignore[arg-type]


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="adamw"):
        make_plan(program_of("mlp"), 1, _cluster(), optimizer="lion of judah")


def test_renaming_modules_does_not_change_the_plan() -> None:
    program = program_of("stack")
    renamed = program.replace(
        params=tuple(
            dataclasses.replace(p, fqn=f"q{k}.weird", aliases=tuple(f"{a}.x" for a in p.aliases)) for k, p in enumerate(program.params)
        ),
        ops=tuple(dataclasses.replace(op, module=f"x.{k}") for k, op in enumerate(program.ops)),
    )
    plans = [make_plan(p, 4, _cluster(), pins=Pins(tp=2)) for p in (program, renamed)]
    assert plans[0].axes == plans[1].axes and plans[0].cuts == plans[1].cuts and plans[0].mesh == plans[1].mesh
    assert plans[0].objective_s == plans[1].objective_s


class Encoder(nn.Module):
    """torch's own encoder: its attention works on [length, batch, ...] and flattens the two, so that the batch lies within a dim."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(32, 512), nn.Linear(512, 32)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(self.embed(x))).flatten(0, 1), y.flatten())


def test_a_batch_within_a_dim_stays_split_through_repeated_blocks() -> None:
    with torch.device("meta"):
        model, tokens = Encoder(), torch.zeros(16, 256, dtype=torch.long)
    search = Search(
        program=capture(model, {"x": tokens, "y": tokens}).program, gpus=4, cluster=_cluster(), memory_limit_bytes=2**36,
        optimizer="adamw", precision="fp32", pins=Pins(),
    )  # fmt: skip
    program = search.on_data_axis(2)[0]
    moved = [op for op in program.ops if op.target.startswith("autopar.C.") and program.types[refs(op)[0]].shape]
    assert moved == [], "nothing but the loss and the number of labels is brought together"
    assert not isinstance(search.moments(2, 2), str)


@pytest.mark.parametrize("cluster", ["dgx-a100", "cpu"])
def test_a_pinned_axis_splits_the_products_and_little_else(cluster: str) -> None:
    """On a model so small that idling would be faster, all products are split, in the fastest way to do so."""
    found = _search(cluster, tp=4)
    restricted = _search(cluster, tp=4, sequence_parallel=False)
    alone = _search(cluster, tp=1)
    work = [sum(c.counts.flops for c in x.rank.ledger.costs if c.counts.op_class == "matmul") for x in (found, alone)]
    assert work[0] * 4 == work[1] > 0
    assert found.step_time_s <= restricted.step_time_s * 1.01


def _search(cluster: str, **pins: object) -> Candidate:
    search = Search(
        program=program_of("deep"), gpus=int(str(pins["tp"])), cluster=_cluster(cluster), memory_limit_bytes=2**40, optimizer="adamw",
        precision="fp32", pins=Pins(dp=1, pp=1, micro_batches=1, **pins),  # type: ignore[arg-type]
    )  # fmt: skip
    (found,) = search.candidates()
    return found


def _random_pieces(rng: random.Random, raised: bool) -> list[Piece]:
    """Pieces of random sizes; raised: a forward pass of each needs as much as a later backward pass, if it needs less."""
    found = []
    for _ in range(4):
        modes = []
        for kept, again in ((rng.randint(4, 9), 0.0), (rng.randint(0, 3), 1.0)):
            later = kept + rng.randint(0, 20)
            forward = max(later * raised, kept + rng.randint(0, 20))
            modes.append(
                Mode(
                    name=str(again), again_s=again, kept_bytes=kept, forward_bytes=forward, backward_bytes=later + rng.randint(0, 9),
                    later_bytes=later,
                )
            )  # fmt: skip
        sizes = {n: float(rng.randint(0, 9)) for n in ("rest_bytes", "gradient_bytes", "received_bytes", "sent_bytes")}
        found.append(Piece(forward_s=1.0, backward_s=2.0, modes=tuple(modes), **sizes))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_what_a_forward_pass_needs_counts_beyond_what_a_backward_pass_does(seed: int) -> None:
    """As the search compares forms. Where a rank has several stages, others hold more beside a forward pass of one than beside its
    backward pass, so that it counts."""
    pieces, raised = (_random_pieces(random.Random(seed), x) for x in (False, True))
    rng = random.Random(seed)
    modes = [rng.randrange(2) for _ in pieces]
    for micro_batches, in_flight in ((1, 1), (2, 1), (2, 2), (8, 1), (8, 3), (8, 8)):
        assert stage_bytes(pieces, modes, in_flight, micro_batches) == stage_bytes(raised, modes, in_flight, micro_batches)


def test_a_forward_pass_counts_where_a_rank_has_several_stages() -> None:
    differ = 0
    for seed in range(100):
        few, more = (_random_pieces(random.Random(seed), x) for x in (False, True))
        for ranks, rank in ((2, 0), (2, 1), (4, 0), (4, 3)):
            on_rank = flow("interleaved", ranks, 4, 2).on_rank(rank)
            differ += len({rank_bytes([p[:2], p[2:]], [[0, 0], [0, 0]], on_rank) for p in (few, more)}) > 1
    assert differ, "else forms could be compared so there too"


@pytest.mark.parametrize("alone", [True, False])
def test_a_form_that_needs_less_in_forward_alone_is_no_better_than_another(alone: bool) -> None:
    pairs = [tuple(_random_pieces(random.Random(seed), x)[0] for x in (False, True)) for seed in range(20)]
    told = [few.modes[0].forward_bytes < more.modes[0].forward_bytes for few, more in pairs]
    assert any(told)
    assert [_costs(few, alone) != _costs(more, alone) for few, more in pairs] == [few != more and not alone for few, more in pairs]
