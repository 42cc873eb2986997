"""Programs that hand the module to other tools: compilers, exporters, wrappers for several devices, averages, pruning."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

from benchmarks._traps_kit import CLASSES, Compile, Net, Results, batch, batches, gradients, program, seeded, sgd, state, train, trained

KIND = "wrapped"


@program(KIND)
def step_compiled_by_torch(compile: Compile) -> Results:
    """A training step of the user's own under torch.compile: the call, a penalty, backward."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []

    @torch.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x * 2.0 - x, y) * 0.5
        loss.backward()
        return loss.detach() + 1.0

    for given in batches():
        optimizer.zero_grad()
        losses.append(step(*given).item())
        optimizer.step()
    return {"losses": losses, "state": state(model)}


@program(KIND)
def whole_step_compiled_by_torch(compile: Compile) -> Results:
    """The same with the optimizer's step and clipping inside."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @torch.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    losses = [step(*given).item() for given in batches(4)]
    return {"losses": losses, "state": state(model)}


@program(KIND)
def compiled_in_place_by_torch(compile: Compile) -> Results:
    """model.compile(), as nn.Module has it, before training and evaluation."""
    model = compile(seeded(Net), example_inputs=batch())
    model.compile(backend="eager")
    found = trained(model)
    with torch.no_grad():
        return {**found, "evaluated": model(*batch(9)).item()}


@program(KIND)
def compiled_by_torch_before_the_plan(compile: Compile) -> Results:
    """torch.compile around a module whose plan is made on the first call."""
    model = compile(seeded(Net))
    losses = train(torch.compile(model, backend="eager"), sgd(model))
    return {"losses": losses, "state": state(model)}


@program(KIND)
def compiled_by_torch_before(compile: Compile) -> Results:
    """What is compiled is the result of torch.compile."""
    model = compile(torch.compile(seeded(Net), backend="eager"), example_inputs=batch())
    return {"losses": train(model)}


@program(KIND)
def traced_by_torch(compile: Compile) -> Results:
    """torch.jit.trace."""
    model = compile(seeded(Net), example_inputs=batch())
    traced = torch.jit.trace(model, batch())
    return {"losses": [traced(*given).item() for given in batches()]}


@program(KIND)
def scripted_by_torch(compile: Compile) -> Results:
    """torch.jit.script of a model that can be scripted."""
    model = compile(seeded(Scriptable), example_inputs=batch())
    scripted = torch.jit.script(model)
    return {"losses": [scripted(*given).item() for given in batches()]}


class Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


@program(KIND)
def exported_by_torch(compile: Compile) -> Results:
    """torch.export of the module, and the exported program's loss."""
    model = compile(seeded(Net), example_inputs=batch())
    exported = torch.export.export(model, batch())
    return {"losses": [exported.module()(*given).item() for given in batches()]}


@program(KIND)
def in_data_parallel(compile: Compile) -> Results:
    """nn.DataParallel, which calls the module itself where there is no GPU."""
    model = compile(seeded(Net), example_inputs=batch())
    wrapped = nn.DataParallel(model)
    return {"losses": train(wrapped, sgd(model)), "state": state(model)}


@program(KIND)
def in_distributed_data_parallel(compile: Compile) -> Results:
    """DistributedDataParallel around what compile returned (around the model itself there is nothing to reduce)."""
    model: Any = compile(seeded(Net), example_inputs=batch())
    if hasattr(model, "full_state_dict"):
        model = nn.parallel.DistributedDataParallel(model)
    losses = train(model)
    return {"losses": losses, "state": state(getattr(model, "module", model))}


