"""What the host needs beside the device: issuing operators, steps of collectives while a pipeline uses the same links."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import get_args

import pytest
import torch

from autopar.catalog.transitions import ALL_TO_ALL, REGROUP, TRANSITIONS, Transition
from autopar.ir import Op, Ref, TensorType
from autopar.measure import Pricer, count
from autopar.measure.count import op_class
from autopar.measure.launches import CHANGED, GATHERED, launches
from autopar.planner import Pins, make_plan
from autopar.planner.exchange import Once
from autopar.planner.price import Ledger
from cost_models.cluster import _COLLECTIVES, Cluster, HardwareFileError, list_links, load_cluster, load_link
from cost_models.collectives import KINDS, Kind, collective_time_s
from cost_models.compute import causal_share, kernel_time_s
from cost_models.fit import CollectiveTime, slower_kinds
from cost_models.recipe import AUTOPAR, Recipe
from cost_models.step import optimizer_time_s
from cost_models.write import cluster_toml
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure
ONE = {"pp": 1, "dp": 1, "tp": 1}
ROWS, MATRIX, ROW = (TensorType(shape, torch.float32, True) for shape in ((4, 8), (8, 8), (8,)))
STILL = TensorType((4, 8), torch.float32, False)


def cluster(launch_s: float = 0.0) -> Cluster:
    """Of two GPUs a node."""
    known = load_cluster("p5")
    return dataclasses.replace(known, gpu=dataclasses.replace(known.gpu, launch_s=launch_s), gpus_per_node=2)


@functools.cache
def ledger(launch_s: float) -> Ledger:
    return Ledger(program_of("stack"), Pricer(cluster(launch_s), ONE))


# -------------------------------------------------------------------------------------------------------- issuing operators
def test_every_operator_is_issued_and_what_is_trained_again_in_backward() -> None:
    program, found = program_of("stack"), ledger(1e-5)
    for op, cost in zip(program.ops, found.costs, strict=True):
        forward, backward = cost.host_s
        assert forward > 0
        differentiable = not op.no_grad and any(program.types[o].grad for o in op.outputs if o is not None)
        assert (backward > 0) == differentiable
    assert all(cost.host_s == (0.0, 0.0) for cost in ledger(0.0).costs)


@pytest.mark.parametrize(
    ("target", "ins", "expected"),
    [
        ("linear.default", (ROWS, MATRIX, ROW), (1.0, 0.3 + 2 * 1.1 + 0.35)),  # a node, two products, the sum for the bias
        ("linear.default", (STILL, MATRIX), (1.0, 0.3 + 1.1)),
        ("mul.Tensor", (ROWS, ROWS), (0.4, 0.3 + 2 * 0.4)),
        ("mul.Tensor", (ROWS, STILL), (0.4, 0.3 + 0.4)),
        ("add.Tensor", (ROWS, ROWS), (0.4, 0.3)),  # both gradients are what arrives
        ("add.Tensor", (ROWS, ROW), (0.4, 0.3 + 0.4)),  # that of a row is a sum
        ("transpose.int", (ROWS,), (0.1, 0.3)),  # no kernel
        ("layer_norm.default", (ROWS, ROW, ROW), (0.7, 1.0)),
        ("gelu.default", (STILL,), (0.4, 0.0)),
    ],
)
def test_launches_are_counted_by_kernels(target: str, ins: tuple[TensorType, ...], expected: tuple[float, float]) -> None:
    trained = any(t.grad for t in ins)
    found = launches(f"aten.{target}", op_class(f"aten.{target}"), ins, (TensorType((4, 8), torch.float32, trained),), trained)
    assert found == pytest.approx(expected)


def test_a_software_s_launches_take_as_long_as_its_recipe_says() -> None:
    program, slow = program_of("stack"), Pricer(cluster(1e-5), ONE, None, Recipe(launches=3.0))
    plain = Pricer(cluster(1e-5), ONE, None, Recipe())
    assert Ledger(program, slow).seconds(range(10))[0] == pytest.approx(3 * Ledger(program, plain).seconds(range(10))[0])
    with pytest.raises(ValueError, match="negative launches"):
        Recipe(launches=-1.0)


def test_operators_take_as_long_as_the_slower_of_device_and_host() -> None:
    """Over a stretch, not over each operator: the host runs ahead in long kernels and is caught up with in short ones."""
    everything = range(len(program_of("stack").ops))
    device = ledger(0.0).seconds(everything)
    assert device[0] == pytest.approx(sum(c.forward_s for c in ledger(0.0).costs))
    assert device[1] == pytest.approx(sum(c.backward_s for c in ledger(0.0).costs))
    for launch_s in (1e-9, 1e-3):
        found = ledger(launch_s)
        host = [sum(c.host_s[way] for c in found.costs) for way in (0, 1)]
        assert found.seconds(everything)[:2] == pytest.approx((max(device[0], host[0]), max(device[1], host[1])))
        assert [c.forward_s for c in found.costs] == [c.forward_s for c in ledger(0.0).costs]
    assert ledger(1e-9).seconds(everything) == device
    assert ledger(1e-3).seconds(everything)[0] > 2 * device[0]


def test_a_slower_host_is_never_faster() -> None:
    times = [ledger(s).seconds(range(10, 24)) for s in (0.0, 1e-6, 5e-6, 2e-5, 1e-4)]
    for way in (0, 1):
        assert [t[way] for t in times] == sorted(t[way] for t in times)


# --------------------------------------------------------------------------------------------------------- contended steps
@pytest.mark.parametrize("kind,passes", [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_steps_inside_stages_wait_where_a_pipeline_crosses_nodes(kind: str, passes: int) -> None:
    """Four ranks on two nodes: two steps of a ring stay in a node, one leaves it."""
    of, software, change = cluster(1e-5), Recipe(contended_step_s=2e-4, contended_hop_s=7e-4), Transition(kind, kind)
    crossing = {"pp": 2, "dp": 1, "tp": 4}
    slowed = Pricer(of, crossing, None, software)
    assert slowed.contended and slowed.host_s(change, "tp") == pytest.approx((1e-5 + passes * (2 * 2e-4 + 7e-4), 0.0))
    for mesh in ({"pp": 1, "dp": 2, "tp": 4}, {"pp": 2, "dp": 1, "tp": 1}):  # no pipeline; a pipeline inside a node
        pricer = Pricer(of, mesh, None, software)
        assert not pricer.contended and pricer.host_s(change, "tp") == pytest.approx((1e-5 if mesh["tp"] > 1 else 0.0, 0.0))
    assert slowed.host_s(Transition("own"), "tp") == slowed.host_s(change, "dp") == (0.0, 0.0)
    assert slowed.collective_s(kind, 2**20, "tp") == Pricer(cluster(), crossing).collective_s(kind, 2**20, "tp")


@pytest.mark.parametrize("change", [*TRANSITIONS.values(), ALL_TO_ALL, REGROUP], ids=lambda t: t.function)
def test_every_change_of_layout_keeps_the_host_of_a_gpu_as_long_as_it_was_timed_to(change: Transition) -> None:
    """With a pipeline between nodes too: nobody's work on the same links is autopar's."""
    for mesh in ({"pp": 1, "dp": 2, "tp": 4}, {"pp": 2, "dp": 1, "tp": 4}):
        assert Pricer(cluster(1e-5), mesh).host_s(change, "tp") == pytest.approx(
            tuple(AUTOPAR.launches * 1e-5 * n for n in CHANGED[change.function])
        )
    assert min(CHANGED[change.function]) >= 1, "a function of autograd's, at the least"
    assert all(n >= 2.5 for n, kind in zip(CHANGED[change.function], (change.forward, change.backward), strict=True) if kind)


def test_what_a_software_adds_between_nodes() -> None:
    """To every collective that leaves a node, once, whatever its size; to none inside of one."""
    alone, slowed = (Pricer(cluster(), {"pp": 1, "dp": 4, "tp": 2}, None, Recipe(between_nodes_s=s)) for s in (0.0, 3e-4))
    for nbytes in (2**12, 2**26):
        plain = alone.collective_s("all_reduce", nbytes, "dp")
        assert slowed.collective_s("all_reduce", nbytes, "dp") == pytest.approx(plain + 3e-4)
        assert slowed.collective_s("all_reduce", nbytes, "tp") == alone.collective_s("all_reduce", nbytes, "tp")
        joint = alone.joint_s("all_reduce", nbytes, ("dp", "tp"))
        assert slowed.joint_s("all_reduce", nbytes, ("dp", "tp")) == pytest.approx(joint + 3e-4)
        assert slowed.joint_s("all_reduce", nbytes, ("tp",)) == alone.joint_s("all_reduce", nbytes, ("tp",))
    for name in ("between_nodes_s", "once_s"):
        with pytest.raises(ValueError, match="faster than it is"):
            Recipe(**{name: -1e-4})


def test_links_are_fitted_to_timings_of_links() -> None:
    """What training runs took holds their software's own work, which is no property of a link."""
    for name in list_links():
        link = load_link(name)
        assert not [key for key, source in link.sources if "training runs" in source], name
    assert AUTOPAR.between_nodes_s == AUTOPAR.contended_step_s == AUTOPAR.contended_hop_s == AUTOPAR.once_s == 0.0


