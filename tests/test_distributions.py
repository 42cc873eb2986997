"""torch.distributions in a forward: densities, entropies, and samples through which gradients go."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as d
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import Captured, capture
from autopar.draws import drawn_names
from autopar.errors import UnsupportedOp
from autopar.run import WorkerPool
from autopar.run.region import REGION
from autopar.verify import verify

Made = Callable[[Tensor, Tensor], d.Distribution]


class Policy(nn.Module):
    """Bounds the density of what it draws, as a policy gradient does."""

    def __init__(self, makes: Made) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4)
        self.makes = makes

    def forward(self, x: Tensor, advantage: Tensor) -> Tensor:
        policy = self.makes(self.first(x), self.second(x))
        drawn = policy.rsample() if policy.has_rsample else policy.sample()
        with torch.no_grad():
            kept = drawn.clamp(0.01, 0.99) if isinstance(policy, d.Beta) else drawn
        density = policy.log_prob(kept).reshape(len(x), -1).sum(1)
        gradient = drawn.square().mean() if policy.has_rsample else 0.0
        return (gradient - (density * advantage).mean()) * 0.1


def normal(a: Tensor, b: Tensor) -> d.Distribution:
    return d.Independent(d.Normal(a, F.softplus(b) + 0.1), 1)


def squashed(a: Tensor, b: Tensor) -> d.Distribution:
    return d.TransformedDistribution(d.Normal(a, F.softplus(b) + 0.1), [d.TanhTransform(cache_size=1)])


def beta(a: Tensor, b: Tensor) -> d.Distribution:
    return d.Beta(F.softplus(a) + 1, F.softplus(b) + 1)


def dirichlet(a: Tensor, b: Tensor) -> d.Distribution:
    return d.Dirichlet(F.softplus(a + b) + 1)


def gamma(a: Tensor, b: Tensor) -> d.Distribution:
    return d.Gamma(F.softplus(a) + 1, F.softplus(b) + 1)


def categorical(a: Tensor, b: Tensor) -> d.Distribution:
    return d.Categorical(logits=a + b)


def relaxed(a: Tensor, b: Tensor) -> d.Distribution:
    return d.RelaxedOneHotCategorical(torch.tensor(0.5, dtype=a.dtype), logits=a + b)


def bernoulli(a: Tensor, b: Tensor) -> d.Distribution:
    return d.Bernoulli(logits=a + b)


def mixture(a: Tensor, b: Tensor) -> d.Distribution:
    return d.MixtureSameFamily(d.Categorical(logits=a), d.Normal(b, torch.ones_like(b)))


def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 6, generator=generator), "advantage": torch.randn(8, generator=generator)}


def captured(makes: Made) -> Captured:
    return capture(Policy(makes), inputs())  # which compares loss and gradients


@pytest.mark.pure
@pytest.mark.parametrize("makes", [normal, squashed, gamma, categorical, relaxed, bernoulli, mixture])
def test_is_a_graph_of_operators(makes: Made) -> None:
    assert not any(op.target == REGION for op in captured(makes).program.ops)


@pytest.mark.pure
@pytest.mark.parametrize("makes", [beta, dirichlet])
def test_draws_whose_operator_has_no_gradient_are_one_operator(makes: Made) -> None:
    (region,) = (op for op in captured(makes).program.ops if op.target == REGION)
    assert region.module == "_Dirichlet"


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2, "tp": 2}, {"dp": 4, "zero": 3}], ids=str)
@pytest.mark.parametrize("makes", [squashed, relaxed])
def test_equals_the_original(makes: Made, pins: dict[str, Any], workers: WorkerPool) -> None:
    report = verify(Policy(makes), inputs(), 4, pins=pins, steps=2, pool=workers)
    assert report.ok, report


@pytest.mark.pure
def test_draws_through_which_gradients_go_cannot_be_given_to_a_program() -> None:
    with pytest.raises(UnsupportedOp, match="_standard_gamma"):
        drawn_names(captured(gamma))


class ActorCritic(nn.Module):
    """Returns the distribution of actions, and the value of each state."""

    def __init__(self, makes: Made) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.value = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 1)
        self.makes = makes

    def forward(self, x: Tensor) -> tuple[d.Distribution, Tensor]:
        return self.makes(self.first(x), self.second(x)), self.value(x).squeeze(1)


def of_several(a: Tensor, b: Tensor) -> d.Distribution:
    return d.MultivariateNormal(a, scale_tril=torch.diag_embed(F.softplus(b) + 0.5))


def of_probabilities(a: Tensor, b: Tensor) -> d.Distribution:
    return d.Categorical(F.softmax(a + b, dim=-1))


ALL = (normal, squashed, beta, of_probabilities, mixture, of_several)


def learned(makes: Made, pins: dict[str, Any] | None) -> list[float]:
    """Losses that the loop makes of what it draws, of batches of two sizes."""
    raw, x = ActorCritic(makes), inputs()["x"]
    model = raw if pins is None else autopar.compile(raw, gpus=4, cluster="cpu", pins=pins)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        policy, value = model(x if step != 1 else x[:4])
        torch.manual_seed(step)
        with torch.no_grad():
            actions = policy.sample()
            actions = actions.clamp(0.05, 0.95) if makes is beta else actions
        density = policy.log_prob(actions).reshape(len(value), -1).sum(1)
        loss = value.square().mean() - (density * value.detach()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def learned_all(pins: dict[str, Any] | None) -> list[float]:
    return [loss for makes in ALL for loss in learned(makes, pins)]


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_a_model_may_return_one(pins: dict[str, Any], workers: WorkerPool) -> None:
    found = workers.run(functools.partial(learned_all, pins))
    assert found == [pytest.approx(learned_all(None), rel=1e-5)] * 4
