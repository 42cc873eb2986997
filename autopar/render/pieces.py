"""Which operators stem from one line of the user's model, and what the user calls their results there."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.ir import Op, Ref, refs
from autopar.render.names import identifier

__all__ = ["Piece", "Wanted", "pieces", "wanted_names", "without_directory"]

_ASSIGNMENT = re.compile(r"\s*((?:[A-Za-z_]\w*\s*,\s*)*[A-Za-z_]\w*)\s*(?::[^=]+)?[-+*/@|&^]?=(?!=)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Statements [start, stop) that stem from one line of the user's model, or one block call."""

    start: int
    stop: int
    module: str = ""
    source: str = ""
    no_grad: bool = False
    is_call: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """The name that the user's line gives to a value. on_the_way: the value is a step towards the one that the line makes,
    and is read by nothing but the next step, so that it may bear the name if nothing else does."""

    name: str
    on_the_way: bool = False


def pieces(ops: Sequence[Op | None]) -> list[Piece]:
    """Runs of operators of one line of the user's. None stands for a block call. Operators without a source, which autopar
    added, belong to the piece that they stand in."""
    found: list[Piece] = []
    for index, op in enumerate(ops):
        place = (op.module, op.source) if op is not None else ("", "")
        no_grad = op is not None and op.no_grad
        last = found[-1] if found else None
        if last is not None and op is not None and not last.is_call and last.no_grad == no_grad:
            if place in ((last.module, last.source), ("", "")):
                found[-1] = replace(last, stop=index + 1)
                continue
        found.append(Piece(start=index, stop=index + 1, module=place[0], source=place[1], no_grad=no_grad, is_call=op is None))
    return found


def wanted_names(ops: Sequence[Op], kept: Iterable[str], weights: Collection[str] = ()) -> dict[str, Wanted]:
    """Value -> the name that the user's source line assigns it to, for the values of which the line tells it.

    kept: values that are read after the last operator. weights: values that are parameters or buffers. A transition's
    result is named after the value that it moves.
    """
    readers: dict[str, list[int]] = {value: [len(ops)] for value in kept}
    for index, op in enumerate(ops):
        for value in refs(op):
            readers.setdefault(value, []).append(index)
    found: dict[str, Wanted] = {}
    for piece in pieces(ops):
        own = [i for i in range(piece.start, piece.stop) if ops[i].source]
        targets = _assigned(piece.source)
        if own and targets:
            last = ops[own[-1]]
            names = targets if len(targets) == len(last.outputs) else targets[:1] if len(last.outputs) == 1 else []
            found.update((o, Wanted(n)) for o, n in zip(last.outputs, names, strict=False) if o is not None and n)
            if any(names) and len(last.outputs) == 1:
                found.update((value, Wanted(names[0], on_the_way=True)) for value in _steps(ops, own, readers, weights))
        for op in ops[piece.start : piece.stop]:
            moved = op.args[0] if op.target.startswith("autopar.C.") and op.args else None
            if isinstance(moved, Ref) and moved.name in found and (out := op.name).startswith(f"{moved.name}_"):
                found[out] = Wanted(identifier(found[moved.name].name + out.removeprefix(moved.name)))
    return found


def _steps(ops: Sequence[Op], own: list[int], readers: dict[str, list[int]], weights: Collection[str]) -> Iterable[str]:
    """The chain of values that leads to the last operator of a piece: each read by the next operator alone, which reads
    nothing else but weights."""
    for here, following in zip(reversed(own[:-1]), reversed(own[1:]), strict=True):
        outputs = ops[here].outputs
        if len(outputs) != 1 or outputs[0] is None or set(readers.get(outputs[0], ())) != {following}:
            return
        if any(value != outputs[0] and value not in weights for value in refs(ops[following])):
            return
        yield outputs[0]


def _assigned(source: str) -> list[str]:
    """'file.py:3: a, b = f(x)' -> ['a', 'b'] ('' for an underscore); none if the line is no assignment to names."""
    match = _ASSIGNMENT.match(re.sub(r"\A[^:]*:\d+:", "", without_directory(source)))
    if match is None:
        return []
    names = [n.strip() for n in match[1].split(",")]
    return [] if any(map(keyword.iskeyword, names)) else [identifier(n) if n.strip("_") else "" for n in names]


def without_directory(source: str) -> str:
    """'/home/me/model.py:12: code' -> 'model.py:12: code': the emitted file must not depend on where the user's lies."""
    return re.sub(r"\A(?:[A-Za-z]:)?[^:]*[/\\]", "", source)
