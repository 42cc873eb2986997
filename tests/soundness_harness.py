"""Executes strategies of operators on simulated ranks and compares them with the unsplit operator, in float64.

A case is one call of an aten overload with concrete tensors. Each strategy of it is run as n ranks would run it: operands
are cut by their layouts, every rank runs the localized operators, results are put together by theirs. Then the gradient
of the results is laid out by the transposed table (S: slices; R: terms of a sum; I and P: the same on every rank), every
rank runs backward on its own, and the gradients of the operands are put together and compared with the true ones.
No process group is needed: ranks that communicate are threads (`Lockstep`). Only what draws random numbers is skipped.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopar import generators
from autopar.catalog import OpView, localized, strategies_of
from autopar.catalog.rule import draws, rule_of
from autopar.catalog.schema import resolve, tensor_refs
from autopar.ir import Arg, I, Kind, Layout, Op, R, Ref, Strategy, TensorType
from autopar.run import collectives, comm, local_ops
from autopar.run.mesh import Axis

# What an operator raises that was given operands that it does not take.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError, KeyError, AssertionError)
UNDEFINED = ("empty_like", "new_empty", "empty", "empty_strided", "new_empty_strided", "empty_permuted")  # of any value
LARGE = 1 << 14  # elements
SIZES = {"XS": (3, 4), "S": (5, 8), "M": (10, 16), "L": (20, 16)}  # op_db's sizes hardly divide: name -> (as it is, as we want it)


@dataclass(frozen=True)
class Fixed:
    """Marks an operand of a call for which torch has no derivative (the class weights of a loss)."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Truth:
    """What the unsplit operator gives. written: the operands afterwards; flowing: the results that have a gradient; gradients: a random one
    of each; of_operands: those of the operands (None: it can have none)."""

    results: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]
    flowing: tuple[int, ...]
    gradients: tuple[torch.Tensor, ...]
    of_operands: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Case:
    """One call: the operator, its tensor operands in the order of refs(op), its results; fixed: operands without gradient."""

    op: Op
    values: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    fixed: frozenset[int] = frozenset()

    def view(self, n: int, groups: Iterable[int] = (1,)) -> OpView:
        ins = tuple(TensorType(tuple(v.shape), v.dtype, differentiable(v) and k not in self.fixed) for k, v in enumerate(self.values))
        outs = tuple(TensorType(tuple(v.shape), v.dtype, v.requires_grad) for v in self.results)
        return OpView(self.op, ins, outs, n, frozenset(groups))

    @functools.cached_property
    def truth(self) -> Truth:
        operands = leaves(self.values, self.fixed)
        generators.seed(0)  # replicas draw the same
        results, written = run_ops((self.op,), operands)
        flowing = tuple(k for k, t in enumerate(results) if t.requires_grad)
        gradients = tuple(torch.randn_like(results[k]) for k in flowing)
        found: list[torch.Tensor | None] = []
        try:
            found = grads([results[k] for k in flowing], operands, gradients) if flowing else []
        except REFUSALS:
            flowing, gradients = (), ()  # torch has no derivative for it
        return Truth(tuple(t.detach() for t in results), tuple(t.detach() for t in written), flowing, gradients, tuple(found))

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, v.shape)) or "scalar" for v in self.values)
        return f"{self.op.target} {self.op.args} {dict(self.op.kwargs)} of {shapes}"


ONE = Axis(name="b", size=1, rank=0, ranks=(0,))


class Unusable(Exception):
    """A call that is no case: results that are no tensors, or operands that the operator refuses."""


