"""Lists to which a forward or a hook appends, and numbers that it keeps of tensors, are after a call what they are on one process; what is
read of them is refused."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.run.varying import NUMBERS
from benchmarks._traps_run import Judge
from tests.in_turn import in_turn

pytestmark = pytest.mark.gloo

READ = {
    "list_of_which_the_last_is_used": "changes seen from list of 2 to list of 3",
    "list_of_which_the_length_is_asked": "changes seen from list of 1 to list of 2",
    "list_in_a_checkpoint": "changes seen from list of 1 to list of 2",
}
IN_ONE_PIECE = ("numbers_of_each_call",)
RIGHT = in_turn("appended", ("zero3",), ("pp2",), without=(*READ, *IN_ONE_PIECE)) | dict.fromkeys(IN_ONE_PIECE, ("dp2", "zero3"))


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_kept_is_that_of_one_process(name: str, judge: Judge) -> None:
    assert judge.not_right(name, RIGHT[name]) == []


@pytest.mark.parametrize("name", sorted(READ))
def test_what_the_forward_reads_is_refused(name: str, judge: Judge) -> None:
    (found,) = judge.outcomes(name, ("dp2",))
    assert found.outcome == "refused" and READ[name] in found.reason


class Keeping(nn.Module):
    """Appends a tensor and a number; outside is a list that it reaches by a hook."""

    def __init__(self, outside: list[Any]) -> None:
        super().__init__()
        self.layer, self.log = nn.Linear(4, 4), ["begun"]
        self.layer.register_forward_hook(lambda module, args, output: outside.append(output.detach().sum().item()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.log.append(h.detach())
        return h.square().mean()


def test_capture_leaves_lists_as_they_were() -> None:
    outside: list[Any] = [1.0]
    model = Keeping(outside)
    log = model.log
    found = capture(model, (torch.randn(3, 4),), outputs=True)
    assert model.log is log and log == ["begun"] and outside == [1.0]
    assert len(found.program.outputs) == 2


class Asking(nn.Module):
    """Reads its list where it may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.log = nn.Linear(4, 4), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.log.append(h.detach())
        with contextlib.suppress(TypeError):
            h = h / len(self.log)
        return h.square().mean()


def test_a_list_that_is_read_where_that_may_fail_is_read() -> None:
    with pytest.raises(CaptureError, match="changes log from list of 1 to list of 2"):
        capture(Asking(), (torch.randn(3, 4),), outputs=True)


def test_what_hooks_append_is_computed_with_the_loss() -> None:
    found = capture(Keeping([]), (torch.randn(3, 4),))
    assert found.returned is None and len(found.program.outputs) == 2


