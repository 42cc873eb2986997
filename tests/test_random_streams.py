"""Random numbers of a step: the same on replicas, different on shards, micro-batches, stages and steps, from the user's seed.

The model looks up a row for each sample, multiplies it with random numbers and adds everything up: the gradient of the rows is these
random numbers, whole and by sample, and the loss is the sum of the rows times them.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.catalog import OpView, localized, strategies_of
from autopar.catalog.rule import draws
from autopar.compiler import plan_of
from autopar.draws import Recorder, drawn_names, draws_given
from autopar.errors import UnsupportedOp
from autopar.ir import Op, Ref, S, TensorType
from autopar.planner.moments import derived_from_inputs, split_into_moments
from autopar.run import WorkerPool, local_ops
from autopar.run.form import Form
from autopar.run.mesh import Axis
from autopar.run.random_numbers import seed_generators, seeded
from autopar.verify import reference, verify_plan

pytestmark = pytest.mark.gloo
SAMPLES, FEATURES = 8, 32


class Rows(nn.Module):
    """kind: how the random numbers are drawn, twice; between them stands a layer, at which a pipeline may be cut."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Embedding(SAMPLES, FEATURES), nn.Embedding(SAMPLES, FEATURES)
        self.between = nn.Linear(FEATURES, FEATURES, bias=False)

    def times(self, x: Tensor) -> Tensor:
        match self.kind:
            case "dropout":
                return F.dropout(x, 0.5)
            case "noise":
                return x * torch.randn_like(x)
            case "factory":
                return x * torch.rand(x.shape)
            case "in place":
                return x * torch.empty_like(x).uniform_(0.5, 1.5)
            case "drawn from a result":
                return x * torch.bernoulli(torch.sigmoid(x.detach()))
            case "shared":
                return x * torch.rand(FEATURES)
        raise AssertionError(self.kind)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.times(self.first(ids))
        second = self.times(self.second(ids))
        return first.sum() + second.sum() + 0 * self.between(first).sum()


def draws_of(kind: str, pins: dict[str, Any], seed: int = 3, steps: int = 2) -> tuple[list[tuple[Tensor, Tensor]], list[float]]:
    """In a worker: the random numbers of each step, and by how much the loss is not what they make of the rows."""
    torch.manual_seed(0)
    model = Rows(kind)
    rows = [model.first.weight.detach().clone(), model.second.weight.detach().clone()]
    torch.manual_seed(seed)
    ids = torch.arange(SAMPLES)
    module = autopar.compile(model, gpus=4, example_inputs={"ids": ids}, cluster="cpu", pins=pins)
    found, errors = [], []
    for _ in range(steps):
        module.zero_grad()
        loss = module(ids=ids)
        loss.backward()
        grads = module.full_gradients()
        pair = grads["first.weight"], grads["second.weight"]
        found.append(pair)
        errors.append(abs(loss.item() - sum((r * g).sum().item() for r, g in zip(rows, pair, strict=True))))
    return found, errors


PLANS: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "micro_batches": 2}, {"dp": 4}, {"pp": 2, "dp": 2, "micro_batches": 2}, {"dp": 4, "zero": 3}
]  # fmt: skip


@pytest.mark.parametrize("pins", PLANS, ids=str)
@pytest.mark.parametrize("kind", ["dropout", "noise", "factory", "in place", "drawn from a result"])
def test_no_two_parts_share_their_numbers(kind: str, pins: dict[str, Any], workers: WorkerPool) -> None:
    results = workers.run(draws_of, kind, pins)
    for found, errors in results:
        assert max(errors) < 1e-3, "backward has other numbers than forward"
        for step, pair in enumerate(found):
            for mine, theirs in zip(pair, results[0][0][step], strict=True):
                assert torch.equal(mine, theirs), "the ranks do not agree on what was drawn"
    (first, second), (first_2, second_2) = results[0][0]
    whole = [first, second, first_2, second_2]
    for k, a in enumerate(whole):
        assert a.unique().numel() > 1
        for b in whole[k + 1 :]:
            assert not torch.equal(a, b), "two draws of a step, or two steps, share their numbers"
        rows = [tuple(r.tolist()) for r in a]
        assert len(set(rows)) == SAMPLES, "two samples share their numbers: shards or micro-batches draw the same"
        left, right = a.chunk(2, 1)
        assert not torch.equal(left, right), "two parts of the features share their numbers"


@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_what_is_drawn_once_for_all_samples_is_the_same_for_all(pins: dict[str, Any], workers: WorkerPool) -> None:
    found, errors = workers.run(draws_of, "shared", pins)[0]
    assert max(errors) < 1e-3
    for pair in found:
        for drawn in pair:
            assert torch.equal(drawn, drawn[:1].expand_as(drawn)) and drawn[0].unique().numel() > 1


