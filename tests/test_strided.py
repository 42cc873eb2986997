"""as_strided by what it reads: the same values and gradients, however the tensor lies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar import verify
from autopar.capture import capture
from autopar.capture.strided import as_strided
from autopar.errors import CaptureError


@pytest.mark.pure
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_values_and_gradients_are_those_of_torch(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape).permute(order).requires_grad_()
    size, stride, left = [], [], x.numel() - 1
    own = list(zip(x.shape, x.stride(), strict=True))
    for _ in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            n, s = data.draw(st.sampled_from(own))
        else:
            n, s = data.draw(st.integers(1, 4)), data.draw(st.integers(0, x.numel()))
        if (n - 1) * s <= left:
            size.append(n)
            stride.append(s)
            left -= (n - 1) * s
    expected, found = torch.as_strided(x, size, stride), as_strided(x, size, stride)
    assert torch.equal(found, expected)
    weights = torch.rand(expected.shape, dtype=torch.float64)
    one, two = (torch.autograd.grad(y, x, weights, allow_unused=True)[0] for y in (expected, found))
    assert torch.allclose(one, two)


class Chunks(nn.Module):
    """Overlapping windows of heads that lie one beside the other, as Longformer takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.query(x).view(batch, length, 2, 4).transpose(1, 2).reshape(batch * 2, length, 4)
        h = h.transpose(0, 1).contiguous().transpose(0, 1).view(batch * 2, length // 4, 4, 4)
        size, stride = list(h.shape), list(h.stride())
        size[1], stride[1] = size[1] * 2 - 1, stride[1] // 2
        windows = h.as_strided(size, stride)
        return self.out(windows.reshape(-1, 8)).square().mean()


@pytest.mark.pure
def test_no_stride_is_in_the_program() -> None:
    torch.manual_seed(0)
    program = capture(Chunks(), (torch.randn(2, 8, 8),)).program
    targets = [op.target for op in program.ops]
    assert "aten.unfold.default" in targets and "aten.as_strided.default" not in targets


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}, {"pp": 2}], ids=str)
def test_windows_are_those_of_one_process(pins: dict[str, int]) -> None:
    torch.manual_seed(0)
    report = verify.verify(Chunks(), (torch.randn(2, 8, 8),), math.prod(pins.values()), pins=pins)
    assert report.ok


@pytest.mark.pure
@pytest.mark.parametrize(
    "read",
    [lambda x: x[:, ::2].as_strided((2, 2), (4, 1)), lambda x: x.as_strided((2, 2), (4, 1), 1), lambda x: x.t()[1:].as_strided((3,), (1,))],
)
def test_what_reads_beside_a_tensor_is_refused(read: object) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = read(self.linear(x))  # type: ignore[operator]
            return found.sum()

    with pytest.raises(CaptureError, match="reads memory beside a tensor"):
        capture(Reads(), (torch.randn(4, 4),))




@pytest.mark.pure
def test_memory_by_its_place_is_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.ops.aten.as_strided(self.linear(x), (2, 2), (1, 1))
            return found.sum()

    with pytest.raises(CaptureError, match="reads memory by its place"):
        capture(Reads(), (torch.randn(4, 4),))


@pytest.mark.pure
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_writes_beside_a_vmap_have_gradients() -> None:
    """torch functionalizes the whole graph there, and makes a copy of each write, which has no derivative."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(4)
            mask = torch.vmap(lambda place: places <= place)(places)
            h = self.linear(x).clone()
            for i in range(1, 4):
                h[..., i, :i] = h[..., i, :i] * 2 + h[..., :i, i]
                h[..., i, i] = 1
            return h.masked_fill(~mask, 0).square().sum()

    torch.manual_seed(0)
    captured = capture(Masked(), (torch.randn(2, 4, 4),))  # which compares the loss and all gradients
    assert not any(op.target == "aten.copy.default" for op in captured.program.ops)
