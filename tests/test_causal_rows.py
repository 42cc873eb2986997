"""Causal attention whose queries are split, where its heads do not divide."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.catalog import OpView, strategies_of
from autopar.catalog.attention import BY_ROWS, CAUSAL_ROWS
from autopar.compiler import plan_of
from autopar.ir import Arg, Op, R, Ref, S, TensorType
from autopar.measure import count
from autopar.run import WorkerPool
from autopar.verify import reference, verify_plan

ATTENTION = "aten.scaled_dot_product_attention.default"
HEADS, LENGTH, WIDTH = 3, 16, 24


class Decoder(nn.Module):
    """Two layers of three heads; grouped: one key head for all of them."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped
        self.q = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(WIDTH, 2 * (WIDTH // HEADS if grouped else WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for q, kv in zip(self.q, self.kv, strict=True):
            query, key, value = (t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in (q(x), *kv(x).chunk(2, -1)))
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x.square().mean()


def view_of(query: tuple[int, ...], key: tuple[int, ...], n: int, **kwargs: Arg) -> OpView:
    ins = tuple(TensorType(shape, torch.float32, True) for shape in (query, key, key))
    given = {"is_causal": True, **kwargs}
    op = Op(target=ATTENTION, args=tuple(map(Ref, "qkv")), kwargs=tuple(given.items()), outputs=("y",))
    return OpView(op, ins, (ins[0],), n)


@pytest.mark.pure
def test_only_a_square_attention_that_draws_nothing_splits_its_queries() -> None:
    by_rows = {s for s in strategies_of(view_of((4, 3, 16, 8), (4, 3, 16, 8), 4)) if s.local == BY_ROWS}
    assert [(s.inputs, s.outputs) for s in by_rows] == [((S(2), R, R), (S(2),))]
    heads = 4, 3
    for rows, keys, dropout in ((16, 32, 0.0), (18, 18, 0.0), (16, 16, 0.5)):
        view = view_of((*heads, rows, 8), (*heads, keys, 8), 4, dropout_p=dropout)
        assert not any(x == S(2) for s in strategies_of(view) for x in s.inputs)


@pytest.mark.pure
@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_rank_with_the_last_queries_is_counted(n: int) -> None:
    """Of the scores of all, which are half of length * length, its own queries read all before them and half of its own."""
    whole, part = (TensorType((4, 3, rows, 8), torch.float32, True) for rows in (512, 512 // n))
    op = Op(target=CAUSAL_ROWS, args=tuple(map(Ref, "qkv")), kwargs=(("axis", "tp"),), outputs=("y",))
    scores = sum(512 - 512 // n + row + 0.5 for row in range(512 // n))
    c = count(op, (part, whole, whole), (part,))
    assert c.flops == pytest.approx(2 * 4 * 3 * scores * (8 + 8))
    assert c.backward_flops == 2.5 * c.flops


@pytest.mark.gloo
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("pins", [{"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_equals_the_original(grouped: bool, pins: dict[str, int], workers: WorkerPool) -> None:
    torch.manual_seed(0)
    ref = reference(Decoder(grouped), (torch.randn(4, LENGTH, WIDTH),))
    plan = plan_of(ref.captured, 4, cluster="cpu", pins=pins)
    assert any(BY_ROWS in text for text in plan.axes["tp"].ops.values())
    report = verify_plan(ref, plan, workers, timeout_s=120)
    assert report.ok, report