@program(KIND)
def in_distributed_data_parallel_with_others(compile: Compile) -> Results:
    """DistributedDataParallel around a module of which what compile returned is a part."""

    class Larger(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.inner(x * self.scale.detach(), y) + self.scale.square().mean()

    model: Any = compile(seeded(Net), example_inputs=batch())
    inner, larger = model, Larger(model)
    if hasattr(model, "full_state_dict"):
        larger = nn.parallel.DistributedDataParallel(larger)
    return {"losses": train(larger), "state": state(inner)}


@program(KIND)
def fully_sharded(compile: Compile) -> Results:
    """fully_shard (FSDP2) of what compile returned."""
    from torch.distributed.fsdp import fully_shard

    model: Any = compile(seeded(Net), example_inputs=batch())
    if hasattr(model, "full_state_dict"):
        model = fully_shard(model)
    return trained(model)


@program(KIND)
def fully_sharded_part(compile: Compile) -> Results:
    """fully_shard (FSDP2) of a block of it."""
    from torch.distributed.fsdp import fully_shard

    model: Any = compile(seeded(Net), example_inputs=batch())
    if hasattr(model, "full_state_dict"):
        fully_shard(model.blocks[0])
    return trained(model)


@program(KIND)
def fully_sharded_as_before(compile: Compile) -> Results:
    """FullyShardedDataParallel (FSDP1) of what compile returned."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model: Any = compile(seeded(Net), example_inputs=batch())
    if hasattr(model, "full_state_dict"):
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return {"losses": train(model)}


@program(KIND)
def halved(compile: Compile) -> Results:
    """model.half() after compile."""
    model = compile(seeded(Net), example_inputs=batch())
    model.half()
    return {"losses": [model(x.half(), y).item() for x, y in batches()]}


@program(KIND)
def part_halved(compile: Compile) -> Results:
    """The head alone is rounded to float32 and cast back after compile."""
    model = compile(seeded(Net), example_inputs=batch())
    model.head.float()
    model.head.double()
    return {"dtype": str(model.head.weight.dtype), **trained(model)}


@program(KIND)
def memory_shared(compile: Compile) -> Results:
    """model.share_memory(), as for several processes that train one model."""
    model = compile(seeded(Net), example_inputs=batch())
    model.share_memory()
    return trained(model)


@program(KIND)
def pruned_after_compile(compile: Compile) -> Results:
    """torch.nn.utils.prune by the smallest entries of a weight, between steps."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model, steps=1)
    prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)
    return {"losses": losses + train(model)}


@program(KIND)
def pruned_before_compile(compile: Compile) -> Results:
    """The mask is there when the model is compiled."""
    original = seeded(Net)
    prune.l1_unstructured(original.blocks[0].up, "weight", amount=0.5)
    return trained(compile(original, example_inputs=batch()))


def _pruned_in_turns(compile: Compile, **options: Any) -> Results:
    """Pruned, trained, pruned further by what the weights are then, and trained on."""
    original = seeded(Net)
    prune.l1_unstructured(original.blocks[0].up, "weight", amount=0.1)
    model = compile(original, example_inputs=batch(), **options)
    losses = train(model, sgd(model, 0.5), steps=3)
    prune.l1_unstructured(original.blocks[0].up, "weight", amount=0.4)
    return {"losses": losses + train(model, sgd(model, 0.5), steps=3), "mask": original.blocks[0].up.weight_mask.sum()}


@program("wrapped")
def pruned_in_turns(compile: Compile) -> Results:
    """What the call computes the pruned weight to is what the next turn prunes by."""
    return _pruned_in_turns(compile)


@program("wrapped", remedy_of="pruned_in_turns", plans=("dp2tp2",))
def pruned_in_turns_with_all_that_is_left(compile: Compile) -> Results:
    """Compiled with outputs='all', so that it stands there."""
    return _pruned_in_turns(compile, outputs="all")


