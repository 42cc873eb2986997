"""Values of tensors that decide sizes, or whether a forward raises: what depends on them runs as it is written, and the rest is planned."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import Captured, capture
from autopar.capture.conditions import must_be
from autopar.compiler import emit, plan_of
from autopar.errors import CaptureError
from autopar.ir import Op
from autopar.planner.moments import split_into_moments
from autopar.run import WorkerPool
from autopar.run.condition import Condition
from autopar.run.ctc import ctc_loss
from autopar.run.region import REGION
from autopar.verify import reference, verify_plan

BATCH, DIM, CLASSES = 8, 8, 4
pure, gloo = pytest.mark.pure, pytest.mark.gloo


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.first(x))))


class Masked(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.hidden(x))[y > 0], y[y > 0])


class Experts(Model):
    """Two islands, of which the second is given what the first gives; weights that only they read."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.hidden(x)
        for k, expert in enumerate(self.experts):
            rows = (y == k).nonzero().squeeze(-1)
            h = torch.tanh(h.index_add(0, rows, expert(h[rows])))
        return F.cross_entropy(self.last(h), y)


class Asking(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if y is not None and y.max() >= CLASSES:
            raise ValueError(f"a class of {CLASSES} or more")
        h = self.hidden(x)
        assert not torch.isnan(h).any(), "not a number"
        return F.cross_entropy(self.last(h), y)


class _Chosen(nn.Module):
    """A layer whose weight it is given, for the samples of the last class, if there are any."""

    def forward(self, h: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        rows = (y == CLASSES - 1).nonzero().squeeze(-1)
        return h.index_add(0, rows, h[rows] @ weight) if len(rows) else h


class Given(Model):
    """A submodule that no graph holds is given a weight that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.chosen = nn.Parameter(torch.randn(DIM, DIM)), _Chosen()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.chosen(self.hidden(x), self.weight, y)), y)


class _Careful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, h: Tensor) -> Tensor:
        if torch.isnan(h).any():
            raise ValueError("not a number")
        for _ in range(4):
            h = torch.tanh(self.inner(h))
        return h


class Deep(Model):
    """Equal layers, each of which asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Careful() for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.layers(self.hidden(x))), y)


