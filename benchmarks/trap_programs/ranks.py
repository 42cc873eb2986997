"""Collectives of the user's own with parameters and gradients, and what rank 0 alone does with them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._traps_kit import (
    Compile,
    Logits,
    Net,
    Normed,
    Results,
    batch,
    batches,
    program,
    seeded,
    sgd,
    state,
    stepped,
    train,
    trained,
)

KIND = "ranks"


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@program(KIND)
def gradients_averaged_by_hand(compile: Compile) -> Results:
    """As data parallelism is written by hand: an all-reduce of each gradient, which is divided by the number of ranks."""
    model = compile(seeded(Net), example_inputs=batch())

    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= _world()

    return trained(model, torch.optim.AdamW(model.parameters(), 1e-2), before_step=average)


@program(KIND)
def gradients_averaged_in_other_ways(compile: Compile) -> Results:
    """Asynchronously through .data, through a view, and as one flat vector."""
    model = compile(seeded(Net), example_inputs=batch())

    def average() -> None:
        for work in [dist.all_reduce(p.grad.data, async_op=True) for p in model.parameters()]:
            work.wait()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.view(-1))
        flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
        dist.all_reduce(flat)
        parts = flat.div_(_world() ** 3).split([p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))

    return trained(model, before_step=average)


@program(KIND)
def weights_sent_from_rank_0(compile: Compile) -> Results:
    """Weights and buffers are broadcast before training, and those of all ranks gathered afterwards."""
    model = compile(seeded(Normed), example_inputs=batch())
    for tensor in [*(p.data for p in model.parameters()), *model.buffers()]:
        dist.broadcast(tensor, 0)
    results, sums = trained(model), []
    for parameter in model.parameters():
        found = [torch.empty_like(parameter) for _ in range(_world())]
        dist.all_gather(found, parameter.detach())
        sums.append(found[-1].sum().item())
    return {**results, "sums": sums, "again": state(model)}


def _is(rank: int) -> bool:
    return not dist.is_initialized() or dist.get_rank() == rank


@program(KIND)
def norm_on_rank_0_alone(compile: Compile) -> Results:
    """As one logs it: rank 0 asks for the norm of a gradient in each step, the others do not."""
    model, logged = compile(seeded(Net), example_inputs=batch()), []

    def log() -> None:
        if _is(0):
            logged.append(model.head.weight.grad.norm().item())

    return trained(model, before_step=log)


@program(KIND)
def norm_on_rank_0_alone_and_then_on_all(compile: Compile) -> Results:
    """The norm of one weight is asked for once more by rank 0, before all ask for those of all weights: none may get another's."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    if _is(0):
        model.first.weight.norm()
    return {"losses": losses, "norms": [p.norm().item() for p in model.parameters()]}


@program(KIND)
def step_left_out_by_rank_1(compile: Compile) -> Results:
    """As a loop does that looks at numbers of its own rank."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for index, given in enumerate(batches()):
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        if index != 1 or _is(0):
            optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def learning_rate_of_rank_0_alone(compile: Compile) -> Results:
    """A scheduler that rank 0 alone steps, by what it evaluates."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def after() -> None:
        if _is(0):
            scheduler.step(1.0)

    return trained(model, optimizer, before_step=after)


@program(KIND)
def shuffled_otherwise_after_a_sample(compile: Compile) -> Results:
    """Rank 0 alone draws a number after each epoch, as who shows a sample does, of the generator that shuffles the next one."""
    model = compile(seeded(Net), example_inputs=batch())
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(6), strict=True)))
    torch.manual_seed(0)
    loader, losses = DataLoader(data, batch_size=len(batch()[0]), shuffle=True), []
    for _ in range(3):
        losses += train(model, inputs=loader)
        if _is(0):
            torch.randint(10, ())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def targets_drawn_by_each_rank(compile: Compile) -> Results:
    """The model gives logits; the loss outside smooths the labels by a number that each rank draws for itself."""
    model = compile(seeded(Logits), example_inputs=batch()[:1])
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, label_smoothing=0.2 * float(torch.rand((), generator=generator)))

    return {"losses": stepped(model, loss_of), "state": state(model)}


@program(KIND)
def weights_shaken_by_each_rank(compile: Compile) -> Results:
    """By numbers that each rank draws from a seed of its own."""
    model = compile(seeded(Net), example_inputs=batch())
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))
            parameter.mul_(1 + torch.rand(()) / 10)
    return trained(model)


@program(KIND)
def loss_scaled_by_each_rank(compile: Compile) -> Results:
    """Each rank multiplies the loss by a number of its own before backward."""
    model = compile(seeded(Net), example_inputs=batch())
    return {"losses": stepped(model, lambda *given: model(*given) * (1.0 if _is(0) else 0.5)), "state": state(model)}
