"""Operators that read or write elements by index. Dims that the index does not touch pass; positions of the index may be
split where it reads from a whole operand, or where what it writes is summed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from autopar.catalog.dims import Dims
from autopar.catalog.rule import OpView, register
from autopar.ir import Layout, P, R, S, Strategy, TensorType

__all__: list[str] = []


def _dim(view: OpView, name: str = "dim") -> int:
    """The dim that an argument names, not negative; of the first operand, which has dims."""
    dim = view.args()[name]
    assert isinstance(dim, int)
    return dim % len(view.ins[0].shape)


# ------------------------------------------------------------------------------------------- x[a, :, b]
@dataclass(frozen=True, slots=True)
class Advanced:
    """How x[indices] is built: dims `kept` of x pass, the broadcast indices stand before kept[position]; `block` is their shape."""

    kept: tuple[int, ...]
    position: int
    block: tuple[int, ...]

    @property
    def passing(self) -> list[tuple[int, int]]:
        """(dim of the result, dim of x that it is) for the dims that are not indexed."""
        return [(d if d < self.position else d + len(self.block), k) for d, k in enumerate(self.kept)]


def _advanced(view: OpView, indices: list[TensorType]) -> Advanced | None:
    """None where masks make the result's shape depend on data, or nothing is indexed."""
    given = view.args()["indices"]
    assert isinstance(given, tuple)
    used = [k for k, a in enumerate(given) if a is not None]
    if not used or any(t.dtype in (torch.bool, torch.uint8) for t in indices):
        return None
    adjacent = used[-1] - used[0] + 1 == len(used)
    kept = tuple(k for k in range(len(view.ins[0].shape)) if k not in used)
    return Advanced(kept, used[0] if adjacent else 0, tuple(torch.broadcast_shapes(*(t.shape for t in indices))))


def _split_block(how: Advanced, d: int, g: int, operands: Iterable[TensorType]) -> list[Layout]:
    """Operands that broadcast to the block (or end in it), S where they have its dim d at full size."""
    layouts = []
    for t in operands:
        k = d - (len(how.block) - len(t.shape))
        layouts.append(S(k, g) if k >= 0 and t.shape[k] == how.block[d] else R)
    return layouts


def index(view: OpView) -> Iterable[Strategy]:
    x, *indices = view.ins
    how = _advanced(view, indices)
    if how is None:
        return
    whole = [R] * len(indices)
    for d, k in how.passing:
        for g in view.splits(x.shape[k]):
            yield view.strategy([S(k, g), *whole], [S(d, g)])
    for d, size in enumerate(how.block):
        for g in view.splits(size) if size > 1 else ():
            yield view.strategy([R, *_split_block(how, d, g, indices)], [S(how.position + d, g)])
    yield view.strategy([P, *whole], [P])


def index_put(view: OpView) -> Iterable[Strategy]:
    """x with x[indices] = values, or += values (accumulate), which may then be done by several ranks in part."""
    x, *indices, values = view.ins
    accumulate, whole = bool(view.args()["accumulate"]), [R] * len(indices)
    if accumulate:
        yield view.strategy([P, *whole, P], [P])
    how = _advanced(view, indices)
    if how is None:
        yield from _mask_put(view, indices)
        return
    lead = len(how.kept) + len(how.block) - len(values.shape)
    for d, k in how.passing:
        for g in view.splits(x.shape[k]):
            value = S(d - lead, g) if d >= lead and values.shape[d - lead] == x.shape[k] else R
            yield view.strategy([S(k, g), *whole, value], [S(k, g)])
    for d, size in enumerate(how.block) if accumulate else ():
        at = how.position + d - lead
        for g in view.splits(size) if size > 1 else ():
            value = S(at, g) if at >= 0 and values.shape[at] == size else R
            yield view.strategy([P, *_split_block(how, d, g, indices), value], [P])