class Speech(Model):
    """Frames [N, 12, DIM], and labels [N, 3] of which those below 0 are no labels, as Hugging Face's CTC models have it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = y >= 0
        probabilities = self.last(self.hidden(x)).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((x.size(0),), x.size(1), dtype=torch.long)
        return F.ctc_loss(probabilities, y.masked_select(mask), lengths, mask.sum(-1), zero_infinity=True)


def inputs(model: type[nn.Module]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model is Speech:
        labels = torch.randint(1, CLASSES, (BATCH, 3), generator=generator)
        labels[::2, 2] = -100
        return torch.randn(BATCH, 12, DIM, generator=generator), labels
    x, y = torch.randn(BATCH, DIM, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)
    if model is Given:  # the second half of the batch has none of the last class
        y = torch.tensor([3, 0, 3, 1, 0, 2, 1, 0])
    return x, y


def captured(model: type[Model]) -> Captured:
    return capture(model(), inputs(model))


def regions(found: Captured) -> list[Op]:
    return [op for op in found.program.ops if op.target == REGION]


@gloo
@pytest.mark.parametrize("pins", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "zero": 1}], ids=str)
@pytest.mark.parametrize("model", [Masked, Experts, Given, Asking, Deep, Speech])
def test_they_train_as_on_one_process(model: type[Model], pins: dict[str, Any], workers: WorkerPool) -> None:
    ref = reference(model(), inputs(model), later=True)
    report = verify_plan(ref, plan_of(ref.captured, 4, cluster="cpu", pins=pins), workers, timeout_s=120)
    assert report.ok, report
    assert report.evaluation is not None
    assert report.batches is not None


# ------------------------------------------------------------------------------------------------------------------ islands
@pure
def test_only_what_depends_on_values_runs_as_it_is_written() -> None:
    found = captured(Masked)
    (island,) = regions(found)
    assert [op.target for op in found.program.ops if op.target != REGION] == [
        "aten.linear.default", "aten.tanh.default", "aten.linear.default", "aten.tanh.default", "aten.linear.default", "aten.gt.Scalar",
        "aten.gt.Scalar",
    ]  # fmt: skip
    assert island.outputs == (found.program.loss,)
    assert "y > 0" in island.source
    assert any("y > 0" in note and "sizes that depend on values" in note for note in found.program.notes)


@pure
def test_weights_that_only_islands_read_are_given_to_them_by_name() -> None:
    found = captured(Experts)
    islands = regions(found)
    assert len(islands) == 2
    led = [found.tensors[str(op.args[0])[1:]].upstream for op in islands]  # type: ignore[attr-defined]
    given = [{name for names, _ in operands for name in names if len(names) == 1} for operands in led]
    assert given == [{f"experts.{k}.weight", f"experts.{k}.bias"} for k in range(2)]
    assert islands[0].outputs[0] != islands[1].outputs[0]


@gloo
def test_weights_of_which_no_sample_has_need_have_no_gradient(workers: WorkerPool) -> None:
    """As on one process: an optimizer leaves them as they are, though it decays weights."""
    assert workers.run(_train_on_one_class, timeout_s=120) == [True] * 4


def _train_on_one_class() -> bool:
    x, y = inputs(Experts)
    alone, model = Experts(), autopar.compile(Experts(), example_inputs=(x, y), gpus=4, pins={"dp": 2, "tp": 2})
    for each in (alone, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.5)
        each(x, torch.ones_like(y)).backward()
        optimizer.step()
    whole, expected = model.full_state_dict(), alone.state_dict()
    return all(torch.allclose(whole[name], expected[name], atol=1e-5) for name in expected)


@pure
def test_what_writes_to_what_it_made_is_an_island() -> None:
    class Writes(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            kept = self.hidden(x)[y > 0]
            kept.mul_(2.0)
            return kept.sum()

    found = capture(Writes(), inputs(Writes))  # which compares its loss and gradients
    assert len(regions(found)) == 1


@pure
def test_sizes_that_numbers_alone_decide_are_computed() -> None:
    class Counted(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            counts = torch.unique_consecutive(torch.tensor([x.shape[1], x.shape[1], 1]), return_counts=True)[1]
            h = self.hidden(x)
            for count in counts.cumsum(0):
                h = h + torch.cat([h] * int(count)).sum(0)
            return F.cross_entropy(self.last(h), y)

    found = capture(Counted(), inputs(Counted))
    assert not regions(found) and not found.program.notes


# --------------------------------------------------------------------------------------------------------------- conditions
@pure
def test_conditions_that_can_only_raise_are_asked_in_every_step() -> None:
    found = captured(Asking)
    asked = [found.tensors[str(op.args[0])[1:]].module for op in regions(found)]  # type: ignore[attr-defined]
    assert [(type(c), c.expected) for c in asked] == [(Condition, False), (Condition, False)]
    assert [("y.max() >= CLASSES" in c.line, "isnan" in c.line) for c in asked] == [(True, False), (False, True)]
    assert sum("is asked in every step, and raises" in note for note in found.program.notes) == 2


class Finite(Model):
    """Asks each element, of what samples decide and of what they do not."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if torch.isnan(hidden).any():
            raise ValueError("activations are not finite")
        if not (hidden < 1e9).all():
            raise ValueError("activations are too large")
        assert torch.all(torch.isfinite(self.last.weight)).item()
        assert (self.last.weight > 0).any()  # of which some are not
        assert hidden.max() < 1e9 and hidden.min() >= -1e9
        if y.amin() < 0 or torch.max(x) > 1e9:
            raise ValueError("no class, or a large number")
        return F.cross_entropy(self.last(hidden), y)


@pure
def test_ranks_and_micro_batches_count_what_speaks_against_a_condition() -> None:
    program = capture(Finite(), inputs(Finite)).program
    counted = [op for op in program.ops if op.target == REGION]
    assert [op.kwarg("counts") for op in counted] == [True, True, True, None, *(True,) * 4]
    moments = split_into_moments(program, 2)  # where the weights are the same for both
    assert [op.target for op in (*moments.prologue, *moments.body.ops)].count(REGION) == 8
    source = emit(captured(Finite), plan_of(captured(Finite), 2, cluster="cpu", pins={"dp": 2}))
    assert set(re.findall(r"all_gather\((\w+)", source)) <= {"x", "y"}  # a few numbers of the batch


@gloo
def test_what_one_sample_violates_is_raised_on_all_ranks(workers: WorkerPool) -> None:
    for said in workers.run(_give_samples_out_of_bounds, timeout_s=120):
        assert [line.partition(":")[0] for line in said] == ["went on", *("the model raises",) * 3, "went on"], said


def _give_samples_out_of_bounds() -> list[str]:
    x, y = inputs(Finite)
    model = autopar.compile(Finite(), example_inputs=(x, y), gpus=4, pins={"dp": 2, "tp": 2})
    last, found = torch.arange(BATCH) == BATCH - 1, []
    wrong = [(torch.where(last[:, None], number, x), y) for number in (torch.nan, 1e12)]
    for given in ((x, y), *wrong, (x, torch.where(last, -1, y)), (x, y)):
        try:
            model(*given)
            found.append("went on")
        except RuntimeError as error:
            found.append(str(error))
    return found


