"""Operators that move elements without computing: views, permutations, slices, joins. The algebra of factored dims.

A reshape keeps the order of the elements. S(k, g) on the operand cuts the flat order into `outer(k) * g` segments and
each segment into n parts; any dim m of the result for which the same cut is a shard S(m, g') carries it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from autopar.catalog.rule import OpView, dims_of, localizes, register, set_args
from autopar.ir import Layout, Op, P, R, S, Strategy

__all__ = ["mapped", "reshape", "segments"]


def segments(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[range, range]]:
    """Runs of dims of a reshape with equal products: ((0,1)->(0,)), ((2,)->(1,2)) and so on."""
    runs: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        i0, j0 = i, j
        a = before[i] if i < len(before) else 1
        b = after[j] if j < len(after) else 1
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while a != b:
            if a < b and i < len(before):
                a, i = a * before[i], i + 1
            elif j < len(after):
                b, j = b * after[j], j + 1
            else:
                return []
        runs.append((range(i0, i), range(j0, j)))
    return runs


def reshaped(layout: Layout, before: tuple[int, ...], after: tuple[int, ...], n: int) -> Iterator[Layout]:
    """The layouts of the result that are the same cut as `layout` of the operand."""
    if 0 in before:
        return
    for ins, outs in segments(before, after):
        if layout.dim not in ins:
            continue
        count = math.prod(before[k] for k in ins if k < layout.dim) * layout.groups
        for m in outs:
            outer = math.prod(after[k] for k in outs if k < m)
            if count % outer == 0 and after[m] > 1 and after[m] % (count // outer * n) == 0:
                yield S(m, count // outer)


def reshape(view: OpView) -> Iterable[Strategy]:
    before, after = view.ins[0].shape, view.outs[0].shape
    rest = [R] * (len(view.ins) - 1)
    for d, size in enumerate(before):
        for g in view.splits(size):
            for out in reshaped(S(d, g), before, after, view.n):
                yield view.strategy([S(d, g), *rest], [out])
    yield view.strategy([P, *rest], [P])


def mapped(view: OpView, source: dict[int, int]) -> Iterable[Strategy]:
    """source: dim of the result -> dim of the first operand that it is; other dims are not split."""
    rest = [R] * (len(view.ins) - 1)
    for d, k in source.items():
        for g in view.splits(view.outs[0].shape[d]):
            yield view.strategy([S(k, g), *rest], [S(d, g)] * len(view.outs))


def permute(view: OpView) -> Iterable[Strategy]:
    args, ndim = view.args(), len(view.ins[0].shape)
    if ndim == 0:
        return
    name = view.op.target.split(".")[1]
    order = list(range(ndim))
    if name == "permute":
        order = [d % ndim for d in dims_of(args["dims"])]
    elif name in ("transpose", "swapaxes", "swapdims"):
        a, b = (args[k] for k in ("dim0", "dim1")) if "dim0" in args else (args[k] for k in ("axis0", "axis1"))
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    elif name in ("t", "numpy_T", "mT", "adjoint", "matrix_H"):
        order = order[::-1] if name in ("t", "numpy_T") else [*order[:-2], *order[-2:][::-1]]
    elif name in ("movedim", "moveaxis"):
        moved = {d % ndim: s % ndim for s, d in zip(dims_of(args["source"]), dims_of(args["destination"]), strict=True)}
        left = iter(k for k in range(ndim) if k not in moved.values())
        order = [moved[d] if d in moved else next(left) for d in range(ndim)]
    yield from mapped(view, dict(enumerate(order)))
    yield view.strategy([P], [P])


def unsqueeze(view: OpView) -> Iterable[Strategy]:
    new = view.args()["dim"]
    assert isinstance(new, int)
    new %= len(view.outs[0].shape)
    yield from mapped(view, {d: d - (d > new) for d in range(len(view.outs[0].shape)) if d != new})
    yield view.strategy([P], [P])


def squeeze(view: OpView) -> Iterable[Strategy]:
    kept = [k for k in range(len(view.ins[0].shape)) if k not in _squeezed(view)]
    yield from mapped(view, dict(enumerate(kept)))
    yield view.strategy([P], [P])


def _squeezed(view: OpView) -> set[int]:
    shape = view.ins[0].shape
    dims = view.args().get("dim", tuple(range(len(shape))))
    return {d % len(shape) for d in dims_of(dims) if shape[d] == 1}


def expand(view: OpView) -> Iterable[Strategy]:
    """A dim that expand makes may be split from a replicated operand; a dim that passes is split on both sides."""
    before, after = view.ins[0].shape, view.outs[0].shape
    lead = len(after) - len(before)
    rest = [R] * (len(view.ins) - 1)
    for d, size in enumerate(after):
        passes = d >= lead and before[d - lead] == size
        for g in view.splits(size) if passes or size > 1 else ():
            yield view.strategy([S(d - lead, g) if passes else R, *rest], [S(d, g)])
    yield view.strategy([P, *rest], [P])


def select(view: OpView) -> Iterable[Strategy]:
    dim = view.args()["dim"]
    assert isinstance(dim, int)
    dim %= len(view.ins[0].shape)
    yield from mapped(view, {d: d + (d >= dim) for d in range(len(view.outs[0].shape))})
    yield view.strategy([P], [P])


def unbind(view: OpView) -> Iterable[Strategy]:
    dim = view.args()["dim"]
    assert isinstance(dim, int)
    dim %= len(view.ins[0].shape)
    yield from mapped(view, {d: d + (d >= dim) for d in range(len(view.outs[0].shape))})
    yield view.strategy([P], [P] * len(view.outs))


def slice_(view: OpView) -> Iterable[Strategy]:
    """Other dims pass. The sliced dim passes where the slice is whole segments of S(dim, groups)."""
    if len(view.ins) != 1:
        return  # its start is a tensor
    dim, start, stop, step = _slice_bounds(view)
    ndim = len(view.ins[0].shape)
    yield from mapped(view, {d: d for d in range(ndim) if d != dim})
    yield view.strategy([P], [P])
    size = view.ins[0].shape[dim]
    for g in view.splits(size) if step == 1 else ():
        segment = size // g
        if start % segment == 0 and (stop - start) % segment == 0 and stop > start:
            yield view.strategy([S(dim, g)], [S(dim, (stop - start) // segment)])
    every = step > 1 and start < step and view.outs[0].shape[dim] * step == size
    for g in view.splits(size) if every else ():  # one of each `step`, all along the dim: whole steps on every rank
        if size // (g * view.n) % step == 0:
            yield view.strategy([S(dim, g)], [S(dim, g)])


def _slice_bounds(view: OpView) -> tuple[int, int, int, int]:
    args, shape = view.args(), view.ins[0].shape
    if view.op.target.split(".")[1] == "narrow":
        dim, start, length = args["dim"], args["start"], args["length"]
        assert isinstance(dim, int) and isinstance(start, int) and isinstance(length, int)
        dim %= len(shape)
        start = start + shape[dim] if start < 0 else start
        return dim, start, start + length, 1
    dim, step = args["dim"], args["step"]
    assert isinstance(dim, int) and isinstance(step, int)
    dim %= len(shape)
    bounds = slice(args["start"], args["end"], step).indices(shape[dim])
    return dim, bounds[0], max(bounds[0], bounds[1]), step


def split(view: OpView) -> Iterable[Strategy]:
    """split, chunk, split_with_sizes: the split dim passes where every piece is whole segments of S(dim, groups)."""
    dim = view.args()["dim"]
    assert isinstance(dim, int)
    dim %= len(view.ins[0].shape)
    yield from mapped(view, {d: d for d in range(len(view.ins[0].shape)) if d != dim})
    yield view.strategy([P], [P] * len(view.outs))
    size = view.ins[0].shape[dim]
    lengths = [o.shape[dim] for o in view.outs]
    for g in sorted({*view.groups, *_common_segments(lengths)}):
        segment = size // g
        if size % (g * view.n) == 0 and sum(lengths) == size and all(x % segment == 0 and x for x in lengths):
            yield view.strategy([S(dim, g)], [S(dim, x // segment) for x in lengths])


def _common_segments(lengths: list[int]) -> set[int]:
    """How many segments a dim has when cut at the greatest common divisor of the pieces."""
    unit = math.gcd(*lengths)
    return {sum(lengths) // unit} if unit and len(lengths) * 8 >= sum(lengths) // unit else set()


def cat(view: OpView) -> Iterable[Strategy]:
    """Other dims pass; the joined dim passes where all operands are cut into segments of one length."""
    dim = view.args().get("dim", 0)
    assert isinstance(dim, int)
    dim %= len(view.outs[0].shape)
    if any(len(t.shape) != len(view.outs[0].shape) for t in view.ins):
        return  # torch lets empty one-dimensional tensors join anything
    for d, size in enumerate(view.outs[0].shape):
        for g in view.splits(size) if d != dim else ():
            yield view.strategy([S(d, g)] * len(view.ins), [S(d, g)])
    yield view.strategy([P] * len(view.ins), [P])
    lengths = [t.shape[dim] for t in view.ins]
    if min(lengths) == 0:
        return
    for segment in sorted({x // g for x in lengths for g in view.groups if x % g == 0} | {math.gcd(*lengths)}):
        counts = [x // segment for x in lengths]
        if segment % view.n == 0 and all(x % segment == 0 for x in lengths) and sum(counts) <= 8 * len(lengths):
            yield view.strategy([S(dim, c) for c in counts], [S(dim, sum(counts))])


def stack(view: OpView) -> Iterable[Strategy]:
    new = view.args().get("dim", 0)
    assert isinstance(new, int)
    new %= len(view.outs[0].shape)
    for d, size in enumerate(view.outs[0].shape):
        for g in view.splits(size) if d != new else ():
            yield view.strategy([S(d - (d > new), g)] * len(view.ins), [S(d, g)])
    yield view.strategy([P] * len(view.ins), [P])


def broadcast_tensors(view: OpView) -> Iterable[Strategy]:
    out = view.outs[0].shape
    for d, size in enumerate(out):
        for g in view.splits(size):
            leads = [len(out) - len(t.shape) for t in view.ins]
            ins = [S(d - k, g) if d >= k and t.shape[d - k] == size else R for k, t in zip(leads, view.ins, strict=True)]
            yield view.strategy(ins, [S(d, g)] * len(view.outs))


def repeat(view: OpView) -> Iterable[Strategy]:
    """Dims repeated once pass. A repeated dim keeps its cut: r copies of S(d, g) are S(d, r * g). Equal numbers of copies of what is
    replicated are a cut, too."""
    before, after = view.ins[0].shape, view.outs[0].shape
    lead = len(after) - len(before)
    for d, size in enumerate(before):
        times = after[d + lead] // size if size else 0
        for g in view.splits(size) if times else ():
            yield view.strategy([S(d, g)], [S(d + lead, times * g)])
        for g in view.splits(after[d + lead]) if times > 1 else ():
            if times % (g * view.n) == 0:
                yield view.strategy([R], [S(d + lead, g)])
    for d in range(lead):
        for g in view.splits(after[d]) if after[d] > 1 else ():
            yield view.strategy([R], [S(d, g)])
    yield view.strategy([P], [P])


# -------------------------------------------------------------------------------- sizes in arguments, made local
@localizes("aten.view aten.reshape aten._unsafe_view aten.expand aten.broadcast_to")
def _sizes(op: Op, view: OpView, strategy: Strategy) -> Op:
    name = "shape" if op.target.split(".")[1] == "reshape" else "size"
    return set_args(op, **{name: strategy.outputs[0].local_shape(view.outs[0].shape, view.n)})


@localizes("aten.flatten aten.unflatten aten.reshape_as aten.view_as aten.expand_as")
def _as_sizes(op: Op, view: OpView, strategy: Strategy) -> Op:
    """Where the operator would not compute the local shape by itself, its plain form that names it stands instead."""
    if not (strategy.inputs[0].is_shard or strategy.outputs[0].is_shard):
        return op
    shape = strategy.outputs[0].local_shape(view.outs[0].shape, view.n)
    target = "aten.expand.default" if "expand" in op.target else "aten.reshape.default"
    return dataclasses.replace(op, target=target, args=(op.args[0], shape), kwargs=())


@localizes("aten.repeat")
def _repeat(op: Op, view: OpView, strategy: Strategy) -> Op:
    if strategy.inputs[0].is_shard or not strategy.outputs[0].is_shard:
        return op
    repeats = list(view.args()["repeats"])  # type: ignore[arg-type]
    repeats[strategy.outputs[0].dim] //= view.n  # type: ignore[operator]
    return set_args(op, repeats=tuple(repeats))


@localizes("aten.slice aten.narrow")
def _slice(op: Op, view: OpView, strategy: Strategy) -> Op:
    if not strategy.inputs[0].is_shard:
        return op
    dim, start, stop, step = _slice_bounds(view)
    if strategy.inputs[0].dim != dim:
        return op
    if step > 1:
        return set_args(op, end=view.ins[0].shape[dim] // view.n)
    start, stop = start // view.n, stop // view.n
    if op.target.split(".")[1] == "narrow":
        return set_args(op, start=start, length=stop - start)
    return set_args(op, start=start, end=stop)


@localizes("aten.split aten.split_with_sizes aten.chunk aten.unsafe_chunk aten.unsafe_split")
def _split(op: Op, view: OpView, strategy: Strategy) -> Op:
    dim = view.args()["dim"]
    assert isinstance(dim, int)
    dim %= len(view.ins[0].shape)
    equal = len({o.shape[dim] for o in view.outs}) == 1
    if strategy.inputs[0].dim != dim or (op.target.endswith("chunk.default") and equal and view.args()["chunks"] == len(view.outs)):
        return op
    sizes = tuple(o.shape[dim] // view.n for o in view.outs)
    if op.target.startswith("aten.split_with_sizes"):
        return set_args(op, split_sizes=sizes)
    return dataclasses.replace(op, target="aten.split_with_sizes.default", args=(op.args[0], sizes, dim), kwargs=())


register("aten.view aten.reshape aten._unsafe_view aten.flatten aten.unflatten aten.reshape_as aten.view_as aten.ravel", reshape)
register("aten.permute aten.transpose aten.swapaxes aten.swapdims aten.t aten.numpy_T aten.mT aten.movedim aten.moveaxis", permute)
register("aten.unsqueeze", unsqueeze)
register("aten.squeeze", squeeze)
register("aten.expand aten.broadcast_to aten.expand_as", expand)
register("aten.select", select)
register("aten.unbind", unbind)
register("aten.slice aten.narrow", slice_)
register("aten.split aten.split_with_sizes aten.chunk aten.unsafe_chunk aten.unsafe_split", split)
register("aten.cat aten.concat aten.concatenate", cat)
register("aten.stack", stack)
register("aten.broadcast_tensors", broadcast_tensors)
register("aten.repeat", repeat)
