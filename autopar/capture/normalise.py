"""Operators that do nothing are dropped, means over labels become sums over counts, and what the loss does not need goes."""

from __future__ import annotations

import dataclasses
import functools
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping

import torch

from autopar.capture.effects import changed_in_place
from autopar.capture.infer import Inference, Meta
from autopar.capture.interpret import resolve
from autopar.capture.trace import Names, Trace, Traced
from autopar.ir import Arg, Op, Ref, refs, rename_refs
from autopar.run.region import REGION

__all__ = [
    "drops_randomness", "has_effect", "may_run_earlier", "normalise", "remove_dead", "split_label_means",
    "with_copies_returned", "with_old_values",
]  # fmt: skip

CONTIGUOUS = "aten.contiguous.default"
_MEAN, _SUM = 1, 2  # at::Reduction
_UNCHANGED = {"aten.alias.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default", "aten.resolve_conj.default"}
_DROPOUT = ("aten.dropout.", "aten.feature_dropout.", "aten.alpha_dropout.", "aten.feature_alpha_dropout.")
_SAME_SHAPE = {
    "aten.view.default", "aten.reshape.default", "aten.expand.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
    "aten.expand_as.default", "aten.view_as.default", "aten.reshape_as.default", "aten.slice.Tensor", "aten.squeeze.dim",
    "aten.squeeze.default", "aten.squeeze.dims", "aten.unflatten.int", "aten.broadcast_to.default",
}  # fmt: skip


def split_label_means(trace: Trace) -> Trace:
    """Cross entropy over class indices, averaged over the labels that count, becomes its sum divided by their number.

    The two are equal, with smoothed labels too (0/0 = nan if no label counts), and a sum can be split over the batch while a mean
    over a varying number of labels cannot.
    """
    ops: list[Traced] = []
    for traced in trace.ops:
        ops.extend(traced.with_op(op) for op in _split_label_mean(traced.op, trace.metas, trace.names))
    return dataclasses.replace(trace, ops=tuple(ops))


def _split_label_mean(op: Op, metas: Mapping[str, Meta], names: Names) -> Iterator[Op]:
    if op.target not in ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default"):
        yield op
        return
    given = {a.name: a.default_value for a in resolve(op.target)._schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in resolve(op.target)._schema.arguments), op.args)) | dict(op.kwargs)
    target, weight, ignored = given["target"], given["weight"], given["ignore_index"]
    assert isinstance(target, Ref), op
    indices = not metas[target.name].dtype.is_floating_point
    if given["reduction"] != _MEAN or not indices:
        yield op
        return
    name = op.outputs[0]
    assert name is not None, op

    def make(what: str, target: str, *args: Arg) -> Op:
        return dataclasses.replace(op, target=target, args=args, kwargs=(), outputs=(names.fresh(f"{name}_{what}"),))

    smoothing = (given["label_smoothing"],) if "label_smoothing" in given else ()
    total = make("sum", op.target, given["self"], target, weight, _SUM, ignored, *smoothing)
    valid = make("valid", "aten.ne.Scalar", target, ignored)
    if weight is None:
        counted = make("count", "aten.sum.default", Ref(valid.name))
        yield from (total, valid, counted)
    else:
        index = make("class", "aten.where.ScalarOther", Ref(valid.name), target, 0)
        picked = make("class_weight", "aten.index.Tensor", weight, (Ref(index.name),))
        masked = make("label_weight", "aten.where.ScalarOther", Ref(valid.name), Ref(picked.name), 0.0)
        counted = make("count", "aten.sum.default", Ref(masked.name))
        yield from (total, valid, index, picked, masked, counted)
    yield dataclasses.replace(op, target="aten.div.Tensor", args=(Ref(total.name), Ref(counted.name)), kwargs=())


