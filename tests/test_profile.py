"""`autopar profile`: constants found again from times that they predict, cluster files written and read, a real profile of two workers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar import cli
from autopar.capture import capture
from autopar.errors import LaunchError
from autopar.measure import Pricer
from autopar.measure import profile as profiling
from autopar.measure.layer_timings import DEVICE_LAUNCHES, HOST_LAUNCHES, LAYERS, TransformerLayer
from autopar.measure.layer_timings import made as layer_made
from autopar.measure.profile import Profile, Sizes, profile, save
from autopar.measure.timings import Machine, Timed
from autopar.planner.price import Ledger
from autopar.planner.resources import check_measure
from autopar.report.profile import print_profile, profile_json
from cost_models.cluster import Cluster, Gpu, Link, list_clusters, load_cluster
from cost_models.collectives import KINDS, collective_time_s
from cost_models.compute import OP_CLASSES, op_time_s
from cost_models.fit import CollectiveTime, OperatorTime, fit_gpu, fit_link, gpu_loss, link_loss, port_bytes, rescaled
from cost_models.recipe import Recipe
from cost_models.write import cluster_toml, figures

SMALL = Sizes(largest=128, nbytes=(2**10, 2**16))
STATED = ("measured: ", "fitted: ", "assumed: ")

MODEL = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return self.layers(x).square().mean()


def net():
    return Net(), (torch.ones(16, 32),)
'''


# ----------------------------------------------------------------------------------------------------------------- fitting
def collectives_of(cluster: Cluster, ranks: tuple[int, ...], noise: float = 0.0) -> list[CollectiveTime]:
    """The times that a cluster's own constants predict, with a tenth of them ten times as long if there is noise."""
    draw = random.Random(0)
    found = []
    for kind, n, nbytes in itertools.product(KINDS, ranks, (2**k for k in range(10, 27, 4))):
        if kind == "p2p" and n > 2:
            continue
        exact = collective_time_s(kind, nbytes, n, cluster, ranks_per_node=n)
        disturbed = 10 if draw.random() < noise else math.exp(draw.gauss(0, noise / 4))
        found.append(CollectiveTime(kind=kind, nbytes=nbytes, ranks=n, measured_s=exact * disturbed))
    return found


@pytest.mark.pure
@pytest.mark.parametrize("name,ranks", [("cpu", (2,)), ("cpu", (2, 4)), ("dgx-h100", (2, 8)), ("pcie-box", (2, 8))])
@pytest.mark.parametrize("latency,fraction", [(0.1, 1.3), (8.0, 0.5)])
def test_a_link_is_found_again_from_the_times_that_it_predicts(name: str, ranks: tuple[int, ...], latency: float, fraction: float) -> None:
    cluster = load_cluster(name)
    base = cluster.intra
    true = dataclasses.replace(rescaled(base, latency), achievable_fraction=min(0.95, base.achievable_fraction * fraction))
    true = dataclasses.replace(true, hop_simple_s=2 * true.hop_simple_s)
    times = collectives_of(dataclasses.replace(cluster, intra=true), ranks)
    loss = link_loss([(cluster, times)], base.name)
    assert loss(base) > 0.25
    start = min((rescaled(base, factor) for factor in profiling.SCALES), key=loss)
    fitted, error = fit_link(start, loss, profiling.LINK_FITTED)
    assert error == loss(fitted) < 0.04


@pytest.mark.pure
def test_outliers_do_not_move_a_link() -> None:
    cluster = load_cluster("cpu")
    times = collectives_of(cluster, (2, 4), noise=0.1)
    exact = link_loss([(cluster, collectives_of(cluster, (2, 4)))], cluster.intra.name)
    fitted, _ = fit_link(cluster.intra, link_loss([(cluster, times)], cluster.intra.name))
    assert exact(fitted) < 0.03


@pytest.mark.pure
def test_constants_of_which_the_times_say_nothing_keep_their_values() -> None:
    cluster = load_cluster("dgx-h100")
    base = cluster.intra
    times = [CollectiveTime(kind="p2p", nbytes=2**26, ranks=2, measured_s=1e-3)]
    fitted, _ = fit_link(base, link_loss([(cluster, times)], base.name))
    changed = {f.name for f in dataclasses.fields(Link) if getattr(fitted, f.name) != getattr(base, f.name)}
    assert changed and not changed & {"in_switch_fraction", "start_low_latency_s", "hop_low_latency_s", "peer_s", "bandwidth_bytes_per_s"}


