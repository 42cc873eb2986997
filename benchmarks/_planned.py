"""The models that `planner` plans: their published sizes, the global batch, and the GPUs that they are planned for.

Everything is built on the meta device in bfloat16. Language models, ViT, Swin and Whisper are transformers' classes with the fields of
the config.json that they are published with; sizes of unpublished weights are from the papers that are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks._transformers import load_transformers

__all__ = ["DEFAULT", "MODELS", "Model", "build"]

LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
MIXTRAL = {"vocab_size": 32000, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6}
Inputs = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """kind: a class of transformers, or a function that returns a module. config: the class's config. inputs: of batch and sizes.
    gpus, cluster: what it is planned for unless something else is asked for; memory_gib: of a GPU, where that is less than there is.
    layers: the config's field that counts them."""

    kind: str | Callable[[], Any]
    batch: int
    inputs: Callable[[int], Inputs]
    gpus: int
    cluster: str = "dgx-h100"
    memory_gib: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ()


def _tokens(length: int) -> Callable[[int], Inputs]:
    """Token ids and labels, int64 [batch, length]."""

    def inputs(batch: int) -> Inputs:
        import torch

        tokens = torch.zeros(batch, length, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    return inputs


def _images(name: str, size: int) -> Callable[[int], Inputs]:
    """Images [batch, 3, size, size] and their classes, int64 [batch]."""

    def inputs(batch: int) -> Inputs:
        import torch

        return {name: torch.zeros(batch, 3, size, size), "labels": torch.zeros(batch, dtype=torch.int64)}

    return inputs


def _speech(batch: int) -> Inputs:
    """Whisper's: log-mel spectrograms of 30 s [batch, 80, 3000], and text of 448 tokens."""
    import torch

    return {"input_features": torch.zeros(batch, 80, 3000), "labels": torch.zeros(batch, 448, dtype=torch.int64)}


def _latents(batch: int) -> Inputs:
    """Stable Diffusion XL's: latents of 1024 x 1024 images, times, text of 77 tokens, pooled text and sizes."""
    import torch

    latents = torch.zeros(batch, 4, 128, 128)
    return {
        "latents": latents, "time": torch.zeros(batch, dtype=torch.int64), "text": torch.zeros(batch, 77, 2048),
        "pooled": torch.zeros(batch, 2816), "noise": torch.zeros_like(latents),
    }  # fmt: skip


def _resnet(**shape: Any) -> Callable[[], Any]:
    def built() -> Any:
        from benchmarks._cnns import ResNet

        return ResNet(bottleneck=True, **shape).build()

    return built


def _densenet() -> Any:
    from benchmarks._cnns import DenseNet

    return DenseNet(blocks=(6, 12, 24, 16), growth=32, stem=64).build()  # DenseNet-121


def _dense_experts() -> Any:
    from benchmarks._unlike import DenseExperts

    return DenseExperts()


def _unet() -> Any:
    from benchmarks._unets import UNet, Unet

    return UNet(Unet())


def _gpt2(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, **more}


def _llama(width: int, ffn: int, layers: int, heads: int, base: Mapping[str, Any] = LLAMA3) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**base, **sizes}


