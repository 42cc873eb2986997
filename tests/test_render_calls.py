"""Every readable form of an operator computes what the operator itself computes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from render_samples import X, Y, r, sample, samples, tensors, torch_op

from autopar.errors import RenderError
from autopar.ir import Op, Ref, TensorType
from autopar.render.calls import SUBSCRIPTS, call, generic_call
from autopar.render.forms import FORMS

pytestmark = pytest.mark.pure

f32, i64 = torch.float32, torch.int64
MESH = SimpleNamespace(device=torch.device("cpu"), dp="the dp axis", tp="the tp axis")


def run(code: str, values: dict[str, torch.Tensor]) -> object:
    torch.manual_seed(1)
    return eval(code, {"torch": torch, "F": F, "mesh": MESH, **values})


def actual(arg: object, values: dict[str, torch.Tensor]) -> object:
    if isinstance(arg, tuple):
        return tuple(actual(a, values) for a in arg)
    return values[arg.name] if isinstance(arg, Ref) else arg


def flat(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]


def written(op: Op) -> str:
    types = {k: TensorType(tuple(v.shape), v.dtype) for k, v in tensors().items()}
    return str(call(op, lambda name: name, types, {"dp": 2, "tp": 2}))


@pytest.mark.parametrize("op", samples(), ids=lambda op: op.target)
def test_form_computes_what_the_operator_computes(op: Op) -> None:
    readable, generic = written(op), str(generic_call(op, lambda name: name))
    values, others, third = tensors(), tensors(), tensors()
    found, expected = flat(run(readable, values)), flat(run(generic, others))
    torch.manual_seed(1)
    direct = flat(torch_op(op.target)(*actual(op.args, third), **{k: actual(v, third) for k, v in op.kwargs}))
    for results, inputs in ((found, values), (expected, others)):
        assert len(results) == len(direct)
        for a, b in zip(results, direct, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), (readable, a.dtype, b.dtype)
            assert torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), readable
        for name, value in inputs.items():
            assert torch.equal(value, third[name]), f"{readable}: changes {name} otherwise than the operator"


def test_every_form_is_tried_and_applies() -> None:
    applied = {op.target for op in samples() if not written(op).startswith("torch.ops.")}
    assert (set(FORMS) | set(SUBSCRIPTS)) - applied == set()


@pytest.mark.parametrize(
    "op, code",
    [
        (sample("aten.linear.default", X, Ref("table"), None), "F.linear(x, table)"),
        (sample("aten.embedding.default", *r("table", "i")), "F.embedding(i, table)"),
        (sample("aten.layer_norm.default", X, (4,), *r("v4", "u4"), 1e-5), "F.layer_norm(x, (4,), v4, u4)"),
        (sample("aten.cross_entropy_loss.default", *r("logits", "classes"), None, 2), 'F.cross_entropy(logits, classes, reduction="sum")'),
        (sample("aten.slice.Tensor", X, 1, 1, 2**63 - 1), "x[:, 1:]"),
        (sample("aten.select.int", X, -1, 0), "x[..., 0]"),
        (sample("aten.arange.default", 16, device="cpu", pin_memory=False), "torch.arange(16, device=mesh.device)"),
        (sample("aten.full.default", (), -math.inf, dtype=f32), 'torch.full((), float("-inf"), dtype=torch.float32, device=mesh.device)'),
        (sample("aten.add.Tensor", X, Y, alpha=2), "torch.ops.aten.add.Tensor(x, y, alpha=2)"),
        (sample("aten.randint.low", 0, 5, (2,)), "torch.ops.aten.randint.low(0, 5, (2,), device=mesh.device)"),
        (sample("aten.uniform_.default", X, **{"from": 1.0, "to": 2.0}), "torch.ops.aten.uniform_.default(x, 1.0, 2.0)"),
        (
            Op(target="nobody.knows.default", args=(X, (1,)), kwargs=(("k", "a'\"\n"),), outputs=("o",)),
            "torch.ops.nobody.knows.default(x, (1,), k='a\\'\"\\n')",
        ),
        (
            Op(target="autopar.C.all_gather", args=(X,), kwargs=(("axis", "tp"), ("dim", 1)), outputs=("o",)),
            "C.all_gather(x, mesh.tp, dim=1)",
        ),
        (
            Op(target="autopar.L.masked_embedding", args=r("i", "table"), kwargs=(("axis", "dp"), ("padding_idx", None)), outputs=("o",)),
            "L.masked_embedding(i, table, mesh.dp, padding_idx=None)",
        ),
        (
            Op(target="autopar.L.norm", args=(X, (4,), None, 1e-5), kwargs=(("axis", "tp"),), outputs=("o",)),
            "L.norm(x, (4,), None, mesh.tp, 1e-05)",
        ),
    ],
    ids=lambda v: v.target if isinstance(v, Op) else "",
)
def test_how_it_reads(op: Op, code: str) -> None:
    assert written(op) == code


@pytest.mark.parametrize(
    "op, message",
    [
        (Op(target="autopar.C.all_gather", args=(X,), kwargs=(("axis", "cp"),), outputs=("o",)), "no axis of the mesh"),
        (Op(target="autopar.os.system", args=("ls",), outputs=("o",)), "not an operator of autopar.run"),
        (Op(target="autopar.C.x(); y", args=(), outputs=("o",)), "not an operator of autopar.run"),
        (Op(target="aten.nothing(); evil.default", args=(), outputs=("o",)), "not the name of an operator"),
        (Op(target="nobody.knows.default", args=(), kwargs=(("a=1, b", 1),), outputs=("o",)), "not a keyword"),
        (Op(target="aten.linear.default", args=(X,), outputs=("o",)), "do not fit"),
        (Op(target="aten.relu.default", args=(X, 1, 2), outputs=("o",)), "do not fit"),
        (Op(target="aten.relu.default", args=(object(),), outputs=("o",)), "no literal form"),
    ],
    ids=lambda v: v.target if isinstance(v, Op) else "",
)
def test_what_cannot_be_written_is_refused(op: Op, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        written(op)
