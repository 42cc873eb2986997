"""What a call of the parallel module returns, where the original returns more than its loss."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributions import Distribution, Transform
from torch.utils import _pytree as pytree

from autopar.axes import AXES, BATCH, TIME, cut_order
from autopar.errors import CaptureError
from autopar.ir import Layout, P, R
from autopar.run import collectives, comm
from autopar.run.dtypes import empty
from autopar.run.left_out import LeftOut
from autopar.run.manifest import Manifest, OutputSpec
from autopar.run.mesh import Mesh
from autopar.run.part import Parted
from autopar.run.plain import plainly
from autopar.run.slices import joined, local_slice
from autopar.run.varying import as_tensor

__all__ = [
    "Inner", "MadeOf", "Outputs", "Returned", "as_inner", "check_seen", "dicts_given", "found_in", "taken_apart", "written_into",
]  # fmt: skip


_OF_ITS_CLASS = frozenset((Tensor.__deepcopy__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__repr__))  # they look for a subclass


class Inner(Tensor):
    """A tensor that a call gives, of which the original computes others that it gives. Gradients go through it, but it is not told of those
    that come by the others: what would ask for its own raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of a plain tensor; torch.autograd.grad is asked for the gradient of none of these."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            for x in (inputs,) if isinstance(inputs, Tensor) else inputs:
                if isinstance(x, cls):
                    x._refuse()
        if func in _OF_ITS_CLASS or any(issubclass(kind, Parted) for kind in types):  # whose own functions are asked then
            args, kwargs = pytree.tree_map_only(cls, _as_plain, (args, kwargs))
            return func(*args, **kwargs)
        with plainly():
            return func(*args, **kwargs)

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "the gradient of an activation is asked for, of which the model computes other tensors that it returns or leaves: the parallel "
            "module does not know what comes by these. Register a hook on the activation inside of the model's forward "
            "(Tensor.register_hook)"
        )

    grad = property(_refuse, _refuse)
    retain_grad = register_hook = _refuse


