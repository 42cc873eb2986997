"""What the planner says of time, beside arithmetic on paper: a machine of round numbers, one of whose parts is slow at a time."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir import Op, Program, Ref, TensorType, refs
from autopar.measure import Counts, Pricer, count
from autopar.planner import Pins
from autopar.planner.axis import AxisProblem, group_cost
from autopar.planner.bounds import Least
from autopar.planner.candidate import Candidate
from autopar.planner.choices import choices
from autopar.planner.exchange import Exchange
from autopar.planner.price import Ledger
from autopar.planner.search import Search
from autopar.planner.space import Choice, Mesh
from cost_models.cluster import OP_CLASSES, Cluster, Gpu, Link
from cost_models.collectives import collective_time_s
from cost_models.compute import kernel_time_s
from cost_models.recipe import MIB, WHOLE, Recipe
from cost_models.rests import RESTS
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure

FAST = 1e30


def machine(
    *, flops: float = FAST, memory: float = FAST, link: float = FAST, between: float | None = None, start_s: float = 0.0
) -> Cluster:
    """Nodes of 8 GPUs behind a switch. flops: a second in float32, 8 times as many in TF32; memory, link, between: bytes a second, of a
    GPU's memory, of a GPU's port, of a node's; start_s: of each collective."""

    def wire(bandwidth: float) -> Link:
        return Link(
            name="wire", bandwidth_bytes_per_s=bandwidth, achievable_fraction=1.0, low_latency_fraction=0.5, start_simple_s=start_s,
            start_low_latency_s=start_s, hop_simple_s=0.0, hop_low_latency_s=0.0, peer_s=0.0, in_switch_fraction=0.0, switched=True,
        )  # fmt: skip

    gpu = Gpu(
        name="round", memory_bytes=2**50, memory_bandwidth_bytes_per_s=memory, launch_s=0.0, context_bytes=0,
        rates=(("float32", flops), ("tf32", 8 * flops)), fractions=tuple((c, 1.0) for c in OP_CLASSES),
        sources=tuple((key, "assumed: round") for key in (
            "memory_bandwidth_bytes_per_s", "peak_flops_per_s.float32", *(f"achievable_fraction.{c}" for c in OP_CLASSES)
        )),
    )  # fmt: skip
    return Cluster(
        name="round", gpu=gpu, gpus_per_node=8, nodes=None, intra=wire(link), inter=wire(link if between is None else between),
        links_per_gpu=1, links_per_node=1,
    )  # fmt: skip


def searched(program: Program, gpus: int, cluster: Cluster, optimizer: str = "none", recipe: Recipe | None = None, **pins: Any) -> Search:
    return Search(
        program=program, gpus=gpus, cluster=cluster, memory_limit_bytes=2**50, optimizer=optimizer, precision="fp32", pins=Pins(**pins),
        recipe=recipe or Recipe(),
    )  # fmt: skip


def priced(program: Program, gpus: int, cluster: Cluster, optimizer: str = "none", recipe: Recipe | None = None, **pins: Any) -> Candidate:
    """The one candidate that has these pins."""
    pins = {"dp": 1, "tp": 1, "pp": 1, "micro_batches": 1, "zero": 0, "recompute": "none", "schedule": "1f1b"} | pins
    (found,) = searched(program, gpus, cluster, optimizer, recipe, **pins).candidates()
    return found


# "wide": x [48, 768] -> 3072, relu -> 768, and the mean square error
ROWS, WIDTH, HIDDEN = 48, 768, 3072
PRODUCT = 2 * ROWS * WIDTH * HIDDEN  # multiplications and additions of either layer
FORWARD = 2 * PRODUCT
BACKWARD = 3 * PRODUCT  # two for the second layer, one for the first: x has no gradient
NUMBERS = 2 * WIDTH * HIDDEN + HIDDEN + WIDTH  # parameters
FOLLOWS = 4 * (4 * ROWS * WIDTH + 4 * ROWS * HIDDEN)  # bytes of x, y, the output twice; of the hidden values four times
STAYS = 4 * (NUMBERS + 1)  # bytes of the weights, and of the loss
BEHIND = 4 * (7 * ROWS * WIDTH + 7 * ROWS * HIDDEN)  # of products twice; ReLU reads its result and a gradient, and writes one; so the loss
KEPT = 4 * (2 * NUMBERS + 1)  # of the loss, its gradient
FORMS = [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 4, 1), (2, 1, 1, 4), (2, 4, 2, 3), (1, 2, 2, 2)]  # pp, dp, tp, micro-batches


