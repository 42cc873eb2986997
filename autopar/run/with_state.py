"""The state of a parallel module: whole, as the original has it, and in parts, as it rests here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.run import state
from autopar.run.full_states import whole_where_full
from autopar.run.lies import Lies
from autopar.run.manifest import BufferSpec, Manifest, ParamSpec
from autopar.run.mesh import Mesh
from autopar.run.part import is_part, lies_of, local
from autopar.run.stand_in import StandIn, has_state_of_its_own
from autopar.run.stepping import left_behind
from autopar.run.tree import Tree

__all__ = ["AtRest", "WithState"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AtRest:
    """This rank's part of a parameter (param: the user's) or of a buffer. here: plain, sharing its memory. aliases: its other names."""

    name: str
    aliases: tuple[str, ...]
    lies: Lies
    here: Tensor
    param: nn.Parameter | None


class WithState(StandIn):
    """What of a parallel module reads and writes the state of its model. Collective where it says so: all ranks call it together."""

    manifest: Manifest
    device: torch.device
    mesh: Mesh
    original: nn.Module | None
    _tree: Tree

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module: of what rests in parts, the parts."""
        whole_where_full()
        return super().state_dict(*args, **kwargs)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Collective: the state_dict of the original model (all aliases, persistent buffers, and what its modules' own methods and hooks
        make of them), whole tensors in their own dtypes on the CPU; it loads there with strict=True. rank0_only: the other ranks get an
        empty dict."""
        kept = not rank0_only or self.mesh.rank == 0
        beside = {name: _whole(buffer) for name, buffer in self.buffers_beside().items()}
        if self.original is not None and has_state_of_its_own(self.original):
            with self._tree.as_whole(write=False):
                found = dict(self.original.state_dict()) if kept else {}
            found |= {name: whole for name, whole in beside.items() if name in found}
            return pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), found)
        full: dict[str, Tensor] = {name: whole.to("cpu", copy=True) for name, whole in beside.items()} if kept else {}
        for spec, tensor in state.assemble(self._persistent(), self._tree.at_rest, self.mesh, self.device):
            if kept:
                value = tensor.to("cpu", copy=True)
                full.update((name, value) for name in (spec.name, *spec.aliases))
        own = WithState.state_dict(self)  # a user may let state_dict() give the whole one: model.state_dict = model.full_state_dict
        return {name: full[name] for name in own if name in full} | full  # in the original's order

    def full_gradients(self) -> dict[str, Tensor]:
        """Collective: the gradient of every trainable parameter, by its name, in the parameter's whole shape and dtype on the CPU; zeros
        where it has none."""

        def here(name: str) -> Tensor:
            grad = self._tree.params[name].grad
            return torch.zeros_like(self._tree.at_rest(name)) if grad is None else local(grad)

        specs = [spec for spec in self.manifest.params if spec.trainable or spec.name in self._tree.unfrozen]
        return {spec.name: tensor.to("cpu", copy=True) for spec, tensor in state.assemble(specs, here, self.mesh, self.device)}

    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Collective: take the state_dict of the original model; rank 0's is given to all, and other ranks may pass None.

        Raises ValueError on every rank if names are missing or unknown, or a shape or dtype differs.
        """
        given = dict(state_dict or {})
        if self.original is not None and has_state_of_its_own(self.original):
            self._load_by_the_original(self.original, given)
            return
        specs, beside = self._persistent(), self.buffers_beside()
        known = {name: spec.name for spec in specs for name in (spec.name, *spec.aliases)}
        tensors = {known[name]: tensor for name, tensor in given.items() if name in known}
        if unknown := self.mesh.agree(sorted(set(given) - set(known) - set(beside))):
            raise ValueError(f"the state_dict has names that {self.manifest.model} has not: {', '.join(unknown)}")
        of_beside = self.mesh.agree({name: given[name].cpu() for name in beside if name in given}) if beside else {}
        if missing := sorted(set(beside) - set(of_beside)):
            raise ValueError(f"the state_dict has not what {self.manifest.model} has: {', '.join(missing)}")
        with torch.no_grad():
            for name, buffer in beside.items():
                buffer.copy_(of_beside[name])
            for spec, full in state.distribute(specs, tensors, self.mesh, self.device):
                self._tree.at_rest(spec.name).copy_(self._tree.lies[spec.name].cut(full))

    def _load_by_the_original(self, original: nn.Module, given: dict[str, Any]) -> None:
        """Collective: by its own load_state_dict, on every rank, of what rank 0 was given; where that raises nothing is taken."""
        given = self.mesh.agree(given)
        with self.full_parameters(), torch.no_grad():
            before = [(t, t.detach().clone()) for t in (*nn.Module.parameters(original), *nn.Module.buffers(original))]
            try:
                original.load_state_dict(given)
            except RuntimeError as error:  # as torch raises for names and shapes
                for tensor, value in before:
                    tensor.copy_(value)
                raise ValueError(f"the state_dict does not fit {self.manifest.model}: {error}") from error

    def state_at_rest(self) -> Iterator[AtRest]:
        """This rank's parts of what is in the state_dict of the original: parameters and persistent buffers."""
        for spec in self._persistent():
            yield AtRest(
                name=spec.name, aliases=spec.aliases, lies=self._tree.lies[spec.name], here=self._tree.at_rest(spec.name),
                param=self._tree.params.get(spec.name),
            )  # fmt: skip

    @property
    def written_parameters(self) -> dict[str, nn.Parameter]:
        """The frozen parameters that the forward writes to, by name."""
        return {spec.name: self._tree.params[spec.name] for spec in self.manifest.buffers if spec.parameter}

    @contextlib.contextmanager
    def full_parameters(self, *, write: bool = True) -> Iterator[None]:
        """Collective: inside, the parameters and buffers of the model are whole and plain on every rank, so that anything may be done
        with them (another initialisation, the original's own methods). write: what rank 0 has written is the model's afterwards, on
        all ranks, and so are `requires_grad` and attributes of parameters; their gradients are not, and nothing is where an exception
        leaves it. Each rank needs the memory of the whole model. The module is not called inside. Raises ValueError for a hook that was
        registered on a whole parameter; an optimizer that was given one raises where it steps."""
        outermost = not self._tree.whole
        with self._tree.as_whole(write=write):
            wholes = dict(nn.Module.named_parameters(self.original)) if self.original is not None and outermost else {}
            yield
        for name, param in wholes.items():
            left_behind(param, name)

    def buffers_beside(self) -> dict[str, Tensor]:
        """Persistent buffers that the model was given after it was compiled, by name: the loop's own, which no forward reads. They lie as
        they were registered."""
        modules = () if self.original is None else self.original.named_modules()
        return {
            name: buffer
            for path, module in modules
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
            and (name := f"{path}.{key}" if path else key) not in self._tree.planned_buffers
        }  # fmt: skip

    def at_rest(self, name: str) -> Tensor:
        """This rank's part of a parameter or buffer of the original, by its name, as a plain tensor that shares its memory; empty if
        another pipeline stage holds it. KeyError if there is none of that name."""
        return self._tree.at_rest(name)

    def part_of(self, name: str) -> str:
        """Which part of a parameter or buffer rests here, as text; ranks that name the same part must hold the same bits."""
        tree = self._tree
        return tree.lies[tree.names.get(name) or tree.buffers.aliases.get(name, name)].part

    def _persistent(self) -> tuple[ParamSpec | BufferSpec, ...]:
        kept = (b for b in self.manifest.buffers if b.persistent and not b.constant and not b.region)
        return (*self.manifest.params, *(b for b in kept if self._tree.buffers.stands(b.name)))


def _whole(buffer: Tensor) -> Tensor:
    """Collective: plain and whole."""
    return lies_of(buffer).gather(local(buffer)) if is_part(buffer) else buffer.detach()  # type: ignore[arg-type]
