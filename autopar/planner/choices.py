"""The choices on one axis: which operators share a decision, which strategies each has, and how values connect them.

Operators at the same place of the instances of a block are one decision (a `Group`), so that the program to solve does
not grow with the number of identical layers. Leaves (inputs, parameters, buffers) are groups too, of one output.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from autopar.catalog import OpView, strategies_of
from autopar.ir import I, Layout, Op, P, Program, R, S, Strategy, TensorType, refs
from autopar.measure.count import Counts, count, op_class
from autopar.planner.derived import Edge, Source, Stated, derived_only, not_over, rows_of
from autopar.planner.shard import view_of

__all__ = ["Choices", "Edge", "Group", "Source", "choices", "is_heavy", "members_of", "stands_for", "with_matrices_cut", "with_work_split"]

MAX_GROUPS = 6  # group counts considered for one operator: more are never met in practice and multiply strategies


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Operators (or one leaf) that share a decision. members: their names. For a leaf, op is None and every strategy has
    one output and no inputs. counts: of the whole operator. times: how
    many operators the members stand for, in the whole program."""

    key: str
    members: tuple[str, ...]
    op: Op | None
    strategies: tuple[Strategy, ...]
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    counts: Counts | None = None
    times: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", self.times or len(self.members))


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    groups: Mapping[str, Group]
    edges: tuple[Edge, ...]
    loss: Source
    types: Mapping[Source, TensorType] = field(default_factory=dict)


