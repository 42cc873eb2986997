"""Lists to which a forward or a hook appends, and numbers that it keeps of tensors, are after a call what they are on one process; what is
read of them is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from benchmarks._traps import PROGRAMS
from benchmarks._traps_run import Judge

pytestmark = pytest.mark.gloo

READ = {
    "list_of_which_the_last_is_used": "changes seen from list of 2 to list of 3",
    "list_of_which_the_length_is_asked": "changes seen from list of 1 to list of 2",
    "list_in_a_checkpoint": "changes seen from list of 1 to list of 2",
}
RIGHT = sorted(name for name, program in PROGRAMS.items() if program.kind == "appended" and name not in READ)
IN_ONE_PIECE = ("numbers_of_each_call",)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_kept_is_that_of_one_process(name: str, judge: Judge) -> None:
    plans = ("dp2", "zero3", *(() if name in IN_ONE_PIECE else ("pp2",)), *PROGRAMS[name].plans)
    assert judge.not_right(name, plans) == []


@pytest.mark.parametrize("name", sorted(READ))
def test_what_the_forward_reads_is_refused(name: str, judge: Judge) -> None:
    (found,) = judge.outcomes(name, ("dp2",))
    assert found.outcome == "refused" and READ[name] in found.reason


class Keeping(nn.Module):
    """Appends a tensor and a number; outside is a list that it reaches by a hook."""

    def __init__(self, outside: list[Any]) -> None:
        super().__init__()
        self.layer, self.log = nn.Linear(4, 4), ["begun"]
        self.layer.register_forward_hook(lambda module, args, output: outside.append(output.detach().sum().item()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.log.append(h.detach())
        return h.square().mean()


def test_capture_leaves_lists_as_they_were() -> None:
    outside: list[Any] = [1.0]
    model = Keeping(outside)
    log = model.log
    found = capture(model, (torch.randn(3, 4),), outputs=True)
    assert model.log is log and log == ["begun"] and outside == [1.0]
    assert len(found.program.outputs) == 2


class Asking(nn.Module):
    """Reads its list where it may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.log = nn.Linear(4, 4), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.log.append(h.detach())
        with contextlib.suppress(TypeError):
            h = h / len(self.log)
        return h.square().mean()


def test_a_list_that_is_read_where_that_may_fail_is_read() -> None:
    with pytest.raises(CaptureError, match="changes log from list of 1 to list of 2"):
        capture(Asking(), (torch.randn(3, 4),), outputs=True)


def test_a_list_of_the_loop_needs_its_outputs() -> None:
    with pytest.raises(CaptureError, match="compile with outputs='all', which leaves tensors there"):
        capture(Keeping([]), (torch.randn(3, 4),))
