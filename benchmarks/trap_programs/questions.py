"""What a forward asks of its inputs beside their values: how they were made, how they lie in memory, whether they are parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import Compile, Net, Results, batch, program, seeded, sgd, state

Made = Callable[[Tensor], Tensor]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _leaf(x: Tensor) -> Tensor:
    return x.requires_grad_()


def _computed(x: Tensor) -> Tensor:
    return x.requires_grad_() * 1


class _Asking(Net):
    """The loss is twice as large where the input answers with yes."""

    def asked(self, x: Tensor) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x), y)
        return 2 * loss if self.asked(x) else loss


def _of_each(compile: Compile, build: type[_Asking], made: Sequence[Made]) -> Results:
    model = compile(seeded(build), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for index, make in enumerate(made):
        x, y = batch(index)
        optimizer.zero_grad()
        loss = model(make(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class _Leaves(_Asking):
    def asked(self, x: Tensor) -> bool:
        return x.is_leaf


@program("structures")
def input_that_is_a_leaf(compile: Compile) -> Results:
    return _of_each(compile, _Leaves, [_as_it_is, _computed, _leaf, _computed])


class _Computed(_Asking):
    def asked(self, x: Tensor) -> bool:
        return x.grad_fn is not None


@program("structures")
def input_that_was_computed(compile: Compile) -> Results:
    return _of_each(compile, _Computed, [_as_it_is, _leaf, _computed])


class _Expanded(_Asking):
    def asked(self, x: Tensor) -> bool:
        return x.stride(0) == 0


@program("structures")
def input_that_is_one_row_many_times(compile: Compile) -> Results:
    return _of_each(compile, _Expanded, [_as_it_is, lambda x: x[:1].expand(len(x), -1), _as_it_is])


class _Parameters(_Asking):
    def asked(self, x: Tensor) -> bool:
        return isinstance(x, nn.Parameter)


@program("structures")
def input_that_is_a_parameter(compile: Compile) -> Results:
    """A prompt that is trained, in a plain parameter of the loop's."""
    return _of_each(compile, _Parameters, [_as_it_is, nn.Parameter])


class _Writing(_Asking):
    def asked(self, x: Tensor) -> bool:
        return x._version > 0


@program("structures")
def input_that_was_written_to(compile: Compile) -> Results:
    return _of_each(compile, _Writing, [_as_it_is, lambda x: x.mul_(2), _as_it_is])


class _Required(_Asking):
    def asked(self, x: Tensor) -> bool:
        return x.requires_grad


@program("structures")
def input_that_requires_a_gradient_in_evaluation(compile: Compile) -> Results:
    """The first batch is evaluated, and the plan is made of it."""
    model = compile(seeded(_Required))
    optimizer, losses = sgd(model), []
    for index, make in enumerate((_leaf, _as_it_is)):
        x, y = batch(index)
        with torch.no_grad():
            losses.append(model(make(x), y).item())
    for index, make in enumerate((_as_it_is, _leaf)):
        x, y = batch(index)
        optimizer.zero_grad()
        loss = model(make(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}
