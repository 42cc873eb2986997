"""Priced runs as data: other constants give what the planner would say of them; constants fitted without some runs predict these."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import statistics
from pathlib import Path

import numpy
import pytest

from benchmarks import published
from benchmarks._cross import (
    CLASSES,
    COMPILED,
    EAGER,
    HELD,
    KERNELS,
    Constants,
    Priced,
    chip_of,
    closest,
    fitted,
    held_bytes,
    memory_terms,
    out_of_sample,
    steps_s,
    usual,
)
from benchmarks._fitted import ONCE, Fitted, constants_of
from benchmarks._forms import SOFTWARE_S, Form, Forms, figures_of, keep, kept, key_of
from benchmarks._predict import Prediction, predictions, repriced
from benchmarks._runs import COMPILED_LAUNCH_S, DATA, MXNET, rebuilt
from cost_models import Cluster
from cost_models.cluster import load_gpu
from cost_models.compute import kernel_time_s
from tests.test_published import row, table

pytestmark = pytest.mark.pure

LARGE = {"hidden": 2048, "n_heads": 16, "ffn": 8192, "vocab": 4096, "seq_len": 1024, "global_batch": 16}  # the device takes time too
ROWS = [
    row(), row(**LARGE), row(**LARGE, micro_batch=1, act_ckpt="full"), row(**LARGE, sharding="ZeRO-1"), row(**LARGE, sharding="ZeRO-2"),
    row(**LARGE, sharding="ZeRO-3"), row(**LARGE, dp=1, tp=2), row(**LARGE, dp=1, pp=2), row(**LARGE, gpu="A100-80GB"),
    row(**LARGE, n_gpus=32, dp=8, tp=2, pp=2, micro_batch=1, sharding="ZeRO-1", source="ultrascale", inter_link="EFA"),
    row(**LARGE, n_gpus=16, dp=2, tp=8, micro_batch=8, seq_parallel=1, source="ultrascale", inter_link="EFA"),
    row(**LARGE, dp=1, pp=2, vpp=1, source="vtrain", gpu="A100-80GB"),
]  # fmt: skip


def changed(cluster: Cluster, point: dict[str, float]) -> Cluster:
    """The cluster whose GPU has these constants."""
    fractions = {**dict(cluster.gpu.fractions), **{name: value for name, value in point.items() if name != "launch_s"}}
    gpu = dataclasses.replace(cluster.gpu, fractions=tuple(fractions.items()), launch_s=point.get("launch_s", cluster.gpu.launch_s))
    return dataclasses.replace(cluster, gpu=gpu)


@functools.cache
def priced() -> tuple[tuple[Prediction, Form], ...]:
    forms = Forms()
    found = [p for _, p in predictions([rebuilt(r, i) for i, r in enumerate(ROWS)]) if isinstance(p, Prediction)]
    assert len(found) == len(ROWS)
    return tuple((p, forms.of(p)) for p in found)


def evaluated(point: dict[str, float]) -> list[float]:
    found = priced()
    fitted_ = Fitted([f for _, f in found], [p.run.cluster.gpu for p, _ in found])
    launched = [{n: x * (p.run.recipe.launches if n == "launch_s" else 1.0) for n, x in point.items()} for p, _ in found]
    return fitted_.steps_s([{**constants_of(p.run.cluster.gpu, p.run.recipe), **x} for (p, _), x in zip(found, launched, strict=True)])


def test_a_form_says_what_the_planner_says() -> None:
    assert evaluated({}) == pytest.approx([p.step_time_s for p, _ in priced()], rel=1e-9)
    for p, form in priced():
        figures = figures_of(p.run, form)
        for name in ("step_time_s", "memory_bytes", "fullest_bytes", "fullest_interval_bytes", "step_interval_s", "memory_interval_bytes"):
            assert getattr(figures, name) == pytest.approx(getattr(p, name)), name


@pytest.mark.parametrize("name,value", [("matmul", 0.3), ("pointwise", 0.2), ("attention", 0.1), ("launch_s", 2e-4), ("launch_s", 1e-6)])
def test_other_constants_of_a_gpu_give_what_the_planner_would_say(name: str, value: float) -> None:
    point = {name: value, **({"reduction": value, "gather": 0.7 * value} if name == "pointwise" else {})}
    times = repriced([p for p, _ in priced()], lambda cluster: changed(cluster, point))
    found = evaluated(point)
    assert found == pytest.approx([t.step_s for t in times], rel=1e-9)
    assert found != pytest.approx([p.step_time_s for p, _ in priced()], rel=1e-3)


@pytest.mark.parametrize("name", (ONCE, *SOFTWARE_S))
def test_other_constants_of_a_software_give_what_the_planner_would_say(name: str) -> None:
    times = repriced([p for p, _ in priced()], lambda c: c, lambda recipe: (
        dataclasses.replace(recipe, **{name: 7e-4}) if recipe.between_nodes_s else recipe
    ))  # fmt: skip
    found = evaluated({})
    with_software = evaluated({name: 7e-4})
    for (p, _), plain, other, time in zip(priced(), found, with_software, times, strict=True):
        assert (other if p.run.recipe.between_nodes_s else plain) == pytest.approx(time.step_s, rel=1e-9)


def test_forms_are_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "forms.jsonl"
    assert list(kept(path)) == []
    for _, form in priced():
        keep(path, form)
    assert list(kept(path)) == [form for _, form in priced()]
    keys = {key_of(p.run) for p, _ in priced()}
    assert len(keys) == len(ROWS)
    assert all(key_of(rebuilt({**ROWS[0], column: value}, 0)) not in keys for column, value in (("hidden", "128"), ("micro_batch", "4")))


def test_the_closest_constants_are_found_from_afar_and_outliers_do_not_move_them() -> None:
    rng = numpy.random.default_rng(0)
    slopes, truth = rng.normal(size=(60, 3)), numpy.array([0.5, -0.4, 0.2])
    bad = numpy.zeros(60)
    bad[:9] = 5.0
    start, free = numpy.zeros(3), numpy.full(3, 10.0)
    found = closest(lambda at: slopes @ (at - truth) + bad, start, free, free)
    assert found == pytest.approx(truth, abs=0.03)
    held = closest(lambda at: slopes @ (at - truth), start, numpy.full(3, 1e-3), free)
    assert abs(held).max() < 0.01, "what is known well is not moved"
    below = closest(lambda at: slopes @ (at - truth), start, free, numpy.array([0.1, 1.0, 1.0]))
    assert below[0] == 0.1


SOFTWARES = (("somebody", "h100"), ("somebody", "a100"), ("vtrain", "a100"))


def runs_of(made_with: dict[str, float], which: tuple[str, ...]) -> list[Priced]:
    """Runs that took what they take with these constants of every chip."""
    found = [Priced(run=p.run, form=form) for p, form in priced()]
    chips = {chip: {**CLASSES, **made_with} for chip in {p.chip for p in found}}
    software = {p.software: {"launch_s": made_with["launch_s"], ONCE: 1e-2} for p in found}
    times = steps_s(found, Constants(chips=chips, software=software, slack=0.0, held={}))
    made = [Priced(run=dataclasses.replace(p.run, step_time_s=t), form=p.form) for p, t in zip(found, times, strict=True)]
    return [p for p in made if p.source in which]


def test_constants_without_a_source_are_those_of_the_others() -> None:
    found = [p for _ in range(4) for p in runs_of({"matmul": 0.35, "launch_s": 6e-5}, ("somebody", "vtrain"))]
    whole = fitted(found)
    assert set(whole.chips) == {"h100", "a100"} == {chip_of("h100-sxm"), chip_of("a100-80gb")}
    assert whole.software["somebody on h100"]["launch_s"] == pytest.approx(6e-5, rel=0.2)
    mine = [p for p in found if p.source == "vtrain"]
    slower = [Priced(run=dataclasses.replace(p.run, step_time_s=100 * (p.run.step_time_s or 0.0)), form=p.form) for p in mine]
    for those in (mine, slower):
        everything = [p for p in found if p.source != "vtrain"] + those
        constants = out_of_sample(everything, those, fitted(everything))
        assert constants.chips["a100"] == out_of_sample(found, mine, whole).chips["a100"], "what is left out decides nothing"
    in_a_node = {f"{s} on {c}": {"launch_s", ONCE} for s, c in SOFTWARES}
    assert {name: set(point) for name, point in whole.software.items()} == in_a_node


def test_a_software_that_was_left_out_takes_what_others_take() -> None:
    """Collectives between nodes are slower than links by what the other softwares' are; the prediction is the less certain for it."""
    between = [row(**LARGE, n_gpus=32, dp=8, tp=4, micro_batch=m, sharding="ZeRO-1", source=s) for m in (1, 2) for s in ("one", "two")]
    plans = [p for _, p in predictions([rebuilt(r, i) for i, r in enumerate(between)]) if isinstance(p, Prediction)]
    forms = Forms()
    plain = [Priced(run=p.run, form=forms.of(p)) for p in plans]
    assert all(p.across for p in plain) and {p.software for p in plain} == {"one on h100", "two on h100"}
    taken = {"launch_s": 5e-5, ONCE: 1e-2, **dict.fromkeys(SOFTWARE_S, 3e-3)}
    truth = Constants(chips={"h100": CLASSES}, software={p.software: taken for p in plain}, slack=0.0, held={})
    times = steps_s(plain, truth)
    found = [Priced(run=dataclasses.replace(p.run, step_time_s=t), form=p.form) for p, t in zip(plain, times, strict=True)]
    mine = [p for p in found if p.source == "one"]
    whole = fitted(found)
    out = out_of_sample(found, mine, whole)
    assert set(out.software) == {"two on h100"}
    assert all(spread >= whole.known["h100"][name] for name, spread in out.known["h100"].items()) and out.known != whole.known
    slow_s, fast_s = steps_s(mine, out), steps_s(mine, out, hardware_alone=True)
    for p, slow, fast in zip(mine, slow_s, fast_s, strict=True):
        assert fast < slow and abs(slow / (p.run.step_time_s or 0.0) - 1) < abs(fast / (p.run.step_time_s or 0.0) - 1)
        assert out.spread(p, slow - fast, slow) > whole.spread(p, slow - fast, slow)