def choice(pp: int, dp: int, tp: int, m: int, rest: str = "zero0", shard: int = 1) -> Choice:
    return Choice(mesh=Mesh(pp=pp, dp=dp, tp=tp), micro_batches=m, schedule="1f1b", rest=RESTS[rest], shard=shard)


# ---------------------------------------------------------------------------------------------------------------- the bound
@pytest.mark.parametrize(("pp", "dp", "tp", "m"), FORMS)
def test_the_bound_of_a_choice(pp: int, dp: int, tp: int, m: int) -> None:
    """A GPU has at least its share of the arithmetic; every micro-batch of every data-parallel rank reads the weights; the busiest stage
    has a pp-th of a micro-batch m times, and waits pp - 1 times."""
    program, waits = program_of("wide"), (m + pp - 1) / pp
    arithmetic = Least(program, machine(flops=1e9), "none", Recipe())
    assert arithmetic.step_s(choice(pp, dp, tp, m), ROWS) == pytest.approx((FORWARD + BACKWARD) / 1e9 / (dp * m * tp) * waits)
    memory = Least(program, machine(memory=1e9), "none", Recipe())
    once = ((FOLLOWS + BEHIND) / (dp * m) + STAYS + KEPT) / 1e9 / tp
    assert memory.step_s(choice(pp, dp, tp, m), ROWS) == pytest.approx(once * waits)
    assert memory.step_s(choice(pp, dp, tp, 2 * m), 2 * ROWS) == pytest.approx(once * (2 * m + pp - 1) / pp), "of a batch twice as large"


@pytest.mark.parametrize(("pp", "dp", "tp", "shard"), [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 4, 1), (1, 4, 1, 4), (2, 4, 2, 2)])
def test_the_bound_of_the_update(pp: int, dp: int, tp: int, shard: int) -> None:
    """AdamW, in three passes: 4 bytes of a gradient; of the parameter and its two states 12 bytes, read and written."""
    program, cluster = program_of("wide"), machine(memory=1e9)
    of = choice(pp, dp, tp, 2, "zero1" if shard > 1 else "zero0", shard)
    update = [Least(program, cluster, optimizer, Recipe()).step_s(of, ROWS) for optimizer in ("adamw", "none")]
    assert update[0] - update[1] == pytest.approx(3 * (4 + 2 * 12) * NUMBERS / 1e9 / (pp * tp * shard))


@pytest.mark.parametrize(
    ("rest", "pp", "m", "parts"),
    [("zero0", 1, 2, 2), ("zero1", 1, 2, 2), ("zero2", 1, 2, 2), ("zero3", 1, 2, 2 * 3), ("zero1", 2, 2, 2 / 2),
     ("zero3", 2, 2, 3 * 3 / 2)],
)  # fmt: skip
def test_the_bound_of_what_ranks_exchange(rest: str, pp: int, m: int, parts: float) -> None:
    """Of four ranks each sends three quarters of all gradients to reduce-scatter them, and of all parameters to gather them: once a step or
    in every pass. A stage has half of them, and of the passes the first waits for the second stage. ZeRO-2 gathers once a step, which
    passes hide that are as long as what they scatter."""
    program, link = program_of("wide"), 1e6
    of = choice(pp, 4, 1, m, rest, 1 if rest == "zero0" else 4)
    for cluster, hidden in ((machine(link=link), False), (machine(link=link, flops=1e3), True)):
        least = Least(program, cluster, "none", Recipe())
        pricer = Pricer(cluster, of.mesh.sizes())
        exchange = Exchange(rest=of.rest, shard=of.shard, micro_batches=m, pricer=pricer, recipe=Recipe())
        alone = least.step_s(of, ROWS)
        sent = least.with_exchange_s(of, ROWS, exchange, frozenset())
        assert sent == pytest.approx(alone + (0.0 if hidden else parts * 3 / 4 * 4 * NUMBERS / link))
        first, second = (p.value for p in program.params if len(program.types[p.value].shape) == 2)
        alike = least.with_exchange_s(of, ROWS, exchange, frozenset({first}))
        assert hidden or alike == pytest.approx(alone + parts * 3 / 4 * 4 * (NUMBERS - WIDTH * HIDDEN) / link)