# -------------------------------------------------------------------------------------------------------------------- files
def test_the_host_is_written_and_read(tmp_path: Path) -> None:
    known = load_cluster("dgx-h100")
    sources = dict(known.gpu.sources) | {"launch_s": "assumed: a test"}
    stated = dataclasses.replace(known.gpu, launch_s=3e-5, sources=tuple(sources.items()))
    (tmp_path / "a.toml").write_text(cluster_toml(dataclasses.replace(known, gpu=stated)), encoding="utf-8")
    read = load_cluster(tmp_path / "a.toml").gpu
    assert read.launch_s == 3e-5 and not read.host
    text = cluster_toml(load_cluster("cpu"))
    assert "host = true" in text and "host = " not in cluster_toml(known)
    (tmp_path / "b.toml").write_text(text.replace("host = true", 'host = "yes"'), encoding="utf-8")
    with pytest.raises(HardwareFileError, match="host must be a bool"):
        load_cluster(tmp_path / "b.toml")


# ------------------------------------------------------------------------------------------------- processes that share a core
def test_processes_that_take_turns_on_a_core_compute_so_much_longer(tmp_path: Path) -> None:
    """The description of a machine says by how many; its links were measured with all of them, and stay as they are."""
    alone = load_cluster("cpu")
    sources = (*alone.gpu.sources, ("shared_by", "measured: 4 workers on 2 cores"))
    shared = dataclasses.replace(alone, gpu=dataclasses.replace(alone.gpu, shared_by=2.0, sources=sources))
    (tmp_path / "cpu.toml").write_text(cluster_toml(shared), encoding="utf-8")
    read = load_cluster(tmp_path / "cpu.toml")
    assert (read.gpu.shared_by, load_cluster("cpu").gpu.shared_by) == (2.0, 1.0)
    program, mesh = program_of("stack"), {"pp": 1, "dp": 4, "tp": 1}
    costs = {c.gpu.shared_by: Ledger(program, Pricer(c, mesh)).costs for c in (alone, read)}
    for one, two in zip(costs[1.0], costs[2.0], strict=True):
        assert two.forward_s == pytest.approx(2 * one.forward_s) and two.backward_s == pytest.approx(2 * one.backward_s)
    assert Pricer(read, mesh).collective_s("all_reduce", 2**20, "dp") == Pricer(alone, mesh).collective_s("all_reduce", 2**20, "dp")
    few = cluster_toml(read).replace('value = 2.0, source = "measured: 4 w', 'value = 0.5, source = "measured: 4 w')
    (tmp_path / "cpu.toml").write_text(few, encoding="utf-8")
    with pytest.raises(HardwareFileError, match="shared_by"):
        load_cluster(tmp_path / "cpu.toml")


