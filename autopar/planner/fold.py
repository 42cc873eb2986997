"""A program with many equal layers -> the same with three of them, so that nothing that is decided grows with their number.

Of a run of instances of a block that follow one another, each reading the one before in the same way, the first, the second and
the last are kept; the second stands for all between (`Block.times`). What is decided for the folded program is unfolded onto the whole one
place by place, and the whole one is priced and checked before it becomes a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from autopar.ir import Block, Layout, Op, Program, Span, Strategy, refs, rename_refs
from autopar.planner.shard import Assignment

__all__ = ["NotAlike", "fold", "instances", "unfold"]

LEAST = 4  # instances of a run that are worth folding: three are kept


class NotAlike(Exception):
    """A folded program does not correspond to the whole one place by place."""


def instances(block: Block) -> int:
    """How many instances a block has in the whole program."""
    return sum(block.times) if block.times else len(block.spans)


def fold(program: Program) -> Program:
    """The program without the instances that another one stands for; the program itself if there are none."""
    made = {o: k for k, op in enumerate(program.ops) for o in op.outputs if o is not None}
    readers: dict[str, list[int]] = {}
    for k, op in enumerate(program.ops):
        for r in refs(op):
            readers.setdefault(r, []).append(k)
    last = len(program.ops)
    for value in (program.loss, *program.outputs):
        readers.setdefault(value, []).append(last)
    writes: dict[str, list[str]] = {}  # value -> the buffers that become it
    for buffer, value in program.mutations:
        writes.setdefault(value, []).append(buffer)
    leaves = {x.value for x in program.leaves}
    rename: dict[str, str] = {}
    gone: set[int] = set()
    times: dict[int, list[int]] = {}
    for b, block in enumerate(program.blocks):
        times[b] = [1] * len(block.spans)
        for run in _runs(program, block, made, readers, leaves, writes):
            for k in run[2:-1]:
                gone |= set(range(block.spans[k].start, block.spans[k].stop))
                times[b][k] = 0
            times[b][run[1]] = len(run) - 2
            before, kept = block.spans[run[-2]], block.spans[run[1]]
            for offset in range(len(kept)):
                rename |= zip(program.ops[before.start + offset].outputs, program.ops[kept.start + offset].outputs, strict=True)  # type: ignore[arg-type]
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
    blocks = []
    for b, block in enumerate(program.blocks):
        stay = [k for k, n in enumerate(times[b]) if n]
        blocks.append(
            dataclasses.replace(
                block, spans=tuple(Span(position[block.spans[k].start], position[block.spans[k].stop - 1] + 1) for k in stay),
                prefixes=tuple(block.prefixes[k] for k in stay), times=tuple(times[b][k] for k in stay),
            )
        )  # fmt: skip
    return program.replace(
        ops=tuple(ops), blocks=tuple(blocks), types={v: t for v, t in program.types.items() if v not in lost},
        inputs=tuple(x for x in program.inputs if x.value not in lost),
        params=tuple(p for p in program.params if p.value not in lost), buffers=tuple(b for b in program.buffers if b.value not in lost),
        mutations=tuple((b, v) for b, v in program.mutations if b not in lost and v not in lost),
    )  # fmt: skip


def _runs(
    program: Program, block: Block, made: Mapping[str, int], readers: Mapping[str, list[int]], leaves: set[str],
    writes: Mapping[str, list[str]],
) -> Iterator[list[int]]:  # fmt: skip
    """Indices of instances that may be folded, in order: at least four."""
    run: list[int] = []
    for k, span in enumerate(block.spans):
        if run and block.spans[run[-1]].stop == span.start and _follows(program, block, run, k, made, readers, leaves, writes):
            run.append(k)
            continue
        if len(run) >= LEAST:
            yield run
        run = [k]
    if len(run) >= LEAST:
        yield run


def _follows(
    program: Program, block: Block, run: list[int], k: int, made: Mapping[str, int], readers: Mapping[str, list[int]], leaves: set[str],
    writes: Mapping[str, list[str]],
) -> bool:  # fmt: skip
    """Whether instance k reads the one before it, and nothing else that differs, as the second of the run reads the first, and changes no
    buffers but its own, as that one does; and whether nobody but its follower reads that one before it, if it is not the first."""
    span, before = block.spans[k], block.spans[run[-1]]
    if len(run) > 1:
        inside = range(before.start, span.stop)
        for op in program.ops[before.start : before.stop]:
            if any(r not in inside for o in op.outputs if o is not None for r in readers.get(o, ())):
                return False
    second = block.spans[run[1]] if len(run) > 1 else span
    own = range(span.start, span.stop)
    alike: dict[str, str] = {}  # leaf that it reads -> the one that the second instance reads in its place
    for offset in range(len(span)):
        mine, model = program.ops[span.start + offset], program.ops[second.start + offset]
        for r, s in zip(refs(mine), refs(model), strict=True):
            if r in leaves:
                if alike.setdefault(r, s) != s:
                    return False
                if r == s:
                    continue  # all read it, or there is nothing to compare with yet
                if s not in leaves or program.types[r] != program.types[s] or any(x not in own for x in readers[r]):
                    return False
                if program.batched is not None and (r in program.batched) != (s in program.batched):
                    return False  # inputs, of which one is cut with the batch
                if [x - span.start for x in readers[r]] != [x - second.start for x in readers[s]]:
                    return False
                continue
            if r != s and (s in leaves or made[r] - span.start != made[s] - second.start or made[r] < before.start):
                return False
    for offset in range(len(span)):
        for o, m in zip(program.ops[span.start + offset].outputs, program.ops[second.start + offset].outputs, strict=True):
            changed, like = writes.get(o or "", []), writes.get(m or "", [])
            if [alike.get(b) for b in changed] != like or any(x not in own for b in changed for x in readers[b]):
                return False
    return True


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
    if len(folded.blocks) != len(whole.blocks) or sum(len(b.spans) for b in whole.blocks) != sum(instances(b) for b in folded.blocks):
        raise NotAlike("the two have other blocks")
    stands: dict[int, list[tuple[Span, Span]]] = {}
    for few, many in zip(folded.blocks, whole.blocks, strict=True):
        each = [s for s, n in zip(few.spans, few.times or (1,) * len(few.spans), strict=True) for _ in range(n)]
        if len(each) != len(many.spans) or any(len(a) != len(b) for a, b in zip(each, many.spans, strict=True)):
            raise NotAlike("the two have other instances of a block")
        for a, b in zip(each, many.spans, strict=True):
            stands[b.start] = [(a, b)]
    places: list[int] = []
    at = 0
    while len(places) < len(whole.ops):
        here = stands.get(len(places))
        if here is None:
            places.append(at)
            at += 1
            continue
        a, _ = here[0]
        places += range(a.start, a.stop)
        at = a.stop
    if at != len(folded.ops) or max(places, default=-1) >= len(folded.ops):
        raise NotAlike("the two have other operators between blocks")
    return places
