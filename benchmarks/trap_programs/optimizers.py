"""Programs with optimizers of every kind: torch's, and those that people write by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.optim.swa_utils import AveragedModel

from benchmarks._traps_kit import Compile, Net, Normed, Results, batch, batches, program, seeded, sgd, state, train, trained

KIND = "optimizers"


def _with(compile: Compile, make: Callable[[Any], torch.optim.Optimizer]) -> Results:
    model = compile(seeded(Net), example_inputs=batch())
    return trained(model, make(model.parameters()))


@program(KIND, plans=("dp2tp2", "dp2mb2"))
def adamw(compile: Compile) -> Results:
    return _with(compile, lambda p: torch.optim.AdamW(p, lr=1e-2))


_OPERATORS = library.Library("traps_optimizers", "FRAGMENT")
_OPERATORS.define("stepped(Tensor(a!) p, Tensor g, Tensor(b!) momentum, float lr) -> ()")


def _stepped(p: Tensor, g: Tensor, momentum: Tensor, lr: float) -> None:
    kept, weight = momentum.numpy(), p.numpy()
    kept[:] = 0.9 * kept + (g / g.norm()).numpy()
    weight -= lr * kept


_OPERATORS.impl("stepped", _stepped, "CPU")


class _OfAnOperator(torch.optim.Optimizer):
    """Its step is an operator with a kernel, as those of optimizers with states of 8 bits: autograd does not count what it writes."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                torch.ops.traps_optimizers.stepped(p, p.grad, momentum, lr=group["lr"])


@program(KIND, plans=("dp2tp2", "dp2mb2"))
def optimizer_of_an_operator_that_writes(compile: Compile) -> Results:
    return _with(compile, lambda p: _OfAnOperator(p, lr=0.1))


@torch.compile(fullgraph=True, backend="eager")
def _compiled_step(p: Tensor, g: Tensor, lr: Tensor) -> None:
    p.copy_(p.float() - lr * g.float() / g.norm())


class _Compiled(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": torch.tensor(lr)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                _compiled_step(p.detach(), p.grad, group["lr"])


@program(KIND)
def optimizer_whose_step_is_compiled_as_one_graph(compile: Compile) -> Results:
    """What else is compiled is so after its steps."""
    model = compile(seeded(Net), example_inputs=batch())
    double = torch.compile(lambda x: 2 * x, fullgraph=True, backend=_counted)
    found = trained(model, _Compiled(model.parameters(), lr=0.05), before_step=lambda: double(torch.ones(2)))
    return {**found, "compiled": _COMPILED.count("double") > 0}


_COMPILED: list[str] = []


def _counted(graph: Any, _: Any) -> Any:
    _COMPILED.append("double")
    return graph.forward


@program(KIND)
def adamw_foreach(compile: Compile) -> Results:
    return _with(compile, lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True))


@program(KIND)
def sgd_with_nesterov(compile: Compile) -> Results:
    return _with(compile, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2))


@program(KIND)
def adafactor(compile: Compile) -> Results:
    """It keeps means of rows and columns, and scales by the root mean square of each weight."""
    return _with(compile, lambda p: torch.optim.Adafactor(p, lr=1e-2))


@program(KIND)
def rprop(compile: Compile) -> Results:
    return _with(compile, lambda p: torch.optim.Rprop(p, lr=1e-2))


