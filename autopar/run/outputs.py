"""What a call of the parallel module returns, where the original returns more than its loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor
from torch._C import _disabled_torch_function_impl

__all__ = ["Loss", "as_returned"]


class Loss(Tensor):
    """The global loss, a scalar, with the ways to reach it that the original's result has. Anything else of that result raises."""

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]
    _returns: str

    @property
    def loss(self) -> Tensor:
        """The loss itself."""
        return self

    def __getitem__(self, index: Any) -> Any:
        if index in ("loss", 0):
            return self
        self._refuse(f"[{index!r}]")

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        return self[name]

    def __iter__(self) -> Iterator[Any]:
        self._refuse("its elements")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    def _refuse(self, what: str) -> NoReturn:
        raise AttributeError(
            f"the original returns {self._returns}; the parallel module returns its loss alone, and not {what}. With "
            f"autopar.compile(model, ..., outputs='all') a call under torch.no_grad() returns all of it"
        )


def as_returned(loss: Tensor, returns: str) -> Tensor:
    """The loss as a call returns it. returns: what the original returns, in words; '' for the loss itself."""
    if not returns:
        return loss
    found = loss.as_subclass(Loss)
    found._returns = returns
    return found