# ----------------------------------------------------------------------------------------------- collectives that need the host's cores
def test_what_goes_on_beside_kernels_of_the_same_cores_hides_the_less() -> None:
    """By hand: two all-reduces of 3 s beside a backward pass of 10 s are ready after 5 s and 10 s, so that 3 s are left where devices
    compute; 6 s where the cores of the kernels are busy with all of it; in between in proportion."""
    once = Once(reduced=((2, 3.0),), gathers=((1, 2.0),), last_s=0.5, taken=0.0, overlaps_reduction=True, overlaps_gathers=True)
    free_s, gather_s = 3.0, 2.0  # the one gather is needed before anything is computed
    assert once.exposed_s(8.0, 10.0) == pytest.approx(free_s + gather_s + 0.5)
    assert dataclasses.replace(once, taken=1.0).exposed_s(8.0, 10.0) == pytest.approx(6.0 + 2.0 + 0.5)
    assert dataclasses.replace(once, taken=0.4).exposed_s(8.0, 10.0) == pytest.approx(0.4 * 6.0 + 0.6 * free_s + gather_s + 0.5)


def test_only_a_host_that_computes_loses_cores_to_its_links(tmp_path: Path) -> None:
    known, mesh = load_cluster("cpu"), {"pp": 1, "dp": 2, "tp": 1}
    assert Pricer(known, mesh).taken("dp") == known.intra.host_share > 0.0
    (tmp_path / "cpu.toml").write_text(cluster_toml(known), encoding="utf-8")
    assert load_cluster(tmp_path / "cpu.toml").intra.host_share == known.intra.host_share
    sources = (*known.inter.sources, ("host_share", "assumed: a test"))
    two = dataclasses.replace(known, gpus_per_node=1, inter=dataclasses.replace(known.inter, host_share=0.25, sources=sources))
    assert Pricer(two, mesh).taken("dp") == 0.25
    devices = load_cluster("dgx-h100")
    intra = dataclasses.replace(devices.intra, host_share=0.9)
    assert Pricer(dataclasses.replace(devices, intra=intra), mesh).taken("dp") == 0.0
    text = cluster_toml(known).replace("host_share = { value = 0.5", "host_share = { value = 1.5")
    (tmp_path / "cpu.toml").write_text(text, encoding="utf-8")
    with pytest.raises(HardwareFileError, match="host_share"):
        load_cluster(tmp_path / "cpu.toml")