@pytest.mark.parametrize("machines", [{"flops": 1e9}, {"link": 1e6}, {"flops": 1e12, "memory": 1e10, "link": 1e9}], ids=str)
def test_bounds_are_below_prices(machines: dict[str, float]) -> None:
    cluster = machine(**machines)
    seen = 0
    for pp, dp, tp, m in FORMS:
        for zero in (0, 3) if dp > 1 else (0,):
            search = searched(program_of("wide"), pp * dp * tp, cluster, "adamw", pp=pp, dp=dp, tp=tp, micro_batches=m, zero=zero)
            for found in search.candidates():
                one = choice(pp, dp, tp, m, found.rest.name, found.shard)
                assert search._least.step_s(one, ROWS) <= found.estimator.least_s() * (1 + 1e-9) <= found.step_time_s * (1 + 2e-9)
                seen += 1
    assert seen >= 4


def test_the_bound_of_priced_pieces() -> None:
    """Of 12 equal layers in two stages and 4 micro-batches, which cuts nearly reach."""
    layers = equal_layers()
    found = priced(layers, 2, machine(flops=1e9), pp=2, micro_batches=4)
    forward = 2 * 8 * 64 * 64 / 1e9  # of a layer and a micro-batch of 8 rows; backward is twice that, of the first layer once
    assert found.estimator.least_s() == pytest.approx((3 * 12 - 1) * forward * (4 + 1) / 2)
    assert found.estimator.least_s() <= found.step_time_s <= 1.1 * found.estimator.least_s()


@functools.cache
def equal_layers() -> Program:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU(), nn.Identity())))

        def forward(self, x: Tensor) -> Tensor:
            return self.of(x).square().sum()

    return capture(Square(), (torch.ones(32, 64),)).program


# ------------------------------------------------------------------------------------------------------------ operators
def test_a_program_that_memory_binds() -> None:
    ledger = Ledger(program_of("wide"), Pricer(machine(memory=1e9), {"pp": 1, "dp": 1, "tp": 1}, None, Recipe()))
    forward, backward, sent = ledger.seconds(range(len(ledger.costs)))
    assert (forward, backward, sent) == pytest.approx(((FOLLOWS + STAYS) / 1e9, (BEHIND + KEPT) / 1e9, 0.0))


def test_a_program_that_arithmetic_binds() -> None:
    ledger = Ledger(program_of("wide"), Pricer(machine(flops=1e9), {"pp": 1, "dp": 1, "tp": 1}, None, Recipe()))
    assert ledger.seconds(range(len(ledger.costs)))[:2] == pytest.approx((FORWARD / 1e9, BACKWARD / 1e9))
    gpu = machine(flops=1e9).gpu
    assert kernel_time_s("matmul", 4e9, 0.0, "float32", gpu) == 4.0, "products in float32 do not use TF32"
    assert kernel_time_s("conv", 4e9, 0.0, "float32", gpu) == 0.5


def test_a_result_is_written_when_it_has_been_computed() -> None:
    gpu = machine(flops=1e9, memory=1e9).gpu
    assert kernel_time_s("matmul", 4e9, 3e9, "float32", gpu, 1e9) == 5.0
    assert kernel_time_s("matmul", 1e9, 3e9, "float32", gpu, 1e9) == 3.0, "memory binds it"
    assert kernel_time_s("attention", 4e9, 3e9, "float32", gpu, 1e9) == 4.0, "one kernel of many small products"
    assert kernel_time_s("matmul", 4e9, 3e9, "float32", dataclasses.replace(gpu, host=True), 1e9) == 4.0
    program = program_of("wide")
    product = next(op for op in program.ops if op.target == "aten.linear.default")
    counts = count(product, tuple(program.types[r] for r in refs(product)), tuple(program.types[o] for o in product.outputs if o))
    forward, backward = Pricer(machine(), {}, None, Recipe()).work(counts, "float32")
    assert [k.written for k in (*forward, *backward)] == [counts.bytes_written, counts.bytes_read], "a gradient of each operand"


def convolution(kernel: int = 3, stride: int = 1) -> Counts:
    op = Op(target="aten.conv2d.default", args=(Ref("x"), Ref("w"), None, (stride, stride), (0, 0)), kwargs=(), outputs=("y",))
    x, w = (TensorType(shape, torch.float32, True) for shape in ((1, 2, 9, 9), (4, 2, kernel, kernel)))
    side = (9 - kernel) // stride + 1
    return count(op, (x, w), (TensorType((1, 4, side, side), torch.float32, True),))


