"""A program with many equal layers -> the same with few of them, so that nothing that is decided grows with their number.

Layers are equal one after another, or in periods: every second one reads another mask, every fourth is of another kind. Of a run of equal
parts (a layer, or a period) that follow one another, each reading the one before in the same way, the first, the second and the last are
kept; the second stands for all between (`Program.repeats`). What is decided for the folded program is unfolded onto the whole one place by
place, and the whole one is priced and checked before it becomes a plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir import Layout, Op, Program, Repeat, Span, Strategy, refs, rename_refs
from autopar.planner.shard import Assignment

__all__ = ["NotAlike", "fold", "unfold"]

LEAST = 4  # parts of a run that are worth folding: three are kept
LONGEST = 12  # layers of a period


class NotAlike(Exception):
    """A folded program does not correspond to the whole one place by place."""


def fold(program: Program) -> Program:
    """The program without the layers that others stand for; the program itself if there are none."""
    rename: dict[str, str] = {}
    gone: set[int] = set()
    stands: list[tuple[Span, int]] = []
    for run in _runs(program):
        gone |= {k for part in run[2:-1] for k in range(part.start, part.stop)}
        stands.append((run[1], len(run) - 2))
        for before, kept in zip(_ops(program, run[-2]), _ops(program, run[1]), strict=True):
            rename |= zip(before.outputs, kept.outputs, strict=True)  # type: ignore[arg-type]
    if not gone:
        return program
    rename = {old: new for old, new in rename.items() if old != new}
    position: dict[int, int] = {}
    ops: list[Op] = []
    for k, op in enumerate(program.ops):
        if k not in gone:
            position[k] = len(ops)
            ops.append(rename_refs(op, rename))
    read = {r for op in ops for r in refs(op)}
    lost = {r for k in gone for r in refs(program.ops[k])} - read
    lost |= {o for k in gone for o in program.ops[k].outputs if o is not None}

    def moved(span: Span) -> Span:
        return Span(position[span.start], position[span.stop - 1] + 1)

    blocks = []
    for block in program.blocks:
        stay = [k for k, span in enumerate(block.spans) if span.start not in gone]
        spans, prefixes = tuple(moved(block.spans[k]) for k in stay), tuple(block.prefixes[k] for k in stay)
        blocks.append(dataclasses.replace(block, spans=spans, prefixes=prefixes))
    return program.replace(
        ops=tuple(ops), blocks=tuple(blocks), repeats=tuple(Repeat(moved(span), times) for span, times in stands),
        types={v: t for v, t in program.types.items() if v not in lost}, inputs=tuple(x for x in program.inputs if x.value not in lost),
        params=tuple(p for p in program.params if p.value not in lost), buffers=tuple(b for b in program.buffers if b.value not in lost),
        mutations=tuple((b, v) for b, v in program.mutations if b not in lost and v not in lost),
    )  # fmt: skip


def _ops(program: Program, span: Span) -> tuple[Op, ...]:
    return program.ops[span.start : span.stop]


@dataclass(frozen=True, slots=True)
class _Layer:
    """An instance of a block, which is the same operator by operator as others of this number."""

    span: Span
    block: int


def _runs(program: Program) -> Iterator[list[Span]]:
    """Equal parts that follow one another: at least four."""
    layers = sorted((_Layer(span, b) for b, block in enumerate(program.blocks) for span in block.spans), key=lambda x: x.span.start)
    wiring = _Wiring(program)
    chain: list[_Layer] = []
    for layer in layers:
        if chain and chain[-1].span.stop != layer.span.start:
            yield from _of_chain(chain, wiring)
            chain = []
        chain.append(layer)
    yield from _of_chain(chain, wiring)


def _of_chain(chain: Sequence[_Layer], wiring: _Wiring) -> Iterator[list[Span]]:
    """The runs of layers without anything between them: those of the period that leaves the fewest, then others before and after these."""
    best, period, left = list[tuple[int, list[Span]]](), 0, len(chain)
    for p in range(1, min(LONGEST, len(chain) // LEAST) + 1):
        if left <= 3 * p:
            break  # a run of this period leaves as many
        found = _of_period(chain, p, wiring)
        if (kept := len(chain) - sum((len(run) - 3) * p for _, run in found)) < left:
            best, period, left = found, p, kept
    at = 0
    for start, run in best:
        yield from _of_chain(chain[at:start], wiring)
        yield run
        at = start + len(run) * period
    if best:
        yield from _of_chain(chain[at:], wiring)


def _of_period(chain: Sequence[_Layer], period: int, wiring: _Wiring) -> list[tuple[int, list[Span]]]:
    """The runs of parts of so many layers, and at which layer each begins."""
    kinds = [x.block for x in chain]

    def part(k: int) -> Span:
        return Span(chain[k].span.start, chain[k + period - 1].span.stop)

    found: list[tuple[int, list[Span]]] = []
    start = 0
    while start + LEAST * period <= len(chain):
        stop = start + period
        while stop < len(chain) and kinds[stop] == kinds[stop - period]:
            stop += 1
        run = [part(start)]
        for k in range(start + period, stop - period + 1, period) if stop - start >= LEAST * period else ():
            if not wiring.follows(run, part(k)):
                break
            run.append(part(k))
        if len(run) >= LEAST:
            found.append((start, run))
            start += len(run) * period
        else:
            start += 1
    return found


class _Wiring:
    """Who makes and who reads the values of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made = {o: k for k, op in enumerate(program.ops) for o in op.outputs if o is not None}
        self.readers: dict[str, list[int]] = {}
        for k, op in enumerate(program.ops):
            for r in refs(op):
                self.readers.setdefault(r, []).append(k)
        for value in (program.loss, *program.outputs):
            self.readers.setdefault(value, []).append(len(program.ops))
        self.writes: dict[str, list[str]] = {}  # value -> the buffers that become it
        for buffer, value in program.mutations:
            self.writes.setdefault(value, []).append(buffer)
        self.leaves = {x.value for x in program.leaves}

    def follows(self, run: Sequence[Span], span: Span) -> bool:
        """Whether a part reads the last of the run, and nothing else that differs, as the second of the run reads the first, and changes no
        buffers but its own, as that one does; and whether nobody but its follower reads that last one, if it is not the first. What the
        second and others read, the first reads too: each finds it used before."""
        program, before = self.program, run[-1]
        if not (self._read_until(before, span.stop) if len(run) > 1 else self._shares(run[0], span)):
            return False
        second = run[1] if len(run) > 1 else span
        pairs = list(zip(_ops(program, span), _ops(program, second), strict=True))
        alike: dict[str, str] = {}  # leaf that it reads -> the one that the second part reads in its place
        for mine, model in pairs:
            for r, s in zip(refs(mine), refs(model), strict=True):
                if r in self.leaves:
                    if alike.setdefault(r, s) != s or (r != s and not self._own(r, s, span, second)):
                        return False
                elif r != s and (s in self.leaves or not self._alike(r, s, span, second, before)):
                    return False
        own = range(span.start, span.stop)
        for o, m in itertools.chain.from_iterable(zip(mine.outputs, model.outputs, strict=True) for mine, model in pairs):
            changed, like = self.writes.get(o or "", []), self.writes.get(m or "", [])
            if [alike.get(b) for b in changed] != like or any(x not in own for b in changed for x in self.readers[b]):
                return False
        return True

    def _shares(self, first: Span, second: Span) -> bool:
        """Whether what the second part reads of what neither it has alone nor the first makes, the first reads in the same places."""
        own = range(second.start, second.stop)
        for op, before in zip(_ops(self.program, second), _ops(self.program, first), strict=True):
            for r, s in zip(refs(op), refs(before), strict=True):
                if r != s and (any(x not in own for x in self.readers[r]) if r in self.leaves else self.made[r] < first.start):
                    return False
        return True

    def _alike(self, value: str, like: str, span: Span, second: Span, before: Span) -> bool:
        """Whether the part makes a value, or the one before it, where the second part of the run has the other from."""
        return before.start <= self.made[value] and self.made[value] - span.start == self.made[like] - second.start

    def _read_until(self, part: Span, stop: int) -> bool:
        """Whether nothing from this operator on reads what the part makes, and nothing before it."""
        inside = range(part.start, stop)
        return all(x in inside for op in _ops(self.program, part) for o in op.outputs if o is not None for x in self.readers.get(o, ()))

    def _own(self, leaf: str, like: str, span: Span, second: Span) -> bool:
        """Whether the part alone reads the leaf, as the second part of the run reads the other."""
        types, batched = self.program.types, self.program.batched
        if like not in self.leaves or types[leaf] != types[like]:
            return False
        if batched is not None and (leaf in batched) != (like in batched):
            return False  # inputs, of which one is cut with the batch
        mine, others = self.readers[leaf], self.readers[like]
        return all(x in range(span.start, span.stop) for x in mine) and [x - span.start for x in mine] == [x - second.start for x in others]


