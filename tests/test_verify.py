"""Real architectures on four real processes: loss, gradients, trained parameters and copies against the original, in float64."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from autopar.capture import lift_to_float64
from autopar.compare import digest, unequal, worst, worst_leaf
from autopar.compiler import plan_of
from autopar.errors import Infeasible
from autopar.run import WorkerPool
from autopar.verify import TOLERANCE, Reference, Report, reference, verify, verify_plan
from benchmarks import _models
from tests.routed_model import WIDTH, Mixture

pytestmark = pytest.mark.gloo

CASES = {
    "gpt2": (
        "auto", "dp=2 tp=2", "tp=2 pp=2", "dp=2 pp=2 micro_batches=4", "dp=4 recompute=full", "dp=4 zero=3",
        "dp=4 zero=2 micro_batches=2", "dp=2 tp=2 zero=2", "dp=2 pp=2 zero=2 micro_batches=4", "dp=4 zero=3 shard=2",
    ),  # fmt: skip
    "t5": ("tp=4", "pp=4", "dp=2 tp=2 zero=1", "dp=4 zero=2 shard=2 micro_batches=2"),
    "resnet": ("dp=4", "tp=2 pp=2"),
    "mixtral": ("dp=2 tp=2", "dp=2 pp=2"),
    "unruled": ("dp=2 tp=2",),
}


@functools.cache
def referenced(name: str) -> Reference:
    model, inputs, *loss = getattr(_models, name)()
    return reference(model, inputs, loss=loss[0] if loss else None)


def pins_of(text: str) -> dict[str, Any]:
    pairs = [pair.split("=") for pair in text.split()] if text != "auto" else []
    return {key: int(value) if value.isdigit() else value for key, value in pairs}


def errors(report: Report) -> Mapping[str, float]:
    return {"loss": report.loss, report.gradient_at: report.gradient, report.parameter_at: report.parameter}


@pytest.mark.parametrize("name,plan", [(name, plan) for name, plans in CASES.items() for plan in plans])
def test_equals_the_original(name: str, plan: str, workers: WorkerPool) -> None:
    pins = pins_of(plan)
    ref = referenced(name)
    decided = plan_of(ref.captured, 4, cluster="cpu", pins=pins)
    report = verify_plan(ref, decided, workers, timeout_s=120)
    assert {k: v for k, v in errors(report).items() if not v < TOLERANCE} == {}
    assert report.unequal == ()
    assert {k: v for k, v in decided.mesh.items() if k in pins} == {k: v for k, v in pins.items() if k in decided.mesh}


def check(model: Callable[[], nn.Module], inputs: Callable[[], tuple[torch.Tensor, ...]], plan: str, workers: WorkerPool) -> None:
    torch.manual_seed(0)
    ref = reference(model(), inputs())
    report = verify_plan(ref, plan_of(ref.captured, 4, cluster="cpu", pins=pins_of(plan)), workers, timeout_s=120)
    assert {k: v for k, v in errors(report).items() if not v < TOLERANCE} == {}


class Masked(nn.Module):
    """A loss over masked tokens, which divides by their number: the mask's sum is of the whole batch, its product with losses is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.last(torch.tanh(self.first(x)))
        return nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.losses(x, y) * mask).sum() / mask.sum().clamp(min=1)


class Weighed(Masked):
    """A weight for each place in the batch, which no input gives."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.losses(x, y).sum(1) * torch.linspace(1, 2, x.shape[0], dtype=x.dtype)).sum() + 0.0 * mask.sum()


def _masked() -> tuple[torch.Tensor, ...]:
    return torch.randn(8, 6, 16), torch.randint(0, 8, (8, 6)), (torch.rand(8, 6) > 0.3).float()


class Pooled(nn.Module):
    """A batch norm of one value of each sample, as in squeeze-and-excitation and pyramids of pooled maps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x).mean((2, 3), keepdim=True)).relu().flatten(1)).square().mean()


@pytest.mark.parametrize("pins", [{"dp": 4}, {"dp": 4, "zero": 3}], ids=str)
def test_a_rank_may_have_one_value_of_what_all_normalise(pins: dict[str, int], workers: WorkerPool) -> None:
    report = verify(Pooled(), (torch.randn(4, 3, 8, 8),), 4, pins=pins, pool=workers)
    assert {k: v for k, v in errors(report).items() if not v < TOLERANCE} == {}
    assert report.buffer < TOLERANCE


