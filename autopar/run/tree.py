"""The user's module tree, whose parameters and buffers are this rank's parts: the same modules, the same Parameter objects.

Where a parallel module is made without the original (from an emitted file and tensors) the tree is one of empty modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.errors import LaunchError
from autopar.run.buckets import Held, hold
from autopar.run.elsewhere import Standing, exchanged
from autopar.run.given import GRAD, check_given, note
from autopar.run.leaves import Leaves
from autopar.run.lies import Lies
from autopar.run.manifest import BufferSpec, Manifest, ParamSpec
from autopar.run.mesh import Axis, Mesh
from autopar.run.outside import Outside
from autopar.run.part import become_part, become_whole, is_part, lies_of, local, own_attributes, part_like
from autopar.run.parts import Part
from autopar.run.plain import plainly
from autopar.run.standing_buffers import Buffers, Place, in_its_memory
from autopar.run.stepping import close_steps
from autopar.run.without_data import give_memory, is_unwritten

__all__ = ["REGISTRIES", "Tree", "whole_again"]

REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_trees: weakref.WeakSet[Tree] = weakref.WeakSet()


class _OfGradients:
    """A hook of a parameter's gradient, which torch does not call where there is none. Of a gradient that a function of ours does not
    return, it would be told None."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self._hook(grad)


def _remedy_of_another(there: object) -> str:
    """What to do about what stands in the place of a parameter."""
    if isinstance(there, torch.Tensor) and not isinstance(there, torch.nn.Parameter):  # as torch.func.functional_call puts there
        return (
            "torch.func.functional_call, of tensors in the place of parameters, is for the model itself: `with model.full_parameters():` "
            "call it of model.original; or let the model compute with what is added to its parameters, an input of the call"
        )
    return "Write new values into it (copy_, load_state_dict, or `with model.full_parameters():`), or compile the changed model"


def _tell_of_gradients_alone(hooks: dict[int, Any]) -> None:
    """hooks: of a parameter, as torch keeps them."""
    for key, hook in hooks.items():
        if not isinstance(hook, _OfGradients):
            hooks[key] = _OfGradients(hook)


