"""Programs that read what a model returns beside its loss when something has gone on since: other calls, an optimizer's step, a number that
is set."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._traps_kit import Compile, InDict, Results, batch, batches, gradients, program, seeded, sgd, state
from benchmarks.trap_programs.read import Scored

KIND = "read"
MORE = ("hybrid3", "dp2mb2", "dp2tp2")


@program(KIND)
def gradients_of_several_calls(compile: Compile) -> Results:
    """Two calls for each step, of which the metrics are read behind the second one."""
    model = compile(seeded(Scored), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for step in range(2):
        optimizer.zero_grad()
        first, second = model(*batch(2 * step)), model(*batch(2 * step + 1))
        (first[0] + second[0]).backward()
        found += [float(first[1]), second[1].item(), *map(float, (first[0], second[0]))]
        optimizer.step()
    return {"found": found, "gradients": gradients(model), "state": state(model)}


@program(KIND)
def metrics_of_past_calls_stacked(compile: Compile) -> Results:
    """Read when all calls are through."""
    model = compile(seeded(Scored), example_inputs=batch())
    model.eval()
    with torch.inference_mode():
        found = [model(*given) for given in batches(3)]
        metrics, losses = torch.stack([out[1] for out in found]), torch.tensor([out[0] for out in found])
    return {"metrics": metrics, "losses": losses, "kinds": [str(x.dtype) for x in (metrics, losses)]}


class Tempered(InDict):
    """A number that the loop sets decides what stands beside the loss alone."""

    temperature = 1.0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = super().forward(x, y)
        return {**found, "probabilities": (found["logits"] / self.temperature).softmax(-1)}


@program(KIND)
def number_beside_the_loss_is_annealed(compile: Compile) -> Results:
    model = compile(seeded(Tempered), example_inputs=batch())
    optimizer, found = sgd(model), list[Tensor]()
    for step, given in enumerate(batches(3)):
        optimizer.zero_grad()
        model.temperature = 1.0 + step
        out = model(*given)
        found.append(out["probabilities"].detach())
        out["loss"].backward()
        optimizer.step()
    return {"found": found}


@program(KIND)
def number_is_set_between(compile: Compile) -> Results:
    """Between the call and the reading of what it has decided."""
    model = compile(seeded(Tempered), example_inputs=batch())
    out = model(*batch())
    model.temperature = 2.0
    return {"found": out["probabilities"].detach()}


@program(KIND, plans=MORE)
def metric_behind_the_step(compile: Compile) -> Results:
    """It is read when the parameters are others."""
    model = compile(seeded(Scored), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for given in batches(3):
        optimizer.zero_grad()
        loss, metric = model(*given)
        loss.backward()
        optimizer.step()
        found += [loss.item(), metric.item()]
    return {"found": found}


@program(KIND, remedy_of="metric_behind_a_step_by_hand")
def metric_before_the_step(compile: Compile) -> Results:
    """The same, read before."""
    model = compile(seeded(Scored), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for given in batches(3):
        optimizer.zero_grad()
        loss, metric = model(*given)
        found += [loss.item(), metric.item()]
        loss.backward()
        optimizer.step()
    return {"found": found}


@program(KIND)
def metric_behind_a_step_by_hand(compile: Compile) -> Results:
    """Nothing tells that a step is coming."""
    model = compile(seeded(Scored), example_inputs=batch())
    loss, metric = model(*batch())
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    return {"found": metric.item()}


@program(KIND)
def metrics_of_an_epoch(compile: Compile) -> Results:
    """Added up as tensors, and read at its end."""
    model = compile(seeded(InDict), example_inputs=batch())
    optimizer, losses, right = torch.optim.AdamW(model.parameters(), lr=1e-2), list[Tensor](), list[Tensor]()
    for x, y in batches(3):
        out = model(x, y)
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        right.append(out["logits"].argmax(-1) == y)
        losses.append(out["loss"].detach())
    return {"accuracy": torch.cat(right).double().mean(), "loss": torch.stack(losses).mean(), "state": state(model)}


@program(KIND)
def metrics_of_accumulated_calls(compile: Compile) -> Results:
    """Of all calls that a step is of."""
    model = compile(seeded(Scored), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for step in range(2):
        seen = []
        for part in range(3):
            loss, metric = model(*batch(3 * step + part))
            (loss / 3).backward()
            seen.append(metric)
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.stack(seen).mean().item())
    return {"found": found, "state": state(model)}


@program(KIND)
def metric_in_a_closure(compile: Compile) -> Results:
    model = compile(seeded(Scored), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for given in batches(3):
        seen = []

        def closure(given: tuple[Tensor, Tensor] = given, seen: list[Tensor] = seen) -> Tensor:
            optimizer.zero_grad()
            loss, metric = model(*given)
            loss.backward()
            seen.append(metric)
            return loss

        found += [optimizer.step(closure).item(), seen[0].item()]
    return {"found": found, "state": state(model)}


@program(KIND)
def metric_behind_two_optimizers(compile: Compile) -> Results:
    """Each has a part of the parameters; before them steps one of another model."""
    model = compile(seeded(Scored), example_inputs=batch())
    critic = torch.nn.Linear(1, 1).double()
    first, *others = model.parameters()
    optimizers, found = [sgd(critic), torch.optim.SGD([first], 0.1), torch.optim.Adam(others, 0.01)], list[float]()
    for given in batches(3):
        loss, metric = model(*given)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found += [loss.item(), metric.item()]
    return {"found": found, "state": state(model)}


@program(KIND)
def metric_kept_by_one_rank(compile: Compile) -> Results:
    """One alone keeps what a call returns, and does not read it."""
    model = compile(seeded(InDict), example_inputs=batch())
    optimizer, kept, found = sgd(model), list[object](), list[float]()
    for given in batches(3):
        out = model(*given)
        out["loss"].backward()
        found.append(out["loss"].item())
        if not dist.is_initialized() or dist.get_rank() == 0:
            kept.append(out)
        del out
        optimizer.step()
        optimizer.zero_grad()
    return {"found": found, "state": state(model)}
