"""Why a module or an operator is split as it is: its strategy on each axis beside every other one that its rule allows.

Of each strategy: the operator's own seconds and bytes, and what it does to the step if the rest of the model is decided anew around it,
by the integer program of the axis with this one choice fixed (planner.axis). Seconds are of all that share the decision (the instances of
a block), forward and backward, of one micro-batch; on the axis that divides the batch, of the whole step.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import msgspec

from autopar.axes import AXES, BATCH
from autopar.catalog import strategies_of
from autopar.errors import Infeasible
from autopar.explain.study import Study
from autopar.ir import Op, Program, Strategy, refs
from autopar.measure import Pricer
from autopar.planner.account import generic
from autopar.planner.axis import AxisProblem, group_cost, objective_of, solve_axis
from autopar.planner.choices import Group
from autopar.planner.lower import on_axes, on_inner_axes
from autopar.planner.problems import axis_leaves, axis_problem
from autopar.planner.shard import Assignment, view_of
from autopar.planner.solver import INFINITY, OutOfBudget
from autopar.planner.wishes import WishError
from autopar.report.strategies import kind_of, words_of
from autopar.report.text import last_wrapped, wrapped
from autopar.report.units import bytes_text, seconds_text
from autopar.targets import did_you_mean

__all__ = ["Option", "Why", "WhyOperator", "why", "why_text"]

OPERATORS = 3  # of a module, the longest ones, that are shown in full
OPTIONS = 8  # strategies of one operator that are decided around
TIE = 1e-3  # of the axis' seconds, within which its program is solved


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to split, by its best strategy. split: in words; layouts: as plans state it. own_s: the operator's own work; kept_bytes: for
    backward; change_s: with the rest decided anew (None: not possible); forces: what else then changes."""

    split: str
    layouts: str
    own_s: float
    kept_bytes: int
    change_s: float | None
    verdict: str
    forces: str = ""


class WhyOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator on one axis. module, source: the user's; count: how many share the decision; reason: what its axis goes by."""

    axis: str
    n: int
    kind: str
    module: str
    source: str
    count: int
    reason: str
    options: list[Option]


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """matched: modules and parameters that the question names; others: operators beside those shown."""

    question: str
    matched: str
    operators: list[WhyOperator]
    others: str = ""


def why(study: Study, name: str) -> Why:
    """name: a module path ('model.layers.3.mlp', or with * for any instance), a parameter, an operator. WishError where there is none."""
    program, plan = study.program, study.plan
    wanted = _matched(program, name)
    over = on_axes(program, plan)
    bodies = on_inner_axes(over.moments.body, over.inner[:-1]) if over.inner else ()
    laid = [(program, over.data)] if over.data is not None else []
    laid += list(zip(bodies, over.inner, strict=False))
    found: list[WhyOperator] = []
    beside: list[str] = []
    for body, assignment in laid:
        explained = _on_axis(study, body, assignment, wanted)
        found += explained[:OPERATORS]
        beside += [f"{x.kind} over {x.axis}" for x in explained[OPERATORS:]]
    others = f"{len(beside)} more operators are in it; name one of its modules" if beside else ""
    if not laid:
        others = "no axis has several ranks: every operator runs whole"
    return Why(question=f"why {name}?", matched=_listed(program, wanted), operators=found, others=others)


# ------------------------------------------------------------------------------------------------------------- the name
def _matched(program: Program, name: str) -> frozenset[str]:
    """The operators that a name means."""
    values = {p.value for p in program.params if name in (p.fqn, *p.aliases)}
    pattern = re.compile(re.escape(name).replace(r"\*", r"\d+") + r"(\.|$)")
    tests = (
        lambda op: bool(values & set(refs(op))),
        lambda op: op.name == name,
        lambda op: bool(op.module) and pattern.match(op.module) is not None,
        lambda op: any(pattern.match(op.module[k + 1 :]) for k, c in enumerate(op.module) if c == "."),
        lambda op: name in (kind_of(op.name), op.target, op.target.removeprefix("aten.").partition(".")[0]),
    )
    for test in tests:
        if found := frozenset(op.name for op in program.ops if test(op)):
            return found
    modules = {m for op in program.ops for m in (op.module, generic(op.module)) if m}
    known = [*modules, *(p.fqn for p in program.params), *(kind_of(op.name) for op in program.ops)]
    raise WishError(f"--why {name}: there is no such module, parameter or operator in {program.name}{did_you_mean(name, known)}")


