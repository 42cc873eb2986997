"""Parameters that stand beside the registries of modules: whole where the original is looked at, parts where it is not."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from typing import Any, NamedTuple

import pytest
from torch import nn

from autopar.run.elsewhere import exchanged

pytestmark = pytest.mark.pure


class Slot:
    def __init__(self, value: object) -> None:
        self.value = value

    def now(self) -> Any:
        return self.value

    def put(self, value: object) -> None:
        self.value = value


class Pair(NamedTuple):
    first: object
    second: object


def of(x: Any) -> list[Any]:
    """Containers of an object, as deep as they may be."""
    return [
        [1, x], {"a": x, "b": 2}, (x, 3), Pair(4, x), deque([x]), {x, 5}, frozenset({x}), functools.partial(max, x, key=x),
        weakref.ref(x), [({"a": [x]},)],
    ]  # fmt: skip


def seen(value: Any) -> Any:
    """The same, with what can be compared in the place of functions and references."""
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return value() if isinstance(value, weakref.ref) else value


@pytest.mark.parametrize("number", range(len(of(nn.Linear(1, 1)))))
def test_others_stand_in_containers_for_a_while(number: int) -> None:
    part, whole = nn.Linear(1, 1), nn.Linear(1, 1)
    slot = Slot(of(part)[number])
    before = slot.value
    with exchanged([slot, Slot(part), Slot("nothing of it")], {id(part): whole}):
        assert type(slot.value) is type(before)
        assert seen(slot.value) == seen(of(whole)[number]) != seen(of(part)[number])
    assert slot.value is before and seen(before) == seen(of(part)[number])


def test_what_is_put_there_in_the_meantime_stays() -> None:
    part, whole = nn.Linear(1, 1), nn.Linear(1, 1)
    slot, held = Slot(part), [part, part]
    with exchanged([slot, Slot(held)], {id(part): whole}):
        assert held == [whole, whole]
        slot.value, held[0] = "mine", "mine"
        del held[1]
    assert slot.value == "mine" and held == ["mine"]
