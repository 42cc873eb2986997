"""A small program for the tests of rendering, written by hand: blocks, a cut, a prologue, a buffer that moves."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from autopar.ir import (
    Block,
    BlockCall,
    Buffer,
    I,
    Input,
    Lowered,
    Op,
    Param,
    Program,
    R,
    Ref,
    S,
    Span,
    StageProgram,
    TensorType,
)  # fmt: skip
from autopar.run.manifest import BufferSpec, InputSpec, Manifest, ParamSpec

f32, i64 = torch.float32, torch.int64


class Weights(dict):
    """Tensors by name, seen from a prefix."""

    def at(self, prefix: str) -> Weights:
        return Weights({k.removeprefix(f"{prefix}."): v for k, v in self.items() if k.startswith(f"{prefix}.")})


class Mesh:
    device = torch.device("cpu")
    dp = tp = pp = None


def stage_of(module: object, index: int, weights: Weights) -> Callable[..., tuple[torch.Tensor, ...]]:
    stage = module.STAGES[index]()  # type: ignore[attr-defined]
    stage.weights, stage.mesh = weights, Mesh()
    return stage.forward


def op(
    target: str,
    *args: object,
    out: str | tuple[str | None, ...],
    module: str = "",
    source: str = "",
    no_grad: bool = False,
    **kwargs: object,
) -> Op:
    outputs = (out,) if isinstance(out, str) else out
    return Op(
        target=target,
        args=args,
        kwargs=tuple(kwargs.items()),
        outputs=outputs,
        multi=not isinstance(out, str),
        module=module,
        source=source,
        no_grad=no_grad,
    )


def r(name: str) -> Ref:
    return Ref(name)


def layer(n: int, x: str, scale: str = "scale") -> tuple[Op, ...]:
    """h.n: linear without bias, halves multiplied, times a value from outside."""
    at = f"h.{n}"
    return (
        op("aten.linear.default", r(x), r(f"p_h_{n}_w"), out=f"h_{n}_up", module=f"{at}.up", source="/home/me/model.py:7: y = self.up(x)"),
        op(
            "aten.chunk.default",
            r(f"h_{n}_up"),
            2,
            -1,
            out=(f"h_{n}_a", f"h_{n}_b"),
            module=at,
            source="/home/me/model.py:8: a, b = y.chunk(2, -1)",
        ),
        op("aten.mul.Tensor", r(f"h_{n}_a"), r(f"h_{n}_b"), out=f"h_{n}_mul", module=at, source="/home/me/model.py:9: y = a * b * scale"),
        op("aten.mul.Tensor", r(f"h_{n}_mul"), r(scale), out=f"h_{n}_out", module=at, source="/home/me/model.py:9: y = a * b * scale"),
    )


def toy(layers: int = 2, recompute: bool = False, cut: bool = False) -> tuple[Lowered, Manifest]:
    """x (4, 6) -> layers -> cross entropy against y (4,) summed, divided by a count that the
    prologue makes; a buffer counts the steps."""
    scale = (op("aten.exp.default", r("p_log_scale"), out="scale", source="model.py:3: scale = self.log_scale.exp()"),)
    blocks = [layer(n, "x" if n == 0 else f"h_{n - 1}_out") for n in range(layers)]
    tail = (
        op(
            "aten.cross_entropy_loss.default",
            r(f"h_{layers - 1}_out"),
            r("y"),
            None,
            2,
            -100,
            out="total",
            source="model.py:20: loss = ce(x, y)",
        ),
        op("aten.div.Tensor", r("total"), r("count"), out="loss"),
        op("aten.add.Tensor", r("b_steps"), 1, out="steps_next", no_grad=True),
    )
    prologue = (op("aten.ne.Scalar", r("y"), -100, out="labelled"), op("aten.sum.default", r("labelled"), out="count", dtype=f32))
    types = {
        "x": TensorType((4, 6), f32),
        "y": TensorType((4,), i64),
        "scale": TensorType((), f32),
        "loss": TensorType((), f32),
        "total": TensorType((), f32),
    }
    types |= {
        "b_steps": TensorType((), i64),
        "steps_next": TensorType((), i64),
        "count": TensorType((), f32),
        "p_log_scale": TensorType((), f32),
    }
    for n in range(layers):
        types |= {f"p_h_{n}_w": TensorType((12, 6), f32), f"h_{n}_up": TensorType((4, 12), f32)}
        types |= {f"h_{n}_{v}": TensorType((4, 6), f32) for v in ("a", "b", "mul", "out")}
    ops = (*scale, *(o for b in blocks for o in b), *tail)
    spans = tuple(Span(1 + 4 * n, 5 + 4 * n) for n in range(layers))
    program = Program(
        name="Toy",
        inputs=(Input(value="x", path=(0,)), Input(value="y", path=("y",))),
        params=(Param(value="p_log_scale", fqn="log_scale"), *(Param(value=f"p_h_{n}_w", fqn=f"h.{n}.up.weight") for n in range(layers))),
        buffers=(Buffer(value="b_steps", fqn="steps", mutated=True),),
        ops=ops, loss="loss", types=types, mutations=(("b_steps", "steps_next"),),
        blocks=(Block(spans=spans, prefixes=tuple(f"h.{n}" for n in range(layers))),),
        layouts={"dp": {"x": S(0), "h_0_up": S(0), "loss": I}, "tp": {"h_0_up": R}},
    )  # fmt: skip
    mutations = (("b_steps", "steps_next"),)

    def calls(first: int, numbers: range) -> tuple[BlockCall, ...]:
        starts = {n: first + 4 * (n - numbers.start) for n in numbers}
        return tuple(BlockCall(span=Span(s, s + 4), block=0, instance=n, prefix=f"h.{n}", recompute=recompute) for n, s in starts.items())

    if cut:
        half = layers // 2
        edge = f"h_{half - 1}_out"
        stages = (
            StageProgram(index=0, ops=(*scale, *sum(blocks[:half], ())), receives=(), sends=(edge,), calls=calls(1, range(half))),
            StageProgram(
                index=1,
                ops=(*scale, *sum(blocks[half:], ()), *tail),
                receives=(edge,),
                sends=("loss",),
                calls=calls(1, range(half, layers)),
                mutations=mutations,
            ),
        )
    else:
        stages = (StageProgram(index=0, ops=ops, receives=(), sends=("loss",), calls=calls(1, range(layers)), mutations=mutations),)
    manifest = Manifest(
        model="Toy",
        mesh={"pp": len(stages), "dp": 2, "tp": 1},
        micro_batches=1,
        schedule="1f1b",
        rest="zero1",
        params=tuple(ParamSpec(name=p.fqn, shape=types[p.value].shape, dtype="float32", layouts={"dp": "R"}) for p in program.params),
        buffers=(BufferSpec(name="steps", shape=(), dtype="int64"),),
        inputs=(
            InputSpec(name="x", path=(0,), shape=(8, 6), dtype="float32", layouts={"dp": "S(0)"}),
            InputSpec(name="y", path=("y",), shape=(8,), dtype="int64"),
        ),
        positional=("x", "y"),
        prologue={"count": "R"},
    )
    return Lowered(program=program, stages=stages, prologue=prologue, prologue_outputs=("count",)), manifest


def toy_values(layers: int) -> tuple[Weights, dict[str, torch.Tensor]]:
    weights = Weights({f"h.{n}.up.weight": torch.randn(12, 6, requires_grad=True) for n in range(layers)})
    weights |= {"log_scale": torch.tensor(0.3, requires_grad=True), "steps": torch.tensor(4)}
    return weights, {"x": torch.randn(4, 6), "y": torch.tensor([0, -100, 5, 2])}


def toy_loss(layers: int, weights: Weights, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    x = batch["x"]
    for n in range(layers):
        a, b = F.linear(x, weights[f"h.{n}.up.weight"]).chunk(2, -1)
        x = a * b * weights["log_scale"].exp()
    return F.cross_entropy(x, batch["y"])
