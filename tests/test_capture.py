"""Capture against the models themselves: the same loss, gradients, buffers and names, whatever the forward does."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):  # a torchvision built for another torch fails at import: transformers must not try
    sys.modules["torchvision"] = None  # type: ignore[assignment]

import torch.nn.functional as F
from torch import nn

from autopar.capture import capture, lift_to_float64, normalise, program_hash, run_program, to_float64
from autopar.errors import CaptureError
from autopar.ir import Op, Ref
from autopar.planner.moments import split_into_moments
from autopar.run.region import REGION
from benchmarks._small import MODELS
from tests.capture_model import BATCH, DIM, Function, check_well_formed, targets

pytestmark = pytest.mark.pure


def test_losses_are_found_where_models_put_them() -> None:
    def build(wrap: Callable[[torch.Tensor], Any]) -> nn.Module:
        model = nn.Linear(DIM, 1)
        forward = model.forward
        model.forward = lambda input: wrap(forward(input).mean())  # type: ignore[method-assign]
        return model

    x = (torch.randn(BATCH, DIM),)
    output = dataclasses.make_dataclass("Output", ["loss", "logits"])
    hashes = [
        program_hash(capture(build(wrap), x).program)
        for wrap in (lambda y: y, lambda y: {"loss": y}, lambda y: (y, 1), lambda y: output(y, None))
    ]
    hashes.append(program_hash(capture(nn.Linear(DIM, 1), x, loss=torch.mean).program))
    assert len(set(hashes)) == 1
    with pytest.raises(CaptureError, match="no loss to capture"):
        capture(nn.Linear(DIM, 1), x)
    with pytest.raises(CaptureError, match="loss= returned"):
        capture(nn.Linear(DIM, 1), x, loss=lambda y: y)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.unused = nn.Linear(2, 2)
        self.second = nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(DIM), requires_grad=False)

    def forward(self, batch: dict[str, Any], scale: float, mask: torch.Tensor | None = None) -> torch.Tensor:
        x, (y,) = batch["x"], batch["more"]
        x = self.second(self.first(x[:]).contiguous().to(torch.float32)) * self.frozen
        return F.mse_loss(F.dropout(x, 0.0) * scale, y)


class DeeplySupervised(nn.Module):
    """A loss after every layer, summed as Python does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.heads = (nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = torch.relu(layer(x) - 0)
            losses.append(F.mse_loss(head(x), y) * 0.5)
        return sum(losses)  # type: ignore[return-value]


def test_a_dtype_that_the_forward_asks_for_is_no_operator() -> None:
    class Promoted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).to(torch.promote_types(x.dtype, torch.float64)).mean()

    program = capture(Promoted(), (torch.randn(2, 4),)).program
    assert [op.target for op in program.ops] == ["aten.linear.default", "aten.to.dtype", "aten.mean.default"]


def test_what_is_made_in_another_default_dtype_has_that() -> None:
    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            thirds = torch.ones(4) / 3
            torch.set_default_dtype(before)
            return self.linear(x * thirds.float()).mean()

    program = capture(Exact(), (torch.randn(2, 4),)).program
    assert ("dtype", torch.float64) in next(op.kwargs for op in program.ops if op.target == "aten.ones.default")


def test_a_sum_that_begins_with_nothing_can_be_split_over_samples() -> None:
    program = capture(DeeplySupervised(), (torch.randn(BATCH, DIM), torch.randn(BATCH, DIM))).program
    assert not [op for op in program.ops if op.target in ("aten.add.Tensor", "aten.sub.Tensor") and 0 in op.args]
    assert split_into_moments(program, 2).body.types[program.loss].shape == ()


