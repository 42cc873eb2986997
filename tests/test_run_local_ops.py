"""Local code of operators against the operators themselves, on four gloo processes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.run import Mesh, WorkerPool, comm, recompute
from autopar.run import collectives as C
from autopar.run import local_ops as L
from autopar.run.mesh import Axis
from autopar.run.saved import with_graphs

pytestmark = pytest.mark.gloo
N = 4


def _part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.detach().chunk(axis.size, dim)[axis.rank].clone().requires_grad_(x.requires_grad)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _embedding() -> None:
    axis = Mesh({"tp": N}).tp
    indices = torch.randint(24, (5, 7), generator=torch.Generator().manual_seed(0))
    indices[0, 0] = 3
    for padding in (None, 3, -1):
        whole = _random(24, 6).requires_grad_()
        part = _part(whole, axis, 0)
        ours = C.all_reduce(L.masked_embedding(indices, part, axis, padding), axis)
        theirs = F.embedding(indices, whole, padding)
        assert torch.equal(ours, theirs)
        weight = _random(5, 7, 6, seed=1)
        (ours * weight).sum().backward()
        (theirs * weight).sum().backward()
        assert part.grad is not None and whole.grad is not None
        assert torch.allclose(part.grad, whole.grad.chunk(N)[axis.rank], rtol=1e-13), padding


def _cross_entropy() -> None:
    axis = Mesh({"tp": N}).tp
    labels = torch.randint(24, (9,), generator=torch.Generator().manual_seed(0))
    labels[2], labels[5] = -100, 7
    for ignored in (-100, 7):
        whole = _random(9, 24).mul(30).requires_grad_()
        part = _part(whole, axis, 1)
        given = labels.clamp_min(0) if ignored == 7 else labels
        ours = L.cross_entropy_sum_vocab(part, given, axis, ignored)
        theirs = F.cross_entropy(whole, given, reduction="sum", ignore_index=ignored)
        assert torch.allclose(ours, theirs, rtol=1e-13)
        (ours * 3).backward()
        (theirs * 3).backward()
        assert part.grad is not None and whole.grad is not None
        assert torch.allclose(part.grad, whole.grad.chunk(N, 1)[axis.rank], rtol=1e-11, atol=1e-14)


def _quotient() -> None:
    axis = Mesh({"dp": N}).dp
    for other in (torch.tensor([3, 0, 5, 1])[:N], _random(N, seed=1).abs().add(1).requires_grad_()):
        whole = _random(N).requires_grad_()
        a, b = whole.detach()[axis.rank].clone().requires_grad_(), other.detach()[axis.rank].clone()
        b.requires_grad_(other.requires_grad)
        ours, theirs = L.quotient_of_sums(a, b, axis), whole.sum() / other.sum()
        assert ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=1e-14)
        (ours * 3).backward()
        (theirs * 3).backward()
        for mine, all_ in ((a, whole), (b, other)):
            assert (mine.grad is None) == (all_.grad is None)
            assert mine.grad is None or torch.allclose(mine.grad, all_.grad[axis.rank], rtol=1e-13)
    for seed in range(20):  # as who sums the count first, bit for bit
        part, number = _random(N, seed=seed)[axis.rank].float(), torch.tensor(seed + 3 * axis.rank)
        assert torch.equal(L.quotient_of_sums(part, number, axis), comm.all_reduce(part / comm.all_reduce(number, axis), axis))
    assert L.quotient_of_sums(torch.tensor(2), torch.tensor(3 + axis.rank), axis) == 2 * N / sum(3 + k for k in range(N))
    count = torch.tensor(2**50 + axis.rank)  # more than float32 holds
    assert L.quotient_of_sums(torch.tensor(1.0), count, axis) == N / sum(2**50 + k for k in range(N))
    low = L.quotient_of_sums(torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(3), axis)
    assert low.dtype == torch.bfloat16 and low == torch.tensor(float(N), dtype=torch.bfloat16) / torch.tensor(3 * N)


def _batch_norm() -> None:
    axis = Mesh({"dp": N}).dp
    for shape in ((8, 3), (8, 3, 5), (8, 3, 4, 5)):
        whole, weight, bias = (t.requires_grad_() for t in (_random(*shape) * 3 + 1, _random(3, seed=1), _random(3, seed=2)))
        part, w, b = _part(whole, axis, 0), weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
        statistics = [(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)) for _ in range(2)]
        ours = L.sync_batch_norm(part, w, b, *statistics[0], axis, 0.1, 1e-5)
        theirs = F.batch_norm(whole, *statistics[1], weight, bias, True, 0.1, 1e-5)
        assert torch.allclose(ours, theirs.chunk(N)[axis.rank], rtol=1e-11, atol=1e-13)
        for mine, other in zip(*statistics, strict=True):
            assert torch.allclose(mine, other, rtol=1e-12)
        upstream = _random(*shape, seed=3)
        (ours * upstream.chunk(N)[axis.rank]).sum().backward()
        (theirs * upstream).sum().backward()
        assert part.grad is not None and whole.grad is not None and w.grad is not None and b.grad is not None
        assert torch.allclose(part.grad, whole.grad.chunk(N)[axis.rank], rtol=1e-10, atol=1e-12)
        assert torch.allclose(C.all_reduce(w.grad, axis), weight.grad, rtol=1e-11)
        assert torch.allclose(C.all_reduce(b.grad, axis), bias.grad, rtol=1e-11)
    for near in (None, torch.zeros(3), torch.full((3,), 99.0), torch.full((3,), math.nan)):  # far from 0, beside how it is spread
        far = (_random(8, 3, 5) * 0.01 + 100).float()
        running = (near, None if near is None else torch.ones(3))
        given = L.sync_batch_norm(far.chunk(N)[axis.rank], None, None, *running, axis, 0.1, 1e-9)
        exact = F.batch_norm(far.double(), None, None, training=True, eps=1e-9).chunk(N)[axis.rank]
        assert (given - exact).abs().max() < 2e-3, near
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)  # of one layer that is called in both ways
    first = F.batch_norm(whole, mean, variance, training=True)
    second = L.sync_batch_norm(part, None, None, mean, variance, axis, 0.1, 1e-5)
    torch.autograd.backward([first.sum(), second.sum()])
    bare = L.sync_batch_norm(part.detach(), None, None, None, None, axis, 0.1, 1e-5)
    assert torch.allclose(bare, F.batch_norm(whole.detach(), None, None, training=True).chunk(N)[axis.rank])
    low = L.sync_batch_norm(part.detach().bfloat16(), w.float(), b.float(), None, None, axis, 0.1, 1e-5)
    assert low.dtype == torch.bfloat16


def _second_gradients() -> None:
    """Of what is computed inside of `with_graphs`: of a loss and a penalty on its gradients, those of the operators themselves."""
    axis = Mesh({"tp": N}).tp
    labels = torch.randint(24, (9,), generator=torch.Generator().manual_seed(0))
    labels[2] = -100
    logits, x = _random(9, 24).mul(3).requires_grad_(), (_random(8, 3, 5) * 3 + 1).requires_grad_()
    a, b, w = _random(N).requires_grad_(), _random(N, seed=1).abs().add(1).requires_grad_(), _random(3, seed=2).requires_grad_()
    up = _random(8, 3, 5, seed=3)

    def penalised(loss: Tensor, leaves: list[Tensor], over: list[bool]) -> list[Tensor]:
        slopes = torch.autograd.grad(loss, leaves, create_graph=True)
        sums = [g.pow(3).sum() for g in slopes]
        total = loss + sum(C.all_reduce(s, axis) if split else s for s, split in zip(sums, over, strict=True))
        return list(torch.autograd.grad(total, leaves))

    own = [_part(logits, axis, 1), a.detach()[axis.rank].clone().requires_grad_(), b.detach()[axis.rank].clone().requires_grad_()]
    rows, weight = _part(x, axis, 0), w.detach().clone().requires_grad_()
    with with_graphs():
        normed = L.sync_batch_norm(rows, C.copy_to(weight, axis), None, None, None, axis, 0.1, 1e-5)
        found = [
            *penalised(L.cross_entropy_sum_vocab(own[0], labels, axis), own[:1], [True]),
            *penalised(L.quotient_of_sums(own[1], own[2], axis), own[1:], [True, True]),
            *penalised(C.all_reduce((normed * up.chunk(N)[axis.rank]).pow(2).sum(), axis), [rows, weight], [True, False]),
        ]
    exact = F.batch_norm(x, None, None, w, training=True)
    expected = [
        *penalised(F.cross_entropy(logits, labels, reduction="sum"), [logits], [False]),
        *penalised(a.sum() / b.sum(), [a, b], [False, False]),
        *penalised((exact * up).pow(2).sum(), [x, w], [False, False]),
    ]
    parts = [_part(expected[0], axis, 1), *(t[axis.rank] for t in expected[1:3]), _part(expected[3], axis, 0), expected[4]]
    for mine, other in zip(found, parts, strict=True):
        assert torch.allclose(mine, other, rtol=1e-9, atol=1e-11)


def _dropout() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    torch.manual_seed(0)
    ones = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)

    def masks(y: Tensor) -> list[Tensor]:
        return list(C.gather((y != 0).unsqueeze(0), mesh.joint(("dp", "tp")), 0))

    same = masks(L.dropout(ones, None, 0.25))
    assert all(torch.equal(m, same[0]) for m in same)
    over_dp = masks(L.dropout(ones, mesh.dp, 0.25))
    assert torch.equal(over_dp[0], over_dp[1]) and torch.equal(over_dp[2], over_dp[3]) and not torch.equal(over_dp[0], over_dp[2])
    both = masks(L.dropout(ones, (mesh.dp, mesh.tp), 0.25))
    assert len({tuple(m.flatten().tolist()) for m in both}) == 4
    y = L.dropout(ones, mesh.tp, 0.25)
    assert set(y.detach().unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(y.detach().mean().item() - 1) < 0.05
    again = recompute(lambda x: L.dropout(x * 1.0, mesh.dp, 0.5).square(), ones)
    again.sum().backward()
    assert ones.grad is not None
    assert torch.equal(ones.grad != 0, again != 0)
    assert not L.dropout(ones, None, 1.0).any() and torch.equal(L.dropout(ones, None, 0.0), ones)


CHECKS = [_embedding, _cross_entropy, _quotient, _batch_norm, _second_gradients, _dropout]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_local_code_equals_the_operator(workers: WorkerPool, check: object) -> None:
    workers.run(check, timeout_s=60)  # type: ignore[arg-type]


def test_dropout_on_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.ones(3, 4, requires_grad=True)
        y = L.dropout(x, Mesh({}).tp, 0.5)
        y.sum().backward()
        assert y.shape == (3, 4) and x.grad is not None


def test_wrong_shapes_are_refused() -> None:
    axis = Mesh({}).tp
    with pytest.raises(ValueError, match=r"logits must be \[N, classes\]"):
        L.cross_entropy_sum_vocab(torch.ones(2, 3, 4), torch.ones(2, 4), axis)
    with pytest.raises(ValueError, match="more than one value per channel"):
        L.sync_batch_norm(torch.ones(1, 3), None, None, None, None, axis, 0.1, 1e-5)
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        L.dropout(torch.ones(3), None, 1.5)
