"""Hooks that the forward registers on activations: what they hold is given to them in every call, or they are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.run.closed import closed_tensors, over_tensors
from autopar.run.region import REGION

pure = pytest.mark.pure


class _Weighted(nn.Module):
    """Registers, on an activation of the input, what `hook` makes of both. after: what it does then."""

    def __init__(self, hook: Callable[[Any, Tensor], Callable[[Tensor], Tensor | None]], after: Any = None) -> None:
        super().__init__()
        self.hook, self.after = hook, after
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        h, w = self.first(x), x.abs().mean(1, keepdim=True)
        self.weight = w.mean()
        if h.requires_grad:
            h.register_hook(self.hook(self, w))
        if self.after is not None:
            self.after(w)
        out: Tensor = self.second(torch.tanh(h)).square().mean()
        return out


@pure
@pytest.mark.parametrize(
    ("hook", "rows"),
    [
        (lambda _, w: lambda grad: grad * w, (0, 1)),
        (lambda _, w: lambda grad, w=w: grad * w, (0, 1)),
        (lambda _, w: functools.partial(lambda v, grad: grad * v["w"], {"w": w}), ()),
        (lambda _, w: lambda grad: grad * w.mean(), (0,)),
        (lambda model, _: (lambda u: lambda grad: grad * u.norm())(model.second.weight), (0,)),
    ],
    ids=["closure", "default", "partial", "of all samples", "parameter"],
)
def test_a_hook_is_given_the_tensors_that_it_holds_in_every_call(hook: Any, rows: tuple[int, ...]) -> None:
    ops = capture(_Weighted(hook), (torch.randn(6, 4),)).program.ops
    (op,) = (op for op in ops if op.target == REGION)
    assert op.kwarg("rows") == rows


@pure
@pytest.mark.parametrize(
    ("hook", "after", "message"),
    [
        (lambda model, _: lambda grad: grad * model.weight, None, "reads weight, which each call of the forward sets anew"),
        (lambda model, _: lambda grad: grad * model.second.bias.norm(), None, "reads second.bias through the model"),
        (lambda _, w: lambda grad: grad * w, lambda w: w.mul_(2), "writes in place to a tensor that a hook on an activation reads"),
        (lambda _, w: lambda grad: torch.autograd.grad(w.sum(), w)[0], None, "needs more than the values of the tensors that it reads"),
    ],
)
def test_a_hook_that_would_find_other_tensors_in_backward_is_refused(hook: Any, after: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=rf"(?s){message}.*what to do"):
        capture(_Weighted(hook, after), (torch.randn(6, 4),))


@pure
def test_a_hook_on_what_autograd_records_is_refused() -> None:
    class Recorded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            if h.grad_fn is not None:
                h.grad_fn.register_hook(lambda given, _: given)
            return h.square().sum()

    with pytest.raises(CaptureError, match=r"(?s)what autograd records.*Tensor.register_hook"):
        capture(Recorded(4, 4), (torch.randn(6, 4),))


@pure
def test_a_function_over_other_tensors_is_the_same_function() -> None:
    a, b, c = torch.ones(2), torch.zeros(2), torch.full((2,), 3.0)

    def inner(x: Tensor, *, by: Tensor = a) -> Tensor:
        return x * by

    def outer(x: Tensor, scale: float, bias: Any = (b, "name")) -> Tensor:
        again = outer if scale > 1 else inner
        return again(x, by=c) + bias[0] if again is inner else outer(x, scale - 1.0)

    function = functools.partial(outer, scale=2.0)
    assert {id(t) for t in closed_tensors(function)} == {id(a), id(b), id(c)}
    others = [t + 1 for t in closed_tensors(function)]
    assert over_tensors(function, others)(c).equal(c * (c + 1) + b + 1)
    assert function(c).equal(c * c + b), "what it was made of is as it was"
    assert closed_tensors(len) == closed_tensors(a.clamp) == ()
