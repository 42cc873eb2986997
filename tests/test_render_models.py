"""Whole models, captured, written as one stage, loaded and run: the loss and all gradients of the original."""

from __future__ import annotations

import copy
import functools
import re
import sys

import pytest
import torch
from torch import nn

from autopar.capture import Captured, capture
from autopar.ir import BlockCall, Lowered, Span, StageProgram
from autopar.render import load, render
from autopar.run.manifest import BufferSpec, InputSpec, Manifest, ParamSpec

pytestmark = pytest.mark.pure

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):  # missing, or built for another torch: transformers would fail on it, and is fine without
    sys.modules["torchvision"] = None  # type: ignore[assignment]

Batch = dict[str, torch.Tensor]


class Weights(dict):
    """Tensors by name, seen from a prefix."""

    def at(self, prefix: str) -> Weights:
        paths = prefix.split(", ")
        below = {path: {k.removeprefix(f"{path}."): v for k, v in self.items() if k.startswith(f"{path}.")} for path in paths}
        if len(paths) == 1:
            return Weights(below[prefix])
        return Weights({f"{number}.{k}": v for number, path in enumerate(paths) for k, v in below[path].items()})


class Mesh:
    device = torch.device("cpu")


def whole(captured: Captured, recompute: bool = False) -> tuple[Lowered, Manifest]:
    """The program as one stage on one rank."""
    program, tensors = captured.program, captured.tensors
    calls = tuple(
        BlockCall(span=span, block=b, instance=i, prefix=prefix, recompute=(Span(0, len(span)),) if recompute else ())
        for b, block in enumerate(program.blocks)
        for i, (span, prefix) in enumerate(zip(block.spans, block.prefixes, strict=True))
    )
    stage = StageProgram(index=0, ops=program.ops, receives=(), sends=(program.loss,), calls=calls, mutations=program.mutations)

    def facts(value: str) -> dict[str, object]:
        return {"shape": tuple(tensors[value].shape), "dtype": str(tensors[value].dtype).removeprefix("torch.")}

    manifest = Manifest(
        model=program.name,
        mesh={"pp": 1, "dp": 1, "tp": 1},
        micro_batches=1,
        schedule="1f1b",
        rest="zero0",
        params=tuple(ParamSpec(name=p.fqn, aliases=p.aliases, trainable=p.trainable, **facts(p.value)) for p in program.params),
        buffers=tuple(
            BufferSpec(name=b.fqn or b.value, persistent=b.persistent, constant=b.fqn is None, **facts(b.value)) for b in program.buffers
        ),
        inputs=tuple(
            InputSpec(name=i.value, path=i.path, shape=(t := program.types[i.value]).shape, dtype=str(t.dtype).removeprefix("torch."))
            for i in program.inputs
        ),
        constant_inputs=program.constant_inputs,
    )
    return Lowered(program=program, stages=(stage,)), manifest


@functools.cache
def captured_model(name: str) -> tuple[nn.Module, Batch, Captured]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model, batch, capture(model, batch, check=False)


def emitted_source(name: str, recompute: bool = False) -> str:
    """Run model and emitted module on the same weights; loss, every gradient and every buffer agree. The source."""
    model, batch, captured = captured_model(name)
    lowered, manifest = whole(captured, recompute)
    source = render(lowered, manifest)
    assert source == render(lowered, manifest)
    emitted = load(source)
    assert manifest == emitted.MANIFEST
    values = {k: v.detach().clone() for k, v in captured.tensors.items()}
    weights = Weights({p.fqn: values[p.value].requires_grad_(p.trainable) for p in captured.program.params})
    weights |= {b.fqn or b.value: values[b.value] for b in captured.program.buffers}
    stage = emitted.STAGES[0]()
    stage.weights, stage.mesh = weights, Mesh()
    by_path = {spec.path: spec.name for spec in emitted.MANIFEST.inputs}
    torch.manual_seed(1)
    (loss,) = stage(**{by_path[(k,)]: v for k, v in batch.items() if (k,) in by_path})
    loss.backward()
    original = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = original(**batch)
    expected = expected if isinstance(expected, torch.Tensor) else expected.loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for path, parameter in original.named_parameters():
        assert (weights[path].grad is None) == (parameter.grad is None), path
        if parameter.grad is not None:
            torch.testing.assert_close(weights[path].grad, parameter.grad, rtol=1e-5, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")
    for path, buffer in original.named_buffers():
        torch.testing.assert_close(weights[path], buffer)
    return source


def tokens(vocabulary: int, *, labels: bool = True, length: int = 12) -> Batch:
    ids = torch.randint(3, vocabulary, (4, length))
    masked = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    return {"input_ids": ids, "labels": masked} if labels else {"input_ids": ids}


def gpt2() -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=61, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    config.use_cache = False
    return GPT2LMHeadModel(config), tokens(61)


def bert() -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, intermediate_size=48, vocab_size=61, max_position_embeddings=16,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    batch = tokens(61)
    return BertForMaskedLM(config), {**batch, "attention_mask": (torch.arange(12) < torch.tensor([[12], [7], [9], [12]])).long()}


def llama() -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, vocab_size=61,
        max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokens(61)


def t5() -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=4, num_decoder_layers=4, d_model=32, d_kv=8, d_ff=48, num_heads=4, vocab_size=61, dropout_rate=0)
    config.use_cache, config.decoder_start_token_id, config.pad_token_id = False, 0, 0
    return T5ForConditionalGeneration(config), tokens(61)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + x)


class ConvNet(nn.Module):
    """Residual blocks with batch norm, and a buffer of its own that the forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(3)))
        self.head = nn.Linear(8, 5)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(images))
        pooled = nn.functional.adaptive_avg_pool2d(nn.functional.dropout(x, 0.1, self.training), 1).flatten(1)
        self.mean.mul_(0.9).add_(0.1 * pooled.mean(0).detach())
        return nn.functional.cross_entropy(self.head(pooled - self.mean), labels, label_smoothing=0.1)


def convnet() -> tuple[nn.Module, Batch]:
    return ConvNet(), {"images": torch.randn(4, 3, 12, 12), "labels": torch.tensor([0, 4, 2, 1])}


MODELS = {"gpt2": gpt2, "bert": bert, "llama": llama, "t5": t5, "convnet": convnet}


@pytest.mark.parametrize("name", MODELS)
def test_emitted_model_is_the_model(name: str) -> None:
    source = emitted_source(name)
    assert max(map(len, source.splitlines())) <= 120
    assert source.count("def block_") <= 2, "one function for each distinct block"


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_recompute_changes_nothing(name: str) -> None:
    assert re.search(r"recompute\(\s*(#.*\s*)?block_0", emitted_source(name, recompute=True))