def test_what_softwares_usually_take() -> None:
    """Of launches the mean of those that issue operators in that way, by how much their runs say; of what is added to links the median."""
    taken = {"a": (4e-5, 1.0), "b": (6e-5, 2.0), "c": (9e-5, 9.0)}
    points = {name: {"launch_s": launch_s, **dict.fromkeys(SOFTWARE_S, x)} for name, (launch_s, x) in taken.items()}
    said = {"a": (EAGER, 1e6), "b": (EAGER, 1e6), "c": (MXNET, 1e6)}
    nothing, wide = usual({}, {}, EAGER)
    assert nothing == {"launch_s": pytest.approx(2e-5)} and wide > 1, "what is assumed"
    assert usual({}, {}, COMPILED)[0]["launch_s"] == pytest.approx(COMPILED_LAUNCH_S)
    assert usual(points, said, EAGER)[1] < wide
    two, one, others = (usual(points, said, kind)[0] for kind in (EAGER, MXNET, COMPILED))
    assert 4.5e-5 < two["launch_s"] < 5e-5 and 7e-5 < one["launch_s"] < 9e-5
    assert others["launch_s"] == pytest.approx(COMPILED_LAUNCH_S), "others say nothing of it"
    assert [x[SOFTWARE_S[0]] for x in (two, one, others)] == [1.5, 9.0, 2.0]
    silent = usual(points, {**said, "b": (EAGER, 0.0)}, EAGER)[0]
    assert silent["launch_s"] < 4e-5, "what says nothing does not count"


