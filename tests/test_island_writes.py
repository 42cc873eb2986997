"""Writes at places that values choose, and operators of several results of such sizes: captured, and compared with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.run.region import REGION

pytestmark = pytest.mark.pure

Forward = Callable[[Any, Tensor, Tensor], Tensor]


class Chooses(nn.Module):
    def __init__(self, fn: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.fn = nn.Linear(8, 8), nn.Linear(8, 4), fn

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fn(self, x, y)


def number(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.first(x)
    h[torch.where(y == 0)] = 0.0
    return F.cross_entropy(m.head(h), y)


def own_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h, chosen = m.first(x).clone(), (y > 1).nonzero().squeeze(1)
    h[chosen] = h[chosen] * 2
    return F.cross_entropy(m.head(h), y)


def in_place_of_what_is_chosen(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.first(x)
    part = h[y == 1]
    part += 1.0
    part *= 2.0
    h[y == 1] += part
    return F.cross_entropy(m.head(h), y)


def read_after_it_was_written(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.first(x)
    before = h * 2
    h[torch.where(y == 2)] = 1.0
    after = h.sum(1)
    h[torch.where(y == 3)] = -1.0
    return F.cross_entropy(m.head(h), y) + (after * before.sum(1)).mean()


def through_views(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.first(x)
    h[:, :4][torch.where(y == 0)[0]] = 1.0
    h.view(3, 4, -1)[0, (y[:4] == 1).nonzero().squeeze(1)] = 0.5
    return F.cross_entropy(m.head(h), y)


def experts(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.first(x)
    weights, chosen = m.head(h).softmax(-1).topk(2, -1)
    out = torch.zeros_like(h)
    for expert in range(4):
        token, place = torch.where(chosen == expert)
        out.index_add_(0, token, torch.tanh(h[token] * (expert + 1)) * weights[token, place, None])
    return F.cross_entropy(m.head(out), y)


def largest_of_the_others(m: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(m.head(m.first(x)), y, reduction="none")
    values, _ = losses[y != 0].topk(2)
    return losses[y == 0].sum() + values.mean()


def without_gradients(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.first(x)
    with torch.no_grad():
        places = h.abs().floor().long()
        places[(places > 0) & (y[:, None] == 1)] -= 1
        with torch.enable_grad():
            h = h.clone()
            h[places == 1] *= 2.0
    return F.cross_entropy(m.head(h * (places + 1)), y)


def in_autocast(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.first(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chosen = h[y != 0]
        h = m.head(h.index_put((y != 0,), chosen * 2.0))
    return F.cross_entropy(h.float(), y)


def inside_and_outside(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.first(x)
    with torch.no_grad():
        weights = torch.ones_like(h)
        weights[y == 1] = h[y == 1].abs()
    h[torch.where(weights[:, 0] > 0.5)] += 1.0
    return F.cross_entropy(m.head(h * weights), y)


@pytest.mark.parametrize(
    "fn",
    [
        number, own_rows, in_place_of_what_is_chosen, read_after_it_was_written, through_views, experts, largest_of_the_others,
        without_gradients, in_autocast, inside_and_outside,
    ],
)  # fmt: skip
def test_writes_at_chosen_places_are_those_of_the_model(fn: Forward) -> None:
    torch.manual_seed(1)
    given = torch.randn(12, 8), torch.arange(12) % 4
    program = capture(Chooses(fn), given).program  # which is compared with the model, gradients too
    assert any(op.target == REGION for op in program.ops)
