"""The page of a plan: one file without network, every text escaped; in a browser it folds, sorts, finds, and draws without an error."""

from __future__ import annotations

import functools
import html
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autopar.measured import Calls, RankRun, Span, compared
from autopar.measured import Run as MeasuredRun
from autopar.planner import Pins, Plan, lower, make_plan
from autopar.planner.plan import StagePlan
from autopar.render import make_manifest, render, render_linked
from autopar.report.explanation import Family, explanation_of
from autopar.report.page import page_of, svg_of, svg_of_sweep, sweep_page
from autopar.report.page.charts import matrix_chart, memory_chart, timeline_chart, unit_of
from autopar.report.page.graph import Node, tree_of
from autopar.report.page.measuring import measured_timeline_chart
from autopar.report.page.page import Emitted
from autopar.report.page.sweep import sweep_charts
from autopar.report.page.vega import LibraryMissing
from autopar.report.sweep import Point, Series, Sweep
from autopar.report.timeline import timeline_of
from cost_models import load_cluster
from tests.chromium import visit
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure
EVIL = "</script><img src=x onerror=alert(1)>{{7*7}}"


@functools.cache
def planned(name: str = "deep", gpus: int = 8, **pins: Any) -> Plan:
    pins = pins or {"pp": 2, "dp": 2, "tp": 2, "micro_batches": 6, "schedule": "1f1b"}
    return make_plan(program_of(name), gpus, load_cluster("dgx-a100"), memory_limit_bytes=2**34, pins=Pins(**pins))


@functools.cache
def emitted(name: str = "deep") -> Emitted:
    from autopar.measure import Pricer

    program, plan = program_of(name), planned(name)
    lowered = lower(program, plan)
    source, lines = render_linked(lowered, make_manifest(program, lowered, plan))
    costs = Pricer(load_cluster("dgx-a100"), plan.mesh).program(lowered.program).ops
    return Emitted(source=source, lines=lines, costs=costs, program=program)


FAMILIES = (
    Family(name="slow", pins={}, step_time_s=2.0, memory_bytes=2**30, plan="dp 8"),
    Family(name="fast", pins={}, step_time_s=0.5, memory_bytes=2**31, plan="tp 8", chosen=True),
    Family(name="refused", pins={}, step_time_s=None, memory_bytes=None, plan="", why="does not fit"),
)


def _point(gpus: int, step_s: float | None, memory: int = 2**35) -> Point:
    if step_s is None:
        return Point(gpus=gpus, cluster="c", memory_limit_bytes=memory, batch=None, step_time_s=None, why="does not fit")
    return Point(
        gpus=gpus, cluster="c", memory_limit_bytes=memory, batch=None, step_time_s=step_s, gpu_seconds=gpus * step_s,
        per_sample=gpus * step_s / 64, work_per_s=64 / step_s, memory_bytes=memory // 2, mfu=0.4 / gpus, efficiency=8 / gpus,
        plan=f"dp {gpus}",
    )  # fmt: skip


SWEEP = Sweep(
    model="Net", schema=1, unit="samples", cheapest=2, fastest=2, points=[
        _point(4, None), _point(8, 1.0), _point(16, 0.4), _point(8, 1.5, 2**34), _point(16, None, 2**34),
    ],
    series=[
        Series(name="32.00 GiB", gpus=[4, 8, 16], stops_at=16, why=""), Series(name="16.00 GiB", gpus=[8, 16], stops_at=8, why="w"),
    ],
)  # fmt: skip


@functools.cache
def page() -> str:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    plan = planned()
    return page_of(plan, explanation_of(plan, families=FAMILIES), emitted=emitted(), measured=compared(plan, run_of(plan)))


