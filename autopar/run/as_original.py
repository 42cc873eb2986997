"""What a parallel module is to code that takes it for the original: its modes, its attributes, what is applied to all of it, its files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from autopar.run.alike import done_by_every_rank
from autopar.run.together import done_by_all
from autopar.run.with_state import WithState

__all__ = ["AsOriginal"]

WRITES_FILES = ("save_pretrained", "push_to_hub")  # methods of the models of transformers, peft and others: some gather on one rank alone


class AsOriginal(WithState):
    """What of a parallel module is as of the original, or says why it is not."""

    @property
    def training(self) -> bool:
        """The mode of the model."""
        return self.original.training if self.original is not None else self.__dict__.get("_mode", True)

    @training.setter
    def training(self, mode: bool) -> None:
        if self.original is not None:
            self.original.training = mode
        self.__dict__["_mode"] = mode

    def train(self, mode: bool = True) -> Self:
        """As nn.Module.train: of the original and all its modules."""
        if self.original is not None:
            self.original.train(mode)
        self.training = mode
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """As nn.Module.apply: of the original."""
        if self.original is None:
            return super().apply(fn)
        self.original.apply(fn)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module.load_state_dict. assign: the parameters stay the objects that they are, which optimizers hold, and take the values.
        Raises ValueError for an assigned tensor of another dtype."""
        own = self.state_dict(keep_vars=True) if assign else {}
        for name, tensor in state_dict.items() if assign else ():
            if isinstance(tensor, Tensor) and name in own and tensor.dtype != own[name].dtype:
                raise ValueError(
                    f"{name} was compiled in {own[name].dtype} and cannot become {tensor.dtype}: the plan counts on it. Load it without "
                    f"assign=True, which casts it"
                )
        return super().load_state_dict(state_dict, strict=strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Of to(), cuda(), double() and the like: nothing, or refused."""
        for like in {(p.dtype, p.device): torch.empty(0, dtype=p.dtype, device=p.device) for p in self._tree.params.values()}.values():
            moved = fn(like)
            if (moved.dtype, moved.device.type) != (like.dtype, like.device.type):
                raise ValueError(
                    f"{self.manifest.model} was compiled in {like.dtype} for {like.device.type}, and is kept so: its plan counts on it. "
                    f"Cast or move the model before it is compiled"
                )
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None or name.startswith("__"):
                raise
            return functools.partial(self._by_rank_0, getattr(original, name)) if name in WRITES_FILES else self._of_original(name)

    def _by_rank_0(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Collective: a method of the original that writes its state to files, of whole parameters. Others wait until it is written,
        and raise where it fails. LaunchError if another rank of this machine does something else."""
        done_by_every_rank("save", f"the model ({method.__name__})")
        with self.full_parameters(write=False):
            return done_by_all(
                lambda: method(*args, **kwargs) if self.mesh.rank == 0 else None, same=lambda _: "", what=method.__name__
            )  # fmt: skip
