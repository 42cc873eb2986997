"""Hand-written parallel forms of one model, trained for three steps, against the model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.run import ParallelModule, WorkerPool
from autopar.run.part import local
from tests.run_model import Model, batch, emitted, tensors

pytestmark = pytest.mark.gloo
FORMS: dict[str, dict[str, Any]] = {
    "dp2_tp2": {"dp": 2, "tp": 2},
    "dp2_tp2_sequence_recompute": {"dp": 2, "tp": 2, "sequence": True, "recomputed": True},
    "dp2_tp2_accumulate": {"dp": 2, "tp": 2, "micro_batches": 4},
    "dp4_zero1": {"dp": 4, "zero": 1},
    "dp2_tp2_zero1_sequence_accumulate": {"dp": 2, "tp": 2, "zero": 1, "sequence": True, "micro_batches": 2},
    "dp4_zero3": {"dp": 4, "zero": 3},
    "dp4_zero3_alone": {"dp": 4, "zero": 3, "units": False},
    "dp4_zero3_accumulate": {"dp": 4, "zero": 3, "micro_batches": 4},
    "dp2_tp2_zero3_sequence_recompute": {"dp": 2, "tp": 2, "zero": 3, "sequence": True, "recomputed": True},
    "pp2_dp2_gpipe": {"pp": 2, "dp": 2, "micro_batches": 4, "schedule": "gpipe"},
    "pp2_dp2_1f1b": {"pp": 2, "dp": 2, "micro_batches": 4},
    "pp2_tp2_sequence_recompute": {"pp": 2, "tp": 2, "micro_batches": 2, "sequence": True, "recomputed": True},
    "pp2_dp2_zero1": {"pp": 2, "dp": 2, "micro_batches": 4, "zero": 1},
    "pp2_dp2_zero3": {"pp": 2, "dp": 2, "micro_batches": 4, "zero": 3},
    "dp4_zero2": {"dp": 4, "zero": 2},
    "dp4_zero2_accumulate": {"dp": 4, "zero": 2, "micro_batches": 4},
    "dp2_tp2_zero2_sequence_accumulate": {"dp": 2, "tp": 2, "zero": 2, "sequence": True, "micro_batches": 2},
    "pp2_dp2_zero2": {"pp": 2, "dp": 2, "micro_batches": 4, "zero": 2},
    "dp4_zero1_groups": {"dp": 4, "zero": 1, "shard": 2, "micro_batches": 2},
    "dp4_zero2_groups": {"dp": 4, "zero": 2, "shard": 2, "micro_batches": 2},
    "dp4_zero3_groups": {"dp": 4, "zero": 3, "shard": 2, "micro_batches": 2},
    "pp2_dp2_interleaved": {"pp": 2, "dp": 2, "micro_batches": 4, "schedule": "interleaved", "virtual_stages": 2},
    "pp2_dp2_interleaved_one": {"pp": 2, "dp": 2, "micro_batches": 1, "schedule": "interleaved", "virtual_stages": 2, "recomputed": True},
    "pp2_dp2_interleaved_zero1": {"pp": 2, "dp": 2, "micro_batches": 2, "schedule": "interleaved", "virtual_stages": 2, "zero": 1},
    "pp2_dp2_interleaved_zero2": {"pp": 2, "dp": 2, "micro_batches": 4, "schedule": "interleaved", "virtual_stages": 2, "zero": 2},
    "pp2_dp2_interleaved_zero3": {"pp": 2, "dp": 2, "micro_batches": 4, "schedule": "interleaved", "virtual_stages": 2, "zero": 3},
    "pp4_1f1b": {"pp": 4, "micro_batches": 8},
    "pp4_few_micro_batches": {"pp": 4, "micro_batches": 2},
}


def _error(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the size of what is expected."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) if b.numel() else 0.0


def _train(form: dict[str, Any]) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # ranks need not agree: rank 0's parameters are everyone's
    model = ParallelModule(emitted(**form), tensors(Model().double()))
    torch.manual_seed(0)
    reference = Model().double()
    worst = dict.fromkeys(("loss", "gradient", "norm", "parameter"), 0.0)

    def note(key: str, a: Tensor, b: Tensor) -> None:
        worst[key] = max(worst[key], _error(a, b))

    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    expected = dict(reference.named_parameters())
    for step in range(3):
        given = batch(step)
        loss, target = model(**given), reference(**given)
        ours.zero_grad()
        theirs.zero_grad()
        (loss * 3).backward()
        (target * 3).backward()
        note("loss", loss.detach(), target.detach())
        for name, grad in model.full_gradients().items():
            if name != "unused":
                note("gradient", grad, expected[name].grad)
        assert all(p.grad is None for name, p in model.named_parameters() if name in ("unused", "frozen"))
        note("norm", model.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        ours.step()
        theirs.step()
    with torch.no_grad():
        note("loss", model(**batch(9)), reference(**batch(9)))
        reference.seen.fill_(3 * model.manifest.micro_batches + model.manifest.micro_batches)  # counted once a forward
    full = model.full_state_dict()
    assert set(full) == set(reference.state_dict())
    fresh = Model().double()
    fresh.load_state_dict(full, strict=True)
    for name, tensor in reference.state_dict().items():
        note("parameter", full[name].double(), tensor.double())
    _check_copies(model)
    return worst


def _check_copies(model: ParallelModule) -> None:
    """Copies of one parameter are equal to the bit: over dp and tp where it is not cut, over the stages that share it."""
    mesh = model.mesh
    here = {name: local(p) for name, p in model.named_parameters(remove_duplicate=False) if model._tree.names[name] in model._tree.held}
    everyone: list[dict[str, Tensor]] = [{} for _ in range(mesh.world)]
    torch.distributed.all_gather_object(everyone, here)
    for spec in model.manifest.params:
        cut_tp = spec.layouts["tp"].startswith("S")
        copies: dict[tuple[int, int], Tensor] = {}
        for rank, theirs in enumerate(everyone):
            if spec.name in theirs:
                _, dp, tp = mesh._unflatten(rank)
                key = (dp % mesh.shard.size if spec.zero_dim is not None else 0, tp if cut_tp else 0)
                assert torch.equal(theirs[spec.name], copies.setdefault(key, theirs[spec.name])), spec.name


@pytest.mark.parametrize("name", FORMS)
def test_training_equals_one_process(workers: WorkerPool, name: str) -> None:
    for worst in workers.run(_train, FORMS[name], timeout_s=60):
        assert max(worst.values()) < 1e-11, worst


def _names(form: dict[str, Any]) -> list[str]:
    model = ParallelModule(emitted(**form), tensors(Model().double()))
    assert set(model.state_dict()) == set(Model().state_dict())
    return [name for name, _ in model.named_parameters()]


def test_names_are_the_original_ones(workers: WorkerPool) -> None:
    original = [name for name, _ in Model().named_parameters()]
    whole = workers.run(_names, {"dp": 2, "tp": 2}, timeout_s=60)
    assert all(sorted(names) == sorted(original) for names in whole)
    staged = workers.run(_names, {"pp": 2, "dp": 2, "micro_batches": 2}, timeout_s=60)  # also of the other stage, as empty parts
    assert all(sorted(names) == sorted(original) for names in staged)


def test_one_process_needs_no_group() -> None:
    model = ParallelModule(emitted(), tensors(Model().double()))
    torch.manual_seed(0)
    loss = model.train_step(batch(0))
    torch.manual_seed(0)
    assert loss.shape == () and not loss.requires_grad
    assert model(batch(0)["input_ids"], labels=batch(0)["labels"]).item() == loss.item()
