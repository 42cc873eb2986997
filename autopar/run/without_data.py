"""Models that are on the meta device, on all ranks or on all but rank 0: parameters get memory without becoming other objects, and what has
no values yet is told from what has.

What swaps the memory of a tensor is private; there is no other way for a parameter that an optimizer, or a weak reference of torch's
tracer, holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autopar.run.dtypes import dtype_named
from autopar.run.manifest import BufferSpec, ParamSpec
from autopar.run.mesh import Mesh
from autopar.run.together import decided_by_rank_0, told_by_all

__all__ = ["give_memory", "is_unwritten", "lacks_data", "nothing_yet", "take_buffers_of_rank_0", "without_values"]


def lacks_data(model: nn.Module) -> bool:
    """Whether some parameter of the model is on the meta device."""
    return any(p.is_meta for p in model.parameters())


def take_buffers_of_rank_0(model: nn.Module) -> bool:
    """Collective: the values of the buffers that are on the meta device on this rank, where rank 0 has any: code may ask for them when the
    model is captured. Whether rank 0 has data of parameters that another rank does not have."""
    held = dict(model.named_buffers(remove_duplicate=False))
    told = told_by_all(([name for name, b in held.items() if b.is_meta], lacks_data(model)))
    missing = dict.fromkeys(name for names, _ in told for name in names)
    found: dict[str, Tensor] = {}
    if missing:
        found = decided_by_rank_0(lambda: {n: held[n].detach().cpu() for n in missing if n in held and not held[n].is_meta})
    given: dict[int, Tensor] = {}  # by the id of the buffer for which it stands: one tensor may have several names
    for name, buffer in held.items():
        if buffer.is_meta and name in found:
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._buffers[key] = given.setdefault(id(buffer), found[name])
    return not told[0][1] and any(bare for _, bare in told)


def give_memory(param: nn.Parameter, like: Tensor) -> None:
    """Let a parameter that is on the meta device, the same object, be an empty one of the dtype and device of another tensor."""
    made = nn.Parameter(like.new_empty(0), requires_grad=param.requires_grad)
    torch._C._swap_tensor_impl(param, made)


def without_values(specs: Sequence[ParamSpec | BufferSpec], tensors: Mapping[str, Tensor], mesh: Mesh) -> frozenset[str]:
    """Collective: the names of the tensors that have no values on rank 0. ValueError for one that nothing could be written to."""
    mine = [spec.name for spec in specs if spec.name in tensors and tensors[spec.name].is_meta] if mesh.rank == 0 else []
    found = frozenset(mesh.agree(mine))
    for spec in specs:
        if spec.name in found and isinstance(spec, BufferSpec) and spec.constant:
            raise ValueError(
                f"the forward computes with a tensor {list(spec.shape)} that is neither a parameter nor a buffer, and is on the meta "
                f"device, without values\n  what to do: register it as a buffer, or build the model with data"
            )
    return found


def nothing_yet(spec: ParamSpec | BufferSpec, device: torch.device) -> Tensor:
    """A whole tensor of which nothing is known, in the memory of one number: NaN, where its dtype has that."""
    dtype = dtype_named(spec.dtype)
    number = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((1,) * len(spec.shape), number, dtype=dtype, device=device).expand(spec.shape)


def is_unwritten(here: Tensor, version: int) -> bool:
    """Whether a part that was made of `nothing_yet` is as it was. version: its count of changes then."""
    if not here.numel():
        return False
    if here.is_floating_point() or here.is_complex():
        return bool(here.flatten()[0].isnan())
    return here._version == version
