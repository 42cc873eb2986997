"""Loops in which each data-parallel rank loads its own part of the batch (local_batch=True), as under DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from benchmarks._traps_kit import (
    BATCH,
    HIDDEN,
    WIDTH,
    Compile,
    InDict,
    Logits,
    Net,
    Normed,
    Results,
    batch,
    batches,
    program,
    seeded,
    sgd,
    state,
    trained,
)

KIND = "local"


def part_of(model: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What this rank loads of a batch; all of it on one process."""
    if not isinstance(model, autopar.ParallelModule):
        return tensors
    return tuple(t.chunk(model.data_ranks)[model.data_rank] for t in tensors)


def mean_of_ranks(loss: Tensor) -> float:
    """Of a loss that each rank makes of its own part."""
    found = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return found.item()


def _compiled(compile: Compile, build: type[nn.Module], **options: Any) -> Any:
    return compile(seeded(build), example_inputs=options.pop("example_inputs", batch()), local_batch=True, **options)


@program(KIND)
def parts_with_a_loss_inside(compile: Compile) -> Results:
    """The loss that a call returns is that of the global batch; gradients are accumulated over two of them, and clipped."""
    model = _compiled(compile, Normed)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for index in range(3):
        optimizer.zero_grad()
        for k in (0, 1):
            loss = model(*part_of(model, *batch(2 * index + k))) / 2
            loss.backward()
            losses.append(loss.item())
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return {"losses": losses, "state": state(model)}


@program(KIND)
def parts_with_a_loss_outside(compile: Compile) -> Results:
    """Each rank makes the mean of its own samples, to which a penalty of all weights is added."""
    model = _compiled(compile, Logits, example_inputs=batch()[:1])
    optimizer, losses = sgd(model), []
    for given in batches(4):
        x, y = part_of(model, *given)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        losses.append(mean_of_ranks(loss))
    return {"losses": losses, "state": state(model)}


@program(KIND)
def parts_through_an_encoder_in_ddp(compile: Compile) -> Results:
    """An encoder outside, in DistributedDataParallel, before a model with its loss inside."""
    example = torch.zeros(BATCH, WIDTH, requires_grad=True), batch()[1]
    model = _compiled(compile, Net, example_inputs=example)
    encoder: Any = seeded(nn.Linear, WIDTH, WIDTH)
    plain = encoder
    if isinstance(model, autopar.ParallelModule) and dist.is_initialized():
        encoder = DistributedDataParallel(encoder)
    optimizer, losses = torch.optim.SGD([*plain.parameters(), *model.parameters()], lr=0.1), []
    for given in batches(4):
        x, y = part_of(model, *given)
        optimizer.zero_grad()
        loss = model(torch.tanh(encoder(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model), "encoder": plain.state_dict()}


class _Contrasted(Net):
    """Two views of each sample are to be nearer to one another than to all other samples of the global batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = (F.normalize(self.hidden(view), dim=-1) for view in (x, x + 0.1 * x.square()))
        return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(x)))


@program(KIND)
def parts_whose_samples_are_contrasted(compile: Compile) -> Results:
    """Negatives are those of all ranks, without a gather in the model."""
    model = _compiled(compile, _Contrasted)
    return trained(model, inputs=[part_of(model, *given) for given in batches(4)])


@program(KIND)
def parts_of_a_scaled_loss(compile: Compile) -> Results:
    """A loss outside that is scaled for its gradients, unscaled and clipped."""
    model = _compiled(compile, Logits, example_inputs=batch()[:1])
    optimizer, losses = sgd(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for given in batches(4):
        x, y = part_of(model, *given)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        losses += [mean_of_ranks(loss), nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()]
        scaler.step(optimizer)
        scaler.update()
    return {"losses": losses, "state": state(model)}


@program(KIND)
def parts_evaluated(compile: Compile) -> Results:
    """Each rank counts the hits of its own samples; a model with running statistics, outputs="all"."""
    model = _compiled(compile, _Told, outputs="all")
    optimizer, found = sgd(model), []
    for given in batches(3):
        optimizer.zero_grad()
        model(*part_of(model, *given))["loss"].backward()
        optimizer.step()
        model.eval()
        x, y = part_of(model, *batch(9))
        with torch.no_grad():
            logits = model(x, y)["logits"]
        found.append(mean_of_ranks((logits.argmax(1) == y).double().mean()))
        model.train()
    return {"hits": found, "state": state(model)}


class _Told(InDict, Normed):
    """The loss and logits, of a model with running statistics."""


class _Teaching(Net):
    """Logits, and what all samples share: a temperature, and the size of the hidden states over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        h = self.hidden(x)
        return self.head(h), self.scale.exp(), h.square().mean()


@program(KIND)
def parts_and_what_they_share(compile: Compile) -> Results:
    """A teacher's logits, matched by each rank for its own samples, with a temperature that is trained and a size of the whole batch."""
    model = _compiled(compile, _Teaching, example_inputs=batch()[:1])
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4))
    optimizer, losses = sgd(model), []
    for given in batches(4):
        x, _ = part_of(model, *given)
        optimizer.zero_grad()
        logits, temperature, size = model(x)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        loss = F.cross_entropy(logits * temperature, wanted) + 0.1 * size * temperature
        loss.backward()
        optimizer.step()
        losses.append(mean_of_ranks(loss))
    return {"losses": losses, "state": state(model)}


class _Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(16, 8), nn.Linear(8, HIDDEN), nn.Linear(HIDDEN, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.mix(self.words(ids)))
        if not mask.all():
            h = h * mask[..., None]
        labels = ids.masked_fill(mask == 0, -100)
        return F.cross_entropy(self.head(h)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@program(KIND)
def parts_of_which_one_is_padded(compile: Compile) -> Results:
    """A branch that the whole batch decides, and a loss over words, of which a rank may have fewer."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(16, (4, BATCH, 6), generator=generator)
    masks = torch.ones_like(ids)
    masks[1::2, BATCH // 2 + 1 :, 3:] = 0
    model = _compiled(compile, _Sequences, example_inputs=(ids[0], masks[0]))
    return trained(model, inputs=[part_of(model, *given) for given in zip(ids, masks, strict=True)])


class _NormedLogits(Normed):
    """Of so few samples that cutting the work behind the norm does not pay."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.logits(x)


@program(KIND)
def parts_behind_a_batch_norm(compile: Compile) -> Results:
    """Each rank is given back its own part, whatever was computed where; in an evaluation too."""
    model = _compiled(compile, _NormedLogits, example_inputs=batch()[:1])
    optimizer, losses, hits = sgd(model), [], 0
    for x, y in batches():
        x, y = part_of(model, x, y)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(mean_of_ranks(loss))
    model.eval()
    with torch.no_grad():
        x, y = part_of(model, *batch(7))
        hits = (model(x).argmax(1) == y).double().mean()
    return {"losses": losses, "accuracy": mean_of_ranks(hits), "state": state(model)}
