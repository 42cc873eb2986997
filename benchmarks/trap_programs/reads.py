"""What people read and write of parameters, their gradients and the optimizer's states, between the steps."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, Compile, Net, Results, batch, program, seeded, sgd, state, train, trained

KIND = "reads"
MORE = ("zero2", "hybrid3", "dp2tp2")


def _net(compile: Compile, **options: Any) -> Any:
    return compile(seeded(Net), example_inputs=batch(), **options)


@program(KIND, plans=MORE)
def figures_of_weights(compile: Compile) -> Results:
    """Spectra, extremes, rows, histograms and comparisons of weights."""
    model = _net(compile)
    train(model)
    w = model.first.weight
    with torch.no_grad():
        found: dict[str, Any] = {
            "largest": w.abs().max().item(), "spread": w.std().item(), "singular": torch.linalg.svdvals(w).tolist(),
            "spectral": torch.linalg.matrix_norm(w, 2).item(), "columns": w.sum(dim=0).tolist(), "gram": (w.T @ w).tolist(),
            "row": w[3].tolist(), "first": w.view(-1)[:5].tolist(), "top": w.flatten().topk(3).values.tolist(),
            "histogram": torch.histc(w, 8).tolist(), "median": w.median().item(), "quantile": torch.quantile(w, 0.25).item(),
            "zeros": (w.abs() < 0.05).sum().item(), "list": w.tolist(), "plain": w.detach().cpu().numpy().sum().item(),
            "means": torch.stack([p.mean() for p in model.parameters()]).tolist(), "dims": [p.ndim for p in model.parameters()],
            "shapes": [tuple(p.shape) for p in model.parameters()], "numels": [p.numel() for p in model.parameters()],
            "all": torch.cat([p.flatten() for p in model.parameters()]).tolist(), "equal": torch.equal(w, w.clone()),
            "close": torch.allclose(w, w + 1e-12), "rows": [row.norm().item() for row in w], "size": w.nbytes, "length": len(w),
        }  # fmt: skip
    return found


@program(KIND, plans=MORE)
def figures_of_gradients(compile: Compile) -> Results:
    """Norms by row, signs, cosines between gradients of two batches, their histogram."""
    model = _net(compile)
    model(*batch(0)).backward()
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(*batch(1)).backward()
    second = [p.grad for p in model.parameters()]
    cosine = [F.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() for a, b in zip(first, second, strict=True)]
    return {
        "cosine": cosine, "rows": [g.norm(dim=-1).tolist() for g in second], "signs": [(g > 0).sum().item() for g in second],
        "products": [(a * b).sum().item() for a, b in zip(first, second, strict=True)],
        "histogram": torch.histc(second[0], 8).tolist(), "largest": max(g.abs().max().item() for g in second),
        "vector": torch.cat([g.reshape(-1) for g in second]).norm().item(),
    }  # fmt: skip


@program(KIND, plans=MORE)
def figures_of_states(compile: Compile) -> Results:
    """Norms of Adam's averages, and its updates as people log them."""
    model = _net(compile)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = train(model, optimizer)
    states = [optimizer.state[p] for p in model.parameters()]
    return {
        "losses": losses, "first": [s["exp_avg"].norm().item() for s in states], "second": [s["exp_avg_sq"].mean().item() for s in states],
        "largest": [(s["exp_avg"] / (s["exp_avg_sq"].sqrt() + 1e-8)).abs().max().item() for s in states],
        "shapes": [tuple(s["exp_avg"].shape) for s in states], "numels": [s["exp_avg"].numel() for s in states],
    }  # fmt: skip


@program(KIND, plans=MORE)
def states_for_one_process(compile: Compile) -> Results:
    """torch.save of the optimizer's state_dict, which a plain model on one process goes on with."""
    model = _net(compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": state(model), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    plain = seeded(Net)
    plain.load_state_dict(kept["model"])
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    other.load_state_dict(kept["optimizer"])
    return {"losses": losses + train(plain, other), "state": state(plain)}


@program(KIND, plans=MORE)
def states_halved_and_reset(compile: Compile) -> Results:
    """Averages are halved, then cleared, by hand."""
    model = _net(compile)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = train(model, optimizer)
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].mul_(0.5)
    losses += train(model, optimizer)
    optimizer.state.clear()
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND, plans=MORE)
def state_of_training_kept_and_put_back(compile: Compile) -> Results:
    """As a finder of learning rates does: copies of both state_dicts, a few wild steps, and back."""
    model = _net(compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer)
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    losses += train(model, optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND, plans=MORE)
def noise_on_gradients(compile: Compile) -> Results:
    """randn_like of each gradient, from the process's generator."""
    model = _net(compile)

    def noisy() -> None:
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)

    torch.manual_seed(7)
    return trained(model, before_step=noisy)


