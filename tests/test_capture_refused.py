"""What cannot be captured as operators: refused with its line and a remedy, or run as it is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError, SparseGradients
from autopar.run.region import REGION
from tests.capture_model import BATCH, DIM, Function

pytestmark = pytest.mark.pure


def branch_on_values(m: Function, x: torch.Tensor) -> torch.Tensor:
    return x * m.weight if x.sum() > 0 else x + m.weight


def shape_from_values(m: Function, x: torch.Tensor) -> torch.Tensor:
    few = int((x > 0).sum())
    return x[:, :few].sum() * m.weight.sum()


def changes_parameter(m: Function, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.weight.mul_(x.mean())
    return x * m.weight


def sparse_gradient(m: Function, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding((x.sum(-1) > 0).long(), m.weight, sparse=True) * x


def no_gradient(m: Function, x: torch.Tensor) -> torch.Tensor:
    return x * m.weight.detach()


@pytest.mark.parametrize(
    "fn, says",
    [
        (branch_on_values, "torch.where"),
        (shape_from_values, "fixed capacity"),
        (changes_parameter, "changes a parameter"),
        (sparse_gradient, "gradients of a parallel module are dense"),
        (no_gradient, "requires a gradient"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_cannot_be_captured_is_refused_with_line_and_remedy(fn: Callable[..., torch.Tensor], says: str) -> None:
    model = Function(fn)
    with pytest.raises(CaptureError, match=says) as refused:
        capture(model, (torch.randn(BATCH, DIM),))
    assert "what to do:" in str(refused.value)
    if fn is not no_gradient:
        assert re.search(r"at \S*(test_capture_refused|capture_model)\.py:\d+: ", str(refused.value))


class Bags(nn.Module):
    """Sums rows of a table, whose gradient is sparse, in a submodule that could run as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(BATCH, DIM, mode="sum", sparse=True)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.bags(at).square().sum()


def test_sparse_gradients_are_refused_by_name() -> None:
    with pytest.raises(SparseGradients, match=r"(?s)embedding_bag.*_refused.py.*what to do: build the embedding with sparse=False"):
        capture(Bags(), (torch.arange(BATCH).view(-1, 2),))


class Aggregating(nn.Module):
    """Multiplies by an adjacency matrix, which is a buffer, a plain attribute, or what the function closes over."""

    def __init__(self, held: str, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        if held == "buffer":
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = adjacency if held == "attribute" else None
        self.unused, self.closed = adjacency, lambda: adjacency

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor | None = None) -> torch.Tensor:
        given = next((a for a in (adjacency, self.adjacency) if a is not None), None)
        return torch.mm(self.closed() if given is None else given, self.layer(x)).square().sum()


@pytest.mark.parametrize("held", ["buffer", "attribute", "closure", "input"])
@pytest.mark.parametrize("kind", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_are_refused_where_they_are_used(held: str, kind: str) -> None:
    adjacency = torch.eye(BATCH).to_sparse() if kind == "coo" else torch.eye(BATCH).to_sparse_csr()
    given = (torch.randn(BATCH, DIM), *((adjacency,) if held == "input" else ()))
    with pytest.raises(CaptureError, match=r"(?is)sparse.*what to do: .*\(\.to_dense\(\)\)"):
        capture(Aggregating(held, adjacency), given)
    dense = Aggregating("attribute", torch.eye(BATCH))
    dense.unused = adjacency
    assert capture(dense, (torch.randn(BATCH, DIM),)).program.batch_size is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_input_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(n, DIM) for n in (1, 2, 3, 2)])
    with pytest.raises(CaptureError, match=r"input 0 of Padding is a nested tensor.*\n  what to do: give the model a padded tensor"):
        capture(Padding(), (nested,))


class Padding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to_padded_tensor(0.0)).square().mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


def own_gradient(m: Function, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = Doubled.apply(x * m.weight)
    return y


def hooked(m: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * m.weight
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y


@pytest.mark.parametrize(
    ("fn", "source"),
    [(own_gradient, "y"), (hooked, "y.register_hook(lambda grad")],
    ids=["own_gradient", "hooked"],
)
def test_gradients_that_the_graph_does_not_show_are_no_operators(fn: Callable[..., torch.Tensor], source: str) -> None:
    program = capture(Function(fn), (torch.randn(BATCH, DIM),)).program
    assert [op.source.split(": ")[1] for op in program.ops if op.target == REGION] == [source]
    if fn is hooked:  # functions are tried on small tensors (tests/test_own_gradients_on_meta.py)
        with torch.device("meta"), pytest.raises(CaptureError, match="gradients of its own"):
            capture(Function(fn), (torch.randn(BATCH, DIM),))


def test_hooks_on_parameters_and_modules_are_refused() -> None:
    for hook in (lambda m: m.weight.register_hook(torch.neg), lambda m: m.register_backward_hook(lambda *_: None)):
        model = nn.Linear(DIM, DIM)
        hook(model)
        with pytest.raises(CaptureError, match="gradient hooks"):
            capture(model, (torch.randn(BATCH, DIM),), loss=torch.sum)
