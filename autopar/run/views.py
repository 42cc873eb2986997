"""Views of a parameter of which a rank holds a part: of a copy of the whole, gathered for them. What is written to one goes back into the
parts; what anything gives that shares their memory is such a view too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.run import function_names as F
from autopar.run.given import Memory
from autopar.run.lies import Lies
from autopar.run.plain import asker, plainly
from autopar.run.sent import COLLECTIVES, finished, not_in_parts

__all__ = ["Gathered", "Source", "no_parameter_of", "sharing", "write_whole", "writes"]

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class Source:
    """What views were gathered from. part: the part here. version: of it, when whole was as it is. whole: the copy that they are of."""

    part: Tensor
    lies: Lies
    memory: Memory
    version: int
    whole: Tensor

    @property
    def written(self) -> int:
        """How often the memory of the part has been written to, while the parameter had it."""
        return self.part._version if self.memory.left is None else self.memory.left

    def check(self, name: str) -> None:
        """TypeError if the parameter has changed since."""
        if self.written != self.version:
            raise TypeError(
                f"{name} of a view of {self.lies.name} that was taken before the parameter changed; the view is a copy that was gathered "
                f"from parts. Take the view again"
            )


class Gathered(Tensor):
    """A view of a copy of a part's whole. It is of no use once the parts have changed."""

    _source: Source

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(getattr(kind, "takes_views", False) for kind in types):
            return NotImplemented  # parts know what to do with it
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__iter__":
            return iter(args[0].unbind(0))
        views = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Gathered)]
        sources = list({id(x._source): x._source for x in views}.values())
        for source in sources:
            source.check(name)
            if name == "is_complex":
                not_in_parts(source.lies, asker())
        with plainly():
            if name in F.SHOWN:  # what the format of a number asks of a tensor is that it is of no subclass
                return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)
            if name in F.NOT_COPIED:
                return func(args[0].detach().as_subclass(Tensor).clone(), *args[1:])
            if writes(name) and torch.is_grad_enabled() and views[0].requires_grad:
                raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
            before = [source.whole._version for source in sources]
            found = args[0].detach() if func == _DATA else finished(func(*args, **kwargs))  # whose writes .data would hide
            for source, version in zip(sources, before, strict=True):
                if source.whole._version != version or name in COLLECTIVES:
                    write_whole(source.part, source.lies, source.whole)
                    source.version = source.written  # of all views of this copy
        return found if any(found is x for x in views) else sharing(found, sources)

    def detach(self) -> Tensor:
        no_parameter_of(
            f"nn.Parameter of a view of {self._source.lies.name}: each rank holds a part of that, whose memory no other parameter can "
            f"share. Give it a copy: tensor.clone()"
        )
        return super().detach()


def no_parameter_of(why: str) -> None:
    """In detach: TypeError if nn.Parameter asks for it, whose own words for what it lacks say nothing of what to do."""
    if sys._getframe(2).f_code is nn.Parameter.__new__.__code__:
        raise TypeError(why)


def write_whole(part: Tensor, lies: Lies, whole: Tensor) -> None:
    """Collective: the whole, as rank 0 has it, is written to the part here."""
    with torch.no_grad():
        part.copy_(lies.cut(lies.agreed(whole)))


def sharing(found: Any, sources: Sequence[Source]) -> Any:
    """What a function has given, with what shares the memory of a copy as a view of it, and arrays that cannot be written."""
    known = {_storage(source.whole): source for source in sources}

    def view(x: Any) -> Any:
        if isinstance(x, Tensor):
            if type(x) is Tensor and (source := known.get(_storage(x))) is not None:
                x = x.as_subclass(Gathered)
                x._source = source
        elif type(x).__module__ == "numpy" and hasattr(x, "setflags"):
            x.setflags(write=False)
        return x

    return pytree.tree_map(view, found)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata) if x.layout == torch.strided else 0


def writes(name: str) -> bool:
    """Whether a function of this name writes to its first operand."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or (name.startswith("__i") and name in F.IN_PLACE)