@program(KIND)
def pruned_by_hand(compile: Compile) -> Results:
    """The remedy: masks of whole weights, multiplied in after every step."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    with torch.no_grad():
        weight = model.blocks[0].up.weight.detach().clone()
        mask = (weight.abs() > weight.abs().flatten().median()).to(weight.dtype)
        for given in batches():
            model.blocks[0].up.weight.mul_(mask)
            with torch.enable_grad():
                losses += train(model, optimizer, inputs=[given])
    return {"losses": losses, "state": state(model)}


@program(KIND)
def weight_norm_after_compile(compile: Compile) -> Results:
    """torch.nn.utils.parametrizations.weight_norm on a layer after compile."""
    model = compile(seeded(Net), example_inputs=batch())
    nn.utils.parametrizations.weight_norm(model.head)
    return {"losses": train(model)}


@program(KIND)
def parametrised_and_removed(compile: Compile) -> Results:
    """A parametrisation is put on after compile and taken off again before the next step."""

    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2.0 * w

    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model, steps=1)
    parametrize.register_parametrization(model.head, "weight", Doubled())
    parametrize.remove_parametrizations(model.head, "weight")
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND)
def forward_hook_on_the_whole(compile: Compile) -> Results:
    """register_forward_hook on what compile returned: it scales the loss, and counts calls."""
    model = compile(seeded(Net), example_inputs=batch())
    calls = []

    def hook(module: Any, args: Any, loss: Tensor) -> Tensor:
        calls.append(len(args))
        return 2.0 * loss

    handle = model.register_forward_hook(hook)
    losses = train(model)
    handle.remove()
    return {"losses": losses + train(model), "calls": calls, "state": state(model)}


@program(KIND)
def backward_hook_on_the_whole(compile: Compile) -> Results:
    """register_full_backward_hook on what compile returned: the gradient of the loss is seen."""
    model = compile(seeded(Net), example_inputs=batch())
    seen: list[float] = []
    handle = model.register_full_backward_hook(lambda module, ins, outs: seen.append(outs[0].item()))
    losses = []
    for given in batches():
        loss = 0.5 * model(*given)
        loss.backward()
        losses.append(loss.item())
    handle.remove()
    return {"losses": losses, "seen": seen, "gradients": gradients(model)}


@program(KIND)
def part_added_after_compile(compile: Compile) -> Results:
    """add_module after compile, of a part that the forward does not call."""
    model = compile(seeded(Net), example_inputs=batch())
    model.add_module("probe", nn.Linear(16, 2))
    return {"losses": train(model)}


@program(KIND)
def first_of_a_sequence(compile: Compile) -> Results:
    """nn.Sequential(what compile returned, an ordinary module with a parameter)."""

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.5))

        def forward(self, loss: Tensor) -> Tensor:
            return loss * self.weight + self.weight.square()

    class Own(Net):
        def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
            x, y = given
            return super().forward(x, y)

    both = nn.Sequential(compile(seeded(Own), example_inputs=(batch(),)), Weighed())
    losses = train(both, inputs=[(given,) for given in batches()])
    return {"losses": losses, "weight": both[1].weight.item(), "state": state(both[0])}


@program(KIND)
def copied_shallowly(compile: Compile) -> Results:
    """copy.copy of what compile returned, and a call of the copy."""
    import copy

    model = compile(seeded(Net), example_inputs=batch())
    other = copy.copy(model)
    return {"losses": [other(*given).item() for given in batches()]}


@program(KIND)
def gradients_kept_as_zeros(compile: Compile) -> Results:
    """model.zero_grad(set_to_none=False) each step, and gradients written to by the user."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        model.zero_grad(set_to_none=False)
        loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.zero_grad(set_to_none=False)
    zero = [float(p.grad.abs().sum()) for p in model.parameters()]
    return {"losses": losses, "zero": zero, "state": state(model)}


@program(KIND)
def vector_into_parameters(compile: Compile) -> Results:
    """vector_to_parameters of a vector made on its own, as evolution strategies do."""
    model = compile(seeded(Net), example_inputs=batch())
    size = sum(p.numel() for p in model.parameters())
    start = torch.linspace(-0.5, 0.5, size)
    vector_to_parameters(start, model.parameters())
    found = trained(model)
    return {**found, "vector": parameters_to_vector(model.parameters()).detach().clone()}


@program(KIND)
def frozen_but_the_head(compile: Compile) -> Results:
    """model.requires_grad_(False), then the head alone is trained, with an optimizer of what trains."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model, steps=1)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND, plans=("dp2mb2",))
def checkpoint_around_the_whole(compile: Compile) -> Results:
    """torch.utils.checkpoint around what compile returned, in both of its kinds."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), y, use_reentrant=k % 2 == 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class _Logits(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


@program(KIND, plans=("dp2mb2",))
def checkpoint_around_the_logits(compile: Compile) -> Results:
    """The same where the loss is made outside, with inputs that need no gradient."""
    model = compile(seeded(_Logits), example_inputs=batch()[:1])
    optimizer, losses = sgd(model), []
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def checkpoint_around_first_calls(compile: Compile) -> Results:
    """The same where the model is captured within, for batches of two sizes."""
    model = compile(seeded(_Logits))
    optimizer, losses = sgd(model), []
    for k, (x, y) in enumerate(batches(4)):
        x, y = (x, y) if k % 2 else (x[:4], y[:4])
        optimizer.zero_grad()
        loss = F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}
