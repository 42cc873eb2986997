"""What users of torch.distributed put around a model, its optimizer and their states, where the model is a parallel module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import autopar
from autopar.run import ParallelModule, WorkerPool
from tests.classifier import Classifier, built

pytestmark = pytest.mark.gloo
PINS = {"tp": {"tp": 2}, "zero": {"dp": 2, "zero": 3}, "pipeline": {"pp": 2, "micro_batches": 2}, "states": {"dp": 2, "zero": 1}}


def parallel(pins: dict[str, int]) -> tuple[ParallelModule, list[tuple[Tensor, Tensor]]]:
    model, batches = built(Classifier)
    module = autopar.compile(model, 2, example_inputs=batches[0], pins=pins)
    assert isinstance(module, ParallelModule)
    return module, batches


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------------------------------------- steps that are fused
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, fused=True, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True, weight_decay=0.3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
}


class Own(torch.optim.AdamW):
    """A class of the user's, with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


FUSED["own"] = lambda p: Own(p, lr=0.05, fused=True)


def steps(pins: dict[str, int], kind: str, hooked: bool) -> tuple[list[float], dict[str, Tensor]]:
    """hooked: the user has a hook before the optimizer's steps, which is told of parts."""
    module, batches = parallel(pins)
    optimizer, seen = FUSED[kind](module.parameters()), list[int]()
    if hooked:
        optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    losses = trained(module, optimizer, batches)
    assert bool(seen) == hooked
    return losses, module.full_state_dict()


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("kind", list(FUSED))
@pytest.mark.parametrize("plan", list(PINS))
def test_fused_steps(pair: WorkerPool, plan: str, kind: str, hooked: bool) -> None:
    model, batches = built(Classifier)
    losses = trained(model, FUSED[kind](model.parameters()), batches)
    for found, state in pair.run(steps, PINS[plan], kind, hooked):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)


def written_by_lists(pins: dict[str, int]) -> dict[str, Tensor]:
    """A function of lists in place, of states that are whole beside parameters that are in parts."""
    module, batches = parallel(pins)
    module(*batches[0]).backward()
    params = list(module.parameters())
    with torch.no_grad():
        kept = [torch.ones(p.shape) for p in params]
        grads = [p.grad for p in params]
        torch._fused_sgd_(  # type: ignore[attr-defined]
            params, grads, kept, weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
    return {**module.full_state_dict(), "kept": kept[0]}


@pytest.mark.parametrize("plan", ["tp", "zero", "pipeline"])
def test_what_a_function_of_lists_writes_is_written_to_all_of_them(pair: WorkerPool, plan: str) -> None:
    model, batches = built(Classifier)
    model(*batches[0]).backward()
    kept = [1 * 0.9 + p.grad for p in model.parameters() if p.grad is not None]
    for found in pair.run(written_by_lists, PINS[plan]):
        torch.testing.assert_close(found["kept"], kept[0])
        for (name, p), moved in zip(model.named_parameters(), kept, strict=True):
            torch.testing.assert_close(found[name], p.detach() - 0.1 * moved)


def whitened(g: Tensor) -> Tensor:
    """As Muon has it: a few steps towards the orthogonal matrix that is nearest."""
    x = g.float() / (g.norm() + 1e-7)
    for _ in range(2):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def by_compiled_functions(pins: dict[str, int]) -> dict[str, Tensor]:
    """A step in which torch.compile has made what an optimizer is written with."""
    module, batches = parallel(pins)
    orthogonal = torch.compile(whitened, backend="eager")
    module(*batches[0]).backward()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(orthogonal(p.grad) if p.dim() == 2 else p.grad, alpha=-0.1)
    return module.full_state_dict()


@pytest.mark.parametrize("plan", ["tp", "zero", "pipeline"])
def test_compiled_functions_of_an_optimizer_are_given_parts(pair: WorkerPool, plan: str) -> None:
    model, batches = built(Classifier)
    model(*batches[0]).backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.add_(whitened(p.grad) if p.dim() == 2 else p.grad, alpha=-0.1)
    for found in pair.run(by_compiled_functions, PINS[plan]):
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.detach())


