"""Running micro-batches: over pipeline stages, or one after the other where there is one stage.

The loss of a step is the sum of its micro-batches' losses; gradients accumulate in the leaves of the weights. A stage sends
to the next one alone: a value that a later stage needs is passed on by the stages between.

This runs a schedule's actions itself rather than through torch.distributed.pipelining (looked at in torch 2.13), because
that engine keeps a receive buffer for every micro-batch between steps too, of which the plan counts those in flight; it
agrees on shapes by sending and reading values, and so cannot run on a fake process group or fake tensors, with which the
plan's memory is checked; and its 1F1B refuses fewer micro-batches than stages. What it does between actions is done here
too: the results of one action and the needs of the next are exchanged together, which cannot deadlock. Both are as fast
(`python -m benchmarks engines`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.run import comm
from autopar.run.dtypes import empty
from autopar.run.mesh import Mesh
from autopar.run.stage import Stage
from autopar.run.weights import Step
from cost_models.pipeline import SCHEDULES, Action

__all__ = ["Made", "OpenRun", "OpenStage", "Pipeline", "accumulate", "at_once"]

Inputs = Mapping[str, Tensor]
Made = list[tuple[Tensor, ...]]  # a stage's outputs, of each micro-batch


def at_once(stage: Stage, given: Inputs, step: Step, made: Made) -> Tensor:
    """The only stage over the only micro-batch: its loss, to be differentiated. made: takes the stage's outputs."""
    with step.saving():
        (loss,), outputs = _apart(stage, stage(**given))
    made.append(outputs)
    return loss


def accumulate(stage: Stage, inputs: Sequence[Inputs], step: Step, made: Made) -> Tensor:
    """The only stage, over all micro-batches: forward, and with gradients on backward. Returns the sum of losses. made: takes the
    stage's outputs for each."""
    losses = []
    for given in inputs:
        with step.saving():
            (loss,), outputs = _apart(stage, stage(**given))
        made.append(outputs)
        if loss.requires_grad:
            loss.backward()
        step.end_pass()
        losses.append(loss.detach())
    return torch.stack(losses).sum(0)


class OpenRun(Protocol):
    """Micro-batches that have gone forward, of which `backward` is yet to be given the gradients. made: the stage's outputs for each."""

    made: Made

    def backward(self, cotangents: Sequence[Sequence[Tensor | None]]) -> None:
        """cotangents: for each micro-batch, of the stage's outputs; None for those without."""


class OpenStage:
    """An OpenRun of the only stage."""

    def __init__(self, stage: Stage, inputs: Sequence[Inputs], step: Step) -> None:
        self._made: Made = []
        self._step = step
        for given in inputs:
            with step.saving():
                _, outputs = _apart(stage, stage(**given), detach=False)
            self._made.append(outputs)
        self.made: Made = [tuple(t.detach() for t in outputs) for outputs in self._made]

    def backward(self, cotangents: Sequence[Sequence[Tensor | None]]) -> None:
        for outputs, grads in zip(self._made, cotangents, strict=True):
            _differentiate(outputs, grads)
            self._step.end_pass()
        self._made = []


class Pipeline:
    """This rank's stage over mesh.pp, in a schedule of cost_models.pipeline. Collective over the ranks of mesh.pp."""

    def __init__(self, stage: Stage, mesh: Mesh, *, micro_batches: int, schedule: str, device: torch.device) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {sorted(SCHEDULES)}; got {schedule!r}")
        self._stage, self._pp, self._device = stage, mesh.pp, device
        self._previous = mesh.pp.ranks[mesh.pp.rank - 1] if mesh.pp.rank > 0 else None
        self._next = mesh.pp.ranks[mesh.pp.rank + 1] if mesh.pp.rank < mesh.pp.size - 1 else None
        self._actions = SCHEDULES[schedule](mesh.pp.rank, mesh.pp.size, micro_batches)
        comm.all_reduce_(torch.zeros(1, device=device), mesh.pp)  # NCCL wants all ranks at the first use of a group

    def run(self, inputs: Sequence[Inputs], step: Step, made: Made) -> Tensor | None:
        """All micro-batches: forward, and with gradients on backward. On the last stage the sum of losses, else None. made: takes this
        stage's outputs for each."""
        return _Run(self, inputs, step, made).all()

    def run_open(self, inputs: Sequence[Inputs], step: Step) -> OpenRun:
        """All micro-batches forward. Collective, as is the backward of what is returned."""
        run = _Run(self, inputs, step, [], open_=True)
        run.passes("F")
        return run