def as_inner(tensors: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """Outputs by name, of which these refuse to tell their gradients."""
    return {name: t.as_subclass(Inner) if name in names and t.requires_grad else t for name, t in tensors.items()}


def _as_plain(x: Tensor) -> Tensor:
    with plainly():
        return x.as_subclass(Tensor)


# ------------------------------------------------------------------------------------------------------- all that it returns
@dataclass(frozen=True, slots=True)
class _Place:
    """Where tensor `index` of what the original returns beside the loss stands."""

    index: int


@dataclass(frozen=True, slots=True)
class _Number:
    """Where a Python number stands that is computed of the elements of the tensors at these places."""

    places: tuple[int, ...]
    computed: Callable[[Sequence[Any]], Any]

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """The number; of tensors that are not computed yet what stands for it."""
        own = [tensors[place] for place in self.places]
        with plainly():
            waits = any(x.is_meta for x in own)
        if waits:
            return LeftOut("a number that the model returns", lambda: torch.tensor(self._of_elements(own)))
        return self._of_elements(own)

    def _of_elements(self, tensors: Sequence[Tensor]) -> Any:
        return self.computed([x.item() for x in tensors])


@dataclass(frozen=True, slots=True)
class _Made:
    """A dataclass instance or a namespace: its fields are put into a copy of it."""

    like: Any
    fields: Returned

    def made(self, fields: Mapping[str, Any]) -> Any:
        """Another instance."""
        if isinstance(self.like, SimpleNamespace):
            return SimpleNamespace(**fields)
        return dataclasses.replace(self.like, **fields)


@dataclass(frozen=True, slots=True)
class _MadeDict:
    """A dict of a class of the user's: its items, and its attributes (None: they are its items)."""

    kind: type[dict[Any, Any]]
    attributes: Mapping[str, Any] | None
    fields: Returned

    def made(self, fields: Mapping[Any, Any]) -> Any:
        """Another instance."""
        base = OrderedDict if issubclass(self.kind, OrderedDict) else dict
        found = base.__new__(self.kind)
        base.update(found, fields)
        if self.attributes is None:
            found.__dict__ = found
        elif self.attributes:
            vars(found).update(self.attributes)
        return found


@dataclass(frozen=True, slots=True)
class _MadeObject:
    """An object of a class of torch.distributions: its attributes."""

    kind: type
    fields: Returned

    def made(self, fields: Mapping[str, Any]) -> Any:
        """Another instance."""
        found: Any = object.__new__(self.kind)
        vars(found).update(fields)
        return found


@dataclass(frozen=True, slots=True)
class _Own:
    """A list or dict that the model holds, without tensors: what is returned is that, which the loop may change."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Set:
    """A set of constants: each call gives another."""

    value: set[Any] | frozenset[Any]


_Record = _Made | _MadeDict | _MadeObject
_LOSS = object()
_DISTRIBUTIONS = (Distribution, Transform)
_COMPUTED = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


MadeOf = tuple[tuple[Tensor, ...], Callable[[Sequence[Any]], Any]]  # tensors of one element, and what computes a number of these
NumberOf = Callable[[Any], MadeOf | None]
_Dicts = Mapping[int | str, tuple[dict[Any, Any], dict[Any, Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """What the original returns, without its tensors. names: the program's output that each of these is. own_loss: False if it
    computes no loss, nor a function that was given: the user makes one of what it returns. inner: outputs of which others, or the loss, are
    computed. into: the dict among the arguments, by position or name, that the forward writes to and returns, and the keys that it
    writes. like: the shape and dtype of each tensor, for the global batch, where a call computes none of them."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    names: tuple[str, ...] = ()
    own_loss: bool = True
    inner: frozenset[str] = frozenset()
    into: tuple[int | str, tuple[object, ...]] | None = None
    like: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the tensors, for the global batch, where a call computes none of them."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.like)

    @property
    def numbers(self) -> tuple[bool, ...]:
        """Of each number in it whether it is one that is made of a tensor."""
        own = ((x.fields.numbers if isinstance(x, _Record) else (type(x) is _Number,)) for x in self.leaves if _has_numbers(x))
        return tuple(itertools.chain.from_iterable(own))

    def in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, in the order in which they stand, and each number that is made of some as one."""
        found = list[Tensor]()
        for x in self.leaves:
            if isinstance(x, _Record):
                found += x.fields.in_order(tensors)
            elif isinstance(x, _Number):
                found.append(as_tensor(x.of(tensors)))
            elif isinstance(x, _Place):
                found.append(tensors[x.index])
        return found

    def marked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs, of which those inside refuse to tell their gradients."""
        return as_inner(tensors, self.inner)

    @property
    def has_loss(self) -> bool:
        """Whether the loss is in it: else a function of the user's makes it."""
        return any(x is _LOSS or (isinstance(x, _Record) and x.fields.has_loss) for x in self.leaves)

    def put_together(self, loss: Tensor | None, tensors: Mapping[str, Tensor]) -> Any:
        """The same with these tensors in it."""
        return self._filled(loss, [tensors[name] for name in self.names])

    def given_back(self, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `put_together` returned; as the original, in the caller's own dict, where that is written to."""
        if self.into is None or type(result) is not dict:
            return result
        place, keys = self.into
        own = args[place] if isinstance(place, int) else kwargs[place]
        if type(own) is not dict:
            return result
        own.update((key, result[key]) for key in keys)
        return own

    def loss_in(self, result: Any) -> Tensor:
        """The loss in what `put_together` returned."""
        own = {id(x.value) for x in self.leaves if isinstance(x, _Own)}
        for here, leaf in zip(self.leaves, pytree.tree_leaves(result, is_leaf=lambda x: id(x) in own), strict=True):
            if here is _LOSS:
                return leaf
            if isinstance(here, _Record) and here.fields.has_loss:
                return here.fields.loss_in(_fields(leaf))
        raise ValueError("there is no loss in what the model returns")

    def _filled(self, loss: Tensor | None, tensors: Sequence[Tensor]) -> Any:
        def leaf(x: Any) -> Any:
            if isinstance(x, _Record):
                return x.made(x.fields._filled(loss, tensors))
            if isinstance(x, _Own):
                return x.value
            if isinstance(x, _Set):
                return type(x.value)(x.value)
            if isinstance(x, _Number):
                return x.of(tensors)
            return loss if x is _LOSS else tensors[x.index] if isinstance(x, _Place) else x

        return pytree.tree_unflatten([leaf(x) for x in self.leaves], self.spec)


def _is_constant(leaf: Any) -> bool:
    """Whether what each call returns there is known: a constant, or a set of constants."""
    return isinstance(leaf, _CONSTANTS) or (type(leaf) in (set, frozenset) and all(isinstance(x, _CONSTANTS) for x in leaf))


def _has_numbers(leaf: Any) -> bool:
    return isinstance(leaf, _Record) or type(leaf) in (_Number, *_NUMBERS)


def dicts_given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Dicts:
    """The arguments that are dicts, by position or name, each with a copy of it as it is."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {place: (x, dict(x)) for place, x in named if type(x) is dict}


def written_into(output: object, given: _Dicts) -> tuple[int | str, tuple[object, ...]] | None:
    """The argument that is the output itself, and the keys of what stands there for the first time. given: of `dicts_given`, before."""
    for place, (now, before) in given.items():
        if now is output and before.keys() <= now.keys():
            return place, tuple(key for key, value in now.items() if key not in before or value is not before[key])
    return None


def taken_apart(
    output: Any, loss: Tensor, *, own_loss: bool = True, held: Container[int] = (), all_of_it: bool = True,
    number_of: NumberOf = lambda _: None,
) -> tuple[Returned, tuple[Tensor, ...]]:  # fmt: skip
    """What a model returned, and the tensors in it beside the loss. held: the lists and dicts that the model holds, by id. number_of: is
    asked of each number whether it is made of tensors, which are among these then. CaptureError for what can hold tensors that are not
    seen; without all_of_it there is something in its place that says so when it is used."""
    tensors: list[Tensor] = []
    return dataclasses.replace(_apart(output, loss, tensors, held, all_of_it, number_of), own_loss=own_loss), tuple(tensors)


def _apart(
    output: Any, loss: Tensor, tensors: list[Tensor], held: Container[int], all_of_it: bool, number_of: NumberOf
) -> Returned:  # fmt: skip
    def is_own(x: Any) -> bool:
        return id(x) in held and all(isinstance(leaf, _CONSTANTS) for leaf in pytree.tree_leaves(x))

    leaves, spec = pytree.tree_flatten(output, is_leaf=is_own)
    found: list[Any] = []
    for leaf in leaves:
        if leaf is loss:
            found.append(_LOSS)
        elif isinstance(leaf, Tensor):
            found.append(_Place(len(tensors)))
            tensors.append(leaf)
        elif type(leaf) in _NUMBERS and (made_of := number_of(leaf)) is not None:
            found.append(_Number(tuple(range(len(tensors), len(tensors) + len(made_of[0]))), made_of[1]))
            tensors += made_of[0]
        elif _is_constant(leaf):
            found.append(leaf if isinstance(leaf, _CONSTANTS) else _Set(leaf))
        elif is_own(leaf):
            found.append(_Own(leaf))
        elif (fields := _fields(leaf)) is not None:
            inside = _apart(fields, loss, tensors, held, all_of_it, number_of)
            found.append(_record(leaf, inside))
        elif all_of_it:
            _refuse(leaf)
        else:
            found.append(LeftOut("what the model returns", why=_not_seen(leaf)))
    return Returned(spec=spec, leaves=tuple(found))


def _record(leaf: Any, fields: Returned) -> _Record:
    if isinstance(leaf, dict):
        return _MadeDict(type(leaf), _attributes(leaf), fields)
    return _MadeObject(type(leaf), fields) if isinstance(leaf, _DISTRIBUTIONS) else _Made(_without_fields(leaf, fields), fields)


def _without_fields(leaf: Any, fields: Returned) -> Any:
    """A copy of a record that keeps none of what its fields hold alive."""
    bare = copy.copy(leaf)
    for name in pytree.tree_unflatten(fields.leaves, fields.spec):
        object.__setattr__(bare, name, None)
    return bare


def found_in(output: Any) -> Iterator[Any]:
    """The leaves of what a model returns, in the order in which `taken_apart` has them."""
    for leaf in pytree.tree_leaves(output):
        fields = _fields(leaf)
        yield from (leaf,) if fields is None else found_in(fields)


def check_seen(output: Any) -> None:
    """CaptureError if what a model returns can hold tensors that are not seen."""
    for leaf in found_in(output):
        if not (isinstance(leaf, Tensor) or _is_constant(leaf)):
            _refuse(leaf)


def _refuse(leaf: Any) -> NoReturn:
    raise CaptureError(f"{_not_seen(leaf)}; or, if you need no more than the loss that the model returns, compile with outputs='loss'")


def _not_seen(leaf: Any) -> str:
    if isinstance(leaf, _COMPUTED):
        return (
            "the model returns a number that it takes from a tensor by int() or bool(), or that it computes of x.item() by other operators "
            "than + - * /: a graph has none of these\n  what to do: return the tensor, and take .item() of what the call returns"
        )
    return (
        f"the model returns a {type(leaf).__name__}, which may hold tensors that are not seen\n  what to do: return tensors in tuples, "
        f"lists, dicts, dataclasses, namespaces or distributions"
    )


def _fields(leaf: Any) -> dict[Any, Any] | None:
    """What a record holds: a dataclass instance, a namespace, a distribution, or a dict of a class of the user's. None if it is none of
    these."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
    if type(leaf) is SimpleNamespace or isinstance(leaf, _DISTRIBUTIONS):
        return dict(vars(leaf))
    if isinstance(leaf, dict) and _attributes(leaf, ()) != ():
        return dict(leaf)
    return None


def _attributes(leaf: dict[Any, Any], unknown: Any = None) -> Any:
    """The attributes of a dict of the user's class, None if they are its items. unknown: the answer if it may hold something else."""
    own = vars(leaf) if type(leaf).__dictoffset__ else {}
    if own is leaf:
        return None
    of_python = next(k for k in type(leaf).__mro__ if k.__module__ in ("builtins", "collections"))
    slots = any(getattr(k, "__slots__", ()) for k in type(leaf).__mro__)
    known = of_python in (dict, OrderedDict) and not slots and all(isinstance(x, _CONSTANTS) for x in pytree.tree_leaves(own))
    return dict(own) if known else unknown


class Outputs:
    """The tensors that the ranks of a stage return beside what they send, as the original returns them: whole, on every rank."""

    def __init__(self, manifest: Manifest, mesh: Mesh, device: torch.device, *, local: bool) -> None:
        """local: each data-parallel rank is given its own part of the batch, and is given back its own part."""
        self._specs, self._mesh, self.device, self._local = manifest.outputs, mesh, device, local
        self._of = manifest.places

    @property
    def differentiable(self) -> frozenset[str]:
        """The names of those that have a gradient in the original."""
        return frozenset(spec.name for spec in self._specs if spec.grad)

    def is_part(self, name: str) -> bool:
        """Whether each data-parallel rank is given back its own part of this one."""
        return any(
            self._kept_apart(BATCH, Layout.parse(s.layouts.get(BATCH, "I"))) or self._samples(s) is not None
            for s in self._specs
            if s.name == name
        )

    def collected(self, made: Sequence[Sequence[Tensor]], *, of_all: bool = False) -> dict[str, Tensor]:
        """Collective. made: by this rank's stages for each micro-batch; of_all: by those of every rank. By name, in the order of the
        manifest."""
        own = iter(zip(*made, strict=True))
        found: dict[str, Tensor] = {}
        for spec in self._specs:
            here = of_all or self._of[spec.stage] == self._mesh.pp.rank
            value = self._whole(spec, next(own)) if here else empty(self._shape(spec), spec.dtype, self.device)
            if self._mesh.pp.size > 1 and not of_all:
                value = value.contiguous()
                comm.broadcast_(value, self._mesh.pp.ranks[self._of[spec.stage]], self._mesh.pp)
            if (samples := self._samples(spec)) is not None:
                value = local_slice(value, samples, self._mesh.dp.rank, self._mesh.dp.size).contiguous()
            found[spec.name] = value
        return found

    def _samples(self, spec: OutputSpec) -> Layout | None:
        """How one that is made of all samples is cut, for each data-parallel rank to be given back its own part; None if it is not."""
        return Layout.parse(spec.samples) if spec.samples and self._local and self._mesh.dp.size > 1 else None

    def cotangents(self, grads: Mapping[str, Tensor | None], micro_batches: int) -> list[list[Tensor | None]]:
        """Collective. For each micro-batch the gradients of what this rank's stages made, in their order, from those of what the call
        returned: the transpose of `collected`. Of whole outputs they are the same on every rank. Where each rank makes a loss of its own
        part of the batch, what is trained is the mean of these losses, as under DistributedDataParallel."""
        own = [spec for spec in self._specs if self._of[spec.stage] == self._mesh.pp.rank]
        if self._local and self._mesh.dp.size > 1:
            grads = {spec.name: self._of_the_mean(spec, grads.get(spec.name)) for spec in self._specs}
        return [[self._cut(spec, grads.get(spec.name), i, micro_batches) for spec in own] for i in range(micro_batches)]

    def _of_the_mean(self, spec: OutputSpec, grad: Tensor | None) -> Tensor | None:
        """The gradient of the mean of all data-parallel ranks' losses, from that of this rank's."""
        if grad is None:
            return None
        if (samples := self._samples(spec)) is not None:
            parts = comm.all_gather(grad.contiguous(), self._mesh.dp)
            return joined(parts, samples.dim, samples.groups) / self._mesh.dp.size
        apart = self._kept_apart(BATCH, Layout.parse(spec.layouts.get(BATCH, "I")))
        return (grad if apart else comm.all_reduce(grad.contiguous(), self._mesh.dp)) / self._mesh.dp.size

    def _cut(self, spec: OutputSpec, grad: Tensor | None, index: int, micro_batches: int) -> Tensor | None:
        for name in cut_order(time=True):
            layout = Layout.parse(spec.layouts.get(name, "I"))
            if grad is None or self._kept_apart(name, layout):
                continue
            rank, size = (index, micro_batches) if name == TIME else (self._mesh.axis(name).rank, self._mesh.axis(name).size)
            if layout.is_shard:
                grad = local_slice(grad, layout, rank, size)
            elif layout == R and rank > 0:  # the same value, used for different work: one of them takes it, and all go backward alike
                grad = torch.zeros_like(grad)
        return grad

    def _kept_apart(self, axis: str, layout: Layout) -> bool:
        return axis == BATCH and self._local and layout.is_shard

    def _shape(self, spec: OutputSpec) -> tuple[int, ...]:
        layout = Layout.parse(spec.layouts.get(BATCH, "I"))
        return layout.local_shape(spec.shape, self._mesh.dp.size) if self._kept_apart(BATCH, layout) else spec.shape

    def _whole(self, spec: OutputSpec, parts: Sequence[Tensor]) -> Tensor:
        layouts = {axis: Layout.parse(text) for axis, text in spec.layouts.items()}
        value = parts[0]
        for name in reversed(cut_order(time=True)):  # in the other order than it was cut
            layout = layouts.get(name)
            if layout is None:
                continue
            if name != TIME and AXES[name].divides == "operators" and TIME in layouts and len(parts) > 1:
                value = torch.stack(tuple(parts))  # of all micro-batches at once, below their dim
                value = self._over_axis(value, name, _below(layout))
                parts = value.unbind(0)
                value = parts[0]
            elif name == TIME:
                value = _over_time(parts, layout)
            elif not self._kept_apart(name, layout):
                value = self._over_axis(value, name, layout)
        return value

    def _over_axis(self, value: Tensor, name: str, layout: Layout) -> Tensor:
        axis = self._mesh.axis(name)
        if layout.is_shard:
            return collectives.gather(value, axis, layout.dim, layout.groups)
        if layout == P:
            return collectives.all_reduce(value, axis)
        return collectives.own(value, axis) if layout == R else value


def _below(layout: Layout) -> Layout:
    return dataclasses.replace(layout, dim=layout.dim + 1) if layout.is_shard else layout


def _over_time(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    if layout.is_shard:
        return joined(torch.stack(tuple(parts)), layout.dim, layout.groups)
    return torch.stack(tuple(parts)).sum(0, dtype=parts[0].dtype) if layout == P else parts[0]
