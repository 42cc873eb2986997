"""What an emitted module runs on one rank, for one form of the call: its inputs' shapes and the model's modes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.ir import Layout
from autopar.run import comm
from autopar.run.buckets import computes_of
from autopar.run.dtypes import dtype_named
from autopar.run.inputs import Batch, micro_batch
from autopar.run.manifest import Manifest
from autopar.run.mesh import Mesh
from autopar.run.observed import is_observer
from autopar.run.outputs import Outputs, Returned
from autopar.run.random_numbers import seed_generators
from autopar.run.region import Region
from autopar.run.region_modules import names_read
from autopar.run.schedule import Made, OpenRun, OpenStage, Pipeline, accumulate, at_once, keywords
from autopar.run.slices import local_slice
from autopar.run.stage import Stage
from autopar.run.varying import NONE, Varied
from autopar.run.weights import Step

__all__ = ["Anew", "Emitted", "Form", "Guards"]


class Emitted(Protocol):
    """What an emitted module has; it may also have `prologue(w, mesh, *, ...)`, see ParallelModule."""

    @property
    def MANIFEST(self) -> Manifest: ...  # noqa: N802

    @property
    def STAGES(self) -> tuple[type[Stage], ...]: ...  # noqa: N802


class Guards(Protocol):
    """What capture has frozen of the user's program, and what its forward leaves behind. asks: whether its code may ask which inputs are
    one tensor, and the names of what it may ask of each (`run.asked`). varied: the numbers that the program takes as inputs. moved: the
    places of numbers, if only such have changed when `changed` was asked last."""

    varied: Varied
    moved: frozenset[str]

    @property
    def asks(self) -> tuple[bool, frozenset[str]]: ...

    def reads(self, name: str) -> bool: ...

    def changed(
        self, whole: Callable[[str], Tensor] | None = None, given: Callable[[tuple[str | int, ...]], Tensor] | None = None
    ) -> str | None: ...

    def set_otherwise(self, names: set[str]) -> str | None: ...

    def written(self, whole: Callable[[str], Tensor]) -> Mapping[str, Tensor]: ...

    @property
    def leaves(self) -> frozenset[str]: ...

    def place(self, path: str) -> str | None: ...

    def leave(self, outputs: Mapping[str, Tensor], unread: Callable[[str], Tensor] | None = None) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Anew:
    """What another form is made of: see `Form`. tensors: of its constants."""

    emitted: Emitted
    tensors: Mapping[str, Tensor]
    guards: Guards | None = None
    returned: Returned | None = None
    around_loss: Returned | None = None
    forward_only: bool = False


class Form:
    """What an emitted module runs, for its input shapes and its mode. constants: of this rank, by name. guards: say whether it is
    still what the user's model does. returned: where the outputs go in what a call returns; None for the loss alone. around_loss: what the
    original returns then, without its tensors; None if that is the loss, or not known. forward_only: it is for calls without gradients."""

    def __init__(
        self, emitted: Emitted, constants: Mapping[str, Tensor], mesh: Mesh, device: torch.device, *, local_batch: bool,
        guards: Guards | None = None, returned: Returned | None = None, around_loss: Returned | None = None, forward_only: bool = False,
    ) -> None:  # fmt: skip
        manifest = emitted.MANIFEST
        self.forward_only = forward_only
        for library in manifest.libraries:
            importlib.import_module(library)
        if len(emitted.STAGES) != len(manifest.places):
            each = f" and {manifest.virtual_stages} on each" if manifest.virtual_stages > 1 else ""
            raise ValueError(f"the emitted module has {len(emitted.STAGES)} stages and a mesh with pp={mesh.pp.size}{each}")
        self.manifest, self.constants, self.guards, self.returned, self.around_loss = manifest, constants, guards, returned, around_loss
        self.outputs = Outputs(manifest, mesh, device, local=local_batch)
        self.gives_more = bool(manifest.outputs)  # than the loss
        self.computes = computes_of(manifest.params)
        self.calls = 0
        # of those that train, and of the outputs that a loss depends on: the parameters that have a gradient on any rank
        self.trained: dict[tuple[tuple[str, ...], tuple[bool, ...]], frozenset[str]] = {}
        self._first_stages: dict[tuple[str, ...], int] = {}  # by the names of those that train
        others: Mapping[str, Any] = constants  # submodules stand where tensors do
        self.regions = tuple(r for r in others.values() if isinstance(r, Region))
        self.batch = Batch(manifest, mesh, device, local=local_batch)
        self.prologue: Callable[..., Mapping[str, Tensor]] | None = getattr(emitted, "prologue", None)
        self.loss_dtype: torch.dtype = dtype_named(emitted.STAGES[-1].sends[0][1]) if mesh.pp.size > 1 else torch.float32
        self.mesh, self.device, self._emitted = mesh, device, emitted
        self.stages = {s: self._stage(s) for s, rank in enumerate(manifest.places) if rank == mesh.pp.rank}
        self.wanted = frozenset(name for stage in self.stages.values() for name in keywords(stage.forward))
        self.written = frozenset(spec.name for spec in manifest.buffers if spec.written is not None)  # buffers that the forward changes
        self.reread = [spec.name for spec in manifest.buffers if spec.reread]  # of whose values before it computes what it returns
        self.assigned = [spec.name for spec in manifest.buffers if spec.assigned]  # that are other tensors after a call
        self.in_place = self.written.difference(self.assigned)
        self.read_alone = [spec.name for spec in manifest.buffers if not spec.region and spec.name not in self.written]
        # buffers that other stages hold than the one that changes them: the name, the writing rank, the ranks that hold it
        written = [spec for spec in manifest.buffers if spec.written is not None and len(mesh.pp_ranks(spec.stages)) > 1]
        axes = {stages: mesh.holding(stages) for stages in sorted({spec.stages for spec in written})}
        self._written = [(spec.name, mesh.pp.ranks[manifest.places[spec.written or 0]], axes[spec.stages]) for spec in written]
        self.pipeline: Pipeline | None = None
        if mesh.pp.size > 1:
            self.pipeline = Pipeline(
                self.stages, mesh, micro_batches=manifest.micro_batches, schedule=manifest.schedule, device=device
            )

    def _stage(self, number: int) -> Stage:
        stage = self._emitted.STAGES[number]()
        stage.mesh = self.mesh
        return stage

    @functools.cached_property
    def every_stage(self) -> tuple[Stage, ...]:
        """Those of all ranks of the pipeline, in order, for what this rank computes as one process of it."""
        return tuple(self.stages[s] if s in self.stages else self._stage(s) for s in range(len(self.manifest.places)))

    def first_stage(self, trainable: Sequence[tuple[str, nn.Parameter]]) -> int:
        """The first stage that uses one of these parameters, by name; 0 if none does."""
        if self.mesh.pp.size == 1:
            return 0
        names = tuple(name for name, _ in trainable)
        if names not in self._first_stages:
            stages = (min(spec.stages) for spec in self.manifest.params if spec.name in names)
            self._first_stages[names] = min(stages, default=0)
        return self._first_stages[names]

    @functools.cached_property
    def reads_in_backward(self) -> list[tuple[Region, set[str]]]:
        """The regions whose hooks, or backward of the user's own, may read what the loop sets, and by which names."""
        found = [(region, names_read(region.module)) for region in self.regions if not is_observer(region)]
        return [(region, names) for region, names in found if names]

    def begin(self) -> list[tuple[Region, set[str]]]:
        """A step begins: the regions, and where each notes the parameters that a gradient comes to."""
        for r in self.regions:
            r.reached = set()
        return [(r, r.reached) for r in self.regions]

    def spread(self, buffer: Callable[[str], Tensor]) -> None:
        """Collective, at the end of forward: what a stage has written to a buffer is in that of the others. (Backward does not read them:
        capture has it read copies of a buffer that the forward changes.)"""
        for name, writer, axis in self._written:
            if axis.rank >= 0:
                with torch.no_grad():
                    here = buffer(name)
                    here.copy_(comm.broadcast_(here.contiguous(), writer, axis))

    @property
    def varied(self) -> Varied:
        """The numbers that are inputs of the program."""
        return NONE if self.guards is None else self.guards.varied

    @property
    def open(self) -> bool:
        """Whether the user makes the loss of what a call returns."""
        return self.returned is not None and not self.returned.own_loss

    @property
    def waits(self) -> bool:
        """Whether backward can begin when all micro-batches have gone forward."""
        return self.pipeline is None or self.pipeline.waits

    @property
    def under_way(self) -> bool:
        """Whether messages between stages may be on their way: after an error they are lost."""
        return self.pipeline is not None and self.pipeline.under_way

    def micro_batches(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """What the stages are given for each, after the prologue has run. inputs: of this rank."""
        given = self.micro_batches_of_all(inputs)
        self.seed(self.mesh.pp.rank, torch.initial_seed())
        return [{k: v for k, v in one.items() if k in self.wanted} for one in given]

    def micro_batches_of_all(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The same, of the stages of all ranks."""
        n, extra = self.manifest.micro_batches, _run_prologue(self, self.mesh, inputs)
        return [micro_batch(self.manifest.inputs, inputs, i, n) | _part(self, extra, i) for i in range(n)]

    def seed(self, rank: int, seed: int) -> None:
        """Let what is drawn next be what this rank of the pipeline draws first in the call that begins with this seed: ranks draw different
        numbers."""
        seed_generators((seed + 0xD1342543DE82EF95 * (rank + 1)) % 2**63, self.device)

    def run_open(self, parts: Sequence[Mapping[str, Tensor]], step: Step) -> OpenRun:
        """All micro-batches forward; backward is given the gradients of the outputs later. ValueError if the schedule does not wait."""
        if self.pipeline is None:
            return OpenStage(self.stages[0], parts, step)
        if not self.pipeline.waits:
            raise ValueError(
                f"{self.manifest.model} was planned for a loss of its own: {self.manifest.schedule} begins backward before all "
                f"micro-batches have gone forward, and this call returns no loss. Compile the model for such calls, or pin schedule=gpipe"
            )
        return self.pipeline.run_open(parts, step)

    def run(self, parts: Sequence[Mapping[str, Tensor]], step: Step, made: Made) -> Tensor:
        """The micro-batches. The loss, on the rank of the last stage: of one micro-batch on one stage it is to be differentiated, else it
        has been. made: takes the outputs of this rank's stages for each."""
        if self.pipeline is None:
            stage = self.stages[0]
            return at_once(stage, parts[0], step, made) if len(parts) == 1 else accumulate(stage, parts, step, made)
        loss = self.pipeline.run(parts, step, made)
        return torch.empty((), dtype=self.loss_dtype, device=self.outputs.device) if loss is None else loss


def _run_prologue(form: Form, mesh: Mesh, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if form.prologue is None:
        return {}
    wanted = keywords(form.prologue)
    weights = next(iter(form.stages.values())).weights
    with torch.no_grad():
        return dict(form.prologue(weights, mesh, **{k: v for k, v in inputs.items() if k in wanted}))


def _part(form: Form, made: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """What micro-batch `index` gets of the prologue's results."""
    over_time, n = form.manifest.prologue, form.manifest.micro_batches
    return {name: local_slice(value, Layout.parse(over_time.get(name, "R")), index, n) for name, value in made.items()}
