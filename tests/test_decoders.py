"""The rebuilt decoders compute what their names say."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks._decoders import Decoder, build, decoder

pytestmark = pytest.mark.pure

DIMS = Decoder(
    layers=2, hidden=16, heads=2, kv_heads=2, ffn=32, vocabulary=64, length=8, tied=True, gated=False, norm="layer", bias=True,
    positions="learned", experts=4,
)  # fmt: skip


def test_tokens_go_to_the_two_experts_of_the_largest_shares_until_these_are_full() -> None:
    """Each expert takes 2 x 8 / 4 tokens of a sample: first those of which it is the first choice, in their order, then the others."""
    torch.manual_seed(0)
    mlp = build(DIMS).layers[1].mlp  # type: ignore[index, union-attr]
    for p in mlp.parameters():  # type: ignore[union-attr]
        torch.nn.init.normal_(p, std=0.5)
    x = torch.randn(3, 8, 16)
    shares = mlp.gate(x).softmax(-1)  # type: ignore[union-attr, operator]
    expected, dropped = torch.zeros_like(x), 0
    for b in range(3):
        taken = [0] * 4
        for choice in range(2):
            for t in range(8):
                e = int(shares[b, t].topk(2).indices[choice])
                taken[e] += 1
                if taken[e] <= 4:
                    made = (x[b, t] @ mlp.up_EHF[e]).relu() @ mlp.down_EFH[e]  # type: ignore[union-attr, index]
                    expected[b, t] += shares[b, t, e] * made
                else:
                    dropped += 1
    assert dropped > 0
    torch.testing.assert_close(mlp(x), expected)  # type: ignore[operator]


def test_every_second_layer_has_experts() -> None:
    model = decoder(DIMS, torch.float16)
    sizes = {name: p.shape for name, p in model.named_parameters()}
    assert sizes["layers.1.mlp.up_EHF"] == (4, 16, 32) and "layers.0.mlp.up_EHF" not in sizes
    assert sizes["layers.0.mlp.up.weight"] == (32, 16)


def test_a_fused_loss_keeps_logits_in_their_dtype() -> None:
    for fused in (False, True):
        dims = dataclasses.replace(DIMS, experts=0, fused_loss=fused)
        ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
        assert decoder(dims, torch.bfloat16)(ids, ids).dtype == (torch.bfloat16 if fused else torch.float32)
