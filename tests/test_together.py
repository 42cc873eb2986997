"""Ranks that prepare the same thing end it alike, whatever one of them ends with."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autopar.errors import AutoparError, Infeasible
from autopar.run import WorkerPool
from autopar.run.together import decided_by_rank_0, done_by_all

pytestmark = pytest.mark.gloo


def _raised(kind: type[Exception], at: int, decided: bool) -> tuple[str, str]:
    def make() -> bytes:
        if dist.get_rank() == at:
            raise kind("broken on purpose")
        return b"made"

    try:
        _ = decided_by_rank_0(make) if decided else done_by_all(make, same=str, what="preparing")
    except (AssertionError, KeyError, ValueError, AutoparError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("kind", [AssertionError, KeyError, Infeasible, ValueError])
def test_what_rank_0_ends_with_ends_all(kind: type[Exception], workers: WorkerPool) -> None:
    first, *others = workers.run(_raised, kind, 0, True, timeout_s=60.0)
    text = str(kind("broken on purpose"))
    assert first == (kind.__name__, text)
    told = "LaunchError", f"planning failed on rank 0: {kind.__name__}: {text}"
    assert others == [first if kind in (Infeasible, ValueError) else told] * 3


def test_what_one_rank_ends_with_ends_all(workers: WorkerPool) -> None:
    found = workers.run(_raised, AssertionError, 2, False, timeout_s=60.0)
    assert found.pop(2) == ("AssertionError", "broken on purpose")
    assert found == [("LaunchError", "preparing failed on rank 2: AssertionError: broken on purpose")] * 3