def test_the_users_seed_decides(workers: WorkerPool) -> None:
    for kind in ("dropout", "noise"):
        pins = {"dp": 2, "tp": 2}
        one, again, other = (workers.run(draws_of, kind, pins, seed)[0][0][0][0] for seed in (3, 3, 4))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def drawn_after(seeds: tuple[int, ...]) -> list[Tensor]:
    """In a worker: what is drawn where the model was initialised between the user's seed and compile, as most scripts do."""
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        model, ids = Rows("dropout"), torch.arange(SAMPLES)
        module = autopar.compile(model, gpus=4, example_inputs={"ids": ids}, cluster="cpu", pins={"dp": 2, "tp": 2})
        module(ids=ids).backward()
        found.append(module.full_gradients()["first.weight"])
    return found


def test_the_users_seed_decides_where_it_was_used_before_compile(workers: WorkerPool) -> None:
    for one, other in workers.run(drawn_after, (3, 4)):
        assert not torch.equal(one, other)


def after_a_seed(drawing: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """In a worker: the losses after each of two equal seeds, of another seed, and without any; these ranks draw a number of their own
    between a seed and the call. And what the user draws after all that."""
    torch.manual_seed(0)
    model = Rows("dropout")
    ids = torch.arange(SAMPLES)
    module = autopar.compile(model, gpus=4, example_inputs={"ids": ids}, cluster="cpu", pins={"dp": 2, "tp": 2})
    losses = []
    for seed in (5, 5, 6, None):
        if seed is not None:
            torch.manual_seed(seed)
        if torch.distributed.get_rank() in drawing:
            torch.rand(3)
        losses.append(module(ids=ids).item())
    return losses, torch.rand(2).tolist()


@pytest.mark.parametrize("drawing", [(1, 2, 3), (2,)], ids=str)
def test_ranks_agree_where_some_have_drawn_since_the_seed(drawing: tuple[int, ...], workers: WorkerPool) -> None:
    results = workers.run(after_a_seed, drawing, timeout_s=120.0)
    losses = results[0][0]
    assert all(found == losses for found, _ in results)
    assert losses[0] == losses[1] and len({*losses}) == 3
    assert results[0][1] != results[2][1]  # a rank that draws goes on with its own numbers


def after_calls_and_a_seed() -> list[float]:
    """In a worker: the loss after a seed, of equal modules that were called so many times before."""
    losses, ids = [], torch.arange(SAMPLES)
    for calls in (0, 2):
        torch.manual_seed(0)
        module = autopar.compile(Rows("dropout"), gpus=4, example_inputs={"ids": ids}, cluster="cpu", pins={"dp": 2, "tp": 2})
        for _ in range(calls):
            module(ids=ids)
        torch.manual_seed(5)
        losses.append(module(ids=ids).item())
    return losses


def test_a_seed_says_what_is_drawn_whatever_was_before(workers: WorkerPool) -> None:
    for first, second in workers.run(after_calls_and_a_seed, timeout_s=120.0):
        assert first == second


def test_a_model_that_draws_nothing_leaves_the_users_numbers_alone() -> None:
    torch.manual_seed(7)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.ones(6, 4)
    module = autopar.compile(model, gpus=1, example_inputs=(x,), loss=lambda y: y.square().sum(), cluster="cpu")
    before = torch.get_rng_state()
    module(x)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------- given to both sides
@functools.cache
def referenced(kind: str) -> Any:
    torch.manual_seed(0)
    return reference(Rows(kind), {"ids": torch.arange(SAMPLES)}, steps=2)


@pytest.mark.parametrize("pins", PLANS[1:4], ids=str)
@pytest.mark.parametrize("kind", ["noise", "factory", "in place", "drawn from a result", "shared"])
def test_verification_gives_both_sides_the_same_draws(kind: str, pins: dict[str, Any], workers: WorkerPool) -> None:
    ref = referenced(kind)
    steps = ref.draws[True, 0]
    assert len(steps) == 2 and all(len(step) == 2 for step in steps)
    assert not torch.equal(*(next(iter(step.values())) for step in steps))
    report = verify_plan(ref, plan_of(ref.captured, 4, cluster="cpu", pins=pins), workers, timeout_s=120)
    assert report.ok, report


def test_draws_of_other_batches_are_given_too(workers: WorkerPool) -> None:
    torch.manual_seed(0)
    ref = reference(Rows("noise"), {"ids": torch.arange(SAMPLES)}, steps=2, later=True)
    assert {key: len(calls) for key, calls in ref.draws.items()} == {(True, 0): 3, (False, 0): 1, (True, 1): 1}
    report = verify_plan(ref, plan_of(ref.captured, 4, cluster="cpu", pins={"dp": 4}), workers, timeout_s=120)
    assert report.ok, report
    assert report.batches is not None


def test_draws_that_are_not_those_of_the_program_are_refused() -> None:
    model = Rows("noise")
    captured = capture(model, {"ids": torch.arange(SAMPLES)})
    with Recorder() as recorder:
        model(torch.arange(SAMPLES))
    assert len(recorder.outcomes) == len(drawn_names(captured)) == 2
    found, (step,) = draws_given(captured, [recorder.outcomes])
    assert {x.value for x in found.program.inputs} == {"ids", *step}
    with pytest.raises(UnsupportedOp, match="draws 1 times in its forward, and its graph 2 times"):
        draws_given(captured, [recorder.outcomes[:1]])
    with pytest.raises(UnsupportedOp, match="aten.dropout"):
        drawn_names(capture(Rows("dropout"), {"ids": torch.arange(SAMPLES)}))


def test_a_draw_is_made_once_where_it_is_the_same_for_all() -> None:
    """Over micro-batches and stages: by the prologue. What is drawn from a result is drawn where that is."""
    program = capture(Rows("shared"), {"ids": torch.arange(SAMPLES)}).program
    for count in (1, 2):
        moments = split_into_moments(program, count)
        assert sum("rand_like" in op.target for op in moments.prologue) == 2
        assert not any("rand" in op.target for op in moments.body.ops)
    drawn = {o for op in program.ops if draws(op) for o in op.outputs}
    assert len(drawn) == 2 and not drawn & derived_from_inputs(program), "what every stage may make again for itself"
    inside = split_into_moments(capture(Rows("drawn from a result"), {"ids": torch.arange(SAMPLES)}).program, 2)
    assert sum("bernoulli" in op.target for op in inside.body.ops) == 2 and not inside.prologue


def test_generators_begin_at_a_seed_and_go_on_as_before() -> None:
    """The numbers are those of torch.manual_seed, also where a step begins again inside."""
    torch.manual_seed(5)
    inside = torch.rand(3)
    torch.manual_seed(9)
    expected = torch.rand(4)[2:]
    torch.manual_seed(9)
    torch.rand(2)
    with seeded(7, torch.device("cpu")):
        torch.rand(1)
        seed_generators(5, torch.device("cpu"))
        assert torch.initial_seed() == 5 and torch.equal(torch.rand(3), inside)
    assert torch.equal(torch.rand(2), expected)


def test_stages_draw_different_numbers() -> None:
    """The same on all ranks of a stage, from the seed of the step."""

    def drawn(stage: int, seed: int) -> list[float]:
        torch.manual_seed(seed)
        mesh = SimpleNamespace(pp=SimpleNamespace(rank=stage))
        form = SimpleNamespace(mesh=mesh, wanted=frozenset(), device=torch.device("cpu"), micro_batches_of_all=lambda _: [{}])
        form.seed = functools.partial(Form.seed, form)
        assert Form.micro_batches(form, {}) == [{}]  # type: ignore[arg-type]
        return torch.rand(4).tolist()

    found = [drawn(stage, seed) for seed in (1, 2) for stage in (0, 1, 2)]
    assert len(set(map(tuple, found))) == 6 and drawn(1, 2) == found[4]


@pytest.mark.parametrize("target", ["aten.dropout.default", "aten.rand_like.default", "aten.scaled_dot_product_attention.default"])
def test_shards_over_two_axes_draw_by_both(target: str) -> None:
    """Cut over dp, then over tp: each of the 2 x 2 shards has numbers of its own, and the same again after the same seed."""
    x = torch.ones(4, 4, 8, 8)
    attention = "attention" in target
    arguments: dict[str, tuple[Any, ...]] = {"aten.dropout.default": (0.5, True), "aten.scaled_dot_product_attention.default": (None, 0.5)}
    names = ("x", "x", "x") if attention else ("x",)
    op = Op(target=target, args=(*map(Ref, names), *arguments.get(target, ())), outputs=("y",))
    shape = list(x.shape)
    for axis, dim in (("dp", 0), ("tp", 1)):
        t = TensorType(tuple(shape), torch.float32, True)
        view = OpView(op, (t,) * len(names), (t,), 2)
        cut = next(s for s in strategies_of(view) if s.outputs == (S(dim),) and set(s.inputs) == {S(dim)})
        (op,) = localized(view, cut, axis)
        shape[dim] //= 2
    assert op.kwarg("axis") == ("dp", "tp")

    def drawn(dp: int, tp: int) -> Tensor:
        torch.manual_seed(3)
        axes = {name: Axis(name=name, size=2, rank=rank, ranks=(0, 1)) for name, rank in (("dp", dp), ("tp", tp))}
        options = {k: tuple(axes[a] for a in v) if k == "axis" else v for k, v in op.kwargs}  # type: ignore[union-attr]
        given = [torch.ones(shape) if isinstance(a, Ref) else a for a in op.args]
        return getattr(local_ops, op.target.rpartition(".")[2])(*given, **options)

    shards = [drawn(dp, tp) for dp in (0, 1) for tp in (0, 1)]
    assert all(not torch.equal(a, b) for k, a in enumerate(shards) for b in shards[k + 1 :])
    assert torch.equal(drawn(1, 0), shards[2])
