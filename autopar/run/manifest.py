"""What an emitted module states about itself, so that it runs without the planner.

The emitted file builds one `Manifest` from literals. Layouts are written as text ('S(0)', 'R', 'I', see Layout.parse).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.axes import LAYERS
from cost_models.pipeline import flow
from cost_models.rests import WHOLE

__all__ = ["BufferSpec", "InputSpec", "Manifest", "OutputSpec", "ParamSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One parameter. shape: global. layouts: axis -> layout at its use ('S(0)', 'R', 'I'; axes not named: 'I').
    stages: the pipeline stages that use it (more than one: tied across stages). rest: a row of cost_models.rests. zero_dim: the
    dim of its tp-local shape on which it rests in parts over data-parallel ranks, or None if it rests whole. unit: of parameters that are
    gathered where they are used, what it is gathered with (None: alone). computes: the lower dtype to which it is cast before it is used,
    None if it is used as it rests.
    regions_only: gradients come to it past opaque regions alone, which may give none. agreed: the axes whose ranks all compute its whole
    gradient, by operators that do not give the same bits each time: the mean over them is its gradient on all."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    layouts: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[int, ...] = (0,)
    rest: str = WHOLE.name
    zero_dim: int | None = None
    unit: int | None = None
    computes: str | None = None
    regions_only: bool = False
    agreed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferSpec:
    """One buffer, or a constant of the captured graph (then name is 'constant_N' and it is in no state_dict). region: the name stands
    for a submodule of the model that the stages run as it is written, which is given with the tensors. written: the stage that changes
    it, if one does: others that hold it too are given the new value at the end of a step; reread: the loss or an output is computed of what
    it held before, which running statistics are not. assigned: it is another tensor after a call, and who holds the one before keeps its
    values. parameter: in the model it is a frozen parameter, which the forward writes to. aliases: its further names there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = True
    constant: bool = False
    region: bool = False
    parameter: bool = False
    aliases: tuple[str, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[int, ...] = (0,)
    written: int | None = None
    reread: bool = False
    assigned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One tensor of the batch. name: the argument of the stages' forward; path: where it is in the user's call
    (('input_ids',): a keyword; (0,): positional; longer when nested). layouts: over 'dp' ('S(0)': each dp rank takes its
    part) and over 'time' ('S(0)': split into micro-batches). grad: it requires a gradient."""

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: str
    layouts: Mapping[str, str] = field(default_factory=dict)
    grad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSpec:
    """One tensor that a call gives beside the loss. shape: global. layouts: axis -> layout, over 'time' too ('R': the same of every
    micro-batch; 'P': to be summed). stage: which makes it. grad: the original's has a gradient. samples: along which dim its samples lie,
    as a layout, where it has some and each data-parallel rank makes them all; ''."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layouts: Mapping[str, str] = field(default_factory=dict)
    stage: int = 0
    grad: bool = False
    samples: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """mesh: axis -> size, outermost first, as in autopar.axes. schedule: a row of cost_models.pipeline; virtual_stages: how many stages
    each pipeline rank holds. rest: a row of
    cost_models.rests, of the parameters that are in parts. shard: over how many data-parallel ranks the
    parts of one lie, None for all. reduce_dtype: in which gradients are brought together over ranks, None for that in which their
    parameters rest.
    positional: parameter names of the model's forward in order, so that a call may mix positional and keyword inputs.
    prologue: what the prologue makes -> its layout over 'time' ('R': every micro-batch gets it whole; 'S(0)': in slices).
    outputs: what a call gives beside the loss, in the order in which the stages return it after what they send.
    libraries: Python modules that register operators which the stages call. training: the mode that the model was captured
    in; mode_dependent: operators that compute something else in the other one. not_linear: those whose backward gives gradients that are
    not linear in those that come to it. observed: where hooks are told of gradients, and change none."""

    model: str
    mesh: Mapping[str, int]
    micro_batches: int
    schedule: str
    rest: str
    params: tuple[ParamSpec, ...]
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...] = ()
    virtual_stages: int = 1
    shard: int | None = None
    reduce_dtype: str | None = None
    positional: tuple[str, ...] = ()
    constant_inputs: tuple[tuple[tuple[str | int, ...], object], ...] = ()
    prologue: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    training: bool = True
    mode_dependent: tuple[str, ...] = ()
    not_linear: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return flow(self.schedule, self.mesh.get(LAYERS, 1), self.micro_batches, self.virtual_stages).rank_of

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(target.split(".")[1] not in ("batch_norm", "instance_norm") for target in self.mode_dependent)
