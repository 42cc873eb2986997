"""Counts -> seconds, on a described cluster. Every time is a roofline or latency-bandwidth estimate of cost_models, or was
measured on this machine (`live`); which of them is stated with each figure and, for all together, in `OpCosts.provenance`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from autopar.axes import BATCH, LAYERS
from autopar.catalog.transitions import ALL_TO_ALL, REGROUP, TRANSITIONS, Transition
from autopar.ir import Op, Program, TensorType, call_text, refs
from autopar.measure.count import Counts, count, op_class
from autopar.measure.launches import ADDED, CHANGED, launches
from autopar.measure.live import Call, Live, call_of
from autopar.measure.traffic import Traffic
from cost_models.cluster import Cluster
from cost_models.collectives import Kind, collective_time_s, summed_by_gathering
from cost_models.compute import ATTENTION_BACKWARD, WINOGRAD, causal_share, kernel_time_s, on_matrix_units, op_time_s
from cost_models.recipe import AUTOPAR, Recipe

__all__ = ["BUCKET_BYTES", "EXCHANGES", "GATHER", "OpCost", "OpCosts", "Pricer", "dtype_of"]

BUCKET_BYTES = 25 * 2**20  # gradients are reduced in buckets of this size (torch DDP's bucket_cap_mb default, 25 MiB)

GATHER = "autopar.C.all_gather"


class Kernel(NamedTuple):
    """What a device runs at once: a class of operators, FLOPs, bytes moved, and of these the result of a product or convolution."""

    op_class: str
    flops: float
    nbytes: float
    written: float = 0.0


class _Exchanges(NamedTuple):
    """All-reduces inside local code, in forward and in backward: how many values each has for every number of an operand, or of one of its
    dims."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    operand: int
    dim: int | None = None


EXCHANGES = {
    "autopar.L.sync_batch_norm": _Exchanges((4,), (2,), operand=0, dim=1),  # two moments at once, in float64; two sums at once
    "autopar.L.cross_entropy_sum_vocab": _Exchanges((1, 1, 1), (), operand=1),
    "autopar.L.quotient_of_sums": _Exchanges((4,), (), operand=0),  # of two numbers, in float64
}
_TRANSITION = {t.function: t for t in (*TRANSITIONS.values(), ALL_TO_ALL, REGROUP)}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """Seconds of one call on one rank; communication_s is the part of both that is collectives. provenance: where the figures
    come from; measured: on the device itself. host_s: seconds that the host needs to issue it, in forward and in backward. hidden_s: of its
    collectives in backward, what products hide: it is in none of the other figures."""

    counts: Counts
    forward_s: float
    backward_s: float
    communication_s: float = 0.0
    provenance: str = ""
    measured: bool = False
    host_s: tuple[float, float] = (0.0, 0.0)
    hidden_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCosts:
    """The cost of every operator of a program by its name, and where the figures come from. measured_share: of the time that is
    computation."""

    ops: Mapping[str, OpCost]
    provenance: str
    measured_share: float = 0.0


