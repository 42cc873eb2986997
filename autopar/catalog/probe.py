"""How an operator without a rule may be split over its batch, found out by running it.

An operator of the program that no rule knows is called on small random tensors in float64, whole and in parts: dim 0 of some
operands is cut, the others are given to every part. A part's results are slices of the whole's (S(0)) or terms of it (P), and so
are the gradients of what was cut (slices) and of what was not (terms). Only what agrees to `TOLERANCE` on every sample, for two
and three parts and for the ranks of the axis, is a strategy.

Samples differ in seed and in kind: of one scale or of rows that differ by orders of magnitude, of either sign or positive, so that
an operator which relates rows is seen to. Integers are below every size, so that they are indices of whatever they index. An
operator is never called that may change its operands or draw random numbers, or that communicates; one that turns out to, that
gives another result when called again, or that refuses its operands, is not split. Nothing guards against one that hangs or ends
the process; it is one that the program calls anyway.

Everything here is a function of the operator and the types: random numbers are from generators of our own.
"""

from __future__ import annotations

import itertools
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from autopar.catalog.schema import parameters, resolve
from autopar.ir import Arg, Layout, Op, P, R, Ref, S, Strategy, TensorType, nameless

__all__ = ["Probed", "probed"]

TOLERANCE = 1e-10  # relative to the largest element of a row (of a slice), or of all terms (of a sum)
LEAST_SCALE = 1e-2  # what is smaller is compared as if it were as large: it may be what is left of larger values
SEEDS = 2  # of each kind of sample
KINDS = tuple(itertools.product((False, True), repeat=2))  # (rows of different scales, positive)
ENOUGH = len(KINDS) * SEEDS // 2  # samples that the whole operator takes; others prove nothing
SMALL_BATCH, FEW_PARTS, MANY_PARTS = 6, (2, 3), 16  # in more than many parts, only the samples of one seed are cut
AT_ONCE = 4  # operands of which every subset is tried; of more, only all of them
SMALL, LARGE = 1 << 14, 1 << 20  # elements of all operands: as they are; at most, where smaller ones are refused
LEAST_SIZE, SIZE_STEP = 8, 4  # other dims are reduced to 8, 12, 16 ..., distinct where they were distinct

COMMUNICATING = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem"})  # namespaces

# What an operator may raise on operands that it does not take, without a kernel for the CPU, or without a derivative.
REFUSALS = (
    RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError, ImportError, OSError
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """strategies: those that hold. additive: its backward is not known to be other than linear, so that it may run on replicated
    operands whose gradients are terms of a sum."""

    strategies: tuple[Strategy, ...] = ()
    additive: bool = True


SIZES = (1.0, 2.0**-20, 2.0**20)  # of gradients: what one of them cuts off may be in none of a usual size


class _Unsound(Exception):
    """The operator, or this way to split it, is not what a strategy needs; the message says why."""


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator whose operands are %x0, %x1, ..., and the types of its operands and results."""

    op: Op
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Operands, what the whole operator makes of them, the gradients that arrive, and those that leave (None: none flows)."""

    values: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    arriving: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


_KNOWN: dict[tuple[object, ...], Probed] = {}


def probed(op: Op, ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], n: int) -> Probed:
    """What holds for an operator without a rule on an axis of n ranks. ins, outs: the types of refs(op) and of its results.
    The operator runs on the CPU; once for each distinct operator, types and n in a process."""
    plain = nameless(op)
    made = tuple(o is not None for o in plain.outputs)
    key = (plain.target, repr(plain.args), repr(plain.kwargs), plain.no_grad, made, ins, outs, n)
    if key not in _KNOWN:
        call = _Call(plain, ins, outs)
        _KNOWN[key] = _probe(call, n) if ins and _may_run(plain) else Probed()
    return _KNOWN[key]


def _may_run(op: Op) -> bool:
    """Whether nothing that is stated of the operator speaks against calling it twice."""
    namespace = op.target.partition(".")[0]
    if namespace == "autopar" or namespace in COMMUNICATING or any(p.mutated for p in parameters(op.target)):
        return False
    operator = resolve(op.target)
    # All results must be tensors: numbers that depend on data have no layout.
    tensors = all(str(r.type) in ("Tensor", "List[Tensor]") for r in operator._schema.returns)
    return tensors and torch.Tag.nondeterministic_seeded not in operator.tags


