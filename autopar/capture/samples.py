"""Does a region work on every sample by itself? It is run in float64, whole and in parts, on what it was given and on variations of it;
what does not take float64, as many a kernel, in its own precision.

What is said of an operator without a rule (autopar/catalog/probe.py) holds here: agreement on all samples, of results and gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autopar import generators
from autopar.capture.lift import in_float64, to_float64
from autopar.copies import copied
from autopar.run.inputs import not_dense
from autopar.run.region import Region

__all__ = [
    "FACTORS", "Ran", "Trial", "close", "differentiated", "gives_the_same", "identical", "is_linear", "parts_of", "run_small", "splits_of",
    "stand_ins", "trial_of", "variations", "works_by_samples", "writes_unseen",
]  # fmt: skip

TOLERANCE = 1e-10  # relative to the largest of what is compared
IN_FLOAT32 = 1e-5  # the same of what computes in float32
EPSILONS = 8  # the same of lower precisions, in their own epsilons
FINE, COARSE = 2.0**-40, 2.0**-8  # relative changes of operands: below what float32 resolves, and above it
UNTOLD = 1e-2  # the share of what is another for COARSE that may be another for FINE, where what is rounded is at a boundary
AT_ONCE = 4  # tensors of which every subset is tried
MOST_PARTS = 16  # into which samples are cut, where there are as many and their number is no prime
NOT_FINITE = (math.nan, math.inf)
FACTORS = (1.0, 2.0**-30, 2.0**30)  # of gradients
HALF = 2.0**4  # the largest of those where they are in half precision
LEAST_SIZE, SIZE_STEP = 8, 4  # larger sizes are reduced to 12, 16, 20 ..., distinct where they were distinct
LARGE = 1 << 26  # elements of parameters and buffers, beyond which it is not copied in order to be tried
REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)


def stand_ins(given: Sequence[Tensor]) -> list[Tensor]:
    """Small random tensors on the CPU in the place of such that have no numbers, on the meta device; integers are below every size."""
    reduced = _reduced(given)
    shapes = [[reduced.get(size, size) for size in t.shape] for t in given]
    least = min((size for shape in shapes for size in shape if size > 1), default=2)
    generator = torch.Generator().manual_seed(0)

    def drawn(t: Tensor, shape: list[int]) -> Tensor:
        if t.dtype.is_floating_point or t.dtype.is_complex:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(t.dtype)
        most = 2 if t.dtype == torch.bool else least
        return torch.randint(most, shape, generator=generator, device="cpu").to(t.dtype)

    return [drawn(t, shape) for t, shape in zip(given, shapes, strict=True)]


def _reduced(given: Sequence[Tensor]) -> dict[int, int]:
    """Size -> a smaller one, which differs from those of other sizes."""
    large = sorted({size for t in given for size in t.shape if size > LEAST_SIZE})
    return {size: min(size, LEAST_SIZE + SIZE_STEP * k) for k, size in enumerate(large, start=1)}


def run_small(region: Region, given: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], bool] | None:
    """A region without a state on `stand_ins` of what it was given on the meta device: these, its results, whether it draws random
    numbers. None if it does not take them, or makes of them other shapes than `results` say."""
    small, reduced = stand_ins(given), _reduced(given)
    with generators.kept(), torch.no_grad():
        before = generators.states()
        found = _results(region, small, ())
        draws = not generators.same(before)
    expected = [tuple(reduced.get(size, size) for size in r.shape) for r in results]
    if found is None or [tuple(r.shape) for r in found] != expected:
        return None
    return small, list(found), draws


def works_by_samples(
    region: Region, given: Sequence[Tensor], state: Sequence[Tensor], results: Sequence[Tensor], *, draws: bool, own_backward: bool = False
) -> tuple[bool, tuple[int, ...]]:
    """Whether the shapes of its results do not depend on values, and which of its tensors may be cut along dim 0, so that its results
    are cut alike (none if it cannot). own_backward: it need not be the same for large gradients as for small ones."""
    shapes = [tuple(r.shape) for r in results]
    with generators.kept(), torch.no_grad():
        for tensors in variations(given):
            found = _results(region, tensors, state)
            if found is not None and [tuple(r.shape) for r in found] != shapes:
                return False, ()
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if draws or len(sizes) != 1 or not min(sizes) > 1 or sum(t.numel() for t in state) > LARGE:
        return True, ()
    (size,) = sizes
    splits = list(splits_of(given, size))
    with generators.kept(), torch.enable_grad():
        trial = trial_of(region, given, state) if splits else None
        if trial is None:
            return True, ()
        for split in splits:
            if not all(_holds(trial, frozenset(split), size, f) for f in (trial.factors(FACTORS) if own_backward else (1.0,))):
                continue
            if not own_backward or _guards_alike(trial, frozenset(split), size):
                return True, split
    return True, ()


def splits_of(given: Sequence[Tensor], size: int) -> Iterator[tuple[int, ...]]:
    """Which tensors may be cut along dim 0 at once, of those with this size: all of them first; of many, no others."""
    rows = [k for k, t in enumerate(given) if t.shape[:1] == (size,)]
    least = 1 if len(rows) <= AT_ONCE else len(rows)
    for count in range(len(rows), least - 1, -1):
        yield from itertools.combinations(rows, count) if count else ()


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A region, and what it is tried on. tolerance: up to which two ways to compute the same agree, relative to the largest element."""

    region: Region
    given: list[Tensor]
    state: list[Tensor]
    tolerance: float

    def factors(self, wished: Sequence[float]) -> tuple[float, ...]:
        """Of gradients; as many as half precision holds, where they are in it."""
        half = any(t.dtype == torch.float16 for t in (*self.given, *self.state))
        return tuple(f for f in wished if not half or 1 / HALF <= abs(f) <= HALF)


