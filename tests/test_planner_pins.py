"""Pins of stages and of the form of tensor parallelism: kept where they can be, refused with what is wrong where not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import cli
from autopar.capture import capture
from autopar.cli.options import pins_of
from autopar.compiler import emit, plan_of
from autopar.errors import Infeasible, PlanError
from autopar.ir import Layout, Lowered, refs
from autopar.planner import Pins, Plan, lower, make_plan
from autopar.run import WorkerPool
from autopar.verify import TOLERANCE, Reference, reference, verify_plan
from cost_models.cluster import load_cluster
from tests.planner_programs import program_of

LAYERS, HEADS, WIDTH, LENGTH, VOCABULARY, BATCH = 4, 4, 32, 8, 48, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, _ = x_BLD.shape
        h = self.first(x_BLD)
        q, k, v = (p(h).view(batch, length, HEADS, -1).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, WIDTH)
        x_BLD = x_BLD + self.out(mixed)
        return x_BLD + self.down(F.gelu(self.up(self.second(x_BLD))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x_BLD = self.tokens(ids) + self.positions(torch.arange(LENGTH, device=ids.device))
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return F.cross_entropy(self.head(self.norm(x_BLD)).flatten(0, 1), labels.flatten(), ignore_index=-100)


@functools.cache
def gpt() -> Reference:
    torch.manual_seed(0)
    model = Gpt()
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return reference(model, {"ids": ids, "labels": torch.where(torch.rand(ids.shape) < 0.3, -100, ids)}, steps=2)


def planned(gpus: int, **pins: Any) -> Plan:
    return plan_of(gpt().captured, gpus, cluster="dgx-a100", pins=pins)


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2, backend="gloo") as pool:
        yield pool


def check(plan: Plan, pool: WorkerPool) -> None:
    """Equal to the original, as it is and after it has been in a file."""
    again = Plan.from_json(plan.to_json())
    assert again == plan and emit(gpt().captured, again) == emit(gpt().captured, plan)
    report = verify_plan(gpt(), again, pool, timeout_s=120)
    assert max(report.loss, report.gradient, report.parameter) < TOLERANCE == 1e-9
    assert report.ok, report.unequal


# ------------------------------------------------------------------------------------------------------------------ stages
STAGES = [(2, 2), (1, 3), (3, 1), (0, 4), (4, 0), (1, 1, 1, 1), (1, 1, 2), (4,)]


@pytest.mark.pure
@pytest.mark.parametrize("blocks", STAGES, ids=str)
def test_stages_have_the_layers_that_were_pinned(blocks: tuple[int, ...]) -> None:
    plan = planned(len(blocks), blocks=blocks)
    assert plan.mesh == {"pp": len(blocks), "dp": 1, "tp": 1} and plan.pins == {"blocks": list(blocks)}
    names = [name for stage in plan.stages for name in stage.blocks]
    assert tuple(len(stage.blocks) for stage in plan.stages) == blocks
    assert names == [f"layers.{k}" for k in range(LAYERS)]
    lowered = lower(gpt().captured.program, plan)
    assert tuple(len(stage.calls) for stage in lowered.stages) == blocks
    source = emit(gpt().captured, plan)
    assert source.count("class Stage") == len(blocks)


@pytest.mark.pure
def test_what_is_not_pinned_beside_stages_is_still_decided() -> None:
    free = planned(4, blocks=(1, 3))
    assert free.mesh["pp"] == 2 and free.mesh["dp"] * free.mesh["tp"] == 2
    full = planned(2, blocks=(1, 3), recompute="full")
    assert [s.recomputed for s in full.stages] == [s.blocks for s in full.stages]


@pytest.mark.pure
def test_blocks_of_pinned_stages_are_recomputed_where_memory_is_short() -> None:
    cluster = load_cluster("dgx-a100")
    cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, context_bytes=0))
    by_limit: list[Plan] = []
    for limit_mib in (400, 30, 24, 20, 16, 12, 8):
        with contextlib.suppress(Infeasible):
            pins = Pins(blocks=(2, 4), micro_batches=2)
            by_limit.append(make_plan(program_of("deep"), 2, cluster, memory_limit_bytes=limit_mib * 2**20, pins=pins))
            assert max(by_limit[-1].memory_bytes) <= limit_mib * 2**20
    again = [len(plan.recompute) for plan in by_limit]
    assert again[0] == 0 < again[-1] and again == sorted(again) and len(by_limit) < 7
    assert all([len(stage.blocks) for stage in plan.stages] == [2, 4] for plan in by_limit)
    times = [plan.objective_s for plan in by_limit]
    assert times == sorted(times)


@pytest.mark.pure
@pytest.mark.parametrize(
    "blocks,why", [((2, 1), "4 block instances"), ((3, 2), "4 block instances"), ((2, 0, 2), "stage 1 would have nothing")]
)
def test_stages_that_the_model_does_not_have_are_refused(blocks: tuple[int, ...], why: str) -> None:
    with pytest.raises(Infeasible) as refused:
        planned(len(blocks), blocks=blocks)
    text = str(refused.value)
    assert f"blocks: {'of' if 'stage' in why else 'the program has'}" in text and why in text
    assert ", ".join(map(str, blocks)) in text
    assert "memory" not in text, "what is wrong with the pin is no lack of memory"


@pytest.mark.pure
@pytest.mark.parametrize(
    "pins,why",
    [
        ({"blocks": (2, 2), "pp": 4}, "is for 2 stages, the pin pp for 4"),
        ({"blocks": ()}, "one for each stage"),
        ({"blocks": (-1, 5)}, "whole numbers"),
        ({"blocks": (True, 3)}, "whole numbers"),
        ({"blocks": "22"}, "whole numbers"),
    ],
)
def test_pins_of_stages_that_make_no_sense(pins: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Pins(**pins)


@pytest.mark.pure
def test_more_stages_than_gpus_fit() -> None:
    with pytest.raises(Infeasible, match="no mesh of 4 GPUs"):
        planned(4, blocks=(2, 1, 1))


@pytest.mark.pure
def test_stages_on_the_command_line() -> None:
    assert pins_of(["blocks=1,3", "pp=2"]) == Pins(blocks=(1, 3), pp=2)
    for text in ("blocks=1,", "blocks=one", "blocks=1;3"):
        with pytest.raises(cli.UsageError, match="blocks"):
            pins_of([text])


@pytest.mark.gloo
@pytest.mark.parametrize("blocks", [(1, 3), (0, 4)], ids=str)
def test_pinned_stages_compute_what_the_original_computes(blocks: tuple[int, ...], pair: WorkerPool) -> None:
    check(planned(2, blocks=blocks, micro_batches=2), pair)


# ---------------------------------------------------------------------------------------------- forms of tensor parallelism
def collectives(lowered: Lowered) -> Counter[str]:
    """Of differentiable activations on the tensor axis, by name."""
    types, params = lowered.program.types, {p.value for p in lowered.program.params}
    moved = [op for stage in lowered.stages for op in stage.ops if op.target.startswith("autopar.C.")]
    return Counter(
        op.target.rpartition(".")[2] for op in moved if types[refs(op)[0]].grad and refs(op)[0] not in params and op.kwarg("axis") == "tp"
    )


def entering(lowered: Lowered) -> list[Layout]:
    """How the stream of activations lies that enters each layer but the first."""
    layouts = lowered.program.layouts["tp"]
    found = []
    for span in lowered.program.blocks[0].spans[1:]:
        made = {o for op in lowered.program.ops[span.start : span.stop] for o in op.outputs}
        outside = [r for op in lowered.program.ops[span.start : span.stop] for r in refs(op) if r not in made]
        found += [layouts[r] for r in outside if lowered.program.types[r].grad and len(lowered.program.types[r].shape) == 3]
    return found


@pytest.mark.pure
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence", [True, False])
def test_sequence_parallel_states_megatron_s_forms(sequence: bool, tp: int) -> None:
    plan = planned(tp, tp=tp, sequence_parallel=sequence)
    assert plan.pins == {"tp": tp, "sequence_parallel": sequence}
    lowered = lower(gpt().captured.program, plan)
    cut = {p.fqn: dict(p.layouts)["tp"] for p in lowered.program.params}
    whole = [fqn for fqn, layout in cut.items() if fqn.endswith("weight") and "norm" not in fqn and ".first." not in fqn
             and ".second." not in fqn and not layout.is_shard]  # fmt: skip
    assert not whole, "every matrix is cut"
    for k in range(LAYERS):  # columns, then rows
        assert {str(cut[f"layers.{k}.{name}.weight"]) for name in ("query", "key", "value", "up")} == {"S(0)"}
        assert {str(cut[f"layers.{k}.{name}.weight"]) for name in ("out", "down")} == {"S(1)"}
    used, stream = collectives(lowered), entering(lowered)
    assert len(stream) >= LAYERS - 1
    if sequence:
        assert {str(layout) for layout in stream} == {"S(1)"}
        assert not used["all_reduce"] + used["all_reduce_shared"]
        assert used["reduce_scatter"] >= 2 * LAYERS and used["all_gather"] >= 2 * LAYERS
    else:
        assert not any(layout.is_shard for layout in stream)
        assert not used["reduce_scatter"] + used["split"] + used["narrow"] + used["all_to_all"]
        assert used["all_reduce"] + used["all_reduce_shared"] >= 2 * LAYERS


@pytest.mark.pure
def test_either_form_beside_pinned_stages_and_ranks_of_data() -> None:
    for sequence in (True, False):
        plan = planned(8, tp=2, dp=2, blocks=(2, 2), sequence_parallel=sequence)
        used = collectives(lower(gpt().captured.program, plan))
        assert bool(used["reduce_scatter"]) == sequence
        assert plan.mesh == {"pp": 2, "dp": 2, "tp": 2}


class Inverse(nn.Module):
    """A matrix that a product and an operator without a rule read: it can be cut for the one and not for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + x @ torch.linalg.inv(self.weight)).square().mean()


@pytest.mark.pure
@pytest.mark.parametrize("sequence", [True, False])
def test_a_form_that_a_model_does_not_have_is_refused_and_others_are_found(sequence: bool) -> None:
    program = capture(Inverse(), {"x": torch.ones(8, 4, 8)}).program
    cluster = load_cluster("dgx-a100")
    with pytest.raises(Infeasible, match=f"tp=2: not every matrix can be cut with the activations between as sequence_parallel={sequence}"):
        make_plan(program, 2, cluster, pins=Pins(tp=2, sequence_parallel=sequence))
    assert make_plan(program, 2, cluster, pins=Pins(sequence_parallel=sequence)).mesh["tp"] == 1
    assert make_plan(program, 2, cluster, pins=Pins(tp=2)).mesh["tp"] == 2


@pytest.mark.gloo
@pytest.mark.parametrize("sequence", [True, False])
def test_either_form_computes_what_the_original_computes(sequence: bool, pair: WorkerPool) -> None:
    check(planned(2, tp=2, sequence_parallel=sequence), pair)
