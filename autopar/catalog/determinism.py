"""Operators that do not give the same bits each time, forward or backward.

GPUs add terms up in the order in which threads come (atomic adds), and cuDNN chooses such algorithms for convolutions. Where every rank of
an axis runs such an operator on all of it, the ranks' results differ by rounding, and so do the gradients of parameters before it and
behind it: what should stay copies of each other drifts apart. Such gradients are brought together (`Param.agreed`).

Sources: the list of torch.use_deterministic_algorithms in torch 2.13's documentation, of what it changes or refuses on CUDA; flash and
memory-efficient attention, whose backward adds up the queries' gradients so; and what gave other bits of torch's own samples of operators
when it was run again on an H200 (torch 2.11, 27 November 2026): cummin, transposed convolutions forward.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir import Op, TensorType, refs

__all__ = ["varies"]

_FORWARD = frozenset({
    "bincount", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "cumprod", "cumsum", "histc", "index_add", "index_copy",
    "index_put", "index_reduce", "kthvalue", "logcumsumexp", "median", "nanmedian", "put", "scatter_add", "scatter_reduce",
})  # fmt: skip
_BACKWARD = frozenset({
    # atomic adds
    "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "as_strided", "avg_pool3d", "ctc_loss", "cummax", "cummin", "_ctc_loss", "embedding_bag", "_embedding_bag",
    "fractional_max_pool2d", "fractional_max_pool3d", "gather", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "index",
    "index_select", "masked_scatter", "max_pool2d", "max_pool2d_with_indices", "max_pool3d", "max_pool3d_with_indices", "max_unpool2d",
    "max_unpool3d", "nll_loss2d", "nll_loss2d_forward", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat_interleave",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "take",
    # algorithms of cuDNN
    "conv1d", "conv2d", "conv3d", "convolution", "gru", "lstm", "rnn_relu", "rnn_tanh",
    # fused attention
    "scaled_dot_product_attention",
})  # fmt: skip
_OWN = frozenset({"region", "attention", "causal_rows", "masked_embedding"})  # of autopar's
_PREFIXES = ("upsample_", "_upsample_")


def varies(op: Op, types: Mapping[str, TensorType]) -> bool:
    """Whether the operator, run twice on the same, may give other bits, or its gradients others. types: of what it reads and makes."""
    made = [types[o] for o in op.outputs if o is not None]
    if not any(t.dtype.is_floating_point or t.dtype.is_complex for t in made):
        return False
    namespace, *_, last = op.target.split(".")
    trains = any(t.grad for t in made)
    if namespace == "autopar":
        return last in _OWN
    if namespace != "aten":
        return True  # nothing is known of it
    name = op.target.split(".")[1].removesuffix("_")
    if name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        return trains and len(types[refs(op)[0]].shape) > 2
    return name in _FORWARD or (trains and (name in _BACKWARD or name.startswith(_PREFIXES)))
