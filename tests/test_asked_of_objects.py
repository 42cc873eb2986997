"""What a forward may ask of its inputs beside their values, and what it reads of queues, events and numbers that others share."""

from __future__ import annotations

import array
import ctypes
import io
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.given import copied
from autopar.capture.guards import Guards
from autopar.errors import CaptureError
from autopar.ir import refs

pytestmark = pytest.mark.pure


class Reads(nn.Module):
    """Reads `held` in its forward."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * len(str(self.held))


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], object], str]] = {
    "queue": (queue.Queue, lambda h: h.put(1.0), "from queue of 0 to queue of 1"),
    "event": (threading.Event, lambda h: h.set(), "from event that is not set to event that is set"),
    "stream": (io.StringIO, lambda h: h.write("a"), "from stream at 0 to stream at 1"),
    "array": (lambda: array.array("d", [1.0]), lambda h: h.__setitem__(0, 2.0), "from array of 1 to another array of 1"),
    "bytes": (lambda: bytearray(b"a"), lambda h: h.extend(b"b"), "from bytearray of 1 to bytearray of 2"),
    "shared number": (lambda: ctypes.c_double(1.0), lambda h: setattr(h, "value", 2.0), "from shared 1.0 to shared 2.0"),
}


@pytest.mark.parametrize("kind", HELD)
def test_objects_of_python_that_change_in_place_are_watched(kind: str) -> None:
    make, change, says = HELD[kind]
    guards = Guards.take(model := Reads(make()))
    for _ in range(2):
        assert guards.changed() is None
    change(model.held)
    assert says in str(guards.changed())


class ComparesInputs(nn.Module):
    def forward(self, a: Tensor, b: Tensor, mode: str | None = None) -> Tensor:
        return a.sum() if a is b else b.sum()


class ComparesNothing(nn.Module):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return a.sum() if b is None or type(b) is not Tensor else b.sum()


class AsksHowItLies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() if x.is_contiguous() else x.mean()


def test_code_that_asks_about_inputs_is_known() -> None:
    assert Guards.take(ComparesInputs()).asks == (True, frozenset())
    assert Guards.take(ComparesNothing()).asks == (False, frozenset())
    assert Guards.take(AsksHowItLies()).asks == (False, {"is_contiguous"})


def test_copies_of_inputs_are_one_tensor_where_these_are_and_lie_as_they_do() -> None:
    x, base = torch.randn(4, 6), torch.randn(8, 12)
    views = (x.t(), base[::2, ::3], x.unfold(1, 3, 1), x[:1].expand(4, 6), x[:, 0])
    (one, two, *found), named = copied(((x, x, *views), {"x": x}))
    assert one is two is named["x"] and one is not x and one.equal(x)
    assert [t.stride() for t in found[:2]] == [views[0].stride(), views[1].stride()]
    assert all(a.equal(b) and a.data_ptr() != b.data_ptr() for a, b in zip(found, views, strict=True))
    for t in found:
        t.add_(1)  # no entry is at the place of another
    leaf = torch.randn(2, requires_grad=True)
    (first, second), _ = copied(((leaf, leaf), {}))
    assert first is not second and first.is_leaf and first.requires_grad and second.requires_grad


class TwoWays(nn.Module):
    """Reads two inputs in two ways, and does not ask whether they are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.words(ids), labels.clamp(0, 3))


def test_inputs_that_are_one_tensor_in_the_example_alone_stay_two() -> None:
    same = torch.zeros(4, dtype=torch.long)
    program = capture(TwoWays(), (same, same)).program
    assert len(program.inputs) == 2
    (read,) = (op for op in program.ops if op.target == "aten.embedding.default")
    (clamped,) = (op for op in program.ops if "clamp" in op.target)
    assert refs(read)[1] == program.inputs[0].value and refs(clamped) == (program.inputs[1].value,)


class Asks(nn.Module):
    """Computes another thing where its input answers a question with yes."""

    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.scale, self.question = nn.Parameter(torch.ones(3)), question

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.scale).sum()
        return 2 * h if self.question(x) else h


def _computed(x: Tensor) -> Tensor:
    return x.requires_grad_() * 1


def _with_gradient(x: Tensor) -> Tensor:
    x.requires_grad_().sum().backward()
    return x


class OfTheUser(Tensor):
    """A class of tensors."""


QUESTIONS: dict[str, tuple[Callable[[Tensor], bool], Callable[[Tensor], Tensor]]] = {
    "is_leaf": (lambda x: not x.is_leaf, _computed),
    "grad_fn": (lambda x: x.grad_fn is not None, _computed),
    "output_nr": (lambda x: x.output_nr > 0, lambda x: torch.cat((x, x)).requires_grad_().chunk(2)[1]),
    "version": (lambda x: x._version > 0, lambda x: x.mul_(2)),
    "stride": (lambda x: x.stride(0) == 0, lambda x: x[:1].expand(4, 3)),
    "is_contiguous": (lambda x: not x.is_contiguous(), lambda x: x[:1].expand(4, 3)),
    "storage_offset": (lambda x: x.storage_offset() > 0, lambda x: torch.cat((x, x))[4:]),
    "untyped_storage": (lambda x: x.untyped_storage().nbytes() > 48, lambda x: torch.cat((x, x))[:4]),
    "is_view": (lambda x: x._is_view(), lambda x: x[:]),
    "is_shared": (lambda x: x.is_shared(), lambda x: x.share_memory_()),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_code_that_asks_an_input_is_told_what_the_input_says(name: str) -> None:
    question, made = QUESTIONS[name]
    for x in (torch.randn(4, 3), made(torch.randn(4, 3))):
        program = capture(Asks(question), (x,)).program  # which compares it with the model
        assert len(program.ops) == (3 if question(x) else 2)


REFUSED: dict[str, tuple[Callable[[Tensor], bool], Callable[[Tensor], Tensor], str]] = {
    "gradient": (lambda x: x.grad is not None, _with_gradient, "tensor that it has beside its values"),
    "base": (lambda x: x._base is not None, lambda x: x[:], "tensor that it has beside its values"),
    "parameter": (lambda x: isinstance(x, nn.Parameter), nn.Parameter, "is a Parameter, for which its code may ask"),
    "class": (lambda x: isinstance(x, OfTheUser), lambda x: x.as_subclass(OfTheUser), "is a OfTheUser, for which its code may ask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_copy_of_an_input_cannot_be_is_refused_where_code_asks_for_it(name: str) -> None:
    question, made, says = REFUSED[name]
    capture(Asks(question), (torch.randn(4, 3),))
    with pytest.raises((CaptureError, TypeError), match=says):
        capture(Asks(question), (made(torch.randn(4, 3)),))
