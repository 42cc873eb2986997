"""Everything autopar raises on purpose. `exit_code` is what the command line returns for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = [
    "AutoparError", "CaptureError", "CheckpointError", "Infeasible", "LaunchError", "NoLoss", "PlanError", "RenderError",
    "SettingError", "SparseGradients", "UnsupportedOp", "VerificationError",
]  # fmt: skip


class AutoparError(Exception):
    """Base of all autopar errors; the message says what was done, what was found and what to do now."""

    exit_code = 2


class CaptureError(AutoparError):
    """The model cannot be captured as a graph, or its capture does not compute what the model computes. module, line: of the model, where
    that is known. asks_inputs: its code asks for numbers that the inputs alone decide, and was not told."""

    exit_code = 4
    module: str | None = None
    line: str = ""
    asks_inputs: bool = False


class DependsOnValues(CaptureError):
    """A size or an argument in the graph is a number that values of tensors decide."""


class BufferMade(CaptureError):
    """A call gives a buffer another shape, or dtype, than it has."""


class StateChanges(CaptureError):
    """Each call of the model changes what no graph has. places: where, as the picture of a model names it. begun: attributes and closures,
    among these places or around them, that hold something else when the model is captured than after a call. marks: those that may say that
    a call has been."""

    def __init__(
        self, message: str = "", places: Sequence[str] = (), *, begun: Collection[str] = (), marks: Collection[str] = ()
    ) -> None:
        super().__init__(message)
        self.places, self.begun, self.marks = tuple(places), frozenset(begun), frozenset(marks)


class NumbersChange(StateChanges):
    """Each call of the model changes numbers that stand in attributes."""


class TensorsChange(StateChanges):
    """Each call of the model changes tensors that are neither parameters nor buffers. attached: what a call leaves there requires a
    gradient."""

    def __init__(self, message: str = "", places: Sequence[str] = (), *, attached: bool = False, **begun: Collection[str]) -> None:
        super().__init__(message, places, **begun)
        self.attached = attached


class ForeignTensor(CaptureError):
    """The model's code uses a tensor that requires a gradient and is not its own."""

    def __init__(self, message: str, tensor: object) -> None:
        super().__init__(message)
        self.tensor = tensor


class OtherGradients(CaptureError):
    """The model's code has gradients of its own, or asks for some, which no graph of operators shows."""


class DrawsOutside(CaptureError):
    """What a model computes depends on random numbers of other generators than torch's, which a graph would hold."""


class NotAsWritten(CaptureError):
    """What draws random numbers cannot run as it is written, and why: lines to add to another error."""


class SparseGradients(CaptureError):
    """A parameter has a sparse gradient, which no program has, however the model is captured."""


class NoLoss(CaptureError):
    """The model returns nothing that could be differentiated: it was called without labels, perhaps."""


class UnsupportedOp(AutoparError):
    """An operator that a plan would have to split in a way for which no sound strategy is known."""

    exit_code = 3


class Infeasible(AutoparError):
    """No plan satisfies the constraints (memory, pins, divisibility); the message names the binding one, and what was tried and would do.
    more: what else was refused, a line each."""

    exit_code = 3

    def __init__(self, message: str = "", more: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.more = tuple(more)


class PlanError(AutoparError):
    """A plan file that is corrupt, foreign, or was made for another model."""


class RenderError(AutoparError):
    """A plan that cannot be written as source; a defect of autopar rather than of its user."""

    exit_code = 1


class CheckpointError(AutoparError, ValueError):
    """A checkpoint that cannot be written or read, or that is of another model or optimizer."""


class SettingError(AutoparError, ValueError):
    """An environment variable whose value makes no sense."""


class LaunchError(AutoparError):
    """The process group does not match the plan, or the ranks disagree about the data they were given."""


class VerificationError(AutoparError):
    """The parallel module does not compute what the original does, or that cannot be compared."""

    exit_code = 1