def test_convolutions_on_matrix_units_convert_what_they_read_and_write_unless_channels_are_last() -> None:
    counts, cluster = convolution(), machine(memory=1.0)
    moved = counts.bytes_read + counts.bytes_written
    found = [Pricer(cluster, {}, None, Recipe(channels_last=last)).counted_s(counts, "float32") for last in (False, True)]
    assert found == [(3 * moved, 6 * moved), (moved, 2 * moved)]
    of_one = convolution(kernel=1)
    moved_of_one = of_one.bytes_read + of_one.bytes_written
    found = [Pricer(cluster, {}, None, Recipe(converts_pixels=does)).counted_s(of_one, "float32") for does in (False, True)]
    assert found == [(moved_of_one, 2 * moved_of_one), (3 * moved_of_one, 6 * moved_of_one)], "a product of matrices"
    assert Pricer(cluster, {}, None, Recipe(converts_pixels=False)).counted_s(counts, "float32") == (3 * moved, 6 * moved)
    of_vectors = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, rates=(("float32", FAST),)))
    assert Pricer(of_vectors, {}, None, Recipe()).counted_s(counts, "float32") == (moved, 2 * moved)


def test_winograds_algorithm_saves_multiplications_on_vector_units() -> None:
    cluster = machine(flops=1.0)
    vectors = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, rates=(("float32", 1.0),)))
    plain = convolution()

    def seconds(cluster: Cluster, counts: Counts = plain, **rules: Any) -> float:
        return Pricer(cluster, {}, None, Recipe(**rules)).counted_s(counts, "float32")[0]

    assert seconds(vectors) == pytest.approx(plain.flops / 2.25)
    assert seconds(vectors, winograd=False) == pytest.approx(plain.flops)
    assert seconds(cluster) == pytest.approx(plain.flops / 8), "matrix units multiply directly"
    for other in (convolution(kernel=1), convolution(stride=2)):
        assert seconds(vectors, other) == pytest.approx(other.flops)


def test_attention_is_slower_in_backward() -> None:
    counts = Counts(op_class="attention", flops=100.0, backward_flops=250.0, bytes_read=0, bytes_written=0, saved_inputs=(0,))
    pricer = Pricer(machine(flops=1.0), {}, None, Recipe(attention_speed=0.5))
    assert pricer.counted_s(counts, "float32") == pytest.approx((200.0, 500.0 / 0.8))


@pytest.mark.parametrize("n", [2, 4])
def test_splitting_an_operator_splits_its_work(n: int) -> None:
    """In the integer program of an axis: of the first layer, two products of its size (forward, and the weight's gradient)."""
    program = program_of("wide")
    pricer = Pricer(machine(flops=1e9), {"pp": 1, "dp": 1, "tp": n})
    problem = AxisProblem(axis="tp", n=n, choices=choices(program, n, {}), pricer=pricer, params=frozenset())
    linear = next(g for g in problem.choices.groups.values() if g.op is not None and g.op.target == "aten.linear.default")
    seconds = {s.splits_work: group_cost(problem, linear, s) for s in linear.strategies if s.local is None}
    assert seconds == pytest.approx({False: 2 * PRODUCT / 1e9, True: 2 * PRODUCT / 1e9 / n})


# ---------------------------------------------------------------------------------------------------------- collectives
def test_which_ranks_are_neighbours() -> None:
    """16 GPUs on two nodes: tp innermost, then dp, then pp."""
    for mesh, expected in (
        ({"pp": 1, "dp": 2, "tp": 8}, {"tp": 8, "dp": 1}), ({"pp": 1, "dp": 8, "tp": 2}, {"tp": 2, "dp": 4}),
        ({"pp": 2, "dp": 4, "tp": 2}, {"tp": 2, "dp": 4, "pp": 1}), ({"pp": 4, "dp": 2, "tp": 2}, {"tp": 2, "dp": 2, "pp": 2}),
    ):  # fmt: skip
        pricer = Pricer(machine(link=8e9, between=2e9), mesh)
        assert {axis: pricer.per_node(axis) for axis in expected} == expected
    across = Pricer(machine(link=8e9, between=2e9), {"pp": 1, "dp": 2, "tp": 8})
    nbytes = 10**9  # over tp, in the node: 7 / 8 of them; over dp, beside 7 other groups that share the node's port: half of them
    assert across.collective_s("all_gather", nbytes, "tp") == pytest.approx(7 / 8 * nbytes / 8e9)
    assert across.collective_s("all_gather", nbytes, "dp") == pytest.approx(1 / 2 * nbytes / (2e9 / 8))
    assert across.collective_s("all_reduce", nbytes, "dp") == pytest.approx(2 * across.collective_s("all_gather", nbytes, "dp"))
    every = Pricer(machine(link=8e9, between=2e9), {"pp": 1, "dp": 1, "tp": 16})  # in the nodes, and after that between them
    assert every.collective_s("all_gather", nbytes, "tp") == pytest.approx(7 / 8 * nbytes / 8e9 + 1 / 2 * nbytes / 2e9)


