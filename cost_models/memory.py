"""Peak memory of one rank of one stage, term by term: one arithmetic for solver, checker and explain.

The peak of a training step is taken at the end of the last forward in flight: everything at rest, the activations saved by all
micro-batches in flight, the largest temporary beside them, and the communication buffers.

What rests in parts is a row of `rests`. Parts are padded to equal size, hence the ceilings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from cost_models.rests import WHOLE, Rest

__all__ = ["OPTIMIZERS", "MemoryTerms", "held_gathers", "stage_memory"]

OPTIMIZERS: dict[str, int] = {"none": 0, "sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}
"""Optimizer -> numbers that it keeps per trainable parameter (torch.optim; amsgrad off)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerms:
    """Bytes of one rank at the peak of a step, each term by itself.

    parameters: with buffers. optimizer_states: with the master copy. batch: the inputs as a rank is given them, and what is made of them
    once a step. communication_buffers: gradient buckets, gathered parameters where they are used. allocator_slack: what the caching
    allocator reserves beyond what is asked for.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    saved_activations: int
    batch: int
    largest_temporary: int
    communication_buffers: int
    framework_context: int
    allocator_slack: int

    @property
    def total_bytes(self) -> int:
        """What the device must have."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def allocated_bytes(self) -> int:
        """What the program itself allocates: the total without framework context and allocator slack."""
        return self.total_bytes - self.framework_context - self.allocator_slack


def stage_memory(
    *,
    param_bytes: float,
    trainable_params: float,
    grad_itemsize: int = 4,
    optimizer: str = "adamw",
    state_itemsize: int = 4,
    master_itemsize: int = 0,
    gradient_bytes: float | None = None,
    optimizer_state_bytes: float | None = None,
    rest: Rest = WHOLE,
    shards: int = 1,
    offload_optimizer: bool = False,
    buffer_bytes: float = 0.0,
    batch_bytes: float = 0.0,
    activation_bytes_per_micro_batch: float,
    micro_batches_in_flight: int = 1,
    boundary_bytes_per_micro_batch: float = 0.0,
    largest_temporary_bytes: float = 0.0,
    bucket_bytes: float = 0.0,
    gathered_param_bytes: float = 0.0,
    framework_context_bytes: float = 0.0,
    allocator_slack_fraction: float = 0.0,
    held_bytes: float = 0.0,
) -> MemoryTerms:
    """Memory of one rank of one stage; every argument is what this rank would hold if nothing were in parts, after tensor-parallel
    splitting.

    param_bytes: all its parameters, trainable or not, in their own dtypes. trainable_params: how many numbers have gradients.
    grad_itemsize: bytes of a gradient. state_itemsize: of each optimizer state. master_itemsize: of the optimizer's own copy of
    each parameter, 0 without one. gradient_bytes, optimizer_state_bytes: these two terms as they are on this rank, where not every
    parameter is sharded alike, so that no division describes them; they then stand for what they replace. rest: what is in
    parts, of which there are `shards`. offload_optimizer: states and master copy in host memory.
    buffer_bytes: the module's buffers, whole on each rank. batch_bytes: what of the batch is there all the time.
    activation_bytes_per_micro_batch: what autograd saves, recomputation already applied; micro_batches_in_flight:
    pipeline.in_flight. boundary_bytes_per_micro_batch: received and sent stage values that are held beside what autograd saves.
    bucket_bytes: gradient buckets under reduction. gathered_param_bytes: parameters that are gathered at the peak (with prefetch,
    two blocks). allocator_slack_fraction: of everything allocated. held_bytes: what the allocator holds besides (see
    held_gathers).
    Raises ValueError on an unknown optimizer and on negative numbers.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    if shards < 1 or micro_batches_in_flight < 0:
        raise ValueError(f"shards must be positive and micro_batches_in_flight not negative, found {shards} and {micro_batches_in_flight}")
    sizes = ("_bytes", "_itemsize", "_params", "_batch", "_fraction")
    numbers = {name: value for name, value in locals().items() if name.endswith(sizes) and value is not None}
    if negative := {name: value for name, value in numbers.items() if value < 0}:
        raise ValueError(f"sizes must not be negative, found {negative}")

    def at_rest(whole_bytes: float, in_parts: bool) -> int:
        return math.ceil(whole_bytes / shards if in_parts else whole_bytes)

    states_bytes = trainable_params * (OPTIMIZERS[optimizer] * state_itemsize + (master_itemsize if optimizer != "none" else 0))
    parameters = at_rest(param_bytes, rest.parameters) + math.ceil(buffer_bytes)
    gradients = at_rest(trainable_params * grad_itemsize, rest.gradients) if gradient_bytes is None else math.ceil(gradient_bytes)
    optimizer_states = at_rest(states_bytes, rest.states) if optimizer_state_bytes is None else math.ceil(optimizer_state_bytes)
    optimizer_states = 0 if offload_optimizer else optimizer_states
    saved = math.ceil(micro_batches_in_flight * (activation_bytes_per_micro_batch + boundary_bytes_per_micro_batch))
    temporary = math.ceil(largest_temporary_bytes)
    communication = math.ceil(bucket_bytes + gathered_param_bytes)
    batch = math.ceil(batch_bytes)
    allocated = parameters + gradients + optimizer_states + saved + batch + temporary + communication
    return MemoryTerms(
        parameters=parameters,
        gradients=gradients,
        optimizer_states=optimizer_states,
        saved_activations=saved,
        batch=batch,
        largest_temporary=temporary,
        communication_buffers=communication,
        framework_context=math.ceil(framework_context_bytes),
        allocator_slack=math.ceil(allocated * allocator_slack_fraction + held_bytes),
    )


def held_gathers(share: float, gathered_bytes: float, in_flight: int, micro_batches: int, ahead: bool = True) -> float:
    """Bytes that a caching allocator holds of activations gathered by asynchronous collectives, after the program let go of them.

    A block that another stream has used is given out again only once that stream is known to be done with it
    (torch.Tensor.record_stream), so that the host, which runs ahead, is given new blocks meanwhile. gathered_bytes: of one micro-batch's
    forward pass. They are held for a whole pass; where forwards and backwards of a pipeline alternate (more micro-batches than are
    in flight), the holes that they leave add half as much for each further one in flight. share: of all this, fitted. ahead: whether the
    host issues the passes of a micro-batch faster than the device runs them. If not, each block is free again when the next one is asked
    for, and nothing is held.
    """
    return share * gathered_bytes * (1 + (in_flight - 1) / 2 if micro_batches > in_flight else 1) if ahead else 0.0
