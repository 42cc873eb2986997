"""Functions and submodules that draw from Python's and numpy's generators run as they are written, and draw alike on all ranks."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.capture import capture
from autopar.capture.drawn import drawing, functions_replaced
from autopar.compiler import plan_of
from autopar.draws import drawn_names
from autopar.errors import CaptureError, DrawsOutside, UnsupportedOp
from autopar.run import outside_draws
from autopar.run.launch import WorkerPool
from autopar.run.region import REGION, Region
from autopar.verify import reference, verify_plan
from tests import drawing_models
from tests.drawing_models import REFUSED, RUN, WIDTH, ByArray, ByTensor, batch, mask_of

pytestmark = pytest.mark.gloo

PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "zero3": {"dp": 2, "zero": 3}, "dp2mb2": {"dp": 2, "micro_batches": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", RUN)
def test_what_draws_is_a_region(name: str) -> None:
    model = RUN[name]()
    before = outside_draws.states(), torch.get_rng_state()
    captured = capture(model, batch())  # which compares the program with the model
    assert outside_draws.states() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    regions = [op for op in captured.program.ops if op.target == REGION]
    assert len(regions) == (2 if name == "ByArray" else 1)
    rows = {"BySubmodule": (0,), "TeacherForcing": (0, 1)}.get(name, ())
    assert all(op.kwarg("draws") and op.kwarg("rows") == rows for op in regions)
    held = [x for x in dict[str, Any](captured.tensors).values() if isinstance(x, Region)]
    assert all(region.outside and not region.alike for region in held)
    how = "split by samples where the plan splits these" if rows else "whole on every rank"
    assert sum(f"runs as it is written, {how}" in note for note in captured.program.notes) == 1


SAYS = {
    "Itself": "draw them in a function of a file",
    "ByCount": r"count cannot be run as it is written beside a graph of the rest: it returns int \d",
    "ByCut": "cut cannot be run as it is written beside a graph of the rest: the shapes of what it returns depend on values",
    "Perhaps": "perhaps cannot be run as it is written beside a graph of the rest",
    "OfALayer": "draw them in a function of a file",
    "Added": "draw them in a function of a file",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_region_is_refused(name: str) -> None:
    random.seed(0)
    with pytest.raises(DrawsOutside, match=rf"(?s)depends on random numbers drawn from.*{SAYS[name]}"):
        capture(REFUSED[name](), batch())


def test_what_draws_is_found_by_who_draws() -> None:
    found = drawing(RUN["BySubmodule"](), None, ((), batch()))
    assert set(found.modules) == {"flips"} and not found.functions
    found = drawing(ByArray(), None, ((), batch()))
    assert not found.modules and found.functions == {mask_of}
    assert set(drawing(REFUSED["Itself"](), None, ((), batch())).modules) == {""}


@pytest.mark.parametrize(
    ("part", "rows", "line"),
    [
        (drawing_models.Flips, (0,), "x.flip(-1) if random"), (drawing_models.Seldom, (), "x - x.mean(0) if random"),
        (drawing_models.EachSample, (), "for _ in range(len(x))"), (drawing_models.Around, (0,), "self.inner(x * random"),
    ],
)  # fmt: skip
def test_parts_are_split_by_samples_where_they_draw_alike_for_all(part: type[nn.Module], rows: tuple[int, ...], line: str) -> None:
    """Also where what they draw seldom matters."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), part(), nn.Linear(WIDTH, 1))
    program = capture(model, (batch()["x"],), loss=lambda out: out.square().mean()).program
    (op,) = [op for op in program.ops if op.target == REGION]
    assert op.module == "1" and op.kwarg("rows") == rows
    assert any(line in note for note in program.notes)


def test_a_model_that_draws_in_its_own_code_is_split_by_samples_without_a_loss_of_its_own() -> None:
    model = drawing_models.Around()
    model.inner = nn.Linear(WIDTH, 1)
    (op, *_) = capture(model, (batch()["x"],), loss=lambda out: out.square().mean()).program.ops
    assert op.target == REGION and op.module == "" and op.kwarg("rows") == (0,)


def test_functions_are_replaced_in_this_thread_alone() -> None:
    found: list[Any] = []
    with functions_replaced({mask_of: lambda *_: "another"}):
        found.append(drawing_models.mask_of((2,), 0.5))
        thread = threading.Thread(target=lambda: found.append(drawing_models.mask_of((2,), 0.5)))
        thread.start()
        thread.join()
    assert found[0] == "another" and found[1].shape == (2,)
    assert drawing_models.mask_of is mask_of and torch.tensor([1]).tolist() == [1]


def test_a_plan_of_such_a_model_is_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = ByArray()
    given = {name: t.to("meta") for name, t in batch().items()}
    on_meta, real = capture(model, given).program, capture(ByArray(), batch()).program
    assert [op.target for op in on_meta.ops] == [op.target for op in real.ops]


def test_a_written_mask_is_chosen_by_element() -> None:
    program = capture(ByArray(), batch()).program
    assert "aten.where.self" in [op.target for op in program.ops]
    assert not [op for op in program.ops if op.target == "aten.index_put.default"]