class Tree:
    """Places the tensors of a plan in a module tree. root: the module whose registries they go into; it has those of the original, if
    there is one. tied: the stages that share a parameter -> their axis. elsewhere: gives the places beside its registries in which its
    parameters and buffers stand."""

    def __init__(
        self, root: nn.Module, manifest: Manifest, mesh: Mesh, device: torch.device, tied: Mapping[tuple[int, ...], Axis],
        elsewhere: Callable[[], Sequence[Standing]] = tuple,
    ) -> None:  # fmt: skip
        self._root, self._mesh, self._device, self._tied, self._elsewhere = root, mesh, device, tied, elsewhere
        self.model = manifest.model
        self.held: dict[str, Held] = {}
        self.names: dict[str, str] = {}  # every name of a parameter -> the first one
        self.lies: dict[str, Lies] = {}
        self.params: dict[str, nn.Parameter] = {}  # also those of other stages, and frozen ones that the plan has as buffers
        self.buffers = Buffers(manifest.model, mesh, device, self.lies, self.params)
        self.constants: dict[str, Tensor] = {}
        self._trainable = frozenset(spec.name for spec in manifest.params if spec.trainable)  # as it was planned
        self.asks_what_trains = False  # code of the model reads whether tensors have a gradient
        self.otherwise: tuple[str, ...] = ()  # parameters that train in the present step and were not planned to; the other way round too
        self._written = frozenset(spec.name for spec in manifest.buffers if spec.parameter)  # by the forward
        self._reduce_dtype = manifest.reduce_dtype
        self._places: list[tuple[Place, nn.Parameter, str]] = []
        self._children = [
            (module._modules, key, child, f"{path}.{key}".lstrip("."))
            for path, module in root.named_modules(remove_duplicate=False)
            for key, child in module._modules.items()
        ]
        self.planned_buffers = frozenset(name for name, _ in root.named_buffers(remove_duplicate=False))
        self._moved: dict[str, StorageWeakRef] = {}  # by name, the memory that a parameter had before
        self.leaves = Leaves()
        self._outside = Outside(manifest.model, mesh, self.params)
        self.whole = False  # the parameters are whole for the moment
        self._writing = False
        self._waits = False  # something had no values when it was compiled
        self._without: dict[str, int] = {}  # of these that this rank holds, how often each had been written to
        self.gone = ""  # to whom they have been given back, in words

    def take(self, specs: Iterable[tuple[ParamSpec | BufferSpec, Tensor]]) -> None:
        """Keep this rank's parts of the whole tensors."""
        for spec, full in specs:
            lies = Lies(spec, self._mesh)
            here = lies.cut(full).clone(memory_format=torch.contiguous_format)
            if isinstance(spec, BufferSpec):
                self.buffers.aliases.update((name, spec.name) for name in spec.aliases)
            if isinstance(spec, ParamSpec):
                self._take_param(spec, here, lies)
            elif spec.constant:
                if lies.holds:
                    self.constants[spec.name] = here
            elif spec.parameter:
                self._placed((spec.name, *spec.aliases), here, lies, trainable=False)
            else:
                self._take_buffer(spec, here, lies)
        _trees.add(self)

    def _take_buffer(self, spec: BufferSpec, here: Tensor, lies: Lies) -> None:
        names = (spec.name, *spec.aliases)
        place, *others = (self._place(name, "_buffers") for name in names)
        apart = (x for x in others if x.registry is not place.registry or x.key != place.key)  # a module may have two names
        place = Place(place.registry, place.key, tuple(apart))
        if (moved := self.buffers.take(spec, place, here, lies)) is not None:
            self._moved[spec.name] = moved
        for name in () if spec.persistent else names:
            path, _, last = name.rpartition(".")
            self._module(path)._non_persistent_buffers_set.add(last)

    def _take_param(self, spec: ParamSpec, here: Tensor, lies: Lies) -> None:
        param = self._placed((spec.name, *spec.aliases), here, lies, trainable=spec.trainable)
        self.names.update((name, spec.name) for name in (spec.name, *spec.aliases))
        if lies.holds:
            self.held[spec.name] = hold(spec, param, self._mesh, self._tied.get(spec.stages), self._reduce_dtype)

    def _placed(self, names: Sequence[str], here: Tensor, lies: Lies, *, trainable: bool) -> nn.Parameter:
        """The user's parameter, or a new one, under its names in the tree, with this memory."""
        place = self._place(names[0], "_parameters")
        known = place.registry.get(place.key)
        param = known if isinstance(known, nn.Parameter) else nn.Parameter(here, requires_grad=trainable)
        lies.home, lies.outside = param.device, self._outside
        if param.is_meta and not here.is_meta and not isinstance(here, FakeTensor):
            give_memory(param, here)
        given = param.grad
        grad = None if given is None else lies.cut(given).to(self._device)
        before = local(param)
        here = in_its_memory(before, here) if before.is_contiguous() else here
        if here is not before and not (isinstance(before, FakeTensor) or before.is_meta) and before.numel():
            self._moved[names[0]] = StorageWeakRef(before.untyped_storage())
        del before
        self._become(param, here, lies)
        if grad is not None and given is not None:
            param.grad = part_like(grad, lies) if is_part(param) else grad
            if lies.split:
                note(param, GRAD, given, grad)
        self.lies[names[0]], self.params[names[0]] = lies, param
        for name in names:
            place = self._place(name, "_parameters")
            place.registry[place.key] = param
            self._places.append((place, param, name))
        return param

    def wait_for(self, names: Collection[str]) -> None:
        """The first call is to look whether these have got values. names: the same on every rank."""
        self._waits = bool(names)
        self._without = {name: self.at_rest(name)._version for name in names if self.lies.get(name) is not None and self.lies[name].holds}

    def _look_for_values(self) -> None:
        """Collective. ValueError if something has none."""
        missing = sorted(self._mesh.collected([name for name, n in self._without.items() if is_unwritten(self.at_rest(name), n)]))
        if missing:
            more = f" and {len(missing) - 3} more" if missing[3:] else ""
            raise ValueError(
                f"{', '.join(missing[:3])}{more} of {self.model} had no values when it was compiled, on the meta device, and nothing has "
                f"been written to them since\n  what to do: load them into what compile has returned for example_inputs, before the first "
                f"call (autopar.load, load_full_state_dict, load_state_dict), or make them: model.apply(init), or inside of "
                f"`with model.full_parameters():`; or have rank 0 build the model with data. Buffers that are in no checkpoint are best "
                f"built with data on every rank"
            )
        self._waits, self._without = False, {}

    def _tell_of_moved(self) -> None:
        """Warns of memory that parameters had, and that something else holds still."""
        moved, self._moved = self._moved, {}
        if not all(storage.expired() for storage in moved.values()):
            gc.collect()  # what capture and planning have left may be held by nothing but itself
        if held := [name for name, storage in moved.items() if not storage.expired()]:
            more = f" and {len(held) - 3} more" if len(held) > 3 else ""
            warnings.warn(
                f"something holds the memory that {', '.join(held[:3])}{more} of {self.model} had before it was compiled (a state_dict(), "
                f".data, an array of numpy, a graph), where it does not follow training, and does not reach the model: take it anew, or a "
                f"copy of it before compiling",
                stacklevel=4,
            )

    def _become(self, param: nn.Parameter, here: Tensor, lies: Lies) -> None:
        if isinstance(here, FakeTensor):  # which has no memory, and a class of its own
            param.data = here
        elif self._mesh.world > 1:
            become_part(param, here, lies)
        else:
            become_whole(param, here)

    def _module(self, path: str) -> nn.Module:
        """Through the registries, since the user's names may be those of attributes of the root."""
        module = self._root
        for part in path.split(".") if path else ():
            found = module._modules.get(part)
            if found is None:
                found = module._modules[part] = nn.Module()
            module = found
        return module

    def _place(self, name: str, registry: str) -> Place:
        path, _, last = name.rpartition(".")
        return Place(self._module(path).__dict__[registry], last)

    # ------------------------------------------------------------------------------------------------------------ reading
    def at_rest(self, name: str) -> Tensor:
        """This rank's part of a parameter or buffer, as a plain tensor; empty if another stage holds it. LaunchError if the parameters
        were given back."""
        self._check_here()
        param = self.params.get(name)
        return local(param) if param is not None else self.buffer(name)

    def buffer(self, name: str) -> Tensor:
        """This rank's part of what the plan has as a buffer, also of one that the user has replaced by a whole tensor."""
        return local(self.params[name]) if name in self.params else self.buffers.here(name)

    def gathered(self, name: str) -> Tensor:
        """Collective: a parameter or buffer of the model, whole, on every rank."""
        name = self.names.get(name) or self.buffers.aliases.get(name, name)
        if name not in self.lies:  # the plan does without it
            path, _, last = name.rpartition(".")
            return getattr(self._module(path), last)
        lies = self.lies[name]
        here = self.at_rest(name)
        return lies.gather(here) if lies.split else here

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Whole values, the same on every rank, to parameters."""
        with torch.no_grad():
            for name, value in values.items():
                name = self.names.get(name, name)
                self.at_rest(name).copy_(self.lies[name].cut(value))

    def begin_step(self) -> None:
        """Look at what may have been done to the parameters since the last call. Raises ValueError, LaunchError."""
        self._check_here()
        if self._moved:
            self._tell_of_moved()
        if self._waits:
            self._look_for_values()
        if self.whole:
            raise LaunchError(f"{self.model} was called within full_parameters(): leave that context first")
        for registry, key, child, path in self._children:
            if registry.get(key) is not child:
                raise ValueError(f"submodule {path} is another one than when the model was compiled: compile the changed model again")
        self.buffers.check_joined()
        self.buffers.take_those_of_the_loop()
        with plainly():
            for place, param, name in self._places:
                if (there := place.registry.get(place.key)) is not param:
                    raise ValueError(
                        f"parameter {name} is another object than when the model was compiled. {_remedy_of_another(there)}"
                    )
            self.buffers.check_gradients()
            check_given(self.params.items())
            unfrozen, frozen = [], []
            for name, param in self.params.items():
                if param._backward_hooks and not is_part(param):  # whose hooks are told of none in any case
                    _tell_of_gradients_alone(param._backward_hooks)
                trains = param.requires_grad
                if trains and name not in self._trainable:
                    if name in self._written:
                        raise ValueError(
                            f"parameter {name} requires a gradient, and the forward writes to it, as it may to what does not train alone\n"
                            f"  what to do: freeze it again (requires_grad_(False))"
                        )
                    unfrozen.append(name)
                elif not trains and name in self._trainable:
                    frozen.append(name)
                if name in self.held:
                    self.held[name].trains = trains
            counts = self.asks_what_trains and len(frozen) < len(self._trainable) + len(unfrozen)  # what is frozen
            self.otherwise = (*unfrozen, *(frozen if counts else ()))

    @property
    def unfrozen(self) -> tuple[str, ...]:
        """The parameters that require a gradient in the present step, and were not planned to."""
        return tuple(name for name in self.otherwise if name not in self._trainable)

    def train_also(self, specs: Iterable[ParamSpec]) -> bool:
        """Take up parameters of this rank that train, and were not planned to. specs: as they are in the program in which they do. Whether
        there is any that was not taken up before."""
        fresh = [spec for spec in specs if spec.trainable and spec.name in self.held and not self.held[spec.name].spec.trainable]
        for spec in fresh:
            held = self.held[spec.name]
            spec = dataclasses.replace(held.spec, trainable=True, agreed=spec.agreed, regions_only=spec.regions_only)
            self.held[spec.name] = hold(spec, held.param, self._mesh, held.tied, self._reduce_dtype)
        return bool(fresh)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that require a gradient now, by name."""
        with plainly():  # which asks a part in the time of a small operator
            return [(name, param) for name, param in self.params.items() if param.requires_grad]

    def _check_here(self) -> None:
        if self.gone:
            raise LaunchError(f"this parallel {self.model} gave its parameters back when {self.gone}")

    # ---------------------------------------------------------------------------------------------------- whole parameters
    def _gathered_at(self, lies: Lies, home: bool) -> Tensor:
        """Collective: the whole, where it was before. (One after the other, so that a device need not have room for all of a model that was
        elsewhere.)"""
        whole = lies.gather(self.at_rest(lies.name))
        return whole.to(lies.home) if home else whole

    @contextlib.contextmanager
    def as_whole(self, *, write: bool, home: bool = False, buffers: bool = False) -> Iterator[None]:
        """Collective: inside, parameters and buffers are plain and whole on every rank. write: rank 0's values become the model's
        afterwards; buffers: only what is in buffers. home: they lie on the devices that the original had."""
        if self.whole:
            if write and not self._writing:
                raise ValueError("full_parameters() within full_parameters(write=False): what is written inside would be lost")
            yield
            return
        elsewhere = self._elsewhere()
        full = {name: self._gathered_at(lies, home) for name, lies in self.lies.items() if self.buffers.stands(name)}
        buffers_now = dict(self.buffers.standing())
        before = {name: place.registry[place.key] for name, place in buffers_now.items()}
        # objects of their own: graphs of earlier steps that are alive still know the parts
        # a program is captured as it was planned: what is frozen for a while has its gradients in it, if no code asks for that
        trains = self._trainable ^ set(self.otherwise) if home else {name for name, param in self.params.items() if param.requires_grad}
        whole = {id(param): nn.Parameter(full[name], requires_grad=name in trains) for name, param in self.params.items()}
        for param in self.params.values():
            vars(whole[id(param)]).update(own_attributes(param))
        before_of = {name: _written(param) for name, param in self.params.items()}
        for place, param, _ in self._places:
            place.registry[place.key] = whole[id(param)]
        for name, place in buffers_now.items():
            place.put(full[name])
        self.whole, self._writing = True, write
        try:
            with exchanged(elsewhere, whole | {id(before[name]): full[name] for name in buffers_now}):
                yield
        finally:
            self.whole = False
            now: dict[str, Tensor | None] = {}
            first = {id(param): name for name, param in self.params.items()}
            for place, param, name in self._places:
                found = place.registry.get(place.key)
                if name in self.params or found is not whole[id(param)]:  # under one of its names the user has put another one
                    now[first[id(param)]] = found
            held = {name: place.registry[place.key] for name, place in buffers_now.items()}
            for name, place in buffers_now.items():
                place.put(before[name])
            for place, param, _ in self._places:
                place.registry[place.key] = param
        if write or buffers:
            changed = [name for name, param in self.params.items() if _written(param) != before_of[name]]
            if changed:
                raise ValueError(f"parameter {changed[0]} was written to by an object from outside of full_parameters(); take it inside")
            with torch.no_grad():
                changing = {name: tensor for name, tensor in now.items() if write or name in self._written}
                for name, tensor in (changing | held).items():
                    lies = self.lies[name]
                    if tensor is None or tensor.shape != lies.shape:
                        has = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
                        raise ValueError(f"{name} has shape {tuple(lies.shape)} in the plan, and {has} after full_parameters()")
                    else:
                        self.at_rest(name).copy_(lies.cut(lies.agreed(tensor.to(self._device))))
                    if write and not home and isinstance(tensor, nn.Parameter):
                        _take_over(name, self.params[name], tensor)


