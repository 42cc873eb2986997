"""Calls whose tensors have the same shapes, and which are put together otherwise: in another order, in other containers, with None."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._traps_kit import Compile, Net, Results, batch, program, seeded, sgd, state, stepped, trained

KIND = "structures"


def halves(index: int, order: str) -> dict[str, Tensor]:
    """The samples of a batch as two features of equal width, in this order."""
    x = batch(index)[0]
    found = {"a": x[:, :4], "b": x[:, 4:]}
    return {name: found[name] for name in order}


@program(KIND)
def dict_in_another_order(compile: Compile) -> Results:
    """Features are joined in the order in which the dict of the batch has them."""

    class Joined(Net):
        def forward(self, features: dict[str, Tensor], y: Tensor) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(self.logits(torch.cat(list(features.values()), 1)), y)

    given = [(halves(k, order), batch(k)[1]) for k, order in enumerate(("ab", "ba", "ab", "ba"))]
    return trained(compile(seeded(Joined), example_inputs=given[0]), inputs=given)


@program(KIND)
def keywords_in_another_order(compile: Compile) -> Results:
    """The same of **features; y is given before or behind them."""

    class Joined(Net):
        def forward(self, y: Tensor, **features: Tensor) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(self.logits(torch.cat(list(features.values()), 1)), y)

    model = compile(seeded(Joined), example_inputs={"y": batch()[1], **halves(0, "ab")})
    optimizer, losses = sgd(model), []
    for index, order in enumerate(("ab", "ba", "ab")):
        loss = model(**halves(index, order), y=batch(index)[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def list_or_tuple(compile: Compile) -> Results:
    """The forward adds what is in a list, and subtracts what is in a tuple."""

    class Either(Net):
        def forward(self, both: list[Tensor] | tuple[Tensor, ...], y: Tensor) -> Tensor:  # type: ignore[override]
            first, second = both
            return F.cross_entropy(self.logits(first + second if isinstance(both, list) else first - second), y)

    a, b, y = batch(0)[0], batch(1)[0], batch()[1]
    return trained(compile(seeded(Either), example_inputs=([a, b], y)), inputs=[([a, b], y), ((a, b), y), ([b, a], y)])


@program(KIND)
def empty_list_or_none(compile: Compile) -> Results:
    """None and an empty list, dict and tuple mean other things."""

    class Extra(Net):
        def forward(self, x: Tensor, y: Tensor, extra: Any = None) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, y)
            return loss if extra is None else loss * (3 if isinstance(extra, dict) else 2)

    given = [batch(0), (*batch(1), []), batch(2), (*batch(3), {}), (*batch(4), ()), (*batch(5), None)]
    return trained(compile(seeded(Extra), example_inputs=batch()), inputs=given)


@program(KIND)
def none_in_place_of_a_default(compile: Compile) -> Results:
    """The example leaves the scale to its default, which is 2; None means 1."""

    class Scaled(Net):
        def forward(self, x: Tensor, y: Tensor, scale: float | None = 2.0) -> Tensor:  # type: ignore[override]
            loss = super().forward(x, y)
            return loss if scale is None else loss * scale

    given = [batch(0), (*batch(1), None), batch(2), (*batch(3), 2.0), (*batch(4), None)]
    return trained(compile(seeded(Scaled), example_inputs=batch()), inputs=given)


@program(KIND)
def key_with_none_or_no_key(compile: Compile) -> Results:
    """The forward asks whether a key is there, and how many there are."""

    class Asks(Net):
        def forward(self, given: dict[str, Tensor | None]) -> Tensor:  # type: ignore[override]
            loss = super().forward(given["x"], given["y"])  # type: ignore[arg-type]
            return loss * len(given) if "weights" in given else loss

    def inputs(index: int, **more: None) -> tuple[dict[str, Any]]:
        x, y = batch(index)
        return ({"x": x, "y": y, **more},)

    model = compile(seeded(Asks), example_inputs=inputs(0))
    return trained(model, inputs=[inputs(0), inputs(1, weights=None), inputs(2), inputs(3, weights=None, mask=None)])


@program(KIND)
def longer_by_none(compile: Compile) -> Results:
    """The loss is weighed by the length of a list, in which None stands at times."""

    class Several(Net):
        def forward(self, several: list[Tensor | None], y: Tensor) -> Tensor:  # type: ignore[override]
            return len(several) * sum(super(Several, self).forward(x, y) for x in several if x is not None)

    given = [([batch(k)[0], *[None] * (k % 2)], batch(k)[1]) for k in range(3)]
    return trained(compile(seeded(Several), example_inputs=given[0]), inputs=given)


@program(KIND)
def dict_of_another_class(compile: Compile) -> Results:
    """The forward asks whether the batch is an OrderedDict; another batch has an empty dict in it."""

    class Asks(Net):
        def forward(self, given: dict[str, Any]) -> Tensor:  # type: ignore[override]
            loss = super().forward(given["x"], given["y"])
            return loss * (2 if isinstance(given, OrderedDict) else 1) * (3 if "more" in given else 1)

    def inputs(index: int, **more: Any) -> dict[str, Any]:
        x, y = batch(index)
        return {"x": x, "y": y, **more}

    model = compile(seeded(Asks), example_inputs=(inputs(0),))
    return trained(model, inputs=[(inputs(0),), (OrderedDict(inputs(1)),), (inputs(2),), (inputs(3, more={}),)])


@program(KIND)
def attribute_of_an_input(compile: Compile) -> Results:
    """Each batch has its weight in an attribute of its tensor, and a number that the model does not read."""

    class Weighed(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * getattr(x, "weight", 1.0)

    def inputs(index: int) -> tuple[Tensor, Tensor]:
        x, y = batch(index)
        x.weight, x.number = 1.0 + index // 2, index  # type: ignore[attr-defined]
        return x, y

    return trained(compile(seeded(Weighed), example_inputs=inputs(0)), inputs=[inputs(k) for k in range(4)])


@program(KIND)
def mask_in_an_attribute_of_an_input(compile: Compile) -> Results:
    """The same of a tensor of weights of samples."""

    class Masked(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (F.cross_entropy(self.logits(x), y, reduction="none") * x.mask).mean()  # type: ignore[attr-defined]

    def inputs(index: int) -> tuple[Tensor, Tensor]:
        x, y = batch(index)
        x.mask = (y != index).double()  # type: ignore[attr-defined]
        return x, y

    return trained(compile(seeded(Masked), example_inputs=inputs(0)), inputs=[inputs(k) for k in range(3)])


@program(KIND)
def setting_of_the_class_of_batches(compile: Compile) -> Results:
    """A number in the class of what the model is given changes between the steps."""

    @dataclass
    class Batch:
        scale: ClassVar[float] = 1.0
        x: Tensor
        y: Tensor

    class Scaled(Net):
        def forward(self, given: Batch) -> Tensor:  # type: ignore[override]
            return super().forward(given.x, given.y) * given.scale

    model = compile(seeded(Scaled), example_inputs=(Batch(*batch()),))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        Batch.scale += 1
        return model(Batch(x, y))

    return {"losses": stepped(model, loss_of), "state": state(model)}
