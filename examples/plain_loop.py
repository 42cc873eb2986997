"""A training loop of one's own: python examples/plain_loop.py, or under torchrun on any number of processes and machines.

    torchrun --nproc-per-node 2 examples/plain_loop.py --pin tp=2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/plain_loop.py    # on each machine

A small language model, AdamW with two groups, a schedule, clipping, and a checkpoint from which it goes on if it is started again, on
whatever number of processes there are then. On each line only what is marked knows of autopar.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

LENGTH, WORDS, WIDTH, HEADS, BATCH = 16, 64, 32, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        b, t, d = h.shape
        q, k, v = (x.view(b, t, HEADS, d // HEADS).transpose(1, 2) for x in self.qkv(self.norms[0](h)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        h = h + self.out(mixed)
        return h + self.down(F.gelu(self.up(self.norms[1](h))))


class LanguageModel(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.words(ids) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), labels.flatten())


def dataset(size: int = 64) -> TensorDataset:
    starts = torch.arange(size)[:, None] * 5
    text = (starts + torch.arange(LENGTH + 1) * (1 + starts % 3)) % WORDS
    return TensorDataset(text[:, :-1], text[:, 1:])


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in named if p.dim() < 2 or "norm" in name]
    return [{"params": [p for _, p in named if all(p is not q for q in plain)]}, {"params": plain, "weight_decay": 0.0}]


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The losses of the steps that were done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pin", action="append", default=[], help="what is decided already, such as tp=2; may be repeated")
    parser.add_argument("--steps", type=int, default=8, help="to be done in all")
    parser.add_argument("--checkpoint", type=Path, help="a folder that all processes see: written at the end, gone on from if it is there")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    model: nn.Module = LanguageModel().double()
    data = dataset()
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    pins = {name: int(value) for name, value in (pin.split("=") for pin in options.pin)}
    model = autopar.compile(model, example_inputs=data[:BATCH], local_batch=True, pins=pins)  # autopar
    done = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        extra = autopar.load(options.checkpoint, model, optimizer)  # autopar
        schedule.load_state_dict(extra["schedule"])
        done = extra["done"]

    sampler = autopar.sampler(data, model, seed=1)  # autopar
    loader = DataLoader(data, batch_size=BATCH // model.data_ranks, sampler=sampler, drop_last=True)
    line = autopar.StepLine(model, every=4)  # autopar
    losses = []
    while done < options.steps:
        epoch, first = divmod(done, len(loader))
        sampler.set_epoch(epoch)
        for ids, labels in list(loader)[first : first + options.steps - done]:
            loss = model(ids, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            line(loss)  # autopar
            done += 1
    if options.checkpoint is not None:
        autopar.save(options.checkpoint, model, optimizer, schedule=schedule.state_dict(), done=done)  # autopar
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(json.dumps(losses))
    return losses


if __name__ == "__main__":
    main()
