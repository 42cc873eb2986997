"""In-place operators become functional ones, through views too.

Values that share memory form a tree: a base (the tensor that owns the memory) and views, each made by an operator from its
parent. Writing to a view makes a new value of the view, and from it new values of its parents up to the base (`slice_scatter`
and its kin); every other view of that base is stale from then on, and is made anew from its parent when next read. What
autograd does for writes through views is the same (its CopySlices), so gradients are those of the original.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from autopar.capture.effects import EFFECTS, changed_in_place
from autopar.capture.infer import Inference, Meta
from autopar.capture.inplace import functional_target
from autopar.capture.interpret import resolve
from autopar.capture.region_ops import HOOK
from autopar.capture.trace import Trace, Traced
from autopar.errors import CaptureError, TensorsChange
from autopar.ir import Arg, Buffer, Op, Param, Ref, map_refs, refs
from autopar.run.region import REGION

__all__ = ["functionalize"]

_SAME_DATA = {
    "aten.alias", "aten.contiguous", "aten.to", "aten.clone", "aten.lift_fresh", "aten.expand_as", "aten.expand", "aten.view_as",
    "aten.reshape_as", "aten.dropout", "aten.atleast_1d", "aten.atleast_2d", "aten.detach", "aten.broadcast_to", "aten.resolve_conj",
    "aten.resolve_neg", "aten.broadcast_tensors", "aten.lift_fresh_copy",
}  # fmt: skip
_SAME_ORDER = {
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.squeeze", "aten.unsqueeze", "aten.ravel",
    "aten.squeeze_copy", "aten.view_as", "aten.reshape_as", "aten.atleast_1d", "aten.atleast_2d", "aten.atleast_3d", "aten._reshape_alias",
}  # fmt: skip
_METADATA_ONLY = {"unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_"}
_OTHERWISE_TRACED = {"aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"}
"""For their states on a GPU torch's export states a dim too many (cuDNN's, torch 2.11); they have the same shapes on every device."""
_UNTRACEABLE = {"set_", "resize_", "resize_as_", "as_strided_"}


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """How a value was made from memory that it shares: output `index` of an operator on `parent`."""

    parent: str
    op: Op
    index: int


def functionalize(trace: Trace, infer: Inference, written: Collection[str] = ()) -> tuple[Trace, tuple[tuple[str, str], ...]]:
    """The trace without operators that write to their operands, and its mutations: (buffer, the value it ends with). Frozen parameters
    that it writes to are buffers of it, and so are those of which `written` has a name.

    Raises CaptureError for writes that have no functional form, or that would change what gradients mean.
    """
    return _Functionalizer(trace, infer).run(written)


@functools.lru_cache(maxsize=1 << 12)
def _written_by(target: str) -> tuple[str, ...]:
    """The names of the arguments that an operator writes to."""
    arguments = resolve(target)._schema.arguments if target != REGION else ()
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


class _Functionalizer:
    def __init__(self, trace: Trace, infer: Inference) -> None:
        self.trace, self.infer = trace, infer
        self.metas: dict[str, Meta] = {n: trace.metas[n] for n in trace.given}
        self.ops: list[Traced] = []
        self.same_as: dict[str, str] = {}  # the result of an in-place operator is its operand
        self.views: dict[str, _View] = {}
        self.current: dict[str, str] = {n: n for n in self.metas}  # what a traced value is called now
        self.version: dict[str, int] = {}  # of a base: how often it was written to
        self.seen_version: dict[str, int] = {}  # of a view: the base's version that it was made from
        self.last_hook: dict[str, str] = {}  # a traced value -> the result of the hook on it that is given gradients last
        self.has_hook: dict[str, str] = {}  # a base of which a value has a hook -> the line that registers it
        self.closed: dict[str, str] = {}  # a base that a hook on an activation reads -> the line that registers it
        self.written_at: dict[str, str] = {}  # of a base: the line that last wrote to it
        self.origin: Traced  # the traced operator that is being rewritten

    def run(self, written_before: Collection[str]) -> tuple[Trace, tuple[tuple[str, str], ...]]:
        kept = {name for traced in self.trace.ops for name in changed_in_place(traced.op)}
        self.trace = _with_buffers(self.trace, [p for p in self.trace.params if p.value in kept and not p.trainable])
        for traced in self.trace.ops:
            self.origin, op = traced, traced.op
            if op.target == HOOK:
                self._hooked(op)
                continue
            if op.target.startswith(FOREACH) and (each := _one_by_one(op, self.trace.names.fresh)):
                for one in each:
                    self._in_place(one, ["self"])
                continue
            written = _written_by(op.target)
            if not written:
                self._read_only(op)
            elif op.target.split(".")[1] in _METADATA_ONLY:
                self._read_only(self._returning(op))
            else:
                self._in_place(op, [*written])
        loss, *returned = (self._now(value) for value in (self.trace.loss, *self.trace.returned))
        known = frozenset(written_before)
        frozen = [p for p in self.trace.params if self.version.get(p.value, 0) or not known.isdisjoint((p.fqn, *p.aliases))]
        self.trace = _with_buffers(self.trace, frozen)
        mutations = []
        for buffer in self.trace.buffers:
            if self.version.get(buffer.value, 0):
                if buffer.fqn is None:
                    what = self.trace.outside.get(buffer.value, "a tensor of the model")
                    raise TensorsChange(
                        f"the forward changes {what}, which is neither parameter nor buffer\n  at {self.written_at[buffer.value]}\n"
                        f"  what to do: register it as a buffer",
                        [what],
                    )
                mutations.append((buffer.value, self._now(buffer.value)))
        for name in (i.value for i in self.trace.inputs if self.version.get(i.value, 0)):
            raise CaptureError(
                f"the forward writes to its input {name}\n  at {self.written_at[name]}\n  what to do: let it work on a copy: "
                f"{name} = {name}.clone()"
            )
        storages = {name: storage for name, storage in self.trace.storages.items() if name not in self.same_as}  # those are new now
        trace = dataclasses.replace(self.trace, ops=tuple(self.ops), metas=self.metas, storages=storages)
        return dataclasses.replace(trace, loss=loss, returned=tuple(returned)), tuple(mutations)

    # ---------------------------------------------------------------------------------------------------- emitting ops
    def _emit(self, op: Op) -> tuple[str | None, ...]:
        """Adds an operator whose operands are current values."""
        for name, meta in zip(op.outputs, self.infer(op, self.metas), strict=True):
            if name is not None and meta is not None:
                self.metas[name] = meta
        self.ops.append(self.origin.with_op(op))
        return op.outputs

    def _new(self, target: str, *args: Arg, like: str, no_grad: bool | None = None) -> str:
        """Adds an operator that the trace did not have; the name of its result, made from that of the value it is about."""
        origin = self.origin.op
        name = self.trace.names.fresh(like)
        no_grad = origin.no_grad if no_grad is None else no_grad
        self._emit(Op(target=target, args=args, outputs=(name,), no_grad=no_grad, module=origin.module, source=origin.source))
        return name

    # ------------------------------------------------------------------------------------------------ values and views
    def _same(self, name: str) -> str:
        while name in self.same_as:
            name = self.same_as[name]
        return name

    def _base(self, name: str) -> str:
        while name in self.views:
            name = self.views[name].parent
        return name

    def _now(self, name: str) -> str:
        """The value that a traced value has now, made anew if its memory was written to since."""
        name = self._same(name)
        if not self.version:  # nothing was written to
            return self.current[name]
        base = self._base(name)
        if name != base and self.seen_version[name] != self.version.get(base, 0):
            view = self.views[name]
            parent = self._now(view.parent)
            op = map_refs(view.op, lambda n: Ref(parent if self._same(n) == view.parent else self._now(n)))
            op = dataclasses.replace(op, outputs=tuple(o and self.trace.names.fresh(o) for o in op.outputs))
            self._emit(op)
            for old, new in zip(view.op.outputs, op.outputs, strict=True):
                if old is not None and new is not None:
                    self.current[old] = new
                    self.seen_version[old] = self.version.get(base, 0)
        return self.current[name]

    def _read_only(self, op: Op) -> None:
        if op.target == "aten.copy.default":
            op = self._of_the_source(op)
        new = map_refs(op, lambda n: Ref(self._now(n)))
        self._check_effects(new)
        self._emit(new)
        for output in op.outputs:
            if output is not None and output in self.metas:
                self._check_type(op, self.metas[output], self.trace.metas[output])
        operands = [self._same(n) for n in refs(op)]
        for index, output in enumerate(op.outputs):
            if output is None or output not in self.trace.storages:
                continue
            self.current[output] = output
            parent = next((n for n in operands if self.trace.storages.get(n) == self.trace.storages[output]), None)
            if parent is not None and not op.target.startswith("aten.lift_fresh_copy"):
                self.views[output] = _View(parent, op, index)
                self.seen_version[output] = self.version.get(self._base(parent), 0)

    def _of_the_source(self, op: Op) -> Op:
        """A copy that is a value of its own, as torch functionalizes a write: of the source alone, in the dtype and shape of the other. It
        has no derivative as it is."""
        (target, source, *_), meta = op.args, self.metas[self._now(refs(op)[0])]
        assert isinstance(target, Ref) and isinstance(source, Ref), op
        name = self._now(source.name)
        if self.metas[name].dtype != meta.dtype:
            name = self._new("aten.to.dtype", Ref(name), meta.dtype, like=name)
        self.current[name] = name
        return dataclasses.replace(op, target="aten.expand.default", args=(Ref(name), tuple(meta.shape)), kwargs=())

    def _check_type(self, op: Op, found: Meta, traced: Meta) -> None:
        if op.target in _OTHERWISE_TRACED:
            return
        assert (found.shape, found.dtype) == (traced.shape, traced.dtype), (op, found, traced)

    def _check_effects(self, op: Op) -> None:
        if op.target in EFFECTS:
            flag, positions = EFFECTS[op.target]
            for p in positions:
                operand = op.args[p]
                if op.args[flag] and isinstance(operand, Ref) and all(b.value != operand.name for b in self.trace.buffers):
                    raise self._error(f"{op.target} updates running statistics that are not a buffer as it was at the start of the forward")

    def _error(
        self, what: str, remedy: str = "use the operator that returns a new tensor instead of the one that writes in place"
    ) -> CaptureError:
        return CaptureError(f"{what}\n  at {self.origin.op.source}\n  what to do: {remedy}")

    # ---------------------------------------------------------------------------------------------------------- hooks
    def _hooked(self, op: Op) -> None:
        """A hook on an activation: its region gives what is read from here on as the activation, and as the views of it."""
        operand, *closed = refs(op)[1:]
        name = self._same(operand)
        others = tuple(Ref(self._now(n)) for n in closed)
        self.closed |= {self._base(self._same(n)): op.source for n in closed}
        base, parts = self._base(name), {n for n in self.current if name in self._chain(n)}
        values = {self.current[n] for n in parts}
        views = {o for n in parts - {name} for o in self.views[n].op.outputs if o is not None}
        readers = [t.op for t in self.ops if not values.isdisjoint(refs(t.op)) and views.isdisjoint(o for o in t.op.outputs if o)]
        if reader := next((r for r in readers if any(o is not None and self.metas[o].grad for o in r.outputs)), None):
            raise self._error(
                f"a hook on an activation that has been used before ({reader.source}): its gradient comes from there too",
                "register the hook where the activation is made, before it is used",
            )
        if base in self.trace.given:
            raise self._error("a hook on a parameter or an input", "register hooks on parameters after the model is compiled")
        (made,) = op.outputs
        assert made is not None, op
        later = next((k for k, t in enumerate(self.ops) if t.op.outputs[0] == self.last_hook.get(name)), len(self.ops))
        before = self.ops[later:]  # a hook that was registered before this one: it is given gradients first, and so comes after it
        now = self._now(name) if not before else refs(before[0].op)[1]
        del self.ops[later:]
        self._emit(dataclasses.replace(op, target=REGION, args=(op.args[0], (Ref(now), *others), ())))
        if before:
            first = before[0].op
            held = tuple(Ref(n) for n in refs(first)[2:])
            self.ops += [before[0].with_op(dataclasses.replace(first, args=(first.args[0], (Ref(made), *held), ()))), *before[1:]]
        else:
            self.version[base] = self.version.get(base, 0) + 1
            self.current[name], self.seen_version[name] = made, self.version[base]
        self.last_hook[name], self.has_hook[base] = made, op.source

    def _chain(self, name: str) -> Iterator[str]:
        """A value, what it is a view of, and so on."""
        yield name
        while name in self.views:
            name = self.views[name].parent
            yield name

    # ------------------------------------------------------------------------------------------------------- in place
    def _in_place(self, op: Op, written: Sequence[str]) -> None:
        name = op.target.split(".")[1]
        out = op.kwarg("out")
        if written == ["out"] and isinstance(out, Ref) and not op.multi:
            self_name = self._same(out.name)
        elif written == ["self"] and name.endswith("_") and name not in _UNTRACEABLE and not op.multi and isinstance(op.args[0], Ref):
            self_name = self._same(op.args[0].name)
        else:
            raise self._error(f"{op.target} writes to {', '.join(written)}, which capture cannot express without writing")
        if hooked := self.has_hook.get(self._base(self_name)):
            raise self._error(f"it writes in place to an activation with a hook ({hooked})")
        if reads := self.closed.get(self._base(self_name)):
            raise self._error(f"it writes in place to a tensor that a hook on an activation reads in backward ({reads})")
        old = self._now(self_name)
        meta = self.metas[old]
        if name == "detach_" and not meta.grad:  # as torch.tensor ends on the meta device
            self.same_as |= dict.fromkeys((o for o in op.outputs if o is not None), self_name)
            return
        trained = {p.value: p.fqn for p in self.trace.params if p.trainable}
        if fqn := trained.get(old) or trained.get(self._base(self_name)):
            remedy = (
                "change parameters after optimizer.step(), not in the forward; or compute with a changed copy; one that the optimizer does "
                "not train (of a momentum encoder) may be changed if it is frozen (requires_grad_(False)) before the model is compiled; "
                "where the first call alone sets it up by its batch, call the model once before compiling it"
            )
            raise self._error(f"the forward changes a parameter in place: {fqn}", remedy)
        new = self._functional(op, old)
        if self.metas[new].dtype != meta.dtype:
            new = self._new("aten.to.dtype", Ref(new), meta.dtype, like=op.outputs[0] or name)
        resized = isinstance(out, Ref) and 0 in meta.shape and self_name not in self.views  # out=torch.empty(0)
        if self.metas[new].shape != meta.shape and not resized:
            new = self._new("aten.expand.default", Ref(new), meta.shape, like=op.outputs[0] or name)
        if op.no_grad:
            new = self._unseen(old, new)
        self._write(self_name, new)
        for output in op.outputs:
            if output is not None:
                self.same_as[output] = self_name

    def _unseen(self, old: str, new: str) -> str:
        """What a value becomes that is written to where gradients are off: the gradient of what it is now is that of what it was. (Where a
        backward pass would have to know what it was, autograd refuses.)"""
        if self.metas[new].grad:
            new = self._new("aten.detach.default", Ref(new), like=new)
        if not self.metas[old].grad:
            return new
        kept = self._new("aten.detach.default", Ref(old), like=old)
        nothing = self._new("aten.sub.Tensor", Ref(old), Ref(kept), like=old, no_grad=False)
        return self._new("aten.add.Tensor", Ref(nothing), Ref(new), like=new, no_grad=False)

    def _functional(self, op: Op, old: str) -> str:
        """Adds the functional form of an in-place operator on the current value `old`; the name of its result."""
        name = op.target.split(".")[1]
        wish = op.outputs[0] or name
        meta = self.metas[old]
        if op.kwarg("out") is not None:
            target, makes = self._without_out(op.target)
            kwargs = *((k, v) for k, v in op.kwargs if k != "out"), *((("dtype", meta.dtype),) if makes else ())
            op = dataclasses.replace(op, target=target, kwargs=kwargs)
            self._emit(dataclasses.replace(map_refs(op, lambda n: Ref(self._now(n))), outputs=(wish,)))
            return wish
        if name == "copy_":
            source = op.args[1]
            assert isinstance(source, Ref), op
            return self._now(source.name)
        if name == "zero_":
            return self._new("aten.zeros_like.default", Ref(old), like=wish)
        if name == "fill_":
            if isinstance(op.args[1], Ref):
                return self._now(op.args[1].name)
            return self._new("aten.full_like.default", Ref(old), op.args[1], like=wish)
        if name == "fill_diagonal_" and len(meta.shape) == 2 and not (len(op.args) > 2 and op.args[2] and meta.shape[0] > meta.shape[1]):
            filled = self._new("aten.full.default", (min(meta.shape),), op.args[1], like=wish)
            if self.metas[filled].dtype != meta.dtype:
                filled = self._new("aten.to.dtype", Ref(filled), meta.dtype, like=wish)
            return self._new("aten.diagonal_scatter.default", Ref(old), Ref(filled), like=wish)
        functional = map_refs(self._returning(op), lambda n: Ref(self._now(n)))
        self._emit(dataclasses.replace(functional, outputs=(wish,)))
        assert self.metas[wish].dtype == meta.dtype or meta.dtype.is_floating_point or not self.metas[wish].dtype.is_floating_point, op
        return wish

    def _returning(self, op: Op) -> Op:
        """The operator that returns what this one writes."""
        found = functional_target(op)
        if found is None:
            raise self._error(f"{op.target} has no form that does not write in place")
        return dataclasses.replace(op, target=found[0], args=found[1])

    def _without_out(self, target: str) -> tuple[str, bool]:
        """The overload of an out= operator that returns its result instead, and whether it is to be told the dtype (torch.eye)."""
        namespace, name, _ = target.split(".")
        wanted = [(a.name, str(a.type)) for a in resolve(target)._schema.arguments if not a.is_out]
        for overload in getattr(getattr(torch.ops, namespace), name).overloads():
            schema = resolve(f"{namespace}.{name}.{overload}")._schema
            takes = [(a.name, str(a.type)) for a in schema.arguments]
            makes = [a for a in takes if a[0] not in _OF_WHAT_IS_MADE]
            if not schema.is_mutable and wanted in (takes, makes):
                return f"{namespace}.{name}.{overload}", wanted != takes
        raise self._error(f"{target} has no form that does not write to its argument out")

    def _write(self, name: str, new: str) -> None:
        """Makes `new` the current value of a traced value, and of the parents whose memory it shares."""
        written, origin = [(name, new)], self.origin
        while name in self.views:
            view = self.views[name]
            off = view.op.target.startswith("aten.detach") or view.op.no_grad
            old = self._now(view.parent)
            self.origin = origin.with_op(dataclasses.replace(origin.op, no_grad=off))
            new = self._put_back(view, old, new)
            new = self._unseen(old, new) if off else new
            name = view.parent
            written.append((name, new))
        self.origin = origin
        self.version[name] = self.version.get(name, 0) + 1
        self.written_at[name] = self.origin.op.source
        for part, value in written:  # the views that were written on the way up are current; all others are stale from now on
            self.current[part] = value
            self.seen_version[part] = self.version[name]

    def _put_back(self, view: _View, parent: str, new: str) -> str:
        """A value like `parent` of which the view is `new`."""
        op, shape = view.op, self.metas[parent].shape
        kind = op.target.rpartition(".")[0]
        argument = _arguments(op)
        wish = f"{view.parent}_written"
        if kind in _SAME_DATA and self.metas[new].shape == shape:
            return new
        if kind in _SAME_ORDER:
            return self._new("aten.reshape.default", Ref(new), shape, like=wish)
        if kind in ("aten.transpose", "aten.swapaxes", "aten.swapdims"):
            return self._new("aten.transpose.int", Ref(new), op.args[1], op.args[2], like=wish)
        if kind in ("aten.t", "aten.numpy_T", "aten.mT"):
            dims = tuple(reversed(range(len(shape)))) if kind != "aten.mT" else (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
            return self._new("aten.permute.default", Ref(new), dims, like=wish)
        if kind == "aten.permute":
            order = [d % len(shape) for d in argument("dims")]
            return self._new("aten.permute.default", Ref(new), tuple(order.index(i) for i in range(len(order))), like=wish)
        if kind in ("aten.slice", "aten.narrow"):
            dim, start, end, step = argument("dim"), argument("start"), argument("end"), argument("step")
            if kind == "aten.narrow":
                end, step = start + argument("length"), 1
            return self._scattered("aten.slice_scatter.default", parent, new, dim or 0, start, end, step or 1, like=wish)
        if kind in ("aten.select", "aten.unbind"):
            dim, index = argument("dim") or 0, argument("index") if kind == "aten.select" else view.index
            return self._scattered("aten.select_scatter.default", parent, new, dim, index, like=wish)
        if kind in ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split", "aten.unsafe_split", "aten.unsafe_chunk"):
            dim = (argument("dim") or 0) % len(shape)
            sizes = [m.shape[dim] for m in self.infer(map_refs(op, lambda n: Ref(parent)), self.metas) if m is not None]
            start = sum(sizes[: view.index])
            return self._scattered("aten.slice_scatter.default", parent, new, dim, start, start + sizes[view.index], 1, like=wish)
        if kind == "aten.diagonal":
            dims = tuple(argument(a) if argument(a) is not None else d for a, d in (("offset", 0), ("dim1", 0), ("dim2", 1)))
            return self._new("aten.diagonal_scatter.default", Ref(parent), Ref(new), *dims, like=wish)
        inverse = {"aten.view_as_real": "aten.view_as_complex.default", "aten.view_as_complex": "aten.view_as_real.default"}
        if kind in inverse:
            return self._new(inverse[kind], Ref(new), like=wish)
        raise self._error(f"{self.origin.op.target} writes through {op.target} of {op.source or 'the model'}")

    def _scattered(self, target: str, parent: str, new: str, dim: int, *place: Arg, like: str) -> str:
        """`parent` with `new` in a place along a dim. Of complex numbers torch does not differentiate this: it is done with both halves."""
        if not self.metas[parent].dtype.is_complex:
            return self._new(target, Ref(parent), Ref(new), dim, *place, like=like)
        whole, part = (self._new("aten.view_as_real.default", Ref(x), like=like) for x in (parent, new))
        dim %= len(self.metas[parent].shape)
        written = self._new(target, Ref(whole), Ref(part), dim, *place, like=like)
        return self._new("aten.view_as_complex.default", Ref(written), like=like)


def _one_by_one(op: Op, fresh: Callable[[str], str]) -> list[Op]:
    """The in-place operators on single tensors that one on a list of them is; [] if there are none."""
    name, overload = op.target.removeprefix(FOREACH).split(".")
    first = op.args[0]
    candidates = (f"aten.{name}.{kind}" for kind in (_OF_ONE.get(overload, overload), "default", "Tensor"))
    target = next((t for t in candidates if _is_operator(t)), "")
    if not name.endswith("_") or not target or not isinstance(first, tuple):
        return []
    made = []
    for k in range(len(first)):
        args = tuple(a[k] if isinstance(a, tuple) else a for a in op.args)
        made.append(dataclasses.replace(op, target=target, args=args, outputs=(fresh(name),), multi=False))
    return made


_OF_WHAT_IS_MADE = ("dtype", "layout", "device", "pin_memory")
FOREACH = "aten._foreach_"
_OF_ONE = {"List": "Tensor", "ScalarList": "Scalar"}


def _is_operator(target: str) -> bool:
    try:
        return bool(resolve(target))
    except LookupError:
        return False


def _with_buffers(trace: Trace, frozen: Sequence[Param]) -> Trace:
    """The trace in which these parameters are buffers."""
    buffers = (Buffer(value=p.value, fqn=p.fqn, aliases=p.aliases, parameter=True) for p in frozen)
    params = tuple(p for p in trace.params if p not in frozen)
    return dataclasses.replace(trace, params=params, buffers=(*trace.buffers, *buffers))


def _arguments(op: Op) -> Callable[[str], Any]:
    """The operator's arguments by name; None for those that are not given."""
    names = [a.name for a in resolve(op.target)._schema.arguments]
    given = dict(zip(names, op.args)) | dict(op.kwargs)
    return given.get