@program(KIND)
def lbfgs(compile: Compile) -> Results:
    """With a closure, over whole vectors."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), []
    for given in batches(2):

        def closure(given: tuple[Tensor, ...] = given) -> Tensor:
            optimizer.zero_grad()
            loss = model(*given)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return {"losses": losses, "state": state(model)}


class _ByHand(torch.optim.Optimizer):
    """A step for each parameter by its gradient and its state."""

    def __init__(self, params: Iterable[Tensor], lr: float, **options: float) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, grad: Tensor, kept: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_ByHand):
    def update(self, p: Tensor, grad: Tensor, kept: dict[str, Any], group: dict[str, Any]) -> None:
        mean = kept.setdefault("mean", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * 0.1)
        p.add_(torch.sign(0.9 * mean + 0.1 * grad), alpha=-group["lr"])
        mean.mul_(0.99).add_(grad, alpha=0.01)


@program(KIND)
def lion(compile: Compile) -> Results:
    """By the sign of each entry."""
    return _with(compile, lambda p: Lion(p, lr=1e-3))


class Lamb(_ByHand):
    def update(self, p: Tensor, grad: Tensor, kept: dict[str, Any], group: dict[str, Any]) -> None:
        mean, square = kept.setdefault("mean", torch.zeros_like(p)), kept.setdefault("square", torch.zeros_like(p))
        mean.mul_(0.9).add_(grad, alpha=0.1)
        square.mul_(0.99).addcmul_(grad, grad, value=0.01)
        move = mean / (square.sqrt() + 1e-6) + 0.01 * p
        weight_norm, move_norm = p.norm(), move.norm()
        trust = float(weight_norm / move_norm) if weight_norm > 0 and move_norm > 0 else 1.0
        p.add_(move, alpha=-group["lr"] * trust)


@program(KIND, plans=("dp2tp2",))
def lamb(compile: Compile) -> Results:
    """A trust ratio of norms for each weight."""
    return _with(compile, lambda p: Lamb(p, lr=1e-2))


class Lars(_ByHand):
    def update(self, p: Tensor, grad: Tensor, kept: dict[str, Any], group: dict[str, Any]) -> None:
        ratio = torch.where(p.norm() > 0, 0.1 * p.norm() / (grad.norm() + 1e-8), 1.0)
        p.sub_(group["lr"] * ratio * grad)


@program(KIND)
def lars(compile: Compile) -> Results:
    return _with(compile, lambda p: Lars(p, lr=0.1))


class Muon(_ByHand):
    def update(self, p: Tensor, grad: Tensor, kept: dict[str, Any], group: dict[str, Any]) -> None:
        mean = kept.setdefault("mean", torch.zeros_like(p))
        mean.mul_(0.9).add_(grad)
        if p.dim() < 2:
            p.sub_(group["lr"] * mean)
            return
        x = mean / (mean.norm() + 1e-7)
        if x.size(0) > x.size(1):
            x = x.T
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        p.sub_(group["lr"] * (x.T if p.size(0) > p.size(1) else x))


@program(KIND, plans=("dp2tp2",))
def muon_by_hand(compile: Compile) -> Results:
    """Momentum made orthogonal by five steps of Newton and Schulz."""
    return _with(compile, lambda p: Muon(p, lr=1e-2))


@program(KIND)
def muon_of_torch(compile: Compile) -> Results:
    """torch.optim.Muon for the matrices, AdamW for the rest."""
    model = compile(seeded(Net), example_inputs=batch())
    matrices = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    others = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2)
    return trained(model, others, steps=1, before_step=matrices.step)  # one step: it iterates in bfloat16, whose rounding would grow


class Shampoo(_ByHand):
    def update(self, p: Tensor, grad: Tensor, kept: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() != 2:
            p.sub_(group["lr"] * grad)
            return
        rows = kept.setdefault("rows", 1e-1 * torch.eye(p.shape[0]))
        columns = kept.setdefault("columns", 1e-1 * torch.eye(p.shape[1]))
        rows.add_(grad @ grad.T)
        columns.add_(grad.T @ grad)
        p.sub_(group["lr"] * _root(rows) @ grad @ _root(columns))


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


@program(KIND)
def shampoo(compile: Compile) -> Results:
    """Preconditioned on both sides by sums of the gradient's products."""
    return _with(compile, lambda p: Shampoo(p, lr=1e-2))


class AdaBound(_ByHand):
    def update(self, p: Tensor, grad: Tensor, kept: dict[str, Any], group: dict[str, Any]) -> None:
        square = kept["square"] = 0.9 * kept.get("square", 0.0) + 0.1 * grad.square().mean()
        p.sub_(group["lr"] * grad / (square.sqrt() + 1e-3))


@program(KIND)
def one_rate_for_each_weight(compile: Compile) -> Results:
    """Scaled by the mean square of the whole gradient of a weight (as Novograd is)."""
    return _with(compile, lambda p: AdaBound(p, lr=1e-2))


@program(KIND)
def step_by_hand(compile: Compile) -> Results:
    """No optimizer: p -= rate * p.grad, p.grad = None."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = []
    for given in batches():
        loss = model(*given)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def average_by_hand(compile: Compile) -> Results:
    """An exponential average of each parameter in a dict; put into the model for evaluation, then taken out again."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    for given in batches():
        losses += train(model, optimizer, inputs=[given])
        for n, p in model.named_parameters():
            average[n].lerp_(p.detach(), 0.2)
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(average[n])
        evaluated = model(*batch(9)).item()
        for n, p in model.named_parameters():
            p.copy_(kept[n])
    return {"losses": losses, "evaluated": evaluated, "state": state(model)}


