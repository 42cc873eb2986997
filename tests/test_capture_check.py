"""What capture believes, it has compared: a program that is one percent off in a loss, a gradient or a buffer is noticed, whatever
their size is, at the first call or at the second."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.capture.calls import Calls, call_twice
from autopar.capture.check import _wrong, check_program
from autopar.capture.state import State
from autopar.errors import CaptureError
from autopar.ir import Op, Program, Ref, map_refs

pytestmark = pytest.mark.pure

BATCH, DIM = 4, 6


class Model(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(DIM, DIM), scale
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.mean = 0.5 * self.mean + h.detach().mean(0)
        return (h - self.mean).pow(2).sum() * self.scale


def captured(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Captured, Calls, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, x = Model(scale).to(dtype), torch.randn(BATCH, DIM, dtype=dtype)
    found = capture(model, (x,))
    calls = call_twice(model, None, ((x,), {}), State.take(model), tuple(model.parameters()), compare=True)
    return found, calls, {found.program.inputs[0].value: x}


def after(program: Program, value: str, *ops: Op) -> Program:
    """The program with operators behind the one that makes a value; whoever read the value reads the last one's result."""
    at = next(i for i, op in enumerate(program.ops) if value in op.outputs)
    renamed = {value: ops[-1].name}
    rest = (map_refs(op, lambda n: Ref(renamed.get(n, n))) for op in program.ops[at + 1 :])
    return program.replace(
        ops=(*program.ops[: at + 1], *ops, *rest),
        loss=renamed.get(program.loss, program.loss),
        mutations=tuple((buffer, renamed.get(v, v)) for buffer, v in program.mutations),
    )


def times(value: str, factor: float, name: str) -> Op:
    return Op(target="aten.mul.Tensor", args=(Ref(value), factor), outputs=(name,))


def gradient_off(program: Program, value: str, by: float) -> Program:
    """The same values; the gradient through one of them is 1 + by times as large."""
    detached = Op(target="aten.detach.default", args=(Ref(value),), outputs=("stopped",))
    moved = Op(target="aten.sub.Tensor", args=(Ref(value), Ref("stopped")), outputs=("moved",))
    total = Op(target="aten.add.Tensor", args=(Ref(value), Ref("moved")), kwargs=(("alpha", by),), outputs=("total",))
    return after(program, value, detached, moved, total)


SCALES = [1e-6, 1.0, 1e6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_the_right_program_passes_and_wrong_gradients_do_not(scale: float, dtype: torch.dtype) -> None:
    found, calls, inputs = captured(scale, dtype)
    linear = next(op for op in found.program.ops if op.target == "aten.linear.default").name
    check_program(found.program, calls, found.tensors, inputs)
    check_program(gradient_off(found.program, linear, 1e-12), calls, found.tensors, inputs)
    for by in (0.01, -0.01, 1e-3):
        with pytest.raises(CaptureError, match=r"gradients of linear\.weight"):
            check_program(gradient_off(found.program, linear, by), calls, found.tensors, inputs)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_a_loss_that_is_one_percent_off_is_noticed(scale: float) -> None:
    found, calls, inputs = captured(scale)
    wrong = after(found.program, found.program.loss, times(found.program.loss, 1.01, "off"))
    with pytest.raises(CaptureError, match="the captured program's loss is"):
        check_program(wrong, calls, found.tensors, inputs)


def test_buffers_that_are_off_or_forgotten_are_noticed() -> None:
    found, calls, inputs = captured()
    ((buffer, value),) = found.program.mutations
    off = found.program.replace(ops=(*found.program.ops, times(value, 1.01, "off")), mutations=((buffer, "off"),))
    for wrong in (off, found.program.replace(mutations=())):
        with pytest.raises(CaptureError, match="buffers mean differ from"):
            check_program(wrong, calls, found.tensors, inputs)


def test_what_only_the_second_call_shows_is_noticed() -> None:
    """The program with the buffer as it was at the first call."""
    found, calls, inputs = captured()
    first = dataclasses.replace(calls.calls[0], buffers=calls.calls[1].buffers)
    again = dataclasses.replace(calls, calls=(calls.calls[0], dataclasses.replace(first, loss=calls.calls[1].loss)))
    check_program(found.program, calls, found.tensors, inputs)
    with pytest.raises(CaptureError, match="differ from the model's at call 2 in a row"):
        check_program(found.program, again, found.tensors, inputs)


def test_a_program_that_cannot_run_is_a_capture_error() -> None:
    found, calls, inputs = captured()
    impossible = Op(target="aten.view.default", args=(Ref(found.program.loss), (7,)), outputs=("seven",))
    with pytest.raises(CaptureError, match="the captured program of Model cannot run: RuntimeError(.|\n)*what to do"):
        check_program(after(found.program, found.program.loss, impossible), calls, found.tensors, inputs)


class Histogram(nn.Module):
    """Counts integers, as routers of experts do; the CPU has no kernel for that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        ids = h.argmax(-1)
        counts = torch.histc(ids.float() if x.device.type == "cpu" else ids.int(), bins=DIM, min=0, max=DIM - 1)
        return (h * counts).sum()


def test_histograms_of_integers_are_captured_without_data() -> None:
    program = capture(Histogram().to("meta"), (torch.randn(BATCH, DIM),)).program
    casts = [op.args[1] for op in program.ops if op.target == "aten.to.dtype"]
    assert casts == [torch.int32, torch.float64, torch.int32]
    assert [op for op in program.ops if op.target == "aten.histc.default"]
    capture(Histogram(), (torch.randn(BATCH, DIM),))


class Returning(nn.Linear):
    def forward(self, input: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input)
        return {"loss": logits.sum(), "logits": logits}


def test_what_the_model_returns_beside_the_loss_is_said() -> None:
    x = (torch.randn(BATCH, DIM),)
    assert capture(Returning(DIM, DIM), x).returns == "dict with keys ['loss', 'logits']"
    assert capture(nn.Linear(DIM, DIM), x, loss=torch.sum).returns == ""


def test_no_gradient_is_not_one_of_zeros() -> None:
    """Behind a last layer of zeros all gradients are zeros: a way that a program has lost is seen by there being none."""
    leaves = {"weight": torch.ones(2), "bias": torch.ones(2)}
    zeros, ones = torch.zeros(2), torch.ones(2)
    assert _wrong(leaves, [zeros, ones], [None, ones], 1e-4) == ["weight"]
    assert _wrong(leaves, [zeros, ones], [zeros, ones], 1e-4) == []
    assert _wrong(leaves, [None, ones], [zeros, ones], 1e-4) == []
