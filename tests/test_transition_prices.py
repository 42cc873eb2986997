"""What the planner pays for a change of layout is what the runtime sends for it: kind, bytes and axis, forward and backward.

The collectives of the emitted code are recorded at torch.distributed's door, in a fake process group, while they run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.catalog.transitions import ALL_TO_ALL, REGROUP, TRANSITIONS, Transition, transition, transition_op
from autopar.compiler import emit, plan_of
from autopar.ir import I, Input, Layout, P, Program, R, Ref, S, TensorType
from autopar.measure import Pricer
from autopar.measure.track import step_memory
from autopar.planner.axis import AxisProblem, change_cost
from autopar.planner.choices import Choices, Source
from autopar.planner.lower import on_axes
from autopar.planner.price import Ledger
from autopar.render import load
from autopar.run import Mesh, comm
from autopar.run import collectives as C
from autopar.run import local_ops as L
from autopar.run.mesh import Axis
from cost_models.cluster import Cluster, load_cluster
from cost_models.collectives import collective_time_s
from tests.planner_programs import captured_of

pytestmark = pytest.mark.fake

SHAPE = (16, 24, 48)


class Sent(NamedTuple):
    """One collective: of how many bytes when gathered, over which ranks."""

    kind: str
    nbytes: int
    ranks: tuple[int, ...]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, *, reductions: bool = True) -> Iterator[list[Sent]]:
    """Inside, every collective of torch.distributed is noted. reductions: those of parameters and losses too, which are in place."""
    sent: list[Sent] = []

    def note(kind: str, nbytes: int, group: Any) -> None:
        sent.append(Sent(kind, nbytes, tuple(dist.get_process_group_ranks(group))))

    def whole(t: Tensor) -> int:
        return t.numel() * t.element_size()

    gather, scatter, exchange, reduce = comm._INTO, comm._SCATTER, dist.all_to_all_single, dist.all_reduce

    def all_gather(out: Tensor, x: Tensor, group: Any = None, **rest: Any) -> Any:
        note("all_gather", whole(out), group)
        return gather(out, x, group=group, **rest)

    def reduce_scatter(out: Tensor, x: Tensor, group: Any = None, **rest: Any) -> Any:
        note("reduce_scatter", whole(x), group)
        return scatter(out, x, group=group, **rest)

    def all_to_all(out: Tensor, x: Tensor, *sizes: Any, group: Any = None, **rest: Any) -> Any:
        note("all_to_all", whole(x) * dist.get_world_size(group), group)
        return exchange(out, x, *sizes, group=group, **rest)

    def all_reduce(x: Tensor, *args: Any, group: Any = None, **rest: Any) -> Any:
        if reductions or not rest.get("async_op"):
            note("all_reduce", whole(x), group)
        return reduce(x, *args, group=group, **rest)

    with monkeypatch.context() as m:
        m.setattr(comm, "_INTO", all_gather)
        m.setattr(comm, "_SCATTER", reduce_scatter)
        m.setattr(dist, "all_to_all_single", all_to_all)
        m.setattr(dist, "all_reduce", all_reduce)
        yield sent


# -------------------------------------------------------------------------------------------------- one change of layout
CHANGES: list[tuple[Layout, Layout, str | None, str | None, Callable[[Tensor, Axis], Tensor]]] = [
    (I, R, None, "all_reduce", C.copy_to),
    (P, I, "all_reduce", None, C.all_reduce),
    (P, R, "all_reduce", "all_reduce", C.all_reduce_shared),
    (I, P, None, None, C.keep_one),
    (R, P, None, None, C.mask_one),
    (R, I, None, None, C.own),
]  # from, to, forward, backward: the table of the design
for _d, _g in ((0, 1), (1, 1), (2, 3)):
    CHANGES += [
        (I, S(_d, _g), None, "all_gather", lambda x, a, d=_d, g=_g: C.split(x, a, d, g)),
        (R, S(_d, _g), None, None, lambda x, a, d=_d, g=_g: C.narrow(x, a, d, g)),
        (S(_d, _g), R, "all_gather", "reduce_scatter", lambda x, a, d=_d, g=_g: C.all_gather(x, a, d, g)),
        (S(_d, _g), I, "all_gather", None, lambda x, a, d=_d, g=_g: C.gather(x, a, d, g)),
        (P, S(_d, _g), "reduce_scatter", "all_gather", lambda x, a, d=_d, g=_g: C.reduce_scatter(x, a, d, g)),
        (S(_d, _g), P, None, None, lambda x, a, d=_d, g=_g: C.pad(x, a, d, g)),
    ]
CHANGES += [
    (S(0), S(1), "all_to_all", "all_to_all", lambda x, a: C.all_to_all(x, a, 0, 1, 1, 1)),
    (S(2, 3), S(0), "all_to_all", "all_to_all", lambda x, a: C.all_to_all(x, a, 2, 3, 0, 1)),
    (S(2), S(2, 3), "all_to_all", "all_to_all", lambda x, a: C.regroup(x, a, 2, 1, 3)),
]
NAMES = [f"{have} -> {want}" for have, want, *_ in CHANGES]


def test_every_change_of_layout_is_here() -> None:
    known = {t.function for t in (*TRANSITIONS.values(), ALL_TO_ALL, REGROUP)}
    assert {transition(have, want).function for have, want, *_ in CHANGES} == known
    assert known <= set(C.__all__)


@pytest.mark.parametrize("number", range(len(CHANGES)), ids=NAMES)
def test_a_change_of_layout_sends_what_the_table_says(
    number: int, fake_group: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the inner axis of a mesh 2 x 4, and on the outer one."""
    have, want, forward, backward, change = CHANGES[number]
    assert transition(have, want) == Transition(transition(have, want).function, forward, backward), "the planner's table"
    fake_group(8, rank=5)
    mesh = Mesh({"dp": 2, "tp": 4})
    nbytes = 4 * 16 * 24 * 48
    for axis in (mesh.tp, mesh.dp):
        x = torch.ones(have.local_shape(SHAPE, axis.size), requires_grad=True)
        with recorded(monkeypatch) as sent:
            y = change(x, axis)
            ahead = list(sent)
            sent.clear()
            y.backward(torch.ones_like(y))
        assert tuple(y.shape) == want.local_shape(SHAPE, axis.size)
        assert ahead == ([Sent(forward, nbytes, axis.ranks)] if forward else [])
        assert sent == ([Sent(backward, nbytes, axis.ranks)] if backward else [])


