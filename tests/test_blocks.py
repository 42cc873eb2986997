"""Which repeats of a program are found beside calls of modules: periods of a flat stack, and stacks whose first layer makes more."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.blocks import without_lead
from autopar.ir import Op, Program, Ref, map_refs, refs
from autopar.planner.account import generic
from autopar.planner.fold import fold

pytestmark = pytest.mark.pure


def flat(layers: int, *, first: int = 8, names: str = "") -> nn.Sequential:
    """Linear layers with an activation each; the first takes `first` features."""
    made: list[tuple[str, nn.Module]] = []
    for k in range(layers):
        made += [(f"{names}{2 * k}", nn.Linear(first if k == 0 else 8, 8)), (f"{names}{2 * k + 1}", nn.ReLU())]
    stack = nn.Sequential()
    for name, module in made:
        stack.add_module(name, module)
    return stack


def captured(model: nn.Module, *shape: int) -> Program:
    return capture(model, (torch.randn(*(shape or (4, 8))),), loss=lambda out: out.square().sum()).program


def targets(program: Program, block: int = 0) -> list[str]:
    span = program.blocks[block].spans[0]
    return [op.target.split(".")[1] for op in program.ops[span.start : span.stop]]


def spans(program: Program) -> list[list[tuple[int, int]]]:
    return [[(s.start, s.stop) for s in b.spans] for b in program.blocks]


def test_a_flat_stack_repeats_two_layers_at_a_time() -> None:
    """One decision holds for all instances: with two weights in each, one may be split by columns and the other by rows."""
    program = captured(flat(9))
    assert spans(program) == [[(2, 6), (6, 10), (10, 14), (14, 18)]], "the first layer alone takes what has no gradient"
    assert targets(program) == ["linear", "relu"] * 2
    assert spans(captured(flat(10))) == spans(program)


def test_a_short_flat_stack_repeats_one_layer_at_a_time() -> None:
    assert spans(captured(flat(4, first=6), 4, 6)) == [[(2, 4), (4, 6), (6, 8)]]
    assert spans(captured(flat(3))) == [], "two layers of one weight each are worth more apart"


def test_names_of_modules_play_no_part() -> None:
    assert spans(captured(flat(9, names="layer_"))) == spans(captured(flat(9)))


def test_equal_operators_side_by_side_are_no_stack() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.parts[0].bias  # with a gradient
            return torch.stack([part(x).relu().exp() for part in self.parts]).sum(0)

    assert spans(captured(Parallel())) == []


class Layer(nn.Module):
    """Adds a bias that the first layer makes from a table, and an offset that all may share."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.table = nn.Embedding(4, 8) if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x + self.up.bias[:8]
        if self.table is not None:
            rows = torch.arange(5) % 4
            bias = self.table(rows)
        assert bias is not None
        return x + self.down(F.relu(self.up(x + bias))), bias


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(first=k == 0) for k in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.enter(x), None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


def test_what_the_first_layer_makes_for_all_stands_before_the_stack() -> None:
    program = captured(Stack(), 4, 5, 8)
    ((first, second),) = [b.spans for b in program.blocks]
    assert len(first) == len(second) and first.stop == second.start
    assert program.blocks[0].prefixes == ("layers.0", "layers.1")
    before = [op.target for op in program.ops[: first.start]]
    assert "aten.embedding.default" in before and "aten.arange.default" in before
    assert "slice" in targets(program), "what a layer makes for itself stays in it"
    made: set[str] = {x.value for x in program.leaves}
    for op in program.ops:
        assert set(refs(op)) <= made
        made |= {o for o in op.outputs if o is not None}


@functools.cache
def _toy() -> tuple[tuple[Op, ...], list[tuple[str, ...]]]:
    """y = f(w) inside call m.a, then z = g(y) inside it, x = h(x) in it, and r = i(z, x) in m.b."""

    def op(name: str, *reads: str) -> Op:
        return Op(target="toy.op.default", args=tuple(map(Ref, reads)), outputs=(name,))

    ops = op("x0", "input"), op("x1", "x0"), op("y", "w"), op("z", "y"), op("own", "w"), op("x2", "x1", "own"), op("r", "z", "x2")
    return ops, [("m",), *[("m", "m.a")] * 5, ("m", "m.b")]


def test_only_what_is_read_elsewhere_moves() -> None:
    ops, calls = _toy()
    order, stacks = without_lead(ops, calls, {"w": ("param", True)}, lambda op: True)
    assert [ops[i].name for i in order] == ["x0", "y", "z", "x1", "own", "x2", "r"]
    assert stacks == [("m",), ("m",), ("m",), ("m", "m.a"), ("m", "m.a"), ("m", "m.a"), ("m", "m.b")]


def test_what_may_not_run_earlier_stays() -> None:
    ops, calls = _toy()
    in_place = list(range(len(ops)))
    assert without_lead(ops, calls, {"w": ("param", True)}, lambda op: op.name != "y") == (in_place, calls)
    assert without_lead(ops, calls, {"w": ("buffer", True)}, lambda op: True) == (in_place, calls), "a buffer that the step changes"


