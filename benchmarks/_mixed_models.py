"""Models of options that are mixed at random: what lies between the first layer and the head, what else they hold, what they return."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["BODIES", "CLASSES", "EXTRAS", "FORMS", "Critic", "Design", "Mixed", "design_of", "sample"]

LENGTH, FEATURES, WIDTH, CLASSES, TOKENS = 6, 8, 16, 4, 12
BODIES = ("mlp", "convolution", "attention", "recurrent", "text", "mixture")
NORMS = ("none", "layer", "batch", "group")
FORMS = ("loss", "dict", "pair", "record", "logits")
EXTRAS = (
    "tied",  # two layers share a weight
    "frozen",  # a layer does not train
    "counter",  # a buffer counts the calls in training
    "moving",  # a buffer follows the mean of activations, and is used
    "teacher",  # a frozen copy of the first layer is moved by each call in training
    "parametrized",  # the weight of a layer is made of two parameters
    "checkpointed",  # the body is computed again in backward
    "unused",  # a layer to which no call leads
    "kept",  # each call leaves its logits in an attribute
    "scaled",  # a number in an attribute, which the script changes
    "by mode",  # another formula in evaluation
    "auxiliary",  # a second head, whose loss is added
    "adapted",  # a low-rank term beside a frozen weight
    "gated",  # a parameter without dims
    "penalised",  # the loss has a term of a weight alone
    "listed",  # each call appends a number to a list
    "spectral",  # the weight of a layer is divided by its norm, which a buffer follows
    "rounded",  # activations are rounded, and gradients pass
    "reversed",  # a second head trains the body against it
    "queue",  # a buffer of the last features, to which samples are compared
    "warmed",  # a buffer of steps from which a weight of the loss follows
    "positions",  # a buffer that no state_dict has
    "contrasted",  # a loss between the samples of a batch
    "cached",  # tensors in a dict, by length
    "centred",  # features less their mean over the batch
)


@dataclass(frozen=True, slots=True)
class Design:
    """body: of BODIES. norm: of NORMS. form: what a call returns, of FORMS. extras: of EXTRAS. outputs: as of autopar.compile."""

    body: str
    norm: str
    form: str
    extras: frozenset[str]
    outputs: str


class Record(NamedTuple):
    loss: Tensor
    logits: Tensor


def design_of(rng: random.Random) -> Design:
    form = rng.choice(FORMS)
    outputs = rng.choice(("all", "trained")) if form == "logits" else rng.choice(("loss", "loss", "all", "trained"))
    extras = frozenset(rng.sample(EXTRAS, rng.choice((0, 1, 2, 2, 3, 4))))
    return Design(body=rng.choice(BODIES), norm=rng.choice(NORMS), form=form, extras=extras, outputs=outputs)


def sample(design: Design, index: int, size: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Samples [size, length, features], or tokens [size, length], and their classes [size]."""
    generator = torch.Generator().manual_seed(100 + index)
    y = torch.randint(CLASSES, (size,), generator=generator)
    if design.body == "text":
        return torch.randint(TOKENS, (size, length), generator=generator), y
    return torch.randn(size, length, FEATURES, generator=generator), y


class Mixture(nn.Module):
    """Two layers, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        weights = self.gate(h).softmax(-1)
        return torch.stack([expert(h) for expert in self.experts], -1).mul(weights.unsqueeze(-2)).sum(-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        return h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        return h + F.relu(self.across(h.transpose(1, 2))).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.cells(h)[0]


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return (4 * h).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.5 * grads[0]


class Critic(nn.Module):
    """Whether logits [batch, classes] are those of a model: [batch, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(CLASSES, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, logits: Tensor) -> Tensor:
        return self.down(F.leaky_relu(self.up(logits.softmax(-1)), 0.2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(h)))


_OF_BODY = {"mlp": Mlp, "convolution": Convolution, "attention": Attention, "recurrent": Recurrent, "text": Attention, "mixture": Mixture}


_OF_NORM: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity, "layer": lambda: nn.LayerNorm(WIDTH), "batch": lambda: nn.BatchNorm1d(WIDTH),
    "group": lambda: nn.GroupNorm(4, WIDTH),
}  # fmt: skip


