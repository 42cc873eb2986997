"""Sizes that follow from values, where these follow from sizes, numbers or the model's state: programs of fixed sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import Captured, capture, program_hash
from autopar.run.region import REGION

pytestmark = pytest.mark.pure

WIDTH = 8
Forward = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Two linear layers, and what a forward may ask."""

    keep: Tensor
    few: Tensor
    order: Tensor
    bank: Tensor

    def __init__(self, computes: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.gate = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float64))
        self.register_buffer("keep", torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool))
        self.register_buffer("few", torch.arange(3 * WIDTH).view(3, WIDTH) % 5 > 2)
        self.register_buffer("order", torch.tensor([3, 1, 2]))
        self.register_buffer("bank", torch.tensor([1, 0, 1, 0]))
        self.sizes = torch.tensor([3, 5])
        self.computes = computes

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.computes(self, x, y).square().mean() + 0 * self.gate.sum()


def views_of_a_batch(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """The contrastive loss of SimCLR: all similarities but those of samples with themselves."""
    z = F.normalize(torch.cat([m.b(m.a(x)), m.b(m.a(y))]), dim=1)
    n = len(x)
    same = torch.arange(n, device=x.device).repeat(2)
    alike, own = same[:, None] == same[None], torch.eye(2 * n, dtype=torch.bool, device=x.device)
    alike, found = alike[~own].view(2 * n, -1), (z @ z.T)[~own].view(2 * n, -1)
    logits = torch.cat([found[alike].view(2 * n, -1), found[~alike].view(2 * n, -1)], 1)
    return F.cross_entropy(logits / 0.1, torch.zeros(2 * n, dtype=torch.long, device=x.device))


def crops_of_several_sizes(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """Those of one size that follow one another go through the network together."""
    crops = [x, y, x[:, :4], y[:, 4:], x[:, 2:6]]
    ends = torch.unique_consecutive(torch.tensor([c.shape[-1] for c in crops]), return_counts=True)[1].cumsum(0)
    start, found = 0, torch.empty(0)
    for end in ends:
        own = torch.cat(crops[start:end])
        found = torch.cat((found, F.linear(own, m.a.weight[:, : own.shape[1]])))
        start = end
    return found


def levels(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """A deformable attention's levels, whose heights and widths are a tensor."""
    shapes = torch.as_tensor([[2, 2], [1, 4]], device=x.device)
    starts = torch.cat((shapes.new_zeros((1,)), shapes.prod(1).cumsum(0)[:-1]))
    h, total = m.a(x), torch.zeros(len(x), dtype=x.dtype)
    for (height, width), start in zip(shapes, starts, strict=True):
        part = h[:, start : start + height * width].view(-1, height, width)
        total = total + (part * torch.linspace(0.5, height - 0.5, height)[None, :, None]).sum((1, 2))
    first, second = m.b(y).split([height * width for height, width in shapes], dim=1)
    return total + first.sum(1) - second.sum(1)


def lower_triangle(m: Model, x: Tensor, y: Tensor) -> Tensor:
    found = torch.stack([m.a(x), m.b(y), x + y], 1)
    places = torch.tril(torch.ones(3, 3), -1).nonzero(as_tuple=True)
    return (found @ found.transpose(1, 2))[:, places[0], places[1]]


def band(m: Model, x: Tensor, y: Tensor) -> Tensor:
    places = torch.arange(WIDTH)
    mask = (places[None] - places[:, None]).abs() <= 1
    rows, columns = torch.where(mask)
    found = m.a(x)[:, :, None] * m.b(y)[:, None]
    return found[:, mask] + found[:, rows, columns] + found.masked_select(mask).view(len(x), -1)


def loops(m: Model, x: Tensor, y: Tensor) -> Tensor:
    total = m.b(y)[:, 0]
    for i in torch.arange(WIDTH):
        total = total + m.a(x)[:, i] * (i + 1)
    for k in torch.arange(0, WIDTH, 2).tolist():
        total = total + m.b(y)[:, k]
    return total


def numbers(m: Model, x: Tensor, y: Tensor) -> Tensor:
    count = math.ceil(torch.tensor(x.shape[-1]) / 3)
    h = m.a(x)
    for rate in (r.item() for r in torch.linspace(0, 0.5, 3)):
        h = h * (1 - rate) + m.b(h) * rate
    return h[:, :count] + (m.b(y)[:, :count] if torch.ones_like(y).sum() > 10 else 0)


def repeats(m: Model, x: Tensor, y: Tensor) -> Tensor:
    counts, ranks = torch.tensor([2, 0, 3, 3]), torch.repeat_interleave(torch.arange(3), torch.tensor([2, 3, 3]))
    return torch.repeat_interleave(m.a(x)[:, :4], counts, dim=1) * ranks + m.b(y)


def of_a_tensor_of_its_own(m: Model, x: Tensor, y: Tensor) -> Tensor:
    ends = m.sizes.cumsum(0)
    first, second = torch.split(m.a(x), m.sizes.tolist(), 1)
    return first.sum(1) + (second * m.b(y)[:, ends[0] : ends[1]]).sum(1)


def of_buffers(m: Model, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x)[:, m.keep]
    for i in m.order:
        h = h + m.b(y)[:, m.keep.nonzero().squeeze(1)] * i
    return h.sum(1) + m.a(x)[:, None].expand(-1, 3, -1)[:, m.few].sum(1)


def copies_in_place(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """As rotary embeddings have them: a number of copies follows from no values."""
    angles = torch.arange(WIDTH)[:, None] * m.gate.detach()[None, : WIDTH // 2]
    return m.a(x) * torch.repeat_interleave(angles, 2, dim=-1).cos()[0] + m.b(y)


def weights_that_repeat(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """Gradients go through what is repeated, though the state alone decides it."""
    return m.a(x) * torch.repeat_interleave(m.gate[:4], torch.tensor([2, 2, 3, 1])) + m.gate[torch.arange(WIDTH) > 3].sum()


def captured(computes: Forward) -> tuple[Model, Captured]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    model = Model(computes)
    return model, capture(model, (x, y))  # which compares loss and gradients


def runs_as_written(found: Captured) -> bool:
    return any(op.target == REGION for op in found.program.ops)


@pytest.mark.parametrize(
    "computes",
    [
        views_of_a_batch, crops_of_several_sizes, levels, lower_triangle, band, loops, numbers, repeats, of_a_tensor_of_its_own,
        of_buffers, copies_in_place, weights_that_repeat,
    ],
)  # fmt: skip
def test_what_follows_from_known_values_has_fixed_sizes(computes: Forward) -> None:
    _, found = captured(computes)
    assert not runs_as_written(found)


def test_what_state_decides_is_asked_again() -> None:
    model, found = captured(of_buffers)
    assert found.answers.changed_of(model) is None
    model.keep[1] = True
    changed = found.answers.changed_of(model)
    assert changed is not None and "keep" in changed and "of_buffers" not in changed


@pytest.mark.parametrize("computes", [views_of_a_batch, copies_in_place])
def test_what_sizes_decide_is_not_asked_again(computes: Forward) -> None:
    _, found = captured(computes)
    assert not found.answers.questions


def written_by_the_batch(m: Model, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(WIDTH, dtype=torch.bool)
    mask[x.sum(0).argmax().reshape(1)] = True
    return m.a(x)[:, mask]


def written_through_a_view(m: Model, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(WIDTH, dtype=torch.bool)
    mask[1:].logical_or_((x[:, 1:] > 0.5).any(0))
    return m.a(x)[:, mask]


def drawn(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return m.a(x)[:, torch.ones(WIDTH).bernoulli_(0.5) > 0]


def written_in_every_call(m: Model, x: Tensor, y: Tensor) -> Tensor:
    found = m.a(x)[:, m.keep.clone()]
    m.keep.copy_(x.sum(0) > 0)
    return found


def trained(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return m.a(x)[:, m.gate > 0.2]


@pytest.mark.parametrize("computes", [written_by_the_batch, written_through_a_view, trained])
def test_what_goes_on_changing_runs_as_it_is_written(computes: Forward) -> None:
    _, found = captured(computes)
    assert runs_as_written(found)
    assert not found.answers.questions


def test_what_is_drawn_is_not_known() -> None:
    _, found = captured(drawn)
    assert runs_as_written(found)


def test_what_the_forward_writes_itself_is_asked_again() -> None:
    model, found = captured(written_in_every_call)
    assert found.answers.changed_of(model) is None
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    model(x, x)
    assert found.answers.changed_of(model) is not None


def test_state_may_be_kept_from_deciding_sizes() -> None:
    model, x = Model(of_buffers), torch.randn(8, WIDTH, dtype=torch.float64)
    found = capture(model, (x, x), sizes=False)
    assert runs_as_written(found) and not found.answers.questions
    assert not runs_as_written(capture(Model(views_of_a_batch), (x, x), sizes=False))


def test_a_model_without_data_is_the_same_program() -> None:
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    _, real = captured(views_of_a_batch)
    found = capture(Model(views_of_a_batch).to("meta"), (x.to("meta"), x.to("meta")))
    assert program_hash(found.program) == program_hash(real.program)