@pytest.mark.parametrize("wired", [False, True])
def test_what_a_rank_sends_in_each_collective(wired: bool) -> None:
    """Of 4 ranks in a node, behind a switch or with a wire to each of the others: of what is gathered by the other three each has a part; a
    sum is scattered and gathered; each sends three quarters of its quarter to the others."""
    behind, nbytes = machine(link=1e9), 4.8e8
    wires = dataclasses.replace(behind, intra=dataclasses.replace(behind.intra, switched=False), links_per_gpu=3)
    cluster, rate = (wires, 3e9) if wired else (behind, 1e9)
    parts = {"all_gather": 3 / 4, "reduce_scatter": 3 / 4, "all_reduce": 3 / 2, "all_to_all": 3 / 16, "broadcast": 1.0, "p2p": 1.0}
    for kind, share in parts.items():
        found = collective_time_s(kind, nbytes, 4 if kind != "p2p" else 2, cluster, ranks_per_node=4)  # type: ignore[arg-type]
        assert found == pytest.approx(share * nbytes / rate), kind


def test_gradients_wait_for_a_bucket_not_for_each_other() -> None:
    """A second to start, and 25 MiB a second to send to the one other rank: a bucket takes two, a tensor its share of that."""
    pricer = Pricer(machine(link=25.0 * MIB, start_s=1.0), {"pp": 1, "dp": 2, "tp": 1})
    assert pricer.collective_s("all_reduce", 25 * MIB, "dp") == pytest.approx(2.0)
    for share in (1, 1 / 25, 1 / 2500, 3):
        assert pricer.bucketed_s("all_reduce", share * 25 * MIB, "dp") == pytest.approx(2.0 * share)


@pytest.mark.parametrize("m", [1, 4])
def test_data_parallel_ranks_reduce_once_a_step(m: int) -> None:
    """Of one bucket, and of ten, of which nine are hidden by the backward pass of the last micro-batch."""
    nbytes = 4 * NUMBERS  # 18 MiB and 15 KiB, over 4 ranks: 2 * 3 / 4 of them are sent
    send_s = 1.5 * nbytes / 1e9
    backward_s = BACKWARD / 4 / m / 1e9
    one = priced(program_of("wide"), 4, machine(flops=1e9, link=1e9), dp=4, micro_batches=m)
    assert one.gradient_sync_s == pytest.approx(send_s) and backward_s > send_s
    several = priced(program_of("wide"), 4, machine(flops=1e9, link=1e9), recipe=Recipe(bucket_bytes=2 * MIB), dp=4, micro_batches=m)
    last = 1.5 * (nbytes % (2 * MIB)) / 1e9
    assert several.gradient_sync_s == pytest.approx(last)
    slow = priced(program_of("wide"), 4, machine(flops=1e12, link=1e6), recipe=Recipe(bucket_bytes=2 * MIB), dp=4, micro_batches=m)
    first_ready = BACKWARD / 4 / m / 1e12 / math.ceil(nbytes / (2 * MIB))
    assert slow.gradient_sync_s == pytest.approx(1.5 * nbytes / 1e6 + first_ready - BACKWARD / 4 / m / 1e12)


NORMS = 4 * 4 * 2 * 16  # bytes of the norms of "stack": four layers, a weight and a bias of 16 each
OF_TWO = 4 * (32 * 8 + 4 * (32 * 16 + 32 + 16 * 32 + 8))  # of its other parameters on one of two tensor-parallel ranks


