"""Methods of the user's model that call it themselves, and what is computed with its parameters outside of calls."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import LaunchError
from autopar.run import ParallelModule, WorkerPool
from tests.classifier import Classifier, built

pytestmark = pytest.mark.gloo
PINS = {"dp": {"dp": 2}, "zero": {"dp": 2, "zero": 3}, "tp": {"tp": 2}, "pipeline": {"pp": 2, "micro_batches": 2}}


class Net(Classifier):
    """Trains itself, in the ways in which models do."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int = 0) -> Tensor:
        """What Lightning has methods of this name for."""
        return self(*batch)

    def fit(self, batches: list[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for index, batch in enumerate(batches):
            optimizer.zero_grad()
            loss = self.training_step(batch, index)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def by_forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.forward(x, y)

    def losses(self, batches: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        yield from (self(*batch) for batch in batches)

    @torch.no_grad()
    def scores(self, x: Tensor) -> Tensor:
        return self(x).softmax(-1)

    def target(self) -> Net:
        return copy.deepcopy(self)

    def fails(self) -> None:
        raise KeyError("of the method")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def planned(loss: Tensor) -> bool:
    return type(loss.grad_fn).__name__ == "_DepositBackward"


def fitted(pins: dict[str, int], deferred: bool, local: bool = False) -> tuple[list[float], dict[str, Tensor], bool]:
    model, batches = built(Net)
    given = {} if deferred else {"example_inputs": batches[0]}
    module = autopar.compile(model, 2, pins=pins, local_batch=local, **given)
    rank = dist.get_rank()
    mine = [(x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]) for x, y in batches] if local else batches
    optimizer = sgd(module)
    losses = module.fit(mine, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_plan = planned(module.training_step(mine[0]))
    return losses, module.full_state_dict(), by_plan


@pytest.mark.parametrize("deferred", [False, True], ids=["example", "deferred"])
@pytest.mark.parametrize("kind", list(PINS))
def test_methods_that_call_the_model_run_as_planned(pair: WorkerPool, kind: str, deferred: bool) -> None:
    model, batches = built(Net)
    losses = model.fit(batches, sgd(model))
    for found, state, by_plan in pair.run(fitted, PINS[kind], deferred):
        assert by_plan
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("kind", ["dp", "zero"])
def test_of_each_ranks_own_part_of_the_batch_gradients_are_brought_together(pair: WorkerPool, kind: str) -> None:
    model, batches = built(Net)
    losses = model.fit(batches, sgd(model))
    for found, state, by_plan in pair.run(fitted, PINS[kind], False, True):
        assert by_plan
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)


class Kept(NamedTuple):
    """Whether methods are what they are on the original, and a module that was copied by one."""

    same: bool
    name: str
    owner: bool
    scores: Tensor
    error: str
    left: dict[str, Any]
    copied: Tensor
    generated: bool


def as_they_were() -> Kept:
    model, batches = built(Net)
    module = autopar.compile(model, 2, example_inputs=batches[0], pins={"dp": 2})
    found = module.fit
    assert isinstance(module, ParallelModule)
    try:
        module.fails()
    except KeyError as error:
        said = str(error)
    with torch.no_grad():
        copied = module.target()(*batches[0])
    return Kept(
        same=found == module.fit, name=found.__name__, owner=found.__self__ is model, scores=module.scores(batches[0][0]), error=said,
        left={k: v for k, v in vars(model).items() if "compiled" in k}, copied=copied,
        generated=next(module.losses(batches)).requires_grad,
    )  # fmt: skip


def test_methods_are_those_of_the_original_and_leave_nothing_behind(pair: WorkerPool) -> None:
    model, batches = built(Net)
    for found in pair.run(as_they_were):
        assert found.same
        assert found.name == "fit"
        assert found.owner
        assert found.left == {}
        assert "of the method" in found.error
        assert found.generated
        torch.testing.assert_close(found.scores, model.scores(batches[0][0]))
        torch.testing.assert_close(found.copied, model(*batches[0]).detach())


class Critic(Net):
    def penalty(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return slope.square().sum()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self(x, y) + 0.1 * self.penalty(x)


def differentiated_again() -> dict[str, Tensor]:
    model, batches = built(Critic)
    module = autopar.compile(model, 2, example_inputs=batches[0], pins={"tp": 2})
    module.loss(*batches[0]).backward()
    return module.full_gradients()


def test_a_model_that_differentiates_gradients_again_does_so_by_itself(pair: WorkerPool) -> None:
    model, batches = built(Critic)
    model.loss(*batches[0]).backward()
    for grads in pair.run(differentiated_again):
        for name, param in model.named_parameters():
            torch.testing.assert_close(grads[name], param.grad)


class Pair(NamedTuple):
    """What a model returns beside its loss."""

    loss: Tensor
    logits: Tensor


class WithLogits(Net):
    def forward(self, x: Tensor, y: Tensor) -> Pair:  # type: ignore[override]
        logits = super().forward(x)
        return Pair(F.cross_entropy(logits, y), logits)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        found = self(x, y)
        return found.loss + 0 * found.logits.detach().sum()


def step_of_more(outputs: str) -> tuple[float, list[str], Tensor]:
    model, batches = built(WithLogits)
    module = autopar.compile(model, 2, example_inputs=batches[0], pins={"tp": 2}, outputs=outputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = module.step(*batches[0])
        module.step(*batches[0])
        loss.backward()
    return loss.item(), [str(w.message) for w in caught if "outputs='all'" in str(w.message)], module.full_gradients()["up.weight"]


@pytest.mark.parametrize("outputs", ["loss", "all"])
def test_a_method_may_use_more_than_the_loss(pair: WorkerPool, outputs: str) -> None:
    model, batches = built(WithLogits)
    loss = model.step(*batches[0])
    loss.backward()
    for rank, (found, said, grad) in enumerate(pair.run(step_of_more, outputs)):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        assert len(said) == (outputs == "loss" and rank == 0) and all("run forward a second time" in text for text in said)
        torch.testing.assert_close(grad, model.up.weight.grad)


# ------------------------------------------------------------------------------------------------------- outside of calls
def by_forward(pins: dict[str, int], own: bool, term: bool = False) -> tuple[str, list[str], dict[str, Tensor]]:
    """own: each rank has another part of the batch. term: of weights alone."""
    model, batches = built(Net)
    module = autopar.compile(model, 2, example_inputs=batches[0], pins=pins)
    rank = dist.get_rank()
    x, y = batches[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if term:
            loss = module(x, y) + (module.down.weight @ module.down.weight.T).square().mean()
        else:
            loss = module.by_forward(x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]) if own else module.by_forward(x, y)
        try:
            loss.backward()
        except LaunchError as error:
            return str(error), [], {}
    return "", [str(w.message) for w in caught if "outside of its calls" in str(w.message)], module.full_gradients()


@pytest.mark.parametrize("kind", list(PINS))
def test_gradients_of_each_ranks_own_data_outside_of_calls_are_refused(pair: WorkerPool, kind: str) -> None:
    for said, _, _ in pair.run(by_forward, PINS[kind], True):
        assert "ranks 0 and 1 have different gradients of down." in said
        assert "call the model instead" in said


@pytest.mark.parametrize("kind", list(PINS))
def test_of_the_same_data_they_are_right_and_it_is_said_once_that_ranks_do_all_of_it(pair: WorkerPool, kind: str) -> None:
    model, batches = built(Net)
    model(*batches[0]).backward()
    for rank, (said, warned, grads) in enumerate(pair.run(by_forward, PINS[kind], False)):
        assert said == ""
        assert len(warned) == (rank == 0)
        for name, param in model.named_parameters():
            torch.testing.assert_close(grads[name], param.grad)


def test_a_term_of_few_weights_is_not_spoken_of(pair: WorkerPool) -> None:
    model, batches = built(Net)
    loss = model(*batches[0]) + (model.down.weight @ model.down.weight.T).square().mean()
    loss.backward()
    for said, warned, grads in pair.run(by_forward, PINS["tp"], False, True):
        assert (said, warned) == ("", [])
        torch.testing.assert_close(grads["down.weight"], model.down.weight.grad)


def never_called() -> list[str]:
    model, batches = built(Net)
    module = autopar.compile(model, 2, pins={"dp": 2})
    optimizer = sgd(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in itertools.islice(itertools.cycle(batches), 4):
            module.by_forward(*batch).backward()
            optimizer.step()
    found = [str(w.message) for w in caught if "was not called since" in str(w.message)]
    module(*batches[0]).backward()
    return found


def test_that_what_was_compiled_is_never_called_is_said(pair: WorkerPool) -> None:
    for said in pair.run(never_called):
        assert len(said) == 1
        assert said[0].startswith("an optimizer steps on Net, which autopar has compiled")


def accumulated() -> dict[str, Tensor]:
    model, batches = built(Net)
    module = autopar.compile(model, 2, example_inputs=batches[0], pins={"dp": 2, "zero": 1})
    with module.no_sync():
        module(*batches[0]).backward()
    module(*batches[1]).backward()
    return module.full_gradients()


def test_no_sync_adds_gradients_up(pair: WorkerPool) -> None:
    model, batches = built(Net)
    for batch in batches[:2]:
        model(*batch).backward()
    for grads in pair.run(accumulated):
        for name, param in model.named_parameters():
            torch.testing.assert_close(grads[name], param.grad)