@program(KIND)
def average_in_a_copy(compile: Compile) -> Results:
    """A copy of the original made before compile is the average; the compiled module's parameters go into it by zip."""
    original = seeded(Net)
    average = copy.deepcopy(original)
    model = compile(original, example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        losses += train(model, optimizer, inputs=[given])
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.2)
    with torch.no_grad():
        return {"losses": losses, "evaluated": average(*batch(9)).item()}


@program(KIND)
def averaged_model(compile: Compile) -> Results:
    """torch.optim.swa_utils.AveragedModel of the compiled module."""
    model = compile(seeded(Net), example_inputs=batch())
    average = AveragedModel(model)
    optimizer, losses = sgd(model), []
    for given in batches():
        losses += train(model, optimizer, inputs=[given])
        average.update_parameters(model)
    with torch.no_grad():
        return {"losses": losses, "evaluated": average(*batch(9)).item()}


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def momentum_copy_with_buffers(compile: Compile) -> Results:
    """A deep copy of the compiled module after some steps, frozen, follows the parameters and statistics by lerp_; both are evaluated."""
    model = compile(seeded(Normed), example_inputs=batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train(model, optimizer)
    slow = copy.deepcopy(model).requires_grad_(False)
    for given in batches():
        losses += train(model, optimizer, inputs=[given])
        with torch.no_grad():
            for old, new in zip(slow.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.3)
            for old, new in zip(slow.buffers(), model.buffers(), strict=True):
                old.copy_(new)
            losses.append(slow(*batch(5)).item())
    model.eval(), slow.eval()
    with torch.no_grad():
        return {"losses": losses, "evaluated": [m(*batch(9)).item() for m in (model, slow)], "state": state(slow)}


@program(KIND)
def copied_before_the_first_call(compile: Compile) -> Results:
    """A deep copy of what is planned on its first call; both are trained, from the same weights, at two rates."""
    model = compile(seeded(Net))
    other = copy.deepcopy(model)
    losses = [train(model, sgd(model)), train(other, sgd(other, lr=0.01))]
    return {"losses": losses, "states": [state(model), state(other)]}


@program(KIND)
def copy_of_a_wrapper(compile: Compile) -> Results:
    """The compiled module in a module of the user's, of which a deep copy is trained on."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = self.inner(x, y)
            return loss

    outer = Outer(compile(seeded(Net), example_inputs=batch()))
    losses = train(outer, sgd(outer.inner))
    other = copy.deepcopy(outer)
    losses += train(other, sgd(other.inner))
    return {"losses": losses, "states": [state(outer.inner), state(other.inner)]}


@program(KIND)
def averaged_model_of_a_copy(compile: Compile) -> Results:
    """AveragedModel of a plain model, updated from the whole state."""
    model = compile(seeded(Net), example_inputs=batch())
    plain = seeded(Net)
    average = AveragedModel(plain)
    optimizer, losses = sgd(model), []
    for given in batches():
        losses += train(model, optimizer, inputs=[given])
        plain.load_state_dict(state(model))
        average.update_parameters(plain)
    with torch.no_grad():
        return {"losses": losses, "evaluated": average(*batch(9)).item()}


@program(KIND)
def lookahead(compile: Compile) -> Results:
    """Every second step the slow weights take half of the way."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    slow = [p.detach().clone() for p in model.parameters()]
    for step, given in enumerate(batches(4)):
        losses += train(model, optimizer, inputs=[given])
        if step % 2:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    s.lerp_(p, 0.5)
                    p.copy_(s)
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def hooked_steps(compile: Compile) -> Results:
    """The optimizer steps inside of backward, by a hook on each parameter."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    losses = []
    for given in batches():
        loss = model(*given)
        loss.backward()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def scheduled_by_the_gradient(compile: Compile) -> Results:
    """The learning rate falls with the largest entry of any gradient."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = sgd(model)

    def schedule() -> None:
        largest = max(float(p.grad.abs().max()) for p in model.parameters())
        optimizer.param_groups[0]["lr"] = 0.1 / (1.0 + largest)

    return trained(model, optimizer, before_step=schedule)
