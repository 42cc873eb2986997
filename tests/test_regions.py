"""Opaque regions: what no graph holds runs as it is written, and the model trains as on one process."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import region_models as m
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import Captured, capture, program_hash
from autopar.catalog import strategies_of
from autopar.compiler import emit, plan_of
from autopar.errors import CaptureError, LaunchError
from autopar.ir import Op, R, S, refs
from autopar.measure import count
from autopar.planner.shard import view_of
from autopar.render import load
from autopar.run import ParallelModule, WorkerPool
from autopar.run.region import REGION, Place, Region
from autopar.run.region import region as run
from autopar.variants import tensors_of
from autopar.verify import Reference, reference, verify, verify_plan

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "mixture": (m.Mixture, m.tokens), "graph": (m.Graph, m.nodes), "speech": (m.Speech, m.speech), "shared": (m.Shared, m.tokens),
    "careful": (lambda: m.Mixture(careful=True), m.tokens), "adversarial": (m.Adversarial, m.tokens),
    "reversed": (lambda: m.Adversarial(itself=True), m.tokens), "functions": (m.Functions, m.tokens),
    "tied": (m.Tied, m.tokens), "caching": (m.Caching, m.tokens),
}  # fmt: skip
pure, gloo = pytest.mark.pure, pytest.mark.gloo


def captured(name: str) -> Captured:
    model, inputs = MODELS[name]
    return capture(model(), inputs())


def regions(found: Captured) -> list[Op]:
    return [op for op in found.program.ops if op.target == REGION]


@pure
@pytest.mark.parametrize(
    ("name", "paths", "rows"),
    [
        ("mixture", ["layers.0.routed", "layers.1.routed"], (0,)), ("graph", ["passes.0", "passes.1"], ()), ("speech", ["merge"], ()),
        ("shared", ["select", "select"], (0,)), ("adversarial", ["inner", "reversal._Reversed"], (0,)),
        ("reversed", ["inner", "_Reversed"], (0,)), ("functions", [*(f"layers.{k}._Sine" for k in range(3)), "_Linear"], (0,)),
        ("tied", ["inner"], (0,)), ("caching", ["inner"], (0,)),
    ],
)  # fmt: skip
def test_the_smallest_submodule_is_one_operator(name: str, paths: list[str], rows: tuple[int, ...]) -> None:
    found = captured(name)
    assert [op.module for op in regions(found)] == paths
    assert [op.kwarg("rows") for op in regions(found)] == [rows] * len(paths)
    for op in regions(found):
        applied = f"{op.module.rpartition('.')[2]}.apply"
        lines = ("len(rows)", "nonzero", "int(marked", "positive]", "register_hook", "padding &", applied)
        assert any(text in op.source for text in lines)
        assert op.kwarg("flops") or op.module.endswith(("_Reversed", "_Sine"))
        assert any(op.source in note and op.module in note for note in found.program.notes)
        types = [found.program.types[r] for r in refs(op)]
        assert count(op, tuple(types), (found.program.types[op.name],)).flops == op.kwarg("flops")


@pure
def test_parameters_inside_are_the_programs() -> None:
    found = captured("mixture")
    used = {r for op in regions(found) for r in refs(op)}
    inside = {p.fqn for p in found.program.params if p.value in used}
    assert inside == {name for name, _ in m.Mixture().named_parameters() if ".routed." in name}
    assert len(found.program.blocks) == 1, "layers with a region are alike"
    shared = captured("shared")
    (tied,) = [p for p in shared.program.params if p.aliases]
    assert all(tied.value in refs(op) for op in regions(shared))


@pure
def test_split_by_samples_where_that_is_the_same() -> None:
    """A capacity for all tokens is no matter of each sample; nor are random numbers of the whole."""
    for options, rows in (({}, (0,)), ({"capacity": 8}, ()), ({"noise": True}, ())):
        found = capture(m.Mixture(1, **options), m.tokens())
        (op,) = regions(found)
        assert op.kwarg("rows") == rows, options
        assert op.kwarg("draws") == ("noise" in options)
        split = [s for s in strategies_of(view_of(found.program, op, 2)) if s.splits_work]
        assert [(s.inputs[:2], s.outputs) for s in split] == ([((R, S(0)), (S(0),))] if rows else [])


@pure
def test_what_cannot_be_a_region_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"x\[0, 0\] > 0"):
        capture(m.Cut(), (torch.randn(8, 4),))
    with pytest.raises(CaptureError, match=r"self.seen(.|\n)*count cannot be run as it is written .*: it changes the attribute seen"):
        capture(m.Counting(), (torch.randn(8, 4),))
    with pytest.raises(CaptureError, match=r"inner cannot be run as it is written .*: it reads table.weight, which is not its own"):
        capture(m.Holding(), (torch.randn(8, 4),))


@pure
def test_the_model_is_left_as_it_was() -> None:
    model = m.Mixture()
    capture(model, m.tokens())
    assert not any("forward" in vars(module) for module in model.modules())
    found = capture(model, m.tokens())
    assert program_hash(found.program) == program_hash(captured("mixture").program)


@pure
def test_arguments_are_those_of_the_trace() -> None:
    """A mask that is made only where values cannot be asked (as many models do) is one more tensor than when the model ran."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.routed = nn.Linear(m.HIDDEN, m.HIDDEN), m.Select(nn.Parameter(torch.randn(m.CLASSES, m.HIDDEN)))

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[0], dtype=torch.bool) if torch.compiler.is_compiling() else None
            return self.keep(self.outer(x), mask).square().mean()

        def keep(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return self.routed(x if mask is None else x * mask[:, None, None])

    class Layer(m.Select):
        def forward(self, x: Tensor, mask: Tensor | None, scale: float) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale if mask is None else super().forward(x).where(mask[:, None, None], 0) * scale

    class Given(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.routed = Layer(self.routed.weight)

        def keep(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return self.routed(x, mask, 0.5)  # type: ignore[no-any-return]

    for kind in (Masked, Given):
        found = capture(kind(), (torch.randn(4, m.LENGTH, m.HIDDEN),))
        (region,) = [t for t in found.tensors.values() if isinstance(t, Region)]
        pickle.dumps(region.arguments)


@pure
def test_hooks_of_a_region_run_once() -> None:
    """Capture compares the program with the model."""
    model = m.Mixture()
    model.layers[0].routed.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    model.layers[0].routed.register_forward_hook(lambda module, args, out: out + 0.5)
    assert [op.module for op in regions(capture(model, m.tokens()))] == ["layers.0.routed", "layers.1.routed"]


@pure
def test_a_region_survives_being_sent() -> None:
    found = captured("mixture")
    (first, _) = [t for t in found.tensors.values() if isinstance(t, Region)]
    again = pickle.loads(pickle.dumps(first))
    x, state = torch.randn(4, m.LENGTH, m.HIDDEN), [first.module.get_parameter(name) for name in first.state]
    assert torch.equal(first([x], state)[0], again([x], state)[0])


@pure
def test_results_of_other_shapes_are_an_error() -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x[:, 0] > 0]

    region = Region(path="rows", module=Rows(), state=(), arguments=((Place(),), {}), modes=(True,))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(run(region, [x], [], ((2, 2),), grads=(False,))[0], x)
    with pytest.raises(RuntimeError, match=r"rows \(Rows\) returned tensors of shapes \[\(1, 2\)\]"):
        run(region, [x * torch.tensor([[1.0], [-1.0]])], [], ((2, 2),), grads=(False,))


# ------------------------------------------------------------------------------------------------------ real processes
PLANS: list[dict[str, Any]] = [
    {"dp": 4}, {"tp": 4}, {"dp": 2, "pp": 2, "micro_batches": 2}, {"dp": 4, "zero": 3}, {"dp": 2, "recompute": "full", "tp": 2}
]  # fmt: skip


@pure
def test_functions_of_equal_layers_are_alike() -> None:
    found = captured("functions")
    assert [block.prefixes for block in found.program.blocks] == [("layers.0", "layers.1", "layers.2")]
    (weight,) = [p.value for p in found.program.params if p.fqn == "head.weight"]
    assert weight in refs(regions(found)[-1]), "which the function is given"
    handle = next(t for t in found.tensors.values() if isinstance(t, Region) and t.path == "layers.0._Sine")
    x = torch.randn(2, 3)
    torch.testing.assert_close(pickle.loads(pickle.dumps(handle))([x], [])[0], x.sin())


def _classes(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device) % m.CLASSES)


@pure
def test_a_model_that_works_by_samples_is_one_operator_where_its_own_forward_is_no_graph() -> None:
    found = capture(m.Packed(), m.sequences(), loss=_classes)
    (op,) = regions(found)
    assert (op.module, op.kwarg("rows")) == ("", (0, 1)) and any("Packed runs as it is written" in x for x in found.program.notes)
    assert {p.value for p in found.program.params} <= set(refs(op))
    with pytest.raises(CaptureError, match=r"(?s)cannot capture Packed.*float\(x.detach\(\).abs\(\).max\(\)\) > 5"):
        capture(m.Packed(clipped=True), m.sequences(), loss=_classes)  # a part of the batch may be clipped otherwise than the whole


@gloo
@pytest.mark.parametrize("pins", [{"dp": 4}, {"tp": 4}, {"dp": 4, "zero": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_a_model_that_is_one_operator_equals_the_original(pins: dict[str, Any], workers: WorkerPool) -> None:
    report = verify(m.Packed(), m.sequences(), 4, loss=_classes, pins=pins, steps=2, pool=workers)
    assert report.ok and report.source.count("L.region(") == 1, report


class _Rounded(torch.autograd.Function):
    """To multiples of what the largest value says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = float(x.abs().max()) / 8
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pure
def test_a_function_that_looks_at_values_is_one_operator() -> None:
    class Rounding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = _Rounded.apply(super().forward(x))
            return made.square().mean()

    (op,) = regions(capture(Rounding(4, 4), (torch.randn(4, 4),)))
    assert (op.module, op.kwarg("rows")) == ("_Rounded", ()), "the largest value is that of all samples"


class _Doubled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class _Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Doubled.apply(x + 1)
        return made


class _Doubles(nn.Module):
    def __init__(self, part: nn.Module | None) -> None:
        super().__init__()
        self.part, self.linear = part, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        made: Tensor = _Doubled.apply(hidden + 1) if self.part is None else self.part(hidden)
        return made.square().mean()


@pure
def test_a_function_that_writes_to_what_it_is_given_is_run_by_the_submodule_around_it() -> None:
    found = capture(_Doubles(_Doubling()), (torch.randn(4, 4),))
    assert [op.module for op in regions(found)] == ["part"]
    with pytest.raises(CaptureError, match=r"(?s)_Doubled\.apply.*_Doubled cannot be run as it is written.*it changes tensor 0 of those"):
        capture(_Doubles(None), (torch.randn(4, 4),))


class _Hooked(nn.Module):
    """Calls `hook` on an activation, and what `forward` says before and after that."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None], before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.hook, self.before, self.after = hook, before, after
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        other = 0.0 if self.before is None else self.before(h)
        if h.requires_grad:
            h.register_hook(self.hook)
        if self.after is not None:
            self.after(h)
        return (self.second(torch.tanh(h)) + other).square().mean()


@pure
@pytest.mark.parametrize(
    ("hook", "rows", "linear"),
    [
        (lambda grad: 0.5 * grad, (0,), True),
        (lambda grad: grad.clamp(-1.0, 1.0), (0,), False),
        (lambda grad: grad / grad.norm(), (), False),
        (lambda grad: grad.relu(), (0,), False),
        (lambda grad: print(end=""), (), False),
    ],
    ids=["scales", "clamps", "normalises", "cuts off", "looks"],
)
def test_a_hook_of_the_models_own_forward_is_a_region_of_the_activation(hook: Any, rows: tuple[int, ...], linear: bool) -> None:
    (op,) = regions(found := capture(_Hooked(hook), (torch.randn(6, 4),)))
    assert (op.kwarg("rows"), op.kwarg("linear")) == (rows, linear)
    assert [o.target for o in found.program.ops][:3] == ["aten.linear.default", REGION, "aten.tanh.default"]
    possible = strategies_of(view_of(found.program, op, 2))
    assert any(s.splits_work for s in possible) == bool(rows)
    assert any(s.outputs == (R,) for s in possible) == linear, "what is replicated for different work is given terms of the gradient"


@pure
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (lambda h: h * 2, None, r"a hook on an activation that has been used before \(.*self.before\(h\)"),
        (lambda h: h.view(-1, 4).exp(), None, "has been used before"),
        (None, lambda h: h.mul_(2), "writes in place to an activation with a hook"),
    ],
)
def test_a_hook_that_would_not_see_all_of_a_gradient_is_refused(before: Any, after: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(_Hooked(lambda grad: 0.5 * grad, before, after), (torch.randn(6, 4),))


@pure
def test_gradients_that_a_model_asks_for_itself_are_of_samples_or_refused() -> None:
    class Field(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            x = x.detach().requires_grad_()
            energy = super().forward(x).tanh().sum(-1)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return (energy, slope) if self.by_samples else (energy - slope.norm(dim=-1)).square().mean()

    model = Field(4, 4)
    model.by_samples = False  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"autograd.grad.* has gradients of its own: call it in a submodule of Field, .*by samples"):
        capture(model, (torch.randn(6, 4),))
    model.by_samples = True  # type: ignore[assignment]
    (op,) = regions(capture(model, (torch.randn(6, 4),), outputs=None))
    assert op.kwarg("rows") == (0,)


@pure
def test_of_two_hooks_the_first_is_given_the_gradient_first() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            if h.requires_grad:
                h.register_hook(lambda grad: 10.0 * grad)
                h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
                h.register_hook(lambda grad: 0.5 * grad)
            return h.square().sum()

    clamps = [op.kwarg("linear") for op in regions(capture(Twice(4, 4), (torch.randn(6, 4),)))]
    assert clamps == [True, False, True]  # and the program has been compared with the model


class _Bounded(torch.autograd.Function):
    """Of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e3, 1e3)


class _Same(torch.autograd.Function):
    """What autograd does too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=-1e3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x >= -1e3)


class _Within(_Same):
    """A bound of values that lets those return which gradients draw back."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * ((x >= -1e3) | (grad < 0))


class _Applying(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.function.apply(self.linear(x))
        return made.square().mean()


@pure
@pytest.mark.parametrize("function", [_Bounded, _Within])
def test_a_bound_that_the_example_does_not_come_to_is_kept(function: type[torch.autograd.Function]) -> None:
    (op,) = regions(capture(_Applying(function), (torch.randn(6, 4),)))
    assert (op.module, op.kwarg("linear"), op.kwarg("rows")) == (function.__name__, False, (0,))


@pure
def test_a_function_that_does_as_autograd_is_in_the_graph() -> None:
    assert not regions(capture(_Applying(_Same), (torch.randn(6, 4),)))


@gloo
def test_regions_are_verified_in_evaluation_too(workers: WorkerPool) -> None:
    report = verify(m.Adversarial(), m.tokens(), 4, pins={"dp": 4}, steps=2, pool=workers)
    assert report.ok and report.evaluation is not None and report.evaluation < 1e-9, report


@functools.cache
def referenced(name: str) -> Reference:
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    return reference(model(), inputs())


@gloo
@pytest.mark.parametrize("pins", PLANS, ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_equals_the_original(name: str, pins: dict[str, Any], workers: WorkerPool) -> None:
    if pins.get("micro_batches") and name in ("graph", "speech", "tied", "caching"):
        pytest.skip("one graph, frames counted over the batch, and what asks all samples are not split into micro-batches")
    if pins.get("recompute") and name not in ("mixture", "careful"):
        pytest.skip("nothing repeats")
    ref = referenced(name)
    report = verify_plan(ref, plan_of(ref.captured, 4, cluster="cpu", pins=pins), workers, timeout_s=120)
    assert report.ok, report
    assert "L.region(" in report.source


def in_training(pins: dict[str, Any]) -> tuple[list[float], float, bool]:
    """In a worker: losses of steps of two sizes, and in evaluation, beside the model on one process; how far the parameters differ
    then; whether those of an expert that no token is sent to are as they were."""
    torch.manual_seed(0)
    alone, model = m.Mixture().double(), m.Mixture().double()
    with torch.no_grad():
        alone.layers[1].routed.router.bias[0] = -100.0
    model.load_state_dict(alone.state_dict())
    unused = {k: v.clone() for k, v in model.state_dict().items() if k.startswith("layers.1.routed.experts.0.")}
    module = autopar.compile(model, gpus=4, example_inputs=m.tokens(), cluster="cpu", pins=pins)
    ours, theirs = (torch.optim.AdamW(x.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3) for x in (module, alone))
    found = []
    for batch in (8, 4, 8):
        torch.manual_seed(batch)
        inputs = m.tokens(batch)
        for one, optimizer in ((module, ours), (alone, theirs)):
            optimizer.zero_grad()
            loss = one(**inputs)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    module.eval()
    alone.eval()
    with torch.no_grad():
        found += [module(**inputs).item(), alone(**inputs).item()]
    full = module.full_state_dict()
    apart = max(float((full[name] - p).abs().max()) for name, p in alone.state_dict().items())
    return found, apart, all(torch.equal(full[name], p) for name, p in unused.items())


@gloo
@pytest.mark.parametrize("pins", [{"dp": 4, "zero": 2}, {"dp": 4, "zero": 3}, {"pp": 2, "dp": 2}], ids=str)
def test_other_batches_and_evaluation(pins: dict[str, Any], workers: WorkerPool) -> None:
    for found, apart, as_it_was in workers.run(in_training, pins):
        assert found[::2] == pytest.approx(found[1::2], rel=1e-9)
        assert apart < 1e-9 and as_it_was


def without_the_model(source: str) -> str:
    tensors = {name: t for name, t in tensors_of(captured("mixture")).items() if isinstance(t, Tensor)}
    try:
        ParallelModule(load(source), tensors)
    except LaunchError as error:
        return str(error)
    return ""


@gloo
def test_the_source_alone_says_what_it_lacks(workers: WorkerPool) -> None:
    found = captured("mixture")
    source = emit(found, plan_of(found, 4, cluster="cpu", pins={"dp": 4}))
    for message in workers.run(without_the_model, source):
        assert "layers.0.routed.region_0" in message and "autopar.compile(model, plan=" in message


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        return self.layer(packed)[1].square().mean()


class PackedByAPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Packing()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.part(x, lengths)


@pure
def test_where_the_model_itself_has_what_no_graph_holds_a_submodule_is_recommended() -> None:
    inputs = torch.randn(4, 3, 4), torch.tensor([3, 3, 2, 1])
    remedies = r"let a submodule pack, call the recurrent layer, and return .*\n  or: move that line, and what it needs, into a submodule"
    with pytest.raises(CaptureError, match=remedies):
        capture(Packing(), inputs)
    assert any("part (Packing) runs as it is written" in note for note in capture(PackedByAPart(), inputs).program.notes)


@pure
@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 3), (8, 4, 3, 2)])
def test_a_batch_norm_without_momentum_weighs_batches_by_their_number(shape: tuple[int, ...]) -> None:
    """Its program is compared with two calls of the model, running statistics too; it is one for every number of batches."""
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    model = nn.Sequential(nn.Conv1d(4, 4, 1) if len(shape) == 3 else nn.Identity(), kinds[len(shape)](4, momentum=None)).double()
    x = torch.randn(*shape, dtype=torch.float64)
    found = capture(model, (x,), outputs=None)
    assert not [t for t in found.program.ops if "region" in t.target]
    model(x * 2)
    assert program_hash(capture(model, (x,), outputs=None).program) == program_hash(found.program)
    assert not capture(model.eval(), (x,), outputs=None).program.mutations


class _TwoNames(nn.Module):
    """A layer and its batch norm have two names; a part of its own, and the model, apply a function."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.left = self.right = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.part, self.outside = _Halving(), outside

    def forward(self, x: Tensor) -> Tensor:
        h = self.part(self.right(self.left(x)))
        return (_Halved.apply(h) if self.outside else h).square().mean()


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / 2


class _Halving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Halved.apply(3 * x)


@pure
@pytest.mark.parametrize(("outside", "paths"), [(False, ["part._Halved"]), (True, ["part._Halved", "_Halved"])])
def test_of_a_model_with_a_module_of_two_names_functions_are_found_where_they_are(outside: bool, paths: list[str]) -> None:
    assert [op.module for op in regions(capture(_TwoNames(outside), (torch.randn(8, 4),)))] == paths


@pure
def test_a_submodule_beside_a_module_of_two_names_is_one_operator() -> None:
    class Beside(_TwoNames):
        def __init__(self) -> None:
            super().__init__(outside=False)
            self.part = Numpy()

    class Numpy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - torch.from_numpy(x.detach().numpy().mean(-1, keepdims=True))

    assert [op.module for op in regions(capture(Beside(), (torch.randn(8, 4),)))] == ["part"]


@pure
def test_what_a_module_of_two_names_holds_is_one_buffer() -> None:
    model = _TwoNames(outside=False)
    buffers = {b.fqn: b.aliases for b in capture(model, (torch.randn(8, 4),)).program.buffers if not b.region}
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert buffers == {f"left.1.{name}": (f"right.1.{name}",) for name in names}


@pure
def test_a_tensor_that_is_a_buffer_of_two_modules_is_one_buffer() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.layer = nn.Identity(), nn.Identity(), nn.Linear(4, 4)
            self.first.register_buffer("count", torch.zeros(()))
            self.second.register_buffer("count", self.first.count)

        def forward(self, x: Tensor) -> Tensor:
            self.first.count += 1
            return (self.layer(x) * self.second.count).square().mean()

    found = capture(Counting(), (torch.randn(8, 4),)).program
    assert [(b.fqn, b.aliases, b.mutated) for b in found.buffers] == [("first.count", ("second.count",), True)]
    apart = Counting()
    apart.second.register_buffer("count", apart.first.count, persistent=False)
    with pytest.raises(CaptureError, match=r"two buffers, first.count and second.count, of which only one is in the state_dict"):
        capture(apart, (torch.randn(8, 4),))


@pure
def test_the_forward_of_a_model_with_a_part_of_two_names_sees_its_parts_themselves() -> None:
    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Tanh()
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            factors = {nn.Linear: 0.5, nn.Tanh: 2.0}
            for part in self.children():
                x = part(x) * factors[type(part)]
            return (self.again(x) if type(self.again) is type(self.first) else x).square().mean()

    assert [op.module for op in capture(Sorting(), (torch.randn(8, 4),)).program.ops if "linear" in op.target] == ["first", "first"]


@pure
def test_a_generator_is_refused_where_the_forward_draws_from_it_alone() -> None:
    class Drawing(nn.Module):
        def __init__(self, draws: bool) -> None:
            super().__init__()
            self.layer, self.draws, self.generator = nn.Linear(4, 4), draws, torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return ((h + torch.randn(4, generator=self.generator)) if self.draws else h).square().mean()

    inputs = (torch.randn(8, 4),)
    with pytest.raises(CaptureError, match=r"a generator of its own.*\n  at test_regions.py:\d+: .*generator=self.*\n  what to do: leave"):
        capture(Drawing(draws=True), inputs)
    model = Drawing(draws=False)
    before = model.generator.get_state()
    assert capture(model, inputs).program.batch_size == 8
    assert torch.equal(model.generator.get_state(), before)
