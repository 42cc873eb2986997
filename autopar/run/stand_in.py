"""A module that stands for the user's: what is set on it is set on the original, and it cannot be copied."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

__all__ = ["StandIn"]


class StandIn(nn.Module):
    """original: the user's model, kept out of the registries; None where there is none."""

    original: nn.Module | None

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("original")
        if original is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(original, name, value)

    def __delattr__(self, name: str) -> None:
        original = self.__dict__.get("original")
        if original is None or name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(original, name)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse_copy("copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse_copy("pickled")

    def _refuse_copy(self, what: str) -> NoReturn:
        raise TypeError(
            f"a parallel {type(self.original).__name__ if self.original is not None else 'module'} cannot be {what}: it is part of a group "
            f"of processes. Save full_state_dict(), which loads into the original model, and compile that again"
        )
