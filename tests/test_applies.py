"""Autograd functions are applied by who is asked, by whatever name code has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.run.alone import as_one_process
from autopar.run.applies import applied_by

pytestmark = pytest.mark.pure


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float = 2.0) -> Tensor:
        ctx.times = times
        return x * times

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.times * grad, None


class Halved(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float = 0.5) -> Tensor:
        return Doubled.forward(ctx, x, times)


doubled = Doubled.apply  # before anybody is asked


@pytest.mark.parametrize("apply", [doubled, lambda *given: Doubled.apply(*given), lambda x, times: Doubled.apply(x, times)])
def test_who_is_asked_is_given_the_function_and_its_arguments(apply: Any) -> None:
    asked = []

    def by(further: Any, function: Any, args: Any, kwargs: Any) -> Any:
        asked.append((function, args[1:], kwargs))
        return further(function, *args, **kwargs) + 1

    x = torch.ones(3, requires_grad=True)
    with applied_by(by):
        y = apply(x, 3.0)
    assert asked == [(Doubled, (3.0,), {})]
    assert y.tolist() == [4, 4, 4]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [-3, -3, -3]
    assert apply(x, 3.0).tolist() == [3, 3, 3] and len(asked) == 1


def test_the_innermost_is_asked_first_and_may_name_another_function() -> None:
    order = []

    def inner(further: Any, function: Any, args: Any, kwargs: Any) -> Any:
        order.append(("inner", function))
        return further(Halved, *args, **kwargs)

    def outer(further: Any, function: Any, args: Any, kwargs: Any) -> Any:
        order.append(("outer", function))
        return further(function, *args, **kwargs)

    with applied_by(outer), applied_by(inner):
        assert doubled(torch.ones(2)).tolist() == [0.5, 0.5]
    assert order == [("inner", Doubled), ("outer", Halved)]


def test_after_an_error_all_is_as_before() -> None:
    before = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]

    def by(further: Any, function: Any, args: Any, kwargs: Any) -> Any:
        raise LookupError

    with pytest.raises(LookupError), as_one_process(), applied_by(by):
        doubled(torch.ones(2))
    assert torch.autograd.Function.apply.__func__.__code__ is before  # type: ignore[attr-defined]
    assert not hasattr(torch.autograd.Function, "_applied")
    assert doubled(torch.ones(2)).tolist() == [2, 2]


def test_one_function_may_apply_another() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return doubled(doubled(x))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad

    seen = []

    def by(further: Any, function: Any, args: Any, kwargs: Any) -> Any:
        seen.append(function.__name__)
        return further(function, *args, **kwargs)

    with applied_by(by):
        assert Twice.apply(torch.ones(1)).tolist() == [4]
    assert seen == ["Twice", "Doubled", "Doubled"]


def test_transforms_find_a_function_too() -> None:
    """Of torch.func, in a function with setup_context."""

    class Cubed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:  # type: ignore[override]
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return 5 * x * grad

    cubed, seen = Cubed.apply, []

    def by(further: Any, function: Any, args: Any, kwargs: Any) -> Any:
        seen.append(function)
        return further(function, *args, **kwargs)

    with applied_by(by):
        assert torch.func.grad(lambda x: cubed(x).sum())(torch.ones(2)).tolist() == [5, 5]
    assert Cubed in seen
