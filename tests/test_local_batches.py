"""What each rank is called with: the global batch, or its own part of it, loaded by a sampler; anything else is refused at once."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autopar
from autopar.run import WorkerPool
from benchmarks._traps_run import Judge

GLOBAL = 8
PLANS = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "micro_batches": 2}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if not self.training:
            h = 2.0 * h
        return F.cross_entropy(self.down(h), y, ignore_index=3)  # a rank with more ignored labels counts less


def dataset() -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(3 * GLOBAL + 4, 6, generator=g).double(), torch.randint(4, (3 * GLOBAL + 4,), generator=g))


def compiled(pins: dict[str, int], *, local: bool) -> Any:
    torch.manual_seed(0)
    given = (torch.zeros(GLOBAL, 6).double(), torch.zeros(GLOBAL, dtype=torch.long))
    return autopar.compile(Net().double(), gpus=2, cluster="cpu", pins=pins, example_inputs=given, local_batch=local)


def trained(pins: dict[str, int], local: bool) -> tuple[list[float], dict[str, Tensor], list[list[int]]]:
    """Losses of an epoch whose last batch is half as large, the parameters after it, and which samples each batch had."""
    model = compiled(pins, local=local)
    data = dataset()
    numbered = TensorDataset(*data.tensors, torch.arange(len(data)))
    loader = DataLoader(numbered, batch_size=GLOBAL // model.data_ranks, sampler=autopar.sampler(numbered, model, seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, samples = [], []
    for x, y, index in loader:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        samples.append(index.tolist())
    model.eval()
    with torch.no_grad():
        losses.append(model(x, y).item())
    return losses, model.full_state_dict(), samples


def on_one_process(batches: list[list[int]]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, data, losses = Net().double(), dataset(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples in batches:
        x, y = (t[samples] for t in data.tensors)
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model.eval()(x, y).item())
    return losses, model.state_dict()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.gloo
@pytest.mark.parametrize("pins", PLANS, ids=str)
@pytest.mark.parametrize("local", [False, True], ids=["global", "local"])
def test_a_loader_with_the_sampler_trains_as_on_one_process(pool: WorkerPool, pins: dict[str, int], local: bool) -> None:
    (losses, state, first), (_, _, second) = pool.run(trained, pins, local)
    parts = local and "dp" in pins
    assert (first == second) is not parts
    batches = [a + b for a, b in zip(first, second, strict=True)] if parts else first
    assert sorted(sum(batches, [])) == list(range(3 * GLOBAL + 4)), "every sample once"
    expected, whole = on_one_process(batches)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert all(torch.allclose(state[n], t, rtol=0, atol=1e-12) for n, t in whole.items())


def mistaken(pins: dict[str, int], local: bool, what: str) -> str:
    model = compiled(pins, local=local)
    rank = dist.get_rank()
    x, y = (t[: GLOBAL // model.data_ranks] for t in dataset().tensors)
    if what == "values":
        x = x + rank
    elif what == "shapes":
        x, y = x[: len(x) - 2 * rank], y[: len(y) - 2 * rank]
    elif what == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank == 1):
            return said(model, x, y)
    return said(model, x, y)


def said(model: Any, x: Tensor, y: Tensor) -> str:
    try:
        return f"the loss {model(x, y).item()}"
    except autopar.LaunchError as e:
        return str(e)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("pins", "local", "what", "says"),
    [
        ({"dp": 2}, False, "values", "input 'x' differs between rank 0 and rank 1.*same global batch.*local_batch=True.*autopar.sampler"),
        ({"tp": 2}, False, "values", "input 'x' differs between rank 0 and rank 1"),
        ({"pp": 2}, True, "values", "input 'x' differs between rank 0 and rank 1.*All ranks of one data-parallel rank load the same"),
        ({"dp": 2}, False, "shapes", r"the shapes of the inputs.* differ between rank 0 and rank 1"),
        ({"dp": 2}, True, "shapes", r"the shapes of the inputs.* differ between rank 0 and rank 1"),
        ({"dp": 2}, False, "autocast", r"torch.autocast around the call.* differ between rank 0 and rank 1"),
        ({"dp": 2}, True, "values", "^the loss"),
    ],
)  # fmt: skip
def test_batches_that_are_not_what_the_ranks_should_be_given(
    pool: WorkerPool, pins: dict[str, int], local: bool, what: str, says: str
) -> None:
    for text in pool.run(mistaken, pins, local, what):
        assert re.search(says, text, re.DOTALL), text


def warned(same: bool) -> list[str]:
    model = compiled({"dp": 2}, local=True)
    x, y = (t[: GLOBAL // 2] for t in dataset().tensors)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(x if same else x + dist.get_rank(), y)
    return [str(w.message) for w in found]


@pytest.mark.gloo
def test_parts_that_are_all_the_same_are_warned_of(pool: WorkerPool) -> None:
    for messages in pool.run(warned, True):
        assert any("every data-parallel rank was given the same samples" in text and "autopar.sampler" in text for text in messages)
    assert pool.run(warned, False) == [[], []]


class Scored(nn.Module):
    """Scores of samples [batch, 4]; a temperature, which no sample changes; and a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 16), nn.Linear(16, 4), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.up(x))
        return self.down(h), self.scale.exp(), h.square().mean()


def outside(model: Any, trunk: Any, x: Tensor, y: Tensor) -> Tensor:
    scores, temperature, size = model(trunk(x))
    return F.cross_entropy(scores * temperature, y) + 0.1 * size * temperature + 0.01 * scores.square().mean() * size


