"""`autopar.compile(verify=True)`: the loss of the first batch, from the original model and from the parallel module.

It is a check of one number in the model's own precision; `autopar verify` compares gradients and trained parameters too, in
float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.as_before import left_as_it_was
from autopar.capture.export import objective_of
from autopar.catalog.rule import draws
from autopar.errors import VerificationError
from autopar.ir import Program
from autopar.run import ParallelModule
from autopar.run.inputs import arguments_of
from autopar.run.precision import computing_in, inputs_in

__all__ = ["check_first_loss", "first_loss"]

# Relative, of a loss in this dtype: sums of a few thousand terms in another order (float64: as in autopar verify).
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@contextlib.contextmanager
def _kept(buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """A forward inside leaves the buffers (running statistics) as they were."""
    before = {name: b.detach().clone() for name, b in buffers.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, b in buffers.items():
                b.copy_(before[name])


def first_loss(
    model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None, program: Program, dtype: torch.dtype | None = None
) -> Tensor:
    """The original model's loss (the sum of its outputs if it has none), on this process alone. dtype: as in `capture`. VerificationError
    if it draws random numbers, as dropout does."""
    random = dict.fromkeys(op.target for op in program.ops if draws(op))
    if random:
        raise VerificationError(
            f"verify=True compares one loss with the original's, and {program.name} draws random numbers ({', '.join(random)}), which "
            f"differ. Switch dropout off for the check, or use `autopar verify`, which does"
        )
    devices = [p.device for p in model.parameters()] or [torch.device("cpu")]
    if any(device.type == "meta" for device in devices):
        raise VerificationError("verify=True compares the loss with the original's, which has no data, on the meta device: leave it out")
    given = inputs_in(dtype, arguments_of(inputs))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(devices[0], copy=True), given)
    held = dict(model.named_parameters(remove_duplicate=False))
    frozen = [held[name] for name in program.written_parameters]
    with torch.no_grad(), left_as_it_was(model, loss, frozen), computing_in(dtype, model):
        return objective_of(model(*args, **kwargs), loss, None)[0].detach().cpu()


def check_first_loss(module: ParallelModule, inputs: Any, loss: Callable[[Any], Tensor] | None, expected: Tensor) -> None:
    """Collective. VerificationError on every rank if the parallel module's loss is not rank 0's `expected`."""
    wanted = module.mesh.agree(expected.item())
    with torch.no_grad(), _kept({**dict(module.named_buffers()), **module.written_parameters}):
        args, kwargs = arguments_of(inputs)
        found = objective_of(module(*args, **kwargs), loss, None)[0].item()
    error = abs(found - wanted) / max(abs(wanted), 1e-30)
    tolerance = TOLERANCES[expected.dtype]
    if not error <= tolerance:  # NaN too
        raise VerificationError(
            f"the parallel form of {module.manifest.model} gives the loss {found!r} where the original gives {wanted!r}: a relative error "
            f"of {error:.1e}, more than {tolerance:.0e}. This is a defect of autopar; `autopar verify` shows which tensors differ"
        )
