"""Normalisations. The dims that the statistics are taken over stay whole; batch norm over a split batch synchronises them."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.dims import carried, split_names
from autopar.catalog.rule import OpView, local_code, localizes, register, set_args
from autopar.ir import Arg, Op, S, Strategy

__all__: list[str] = []


def layer_norm(view: OpView) -> Iterable[Strategy]:
    """Statistics over the last dims; the dims before them may be split."""
    normalized = view.args()["normalized_shape"]
    assert isinstance(normalized, tuple)
    yield from carried(view, range(len(view.ins[0].shape) - len(normalized)))


def group_norm(view: OpView) -> Iterable[Strategy]:
    """x [N, C, *] with statistics over each of num_groups runs of channels: split the batch, or channels by whole groups."""
    count = view.args()["num_groups"]
    assert isinstance(count, int)
    yield from carried(view, (0,))
    for g in view.splits(count):
        yield view.strategy([S(1, g), *[S(0, g)] * (len(view.ins) - 1)], [S(1, g)])


@localizes("aten.group_norm")
def _group_norm(op: Op, view: OpView, strategy: Strategy) -> Op:
    if not (strategy.inputs[0].is_shard and strategy.inputs[0].dim == 1):
        return op
    count = view.args()["num_groups"]
    assert isinstance(count, int)
    return set_args(op, num_groups=count // view.n)


def by_channel(view: OpView) -> Iterable[Strategy]:
    """x [N, C, *] and vectors [C]: split the channels of all of them."""
    for g in view.splits(view.ins[0].shape[1]) if len(view.ins[0].shape) > 1 else ():
        yield view.strategy([S(1, g), *[S(0, g)] * (len(view.ins) - 1)], [S(1, g)])


def instance_norm(view: OpView) -> Iterable[Strategy]:
    """Statistics over each channel of each sample. Running ones are means over the batch: what updates them does not split it."""
    yield from by_channel(view)
    if not (view.args()["use_input_stats"] and view.tensors()["running_mean"] is not None):
        yield from carried(view, (0,))


def batch_norm(view: OpView) -> Iterable[Strategy]:
    """Statistics over the batch (and the places): in training a split of these needs the statistics of all ranks."""
    yield from by_channel(view)
    training = bool(view.args()["training"])
    for s in carried(view, [d for d in range(len(view.ins[0].shape)) if d != 1]):
        yield view.strategy(s.inputs, s.outputs, local="sync_batch_norm", collective=True) if training else s


@local_code("sync_batch_norm")
def _sync_batch_norm(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    bound = view.args()
    operands = tuple(bound[name] for name in ("input", "weight", "bias", "running_mean", "running_var"))
    kwargs: tuple[tuple[str, Arg], ...] = (("axis", axis), ("momentum", bound["momentum"]), ("eps", bound["eps"]))
    return (Op(target="autopar.L.sync_batch_norm", args=operands, kwargs=kwargs, outputs=op.outputs, module=op.module, source=op.source),)


def weight_norm(view: OpView) -> Iterable[Strategy]:
    """v scaled to length g along all dims but one: that dim of both may be split. dim=-1: the length of the whole."""
    dim = view.args()["dim"]
    assert isinstance(dim, int)
    if dim >= 0:
        for g in view.splits(view.ins[0].shape[dim]):
            yield view.strategy([S(dim, g)] * len(view.ins), [S(dim, g)])


def distance(view: OpView) -> Iterable[Strategy]:
    """Of two tensors that broadcast, along one dim that is not split (cosine_similarity: `dim`, pairwise_distance: the last)."""
    ndim = max(len(t.shape) for t in view.ins)
    dim = view.args().get("dim", -1)
    assert isinstance(dim, int)
    if ndim == 0:
        return
    names = [f"d{k}" for k in range(ndim)]
    along = names[dim % ndim]
    keepdim = len(view.outs[0].shape) == ndim
    result = tuple("one" if name == along else name for name in names if keepdim or name != along)
    operands = [tuple(names[ndim - len(t.shape) :]) for t in view.ins]
    yield from split_names(view, operands, [result], [False, False], lambda name: name in (along, "one"))


def matrix_norm(view: OpView) -> Iterable[Strategy]:
    """Of the matrices that two dims hold; the dims before them may be split where these are the last."""
    dims, ndim = view.args()["dim"], len(view.ins[0].shape)
    assert isinstance(dims, tuple)
    if {d % ndim for d in dims if isinstance(d, int)} == {ndim - 2, ndim - 1}:
        yield from carried(view, range(ndim - 2))


register("aten.layer_norm aten.rms_norm aten.native_layer_norm aten._fused_rms_norm", layer_norm)
register("aten.group_norm", group_norm)
register("aten.instance_norm", instance_norm)
register("aten.batch_norm", batch_norm)
register("aten._weight_norm aten.norm_except_dim", weight_norm)
register("aten.cosine_similarity aten.pairwise_distance", distance)
register("aten.linalg_matrix_norm", matrix_norm)
register("autopar.L.sync_batch_norm", by_channel)
