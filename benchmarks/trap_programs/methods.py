"""Ways to train that are more than one loss and one step: policies, targets, banks, consolidation, optimizers with two sets of weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    CLASSES,
    HIDDEN,
    WIDTH,
    Compile,
    Net,
    Normed,
    Results,
    batch,
    batches,
    program,
    samples,
    seeded,
    sgd,
    state,
    stepped,
    train,
    trained,
)

KIND = "methods"
MORE = ("dp2mb2", "dp2tp2")


@program(KIND)
def policy_of_several_epochs(compile: Compile) -> Results:
    """PPO: a rollout of twice the batch without gradients, then epochs over shuffled halves with clipped ratios and advantages."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.policy, self.value = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(self.body(x))
            return self.policy(hidden), self.value(hidden).squeeze(-1)

    def chosen(logits: Tensor, actions: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)

    model = compile(seeded(Policy), example_inputs=(samples(),))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5), []
    seen = torch.cat([samples(0), samples(1)])
    model.eval()
    with torch.no_grad():
        logits, values = model(seen)
    model.train()
    actions = logits.argmax(-1)
    before, returns = chosen(logits, actions), torch.linspace(0, 1, len(seen))
    advantage = (returns - values - (returns - values).mean()) / (returns - values).std()
    for epoch in range(2):
        for part in torch.randperm(len(seen), generator=torch.Generator().manual_seed(epoch)).split(len(seen) // 2):
            logits, values = model(seen[part])
            ratio = (chosen(logits, actions[part]) - before[part]).exp()
            gain = torch.minimum(ratio * advantage[part], ratio.clamp(0.8, 1.2) * advantage[part])
            loss = 0.5 * (values - returns[part]).square().mean() - gain.mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def target_network_that_follows(compile: Compile) -> Results:
    """DQN: both networks are compiled, and the target is loaded from the other every second step."""

    class Values(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.logits(x)

    model, target = (compile(seeded(Values), example_inputs=(samples(),)) for _ in range(2))
    target.load_state_dict(model.state_dict())
    target.eval()
    optimizer, losses = sgd(model), []
    for k, (x, action) in enumerate(batches(4)):
        with torch.no_grad():
            wanted = action.double() + 0.9 * target(samples(k + 1)).max(1).values * (action != 2)
        loss = F.smooth_l1_loss(model(x).gather(1, action[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.data.clamp_(-1, 1)
        optimizer.step()
        losses.append(loss.item())
        if k % 2:
            target.load_state_dict(model.state_dict())
    return {"losses": losses, "model": state(model), "target": state(target)}


@program(KIND, plans=MORE)
def bank_of_samples(compile: Compile) -> Results:
    """Each sample is told from all others by a bank of features in a buffer, whose rows are written by index."""

    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("bank", F.normalize(torch.randn(36, WIDTH), dim=1))

        def forward(self, x: Tensor, which: Tensor) -> Tensor:
            features = F.normalize(self.net(x), dim=1)
            loss = F.cross_entropy(features @ self.bank.clone().T / 0.2, which)
            with torch.no_grad():
                self.bank[which] = F.normalize(0.5 * self.bank[which] + 0.5 * features, dim=1)
            return loss

    inputs = [(samples(k), torch.randperm(36, generator=torch.Generator().manual_seed(k))[:12]) for k in range(3)]
    return trained(compile(seeded(Bank), example_inputs=inputs[0]), inputs=inputs)


@program(KIND, plans=MORE)
def range_of_activations(compile: Compile) -> Results:
    """An observer as of quantisation-aware training: the least and the largest activation so far, and rounding between them."""

    class Observed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("least", torch.zeros(()))
            self.register_buffer("largest", torch.zeros(()))

        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            with torch.no_grad():
                self.least.copy_(torch.minimum(self.least, hidden.min()))
                self.largest.copy_(torch.maximum(self.largest, hidden.max()))
            step = (self.largest - self.least) / 15
            rounded = torch.round((hidden - self.least) / step).clamp(0, 15) * step + self.least
            return hidden + (rounded - hidden).detach()

    return trained(compile(seeded(Observed), example_inputs=batch()))


@program(KIND)
def sharpness_without_statistics(compile: Compile) -> Results:
    """SAM: the second pass leaves the running statistics alone, by a momentum of 0."""
    model = compile(seeded(Normed), example_inputs=batch())
    optimizer, losses, momentum = sgd(model), [], model.norm.momentum
    for given in batches():
        loss = model(*given)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        model.norm.momentum = 0.0
        model(*given).backward()
        model.norm.momentum = momentum
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def consolidated_weights(compile: Compile) -> Results:
    """EWC: squared gradients of a first task weigh how far weights may go on a second one."""
    model = compile(seeded(Net), example_inputs=batch())
    fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for given in batches(2):
        model.zero_grad()
        model(*given).backward()
        for name, p in model.named_parameters():
            fisher[name] += p.grad.data**2 / 2

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return model(x, y) + 10 * sum((fisher[n] * (p - start[n]) ** 2).sum() for n, p in model.named_parameters())

    return {"losses": stepped(model, loss_of), "fisher": fisher, "state": state(model)}


@program(KIND)
def parts_called_by_the_loop(compile: Compile) -> Results:
    """The loop calls a method and a part of the model, not the model, and goes backward through both."""
    model = compile(seeded(Normed), example_inputs=batch())

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model.head(model.hidden(x)), y)

    return {"losses": stepped(model, loss_of), "state": state(model)}


class ScheduleFree(torch.optim.Optimizer):
    """Its parameters are a mixture of two sets of weights, and another mixture for evaluation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "steps": 0, "trains": True})

    @torch.no_grad()
    def switch(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in group["params"]:
                    p.lerp_(self.state[p]["fast"], 0.1 if trains else 1 - 1 / 0.9)
                group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weight = 1 / (group["steps"] + 1)
            for p in group["params"]:
                kept = self.state[p]
                if not kept:
                    kept["fast"], kept["square"] = p.detach().clone(), torch.zeros_like(p)
                kept["square"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                grad = p.grad.div_(kept["square"].sqrt().add_(1e-8))
                p.lerp_(kept["fast"], weight)
                p.add_(grad, alpha=group["lr"] * (0.9 * (1 - weight) - 1))
                kept["fast"].sub_(grad, alpha=group["lr"])
            group["steps"] += 1


@program(KIND)
def without_a_schedule(compile: Compile) -> Results:
    """The optimizer switches between the weights of training and those of evaluation."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = ScheduleFree(model.parameters())
    losses = train(model, optimizer)
    optimizer.switch(False)
    with torch.no_grad():
        evaluated = model(*batch(7)).item()
    optimizer.switch(True)
    return {"evaluated": evaluated, "losses": losses + train(model, optimizer), "state": state(model)}


class Scaled(Net):
    """Its loss is scaled by a parameter without dims, which is used in the last layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def logits(self, x: Tensor) -> Tensor:
        return self.scale * super().logits(x)


@program(KIND)
def states_of_a_number(compile: Compile) -> Results:
    """States of a parameter without dims: of an optimizer that makes them when it is made, before compile, and of one that is loaded."""
    net = seeded(Scaled)
    other = torch.optim.Adam(net.parameters(), lr=1e-2)
    before = train(net, other)
    sums = torch.optim.Adagrad(net.parameters(), lr=1e-2)
    model = compile(net, example_inputs=batch())
    losses = train(model, sums)
    averages = torch.optim.Adam(model.parameters(), lr=1e-2)
    averages.load_state_dict(other.state_dict())
    losses += train(model, averages)
    kept = [averages.state[model.scale]["exp_avg"], averages.state[model.scale]["exp_avg_sq"], sums.state[model.scale]["sum"]]
    return {"before": before, "losses": losses, "kept": [float(t.norm()) for t in kept], "state": state(model)}


@program(KIND)
def optimizers_of_a_number(compile: Compile) -> Results:
    """Those whose states are numbers too, of a parameter without dims: what stands in the state, and steps."""
    kinds = (torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.RAdam, torch.optim.Adadelta, torch.optim.RMSprop)
    model = compile(seeded(Scaled), example_inputs=batch())
    losses, figures = [], {}
    for kind in kinds:
        optimizer = kind(model.parameters(), lr=1e-2)
        losses += train(model, optimizer)
        kept = optimizer.state[model.scale]
        figures[kind.__name__] = {name: float(t.abs().sum()) for name, t in kept.items() if isinstance(t, Tensor)}
    return {"losses": losses, "figures": figures, "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def consolidated_in_buffers(compile: Compile) -> Results:
    """Elastic weight consolidation as published: after a task the model is given buffers, of weights and of their importance, which no
    forward reads and the loss outside does."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []

    def loss_of(task: int, at: int) -> Tensor:
        loss: Tensor = model(*batch(3 * task + at))
        for name, p in model.named_parameters() if task else ():
            mean, importance = (getattr(model, f"{name.replace('.', '__')}_{kind}") for kind in ("mean", "importance"))
            loss = loss + (importance * (p - mean).square()).sum()
        return loss

    for task in range(3):
        for at in range(2):
            optimizer.zero_grad()
            loss = loss_of(task, at)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        optimizer.zero_grad()
        model(*batch(3 * task + 2)).backward()
        for name, p in list(model.named_parameters()):
            model.register_buffer(f"{name.replace('.', '__')}_mean", p.detach().clone())
            model.register_buffer(f"{name.replace('.', '__')}_importance", 100 * p.grad.detach().square())
    return {"losses": losses, "state": state(model), "later": train(model, optimizer)}
