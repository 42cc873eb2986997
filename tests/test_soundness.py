"""Zero unsound strategies: every claim of every operator rule is executed (see soundness_harness)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from soundness_harness import Case, Tally, case_of, op_db, op_db_cases, unsound

from autopar.catalog import strategies_of
from autopar.ir import Arg, Op, P, R, S, Strategy
from autopar.run import bags, ctc  # noqa: F401  (which register operators)

pytestmark = pytest.mark.pure

# Operators of every kind that must have run with a shard on PyTorch's own samples.
SAMPLED = """
aten.linear.default aten.matmul.default aten.bmm.default aten.mm.default aten.addmm.default aten.einsum.default
aten.add.Tensor aten.mul.Tensor aten.div.Tensor aten.where.self aten.gelu.default aten.silu.default aten.relu.default
aten.view.default aten.reshape.default aten.permute.default aten.transpose.int aten.unsqueeze.default aten.expand.default
aten.cat.default aten.stack.default aten.select.int aten.slice.Tensor aten.chunk.default aten.split.Tensor aten.unbind.int
aten.softmax.int aten.log_softmax.int aten.sum.dim_IntList aten.mean.dim aten.cumsum.default
aten.layer_norm.default aten.rms_norm.default aten.group_norm.default aten.conv1d.default aten.conv2d.default
aten.conv_transpose2d.input aten.max_pool2d.default aten.adaptive_avg_pool2d.default aten.pad.default
aten.pixel_shuffle.default aten.upsample_bilinear2d.vec aten.scaled_dot_product_attention.default aten.embedding.default
aten.cross_entropy_loss.default aten.gather.default aten.index_select.default aten.scatter_add.default
"""


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return x(*shape).abs() + 0.1


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def normalisations() -> Iterator[tuple[Any, ...]]:
    for shape, last in (((4, 8, 16), (16,)), ((8, 4, 6), (4, 6)), ((16,), (16,))):
        yield "aten.layer_norm.default", x(*shape), last, x(*last), x(*last)
        yield "aten.layer_norm.default", x(*shape), last
        yield "aten.rms_norm.default", x(*shape), last, x(*last)
    for places in ((), (6,), (3, 4)):
        affine, running = (x(48), x(48)), (x(48), positive(48))
        yield "aten.group_norm.default", x(4, 48, *places), 24, *affine
        yield "aten.group_norm.default", x(4, 48, *places), 1
        for training in (True, False):
            yield "aten.batch_norm.default", x(8, 48, *places), *affine, *running, training, 0.1, 1e-5, True
        yield "aten.batch_norm.default", x(8, 48, *places), None, None, *running, True, 0.2, 1e-5, True
        yield "aten.batch_norm.default", x(8, 48, *places), *affine, None, None, True, 0.1, 1e-5, True
        if places:
            yield "aten.instance_norm.default", x(4, 48, *places), *affine, None, None, True, 0.1, 1e-5, True
            yield "aten.instance_norm.default", x(4, 48, *places), *affine, *running, True, 0.1, 1e-5, True
            yield "aten.instance_norm.default", x(4, 48, *places), *affine, *running, False, 0.1, 1e-5, True
    yield "aten._weight_norm.default", x(8, 4, 3), x(8, 1, 1), 0
    yield "aten._weight_norm.default", x(8, 4, 3), x(1, 4, 1), 1
    yield "aten.cosine_similarity.default", x(8, 4, 6), x(4, 6), 2
    yield "aten.pairwise_distance.default", x(8, 4, 6), x(8, 4, 6), 2.0, 1e-6, True


def convolutions() -> Iterator[tuple[Any, ...]]:
    for k in (1, 2, 3):
        places, kernel = (5, 6, 4)[:k], (3, 2, 1)[:k]
        for groups, inner, outer in ((1, 8, 16), (8, 8, 8), (8, 16, 48), (2, 16, 24), (24, 24, 48), (3, 24, 48)):
            for batch in ((4,), ()) if groups != 3 else ((4,),):
                image = x(*batch, inner, *places)
                weight, back = x(outer, inner // groups, *kernel), x(inner, outer // groups, *kernel)
                step = ([2] * k, [1] * k, [1] * k)
                yield f"aten.conv{k}d.default", image, weight, x(outer), *step, groups
                yield f"aten.conv{k}d.default", image, weight, None, [1] * k, [0] * k, [1] * k, groups
                transposed = f"aten.conv_transpose{k}d.{'input' if k > 1 else 'default'}"
                yield transposed, image, back, x(outer), [2] * k, [1] * k, [1] * k, groups
                if batch:
                    yield "aten.convolution.default", image, back, x(outer), *step, True, [0] * k, groups
                    yield "aten.convolution.default", image, weight, None, *step, False, [0] * k, groups
        yield f"aten.conv{k}d.padding", x(4, 8, *places), x(16, 8, *kernel), x(16), [1] * k, "same"


def on_places() -> Iterator[tuple[Any, ...]]:
    for k in (1, 2, 3):
        for lead in ((4, 8), (8,)):
            image = x(*lead, *(6, 4, 8)[:k])
            yield f"aten.max_pool{k}d.default", image, [2] * k, [2] * k
            yield f"aten.avg_pool{k}d.default", image, [2] * k, [1] * k
            yield f"aten.adaptive_avg_pool{k}d.default", image, [3] * k
            yield f"aten.adaptive_max_pool{k}d.default", image, [2] * k
            for mode in ("reflect", "replicate", "circular"):
                yield "aten.pad.default", image, [1] * 2 * k, mode
        image = x(4, 8, *(6, 4, 8)[:k])
        yield f"aten.upsample_nearest{k}d.vec", image, None, [2.0] * k
        yield f"aten.upsample_{('linear', 'bilinear', 'trilinear')[k - 1]}{k}d.vec", image, None, False, [2.0] * k
    yield "aten.upsample_bicubic2d.vec", x(4, 8, 5, 5), [7, 9], True, None
    yield "aten.pad.default", x(4, 8, 6), [1, 2]
    yield "aten.pad.default", x(4, 8, 6), [0, 0, 1, -1], "constant", 0.0
    yield "aten.pad.default", x(4, 8, 6), [1, 0], "constant", 2.0
    for lead in ((4,), (), (2, 4)):
        yield "aten.pixel_shuffle.default", x(*lead, 32, 4, 8), 2
        yield "aten.pixel_unshuffle.default", x(*lead, 8, 8, 16), 2
    for lead in ((4,), ()):
        yield "aten.im2col.default", x(*lead, 8, 6, 6), [2, 3], [1, 1], [1, 0], [2, 1]
        yield "aten.col2im.default", x(*lead, 48, 20), [6, 6], [2, 3], [1, 1], [0, 0], [1, 1]
    yield "aten.unfold.default", x(4, 8, 12), 2, 4, 2
    yield "aten.channel_shuffle.default", x(4, 24, 3, 3), 3
    yield "aten.grid_sampler.default", x(4, 8, 5, 5), x(4, 4, 8, 2), 0, 0, False
    yield "aten.affine_grid_generator.default", x(4, 2, 3), [4, 3, 5, 6], False
    yield "aten.cdist.default", x(4, 1, 8, 3), x(8, 4, 3), 1.0
    yield "aten.fft_fftn.default", x(4, 8, 6), None, [1, 2]
    yield "aten.fft_rfft.default", x(4, 8, 6)
    for layers in (1, 2):
        both = x(5, 4, 8), x(2 * layers, 4, 6)  # bidirectional
        sizes = [8] + [12] * (layers - 1)
        for gates, name in ((3, "gru"), (4, "lstm"), (1, "rnn_tanh")):
            weights = [w for i in sizes for _ in range(2) for w in (x(gates * 6, i), x(gates * 6, 6), x(gates * 6), x(gates * 6))]
            hidden = [both[1], x(2 * layers, 4, 6)] if name == "lstm" else both[1]
            yield f"aten.{name}.input", both[0], hidden, weights, True, layers, 0.0, True, True, False
            yield f"aten.{name}.input", both[0].transpose(0, 1), hidden, weights, True, layers, 0.0, True, True, True


def attentions() -> Iterator[tuple[Any, ...]]:
    name = "aten.scaled_dot_product_attention.default"
    q, k, v = x(4, 8, 4, 5), x(4, 8, 6, 5), x(4, 8, 6, 5)
    yield name, q, k, v
    yield name, q, q, q, None, 0.0, True
    yield name, q, q, q, None, 0.0, True, {"scale": 0.3}
    yield name, x(8, 4, 5), x(8, 4, 5), x(8, 4, 6), None, 0.0, True
    yield name, x(4, 8, 8, 5), x(4, 2, 8, 5), x(4, 2, 8, 5), None, 0.0, True, {"enable_gqa": True}
    for mask in ((4, 8, 4, 6), (4, 1, 1, 6), (1, 8, 4, 6), (4, 6), (1, 6), (4, 1, 4, 6), (8, 4, 6)):
        yield name, q, k, v, x(*mask)
    yield name, q, k, v, x(4, 1, 4, 6) > -1
    yield name, x(8, 4, 5), x(8, 6, 5), x(8, 6, 5), x(4, 6)
    yield name, x(4, 5), x(6, 5), x(6, 5)
    yield name, x(2, 4, 8, 4, 5), x(2, 4, 8, 6, 5), x(2, 4, 8, 6, 5)
    for heads in (1, 4, 8):
        for mask in (None, x(4, 8, 4, 6), x(4, 1, 1, 6)):
            yield name, q, x(4, heads, 6, 5), x(4, heads, 6, 5), mask, 0.0, False, {"enable_gqa": True}


def products_and_views() -> Iterator[tuple[Any, ...]]:
    yield "aten.linear.default", x(4, 8, 12), x(24, 12), x(24)
    yield "aten.linear.default", x(12), x(24, 12)
    for a, b in (((8,), (8,)), ((4, 8), (8,)), ((8,), (8, 4)), ((2, 4, 8), (8, 4)), ((4, 8, 12), (4, 12, 8)), ((1, 4, 8), (4, 8, 4)),
                 ((4, 8, 12), (2, 1, 12, 8)), ((8,), (4, 8, 4))):  # fmt: skip
        yield "aten.matmul.default", x(*a), x(*b)
    for equation, shapes in (
        ("bqhd,bkhd->bhqk", ((4, 8, 4, 6), (4, 8, 4, 6))),
        ("bij,jk->bik", ((4, 8, 4), (4, 8))),
        ("... i d, ... j d -> ... i j", ((4, 8, 6, 12), (4, 8, 12, 12))),
        ("...qhd,...khd->...hqk", ((8, 4, 6, 4, 3), (4, 6, 4, 3))),
        ("...ij,...jk", ((4, 1, 8, 4), (8, 4, 6))),
        ("ij,jk", ((4, 8), (8, 12))),
        ("b...,b...->b", ((4, 8, 6), (4, 8, 6))),
        ("...ij->...", ((4, 8, 12),)),
        ("bii->bi", ((4, 8, 8),)),
        ("b...c,cd->b...d", ((4, 6, 8, 4), (4, 8))),
        ("...i,...i->...i", ((4, 8), (8,))),
        ("Ba,aB", ((4, 8), (8, 4))),
        ("i...,j...->ij...", ((4, 8), (8, 1))),
        ("bij,ij,...j->...b", ((4, 8, 6), (8, 6), (4, 6))),
    ):
        yield "aten.einsum.default", equation, [x(*s) for s in shapes]
    for repeats in ((2, 3), (1, 2), (3, 1, 1), (2, 2, 3)):
        yield "aten.repeat.default", x(4, 12), repeats
    for shape, repeats in (((3, 4), (8, 1)), ((1, 4), (8, 1)), ((1, 1, 6), (4, 4, 1)), ((2, 3), (4, 8, 6))):
        yield "aten.repeat.default", x(*shape), repeats
    for shape, times, dim in (((1, 4), 8, 0), ((3, 1), 4, -1), ((3, 4), 2, 0), ((1, 4), 4, None)):
        yield "aten.repeat_interleave.self_int", x(*shape), times, dim
    for before, after in (((6, 4), (4, 6)), ((4, 6), (6, 4)), ((2, 12), (3, 8)), ((8, 3, 4), (4, 24)), ((12, 4), (8, 6)),
                          ((4, 8, 12), (32, 12)), ((4, 24), (4, 3, 8)), ((4, 24), (4, 8, 3)), ((32, 6), (4, 8, 6)), ((4, 3, 8), (4, 24)),
                          ((4, 8, 3), (96,)), ((1, 4, 8), (4, 1, 8)), ((4, 6, 8), (4, 2, 3, 8))):  # fmt: skip
        for name in ("view", "reshape"):
            yield f"aten.{name}.default", x(*before), after
    for operand in (x(4, 8, 3, 3), x(4, 3, 3)):
        symmetric = operand @ operand.mT + 3 * torch.eye(3, dtype=torch.float64)
        yield "aten.linalg_cholesky.default", symmetric
        yield "aten.logdet.default", symmetric
    for more in ((), (x(4, 1, 6),), (None, x(4, 2, 6)), (x(4, 1, 6), x(4, 2, 6))):
        yield "aten.diff.default", x(4, 8, 6), 1, 1, *more
    yield "aten.chunk.default", x(4, 24), 3, 1
    yield "aten.split.Tensor", x(4, 24), 8, -1
    yield "aten.split_with_sizes.default", x(4, 32), [16, 8, 8], 1
    yield "aten.slice.Tensor", x(4, 24), 1, 8, 16
    yield "aten.slice.Tensor", x(4, 24), 1, 6, 18  # half of it, from the middle of a half
    yield "aten.cat.default", [x(4, 8), x(4, 16), x(4, 8)], 1
    for name in ("contiguous", "alias", "_unsafe_view", "concat", "swapaxes"):
        rest: dict[str, tuple[Any, ...]] = {"_unsafe_view": ((4, 8),), "swapaxes": (0, 1)}
        yield f"aten.{name}.default", [x(4, 8), x(4, 8)] if name == "concat" else x(4, 8), *rest.get(name, ())
    yield "aten.div.Tensor", x(4, 8), positive(4, 8)
    yield "aten.add.Tensor", x(4, 8), 2.0
    yield "aten.mean.default", x(4, 8)
    yield "aten.amax.default", x(4, 8, 6), [1]
    yield "aten.var.correction", x(4, 8, 6), [-1], {"correction": 0}
    yield "aten._softmax.default", x(4, 8, 6), -1, False


def local_code() -> Iterator[tuple[Any, ...]]:
    """Operators whose local code takes their place on a rank, and that code under a further axis."""
    yield "aten.embedding.default", x(8, 6), integers(8, 4, 8)
    yield "aten.embedding.default", x(8, 6), integers(8, 4, 8), 3
    yield "aten.cross_entropy_loss.default", x(8, 12), integers(12, 8), None, 2
    yield "aten.cross_entropy_loss.default", x(8, 12), torch.tensor([-100, -100, -100, 1, 2, 3, 4, 5])  # a mean over those that count
    for mode, weights in (("sum", x(8, 5)), ("sum", None), ("mean", None), ("max", None)):
        yield "autopar_operators.embedding_bag.default", x(6, 12), integers(6, 8, 5), weights, mode, None
        yield "autopar_operators.embedding_bag.default", x(6, 12), integers(6, 8, 5), weights, mode, 2
    frames = x(6, 8, 5).log_softmax(-1), integers(4, 8, 3) + 1, torch.tensor([6, 5, 6, 4] * 2), torch.tensor([2, 3, 1, 0] * 2)
    yield "autopar_operators.ctc_loss.default", *frames, 0, True
    yield "autopar.L.sync_batch_norm", x(4, 8, 3), x(8), x(8), x(8), positive(8), {"axis": "b", "momentum": 0.1, "eps": 1e-5}
    yield "autopar.L.masked_embedding", integers(8, 4, 8), x(8, 16), {"axis": "b"}
    yield "autopar.L.cross_entropy_sum_vocab", x(8, 12), integers(12, 8), {"axis": "b"}
    for heads in (4, 8):
        keys = x(4, heads, 8, 5)
        yield "autopar.L.causal_rows", x(4, 8, 8, 5), keys, keys, {"axis": "b", "scale": None, "enable_gqa": heads == 4}


def cases(calls: Iterable[tuple[Any, ...]]) -> Iterator[Case]:
    for target, *args in calls:
        yield case_of(target, *args[:-1], **args[-1]) if isinstance(args[-1], dict) else case_of(target, *args)


@pytest.mark.parametrize("family", [normalisations, convolutions, on_places, attentions, products_and_views, local_code])
def test_family(family: Any) -> None:
    """Shapes that divide, of the operators that real models are made of."""
    tally = Tally()
    for case in cases(family()):
        tally.run(case)
    print(tally.table())
    assert not tally.failures, "\n".join(tally.failures)
    idle = [name for name, counts in tally.counts.items() if counts[1] == 0]
    assert not idle, f"no strategy with a shard was executed for: {idle}"


def test_a_quotient_of_sums() -> None:
    """Of a loss and a count, and of two sums that both have a gradient; over one axis and over two."""
    calls = [("aten.div.Tensor", x(), positive()), ("aten.div.Tensor", x(), torch.tensor(12)),
             ("autopar.L.quotient_of_sums", x(), positive(), {"axis": "b"})]  # fmt: skip
    tally = Tally()
    for case in cases(calls):
        tally.run(case)
        assert any(s.inputs == ((P, P) if case.op.target.startswith("aten.") else (P, R)) for s in strategies_of(case.view(2)))
    assert not tally.failures, "\n".join(tally.failures)
    assert all(executed[2] for executed in tally.counts.values()), tally.table()


@functools.cache
def samples() -> tuple[Case, ...]:
    """PyTorch's own, of sizes that divide."""
    return tuple(case for info in op_db(divisible=True) for case in op_db_cases(info, limit=2))


