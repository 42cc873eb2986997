"""A program of one rank and one micro-batch, cut into pipeline stages.

A stage is a run of operators. Values that derive from inputs alone are recomputed on every stage that needs them; all
others that cross a cut are sent from stage to stage, passing through the stages between. They must be differentiable, and the loss must
depend on them: the schedule sends a gradient back for every value that it sends forward, so a cut that anything else crosses is no cut.
Parameters before it would be given zeros where they have no gradient, which a decaying optimizer does not leave alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.capture.effects import changed_in_place
from autopar.errors import Infeasible
from autopar.ir import BlockCall, Lowered, Op, Program, Span, StageProgram, refs
from autopar.planner.fold import NotAlike
from autopar.planner.moments import Moments, derived_from_inputs

__all__ = ["Cuts", "Pieces", "Segment", "cut_stages", "legal_cuts", "recomputable", "segments_of", "used_on"]

MAX_SEGMENTS = 96  # candidates for cuts in one program; beyond it only the cheapest to cross are kept


@dataclass(frozen=True, slots=True)
class Segment:
    """Operators [start, stop) between two neighbouring legal cuts. block, instance: if it is exactly one block instance."""

    span: Span
    block: int = -1
    instance: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Legal positions (a cut stands before operator p) and the values that cross each."""

    crossing: Mapping[int, tuple[str, ...]]


def legal_cuts(program: Program) -> Cuts:
    """Every position at which the program can be cut, with the values to send there. None stands between two operators that use a buffer
    which one of them changes in place: each stage has a copy of its own."""
    derived, differentiated = derived_from_inputs(program), _differentiated(program)
    leaves = {x.value for x in program.leaves}
    last: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for r in refs(op):
            last[r] = index
    last[program.loss] = len(program.ops)
    for _, v in program.mutations:
        last[v] = max(last.get(v, 0), 0)
    ends: dict[int, list[str]] = {}
    alive: dict[str, None] = {}
    crossing: dict[int, tuple[str, ...]] = {}
    together = _uses_of_what_changes(program)
    for index, op in enumerate(program.ops):
        if index and not any(first < index <= last_use for first, last_use in together):
            values = tuple(alive)
            if values and all(v in differentiated for v in values):
                crossing[index] = values
        for o in op.outputs:
            if o is not None and o not in derived and o not in leaves and last.get(o, -1) > index:
                alive[o] = None
                ends.setdefault(last[o], []).append(o)
        for v in ends.pop(index, ()):
            alive.pop(v, None)
    return Cuts(crossing=crossing)


def _uses_of_what_changes(program: Program) -> list[tuple[int, int]]:
    """Of each buffer that operators change in place, the first and the last that use it, if they are two."""
    changed = {buffer for op in program.ops for buffer in changed_in_place(op)}
    uses: dict[str, tuple[int, int]] = {}
    for index, op in enumerate(program.ops) if changed else ():
        for r in refs(op):
            if r in changed:
                uses[r] = uses.get(r, (index, index))[0], index
    return [(first, last) for first, last in dict.fromkeys(uses.values()) if first < last]


def _differentiated(program: Program) -> set[str]:
    """The values through which the loss is differentiated, as far as the types of results say."""
    found = {program.loss}
    for op in reversed(program.ops):
        if not op.no_grad and any(o in found for o in op.outputs):
            found |= {r for r in refs(op) if program.types[r].grad}
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """A program between candidate cuts. segments: as it stands; order: the pieces of the whole program, as indices of segments (a
    folded program has fewer segments than pieces); copies: of each piece, which copy of its segment it is."""

    segments: tuple[Segment, ...]
    order: tuple[int, ...]
    copies: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, piece: int) -> Segment:
        return self.segments[self.order[piece]]

    def kind(self, piece: int, mode: int) -> tuple[int, int]:
        """Equal for instances of a block in one mode, and for no other pieces."""
        block = self[piece].block
        return (block, mode) if block >= 0 else (~piece, 0)