def _listed(program: Program, wanted: frozenset[str]) -> str:
    modules = list(dict.fromkeys(generic(op.module) for op in program.ops if op.name in wanted))
    shown = ", ".join(m or "the model's own forward" for m in modules[:4])
    return f"{len(wanted)} operators of {shown}" + (", ..." if len(modules) > 4 else "")


# ---------------------------------------------------------------------------------------------------------- on one axis
def _on_axis(study: Study, body: Program, assignment: Assignment, wanted: frozenset[str]) -> list[WhyOperator]:
    """Of the operators on one axis, those that take longest first."""
    axis, n = assignment.axis, assignment.n
    pricer = Pricer(study.asked.cluster, study.plan.mesh)
    problem = axis_problem(body, axis, n, pricer, study.asked.optimizer, axis_leaves(body, axis))
    timed = dataclasses.replace(problem, work_first=False, state_price_s_per_byte=0.0)
    groups = [g for g in problem.choices.groups.values() if g.op is not None and not wanted.isdisjoint(g.members)]
    ops = {op.name: op for op in body.ops}
    found: list[WhyOperator] = []
    for group in sorted(groups, key=lambda g: -group_cost(timed, g, assignment.ops[g.members[0]])):
        chosen, op = assignment.ops[group.members[0]], ops[group.members[0]]
        if group_cost(timed, group, chosen) <= 0 and found:
            continue
        full = len(found) < OPERATORS
        options = list(_options(problem, timed, group, assignment, chosen)) if full else []
        options += _unavailable(body, op, n, axis, group) if full else []
        reason = "splits as much work as can be, then saves communication" if AXES[axis].work_first else "is the fastest that was found"
        module = generic(op.module) if len(group.members) > 1 else op.module
        found.append(
            WhyOperator(
                axis=axis, n=n, kind=kind_of(op.name), module=module, source=op.source, count=len(group.members), reason=reason,
                options=options,
            )
        )  # fmt: skip
    return found


def _options(problem: AxisProblem, timed: AxisProblem, group: Group, assignment: Assignment, chosen: Strategy) -> Iterator[Option]:
    """The chosen strategy first, then the others by what they do to the step."""
    axis, kind = problem.axis, kind_of(group.key)
    base = _objective(problem, assignment)
    own_s = group_cost(timed, group, chosen)
    yield Option(
        split=words_of(axis, kind, chosen), layouts=str(chosen), own_s=own_s, kept_bytes=_kept(problem, group, chosen), change_s=0.0,
        verdict="chosen",
    )  # fmt: skip
    found: list[Option] = []
    for s in [s for s in group.strategies if s != chosen][:OPTIONS]:
        change_s, forces = _around(problem, group, s, assignment, base)
        here = group_cost(timed, group, s) - own_s
        option = Option(
            split=words_of(axis, kind, s), layouts=str(s), own_s=own_s + here, kept_bytes=_kept(problem, group, s),
            change_s=None if change_s is None or problem.work_first else change_s, forces=forces,
            verdict=_verdict(problem, here, change_s, base),
        )  # fmt: skip
        found.append(option)
    best: dict[str, Option] = {}  # of those that split alike
    for option in sorted(found, key=lambda x: (x.change_s is None, x.change_s or 0.0)):
        best.setdefault(option.split, option)
    yield from best.values()


def _verdict(problem: AxisProblem, here: float, change_s: float | None, base: float) -> str:
    """here: what the operator's own work takes more; change_s: the whole."""
    if change_s is None:
        return "unavailable: what is beside it cannot be laid so"
    if abs(change_s) <= TIE * base * 1e-6:
        return "a tie"
    if problem.work_first:
        return "splits less work" if change_s > 0 else "splits as much work; another axis or memory decided"
    if change_s < 0:
        return "faster by itself; memory, stages or a pin decided otherwise"
    if here < -1e-9:
        return "cheaper here, dearer elsewhere"
    return "dearer here" if here > 1e-9 else "dearer elsewhere"


def _objective(problem: AxisProblem, assignment: Assignment) -> float:
    """Of the plan's own assignment, in microseconds."""

    def chosen(key: str) -> Strategy:
        member = problem.choices.groups[key].members[0]
        if member in assignment.ops:
            return assignment.ops[member]
        return Strategy(inputs=(), outputs=(assignment.leaves[member],))

    return objective_of(problem, chosen)


