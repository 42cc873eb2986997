"""A small mixture of experts whose rows are sorted by expert, as transformers' are, and put back in several ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers.integrations.moe  # noqa: F401  which registers the grouped product
from torch import Tensor, nn

ROWS, WIDTH, EXPERTS, EACH = 8, 4, 3, 2


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)


def put_back(y: Tensor, order: Tensor, owners: Tensor, x: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0))
    return y[inverse].view(-1, EACH, WIDTH).sum(1)


def sorted_back(y: Tensor, order: Tensor, owners: Tensor, x: Tensor) -> Tensor:
    return y[torch.argsort(order)].view(-1, EACH, WIDTH).sum(1)


def added_up(y: Tensor, order: Tensor, owners: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, owners, y)


class Experts(nn.Module):
    """A mixture of experts over sorted rows. back: how rows are put back; between: what is done with them in their order."""

    def __init__(
        self, back: Callable[..., Tensor] = put_back, between: Callable[..., Tensor] | None = None, *, descending: bool = False,
        top: int = EXPERTS - 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.back, self.between, self.descending, self.top = back, between, descending, top

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.mixed(x), y, reduction="sum")

    def mixed(self, x: Tensor) -> Tensor:
        chosen, weight = self.route(x)
        keys, order = torch.sort(chosen.reshape(-1), descending=self.descending)
        owners = order // EACH
        rows, share = x[owners], weight.reshape(-1)[order]
        ends = torch.cumsum(torch.histc(keys.float(), bins=EXPERTS, min=0, max=self.top), 0, dtype=torch.int32)
        up, gate = (_grouped(rows, self.up, ends) + self.bias[keys]).chunk(2, dim=-1)
        out = self.norm(_grouped(up * torch.tanh(gate), self.down, ends)) * share.unsqueeze(-1)
        if self.between is not None:
            out = self.between(out, order, share)
        return self.back(out, order, owners, x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, chosen = torch.topk(self.router(x).softmax(-1), EACH)
        return chosen, weight


class Mixture(nn.Module):
    """Two of them, one after the other, in a batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(added_up), Experts()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        rows = rows + self.first.mixed(rows)
        rows = rows + self.second.mixed(torch.tanh(rows))
        return nn.functional.mse_loss(rows.view_as(y), y)
