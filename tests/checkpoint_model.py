"""The model that tests of checkpoints train, how, under which plans, and what else these tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import cli
from autopar.render import load
from autopar.variants import tensors_of

B, T, D, V, HEADS, LAYERS = 8, 5, 16, 32, 4, 4  # an odd length, so that attention is split by heads

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp4": (4, {"dp": 4}),
    "tp4": (4, {"tp": 4}),
    "pp4": (4, {"pp": 4}),
    "dp2tp2": (4, {"dp": 2, "tp": 2}),
    "pp2dp2zero3": (4, {"pp": 2, "dp": 2, "zero": 3}),
}


class Block(nn.Module):
    """Query, key and value are one matrix, which tensor parallelism cuts in three groups."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D, bias=False)
        self.fc = nn.Linear(D, 4 * D)
        self.proj = nn.Linear(4 * D, D, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        b, t, d = h.shape
        q, k, v = (x.view(b, t, HEADS, d // HEADS).transpose(1, 2) for x in self.qkv(self.ln(h)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return h + self.proj(F.gelu(self.fc(h)))


class Model(nn.Module):
    """A decoder with everything that a checkpoint must get right: tied embedding and head, frozen and unused parameters, a buffer that
    forward changes, one that is not persistent, and dropout where it is asked for."""

    def __init__(self, layers: int = LAYERS, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.ln_f = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.wte.weight
        self.frozen = nn.Parameter(torch.randn(D), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("scale", torch.full((D,), 0.5), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.drop(self.wte(ids) + self.frozen)
        for layer in self.layers:
            h = layer(h)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
        return F.cross_entropy(self.head(self.ln_f(h) * self.scale + self.mean).view(-1, V), labels.view(-1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids, labels = torch.randint(V, (2, B, T), generator=generator)
    return ids, labels


def plain(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options).double()


Emitted = tuple[str, dict[str, Tensor]]  # the source of a plan's module, and the constants of its graph


def emitted(gpus: int, pins: dict[str, Any], **options: Any) -> Emitted:
    """Compiled once, for workers that then need not capture the model each."""
    made: Any = autopar.compile(plain(**options), gpus=gpus, example_inputs=batch(0), cluster="cpu", pins=pins)
    if gpus == 1:
        return made.source, dict(made._tree.constants)
    given = tensors_of(made.compiled.captured)
    return made.source, {name: tensor for name, tensor in given.items() if name.startswith("constant_")}


def built(made: Emitted, model: nn.Module) -> Any:
    """The parallel module of an emitted source, of this model. Collective."""
    source, constants = made
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **constants}
    return autopar.ParallelModule(load(source), tensors, original=model)


def adamw(model: nn.Module, *, other_way_round: bool = False) -> torch.optim.Optimizer:
    """Two groups; the same parameters in another order where asked."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for name, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-2},
    ]
    if other_way_round:
        groups = [{**g, "params": g["params"][::-1]} for g in groups[::-1]]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)  # gradients that are zero but for rounding stay small


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None) -> list[float]:
    losses = []
    for step in steps:
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def whole_state(model: Any) -> dict[str, Tensor]:
    state = model.full_state_dict() if isinstance(model, autopar.ParallelModule) else model.state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest absolute difference; infinite if there are other names."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)


def saved_in(folder: Path) -> Path:
    """A checkpoint of the model after two steps."""
    model = plain()
    optimizer = adamw(model)
    trained(model, optimizer, range(2))
    autopar.save(folder, model, optimizer, step=2)
    return folder


def run_cli(*args: object) -> int:
    """The exit status of the command line, called with these words."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in args])
    return int(stop.value.code or 0)


def in_a_child(work: Callable[[], None]) -> int:
    """The process that does this work and ends: by os._exit within it, or with status 1."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid
