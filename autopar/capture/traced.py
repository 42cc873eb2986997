"""The trace of a model: with one call for all that do the same, or with regions in the place of what no graph holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.capture.border import TracedCall, traced
from autopar.capture.changing import of_earlier_calls
from autopar.capture.drawn import Drawing
from autopar.capture.given import Inputs, copied
from autopar.capture.hidden import Hidden, Seen, can_be_hidden
from autopar.capture.instances import NotRepeated, StandIns
from autopar.capture.islands import with_islands
from autopar.capture.labels import labels_in_rows
from autopar.capture.own_gradients import OwnGradients
from autopar.capture.regions import Regions
from autopar.capture.repeats import Repeated, repeated
from autopar.capture.state import State
from autopar.capture.trace import Trace, flatten
from autopar.capture.varying import Numbers
from autopar.errors import (
    BufferMade,
    CaptureError,
    DependsOnValues,
    ForeignTensor,
    NoLoss,
    NotAsWritten,
    NumbersChange,
    OtherGradients,
    SparseGradients,
)
from autopar.run.region import Region
from autopar.run.region_modules import Applied

__all__ = ["trace_of"]


def trace_of(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State, *, outputs: bool | None,
    as_written: OwnGradients | None, leaves: tuple[str, ...] = (), sizes: bool = True, varying: Numbers, drawn: Drawing | None,
) -> tuple[TracedCall, Trace]:  # fmt: skip
    """The trace, in which the smallest submodules around what cannot be exported are one operator each, and those of `as_written` and
    `drawn`; where there is none, the operators whose sizes depend on values; and else the program holds for what inputs have decided."""
    regions = Regions(model, loss, inputs)
    if as_written is not None and as_written.whole:
        if not regions.include_model(as_written.whole):
            raise OtherGradients(f"cannot capture {type(model).__name__} with gradients that it asks for itself{as_written.remedy}")
    elif as_written is not None:
        regions.include_all(as_written)
    elif drawn is not None:
        if not regions.include_drawn(drawn):
            raise NotAsWritten(regions.why_not())
    elif not varying:
        again = repeated(model, loss, inputs, start, outputs=outputs)
        for hides in (True, False) if again.same and not leaves else ():
            with contextlib.suppress(CaptureError, NotRepeated, Seen):  # which the trace of every call explains
                return _with_stand_ins(model, loss, inputs, start, regions, again, outputs=outputs, hides=hides)
    first: CaptureError | None = None
    numbers = False
    while True:
        try:
            with regions.standing_in() as applied:
                found = traced(
                    model, loss, copied(inputs), start, outputs=outputs, sizes=sizes, leaves=leaves, numbers=numbers, varying=varying
                )
            labels_in_rows(found.exported.graph_module)
            trace = flatten(model, found.exported, start, regions, varying=varying)
            regions_there = (x for x in dict[str, Any](trace.tensors).values() if isinstance(x, Region))
            if varying and not all(isinstance(region.module, Applied) for region in regions_there):
                raise CaptureError(f"some of {type(model).__name__} runs as it is written, and reads numbers itself")
            first = None  # whose traceback holds this frame, and tensors
            return found, trace
        except (BufferMade, NoLoss, NumbersChange, OtherGradients, SparseGradients):
            raise
        except CaptureError as error:
            if varying or (isinstance(error, ForeignTensor) and of_earlier_calls(start, error.tensor)):
                raise
            first = first or error
            if regions.include_functions(applied, error) or regions.include_functions_that_draw(error) or regions.include(error):
                continue
            if isinstance(error, DependsOnValues) and with_islands(model, found.exported, inputs, regions):
                return found, flatten(model, found.exported, start, regions)
            if error.asks_inputs and not numbers:
                numbers = True
                continue
            raise CaptureError(f"{first}{regions.why_not(first)}") from first.__cause__


def _with_stand_ins(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State, regions: Regions, again: Repeated,
    *, outputs: bool | None, hides: bool,
) -> tuple[TracedCall, Trace]:  # fmt: skip
    """The trace, for which of calls that do the same one is traced. NotRepeated if they do not in the export. hides: the state of the
    others is hidden from it."""
    stand_ins = StandIns(model, again.same)
    unused = [m for path in again.same for m in model.get_submodule(path).modules()]
    if hides and not can_be_hidden(model, unused):
        raise NotRepeated("what is stood for shares memory with others")
    hidden = Hidden(unused if hides else ())
    with stand_ins.standing_in():
        found = traced(model, loss, copied(inputs), start, outputs=outputs, hidden=hidden, answers=False)  # one call is told for all
    if hidden.seen:
        raise Seen
    if found.attributes:
        raise NotRepeated("attributes of the tensors of what is stood for are read")
    if found.modes:
        raise NotRepeated("what is stood for may set training modes")
    if found.own_gradients or [str(c) for c in found.changes] != [str(c) for c in again.changes]:
        raise NotRepeated("what is stood for changes something")
    labels_in_rows(found.exported.graph_module)
    return found, flatten(model, found.exported, start, regions, stand_ins)
