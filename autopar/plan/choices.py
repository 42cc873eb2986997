"""The choices on one axis: which operators share a decision, which strategies each has, and how values connect them.

Operators at the same place of the instances of a block are one decision (a `Group`), so that the program to solve does
not grow with the number of identical layers. Leaves (inputs, parameters, buffers) are groups too, of one output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.catalog import OpView, strategies_of
from autopar.ir import I, Layout, Op, Program, R, Ref, Strategy, TensorType, map_refs, refs
from autopar.plan.shard import view_of

__all__ = ["Choices", "Edge", "Group", "Source", "choices", "members_of"]

MAX_GROUPS = 6  # group counts considered for one operator: more are never met in practice and multiply strategies


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Operators (or one leaf) that share a decision. members: their names. For a leaf, op is None and every strategy has
    one output and no inputs."""

    key: str
    members: tuple[str, ...]
    op: Op | None
    strategies: tuple[Strategy, ...]
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Result `output` of a group."""

    group: str
    output: int


@dataclass(frozen=True, slots=True)
class Edge:
    """Operand `operand` of a group reads this source; count: in how many members."""

    source: Source
    consumer: str
    operand: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    groups: Mapping[str, Group]
    edges: tuple[Edge, ...]
    loss: Source
    types: Mapping[Source, TensorType] = field(default_factory=dict)


class _Table:
    """Strategies of operators by signature, computed once."""

    def __init__(self) -> None:
        self.known: dict[object, tuple[Strategy, ...]] = {}

    def of(self, view: OpView) -> tuple[Strategy, ...]:
        numbered = iter(range(len(view.ins)))
        anonymous = map_refs(view.op, lambda _: Ref(f"x{next(numbered)}"))
        key = (anonymous.target, repr(anonymous.args), repr(anonymous.kwargs), view.ins, view.outs, view.n, view.groups)
        if key not in self.known:
            self.known[key] = strategies_of(view)
        return self.known[key]


def choices(program: Program, n: int, leaf_layouts: Mapping[str, tuple[Layout, ...]], *, data: bool = False) -> Choices:
    """All decisions on an axis of n ranks. leaf_layouts: what each leaf may lie as; a parameter that is not named may be
    I, R or any shard that an operator reading it has a use for. data: keep only strategies that split what derives from
    split inputs (a data axis), rather than every dim of every tensor."""
    member_of = members_of(program)
    representatives = {op.name: op for op in program.ops if member_of[op.name] == op.name}
    members: dict[str, list[str]] = defaultdict(list)
    for op in program.ops:
        members[member_of[op.name]].append(op.name)
    producer = {o: (op.name, k) for op in program.ops for k, o in enumerate(x for x in op.outputs if x is not None)}
    source = {v: Source(member_of[p], k) for v, (p, k) in producer.items()}
    leaves = [x.value for x in (*program.inputs, *program.params, *program.buffers)]
    source |= {v: Source(v, 0) for v in leaves}
    counted: dict[tuple[Source, str, int], int] = defaultdict(int)
    for op in program.ops:
        for k, r in enumerate(refs(op)):
            counted[source[r], member_of[op.name], k] += 1
    edges = tuple(Edge(s, c, k, count) for (s, c, k), count in counted.items())
    strategies = _strategies(program, representatives, edges, leaf_layouts, n, data)
    groups = {
        name: Group(
            key=name,
            members=tuple(members[name]),
            op=op,
            strategies=strategies[name],
            ins=tuple(program.types[r] for r in refs(op)),
            outs=tuple(program.types[o] for o in op.outputs if o is not None),
        )
        for name, op in representatives.items()
    }
    wanted: dict[str, dict[Layout, None]] = defaultdict(dict)
    for e in edges:
        for s in strategies.get(e.consumer, ()):
            wanted[e.source.group][s.inputs[e.operand]] = None
    for v in leaves:
        t = program.types[v]
        options = leaf_layouts.get(v) or (I, R, *(x for x in wanted[v] if x.is_shard))
        fitting = tuple(Strategy(inputs=(), outputs=(x,)) for x in dict.fromkeys(options) if x.divides(t.shape, n))
        groups[v] = Group(key=v, members=(v,), op=None, strategies=fitting, ins=(), outs=(t,))
    types = {s: program.types[v] for v, s in source.items()}
    return Choices(groups=groups, edges=edges, loss=source[program.loss], types=types)


def members_of(program: Program) -> dict[str, str]:
    """Operator -> the operator of the first instance that it shares its decision with."""
    member_of = {op.name: op.name for op in program.ops}
    for block in program.blocks:
        first = block.spans[0]
        for span in block.spans[1:]:
            for k in range(len(span)):
                member_of[program.ops[span.start + k].name] = program.ops[first.start + k].name
    return member_of


def _strategies(
    program: Program,
    ops: Mapping[str, Op],
    edges: tuple[Edge, ...],
    leaf_layouts: Mapping[str, tuple[Layout, ...]],
    n: int,
    data: bool,
) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of every group. Group counts beyond 1 spread from the views that make them along edges, forward and
    backward, until nothing changes; shards with groups that no neighbour shares are then dropped."""
    table = _Table()
    groups: dict[str, frozenset[int]] = {name: frozenset({1}) for name in ops}
    outgoing: dict[str, list[Edge]] = defaultdict(list)
    incoming: dict[str, list[Edge]] = defaultdict(list)
    for e in edges:
        outgoing[e.source.group].append(e)
        incoming[e.consumer].append(e)
    found: dict[str, tuple[Strategy, ...]] = {}
    pending = dict.fromkeys(ops)
    for sweep in range(10):
        changed: dict[str, None] = {}
        for name in list(ops) if sweep % 2 == 0 else list(reversed(list(ops))):
            if name in pending:
                found[name] = table.of(view_of(program, ops[name], n, groups[name]))
                for e in outgoing[name]:
                    _spread(groups, e.consumer, (s.outputs[e.source.output] for s in found[name]), changed, ops)
                for e in incoming[name]:
                    _spread(groups, e.source.group, (s.inputs[e.operand] for s in found[name]), changed, ops)
        pending = changed
        if not pending:
            break
    if data:
        found = _derived_only(program, ops, edges, found, leaf_layouts)
    return _supported(found, outgoing, incoming, ops)


