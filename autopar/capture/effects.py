"""Operators that change buffers in place although their schemas do not say so."""

from __future__ import annotations

from autopar.ir import Op, Ref

__all__ = ["EFFECTS", "changed_in_place"]

# target -> (position of the flag that says so, positions of the buffers)
EFFECTS = {"aten.batch_norm.default": (5, (3, 4)), "aten.instance_norm.default": (5, (3, 4))}


def changed_in_place(op: Op) -> tuple[str, ...]:
    """The buffers that an operator changes, which keep their names: of all that read them, the order counts."""
    if op.target not in EFFECTS or not op.args[EFFECTS[op.target][0]]:
        return ()
    return tuple(a.name for p in EFFECTS[op.target][1] if isinstance(a := op.args[p], Ref))