def normalise(trace: Trace, infer: Inference) -> tuple[Trace, Mapping[str, str]]:
    """Drops operators whose result is their operand, makes default dtypes and squeezed dims explicit, and types every value anew; also
    what values are called now that were dropped, or are numbered as if others had never been there: of operators that torch records on
    some devices alone.
    """
    metas = {value: trace.metas[value] for value in trace.given}
    known = ChainMap(metas, dict(trace.metas))  # also of what passes before have made
    renamed: dict[str, str] = {}
    free: list[str] = []  # names of such, in order
    kept: list[Traced] = []
    for traced in trace.ops:
        for op in _plain(rename_refs(traced.op, renamed), known, trace.names):
            op, types = _typed(_explicit_squeeze(_explicit_dtype(op, trace.metas), metas), infer, metas)
            if _does_nothing(op, metas, types[0]):
                (output,), operand = op.outputs, op.args[0]
                assert output is not None and isinstance(operand, Ref), op
                if not metas[operand.name].grad or not op.no_grad:
                    renamed[output] = operand.name
                    free += [output] if op.target == CONTIGUOUS else []
                    continue
                op, types = _typed(dataclasses.replace(op, target="aten.detach.default", args=(operand,), kwargs=()), infer, metas)
            elif op.target == CONTIGUOUS and free:
                renamed[op.name] = free.pop(0)
                free.append(op.name)
                op = dataclasses.replace(op, outputs=(renamed[op.name],))
            metas.update((n, m) for n, m in zip(op.outputs, types, strict=True) if n is not None and m is not None)
            kept.append(traced.with_op(op))
    loss, *returned = (renamed.get(value, value) for value in (trace.loss, *trace.returned))
    return dataclasses.replace(trace, ops=tuple(kept), loss=loss, returned=tuple(returned), metas=metas), renamed


def _plain(op: Op, metas: Mapping[str, Meta], names: Names) -> Iterator[Op]:
    """The operator in a form that says what it does: one for each of its results where they have nothing to do with one another,
    sizes instead of a tensor that gives nothing else, random numbers in the shape of a tensor."""
    if op.target == "aten.broadcast_tensors.default":
        (operands,) = op.args
        assert isinstance(operands, tuple), op
        for operand, output in zip(operands, op.outputs, strict=True):
            assert output is not None, op
            yield dataclasses.replace(op, target="aten.expand.default", args=(operand, metas[output].shape), outputs=(output,), multi=False)
    elif op.target == "aten.cat.default" and (other := _without_empty(op, metas)) is not None:
        yield other
    elif op.target == PUT:
        yield from _chosen_by_element(op, metas, names) or (op,)
    elif op.target in _SIZE_OF_OTHER:
        yield dataclasses.replace(op, target=_SIZE_OF_OTHER[op.target], args=(op.args[0], metas[op.name].shape), kwargs=())
    elif op.target in _DRAWN:
        target, own = _DRAWN[op.target]
        made = dataclasses.replace(op, target="aten.empty.memory_format", outputs=(names.fresh(f"{op.name}_shape"),))
        yield dataclasses.replace(made, args=(metas[op.name].shape,), kwargs=(("dtype", metas[op.name].dtype),))
        yield dataclasses.replace(op, target=target, args=(Ref(made.name), *op.args[:own]), kwargs=())
    else:
        yield op


def _without_empty(op: Op, metas: Mapping[str, Meta]) -> Op | None:
    """A concatenation without operands of no elements, which torch passes over whatever the shape of the others is: `torch.empty(0)`, to
    which a loop adds. None if there are none, or if they decide the dtype."""
    operands = op.args[0]
    assert isinstance(operands, tuple), op
    kept = [r for r in operands if isinstance(r, Ref) and metas[r.name].shape != (0,)]
    if not kept or len(kept) == len(operands):
        return None
    dtype = functools.reduce(torch.promote_types, (metas[r.name].dtype for r in kept))
    if dtype != metas[op.name].dtype:
        return None
    if len(kept) == 1:
        return dataclasses.replace(op, target="aten.alias.default", args=(kept[0],), kwargs=())
    return dataclasses.replace(op, args=(tuple(kept), *op.args[1:]))


def _chosen_by_element(op: Op, metas: Mapping[str, Meta], names: Names) -> tuple[Op, ...]:
    """x[mask] = value, or x[:, mask] = value, where the same value goes to every place that the mask picks, as a choice between the two for
    each element, which can be split by samples. Nothing for any other."""
    x, given, value = op.args[:3]
    if not (isinstance(x, Ref) and isinstance(value, Ref) and isinstance(given, tuple)) or len(op.args) > 3 or op.kwargs:
        return ()
    *passed, mask = given
    if any(index is not None for index in passed) or not isinstance(mask, Ref) or metas[mask.name].dtype != torch.bool:
        return ()
    own, covers = metas[value.name].shape, metas[mask.name].shape
    rest = metas[x.name].shape[len(passed) + len(covers) :]
    own = own[1:] if len(own) == len(rest) + 1 and own[0] == 1 else own
    if not covers or len(own) > len(rest) or any(n not in (1, m) for n, m in zip(reversed(own), reversed(rest), strict=False)):
        return ()
    shape = (*(1,) * len(passed), *covers, *(1,) * len(rest))
    if shape == covers:
        return (dataclasses.replace(op, target="aten.where.self", args=(mask, value, x)),)
    over = dataclasses.replace(op, target="aten.reshape.default", args=(mask, shape), outputs=(names.fresh(f"{op.name}_mask"),))
    return over, dataclasses.replace(op, target="aten.where.self", args=(Ref(over.name), value, x))


