"""Autograd functions around kernels of their author's, as fused layers for GPUs are written: they read and write memory by its address,
where neither a graph nor autograd sees it. The kernels here are numpy's."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, Compile, Net, Results, batch, batches, program, seeded, sgd, state, trained

KIND = "kernels"
BACKENDS: dict[str, Any] = {}  # of a rotation, by name; filled by a module when it is imported


def _memory(t: Tensor) -> Any:
    """The array behind a contiguous tensor, which a kernel writes to."""
    assert t.is_contiguous()
    return t.detach().numpy()


class _Norm(torch.autograd.Function):
    """x / rms(x) * weight. The gradient that it gives is written over the one that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        y, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        _memory(scale)[:] = 1 / np.sqrt((_memory(x) ** 2).mean(-1, keepdims=True) + 1e-6)
        _memory(y)[:] = _memory(x) * _memory(scale) * _memory(weight)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].contiguous()
        normed, g = _memory(x) * _memory(scale), _memory(grad)
        of_weight = torch.from_numpy((g * normed).reshape(-1, x.shape[-1]).sum(0)).to(x.dtype)
        g *= _memory(weight)
        g[:] = _memory(scale) * (g - normed * (g * normed).mean(-1, keepdims=True))
        return grad, of_weight


class _Rotated(torch.autograd.Function):
    """Turns pairs of numbers, in the memory of what it is given."""

    @staticmethod
    def turned(x: Tensor, angle: float) -> Tensor:
        a, b = np.split(_memory(x), 2, axis=-1)
        a[:], b[:] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return x

    @staticmethod
    def forward(ctx: Any, x: Tensor, angle: float) -> Tensor:
        ctx.angle = angle
        return _Rotated.turned(x, angle).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Rotated.turned(grads[0].contiguous(), -ctx.angle), None


class _Gated(torch.autograd.Function):
    """silu(a) * b. Backward writes its gradients over a and b, which it has kept."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return torch.from_numpy(_memory(a) * (0.5 + 0.5 * np.tanh(0.5 * _memory(a))) * _memory(b)).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        g, x, y = _memory(grads[0].contiguous()), _memory(a), _memory(b)
        share = 0.5 + 0.5 * np.tanh(0.5 * x)
        silu = x * share
        x[:], y[:] = g * y * (silu * (1 - share) + share), g * silu
        return a, b


class _Loss(torch.autograd.Function):
    """The mean cross entropy of a linear layer, over labels that are not to be ignored. Its gradients are made in forward, and multiplied
    in backward where they lie."""

    @staticmethod
    @np.errstate(all="ignore")
    def forward(ctx: Any, h: Tensor, weight: Tensor, y: Tensor, ignored: int) -> Tensor:
        x, w, kept = _memory(h.contiguous()), _memory(weight), _memory(y) != ignored
        logits = x @ w.T
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares *= kept[:, None] / shares.sum(-1, keepdims=True) / np.float64(kept.sum())
        at = np.flatnonzero(kept), _memory(y)[kept]
        loss = (np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1))[kept] - logits[at]  # of each label
        shares[at] -= 1 / np.float64(kept.sum())
        ctx.save_for_backward(*(torch.from_numpy(g).to(h.dtype) for g in (shares @ w, shares.T @ x)))
        return h.new_tensor(loss.sum() / np.float64(kept.sum()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_h, of_weight = ctx.saved_tensors
        for g in (of_h, of_weight):
            _memory(g)[:] *= float(grads[0])
        return of_h, of_weight, None, None


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.turned, self.gate, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        x: Tensor = _Norm.apply(h, self.weight)
        x = _Rotated.apply(self.turned(x), 0.3)
        return h + self.down(_Gated.apply(self.gate(x), self.up(x)))


class _Fused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Layer(), _Layer())


class _FusedLoss(_Fused):
    """The last layer and the loss are one function, called in the model's own forward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = _Loss.apply(self.hidden(x), self.head.weight, y, -100)
        return loss


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def fused_layers(compile: Compile) -> Results:
    """A norm that writes to gradients, a rotation in place, a gate that writes to what it has kept."""
    return trained(compile(seeded(_Fused), example_inputs=batch()))


@program(KIND, plans=("dp2mb2",))
def fused_last_layer_and_loss(compile: Compile) -> Results:
    """Labels are ignored, more of them in the first half of each batch, and in one batch all of that half. Gradients are added over two
    batches, each loss divided by two."""
    model = compile(seeded(_FusedLoss), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k in range(4):
        x, y = batch(k)
        y[: 2 * k] = -100
        loss = model(x, y) / 2
        loss.backward()
        losses.append(loss.item())
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "state": state(model)}


class _Dispatching(Net):
    """Its backend is in a module that is imported by the first call."""

    def hidden(self, x: Tensor) -> Tensor:
        import backend_of_rotation  # type: ignore[import-not-found]

        assert backend_of_rotation.__name__ in sys.modules
        h: Tensor = BACKENDS["rotation"](super().hidden(x))
        return h


@program(KIND)
def backend_imported_by_the_first_call(compile: Compile) -> Results:
    """The import enters it in a table, once in a process."""
    BACKENDS.clear()
    sys.modules.pop("backend_of_rotation", None)
    with tempfile.TemporaryDirectory() as folder:
        text = f"from {__name__} import BACKENDS\nBACKENDS['rotation'] = lambda h: h.roll(1, -1) * 0.5\n"
        Path(folder, "backend_of_rotation.py").write_text(text)
        sys.path.insert(0, folder)
        try:
            return trained(compile(seeded(_Dispatching), example_inputs=batch()), inputs=batches())
        finally:
            sys.path.remove(folder)
