"""Running micro-batches: over pipeline stages with torch.distributed.pipelining (this is the one file that knows it), or one
after the other where there is one stage.

The loss of a step is the sum of its micro-batches' losses. Gradients accumulate in the leaves of the weights. What is
sent between stages is stated by the emitted stages, so nothing is inferred by running them.

Stages are cut from what the pipeline engine sends: each sends to the next alone, and a value that a later stage needs is
passed on by the stages between. The engine's 1F1B wants at least as many micro-batches as stages; with fewer, GPipe has
the same micro-batches in flight and takes its place. The engine keeps a receive buffer for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from autopar.run.mesh import Mesh
from autopar.run.stage import Stage

__all__ = ["Pipeline", "accumulate"]

Inputs = Mapping[str, Tensor]
Saving = Callable[[], AbstractContextManager[object]]


def accumulate(stage: Stage, inputs: Sequence[Inputs], saving: Saving) -> Tensor:
    """The only stage, over all micro-batches: forward, and with gradients on backward. Returns the sum of losses."""
    losses = []
    for given in inputs:
        with saving():
            (loss,) = stage(**given)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(0)


class _OneMicroBatch(nn.Module):
    """What the engine runs: it hands on the number of a micro-batch, and the stage gets that micro-batch's inputs."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.inputs: Sequence[Inputs] = ()
        self.saving: Saving

    def forward(self, *received: Tensor, micro_batch: Tensor) -> tuple[Tensor, ...]:
        with self.saving():
            sent = self.stage(*received, **self.inputs[int(micro_batch)])
        return tuple(t.contiguous() for t in sent)


class Pipeline:
    """This rank's stage in the schedule 'gpipe' or '1f1b' over mesh.pp."""

    def __init__(self, stage: Stage, mesh: Mesh, *, micro_batches: int, schedule: str, device: torch.device) -> None:
        kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B if micro_batches >= mesh.pp.size else ScheduleGPipe}
        if schedule not in kinds:
            raise ValueError(f"schedule must be one of {sorted(kinds)}; got {schedule!r}")
        self._module = _OneMicroBatch(stage)
        self._micro_batches = micro_batches
        self._device = device
        self._last = mesh.pp.rank == mesh.pp.size - 1
        engine_stage = PipelineStage(
            self._module,
            mesh.pp.rank,
            mesh.pp.size,
            device,
            input_args=_stated(stage.receives),
            output_args=_stated(stage.sends),
            group=mesh.pp.group,
        )
        self._schedule = kinds[schedule](engine_stage, micro_batches, loss_fn=lambda output, _: output[0], scale_grads=False)

    def run(self, inputs: Sequence[Inputs], saving: Saving) -> Tensor | None:
        """All micro-batches: forward, and with gradients on backward. On the last stage the sum of losses, else None."""
        self._module.inputs, self._module.saving = inputs, saving
        losses: list[Tensor] = []
        run = self._schedule.step if torch.is_grad_enabled() else self._schedule.eval
        run(
            micro_batch=torch.arange(self._micro_batches),
            target=torch.zeros(self._micro_batches) if self._last else None,
            losses=losses,
            return_outputs=False,
        )
        self._module.inputs = ()
        return torch.stack([loss.detach() for loss in losses]).sum(0) if self._last else None


def _stated(tensors: Sequence[tuple[tuple[int, ...], str]]) -> tuple[Tensor, ...]:
    """Tensors without memory that have the stated shapes and dtypes."""
    return tuple(torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=True) for shape, dtype in tensors)
