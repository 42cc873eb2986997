"""Parameters on one rank: the part that rests here, and the buckets in which they are gathered and their gradients reduced.

A parameter lies over tp as its layout says, then over the ranks of 'shard' along `zero_dim` if it has one (the part at rest). At its
use it is whole over dp again: gathered once a step with its bucket, or where it is read, with its unit (cost_models.rests).

Gradients of what is used become gradients of what rests: over an axis on which the use is R they are partial and summed
(where the parameter rests in slices, reduce-scattered over 'shard', then summed over 'replica'); on which it is I they are the same
everywhere, or the same but for rounding, and their mean is taken; on which it is S they are this rank's own.

What is cast before it is used is gathered in the lower dtype. Gradients are kept, and added over uses and micro-batches, in the dtype in
which their parameter rests; in which they travel is the manifest's reduce_dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.axes import BATCH, cut_order
from autopar.ir import Kind
from autopar.run import comm, record
from autopar.run.dtypes import dtype_named
from autopar.run.lies import layouts_of
from autopar.run.manifest import ParamSpec
from autopar.run.mesh import Axis, Mesh
from autopar.run.part import local
from autopar.run.slices import joined, parted
from cost_models.rests import Rest, rest_of

__all__ = [
    "BUCKET_BYTES", "Bucket", "Computes", "Gathering", "Held", "Reduction", "add_parts", "computes_of", "hold", "make_buckets",
    "make_buckets_of_a_pass", "make_units",
]  # fmt: skip

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel: large enough to fill a link, small enough to overlap

Computes = Mapping[str, torch.dtype]  # parameters that are cast before they are used -> the lower dtype


@dataclass(kw_only=True, eq=False)
class Held:
    """One parameter on one rank. param: the user's parameter; shape, dtype: of what rests here of it. zero: its dim that is cut into
    `shards` parts at rest, None if it rests whole; rest: the row that says when it is gathered and its gradient reduced. partial: the axes
    over which the gradient of its use is summed; terms: how many equal terms such a sum has (ParamSpec.agreed). stages: those of this rank
    that use it. tied: the pipeline ranks that share it, None if it is on one of them. trains: whether the present step computes its
    gradient. computes: the dtype in which it is used. reduce_dtype: in which its gradient is reduced."""

    spec: ParamSpec
    param: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    zero: int | None
    shards: int
    rest: Rest
    partial: tuple[str, ...]
    terms: int
    stages: tuple[int, ...]
    tied: Axis | None
    trains: bool
    computes: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def local(self) -> Tensor:
        """The memory of the parameter, as a plain tensor with the same count of versions."""
        return local(self.param)

    @property
    def gathered_when_used(self) -> bool:
        return self.zero is not None and self.rest.gathered == "use"

    @property
    def reduced_by_pass(self) -> bool:
        """Whether its gradient is reduce-scattered in the backward pass of every micro-batch, and kept in parts."""
        return self.zero is not None and self.rest.reduced == "pass"

    @property
    def late(self) -> bool:
        """Whether its gradient is known only at the end of the step, in parts or whole."""
        return self.tied is not None or self.gathered_when_used or self.reduced_by_pass

    def no_gradient(self) -> Tensor:
        """Zeros, as the gradient is at the end of the step before it is reduced."""
        shape = list(self.shape)
        if self.zero is not None and not self.reduced_by_pass:
            shape[self.zero] *= self.shards
        return self.local.new_zeros(shape)


def computes_of(params: Iterable[ParamSpec]) -> Computes:
    return {spec.name: dtype_named(spec.computes) for spec in params if spec.computes is not None}


def hold(spec: ParamSpec, param: nn.Parameter, mesh: Mesh, tied: Axis | None, reduce_dtype: str | None = None) -> Held:
    """Note a parameter whose memory is this rank's part of it. reduce_dtype: the manifest's."""
    layouts = layouts_of(spec)
    rests = dtype_named(spec.dtype)
    here = local(param)
    return Held(
        spec=spec,
        param=param,
        shape=here.shape,
        dtype=here.dtype,
        zero=spec.zero_dim if mesh.shard.size > 1 else None,
        shards=mesh.shard.size,
        rest=rest_of(spec.rest),
        partial=tuple(n for n in cut_order() if (layouts[n].kind is Kind.REPLICATE or n in spec.agreed) and mesh.axis(n).size > 1),
        terms=math.prod(mesh.axis(n).size for n in spec.agreed),
        stages=tuple(s for s in spec.stages or (0,) if mesh.pp.rank in mesh.pp_ranks((s,))),
        tied=tied,
        trains=spec.trainable,
        computes=rests if spec.computes is None else dtype_named(spec.computes),
        reduce_dtype=rests if reduce_dtype is None or not rests.is_floating_point else dtype_named(reduce_dtype),
    )


# -------------------------------------------------------------------------------------------------------------- buckets
class Bucket:
    """Parameters of one dtype that are gathered and reduced the same way, together.

    `gather` starts the all-gather of what rests and `Gathering.finish` gives what is used; `reduce` starts the reduction of gradients and
    `Reduction.finish` gives the gradients of what rests. often: what is gathered at each use, or reduced in each backward pass; what else
    its gradients need is done once a step, by ordinary buckets. gathers, scatters, summed_over: what it does. stages: those of this rank
    that use its parameters. numels, numel: how many elements rest here of each, and of all. cut_in_rows: they are several, all cut along
    their first dim.
    """

    def __init__(self, held: Sequence[Held], mesh: Mesh, *, often: bool = False) -> None:
        first = held[0]
        self.held, self.stages = tuple(held), first.stages
        self.mesh = mesh
        in_parts = first.zero is not None
        self.gathers = in_parts and (first.gathered_when_used or first.reduced_by_pass) == often
        self.scatters = in_parts and first.reduced_by_pass == often
        self.partial_over_dp = BATCH in first.partial
        copies = ("replica" if name == BATCH and in_parts else name for name in first.partial)
        remaining = [name for name in copies if mesh.axis(name).size > 1]
        self.summed_over = mesh.joint(remaining) if remaining and not often else None
        self.terms = first.terms
        self.late = first.late and not often
        self.reduce_dtype = first.reduce_dtype
        self.numels = [one.shape.numel() for one in held]
        self.numel = sum(self.numels)
        self.cut_in_rows = len(held) > 1 and all(one.zero == 0 for one in held)

    @property
    def reduces(self) -> bool:
        """Whether its gradients need anything of other ranks."""
        return self.scatters or self.summed_over is not None

    def gather(self, computes: Computes) -> Gathering:
        return Gathering(self, computes)

    def reduce(self, grads: Mapping[str, Tensor]) -> Reduction:
        return Reduction(self, grads)


class Gathering:
    """An all-gather of a bucket's parameters, on its way: in the dtype in which they are used, or as they rest if they are used in
    several (of a form of the call that casts others than the first one does)."""

    def __init__(self, bucket: Bucket, computes: Computes) -> None:
        self.bucket, self._computes = bucket, computes
        parts = [held.local.reshape(-1) for held in bucket.held]
        shard, numel = bucket.mesh.shard, bucket.numel
        dtypes = {computes.get(held.spec.name, held.dtype) for held in bucket.held}
        self._out = parts[0].new_empty(shard.size * numel, dtype=dtypes.pop() if len(dtypes) == 1 else None)
        own = self._out.narrow(0, shard.rank * numel, numel)  # gathered in place
        torch.cat(parts, out=own)  # which casts
        self._work: dist.Work | None = comm.gather_flat(self._out, own, shard)

    def finish(self) -> dict[str, Tensor]:
        """name -> the parameter as it is used."""
        if self._work is not None:
            comm.finish(self._work, record.ALL_GATHER, "shard")
        bucket = self.bucket
        n = bucket.mesh.shard.size
        rows = self._out.view(n, -1)
        if bucket.cut_in_rows:  # of which the parts of the ranks lie one behind the other
            wholes = [rows.new_empty(n * held.shape[0], *held.shape[1:]) for held in bucket.held]
            flat = [whole.view(n, -1) for whole in wholes]
            torch.split_with_sizes_copy(rows, bucket.numels, dim=1, out=flat)  # one call of the host for all
        else:
            wholes = []
            for held, part in zip(bucket.held, rows.split(bucket.numels, dim=1), strict=True):
                assert held.zero is not None
                wholes.append(joined(part.view(n, *held.shape), held.zero).contiguous())
        found = {held.spec.name: whole for held, whole in zip(bucket.held, wholes, strict=True)}
        return {name: whole.to(self._computes.get(name, rows.dtype)) for name, whole in found.items()} if self._computes else found


class Reduction:
    """A reduction of a bucket's gradients, on its way: reduce-scattered, then summed, as the bucket says. Parameters without a gradient
    are left out of it. Gradients that are complete already are left as they are."""

    def __init__(self, bucket: Bucket, grads: Mapping[str, Tensor]) -> None:
        self.bucket = bucket
        self.held = [held for held in bucket.held if held.spec.name in grads]
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None
        self._kept: Tensor | None = None
        found = [grads[held.spec.name] for held in self.held]
        self._complete: Mapping[str, Tensor] = {} if bucket.reduces else grads
        self._summed = bucket.summed_over is None
        if not (found and bucket.reduces):
            return
        if bucket.scatters:
            self._scatter(found)
        else:
            self._flat = _flat(found, bucket.reduce_dtype)
            self.go_on()

    def _scatter(self, grads: list[Tensor]) -> None:
        shard = self.bucket.mesh.shard
        zeros = [held.zero for held in self.held]
        rows = [parted(g, shard.size, zero) for g, zero in zip(grads, zeros, strict=True) if zero is not None]
        if not self.bucket.partial_over_dp:
            self._flat = _flat([r[shard.rank] for r in rows], self.bucket.reduce_dtype)
            return
        whole = _side_by_side([r.reshape(shard.size, -1) for r in rows], self.bucket.reduce_dtype).view(-1)
        self._kept = whole
        self._flat = whole.new_empty(whole.numel() // shard.size)
        self._work = comm.scatter_flat(self._flat, whole, shard)

    def go_on(self) -> None:
        """Start the sum, if it has not begun; the reduce-scatter before it is waited for."""
        if self._summed or self._flat is None or self.bucket.summed_over is None:
            return
        self._wait()
        self._summed = True
        if self.bucket.terms > 1:
            self._flat.div_(self.bucket.terms)
        self._work = comm.all_reduce_(self._flat, self.bucket.summed_over, wait=False)

    def _wait(self) -> None:
        if self._work is not None:
            summed = self.bucket.summed_over
            kind, axis = (record.REDUCE_SCATTER, "shard") if self._kept is not None or summed is None else (record.ALL_REDUCE, summed.name)
            comm.finish(self._work, kind, axis)
        self._work = self._kept = None

    def finish(self) -> dict[str, Tensor]:
        """name -> gradient of the part at rest."""
        if self._flat is None:
            return dict(self._complete)
        self.go_on()
        self._wait()
        parts = self._flat.to(self.held[0].dtype).split([held.shape.numel() for held in self.held])
        return {held.spec.name: part.view(held.shape) for held, part in zip(self.held, parts, strict=True)}


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One contiguous vector of a dtype; of a single contiguous tensor that has it, a view."""
    return _side_by_side([t.reshape(1, -1) for t in tensors], dtype).view(-1)


