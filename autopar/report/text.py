"""An explanation as text, on one screen of 100 columns: the verdict first, then what it is made of. `tables_text` has every figure.

On a terminal headings and bars are coloured (rich); in a pipe the same text is plain.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from autopar.planner.account import LAUNCHES
from autopar.planner.plan import Plan
from autopar.report.columns import bar, last_cut, last_wrapped, listed, pairs, wrapped
from autopar.report.explanation import HOWS, AxisView, BlockView, Explanation, Family, OperatorView, Relief, StageView, explanation_of
from autopar.report.strategies import operator_of, splits_of, without_a_name
from autopar.report.tables import tables_text
from autopar.report.units import in_one_unit, in_own_unit, seconds_text, table
from autopar.report.words import counted, few, share_text

__all__ = [
    "document", "explanation_text", "families_text", "first_text", "last_text", "plan_json", "plan_text", "reliefs_text", "show",
    "short_text",
]  # fmt: skip

BAR, NARROW = 20, 12
NAME = 22  # letters of a module's
ROWS = 4  # of what may be long: what matters most; tables_text has all
STAGES = LIMITS = 3
RELIEFS, OTHER = 3, 3  # changes that are shown; parts of a plan that differ from now, where more are said as the whole plan
TELLING = 0.05  # by how much faster a change makes a plan that is shown behind two others
NONE = {"replicated": ("not split", "no rule"), "probed": ("probed",), "refused": ("refused",), "padded": ("padded",)}
COMMUNICATION = "communication"  # kinds of time that begin so are over an axis
PACE = "issuing operators (the pace of the host)"


def plan_text(plan: Plan, *, verbose: bool = False) -> str:
    """A plan on one screen; verbose: and every table."""
    text = explanation_text(explanation_of(plan))
    return f"{text}\n\n{tables_text(plan)}" if verbose else text


def short_text(plan: Plan) -> str:
    """What `print(plan)` shows: the verdict, and where the rest is."""
    return wrapped(explanation_of(plan).verdict) + "\n(autopar explain, or a notebook, shows what it is made of)"


def explanation_text(e: Explanation, more: str = "") -> str:
    """Sections without content are left out. more: what can be asked further."""
    first = "\n".join(filter(None, (first_text(e), reliefs_text(e))))
    return "\n\n".join(text for text in (first, families_text(e), last_text(e, more)) if text)


def first_text(e: Explanation) -> str:
    """What the plan alone says, the verdict first."""
    groups = ("\n".join(filter(None, (section(e) for section in group))) for group in SECTIONS)
    return "\n\n".join(text for text in (wrapped(e.verdict), *groups) if text)


def last_text(e: Explanation, more: str = "") -> str:
    """Counts of operators to know about, where figures come from, what else is to be said, and what can be asked further."""
    lines = [("operators", _operators(e)), ("figures", _sources(e)), *(("note", note) for note in e.notes)]
    return pairs([*lines, *([("more", more)] if more else [])], indent="")


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, with the derived figures that scripts ask for under the names of the Plan's properties."""
    fields: dict[str, Any] = msgspec.to_builtins(plan)
    shapes = plan.account.shapes if plan.account else {}
    strategies = [asdict(split) for axis, made in plan.axes.items() if made.n > 1 for split in splits_of(axis, made, shapes)]
    derived = {"memory_bytes": plan.memory_bytes, "tokens_or_samples_per_s": plan.tokens_or_samples_per_s, "strategies": strategies}
    return fields | derived


def document(plan: Plan, e: Explanation) -> dict[str, Any]:
    """`explain --format json`: the plan with its derived figures, and the explanation (report.explanation) under `explanation`."""
    return {**plan_json(plan), "schema": e.schema, "explanation": msgspec.to_builtins(e)}


def show(text: str, *, verdict: bool = True) -> None:
    """Print: on a terminal with headings and bars in colour. verdict: whether the first paragraph is one."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for line in text.splitlines():
        verdict = verdict and bool(line)
        shown = Text(line)
        if verdict or (line and not line.startswith(" ")):
            shown.stylize("bold", 0, None if verdict else len(re.split(r"\s{2,}", line)[0]))
        shown.highlight_regex(r"#+(?=[ .]*\d|\.)", "cyan")
        console.print(shown)


# -------------------------------------------------------------------------------------------------------------- sections
def _layout(e: Explanation) -> str:
    """The mesh, which ranks share a node, and what else was chosen."""
    lines = [(f"{x.name} {x.size}", f"{x.title} {x.place or 'inside the node'}: {_group(x.size, x.every)}") for x in _several(e)]
    if e.nodes > 1:
        per_node, left = -(-e.gpus // e.nodes), e.gpus % e.nodes
        of = f"{e.gpus} {e.gpu} on {counted(e.nodes, 'node')}" if left else f"{counted(e.nodes, 'node')} of {per_node} {e.gpu}"
        lines.append(("nodes", of if left else f"ranks 0-{per_node - 1} share a node, and so on: {of}"))
    chosen = {choice.name: choice.value for choice in e.choices if choice.value.partition(":")[0] != "none"}  # which the verdict says
    if "schedule" in chosen:
        chosen["micro-batches"] += f"; schedule {chosen.pop('schedule')}"
    return pairs([*lines, *chosen.items()], indent="")


def _several(e: Explanation) -> list[AxisView]:
    return [x for x in reversed(e.axes) if x.size > 1]


def _group(size: int, every: int) -> str:
    """The first of an axis' groups of ranks."""
    if every == 1:
        return f"ranks 0-{size - 1}"
    shown = [str(k * every) for k in range(size if size <= 4 else 3)]
    return f"ranks {', '.join(shown)}" + (f", ... {(size - 1) * every}" if size > 4 else "") + ", and so on"


