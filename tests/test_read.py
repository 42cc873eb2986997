"""What a model returns beside its loss, where it was compiled for its loss alone: computed when it is read, as it was in that call."""

from __future__ import annotations

import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import LaunchError
from autopar.run import WorkerPool, again, before_steps, unread
from autopar.run.mesh import Mesh
from autopar.run.random_numbers import seeded as seeded_from
from autopar.run.reading import Unreadable
from autopar.run.unread import Loss, Unread
from benchmarks._traps_kit import InDict, batch, seeded
from benchmarks._traps_run import Judge
from tests.in_turn import in_turn

pytestmark = pytest.mark.gloo

REFUSED = {
    "metric_behind_a_step_by_hand": "an optimizer's step",
    "number_is_set_between": "temperature from nothing to 2.0",
}
READ = in_turn("read", ("tp2",), ("pp2",), ("zero3",), without=REFUSED)


@pytest.mark.parametrize("name", READ)
def test_programs_that_read_more_than_the_loss_are_right(name: str, judge: Judge) -> None:
    assert judge.not_right(name, READ[name]) == []


@pytest.mark.parametrize("name", REFUSED)
def test_programs_that_read_too_late_are_told_so(name: str, judge: Judge) -> None:
    for found in judge.outcomes(name, ("tp2", "pp2")):
        assert found.outcome == "refused" and REFUSED[name] in found.reason


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.drop(torch.relu(self.first(x)))
        logits = self.last(hidden)
        return F.cross_entropy(logits, y), logits, hidden


def _compiled(kind: type[nn.Module], pins: dict[str, Any], **options: Any) -> autopar.ParallelModule:
    return autopar.compile(seeded(kind), 2, example_inputs=batch(), cluster="cpu", pins=pins, **options)


def _dropped(pins: dict[str, Any], outputs: str) -> list[list[Any]]:
    """What is read of two calls, of the first one after the second one has been made; then of a third."""
    model = _compiled(Dropping, pins, outputs=outputs)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = model(*batch(1)), model(*batch(2))
        found = [[x.tolist() for x in out] for out in (first, second)]
        return [*found, [x.tolist() for x in model(*batch(3))]]


@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_the_same_random_numbers_are_drawn_once_more(pair: WorkerPool, pins: dict[str, Any]) -> None:
    at_once, read = (pair.run(_dropped, pins, outputs, timeout_s=100) for outputs in ("all", "loss"))
    assert at_once[0][0][2] != at_once[0][1][2] and any(0.0 in row for row in at_once[0][0][2])
    for ours, theirs in zip(read, at_once, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            for a, b in zip(mine, other, strict=True):
                torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-6)


def _refused(error: type[Exception], read: Callable[[], object]) -> str:
    with pytest.raises(error) as found:
        read()
    return str(found.value)


def _what_is_refused() -> dict[str, str]:
    model = _compiled(InDict, {"tp": 2})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: dict[str, str] = {}
    x, y = batch()
    out = model(x, y)
    x[0] = 0
    found["input"] = _refused(RuntimeError, lambda: out["logits"].sum())
    out = model(x, y)
    model.eval()
    found["mode"] = _refused(RuntimeError, lambda: out["logits"].sum())
    model.train()
    for _ in range(2):
        out = model(x, y)
        out.loss.backward()
    del out  # so that the loop seems to read nothing
    optimizer.step()
    out = model(x, y)
    optimizer.step()
    found["step"] = _refused(RuntimeError, lambda: out["logits"].sum())
    out = model(x, y)
    drawn = _compiled(Dropping, {"tp": 2})(x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again, "seeded", lambda seed, device: seeded_from(seed + 1, device))  # so that it comes to another loss
        found["loss"] = _refused(RuntimeError, lambda: drawn[1].sum())
    found["key"] = _refused(KeyError, lambda: out["other"])
    found["index"] = _refused(KeyError, lambda: out[1])
    found["attribute"] = _refused(AttributeError, lambda: out.logits)
    out = model(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.inference_mode():
            out["logits"].sum()
        model.zero_grad()
        out["logits"].sum().backward()  # what is read without gradients has them
    assert all(p.grad is not None for p in model.parameters())
    assert out.get("loss") is out.loss is out["loss"] is out[0] and type(out.loss) is Tensor and out.get("other", 3) == 3
    assert [*out] == [*out.keys()] == ["loss", "logits"]
    assert float(out.loss.detach()) == float(out["loss"].detach()) == float(out[0].detach()) == out.item()
    half = out["loss"] = out["loss"] / 2
    assert out.loss is out["loss"] is half and dict(out.items())["loss"] is half and any(x is half for x in out.values())
    return found


def test_what_cannot_be_computed_any_more_is_refused(pair: WorkerPool) -> None:
    for found in pair.run(_what_is_refused, timeout_s=100):
        assert "tuple of 3 elements" in found["loss"]
        for case in ("input", "mode", "step"):
            assert "dict with keys ['loss', 'logits']" in found[case] and "outputs='all'" in found[case]
        assert "inputs of the call have changed" in found["input"] and "an optimizer's step" in found["step"]
        assert "the mode of the module" in found["mode"] and "comes to the loss" in found["loss"]
        assert found["key"] == "'other'" and found["index"] == "1"
        assert "'dict' object has no attribute 'logits'" in found["attribute"]


def _told() -> tuple[list[str], list[str], list[bool]]:
    """What is said; what a call gives; whether what it computed is there before it is read."""
    model = _compiled(InDict, {"tp": 2})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kinds, there = list[str](), list[bool]()
        for _ in range(3):
            out = model(*batch())
            kinds.append(type(out).__name__)
            _, logits = out.values()
            there.append(type(logits) is not Unread)
            logits.sum()
        model.eval()
        out = model(*batch())
        _, logits = out.values()
        there.append(type(logits) is not Unread)
        assert isinstance(logits, Tensor) and logits.shape == (12, 4)
        assert type(out["logits"]) is type(out.get("logits")) is Tensor and out["logits"] is out["logits"]
    return [str(w.message) for w in told if "is read" in str(w.message)], kinds, there


def test_it_is_said_once_for_each_mode_and_computed_at_once_from_then_on(pair: WorkerPool) -> None:
    (said, kinds, there), (silent, _, _) = pair.run(_told, timeout_s=100)
    assert kinds == ["Loss"] * 3 and there == [False, True, True, False] and silent == []
    assert len(said) == 2 and "calls in training mode compute all" in said[0] and "calls in evaluation mode compute all" in said[1]


def _kept() -> tuple[bool, list[str], list[str]]:
    """Whether what a call computed of goes with what it gave; and what is saved of that."""
    model = _compiled(InDict, {"dp": 2})
    out = model(*batch())
    gone = weakref.ref(out._autopar_plain)
    loss, logits = out["loss"], out["logits"]
    assert isinstance(out, Loss)
    saved = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"loss": loss, "logits": logits}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    gc.disable()
    try:
        del out, loss, logits
        is_gone = gone() is None
    finally:
        gc.enable()
    return is_gone, [type(x).__name__ for x in loaded.values()], [str(list(x.shape)) for x in loaded.values()]


