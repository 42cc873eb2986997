"""How long a host is busy with an operator of a GPU, in launches: what an operator of one kernel takes in forward, Python included.

The shares are of one host (benchmarks/data/hosts_h100.csv): 20 us for a product in forward, 8 for an addition, 12 for a kernel and its node
in backward. What a launch takes in seconds is a GPU's launch_s, which training runs on many hosts gave.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import TensorType
from autopar.measure.traffic import PASSED_ON, function_of

__all__ = ["ADDED", "AGAIN", "CAST", "CHANGED", "GATHERED", "launches"]

FORWARD = {
    "view": 0.1, "matmul": 1.0, "attention": 1.2, "conv": 0.75, "other": 0.75, "reduction": 0.5, "gather": 0.5, "pointwise": 0.4,
}  # fmt: skip
"""Class of operator -> launches in forward."""

NODE = 0.3
"""Of any operator in backward, before its kernels."""

KERNEL = {"view": 0.0, "matmul": 1.1, "attention": 0.5, "conv": 0.85, "other": 0.85, "reduction": 0.7, "gather": 0.7, "pointwise": 0.4}
"""Class of operator -> launches for each gradient that its backward makes."""

ADDED = 0.35
"""For the gradient of a bias; and to add one gradient to another."""

CAST = (0.5, 0.6)
"""To cast a parameter, and to cast its gradient back."""

AGAIN = (12.0, 1.1)
"""Beside the launches of a stretch of operators that runs again in backward by torch.utils.checkpoint: for the stretch, and for each of its
operators. From the plans of one H100 that recompute and that its host governed (benchmarks/data/one_gpu.jsonl)."""

CHANGED = {
    "copy_to": (1.0, 3.0), "split": (1.5, 5.0), "narrow": (1.5, 3.0), "all_gather": (5.0, 6.0), "gather": (5.0, 2.0),
    "all_reduce": (2.5, 1.0), "all_reduce_shared": (2.5, 3.0), "reduce_scatter": (5.5, 5.5), "all_to_all": (5.0, 5.5),
    "regroup": (14.0, 15.0), "pad": (2.5, 2.0), "keep_one": (1.0, 1.0), "mask_one": (1.0, 1.5), "own": (1.0, 1.5),
}  # fmt: skip
"""autopar's change of layout -> launches in forward and in backward: timed beside a product on a CPU, in a process group of torch that
moves nothing, less what that copies itself and with a launch for the collective."""

GATHERED = {"never": (0.0, 0.0), "step": (0.3, 0.0), "use": (2.3, 2.7)}
"""When it is gathered -> launches for each parameter that rests in parts, beyond those of one that rests whole, in forward and in backward
of a step, or of a micro-batch. "use": from ranks that one H100 ran alone (benchmarks/data/one_gpu.jsonl), and by how much less the runtime
took on a CPU afterwards; "step": on a CPU."""

FUNCTIONS = {
    "layer_norm": (0.7, 1.0), "rms_norm": (0.65, 1.0), "batch_norm": (1.3, 1.3), "sync_batch_norm": (1.3, 1.3), "group_norm": (3.0, 2.0),
    "dropout": (0.6, 0.7), "masked_fill": (0.75, 0.9), "slice": (0.1, 0.95), "select": (0.1, 0.95), "narrow": (0.1, 0.95),
    "cross_entropy_loss": (0.9, 1.3), "cross_entropy_sum_vocab": (4.0, 4.0),
}  # fmt: skip
"""Of some functions -> launches in forward, and in backward of all gradients."""


def launches(target: str, op_class: str, ins: Sequence[TensorType], outs: Sequence[TensorType], trained: bool) -> tuple[float, float]:
    """Of an operator in forward and, if anything is trained through it, in backward."""
    name = function_of(target)
    if name in FUNCTIONS:
        ahead, back = FUNCTIONS[name]
        return ahead, back if trained else 0.0
    if not trained:
        return FORWARD[op_class], 0.0
    whole = max((t.numel for t in outs), default=0)
    back = NODE
    for t in ins:
        if t.grad and not (name in PASSED_ON and t.numel == whole):
            back += KERNEL[op_class] if len(t.shape) > 1 or op_class not in ("matmul", "conv") else ADDED
    return FORWARD[op_class], back