PUT = "aten.index_put.default"
_SIZE_OF_OTHER = {
    "aten.expand_as.default": "aten.expand.default", "aten.view_as.default": "aten.reshape.default",
    "aten.reshape_as.default": "aten.reshape.default",
}  # fmt: skip
_DRAWN = {  # a factory of random numbers -> the operator on a tensor of that shape, and how many arguments they share
    "aten.rand.default": ("aten.rand_like.default", 0), "aten.randn.default": ("aten.randn_like.default", 0),
    "aten.randint.default": ("aten.randint_like.default", 1), "aten.randint.low": ("aten.randint_like.low_dtype", 2),
    "aten.normal.float_float": ("aten.normal_functional.default", 2),
}  # fmt: skip


def _typed(op: Op, infer: Inference, metas: Mapping[str, Meta]) -> tuple[Op, tuple[Meta | None, ...]]:
    """The operator and the types of its outputs. A view of memory whose order has changed since it was traced copies instead."""
    if op.target != "aten.view.default":
        return op, infer(op, metas)
    operand = op.args[0]
    assert isinstance(operand, Ref), op
    try:
        return op, infer(op, metas)
    except (RuntimeError, ValueError):
        op = dataclasses.replace(op, target="aten.reshape.default")
        return op, infer(op, metas)


def _explicit_dtype(op: Op, traced: Mapping[str, Meta]) -> Op:
    """A factory that leaves its floating dtype to torch's default says it."""
    arguments = [a.name for a in resolve(op.target)._schema.arguments] if op.target != REGION else []
    output = op.outputs[0]
    if op.kwarg("dtype") is not None or refs(op) or "dtype" not in arguments or output is None:
        return op
    if not traced[output].dtype.is_floating_point:
        return op
    if len(op.args) > arguments.index("dtype"):
        return op
    kwargs = tuple((k, v) for k, v in op.kwargs if k != "dtype")
    return dataclasses.replace(op, kwargs=(*kwargs, ("dtype", traced[output].dtype)))


def _explicit_squeeze(op: Op, metas: Mapping[str, Meta]) -> Op:
    """A squeeze says which dims it drops: those of size 1 here. On a rank, or for a micro-batch, others may have that size too."""
    if not op.target.startswith("aten.squeeze.") or not isinstance(op.args[0], Ref):
        return op
    shape = metas[op.args[0].name].shape
    given = op.args[1] if len(op.args) > 1 else tuple(range(len(shape)))
    asked = given if isinstance(given, tuple) else (given,)
    dims = tuple(d for d in asked if isinstance(d, int) and shape[d] == 1)
    return op if dims == asked else dataclasses.replace(op, target="aten.squeeze.dims", args=(op.args[0], dims))


def _does_nothing(op: Op, metas: Mapping[str, Meta], result: Meta | None) -> bool:
    """Whether the result has the data, shape, dtype and (where anything can tell) memory order of the first operand."""
    if op.multi or result is None or not op.args or not isinstance(op.args[0], Ref):
        return False
    x = metas[op.args[0].name]
    if (x.shape, x.dtype) != (result.shape, result.dtype):
        return False
    keeps_order = op.kwarg("memory_format") in (None, torch.preserve_format) or x.stride == result.stride
    if op.target in _UNCHANGED or op.target in _SAME_SHAPE:
        return True
    if op.target == "aten.detach.default":
        return not x.grad
    if op.target in ("aten.to.dtype", "aten.clone.default"):
        return keeps_order
    if op.target == CONTIGUOUS:
        return x.stride == result.stride or (x.is_contiguous and op.kwarg("memory_format") in (None, torch.contiguous_format))
    if op.target.startswith(_DROPOUT):
        return op.args[1] == 0 or op.args[2] is False
    if op.target in ("aten.add.Tensor", "aten.sub.Tensor"):
        # -0.0 + 0 is 0.0: told apart by a division alone, and not worth keeping where it is a loss: sum([...]) begins with 0
        same = op.target == "aten.sub.Tensor" or not x.dtype.is_floating_point or not x.shape
        return op.args[1] == 0 and not isinstance(op.args[1], Ref) and same
    if op.target in ("aten.mul.Tensor", "aten.div.Tensor"):
        return op.args[1] == 1 and not isinstance(op.args[1], Ref)
    return False


