"""Buffers that get the shape of the batch in the first call: tables are part of the program, states that a call begins anew may be, and
states that go on are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.compiler import plan_of
from autopar.errors import BufferMade
from autopar.run import WorkerPool
from autopar.verify import reference, verify_plan


class Tabled(nn.Module):
    """Positions relative to one another, made where there are none for as many tokens; as in ConViT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.slope = nn.Parameter(torch.tensor(0.1))
        self.register_buffer("table", torch.zeros(1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.table.shape[0] != n:
            at = torch.arange(n, dtype=x.dtype, device=x.device)
            self.table = at[:, None] - at[None, :]
        mixed = F.softmax(self.slope * self.table, dim=-1) @ torch.tanh(self.first(x))
        return self.last(mixed).square().mean()


class Spiking(nn.Module):
    """Membranes of each sample. resets: each call begins with none."""

    def __init__(self, *, resets: bool = True, persistent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.resets = nn.Linear(8, 16), nn.Linear(16, 4), resets
        self.register_buffer("membrane", torch.zeros(0), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.membrane.shape != (len(x), 16):
            self.membrane = x.new_zeros(len(x), 16)
        if self.resets:
            self.membrane = torch.zeros_like(self.membrane)
        found = x.new_zeros(len(x), 4)
        for k in range(x.shape[1]):
            self.membrane = 0.9 * self.membrane + torch.tanh(self.first(x[:, k]))
            found = found + self.last(torch.sigmoid(self.membrane))
        if not self.resets:
            self.membrane = self.membrane.detach()
        return found.square().mean()


def batch(size: int = 8, tokens: int = 5) -> Tensor:
    return torch.randn(size, tokens, 8, generator=torch.Generator().manual_seed(size + tokens))


@pytest.mark.fake
@pytest.mark.parametrize(("model", "name", "shape"), [(Tabled(), "table", (5, 5)), (Spiking(), "membrane", (8, 16))])
def test_the_program_has_what_the_first_call_leaves(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    before = getattr(model, name)
    found = capture(model, (batch(),))
    (buffer,) = found.program.buffers
    assert (buffer.fqn, found.program.types[buffer.value].shape) == (name, shape)
    assert getattr(model, name) is before and before.numel() <= 1


@pytest.mark.fake
def test_beside_a_buffer_that_the_first_call_makes() -> None:
    class Both(Tabled):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ones", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.ones is None:
                self.ones = torch.ones(8)
            return super().forward(x * self.ones)

    found = capture(Both(), (batch(),))
    assert sorted(b.fqn or "" for b in found.program.buffers) == ["ones", "table"] and not found.made


@pytest.mark.fake
@pytest.mark.parametrize("options", [{"resets": False}, {"persistent": True}], ids=str)
def test_states_that_go_on_or_are_saved_are_refused(options: dict[str, bool]) -> None:
    with pytest.raises(BufferMade, match=r"makes the buffer membrane[\s\S]*call the model once"):
        capture(Spiking(**options), (batch(),))


@pytest.mark.fake
def test_a_state_that_goes_on_without_a_trace_in_the_loss_is_refused() -> None:
    model = Spiking(resets=False)
    nn.init.zeros_(model.last.weight)  # as adapters begin
    with pytest.raises(BufferMade):
        capture(model, (batch(),))


@pytest.mark.fake
def test_a_first_call_that_computes_something_else_is_refused() -> None:
    class Announcing(Tabled):
        def forward(self, x: Tensor) -> Tensor:
            made = self.table.shape[0] != x.shape[1]
            return super().forward(x) * (2.0 if made else 1.0)

    with pytest.raises(BufferMade):
        capture(Announcing(), (batch(),))


@pytest.mark.fake
@pytest.mark.parametrize("classes", [False, True])
def test_a_scale_of_the_first_batch_is_refused(classes: bool) -> None:
    """The loop's first batch may be another one than the example."""

    class Scaled(Tabled):
        def forward(self, x: Tensor) -> Tensor:
            if self.table.numel() == 1:
                self.table = F.one_hot(x[:, 0], 8).to(self.slope) if classes else x.std(dim=(0, 1)).detach()
            h = self.last(torch.tanh(self.first(x.to(self.slope) if not classes else F.one_hot(x, 8).to(self.slope))))
            return (h.mean(1) @ torch.ones_like(h[0, 0]) * self.table.sum(-1)).square().mean()

    x = torch.arange(40).view(8, 5) % 8 if classes else batch()
    with pytest.raises(BufferMade):
        capture(Scaled(), (x,))


@pytest.mark.fake
def test_a_table_of_the_first_weights_is_refused() -> None:
    """Weights may be loaded after compile."""

    class Weighed(Tabled):
        def forward(self, x: Tensor) -> Tensor:
            if self.table.numel() == 1:
                self.table = self.first.weight.detach().abs().sum(0)
            return self.last(torch.tanh(self.first(x)) * self.table).square().mean()

    with pytest.raises(BufferMade):
        capture(Weighed(), (batch(),))


@pytest.mark.fake
def test_a_table_of_which_a_part_is_no_buffer_is_refused_until_a_call_has_made_both() -> None:
    class InTwo(Tabled):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.beside = torch.ones(0, 8), torch.ones(0, 8)

        def forward(self, x: Tensor) -> Tensor:
            if len(self.table) < x.shape[1]:
                angles = torch.arange(x.shape[1])[:, None] * torch.ones(8)
                self.table, self.beside = angles.cos(), angles.sin()
            return self.last(torch.tanh(self.first(x * self.table + x * self.beside))).square().mean()

    model = InTwo()
    with pytest.raises(BufferMade, match="call the model once"):
        capture(model, (batch(),))
    model(batch())
    capture(model, (batch(),))


@pytest.mark.fake
def test_nothing_can_be_told_without_data() -> None:
    with torch.device("meta"):
        model, x = Tabled(), torch.randn(8, 5, 8)
    with pytest.raises(BufferMade):
        capture(model, (x,))


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("build", [Tabled, Spiking])
def test_they_are_verified(pair: WorkerPool, build: type[nn.Module], pins: dict[str, int]) -> None:
    ref = reference(build(), (batch(),), later=True)
    report = verify_plan(ref, plan_of(ref.captured, 2, cluster="cpu", pins=pins), pair)
    assert report.ok, report


def _of_another_size(build: type[nn.Module], pins: dict[str, int]) -> list[Any]:
    """Before, a batch of another size or length, and after."""
    alone = build()
    model = autopar.compile(build(), 2, example_inputs=(batch(),), cluster="cpu", pins=pins)
    found: list[Any] = [abs(float(model(batch()) - alone(batch()))) < 1e-5]
    try:
        other = batch(8, 7) if build is Tabled else batch(4, 5)
        found.append(abs(float(model(other) - alone(other))) < 1e-5)
    except ValueError as error:
        found.append(str(error))
    found.append(abs(float(model(batch()) - alone(batch()))) < 1e-5)
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("build", [Tabled, Spiking])
def test_a_batch_of_another_shape_is_right_or_refused(pair: WorkerPool, build: type[nn.Module]) -> None:
    for before, other, after in pair.run(_of_another_size, build, {"dp": 2}, timeout_s=100):
        assert before is after is True
        assert other is True or "would have" in other or "makes the buffer" in other, other
