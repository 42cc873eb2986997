"""What a view carries is what the numbers of its elements say: every cut of every reshape of small tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from soundness_harness import cut

from autopar.catalog import OpView, strategies_of
from autopar.ir import Layout, Op, Ref, S, TensorType

pytestmark = pytest.mark.pure
SIZES = (1, 2, 3, 4, 6, 8)


def shapes(numel: int) -> list[tuple[int, ...]]:
    return [s for k in (1, 2, 3) for s in itertools.product(SIZES, repeat=k) if math.prod(s) == numel]


def parts(shape: tuple[int, ...], layout: Layout, n: int) -> list[list[int]]:
    """The numbers that each rank holds, in their order on it."""
    numbered = torch.arange(math.prod(shape)).reshape(shape)
    return [cut(numbered, layout, n, rank).flatten().tolist() for rank in range(n)]


def layouts(shape: tuple[int, ...], n: int) -> list[Layout]:
    return [x for d in range(len(shape)) for g in (1, 2, 3, 4) if (x := S(d, g)).divides(shape, n)]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("numel", [12, 24])
def test_reshapes(numel: int, n: int) -> None:
    """A strategy is stated only if both cuts give every rank the same numbers in the same order; of the cuts of the operand, each that
    is one of the result is stated in some form."""
    stated = 0
    for before, after in itertools.product(shapes(numel), repeat=2):
        op = Op(target="aten.reshape.default", args=(Ref("x"), after), outputs=("y",))
        types = TensorType(before, torch.float32, True), TensorType(after, torch.float32, True)
        view = OpView(op, types[:1], types[1:], n, frozenset({1, 2, 3, 4}))
        found = [(s.inputs[0], s.outputs[0]) for s in strategies_of(view) if s.splits_work]
        for have, made in found:
            assert parts(before, have, n) == parts(after, made, n), (before, have, after, made)
        stated += len(found)
        carried = {tuple(map(tuple, parts(after, x, n))) for x in layouts(after, n)}
        for have in layouts(before, n):
            if have.groups == 1 and tuple(map(tuple, parts(before, have, n))) in carried and before[have.dim] > 1:
                assert any(x == have for x, _ in found), (before, have, after)
    assert stated > 100


def test_a_view_that_turns_sizes_around() -> None:
    """Half of 6 rows of 4 is half of 4 rows of 6; a third of them, or half of each row, is no cut of the other."""
    for n, expected in ((2, {(S(0), S(0))}), (3, set())):
        op = Op(target="aten.reshape.default", args=(Ref("x"), (4, 6)), outputs=("y",))
        view = OpView(op, (TensorType((6, 4), torch.float32, True),), (TensorType((4, 6), torch.float32, True),), n)
        assert {(s.inputs[0], s.outputs[0]) for s in strategies_of(view) if s.splits_work} == expected


@pytest.mark.parametrize("repeats", [(2,), (2, 3), (1, 2), (3, 1, 1)], ids=str)
def test_repeats(repeats: tuple[int, ...]) -> None:
    """A cut of the operand in groups is a cut of its copies in as many times the groups."""
    shape = (12,) if len(repeats) == 1 else (4, 12)
    after = tuple(torch.zeros(shape).repeat(repeats).shape)
    op = Op(target="aten.repeat.default", args=(Ref("x"), repeats), outputs=("y",))
    view = OpView(op, (TensorType(shape, torch.float32, True),), (TensorType(after, torch.float32, True),), 2, frozenset({1, 2, 3}))
    numbered = torch.arange(math.prod(shape)).reshape(shape)
    grouped = 0
    for s in strategies_of(view):
        if s.inputs[0].is_shard:
            grouped += s.outputs[0].groups > 1
            for rank in range(2):
                local = cut(numbered, s.inputs[0], 2, rank).repeat(repeats)
                assert torch.equal(local, cut(numbered.repeat(repeats), s.outputs[0], 2, rank)), str(s)
    assert grouped > 1