def test_sharding_at_rest_on_a_shared_core_is_priced_with_what_it_takes() -> None:
    """The same plan, ZeRO-3 on two workers: what gathering takes from the kernels is in the step."""
    known = load_cluster("cpu")
    program, pins = program_of("stack"), Pins(pp=1, dp=2, tp=1, zero=3, micro_batches=1, recompute="none")
    steps = list[float]()
    for share in (0.0, 0.5, 1.0):
        c = dataclasses.replace(known, intra=dataclasses.replace(known.intra, host_share=share))
        steps.append(make_plan(program, gpus=2, cluster=c, pins=pins).step_time_s)
    assert steps[0] < steps[1] < steps[2]


def test_parameters_in_parts_keep_the_host_of_a_gpu() -> None:
    """Each that rests in parts, as often as it is gathered; of whole ones, and under another software, nothing is counted."""
    launch_s, program = 1e-3, program_of("stack")
    of = dataclasses.replace(cluster(launch_s), gpus_per_node=8)
    plans = {
        (zero, n): make_plan(program, gpus=2, cluster=of, pins=Pins(pp=1, dp=2, tp=1, zero=zero, micro_batches=n, recompute="none"))
        for zero in (0, 1, 3) for n in (1, 2)
    }  # fmt: skip
    for zero, gathered in ((1, "step"), (3, "use")):
        for n in (1, 2):
            whole, parts = plans[0, n].stages[0], plans[zero, n].stages[0]
            times = (len(plans[zero, n].zero_dims) + 1) / (n if gathered == "step" else 1)  # one is read at both ends
            assert times and parts.issued_s - whole.issued_s == pytest.approx(AUTOPAR.launches * launch_s * sum(GATHERED[gathered]) * times)
            assert parts.forward_s + parts.backward_s >= parts.issued_s * (1 - 1e-9) > 0, "what the host governs takes as long"
    other = make_plan(
        program, gpus=2, cluster=of, pins=Pins(pp=1, dp=2, tp=1, zero=3, micro_batches=1, recompute="none"),
        recipe=dataclasses.replace(AUTOPAR, host_as_timed=False),
    )  # fmt: skip
    assert other.stages[0].issued_s == pytest.approx(plans[0, 1].stages[0].issued_s)


