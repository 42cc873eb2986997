"""nn.TransformerEncoder as torch evaluates it without gradients: zeros where padding is at the end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.around import as_called, capturing
from autopar.run.grad_mode import with_gradients

pytestmark = pytest.mark.pure


def _encoder(normed: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if normed else None).eval()


def _padded(*lengths: int, first: bool = False) -> Tensor:
    found = torch.arange(4) >= torch.tensor(lengths)[:, None]
    return found.flip(1) if first else found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("mask", [_padded(4, 2, 3), _padded(4, 2, 3, first=True), _padded(4, 4, 4)])
@pytest.mark.parametrize("floats", [True, False])
def test_what_is_captured_is_what_torch_computes(normed: bool, mask: Tensor, floats: bool) -> None:
    encoder, x = _encoder(normed), torch.randn(3, 4, 8)
    given = torch.zeros(mask.shape).masked_fill(mask, -torch.inf) if floats else mask
    for without in (True, False):
        with torch.set_grad_enabled(not without):
            expected = encoder(x, src_key_padding_mask=given)
            with with_gradients(), capturing() as around, torch.enable_grad(), as_called():
                found = encoder(x, src_key_padding_mask=given)
        torch.testing.assert_close(found, expected)
        assert around.asked
