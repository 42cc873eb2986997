"""Memory that something else than the model knows too: of plain tensors in attributes, of buffers, and of gradients from before it is
compiled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks._traps_kit import HIDDEN, Compile, Net, Results, batch, batches, program, seeded, sgd, state, train, trained


class _Scaled(Net):
    """Its hidden values are multiplied by a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * self.scale


class _Buffered(_Scaled):
    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.register_buffer("scale", torch.ones(HIDDEN))


@program("memory")
def attribute_written_through_data(compile: Compile) -> Results:
    model = compile(seeded(_Scaled), example_inputs=batch())
    losses = train(model)
    model.scale.data.mul_(0.5)
    return {"losses": losses + train(model)}


@program("memory")
def attribute_of_an_array(compile: Compile) -> Results:
    """The loop writes to the array of numpy of which the tensor was made."""
    model, array = seeded(_Scaled), np.ones(HIDDEN)
    model.scale = torch.from_numpy(array)
    model = compile(model, example_inputs=batch())
    losses = train(model)
    array *= 0.5
    return {"losses": losses + train(model)}


@program("memory")
def buffer_that_a_schedule_holds(compile: Compile) -> Results:
    """It was taken before compiling, and is written to by itself."""
    model = seeded(_Buffered)
    held = model.scale
    model = compile(model, example_inputs=batch())
    losses = train(model)
    held.mul_(0.5)
    return {"losses": losses + train(model)}


@program("memory")
def gradients_in_a_buffer_from_before(compile: Compile) -> Results:
    """Each gradient is a view of one vector, which the loop sets to zero."""
    model = seeded(Net)
    flat, at = torch.zeros(sum(p.numel() for p in model.parameters())), 0
    for param in model.parameters():
        param.grad = flat[at : at + param.numel()].view_as(param)
        at += param.numel()
    model = compile(model, example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        flat.zero_()
        loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), flat.norm().item()))
    return {"losses": losses, "state": state(model)}


@program("rules")
def weights_without_elements(compile: Compile) -> Results:
    """A layer without units, and a parameter without elements."""

    class Empty(Net):
        def __init__(self) -> None:
            super().__init__()
            self.none = torch.nn.Linear(8, 0)
            self.empty = torch.nn.Parameter(torch.empty(0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) + self.none(x).sum()

    model = compile(seeded(Empty), example_inputs=batch())
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.01))
