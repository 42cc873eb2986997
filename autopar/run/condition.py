"""What a model's forward asks of a value in every step, where it raises if the answer is another one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Condition"]


class Condition(nn.Module):
    """expected: the answer with which the forward goes on; line: of the model's source, which asks. counts: the value is the number of
    elements that speak against it."""

    def __init__(self, expected: bool, line: str, *, counts: bool = False) -> None:
        super().__init__()
        self.expected, self.line, self.counts = expected, line, counts

    def forward(self, value: Tensor) -> Tensor:
        """True as a tensor []. RuntimeError if the answer is another one."""
        if bool(value) != (self.expected and not self.counts):
            raise RuntimeError(
                f"the model raises: {self.line} (the value that it asks for is {not self.expected})\n  what to do: look for what it guards "
                f"against in this batch, or in the weights"
            )
        return torch.ones((), dtype=torch.bool, device=value.device)