def _around(problem: AxisProblem, group: Group, s: Strategy, assignment: Assignment, base: float) -> tuple[float | None, str]:
    """Seconds that the axis takes more with this strategy and the rest decided anew, and what else changes then."""
    groups = {**problem.choices.groups, group.key: dataclasses.replace(group, strategies=(s,))}
    fixed = dataclasses.replace(problem, choices=dataclasses.replace(problem.choices, groups=groups))
    try:
        solution = solve_axis(fixed, gap=TIE)
    except (Infeasible, OutOfBudget):
        return None, ""
    objective = _objective(problem, solution.assignment)
    if objective == INFINITY or base == INFINITY:
        return None, ""
    others = {k: g for k, g in problem.choices.groups.items() if g.op is not None and k != group.key}
    changed = [k for k, g in others.items() if _differs(g, solution.assignment, assignment)]
    return (objective - base) * 1e-6, "" if problem.work_first else _forced(problem, changed, solution.assignment)


def _differs(group: Group, a: Assignment, b: Assignment) -> bool:
    member = group.members[0]
    return str(a.ops[member]) != str(b.ops[member])


def _forced(problem: AxisProblem, changed: list[str], after: Assignment) -> str:
    heavy = sorted(changed, key=lambda k: -group_cost(problem, problem.choices.groups[k], after.ops[problem.choices.groups[k].members[0]]))
    said = [f"{kind_of(k)} to {words_of(problem.axis, kind_of(k), after.ops[problem.choices.groups[k].members[0]])}" for k in heavy[:2]]
    return ", ".join(said) + (f" and {len(changed) - 2} more" if len(changed) > 2 else "")


def _kept(problem: AxisProblem, group: Group, s: Strategy) -> int:
    """Bytes that the operator keeps for backward on a rank, of one of those that share the decision."""
    counts = group.counts
    if counts is None:
        return 0
    parts = [t.nbytes // (problem.n if x.is_shard else 1) for t, x in zip((*group.ins, *group.outs), (*s.inputs, *s.outputs), strict=True)]
    kept = [parts[k] for k in counts.saved_inputs] + [parts[len(group.ins) + k] for k in counts.saved_outputs]
    return sum(kept) + counts.saved_other_bytes // (problem.n if s.splits_work else 1)


def _unavailable(body: Program, op: Op, n: int, axis: str, group: Group) -> list[Option]:
    """What two ranks could split and n cannot."""
    if n == 2 or axis == BATCH:
        return []
    found: dict[str, Option] = {}
    for s in strategies_of(view_of(body, op, 2)):
        if s in group.strategies or not s.splits_work:
            continue
        pairs = [*zip(s.inputs, group.ins, strict=True), *zip(s.outputs, group.outs, strict=True)]
        sizes = [t.shape[x.dim] // x.groups for x, t in pairs if x.is_shard and not x.divides(t.shape, n)]
        if sizes:
            words = words_of(axis, kind_of(op.name), s)
            why_ = f"unavailable: {min(sizes)} does not divide into {n} parts"
            found.setdefault(words, Option(split=words, layouts=str(s), own_s=0.0, kept_bytes=0, change_s=None, verdict=why_))
    return list(found.values())


# ----------------------------------------------------------------------------------------------------------------- text
def why_text(answer: Why) -> str:
    parts = [wrapped(f"{answer.question} {answer.matched}")]
    for x in answer.operators:
        chosen = x.options[0] if x.options else None
        heading = f"{x.kind} of {x.module or 'the model'}" + (f" ({x.count} alike)" if x.count > 1 else "")
        heading += f" over {x.axis} {x.n}: {chosen.split if chosen else ''}; its axis {x.reason}"
        lines = [wrapped(heading)] + ([wrapped(x.source.strip(), "      ", "    ")] if x.source else [])
        rows = [
            (
                o.split, o.layouts, seconds_text(o.own_s) if o.own_s else "-", bytes_text(o.kept_bytes) if o.kept_bytes else "-",
                _change(o), o.verdict + (f"; forces {o.forces}" if o.forces and o.verdict != "chosen" else ""),
            )
            for o in x.options
        ]  # fmt: skip
        parts.append("\n".join(lines) + "\n" + last_wrapped(("split", "layouts", "own", "kept", "step", "why"), rows))
    if answer.others:
        parts.append(answer.others)
    return "\n\n".join(parts)


def _change(option: Option) -> str:
    if option.change_s is None or not option.change_s:
        return "-"
    return f"+{seconds_text(option.change_s)}" if option.change_s > 0 else f"-{seconds_text(-option.change_s)}"
