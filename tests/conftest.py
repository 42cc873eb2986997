"""Fixtures that more than one test file uses. Markers (pure, fake, gloo, gpu) are described in pyproject.toml."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: several workers share the cores
os.environ["AUTOPAR_CACHE"] = "off"  # every test plans itself
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may load anything from a network

import hypothesis
import pytest
import torch

from benchmarks._forked import begin

logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]  # each export would be written out

hypothesis.settings.register_profile("without a clock", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("without a clock")

if TYPE_CHECKING:
    from autopar.run.launch import WorkerPool
    from benchmarks._traps_run import Judge

GOLDEN = Path(__file__).parent / "golden"
LONG = (
    "test_run_launch.py", "test_checkpoint.py", "test_parts.py", "test_autocast.py", "test_verify.py", "test_local_batches.py",
    "test_examples.py", "test_trainer.py", "test_training_tools.py", "test_faults.py", "test_torchrun_faults.py", "test_soundness.py",
    "test_terminal.py", "test_traps.py", "test_planner_bounds.py", "test_blocks.py",
)  # fmt: skip
KINDS = ("pure", "fake", "gloo", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing with them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)  # workers take files in this order: none ends with a long one
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            raise pytest.UsageError(f"{item.nodeid} says not what it needs: mark it with one of {', '.join(KINDS)}")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Workers are forked with what nearly all of them would import."""
    if item.get_closest_marker("gloo"):
        begin()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same random numbers, whatever ran before it."""
    from autopar import generators

    generators.seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): the text equals tests/golden/NAME; with --update-golden the file is written instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing; make it with: pytest --update-golden {request.node.nodeid}"
        assert text == path.read_text(encoding="utf-8"), f"differs from {path}; if that is meant: pytest --update-golden"

    return check


@pytest.fixture
def fake_group() -> Iterator[Callable[..., None]]:
    """fake_group(world_size, rank=0): torch.distributed in which collectives return at once and move nothing."""
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(world_size: int, rank: int = 0) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Four gloo workers that stay up for the whole session: importing torch in each must not be the cost of each test."""
    from autopar.run.launch import WorkerPool

    pool = WorkerPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    """Two workers, gloo where there are no GPUs, that stay up for a test file."""
    from autopar.run.launch import WorkerPool

    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Compares the programs of `benchmarks/trap_programs` with what they do on one process."""
    from benchmarks._traps_run import Judge

    with Judge(limit_s=300) as judge:
        yield judge