def trial_of(region: Region, given: Sequence[Tensor], state: Sequence[Tensor]) -> Trial | None:
    """In float64; in the precision that it was given where it does not take that; None if it takes neither."""
    exact = dataclasses.replace(region, module=to_float64(copied(region.module)))
    doubles, weights = [_double(t) for t in given], [_double(t) for t in state]
    if (found := differentiated(exact, doubles, weights, None)) is not None:
        tolerance = IN_FLOAT32 if _rounds(exact, doubles, weights, found) else TOLERANCE
        return Trial(exact, doubles, weights, tolerance)
    own, held = [t.detach() for t in given], [t.detach() for t in state]
    if differentiated(region, own, held, None) is None:
        return None
    epsilon = max((torch.finfo(t.dtype).eps for t in (*own, *held) if t.dtype.is_floating_point), default=0.0)
    return Trial(region, own, held, max(IN_FLOAT32, EPSILONS * epsilon))


def _rounds(region: Region, given: Sequence[Tensor], state: Sequence[Tensor], found: Ran) -> bool:
    """Whether it computes in a lower precision than it is given: it does not tell an operand from one that differs in the last bits of
    float64, nowhere, and tells it from one that differs more."""
    generator = torch.Generator().manual_seed(3)

    def changed(k: int, by: float) -> float:
        """The share of what it gives that is another if an operand is."""
        t = given[k]
        signs = torch.randint(2, t.shape, generator=generator, device="cpu").to(t.device, t.dtype) * 2 - 1
        other = differentiated(region, [*given[:k], t * (1 + by * signs), *given[k + 1 :]], state, found[1])
        if other is None:
            return 1.0
        pairs = [(a, b) for a, b in zip((*found[0], *_left(found)), (*other[0], *_left(other)), strict=True) if a.shape == b.shape]
        return sum(int((a != b).sum()) for a, b in pairs) / max(1, sum(a.numel() for a, _ in pairs))

    floating = [k for k, t in enumerate(given) if t.dtype == torch.float64]
    return any(changed(k, FINE) <= UNTOLD * share for k in floating if (share := changed(k, COARSE)) > 0)


