"""What the code of a model reads of the user's own attributes of its parameters and buffers, as of `weight.infshape`.

The tensors of a trace stand for these and have none of them. They answer as the originals do, and what was asked is noted, also where
there was nothing: a program holds for that.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from autopar.capture.held import ABSENT
from autopar.capture.source import in_library
from autopar.errors import CaptureError
from autopar.run.part import own_attributes

__all__ = ["Asked", "Attributes"]


class Asked(NamedTuple):
    """An attribute that was asked for. registry, key: where the tensor stands in its module. path: for people."""

    registry: dict[str, Any]
    key: str
    attribute: str
    path: str

    @property
    def value(self) -> object:
        """What it is now; ABSENT if there is none."""
        tensor = dict.get(self.registry, self.key)
        return ABSENT if tensor is None else vars(tensor).get(self.attribute, ABSENT)


class Attributes:
    """Those of a model, taken before it is traced. asked: of the traces, in order."""

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        """names: those that the model's code mentions."""
        self._model, self._names = model, names
        self._own = {(id(table), key): own_attributes(t) for table, key, t, _ in _registered(model)}
        self._asked: dict[tuple[int, str, str], Asked] = {}

    @property
    def asked(self) -> tuple[Asked, ...]:
        return tuple(self._asked.values())

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Inside, what stands in the registries of the model has the attributes of what stood there before. CaptureError if some are set
        to what had none or others of that name."""
        stand = {id(t): (t, table, key, path) for table, key, t, path in _registered(self._model)}
        before = {key: frozenset(vars(t)) for key, (t, *_) in stand.items()}

        def missing(tensor: Tensor, attribute: str) -> Any:
            known = stand.get(id(tensor))
            value: object = ABSENT
            if known is not None and known[0] is tensor:
                _, table, key, path = known
                value = self._own[id(table), key].get(attribute, ABSENT)
                if value is not ABSENT or not in_library(sys._getframe(1).f_code.co_filename):
                    self._asked.setdefault((id(table), key, attribute), Asked(table, key, attribute, f"{attribute} of {path}"))
            if value is ABSENT:
                raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {attribute!r}")
            return value

        with _answered(missing):
            yield
        for key, (tensor, *_, path) in stand.items():
            if written := sorted((vars(tensor).keys() - before[key]) & set(self._names)):
                raise CaptureError(
                    f"the forward sets the attribute {written[0]} of {path}, which a graph does not\n  what to do: keep it in an attribute "
                    f"of the module"
                )


def _registered(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor, str]]:
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield table, key, tensor, f"{prefix}.{key}" if prefix else key


_MISSING = "__getattr__"


@contextlib.contextmanager
def _answered(missing: Callable[[Tensor, str], Any]) -> Iterator[None]:
    """Inside, an attribute that a tensor has not is asked for there."""
    before = vars(Tensor).get(_MISSING)
    setattr(Tensor, _MISSING, missing)
    try:
        yield
    finally:
        if before is None:
            delattr(Tensor, _MISSING)
        else:
            setattr(Tensor, _MISSING, before)