@program(KIND, plans=MORE)
def noise_on_weights(compile: Compile) -> Results:
    """Weights are shaken by randn_like and by normal_, and some set to zero by a drawn mask."""
    model = _net(compile)
    losses = train(model)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.01)
            p.add_(torch.empty_like(p).normal_(0, 0.01))
            p.mul_((torch.rand_like(p) > 0.2).to(p.dtype))
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND, plans=MORE)
def places_of_weights_written(compile: Compile) -> Results:
    """Rows, diagonals and places by index are written."""
    model = _net(compile)
    losses = train(model)
    with torch.no_grad():
        model.first.weight[0].zero_()
        model.first.weight[2:4] = 0.5
        model.first.weight.data[5] = 1.0
        model.blocks[0].up.weight.fill_diagonal_(0.25)
        model.blocks[0].down.weight.masked_fill_(model.blocks[0].down.weight < 0, 0.0)
        model.blocks[1].up.weight.index_fill_(0, torch.tensor([1, 3]), 0.1)
        model.blocks[1].down.weight.copy_(torch.where(model.blocks[1].down.weight > 0, 0.1, -0.1))
        model.head.bias.data = torch.full_like(model.head.bias.data, 0.3)
        model.head.weight.data.clamp_(-0.2, 0.2)
        torch._foreach_mul_([p for p in model.parameters() if p.ndim == 1], 0.5)
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND, plans=MORE)
def weights_drawn_anew(compile: Compile) -> Results:
    """nn.init of several kinds, and reset_parameters of a part."""
    model = _net(compile)
    torch.manual_seed(3)
    nn.init.xavier_uniform_(model.first.weight)
    nn.init.trunc_normal_(model.blocks[0].up.weight, std=0.1)
    nn.init.kaiming_normal_(model.blocks[0].down.weight)
    nn.init.eye_(model.blocks[1].up.weight)
    nn.init.sparse_(model.blocks[1].down.weight, 0.5)
    nn.init.constant_(model.head.bias, 0.1)
    model.head.reset_parameters()
    return trained(model)


@program(KIND, plans=MORE)
def average_of_two_models(compile: Compile) -> Results:
    """A soup: the mean of the state_dicts of two runs is loaded."""
    one, two = _net(compile), _net(compile)
    losses = train(one) + train(two, sgd(two, lr=0.02))
    soup = {name: (a + b) / 2 for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True)}
    one.load_state_dict(soup)
    return {"losses": losses + train(one), "state": state(one)}


@program(KIND, plans=MORE)
def decay_by_dims(compile: Compile) -> Results:
    """Weight decay for parameters of two dims or more, and a rate by the root of the fan-in."""
    model = _net(compile)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    for p in model.parameters():
        groups.append({"params": [p], "lr": 0.01 / p.shape[-1] ** 0.5})
    return trained(model, torch.optim.AdamW(groups[2:], lr=1e-2)) | {"sizes": [len(g["params"]) for g in groups[:2]]}


