"""An average of the weights, and stages that torch.compile has compiled: torchrun --nproc-per-node 2 examples/averaged.py --pin pp=2

AveragedModel is made of the original before autopar.compile, and follows the parallel module as it would follow the original. With
`--backend inductor` what the emitted module computes between its collectives is compiled, each block once. On each line only what is marked
knows of autopar.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
from plain_loop import BATCH, LanguageModel, dataset
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar


def train(model: nn.Module, average: AveragedModel, steps: int) -> list[float]:
    """The losses, and at last that of the average. It knows nothing of autopar."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data, losses = dataset(), []
    for step in range(steps):
        start = BATCH * step % len(data)
        ids, labels = data[start : start + BATCH]
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(loss.item())
    average.eval()
    with torch.no_grad():
        return [*losses, average(*data[:BATCH]).item()]


def main(argv: Sequence[str] | None = None) -> list[float]:
    """What `train` gives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pin", action="append", default=[], help="what is decided already, such as tp=2; may be repeated")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--backend", default="", help="of torch.compile, for the stages: inductor, aot_eager, ...; by default none")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    model: nn.Module = LanguageModel().double()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    pins = {name: int(value) for name, value in (pin.split("=") for pin in options.pin)}
    model = autopar.compile(model, example_inputs=dataset()[:BATCH], pins=pins, compile_stages=options.backend or False)  # autopar
    losses = train(model, average, options.steps)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(json.dumps(losses))
    return losses


if __name__ == "__main__":
    main()
