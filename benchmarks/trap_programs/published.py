"""More of what published training scripts do that was wrong, or ended them, when they were first run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, WIDTH, Compile, Logits, Results, program, samples, seeded, sgd, state, train

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
