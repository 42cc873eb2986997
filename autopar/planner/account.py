"""What a plan's figures are made of, as the plan keeps it: so that a plan file can be explained without its model.

The seconds of the busiest pipeline rank by what they are spent on, the blocks of the model by kind, the operators that an axis does not
split, the devices and how many share a node, and the user's own names of what the plan names by its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from autopar.axes import BATCH, LAYERS
from autopar.catalog import strategies_of
from autopar.ir import Op, Program, Strategy, refs
from autopar.measure import count as count_op
from autopar.measure.costs import dtype_of
from autopar.planner.candidate import Candidate
from autopar.planner.choices import is_heavy
from autopar.planner.curve import curves_of
from autopar.planner.lower import on_inner_axes
from autopar.planner.plan import AxisPlan, parse_strategy
from autopar.planner.plan_account import Account, BlockAccount, IdleAccount
from autopar.planner.sent import sent_of
from autopar.planner.shard import Assignment, view_of
from autopar.report.strategies import is_unnamed, kind_of, shape_of
from cost_models.cluster import Gpu
from cost_models.compute import rate_of

__all__ = ["account_of"]

ROWS = 12  # of pieces that are no blocks; where there are more, those of one module of a list are one
LISTED = 2**31  # stands for the number of a block, of pieces that are smaller

COMPUTE, LAUNCHES, RECOMPUTE, BUBBLE, UPDATE = "compute", "issuing operators", "recompute", "pipeline bubble", "optimizer"


def account_of(program: Program, c: Candidate, axes: Mapping[str, AxisPlan]) -> Account:
    """Of a candidate, whose strategies the plan states as `axes`."""
    pricer = c.estimator.pricer
    cluster, sizes = c.estimator.cluster, c.mesh.sizes()
    bodies = on_inner_axes(c.rank.moments.body, c.rank.inner[:-1])
    idle = [x for body, assignment in zip(bodies, c.rank.inner, strict=False) for x in _idle(body, assignment, c)]
    flops, peak = _flops(program, cluster.gpu)
    times = c.estimator.times(c.part)
    named = {op for axis in axes.values() for op in axis.ops}
    return Account(
        gpu=cluster.gpu.name,
        gpus_per_node=cluster.gpus_per_node,
        memory_bytes=cluster.gpu.memory_bytes,
        peak_flops_per_s=float(peak),
        flops=float(flops),
        per_node={axis: pricer.per_node(axis) for axis in sizes},
        seconds={kind: float(s) for kind, s in _seconds(c).items()},
        blocks=_blocks(c),
        idle=idle,
        leaves=names_of_leaves(program),
        modules={op.name: op.module for op in program.ops if op.name in named and op.module},
        transfer_s=float(times.transfer_s),
        before_s=float(times.before_s),
        curves=curves_of(c),
        shapes=_shapes(program, axes),
        sent=sent_of(c),
    )


def _shapes(program: Program, axes: Mapping[str, AxisPlan]) -> dict[str, list[int]]:
    """Operator -> whole shape of what an axis splits of it, where the dim has no name of its own."""
    ops, types, found = {op.name: op for op in program.ops}, program.types, dict[str, list[int]]()
    for axis, made in axes.items():
        for name in made.ops if made.n > 1 else ():
            strategy, op = parse_strategy(made.ops[name]), ops.get(name)
            if op is not None and is_unnamed(axis, kind_of(name), strategy):
                ins, outs = [types[r] for r in refs(op)], [types[o] for o in op.outputs if o is not None]
                found[name] = list(shape_of(strategy, ins, outs))
    return found


def names_of_leaves(program: Program) -> dict[str, str]:
    """Value -> the user's own name: of a parameter or buffer, or where an input is in the batch ('labels', 'input 0' of a tuple)."""
    found = {p.value: p.fqn for p in program.params} | {b.value: b.fqn or f"constant {b.value}" for b in program.buffers}
    for x in program.inputs:
        positional = "input " if x.path and isinstance(x.path[0], int) else ""
        found[x.value] = positional + ".".join(map(str, x.path)) or x.value
    return found