def segments_of(program: Program, cuts: Cuts, wanted: int) -> Pieces:
    """The program between candidate cuts: block boundaries where they give at least `wanted` pieces, else any legal cut,
    the cheapest to cross first. NotAlike if a folded program cannot be cut around what stands for several instances."""
    block_at: dict[tuple[int, int], tuple[int, int]] = {}
    edges: set[int] = set()
    folded = [(x.span, x.times) for x in program.repeats]
    for b, block in enumerate(program.blocks):
        for k, span in enumerate(block.spans):
            edges |= {span.start, span.stop}
            block_at[span.start, span.stop] = (b, k)
    needed = {p for span, _ in folded for p in (span.start, span.stop)}
    edges |= needed
    if not needed <= set(cuts.crossing) | {0, len(program.ops)}:
        raise NotAlike("the program cannot be cut around the instances that one stands for")

    def many(position: int) -> int:
        return next((n for span, n in folded if span.start <= position < span.stop), 1)

    positions = sorted(p for p in edges if p in cuts.crossing)
    if sum(map(many, positions)) + 1 < 2 * wanted:
        cost = {p: sum(program.types[v].nbytes for v in values) for p, values in cuts.crossing.items()}
        ranked = sorted(cost, key=lambda p: (p not in edges, cost[p], p))
        if folded:
            room, chosen = MAX_SEGMENTS, set(needed & set(cost))
            for p in ranked:
                room -= many(p)
                chosen |= {p} if room >= 0 or p in edges else set()
            ranked = sorted(chosen)
        elif len(ranked) > MAX_SEGMENTS:
            cheap = set(ranked[:MAX_SEGMENTS // 2])
            even = sorted(cost)
            cheap |= {even[k * len(even) // (MAX_SEGMENTS // 2)] for k in range(MAX_SEGMENTS // 2)}
            ranked = sorted(cheap)
        positions = sorted(ranked)
    bounds = [0, *positions, len(program.ops)]
    spans = [Span(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
    segments = tuple(Segment(s, *block_at.get((s.start, s.stop), (-1, -1))) for s in spans)
    order: list[int] = []
    copies: list[int] = []
    k = 0
    while k < len(segments):
        inside, n = next(((span, n) for span, n in folded if segments[k].span.start in span), (segments[k].span, 1))
        stop = next((x for x in range(k, len(segments)) if segments[x].span.start >= inside.stop), len(segments))
        order += [*range(k, stop)] * n
        copies += [copy for copy in range(n) for _ in range(k, stop)]
        k = stop
    return Pieces(segments=segments, order=tuple(order), copies=tuple(copies))


Again = Mapping[tuple[int, int], tuple[Span, ...]]  # (block, instance) -> what of it runs again, counted from its first operator


def cut_stages(moments: Moments, program: Program, positions: tuple[int, ...], recompute: Again, cuts: Cuts | None = None) -> Lowered:
    """The lowered program with cuts before the operators at `positions`. program:
    moments.body sharded over the remaining axes. cuts: the legal ones of it, where they are known. Raises Infeasible if a position is no
    legal cut."""
    cuts = legal_cuts(program) if cuts is None else cuts
    for p in positions:
        if p not in cuts.crossing:
            name = program.ops[p].name if 0 <= p < len(program.ops) else "none"
            raise Infeasible(f"the program cannot be cut before operator {p} ({name})")
    derived = derived_from_inputs(program)
    bounds = (0, *positions, len(program.ops))
    by_output = {o: (k, op) for k, op in enumerate(program.ops) for o in op.outputs if o is not None}
    stages = []
    for s, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        receives = cuts.crossing[start] if s else ()
        sends = cuts.crossing[stop] if stop in cuts.crossing and s < len(positions) else (program.loss,)
        indices = _needed(program, start, stop, derived, by_output, last=s == len(positions))
        ops = tuple(program.ops[k] for k in indices)
        outputs = tuple(v for v in program.outputs if _owner(program, v, bounds) == s)
        stages.append(
            StageProgram(
                index=s,
                ops=ops,
                receives=receives,
                sends=sends,
                calls=_calls(program, indices, recompute),
                mutations=tuple((b, v) for b, v in program.mutations if s == (0 if v in derived else _owner(program, v, bounds))),
                outputs=outputs,
            )
        )
    given = {x.value for x in program.inputs}  # by the call, or by the prologue
    for stage in stages:
        made = {o for op in stage.ops for o in op.outputs} | given
        assert all(v in made for _, v in stage.mutations), f"stage {stage.index} does not make what its buffers become"
    return Lowered(
        program=program.replace(inputs=tuple(x for x in program.inputs if x.path)),
        stages=tuple(stages),
        prologue=moments.prologue,
        prologue_outputs=moments.prologue_outputs,
        prologue_types=moments.prologue_types,
    )


def recomputable(program: Program, span: Span) -> bool:
    """Whether operators may run a second time: they change no buffer, and read none that the step changes."""
    mutated = {b.value for b in program.buffers if b.mutated}
    return not any(r in mutated for op in program.ops[span.start : span.stop] for r in refs(op))


def used_on(lowered: Lowered) -> dict[str, tuple[int, ...]]:
    """Value -> the stages whose operators read it, or that change it at the end; what the prologue reads, or
    cuts into micro-batches, on every stage."""
    used: dict[str, dict[int, None]] = {}
    for stage in lowered.stages:
        for value in (*(r for op in stage.ops for r in refs(op)), *(b for b, _ in stage.mutations)):
            used.setdefault(value, {})[stage.index] = None
    everywhere = tuple(stage.index for stage in lowered.stages)
    before = (*(v for op in lowered.prologue for v in refs(op)), *lowered.prologue_outputs)
    return {v: tuple(s) for v, s in used.items()} | dict.fromkeys(before, everywhere)


def _owner(program: Program, value: str, bounds: tuple[int, ...]) -> int:
    """The stage that makes it; the first one of what the prologue makes."""
    index = next((k for k, op in enumerate(program.ops) if value in op.outputs), 0)
    return max(s for s, b in enumerate(bounds[:-1]) if b <= index)


def _needed(
    program: Program, start: int, stop: int, derived: frozenset[str], by_output: Mapping[str, tuple[int, Op]], last: bool
) -> list[int]:
    """Operators of [start, stop) that are not derived, and the derived ones that they need, wherever they stand."""
    own = [k for k in range(start, stop) if not all(o in derived for o in program.ops[k].outputs if o is not None)]
    roots = [*(r for k in own for r in refs(program.ops[k])), *((program.loss,) if last else ())]
    mutated = [v for _, v in program.mutations if v in derived]
    roots += mutated if start == 0 else []
    roots += [v for v in program.outputs if v in derived and v in by_output and start <= by_output[v][0] < stop]
    chosen = set(own)
    stack = [r for r in roots if r in derived]
    while stack:
        found = by_output.get(stack.pop())
        if found is not None and found[0] not in chosen:
            chosen.add(found[0])
            stack += [r for r in refs(found[1]) if r in derived]
    return sorted(chosen)


def _calls(program: Program, indices: list[int], recompute: Again) -> tuple[BlockCall, ...]:
    """The block instances that lie whole in the stage."""
    position = {index: k for k, index in enumerate(indices)}
    calls = []
    for b, block in enumerate(program.blocks):
        for k, (span, prefix) in enumerate(zip(block.spans, block.prefixes, strict=True)):
            inside = [position[i] for i in range(span.start, span.stop) if i in position]
            if len(inside) == len(span) and inside[-1] - inside[0] + 1 == len(span):
                own = Span(inside[0], inside[-1] + 1)
                calls.append(BlockCall(span=own, block=b, instance=k, prefix=prefix, recompute=recompute.get((b, k), ())))
    return tuple(sorted(calls, key=lambda c: c.span.start))
