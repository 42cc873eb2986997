"""What it costs to gather parameters and to bring gradients together, as a row of cost_models.rests has it done.

A gradient is summed over every axis whose ranks use the parameter for different work (ParamBytes.summed): the data axis, and an axis that
divides operators where the parameter lies whole and its reader's work is divided (a norm's weight under sequence parallelism). Where a
parameter is in parts its gradient is reduce-scattered over the data-parallel ranks that share the parts, then summed over the groups of
ranks that hold the same parts and those other axes (nothing to sum if there are none), unless a training software sums it whole once a
step (Recipe.sums_parts_whole). Where it is whole its gradient is all-reduced over
all of these axes at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.axes import BATCH
from autopar.measure import Pricer
from autopar.planner.price import ParamBytes, Params
from cost_models.recipe import WHOLE, Recipe
from cost_models.rests import Rest
from cost_models.step import exposed_gathers_s, exposed_reduction_s

__all__ = ["Exchange", "LeastOnce", "Once", "Sent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """So many collectives of a kind over the ranks of these axes, of so many seconds each as if nothing hid them."""

    kind: str
    axes: tuple[str, ...]
    count: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Once:
    """Collectives once a step, as (how many, seconds of each): reduced, in the order in which gradients are ready; gathers, in that in
    which parameters are used; last_s: what nothing hides. taken: the share of the others' seconds that kernels beside them lose."""

    reduced: tuple[tuple[int, float], ...]
    gathers: tuple[tuple[int, float], ...]
    last_s: float
    taken: float
    overlaps_reduction: bool
    overlaps_gathers: bool

    def exposed_s(self, forward_s: float, backward_s: float) -> float:
        """Beyond a forward and a backward pass of so many seconds."""
        reduction_s, gathers_s = (sum(n * s for n, s in each) for each in (self.reduced, self.gathers))
        exposed_s = reduction_s
        if self.reduced and self.overlaps_reduction:
            free_s = exposed_reduction_s([s for _, s in self.reduced], backward_s, [n for n, _ in self.reduced])
            exposed_s = self.taken * reduction_s + (1 - self.taken) * free_s
        if not self.overlaps_gathers:
            exposed_s += gathers_s
        elif self.gathers:  # all are issued at the start of the step
            free_s = exposed_gathers_s([s for _, s in self.gathers], forward_s, [n for n, _ in self.gathers])
            exposed_s += self.taken * gathers_s + (1 - self.taken) * free_s
        return exposed_s + self.last_s


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastOnce:
    """Seconds below which no `Once` is that parameters are in, whatever others are in it: each byte as one of a full bucket, which is the
    cheapest. Of several sets of parameters these add up."""

    reduced_s: float
    gathers_s: float
    last_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """shard: how many data-parallel ranks share the parts of one parameter."""

    rest: Rest
    shard: int
    micro_batches: int
    pricer: Pricer
    recipe: Recipe

    def unit_s(self, nbytes: float, *, scattered: float = 0.0) -> float:
        """Of gathering a unit where it is used, and of reduce-scattering so many bytes of its gradients, if that is done in every pass."""
        scatter_s = self._parts_s("reduce_scatter", scattered) if scattered and self.rest.reduced == "pass" else 0.0
        return self._parts_s("all_gather", nbytes) + scatter_s

    def scattered_bytes(self, p: ParamBytes) -> int:
        """Of the gradient of a parameter that is gathered where it is used, as it is sent; nothing of one that does not train."""
        return p.trainable * p.numel * (self.recipe.reduced_itemsize or p.itemsize)

    def scatter_s(self, params: Params) -> float:
        """Of reduce-scattering gradients bucket by bucket in a backward pass (ZeRO-2), but for the last bucket."""
        if self.rest.reduced != "pass" or self.rest.gathered == "use":
            return 0.0
        nbytes, bucket = self._sent_bytes(_in_parts(params)), self.recipe.bucket_bytes
        return self._parts_s("reduce_scatter", bucket) * nbytes / bucket

    def pass_s(self, params: Params, compute_s: float) -> float:
        """Exposed, of `scatter_s`."""
        scatter_s = self.scatter_s(params)
        return self.beside(scatter_s, compute_s) if self.recipe.overlaps_reduction else scatter_s

    def beside(self, seconds: float, compute_s: float) -> float:
        """Exposed, of collectives over the data axis that go on beside kernels of compute_s."""
        return seconds - (1 - self.taken) * min(seconds, compute_s)

    @property
    def taken(self) -> float:
        return self.pricer.taken(BATCH)

    def step_s(self, params: Params, forward_s: float, backward_s: float) -> float:
        """Exposed, of the last bucket of every backward pass, and of what is done once a step: gradients are brought together while the
        last micro-batch's backward runs, and parameters gathered while the first one's forward runs."""
        return self.once(params).exposed_s(forward_s, backward_s)

    def once(self, params: Params) -> Once:
        """The collectives of `step_s`."""
        whole, parts = _whole(params), _in_parts(params)
        sharded = self._sent_bytes(parts)
        reduced: list[tuple[int, float]] = []
        for axes, nbytes in self._by_axes(whole).items():
            reduced += [(n, self.pricer.joint_s("all_reduce", x, axes)) for n, x in self._buckets(nbytes)]
        copies = self._by_axes(parts)
        last_s = 0.0
        if self.rest.reduced == "pass":
            hidden = self.rest.gathered == "use" or not self.recipe.overlaps_reduction  # or counted already
            last = 0.0 if hidden else min(sharded, self.recipe.bucket_bytes)
            last_s = self.micro_batches * self._parts_s("reduce_scatter", last)
            last_s += sum(n * self._copies_s(x, axes) for axes, nbytes in copies.items() for n, x in self._buckets(nbytes))
        elif self.recipe.sums_parts_whole:
            last_s = sum(self.pricer.joint_s("all_reduce", nbytes, axes) for axes, nbytes in copies.items())
        else:
            in_parts = [
                (n, self._parts_s("reduce_scatter", x) + self._copies_s(x, axes))
                for axes, nbytes in copies.items() for n, x in self._buckets(nbytes)
            ]  # fmt: skip
            if self.rest.gathered == "use":  # such gradients are complete when the backward pass is over
                last_s = sum(n * s for n, s in in_parts)
            else:
                reduced += in_parts
        gathers: list[tuple[int, float]] = []
        if self.rest.gathered == "step":
            gathers = [(n, self._parts_s("all_gather", x)) for n, x in self._gathers(parts)]
        return Once(
            reduced=tuple(reduced), gathers=tuple(gathers), last_s=last_s, taken=self.taken,
            overlaps_reduction=self.recipe.overlaps_reduction, overlaps_gathers=self.recipe.overlaps_gathers,
        )  # fmt: skip

    def least_once(self, params: Params) -> LeastOnce:
        """Of these among the parameters of a rank."""
        whole, parts, bucket = _whole(params), _in_parts(params), self.recipe.bucket_bytes
        reduced_s = gathers_s = last_s = 0.0
        for axes, nbytes in self._by_axes(whole).items():
            reduced_s += nbytes / bucket * self.pricer.joint_s("all_reduce", bucket, axes)
        copies_s = sum(nbytes / bucket * self._copies_s(bucket, axes) for axes, nbytes in self._by_axes(parts).items())
        if self.rest.reduced == "pass":
            last_s = copies_s
        elif self.recipe.sums_parts_whole:
            last_s = sum(nbytes / WHOLE * self.pricer.joint_s("all_reduce", WHOLE, axes) for axes, nbytes in self._by_axes(parts).items())
        else:
            nbytes = self._sent_bytes({p: n for p, n in parts.items() if p.summed})
            in_parts_s = copies_s + nbytes / bucket * self._parts_s("reduce_scatter", bucket)
            reduced_s, last_s = (reduced_s, in_parts_s) if self.rest.gathered == "use" else (reduced_s + in_parts_s, 0.0)
        if self.rest.gathered == "step":
            most = self.recipe.gathered_bytes
            gathers_s = _local_bytes(parts) / most * self._parts_s("all_gather", most)
        return LeastOnce(reduced_s=reduced_s, gathers_s=gathers_s, last_s=last_s)

    def in_a_pass(self, units: Iterable[tuple[float, float]]) -> Iterator[Sent]:
        """Of units that are gathered where they are used, in forward and in backward, and of their gradients: (bytes, of gradients)."""
        for nbytes, scattered in units:
            yield Sent(kind="all_gather", axes=(BATCH,), count=2, seconds=self._parts_s("all_gather", nbytes))
            if scattered and self.rest.reduced == "pass":
                yield Sent(kind="reduce_scatter", axes=(BATCH,), count=1, seconds=self._parts_s("reduce_scatter", scattered))

    def in_a_step(self, params: Params) -> Iterator[Sent]:
        """All else that brings gradients together or parameters back: `once`, and what the passes before the last one send of it."""
        parts = _in_parts(params)
        passes = 1 if self.rest.reduced != "pass" else 0 if self.rest.gathered == "use" else self.micro_batches
        for axes, nbytes in self._by_axes(_whole(params)).items():
            yield from (Sent(kind="all_reduce", axes=axes, count=n, seconds=self.pricer.joint_s("all_reduce", x, axes))
                        for n, x in self._buckets(nbytes))  # fmt: skip
        if self.recipe.sums_parts_whole and self.rest.reduced == "step":
            for axes, nbytes in self._by_axes(parts).items():
                yield Sent(kind="all_reduce", axes=axes, count=1, seconds=self.pricer.joint_s("all_reduce", nbytes, axes))
        else:
            yield from self._scattered(parts, passes)
        if self.rest.gathered == "step":
            for n, x in self._gathers(parts):
                yield Sent(kind="all_gather", axes=(BATCH,), count=n, seconds=self._parts_s("all_gather", x))

    def _scattered(self, parts: Params, passes: int) -> Iterator[Sent]:
        """Of the gradients of parameters that rest in parts, in buckets."""
        for n, x in self._buckets(self._sent_bytes(parts)):
            yield Sent(kind="reduce_scatter", axes=(BATCH,), count=passes * n, seconds=self._parts_s("reduce_scatter", x))
        for axes, nbytes in self._by_axes(parts).items():
            for n, x in self._buckets(nbytes):
                if seconds := self._copies_s(x, axes):
                    yield Sent(kind="all_reduce", axes=axes, count=n, seconds=seconds)

    def _parts_s(self, kind: str, nbytes: float) -> float:
        """Of a collective over the ranks that share the parts of one parameter."""
        return self.pricer.collective_s(kind, nbytes, BATCH, ranks=self.shard)

    def _copies_s(self, nbytes: float, axes: tuple[str, ...]) -> float:
        """Of summing parts of gradients, of so many bytes when whole, over the ranks of these axes that hold the same parts."""
        return self.pricer.joint_s("all_reduce", nbytes / self.shard, axes, shard=self.shard)

    def _by_axes(self, params: Params) -> dict[tuple[str, ...], float]:
        """Bytes of the gradients of parameters as they are reduced, by the axes over which they are summed: these share buckets."""
        found: dict[tuple[str, ...], float] = {}
        for p, n in params.items():
            if p.summed:
                found[p.summed] = found.get(p.summed, 0.0) + self._sent_bytes({p: n})
        return found

    def _sent_bytes(self, params: Params) -> float:
        """Of the gradients of parameters as they are reduced."""
        return float(sum(n * p.numel * self._sent_itemsize(p) for p, n in params.items() if p.trainable))

    def _sent_itemsize(self, p: ParamBytes) -> int:
        return self.recipe.reduced_itemsize or self.recipe.gradient_itemsize or p.itemsize

    def _buckets(self, nbytes: float) -> list[tuple[int, float]]:
        """(how many, bytes of each): full buckets, and what is left."""
        return _divided(nbytes, self.recipe.bucket_bytes)

    def _gathers(self, parts: Params) -> list[tuple[int, float]]:
        """(how many, bytes of each) of what is gathered once a step."""
        return _divided(_local_bytes(parts), self.recipe.gathered_bytes)


def _divided(nbytes: float, most: int) -> list[tuple[int, float]]:
    full, rest = divmod(nbytes, most)
    return [(int(full), float(most))] * bool(full) + [(1, rest)] * bool(rest)


def _whole(params: Params) -> dict[ParamBytes, int]:
    """Those that are trained and rest whole."""
    return {p: n for p, n in params.items() if p.trainable and not p.in_parts}


def _in_parts(params: Params) -> dict[ParamBytes, int]:
    """Those that are trained and rest in parts."""
    return {p: n for p, n in params.items() if p.trainable and p.in_parts}


def _local_bytes(params: Params) -> float:
    return float(sum(n * p.local_bytes for p, n in params.items()))
