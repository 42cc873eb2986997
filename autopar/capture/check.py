"""Does the captured program compute what the model computes? Both are called twice in a row on the example inputs: losses, gradients
and every buffer are compared after each call. What else the model's code changes, `calls` has looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.capture.answers import NONE, Answers
from autopar.capture.calls import Call, Calls, gradients_of
from autopar.capture.given import otherwise
from autopar.capture.interpret import run_whole_program
from autopar.capture.source import first_line
from autopar.errors import CaptureError, NumbersChange, OtherGradients
from autopar.ir import Program
from autopar.run.outputs import Returned
from autopar.run.outside_draws import from_seed
from autopar.run.varying import NUMBERS, as_tensor

__all__ = ["check_program", "trainable_tensors"]

Gradients = tuple[torch.Tensor | None, ...]

# The largest difference allowed, relative to the largest gradient: many roundings of the precision, far below any real difference.
_TOLERANCE: dict[torch.dtype | None, float] = {
    torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.complex128: 1e-9, torch.complex64: 1e-4,
}  # fmt: skip
# What running operators one by one may end with, where the model's own run did not.
_FAILURES = (ArithmeticError, AssertionError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def trainable_tensors(program: Program, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters that are trained, by value name. CaptureError if there is nothing to differentiate by."""
    found = {p.value: tensors[p.value] for p in program.params if p.trainable}
    if not found and not any(program.types[i.value].grad for i in program.inputs):
        raise CaptureError("no parameter of the model requires a gradient, so there is nothing to train")
    return found


def check_program(
    program: Program, calls: Calls, tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], names: tuple[str, ...] = (),
    *, dtype: torch.dtype | None = None, answers: Answers = NONE, returned: Returned | None = None,
) -> None:  # fmt: skip
    """Runs the program as often as the model was called. CaptureError names the parameters, buffers and outputs that differ. names: the
    output of the program that each tensor is that the model returns beside the loss. dtype: what the model computed in, if not in that of
    its parameters. answers: with what a call writes to parameters before it uses them. returned: how the first of the tensors stand in
    what the model returns.

    calls: with the gradients of `trainable_tensors`. inputs: by value name, in the order of their leaves. Nothing that is given is changed.
    NumbersChange for what the first call alone changes, and later ones may read.
    """
    _Comparison(program, calls, tensors, inputs, names, dtype=dtype, answers=answers, returned=returned).run()