def remove_dead(trace: Trace, keep: tuple[str, ...]) -> Trace:
    """Only the operators that the loss, what is returned, the values in `keep` or an effect on buffers needs."""
    needed = {trace.loss, *trace.returned, *keep}
    kept: list[Traced] = []
    for traced in reversed(trace.ops):
        op = traced.op
        if needed.isdisjoint(o for o in op.outputs if o is not None) and not has_effect(op):
            continue
        needed.update(refs(op))
        kept.append(traced)
    return dataclasses.replace(trace, ops=tuple(reversed(kept)))


def with_copies_returned(
    trace: Trace, mutations: tuple[tuple[str, str], ...], infer: Inference
) -> tuple[Trace, tuple[tuple[str, str], ...]]:
    """What is returned or becomes the value of a buffer as it was given, an input or another buffer, is copied by an operator: only those
    are made by a stage. So is a view of that, which would change as it does (a parameter, in the optimizer's step)."""
    given = {trace.storages.get(v, v) for v in trace.given}
    ends = (*trace.returned, *(value for _, value in mutations))
    copies: dict[str, Traced] = {}
    metas = dict(trace.metas)
    for value in dict.fromkeys(v for v in ends if v in trace.given or trace.storages.get(v, v) in given):
        op = Op(target="aten.clone.default", args=(Ref(value),), outputs=(trace.names.fresh(f"{value}_returned"),))
        metas.update((n, m) for n, m in zip(op.outputs, infer(op, metas), strict=True) if n is not None and m is not None)
        copies[value] = Traced(op=op)
    if not copies:
        return trace, mutations
    named = {value: copy.op.name for value, copy in copies.items()}
    returned = tuple(named.get(v, v) for v in trace.returned)
    mutations = tuple((buffer, named.get(v, v)) for buffer, v in mutations)
    ops = [x for traced in trace.ops for x in (traced, *(copies.pop(o) for o in traced.op.outputs if o in copies))]
    return dataclasses.replace(trace, ops=(*ops, *copies.values()), returned=returned, metas=metas), mutations


def with_old_values(trace: Trace, changed: Collection[str], renamed: Mapping[str, str]) -> Trace:
    """Reads of buffers that the forward changes go to a copy where the backward pass may need what was read: the buffer has its new
    value by then. renamed: dropped values and what they are called now, as `normalise` returns it: a dropped copy is the buffer."""
    ops: list[Traced] = []
    metas = dict(trace.metas)
    memory = {name: {trace.storages.get(v) for v in (name, *(old for old, new in renamed.items() if new == name))} for name in changed}

    def needed(op: Op, buffer: str) -> bool:
        made = [o for o in op.outputs if o is not None]
        return any(trace.metas[o].grad or trace.storages.get(o, -1) in memory[buffer] for o in made)

    def with_copies(traced: Traced) -> Traced:
        copies = {name: trace.names.fresh(f"{name}_before") for name in refs(traced.op) if name in changed and needed(traced.op, name)}
        for name, copy in copies.items():
            clone = dataclasses.replace(traced.op, target="aten.clone.default", args=(Ref(name),), kwargs=(), outputs=(copy,), multi=False)
            metas[copy] = dataclasses.replace(trace.metas[name], grad=False)
            ops.append(traced.with_op(clone))
        return traced.with_op(rename_refs(traced.op, copies))

    for traced in trace.ops:
        changed_op = with_copies(traced)  # which adds the copies first
        ops.append(changed_op)
    return dataclasses.replace(trace, ops=tuple(ops), metas=metas)


def as_reshapes(trace: Trace) -> Trace:
    """Views as reshapes: the same values, whatever order in memory the parts of a tensor have after it is cut."""
    changed = [
        t.with_op(dataclasses.replace(t.op, target="aten.reshape.default")) if t.op.target in _VIEWS else t for t in trace.ops
    ]
    return dataclasses.replace(trace, ops=tuple(changed))


_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default"})


def drops_randomness(before: Trace, after: Trace) -> bool:
    """Whether some operators that draw random numbers went while others stayed: those draw other numbers from then on."""
    drawing = [sum(_may_draw(t.op) for t in trace.ops) for trace in (before, after)]
    return drawing[0] > drawing[1] > 0


def has_effect(op: Op) -> bool:
    """Whether the operator updates buffers in place."""
    return bool(changed_in_place(op))


def may_run_earlier(op: Op) -> bool:
    """Whether the operator may stand anywhere after its operands: it neither updates buffers nor draws random numbers."""
    return not has_effect(op) and not _may_draw(op)


def _may_draw(op: Op) -> bool:
    if op.target == REGION:
        return bool(op.kwarg("draws"))
    return torch.Tag.nondeterministic_seeded in resolve(op.target).tags
