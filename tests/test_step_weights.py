"""When a step begins to bring gradients together: bucket by bucket, each when its last gradient of its last pass has arrived."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.run.weights import Step

pytestmark = pytest.mark.pure


class Reduced:
    """A reduction that was begun."""

    def __init__(self, grads: Mapping[str, Tensor]) -> None:
        self.grads = dict(grads)

    def go_on(self) -> None: ...

    def finish(self) -> dict[str, Tensor]:
        return self.grads


class Log:
    """A model of three factors, whose gradients arrive from the last to the first, and what happens in its steps."""

    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        self.said: list[str] = []
        self.held: dict[str, Any] = {
            name: SimpleNamespace(
                spec=SimpleNamespace(name=name), stages=(0,), trains=True, gathered_when_used=False, tied=None,
                local=torch.full((2,), k + 2.0),
            )
            for k, name in enumerate(self.NAMES)
        }  # fmt: skip

    def bucket(self, names: str, *, late: bool = False) -> Any:
        def reduce(grads: Mapping[str, Tensor]) -> Reduced:
            self.said.append(f"reduce {names}: {', '.join(sorted(grads))}")
            return Reduced(grads)

        return SimpleNamespace(held=[self.held[n] for n in names], late=late, gathers=False, stages=(0,), reduce=reduce)

    def step(self, *buckets: Any, of_a_pass: tuple[Any, ...] = (), passes: int = 1) -> Step:
        used: Any = SimpleNamespace(close=dict)
        return Step(
            held=self.held, names={n: n for n in self.NAMES}, buffer=lambda _: torch.zeros(()), computes={}, buckets=buckets,
            of_a_pass=of_a_pass, where_used=used, passes=passes,
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
