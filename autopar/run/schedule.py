"""Running micro-batches: over pipeline stages, or one after the other where there is one stage.

The loss of a step is the sum of its micro-batches' losses; gradients accumulate in the leaves of the weights. A stage sends
to the next one alone: a value that a later stage needs is passed on by the stages between. Which stages a rank runs, in which order,
and when it sends and receives is what the schedule's actions say (cost_models.actions).

This runs a schedule's actions itself rather than through torch.distributed.pipelining (looked at in torch 2.13),
because that engine keeps a receive buffer for every micro-batch between steps too, of which the plan counts those in
flight; it agrees on shapes by sending and reading values, and so cannot run on a fake process group or fake tensors,
with which the plan's memory is checked; and its 1F1B refuses fewer micro-batches than stages. What it does between
actions is done here too: the results of one action and the needs of the next are exchanged together, or earlier where a
schedule would deadlock. Both are as fast (`python -m benchmarks engines`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.axes import LAYERS
from autopar.run import comm, record
from autopar.run.dtypes import empty
from autopar.run.mesh import Mesh
from autopar.run.stage import Stage
from autopar.run.weights import Step
from cost_models.actions import Action
from cost_models.exchanges import Exchange
from cost_models.pipeline import SCHEDULES, exchanged, flow
from cost_models.pipeline import schedule as schedule_of

__all__ = ["Made", "OpenRun", "OpenStage", "Pipeline", "accumulate", "apart", "at_once", "keywords"]

Inputs = Mapping[str, Tensor]
Made = list[tuple[Tensor, ...]]  # a stage's outputs, of each micro-batch


def at_once(stage: Stage, given: Inputs, step: Step, made: Made) -> Tensor:
    """The only stage over the only micro-batch: its loss, to be differentiated. made: takes the stage's outputs."""
    with step.saving():
        (loss,), outputs = apart(stage, stage(**given))
    made.append(outputs)
    return loss


def accumulate(stage: Stage, inputs: Sequence[Inputs], step: Step, made: Made) -> Tensor:
    """The only stage, over all micro-batches: forward, and with gradients on backward. Returns the sum of losses. made: takes the
    stage's outputs for each."""
    losses = []
    for given in inputs:
        with step.saving():
            (loss,), outputs = apart(stage, stage(**given))
        made.append(outputs)
        step.begin_pass(0)
        record.phase(record.BACKWARD)
        if loss.requires_grad:
            loss.backward(_beginning(loss, step))
        record.phase(record.FORWARD)
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
                _, outputs = apart(stage, stage(**given), detach=False)
            self._made.append(outputs)
        self.made: Made = [tuple(t.detach() for t in outputs) for outputs in self._made]

    def backward(self, cotangents: Sequence[Sequence[Tensor | None]]) -> None:
        for outputs, grads in zip(self._made, cotangents, strict=True):
            self._step.begin_pass(0)
            _differentiate(outputs, grads)
            self._step.end_pass()
        self._made = []


class Pipeline:
    """This rank's stages over mesh.pp, in a schedule of cost_models.pipeline. stages: by number. Collective over the ranks of mesh.pp."""

    def __init__(self, stages: Mapping[int, Stage], mesh: Mesh, *, micro_batches: int, schedule: str, device: torch.device) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {sorted(SCHEDULES)}; got {schedule!r}")
        self._stages, self._pp, self._device, self.talks = stages, mesh.pp, device, mesh.talks
        self._asked = schedule, mesh.pp.size, micro_batches, len(stages)
        self._flow = flow(*self._asked)
        self._ranks = schedule_of(*self._asked)
        if unknown := {a.pass_ for actions in self._ranks for a in actions} - {"F", "B"}:
            raise ValueError(f"{schedule} has passes {', '.join(sorted(unknown))}, which are not run: only F and B are")
        self._takes = {s: keywords(stage.forward) for s, stage in stages.items()}
        self.under_way = False  # whether messages of a step may be on their way
        self._known: dict[str, tuple[tuple[Action, ...], tuple[Exchange, ...]]] = {}
        comm.all_reduce_(torch.zeros(1, device=device), mesh.pp)  # NCCL wants all ranks at the first use of a group

    @property
    def waits(self) -> bool:
        """Whether no micro-batch goes backward before all have gone forward."""
        return not any("BF" in "".join(a.pass_ for a in actions) for actions in self._ranks)

    def run(self, inputs: Sequence[Inputs], step: Step, made: Made) -> Tensor | None:
        """All micro-batches: forward, and with gradients on backward. On the rank of the last stage the sum of losses, else None. made:
        takes the outputs of this rank's stages for each."""
        return _Run(self, inputs, step, made).all()

    def run_open(self, inputs: Sequence[Inputs], step: Step) -> OpenRun:
        """All micro-batches forward. Collective, as is the backward of what is returned."""
        run = _Run(self, inputs, step, [], open_=True)
        run.passes("F")
        return run

    def _program(self, passes: str) -> tuple[tuple[Action, ...], tuple[Exchange, ...]]:
        """This rank's actions, and what it sends and receives before each of them and at the end."""
        if passes not in self._known:
            own = tuple(a for a in self._ranks[self._pp.rank] if a.pass_ in passes)
            self._known[passes] = own, exchanged(*self._asked, passes)[self._pp.rank]
        return self._known[passes]


