"""Batches that are objects of the user's classes."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._traps_kit import Compile, Net, Results, batch, program, seeded, sgd, state, trained


@dataclasses.dataclass
class _Batch:
    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    scale: float = 1.0

    @property
    def size(self) -> int:
        return len(self.x)

    def scaled(self) -> Tensor:
        return self.x * self.scale


class _OfABatch(Net):
    def forward(self, batch: _Batch) -> Tensor:  # type: ignore[override]
        losses = F.cross_entropy(self.logits(batch.scaled()), batch.y, reduction="none")
        return (losses if batch.weight is None else losses * batch.weight).sum() / batch.size


def _batch(index: int = 0, **others: Any) -> tuple[_Batch]:
    x, y = batch(index)
    return (_Batch(x, y, **others),)


@program("calls")
def batch_in_a_dataclass(compile: Compile) -> Results:
    """With a method, a property, and a field that is None at times."""
    model = compile(seeded(_OfABatch), example_inputs=_batch())
    weight = torch.linspace(0, 1, 12)
    return trained(model, inputs=[_batch(0), _batch(1, weight=weight), _batch(2, scale=0.5), _batch(3)])


@program("calls")
def batch_in_a_dataclass_planned_later(compile: Compile) -> Results:
    """The first call shows what a batch is."""
    return trained(compile(seeded(_OfABatch)), inputs=[_batch(i) for i in range(3)])


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class _Nested:
    pairs: list[_Pair]
    label: dict[str, Tensor]


class _OfNested(Net):
    def forward(self, batch: _Nested, *, scale: _Pair | None = None) -> Tensor:  # type: ignore[override]
        x = sum((pair.first + pair.second for pair in batch.pairs), torch.zeros(()))
        loss = F.cross_entropy(self.logits(x), batch.label["y"])
        return loss if scale is None else loss * (scale.first + scale.second)


@program("calls")
def dataclasses_in_lists_of_a_dataclass(compile: Compile) -> Results:
    """Frozen ones with slots, in a list, beside a dict; another by its name."""

    def made(index: int) -> _Nested:
        x, y = batch(index)
        return _Nested([_Pair(x, x.flip(1)), _Pair(x / 2, x * 0)], {"y": y})

    model = compile(seeded(_OfNested), example_inputs=(made(0),))
    losses = trained(model, inputs=[(made(0),), (made(1),)])["losses"]
    optimizer = sgd(model)
    loss = model(made(2), scale=_Pair(torch.tensor(2.0), torch.tensor(1.0)))
    loss.backward()
    optimizer.step()
    return {"losses": [*losses, loss.item()], "state": state(model)}


class _OfNames(Net):
    def forward(self, batch: types.SimpleNamespace) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.logits(batch.x), batch.y)


@program("calls")
def batch_in_a_namespace(compile: Compile) -> Results:
    """A types.SimpleNamespace."""

    def made(index: int) -> tuple[types.SimpleNamespace]:
        x, y = batch(index)
        return (types.SimpleNamespace(x=x, y=y),)

    return trained(compile(seeded(_OfNames), example_inputs=made(0)), inputs=[made(i) for i in range(3)])


class _Writes(Net):
    def forward(self, batch: types.SimpleNamespace) -> Tensor:  # type: ignore[override]
        batch.hidden = self.hidden(batch.x)
        return F.cross_entropy(self.head(batch.hidden), batch.y)


@program("calls")
def batch_that_forward_writes_to(compile: Compile) -> Results:
    """What each part of a model computes goes into the batch."""
    x, y = batch()
    given = types.SimpleNamespace(x=x, y=y)
    model = compile(seeded(_Writes), example_inputs=(types.SimpleNamespace(x=x, y=y),))
    loss = model(given)
    loss.backward()
    return {"loss": loss.item(), "hidden": given.hidden}
