"""What the calls of a module compute of what the original returns: what was asked for when it was compiled, and what the loop has turned
out to want since. Where something beside the loss was read, calls like that one compute all of it; where a gradient came to it, they are
computed for a loss that is made outside."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings

import torch

from autopar.errors import CaptureError
from autopar.run.before_steps import SMALL
from autopar.run.form import Form
from autopar.run.forms import Call, Forms
from autopar.run.inputs import Shapes
from autopar.run.outputs import Returned
from autopar.run.plain import users_level
from autopar.run.reading import Kind

__all__ = ["Wanted", "kind_of"]


def kind_of(call: Call) -> Kind:
    """Of a call that begins now."""
    return call.training, torch.is_grad_enabled()


class Wanted:
    """Of one module. outputs: as it was compiled, 'loss' or 'all'."""

    def __init__(self, forms: Forms, outputs: str) -> None:
        self._forms, self._outputs = forms, outputs
        self._read = set[Kind]()  # of calls of which more than the loss was read
        self._numbers_tried = set[Kind]()  # of calls that give numbers, which nothing can stand for until they are read
        self._trained: dict[Kind, Returned] = {}  # what calls return by more than the loss of which gradients came
        self._not_trained = set[tuple[Kind, Shapes]]()  # of these, the sizes of calls of which that does not fit the plan

    def form_of(self, call: Call) -> tuple[Form | None, Call]:
        """What runs for a call, and what is asked for by then. Raises as `Forms.of`."""
        kind = kind_of(call)
        if kind in self._trained and (form := self._trained_form(call, kind)) is not None:
            return form, dataclasses.replace(call, asked="trained")
        if self._outputs == "loss" and kind in self._read:
            more = dataclasses.replace(call, asked="all")
            try:
                return self._forms.of(more), more
            except (CaptureError, ValueError) as error:
                self._read.discard(kind)
                if kind in self._numbers_tried:
                    self._tell(
                        f"returns numbers that it makes of tensors, which cannot be computed as it was planned, so that using one raises "
                        f"an error: {error}"
                    )
        form = self._forms.of(call)
        if form is not None and kind not in self._numbers_tried and form.around_loss is not None:
            if any(form.around_loss.numbers) and form.around_loss.size <= SMALL:
                self._numbers_tried.add(kind)
                self._read.add(kind)
                return self.form_of(call)
        return form, call

    def is_read(self, kind: Kind) -> None:
        """More than the loss of a call of this kind was read."""
        self._read.add(kind)

    def is_trained(self, kind: Kind, form: Form) -> None:
        """A gradient has come to what a call of this kind gave beside its loss. form: what ran."""
        if form.returned is None:  # it came to what the forward has left, not to what it returned
            self._read.add(kind)
        elif kind not in self._trained:
            self._trained[kind] = form.returned
            self._tell(
                "is trained by what it returns beside its loss. In this step those gradients are computed by running the call forward once "
                "more, all stages and with whole parameters on every rank; from the next on its results are computed to be trained, if "
                "the plan has room for that. autopar.compile(model, ..., outputs='trained') plans for it"
            )

    def trained(self, kind: Kind) -> Returned | None:
        """What calls of this kind return with the loss in it, if gradients have come to more than that."""
        return self._trained.get(kind)

    def _trained_form(self, call: Call, kind: Kind) -> Form | None:
        """What computes a call for a loss that is made outside; None if that does not fit the plan."""
        size = kind, self._forms.first.batch.shapes(call.args, call.kwargs)
        if size in self._not_trained:
            return None
        with contextlib.suppress(CaptureError, ValueError):
            form = self._forms.of(dataclasses.replace(call, asked="trained"))
            if form is not None and form.returned is not None and form.waits and form.returned.spec == self._trained[kind].spec:
                return form
        self._not_trained.add(size)
        return None

    def _tell(self, text: str) -> None:
        first = self._forms.first
        if first.mesh.rank == 0:
            warnings.warn(f"{first.manifest.model} {text}", stacklevel=users_level())
