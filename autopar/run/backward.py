"""How the gradients of a step reach autograd: those of the parameters at rest and of the inputs, when backward comes to what a call
returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from autopar.axes import cut_order
from autopar.run import record
from autopar.run.alike import note_written
from autopar.run.asked import several_at_once
from autopar.run.batches import GivenBatches
from autopar.run.broken_off import broken_off
from autopar.run.form import Form
from autopar.run.input_gradients import InputGradients
from autopar.run.observed import Observed
from autopar.run.part import local
from autopar.run.region import Region
from autopar.run.scaling import Scaling
from autopar.run.schedule import OpenRun
from autopar.run.tree import Tree
from autopar.run.unreached import without_unreached
from autopar.run.weights import Step

__all__ = ["FUNCTIONS", "Backward"]


Given = TypeVar("Given")
OfLoss = Callable[[Tensor], list[Tensor | None]]
OfOutputs = Callable[[Sequence[Tensor | None]], list[Tensor | None]]


class OfGraph(Protocol):
    """Gradients of a call in autograd's graph (`twice.Twice`)."""

    def came_to(self, *, loss: bool) -> None: ...

    def of_loss(self, grad: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]: ...

    def of_outputs(self, grads: Mapping[str, Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor | None]: ...


def _check(ctx: Any, arriving: Sequence[Tensor | None]) -> None:
    """RuntimeError for several gradients that arrive as one, and torch's own where the graph was not retained."""
    _ = ctx.saved_tensors
    if any(grad is not None and several_at_once(grad) for grad in arriving):
        raise RuntimeError(
            "several gradients of what the parallel module returned were asked for at once (is_grads_batched=True, vectorize=True), which "
            "its collectives do not go through. Ask for one after the other, with retain_graph=True"
        )


class _Deposit(torch.autograd.Function):
    """loss -> loss, whose backward returns the gradients of leaves. more: the same for each further backward pass, and in a graph where
    gradients are on (create_graph=True)."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: OfLoss, more: OfLoss, *leaves: Tensor) -> Tensor:
        ctx.gradients, ctx.more = gradients, more
        ctx.save_for_backward(torch.empty(0, device="cpu"))  # which is there as long as the graph is
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _check(ctx, (grad,))
        if torch.is_grad_enabled():
            return (None, None, None, *ctx.more(grad))
        gradients, ctx.gradients = ctx.gradients, ctx.more
        return (None, None, None, *gradients(grad))


class _Opened(torch.autograd.Function):
    """Outputs of which the user makes a loss -> the same, whose backward returns the gradients of leaves. values: n outputs, and leaves.
    gradients: from those of the outputs, None for those that the loss does not depend on; more: the same for each further backward pass,
    which torch refuses unless the graph was retained; twice: the same in a graph."""

    @staticmethod
    def forward(ctx: Any, gradients: OfOutputs, more: OfOutputs, twice: OfOutputs, n: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.more, ctx.twice, ctx.n = gradients, more, twice, n
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0, device="cpu"))  # which is there as long as the graph is
        return tuple(v.detach() for v in values[:n])  # which may be written in place, as views may not

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _check(ctx, grads)
        if torch.is_grad_enabled():  # create_graph=True
            return (None, None, None, None, *(None,) * ctx.n, *ctx.twice(grads))
        gradients, ctx.gradients = ctx.gradients, ctx.more
        return (None, None, None, None, *(None,) * ctx.n, *gradients(grads))


FUNCTIONS = (_Deposit, _Opened)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """What is left of a step after forward. trainable: parameters by name. reached_in: each opaque region, with the parameters that
    gradients come to in this step. observed: what hooks are to be told of. given: what tells of gradients that are others on other
    ranks. scaling: of losses."""

    form: Form
    tree: Tree
    step: Step
    trainable: Sequence[tuple[str, nn.Parameter]]
    inputs: InputGradients
    reached_in: Sequence[tuple[Region, set[str]]]
    observed: Observed
    given: GivenBatches
    scaling: Scaling

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What is differentiated by."""
        return (*(param for _, param in self.trainable), *self.inputs.given)

    def of_loss(self, loss: Tensor, twice: OfGraph) -> Tensor:
        """The loss as the user is given it. twice: of the call."""

        def gradients(grad: Tensor) -> list[Tensor | None]:
            twice.came_to(loss=True)
            note_written("scale", "loss", (grad,))
            record.phase(record.BACKWARD)
            if loss.requires_grad:
                loss.backward(grad)
            else:
                grad = self.scaling.left_of(grad, self.step.begins_from)
                self._check_factor(grad)
                self._check_read()
            found = self._gradients(None if loss.requires_grad else grad)  # else forward has run backward too
            record.phase(record.OUTSIDE)
            return found

        def more(grad: Tensor) -> list[Tensor | None]:
            twice.came_to(loss=True)
            found = twice.of_loss(grad, self.leaves)
            record.phase(record.OUTSIDE)
            return found

        return _Deposit.apply(loss.detach(), self._by_all(gradients), self._by_all(more), *self.leaves)

    def _by_all(self, gradients: Callable[[Given], list[Tensor | None]]) -> Callable[[Given], list[Tensor | None]]:
        """The same, in which an error is seen to be one on all ranks, or ends the run."""

        def seen(given: Given) -> list[Tensor | None]:
            begun = record.count()
            try:
                return gradients(given)
            except Exception as error:
                broken_off(error, begun, staged=self.form.mesh.pp.size > 1, lost=self.form.under_way)
                record.fails()
                raise

        return seen

    def _check_factor(self, factor: Tensor) -> None:
        """RuntimeError if gradients of the loss, multiplied by this, are not those of the loss that is multiplied by it."""
        other = self.form.manifest.not_linear
        if other and factor.item() != 1:
            raise RuntimeError(
                f"the loss was multiplied by {factor.item():g} before backward(), and gradients have gone through what is at {other[0]} "
                f"by then, whose own backward (a hook, a function) is not linear. Multiply the loss inside of the model, or in loss=fn; or "
                f"compile with Pins(pp=1, micro_batches=1)"
            )

    def _check_read(self) -> None:
        """RuntimeError if hooks and backwards of the user's own, which have run in the call, would read something else by now."""
        form = self.form
        if form.guards is None:
            return
        for region, names in form.reads_in_backward:
            if (said := form.guards.set_otherwise(names)) is not None:
                raise RuntimeError(
                    f"since the call of {form.manifest.model} there is a change ({said}), which {region.name} may read in backward, and "
                    f"gradients were computed in the call. Set it before the call, or compile with Pins(pp=1, micro_batches=1)"
                )

    def of_outputs(
        self, values: dict[str, Tensor], run: OpenRun, again: Callable[[], tuple[Backward, OpenRun]], twice: OfGraph
    ) -> dict[str, Tensor]:
        """The outputs, by name, as the user is given them to make a loss of. again: the call once more, for a further backward pass; twice:
        of the call."""
        names = [name for name in values if name in self.form.outputs.differentiable]
        before = self._versions()

        def gradients(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
            if self._versions() != before:
                raise RuntimeError(
                    "parameters were changed between a call of the model and the backward pass of what it returned. Step the optimizer "
                    "after backward(), or call the model again"
                )
            return self._of_run(run, names, grads)

        def more(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
            rest, anew = again()
            return rest._of_run(anew, names, grads)

        def in_a_graph(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
            self.given.compare_gradients([grad if grad is None else grad.detach() for grad in grads])
            found = twice.of_outputs(dict(zip(names, grads, strict=True)), self.leaves)
            record.phase(record.OUTSIDE)
            return found

        by = (self._by_all(gradients), self._by_all(more), self._by_all(in_a_graph))
        opened = _Opened.apply(*by, len(names), *(values[name] for name in names), *self.leaves)
        return values | dict(zip(names, opened, strict=True))

    def of_outputs_beside(self, values: dict[str, Tensor], twice: OfGraph, trained: Callable[[], None]) -> dict[str, Tensor]:
        """Outputs beside a loss, by name, as the user is given them. twice: of the call, by which their gradients are computed. trained: is
        told when one comes."""
        names = [name for name in values if name in self.form.outputs.differentiable]
        if not names:
            return values

        def gradients(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
            trained()
            twice.came_to(loss=False)
            self.given.compare_gradients([grad if grad is None else grad.detach() for grad in grads])
            found = twice.of_outputs(dict(zip(names, grads, strict=True)), self.leaves)
            record.phase(record.OUTSIDE)
            return found

        by = self._by_all(gradients)
        opened = _Opened.apply(by, by, by, len(names), *(values[name] for name in names), *self.leaves)
        return values | dict(zip(names, opened, strict=True))

    def _of_run(self, run: OpenRun, names: Sequence[str], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of `leaves`, from those of the outputs with these names. Collective."""
        record.phase(record.BACKWARD)
        self.given.compare_gradients(grads)
        with self.observed.listening():
            run.backward(self.form.outputs.cotangents(dict(zip(names, grads, strict=True)), self.form.manifest.micro_batches))
        found = self._gradients(None, tuple(grad is not None for grad in grads))
        record.phase(record.OUTSIDE)
        return found

    def _versions(self) -> list[int]:
        """Of a pipeline, in which the stage whose weights autograd finds changed is not the one that has the outputs: how often each
        parameter was written to. Every rank counts all, also those of which it holds nothing."""
        return [local(param)._version for _, param in self.trainable] if self.form.mesh.pp.size > 1 else []

    def _gradients(self, factor: Tensor | None, used: tuple[bool, ...] = ()) -> list[Tensor | None]:
        """Collective, after all of backward: of `leaves`. factor: what they are yet to be multiplied by. used: which outputs the loss
        depends on, if it is the user's."""
        form, tree, mesh = self.form, self.tree, self.form.mesh
        self.observed.tell(factor)
        axes = [*(mesh.axis(name) for name in cut_order()), mesh.pp]
        found = without_unreached(self.step.finish(), form.manifest.params, self.reached_in, tree.names, axes, form.device)
        if factor is not None:
            for value in found.values():
                value.mul_(factor)
        names = tuple(name for name, _ in self.trainable)
        key = names, used
        if mesh.pp.size > 1 and (key not in form.trained or form.regions):
            form.trained[key] = frozenset(mesh.collected(sorted(found)))
        elsewhere = form.trained.get(key, frozenset()) - tree.held.keys()
        of_params = [torch.empty_like(tree.at_rest(name)) if name in elsewhere else found.get(name) for name in names]
        return [*of_params, *self.inputs.collected(factor)]
