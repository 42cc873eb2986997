"""The batch: from the user's call to the tensors that a rank's stages read, checked on the way."""

from __future__ import annotations

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.axes import BATCH, TIME, cut_order
from autopar.errors import LaunchError
from autopar.ir import Layout, R, S
from autopar.run import comm, record
from autopar.run.asked import check_not_transformed, kinds_of, said_of
from autopar.run.dtypes import dtype_named
from autopar.run.manifest import InputSpec, Manifest
from autopar.run.mesh import Mesh
from autopar.run.objects import key_name, make_known, parts_of
from autopar.run.part import is_part
from autopar.run.slices import joined, local_slice
from autopar.run.varying import NONE, NUMBERS, Number, Varied, as_tensor
from autopar.run.wholes import whole_of

__all__ = [
    "Arguments", "Batch", "Path", "Shapes", "Structure", "arguments_of", "as_example", "as_programs_take", "check_attributes", "given_as",
    "micro_batch", "not_dense", "positional_names", "structure_of",
]  # fmt: skip

Path = tuple[str | int, ...]
Shape = tuple[torch.dtype, tuple[int, ...], bool]  # of a tensor, and whether it requires a gradient
Shapes = tuple[tuple[Path, Shape | str], ...]  # of each leaf of a call: that of a tensor, or the value of anything else
Structure = tuple[Any, ...]  # of a call: its containers, nested, with their types and keys


