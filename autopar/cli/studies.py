"""From a TARGET and options to what can be asked about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.application import UsageError
from autopar.cli.options import check_gpus, check_time_limit, loss_of, memory_of, readable

if TYPE_CHECKING:
    from torch import Tensor

    from autopar.capture import Captured
    from autopar.explain import Study
    from autopar.ir import Program
    from autopar.planner import Pins, Plan

__all__ = ["captured_of", "given_plan", "open_study", "study_of"]

MOST_BYTES = 4 * 2**30  # of example inputs that are made for another batch


def captured_of(target: str, precision: str, loss: str | None) -> tuple[Captured, Callable[[int], Program]]:
    """The model of a TARGET, captured as `autopar.plan` does; and its program for another batch, of the same samples again."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    from autopar.capture import capture
    from autopar.debug import timed
    from autopar.planner.wishes import PRECISIONS, check_inputs, check_name
    from autopar.run.precision import compute_dtype
    from autopar.targets import load_target

    check_name("precision", precision, PRECISIONS)
    loss_fn = loss_of(loss)
    model, example_inputs = load_target(target)
    check_inputs(model, example_inputs)
    dtype = compute_dtype(model, precision)
    with timed("capture"):
        captured = capture(model, example_inputs, loss=loss_fn, dtype=dtype)

    def of_batch(batch: int) -> Program:
        own = captured.program.batch_size or 1
        needed = sum(t.nbytes for t in tree_leaves(example_inputs) if isinstance(t, torch.Tensor) and t.device.type != "meta") * batch / own
        if needed > MOST_BYTES:
            raise UsageError(
                f"example inputs for a batch of {batch} may have {needed / 2**30:.3g} GiB: let {target} give inputs on the meta device, "
                f"such as torch.empty(8, 512, device='meta'), since their shapes are all that is needed"
            )
        inputs = tree_map_only(torch.Tensor, lambda t: _of_batch(t, own, batch), example_inputs)
        again = capture(model, inputs, loss=loss_fn, dtype=dtype).program
        if again.batch_size != batch:
            raise UsageError(f"{target} does not take batches of {batch} where its example has {own}")
        return again

    return captured, of_batch


def _of_batch(t: Tensor, own: int, batch: int) -> Tensor:
    if not t.dim() or t.shape[0] != own:
        return t
    return t.repeat(-(-batch // own), *[1] * (t.dim() - 1))[:batch].detach()


def study_of(
    target: str, gpus: int | None, *, cluster: str, memory: str | None, pins: Pins | None, optimizer: str, precision: str,
    reduce_dtype: str | None, loss: str | None, time_limit: float | None = None, plan_file: Path | None = None,
) -> Study:  # fmt: skip
    """The plan of a TARGET, made or read from a file, and what further plans are made from."""
    from autopar.explain import Asked, Study
    from autopar.planner import Pins
    from autopar.planner.resources import choose_cluster
    from autopar.planner.store import Store
    from autopar.planning import wishes
    from autopar.run.dtypes import itemsize_named

    given = given_plan(plan_file, gpus, pins)
    count = given.gpus if given is not None else gpus
    if count is None:
        raise UsageError("--gpus N is missing: for how many GPUs is the plan to be?")
    check_gpus(count)
    check_time_limit(time_limit)
    limit = memory_of(memory)
    if given is not None:
        optimizer, precision, reduce_dtype = given.optimizer, given.precision, given.reduce_dtype
        limit = limit or given.memory_limit_bytes
        cluster = given.cluster if cluster == "auto" else cluster
        pins = _stated(given)
    described = choose_cluster(cluster)
    if given is not None and described.name != given.cluster:
        raise UsageError(
            f"{plan_file} is a plan for the cluster {given.cluster}, and --cluster says {cluster}: leave it out, or ask "
            f"--what-if cluster={cluster}"
        )
    decide = wishes(
        count, cluster=cluster, memory=limit, optimizer=optimizer, precision=precision, reduce_dtype=reduce_dtype, pins=pins,
        time_limit=time_limit,
    )  # fmt: skip
    captured, of_batch = captured_of(target, precision, loss)
    program = captured.program
    asked = Asked(
        gpus=count, cluster=described, optimizer=optimizer, precision=precision, reduce_dtype=reduce_dtype,
        memory_limit_bytes=limit, pins=pins or Pins(), batch=program.batch_size,
        stack=None if given is None else given.software or None,
    )  # fmt: skip
    store = Store(program=program, cluster=described, optimizer=optimizer, reduced_itemsize=itemsize_named(reduce_dtype))
    made = decide(captured, store) if given is None else _checked(captured, given, str(plan_file))
    return Study(program=program, asked=asked, given=made, recapture=of_batch, stores={(described, optimizer, program.batch_size): store})


def open_study(
    target: str, gpus: int, *, cluster: str, optimizer: str, precision: str, loss: str | None, memory: str | None = None,
    pins: Pins | None = None, reduce_dtype: str | None = None, time_limit: float | None = None,
) -> Study:  # fmt: skip
    """What can be asked of a TARGET, with no plan of its own. What makes no sense is refused before the model is captured."""
    from autopar.explain import Asked, Study
    from autopar.planner import Pins
    from autopar.planner.resources import choose_cluster
    from autopar.planner.wishes import PRECISIONS, check_name
    from cost_models.memory import OPTIMIZERS

    check_gpus(gpus)
    check_time_limit(time_limit)
    check_name("optimizer", optimizer, OPTIMIZERS)
    if reduce_dtype is not None:
        check_name("reduce_dtype", reduce_dtype, PRECISIONS)
    limit, described = memory_of(memory), choose_cluster(cluster)
    captured, of_batch = captured_of(target, precision, loss)
    program = captured.program
    asked = Asked(
        gpus=gpus, cluster=described, optimizer=optimizer, precision=precision, reduce_dtype=reduce_dtype, memory_limit_bytes=limit,
        pins=pins or Pins(), batch=program.batch_size,
    )  # fmt: skip
    return Study(program=program, asked=asked, recapture=of_batch, time_limit_s=time_limit)


def given_plan(plan_file: Path | None, gpus: int | None, pins: object) -> Plan | None:
    """The plan that --plan names, None if it names none; an error where other options contradict it."""
    from autopar.planner import Plan

    if plan_file is None:
        return None
    if pins:
        raise UsageError("--plan and --pin exclude each other: a plan file states every choice")
    given = Plan.load(readable(plan_file))
    if gpus not in (None, given.gpus):
        raise UsageError(f"{plan_file} is a plan for {given.gpus} GPUs, and --gpus says {gpus}: give the plan's, or plan anew")
    return given


def _stated(given: Plan) -> Pins | None:
    """What the user had pinned when the plan was made."""
    import msgspec

    from autopar.planner import Pins

    own = {name: value for name, value in given.pins.items() if name not in given.bound}
    return msgspec.convert(own, Pins) if own else None


def _checked(captured: Captured, given: Plan, name: str) -> Plan:
    from autopar.capture import program_hash
    from autopar.errors import PlanError
    from autopar.planner import lower
    from autopar.planner.names import named_as

    if given.program_hash != program_hash(captured.program):
        raise PlanError(
            f"{name} was made for another model or batch, or another kind of device ({given.model}); plan {captured.program.name} again"
        )
    given = named_as(captured.program, given)
    lower(captured.program, given)
    return given