def writes_unseen(
    region: Region, given: Sequence[Tensor], state: Sequence[Tensor], *, draws: bool, own_backward: bool
) -> tuple[bool, bool]:
    """Whether it writes to the memory of what it is given, in forward or in backward, and to that of the gradients that come to it:
    autograd does not see what kernels of the user's write. own_backward: it may do so in backward. What cannot be tried may do both."""
    if (draws or sum(t.numel() for t in state) > LARGE) and own_backward:
        return True, True
    operands, weights = _leaves(given), _leaves(state)
    with generators.kept(), torch.enable_grad():
        found = _results(region, operands, weights)
        if found is None:
            return own_backward, own_backward
        grads = _drawn(found)
        before = [g.clone() for g in grads]
        flowing = [k for k, r in enumerate(found) if r.requires_grad]
        leaves = [t for t in (*operands, *weights) if t.requires_grad]
        if own_backward and flowing and leaves:
            with contextlib.suppress(*REFUSALS):
                torch.autograd.grad([found[k] for k in flowing], leaves, [grads[k] for k in flowing], allow_unused=True)
    written = not all(identical(a.detach(), b) for a, b in zip(operands, given, strict=True))
    return written, not all(identical(a, b) for a, b in zip(grads, before, strict=True))


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and numbers, of which none need be one."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def gives_the_same(region: Region, other: Region, given: Sequence[Tensor], *, doubled: bool = True) -> bool:
    """Whether two regions without a state give the same results and gradients, also of tensors and of gradients of other sizes and signs
    than they are given: what one of them cuts off may be in none of these. doubled: in float64; else in the dtypes that are given, as what
    holds tensors of its own needs it."""
    doubles, tried = [_double(t) if doubled else t.detach().clone().requires_grad_(t.requires_grad) for t in given], 0
    with generators.kept(), torch.enable_grad():
        for tensors in (*variations(doubles), *_larger(doubles)):
            generators.seed(0)
            one = differentiated(region, tensors, (), None)
            generators.seed(0)
            two = None if one is None else differentiated(other, tensors, (), one[1])
            if one is None:
                continue
            if two is None or not _alike(one, two) or (not tried and _notices(region, tensors, (), one)):
                return False
            for factor in (2.0**-30, -(2.0**30)):
                scaled = [g * factor for g in one[1]]
                generators.seed(0)
                more = differentiated(region, tensors, (), scaled)
                generators.seed(0)
                others = differentiated(other, tensors, (), scaled)
                if more is None or others is None or not all(close(a / factor, b / factor) for a, b in zip(_left(more), _left(others))):
                    return False
            tried += 1
    return tried > 1


def _alike(one: Ran, two: Ran) -> bool:
    pairs = [*zip(one[0], two[0], strict=True), *zip(_left(one), _left(two), strict=True)]
    return all(close(a, b) or bool((a.isnan() & b.isnan()).any()) for a, b in pairs)


def is_linear(region: Region, given: Sequence[Tensor], state: Sequence[Tensor], *, draws: bool) -> bool:
    """Whether the gradients that it gives are linear in those that come to it, as autograd's own are: not where a hook clamps them. Powers
    of two change no digit."""
    if draws or sum(t.numel() for t in state) > LARGE:
        return False
    tried = 0
    with generators.kept(), torch.enable_grad():
        trial = trial_of(region, given, state)
        if trial is None:
            return False
        for tensors in (*variations(trial.given), *_larger(trial.given)):
            once = differentiated(trial.region, tensors, trial.state, None)
            if once is None:
                continue
            if not _is_linear_at(trial, tensors, once) or (not tried and _notices(trial.region, tensors, trial.state, once)):
                return False
            tried += 1
    return tried > 0


def _is_linear_at(trial: Trial, tensors: Sequence[Tensor], once: Ran) -> bool:
    region, state, tolerance = trial.region, trial.state, trial.tolerance
    generator = torch.Generator().manual_seed(2)
    other = [torch.randn(g.shape, generator=generator, dtype=torch.float64, device="cpu").to(g.device, g.dtype) for g in once[1]]
    second = differentiated(region, tensors, state, other)
    summed = differentiated(region, tensors, state, [a + b for a, b in zip(once[1], other, strict=True)])
    if second is None or summed is None:
        return False
    if not all(close(x + y, z, tolerance=tolerance) for x, y, z in zip(*map(_left, (once, second, summed)), strict=True)):
        return False
    for factor in trial.factors((2.0**-30, -(2.0**-8), 2.0**8, 2.0**30)):
        found = differentiated(region, tensors, state, [g * factor for g in once[1]])
        if found is None or not all(close(a / factor, b, tolerance=tolerance) for a, b in zip(_left(found), _left(once), strict=True)):
            return False
    return True


