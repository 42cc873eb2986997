"""What capture gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.answers import NONE, Answers
from autopar.capture.guards import Guards
from autopar.ir import Program
from autopar.run.autocast import Autocast
from autopar.run.outputs import Returned

__all__ = ["Captured"]


@dataclass(frozen=True)
class Captured:
    """A program, and the tensor (possibly on meta) of each of its parameters, buffers and constants by value name.

    training: the model's mode when it was captured. guards: what capture froze, to be asked whether it is still so. written:
    attributes in which each forward of the original leaves a tensor; the program does not. defaults: the parameters of the
    forward that the example call left to their defaults, with these: the program has them frozen too. returns: what the model's
    forward returns, in words; '' for the loss alone. returned: the same with everything in it, where it was asked for. around_loss: its
    structure, where it was not; None if that is not known. autocast: what of torch.autocast was on around the call; the casts that it
    makes are in the program. answers: what the forward asked of the model's own parameters and buffers, for which the program holds. given:
    places at which the program could give the tensors that a call leaves.
    made: buffers of the state_dict that the first call makes, by name, where the program does not hold them.
    """

    program: Program
    tensors: Mapping[str, torch.Tensor]
    training: bool = True
    guards: Guards | None = None
    written: tuple[str, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()
    returns: str = ""
    returned: Returned | None = None
    autocast: tuple[Autocast, ...] = ()
    answers: Answers = NONE
    given: tuple[str, ...] = ()
    made: Mapping[str, torch.Tensor] = field(default_factory=dict)
    around_loss: Returned | None = None