MEGATRON = {"n_positions": 2048, "vocab_size": 51200}
MODELS = {
    "gpt2": Model(kind="GPT2LMHeadModel", batch=64, inputs=_tokens(1024), gpus=8, config=_gpt2(768, 12, 12), layers=("n_layer",)),
    "gpt2-xl": Model(kind="GPT2LMHeadModel", batch=64, inputs=_tokens(1024), gpus=64, config=_gpt2(1600, 48, 25), layers=("n_layer",)),
    "llama3-8b": Model(
        kind="LlamaForCausalLM", batch=128, inputs=_tokens(8192), gpus=64, config=_llama(4096, 14336, 32, 32), layers=("num_hidden_layers",)
    ),
    "llama3-70b": Model(
        kind="LlamaForCausalLM", batch=512, inputs=_tokens(8192), gpus=512, config=_llama(8192, 28672, 80, 64),
        layers=("num_hidden_layers",),
    ),
    # arXiv 2104.04473, section 5: the GPT of 175 billion parameters, and of a trillion (table 1)
    "gpt3-175b": Model(
        kind="GPT2LMHeadModel", batch=1536, inputs=_tokens(2048), gpus=1024, cluster="dgx-a100",
        config=_gpt2(12288, 96, 96, **MEGATRON), layers=("n_layer",),
    ),
    "gpt-1t": Model(
        kind="GPT2LMHeadModel", batch=3072, inputs=_tokens(2048), gpus=3072, cluster="dgx-a100",
        config=_gpt2(25600, 128, 160, **MEGATRON), layers=("n_layer",),
    ),
    "mixtral-8x7b": Model(
        kind="MixtralForCausalLM", batch=64, inputs=_tokens(4096), gpus=64,
        config=_llama(4096, 14336, 32, 32, MIXTRAL | {"max_position_embeddings": 32768}), layers=("num_hidden_layers",),
    ),
    "mixtral-8x22b": Model(
        kind="MixtralForCausalLM", batch=256, inputs=_tokens(4096), gpus=256,
        config=_llama(6144, 16384, 56, 48, MIXTRAL | {"vocab_size": 32768, "max_position_embeddings": 65536}),
        layers=("num_hidden_layers",),
    ),
    "t5-11b": Model(
        kind="T5ForConditionalGeneration", batch=64, inputs=_tokens(512), gpus=16,
        config={"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128, "decoder_start_token_id": 0},
        layers=("num_layers", "num_decoder_layers"),
    ),
    # every second layer attends to a window; of Llama 4's text model three of four
    "gemma2-9b": Model(
        kind="Gemma2ForCausalLM", batch=256, inputs=_tokens(4096), gpus=64,
        config={
            "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096,
        },
        layers=("num_hidden_layers",),
    ),
    "gpt-oss-120b": Model(
        kind="GptOssForCausalLM", batch=256, inputs=_tokens(4096), gpus=64,
        config={
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
        },
        layers=("num_hidden_layers",),
    ),
    "llama4-scout": Model(
        kind="Llama4ForCausalLM", batch=256, inputs=_tokens(4096), gpus=64,
        config={
            "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1,
            "vocab_size": 202048,
        },
        layers=("num_hidden_layers",),
    ),
    # arXiv 2302.05442, table 1; its parallel layers and normalised queries and keys are those of ViT-L here
    "vit-22b": Model(
        kind="ViTForImageClassification", batch=4096, inputs=_images("pixel_values", 224), gpus=512,
        config={
            "hidden_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 48, "intermediate_size": 24576, "patch_size": 14,
            "num_labels": 1000,
        },
        layers=("num_hidden_layers",),
    ),
    "resnet-152": Model(kind=_resnet(blocks=(3, 8, 36, 3)), batch=2048, inputs=_images("images", 224), gpus=64),
    # Alpa's wide ResNet of a billion parameters (arXiv 2201.12023, section 8.1; its benchmark's "1B": 50 layers, 320 channels, width 2)
    "wide-resnet-1b": Model(kind=_resnet(blocks=(3, 4, 6, 3), base=320, middle=2), batch=1536, inputs=_images("images", 224), gpus=64),
    "swin-l": Model(
        kind="SwinForImageClassification", batch=256, inputs=_images("pixel_values", 224), gpus=8,
        config={"embed_dim": 192, "depths": [2, 2, 18, 2], "num_heads": [6, 12, 24, 48], "window_size": 7, "num_labels": 1000},
    ),
    "unet": Model(kind=_unet, batch=64, inputs=_latents, gpus=8),
    "whisper-large": Model(
        kind="WhisperForConditionalGeneration", batch=64, inputs=_speech, gpus=8,
        config={
            "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20, "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "vocab_size": 51865,
        },
        layers=("encoder_layers", "decoder_layers"),
    ),
    # whose layers differ, so that none stands for another, where memory is short
    "densenet-121": Model(kind=_densenet, batch=256, inputs=_images("images", 224), gpus=8, cluster="dgx-a100", memory_gib=3.5),
    "dense-experts": Model(kind=_dense_experts, batch=16, inputs=_tokens(256), gpus=24, cluster="rtx4090-8x", memory_gib=1.0),
}  # fmt: skip
DEFAULT = tuple(name for name in MODELS if name not in ("gpt2-xl", "mixtral-8x7b", "gemma2-9b", "gpt-oss-120b", "llama4-scout"))


def build(model: Model, layers: int | None = None) -> tuple[Any, Inputs]:
    """The model and its global batch, on the meta device and in bfloat16. layers: of another depth than its own."""

    with _on_meta():
        inputs = model.inputs(model.batch)
        if not isinstance(model.kind, str):
            return model.kind().train(), inputs
        cls = getattr(load_transformers(), model.kind)
        deeper = {} if layers is None else dict.fromkeys(model.layers, layers)
        config = cls.config_class(**{**model.config, **deeper})
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return cls(config).train(), inputs


@contextmanager
def _on_meta() -> Iterator[None]:
    import torch

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(default)