def operators_of(gpu: Gpu) -> list[OperatorTime]:
    products = [("matmul", 2.0 * n**3, 12.0 * n**2) for n in (64, 128, 256, 512, 1024, 2048)]
    others = [(c, 2e9 * k, 1e6 * k) for c, k in itertools.product(("attention", "conv"), (1, 8))]
    others += [(c, 0.0, 1e8 * k) for c, k in itertools.product(("pointwise", "reduction", "gather"), (1, 4))]
    return [
        OperatorTime(op_class=c, flops=flops, bytes_moved=moved, dtype="float32", measured_s=op_time_s(c, flops, moved, "float32", gpu))
        for c, flops, moved in products + others
    ]


@pytest.mark.pure
@pytest.mark.parametrize("name", ["cpu", "dgx-a100"])
def test_a_gpu_is_found_again_from_the_times_that_it_predicts(name: str) -> None:
    base = load_cluster(name).gpu
    shares = dict(zip(OP_CLASSES, (0.71, 0.33, 0.52, 0.9, 0.61, 0.11, 0.5), strict=True))
    true = dataclasses.replace(base, fractions=tuple(shares.items()))
    times = operators_of(true)
    fitted, error = fit_gpu(base, times)
    assert error == gpu_loss(times)(fitted) < 0.02
    assert {c: fitted.fraction(c) for c in OP_CLASSES} == pytest.approx({**shares, "other": base.fraction("other")}, rel=0.1)
    assert (fitted.rates, fitted.launch_s) == (base.rates, base.launch_s)


@pytest.mark.pure
def test_bytes_through_a_port() -> None:
    sent = {kind: port_bytes(kind, 1600, 4) for kind in KINDS}
    assert sent == {"all_reduce": 2400, "all_gather": 1200, "reduce_scatter": 1200, "all_to_all": 300, "broadcast": 1600, "p2p": 1600}


# ------------------------------------------------------------------------------------------------------------------- files
def plain(item: Gpu | Link) -> object:
    return dataclasses.replace(item, name="")


@pytest.mark.pure
@pytest.mark.parametrize("name", list_clusters())
def test_a_cluster_that_is_written_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(cluster_toml(cluster), encoding="utf-8")
    read = load_cluster(path)
    assert [plain(p) for p in (read.gpu, read.intra, read.inter)] == [plain(p) for p in (cluster.gpu, cluster.intra, cluster.inter)]
    assert dataclasses.replace(read, gpu=cluster.gpu, intra=cluster.intra, inter=cluster.inter) == cluster
    assert read.gpu.source("peak_flops_per_s.float32") == cluster.gpu.source("peak_flops_per_s.float32")


@pytest.mark.pure
def test_texts_are_quoted(tmp_path: Path) -> None:
    strange = 'a "quoted" back\\slash, tab\t, line\n, delete\x7f, é, 😀'
    cluster = profiling._titled(load_cluster("cpu"), strange)
    (tmp_path / "x.toml").write_text(cluster_toml(cluster), encoding="utf-8")
    assert dict(load_cluster(tmp_path / "x.toml").sources)["title"] == strange


def a_machine(device: str = "cpu") -> Machine:
    return Machine(device=device, name="A device", backend="gloo", torch="2.13", memory_bytes=2**34, context_bytes=2**28, tf32=False)


def a_profile() -> Profile:
    cluster = load_cluster("cpu")
    return Profile(
        cluster=cluster, machine=a_machine(), workers=2, operators=(), collectives=tuple(collectives_of(cluster, (2, 4))), gpu_error=0.1,
        link_error=0.2, notes=("[a note]",),
    )  # fmt: skip


