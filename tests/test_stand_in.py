"""What other tools do with the module: torch.compile runs it as it is, and what would take it apart is refused with a remedy."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.run import WorkerPool
from benchmarks._traps_run import Judge


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 8), torch.tensor([0, 1, 2, 3])


def traced(model: Any) -> None:
    torch.jit.trace(model, batch())


def scripted(model: Any) -> None:
    torch.jit.script(model)


def exported(model: Any) -> None:
    torch.export.export(model, batch())


def wrapped(model: Any) -> None:
    DistributedDataParallel(model)


class Larger(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y)


def wrapped_with_others(model: Any) -> None:
    DistributedDataParallel(Larger(model))


def put_into_what_was_wrapped(model: Any) -> None:
    larger = DistributedDataParallel(Larger(None))
    larger.module.inner = model
    larger(*batch())


def copied(model: Any) -> None:
    copy.copy(model)


def compiled(model: Any) -> None:
    autopar.compile(model, gpus=2, example_inputs=batch(), cluster="cpu")


def made_into_a_parameter(model: Any) -> None:
    nn.Parameter(model.layers[0].weight)


def refusal_of(act: Any, first_call: bool, pins: dict[str, int]) -> str:
    """On a worker."""
    torch.manual_seed(0)
    given = {} if first_call else {"example_inputs": batch()}
    model = autopar.compile(Net(), gpus=2, cluster="cpu", pins=pins, **given)
    try:
        act(model)
    except TypeError as e:
        return str(e)
    return "nothing"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.gloo
@pytest.mark.parametrize("first_call", [False, True], ids=["planned", "planned later"])
@pytest.mark.parametrize(
    ("act", "says"),
    [
        (traced, "cannot be traced or exported: .*full_parameters"),
        (scripted, "cannot be scripted: .*full_parameters"),
        (exported, "cannot be traced or exported: .*model.original"),
        (wrapped, "cannot be put into DistributedDataParallel: it reduces its gradients itself"),
        (wrapped_with_others, "cannot be put into DistributedDataParallel: .*wrap only the modules around it"),
        (put_into_what_was_wrapped, "cannot be put into DistributedDataParallel: .*wrap only the modules around it"),
        (copied, r"cannot be copied with the parameters of this one: call copy\.deepcopy"),
        (compiled, r"compile its original \(model.original\) again"),
        (made_into_a_parameter, "nn.Parameter of layers.0.weight: .*before it is compiled"),
    ],
)
def test_what_takes_the_module_apart_is_refused(pool: WorkerPool, act: Any, says: str, first_call: bool) -> None:
    if first_call and act is made_into_a_parameter:
        pytest.skip("before the first call there are no parts")
    for pins in ({"dp": 2, "zero": 3}, {"pp": 2}):
        for found in pool.run(refusal_of, act, first_call, pins):
            assert re.search(says, found), found


@pytest.mark.fake
def test_what_is_compiled_inside_of_what_is_compiled_is_refused() -> None:
    inner = autopar.compile(Net(), gpus=2, cluster="cpu", pins={"dp": 2})
    outer = nn.ModuleDict({"net": inner})
    with pytest.raises(TypeError, match=r"net is what autopar.compile has returned: put its original \(net.original\) there"):
        autopar.compile(outer, gpus=2, cluster="cpu", pins={"dp": 2})


def copied_after_its_optimizer() -> None:
    model = autopar.compile(Net(), gpus=2, cluster="cpu", pins={"dp": 2}, example_inputs=batch())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="Copy the model first: it is to stand before its optimizer"):
        copy.deepcopy([optimizer, model])
    other, of_other = copy.deepcopy([model, optimizer])
    held = [p for group in of_other.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(other.parameters(), held, strict=True))
    assert not any(p is q for p, q in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.gloo
def test_an_optimizer_that_is_copied_with_its_model_holds_the_copy(pool: WorkerPool) -> None:
    pool.run(copied_after_its_optimizer)


def copies_from_before_the_first_call() -> None:
    torch.manual_seed(0)
    model = autopar.compile(Net(), gpus=2, cluster="cpu", pins={"dp": 2, "zero": 3})
    same, wider = copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))
    wider.original.layers[0] = nn.Linear(6, 16)  # which the first call's batch does not fit
    model(*batch()).backward()
    assert same.plan.to_json() == model.plan.to_json() and wider.plan is None
    assert torch.equal(same(*batch()), model(*batch()))
    wider(torch.ones(4, 6), batch()[1]).backward()
    assert wider.plan.mesh == model.plan.mesh


@pytest.mark.gloo
def test_copies_from_before_the_first_call_begin_with_it_where_they_can(pool: WorkerPool) -> None:
    pool.run(copies_from_before_the_first_call)


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["compiled_by_torch", "step_compiled_by_torch"])
def test_torch_compile_leaves_the_module_as_it_is(name: str, judge: Judge) -> None:
    assert judge.not_right(name, ("tp2", "pp2")) == []


@pytest.mark.pure
def test_the_front_end_of_torch_compile_is_not_imported_for_an_emitted_module_alone() -> None:
    code = "import sys, autopar.run; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