def _blocks(e: Explanation) -> str:
    """Those that take longest one by one, the others together."""
    shown = sorted(range(len(e.blocks)), key=lambda k: -_seconds(e.blocks[k]))
    shown = sorted(shown if len(shown) <= ROWS else shown[: ROWS - 1])
    again = any(block.recompute != "none" for block in e.blocks)
    rows = [
        (
            _shortened(block.name) + (f" x{block.count}" if block.count > 1 else ""), *((block.recompute,) if again else ()),
            *_took(block.forward_s, block.backward_s + block.again_s, block.communication_s, block.kept_bytes), _split(block),
        )
        for block in (e.blocks[k] for k in shown)
    ]  # fmt: skip
    if others := [block for k, block in enumerate(e.blocks) if k not in shown]:
        each = [(b.count, (b.forward_s, b.backward_s + b.again_s, b.communication_s, b.kept_bytes)) for b in others]
        total = _took(*(sum(n * all_of[k] for n, all_of in each) for k in range(4)))
        rows.append((f"{len(others)} others, in all", *(("",) if again else ()), *total, ""))
    headings = ("blocks (a micro-batch)", *(("recompute",) if again else ()), "forward", "backward", "comm.", "kept", "split")
    return last_wrapped(headings, rows, ruled=False) if rows else ""


def _took(forward_s: float, backward_s: float, communication_s: float, kept_bytes: float) -> list[str]:
    return [seconds_text(forward_s), seconds_text(backward_s), *(seconds_text(s) if s else "-" for s in (communication_s,)),
            " ".join(in_own_unit(kept_bytes)) if kept_bytes else "-"]  # fmt: skip


def _seconds(block: BlockView) -> float:
    return block.count * (block.forward_s + block.backward_s + block.again_s)


def _shortened(name: str) -> str:
    """Of a path the end, of several the beginning."""
    if len(name) <= NAME:
        return name
    return name[: NAME - 3] + "..." if " " in name else "..." + name[3 - NAME :]


def _split(block: BlockView) -> str:
    said = {axis: [w if without_a_name(w) else w.partition(" (")[0] for w in words] for axis, words in block.splits.items()}
    return "; ".join(f"{axis}: {few(words, 3)}" for axis, words in said.items()) or "nothing"


def _memory(e: Explanation) -> str:
    limit = e.summary.memory_limit_bytes or max(stage.memory_bytes for stage in e.stages)
    stages = sorted(e.stages, key=lambda s: -s.memory_bytes)[:STAGES]
    rows = []
    for s in sorted(stages, key=lambda s: s.rank):
        rank = (counted_names("stage", s.stages),) if len(e.stages) > 1 else ()
        used = " ".join(in_own_unit(s.memory_bytes))
        rows.append((*rank, bar(s.memory_bytes / limit, NARROW if rank else BAR), used, share_text(s.memory_bytes / limit), _terms(s)))
    which = f"; the {STAGES} fullest of {len(e.stages)} stages" if len(e.stages) > STAGES else ""
    (low, high), unit = in_one_unit(*e.summary.memory_interval_bytes)
    interval = f"{'the fullest: ' if len(rows) > 1 else ''}80% interval {low}-{high} {unit}"
    heading = f"memory of a GPU, of {' '.join(in_own_unit(limit))} ({interval}){which}"
    return heading + "\n" + last_wrapped(("",) * len(rows[0]), rows, ruled=False)


