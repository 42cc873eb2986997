"""An explanation as text, on one screen of 100 columns: the verdict first, then what it is made of. `tables_text` has every figure.

On a terminal headings and bars are coloured (rich); in a pipe the same text is plain.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from autopar.planner.plan import Plan
from autopar.report.explanation import BlockView, Explanation, Family, Relief, StageView, explanation_of
from autopar.report.strategies import splits_of
from autopar.report.tables import tables_text
from autopar.report.units import bytes_text, seconds_text, table
from autopar.report.words import counted, share_text

__all__ = ["WIDTH", "document", "explanation_text", "plan_json", "plan_text", "show", "short_text"]

WIDTH = 100
BAR = 24
NAME = 22  # letters of a module's
STAGES = 8  # that have a bar of their own, where there are more: the fullest


def plan_text(plan: Plan, *, verbose: bool = False) -> str:
    """A plan on one screen; verbose: and every table."""
    text = explanation_text(explanation_of(plan))
    return f"{text}\n\n{tables_text(plan)}" if verbose else text


def short_text(plan: Plan) -> str:
    """What `print(plan)` shows: the verdict, and where the rest is."""
    return wrapped(explanation_of(plan).verdict) + "\n(autopar explain, or a notebook, shows what it is made of)"


def explanation_text(e: Explanation) -> str:
    """Sections without content are left out."""
    sections = (_mesh, _chosen, _blocks, _memory, _time, _limits, _reliefs, _families, _operators, _sources, _notes)
    return "\n\n".join([wrapped(e.verdict), *(text for section in sections if (text := section(e)))])


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, with the derived figures that scripts ask for under the names of the Plan's properties."""
    fields: dict[str, Any] = msgspec.to_builtins(plan)
    strategies = [asdict(split) for axis, made in plan.axes.items() if made.n > 1 for split in splits_of(axis, made)]
    derived = {"memory_bytes": plan.memory_bytes, "tokens_or_samples_per_s": plan.tokens_or_samples_per_s, "strategies": strategies}
    return fields | derived


def document(plan: Plan, e: Explanation) -> dict[str, Any]:
    """`explain --format json`: the plan with its derived figures, and the explanation (report.explanation) under `explanation`."""
    return {**plan_json(plan), "schema": e.schema, "explanation": msgspec.to_builtins(e)}


