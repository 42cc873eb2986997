"""Embeddings, losses, indexing and experts: every strategy that the rules state, executed on small random cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autopar.catalog import OpView, localized, strategies_of
from autopar.ir import P, TensorType, refs
from tests.soundness_harness import (
    Case,
    Fixed,
    Lockstep,
    Tally,
    case_of,
    differs,
    gradient_laid_out,
    join,
    laid_out,
    leaves,
    run_ops,
    tolerance_of,
)

pytestmark = pytest.mark.pure


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def unique(high: int, *shape: int) -> torch.Tensor:
    """Random indices below `high`, no two equal along the first dim."""
    rows = [torch.randperm(high)[: shape[0]] for _ in range(max(1, torch.Size(shape[1:]).numel()))]
    return torch.stack(rows, 1).reshape(shape)


def embedding_cases() -> list[Case]:
    bag = (ints(8, 6), torch.tensor([0, 2, 4, 4]))
    return [
        case_of("aten.embedding.default", real(8, 4), ints(8, 4, 12)),
        case_of("aten.embedding.default", real(8, 4), ints(8, 4), 2),
        case_of("aten.embedding.default", real(8, 4), torch.tensor(3)),
        case_of("aten.embedding.default", real(8, 4), ints(8, 4), -1, True),
        *(case_of("aten.embedding_bag.default", real(8, 4), *bag, False, mode) for mode in (0, 1, 2)),
        case_of("aten.embedding_bag.default", real(8, 4), *bag, False, 0, False, real(6)),
        case_of("aten.embedding_bag.padding_idx", real(8, 4), *bag, False, 1, False, None, False, 3),
    ]


def loss_cases() -> list[Case]:
    cases = []
    labels, sparse = ints(8, 4), torch.tensor([1, -100, 3, -100, -100, -100, 0, 7])
    for reduction in (0, 1, 2):
        for name in ("cross_entropy_loss", "nll_loss_nd"):
            cases += [
                case_of(f"aten.{name}.default", real(4, 8), labels, None, reduction),
                case_of(f"aten.{name}.default", real(8, 8), sparse, Fixed(real(8).abs()), reduction, -100),
                case_of(f"aten.{name}.default", real(4, 8, 4, 2), ints(8, 4, 4, 2), Fixed(real(8).abs()), reduction, 3),
                case_of(f"aten.{name}.default", real(8), torch.tensor(3), None, reduction),
            ]
        cases += [
            case_of("aten.cross_entropy_loss.default", real(8, 8), sparse, Fixed(real(8).abs()), reduction, -100, 0.2),
            case_of("aten.cross_entropy_loss.default", real(4, 8), real(4, 8).softmax(1), Fixed(real(8).abs()), reduction, -100, 0.2),
            case_of("aten.cross_entropy_loss.default", real(4, 8, 2), real(4, 8, 2).softmax(1), None, reduction),
            case_of("aten.cross_entropy_loss.default", real(8), real(8).softmax(0), None, reduction),
            case_of("aten.nll_loss.default", real(4, 8), labels, None, reduction),
            case_of("aten.nll_loss2d.default", real(4, 8, 4, 2), ints(8, 4, 4, 2), None, reduction),
        ]
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"):
            cases += [case_of(f"aten.{name}.default", real(4, 6), real(4, 6), reduction)]
        p, t = real(4, 6).sigmoid(), real(4, 6).sigmoid()
        cases += [
            case_of("aten.mse_loss.default", torch.tensor(1.5, dtype=torch.float64), torch.tensor(2.5, dtype=torch.float64), reduction),
            case_of("aten.kl_div.default", real(4, 6), real(4, 6), reduction, log_target=True),
            case_of("aten.soft_margin_loss.default", real(4, 6), Fixed(real(4, 6).sign()), reduction),
            case_of("aten.binary_cross_entropy.default", p, t, None, reduction),
            case_of("aten.binary_cross_entropy.default", p, t, Fixed(real(6).abs()), reduction),
            case_of("aten.binary_cross_entropy_with_logits.default", real(4, 6), t, None, Fixed(real(6).abs()), reduction),
            case_of("aten.binary_cross_entropy_with_logits.default", real(4, 6), t, Fixed(real(4, 1).abs()), None, reduction),
            case_of("aten.poisson_nll_loss.default", real(4, 6), t, True, True, 1e-8, reduction),
            case_of("aten.margin_ranking_loss.default", real(4), real(4), real(4).sign(), 0.1, reduction),
            case_of("aten.hinge_embedding_loss.default", real(4, 6), real(4, 6).sign(), 1.0, reduction),
            case_of("aten.cosine_embedding_loss.default", real(4, 6), real(4, 6), torch.tensor([1, -1, 1, -1]), 0.1, reduction),
            case_of("aten.triplet_margin_loss.default", real(4, 6), real(4, 6), real(4, 6), 1.0, 2.0, 1e-6, False, reduction),
            case_of("aten.multi_margin_loss.default", real(4, 8), labels, 1, 1, Fixed(real(8).abs()), reduction),
            case_of("aten.multilabel_margin_loss.default", real(4, 3), torch.tensor([[0, 2, -1]] * 4), reduction),
        ]
    return cases


def index_cases() -> list[Case]:
    i, j, wide, one = ints(4, 8), ints(4, 8), ints(4, 6, 8), ints(4, 6, 1)
    x = real(4, 6, 4, 8)
    given = [
        (i,), (None, i), (None, None, i), (i, None, j), (i, j), (None, i, j), (i, None, wide), (None, wide, one), (None, one, None, i),
        (torch.tensor(1), None, wide), (None, torch.tensor(3)), (i, j, i, j), (None, None, None, wide), (ints(4, 1), i),
    ]  # fmt: skip
    cases = [case_of("aten.index.Tensor", x, list(indices)) for indices in given]
    for indices in given:
        for accumulate in (True, False):
            # duplicates have no defined gradient unless they are added
            made = indices if accumulate else tuple(None if k is None else torch.randperm(4) for k in indices)
            result = torch.ops.aten.index.Tensor(x, list(made))
            for values in (real(*result.shape), real(*result.shape[-1:]), real(*result.shape[:1], *[1] * (result.dim() - 1)), real()):
                cases.append(case_of("aten.index_put.default", x, list(made), values, accumulate))
    mask, rows = torch.rand(4, 6) > 0.5, torch.rand(6) > 0.5
    for accumulate in (True, False):
        cases += [
            case_of("aten.index_put.default", x, [mask], real(), accumulate),
            case_of("aten.index_put.default", x, [None, rows], real(1), accumulate),
            case_of("aten.index_put.default", real(4, 6), [mask], real(int(mask.sum())), accumulate),
        ]
    return [*cases, case_of("aten.index.Tensor", real(4, 6, 8), [mask]), case_of("aten.index.Tensor", ints(9, 4, 6), [None, i])]


def along_cases() -> list[Case]:
    x, at = real(4, 8, 6), ints(4, 4, 8, 6)
    cases = [
        case_of("aten.gather.default", x, 0, at),
        case_of("aten.gather.default", x, -2, ints(8, 4, 12, 4)),
        case_of("aten.gather.default", x, 1, ints(8, 2, 1, 6), sparse_grad=False),
        case_of("aten.gather.default", real(), 0, torch.tensor(0)),
        case_of("aten.take_along_dim.default", x, ints(4, 2, 8, 6), 0),
        case_of("aten.take_along_dim.default", x, ints(8, 1, 4, 6), 1),
        case_of("aten.take_along_dim.default", real(1, 8, 6), ints(8, 4, 4, 1), -2),
        case_of("aten.take_along_dim.default", x, ints(192, 8)),
        case_of("aten.take_along_dim.default", x, ints(192, 4, 2), None),
    ]
    for dim in (0, 1, -1):
        size = x.shape[dim]
        full, few = unique(size, *x.transpose(0, dim).shape).transpose(0, dim), unique(size, 2, 6, 6) % 4
        some = torch.zeros(4, 8, 6, dtype=torch.long).transpose(0, dim)[:2].transpose(0, dim).contiguous()
        for k in (full, few, some):
            cases += [case_of("aten.scatter.value", x, dim, k, 0.5), case_of("aten.scatter_add.default", x, dim, k, real(*k.shape))]
            cases += [case_of("aten.scatter_add.default", x, dim, k, real(8, 8, 8))]
            cases += [case_of("aten.scatter.value_reduce", x.long(), dim, k, 3, reduce="add")]
            for reduce in ("sum", "prod", "amax"):
                for include in (True, False):
                    cases += [case_of("aten.scatter_reduce.two", x, dim, k, real(*k.shape), reduce, include_self=include)]
        cases += [case_of("aten.scatter.src", x, dim, full, real(*full.shape)), case_of("aten.scatter.src", x, dim, full, real(8, 8, 8))]
        rows, some = torch.randperm(size), torch.randperm(size)[:4]
        for k in (rows, some):
            source = real(*[len(k) if d == dim % 3 else s for d, s in enumerate(x.shape)])
            cases += [
                case_of("aten.index_select.default", x, dim, k),
                case_of("aten.index_add.default", x, dim, k, source, alpha=2),
                case_of("aten.index_copy.default", x, dim, k, source),
                case_of("aten.index_fill.int_Scalar", x, dim, k, 2.0),
                case_of("aten.index_fill.int_Tensor", x, dim, k, real()),
                case_of("aten.index_reduce.default", x, dim, k, source, "amax"),
            ]
        piece = x.narrow(dim, 0, 4)
        cases += [
            case_of("aten.slice_scatter.default", x, piece, dim, 0, 4),
            case_of("aten.slice_scatter.default", x, real(*x.shape), dim, 0, 9223372036854775807),
            case_of("aten.slice_scatter.default", x, real(*x.shape), dim),
            case_of("aten.slice_scatter.default", x, x.narrow(dim, 0, size // 2), dim, 0, None, 2),
            case_of("aten.select_scatter.default", x, x.select(dim, 1), dim, 1),
        ]
    return [
        *cases,
        case_of("aten.index_select.default", real(8), 0, torch.tensor(3)),
        case_of("aten.index_select.default", x, 1, torch.tensor(3)),
        case_of("aten.masked_scatter.default", x, torch.rand(4, 8, 6) > 0.5, real(200)),
        case_of("aten.masked_scatter.default", x, torch.rand(4, 8, 1) > 0.5, real(200)),
    ]


def count_cases() -> list[Case]:
    x, edges = real(4, 8), real(8).sort().values
    cases = [
        case_of("aten.one_hot.default", ints(6, 4, 2), 6),
        case_of("aten.one_hot.default", ints(6, 4, 2), -1),
        case_of("aten.histc.default", x, 8, -1, 1),
        case_of("aten.histc.default", x.float(), 8),
        case_of("aten.histc.default", x, 8, 1, 1),
        case_of("aten.bucketize.Tensor", x, edges, right=True),
        case_of("aten.bucketize.Tensor", torch.tensor(0.5), edges.float()),
        case_of("aten.isin.Tensor_Tensor", ints(9, 4, 6), ints(9, 4, 2)),
        case_of("aten.isin.Tensor_Tensor", ints(9, 4, 6), ints(9, 4), invert=True),
        case_of("aten.searchsorted.Tensor", edges, x),
        case_of("aten.searchsorted.Tensor", edges, torch.tensor(0.5, dtype=torch.float64)),
    ]
    rows = real(4, 2, 8)
    cases += [
        case_of("aten.searchsorted.Tensor", rows.sort(-1).values, real(4, 2, 6), right=True),
        case_of("aten.searchsorted.Tensor", rows, real(4, 2, 6), side="left", sorter=rows.argsort(-1)),
        case_of("aten.searchsorted.Tensor", real(8), x, sorter=torch.arange(8)),
    ]
    return cases


def expert_cases() -> list[Case]:
    pytest.importorskip("transformers.integrations.moe")  # defines the second operator
    offs = torch.tensor([2, 2, 7, 12], dtype=torch.int32)
    x, weight = real(12, 32), real(4, 32, 64)
    return [
        case_of("transformers.grouped_mm_fallback.default", x, weight, offs),
        case_of("transformers.grouped_mm_fallback.default", x, weight.mT.contiguous().mT, offs.long()),
        case_of("transformers.grouped_mm_fallback.default", x, weight, offs - 1),  # a row of no expert
        case_of("transformers.grouped_mm_fallback.default", x[:4], weight, offs.clamp(max=4)),
        case_of("aten._grouped_mm.default", x.bfloat16(), weight.bfloat16(), offs),
        case_of("aten._grouped_mm.default", x.bfloat16(), weight.mT.bfloat16().contiguous().mT, offs),
        case_of("aten._grouped_mm.default", real(4, 16, 32).bfloat16(), weight.bfloat16()),
    ]


def rearranged_cases() -> list[Case]:
    x = real(4, 6, 8)
    repeat = "aten.repeat_interleave.self_int"
    cases = [case_of(repeat, v, 3, dim) for v in (x, x.long()) for dim in (None, 0, -1)] + [case_of(repeat, real(), 3)]
    cases += [case_of(repeat, x, 2, dim, output_size=size) for dim, size in ((None, 384), (0, 8), (-2, 12))]
    cases += [case_of("aten.meshgrid.indexing", [real(4), real(2), real(6)], indexing=how) for how in ("ij", "xy")]
    cases += [case_of("aten.meshgrid.indexing", given, indexing="xy") for given in ([real(4)], [real(4), real()])]
    cases += [case_of(f"aten.{name}.default", v, k) for name in ("tril", "triu") for v in (x, x[0], x > 0) for k in (0, -1, 2)]
    cases += [case_of("aten.diagonal.default", x, *a) for a in ((), (1, -1, 0), (-1, 1, 2))]
    cases += [case_of("aten.diag_embed.default", x, *a) for a in ((), (1, 0, -1), (0, 1, 3))]
    cases += [case_of("aten.diag.default", v, 1) for v in (real(4), real(4, 4))] + [case_of("aten.trace.default", real(4, 4))]
    cases += [case_of("aten.unfold.default", x, dim, 3, 2) for dim in (0, 1, -1)] + [case_of("aten.unfold.default", real(), 0, 1, 1)]
    for window in (((2, 2), (1, 1), (0, 0), (2, 2)), ((3, 3), (1, 1), (1, 1), (1, 1))):
        cases += [case_of("aten.im2col.default", v, *window) for v in (real(4, 8, 4, 4), real(8, 4, 4))]
        columns = torch.ops.aten.im2col(real(4, 8, 4, 4), *window)
        cases += [case_of("aten.col2im.default", v, (4, 4), *window) for v in (columns, columns[0])]
    return [
        *cases,
        case_of("aten.repeat_interleave.self_Tensor", x, torch.arange(6), 1),
        case_of("aten.repeat_interleave.self_Tensor", x, torch.ones(192, dtype=torch.long)),
        case_of("aten.channel_shuffle.default", real(4, 8, 2, 2), 2),
        case_of("aten.linalg_cross.default", real(4, 3, 8), real(1, 3, 8), dim=-2),
        case_of("aten.linalg_cross.default", real(4, 8, 3), real(4, 1, 3)),
        case_of("aten.cdist.default", real(4, 6, 3), real(4, 8, 3)),
        case_of("aten.cdist.default", real(2, 4, 6, 3), real(4, 8, 3), 1.0),
        case_of("aten.cdist.default", real(4, 3), real(8, 3)),
    ]


def further_cases() -> list[Case]:
    """Operators that other families got with this one."""
    a, b = real(4, 6), real(6, 8)
    return [
        case_of("aten.copy.default", real(4, 6), real(6)),
        case_of("aten.copy.default", real(4, 6).float(), real(4, 6)),
        case_of("aten.copy.default", real(4, 6), torch.randint(9, (4, 6))),
        case_of("aten.copy.default", torch.randint(9, (4, 6)), torch.randint(9, (4, 6)).int()),
        case_of("aten.fill.Tensor", real(4, 6), real()),
        case_of("aten.fill.Scalar", real(4, 6), 2),
        case_of("aten.zero.default", real(4, 6)),
        case_of("aten.max.other", real(4, 6), real(6)),
        case_of("aten.min.other", real(4, 1), real(4, 6)),
        case_of("aten.isin.Tensor_Scalar", ints(3, 4, 6), 1),
        case_of("aten.lift_fresh_copy.default", real(4, 6)),
        case_of("aten.addmv.default", real(4), a, real(6), alpha=2, beta=3),
        case_of("aten.addmv.default", real(1), a, real(6)),
        case_of("aten.addr.default", real(4, 6), real(4), real(6), beta=2),
        case_of("aten.addbmm.default", real(4, 8), real(2, 4, 6), real(2, 6, 8), beta=2),
        case_of("aten.tensordot.default", a, b, [1], [0]),
        case_of("aten.tensordot.default", real(4, 6, 2), real(6, 8, 4), [-2, 0], [0, 2]),
        case_of("aten.tensordot.default", a, b, [], []),
        *(case_of("aten.slice.Tensor", real(4, 24), -1, a, None, step) for a, step in ((0, 2), (1, 2), (2, 3), (3, 3), (-24, 2), (2, 2))),
        case_of("aten.slice.Tensor", real(4, 24), 1, 0, 23, 2),
        case_of("aten.slice.Tensor", real(4, 24), 1, 0, 22, 2),
        case_of("aten.where.default", torch.ones(4, dtype=torch.bool)),
    ]


CASES = (embedding_cases, expert_cases, loss_cases, index_cases, along_cases, count_cases, rearranged_cases, further_cases)


@pytest.mark.parametrize("cases", CASES, ids=lambda f: f.__name__)
def test_every_stated_strategy_is_sound(cases: Callable[[], list[Case]]) -> None:
    tally = Tally()
    for case in cases():
        tally.run(case, sizes=(2,), groups=(1, 2))
    assert not tally.failures, "\n".join([f"{len(tally.failures)} unsound", *tally.failures[:20]])
    print(tally.table())


LOCAL_CASES = {
    "embedding": lambda: case_of("aten.embedding.default", real(8, 4), ints(8, 4, 6)),
    "padded embedding": lambda: case_of("aten.embedding.default", real(8, 4), torch.arange(8), 5),
    "cross entropy": lambda: case_of("aten.cross_entropy_loss.default", real(6, 8), ints(8, 6), None, 2),
    "sorted rows": lambda: case_of(
        "aten._grouped_mm.default", real(8, 32).bfloat16(), real(3, 32, 64).bfloat16(), torch.tensor([1, 5, 8]).int()
    ),
    "ignored labels": lambda: case_of("aten.cross_entropy_loss.default", real(4, 8), torch.tensor([1, 3, 3, 7]), None, 2, 3),
}


@pytest.mark.parametrize("name", LOCAL_CASES)
def test_local_code_under_a_second_axis(name: str) -> None:
    """The code that stands in for an operator is split once more: values and gradients over both axes together."""
    case = LOCAL_CASES[name]()
    view = case.view(2)
    (first,) = [s for s in strategies_of(view) if s.local is not None]
    (op,) = localized(view, first, "a")
    order = [int(r.removeprefix("x")) for r in refs(op)]
    parts = [[laid_out(v, x, 2)[r] for v, x in zip(case.values, first.inputs)] for r in range(2)]
    types = tuple(TensorType(tuple(parts[0][k].shape), parts[0][k].dtype) for k in order)
    second = OpView(op, types, tuple(TensorType(tuple(v.shape), v.dtype) for v in case.results), 2)
    whole = leaves(case.values)
    (truth,), _ = run_ops((case.op,), whole)
    upstream = torch.randn_like(truth)
    (true_gradient,) = torch.autograd.grad(truth, whole[0], upstream)
    split, made_as = [s for s in strategies_of(second) if s.splits_work], first.outputs[0]
    assert split
    for s in split:
        layouts = dict(zip(order, s.inputs))
        values, gradients = [], []
        for outer in range(2):
            lockstep = Lockstep(2)
            given = [leaves(laid_out(held[k], layouts[k], 2)[outer] for k in range(len(held))) for held in parts]
            results = lockstep.run(lambda rank: run_ops((op,), given[rank], lockstep.axis(rank))[0][0])  # noqa: B023
            made = [r.detach() for r in results]
            values.append(join(made, made_as) if made_as.is_shard else sum(made[1:], made[0]) if made_as == P else made[0])
            local = gradient_laid_out(gradient_laid_out(upstream, s.outputs[0], 2)[outer], made_as, 2)
            pieces = [torch.autograd.grad(r, g[0], u)[0] for r, g, u in zip(results, given, local)]
            gradients.append(join(pieces, first.inputs[0]))
        tolerance = tolerance_of(case.values)
        assert differs(values, truth.detach(), s.outputs[0], tolerance, gradient=False) is None, str(s)
        assert differs(gradients, true_gradient, layouts[0], tolerance, gradient=True) is None, str(s)