class _Run:
    """One step: what has been received and sent for each stage and micro-batch in flight."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Inputs], step: Step, made: Made, *, open_: bool = False) -> None:
        self._pipeline, self._stages, self._device, self._pp = pipeline, pipeline._stages, pipeline._device, pipeline._pp
        self._of, self._last = pipeline._flow.rank_of, pipeline._flow.stages - 1
        self._inputs, self._step, self.made = inputs, step, made
        self._outputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._open: dict[tuple[int, int], tuple[Tensor, ...]] | None = {} if open_ else None  # outputs that are yet to be differentiated
        self._cotangents: Sequence[Sequence[Tensor | None]] = ()
        self._train = torch.is_grad_enabled()
        self._received: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # stage and micro-batch -> activations; kept until its backward
        self._sent: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._grads: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._losses: list[Tensor] = []
        self._results: dict[Action, tuple[Tensor, ...]] = {}  # of actions, which are yet to be sent
        self._arriving: dict[Action, list[dist.Work]] = {}  # messages on their way to this rank
        self._works: list[tuple[dist.Work, tuple[Tensor, ...]]] = []  # sends on their way, and what they send

    def all(self) -> Tensor | None:
        self.passes("FB" if self._train else "F")
        return torch.stack(self._losses).sum(0) if self._last in self._stages else None

    def backward(self, cotangents: Sequence[Sequence[Tensor | None]]) -> None:
        self._cotangents = cotangents
        self.passes("B")

    def passes(self, which: str) -> None:
        """The actions of these passes."""
        actions, exchanges = self._pipeline._program(which)
        self._pipeline.under_way = True
        for action, exchange in zip(actions, exchanges[:-1], strict=True):
            self._exchange(exchange)
            self._wait_for(action)
            record.phase(record.FORWARD if action.pass_ == "F" else record.BACKWARD)
            self._hand_on(action, self._forward(action) if action.pass_ == "F" else self._backward(action))
        self._exchange(exchanges[-1])
        for work, _ in self._works:
            comm.finish(work, record.EXCHANGE, LAYERS)
        self._works = []
        self._pipeline.under_way = False
        if "F" in which:
            outputs = [[self._outputs.pop((s, i)) for s in sorted(self._stages)] for i in range(len(self._inputs))]
            self.made.extend(tuple(t for of_stage in one for t in of_stage) for one in outputs)

    def _hand_on(self, action: Action, results: tuple[Tensor, ...]) -> None:
        """Keep what an action has made for whoever takes it."""
        to = action.stage + 1 if action.pass_ == "F" else action.stage - 1
        if not 0 <= to <= self._last:
            return
        if to in self._stages:
            (self._received if action.pass_ == "F" else self._grads)[to, action.micro_batch] = results
        else:
            self._results[action] = results

    def _wait_for(self, action: Action) -> None:
        """What an action takes of another rank has arrived."""
        source = action.stage - 1 if action.pass_ == "F" else action.stage + 1
        for work in self._arriving.pop(Action(source, action.pass_, action.micro_batch), ()):
            comm.finish(work, record.EXCHANGE, LAYERS)
            self._works = [(other, sent) for other, sent in self._works if other is not work]  # sent with what has been waited for

    def _exchange(self, exchange: Exchange) -> None:
        """Send results, and make room for and begin to receive what comes next."""
        sends, receives = [], []
        for message in exchange.sends:
            to = self._rank(message.stage + 1 if message.pass_ == "F" else message.stage - 1)
            results = self._results.pop(message)
            sends += [((t, to), results) for t in results]
        for message in exchange.receives:
            forward = message.pass_ == "F"
            stage = message.stage + 1 if forward else message.stage - 1
            arriving = self._empty(self._stages[stage].receives if forward else self._stages[stage].sends)
            (self._received if forward else self._grads)[stage, message.micro_batch] = arriving
            receives += [((t, self._rank(message.stage)), message) for t in arriving]
        if not sends and not receives:
            return
        if self._pipeline.talks:
            self._works = [(work, sent) for work, sent in self._works if not work.is_completed()]  # what has arrived need not be kept
        else:  # in a fake process group nothing is on its way
            self._works = []
        works = comm.exchange([one for one, _ in sends], [one for one, _ in receives], self._pp)
        if len(works) == len(sends) + len(receives):
            self._works.extend((work, results) for work, (_, results) in zip(works, sends, strict=False))
            for work, (_, message) in zip(works[len(sends) :], receives, strict=True):
                self._arriving.setdefault(message, []).append(work)
        else:  # the backend has made one work of all
            self._works.extend((work, results) for work in works for _, results in sends)
            self._arriving.update((message, list(works)) for _, message in receives)

    def _rank(self, stage: int) -> int:
        return self._pp.ranks[self._of[stage]]

    def _forward(self, action: Action) -> tuple[Tensor, ...]:
        s, i = action.stage, action.micro_batch
        stage, last = self._stages[s], s == self._last
        received = tuple(t.requires_grad_(self._train and s > self._step.first_stage) for t in self._received.get((s, i), ()))
        given = {k: v for k, v in self._inputs[i].items() if k in self._pipeline._takes[s]}
        with self._step.saving():
            outputs, others = apart(stage, stage(*received, **given), detach=self._open is None)
        self._outputs[s, i] = tuple(t.detach() for t in others)
        if self._open is not None:
            self._open[s, i] = others
        if last and self._open is not None:
            outputs = ()  # the sum of the outputs, which is not the loss
        elif last:
            (loss,) = outputs
            self._losses.append(loss.detach())
        else:
            _check(stage, outputs)
        if self._train:
            self._sent[s, i] = outputs
        else:
            self._received.pop((s, i), None)
        return tuple(t.detach().contiguous() for t in outputs) if not last else ()

    def _backward(self, action: Action) -> tuple[Tensor, ...]:
        """Returns the gradients of what was received (zeros for what the loss does not depend on)."""
        s, i = action.stage, action.micro_batch
        outputs, received = self._sent.pop((s, i)), self._received.pop((s, i), ())
        grads: Sequence[Tensor | None] = self._grads.pop((s, i), (None,) * len(outputs))
        if s == self._last and self._open is None:
            grads = (_beginning(outputs[0], self._step),)
        self._step.begin_pass(s)
        if self._open is None:
            used = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
            if used:
                torch.autograd.backward([t for t, _ in used], [g for _, g in used])
        else:
            others = self._open.pop((s, i))
            before = sum(len(self._stages[k].outputs) for k in self._stages if k < s)
            _differentiate((*outputs, *others), (*grads, *self._cotangents[i][before : before + len(others)]))
        self._step.end_pass()
        return tuple(torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in received)

    def _empty(self, tensors: Sequence[tuple[tuple[int, ...], str]]) -> tuple[Tensor, ...]:
        return tuple(empty(shape, dtype, self._device) for shape, dtype in tensors)


def keywords(fn: Callable[..., object]) -> frozenset[str]:
    """The names of its arguments that are given by keyword alone."""
    return frozenset(p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY)


def apart(stage: Stage, results: tuple[Tensor, ...], *, detach: bool = True) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a stage sends (the last: its loss), and its outputs."""
    n = len(results) - len(stage.outputs)
    return results[:n], tuple(t.detach() if detach else t for t in results[n:])


def _beginning(loss: Tensor, step: Step) -> Tensor | None:
    """The gradient of a loss."""
    return None if step.begins_from == 1 else torch.full_like(loss, step.begins_from)


def _differentiate(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    used = [(t, g.to(t.dtype)) for t, g in zip(tensors, grads, strict=True) if t.requires_grad and g is not None]
    if used:
        torch.autograd.backward([t for t, _ in used], [g for _, g in used])


def _check(stage: Stage, outputs: Sequence[Tensor]) -> None:
    """The next stage has made room for what this one states that it sends; anything else would be read as garbage."""
    found = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in outputs)
    if found != stage.sends:
        raise RuntimeError(f"{type(stage).__name__} states that it sends {stage.sends} and gives {found}")
