"""What one operator allocates beside its operands and results: in forward, and in backward with the gradients that it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.interpret import run_op
from autopar.catalog.transitions import ALL_TO_ALL, REGROUP, TRANSITIONS
from autopar.ir import Arg, Op, Ref, TensorType, call_text, nameless
from autopar.measure.count import FUSED_DROPOUT, as_on_gpu, is_same_on_meta
from autopar.measure.tracker import MemoryTracker
from autopar.run import local_ops
from autopar.run.mesh import Axis

__all__ = ["Workspace", "workspace"]

Strides = tuple[int, ...]
Backward = tuple[int, tuple[int, ...]]  # bytes beside what is alive, and of each operand's gradient
_ALONE = Axis(name="one", size=1, rank=0, ranks=(0, 1))  # one of several ranks, which sends nothing: there is no process group
_BACKWARD = {t.function: t.backward for t in (*TRANSITIONS.values(), ALL_TO_ALL, REGROUP)}


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Bytes. results: of new storage, by result (0: it shares an operand's). forward: the most that is alive in forward beside
    operands, results and what is kept. saved: the indices of operands and of results that autograd keeps, and the bytes of what
    is neither. strides: of the results. passed_back: finds the two of backward, which takes longer than all else."""

    results: tuple[int, ...]
    forward: int
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    saved_other: int
    strides: tuple[Strides, ...]
    passed_back: Callable[[], Backward] = field(compare=False, repr=False)

    @functools.cached_property
    def backward(self) -> int:
        """The most that is alive in backward beside all these and the results' gradients."""
        return self._passed_back[0]

    @functools.cached_property
    def gradients(self) -> tuple[int, ...]:
        """Of new storage, by operand (0: it has none, or shares the storage of a result's gradient)."""
        return self._passed_back[1]

    @functools.cached_property
    def _passed_back(self) -> Backward:
        return self.passed_back()


def workspace(
    op: Op, ins: tuple[TensorType, ...], strides: tuple[Strides, ...], outs: tuple[TensorType, ...], gpu: bool = False
) -> Workspace:
    """The workspace of an operator on operands of these types and strides, found by running it on fake tensors. gpu: as a GPU runs it.
    Equal calls have one."""
    key = call_text(op), op.no_grad, op.multi, len(op.outputs), ins, strides, outs, gpu
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = _workspace(nameless(as_on_gpu(op, ins) if gpu else op), ins, strides, outs)
    return known


_KNOWN: dict[tuple[object, ...], Workspace] = {}


