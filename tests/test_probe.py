"""What probing finds out about operators that no rule knows: custom operators that may be split over the batch, and those that not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from autopar.capture import capture
from autopar.catalog import OpView, rule, rule_of, strategies_of
from autopar.catalog import probe as probing
from autopar.catalog.probe import probed
from autopar.compiler import emit, plan_of
from autopar.errors import Infeasible, PlanError
from autopar.ir import Arg, I, Op, R, Ref, Strategy, TensorType
from autopar.planner import Plan
from autopar.run import WorkerPool
from autopar.verify import TOLERANCE, verify

BATCH, WIDTH = 24, 10
calls: list[tuple[int, ...]] = []  # shapes that operators below were called with


def custom(schema: str, *, grad: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as probe_tests::NAME, which no rule knows; its results are fresh tensors, its gradients the function's."""

    def define(fn: Callable[..., Any]) -> Callable[..., Any]:
        op = library.custom_op(f"probe_tests::{fn.__name__}", fn, mutates_args=(), schema=schema)
        op.register_fake(fn)

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.inputs = inputs

        def backward(ctx: Any, *arriving: Tensor) -> tuple[Any, ...]:
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in ctx.inputs]
                results = fn(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            asked = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            pairs = [(r, g) for r, g in zip(results, arriving, strict=True) if r.requires_grad]
            found = iter(torch.autograd.grad([r for r, _ in pairs], asked, [g for _, g in pairs], allow_unused=True))
            return tuple(next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs)

        if grad:
            op.register_autograd(backward, setup_context=setup)
        return op

    return define


def f(*shape: int, grad: bool = True) -> TensorType:
    return TensorType(shape, torch.float32, grad)


def ints(*shape: int) -> TensorType:
    return TensorType(shape, torch.int64)


def view(name: str, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], n: int = 4, constants: tuple[Arg, ...] = ()) -> OpView:
    args = (*(Ref(f"v{k}") for k in range(len(ins))), *constants)
    outputs = tuple(f"y{k}" for k in range(len(outs)))
    op = Op(target=f"probe_tests.{name}.default", args=args, outputs=outputs, multi=len(outs) > 1)
    assert rule_of(op.target) is None
    return OpView(op, ins, outs, n)


def found(*args: Any, **kwargs: Any) -> list[str]:
    """What is found beside the trivial strategies, as text."""
    v = view(*args, **kwargs)
    trivial = {Strategy(inputs=(x,) * len(v.ins), outputs=(x,) * len(v.outs)) for x in (I, R)}
    strategies = strategies_of(v)
    assert strategies[0].inputs[0] == I
    return [str(s) for s in strategies if s not in trivial]


# ------------------------------------------------------------------------------------------------------- may be split
@custom("(Tensor x, float cap) -> Tensor")
def softened(x: Tensor, cap: float) -> Tensor:
    calls.append(tuple(x.shape))
    return cap * torch.tanh(x / cap)


@custom("(Tensor x, Tensor weight, Tensor bias) -> Tensor")
def weighted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (F.linear(x, weight) + bias).exp().log1p()


@custom("(Tensor table, Tensor index) -> Tensor")
def looked_up(table: Tensor, index: Tensor) -> Tensor:
    return table[index] * 2


@custom("(Tensor x) -> (Tensor, Tensor)")
def split_and_summed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1), (x * x).sum(0)


@custom("(Tensor x, Tensor index) -> (Tensor, Tensor)")
def counted(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return x * index[:, None], index.sum()


@custom("(Tensor x) -> Tensor", grad=False)
def positive(x: Tensor) -> Tensor:
    return x.log()


@custom("(Tensor x, int heads) -> Tensor")
def by_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).cumsum(-1).flatten(-2)


@pytest.mark.pure
def test_rows_of_their_own() -> None:
    assert found("softened", (f(BATCH, WIDTH),), (f(BATCH, WIDTH),), constants=(2.0,)) == ["S(0) -> S(0)"]


