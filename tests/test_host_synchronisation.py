"""A step waits for no value on the device: nothing of it is read by the host, and no shape depends on values.

A host that reads a value of a GPU (`.item()`, `if tensor:`, `nonzero`) waits until all before it is computed, and then launches into an
empty queue. On the CPU the same reads are seen as operators and as methods of tensors, and are counted here from the fourth step on: the
first ones compare what ranks are given.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.ir import S
from autopar.run import WorkerPool, alike, random_numbers
from autopar.run.batches import _Coming
from autopar.run.collectives import _shared
from autopar.run.mesh import Mesh
from autopar.run.slices import cut_spans, local_slice

WORDS, WIDTH, LENGTH = 32, 16, 8
READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive", "is_nonzero"}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2, "micro_batches": 2}, "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3, "recompute": "full"},
}  # fmt: skip


class Reads(TorchDispatchMode):
    """What was read, by the name of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        of_generator = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.uint8  # the state of the host's
        if func.overloadpacket.__name__ in READ and not of_generator:
            self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-1)


def step_of(pins: dict[str, Any], precision: str) -> tuple[dict[str, int], dict[str, int]]:
    """What the fourth step reads; and what a step reads that asks for the loss and for whether it is finite."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (8, LENGTH))
    model = autopar.compile(Language(), gpus=2, cluster="cpu", pins=pins, example_inputs=(ids, ids), precision=precision)
    for _ in range(3):
        model(ids, ids).backward()
        model.zero_grad()
    noted = Reads()
    with counting(noted):
        model(ids, ids).backward()
        model.clip_grad_norm_(1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        first = dict(noted.found)
        if model(ids, ids).isfinite():
            noted.found["asked"] += 1
    return first, dict(noted.found - Counter(first))


@contextlib.contextmanager
def counting(noted: Reads) -> Iterator[None]:
    """Counts reads; not those of agreements between hosts, of the process's generator, and of numbers that hosts compare: they are on the
    CPU on any machine, and of a GPU none is compared, or only when it is there (tests/test_alike.py, tests/test_batches.py)."""

    def uncounted(owner: Any, name: str) -> Any:
        plain = getattr(owner, name)

        def function(*args: Any) -> Any:
            before = Counter(noted.found)
            found = plain(*args)
            noted.found = before
            return found

        return mock.patch.object(owner, name, function)

    def counted(name: str) -> Any:
        plain = getattr(Tensor, name)

        def method(self: Tensor, *args: Any) -> Any:
            noted.found[f"Tensor.{name}"] += 1
            return plain(self, *args)

        return mock.patch.object(Tensor, name, method)

    with contextlib.ExitStack() as stack:
        for name in ("tolist", "cpu", "numpy"):
            stack.enter_context(counted(name))
        for owner, name in ((Mesh, "agree_numbers"), (random_numbers, "_state"), (alike, "_number"), (_Coming, "two")):
            stack.enter_context(uncounted(owner, name))
        stack.enter_context(noted)
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.gloo
@pytest.mark.parametrize(("plan", "precision"), [*((plan, "fp32") for plan in PLANS), ("zero3", "bf16")])
def test_a_step_reads_nothing(pool: WorkerPool, plan: str, precision: str) -> None:
    for found, asked in pool.run(step_of, PLANS[plan], precision):
        assert found == {}
        assert asked["asked"] == 1 and asked["_local_scalar_dense"] >= 1, "what is read is counted"


@pytest.mark.pure
@pytest.mark.parametrize("n", [2, 4])
def test_ranges_of_a_regrouping_are_those_of_positions(n: int) -> None:
    size = 24 * n
    whole = torch.arange(size)
    for groups in (1, 2, 3):
        for to_groups in (1, 2, 3, 6):
            for one in range(n):
                for other in range(n):
                    held = local_slice(whole, S(0, groups), one, n)
                    wanted = local_slice(whole, S(0, to_groups), other, n)
                    spans = cut_spans(((0, size),), n, groups, one), cut_spans(((0, size),), n, to_groups, other)
                    found = _shared(*spans)
                    ours = [x for a, _, length in found for x in held[a : a + length].tolist()]
                    theirs = [x for _, b, length in found for x in wanted[b : b + length].tolist()]
                    assert ours == theirs == [x for x in held.tolist() if x in set(wanted.tolist())]
