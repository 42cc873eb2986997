"""Other names of a parameter's memory: views, arrays, gradients that are kept, tensors that were given in its place."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import autopar
from autopar.run import WorkerPool
from autopar.run.parts import Part, PartTensor
from tests import wrong_models as models

pytestmark = pytest.mark.gloo

PLANS: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "pp": {"pp": 2}, "zero3": {"dp": 2, "zero": 3}}


def batch() -> tuple[Tensor, Tensor]:
    x, y = models.batch(16, 0)
    return x.double(), y


def compiled(pins: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return autopar.compile(models.model().double(), gpus=2, example_inputs=batch(), cluster="cpu", pins=pins)


def matrix(model: Any) -> Any:
    return next(p for p in model.parameters() if p.dim() == 2)


def _views(pins: dict[str, Any]) -> None:
    model = compiled(pins)
    weight = matrix(model)
    before = weight.detach().clone().cpu()
    view = weight.data[1]
    for row in weight.data:
        row.mul_(2.0)
    assert torch.equal(weight.detach().cpu(), before * 2)
    with pytest.raises(TypeError, match="taken before the parameter changed"):
        view.sum()
    view = weight.detach().t()[:, 1]
    assert torch.equal(pickle.loads(pickle.dumps(view)), before[1] * 2)
    assert torch.equal(copy.deepcopy(view), before[1] * 2) and type(copy.deepcopy(view)) is Tensor
    torch.save({"row": view}, buffer := io.BytesIO())
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue()))["row"], before[1] * 2)
    with pytest.raises(TypeError, match=r"nn.Parameter of a view of .*Give it a copy: tensor.clone\(\)"):
        nn.Parameter(view)
    assert type(nn.Parameter(view.clone())) is nn.Parameter
    with pytest.raises(RuntimeError, match="leaf Variable"):
        weight[0].mul_(2.0)


def _arrays(pins: dict[str, Any]) -> None:
    weight = matrix(compiled(pins))
    for array in (weight.detach().numpy(), weight.data[1].numpy(), weight.data.cpu().numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array += 1.0
        array.copy()[...] = 0.0


def _data(pins: dict[str, Any]) -> None:
    model = compiled(pins)
    weight = matrix(model)
    with pytest.raises(ValueError, match=r"was compiled in torch.float64 and cannot become torch.float32"):
        weight.data = weight.data.float()
    before = weight.detach().clone()
    held, row = weight.detach(), weight.data[0]
    weight.data = torch.full(weight.shape, 0.25, dtype=torch.float64)
    assert torch.equal(held.cpu(), before.cpu()) and torch.equal(row, before.cpu()[0])
    held.zero_()
    assert weight.mean().item() == pytest.approx(0.25)
    weight.data = weight.data.to(torch.float64)  # its own memory
    weight.data.mul_(2.0)
    assert weight.mean().item() == pytest.approx(0.5)
    other = [p for p in model.parameters() if p is not weight and p.dim() == 2][0]
    assert weight.data_ptr() != other.data_ptr() and weight.data_ptr() == weight.detach().data_ptr()
    plain = torch.zeros(weight.shape, dtype=torch.float64)
    plain.data = plain.data + weight.data
    assert type(plain) is Tensor and plain.shape == weight.shape and plain.mean().item() == pytest.approx(0.5)


def _given(pins: dict[str, Any]) -> None:
    model = compiled(pins)
    weight = matrix(model)
    flat = torch.zeros(weight.numel() + 3, dtype=torch.float64)
    weight.data = flat[3:].view(weight.shape)
    model(*batch())
    flat.add_(1.0)
    with pytest.raises(ValueError, match=r"\.data was given a tensor that has been written to since"):
        model(*batch())
    weight.data = flat[3:].view(weight.shape)
    loss = model(*batch())
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradient = torch.ones(weight.shape, dtype=torch.float64)
    weight.grad = gradient
    gradient.mul_(2.0)
    with pytest.raises(ValueError, match=r"\.grad was given a tensor that has been written to since"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    weight.data = gradient.clone()
    model(*batch())


def _kept(pins: dict[str, Any]) -> None:
    model = compiled(pins)
    weight = matrix(model)
    model(*batch()).backward()
    kept = weight.grad
    norm = kept.norm().item()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert type(kept) is PartTensor and kept.norm().item() == norm
    seen: list[float] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(type(weight) is Part and weight.norm().item())),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(type(weight) is Part and weight.norm().item())),
    ]
    try:
        before = weight.norm().item()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [before, weight.norm().item()] and seen[0] != seen[1]


@pytest.mark.parametrize("job", [_views, _arrays, _data, _given, _kept])
@pytest.mark.parametrize("plan", list(PLANS))
def test_names_of_one_memory(pair: WorkerPool, plan: str, job: Callable[[dict[str, Any]], None]) -> None:
    pair.run(job, PLANS[plan], timeout_s=120)
