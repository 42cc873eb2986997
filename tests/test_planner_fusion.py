"""Fused kernels: what chains of pointwise operators and reductions move, and what the host issues for them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir import Program
from autopar.measure import Pricer, launches
from autopar.measure.traffic import BROADCAST
from autopar.planner.price import Ledger
from cost_models.cluster import load_cluster
from cost_models.recipe import AUTOPAR

pytestmark = pytest.mark.pure

ROWS, WIDTH = 64, 32
WHOLE = ROWS * WIDTH * 4  # bytes of one activation
FUSES = dataclasses.replace(AUTOPAR, fuses=True)


class Chain(nn.Module):
    """A scaled softmax between two products; nothing but softmax keeps its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) / 3.0).view(ROWS, WIDTH).softmax(-1)).mean()


class Fork(nn.Module):
    """A sum that two operators read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) + 1.0
        return (y.exp() * y.neg()).mean()


def program(model: nn.Module) -> Program:
    return capture(model, {"x": torch.ones(ROWS, WIDTH)}).program


def ledger(made: Program, *, fuses: bool) -> Ledger:
    return Ledger(made, Pricer(load_cluster("dgx-a100"), {"pp": 1, "dp": 1, "tp": 1}, None, FUSES if fuses else AUTOPAR))


def moved(found: Ledger, name: str) -> tuple[int, int]:
    """(bytes read, bytes written) by the only operator of that aten name."""
    (k,) = [k for k, op in enumerate(found.program.ops) if op.target.split(".")[1] == name]
    return found.costs[k].counts.bytes_read, found.costs[k].counts.bytes_written


def test_a_kernel_made_of_several_streams() -> None:
    """By itself a product of narrow numbers with a row takes longer than its bytes say (`traffic.BROADCAST`)."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.row).sum()

    made = capture(Scaled(), {"x": torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)}).program
    apart, together = (next(c for c in ledger(made, fuses=fuses).costs if c.counts.moves) for fuses in (False, True))
    assert apart.counts.traffic and together.counts.traffic
    assert together.counts.traffic.read == (ROWS + 1) * WIDTH * 2
    assert apart.counts.traffic.read == pytest.approx(BROADCAST[0] * together.counts.traffic.read)


def test_what_passes_within_a_kernel_is_not_moved() -> None:
    made = program(Chain())
    apart, together = ledger(made, fuses=False), ledger(made, fuses=True)
    assert (moved(apart, "div"), moved(apart, "softmax")) == ((WHOLE, WHOLE), (WHOLE, WHOLE))
    assert moved(together, "div") == (WHOLE, 0)
    assert moved(together, "softmax") == (0, WHOLE), "its reader is a product, a kernel of its own"
    assert together.saved_by == apart.saved_by
    issued = [sum(c.host_s[0] for c in found.costs) for found in (apart, together)]
    assert issued[0] - issued[1] == pytest.approx(launches.FORWARD["reduction"] * apart.launch_s)
    everything = range(len(made.ops))
    assert sum(together.seconds(everything)[:2]) < sum(apart.seconds(everything)[:2])


def test_what_two_operators_read_is_moved() -> None:
    together = ledger(program(Fork()), fuses=True)
    assert moved(together, "add") == (WHOLE, WHOLE)
    assert moved(together, "exp") == (WHOLE, WHOLE), "backward needs its result"
    assert moved(together, "neg") == (WHOLE, WHOLE), "backward of the product needs it"
    assert moved(together, "mul") == (2 * WHOLE, 0), "the mean is in its kernel"


def test_fused_ledgers_at_other_prices() -> None:
    found = ledger(program(Chain()), fuses=True)
    same = found.repriced(Pricer(load_cluster("dgx-a100"), {"pp": 1, "dp": 1, "tp": 1}, None, FUSES))
    assert same.costs == found.costs
