"""Experts' layouts: the table says enough to rebuild them, what lies outside of the search's space is named, ours is compared."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from autopar.planner import Pins
from autopar.planner.space import Space
from benchmarks import experts
from benchmarks._runs import COLUMNS, rebuilt
from cost_models.cluster import load_cluster

pytestmark = pytest.mark.pure

ROW = {
    "source": "somebody", "model": "tiny", "family": "gpt", "n_layers": "2", "hidden": "64", "n_heads": "4", "ffn": "128", "vocab": "128",
    "seq_len": "32", "gpu": "H100-80GB", "n_gpus": "2", "gpus_per_node": "8", "inter_link": "IB 400 Gb/s", "global_batch": "8",
    "micro_batch": "2", "dp": "2", "tp": "1", "pp": "1", "sharding": "none", "act_ckpt": "full", "precision": "bf16", "status": "layout",
}  # fmt: skip


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**dict.fromkeys(COLUMNS, ""), **row} for row in rows)
    return path


def test_the_layouts_that_are_carried_can_be_rebuilt_and_state_no_times() -> None:
    path = experts.DATA / "experts.csv"
    found, skipped = experts.layouts([path])
    assert {r.row["model"] for r in found} >= {"GPT-1.7B", "GPT-1008B", "MT-NLG-530B", "BLOOM-176B", "Llama-3.1-405B"}
    assert set(skipped.values()) == {"what runs again selectively is not stated"}
    for run in found:
        pins = run.pins
        assert (pins.dp or 0) * (pins.tp or 0) * (pins.pp or 0) == run.gpus
        assert run.step_time_s is None and run.memory_bytes is None and run.row["source_ref"]
    sizes = {r.row["model"]: r.dims for r in found}
    for name, billions in (("GPT-1.7B", 1.7), ("GPT-145.6B", 145.6), ("GPT-1008B", 1008.0)):
        dims = sizes[name]
        layer = 12 * dims.hidden**2 + 13 * dims.hidden  # the paper's own formula (2)
        total = dims.layers * layer + (dims.vocabulary + dims.length) * dims.hidden
        assert total / 1e9 == pytest.approx(billions, abs=0.05, rel=1e-3)


def test_one_layout_of_each_model_and_number_of_gpus(tmp_path: Path) -> None:
    rows = (ROW, {**ROW, "global_batch": "16"}, {**ROW, "n_gpus": "4", "dp": "4"}, {**ROW, "model": "odd", "act_ckpt": "selective"})
    found, skipped = experts.layouts([table(tmp_path / "a.csv", *rows)])
    assert [(r.gpus, r.global_batch) for r in found] == [(2, 16), (4, 8)]
    assert skipped == {"odd (somebody)": "what runs again selectively is not stated"}


@pytest.mark.parametrize(
    "changes,part",
    [
        ({}, []),
        ({"n_gpus": "16", "dp": "1", "tp": "16", "n_heads": "16"}, ["tp=16 reaches over nodes of 8 GPUs"]),
        ({"global_batch": "260", "micro_batch": "1"}, ["130 micro-batches"]),
    ],
    ids=["inside", "tp over nodes", "micro-batches"],
)
def test_what_lies_outside_of_the_space_is_named(changes: dict[str, str], part: list[str]) -> None:
    run = rebuilt({**dict.fromkeys(COLUMNS, ""), **ROW, **changes}, 2)
    space = Space(gpus=run.gpus, cluster=load_cluster("dgx-h100"), pins=Pins(), batch=run.global_batch)
    assert experts.outside(run, space) == part


def test_an_interval_holds_what_it_is_for() -> None:
    low, high = experts.interval(10.0)
    assert abs(10.0 - low) / low == pytest.approx(experts.LARGEST_ERROR)
    assert abs(10.0 - high) / high == pytest.approx(experts.LARGEST_ERROR)


def test_ours_is_compared_with_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experts.main(["--data", str(table(tmp_path / "a.csv", ROW)), "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    [layout] = record["layouts"]
    assert layout["ours_s"] <= layout["theirs_s"] * (1 + experts.SAME) and not layout["slower"] and record["slower"] == 0
    assert layout["bound_s"] <= layout["ours_s"] and layout["theirs_fits"]
    assert any(d.startswith("pieces recomputed") for d in layout["differs"])  # nothing needs to be recomputed here


def test_a_file_that_is_no_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    assert experts.main(["--data", str(tmp_path / "a.csv")]) == 2
    assert "lacks the columns" in capsys.readouterr().err
