"""Global tensors to the parts of the ranks and back: start, checkpoints, and the norm of all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.run import comm
from autopar.run.buckets import Held
from autopar.run.dtypes import dtype_named, empty
from autopar.run.lies import Lies
from autopar.run.manifest import BufferSpec, ParamSpec
from autopar.run.mesh import Mesh
from autopar.run.plain import plainly
from autopar.run.without_data import nothing_yet

__all__ = ["assemble", "clip_grad_norm_", "distribute"]

Spec = ParamSpec | BufferSpec


def distribute(
    specs: Iterable[Spec], tensors: Mapping[str, Tensor], mesh: Mesh, device: torch.device, without: Collection[str] = ()
) -> Iterator[tuple[Spec, Tensor]]:
    """Collective: each global tensor as rank 0 has it, on the device. Only rank 0's `tensors` are read. without: the names of those that
    have no values there.

    Raises ValueError on every rank if one is missing on rank 0 or has another shape or dtype.
    """
    specs = tuple(specs)
    problems = [_problem(spec, tensors) for spec in specs] if mesh.rank == 0 else []
    if problem := mesh.agree("; ".join(filter(None, problems))):
        raise ValueError(f"the tensors do not fit the plan: {problem}")
    for spec in specs:
        if spec.name in without:
            yield spec, nothing_yet(spec, device)
            continue
        if mesh.rank == 0:
            full = tensors[spec.name].detach().to(device).contiguous()
        else:
            full = empty(spec.shape, spec.dtype, device)
        if mesh.world > 1:
            comm.broadcast_(full, 0, mesh.everyone)
        yield spec, full


def _problem(spec: Spec, tensors: Mapping[str, Tensor]) -> str | None:
    found = tensors.get(spec.name)
    if found is None:
        return f"{spec.name} is missing"
    dtype = str(found.dtype).removeprefix("torch.")
    if tuple(found.shape) != spec.shape or dtype != spec.dtype:
        return f"{spec.name} must be {spec.dtype}{list(spec.shape)} and is {dtype}{list(found.shape)}"
    return None


def assemble(
    specs: Iterable[Spec], local: Callable[[str], Tensor], mesh: Mesh, device: torch.device
) -> Iterator[tuple[Spec, Tensor]]:
    """Collective: each global tensor, the same on every rank, from the parts at rest that `local` gives by name (empty ones for what
    other stages hold)."""
    for spec in specs:
        yield spec, Lies(spec, mesh).gather(local(spec.name).to(dtype_named(spec.dtype)).detach())


def clip_grad_norm_(
    held: Iterable[Held], mesh: Mesh, *, max_norm: float, norm_type: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Collective: as torch.nn.utils.clip_grad_norm_ on the unsplit model, with one reduction. Returns the norm before clipping, in
    `dtype`, which must be the same on all ranks (copies of a parameter would drift apart).

    Each element counts once: of a replica the rank with index 0 on the axis, of copies on several stages the first stage's.
    """
    with plainly():
        found = [(one, one.param.grad.detach()) for one in held if one.param.grad is not None]
    grads = [grad for one, grad in found if Lies(one.spec, mesh).counts]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if grads:
        total += torch.nn.utils.get_total_norm(grads, norm_type)
    if mesh.world > 1:
        if math.isinf(norm_type):
            comm.all_reduce_(total, mesh.everyone, dist.ReduceOp.MAX)
        else:
            total = total.pow(norm_type)
            comm.all_reduce_(total, mesh.everyone)
            total = total.pow(1 / norm_type)
    total = total.to(dtype)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
    for _, grad in found:
        grad.mul_(factor.to(grad.dtype))
    return total
