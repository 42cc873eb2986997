"""Rows that are sorted by a key, worked on one by one or by group, and put back: tokens that a router sends to experts.

    ordered, order = sort(keys)                  keys [S], each below G      which row comes where
    rows = x[order], or x[order // c]            x [S, ...] or [S / c, ...]  a token and its c experts
    ends = cumsum(histc(ordered, G, 0, G - 1))   [G]                         where each group of rows ends
    grouped_mm(rows, weights, ends)              weights [G, ...]            and what works on rows one by one
    y[inverse], where inverse[order] = arange(S); or index_add(out, order // c, y)

What comes back for a row depends on that row, its key and the weights alone, so that a rank may do all of this with its own rows: it
sorts them by itself. Its order is no slice of the order of all rows: what lies so has the layout L (ir.Layout), from the sort to what
undoes it. Here each operator in between is given that strategy (`Op.by_rows`), if all that stands in the order of a sort is read so; a
sort with another reader is left as it is.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from autopar.catalog.schema import bind
from autopar.ir import Arg, L, Layout, Op, P, R, Ref, S, Strategy, TensorType, refs

__all__ = ["with_rows"]

Kind = Literal["keys", "order", "rows", "owners", "counts", "ends", "empty", "inverse", "unread"]

_WHOLE_NUMBERS = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes that hold keys and counts exactly
_EACH = (  # one element of the result from one of each operand
    "abs", "add", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "eq", "erf", "exp", "ge", "gelu", "gt", "hardsigmoid",
    "hardswish", "hardtanh", "le", "leaky_relu", "log", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "ne", "neg", "pow",
    "reciprocal", "relu", "relu6", "rsqrt", "sigmoid", "silu", "softplus", "sqrt", "square", "sub", "tanh", "where",
)  # fmt: skip
_ALONG = (  # each row by itself, unless it is along the rows
    "cat", "chunk", "glu", "log_softmax", "mean", "narrow", "select", "slice", "softmax", "split", "split_with_sizes", "squeeze", "sum",
    "transpose", "unsqueeze",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Role:
    """What a value is to the sort of this number. many: of owners, how many rows belong to one; of counts and ends, how many there are."""

    kind: Kind
    sort: int
    many: int = 1


@dataclass
class _Search:
    """size: of each sort, the rows that it sorts; below: what its keys are below."""

    types: Mapping[str, TensorType]
    producer: Mapping[str, Op]
    roles: dict[str, _Role] = field(default_factory=dict)
    by_rows: dict[str, tuple[int, Strategy]] = field(default_factory=dict)  # operator -> sort, strategy
    size: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)
    ranges: dict[int, str] = field(default_factory=dict)  # sort -> the arange that numbers its rows

    def role(self, value: Arg, *kinds: Kind) -> _Role | None:
        found = self.roles.get(value.name) if isinstance(value, Ref) else None
        return found if found is not None and found.kind in kinds else None

    def shape(self, value: Arg) -> tuple[int, ...]:
        return self.types[value.name].shape if isinstance(value, Ref) else ()

    def is_plain(self, value: Arg) -> bool:
        return isinstance(value, Ref) and value.name not in self.roles

    def says(
        self, op: Op, sort: int, kind: Kind | None, *, plain: Mapping[str, Layout] | None = None, out: Layout = L, many: int = 1
    ) -> None:
        """The operator works by rows of this sort. plain: operands that are no part of it, with their layouts; kind: of its results."""
        lies = {r: P if x.kind in ("counts", "ends") else L for r in refs(op) if (x := self.roles.get(r)) is not None} | dict(plain or {})
        made = [o for o in op.outputs if o is not None]
        self.by_rows[op.name] = sort, Strategy(inputs=tuple(lies[r] for r in refs(op)), outputs=(out,) * len(made))
        if kind is not None:
            self.roles |= dict.fromkeys(made, _Role(kind, sort, many))


def with_rows(ops: Sequence[Op], types: Mapping[str, TensorType], kept: Collection[str]) -> tuple[Op, ...]:
    """The operators, those around such sorts with a strategy by rows. kept: values that are read when the program ends."""
    found = _Search(types, {o: op for op in ops for o in op.outputs if o is not None})
    for op in ops:
        name = op.target.split(".")[1]
        look = _LOOKS.get(name)
        if look is not None and (any(r in found.roles for r in refs(op)) or name in ("sort", "argsort")):
            look(op, bind(op), found)
    if not found.by_rows:
        return tuple(ops)
    readers: dict[str, list[str]] = defaultdict(list)
    for op in ops:
        for r in refs(op):
            readers[r].append(op.name)
    closed = _closed(found, readers, kept)
    chosen = {name: strategy for name, (sort, strategy) in found.by_rows.items() if sort in closed}
    chosen |= {found.ranges[sort]: Strategy(inputs=(), outputs=(L,)) for sort in closed if sort in found.ranges}
    return tuple(dataclasses.replace(op, by_rows=chosen[op.name]) if op.name in chosen else op for op in ops)


def _closed(found: _Search, readers: Mapping[str, Sequence[str]], kept: Collection[str]) -> set[int]:
    """The sorts of which all that stands in their order is read by rows."""
    closed = set(range(len(found.size)))
    while True:
        by_rows = {name: sort for name, (sort, _) in found.by_rows.items() if sort in closed}
        bad = {x.sort for v, x in found.roles.items() if v in kept or any(by_rows.get(name) != x.sort for name in readers[v])}
        bad |= {sort for sort, v in found.ranges.items() if v in kept or any(name not in by_rows for name in readers[v])}
        if not bad & closed:
            return closed
        closed -= bad


# ------------------------------------------------------------------------------------------------- operators of the order
def _sort(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    keys = args["self"]
    if not isinstance(keys, Ref) or len(found.shape(keys)) != 1 or args.get("descending"):
        return
    if (order := found.role(keys, "order")) is not None:  # the sort of an order puts it back
        found.says(op, order.sort, "inverse")
        if len(op.outputs) > 1 and op.outputs[0] is not None:
            found.roles[op.outputs[0]] = _Role("unread", order.sort)
        return
    below = _below(keys.name, found)
    if not found.is_plain(keys) or below is None:
        return
    sort = len(found.size)
    found.size.append(found.shape(keys)[0])
    found.below.append(below)
    found.says(op, sort, "order", plain={keys.name: S(0)})
    if len(op.outputs) > 1 and op.outputs[0] is not None:
        found.roles[op.outputs[0]] = _Role("keys", sort)


def _below(value: str, found: _Search) -> int | None:
    """A number that every element is below, none being negative; None if that is not known: of places of the largest in a dim."""
    op = found.producer.get(value)
    if op is None:
        return None
    name, args = op.target.split(".")[1], bind(op)
    operand = args.get("self")
    if not isinstance(operand, Ref):
        return None
    if name in ("reshape", "view", "flatten", "clone", "contiguous", "_unsafe_view", "squeeze", "unsqueeze", "transpose", "to"):
        return _below(operand.name, found) if found.types[value].dtype in (torch.int32, torch.int64) else None
    place = 1 if name in ("topk", "sort", "max") else 0 if name in ("argmax", "argsort") else None
    if place is None or len(op.outputs) <= place or op.outputs[place] != value or not isinstance(dim := args.get("dim", -1), int):
        return None
    return found.shape(operand)[dim] if found.shape(operand) else None


def _cast(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    role = found.role(args["self"], "keys", "counts", "ends")
    if role is None:
        _each(op, args, found)
    elif found.types[op.name].dtype in _WHOLE_NUMBERS:
        found.says(op, role.sort, role.kind, out=L if role.kind == "keys" else P, many=role.many)


def _floor_divide(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    role, each = found.role(args["self"], "order"), args["other"]
    rounds = op.target.split(".")[1] == "floor_divide" or args.get("rounding_mode") == "floor"
    if role is not None and rounds and isinstance(each, int) and each > 0 and found.size[role.sort] % each == 0:
        found.says(op, role.sort, "owners", many=each)
    else:
        _each(op, args, found)


def _index(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    data, where = args["self"], args["index"] if "index" in args else args["indices"]
    if isinstance(where, tuple):
        if not where or any(w is not None for w in where[1:]):
            return
        where = where[0]
    if args.get("dim", 0) != 0 or not isinstance(data, Ref) or not found.shape(data):
        return
    role, rows = found.role(where, "order", "owners", "keys", "inverse"), found.shape(data)[0]
    if role is None:
        return
    if role.kind == "inverse":
        if found.role(data, "rows") == _Role("rows", role.sort):
            found.says(op, role.sort, None, out=S(0))
    elif found.is_plain(data) and (role.kind == "keys" or rows * role.many == found.size[role.sort]):
        found.says(op, role.sort, "rows", plain={data.name: R if role.kind == "keys" else S(0)})


def _histc(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    role, bins = found.role(args["self"], "keys"), args["bins"]
    if role is not None and isinstance(bins, int) and (args["min"], args["max"]) == (0, bins - 1) and 1 < bins >= found.below[role.sort]:
        found.says(op, role.sort, "counts", out=P, many=bins)


def _cumsum(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    role = found.role(args["self"], "counts")
    if role is not None and args["dim"] in (0, -1) and found.types[op.name].dtype in _WHOLE_NUMBERS:
        found.says(op, role.sort, "ends", out=P, many=role.many)


def _like(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    if (role := found.role(args["self"], "order")) is not None:
        found.says(op, role.sort, "empty")


def _put(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    """The numbers of the rows at the places of an order: what undoes it."""
    indices = args["indices"] if "indices" in args else (args["index"],)
    values = args["values"] if "values" in args else args.get("src")
    empty = found.role(args["self"], "empty")
    if empty is None or not isinstance(indices, tuple) or len(indices) != 1 or args.get("accumulate") or args.get("dim", 0) != 0:
        return
    numbers = found.producer.get(values.name) if isinstance(values, Ref) else None
    size = found.size[empty.sort]
    if found.role(indices[0], "order") != _Role("order", empty.sort) or numbers is None or numbers.target != "aten.arange.default":
        return
    if bind(numbers)["end"] == size and numbers.name not in found.roles:
        found.says(op, empty.sort, "inverse", plain={numbers.name: L})
        found.ranges[empty.sort] = numbers.name


def _index_add(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    out, owners, rows = args["self"], found.role(args["index"], "owners", "order"), found.role(args["source"], "rows")
    if owners is None or rows is None or owners.sort != rows.sort or args["dim"] != 0 or not found.is_plain(out):
        return
    assert isinstance(out, Ref)
    if found.shape(out)[0] * owners.many == found.size[owners.sort]:
        found.says(op, owners.sort, None, plain={out.name: S(0)}, out=S(0))


# ------------------------------------------------------------------------------------------------------ operators of rows
def _grouped(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    rows, weights = args.get("input", args.get("self")), args.get("weight", args.get("mat2"))
    role, ends = found.role(rows, "rows"), found.role(args["offs"], "ends")
    if role is None or ends is None or role.sort != ends.sort or not found.is_plain(weights) or args.get("bias") is not None:
        return
    assert isinstance(weights, Ref)
    if len(found.shape(rows)) == 2 and found.shape(weights)[0] == ends.many:
        found.says(op, role.sort, "rows", plain={weights.name: R})


def _each(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    _by_themselves(op, found, lambda shape: len(shape) < len(found.types[op.name].shape) or shape[0] == 1)


def _along(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    made = [op.name] if op.target.startswith("aten.unsqueeze") else []
    ndim = max(len(found.types[v].shape) for v in (*refs(op), *made))
    named = [args[name] for name in ("dim", "dim0", "dim1") if name in args]
    dims = [d for each in named for d in (each if isinstance(each, tuple) else (each,))]
    if named and all(isinstance(d, int) and ndim and d % ndim > 0 for d in dims):
        _by_themselves(op, found, lambda shape: False)


def _reshape(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    _by_themselves(op, found, lambda shape: False)


def _normed(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    over = args["normalized_shape"]
    if isinstance(over, tuple) and len(over) < len(found.shape(args.get("input", args.get("self")))):
        _by_themselves(op, found, lambda shape: shape == over)


def _linear(op: Op, args: Mapping[str, Arg], found: _Search) -> None:
    """A product with rows, along another dim than theirs."""
    rows = args.get("input", args.get("self"))
    if found.role(rows, "rows") is not None and len(found.shape(rows)) > 1 and all(r not in found.roles for r in refs(op)[1:]):
        _by_themselves(op, found, lambda shape: len(shape) <= 2)


def _by_themselves(op: Op, found: _Search, takes: Callable[[tuple[int, ...]], bool]) -> None:
    """An operator whose result has a row for each of its operands that are rows. takes: operands of which shape may stand beside."""
    operands = dict.fromkeys(refs(op))
    rows = [r for r in operands if r in found.roles]
    roles = {found.roles[r] for r in rows}
    if len(roles) != 1 or next(iter(roles)).kind != "rows":
        return
    sort = next(iter(roles)).sort
    plain = [r for r in operands if r not in found.roles]
    shapes = [found.types[v].shape for v in (*rows, *(o for o in op.outputs if o is not None))]
    if len({len(found.types[r].shape) for r in rows}) == 1 and all(s and s[0] == found.size[sort] for s in shapes):
        if all(takes(found.types[r].shape) for r in plain):
            found.says(op, sort, "rows", plain=dict.fromkeys(plain, R))


_LOOKS: dict[str, Callable[[Op, Mapping[str, Arg], _Search], None]] = {
    **dict.fromkeys(_EACH, _each), **dict.fromkeys(_ALONG, _along), "to": _cast, "sort": _sort, "argsort": _sort, "div": _floor_divide,
    "floor_divide": _floor_divide, "index": _index, "index_select": _index, "histc": _histc, "cumsum": _cumsum, "empty_like": _like,
    "zeros_like": _like, "index_put": _put, "scatter": _put, "index_add": _index_add, "_grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped, "reshape": _reshape, "view": _reshape, "layer_norm": _normed, "rms_norm": _normed, "linear": _linear,
    "mm": _linear, "matmul": _linear,
}  # fmt: skip
