"""Explanations of models whose names are long: on 100 columns, with the user's own names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.planner import Pins, make_plan
from autopar.report.explanation import explanation_of
from autopar.report.tables import tables_text
from autopar.report.text import explanation_text
from cost_models.cluster import load_cluster

pytestmark = pytest.mark.pure


class LongNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections_of_the_encoder_of_the_teacher = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))
        self.normalisation_of_what_the_decoder_returns = nn.ModuleList(nn.LayerNorm(12) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in range(5):
            x = x + self.normalisation_of_what_the_decoder_returns[k](self.projections_of_the_encoder_of_the_teacher[k](x).cumsum(1))
        return x.square().mean()


@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_tables_of_a_model_with_long_names_are_of_100_columns(pins: dict[str, int]) -> None:
    with torch.device("meta"):
        captured = capture(LongNames(), (torch.empty(8, 12),))
    plan = make_plan(captured.program, 2, load_cluster("dgx-h100"), pins=Pins(**pins))
    text = f"{explanation_text(explanation_of(plan))}\n{tables_text(plan)}"
    assert "projections_of_the_encoder_of_the_teacher" in text
    assert "input 0" in text or "dp" not in pins
    assert max(map(len, text.splitlines())) <= 100, text