def _workspace(call: Op, ins: tuple[TensorType, ...], strides: tuple[Strides, ...], outs: tuple[TensorType, ...]) -> Workspace:
    """call: without names."""
    if call.target.startswith("autopar.C."):
        return _of_transition(call.target.rpartition(".")[2], dict(call.kwargs), ins[0], strides[0], outs[0])
    op = dataclasses.replace(call, outputs=tuple(f"y{k}" for k in range(len(call.outputs))))
    with _ran(op, ins, strides) as ran:
        tensors, results, saved = ran.tensors, ran.results, ran.saved
        own = {_storage(t): k for k, t in reversed(list(enumerate(tensors)))}
        made = {_storage(t): k for k, t in reversed([(k, t) for k, t in enumerate(results) if t is not None]) if _storage(t) not in own}
        other = {_storage(t): t.untyped_storage().nbytes() for t in saved if _storage(t) not in own and _storage(t) not in made}
        saved_in = {own[_storage(t)] for t in saved if _storage(t) in own}
        saved_out = {made[_storage(t)] for t in saved if _storage(t) in made}
        fresh = tuple(t.untyped_storage().nbytes() if t is not None and made.get(_storage(t)) == k else 0 for k, t in enumerate(results))
        return Workspace(
            results=fresh, forward=ran.peak_bytes, saved_inputs=tuple(sorted(saved_in)), saved_outputs=tuple(sorted(saved_out)),
            saved_other=sum(other.values()), strides=tuple(t.stride() if t is not None else () for t in results),
            passed_back=functools.partial(_ran_back, op, ins, strides),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Ran:
    """An operator that has run on fake tensors. peak_bytes: beside what is alive behind it; saved: what autograd keeps."""

    tracker: MemoryTracker
    tensors: list[Tensor]
    results: tuple[Tensor | None, ...]
    saved: list[Tensor]
    peak_bytes: int


@contextlib.contextmanager
def _ran(op: Op, ins: Sequence[TensorType], strides: Sequence[Strides]) -> Iterator[_Ran]:
    on_meta = is_same_on_meta(op.target, ins)
    with contextlib.nullcontext() if on_meta else FakeTensorMode(allow_non_fake_inputs=True):
        device = "meta" if on_meta else "cpu"
        tensors = [
            torch.empty_strided(t.shape, stride, dtype=t.dtype, requires_grad=t.grad and not op.no_grad, device=device)
            for t, stride in zip(ins, strides, strict=True)
        ]
        tracker, saved = MemoryTracker(), list[Tensor]()

        def pack(t: Tensor) -> Tensor:
            saved.append(t)
            return t

        tracker.hold(tensors, "operands")
        with tracker, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            results = _run(op, {f"x{k}": t for k, t in enumerate(tensors)})
        peak_bytes = tracker.peak_bytes - tracker.live_bytes
        yield _Ran(tracker=tracker, tensors=tensors, results=results, saved=saved, peak_bytes=peak_bytes)


def _ran_back(op: Op, ins: Sequence[TensorType], strides: Sequence[Strides]) -> Backward:
    with _ran(op, ins, strides) as ran:
        ran.saved.clear()
        return _backward(ran.tracker, ran.tensors, ran.results)


def _run(op: Op, env: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    if op.target == FUSED_DROPOUT:
        ((result, _),) = run_op(op, env)  # type: ignore[misc]
        return (result,)
    if not op.target.startswith("autopar.L."):
        return run_op(op, env)

    def value(arg: object) -> object:
        if isinstance(arg, tuple):
            return tuple(map(value, arg))
        return env[arg.name] if isinstance(arg, Ref) else arg

    kwargs = {k: _ALONE if k == "axis" else value(v) for k, v in op.kwargs}
    result = getattr(local_ops, op.target.rpartition(".")[2])(*(value(a) for a in op.args), **kwargs)
    return tuple(result) if op.multi else (result,)


def _backward(tracker: MemoryTracker, operands: Sequence[Tensor], results: Sequence[Tensor | None]) -> Backward:
    """(most bytes beside what is alive, bytes of new storage by operand) of the backward pass."""
    roots = [t for t in results if t is not None and t.requires_grad and t.grad_fn is not None]
    leaves = [t for t in operands if t.requires_grad]
    if not roots or not leaves:
        return 0, (0,) * len(operands)
    arriving = [torch.empty_like(t) for t in roots]
    tracker.hold(arriving, "gradients")
    tracker.reset_peak()
    before = tracker.live_bytes
    try:
        with tracker:
            found = iter(torch.autograd.grad(roots, leaves, arriving, allow_unused=True))
    except (RuntimeError, TypeError, ValueError):  # it does not run on tensors without values: taken to make its operands' gradients
        sizes = tuple(t.untyped_storage().nbytes() if t.requires_grad else 0 for t in operands)
        return sum(sizes), sizes
    peak = tracker.peak_bytes - before
    seen = {_storage(t) for t in arriving}
    gradients = []
    for t in operands:
        grad = next(found) if t.requires_grad else None
        new = grad is not None and _storage(grad) not in seen
        gradients.append(grad.untyped_storage().nbytes() if grad is not None and new else 0)
        seen |= {_storage(grad)} if grad is not None else set()
    return peak, tuple(gradients)


def _of_transition(function: str, kwargs: Mapping[str, Arg], have: TensorType, strides: Strides, made: TensorType) -> Workspace:
    """A transition saves nothing; its result and its gradient are new unless it moves nothing."""
    whole = torch.empty_strided(have.shape, strides, device="meta")
    sliced = function in ("split", "narrow") and kwargs.get("groups", 1) == 1
    part = whole.narrow(int(str(kwargs["dim"])), 0, made.shape[int(str(kwargs["dim"]))]) if sliced else whole
    same = function in ("copy_to", "own", "keep_one") or (sliced and part.is_contiguous())
    gradient = have.nbytes if have.grad and (_BACKWARD[function] is not None or have.shape != made.shape) else 0
    moved = max(have.nbytes, made.nbytes)
    packs = function in ("all_gather", "gather", "reduce_scatter", "all_to_all", "regroup")
    packed = moved if packs and (kwargs.get("dim") != 0 or kwargs.get("groups", 1) != 1) else 0  # parts of dim 0 lie as they are sent
    return Workspace(
        results=(0 if same else made.nbytes,), forward=packed, saved_inputs=(), saved_outputs=(), saved_other=0,
        strides=(part.stride() if same else torch.empty(made.shape, device="meta").stride(),),
        passed_back=lambda: (gradient + (packed if have.grad and function != "gather" else 0), (gradient,)),
    )  # fmt: skip


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata
