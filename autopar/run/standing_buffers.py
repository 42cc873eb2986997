"""The buffers of a module tree, each in the places where the user's modules have it. The loop may put other tensors there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.run.lies import Lies
from autopar.run.manifest import BufferSpec
from autopar.run.mesh import Mesh
from autopar.run.part import as_part, is_part, lies_of, local, memory_of, own_attributes, part_like

__all__ = ["Buffers", "Place", "in_its_memory", "is_expanded"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a name stands: the registry of a module, and the last part of the name. others: of the further names of its tensor."""

    registry: dict[str, Tensor | None]
    key: str
    others: tuple[Place, ...] = ()

    @property
    def found(self) -> Tensor | None:
        return self.registry.get(self.key)

    def put(self, tensor: Tensor | None) -> None:
        """Another tensor stands there, with the attributes that the user has given to the one before."""
        before = self.found
        if tensor is not None and before is not None and before is not tensor:
            vars(tensor).update(own_attributes(before))
        for place in (self, *self.others):
            place.registry[place.key] = tensor


def is_expanded(tensor: Tensor) -> bool:
    """Whether several of its entries are one, so that nothing writes to it in place."""
    return tensor.layout == torch.strided and any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def in_its_memory(known: Tensor, here: Tensor) -> Tensor:
    """What rests here, in the tensor that the user has, where it is the whole: others may hold that too, as a state_dict does."""
    fits = (known.shape, known.device, known.dtype) == (here.shape, here.device, here.dtype)
    if not fits or known.is_inference() or isinstance(here, FakeTensor) or is_expanded(known):
        return here
    if known.is_meta or not torch.equal(known, here):  # else graphs that are alive may go on with its values
        with torch.no_grad():
            known.copy_(here)
    return known


class Buffers:
    """lies: how all tensors of the tree lie, by name; params: its parameters."""

    def __init__(self, model: str, mesh: Mesh, device: torch.device, lies: dict[str, Lies], params: Mapping[str, nn.Parameter]) -> None:
        self._model, self._mesh, self._device, self._lies, self._params = model, mesh, device, lies, params
        self.aliases: dict[str, str] = {}  # a further name of what the plan has as a buffer -> the first one
        self._places: dict[str, Place] = {}
        self._one: list[tuple[str, str]] = []  # those that the loop has made one tensor

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def take(self, spec: BufferSpec, place: Place, here: Tensor, lies: Lies) -> StorageWeakRef | None:
        """Keep this rank's part. Returns the memory that the tensor had before, if it has another one now."""
        known, moved = place.found, None
        lies.home = known.device if isinstance(known, Tensor) else self._device
        split = lies.split and not isinstance(here, FakeTensor)
        if split and type(known) is Tensor and not (known.is_inference() or known.is_meta):
            moved = StorageWeakRef(known.untyped_storage())
            known.data = here  # the same object is the part: the user may hold it
            here = as_part(known, lies)
        elif isinstance(known, Tensor) and not is_part(known):
            here = in_its_memory(known, here)
        place.put(part_like(here, lies) if split and not is_part(here) else here)
        self._lies[spec.name], self._places[spec.name] = lies, place
        return moved

    # ------------------------------------------------------------------------------------------------------------ one of them
    def here(self, name: str) -> Tensor:
        """This rank's part, also of one that the user has replaced by a whole tensor."""
        place = self._places.get(name)
        found = place.found if place is not None else None
        if place is None or found is None:
            raise KeyError(f"stage {self._mesh.pp.rank} of {self._model} holds nothing named {name!r}")
        if is_part(found):
            return local(found)
        if isinstance(found, FakeTensor):
            return found
        lies = self._lies[name]
        if found.shape != lies.shape:
            raise ValueError(
                f"buffer {name} has shape {tuple(lies.shape)} in the plan, and has been given shape {tuple(found.shape)}: compile the "
                f"changed model"
            )
        if lies.split:
            here = lies.cut(found).clone(memory_format=torch.contiguous_format)
            place.put(part_like(here, lies))
            return here
        return found

    def renew(self, names: Iterable[str]) -> None:
        """Other tensors stand for some of them, with their values: who holds the ones before keeps what they are."""
        for name in names:
            here, place = self.here(name), self._places[name]
            made = here.clone(memory_format=torch.contiguous_format)
            place.put(part_like(made, self._lies[name]) if is_part(place.registry[place.key]) else made)

    def stands(self, name: str) -> bool:
        """Whether there is something of that name: a buffer that the user has set to None, or deleted, is not there."""
        place = self._places.get(name)
        return place is None or place.found is not None

    def standing(self) -> Iterator[tuple[str, Place]]:
        return ((name, place) for name, place in self._places.items() if self.stands(name))

    # ------------------------------------------------------------------------------------------------- what the loop has done
    def check_joined(self) -> None:
        """ValueError where one tensor stood in several modules, and does not any more."""
        for name, place in self._places.items():
            if any(other.found is not place.found for other in place.others):
                names = ", ".join((name, *(alias for alias, first in self.aliases.items() if first == name)))
                raise ValueError(
                    f"the buffers {names} were one tensor when the model was compiled, and are not any more. Write new values into it "
                    f"(copy_), or compile the changed model"
                )

    def take_those_of_the_loop(self) -> None:
        """Collective: what the loop has put in the places of buffers lies as these do, on all ranks, also on those that do not use it."""
        by_id: dict[int, str] = {}
        self._one = []
        for name, place in self._places.items():
            found, lies = place.found, self._lies[name]
            if found is None or isinstance(found, FakeTensor):
                continue
            if (other := by_id.setdefault(id(found), name)) != name:
                self._one.append((other, name))
            if is_part(found) and lies_of(found) is not lies:  # type: ignore[arg-type]  # of a parameter, or of another buffer
                if lies_of(found).split:  # type: ignore[arg-type]
                    self._check_not_of_a_parameter(name, found)
                place.put(lies_of(found).gather(local(found)) if lies_of(found).split else local(found))  # type: ignore[arg-type]
            if lies.split and not is_part(place.registry[place.key]):
                self.here(name)

    def _check_not_of_a_parameter(self, name: str, found: Tensor) -> None:
        """ValueError for a buffer that has the memory of a parameter, which it would follow."""
        memory = memory_of(found)  # type: ignore[arg-type]
        for of, param in self._params.items():
            if is_part(param) and memory_of(param) is memory:  # type: ignore[arg-type]
                raise ValueError(f"the buffer {name} has been given the memory of the parameter {of}: give it a copy (.detach().clone())")

    def check_apart(self, written: Collection[str]) -> None:
        """ValueError where the loop has made one tensor of two buffers, to one of which the forward writes in place: it would write to
        both. written: these buffers."""
        for one, other in self._one:
            if not {one, other}.isdisjoint(written):
                raise ValueError(
                    f"the buffers {one} and {other} are one tensor since the last call, and the forward writes to it: put a copy there "
                    f"(clone()), or compile the changed model"
                )

    def check_gradients(self) -> None:
        """ValueError for a buffer through which a gradient would go: there is none through what a plan holds."""
        for name, place in self._places.items() if torch.is_grad_enabled() else ():
            if place.found is not None and place.found.requires_grad:
                raise ValueError(
                    f"the buffer {name} requires a gradient, which this module gives to parameters and inputs alone: give it to the model "
                    f"as an input, or detached"
                )
