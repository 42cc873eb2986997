"""The bound that prunes a choice is below every plan of it, whichever of PyTorch's operators the model has and whichever GPU runs it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from soundness_harness import Case, op_db, op_db_cases

from autopar.errors import Infeasible
from autopar.ir import Input, Op, Param, Program, Ref, TensorType, map_refs, refs
from autopar.planner import Pins
from autopar.planner.candidate import Draft
from autopar.planner.search import Search
from cost_models.cluster import list_gpus, load_cluster, load_gpu

pytestmark = pytest.mark.pure


def around(case: Case) -> Program | None:
    """A model that scales the operator's first floating operand by a parameter, and sums its first result; None where nothing of it is
    differentiated, where the operator has an effect beside its results, and for what capture does not leave (it states the dims of
    squeeze)."""
    view, op = case.view(2), case.op
    names = refs(op)
    own = {v: _single(t) for v, t in zip((*names, *(o for o in op.outputs if o)), (*view.ins, *view.outs), strict=True)}
    first = next((v for v in names if own[v].dtype.is_floating_point and own[v].grad), None)
    result = next((o for o in op.outputs if o and own[o].dtype.is_floating_point and own[o].grad), None)
    unusual = op.target.split(".")[1].endswith("_") or op.target == "aten.squeeze.default"
    if first is None or result is None or "float64" in repr(op) or unusual:
        return None
    types = {v: dataclasses.replace(t, grad=False) if v in names else t for v, t in own.items()}
    types |= {"scale": TensorType((), torch.float32, True), "scaled": own[first], "total": TensorType((), own[result].dtype, True)}
    ops = (
        Op(target="aten.mul.Tensor", args=(Ref(first), Ref("scale")), outputs=("scaled",)),
        map_refs(op, lambda v: Ref("scaled" if v == first else v)),
        Op(target="aten.sum.default", args=(Ref(result),), outputs=("total",)),
    )
    return Program(
        name="around", inputs=tuple(Input(value=v, path=(k,)) for k, v in enumerate(dict.fromkeys(names))),
        params=(Param(value="scale", fqn="scale"),), buffers=(), ops=ops, loss="total", types=types,
        batch_size=own[first].shape[0] if own[first].shape else None,
    )  # fmt: skip


def _single(t: TensorType) -> TensorType:
    return dataclasses.replace(t, dtype=torch.float32) if t.dtype == torch.float64 else t


def compared(program: Program, gpu: str) -> tuple[int, list[str]]:
    """How many choices were priced, and of which of them a bound is above what comes after it."""
    host = load_gpu(gpu).host
    machine = dataclasses.replace(load_cluster("cpu" if host else "dgx-a100"), gpu=dataclasses.replace(load_gpu(gpu), context_bytes=0))
    search = Search(
        program=program, gpus=2, cluster=machine, memory_limit_bytes=2**40, optimizer="adamw", precision="fp32", pins=Pins()
    )  # fmt: skip
    priced, wrong = 0, list[str]()
    for choice in itertools.islice(search.space.choices(), 24):
        rank = search.known.rank(choice.mesh, choice.micro_batches, search.batch_size, search.recipe)
        estimator = search.estimator(rank, choice)
        draft = None if isinstance(estimator, str) else search.draft(choice, estimator)
        if isinstance(draft, Draft) and not isinstance(estimator, str):
            steps = [search._least.step_s(choice, search.batch_size), estimator.least_s(), draft.bound_s, draft.times.step_s]
            found = search.exact(choice)
            steps += [found.step_time_s] if found is not None else []
            alike = search.known.used_alike(choice.mesh, choice.micro_batches, search.batch_size)
            sent = search._least.with_exchange_s(choice, search.batch_size, estimator.exchange, alike or frozenset())
            if any(a > b * (1 + 1e-9) for a, b in (*itertools.pairwise(steps), (steps[0], sent), (sent, draft.times.step_s))):
                wrong.append(f"{gpu}: {program.ops[1].target} under {choice.mesh} micro-batches={choice.micro_batches}: {steps}")
            priced += 1
    try:
        plan = search.best()
        if not plan.bound_s <= plan.step_time_s * (1 + 1e-9):
            wrong.append(f"{gpu}: {program.ops[1].target}: bound {plan.bound_s}, plan {plan.step_time_s}")
    except Infeasible:
        pass
    return priced, wrong


@pytest.mark.filterwarnings("ignore")  # op_db calls deprecated operators too
def test_no_plan_around_an_operator_of_op_db_is_faster_than_its_bound() -> None:
    """Every sixteenth operator of the database (all of them hold), the GPUs of the catalogue in turn."""
    _hold(op_db(divisible=True)[::16])


@pytest.mark.parametrize("shape", [(8,), (8, 4), (8, 2, 4)])
def test_micro_batches_of_one_sample_may_pass_gradients_of_parameters_on(shape: tuple[int, ...]) -> None:
    """A parameter that is as large as a sample is no sum over the samples then, and there is nothing to launch for it."""
    whole, own = TensorType(shape, torch.float32, True), TensorType(shape[1:], torch.float32, True)
    types = {"x": dataclasses.replace(whole, grad=False), "scale": own, "scaled": whole, "total": TensorType((), torch.float32, True)}
    ops = (
        Op(target="aten.add.Tensor", args=(Ref("x"), Ref("scale")), outputs=("scaled",)),
        Op(target="aten.sum.default", args=(Ref("scaled"),), outputs=("total",)),
    )
    program = Program(
        name="around", inputs=(Input(value="x", path=(0,)),), params=(Param(value="scale", fqn="scale"),), buffers=(), ops=ops,
        loss="total", types=types, batch_size=8,
    )  # fmt: skip
    priced, wrong = compared(program, "h200")
    assert priced and not wrong, wrong


def _hold(entries: list[Any]) -> None:
    gpus, wrong, priced, operators = list_gpus(), list[str](), 0, 0
    for info in entries:
        program = next((p for case in op_db_cases(info, limit=1) if (p := around(case)) is not None), None)
        if program is None:
            continue
        try:
            more, found = compared(program, gpus[operators % len(gpus)])
        except RuntimeError as error:
            if "derivative for" not in str(error):  # else torch cannot differentiate it, and no model trains through it
                raise
            continue
        priced, wrong = priced + more, wrong + found
        operators += 1
    assert not wrong, "\n".join(wrong[:10])
    assert operators >= min(20, len(entries) // 3) and priced > operators, (operators, priced)
