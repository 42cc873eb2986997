"""Programs that look at whole parameters or gradients: norms, clipping, penalties, checks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector

from benchmarks._traps_kit import Compile, Net, Results, batch, batches, program, seeded, sgd, state, train, trained

KIND = "parts"


@program(KIND, plans=("dp2tp2", "dp2mb2"))
def clipped_norm(compile: Compile) -> Results:
    """torch.nn.utils.clip_grad_norm_, and the norm that it returns."""
    model = compile(seeded(Net), example_inputs=batch())
    norms: list[float] = []
    found = trained(model, before_step=lambda: norms.append(float(clip_grad_norm_(model.parameters(), 0.1))))
    return {**found, "norms": norms}


@program(KIND, remedy_of="clipped_norm", plans=("dp2tp2", "dp2mb2"))
def clipped_norm_by_the_module(compile: Compile) -> Results:
    """model.clip_grad_norm_ where there is one."""
    model = compile(seeded(Net), example_inputs=batch())
    norms: list[float] = []

    def clip() -> None:
        own = getattr(model, "clip_grad_norm_", None)
        norms.append(float(own(0.1) if own is not None else clip_grad_norm_(model.parameters(), 0.1)))

    return {**trained(model, before_step=clip), "norms": norms}


@program(KIND)
def clipped_largest(compile: Compile) -> Results:
    """The largest entry as the norm."""
    model = compile(seeded(Net), example_inputs=batch())
    norms: list[float] = []
    found = trained(model, before_step=lambda: norms.append(float(clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")))))
    return {**found, "norms": norms}


@program(KIND)
def clipped_values(compile: Compile) -> Results:
    """Each entry is clipped by itself."""
    model = compile(seeded(Net), example_inputs=batch())
    return trained(model, before_step=lambda: clip_grad_value_(model.parameters(), 0.01))


@program(KIND, plans=("dp2tp2",))
def total_norm(compile: Compile) -> Results:
    """torch.nn.utils.get_total_norm of the gradients, logged."""
    model = compile(seeded(Net), example_inputs=batch())
    norms: list[float] = []

    def log() -> None:
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))

    return {**trained(model, before_step=log), "norms": norms}


@program(KIND, plans=("dp2tp2",))
def norm_by_hand(compile: Compile) -> Results:
    """The root of the sum of squared norms, then a factor on every gradient."""
    model = compile(seeded(Net), example_inputs=batch())
    norms: list[float] = []

    def clip() -> None:
        norm = torch.sqrt(sum(p.grad.norm() ** 2 for p in model.parameters()))
        norms.append(float(norm))
        for p in model.parameters():
            p.grad.mul_(min(1.0, 0.1 / float(norm)))

    return {**trained(model, before_step=clip), "norms": norms}


@program(KIND)
def norm_of_one_weight(compile: Compile) -> Results:
    """Norms of a single weight and its gradient, logged."""
    model = compile(seeded(Net), example_inputs=batch())
    norms: list[float] = []
    found = trained(model, before_step=lambda: norms.extend([model.head.weight.norm().item(), model.head.weight.grad.norm().item()]))
    return {**found, "norms": norms}


@program(KIND)
def table_of_norms(compile: Compile) -> Results:
    """A table of the norm of every parameter, as one logs it."""
    model = compile(seeded(Net), example_inputs=batch())
    train(model)
    return {name: p.detach().norm().item() for name, p in model.named_parameters()}


@program(KIND, remedy_of="table_of_norms")
def table_of_norms_of_whole_parameters(compile: Compile) -> Results:
    """The same over full_parameters(), where there is that."""
    model = compile(seeded(Net), example_inputs=batch())
    train(model)
    if not hasattr(model, "full_parameters"):
        return {name: p.detach().norm().item() for name, p in model.named_parameters()}
    with model.full_parameters():
        return {name: p.detach().norm().item() for name, p in model.named_parameters()}


@program(KIND)
def foreach_norm(compile: Compile) -> Results:
    """torch._foreach_norm over all gradients, as fast training loops do."""
    model = compile(seeded(Net), example_inputs=batch())
    norms: list[float] = []

    def log() -> None:
        norms.append(float(torch.stack(torch._foreach_norm([p.grad for p in model.parameters()])).norm()))

    return {**trained(model, before_step=log), "norms": norms}


@program(KIND)
def number_of_parameters(compile: Compile) -> Results:
    """sum(p.numel()), as it is printed at the start."""
    model = compile(seeded(Net), example_inputs=batch())
    train(model, steps=1)
    return {"parameters": sum(p.numel() for p in model.parameters()), "tensors": len(list(model.parameters()))}


@program(KIND)
def vector_of_parameters(compile: Compile) -> Results:
    """parameters_to_vector: its norm, and the distance from the start."""
    model = compile(seeded(Net), example_inputs=batch())
    before = parameters_to_vector(model.parameters()).detach().clone()
    train(model)
    after = parameters_to_vector(model.parameters()).detach()
    return {"size": after.numel(), "norm": after.norm().item(), "moved": (after - before).norm().item()}


@program(KIND, remedy_of="vector_of_parameters")
def vector_of_whole_parameters(compile: Compile) -> Results:
    """The same of the whole state_dict."""
    model = compile(seeded(Net), example_inputs=batch())

    def vector() -> Tensor:
        return torch.cat([t.flatten() for t in state(model).values()])

    before = vector()
    train(model)
    after = vector()
    return {"size": after.numel(), "norm": after.norm().item(), "moved": (after - before).norm().item()}


@program(KIND, plans=("dp2tp2", "dp2mb2"))
def penalty_on_all_parameters(compile: Compile) -> Results:
    """An L2 penalty over model.parameters() added to the loss before backward."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        loss = model(*given)
        loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def penalty_by_norms(compile: Compile) -> Results:
    """The same by norms of the weights, and with absolute values of the head's."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        loss = model(*given) + 1e-2 * sum(p.norm(2) for n, p in model.named_parameters() if "weight" in n)
        loss = loss + 1e-3 * model.head.weight.abs().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, remedy_of="penalty_on_all_parameters", plans=("dp2tp2", "dp2mb2"))
def penalty_inside_of_forward(compile: Compile) -> Results:
    """The penalty is part of the model's loss."""

    class Penalised(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())

    return trained(compile(seeded(Penalised), example_inputs=batch()))


