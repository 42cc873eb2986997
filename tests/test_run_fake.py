"""A parallel module on one process: a fake process group, in which nothing arrives, and fake tensors, which have no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.run import Mesh, ParallelModule
from cost_models.actions import render
from cost_models.pipeline import SCHEDULES, schedule
from tests.run_model import Model, batch, emitted, tensors

pytestmark = pytest.mark.fake


def test_axes_and_groups_of_a_mesh(fake_group: Callable[..., None]) -> None:
    fake_group(12, rank=7)
    mesh = Mesh({"pp": 2, "dp": 3, "tp": 2})
    assert mesh.coordinates == {"pp": 1, "dp": 0, "tp": 1}
    assert (mesh.tp.ranks, mesh.dp.ranks, mesh.pp.ranks) == ((6, 7), (7, 9, 11), (1, 7))
    assert (mesh.tp.rank, mesh.dp.rank, mesh.pp.rank) == (1, 0, 1)
    assert mesh.joint({"dp", "tp"}).ranks == (6, 7, 8, 9, 10, 11)
    assert mesh.rank_at(pp=0, dp=2) == 5
    assert Mesh({"pp": 2, "dp": 3, "tp": 2}).tp.group is mesh.tp.group  # groups are made once
    flat = Mesh({"dp": 12})
    assert (flat.tp.size, flat.tp.group, flat.dp.rank) == (1, None, 7)
    with pytest.raises(ValueError, match="of positive size"):
        Mesh({"ep": 12})


FORMS: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2},
    {"dp": 4, "zero": 1, "micro_batches": 2},
    {"dp": 4, "zero": 3, "recomputed": True},
    {"pp": 2, "dp": 2, "micro_batches": 4},
    {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 4, "schedule": "gpipe"},
    {"pp": 2, "dp": 2, "micro_batches": 4, "schedule": "interleaved", "virtual_stages": 2},
]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_step_on_fake_tensors(fake_group: Callable[..., None], form: dict[str, Any], rank: int) -> None:
    fake_group(4, rank)
    real, data = {name: t.detach() for name, t in tensors(Model().double()).items()}, batch(0)
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(t) for name, t in real.items()}
        model = ParallelModule(emitted(**form), given, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(**{name: mode.from_tensor(t) for name, t in data.items()})
        loss.backward()
        optimizer.step()
        assert loss.shape == ()
        held = {n: p for n, p in model.named_parameters() if n in model._tree.held}
        assert {n for n, p in held.items() if p.grad is not None} == {n for n, p in held.items() if p.requires_grad} - {"unused"}
    if form.get("zero"):
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        dp = form["dp"]
        assert shapes["layers.3.fc.weight" if rank == 3 else "layers.0.fc.weight"] == (64, 16 // dp)


class _Count(TorchDispatchMode):
    """How many multiplications of matrices there are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_no_grad_runs_forward_alone(fake_group: Callable[..., None]) -> None:
    fake_group(4, 3)
    model = ParallelModule(emitted(pp=2, dp=2, micro_batches=2), tensors(Model().double()), device="cpu")
    with torch.no_grad(), _Count() as count:
        loss = model(**batch(0))
    assert not loss.requires_grad
    assert count.calls == 2 * (2 * 2 + 1)  # two micro-batches of two layers and the head


def test_schedules_print_as_they_run() -> None:
    order = {name: render(schedule(name, 3, 4)).splitlines() for name in SCHEDULES}
    assert order["gpipe"][1] == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert order["1f1b"] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    for name in ("gpipe", "1f1b"):
        for stages in range(1, 6):
            for n in range(1, 9):
                for stage, actions in enumerate(schedule(name, stages, n)):
                    assert sorted(map(str, actions)) == sorted(f"{stage}{k}{i}" for k in "FB" for i in range(n))
                    live = peak = 0
                    for action in actions:
                        live += 1 if action.pass_ == "F" else -1
                        peak = max(peak, live)
                    assert peak == (n if name == "gpipe" else min(n, stages - stage))