@pytest.mark.pure
@pytest.mark.parametrize("n", [2, 3, 4, 8, 24])
def test_for_every_number_of_ranks_that_divides(n: int) -> None:
    assert found("softened", (f(BATCH, 5),), (f(BATCH, 5),), n=n, constants=(2.0,)) == ["S(0) -> S(0)"]


@pytest.mark.pure
def test_not_where_the_batch_does_not_divide() -> None:
    assert found("softened", (f(7, 5),), (f(7, 5),), n=2, constants=(2.0,)) == []


@pytest.mark.pure
def test_weights_are_replicated_and_their_gradients_are_sums() -> None:
    ins = (f(BATCH, 6, WIDTH), f(8, WIDTH), f(8))
    assert found("weighted", ins, (f(BATCH, 6, 8),)) == ["S(0) R R -> S(0)"]


@pytest.mark.pure
def test_a_weight_with_as_many_rows_as_the_batch_stays_whole() -> None:
    ins = (f(BATCH, WIDTH), f(BATCH, WIDTH), f(BATCH))
    assert found("weighted", ins, (f(BATCH, BATCH),)) == ["S(0) R R -> S(0)"]


@pytest.mark.pure
def test_an_index_is_split_and_its_table_not() -> None:
    assert found("looked_up", (f(30, 8), ints(BATCH, 5)), (f(BATCH, 5, 8),)) == ["R S(0) -> S(0)"]
    assert found("looked_up", (f(BATCH, 8), ints(BATCH)), (f(BATCH, 8),)) == ["R S(0) -> S(0)"]


@pytest.mark.pure
def test_sums_over_the_batch_are_terms() -> None:
    assert found("split_and_summed", (f(BATCH, WIDTH),), (f(BATCH, WIDTH), f(WIDTH))) == ["S(0) -> S(0) P"]
    outs = f(BATCH, WIDTH), TensorType((), torch.int64)
    assert found("counted", (f(BATCH, WIDTH), ints(BATCH)), outs) == ["S(0) S(0) -> S(0) P"]


@pytest.mark.pure
def test_positive_operands_are_tried_too() -> None:
    assert found("positive", (f(BATCH, WIDTH, grad=False),), (f(BATCH, WIDTH, grad=False),)) == ["S(0) -> S(0)"]


@pytest.mark.pure
def test_large_operands_are_reduced_as_far_as_the_operator_takes_it() -> None:
    calls.clear()
    assert found("softened", (f(BATCH, 4096, 1024),), (f(BATCH, 4096, 1024),), constants=(2.0,)) == ["S(0) -> S(0)"]
    assert calls and max(torch.Size(shape).numel() for shape in calls) < 10_000
    assert found("by_heads", (f(BATCH, 4096, 96),), (f(BATCH, 4096, 96),), constants=(12,)) == ["S(0) -> S(0)"]
    assert found("by_heads", (f(BATCH, 4096, 1 << 16),), (f(BATCH, 4096, 1 << 16),), constants=(1 << 16,)) == [], "none is small enough"


# ----------------------------------------------------------------------------------------------------- may not be split
@custom("(Tensor x) -> Tensor")
def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


@custom("(Tensor x) -> Tensor")
def over_the_largest(x: Tensor) -> Tensor:
    return x / x.abs().max()


@custom("(Tensor x) -> Tensor")
def averaged(x: Tensor) -> Tensor:
    return x.square().mean()