def losses_of_their_own(pins: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a compiled model between a trunk in DistributedDataParallel and a loss that each rank makes of its own part; and those
    of the mean of these losses, on one process."""
    torch.manual_seed(0)
    trunk, model = nn.Linear(6, 6).double(), Scored().double()
    plain = nn.ModuleDict({"trunk": copy.deepcopy(trunk), "model": copy.deepcopy(model)})
    x, y = (t[:GLOBAL] for t in dataset().tensors)
    example = (torch.zeros(GLOBAL, 6, dtype=torch.float64, requires_grad=True),)
    compiled: Any = autopar.compile(model, gpus=2, cluster="cpu", pins=pins, example_inputs=example, local_batch=True)
    n, rank = GLOBAL // compiled.data_ranks, compiled.data_rank
    mine = [t[n * rank : n * (rank + 1)] for t in (x, y)]
    around: Any = nn.parallel.DistributedDataParallel(trunk)
    outside(compiled, around, *mine).backward()
    found = {f"model.{name}": grad for name, grad in compiled.full_gradients().items()}
    found |= {f"trunk.{name}": p.grad for name, p in trunk.named_parameters() if p.grad is not None}
    torch.stack([of_a_part(plain, *part) for part in zip(x.split(n), y.split(n), strict=True)]).mean().backward()
    return found, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def of_a_part(plain: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
    """A rank's loss on one process; what is a mean over the batch is one over the global batch."""
    whole = dataset().tensors[0][:GLOBAL]
    scores, temperature, _ = plain["model"](plain["trunk"](x))
    size = plain["model"](plain["trunk"](whole))[2]
    return F.cross_entropy(scores * temperature, y) + 0.1 * size * temperature + 0.01 * scores.square().mean() * size


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}], ids=str)
def test_losses_of_their_own_parts_train_their_mean_as_under_ddp(pool: WorkerPool, pins: dict[str, int]) -> None:
    for found, expected in pool.run(losses_of_their_own, pins):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.allclose(found[name], grad, rtol=1e-10, atol=1e-12), (name, found[name] / grad)


class Weighted(Net):
    """Samples count by weights [batch], relative to their mean, and more where there are few kinds of them."""

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None, kinds: Tensor | None = None) -> Tensor:
        losses = F.cross_entropy(self.down(F.gelu(self.up(x))), y, reduction="none")
        if kinds is not None and kinds.max() < 3:
            losses = 2.0 * losses
        return losses.mean() if weights is None else (losses * weights / weights.mean()).mean()


def with_inputs_that_come_later(pins: dict[str, int]) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    x, y = (t[:GLOBAL] for t in dataset().tensors)
    model = Weighted().double()
    plain = copy.deepcopy(model)
    compiled: Any = autopar.compile(model, gpus=2, cluster="cpu", pins=pins, example_inputs=(x, y), local_batch=True)
    n, rank = GLOBAL // compiled.data_ranks, compiled.data_rank
    weights, kinds = torch.arange(1.0, GLOBAL + 1, dtype=torch.float64), torch.arange(GLOBAL)
    found = []
    for more in ({}, {"weights": weights}, {"weights": weights, "kinds": kinds}, {"kinds": kinds % 3}, {"kinds": kinds}):
        part = {name: t[n * rank : n * (rank + 1)] for name, t in {"x": x, "y": y, **more}.items()}
        found.append((compiled(**part).item(), plain(x, y, **more).item()))
    return [ours for ours, _ in found], [theirs for _, theirs in found]


class Classes(Net):
    """Classes count by weights [4], which no sample changes."""

    def forward(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.down(F.gelu(self.up(x))), y, weight=weights)


def of_all_samples(other: bool) -> str:
    x, y = (t[:GLOBAL] for t in dataset().tensors)
    weights = torch.ones(4, dtype=torch.float64)
    torch.manual_seed(0)
    compiled: Any = autopar.compile(
        Classes().double(), gpus=2, cluster="cpu", pins={"dp": 2}, example_inputs=(x, y, weights), local_batch=True
    )  # fmt: skip
    mine = slice(compiled.data_rank * GLOBAL // 2, (compiled.data_rank + 1) * GLOBAL // 2)
    return said(functools.partial(compiled, weights=weights + other * dist.get_rank()), x[mine], y[mine])


@pytest.mark.gloo
@pytest.mark.parametrize("other", [False, True])
def test_what_is_not_divided_is_the_same_on_all_ranks(pool: WorkerPool, other: bool) -> None:
    expected = "differs between rank 0 and rank 1.*does not divide it.*give the same to all" if other else "^the loss"
    assert all(re.search(expected, text) for text in pool.run(of_all_samples, other))


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_inputs_that_come_later_are_parts_too(pool: WorkerPool, pins: dict[str, int]) -> None:
    for losses, expected in pool.run(with_inputs_that_come_later, pins, timeout_s=180):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.pure
def test_wrong_wishes() -> None:
    with pytest.raises(ValueError, match="local_batch=True needs example_inputs: the global batch"):
        autopar.compile(Net(), gpus=2, cluster="cpu", local_batch=True)

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(1)

    with pytest.raises(TypeError, match="Stream has no length.*model.data_ranks-th sample"):
        autopar.sampler(Stream(), None)  # type: ignore[arg-type]


@pytest.mark.gloo
def test_each_rank_is_given_back_its_own_samples(judge: Judge) -> None:
    """Also of what all ranks compute for all samples, since cutting it does not pay."""
    assert judge.not_right("parts_behind_a_batch_norm", ("dp2", "zero3")) == []
