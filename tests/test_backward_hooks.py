"""Full backward hooks of modules: what they are told, leave and give is that of one process, or it is refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.planner import Pins
from autopar.planner.space import Space
from autopar.run.backward_hooks import BackwardHooks, Entered, Returned
from autopar.run.closed import is_named, names_in
from autopar.run.region import REGION
from benchmarks._traps_run import Judge
from cost_models.cluster import load_cluster
from tests.in_turn import in_turn

pure = pytest.mark.pure

REFUSED = {
    "clamped_gradients_of_the_loss_and_of_features": "in two parts",
    "hook_that_halves_more_from_step_to_step": "is read by the next call, or by these hooks for its gradients",
}
IN_ONE_STAGE = ("hook_of_several_arguments_and_results", "function_whose_backward_writes_down_norms")
BETWEEN = "hook_that_scales_by_what_is_set_before_backward"
RIGHT = in_turn("told", ("dp2",), ("pp2",), ("zero3",), without=(*REFUSED, *IN_ONE_STAGE, BETWEEN))
RIGHT |= dict.fromkeys((*IN_ONE_STAGE, BETWEEN), ("dp2", "zero3"))
RIGHT |= dict.fromkeys(("hook_above_what_is_frozen_midway", "hooks_that_write_to_gradients"), ("pp2",))  # mistakes showed there


@pytest.mark.gloo
@pytest.mark.parametrize("name", RIGHT)
def test_hooks_are_told_what_they_are_on_one_process(name: str, judge: Judge) -> None:
    assert judge.not_right(name, RIGHT[name]) == []


@pytest.mark.gloo
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_be_told_in_parts_or_read_again_is_refused(name: str, judge: Judge) -> None:
    (found,) = judge.outcomes(name, ("dp2",))
    assert found.outcome == "refused" and REFUSED[name] in found.reason


@pytest.mark.gloo
@pytest.mark.parametrize("name", IN_ONE_STAGE)
def test_what_leaves_something_and_gives_a_gradient_keeps_the_model_in_one_stage(name: str, judge: Judge) -> None:
    (found,) = judge.outcomes(name, ("pp2",))
    assert found.outcome == "refused" and "which the ranks of one stage alone would have" in found.reason


@pytest.mark.gloo
def test_what_a_pipeline_has_used_in_the_call_may_not_be_set_before_backward(judge: Judge) -> None:
    (found,) = judge.outcomes(BETWEEN, ("pp2",))
    assert found.outcome == "refused" and "gradients were computed in the call" in found.reason


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


@pure
def test_capture_calls_hooks_and_leaves_what_they_fill_as_it_was() -> None:
    model, seen, last = Small(), [1.0], {"norm": 0.0}
    model.second.register_full_backward_hook(lambda m, ins, outs: seen.append(outs[0].norm().item()))
    model.first.register_full_backward_hook(lambda m, ins, outs: last.update(norm=outs[0].norm().item(), more=2.0))
    found = capture(model, (torch.randn(6, 4),))
    assert (seen, last) == ([1.0], {"norm": 0.0})
    regions = [op for op in found.program.ops if op.target == REGION]
    assert len(regions) == 3  # the first has no argument that needs a gradient
    assert all(op.kwarg("observes") and op.kwarg("rows") == () and op.kwarg("linear") is False for op in regions)
    assert found.program.one_stage == ""
    assert any("the backward hook" in note and "on first is called in every step" in note for note in found.program.notes)


@pure
def test_a_module_that_is_also_called_where_nothing_needs_a_gradient() -> None:
    class Targets(Small):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.second(x)
            frozen = torch.func.functional_call(self.second, {k: p.detach() for k, p in self.second.named_parameters()}, (x,))
            return (self.second(torch.tanh(self.first(x))) - target - frozen).square().mean()

    model, seen = Targets(), list[Any]()
    model.second.register_full_backward_hook(lambda m, ins, outs: seen.append(outs[0]))
    regions = [op for op in capture(model, (torch.randn(6, 4),)).program.ops if op.target == REGION]
    assert len(regions) == 2 and seen == []


@pure
def test_a_hook_that_gives_a_gradient_does_not_observe() -> None:
    model = Small()
    model.second.register_full_backward_hook(lambda m, ins, outs: (2 * ins[0],))
    ops = [op for op in capture(model, (torch.randn(6, 4),)).program.ops if op.target == REGION]
    assert len(ops) == 2 and not any(op.kwarg("observes") for op in ops)


@contextlib.contextmanager
def _for_all_modules(hook: Callable[..., Any]) -> Iterator[None]:
    handle = of_all.register_module_full_backward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pure
def test_other_hooks_of_gradients_are_refused() -> None:
    legacy = Small()
    legacy.second.register_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="gradient hooks on second"):
        capture(legacy, (torch.randn(6, 4),))
    with _for_all_modules(lambda *_: None), pytest.raises(CaptureError, match="gradient hooks on all modules"):
        capture(Small(), (torch.randn(6, 4),))


@pure
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda m, ins, outs: (ins[0] * m.weight.norm(),), "reads second.weight through the model"),
        (lambda m, ins, outs: (ins[0], ins[0]), "invalid number of grad_input, got 2, but expected 1"),
        (lambda m, ins, outs: outs[0].no_such_method(), "needs more than the gradients"),
        (lambda m, ins, outs: setattr(m, "seen", outs[0] * m.kept), "reads second.kept, which each call of the forward sets anew"),
    ],
)
def test_a_hook_that_cannot_be_called_with_gradients_alone_is_refused(hook: Callable[..., Any], message: str) -> None:
    model = Small()
    model.second.register_forward_hook(lambda m, args, out: setattr(m, "kept", out.detach()))
    model.second.register_full_backward_hook(hook)
    with pytest.raises(CaptureError, match=rf"(?s){message}.*what to do"):
        capture(model, (torch.randn(6, 4),))


def _gradients(run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    first, second = run(x, y)
    return torch.autograd.grad((first.square() * second).sum(), (x, y))


@pure
@pytest.mark.parametrize("gives", [False, True])
def test_the_regions_around_a_call_do_what_torch_does(gives: bool) -> None:
    """Of two arguments and two results; the hooks give others, or none."""

    class Swap(nn.Module):
        def forward(self, x: Tensor, scale: float, y: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(y) * scale, x.sin()

    theirs: list[Any] = []
    ours: list[Any] = []

    def before(seen: list[Any]) -> Callable[..., Any]:
        def hook(m: nn.Module, outs: Any) -> Any:
            seen.append(("before", *outs))
            return (outs[0] * 2, outs[1] + 1) if gives else None

        return hook

    def after(seen: list[Any]) -> Callable[..., Any]:
        def hook(m: nn.Module, ins: Any, outs: Any) -> Any:
            seen.append(("after", *ins, *outs))
            return (ins[0] * 3, None, ins[2].clamp(-1, 1)) if gives else None

        return hook

    swap = Swap()

    def by_regions(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hooks = BackwardHooks(
            module=swap, hooks=(after(ours),), before=(before(ours),), given=3, entered=(0, 2), made=2, returned=(0, 1), observes=not gives
        )
        x, y, *leads = Entered(hooks, (x, y))(x, y)
        first, second = Returned(hooks)(*swap.forward(x, 0.5, y), *leads)
        return first, second

    found = _gradients(by_regions)
    swap.register_full_backward_pre_hook(before(theirs))
    swap.register_full_backward_hook(after(theirs))
    expected = _gradients(lambda x, y: swap(x, 0.5, y))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [name for name, *_ in ours] == [name for name, *_ in theirs] == ["before", "after"]
    for (_, *one), (_, *other) in zip(ours, theirs, strict=True):
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pure
def test_a_hook_that_gives_a_gradient_where_it_was_to_look_alone_is_an_error() -> None:
    gives: list[Tensor] = []
    hooks = BackwardHooks(
        module=nn.Identity(), hooks=(lambda m, ins, outs: (gives[0],) if gives else None,), before=(), given=1, entered=(0,), made=1,
        returned=(0,), observes=True,
    )  # fmt: skip
    entered = Entered(hooks, (torch.ones(2),))
    entered.tell((torch.ones(2), torch.ones(2)))
    gives.append(torch.zeros(2))
    with pytest.raises(RuntimeError, match="gave none when the model was captured"):
        entered.tell((torch.ones(2), torch.ones(2)))


@pure
def test_a_model_of_one_stage_has_no_mesh_with_a_pipeline() -> None:
    cluster = load_cluster("dgx-a100")
    meshes = list(Space(gpus=8, cluster=cluster, pins=Pins(), batch=8, one_stage="a hook leaves it").meshes())
    assert meshes and all(mesh.over("layers") == 1 for mesh in meshes)
    assert not list(Space(gpus=8, cluster=cluster, pins=Pins(pp=2), batch=8, one_stage="a hook leaves it").meshes())


@pytest.mark.gloo
@pytest.mark.parametrize(
    "name", ["hooks_of_several_gradients_before_compile", "forward_hook_of_all_modules", "losses_given_to_autograd_at_once"]
)
def test_what_is_asked_of_torch_about_gradients(name: str, judge: Judge) -> None:
    assert judge.not_right(name, ("dp2", "pp2")) == []


@pure
def test_hooks_that_look_alone_are_given_gradients_as_large_as_the_losses() -> None:
    """And none that is scaled, on which one that is to notice such may raise."""
    model, largest = Small(), [0.0]

    def bounded(m: nn.Module, ins: Any, outs: Any) -> None:
        if outs[0].norm() > 100:
            raise OverflowError("gradients explode")
        largest[0] = max(largest[0], outs[0].norm().item())

    model.second.register_full_backward_hook(bounded)
    assert capture(model, (torch.randn(6, 4),)).program.ops
    assert largest == [0.0]


def _helper(grad: Tensor) -> Tensor:
    return grad * TABLE["strength"]


TABLE = {"strength": 1.0, "other": 2.0}


@pure
@pytest.mark.parametrize(
    ("place", "read"),
    [
        ("TABLE of tests['strength']", True),
        ("TABLE of tests['other']", False),
        ("second.bound", True),
        ("kept, which test.hook closes over['last']", True),
        ("kept, which test.hook closes over['first']", False),
        ("second.scale", False),  # the function has it from its own forward
    ],
)
def test_names_by_which_code_may_read_in_backward(place: str, read: bool) -> None:
    kept = {"first": 1.0, "last": 2.0}

    class Scaled(torch.autograd.Function):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return _helper(grads[0]) * ctx.scale * ctx.model.bound * kept["last"]

    assert is_named(place, names_in(Scaled.backward)) is read


@pure
def test_names_of_partial_and_callable_objects() -> None:
    class Hook:
        def __call__(self, grad: Tensor) -> Tensor:
            return grad * self.strength  # type: ignore[attr-defined,no-any-return]

    assert "strength" in names_in(Hook()) and "TABLE" in names_in(functools.partial(_helper))
