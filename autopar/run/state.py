"""Global tensors to the parts of the ranks and back: start, checkpoints, and the norm of all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.run import comm
from autopar.run.buckets import Held, layouts_of
from autopar.run.dtypes import empty
from autopar.run.manifest import BufferSpec, ParamSpec
from autopar.run.mesh import Mesh
from autopar.run.slices import joined

__all__ = ["assemble", "clip_grad_norm_", "distribute"]

Spec = ParamSpec | BufferSpec


def distribute(specs: Iterable[Spec], tensors: Mapping[str, Tensor], mesh: Mesh, device: torch.device) -> Iterator[tuple[Spec, Tensor]]:
    """Collective: each global tensor as rank 0 has it, on the device. Only rank 0's `tensors` are read.

    Raises ValueError on every rank if one is missing on rank 0 or has another shape or dtype.
    """
    specs = tuple(specs)
    problems = [_problem(spec, tensors) for spec in specs] if mesh.rank == 0 else []
    if problem := mesh.agree("; ".join(filter(None, problems)), device):
        raise ValueError(f"the tensors do not fit the plan: {problem}")
    for spec in specs:
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


def assemble(specs: Iterable[Spec], local: Callable[[str], Tensor], mesh: Mesh, device: torch.device) -> Iterator[tuple[Spec, Tensor]]:
    """Collective: each global tensor, the same on every rank, from the parts at rest that `local` gives by name."""
    for spec in specs:
        owner = min(spec.stages, default=0)
        if mesh.pp.rank == owner:
            full = local(spec.name).detach()
            if isinstance(spec, ParamSpec) and spec.zero_dim is not None:
                full = joined(comm.all_gather(full, mesh.dp), spec.zero_dim)
            for name, layout in reversed(layouts_of(spec).items()):
                if layout.is_shard:
                    full = joined(comm.all_gather(full, mesh.axis(name)), layout.dim, layout.groups)
            full = full.contiguous()
        else:
            full = empty(spec.shape, spec.dtype, device)
        if mesh.pp.size > 1:
            comm.broadcast_(full, mesh.rank_at(pp=owner), mesh.pp)
        yield spec, full


def clip_grad_norm_(
    held: Iterable[Held], mesh: Mesh, *, max_norm: float, norm_type: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Collective: as torch.nn.utils.clip_grad_norm_ on the unsplit model. Returns the norm before clipping, in `dtype`,
    which must be the same on all ranks (copies of a parameter would drift apart).

    Each element counts once: of a replica the rank with index 0 on the axis, of copies on several stages the first stage's.
    """
    held = [one for one in held if one.param.grad is not None]
    grads = [one.param.grad for one in held if _counts(one, mesh) and one.param.grad is not None]
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
    torch.nn.utils.clip_grads_with_norm_([one.param for one in held], max_norm, total)
    return total


def _counts(one: Held, mesh: Mesh) -> bool:
    layouts = layouts_of(one.spec)
    whole = {"tp": not layouts["tp"].is_shard, "dp": not layouts["dp"].is_shard and one.zero is None}
    return all(mesh.axis(name).rank == 0 for name, replicated in whole.items() if replicated) and (
        mesh.pp.rank == min(one.spec.stages, default=0)
    )