@pytest.mark.parametrize("m", [1, 4])
def test_gradients_of_what_rests_in_parts_are_summed_at_once_where_a_software_does_so(m: int) -> None:
    """Three quarters of all bytes are sent twice, and of all parameters once: nothing of it runs beside anything else."""
    nbytes, recipe = 4 * NUMBERS, Recipe(sums_parts_whole=True, gather_bytes=WHOLE, overlaps_gathers=False, bucket_bytes=MIB)
    found = priced(program_of("wide"), 4, machine(flops=1e9, link=1e6), recipe=recipe, dp=4, zero=1, micro_batches=m)
    assert found.gradient_sync_s == pytest.approx((2 * 3 / 4 + 3 / 4) * nbytes / 1e6)
    e = found.estimator
    sent = {(x.kind, x.count): x.seconds for x in e.exchange.in_a_step(e.all_params)}
    assert sent == pytest.approx({("all_reduce", 1): 1.5 * nbytes / 1e6, ("all_gather", 1): 0.75 * nbytes / 1e6})
    whole = priced(program_of("wide"), 4, machine(flops=1e9, link=1e6), recipe=recipe, dp=4, zero=0, micro_batches=m)
    other = priced(program_of("wide"), 4, machine(flops=1e9, link=1e6), recipe=Recipe(bucket_bytes=MIB), dp=4, zero=0, micro_batches=m)
    assert whole.step_time_s == other.step_time_s, "what rests whole is summed in buckets"


@pytest.mark.parametrize(
    ("pins", "sent"),
    [
        ({"tp": 4}, 2 * 3 / 4 * NORMS),
        ({"tp": 2, "dp": 2}, 2 * 3 / 4 * NORMS + OF_TWO),
        ({"tp": 2, "dp": 4, "zero": 1}, (3 / 4 + 1 / 4) * NORMS + 3 / 4 * OF_TWO + 3 / 4 * (NORMS + OF_TWO)),
        ({"tp": 2, "dp": 4, "zero": 1, "shard": 2}, (1 / 2 + 2 * 3 / 4 / 2) * NORMS + (1 / 2 + 1 / 2) * OF_TWO + 1 / 2 * (NORMS + OF_TWO)),
    ],
    ids=str,
)
def test_gradients_are_summed_over_all_ranks_that_use_a_parameter_for_other_work(pins: dict[str, int], sent: float) -> None:
    """Under sequence parallelism norms are whole on tensor-parallel ranks, each of which reads other tokens: their gradients are summed
    over these too, together with the data-parallel ones; in parts, the part of each is summed over those that hold the same one. With
    zero=1 the parameters are gathered beside. Nothing of it runs beside anything else."""
    gpus = pins["tp"] * pins.get("dp", 1)
    alone = Recipe(overlaps_reduction=False, overlaps_gathers=False)
    found = priced(program_of("stack"), gpus, machine(link=1e6), recipe=alone, sequence_parallel=True, **pins)
    assert found.gradient_sync_s == pytest.approx(sent / 1e6)