def _notices(region: Region, tensors: Sequence[Tensor], state: Sequence[Tensor], once: Ran) -> bool:
    """Whether its backward makes something else of gradients that are not finite than autograd's own: it raises, gives finite ones of them,
    or other ones elsewhere. once: of gradients that are finite."""
    for k, g in enumerate(once[1]):
        if not g.dtype.is_floating_point or not g.numel():
            continue
        moved = differentiated(region, tensors, state, _with_first(once[1], k, g.reshape(-1)[0] + 1))
        if moved is None:
            continue
        for value in NOT_FINITE:
            found = _not_finite(region, tensors, state, once[1], k, value)
            if found is None:
                return True
            for a, before, other in zip(*map(_left, (found, once, moved)), strict=True):
                if bool((a.isfinite() & ((before != other) | (a != before))).any()):
                    return True
    return False


def _not_finite(
    region: Region, tensors: Sequence[Tensor], state: Sequence[Tensor], grads: Sequence[Tensor], k: int, value: float
) -> Ran | None:  # fmt: skip
    """Of gradients of which the first element of the k-th is this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy
        return differentiated(region, tensors, state, _with_first(grads, k, torch.tensor(value)))


def _with_first(grads: Sequence[Tensor], k: int, value: Tensor) -> list[Tensor]:
    """Gradients of which the k-th has this as its first element."""
    found = [g.clone(memory_format=torch.contiguous_format) for g in grads]
    found[k].view(-1)[0] = value
    return found


def _guards_alike(trial: Trial, split: frozenset[int], size: int) -> bool:
    """Whether what its backward makes of gradients that are not finite is the same for parts of the samples."""
    region, state = trial.region, trial.state
    whole = differentiated(region, trial.given, state, None)
    if whole is None or not _notices(region, trial.given, state, whole):
        return True
    floating = [k for k, g in enumerate(whole[1]) if g.dtype.is_floating_point]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy
        for k, value in itertools.product(floating, NOT_FINITE):
            found = _not_finite(region, trial.given, state, whole[1], k, value)
            if found is None or not all(_same(trial, trial.given, split, parts, found) for parts in parts_of(size)):
                return False
    return True


def _larger(given: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """What was given with other signs, smaller and larger."""
    for factor in (-1.0, 2.0**-10, 2.0**10, -(2.0**20)):
        if abs(factor) <= HALF or not any(t.dtype == torch.float16 for t in given):
            yield [t * factor if t.dtype.is_floating_point else t for t in given]


def _left(ran: Ran) -> list[Tensor]:
    """The gradients that it has given."""
    return [g for g in (*ran[2], *ran[3]) if g.dtype.is_floating_point]


def parts_of(size: int) -> tuple[int, ...]:
    """Into how many parts so many samples are cut: 2, 3, and as many as there are, up to a limit; but for such that leave a rest."""
    most = next(n for n in range(min(size, MOST_PARTS), 0, -1) if size % n == 0)
    found = {n for n in (2, 3, most) if n > 1 and size % n == 0}
    return tuple(sorted(found)) or (size,)


def _holds(trial: Trial, split: frozenset[int], size: int, factor: float) -> bool:
    """factor: of the gradients that come to it."""
    region, state, tried = trial.region, trial.state, 0
    for tensors in variations(trial.given):
        whole = differentiated(region, tensors, state, None)
        if whole is not None and factor != 1:
            whole = differentiated(region, tensors, state, [g * factor for g in whole[1]])
        if whole is None:
            continue
        tried += 1
        for parts in parts_of(size):
            if not _same(trial, tensors, split, parts, whole):
                return False
    return tried > 1


Ran = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]  # results, gradients given to them, of tensors, of the state


def _same(trial: Trial, tensors: Sequence[Tensor], split: frozenset[int], parts: int, whole: Ran) -> bool:
    region, state, found = trial.region, trial.state, []
    for k in range(parts):
        own = [t.chunk(parts)[k] if i in split else t for i, t in enumerate(tensors)]
        part = differentiated(region, own, state, [g.chunk(parts)[k] for g in whole[1]])
        if part is None or any(r.shape[:1] != (w.shape[0] // parts,) for r, w in zip(part[0], whole[0], strict=True)):
            return False
        found.append(part)
    results, _, of_tensors, of_state = whole
    sizes = (float(g.abs().amax()) for g in whole[1] if g.numel() and g.dtype.is_floating_point)
    scale = max((size for size in sizes if math.isfinite(size)), default=1.0)
    joined = [(torch.cat([p[0][k] for p in found]), r) for k, r in enumerate(results)]
    for k, g in enumerate(of_tensors):
        pieces = [p[2][k] for p in found]
        joined.append((torch.cat(pieces) if k in split else torch.stack(pieces).sum(0), g))
    joined += [(torch.stack([p[3][k] for p in found]).sum(0), g) for k, g in enumerate(of_state)]
    return all(_close_where_finite(a, b, 1e-2 * min(1.0, scale), trial.tolerance) for a, b in joined)


def _close_where_finite(a: Tensor, b: Tensor, least: float, tolerance: float) -> bool:
    if a.shape != b.shape or not a.dtype.is_floating_point or bool(b.isfinite().all()):
        return close(a, b, least, tolerance)
    finite = b.isfinite()
    return torch.equal(a.isfinite(), finite) and close(a.where(finite, 0), b.where(finite, 0), least, tolerance)


def close(a: Tensor, b: Tensor, least: float = 1e-2, tolerance: float = TOLERANCE) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point or not a.numel():
        return torch.equal(a, b)
    return bool(((a - b).abs() <= tolerance * b.abs().amax().clamp(min=least)).all())


def variations(given: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """What was given; its rows in another order; numbers of another scale and sign; all rows the same, which fills whatever has a
    capacity."""
    generator = torch.Generator().manual_seed(0)

    def noise(t: Tensor, scale: float) -> Tensor:
        if not t.dtype.is_floating_point:
            return t
        return torch.randn(t.shape, generator=generator, dtype=torch.float64, device="cpu").to(t.device, t.dtype) * scale

    yield list(given)
    yield [t.roll(1, 0) if t.dim() else t for t in given]
    yield [noise(t, 1.0) for t in given]
    yield [noise(t, 10.0) for t in given]
    yield [t[:1].expand_as(t).clone() if t.dim() > 1 and t.dtype.is_floating_point else t for t in given]


def _results(region: Region, tensors: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """None if the region refuses these tensors, or gives such that are not dense."""
    try:
        found = region(tensors, state)
    except REFUSALS:
        return None
    return None if any(map(not_dense, found)) else found


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, of which gradients are wanted where they have floating numbers."""
    return [t.detach().clone().requires_grad_(t.dtype.is_floating_point) for t in tensors]