def case_of(target: str, *args: Any, **kwargs: Any) -> Case:
    """The case of this call; tensors anywhere in args and kwargs are its operands. Unusable if it cannot be run."""
    values: list[torch.Tensor] = []
    fixed: set[int] = set()

    def lift(arg: Any) -> Arg:
        if isinstance(arg, Fixed):
            fixed.add(len(values))
            arg = arg.tensor
        if isinstance(arg, torch.Tensor):
            values.append(arg.detach().clone())
            return Ref(f"x{len(values) - 1}")
        if isinstance(arg, (list, tuple)):
            return tuple(lift(a) for a in arg)
        if isinstance(arg, (torch.device, torch.layout)):
            return str(arg).removeprefix("torch.")
        return arg

    op_args = tuple(lift(a) for a in args)
    op_kwargs = tuple((k, lift(v)) for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory"))
    op = Op(target=target, args=op_args, kwargs=op_kwargs, outputs=("y0",))
    results = None
    while results is None:
        try:
            results, _ = run_ops((op,), leaves(values, fixed))
        except REFUSALS as error:
            constant = re.search(r"not differentiable with respect to argument '(\w+)'", str(error))
            index = tensor_refs(op).get(constant[1]) if constant else None
            if index is None or index in fixed:
                raise Unusable(str(error)) from error
            fixed.add(index)
    if not all(isinstance(r, torch.Tensor) and r.layout is torch.strided for r in results):
        raise Unusable("its results are not all tensors")
    returns = [] if target.startswith("autopar.") else resolve(target)._schema.returns
    multi = any(r.type.kind() == "ListType" for r in returns) or len(returns) > 1
    op = Op(target=target, args=op_args, kwargs=op_kwargs, outputs=tuple(f"y{k}" for k in range(len(results))), multi=multi)
    return Case(op, tuple(values), results, frozenset(fixed))


def differentiable(v: torch.Tensor) -> bool:
    return v.dtype.is_floating_point or v.dtype.is_complex


def leaves(values: Iterable[torch.Tensor], fixed: Collection[int] = ()) -> list[torch.Tensor]:
    return [v.detach().clone().requires_grad_(differentiable(v) and k not in fixed) for k, v in enumerate(values)]


def on_ranks(named: Arg, axes: dict[str, Axis]) -> Axis | tuple[Axis, ...]:
    """The axis, or the axes, that an operator of autopar's own names."""
    return tuple(axes.get(str(name), ONE) for name in named) if isinstance(named, tuple) else axes.get(str(named), ONE)


def run_ops(ops: tuple[Op, ...], operands: list[torch.Tensor], axis: Axis | None = None) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Run operators one after another: the results of the last, and the operands as they are then. The operands are copied
    first, so that operators may write to them. axis: what autopar's own operators are given as axis "a"; any other axis that
    they name has one rank."""
    env: dict[str, Any] = {f"x{k}": v.clone() for k, v in enumerate(operands)}

    def value(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return env[arg.name]
        return [value(a) for a in arg] if isinstance(arg, tuple) else arg

    axes = {} if axis is None else {"a": axis}
    results: tuple[Any, ...] = ()
    for op in ops:
        if op.target.startswith("autopar."):
            _, kind, name = op.target.split(".")
            function = getattr(collectives if kind == "C" else local_ops, name)
        else:
            function = resolve(op.target)
        result = function(*map(value, op.args), **{k: on_ranks(v, axes) if k == "axis" else value(v) for k, v in op.kwargs})
        results = tuple(result) if isinstance(result, (list, tuple)) else (result,)
        env.update({k: v for k, v in zip(op.outputs, results) if k is not None})
    return results, [env[f"x{k}"] for k in range(len(operands))]


# ------------------------------------------------------------------------------------------ ranks that communicate
class Lockstep:
    """n ranks as threads. Within it, what `autopar.run.comm` sends goes through one list that they fill together."""

    def __init__(self, n: int) -> None:
        self.n, self.slots, self.barrier = n, [torch.empty(0)] * n, threading.Barrier(n)

    def axis(self, rank: int) -> Axis:
        return Axis(name="a", size=self.n, rank=rank, ranks=tuple(range(self.n)))

    def exchange(self, x: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
        if axis.size == 1:
            return [x.detach().clone()]
        self.slots[axis.rank] = x.detach().clone()
        self.barrier.wait(timeout=30)
        found = list(self.slots)
        self.barrier.wait(timeout=30)
        return found

    def all_reduce_(self, x: torch.Tensor, axis: Axis, op: Any = torch.distributed.ReduceOp.SUM, *, wait: bool = True) -> None:
        found = torch.stack(self.exchange(x, axis))
        x.copy_(found.amax(0) if op == torch.distributed.ReduceOp.MAX else found.sum(0))

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        """fn(rank) on all ranks at once. Raises what the first of them raised that broke the others' exchanges."""
        results: list[Any] = [None] * self.n
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            try:
                results[rank] = fn(rank)
            except REFUSALS as error:
                errors.append(error)
                self.barrier.abort()

        stand_ins = {
            "all_gather": lambda x, axis: torch.stack(self.exchange(x, axis)),
            "all_reduce": lambda x, axis: sum(self.exchange(x, axis)),
            "all_reduce_": self.all_reduce_,
            "reduce_scatter": lambda x, axis: sum(self.exchange(x, axis))[axis.rank],  # type: ignore[index]
            "all_to_all": lambda x, axis: torch.cat([part.chunk(axis.size)[axis.rank] for part in self.exchange(x, axis)]),
        }
        with mock.patch.multiple(comm, **stand_ins):
            threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.n)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


