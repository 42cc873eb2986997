"""Rows that ranks sort by themselves: what capture finds, what it leaves, and that they compute what all rows together do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.capture import capture
from autopar.ir import L, Layout, P, Program, R, S
from autopar.planner import Pins
from autopar.planner.lower import on_data_axis
from autopar.planner.moments import split_into_moments
from autopar.planner.resources import choose_cluster
from autopar.planner.search import Search
from tests.routed_model import EACH, EXPERTS, ROWS, WIDTH, Experts, added_up, put_back, sorted_back

pytestmark = pytest.mark.pure

def _program(model: Experts) -> Program:
    torch.manual_seed(1)
    return capture(model.double(), (torch.randn(ROWS, WIDTH, dtype=torch.double), torch.randn(ROWS, WIDTH, dtype=torch.double))).program


def _by_rows(program: Program) -> dict[str, tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
    return {op.target.split(".")[1]: (op.by_rows.inputs, op.by_rows.outputs) for op in program.ops if op.by_rows is not None}


@pytest.mark.parametrize("back", [put_back, sorted_back, added_up])
def test_what_stands_in_the_order_of_a_sort_may_be_sorted_by_each_rank(back: Callable[..., Tensor]) -> None:
    found = _by_rows(_program(Experts(back)))
    assert found["sort"] == ((S(0),), (L, L))
    assert found["histc"] == ((L,), (P,))
    assert found["grouped_mm_fallback"] == ((L, R, P), (L,))
    assert found["layer_norm"] == ((L, R, R), (L,))
    last = "index_add" if back is added_up else "index"
    assert found[last] == (((S(0), L, L), (S(0),)) if back is added_up else ((L, L), (S(0),)))
    assert ("arange" in found) == (back is put_back)


def _running_sum(out: Tensor, order: Tensor, share: Tensor) -> Tensor:
    return out.cumsum(0)


def _first_rows(out: Tensor, order: Tensor, share: Tensor) -> Tensor:
    return out * (torch.arange(ROWS * EACH) < 5).unsqueeze(-1)


def _whole_places(out: Tensor, order: Tensor, share: Tensor) -> Tensor:
    return out * order.unsqueeze(-1)


def _square(out: Tensor, order: Tensor, share: Tensor) -> Tensor:
    return out + (out @ out.T) @ out


def _shares_summed(out: Tensor, order: Tensor, share: Tensor) -> Tensor:
    return out * (share @ torch.ones(ROWS * EACH, ROWS * EACH, dtype=share.dtype)).unsqueeze(-1)


def _another_order(out: Tensor, order: Tensor, share: Tensor) -> Tensor:
    return out * share[torch.sort(torch.topk(out, 2).indices.reshape(-1)[: ROWS * EACH])[1]].unsqueeze(-1)


@pytest.mark.parametrize("between", [_running_sum, _first_rows, _whole_places, _square, _shares_summed, _another_order])
def test_a_sort_whose_order_counts_otherwise_is_left_as_it_is(between: Callable[..., Tensor]) -> None:
    found = _by_rows(_program(Experts(put_back, between)))
    assert "grouped_mm_fallback" not in found
    assert "histc" not in found


@pytest.mark.parametrize("model", [{"top": EXPERTS}, {"descending": True}])
def test_groups_that_are_not_those_of_the_rows_are_left_as_they_are(model: dict[str, int]) -> None:
    assert "sort" not in _by_rows(_program(Experts(**model)))  # bins that are not the keys; rows in another order than the groups


def test_keys_that_may_be_of_no_group_are_left_as_they_are() -> None:
    class Given(Experts):
        def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
            chosen, weight = super().route(x)
            return chosen - 1, weight

    assert "sort" not in _by_rows(_program(Given()))


def test_an_order_that_is_returned_or_read_twice_is_left_as_it_is() -> None:
    class Kept(Experts):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            weight, chosen = torch.topk(self.router(x).softmax(-1), EACH)
            keys, order = torch.sort(chosen.reshape(-1))
            return super().forward(x, y) + (weight.reshape(-1)[order] * torch.linspace(0, 1, ROWS * EACH, dtype=x.dtype)).sum()

    program = _program(Kept())
    sorts = [op for op in program.ops if op.target.startswith("aten.sort")]
    assert [op.by_rows is not None for op in sorts].count(False) >= 1


@pytest.mark.parametrize("back", [put_back, sorted_back, added_up])
def test_micro_batches_and_data_parallel_ranks_sort_their_own_rows(back: Callable[..., Tensor]) -> None:
    program = _program(Experts(back))
    body = split_into_moments(program, 4).body
    assert [body.types[op.outputs[0]].shape for op in body.ops if op.target.startswith("aten.sort")] == [(ROWS * EACH // 4,)]
    search = Search(
        program=program, gpus=2, cluster=choose_cluster("dgx-h100"), memory_limit_bytes=2**30, optimizer="adamw", precision="fp32",
        pins=Pins(dp=2),
    )  # fmt: skip
    local, assignment, _ = search.known.on_data_axis(2)
    assert assignment is not None
    grouped = [op for op in program.ops if op.target.startswith("transformers.grouped")]
    assert {assignment.ops[op.name] for op in grouped} == {op.by_rows for op in grouped} != {None}
    again = on_data_axis(program, assignment)
    exchanged = [op.target for op in again.ops if op.target.startswith("autopar.C.") and "reduce" not in op.target]
    assert exchanged == []
    assert local.types[next(op for op in local.ops if op.target.startswith("aten.sort")).outputs[0]].shape == (ROWS * EACH // 2,)

