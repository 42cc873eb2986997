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

__all__ = ["exposed_gathers_s", "exposed_reduction_s", "launched_s", "optimizer_time_s"]


HOST_LAUNCHES = 0.2, 0.8
"""In launches of a model's operators: the update of one parameter on a host, where operators are issued one by one and nothing is recorded
for gradients, and what each state adds. Measured: 18 us by AdamW and 1.7 us by SGD beside 10 us a launch (torch 2.13, one thread of an AMD
EPYC core)."""


def launched_s(kernels_s: Sequence[float], launch_s: float) -> float:
    """Seconds until the device has run `kernels_s` in order, when the host needs `launch_s` to issue each and never waits.

    Kernel i starts when it has been issued, (i + 1) * launch_s, and its predecessor is done. Between the larger of both sums
    (perfect overlap) and the sum of the larger of each (no running ahead).
    """
    done_s = 0.0
    for index, kernel_s in enumerate(kernels_s):
        done_s = max(done_s, (index + 1) * launch_s) + kernel_s
    return done_s


def exposed_reduction_s(buckets_s: Sequence[float], backward_s: float, counts: Sequence[int] | None = None) -> float:
    """Seconds by which gradient reduction outlasts a backward pass of `backward_s`.

    buckets_s: one collective a bucket, in order of readiness; they become ready at even intervals, the last with the end of the
    backward pass, so that at least the last one is exposed. counts: how many equal buckets in a row each stands for (by default one).

    The last one ends when some bucket, which waits for its gradients alone, and all behind it are done: at the latest of these moments.
    Of equal buckets in a row that is the first or the last one's, since both terms change evenly from one to the next.
    """
    counts = [1] * len(buckets_s) if counts is None else counts
    left = total = sum(counts)
    done_s = behind_s = 0.0
    for bucket_s, count in zip(reversed(buckets_s), reversed(counts)):
        done_s = max(done_s, backward_s * left / total + behind_s + bucket_s)
        behind_s += count * bucket_s
        left -= count
        done_s = max(done_s, backward_s * (left + 1) / total + behind_s)
    return max(0.0, done_s - backward_s)


def exposed_gathers_s(gathers_s: Sequence[float], compute_s: float, counts: Sequence[int]) -> float:
    """Seconds by which gathering all parameters, all of it issued at the start of a pass of compute_s, lengthens the pass; the parameters
    are used at even intervals. counts: how many equal gathers in a row each stands for. The pass ends when some gather, and all that is
    computed from then on, is done: at the latest of these moments, which as above is that of a first or a last one in a row."""
    total = sum(counts)
    done_s = gathered_s = 0.0
    before = 0
    for gather_s, count in zip(gathers_s, counts):
        done_s = max(done_s, gathered_s + gather_s + compute_s * (total - before) / total)
        gathered_s += count * gather_s
        before += count
        done_s = max(done_s, gathered_s + compute_s * (total - before + 1) / total)
    return max(0.0, done_s - compute_s)


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
    if gpu.host:  # no kernel takes many tensors: each operator is issued for each of them
        nbytes, (once, each) = passes * trainable_params * per_param, HOST_LAUNCHES
        return kernel_time_s("pointwise", 0.0, nbytes, "float32", gpu) + tensors * (once + OPTIMIZERS[optimizer] * each) * gpu.launch_s
    kernel_s = kernel_time_s("pointwise", 0.0, passes * trainable_params * per_param / launches, "float32", gpu)
    return launched_s([kernel_s] * launches, gpu.launch_s)