@pytest.mark.parametrize("model", [Masked, Weighed])
@pytest.mark.parametrize("plan", ["dp=4 micro_batches=2", "dp=2 pp=2 micro_batches=4", "dp=2 tp=2 micro_batches=2 zero=3"])
def test_what_derives_from_inputs_alone_keeps_no_batch_from_being_split(model: type[nn.Module], plan: str, workers: WorkerPool) -> None:
    check(model, _masked, plan, workers)


@pytest.mark.parametrize("plan", ["dp=4", "dp=2 pp=2 micro_batches=4", "dp=2 tp=2 micro_batches=2 zero=3"])
def test_experts_are_given_the_rows_of_a_micro_batch_of_a_rank(plan: str, workers: WorkerPool) -> None:
    check(Mixture, lambda: (torch.randn(8, 3, WIDTH), torch.randn(8, 3, WIDTH)), plan, workers)


class Table(nn.Module):
    """A model with a tensor of its own that is neither parameter nor buffer, and of a lower precision than what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = torch.linspace(-1, 1, 8 * 4).view(4, 8)
        self.others = {"scale": [torch.tensor(2.0)], "shift": (torch.ones(8), "of the last dim")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.others["scale"][0] + self.table
        return (self.second(x) * self.table.type_as(x) + self.others["shift"][0]).square().mean()


@pytest.mark.parametrize("plan", ["dp=4", "tp=4", "pp=2 dp=2"])
def test_tensors_that_are_no_buffers_reach_every_rank(plan: str, workers: WorkerPool) -> None:
    check(Table, lambda: (torch.randn(8, 4, 8),), plan, workers)


class Positions(nn.Module):
    """Takes a table of as many rows as a rank has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, table: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.last(torch.tanh(self.first(x) + table)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("plan", ["dp=2 pp=2 micro_batches=2", "dp=2 tp=2 micro_batches=2"])
def test_an_input_that_only_looks_like_a_batch_is_given_to_every_micro_batch(plan: str, workers: WorkerPool) -> None:
    check(Positions, lambda: (torch.randn(8, 4, 16), torch.randn(4, 32), torch.randint(0, 8, (8, 4))), plan, workers)


LOW = torch.float32  # names that keep what they meant when this file was imported, whatever torch.float32 is made to mean later
LOWER = {"dtype": LOW}
ONE = torch.ones(1)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch would rather see it gone, and models still have it
    scripted = torch.jit.script(_softmax)


def without_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(x.float()).to(x.dtype)


TABLE = numpy.linspace(0, 1, 16, dtype=numpy.float32)
CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x.float().sin().to(x.dtype),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 8, 2)).cfloat().square()).flatten(1).to(x.dtype),
    "to": lambda x: x.to(LOW).sin().type_as(x),
    "to another": lambda x: x.to(ONE).sin() + x.type_as(ONE).cos(),
    "type": lambda x: x.type(torch.FloatTensor).sin().double(),
    "softmax": lambda x: nn.functional.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype),
    "softmax by name": lambda x: nn.functional.softmax(x, dim=-1, dtype=LOW).to(x.dtype) + nn.functional.log_softmax(x, -1, **LOWER),
    "sums": lambda x: x / (1 + torch.sum(x * x, -1, keepdim=True, **LOWER)) - x.mean(-1, True, dtype=LOW),
    "norms": lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=LOW) + x / x.norm(dim=-1, keepdim=True, dtype=LOW),
    "factories": lambda x: x * torch.linspace(0, 1, 16, dtype=LOW).sin() + torch.arange(16, **LOWER).cos() + x.new_ones(16, dtype=LOW) / 3,
    "numbers": lambda x: x * torch.FloatTensor([0.5, 0.3] * 8).sin() + torch.HalfTensor([0.1]),
    "arrays": lambda x: x * torch.from_numpy(TABLE).sin() + torch.as_tensor(TABLE).cos() - torch.tensor(TABLE) / 3,
    "autocast": without_autocast,
    "script": scripted,
}