def counted_names(noun: str, numbers: Sequence[int]) -> str:
    """'stage 3', 'stages 0, 4'."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _terms(stage: StageView) -> str:
    """The largest, in one unit."""
    most = sorted(((name, n) for name, n in stage.memory.items() if n), key=lambda item: -item[1])[:3]
    texts, unit = in_one_unit(*(n for _, n in most)) if most else ([], "")
    return ", ".join(f"{name} {text}" for (name, _), text in zip(most, texts, strict=True)) + f" {unit}"


def _time(e: Explanation) -> str:
    """In three columns, each downwards."""
    parts = [part for part in e.time if part.share >= 5e-4]
    cells = [(part.kind.replace(COMMUNICATION, "comm."), seconds_text(part.seconds), share_text(part.share)) for part in parts]
    each = -(-len(cells) // 3)
    columns = [cells[k : k + each] for k in range(0, len(cells), each)] if cells else []
    rows = [[*itertools.chain(*row)] for row in itertools.zip_longest(*columns, fillvalue=("",) * 3)]
    exposed = " (comm.: communication that nothing hides)" if any(part.kind.startswith(COMMUNICATION) for part in parts) else ""
    heading = f"time of a step, {seconds_text(e.summary.step_time_s)}{exposed}"
    return heading + (f"\n{table(('',) * 3 * len(columns), rows, ruled=False)}" if rows else "")


def _limits(e: Explanation) -> str:
    """The first few each on its own, of the others what they are."""
    lines = [limit.text for limit in e.limits[:LIMITS]]
    if others := [f"{limit.kind} ({share_text(limit.share)})" for limit in e.limits[LIMITS:]]:
        lines.append(f"less: {', '.join(others)}")
    return listed("what limits it", lines)


SECTIONS: tuple[tuple[Callable[[Explanation], str], ...], ...] = ((_layout,), (_blocks,), (_memory, _time), (_limits,))


def reliefs_text(e: Explanation) -> str:
    telling = [x for k, x in enumerate(e.reliefs[:RELIEFS]) if k < 2 or (x.speedup or 0.0) >= 1 + TELLING]
    rows = [_relief(x, e.plan) for x in telling]
    return last_cut(("what would relieve it", "a step", "", "the best plan then"), rows) if rows else ""


def _relief(x: Relief, now: str) -> tuple[str, ...]:
    if x.step_time_s is None or x.speedup is None:
        return (x.change, "-", "-", x.why)
    gain = x.speedup - 1
    slower = f"{share_text(1 / x.speedup - 1)} slower{x.per}" if 1 - x.speedup > 0.01 else "as fast"
    said = f"{share_text(gain)} faster{x.per}" if gain >= 5e-4 else slower
    return (x.change, seconds_text(x.step_time_s), said, _other(x.plan, now))


def _other(plan: str, now: str) -> str:
    """The words of a plan (choice_words), or, where it is almost that of now, what is other in it."""
    parts, before = plan.split(", "), now.split(", ")
    added, left = [part for part in parts if part not in before], [part for part in before if part not in parts]
    if not now or len(added) + len(left) > OTHER or len(added) == len(parts):
        return plan
    without = [part for part in left if not any(_noun(part) == _noun(new) for new in added)]
    return ", ".join(["as now", *([f"but {', '.join(added)}"] if added else []), *(f"without {part}" for part in without)])


def _noun(part: str) -> str:
    """What a part of a plan's words is about: 'ZeRO' of 'ZeRO-3' and of 'no ZeRO', 'micro' of '2 micro-batches'."""
    found = re.match(r"(?:no |[\d,]+ )?([A-Za-z]*)", part)
    return found[1] if found else part


def families_text(e: Explanation) -> str:
    if not e.families:
        return "" if not e.considered else listed("also considered", e.considered)
    rows = [_family(x, e.summary.step_time_s) for x in e.families]
    return last_cut(("families of plans", "a step", "", "memory", "the best of each"), rows)


def _family(x: Family, chosen_s: float) -> tuple[str, ...]:
    if x.step_time_s is None or x.memory_bytes is None:
        return (x.name, "-", "-", "-", x.why)
    more = x.step_time_s / chosen_s - 1 if chosen_s else 0.0
    said = "chosen" if x.chosen else "the same" if abs(more) < 5e-4 else f"+{share_text(more)}" if more > 0 else f"-{share_text(-more)}"
    said = f"x {more + 1:,.0f}" if more >= 10 else said
    return (x.name, seconds_text(x.step_time_s), said, " ".join(in_own_unit(x.memory_bytes)), x.plan)


def _operators(e: Explanation) -> str:
    """How many an axis leaves whole, what it cannot split, what has no rule: '-v' lists them."""
    said = []
    for how, words in HOWS.items():
        own = [x for x in e.operators if x.how == how]
        for axis in dict.fromkeys(x.axis for x in own):
            over = [x for x in own if x.axis == axis]
            where = f" over {axis}" if axis in {x.name for x in e.axes} else ""
            share = sum(x.share for x in over)
            of_step = f", {share_text(share)} of a step" if share else ""
            why = f" ({over[0].why})" if how == "refused" and not share else ""  # else it is among the limits, or takes no time
            said.append(f"{words}{where}: {_kinds(over)}{of_step}{why}")
    none = [word for word, hows in NONE.items() if not any(x.how in hows for x in e.operators)]
    return "; ".join([*said, f"none {', '.join(none[:-1])}{' or ' if none[1:] else ''}{none[-1]}"])


def _kinds(operators: Sequence[OperatorView]) -> str:
    """'49 (add, layer_norm)'."""
    names = list(dict.fromkeys(operator_of(x.kind) for x in sorted(operators, key=lambda x: -x.seconds)))
    return f"{sum(x.count for x in operators)} ({few(names, 3)})"


def _sources(e: Explanation) -> str:
    most = [(kind, s) for kind, s in e.depends_on.items() if s >= 0.01 * e.summary.step_time_s > 0][:3]
    depends = ", ".join(f"{PACE if kind == LAUNCHES else kind} {share_text(s / e.summary.step_time_s)}" for kind, s in most)
    return e.figures_are + (f"; the step depends on {depends}" if depends else "")
