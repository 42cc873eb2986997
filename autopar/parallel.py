"""`autopar.compile`: a module that trains a model on several processes, or stands for it until they are there."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.export import each_output
from autopar.compiler import Compiled, build, emit
from autopar.errors import PlanError
from autopar.first_step import check_first_loss, first_loss
from autopar.planner import Pins, Plan
from autopar.planner.resources import choose_cluster
from autopar.planner.wishes import as_pins, check_name
from autopar.planning import Inputs, wishes
from autopar.render import check_backend, load
from autopar.run import ParallelModule
from autopar.run.deferred import DeferredModule, world_size
from autopar.run.grad_mode import as_if_trained
from autopar.run.launch import default_device, join_process_group
from autopar.run.precision import compute_dtype
from autopar.run.stand_in import StandIn
from autopar.run.together import done_by_all
from autopar.run.tree import whole_again
from autopar.run.unwatched import unwatched
from autopar.run.without_data import take_buffers_of_rank_0
from autopar.variants import Variants, names_read, tensors_of

__all__ = ["compile"]


def compile(  # noqa: A001  (the field's word)
    model: nn.Module,
    gpus: int | None = None,
    *,
    example_inputs: Inputs | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    cluster: str = "auto",
    memory: int | str | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    reduce_dtype: str | None = None,
    pins: Pins | Mapping[str, Any] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    outputs: str = "loss",
    local_batch: bool = False,
    compile_stages: bool | str = False,
    verify: bool = False,
) -> ParallelModule | DeferredModule:
    """A module that trains `model` on `gpus` processes with the training loop unchanged.

    gpus: by default the size of the process group. Without example_inputs the plan is made on the first call, from its
    batch. plan: a Plan or a plan file instead of a search. verify: compare the loss of the example batch with the original
    model's before anything is trained, else VerificationError.

    outputs: 'loss': a call returns the loss, and computes the rest of what the original returns where it is read. 'all': all that the
    original returns, every tensor whole on every rank (with loss=fn a call returns just the loss in training). 'trained': as 'all', planned
    for gradients that come to outputs beside the loss, as if the model made none: to distil a teacher's logits. With the others the first
    step in which one comes is slow, and later ones are no longer as they were planned. A model that computes no loss returns what the
    original returns in any case, and gradients go through that; so does a call without labels. Under torch.no_grad()
    what cannot run as it was planned is computed by the original with whole parameters on every rank, with a warning (for 'loss' not where
    it gives none).

    local_batch: each data-parallel rank is called with its own part of the batch (`autopar.sampler` loads it); example_inputs are the
    global batch all the same. Without it every rank is called with the global batch. What is not of samples (weights of classes) is given
    to all alike. The loss that a call returns is that of the global batch in any case. What else it returns of samples is of a rank's own
    part then, and a loss that a rank makes of it, too: the mean of all ranks' losses is trained, as under DistributedDataParallel. What
    computes a rank's inputs (an encoder outside) is to bring its gradients together by their mean, as DistributedDataParallel around it
    does.

    The model may be on the meta device on all ranks but rank 0, whose values are given to all, or on every rank, and be loaded before the
    first call.

    compile_stages: give what the emitted module computes between its collectives to torch.compile; the name of a backend, or True for
    'inductor'. A block is compiled once, when it is first called.

    reduce_dtype: in which gradients are brought together over ranks ('fp32', 'bf16', ...): as MixedPrecisionPolicy's of
    torch.distributed.fsdp. By default that in which the parameters rest, so that precision='bf16' of a float32 model reduces in float32.

    Other arguments as in `autopar.plan`. In a process group of this size all ranks call it together, and rank 0 plans for all. Outside
    of one the result holds the plan and the source, and says on the first call which command launches it. Batches of other sizes, and
    the other of training and evaluation mode, run under the same decisions if these fit. Raises as `autopar.plan`; TypeError for what is
    compiled already; PlanError for a plan of other wishes; ValueError for arguments that exclude each other; LaunchError.
    """
    if isinstance(model, StandIn):
        raise TypeError("the model is what autopar.compile has returned: compile its original (model.original) again")
    if inner := next((name for name, module in model.named_modules() if isinstance(module, StandIn)), None):
        raise TypeError(
            f"{inner} is what autopar.compile has returned: put its original ({inner}.original) there, and compile the whole; or leave "
            f"what is around it as it is, which trains with it"
        )
    count = world_size() if gpus is None else gpus
    if local_batch and example_inputs is None:
        raise ValueError("local_batch=True needs example_inputs: the global batch, of which the plan says who is given which part")
    if local_batch and verify:
        raise ValueError("verify=True calls the module with the global batch, local_batch=True with parts of it: verify without it once")
    check_name("outputs", outputs, ("loss", "all", "trained"))
    if outputs == "trained" and (loss is not None or verify):
        raise ValueError("outputs='trained' leaves the loss to be made outside: leave out loss= and verify=")
    objective = each_output if outputs == "trained" else loss
    wanted_outputs = None if outputs == "loss" else True  # of a model without a loss in any case
    dtype, backend = compute_dtype(model, precision), check_backend(compile_stages)
    given = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    wanted = wishes(
        count, cluster=cluster, memory=memory, optimizer=optimizer, precision=precision, reduce_dtype=reduce_dtype, pins=pins,
    )  # fmt: skip
    if given is not None and as_pins(pins) is not None:
        raise ValueError("plan= and pins= exclude each other: a plan states every choice")
    if given is not None and given.gpus != count:
        raise PlanError(f"the plan is for {given.gpus} GPUs, not for {count}")
    if given is not None and compute_dtype(model, given.precision) != dtype:
        raise PlanError(f"the plan is for precision={given.precision!r}, and precision={precision!r} was asked for: give the plan's")
    if given is not None and reduce_dtype not in (None, given.reduce_dtype):
        stated = "that of the parameters" if given.reduce_dtype is None else repr(given.reduce_dtype)
        raise PlanError(f"the plan is for a reduce_dtype of {stated}, and {reduce_dtype!r} was asked for: plan anew for another one")

    def copied(inputs: Inputs | None, decided: Plan | None, original: nn.Module) -> ParallelModule | DeferredModule:
        """A copy of the model, compiled as it was. decided: the plan; if the copy has become another program since, there is a new one."""
        again = functools.partial(
            compile, original, count, example_inputs=inputs, loss=loss, cluster=cluster, memory=memory, optimizer=optimizer,
            precision=precision, outputs=outputs, local_batch=local_batch, compile_stages=compile_stages,
        )  # fmt: skip
        if decided is not None:
            with contextlib.suppress(PlanError):
                return again(plan=decided)
        return again(plan=given, pins=pins, reduce_dtype=reduce_dtype)

    @unwatched()
    def finish(inputs: Inputs) -> Compiled:
        apart = False
        if world_size() == count:
            join_process_group(default_device())
            whole_again(model)
            apart = take_buffers_of_rank_0(model)
        decide = wanted if given is None else lambda _: given
        with as_if_trained(model, inputs):
            return build(model, inputs, count, loss=objective, decide=decide, outputs=wanted_outputs, dtype=dtype, apart=apart)

    @unwatched()
    def start(compiled: Compiled, inputs: Inputs) -> ParallelModule:
        captured = compiled.captured
        expected = None
        if verify:
            expected = done_by_all(
                lambda: first_loss(model, inputs, loss, captured.program, dtype), same=lambda _: "", what="the original's loss"
            )
        another = Variants(
            model, compiled.plan, captured.program, objective, emit, choose_cluster(cluster), outputs=wanted_outputs, dtype=dtype,
            backend=backend, apart=compiled.apart, first=(inputs, captured.guards),
        )  # fmt: skip
        with as_if_trained(model, inputs):
            module = ParallelModule(
                load(compiled.source, backend=backend), tensors_of(captured), original=model, another=another,
                guards=captured.guards, returns=captured.returns, returned=captured.returned,
                around_loss=captured.around_loss,
                outputs="all" if wanted_outputs else "loss", autocast=captured.autocast, dtype=dtype,
                local_batch=local_batch, example=inputs, read=names_read(captured.program), elsewhere=another.elsewhere,
            )  # fmt: skip
        keep = module.__dict__
        keep["plan"], keep["source"] = compiled.plan, compiled.source
        example = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), inputs)
        keep["_copied"] = functools.partial(copied, example, compiled.plan)
        if expected is not None:
            check_first_loss(module, inputs, loss, expected)
        return module

    if example_inputs is not None and world_size() == count:
        return start(finish(example_inputs), example_inputs)
    compiled = finish(example_inputs) if example_inputs is not None else None
    again = functools.partial(copied, example_inputs, None if compiled is None else compiled.plan)
    return DeferredModule(model, count, finish, start, compiled, example_inputs, again)
