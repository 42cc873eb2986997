"""A module whose plan is made on its first call, or which is planned for more processes than there are."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, Infeasible, LaunchError, SettingError
from autopar.run.asked import check_not_transformed
from autopar.run.grad_mode import with_gradients
from autopar.run.inputs import as_example
from autopar.run.module import ParallelModule
from autopar.run.part_gradients import hooks_aside
from autopar.run.stand_in import StandIn
from autopar.run.stepping import tell_of_steps
from autopar.run.tree import REGISTRIES

__all__ = ["DeferredModule", "started", "world_size"]

_OF_A_STARTED_MODULE = (
    "train_step", "profile", "clip_grad_norm_", "full_state_dict", "full_gradients", "load_full_state_dict", "full_parameters", "manifest",
    "mesh", "data_rank", "data_ranks",
)  # fmt: skip


def world_size() -> int:
    """Processes of the group that this one is in or was launched for; 1 outside of any."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE") or "1"
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise SettingError(f"WORLD_SIZE, which torchrun sets, must be the number of processes, not {text[:80]!r}")
    return int(text)


def started(model: nn.Module) -> ParallelModule | None:
    """What runs for a module that was compiled: itself, or what it has become on its first call; None before that."""
    found = model._started if isinstance(model, DeferredModule) else model
    assert found is None or isinstance(found, ParallelModule)
    return found


class _NotYet(LaunchError, AttributeError):
    """Nor does `hasattr` find it."""


_OF_FIRST = (
    "The plan is made for the batch of this first call, and dim 0 of the inputs is taken for its samples. Where the usual batch is another "
    "one, give that: autopar.compile(model, ..., example_inputs=...). A batch that does not divide is then computed whole by each "
    "data-parallel rank."
)


class DeferredModule(StandIn):
    """Stands for the parallel module until the first batch is there.

    It has the original model's own modules and parameters: an optimizer that was made from them before the first call goes on
    to hold them, when they have become this rank's parts. finish: example inputs -> what to run; start: that and the
    inputs -> module. compiled, inputs: what is there already, where example inputs were given. copied: a copy of the model -> it, compiled
    in the same way.
    """

    original: nn.Module
    _started: ParallelModule | None

    def __init__(
        self,
        model: nn.Module,
        gpus: int,
        finish: Callable[[Any], Any],
        start: Callable[[Any, Any], ParallelModule],
        compiled: Any | None = None,
        inputs: Any | None = None,
        copied: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        super().__init__(compiler=True)
        keep = self.__dict__
        self._stands_for(model)
        keep["_gpus"], keep["_finish"], keep["_start"] = gpus, finish, start
        keep["compiled"], keep["_started"], keep["_inputs"] = compiled, None, inputs
        keep["_copied"] = copied
        keep["_family"] = [weakref.ref(self)]  # it, what it is a copy of, and copies of these, from before their first calls
        keep["random_stream"] = None  # to go on with, of a checkpoint that was loaded before the first call
        keep |= {name: model.__dict__[name] for name in REGISTRIES}
        first = next((p for p in model.parameters() if p.requires_grad), None)
        keep["_called"] = tell_of_steps(first, type(model).__name__) if first is not None and world_size() > 1 else None

    @property
    def plan(self) -> Any:
        return None if self.compiled is None else self.compiled.plan

    @property
    def source(self) -> str | None:
        return None if self.compiled is None else self.compiled.source

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._started is None:
            self._begin(args, kwargs)
        assert self._started is not None
        return self._started(*args, **kwargs)

    def _runs_calls_of_methods(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._started is None:
            with self._methods.let_through():
                self._begin(args, kwargs)
        assert self._started is not None
        return self._started._runs_calls_of_methods(args, kwargs)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with hooks_aside(self.original.parameters()):
            self._begin_without_hooks(args, kwargs)

    def _begin_without_hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep = self.__dict__
        check_not_transformed(type(self.original).__name__, (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)))
        if world_size() != self._gpus:
            raise LaunchError(
                f"this module is compiled for {self._gpus} processes and runs in a world of {world_size()}. Launch the script with "
                f"`torchrun --nproc-per-node={self._gpus} SCRIPT` (on several machines: torchrun's --nnodes), or run a function on "
                f"local workers with autopar.launch(fn, gpus={self._gpus})"
            )
        if self.compiled is None:
            keep["_inputs"] = as_example(args, kwargs)
            try:
                with with_gradients():
                    keep["compiled"] = self._finish(self._inputs)
            except Infeasible as error:
                raise Infeasible(f"{error}\n{_OF_FIRST}", more=error.more) from error
        with with_gradients():
            module = self._start(self.compiled, self._inputs)
        self._becomes(module)
        for other in [found for ref in self._family if (found := ref()) is not None and found._started is None]:
            with contextlib.suppress(AutoparError, ValueError), hooks_aside(other.original.parameters()), with_gradients():
                assert module._copied is not None
                other._becomes(module._copied(other.original))  # else it is planned for its own first call

    def _becomes(self, module: ParallelModule) -> None:
        keep = self.__dict__
        if self._called is not None:
            self._called()
        if (stream := keep.pop("random_stream")) is not None:
            module.random_stream = stream
        keep["_started"], keep["compiled"] = module, self.compiled or module
        for name in ("_finish", "_start", "_inputs"):  # which hold what is not needed any more
            del keep[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As of the parallel module, if it is there; else one that begins as soon as this one does, or the other way round, under the same
        plan."""
        if self._started is not None:
            return copy.deepcopy(self._started, memo)
        if self._copied is None:
            self._refuse_copy("copied")
        found = self._copied(copy.deepcopy(self.original, memo))
        if isinstance(found, DeferredModule):
            self._family.append(weakref.ref(found))
            found.__dict__["_family"] = self._family
        return found

    @property
    def training(self) -> bool:
        """The mode of the model."""
        original = self.__dict__.get("original")
        return original.training if original is not None else True

    @training.setter
    def training(self, mode: bool) -> None:
        if (original := self.__dict__.get("original")) is not None:
            original.training = mode

    def train(self, mode: bool = True) -> DeferredModule:
        """As nn.Module.train: of the original and all its modules."""
        self.original.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> DeferredModule:
        """As nn.Module.apply: of the original."""
        (self._started or self.original).apply(fn)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self._started is not None:
            return self._started.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeferredModule:
        (self._started or self.original)._apply(fn)
        return self

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_started")
        if module is not None and not name.startswith("_"):
            return getattr(module, name)
        if name in _OF_A_STARTED_MODULE:
            raise _NotYet(f"{name} is there after the first call, or at once with example_inputs=... and all {self._gpus} processes")
        original = self.__dict__.get("original")
        if original is None or name.startswith("__"):
            return super().__getattr__(name)
        return self._of_original(name)
