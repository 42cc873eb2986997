"""The device mesh of a parallel module: the axes of the table (autopar/axes.py) over the ranks of the default process group.

Ranks are numbered with the table's first axis outermost, so that the one that communicates most has neighbouring ranks. The ranks of dp
are numbered as groups of neighbours, over which the parts of a parameter lie (axis 'shard'), one group after the other (axis 'replica',
of ranks that hold the same parts). An axis of size 1 has no group, and every collective over it is the identity.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.axes import AXES, BATCH, LAYERS, axes_over, joint, levels_of
from autopar.errors import LaunchError
from autopar.run import record
from autopar.run.groups import Group, group_of

__all__ = ["Axis", "Mesh"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis of the mesh as one rank sees it.

    rank: the index of this rank on the axis, 0 <= rank < size. ranks: the global ranks along the axis through this one,
    in order. group: their process group, None if size is 1 (and after the end of the process group, see `groups`).
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    held: Group | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.held is None else self.held.process_group


class Mesh:
    """The mesh of `sizes` (axis -> size; an axis that is not named has size 1) over the default process group. shard: how many ranks of
    dp share the parts of one parameter, by default all. places: the pipeline rank of each stage, by default one stage a rank.

    Every axis of the table is an attribute of its name, as mesh.tp, and so are 'shard' and 'replica'.

    Collective over all ranks: every rank must build the same meshes in the same order. Groups are kept and used again by
    later meshes of the same process group. device: where this rank computes. Raises LaunchError if the world size is not the
    product of the sizes.
    """

    pp: Axis
    dp: Axis
    tp: Axis
    shard: Axis
    replica: Axis

    def __init__(
        self, sizes: Mapping[str, int], device: torch.device | str = "cpu", *, shard: int | None = None,
        places: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        unknown = set(sizes) - set(AXES)
        if unknown or any(size < 1 for size in sizes.values()):
            raise ValueError(f"a mesh has axes {tuple(AXES)} of positive size; got {dict(sizes)}")
        self.sizes = {name: sizes.get(name, 1) for name in AXES}
        ranks = self.sizes[BATCH]
        shard = ranks if shard is None else shard
        if shard < 1 or ranks % shard:
            raise ValueError(f"the parts of a parameter cannot lie over {shard} of {ranks} data-parallel ranks: it must divide")
        self._levels: dict[str, int] = {}  # what the axes are made of, outermost first
        for name, size in self.sizes.items():
            levels = levels_of(name)
            self._levels |= dict(zip(levels, (size // shard, shard) if len(levels) > 1 else (size,), strict=True))
        world = math.prod(self.sizes.values())
        initialised = dist.is_available() and dist.is_initialized()
        found = dist.get_world_size() if initialised else 1
        if found != world:
            shape = " x ".join(f"{name}={size}" for name, size in self.sizes.items())
            script = os.path.basename(sys.argv[0]) or "train.py"
            raise LaunchError(
                f"this parallel module is made for {world} processes ({shape}), and the process group has {found}. Launch it with\n"
                f"    torchrun --standalone --nproc-per-node={world} {script}\n"
                f"or start local workers with autopar.launch(fn, gpus={world})."
            )
        self._places = tuple(range(self.sizes[LAYERS])) if places is None else places
        self.device = torch.device(device)
        self.world = world
        self.rank = dist.get_rank() if initialised else 0
        self.talks = world > 1 and dist.get_backend() != "fake"
        self.coordinates = dict(zip(AXES, self._unflatten(self.rank), strict=True))
        self._named = {name: self._axis((name,)) for name in (*AXES, "shard", "replica")}
        vars(self).update(self._named)
        inner = [row.name for row in axes_over("operators") if self.sizes[row.name] > 1]
        self._joint = {frozenset(names): self._axis(names) for names in joint(inner)}
        self.everyone = self._axis(tuple(AXES))
        self._hosts = self.everyone  # for what is on the host: no device is waited for
        if self.talks and self.device.type != "cpu":
            self._hosts = replace(self.everyone, held=group_of(tuple(range(world)), "hosts", backend="gloo"))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{k}={v}' for k, v in self.sizes.items())}, rank={self.rank})"

    def axis(self, name: str) -> Axis:
        """The axis of this name: one of the table, 'shard' or 'replica'."""
        return self._named[name]

    def joint(self, names: Iterable[str]) -> Axis:
        """'dp' or 'replica' and axes that divide operators as one axis, or one of them; each of several ranks."""
        wanted = tuple(names)
        return self._joint[frozenset(wanted)] if len(wanted) > 1 else self.axis(wanted[0])

    def pp_ranks(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The ranks on axis 'pp' that hold these stages, in order."""
        return tuple(sorted({self._places[s] for s in stages}))

    def holding(self, stages: Iterable[int]) -> Axis:
        """The part of axis 'pp' that holds these stages; collective over all ranks, also over those outside of it (for
        which `rank` of the result is -1)."""
        return self._axis((LAYERS,), self.pp_ranks(stages))

    def rank_at(self, **changes: int) -> int:
        """The global rank at this rank's coordinates with some of them changed."""
        at, found = {**self.coordinates, **changes}, 0
        for name, size in self.sizes.items():
            found = found * size + at[name]
        return found

    def agree(self, value: T) -> T:
        """Collective: rank 0's value on every rank. In a fake process group, where nothing arrives, each rank's own."""
        boxed = [value]
        if self.talks:
            record.entered(record.AGREEMENT, self.everyone.name)
            dist.broadcast_object_list(boxed, src=0, group=self._hosts.group)
            record.left()
        return boxed[0]

    def agree_numbers(self, values: tuple[int, int]) -> tuple[int, int]:
        """As `agree`, for two whole numbers from 0 to below 2**63, at the price of one small broadcast between hosts."""
        if not self.talks:
            return values
        boxed = torch.tensor(values, dtype=torch.int64, device="cpu")
        record.entered(record.AGREEMENT, self.everyone.name)
        dist.broadcast(boxed, src=0, group=self._hosts.group)
        record.left()
        first, second = boxed.tolist()
        return first, second

    def check_equal(self, value: object, what: str, *, shown: str, remedy: str) -> None:
        """Collective: raise LaunchError on every rank unless the value, as text, is the same on all of them. what, shown, remedy: for the
        message; shown: of this rank's value."""
        if not self.talks:
            return
        found = self.of_all((repr(value), shown))
        for rank, (other, theirs) in enumerate(found):
            if other != found[0][0]:
                raise LaunchError(f"{what} differ between rank 0 and rank {rank}: {found[0][1]}; and {theirs}. {remedy}")

    def collected(self, values: list[str]) -> set[str]:
        """Collective: what any rank has."""
        return {value for one in self.of_all(values) for value in one}

    def shared(self, values: set[int]) -> set[int]:
        """Collective: what every rank has."""
        return set.intersection(*self.of_all(values))

    def of_all(self, value: T) -> list[T]:
        """Collective: what each rank has, in their order."""
        if not self.talks:
            return [value]
        found = [value] * self.world
        record.entered(record.AGREEMENT, self.everyone.name)
        dist.all_gather_object(found, value, group=self._hosts.group)
        record.left()
        return found

    def _unflatten(self, rank: int) -> tuple[int, ...]:
        found: list[int] = []
        for size in reversed(self.sizes.values()):
            rank, at = divmod(rank, size)
            found.append(at)
        return tuple(reversed(found))

    def _axis(self, names: tuple[str, ...], only: tuple[int, ...] | None = None) -> Axis:
        """The lines of ranks in which the axes `names` vary and the others are fixed; `only`: the coordinates to keep."""
        vary = {level for name in names for level in levels_of(name)}
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(itertools.product(*map(range, self._levels.values()))):
            coordinates = dict(zip(self._levels, at, strict=True))
            if only is not None and coordinates[names[0]] not in only:
                continue
            fixed = tuple(coordinates[name] for name in self._levels if name not in vary)
            lines.setdefault(fixed, []).append(rank)
        mine: tuple[int, ...] = ()
        group = None
        for line in map(tuple, lines.values()):
            made = group_of(line) if len(line) > 1 else None
            if self.rank in line:
                mine, group = line, made
        index = mine.index(self.rank) if mine else -1
        return Axis(name="_".join(names), size=len(next(iter(lines.values()))), rank=index, ranks=mine, held=group)
