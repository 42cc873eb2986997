"""The models of `one_gpu`: of many kinds, each a step of tens to hundreds of milliseconds on one large GPU.

They are built on the device that they run on: what initialises them takes long elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks import _cnns, _small
from benchmarks._decoders import Decoder
from benchmarks._decoders import build as decoder

__all__ = ["MODELS", "MORE", "RANKS", "build"]

Made = tuple[nn.Module, dict[str, Tensor]]

_GPT = Decoder(
    layers=12, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocabulary=50304, length=1024, tied=True, gated=False, norm="layer", bias=True,
    positions="learned",
)  # fmt: skip
_LLAMA = Decoder(
    layers=8, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocabulary=32000, length=2048, tied=False, gated=True, norm="rms", bias=False,
    positions="rotary",
)  # fmt: skip


def _tokens(batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (batch, length))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def _decoder(dims: Decoder, batch: int) -> Callable[[], Made]:
    return lambda: (decoder(dims), _tokens(batch, dims.length, dims.vocabulary))


def _images(batch: int, size: int, classes: int = 10) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 3, size, size), "y": torch.randint(classes, (batch,))}


def _pair(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape), "y": torch.randn(*shape)}


def _resnet() -> Made:
    images = _images(128, 224, 1000)
    return _cnns.ResNet(blocks=(3, 4, 6, 3), bottleneck=True).build(), {"images": images["x"], "labels": images["y"]}


def _of_transformers() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8}
    ids = torch.randint(32000, (8, 2048))
    return LlamaForCausalLM(LlamaConfig(vocab_size=32000, use_cache=False, **sizes)), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], Made]] = {
    "gpt": _decoder(_GPT, 16),
    "gpt with dropout": _decoder(replace(_GPT, dropout=0.1), 16),
    "llama": _decoder(_LLAMA, 8),
    "long": _decoder(replace(_LLAMA, layers=4, hidden=1024, heads=16, kv_heads=16, ffn=4096, length=16384), 1),
    "short": _decoder(replace(_GPT, hidden=768, heads=12, kv_heads=12, ffn=3072, length=64), 256),
    "tiny": _decoder(replace(_GPT, layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, vocabulary=512, length=128), 8),
    "encoder": lambda: (_small.Encoder(30528, 1024, 12), _tokens(32, 512, 30528)),
    "encoder-decoder": lambda: (_small.EncoderDecoder(32128, 768, 6), _tokens(16, 512, 32128)),
    "experts": lambda: (_small.Experts(1024, 8, 4), _pair(8, 1024, 1024)),
    "resnet": _resnet,
    "unet": lambda: (_small.UNet(128), _pair(16, 3, 256, 256)),
    "vit": lambda: (_small.Vit(1024, 12), _images(32, 224)),
    "state-space": lambda: (_small.StateSpace(1024, 8, 1024), _pair(8, 1024, 1024)),
    "wide": lambda: (_small.Mlp(8192, 4), _pair(4096, 8192)),
    "deep": lambda: (_small.Mlp(1024, 64), _pair(4096, 1024)),
}

MORE: dict[str, Callable[[], Made]] = {"llama of transformers": _of_transformers}
"""What runs where it is named, and has not been measured yet."""

RANKS: dict[str, Callable[[], Made]] = {
    "llama of 4096 channels": _decoder(replace(_LLAMA, hidden=4096, kv_heads=32, ffn=11008, length=4096), 16),
    "gpt of 2048 channels": _decoder(replace(_GPT, layers=24, hidden=2048, heads=16, kv_heads=16, ffn=8192, length=2048), 16),
}
"""Of which one rank is run at a time: the global batch is that of eight GPUs."""


def build(name: str, device: str) -> Made:
    """The model and its global batch on a device; on 'meta' to be planned."""
    torch.manual_seed(0)
    with torch.device(device):
        return {**MODELS, **MORE, **RANKS}[name]()