def unfold(assignment: Assignment, folded: Program, whole: Program) -> Assignment:
    """What was decided for a folded program, for the whole one. NotAlike if the two do not correspond."""
    where = _places(folded, whole)
    ops: dict[str, Strategy] = {}
    leaves: dict[str, Layout] = {x.value: assignment.leaves[x.value] for x in whole.leaves if x.value in assignment.leaves}
    kept = {x.value for x in folded.leaves}
    for op, like in zip(whole.ops, where, strict=True):
        same = folded.ops[like]
        if same.target != op.target or len(refs(same)) != len(refs(op)) or len(same.outputs) != len(op.outputs):
            raise NotAlike(f"{op.name} of the whole program is not {same.name} of the folded one")
        ops[op.name] = assignment.ops[same.name]
        for r, s in zip(refs(op), refs(same), strict=True):
            if r not in leaves and s in kept:
                leaves[r] = assignment.leaves[s]
    made = {o for op in whole.ops for o in op.outputs}
    if missing := {x.value for x in whole.leaves} - set(leaves):
        raise NotAlike(f"nothing is decided for {', '.join(sorted(missing))}")
    return dataclasses.replace(assignment, ops=ops, leaves={v: x for v, x in leaves.items() if v not in made})


def _places(folded: Program, whole: Program) -> list[int]:
    """For every operator of the whole program, the one of the folded program that it is, or that stands for it."""
    places: list[int] = []
    at = 0
    for repeat in folded.repeats:
        places += (*range(at, repeat.span.start), *[*range(repeat.span.start, repeat.span.stop)] * repeat.times)
        at = repeat.span.stop
    places += range(at, len(folded.ops))
    if len(places) != len(whole.ops):
        raise NotAlike("the two have other operators")
    kept = {(b, span) for b, block in enumerate(folded.blocks) for span in block.spans}
    instances = [(b, Span(places[s.start], places[s.stop - 1] + 1)) for b, block in enumerate(whole.blocks) for s in block.spans]
    if len(folded.blocks) != len(whole.blocks) or not all(x in kept for x in instances):
        raise NotAlike("the two have other instances of a block")
    return places
