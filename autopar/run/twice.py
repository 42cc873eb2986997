"""Gradients that are to be differentiated again (create_graph=True): a penalty on the gradient of an input, a differential equation's
residual, products with a Hessian.

The call is run forward once more, as one graph of autograd from the parameters at rest and the inputs, as the user has them, to what was
returned. Every collective in it is a move whose backward is another (`collectives`), so that gradients of it are differentiated as often
as is wished, and as all ranks do it alike. What else a step has for speed (buckets, gathering ahead, recomputation) is not in it.

Where each data-parallel rank is given its own part of the batch, what is trained is the mean of these ranks' losses. What a gradient is
multiplied by on its way to the user, and the gradient of what he makes of it on its way back, follow from that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from autopar.axes import BATCH, cut_order
from autopar.ir import Layout, R
from autopar.run import collectives, comm, record
from autopar.run.again import Remembered
from autopar.run.buckets import hold
from autopar.run.dtypes import empty
from autopar.run.lies import layouts_of
from autopar.run.manifest import BufferSpec, ParamSpec
from autopar.run.mesh import Axis, Mesh
from autopar.run.plain import plainly
from autopar.run.saved import with_graphs
from autopar.run.schedule import apart, keywords
from autopar.run.tree import Tree
from autopar.run.weights import Weights

__all__ = ["Twice"]


_AGAIN = (
    "gradients were asked for with create_graph=True, to be differentiated again,",
    "Take such a term from differences (a second call on shifted inputs), or make it of a call of the original's forward "
    "(model.original.forward(...)), which every rank computes whole",
)  # what was asked, and what to do instead
_BESIDE = (
    "a gradient was asked for by what the parallel module returned beside its loss,",
    "With autopar.compile(model, ..., outputs='trained') all that it returns gives gradients",
)


class Twice:
    """Gradients of what one call returned, in autograd's graph. call: what it was of. beside: by what it returned beside its loss.
    before: buffers that it has changed and computes of, as they were, if it is over."""

    def __init__(self, call: Remembered, *, beside: bool = False, before: Mapping[str, Tensor] | None = None) -> None:
        self._call = call
        self._asked, self._instead = _BESIDE if beside else _AGAIN
        differentiated = any(spec.grad and call.bound[spec.name].requires_grad for spec in call.form.manifest.inputs)
        if before is None:
            before = {name: call.tree.buffer(name).clone() for name in call.form.reread} if differentiated else {}
        self._before = before

    def came_to(self, *, loss: bool) -> None:
        """As of `Remembered`."""
        self._call.came_to(loss=loss)

    def of_loss(self, grad: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Collective: by these leaves, from the gradient of the loss. In a graph, if gradients are on."""
        aliases = dict[int, Tensor]()
        loss, _ = self._forward(aliases)
        return _gradients([loss], [grad.to(loss.dtype)], [aliases.get(id(leaf)) for leaf in leaves])

    def of_outputs(self, grads: Mapping[str, Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Collective: by these leaves, from the gradients of outputs, by name. In a graph, if gradients are on."""
        aliases = dict[int, Tensor]()
        _, values = self._forward(aliases)
        used = [(values[name], grad.to(values[name].dtype)) for name, grad in grads.items() if grad is not None]
        return _gradients([value for value, _ in used], [grad for _, grad in used], [aliases.get(id(leaf)) for leaf in leaves])

    def _forward(self, aliases: dict[int, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and what the call returned beside it. Every rank of a pipeline runs all stages. aliases: takes, by the ids of leaves,
        what is differentiated by in their places: hooks on a leaf are told where its own gradient is asked for."""
        call, form = self._call, self._call.form
        self._check()
        form.begin()
        stages, used = form.every_stage, dict[str, Tensor]()
        made = [list[Tensor]() for _ in range(form.manifest.micro_batches)]
        with with_graphs(), _without_compiling(), call.run_again(stages, lambda: Weights(_Read(call, self._before, used, aliases))):
            given = form.micro_batches_of_all(self._inputs(aliases))
            received: list[tuple[Tensor, ...]] = [()] * len(given)
            for rank, stage in zip(form.manifest.places, stages, strict=True):
                form.seed(rank, call.seed)
                takes = keywords(stage.forward)
                for k, one in enumerate(given):
                    sends, outputs = apart(stage, stage(*received[k], **{n: t for n, t in one.items() if n in takes}), detach=False)
                    received[k] = sends
                    made[k] += outputs
            losses = [loss for (loss,) in received]
            values = form.outputs.collected(made, of_all=True)
            return torch.stack(losses).sum(0), {name: self._of_the_mean(name, value) for name, value in values.items()}

    def _check(self) -> None:
        """RuntimeError if it cannot be run so."""
        manifest = self._call.form.manifest
        asked, instead = self._asked, self._instead
        if manifest.draws and manifest.virtual_stages > 1:
            raise RuntimeError(
                f"{asked} and stages of which each rank has several draw random numbers in an order of their own. Compile {manifest.model} "
                f"with another schedule. {instead}"
            )
        if reread := [name for name in self._call.form.reread if name not in self._before]:
            raise RuntimeError(
                f"{asked} of a call that has changed {reread[0]}, and of which no input requires a gradient: it cannot be run again. "
                f"{instead}"
            )
        if not self._call.unchanged():
            raise RuntimeError(
                f"{asked} of a call since which parameters, buffers or inputs were changed. Change them after that, or call the model again"
            )

    def _inputs(self, aliases: dict[int, Tensor]) -> dict[str, Tensor]:
        """This rank's part of each input; of those that are differentiated by, in the graph of what the call was given."""
        form, bound = self._call.form, self._call.bound
        parts = form.batch.own_parts(bound)
        for spec in form.manifest.inputs:
            if not (spec.grad and bound[spec.name].requires_grad):
                continue
            given = bound[spec.name]
            value = aliases[id(given)] = given.view_as(given)
            value = value.resolve_conj().resolve_neg()
            for name in cut_order():
                axis, layout = form.mesh.axis(name), Layout.parse(spec.layouts.get(name, "I"))
                if name == BATCH and form.batch.local:
                    value = _from_a_part(value, axis, layout)
                elif layout.is_shard:
                    value = collectives.split(value, axis, layout.dim, layout.groups)
                elif layout == R:
                    value = collectives.copy_to(value, axis)
            parts[spec.name] = value.to(form.device)
        return parts

    def _of_the_mean(self, name: str, value: Tensor) -> Tensor:
        """An output as the user is given it, whose gradient is that of this rank's own loss."""
        form = self._call.form
        dp = form.mesh.dp
        if not form.batch.local or dp.size == 1 or not value.requires_grad:
            return value
        if form.outputs.is_part(name):
            return collectives.moved(value, lambda g: g / dp.size)
        return collectives.moved(value, lambda g: _mean(g, dp))


class _Read:
    """The parameters, buffers and constants of one stage in one call, by name: from what rests of a parameter to what is used of it, in
    autograd's graph. before: buffers that the call changes and computes of, as they were. used: parameters that a stage has read. aliases:
    as of `Twice._forward`."""

    def __init__(self, call: Remembered, before: Mapping[str, Tensor], used: dict[str, Tensor], aliases: dict[int, Tensor]) -> None:
        self._call, self._form, self._before, self._used, self._aliases = call, call.form, before, used, aliases
        self._params = {spec.name: spec for spec in call.form.manifest.params}
        self._specs = {spec.name: spec for spec in call.form.manifest.buffers}
        self._others: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """As `weights.Step.read`."""
        first = self._call.tree.names.get(name)
        if first is None:
            if name not in self._others:
                self._others[name] = self._other(name)
            return self._others[name]
        if first not in self._used:
            with torch.enable_grad():  # what reads it first may be without gradients
                self._used[first] = self._in_use(self._params[first])
        return self._used[first]

    def _other(self, name: str) -> Tensor:
        """A buffer or a constant; of what the call changes, a copy."""
        spec, form = self._specs[name], self._form
        if spec.region:
            return form.constants[name]
        if spec.constant:
            held = form.constants[name] if name in form.constants else empty((0,), spec.dtype, form.device)
        else:
            held = self._before[name] if name in self._before else self._call.tree.buffer(name)
            held = held if spec.written is None else held.clone()
        return _of_its_stages(held, spec, form.mesh, self._call.tree)

    def _in_use(self, spec: ParamSpec) -> Tensor:
        form, tree = self._form, self._call.tree
        param = tree.params[spec.name]
        held = tree.held[spec.name] if spec.name in tree.held else hold(spec, param, form.mesh, None, form.manifest.reduce_dtype)
        dtype = held.reduce_dtype
        with plainly():
            value = param.view_as(param).as_subclass(Tensor) if param.requires_grad else held.local
        self._aliases[id(param)] = value
        value = _of_its_stages(value, spec, form.mesh, tree)
        copies = ["replica" if name == BATCH and held.zero is not None else name for name in held.partial]
        if over := [name for name in copies if form.mesh.axis(name).size > 1]:
            value = _shared(value, form.mesh.joint(over), held.terms, dtype, self._mean_over(over))
        if held.zero is not None and BATCH in held.partial:
            value = collectives.all_gather(value, form.mesh.shard, held.zero, sums=dtype)
        elif held.zero is not None:
            value = collectives.gather(value, form.mesh.shard, held.zero)
        return value.to(form.computes.get(spec.name, value.dtype))

    def _mean_over(self, names: Sequence[str]) -> Axis | None:
        """The axis over which ranks have losses of their own, of those that have copies of a parameter."""
        found = next((name for name in names if name in (BATCH, "replica")), None)
        return self._form.mesh.axis(found) if found is not None and self._form.batch.local else None


def _of_its_stages(x: Tensor, spec: ParamSpec | BufferSpec, mesh: Mesh, tree: Tree) -> Tensor:
    """What rests on the ranks of a pipeline that hold it, on all of them, which use it for the same work. spec: as the form that runs reads
    it; it rests as the tree says, on other stages where another form was the first one."""
    rests = tree.lies.get(spec.name)
    pp, holders = mesh.pp, rests.holders if rests is not None else mesh.pp_ranks(spec.stages or (0,))
    if len(holders) == pp.size:
        return x
    holds, shape = pp.rank in holders, spec.shape
    for name, layout in layouts_of(spec).items():
        shape = layout.local_shape(shape, mesh.axis(name).size)
    if isinstance(spec, ParamSpec) and spec.zero_dim is not None:
        k = spec.zero_dim
        shape = (*shape[:k], shape[k] // mesh.shard.size, *shape[k + 1 :])

    def given(v: Tensor) -> Tensor:
        return comm.broadcast_(v.clone(memory_format=torch.contiguous_format) if holds else v.new_empty(shape), pp.ranks[holders[0]], pp)

    return collectives.moved(x, lambda g: g.view_as(g) if holds else g.new_zeros(x.shape), forward=given)


def _shared(x: Tensor, axis: Axis, terms: int, dtype: torch.dtype, of_the_mean: Axis | None) -> Tensor:
    """A parameter of which ranks have copies, whose gradient is the sum of theirs. terms: how many of them are the same. of_the_mean: the
    axis over which losses that are made of that gradient are others."""

    def summed(g: Tensor) -> Tensor:
        return comm.all_reduce((g / terms if terms > 1 else g).to(dtype), axis).to(g.dtype)

    return collectives.moved(x, summed, again=None if of_the_mean is None else lambda g: _mean(g, of_the_mean))


def _from_a_part(x: Tensor, dp: Axis, layout: Layout) -> Tensor:
    """An input of which this rank was given its own part, or that each was given (R), whose gradient is that of this rank's own loss."""
    if dp.size == 1 or not (layout.is_shard or layout == R):
        return x
    if layout.is_shard:
        return collectives.moved(x, lambda g: g * dp.size)
    return collectives.moved(x, lambda g: comm.all_reduce(g, dp), again=lambda g: _mean(g, dp))


def _mean(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x, axis) / axis.size


def _gradients(values: Sequence[Tensor], grads: Sequence[Tensor], by: Sequence[Tensor | None]) -> list[Tensor | None]:
    """By each of these; None where there is none."""
    used = [(value, grad) for value, grad in zip(values, grads, strict=True) if value.requires_grad]
    wanted = [x for x in by if x is not None and x.requires_grad]
    if not used or not wanted:
        return [None] * len(by)
    record.phase(record.BACKWARD)
    found = iter(
        torch.autograd.grad(
            [v for v, _ in used], wanted, [g for _, g in used], create_graph=torch.is_grad_enabled(), allow_unused=True
        )
    )  # fmt: skip
    return [next(found) if x is not None and x.requires_grad else None for x in by]


def _without_compiling() -> AbstractContextManager[object]:
    """What torch.compile has made gives first gradients alone."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
