"""Programs in which a parameter's memory has several names, or is given another: views, backups, flat buffers, arrays, gradients kept."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._traps_kit import Compile, Net, Results, batch, batches, program, seeded, sgd, state, train

KIND = "memory"
MORE = ("zero2", "hybrid3", "dp2tp2")


def _net(compile: Compile, **options: Any) -> Any:
    return compile(seeded(Net), example_inputs=batch(), **options)


@program(KIND, plans=MORE)
def rows_written_through_detach(compile: Compile) -> Results:
    """`p[0].detach().mul_()`, `p.data.select(...)` and `p.detach()[...] = ` write to the parameter."""
    model = _net(compile)
    losses = train(model, steps=1)
    w = model.first.weight
    w[0].detach().mul_(0.5)
    w.data.select(0, 1).detach().zero_()
    w.detach()[2] = 0.25
    w.data[3].data.fill_(0.125)
    return {"losses": losses, "weight": w.detach().tolist(), "later": train(model), "state": state(model)}


@program(KIND, plans=MORE)
def weights_written_through_a_flat_view(compile: Compile) -> Results:
    """`p.data.contiguous().view(-1)` and `p.detach().reshape(-1)` share the memory of p."""
    model = _net(compile)
    losses = train(model, steps=1)
    flat = model.head.weight.data.contiguous().view(-1)
    flat[:3] = 0.5
    model.blocks[0].up.weight.detach().reshape(-1)[5:9] += 1.0
    model.blocks[1].up.weight.data.flatten()[::2].mul_(0.5)
    return {"losses": losses, "weight": model.head.weight.tolist(), "later": train(model), "state": state(model)}


@program(KIND, plans=MORE)
def halves_written(compile: Compile) -> Results:
    """torch.hsplit, vsplit, tensor_split and chunk of a weight's data, written in place."""
    model = _net(compile)
    losses = train(model, steps=1)
    w = model.first.weight
    torch.hsplit(w.data, 2)[1].mul_(0.5)
    torch.vsplit(w.data, 2)[0].add_(0.25)
    torch.chunk(model.head.weight.data, 2)[1].zero_()
    torch.tensor_split(model.head.weight.data, 3, dim=1)[0].fill_(0.5)
    torch.narrow(model.head.weight.data, 0, 0, 1).neg_()
    torch.movedim(w.data, 0, 1)[0].sign_()
    torch.diagonal(w.data).fill_(2.0)
    return {"losses": losses, "weight": w.tolist(), "later": train(model), "state": state(model)}


@program(KIND, plans=MORE)
def backup_by_detach(compile: Compile) -> Results:
    """`old = p.detach()`, then `p.data = average`, a loss, and `p.data = old` again."""
    model = _net(compile)
    averages = [p.detach().clone() for p in model.parameters()]
    losses = train(model)
    old = [p.detach() for p in model.parameters()]
    for p, average in zip(model.parameters(), averages, strict=True):
        p.data = average
    with torch.no_grad():
        losses.append(model(*batch(7)).item())
    for p, one in zip(model.parameters(), old, strict=True):
        p.data = one
    return {"losses": losses, "later": train(model), "state": state(model)}


@program(KIND, plans=MORE)
def backup_by_state_dict(compile: Compile) -> Results:
    """`dict(model.state_dict())` is the memory of the parameters, until `p.data` is assigned."""
    model = _net(compile)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model)
    old = dict(model.state_dict())
    for name, p in model.named_parameters():
        p.data = first[name]
    with torch.no_grad():
        losses.append(model(*batch(7)).item())
    for name, p in model.named_parameters():
        p.data = old[name]
    return {"losses": losses, "later": train(model), "state": state(model)}


@program(KIND, plans=MORE)
def backup_of_rows(compile: Compile) -> Results:
    """A row taken before `p.data = other` keeps its values."""
    model = _net(compile)
    losses = train(model)
    w = model.first.weight
    row, transposed = w.data[1], w.detach().t()
    w.data = torch.full_like(w, 0.25)
    losses.append(model(*batch(7)).item())
    w.data[1] = row
    return {"losses": losses, "row": row.tolist(), "transposed": transposed.tolist(), "later": train(model), "state": state(model)}


