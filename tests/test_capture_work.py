"""On how many samples what was captured is compared with the model, where all of the batch would be hours of work."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture import Captured, capture, fewer, passes, program_hash
from autopar.capture.flops import ELEMENT, work_of
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).square().mean()


def captured(model: nn.Module, monkeypatch: pytest.MonkeyPatch, *, samples: float, of: int = 16) -> tuple[Captured, list[int]]:
    """With so much work allowed as that many samples are; and on how many the model was called, to be compared."""
    given, seen = (torch.randn(of, 64),), list[int]()
    work, calls = work_of(capture(model, given, check=False).program), passes.observed

    def noted(model: nn.Module, loss: Any, inputs: Any, start: Any, found: Any, compared: Any, **how: Any) -> Any:
        seen.extend([] if compared is None else [inputs[0][0].shape[0]])
        return calls(model, loss, inputs, start, found, compared, **how)

    monkeypatch.setattr(passes, "observed", noted)
    monkeypatch.setitem(fewer.MOST, "cpu", samples / of * work)
    return capture(model, given), seen


@pytest.mark.parametrize(
    ("samples", "compared", "said"),
    [
        (16, [16], ""), (5.5, [5], "compared with the model on 5 samples alone"), (1.5, [2], "compared with the model on 2 samples alone"),
        (0.1, [2], "compared with the model on 2 samples alone"),
        (0.05, [16], ""),  # of one sample batch norm makes no statistics: it cannot be captured
        (0.03, [], "not compared with the model, of which one sample is much to compute"),
    ],
)  # fmt: skip
def test_as_many_samples_as_are_not_too_much(samples: float, compared: list[int], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    found, seen = captured(model, monkeypatch, samples=samples)
    assert seen == compared
    assert found.program.types[found.program.inputs[0].value].shape == (16, 64)
    assert [note.partition(": ")[0] for note in found.program.notes] == ([f"the captured program was {said}"] if said else [])
    assert program_hash(found.program) == program_hash(capture(model, (torch.randn(16, 64),), check=False).program)


def test_what_differs_on_fewer_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * random.random()

    with pytest.raises(CaptureError, match="random"):
        captured(Drawing(), monkeypatch, samples=4)


def test_a_batch_that_cannot_be_cut_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return (self.layer(x) @ table.T).square().mean()

    given = (torch.randn(16, 64), torch.randn(3, 64))
    monkeypatch.setitem(fewer.MOST, "cpu", 1.0)
    (note,) = capture(Two(), given).program.notes
    assert note.startswith("the captured program was not compared with the model")


class Mixed(nn.Module):
    """Products of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 32)
        self.table = nn.Parameter(torch.randn(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.conv(x).flatten(2).transpose(1, 2))
        q = torch.baddbmm(torch.zeros((), dtype=x.dtype), h, self.table.expand(len(x), 32, 16))
        return F.scaled_dot_product_attention(q[:, None], q[:, None], q[:, None]).square().mean()


def test_work_is_counted_as_torch_counts_it() -> None:
    model, x = Mixed(), torch.randn(3, 4, 6, 6)
    program = capture(model, (x,)).program
    with FlopCounterMode(display=False) as counter:
        model(x)
    attention = 2 * 3 * 36 * 36 * (16 + 16)  # by a kernel for CPUs, which torch does not count
    made = sum(program.types[o].numel for op in program.ops for o in op.outputs if o is not None)
    assert work_of(program) == pytest.approx(3 * (counter.get_total_flops() + attention + ELEMENT * made))