# ------------------------------------------------------------------------------------------------------------- wrappers
def refused(pins: dict[str, int], what: str) -> str:
    module, batches = parallel(pins)
    try:
        if what == "replicate":
            replicate(module)
            module(*batches[0])
        elif what == "ddp of a submodule":
            nn.parallel.DistributedDataParallel(module.up)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which it is imported with
                from torch.distributed.optim import ZeroRedundancyOptimizer
            optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.01)
            trained(module, optimizer, batches)
    except TypeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["replicate", "ddp of a submodule", "optimizer"])
@pytest.mark.parametrize("plan", ["tp", "zero", "pipeline"])
def test_what_would_send_the_memory_of_parts_is_refused(pair: WorkerPool, plan: str, what: str) -> None:
    for said in pair.run(refused, PINS[plan], what):
        assert "up.weight is held in parts by several" in said if what == "optimizer" else "up.weight is a parameter of a parallel" in said


# --------------------------------------------------------------------------------------------------------------- states
def moved(pins: dict[str, int]) -> tuple[list[float], list[float]]:
    """The losses that come next, and those of another module that took the states."""
    module, batches = parallel(pins)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    trained(module, optimizer, batches)
    of_model, of_optimizer = copy.deepcopy(get_state_dict(module, optimizer))
    other, _ = parallel(pins)
    stepping = torch.optim.AdamW(other.parameters(), lr=0.05)
    set_state_dict(other, stepping, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return trained(module, optimizer, batches), trained(other, stepping, batches)


@pytest.mark.parametrize("plan", list(PINS))
def test_states_as_torch_distributed_takes_them(pair: WorkerPool, plan: str) -> None:
    for own, other in pair.run(moved, PINS[plan]):
        assert own == other


Whole = tuple[dict[str, Tensor], dict[str, Any]]


def made_whole(pins: dict[str, int]) -> tuple[Whole, Whole, list[float], list[float]]:
    """Whole states, on rank 0 alone, and on all, after which ranks wait for one another; the losses that come next, and those of another
    module that takes what rank 0 has."""
    module, batches = parallel(pins)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    trained(module, optimizer, batches)
    rank_0 = get_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    dist.barrier()
    on_all = copy.deepcopy(get_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True)))
    other, _ = parallel(pins)
    stepping = torch.optim.AdamW(other.parameters(), lr=1.0)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(rank_0[0]), options=from_rank_0)
    set_optimizer_state_dict(other, stepping, copy.deepcopy(rank_0[1]), options=from_rank_0)
    return copy.deepcopy(rank_0), on_all, trained(module, optimizer, batches), trained(other, stepping, batches)


@pytest.mark.parametrize("plan", list(PINS))
def test_whole_states_as_torch_distributed_makes_them(pair: WorkerPool, plan: str) -> None:
    plain, batches = built(Classifier)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    trained(plain, optimizer, batches)
    model, states = get_state_dict(plain, optimizer)
    for rank, (rank_0, on_all, own, other) in enumerate(pair.run(made_whole, PINS[plan], timeout_s=180)):
        assert own == other
        assert rank == 0 or rank_0 == ({}, {})
        for of_model, of_optimizer in (on_all, rank_0)[: 2 - rank]:
            for found, expected in ((of_model, model), *((of_optimizer["state"][name], s) for name, s in states["state"].items())):
                assert found.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert type(found[name]) is Tensor, name
                    torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def written(pins: dict[str, int], folder: str, what: str) -> str:
    module, batches = parallel(pins)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    trained(module, optimizer, batches)
    state = module.state_dict() if what == "model" else optimizer.state_dict()
    try:
        dcp.save({what: state}, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


@pytest.mark.parametrize("what", ["model", "optimizer"])
@pytest.mark.parametrize("plan", ["tp", "zero"])
def test_parts_are_not_written_by_its_checkpoints(pair: WorkerPool, tmp_path: Path, plan: str, what: str) -> None:
    """Each rank writes other tensors there: of different ones that lie alike the parts would be joined."""
    for said in pair.run(written, PINS[plan], str(tmp_path / "state"), what):
        assert "full_state_dict()" in said or "which all ranks do together" in said
