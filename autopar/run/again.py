"""A call that is run forward again, for one more backward pass through what it returned (retain_graph=True): several losses of one call,
each with gradients of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from autopar.run import record
from autopar.run.autocast import without
from autopar.run.backward import Backward
from autopar.run.checkpointed import not_kept_for_later
from autopar.run.form import Form
from autopar.run.part import local
from autopar.run.random_numbers import seeded
from autopar.run.schedule import OpenRun
from autopar.run.tree import Tree
from autopar.run.weights import Weights

__all__ = ["Again"]

Begun = Callable[[Form, Mapping[str, Tensor], Sequence[tuple[str, nn.Parameter]]], Backward]


class Again:
    """Call it, collectively, for what is left of the call for backward, and what has gone forward: as it did the first time, with the same
    random numbers. bound: the inputs of the call, by name; first: of the first time; begun: makes the like; training: the mode. Made
    where the random numbers of the call begin. RuntimeError if the forward changes buffers, or if what it read has been changed since."""

    def __init__(self, form: Form, tree: Tree, bound: Mapping[str, Tensor], first: Backward, *, begun: Begun, training: bool) -> None:
        self._form, self._tree, self._bound, self._trainable = form, tree, bound, first.trainable
        self._begun, self._training, self._seed = begun, training, torch.initial_seed()
        self._read = self._versions()

    def __call__(self) -> tuple[Backward, OpenRun]:
        form = self._form
        if written := [spec.name for spec in form.manifest.buffers if spec.written is not None]:
            raise RuntimeError(
                f"backward() a second time through one step, whose forward has changed {written[0]}: it cannot be run again for that. Add "
                f"up the losses that are made of one call, and call backward() once; or call the model again"
            )
        if self._versions() != self._read:
            raise RuntimeError(
                "backward() a second time through one step, since which parameters, buffers or inputs of the call were changed. Change "
                "them after all of backward, or call the model again"
            )
        record.phase(record.FORWARD)
        with torch.enable_grad(), without(), not_kept_for_later(), seeded(self._seed, form.device):
            rest = self._begun(form, self._bound, self._trainable)
            for stage in form.stages.values():
                stage.train(self._training)
                stage.weights = Weights(rest.step)
            run = form.run_open(form.micro_batches(rest.inputs.parts), rest.step)
        for stage in form.stages.values():
            del stage.weights
        return rest, run

    def _versions(self) -> list[tuple[int, int]]:
        """Of all that the forward may read: where it is, and how often it was written to."""
        names = [spec.name for spec in self._form.manifest.buffers if not spec.region and spec.name in self._tree.buffers]
        buffers = map(self._tree.buffer, names)
        held = [*map(local, self._tree.params.values()), *buffers, *self._bound.values()]
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in held]