class Rounded(nn.Module):
    """Runs as it is written, for numpy; with a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(4, 4), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return h + torch.from_numpy(numpy.sign(h.detach().numpy()))


class AroundRounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rounded, self.last = nn.Linear(4, 4), Rounded(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rounded(self.first(x))).square().mean()


def _most(seen: dict[str, float], output: Tensor) -> None:
    seen["most"] = max(seen["most"], output.max().item())


@pytest.mark.parametrize(
    "hook",
    [
        lambda seen: lambda module, args, output: seen.__setitem__("last", output.detach().numpy()),
        lambda seen: lambda module, args, output: seen.__setitem__("last", output.detach().tolist()),
        lambda seen: lambda module, args, output: setattr(module, "last", output.detach().numpy()),
        lambda seen: lambda module, args, output: _most(seen, output),
    ],
)
def test_hooks_that_take_values_in_what_runs_as_it_is_written_are_refused(hook: Any) -> None:
    """It may be given a part of the batch, or run on some of the ranks."""
    model, seen = AroundRounded(), {"most": -1e9}
    model.rounded.inner.register_forward_hook(hook(seen))
    with pytest.raises(CaptureError, match=r"the hook .* on inner takes values of tensors into Python, where it may leave them"):
        capture(model, (torch.randn(6, 4),))


class Noting(Rounded):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.seen[-1:] = [h.detach().numpy()]
        return h


def test_arrays_that_are_kept_by_what_runs_as_it_is_written_are_refused() -> None:
    model = AroundRounded()
    model.rounded = Noting()
    with pytest.raises(CaptureError, match="it takes values of tensors into Python, and leaves something in the attribute seen"):
        capture(model, (torch.randn(6, 4),))


class Arrays(nn.Module):
    """Keeps an array, and does with it what a test says."""

    def __init__(self, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.use, self.kept = nn.Linear(4, 4), use, None

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.kept = h.detach().numpy()
        self.use(self.kept)
        return h.square().mean()


@pytest.mark.parametrize(
    "use", [len, numpy.mean, torch.from_numpy, lambda x: x == 1, lambda x: x + 1, lambda x: x.shape, lambda x: f"{x}", bool, lambda x: x[0]]
)
def test_arrays_that_are_used_are_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(CaptureError, match="cannot capture Arrays"):
        capture(Arrays(use), (torch.randn(6, 4),))
    assert len(capture(Arrays(lambda x: isinstance(x, numpy.ndarray) or 1 / 0), (torch.randn(6, 4),), outputs=True).program.outputs) == 1


class Slotted:
    __slots__ = ("mean",)

    def __init__(self, mean: float) -> None:
        self.mean = mean


def test_objects_that_cannot_be_made_again_are_refused() -> None:
    seen = list[Any]()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: seen.append(Slotted(output.mean().item())))
    with pytest.raises(CaptureError, match=r"each call leaves an object \(Slotted\) in .*, which no program makes"):
        capture(model, (torch.randn(6, 4),), outputs=True)


def _log(x: Any) -> None:
    logging.getLogger("seen").error("%s", x)


@pytest.mark.parametrize("text", [print, lambda x: print(f"{x:.3f}"), lambda x: print([x]), _log])
def test_numbers_of_tensors_that_are_printed_are_refused(text: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: text(output.mean().item()))
    with pytest.raises(CaptureError, match="prints or logs a tensor, whose values are others in every call"):
        capture(model, (torch.randn(6, 4),), outputs=True)


class Ready(nn.Module):
    """Begins a running mean with its first value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean, self.ready = nn.Linear(4, 4), 0.0, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        value = h.square().mean().item()
        self.mean = 0.9 * self.mean + 0.1 * value if self.ready else value
        self.ready = True
        return h.square().mean() / self.mean


def test_running_numbers_that_begin_in_another_way_and_divide_at_once_are_refused() -> None:
    model, x = Ready(), torch.randn(6, 4)
    with pytest.raises(CaptureError, match="each call of Ready makes a number of values of tensors, and reads it in the next: mean"):
        capture(model, (x,))
    model(x)
    guards = capture(model, (x,)).guards
    assert guards is not None and [leaf.name for leaf in guards.varied.leaves] == ["mean"] and guards.place("mean") is not None


class Stop(Exception):
    pass


def test_what_is_left_by_a_forward_that_is_stopped_is_refused() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), dict[str, Any]()

    def stop(module: nn.Module, args: Any, output: Tensor) -> None:
        if seen is not None:
            seen["first"] = output.detach()
        raise Stop

    model[0].register_forward_hook(stop)
    with pytest.raises(CaptureError, match="the forward of Sequential ends with Stop, and has changed seen"):
        capture(model, (torch.randn(6, 4),), outputs=True)
    assert seen == {}
    seen = None  # type: ignore[assignment]
    with pytest.raises(Stop):
        capture(model, (torch.randn(6, 4),), outputs=True)


