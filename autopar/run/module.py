"""The module that a user trains: an emitted module, its mesh, and this rank's part of the parameters."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autopar.ir import Layout
from autopar.run import comm, state
from autopar.run.buckets import Bucket, Held, hold, make_buckets, make_units, rest
from autopar.run.dtypes import dtype_named
from autopar.run.gathered import GatheredWhereUsed, Orders, Units
from autopar.run.inputs import Batch, micro_batch
from autopar.run.launch import default_device, join_process_group
from autopar.run.manifest import BufferSpec, Manifest, ParamSpec
from autopar.run.mesh import Axis, Mesh
from autopar.run.region import Region, regions_of, without_unreached
from autopar.run.schedule import Pipeline, accumulate
from autopar.run.slices import local_slice
from autopar.run.stage import Stage
from autopar.run.weights import Step, Weights

__all__ = ["Emitted", "ParallelModule"]


class Emitted(Protocol):
    """What an emitted module has; it may also have `prologue(w, mesh, *, ...)`, see ParallelModule."""

    @property
    def MANIFEST(self) -> Manifest: ...  # noqa: N802

    @property
    def STAGES(self) -> tuple[type[Stage], ...]: ...  # noqa: N802


Key = tuple[bool, tuple[tuple[object, tuple[int, ...]], ...]]  # training mode, and the shape of each input
Another = Callable[["ParallelModule", bool, Any], tuple[Emitted, Mapping[str, Tensor]]]


class Form:
    """What an emitted module runs, for its input shapes and its mode. constants: of this rank, by name."""

    def __init__(self, emitted: Emitted, constants: Mapping[str, Tensor], mesh: Mesh, device: torch.device, *, local_batch: bool) -> None:
        manifest = emitted.MANIFEST
        for library in manifest.libraries:
            importlib.import_module(library)
        if len(emitted.STAGES) != mesh.pp.size:
            raise ValueError(f"the emitted module has {len(emitted.STAGES)} stages and a mesh with pp={mesh.pp.size}")
        self.manifest, self.constants = manifest, constants
        others: Mapping[str, Any] = constants  # submodules stand where tensors do
        self.regions = tuple(r for r in others.values() if isinstance(r, Region))
        self.batch = Batch(manifest, mesh, device, local=local_batch)
        self.prologue: Callable[..., Mapping[str, Tensor]] | None = getattr(emitted, "prologue", None)
        self.loss_dtype: torch.dtype = dtype_named(emitted.STAGES[-1].sends[0][1]) if mesh.pp.size > 1 else torch.float32
        self.stage = emitted.STAGES[mesh.pp.rank]()
        self.stage.mesh = mesh
        self.wanted = _keywords(self.stage.forward)
        self.pipeline: Pipeline | None = None
        if mesh.pp.size > 1:
            self.pipeline = Pipeline(
                self.stage, mesh, micro_batches=manifest.micro_batches, schedule=manifest.schedule, device=device
            )
        self.key: Key = (manifest.training, self.batch.expected)


class _Deposit(torch.autograd.Function):
    """loss -> loss, whose backward returns the gradients of the parameters at rest."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Callable[[Tensor], list[Tensor | None]], *params: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward() a second time on the loss of one step: call the model again")
        gradients, ctx.gradients = ctx.gradients, None
        return (None, None, *gradients(grad))