def _mask_put(view: OpView, indices: list[TensorType]) -> Iterable[Strategy]:
    """x[:, mask] = one number: element by element."""
    x, values = view.ins[0], view.ins[-1]
    given = view.args()["indices"]
    assert isinstance(given, tuple)
    if values.numel != 1 or len(indices) != 1 or not indices[0].shape:
        return
    first = next(k for k, a in enumerate(given) if a is not None)
    covered = range(first, first + len(indices[0].shape))
    for d, size in enumerate(x.shape):
        for g in view.splits(size):
            yield view.strategy([S(d, g), S(d - first, g) if d in covered else R, R], [S(d, g)])


# ------------------------------------------------------------------------------------------- along one dim
def gather(view: OpView) -> Iterable[Strategy]:
    """The index has the operand's dims; other dims than `dim` pass where it covers them."""
    x, at = view.ins
    if not x.shape or not at.shape or view.args()["sparse_grad"]:
        return
    dim = _dim(view)
    for d, size in enumerate(at.shape):
        for g in view.splits(size):
            if d == dim:
                yield view.strategy([R, S(d, g)], [S(d, g)])
            elif x.shape[d] == size:
                yield view.strategy([S(d, g), S(d, g)], [S(d, g)])
    yield view.strategy([P, R], [P])


def take_along_dim(view: OpView) -> Iterable[Strategy]:
    """gather whose operands broadcast; without a dim, of the flattened operand."""
    x, at = view.ins
    if view.args()["dim"] is None:
        for g in view.splits(at.shape[0]) if len(at.shape) == 1 else ():
            yield view.strategy([R, S(0, g)], [S(0, g)])
        yield view.strategy([P, R], [P])
        return
    if not x.shape or len(x.shape) != len(at.shape):
        return
    dim = _dim(view)
    for d, size in enumerate(view.outs[0].shape):
        for g in view.splits(size) if size > 1 else ():
            cut = [S(d, g) if t.shape[d] == size else R for t in view.ins]
            yield view.strategy([R, S(d, g)] if d == dim else cut, [S(d, g)])
    yield view.strategy([P, R], [P])


def scatter(view: OpView) -> Iterable[Strategy]:
    """Written into a copy of x along `dim`; other dims pass where the index covers x and the source. A scatter that adds
    may be done in part, by terms of the source or by its positions."""
    x, at, *source = view.ins
    args, name = view.args(), view.op.target.split(".")[1]
    if not x.shape or any(len(t.shape) != len(x.shape) for t in view.ins):
        return
    dim = _dim(view)
    for d, size in enumerate(x.shape):
        if d != dim and all(t.shape[d] == size for t in view.ins):
            for g in view.splits(size):
                yield view.strategy([S(d, g)] * len(view.ins), [S(d, g)])
    if name == "scatter_add" or (name == "scatter_reduce" and args["reduce"] == "sum" and args["include_self"]):
        yield view.strategy([P, R, P], [P])
        for g in view.splits(at.shape[dim]) if at.shape[dim] == source[0].shape[dim] else ():
            yield view.strategy([P, S(dim, g), S(dim, g)], [P])


def index_select(view: OpView) -> Iterable[Strategy]:
    x, at = view.ins
    if not x.shape:
        return
    dim = _dim(view)
    for d, size in enumerate(x.shape):
        for g in view.splits(size) if d != dim else ():
            yield view.strategy([S(d, g), R], [S(d, g)])
    for g in view.splits(at.shape[0]) if at.shape else ():
        yield view.strategy([R, S(0, g)], [S(dim, g)])
    yield view.strategy([P, R], [P])


def index_write(view: OpView) -> Iterable[Strategy]:
    """index_add, index_copy, index_reduce: other dims than `dim` pass; a sum may be made in part."""
    x, at, source = view.ins
    if not x.shape or len(source.shape) != len(x.shape) or len(at.shape) != 1:
        return
    dim = _dim(view)
    for d, size in enumerate(x.shape):
        for g in view.splits(size) if d != dim and source.shape[d] == size else ():
            yield view.strategy([S(d, g), R, S(d, g)], [S(d, g)])
    if view.op.target.startswith("aten.index_add."):
        yield view.strategy([P, R, P], [P])
        for g in view.splits(at.shape[0]):
            yield view.strategy([P, S(0, g), S(dim, g)], [P])


