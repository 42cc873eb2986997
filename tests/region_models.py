"""Models with a submodule that no graph holds: sizes in it depend on values."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, HIDDEN, CLASSES, EXPERTS = 8, 6, 16, 12, 3


class Routed(nn.Module):
    """Experts that compute the tokens which a router sends them; capacity: the most that each takes; careful: weights in float32."""

    def __init__(self, capacity: int | None = None, noise: bool = False, careful: bool = False) -> None:
        super().__init__()
        self.router, self.capacity, self.noise, self.careful = nn.Linear(HIDDEN, EXPERTS), capacity, noise, careful
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens) + (torch.randn(len(tokens), EXPERTS) if self.noise else 0)
        shares = logits.softmax(-1, dtype=torch.float32).to(x.dtype) if self.careful else logits.softmax(-1)
        weights, chosen = shares.topk(2, -1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, places = torch.nonzero(chosen == index, as_tuple=True)
            rows, places = rows[: self.capacity], places[: self.capacity]
            if len(rows):
                out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, places].unsqueeze(-1))
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.norm, self.mix, self.routed = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), Routed(**options)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(self.norm(x)))
        return x + self.routed(x)


class Mixture(nn.Module):
    def __init__(self, layers: int = 2, **options: object) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(CLASSES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(layers))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Messages(nn.Module):
    """Along the edges of a graph, which are selected by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.scale = nn.Linear(2 * HIDDEN, HIDDEN), nn.Parameter(torch.ones(HIDDEN))

    def forward(self, nodes: Tensor, near: Tensor) -> Tensor:
        source, target = (near > 0.5).nonzero(as_tuple=True)
        sent = torch.relu(self.message(torch.cat([nodes[source], nodes[target]], -1))) * self.scale
        return nodes.new_zeros(nodes.shape).index_add(0, target, sent)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(5, HIDDEN), nn.Linear(HIDDEN, 3)
        self.passes = nn.ModuleList(Messages() for _ in range(2))

    def forward(self, nodes: Tensor, near: Tensor, y: Tensor) -> Tensor:
        x = self.inside(nodes)
        for one in self.passes:
            x = x + one(x, near)
        return F.cross_entropy(self.outside(x), y)


class Merge(nn.Module):
    """Frames of sound take the places of a marked token."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(5, HIDDEN)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x: Tensor, ids: Tensor, *, sound: dict[str, Tensor]) -> tuple[Tensor, None]:
        marked = ids == CLASSES - 1
        count = int(marked.sum())
        frames = (self.project(sound["frames"]) * self.gain).flatten(0, 1)[:count]
        return x.masked_scatter(marked.unsqueeze(-1).expand_as(x), frames), None


class Speech(nn.Module):
    """The head is the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.merge, self.mix = nn.Embedding(CLASSES, HIDDEN), Merge(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor, frames: Tensor, y: Tensor) -> Tensor:
        x, _ = self.merge(self.tokens(ids), ids, sound={"frames": frames})
        return F.cross_entropy((x + torch.tanh(self.mix(x))).flatten(0, 1) @ self.tokens.weight.T, y.flatten())


class Select(nn.Module):
    """Works on the rows of positive sum, with a weight that is the model's too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        out, positive = torch.zeros_like(x), x.sum(-1) > 0
        out[positive] = x[positive] @ self.weight.T.softmax(-1) @ self.weight
        return out


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(CLASSES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.select = Select(self.tokens.weight)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        x = self.tokens(ids)
        return F.cross_entropy(self.head(x + self.select(self.select(x))).flatten(0, 1), y.flatten())


class Tied(nn.Module):
    """What no graph holds has a parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Tied()

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(ids).flatten(0, 1), y.flatten())


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(CLASSES, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        padding: Tensor | None = ids == 0
        assert padding is not None
        x = torch.tanh(self.mix(self.tokens(ids)))
        if not (padding & x.isfinite().all(-1)).any():
            padding = None
        return self.head(x if padding is None else x.masked_fill(padding.unsqueeze(-1), 0.0))


class CachingConfig:
    use_cache = True


class Caching(nn.Module):
    """What no graph holds returns keys too where its configuration says so, as decoders of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CachingConfig()
        self.config.use_cache = True
        self.inner, self.head = _Caching(self.config), nn.Linear(HIDDEN, CLASSES)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inner(ids)[0]).flatten(0, 1), y.flatten())


class _Caching(nn.Module):
    def __init__(self, config: CachingConfig) -> None:
        super().__init__()
        self.config, self.tokens, self.mix = config, nn.Embedding(CLASSES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        padding = ids == 0
        x = self.tokens(ids)
        if (padding & x.isfinite().all(-1)).any():
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        keys = self.mix(x)
        return (torch.tanh(keys), keys.detach()) if self.config.use_cache else (torch.tanh(keys),)


class Cut(nn.Module):
    """Its outermost forward asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * (2 if x[0, 0] > 0 else 3)).square().mean()


