"""Buffers that become what no operator of the model makes: an input, a constant, another buffer; or what follows from inputs alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import BATCH, CLASSES, HIDDEN, WIDTH, Compile, Net, Results, batch, program, seeded, state, train, trained


class _Held(Net):
    """Has a buffer of the size of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(BATCH, WIDTH))


class _LastBatch(_Held):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x + 0.1 * self.last), y)
        self.last.copy_(x)
        return loss


@program("state")
def buffer_becomes_the_last_batch(compile: Compile) -> Results:
    """And the next call reads it."""
    return trained(compile(seeded(_LastBatch), example_inputs=batch()), steps=4)


class _OfInputsAtTheEnd(_Held):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(CLASSES))
        self.register_buffer("codes", torch.zeros(BATCH, dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x + 0.1 * self.last), y)
        self.last = 2 * x
        self.seen.add_(F.one_hot(y, CLASSES).sum(0))
        self.codes.copy_(2 * y)
        return loss


@program("state")
def buffers_of_inputs_written_at_the_end(compile: Compile) -> Results:
    """No parameter has to do with what is written behind the last layer."""
    return trained(compile(seeded(_OfInputsAtTheEnd), example_inputs=batch()), steps=4)


class _Others(Net):
    def __init__(self) -> None:
        super().__init__()
        for name in ("constant", "number", "other", "weight", "first_of_two"):
            self.register_buffer(name, torch.zeros(CLASSES))
        self.register_buffer("second_of_two", torch.arange(float(CLASSES)))
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x) + 0.01 * self.other, y)
        self.constant.copy_(self.scale)
        self.number.data.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]))
        self.other.copy_(self.second_of_two)
        self.weight.copy_(self.head.bias.detach())
        self.first_of_two, self.second_of_two = self.second_of_two, self.first_of_two
        return loss


@program("state")
def buffers_become_one_another(compile: Compile) -> Results:
    """A constant, numbers, another buffer, a weight; two that change places."""
    return trained(compile(seeded(_Others), example_inputs=batch()), steps=4)


class _Codes(nn.Module):
    """A codebook of averages that begins as the first states, which a flag says."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("initialized", torch.tensor([False]))
        self.register_buffer("codes", torch.zeros(count, HIDDEN))
        self.register_buffer("sums", torch.zeros(count, HIDDEN))
        self.register_buffer("sizes", torch.zeros(count))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and not self.initialized:
            self.codes.data.copy_(hidden[: self.count].detach())
            self.sums.data.copy_(hidden[: self.count].detach())
            self.sizes.data.fill_(1.0)
            self.initialized.data.copy_(torch.tensor([True]))
        nearest = torch.cdist(hidden, self.codes).argmin(-1)
        found = F.embedding(nearest, self.codes)
        if self.training:
            chosen = F.one_hot(nearest, self.count).type(hidden.dtype)
            self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(chosen.T @ hidden.detach(), alpha=0.1)
            self.codes.data.copy_(self.sums / self.sizes[:, None])
        return hidden + (found - hidden).detach(), F.mse_loss(hidden, found.detach())


class _Coded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.codebook = _Codes()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, distance = self.codebook(self.hidden(x))
        return F.cross_entropy(self.head(hidden), y) + 0.25 * distance


@program("state")
def codes_that_begin_as_the_first_states(compile: Compile) -> Results:
    """As vector quantisation does it."""
    model = compile(seeded(_Coded), example_inputs=batch())
    losses = train(model, steps=4)
    model.eval()
    return {"losses": losses, "evaluated": model(*batch(6)).item(), "state": state(model)}


class _Noise(Net):
    """Keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(CLASSES))
        self.register_buffer("mask", torch.zeros(BATCH, CLASSES))

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x) * self.mask + self.noise, y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.noise.copy_(torch.randn(CLASSES))
        self.mask = (torch.rand(BATCH, CLASSES) < 0.5).to(x.dtype)
        return self.loss_of(x, y)


@program("random")
def buffers_become_what_is_drawn(compile: Compile) -> Results:
    """The loss is the one that the buffers explain."""
    model, plain = compile(seeded(_Noise), example_inputs=batch()), seeded(_Noise)
    errors = []
    for index in range(3):
        loss = model(*batch(index))
        plain.load_state_dict(state(model))
        errors.append(round(abs(plain.loss_of(*batch(index)).item() - loss.item()), 9))
    return {"errors": errors, "drawn": bool(plain.noise.std() > 0)}


class _TwoViews(nn.Module):
    """Norms in an encoder and a predictor that are called twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN, affine=False)
        )
        self.head = nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.encoder(x), self.encoder(y)
        return -F.cosine_similarity(self.head(a), b.detach()).mean() - F.cosine_similarity(self.head(b), a.detach()).mean()


@program("state", plans=("dp2pp2",))
def norms_of_two_views(compile: Compile) -> Results:
    """Wherever the model is cut into stages."""

    def views(index: int) -> tuple[Tensor, Tensor]:
        return batch(index)[0], batch(index + 10)[0]

    return trained(compile(seeded(_TwoViews), example_inputs=views(0)), inputs=[views(i) for i in range(3)])
