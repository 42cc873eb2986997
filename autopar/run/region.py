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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from autopar.errors import LaunchError
from autopar.run import bags, comm, ctc, outside_draws  # noqa: F401  (regions may hold the operators that they register)
from autopar.run.alone import as_one_process
from autopar.run.autocast import Autocast, under
from autopar.run.checkpointed import without_checkpointing
from autopar.run.closed import over_tensors
from autopar.run.key_values import without_key_value_cache
from autopar.run.manifest import Manifest, ParamSpec
from autopar.run.mesh import Axis
from autopar.run.parametrized import class_of, pickled
from autopar.run.part import own_attributes
from autopar.run.saved import with_graphs

__all__ = [
    "REGION", "Applied", "AsAutograd", "Drawn", "Hooked", "Place", "Region", "Terms", "Weight", "region", "regions_of", "within",
    "without_unreached",
]  # fmt: skip

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


class Applied(nn.Module):
    """An autograd function of the user's, as what a region runs."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


class Drawn(nn.Module):
    """A function of the user's that draws random numbers, as what a region runs: it returns tensors in the place of arrays of numpy and of
    floats. returned: alone, what the function has returned last. places: of its leaves, in order, what each is that is a tensor here."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__()
        self.function = function
        self.returned: tuple[Any, ...] = ()
        self.places: tuple[type, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.returned = (self.function(*args, **kwargs),)
        leaves, spec = pytree.tree_flatten(self.returned[0])
        found = [_as_tensor(x) for x in leaves]
        self.places = tuple(type(x) for x, made in zip(leaves, found, strict=True) if isinstance(made, Tensor))
        return pytree.tree_unflatten(found, spec)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "returned": ()}


def _as_tensor(x: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        return torch.from_numpy(numpy.array(x))
    return torch.tensor(x, dtype=torch.float64, device="cpu") if isinstance(x, float) else x


@dataclass(frozen=True, slots=True)
class Weight:
    """By what the mean of a part counts among others: the samples of one of the tensors that a function is given, by its number among
    these; of labels, those that are not `ignored`."""

    operand: int
    ignored: int | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor | int:
        """Of these tensors that it is given."""
        labels = tensors[self.operand]
        return labels.shape[0] if self.ignored is None else (labels != self.ignored).sum()


class Terms(Applied):
    """A function that returns the mean of its samples, or their sum (weight: None), as one whose results for parts of them are to be added:
    multiplied by the weight of its part. Of a part that has none both the result and the gradients are zeros."""

    def __init__(self, function: type[torch.autograd.Function], weight: Weight | None) -> None:
        super().__init__(function)
        self.weight = weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.weight is None:
            return super().forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        weight = self.weight.of([x for x in leaves if isinstance(x, Tensor)])
        if isinstance(weight, Tensor):
            leaves = [_Counted.apply(x, weight) if isinstance(x, Tensor) and x.requires_grad else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        returned = super().forward(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda r: torch.where(torch.as_tensor(weight, device=r.device) > 0, r * weight, 0), returned)


class _Counted(torch.autograd.Function):
    """What it is given. Its gradient is zeros where nothing counts, and not what 0/0 has left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return torch.where(weight > 0, grads[0], 0), None


class AsAutograd(nn.Module):
    """The forward of an autograd function, differentiated by autograd."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.function.setup_context is not torch.autograd.Function.setup_context:
            return self.function.forward(*args, **kwargs)
        context = torch.autograd.function.FunctionCtx()
        context.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)  # type: ignore[attr-defined]
        return self.function.forward(context, *args, **kwargs)


class Hooked(nn.Module):
    """What it is given, with a hook on its gradient. Behind it are given the tensors that the hook holds (`closed_tensors`)."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.hook = _Hook(hook)

    def forward(self, x: Tensor, *closed: Tensor) -> Tensor:
        given = x.view_as(x)
        if given.requires_grad:
            given.register_hook(_Hook(over_tensors(self.hook.hook, [t.detach() for t in closed])) if closed else self.hook)
        return given


class _Hook:
    """The user's own, in copies too: it may be a method of the whole model."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor) -> Tensor | None:
        return self.hook(grad)

    def __deepcopy__(self, memo: object) -> _Hook:
        return self


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


def without_unreached(
    found: dict[str, Tensor], params: Sequence[ParamSpec], reached_in: Sequence[tuple[Region, set[str]]], names: Mapping[str, str],
    axes: Sequence[Axis], device: torch.device,
) -> dict[str, Tensor]:  # fmt: skip
    """Collective over the axes, which are all of the mesh: the gradients of a step without those of parameters to which gradients come past
    regions alone, where these gave none on any rank. They have none in the original model, and an optimizer leaves them as they are.
    params: of all stages. reached_in: each region of the model, and what it has noted in this step. names: any name -> the parameter's."""
    optional = {spec.name for spec in params if spec.regions_only}
    if not optional:
        return found
    regions = [region for region, _ in reached_in]
    noted = {note for _, reached in reached_in for note in reached}
    every = [note for region in regions for note in region.notes]
    flags = torch.tensor([float(note in noted) for note in every], device=device)
    for axis in axes:
        comm.all_reduce_(flags, axis, torch.distributed.ReduceOp.MAX)
    somewhere = {note for note, flag in zip(every, flags.tolist(), strict=True) if flag}
    unreached = optional - {names.get(name, name) for name in _reached(regions, somewhere)}
    return {name: grad for name, grad in found.items() if name not in unreached}


def _reached(regions: Sequence[Region], noted: Collection[str]) -> set[str]:
    """The parameters to which a gradient of the loss has come through regions. A region whose results none has come to is given zeros, and
    what it notes of those is nothing."""
    live, left = set[str](), [region.handle for region in regions if region.direct]
    by_handle = {region.handle: region for region in regions}
    found = set[str]()
    while left:
        handle = left.pop()
        if handle in live:
            continue
        live.add(handle)
        for note, (parameters, before) in by_handle[handle].notes.items():
            if note in noted:
                found.update(parameters)
                left += before
    return found


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