def _probe(call: _Call, n: int) -> Probed:
    found: list[Strategy] = []
    with _undisturbed():
        additive = _additive(call)
        sizes = dict.fromkeys(t.shape[0] for t in call.ins if t.shape and t.shape[0] > 1 and t.shape[0] % n == 0)
        for size in sizes:
            held: list[frozenset[int]] = []
            for split in _subsets([k for k, t in enumerate(call.ins) if t.shape[:1] == (size,)]):
                if any(split <= larger for larger in held):
                    continue
                try:
                    layouts = _layouts(call, split, size, n)
                except _Unsound:
                    continue
                held.append(split)
                found.append(Strategy(inputs=tuple(S(0) if k in split else R for k in range(len(call.ins))), outputs=layouts))
    return Probed(strategies=tuple(found), additive=additive)


def _subsets(operands: Sequence[int]) -> Iterator[frozenset[int]]:
    """Of the operands that could be cut: all, then fewer (a weight may have as many rows as the batch by chance)."""
    least = 1 if len(operands) <= AT_ONCE else len(operands)
    for count in range(len(operands), least - 1, -1):
        yield from map(frozenset, itertools.combinations(operands, count))


def _layouts(call: _Call, split: frozenset[int], size: int, n: int) -> tuple[Layout, ...]:
    """The layouts of the results when these operands, of `size` rows, are cut. _Unsound if they have none."""
    found: set[tuple[Layout, ...]] = set()
    for rows in (size, SMALL_BATCH):
        samples = _samples(call, split, rows)
        if len(samples) < ENOUGH and rows == size:
            raise _Unsound("the operator takes none of the samples")
        if len(samples) < ENOUGH:
            continue  # it does not take another size of batch
        if any(all(torch.equal(s.results[k], samples[0].results[k]) for s in samples[1:]) for k in range(len(call.outs))):
            raise _Unsound("a result is the same for all samples, so that they prove nothing of it")
        for count in dict.fromkeys((n, *FEW_PARTS) if rows == size else FEW_PARTS):
            if rows % count == 0:
                found |= {_in_parts(call, s, split, count) for s in (samples if count <= MANY_PARTS else samples[: len(KINDS)])}
    if len(found) != 1:
        raise _Unsound("the layouts of the results depend on the number of parts")
    return found.pop()


# --------------------------------------------------------------------------------------------------------------- samples
def _samples(call: _Call, split: frozenset[int], rows: int) -> list[_Sample]:
    """Samples with dim 0 of the operands in `split` of size `rows`, at the first shapes at which the operator takes enough of
    them; few or none if there are no such. _Unsound if it does not do the same when it is called again."""
    for shapes in _shapes(call.ins, split, rows):
        found = [s for seed in range(SEEDS) for kind in KINDS if (s := _sample(call, shapes, seed, *kind)) is not None]
        if len(found) >= ENOUGH:
            as_captured = all(shape == t.shape for shape, t in zip(shapes, call.ins, strict=True))
            made = {tuple(tuple(r.shape) for r in s.results) for s in found}
            if len(made) > 1 or (as_captured and made != {tuple(t.shape for t in call.outs)}):
                raise _Unsound("the shapes of its results depend on data")
            return found
    return []


def _sample(call: _Call, shapes: Sequence[tuple[int, ...]], seed: int, spread: bool, positive: bool) -> _Sample | None:
    """One sample; None if the operator refuses it, or makes of it what is not a number."""
    generator = torch.Generator().manual_seed(seed)
    least = min((size for shape in shapes for size in shape if size > 1), default=2)
    values = [_drawn(t.dtype, shape, generator, least, spread, positive) for t, shape in zip(call.ins, shapes, strict=True)]
    before = _random_state()
    try:
        results, arriving, gradients = _run(call, values, lambda _, t: _drawn(t.dtype, tuple(t.shape), generator, 2, spread, False))
        results_2, _, gradients_2 = _run(call, values, _giving(arriving))
    except REFUSALS:
        return None
    if _random_state() != before:
        raise _Unsound("it draws random numbers")
    made, made_2 = (*results, *_given(gradients)), (*results_2, *_given(gradients_2))
    if any(bool(t.isnan().any()) for t in made):
        return None
    if len(made) != len(made_2) or not all(map(torch.equal, made, made_2)):
        raise _Unsound("it does not give the same result when it is called again")
    return _Sample(tuple(values), results, arriving, gradients)


