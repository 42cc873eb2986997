"""When a step begins to bring gradients together: bucket by bucket, each when its last gradient of its last pass has arrived."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.run.leaves import Leaves
from autopar.run.weights import Step

pytestmark = pytest.mark.pure


class Reduced:
    """A reduction that was begun."""

    def __init__(self, grads: Mapping[str, Tensor]) -> None:
        self.grads = dict(grads)

    def go_on(self) -> None: ...

    def finish(self) -> dict[str, Tensor]:
        return self.grads


class Whole(SimpleNamespace):
    @property
    def local(self) -> Tensor:
        return self.param.detach()


class Log:
    """A model of three factors, whose gradients arrive from the last to the first, and what happens in its steps."""

    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        self.said: list[str] = []
        self.leaves = Leaves()
        self.held: dict[str, Any] = {
            name: Whole(
                spec=SimpleNamespace(name=name), stages=(0,), trains=True, gathered_when_used=False, tied=None, zero=None,
                param=torch.full((2,), k + 2.0),
            )
            for k, name in enumerate(self.NAMES)
        }  # fmt: skip

    def bucket(self, names: str, *, late: bool = False, reduces: bool = True) -> Any:
        def reduce(grads: Mapping[str, Tensor]) -> Reduced:
            self.said.append(f"reduce {names}: {', '.join(sorted(grads))}")
            return Reduced(grads)

        return SimpleNamespace(held=[self.held[n] for n in names], late=late, gathers=False, stages=(0,), reduces=reduces, reduce=reduce)

    def step(self, *buckets: Any, of_a_pass: tuple[Any, ...] = (), passes: int = 1, lower: str = "") -> Step:
        used: Any = SimpleNamespace(close=dict)
        return Step(
            held=self.held, names={n: n for n in self.NAMES}, buffer=lambda _: torch.zeros(()), buckets=buckets,
            computes=dict.fromkeys(lower, torch.bfloat16), of_a_pass=of_a_pass, where_used=used, leaves=self.leaves, passes=passes,
        )  # fmt: skip

    def run(self, step: Step, used: str = "abc") -> None:
        """Forward and backward of a micro-batch."""
        x = torch.ones(2)
        for name in used:
            x = x * step.read(name)
            if x.requires_grad:
                x.register_hook(lambda _, name=name: self.said.append(f"back at {name}"))
        step.begin_pass(0)
        x.sum().backward()
        step.end_pass()


def test_of_a_step_in_the_last_pass() -> None:
    log = Log()
    step = log.step(log.bucket("cb"), log.bucket("a"), passes=2)
    log.run(step)
    assert log.said == ["back at c", "back at b", "back at a"]
    log.said.clear()
    log.run(step)
    assert log.said == ["back at c", "back at b", "reduce cb: b, c", "back at a", "reduce a: a"]
    found = step.finish()
    assert {n: g.tolist() for n, g in found.items()} == {"a": [24.0] * 2, "b": [16.0] * 2, "c": [12.0] * 2}, "of both passes"


def test_in_order_so_that_all_ranks_begin_the_same() -> None:
    """The bucket of c is whole first, and waits for the one before it."""
    log = Log()
    step = log.step(log.bucket("a"), log.bucket("cb"))
    log.run(step)
    assert [line for line in log.said if "reduce" in line] == ["reduce a: a", "reduce cb: b, c"]


def test_in_every_pass() -> None:
    log = Log()
    step = log.step(log.bucket("a"), log.bucket("bc", late=True), of_a_pass=(log.bucket("cb"),), passes=2)
    log.run(step)
    assert log.said == ["back at c", "back at b", "reduce cb: b, c", "back at a"]
    log.said.clear()
    log.run(step)
    assert log.said == ["back at c", "back at b", "reduce cb: b, c", "back at a", "reduce a: a"]
    assert {n: g.tolist() for n, g in step.finish().items()} == {"a": [24.0] * 2, "b": [16.0] * 2, "c": [12.0] * 2}


@pytest.mark.parametrize("late", [False, True])
def test_what_never_arrives_is_reduced_at_the_end(late: bool) -> None:
    """A bucket with a parameter that the pass did not use, and one whose gradients other ranks have too."""
    log = Log()
    step = log.step(log.bucket("ac", late=late), log.bucket("b"))
    log.run(step, "ab" if not late else "abc")
    assert not any("reduce" in line for line in log.said)
    found = step.finish()
    assert [line for line in log.said if "reduce" in line] == [f"reduce ac: a{', c' if late else ''}", "reduce b: b"]
    assert sorted(found) == (["a", "b", "c"] if late else ["a", "b"])


def test_a_step_leaves_its_leaves_to_the_next() -> None:
    """Each step is told of its own gradients alone, and has leaves of its own while another has not finished."""
    log = Log()
    first, second = log.step(log.bucket("cba")), log.step(log.bucket("cba"))
    tensors = {name: first.read(name) for name in log.NAMES}
    assert all(second.read(name) is not tensors[name] for name in log.NAMES)
    log.run(first)
    found = first.finish()
    assert {name: tensor.grad for name, tensor in tensors.items()} == dict.fromkeys(log.NAMES)
    third = log.step(log.bucket("cba"))
    assert all(third.read(name) is tensors[name] for name in log.NAMES)
    assert all(log.step(log.bucket("cba")).read(name) is not tensors[name] for name in log.NAMES), "the third one has them"
    log.said.clear()
    log.run(third)
    assert log.said[-1] == "reduce cba: a, b, c"
    again = third.finish()
    assert all(torch.equal(again[name], found[name]) for name in log.NAMES)
    log.run(second)
    assert all(torch.equal(grad, found[name]) for name, grad in second.finish().items())


def test_a_leaf_of_other_memory_is_made_anew() -> None:
    log = Log()
    first = log.step(log.bucket("cba"))
    before = first.read("a")
    log.run(first)
    first.finish()
    log.held["a"].param.data = torch.full((2,), 7.0)
    second = log.step(log.bucket("cba"))
    assert second.read("a") is not before and torch.equal(second.read("a"), torch.full((2,), 7.0))
    assert second.read("b")._version == log.held["b"].param._version
    log.held["b"].param.mul_(2)
    assert second.read("b")._version == log.held["b"].param._version, "what is written to it between forward and backward is noticed"


def test_a_step_that_did_not_finish_keeps_its_leaves() -> None:
    log = Log()
    step = log.step(log.bucket("cba"))
    kept, told = step.read("a"), weakref.ref(step)
    del step
    assert told() is None, "no cycle"
    other = log.step(log.bucket("cba"))
    assert other.read("a") is not kept
    kept.sum().backward()  # of a step that is gone: nobody is told
    assert not log.said


def test_nobody_is_told_of_gradients_that_no_bucket_waits_for() -> None:
    log = Log()
    step = log.step(log.bucket("cba", reduces=False))
    log.run(step)
    assert not any(step.read(name)._post_accumulate_grad_hooks for name in "abc")
    assert {n: g.tolist() for n, g in step.finish().items()} == {"a": [12.0] * 2, "b": [8.0] * 2, "c": [6.0] * 2}
    assert log.said[-1] == "reduce cba: a, b, c"


def test_what_is_cast_is_cast_once_a_step_and_its_gradients_are_added_as_it_rests() -> None:
    """256 + 1 is 256 in bfloat16. The next step differentiates by the same tensor, over its own values; in between it has no memory."""
    log = Log()
    kept = None
    for factor in (1.0, 2.0):
        step = log.step(log.bucket("cba"), passes=2, lower="a")
        leaf = step.read("a")
        assert leaf is step.read("a") and leaf.dtype == torch.bfloat16 and leaf.tolist() == [2.0 * factor] * 2
        assert kept is None or leaf is kept
        (step.read("a") * 256).float().sum().backward()
        (step.read("a") * 1).float().sum().backward()
        (grad,) = (g for n, g in step.finish().items() if n == "a")
        assert grad.dtype == torch.float32 and grad.tolist() == [257.0] * 2
        assert leaf.numel() == 0
        kept = leaf
        log.held["a"].param.mul_(2)


def test_uses_in_one_pass_are_added_as_a_parameter_rests() -> None:
    log = Log()
    step = log.step(log.bucket("cba"), lower="a")
    a = step.read("a")
    ((a * 256).float() + (a * 1).float()).sum().backward()
    assert step.finish()["a"].tolist() == [257.0] * 2


def test_steps_at_once_have_memory_of_their_own() -> None:
    log = Log()
    first, second = (log.step(log.bucket("cba"), lower="abc") for _ in range(2))
    tensors = [step.read("b") for step in (first, second)]
    assert tensors[0] is not tensors[1]
    log.run(first)
    first.finish()
    assert tensors[1].tolist() == [3.0, 3.0] and tensors[0].numel() == 0
    log.run(second)
    assert second.finish()["b"].tolist() == [8.0] * 2


class Through(torch.autograd.Function):
    """As C.own of the first rank: a view each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.view_as(grad)


