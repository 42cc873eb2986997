"""Programs that evaluate in all the ways there are, and programs that make one backward of several losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    Compile,
    InDict,
    Net,
    Results,
    batch,
    batches,
    gradients,
    loss_loop,
    program,
    seeded,
    sgd,
    state,
    train,
    trained,
)

EVALUATION, LOSSES = "evaluation", "losses"


class Normed(InDict):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)

    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.norm(super().hidden(x))
        return hidden if self.training else self.drop(hidden)


class Remembering(nn.Module):
    """Attends to all that it was shown since its cache was emptied, if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.keys, self.values, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.cache: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, remember: bool = False) -> Tensor:
        h = torch.tanh(self.first(x))
        keys, values = self.keys(h), self.values(h)
        if remember:
            if self.cache is not None:
                keys, values = torch.cat([self.cache[0], keys], 1), torch.cat([self.cache[1], values], 1)
            self.cache = keys, values
        out: Tensor = self.head(F.scaled_dot_product_attention(h, keys, values))
        return out


@program(EVALUATION)
def cache_that_grows_in_evaluation(compile: Compile) -> Results:
    """Keys and values of earlier calls, kept in an attribute by calls under no_grad; between epochs of training."""
    model = compile(seeded(Remembering))
    optimizer, losses, found = sgd(model), [], []
    for k in range(2):
        x, y = batch(k)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:, None]).squeeze(1), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            found += [model(batch(step + 5, 4)[0][:, None], remember=True).sum().item() for step in range(3)]
        model.cache = None
        model.train()
    return {"losses": losses, "found": found, "state": state(model)}


class Adapted(nn.Module):
    """A frozen layer and what trains beside it, which can be added to its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs) * 0.1), nn.Parameter(torch.zeros(outputs, 2))
        self.merged = False

    def merge(self, sign: float) -> None:
        self.layer.weight.data += sign * self.up.data @ self.down.data
        self.merged = sign > 0

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h if self.merged else h + x @ self.down.T @ self.up.T


@program(EVALUATION)
def adapters_merged_for_evaluation(compile: Compile) -> Results:
    """Then nothing before the last layer trains, and there is no gradient that could go back to the first stage."""
    model = compile(seeded(lambda: nn.Sequential(Adapted(8, 16), nn.Tanh(), Adapted(16, 16), nn.Tanh(), nn.Linear(16, 4))))
    optimizer, losses, found = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2), [], []
    for k in range(3):
        x, y = batch(k)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        adapted = [m for m in model.modules() if isinstance(m, Adapted)]
        for m in adapted:
            m.merge(1.0)
        with torch.no_grad():
            found += [model(batch(9)[0]), model(batch(8, 6)[0])]
        for m in adapted:
            m.merge(-1.0)
    return {"losses": losses, "found": found, "state": state(model)}


@program(EVALUATION)
def evaluated_before_the_first_step(compile: Compile) -> Results:
    model = compile(seeded(Normed))
    model.eval()
    with torch.no_grad():
        before = model(*batch(9))["loss"].item()
    model.train()
    return {"before": before, "losses": loss_loop(model, lambda out: out["loss"]), "state": state(model)}


@program(EVALUATION)
def evaluated_in_inference_mode(compile: Compile) -> Results:
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer)
    model.eval()
    with torch.inference_mode():
        evaluated = model(*batch(9)).item()
    model.train()
    return {"losses": losses + train(model, optimizer), "evaluated": evaluated, "state": state(model)}


@program(EVALUATION)
def first_call_in_inference_mode(compile: Compile) -> Results:
    """The plan is made on a call under inference_mode, then training begins."""
    model = compile(seeded(Net))
    with torch.inference_mode():
        evaluated = model(*batch(9)).item()
    return {"evaluated": evaluated, **trained(model)}


@program(EVALUATION)
def first_call_without_gradient(compile: Compile) -> Results:
    """The same under no_grad, with the optimizer made before."""
    model = compile(seeded(Net))
    optimizer = sgd(model)
    with torch.no_grad():
        evaluated = model(*batch(9)).item()
    return {"evaluated": evaluated, **trained(model, optimizer)}


@program(EVALUATION)
def batch_norm_evaluated(compile: Compile) -> Results:
    """Running statistics are used in evaluation, and are not changed by it."""
    model = compile(seeded(Normed), example_inputs=batch())
    losses = loss_loop(model, lambda out: out["loss"])
    model.eval()
    with torch.no_grad():
        evaluated = [model(*batch(9))["loss"].item() for _ in range(2)]
    return {"losses": losses, "evaluated": evaluated, "state": state(model)}


@program(EVALUATION)
def evaluated_on_larger_batches(compile: Compile) -> Results:
    """24 and 4 samples in evaluation."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    model.eval()
    with torch.no_grad():
        return {"losses": losses, "evaluated": [model(*batch(9, size=n)).item() for n in (24, 4, 24)]}