# ------------------------------------------------------------------------------------------------------- a host that computes
@pytest.mark.parametrize("keys,share", [(128, 1.0), (512, 1.0), (1024, 0.75), (700, (512 * 512 + 188 * 700) / 700**2), (4096, 0.5625)])
def test_a_cpu_skips_whole_blocks_of_a_causal_mask(keys: int, share: float) -> None:
    """Each row of scores is computed to the end of its block of 512 keys."""
    assert causal_share(keys) == pytest.approx(share)
    rows = [min(-(-(k + 1) // 512) * 512, keys) for k in range(keys)]
    assert causal_share(keys) == pytest.approx(sum(rows) / keys**2)


def test_causal_attention_over_few_keys_takes_a_cpu_as_long_as_any() -> None:
    q = TensorType(shape=(2, 4, 128, 32), dtype=torch.float32, grad=True)
    target = "aten.scaled_dot_product_attention.default"
    plain = Op(target=target, args=(Ref("q"), Ref("k"), Ref("v")), outputs=("y",))
    causal = dataclasses.replace(plain, kwargs=(("is_causal", True),))
    counts = [count(op, (q, q, q), (q,)) for op in (plain, causal)]
    assert counts[1].flops == counts[0].flops / 2 and [c.causal_keys for c in counts] == [0, 128]
    on_cpu = [Pricer(load_cluster("cpu"), ONE).counted_s(c, "float32") for c in counts]
    assert on_cpu[0] == pytest.approx(on_cpu[1])
    on_gpu = [[k.flops for kernels in Pricer(cluster(), ONE).work(c, "float32") for k in kernels] for c in counts]
    assert on_gpu[1] == pytest.approx([flops / 2 for flops in on_gpu[0]])


def test_a_cpu_updates_one_parameter_after_the_other() -> None:
    gpu = load_cluster("cpu").gpu
    few, many = (optimizer_time_s(trainable_params=1e6, gpu=gpu, tensors=n) for n in (1, 101))
    assert many - few == pytest.approx(100 * 1.8 * gpu.launch_s)
    assert few == pytest.approx(kernel_time_s("pointwise", 0.0, 1e6 * (4 + 2 * (4 + 8)), "float32", gpu) + 1.8 * gpu.launch_s)
    plain = [optimizer_time_s(trainable_params=1e6, gpu=gpu, tensors=n, optimizer="sgd") for n in (1, 101)]
    assert plain[1] - plain[0] == pytest.approx(100 * 0.2 * gpu.launch_s)


# -------------------------------------------------------------------------------------------------- a library with algorithms of its own
def test_a_kind_that_a_library_does_otherwise_takes_so_many_times_as_long(tmp_path: Path) -> None:
    known = load_cluster("cpu")
    sources = (*known.intra.sources, ("slower.all_gather", "measured: a test"))
    other = dataclasses.replace(known, intra=dataclasses.replace(known.intra, slower=(("all_gather", 2.5),), sources=sources))
    (tmp_path / "cpu.toml").write_text(cluster_toml(other), encoding="utf-8")
    read = load_cluster(tmp_path / "cpu.toml")
    assert read.intra.slower == other.intra.slower and known.intra.slower == ()
    for kind in KINDS:
        plain, slowed = (collective_time_s(kind, 2**20, 2, c, ranks_per_node=2) for c in (known, read))
        assert slowed == pytest.approx((2.5 if kind == "all_gather" else 1.0) * plain)
    sources = (*sources, ("slower_bytes.all_gather", "measured: a test"))
    apart = dataclasses.replace(other.intra, slower_bytes=(("all_gather", 0.5),), sources=sources)
    (tmp_path / "apart.toml").write_text(cluster_toml(dataclasses.replace(other, intra=apart)), encoding="utf-8")
    read = load_cluster(tmp_path / "apart.toml")
    assert read.intra.slower_bytes == apart.slower_bytes
    times = [[collective_time_s("all_gather", n, 2, c, ranks_per_node=2) for n in (1, 2**40)] for c in (known, read)]
    assert [slowed / plain for plain, slowed in zip(*times, strict=True)] == pytest.approx([2.5, 0.5], rel=1e-3)
    text = cluster_toml(other).replace("all_gather = {", "all_gathers = {")
    (tmp_path / "cpu.toml").write_text(text, encoding="utf-8")
    with pytest.raises(HardwareFileError, match="slower"):
        load_cluster(tmp_path / "cpu.toml")


def test_how_much_slower_kinds_are_is_found_again_from_their_times() -> None:
    known = load_cluster("cpu")
    times = [
        CollectiveTime(kind=kind, nbytes=n, ranks=2, measured_s=factor * collective_time_s(kind, n, 2, known, ranks_per_node=2))
        for kind, factor in (("all_reduce", 1.0), ("reduce_scatter", 3.0), ("broadcast", 0.4)) for n in (2**10, 2**16, 2**22)
    ]  # fmt: skip
    found = slower_kinds(known.intra, known, times)
    expected = {"all_reduce": 1.0, "reduce_scatter": 3.0, "broadcast": 0.4}
    assert dict(found.slower) == dict(found.slower_bytes) == pytest.approx(expected)
    assert get_args(Kind) == _COLLECTIVES


def test_latencies_and_bytes_are_told_apart() -> None:
    known = load_cluster("cpu")
    other = dataclasses.replace(known.intra, slower=(("p2p", 4.0),), slower_bytes=(("p2p", 0.25),))
    library = dataclasses.replace(known, intra=other)
    times = [
        CollectiveTime(kind="p2p", nbytes=n, ranks=2, measured_s=collective_time_s("p2p", n, 2, library, ranks_per_node=2))
        for n in (2**10, 2**14, 2**18, 2**22)
    ]  # fmt: skip
    found = slower_kinds(known.intra, known, times)
    assert dict(found.slower)["p2p"] == pytest.approx(4.0, rel=0.03) and dict(found.slower_bytes)["p2p"] == pytest.approx(0.25, rel=0.03)