class Pricer:
    """Times on one cluster with one mesh. mesh: axis -> size, outermost first (as `axes.AXES`); neighbours on the innermost one
    are adjacent ranks, so that inner axes lie inside nodes as far as they fit. live: measures the operators of whole programs on this
    machine; without it every time is an estimate."""

    def __init__(self, cluster: Cluster, mesh: Mapping[str, int], live: Live | None = None, recipe: Recipe = AUTOPAR) -> None:
        self.cluster, self.mesh, self.live, self.recipe = cluster, dict(mesh), live, recipe
        self._network = _with_software(cluster, recipe)
        self._collective: dict[tuple[str, int, str, int, int], float] = {}

    def per_node(self, axis: str, ranks: int | None = None, every: int = 1) -> int:
        """How many consecutive ranks of the axis share a node; of `ranks` of them, every n-th."""
        stride = every
        for name in reversed(list(self.mesh)):
            if name == axis:
                break
            stride *= self.mesh[name]
        return max(1, min(self.mesh[axis] if ranks is None else ranks, self.cluster.gpus_per_node // stride))

    def collective_s(self, kind: str | None, nbytes: float, axis: str, *, ranks: int | None = None, every: int = 1) -> float:
        """Seconds of one collective over a whole tensor of nbytes (gathered size), over the ranks of an axis, or groups of `ranks` of
        them: neighbours, or every n-th."""
        ranks = self.mesh.get(axis, 1) if ranks is None else ranks
        if kind is None or ranks == 1 or nbytes == 0:
            return 0.0
        kind, nbytes = self._as_run(kind, nbytes, ranks)
        key = (kind, int(nbytes), axis, ranks, every)
        if key not in self._collective:
            per_node = self.per_node(axis, ranks, every)
            seconds = collective_time_s(cast(Kind, kind), int(nbytes), ranks, self._network, ranks_per_node=per_node)
            self._collective[key] = seconds * self._copying(ranks, per_node)
        return self._collective[key]

    def _as_run(self, kind: str, nbytes: float, ranks: int) -> tuple[str, float]:
        """The collective that runs for this one of a program, and its bytes (see `summed_by_gathering`)."""
        if kind == "all_reduce" and self.cluster.gpu.host and summed_by_gathering(nbytes, ranks):
            return "all_gather", nbytes * ranks
        return kind, nbytes

    def joint_s(self, kind: str, nbytes: float, axes: tuple[str, ...], *, shard: int = 1) -> float:
        """Seconds of one collective over the ranks of several axes at once. shard: of the data axis those ranks that hold the same parts,
        of which there are so many."""
        groups = [(axis, self.mesh[axis] // (shard if axis == BATCH else 1), shard if axis == BATCH else 1) for axis in axes]
        ranks = math.prod(n for _, n, _ in groups)
        if ranks == 1 or nbytes == 0:
            return 0.0
        key = (kind, int(nbytes), "+".join(axes), ranks, shard)
        if key not in self._collective:
            per_node = math.prod(self.per_node(axis, n, every) for axis, n, every in groups)
            seconds = collective_time_s(cast(Kind, kind), int(nbytes), ranks, self._network, ranks_per_node=per_node)
            self._collective[key] = seconds * self._copying(ranks, per_node)
        return self._collective[key]

    @property
    def launch_s(self) -> float:
        """Seconds of the host for a launch, beside the device's work; 0 where the host is the device."""
        return 0.0 if self.cluster.gpu.host else self.shared * self.recipe.launches * self.cluster.gpu.launch_s

    @property
    def contended(self) -> bool:
        """Whether neighbouring stages exchange values over the links between nodes."""
        return self.mesh.get(LAYERS, 1) > 1 and math.prod(self.mesh.values()) > self.cluster.gpus_per_node

    def host_s(self, change: Transition, axis: str) -> tuple[float, float]:
        """Seconds that the host needs for a change of layout over the tensor axis in forward and in backward, which kernels that run
        meanwhile hide."""
        ranks, rules, kinds = self.mesh.get(axis, 1), self.recipe, (change.forward, change.backward)
        if ranks == 1:
            return 0.0, 0.0
        ahead, back = CHANGED[change.function] if rules.host_as_timed else (float(kind is not None) for kind in kinds)
        nodes = math.ceil(ranks / self.per_node(axis))
        contended_s = (ranks - nodes) * rules.contended_step_s + (nodes - 1) * rules.contended_hop_s if self.contended else 0.0
        waits, waits_back = (self.shared * contended_s * {None: 0, "all_reduce": 2}.get(kind, 1) for kind in kinds)
        return self.launch_s * ahead + waits, self.launch_s * back + waits_back

    def launches_s(self, op: Op, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...]) -> tuple[float, float]:
        """Seconds that the host needs to launch an operator in forward and in backward."""
        trained = any(t.grad for t in outs) and not op.no_grad
        ahead, back = launches(op.target, op_class(op.target), ins, outs, trained)
        return self.launch_s * ahead, self.launch_s * back

    def bucketed_s(self, kind: str, nbytes: float, axis: str) -> float:
        """Seconds of the collective for tensors that share buckets: latency counts once a bucket, not once a tensor."""
        return self.collective_s(kind, BUCKET_BYTES, axis) * nbytes / BUCKET_BYTES

    def traffic(self, c: Counts) -> Traffic:
        """Bytes that an operator moves."""
        return c.traffic if c.traffic is not None and self._as_timed(c) else _as_product(c, c.bytes_read + c.bytes_written)

    def traffic_of(self, c: Counts, ins: Sequence[float], outs: Sequence[float], parts: float) -> Traffic:
        """Bytes that a part of an operator moves, whose operands and results are so large; parts: its work is split in so many."""
        if c.moves is not None and self._as_timed(c):
            return c.moves.of(ins, outs, parts)
        return _as_product(c, sum(ins) + sum(outs))

    def _as_timed(self, c: Counts) -> bool:
        """Whether an operator moves what was timed of a GPU: kernels for channels that lie together are others, and older ones were."""
        if self.cluster.gpu.host:
            return False
        return not c.channels_apart or (self.recipe.images_as_timed and not self.recipe.channels_last)

    def class_of(self, c: Counts) -> str:
        """The class whose rate an operator runs at: what was timed of depthwise convolutions is the bytes that would stream as long."""
        return "pointwise" if c.depthwise and self._as_timed(c) else c.op_class

    def work(self, c: Counts, dtype: str, *, parts: float = 1, traffic: Traffic | None = None) -> tuple[tuple[Kernel, ...], ...]:
        """The kernels of an operator in forward and, where anything runs there, in backward; arguments as counted_s's."""
        if c.op_class == "view":
            return ()
        moved, converted = traffic or self.traffic(c), 0.0
        parts = parts * self.speed(c, dtype)
        as_given = self.recipe.channels_last or (c.of_one and not self.recipe.converts_pixels)
        if c.op_class == "conv" and not as_given and on_matrix_units("conv", dtype, self.cluster.gpu):
            converted = 2.0 * moved.forward  # each operand and the result is read and written once more
        op_class = self.class_of(c)
        forward = _kernels(op_class, c.flops / parts, moved.forward, moved.written, converted)
        if not self.in_backward(c):
            return (forward,)
        if c.op_class == "attention" and not self.cluster.gpu.host:
            parts *= ATTENTION_BACKWARD
        beside = 2.0 * converted + 3.0 * c.added_bytes  # of two gradients one sum is made
        return forward, _kernels(op_class, c.backward_flops / parts, moved.backward, moved.backward_written, beside)

    def in_backward(self, c: Counts) -> bool:
        """Whether anything runs in the backward pass of an operator that has one."""
        if c.added_bytes:
            return True
        if c.traffic is not None and self._as_timed(c):
            return c.backward_flops > 0 or c.traffic.backward > 0
        return c.backward_flops > 0 or bool(c.saved_inputs or c.saved_outputs) or c.op_class == "pointwise"

    def speed(self, c: Counts, dtype: str) -> float:
        """How many times less arithmetic there is than is counted."""
        gpu = self.cluster.gpu
        if c.op_class == "attention":
            if not gpu.host:
                return self.recipe.attention_speed / c.slower
            return self.recipe.attention_speed / (2 * causal_share(c.causal_keys) if c.causal_keys else 1.0)  # half the scores are counted
        fewer = c.winograd and self.recipe.winograd and not gpu.host and not on_matrix_units("conv", dtype, gpu)
        return WINOGRAD if fewer else 1.0

    def counted_s(self, c: Counts, dtype: str, *, parts: float = 1, traffic: Traffic | None = None) -> tuple[float, float]:
        """(forward, backward) seconds of an operator; parts: its work is split in so many; traffic: what a rank moves."""
        gpu = self.cluster.gpu
        time_s = op_time_s if gpu.host else kernel_time_s  # launches run beside the kernels of a GPU: see `host_s`
        passes = self.work(c, dtype, parts=parts, traffic=traffic)
        seconds = [sum(time_s(k.op_class, k.flops, k.nbytes, dtype, gpu, k.written) for k in kernels) for kernels in passes]
        return tuple((*seconds, 0.0, 0.0)[:2])  # type: ignore[return-value]

    def op(self, op: Op, program: Program, counts: Counts | None = None, *, joined: bool = False) -> OpCost:
        """The cost of an operator of a sharded program on one rank (local types, transitions included). counts: what it moves and
        computes, by default by itself; joined: it runs in the kernel of an earlier one, so that nothing is issued for it."""
        ins = tuple(program.types[r] for r in refs(op))
        outs = tuple(program.types[o] for o in op.outputs if o is not None)
        counts = counts or count(op, ins, outs, not self.cluster.gpu.host)
        if op.target.startswith("autopar.C."):
            return self._transition(op, counts, ins[0], outs[0])
        dtype = dtype_of(outs, ins)
        forward, backward = (s * self.shared for s in self.counted_s(counts, dtype))
        grad = any(t.grad for t in outs) and not op.no_grad
        source = self._roofline(counts.op_class, dtype)
        exchange = self.exchanges_s(op.target, ins, op.kwarg("axis"))
        backward, exchanged = (backward + exchange[1], sum(exchange)) if grad else (0.0, exchange[0])
        ahead, back = (0.0, 0.0) if joined else self.launches_s(op, ins, outs)
        added = ADDED * self.launch_s if counts.added_bytes else 0.0
        return OpCost(
            counts=counts, forward_s=forward + exchange[0], backward_s=backward, communication_s=exchanged,
            provenance=source, host_s=(ahead, back + added),
        )  # fmt: skip

    def exchanges_s(self, target: str, ins: tuple[TensorType, ...], axis: object) -> tuple[float, float]:
        """Seconds of the collectives inside local code, in forward and in backward: of statistics by channel (batch norm), of
        numbers by row (a loss over a split vocabulary)."""
        if target not in EXCHANGES:
            return 0.0, 0.0
        of = EXCHANGES[target]
        numbers = ins[of.operand].numel if of.dim is None else ins[of.operand].shape[of.dim]
        forward, backward = (sum(self.collective_s("all_reduce", 4.0 * n * numbers, str(axis)) for n in each) for each in of[:2])
        return forward, backward

    def sends(self, op: Op, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...]) -> tuple[list[tuple[str, float]], ...]:
        """The collectives of one of autopar's own operators, in forward and in backward: their kinds, and seconds of each."""
        axis = str(op.kwarg("axis"))
        if op.target in EXCHANGES:
            of = EXCHANGES[op.target]
            numbers = ins[of.operand].numel if of.dim is None else ins[of.operand].shape[of.dim]
            sizes = [[4.0 * n * numbers for n in values] for values in of[:2]]
            ranks = self.mesh.get(axis, 1)
            each = [[(self._as_run("all_reduce", n, ranks)[0], self.collective_s("all_reduce", n, axis)) for n in x] for x in sizes]
            return each[0], each[1] if any(t.grad for t in outs) and not op.no_grad else []
        if not op.target.startswith("autopar.C.") or self.mesh.get(axis, 1) == 1:
            return [], []
        t, cost = _TRANSITION[op.target.rpartition(".")[2]], self._transition(op, count(op, ins, outs), ins[0], outs[0])
        (ahead, back), n = self._moved_bytes(op, ins[0], outs[0]), self.mesh[axis]
        forward = [(self._as_run(t.forward, ahead, n)[0], cost.forward_s)] if t.forward else []
        if not ins[0].grad:
            return forward, []
        again = forward if self.recipe.regathers and op.target == GATHER else []
        made = [(self._as_run(t.backward, back, n)[0], cost.backward_s - sum(s for _, s in again))] if t.backward else []
        return forward, [*again, *made]

    @property
    def shared(self) -> float:
        """How many times slower computation is than on a device of its own."""
        return self.live.shared if self.live is not None else self.cluster.gpu.shared_by

    def taken(self, axis: str) -> float:
        """The share of the seconds of a collective over an axis that it takes from kernels which run meanwhile."""
        link = self.cluster.intra if self.mesh.get(axis, 1) <= self.per_node(axis) else self.cluster.inter
        return link.host_share if self.cluster.gpu.host else 0.0

    def _copying(self, ranks: int, per_node: int) -> float:
        """How many times slower a collective is because the processes that copy for it share cores: inside a machine without GPUs, unless
        its links were measured so."""
        told = self.cluster.gpu.shared_by > 1
        return self.shared if self.cluster.gpu.host and ranks <= per_node and not told else 1.0

    def _roofline(self, op_class: str, dtype: str) -> str:
        """'roofline (assumed, datasheet)': the kinds of the hardware's figures that make up an estimate."""
        if op_class == "view":
            return "free"
        gpu = self.cluster.gpu
        keys = ["memory_bandwidth_bytes_per_s", f"achievable_fraction.{op_class}"]
        keys += [f"peak_flops_per_s.{dtype}"] if gpu.has_rate(dtype) else []
        return f"roofline ({', '.join(sorted({gpu.source(k).partition(':')[0] for k in keys}))})"

    def _transition(self, op: Op, counts: Counts, have: TensorType, made: TensorType) -> OpCost:
        axis = str(op.kwarg("axis"))
        t = _TRANSITION[op.target.rpartition(".")[2]]
        ahead, back = self._moved_bytes(op, have, made)
        forward = self.collective_s(t.forward, ahead, axis)
        backward = self.collective_s(t.backward, back, axis) if have.grad else 0.0
        ahead_s, back_s = self.host_s(t, axis)
        host = (ahead_s, back_s if have.grad else 0.0)
        if self.recipe.regathers and op.target == GATHER and have.grad:
            backward, host = backward + forward, (host[0], host[1] + host[0])
        return OpCost(
            counts=counts, forward_s=forward, backward_s=backward, communication_s=forward + backward,
            provenance=f"links of {self.cluster.name}", host_s=host,
        )  # fmt: skip

    def _moved_bytes(self, op: Op, have: TensorType, made: TensorType) -> tuple[float, float]:
        """The whole tensor of a change of layout, as collectives count it, in forward and in backward, which may sum in a wider dtype."""
        t, sums = _TRANSITION[op.target.rpartition(".")[2]], op.kwarg("sums")
        whole = have.nbytes * self.mesh[str(op.kwarg("axis"))] if t in (ALL_TO_ALL, REGROUP) else max(have.nbytes, made.nbytes)
        return whole, whole * (sums.itemsize / have.dtype.itemsize if isinstance(sums, torch.dtype) else 1.0)

    def program(self, program: Program) -> OpCosts:
        """The costs of all operators of one rank's program; with `live`, measured where that matters."""
        types, known, costs = program.types, dict[object, OpCost](), dict[str, OpCost]()
        for op in program.ops:  # equal calls cost the same
            call = call_text(op), op.no_grad, tuple(types[r] for r in refs(op)), tuple(types[o] for o in op.outputs if o is not None)
            if call not in known:
                known[call] = self.op(op, program)
            costs[op.name] = known[call]
        estimated = f"roofline of {self.cluster.gpu.name}, links of {self.cluster.name} (cost_models)"
        if self.live is None:
            return OpCosts(ops=costs, provenance=estimated)
        costs = self._measured(program, costs, self.live)
        computing = [(c.forward_s + c.backward_s - c.communication_s, c.measured) for c in costs.values()]
        total = sum(s for s, _ in computing)
        share = sum(s for s, measured in computing if measured) / total if total else 0.0
        provenance = f"{100 * share:.0f}% of the time of operators measured on {self.live.name}; the rest {estimated}"
        return OpCosts(ops=costs, provenance=provenance, measured_share=share)

    def _measured(self, program: Program, costs: Mapping[str, OpCost], live: Live) -> dict[str, OpCost]:
        """The costs with the times that live measures in the place of estimates. Views are free, and autopar's own operators,
        some of which communicate, keep their estimates."""
        calls: dict[str, Call] = {}
        wanted: dict[Call, float] = {}
        for op in program.ops:
            cost = costs[op.name]
            if op.target.startswith("autopar.") or cost.counts.op_class == "view":
                continue
            ins = tuple(program.types[r] for r in refs(op))
            call = calls[op.name] = call_of(op, ins, tuple(program.types[o] for o in op.outputs if o is not None))
            wanted[call] = wanted.get(call, 0.0) + cost.forward_s + cost.backward_s
        times = live.measure(wanted)
        found = dict(costs)
        for name, call in calls.items():
            if call in times:
                forward, backward = times[call]
                source = f"measured on {live.name}"
                found[name] = dataclasses.replace(costs[name], forward_s=forward, backward_s=backward, provenance=source, measured=True)
        return found


def _as_product(c: Counts, moved: float) -> Traffic:
    """Operands and results are moved once, and in backward twice, of which gradients of the operands are what is written."""
    read = moved * c.bytes_read / ((c.bytes_read + c.bytes_written) or 1)
    return Traffic(read, moved - read, 2.0 * moved - read, read)


def _kernels(op_class: str, flops: float, moved: float, written: float, converted: float) -> tuple[Kernel, ...]:
    kernel = Kernel(op_class, flops, moved, written)
    return (kernel, Kernel("pointwise", 0.0, converted)) if converted else (kernel,)


def _with_software(cluster: Cluster, recipe: Recipe) -> Cluster:
    """The cluster whose links between nodes are as a software's collectives find them."""
    if not recipe.between_nodes_s:
        return cluster
    link = cluster.inter
    slower = dataclasses.replace(
        link,
        start_simple_s=link.start_simple_s + recipe.between_nodes_s,
        start_low_latency_s=link.start_low_latency_s + recipe.between_nodes_s,
    )
    return dataclasses.replace(cluster, inter=slower)


def dtype_of(outs: tuple[TensorType, ...], ins: tuple[TensorType, ...]) -> str:
    for t in (*outs, *ins):
        if t.dtype.is_floating_point:
            return str(t.dtype).removeprefix("torch.")
    return "float32"