@custom("(Tensor x) -> Tensor")
def in_pairs(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


@custom("(Tensor x) -> Tensor")
def numbered(x: Tensor) -> Tensor:
    return x + torch.arange(len(x), dtype=x.dtype, device=x.device)[:, None]


@custom("(Tensor x) -> Tensor")
def constant(x: Tensor) -> Tensor:
    return (x.amax() > 1e9).to(x.dtype).expand(len(x)).clone()


@custom("(Tensor x) -> Tensor", grad=False)
def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


@custom("(Tensor x) -> Tensor", grad=False)
def noisy_by_python(x: Tensor) -> Tensor:
    return x + random.random()  # noqa: S311


@custom("(Tensor x) -> Tensor", grad=False)
def noisy_by_numpy(x: Tensor) -> Tensor:
    return x + numpy.random.standard_normal()


@custom("(Tensor x) -> Tensor", grad=False)
def secretly_drawing(x: Tensor) -> Tensor:
    torch.rand(1)
    return x * 2


_count = [0]


@custom("(Tensor x) -> Tensor", grad=False)
def stateful(x: Tensor) -> Tensor:
    _count[0] += 1
    return x * _count[0]


@custom("(Tensor x) -> Tensor", grad=False)
def secretly_writing(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x * 2


@custom("(Tensor x) -> Tensor", grad=False)
def refusing(x: Tensor) -> Tensor:
    raise RuntimeError("only on a GPU")


@custom("(Tensor x) -> Tensor", grad=False)
def captured_only(x: Tensor) -> Tensor:
    assert tuple(x.shape) == (BATCH, WIDTH), "of one size"
    return x * 2


@custom("(Tensor x) -> Tensor", grad=False)
def without_derivative(x: Tensor) -> Tensor:
    return x * 2


REJECTED = (
    centred, over_the_largest, averaged, in_pairs, numbered, constant, noisy, noisy_by_python, noisy_by_numpy, secretly_drawing, stateful,
    secretly_writing, refusing, captured_only, without_derivative,
)  # fmt: skip


@pytest.mark.pure
@pytest.mark.parametrize("name", [op._name for op in REJECTED])
def test_what_is_not_split(name: str) -> None:
    name = name.removeprefix("probe_tests::")
    out = f() if name == "averaged" else f(BATCH) if name == "constant" else f(BATCH, WIDTH)
    assert found(name, (f(BATCH, WIDTH),), (out,)) == []


@pytest.mark.pure
def test_an_operator_that_states_its_effects_is_not_called() -> None:
    seen: list[str] = []
    with library._scoped_library("probe_effects", "DEF") as defined:
        defined.define("writes(Tensor(a!) x) -> Tensor")
        defined.define("draws(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
        defined.define("unimplemented(Tensor x) -> Tensor")
        for name in ("writes", "draws"):
            defined.impl(name, lambda x, name=name: seen.append(name) or x * 2, "CPU")  # type: ignore[func-returns-value]
        for name in ("writes", "draws", "unimplemented"):
            op = Op(target=f"probe_effects.{name}.default", args=(Ref("v"),), outputs=("y",))
            assert probed(op, (f(BATCH, 4, grad=False),), (f(BATCH, 4, grad=False),), 2).strategies == ()
    assert seen == []


def _clipped_setup(ctx: Any, inputs: Any, output: Any) -> None:
    pass


@library.custom_op("probe_tests::signed_backward", mutates_args=())
def signed_backward(x: Tensor) -> Tensor:
    """Passes on the signs of gradients, row by row."""
    return x.clone()


signed_backward.register_fake(torch.empty_like)
signed_backward.register_autograd(lambda ctx, grad: grad.sign(), setup_context=_clipped_setup)


@library.custom_op("probe_tests::normed_backward", mutates_args=())
def normed_backward(x: Tensor) -> Tensor:
    """Passes on gradients of norm one."""
    return x.clone()


normed_backward.register_fake(torch.empty_like)
normed_backward.register_autograd(lambda ctx, grad: grad / grad.norm(), setup_context=_clipped_setup)


@pytest.mark.pure
def test_a_backward_that_is_not_linear_is_not_given_terms_of_a_sum() -> None:
    t = f(BATCH, WIDTH)
    assert [str(s) for s in strategies_of(view("signed_backward", (t,), (t,)))] == ["I -> I", "S(0) -> S(0)"]
    assert [str(s) for s in strategies_of(view("normed_backward", (t,), (t,)))] == ["I -> I"]
    assert [str(s) for s in strategies_of(view("centred", (t,), (t,)))] == ["I -> I", "R -> R"]


# ------------------------------------------------------------------------------------------------------------- effects
@pytest.fixture
def forgotten() -> None:
    """Nothing is known from before."""
    rule._KNOWN.clear()
    probing._KNOWN.clear()


@pytest.mark.pure
def test_probing_leaves_no_trace_and_finds_the_same_again(forgotten: None) -> None:
    ins, outs = (f(BATCH, 6, WIDTH), f(8, WIDTH), f(8)), (f(BATCH, 6, 8),)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with torch.no_grad():
        first = strategies_of(view("weighted", ins, outs))
        assert not torch.is_grad_enabled()
    strategies_of(view("noisy", (f(BATCH, WIDTH),), (f(BATCH, WIDTH),)))
    strategies_of(view("noisy_by_numpy", (f(BATCH, WIDTH),), (f(BATCH, WIDTH),)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    probing._KNOWN.clear()
    torch.manual_seed(7)
    assert tuple(probed(view("weighted", ins, outs).op, ins, outs, 4).strategies) == first[2:]


@pytest.mark.pure
def test_an_operator_is_probed_once_for_its_types(forgotten: None) -> None:
    ins = (f(BATCH, WIDTH),)
    strategies_of(view("softened", ins, ins, constants=(3.0,)))
    calls.clear()
    again = view("softened", ins, ins, constants=(3.0,))
    strategies_of(OpView(again.op, ins, ins, again.n, frozenset({1, 2})))
    assert not calls
    strategies_of(view("softened", ins, ins, constants=(4.0,)))
    assert calls


# --------------------------------------------------------------------------------------------------------------- plans
class Net(nn.Module):
    """A network with operators of its own in the middle; with `mixed`, one of them relates samples."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 8)
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.zeros(16))
        self.mixed = mixed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = weighted(softened(self.before(x), 2.0), self.weight, self.bias)
        return F.cross_entropy(self.after(centred(x) if self.mixed else x), y)


def net(mixed: bool = False) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Net(mixed), (torch.randn(BATCH, 16), torch.arange(BATCH) % 8)


@pytest.mark.pure
def test_a_plan_says_what_is_probed_and_what_is_replicated() -> None:
    captured = capture(*net(mixed=True), check=False)
    plan = plan_of(captured, 2, cluster="cpu", pins={"dp": 2})
    (split,) = [note for note in plan.notes if "as probed" in note]
    (replicated,) = [note for note in plan.notes if "so replicated" in note]
    assert split.startswith("without a rule, split over dim 0 as probed")
    assert "softened.default x1" in split and "weighted.default x1" in split and "centred" not in split
    assert "centred.default x1" in replicated and "softened" not in replicated
    with pytest.raises(Infeasible, match="probe_tests.centred.default"):
        plan_of(captured, 1, cluster="cpu", pins={"micro_batches": 2})


@pytest.mark.pure
def test_a_plan_read_from_a_file_is_probed_again(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(*net(), check=False)
    plan = Plan.from_json(plan_of(captured, 2, cluster="cpu", pins={"dp": 2, "micro_batches": 2}).to_json())
    source = emit(captured, plan)
    rule._KNOWN.clear()
    probing._KNOWN.clear()
    assert emit(captured, plan) == source
    rule._KNOWN.clear()
    monkeypatch.setattr(rule, "probed", lambda op, ins, outs, n: probing.Probed())
    with pytest.raises(PlanError, match="has no strategy 'S\\(0\\)"):
        emit(captured, plan)
    rule._KNOWN.clear()


@pytest.mark.gloo
@pytest.mark.parametrize("mixed", [False, True])
def test_equals_the_original(mixed: bool, workers: WorkerPool) -> None:
    model, inputs = net(mixed)
    pins = {"dp": 4} if mixed else {"dp": 2, "pp": 2, "micro_batches": 2}
    report = verify(model, inputs, 4, pins=pins, cluster="cpu", pool=workers)
    assert report.ok and max(report.loss, report.gradient, report.parameter) < TOLERANCE
    assert any("as probed" in note for note in report.plan.notes)
