"""How a training software carries out a plan, where softwares differ: dtypes beside the model's own, reduction, optimizer kernels.

A plan says what is split and where it rests. What a parameter's gradient is accumulated in, whether the optimizer keeps a copy of
its own, and how gradients travel are the software's; figures of a run can be compared only under the run's own recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["AUTOPAR", "HELD_GATHERS", "LAUNCHES", "MIB", "NANOTRON", "WHOLE", "Recipe", "mixed_precision"]

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """gradient_itemsize, state_itemsize: bytes of an accumulated gradient and of each of the optimizer's states (None: as the
    parameter); reduced_itemsize: of a gradient as it is sent (None: as it is accumulated). accumulates: gradients are added into buffers
    of their own, which are there all the time; adds_gradients: those of later micro-batches are added by operators of their own, else where
    they are made; adds_after_pass: when a backward pass is over, each gradient is added into a buffer, by an operator of its own;
    gradient_copies: beside so many copies in the parameter's own dtype. master_itemsize: of the
    optimizer's own copy of a parameter (0: none). optimizer_passes: how often the update's traffic happens (1 fused, 3 for torch's
    foreach kernels). bucket_bytes: gradients are reduced in buckets of this size. gather_bytes: parameters that are gathered once a step
    are so this many bytes at a time (None: as gradients are reduced); unit_bytes: those of a block that are gathered where they are used.
    sums_parts_whole: gradients of parameters of which the optimizer's states alone rest in parts are all-reduced at once when all backward
    passes are over, and each rank uses its part of them; else they are reduce-scattered, in buckets.
    overlaps_reduction: while the last backward pass
    runs, else after it. overlaps_gathers: parameters that are gathered once a step are so while the next forward pass runs,
    else before it. allocator_slack: share of what is allocated that the caching allocator holds besides. local_batches:
    each rank is given its own part of the batch, else all of it. regathers: an activation that a collective gathered is not kept for
    backward but gathered again there (Korthikanti et al. 2022, "Reducing activation recomputation", section 4.2.2). beside_products: kinds
    of collectives inside stages that in backward go on beside a product: what gathers its operand again beside that for the operand's
    gradient, what brings this gradient together beside that for the weight's. held_gathers:
    see memory.held_gathers; 0 where the compute stream waits for a collective before its result is let go. attention_speed:
    of its fused attention, relative to current kernels (0.5: FlashAttention before its second version, Dao 2023, figure 4). fuses:
    pointwise operators and reductions that follow one another are one kernel (a compiler's, or written by hand). channels_last: values
    between convolutions lie as matrix units take them; else each such convolution converts what it reads and writes; those with kernels of
    one pixel, which are products of matrices, only where converts_pixels says so. winograd: convolutions
    on vector units use Winograd's algorithm where there is one, which wants memory for it (compute.WINOGRAD). stops_early: what runs
    again in backward stops where all is made that backward needs (torch.utils.checkpoint without reentry), else at its end.

    images_as_timed: pools and depthwise convolutions of images whose channels lie apart take what those of torch 2.11 were timed to take.
    launches: how many times as long its host takes to launch an operator as a GPU's launch_s says, which is of plain modules.
    host_as_timed: changes of layout and parameters in parts keep the host as long as autopar's were timed to (measure.launches); else a
    collective one launch, and parameters nothing.

    What a software's own work adds to a link's times, 0 for the link alone: between_nodes_s: to each collective between nodes;
    contended_step_s: to each step in a node of a collective
    inside stages, while the stages of a pipeline exchange values between nodes; contended_hop_s: to its steps between nodes.
    once_s: what the host does once a step while the device waits (the norm of gradients that is read back, logs, the next batch)."""

    gradient_itemsize: int | None = None
    state_itemsize: int | None = None
    reduced_itemsize: int | None = None
    accumulates: bool = False
    adds_gradients: bool = False
    adds_after_pass: bool = False
    gradient_copies: int = 0
    master_itemsize: int = 0
    optimizer_passes: float = 3.0
    bucket_bytes: int = 25 * MIB
    gather_bytes: int | None = None
    sums_parts_whole: bool = False
    unit_bytes: int = 256 * MIB
    overlaps_reduction: bool = True
    overlaps_gathers: bool = True
    allocator_slack: float = 0.04
    local_batches: bool = False
    regathers: bool = False
    beside_products: tuple[str, ...] = ()
    held_gathers: float = 0.0
    attention_speed: float = 1.0
    fuses: bool = False
    channels_last: bool = False
    converts_pixels: bool = True
    winograd: bool = True
    images_as_timed: bool = False
    stops_early: bool = False
    launches: float = 1.0
    host_as_timed: bool = False
    between_nodes_s: float = 0.0
    contended_step_s: float = 0.0
    contended_hop_s: float = 0.0
    once_s: float = 0.0

    @property
    def of_operators(self) -> tuple[object, ...]:
        """What the times of a rank's operators and of the collectives between them depend on."""
        return (
            self.regathers, self.beside_products, self.fuses, self.channels_last, self.converts_pixels, self.winograd, self.attention_speed,
            self.images_as_timed, self.stops_early, self.launches, self.host_as_timed, self.between_nodes_s, self.contended_step_s,
            self.contended_hop_s,
        )  # fmt: skip

    @property
    def gathered_bytes(self) -> int:
        """Of the parameters that are gathered once a step, so many at a time."""
        return self.bucket_bytes if self.gather_bytes is None else self.gather_bytes

    def __post_init__(self) -> None:
        if min(self.allocator_slack, self.master_itemsize, self.gradient_copies, self.held_gathers) < 0:
            raise ValueError(f"a recipe of negative or empty sizes: {self}")
        if min(self.between_nodes_s, self.contended_step_s, self.contended_hop_s, self.once_s) < 0:
            raise ValueError(f"a recipe whose software makes hardware faster than it is: {self}")
        if self.launches < 0:
            raise ValueError(f"a recipe of negative launches: {self}")
        if unknown := set(self.beside_products) - {"all_gather", "all_reduce", "reduce_scatter"}:
            raise ValueError(f"a recipe with collectives beside products that are of no linear layer's backward pass: {sorted(unknown)}")
        if min(self.bucket_bytes, self.gathered_bytes, self.unit_bytes) < 1 or self.optimizer_passes <= 0 or self.attention_speed <= 0:
            raise ValueError(f"a recipe of negative or empty sizes: {self}")


LAUNCHES = 2.1
"""Of frameworks of modules with hooks, wrappers and casts of their own, over plain modules on the host of one H100: fitted to training runs
on V100, A100 and H100, whose hosts are others."""

AUTOPAR = Recipe(stops_early=True, adds_gradients=True, converts_pixels=False, images_as_timed=True, launches=1.1, host_as_timed=True)
"""autopar's own runtime: gradients and states as the parameters, buckets of 25 MiB (torch DDP's default) reduced in backward, torch's
foreach optimizers. With cuDNN 9, which torch 2.11 has, convolutions with kernels of one pixel convert nothing on an H100
(benchmarks/data/kernels_h100.csv); training runs of 2020 and 2021 take as long as if they did. The allocator's slack is that of an earlier
fit to nanotron's runs on H100, which have one of their own now. launches: of plans that one H100 ran in many micro-batches, which its host
governed (benchmarks/data/one_gpu.jsonl)."""

HELD_GATHERS = 0.83
"""Of nanotron's gathers, where the host runs ahead of the device: fitted, beside its allocator's slack, to the memory of 760 runs."""

WHOLE = 2**50
"""A bucket, or a unit of parameters that are gathered where they are used, that holds everything."""

# nanotron adds each parameter's gradient to a float32 buffer after each micro-batch's backward pass, one by one (backward and
# _accumulate_grad of FP32GradientAccumulator in src/nanotron/optim/gradient_accumulator.py). With ZeRO-1 it all-reduces all gradients at
# once when backward is over (training_step and init_model in src/nanotron/trainer.py, sync_gradients_across_dp in
# src/nanotron/optim/gradient_accumulator.py), and gathers the parameters by one collective when the optimizer is done (_all_gather_params
# in src/nanotron/optim/zero.py, all_gather_coalesced in src/nanotron/distributed.py). Its linear layers that are split by columns gather
# what they read again beside the product for its gradient, and reduce-scatter this beside that for the weight
# (_ColumnLinearAsyncCommunication in src/nanotron/parallel/tensor_parallel/functional.py, with tp_linear_async_communication). The last
# five are fitted to its sweep on 1-32 nodes of H100: what its allocator holds, what its collectives take beyond nccl-tests on the same
# links, and what it does once a step
NANOTRON = Recipe(
    adds_after_pass=True, optimizer_passes=1.0, gather_bytes=WHOLE, sums_parts_whole=True, local_batches=True, regathers=True,
    beside_products=("all_gather", "reduce_scatter"), held_gathers=HELD_GATHERS, overlaps_gathers=False, allocator_slack=0.083,
    launches=LAUNCHES,
    between_nodes_s=3.8e-4, contended_step_s=2.5e-4, contended_hop_s=2.8e-4, once_s=2.9e-2,
)  # fmt: skip


def mixed_precision(itemsize: int, base: Recipe = Recipe(), **further: Any) -> Recipe:  # noqa: B008  (it is immutable)
    """A recipe for parameters of so many bytes each: of less than four, gradients are summed in float32, and the optimizer has float32
    states and a float32 copy; of four or more they are the parameters' own."""
    half = itemsize < 4
    kept = {"accumulates": further.get("accumulates", False) and half, "gradient_copies": further.get("gradient_copies", 0) if half else 0}
    found = replace(base, **{**further, **kept})
    return replace(found, gradient_itemsize=4, state_itemsize=4, master_itemsize=4) if half else found
