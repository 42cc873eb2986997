"""Time of one operator on one device: a roofline, and a launch floor.

    kernel = max(flops / (fraction * peak), bytes / (fraction * bandwidth))
    operator = max(launch_s, kernel) on a GPU; launch_s + kernel where the host is the device

The launch floor is what the host needs for one operator in eager mode. Small kernels are inefficient because of it: an operator by
itself, or among its like, takes no less. In a mixed sequence on a GPU the host runs ahead during long kernels and is caught up with
during short ones, so that a stretch of operators takes the longer of its kernels' time and its launches' time; a CPU
launches and computes by turns.
"""

from __future__ import annotations

from typing import NamedTuple

from cost_models.cluster import OP_CLASSES, Gpu, dtype_name

__all__ = ["OP_CLASSES", "Demand", "demand", "kernel_time_s", "op_time_s"]

_MEMORY_CLASS = "pointwise"  # how well a compute-bound class streams its operands when it turns out to be memory-bound


class Demand(NamedTuple):
    """What a kernel asks for: seconds of arithmetic and of memory traffic at the peak rates, and the classes whose achievable fractions say
    how much of these rates it reaches (None: all of it)."""

    compute_s: float
    compute_class: str | None
    memory_s: float
    memory_class: str


def demand(op_class: str, flops: float, bytes_moved: float, dtype: str, gpu: Gpu) -> Demand:
    """Arguments and errors as kernel_time_s's; not of views."""
    if flops < 0 or bytes_moved < 0:
        raise ValueError(f"flops and bytes_moved must not be negative, found {flops} and {bytes_moved}")
    memory_s = bytes_moved / gpu.memory_bandwidth_bytes_per_s
    if op_class in ("matmul", "attention", "conv"):
        rate = "tf32" if op_class == "conv" and dtype_name(dtype) == "float32" and gpu.has_rate("tf32") else dtype
        return Demand(flops / gpu.peak_flops_per_s(rate), op_class, memory_s, _MEMORY_CLASS)
    wide = dtype_name(dtype) == "float64"
    return Demand(flops / gpu.peak_flops_per_s("float64" if wide else "float32"), None, memory_s, op_class)


def kernel_time_s(op_class: str, flops: float, bytes_moved: float, dtype: str, gpu: Gpu) -> float:
    """Seconds that the device is busy with one kernel, however long the host takes to issue it.

    op_class: 'matmul', 'attention', 'conv' (bound by arithmetic or by memory), 'pointwise', 'reduction', 'gather', 'other'
    (their arithmetic runs on the vector units), or 'view' (0 s). flops: multiply and add count two. bytes_moved: read and
    written. dtype: of the arithmetic ('bfloat16', 'torch.float32', 'tf32'); a float32 convolution uses TF32 where the device
    has it, which is torch's default, a float32 product does not.
    Raises ValueError on an unknown class or dtype and on negative counts.
    """
    if op_class == "view":
        return 0.0
    asked = demand(op_class, flops, bytes_moved, dtype, gpu)
    compute_s = asked.compute_s / (gpu.fraction(asked.compute_class) if asked.compute_class else 1.0)
    return max(compute_s, asked.memory_s / gpu.fraction(asked.memory_class))


def op_time_s(op_class: str, flops: float, bytes_moved: float, dtype: str, gpu: Gpu) -> float:
    """Seconds of one operator by itself in eager mode: its kernel or its launch, whichever takes longer, on a CPU one after the other;
    'view' costs nothing.

    Arguments and errors as kernel_time_s's.
    """
    kernel_s = kernel_time_s(op_class, flops, bytes_moved, dtype, gpu)
    if op_class == "view":
        return 0.0
    return gpu.launch_s + kernel_s if gpu.host else max(gpu.launch_s, kernel_s)