@pytest.mark.filterwarnings("ignore")  # op_db calls deprecated operators too
def test_op_db() -> None:
    """PyTorch's operator samples, with its sizes changed to ones that divide."""
    tally = Tally()
    for case in samples():
        tally.run(case)
    print(tally.table())
    assert not tally.failures, "\n".join(tally.failures)
    idle = [name for name in SAMPLED.split() if tally.counts.get(name, [0, 0])[1] == 0]
    assert not idle, f"no strategy with a shard was executed for: {idle}"


@pytest.mark.filterwarnings("ignore")  # op_db calls deprecated operators too
def test_strategies_do_not_depend_on_rates() -> None:
    """Every operator of op_db that takes a number between 0 and 1 has the same ones with another such number."""
    compared = set()
    for case in samples():
        rates = [x for x in arguments(case.op) if isinstance(x, float) and 0 < x < 1]
        if rates and case.op.target.startswith("aten."):
            view = case.view(2)
            for other in (1e-6, 0.37, 0.999):
                assert set(strategies_of(view)) == set(strategies_of(dataclasses.replace(view, op=with_rates(case.op, other))))
            compared.add(case.op.target)
    assert len(compared) > 35, compared


def arguments(op: Op) -> Iterator[Arg]:
    pending = [*op.args, *(value for _, value in op.kwargs)]
    while pending:
        arg = pending.pop()
        pending += arg if isinstance(arg, tuple) else ()
        yield arg