@program(KIND, plans=("dp2tp2",))
def sharpness_aware(compile: Compile) -> Results:
    """SAM: a step up by the normalised gradient, a second backward, back, a step down."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        losses.append(loss.item())
        norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        model(*given).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
    return {"losses": losses, "state": state(model)}


@program(KIND)
def check_for_what_is_not_finite(compile: Compile) -> Results:
    """A step is skipped where the gradients' norm is above a bound or no number; every rank must decide alike."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses, skipped = sgd(model), [], []
    sums: list[float] = []
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        norms = torch.stack([p.grad.norm() for p in model.parameters()])
        skip = not bool(torch.isfinite(norms).all()) or float(norms.max()) > 0.2
        skipped.append(skip)
        sums.append(norms.sum().item())
        if not skip:
            optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "skipped": skipped, "sums": sums, "state": state(model)}


@program(KIND)
def ratio_of_update_to_weight(compile: Compile) -> Results:
    """Adaptive clipping: each gradient is limited by a share of its weight's norm."""
    model = compile(seeded(Net), example_inputs=batch())

    def clip() -> None:
        for p in model.parameters():
            limit = 0.01 * p.detach().norm().clamp(min=1e-3)
            p.grad.mul_((limit / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))

    return trained(model, before_step=clip)


@program(KIND)
def curvature_of_a_penalty(compile: Compile) -> Results:
    """Products of Hessians of a penalty on weights with vectors, by both ways of torch: to whole vectors, and by a gradient's gradient."""
    model = compile(seeded(Net), example_inputs=batch())
    found = []
    for p in model.parameters():
        ones = torch.ones(p.shape, dtype=p.dtype)
        found.append(torch.autograd.functional.hvp(lambda w: w.pow(3).sum(), p.detach(), ones)[1].sum().item())
        (gradient,) = torch.autograd.grad(p.pow(3).sum(), p, create_graph=True)
        found.append(torch.autograd.grad(gradient, p, ones)[0].sum().item())
    return {"found": found, **trained(model)}