class _Run:
    """One step: what has been received and sent for each micro-batch in flight."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Inputs], step: Step, made: Made, *, open_: bool = False) -> None:
        self._stage, self._device, self._pp = pipeline._stage, pipeline._device, pipeline._pp
        self._previous, self._next = pipeline._previous, pipeline._next
        self._inputs, self._step, self.made = inputs, step, made
        self._open: dict[int, tuple[Tensor, ...]] | None = {} if open_ else None  # outputs that are yet to be differentiated
        self._cotangents: Sequence[Sequence[Tensor | None]] = ()
        self._train = torch.is_grad_enabled()
        self._actions = [a for a in pipeline._actions if self._train or a.pass_ == "F"]
        self._received: dict[int, tuple[Tensor, ...]] = {}  # micro-batch -> activations; kept until its backward
        self._sent: dict[int, tuple[Tensor, ...]] = {}
        self._grads: dict[int, tuple[Tensor, ...]] = {}
        self._losses: list[Tensor] = []
        self._works: list[tuple[dist.Work, tuple[Tensor, ...]]] = []  # sends on their way, and what they send

    def all(self) -> Tensor | None:
        self.passes("FB")
        return torch.stack(self._losses).sum(0) if self._next is None else None

    def backward(self, cotangents: Sequence[Sequence[Tensor | None]]) -> None:
        self._cotangents = cotangents
        self.passes("B")

    def passes(self, which: str) -> None:
        """The actions of these passes."""
        results: tuple[tuple[Tensor, ...], int | None] = ((), None)
        for action in (a for a in self._actions if a.pass_ in which):
            self._exchange(*results, action)
            if action.pass_ == "F":
                results = self._forward(action.micro_batch), self._next
            else:
                results = self._backward(action.micro_batch), self._previous
        self._exchange(*results, None)
        for work, _ in self._works:
            work.wait()
        self._works = []

    def _exchange(self, results: tuple[Tensor, ...], to: int | None, action: Action | None) -> None:
        """Send the results of the last action, and receive what the next one needs."""
        sends = [dist.P2POp(dist.isend, t, to, self._pp.group) for t in results] if to is not None else []
        arriving: tuple[Tensor, ...] = ()
        if action is not None:
            forward = action.pass_ == "F"
            source = self._previous if forward else self._next
            if source is not None:
                arriving = self._empty(self._stage.receives if forward else self._stage.sends)
                (self._received if forward else self._grads)[action.micro_batch] = arriving
        receives = [dist.P2POp(dist.irecv, t, source, self._pp.group) for t in arriving]
        if not sends and not receives:
            return
        self._works = [(work, sent) for work, sent in self._works if not work.is_completed()]  # what has arrived need not be kept
        works = dist.batch_isend_irecv([*sends, *receives])
        if len(works) == len(sends) + len(receives):  # else the backend has made one work of all
            self._works.extend((work, results) for work in works[: len(sends)])
            works = works[len(sends) :]
        elif not receives:
            self._works.extend((work, results) for work in works)
            works = []
        for work in works:
            work.wait()

    def _forward(self, i: int) -> tuple[Tensor, ...]:
        received = tuple(t.requires_grad_(self._train) for t in self._received.get(i, ()))
        with self._step.saving():
            outputs, others = _apart(self._stage, self._stage(*received, **self._inputs[i]), detach=self._open is None)
        self.made.append(tuple(t.detach() for t in others))
        if self._open is not None:
            self._open[i] = others
        if self._next is None and self._open is not None:
            outputs = ()  # the sum of the outputs, which is not the loss
        elif self._next is None:
            (loss,) = outputs
            self._losses.append(loss.detach())
        else:
            _check(self._stage, outputs)
        if self._train:
            self._sent[i] = outputs
        else:
            self._received.pop(i, None)
        return tuple(t.detach().contiguous() for t in outputs) if self._next is not None else ()

    def _backward(self, i: int) -> tuple[Tensor, ...]:
        """Returns the gradients of what was received (zeros for what the loss does not depend on)."""
        outputs, received = self._sent.pop(i), self._received.pop(i, ())
        grads: Sequence[Tensor | None] = self._grads.pop(i, (None,) * len(outputs))
        if self._open is None:
            used = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
            if used:
                torch.autograd.backward([t for t, _ in used], [g for _, g in used])
        else:
            _differentiate((*outputs, *self._open.pop(i)), (*grads, *self._cotangents[i]))
        self._step.end_pass()
        return tuple(torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in received)

    def _empty(self, tensors: Sequence[tuple[tuple[int, ...], str]]) -> tuple[Tensor, ...]:
        return tuple(empty(shape, dtype, self._device) for shape, dtype in tensors)


def _apart(stage: Stage, results: tuple[Tensor, ...], *, detach: bool = True) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a stage sends (the last: its loss), and its outputs."""
    n = len(results) - len(stage.outputs)
    return results[:n], tuple(t.detach() if detach else t for t in results[n:])


def _differentiate(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    used = [(t, g.to(t.dtype)) for t, g in zip(tensors, grads, strict=True) if t.requires_grad and g is not None]
    if used:
        torch.autograd.backward([t for t, _ in used], [g for _, g in used])


def _check(stage: Stage, outputs: Sequence[Tensor]) -> None:
    """The next stage has made room for what this one states that it sends; anything else would be read as garbage."""
    found = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in outputs)
    if found != stage.sends:
        raise RuntimeError(f"{type(stage).__name__} states that it sends {stage.sends} and gives {found}")