@program(EVALUATION)
def evaluated_on_an_odd_batch(compile: Compile) -> Results:
    """5 samples in evaluation, which no two ranks can share alike."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    model.eval()
    with torch.no_grad():
        return {"losses": losses, "evaluated": model(*batch(9, size=5)).item()}


@program(EVALUATION)
def evaluation_that_is_differentiated(compile: Compile) -> Results:
    """model.eval(), and still backward: saliency by the gradients of the weights."""
    model = compile(seeded(Normed), example_inputs=batch())
    model.eval()
    out = model(*batch())
    return {"loss": out["loss"].item()}


@program(EVALUATION)
def evaluated_without_labels(compile: Compile) -> Results:
    """Predictions: the labels are left out in evaluation, and logits come back."""

    class Optional(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.logits(x)
            return {"logits": logits} if y is None else {"loss": F.cross_entropy(logits, y), "logits": logits}

    model = compile(seeded(Optional), example_inputs=batch())
    losses = loss_loop(model, lambda out: out["loss"])
    model.eval()
    with torch.no_grad():
        return {"losses": losses, "logits": model(batch(9)[0])["logits"]}


# ------------------------------------------------------------------------------------------------------ losses
@program(LOSSES)
def two_batches_in_one_backward(compile: Compile) -> Results:
    """(model(a) + model(b)).backward()."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for i in range(2):
        optimizer.zero_grad()
        loss = model(*batch(2 * i)) + 0.5 * model(*batch(2 * i + 1))
        loss.backward()
        found = gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "gradients": found, "state": state(model)}


@program(LOSSES)
def function_of_the_loss(compile: Compile) -> Results:
    """Flooding: (loss - 0.5).abs() + 0.5, and an exponential of it."""
    model = compile(seeded(Net), example_inputs=batch())
    return {"losses": loss_loop(model, lambda loss: (loss - 1.5).abs() + torch.exp(0.1 * loss)), "state": state(model)}


@program(LOSSES)
def learned_weight_outside(compile: Compile) -> Results:
    """A parameter of the user's own that weighs the loss."""
    model = compile(seeded(Net), example_inputs=batch())
    weight = nn.Parameter(torch.zeros(()))
    optimizer, losses = torch.optim.SGD([*model.parameters(), weight], lr=0.1), []
    for given in batches():
        optimizer.zero_grad()
        loss = torch.exp(-weight) * model(*given) + weight
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weight": weight.item(), "state": state(model)}


@program(LOSSES)
def backward_twice(compile: Compile) -> Results:
    """backward(retain_graph=True), then once more."""
    model = compile(seeded(Net), example_inputs=batch())
    loss = model(*batch())
    loss.backward(retain_graph=True)
    loss.backward()
    return {"loss": loss.item(), "gradients": gradients(model)}


@program(LOSSES)
def loss_that_is_never_used(compile: Compile) -> Results:
    """A call with gradients whose backward is left out, between steps."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=1)
    unused = model(*batch(7)).item()
    return {"losses": losses + train(model, optimizer), "unused": unused, "state": state(model)}


@program(LOSSES)
def backward_with_a_gradient(compile: Compile) -> Results:
    """loss.backward(gradient=torch.tensor(3.0))."""
    model = compile(seeded(Net), example_inputs=batch())
    loss = model(*batch())
    loss.backward(gradient=torch.tensor(3.0))
    return {"loss": loss.item(), "gradients": gradients(model)}


@program(LOSSES)
def backward_into_some_parameters(compile: Compile) -> Results:
    """loss.backward(inputs=the head's parameters): the others keep no gradient."""
    model = compile(seeded(Net), example_inputs=batch())
    model(*batch()).backward(inputs=list(model.head.parameters()))
    return {"gradients": gradients(model)}
