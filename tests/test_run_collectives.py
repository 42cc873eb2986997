"""Every transition of autopar.run.collectives against its definition in terms of global values, on four gloo processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir import Layout
from autopar.run import Mesh, WorkerPool, comm
from autopar.run import collectives as C
from autopar.run.mesh import Axis
from autopar.run.slices import join, local_slice
from cost_models.collectives import summed_by_gathering

pytestmark = pytest.mark.gloo
N = 4


I, R, P = (Layout.parse(text) for text in "IRP")  # noqa: E741


def s(dim: int, groups: int = 1) -> Layout:
    return Layout.parse(f"S({dim}/{groups})" if groups > 1 else f"S({dim})")


CASES: list[tuple[str, Layout, Layout, Callable[[Tensor, Axis], Tensor]]] = [
    ("copy_to", I, R, C.copy_to),
    ("all_reduce", P, I, C.all_reduce),
    ("all_reduce_shared", P, R, C.all_reduce_shared),
    ("keep_one", I, P, C.keep_one),
    ("mask_one", R, P, C.mask_one),
    ("own", R, I, C.own),
]
for _dim, _groups in itertools.product((0, 1), (1, 3)):
    CASES += [
        (name, *pair, lambda x, a, f=f, d=_dim, g=_groups: f(x, a, d, g))
        for name, pair, f in [
            ("split", (I, s(_dim, _groups)), C.split),
            ("narrow", (R, s(_dim, _groups)), C.narrow),
            ("all_gather", (s(_dim, _groups), R), C.all_gather),
            ("gather", (s(_dim, _groups), I), C.gather),
            ("reduce_scatter", (P, s(_dim, _groups)), C.reduce_scatter),
            ("pad", (s(_dim, _groups), P), C.pad),
        ]
    ]
for _g, _h in itertools.product((1, 3), (1, 3)):
    CASES.append(("all_to_all", s(0, _g), s(1, _h), lambda x, a, g=_g, h=_h: C.all_to_all(x, a, 0, g, 1, h)))
    CASES.append(("all_to_all", s(2, _g), s(0, _h), lambda x, a, g=_g, h=_h: C.all_to_all(x, a, 2, g, 0, h)))
    CASES.append(("regroup", s(1, _g), s(1, _h), lambda x, a, g=_g, h=_h: C.regroup(x, a, 1, g, h)))
SHAPE = (24, 12, 24)
TRANSPOSE = {"S": "S", "R": "P", "I": "I", "P": "R"}


def _lay(value: Tensor, layout: Layout, axis: Axis, seed: int) -> Tensor:
    """A rank's tensor of a global value in a layout; terms of a partial one are random with the right sum."""
    if layout.kind.value != "P":
        return local_slice(value, layout, axis.rank, axis.size).clone()
    terms = [torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(seed + i)) for i in range(axis.size)]
    terms[-1] = value - torch.stack(terms[:-1]).sum(0)
    return terms[axis.rank]


def _value(x: Tensor, layout: Layout, axis: Axis) -> Tensor:
    """The global value of what the ranks hold; fails if copies differ."""
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    if layout.is_shard:
        return join(parts, layout)
    if layout.kind.value == "P":
        return torch.stack(parts).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts), f"copies of {layout} differ"
    return parts[0]


def _check_all() -> int:
    axis = Mesh({"tp": N}).tp
    for number, (name, source, target, transition) in enumerate(CASES):
        seeded = torch.Generator().manual_seed(number)
        value = torch.randn(SHAPE, dtype=torch.float64, generator=seeded)
        grad = torch.randn(SHAPE, dtype=torch.float64, generator=seeded)
        x = _lay(value, source, axis, 1000 + number)
        x = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2].copy_(x).requires_grad_()  # strided
        y = transition(x, axis)
        label = f"{name} {source} -> {target}"
        assert (_value(y.detach(), target, axis) - value).abs().max() < 1e-12, f"forward of {label}"
        # the gradient of a value in layout X lies in the transpose of X
        as_layout = {"S": target, "R": P, "I": I, "P": I}[target.kind.value]
        y.backward(_lay(grad, as_layout, axis, 2000 + number))
        assert x.grad is not None
        back = {"S": source, "R": P, "I": I, "P": I}[source.kind.value]
        assert (_value(x.grad, back, axis) - grad).abs().max() < 1e-12, f"backward of {label}"
    return len(CASES)


def test_forward_and_backward_of_every_transition(workers: WorkerPool) -> None:
    assert workers.run(_check_all, timeout_s=60) == [len(CASES)] * N


def _check_again() -> int:
    """The backward of a backward lies as the value did, and is the move itself, to any order."""
    axis = Mesh({"tp": N}).tp
    for number, (name, source, target, transition) in enumerate(CASES):
        seeded = torch.Generator().manual_seed(number)
        value, upstream = (torch.randn(SHAPE, dtype=torch.float64, generator=seeded) for _ in range(2))
        x = _lay(value, source, axis, 1000 + number).requires_grad_()
        back, onward = ({"S": at, "R": P, "I": I, "P": R}[at.kind.value] for at in (source, target))
        grad = _lay(upstream, onward, axis, 2000 + number).requires_grad_()
        (first,) = torch.autograd.grad(transition(x, axis), x, grad, create_graph=True)
        label = f"{name} {source} -> {target}"
        assert (_value(first.detach(), back, axis) - upstream).abs().max() < 1e-12, f"backward of {label}"
        again = _lay(value, source, axis, 3000 + number).requires_grad_()  # what is differentiated by lies as what it is differentiated of
        (second,) = torch.autograd.grad(first, grad, again, create_graph=True)
        assert (_value(second.detach(), target, axis) - value).abs().max() < 1e-12, f"backward of the backward of {label}"
        (third,) = torch.autograd.grad(second, again, _lay(upstream, onward, axis, 4000 + number))
        assert (_value(third, back, axis) - upstream).abs().max() < 1e-12, f"third backward of {label}"
    return len(CASES)


def test_gradients_of_every_transition_can_be_differentiated(workers: WorkerPool) -> None:
    assert workers.run(_check_again, timeout_s=60) == [len(CASES)] * N


def _check_dtypes() -> None:
    axis = Mesh({"tp": N}).tp
    value = torch.arange(24 * 12).reshape(24, 12) % 7
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        x = value.to(dtype)
        part = local_slice(x, s(0), axis.rank, N)
        assert torch.equal(C.gather(part, axis, 0).to(torch.complex64), x.to(torch.complex64)), dtype
        across = C.all_to_all(part, axis, 0, 1, 1, 3)
        assert torch.equal(across.to(torch.complex64), local_slice(x, s(1, 3), axis.rank, N).to(torch.complex64)), dtype
        if dtype not in (torch.float8_e4m3fn,):
            for few in (x, x.repeat(100, 1)):  # whose terms are gathered, and more of them
                assert summed_by_gathering(few.nbytes, N) == (few is x)
                assert torch.equal(C.all_reduce(C.keep_one(few, axis), axis), few), dtype
                assert C.all_reduce(C.keep_one(few, axis), axis).dtype == dtype
    z = torch.randn(8, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    C.all_reduce(C.narrow(z, axis, 0).abs().sum(), axis).backward()
    expected = torch.randn(8, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected.abs().sum().backward()
    assert z.grad is not None and expected.grad is not None
    assert torch.allclose(C.all_reduce(z.grad, axis), expected.grad)
    scalar = C.all_reduce(torch.tensor(1.5), axis)
    assert scalar.shape == () and scalar.item() == 6


def _sums() -> None:
    """The same bits on all ranks, whatever the order in which terms arrive; what was given stays."""
    axis = Mesh({"tp": N}).tp
    for size in (3, 10_000):
        terms = torch.randn(N, size, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(N)[:, None]
        mine = terms[axis.rank].clone()
        found = comm.all_reduce(mine, axis)
        assert torch.equal(mine, terms[axis.rank]) and found.data_ptr() != mine.data_ptr()
        assert torch.allclose(found, terms.sum(0), rtol=1e-5, atol=1e-3)
        assert all(torch.equal(found, other) for other in comm.all_gather(found, axis))
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(comm.all_reduce(transposed, axis), N * transposed)


def test_sums_of_few_bytes_and_of_many(workers: WorkerPool) -> None:
    workers.run(_sums, timeout_s=60)


def test_dtypes_that_are_not_real_floats(workers: WorkerPool) -> None:
    workers.run(_check_dtypes, timeout_s=60)


def test_an_axis_of_size_one_is_the_identity() -> None:
    axis = Mesh({}).tp
    x = torch.randn(6, 12, 6, requires_grad=True)
    for _, _, _, transition in CASES:
        assert transition(x, axis) is x


def test_all_to_all_of_one_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="use regroup"):
        C.all_to_all(torch.ones(4, 4), Mesh({}).tp, 0, 1, 0, 3)


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dim 0 .* cannot be cut into 1 groups of 4"):
        local_slice(torch.ones(6, 4), s(0), 0, 4)
