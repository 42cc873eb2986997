"""Which operator of one program is which of another, where both are of one model: before and after it changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher

from autopar.ir import Op, Program, refs

__all__ = ["matched"]


def matched(old: Program, new: Program) -> dict[str, str]:
    """Operator of `new` -> the one of `old` that stands at its place: in the same module, in the longest common runs of operators of the
    same kind. Names do not count, since one operator more renumbers those after it."""
    before, after = _by_module(old), _by_module(new)
    found: dict[str, str] = {}
    for module, ops in after.items():
        others = before.get(module, [])
        kinds, theirs = [_kind(new, op) for op in ops], [_kind(old, op) for op in others]
        found |= {ops[i].name: others[j].name for i, j in _common(kinds, theirs)}
    return found


def _by_module(program: Program) -> dict[str, list[Op]]:
    found: dict[str, list[Op]] = defaultdict(list)
    for op in program.ops:
        found[op.module].append(op)
    return found


def _kind(program: Program, op: Op) -> Hashable:
    """What must agree: the operator, and how many dims its operands and results have. Sizes may differ, and constants."""
    values = (*refs(op), *(o for o in op.outputs if o is not None))
    return op.target, tuple(len(program.types[v].shape) if v in program.types else -1 for v in values)


def _common(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Pairs of places. What is equal at both ends is taken off first: the rest is short where little has changed."""
    start, shorter = 0, min(len(ours), len(theirs))
    while start < shorter and ours[start] == theirs[start]:
        yield start, start
        start += 1
    end = 0
    while end < shorter - start and ours[len(ours) - 1 - end] == theirs[len(theirs) - 1 - end]:
        end += 1
        yield len(ours) - end, len(theirs) - end
    a, b = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    for run in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        yield from ((start + run.a + k, start + run.b + k) for k in range(run.size))