# -------------------------------------------------------------------------------------------------------------- seconds
def _seconds(c: Candidate) -> dict[str, float]:
    """What the step is spent on -> seconds; they add up to the step. Collectives by axis, as far as nothing hides them."""
    estimator, part = c.estimator, c.part
    bounds, seconds = (0, *part.cuts, len(estimator.segments)), estimator.seconds()
    known: dict[tuple[int, int], dict[str, float]] = {}
    of_ranks: dict[int, dict[str, float]] = {}
    for s, (i, j) in enumerate(pairwise(bounds)):
        for k in range(i, j):
            alike = c.segments.kind(k, part.modes[k])
            if alike not in known:
                known[alike] = _of_piece(c, k, sum(seconds[k]))
            _add(of_ranks.setdefault(c.flow.rank_of[s], {}), known[alike])
    busiest = max(of_ranks.values(), key=lambda found: sum(found.values()))
    micro_batch_s = sum(busiest.values())
    scale = c.compute_s / micro_batch_s if micro_batch_s else 0.0
    total = {kind: s * scale for kind, s in busiest.items()}
    sent_s = estimator.transfers_s(estimator.times(part))
    _add(total, {collectives(_reducing(c)): c.gradient_sync_s, BUBBLE: c.bubble_s - sent_s, UPDATE: c.optimizer_s})
    _add(total, {collectives(LAYERS): sent_s})
    return dict(sorted(((kind, s) for kind, s in total.items() if s > 0), key=lambda item: -item[1]))


def _reducing(c: Candidate) -> str:
    """The axis over which gradients are brought together at the end."""
    inner = [axis for axis, _ in c.mesh.inner]
    return inner[-1] if c.mesh.over("batch") == 1 and inner else BATCH


def collectives(axis: str) -> str:
    return f"communication over {axis}"


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for kind, s in more.items():
        total[kind] = total.get(kind, 0.0) + s


def _of_piece(c: Candidate, k: int, seconds: float) -> dict[str, float]:
    """Of one micro-batch: a piece's forward and backward, which take `seconds` with what is gathered for them, and what runs again."""
    ledger, span = c.rank.ledger, c.segments[k].span
    ops, costs = c.rank.program.ops[span.start : span.stop], ledger.costs[span.start : span.stop]
    beside = c.estimator.beside(c.estimator.read(span))
    exposed_s = seconds - sum(ledger.seconds(range(span.start, span.stop), beside)[:2])
    total: dict[str, float] = {}
    for way, (moved_s, issued_s) in enumerate(zip(beside[:2], beside[2:], strict=True)):
        found: dict[str, float] = {COMPUTE: moved_s}
        for op, cost in zip(ops, costs, strict=True):
            device_s = (cost.forward_s, cost.backward_s)[way]
            share = cost.communication_s / (cost.forward_s + cost.backward_s) if cost.communication_s else 0.0
            _add(found, {COMPUTE: device_s * (1 - share)})
            if share:
                _add(found, {collectives(str(op.kwarg("axis"))): device_s * share})
        host_s = issued_s + sum(cost.host_s[way] for cost in costs)
        # what the device does is done while the host issues: of a stretch that the host governs, the rest is the host's
        late_s = host_s - sum(found.values())
        _add(total, found | ({LAUNCHES: late_s} if late_s > 0 else {}))
    again_s = c.estimator.pieces[k].modes[c.part.modes[k]].again_s
    _add(total, {RECOMPUTE: again_s} if again_s else {})
    _add(total, {collectives(BATCH): exposed_s} if exposed_s > 0 else {})
    return total


# --------------------------------------------------------------------------------------------------------------- blocks
def _blocks(c: Candidate) -> list[BlockAccount]:
    """The pieces of the program in order; instances of a block in one mode together, and where pieces are smaller than that (as many
    stages need it), those of one module of a list."""
    estimator, ops = c.estimator, c.rank.program.ops
    groups: dict[tuple[int, int | str], list[int]] = {}
    paths: dict[tuple[int, int | str], list[str]] = {}
    last: tuple[int, int | str] | None = None
    many = sum(c.segments[k].block < 0 for k in range(len(estimator.segments))) > ROWS
    for k in range(len(estimator.segments)):
        segment = c.segments[k]
        modules = _modules(ops[segment.span.start : segment.span.stop])
        listed = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", modules[0]) if modules else None
        key: tuple[int, int | str] = (~k, "") if modules or last is None or not many else last
        if segment.block >= 0:
            key, modules = (segment.block, c.part.modes[k]), [estimator.prefix(k)]
        elif listed is not None and many:
            key, modules = (LISTED, generic(listed[0])), [listed[0]]
        last = key
        groups.setdefault(key, []).append(k)
        own = paths.setdefault(key, [])
        own += modules if segment.block >= 0 else [m for m in modules if m not in own]
    return [_block(c, pieces, paths[key], repeated=key[0] >= 0) for key, pieces in groups.items()]


