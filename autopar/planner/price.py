"""What a lowered program costs on one rank: the seconds and bytes of every stretch of operators.

Bytes kept for backward are those that autograd saves of the *sharded* program, once for each tensor: a view counts as
what it views, a tensor that several operators save counts once, parameters are not counted.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.axes import AXES, BATCH
from autopar.ir import Op, Program, R, Span, refs
from autopar.measure import OpCost, Pricer
from autopar.measure.costs import EXCHANGES
from autopar.planner.fan_out import added_bytes
from autopar.planner.fusion import fused
from autopar.planner.liveness import Liveness
from autopar.planner.overlap import products_of, with_hidden
from autopar.planner.storages import gathered_from
from cost_models.rests import Rest

__all__ = ["Beside", "Ledger", "ParamBytes", "Params", "param_bytes", "zero_dims"]


class Beside(NamedTuple):
    """Seconds of the device and of the host that belong to a pass beside its operators."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0


class Ledger:
    """Costs of the operators of one rank's program, and the tensors they keep."""

    def __init__(self, program: Program, pricer: Pricer) -> None:
        self.program = program
        priced = pricer.program(program)
        self.costs: list[OpCost] = [priced.ops[op.name] for op in program.ops]
        self.provenance = priced.provenance
        self.gpu = not pricer.cluster.gpu.host
        self.launch_s = pricer.launch_s
        self.regathers, self.stops_early = pricer.recipe.regathers, pricer.recipe.stops_early
        self.gathered = gathered_from(program)
        self.root = _roots(program.ops, self.costs)
        self.params = frozenset(x.value for x in program.params)
        self.read_in: dict[Span, frozenset[str]] = {}
        self.leaves = self.params | {x.value for x in program.buffers}
        self.saved_by: list[tuple[tuple[str, int], ...]] = [self._saves(op, cost) for op, cost in zip(program.ops, self.costs, strict=True)]
        self.joined: frozenset[int] = frozenset()
        self.spans_again: dict[tuple[Span, int], list[tuple[Span, ...]]] = {}  # of a block: see `modes.spans_at_prices`
        self.in_modes: dict[Hashable, object] = {}  # what pieces keep: see `pieces.PieceMaker`
        if pricer.recipe.fuses:
            saved = {name for kept in self.saved_by for name, _ in kept}
            counts, self.joined = fused(program, [c.counts for c in self.costs], self.root, saved)
            fresh = enumerate(zip(program.ops, counts, strict=True))
            self.costs = [pricer.op(op, program, c, joined=k in self.joined) for k, (op, c) in fresh]
        if self.gpu and pricer.live is None:
            self._add(pricer)
        self._hide(pricer)

    def _add(self, pricer: Pricer) -> None:
        """Charges operators for the gradients that their backward adds to others."""
        links = {k for k, op in enumerate(self.program.ops) if op.target.startswith("autopar.C.")}
        views = {k for k, cost in enumerate(self.costs) if cost.counts.op_class == "view"} | links
        for k, nbytes in added_bytes(self.program, views).items():
            counts = replace(self.costs[k].counts, added_bytes=nbytes)
            self.costs[k] = pricer.op(self.program.ops[k], self.program, counts, joined=k in self.joined)

    def repriced(self, pricer: Pricer) -> Ledger:
        """The same program at other prices."""
        other = copy.copy(self)
        known: dict[int, OpCost] = {}
        other.costs, other.spans_again, other.in_modes, other.launch_s = [], {}, {}, pricer.launch_s
        for op, first in zip(self.program.ops, self._alike, strict=True):
            if first not in known:
                known[first] = pricer.op(op, self.program, self.costs[first].counts, joined=first in self.joined)
            other.costs.append(known[first])
        other._hide(pricer)
        return other

    @functools.cached_property
    def exchanging(self) -> tuple[int, ...]:
        """Operators whose local code exchanges values over the data axis."""
        return tuple(k for k, op in enumerate(self.program.ops) if op.target in EXCHANGES and op.kwarg("axis") == BATCH)

    def exchanged(self, pricer: Pricer) -> Ledger:
        """The same program where the data axis lies otherwise."""
        other = copy.copy(self)
        other.costs = list(self.costs)
        for k in self.exchanging:
            other.costs[k] = pricer.op(self.program.ops[k], self.program, self.costs[k].counts, joined=k in self.joined)
        return other

    def _hide(self, pricer: Pricer) -> None:
        if pricer.recipe.beside_products:
            self.costs = with_hidden(self.program, self.costs, self.products, pricer)

    @functools.cached_property
    def products(self) -> dict[int, tuple[int, ...]]:
        """Operators whose collectives products may hide -> these products."""
        return products_of(self.program, self.costs)

    @functools.cached_property
    def _alike(self) -> list[int]:
        """For every operator the first one that costs the same: of the same target on operands of the same types."""
        first: dict[tuple[object, ...], int] = {}
        types = self.program.types
        found = []
        for k, op in enumerate(self.program.ops):
            types_of = (tuple(types[r] for r in refs(op)), tuple(types[o] for o in op.outputs if o))
            key = (op.target, *types_of, self.costs[k].counts, k in self.joined, op.kwargs)
            found.append(first.setdefault(key, k) if op.target.startswith("aten.") else k)
        return found

    @functools.cached_property
    def liveness(self) -> Liveness:
        return Liveness(self.program, gpu=self.gpu, regathers=self.regathers)

    def _saves(self, op: Op, cost: OpCost) -> tuple[tuple[str, int], ...]:
        """(tensor, bytes) that autograd keeps of an operator."""
        types = self.program.types
        if op.no_grad or not any(types[o].grad for o in op.outputs if o is not None):
            return ()
        operands, results = refs(op), [o for o in op.outputs if o is not None]
        kept_as = self.gathered if self.regathers else {}
        found = [kept_as.get(operands[k], operands[k]) for k in cost.counts.saved_inputs]
        found += [results[k] for k in cost.counts.saved_outputs]
        kept = {self.root[v]: types[self.root[v]].nbytes for v in found if self.root[v] not in self.leaves}
        if cost.counts.saved_other_bytes:
            kept[f"{op.name}#"] = cost.counts.saved_other_bytes
        return tuple(kept.items())

    def params_of(self, span: Span) -> frozenset[str]:
        """The parameters that the operators of a span read."""
        if span not in self.read_in:
            read = {r for op in self.program.ops[span.start : span.stop] for r in refs(op)}
            self.read_in[span] = frozenset(read & self.params)
        return self.read_in[span]

    def kept_bytes(self, span: Span, seen: set[str] | None = None) -> int:
        """Bytes kept by operators of the span; tensors in `seen` are counted elsewhere and new ones are added to it."""
        seen = set() if seen is None else seen
        total = 0
        for index in range(span.start, span.stop):
            for name, nbytes in self.saved_by[index]:
                if name not in seen:
                    seen.add(name)
                    total += nbytes
        return total

    def entering_bytes(self, span: Span) -> int:
        """Bytes of the differentiable values that a span reads from outside: what a recomputed span keeps."""
        types, ops = self.program.types, self.program.ops
        inside = {o for k in range(span.start, span.stop) for o in ops[k].outputs}
        read = {self.root[r] for k in range(span.start, span.stop) for r in refs(ops[k]) if r not in inside and r not in self.leaves}
        return sum(types[v].nbytes for v in read if types[v].grad)

    def temporary_bytes(self, spans: Iterable[int]) -> int:
        """The largest operand-and-result set of one operator: what must be alive beside the kept tensors."""
        types, ops = self.program.types, self.program.ops
        sizes = [
            sum(types[o].nbytes for o in ops[k].outputs if o is not None)
            + sum(types[r].nbytes for r in refs(ops[k]) if r not in self.leaves)
            for k in spans
            if self.costs[k].counts.op_class != "view"
        ]
        return max(sizes, default=0)

    def seconds(self, indices: Iterable[int], beside: Beside | None = None) -> tuple[float, float, float]:
        """(forward, backward, of which communication) of operators that follow one another: the device's time, or the time that the
        host needs to issue them, whichever is longer (the host runs ahead in long kernels and is caught up with in short ones)."""
        communication = 0.0
        forward, backward, host_forward, host_backward = beside or Beside()
        for k in indices:
            c = self.costs[k]
            forward, backward, communication = forward + c.forward_s, backward + c.backward_s, communication + c.communication_s
            host_forward, host_backward = host_forward + c.host_s[0], host_backward + c.host_s[1]
        return max(forward, host_forward), max(backward, host_backward), communication

    def issued_s(self, span: Span) -> float:
        """Seconds that the host needs to issue both passes of a span of operators."""
        return sum(sum(c.host_s) for c in self.costs[span.start : span.stop])