def _spread(groups: dict[str, frozenset[int]], name: str, layouts: object, changed: dict[str, None], ops: Mapping[str, Op]) -> None:
    if name not in ops:
        return
    new = {x.groups for x in layouts if x.is_shard} - groups[name]  # type: ignore[attr-defined]
    if new and len(groups[name]) < MAX_GROUPS:
        groups[name] = frozenset({*groups[name], *sorted(new)[: MAX_GROUPS - len(groups[name])]})
        changed[name] = None


def _supported(
    found: dict[str, tuple[Strategy, ...]], outgoing: Mapping[str, list[Edge]], incoming: Mapping[str, list[Edge]], ops: Mapping[str, Op]
) -> dict[str, tuple[Strategy, ...]]:
    """Drop strategies with a grouped shard that no neighbour can give or take as it is."""
    for _ in range(3):
        makes = {name: [{s.outputs[k] for s in ss} for k in range(len(ss[0].outputs))] for name, ss in found.items()}
        takes: dict[tuple[str, int], set[Layout]] = defaultdict(set)
        for edges in outgoing.values():
            for e in edges:
                takes[e.source.group, e.source.output] |= {s.inputs[e.operand] for s in found[e.consumer]}

        def useful(name: str, s: Strategy, makes: object = makes, takes: object = takes) -> bool:
            for e in incoming[name]:
                x = s.inputs[e.operand]
                if x.groups > 1 and e.source.group in ops and x not in makes[e.source.group][e.source.output]:  # type: ignore[index]
                    return False
            return all(x.groups == 1 or not takes.get((name, k)) or x in takes[name, k] for k, x in enumerate(s.outputs))  # type: ignore[attr-defined,index]

        kept = {name: tuple(s for s in ss if useful(name, s)) for name, ss in found.items()}
        if kept == found:
            break
        found = kept
    return found


def _derived_only(
    program: Program,
    ops: Mapping[str, Op],
    edges: tuple[Edge, ...],
    found: dict[str, tuple[Strategy, ...]],
    leaf_layouts: Mapping[str, tuple[Layout, ...]],
) -> dict[str, tuple[Strategy, ...]]:
    """Keep strategies whose shards can be reached from the split inputs without a change of dim."""
    reached: dict[Source, set[Layout]] = defaultdict(set)
    for v, layouts in leaf_layouts.items():
        reached[Source(v, 0)] |= {x for x in layouts if x.is_shard}
    incoming: dict[str, list[Edge]] = defaultdict(list)
    for e in edges:
        incoming[e.consumer].append(e)
    kept: dict[str, tuple[Strategy, ...]] = {}
    for _ in range(2):  # the second round follows a repeated block's output into its own input
        for name in ops:
            good = []
            for s in found[name]:
                shards = [e for e in incoming[name] if s.inputs[e.operand].is_shard]
                derived = any(s.inputs[e.operand] in reached[e.source] for e in shards)
                if derived or (not shards and not any(x.is_shard for x in s.outputs)):
                    good.append(s)
                    for k, x in enumerate(s.outputs):
                        if x.is_shard:
                            reached[Source(name, k)].add(x)
            kept[name] = tuple(good)
    return kept
