"""What a forward asks of its own buffers and parameters: the answers are those that it gets itself, whatever these hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure

Forward = Callable[["Model", Tensor], bool]


class Model(nn.Module):
    """Its loss is another for another answer of `asks`."""

    step: Tensor
    other: Tensor
    mean: Tensor

    def __init__(self, asks: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
        self.register_buffer("step", torch.tensor(3))
        self.register_buffer("other", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.bound = torch.tensor(5)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        return h.square().mean() * (2.0 if self.asks(self, h) else 1.0)


def added(m: Model, h: Tensor) -> bool:
    m.step += 1
    return bool(m.step > 5)


def assigned(m: Model, h: Tensor) -> bool:
    m.step = m.step * 2
    return bool(m.step.item() >= 8)


def through_a_view(m: Model, h: Tensor) -> bool:
    m.other[1:].add_(m.step)
    return bool(m.other.sum() > 4)


def through_data(m: Model, h: Tensor) -> bool:
    m.step.data.add_(1)
    return int(m.step) % 2 == 0


def by_a_constant(m: Model, h: Tensor) -> bool:
    return bool(m.step + 1 > m.bound)


def of_two(m: Model, h: Tensor) -> bool:
    return torch.equal(m.other > 0, torch.zeros(2) + m.step > 3)


def before_it_is_written(m: Model, h: Tensor) -> bool:
    found = float(m.mean.sum()) > 0
    m.mean.add_(h.detach().mean(0))
    return found


def by_shape_of_data(m: Model, h: Tensor) -> bool:
    m.step.add_(len(h))
    return bool(m.step.tolist() > 10)  # type: ignore[operator]


def by_a_parameter(m: Model, h: Tensor) -> bool:
    return bool(m.line.weight.detach()[0, 0] > 0)


ASKED = [added, assigned, through_a_view, through_data, by_a_constant, of_two, before_it_is_written, by_shape_of_data, by_a_parameter]


def inputs() -> tuple[Tensor]:
    return (torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.parametrize("asks", ASKED)
def test_answers_are_those_of_the_model_itself(asks: Forward) -> None:
    model = Model(asks)
    captured = capture(model, inputs())
    assert captured.answers.changed_of(model) is None
    first = asks(Model(asks), model.line(*inputs()))
    seen = set()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in (model.step, model.other, model.mean, model.line.weight):
                value.copy_(torch.randn(value.shape, generator=generator) * 4)
        changed = captured.answers.changed_of(model) is not None
        now = Model(asks)
        now.load_state_dict(model.state_dict())
        same = bool(asks(now, model.line(*inputs()))) == bool(first)
        assert changed or same
        seen.add(same)
    assert seen == {True, False}


def written_with_data(m: Model, h: Tensor) -> bool:
    m.mean.mul_(0.9).add_(h.detach().mean(0))
    return bool(m.mean.sum() > 0)


def a_part_written_with_data(m: Model, h: Tensor) -> bool:
    m.mean[:1] = h.detach().mean()
    return bool(m.mean[1:].sum() > 0)


def written_through_another_view(m: Model, h: Tensor) -> bool:
    view = m.mean.view_as(h[0])
    view.add_(h.detach().mean(0))
    return bool(m.mean.sum() > 0)


def written_by_a_norm(m: Model, h: Tensor) -> bool:
    m.norm(h)
    return bool(torch.as_tensor(m.norm.running_mean).sum() > 0)


def mixed_with_data(m: Model, h: Tensor) -> bool:
    return bool((m.step * h).sum() > 0)


def drawn(m: Model, h: Tensor) -> bool:
    return bool(torch.rand_like(m.mean).sum() > m.step)


REFUSED = [written_with_data, a_part_written_with_data, written_through_another_view, written_by_a_norm, mixed_with_data, drawn]


@pytest.mark.parametrize("asks", REFUSED)
def test_what_more_than_the_state_decides_is_refused(asks: Forward) -> None:
    with pytest.raises(CaptureError, match="what to do"):
        capture(Model(asks), inputs())


class Layered(nn.Module):
    """Layers that do the same, each with a counter of its own."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counting(count) for count in counts)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Counting(nn.Module):
    count: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()
        self.register_buffer("count", torch.tensor(count))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)) * torch.sigmoid(self.up(x)) + 1.0
        if self.count > 2:
            h = h.square()
        return x + self.down(h)


def test_each_of_equal_layers_is_asked() -> None:
    captured = capture(Layered((1, 1, 1, 9)), inputs())
    assert sorted(captured.answers.names) == [f"layers.{k}.count" for k in range(4)]
    later: Any = Layered((1, 1, 1, 9))
    assert captured.answers.changed_of(later) is None
    later.layers[2].count.fill_(3)
    assert "layers.2.count" in (captured.answers.changed_of(later) or "")


class Bounded(nn.Module):
    """Writes to its weight before it uses it, as `write` does."""

    mask: Tensor

    def __init__(self, write: Callable[[Bounded, Tensor], Tensor | None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(4, 4).double()
        self.register_buffer("mask", torch.arange(4.0, dtype=torch.float64))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            kept = self.write(self, x)
        loss = self.line(x).square().mean()
        return loss if kept is None else loss * kept


def clamped(m: Bounded, x: Tensor) -> None:
    m.line.weight.clamp_(-0.2, 0.2)


def given_as_data(m: Bounded, x: Tensor) -> None:
    m.line.weight.data = m.line.weight.data / m.line.weight.data.norm()


def rows_set(m: Bounded, x: Tensor) -> None:
    m.line.weight[1:].mul_(m.mask)
    m.line.weight[0] = 0.5
    m.line.bias.add_(m.mask.sum())


@pytest.mark.parametrize("write", [clamped, given_as_data, rows_set])
def test_what_is_written_before_a_call_is_what_the_call_writes(write: Any) -> None:
    captured = capture(Bounded(write), inputs())
    assert captured.answers.written_names <= {"line.weight", "line.bias"} and captured.answers.writes
    for seed in range(5):
        model = Bounded(write)
        with torch.no_grad():
            model.line.weight.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        held = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
        found = held | captured.answers.written(held.__getitem__)
        model(*inputs())
        for name, t in model.state_dict().items():
            assert torch.equal(found[name], t)


def kept_from_before(m: Bounded, x: Tensor) -> Tensor:
    norm = m.line.weight.norm()
    m.line.weight.div_(norm)
    return norm


def of_the_batch(m: Bounded, x: Tensor) -> None:
    m.line.bias.add_(x.mean())


def kept_in_a_buffer(m: Bounded, x: Tensor) -> None:
    m.mask.copy_(m.line.weight[0])
    m.line.weight.mul_(0.9)


def kept_in_an_attribute(m: Any, x: Tensor) -> None:
    m.before = m.line.weight.clone()
    m.line.weight.mul_(0.9)


def used_before(m: Bounded, x: Tensor) -> Tensor:
    found = m.line(x).sum()
    m.line.weight.mul_(0.9)
    return found


@pytest.mark.parametrize("write", [kept_from_before, of_the_batch, kept_in_a_buffer, kept_in_an_attribute, used_before])
def test_a_write_that_cannot_be_made_before_a_call_is_refused(write: Any) -> None:
    with pytest.raises(CaptureError, match="change parameters after optimizer"):
        capture(Bounded(write), inputs())
