"""Parameters that a forward bounds, normalises or masks before it uses them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import CLASSES, HIDDEN, WIDTH, Block, Compile, Net, Results, batch, program, seeded, state, train, trained


class _Renormed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class _RenormedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = _Renormed(WIDTH, HIDDEN), _Renormed(HIDDEN, CLASSES)


@program("state")
def rows_bounded_by_the_layer(compile: Compile) -> Results:
    """A layer with a constraint on its weight, which it is given by `.data =`."""
    return trained(compile(seeded(_RenormedNet), example_inputs=batch()), steps=4)


class _Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
            self.down.weight.copy_(F.normalize(self.down.weight, dim=-1))
        return super().forward(x)


class _ClampedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Clamped() for _ in range(3)))


@program("state")
def weights_clamped_and_normalised_by_blocks(compile: Compile) -> Results:
    """In each of some equal blocks; evaluated too."""
    model = compile(seeded(_ClampedNet), example_inputs=batch())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = train(model, optimizer, steps=4)
    model.eval()
    return {"losses": losses, "evaluated": model(*batch(7)).item(), "state": state(model)}


class _Decayed(Net):
    """What it writes is another thing in each call; a mask in a buffer, and a step that says when."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(HIDDEN) % 2).to(torch.get_default_dtype()))
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.step += 1
        with torch.no_grad():
            self.head.weight.mul_(self.mask)
            self.first.bias.data.add_(0.01)
            if self.step % 2 == 0:
                for weight in self.blocks.parameters():
                    weight.mul_(0.9)
        return F.cross_entropy(self.logits(x), y)


@program("state")
def weights_masked_and_decayed_in_turns(compile: Compile) -> Results:
    """The loop changes the mask."""
    model = compile(seeded(_Decayed), example_inputs=batch())
    losses = train(model, steps=3)
    model.mask.fill_(1.0)
    return {"losses": losses + train(model, steps=2), "state": state(model)}


class _Kept(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.head.weight.norm()
            self.head.weight.div_(before)
        return F.cross_entropy(before * self.logits(x), y)


@program("state")
def norm_divided_out_and_used(compile: Compile) -> Results:
    """What the weight was before is used after it was written to."""
    return trained(compile(seeded(_Kept), example_inputs=batch()))