class Gated(nn.Module):
    """A norm that two linear layers read, and one that reads both."""

    def __init__(self, width: int = 16, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.gate, self.down = (nn.Linear(a, b, bias=False) for a, b in ((width, hidden), (width, hidden), (hidden, width)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.down(self.up(h) * self.gate(h))


class TwoGated(nn.Module):
    """The first one's input has no gradient: nothing is summed for it, nor is it gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gated(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).pow(2).mean()


GATED = {"x": torch.ones(32, 8, 16)}
NORMED = 4 * 32 * 8 * 16  # bytes of what the second norm makes
HALF = 2 * 2 * (32 * 8) * 16 * 64 / 2  # multiplications and additions of up and gate on one of two ranks, in forward
ALL = ("all_gather", "all_reduce", "reduce_scatter")


@pytest.mark.parametrize(
    ("sequence", "regathers", "kinds", "collectives"),
    [
        (True, True, ALL, (1 / 2, 1 / 2)),  # what the norm makes is gathered again, and its gradient reduce-scattered
        (True, True, ("all_gather",), (1 / 2,)),
        (True, True, ("reduce_scatter",), (1 / 2,)),
        (True, False, ALL, (1 / 2,)),
        (False, False, ALL, (1.0,)),  # its gradient is all-reduced
        (False, False, ("reduce_scatter",), ()),
        (True, True, (), ()),
    ],
)
@pytest.mark.parametrize("flops", [1e6, 1e3])
def test_products_hide_collectives_that_they_do_not_wait_for(
    sequence: bool, regathers: bool, kinds: tuple[str, ...], collectives: tuple[float, ...], flops: float
) -> None:
    """Both layers that read a norm's result are one product, in backward one for its gradient and one for the weights', each of as many
    multiplications as in forward. A collective of which a rank sends such a share of the bytes is hidden as far as one of them lasts."""
    cluster, program = machine(flops=flops, link=1e4), capture(TwoGated(), GATED).program
    exposed, hidden = (
        priced(program, 2, cluster, recipe=Recipe(regathers=regathers, beside_products=x), tp=2, sequence_parallel=sequence)
        for x in ((), kinds)
    )  # fmt: skip
    assert hidden.rank.program == exposed.rank.program and hidden.stages[0].memory == exposed.stages[0].memory
    saved = sum(min(share * NORMED / 1e4, HALF / flops) for share in collectives)
    assert exposed.compute_s - hidden.compute_s == pytest.approx(saved, rel=1e-9)
    assert (HALF / flops > 1 / 2 * NORMED / 1e4) == (flops == 1e3), "the product lasts longer, or the collective does"
    costs = [c.rank.ledger.costs for c in (exposed, hidden)]
    assert sum(a.communication_s - b.communication_s for a, b in zip(*costs, strict=True)) == pytest.approx(saved)
    assert [c.hidden_s for c in costs[1] if c.hidden_s] == pytest.approx([saved] * bool(collectives))
    assert all(b.backward_s >= 0 and b.communication_s >= 0 for b in costs[1])


def test_few_bytes_are_summed_by_gathering_them_where_a_host_computes() -> None:
    """All terms of 4 ranks, three quarters of which come from others; of more than 64 KiB in all, and on GPUs, an all-reduce."""
    gpus = machine(link=1e6, start_s=1.0)
    hosts = dataclasses.replace(gpus, gpu=dataclasses.replace(gpus.gpu, host=True))
    for nbytes in (16, 2**14, 2**14 + 1):
        ours = Pricer(hosts, {"pp": 1, "dp": 4, "tp": 1}).collective_s("all_reduce", nbytes, "dp")
        theirs = Pricer(gpus, {"pp": 1, "dp": 4, "tp": 1}).collective_s("all_reduce", nbytes, "dp")
        assert theirs == pytest.approx(1.0 + 1.5 * nbytes / 1e6)
        assert ours == pytest.approx(1.0 + 3 / 4 * 4 * nbytes / 1e6 if nbytes <= 2**14 else theirs)


def test_what_batch_norm_exchanges() -> None:
    """Over 4 ranks, of 8 channels: two moments in float64 at once forward, two sums at once backward; 2 * 3 / 4 of the bytes are sent,
    each exchange begins once."""
    pricer = Pricer(machine(link=1e6, start_s=1.0), {"pp": 1, "dp": 4, "tp": 1})
    x = TensorType((6, 8, 3), torch.float32, True)
    forward, backward = pricer.exchanges_s("autopar.L.sync_batch_norm", (x,), "dp")
    assert forward == pytest.approx(1.0 + 1.5 * 8 * 2 * 8 / 1e6)
    assert backward == pytest.approx(1.0 + 1.5 * 4 * 2 * 8 / 1e6)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("hidden", [0.6, 3.0])
def test_zero_3_gathers_twice_and_scatters_once(hidden: float, m: int) -> None:
    """All parameters are one unit. Over 4 ranks 3 / 4 of them are gathered in forward and again in backward, and as much of the gradients
    is scattered. hidden: the time of forward as a share of that of one of these."""
    once = 0.75 * 4 * NUMBERS / 1e6
    forward = hidden * once
    cluster = machine(link=1e6, flops=FORWARD / 4 / m / forward)
    found = priced(program_of("wide"), 4, cluster, dp=4, zero=3, micro_batches=m)
    backward = 1.5 * forward
    expected = m * (max(forward, once) + max(backward, 2 * once)) + 2 * once  # at both ends of the step nothing runs beside
    assert found.step_time_s == pytest.approx(expected)


@pytest.mark.parametrize("m", [1, 3])
def test_zero_2_scatters_in_every_pass(m: int) -> None:
    """Two buckets, the first of which is hidden: the other one is exposed once a micro-batch; and the parameters are gathered once."""
    nbytes, bucket = 4 * NUMBERS, 10 * MIB
    found = priced(
        program_of("wide"), 4, machine(flops=1e9, link=1e9), recipe=Recipe(bucket_bytes=bucket), dp=4, zero=2, micro_batches=m
    )
    forward = FORWARD / 4 / m / 1e9
    gathers = [0.75 * bucket / 1e9, 0.75 * (nbytes - bucket) / 1e9]
    assert forward / 2 > gathers[1], "the second half is gathered while the first half of forward runs"
    assert found.gradient_sync_s == pytest.approx(m * 0.75 * bucket / 1e9 + gathers[0])


# --------------------------------------------------------------------------------------------------------------- stages
# "deep": 6 layers of 128 -> 512 -> 128 on 12 x 64 tokens
TOKENS, LAYER = 12 * 64, 2 * 2 * 128 * 512  # operations of a layer for one token


@pytest.mark.parametrize("m", [2, 4])
def test_what_runs_again_takes_its_time(m: int) -> None:
    """Two stages of three layers. Run again, each stage has three layers' forward more in every backward pass, which delays the step by
    that for every micro-batch and once for the other stage."""
    pins: dict[str, Any] = {"pp": 2, "micro_batches": m, "blocks": (3, 3)}
    found = {mode: priced(program_of("deep"), 2, machine(flops=1e9), recompute=mode, **pins) for mode in ("none", "full")}
    again = 3 * LAYER * TOKENS / m / 1e9
    for none, full in zip(found["none"].stages, found["full"].stages, strict=True):
        assert (full.forward_s, full.backward_s) == pytest.approx((none.forward_s, none.backward_s + again))
    assert found["full"].step_time_s - found["none"].step_time_s == pytest.approx((m + 1) * again)


@pytest.mark.parametrize(("m", "transfers"), [(1, 2), (2, 2), (4, 4)])
def test_stages_wait_for_transfers(m: int, transfers: int) -> None:
    """Of the activations of a micro-batch. Of 4 micro-batches the first goes forward and the last backward with nothing to hide them; and
    of the 3 waits in the steady state two stages hide half, rounded up."""
    pins: dict[str, Any] = {"pp": 2, "micro_batches": m, "blocks": (3, 3)}
    plain, slow = (priced(program_of("deep"), 2, machine(flops=1e9, link=link), **pins) for link in (FAST, 1e6))
    assert slow.step_time_s - plain.step_time_s == pytest.approx(transfers * 4 * 128 * TOKENS / m / 1e6)


def test_a_host_that_computes_copies_what_its_stages_exchange() -> None:
    """The sender and the receiver of each message lose a quarter of its second: of 4 micro-batches each stage has 4 messages forward and 4
    back, and where the second stage ends the first one's forward has been delayed once, the last one's backward once."""
    pins: dict[str, Any] = {"pp": 2, "micro_batches": 4, "blocks": (3, 3)}
    rate = 4 * 128 * TOKENS / 4  # a micro-batch's activations take a second
    devices = machine(flops=1e9, link=rate)
    wire = dataclasses.replace(devices.intra, host_share=0.25)
    hosts = dataclasses.replace(devices, gpu=dataclasses.replace(devices.gpu, host=True), intra=wire)
    plain, slow = (priced(program_of("deep"), 2, c, **pins) for c in (devices, hosts))
    for a, b in zip(plain.stages, slow.stages, strict=True):
        assert (b.forward_s - a.forward_s, b.backward_s - a.backward_s) == pytest.approx((0.25, 0.25))
    assert slow.step_time_s - plain.step_time_s == pytest.approx((4 + 1) * 0.5)


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_gradients_of_later_micro_batches_are_added(zero: int, parts: int) -> None:
    """Two gradients are read and one written, 3 times of 4; of what is in parts after each pass, a quarter of them."""
    kept: dict[str, Any] = {"dp": 4, "micro_batches": 4, "zero": zero}
    found = [
        priced(program_of("wide"), 4, machine(memory=1e6), recipe=Recipe(adds_gradients=adds), **kept).step_time_s for adds in (False, True)
    ]
    assert found[1] - found[0] == pytest.approx(3 * 3 * 4 * NUMBERS / parts / 1e6)
    alone = [priced(program_of("wide"), 1, machine(memory=1e6), recipe=Recipe(adds_gradients=adds)) for adds in (False, True)]
    assert alone[0].step_time_s == alone[1].step_time_s


@functools.cache
def top_heavy() -> Program:
    """Nearly all parameters are on the first stage, nearly all arithmetic on the second."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.down = nn.Embedding(20000, 64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.down(torch.relu(self.up(self.table(ids)))), y)

    return capture(Model(), (torch.zeros(64, dtype=torch.long), torch.zeros(64, 64))).program


def test_the_slowest_stage_decides_reduction_and_update() -> None:
    cluster = machine(flops=1e9, memory=1e9, link=1e8)
    found = priced(top_heavy(), 4, cluster, "adamw", pp=2, dp=2)
    table = 20000 * 64
    assert found.stages[0].parameters == table and found.stages[1].parameters == 2 * 64 * 256 + 256 + 64
    assert found.optimizer_s == pytest.approx(3 * (4 + 2 * 12) * table / 1e9)
    assert found.gradient_sync_s == pytest.approx(4 * table / 1e8), "of two ranks each sends all of it"
