"""A model of one function, and what every captured program is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autopar.capture import Captured
from autopar.capture.interpret import resolve
from autopar.ir import Program, refs

BATCH, DIM = 4, 6


class Function(nn.Module):
    """A parameter and a function of it and the input, summed to a loss."""

    def __init__(self, fn: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape or (BATCH, DIM)))
        self.register_buffer("state", torch.zeros(DIM))
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(self, x).pow(2).sum()


def targets(program: Program) -> list[str]:
    return [op.target.split(".")[1] for op in program.ops]


def check_well_formed(captured: Captured) -> None:
    """What later passes take for granted: single assignment, topological order, types and tensors for everything."""
    program = captured.program
    known = [x.value for x in (*program.inputs, *program.params, *program.buffers)]
    for op in program.ops:
        assert not resolve(op.target)._schema.is_mutable, op
        assert set(refs(op)) <= set(known), op
        made = [o for o in op.outputs if o is not None]
        assert made and not set(made) & set(known) and all(name.isidentifier() for name in made), op
        known += made
    assert set(program.types) == set(known)
    assert program.loss in known and program.types[program.loss].grad
    assert set(captured.tensors) == {x.value for x in (*program.params, *program.buffers)}
    for block in program.blocks:
        parts = [[o.target for o in program.ops[s.start : s.stop]] for s in block.spans]
        assert len(parts) >= 2 and all(p == parts[0] for p in parts)