@pytest.mark.parametrize(
    "constant",
    [lambda x, k: x * (0.5 + k), lambda x, k: F.dropout(x, (0.0, 0.1)[k % 2]), lambda x, k: x.roll(1 + k, 1),
     lambda x, k: x.clamp(min=-1.0 - k), lambda x, k: x.masked_fill(x > 1, (0, False)[k % 2]), lambda x, k: F.dropout(x, (0.1, 1.0)[k % 2]),
     lambda x, k: x.sum((0, 1)[k % 2], keepdim=True) + x, lambda x, k: x * (0.5, float("nan"))[k % 2]],
)  # fmt: skip
def test_layers_with_other_constants_are_not_alike(constant: Callable[[Tensor, int], Tensor]) -> None:
    """The strategies of an operator may depend on them."""
    alike, others = layers(constant, 0, 0, 0, 0), layers(constant, 0, 1, 2, 3)
    assert max(len(b.spans) for b in alike.blocks) == 4
    for block in others.blocks:
        for first, second in itertools.combinations(block.spans, 2):
            pairs = zip(others.ops[first.start : first.stop], others.ops[second.start : second.stop], strict=True)
            assert all(repr(literals(a)) == repr(literals(b)) for a, b in pairs)
    assert all(len(b.spans) < 4 for b in others.blocks)


@pytest.mark.parametrize(
    "other",
    [lambda x, k: (x.sin() - x.cos(), x.cos() - x.sin())[k], lambda x, k: x.sin() * (x if k else 2.0),
     lambda x, k: (x.exp() if k else x.sin()) + 1, lambda x, k: x.detach().sin() + x if k else x.sin().detach() + x],
)  # fmt: skip
def test_layers_of_as_many_operators_that_do_other_things_are_not_alike(other: Callable[[Tensor, int], Tensor]) -> None:
    alike, others = layers(other, 0, 0, 0, 0), layers(other, 0, 0, 1, 0)
    assert max(len(b.spans) for b in alike.blocks) == 4
    assert len(alike.ops) == len(others.ops)
    assert all(len(b.spans) < 4 for b in others.blocks)


@pytest.mark.parametrize(
    "rate",
    [lambda x, k: F.dropout(x, 0.1 + 0.1 * k), lambda x, k: x * (0.9 - 0.1 * k), lambda x, k: x / (1 / (k + 2)),
     lambda x, k: F.layer_norm(x, (8,), eps=(1e-5, 1e-6)[k % 2])],
)  # fmt: skip
def test_layers_that_differ_in_rates_alone_are_alike(rate: Callable[[Tensor, int], Tensor]) -> None:
    """Each runs with its own."""
    program = layers(rate, 0, 1, 2, 3)
    (block,) = program.blocks
    assert len(block.spans) == 4
    first, second = (program.ops[s.start : s.stop] for s in block.spans[:2])
    assert [op.target for op in first] == [op.target for op in second]
    assert any(repr(literals(a)) != repr(literals(b)) for a, b in zip(first, second, strict=True))


def layers(of_layer: Callable[[Tensor, int], Tensor], *numbers: int) -> Program:
    class Layer(nn.Linear):
        def __init__(self, number: int) -> None:
            super().__init__(8, 8)
            self.number = number

        def forward(self, x: Tensor) -> Tensor:
            return of_layer(torch.tanh(super().forward(x)).exp(), self.number)

    return captured(nn.Sequential(nn.Linear(8, 8), *map(Layer, numbers)), 8, 8)  # the first, so that all take what has a gradient


class Tower(nn.Module):
    """Layers between an entry and an exit of their own."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).sin()
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x).cos()


@pytest.mark.parametrize(("towers", "depth", "instances", "size"), [(2, 8, [8, 8], 5), (3, 2, [3], 2 * 5 + 4)])
def test_of_equal_towers_the_layers_are_the_blocks_where_they_are_many(towers: int, depth: int, instances: list[int], size: int) -> None:
    program = captured(nn.Sequential(nn.Linear(8, 8), *(Tower(depth) for _ in range(towers))))
    assert [len(b.spans) for b in program.blocks] == instances
    assert all(len(b.spans[0]) == size for b in program.blocks)
    assert program.blocks[0].prefixes[-1] == ("1.layers.7" if towers == 2 else "3")


class Looped(nn.Module):
    """Lists of modules, of which a loop takes one each: `experts` of each layer, of which the results are added to the stream."""

    def __init__(self, depth: int, experts: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(depth))
        self.layers: Any = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(experts)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        for norm, experts in zip(self.norms, self.layers, strict=True):
            x = x + sum(expert(norm(x)) for expert in experts)
        return x.cos()


@pytest.mark.parametrize("experts", [1, 3])
def test_what_a_loop_makes_between_calls_is_part_of_the_block(experts: int) -> None:
    """Else each sum of the stream would be decided for itself, and no two layers would be seen to follow one another."""
    program = captured(Looped(6, experts))
    assert [len(b.spans) for b in program.blocks] == [6]
    assert targets(program) == ["layer_norm", "linear", "gelu", "linear", "add"] * experts + ["add"]
    assert program.blocks[0].prefixes[2] == "norms.2, layers.2", "the modules that no other instance has"
    assert generic(program.blocks[0].prefixes[2]) == "norms.*, layers.*"
    assert len(fold(program).ops) == len(fold(captured(Looped(4, experts))).ops) < len(program.ops)


class Ends(Looped):
    """The same, and layers that follow one another behind it, of which the last is as those in the loop are."""

    def __init__(self) -> None:
        super().__init__(4)
        self.last = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()) for _ in range(3)))
        self.alone = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.alone(self.last(super().forward(x)))


def test_calls_that_repeat_elsewhere_stay_blocks() -> None:
    program = captured(Ends())
    assert [(len(b.spans), len(b.spans[0])) for b in program.blocks] == [(4, 6), (3, 4)]
    taken = sorted(k for b in program.blocks for s in b.spans for k in range(s.start, s.stop))
    assert len(set(taken)) == len(taken)


def literals(op: Op) -> tuple[object, ...]:
    """The arguments of an operator that are no values."""
    plain = map_refs(op, lambda _: None)
    return op.target, plain.args, plain.kwargs
