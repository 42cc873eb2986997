"""Tools that look into a model by hooks on its layers are given the original, with whole parameters; those that count what is computed
count on each rank what that computes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.errors import CaptureError
from autopar.run import WorkerPool, hooks
from autopar.run.hooks import without_followers
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


def operations(pins: dict[str, Any] | None, example: bool) -> tuple[list[float], list[int]]:
    """Losses, and the FLOPs of three steps, counted one by one."""
    model, x = built()
    if pins is not None:
        model = autopar.compile(model, 2, example_inputs=(x,) if example else None, pins=pins)
    losses, counted = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        with FlopCounterMode(display=False) as counter:
            losses += train(lambda x: model(x).square().mean(), optimizer, inputs=[(x,)])
        counted.append(counter.get_total_flops())
    return losses, counted


@pytest.mark.parametrize("example", [True, False], ids=["compiled", "deferred"])
@pytest.mark.parametrize("pins", [{"dp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_operations_are_those_of_this_rank(pins: dict[str, Any], example: bool, pair: WorkerPool) -> None:
    """Where the first call captures and plans, what that computes is not counted."""
    losses, whole = operations(None, True)
    found = pair.run(operations, pins, example)
    for ours, _ in found:
        assert ours == pytest.approx(losses, rel=1e-5)
    assert [sum(step) for step in zip(*(counted for _, counted in found), strict=True)] == whole
    assert whole[0] > 0


def test_tools_of_torch_are_no_hooks_of_a_model() -> None:
    def own(*_: Any) -> None: ...

    handle = nn.modules.module.register_module_forward_hook(own)
    try:
        with FlopCounterMode(display=False), without_followers():
            assert [list(table.values()) for table in hooks.tables().values()] == [[], [own], [], []]
        with FlopCounterMode(display=False):
            assert [len(table) for table in hooks.tables().values()] == [1, 2, 0, 0]
            assert [len(table) for table in hooks.of_all_modules().values()] == [0, 1, 0, 0]
            with without_followers():
                handle.remove()
            assert [len(table) for table in hooks.tables().values()] == [1, 1, 0, 0]
    finally:
        handle.remove()
    assert not any(hooks.tables().values())


def transforms(pins: dict[str, Any]) -> list[str]:
    """What is said of a first call inside of torch.func, and that the next one is right."""
    model, x = built()
    model = autopar.compile(model, 2, pins=pins)
    with pytest.raises(ValueError, match="is called inside of torch.func") as found:
        torch.func.vjp(lambda x: model(x).square().mean(), x)
    losses = train(lambda x: model(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.5), inputs=[(x,)])
    return [str(found.value), *map(str, losses)]


@pytest.mark.parametrize("pins", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_first_call_inside_of_a_transform_is_refused_at_once(pins: dict[str, Any], pair: WorkerPool) -> None:
    losses, _ = operations(None, True)
    for said, loss in pair.run(transforms, pins, timeout_s=120):
        assert "model.original" in said and float(loss) == pytest.approx(losses[0], rel=1e-5)


def with_anomalies_detected(pins: dict[str, Any]) -> list[str]:
    """The warnings of a first call inside of detect_anomaly, of sizes that no other test has: what was measured once is known."""
    model, x = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12)), torch.randn(8, 12)
    model = autopar.compile(model, 2, pins=pins)
    with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly():
        warnings.simplefilter("always")
        model(x).square().mean().backward()
        assert torch.is_anomaly_enabled()
    return [str(w.message).splitlines()[0] for w in caught if "Anomaly Detection has been enabled" not in str(w.message)]


def test_anomalies_are_those_of_the_step(pair: WorkerPool) -> None:
    """What planning tries, and what fails of that, is no anomaly of the user's program."""
    assert pair.run(with_anomalies_detected, {"dp": 2}) == [[], []]
