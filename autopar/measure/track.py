"""The memory of a training step, allocation by allocation: what the plan's prediction is compared with.

Under FakeTensorMode nothing is computed and nothing is allocated, so that one process without a GPU runs any rank of any plan
(with a fake process group, in which collectives return at once).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.measure.tracker import MemoryTracker
from autopar.run import BufferSpec, ParallelModule, ParamSpec
from autopar.run.dtypes import empty
from autopar.run.form import Emitted

__all__ = ["StepMemory", "step_memory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes of one rank in a training step that is not the first. peak_bytes: the most of the whole step; computing_bytes: of
    forward and backward; updating_bytes: of the optimizer. resting_bytes: between steps, without gradients. at_peak: see
    MemoryTracker."""

    peak_bytes: int
    computing_bytes: int
    updating_bytes: int
    resting_bytes: int
    at_peak: Mapping[str, int]


def step_memory(
    emitted: Emitted,
    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    *,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = torch.optim.AdamW,
    explain: bool = False,
) -> StepMemory:
    """Memory of a training step of this process's rank, on fake tensors; the process group must be a fake one.

    inputs: shape and dtype of each keyword input of the global batch. Gradients are None when a step begins, as after
    `optimizer.zero_grad()`. What the framework and its allocator take beyond the tensors is not in the figures.
    """
    manifest = emitted.MANIFEST
    with FakeTensorMode(allow_non_fake_inputs=True):
        specs: list[ParamSpec | BufferSpec] = [*manifest.params, *manifest.buffers]
        given = {s.name: empty(s.shape, s.dtype, "cpu") for s in specs}
        tracker = MemoryTracker(explain=explain)
        with tracker:
            model = ParallelModule(emitted, given, device="cpu")
        del given
        batch = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in inputs.items()}
        updater = optimizer(model.parameters())
        tracker.hold(batch.values(), "inputs")
        with tracker:
            for _ in range(2):  # the first makes the optimizer's states and learns the order of gathers
                updater.zero_grad()
                resting = tracker.live_bytes
                tracker.reset_peak()
                tracker.phase = "forward "
                loss = model(**batch)
                tracker.phase = "backward "
                loss.backward()
                del loss
                computing, at_peak = tracker.peak_bytes, tracker.at_peak
                tracker.reset_peak()
                tracker.phase = "optimizer "
                updater.step()
                updating = tracker.peak_bytes
    if updating > computing:
        at_peak = tracker.at_peak
    return StepMemory(
        peak_bytes=max(computing, updating), computing_bytes=computing, updating_bytes=updating, resting_bytes=resting, at_peak=at_peak
    )
