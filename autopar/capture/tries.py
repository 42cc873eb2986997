"""A model is captured: what is tried, one after another, until a program holds for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.appended import Appended, emptied
from autopar.capture.applied import keeping_what_runs_again
from autopar.capture.around import as_not_traced
from autopar.capture.as_buffers import as_buffers, foreseen
from autopar.capture.aside import sparse_buffers_aside
from autopar.capture.border import Stopped
from autopar.capture.captured import Captured
from autopar.capture.changing import of_earlier_calls
from autopar.capture.defaults import made_own
from autopar.capture.drawn import drawing
from autopar.capture.export import FAILURES
from autopar.capture.fewer import captured_and_compared
from autopar.capture.given import Inputs, copied
from autopar.capture.held import Place, is_in
from autopar.capture.imported import with_what_is_imported
from autopar.capture.made import holding
from autopar.capture.own_gradients import own_gradients, runs_again
from autopar.capture.passes import captured_by
from autopar.capture.shaped import as_a_call_leaves_it
from autopar.capture.state import State
from autopar.capture.without_data import on_meta
from autopar.errors import (
    BufferMade,
    CaptureError,
    DrawsOutside,
    ForeignTensor,
    NoLoss,
    NotAsWritten,
    NumbersChange,
    OtherGradients,
    SparseGradients,
    StateChanges,
    TensorsChange,
)
from autopar.run.grad_mode import buffers_without_gradients
from autopar.run.inputs import Arguments, arguments_of, given_as
from autopar.run.precision import computing_in, inputs_in
from autopar.run.unwatched import unwatched
from autopar.run.varying import NO_NUMBERS, Varying

__all__ = ["capture"]


def capture(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Arguments,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    check: bool = True,
    outputs: bool | None = False,
    dtype: torch.dtype | None = None,
    written: Collection[str] = (),
    trains: bool = True,
    sizes: bool = True,
    data: bool = True,
    beside: Callable[[Arguments], Captured] | None = None,
    varying: Varying = NO_NUMBERS,
    again: bool = False,
) -> Captured:
    """The model's forward pass to its scalar loss as a Program, in the model's present mode (train or eval).

    example_inputs: a tuple of positional or a mapping of keyword inputs of one call, the global batch; shapes are frozen to theirs. The
    model may lie on the meta device; of its inputs only shapes and dtypes are taken then. loss: loss(output) gives the scalar loss where
    the forward does not return one. check: run model and program twice in a row on the inputs and compare loss, gradients and buffers (not
    on meta; on fewer samples where one device has no memory for all, or they are much to compute, which a note says). outputs: the tensors
    that the model returns
    beside the loss are in the program too; None: if it returns no loss, for the user to make one of them. dtype: what float32 parameters
    and inputs are cast to where they are used (`run.precision`); None: nothing is cast. written: names of frozen parameters that other
    calls write to: buffers, like those that this call writes to. trains: the loss must require a gradient; else, as in a call under
    torch.no_grad() that uses what is frozen alone, it may do without. sizes: the values of buffers may decide sizes (`h[:, self.mask]`),
    for which the program holds then; else what they decide runs as it is written. data: without it the model is captured as if all of it
    were on the meta device. beside: gives of inputs another program of the model, which is compared too. varying: numbers
    that the program takes as inputs; those that each call changes are among them in any case. again: the model has been captured before,
    so that what stands in its attributes may be of a call, and differ from rank to rank. The model is left as it was, but that plain
    tensors which its calls change are buffers from then on (`as_buffers`).
    Raises CaptureError with the line of the model's source and what to do, NoLoss if there is no loss.
    """
    arguments = arguments_of(example_inputs)
    with (
        unwatched(), sparse_buffers_aside(model), on_meta(model, arguments, any_model=not data) as of,
        buffers_without_gradients(model),
    ):  # fmt: skip
        how: dict[str, Any] = {"outputs": outputs, "written": written, "trains": trains, "sizes": sizes, "beside": beside}
        how["asked_of"] = given_as(example_inputs)
        try:
            tries = _Tries(model, loss, dtype, varying, how, again=again)
            found = with_what_is_imported(lambda: tries.found(_beside(model, arguments), check))
        except Stopped as error:
            raise CaptureError(str(error)) from error.__cause__
        return dataclasses.replace(found, tensors={v: of.get(id(t), t) for v, t in found.tensors.items()}) if of else found


_TRIED_OTHERWISE = (
    Appended, BufferMade, DrawsOutside, ForeignTensor, NoLoss, NumbersChange, OtherGradients, SparseGradients, TensorsChange,
)  # fmt: skip


def _is_tried_otherwise(error: BaseException) -> bool:
    """Whether what has changed is not the reason of an error."""
    return isinstance(error, _TRIED_OTHERWISE) and not isinstance(error, StateChanges | ForeignTensor)


class _Tries:
    """What is tried of one model. how: as of `captured_by`. changing: the places of numbers and tensors that the program takes as inputs.
    anew: where it begins with what stands there now, though calls leave tensors. appended: lists to which calls append; made: those of them
    that a call makes, and where. again: as of `capture`."""

    def __init__(
        self, model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, dtype: torch.dtype | None, varying: Varying,
        how: dict[str, Any], *, again: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.dtype, self.varying, self.how, self.again = model, loss, dtype, varying, how, again
        self.changing = set(varying.places)
        self.anew = frozenset[str]()
        self.appended: list[list[Any]] = []
        self.made: list[tuple[Place, list[Any]]] = []

    def found(self, example: Inputs, check: bool) -> Captured:
        """example: where the model lies. check: as of `capture`."""
        made = [] if self.model.training or self.again else foreseen(self.model, self.loss)
        try:
            if not check:
                return self._captured(example, 0.0)
            found, notes = captured_and_compared(self._captured, example, _alike)
        except BaseException:
            for undo in made:
                undo()
            raise
        return dataclasses.replace(found, program=found.program.replace(notes=(*found.program.notes, *notes))) if notes else found

    def _captured(self, example: Inputs, most: float) -> Captured:
        """With what no graph holds, and what other gradients than autograd's go through, as it is written. most: as of `captured_by`."""
        model, loss, dtype = self.model, self.loss, self.dtype
        try:
            return self._with_what_is_left(example, most)
        except OtherGradients:
            with computing_in(dtype, model):
                again = runs_again(model, loss, copied(inputs_in(dtype, example)))
            if again:
                with contextlib.suppress(OtherGradients), keeping_what_runs_again(again):
                    return self._with_what_is_left(example, most)
            with computing_in(dtype, model):
                own = own_gradients(model, loss, copied(inputs_in(dtype, example)))
            if not (own.modules or own.functions or own.hooks or own.whole):
                raise
            return self._with_what_is_left(example, most, as_written=own)
        except DrawsOutside as error:
            try:
                with computing_in(dtype, model):
                    drawn = drawing(model, loss, inputs_in(dtype, example))
                return self._with_what_is_left(example, most, drawn=drawn)
            except (CaptureError, *FAILURES) as other:  # of the model too, which may be too large
                raise DrawsOutside(f"{error}{other}" if isinstance(other, NotAsWritten) else str(error)) from other

    def _with_what_is_left(self, example: Inputs, most: float, **more: Any) -> Captured:
        """The program gives the tensors that a call leaves, if it can."""
        found = self._once(example, most=most, **more)
        return self._once(example, most=most, places=found.given, **more) if found.given else found

    def _once(self, example: Inputs, **more: Any) -> Captured:
        """With the numbers that change, the lists that are appended to and the buffers that a call makes, as they are found."""
        try:
            with emptied(self.appended, self.made):
                found = self._at_once(example, appended=tuple(self.appended), **more)
            if found.guards is not None:
                found.guards.fills([place.held.path for place, _ in self.made])
        except Appended as error:
            self.appended.extend(error.lists)
            self.made.extend(error.made)
            return self._once(example, **more)
        except NumbersChange as error:
            return self._with_numbers(error, example, more)
        except ForeignTensor as error:
            places = of_earlier_calls(State.take(self.model, self.loss), error.tensor)
            if not places:
                raise
            return self._with_what_stands(TensorsChange(str(error), places, attached=True), example, more)
        except TensorsChange as error:
            return self._with_buffers(error, example, more) or self._with_what_stands(error, example, more)
        except BufferMade as error:
            begun = functools.partial(self._once, example, **more)
            return as_a_call_leaves_it(self.model, self.loss, inputs_in(self.dtype, example), begun, dtype=self.dtype, error=error)
        if not found.made:
            return found
        with holding(self.model, found.made):
            return self._at_once(example, **more)

    def _with_numbers(self, error: NumbersChange, example: Inputs, more: dict[str, Any]) -> Captured:
        """With numbers that calls change as inputs of the program; where the first call alone computes them, for what stands there now."""
        before, new = set(self.changing), set(error.places) - self.changing
        why: CaptureError | None = None
        if new:
            self.changing |= new
            undo = made_own(self.model, new)
            try:
                return self._once(example, **more)
            except BaseException as other:
                undo()
                if not isinstance(other, CaptureError):
                    raise
                self.changing, why = before, other
        if error.begun or error.marks:
            return self._with_what_stands(error, example, more)
        raise error from why

    def _with_buffers(self, error: TensorsChange, example: Inputs, more: dict[str, Any]) -> Captured | None:
        """With tensors that calls change as buffers, which they stay where a program holds for it; None where they cannot be: they are in
        containers, require a gradient after a call, are none when the model is captured, or are none of the plan's."""
        if self.again or error.attached or error.begun:
            return None
        undo = as_buffers(self.model, error.places, State.take(self.model, self.loss))
        if undo is None:
            return None
        try:
            found = self._once(example, **more)
        except BaseException as other:
            undo()
            if _is_tried_otherwise(other) or not isinstance(other, CaptureError):
                raise
            return None
        said = f"each call changes {', '.join(error.places)}: followed as buffers, which no state_dict holds"
        return dataclasses.replace(found, program=found.program.replace(notes=(*found.program.notes, said)))

    def _with_what_stands(self, error: StateChanges, example: Inputs, more: dict[str, Any]) -> Captured:
        """With what calls change as inputs and outputs of the program; where something else stands now, for that."""
        why: CaptureError | None = None
        before = set(self.changing), self.anew
        self.changing |= {path for path in error.places if not is_in(path, error.begun)}
        for anew in dict.fromkeys((self.anew | error.begun, self.anew | error.begun | error.marks)):
            if before == (self.changing, anew):
                continue
            self.anew = anew
            try:
                return self._once(example, **more)
            except CaptureError as other:
                if _is_tried_otherwise(other):  # with these
                    raise
                why = other
        self.changing, self.anew = before
        raise error from why

    def _at_once(self, example: Inputs, **more: Any) -> Captured:
        """As the model runs; else, if it asks whether it is traced, as it does where it is."""
        with as_not_traced() as traced:
            try:
                return self._by_the_passes(example, more)
            except _TRIED_OTHERWISE:
                raise
            except CaptureError:
                if not traced.asked:
                    raise
        return self._by_the_passes(example, more)

    def _by_the_passes(self, example: Inputs, more: dict[str, Any]) -> Captured:
        varying = self.varying._replace(places=frozenset(self.changing))
        return captured_by(self.model, example, self.loss, dtype=self.dtype, varying=varying, anew=self.anew, **self.how, **more)


def _alike(one: Captured, other: Captured) -> bool:
    return [op.target for op in one.program.ops] == [op.target for op in other.program.ops]


def _beside(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs where the model lies, as the parallel module takes them from anywhere; on meta if any of it does. What is one tensor there
    is one here."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    meta = {d for d in devices if d.type == "meta"}
    if len(meta or devices) != 1:
        return inputs
    (device,) = meta or devices
    known: dict[int, torch.Tensor] = {}

    def moved(t: torch.Tensor) -> torch.Tensor:
        if t.device == device or t.is_meta:
            return t
        if id(t) not in known:
            known[id(t)] = t.detach().to(device).requires_grad_(t.requires_grad)
        return known[id(t)]

    found: Inputs = pytree.tree_map_only(torch.Tensor, moved, inputs)
    return found