def index_fill(view: OpView) -> Iterable[Strategy]:
    x, *rest = view.ins
    for d, size in enumerate(x.shape):
        for g in view.splits(size) if d != _dim(view) else ():
            yield view.strategy([S(d, g), *[R] * len(rest)], [S(d, g)])


def masked_scatter(view: OpView) -> Iterable[Strategy]:
    """Takes the source's elements in the order of the mask's: which of them a shard needs depends on the others' masks."""
    yield view.strategy([P, R, P], [P])


# ------------------------------------------------------------------------------------------- written into a slice
def slice_scatter(view: OpView) -> Iterable[Strategy]:
    """Other dims than `dim` pass; `dim` too where the slice is the whole of it."""
    x, source = view.ins
    args, dim = view.args(), _dim(view)
    start, end, step = args["start"], args["end"], args["step"]
    all_of_it = start in (None, 0) and (end is None or (isinstance(end, int) and end >= x.shape[dim])) and step == 1
    for d, size in enumerate(x.shape):
        for g in view.splits(size) if d != dim or all_of_it else ():
            yield view.strategy([S(d, g)] * 2, [S(d, g)])
    yield view.strategy([P, P], [P])


def select_scatter(view: OpView) -> Iterable[Strategy]:
    dim = _dim(view)
    for d, size in enumerate(view.ins[0].shape):
        for g in view.splits(size) if d != dim else ():
            yield view.strategy([S(d, g), S(d - (d > dim), g)], [S(d, g)])
    yield view.strategy([P, P], [P])


# ------------------------------------------------------------------------------------------- classes, bins and counts
def one_hot(view: OpView) -> Iterable[Strategy]:
    """Without a number of classes their number depends on the data."""
    classes = view.args()["num_classes"]
    assert isinstance(classes, int)
    for d, size in enumerate(view.ins[0].shape) if classes > 0 else ():
        for g in view.splits(size):
            yield view.strategy([S(d, g)], [S(d, g)])


def histc(view: OpView) -> Iterable[Strategy]:
    """Counts add up, unless the bins' bounds are those of the data (min == max)."""
    args = view.args()
    for d, size in enumerate(view.ins[0].shape) if args["min"] != args["max"] else ():
        for g in view.splits(size):
            yield view.strategy([S(d, g)], [P])


def searchsorted(view: OpView) -> Iterable[Strategy]:
    """Values are looked up each on its own, in one sequence or in one for each row."""
    tensors = view.tensors()
    where, values = tensors["self"], view.outs[0]
    sequences = [i for i in range(len(view.ins)) if i != where]
    ndim = len(values.shape)
    for d, size in enumerate(values.shape):
        by_row = len(view.ins[sequences[0]].shape) > 1 and d < ndim - 1
        for g in view.splits(size):
            yield view.strategy([S(d, g) if i == where or by_row else R for i in range(len(view.ins))], [S(d, g)])


register("aten.index.Tensor", index)
register("aten.index_put.default", index_put)
register("aten.gather", gather)
register("aten.take_along_dim", take_along_dim)
register("aten.scatter aten.scatter_add aten.scatter_reduce", scatter)
register("aten.index_select", index_select)
register("aten.index_add aten.index_copy aten.index_reduce", index_write)
register("aten.index_fill", index_fill)
register("aten.masked_scatter", masked_scatter)
register("aten.slice_scatter", slice_scatter)
register("aten.select_scatter", select_scatter)
register("aten.one_hot", one_hot)
register("aten.histc", histc)
register("aten.searchsorted.Tensor", searchsorted)
register("aten.bucketize.Tensor aten.isin.Tensor_Tensor", Dims("b*, k*! -> b*"))
