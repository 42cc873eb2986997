"""Functions of torch's that are other ones for a while, by whatever name code has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.compiler import is_compiling
from torch.nn.functional import dropout

from autopar.capture import capture
from autopar.dropout import without_dropout
from autopar.run.recoded import answered_by, as_it_was

pytestmark = pytest.mark.pure


def plus(a: int, b: int = 2, *, c: int = 3) -> int:
    return a + b + c


added = plus


def test_it_answers_by_every_name_and_only_inside() -> None:
    own = as_it_was(plus)
    with answered_by(plus, lambda *args, **kwargs: (args, kwargs, own(*args, **kwargs))):
        assert added(1) == ((1,), {}, 6) and plus(1, 1, c=1) == ((1, 1), {"c": 1}, 3)
        with answered_by(plus, lambda *args, **kwargs: -1):
            assert added(1) == -1
        assert added(1) == ((1,), {}, 6)
    assert added(1) == plus(1) == 6
    assert "_autopar_plus" not in globals()


def test_after_an_error_it_is_as_before() -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise LookupError

    before = grad.__code__
    with pytest.raises(LookupError), answered_by(grad, fails):
        grad(torch.ones(()), [torch.ones(())])
    assert grad.__code__ is before
    x = torch.ones(3, requires_grad=True)
    assert grad((2 * x).sum(), x)[0].tolist() == [2, 2, 2]


def test_nothing_is_dropped_by_any_name() -> None:
    x = torch.ones(1000)
    with without_dropout():
        assert dropout(x, 0.5) is x and F.dropout(x, 0.5) is x and nn.Dropout(0.5)(x) is x
    assert (dropout(x, 0.5) == 0).any()


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return (h.exp() if is_compiling() else h.tanh()).sum()


def test_code_that_has_a_name_for_it_is_told_that_nothing_compiles() -> None:
    """On the meta device, where nothing is compared."""
    with torch.device("meta"):
        program = capture(Asking(), (torch.ones(2, 4),)).program
    targets = {op.target for op in program.ops}
    assert "aten.tanh.default" in targets and "aten.exp.default" not in targets