class Graph(nn.Module):
    """Nodes and edges: two inputs of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)

    def forward(self, nodes: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(nodes))
        x = x + torch.zeros_like(x).index_add(0, ends, x[begins])
        return F.cross_entropy(self.last(x), labels)


def test_of_equally_frequent_first_dims_that_with_which_more_is_cut_is_the_batch() -> None:
    edges, nodes = torch.randint(0, 6, (2, 20)), torch.randn(6, DIM)
    program = capture(Graph(), (nodes, *edges, torch.randint(0, 4, (6,)))).program
    assert (program.batch_size, program.notes) == (6, ())


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.left(a) @ self.right(b).T).square().mean()


def test_of_first_dims_that_cut_as_much_the_first_input_has_the_batch_and_it_is_said() -> None:
    program = capture(Rows(), (torch.randn(6, DIM), torch.randn(20, DIM))).program
    assert program.batch_size == 6
    assert program.notes == ("inputs: their first dims have the sizes 6, 20; 6 is taken to be the global batch",)


def test_inputs_are_found_by_path_and_parameters_by_name() -> None:
    batch = {"x": torch.randn(BATCH, DIM), "more": [torch.randn(BATCH, DIM)]}
    captured = capture(Nested(), {"batch": batch, "mask": None, "scale": 2.0})
    check_well_formed(captured)
    program = captured.program
    assert {i.path for i in program.inputs} == {("batch", "x"), ("batch", "more", 0)}
    assert ("scale",) in dict(program.constant_inputs) and dict(program.constant_inputs)[("scale",)] == 2.0
    assert program.batch_size == BATCH
    params = {p.fqn: p for p in program.params}
    assert params["first.weight"].aliases == ("second.weight",) and not params["frozen"].trainable
    assert set(params) == {"first.weight", "first.bias", "unused.weight", "unused.bias", "second.bias", "frozen"}
    assert targets(program) == ["linear", "linear", "mul", "mul", "mse_loss"]
    assert [op.module for op in program.ops[:2]] == ["first", "second"]
    assert all(op.source.startswith("test_capture.py:") for op in program.ops)
    positional = capture(Nested(), (batch, 2.0)).program
    assert {i.path for i in positional.inputs} == {(0, "x"), (0, "more", 0)} and positional.constant_inputs == (((1,), 2.0),)


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_mean_cross_entropy_becomes_sum_over_count(ignored: int, weighted: bool) -> None:
    classes = torch.rand(DIM) if weighted else None
    labels = torch.tensor([0, 2, 5, 1])
    labels[3] = ignored

    class Loss(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(super().forward(x), labels, weight=classes, ignore_index=ignored)

    captured = capture(Loss(DIM, DIM), (torch.randn(BATCH, DIM),))
    check_well_formed(captured)
    assert targets(captured.program)[-1] == "div" and "cross_entropy_loss" in targets(captured.program)
    labels[:] = ignored
    assert capture(Loss(DIM, DIM), (torch.randn(BATCH, DIM),), check=False).program.loss == captured.program.loss


# ---------------------------------------------------------------------------------------------------------- real models
def test_parametrised_weights_and_recurrent_layers() -> None:
    """Spectral norm writes its buffers with out=; recurrent layers are one operator each."""
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM)), nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)),
        nn.GRU(DIM, DIM, batch_first=True),
    )  # fmt: skip
    captured = capture(model, (torch.randn(BATCH, 3, DIM),), loss=lambda out: out[0].sum())
    check_well_formed(captured)
    assert len(captured.program.mutations) == 2 and "gru" in targets(captured.program)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [(8, 8, 1), (8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1)]
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
        self.blocks = nn.Sequential(*(Residual(*w) for w in widths))
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(x), labels, label_smoothing=0.1)


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    return ResNet(), {"images": torch.randn(BATCH, 3, 8, 8), "labels": torch.randint(10, (BATCH,))}


def hugging_face(name: str, **config: Any) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    model = cls(cls.config_class(vocab_size=64, **config))
    ids = torch.randint(64, (BATCH, 8))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids % 5 == 0, -100)}


HF = {
    "GPT2LMHeadModel": dict(n_embd=16, n_head=2, n_layer=3, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "LlamaForCausalLM": dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16
    ),
    "BertForMaskedLM": dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16,
    ),
    "T5ForConditionalGeneration": dict(d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0),
    "MixtralForCausalLM": dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, num_local_experts=4, output_router_logits=True,
    ),
}  # fmt: skip
BLOCKS = {
    "GPT2LMHeadModel": [3], "LlamaForCausalLM": [3], "BertForMaskedLM": [2], "T5ForConditionalGeneration": [2, 2],
    "MixtralForCausalLM": [2],
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_transformers(name: str) -> None:
    model, batch = hugging_face(name, **HF[name])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    captured = capture(model, batch)
    check_well_formed(captured)
    assert [len(b.spans) for b in captured.program.blocks] == BLOCKS[name]
    assert captured.program.batch_size == BATCH
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert getattr(model.config, "use_cache", True), "the user's config was changed"
    names = {p.fqn for p in captured.program.params} | {a for p in captured.program.params for a in p.aliases}
    assert names == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    with lift_to_float64():
        lifted = capture(to_float64(model), batch)
    assert program_hash(lifted.program) == program_hash(captured.program)
    assert [o.outputs for o in lifted.program.ops] == [o.outputs for o in captured.program.ops]
    assert all(t.dtype != torch.float32 for t in lifted.program.types.values())
    assert torch.float32 is not torch.float64 and torch.get_default_dtype() is torch.float32


def test_a_squeeze_says_which_dims_it_drops() -> None:
    """Where a rank or a micro-batch has one sample, a bare squeeze would drop the batch too."""
    x = torch.randn(BATCH, DIM)
    program = capture(Function(lambda self, x: (x * self.weight).sum(1, keepdim=True).squeeze().sum()), (x,)).program
    squeezes = [op for op in program.ops if op.target.startswith("aten.squeeze")]
    assert [(op.target, op.args[1]) for op in squeezes] == [("aten.squeeze.dims", (1,))]


def test_batch_norm_keeps_its_running_statistics() -> None:
    model, batch = resnet()
    captured = capture(model, batch)
    check_well_formed(captured)
    program = captured.program
    assert [len(b.spans) for b in program.blocks] == [3, 2]
    counters = {b.value for b in program.buffers if b.fqn and b.fqn.endswith("num_batches_tracked")}
    assert {b for b, _ in program.mutations} == counters and all(b.mutated for b in program.buffers)
    values = {k: v.detach().clone() for k, v in captured.tensors.items()} | {i.value: batch[i.path[0]] for i in program.inputs}
    torch.manual_seed(1)
    run_program(program, values)
    torch.manual_seed(1)
    model(**batch)
    state = model.state_dict()
    assert all(torch.allclose(values[b.value], state[b.fqn]) for b in program.buffers if b.fqn)
    model.eval()
    assert not any(b.mutated for b in capture(model, batch).program.buffers)


def test_names_of_modules_play_no_part() -> None:
    model, batch = resnet()

    class Renamed(ResNet):
        def __init__(self) -> None:
            super().__init__()
            for old, new in (("stem", "a"), ("blocks", "b"), ("head", "c")):
                setattr(self, new, self._modules.pop(old))

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.c(self.b(self.a(images)).mean((2, 3))), labels, label_smoothing=0.1)

    a, b = capture(model, batch).program, capture(Renamed(), batch).program
    assert program_hash(a) == program_hash(b) and [x.spans for x in a.blocks] == [x.spans for x in b.blocks]
    assert program_hash(a) != program_hash(capture(model, {k: v[:2] for k, v in batch.items()}).program)


def test_a_large_model_is_captured_on_meta() -> None:
    with torch.device("meta"):
        model, batch = hugging_face(
            "LlamaForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
            num_key_value_heads=8, tie_word_embeddings=False,
        )  # fmt: skip
    captured = capture(model, batch)
    check_well_formed(captured)
    assert all(t.is_meta for t in captured.tensors.values())
    assert len(captured.program.blocks[0].spans) == 2
    on_the_cpu = {name: torch.zeros_like(t, device="cpu") for name, t in batch.items()}
    assert program_hash(capture(model, on_the_cpu).program) == program_hash(captured.program)


def test_a_wrong_gradient_is_noticed() -> None:
    """The check does not depend on the passes: a program that was tampered with fails it."""
    from autopar.capture.calls import call_twice
    from autopar.capture.check import check_program
    from autopar.capture.state import State

    model, x = nn.Linear(DIM, DIM), torch.randn(BATCH, DIM)
    captured = capture(model, (x,), loss=torch.sum)
    linear, total = captured.program.ops
    stopped = dataclasses.replace(linear, target="aten.detach.default", args=(linear.args[2],), outputs=("stopped",))
    cut = dataclasses.replace(linear, args=(linear.args[0], linear.args[1], Ref("stopped")))
    wrong = captured.program.replace(ops=(stopped, cut, total))
    inputs = {captured.program.inputs[0].value: x}
    calls = call_twice(model, torch.sum, ((x,), {}), State.take(model, torch.sum), (model.weight, model.bias), compare=True)
    check_program(captured.program, calls, captured.tensors, inputs)
    with pytest.raises(CaptureError, match="gradients of bias differ"):
        check_program(wrong, calls, captured.tensors, inputs)


@pytest.mark.parametrize(
    "wrap,returns",
    [
        (lambda loss: loss, ""),
        (lambda loss: {"loss": loss, "more": loss}, "dict with keys ['loss', 'more']"),
        (lambda loss: (loss, loss), "tuple of 2"),
    ],
    ids=["loss", "dict", "tuple"],
)
def test_what_the_forward_returns_is_said(wrap: Any, returns: str) -> None:
    class Wrapped(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x).square().mean())

    assert capture(Wrapped(4, 4), (torch.randn(2, 4),)).returns.startswith(returns)
    assert bool(capture(Wrapped(4, 4), (torch.randn(2, 4),)).returns) == bool(returns)


def test_values_are_numbered_as_if_what_does_nothing_had_never_been_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 records contiguous() on one device where it records none on another."""

    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            for _ in range(4):
                x = (x * 2).mT.contiguous()
            return x.cos().sum()

    x = torch.randn(3, 5)
    asked: list[str] = []

    def first_and_third(op: Op, metas: Any, result: Any) -> bool:
        asked.extend([op.name] if op.target == normalise.CONTIGUOUS else [])
        return op.target == normalise.CONTIGUOUS and len(asked) in (1, 3)

    monkeypatch.setattr(normalise, "_does_nothing", first_and_third)
    captured = capture(Turned(5, 4), (x,))  # which compares
    assert asked == ["contiguous", "contiguous_1", "contiguous_2", "contiguous_3"]
    assert [op.name for op in captured.program.ops if op.target == normalise.CONTIGUOUS] == ["contiguous", "contiguous_1"]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_program_is_the_same_on_meta_where_plans_are_made_as_where_it_is_trained(name: str) -> None:
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, batch = MODELS[name]()
        found.append(capture(model, batch, check=False).program)
    assert found[0].types == found[1].types and program_hash(found[0]) == program_hash(found[1])


def gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(a) * torch.sigmoid(b)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        nn.init.zeros_(self.last.weight)
        with warnings.catch_warnings(action="ignore"):
            self.gate = torch.jit.script(gate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(4):
            h = self.gate(h, self.first(h))
        return self.last(h).square().mean()


def test_functions_of_torchscript_are_looked_into_however_often_they_have_run() -> None:
    model, x = Gated(), torch.ones(3, 4)
    for _ in range(4):
        model(x).backward()
    targets = [op.target for op in capture(model, (x,)).program.ops]
    assert targets.count("aten.tanh.default") == targets.count("aten.sigmoid.default") == 4
    assert REGION not in targets


class Coordinates(nn.Module):
    """As networks of coordinates are written: the loop differentiates by what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().detach().requires_grad_(True)
        return torch.sin(self.layer(x)), x


def test_a_leaf_that_the_forward_makes_and_returns_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)makes require a gradient.*test_capture.py.*before the call"):
        capture(Coordinates(), (torch.ones(3, 2),), outputs=None)
    found = capture(Coordinates(), (torch.ones(3, 2),), loss=lambda out: out[0].sum())
    assert found.program.ops