def test_batch_norm_sends_statistics(fake_group: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 channels: two moments in float64 at once; in backward two sums at once."""
    fake_group(4, rank=1)
    axis = Mesh({"dp": 4}).dp
    x = torch.randn(6, 8, 3, requires_grad=True)
    with recorded(monkeypatch) as sent:
        y = L.sync_batch_norm(x, None, None, None, None, axis, 0.1, 1e-5)
        ahead = list(sent)
        sent.clear()
        y.backward(torch.ones_like(y))
    assert ahead == [Sent("all_reduce", 8 * 2 * 8, axis.ranks)] and sent == [Sent("all_reduce", 4 * 2 * 8, axis.ranks)]


def test_a_quotient_of_sums_sends_both_at_once(fake_group: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers in float64, and nothing in backward: as it is priced."""
    fake_group(4, rank=1)
    axis = Mesh({"dp": 4}).dp
    loss = torch.tensor(2.0, requires_grad=True)
    with recorded(monkeypatch) as sent:
        L.quotient_of_sums(loss, torch.tensor(3), axis).backward()
    assert sent == [Sent("all_reduce", 16, axis.ranks)]
    number = TensorType((), torch.float32, True)
    pricer = Pricer(load_cluster("dgx-a100"), {"pp": 1, "dp": 4, "tp": 1})
    priced = pricer.exchanges_s("autopar.L.quotient_of_sums", (number, number), "dp")
    assert priced == (pricer.collective_s("all_reduce", 16, "dp"), 0.0)


# ------------------------------------------------------------------------------------------------------------- its price
def problem(cluster: Cluster, n: int) -> AxisProblem:
    """An axis of n ranks with nothing to decide on it."""
    nothing = Choices(groups={}, edges=(), loss=Source("", 0))
    return AxisProblem(axis="tp", n=n, choices=nothing, pricer=Pricer(cluster, {"pp": 1, "dp": 1, "tp": n}), params=frozenset())


def machine(**links: float) -> Cluster:
    """Nodes of 8 A100; links: factors of what is between GPUs."""
    known = load_cluster("dgx-a100")

    def faster(link: Any) -> Any:
        return dataclasses.replace(link, **{name: factor * getattr(link, name) for name, factor in links.items()})

    return dataclasses.replace(known, intra=faster(known.intra), inter=faster(known.inter))


SIZES = [(48, 96, 48), (6144, 12288, 48)]  # 864 KiB, whose price is latency, and 13.5 GiB, whose price is bytes
AXES = [(2, 2), (8, 8), (16, 8)]  # ranks, and how many of them are in one node


@pytest.mark.parametrize(("ranks", "per_node"), AXES)
@pytest.mark.parametrize("shape", SIZES, ids=["latency", "bytes"])
def test_a_change_of_layout_costs_what_it_sends(shape: tuple[int, ...], ranks: int, per_node: int) -> None:
    """In the integer program of an axis and in a lowered program, with a gradient and without."""
    cluster = machine()
    nbytes = 4 * shape[0] * shape[1] * shape[2]
    here = problem(cluster, ranks)
    touched = 2 * nbytes / cluster.gpu.memory_bandwidth_bytes_per_s  # read and written on the device

    def seconds(kind: Any) -> float:
        return collective_time_s(kind, nbytes, ranks, cluster, ranks_per_node=per_node) if kind else 0.0

    for (have, want, forward, backward, _), grad in itertools.product(CHANGES, (True, False)):
        if not (have.divides(shape, ranks) and want.divides(shape, ranks)):
            continue
        t = TensorType(shape, torch.float32, grad)
        cost = change_cost(here, have, want, t, times=3)
        expected = [seconds(forward), seconds(backward) if grad else 0.0]
        assert cost is not None
        if not grad and {have, want} == {R, I}:
            assert cost == 0, "without a gradient R and I are one layout"
        else:
            moved = touched if (have, want) not in ((I, R), (R, I), (I, P)) else 0.0
            assert cost == pytest.approx(3 * (sum(expected) + moved), rel=1e-6, abs=1e-8), (have, want, grad)
        op = transition_op("x", have, want, "tp", "y")
        types = {v: TensorType(x.local_shape(shape, ranks), torch.float32, grad) for v, x in (("x", have), ("y", want))}
        lowered = Program(name="one", inputs=(Input(value="x", path=("x",)),), params=(), buffers=(), ops=(op,), loss="y", types=types)
        priced = here.pricer.op(op, lowered)
        assert [priced.forward_s, priced.backward_s] == pytest.approx(expected), (have, want, grad)
        assert priced.communication_s == pytest.approx(sum(expected)) and op.args == (Ref("x"),)


@pytest.mark.parametrize("shape", SIZES, ids=["latency", "bytes"])
def test_faster_links_and_fewer_bytes_are_cheaper(shape: tuple[int, ...]) -> None:
    """Where something is sent strictly so: twice the bandwidth where bytes count, a tenth of the latency where that does."""
    plain = machine()
    steps = dict.fromkeys(("start_simple_s", "start_low_latency_s", "hop_simple_s", "hop_low_latency_s", "peer_s"), 0.1)
    faster = [machine(bandwidth_bytes_per_s=2), machine(**steps)]
    half, nbytes, sending = (shape[0] // 2, *shape[1:]), 4 * shape[0] * shape[1] * shape[2], 0
    for (have, want, forward, backward, _), (ranks, _) in itertools.product(CHANGES, AXES):
        if not (have.divides(half, ranks) and want.divides(half, ranks)):
            continue
        whole, part = (change_cost(problem(plain, ranks), have, want, TensorType(s, torch.float32, True), 1) for s in (shape, half))
        quick = [change_cost(problem(m, ranks), have, want, TensorType(shape, torch.float32, True), 1) for m in faster]
        assert whole is not None and part is not None and None not in quick
        assert part <= whole and max(x for x in quick if x is not None) <= whole
        if forward or backward:
            sent_s = sum(problem(plain, ranks).pricer.collective_s(kind, nbytes, "tp") for kind in (forward, backward))
            saved_s = whole - min(x for x in quick if x is not None)
            assert 0.1 * sent_s < saved_s < sent_s <= whole, (have, want, ranks)
            assert whole - part > (0.4 if shape == SIZES[1] else 0.0) * sent_s, "half of the bytes"
            sending += 1
    assert sending > 20


# ----------------------------------------------------------------------------------------------------- of a whole program
STEPS: list[tuple[str, int, dict[str, Any]]] = [
    ("stack", 2, {"tp": 2, "sequence_parallel": True}), ("stack", 2, {"tp": 2, "sequence_parallel": False}), ("wide", 4, {"tp": 4}),
]  # fmt: skip
# "wide" computes longer than it sends


@functools.cache
def priced(name: str, gpus: int, pins: tuple[tuple[str, Any], ...]) -> tuple[float, set[tuple[str, int]], Any]:
    """What the planner pays for on the tensor axis of one rank's program, in seconds and as (kind, bytes); and the emitted module."""
    captured, _ = captured_of(name)
    plan = plan_of(captured, gpus, cluster="dgx-a100", pins={"micro_batches": 1, "recompute": "none", **dict(pins)})
    asked: set[tuple[str, int]] = set()

    class Asked(Pricer):
        def collective_s(self, kind: str | None, nbytes: float, axis: str, **rest: Any) -> float:
            asked.update([(kind, int(nbytes))] if kind is not None else [])
            return super().collective_s(kind, nbytes, axis, **rest)

    ledger = Ledger(on_axes(captured.program, plan).rank, Asked(load_cluster("dgx-a100"), plan.mesh))
    return sum(c.communication_s for c in ledger.costs), asked, load(emit(captured, plan))


@pytest.mark.parametrize(("name", "gpus", "pins"), STEPS, ids=str)
def test_a_step_sends_what_was_paid_for(
    name: str, gpus: int, pins: dict[str, Any], fake_group: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    paid_s, asked, emitted = priced(name, gpus, tuple(pins.items()))
    inputs = {k: (tuple(v.shape), v.dtype) for k, v in captured_of(name)[1].items()}
    fake_group(gpus, rank=gpus - 1)
    with recorded(monkeypatch, reductions=False) as sent:
        step_memory(emitted, inputs)
    assert {(s.kind, s.nbytes) for s in sent} == asked and {s.ranks for s in sent} == {tuple(range(gpus))}
    cluster = load_cluster("dgx-a100")
    sent_s = sum(collective_time_s(s.kind, s.nbytes, gpus, cluster, ranks_per_node=gpus) for s in sent)  # type: ignore[arg-type]
    assert sent_s / 2 == pytest.approx(paid_s, rel=1e-9), "of two steps"
    assert sent
