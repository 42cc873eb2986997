"""Masks of attention that follow from sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.capture import capture, causal
from autopar.ir import Program

pytestmark = pytest.mark.pure

ROWS = 12
Mask = Callable[[Tensor], Tensor]


class Attends(nn.Module):
    def __init__(self, mask: Mask, keys: int = ROWS) -> None:
        super().__init__()
        self.mask, self.keys, self.q = mask, keys, nn.Linear(8, 8)
        self.register_buffer("written", torch.ones(ROWS, ROWS, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x)[:, None], x[:, None, : self.keys]
        return F.scaled_dot_product_attention(q, k, k, attn_mask=self.mask(x), dropout_p=0.0).square().mean()


def _ones(rows: int = ROWS, keys: int = ROWS) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool)


def _at(n: int = ROWS) -> Tensor:
    return torch.arange(n)


def _in_batches(x: Tensor) -> Tensor:
    """As transformers makes it: of positions that are indexed by the sample, and of sequences that are one each."""
    positions = _at()[None].expand(x.shape[0], -1)
    sample, row, key = torch.arange(x.shape[0])[:, None, None, None], _at()[None, None, :, None], _at()[None, None, None, :]
    sequence = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    one = sequence[sample, row] == sequence[sample, key]
    return positions.new_ones((), dtype=torch.bool) & one & (positions[sample, key] <= positions[sample, row])


CAUSAL: dict[str, Mask] = {
    "tril": lambda x: _ones().tril(),
    "not triu": lambda x: ~_ones().triu(1),
    "compared": lambda x: _at()[None, :] <= _at()[:, None],
    "compared the other way": lambda x: (_at()[:, None] >= _at()[None, :])[None, None].expand(x.shape[0], 1, -1, -1),
    "in batches": _in_batches,
    "of others": lambda x: (_at()[None, :] < _at()[:, None]) | (_at()[None, :] == _at()[:, None]),
    "far apart": lambda x: 3 * _at()[None, :] <= 3 * _at()[:, None] + 2,
}
NOTHING: dict[str, Mask] = {
    "ones": lambda x: _ones(),
    "compared": lambda x: _at()[None, :] < _at()[:, None] + ROWS,
    "expanded": lambda x: (torch.arange(x.shape[0]) >= 0)[:, None, None, None].expand(-1, 1, ROWS, ROWS),
}
OTHERS: dict[str, Mask] = {
    "window": lambda x: _ones().tril() & _ones().triu(-4),
    "strictly": lambda x: (_at()[None, :] < _at()[:, None]) | (_at()[:, None] == 0),
    "one more": lambda x: _at()[None, :] <= _at()[:, None] + 1,
    "one entry": lambda x: _ones().tril() & ~((_at()[None, :] == 3) & (_at()[:, None] == 7)),
    "backwards": lambda x: _at()[None, :] >= _at()[:, None],
    "one sample": lambda x: _ones().tril()[None, None] | (torch.arange(x.shape[0]) == 1)[:, None, None, None],
    "of the batch": lambda x: _ones().tril() & (x[:, None, None, :, 0] < 1e9),
    "numbers": lambda x: torch.zeros(ROWS, ROWS).masked_fill(~_ones().tril(), float("-inf")),
}


def attention_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[Program, list[tuple[bool, bool]]]:
    """Of each attention, whether it has a mask, and whether it is causal."""
    program = capture(model, inputs).program
    found = [op for op in program.ops if op.target == causal.ATTENTION]
    return program, [(len(op.args) > 3 and op.args[3] is not None, bool(op.args[5]) if len(op.args) > 5 else False) for op in found]


def of_mask(mask: Mask, keys: int = ROWS) -> list[tuple[bool, bool]]:
    return attention_of(Attends(mask, keys), {"x": torch.randn(4, ROWS, 8)})[1]


@pytest.fixture(params=["at once", "row by row"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "row by row":
        monkeypatch.setattr(causal, "SMALL", 100)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("name", CAUSAL)
def test_the_causal_mask_is_left_to_attention(name: str) -> None:
    assert of_mask(CAUSAL[name]) == [(False, True)]


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("name", NOTHING)
def test_what_masks_nothing_is_left_out(name: str) -> None:
    assert of_mask(NOTHING[name]) == [(False, False)]


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str) -> None:
    assert of_mask(OTHERS[name]) == [(True, False)]


def test_a_buffer_may_change() -> None:
    model = Attends(lambda x: model.written)
    assert attention_of(model, {"x": torch.randn(4, ROWS, 8)})[1] == [(True, False)]


def test_of_fewer_keys_than_queries_none_is_causal() -> None:
    """Attention would number both from 0: the same, but not what kernels agree on."""
    assert of_mask(lambda x: _ones(ROWS, 8).tril(), keys=8) == [(True, False)]
    assert of_mask(lambda x: _ones(ROWS, 8), keys=8) == [(False, False)]


def test_columns_and_rows_are_compared_in_order() -> None:
    for seed in range(300):
        torch.manual_seed(seed)
        column, row = torch.arange(6), torch.arange(6)
        column[torch.randint(6, ())] += torch.randint(-1, 2, ())
        row[torch.randint(6, ())] += torch.randint(-1, 2, ())
        exact = torch.equal(column[None, :] <= row[:, None], _ones(6, 6).tril())
        assert causal._at_most_as_far(column, row) == exact, (column, row)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_of_transformers_has_a_mask_only_where_it_is_given_one(device: str, padded: bool) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config)
    ids = torch.randint(1, 64, (4, 16))
    inputs = {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if padded else {})
    program, found = attention_of(model, inputs)
    assert found == [(padded, not padded)] * 2
    assert padded or not any("cumsum" in op.target for op in program.ops), "what made the mask is gone"
