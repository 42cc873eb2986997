"""Autograd functions around kernels: what they write where autograd does not see it, in which precision they compute, what may be added."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, region_calls
from autopar.capture.imported import with_what_is_imported
from autopar.capture.samples import is_linear, parts_of, works_by_samples, writes_unseen
from autopar.capture.terms import as_terms
from autopar.catalog import strategies_of
from autopar.errors import CaptureError
from autopar.ir import P, R, S
from autopar.planner.shard import view_of
from autopar.run.region import REGION, Place, Region
from autopar.run.region import region as run
from autopar.run.region_modules import Applied, Terms, Weight
from benchmarks._traps_kit import batch
from benchmarks.trap_programs import kernels as k
from benchmarks.trap_programs.gradients import Adjoint, HalfAdjoint

pytestmark = pytest.mark.pure
Arguments = tuple[Any, ...]


def region(function: type[torch.autograd.Function], *arguments: Any) -> Region:
    return Region(path="f", module=Applied(function), state=(), arguments=(arguments, {}), modes=(True,))


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


NORM = region(k._Norm, Place(), Place())
ROTATED = region(k._Rotated, Place(), 0.3)
GATED = region(k._Gated, Place(), Place())
LOSS = region(k._Loss, Place(), Place(), Place(), -100)


@pytest.mark.parametrize(
    ("of", "shapes", "writes"),
    [
        (NORM, [(6, 8), (8,)], (False, True)), (ROTATED, [(6, 8)], (True, True)), (GATED, [(6, 8), (6, 8)], (True, False)),
        (Region(path="f", module=nn.SiLU(), state=(), arguments=((Place(),), {}), modes=(True,)), [(6, 8)], (False, False)),
    ],
)  # fmt: skip
def test_what_is_written_unseen_is_found(of: Region, shapes: list[tuple[int, ...]], writes: tuple[bool, bool]) -> None:
    given = drawn(*shapes)
    before = [t.clone() for t in given]
    assert writes_unseen(of, given, (), draws=False, own_backward=True) == writes
    assert all(map(torch.equal, given, before)), "it was tried on copies"


def test_what_cannot_be_tried_is_taken_to_write() -> None:
    assert writes_unseen(NORM, drawn((6, 8), (8,)), (), draws=True, own_backward=True) == (True, True)
    assert writes_unseen(NORM, drawn((6, 8), (7,)), (), draws=False, own_backward=True) == (True, True)
    assert writes_unseen(NORM, drawn((6, 8), (8,)), (), draws=True, own_backward=False) == (False, False)


def test_memory_that_is_written_is_private() -> None:
    (x,) = drawn((6, 8))
    kept = x.clone()
    private = Region(path="f", module=Applied(k._Rotated), state=(), arguments=((Place(), 0.3), {}), modes=(True,), private=True,
                     private_gradients=True)  # fmt: skip
    (y,) = run(private, [x.requires_grad_()], [], ((6, 8),), dtypes=("float32",), grads=(True,))
    assert torch.equal(x, kept)
    (grad,) = drawn((6, 8))
    given = grad.clone()
    (found,) = torch.autograd.grad(y, x, given)
    assert torch.equal(given, grad)
    assert torch.allclose(found, k._Rotated.turned(grad.clone(), -0.3))


class _InFloat32(torch.autograd.Function):
    """x * w by each row, and gradients, of float32 whatever it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x.float() * w.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = (t.float() for t in ctx.saved_tensors)
        g = grads[0].float()
        return (g * w).to(grads[0].dtype), (g * x).sum(0).to(grads[0].dtype)


class _Not64(_InFloat32):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no kernel")
        return _InFloat32.forward(ctx, x, w)


class _Coupled(_InFloat32):
    """A ten-thousandth of the mean of all rows is in each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return _InFloat32.forward(ctx, x, w) + 1e-4 * x.float().mean(0).to(x.dtype)


class _Almost(torch.autograd.Function):
    """In float64, with a millionth of the mean of all rows in each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w + 1e-6 * x.mean(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x).sum(0)


