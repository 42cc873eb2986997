"""Programs with several heads, whose losses come in turns, and which change what the model gives them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import CLASSES, HIDDEN, Compile, Net, Results, batch, batches, program, seeded, sgd, state

KIND = "turns"
MORE = ("zero2", "dp2tp2")


class TwoHeads(Net):
    """Returns two outputs, one from the first of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(HIDDEN, CLASSES)
        self.second = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.blocks[0](torch.tanh(self.first(x)))
        g = self.blocks[1](h)
        return self.head(g), self.second(g), self.early(h)


def _losses(outputs: tuple[Tensor, Tensor, Tensor], y: Tensor) -> list[Tensor]:
    return [F.cross_entropy(outputs[0], y), outputs[1].square().mean(), F.cross_entropy(outputs[2], y)]


@program(KIND, plans=MORE)
def heads_trained_in_turns(compile: Compile) -> Results:
    """Each step trains one head; what the others have is no gradient at all, so that momentum does not move them."""
    model = compile(seeded(TwoHeads), example_inputs=batch()[:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, missing = [], []
    for k, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad(set_to_none=True)
        loss = _losses(model(x), y)[k % 3]
        loss.backward()
        missing.append(sorted(name for name, p in model.named_parameters() if p.grad is None))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "missing": missing, "state": state(model)}


@program(KIND, plans=MORE)
def heads_of_no_even_turns(compile: Compile) -> Results:
    """The last head is used in the third step alone; norms of the gradients are taken of all that there are."""
    model = compile(seeded(TwoHeads), example_inputs=batch()[:1])
    optimizer, losses, norms = sgd(model), [], []
    for k, (x, y) in enumerate(batches(5)):
        optimizer.zero_grad(set_to_none=True)
        given = _losses(model(x), y)
        loss = given[2] if k == 2 else given[0] + given[1] if k % 2 else given[1]
        loss.backward()
        norms.append([p.grad.norm().item() for p in model.parameters() if p.grad is not None])
        norms.append([torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()])
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "state": state(model)}


@program(KIND, plans=MORE)
def logits_changed_in_place(compile: Compile) -> Results:
    """Margins subtracted from, and masks filled into, what the model returns."""
    model = compile(seeded(TwoHeads), example_inputs=batch()[:1])
    optimizer, losses = sgd(model), []
    for x, y in batches(3):
        optimizer.zero_grad()
        logits, second, early = model(x)
        logits[:, 0] -= 1.0
        second.masked_fill_(second > 1.0, 0.5)
        early[torch.arange(len(y)), y] -= 0.35
        early *= 2.0
        loss = sum(_losses((logits, second, early), y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def weight_changed_between_forward_and_backward(compile: Compile) -> Results:
    """torch raises at such a backward; so does this, or it says why not."""
    model = compile(seeded(TwoHeads), example_inputs=batch()[:1])
    x, y = batch()
    loss = _losses(model(x), y)[0]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    try:
        loss.backward()
    except (RuntimeError, ValueError):
        return {"raised": True}
    return {"raised": False}


class LossAndLogits(Net):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        logits = self.logits(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


@program(KIND)
def loss_scaled_in_place(compile: Compile) -> Results:
    """`loss /= 2` and `loss.mul_()` of what the model returns, before backward."""
    model = compile(seeded(LossAndLogits), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches(4):
        loss = model(*given)["loss"]
        loss /= 2
        loss.mul_(0.5)
        loss.backward()
        if len(losses) % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def gradients_of_each_loss_compared(compile: Compile) -> Results:
    """The graph of one call is retained: gradients of two losses are projected where they point apart; and a third loss is weighed by norms
    of gradients of one layer, before its own backward."""
    model = compile(seeded(TwoHeads), example_inputs=batch()[:1])
    optimizer, losses = sgd(model), []
    for x, y in batches(3):
        one, two, three = _losses(model(x), y)
        params = list(model.parameters())
        given = [torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True) for loss in (one, two)]
        a, b = (torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for g, p in zip(of, params, strict=True)]) for of in given)
        apart = (a @ b).clamp(max=0) / (b @ b)
        last = model.first.weight
        norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (one, three)]
        optimizer.zero_grad()
        (three * (norms[0] / norms[1]).detach()).backward()
        for p, part in zip(params, (a - apart * b).split([p.numel() for p in params]), strict=True):
            p.grad = part.view_as(p) if p.grad is None else p.grad + part.view_as(p)
        optimizer.step()
        losses += [one.item(), two.item(), three.item(), norms[0].item(), norms[1].item()]
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def gradients_of_one_loss_twice(compile: Compile) -> Results:
    """With dropout: both times the same numbers are dropped. And gradients of an input, of each loss."""

    class Dropping(TwoHeads):
        def forward(self, x: Tensor) -> Any:
            return super().forward(F.dropout(x, 0.5, self.training))

    model, same, of_inputs = compile(seeded(Dropping), example_inputs=batch()[:1]), [], []
    for x, y in batches(2):
        torch.manual_seed(3)
        loss = _losses(model(x), y)[0]
        params = list(model.head.parameters())
        one, two = torch.autograd.grad(loss, params, retain_graph=True), torch.autograd.grad(loss, params)
        same += [torch.allclose(a, b, rtol=1e-12) for a, b in zip(one, two, strict=True)]
        model.eval()
        x = x.clone().requires_grad_()
        heads = _losses(model(x), y)
        of_inputs += [torch.autograd.grad(head, x, retain_graph=True)[0] for head in heads]
        model.train()
    return {"same": same, "of_inputs": of_inputs}


@program(KIND)
def gradients_twice_of_what_has_changed(compile: Compile) -> Results:
    """Between both backward passes the optimizer steps: torch raises, and so does this."""
    model = compile(seeded(TwoHeads), example_inputs=batch()[:1])
    optimizer, (x, y) = sgd(model), batch()
    one, two, _ = _losses(model(x), y)
    one.backward(retain_graph=True)
    optimizer.step()
    raised = ""
    try:
        two.backward()
    except RuntimeError as error:
        raised = type(error).__name__
    return {"raised": raised}