def timed(op: str, least: float) -> list[tuple[float, float, float, float]]:
    """(FLOPs, bytes, bytes of the result, seconds) of DeepBench's kernels in half precision."""
    found = []
    with (DATA.parent / "kernels.csv").open(newline="") as file:
        for r in csv.DictReader(file):
            if (r["op"], r["dtype"]) != (op, "float16") or float(r["flops"]) < least:
                continue
            first, *rest = r["shape"].split()
            sizes, moved = [int(n) for n in first.split("x")], float(r["bytes"])
            if op == "conv":
                kernels, *kernel = (int(n) for n in rest[0].split("x"))
                x, w = 2.0 * math.prod(sizes), 2.0 * kernels * sizes[1] * math.prod(kernel)
                result = {"input": x, "weight": w, "forward": moved - x - w}[r["pass"]]
            else:
                result = 2.0 * sizes[0] * sizes[1]
            found.append((float(r["flops"]), moved, result, float(r["time_s"])))
    return found


@pytest.mark.parametrize("op,stated", [("conv", CLASSES["conv"]), *((op, KERNELS["v100"][op]) for op in ("conv", "matmul"))])
def test_what_kernels_are_assumed_to_reach_is_the_median_of_timings(op: str, stated: float) -> None:
    """Beside the writing of their results, at three quarters of the bandwidth."""
    gpu = load_gpu("v100-32gb")
    peak, streamed = dict(gpu.rates)["float16"], 0.75 * gpu.memory_bandwidth_bytes_per_s
    reached = [flops / (seconds - result / streamed) / peak for flops, _, result, seconds in timed(op, 1e10)]
    assert statistics.median(reached) == pytest.approx(stated, abs=0.006)


@pytest.mark.parametrize("gpu,copied", [("v100-32gb", 802e9), ("a100-40gb", 1381e9)])
def test_what_streaming_reaches_is_what_was_timed(gpu: str, copied: float) -> None:
    assert KERNELS[chip_of(gpu)]["pointwise"] == pytest.approx(copied / load_gpu(gpu).memory_bandwidth_bytes_per_s, abs=0.006)