@pytest.mark.pure
def test_a_gpu_is_stated_from_what_was_measured() -> None:
    base = load_cluster("dgx-a100").gpu
    true = dataclasses.replace(base, memory_bandwidth_bytes_per_s=1e12, rates=(("float32", 1e13),), launch_s=4e-6)
    every = enumerate(operators_of(true))
    times = [Timed(kind=t.op_class, what=f"{t.op_class} {k}", timing=t, best_s=t.measured_s, cpu_share=1.0) for k, t in every]
    gpu, error = profiling._gpu(base, a_machine("cuda"), 8, (4e-6, 4e-6), times, "torch 2.13, A device")
    stated = figures(gpu)
    source = "measured: an operator of a tiny transformer layer, forward or backward, torch 2.13, A device"
    assert stated["launch_s"] == {"value": 4e-6, "source": source}
    assert stated["memory_bytes"]["value"] == 2**34  # each worker has a GPU of its own
    assert gpu.peak_flops_per_s("float32") == pytest.approx(1e13 * base.fraction("matmul"), rel=0.2)  # the best that was seen
    assert gpu.peak_flops_per_s("bfloat16") == base.peak_flops_per_s("bfloat16")
    assert stated["peak_flops_per_s.bfloat16"]["source"].startswith(f"assumed: as the catalogue's {base.name} (datasheet: ")
    assert stated["achievable_fraction.matmul"]["source"] == "fitted: to 6 operators, torch 2.13, A device"
    assert error < 0.1 and not gpu.host
    on_cpu, _ = profiling._gpu(base, a_machine("cpu"), 8, (4e-6, 4e-6), times, "torch 2.13, A device")
    assert on_cpu.host


@pytest.mark.pure
def test_launches_of_a_layer_are_those_that_the_planner_counts() -> None:
    """A transformer layer has 12 operators that are no views. A host is counted one launch for each in either direction; of the sum at the
    end, which keeps nothing for backward, the forward alone. A device is counted that sum forward (0.5) and backward (1)."""
    layer, x = TransformerLayer(8, 2), torch.rand(1, 4, 8).requires_grad_()
    program = capture(nn.Sequential(layer, Total()), {"input": x}).program
    for name, launches in (("cpu", HOST_LAUNCHES + 1), ("dgx-a100", DEVICE_LAUNCHES + 1.5)):
        cluster = load_cluster(name)
        slow = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, launch_s=1.0))
        costs = Ledger(program, Pricer(slow, {}, None, Recipe())).costs
        issued_s = sum(c.forward_s + c.backward_s if slow.gpu.host else sum(c.host_s) for c in costs)
        assert issued_s == pytest.approx(launches, abs=0.01)


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


@pytest.mark.pure
@pytest.mark.parametrize(("others", "convolutions"), [(1.0, 1.0), (1.25, 0.7), (1.6, 2.0)])
def test_operators_among_others_take_as_long_as_layers_show(others: float, convolutions: float) -> None:
    """Layers that take so many times as long as their operators by themselves: afterwards they are predicted as they were measured."""
    base = load_cluster("cpu")
    gpu = dataclasses.replace(base.gpu, fractions=tuple((c, 0.6) for c in OP_CLASSES), launch_s=0.0)

    def seconds(gpu: Gpu) -> dict[str, dict[bool, float]]:
        found: dict[str, dict[bool, float]] = {}
        for name in LAYERS:
            layer, x = layer_made(name)
            costs = Pricer(dataclasses.replace(base, gpu=gpu), {}).program(capture(layer, {"x": x}).program).ops.values()
            of_kind = {kind: [c for c in costs if (c.counts.op_class == "conv") == kind] for kind in (False, True)}
            found[name] = {kind: sum(c.forward_s + c.backward_s for c in each) for kind, each in of_kind.items()}
        return found

    measured = {name: others * s[False] + convolutions * s[True] for name, s in seconds(gpu).items()}
    changed = profiling._among_others(dataclasses.replace(base, gpu=gpu), measured, "here")
    for name, s in seconds(changed).items():
        assert s[False] + s[True] == pytest.approx(measured[name], rel=0.02), name
    assert changed.fraction("conv") == pytest.approx(min(1.0, 0.6 / convolutions), rel=0.02)
    assert changed.source("achievable_fraction.matmul").endswith("among others, as 2 layers show it")


