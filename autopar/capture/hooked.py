"""Calls of regions, and hooks on activations as such: what a hook is given, and what it holds of the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar import generators
from autopar.capture.applied import only_computes
from autopar.capture.export import FAILURES
from autopar.capture.follow import storage_of
from autopar.capture.samples import is_linear, works_by_samples
from autopar.capture.source import first_line
from autopar.errors import CaptureError
from autopar.run.backward_hooks import Returned
from autopar.run.closed import closed_tensors, is_named, names_in, over_tensors
from autopar.run.region import Place, Region
from autopar.run.region_modules import Hooked

__all__ = ["IN_A_PART", "Call", "Outside", "hooked", "refuse_left", "tried"]

IN_A_PART = (
    "\n  what to do: make what the hook reads before it is registered, and let it read tensors alone, by their names; or move the "
    "activation and its hook into a submodule of its own, which then runs as it is written"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a region. arguments: what it was given, detached. results: what it returned; structure: the leaves of which they
    are the tensors. rows: which of its tensors are cut where it works by samples. line: what made it necessary."""

    region: Region
    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    structure: Any
    flops: int
    saved: int
    draws: bool
    rows: tuple[int, ...]
    line: str


class Outside(TorchFunctionMode):
    """Notes what the code inside reads of the tensors of a model. names: by storage; read: one that was read."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names, self.read = names, ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._names and not self.read:
            tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.layout == torch.strided)
            self.read = next((self._names[s] for x in tensors if (s := storage_of(x)) in self._names), "")
        return func(*args, **(kwargs or {}))


def hooked(path: str, hook: Callable[..., Any], tensor: Tensor, line: str, names: Mapping[int, str]) -> Call:
    """A hook on an activation as a region, which gives what it is given. It is given the tensors that the hook holds too, which each call
    makes anew. names: of the model's tensors, by storage. Raises CaptureError if it needs more than the values of the tensors that it
    holds: what autograd recorded of them, or tensors of the model, which may be on other ranks."""
    given = tuple(t.detach().clone() for t in (tensor, *closed_tensors(hook)))
    observes = _try(hook, given, line, names) and not only_computes(hook)
    region = Region(path=path, module=Hooked(hook, observes=observes), state=(), arguments=((Place(),) * len(given), {}), modes=(True,))
    result, linear, rows = given[0].clone().requires_grad_(), False, tuple[int, ...]()
    if only_computes(hook):  # else it is given all of the gradient, as it leaves something
        _, rows = works_by_samples(region, given, (), (result,), draws=False, own_backward=True)
        linear = is_linear(region, given, (), draws=False)
    return Call(
        region=dataclasses.replace(region, linear=linear), arguments=given, results=(result,), structure=torch.empty(0, device="cpu"),
        flops=0, saved=0, draws=False, rows=rows, line=line,
    )  # fmt: skip


def _try(hook: Callable[..., Any], given: tuple[Tensor, ...], line: str, names: Mapping[int, str]) -> bool:
    """Call a hook as backward will, on a gradient of zeros; whether it gives none, and does not write to it."""

    def observes() -> bool:
        grad = torch.zeros_like(given[0])
        return over_tensors(hook, given[1:])(grad) is None and grad._version == 0

    return tried(
        observes, line, names, hook="a hook on an activation", needs="the values of the tensors that it reads, or what the forward makes "
        "after it", remedy=IN_A_PART, reading="let it read the tensor by a variable of the forward",
    )  # fmt: skip


def tried(run: Callable[[], bool], line: str, names: Mapping[int, str], *, hook: str, needs: str, remedy: str, reading: str) -> bool:
    """What `run` finds, which calls hooks on gradients of zeros as backward will. Raises CaptureError if they raise, as they need more than
    this, or if they read tensors of the model. names: of these, by storage. hook, needs, remedy, reading: words of the messages; `remedy`
    begins a line of its own, `reading` is what to do where the model is read."""
    outside = Outside(names)
    try:
        with torch.no_grad(), generators.kept(), outside:
            found = run()
    except FAILURES as error:
        raised = f"{type(error).__name__}: {first_line(error)}"
        raise CaptureError(f"{hook} needs more than {needs}\n  at {line}\n  given gradients of zeros it raises {raised}{remedy}") from error
    if outside.read:
        raise CaptureError(
            f"{hook} reads {outside.read} through the model, which may be on other ranks in backward\n  at {line}\n  what to do: {reading}"
        )
    return found


def refuse_left(held: Iterable[object], left: Collection[str]) -> None:
    """Raise CaptureError if a hook on gradients reads by a name what the forward leaves there: backward would find what was there when
    the model was captured. held: tensors, and regions among them. left: places, as `part.name`, or `name[0]`."""
    for region in held:
        for hook in _hooks_of(region):
            names = names_in(hook)
            for place in left:
                if is_named(place, names):
                    raise CaptureError(
                        f"a hook on gradients reads {place}, which each call of the forward sets anew\n  what to do: let a hook on an "
                        f"activation read the tensor by a variable of the forward, and one of a module keep the gradients alone"
                    )


def _hooks_of(region: object) -> tuple[Callable[..., Any], ...]:
    if not isinstance(region, Region):
        return ()
    if isinstance(region.module, Hooked):
        return (region.module.hook.hook,)
    return (*region.module.hooks.before, *region.module.hooks.hooks) if isinstance(region.module, Returned) else ()
