"""Functions of torch that look at values, written out: they give what torch's own give, and no graph is without them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.written_out import WRITTEN_OUT
from autopar.compiler import plan_of
from autopar.errors import CaptureError
from autopar.planner.plan import parse_strategy
from autopar.run import WorkerPool
from autopar.run.region import REGION
from autopar.verify import verify

pure = pytest.mark.pure


@pure
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex128])
@pytest.mark.parametrize("shape", [(4, 9), (9,), (1, 9), (4, 1)])
def test_covariances_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randint(9, shape) if dtype == torch.int64 else torch.randn(shape, dtype=dtype)
    for function, options in ((torch.cov, {"correction": 0}), (torch.cov, {}), (torch.corrcoef, {})):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a single observation
            expected = function(x, **options)
        torch.testing.assert_close(WRITTEN_OUT[function](x, **options), expected, equal_nan=True)


@pure
def test_counts_of_numbers_are_those_of_torch() -> None:
    torch.manual_seed(0)
    numbers = torch.randint(5, (20,))
    for x in (numbers, numbers.int(), numbers.to(torch.uint8)):
        for weights in (None, torch.randn(20), torch.randn(20).double(), torch.arange(20), torch.randn(20).half()):
            torch.testing.assert_close(WRITTEN_OUT[torch.bincount](x, weights, 7), torch.bincount(x, weights, 7))
    with pytest.raises(ValueError, match="give it a larger minlength"):
        WRITTEN_OUT[torch.bincount](numbers, minlength=3)


@pure
@pytest.mark.parametrize("r,with_replacement", [(r, w) for r in (1, 2, 3) for w in (True, False)])
def test_combinations_are_those_of_torch(r: int, with_replacement: bool) -> None:
    for count in (5, 1):
        x = torch.randn(count)
        assert WRITTEN_OUT[torch.combinations](x, r, with_replacement).equal(torch.combinations(x, r, with_replacement))


@pure
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size_are_those_of_torch(mode: str) -> None:
    torch.manual_seed(0)
    indices, grad = torch.randint(6, (4, 3)), torch.randn(4, 5)
    for weights in (None, torch.rand(4, 3)) if mode == "sum" else (None,):
        for padding in (None, 2):
            tables = [torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
            scales = [None if weights is None else weights.clone().requires_grad_() for _ in range(2)]
            functions = WRITTEN_OUT[F.embedding_bag], F.embedding_bag
            for function, table, scale in zip(functions, tables, scales, strict=True):
                function(indices, table, mode=mode, per_sample_weights=scale, padding_idx=padding).backward(grad)
            torch.testing.assert_close(tables[0].grad, tables[1].grad)
            if weights is not None:
                torch.testing.assert_close(scales[0].grad, scales[1].grad)  # type: ignore[union-attr]
    assert WRITTEN_OUT[F.embedding_bag](indices.flatten(), tables[0], torch.tensor([0, 2])) is NotImplemented


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.weighed = nn.EmbeddingBag(12, 8), nn.EmbeddingBag(12, 8, mode="sum", padding_idx=0)
        self.last = nn.Linear(8, 4)

    def forward(self, indices: Tensor, scales: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.rows(indices) + self.weighed(indices, per_sample_weights=scales)), y)


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 4}, {"dp": 2, "micro_batches": 2, "tp": 2}], ids=str)
def test_bags_of_one_size_are_split_by_samples(pins: dict[str, int], workers: WorkerPool) -> None:
    torch.manual_seed(0)
    given = torch.randint(12, (8, 3)), torch.rand(8, 3), torch.arange(8) % 4
    plan = plan_of(capture(Bags(), given), 4, cluster="cpu", pins=pins)
    assert all(parse_strategy(text).splits_work for name, text in plan.axes["dp"].ops.items() if "bag" in name)
    report = verify(Bags(), given, 4, pins=pins, steps=2, pool=workers)
    assert report.ok, report


@pure
def test_what_is_not_written_out_is_torchs_own() -> None:
    class Counted(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(x), y, weight=1 / (torch.bincount(y).amax() + torch.ones(4)))

    program = capture(Counted(3, 4), (torch.randn(8, 3), torch.arange(8) % 4)).program
    assert [op.target for op in program.ops].count(REGION) == 1


@pure
def test_functions_that_look_at_values_are_captured() -> None:
    class Decorrelated(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = super().forward(x)
            counts = torch.bincount(y, minlength=4)
            apart = torch.cov(x.t()).square().sum() + torch.corrcoef(z.t()).square().sum()
            pairs = torch.combinations(torch.arange(4.0)).prod(1).sum()
            return F.cross_entropy(z, y, weight=1 / (counts + 1.0)) + 0.01 * pairs * apart

    torch.manual_seed(0)
    model, x, y = Decorrelated(8, 4), torch.randn(12, 8), torch.arange(12) % 4
    assert any("bincount" in note for note in capture(model, (x, y)).program.notes)  # that it is asked for in every step


@pure
def test_transforms_of_torch_are_refused_with_what_to_do() -> None:
    class Curved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            curvature = torch.func.vmap(lambda p: torch.func.hessian(lambda q: torch.tanh(super(Curved, self).forward(q)).sum())(p).trace())
            return curvature(x).square().mean()

    with pytest.raises(CaptureError, match=r"(?s)Curved.*what to do: .*torch.autograd.grad\(.*in a submodule") as raised:
        capture(Curved(4, 4), (torch.randn(6, 4),))
    assert "or: move that line" not in str(raised.value)
