"""Time of one operator on one device: a roofline with a ramp and a launch floor.

    kernel = ramp_s + max(flops / (fraction * peak), bytes / (fraction * bandwidth))
    operator = max(launch_s, kernel)

The ramp (filling and draining the device, tail waves) is what makes small kernels inefficient: a product whose ideal time
equals the ramp runs at half its achievable rate. The launch floor is what the host needs to issue one kernel in eager mode. One
operator by itself, or among its like, is as slow as the slower of both; in a mixed sequence the host runs ahead during long
kernels and is caught up with during short ones: `step.launched_s` prices that from kernel times.
"""

from __future__ import annotations

from cost_models.cluster import OP_CLASSES, Gpu, dtype_name

__all__ = ["OP_CLASSES", "kernel_time_s", "op_time_s"]

_MEMORY_CLASS = "pointwise"  # how well a compute-bound class streams its operands when it turns out to be memory-bound


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
    if flops < 0 or bytes_moved < 0:
        raise ValueError(f"flops and bytes_moved must not be negative, found {flops} and {bytes_moved}")
    fraction = gpu.fraction(op_class)
    bandwidth_bytes_per_s = gpu.memory_bandwidth_bytes_per_s
    if op_class in ("matmul", "attention", "conv"):
        rate = "tf32" if op_class == "conv" and dtype_name(dtype) == "float32" and gpu.has_rate("tf32") else dtype
        compute_s = flops / (fraction * gpu.peak_flops_per_s(rate))
        memory_s = bytes_moved / (gpu.fraction(_MEMORY_CLASS) * bandwidth_bytes_per_s)
    else:
        wide = dtype_name(dtype) == "float64"
        compute_s = flops / gpu.peak_flops_per_s("float64" if wide else "float32")
        memory_s = bytes_moved / (fraction * bandwidth_bytes_per_s)
    return gpu.ramp_s + max(compute_s, memory_s)


def op_time_s(op_class: str, flops: float, bytes_moved: float, dtype: str, gpu: Gpu) -> float:
    """Seconds of one operator in eager mode: its kernel or its launch, whichever takes longer; 'view' costs nothing.

    Arguments and errors as kernel_time_s's.
    """
    kernel_s = kernel_time_s(op_class, flops, bytes_moved, dtype, gpu)
    return 0.0 if op_class == "view" else max(gpu.launch_s, kernel_s)
