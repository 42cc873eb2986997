"""Parameters that no gradient has reached in a step, since regions gave none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from autopar.run import comm
from autopar.run.manifest import ParamSpec
from autopar.run.mesh import Axis
from autopar.run.region import Region

__all__ = ["without_unreached"]


def without_unreached(
    found: dict[str, Tensor], params: Sequence[ParamSpec], reached_in: Sequence[tuple[Region, set[str]]], names: Mapping[str, str],
    axes: Sequence[Axis], device: torch.device,
) -> dict[str, Tensor]:  # fmt: skip
    """Collective over the axes, which are all of the mesh: the gradients of a step without those of parameters to which gradients come past
    regions alone, where these gave none on any rank. They have none in the original model, and an optimizer leaves them as they are.
    params: of all stages. reached_in: each region of the model, and what it has noted in this step. names: any name -> the parameter's."""
    optional = {spec.name for spec in params if spec.regions_only}
    if not optional:
        return found
    regions = [region for region, _ in reached_in]
    noted = {note for _, reached in reached_in for note in reached}
    every = [note for region in regions for note in region.notes]
    flags = torch.tensor([float(note in noted) for note in every], device=device)
    for axis in axes:
        comm.all_reduce_(flags, axis, torch.distributed.ReduceOp.MAX)
    somewhere = {note for note, flag in zip(every, flags.tolist(), strict=True) if flag}
    unreached = optional - {names.get(name, name) for name in _reached(regions, somewhere)}
    return {name: grad for name, grad in found.items() if name not in unreached}


def _reached(regions: Sequence[Region], noted: Collection[str]) -> set[str]:
    """The parameters to which a gradient of the loss has come through regions. A region whose results none has come to is given zeros, and
    what it notes of those is nothing."""
    live, left = set[str](), [region.handle for region in regions if region.direct]
    by_handle = {region.handle: region for region in regions}
    found = set[str]()
    while left:
        handle = left.pop()
        if handle in live:
            continue
        live.add(handle)
        for note, (parameters, before) in by_handle[handle].notes.items():
            if note in noted:
                found.update(parameters)
                left += before
    return found