def _shapes(ins: Sequence[TensorType], split: frozenset[int], rows: int) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the operands to try: as they are if small; reduced; reduced but for sizes that are some operand's last; as they
    are if not too large. `rows` is kept."""
    sizes = sorted({size for k, t in enumerate(ins) for size in t.shape[1 if k in split else 0 :]})
    reduced = {size: min(size, LEAST_SIZE + SIZE_STEP * k) for k, size in enumerate(s for s in sizes if s > LEAST_SIZE)}
    last = {t.shape[-1] for t in ins if t.shape}

    def of(change: dict[int, int]) -> list[tuple[int, ...]]:
        changed = [tuple(change.get(size, size) for size in t.shape) for t in ins]
        return [(rows, *shape[1:]) if k in split else shape for k, shape in enumerate(changed)]

    tried: list[list[tuple[int, ...]]] = []
    for change, most in (({}, SMALL), (reduced, LARGE), ({k: v for k, v in reduced.items() if k not in last}, LARGE), ({}, LARGE)):
        shapes = of(change)
        if shapes not in tried and sum(map(math.prod, shapes)) <= most:
            tried.append(shapes)
            yield shapes


def _drawn(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator, least: int, spread: bool, positive: bool) -> Tensor:
    """A random tensor: floating and complex ones in double precision, integers below `least`."""
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator, device="cpu").bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(least, shape, generator=generator, device="cpu").to(dtype)
    double = _double(dtype)
    assert isinstance(double, torch.dtype)
    drawn = torch.rand(shape, generator=generator, dtype=double, device="cpu") + 0.5
    if not positive:
        drawn = torch.randn(shape, generator=generator, dtype=double, device="cpu")
    if spread and shape:
        exponents = torch.rand(shape[:1], generator=generator, dtype=torch.float64, device="cpu") * 6 - 3
        drawn = drawn * (10**exponents).reshape(-1, *[1] * (len(shape) - 1))
    return drawn


def _double(arg: Arg) -> Arg:
    """A floating or complex dtype in double precision; anything else as it is."""
    if isinstance(arg, torch.dtype) and (arg.is_floating_point or arg.is_complex):
        return torch.complex128 if arg.is_complex else torch.float64
    return arg


# --------------------------------------------------------------------------------------------------------------- running
def _run(
    call: _Call, values: Sequence[Tensor], arrives: Callable[[int, Tensor], Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Results; for each the gradient that arrives at it, as `arrives` gives it; for each operand the gradient that leaves, None
    where the program has none. Raises one of REFUSALS, or _Unsound for effects."""
    operands = [v.clone().requires_grad_(t.grad) for v, t in zip(values, call.ins, strict=True)]

    def value(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return operands[int(arg.name[1:])]
        return [value(a) for a in arg] if isinstance(arg, tuple) else _double(arg)

    with torch.set_grad_enabled(not call.op.no_grad):
        returned = resolve(call.op.target)(*map(value, call.op.args), **{k: value(v) for k, v in call.op.kwargs})
    listed = returned if isinstance(returned, list | tuple) else (returned,)
    if len(listed) != len(call.op.outputs):
        raise _Unsound("the number of its results depends on data")
    results = [r for r, name in zip(listed, call.op.outputs, strict=True) if name is not None]
    if not all(isinstance(r, Tensor) and r.layout is torch.strided and r.device.type == "cpu" for r in results):
        raise _Unsound("its results are not dense tensors on the CPU")
    arriving = tuple(arrives(k, r) for k, r in enumerate(results))
    gradients: list[Tensor | None] = [None] * len(operands)
    flowing = [k for k, r in enumerate(results) if r.requires_grad]
    asked = [k for k, t in enumerate(call.ins) if t.grad]
    if asked and any(t.grad for t in call.outs) and not call.op.no_grad:
        if not flowing:
            raise _Unsound("it has no derivative")
        arrived = [arriving[k] for k in flowing]
        left = torch.autograd.grad([results[k] for k in flowing], [operands[k] for k in asked], arrived, allow_unused=True)
        for k, g in zip(asked, left, strict=True):
            gradients[k] = torch.zeros_like(operands[k]) if g is None else g
    if not all(torch.equal(v, o.detach()) for v, o in zip(values, operands, strict=True)):
        raise _Unsound("it changes its operands")
    return tuple(r.detach().clone() for r in results), arriving, tuple(gradients)


def _in_parts(call: _Call, sample: _Sample, split: frozenset[int], count: int) -> tuple[Layout, ...]:
    """The layouts of the results when `count` parts compute what the whole does. _Unsound if they do not."""
    layouts: list[Layout] = []

    def arrives(part: int) -> Callable[[int, Tensor], Tensor]:
        def of(k: int, result: Tensor) -> Tensor:
            layout = _layout(tuple(result.shape), tuple(sample.results[k].shape), count)
            layouts.append(layout)
            return sample.arriving[k].chunk(count)[part] if layout.is_shard else sample.arriving[k]

        return of

    parts = []
    for part in range(count):
        values = [v.chunk(count)[part] if k in split else v for k, v in enumerate(sample.values)]
        try:
            parts.append(_run(call, values, arrives(part)))
        except REFUSALS as error:
            raise _Unsound(f"a part refuses it: {error}") from error
    found = tuple(layouts[: len(sample.results)])
    if tuple(layouts) != found * count:
        raise _Unsound("parts of one size have results of several")
    for k, layout in enumerate(found):
        _check(sample.results[k], [results[k] for results, _, _ in parts], layout)
    for k, whole in enumerate(sample.gradients):
        if whole is not None:
            _check(whole, [g for _, _, gradients in parts if (g := gradients[k]) is not None], S(0) if k in split else P)
    return found


def _layout(part: tuple[int, ...], whole: tuple[int, ...], count: int) -> Layout:
    """What a part's shape makes of a result: a slice, or a term of a sum."""
    if part == whole:
        return P
    if part and (part[0] * count, *part[1:]) == whole:
        return S(0)
    raise _Unsound(f"{count} results of shape {list(part)} do not make one of {list(whole)}")


def _check(whole: Tensor, parts: Sequence[Tensor], layout: Layout) -> None:
    """_Unsound unless the parts are slices of the whole, or terms of it."""
    exact, scale = not (whole.dtype.is_floating_point or whole.dtype.is_complex), None
    if layout.is_shard:
        joined = torch.cat(list(parts))
        if not exact and whole.numel():
            rows = whole.abs().nan_to_num(0, 0, 0).reshape(whole.shape[0], -1).amax(1)
            scale = rows.reshape(-1, *[1] * (whole.ndim - 1))
    else:
        if whole.dtype == torch.bool:
            raise _Unsound("what is true or false has no terms")
        joined = torch.stack(list(parts)).sum(0, dtype=whole.dtype)
        if not bool(joined.isfinite().all()):
            raise _Unsound("the terms of what is not finite cannot be compared")
        if not exact and whole.numel():
            scale = torch.stack([p.abs() for p in parts]).sum(0).amax()
    if joined.shape != whole.shape or joined.dtype != whole.dtype:
        raise _Unsound("the parts are of another shape or dtype")
    same = joined == whole
    if scale is not None:
        same |= (joined - whole).abs() <= TOLERANCE * scale.clamp(min=LEAST_SCALE)
    if not bool(same.all()):
        raise _Unsound("the parts make something else than the whole")


def _additive(call: _Call) -> bool:
    """Whether the gradients that leave for a sum are the sums of those that leave for its terms, as far as can be seen."""
    if call.op.no_grad or not any(t.grad for t in call.ins) or not any(t.grad for t in call.outs):
        return True
    try:
        for s, factor in itertools.product(_samples(call, frozenset(), 0), SIZES):
            arriving = [t * factor if t.dtype.is_floating_point or t.dtype.is_complex else t for t in s.arriving]
            terms = [-2 * t.flip(tuple(range(t.ndim))) if t.dtype.is_floating_point or t.dtype.is_complex else t for t in arriving]
            rest = [t - part for t, part in zip(arriving, terms, strict=True)]
            whole, *parts = (_run(call, s.values, _giving(given))[2] for given in (arriving, terms, rest))
            for k, gradient in enumerate(whole):
                if gradient is not None:
                    _check(gradient / factor, [g / factor for part in parts if (g := part[k]) is not None], P)
    except _Unsound:
        return False
    except REFUSALS:
        return True
    return True


def _giving(arriving: Sequence[Tensor]) -> Callable[[int, Tensor], Tensor]:
    return lambda k, _: arriving[k]


def _given(gradients: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(g for g in gradients if g is not None)


def _random_state() -> tuple[bytes, object, bytes]:
    """Of the generators that an operator on the CPU may draw from: torch's, Python's, NumPy's."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), pickle.dumps(numpy.random.get_state(legacy=False))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Afterwards the random numbers of the process, its gradient mode and the filters of its warnings are as they were."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            numpy.random.set_state(states[2])
