"""More of what published training scripts do that was wrong, or ended them, when they were first run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, WIDTH, Compile, Logits, Results, batch, program, samples, seeded, sgd, state, train

KIND = "scripts"


class _Sampler(Logits):
    """Makes samples by a method of its own."""

    @torch.inference_mode()
    def sample(self, steps: int) -> Tensor:
        self.eval()
        found = torch.ones(3, WIDTH)
        for _ in range(steps):
            found = found + F.pad(self.logits(found), (0, WIDTH - 4)) + self.first.weight.sum() + self.first.weight[:, :1].sum()
        return found


@program(KIND)
def sampled_in_inference_mode(compile: Compile) -> Results:
    """As diffusion models sample: a method with the decorator torch.inference_mode, between steps."""
    model, found = compile(seeded(_Sampler)), []
    optimizer = sgd(model)
    for _ in range(2):
        losses = train(lambda x, y: F.cross_entropy(model(x), y), optimizer, steps=2)
        found.append(model.sample(3) + 0.0)
        model.train()
    return {"losses": losses, "found": found, "state": state(model)}


class _Flagged(Logits):
    """Has attributes under names that a parallel module has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.debug, self.device, self.plan, self.mesh = False, "cpu", 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        found = super().forward(x) * self.plan * self.mesh
        return found + 1.0 if self.debug or self.device != "cpu" else found


@program(KIND)
def attributes_of_the_same_names(compile: Compile) -> Results:
    """What the loop sets on the model is what its forward reads, whatever it is called."""
    model, losses = compile(seeded(_Flagged)), []
    optimizer = sgd(model)
    for name, value in (("debug", True), ("plan", 0.5), ("mesh", 2.0), ("device", "cpu:0"), ("debug", False)):
        losses += train(lambda x, y: F.cross_entropy(model(x), y), optimizer, steps=1)
        setattr(model, name, value)
    losses += train(lambda x, y: F.cross_entropy(model(x), y), optimizer, steps=1)
    return {"losses": losses, "debug": model.debug, "state": state(model)}


class _Fitted(Logits):
    """Trains itself as some libraries have it: `compile`, then `fit`; with methods under names that a parallel module has, too."""

    def compile(self, rate: float, metrics: Any = ()) -> None:  # type: ignore[override]
        self.optimizer, self.metrics = torch.optim.Adam(self.parameters(), lr=rate), metrics

    def train_step(self, x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(self(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.clip_grad_norm_(0.1)
        self.optimizer.step()
        return loss.item()

    def clip_grad_norm_(self, bound: float) -> Tensor:
        """Of the head alone."""
        return nn.utils.clip_grad_norm_(self.head.parameters(), bound)

    def profile(self, x: Tensor) -> float:
        with torch.no_grad():
            return self(x).sum().item()

    def fit(self, count: int) -> list[float]:
        return [self.train_step(*batch(index)) for index in range(count)]


@program(KIND)
def methods_of_the_same_names(compile: Compile) -> Results:
    """The model's own `compile`, `fit`, `train_step`, `profile` and `clip_grad_norm_` are what is called."""
    model = compile(seeded(_Fitted))
    model.compile(1e-2, metrics=("accuracy",))
    losses = [*model.fit(2), model.train_step(*batch(2)), model.profile(samples())]
    losses += train(lambda x, y: F.cross_entropy(model(x), y), model.optimizer)
    losses += [model.train_step(*batch(3)), float(model.clip_grad_norm_(1.0)), len(model.metrics)]
    return {"losses": losses, "state": state(model)}


class _Crops(Logits):
    """Takes crops of several sizes: those of one size go through it together."""

    def forward(self, crops: list[Tensor]) -> Tensor:  # type: ignore[override]
        sizes = torch.tensor([crop.shape[-1] for crop in crops])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        first, found = 0, []
        for end in ends:
            joined = torch.cat(crops[first:end])
            found.append(self.logits(F.pad(joined, (0, WIDTH - joined.shape[-1]))))
            first = end
        return torch.cat(found)


@program(KIND)
def crops_of_one_size_together(compile: Compile) -> Results:
    """As self-supervised learning has it: how many crops are of each size is counted by tensors of their sizes; then there are others."""
    model, losses = compile(seeded(_Crops)), []
    optimizer = sgd(model)
    for index, widths in enumerate(((WIDTH, WIDTH, 4), (WIDTH, WIDTH, 4), (WIDTH, 6, 6, 4))):
        loss = model([samples(index + k)[:, :width] for k, width in enumerate(widths)]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class _Asserting(Logits):
    """Makes no loss, and asserts what should be so."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        assert not torch.isnan(x).any()
        found = self.hidden(x)
        if (found.abs() > 1e6).any():
            raise ValueError("activations have become too large")
        assert (found == found).all()
        return self.head(found)


@program(KIND)
def assertions_without_a_loss(compile: Compile) -> Results:
    """Conditions on values, which can only raise, in the forward of a model whose loss is made outside; evaluated too."""
    model = compile(seeded(_Asserting))
    losses = train(lambda x, y: F.cross_entropy(model(x), y), sgd(model))
    model.eval()
    with torch.no_grad():
        found = model(samples(4))
    return {"losses": losses, "found": found, "state": state(model)}


class _RunAgain(torch.autograd.Function):
    """Keeps what a function is given, and runs it again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Any, count: int, *given: Tensor) -> Tensor:
        ctx.function, ctx.inputs, ctx.weights = function, given[:count], given[count:]
        with torch.no_grad():
            return function(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            found = ctx.function(*(x.view_as(x) for x in inputs))
        back = torch.autograd.grad(found, [*inputs, *ctx.weights], grads, allow_unused=True)
        del ctx.inputs, ctx.weights
        return None, None, *back


class _CheckpointedByHand(Logits):
    """Each block runs through the function, with its parameters behind what it is given."""

    def hidden(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.first(x))
        found = _RunAgain.apply(self.part, 2, found, torch.tanh(found.detach()), *self.blocks[0].parameters())
        return _RunAgain.apply(self.blocks[1], 1, found, *self.blocks[1].parameters())

    def part(self, found: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            scale = found.abs().mean(1, keepdim=True)
        return self.blocks[0](found) * scale + other


@program(KIND)
def checkpointed_by_hand(compile: Compile) -> Results:
    """As diffusion models save memory: an autograd function of the author's runs blocks without gradients, and again in backward."""
    model = compile(seeded(_CheckpointedByHand))
    return {"losses": train(lambda x, y: F.cross_entropy(model(x), y), sgd(model)), "state": state(model)}


class _Field(nn.Module):
    """Colours and densities of points of rays."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, 4)

    def forward(self, points: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(points)))


@program(KIND)
def points_in_chunks_through_two_models(compile: Compile) -> Results:
    """As radiance fields are trained: what a coarse model finds in several calls says which points a fine one is called on; one backward
    pass through all of these calls."""
    coarse, fine, losses = compile(seeded(_Field)), compile(seeded(_Field)), []
    optimizer = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=1e-2)
    for index in range(3):
        x = samples(index)
        found = torch.cat([coarse(part) for part in x[:, :2].split(4)])
        moved = x[:, 2:4] + found.detach()[:, :2]
        seen = torch.cat([fine(part) for part in torch.cat([x[:, :2], moved]).split(8)])
        loss = (found - x[:, 4:]).square().mean() + (seen[:12] + seen[12:] - x[:, 4:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "states": [state(coarse), state(fine)]}