@program(KIND)
def backup_of_rows_that_were_written(compile: Compile) -> Results:
    """A row is taken, the weight is doubled, and given other data: the row is of the doubled weight."""
    model = _net(compile)
    losses = train(model)
    w = model.first.weight
    row = w.data[1]
    w.data.mul_(2)
    w.data = torch.full_like(w, 0.25)
    return {"losses": losses, "row": row.tolist(), "later": train(model), "state": state(model)}


@program(KIND)
def rows_written_after_other_data(compile: Compile) -> Results:
    """A row of what a weight had before is halved, and read: the weight has other memory."""
    model = _net(compile)
    losses = train(model)
    w = model.first.weight
    row = w.data[1]
    w.data = torch.full_like(w, 0.25)
    row.mul_(0.5)
    return {"losses": losses, "row": row.tolist(), "later": train(model), "state": state(model)}


@program(KIND)
def gradients_in_a_flat_buffer(compile: Compile) -> Results:
    """Each p.grad is a view of one vector, which is zeroed, added to and scaled as a whole."""
    model = _net(compile)
    params = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    offset = 0
    for p in params:
        p.grad = flat[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    losses, optimizer = [], sgd(model)
    for given in batches():
        flat.zero_()
        loss = model(*given)
        loss.backward()
        flat.mul_(0.5)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norm": flat.norm().item(), "state": state(model)}


@program(KIND)
def weights_in_a_flat_buffer(compile: Compile) -> Results:
    """Each p.data is a view of one vector, to which a decay is applied as a whole."""
    model = _net(compile)
    params = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in params])
    offset = 0
    for p in params:
        p.data = flat[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    losses = []
    for given in batches():
        losses += train(model, steps=1, inputs=[given])
        flat.mul_(0.5)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def tied_by_data_after_compiling(compile: Compile) -> Results:
    """`a.data = b.data`: the two are one memory from now on."""
    model = _net(compile)
    losses = train(model, steps=1)
    model.blocks[0].up.weight.data = model.blocks[1].up.weight.data
    return {"losses": losses, "later": train(model), "state": state(model)}


@program(KIND)
def two_given_one_tensor(compile: Compile) -> Results:
    """Two parameters are given one tensor as their data, and are written to afterwards."""
    model = _net(compile)
    losses = train(model, steps=1)
    shared = torch.full_like(model.blocks[0].up.weight, 0.125)
    model.blocks[0].up.weight.data = shared
    model.blocks[1].up.weight.data = shared
    return {"losses": losses, "later": train(model), "state": state(model)}


@program(KIND, plans=MORE)
def given_and_used_afterwards(compile: Compile) -> Results:
    """A tensor that was given as data and only read afterwards, and one that is written before it is given again."""
    model = _net(compile)
    losses = train(model, steps=1)
    w = model.first.weight
    fresh = torch.full_like(w, 0.25)
    w.data = fresh.clone()
    losses += train(model, steps=1)
    fresh.add_(0.25)
    w.data = fresh.clone()
    for p in model.parameters():
        p.data = p.data * 0.5
        p.data = p.data.clone().mul_(2.0)
    return {"losses": losses, "sum": fresh.sum().item(), "later": train(model), "state": state(model)}


@program(KIND, plans=MORE)
def arrays_written_and_given(compile: Compile) -> Results:
    """A copy of the array of a weight, written, and given as data."""
    model = _net(compile)
    losses = train(model, steps=1)
    w = model.first.weight
    array = w.data.numpy().copy()
    array *= 0.5
    w.data = torch.from_numpy(array)
    return {"losses": losses, "mean": w.detach().numpy().mean().item(), "later": train(model), "state": state(model)}


@program(KIND, plans=MORE)
def gradients_kept_over_a_step(compile: Compile) -> Results:
    """Gradients that were taken before the step are compared with those after it, and with themselves."""
    model = _net(compile)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    kept: list[Tensor] | None = None
    for given in batches(3):
        optimizer.zero_grad(set_to_none=True)
        model(*given).backward()
        now = [p.grad for p in model.parameters()]
        if kept is not None:
            found.append([(a * b).sum().item() for a, b in zip(kept, now, strict=True)])
        kept = now
        optimizer.step()
        found.append([g.norm().item() for g in kept] + [float(g.numel()) for g in kept])
    return {"found": found, "state": state(model)}


@program(KIND, plans=MORE)
def gradients_kept_and_cleared(compile: Compile) -> Results:
    """`p.grad = None` in a hook of the user's between steps, and gradients of a first batch added to those of a second."""
    model = _net(compile)
    optimizer, losses = sgd(model), []
    for k in range(2):
        loss = model(*batch(k))
        loss.backward()
        optimizer.step()
        kept = {name: p.grad for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = None
        model(*batch(k + 5)).backward()
        for name, p in model.named_parameters():
            p.grad = p.grad + kept[name]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def slow_copy_by_data(compile: Compile) -> Results:
    """`k.data = k.data * m + q.data * (1 - m)` of a plain copy made before compiling: momentum encoders."""
    built = seeded(Net)
    slow: Any = copy.deepcopy(built)
    model = compile(built, example_inputs=batch())
    losses = []
    for given in batches(3):
        losses += train(model, steps=1, inputs=[given])
        for k, q in zip(slow.parameters(), model.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1
    with torch.no_grad():
        losses.append(slow(*batch(3)).item())
    return {"losses": losses, "slow": {name: t.detach().clone() for name, t in slow.state_dict().items()}}


@program(KIND, plans=MORE)
def slow_copy_mixed_every_way(compile: Compile) -> Results:
    """Sums, differences and comparisons of a plain tensor with a parameter, in both orders, given to the plain model."""
    built = seeded(Net)
    slow: nn.Module = copy.deepcopy(built)
    model = compile(built, example_inputs=batch())
    train(model)
    found = {}
    with torch.no_grad():
        for (name, k), q in zip(slow.named_parameters(), model.parameters(), strict=True):
            found[name] = [(k - q).abs().sum().item(), (q - k).norm().item(), (k != q).sum().item(), torch.dist(k, q).item()]
            k.copy_(torch.lerp(k, q, 0.25))
            k.set_(torch.maximum(q, k))
            k.data = torch.where(k > 0, q, k)
    return {"found": found, "slow": {name: t.detach().clone() for name, t in slow.state_dict().items()}, "state": state(model)}


@program(KIND, plans=MORE)
def noise_in_new_tensors_of_its_size(compile: Compile) -> Results:
    """`p.data.new(p.size()).normal_()` takes the size for a size, and a list for elements."""
    model = _net(compile)
    losses = train(model, steps=1)
    torch.manual_seed(5)
    shapes = []
    for p in model.parameters():
        noise = p.data.new(p.size()).normal_(0, 0.01)
        shapes += [list(noise.shape), list(p.data.new([1.0, 2.0]).shape), list(p.data.new(3).shape)]
        p.data.add_(noise)
        p.grad.data.add_(p.grad.data.new(p.grad.shape).normal_(0, 0.01))
    return {"losses": losses, "shapes": shapes, "later": train(model), "state": state(model)}


def _rewound(model: Any, kept: dict[str, Tensor], *, last: bool) -> Results:
    """Biases are given the very tensors that were kept, so that these are what is trained from then on. last: other data in the end."""
    losses = []
    for _ in range(3):
        losses += train(model, steps=2)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.data = kept[name]
            else:
                p.data = kept[name].clone()
    losses += train(model, steps=2)
    if last:
        model.head.bias.data = torch.zeros(model.head.bias.shape)
    return {"losses": losses, "kept": kept["head.bias"].clone() if last else losses[-1], "state": state(model)}


@program(KIND, plans=MORE)
def rewound_to_what_was_kept(compile: Compile) -> Results:
    """As lottery tickets are: biases are not rewound the second time, since what was kept is their memory."""
    model = _net(compile)
    kept = {name: tensor.detach().clone() for name, tensor in state(model).items()}
    return _rewound(model, kept, last=False)


@program(KIND, plans=MORE)
def rewound_and_given_other_data(compile: Compile) -> Results:
    """What was kept has then what the parameter had come to."""
    model = _net(compile)
    kept = {name: tensor.detach().clone() for name, tensor in state(model).items()}
    return _rewound(model, kept, last=True)
