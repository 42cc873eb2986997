"""Plans that are run on this machine: what is made of the times, and that what is written by hand computes what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.run import WorkerPool
from benchmarks import measured
from benchmarks._by_hand import ENGINES
from benchmarks._decoders import Decoder, build
from benchmarks._small import MODELS, Mlp
from benchmarks.measured import Ran, Row, lower_quartile, summary

DIMS = Decoder(
    layers=4, hidden=16, heads=4, kv_heads=4, ffn=32, vocabulary=32, length=8, tied=False, gated=False, norm="layer", bias=True,
    positions="learned",
)  # fmt: skip


def row(predicted: float | None, step: float | None, **changes: Any) -> Row:
    base: dict[str, Any] = {"name": "a plan", "chosen": False, "predicted_bytes": None, "spread": 0.0, "memory_bytes": None, "cpu": 1.0}
    return Row(**{**base, "predicted_s": predicted, "step_s": step, **changes})


@pytest.mark.pure
def test_figures_of_a_group() -> None:
    rows = [
        row(1.0, 2.0, chosen=True, predicted_bytes=3.0, memory_bytes=2.0), row(2.0, 1.6), row(4.0, 5.0, spread=0.1), row(None, 2.5),
        row(None, 1.0, refused=""), row(3.0, None, refused="ValueError"),
    ]  # fmt: skip
    found = summary(rows)
    assert found["plans"] == 3 and found["step"] == pytest.approx(0.25) and found["memory"] == 0.5
    assert found["regret"] == pytest.approx(0.2) and found["beside"] == 2.0 and found["spread"] == 0.1
    assert found["tau"] == pytest.approx(1 / 3)
    assert summary([row(3.0, None)])["regret"] is None


@pytest.mark.pure
def test_a_step_is_that_of_its_slowest_worker_and_other_work_does_not_count() -> None:
    assert [lower_quartile(x) for x in ([5.0], [2.0, 1.0], [4.0, 1.0, 2.0, 3.0, 9.0])] == [5.0, 1.0, 2.0]
    quiet = [Ran(steps_s=(1.0, 1.0, 1.0, 1.0, 1.0), wall_s=5.0, cpu_s=5.0)] * 2
    busy = [Ran(steps_s=(1.0, 2.0, 2.0, 2.0, 2.0), wall_s=9.0, cpu_s=5.0)] * 2
    found = measured._row("a plan", None, False, [quiet, busy], 3.0, 2)
    assert (found.step_s, found.spread, found.memory_bytes, found.cpu) == (1.0, 1.0, 3.0, pytest.approx(20 / 14 / 2))
    refused = measured._row("a plan", None, False, [[Ran(refused="no")], [Ran(refused="no")]], 3.0, 2)
    assert refused.refused == "no" and refused.step_s is refused.memory_bytes is None


def made(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Mlp(8, 4) if kind == "mlp" else build(DIMS)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)  # no two are alike
    ids = torch.randint(32, (16, 8))
    return model, {"x": torch.randn(16, 8), "y": torch.randn(16, 8)} if kind == "mlp" else {"ids": ids, "labels": ids.roll(-1, 1)}


def gradients(kind: str, who: str) -> dict[str, torch.Tensor] | None:
    """Of all parameters, by their values: names differ between engines."""
    model, batch = made(kind)
    by_hand = ENGINES[who](model, batch)
    if by_hand is None:
        return None
    by_hand.compute()
    found = {}
    for p in by_hand.parameters:
        whole, grad = (t.full_tensor() if isinstance(t, DTensor) else t for t in (p.detach(), p.grad))
        assert grad is not None
        found[repr(whole.flatten()[:3].tolist()) + str(tuple(whole.shape))] = grad
    if who != "gpipe":
        return found
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return {name: grad for part in parts for name, grad in part.items()}


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["mlp", "decoder"])
def test_plans_by_hand_compute_the_gradients_of_one_process(kind: str) -> None:
    model, batch = made(kind)
    model(**batch).backward()
    expected = {repr(p.flatten()[:3].tolist()) + str(tuple(p.shape)): p.grad for p in model.parameters()}
    with WorkerPool(2) as pool:
        for who in ENGINES:
            found = pool.run(gradients, kind, who)[0]
            assert found is not None and found.keys() == expected.keys(), who
            for name, grad in found.items():
                assert torch.allclose(grad, expected[name], atol=1e-5), (who, name)


@pytest.mark.gloo
def test_what_nobody_writes_by_hand_is_left_out() -> None:
    """A pipeline of convolutions; and batch norm over each worker's samples, which is another model."""
    with WorkerPool(2) as pool:
        for who in ("gpipe", "ddp", "fsdp2"):
            job = measured.Job(model="resnet", who=who, plan_file="", steps=1)
            assert {ran.refused for ran in pool.run(measured.train, job)} == {measured.NONE_BY_HAND}
    assert "resnet" in MODELS
