"""Below what no plan of a choice can be, in seconds and in bytes, before anything of it is priced.

Every operator with a parameter before it runs somewhere, and runs no faster than its own arithmetic at the rate that its class is
priced with, or its own bytes at the best rate of any class that memory binds, divided by the GPUs that could share it. Splitting an
operator never lowers the sum of these over its parts; transitions, recompute and gathers only add. With m micro-batches and p stages
the busiest rank has at least a p-th of a micro-batch's work m times, and the pipeline fills and drains as its schedule must: with one
stage on each rank work x (m + p - 1) / p.
Weights are read whole by every micro-batch and data-parallel rank, and each operator, whole or in part, is launched for every one.

Of a choice whose data axis is decided it is known besides which gradients are brought together, and which parameters rest in parts
(`Least.with_exchange_s`). What a rank sends, of them at their smallest, is hidden by its own passes at most. Of all ranks of a pipeline
the slowest exposes no less than the mean; longer passes hide no more than they last longer.

The fullest rank holds at least its share of all parameters, of their gradients and of the optimizer's states, where each of them is split
over the tensor axis, and rests in parts, if any of its dims divides.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Set
from typing import NamedTuple

import numpy

from autopar.ir import Op, Param, Program, TensorType, refs
from autopar.measure import Pricer, count
from autopar.measure.costs import dtype_of
from autopar.planner.choices import stands_for
from autopar.planner.exchange import Exchange
from autopar.planner.moments import derived_from_inputs
from autopar.planner.price import ParamBytes, Params
from autopar.planner.space import Choice
from cost_models.cluster import OP_CLASSES, Cluster
from cost_models.compute import kernel_time_s
from cost_models.memory import OPTIMIZERS
from cost_models.pipeline import SCHEDULES
from cost_models.pools import How, gradient_bytes, of_parameters
from cost_models.recipe import Recipe
from cost_models.rests import Rest
from cost_models.step import optimizer_time_s
from cost_models.uncertainty import least_upper_bytes, room_bytes

__all__ = ["Least", "OpLeast", "least_op_s"]

LARGE = 2.0**40  # bytes of a collective whose latency counts for nothing
_ARITHMETIC = ("matmul", "attention", "conv")


def least_op_s(op: Op, program: Program, cluster: Cluster, recipe: Recipe, fixed: Set[str] = frozenset()) -> OpLeast:
    """Below any price of one operator, or sum of prices of its parts. fixed: the values that are the same whatever the batch."""
    gpu = cluster.gpu
    operands, results = refs(op), [o for o in op.outputs if o is not None]
    ins, outs = tuple(program.types[r] for r in operands), tuple(program.types[o] for o in results)
    counts = count(op, ins, outs, not gpu.host).lean()  # its parts may run as those that stream
    if counts.op_class == "view":
        return OpLeast(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    pricer, dtype = Pricer(cluster, {}, None, recipe), dtype_of(outs, ins)
    moved = pricer.traffic(counts)
    unmoved = [v in fixed or program.types[v].numel == 1 for v in (*operands, *results)]
    sizes = [1.0 * program.types[v].nbytes * of for v, of in zip((*operands, *results), unmoved, strict=True)]
    whole = pricer.traffic_of(counts, sizes[: len(ins)], sizes[len(ins) :], math.inf)
    flops, backward = counts.flops, counts.backward_flops
    share = 1.0
    if counts.op_class not in _ARITHMETIC:  # its parts may be of another class that memory binds, or join another kernel
        best = max(gpu.fraction(c) for c in OP_CLASSES if c not in _ARITHMETIC)
        share = 0.0 if recipe.fuses else gpu.fraction(counts.op_class) / best
    speed, cls = pricer.speed(counts, dtype), pricer.class_of(counts)
    flops, backward = flops / speed, backward / speed
    trained = any(t.grad for t in outs) and not op.no_grad
    again = trained and pricer.in_backward(counts)
    single = [tuple(_of_one_sample(t, program.batch_size) for t in of) for of in (ins, outs)]  # nothing is summed over it in backward
    launched = min(sum(pricer.launches_s(op, *types)) for types in ((ins, outs), single))
    launches = 0.0 if recipe.fuses else gpu.launch_s * (1 + again) if gpu.host else launched

    def moved_s(whole: float, nbytes: float) -> tuple[float, float]:
        parts = max(0.0, nbytes - whole), min(whole, nbytes)
        return tuple(kernel_time_s(cls, 0.0, share * n, dtype, gpu) for n in parts)  # type: ignore[return-value]

    forward = moved_s(whole.forward, moved.forward)
    behind = moved_s(whole.backward, moved.backward) if again else (0.0, 0.0)
    return OpLeast(
        flops_s=kernel_time_s(cls, flops, 0.0, dtype, gpu), moved_s=forward[0], whole_s=forward[1],
        backward_flops_s=kernel_time_s(cls, backward, 0.0, dtype, gpu) if again else 0.0,
        backward_moved_s=behind[0], backward_whole_s=behind[1], launches_s=launches,
    )


def _of_one_sample(t: TensorType, batch: int | None) -> TensorType:
    return dataclasses.replace(t, shape=(1, *t.shape[1:])) if t.shape[:1] == (batch,) else t


class OpLeast(NamedTuple):
    """Seconds of an operator on the whole batch: its arithmetic; its bytes that follow the batch; those that do not (weights), which every
    micro-batch of every data-parallel rank moves; the same in backward; and what it takes to launch it."""

    flops_s: float
    moved_s: float
    whole_s: float
    backward_flops_s: float
    backward_moved_s: float
    backward_whole_s: float
    launches_s: float


class Least:
    """The least seconds of choices for one program."""

    def __init__(self, program: Program, cluster: Cluster, optimizer: str, recipe: Recipe) -> None:
        gpu = cluster.gpu
        derived, fixed = derived_from_inputs(program), _fixed(program)
        times = stands_for(program)
        rows = [
            [n * x for x in least_op_s(op, program, cluster, recipe, fixed)]
            for op, n in zip(program.ops, times, strict=True)
            if not all(o in derived for o in op.outputs if o is not None)
        ]
        self.parts = numpy.array(rows or [[0.0] * len(OpLeast._fields)]).T
        self.launches_s = float(self.parts[6].sum())
        self.host = gpu.host
        self.gpu, self.optimizer, self.recipe = gpu, optimizer, recipe
        self.batch = program.batch_size or 1
        reader: dict[str, int] = {}
        for op, n in zip(program.ops, times, strict=True):
            for r in refs(op):
                reader[r] = min(n, reader.get(r, n))
        self._read = [(p.value, _at_rest(p, program), p.trainable, reader[p.value]) for p in program.params if p.value in reader]
        self._resting: dict[tuple[object, ...], float] = {}
        self._types = program.types
        self._sent: dict[tuple[tuple[int, ...], int, frozenset[str]], Params] = {}
        trained = [(t, n) for _, t, trains, n in self._read if trains]  # what nothing reads has no gradient and is not updated
        item = min((t.dtype.itemsize for t, _ in trained), default=0)
        self.update_s = optimizer_time_s(
            trainable_params=sum(t.numel * n for t, n in trained), gpu=dataclasses.replace(gpu, launch_s=0.0), optimizer=optimizer,
            param_itemsize=item, grad_itemsize=recipe.gradient_itemsize or item, state_itemsize=recipe.state_itemsize or item,
            master_itemsize=recipe.master_itemsize, passes=recipe.optimizer_passes if OPTIMIZERS[optimizer] else 1.0,
        )  # fmt: skip

    def step_s(self, choice: Choice, batch: int | None, work_s: float = 0.0) -> float:
        """Of a step of this many samples. work_s: what a micro-batch takes through all stages at least, if more is known of that."""
        return self._pipeline_s(choice, max(work_s, self._work_s(choice, batch))) + self._update_s(choice)

    def with_exchange_s(
        self, choice: Choice, batch: int | None, exchange: Exchange, alike: frozenset[str], work_s: float = 0.0
    ) -> float:  # fmt: skip
        """The same, with what brings gradients together and parameters back. alike: parameters that all data-parallel ranks use for
        the same work: nothing is sent for them."""
        work_s, taken, recipe = max(work_s, self._work_s(choice, batch)), exchange.taken, self.recipe
        params = self._exchanged(choice, alike)
        sent_s = exchange.scatter_s(params)  # in every pass
        if exchange.rest.gathered == "use":
            gathered = sum(n * p.local_bytes for p, n in params.items() if p.in_parts)
            scattered = sum(n * exchange.scattered_bytes(p) for p, n in params.items() if p.in_parts)
            sent_s = 2 * gathered / LARGE * exchange.unit_s(LARGE) + scattered / LARGE * exchange.unit_s(0.0, scattered=LARGE)
        hides = exchange.rest.gathered == "use" or recipe.overlaps_reduction
        work_s += exchange.beside(sent_s, work_s) if hides else sent_s
        once = exchange.least_once(params)
        open_s, hidden_s = once.last_s, 0.0
        for seconds, overlaps in ((once.reduced_s, recipe.overlaps_reduction), (once.gathers_s, recipe.overlaps_gathers)):
            open_s, hidden_s = (open_s, hidden_s + seconds) if overlaps else (open_s + seconds, hidden_s)
        open_s += taken * hidden_s + (1 - taken) * max(0.0, hidden_s - work_s)
        return self._pipeline_s(choice, work_s) + open_s / choice.mesh.over("layers") + self._update_s(choice)

    def _pipeline_s(self, choice: Choice, work_s: float) -> float:
        return SCHEDULES[choice.schedule].least_s(work_s, choice.mesh.over("layers"), choice.chunks, choice.micro_batches)

    def _update_s(self, choice: Choice) -> float:
        return self.update_s / (choice.mesh.over("layers") * choice.mesh.over("operators") * choice.shard)

    def _work_s(self, choice: Choice, batch: int | None) -> float:
        """Of one micro-batch through all stages."""
        mesh, m = choice.mesh, choice.micro_batches
        split = mesh.over("batch") * m * self.batch / (batch or 1)
        flops, moved, whole, flops_b, moved_b, whole_b, _ = self.parts
        forward = numpy.maximum(flops / split, moved / split + whole)
        backward = numpy.maximum(flops_b / split, moved_b / split + whole_b)
        work_s = float((forward + backward).sum())
        parts = mesh.over("operators")
        return work_s / parts + self.launches_s if self.host else max(work_s / parts, self.launches_s)

    def _exchanged(self, choice: Choice, alike: frozenset[str]) -> Params:
        """The trained parameters of one rank of each stage, as small as they can be and those of a kind as one, without those of
        which it is not known whether they rest in parts."""
        sizes, shard = tuple(n for _, n in choice.mesh.inner), choice.shard
        if (sizes, shard, alike) in self._sent:
            return self._sent[sizes, shard, alike]
        numels: dict[tuple[int, int, bool], int] = {}
        for value, t, trained, times in self._read:
            in_parts = {any(size and size % shard == 0 for size in shape) for shape in _local_shapes(t.shape, sizes)}
            if not trained or value in alike or (shard > 1 and len(in_parts) > 1):
                continue
            numel = t.numel
            for n in sizes:
                numel //= _parts(t, n)
            key = self._types[value].dtype.itemsize, t.dtype.itemsize, shard > 1 and in_parts == {True}
            numels[key] = numels.get(key, 0) + times * (numel // shard * shard if key[-1] else numel)
        found = Counter[ParamBytes]()
        for (used, rests, parted), numel in numels.items():
            resting = numel // shard if parted else numel
            found[ParamBytes(
                local_bytes=numel * used, resting_bytes=resting * rests, numel=numel, resting_numel=resting, trainable=True
            )] += 1  # fmt: skip
        self._sent[sizes, shard, alike] = found
        return found

    def bytes(self, choice: Choice, alike: frozenset[str] = frozenset()) -> float:
        """Of the fullest rank of a choice. alike: parameters that all data-parallel ranks use for the same work: these rest whole."""
        sizes = tuple(n for _, n in choice.mesh.inner)
        gone = choice.micro_batches == 1 and (choice.shard < choice.mesh.over("batch") or self.recipe.reduced_itemsize is not None)
        key = choice.rest, choice.shard, sizes, alike, gone
        if key not in self._resting:
            self._resting[key] = self._at_rest(choice.rest, choice.shard, sizes, alike, gone)
        return self._resting[key] / choice.mesh.over("layers")

    def room_bytes(self, limit_bytes: int, batch_bytes: int) -> float:
        """What of a GPU's memory there is for that at most."""
        return room_bytes(limit_bytes, self.gpu.context_bytes, self.recipe.allocator_slack) - batch_bytes

    def upper_bytes(self, nbytes: float, batch_bytes: int) -> float:
        """The inverse of room_bytes: what a GPU must have for so much at rest."""
        return least_upper_bytes(nbytes + batch_bytes, self.gpu.context_bytes, self.recipe.allocator_slack)

    def _at_rest(self, rest: Rest, shard: int, sizes: tuple[int, ...], alike: frozenset[str], gone: bool) -> float:
        """Of the whole program on as many ranks as split it over the axes that divide operators and, in parts, over the data axis. gone:
        a gradient that is reduce-scattered may not be there whole until backward ends."""
        how = How(rest=rest, recipe=self.recipe, optimizer=self.optimizer)
        always = passes = update = 0.0
        for value, t, trained, times in self._read:
            used = t.numel
            for n in sizes:
                used //= _parts(t, n)
            in_parts = value not in alike if trained else rest.gathered == "use"  # as of `zero_dims`
            p = _AtLeast(t.dtype.itemsize, used, used // _parts(t, shard) if in_parts else used, trained)
            always += times * of_parameters((p,), how, "always")
            update += times * of_parameters((p,), how, "update")
            if trained and not self.recipe.accumulates:  # when backward ends
                passes += times * gradient_bytes(p.resting_numel if rest.reduced == "pass" or gone else used, p, self.recipe)
        return always + max(passes, update)


class _AtLeast(NamedTuple):
    """A parameter on one rank, as small as it can be. What is gathered or cast of it is not counted: it may rest whole, or in parts."""

    itemsize: int
    numel: int
    resting_numel: int
    trainable: bool

    @property
    def local_bytes(self) -> int:
        return self.itemsize * self.numel

    @property
    def resting_bytes(self) -> int:
        return self.itemsize * self.resting_numel

    @property
    def in_parts(self) -> bool:
        return False

    @property
    def is_cast(self) -> bool:
        return False


def _at_rest(p: Param, program: Program) -> TensorType:
    return dataclasses.replace(program.types[p.value], dtype=p.rests or program.types[p.value].dtype)


def _local_shapes(shape: tuple[int, ...], sizes: tuple[int, ...]) -> set[tuple[int, ...]]:
    """What a rank may have of a parameter, where each of these axes leaves it whole or divides one dim."""
    found = {shape}
    for n in sizes:
        cut = {(*x[:d], size // n, *x[d + 1 :]) for x in found for d, size in enumerate(x) if size % n == 0}
        found |= cut
    return found


def _parts(t: TensorType, n: int) -> int:
    """n if any dim of a parameter divides into so many parts, or 1: it is whole then."""
    return n if any(size and size % n == 0 for size in t.shape) else 1


def _fixed(program: Program) -> frozenset[str]:
    """The values that no input reaches: parameters, buffers and what is made of them."""
    found = {p.value for p in program.params} | {b.value for b in program.buffers}
    for op in program.ops:
        if refs(op) and all(r in found for r in refs(op)):
            found |= {o for o in op.outputs if o is not None}
    return frozenset(found)
