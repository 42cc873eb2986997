"""The emitted file: its parts, what it computes, and what it never contains."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import sys
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from render_toy import Mesh, Weights, op, r, stage_of, toy, toy_loss, toy_values

from autopar.errors import RenderError
from autopar.ir import (
    Buffer,
    I,
    Input,
    Lowered,
    Op,
    Program,
    R,
    Ref,
    S,
    StageProgram,
    TensorType,
    refs,
)  # fmt: skip
from autopar.render import check_source, load, manifest_source, render
from autopar.render.literals import Code, literal, statement
from autopar.render.names import RESERVED, comment_text, identifier, short
from autopar.render.pieces import wanted_names
from autopar.run.manifest import InputSpec, Manifest

pytestmark = pytest.mark.pure

f32, i64 = torch.float32, torch.int64


@pytest.mark.parametrize("layers, recompute, cut", [(2, False, False), (3, True, False), (4, False, True), (2, True, True)])
def test_emitted_module_computes_the_program(layers: int, recompute: bool, cut: bool) -> None:
    lowered, manifest = toy(layers, recompute, cut)
    source = render(lowered, manifest)
    assert source.count("def block_") == 1, "one function for all instances"
    assert source.count("recompute(block_0") == (layers if recompute else 0)
    module = load(source)
    assert manifest == module.MANIFEST
    weights, batch = toy_values(layers)
    expected = torch.autograd.grad(toy_loss(layers, weights, batch), [v for v in weights.values() if v.requires_grad])
    extra = module.prologue(weights, Mesh(), **batch)
    assert set(extra) == {"count"}
    values: tuple[torch.Tensor, ...] = ()
    for index in range(len(module.STAGES)):
        values = stage_of(module, index, weights)(*values, **batch, **extra)
        assert [(tuple(v.shape), str(v.dtype).removeprefix("torch.")) for v in values] == list(module.STAGES[index].sends)
    (loss,) = values
    found = torch.autograd.grad(loss, [v for v in weights.values() if v.requires_grad])
    torch.testing.assert_close(loss, toy_loss(layers, weights, batch), rtol=0, atol=1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert weights["steps"] == 5, "the buffer is changed at the end of the forward"


def test_reading_it(golden: Callable[[str, str], None]) -> None:
    lowered, manifest = toy(4, recompute=True, cut=True)
    source = render(lowered, manifest)
    assert source == render(*toy(4, recompute=True, cut=True)), "the same input gives the same bytes"
    assert "/home/me" not in source
    assert max(map(len, source.splitlines())) <= 120
    golden("toy.py.txt", source)


def test_weights_that_do_not_correspond_are_arguments() -> None:
    """Instance 1 uses the weight of instance 0 (shared across blocks): it is passed, the block is still one function."""
    lowered, manifest = toy(2)
    stage = lowered.stages[0]
    ops = tuple(o if o.outputs != ("h_1_up",) else dataclasses.replace(o, args=(o.args[0], r("p_h_0_w"))) for o in stage.ops)
    source = render(dataclasses.replace(lowered, stages=(dataclasses.replace(stage, ops=ops),)), manifest)
    assert source.count("def block_") == 1
    assert source.count('w["h.0.up.weight"]') == 2
    weights, batch = toy_values(2)
    shared = Weights({**weights, "h.1.up.weight": weights["h.0.up.weight"]})
    (loss,) = stage_of(load(source), 0, weights)(**batch, count=torch.tensor(3.0))
    torch.testing.assert_close(loss, toy_loss(2, shared, batch))


@pytest.mark.parametrize("change", [{"args": (r("h_1_a"), r("h_1_a"))}, {"target": "aten.add.Tensor"}, {"no_grad": True}])
def test_instances_that_differ_have_their_own_function(change: dict[str, object]) -> None:
    lowered, manifest = toy(2)
    stage = lowered.stages[0]
    ops = tuple(dataclasses.replace(o, **change) if o.outputs == ("h_1_mul",) else o for o in stage.ops)
    source = render(dataclasses.replace(lowered, stages=(dataclasses.replace(stage, ops=ops),)), manifest)
    assert source.count("def block_") == 2


def test_constants_true_and_one_are_told_apart() -> None:
    lowered, manifest = toy(2)
    stage = lowered.stages[0]
    numbers = {"h_0_mul": 1, "h_1_mul": True}
    ops = tuple(dataclasses.replace(o, args=(o.args[0], numbers[o.name])) if o.name in numbers else o for o in stage.ops)
    assert render(dataclasses.replace(lowered, stages=(dataclasses.replace(stage, ops=ops),)), manifest).count("def block_") == 2


def test_values_used_outside_a_block_are_returned() -> None:
    lowered, manifest = toy(2)
    stage = lowered.stages[0]
    extra = op("aten.add.Tensor", r("loss"), r("h_0_a"), out="more")
    changed = dataclasses.replace(stage, ops=(*stage.ops, extra), sends=("more", "h_1_out", "x"))
    types = {**lowered.program.types, "more": TensorType((4, 6), f32)}
    program = lowered.program.replace(types=types)
    source = render(dataclasses.replace(lowered, program=program, stages=(changed,)), manifest)
    weights, batch = toy_values(2)
    more, h, x = stage_of(load(source), 0, weights)(**batch, count=torch.tensor(3.0))
    a = F.linear(batch["x"], weights["h.0.up.weight"]).chunk(2, -1)[0]
    torch.testing.assert_close(more, toy_loss(2, weights, batch) + a)
    assert x is batch["x"]
    assert h.shape == (4, 6)


def test_buffers_that_change_places() -> None:
    """All new values are read before any buffer changes, views of buffers too."""
    buffers = tuple(Buffer(value=f"b_{n}", fqn=n, mutated=True) for n in ("left", "right", "turned"))
    types = {"x": TensorType((), f32), "loss": TensorType((), f32), "flipped": TensorType((2, 2), f32)}
    types |= {"b_left": TensorType((2,), f32), "b_right": TensorType((2,), f32), "b_turned": TensorType((2, 2), f32)}
    ops = (op("aten.transpose.int", r("b_turned"), 0, 1, out="flipped"), op("aten.mul.Tensor", r("x"), 2, out="loss"))
    inputs = (Input(value="x", path=("x",)),)
    program = Program(name="Swap", inputs=inputs, params=(), buffers=buffers, ops=ops, loss="loss", types=types)
    mutations = (("b_left", "b_right"), ("b_right", "b_left"), ("b_turned", "flipped"))
    stage = StageProgram(index=0, ops=ops, receives=(), sends=("loss",), mutations=mutations)
    _, manifest = toy(1)
    spec = InputSpec(name="x", path=("x",), shape=(), dtype="float32")
    manifest = dataclasses.replace(manifest, params=(), buffers=(), inputs=(spec,), prologue={})
    module = load(render(Lowered(program=program, stages=(stage,)), manifest))
    weights = Weights(left=torch.tensor([1.0, 2.0]), right=torch.tensor([3.0, 4.0]), turned=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    stage_of(module, 0, weights)(x=torch.tensor(1.0))
    assert {k: v.tolist() for k, v in weights.items()} == {"left": [3, 4], "right": [1, 2], "turned": [[1, 3], [2, 4]]}


def test_large_dead_values_do_not_outlive_their_use() -> None:
    """Without names given again or deleted, a chain of unlike operators would keep every result until the end."""
    types, ops, last = {"x": TensorType((1000,), f32)}, [], "x"
    for n, name in enumerate("sin cos tanh exp sigmoid abs square neg".split() * 4):  # noqa: SIM905
        value = f"{name}_of_{'abcdefgh'[n % 8]}_{n}"
        ops.append(op(f"aten.{name}.default", r(last), out=value, source=f"model.py:{n}: step"))
        types[value] = TensorType((1000,), f32)
        last = value
    types["loss"] = TensorType((), f32)
    ops.append(op("aten.sum.default", r(last), out="loss", source="model.py:99: sum"))
    program = Program(name="Chain", inputs=(Input(value="x", path=(0,)),), params=(), buffers=(), ops=tuple(ops), loss="loss", types=types)
    stage = StageProgram(index=0, ops=program.ops, receives=(), sends=("loss",))
    manifest = Manifest(
        model="Chain", mesh={"pp": 1, "dp": 1, "tp": 1}, micro_batches=1, schedule="1f1b", rest="zero0", params=(), buffers=(),
        inputs=(InputSpec(name="x", path=(0,), shape=(1000,), dtype="float32"),),
    )  # fmt: skip
    module = load(render(Lowered(program=program, stages=(stage,)), manifest))
    alive: list[int] = []
    forward = stage_of(module, 0, Weights())

    def watch(frame: object, event: str, arg: object) -> Callable[..., object]:
        if event == "line":
            alive.append(sum(isinstance(v, torch.Tensor) for v in frame.f_locals.values()))  # type: ignore[attr-defined]
        return watch

    sys.settrace(lambda frame, event, arg: watch if frame.f_code is module.Stage0.forward.__code__ else None)
    try:
        forward(x=torch.rand(1000))
    finally:
        sys.settrace(None)
    assert len(alive) > 30
    assert max(alive) <= 3, "the input, the value that is read and the one that is made"


# ------------------------------------------------------------------------------------------------------ untrusted names
EVIL = [
    "in",
    "self",
    "w",
    "mesh",
    "torch",
    "unused",
    "a b",
    "x'); import os #",
    "1st",
    "",
    "print",
    "__class__",
    "naïve",
    "block_0",
    "a\n    b",
    "F",
]


def test_an_underscore_names_no_value() -> None:
    ops = (
        Op(target="aten.relu.default", args=(Ref("x"),), outputs=("a",), source="m.py:3: _, y = f(x), g(x)"),
        Op(target="aten.tanh.default", args=(Ref("a"),), outputs=("b",), source="m.py:3: _, y = f(x), g(x)"),
    )
    assert wanted_names(ops, ["b"]) == {}


@pytest.mark.parametrize("name", EVIL)
def test_names_from_the_user_are_data(name: str) -> None:
    """Inputs, modules and values may be called anything."""
    lowered, manifest = toy(2)
    rename = {"x": f"{name}_", "h_0_mul": name or "empty", "scale": f"{name} "}

    def renamed(o: Op) -> Op:
        def new(arg: object) -> object:
            if isinstance(arg, tuple):
                return tuple(map(new, arg))
            return Ref(rename.get(arg.name, arg.name)) if isinstance(arg, Ref) else arg

        return dataclasses.replace(
            o, args=tuple(map(new, o.args)), outputs=tuple(rename.get(v, v) if v else v for v in o.outputs),
            module=f"h.{name}", source=f"{name}: {name}\n evil()\x00",
        )  # fmt: skip

    stage = dataclasses.replace(lowered.stages[0], ops=tuple(map(renamed, lowered.stages[0].ops)))
    prefix = f"blocks.{name}"
    calls = tuple(dataclasses.replace(c, prefix=f"{prefix}.{c.instance}") for c in stage.calls)
    program = lowered.program.replace(
        inputs=(Input(value=rename["x"], path=(name,)), lowered.program.inputs[1]),
        params=tuple(dataclasses.replace(p, fqn=p.fqn.replace("h.", f"{prefix}.")) for p in lowered.program.params),
    )
    changed = dataclasses.replace(lowered, program=program, stages=(dataclasses.replace(stage, calls=calls),))
    x_spec = dataclasses.replace(manifest.inputs[0], name=name, path=(name,))
    source = render(changed, dataclasses.replace(manifest, model=name, schedule=name, inputs=(x_spec, manifest.inputs[1])))
    module = load(source)
    assert module.MANIFEST.inputs[0].path == (name,)
    keyword = module.MANIFEST.inputs[0].name
    weights, batch = toy_values(2)
    named = Weights({k.replace("h.", f"{prefix}."): v for k, v in weights.items()})
    (loss,) = stage_of(module, 0, named)(**{keyword: batch["x"]}, y=batch["y"], count=torch.tensor(3.0))
    torch.testing.assert_close(loss, toy_loss(2, weights, batch))
    calls_made = {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
    assert not any("evil" in c or "import" in c for c in calls_made)


def test_identifiers() -> None:
    for text in (*EVIL, "h.0.attn", *RESERVED):
        name = identifier(text)
        assert name.isidentifier() and name.isascii() and name not in RESERVED
        compile(f"{name} = 1", "", "exec")
    assert identifier("h.0.attn") == "h_0_attn"
    assert identifier("input_ids") == "input_ids"
    assert short("transformer_h_3_ln_1", "transformer.h.3") == "ln"
    assert short("add_12") == "add"
    assert short("sum_1") == "sum_"
    assert len(short("a_very_long_name_of_a_module_deep_inside_of_a_model_linear")) <= 32
    assert comment_text("a\n b\r\u2028c\x00\ud800") == "a b c"


@pytest.mark.parametrize(
    "source, message",
    [
        ("import os\n", "import of os"),
        ("from os import path\n", "import from os"),
        ("from . import x\n", "import from None"),
        ("MANIFEST = eval('1')\n", "builtin 'eval'"),
        ("def f():\n    return nothing\n", "undefined name 'nothing'"),
        ("def f(x):\n    return x.__class__\n", "attribute __class__"),
        ("print(1)\n", "a Expr at the top level"),
        ("x = lambda: 1\n", "a lambda"),
        ("x = (\n", "does not parse"),
        ("x = '\x00'\n", "does not parse"),
        ("def f():\n    import os\n    return os\n", "import of os"),
        ("MANIFEST = 1\nSTAGES = ()\nclass Stage0:\n    pass\n", "0 stages were to be written"),
        ("X = 1\n", "MANIFEST is not defined"),
    ],
)
def test_check_refuses(source: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        check_source(source, stages=0)


def test_a_program_that_cannot_be_written_is_refused() -> None:
    lowered, manifest = toy(2)
    stage = lowered.stages[0]

    def rendered(**changes: object) -> str:
        return render(dataclasses.replace(lowered, stages=(dataclasses.replace(stage, **changes),)), manifest)

    with pytest.raises(RenderError, match="'h_1_out' is read before it is made"):
        rendered(ops=stage.ops[:4], calls=(), mutations=(), sends=("h_1_out",))
    with pytest.raises(RenderError, match="overlaps"):
        rendered(calls=(stage.calls[0], stage.calls[0]))
    with pytest.raises(RenderError, match="no buffer"):
        rendered(mutations=(("x", "loss"),))
    with pytest.raises(RenderError, match=r"does not name the inputs \[\('y',\)\]"):
        render(lowered, dataclasses.replace(manifest, inputs=manifest.inputs[:1]))
    with pytest.raises(RenderError, match="'total'.* which the prologue does not make"):
        render(lowered, dataclasses.replace(manifest, prologue={"total": "R"}))
    with pytest.raises(RenderError, match="no literal form"):
        manifest_source(dataclasses.replace(manifest, constant_inputs=((("a",), object()),)))


def test_literals_are_exact() -> None:
    for value in (
        None,
        True,
        3,
        -3,
        1e-5,
        0.1 + 0.2,
        -0.0,
        1e300,
        math.inf,
        -math.inf,
        complex(1, -2),
        "a\"b'\n\\",
        (),
        (1,),
        ((1, 2), "x"),
        [1],
        {"a": (1,)},
    ):
        found = eval(literal(value))
        assert found == value and type(found) is type(value)
    assert math.isnan(eval(literal(math.nan)))
    assert math.copysign(1, eval(literal(-0.0))) == -1
    assert literal(torch.float32) == "torch.float32"
    assert literal(torch.channels_last) == "torch.channels_last"
    assert literal((r("a"), None), lambda name: f"<{name}>") == "(<a>, None)"


def test_transitions_keep_the_layout_of_the_other_axes() -> None:
    lowered, manifest = toy(1)
    stage = dataclasses.replace(lowered.stages[0], calls=())
    moved = op("autopar.C.copy_to", r("h_0_up"), out="h_0_up_tp_r", axis="tp")
    ops = (*stage.ops[:2], moved, *stage.ops[2:])
    program = lowered.program.replace(layouts={"dp": {"h_0_up": S(0)}, "tp": {"h_0_up": I, "h_0_up_tp_r": R}})
    program = program.replace(types={**program.types, "h_0_up_tp_r": TensorType((4, 12), f32)})
    changed = dataclasses.replace(lowered, program=program, stages=(dataclasses.replace(stage, ops=ops, sends=("loss", "h_0_up_tp_r")),))
    source = render(changed, dataclasses.replace(manifest, mesh={"pp": 1, "dp": 2, "tp": 2}))
    assert 'y_2 = F.linear(x, w["h.0.up.weight"])  # (4, 12) dp=S(0) tp=I' in source
    assert "y_tp_r = C.copy_to(y_2, mesh.tp)  # (4, 12) dp=S(0) tp=R" in source


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize(
    "targets", ["x", ", ".join(f"result_number_{n}" for n in range(30)), "(only_result_with_a_name_of_quite_some_length_indeed_so_long,)"]
)
def test_long_statements_are_broken_without_a_change(count: int, targets: str) -> None:
    """What is laid out over lines is the same statement."""
    items = (
        f"({', '.join(f'argument_{n}' for n in range(count))},)",
        "'a, b' + \"it's, \\\" , c\"",
        *(f"x{n}" for n in range(count)),
        "k=1",
    )
    code = Code("call(", items, ")")
    lines = statement(targets, code, "(1, 2) int64", depth=1)
    assert max(map(len, lines)) <= 120
    assert ast.dump(ast.parse("if x:\n" + "\n".join(lines))) == ast.dump(ast.parse(f"if x:\n    {targets} = {code}"))
    assert "# (1, 2) int64" in "".join(lines)


def test_an_argument_that_no_line_holds_is_followed_by_a_comma() -> None:
    """The name of a parameter deep in a model, say, which cannot be broken."""
    code = Code("call(", ("x", f"w[\"{'part.' * 30}weight\"]", "k=1"), ")")
    lines = statement("y", code, "(1, 2) int64", depth=1)
    assert ast.dump(ast.parse("if x:\n" + "\n".join(lines))) == ast.dump(ast.parse(f"if x:\n    y = {code}"))


def test_debuggers_see_the_source() -> None:
    module = load(render(*toy(2)))
    assert "F.linear" in inspect.getsource(module.block_0)
    with pytest.raises(KeyError) as caught:
        stage_of(module, 0, Weights())(x=torch.rand(4, 6), y=torch.zeros(4, dtype=i64), count=1)
    assert 'torch.exp(w["log_scale"])' in "".join(traceback.format_exception(caught.value))


def test_refs_of_the_toy_are_known() -> None:
    """The test program itself is well formed."""
    lowered, _ = toy(3)
    known = {i.value for i in lowered.program.inputs} | {p.value for p in lowered.program.params} | {"b_steps", "count"}
    for o in lowered.program.ops:
        assert set(refs(o)) <= known
        known |= {v for v in o.outputs if v}
