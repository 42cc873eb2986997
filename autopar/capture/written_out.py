"""Functions of torch that look at values before they compute, or whose operators do not show that samples are apart: written out as the
operators that they consist of, or as one of our own. NotImplemented: torch's own is called."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.capture.strided import as_strided
from autopar.run.bags import embedding_bag
from autopar.run.ctc import ctc_loss

__all__ = ["WRITTEN_OUT"]


def _istft(
    input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
    center: bool = True, normalized: bool = False, onesided: bool | None = None, length: int | None = None, return_complex: bool = False,
) -> Tensor:  # fmt: skip
    """torch.istft of [N?, n_fft // 2 + 1, frames] or [N?, n_fft, frames] -> [N?, samples]: frames, windowed again, are added up, and
    divided by what the squared windows add up to. torch refuses windows that add up to zero somewhere; here samples are not finite then."""
    batched = input if input.dim() == 3 else input.unsqueeze(0)
    spectra = batched.transpose(1, 2)
    hop, width, norm = hop_length or n_fft // 4, win_length or n_fft, "ortho" if normalized else "backward"
    one_side = onesided if onesided is not None else batched.size(1) != n_fft
    if return_complex:
        frames = torch.fft.ifft(spectra, norm=norm)
    else:
        frames = torch.fft.irfft(spectra if one_side else spectra[..., : n_fft // 2 + 1], n=n_fft, norm=norm)
    own = torch.ones(width, dtype=frames.real.dtype, device=frames.device) if window is None else window.to(frames.dtype)
    own = F.pad(own, ((n_fft - width) // 2, n_fft - width - (n_fft - width) // 2))
    total = n_fft + hop * (frames.size(1) - 1)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else total - start
    squares = own.real.square().expand(1, frames.size(1), n_fft)
    samples = _added(frames * own, total, hop)[:, start:end] / _added(squares, total, hop)[:, start:end]
    samples = F.pad(samples, (0, max(0, end - total)))
    return samples if input.dim() == 3 else samples.squeeze(0)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:  # fmt: skip
    """F.gaussian_nll_loss, as it is defined there: variances are at least eps, and have their gradients where they are not."""
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if torch.any(var < 0):
        raise ValueError("var has negative entry/entries")
    if var.size() != input.size():
        var = var.unsqueeze(-1) if input.size()[:-1] == var.size() else var
        if var.dim() != input.dim() or sum(n for n, m in zip(var.size(), input.size(), strict=True) if n != m) != 1:
            raise ValueError("var is of incorrect size")
    var = var - var.detach() + var.detach().clamp(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _masked_select(input: Tensor, mask: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch.masked_select -> [count]. As an index, of which two selections by one mask are known to be of one length."""
    if out is not None:
        return NotImplemented
    if input.shape != mask.shape:
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        input, mask = input.expand(shape), mask.expand(shape)
    return input[mask]


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """torch.bincount of [N] -> [minlength]. torch counts on where a number is larger; here that is refused, so that the size is fixed.
    Without minlength it is torch's own, whose size depends on values."""
    if minlength < 1 or input.dim() != 1 or (weights is not None and weights.shape != input.shape):
        return NotImplemented
    if torch.any(input >= minlength):
        raise ValueError("torch.bincount is given a number that is not below minlength: give it a larger minlength")
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.to(torch.float64)
    return torch.zeros(minlength, dtype=weights.dtype, device=input.device).scatter_add(0, input.to(torch.int64), weights.detach())


def _cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """torch.cov of [variables, observations] or [observations] -> [variables, variables] or a number. With weights it is torch's own."""
    if fweights is not None or aweights is not None or input.dim() > 2 or input.dtype == torch.bool:
        return NotImplemented
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    if not rows.is_floating_point() and not rows.is_complex():
        rows = rows.to(torch.get_default_dtype())
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.t().conj() / max(0, rows.size(1) - correction)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    """torch.corrcoef of [variables, observations] or [observations] -> [variables, variables] or a number."""
    found = _cov(input)
    if found is NotImplemented:
        return found
    if found.dim() == 0:
        return found / found
    deviations = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviations.unsqueeze(1) / deviations.unsqueeze(0)
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """torch.combinations of [N] -> [count, r]: how many there are, and of which places, follows from N."""
    if input.dim() != 1 or r < 1:
        return NotImplemented
    chosen = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(chosen(range(input.size(0)), r)), dtype=torch.int64, device=input.device).reshape(-1, r)
    return input[places]


def _set_item(x: Tensor, index: Any, value: Any) -> None:
    """x[index] = number where a tensor picks: torch makes a tensor of the number, on the CPU as a constant, elsewhere by an operator, which
    it is here wherever x lies, so that a program is the same."""
    picks = any(isinstance(i, Tensor) for i in (index if isinstance(index, tuple) else (index,)))
    if not picks or type(value) not in (bool, int, float):
        return NotImplemented
    x[index] = torch.scalar_tensor(value, dtype=x.dtype, device=x.device)
    return None


def _added(frames: Tensor, total: int, hop: int) -> Tensor:
    """Frames [N, count, n], each `hop` samples behind the one before, added up: [N, total]."""
    if frames.is_complex():
        return torch.complex(_added(frames.real, total, hop), _added(frames.imag, total, hop))
    return F.fold(frames.transpose(1, 2), (1, total), (1, frames.size(2)), stride=(1, hop)).flatten(1)


WRITTEN_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.istft: _istft, torch.Tensor.istft: _istft, F.ctc_loss: ctc_loss, F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.masked_select: _masked_select, torch.Tensor.masked_select: _masked_select, torch.bincount: _bincount,
    torch.Tensor.bincount: _bincount, torch.cov: _cov, torch.Tensor.cov: _cov, torch.corrcoef: _corrcoef, torch.Tensor.corrcoef: _corrcoef,
    torch.combinations: _combinations, torch.as_strided: as_strided, torch.Tensor.as_strided: as_strided, F.embedding_bag: embedding_bag,
    torch.Tensor.__setitem__: _set_item,
}  # fmt: skip
