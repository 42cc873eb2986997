"""Tools that look into a model by hooks on its layers: they are given the original, with whole parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.run import WorkerPool
from benchmarks._traps_kit import train
from tests.test_parts_themselves import built

pytestmark = pytest.mark.gloo


def summary(model: nn.Module, x: Tensor) -> list[tuple[str, int, float]]:
    """Of each layer its kind, its parameters and the norm of what it returns, as it is called."""
    found: dict[str, Any] = {}

    def hook(layer: nn.Module, given: Any, returned: Tensor) -> None:
        name = f"{type(layer).__name__}-{len(found)}"
        found[name] = sum(p.numel() for p in layer.parameters()), returned.norm().item()

    handles = [layer.register_forward_hook(hook) for layer in model.modules() if not list(layer.children())]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [(name.partition("-")[0], *of) for name, of in found.items()]


def looked_at(pins: dict[str, Any] | None) -> tuple[list[float], list[tuple[str, int, float]], str]:
    """Losses, the summary between two steps, and how the compiled module refused to be summarised."""
    (model, x), refused = built(), ""
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(x,), pins=pins)
    step = functools.partial(train, lambda x: model(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.5), inputs=[(x,)])
    losses = step()
    if pins is None:
        found = summary(model, x)
    else:
        try:
            summary(model, x)
        except CaptureError as error:
            refused = str(error)
        parallel: Any = model
        with parallel.full_parameters():
            found = summary(parallel.original, x)
    losses += step()
    return losses, found, refused


@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_the_refusal_says_how_and_that_works(pins: dict[str, Any], pair: WorkerPool) -> None:
    losses, found, _ = looked_at(None)
    close: Callable[[Any], Any] = lambda x: pytest.approx(x, rel=1e-5)  # noqa: E731
    for ours, summarised, refused in pair.run(looked_at, pins):
        assert ours == close(losses)
        assert [x[:2] for x in summarised] == [x[:2] for x in found] and [x[2] for x in summarised] == close([x[2] for x in found])
        assert "with model.full_parameters(): tool(model.original, ...)" in refused