@pytest.mark.parametrize("reduces", [False, True], ids=["nobody is told", "a bucket waits"])
def test_gradients_that_are_one_memory_are_added_to_apart(reduces: bool) -> None:
    """(a + b) c twice: a's gradient is the tensor that b's is."""
    log = Log()
    step = log.step(log.bucket("cba", reduces=reduces), passes=2)
    for factor in (1.0, 10.0):
        a, b, c = (Through.apply(step.read(name)) for name in "abc")
        step.begin_pass(0)
        (factor * (a + b) * c).sum().backward()
        step.end_pass()
    assert {n: g.tolist() for n, g in step.finish().items()} == {"a": [44.0] * 2, "b": [44.0] * 2, "c": [55.0] * 2}


def test_what_is_reduced_in_place_is_no_other_gradient() -> None:
    log = Log()
    one, other = log.bucket("b"), log.bucket("a")
    def in_place(grads: Mapping[str, Tensor]) -> Reduced:
        for grad in grads.values():
            grad.mul_(2)
        return Reduced(grads)

    one.reduce = in_place
    step = log.step(one, other, log.bucket("c"))
    a, b, c = (Through.apply(step.read(name)) for name in "abc")
    ((a + b) * c).sum().backward()
    assert {n: g.tolist() for n, g in step.finish().items()} == {"a": [4.0] * 2, "b": [8.0] * 2, "c": [5.0] * 2}


def test_a_gradient_that_nothing_else_has_is_not_copied() -> None:
    log = Log()
    step = log.step(log.bucket("cba", reduces=False))
    leaf = step.read("a")
    came = list[int]()
    leaf.register_hook(lambda grad: came.append(grad.data_ptr()))
    log.run(step)
    assert [step.finish()["a"].data_ptr()] == came