def _block(c: Candidate, pieces: list[int], paths: list[str], *, repeated: bool) -> BlockAccount:
    """What one of the instances costs, in the mean of these pieces."""
    estimator, count = c.estimator, len(paths) if repeated else 1
    seconds, segments = estimator.seconds(), [c.segments[k] for k in pieces]
    modes = [estimator.pieces[k].modes[c.part.modes[k]] for k in pieces]
    whole = all(sum(map(len, mode.spans)) == len(segment.span) for mode, segment in zip(modes, segments, strict=True))
    communication_s = sum(c.rank.ledger.seconds(range(x.span.start, x.span.stop))[2] for x in segments)
    return BlockAccount(
        paths=paths,
        repeated=repeated,
        recompute="all" if whole else "part" if any(mode.spans for mode in modes) else "none",
        forward_s=float(sum(seconds[k][0] for k in pieces) / count),
        backward_s=float(sum(seconds[k][1] for k in pieces) / count),
        again_s=float(sum(mode.again_s for mode in modes) / count),
        communication_s=float(communication_s / count),
        kept_bytes=int(sum(mode.kept_bytes for mode in modes) / count),
        rest_bytes=int(sum(estimator.pieces[k].rest_bytes for k in pieces) / count),
        parameters=sum(estimator.params[v].numel for x in segments for v in estimator.read(x.span)) // count,
    )


def _modules(ops: tuple[Op, ...]) -> list[str]:
    """The modules of these operators, outermost, in order; '' for what the model's own forward does."""
    found = dict.fromkeys(op.module for op in ops if not op.target.startswith("autopar."))
    return [m for m in found if m and not any(m.startswith(f"{other}.") for other in found if other)]


# ----------------------------------------------------------------------------------------------------- what is not split
def _idle(body: Program, assignment: Assignment, c: Candidate) -> Iterator[IdleAccount]:
    """Operators that an axis does not split though they compute, by kind, the longest first."""
    types, ops = body.types, {op.name: k for k, op in enumerate(c.rank.program.ops)}
    groups: dict[str, list[Op]] = {}
    for op in body.ops:
        computes = any(types[r].numel > 1 for r in refs(op) if r in types)
        if op.target.startswith("autopar.C."):  # communication of an axis outside of this one
            continue
        if computes and not assignment.ops[op.name].splits_work:
            groups.setdefault(op.target, []).append(op)
    seconds = {target: sum(_busy_s(c, ops.get(op.name)) for op in own) for target, own in groups.items()}
    for target in sorted(groups, key=lambda t: (-seconds[t], t)):
        own = groups[target]
        if seconds[target] > 0:
            modules = list(dict.fromkeys(generic(op.module) for op in own))
            undivided, size = undivided_by(body, own[0], assignment.n) if is_heavy(target) else ("", 0)
            yield IdleAccount(
                axis=assignment.axis, kind=target, count=len(own), modules=modules[:8], seconds=float(seconds[target]), undivided=undivided,
                size=size,
            )  # fmt: skip


def undivided_by(body: Program, op: Op, n: int) -> tuple[str, int]:
    """A strategy that splits the operator over two ranks along what n cannot divide, and the size of that; '', 0 where there is none."""
    ins, outs = tuple(body.types[r] for r in refs(op)), tuple(body.types[o] for o in op.outputs if o is not None)
    here = {_along(s) for s in strategies_of(view_of(body, op, n))}
    for s in [s for s in strategies_of(view_of(body, op, 2)) if s.splits_work and _along(s) not in here]:
        pairs = [*zip(s.inputs, ins, strict=True), *zip(s.outputs, outs, strict=True)]
        sizes = [t.shape[x.dim] // x.groups for x, t in pairs if x.is_shard and not x.divides(t.shape, n)]
        if sizes:
            return str(s), min(sizes)
    return "", 0


def _along(s: Strategy) -> tuple[int, ...]:
    return tuple(x.dim for x in (*s.inputs, *s.outputs))


def _busy_s(c: Candidate, k: int | None) -> float:
    """Of one micro-batch."""
    cost = None if k is None else c.rank.ledger.costs[k]
    return 0.0 if cost is None else cost.forward_s + cost.backward_s


def generic(path: str) -> str:
    """'model.layers.3.mlp' to 'model.layers.*.mlp', of several paths each."""
    return re.sub(r"(^|\.| )\d+(?=\.|,|$)", r"\1*", path)


# ---------------------------------------------------------------------------------------------------------------- flops
def _flops(program: Program, gpu: Gpu) -> tuple[float, float]:
    """Of a step of the model, forward and backward, each operator once; and the device's peak for this mix of dtypes."""
    flops = ideal_s = 0.0
    for op in program.ops:
        ins, outs = tuple(program.types[r] for r in refs(op)), tuple(program.types[o] for o in op.outputs if o is not None)
        counts = count_op(op, ins, outs)
        own = counts.flops + (counts.backward_flops if any(t.grad for t in outs) else 0.0)
        flops += own
        ideal_s += own / gpu.peak_flops_per_s(rate_of(counts.op_class, dtype_of(outs, ins), gpu)) if own else 0.0
    return flops, flops / ideal_s if ideal_s else 0.0
