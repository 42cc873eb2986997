"""A measured run beside its plan, as charts: figure over figure, and what each pipeline rank did when, beside what was predicted."""

from __future__ import annotations

from typing import Any

from autopar.measured import Compared, RankRun, axis_of
from autopar.report.page.charts import COLOURS, MOST_BARS, PALETTE, Spec, bars_of, in_time, short, spec_of, tooltip_of, unit_of
from autopar.report.timeline import BACKWARD, FORWARD, MOST_DRAWN, StepTimeline
from autopar.report.units import seconds_text

__all__ = ["measured_chart", "measured_timeline_chart"]

KINDS = {"forward": FORWARD, "backward": BACKWARD}  # of measured passes


def measured_chart(found: Compared) -> Spec:
    """What was measured over what was predicted; 1 is as predicted."""
    values = [
        {"what": _named(row.what), "ratio": row.ratio, "predicted": row.predicted_text, "measured": row.measured_text}
        for row in found.rows
        if row.ratio is not None
    ]
    tooltip = [tooltip_of("what", "what"), tooltip_of("predicted", "predicted"), tooltip_of("measured", "measured")]
    spec = bars_of(values, "what", "ratio", "measured over predicted", tooltip)
    one = {"data": {"values": [{"ratio": 1.0}]}, "mark": {"type": "rule", "color": "#d55e00", "strokeWidth": 2}}
    bars = {"mark": spec.pop("mark"), "encoding": spec.pop("encoding")}
    return {**spec, "layer": [bars, {**one, "encoding": {"x": {"field": "ratio", "type": "quantitative"}}}]}


def _named(what: str) -> str:
    """As a row of a chart: what the table says beside it is left out."""
    name = what.partition(" (")[0].partition(",")[0].replace(" of pipeline rank ", ", rank ")
    return f"collectives{name[1:]}" if name.startswith(("  over ", "  of kind ")) else name.strip()


def measured_timeline_chart(made: StepTimeline, found: Compared) -> Spec | None:
    """Each pipeline rank twice, as predicted and as measured (its slowest rank); what it waited for lies over its passes. None where the
    run has no spans."""
    if not any(rank.spans for rank in found.ranks):
        return None
    step = max(1, -(-len(made.ranks) // (MOST_DRAWN // 2)))
    shown = list(zip(made.ranks, found.ranks, strict=False))[::step]
    each = max(8, MOST_BARS // (2 * len(shown)))
    unit, scale = unit_of(max(made.end_s, *(run.step_s for _, run in shown)))
    values: list[dict[str, Any]] = []
    for rank, run in shown:
        values += [
            _value(
                f"{rank.rank} predicted", bar.kind, bar.start_s, bar.end_s, f"micro-batch {bar.micro_batch}" if bar.micro_batch >= 0 else ""
            )
            for bar in rank.few_bars(each)
        ]  # fmt: skip
        values += list(_measured(f"{rank.rank} measured", run))[:each]
    for value in values:
        value |= {end: short(value[end] * scale) for end in ("start", "end")}
    kinds = list(dict.fromkeys(v["kind"] for v in values))
    own = iter([colour for colour in PALETTE if colour not in (COLOURS[FORWARD], COLOURS[BACKWARD])] * 4)
    colours = [COLOURS.get(kind) or next(own) for kind in kinds]
    return spec_of(
        values, height={"step": 20}, mark={"type": "bar", "stroke": "#00000055", "strokeWidth": 0.4},
        encoding=in_time(
            unit, kinds, colours, (("row", "rank"), ("kind", "what"), ("of", "of"), ("from", "from"), ("takes", "takes"))
        ),
    )  # fmt: skip


def _measured(row: str, run: RankRun) -> list[dict[str, Any]]:
    """Passes first, so that what they waited for is drawn over them."""
    spans = sorted(run.spans, key=lambda span: span.what not in KINDS)
    return [
        _value(
            row, KINDS.get(span.what) or f"waits over {axis_of(span.axis)}", span.start_s, span.end_s,
            f"rank {run.rank}" if span.what in KINDS else f"{span.what}, rank {run.rank}",
        )
        for span in spans
    ]  # fmt: skip


def _value(row: str, kind: str, start_s: float, end_s: float, of: str) -> dict[str, Any]:
    return {
        "row": row, "kind": kind, "start": start_s, "end": end_s, "of": of, "from": seconds_text(start_s),
        "takes": seconds_text(end_s - start_s),
    }  # fmt: skip
