"""Real architectures at tiny sizes, for `verify_matrix` and the tests: callables that return (model, inputs[, loss]).

Batches of 24 divide by 2, 3, 4 and into 4 micro-batches on 2 ranks. Labels of language models have ignored entries (-100), many in
the first samples and few in the last, so that no two ranks or micro-batches count the same number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from benchmarks._transformers import load_transformers

__all__ = ["NAMES"]

BATCH, LENGTH, VOCABULARY = 24, 16, 96
NAMES = ("gpt2", "llama", "bert", "t5", "vit", "resnet", "mixtral", "mamba", "mlp", "scaled", "unet", "unruled")

Inputs = dict[str, Tensor]


def _tokens(batch: int = BATCH, length: int = LENGTH) -> Inputs:
    """Token ids and labels [batch, length]; of sample b, a share of labels that falls with b is -100."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (batch, length))
    ignored = torch.rand(batch, length) < torch.linspace(0.9, 0.05, batch)[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


def _seeded(model: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    built: nn.Module = model(config)
    return built.train()


def gpt2() -> tuple[nn.Module, Inputs]:
    """Tied embeddings."""
    t = load_transformers()
    config = t.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _seeded(t.GPT2LMHeadModel, config), _tokens()


def llama() -> tuple[nn.Module, Inputs]:
    """Two heads of keys and values for four of queries."""
    t = load_transformers()
    config = t.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return _seeded(t.LlamaForCausalLM, config), _tokens()


def bert() -> tuple[nn.Module, Inputs]:
    t = load_transformers()
    config = t.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    inputs = {"input_ids": _tokens()["input_ids"], "labels": torch.arange(BATCH) % 4}
    return _seeded(t.BertForSequenceClassification, config), inputs


def t5() -> tuple[nn.Module, Inputs]:
    """The encoder's output is read by every decoder layer; the relative position bias is shared by layers."""
    t = load_transformers()
    config = t.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return _seeded(t.T5ForConditionalGeneration, config), _tokens()


def vit() -> tuple[nn.Module, Inputs]:
    t = load_transformers()
    config = t.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4, num_labels=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _seeded(t.ViTForImageClassification, config), _images(16)


def resnet() -> tuple[nn.Module, Inputs]:
    """Batch norm, so that micro-batches would change the result."""
    t = load_transformers()
    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=4)
    return _seeded(t.ResNetForImageClassification, config), _images(32)


def _images(size: int) -> Inputs:
    torch.manual_seed(1)
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.arange(BATCH) % 4}


def mixtral() -> tuple[nn.Module, Inputs]:
    """Routed experts, with the load-balancing loss."""
    t = load_transformers()
    config = t.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH, output_router_logits=True, use_cache=False,
    )  # fmt: skip
    return _seeded(t.MixtralForCausalLM, config), _tokens()


def mamba() -> tuple[nn.Module, Inputs]:
    t = load_transformers()
    config = t.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4, use_mambapy=False, use_cache=False
    )
    return _seeded(t.MambaForCausalLM, config), _tokens(length=8)


def mlp() -> tuple[nn.Module, tuple[Tensor], Any]:
    """A plain nn.Sequential that returns logits; the loss is given apart."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(32, 8))
    return model, (torch.randn(BATCH, 32),), mean_square


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


class _Scaled(nn.Module):
    """A branch that grows fainter from layer to layer, as by stochastic depth in the mean."""

    def __init__(self, width: int, keep: float) -> None:
        super().__init__()
        self.norm, self.keep = nn.LayerNorm(width), keep
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(self.norm(x))).mul(self.keep) @ self.down.weight.T / (0.3 + self.keep / 2) + self.down.bias


def scaled() -> tuple[nn.Module, tuple[Tensor], Any]:
    """Layers that differ in constants alone."""
    torch.manual_seed(0)
    layers = [_Scaled(32, 0.95 - 0.1 * k) for k in range(6)]
    return nn.Sequential(nn.Linear(32, 32), *layers, nn.Linear(32, 8)), (torch.randn(BATCH, 32),), mean_square


class _Double(nn.Sequential):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__(
            nn.Conv2d(ins, outs, 3, padding=1), nn.GroupNorm(4, outs), nn.SiLU(),
            nn.Conv2d(outs, outs, 3, padding=1), nn.GroupNorm(4, outs), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Two levels down and up; what each level computes on the way down is read on the way up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = _Double(3, width)
        self.down = nn.ModuleList([_Double(width, 2 * width), _Double(2 * width, 4 * width)])
        self.lift = nn.ModuleList([nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in (2 * width, width)])
        self.up = nn.ModuleList([_Double(4 * width, 2 * width), _Double(2 * width, width)])
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.enter(image)
        skips = []
        for level in self.down:
            skips.append(x)
            x = level(F.max_pool2d(x, 2))
        for lift, level in zip(self.lift, self.up, strict=True):
            x = level(torch.cat([lift(x), skips.pop()], dim=1))
        return F.mse_loss(self.leave(x), target)


def unet() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return UNet(), {"image": torch.randn(BATCH, 3, 16, 16), "target": torch.randn(BATCH, 3, 16, 16)}


@library.custom_op("benchmark_models::softcap", mutates_args=())
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), as an operator that no rule knows."""
    return cap * torch.tanh(x / cap)


@softcap.register_fake
def _(x: Tensor, cap: float) -> Tensor:
    return torch.empty_like(x)


def _softcap_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (out,) = ctx.saved_tensors
    return grad * (1 - (out / ctx.cap) ** 2), None


def _softcap_setup(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.cap = inputs[1]


softcap.register_autograd(_softcap_backward, setup_context=_softcap_setup)


class Unruled(nn.Module):
    """A network with an operator of its own in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.after = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.after(softcap(self.before(x), 2.0)), labels)


def unruled() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return Unruled(), {"x": torch.randn(BATCH, 32), "labels": torch.arange(BATCH) % 8}
