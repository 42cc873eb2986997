"""What turns operator and collective times into a step: launches, overlapped communication, the optimizer.

Each function is a small queue, replayed: the host issues kernels one after the other and the device runs them in order;
communication has a stream of its own on which one collective runs at a time. With the pipeline (pipeline.step_time_s) and these,

    step = pipeline(forward, backward) + exposed gradient reduction + exposed parameter gathers + optimizer
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cost_models.cluster import Gpu
from cost_models.compute import kernel_time_s
from cost_models.memory import OPTIMIZERS

__all__ = ["exposed_gather_s", "exposed_reduction_s", "launched_s", "optimizer_time_s"]


def launched_s(kernels_s: Sequence[float], launch_s: float) -> float:
    """Seconds until the device has run `kernels_s` in order, when the host needs `launch_s` to issue each and never waits.

    Kernel i starts when it has been issued, (i + 1) * launch_s, and its predecessor is done. Between the larger of both sums
    (perfect overlap) and the sum of the larger of each (no running ahead).
    """
    done_s = 0.0
    for index, kernel_s in enumerate(kernels_s):
        done_s = max(done_s, (index + 1) * launch_s) + kernel_s
    return done_s


def exposed_reduction_s(buckets_s: Sequence[float], backward_s: float) -> float:
    """Seconds by which gradient reduction outlasts a backward pass of `backward_s`.

    buckets_s: one collective a bucket, in order of readiness; they become ready at even intervals, the last with the end of the
    backward pass, so that at least the last one is exposed.
    """
    done_s = 0.0
    for index, bucket_s in enumerate(buckets_s):
        ready_s = backward_s * (index + 1) / len(buckets_s)
        done_s = max(done_s, ready_s) + bucket_s
    return max(0.0, done_s - backward_s)


def exposed_gather_s(gathers_s: Sequence[float], compute_s: Sequence[float], prefetch: int = 1) -> float:
    """Seconds by which gathering parameters block by block (ZeRO-3, FSDP) lengthens a pass over the blocks.

    gathers_s, compute_s: by block, in order. A block's gather is issued when the block `prefetch` + 1 before it is done (0: no
    overlap at all); it runs when the gather before it has ended; the block computes when its gather has.
    Raises ValueError if the numbers of blocks differ or prefetch is negative.
    """
    if len(gathers_s) != len(compute_s) or prefetch < 0:
        raise ValueError(f"{len(gathers_s)} gathers, {len(compute_s)} blocks, prefetch {prefetch}")
    gathered_s = done_s = 0.0
    finished: list[float] = []
    for index, (gather_s, block_s) in enumerate(zip(gathers_s, compute_s)):
        issued_s = finished[index - prefetch - 1] if index > prefetch else 0.0
        gathered_s = max(gathered_s, issued_s) + gather_s
        done_s = max(done_s, gathered_s) + block_s
        finished.append(done_s)
    return done_s - sum(compute_s)


def optimizer_time_s(
    *,
    trainable_params: float,
    gpu: Gpu,
    optimizer: str = "adamw",
    param_itemsize: int = 4,
    grad_itemsize: int = 4,
    state_itemsize: int = 4,
    master_itemsize: int = 0,
    tensors: int = 1,
    tensors_per_launch: int = 64,
    passes: float = 1.0,
) -> float:
    """Seconds of the optimizer's update of what one rank updates (after ZeRO): memory-bound, in launches of many tensors.

    Reads the gradient; reads and writes the parameter, each state and, where there is one, the master copy. passes: how often
    that traffic happens: 1 for a fused kernel, about 3 for torch's default foreach kernels, which keep intermediates in memory.
    tensors_per_launch: how many tensors one multi-tensor kernel takes.
    Raises ValueError on an unknown optimizer and on negative sizes.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    if optimizer == "none" or not trainable_params:
        return 0.0
    per_param = grad_itemsize + 2 * (param_itemsize + OPTIMIZERS[optimizer] * state_itemsize + master_itemsize)
    launches = max(1, math.ceil(tensors / tensors_per_launch))
    kernel_s = kernel_time_s("pointwise", 0.0, passes * trainable_params * per_param / launches, "float32", gpu)
    return launched_s([kernel_s] * launches, gpu.launch_s)
