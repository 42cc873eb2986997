"""Gradients that autograd adds: of a value that several operators read, each but the last one's comes to what is there already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

from autopar.ir import Program, refs

__all__ = ["added_bytes"]


def added_bytes(program: Program, views: Set[int]) -> dict[int, int]:
    """Operator, by its index -> bytes of the gradients that its backward adds to others. views: indices of operators without a kernel of
    their own: what they add counts at the first operator that reads what they give. Backward goes from the last reader to the first.
    Parameters are left out: their gradients are added up by micro-batch."""
    types, leaves = program.types, {x.value for x in program.leaves}
    readers: dict[str, list[int]] = defaultdict(list)
    for k, op in enumerate(program.ops):
        if not op.no_grad and any(types[o].grad for o in op.outputs if o is not None):
            for r in dict.fromkeys(refs(op)):
                if types[r].grad and r not in leaves:
                    readers[r].append(k)
    found: dict[int, int] = defaultdict(int)
    for value, of_value in readers.items():
        for k in of_value[:-1]:
            at = _computes(program, views, readers, k)
            if at is not None:
                found[at] += types[value].nbytes
    return dict(found)


def _computes(program: Program, views: Set[int], readers: dict[str, list[int]], k: int | None) -> int | None:
    while k is not None and k in views:
        k = next((r for o in program.ops[k].outputs if o is not None for r in readers.get(o, ())), None)
    return k
