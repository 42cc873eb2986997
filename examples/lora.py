"""Low-rank adapters of peft: torchrun --nproc-per-node 2 examples/lora.py --pin dp=2

The model is frozen but for its adapters, which get_peft_model makes before autopar.compile: gradients, optimizer states and what is sent
are those of the adapters alone. `--adapter FOLDER` writes these as peft's own save_pretrained does. On each line only what is marked knows
of autopar.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from plain_loop import BATCH, LanguageModel, dataset
from torch import nn

import autopar


def adapted() -> Any:
    """A language model whose matrices have adapters of rank 4."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["qkv", "out", "up", "down"])
    return get_peft_model(LanguageModel().double(), config, autocast_adapter_dtype=False)  # type: ignore[arg-type]


def train(model: nn.Module, steps: int) -> list[float]:
    """The losses. It knows nothing of autopar."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data, losses = dataset(), []
    for step in range(steps):
        start = BATCH * step % len(data)
        ids, labels = data[start : start + BATCH]
        loss = model(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The losses of the steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pin", action="append", default=[], help="what is decided already, such as tp=2; may be repeated")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--adapter", type=Path, help="a folder for the adapters, as peft writes them")
    options = parser.parse_args(argv)

    original = adapted()
    pins = {name: int(value) for name, value in (pin.split("=") for pin in options.pin)}
    model = autopar.compile(original, example_inputs=dataset()[:BATCH], pins=pins)  # autopar
    losses = train(model, options.steps)
    if options.adapter is not None:
        state = model.full_state_dict(rank0_only=True)  # autopar
        if model.mesh.rank == 0:  # autopar
            original.save_pretrained(options.adapter, state_dict=state)
    if model.mesh.rank == 0:  # autopar
        print(json.dumps(losses))
    return losses


if __name__ == "__main__":
    main()
