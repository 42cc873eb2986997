"""Parameters that do not train, under ZeRO-3: in parts at rest, and gathered where they are used, as those of a model with adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planner_programs import PROGRAMS, Tied, adapted, program_of

import autopar
from autopar.planner import Plan
from autopar.run import WorkerPool
from autopar.run.part import local

PLANS = {
    "zero3": {"dp": 2, "zero": 3}, "zero3 of micro-batches": {"dp": 2, "zero": 3, "micro_batches": 2},
    "zero3, recomputed": {"dp": 2, "zero": 3, "recompute": "full"}, "zero2": {"dp": 2, "zero": 2},
}  # fmt: skip


def _planned(**pins: Any) -> Plan:
    model, inputs = PROGRAMS["adapted"]()
    return autopar.plan(model, 4, example_inputs=inputs, cluster="dgx-a100", pins={"dp": 4, **pins})


@pytest.mark.pure
def test_what_does_not_train_is_in_parts_where_parameters_are() -> None:
    program = program_of("adapted")
    types = {p.fqn: (p.trainable, program.types[p.value].numel) for p in program.params}
    frozen = sum(numel for trains, numel in types.values() if not trains)
    trained = sum(numel for trains, numel in types.values() if trains)
    two, three = _planned(zero=2), _planned(zero=3)
    assert {types[name][0] for name in two.zero_dims} == {True} and three.zero_dims.keys() == types.keys()
    assert two.stages[0].memory.parameters_bytes >= 4 * frozen
    assert three.stages[0].memory.parameters_bytes == 4 * (frozen + trained) // 4
    assert three.stages[0].memory.optimizer_states_bytes == two.stages[0].memory.optimizer_states_bytes == 2 * 4 * trained // 4
    assert three.stages[0].memory.communication_buffers_bytes > two.stages[0].memory.communication_buffers_bytes, "the units in use"


@pytest.mark.pure
def test_what_did_not_fit_fits() -> None:
    """With a memory that has no room for all that is frozen: 8 GiB, of which a GPU has 4."""
    with torch.device("meta"):
        model = adapted(Tied(vocabulary=256, width=8192, layers=4))
        inputs = dict.fromkeys(("input_ids", "labels"), torch.zeros(4, 16, dtype=torch.long))
    assert sum(4 * p.numel() for p in model.parameters() if not p.requires_grad) > 8 * 2**30
    plan = autopar.plan(model, 4, example_inputs=inputs, cluster="dgx-a100", memory="5GiB", pins={"dp": 4})
    assert plan.rest == "zero3"
    with pytest.raises(autopar.Infeasible, match="Tried, and each would do: zero=3"):
        autopar.plan(model, 4, example_inputs=inputs, cluster="dgx-a100", memory="5GiB", pins={"dp": 4, "zero": 2})


def _trained(pins: dict[str, Any] | None) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int]]:
    """Losses, the state after them, and how many numbers of each frozen parameter rest here."""
    torch.manual_seed(0)
    model, inputs = PROGRAMS["adapted"]()
    model = model.double()
    made: Any = model if pins is None else autopar.compile(model, 2, example_inputs=inputs, cluster="cpu", pins=pins)
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = made(**inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = made.state_dict() if pins is None else made.full_state_dict()
    return losses, dict(state), {name: local(p).numel() for name, p in made.named_parameters() if not p.requires_grad}


@pytest.mark.gloo
@pytest.mark.parametrize("plan", PLANS)
def test_adapters_train_as_on_one_process(pair: WorkerPool, plan: str) -> None:
    losses, state, whole = _trained(None)
    for found, after, here in pair.run(_trained, PLANS[plan], timeout_s=120):
        assert found == pytest.approx(losses, rel=1e-12)
        assert after.keys() == state.keys() and all(torch.allclose(after[n], state[n], rtol=1e-9, atol=1e-12) for n in state)
        parts = 1 if plan == "zero2" else 2
        assert here == {name: numel // parts for name, numel in whole.items()}