@pytest.mark.pure
def test_a_datasheet_s_bandwidth_is_kept_unless_more_was_seen() -> None:
    cluster = load_cluster("dgx-h100")
    times = collectives_of(cluster, (2, 8))
    rate = cluster.gpu_bandwidth_bytes_per_s
    kept, _ = profiling._link(cluster, times, 0.5 * rate, "here", "nccl")
    raised, _ = profiling._link(cluster, times, 2 * rate, "here", "nccl")
    assert kept.bandwidth_bytes_per_s == cluster.intra.bandwidth_bytes_per_s
    assert kept.source("bandwidth_bytes_per_s").startswith("assumed: ")
    assert raised.bandwidth_bytes_per_s == pytest.approx(2 * cluster.intra.bandwidth_bytes_per_s)
    assert raised.source("bandwidth_bytes_per_s").startswith("measured: ")
    alone, error = profiling._link(cluster, [], 0.0, "here", "nccl")
    assert error is None and all(f["source"].startswith("assumed: ") for f in figures(alone).values())


@pytest.mark.pure
def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_profile(a_profile())
    out = capsys.readouterr().out
    assert "[a note]" in out and "85GFLOP/s" in out and "gpu.launch_s" in out and "all_reduce of 4" in out and "1 KiB" in out


@pytest.mark.pure
def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(profiling, "profile", lambda *_, **__: a_profile())
    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(SystemExit) as stop:
        cli.main(["profile", "-o", str(tmp_path / "out.toml"), "--json"])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and "Permission denied" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["exit_code"] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.pure
def test_more_workers_than_there_is_room_for() -> None:
    for workers in (0, 1000):
        with pytest.raises(LaunchError, match="was asked for, but"):
            profile(load_cluster("cpu"), workers)


# ------------------------------------------------------------------------------------------------------------------- real
@pytest.mark.gloo
def test_a_profile_of_two_workers_can_be_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "Sizes", lambda: SMALL)
    Path("out.toml").write_text("to be replaced")
    assert _main(["profile", "--gpus", "2", "--cluster", "cpu", "-o", "out.toml", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["written"] == "out.toml" and answer["workers"] == 2
    assert {p.name for p in tmp_path.iterdir()} == {"out.toml"}

    cluster = load_cluster("out.toml")
    assert cluster.gpu.host is not torch.cuda.is_available()
    check_measure("live", cluster)
    for part, item in (("cluster", cluster), ("gpu", cluster.gpu), ("intra", cluster.intra), ("inter", cluster.inter)):
        assert answer[part] == figures(item)
        for key, figure in answer[part].items():
            assert figure["source"].startswith(STATED), (part, key)
    measured = {key for key, figure in answer["gpu"].items() if not figure["source"].startswith("assumed: ")}
    assert measured >= {f"achievable_fraction.{c}" for c in OP_CLASSES if c != "other"} | {"launch_s", "memory_bytes"}
    assert measured >= {f"peak_flops_per_s.{d}" for d in ("float64", "float32", "float16", "bfloat16")}
    assert cluster.intra.source("bandwidth_bytes_per_s").startswith("measured: best of all collectives and sizes, gloo")
    assert all(figure["source"].startswith("assumed: ") for figure in answer["inter"].values())
    assert answer["operators"] > 12 and answer["collectives"] == len(KINDS) * len(SMALL.nbytes)

    Path("model.py").write_text(MODEL)
    assert _main(["plan", "model.py:net", "--gpus", "2", "--pin", "pp=1", "--cluster", "out.toml"]) == 0
    assert "links of out" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_profile_of_a_gpu(tmp_path: Path) -> None:
    found = profile(load_cluster("dgx-h100"), 1, sizes=Sizes(largest=1024, nbytes=(2**10,)))
    save(found, tmp_path / "out.toml")
    gpu = load_cluster(tmp_path / "out.toml").gpu
    assert gpu.source("peak_flops_per_s.bfloat16").startswith("measured: ")
    assert gpu.peak_flops_per_s("bfloat16") > gpu.peak_flops_per_s("float32")
    assert profile_json(found)["link_error"] is None


def _main(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    return int(stop.value.code or 0)