def with_rates(op: Op, rate: float) -> Op:
    def changed(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(changed, arg))
        return rate if isinstance(arg, float) and 0 < arg < 1 else arg

    return dataclasses.replace(op, args=tuple(map(changed, op.args)), kwargs=tuple((k, changed(v)) for k, v in op.kwargs))


@pytest.mark.parametrize(
    ("target", "operands", "wrong"),
    [
        ("aten.linear.default", ((4, 8), (6, 8), (6,)), Strategy(inputs=(S(1), S(1), R), outputs=(P,))),  # the bias is added n times
        ("aten.relu.default", ((4, 8),), Strategy(inputs=(P,), outputs=(P,))),
        ("aten.matmul.default", ((4, 8), (8, 6)), Strategy(inputs=(S(0), R), outputs=(R,))),
        ("aten.mul.Tensor", ((4, 8), (4, 8)), Strategy(inputs=(P, P), outputs=(P,))),
        ("aten.add.Tensor", ((4, 8), (4, 8)), Strategy(inputs=(P, R), outputs=(P,))),
        ("aten.mul.Tensor", ((4, 8), (8,)), Strategy(inputs=(S(0), S(0)), outputs=(S(0),))),
    ],
)
def test_unsound_strategies_are_caught(target: str, operands: tuple[tuple[int, ...], ...], wrong: Strategy) -> None:
    case = case_of(target, *(x(*shape) for shape in operands))
    assert unsound(case, case.view(2), wrong) is not None
