"""The plan's memory is what the emitted module allocates: every stage, within a few percent, on fake tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):  # missing, or built for another torch: transformers would fail on it, and is fine without
    sys.modules["torchvision"] = None  # type: ignore[assignment]

from torch import distributed as dist

from autopar.capture import Captured, capture
from autopar.compiler import emit, plan_of
from autopar.measure.track import step_memory
from autopar.measure.tracker import MemoryTracker
from autopar.render import load

pytestmark = pytest.mark.fake

WITHIN = 0.03
PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "micro_batches": 1},
    "dp2 zero1": {"dp": 2, "zero": 1, "micro_batches": 1},
    "dp2 zero2": {"dp": 2, "zero": 2, "micro_batches": 1},
    "dp2 zero2 accumulated": {"dp": 2, "zero": 2, "micro_batches": 4},
    "dp2 zero3": {"dp": 2, "zero": 3, "micro_batches": 1},
    "pp2 dp2": {"pp": 2, "dp": 2, "zero": 0, "micro_batches": 4, "schedule": "1f1b"},
    "dp2 recompute": {"dp": 2, "zero": 0, "micro_batches": 1, "recompute": "full"},
    "pp2 interleaved": {"pp": 2, "virtual_stages": 2, "micro_batches": 4},
    "dp2 selective": {"dp": 2, "zero": 0, "micro_batches": 1, "recompute": "selective"},
}


# on few tokens, where the parameters that ZeRO-3 gathers are most of the memory
GATHERED: dict[str, dict[str, Any]] = {
    "dp4 zero3": {"dp": 4, "zero": 3, "micro_batches": 1},
    "dp4 zero3 recompute": {"dp": 4, "zero": 3, "micro_batches": 1, "recompute": "full"},
    "dp2 tp2 zero3": {"dp": 2, "tp": 2, "zero": 3, "micro_batches": 1},
    "dp4 zero1": {"dp": 4, "zero": 1, "micro_batches": 2},
    "dp4 zero2": {"dp": 4, "zero": 2, "micro_batches": 2},
    "dp4 zero1 in groups": {"dp": 4, "zero": 1, "shard": 2, "micro_batches": 2},
    "dp4 zero2 in groups": {"dp": 4, "zero": 2, "shard": 2, "micro_batches": 2},
    "dp4 zero3 in groups": {"dp": 4, "zero": 3, "shard": 2, "micro_batches": 2},
    "pp2 dp2 zero1": {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 4, "schedule": "1f1b"},
    "pp2 dp2 zero3": {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 4, "schedule": "1f1b"},
    "pp2 dp2 interleaved zero1": {"pp": 2, "virtual_stages": 2, "dp": 2, "zero": 1, "micro_batches": 4},
    "pp2 dp2 interleaved zero3": {"pp": 2, "virtual_stages": 2, "dp": 2, "zero": 3, "micro_batches": 4},
    "pp2 dp2 interleaved zero3 of two": {"pp": 2, "virtual_stages": 2, "dp": 2, "zero": 3, "micro_batches": 2},
    "pp2 dp2 interleaved zero2": {"pp": 2, "virtual_stages": 2, "dp": 2, "zero": 2, "micro_batches": 4},
    "pp2 interleaved of one": {"pp": 2, "virtual_stages": 2, "micro_batches": 1},
}


@functools.cache
def gpt2(length: int, **config: int) -> tuple[Captured, dict[str, torch.Tensor]]:
    """A GPT-2 without dropout, and a batch of 8."""
    transformers = pytest.importorskip("transformers")
    given = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **config)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(given)
    ids = torch.zeros(8, length, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    return capture(model, inputs), inputs


@pytest.mark.parametrize("name", PLANS)
def test_predicted_memory_is_what_a_step_allocates(fake_group: Callable[..., None], name: str) -> None:
    _compare(*gpt2(1024, n_layer=2), PLANS[name], fake_group)


@pytest.mark.parametrize("name", GATHERED)
def test_predicted_memory_of_gathered_parameters(fake_group: Callable[..., None], name: str) -> None:
    _compare(*gpt2(64, n_layer=4, n_embd=512, n_head=8, n_positions=64, vocab_size=4000), GATHERED[name], fake_group)


@pytest.mark.parametrize("name", PLANS)
def test_the_batch_is_a_kind_of_its_own(name: str) -> None:
    """What a rank is given is not counted as parameters, in which are those at rest and buffers."""
    captured, inputs = gpt2(1024, n_layer=2)
    pins = {"recompute": "none", **PLANS[name]}
    gpus = pins.get("pp", 1) * pins.get("dp", 1) * pins.get("tp", 1)
    stages = plan_of(captured, gpus, cluster="dgx-h100", pins=pins).stages
    assert all(stage.memory.batch_bytes >= sum(x.nbytes for x in inputs.values()) for stage in stages)
    if not {"tp", "pp"} & set(pins) and not pins["zero"]:
        tensors = captured.program.types
        whole = sum(tensors[x.value].nbytes for x in (*captured.program.params, *captured.program.buffers))
        assert stages[0].memory.parameters_bytes == whole


def _compare(captured: Captured, inputs: dict[str, torch.Tensor], pins: dict[str, Any], fake_group: Callable[..., None]) -> None:
    gpus = pins.get("pp", 1) * pins.get("dp", 1) * pins.get("tp", 1)
    decided = plan_of(captured, gpus, cluster="dgx-h100", pins={"recompute": "none", **pins})
    emitted = load(emit(captured, decided))
    given = {k: (tuple(v.shape), v.dtype) for k, v in inputs.items()}
    for stage in range(decided.mesh["pp"]):  # the first of each rank
        planned = decided.stages[stage]
        fake_group(gpus, rank=decided.rank_of[stage] * gpus // decided.mesh["pp"])
        found = step_memory(emitted, given, optimizer=functools.partial(torch.optim.AdamW, foreach=True))
        dist.destroy_process_group()
        memory = planned.memory
        predicted = memory.total_bytes - memory.framework_context_bytes - memory.allocator_slack_bytes
        assert predicted == pytest.approx(found.peak_bytes, rel=WITHIN), (stage, memory, found)


def test_storages_count_once_and_until_nothing_refers_to_them() -> None:
    with MemoryTracker() as tracker:
        x = torch.zeros(1000)
        view = x.view(10, 100)
        assert tracker.live_bytes == 4000
        y = x + 1
        assert (tracker.live_bytes, tracker.peak_bytes) == (8000, 8000)
        del x
        assert tracker.live_bytes == 8000  # the view holds it
        del view, y
        assert (tracker.live_bytes, tracker.peak_bytes) == (0, 8000)
