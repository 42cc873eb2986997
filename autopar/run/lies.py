"""How a parameter or buffer lies over the ranks at rest: from the whole to this rank's part, and back."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from autopar.axes import cut_order, levels_of
from autopar.ir import Layout
from autopar.run import comm
from autopar.run.alike import done_by_every_rank
from autopar.run.manifest import BufferSpec, ParamSpec
from autopar.run.mesh import Mesh
from autopar.run.outside import Outside
from autopar.run.slices import Span, cut, cut_spans, joined, local_slice

__all__ = ["Lies", "layouts_of"]


def layouts_of(spec: ParamSpec | BufferSpec) -> dict[str, Layout]:
    """The layout of a parameter or buffer over each axis at its use, in the order in which it is cut."""
    return {name: Layout.parse(spec.layouts.get(name, "I")) for name in cut_order()}


class Lies:
    """How one tensor of the model lies over all ranks at rest. name, shape: of the whole. parameter: of what belongs to a parameter and
    lies as it does (see `of`), that of the parameter; else this itself. holders: the ranks of a pipeline that hold it."""

    __slots__ = (
        "_layouts", "_of_it", "_owner", "_zero", "counts", "holders", "holds", "home", "mesh", "name", "outside", "parameter", "shape",
        "split",
    )  # fmt: skip

    def __init__(self, spec: ParamSpec | BufferSpec, mesh: Mesh) -> None:
        self.name, self.shape, self.mesh = spec.name, torch.Size(spec.shape), mesh
        self.home = mesh.device  # where the whole was
        self.outside: Outside | None = None  # of a parameter: what it is used for outside of calls
        self.parameter = self
        self._of_it: dict[str, Lies] = {}
        self._layouts = layouts_of(spec)
        self._zero = spec.zero_dim if isinstance(spec, ParamSpec) and mesh.shard.size > 1 else None
        self._owner = mesh.pp_ranks((min(spec.stages, default=0),))[0]
        self.holders = holders = mesh.pp_ranks(spec.stages or (0,))
        self.holds = mesh.pp.rank in holders
        cut_over = {name for name, layout in self._layouts.items() if layout.is_shard and mesh.axis(name).size > 1}
        cut_over = {level for name in cut_over for level in levels_of(name)} | ({"shard"} if self._zero is not None else set())
        self.split = bool(cut_over) or len(holders) < mesh.pp.size  # some rank holds less than the whole
        copies = [mesh.axis(name).rank for axis in cut_order() for name in levels_of(axis) if name not in cut_over]
        self.counts = mesh.pp.rank == self._owner and not any(copies)  # of equal elements one rank's count

    def of(self, what: str) -> Lies:
        """How something of this parameter lies (its gradient, a state of an optimizer): as it does, under a name of its own, so that ranks
        which gather one the parameter and one its gradient do not meet."""
        if what not in self._of_it:
            found = self._of_it[what] = copy.copy(self)
            found.name, found.outside, found._of_it = f"{what} of {self.name}", None, {}
        return self._of_it[what]

    def alike(self, other: Lies) -> bool:
        """Whether on every rank the part of another tensor, of another parallel module perhaps, is of the same elements."""
        mine, theirs = self.mesh, other.mesh
        return self is other or (
            (self.shape, self._layouts, self._zero, self._owner, self.holders)
            == (other.shape, other._layouts, other._zero, other._owner, other.holders)
            and (mine.sizes, mine.shard.size) == (theirs.sizes, theirs.shard.size)
        )

    @property
    def part(self) -> str:
        """Which part this rank holds, as text: ranks that name the same part hold the same elements."""
        if not self.holds:
            return f"{self.name} nothing"
        cut_over = [f"{axis}:{self.mesh.axis(axis).rank}" for axis, layout in self._layouts.items() if layout.is_shard]
        return " ".join([self.name, *cut_over, *([f"zero:{self.mesh.shard.rank}"] if self._zero is not None else [])])

    def spans(self) -> tuple[tuple[Span, ...], ...] | None:
        """For each dim of the whole, the ranges that this rank's part is made of, in its order; None where it holds nothing."""
        if not self.holds:
            return None
        found: list[tuple[Span, ...]] = [((0, size),) for size in self.shape]
        for name, layout in self._layouts.items():
            if layout.is_shard:
                axis = self.mesh.axis(name)
                found[layout.dim] = cut_spans(found[layout.dim], axis.size, layout.groups, axis.rank)
        if self._zero is not None:
            found[self._zero] = cut_spans(found[self._zero], self.mesh.shard.size, 1, self.mesh.shard.rank)
        return tuple(found)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole, a view where it can be one."""
        if not self.holds:
            return whole.new_empty(0)
        part = whole
        for name, layout in self._layouts.items():
            axis = self.mesh.axis(name)
            part = local_slice(part, layout, axis.rank, axis.size)
        return part if self._zero is None else cut(part, self.mesh.shard.size, self._zero, 1, self.mesh.shard.rank)

    def gather(self, part: Tensor) -> Tensor:
        """Collective: the whole, the same on every rank, as memory of its own."""
        mesh = self.mesh
        if self.split:
            done_by_every_rank("gather", self.name)
        if mesh.pp.rank == self._owner:
            whole = part
            if self._zero is not None:
                whole = joined(comm.all_gather(whole, mesh.shard), self._zero)
            for name, layout in reversed(self._layouts.items()):
                if layout.is_shard:
                    whole = joined(comm.all_gather(whole, mesh.axis(name)), layout.dim, layout.groups)
            whole = whole.clone(memory_format=torch.contiguous_format)
        else:
            whole = torch.empty(self.shape, dtype=part.dtype, device=part.device)
        if mesh.pp.size > 1:
            comm.broadcast_(whole, mesh.rank_at(pp=self._owner), mesh.pp)
        return whole

    def agreed(self, x: Tensor) -> Tensor:
        """Collective: rank 0's x on every rank: what the ranks have drawn or computed each for itself may differ."""
        if self.mesh.world == 1:
            return x
        done_by_every_rank("write to", self.name)
        return comm.broadcast_(x.detach().clone(memory_format=torch.contiguous_format), 0, self.mesh.everyone)