class Lower(nn.Module):
    """A float64 model that computes in a lower precision in its middle."""

    def __init__(self, cast: str) -> None:
        super().__init__()
        self.cast = cast
        self.first, self.second, self.last = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(CASTS[self.cast](self.second(torch.tanh(self.first(x))))).square().mean()


@pytest.mark.parametrize("cast", CASTS)
def test_lower_precision_inside_is_lifted_on_both_sides(cast: str, workers: WorkerPool) -> None:
    """Under a plan that sends between stages what it computes, and sums in another order."""
    check(lambda: Lower(cast), lambda: (torch.randn(12, 16),), "pp=2 tp=2", workers)


def test_what_stays_in_a_lower_precision_is_said() -> None:
    class Table(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * ONE.sin().sum()).square().mean()

    ref = reference(Table(4, 4), (torch.randn(8, 4),))
    assert "test_verify.py" in ref.notes[0]
    assert "ONE.sin()" in ref.notes[0]
    assert reference(nn.Linear(4, 4), (torch.randn(8, 4),), loss=_models.mean_square).notes == ()


def test_lifting_ends_with_its_region() -> None:
    x = torch.ones(3, dtype=torch.float64)
    with lift_to_float64():
        assert x.to(LOW).dtype == x.type(torch.FloatTensor).dtype == x.to(ONE).dtype == torch.float64
        assert scripted(x.to(LOW)).dtype == torch.zeros(1).dtype == torch.float64
        assert x.cfloat().dtype == torch.complex128
    assert x.to(LOW).dtype == x.type(torch.FloatTensor).dtype == x.to(ONE).dtype == torch.zeros(1).dtype == torch.float32
    assert torch.float32 is LOW


