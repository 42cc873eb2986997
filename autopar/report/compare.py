"""Two plans side by side: what changed in words, then what it costs term by term, then every detail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from autopar.axes import AXES, BATCH, LAYERS
from autopar.planner.account import generic
from autopar.planner.plan import Plan, parse_strategy
from autopar.planner.words import axis_words
from autopar.report.columns import last_wrapped, wrapped
from autopar.report.explanation import StageView, TimePart, cut_short, explanation_of, summary_of, time_of
from autopar.report.strategies import kind_of, words_of
from autopar.report.units import bytes_text, count_text, seconds_text, table
from autopar.report.words import counted, ranges, share_text
from cost_models.rests import rest_of

__all__ = ["Change", "Comparison", "Term", "compare", "comparison_text", "verdict_of_change"]

SAME = 5e-4  # of a step: what differs by less is as fast
TELLING = 0.25  # of a difference: the terms that are named
MOST = 12  # groups of operators that are listed
OTHERWISE = ", laid otherwise"  # what is split by the same words
HALF = 38  # letters of a value in a table of two plans


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that differs: 'mesh', 'dp 64', 'dp 8, tp 8'."""

    what: str
    first: str
    second: str


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One term of the step, in seconds, or of the memory of the fullest pipeline rank, in bytes."""

    kind: str
    first: float
    second: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """equal: the plans are the same in everything but the seconds that planning took. details: operators that are split otherwise. notes:
    which of the two is of a search that was ended before its end."""

    equal: bool
    verdict: str
    changes: list[Change]
    time: list[Term]
    memory: list[Term]
    details: list[Change]
    notes: list[str] = []


def compare(first: Plan, second: Plan, names: tuple[str, str]) -> Comparison:
    a, b = (msgspec.structs.replace(plan, planning_s={}, searched={}) for plan in (first, second))
    changes = _changes(first, second)
    return Comparison(
        equal=a == b,
        verdict=f"{names[0]} and {names[1]} are the same plan" if a == b else verdict_of_change(first, second, names),
        changes=changes,
        time=_time(time_of(first), time_of(second)),
        memory=_memory(_fullest(first), _fullest(second)),
        details=_details(first, second),
        notes=[f"{name}: {said}" for name, plan in zip(names, (first, second), strict=True) if (said := cut_short(plan))],
    )


def verdict_of_change(first: Plan, second: Plan, names: tuple[str, str]) -> str:
    """How the second compares with the first, in one sentence."""
    a, b = first.step_time_s, second.step_time_s
    costs = f"{names[1]}: {seconds_text(b)} a step"
    if (first.global_batch, first.gpus) != (second.global_batch, second.gpus):
        rates = [plan.tokens_or_samples_per_s / plan.gpus for plan in (first, second)]
        more = rates[1] / rates[0] - 1 if rates[0] else 0.0
        said = f"{share_text(abs(more))} {'more' if more > 0 else 'less'}" if abs(more) >= SAME else "the same"
        speed = f"{count_text(rates[1])} {second.samples_unit}/s on each GPU, where it was {count_text(rates[0])}"
        return f"{costs} ({names[0]}: {seconds_text(a)}), {speed}, {said}"
    if not a or not b or abs(a / b - 1) < SAME:
        return f"{costs}, as {names[0]}"
    said = f"{share_text(a / b - 1)} faster" if a > b else f"{share_text(b / a - 1)} slower"
    return f"{costs}, {said} than {names[0]} ({seconds_text(a)}){_mostly(_time(time_of(first), time_of(second)), b - a)}"


def _mostly(terms: list[Term], difference_s: float) -> str:
    """Of what most of the difference is made: '; mostly +11.9 ms of communication over tp', and what is saved against that."""
    large = [t for t in terms if abs(t.second - t.first) >= TELLING * abs(difference_s)]
    more, less = ([t for t in large if (t.second - t.first) * difference_s * sign > 0][:2] for sign in (1, -1))
    said = [" and ".join(f"{_signed(t.second - t.first, seconds_text)} of {t.kind}" for t in side) for side in (more, less) if side]
    return f"; mostly {', against '.join(said)}" if more else ""


# -------------------------------------------------------------------------------------------------------------- choices
def _changes(first: Plan, second: Plan) -> list[Change]:
    """Decisions that differ, the question first."""
    facts = [_facts(plan) for plan in (first, second)]
    return [
        Change(what=what, first=facts[0].get(what, "-"), second=facts[1].get(what, "-"))
        for what in dict.fromkeys([*facts[0], *facts[1]])
        if facts[0].get(what) != facts[1].get(what)
    ]


def _facts(plan: Plan) -> dict[str, str]:
    found = explanation_of(plan)
    asked = {
        "model": plan.model, "GPUs": f"{plan.gpus} of {plan.cluster}", "memory of a GPU": bytes_text(plan.memory_limit_bytes),
        "batch": counted(plan.global_batch, "sample"), "optimizer": plan.optimizer, "precision": plan.precision,
    }  # fmt: skip
    mesh = ", ".join(axis_words(axis, n) for axis, n in reversed(list(plan.mesh.items())) if n > 1) or "one GPU"
    chosen = {choice.name: choice.value for choice in found.choices if choice.name != "pinned"}
    if "sharding" in chosen:
        chosen["sharding"] = rest_of(plan.rest).short + (f" of {plan.shard}" if 1 < plan.shard < plan.mesh[BATCH] else "")
    stages = "; ".join(f"{ranges(s.blocks) or 'no blocks'}" for s in plan.stages) if plan.mesh[LAYERS] > 1 else "one"
    return {**asked, "mesh": mesh, **chosen, "stages": stages}


# ---------------------------------------------------------------------------------------------------------------- costs
def _time(first: list[TimePart], second: list[TimePart]) -> list[Term]:
    """By what differs most."""
    a, b = ({part.kind: part.seconds for part in parts} for parts in (first, second))
    terms = [Term(kind=kind, first=a.get(kind, 0.0), second=b.get(kind, 0.0)) for kind in dict.fromkeys([*a, *b])]
    return sorted(terms, key=lambda term: -abs(term.second - term.first))


def _memory(first: StageView, second: StageView) -> list[Term]:
    terms = [Term(kind=kind, first=first.memory[kind], second=second.memory[kind]) for kind in first.memory]
    return sorted(terms, key=lambda term: -abs(term.second - term.first))


def _fullest(plan: Plan) -> StageView:
    return explanation_of(plan).stages[summary_of(plan).fullest]


# -------------------------------------------------------------------------------------------------------------- details
def _details(first: Plan, second: Plan) -> list[Change]:
    """Operators and parameters that lie otherwise on an axis that both plans have, instances of a block together."""
    groups: Counter[tuple[str, str, str]] = Counter()
    for axis in AXES:
        a, b = first.axes.get(axis), second.axes.get(axis)
        if a is None or b is None or 1 in (a.n, b.n):
            continue
        for op, text in a.ops.items():
            if op in b.ops and b.ops[op] != text:
                module = _module(first, op)
                shape = next((x.account.shapes[op] for x in (first, second) if x.account and op in x.account.shapes), ())
                said = [words_of(axis, kind_of(op), parse_strategy(x), shape) for x in (text, b.ops[op])]
                if said[0] == said[1]:
                    said[1] += OTHERWISE
                groups[f"{kind_of(op)} of {module or 'the model'} over {axis}", said[0], said[1]] += 1
    otherwise_last = sorted(groups.items(), key=lambda group: (group[0][2].endswith(OTHERWISE), -group[1]))
    return [Change(what=what + (f" x{n}" if n > 1 else ""), first=x, second=y) for (what, x, y), n in otherwise_last]


def _module(plan: Plan, op: str) -> str:
    """The operator's module, with '*' for the number of a repeated block."""
    module = plan.account.modules.get(op, "") if plan.account else ""
    for block in plan.account.blocks if plan.account else ():
        for path in ", ".join(block.paths).split(", ") if block.repeated else ():
            if module == path or module.startswith(f"{path}."):
                return generic(path) + module[len(path) :]
    return module


