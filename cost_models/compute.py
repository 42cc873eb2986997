"""Time of one operator on one device: a roofline, and a launch floor.

    kernel = max(flops / (fraction * peak) + result / (fraction * bandwidth), bytes / (fraction * bandwidth))
    operator = max(launch_s, kernel) on a GPU; launch_s + kernel where the host is the device

Of a product or convolution on a GPU the result is written when it has been computed, by blocks that compute nothing meanwhile. So products
over few terms reach less of the peak: of the 78 products of DeepBench in half precision (benchmarks/data/kernels.csv) the median error is
3.8% with this term, whose weight is not fitted, and 4.7% without it.

The launch floor is what the host needs for one operator in eager mode. Small kernels are inefficient because of it: an operator by
itself, or among its like, takes no less. In a mixed sequence on a GPU the host runs ahead during long kernels and is caught up with
during short ones, so that a stretch of operators takes the longer of its kernels' time and its launches' time; a CPU
launches and computes by turns.
"""

from __future__ import annotations

from typing import NamedTuple

from cost_models.cluster import OP_CLASSES, Gpu, dtype_name

__all__ = [
    "ATTENTION_BACKWARD", "OP_CLASSES", "WINOGRAD", "Demand", "causal_share", "demand", "kernel_time_s", "on_matrix_units",
    "op_time_s", "rate_of",
]  # fmt: skip

_MEMORY_CLASS = "pointwise"  # how well a compute-bound class streams its operands when it turns out to be memory-bound

WINOGRAD = 2.25
"""Multiplications of a convolution with kernels of 3 x 3 over those of Winograd's F(2 x 2, 3 x 3), by which libraries compute it on
vector units (Lavin and Gray 2016, "Fast algorithms for convolutional neural networks", section 4.1)."""

CAUSAL_BLOCK = 512
"""Keys at a time that torch's fused attention goes through on a CPU: of a causal mask it skips whole blocks alone (kvSplitSize in
aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, torch 2.2 to 2.13)."""

ATTENTION_BACKWARD = 0.8
"""The rate of fused attention in backward over that in forward: 25-35% over 30-50% of the peak with its first kernels, 63% over 73% with
the second (Dao 2023, "FlashAttention-2", section 1 and abstract)."""


def causal_share(keys: int) -> float:
    """The share of all scores of a causal mask over so many keys that a CPU computes."""
    whole, left = divmod(keys, CAUSAL_BLOCK)
    rows = CAUSAL_BLOCK**2 * whole * (whole + 1) / 2 + left * keys
    return rows / keys**2 if keys else 1.0


class Demand(NamedTuple):
    """What a kernel asks for: seconds of arithmetic and of memory traffic at the peak rates, and the classes whose achievable fractions say
    how much of these rates it reaches (None: all of it). written_s: of the traffic that which follows the arithmetic."""

    compute_s: float
    compute_class: str | None
    written_s: float
    memory_s: float
    memory_class: str


def rate_of(op_class: str, dtype: str, gpu: Gpu) -> str:
    """The dtype at whose rate an operator of a class ('matmul', 'conv') computes in a dtype: convolutions of float32 in TF32, as torch lets
    them by default."""
    return "tf32" if op_class == "conv" and dtype_name(dtype) == "float32" and gpu.has_rate("tf32") else dtype


def on_matrix_units(op_class: str, dtype: str, gpu: Gpu) -> bool:
    """Whether a device has units that multiply matrices for operators of a class ('matmul', 'conv') in a dtype: it does so in TF32, or
    faster than its vector units, whose rate is that of float32."""
    if gpu.host or not gpu.has_rate(dtype):
        return False
    rate = rate_of(op_class, dtype, gpu)
    return dtype_name(rate) == "tf32" or gpu.peak_flops_per_s(rate) > gpu.peak_flops_per_s("float32")


def demand(op_class: str, flops: float, bytes_moved: float, dtype: str, gpu: Gpu, written: float = 0.0) -> Demand:
    """Arguments and errors as kernel_time_s's; not of views."""
    if flops < 0 or bytes_moved < 0 or written < 0:
        raise ValueError(f"flops and bytes must not be negative, found {flops}, {bytes_moved} and {written}")
    memory_s = bytes_moved / gpu.memory_bandwidth_bytes_per_s
    if op_class in ("matmul", "attention", "conv"):
        written_s = 0.0 if gpu.host or op_class == "attention" else written / gpu.memory_bandwidth_bytes_per_s
        compute_s = flops / gpu.peak_flops_per_s(rate_of(op_class, dtype, gpu))
        if op_class == "matmul" and gpu.vector_fraction is not None and not on_matrix_units(op_class, dtype, gpu):
            return Demand(compute_s / gpu.vector_fraction, None, written_s, memory_s, _MEMORY_CLASS)
        return Demand(compute_s, op_class, written_s, memory_s, _MEMORY_CLASS)
    wide = dtype_name(dtype) == "float64"
    return Demand(flops / gpu.peak_flops_per_s("float64" if wide else "float32"), None, 0.0, memory_s, op_class)


def kernel_time_s(op_class: str, flops: float, bytes_moved: float, dtype: str, gpu: Gpu, written: float = 0.0) -> float:
    """Seconds that the device is busy with one kernel, however long the host takes to issue it.

    op_class: 'matmul', 'attention', 'conv' (bound by arithmetic or by memory), 'pointwise', 'reduction', 'gather', 'other'
    (their arithmetic runs on the vector units), or 'view' (0 s). flops: multiply and add count two. bytes_moved: read and
    written; written: of these the result of a product or convolution. dtype: of the arithmetic ('bfloat16', 'torch.float32', 'tf32');
    a float32 convolution uses TF32 where the device has it, which is torch's default, a float32 product does not.
    Raises ValueError on an unknown class or dtype and on negative counts.
    """
    if op_class == "view":
        return 0.0
    asked = demand(op_class, flops, bytes_moved, dtype, gpu, written)
    streamed = gpu.fraction(asked.memory_class)
    compute_s = asked.compute_s / (gpu.fraction(asked.compute_class) if asked.compute_class else 1.0)
    return max(compute_s + asked.written_s / streamed, asked.memory_s / streamed)


def op_time_s(op_class: str, flops: float, bytes_moved: float, dtype: str, gpu: Gpu, written: float = 0.0) -> float:
    """Seconds of one operator by itself in eager mode: its kernel or its launch, whichever takes longer, on a CPU one after the other;
    'view' costs nothing.

    Arguments and errors as kernel_time_s's.
    """
    kernel_s = kernel_time_s(op_class, flops, bytes_moved, dtype, gpu, written)
    if op_class == "view":
        return 0.0
    return gpu.launch_s + kernel_s if gpu.host else max(gpu.launch_s, kernel_s)
