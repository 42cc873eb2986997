"""What was measured on a GPU, kept as data; and the benchmarks that measure and price it, where there is none."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks import _gpu_models, hosts, kernels, one_gpu
from benchmarks._decoders import Decoder
from benchmarks._kernels import OPERATORS, Kernel
from benchmarks.one_gpu import Job, Predicted, Ran
from cost_models import load_cluster

SMALL = Decoder(
    layers=8, hidden=32, heads=8, kv_heads=8, ffn=64, vocabulary=64, length=8, tied=False, gated=True, norm="rms", bias=False,
    positions="rotary",
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    for models in (_gpu_models.MODELS, _gpu_models.RANKS):
        monkeypatch.setitem(models, "small", _gpu_models._decoder(SMALL, 16))
    return "small"


# ------------------------------------------------------------------------------------------------------------------ kernels
@pytest.mark.pure
def test_the_kernels_that_are_kept_are_those_that_are_timed() -> None:
    found = kernels.read(kernels.DATA)
    wanted = set(kernels.kernels())
    assert {t.kernel for t in found} <= wanted and len({t.kernel for t in found}) == len(wanted) == 302
    assert {t.gpu for t in found} == {"H100"} and len({(t.kernel, t.of) for t in found}) == len(found)


@pytest.mark.pure
def test_what_a_kernel_is_priced_at() -> None:
    """By hand: a product of 8192 x 4096 by 4096 x 4096 in bf16, whose result of 64 MiB is written after it was computed."""
    cluster = load_cluster("dgx-h100")
    gpu, kernel = cluster.gpu, Kernel(op="linear", sizes=(8192, 4096, 4096), dtype="bfloat16")
    forward = kernels.Timed(kernel=kernel, of="forward", seconds=1.0)
    written_s = 8192 * 4096 * 2 / gpu.memory_bandwidth_bytes_per_s / gpu.fraction("pointwise")
    by_hand = 2 * 8192 * 4096**2 / gpu.peak_flops_per_s("bfloat16") / gpu.fraction("matmul") + written_s
    assert kernels.predicted_s(forward, cluster) == pytest.approx(by_hand)


@pytest.mark.pure
@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_each_operator_runs_forward_and_backward(op: str) -> None:
    sizes = {
        "linear": (8, 4, 6), "attention": (2, 2, 8, 4), "conv": (2, 4, 6, 4, 3), "embedding": (4, 4, 32000), "cross_entropy": (4, 32000),
        "batch_norm": (2, 32, 4), "group_norm": (2, 32, 4), "attention_whole": (2, 2, 8, 4), "attention_masked": (2, 2, 8, 4),
        "bmm": (2, 4, 6, 3), "linear_biased": (8, 4, 6), "depthwise": (2, 4, 6, 3), "conv1d": (2, 4, 9, 3, 3), "topk": (4, 16),
        "conv_transpose": (2, 4, 5, 3), **dict.fromkeys(("max_pool", "avg_pool", "upsample", "pad", "pooled"), (2, 4, 6)),
        **dict.fromkeys(("index_select", "index", "index_add", "gather", "scatter_add"), (8, 4, 5)),
    }  # fmt: skip
    kernel = Kernel(op=op, sizes=sizes.get(op, (8, 4)), dtype="float32")
    assert all(s > 0 for s in kernels.seconds_of(kernel, torch.device("cpu")))


@pytest.mark.pure
def test_a_file_of_kernels_is_read_as_it_was_written(tmp_path: Path) -> None:
    timed = [kernels.Timed(kernel=Kernel(op="gelu", sizes=(8, 16), dtype="float32"), of=of, seconds=3e-6, gpu="A") for of in kernels.PASSES]
    kernels.write(tmp_path / "k.csv", timed)
    assert kernels.read(tmp_path / "k.csv") == timed
    text = (tmp_path / "k.csv").read_text()
    assert text.splitlines()[1] == "autopar,A,float32,gelu,8x16,forward,0,1024,3.0000e-06"
    for bad in (text.replace("gelu", "gulp"), text.replace("8x16", "8xy"), text.replace("3.0000e-06", "-1"), text.replace("forward", "up")):
        (tmp_path / "bad.csv").write_text(bad)
        with pytest.raises(ValueError, match="no row of timed kernels"):
            kernels.read(tmp_path / "bad.csv")


# --------------------------------------------------------------------------------------------------------------- whole plans
@pytest.mark.pure
def test_the_plans_that_are_kept_are_of_those_that_are_run() -> None:
    found = one_gpu.read(one_gpu.DATA)
    wanted = Counter(map(str, one_gpu.jobs(_gpu_models.MODELS, _gpu_models.RANKS)))
    assert set(map(str, (r.job for r in found))) <= set(wanted) and max(wanted.values()) == 1 and len(found) == 102
    assert all(r.step_s > 0 and r.peak_bytes > 0 and not r.refused for r in found)
    assert all(math.isfinite(r.losses[0]) for r in found if r.job.gpus == 1) and all(not r.losses for r in found if r.job.gpus > 1)


@pytest.mark.pure
def test_a_plan_and_plain_torch_train_alike(small: str) -> None:
    wanted = [j for j in one_gpu.jobs([small], []) if not j.less]
    plans = one_gpu.planned(wanted)
    found = [one_gpu.train(job, each.plan, "cpu", 1) for job, each in zip(wanted, plans, strict=True)]
    assert [r.job.plain for r in found] == [True, False, False, False] and not any(r.refused for r in found)
    assert [r.micro_batches for r in found[1:]] == [1, 4, 1] and found[3].recomputed == 8
    for r in found[1:]:
        assert r.losses == pytest.approx(found[0].losses, rel=1e-2) and r.predicted_bytes > 0
    again = one_gpu.predictions(found, one_gpu.CLUSTER)[1:]
    assert [p and p[:2] for p in again] == [(r.predicted_s, r.predicted_bytes) for r in found[1:]]


@pytest.mark.fake
def test_a_single_rank_of_eight_is_run(small: str, fake_group: Callable[..., None]) -> None:
    fake_group(8, 7)
    wanted = [j for j in one_gpu.jobs([], [small]) if j.rank == 7]
    plans = one_gpu.planned(wanted)
    for job, each in zip(wanted, plans, strict=True):
        ran = one_gpu.train(job, each.plan, "cpu", 1)
        assert not ran.refused and ran.step_s > 0
        assert each.plan is not None
        last = each.plan.stages[-1].memory  # of the last pipeline rank
        assert ran.predicted_bytes == last.total_bytes - last.framework_context_bytes


@pytest.mark.pure
def test_the_figures_by_hand() -> None:
    def ran(step_s: float, peak: int, loss: float, **job: object) -> Ran:
        return Ran(job=msgspec.convert({"model": "m", **job}, Job), step_s=step_s, peak_bytes=peak, losses=(loss,))

    rows = [
        (ran(1.0, 100, 2.0, plain=True), None),
        (ran(1.5, 100, 2.0), Predicted(1.2, 110, (1.0, 1.4), (90, 130))),  # 20% too fast, 10% too much
        (ran(1.2, 50, 2.02, pins={"micro_batches": 4}), Predicted(1.32, 45, (1.1, 1.5), (44, 46))),  # 10% and 10%, and the faster one
        (ran(9.0, 80, 2.0, less=0.7), Predicted(9.0, 80, (8.0, 10.0), (70, 90))),
        (Ran(job=Job(model="m"), refused="no"), None),
    ]
    said = one_gpu.summary(rows)["one GPU"]
    assert said["ran"] == 4 and said["compared"] == 3
    assert said["step"] == pytest.approx(0.1) and said["step_90"] == pytest.approx(0.2) and said["memory"] == pytest.approx(0.1)
    assert said["inside"] == pytest.approx(2 / 3) and said["memory_inside"] == pytest.approx(2 / 3)
    assert said["regret"] == pytest.approx(0.2) and said["tau"] == -1.0
    assert said["loss"] == pytest.approx(0.01) and said["step_beside"] == 1.5 and said["memory_beside"] == 1.0


@pytest.mark.pure
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for main in (one_gpu.main, kernels.main):
        assert main(["--measure", str(tmp_path / "out")]) == 3
        assert "there is no GPU on this machine" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------------------- hosts
@pytest.mark.pure
def test_launches_are_priced_as_a_host_was_timed() -> None:
    """Of the operators that are kept, the median is within a tenth, and none is further off than by a factor of two."""
    found = hosts.read(hosts.DATA)
    assert {t.op for t in found} == set(hosts.LINKS)
    unit_s = next(t.seconds[0] for t in found if t.op == "linear")
    ratios = [unit_s * a / s for t in found for a, s in zip(hosts.counted(t.op), t.seconds, strict=True)]
    assert statistics.median(abs(x - 1) for x in ratios) < 0.1
    assert min(ratios) > 0.5 and max(ratios) < 2.0


@pytest.mark.pure
def test_a_file_of_a_host_is_read_as_it_was_written(tmp_path: Path) -> None:
    timed = [hosts.Timed(op=op, seconds=(2e-5, 6e-5), gpu="A", torch="2.13") for op in ("linear", "add")]
    hosts.write(tmp_path / "h.csv", timed)
    assert hosts.read(tmp_path / "h.csv") == timed
    text = (tmp_path / "h.csv").read_text()
    for bad in (text.replace("add", "ad"), text.replace("2.0000e-05", "-1"), text.replace("backward", "up")):
        (tmp_path / "bad.csv").write_text(bad)
        with pytest.raises(ValueError, match="no row of operators that a host issues"):
            hosts.read(tmp_path / "bad.csv")
    (tmp_path / "bad.csv").write_text("\n".join(text.splitlines()[:-1]))
    with pytest.raises(ValueError, match="a pass is missing"):
        hosts.read(tmp_path / "bad.csv")


@pytest.mark.pure
def test_every_link_of_a_chain_runs() -> None:
    found = list(hosts.measured(torch.device("cpu")))
    assert [t.op for t in found] == list(hosts.LINKS) and all(s > 0 for t in found for s in t.seconds)