def test_what_a_call_gives_is_freed_with_it_and_saved_as_tensors(pair: WorkerPool) -> None:
    for gone, kinds, shapes in pair.run(_kept, timeout_s=100):
        assert gone and kinds == ["Tensor", "Tensor"] and shapes == ["[]", "[12, 4]"]


def _read_alone() -> None:
    model = _compiled(InDict, {"tp": 2})
    out = model(*batch())
    if torch.distributed.get_rank() == 0:
        out["logits"].sum()
    model(*batch())


def test_one_rank_alone_that_reads_is_told_so(pair: WorkerPool) -> None:
    with pytest.raises(LaunchError, match="is about to compute what call 1 of InDict computes beside its loss, which all ranks do"):
        pair.run(_read_alone, timeout_s=100)


class Plenty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.last(torch.relu(self.first(x)))
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "hits": logits.argmax(1) == y}


def _stepped(small: int, keep: bool) -> tuple[list[str], list[str], int]:
    """What the logits of three calls are behind the steps; what was said; how often ranks agreed at a step."""
    model = _compiled(Plenty, {"tp": 2})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    agreed, read = 0, list[str]()
    shared = Mesh.shared

    def counted(mesh: Mesh, values: set[int]) -> set[int]:
        nonlocal agreed
        agreed += 1
        return shared(mesh, values)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(Mesh, "shared", counted)
        patch.setattr(before_steps, "SMALL", small)
        for index in range(3):
            out = model(*batch(index))
            out["loss"].backward()
            if not keep:
                del out
            optimizer.step()
            if keep:
                try:
                    read.append(str(out["logits"].dtype))
                except RuntimeError as error:
                    read.append(str(error))
    return read, [str(w.message) for w in told if "is held" in str(w.message)], agreed


SIZE = 12 * (4 * 4 + 1)  # bytes of the logits and hits of a batch


@pytest.mark.parametrize(
    ("small", "keep", "is_read", "agreed"),
    [(SIZE, True, "torch.float32", 1), (SIZE - 1, True, "an optimizer's step", 0), (SIZE, False, "", 1)],
    ids=["held", "more than is small", "not held"],
)
def test_what_is_small_and_held_is_computed_before_a_step(pair: WorkerPool, small: int, keep: bool, is_read: str, agreed: int) -> None:
    for rank, (read, said, times) in enumerate(pair.run(_stepped, small, keep, timeout_s=100)):
        assert all(is_read in one for one in read) and len(read) == 3 * keep and times == agreed
        assert len(said) == ("float" in is_read and rank == 0)


def _not_computed(error: type[Exception]) -> str:
    """A step of a loop that holds what cannot be computed."""
    model = _compiled(Plenty, {"tp": 2})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = model(*batch())
    out["loss"].backward()

    def fails(*_: object) -> None:
        raise error("as a test has it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unread, "_once_more", fails)
        optimizer.step()
    return _refused(RuntimeError, lambda: out["logits"].sum())


@pytest.mark.parametrize("error", [ValueError, Unreadable])
def test_a_step_goes_on_where_nothing_can_be_computed_before_it(pair: WorkerPool, error: type[Exception]) -> None:
    for said in pair.run(_not_computed, error, timeout_s=100):
        assert said == "as a test has it" if error is Unreadable else "an optimizer's step" in said


def test_a_step_that_one_rank_takes_alone_is_told_so(pair: WorkerPool) -> None:
    with pytest.raises(LaunchError, match="rank 0 is about to step on Plenty, which all ranks do together"):
        pair.run(_steps_alone, timeout_s=100)


def _steps_alone() -> None:
    model = _compiled(Plenty, {"tp": 2})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = model(*batch())
    out["loss"].backward()
    if torch.distributed.get_rank() == 0:
        optimizer.step()
    model(*batch())
