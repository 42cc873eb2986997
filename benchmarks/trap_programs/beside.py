"""Programs that make what they train of what a model returns beside its loss, compiled as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    CLASSES,
    HIDDEN,
    Compile,
    InDict,
    Net,
    Results,
    batch,
    batches,
    gradients,
    program,
    seeded,
    sgd,
    state,
)
from benchmarks.trap_programs.read import Codes, NormedInDict

KIND = "beside"
MORE = ("hybrid3", "dp2mb2", "dp2tp2")


@program(KIND, plans=MORE)
def distilled_beside_its_labels(compile: Compile) -> Results:
    """The loss of the model, and how far its logits are from a teacher's."""
    teacher = seeded(nn.Linear, 8, CLASSES).double()
    model = compile(seeded(InDict), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for x, y in batches(3):
        optimizer.zero_grad()
        out = model(x, y)
        apart = F.kl_div(out["logits"].log_softmax(-1), teacher(x).detach().softmax(-1), reduction="batchmean")
        loss = 0.5 * out["loss"] + 2 * apart
        loss.backward()
        found += [loss.item(), apart.item()]
        optimizer.step()
    return {"found": found, "gradients": gradients(model), "state": state(model)}


class Variational(Net):
    """Returns a sum, and its terms."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(HIDDEN, HIDDEN).double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.hidden(x)
        spread = self.spread(hidden)
        fits = F.cross_entropy(self.head(hidden), y)
        prior = (spread.exp() + hidden.square() - spread - 1).mean() / 2
        return fits + prior, fits, prior


@program(KIND, plans=MORE)
def terms_weighted_by_the_loop(compile: Compile) -> Results:
    """The sum is for the log alone."""
    model = compile(seeded(Variational), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for step, given in enumerate(batches(3)):
        total, fits, prior = model(*given)
        optimizer.zero_grad()
        (fits + 0.1 * step * prior).backward()
        optimizer.step()
        found += [total.item(), fits.item(), prior.item()]
    return {"found": found, "gradients": gradients(model), "state": state(model)}


@program(KIND)
def a_term_in_some_steps(compile: Compile) -> Results:
    """Of which the loss is trained in any case, in two backward passes."""
    model = compile(seeded(Variational), example_inputs=batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = list[float]()
    for step, given in enumerate(batches(4)):
        optimizer.zero_grad()
        total, fits, prior = model(*given)
        total.backward(retain_graph=True)
        if step % 2:
            (0.5 * prior).backward()
        found += [total.item(), fits.item()]
        optimizer.step()
    return {"found": found, "gradients": gradients(model), "state": state(model)}


@program(KIND)
def slope_of_logits(compile: Compile) -> Results:
    """By the input, which a map of what matters shows; nothing is trained by it."""
    model = compile(seeded(InDict), example_inputs=batch())
    x, y = batch(3)
    x.requires_grad_()
    out = model(x, y)
    (slope,) = torch.autograd.grad(out["logits"][:, 0].sum(), x, retain_graph=True)
    out["loss"].backward()
    return {"slope": slope, "of_loss": x.grad, "gradients": gradients(model)}


def _logits_kept_small(model: Any, weight: float, given: Iterable[tuple[Tensor, Tensor]]) -> Results:
    """Steps whose loss is the model's and a penalty on its logits."""
    optimizer, found = sgd(model), list[float]()
    for x, y in given:
        optimizer.zero_grad()
        out = model(x, y)
        penalty = out["logits"].square().mean()
        (out["loss"] + weight * penalty).backward()
        found += [out["loss"].item(), penalty.item()]
        optimizer.step()
    return {"found": found, "gradients": gradients(model), "state": state(model)}


@program(KIND)
def logits_kept_small(compile: Compile) -> Results:
    """Beside statistics of batches, which a second run is not to add."""
    return _logits_kept_small(compile(seeded(NormedInDict), example_inputs=batch()), 0.01, batches())


@program(KIND)
def logits_kept_small_asked_for(compile: Compile) -> Results:
    """With outputs="all"."""
    return _logits_kept_small(compile(seeded(InDict), example_inputs=batch(), outputs="all"), 0.01, batches())


class Routed(Net):
    """Leaves a penalty for the loop to add, as mixtures of experts do."""

    balance: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.balance = hidden.softmax(-1).square().sum(-1).mean()
        return F.cross_entropy(self.head(hidden), y)


@program(KIND, plans=MORE)
def penalty_left_in_an_attribute(compile: Compile) -> Results:
    model = compile(seeded(Routed), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for given in batches(3):
        optimizer.zero_grad()
        loss = model(*given)
        (loss + 0.5 * model.balance).backward()
        found += [loss.item(), model.balance.item()]
        optimizer.step()
    return {"found": found, "gradients": gradients(model), "state": state(model)}


@program(KIND)
def penalties_of_several_calls(compile: Compile) -> Results:
    """Two calls for each step; then the model is evaluated, and trained on."""
    model = compile(seeded(InDict), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for step in range(3):
        for part in range(2):
            x, y = batch(2 * step + part)
            out = model(x, y)
            loss = out["loss"] + 0.1 * out["logits"].logsumexp(-1).square().mean()
            (loss / 2).backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            out = model(*batch(9))
            found += [out["loss"].item(), out["logits"].norm().item()]
        model.train()
    return {"found": found, "state": state(model)}


class Frozen(InDict):
    """Of which a part is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


@program(KIND)
def logits_of_a_partly_frozen_model(compile: Compile) -> Results:
    model = compile(seeded(Frozen), example_inputs=batch())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = list[float]()
    for x, y in batches(3):
        optimizer.zero_grad()
        out = model(x, y)
        margin = F.multi_margin_loss(out["logits"], y)
        (out["loss"] + margin).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found += [out["loss"].item(), margin.item()]
        optimizer.step()
    return {"found": found, "gradients": gradients(model), "state": state(model)}


@program(KIND)
def codes_that_move_beside_a_penalty(compile: Compile) -> Results:
    """Buffers that each call changes, and computes of."""
    return _logits_kept_small(compile(seeded(Codes), example_inputs=batch()), 0.2, batches())


@program(KIND)
def codes_that_move_and_are_asked_for(compile: Compile) -> Results:
    """The same with outputs="all"."""
    return _logits_kept_small(compile(seeded(Codes), example_inputs=batch(), outputs="all"), 0.2, batches())


@program(KIND)
def penalty_on_the_slope_of_logits(compile: Compile) -> Results:
    """A gradient of logits, which is differentiated again."""
    model = compile(seeded(InDict), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for x, y in batches(3):
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        out = model(x, y)
        (slope,) = torch.autograd.grad(out["logits"].sum(), x, create_graph=True)
        penalty = slope.square().sum(-1).mean()
        (out["loss"] + 0.1 * penalty).backward()
        found += [out["loss"].item(), penalty.item()]
        optimizer.step()
    return {"found": found, "gradients": gradients(model), "state": state(model)}


@program(KIND)
def penalty_with_short_last_batches(compile: Compile) -> Results:
    """Of two epochs; the short ones do not divide among ranks."""
    given = [(x[:5], y[:5]) if index % 3 == 2 else (x, y) for index, (x, y) in enumerate(batches(6))]
    return _logits_kept_small(compile(seeded(InDict), example_inputs=batch()), 0.2, given)
