"""A call that is run forward again: for one more backward pass through what it returned (retain_graph=True), several losses of one call,
each with gradients of its own; or for gradients that are to be differentiated again (`twice`)."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.run import record
from autopar.run.autocast import without
from autopar.run.backward import Backward
from autopar.run.checkpointed import not_kept_for_later
from autopar.run.form import Form
from autopar.run.plain import plainly
from autopar.run.random_numbers import seeded
from autopar.run.schedule import OpenRun
from autopar.run.stage import Stage
from autopar.run.tree import Tree
from autopar.run.weights import Weights, buffers_kept

__all__ = ["Again", "Remembered"]

_VERSION = operator.attrgetter("_version")

Begun = Callable[[Form, Mapping[str, Tensor], Sequence[tuple[str, nn.Parameter]]], Backward]


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, FakeTensor)


class Remembered:
    """What a call was of. bound: its inputs, by name; first: what is left of it for backward; training: the mode. Made where the random
    numbers of the call begin."""

    def __init__(self, form: Form, tree: Tree, bound: Mapping[str, Tensor], first: Backward, *, training: bool) -> None:
        self.form, self.tree, self.bound, self.trainable = form, tree, bound, first.trainable
        self.training, self.seed = training, torch.initial_seed()
        self._read = self._versions()
        self._passes: dict[bool, int] = {}  # of the loss, or of what there is beside it: the last backward pass that came to it

    def came_to(self, *, loss: bool) -> None:
        """Backward has come to the loss, or to what the call gave beside it. RuntimeError if one pass has come to both, each with its part
        of the gradients, where hooks are to be given all of these."""
        manifest = self.form.manifest
        hooks = (*manifest.not_linear, *manifest.observed)
        now = self._passes[loss] = torch._C._current_graph_task_id()
        if hooks and self._passes.get(not loss) == now:
            raise RuntimeError(
                f"gradients come to the loss of {manifest.model} and to what it returns or leaves beside it, in two parts, and what is at "
                f"{hooks[0]} is to be given the whole of them. Compile it with autopar.compile(model, ..., outputs='trained')"
            )

    def under(self, form: Form, bound: Mapping[str, Tensor]) -> Remembered:
        """The same call of another form of the module."""
        other = copy.copy(self)
        other.form, other.bound, other._read = form, bound, other._versions()
        return other

    def unchanged(self) -> bool:
        """Whether all that the forward may read beside what it changes is as it was."""
        return self._versions() == self._read

    @contextlib.contextmanager
    def run_again(self, stages: Sequence[Stage], weights: Callable[[], Weights]) -> Iterator[None]:
        """Inside, stages run as they did then, with weights of their own each, and the same random numbers."""
        record.phase(record.FORWARD)
        with torch.enable_grad(), without(), not_kept_for_later(), seeded(self.seed, self.form.device):
            for stage in stages:
                stage.train(self.training)
                stage.weights = weights()
            try:
                yield
            finally:
                for stage in stages:
                    del stage.weights

    def _versions(self) -> tuple[list[int], list[int]]:
        """Where each tensor is, and how often it was written to. (Asked in every step: in as few calls of the host as can be.)"""
        tree, written = self.tree, self.form.written
        params = tree.params.values() if written.isdisjoint(tree.params) else [p for n, p in tree.params.items() if n not in written]
        buffers = [tree.buffer(name) for name in self.form.read_alone if name in tree.buffers]
        with plainly():
            read = [*params, *buffers, *self.bound.values()]
            try:
                versions = list(map(_VERSION, read))
            except RuntimeError:  # of what was made in inference mode, which counts no writes
                versions = [0 if t.is_inference() else t._version for t in read]
            if any(map(_is_fake, read[:1] + read[-1:])):  # in whose graphs nothing is run again
                return [], versions
            return list(map(torch.Tensor.data_ptr, read)), versions


class Again:
    """Call it, collectively, for what is left of the call for backward, and what has gone forward: as it did the first time. begun: makes
    the like of what was left then. RuntimeError if the forward computes of buffers that it changes, or if what it read has been changed
    since."""

    def __init__(self, call: Remembered, begun: Begun) -> None:
        self._call, self._begun = call, begun

    def __call__(self) -> tuple[Backward, OpenRun]:
        call, form = self._call, self._call.form
        if reread := form.reread:
            raise RuntimeError(
                f"backward() a second time through one step, whose forward has changed {reread[0]}: it cannot be run again for that. Add "
                f"up the losses that are made of one call, and call backward() once; or call the model again"
            )
        if not call.unchanged():
            raise RuntimeError(
                "backward() a second time through one step, since which parameters, buffers or inputs of the call were changed. Change "
                "them after all of backward, or call the model again"
            )
        with torch.enable_grad():
            rest = self._begun(form, call.bound, call.trainable)
        with buffers_kept(), call.run_again([*form.stages.values()], lambda: Weights(rest.step)):
            run = form.run_open(form.micro_batches(rest.inputs.parts), rest.step)
        return rest, run
