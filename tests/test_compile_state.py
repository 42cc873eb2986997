"""`autopar.compile` of models whose forward assigns buffers: on two workers they have, step for step, the losses, parameters and
buffers of one process; what capture cannot follow is refused on every rank before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import compiler
from autopar.capture import capture
from autopar.render import load
from autopar.run import ParallelModule, WorkerPool
from autopar.variants import tensors_of

pytestmark = pytest.mark.gloo

BATCH, WIDTH, CLASSES = 16, 8, 4
TOLERANCE = 1e-12  # relative, in float64
PLANS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}]


class Centred(nn.Module):
    """Subtracts a running mean of what it was given, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.linear(x))
        y = h * (1 + self.mean) - self.mean  # the old value: backward needs it too
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * h.mean(0)
            self.calls = self.calls + 1
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Centred() for _ in range(4))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("usage", torch.zeros(CLASSES))
        self.register_buffer("previous", torch.zeros(CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        logits = self.last(x) - 0.1 * self.previous
        self.usage, self.previous = self.usage + F.one_hot(y, CLASSES).sum(0), logits.detach().mean(0)
        return F.cross_entropy(logits, y)


class Normaliser(nn.Module):
    """Keeps a running scale of the inputs alone, registered anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, CLASSES))
        self.register_buffer("scale", torch.ones(WIDTH), persistent=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.register_buffer("scale", self.scale.lerp(x.abs().mean(0), 0.2))
        return F.cross_entropy(self.net(x / self.scale), y)


MODELS = {"net": Net, "normaliser": Normaliser}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def on_two(name: str, pins: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    parallel = autopar.compile(build(name), gpus=2, example_inputs=batch(9), cluster="cpu", pins=pins)
    return train(parallel), parallel.full_state_dict()


@pytest.mark.parametrize("pins", PLANS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_assigned_buffers_are_those_of_one_process(pair: WorkerPool, name: str, pins: dict[str, Any]) -> None:
    model = build(name)
    losses, state = train(model), model.state_dict()
    for found, parallel_state in pair.run(on_two, name, pins, timeout_s=120):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert parallel_state.keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(parallel_state[key], value, rtol=1e-9, atol=1e-11)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls.append(len(x))
        return super().forward(x, y) * len(self.calls)


class Writing(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x[:, 0] = 0
        return super().forward(x, y)


def refusal(kind: str, pins: dict[str, Any]) -> str:
    """What compiling says to a forward that counts its calls, and to one that writes to its input."""
    model: nn.Module = {"counting": Counting, "writing": Writing}[kind]().double()
    try:
        autopar.compile(model, 2, example_inputs=batch(0), cluster="cpu", pins=pins)
    except autopar.CaptureError as e:
        return str(e)
    return "compiled"


@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_other_state_is_refused_on_every_rank(pair: WorkerPool, pins: dict[str, Any]) -> None:
    refused = {
        "counting": "calls from list of 2 to list of 3",
        "writing": "writes to its input x",
    }
    for kind, says in refused.items():
        for said in pair.run(refusal, kind, pins, timeout_s=60):
            assert says in said


def with_regularisation(pins: dict[str, Any], held: bool) -> tuple[list[float], dict[str, Tensor]]:
    """held: the loss reaches the parameters by a list that was made before compiling."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    params = list(model.parameters())
    weights = torch.linspace(0.5, 1.5, BATCH, dtype=torch.float64)[:, None]
    x = (batch(3)[0],)

    def loss(out: Tensor) -> Tensor:
        return (out * weights).pow(2).mean() + 1e-2 * sum(p.pow(2).sum() for p in (params if held else model.parameters()))  # type: ignore[return-value]

    def losses_of(step: Any, module: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            value = step(*x)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
        return found

    if not pins:
        return losses_of(lambda x: loss(model(x)), model), dict(model.state_dict())
    parallel = autopar.compile(model, gpus=2, example_inputs=x, cluster="cpu", pins=pins, loss=loss)
    return losses_of(parallel, parallel), parallel.full_state_dict()


@pytest.mark.parametrize("held", [False, True], ids=["of the model", "of a list"])
@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_a_loss_over_the_models_parameters_and_weights_of_samples(pair: WorkerPool, pins: dict[str, Any], held: bool) -> None:
    losses, state = with_regularisation({}, held)
    for found, parallel_state in pair.run(with_regularisation, pins, held, timeout_s=60):
        assert found == pytest.approx(losses, rel=1e-9)
        for key, value in state.items():
            torch.testing.assert_close(parallel_state[key], value, rtol=1e-9, atol=1e-11)


class Penalised(nn.Module):
    """Adds a penalty on parameters that it holds in a list, as recommenders do; of one that is frozen by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.last.weight.requires_grad_(False)
        self.penalised = [(list(self.first.parameters()), 1e-2), ([self.last.weight], 1e-3)]

    def forward(self, x: Tensor) -> Tensor:
        loss = self.last(torch.tanh(self.first(x))).square().mean() + self.penalised[1][0][0].data.norm()
        return loss + sum(by * w.square().sum() for weights, by in self.penalised for w in weights) + torch.cat(self.penalised[1][0]).sum()


def penalised(pins: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Called as the attribute that the forward reads: what this function uses of autopar is none of the forward's."""
    torch.manual_seed(0)
    model, x = Penalised().double(), batch(0)[0]
    step: Any = autopar.compile(model, gpus=2, example_inputs=(x,), cluster="cpu", pins=pins) if pins else model
    optimizer, losses = torch.optim.SGD(step.parameters(), lr=0.1), []
    for _ in range(3):
        loss = step(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {k: v.detach().clone() for k, v in (step.full_state_dict() if pins else model.state_dict()).items()}


@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_a_penalty_on_parameters_in_a_list(pair: WorkerPool, pins: dict[str, Any]) -> None:
    losses, state = penalised({})
    for found, parallel_state in pair.run(penalised, pins, timeout_s=60):
        assert found == pytest.approx(losses, rel=1e-9)
        for key, value in state.items():
            torch.testing.assert_close(parallel_state[key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.pure
def test_parameters_in_a_list_of_the_models_are_its_own() -> None:
    program = capture(Penalised(), (torch.randn(BATCH, WIDTH),)).program  # which compares loss and gradients
    assert not program.buffers or all(b.fqn is not None for b in program.buffers)


@pytest.mark.pure
def test_a_buffer_of_two_names_stays_one_on_another_device() -> None:
    """As on a GPU, where the tensors of the original are not those that the model computes with."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("mean", torch.ones(WIDTH))
            self.inner.register_buffer("mean", self.mean)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) - self.mean * self.inner.mean).square().sum()

    model = Shared()
    compiled = compiler.build(
        model, (torch.randn(BATCH, WIDTH),), 1, loss=None,
        decide=lambda captured: compiler.plan_of(captured, 1, cluster="cpu"), outputs=None, dtype=None,
    )  # fmt: skip
    elsewhere = Shared()
    elsewhere.mean = elsewhere.inner.mean = torch.ones(WIDTH, device="meta")
    made = ParallelModule(load(compiled.source), tensors_of(compiled.captured), original=elsewhere, device="cpu")
    assert [b.device.type for b in made.buffers()] == ["cpu"] and set(made.state_dict()) == set(model.state_dict())
    assert elsewhere.mean is elsewhere.inner.mean
    made.inner.mean = torch.ones(WIDTH)
    with pytest.raises(ValueError, match=r"buffers mean, inner.mean were one tensor when the model was compiled.*\(copy_\)"):
        made(torch.randn(BATCH, WIDTH))


@pytest.mark.pure
def test_hooks_are_told_of_gradients_alone() -> None:
    """One process: a parameter is plain, and torch would tell its hooks of what no gradient comes to."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

        def forward(self, x: Tensor, k: int) -> Tensor:
            return self.heads[k](x).square().sum()

    x = torch.randn(BATCH, WIDTH)
    model = autopar.compile(Heads(), 1, cluster="cpu", example_inputs=(x, 0))
    seen: list[int] = []
    for k, head in enumerate(model.heads):
        head.weight.register_hook(lambda grad, k=k: seen.append(k) or grad * 0)
    model(x, 1).backward()
    assert seen == [1] and model.heads[0].weight.grad is None and not model.heads[1].weight.grad.any()
