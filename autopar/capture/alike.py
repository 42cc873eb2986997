"""The same program on ranks that have a model's data and on ranks that do not."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from autopar.capture.captured import Captured
from autopar.capture.fingerprint import program_hash
from autopar.capture.tries import capture
from autopar.run.without_data import lacks_data

__all__ = ["captured_alike"]

NOT_COMPARED = "the captured program was not compared with the model, which had no data"


def captured_alike(model: nn.Module, inputs: Any, *, apart: bool, **how: Any) -> Captured:
    """What `capture` gives. apart: other ranks have the model on the meta device, where code may take other ways (torch's and the model's
    own ask what device they are on): then it is what they capture, where that differs, compared with this rank's model like its own."""
    if lacks_data(model):
        found = capture(model, inputs, **how)
        return found if apart else dataclasses.replace(found, program=found.program.replace(notes=(*found.program.notes, NOT_COMPARED)))
    if not apart:
        return capture(model, inputs, **how)

    def bare(inputs: Any) -> Captured:
        return capture(model, inputs, data=False, check=False, **how)

    own, theirs = capture(model, inputs, beside=bare, **how), bare(inputs)
    return own if program_hash(own.program) == program_hash(theirs.program) else theirs
