"""Forms that many models have, over micro-batches: their parts are run one after the other, in float64, and compared with the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import Captured, capture, run_op, run_program
from autopar.compiler import plan_of
from autopar.planner.moments import split_into_moments
from autopar.run import WorkerPool
from autopar.verify import reference, verify_plan

pure = pytest.mark.pure
BATCH, SEQUENCE, HIDDEN, CLASSES = 8, 8, 16, 12  # a batch as large as a sequence


def labels(ignored: float = 0.3) -> Tensor:
    found = torch.randint(CLASSES, (BATCH, SEQUENCE))
    return found.masked_fill(torch.rand(BATCH, SEQUENCE) < ignored, -100)


class Base(nn.Module):
    """Embeds tokens, mixes the sequence by attention, classifies every token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.mix, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.extra = nn.Parameter(torch.randn(1, 1, HIDDEN))

    def logits(self, ids: Tensor, bias: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        scores = x @ x.transpose(1, 2) / HIDDEN
        return self.head(x + self.mix((scores if bias is None else scores + bias).softmax(-1) @ x))


def loss_with(**options: Any) -> type[nn.Module]:
    class Model(Base):
        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            weight = torch.linspace(0.5, 2, CLASSES, dtype=self.extra.dtype) if "weight" in options else None
            return F.cross_entropy(self.logits(ids).transpose(1, 2), y, **{**options, "weight": weight})

    return Model


class Penalty(Base):
    """A loss with terms of parameters alone, one of them not linear, and a number."""

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        norms = torch.stack([p.norm() for p in self.parameters()])
        decay = sum(p.square().sum() for p in self.parameters())
        return 0.5 * F.cross_entropy(self.logits(ids).flatten(0, 1), y.flatten()) + 0.01 * decay + norms.mean() ** 2 - 3


class SameShape(Base):
    """Operands that give only their shape or type."""

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        out = self.logits(ids)
        scale = self.extra.mean(-1, keepdim=True).expand_as(out) + torch.zeros_like(out) + out.new_ones(out.shape[0], 1, 1)
        loss = F.cross_entropy((out * scale.type_as(out)).view_as(out).reshape_as(out).flatten(0, 1), y.flatten(), reduction="sum")
        return loss + torch.full_like(loss, 2.0)


class Tables(Base):
    """Things as large as the batch that are not the batch, and one made for all samples that is read by each."""

    def forward(self, places: Tensor, bias: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        table = self.places(places).expand(SEQUENCE, SEQUENCE, -1)
        first = self.mix(self.extra.expand(ids.shape[0], 1, -1))
        out = self.logits(ids, bias + self.head(table).mean(-1))
        return F.cross_entropy((out + self.head(first)).flatten(0, 1), y.flatten())


def pairs() -> dict[str, Tensor]:
    return {"ids": torch.randint(CLASSES, (BATCH, SEQUENCE)), "y": labels()}


def with_tables() -> dict[str, Tensor]:
    return {"places": torch.arange(SEQUENCE), "bias": torch.randn(SEQUENCE, SEQUENCE, dtype=torch.float64), **pairs()}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "label smoothing": (loss_with(label_smoothing=0.1), pairs),
    "label smoothing, weights": (loss_with(label_smoothing=0.2, weight=True), pairs),
    "weights": (loss_with(weight=True), pairs),
    "label smoothing, sum": (loss_with(label_smoothing=0.1, reduction="sum"), pairs),
    "penalty": (Penalty, pairs),
    "same shape": (SameShape, pairs),
    "tables": (Tables, with_tables),
}


def captured(name: str) -> tuple[Captured, dict[str, Tensor]]:
    model, inputs = CASES[name][0]().double(), CASES[name][1]()
    return capture(model, inputs), inputs


def in_parts(found: Captured, inputs: dict[str, Tensor], count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of all micro-batches, one after the other."""
    program = found.program
    values = {v: t.detach().clone() for v, t in found.tensors.items()}
    for p in program.params:
        values[p.value].requires_grad_()
    values |= {x.value: inputs[str(x.path[0])] for x in program.inputs}
    moments = split_into_moments(program, count)
    for op in moments.prologue:
        values.update((o, t) for o, t in zip(op.outputs, run_op(op, values), strict=True) if o is not None)
    lies = {x.value: dict(x.layouts).get("time") for x in moments.body.inputs}
    total = torch.zeros((), dtype=torch.float64)
    for k in range(count):
        here = {v: t for v, t in values.items() if v not in lies}
        for v, x in lies.items():
            here[v] = values[v].chunk(count, x.dim)[k] if x is not None and x.is_shard else values[v]
        loss = run_program(moments.body, here)
        loss.backward()
        total = total + loss.detach()
    return total, {p.fqn: values[p.value].grad for p in program.params}


def whole(found: Captured, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    program = found.program
    values = {v: t.detach().clone() for v, t in found.tensors.items()}
    for p in program.params:
        values[p.value].requires_grad_()
    loss = run_program(program, values | {x.value: inputs[str(x.path[0])] for x in program.inputs})
    loss.backward()
    return loss.detach(), {p.fqn: values[p.value].grad for p in program.params}


@pure
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", list(CASES))
def test_micro_batches_are_exact(name: str, count: int) -> None:
    found, inputs = captured(name)
    loss, gradients = whole(found, inputs)
    total, parts = in_parts(found, inputs, count)
    torch.testing.assert_close(total, loss, rtol=1e-12, atol=1e-12)
    for fqn, g in gradients.items():
        torch.testing.assert_close(parts[fqn], g, rtol=1e-10, atol=1e-12, msg=lambda m, fqn=fqn: f"{fqn}: {m}")


@pure
def test_no_operator_reads_a_tensor_for_its_shape() -> None:
    targets = {op.target for op in captured("same shape")[0].program.ops}
    assert not targets & {"aten.expand_as.default", "aten.view_as.default", "aten.reshape_as.default", "aten.type_as.default"}


@pure
def test_a_loss_without_the_batch_is_not_split() -> None:
    class Decay(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight.square().sum() + 0 * self.bias.sum() + 0 * x.sum()

    program = capture(Decay(4, 4), (torch.randn(4, 4),)).program
    assert split_into_moments(program, 2).body.ops, "x has a part in it"


PLANS: list[dict[str, Any]] = [{"dp": 2, "tp": 2, "micro_batches": 2}, {"dp": 2, "pp": 2, "micro_batches": 4}, {"dp": 4, "zero": 3}]


@pytest.mark.gloo
@pytest.mark.parametrize("pins", PLANS, ids=str)
@pytest.mark.parametrize("name", ["label smoothing, weights", "penalty", "same shape", "tables"])
def test_real_processes(name: str, pins: dict[str, Any], workers: WorkerPool) -> None:
    ref = reference(CASES[name][0](), CASES[name][1](), steps=2)
    report = verify_plan(ref, plan_of(ref.captured, 4, cluster="cpu", pins=pins), workers, timeout_s=120)
    assert report.ok, report
