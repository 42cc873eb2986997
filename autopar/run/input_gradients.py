"""Gradients of inputs that require one: of an encoder before the model, a generator before its critic, an adversarial example.

The stages read leaves in the place of such inputs: this rank's parts, cut from what the call gives. A leaf's gradient lies as the input
does, with R for the terms of a sum, and becomes whole on every rank, so that what computed the input goes on backward alike everywhere.

Where each data-parallel rank is given its own part of the batch, a part's gradient is that of a loss whose mean over these ranks is
trained: what computed the part brings its own gradients together by their mean, as DistributedDataParallel does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.axes import BATCH, cut_order
from autopar.ir import Layout, R
from autopar.run import comm
from autopar.run.manifest import InputSpec
from autopar.run.mesh import Mesh
from autopar.run.slices import joined

__all__ = ["InputGradients"]


class InputGradients:
    """Of one step. bound: the inputs of the call, by name; given: those of them that require a gradient, in the order of specs. parts:
    all of them as they lie on this rank, those with a gradient as leaves. local: each data-parallel rank was given its own part."""

    def __init__(
        self, specs: Sequence[InputSpec], bound: Mapping[str, Tensor], parts: Mapping[str, Tensor], mesh: Mesh, *, local: bool
    ) -> None:
        self._mesh, self._local = mesh, local
        self._specs = [s for s in specs if s.grad and bound[s.name].requires_grad and torch.is_grad_enabled()]
        self.given = tuple(bound[s.name] for s in self._specs)
        self._leaves = {s.name: parts[s.name].detach().requires_grad_() for s in self._specs}
        self.parts = {**parts, **self._leaves}

    def collected(self, factor: Tensor | None) -> list[Tensor]:
        """Collective, after backward: the gradient of each of `given`, in its shape. factor: what to multiply them by."""
        return [self._whole(s, given, factor) for s, given in zip(self._specs, self.given, strict=True)]

    def _whole(self, spec: InputSpec, given: Tensor, factor: Tensor | None) -> Tensor:
        leaf = self._leaves[spec.name]
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if factor is not None:
            grad = grad * factor
        grad = comm.all_reduce(grad, self._mesh.pp)  # each stage that reads the input has a term of it
        for name in reversed(cut_order()):  # in the other order than it was cut
            axis, layout = self._mesh.axis(name), Layout.parse(spec.layouts.get(name, "I"))
            if layout == R:
                grad = comm.all_reduce(grad, axis)
            elif layout.is_shard and name == BATCH and self._local:
                grad = grad * axis.size
            elif layout.is_shard and axis.size > 1:
                grad = joined(comm.all_gather(grad, axis), layout.dim, layout.groups)
        return grad.to(given.device)
