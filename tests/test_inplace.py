"""Every in-place operator of torch has its functional form, found by schema, and it computes what the other writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from soundness_harness import REFUSALS, Recorder, op_db
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture import capture
from autopar.capture.inplace import functional_form
from autopar.catalog.schema import resolve
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure

# Writes whose result no operator returns: expressed otherwise, refused, or no part of a forward.
WITHOUT = {
    "aten.copy_.Tensor", "aten.copy_.int", "aten.copy_.float", "aten.fill_diagonal_.default", "aten.requires_grad_.default",
    "aten.set_.source_Tensor_storage_offset", "aten._index_put_impl_.hacked_twin",
}  # fmt: skip


def in_place() -> list[str]:
    """All overloads that write to their first argument and return it."""
    names = {n.partition("::")[2].partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    found = []
    for name in sorted(n for n in names if n.endswith("_") and not n.startswith(("_foreach", "_fused", "_amp", "_sobol", "_fill"))):
        for overload in getattr(torch.ops.aten, name).overloads():
            arguments = resolve(f"aten.{name}.{overload}")._schema.arguments
            written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
            if written == ["self"] and str(arguments[0].type) == "Tensor":
                found.append(f"aten.{name}.{overload}")
    return found


def test_all_have_a_form() -> None:
    without = {target for target in in_place() if functional_form(target) is None}
    assert without <= WITHOUT, sorted(without - WITHOUT)
    assert len(in_place()) > 250


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("aten.floor_divide_.Tensor", "aten.floor_divide.default"), ("aten.floor_divide_.Scalar", "aten.floor_divide.Scalar"),
        ("aten.pow_.Scalar", "aten.pow.Tensor_Scalar"), ("aten.pow_.Tensor", "aten.pow.Tensor_Tensor"),
        ("aten.transpose_.default", "aten.transpose.int"), ("aten.bernoulli_.float", "aten.bernoulli.p"),
        ("aten.normal_.default", "aten.normal_functional.default"), ("aten.__iand__.Tensor", "aten.__and__.Tensor"),
        ("aten.ldexp_.default", "aten.ldexp.Tensor"), ("aten.add_.Scalar", "aten.add.Scalar"),
    ],
)  # fmt: skip
def test_forms(target: str, expected: str) -> None:
    found = functional_form(target)
    assert found is not None and found[0] == expected


@pytest.mark.filterwarnings("ignore")
def test_forms_compute_what_is_written() -> None:
    """On the first samples of torch's own that have an in-place variant."""
    tried = set()
    for info in op_db(divisible=False):
        if info.inplace_variant is None or not info.supports_dtype(torch.float64, "cpu"):
            continue
        try:
            sample = next(iter(info.sample_inputs_func(info, "cpu", torch.float64, False)))
            traced = Recorder(make_fx(calling(info.inplace_variant, sample), pre_dispatch=True)(sample.input))
            traced.run(sample.input.clone())
        except (*REFUSALS, StopIteration):
            continue
        for target, args, kwargs in traced.calls:
            if target not in tried and target.split(".")[1].endswith("_") and (found := functional_form(target)):
                tried.add(target)
                compare(target, found, args, kwargs)
    assert len(tried) > 100, sorted(tried)


def calling(variant: Callable[..., Any], sample: Any) -> Callable[[Tensor], Any]:
    return lambda x: variant(x.clone(), *sample.args, **sample.kwargs)


