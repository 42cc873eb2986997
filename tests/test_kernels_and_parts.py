"""What kernels and compiled functions of others make of parts: they are given wholes, or refuse."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch._dynamo import eval_frame

import autopar
from autopar.run import WorkerPool
from benchmarks._traps_kit import Net, batch, seeded

pytestmark = pytest.mark.gloo


def in_package(name: str, text: str) -> dict[str, Any]:
    """What this text defines, as code of a package of this name."""
    made = types.ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), made.__dict__)
    return made.__dict__


def compiled(**pins: int) -> Any:
    return autopar.compile(seeded(Net), 2, example_inputs=batch(), cluster="cpu", pins=pins)


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except TypeError as error:
        return str(error)
    return ""


def ask_for_addresses() -> list[str]:
    model = compiled(dp=2, zero=3)
    model(*batch()).backward()
    address = in_package("triton.runtime.launcher", "def address(x):\n    return x.data_ptr()")["address"]
    weight = model.first.weight
    found = [message(partial(address, x)) for x in (weight, weight.grad, weight.data, torch.ones(2))]
    return [*found, "" if weight.data_ptr() else "an address is what tells tensors apart"]


@pytest.mark.parametrize("place", range(5))
def test_kernels_are_given_no_address_of_a_part(pair: WorkerPool, place: int) -> None:
    """They would read and write beyond it. Others ask for addresses in order to compare them."""
    for found in pair.run(ask_for_addresses, timeout_s=120):
        if place > 2:
            assert found[place] == ""
        else:
            assert "is held in parts by several processes, and a kernel (triton) takes the memory" in found[place]


class _Optimizer(torch.optim.SGD):
    pass


def step_of(module: str, pins: dict[str, int]) -> str:
    model = compiled(**pins)
    model(*batch()).backward()
    _Optimizer.__module__ = module
    return message(_Optimizer(model.parameters(), lr=0.1).step)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("torchao.optim.adam", "_Optimizer of torchao keeps states of whole parameters in tensors that take no parts, and "),
        ("apex.optimizers.fused_lamb", "_Optimizer has kernels for the norm of each parameter, and "),
    ],
)
def test_an_optimizer_that_takes_parts_for_wholes_is_refused(pair: WorkerPool, module: str, why: str) -> None:
    for found in pair.run(step_of, module, {"dp": 2, "zero": 3}, timeout_s=120):
        assert found.startswith(why) and "weight is held in parts by several processes. Use " in found
    assert pair.run(step_of, module, {"dp": 2}, timeout_s=120) == ["", ""], "what is whole on every rank it steps on"


_OPERATORS = library.Library("tests_kernels", "FRAGMENT")
_OPERATORS.define("doubled(Tensor read, *, Tensor(a!) written) -> ()")


def _doubled(read: Tensor, *, written: Tensor) -> None:
    written.numpy()[:] = read.numpy() * 2  # as a kernel does: autograd does not count it


_OPERATORS.impl("doubled", _doubled, "CPU")


def write_by_operators() -> tuple[bool, bool, bool]:
    model = compiled(dp=2, zero=3)
    weight, bias = model.first.weight, model.blocks[0].up.bias
    whole = weight.detach().clone()
    with torch.no_grad():
        torch.ops.tests_kernels.doubled(weight, written=weight)
        once = torch.equal(weight * 1, whole * 2)
        torch.ops.tests_kernels.doubled.default(whole, written=weight)
        read = bias.detach().clone()
        torch.ops.tests_kernels.doubled(bias, written=torch.empty(bias.shape))
        return once, torch.equal(weight * 1, whole * 2), torch.equal(bias * 1, read)


def test_an_operator_writes_to_parts_as_its_schema_says(pair: WorkerPool) -> None:
    """By its packet and by its overload, by keyword; what it reads stays."""
    assert pair.run(write_by_operators, timeout_s=120) == [(True, True, True)] * 2


def raise_in_a_step() -> tuple[str, str]:
    """The stance of torch.compile within a step that raises, and after the next call of the model."""
    model, seen = compiled(dp=2, zero=3), []

    class Raising(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            seen.append(eval_frame._stance.stance)
            raise ArithmeticError

    optimizer = Raising(model.parameters(), {})
    model(*batch()).backward()
    with contextlib.suppress(ArithmeticError):
        optimizer.step()
    model(*batch()).backward()
    return seen[0], eval_frame._stance.stance


def test_what_is_compiled_runs_compiled_after_a_step_that_raised(pair: WorkerPool) -> None:
    assert pair.run(raise_in_a_step, timeout_s=120) == [("force_eager", "default")] * 2