class _Comparison:
    """As of `check_program`. leaves: what is differentiated, by value. state: of the buffers, after the calls so far."""

    def __init__(
        self, program: Program, calls: Calls, tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor],
        names: tuple[str, ...], *, dtype: torch.dtype | None, answers: Answers, returned: Returned | None,
    ) -> None:  # fmt: skip
        self.program, self.calls, self.names, self.dtype, self.answers, self.returned = program, calls, names, dtype, answers, returned
        self.leaves = trainable_tensors(program, tensors) | {value: t for value, t in inputs.items() if t.requires_grad}
        self.tensors, self.inputs = dict(tensors), dict(inputs)
        self.fqn_of = {p.value: p.fqn for p in program.params} | {i.value: f"the input {i.value}" for i in program.inputs}
        self.value_of = {p.fqn: p.value for p in program.params} | {b.fqn: b.value for b in program.buffers if b.fqn is not None}
        self.state = {b.value: tensors[b.value].detach().clone() for b in program.buffers}

    def run(self) -> None:
        for number, call in enumerate(self.calls.calls):
            which = "" if number == 0 else f" at call {number + 1} in a row"
            self._begin(number, call)
            try:
                found, outputs, gradients, scaled = self._ran(number, call, which)
                self._compare(call, which, found, outputs, gradients, scaled)
            except CaptureError as error:
                numbers = [change.path for change in self.calls.settled if change.of_numbers]
                if not number or not (numbers or self.calls.once):
                    raise
                raise NumbersChange(str(error), numbers, marks=self.calls.once) from error.__cause__

    def _begin(self, number: int, call: Call) -> None:
        """What the program is given in a call."""
        program, tensors, inputs, leaves = self.program, self.tensors, self.inputs, self.leaves
        if call.otherwise:
            tensors |= {p.value: otherwise(tensors[p.value]) for p in program.params}
            inputs |= {i.value: otherwise(inputs[i.value]) for i in program.inputs if i.path[:1] != (NUMBERS,)}
            leaves |= {value: t for value, t in {**tensors, **inputs}.items() if value in leaves}
        written = self.answers.written({name: tensors[value] for name, value in self.value_of.items()}.__getitem__)
        leaves |= {self.value_of[name]: value.requires_grad_() for name, value in written.items()}
        tensors |= leaves
        if number:
            again = (b.value for b in program.buffers if b.fqn in self.calls.set_back)
            self.state |= {value: tensors[value].detach().clone() for value in again}
        standing = {i.value: as_tensor(call.numbers[int(i.path[1])]) for i in program.inputs if i.path[:1] == (NUMBERS,)}
        inputs |= {value: t.detach().requires_grad_(t.requires_grad) for value, t in standing.items()}
        leaves |= {value: inputs[value] for value, t in standing.items() if t.requires_grad}

    def _ran(self, number: int, call: Call, which: str) -> tuple[torch.Tensor, list[torch.Tensor], Gradients, dict[float, Gradients]]:
        """The loss, the other outputs, the gradients of the leaves, and those of the loss that is scaled."""
        program, leaves = self.program, list(self.leaves.values())
        try:
            scaled = {}
            for scale in call.scaled:
                with torch.enable_grad(), from_seed(number):
                    own = {value: tensor.clone() for value, tensor in self.state.items()}
                    scaled[scale] = gradients_of(run_whole_program(program, {**self.tensors, **self.inputs, **own})[0], leaves, scale)
            with torch.enable_grad(), from_seed(number):
                found, *outputs = run_whole_program(program, self.tensors | self.inputs | self.state)
                gradients = gradients_of(found, leaves)
        except _FAILURES as e:
            raise CaptureError(
                f"the captured program of {program.name} cannot run{which}: {first_line(e)}\n  what to do: look for values of tensors that "
                f"become Python numbers in the forward (.item(), int(), asserts), and keep them tensors"
            ) from e
        return found, outputs, gradients, scaled

    def _compare(
        self, call: Call, which: str, found: torch.Tensor, outputs: Sequence[torch.Tensor], gradients: Gradients,
        scaled: Mapping[float, Gradients],
    ) -> None:  # fmt: skip
        program, leaves, calls = self.program, self.leaves, self.calls
        tolerance = max(_TOLERANCE.get(d, 0.0) for d in (*(t.dtype for t in leaves.values()), call.loss.dtype, self.dtype))
        if not _close(call.loss, found, tolerance * max(1.0, abs(call.loss.item()))):
            raise CaptureError(
                f"the captured program's loss{which} is {found.item()!r}, the model's is {call.loss.item()!r}\n  what to do: if the "
                f"forward draws random numbers from Python or numpy, make it draw from torch; if it keeps state from call to call"
                f"{_of(calls)}, keep it in a buffer; if its first call sets something up, call the model once before compiling it; if it "
                f"asks whether it is traced, ask torch.compiler.is_compiling() under that name; else this is a defect of autopar"
            )
        by_name = dict(zip(program.outputs, outputs, strict=True))
        ours = [by_name[name] for name in self.names]
        if self.returned is not None:
            ours = [*self.returned.in_order(ours), *ours[len(self.returned.names) :]]
        for k, (our, output) in enumerate(zip(ours, call.returned, strict=True)):
            if not _same_output(output, our, tolerance):
                raise CaptureError(
                    f"tensor {k} of what {program.name} returns beside its loss, {list(output.shape)}, is another one in the captured "
                    f"program{which}\n  what to do: compile with outputs='loss', and give what else you need a model of its own"
                )
        wrong = _wrong(leaves, (*call.gradients, *call.of_inputs), gradients, tolerance)
        for factor, expected in call.scaled.items():  # what is cut off where gradients are large, or left out where they are small
            wrong = wrong or _wrong(leaves, expected, scaled[factor], tolerance)
        wrong = [self.fqn_of[value] for value in wrong]
        if wrong:
            raise OtherGradients(
                f"the captured program's gradients of {_listed(wrong)} differ from the model's{which} by more than {tolerance:g} of the "
                f"largest\n  what to do: look for torch.no_grad, .detach(), .data, requires_grad_(...) in the forward, custom autograd "
                f"functions, and hooks that are removed again on the way to these parameters"
            )
        named = {b.fqn: b.value for b in program.buffers if b.fqn is not None and not b.region}
        wrong = [fqn for fqn, value in named.items() if not _same_buffer(call.buffers[fqn], self.state[value], tolerance)]
        if wrong:
            raise CaptureError(
                f"the captured program's buffers {_listed(wrong)} differ{which} from what the model's forward makes of them{_of(calls)}\n"
                f"  what to do: assign or change them where the forward is traced, by operators of torch; to ask whether it is traced, ask "
                f"torch.compiler.is_compiling() under that name"
            )


def _wrong(
    leaves: Mapping[str, torch.Tensor], expected: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor | None], tolerance: float
) -> list[str]:
    """Of which leaves the gradients differ by more than the tolerance, relative to the largest of all; and those that have none, where the
    model's is there, if only zeros: a last layer that begins with zeros hides what is behind it."""
    scale = max((float(g.abs().max()) for g in expected if g is not None and g.numel()), default=0.0)
    wrong = []
    for value, a, b in zip(leaves, expected, found, strict=True):
        zero = torch.zeros_like(leaves[value])
        if (b is None and a is not None) or not _close(zero if a is None else a, zero if b is None else b, tolerance * scale):
            wrong.append(value)
    return wrong


def _of(calls: Calls) -> str:
    """What the first call changed, which may be why later ones differ."""
    return f" (its first call changes {'; '.join(map(str, calls.settled[:3]))})" if calls.settled else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return bool(((a - b).abs() <= tolerance).logical_or(a == b).logical_or(a.isnan() & b.isnan()).all())


def _same_output(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return False
    if not expected.dtype.is_floating_point and not expected.is_complex():
        return torch.equal(expected, found)
    finite = expected.detach()[expected.isfinite()].abs()
    return _close(expected, found, tolerance * max(1.0, float(finite.max()) if finite.numel() else 0.0))


def _same_buffer(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, found)
    finite = expected[expected.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return _close(expected, found, max(tolerance, _TOLERANCE.get(expected.dtype, 0.0)) * scale)