class Filter(nn.Module):
    """Multiplies spectra by a complex weight, which is a real parameter seen as another dtype, and by its conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.view_as_complex(self.weight).transpose(0, 1)
        spectrum = torch.fft.rfft(self.first(x), dim=1)
        return self.last(torch.fft.irfft(spectrum * weight + spectrum * weight.conj(), n=4, dim=1)).square().mean()


def test_what_is_gathered_where_it_is_used_may_be_seen_as_another_dtype(workers: WorkerPool) -> None:
    check(Filter, lambda: (torch.randn(8, 4, 8),), "dp=4 zero=3", workers)


def test_split_into_micro_batches_is_refused_where_the_result_would_change(workers: WorkerPool) -> None:
    with pytest.raises(Infeasible, match="micro-batches: not split, because"):
        plan_of(referenced("resnet").captured, 4, cluster="cpu", pins={"dp": 2, "pp": 2, "micro_batches": 4})


@pytest.mark.parametrize("pins", [{"dp": 2, "pp": 2, "micro_batches": 4}, {"tp": 4}], ids=str)
def test_tied_weights_stay_equal_where_ranks_count_different_numbers_of_labels(pins: dict[str, int], workers: WorkerPool) -> None:
    """After five steps, the two copies of a tied embedding on the first and the last stage among them."""
    model, inputs = _models.gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    counts = (inputs["labels"][:, 1:] != -100).unflatten(0, (2, 4, -1)).sum((2, 3))  # of each rank and micro-batch
    assert counts.unique().numel() == counts.numel()
    report = verify(model, inputs, 4, pins=pins, steps=5, pool=workers)
    assert pins.items() <= {**report.plan.mesh, "micro_batches": report.plan.micro_batches}.items()
    assert report.copies_equal, report.unequal
    assert report.ok, errors(report)


class Statistics(nn.Module):
    """Batch norm, a buffer that is in no state_dict, and something that only evaluation does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32, momentum=0.3), nn.Linear(32, 8)
        self.register_buffer("seen", torch.zeros(16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(x.sum(0))
        hidden = self.last(torch.tanh(self.norm(self.first(x))))
        return (hidden if self.training else hidden * 2).square().mean() + 0.01 * (x.sum(0) - self.seen).square().mean()


@functools.cache
def statistics() -> Reference:
    torch.manual_seed(0)
    return reference(Statistics(), (torch.randn(12, 16),), later=True)


def test_what_comes_after_the_steps_is_of_its_own_mode_and_size() -> None:
    ref = statistics()
    assert ref.later == ((False, 0), (True, 1), (True, 0))
    assert [c.program.batch_size for c in ref.forms.values()] == [12, 24]
    assert set(ref.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen"}
    assert ref.buffers["norm.num_batches_tracked"].item() == 3
    assert len({*ref.losses, *ref.later_losses}) == 6  # no two calls are alike


@pytest.mark.parametrize("plan", ["dp=4", "tp=4"])
def test_buffers_and_batches_of_other_sizes_are_compared(plan: str, workers: WorkerPool) -> None:
    ref = statistics()
    decided = plan_of(ref.captured, 4, cluster="cpu", pins=pins_of(plan))
    report = verify_plan(ref, decided, workers, timeout_s=120)
    assert report.ok, errors(report)
    assert report.batches is not None
    assert report.batches < TOLERANCE

    moved = dict(ref.buffers, seen=ref.buffers["seen"] + 1e-6)
    report = verify_plan(dataclasses.replace(ref, buffers=moved), decided, workers, timeout_s=120)
    assert (report.ok, report.buffer_at) == (False, "seen")
    later = (*ref.later_losses[:2], ref.later_losses[2] * (1 + 1e-6))
    report = verify_plan(dataclasses.replace(ref, later_losses=later), decided, workers, timeout_s=120)
    assert not report.ok
    assert report.batches == pytest.approx(1e-6, rel=1e-3)


def test_evaluation_is_compared(workers: WorkerPool) -> None:
    ref = reference(_models.mlp()[0], _models.mlp()[1], loss=_models.mean_square, later=True)
    decided = plan_of(ref.captured, 4, cluster="cpu", pins={"dp": 2, "tp": 2})
    report = verify_plan(ref, decided, workers, timeout_s=120)
    assert report.ok, errors(report)
    assert report.evaluation is not None
    assert report.notes == ()
    later = (ref.later_losses[0] + 1e-6, *ref.later_losses[1:])
    assert not verify_plan(dataclasses.replace(ref, later_losses=later), decided, workers, timeout_s=120).ok


def test_bits_that_differ_between_copies_are_named() -> None:
    x = torch.ones(3)
    assert digest(x) == digest(x.clone()) != digest(x.nextafter(2 * x))
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(1.5))
    ranks = [{"a": digest(x), "b tp:0": digest(x)}, {"a": digest(x), "b tp:1": digest(2 * x)}, {"a": digest(2 * x)}]
    assert unequal(ranks) == ("a",)
    assert unequal(ranks[:2]) == ()


@pytest.mark.parametrize(
    "found,error,at",
    [
        ({"a": [1.0, 2.0]}, 0.0, ""),
        ({"a": [1.0, 2.0 + 2e-8]}, 1e-8, "a[1]"),
        ({"a": [1.0]}, float("inf"), "a[1]"),
        ({"a": [1.0, float("nan")]}, float("inf"), "a[1]"),
        ({"a": [1.0, 2]}, float("inf"), "a[1]"),
        ({"a": [1.0, torch.tensor(2.0)]}, float("inf"), "a[1]"),
        ({"a": [1.0, 2.0], "b": 0}, float("inf"), "b"),
    ],
)
def test_numbers_by_name(found: Any, error: float, at: str) -> None:
    assert worst_leaf(found, {"a": [1.0, 2.0]}, floor=1e-6) == (pytest.approx(error, rel=1e-6), at)


@pytest.mark.parametrize(
    "mask,error",
    [
        ([0.0, float("-inf"), 4.0], 0.0), ([0.0, float("-inf"), 4.5], 0.125), ([0.0, -9e9, 4.0], float("inf")),
        ([0.0, float("inf"), 4.0], float("inf")), ([0.0, float("nan"), 4.0], float("inf")),
    ],
)  # fmt: skip
def test_infinities_of_a_mask_are_equal_or_not(mask: list[float], error: float) -> None:
    assert worst({"mask": torch.tensor(mask)}, {"mask": torch.tensor([0.0, float("-inf"), 4.0])}, floor=1e-6)[0] == error


def test_a_model_with_infinities_in_a_buffer_verifies(workers: WorkerPool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.linear(x)[:, None] + self.mask).softmax(-1) * torch.arange(8)).sum((1, 2)).square().mean()

    report = verify(Masked(), (torch.randn(4, 8),), 4, pins={"dp": 4}, pool=workers)
    assert max(report.loss, report.gradient, report.parameter, report.buffer) < TOLERANCE