def show(text: str) -> None:
    """Print: on a terminal with headings and bars in colour."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for k, line in enumerate(text.splitlines()):
        shown = Text(line)
        if k and line and not line.startswith(" "):
            shown.stylize("bold")
        shown.highlight_regex(r"#+(?=[ .]*\d|\.)", "cyan")
        console.print(shown)


# -------------------------------------------------------------------------------------------------------------- sections
def _mesh(e: Explanation) -> str:
    axes = [x for x in e.axes if x.size > 1]
    if not axes:
        return ""
    rows = [(f"{x.name} {x.size}", x.title, x.place or "inside the node", _group(x.size, x.every)) for x in reversed(axes)]
    per_node = -(-e.gpus // e.nodes)
    nodes = f"ranks 0-{per_node - 1} share a node, and so on: {counted(e.nodes, 'node')} of {per_node} {e.gpu}" if e.nodes > 1 else ""
    return "mesh\n" + table(("axis", "", "where", "one of its groups"), rows) + (f"\n  {nodes}" if nodes else "")


def _group(size: int, every: int) -> str:
    if every == 1:
        return f"ranks 0-{size - 1}"
    shown = [str(k * every) for k in range(min(size, 3))]
    return f"ranks {', '.join(shown)}" + (f", ... {(size - 1) * every}" if size > 3 else "")


def _chosen(e: Explanation) -> str:
    return "chosen\n" + pairs([(choice.name, choice.value) for choice in e.choices])


def _blocks(e: Explanation) -> str:
    rows = [
        (
            _shortened(block), block.count, block.recompute, seconds_text(block.forward_s), seconds_text(block.backward_s + block.again_s),
            seconds_text(block.communication_s) if block.communication_s else "-",
            bytes_text(block.kept_bytes) if block.kept_bytes else "-", _split(block),
        )
        for block in e.blocks
    ]  # fmt: skip
    if not rows:
        return ""
    headings = ("modules", "count", "recompute", "forward", "backward", "comm.", "kept", "split")
    return "blocks (each: one rank, one micro-batch)\n" + last_wrapped(headings, rows)


def _shortened(block: BlockView) -> str:
    return block.name if len(block.name) <= NAME else block.name[: NAME - 3] + "..."


def _split(block: BlockView) -> str:
    said = [
        f"{axis}: {words[0].partition(' (')[0]}" + (f" +{len(words) - 1}" if len(words) > 1 else "") for axis, words in block.splits.items()
    ]
    return "; ".join(said) or "nothing"


def _memory(e: Explanation) -> str:
    limit = e.summary.memory_limit_bytes or max(stage.memory_bytes for stage in e.stages)
    stages = sorted(e.stages, key=lambda s: -s.memory_bytes)[:STAGES] if len(e.stages) > STAGES else e.stages
    several = len(e.stages) > 1
    rows = [
        (
            *((s.rank,) if several else ()), bar(s.memory_bytes / limit), bytes_text(s.memory_bytes), share_text(s.memory_bytes / limit),
            _terms(s),
        )
        for s in sorted(stages, key=lambda s: s.rank)
    ]  # fmt: skip
    low, high = e.summary.memory_interval_bytes
    which = f" (the {STAGES} fullest of {len(e.stages)} pipeline ranks)" if len(e.stages) > STAGES else ""
    heading = f"memory of a GPU{which or (' by pipeline rank' if several else '')}, of {bytes_text(limit)}; 80% interval of the fullest: "
    heading += f"{bytes_text(low)} to {bytes_text(high)}"
    return heading + "\n" + last_wrapped((*(("rank",) if several else ()), "", "", "", "most of it"), rows)


def _terms(stage: StageView) -> str:
    most = sorted(((name, n) for name, n in stage.memory.items() if n), key=lambda item: -item[1])
    return ", ".join(f"{name} {bytes_text(n)}" for name, n in most[:3])


def _time(e: Explanation) -> str:
    rows = [(part.kind, bar(part.share), seconds_text(part.seconds), share_text(part.share)) for part in e.time if part.share >= 5e-4]
    low, high = e.summary.step_interval_s
    heading = f"time of a step, {seconds_text(e.summary.step_time_s)}"
    heading += f"; 80% interval: {seconds_text(low)} to {seconds_text(high)}" if low < high else ""
    return heading + "\n" + table(("spent on", "", "", ""), rows)


def _limits(e: Explanation) -> str:
    return listed("what limits it", [limit.text for limit in e.limits])


def _reliefs(e: Explanation) -> str:
    if not e.reliefs:
        return ""
    return "what would relieve it (each was planned)\n" + last_wrapped(("change", "a step", "", "plan"), [_relief(x) for x in e.reliefs])


def _relief(x: Relief) -> tuple[str, ...]:
    if x.step_time_s is None or x.speedup is None:
        return (x.change, "-", "-", x.why)
    gain = x.speedup - 1
    slower = f"{share_text(1 / x.speedup - 1)} slower{x.per}" if 1 - x.speedup > 0.01 else "no faster"
    said = f"{share_text(gain)} faster{x.per}" if gain >= 5e-4 else slower
    return (x.change, seconds_text(x.step_time_s), said, x.plan)


def _families(e: Explanation) -> str:
    if not e.families:
        return "" if not e.considered else listed("also considered", e.considered)
    return "families of plans, each at its best\n" + last_wrapped(
        ("family", "a step", "", "memory", "plan"), [_family(x, e.summary.step_time_s) for x in e.families]
    )


def _family(x: Family, chosen_s: float) -> tuple[str, ...]:
    if x.step_time_s is None or x.memory_bytes is None:
        return (x.name, "-", "refused", "-", x.why)
    more = x.step_time_s / chosen_s - 1 if chosen_s else 0.0
    said = "chosen" if x.chosen else "the same" if abs(more) < 5e-4 else f"+{share_text(more)}" if more > 0 else f"-{share_text(-more)}"
    return (x.name, seconds_text(x.step_time_s), said, bytes_text(x.memory_bytes), x.plan)


def _operators(e: Explanation) -> str:
    step = e.summary.step_time_s or 1.0
    axes = dict.fromkeys(x.axis for x in e.operators)
    lines = []
    for axis in axes:
        own = sorted((x for x in e.operators if x.axis == axis), key=lambda x: -x.seconds)
        kinds = ", ".join(f"{x.kind.removeprefix('aten.').partition('.')[0]} x{x.count}" for x in own[:6])
        more = f", ... (+{len(own) - 6} kinds)" if len(own) > 6 else ""
        micro_batches = next((int(c.value.split()[0]) for c in e.choices if c.name == "micro-batches"), 1)
        share = share_text(sum(x.seconds for x in own) * micro_batches / step)
        lines.append(f"not split over {axis}, {share} of the step on every one of its ranks: {kinds}{more}")
    return listed("operators to know about", lines)


def _sources(e: Explanation) -> str:
    most = [(kind, s) for kind, s in e.depends_on.items() if s >= 0.01 * e.summary.step_time_s][:5]
    depends = ", ".join(f"{kind} {share_text(s / e.summary.step_time_s)}" for kind, s in most) if e.summary.step_time_s else ""
    lines = [("figures are", e.figures_are), *([("the step depends on", depends)] if depends else [])]
    return "where figures come from\n" + pairs(lines)


def _notes(e: Explanation) -> str:
    return listed("notes", e.notes)


# --------------------------------------------------------------------------------------------------------------- layout
def wrapped(text: str, indent: str = "", first: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def listed(heading: str, lines: Sequence[str]) -> str:
    return "\n".join([heading, *(wrapped(line, "    ", "  - ") for line in lines)]) if lines else ""


def pairs(lines: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join(wrapped(text, " " * (width + 4), f"  {name:<{width}}  ") for name, text in lines)


def last_wrapped(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table whose last column is broken into lines."""
    cells = [[str(cell) for cell in row] for row in rows]
    left = max(15, WIDTH - 2 - sum(max(len(h), *(len(row[i]) for row in cells)) + 2 for i, h in enumerate(headings[:-1])))
    broken = []
    for row in cells:
        lines = textwrap.wrap(row[-1], left, break_long_words=False, break_on_hyphens=False) or [""]
        broken += [[*row[:-1], lines[0]], *([*[""] * (len(row) - 1), line] for line in lines[1:])]
    return table(headings, broken)


def bar(share: float) -> str:
    """'######..........': a share of a whole."""
    full = min(BAR, max(1 if share > 0 else 0, round(share * BAR)))
    return "#" * full + "." * (BAR - full)