class Mixed(nn.Module):
    """A classifier of sequences, after a design."""

    steps: Tensor
    mean: Tensor
    table: Tensor
    at: Tensor
    queue: Tensor

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.form, self.extras = design.form, design.extras
        self.first = nn.Embedding(TOKENS, WIDTH) if design.body == "text" else nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(_OF_BODY[design.body]() for _ in range(2))
        self.norm = _OF_NORM[design.norm]()
        self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self._hold(design.extras)

    def _hold(self, extras: frozenset[str]) -> None:
        if "tied" in extras:
            self.again = nn.Linear(WIDTH, WIDTH)
            self.again.weight = self.middle.weight
        if "frozen" in extras:
            self.first.requires_grad_(False)
        if extras & {"counter", "warmed"}:
            self.register_buffer("steps", torch.tensor(0))
        if "moving" in extras:
            self.register_buffer("mean", torch.zeros(WIDTH))
        if "teacher" in extras:
            self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        if "parametrized" in extras:
            self.turned = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        if "unused" in extras:
            self.spare = nn.Linear(WIDTH, 2)
        if "auxiliary" in extras:
            self.second = nn.Linear(WIDTH, CLASSES)
        if "adapted" in extras:
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH, 2) / 4)
        if "gated" in extras:
            self.gate = nn.Parameter(torch.tensor(0.5))
        if "spectral" in extras:
            self.bounded = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        if "reversed" in extras:
            self.domain = nn.Linear(WIDTH, 2)
        if "queue" in extras:
            self.register_buffer("queue", torch.randn(8, WIDTH))
            self.register_buffer("at", torch.tensor(0))
        if "positions" in extras:
            self.register_buffer("table", torch.arange(16 * WIDTH).view(16, WIDTH).div(WIDTH).sin(), persistent=False)
        self.scale, self.seen, self.tables = 1.0, list[float](), dict[int, Tensor]()

    def body(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def hidden(self, x: Tensor) -> Tensor:
        """[batch, width]"""
        extras = self.extras
        h = torch.tanh(self.first(x))
        if "positions" in extras:
            h = h + 0.1 * self.table[: h.size(1)]
        if "cached" in extras:
            h = h + self._of_length(h.size(1)).unsqueeze(-1)
        h = checkpoint(self.body, h, use_reentrant=False) if "checkpointed" in extras and self.training else self.body(h)
        h = self.norm(h.mean(1))
        h = torch.tanh(self.middle(h))
        if "tied" in extras:
            h = h + self.again(h)
        if "moving" in extras:
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(h.mean(0), 0.1)
            h = h - self.mean
        if "teacher" in extras:
            if self.training:
                with torch.no_grad():
                    self.teacher.weight.lerp_(self.middle.weight, 0.2)
            h = h + 0.1 * self.teacher(h.detach())
        if "parametrized" in extras:
            h = self.turned(h)
        if "spectral" in extras:
            h = self.bounded(h)
        if "rounded" in extras:
            h = Rounded.apply(h)
        if "centred" in extras:
            h = h - h.mean(0, keepdim=True)
        if "adapted" in extras:
            h = h + self.base(h) + h @ self.a.T @ self.b.T
        if "gated" in extras:
            h = h * self.gate
        if "by mode" in extras and not self.training:
            h = h.clamp(-1, 1)
        return h * self.scale if "scaled" in extras else h

    def _of_length(self, length: int) -> Tensor:
        if length not in self.tables:
            self.tables[length] = torch.linspace(-0.2, 0.2, length)
        return self.tables[length]

    def _more(self, h: Tensor, y: Tensor) -> Tensor:
        """What is added to the loss."""
        more = h.new_zeros(())
        if "auxiliary" in self.extras:
            more = more + 0.3 * F.cross_entropy(self.second(h), y)
        if "penalised" in self.extras:
            more = more + 0.01 * self.middle.weight.square().sum()
        if "reversed" in self.extras:
            more = more + F.cross_entropy(self.domain(Reversed.apply(h)), y % 2)
        if "contrasted" in self.extras:
            z = F.normalize(h, dim=-1)
            more = more + 0.1 * F.cross_entropy(5 * z @ z.T, torch.arange(len(z)))
        if "queue" in self.extras:
            more = more + 0.05 * (F.normalize(h, dim=-1) @ F.normalize(self.queue, dim=-1).T).exp().mean()
            if self.training:
                with torch.no_grad():
                    self.queue[self.at % 8] = h.mean(0)
                    self.at += 1
        if "warmed" in self.extras:
            more = more * (self.steps + 1).clamp(max=4) / 4
        return more

    def forward(self, x: Tensor, y: Tensor | None = None, smoothing: float = 0.0, weights: Tensor | None = None) -> Any:
        h = self.hidden(x)
        logits = self.head(h)
        if self.extras & {"counter", "warmed"} and self.training:
            self.steps += 1
        if "kept" in self.extras:
            self.last = logits.detach()
        if "listed" in self.extras:
            self.seen.append(float(logits.detach().abs().mean()))
        if self.form == "logits" or y is None:
            return logits
        each = F.cross_entropy(logits, y, label_smoothing=smoothing, reduction="none")
        loss = (each if weights is None else each * weights).mean() + self._more(h, y)
        return {"loss": loss, "dict": {"loss": loss, "logits": logits}, "pair": (loss, logits), "record": Record(loss, logits)}[self.form]