class _Nearest(nn.Module):
    """Holds another module without being its parent."""

    def __init__(self, table: nn.Linear) -> None:
        super().__init__()
        self.held = [table]

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(-1)
        return x.index_add(0, rows, self.held[0](x[rows]).detach()) if len(rows) else x


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 4)
        self.inner = _Nearest(self.table)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.inner(x)).square().mean()


class Counting(nn.Module):
    """A region that would count in an attribute."""

    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.seen = 0

        def forward(self, x: Tensor) -> Tensor:
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            self.seen += len(rows)
            return torch.zeros_like(x).index_add(0, rows, self.inner(x[rows]))

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.count = nn.Linear(4, 4), self.Count()

    def forward(self, x: Tensor) -> Tensor:
        return self.count(self.outer(x)).square().mean()


def tokens(batch: int = BATCH) -> dict[str, Tensor]:
    return {"ids": torch.randint(CLASSES, (batch, LENGTH)), "y": torch.randint(CLASSES, (batch, LENGTH))}


def nodes() -> dict[str, Tensor]:
    return {"nodes": torch.randn(8, 5), "near": torch.rand(8, 8), "y": torch.randint(3, (8,))}


def speech() -> dict[str, Tensor]:
    return {**tokens(), "frames": torch.randn(BATCH, LENGTH, 5)}


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return -0.5 * grad


class Reversal(nn.Module):
    """Gives gradients on with another sign."""

    def forward(self, x: Tensor) -> Tensor:
        reversed_: Tensor = _Reversed.apply(x)
        return reversed_


class Clamped(nn.Linear):
    """Clamps the gradient of what it makes."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if made.requires_grad:
            made.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return made


class Packed(nn.Module):
    """A classifier of sequences [batch, length] of different lengths, without a loss: nothing but its own forward packs them. clipped: by
    the largest number of the batch."""

    def __init__(self, clipped: bool = False) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(CLASSES, HIDDEN), nn.LSTM(HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
        self.head, self.clipped = nn.Linear(2 * HIDDEN, CLASSES), clipped

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.table(ids)
        if self.clipped and float(x.detach().abs().max()) > 5:
            x = x * (5 / x.detach().abs().max())
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        made: Tensor = self.head(self.layer(packed)[1][0].transpose(0, 1).flatten(1))
        return made


def sequences() -> tuple[Tensor, Tensor]:
    return torch.randint(CLASSES, (BATCH, LENGTH)), 1 + torch.arange(BATCH) % LENGTH


class _Sine(torch.autograd.Function):
    """Computed by numpy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(numpy.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.from_numpy(numpy.cos(ctx.saved_tensors[0].numpy()))


class _Linear(torch.autograd.Function):
    """A linear map whose weight learns at a part of the rate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rate = rate
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, ctx.rate * grad.flatten(0, -2).T @ x.flatten(0, -2), None


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(_Sine.apply(self.up(x)))
        return made


class Functions(nn.Module):
    """Autograd functions of its own, in its layers and in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(CLASSES, HIDDEN), nn.ModuleList(Waves() for _ in range(3))
        self.head = nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.table(ids))
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(_Linear.apply(hidden, self.head.weight, 0.5).flatten(0, 1), y.flatten())


class Adversarial(nn.Module):
    """Gradients of its own: two of its parts have some; itself: one of them is in its own forward."""

    def __init__(self, itself: bool = False) -> None:
        super().__init__()
        self.table, self.inner, self.reversal, self.itself = nn.Embedding(CLASSES, HIDDEN), Clamped(HIDDEN, HIDDEN), Reversal(), itself
        self.head, self.domain = nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, 2)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(self.table(ids)))
        opposed = _Reversed.apply(hidden) if self.itself else self.reversal(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())
        return loss + F.cross_entropy(self.domain(opposed).flatten(0, 1), y.flatten() % 2)