# ----------------------------------------------------------------------------------------------------------------- text
def comparison_text(found: Comparison, names: tuple[str, str], *, most: int = MOST) -> str:
    if found.equal:
        return wrapped(found.verdict)
    parts = [wrapped(found.verdict)]
    if found.notes:
        parts.append("\n".join(map(wrapped, found.notes)))
    if found.changes:
        parts.append("what changed\n" + _changed(found.changes, names))
    elif not found.details:
        parts.append("every decision is the same; only figures differ")
    parts.append("seconds of a step\n" + _terms_text(found.time, names, seconds_text))
    parts.append("memory of the fullest pipeline rank\n" + _terms_text(found.memory, names, bytes_text))
    if found.details:
        rows = [(c.what, f"{c.first} -> {c.second}") for c in found.details[:most]]
        more = f"\n  ... and {len(found.details) - most} more" if len(found.details) > most else ""
        parts.append("operators that are split otherwise\n" + last_wrapped(("", " -> ".join(names)), rows) + more)
    return "\n\n".join(parts)


def _changed(changes: list[Change], names: tuple[str, str]) -> str:
    """As a table, of what fits into one; the others, such as the stages of a long pipeline, each on lines of its own."""
    short = [c for c in changes if max(len(c.first), len(c.second)) <= HALF]
    long = [wrapped(f"{c.what}: {c.first} -> {c.second}", "    ", "  ") for c in changes if c not in short]
    return "\n".join([*([table(("", *names), [(c.what, c.first, c.second) for c in short])] if short else []), *long])


def _terms_text(terms: list[Term], names: tuple[str, str], text: Any) -> str:
    shown = [term for term in terms if term.first or term.second]
    if all(t.first == t.second for t in shown):
        return f"  {text(sum(t.first for t in shown))} in both"
    rows = [(t.kind, text(t.first), text(t.second), _signed(t.second - t.first, text)) for t in shown]
    totals = [sum(t.first for t in shown), sum(t.second for t in shown)]
    rows.append(("all", text(totals[0]), text(totals[1]), _signed(totals[1] - totals[0], text)))
    return table(("", *names, "difference"), rows)


def _signed(amount: float, text: Any) -> str:
    return "0" if not amount else f"+{text(amount)}" if amount > 0 else f"-{text(-amount)}"
