"""An opaque region: a submodule, or an autograd function of the user's, that no graph can hold, run as its author wrote it.

The emitted code calls it with the tensors that it takes and with its parameters and buffers, as they are used on this rank; autograd
differentiates what it runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from autopar.errors import LaunchError
from autopar.run import bags, ctc, outside_draws  # noqa: F401  (regions may hold the operators that they register)
from autopar.run.alone import as_one_process
from autopar.run.autocast import Autocast, under
from autopar.run.backward_hooks import Entered, Returned
from autopar.run.checkpointed import without_checkpointing
from autopar.run.key_values import without_key_value_cache
from autopar.run.manifest import Manifest
from autopar.run.parametrized import class_of, pickled
from autopar.run.part import own_attributes
from autopar.run.region_modules import Applied, Drawn
from autopar.run.saved import with_graphs

__all__ = ["REGION", "Place", "Region", "region", "regions_of", "within"]

REGION = "autopar.L.region"  # the operator of a program that is one


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor stands in arguments."""


@dataclass(eq=False)
class Region:
    """One call of a submodule, or of what is made one (`Applied`). path: where it is in the model. state: the names of its parameters and
    buffers, in the order in which it is given them. arguments: (args, kwargs) of its forward as captured, in which a Place stands for each
    tensor. autocast: what was on. linear: the gradients that it gives are linear in those that come to it. handle: its name in the program.
    direct: a gradient comes to its results past no other region. private: it is given copies, since its code writes to the memory of what
    it is given where autograd does not see it (a kernel's); private_gradients: so is its backward. upstream: of each tensor that it is
    given, the parameters of the model and the regions, by handle, from which operators alone lead there. outside: it draws from the
    generators of Python or numpy; alike: these follow torch's then, as they must where several ranks run it. place: where the results of
    one that is given no tensor are put; None: where they are. seed: from which it draws, torch's numbers too, where it is compared: a
    number, or the words of a state; None: it draws what comes. writes: the names of those of its buffers that it changes: it is given
    copies, which it returns behind its results.

    It stands where the tensors of constants do, and so has what is asked of these: a device, and copies, which are itself."""

    path: str
    module: nn.Module
    state: tuple[str, ...]
    arguments: Any
    modes: tuple[bool, ...]
    autocast: tuple[Autocast, ...] = ()
    linear: bool = True
    handle: str = ""
    direct: bool = True
    private: bool = False
    private_gradients: bool = False
    upstream: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    outside: bool = False
    alike: bool = False
    place: torch.device | None = None
    seed: int | tuple[int, ...] | None = None
    writes: tuple[str, ...] = ()
    reached: set[str] = field(default_factory=set)  # of the step that runs: what a gradient has come to, as of `notes`

    device = torch.device("cpu")
    dtype = torch.float32
    shape = torch.Size((0,))
    requires_grad = False

    @property
    def name(self) -> str:
        """For people."""
        kind = type(self.module).__name__
        if isinstance(self.module, Entered | Returned):
            return f"the backward hook on {self.path.rpartition('.')[0] or 'the model'}"
        return kind if not self.path else self.path if isinstance(self.module, Applied | Drawn) else f"{self.path} ({kind})"

    @functools.cached_property
    def notes(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Of what it is noted whether a gradient comes to it, by a name of its own: the parameters and the regions that lead there."""
        operands = {f"{self.handle}[{k}]": found for k, found in enumerate(self.upstream)}
        return operands | {f"{self.handle}.{name}": ((within(self.path, name),), ()) for name in self.state}

    @functools.cached_property
    def _places(self) -> frozenset[str]:
        """Of the names of its state, one for each place: a layer that stands under two names has its tensors once, and what is put there
        twice would not be taken away again."""
        first: dict[tuple[int, str], str] = {}
        for name in self.state:
            path, _, key = name.rpartition(".")
            first.setdefault((id(self.module.get_submodule(path)), key), name)
        return frozenset(first.values())

    def detach(self) -> Region:
        return self

    def clone(self) -> Region:
        return self

    def __call__(self, tensors: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that the forward returns, in order, in memory of their own: of what is a view of an operand, a copy. Then what it
        makes of buffers."""
        operands = {t.untyped_storage()._cdata for t in tensors}
        leaves, spec = pytree.tree_flatten(self.arguments)
        if self.private:
            tensors = [t.clone() for t in tensors]
        given = iter([self._noted(t, f"{self.handle}[{k}]") for k, t in enumerate(tensors)])
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, Place) else x for x in leaves], spec)
        modules = list(self.module.modules())
        before = [m.training for m in modules]
        for m, mode in zip(modules, self.modes, strict=True):
            m.training = mode
        try:
            written = {name: t.clone() for name, t in zip(self.state, state, strict=True) if name in self.writes}
            named = [(name, written.get(name, t)) for name, t in zip(self.state, state, strict=True)]
            noted = {f"module.{name}": self._noted(t, f"{self.handle}.{name}") for name, t in named if name in self._places}
            noted = _with_attributes(noted, self.module)
            with (
                self._drawing(),
                under(self.autocast), without_checkpointing(), without_key_value_cache(self.module), as_one_process(), with_graphs(),
            ):  # fmt: skip
                returned = functional_call(_Forward(self.module), noted, args, kwargs, tie_weights=False)  # each name is in the state
        finally:
            for m, mode in zip(modules, before, strict=True):
                m.training = mode
                if isinstance(m, nn.RNNBase):
                    _let_go(m)
        found = [*(x for x in pytree.tree_leaves(returned) if isinstance(x, Tensor)), *(written[name] for name in self.writes)]
        if self.place is not None and not tensors and not state:
            found = [x.to(self.place) for x in found]
        return tuple(x.clone() if x.untyped_storage()._cdata in operands else x for x in found)

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        if self.seed is not None:
            return outside_draws.from_seed(self.seed)
        return outside_draws.alike() if self.alike else contextlib.nullcontext()

    def _noted(self, t: Tensor, name: str) -> Tensor:
        if not t.requires_grad or not torch.is_grad_enabled():
            return t
        noted, reached = t.view_as(t), self.reached  # a view: the module may write to it
        noted.register_hook(lambda grad: None if grad is None else reached.add(name))  # None of a function that gives none
        return noted

    def __reduce__(self) -> tuple[Callable[..., Region], tuple[Any, ...]]:
        """As bytes, with the files of the modules that define its classes, which a worker may not be able to import by name."""
        names = {class_of(m).__module__ for m in self.module.modules()} - {"__main__"}
        names |= {m.function.__module__ for m in self.module.modules() if isinstance(m, Applied | Drawn)} - {"__main__"}
        files = [(name, getattr(sys.modules.get(name), "__file__", None)) for name in sorted(names) if not name.startswith("torch.")]
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "reached"}
        try:
            return _loaded, (tuple(files), sys.path[:], pickled(fields))
        except (pickle.PicklingError, AttributeError, RuntimeError, TypeError) as error:
            raise LaunchError(
                f"{self.name} runs as it is written, and cannot be given to another process: {error}\n  what to do: define its classes and "
                f"functions (hooks too) at the top of a file"
            ) from error


