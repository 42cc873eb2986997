"""Which operators of a rank's program a compiler, or a software's hand-written kernels, run as one kernel.

A pointwise operator or a reduction joins the one of its kind before it where nothing else, backward included, reads what passes between
them. That value is then neither written to memory nor read from there, and the host issues one kernel fewer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from autopar.ir import Program, refs
from autopar.measure import Counts

__all__ = ["fused"]

_FUSES = ("pointwise", "reduction")


def fused(
    program: Program, counts: Sequence[Counts], root: Mapping[str, str], saved: Set[str]
) -> tuple[list[Counts], frozenset[int]]:
    """What each operator of the program moves when chains of them are one kernel, and the indices of those that join an earlier one.

    counts: of each operator by itself. root: value -> the value whose storage it shares. saved: roots that backward needs.
    """
    found = [c.lean() for c in counts]
    joined = set()
    made = {o: k for k, op in enumerate(program.ops) for o in op.outputs if o is not None}
    readers: dict[str, set[int]] = {}
    for k, op in enumerate(program.ops):
        if counts[k].op_class != "view":
            for r in refs(op):
                readers.setdefault(root[r], set()).add(k)
    kept = saved | {root.get(v, v) for v in (program.loss, *program.outputs)}
    for k, op in enumerate(program.ops):
        if counts[k].op_class not in _FUSES:
            continue
        for v in {root[r] for r in refs(op)}:
            before = made.get(v)
            if before is None or counts[before].op_class not in _FUSES or readers[v] != {k} or v in kept:
                continue
            nbytes = program.types[v].nbytes
            found[k] = _without(found[k], nbytes, written=False)
            found[before] = _without(found[before], nbytes, written=True)
            joined.add(k)
    return found, frozenset(joined)


def _without(c: Counts, nbytes: int, *, written: bool) -> Counts:
    """An operator whose result is not written, or whose operand is not read; nor, in backward, its gradient."""
    t = c.traffic
    if written:
        t = t and t._replace(written=max(0.0, t.written - nbytes), backward_read=max(0.0, t.backward_read - nbytes))
        return dataclasses.replace(c, bytes_written=max(0, c.bytes_written - nbytes), traffic=t)
    t = t and t._replace(read=max(0.0, t.read - nbytes), backward_written=max(0.0, t.backward_written - nbytes))
    return dataclasses.replace(c, bytes_read=max(0, c.bytes_read - nbytes), traffic=t)