@pure
def test_a_count_is_against_a_condition_wherever_it_is_not_zero() -> None:
    for expected in (True, False):
        assert Condition(expected, "", counts=True)(torch.tensor(0))
        with pytest.raises(RuntimeError, match=f"the value that it asks for is {not expected}"):
            Condition(expected, "", counts=True)(torch.tensor(2))


@pure
def test_each_of_equal_layers_asks() -> None:
    assert len(regions(captured(Deep))) == 4


@pure
def test_another_capture_knows_nothing_of_them() -> None:
    captured(Asking)
    assert not any("asked" in note for note in captured(Masked).program.notes)


@gloo
def test_the_parallel_module_raises_where_the_model_does(workers: WorkerPool) -> None:
    for said in workers.run(_give_a_class_that_is_none, timeout_s=120):
        assert said.startswith("the model raises: ")
        assert "y.max() >= CLASSES" in said
        assert "(the value that it asks for is True)" in said


def _give_a_class_that_is_none() -> str:
    x, y = inputs(Asking)
    model = autopar.compile(Asking(), example_inputs=(x, y), gpus=4, pins={"dp": 2, "tp": 2})
    model(x, y).backward()
    try:
        model(x, torch.full_like(y, CLASSES))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pure
def test_a_condition_that_chooses_is_refused() -> None:
    class Chooses(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.hidden(x)
            if h.mean() > 0:
                h = 2 * h
            return F.cross_entropy(self.last(h), y)

    with pytest.raises(CaptureError, match=r"(?s)h.mean\(\) > 0.*what to do: the line above lets values"):
        capture(Chooses(), inputs(Chooses))


class Open(Model):
    """Makes no loss."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        assert x.max() < 100
        return self.hidden(x)


@pure
@pytest.mark.parametrize("loss", [None, torch.sum])
def test_a_condition_is_asked_with_a_loss_and_without(loss: Any) -> None:
    assert len(regions(capture(Open(), (torch.randn(BATCH, DIM),), loss=loss, outputs=None))) == 1


@gloo
def test_the_parallel_module_raises_without_a_loss(workers: WorkerPool) -> None:
    """With gradients and without, and goes on where the loop catches it."""
    for said in workers.run(_give_what_is_too_large, timeout_s=120):
        assert [s.startswith("the model raises: ") and "x.max() < 100" in s for s in said] == [True, False, True, False]


def _give_what_is_too_large() -> list[str]:
    x = torch.randn(BATCH, DIM)
    model = autopar.compile(Open(), example_inputs=(x,), gpus=4, pins={"dp": 2, "tp": 2})
    found = []
    for mode in (torch.enable_grad(), torch.no_grad()):
        for given in (torch.where(torch.arange(BATCH)[:, None] < BATCH - 1, x, 200.0), x):
            with mode:
                try:
                    found.append(f"{float(model(given).sum())}")
                except RuntimeError as error:
                    found.append(str(error))
    return found


class _Asked:
    """Notes what must_be says of the line that asks for its truth, and answers with what it says, or with another answer."""

    def __init__(self, otherwise: bool) -> None:
        self.otherwise, self.said = otherwise, list[bool | None]()

    def __bool__(self) -> bool:
        self.said.append(must_be(sys._getframe(1)))
        return self.otherwise if self.said[-1] is None else self.said[-1]

    def any(self) -> _Asked:
        return self

    def item(self) -> bool:
        self.said.append(must_be(sys._getframe(1), by_item=True))
        return self.otherwise if self.said[-1] is None else self.said[-1]


def _if_raise(t: Any) -> None:
    if t.any():
        raise ValueError


def _if_not_raise(t: Any) -> None:
    if not t.any():
        what = "a message"
        raise ValueError(what)


def _if_none_and(t: Any) -> None:
    if t is not None and t.any():
        raise ValueError


def _else_raise(t: Any) -> None:
    if t.any():
        pass
    else:
        raise ValueError


def _elif_raise(t: Any) -> None:
    if t is None:
        pass
    elif t.any():
        raise ValueError


def _assert(t: Any) -> None:
    assert t.any(), "a message"


def _assert_not(t: Any) -> None:
    assert not t.any()


def _over_lines(t: Any) -> None:
    if (
        t is not None
        and t.any()
    ):  # fmt: skip
        raise ValueError


def _chooses(t: Any) -> int:
    return 1 if t.any() else 2


def _branches(t: Any) -> int:
    if t.any():
        return 1
    return 2


def _raises_perhaps(t: Any) -> None:
    if t.any():
        if t is None:
            raise ValueError


def _of_several(t: Any) -> None:
    if any([t]):
        raise ValueError


def _not_inside(t: Any) -> None:
    if t is None or not t.any():
        raise ValueError


def _assert_item(t: Any) -> None:
    assert t.any().item(), "a message"


def _if_item_raise(t: Any) -> None:
    if t is not None and t.any().item():
        raise ValueError


def _item_compared(t: Any) -> None:
    assert t.any().item() is False


def _item_elsewhere(t: Any) -> None:
    assert t is not None; found = t.any().item()  # noqa: E702
    assert not found


def _both_raise(t: Any) -> None:
    if t.any():
        raise ValueError
    else:
        raise TypeError


@pure
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (_if_raise, False), (_if_not_raise, True), (_if_none_and, False), (_else_raise, True), (_elif_raise, False), (_assert, True),
        (_assert_not, False), (_over_lines, False), (_chooses, None), (_branches, None), (_raises_perhaps, None), (_of_several, None),
        (_not_inside, None), (_both_raise, None), (_assert_item, True), (_if_item_raise, False), (_item_compared, None),
        (_item_elsewhere, None),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_what_a_value_must_be_for_a_line_not_to_raise(code: Callable[[Any], Any], expected: bool | None) -> None:
    t = _Asked(otherwise=code in (_not_inside,))
    if code is _both_raise:
        with pytest.raises(TypeError):
            code(t)
    else:
        code(t)  # which does not raise
    assert t.said == [expected]


# ----------------------------------------------------------------------------------------------------------------------- CTC
@pure
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("flat", [False, True])
def test_ctc_is_that_of_torch(reduction: str, flat: bool) -> None:
    torch.manual_seed(0)
    lengths, frames = torch.tensor([2, 3, 1]), torch.tensor([6, 5, 4])
    labels = torch.randint(1, 5, (3, 3))
    targets = labels[torch.arange(3) < lengths[:, None]] if flat else labels
    found, expected = (torch.randn(6, 3, 5, dtype=torch.float64).log_softmax(-1).requires_grad_() for _ in range(2))
    with torch.no_grad():
        expected.copy_(found)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    for function, given in ((ctc_loss, found), (F.ctc_loss, expected)):
        loss = function(given, targets, frames, lengths, 0, reduction, True)
        (loss * weights if reduction == "none" else 2 * loss).sum().backward()
    assert found.grad is not None
    torch.testing.assert_close(found.grad, expected.grad)


@pure
def test_ctc_is_one_operator_or_part_of_an_island() -> None:
    class Numbered(Speech):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            probabilities = self.last(self.hidden(x)).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((x.size(0),), x.size(1), dtype=torch.long)
            return F.ctc_loss(probabilities, y[y >= 0], lengths, 3 - (y < 0).sum(-1), zero_infinity=True)

    class Written(Speech):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            probabilities, mask = self.last(self.hidden(x)).log_softmax(-1).transpose(0, 1), y >= 0
            lengths, labels = torch.full((x.size(0),), x.size(1), dtype=torch.long), y[mask]
            mask.view(-1)[3:] = True
            mask &= y >= 0
            return F.ctc_loss(probabilities, labels, lengths, mask.sum(-1), zero_infinity=True)

    # labels that are selected, of which it is not seen that each row has so many
    assert [op.target for op in capture(Numbered(), inputs(Speech)).program.ops].count(REGION) == 1
    with pytest.raises(CaptureError, match="depends on the values"):
        capture(Written(), inputs(Speech))

    class Padded(Speech):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            probabilities = self.last(self.hidden(x)).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((x.size(0),), x.size(1), dtype=torch.long)
            return F.ctc_loss(probabilities, y.clamp(min=1), lengths, (y >= 0).sum(-1))

    class InNumbers(Padded):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            probabilities = self.last(self.hidden(x)).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(probabilities, y.clamp(min=1), [x.size(1)] * len(x), [2] * len(x))  # type: ignore[arg-type]

    for kind in (Speech, Padded, InNumbers):
        program = capture(kind(), inputs(Speech)).program
        assert [op.target for op in program.ops].count("autopar_operators.ctc_loss.default") == 1
        assert not any(op.target == REGION for op in program.ops)


@pure
@pytest.mark.parametrize("pins", [{"dp": 4}, {"micro_batches": 4}], ids=str)
def test_ctc_is_split_by_samples(pins: dict[str, Any]) -> None:
    """Also of labels that a mask selects, those in the middle of a row too."""
    x, y = inputs(Speech)
    y[1, 0], y[3] = -100, -100
    found = capture(Speech(), (x, y))
    plan = plan_of(found, 4 if "dp" in pins else 1, cluster="cpu", pins=pins)
    assert "autopar_operators.ctc_loss" not in "".join(plan.notes)
    assert plan.mesh["dp"] * plan.micro_batches >= 4