class Batch:
    """How the arguments of a call become the inputs of the stages, by what the manifest states.

    local: each dp rank is given only its own part of the batch.
    """

    def __init__(self, manifest: Manifest, mesh: Mesh, device: torch.device, *, local: bool) -> None:
        self._manifest, self._mesh, self._device, self.local = manifest, mesh, device, local
        self._positional = manifest.positional
        self._constants = {self.named(path): value for path, value in manifest.constant_inputs}
        layouts = [Layout.parse(spec.layouts.get(BATCH, "I")) if local else None for spec in manifest.inputs]
        shapes = [
            (dtype_named(s.dtype), x.local_shape(s.shape, mesh.dp.size) if x is not None else s.shape, s.grad)
            for s, x in zip(manifest.inputs, layouts, strict=True)
        ]
        # the inputs that are numbers which vary, and the place of each among them
        self._numbers = {spec.name: int(spec.path[1]) for spec in manifest.inputs if spec.path[:1] == (NUMBERS,)}
        values = [(path, _value(v)) for path, v in self._constants.items() if v is not None]
        given = zip(manifest.inputs, shapes, strict=True)
        self.expected = _sorted([*((self.named(s.path), shape) for s, shape in given if s.name not in self._numbers), *values])

    def shapes(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Shapes:
        """The path of each leaf of a call, with the dtype and shape of a tensor (and whether it requires a gradient) or the value of
        anything else but None, sorted; `expected` is that of the planned call."""
        leaves, on = list(self._leaves(args, kwargs)), torch.is_grad_enabled()
        for path, leaf in leaves:
            if isinstance(leaf, Tensor) and (lies := not_dense(leaf)):
                name = _text(self.named(path))
                raise ValueError(f"{self._manifest.model} was given a {lies[0]} tensor for its input {name}: {lies[1]}")
        check_not_transformed(self._manifest.model, (leaf for _, leaf in leaves if isinstance(leaf, Tensor)))
        found = (
            (path, (leaf.dtype, tuple(leaf.shape), on and leaf.requires_grad) if isinstance(leaf, Tensor) else _value(leaf))
            for path, leaf in leaves
            if leaf is not None
        )
        return _sorted((self.named(path), what) for path, what in found)

    def beside(self, args: Sequence[object], kwargs: Mapping[str, object], *, same: bool, asks: Collection[str]) -> Shapes:
        """What else a forward may ask of the tensors of a call. same: which inputs are the same tensor as one before (`a is b`). asks: the
        names of what it asks of each (`x.is_contiguous()`), of which what a copy would not say is found."""
        first: dict[int, str] = {}
        found: list[tuple[Path, str]] = []
        for path, leaf in self._leaves(args, kwargs):
            if isinstance(leaf, Tensor):
                name = _text(self.named(path))
                if same and (before := first.setdefault(id(leaf), name)) != name:
                    found.append((self.named(path), f"the same tensor as {before}"))
                found += [(self.named(path), said) for said in said_of(leaf, asks)]
        return _sorted(found)

    def bind(
        self, args: Sequence[object], kwargs: Mapping[str, object], varied: Varied = NONE, numbers: Sequence[Number | Tensor] = ()
    ) -> dict[str, Tensor]:
        """name of the input -> the tensor that the call gives for it. varied: the numbers that are inputs, and tensors in attributes;
        numbers: what they are.

        Raises TypeError (missing, unknown, not a tensor, wrong dtype) or ValueError (wrong shape or batch size, another
        constant than captured); each names the input.
        """
        found = {self.named(path): leaf for path, leaf in self._leaves(args, kwargs)}
        for number in varied.leaves:
            found.pop(number.argument, None)
        bound: dict[str, Tensor] = {}
        missing: list[str] = []
        for spec in self._manifest.inputs:
            if spec.name in self._numbers:
                bound[spec.name] = _standing(numbers[self._numbers[spec.name]], spec.grad)
                continue
            path = self.named(spec.path)
            if path in found:
                bound[spec.name] = self._checked(spec, found.pop(path))
            else:
                missing.append(_text(path))
        if missing:
            raise TypeError(f"{self._manifest.model} needs inputs that the call does not give: {', '.join(missing)}")
        for path, leaf in found.items():
            self._check_constant(path, leaf)
        return bound

    def own_parts(self, bound: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of each input, on the device."""
        parts: dict[str, Tensor] = {}
        for spec in self._manifest.inputs:
            value = bound[spec.name].resolve_conj().resolve_neg()
            for name in cut_order():
                axis = self._mesh.axis(name)
                if not (name == BATCH and self.local):
                    value = local_slice(value, Layout.parse(spec.layouts.get(name, "I")), axis.rank, axis.size)
            parts[spec.name] = value.to(self._device, non_blocking=True)
        return parts

    def check_equal(self, bound: Mapping[str, Tensor]) -> None:
        """Collective: raise LaunchError unless all ranks were given the same data (local: all of one data-parallel rank; of an input that
        is not divided, all). Where local parts are all the same, it is warned of: nothing is wrong with that, but a sampler is missing as
        a rule."""
        if not self._mesh.talks:
            return
        sums = [int.from_bytes(hashlib.sha256(_bytes(t)).digest()[:7], "little") for t in bound.values()]
        mine = torch.tensor([self._mesh.dp.rank if self.local else 0, *sums], device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(self._mesh.world)]
        record.entered(record.AGREEMENT, self._mesh.everyone.name)
        dist.all_gather(everyone, mine, group=self._mesh.everyone.group)
        record.left()
        one = self._mesh.dp.size == 1
        divided = {s.name for s in self._manifest.inputs if self.local and (one or Layout.parse(s.layouts.get(BATCH, "I")).is_shard)}
        first: dict[tuple[str, int], tuple[int, int]] = {}
        parts: dict[int, list[int]] = {}
        for rank, (part, *theirs) in enumerate(torch.stack(everyone).tolist()):
            parts.setdefault(part, theirs)
            for name, found in zip(bound, theirs, strict=True):
                other, expected = first.setdefault((name, part if name in divided else 0), (rank, found))
                if found != expected and name in self._numbers:
                    raise LaunchError(
                        f"{name[2:]} is another on rank {other} than on rank {rank}: what a forward reads is to be set on all ranks alike"
                    )
                if found != expected:
                    raise LaunchError(
                        f"input {name!r} differs between rank {other} and rank {rank}, which must be given the same data. "
                        + (
                            "All ranks of one data-parallel rank load the same part: autopar.sampler(dataset, model) says which"
                            if name in divided
                            else "The plan does not divide it among data-parallel ranks: give the same to all of them"
                            if self.local
                            else "Give every rank the same global batch (no DistributedSampler, the same seed for shuffling), or compile "
                            "with local_batch=True, and load each data-parallel rank's own part with autopar.sampler(dataset, model)"
                        )
                    )
        if len(parts) > 1 and len(set(map(tuple, parts.values()))) == 1:
            warnings.warn(
                "every data-parallel rank was given the same samples: with local_batch=True each is to be given a part of its own, which "
                "autopar.sampler(dataset, model) loads",
                stacklevel=2,
            )

    def whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Collective: the arguments with the global batch, of which this data-parallel rank was given its own part. An input that was not
        planned with is a part, too, where it has as many samples as those that were."""
        layouts = {self.named(spec.path): Layout.parse(spec.layouts.get(BATCH, "I")) for spec in self._manifest.inputs}
        given = self.by_path(args, kwargs)
        samples = {given[path].shape[0] for path, layout in layouts.items() if layout == S(0) and path in given and given[path].dim()}

        def joined_at(path: Sequence[Any], leaf: Any) -> Any:
            keys: tuple[Any, ...] = tuple(map(key_name, path))
            if not self.local or not isinstance(leaf, Tensor):
                return leaf
            unplanned = S(0) if leaf.dim() and {leaf.shape[0]} == samples else R
            layout = layouts.get(self.named(keys[1:]), unplanned)
            if not layout.is_shard:
                return leaf
            parts = comm.all_gather(leaf.detach().to(self._device), self._mesh.dp)
            return joined(parts, layout.dim, layout.groups).to(leaf.device).requires_grad_(leaf.requires_grad)

        found = pytree.tree_map_with_path(joined_at, (tuple(args), dict(kwargs)))
        return found[0], found[1]

    def by_path(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[Path, Tensor]:
        """The tensors of a call, by their paths as `named` gives them."""
        return {self.named(path): leaf for path, leaf in self._leaves(args, kwargs) if isinstance(leaf, Tensor)}

    def argument(self, args: Sequence[object], kwargs: Mapping[str, object], path: Path) -> object:
        """The leaf of a call at a path as `named` gives it; None if there is none."""
        return next((leaf for found, leaf in self._leaves(args, kwargs) if self.named(found) == path), None)

    def named(self, path: Path) -> Path:
        """A positional argument's path begins with the name of its parameter, where that is known."""
        first = path[0]
        return (self._positional[first], *path[1:]) if isinstance(first, int) and first < len(self._positional) else tuple(path)

    def _leaves(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[Path, object]]:
        if len(args) > len(self._positional) > 0:
            raise TypeError(f"{self._manifest.model} takes {len(self._positional)} positional inputs; the call gives {len(args)}")
        for index, value in enumerate(args):
            if index < len(self._positional) and self._positional[index] in kwargs:
                raise TypeError(f"input {self._positional[index]!r} is given twice: by position and by name")
            yield from _walk((index,), value)
        for name, value in kwargs.items():
            yield from _walk((name,), value)

    def _checked(self, spec: InputSpec, value: object) -> Tensor:
        name = _text(self.named(spec.path))
        if not isinstance(value, Tensor):
            raise TypeError(f"input {name} must be a tensor; got {type(value).__name__}")
        if value.requires_grad and torch.is_grad_enabled() and not spec.grad:
            raise ValueError(
                f"input {name} requires a gradient, for which this module was not made. Give it detached ({name.strip(chr(39))}.detach()), "
                f"or compile the model with example_inputs that require it"
            )
        if _dtype(value) != spec.dtype:
            raise TypeError(f"input {name} must be {spec.dtype}, as it was when the model was captured; got {_dtype(value)}")
        layout = Layout.parse(spec.layouts.get(BATCH, "I"))
        expected = layout.local_shape(spec.shape, self._mesh.dp.size) if self.local else spec.shape
        if tuple(value.shape) == expected:
            return value
        split = {Layout.parse(text).dim for text in spec.layouts.values()} - {-1}
        same_but_batch = value.dim() == len(expected) and all(
            a == b or dim in split for dim, (a, b) in enumerate(zip(value.shape, expected, strict=True))
        )
        kind = "the part of one data-parallel rank" if self.local else "the global batch"
        hint = (
            f" This module was planned for batches of this size ({kind}); give such batches (drop the last short one), or compile "
            "again for the other size."
            if same_but_batch
            else " The plan does not divide this input among data-parallel ranks: give each of them all of it."
            if self.local and not layout.is_shard and self._mesh.dp.size > 1
            else ""
        )
        raise ValueError(f"input {name} must have shape {expected}; got {tuple(value.shape)}.{hint}")

    def _check_constant(self, path: Path, value: object) -> None:
        if path in self._constants:
            captured = self._constants[path]
            if isinstance(value, Tensor) or not (value == captured or (value != value and captured != captured)):  # nan is as nan
                raise ValueError(f"input {_text(path)} was {captured!r} when the model was captured, and is fixed; got {value!r}")
        elif value is not None:
            known = ", ".join(_text(self.named(spec.path)) for spec in self._manifest.inputs)
            raise TypeError(f"{self._manifest.model} was captured without input {_text(path)}; its inputs are: {known}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Of one call, some by position and some by name: not all may be given by name. given: as the user's call had them, if that is not
    known of these."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the positional parameters of a model's forward, in order. None where it takes any number of them (*args)."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    found = inspect.signature(model.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in found):
        return ()
    return tuple(p.name for p in found if p.kind in kinds)


def as_example(args: tuple[Any, ...], kwargs: dict[str, Any], given: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> Arguments:
    """The arguments of a call as example inputs; detached where gradients are off. given: as of `Arguments`, by default these."""
    make_known((args, kwargs))
    given = given or (args, kwargs)
    if not torch.is_grad_enabled():
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    return Arguments(args, kwargs, given)


def given_as(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of example inputs as the user gave them, of which code may ask what it does not ask of a copy."""
    return inputs.given if isinstance(inputs, Arguments) and inputs.given is not None else arguments_of(inputs)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as a call is given them: by position and by name, with Python's numbers in the place of numpy's."""
    make_known((inputs.args, inputs.kwargs) if isinstance(inputs, Arguments) else inputs)
    if isinstance(inputs, Arguments):
        args, kwargs = inputs.args, dict(inputs.kwargs)
    else:
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    if any(map(_is_of_numpy, pytree.tree_leaves((args, kwargs)))):
        args, kwargs = pytree.tree_map(lambda leaf: leaf.item() if _is_of_numpy(leaf) else leaf, (args, kwargs))
    return args, kwargs


def as_programs_take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with Python's numbers in the place of numpy's, and whole tensors in that of parts of parameters
    (`model(x, model.embed.weight)`), of which a stage takes what it reads: collective where there are such."""
    if all(type(value) is Tensor for value in (*args, *kwargs.values())):  # as most batches are
        return args, kwargs
    found = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_part(leaf) or _is_of_numpy(leaf)}
    if not found:
        return args, kwargs
    taken = {key: _whole(leaf) if is_part(leaf) else leaf.item() for key, leaf in found.items()}
    with_these: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(lambda leaf: taken.get(id(leaf), leaf), (args, kwargs))
    return with_these


def _whole(part: Any) -> Tensor:
    """The whole of a part, which is a parameter to `isinstance` where that is one."""
    whole = whole_of(part)
    if isinstance(part, torch.nn.Parameter):
        whole._is_param = True
    return whole


def _is_of_numpy(leaf: object) -> bool:
    """Whether it is a number of numpy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.generic)


def structure_of(bound: inspect.BoundArguments, reads: Callable[[str], bool]) -> Structure:
    """How the arguments of a call are put together, which code may ask beside the shapes of tensors: the kinds of containers, the order
    of their keys, what is empty, and where None stands; of arguments by name, and not of those that are left to their defaults, nor of
    numbers and strings. reads: whether the code reads a name, of the attributes that tensors and classes of objects have. Raises TypeError
    for such an attribute of a tensor, which no trace keeps."""
    parameters = bound.signature.parameters
    given = sorted((name, value) for name, value in bound.arguments.items() if value is not parameters[name].default)
    return tuple((name, _structure(value, reads)) for name, value in given if not isinstance(value, str | float | int))


def _structure(value: Any, reads: Callable[[str], bool]) -> Any:
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        check_attributes(value, reads)
        return ""
    if isinstance(value, str | float | int):
        return ""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping):
        return kind, *((str(key), _structure(child, reads)) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return kind, *(_structure(child, reads) for child in value)
    settings = {k: v for cls in reversed(type(value).__mro__) for k, v in vars(cls).items() if isinstance(v, str | float | int)}
    fields = ((str(name), _structure(child, reads)) for name, child in parts_of(value))
    return kind, tuple(sorted((k, repr(v)) for k, v in settings.items() if not k.startswith("_") and reads(k))), *fields


def check_attributes(tensor: Tensor, reads: Callable[[str], bool]) -> None:
    """TypeError for an attribute of the user's that code may read, and for a class of the tensor's that it may ask for. reads: as of
    `structure_of`."""
    if type(tensor) is Tensor and not vars(tensor):
        return
    if read := [name for name in vars(tensor) if not name.startswith("_") and reads(name)]:
        raise TypeError(
            f"a tensor that the model is given has the attribute {read[0]}, which its code may read, and which a copy of the tensor has "
            f"not: give it to the model as an input of its own"
        )
    if asked := [kind for kind in kinds_of(tensor) if reads(kind)]:
        raise TypeError(
            f"a tensor that the model is given is a {asked[0]}, for which its code may ask, and which a copy of the tensor is not: give "
            f"the model a plain tensor (x.view_as(x), x.as_subclass(torch.Tensor)), and what it shall know of it as an argument of its own"
        )


def not_dense(tensor: Tensor) -> tuple[str, str] | None:
    """How a tensor lies in memory that no program is given, and what to do; None of a dense one."""
    if tensor.is_nested:
        return "nested", "give the model a padded tensor, and the lengths or a mask"
    if hasattr(type(tensor), "__tensor_flatten__"):  # it holds others, as quantized ones and those of torch.distributed do
        return type(tensor).__name__, "give the model plain tensors; quantize (torchao) and distribute (DTensor) none before it is compiled"
    return None if tensor.layout == torch.strided else ("sparse", "give the model the dense one (.to_dense()), or its indices and values")


def micro_batch(specs: Sequence[InputSpec], bound: Mapping[str, Tensor], index: int, n: int) -> dict[str, Tensor]:
    """Micro-batch `index` of n of the inputs; those without a layout over 'time' are whole in each."""
    return {s.name: local_slice(bound[s.name], Layout.parse(s.layouts.get(TIME, "I")), index, n) for s in specs}


def _sorted(shapes: Iterable[tuple[Path, Shape | str]]) -> Shapes:
    return tuple(sorted(shapes, key=lambda shape: repr(shape[0])))


def _value(leaf: object) -> str:
    return f"{type(leaf).__name__} {leaf!r}"


def _standing(value: Number | Tensor, grad: bool) -> Tensor:
    """A number or a tensor that stands in an attribute, as a program takes it. grad: gradients go through it."""
    found = as_tensor(value)
    found = whole_of(found) if is_part(found) else found  # type: ignore[arg-type]
    return found if grad else found.detach()


def _walk(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _walk((*path, key), child)
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", range(len(value)))  # of a named tuple, as torch.export names what it is given
        for name, child in zip(names, value, strict=True):
            yield from _walk((*path, name), child)
    else:
        make_known(value)
        parts = list(parts_of(value))
        for name, child in parts:
            yield from _walk((*path, name), child)
        if not parts:
            yield path, value


def _text(path: Path) -> str:
    return f"{path[0]!r}" + "".join(f"[{part!r}]" for part in path[1:])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
