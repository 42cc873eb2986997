"""What a worker does in a verification: train the emitted module, then give what it found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.capture import float64_by_default, lift_to_float64
from autopar.compare import digest
from autopar.dropout import without_dropout
from autopar.errors import PlanError
from autopar.render import load
from autopar.run import ParallelModule
from autopar.run.form import Anew
from autopar.run.part import local
from autopar.run.region import Region
from autopar.run.state import assemble
from autopar.run.varying import Varying
from autopar.variants import Variants

__all__ = ["ADAM_EPS", "Call", "Draws", "Form", "Found", "LEARNING_RATE", "Task", "train_on_rank"]

LEARNING_RATE = 1e-4  # small steps: batch norm of few samples (ResNet-50) multiplies rounding by a thousand in two steps of 1e-3
Call = tuple[bool, int]  # training or evaluation, and which of the batches
Draws = Mapping[Call, tuple[Mapping[str, Tensor], ...]]
ADAM_EPS = 1e-4  # a gradient that is zero but for rounding (an attention key's bias) must not be blown up to a whole step


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The emitted module for another batch size or mode, and its constants."""

    source: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """steps: how many on the first of the batches. later: what is called after them, (training, batch); an evaluation has no step.
    forms: what runs for those, where it is not what runs in the steps. draws: the random numbers of each call."""

    source: str
    tensors: Mapping[str, Tensor]
    batches: tuple[Any, ...]
    steps: int
    later: tuple[Call, ...] = ()
    forms: Mapping[Call, Form] = field(default_factory=dict)
    draws: Draws = field(default_factory=dict)

    def inputs(self, call: Call, count: int) -> dict[Any, Any]:
        """What the module is given in the count-th call of a kind, by position or by name."""
        batch = self.batches[call[1]]
        return {**(batch if isinstance(batch, dict) else dict(enumerate(batch))), **(self.draws[call][count] if self.draws else {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """later: the loss of each later call, or why it was refused; after a refused step there is none. state, buffers: whole, after the
    steps; final: the state after the later calls. Whole tensors are given by rank 0. parts: a digest of what each rank holds, by
    the name of the part; ranks that name the same part must hold the same bits."""

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    later: tuple[float | str, ...]
    final: Mapping[str, Tensor]
    parts: Mapping[str, str]


class _Prepared:
    """Gives the module the form that was prepared for the call at hand, as `Variants` would make it on the ranks."""

    def __init__(self, module: ParallelModule, forms: Mapping[Call, Form]) -> None:
        self._module, self._forms, self.batch = module, forms, 0

    def __call__(self, inputs: Any, why: str, everything: str, varying: Varying) -> Anew:
        module, training = self._module, self._module.training
        form = self._forms.get((training, self.batch))
        if form is None:
            raise ValueError(f"batch {self.batch} in {'training' if training else 'evaluation'} mode cannot run under this plan")
        emitted = load(form.source)
        Variants.check(module, emitted)
        return Anew(emitted=emitted, tensors=form.tensors)


def train_on_rank(task: Task) -> Found:
    """In a worker: AdamW steps on the first batch, then the later calls."""
    torch.set_default_dtype(torch.float32)
    with _as_lifted(task):
        module = ParallelModule(load(task.source), task.tensors)
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, eps=ADAM_EPS) if trainable else None
        losses: list[float] = []
        gradients: dict[str, Tensor] = {}
        for step in range(task.steps):
            losses.append(_step(module, optimizer, task.inputs((True, 0), step), gradients))
        state, buffers = _on_host(module.full_state_dict()), _buffers(module)
        later = _later(module, optimizer, task)
        final = _on_host(module.full_state_dict()) if task.later else {}
    parts = {part: digest(tensor) for part, tensor in _parts(module, optimizer)}
    if torch.distributed.get_rank() != 0:
        gradients, state, buffers, final = {}, {}, {}, {}
    return Found(losses=tuple(losses), gradients=gradients, state=state, buffers=buffers, later=later, final=final, parts=parts)


@contextlib.contextmanager
def _as_lifted(task: Task) -> Iterator[None]:
    """An emitted module names the dtypes that it computes in, and has no dropout. Submodules that run as they are written do not know that
    they are lifted, and that the original has none."""
    held = [*task.tensors.values(), *(x for form in task.forms.values() for x in form.tensors.values())]
    if any(isinstance(x, Region) for x in held):
        with lift_to_float64(), without_dropout():
            yield
    else:
        with float64_by_default():
            yield


def _step(
    module: ParallelModule, optimizer: torch.optim.Optimizer | None, inputs: Any, gradients: dict[str, Tensor] | None = None
) -> float:
    """One step; the loss. gradients: is filled with the whole ones, if it is empty."""
    module.zero_grad(set_to_none=True)
    loss = _call(module, inputs)
    loss.backward()
    if gradients is not None and not gradients:
        gradients |= _on_host(module.full_gradients())
    if optimizer is not None:
        optimizer.step()
    return loss.item()


def _later(module: ParallelModule, optimizer: torch.optim.Optimizer | None, task: Task) -> tuple[float | str, ...]:
    prepared = module._forms.another = _Prepared(module, task.forms)
    found: list[float | str] = []
    for call in task.later:
        training, prepared.batch = call
        module.train(training and module.manifest.training)
        inputs = task.inputs(call, task.steps if call == (True, 0) else 0)
        try:
            if training:
                found.append(_step(module, optimizer, inputs))
            else:
                with torch.no_grad():
                    found.append(_call(module, inputs).item())
        except (ValueError, PlanError) as error:  # on all ranks alike, before anything was sent
            found.append(str(error))
            if training:
                break
    return tuple(found)


def _buffers(module: ParallelModule) -> dict[str, Tensor]:
    """Collective: every buffer of the original, whole, those that are in no state_dict too."""
    specs = [spec for spec in module.manifest.buffers if not spec.constant]
    assembled = assemble(specs, module.at_rest, module.mesh, module.device)
    return {name: tensor.to("cpu", copy=True) for spec, tensor in assembled for name in (spec.name, *spec.aliases)}


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _call(module: ParallelModule, inputs: Mapping[Any, Any]) -> Tensor:
    loss: Tensor = module(*(v for k, v in inputs.items() if isinstance(k, int)), **{k: v for k, v in inputs.items() if isinstance(k, str)})
    return loss


def _parts(module: ParallelModule, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters, their gradients, the optimizer's states, and buffers, as they rest on this rank."""
    for name, p in module.named_parameters():
        part = module.part_of(name)
        yield part, local(p)
        if p.grad is not None:
            yield f"the gradient of {part}", local(p.grad)
        for key, value in (optimizer.state[p] if optimizer is not None and p in optimizer.state else {}).items():
            if isinstance(value, Tensor):
                yield f"{key} of {part}", local(value)
    known = {spec.name for spec in module.manifest.buffers if not spec.constant}
    for name, b in module.named_buffers():
        if name in known:
            yield module.part_of(name), local(b)
