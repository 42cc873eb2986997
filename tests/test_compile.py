"""`autopar.compile` on two workers: training is that of one process, planned on the first call or before, for batches of other
sizes and in the other mode too; what cannot be right is refused on every rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.errors import LaunchError, VerificationError
from autopar.run import ParallelModule, WorkerPool
from tests import wrong_models as models

pytestmark = pytest.mark.gloo

SIZES = (16, 16, 8, 16)
TOLERANCE = 1e-12  # relative, in float64
Trained = tuple[list[float], dict[str, Tensor]]


def double(size: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = models.batch(size, seed)
    return x.double(), y


def train(model: torch.nn.Module, sizes: tuple[int, ...]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, size in enumerate(sizes):
        loss = model(*double(size, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(model(*double(16, 99)).item())
    model.train()
    return losses


def on_one(**options: Any) -> Trained:
    model = models.model(**options).double()
    return train(model, SIZES), dict(model.state_dict())


def on_two(example: bool, pins: dict[str, Any], options: dict[str, Any]) -> Trained:
    model = models.model(**options).double()
    inputs = double(16, 0) if example else None
    parallel = autopar.compile(model, gpus=2, example_inputs=inputs, cluster="cpu", pins=pins, verify=True)
    assert isinstance(parallel, ParallelModule) is example
    losses = train(parallel, SIZES)
    assert parallel.plan.gpus == 2
    assert "MANIFEST" in parallel.source
    return losses, parallel.full_state_dict()


@pytest.mark.parametrize("example", [True, False], ids=["at once", "on the first call"])
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"pp": 2, "micro_batches": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_training_is_that_of_one_process(pair: WorkerPool, example: bool, pins: dict[str, Any]) -> None:
    losses, state = on_one()
    for found, parallel_state in pair.run(on_two, example, pins, {}, timeout_s=120):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert parallel_state.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(parallel_state[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pins", [{"dp": 2}, {"pp": 2}], ids=str)
def test_batch_norm_in_both_modes(pair: WorkerPool, pins: dict[str, Any]) -> None:
    losses, state = on_one(norm=True)
    for found, parallel_state in pair.run(on_two, True, pins, {"norm": True}, timeout_s=120):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        torch.testing.assert_close(parallel_state["norm.running_var"], state["norm.running_var"], rtol=1e-9, atol=0.0)
        assert parallel_state["norm.num_batches_tracked"] == len(SIZES)


def _dropout() -> tuple[float, float]:
    parallel = autopar.compile(models.model(dropout=0.5), gpus=2, example_inputs=models.batch(), cluster="cpu", pins={"dp": 2})
    parallel(*models.batch()).backward()
    parallel.eval()
    with torch.no_grad():
        return parallel(*models.batch()).item(), models.model(dropout=0.5).eval()(*models.batch()).item()


def test_dropout_is_off_in_evaluation(pair: WorkerPool) -> None:
    for found, expected in pair.run(_dropout, timeout_s=60):
        assert found == pytest.approx(expected, rel=1e-6)


def _caught(action: Any) -> str:
    try:
        action()
    except (autopar.AutoparError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _verification_of_dropout() -> str:
    model, inputs = models.model(dropout=0.5), models.batch()
    return _caught(lambda: autopar.compile(model, 2, example_inputs=inputs, cluster="cpu", pins={"dp": 2}, verify=True))


def _verification_of_a_defect() -> str:
    from autopar.run import local_ops

    original = local_ops.quotient_of_sums
    local_ops.quotient_of_sums = lambda a, b, axis: 2 * original(a, b, axis)  # type: ignore[assignment]
    try:
        model, inputs = models.net()
        return _caught(lambda: autopar.compile(model, 2, example_inputs=inputs, cluster="cpu", pins={"dp": 2}, verify=True))
    finally:
        local_ops.quotient_of_sums = original  # type: ignore[assignment]


def test_verify_compares_the_first_loss(pair: WorkerPool) -> None:
    for said in pair.run(_verification_of_dropout, timeout_s=60):
        assert said.startswith("VerificationError: verify=True compares one loss")
    for said in pair.run(_verification_of_a_defect, timeout_s=60):
        assert "VerificationError: the parallel form of Net gives the loss" in said
    assert VerificationError.exit_code == 1


def _with_another_parameter() -> str:
    model, inputs = models.net()
    parallel = autopar.compile(model, 2, example_inputs=inputs, cluster="cpu", pins={"dp": 2})
    model.register_parameter("added", torch.nn.Parameter(torch.zeros(1)))
    forward = type(model).forward
    model.forward = lambda *batch: forward(model, *batch) * model.added.exp()
    return _caught(lambda: parallel(*models.batch(8)))


def _different_models() -> str:
    model = models.model(width=16 + 16 * dist.get_rank())
    return _caught(lambda: autopar.compile(model, 2, example_inputs=models.batch(), cluster="cpu", pins={"dp": 2}))


def _infeasible() -> str:
    return _caught(lambda: autopar.compile(models.model(), 2, example_inputs=models.batch(7), cluster="cpu", pins={"dp": 2}))


def _more_than_the_world() -> str:
    return _caught(lambda: autopar.compile(models.model(), 4, cluster="cpu")(*models.batch()))


def _missing_input() -> str:
    return _caught(lambda: autopar.compile(models.model(), 2, cluster="cpu")(models.batch()[0]))


def _missing_later() -> str:
    model, (x, y) = models.net()
    parallel = autopar.compile(model, 2, example_inputs=(x, y), cluster="cpu", pins={"dp": 2})
    return _caught(lambda: parallel(x))


@pytest.mark.parametrize(
    "action,says",
    [
        (_with_another_parameter, "a batch of 8 in training mode cannot run as it was planned (batch 16, dp=2, 1 micro-batches): "),
        (_different_models, "LaunchError: capture: rank 1 has another result than rank 0"),
        (_infeasible, "Infeasible: no plan fits the constraints:\n  - dp=2: a global batch of 7 does not divide into 2 ranks"),
        (_more_than_the_world, "LaunchError: this module is compiled for 4 processes and runs in a world of 2"),
        (_missing_input, "missing a required argument: 'y'"),
        (_missing_later, "TypeError: Net needs inputs that the call does not give: 'y'"),
    ],
)
def test_wrong_use_is_said_on_every_rank(pair: WorkerPool, action: Any, says: str) -> None:
    for said in pair.run(action, timeout_s=60):
        assert says in said


def _different_data() -> list[str]:
    os.environ["AUTOPAR_DEBUG"] = "1"
    try:
        model, inputs = models.net()
        parallel = autopar.compile(model, 2, example_inputs=inputs, cluster="cpu", pins={"dp": 2})
        rank = dist.get_rank()
        return [
            _caught(lambda: parallel(*models.batch(16, seed=rank))),
            _caught(lambda: parallel(*models.batch(16 + 2 * rank))),
            _caught(lambda: parallel(*inputs)),
        ]
    finally:
        del os.environ["AUTOPAR_DEBUG"]


def test_different_data_are_found_in_debug_mode(pair: WorkerPool) -> None:
    for values, shapes, equal in pair.run(_different_data, timeout_s=60):
        assert "LaunchError: input 'x' differs between rank 0 and rank 1, which must be given the same data" in values
        assert "LaunchError: the shapes of the inputs" in shapes
        assert equal == "nothing was raised"
    assert LaunchError.exit_code == 2


def _raises_on_one_rank() -> str:
    model = (models.model if dist.get_rank() else models.branching)()
    model = model if dist.get_rank() else model[0]
    return _caught(lambda: autopar.compile(model, 2, example_inputs=models.batch(), cluster="cpu", pins={"dp": 2}))


def test_a_failure_on_one_rank_is_one_on_all(pair: WorkerPool) -> None:
    first, second = pair.run(_raises_on_one_rank, timeout_s=60)
    assert first.startswith("CaptureError: cannot capture Branching")
    assert second.startswith("LaunchError: capture failed on rank 0: CaptureError: cannot capture Branching")