@pytest.mark.parametrize(
    ("function", "dtype", "rows"),
    [
        (k._Norm, torch.float32, (0,)), (_InFloat32, torch.float32, (0,)), (_Not64, torch.float32, (0,)),
        (_Not64, torch.bfloat16, (0,)), (_Not64, torch.float16, (0,)), (_Coupled, torch.float32, ()), (_Almost, torch.float32, ()),
    ],
)  # fmt: skip
def test_rows_are_found_in_the_precision_of_a_kernel(
    function: type[torch.autograd.Function], dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    """What rounds to float32 agrees up to that; what computes in float64 is held to it."""
    of, given = region(function, Place(), Place()), drawn((24, 8), (8,), dtype=dtype)
    result = function.apply(*given)
    assert works_by_samples(of, given, (), (result,), draws=False, own_backward=True) == (True, rows)
    if rows:
        assert is_linear(of, given, (), draws=False)


def test_samples_are_cut_into_few_parts() -> None:
    """A trial of a batch of tokens is no call for each of them."""
    assert [parts_of(n) for n in (2, 3, 8, 12, 32_768, 30, 17, 49)] == [(2,), (3,), (2, 8), (2, 3, 12), (2, 16), (2, 3, 15), (17,), (7,)]


def test_labels_do_not_make_a_function_nonlinear() -> None:
    given = [*drawn((6, 8), (4, 8)), torch.randint(4, (6,), generator=torch.Generator().manual_seed(0))]
    assert is_linear(LOSS, given, (), draws=False)


class _Sum(torch.autograd.Function):
    """sum(x**2), or how: the mean; times the largest number of all; the mean of labels that are not a number of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, how: str) -> Tensor:
        counts = (y != -7).to(x.dtype) if how == "labels" else torch.ones(len(x), dtype=x.dtype)
        scale = {"sum": 1.0, "mean": 1 / len(x), "largest": x.abs().max(), "labels": 1 / counts.sum()}[how]
        ctx.save_for_backward(x, counts * scale)
        result: Tensor = (x**2).sum(-1) @ (counts * scale)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        return grads[0] * 2 * x * scale[:, None], None, None


def _labels(*values: int) -> Tensor:
    return torch.tensor(values or (0, 1, 2, 3, 0, 1))


@pytest.mark.parametrize(
    ("of", "given", "weight", "rows"),
    [
        (lambda: LOSS, lambda: [*drawn((6, 8), (4, 8)), _labels()], Weight(2, -100), (0, 2)),
        (lambda: LOSS, lambda: [*drawn((20, 16), (64, 16)), _labels(*[0, 1, 2, 3, -100] * 4)], Weight(2, -100), (0, 2)),
        (lambda: region(_Sum, Place(), Place(), "sum"), lambda: [*drawn((6, 8)), _labels()], None, (0, 1)),
        (lambda: region(_Sum, Place(), Place(), "mean"), lambda: drawn((6, 8), (6,)), Weight(0), (0, 1)),
        (lambda: region(_Sum, Place(), Place(), "mean"), lambda: [*drawn((6, 8)), _labels()], Weight(0), (0,)),
        (lambda: region(_Sum, Place(), Place(), "labels"), lambda: [*drawn((6, 8)), _labels()], "none", ()),
        (lambda: region(_Sum, Place(), Place(), "largest"), lambda: drawn((6, 8), (6,)), "none", ()),
    ],
)  # fmt: skip
def test_what_may_be_added_is_found(
    of: Callable[[], Region], given: Callable[[], list[Tensor]], weight: Weight | str | None, rows: tuple[int, ...]
) -> None:
    """A mean that uses labels of which it is not known which would be ignored is none of samples: a later batch may have some."""
    tensors, tried = given(), of()
    result = tried(tensors, ())[0].requires_grad_()
    found, split = as_terms(tried, tensors, (result,), draws=False)
    assert split == rows
    assert isinstance(found.module, Terms) == (weight != "none")
    if isinstance(found.module, Terms):
        assert found.module.weight == weight
    assert as_terms(tried, tensors, (result,), draws=True) == (tried, ())


def test_a_part_without_labels_is_zeros() -> None:
    x, w = (t.requires_grad_() for t in drawn((6, 8), (4, 8)))
    terms = Region(path="f", module=Terms(k._Loss, Weight(2, -100)), state=(), arguments=LOSS.arguments, modes=(True,))
    (total,) = terms([x, w, torch.full((6,), -100)], ())
    assert total == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(total, [x, w]))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = k._Loss.apply(torch.tanh(x), self.head.weight, y, -100)
        return loss


def test_the_strategy_of_a_loss_is_a_sum_of_terms() -> None:
    found = capture(_Model(), (*drawn((6, 8)), _labels())).program
    (op,) = [op for op in found.ops if op.target == REGION]
    split = [s for s in strategies_of(view_of(found, op, 2)) if s.splits_work]
    assert [(s.inputs, s.outputs) for s in split] == [((R, S(0), R, S(0)), (P,))]
    assert any("whose results are added" in note for note in found.notes)


class _OnArrays(_InFloat32):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return torch.from_numpy(_InFloat32.forward(ctx, x, w).detach().numpy())


def test_calls_of_a_function_that_differ_in_numbers_alone_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.ones(8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.weights[0]
            for weight in self.weights:
                x = _OnArrays.apply(x, weight)
            return _OnArrays.apply(x[:2], self.weights[0]).sum() + x.sum()

    tries, tried = [], region_calls._tried
    monkeypatch.setattr(region_calls, "_tried", lambda region, given, *more: tries.append(given[0].shape) or tried(region, given, *more))
    found = capture(Layers(), (torch.ones(6, 8),)).program
    assert sorted(tries) == [(2, 8), (6, 8)]
    assert [op.kwarg("rows") for op in found.ops if op.target == REGION] == [(0,)] * 4


def test_what_a_call_imports_is_imported_before_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a module within a package, and one that is not there; imports of torch's own are its affair."""
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "backend.py").write_text("ENTERED = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    begun = []

    def call() -> str:
        begun.append(1)
        import lazily.backend  # type: ignore[import-not-found]

        try:
            import not_there_at_all  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            return str(lazily.backend.__name__)
        return ""

    before = list(sys.meta_path)
    try:
        assert with_what_is_imported(call) == "lazily.backend"
        assert len(begun) == 3, "begun again for each module, and no more"
        assert sys.meta_path == before
        assert with_what_is_imported(call) == "lazily.backend"
    finally:
        for name in ("lazily", "lazily.backend"):
            sys.modules.pop(name, None)


def test_a_function_that_bends_the_gradients_of_a_module_it_is_given_is_refused() -> None:
    """It would read weights where they lie: parts, or on another stage."""
    with pytest.raises(CaptureError, match=r"an autograd function is given a module \(Linear\), whose weights its backward may read"):
        capture(HalfAdjoint(), batch())
    x, y = batch()
    for dtype in (torch.float32, torch.float64):
        found = capture(Adjoint().to(dtype), (x.to(dtype), y)).program
        assert not any(op.target == REGION for op in found.ops), "what autograd would compute is a graph"


class _Held(Tensor):
    """A tensor that holds another, as those of a lower precision do, and takes no operators."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]
        made.held = held
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(f"{func}")


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        held: Tensor = _Held(torch.from_numpy(x.detach().numpy().round(1)))
        return held

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Release(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.held * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class _Lower(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Release.apply(_Hold.apply(x))
        return y


class _InLower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lower = nn.Linear(8, 8), _Lower()

    def forward(self, x: Tensor) -> Tensor:
        return self.lower(self.first(x)).sum()


def test_what_computes_with_tensors_of_other_classes_runs_as_it_is_written() -> None:
    found = capture(_InLower(), (drawn((6, 8))[0],)).program
    assert [(op.module, op.kwarg("rows")) for op in found.ops if op.target == REGION] == [("lower", (0,))]
    model = _InLower()
    model.first.weight = nn.Parameter(_Held(model.first.weight.detach()), requires_grad=False)
    with pytest.raises(CaptureError, match=r"first.weight of _InLower is a _Held tensor, and a program is of dense ones"):
        capture(model, (drawn((6, 8))[0],))