def _side_by_side(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[n, a], [n, b], ... -> [n, a + b + ...], contiguous and of a dtype; of one that is so, itself."""
    if len(rows) == 1:
        return rows[0].to(dtype).contiguous()
    out = rows[0].new_empty((len(rows[0]), sum(r.shape[1] for r in rows)), dtype=dtype)
    torch.cat(tuple(rows), dim=1, out=out)  # which casts
    return out


def add_parts(known: dict[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    """Add what a reduction gives to the gradients that are known, in place: both are memory of reductions alone."""
    again = parts.keys() & known.keys()
    for name, part in parts.items():
        if name in again:
            known[name] += part
        else:
            known[name] = part.clone() if again else part  # as a view it would keep what has been added


def make_buckets(held: Iterable[Held], mesh: Mesh, size_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Buckets of a step in the order in which backward fills them: the parameters, given in the order of use, are taken from the
    last; those whose gradients are not complete until the end of the step come at the end."""
    return tuple(Bucket(b, mesh) for b in _filled(held, size_bytes))


def make_buckets_of_a_pass(held: Iterable[Held], mesh: Mesh, size_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Those that are reduced in the backward pass of every micro-batch, of parameters that are gathered once a step."""
    wanted = [one for one in held if one.reduced_by_pass and not one.gathered_when_used]
    return tuple(Bucket(b, mesh, often=True) for b in _filled(wanted, size_bytes))


def _filled(held: Iterable[Held], size_bytes: int) -> list[list[Held]]:
    open_: dict[tuple[object, ...], list[Held]] = {}
    done: list[list[Held]] = []
    last_first = tuple(held)[::-1]
    for one in sorted(last_first, key=lambda h: h.late):
        gathered_as = one.computes if one.zero is not None else None
        summed = one.partial, one.terms
        key = (one.dtype, one.zero is not None, one.rest, summed, one.late, one.stages, one.spec.trainable, gathered_as)
        bucket = open_.setdefault(key, [])
        bucket.append(one)
        if sum(h.shape.numel() * h.dtype.itemsize * (h.shards if h.zero is not None else 1) for h in bucket) >= size_bytes:
            done.append(open_.pop(key))
    return [*done, *open_.values()]


def make_units(held: Iterable[Held], mesh: Mesh) -> tuple[tuple[Bucket, ...], ...]:
    """The parameters that are gathered where they are used: units, each of a bucket for every dtype in it, at rest and in use."""
    units: dict[object, dict[object, list[Held]]] = {}
    for one in held:
        if one.gathered_when_used:
            unit = one.spec.name if one.spec.unit is None else one.spec.unit
            units.setdefault(unit, {}).setdefault((one.dtype, one.computes, one.partial, one.terms), []).append(one)
    return tuple(tuple(Bucket(of, mesh, often=True) for of in unit.values()) for unit in units.values())
