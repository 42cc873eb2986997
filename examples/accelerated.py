"""Accelerate in parallel: accelerate launch --multi_gpu --num_processes 2 examples/accelerated.py --pin tp=2

The same without GPUs: with --cpu in its place `accelerate launch` would start one process. torchrun --nproc-per-node 2 does as well.

AutoparAccelerator stands where Accelerator did, and the model is compiled before it is prepared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.integrations.accelerate import AutoparAccelerator


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The losses of all batches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pin", action="append", default=[], help="what is decided already, such as tp=2; may be repeated")
    parser.add_argument("--output", default="accelerated", help="folder of the checkpoint")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    accelerator = AutoparAccelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    x = torch.randn(64, 16)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)  # of the global batch
    model: nn.Module = autopar.compile(Classifier(), pins={k: int(v) for k, v in (pin.split("=") for pin in options.pin)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = model(x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(options.output)
    accelerator.print(losses)
    return losses


if __name__ == "__main__":
    main()
