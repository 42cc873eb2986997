"""Every readable form of an operator computes what the operator itself computes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from autopar.errors import RenderError
from autopar.ir import Op, Ref, TensorType
from autopar.render.calls import SUBSCRIPTS, call, generic_call
from autopar.render.forms import FORMS

pytestmark = pytest.mark.pure

f32, i64 = torch.float32, torch.int64
MESH = SimpleNamespace(device=torch.device("cpu"), dp="the dp axis", tp="the tp axis")


def tensors() -> dict[str, torch.Tensor]:
    """Operands that the samples name. Letters tell the shape: x (2, 3, 4), m (4, 3), v (3,), n (2, 3, 4, 4), i (2, 3) integers."""
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g) + 0.1

    return {
        "x": rand(2, 3, 4),
        "y": rand(2, 3, 4),
        "z": rand(2, 4, 3),
        "m": rand(4, 3),
        "m2": rand(3, 4),
        "v": rand(3),
        "v4": rand(4),
        "u4": rand(4),
        "signed": rand(2, 3, 4) - 0.6,
        "n": rand(2, 3, 4, 4),
        "k": rand(6, 3, 2, 2),
        "k1": rand(6, 3, 2),
        "k3": rand(2, 3, 2, 2, 2),
        "c3": rand(2, 3, 4, 4, 4),
        "kt": rand(3, 6, 2, 2),
        "kg": rand(2, 2, 1, 1),
        "odd": rand(6, 3, 3, 3),
        "odd1": rand(6, 3, 3),
        "kt1": rand(3, 6, 2),
        "b6": rand(6),
        "b2": rand(2),
        "ps": rand(2, 4, 4, 4),
        "table": rand(7, 4),
        "q": rand(2, 2, 4, 8),
        "q2": rand(2, 2, 5, 8),
        "one": rand(2, 1, 4),
        "square": rand(4, 4),
        "scalar": rand(),
        "logits": rand(5, 7),
        "pairs": rand(3, 2),
        "classes": torch.tensor([0, 6, -100, 3, 1]),
        "classes2": torch.tensor([0, 6, 2, 3, 1]),
        "i": torch.tensor([[0, 2, 6], [1, 1, 5]]),
        "idx": torch.tensor([[[0, 1, 2, 0]], [[2, 2, 1, 0]]]),
        "rows": torch.tensor([1, 0, 1]),
        "at": torch.tensor(1),
        "ones": torch.ones(2, 3, 4),
        "a": torch.tensor([[True, False, True], [False, True, True]]),
        "b": torch.tensor([[True, True, False], [False, False, True]]),
        "mask": torch.arange(24).reshape(2, 3, 4) % 3 == 0,
        "ints": torch.arange(24).reshape(2, 3, 4),
        "jnts": torch.arange(24).reshape(2, 3, 4) % 5 + 1,
        "cplx": torch.view_as_complex(rand(3, 2)),
        "w7": rand(7),
        "nothing": torch.zeros(0, 3),
        "causal": torch.ones(4, 5, dtype=torch.bool).tril(),
    }


def r(*names: str) -> tuple[Ref, ...]:
    return tuple(map(Ref, names))


X, Y, M, V, N = r("x", "y", "m", "v", "n")


def sample(target: str, *args: object, **kwargs: object) -> Op:
    outputs = len(torch_op(target)._schema.returns)
    return Op(target=target, args=args, kwargs=tuple(kwargs.items()), outputs=tuple(f"o{n}" for n in range(outputs)), multi=outputs > 1)


def torch_op(target: str) -> torch._ops.OpOverload:
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def reduction(target: str, *args: object) -> list[Op]:
    return [sample(target, *args, kind) for kind in (0, 1, 2)]


def samples() -> list[Op]:
    s = sample
    found = [
        s("aten.add.Tensor", X, Y),
        s("aten.add.Tensor", X, Y, alpha=2),
        s("aten.add.Tensor", X, -1),
        s("aten.add.Tensor", X, 2.5),
        s("aten.add.Tensor", *r("ints"), True),
        s("aten.sub.Tensor", X, Y),
        s("aten.sub.Tensor", X, -3),
        s("aten.subtract.Tensor", X, Y),
        s("aten.mul.Tensor", X, Y),
        s("aten.mul.Tensor", X, -2.0),
        s("aten.mul.Tensor", X, math.inf),
        s("aten.multiply.Tensor", X, Y),
        s("aten.div.Tensor", X, Y),
        s("aten.div.Tensor", X, 8.0),
        s("aten.div.Tensor", *r("ints"), 4),
        s("aten.div.Tensor_mode", X, 0.3, rounding_mode="floor"),
        s("aten.div.Tensor_mode", X, Y, rounding_mode=None),
        s("aten.floor_divide.default", *r("ints", "jnts")),
        s("aten.floor_divide.default", *r("ints"), -4),
        s("aten.remainder.Scalar", *r("ints"), 5),
        s("aten.remainder.Tensor", *r("ints", "jnts")),
        s("aten.rsub.Scalar", X, 1.0),
        s("aten.rsub.Scalar", X, -1, 2),
        s("aten.rsub.Scalar", X, -1),
        s("aten.pow.Tensor_Scalar", X, 3.0),
        s("aten.pow.Tensor_Scalar", X, -0.5),
        s("aten.pow.Tensor_Scalar", *r("ints"), 2),
        s("aten.pow.Tensor_Tensor", X, Y),
        s("aten.pow.Scalar", 2, X),
        s("aten.pow.Scalar", -2.0, *r("ints")),
        s("aten.neg.default", X),
        s("aten.matmul.default", *r("x", "m")),
        s("aten.matmul.default", *r("x", "z")),
        s("aten.bmm.default", *r("x", "z")),
        s("aten.mm.default", *r("m", "m2")),
        s("aten.addmm.default", *r("v", "m2", "m")),
        s("aten.addmm.default", *r("v", "m2", "m"), beta=2, alpha=0.5),
        s("aten.baddbmm.default", *r("v", "x", "z")),
        s("aten.baddbmm.default", *r("v", "x", "z"), beta=0.5, alpha=2),
        s("aten.addcmul.default", *r("x", "y", "ones")),
        s("aten.addcmul.default", *r("x", "y", "ones"), value=0.3),
        s("aten.lerp.Tensor", *r("x", "y", "ones")),
        s("aten.outer.default", *r("v", "v4")),
        s("aten.einsum.default", "bij,jk->bik", r("x", "m")),
        s("aten.einsum.default", "bij,bij->b", r("x", "y")),
        *(
            s(f"aten.{name}.{o}", *r("ints"), b)
            for name in ("eq", "ne", "lt", "le", "gt", "ge")
            for o, b in (("Tensor", Ref("jnts")), ("Scalar", 3), ("Scalar", -1.5))
        ),
        *(s(f"aten.{name}.Tensor", *r("a", "b")) for name in ("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor")),
        s("aten.bitwise_and.Tensor", *r("ints", "jnts")),
        s("aten.bitwise_not.default", *r("a")),
        s("aten.bitwise_not.default", *r("ints")),
        s("aten.logical_and.default", *r("ints", "mask")),
        s("aten.logical_or.default", *r("ints", "mask")),
        s("aten.logical_not.default", *r("ints")),
        s("aten.where.self", *r("mask", "x", "y")),
        s("aten.where.ScalarOther", *r("mask", "x"), -math.inf),
        s("aten.where.ScalarSelf", *r("mask"), 0.0, X),
        s("aten.where.Scalar", *r("mask"), 1.0, -2.0),
        s("aten.maximum.default", X, Y),
        s("aten.minimum.default", X, Y),
        s("aten.max.other", X, Y),
        s("aten.min.other", X, Y),
        s("aten.clamp.default", X, 0.3, 0.7),
        s("aten.clamp.default", X, None, 0.7),
        s("aten.clamp.default", X, 0.5),
        s("aten.clamp.Tensor", X, Y),
        s("aten.clamp.Tensor", X, None, Y),
        s("aten.clip.default", X, -1, 0.5),
        s("aten.clamp_min.default", X, 0.4),
        s("aten.clamp_max.default", X, 0.4),
        s("aten.masked_fill.Scalar", *r("x", "mask"), -math.inf),
        s("aten.masked_fill.Scalar", *r("ints", "mask"), 7),
        s("aten.masked_fill.Tensor", *r("x", "mask", "scalar")),
        s("aten.masked_scatter.default", *r("x", "mask", "y")),
        *(
            s(target, *r("cplx" if "view_as_real" in target or ".imag" in target else "pairs" if "view_as_complex" in target else "signed"))
            for target, form in FORMS.items()
            if form in (f"torch.{target.split('.')[1]}(self)", f"F.{target.split('.')[1]}(self)")
        ),
        s("aten.real.default", *r("cplx")),
        s("aten.sqrt.default", X),
        s("aten.rsqrt.default", X),
        s("aten.log.default", X),
        s("aten.polar.default", X, Y),
        s("aten.atan2.default", X, Y),
        s("aten.gelu.default", *r("signed")),
        s("aten.gelu.default", *r("signed"), approximate="tanh"),
        s("aten.log_sigmoid.default", *r("signed")),
        s("aten.softplus.default", *r("signed")),
        s("aten.softplus.default", *r("signed"), 2, 1),
        s("aten.softplus.default", *r("signed"), 2.0),
        s("aten.leaky_relu.default", *r("signed")),
        s("aten.leaky_relu.default", *r("signed"), 0.2),
        s("aten.hardtanh.default", *r("signed")),
        s("aten.hardtanh.default", *r("signed"), 0.0, 0.3),
        s("aten.prelu.default", *r("signed", "v")),
        s("aten.glu.default", X),
        s("aten.glu.default", *r("n"), 2),
        s("aten.softmax.int", X, -1),
        s("aten.softmax.int", X, 1, torch.float64),
        s("aten.log_softmax.int", X, -1),
        s("aten.log_softmax.int", X, 0, torch.float64),
        s("aten.dropout.default", X, 0.5, True),
        s("aten.dropout.default", X, 0.5, False),
        s("aten.linear.default", *r("x", "table")),
        s("aten.linear.default", *r("x", "table", "w7")),
        s("aten.embedding.default", *r("table", "i")),
        s("aten.embedding.default", *r("table", "i"), 2),
        s("aten.embedding.default", *r("table", "i"), -1, True),
        s("aten.embedding.default", *r("table", "i"), 0),
        s("aten.scaled_dot_product_attention.default", *r("q", "q2", "q2")),
        s("aten.scaled_dot_product_attention.default", *r("q", "q2", "q2", "causal"), 0.5),
        s("aten.scaled_dot_product_attention.default", *r("q", "q", "q"), None, 0.0, True, scale=0.3),
        s("aten.scaled_dot_product_attention.default", *r("q", "q2", "q2"), enable_gqa=True),
        s("aten.layer_norm.default", X, (4,)),
        s("aten.layer_norm.default", X, (4,), *r("v4", "u4"), 1e-3, False),
        s("aten.layer_norm.default", X, (3, 4), None, None, 1e-4),
        s("aten.rms_norm.default", X, (4,)),
        s("aten.rms_norm.default", X, (4,), *r("v4"), 1e-3),
        s("aten.group_norm.default", N, 3),
        s("aten.group_norm.default", N, 1, *r("v", "v"), 1e-3, False),
        s("aten.batch_norm.default", N, *r("v", "v", "v", "v"), False, 0.1, 1e-5, True),
        s("aten.batch_norm.default", *r("n", "v"), None, *r("v", "v"), True, 0.3, 1e-3, False),
        s("aten.batch_norm.default", N, None, None, None, None, True, 0.1, 1e-5, True),
        *(s(f"aten.conv{d}d.default", *operands) for d, operands in ((1, r("x", "k1")), (2, r("n", "k")), (3, r("c3", "k3")))),
        s("aten.conv1d.default", *r("x", "k1", "b6"), (2,), (1,), (1,)),
        s("aten.conv2d.default", *r("n", "k", "b6"), (2, 1), (1, 0), (1, 2)),
        s("aten.conv3d.default", *r("c3", "k3", "b2"), (1, 2, 1), (1, 1, 0)),
        s("aten.conv2d.default", *r("ps", "kg"), None, (1, 1), (0, 0), (1, 1), 2),
        s("aten.conv1d.padding", *r("x", "odd1", "b6"), (1,), "same"),
        s("aten.conv1d.padding", *r("x", "k1")),
        s("aten.conv1d.padding", *r("x", "k1"), None, (2,), "valid", (2,)),
        s("aten.conv2d.padding", *r("n", "odd", "b6"), (1, 1), "same"),
        s("aten.conv2d.padding", *r("n", "k")),
        s("aten.conv_transpose1d.default", *r("x", "kt1", "b6"), (2,), (1,), (1,), 1, (2,)),
        s("aten.conv_transpose1d.default", *r("x", "kt1")),
        s("aten.conv_transpose2d.input", *r("n", "kt", "b6"), (2, 2), (1, 0), (1, 0), 1, (1, 2)),
        s("aten.conv_transpose2d.input", *r("n", "kt")),
        s("aten.max_pool1d.default", X, (2,)),
        s("aten.max_pool1d.default", X, (2,), (1,), (1,), (1,), True),
        s("aten.max_pool2d.default", N, (2, 2)),
        s("aten.max_pool2d.default", N, (2, 2), (1, 2), (1, 0), (2, 1), True),
        s("aten.max_pool2d.default", N, (3, 3), (2, 2), (1, 1)),
        s("aten.avg_pool1d.default", X, (2,)),
        s("aten.avg_pool1d.default", X, (2,), (1,), (1,), True, False),
        s("aten.avg_pool2d.default", N, (2, 2)),
        s("aten.avg_pool2d.default", N, (2, 2), (1, 1), (1, 0), True, False, 3),
        s("aten.adaptive_avg_pool1d.default", X, (2,)),
        s("aten.adaptive_avg_pool2d.default", N, (1, 2)),
        s("aten.adaptive_avg_pool3d.default", *r("c3"), (1, 2, 1)),
        s("aten.pad.default", X, (1, 2)),
        s("aten.pad.default", X, (1, 0, 0, 1), "constant", 0.5),
        s("aten.pad.default", X, (1, 1), "reflect"),
        s("aten.pad.default", X, (-1, 0)),
        s("aten.pixel_shuffle.default", *r("ps"), 2),
        s("aten.pixel_unshuffle.default", N, 2),
        s("aten.cross_entropy_loss.default", *r("logits", "classes")),
        s("aten.cross_entropy_loss.default", *r("logits", "classes", "w7"), 2, -100, 0.1),
        s("aten.cross_entropy_loss.default", *r("logits", "classes2"), None, 0, 3),
        s("aten.cross_entropy_loss.default", *r("logits", "classes2"), None, 1, 2),
        s("aten.nll_loss_nd.default", *r("logits", "classes")),
        s("aten.nll_loss_nd.default", *r("logits", "classes2", "w7"), 2, 3),
        *reduction("aten.mse_loss.default", X, Y),
        *reduction("aten.l1_loss.default", X, Y),
        s("aten.mse_loss.default", X, Y),
        s("aten.l1_loss.default", X, Y),
        *reduction("aten.binary_cross_entropy_with_logits.default", *r("x", "y"), None, None),
        s("aten.binary_cross_entropy_with_logits.default", *r("x", "y", "ones", "v4")),
        *(s(target, X, (2, 12)) for target in ("aten.view.default", "aten.reshape.default")),
        s("aten.view.default", *r("scalar"), ()),
        s("aten.view.default", X, (-1,)),
        s("aten.reshape.default", *r("scalar"), ()),
        s("aten.expand.default", *r("one"), (5, 2, 3, 4)),
        s("aten.expand.default", *r("one"), (2, -1, -1)),
        s("aten.expand.default", *r("scalar"), ()),
        s("aten.expand.default", *r("one"), (2, 3, 4), implicit=True),
        s("aten.permute.default", X, (2, 0, 1)),
        s("aten.permute.default", *r("scalar"), ()),
        s("aten.repeat.default", X, (2, 1, 1)),
        s("aten.repeat.default", *r("scalar"), ()),
        s("aten.repeat.default", *r("v"), (2, 2)),
        s("aten.transpose.int", X, 1, -1),
        s("aten.swapaxes.default", X, 0, 1),
        s("aten.t.default", M),
        s("aten.unsqueeze.default", X, -1),
        s("aten.squeeze.dim", *r("one"), 1),
        s("aten.squeeze.dims", *r("one"), (0, 1)),
        s("aten.squeeze.default", *r("one")),
        s("aten.flatten.using_ints", X),
        s("aten.flatten.using_ints", X, 1),
        s("aten.flatten.using_ints", X, 0, 1),
        s("aten.unflatten.int", X, -1, (2, 2)),
        s("aten.view_as.default", X, Y),
        s("aten.reshape_as.default", *r("z", "x")),
        s("aten.expand_as.default", *r("one", "x")),
        s("aten.broadcast_to.default", *r("one"), (2, 3, 4)),
        s("aten.broadcast_tensors.default", r("one", "x", "v4")),
        s("aten.meshgrid.indexing", r("v", "v4"), indexing="ij"),
        s("aten.meshgrid.indexing", r("v", "v4"), indexing="xy"),
        s("aten.contiguous.default", *r("x")),
        s("aten.contiguous.default", N, memory_format=torch.channels_last),
        s("aten.clone.default", X),
        s("aten.clone.default", N, memory_format=torch.channels_last),
        s("aten.detach.default", X),
        *(s(f"aten.{name}.default", r("x", "y"), d) for name in ("cat", "concat", "concatenate", "stack") for d in (0, -1)),
        s("aten.cat.default", r("x")),
        s("aten.split.Tensor", X, 2),
        s("aten.split.Tensor", X, 3, -1),
        s("aten.split_with_sizes.default", X, (1, 2), 1),
        s("aten.chunk.default", X, 2),
        s("aten.chunk.default", X, 4, -1),
        s("aten.unbind.int", X),
        s("aten.unbind.int", X, 1),
        s("aten.unfold.default", X, 2, 2, 1),
        s("aten.movedim.int", X, 0, -1),
        s("aten.roll.default", X, (1, 2), (0, 1)),
        s("aten.roll.default", X, (5,)),
        s("aten.flip.default", X, (0, 2)),
        s("aten.tril.default", X),
        s("aten.tril.default", X, -1),
        s("aten.triu.default", X),
        s("aten.triu.default", X, 1),
        s("aten.repeat_interleave.self_int", X, 2),
        s("aten.repeat_interleave.self_int", X, 2, 1),
        s("aten.repeat_interleave.self_int", X, 2, 1, output_size=6),
        s("aten.to.dtype", X, torch.float64),
        s("aten.to.dtype", X, f32),
        s("aten.to.dtype", X, f32, False, True),
        s("aten.to.dtype", N, f32, False, True, torch.channels_last),
        s("aten.to.dtype_layout", X, dtype=torch.bfloat16, device="cpu"),
        s("aten.to.dtype_layout", X, device="cpu"),
        s("aten.to.dtype_layout", X, dtype=i64, copy=True),
        s("aten.to.device", X, "cpu", f32),
        s("aten.to.device", X, "cpu", torch.float64, False, True),
        s("aten.type_as.default", *r("ints", "x")),
        *(s(f"aten.{name}.default", X, dtype=d) for name in ("sum", "mean") for d in (None, torch.float64)),
        s("aten.sum.default", *r("mask")),
        *(
            s(target, X, dims, keep)
            for target in ("aten.sum.dim_IntList", "aten.mean.dim")
            for dims in ((1,), (0, -1), None, ())
            for keep in (False, True)
        ),
        s("aten.sum.dim_IntList", X, (1,), dtype=torch.float64),
        s("aten.mean.dim", *r("ints"), (1,), True, dtype=f32),
        s("aten.var.dim", X, (1,)),
        s("aten.var.dim", X, (1,), False, True),
        s("aten.var.dim", X, None),
        s("aten.var.correction", X),
        s("aten.var.correction", X, (1,), correction=0, keepdim=True),
        s("aten.var.correction", X, (1,), correction=None),
        s("aten.amax.default", X),
        s("aten.amax.default", X, (1,), True),
        s("aten.amin.default", X),
        s("aten.amin.default", X, (-1,)),
        s("aten.max.default", X),
        s("aten.min.default", X),
        *(s(f"aten.{name}.dim", X, 1, keep) for name in ("max", "min") for keep in (False, True)),
        *(s(f"aten.{name}.default", X, *a) for name in ("argmax", "argmin") for a in ((), (1,), (-1, True), (None, True))),
        s("aten.logsumexp.default", X, (1,)),
        s("aten.logsumexp.default", X, (0, 1), True),
        s("aten.cumsum.default", X, 1),
        s("aten.cumsum.default", *r("mask"), -1, dtype=i64),
        *(s("aten.linalg_vector_norm.default", X, *a) for a in ((), (1,), (math.inf, (1,)), (2, (0, 1), True), (2.0,))),
        s("aten.linalg_vector_norm.default", X, dtype=torch.float64),
        *(s(f"aten.{name}.default", *r("mask")) for name in ("any", "all")),
        *(s(f"aten.{name}.dim", *r("mask"), 1, keep) for name in ("any", "all") for keep in (False, True)),
        s("aten.diff.default", X),
        s("aten.diff.default", X, 2, 1),
        s("aten.diff.default", *r("x"), 1, 1, *r("y", "y")),
        s("aten.topk.default", X, 2),
        s("aten.topk.default", X, 2, 1, False, False),
        s("aten.sort.default", X),
        s("aten.sort.default", X, 1, True),
        s("aten.argsort.default", X),
        s("aten.argsort.default", X, 1, True),
        s("aten.gather.default", *r("x"), 1, *r("idx")),
        s("aten.gather.default", *r("x"), 1, *r("idx"), sparse_grad=True),
        s("aten.index_select.default", *r("x"), 0, *r("rows")),
        s("aten.index_add.default", X, 1, Ref("rows"), Y),
        s("aten.index_add.default", X, 1, Ref("rows"), Y, alpha=2),
        s("aten.scatter.value", X, 1, Ref("idx"), 0.5),
        s("aten.scatter.src", X, 1, Ref("idx"), Y),
        s("aten.scatter_add.default", X, 1, Ref("idx"), Y),
        s("aten.arange.default", 5),
        s("aten.arange.default", 5.5, device="cpu", pin_memory=False),
        s("aten.arange.start", 1, 5, dtype=f32),
        s("aten.arange.start_step", 0, 8, 2),
        s("aten.arange.start_step", 5, 0, -1),
        s("aten.arange.start_step", 0, 4),
        *(s(f"aten.{name}.default", (2, 3)) for name in ("zeros", "ones", "rand", "randn")),
        *(s(f"aten.{name}.default", (), dtype=torch.float64) for name in ("zeros", "ones", "rand", "randn")),
        s("aten.full.default", (2,), 3),
        s("aten.full.default", (2,), -math.inf),
        s("aten.full.default", (), True),
        s("aten.full.default", (2,), 1, dtype=f32),
        s("aten.full.default", (2,), complex(1, -2.0)),
        s("aten.eye.default", 3),
        s("aten.eye.default", 3, dtype=torch.bool),
        s("aten.empty.memory_format", (0, 3)),
        s("aten.empty.memory_format", (0, 3), dtype=i64),
        s("aten.scalar_tensor.default", 2.5),
        s("aten.scalar_tensor.default", 2, dtype=i64),
        s("aten.linspace.default", 0, 1, 5),
        s("aten.linspace.default", 0.0, 1.0, 5, dtype=torch.float64),
        *(s(f"aten.{name}_like.default", X) for name in ("zeros", "ones", "rand", "randn")),
        *(s(f"aten.{name}_like.default", X, dtype=torch.float64) for name in ("zeros", "ones", "rand", "randn")),
        s("aten.zeros_like.default", X, pin_memory=False),
        s("aten.empty_like.default", *r("nothing")),
        s("aten.full_like.default", X, 2),
        s("aten.full_like.default", X, 2, dtype=i64),
        *(s(f"aten.new_{name}.default", X, (2,)) for name in ("zeros", "ones")),
        s("aten.new_ones.default", X, (2, 1), dtype=torch.bool),
        s("aten.new_empty.default", X, (0,)),
        s("aten.new_full.default", X, (2,), 3.5),
        s("aten.new_full.default", X, (2,), 3, dtype=i64),
        s("aten.add_.Tensor", X, Y),
        s("aten.add_.Tensor", X, Y, alpha=3),
        s("aten.add_.Tensor", X, 1),
        s("aten.mul_.Tensor", X, Y),
        s("aten.mul_.Tensor", X, 2.0),
        s("aten.div_.Tensor", X, Y),
        s("aten.copy_.default", X, Y),
        s("aten.copy_.default", X, Ref("v4")),
        s("aten.fill_.Tensor", *r("x", "scalar")),
        s("aten.fill_.Scalar", X, 2.0),
        s("aten.masked_fill_.Scalar", *r("x", "mask"), 1.0),
        s("aten.relu_.default", *r("signed")),
        s("aten.slice.Tensor", X),
        s("aten.slice.Tensor", X, 0, 0, 2**63 - 1),
        s("aten.slice.Tensor", X, 1, 1),
        s("aten.slice.Tensor", X, -1, 0, -1),
        s("aten.slice.Tensor", X, 2, 0, 4, 2),
        s("aten.slice.Tensor", X, 1, -2, 2**63 - 1),
        s("aten.slice.Tensor", X, -2, None, 2),
        s("aten.slice.Tensor", X, 1, 5, 9),
        s("aten.select.int", X, 0, 1),
        s("aten.select.int", X, -1, -2),
        s("aten.select.int", X, 1, 0),
        s("aten.index.Tensor", X, r("rows")),
        s("aten.index.Tensor", X, (None, *r("rows"))),
        s("aten.index.Tensor", X, r("a")),
        s("aten.index.Tensor", N, (Ref("rows"), None, Ref("rows"))),
        s("aten.index.Tensor", X, r("at")),
        s("aten.index.Tensor", X, r("rows", "rows")),
        s("aten.index.Tensor", X, (None, None, Ref("rows"))),
    ]
    return found


def run(code: str, values: dict[str, torch.Tensor]) -> object:
    torch.manual_seed(1)
    return eval(code, {"torch": torch, "F": F, "mesh": MESH, **values})


def actual(arg: object, values: dict[str, torch.Tensor]) -> object:
    if isinstance(arg, tuple):
        return tuple(actual(a, values) for a in arg)
    return values[arg.name] if isinstance(arg, Ref) else arg


def flat(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]


def written(op: Op) -> str:
    types = {k: TensorType(tuple(v.shape), v.dtype) for k, v in tensors().items()}
    return str(call(op, lambda name: name, types, {"dp": 2, "tp": 2}))


@pytest.mark.parametrize("op", samples(), ids=lambda op: op.target)
def test_form_computes_what_the_operator_computes(op: Op) -> None:
    readable, generic = written(op), str(generic_call(op, lambda name: name))
    values, others, third = tensors(), tensors(), tensors()
    found, expected = flat(run(readable, values)), flat(run(generic, others))
    torch.manual_seed(1)
    direct = flat(torch_op(op.target)(*actual(op.args, third), **{k: actual(v, third) for k, v in op.kwargs}))
    for results, inputs in ((found, values), (expected, others)):
        assert len(results) == len(direct)
        for a, b in zip(results, direct, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), (readable, a.dtype, b.dtype)
            assert torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), readable
        for name, value in inputs.items():
            assert torch.equal(value, third[name]), f"{readable}: changes {name} otherwise than the operator"


def test_every_form_is_tried_and_applies() -> None:
    applied = {op.target for op in samples() if not written(op).startswith("torch.ops.")}
    assert (set(FORMS) | set(SUBSCRIPTS)) - applied == set()


@pytest.mark.parametrize(
    "op, code",
    [
        (sample("aten.linear.default", X, Ref("table"), None), "F.linear(x, table)"),
        (sample("aten.embedding.default", *r("table", "i")), "F.embedding(i, table)"),
        (sample("aten.layer_norm.default", X, (4,), *r("v4", "u4"), 1e-5), "F.layer_norm(x, (4,), v4, u4)"),
        (sample("aten.cross_entropy_loss.default", *r("logits", "classes"), None, 2), 'F.cross_entropy(logits, classes, reduction="sum")'),
        (sample("aten.slice.Tensor", X, 1, 1, 2**63 - 1), "x[:, 1:]"),
        (sample("aten.select.int", X, -1, 0), "x[..., 0]"),
        (sample("aten.arange.default", 16, device="cpu", pin_memory=False), "torch.arange(16, device=mesh.device)"),
        (sample("aten.full.default", (), -math.inf, dtype=f32), 'torch.full((), float("-inf"), dtype=torch.float32, device=mesh.device)'),
        (sample("aten.add.Tensor", X, Y, alpha=2), "torch.ops.aten.add.Tensor(x, y, alpha=2)"),
        (sample("aten.randint.low", 0, 5, (2,)), "torch.ops.aten.randint.low(0, 5, (2,), device=mesh.device)"),
        (sample("aten.uniform_.default", X, **{"from": 1.0, "to": 2.0}), "torch.ops.aten.uniform_.default(x, 1.0, 2.0)"),
        (
            Op(target="nobody.knows.default", args=(X, (1,)), kwargs=(("k", "a'\"\n"),), outputs=("o",)),
            "torch.ops.nobody.knows.default(x, (1,), k='a\\'\"\\n')",
        ),
        (
            Op(target="autopar.C.all_gather", args=(X,), kwargs=(("axis", "tp"), ("dim", 1)), outputs=("o",)),
            "C.all_gather(x, mesh.tp, dim=1)",
        ),
        (
            Op(target="autopar.L.masked_embedding", args=r("i", "table"), kwargs=(("axis", "dp"), ("padding_idx", None)), outputs=("o",)),
            "L.masked_embedding(i, table, mesh.dp, padding_idx=None)",
        ),
        (
            Op(target="autopar.L.norm", args=(X, (4,), None, 1e-5), kwargs=(("axis", "tp"),), outputs=("o",)),
            "L.norm(x, (4,), None, mesh.tp, 1e-05)",
        ),
    ],
    ids=lambda v: v.target if isinstance(v, Op) else "",
)
def test_how_it_reads(op: Op, code: str) -> None:
    assert written(op) == code


@pytest.mark.parametrize(
    "op, message",
    [
        (Op(target="autopar.C.all_gather", args=(X,), kwargs=(("axis", "cp"),), outputs=("o",)), "no axis of the mesh"),
        (Op(target="autopar.os.system", args=("ls",), outputs=("o",)), "not an operator of autopar.run"),
        (Op(target="autopar.C.x(); y", args=(), outputs=("o",)), "not an operator of autopar.run"),
        (Op(target="aten.nothing(); evil.default", args=(), outputs=("o",)), "not the name of an operator"),
        (Op(target="nobody.knows.default", args=(), kwargs=(("a=1, b", 1),), outputs=("o",)), "not a keyword"),
        (Op(target="aten.linear.default", args=(X,), outputs=("o",)), "do not fit"),
        (Op(target="aten.relu.default", args=(X, 1, 2), outputs=("o",)), "do not fit"),
        (Op(target="aten.relu.default", args=(object(),), outputs=("o",)), "no literal form"),
    ],
    ids=lambda v: v.target if isinstance(v, Op) else "",
)
def test_what_cannot_be_written_is_refused(op: Op, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        written(op)