class Making(nn.Module):
    """Makes a list in a dict; scales are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.stats, self.scales = nn.Linear(4, 4), dict[str, list[float]](), [2.0]

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * self.scales[0]
        self.stats.setdefault("mean", []).append(h.mean().item())
        return h.square().mean()


def test_lists_are_made_in_the_dict_that_the_loop_has_put_there() -> None:
    model = Making()
    guards = capture(model, (torch.randn(6, 4),)).guards
    assert guards is not None and (name := guards.place("stats['mean'][0]")) is not None
    for number in (1.0, 3.0):
        guards.leave({name: torch.tensor(number)})
    assert model.stats == {"mean": [1.0, 3.0]}
    model.stats, model.scales = {}, [2.0]  # equal, in another object, so that what stands where is looked for
    assert guards.changed() is None
    guards.leave({name: torch.tensor(5.0)})
    assert model.stats == {"mean": [5.0]}


def _stepped() -> str:
    """What is said where the gradient of an activation is asked for that a hook has kept."""
    model, kept = Keeping([]), dict[str, Tensor]()
    model.layer.register_forward_hook(lambda module, args, output: kept.__setitem__("layer", output))
    compiled = autopar.compile(model, gpus=2, pins={"dp": 2})
    loss = compiled(torch.ones(4, 4))
    try:
        kept["layer"].retain_grad()
    except RuntimeError as error:
        loss.backward()
        return str(error)
    return ""


def test_gradients_of_what_hooks_keep_are_refused(pair: Any) -> None:
    for said in pair.run(_stepped):
        assert "the gradient of an activation is asked for, of which the model computes other tensors" in said


class Summed(nn.Module):
    """What a test computes of its loss, with an attribute."""

    def __init__(self, fn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.fn, self.total = nn.Linear(4, 4), fn, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, self.layer(x).square().mean())


def _adds(m: Any, loss: Tensor) -> Tensor:
    m.total += float(loss.detach())
    return loss


def _weighs(m: Any, loss: Tensor) -> Tensor:
    m.total = 0.5 * m.total + float(loss.detach())
    return loss / m.total


def _weighs_by_this_one(m: Any, loss: Tensor) -> Tensor:
    m.total = float(loss.detach())
    return loss / m.total


def _weighs_the_next(m: Any, loss: Tensor) -> Tensor:
    weighed = loss * m.total
    m.total = float(loss.detach())
    return weighed


@pytest.mark.parametrize("fn", [_adds, _weighs, _weighs_the_next])
def test_numbers_made_by_float_are_inputs_and_outputs(fn: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = Summed(fn), torch.randn(6, 4)
    guards = capture(model, (x,)).guards
    assert guards is not None and guards.place("total") is not None and [x.name for x in guards.varied.leaves] == ["total"]
    assert model.total == 1.0


@pytest.mark.parametrize("lies", ["cpu", "meta"])
def test_what_stands_for_a_number_is_no_constant(lies: str) -> None:
    with pytest.raises(CaptureError, match="a number that float|decides what runs"):
        capture(Summed(_weighs_by_this_one).to(lies), (torch.randn(6, 4, device=lies),))


class _BegunOnce(nn.Module):
    """A running mean that begins with the first value: which it is, a flag says that the first call sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean, self.begun = nn.Linear(4, 4), 0.0, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        value = h.mean().item()
        self.mean = 0.9 * self.mean + 0.1 * value if self.begun else value
        self.begun = True
        return h.square().mean()


def test_a_running_number_that_begins_otherwise_has_two_programs() -> None:
    model = _BegunOnce()
    guards = capture(model, (torch.randn(3, 4),)).guards
    assert guards is not None and guards.place("mean") is not None and guards.changed() is None
    model(torch.randn(3, 4))
    assert "begun" in (guards.changed() or "")
    assert any(one.path[0] == NUMBERS for one in capture(model, (torch.randn(3, 4),)).program.inputs)


def test_numbers_of_item_that_are_made_again_and_tuples_of_them_are_left() -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mean, self.hits, self.pair, self.log = nn.Linear(4, 4), 0.0, 0, (0.0, 0), list[Any]()

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            self.mean = float(h.mean().item())
            self.hits = int((h > 0).sum().item())
            self.pair = h.std().item(), 1
            self.log.append((int((h < 0).sum().item()), len(h)))
            return h.square().mean()

    model = Left()
    guards = capture(model, (torch.randn(6, 4),)).guards
    assert (model.mean, model.hits, model.pair, model.log) == (0.0, 0, (0.0, 0), []) and guards is not None
    assert all(guards.place(path) is not None for path in ("mean", "hits", "pair[0]", "log[0][0]"))
