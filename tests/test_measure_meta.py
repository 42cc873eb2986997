"""What is counted on the meta device, and allocated there, is what it is on fake tensors of the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import pytest
import torch

import autopar.measure
import autopar.measure.workspace  # noqa: F401
from autopar.ir import Arg, Op, Ref, TensorType, nameless

pytestmark = pytest.mark.pure
counting, spaces = sys.modules["autopar.measure.count"], sys.modules["autopar.measure.workspace"]

A, B = Ref("x0"), Ref("x1")
UNARY = (
    "neg.default exp.default log.default sqrt.default rsqrt.default sin.default cos.default tanh.default sigmoid.default relu.default "
    "gelu.default silu.default clone.default mean.default sum.default contiguous.default"
)
BINARY = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor maximum.default "
    "minimum.default"
)
SCALAR = (
    "add.Scalar sub.Scalar mul.Scalar div.Scalar pow.Tensor_Scalar rsub.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar"
)
FORMS: dict[str, tuple[tuple[Arg, ...], tuple[tuple[int, ...], ...], str]] = {
    # target -> (arguments, shapes of the operands, kinds of the operands: f floating and trained, i integer, b Boolean)
    **dict.fromkeys(UNARY.split(), ((A,), ((4, 6, 8),), "f")),
    **dict.fromkeys(BINARY.split(), ((A, B), ((4, 6, 8), (6, 8)), "ff")),
    **dict.fromkeys(SCALAR.split(), ((A, 3.0), ((4, 6, 8),), "f")),
    "linear.default": ((A, B, Ref("x2")), ((4, 6, 8), (10, 8), (10,)), "fff"), "mm.default": ((A, B), ((6, 8), (8, 10)), "ff"),
    "bmm.default": ((A, B), ((4, 6, 8), (4, 8, 10)), "ff"), "matmul.default": ((A, B), ((4, 6, 8), (8, 10)), "ff"),
    "addmm.default": ((A, B, Ref("x2")), ((10,), (6, 8), (8, 10)), "fff"), "to.dtype": ((A, torch.float64), ((4, 6),), "f"),
    "cat.default": (((A, B), 1), ((4, 6), (4, 8)), "ff"), "stack.default": (((A, B), 1), ((4, 6), (4, 6)), "ff"),
    "mean.dim": ((A, (-1,), True), ((4, 6, 8),), "f"), "sum.dim_IntList": ((A, (0, 2)), ((4, 6, 8),), "f"),
    "where.self": ((A, B, Ref("x2")), ((4, 6), (4, 6), (1,)), "bff"), "embedding.default": ((A, B), ((20, 8), (4, 6)), "fi"),
    "__and__.Tensor": ((A, B), ((4, 6), (4, 6)), "bb"), "__or__.Tensor": ((A, B), ((4, 6), (6,)), "bb"),
    "bitwise_not.default": ((A,), ((4, 6),), "b"), "logical_not.default": ((A,), ((4, 6),), "b"),
    "masked_fill.Scalar": ((A, B, -1.0), ((4, 6), (4, 6)), "fb"), "index_select.default": ((A, 0, B), ((4, 6), (3,)), "fi"),
    "cumsum.default": ((A, 1), ((4, 6),), "f"), "softmax.int": ((A, -1), ((4, 6),), "f"), "log_softmax.int": ((A, -1), ((4, 6),), "f"),
    "roll.default": ((A, (2,), (1,)), ((4, 6),), "f"), "triu.default": ((A,), ((4, 6),), "f"), "tril.default": ((A, 1), ((4, 6),), "f"),
    "dropout.default": ((A, 0.1, True), ((4, 6),), "f"), "cross_entropy_loss.default": ((A, B, None, 2, -100, 0.0), ((6, 8), (6,)), "fi"),
    "index.Tensor": ((A, (B,)), ((4, 6), (3,)), "fi"), "gather.default": ((A, 1, B), ((4, 6), (4, 3)), "fi"),
    "pad.default": ((A, (1, 1)), ((4, 6),), "f"), "conv2d.default": ((A, B, None, (1, 1), (1, 1)), ((2, 4, 8, 8), (6, 4, 3, 3)), "ff"),
    "group_norm.default": ((A, 2, B, Ref("x2"), 1e-5), ((4, 8, 6, 6), (8,), (8,)), "fff"),
    "max_pool2d.default": ((A, (2, 2)), ((2, 4, 8, 8),), "f"),
    "reshape.default": ((A, (4, 48)), ((4, 6, 8),), "f"), "slice.Tensor": ((A, 2, 2, 6), ((4, 6, 8),), "f"),
    "transpose.int": ((A, 1, 2), ((4, 6, 8),), "f"), "permute.default": ((A, (2, 0, 1)), ((4, 6, 8),), "f"),
    "unsqueeze.default": ((A, 1), ((4, 6, 8),), "f"), "squeeze.dim": ((A, 1), ((4, 1, 8),), "f"),
    "expand.default": ((A, (4, 6, 8)), ((6, 1),), "f"), "select.int": ((A, 1, 3), ((4, 6, 8),), "f"),
    "where.ScalarOther": ((A, B, 0.0), ((4, 6), (4, 6)), "bf"), "where.ScalarSelf": ((A, 1.0, B), ((4, 6), (4, 6)), "bf"),
    "new_zeros.default": ((A, (4, 8)), ((4, 6),), "f"), "new_ones.default": ((A, (4, 8)), ((4, 6),), "f"),
    "slice_scatter.default": ((A, B, 1, 2, 4), ((4, 6), (4, 2)), "ff"), "select_scatter.default": ((A, B, 1, 3), ((4, 6), (4,)), "ff"),
    "native_dropout.default": ((A, 0.1, True), ((4, 6),), "f"),
}  # fmt: skip


def test_every_operator_has_a_form() -> None:
    assert {f"aten.{name}" for name in FORMS} | {counting.SYNC_BATCH_NORM} == counting.SAME_ON_META


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_counts_on_meta_are_those_on_fake_tensors(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    args, shapes, kinds = FORMS[name]
    of = {"f": dtype, "i": torch.int64, "b": torch.bool}
    for trained in (True, False):
        ins = tuple(TensorType(shape, of[k], trained and k == "f") for shape, k in zip(shapes, kinds, strict=True))
        outs = (TensorType((4, 6), dtype, trained),)
        for no_grad in (False, True):
            given = (f"aten.{name}", args, (), no_grad, ins, outs)
            on_meta = counting._count.__wrapped__(*given)
            with monkeypatch.context() as m:
                m.setattr(counting, "is_same_on_meta", lambda *_: False)
                assert on_meta == counting._count.__wrapped__(*given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_workspaces_on_meta_are_those_on_fake_tensors(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    args, shapes, kinds = FORMS[name]
    of = {"f": dtype, "i": torch.int64, "b": torch.bool}
    turned = [(*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape for shape in shapes]
    for trained, layouts in itertools.product((True, False), (shapes, turned)):
        ins = tuple(TensorType(shape, of[k], trained and k == "f") for shape, k in zip(shapes, kinds, strict=True))
        strides = []
        for shape, lies in zip(shapes, layouts, strict=True):  # as they are, and with the last two dims the other way round in memory
            tensor = torch.empty(lies, device="meta")
            strides.append(tensor.stride() if lies == shape else tensor.transpose(-1, -2).stride())
        call = Op(target=f"aten.{name}", args=args, outputs=("y",))
        given = (call, ins, tuple(strides), (TensorType((4, 6), dtype, trained),))
        on_meta = spaces._workspace(*given)
        with monkeypatch.context() as m:
            m.setattr(spaces, "is_same_on_meta", lambda *_: False)
            again = spaces._workspace(*given)
            assert (on_meta, on_meta.backward, on_meta.gradients) == (again, again.backward, again.gradients)


@pytest.mark.parametrize("target", [counting.BATCH_NORM, counting.SYNC_BATCH_NORM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("statistics", [torch.float32, torch.float64], ids=str)
def test_norms_of_a_batch_are_the_same_on_meta(
    target: str, dtype: torch.dtype, statistics: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = tuple(Ref(f"x{k}") for k in range(5))
    kwargs: tuple[tuple[str, Arg], ...] = (("axis", "dp"), ("momentum", 0.1), ("eps", 1e-5)) if target == counting.SYNC_BATCH_NORM else ()
    call = Op(target=target, args=operands if kwargs else (*operands, True, 0.1, 1e-5, True), kwargs=kwargs, outputs=("y",))
    ins = (TensorType((4, 6, 8, 8), dtype, True), *[TensorType((6,), statistics, k < 2) for k in range(4)])
    given = (call, ins, tuple(torch.empty(t.shape, device="meta").stride() for t in ins), ins[:1])
    counted = (target, call.args, kwargs, False, ins, ins[:1])
    one = spaces._workspace(*given)
    count = counting._count.__wrapped__(*counted)
    assert counting.is_same_on_meta(target, ins) or dtype == torch.bfloat16
    with monkeypatch.context() as m:
        m.setattr(counting, "is_same_on_meta", lambda *_: False)
        m.setattr(spaces, "is_same_on_meta", lambda *_: False)
        again = spaces._workspace(*given)
        assert (one, one.backward, one.gradients) == (again, again.backward, again.gradients)
        assert count == counting._count.__wrapped__(*counted)


@pytest.mark.parametrize("target", ["aten.scaled_dot_product_attention.default", "autopar.L.attention"])
@pytest.mark.parametrize(
    ("dtype", "dropout"), [(torch.float32, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.1), (torch.float64, 0.0)], ids=str
)
@pytest.mark.parametrize("heads", [(2, 1), (2, 3), (1, 1)], ids=str)
def test_attention_with_a_mask_that_is_trained_is_the_same_on_meta(
    target: str, dtype: torch.dtype, dropout: float, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """heads: half of those of keys and values, where queries have four; and the samples that the mask tells apart."""
    keys = 4 if target.startswith("autopar") else 2 * heads[0]
    shapes = (3, 4, 16, 8), (3, keys, 12, 8), (3, keys, 12, 8), (heads[1], 4, 16, 12)
    of_axis: tuple[tuple[str, Arg], ...] = (("axis", "tp"),) if target.startswith("autopar") else ()
    kwargs = (*of_axis, ("dropout_p", dropout), ("is_causal", False), ("scale", 1.0), ("enable_gqa", keys != 4))
    call = Op(target=target, args=tuple(Ref(f"x{k}") for k in range(4)), kwargs=kwargs, outputs=("y",))
    for trained in itertools.product((True, False), repeat=3):
        ins = tuple(TensorType(shape, dtype, grad) for shape, grad in zip(shapes, (*trained, True), strict=True))
        outs = (TensorType(shapes[0], dtype, True),)
        strides = tuple(torch.empty(shape, device="meta").stride() for shape in shapes)
        turned = tuple(torch.empty((s[0], s[2], s[1], s[3]), device="meta").transpose(1, 2).stride() for s in shapes)
        assert counting.is_same_on_meta(target, ins)
        on_meta = _found(call, ins, (strides, turned), outs)
        with monkeypatch.context() as m:
            for module in (counting, spaces):
                m.setattr(module, "is_same_on_meta", lambda *_: False)
            counting._count.cache_clear()
            assert on_meta == _found(call, ins, (strides, turned), outs)
        counting._count.cache_clear()


def _found(
    call: Op, ins: tuple[TensorType, ...], layouts: tuple[tuple[tuple[int, ...], ...], ...], outs: tuple[TensorType, ...]
) -> list[object]:
    """What is counted of a call, and what it keeps and allocates with its operands in each of these orders in memory."""
    counts = counting._count.__wrapped__(call.target, call.args, call.kwargs, False, ins, outs)
    of_each = [spaces._workspace(call, ins, strides, outs) for strides in layouts]
    return [counts, *((w, w.backward, w.gradients) for w in of_each)]


def test_calls_that_are_not_equal_have_counts_and_workspaces_of_their_own() -> None:
    """Not those of a call that differs in a constant, in the type of one, in modes, in types or in the order of a tensor in memory."""
    x = TensorType((4, 6), torch.float32, True)
    other = dataclasses.replace(x, dtype=torch.bfloat16)

    def call(*args: Arg, no_grad: bool = False) -> Op:
        return Op(target="aten.dropout.default", args=(Ref("x"), *args), outputs=("y",), no_grad=no_grad)

    calls = [call(0.5, True), call(0.5, False), call(0.25, True), call(1.0, True), call(1, True), call(0.5, True, no_grad=True)]
    for op in (*calls, *calls):
        for t in (x, other, dataclasses.replace(x, grad=False)):
            fresh = counting._count.__wrapped__(op.target, nameless(op).args, (), op.no_grad, (t,), (t,))
            assert counting.count(op, (t,), (t,)) == counting._with_traffic(op.target, fresh, (t,), (t,))
            for strides in ((6, 1), (1, 4)):
                assert spaces.workspace(op, (t,), (strides,), (t,)) == spaces._workspace(nameless(op), (t,), (strides,), (t,))
