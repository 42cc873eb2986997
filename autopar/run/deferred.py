"""A module whose plan is made on its first call, or which is planned for more processes than there are."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import LaunchError
from autopar.run.module import ParallelModule

__all__ = ["DeferredModule", "world_size"]


def world_size() -> int:
    """Processes of the group that this one is in or was launched for; 1 outside of any."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


class DeferredModule(nn.Module):
    """Stands for the parallel module until the first batch is there.

    Its parameters are the original model's own objects: an optimizer that was made from them before the first call goes on
    to hold them, when they have become this rank's parts. finish: example inputs -> what to run; start: that and the
    inputs -> module. compiled, inputs: what is there already, where example inputs were given.
    """

    def __init__(
        self,
        model: nn.Module,
        gpus: int,
        finish: Callable[[Any], Any],
        start: Callable[[Any, Any], ParallelModule],
        compiled: Any | None = None,
        inputs: Any | None = None,
    ) -> None:
        super().__init__()
        keep = self.__dict__
        keep["_original"], keep["_gpus"], keep["_finish"], keep["_start"] = model, gpus, finish, start
        keep["compiled"], keep["module"], keep["_inputs"] = compiled, None, inputs
        self.training = model.training

    @property
    def plan(self) -> Any:
        return None if self.compiled is None else self.compiled.plan

    @property
    def source(self) -> str | None:
        return None if self.compiled is None else self.compiled.source

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.module is None:
            self._begin(args, kwargs)
        assert self.module is not None
        return self.module(*args, **kwargs)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep = self.__dict__
        if world_size() != self._gpus:
            raise LaunchError(
                f"this module is compiled for {self._gpus} processes and runs in a world of {world_size()}. Launch the script with "
                f"`torchrun --nproc-per-node={self._gpus} SCRIPT` (on several machines: torchrun's --nnodes), or run a function on "
                f"local workers with autopar.launch(fn, gpus={self._gpus})"
            )
        if self.compiled is None:
            keep["_inputs"] = {**dict(zip(_names(self._original), args, strict=False)), **kwargs} if kwargs else args
            keep["compiled"] = self._finish(self._inputs)
        module = self._start(self.compiled, self._inputs)
        module.adopt(dict(self._original.named_parameters(remove_duplicate=False)))
        module.train(self.training)
        keep["module"] = module
        for name in ("_finish", "_start", "_inputs"):  # which hold what is not needed any more
            del keep[name]

    def parameters(self, recurse: bool = True) -> Any:
        return (self.module or self._original).parameters(recurse)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        return (self.module or self._original).named_parameters(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> DeferredModule:
        self.training = mode
        if self.module is None:
            self._original.train(mode)
        else:
            self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return (self.module or self._original).state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is not None and not name.startswith("_"):
            return getattr(module, name)
        if name in ("train_step", "clip_grad_norm_", "full_state_dict", "load_full_state_dict", "manifest", "mesh"):
            raise LaunchError(f"{name} is there after the first call, or at once with example_inputs=... and all {self._gpus} processes")
        return super().__getattr__(name)


def _names(model: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(model.forward).parameters)
