"""Batches that do not divide among ranks or into micro-batches: the last one of an epoch, what is left of a data set in evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._traps_kit import (
    BATCH,
    CLASSES,
    HIDDEN,
    WIDTH,
    Compile,
    InDict,
    Logits,
    Net,
    Normed,
    Results,
    batch,
    gradients,
    program,
    samples,
    seeded,
    sgd,
    state,
    train,
)

KIND = "odd"
MORE = ("hybrid3", "dp2tp2")
IN_PARTS = ("dp2mb2", *MORE)  # of a model whose loss is its own, and no statistics of whose batches are kept
SAMPLES = 2 * BATCH + 7


def loader(size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples of a data set, as a DataLoader gives them that keeps the last batch."""
    x, y = batch(3, size=SAMPLES)
    yield from DataLoader(TensorDataset(x, y), batch_size=size)


@program(KIND, plans=IN_PARTS)
def epochs_with_a_short_last_batch(compile: Compile) -> Results:
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for _ in range(3):
        losses += train(model, optimizer, inputs=loader())
        schedule.step()
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def statistics_of_a_short_last_batch(compile: Compile) -> Results:
    """Batch norm, trained and evaluated on what is left."""
    model = compile(seeded(Normed), example_inputs=batch())
    losses = [loss for _ in range(2) for loss in train(model, inputs=loader())]
    model.eval()
    with torch.no_grad():
        return {"losses": losses, "evaluated": [model(x, y).item() for x, y in loader(9)], "state": state(model)}


@program(KIND, plans=MORE)
def loss_made_outside_of_short_batches(compile: Compile) -> Results:
    model = compile(seeded(Logits), example_inputs=(samples(),))
    optimizer, losses = sgd(model), []
    for x, y in loader():
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=IN_PARTS)
def accumulated_over_batches_of_five(compile: Compile) -> Results:
    """Gradients of whole and of short batches are added up before a step."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses, kept = sgd(model), [], {}
    for step, (x, y) in enumerate(loader(5)):
        loss = model(x, y) * (len(x) / SAMPLES)
        loss.backward()
        losses.append(loss.item())
        if step == 3:
            kept = gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "kept": kept, "left": gradients(model), "state": state(model)}


@program(KIND, plans=MORE)
def accuracy_of_an_odd_data_set(compile: Compile) -> Results:
    """Hits are counted over batches of 9, of which the last one has 4 samples."""
    model = compile(seeded(InDict), example_inputs=batch(), outputs="all")
    losses = [model(x, y)["loss"].item() for x, y in loader()]
    model.eval()
    hits, logits = 0, []
    with torch.no_grad():
        for x, y in loader(9):
            out = model(x, y)
            hits += int((out["logits"].argmax(-1) == y).sum())
            logits.append(out["logits"].clone())
    return {"losses": losses, "hits": hits, "logits": torch.cat(logits)}


@program(KIND, plans=MORE)
def slopes_of_a_short_batch(compile: Compile) -> Results:
    """Gradients of inputs, differentiated again, of 7 samples."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), train(model)
    for x, y in loader():
        given = x.clone().requires_grad_()
        loss = model(given, y)
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        total = loss + 0.1 * slope.square().sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return {"losses": losses, "state": state(model)}


class Contrast(nn.Module):
    """Each sample against all others of its batch, with weights that are no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        a, b = (F.normalize(layer(x * weights), dim=-1) for layer in (self.one, self.other))
        scores = self.scale.exp() * a @ b.T
        target = torch.arange(len(x))
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


@program(KIND, plans=MORE)
def contrast_within_short_batches(compile: Compile) -> Results:
    weights = torch.linspace(0.5, 1.5, WIDTH)
    model = compile(seeded(Contrast), example_inputs=(samples(), weights))
    return {"losses": train(model, inputs=[(x, weights) for x, _ in loader()]), "state": state(model)}


@program(KIND, plans=IN_PARTS)
def batches_that_are_larger_and_odd(compile: Compile) -> Results:
    """More samples than were planned, whole on each rank: in as many micro-batches as keep them small."""
    model = compile(seeded(Net), example_inputs=batch())
    return {"losses": train(model, inputs=[batch(k, size=BATCH + k) for k in (0, 1, 3, 9)]), "state": state(model)}


class Recurrent(nn.Module):
    """The states of a batch come back, as many as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return F.cross_entropy(self.head(h), y), h


@program(KIND, plans=MORE)
def states_of_a_short_batch(compile: Compile) -> Results:
    model = compile(seeded(Recurrent), example_inputs=(*batch(), torch.zeros(BATCH, HIDDEN)), outputs="all")
    optimizer, losses = sgd(model), []
    h = torch.zeros(BATCH, HIDDEN)
    for x, y in loader():
        loss, h = model(x, y, h[: len(x)].detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "last": h.detach().clone(), "state": state(model)}