@program(KIND, plans=MORE)
def optimizers_of_torch(compile: Compile) -> Results:
    """Those that other programs do not use, three steps of each on one model."""
    model, losses = _net(compile), []
    params = list(model.parameters())
    kinds = torch.optim
    for optimizer in (
        kinds.ASGD(params, lr=0.05), kinds.Adagrad(params, lr=0.05, lr_decay=0.1, weight_decay=0.01), kinds.Adadelta(params),
        kinds.NAdam(params, lr=1e-2), kinds.RAdam(params, lr=1e-2), kinds.Adamax(params, lr=1e-2),
        kinds.RMSprop(params, lr=1e-3, momentum=0.9, centered=True), kinds.SGD(params, lr=0.01, momentum=0.9, dampening=0.1),
        kinds.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.1), kinds.AdamW(params, lr=1e-2, fused=True),
        kinds.SGD(params, lr=1e-3, maximize=True),
    ):  # fmt: skip
        losses += train(model, optimizer)
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def clipped_in_parts(compile: Compile) -> Results:
    """The norm of the head's gradients is clipped apart from the others', and rows to a norm of their own."""
    model, norms = _net(compile), []

    def clip() -> None:
        norms.append(nn.utils.clip_grad_norm_(model.head.parameters(), 0.05).item())
        norms.append(nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if "head" not in n], 0.1, norm_type=1.0).item())
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        weight = model.first.weight
        weight.grad.div_((weight.grad.norm(dim=1, keepdim=True) / (weight.norm(dim=1, keepdim=True) * 0.01)).clamp(min=1.0))
        for p in model.parameters():
            p.grad.data.sub_(p.grad.data.mean() * 0.1)

    return {**trained(model, before_step=clip), "norms": norms}


@program(KIND, plans=MORE)
def tensors_kept_on_the_way(compile: Compile) -> Results:
    """Hooks on what autograd saves, and anomaly detection, around the call."""
    model, losses = _net(compile), []
    optimizer = sgd(model)
    for k in range(3):
        with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(k == 1):
            loss = model(*batch(k))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def sparse_gradients(compile: Compile) -> Results:
    """nn.Embedding(sparse=True), and SparseAdam for its weight."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(4, HIDDEN, sparse=True), nn.Linear(HIDDEN, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.table(y)) + x[:, :4], y)

    model = compile(seeded(Sparse), example_inputs=batch())
    tables, others = torch.optim.SparseAdam([model.table.weight], lr=1e-2), torch.optim.Adam(model.head.parameters(), lr=1e-2)
    losses = []
    for k in range(3):
        loss = model(*batch(k))
        loss.backward()
        tables.step()
        others.step()
        model.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def average_of_gradients_over_steps(compile: Compile) -> Results:
    """Gradients are kept in a dict by name and averaged with those of later steps."""
    model = _net(compile)
    kept: dict[str, Tensor] = {}

    def averaged() -> None:
        for name, p in model.named_parameters():
            kept[name] = p.grad.clone() if name not in kept else 0.9 * kept[name] + 0.1 * p.grad
            p.grad = kept[name].clone()

    return trained(model, before_step=averaged)


@program(KIND)
def averages_with_a_backup(compile: Compile) -> Results:
    """The usual class for moving averages: backup = p.data, p.data = average, evaluation, p.data = backup."""
    model, (x, y) = compile(seeded(Net), example_inputs=batch()), batch()
    averages, losses = {n: p.data.clone() for n, p in model.named_parameters()}, []
    optimizer = sgd(model)
    for _ in range(3):
        losses += train(model, optimizer, steps=1)
        averages = {n: 0.5 * averages[n] + 0.5 * p.data for n, p in model.named_parameters()}
        backup = {}
        for n, p in model.named_parameters():
            backup[n] = p.data
            p.data = averages[n]
        with torch.no_grad():
            losses.append(model(x, y).item())
        for n, p in model.named_parameters():
            p.data = backup[n]
        losses.append(model(x, y).item())
    return {"losses": losses}


@program(KIND)
def weights_of_two_layers_swapped(compile: Compile) -> Results:
    """a.data, b.data = b.data, a.data."""
    model = compile(seeded(Net), example_inputs=batch())
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    first.data, second.data = second.data, first.data
    return trained(model)


@program(KIND)
def signs_of_weights_for_a_step(compile: Compile) -> Results:
    """Forward and backward with the signs of the weights, the step with the weights, as in binary networks."""
    model, (x, y) = compile(seeded(Net), example_inputs=batch()), batch()
    optimizer, losses = sgd(model), []
    for _ in range(3):
        optimizer.zero_grad()
        real = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = torch.sign(p.data) * p.data.abs().mean()
        loss = model(x, y)
        loss.backward()
        for p, r in zip(model.parameters(), real, strict=True):
            p.data = r
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "total": [p.sum().item() for p in model.parameters()]}