def _loaded(files: Sequence[tuple[str, str | None]], paths: Sequence[str], fields: bytes) -> Region:
    sys.path.extend(p for p in paths if p not in sys.path)
    for name, path in files:
        if name not in sys.modules and path is not None and importlib.util.find_spec(name.partition(".")[0]) is None:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None, (name, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    return Region(**pickle.loads(fields))


def within(path: str, name: str) -> str:
    """The name of what a module at a path has under a name; the model's own path is ''."""
    return f"{path}.{name}" if path else name


class _Forward(nn.Module):
    """A module without its hooks, which are traced around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _with_attributes(given: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """What stands for the parameters and buffers of a module, with what the user has set on these."""
    state = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, attributes in ((f"module.{name}", own_attributes(t)) for name, t in state):
        if attributes and name in given:
            given[name] = given[name].view_as(given[name])
            vars(given[name]).update(attributes)
    return given


def _let_go(layer: nn.RNNBase) -> None:
    """A recurrent layer lists the weights that it was last called with, until it is called again: its own, from here on."""
    for name, weight in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
        setattr(layer, name, weight)


class _Reached(torch.autograd.Function):
    """n results, from which a gradient reaches every parameter, and all that the region is given: of zeros to what this rank's samples do
    not use. Ranks reduce the gradients of all parameters, whichever their samples use. private: gradients go on as copies. values: the
    results, then the operands."""

    @staticmethod
    def forward(ctx: Any, n: int, private: bool, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.private = private
        ctx.like = [(t.shape, t.dtype, t.device) for t in values[n:]]
        return tuple(result.detach() for result in values[:n])  # which may be written in place, as views may not

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.private:
            grads = tuple(None if g is None else g.clone() for g in grads)
        return (None, None, *grads, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like))


class _StandIn(torch.autograd.Function):
    """What a region returns, where its module is not there to be run (fake tensors): its results' shapes, and what it keeps."""

    @staticmethod
    def forward(ctx: Any, shapes: Any, dtypes: Any, grads: Any, saved: int, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*operands, operands[0].new_empty(saved, dtype=torch.uint8))
        made = tuple(operands[0].new_empty(s, dtype=getattr(torch, d)) for s, d in zip(shapes, dtypes, strict=True))
        ctx.mark_non_differentiable(*(t for t, g in zip(made, grads, strict=True) if not g))
        return made

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        operands = ctx.saved_tensors[:-1]
        return (None, None, None, None, *(torch.zeros_like(t) if t.is_floating_point() else None for t in operands))


def region(
    handle: Region | Tensor,
    tensors: Sequence[Tensor],
    state: Sequence[Tensor],
    shapes: tuple[tuple[int, ...], ...],
    *,
    dtypes: tuple[str, ...] = (),
    grads: tuple[bool, ...] = (),
    saved: int = 0,
    **_: object,
) -> tuple[Tensor, ...]:
    """Runs a region on tensors and its parameters and buffers. shapes: of its results. RuntimeError if they have others."""
    if isinstance(handle, Tensor):
        operands = (*tensors, *state) or (handle,)
        found: tuple[Tensor, ...] = _StandIn.apply(shapes, dtypes, grads, saved, *operands)
        return found
    results = handle(tensors, state)
    if tuple(tuple(r.shape) for r in results) != tuple(map(tuple, shapes)):
        raise RuntimeError(
            f"{handle.name} returned tensors of shapes {[tuple(r.shape) for r in results]}, and "
            f"{list(shapes)} when it was captured: what a region returns must not have sizes that depend on values\n  what to do: use a "
            "fixed capacity, or let the module that calls it compute what is done with these values"
        )
    trained = [t for t in (*state, *tensors) if t.requires_grad]
    differentiable = [k for k, r in enumerate(results) if (r.dtype.is_floating_point or r.dtype.is_complex) and grads[k]]
    if not differentiable or not trained or not torch.is_grad_enabled():
        return results
    made = _Reached.apply(len(differentiable), handle.private_gradients, *(results[k] for k in differentiable), *trained)
    reached = dict(zip(differentiable, made, strict=True))
    return tuple(reached.get(k, r) for k, r in enumerate(results))


def regions_of(manifest: Manifest, tensors: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The regions among what a parallel module on a device is given. LaunchError if one is missing."""
    names = [b.name for b in manifest.buffers if b.region]
    missing = [name for name in names if not isinstance(tensors.get(name), Region)]
    if missing:
        raise LaunchError(
            f"{manifest.model} runs submodules as they are written ({', '.join(missing)}), and the emitted source does not hold them\n  "
            "what to do: make the module with autopar.compile(model, plan=...), or give them with the tensors, as tensors_of(captured) does"
        )
    found: dict[str, Any] = {name: tensors[name] for name in names}
    return {name: replace(region, alike=True, place=device) if region.outside else region for name, region in found.items()}