def _roots(ops: tuple[Op, ...], costs: list[OpCost]) -> dict[str, str]:
    """value -> the value whose storage it shares."""
    root: dict[str, str] = {}
    for op, cost in zip(ops, costs, strict=True):
        operands = refs(op)
        for r in operands:
            root.setdefault(r, r)
        for o in op.outputs:
            if o is not None:
                root[o] = root[operands[0]] if cost.counts.op_class == "view" and operands else o
    return root


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamBytes:
    """Of one parameter on one rank. local_bytes: as used; resting_bytes: as it rests, perhaps in a wider dtype; summed: the axes over which
    its gradient, as its use gives it, is a term of a sum."""

    local_bytes: int
    resting_bytes: int
    numel: int
    resting_numel: int
    trainable: bool
    summed: tuple[str, ...] = (BATCH,)

    @property
    def itemsize(self) -> int:
        """Of a number at rest, and of its gradient."""
        return self.resting_bytes // self.resting_numel if self.resting_numel else 0

    @property
    def in_parts(self) -> bool:
        """Whether it rests in parts over the data axis."""
        return self.resting_numel < self.numel

    def part(self, parts: int) -> ParamBytes:
        """Of one of so many parts of it, at least."""
        fewer = {name: getattr(self, name) // parts for name in ("local_bytes", "resting_bytes", "numel", "resting_numel")}
        return replace(self, **fewer)

    @property
    def is_cast(self) -> bool:
        """Whether it is cast before it is used."""
        return self.local_bytes != self.numel * self.itemsize


Params = Mapping[ParamBytes, int]  # how many parameters of a rank have these bytes


def zero_dims(program: Program, shard: int, rest: Rest) -> dict[str, int]:
    """Parameter (fqn) -> the dim on which it rests in so many parts: the first that divides. Those of which no dim divides rest whole, and
    of those that train the ones that every data-parallel rank uses for the same work. Those that do not train have no gradient and no
    optimizer states that could be in parts: they are, where parameters are gathered where they are used. A program that was laid over no
    data axis stands for one of its ranks, as in `param_bytes`."""
    found: dict[str, int] = {}
    laid = BATCH in program.layouts
    for p in program.params if shard > 1 else ():
        shape = program.types[p.value].shape
        dim = next((d for d, size in enumerate(shape) if size and size % shard == 0), None)
        own = (not laid or dict(p.layouts).get(BATCH) == R) if p.trainable else rest.gathered == "use"
        if dim is not None and own:
            found[p.fqn] = dim
    return found


def param_bytes(program: Program, dims: Mapping[str, int], shard: int, *, ranks: int = 1) -> dict[str, ParamBytes]:
    """value -> its bytes on a rank. program: of one rank (tensor-parallel shapes). ranks: of the data axis; a program that was laid over
    no such axis and stands for one of several ranks uses every parameter for work of its own."""
    beside = (BATCH,) if ranks > 1 and BATCH not in program.layouts else ()
    found = {}
    for p in program.params:
        t = program.types[p.value]
        resting = t.numel // (shard if p.fqn in dims else 1)
        found[p.value] = ParamBytes(
            local_bytes=t.nbytes, resting_bytes=resting * (p.rests or t.dtype).itemsize, numel=t.numel, resting_numel=resting,
            trainable=p.trainable,
            summed=(*beside, *(axis for axis, layout in p.layouts if (layout == R or axis in p.agreed) and axis in AXES)),
        )  # fmt: skip
    return found
