"""What an export leaves out, and what one capture keeps for the next: it makes no difference to what is captured."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture, export
from autopar.capture.infer import Inference, Meta
from autopar.ir import Op, Ref
from benchmarks._small import MODELS

pytestmark = pytest.mark.pure


def _scaled(x: Tensor) -> Tensor:
    return x * 2.0


class OfThreeLines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight)
        h = _scaled(h)
        return F.mse_loss(
            h,
            torch.relu(x),
        )


@pytest.mark.parametrize("name", ["three lines", "gpt", "resnet"])
def test_the_program_is_that_of_an_export_that_leaves_nothing_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators and their lines too."""
    model, inputs = (OfThreeLines(), (torch.randn(3, 4),)) if name == "three lines" else MODELS[name]()
    less = capture(model, inputs).program
    assert less.ops and all(op.source for op in less.ops if op.module or name == "three lines")
    monkeypatch.setattr(export, "_no_more", contextlib.nullcontext)
    assert capture(model, inputs).program == less


def test_an_operator_has_the_line_of_the_forward_that_leads_to_it() -> None:
    ops = capture(OfThreeLines(), (torch.randn(3, 4),)).program.ops
    (line,) = {op.source for op in ops if op.target == "aten.mul.Tensor"}
    assert line.startswith("test_capture_once.py:") and line.endswith("h = _scaled(h)")


def test_types_depend_on_the_default_dtype() -> None:
    op = Op(target="aten.div.Tensor", args=(Ref("a"), Ref("b")), outputs=("c",), module="", source="")
    whole = Meta((3,), (1,), torch.int64)
    found = []
    for dtype in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            found += [m.dtype for m in Inference()(op, {"a": whole, "b": whole}) if m is not None]
        finally:
            torch.set_default_dtype(before)
    assert found == [torch.float32, torch.float64]