def compare(target: str, found: tuple[str, tuple[int, ...]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    other, order = found
    written = args[0].clone()
    torch.manual_seed(0)
    resolve(target)(written, *args[1:], **kwargs)
    torch.manual_seed(0)
    returned = resolve(other)(*(args[k] for k in order if k < len(args)), **kwargs)
    returned = returned.to(written.dtype).expand_as(written)
    torch.testing.assert_close(returned, written, msg=lambda m: f"{target} and {other}: {m}", equal_nan=True)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        h = self.inner(x).sigmoid_().clone().add_(1.5)
        h = h.clone().pow_(2).clone().float_power_(0.5).clone()
        h.fill_diagonal_(0.25)
        rows = places.clone()
        rows.floor_divide_(2).remainder_(6)
        h = h.clone().transpose_(0, 1).mul_(rows.unsqueeze(0))
        h = h.clone().ldexp_(torch.ones(6, dtype=torch.int64)).clone().div_(3)
        h[1].clamp_(max=3).addcmul_(h[0].clone(), h[2].clone(), value=0.1)
        return h.square().sum()


def test_a_forward_that_writes_is_captured() -> None:
    """Capture compares loss and gradients with those of the model."""
    program = capture(Writes().double(), (torch.randn(6, 6, dtype=torch.float64), torch.arange(6) + 3)).program
    assert not any(op.target.split(".")[1].endswith("_") for op in program.ops)


class Drops(nn.Module):
    """Draws with the probability that torch's bernoulli_ has by itself, which its other forms want to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * x.new_empty(6, 1).bernoulli_() * torch.empty(6).bernoulli_(p=0.5)).sum()


def test_what_may_be_left_out_is_filled_in() -> None:
    program = capture(Drops(), (torch.randn(6, 6),)).program
    drawn = [op.args[1] for op in program.ops if op.target == "aten.bernoulli.p"]
    assert drawn == [0.5, 0.5]


def detached(h: Tensor) -> Tensor:
    h.detach().clamp_(min=0.1)
    return h


def all_of_it(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(2).add_(1)
    return h * h


def rows(h: Tensor) -> Tensor:
    with torch.no_grad():
        h[1:3] = 0.5
        h[4].add_(h[0])
    return h


def through_a_view(h: Tensor) -> Tensor:
    part = h[:, 1:4]
    with torch.no_grad():
        part.copy_(part.sigmoid())
    return h.sin() + part.sum()


def through_a_detached_view(h: Tensor) -> Tensor:
    h.detach()[:, 2].zero_()
    return h.cos()


def by_an_output(h: Tensor) -> Tensor:
    with torch.no_grad():
        torch.exp(h.clone(), out=h)
    return h


def _added_later(out: Tensor) -> Tensor:
    torch.eye(6, out=out)
    return out.mul_(2)


MADE = {
    "eye": lambda: torch.eye(6, out=torch.empty(6, 6, dtype=torch.float64)),
    "of another dtype": lambda: torch.eye(6, out=torch.empty(6, 6)),
    "ones": lambda: torch.ones(6, 6, out=torch.empty(6, 6)),
    "full": lambda: torch.full((6, 6), 2.0, out=torch.empty(6, 6)),
    "arange": lambda: torch.arange(6, out=torch.empty(6, dtype=torch.float64)),
    "linspace": lambda: torch.linspace(0, 1, 6, out=torch.empty(6)),
    "into nothing": lambda: torch.eye(6, out=torch.empty(0)),
    "and then": lambda: _added_later(torch.empty(0)),
    "tril": lambda: torch.tril(torch.ones(6, 6), out=torch.empty(0)),
    "sum": lambda: torch.sum(torch.ones(6, 6), 0, out=torch.empty(6)),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_into_an_argument(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * MADE[name]()).square().mean()

    capture(Model(), (torch.randn(6, 6, dtype=torch.float64),))  # which compares loss and gradients


@pytest.mark.parametrize("writes", [detached, all_of_it, rows, through_a_view, through_a_detached_view, by_an_output])
def test_what_is_written_where_gradients_are_off_has_the_gradient_of_what_it_was(writes: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.scale = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x) + self.scale(x)
            return (writes(h) * self.scale.weight).square().mean()

    program = capture(Model(), (torch.randn(6, 6, dtype=torch.float64),)).program  # which compares loss and gradients
    assert sum(op.target == "aten.detach.default" for op in program.ops) >= 1


def test_what_backward_needs_as_it_was_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x).exp()
            h.data.mul_(2)
            return h.mean()

    with pytest.raises(CaptureError, match="gradients"):
        capture(Model(), (torch.randn(6, 6),))