# ----------------------------------------------------------------------------------------------- layouts, executed
def cut(x: torch.Tensor, layout: Layout, n: int, rank: int) -> torch.Tensor:
    """A rank's part of a sharded tensor."""
    segments = x.unflatten(layout.dim, (layout.groups, x.shape[layout.dim] // layout.groups))
    return segments.chunk(n, layout.dim + 1)[rank].flatten(layout.dim, layout.dim + 1)


def join(parts: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    segments = [p.unflatten(layout.dim, (layout.groups, p.shape[layout.dim] // layout.groups)) for p in parts]
    return torch.cat(segments, layout.dim + 1).flatten(layout.dim, layout.dim + 1)


def terms(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    """n random tensors whose sum is x."""
    if x.dtype is torch.bool:
        return [x, *[torch.zeros_like(x)] * (n - 1)]
    draw = torch.randn_like if differentiable(x) else lambda t: torch.randint_like(t, -3, 4)
    first = [draw(x) for _ in range(n - 1)]
    return [*first, x - sum(first)]  # type: ignore[list-item]


def laid_out(x: torch.Tensor, layout: Layout, n: int) -> list[torch.Tensor]:
    """The value of x on each of n ranks."""
    if layout.is_shard:
        return [cut(x, layout, n, r) for r in range(n)]
    return terms(x, n) if layout.kind is Kind.PARTIAL else [x] * n


def gradient_laid_out(g: torch.Tensor, layout: Layout, n: int) -> list[torch.Tensor]:
    """The gradient g of a value with this layout, on each of n ranks."""
    if layout.is_shard:
        return [cut(g, layout, n, r) for r in range(n)]
    return terms(g, n) if layout.kind is Kind.REPLICATE else [g] * n


def differs(parts: list[torch.Tensor], truth: torch.Tensor, layout: Layout, tolerance: float, *, gradient: bool) -> str | None:
    """What is wrong with these parts of a value (or of its gradient) that lies so, or None."""
    summed = layout.kind is (Kind.REPLICATE if gradient else Kind.PARTIAL)
    if layout.is_shard:
        expected = layout.local_shape(tuple(truth.shape), len(parts))
        if any(tuple(p.shape) != expected for p in parts):
            return f"local shapes {[tuple(p.shape) for p in parts]}, not {expected}"
        wholes = [join(parts, layout)]
    else:
        if any(p.shape != truth.shape for p in parts):
            return f"shapes {[tuple(p.shape) for p in parts]}, not {tuple(truth.shape)}"
        wholes = [sum(parts[1:], parts[0])] if summed else parts
    for whole in wholes:
        if whole.dtype != truth.dtype:
            return f"dtype {whole.dtype}, not {truth.dtype}"
        if not differentiable(truth):
            if not torch.equal(whole, truth):
                return "other values"
            continue
        if summed:  # the terms of what is not finite cancel
            whole, truth = whole.where(truth.isfinite(), 0), truth.where(truth.isfinite(), 0)
        scale = max(1.0, float(truth.abs().nan_to_num(0, 0, 0).max())) if truth.numel() else 1.0
        if not torch.allclose(whole, truth, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return f"off by {float((whole - truth).abs().max()):.3g}"
    return None


SKIPPED = "skipped"


def tolerance_of(tensors: Iterable[torch.Tensor]) -> float:
    """1e-10, or what the coarsest of these tensors can hold."""
    coarsest = max((torch.finfo(t.dtype).eps for t in tensors if differentiable(t)), default=0.0)
    return 1e-10 if coarsest < 1e-15 else 20 * coarsest


def unsound(case: Case, view: OpView, strategy: Strategy) -> str | None:
    """Run one strategy; None if it computes what the operator computes, SKIPPED if it cannot be run here, else what is wrong."""
    n = view.n
    if any(x.kind is Kind.PARTIAL and not bool(torch.isfinite(v).all()) for x, v in zip(strategy.inputs, case.values)):
        return SKIPPED
    try:
        ops = localized(view, strategy, "a")
    except REFUSALS as error:
        return f"it cannot be localized: {type(error).__name__}: {error}"
    if any(op.target.startswith("autopar.") and draws(case.op) for op in ops):
        return SKIPPED
    true = case.truth
    flowing = true.flowing
    values = [laid_out(v, layout, n) for v, layout in zip(case.values, strategy.inputs)]
    cotangents = [gradient_laid_out(g, strategy.outputs[k], n) for g, k in zip(true.gradients, flowing)]
    ranks = Lockstep(n)

    def run(rank: int) -> tuple[Any, ...]:
        operands = leaves((parts[rank] for parts in values), case.fixed)
        generators.seed(0)
        results, after = run_ops(ops, operands, ranks.axis(rank))
        found = grads([results[k] for k in flowing], operands, [parts[rank] for parts in cotangents]) if flowing else []
        return [r.detach() for r in results], [a.detach() for a in after], found

    try:
        together = any(op.target.startswith("autopar.") for op in ops)
        results, after, found = zip(*(ranks.run(run) if together else map(run, range(n))))
    except REFUSALS as error:
        return f"a rank refuses it: {type(error).__name__}: {error}"
    tolerance = tolerance_of((*true.results, *case.values))
    for k, (t, layout) in enumerate(zip(true.results, strategy.outputs)):
        if wrong := differs([results[r][k] for r in range(n)], t, layout, tolerance, gradient=False):
            return f"result {k} is wrong: {wrong}"
    for i, (before, t, layout) in enumerate(zip(case.values, true.written, strategy.inputs)):
        if torch.equal(before, t):
            continue
        if wrong := differs([after[r][i] for r in range(n)], t, layout, tolerance, gradient=False):
            return f"operand {i} is written and then wrong: {wrong}"
    for i, (g, layout) in enumerate(zip(true.of_operands, strategy.inputs)):
        if g is not None and (wrong := differs([found[r][i] for r in range(n)], g, layout, tolerance, gradient=True)):
            return f"gradient of operand {i} is wrong: {wrong}"
    return None


def grads(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of the inputs (zeros where none flows; None for those that cannot have one)."""
    asked = [x for x in inputs if x.requires_grad]
    pairs = [(o, g) for o, g in zip(outputs, gradients) if o.requires_grad]
    found: Iterable[Any] = [None] * len(asked)
    if asked and pairs:
        found = torch.autograd.grad([o for o, _ in pairs], asked, [g for _, g in pairs], allow_unused=True)
    given = iter(found)
    filled = []
    for x in inputs:
        g = next(given) if x.requires_grad else None
        filled.append((torch.zeros_like(x) if g is None else g.to_dense()) if x.requires_grad else None)
    return filled


# ----------------------------------------------------------------------------------------------- the tally
@dataclass
class Tally:
    """operator -> [strategies executed, of these with a shard, with a partial operand, skipped]; the unsound ones in words."""

    counts: dict[str, list[int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seen: set[object] = field(default_factory=set)

    def run(self, case: Case, *, sizes: Iterable[int] = (2, 4), groups: Iterable[int] = (1, 2, 3)) -> None:
        """Execute every strategy of a case that has a rule (each kind of call once), for these numbers of ranks."""
        if rule_of(case.op.target) is None or case.op.target.split(".")[1] in UNDEFINED:
            return
        key = (case.op.target, repr(case.op.args), repr(case.op.kwargs), tuple((v.shape, v.dtype) for v in case.values))
        if key in self.seen:
            return
        self.seen.add(key)
        for n in sizes:
            view = case.view(n, groups)
            try:
                strategies = strategies_of(view)
            except REFUSALS as error:
                self.failures.append(f"{case}, n={n}: its rule raises {type(error).__name__}: {error}")
                continue
            for s in strategies:
                if set(s.inputs) | set(s.outputs) == {I} or (n > 2 and set(s.inputs) | set(s.outputs) == {R}):
                    continue
                count = self.counts.setdefault(case.op.target, [0, 0, 0, 0])
                wrong = unsound(case, view, s)
                if wrong is SKIPPED:
                    count[3] += 1
                    continue
                count[0] += 1
                count[1] += s.splits_work
                count[2] += any(x.kind is Kind.PARTIAL for x in s.inputs)
                if wrong is not None:
                    self.failures.append(f"{case}, n={n}: {s}: {wrong}")

    def table(self) -> str:
        lines = [f"{'operator':50} executed sharded partial skipped"]
        lines += [f"{name:50} {a:8} {b:7} {c:7} {d:7}" for name, (a, b, c, d) in sorted(self.counts.items())]
        return "\n".join(lines)


# ----------------------------------------------------------------------------------------------- op_db
class Recorder(torch.fx.Interpreter):
    """Runs a traced graph and keeps every call of an aten operator."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            copies = pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, (args, dict(kwargs)))
            self.calls.append((str(target), *copies))
        return super().call_function(target, args, kwargs)


def cases_within(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Case]:
    """The aten operators that a call reaches above autograd (composite ones such as linear stay whole), each as a case."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    where = [k for k, v in enumerate(flat) if isinstance(v, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        leaves_ = list(flat)
        for k, t in zip(where, tensors):
            leaves_[k] = t
        a, kw = pytree.tree_unflatten(leaves_, spec)
        return pytree.tree_leaves(fn(*a, **kw))

    tensors = [flat[k].detach() for k in where]
    if any(t.layout is not torch.strided for t in tensors):
        return
    try:
        recorder = Recorder(make_fx(call, pre_dispatch=True)(*tensors))
        recorder.run(*[t.clone() for t in tensors])
    except REFUSALS:
        return
    for target, a, kw in recorder.calls:
        if rule_of(target) is not None:
            try:
                yield case_of(target, *a, **kw)
            except Unusable:
                continue


def op_db(*, divisible: bool) -> list[Any]:
    """PyTorch's operator samples; divisible: with its sizes (5, 10, 20 ...) replaced by multiples of 4."""
    from torch.testing._internal.common_methods_invocations import op_db as database

    for module in [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal")]:
        for name, (own, ours) in SIZES.items():
            if getattr(module, name, None) in (own, ours):
                setattr(module, name, ours if divisible else own)
    return list(database)


def op_db_cases(info: Any, *, limit: int) -> Iterator[Case]:
    """Cases of the first `limit` samples of one entry of op_db, and as many spread over the next 32; none of large tensors."""
    if not info.supports_dtype(torch.float64, "cpu"):
        return
    try:
        # Not info.sample_inputs: it inspects the whole stack for each sample.
        samples = iter(info.sample_inputs_func(info, "cpu", torch.float64, False))
        first, more = list(itertools.islice(samples, limit)), list(itertools.islice(samples, 32))
        for sample in (*first, *more[:: max(1, len(more) // limit)]):
            for case in cases_within(info.op, sample.input, *sample.args, **sample.kwargs):
                if sum(v.numel() for v in (*case.values, *case.results)) <= LARGE:
                    yield case
    except REFUSALS:
        return  # a sample that op_db itself cannot make at this size