class Writes(nn.Module):
    """Ways to write one value to the places of a mask, and others that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e, f = (self.layer(x) for _ in range(6))
        a[mask] = self.row
        b[mask] = self.row[None]
        c[:, mask[0]] = self.row[:1]
        d[mask[:, 0]] = x[0]
        e[mask[:, 0]] = e[0] * 2
        f[mask[:, 1]] = x[:2]  # a row for each, which is no choice by element
        return (a * b + c * d + e.square() * f).sum()


def test_masks_of_all_kinds_are_written() -> None:
    torch.manual_seed(0)
    given = {"x": torch.randn(4, 3, 6), "mask": torch.tensor([[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]]).bool()}
    program = capture(Writes(), given).program  # which compares losses and gradients
    assert sum(op.target == "aten.where.self" for op in program.ops) == 5
    assert sum(op.target == "aten.index_put.default" for op in program.ops) == 1


def trained(name: str, pins: dict[str, Any], gpus: int, seed: int) -> tuple[list[float], float, float]:
    """Losses of steps, and what this rank draws for itself afterwards, whose generators are seeded for itself."""
    model, given = RUN[name]().double(), batch(torch.float64)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002
    compiled: Any = autopar.compile(model, gpus=gpus, example_inputs=given, cluster="cpu", pins=pins)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    torch.manual_seed(7)
    losses = []
    for _ in range(4):
        loss = compiled(**given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, random.random(), float(numpy.random.rand())  # noqa: NPY002


def trained_on_rank(name: str, pins: dict[str, Any]) -> tuple[list[float], float, float]:
    return trained(name, pins, 2, torch.distributed.get_rank())


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    with torch.random.fork_rng(devices=[]):
        return {name: trained(name, {}, 1, 0)[0] for name in RUN}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", RUN)
def test_all_ranks_draw_alike_and_each_goes_on_with_its_own(
    name: str, plan: str, pair: WorkerPool, alone: dict[str, list[float]]
) -> None:  # fmt: skip
    if plan == "dp2mb2" and name in ("Mixed", "BySubmodule", "TeacherForcing"):  # which would draw anew for each micro-batch
        pytest.skip("what it draws for all samples at once is of all of them")
    found = pair.run(trained_on_rank, name, PLANS[plan])
    if plan == "pp2" and name == "TeacherForcing":  # on the second stage, which draws others than the first
        alone = {name: found[0][0]}
    for rank, (losses, python, array) in enumerate(found):
        assert losses == pytest.approx(alone[name], rel=1e-12)
        generator = random.Random(rank)
        assert python == generator.random()
        assert array == float(numpy.random.RandomState(rank).rand())  # noqa: NPY002
    assert len(set(alone[name])) == 4  # each step draws anew


@pytest.mark.parametrize("name", ["ByArray", "ByTensor", "ByNumber"])
def test_what_functions_draw_is_given_to_both_sides_of_a_verification(name: str, pair: WorkerPool) -> None:
    ref = reference(RUN[name](), batch(), steps=2)
    assert len(drawn_names(ref.captured)) == 0 and all(ref.draws[True, 0])  # they are inputs now
    for pins in ({"dp": 2}, {"pp": 2}):
        report = verify_plan(ref, plan_of(ref.captured, 2, cluster="cpu", pins=pins), pair, timeout_s=120)
        assert report.ok, report


class Stochastic(nn.Module):
    """Chooses by values, so that no graph holds it, drops some, and draws, twice in a call, from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.tanh(self.layer(x)), 0.5)
        noise = torch.rand_like(x) + random.random() + float(numpy.random.rand())  # noqa: NPY002
        return x * noise if float(x.detach().sum()) > 0 else x * noise.square()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Stochastic() for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + torch.rand_like(x)
        for part in self.parts:
            x = part(part(x)) + torch.rand_like(x)
        return x.square().mean()


class WithDropout(nn.Module):
    """A part that runs as it is written, and whose dropout alone is random."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), Thresholded(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(self.first(x))).square().mean()


class Thresholded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) if float(x.detach().abs().sum()) > 0 else x


@pytest.mark.parametrize("model", [RUN["BySubmodule"], Chain, WithDropout], ids=lambda kind: kind.__name__)
def test_what_submodules_draw_begins_from_one_seed_on_both_sides_of_a_verification(model: type[nn.Module], pair: WorkerPool) -> None:
    ref = reference(model(), batch(), steps=2)
    assert [op for op in ref.captured.program.ops if op.target == REGION]
    for pins in ({"dp": 2}, {"tp": 2}, {"pp": 2}):
        report = verify_plan(ref, plan_of(ref.captured, 2, cluster="cpu", pins=pins), pair, timeout_s=120)
        assert report.ok, report


class Dropping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = torch.rand_like(x) > 0.5
        return x * ctx.kept

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 3 * grads[0] * ctx.kept


class OfAFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return Dropping.apply(self.layer(x)).square().mean()  # type: ignore[no-untyped-call]


def test_what_an_autograd_function_draws_is_not_compared() -> None:
    with pytest.raises(UnsupportedOp, match="draws random numbers inside of autopar.L.region"):
        reference(OfAFunction(), batch())


def test_a_function_that_takes_values_is_a_region_before_the_submodule_around_it() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ByTensor()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.inner(x, mask)

    (op,) = [op for op in capture(Around(), batch()).program.ops if op.target == REGION]
    assert op.module == "inner.places_of"


def test_a_model_that_draws_in_its_own_code_says_what_to_do() -> None:
    with pytest.raises(CaptureError, match="or in a submodule: these run as they are written; or before the call"):
        capture(REFUSED["Itself"](), batch())
