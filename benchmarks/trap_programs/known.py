"""Sizes that follow from values, where these follow from sizes, numbers and what the model holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import CLASSES, HIDDEN, WIDTH, Compile, Net, Results, batches, program, samples, seeded, state, stepped, trained

KIND = "known sizes"


class Contrasted(nn.Module):
    """Two views of each sample, which must find one another among all others."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        z = F.normalize(self.encoder(torch.cat([first, second])), dim=1)
        same = torch.arange(len(first), device=z.device).repeat(2)
        alike, others = same[:, None] == same[None], ~torch.eye(len(z), dtype=torch.bool, device=z.device)
        alike, found = alike[others].view(len(z), -1), (z @ z.T)[others].view(len(z), -1)
        logits = torch.cat([found[alike].view(len(z), -1), found[~alike].view(len(z), -1)], dim=1)
        return F.cross_entropy(logits / 0.2, torch.zeros(len(z), dtype=torch.long, device=z.device))


@program(KIND)
def similarities_but_with_itself(compile: Compile) -> Results:
    """The contrastive loss with boolean masks, of batches of two sizes."""
    views = [(samples(k)[: 12 - 4 * (k == 1)], samples(k + 5)[: 12 - 4 * (k == 1)]) for k in range(3)]
    return trained(compile(seeded(Contrasted), example_inputs=views[0]), inputs=views)


class Crops(nn.Module):
    """Crops of one width that follow one another go through the network together."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, crops: list[Tensor]) -> Tensor:
        widths = torch.tensor([c.shape[-1] for c in crops])
        ends = torch.cumsum(torch.unique_consecutive(widths, return_counts=True)[1], 0)
        start, found = 0, torch.empty(0, device=crops[0].device)
        for end in ends:
            parts = torch.cat(crops[start:end]).unflatten(1, (-1, 2))
            found = torch.cat((found, torch.tanh(self.encoder(parts)).mean(1)))
            start = end
        return self.head(found)


@program(KIND)
def crops_of_several_widths(compile: Compile) -> Results:
    """A list of views, and a loss that is made outside of what all of them give."""
    model = compile(seeded(Crops))

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        return model([x, x + 0.1, x[:, :4], x[:, 4:], x[:, 2:6]]).log_softmax(1).square().mean()  # type: ignore[no-any-return]

    return {"losses": stepped(model, loss_of), "state": state(model)}


class Pruned(Net):
    """Hidden units that a mask has, and rows whose numbers a plain tensor has."""

    keep: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.arange(HIDDEN) % 3 > 0)
        self.bounds = torch.tensor([0, 2, 6])
        self.back = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        loss = F.cross_entropy(self.logits(x), y) + self.back(hidden)[:, self.keep].square().mean()
        for start, end in zip(self.bounds, self.bounds[1:], strict=False):
            loss = loss + hidden[:, start:end].abs().mean()
        return loss


@program(KIND)
def units_pruned_in_turns(compile: Compile) -> Results:
    """The loop writes to the mask in front of every other step, and once to the plain tensor."""
    raw = seeded(Pruned)
    model = compile(raw)

    def given() -> Iterator[tuple[Tensor, Tensor]]:
        for k, each in enumerate((*batches(), *batches())):
            if k % 2:
                model.keep[k + 3] = ~model.keep[k + 3]
            if k == 3:
                raw.bounds.add_(torch.tensor([0, 1, 2]))
            yield each

    return trained(model, inputs=given())


class Slots(Net):
    """Writes the states of a batch where a buffer points, which the loop moves on."""

    place: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(4, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.logits(x)
        self.seen[self.place] = logits.detach().mean(0)
        return F.cross_entropy(logits + self.seen[: self.place + 1].mean(0), y)


@program(KIND)
def slots_that_a_buffer_names(compile: Compile) -> Results:
    model = compile(seeded(Slots))

    def given() -> Iterator[tuple[Tensor, Tensor]]:
        for k, each in enumerate((*batches(), *batches())):
            model.place.fill_(k % 4)
            yield each

    return trained(model, inputs=given())


class Levels(Net):
    """Heights and widths of levels are a tensor, as deformable attention has them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shapes = torch.as_tensor([(2, 2), (1, 4), (4, 2)], device=x.device)
        starts = torch.cat((shapes.new_zeros((1,)), shapes.prod(1).cumsum(0)[:-1]))
        hidden, total = self.hidden(x), torch.zeros(len(x), device=x.device)
        for (height, width), start in zip(shapes, starts, strict=True):
            part = hidden[:, start : start + height * width].view(-1, height, width)
            total = total + (part * torch.linspace(0.5, height - 0.5, height, device=x.device)[None, :, None]).mean((1, 2))
        first, *_ = hidden.split([height * width for height, width in shapes], dim=1)
        return F.cross_entropy(self.logits(x), y) + total.square().mean() + first.mean()


@program(KIND)
def levels_of_a_tensor(compile: Compile) -> Results:
    return trained(compile(seeded(Levels)))
