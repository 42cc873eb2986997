"""Programs that change parameters or gradients by hand: scaling, masks, projections, initialisation after compile."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks._traps_kit import Compile, Net, Results, batch, batches, gradients, program, seeded, sgd, state, train, trained

KIND = "parts"


@program(KIND)
def vector_written_back(compile: Compile) -> Results:
    """vector_to_parameters of a vector that is half as long."""
    model = compile(seeded(Net), example_inputs=batch())
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())
    return trained(model)


@program(KIND)
def centred_gradients(compile: Compile) -> Results:
    """The mean over the inputs of each unit is taken off its gradient."""
    model = compile(seeded(Net), example_inputs=batch())

    def centre() -> None:
        for p in model.parameters():
            if p.grad.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

    return trained(model, before_step=centre)


@program(KIND)
def masked_gradients(compile: Compile) -> Results:
    """A mask of the whole weight's shape on its gradient, and a row of it set to zero."""
    model = compile(seeded(Net), example_inputs=batch())
    mask = (torch.arange(32 * 16).view(32, 16) % 3 != 0).to(torch.get_default_dtype())

    def apply() -> None:
        model.blocks[0].up.weight.grad.mul_(mask)
        model.head.weight.grad[0] = 0.0

    return trained(model, before_step=apply)


@program(KIND)
def gradients_by_autograd(compile: Compile) -> Results:
    """torch.autograd.grad of the loss by the parameters, and a step by hand."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = []
    for given in batches():
        loss = model(*given)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.sub_(0.1 * g)
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def accumulated_by_the_user(compile: Compile) -> Results:
    """Two batches, half of each loss, one step."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for step in range(2):
        optimizer.zero_grad()
        for i in range(2):
            loss = model(*batch(2 * step + i)) / 2
            loss.backward()
            losses.append(loss.item())
        found = gradients(model)
        optimizer.step()
    return {"losses": losses, "gradients": found, "state": state(model)}


@program(KIND, plans=("dp2mb2",))
def loss_scaled(compile: Compile) -> Results:
    """As a GradScaler does it: the loss is scaled, gradients are divided and checked, then the step."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses, scale = sgd(model), [], 1024.0
    for given in batches():
        optimizer.zero_grad()
        loss = model(*given)
        (loss * scale).backward()
        infinite = False
        for p in model.parameters():
            p.grad.div_(scale)
            infinite = infinite or not bool(torch.isfinite(p.grad).all())
        if not infinite:
            optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def grad_scaler(compile: Compile) -> Results:
    """torch.amp.GradScaler on the CPU, with an infinite gradient in the second step."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step, given in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = model(*given)
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return {"losses": losses, "scale": scaler.get_scale(), "state": state(model)}


@program(KIND)
def decayed_by_hand(compile: Compile) -> Results:
    """p.data.mul_ after every step."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        losses += train(model, optimizer, inputs=[given])
        for p in model.parameters():
            p.data.mul_(0.99)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def clamped_weights(compile: Compile) -> Results:
    """p.data.clamp_ after every step, as in a Wasserstein critic."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        losses += train(model, optimizer, inputs=[given])
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def rows_of_bounded_norm(compile: Compile) -> Results:
    """Every row of a weight is projected to a norm of at most a half."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        losses += train(model, optimizer, inputs=[given])
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 2:
                    p.copy_(torch.renorm(p, 2, 0, 0.5))
    return {"losses": losses, "state": state(model)}


@program(KIND)
def orthogonal_after_compile(compile: Compile) -> Results:
    """Weights are made orthogonal after compile, without random numbers: by their polar factor."""
    model = compile(seeded(Net), example_inputs=batch())
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                u, _, v = torch.linalg.svd(p, full_matrices=False)
                p.copy_(u @ v)
    return trained(model)


@program(KIND)
def drawn_after_compile(compile: Compile) -> Results:
    """nn.init.orthogonal_ of a weight after compile, with the same seed on every process."""
    model = compile(seeded(Net), example_inputs=batch())
    torch.manual_seed(5)
    nn.init.orthogonal_(model.blocks[0].up.weight)
    nn.init.normal_(model.head.weight, std=0.1)
    return trained(model)


@program(KIND, remedy_of="drawn_after_compile")
def drawn_on_whole_parameters(compile: Compile) -> Results:
    """The same inside of full_parameters(), where there is that."""
    model = compile(seeded(Net), example_inputs=batch())

    def draw() -> None:
        torch.manual_seed(5)
        nn.init.orthogonal_(model.blocks[0].up.weight)
        nn.init.normal_(model.head.weight, std=0.1)

    if hasattr(model, "full_parameters"):
        with model.full_parameters():
            draw()
    else:
        draw()
    return trained(model)


@program(KIND)
def one_weight_read(compile: Compile) -> Results:
    """A weight is copied, one row of it is read, and its mean and largest entry."""
    model = compile(seeded(Net), example_inputs=batch())
    train(model)
    weight = model.blocks[1].down.weight.detach().clone()
    return {"weight": weight, "row": weight[3], "mean": weight.mean().item(), "largest": weight.max().item(), "shape": list(weight.shape)}
