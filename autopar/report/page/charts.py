"""Charts as Vega-Lite specifications: data, marks, colours; one function each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.axes import LAYERS
from autopar.planner.plan import Plan
from autopar.report.explanation import Explanation
from autopar.report.timeline import (
    BACKWARD,
    BEFORE,
    FORWARD,
    MOST_DRAWN,
    REDUCTION,
    STEADY,
    UPDATE,
    WEIGHTS,
    RankTimeline,
    StepTimeline,
    ranks_text,
)  # fmt: skip
from autopar.report.units import bytes_text, seconds_text
from autopar.report.words import MEMORY_TERMS

__all__ = [
    "AXIS_COLOURS", "COLOURS", "MOST_BARS", "PALETTE", "Spec", "bars_of", "families_chart", "in_time", "matrix_chart", "memory_chart",
    "parts_chart", "pool_chart", "short", "spec_of", "timeline_chart", "tooltip_of", "unit_of",
]  # fmt: skip

Spec = dict[str, Any]
GIB = 2.0**30
MOST_BARS = 2400  # of a timeline that is drawn, where a pass is a few dots wide; a trace for Perfetto has all
MOST_RANKS = MOST_DRAWN  # rows of a timeline, and lines of a matrix
CURVES = 8  # of different memory that are drawn
LEVELS = 300  # of a curve: two dots of a wide screen each

# of Okabe and Ito, told apart by colour-blind people, on white and on black
COLOURS = {
    FORWARD: "#56b4e9", BACKWARD: "#e69f00", WEIGHTS: "#f0e442", REDUCTION: "#cc79a7", UPDATE: "#009e73", BEFORE: "#999999",
    STEADY: "#7a9bb0",
}  # fmt: skip
AXIS_COLOURS = {"tp": "#0072b2", "dp": "#009e73", "pp": "#e69f00", "cp": "#cc79a7", "ep": "#d55e00", "none": "#8a8a8a"}
PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1", "#999999"]


def spec_of(values: Sequence[dict[str, Any]], **further: Any) -> Spec:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "data": {"values": list(values)}, "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"}, **further,
    }  # fmt: skip


def tooltip_of(field: str, title: str) -> Spec:
    return {"field": field, "title": title, "type": "nominal"}


def in_time(unit: str, kinds: Sequence[str], colours: Sequence[str], tooltips: Sequence[tuple[str, str]]) -> Spec:
    """The encoding of bars from `start` to `end`, a row for each pipeline rank, coloured by kind. tooltips: fields and their titles."""
    return {
        "y": {"field": "row", "type": "nominal", "sort": None, "title": "pipeline rank"},
        "x": {"field": "start", "type": "quantitative", "title": f"{unit} of the step", "scale": {"nice": False}},
        "x2": {"field": "end"},
        "color": {
            "field": "kind", "type": "nominal", "title": None, "legend": {"orient": "top", "columns": 3},
            "scale": {"domain": list(kinds), "range": list(colours)},
        },
        "tooltip": [tooltip_of(field, title) for field, title in tooltips],
    }  # fmt: skip


def timeline_chart(made: StepTimeline) -> Spec:
    """What each pipeline rank does when; ranks that do the same are one row."""
    rows = _some(made.ranks)
    each = max(8, MOST_BARS // max(1, len(rows)))
    unit, scale = unit_of(made.end_s)
    values = [
        {
            "row": _row(rank), "kind": bar.kind, "start": short(bar.start_s * scale), "end": short(bar.end_s * scale),
            "takes": seconds_text(bar.end_s - bar.start_s), "from": seconds_text(bar.start_s),
            "stage": "" if bar.stage < 0 else str(bar.stage),
            "micro": f"{bar.passes} passes" if bar.passes > 1 else "" if bar.micro_batch < 0 else str(bar.micro_batch),
        }
        for rank in rows
        for bar in rank.few_bars(each)
    ]  # fmt: skip
    kinds = [kind for kind in COLOURS if any(v["kind"] == kind for v in values)]
    return spec_of(
        values, height={"step": 22 if len(rows) <= 16 else 12},
        mark={"type": "bar", "stroke": "#00000055", "strokeWidth": 0.4, "cornerRadius": 1},
        encoding=in_time(
            unit, kinds, [COLOURS[kind] for kind in kinds],
            (("row", "rank"), ("kind", "what"), ("stage", "stage"), ("micro", "micro-batch"), ("from", "from"), ("takes", "takes")),
        ),
    )  # fmt: skip


def short(amount: float) -> float:
    """With as many digits as can be seen."""
    return float(f"{amount:.7g}")


def unit_of(seconds: float) -> tuple[str, float]:
    """In what an axis up to so many seconds is drawn, and how many of it a second has."""
    return next(((unit, each) for unit, each in (("s", 1.0), ("ms", 1e3)) if seconds * each >= 2), ("us", 1e6))


def _row(rank: RankTimeline) -> str:
    return f"{rank.rank} ({ranks_text(rank.ranks)})"


def _some(ranks: Sequence[RankTimeline]) -> Sequence[RankTimeline]:
    """All of them, or the first, the last and some between."""
    if len(ranks) <= MOST_RANKS:
        return ranks
    return [ranks[round(k * (len(ranks) - 1) / (MOST_RANKS - 1))] for k in range(MOST_RANKS)]


def memory_chart(made: StepTimeline, plan: Plan) -> Spec | None:
    """What a GPU of each pipeline rank holds over the step, against what it may; None where the plan does not say."""
    groups: dict[tuple[Any, ...], list[RankTimeline]] = {}
    for rank in made.ranks:
        groups.setdefault(tuple((level.nbytes, round(level.at_s, 9)) for level in rank.memory), []).append(rank)
    curves = [group for key, group in groups.items() if key]
    if not curves:
        return None
    fullest = max(range(len(curves)), key=lambda k: max(level.nbytes for level in curves[k][0].memory))
    if len(curves) > CURVES:
        kept = sorted({fullest, *(round(k * (len(curves) - 1) / (CURVES - 2)) for k in range(CURVES - 1))})
        curves = [curves[k] for k in kept]
    values = []
    unit, scale = unit_of(made.end_s)
    for group in curves:
        name = f"rank {group[0].rank}" if len(group) == 1 else f"ranks {group[0].rank}-{group[-1].rank}"
        levels = group[0].few_levels(LEVELS)
        values += [
            {
                "rank": name, "at": short(x.at_s * scale), "gib": short(x.nbytes / GIB), "holds": bytes_text(x.nbytes),
                "when": seconds_text(x.at_s),
            }
            for x in levels
        ]  # fmt: skip
    order = list(dict.fromkeys(v["rank"] for v in values))
    line = {
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
        "encoding": {
            "x": {"field": "at", "type": "quantitative", "title": f"{unit} of the step", "scale": {"nice": False}},
            "y": {"field": "gib", "type": "quantitative", "title": "GiB of a GPU"},
            "color": {
                "field": "rank", "type": "nominal", "title": "pipeline rank", "sort": order, "legend": {"orient": "top", "columns": 4},
                "scale": {"range": PALETTE},
            },
            "tooltip": [tooltip_of("rank", "pipeline rank"), tooltip_of("when", "at"), tooltip_of("holds", "holds")],
        },
    }  # fmt: skip
    layers: list[Spec] = [line]
    if plan.memory_limit_bytes:
        limit = {"gib": plan.memory_limit_bytes / GIB, "says": f"may use {bytes_text(plan.memory_limit_bytes)}"}
        place = {"y": {"field": "gib", "type": "quantitative"}}
        layers += [
            {
                "data": {"values": [limit]}, "mark": {"type": "rule", "strokeDash": [6, 4], "color": "#d55e00", "strokeWidth": 2},
                "encoding": {**place, "tooltip": [tooltip_of("says", "a plan")]},
            },
            {
                "data": {"values": [limit]}, "mark": {"type": "text", "align": "left", "baseline": "bottom", "dy": -3, "color": "#d55e00"},
                "encoding": {**place, "x": {"value": 4}, "text": {"field": "says", "type": "nominal"}},
            },
        ]  # fmt: skip
    return spec_of(values, height=240, layer=layers)


def parts_chart(found: Explanation) -> Spec:
    """What the step is spent on, of the busiest pipeline rank."""
    unit, scale = unit_of(max((part.seconds for part in found.time), default=0.0))
    values = [
        {"kind": part.kind, "time": part.seconds * scale, "takes": f"{seconds_text(part.seconds)} ({part.share:.1%})"}
        for part in found.time
    ]
    return bars_of(values, "kind", "time", f"{unit} of the step", [tooltip_of("kind", "what"), tooltip_of("takes", "takes")])


def bars_of(values: Sequence[Spec], name: str, amount: str, title: str, tooltip: list[Spec], marked: str | None = None) -> Spec:
    colour: Spec = {"value": PALETTE[0]}
    if marked is not None:
        colour = {"condition": {"test": f"datum.{marked}", "value": COLOURS[BACKWARD]}, "value": PALETTE[0]}
    return spec_of(
        values, height={"step": 24}, mark={"type": "bar", "cornerRadius": 1},
        encoding={
            "y": {"field": name, "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 220}},
            "x": {"field": amount, "type": "quantitative", "title": title}, "color": colour, "tooltip": tooltip,
        },
    )  # fmt: skip


def families_chart(found: Explanation) -> Spec | None:
    """Step times of the families of plans that were tried; those that do not fit are in the table beside it."""
    unit, scale = unit_of(max((x.step_time_s or 0.0 for x in found.families), default=0.0))
    values = [
        {"name": x.name, "time": x.step_time_s * scale, "takes": seconds_text(x.step_time_s), "plan": x.plan, "chosen": x.chosen}
        for x in found.families
        if x.step_time_s is not None
    ]
    if not values:
        return None
    tooltip = [tooltip_of("name", "family"), tooltip_of("takes", "a step takes"), tooltip_of("plan", "plan")]
    return bars_of(values, "name", "time", f"{unit} of a step (what was chosen in orange)", tooltip, marked="chosen")


def pool_chart(found: Explanation) -> Spec:
    """Memory by kind of each pipeline rank at its fullest moment, against what it may use."""
    stages = found.stages if len(found.stages) <= MOST_RANKS else found.stages[:: -(-len(found.stages) // MOST_RANKS)]
    terms = list(MEMORY_TERMS.values())
    values = [
        {"rank": str(stage.rank), "term": term, "gib": n / GIB, "holds": bytes_text(n), "order": terms.index(term)}
        for stage in stages
        for term, n in stage.memory.items()
        if n
    ]
    bars = {
        "mark": {"type": "bar"},
        "encoding": {
            "y": {"field": "rank", "type": "nominal", "sort": None, "title": "pipeline rank"},
            "x": {"field": "gib", "type": "quantitative", "title": "GiB of a GPU", "stack": "zero"},
            "color": {
                "field": "term", "type": "nominal", "sort": terms, "title": None, "legend": {"orient": "top", "columns": 4},
                "scale": {"domain": terms, "range": PALETTE},
            },
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [tooltip_of("rank", "pipeline rank"), tooltip_of("term", "what"), tooltip_of("holds", "holds")],
        },
    }  # fmt: skip
    layers: list[Spec] = [bars]
    limit = found.summary.memory_limit_bytes
    if limit:
        dashed = {"type": "rule", "strokeDash": [6, 4], "color": "#d55e00", "strokeWidth": 2}
        rule: Spec = {"mark": dashed, "data": {"values": [{"gib": limit / GIB}]}}
        layers.append({**rule, "encoding": {"x": {"field": "gib", "type": "quantitative"}}})
    return spec_of(values, height={"step": 24 if len(stages) <= 16 else 12}, layer=layers)


def matrix_chart(plan: Plan) -> tuple[Spec, str]:
    """Which ranks exchange what: neighbours on one mesh axis. Many ranks are taken together, as many as share a node or more. And in words
    what a line stands for."""
    mesh, n = plan.mesh, plan.gpus
    node = plan.account.gpus_per_node if plan.account else n
    group = 1 if n <= MOST_RANKS else max(node, -(-n // MOST_RANKS))
    group = next(g for g in range(group, n + 1) if n % g == 0)
    strides = {axis: _stride(mesh, axis) for axis in mesh}
    pairs: dict[tuple[int, int], dict[str, int]] = {}
    for rank in range(n):
        for axis, size in mesh.items():
            if size == 1:
                continue
            at = rank // strides[axis] % size
            others = [k for k in (at - 1, at + 1) if 0 <= k < size] if axis == LAYERS else [k for k in range(size) if k != at]
            for k in others if size <= MOST_RANKS or axis == LAYERS else (0, size - 1, at ^ 1):
                other = rank + (k - at) * strides[axis]
                if 0 <= other < n and other != rank:
                    counts = pairs.setdefault((rank // group, other // group), {})
                    counts[axis] = counts.get(axis, 0) + 1
    order = list(reversed(mesh))
    seconds = plan.account.seconds if plan.account else {}
    values = []
    for (a, b), counts in pairs.items():
        axis = max(counts, key=lambda x: (counts[x], -order.index(x)))
        same = (a * group) // node == (b * group) // node if group <= node else a == b
        spent = seconds.get(f"communication over {axis}")
        values.append(
            {
                "a": a, "b": b, "axis": axis, "from": _named(a, group), "to": _named(b, group),
                "axes": ", ".join(x for x in mesh if x in counts), "link": "in a node" if same else "between nodes",
                "spent": seconds_text(spent) if spent else "hidden, or little",
            }
        )  # fmt: skip
    axes = [axis for axis in mesh if any(v["axis"] == axis for v in values)]
    spec = spec_of(
        values, height=340, mark={"type": "rect"},
        encoding={
            "x": {
                "field": "a", "type": "ordinal", "title": "rank" if group == 1 else f"{group} ranks",
                "axis": {"labelOverlap": True, "labelAngle": 0},
            },
            "y": {"field": "b", "type": "ordinal", "title": None, "axis": {"labelOverlap": True}},
            "color": {
                "field": "axis", "type": "nominal", "title": "mesh axis", "legend": {"orient": "top"},
                "scale": {"domain": axes, "range": [AXIS_COLOURS.get(axis, PALETTE[-1]) for axis in axes]},
            },
            "opacity": {
                "field": "link", "type": "nominal", "title": None,
                "legend": {"orient": "top", "symbolFillColor": AXIS_COLOURS["none"], "symbolStrokeWidth": 0},
                "scale": {"domain": ["in a node", "between nodes"], "range": [1.0, 0.5]},
            },
            "tooltip": [
                tooltip_of("from", "from"), tooltip_of("to", "to"), tooltip_of("axes", "mesh axes"), tooltip_of("link", "link"),
                tooltip_of("spent", "exposed in a step on that axis"),
            ],
        },
    )  # fmt: skip
    return spec, "" if group == 1 else f"Each line stands for {group} ranks that follow one another."


def _stride(mesh: dict[str, int], axis: str) -> int:
    stride = 1
    for name in reversed(mesh):
        if name == axis:
            return stride
        stride *= mesh[name]
    return stride


def _named(k: int, group: int) -> str:
    return ranks_text((k * group, (k + 1) * group - 1))
