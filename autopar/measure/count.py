"""What an operator does, counted without data: FLOPs, bytes, and what autograd saves of it for backward.

Nothing is computed and nothing is allocated: the operator runs on fake tensors once for each distinct signature (target,
arguments, operand types); where it is the same on every device on the meta device, which takes a tenth of the time. FLOPs come
from torch.utils.flop_counter, of attention and of what it does not know from sizes; saved tensors from saved_tensors_hooks, by storage,
so that a view of an operand counts as the operand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture.causal import ATTENTION, is_causal
from autopar.capture.interpret import run_op
from autopar.catalog.attention import CAUSAL_ROWS, LOCAL_ATTENTION, of_last_rows
from autopar.ir import Op, TensorType, call_text, nameless
from autopar.measure.traffic import MASKED, OF_IMAGES, Moves, Traffic, function_of, moves, narrow, of_depthwise

__all__ = ["FUSED_DROPOUT", "OP_CLASSES", "SAME_ON_META", "Counts", "as_on_gpu", "count", "op_class"]

_DROPOUT_AT = 4  # of the arguments of the first
FUSED_DROPOUT = "aten.native_dropout.default"  # returns its mask besides
BATCH_NORM, SYNC_BATCH_NORM = "aten.batch_norm.default", "autopar.L.sync_batch_norm"

OP_CLASSES: dict[str, str] = {
    name: cls
    for cls, names in {
        "matmul": "linear mm bmm matmul addmm baddbmm einsum dot mv outer bilinear _grouped_mm grouped_mm_fallback lstm gru",
        "attention": "scaled_dot_product_attention",
        "conv": "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
        "view": "view reshape flatten unflatten transpose permute unsqueeze squeeze expand select slice narrow split chunk "
        "split_with_sizes unbind t numpy_T detach alias movedim swapaxes broadcast_to expand_as view_as reshape_as unfold "
        "diagonal copy_to narrow split keep_one own broadcast_tensors unsafe_split unsafe_split_with_sizes unsafe_chunk swapdims moveaxis "
        "mT mH",
        "reduction": "sum mean amax amin softmax log_softmax layer_norm rms_norm group_norm batch_norm instance_norm logsumexp "
        "var std cumsum sort topk cross_entropy_loss nll_loss linalg_vector_norm max min sync_batch_norm",
        "gather": "embedding index gather scatter scatter_add index_select index_put masked_embedding",
    }.items()
    for name in names.split()
}


def op_class(target: str) -> str:
    """The class whose efficiency a cost model knows: matmul, attention, conv, view, reduction, gather or pointwise."""
    return OP_CLASSES.get(function_of(target), "pointwise")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """flops: forward; backward_flops. bytes_read, bytes_written: of the forward. saved_inputs: indices of refs(op) that
    autograd keeps; saved_outputs: indices of results; saved_other_bytes: kept tensors that are neither. winograd: a convolution that
    Winograd's algorithm computes with fewer multiplications than the FLOPs say. causal_keys: of attention under a causal mask, the
    length over which half of the products were counted; 0 of any other. of_one: a convolution with kernels of one pixel. slower: how many
    times as long attention takes on a GPU for a mask of numbers or narrow heads. depthwise: a convolution with a kernel for each channel.
    channels_apart: what was timed of it was so of images whose channels lie apart. moves, traffic: what passes between a GPU and its memory
    (None: as for products); lean_traffic: if it streamed. added_bytes: of gradients that its backward adds to those of other operators."""

    op_class: str
    flops: float
    backward_flops: float
    bytes_read: int
    bytes_written: int
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    saved_other_bytes: int = 0
    winograd: bool = False
    causal_keys: int = 0
    of_one: bool = False
    slower: float = 1.0
    depthwise: bool = False
    channels_apart: bool = False
    added_bytes: int = 0
    moves: Moves | None = None
    traffic: Traffic | None = None
    lean_traffic: Traffic | None = None

    def lean(self) -> Counts:
        """Of a kernel that does no less than this one, but streams: part of one that was made of several."""
        if self.moves is None or self.moves == self.moves.lean():
            return self
        return dataclasses.replace(self, moves=self.moves.lean(), traffic=self.lean_traffic)


def as_on_gpu(op: Op, ins: tuple[TensorType, ...]) -> Op:
    """The operator that keeps and allocates what a GPU's kernel does, where the CPU, on which fake tensors run, has none and composes
    it of others: RMS norm, of which one fused kernel keeps the operand and a number for each row, as layer norm does; attention with
    dropout, whose fused kernels draw again in backward what they drew (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp asks nothing
    of dropout) and keep what they keep without it, of which there are none in float64; dropout, whose fused kernel keeps a byte for each
    number (aten/src/ATen/native/Dropout.cpp)."""
    if op.target in (ATTENTION, LOCAL_ATTENTION) and ins[0].dtype != torch.float64:
        args = tuple(0.0 if k == _DROPOUT_AT and op.target == ATTENTION else a for k, a in enumerate(op.args))
        return dataclasses.replace(op, args=args, kwargs=tuple((k, 0.0 if k == "dropout_p" else v) for k, v in op.kwargs))
    if op.target == "aten.dropout.default":
        p, training = (op.args[k] if len(op.args) > k else op.kwarg(name) for k, name in ((1, "p"), (2, "train")))
        fused = training is True and isinstance(p, float) and 0 < p < 1
        return dataclasses.replace(op, target=FUSED_DROPOUT, args=(op.args[0], p, True), kwargs=()) if fused else op
    if op.target != "aten.rms_norm.default":
        return op
    weight = op.args[2] if len(op.args) > 2 else op.kwarg("weight")
    return dataclasses.replace(op, target="aten.layer_norm.default", args=(op.args[0], op.args[1], weight), kwargs=())


def count(op: Op, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], gpu: bool = False) -> Counts:
    """The counts of one operator on operands of these types. gpu: as a GPU runs it. Equal calls have one."""
    key = call_text(op), op.no_grad, ins, outs, gpu
    known = _KNOWN.get(key)
    if known is None:
        anonymous = nameless(as_on_gpu(op, ins) if gpu else op)
        found = _count(anonymous.target, anonymous.args, anonymous.kwargs, op.no_grad, ins, outs)
        known = _KNOWN[key] = _with_traffic(anonymous.target, found, ins, outs)
    return known


_KNOWN: dict[tuple[object, ...], Counts] = {}


def _with_traffic(target: str, found: Counts, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...]) -> Counts:
    if target == "autopar.L.region":
        return found
    if found.depthwise:
        passes: Moves | None = of_depthwise(math.prod(ins[1].shape[2:]), ins, outs)
    elif found.op_class in _STREAMING:
        passes = moves(target, ins, outs, (found.saved_inputs, found.saved_outputs, found.saved_other_bytes))
    else:
        return found
    if passes is None:
        return found
    sizes = [t.nbytes for t in ins], [t.nbytes for t in outs]
    apart = found.depthwise or function_of(target) in OF_IMAGES
    lean_traffic = passes.lean().of(*sizes)
    return dataclasses.replace(found, moves=passes, traffic=passes.of(*sizes), lean_traffic=lean_traffic, channels_apart=apart)


@functools.lru_cache(maxsize=100_000)
def _count(target: str, args: tuple, kwargs: tuple, no_grad: bool, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...]) -> Counts:  # type: ignore[type-arg]
    op = Op(target=target, args=args, kwargs=kwargs, outputs=tuple(f"y{k}" for k in range(len(outs))), no_grad=no_grad)
    cls = op_class(target)
    read, written = sum(t.nbytes for t in ins), sum(t.nbytes for t in outs)
    read += ins[0].nbytes if target in _TWO_PASSES else 0
    differentiable = any(t.grad for t in ins) and any(t.grad for t in outs)
    same = _SAME_WORK.get(target)
    if same is not None:
        plain = dataclasses.replace(_as_plain(same, op, ins, outs), op_class=op_class(same))
        share = of_last_rows(ins[1].shape[-2] / ins[0].shape[-2]) / 2 if target == CAUSAL_ROWS else 1.0
        return dataclasses.replace(plain, flops=share * plain.flops, backward_flops=share * plain.backward_flops)
    if target == "autopar.L.region":
        return _as_counted(op, read, written, len(ins) if differentiable else 0)
    if target in _ROW_BY_ROW and (rows := math.prod(ins[0].shape[: (first := _ROW_BY_ROW[target](args, ins[0]))])) > 1:
        row = dataclasses.replace(ins[0], shape=(1, *ins[0].shape[first:]))  # fake tensors take long for these
        made = tuple(dataclasses.replace(t, shape=row.shape) for t in outs)
        one = _count(target, args, kwargs, no_grad, (row, *ins[1:]), made)
        return dataclasses.replace(one, bytes_read=read, bytes_written=written, saved_other_bytes=rows * one.saved_other_bytes)
    if cls == "view" or target.startswith("autopar."):
        read, written = (0, 0) if cls == "view" else (read, written)
        kept = (0,) if target.startswith("autopar.L.") and differentiable else ()
        return Counts(op_class=cls, flops=0.0, backward_flops=0.0, bytes_read=read, bytes_written=written, saved_inputs=kept)
    on_meta = is_same_on_meta(target, ins)
    with contextlib.nullcontext() if on_meta else FakeTensorMode(allow_non_fake_inputs=True):
        device = "meta" if on_meta else "cpu"
        tensors = [torch.empty(t.shape, dtype=t.dtype, requires_grad=t.grad and not no_grad, device=device) for t in ins]
        env = {f"x{k}": t for k, t in enumerate(tensors)}
        saved: list[torch.Tensor] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            saved.append(t)
            return t

        apart = cls == "attention" or (on_meta and cls in _STREAMING)  # whose products are counted below, in less time, or that have none
        known = _FLOPS.get(function_of(target))
        counter = None if apart or known else FlopCounterMode(display=False)
        with counter or contextlib.nullcontext(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            results = run_op(op, env)
        flops = float(counter.get_total_flops()) if counter else known(target, ins) if known else 0.0
        where_in: dict[int, int] = {}
        for k, t in enumerate(tensors):
            where_in.setdefault(_storage(t), k)
        where_out = {_storage(t): k for k, t in enumerate(results) if isinstance(t, torch.Tensor)}
        saved_in, saved_out, other = set(), set(), {}
        for t in saved if differentiable else ():
            key = _storage(t)
            if key in where_in:
                saved_in.add(where_in[key])
            elif key in where_out:
                saved_out.add(where_out[key])
            else:
                other[key] = t.untyped_storage().nbytes()
    depthwise = cls == "conv" and _is_depthwise(ins)
    cls = "other" if depthwise else cls
    keys = 0
    if cls == "attention":
        flops, keys = _attention_flops(op, ins), ins[1].shape[-2] if is_causal(op) else 0
    passes = sum(t.grad for t in _factors(ins))  # one product of the forward's size makes the gradient of each factor
    backward = flops * {"attention": 2.5, "matmul": min(passes, 2), "conv": min(passes, 2)}.get(cls, 2.0) if differentiable else 0.0
    return Counts(
        op_class=cls, flops=flops, backward_flops=backward, bytes_read=read, bytes_written=written,
        saved_inputs=tuple(sorted(saved_in)), saved_outputs=tuple(sorted(saved_out)), saved_other_bytes=sum(other.values()),
        winograd=cls == "conv" and _is_plain_3_by_3(op, ins), causal_keys=keys,
        of_one=cls == "conv" and math.prod(ins[1].shape[2:]) == 1, depthwise=depthwise,
        slower=narrow(ins[0].shape[-1]) * (MASKED if len(ins) > 3 else 1.0) if cls == "attention" else 1.0,
    )  # fmt: skip


_STREAMING = ("pointwise", "reduction", "gather", "attention")

# Of these neither the work nor what is saved for backward depends on the device (tests/test_measure_meta.py). It does for attention, and
# for norms that keep their statistics in another precision on the CPU.
_PLAIN = (
    "linear.default mm.default bmm.default matmul.default addmm.default add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default add.Scalar "
    "sub.Scalar mul.Scalar div.Scalar pow.Tensor_Scalar rsub.Scalar exp.default log.default sqrt.default rsqrt.default sin.default "
    "cos.default tanh.default sigmoid.default relu.default gelu.default silu.default to.dtype clone.default cat.default stack.default "
    "mean.dim sum.dim_IntList mean.default sum.default where.self embedding.default __and__.Tensor __or__.Tensor bitwise_not.default "
    "logical_not.default eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor "
    "ge.Tensor masked_fill.Scalar index_select.default cumsum.default softmax.int log_softmax.int roll.default triu.default "
    "tril.default maximum.default minimum.default dropout.default cross_entropy_loss.default index.Tensor gather.default pad.default "
    "contiguous.default conv2d.default group_norm.default max_pool2d.default reshape.default slice.Tensor transpose.int "
    "permute.default unsqueeze.default squeeze.dim expand.default select.int where.ScalarOther where.ScalarSelf new_zeros.default "
    "new_ones.default slice_scatter.default select_scatter.default native_dropout.default"
)
SAME_ON_META = frozenset((*(f"aten.{name}" for name in _PLAIN.split()), SYNC_BATCH_NORM))


def is_same_on_meta(target: str, ins: Sequence[TensorType]) -> bool:
    """Whether neither the work of an operator nor what it keeps and allocates depends on the device, so that it may run on meta, which
    takes a fraction of the time. Attention whose mask has a gradient is composed of others on the CPU too; the statistics of a batch are
    of another dtype there if that of the operand is a short one."""
    if target == BATCH_NORM:
        return ins[0].dtype in (torch.float32, torch.float64)
    return target in SAME_ON_META or (target in (ATTENTION, LOCAL_ATTENTION) and len(ins) > 3 and ins[3].grad)


# Statistics over a whole channel come first, so that the operand is read twice; those of a row stay in the kernel that made them.
_TWO_PASSES = frozenset({BATCH_NORM, "aten.instance_norm.default", "aten.group_norm.default", SYNC_BATCH_NORM})

# Operators that do the same to every row -> the first dim of a row of the operand.
_ROW_BY_ROW: dict[str, Callable[[tuple[Any, ...], TensorType], int]] = {
    "aten.layer_norm.default": lambda args, x: len(x.shape) - len(args[1]) if len(args) > 1 else 0,
    "aten.group_norm.default": lambda args, x: 1,
}

# Local code -> the operator that does the same work on the same operands, and which of the local code's arguments it takes.
_SAME_WORK = {
    LOCAL_ATTENTION: ATTENTION, CAUSAL_ROWS: ATTENTION, "autopar.L.dropout": "aten.dropout.default",
    "autopar.L.grouped_rows": "aten._grouped_mm.default",
}  # fmt: skip


def _as_plain(same: str, op: Op, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...]) -> Counts:
    args = (*op.args, op.kwarg("p"), True) if same.startswith("aten.dropout") else op.args
    kwargs = tuple((k, v) for k, v in op.kwargs if k not in ("axis", "p", "operator"))
    same = str(op.kwarg("operator", same))
    return _count(same, args, kwargs, op.no_grad, ins, outs)


def _as_counted(op: Op, read: int, written: int, kept: int) -> Counts:
    """An opaque region: what was counted while it ran at capture. kept: how many operands autograd keeps, if any."""
    flops, saved = (float(str(op.kwarg(k))) for k in ("flops", "saved"))
    return Counts(
        op_class="matmul" if flops else "pointwise", flops=flops, backward_flops=2 * flops if kept else 0.0, bytes_read=read,
        bytes_written=written, saved_inputs=tuple(range(1, kept)), saved_other_bytes=int(saved) if kept else 0,
    )  # fmt: skip


def _grouped_flops(target: str, ins: tuple[TensorType, ...]) -> float:
    """Rows sorted by group and a matrix for each group, [rows, in] and [groups, in, out]: each row meets one matrix. Also stacks of both;
    and one of both for all, of which each group has its own columns."""
    a, b = ins[0].shape, ins[1].shape
    return 2.0 * math.prod(a) * b[-1] / (a[0] if len(a) > len(b) and a[0] else 1)


def _recurrent_flops(target: str, ins: tuple[TensorType, ...]) -> float:
    """Each step of x [steps, batch, in], or row of a packed one, meets every matrix of every layer. Between x and these stand the sizes of
    a packed x, and the states."""
    first = 1 + target.endswith(".data") + (2 if function_of(target) == "lstm" else 1)
    return 2.0 * math.prod(ins[0].shape[:-1]) * sum(t.numel for t in ins[first:] if len(t.shape) == 2)


# What torch's counter does not know: function -> FLOPs of a target and the types of its operands.
_FLOPS: dict[str, Callable[[str, tuple[TensorType, ...]], float]] = {
    "_grouped_mm": _grouped_flops, "grouped_mm_fallback": _grouped_flops, "lstm": _recurrent_flops, "gru": _recurrent_flops,
}  # fmt: skip


def _attention_flops(op: Op, ins: tuple[TensorType, ...]) -> float:
    """q k^T and its product with v. q: [..., length, e], k: [..., keys, e], v: [..., keys, f]. Of a causal mask the kernels skip the
    upper half, of any other nothing. The flop counter does not know all of the kernels that a device may choose."""
    q, k, v = (t.shape for t in ins[:3])
    return (1.0 if is_causal(op) else 2.0) * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _is_depthwise(ins: tuple[TensorType, ...]) -> bool:
    """Whether a convolution has groups of one channel, [out, 1, ...] weights for several: nothing for matrix units to do."""
    return len(ins) > 1 and len(ins[1].shape) > 2 and ins[1].shape[1] == 1 and ins[0].shape[1] > 1


def _is_plain_3_by_3(op: Op, ins: tuple[TensorType, ...]) -> bool:
    """Whether a convolution has kernels of 3 x 3 that move by one pixel and read all channels."""
    if op.target != "aten.conv2d.default" or ins[1].shape[1:] != (ins[0].shape[1], 3, 3):
        return False
    stride, dilation = (op.kwarg(name, op.args[k] if len(op.args) > k else 1) for k, name in ((3, "stride"), (5, "dilation")))
    return {stride, dilation} <= {1, (1,), (1, 1)}


def _factors(ins: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """The two operands of a product; a bias is none."""
    wide = tuple(t for t in ins if len(t.shape) >= 2)
    return wide[-2:] if len(wide) >= 2 else ins[:2]


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata
