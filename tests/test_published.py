"""Published runs: rows that can be rebuilt and the reasons for those that cannot, what is scored, the order of plans, regret."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from autopar.planner import Pins
from benchmarks import published, regret
from benchmarks._decoders import Decoder
from benchmarks._fits import CERTAIN, ROOM, fits, had_room, ran_out
from benchmarks._predict import Figures, Prediction, predictions
from benchmarks._runs import COLUMNS, COMPILED_LAUNCH_S, DATA, Run, Skip, load, model_of, read, rebuilt
from benchmarks._scores import score, tau
from benchmarks.regret import ADVICE, Group, chosen, groups_of, regret_of, summary

pytestmark = pytest.mark.pure

ROW = {
    "source": "somebody", "model": "tiny", "family": "gpt", "n_layers": "2", "hidden": "64", "n_heads": "4", "ffn": "128", "vocab": "128",
    "seq_len": "32", "gpu": "H100-80GB", "n_gpus": "2", "gpus_per_node": "8", "inter_link": "IB 400 Gb/s", "global_batch": "8",
    "micro_batch": "2", "dp": "2", "tp": "1", "pp": "1", "sharding": "ZeRO-0", "act_ckpt": "none", "precision": "bf16",
    "step_time_s": "0.02", "peak_mem": "3", "peak_mem_unit": "GiB", "status": "ok",
}  # fmt: skip


def row(**changes: object) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), **ROW, **{k: str(v) for k, v in changes.items()}}


def table(path: Path, rows: Sequence[dict[str, str]], columns: Sequence[str] = COLUMNS) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


# ----------------------------------------------------------------------------------------------------------------- reading
def test_a_row_is_rebuilt_as_it_says() -> None:
    run = rebuilt(row(), 7)
    assert (run.number, run.gpus, run.global_batch, run.micro_batch, run.dtype) == (7, 2, 8, 2, torch.bfloat16)
    assert run.pins == Pins(dp=2, tp=1, pp=1, micro_batches=2, zero=0, recompute="none", schedule="1f1b")
    assert isinstance(run.dims, Decoder)
    assert (run.dims.layers, run.dims.kv_heads, run.dims.gated, run.dims.norm, run.dims.tied) == (2, 4, False, "layer", False)
    assert (run.step_time_s, run.memory_bytes, run.failed, run.flagged, run.first_stage) == (0.02, 3 * 2.0**30, False, "", False)
    assert run.cluster.name == "dgx-h100" and run.optimizer == "adamw" and run.recipe.local_batches


def test_what_a_row_says_is_heard() -> None:
    assert rebuilt(row(micro_batch="", grad_accum=4), 2).micro_batch == 1
    assert rebuilt(row(tp=2, dp=1, seq_parallel=1), 2).pins.sequence_parallel is True
    assert rebuilt(row(tp=2, dp=1), 2).pins.sequence_parallel is False
    assert rebuilt(row(pp=2, dp=1), 2).pins.blocks == (1, 1)
    shardings = {"ZeRO-0": 0, "": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FULL_SHARD (FSDP)": 3, "ZeRO-3": 3}
    assert {s: rebuilt(row(sharding=s), 2).pins.zero for s in shardings} == shardings
    assert rebuilt(row(sharding="ZeRO-3"), 2).pins.shard == 2, "over all of them"
    assert rebuilt(row(sharding="ZeRO-3", dp=1, pp=2), 2).pins.zero == 0, "there is nothing to shard over"
    assert rebuilt(row(act_ckpt="full (every layer)"), 2).pins.recompute == "full"
    llama = rebuilt(row(family="llama", n_kv_heads=2, tied_emb=1), 2).dims
    assert isinstance(llama, Decoder)
    assert (llama.kv_heads, llama.gated, llama.norm, llama.positions, llama.bias, llama.tied) == (2, True, "rms", "rotary", False, True)
    units = {unit: rebuilt(row(peak_mem_unit=unit), 2).memory_bytes for unit in ("GiB", "MiB", "GB")}
    assert units == {"GiB": 3 * 2.0**30, "MiB": 3 * 2.0**20, "GB": 3e9}
    assert rebuilt(row(peak_mem_kind="rank 0, allocated"), 2).first_stage
    boards = {"V100-32GB": "v100-32gb", "V100-16GB": "v100-16gb", "A100-80GB": "a100-80gb", "A100 40 GB": "a100-40gb"}
    boards["H100-96GB"] = "h100-sxm"
    assert {gpu: rebuilt(row(gpu=gpu), 2).cluster.gpu.name for gpu in boards} == boards
    assert rebuilt(row(gpu="A100-40GB(not stated)"), 2).cluster.gpu == rebuilt(row(gpu="A100"), 2).cluster.gpu
    assert rebuilt(row(precision="bf16, fp32 grad accum"), 2).recipe.accumulates
    assert rebuilt(row(status="oom", step_time_s="", peak_mem=""), 2).failed
    cnn = rebuilt(row(family="cnn", model="resnet50", precision="fp16 amp"), 2)
    assert not isinstance(cnn.dims, Decoder) and (cnn.image, cnn.optimizer, cnn.dtype) == (224, "sgd_momentum", torch.float16)


def test_experts_are_rebuilt() -> None:
    dims = rebuilt(row(family="moe", extra=f"experts=4; expert_group=32; {EVERY_SECOND}"), 2).dims
    assert isinstance(dims, Decoder) and (dims.experts, dims.layers, dims.ffn) == (4, 2, 128)


def test_the_optimizer_that_a_row_states_is_heard() -> None:
    """Adafactor's states are next to nothing; of a float16 model there are master copies still."""
    run = rebuilt(row(family="moe", precision="fp16", extra=f"experts=4; {EVERY_SECOND}; optimizer=Adafactor"), 2)
    assert (run.optimizer, run.recipe.master_itemsize) == ("sgd", 4)


def test_alpa_s_mixtures_of_experts_have_the_parameters_that_their_source_counted() -> None:
    """benchmark/plots/result.tsv at a1c19788 prints them. With MLPs of 8 times the hidden size (benchmark/parax/benchmark_moe.py there),
    12 layers of attention have 48 h^2, 6 layers of 8 MLPs 768 h^2, 6 of one MLP 96 h^2, and a tied table 25,600 h."""
    counted = {768: 558_546_000, 1280: 1_528_581_000, 2048: 3_880_166_000, 2560: 6_045_578_000}
    runs = [run for run in load([DATA / "alpa_v100.csv"])[0] if run.row["family"] == "moe"]
    assert {d.hidden for run in runs if isinstance(d := run.dims, Decoder)} == set(counted)
    for run in runs:
        assert isinstance(d := run.dims, Decoder) and d.ffn == 8 * d.hidden and run.optimizer == "sgd"
        held = sum(p.numel() for p in model_of(d, torch.float16, 0, 1)[0].parameters())
        assert held == pytest.approx(912 * d.hidden**2 + 25_600 * d.hidden, rel=0.003)  # norms, biases, positions
        assert held == pytest.approx(counted[d.hidden], rel=0.003)


def test_what_a_software_is_known_for_is_heard() -> None:
    """A compiled program is issued without an interpreter; frameworks of one source are told apart; memory with the framework's own."""
    alpa, other = rebuilt(row(source="alpa"), 2), rebuilt(row(), 2)
    assert alpa.compiled and alpa.cluster.gpu.launch_s == COMPILED_LAUNCH_S < other.cluster.gpu.launch_s and not other.compiled
    assert rebuilt(row(source="both", extra="MXNet (not PyTorch)"), 2).software != rebuilt(row(source="both"), 2).software == "both"
    whole = rebuilt(row(peak_mem_kind="fullest GPU, with the framework's context"), 2)
    assert (other.memory_bytes or 0) - (whole.memory_bytes or 0) == other.cluster.gpu.context_bytes > 0
    fused = rebuilt(row(source="llm-foundry"), 2).dims
    assert isinstance(fused, Decoder) and fused.fused_loss and isinstance(other.dims, Decoder) and not other.dims.fused_loss


def test_what_one_dimension_is_missing_of_is_the_planner_s_choice() -> None:
    """How the GPUs are divided where a solver did that, or how many micro-batches there are; such a row is no choice of a group."""
    solver = rebuilt(row(n_gpus=4, dp="", tp="", sharding="auto_sharding", micro_batch="", grad_accum=1), 2)
    assert (solver.pins.dp, solver.pins.tp, solver.pins.pp, solver.pins.zero, solver.pins.micro_batches) == (None, None, 1, None, 1)
    assert (solver.chosen, solver.micro_batch) == ("data and tensor parallel", 8)
    one = rebuilt(row(n_gpus=1, dp="", tp="", sharding="auto_sharding", micro_batch="", grad_accum=1), 2)
    assert (one.pins.dp, one.pins.tp, one.pins.zero, one.chosen) == (1, 1, 0, "")
    batches = rebuilt(row(micro_batch="", grad_accum=""), 2)
    assert (batches.pins.micro_batches, batches.chosen, rebuilt(row(), 2).chosen) == (None, "micro-batches", "")
    assert batches.micro_batch == 4, "of which all numbers of them can be made"
    assert batches.memory_bytes is None and rebuilt(row(), 2).memory_bytes is not None, "it depends on them"
    for run in (solver, batches):
        pinned = rebuilt(row(n_gpus=run.gpus, dp=run.gpus, micro_batch=8 // run.gpus), 2)
        steps = {id(r): p.step_time_s for r, p in predictions([run, pinned]) if isinstance(p, Prediction)}
        assert steps[id(run)] <= steps[id(pinned)]
    ran = [plan(k, k, micro_batch=b) for k, b in ((1.0, 4), (2.0, 8), (3.0, 1))]
    free = plan(0.5, 0.5)
    object.__setattr__(free.run, "chosen", "micro-batches")
    assert [len(g.found) for g in groups_of([*ran, free])] == [3]


EVERY_SECOND = "MoE every second layer"
UNSUPPORTED = [
    ({"vpp": 2}, "several stages on each rank, and no pipeline"),
    ({"cp": 2}, "context parallelism cannot be planned yet"),
    ({"ep": 4}, "expert parallelism cannot be planned yet"),
    ({"dp": 4}, "dp x tp x pp is not the number of GPUs"),
    ({"global_batch": 7}, "the global batch does not divide into the micro-batches"),
    ({"n_gpus": ""}, "n_gpus is not stated"),
    ({"dp": 0}, "dp is not stated"),
    ({"hidden": ""}, "hidden is not stated"),
    ({"micro_batch": "", "grad_accum": "", "act_ckpt": ""}, "recomputation is not stated"),
    ({"micro_batch": "", "grad_accum": "", "family": "cnn", "model": "resnet50"}, "grad_accum is not stated"),
    ({"dp": "", "tp": ""}, "dp is not stated"),
    ({"hidden": "many"}, "hidden is no number"),
    ({"precision": "fp8"}, "fp8 cannot be planned yet"),
    ({"precision": ""}, "the precision is not stated"),
    ({"precision": "int3"}, "the precision 'int3' is not known"),
    ({"sharding": "WHIMSICAL"}, "the sharding .WHIMSICAL. cannot be planned"),
    ({"sharding": "a new way"}, "the sharding 'a new way' cannot be planned"),
    ({"act_ckpt": "selective"}, "what runs again selectively is not stated"),
    ({"act_ckpt": ""}, "recomputation is not stated"),
    ({"family": "gpt-moe"}, "how many experts there are in which layers is not stated"),
    ({"family": "moe", "extra": "experts=8"}, "how many experts there are in which layers is not stated"),
    ({"family": "moe", "extra": f"experts=8; expert_group=64; {EVERY_SECOND}"}, "grouped otherwise than by sample"),
    ({"extra": "optimizer=Lion"}, "the optimizer 'lion' is not known"),
    ({"sharding": "ZeRO-2 with offload", "dp": 1, "tp": 2}, "offload of optimizer states to the host cannot be planned yet"),
    ({"family": "rnn"}, "the family 'rnn' is not known"),
    ({"family": "cnn", "model": "mystery"}, "the network 'mystery' is not one of those that can be rebuilt"),
    ({"gpu": "TPUv4"}, "the GPU 'TPUv4' is not in the catalogue"),
    ({"step_time_s": "", "peak_mem": ""}, "neither a step time nor a memory figure is printed"),
]


@pytest.mark.parametrize("changes,reason", UNSUPPORTED, ids=str)
def test_what_cannot_be_rebuilt_says_why(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        rebuilt(row(**changes), 2)


def test_a_table_without_a_column_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "short.csv", [row()], [c for c in COLUMNS if c not in ("vpp", "flags")])
    with pytest.raises(Skip, match="short.csv lacks the columns vpp, flags"):
        read(path)
    for argv in (["--data", str(path)], ["--data", str(tmp_path / "none.csv")], ["--limit", "0"]):
        assert published.main(argv) == 2
    assert "lacks the columns" in capsys.readouterr().err


def test_rows_are_spread_evenly_and_counted(tmp_path: Path) -> None:
    rows = [row(global_batch=8 * (k + 1)) for k in range(9)] + [row(precision="fp8"), row(precision="fp8"), row(cp=2)]
    path = table(tmp_path / "runs.csv", rows)
    runs, skipped, total = load([path])
    assert (len(runs), total) == (9, 12) and skipped == {"fp8 cannot be planned yet": 2, "context parallelism cannot be planned yet": 1}
    assert [run.number for run in runs] == list(range(2, 11)), "as an editor numbers the lines"
    assert [run.number for run in load([path], 3)[0]] == [2, 6, 10] and load([path], 3)[2] == 3
    assert load([path, path])[2] == 24


# ----------------------------------------------------------------------------------------------------------------- scoring
def brute_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """tau-b by its definition: the correlation of the signs of differences over all ordered pairs."""
    a = [(x > y) - (x < y) for (x, _), (y, _) in itertools.permutations(pairs, 2)]
    b = [(x > y) - (x < y) for (_, x), (_, y) in itertools.permutations(pairs, 2)]
    scale = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / scale if scale else None


def test_kendall_s_tau() -> None:
    assert tau([(1, 1), (2, 2), (3, 3)]) == 1 and tau([(1, 3), (2, 2), (3, 1)]) == -1
    assert tau([]) is None and tau([(1, 2)]) is None and tau([(1, 5), (2, 5)]) is None
    draw = random.Random(0)
    for _ in range(300):
        pairs = [(draw.randint(0, 5), draw.randint(0, 5)) for _ in range(draw.randint(0, 12))]
        expected = brute_tau(pairs)
        assert tau(pairs) == (None if expected is None else pytest.approx(expected, abs=1e-12)), pairs


def test_scores() -> None:
    assert score([]) is None
    one = score([-0.5])
    assert one is not None and one.record() == {"count": 1, "median_ape": 0.5, "p90_ape": 0.5, "bias": -0.5, "inside": None}
    many = score([k / 10 * (-1) ** k for k in range(11)])
    assert many is not None and (many.count, many.median_ape, many.p90_ape) == (11, 0.5, pytest.approx(0.9))
    assert many.bias == 0.0
    of_four = score([0.1, 0.2, 0.3, 0.4], [True, True, True, False])
    assert of_four is not None and of_four.inside == 0.75


def test_a_whole_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row(), row(micro_batch=1), row(micro_batch=4), row(sharding="ZeRO-1", peak_mem=""), row(pp=2, dp=1, step_time_s=""),
        row(flags="step time read off a plot"), row(flags="printed MFU differs from ours"), row(status="oom", step_time_s="", peak_mem=""),
        row(precision="fp8"), row(vpp=4),
    ]  # fmt: skip
    path = table(tmp_path / "runs.csv", rows)
    assert published.main(["--data", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1, "the tables go elsewhere"
    answer = json.loads(captured.out)
    assert {"rows", "scored", "skipped", "doubtful", "time", "memory", "kendall_tau", "groups"} <= answer.keys()
    assert (answer["rows"], answer["scored"], answer["doubtful"]) == (10, 6, 1)
    assert answer["skipped"] == {"did not run": 1, "fp8 cannot be planned yet": 1, "several stages on each rank, and no pipeline": 1}
    assert answer["time"].keys() == answer["memory"].keys() == {"count", "median_ape", "p90_ape", "bias", "inside"}
    assert (answer["time"]["count"], answer["memory"]["count"]) == (5, 5)

    found = [p for _, p in predictions([rebuilt(r, 2) for r in rows[:5]] + [rebuilt(rows[6], 2)]) if isinstance(p, Prediction)]
    errors = [p.step_time_s / p.run.step_time_s - 1 for p in found if p.run.step_time_s]
    assert answer["time"]["median_ape"] == pytest.approx(statistics.median(map(abs, errors)))
    assert answer["time"]["bias"] == pytest.approx(statistics.median(errors))
    memory = [p.memory_bytes / p.run.memory_bytes - 1 for p in found if p.run.memory_bytes]
    assert answer["memory"]["median_ape"] == pytest.approx(statistics.median(map(abs, memory)))
    inside = [p.step_interval_s[0] <= (p.run.step_time_s or 0.0) <= p.step_interval_s[1] for p in found if p.run.step_time_s]
    assert answer["time"]["inside"] == pytest.approx(statistics.fmean(inside))
    assert answer["fit"].keys() == {"ran", ROOM} and answer["fit"][ROOM]["count"] == 1, "what did not run is a plan that ran"
    assert answer["fit"]["ran"]["too_large"] == 0.0
    assert answer["kendall_tau"] is None, "all were measured to take the same"


def test_runs_that_certainly_ran_out() -> None:
    """By an estimate of their own source, or by a line through the memory of the same run with smaller micro-batches."""

    def runs(*gib: float, failed: int, **changes: object) -> list[Run]:
        changes = {"n_gpus": 1, "dp": 1, "global_batch": 64, **changes}
        sizes = [row(**{**changes, "micro_batch": 2**k, "peak_mem": g}) for k, g in enumerate(gib)]
        out = {"status": "oom", "step_time_s": "", "peak_mem": ""}
        return [rebuilt(r, 2) for r in [*sizes, row(**{**changes, **out, "micro_batch": failed})]]

    cases = [((20, 40), 4, True), ((20, 30), 4, False), ((20, 30), 8, True), ((60,), 4, False), ((20, 40, 41), 8, False)]
    for gib, failed, certain in cases:
        found = runs(*gib, failed=failed)
        assert ran_out(found) == ({id(found[-1])} if certain else set()), (gib, failed)
    few = runs(20, 40, failed=64, pp=2, n_gpus=2)
    assert not ran_out(few), "fewer micro-batches than stages keep less than the line says"
    estimated = rebuilt(row(status="oom", step_time_s="", peak_mem=90), 2)
    assert ran_out([estimated]) == {id(estimated)} and not ran_out([rebuilt(row(status="oom", step_time_s="", peak_mem=70), 2)])
    assert not ran_out([rebuilt(row(peak_mem=90), 2)]), "it ran"
    too_large = [Plan(r, 1.0, 2.0**40) for r in (estimated, rebuilt(row(), 2))]
    shares = fits(cast(Any, too_large))
    assert shares[CERTAIN]["too_large"] == shares["ran"]["too_large_at_the_end"] == 1.0 and shares["precision"]["too_large"] == 0.5


def test_the_order_of_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that take as long as predicted are ordered as predicted, in the reverse order otherwise; two runs are no group."""
    plans = [{"micro_batch": 1}, {"micro_batch": 4}, {"dp": 1, "pp": 2, "micro_batch": 1}]
    found = predictions([rebuilt(row(**plan), k) for k, plan in enumerate(plans)])
    by_plan = {run.number: p.step_time_s for run, p in found if isinstance(p, Prediction)}
    assert len(set(by_plan.values())) == 3
    for sign in (1, -1):
        rows = [row(**plan, step_time_s=repr(1.0 + sign * by_plan[k])) for k, plan in enumerate(plans)]
        pair = [row(global_batch=16, micro_batch=1), row(global_batch=16, micro_batch=2)]
        assert published.main(["--data", str(table(tmp_path / f"{sign}.csv", rows + pair)), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["kendall_tau"], answer["groups"]) == (sign, 1)


def test_runs_that_certainly_had_room() -> None:
    """By a run of the same plan on other GPUs, or of other parts of what rests, which held as much or more and left room."""

    def failed(**changes: object) -> Run:
        return rebuilt(row(**{"global_batch": 64, "status": "oom", "step_time_s": "", "peak_mem": "", **changes}), 2)

    ran = rebuilt(row(global_batch=64, n_gpus=4, dp=4, peak_mem=60), 2)
    full = rebuilt(row(global_batch=64, n_gpus=4, dp=4, peak_mem=75), 2)
    crashed = failed(n_gpus=8, dp=8)
    assert had_room([ran, crashed]) == {id(crashed)}
    assert not had_room([full, crashed]), "a few GiB of room are no certainty"
    assert not had_room([dataclasses.replace(ran, failed=True), crashed]) and not had_room([crashed])
    for other in (
        failed(n_gpus=8, dp=8, micro_batch=4), failed(n_gpus=8, dp=4, tp=2), failed(n_gpus=8, dp=8, model="m", hidden=128),
        failed(n_gpus=8, dp=4, pp=2), failed(n_gpus=8, dp=8, precision="fp32"),
    ):  # fmt: skip
        assert not had_room([ran, other]), other.parallelism
    one = rebuilt(row(global_batch=64, n_gpus=1, dp=1, peak_mem=60), 2)
    assert not had_room([one, crashed]), "one copy of a model has no buffers for what it sends"
    parts = [rebuilt(row(global_batch=64, n_gpus=n, dp=n, sharding="ZeRO-1", peak_mem=60), 2) for n in (4, 16)]
    in_parts = failed(n_gpus=8, dp=8, sharding="ZeRO-1")
    assert had_room([parts[0], in_parts]) == {id(in_parts)} and not had_room([parts[1], in_parts]), "more parts are smaller"
    pipes = [rebuilt(row(global_batch=b, n_gpus=4, dp=2, pp=2, peak_mem=60), 2) for b in (4, 12)]
    steady = failed(n_gpus=4, dp=2, pp=2)
    assert had_room([pipes[1], steady]) == {id(steady)} and not had_room([pipes[0], steady]), "a pipeline that is not full holds less"

    plans = [Plan(r, 1.0, 2.0**30) for r in (ran, crashed, failed(tp=2, dp=1))]
    shares = fits(cast(Any, plans))
    assert (shares[ROOM]["count"], shares["oom"]["count"]) == (1, 1)
    refused = fits(cast(Any, [Plan(r, 1.0, 2.0**40) for r in (ran, crashed)]))
    assert refused["precision"]["too_large"] == 0.0, "neither was short of memory"


# ------------------------------------------------------------------------------------------------------------------ regret
@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan of a group, as far as a choice looks at it."""

    run: Any
    step_time_s: float
    fullest_bytes: float = 2.0**30

    @property
    def fullest_interval_bytes(self) -> tuple[float, float]:
        return self.fullest_bytes, self.fullest_bytes


def plan(predicted: float, measured: float | None, *, fits: bool = True, flags: str = "", **changes: object) -> Figures:
    failed = {"status": "oom", "step_time_s": "", "peak_mem": ""} if measured is None else {"step_time_s": measured}
    run = rebuilt(row(n_gpus="8.0", global_batch=64, flags=flags, **{"dp": 8, **changes, **failed}), 2)
    return cast(Figures, Plan(run, predicted, 2.0**30 if fits else 2.0**40))


def group(*plans: Figures) -> Group:
    return Group(name="a group", gpus=8, found=plans)


def test_regret_is_what_the_choice_loses() -> None:
    best, choice, other = plan(3.0, 1.0), plan(1.0, 2.0, micro_batch=4), plan(2.0, 4.0, micro_batch=8)
    g = group(best, choice, other)
    assert chosen(g) is choice and g.best_s() == 1.0
    assert (regret_of(best, g), regret_of(choice, g), regret_of(other, g)) == (0.0, 0.5, 0.75)


def test_a_choice_that_did_not_run_loses_everything() -> None:
    g = group(plan(3.0, 1.0), plan(1.0, None, micro_batch=4), plan(2.0, 4.0, micro_batch=8), plan(4.0, 4.0, micro_batch=1))
    assert chosen(g).run.failed and regret_of(chosen(g), g) == 1.0
    assert summary([g])["failed"] == 1 and summary([g])["median"] == 1.0
    assert g.best_s() == 1.0, "what failed is not the best"


def test_what_may_not_fit_is_not_chosen() -> None:
    """At the upper end of its interval, though it does by the account."""
    risky, safe = plan(1.0, 1.0), plan(2.0, 2.0, micro_batch=4)
    wide = type("Wide", (Plan,), {"fullest_interval_bytes": (0.0, 2.0**40)})
    maybe = cast(Figures, wide(risky.run, 1.0, 2.0**30))
    assert chosen(group(risky, safe)) is risky and chosen(group(maybe, safe)) is safe


def test_what_does_not_fit_is_not_chosen_unless_nothing_does() -> None:
    big, lean = plan(1.0, None, fits=False), plan(2.0, 1.5, micro_batch=4)
    assert chosen(group(big, lean, plan(3.0, 1.0, micro_batch=8))) is lean
    leaner = cast(Figures, dataclasses.replace(cast(Any, big), fullest_bytes=2.0**38))
    assert chosen(group(big, leaner)) is leaner


def test_repetitions_count_once_by_their_median() -> None:
    same = [plan(1.0, s) for s in (2.0, 8.0, 4.0)]
    g = group(*same, plan(2.0, 2.0, micro_batch=4))
    assert regret_of(chosen(g), g) == pytest.approx(1 - 2.0 / 4.0)


def test_what_was_not_measured_or_is_doubted_cannot_be_chosen() -> None:
    doubted, unmeasured = plan(0.1, 0.1, flags="read off a plot", micro_batch=1), plan(0.2, 9.0, micro_batch=2)
    object.__setattr__(unmeasured.run, "step_time_s", None)
    ran = [plan(k, k, micro_batch=b) for k, b in ((1.0, 4), (2.0, 8), (3.0, 1))]
    failed = plan(5.0, None, tp=8, dp=1)
    (g,) = groups_of([doubted, unmeasured, *ran, failed])
    assert set(map(id, g.found)) == set(map(id, (*ran, failed))) and len(g.ran) == 3
    assert groups_of([*ran[:2], failed]) == [], "two that ran are no choice"
    with_memory = [plan(k, k, micro_batch=b) for k, b in ((1.0, 4), (2.0, 8), (3.0, 1))]
    crashed = plan(0.5, None, micro_batch=8)
    (g,) = groups_of([*with_memory, crashed])
    assert crashed not in g.found, "it crashed, and had room as its repetition shows"
    elsewhere = [plan(k, k, micro_batch=b, model="another") for k, b in ((1.0, 4), (2.0, 8), (3.0, 1))]
    assert [len(x.found) for x in groups_of([*ran, *elsewhere])] == [3, 3]


def test_advice_takes_the_first_of_its_order_that_ran() -> None:
    data, zero, tensor, mixed, failed = (
        plan(9.0, 4.0, sharding="ZeRO-0"), plan(9.0, 5.0, sharding="ZeRO-1"), plan(9.0, 8.0, dp=1, tp=8), plan(1.0, 2.0, dp=4, tp=2),
        plan(9.0, None, micro_batch=8),
    )  # fmt: skip
    g = group(failed, tensor, zero, mixed, data)
    figures = summary([g])
    advice = cast(dict[str, dict[str, float]], figures["advice"])
    assert advice.keys() == {*ADVICE, "random"}
    expected = {
        "data parallel if it fits, else ZeRO-1": 1 - 2 / 4,
        "tensor parallel = GPUs of a node": 1 - 2 / 8,
        "smallest tensor x pipeline parallel that fits": 1 - 2 / 5,
        "random": statistics.fmean([1 - 2 / 4, 1 - 2 / 5, 1 - 2 / 8, 0.0]),
    }
    assert {name: each["median"] for name, each in advice.items()} == pytest.approx(expected)
    assert (figures["groups"], figures["median"], figures["worst"], figures["failed"]) == (1, 0.0, 0.0, 0)


def test_regret_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(micro_batch=b, step_time_s=s) for b, s in ((1, 0.03), (2, 0.02), (4, 0.01))]
    rows += [row(status="oom", dp=1, pp=2, micro_batch=1, step_time_s="", peak_mem=""), row(model="alone")]
    path = table(tmp_path / "sweep.csv", rows)
    assert regret.main(["--data", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"groups", "median", "mean", "worst", "failed", "advice"} <= answer.keys() and answer["groups"] == 1
    assert 0 <= answer["median"] == answer["mean"] == answer["worst"] <= 1
    assert regret.main(["--data", str(table(tmp_path / "few.csv", rows[3:])), "--json"]) == 2
    assert "no group has 3 measured plans" in capsys.readouterr().err
    assert regret.main(["--limit", "0"]) == 2


def test_a_limit_of_groups() -> None:
    runs: list[Run] = [rebuilt(row(model=name, micro_batch=b), 2) for name in "abcd" for b in (1, 2)]
    assert {r.row["model"] for r in regret._limited(runs, 2)} == {"a", "c"} and len(regret._limited(runs, 2)) == 4
    assert regret._limited(runs, None) == regret._limited(runs, 9) == runs