def test_products_are_priced_better_with_the_writing_of_their_results() -> None:
    gpu, errors = load_gpu("v100-32gb"), []
    for reached, after in ((0.86, 1.0), (0.8, 0.0)):  # each at its best
        gpu = dataclasses.replace(gpu, fractions=(("matmul", reached), ("pointwise", 0.75)))
        priced = ((kernel_time_s("matmul", flops, n, "float16", gpu, after * w), s) for flops, n, w, s in timed("matmul", 1e10))
        errors.append(statistics.median(abs(math.log(a / b)) for a, b in priced))
    assert errors[0] < 0.04 < errors[1]


def test_what_is_done_once_a_step_is_assumed_by_what_is_read_back() -> None:
    """Trainers of decoders clip gradients by their norm, which the host reads; compiled programs, and those of other networks, do not."""
    form = priced()[0][1]
    cnn = row(family="cnn", model="resnet50", extra="image 224", micro_batch=2, precision="fp16 AMP")
    eager, compiled, image = (Priced(run=rebuilt(r, 0), form=form) for r in (row(), row(source="alpa"), cnn))
    assert (eager.kind, compiled.kind, image.kind) == (EAGER, COMPILED, EAGER)
    assert eager.once_s > compiled.once_s == image.once_s > 0
    unseen = Constants(chips={"h100": CLASSES}, software={}, slack=0.0, held={})
    assert [unseen.of(p)[ONCE] for p in (eager, compiled)] == [eager.once_s, compiled.once_s]
    assert unseen.of(eager, hardware_alone=True)[ONCE] == 0.0


def test_memory_by_other_constants() -> None:
    """At those of the catalogue it is the planner's; gathers are held where the host is ahead by these constants."""
    found = [(p, f) for p, f in priced() if p.run.recipe.held_gathers]
    assert any(sum(f.held) for _, f in found)
    for p, form in found:
        one, recipe, gpu = Priced(run=p.run, form=form), p.run.recipe, p.run.cluster.gpu
        software = {name: getattr(recipe, name) for name in (ONCE, *SOFTWARE_S)}

        def known(launch_s: float, share: float, slack: float, p: Priced = one, software: dict[str, float] = software) -> Constants:
            chips = {p.chip: {name: p.run.cluster.gpu.fraction(name) for name in CLASSES}}
            of = {p.software: {**software, "launch_s": launch_s}}
            return Constants(chips=chips, software=of, slack=slack, held={p.source: share} if share else {})

        same = known(recipe.launches * gpu.launch_s, recipe.held_gathers, recipe.allocator_slack)
        ((shown, fullest),) = held_bytes([one], same)
        assert memory_terms(one, same, shown) == pytest.approx(form.memory, abs=1)
        assert memory_terms(one, same, fullest, "fullest") == pytest.approx(form.fullest, abs=1)
        ((ahead, _),) = held_bytes([one], known(1e-9, 0.0, 0.0))
        assert held_bytes([one], known(1.0, 0.0, 0.0)) == [(0.0, 0.0)] and ahead == form.held[form.shown[0]]
        unseen = memory_terms(one, known(1e-9, 0.0, 0.0), ahead)["allocator_slack_bytes"]
        assert unseen == pytest.approx(HELD * ahead, abs=1), "of a software that is not known"
        assert memory_terms(one, known(1e-9, 0.5, 0.0), ahead)["allocator_slack_bytes"] == pytest.approx(0.5 * ahead, abs=1)


def test_what_the_planner_chose_of_a_run_is_no_evidence() -> None:
    form = priced()[0][1]
    stated, free = (Priced(run=rebuilt(row(micro_batch=m), 0), form=form) for m in (2, ""))
    assert stated.counts and not free.counts


def test_a_table_is_cross_validated_and_priced_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [row(**{**LARGE, "micro_batch": m, "model": name, "n_layers": n}) for m in (1, 2, 4) for name, n in (("a", 2), ("b", 3))]
    others = [row(source="others", micro_batch=m, flags="implausibly slow (<1% MFU)" if m == 4 else "") for m in (1, 2, 4)]
    path, forms = table(tmp_path / "runs.csv", sizes + others), tmp_path / "forms.jsonl"
    argv = ["--data", str(path), "--forms", str(forms), "--json"]
    assert published.main([*argv, "--cross-validate"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["without_source"].keys() == {"somebody", "others"} and answer["without_size"].keys() == {"somebody"}
    for both in answer["without_source"].values():
        assert both["in"]["plain"]["runs"] == both["out"]["plain"]["runs"]
        assert both["in"]["plain"]["time"] is not None and both["out"]["plain"]["time"] is not None
    out = answer["without_source"]["others"]["out"]
    assert (out["plain"]["runs"], out["with_slow"]["runs"]) == (2, 3)
    assert len(list(kept(forms))) == 9
    before = forms.read_bytes()
    assert published.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["time"]["count"] == 8 and forms.read_bytes() == before