def _take_over(name: str, param: nn.Parameter, whole: nn.Parameter) -> None:
    """What was said of a whole parameter inside of full_parameters(), beside its values."""
    if whole._backward_hooks or whole._post_accumulate_grad_hooks:
        raise ValueError(f"a hook was registered on {name} inside of full_parameters(), where the whole stands for it: register it outside")
    if param.requires_grad != whole.requires_grad:
        param.requires_grad_(whole.requires_grad)
    vars(param).update(own_attributes(whole))


def _written(param: nn.Parameter) -> tuple[int, int]:
    """Another one when the memory of a parameter has been written to, or is another."""
    here = local(param)
    return here._version, here.data_ptr()


def _home_of(lies: Lies, whole: Tensor) -> Tensor:
    """A whole tensor where it was before; here, if it had no data there."""
    return whole if lies.home.type == "meta" else whole.to(lies.home)


def whole_again(model: nn.Module) -> None:
    """Collective: if the model was compiled before, its parameters and buffers become whole, for it to be compiled again."""
    close_steps()
    parts = {id(p): p for p in model.parameters() if isinstance(p, Part)}
    trees = [tree for tree in _trees if any(id(param) in parts for param in tree.params.values())]
    for tree in trees:
        tree.leaves.clear()  # they would keep the memory of the parts
    for param in parts.values():
        lies = lies_of(param)
        grad = param.grad
        whole = None if grad is None else _home_of(lies, lies.gather(local(grad)))
        become_whole(param, _home_of(lies, lies.gather(local(param))))
        param.grad = whole
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and is_part(buffer):
                lies = lies_of(buffer)  # type: ignore[arg-type]
                module._buffers[name] = _home_of(lies, lies.gather(local(buffer)))
    for tree in trees:
        shared = [name for name, param in tree.params.items() if id(param) in parts]
        tree.gone = (
            "the model was compiled again: use the new one"
            if len(shared) == len(tree.params)
            else f"{type(model).__name__} was compiled, which shares {shared[0]} with it: put both into one module, whose forward calls "
            f"the one or the other, and compile that instead"
        )
