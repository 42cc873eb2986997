"""Numbers that calls of a model have otherwise than one another: arguments (`model(x, beta)`), and what stands in attributes, of the loop
(`model.beta = 0.3`) or of the forward itself (`self.step += 1`). A program takes each as a tensor of one element.

Tensors that stand in attributes and are others in each call (`self.hidden = (h, c)`) are inputs of a program in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from autopar.run.elsewhere import Standing

__all__ = [
    "NONE", "NO_NUMBERS", "NUMBERS", "AsPlaced", "Asked", "Kind", "Leaf", "Number", "Path", "Varied", "Varying", "as_tensor", "kind_of",
]  # fmt: skip

Number = int | float
Path = tuple[str | int, ...]
NUMBERS = "numbers"  # begins the path of the input of a program that such a number is; behind it comes its place among them


def as_tensor(number: Number | Tensor) -> Tensor:
    """A Python number as a tensor of one element, int64 or float64; a tensor as it is."""
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=torch.int64 if type(number) is int else torch.float64)


class Kind(NamedTuple):
    """Of a tensor. grad: gradients go through it. `kind_of` a number is its type."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    grad: bool = False

    def __str__(self) -> str:
        return f"a tensor {str(self.dtype).removeprefix('torch.')}{list(self.shape)}{' that requires a gradient' if self.grad else ''}"


def kind_of(value: object) -> object:
    """What a program that holds for a value holds for."""
    if not isinstance(value, Tensor):
        return type(value)
    return Kind(value.dtype, tuple(value.shape), value.requires_grad and torch.is_grad_enabled())


class AsPlaced(Standing, Protocol):
    """Where a number or a tensor stands outside of the call. around: the path of the container around it, or its own."""

    @property
    def path(self) -> str: ...

    @property
    def around(self) -> str: ...

    def moved(self, now: Mapping[str, Any]) -> AsPlaced | None: ...


class Varying(NamedTuple):
    """arguments: by their paths, of which a positional one begins with the name of its parameter. places: of attributes, as the picture of
    a model names them."""

    arguments: frozenset[Path] = frozenset()
    places: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.arguments or self.places)


class Leaf(NamedTuple):
    """One of these numbers and tensors, of which a program holds for any of a kind (`kind_of`). name: for people. argument: its path, as of
    Varying. place: where it stands, if it is no argument."""

    name: str
    kind: object
    argument: Path = ()
    place: AsPlaced | None = None

    @property
    def grad(self) -> bool:
        """Whether it is a tensor through which gradients go."""
        return isinstance(self.kind, Kind) and self.kind.grad


class Asked(NamedTuple):
    """What a forward asks of such numbers in Python, and was told: a program holds for that. text: for people. of: computes the answer of
    all of them."""

    text: str
    of: Callable[[Sequence[Number]], object]
    answer: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Varied:
    """Those of a program. leaves: in the order of its inputs. asked: what its forward asked of them. moved: where it puts others, and what
    computes these of them."""

    leaves: tuple[Leaf, ...] = ()
    asked: tuple[Asked, ...] = ()
    moved: tuple[tuple[AsPlaced, Callable[[Sequence[Number]], Number]], ...] = ()

    def values(self, argument: Callable[[Path], Any], at_call: Callable[[AsPlaced], Any]) -> tuple[Any, ...]:
        """They, in a call. argument: one of the call's. at_call: what stood at a place when it began."""
        return tuple(argument(x.argument) if x.place is None else at_call(x.place) for x in self.leaves)

    def changed(self, values: Sequence[Any]) -> str | None:
        """None if the program holds for these; else what differs, in words."""
        for leaf, value in zip(self.leaves, values, strict=True):
            if kind_of(value) != leaf.kind:
                return f"{leaf.name} from {_said(leaf.kind)} to {kind_of(value) if isinstance(value, Tensor) else repr(value)}"
        for asked in self.asked:
            try:
                now = asked.of(values)
            except ArithmeticError as error:
                return f"{asked.text}, which its forward asks: from {asked.answer} to {error}"
            if now != asked.answer and (now == now or asked.answer == asked.answer):
                return f"{asked.text}, which its forward asks: from {asked.answer} to {now}"
        return None

    def of_other_sizes(self, values: Sequence[Any]) -> bool:
        """Whether the program does not hold for these since a tensor has another size."""
        pairs = zip((leaf.kind for leaf in self.leaves), map(kind_of, values), strict=True)
        return any(isinstance(a, Kind) and isinstance(b, Kind) and a.shape != b.shape for a, b in pairs)

    @property
    def of_all(self) -> Varying:
        return _varying(self.leaves)

    @property
    def around(self) -> frozenset[str]:
        """The paths of the containers around what stands in attributes, or its own."""
        return frozenset(x.place.around for x in self.leaves if x.place is not None)

    @property
    def fixed(self) -> Varying:
        """Those of which the forward asks what exactly they are, so that it is another program for each."""
        exactly = {asked.text for asked in self.asked if type(asked.answer) in (int, float)}
        return _varying([x for x in self.leaves if x.name in exactly])

    def gone(self, places: Mapping[str, AsPlaced]) -> str:
        """The first of the places that is none of these, by their paths; '' if all are."""
        return next((x.place.path for x in self.leaves if x.place is not None and x.place.moved(places) is None), "")

    def where(self, places: Mapping[str, AsPlaced]) -> Varied:
        """The same of what stands at these places now, by their paths."""
        leaves = tuple(x if x.place is None else x._replace(place=x.place.moved(places)) for x in self.leaves)
        return replace(self, leaves=leaves, moved=tuple((places[place.path], of) for place, of in self.moved))

    def move(self, values: Sequence[Number]) -> None:
        """After a call of these: the numbers that the forward leaves are there."""
        for place, of in self.moved:
            place.put(of(values))


def _said(kind: object) -> str:
    return f"a number ({kind.__name__})" if isinstance(kind, type) else str(kind)


def _varying(leaves: Sequence[Leaf]) -> Varying:
    return Varying(
        frozenset(x.argument for x in leaves if x.place is None), frozenset(x.place.path for x in leaves if x.place is not None)
    )


NONE, NO_NUMBERS = Varied(), Varying()