def run_of(plan: Plan) -> MeasuredRun:
    ranks = [
        RankRun(
            rank=r, step_s=0.2, passes={"forward": Calls(count=6, seconds=0.06), "backward": Calls(count=6, seconds=0.12)},
            collectives={"all_reduce": Calls(count=3, seconds=0.01)}, memory_bytes=2**29, axes={"dp": Calls(count=3, seconds=0.008)},
            spans=[
                Span(what="forward", start_s=0.0, end_s=0.06), Span(what="all-reduce", start_s=0.05, end_s=0.058, axis="dp"),
                Span(what="backward", start_s=0.07, end_s=0.19),
            ],
        )
        for r in range(plan.gpus)
    ]  # fmt: skip
    return MeasuredRun(
        program_hash=plan.program_hash, mesh=plan.mesh, micro_batches=plan.micro_batches, schedule=plan.schedule, device="cpu",
        steps_s=[0.1, 0.2, 0.3], ranks=ranks,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the file
def test_the_page_is_one_file_that_asks_for_nothing() -> None:
    text = page()
    body = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", body)
    assert "default-src 'none'" in text
    assert len(text) < 5 * 2**20
    for section in ("cost", "timeline", "memory", "alternatives", "blocks", "model", "ranks", "source", "notes", "measured"):
        assert f'<section id="{section}">' in text


def test_names_of_users_are_text() -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    plan = planned()
    assert plan.account is not None
    modules = {op: module.replace("layers", EVIL) for op, module in plan.account.modules.items()}
    account = msgspec.structs.replace(plan.account, modules=modules)
    plan = msgspec.structs.replace(plan, model=EVIL, account=account, notes=[EVIL], alternatives=[EVIL], cluster=EVIL, provenance=EVIL)
    found = explanation_of(plan, families=(Family(name=EVIL, pins={}, step_time_s=1.0, memory_bytes=1, plan=EVIL),))
    text = page_of(plan, found)
    body = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "<img" not in body
    assert "{{7*7}}" in body  # is not a template
    assert html.escape(EVIL) in text
    assert text.count("</script>") == text.count("<script")
    assert "<img" not in svg_of(plan)


def test_without_the_library_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    plan = planned()
    with pytest.raises(LibraryMissing, match="pip install vl-convert-python"):
        page_of(plan, explanation_of(plan))


def test_a_line_of_source_is_the_operator_that_it_says() -> None:
    made = emitted()
    program, plan = program_of("deep"), planned()
    lowered = lower(program, plan)
    assert made.source == render(lowered, make_manifest(program, lowered, plan))
    lines = made.source.split("\n")
    known = {op.name for stage in lowered.stages for op in stage.ops} | {op.name for op in lowered.prologue}
    assert set(made.lines.values()) <= known
    assert {name for name in made.lines.values() if name.startswith("linear")}
    for number, name in made.lines.items():
        if name.startswith("linear"):
            assert "F.linear(" in " ".join(lines[number - 1 : number + 3])
    assert "\x1f" not in made.source


def test_the_tree_has_every_operator_once_and_blocks_with_their_number() -> None:
    plan = planned()
    root = tree_of(plan, program_of("deep"), emitted().costs)

    def walk(node: Node) -> list[str]:
        return [leaf.name for leaf in node.operators] + [name for child in node.modules.values() for name in walk(child)]

    names = walk(root)
    assert len(names) == len(set(names)) == root.leaves
    program = program_of("deep")
    later = sum(len(span) for block in program.blocks for span in block.spans[1:])
    assert root.leaves == len(program.ops) - later
    counts = {node.path: node.count for node in _nodes(root) if node.count > 1}
    assert counts == {"layers.*": 6}
    assert abs(sum(root.colours.values()) - 1) < 1e-9
    assert tree_of(plan).leaves > 0  # of a plan file


def _nodes(node: Node) -> list[Node]:
    return [node, *(x for child in node.modules.values() for x in _nodes(child))]


# ----------------------------------------------------------------------------------------------------------- the charts
def test_charts_show_the_figures_of_the_timeline() -> None:
    plan = planned()
    made = timeline_of(plan)
    values = timeline_chart(made)["data"]["values"]
    assert len(values) == sum(len(rank.bars) for rank in made.ranks)
    assert max(v["end"] for v in values) == pytest.approx(made.end_s * 1e3)
    spec = memory_chart(made, plan)
    assert spec is not None
    assert max(v["gib"] for v in spec["data"]["values"]) == pytest.approx(max(plan.memory_bytes) / 2**30)
    assert spec["layer"][1]["data"]["values"][0]["gib"] == 2**34 / 2**30


@pytest.mark.parametrize(
    ("mesh", "lines"), [({"pp": 2, "dp": 2, "tp": 2}, 8), ({"pp": 4, "dp": 64, "tp": 8}, 64), ({"pp": 1, "dp": 17, "tp": 1}, 17)]
)
def test_the_matrix_has_neighbours_on_one_axis(mesh: dict[str, int], lines: int) -> None:
    n = mesh["pp"] * mesh["dp"] * mesh["tp"]
    plan = msgspec.structs.replace(planned(), mesh=mesh, gpus=n)
    spec, note = matrix_chart(plan)
    values = spec["data"]["values"]
    assert {v["a"] for v in values} == {v["b"] for v in values} == set(range(lines))
    assert bool(note) == (n > 64)
    if n == 8:
        axes = {(v["a"], v["b"]): v["axis"] for v in values}
        assert axes == {
            (a, b): "tp" if a ^ b == 1 else "dp" if a ^ b == 2 else "pp" for a in range(8) for b in range(8) if (a ^ b) in (1, 2, 4)
        }  # fmt: skip


def test_the_picture_is_an_svg() -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    import xml.etree.ElementTree as ET

    text = svg_of(planned())
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    assert "ms of the step" in text
    assert "GiB of a GPU" in text


# ---------------------------------------------------------------------------------------------------------- in a browser
LOOK = """
    const missing = () => [...document.querySelectorAll('.chart')].find((c) => !c.querySelector('svg, canvas'));
    await whole();
    const all = [...document.querySelectorAll('.chart')];
    const charts = Object.fromEntries(all.map((c) => [c.dataset.chart, c.querySelectorAll('svg, canvas').length]));
    const table = document.querySelector('#alternatives table');
    const column = (k) => [...table.tBodies[0].rows].map((r) => r.cells[k].textContent);
    const heads = table.tHead.rows[0].cells;
    heads[1].querySelector('button').click(); const up = column(0);
    heads[1].querySelector('button').click(); const down = column(0);
    const sort = heads[1].getAttribute('aria-sort');
    const folded = [...document.querySelectorAll('.tree details')];
    document.getElementById('fold').click(); const closed = folded.filter((d) => d.open).length;
    const find = document.getElementById('find');
    find.value = 'linear'; find.dispatchEvent(new Event('input'));
    const hits = document.querySelectorAll('.hit').length, said = document.getElementById('found').textContent;
    const revealed = [...document.querySelectorAll('.tree .hit')].some((h) => h.checkVisibility());
    document.getElementById('unfold').click(); const open = folded.filter((d) => d.open).length;
    find.value = 'no such thing'; find.dispatchEvent(new Event('input'));
    const nothing = document.getElementById('found').textContent;
    const bar = document.querySelector('#chart-timeline path[aria-roledescription="bar"], #chart-timeline .mark-rect path');
    const box = bar.getBoundingClientRect();
    bar.scrollIntoView({ block: 'center' });
    const at = bar.getBoundingClientRect();
    const where = { bubbles: true, clientX: at.x + at.width / 2, clientY: at.y + at.height / 2, view: window };
    for (const kind of ['pointerover', 'pointermove']) bar.dispatchEvent(new PointerEvent(kind, where));
    for (const kind of ['mouseover', 'mousemove']) bar.dispatchEvent(new MouseEvent(kind, where));
    await wait(300);
    const tip = document.querySelector('#vg-tooltip-element');
    const before = document.documentElement.dataset.theme || '';
    document.getElementById('theme').click(); await wait(500);
    const op = document.querySelector('.code a[data-op]');
    location.hash = op.getAttribute('href'); await wait(200);
    return { charts, up, down, sort, closed, open, folds: folded.length, hits, said, revealed, nothing, tip: tip ? tip.textContent : '',
             theme: [before, document.documentElement.dataset.theme],
             op: document.querySelector(':target') ? document.querySelector(':target').id : '',
             title: op.title, wide: document.documentElement.scrollWidth - document.documentElement.clientWidth };
"""


def test_in_a_browser_it_folds_sorts_finds_and_draws(tmp_path: Path) -> None:
    seen = visit(page(), LOOK, tmp_path)
    found = seen.result
    assert seen.errors == ()
    assert "failed" not in found, found
    assert set(found["charts"]) == {"parts", "measured", "ran", "timeline", "memory", "pool", "families", "matrix"}
    assert set(found["charts"].values()) == {1}
    assert found["up"] == ["fast", "slow", "refused"]
    assert found["down"] == ["refused", "slow", "fast"]
    assert found["sort"] == "descending"
    assert (found["closed"], found["open"]) == (1, found["folds"])
    assert found["hits"] > 3
    assert found["revealed"]
    assert re.fullmatch(r"1 of \d+", found["said"])
    assert found["nothing"] == "nothing found"
    assert "takes" in found["tip"]
    assert found["theme"][0] == ""
    assert found["theme"][1] in ("dark", "light")
    assert found["op"].startswith("op-")
    assert "forward" in found["title"]
    assert found["wide"] <= 0


def test_on_a_phone_nothing_is_wider_than_the_screen(tmp_path: Path) -> None:
    seen = visit(
        page(),
        """
        const missing = () => [...document.querySelectorAll('.chart')].find((c) => !c.querySelector('svg, canvas'));
        await whole();
        const own = document.documentElement;
        const cut = [...document.querySelectorAll('.scroll')].filter((d) => d.scrollWidth > d.clientWidth).length;
        const labels = new Set([...document.querySelectorAll('#blocks td')].map((cell) => cell.dataset.label));
        return { wide: own.scrollWidth - own.clientWidth, width: own.clientWidth, missing: !!missing(), cut, labels: labels.size };
        """,
        tmp_path, width=390, height=800,
    )  # fmt: skip
    assert seen.errors == ()
    assert seen.result == {"wide": 0, "width": 390, "missing": False, "cut": 0, "labels": 10}


@pytest.mark.parametrize(("seconds", "unit"), [(21.4, "s"), (2.0, "s"), (1.9, "ms"), (0.002, "ms"), (0.0019, "us"), (0.0, "us")])
def test_an_axis_has_the_unit_in_which_its_figures_are_short(seconds: float, unit: str) -> None:
    named, each = unit_of(seconds)
    assert named == unit and {"s": 1.0, "ms": 1e3, "us": 1e6}[named] == each


def test_a_model_of_96_layers_and_1024_ranks_is_drawn(tmp_path: Path) -> None:
    """Under 5 MB, with no more elements than a browser shows at once."""
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    plan = _many(planned(), ranks=64, layers=96)
    text = page_of(plan, explanation_of(plan), emitted=emitted())
    assert len(text.encode()) < 5 * 2**20
    seen = visit(
        text,
        """
        const missing = () => [...document.querySelectorAll('.chart')].find((c) => !c.querySelector('svg, canvas'));
        await whole();
        const count = (what) => document.querySelectorAll(what).length;
        const drawn = document.querySelector('#chart-timeline canvas');
        const rgba = drawn.getContext('2d').getImageData(0, 0, drawn.width, drawn.height).data, colours = new Set();
        for (let k = 0; k < rgba.length; k += 4) colours.add((rgba[k] << 16) + (rgba[k + 1] << 8) + rgba[k + 2]);
        return { rows: count('.tree li'), elements: count('*'), colours: colours.size, missing: !!missing(),
                 ms: document.documentElement.dataset.drawn };
        """,
        tmp_path,
    )
    assert seen.errors == ()
    assert seen.result["rows"] > 20
    assert seen.result["colours"] > 3  # bars are there
    assert len(timeline_chart(timeline_of(plan))["data"]["values"]) > 2000
    assert seen.result["ms"], "the page says how long it took until all was drawn"
    assert seen.result["elements"] < 30_000  # which a browser lays out in a fraction of a second
    assert not seen.result["missing"]


def _many(plan: Plan, *, ranks: int, layers: int) -> Plan:
    """The plan as of many pipeline ranks with a few layers each, and as many micro-batches."""
    assert plan.account is not None
    stages: list[StagePlan] = [plan.stages[0]] * ranks
    account = msgspec.structs.replace(plan.account, curves=[plan.account.curves[0]] * ranks)
    mesh = {"pp": ranks, "dp": 2, "tp": 8}
    cuts = list(range(1, ranks))
    return msgspec.structs.replace(plan, stages=stages, account=account, mesh=mesh, gpus=1024, micro_batches=layers, cuts=cuts)


def test_what_was_measured_is_drawn_beside_what_was_predicted() -> None:
    plan = planned()
    made, found = timeline_of(plan), compared(plan, run_of(plan))
    spec = measured_timeline_chart(made, found)
    assert spec is not None
    values = spec["data"]["values"]
    assert {v["row"] for v in values} == {"0 predicted", "0 measured", "1 predicted", "1 measured"}
    measured = [v for v in values if v["row"] == "0 measured"]
    assert [v["kind"] for v in measured] == ["forward", "backward", "waits over dp"], "what was waited for lies over the passes"
    assert sum(v["row"] == "0 predicted" for v in values) == len(made.ranks[0].bars)
    bare = [msgspec.structs.replace(r, spans=[]) for r in run_of(plan).ranks]
    assert measured_timeline_chart(made, compared(plan, msgspec.structs.replace(run_of(plan), ranks=bare))) is None


def test_a_sweep_has_a_chart_of_each_figure() -> None:
    charts = sweep_charts(SWEEP)
    assert list(charts) == ["step", "cost", "memory", "mfu"]
    fits = [p for p in SWEEP.points if p.step_time_s is not None]
    for name, field in (("step", "seconds"), ("cost", "gpu_seconds"), ("memory", "gib"), ("mfu", "mfu")):
        values = charts[name]["data"]["values"]
        assert [(v["gpus"], v["series"]) for v in values] == [(8, "32.00 GiB"), (16, "32.00 GiB"), (8, "16.00 GiB")]
        assert all(v[field] for v in values)
    assert [v["seconds"] for v in charts["step"]["data"]["values"]] == [p.step_time_s for p in fits]
    none = Series(name="", gpus=[4], stops_at=None, why="")
    nothing = msgspec.structs.replace(SWEEP, points=[_point(4, None)], series=[none], cheapest=None)
    assert sweep_charts(nothing) == {}


def test_a_sweep_in_a_browser_is_drawn_and_sorted(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    text = sweep_page(SWEEP)
    assert len(text) < 5 * 2**20
    seen = visit(
        text,
        """
        const missing = () => [...document.querySelectorAll('.chart')].find((c) => !c.querySelector('svg, canvas'));
        await whole();
        const table = document.querySelector('#points table');
        const column = (k) => [...table.tBodies[0].rows].map((r) => r.cells[k].textContent);
        table.tHead.rows[0].cells[4].querySelector('button').click(); const up = column(4);
        const chosen = [...table.querySelectorAll('tr.chosen')].map((r) => r.cells[0].textContent);
        const own = document.documentElement;
        return { charts: [...document.querySelectorAll('.chart')].map((c) => c.dataset.chart), missing: !!missing(), up, chosen,
                 points: document.querySelectorAll('#chart-step .mark-symbol path').length, wide: own.scrollWidth - own.clientWidth };
        """,
        tmp_path,
    )
    assert seen.errors == ()
    assert seen.result["charts"] == ["step", "cost", "memory", "mfu"]
    assert not seen.result["missing"]
    assert seen.result["up"] == ["400 ms", "1 s", "1.5 s", "-", "-"]
    assert seen.result["chosen"] == ["16"]
    assert seen.result["points"] >= 3
    assert seen.result["wide"] <= 0
    svg = svg_of_sweep(SWEEP)
    assert "seconds of a step" in svg and "MFU" in svg


def test_json_in_the_page_is_json() -> None:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page(), re.DOTALL)
    assert found is not None
    assert set(json.loads(found[1])) == {"parts", "measured", "ran", "timeline", "memory", "pool", "families", "matrix"}