class ParallelModule(nn.Module):
    """A model that several processes train together, each with a part of it.

        loss = model(**batch)   # the global batch on every rank; the global loss on every rank
        loss.backward()         # reduces gradients; with a pipeline or micro-batches the rest of backward is done by now
        optimizer.step()        # on the parts of the parameters that rest here

    Under torch.no_grad() a call computes the loss alone.

    emitted: the emitted module (MANIFEST, STAGES and perhaps prologue). tensors: global tensors by name, of the parameters,
    buffers and constants in the manifest; rank 0's are given to all ranks, and the other ranks' are not read.
    device: by default this process's GPU, or the CPU. local_batch: each data-parallel rank is given its own part of the
    batch. debug: before each step all ranks compare what they were given (also AUTOPAR_DEBUG=1).

    Collective: all ranks build it and call its methods together. Raises LaunchError if the number of processes is not
    that of the mesh, ValueError if `tensors` do not fit the manifest.
    """

    # All of these are kept from nn.Module's registry, which has the user's names alone.
    manifest: Manifest
    device: torch.device
    mesh: Mesh
    debug: bool
    _held: dict[str, Held]
    _names: dict[str, str]
    _tied: dict[tuple[int, ...], Axis]
    _buckets: tuple[Bucket, ...]
    _units: Units
    _orders: Orders
    _forms: dict[Key, Form]
    _another: Another | None
    _seed: int
    _steps: int
    plan: Any = None  # the Plan and the emitted source, where autopar.compile made this module
    source: str | None = None

    def __init__(
        self,
        emitted: Emitted,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device | str | None = None,
        local_batch: bool = False,
        debug: bool | None = None,
    ) -> None:
        super().__init__()
        manifest = emitted.MANIFEST
        keep = self.__dict__
        keep["manifest"] = manifest
        keep["device"] = device = torch.device(device) if device is not None else default_device()
        join_process_group(device)
        keep["mesh"] = mesh = Mesh(manifest.mesh, device)
        keep["debug"] = debug if debug is not None else int(os.environ.get("AUTOPAR_DEBUG") or 0) >= 1
        keep["_tied"] = {s: mesh.stages(s) for s in sorted({p.stages for p in manifest.params if len(p.stages) > 1})}
        keep["_held"], keep["_names"] = {}, {}
        constants = self._take(tensors)
        keep["_buckets"] = make_buckets(self._held.values(), mesh)
        keep["_units"] = Units(make_units(self._held.values(), mesh))
        keep["_orders"] = {}
        form = Form(emitted, constants, mesh, device, local_batch=local_batch)
        keep["_forms"], keep["_another"] = {form.key: form}, None
        self.training = manifest.training
        keep["_seed"] = mesh.agree(torch.initial_seed(), device)
        keep["_steps"] = 0

    # --------------------------------------------------------------------------------------------------------- training
    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """The loss of a batch (a scalar, the same on every rank). The arguments are those of the original model.

        Raises TypeError or ValueError naming the input that is missing, unknown or not as planned; LaunchError in debug
        mode if ranks were given different batches.
        """
        mesh = self.mesh
        form = self._form_for(args, kwargs)
        manifest = form.manifest
        bound = form.batch.bind(args, kwargs)
        if self.debug:
            form.batch.check_equal(bound)
        inputs = form.batch.own_parts(bound)
        n = manifest.micro_batches
        step = Step(
            held=self._held,
            names=self._names,
            buffer=functools.partial(self._buffer, constants=form.constants),
            buckets=self._buckets,
            where_used=GatheredWhereUsed(self._units, self._orders),
            passes=n,
        )
        form.stage.train(self.training)
        form.stage.weights = Weights(step)
        for r in form.regions:
            r.reached.clear()
        with self._random_numbers():
            extra = _run_prologue(form, mesh, inputs)
            torch.manual_seed((torch.initial_seed() + 0xD1342543DE82EF95 * (mesh.pp.rank + 1)) % 2**63)  # stages draw different numbers
            parts = [
                {k: v for k, v in (micro_batch(manifest.inputs, inputs, i, n) | _part(form, extra, i)).items() if k in form.wanted}
                for i in range(n)
            ]
            if mesh.pp.size == 1 and n == 1:
                with step.saving():
                    (loss,) = form.stage(**parts[0])
            elif form.pipeline is None:
                loss = accumulate(form.stage, parts, step.saving)
            else:
                loss = form.pipeline.run(parts, step.saving)
        del form.stage.weights  # so that gathered copies live no longer than the step
        if mesh.pp.size > 1:
            loss = torch.empty((), dtype=form.loss_dtype, device=self.device) if loss is None else loss
            comm.broadcast_(loss, mesh.pp.ranks[-1], mesh.pp.group)
        trainable = [one for one in self._held.values() if one.param.requires_grad]
        if not (torch.is_grad_enabled() and trainable):
            step.finish()
            return loss.detach()

        def gradients(grad: Tensor) -> list[Tensor | None]:
            whole = loss.requires_grad  # else forward has run backward too, from a gradient of 1
            if whole:
                loss.backward(grad)
            found = without_unreached(step.finish(), manifest.params, form.regions, self._names, (mesh.dp, mesh.tp))
            if not whole:
                for value in found.values():
                    value.mul_(grad)
            return [found.get(one.spec.name) for one in trainable]

        return _Deposit.apply(loss.detach(), gradients, *(one.param for one in trainable))

    def train_step(self, *args: object, **kwargs: object) -> Tensor:
        """Forward and backward; returns the loss, detached. A single mapping is taken as keyword inputs."""
        if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
            return self.train_step(**args[0])
        loss: Tensor = self(*args, **kwargs)
        loss.backward()
        return loss.detach()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective: scale all gradients so that the norm of them all is at most max_norm; returns the norm before it.
        The figures are those of torch.nn.utils.clip_grad_norm_ on the original model."""
        dtype = functools.reduce(torch.promote_types, (dtype_named(spec.dtype) for spec in self.manifest.params))
        return state.clip_grad_norm_(
            self._held.values(), self.mesh, max_norm=max_norm, norm_type=norm_type, dtype=dtype, device=self.device
        )

    # ------------------------------------------------------------------------------------------------------------ state
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Collective: the state_dict of the original model (all aliases, persistent buffers), on the CPU; it loads there
        with strict=True. rank0_only: the other ranks get an empty dict."""
        kept = not rank0_only or self.mesh.rank == 0
        full: dict[str, Tensor] = {}
        for spec, tensor in state.assemble(self._persistent(), self._at_rest, self.mesh, self.device):
            if kept:
                value = tensor.to("cpu", copy=True)
                full.update((name, value) for name in (spec.name, *_aliases(spec)))
        return full

    def full_gradients(self) -> dict[str, Tensor]:
        """Collective: the gradient of every trainable parameter, whole, on the CPU; zeros where it has none."""

        def local(name: str) -> Tensor:
            param = self._held[name].param
            return torch.zeros_like(param) if param.grad is None else param.grad

        specs = [spec for spec in self.manifest.params if spec.trainable]
        return {spec.name: tensor.to("cpu", copy=True) for spec, tensor in state.assemble(specs, local, self.mesh, self.device)}

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor] | None) -> None:
        """Collective: take the state_dict of the original model; rank 0's is given to all, and other ranks may pass None.

        Raises ValueError on every rank if names are missing or unknown, or a shape or dtype differs.
        """
        given = dict(state_dict or {})
        specs = self._persistent()
        known = {name: spec.name for spec in specs for name in (spec.name, *_aliases(spec))}
        tensors = {known[name]: tensor for name, tensor in given.items() if name in known}
        if unknown := self.mesh.agree(sorted(set(given) - set(known)), self.device):
            raise ValueError(f"the state_dict has names that {self.manifest.model} has not: {', '.join(unknown)}")
        with torch.no_grad():
            for spec, full in state.distribute(specs, tensors, self.mesh, self.device):
                if self._holds(spec):
                    self._at_rest(spec.name).copy_(rest(spec, full, self.mesh))

    def adopt(self, params: Mapping[str, nn.Parameter]) -> None:
        """Let these parameters of the original model, by name, be the parts that rest here, so that an optimizer that holds
        them trains this module. Parameters of other stages become empty."""
        known = {name: spec.name for spec in self.manifest.params for name in (spec.name, *spec.aliases)}
        for name, original in params.items():
            held = self._held.get(known.get(name, ""))
            if held is None:
                original.data = original.data.new_empty(0)
            elif held.param is not original:
                original.data = held.param.data
                held.param = original
                _register(self, name, original)
            else:
                _register(self, name, original)

    def part_of(self, name: str) -> str:
        """Which part of a parameter rests here, as text; ranks that name the same part must hold the same bits."""
        held = self._held[self._names[name]]
        cut = [f"{axis}:{self.mesh.axis(axis).rank}" for axis, text in held.spec.layouts.items() if text.startswith("S(")]
        return " ".join([held.spec.name, *cut, *([f"zero:{self.mesh.dp.rank}"] if held.zero is not None else [])])

    # ---------------------------------------------------------------------------------------------------------- private
    def _form_for(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Form:
        """What runs for a call: in another mode than captured, or for inputs of other shapes, another form of the same
        decisions, where autopar.compile has left the means to make one. Raises ValueError."""
        first = next(iter(self._forms.values()))
        shapes = first.batch.shapes(args, kwargs)
        if [path for path, _ in shapes] != [path for path, _ in first.batch.expected]:
            return first  # which says what is missing or not known
        key = (self.training, shapes)
        if self.debug:
            self.mesh.check_equal(key, "the shapes of the inputs, or the training mode,")
        if key not in self._forms and self._another is not None:
            inputs = {**dict(zip(first.manifest.positional, args, strict=False)), **kwargs} if kwargs else args
            emitted, tensors = self._another(self, self.training, inputs)
            constants = {spec.name: rest(spec, full, self.mesh) for spec, full in self._constants_of(emitted.MANIFEST, tensors)}
            constants |= regions_of(emitted.MANIFEST, tensors)
            self._forms[key] = Form(emitted, constants, self.mesh, self.device, local_batch=False)
        if key in self._forms:
            return self._forms[key]
        if self.training != first.manifest.training and first.manifest.mode_dependent:
            modes = {True: "training", False: "evaluation"}
            raise ValueError(
                f"{first.manifest.model} was captured in {modes[first.manifest.training]} mode and is called in {modes[self.training]} "
                f"mode, in which it computes something else ({', '.join(first.manifest.mode_dependent)}). Load full_state_dict() into the "
                f"original model to evaluate it, or compile it in that mode"
            )
        return first

    def _constants_of(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Iterator[tuple[BufferSpec, Tensor]]:
        constants = [spec for spec in manifest.buffers if spec.constant and not spec.region]
        return ((spec, full) for spec, full in state.distribute(constants, tensors, self.mesh, self.device) if self._holds(spec))  # type: ignore[misc]

    def _take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep this rank's parts of the global tensors, under their original names; returns those of the constants."""
        constants = regions_of(self.manifest, tensors)
        specs: tuple[ParamSpec | BufferSpec, ...] = (*self.manifest.params, *(b for b in self.manifest.buffers if not b.region))
        aliases: list[tuple[str, nn.Parameter]] = []
        for spec, full in state.distribute(specs, tensors, self.mesh, self.device):
            if not self._holds(spec):
                continue
            if isinstance(spec, ParamSpec):
                one = hold(spec, full, self.mesh, self._tied.get(spec.stages))
                self._held[spec.name] = one
                self._names.update((name, spec.name) for name in (spec.name, *spec.aliases))
                _register(self, spec.name, one.param)
                aliases.extend((alias, one.param) for alias in spec.aliases)
            elif spec.constant:
                constants[spec.name] = rest(spec, full, self.mesh)
            else:
                _register(self, spec.name, rest(spec, full, self.mesh), persistent=spec.persistent)
        for name, param in aliases:
            _register(self, name, param)
        return constants

    def _holds(self, spec: ParamSpec | BufferSpec) -> bool:
        return self.mesh.pp.rank in (spec.stages or (0,))

    def _persistent(self) -> tuple[ParamSpec | BufferSpec, ...]:
        return (*self.manifest.params, *(b for b in self.manifest.buffers if b.persistent and not b.constant))

    def _at_rest(self, name: str) -> Tensor:
        return self._held[name].param if name in self._held else self._buffer(name)

    def _buffer(self, name: str, constants: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        if name in constants:
            return constants[name]
        path, _, last = name.rpartition(".")
        module: nn.Module | None = self
        for part in path.split(".") if path else ():
            module = module._modules.get(part) if module is not None else None
        found = module._buffers.get(last) if module is not None else None
        if found is None:
            raise KeyError(f"stage {self.mesh.pp.rank} of {self.manifest.model} holds nothing named {name!r}")
        return found

    @contextlib.contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Generators that are equal on all ranks and differ from step to step; the user's are left as they were."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed((self._seed + 0x9E3779B97F4A7C15 * self._steps) % 2**63)
            self.__dict__["_steps"] += 1
            yield


def _run_prologue(form: Form, mesh: Mesh, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if form.prologue is None:
        return {}
    wanted = _keywords(form.prologue)
    with torch.no_grad():
        return dict(form.prologue(form.stage.weights, mesh, **{k: v for k, v in inputs.items() if k in wanted}))


def _part(form: Form, made: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """What micro-batch `index` gets of the prologue's results."""
    over_time, n = form.manifest.prologue, form.manifest.micro_batches
    return {name: local_slice(value, Layout.parse(over_time.get(name, "R")), index, n) for name, value in made.items()}


def _keywords(fn: Callable[..., object]) -> frozenset[str]:
    return frozenset(p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY)


def _aliases(spec: ParamSpec | BufferSpec) -> tuple[str, ...]:
    return spec.aliases if isinstance(spec, ParamSpec) else ()


def _register(root: nn.Module, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
    """Make a parameter or buffer known to nn.Module under a dotted name, through empty modules that hold it. Straight into
    the registries: the user's names may be those of attributes here."""
    *path, last = name.split(".")
    module = root
    for part in path:
        module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module._parameters[last] = tensor
    else:
        module._buffers[last] = tensor
        if not persistent:
            module._non_persistent_buffers_set.add(last)