def _drawn(results: Sequence[Tensor]) -> list[Tensor]:
    """Gradients for results, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(r.shape, generator=generator, dtype=torch.float64, device="cpu").to(r.device, r.dtype) for r in results]


def differentiated(region: Region, tensors: Sequence[Tensor], state: Sequence[Tensor], arriving: Sequence[Tensor] | None) -> Ran | None:
    """None if the region refuses these tensors. Gradients are of what has floating numbers; zeros where none flows."""
    operands, weights = _leaves(tensors), _leaves(state)
    found = _results(region, operands, weights)
    if found is None:
        return None
    given = arriving if arriving is not None else _drawn(found)
    if [g.shape for g in given] != [r.shape for r in found]:
        return None
    leaves = [t for t in (*operands, *weights) if t.requires_grad]
    flowing = [k for k, r in enumerate(found) if r.requires_grad]
    grads = {}
    if flowing and leaves:
        try:
            left = torch.autograd.grad([found[k] for k in flowing], leaves, [given[k].clone() for k in flowing], allow_unused=True)
        except REFUSALS:  # of a hook
            return None
        grads = {id(t): g for t, g in zip(leaves, left, strict=True)}

    def of(t: Tensor) -> Tensor:
        g = grads.get(id(t))
        return torch.zeros_like(t) if g is None else g

    return [r.detach() for r in found], list(given), [of(t) for t in operands], [of(t) for t in weights]


def _double(t: Tensor) -> Tensor:
    return in_float64(t.detach())
