"""Generation with a decoder that is trained in parallel."""

from __future__ import annotations

from typing import Any

import torch

from autopar.run import ParallelModule
from autopar.run.deferred import DeferredModule, started

__all__ = ["generate"]


def generate(model: ParallelModule | DeferredModule, *args: Any, **kwargs: Any) -> Any:
    """Collective: what the original's own `generate(*args, **kwargs)` returns, with its present parameters, on every rank.

    args, kwargs: of the original's generate, alike on all ranks; token numbers [samples, length]. The parameters are whole on every rank
    for the time of the call, which needs the memory of the whole model. Numbers that it draws are those of the same seed on all ranks. A
    module that has not been called yet is the original as it is. ValueError if the model has no generate.
    """
    module = started(model)
    original: Any = model.original
    if original is None or not callable(getattr(original, "generate", None)):
        raise ValueError(f"{type(original).__name__} has no method generate: autopar.generate is for models of Hugging Face's kind")
    if module is None:
        return original.generate(*args, **kwargs)
    devices = [module.device] if module.device.type == "cuda" else []
    seed = module.mesh.agree(int(torch.randint(2**62, (), device="cpu")))
    with module.full_parameters(write=False), torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return original.generate(*args, **kwargs)