def _without_twins(view: OpView, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """Where nothing has a gradient, I is R: of strategies that differ in that alone, one is enough."""
    if any(t.grad for t in (*view.ins, *view.outs)):
        return strategies
    kept: dict[tuple[Layout, ...], Strategy] = {}
    for s in strategies:
        kept[_layouts(s)] = s
    return tuple(kept.values())


def choices(
    program: Program, n: int, leaf_layouts: Mapping[str, tuple[Layout, ...]], *, data: bool = False, batched: frozenset[str] = frozenset()
) -> Choices:
    """All decisions on an axis of n ranks. leaf_layouts: what each leaf may lie as; a parameter that is not named may be
    I, R or any shard that an operator reading it has a use for. data: keep only strategies that split what derives from
    split inputs (a data axis), rather than every dim of every tensor. batched: inputs whose dim 0 is the batch, which an
    axis that is no data axis does not split."""
    member_of = members_of(program)
    representatives = {op.name: op for op in program.ops if member_of[op.name] == op.name}
    members: dict[str, list[str]] = defaultdict(list)
    for op in program.ops:
        members[member_of[op.name]].append(op.name)
    producer = {o: (op.name, k) for op in program.ops for k, o in enumerate(x for x in op.outputs if x is not None)}
    source = {v: Source(member_of[p], k) for v, (p, k) in producer.items()}
    leaves = [x.value for x in program.leaves]
    leaf_of = _leaf_members(program, set(leaves), set(leaf_layouts))
    source |= {v: Source(leaf_of[v], 0) for v in leaves}
    stands = stands_for(program)
    counted: dict[tuple[Source, str, int], int] = defaultdict(int)
    readers: dict[str, int] = {}
    total: dict[str, int] = defaultdict(int)
    for op, times in zip(program.ops, stands, strict=True):
        total[member_of[op.name]] += times
        for k, r in enumerate(refs(op)):
            counted[source[r], member_of[op.name], k] += times
            readers.setdefault(r, times)
    edges = tuple(Edge(s, c, k, count) for (s, c, k), count in counted.items())
    strategies = _strategies(program, representatives, edges, leaf_layouts, n, data, batched)
    groups: dict[str, Group] = {}
    for name, op in representatives.items():
        ins, outs = tuple(program.types[r] for r in refs(op)), tuple(program.types[o] for o in op.outputs if o is not None)
        groups[name] = Group(
            key=name, members=tuple(members[name]), op=op, strategies=strategies[name], ins=ins, outs=outs,
            counts=count(op, ins, outs), times=total[name],
        )
    wanted: dict[str, dict[Layout, None]] = defaultdict(dict)
    for e in edges:
        for s in strategies.get(e.consumer, ()):
            wanted[e.source.group][s.inputs[e.operand]] = None
    alike: dict[str, list[str]] = defaultdict(list)
    for v in leaves:
        alike[leaf_of[v]].append(v)
    for v in (v for v in leaves if leaf_of[v] == v):
        t = program.types[v]
        options = leaf_layouts.get(v) or (I, R, *(x for x in wanted[v] if x.is_shard))
        fitting = tuple(Strategy(inputs=(), outputs=(x,)) for x in dict.fromkeys(options) if x.divides(t.shape, n))
        same = tuple(alike[v])
        many = sum(readers.get(x, 1) for x in same)
        groups[v] = Group(key=v, members=same, op=None, strategies=fitting, ins=(), outs=(t,), times=many)
    types = {s: program.types[v] for v, s in source.items()}
    return Choices(groups=groups, edges=edges, loss=source[program.loss], types=types)


def with_matrices_cut(found: Choices, params: frozenset[str]) -> Choices:
    """The choices without those that leave a parameter of two or more dims whole, where it can be cut, and without those that add up
    activations of which ranks hold terms: between cut matrices they are whole, or parts."""
    groups = dict(found.groups)
    for key, group in found.groups.items():
        added = [k for k, t in enumerate(group.ins) if t.grad and len(t.shape) > 2 and t.shape == group.outs[0].shape]
        if len(added) > 1:
            kept = tuple(s for s in group.strategies if any(s.inputs[k] != P for k in added))
            groups[key] = dataclasses.replace(group, strategies=kept)
    for key in params & set(groups):
        cut = tuple(s for s in groups[key].strategies if s.outputs[0].is_shard)
        if cut and len(groups[key].outs[0].shape) > 1:
            groups[key] = dataclasses.replace(groups[key], strategies=cut)
    return dataclasses.replace(found, groups=groups)


def with_work_split(found: Choices, chosen: Callable[[str], Strategy]) -> Choices:
    """The choices whose products, attentions, convolutions, and operators of others than torch, whose work is not known, split it
    wherever these strategies do."""
    groups = dict(found.groups)
    for key, group in found.groups.items():
        if group.op is not None and is_heavy(group.op.target) and chosen(key).splits_work:
            groups[key] = dataclasses.replace(group, strategies=tuple(s for s in group.strategies if s.splits_work))
    return dataclasses.replace(found, groups=groups)


def with_layouts(found: Choices, wanted: Mapping[str, Strategy]) -> Choices:
    """The choices whose operators take and give what these strategies do, wherever one of theirs does. wanted: operator -> strategy."""
    groups = dict(found.groups)
    for key, group in found.groups.items():
        lie = {_layouts(wanted[name]) if name in wanted else None for name in group.members}
        if group.op is not None and len(lie) == 1 and (kept := tuple(s for s in group.strategies if _layouts(s) in lie)):
            groups[key] = dataclasses.replace(group, strategies=kept)
    return dataclasses.replace(found, groups=groups)


def _layouts(s: Strategy) -> tuple[Layout, ...]:
    return tuple(R if x == I else x for x in (*s.inputs, *s.outputs))


def is_heavy(target: str) -> bool:
    return op_class(target) in ("matmul", "attention", "conv") or not target.startswith(("aten.", "autopar."))


def members_of(program: Program) -> dict[str, str]:
    """Operator -> the operator of the first instance that it shares its decision with."""
    member_of = {op.name: op.name for op in program.ops}
    for block in program.blocks:
        first = block.spans[0]
        for span in block.spans[1:]:
            for k in range(len(span)):
                member_of[program.ops[span.start + k].name] = program.ops[first.start + k].name
    return member_of


def stands_for(program: Program) -> list[int]:
    """For every operator how many of the whole program it stands for."""
    found = [1] * len(program.ops)
    for repeat in program.repeats:
        found[repeat.span.start : repeat.span.stop] = [repeat.times] * len(repeat.span)
    return found


def _leaf_members(program: Program, leaves: set[str], restricted: set[str]) -> dict[str, str]:
    """Leaf -> the leaf of the first instance that it shares its decision with: parameters that only corresponding operators
    of the instances of one block read, at the same operand."""
    readers: dict[str, set[int]] = defaultdict(set)
    for index, op in enumerate(program.ops):
        for r in refs(op):
            if r in leaves:
                readers[r].add(index)
    same = {v: v for v in leaves}
    for block in program.blocks:
        first = block.spans[0]
        for span in block.spans[1:]:
            for k in range(len(span)):
                for a, b in zip(refs(program.ops[first.start + k]), refs(program.ops[span.start + k]), strict=True):
                    alike = a in leaves and b in leaves and {i - first.start for i in readers[a]} == {i - span.start for i in readers[b]}
                    inside = alike and all(i in first for i in readers[a])
                    if inside and a not in restricted and program.types[a] == program.types[b]:
                        same[b] = a
    return same


def _strategies(
    program: Program,
    ops: Mapping[str, Op],
    edges: tuple[Edge, ...],
    leaf_layouts: Mapping[str, tuple[Layout, ...]],
    n: int,
    data: bool,
    batched: frozenset[str],
) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of every group. Group counts beyond 1 spread from the views that make them along edges, forward and
    backward, until nothing changes; on the data axis from the batch alone. Shards with groups that no neighbour shares are then dropped."""
    outgoing: dict[str, list[Edge]] = defaultdict(list)
    incoming: dict[str, list[Edge]] = defaultdict(list)
    for e in edges:
        outgoing[e.source.group].append(e)
        incoming[e.consumer].append(e)

    def stated(name: str, groups: Set[int]) -> tuple[Strategy, ...]:
        view = view_of(program, ops[name], n, frozenset({1, *sorted(groups - {1})[: MAX_GROUPS - 1]}))
        return _without_twins(view, strategies_of(view))

    if data:
        found = derived_only(ops, edges, stated, leaf_layouts, rows_of(program, ops, edges, stated, leaf_layouts))[0]
    else:
        found = _from_everywhere(ops, incoming, outgoing, stated)
        if batched:
            batch = derived_only(ops, edges, lambda name, _: found[name], {v: (S(0),) for v in batched})[1]
            found = {name: not_over(batch, name, ss, incoming[name]) for name, ss in found.items()}
    types = {Source(name, k): program.types[o] for name, op in ops.items() for k, o in enumerate(x for x in op.outputs if x is not None)}
    return _supported(found, outgoing, incoming, ops, types)


def _from_everywhere(
    ops: Mapping[str, Op], incoming: Mapping[str, list[Edge]], outgoing: Mapping[str, list[Edge]], stated: Stated
) -> dict[str, tuple[Strategy, ...]]:
    groups: dict[str, frozenset[int]] = {name: frozenset({1}) for name in ops}
    found: dict[str, tuple[Strategy, ...]] = {}
    pending = dict.fromkeys(ops)
    for sweep in range(10):
        changed: dict[str, None] = {}
        for name in list(ops) if sweep % 2 == 0 else list(reversed(list(ops))):
            if name in pending:
                found[name] = stated(name, groups[name])
                for e in outgoing[name]:
                    _spread(groups, e.consumer, (s.outputs[e.source.output] for s in found[name]), changed, ops)
                for e in incoming[name]:
                    _spread(groups, e.source.group, (s.inputs[e.operand] for s in found[name]), changed, ops)
        pending = changed
        if not pending:
            break
    return found


def _spread(groups: dict[str, frozenset[int]], name: str, layouts: object, changed: dict[str, None], ops: Mapping[str, Op]) -> None:
    if name not in ops:
        return
    new = {x.groups for x in layouts if x.is_shard} - groups[name]  # type: ignore[attr-defined]
    if new and len(groups[name]) < MAX_GROUPS:
        groups[name] = frozenset({*groups[name], *sorted(new)[: MAX_GROUPS - len(groups[name])]})
        changed[name] = None


def _supported(
    found: dict[str, tuple[Strategy, ...]],
    outgoing: Mapping[str, list[Edge]],
    incoming: Mapping[str, list[Edge]],
    ops: Mapping[str, Op],
    types: Mapping[Source, TensorType],
) -> dict[str, tuple[Strategy, ...]]:
    """Drop strategies with grouped shards (groups > 1) that cannot pay: a grouped shard is worth its place only in a chain of
    operators that makes it without a transition, consumes it without one, and somewhere turns it into a shard of other
    groups (a fused q|k|v that is split into its parts). Anywhere else it is the plain shard under another name."""
    if all(x.groups == 1 for strategies in found.values() for s in strategies for x in (*s.inputs, *s.outputs)):
        return found
    made = _made(found, incoming, ops, types)
    used = _used(found, outgoing, ops)
    kept: dict[str, tuple[Strategy, ...]] = {}
    for name, strategies in found.items():
        sources = {e.operand: e.source for e in incoming[name] if e.source.group in ops}

        def alive(s: Strategy, name: str = name, sources: Mapping[int, Source] = sources) -> bool:
            grouped = [(sources[k], x) for k, x in enumerate(s.inputs) if x.groups > 1 and k in sources]
            inputs = all(place in made or not types[place[0]].grad for place in grouped)
            return inputs and all((Source(name, k), x) in used for k, x in enumerate(s.outputs) if x.groups > 1)

        kept[name] = tuple(s for s in strategies if alive(s))
    return _converted(kept, incoming, ops)


Place = tuple[Source, Layout]


def _made(
    found: Mapping[str, tuple[Strategy, ...]], incoming: Mapping[str, list[Edge]], ops: Mapping[str, Op], types: Mapping[Source, TensorType]
) -> set[Place]:
    """The shards that operators make from leaves and from one another without a transition. What enters a repeated block is made if it
    is made before the block: the block's own results, which enter it again, follow from that."""
    made: set[Place] = set()
    for _ in range(2):  # twice, for a repeated block that feeds itself
        for name in ops:
            sources: dict[int, list[Source]] = defaultdict(list)
            for e in incoming[name]:
                if e.source.group in ops:
                    sources[e.operand].append(e.source)
            for s in found[name]:
                shards = [(of, x) for k, x in enumerate(s.inputs) if x.is_shard and (of := sources.get(k))]
                if all(any((source, x) in made or not types[source].grad for source in of) for of, x in shards):
                    made |= {(Source(name, k), x) for k, x in enumerate(s.outputs) if x.is_shard}
    return made


def _used(found: Mapping[str, tuple[Strategy, ...]], outgoing: Mapping[str, list[Edge]], ops: Mapping[str, Op]) -> set[Place]:
    """The shards that operators consume, to the end of the chain (where the split dim is contracted or reduced)."""
    used: set[Place] = set()
    for _ in range(2):
        for name in reversed([*ops]):
            for e in outgoing[name]:
                for s in found[e.consumer]:
                    shards = [(Source(e.consumer, k), x) for k, x in enumerate(s.outputs) if x.is_shard]
                    if s.inputs[e.operand].is_shard and all(place in used for place in shards):
                        used.add((e.source, s.inputs[e.operand]))
    return used


def _converted(
    found: Mapping[str, tuple[Strategy, ...]], incoming: Mapping[str, list[Edge]], ops: Mapping[str, Op]
) -> dict[str, tuple[Strategy, ...]]:
    """Keep grouped shards that are connected, through the strategies they share, with one that changes their groups."""
    beside: dict[Place, dict[Place, None]] = defaultdict(dict)
    changing: set[Place] = set()
    grouped_of: dict[tuple[str, Strategy], list[Place]] = {}
    for name, strategies in found.items():
        sources = {e.operand: e.source for e in incoming[name] if e.source.group in ops}
        for s in strategies:
            places = [(sources[k], x) for k, x in enumerate(s.inputs) if x.is_shard and k in sources]
            places += [(Source(name, k), x) for k, x in enumerate(s.outputs) if x.is_shard]
            grouped = [p for p in places if p[1].groups > 1]
            if not grouped:
                continue
            grouped_of[name, s] = grouped
            for a, b in zip(grouped, grouped[1:], strict=False):
                beside[a][b] = beside[b][a] = None
            if len({x.groups for x in (*s.inputs, *s.outputs) if x.is_shard}) > 1:  # of leaves too: inputs that are put behind one another
                changing |= set(grouped)
    paying, reached = set(changing), [*changing]  # importing networkx takes longer than all of this
    while reached:
        fresh = beside[reached.pop()].keys() - paying
        paying |= fresh
        reached += fresh
    return {name: tuple(s for s in ss if (name, s) not in grouped_of or grouped_of[name, s][0] in paying) for name, ss in found.items()}
