"""Why a module or an operator is split as it is: its strategy on each axis beside every other one that its rule allows.

Of each strategy: the operator's own computation, communication and memory beside its neighbours, and what the whole axis takes more if
the rest of the model is decided anew around it, by the integer program of the axis with this one choice fixed (planner.axis). Seconds are
of all that share the decision (the instances of a block), forward and backward, of one micro-batch; on the axis that divides the batch, of
the whole step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import msgspec

from autopar.axes import AXES, BATCH, axes_over
from autopar.catalog import strategies_of
from autopar.errors import Infeasible
from autopar.explain.study import Study
from autopar.explain.terms import Chosen, Terms, own_terms, reads_of, terms_of, timed
from autopar.ir import Op, Program, Strategy, refs
from autopar.planner.account import generic
from autopar.planner.axis import AxisProblem, AxisSolver, group_cost, objective_of, stated
from autopar.planner.choices import Group, is_heavy
from autopar.planner.lower import on_axes, on_inner_axes
from autopar.planner.shard import Assignment, view_of
from autopar.planner.solver import OutOfBudget
from autopar.planner.space import Form, Mesh
from autopar.planner.wishes import WishError
from autopar.report.columns import with_beneath, wrapped
from autopar.report.strategies import kind_of, shape_of, words_of
from autopar.report.units import bytes_text, seconds_text
from autopar.report.words import counted
from autopar.targets import did_you_mean

__all__ = ["Option", "Why", "WhyOperator", "why", "why_text"]

OPERATORS = 3  # of a module, the longest ones, that are shown in full
OPTIONS = 5  # strategies of one operator that are decided around, each by a program of the whole axis
NAMED = 8  # modules of a model, where a question names none
SAID = 0.01  # of a change: terms that are less are not said
TIE = 1e-3  # of the axis' seconds, within which its program is solved here
SOLVED = 5e-3  # of its objective, within which the search has solved it


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to split, by its best strategy. split: in words; layouts: as plans state it. compute_s, communication_s, memory_bytes: of the
    operator beside its neighbours as they are (explain.terms), None where it cannot stand there. change_s, and what it is made of: with the
    rest of the axis decided anew around it (None: not possible); forces: what else then changes."""

    split: str
    layouts: str
    compute_s: float | None
    communication_s: float | None
    memory_bytes: int | None
    change_s: float | None
    verdict: str
    change_compute_s: float = 0.0
    change_communication_s: float = 0.0
    change_memory_bytes: int = 0
    forces: str = ""


class WhyOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator on one axis. module, source: the user's; count: how many share the decision; reason: what its axis goes by; axis_s: what
    all operators of the axis take as it is."""

    axis: str
    n: int
    kind: str
    module: str
    source: str
    count: int
    reason: str
    axis_s: float
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
    elif absent := [axis.name for axis in axes_over("operators") if plan.mesh[axis.name] == 1 and plan.gpus % 2 == 0]:
        others = "; ".join([*([others] if others else []), f"this plan has no {absent[0]}: --why-not {absent[0]}=2 prices it"])
    return Why(question=f"why {name}?", matched=_listed(program, wanted), operators=found, others=others)


# ------------------------------------------------------------------------------------------------------------- the name
def _matched(program: Program, name: str) -> frozenset[str]:
    """The operators that a name means."""
    values = {p.value for p in program.params if name in (p.fqn, *p.aliases)}
    pattern = re.compile(re.escape(name).replace(r"\*", r"\d+") + r"(\.|$)")
    tests = (
        lambda op: bool(values & set(refs(op))),
        lambda op: bool(op.module) and pattern.match(op.module) is not None,
        lambda op: any(pattern.match(op.module[k + 1 :]) for k, c in enumerate(op.module) if c == "."),
        lambda op: name in (kind_of(op.name), op.target, op.target.removeprefix("aten.").partition(".")[0]),
        lambda op: op.name == name,
    )
    for test in tests:
        if found := frozenset(op.name for op in program.ops if test(op)):
            return found
    modules = {m for op in program.ops for m in (op.module, generic(op.module)) if m}
    known = [*modules, *(p.fqn for p in program.params), *(kind_of(op.name) for op in program.ops)]
    near = did_you_mean(name, known)
    if not near:  # the outermost modules that compute, as one would begin to look
        outer = list(dict.fromkeys(".".join(generic(op.module).split(".")[:3]) for op in program.ops if op.module))
        near = f"; it has {', '.join(outer[:NAMED])}" + (f" and {len(outer) - NAMED} more" if len(outer) > NAMED else "")
    raise WishError(f"--why {name}: there is no such module, parameter or operator in {program.name}{near}")


def _listed(program: Program, wanted: frozenset[str]) -> str:
    modules = list(dict.fromkeys(generic(op.module) for op in program.ops if op.name in wanted))
    shown = ", ".join(m or "the model's own forward" for m in modules[:4])
    return f"{counted(len(wanted), 'operator')} of {shown}" + (", ..." if len(modules) > 4 else "")


# ---------------------------------------------------------------------------------------------------------- on one axis
def _on_axis(study: Study, body: Program, assignment: Assignment, wanted: frozenset[str]) -> list[WhyOperator]:
    """Of the operators on one axis, those that take longest first."""
    axis, n = assignment.axis, assignment.n
    one = _OneAxis(study, body, assignment)
    problem, by_time = one.problem, timed(one.problem)
    groups = [g for g in problem.choices.groups.values() if g.op is not None and not wanted.isdisjoint(g.members)]
    ops = {op.name: op for op in body.ops}
    found: list[WhyOperator] = []
    for group in sorted(groups, key=lambda g: -group_cost(by_time, g, assignment.ops[g.members[0]])):
        chosen, op = assignment.ops[group.members[0]], ops[group.members[0]]
        if group_cost(by_time, group, chosen) <= 0 and found:
            continue
        full = len(found) < OPERATORS
        options = list(_options(one, group, chosen)) if full else []
        options += _unavailable(body, op, n, axis, group) if full else []
        module = generic(op.module) if len(group.members) > 1 else op.module
        found.append(
            WhyOperator(
                axis=axis, n=n, kind=kind_of(op.name), module=module, source=op.source, count=len(group.members),
                reason=one.reason, axis_s=one.base.seconds, options=options,
            )
        )  # fmt: skip
    return found


class _OneAxis:
    """An axis as it was decided: its program under what was asked of it, and what the plan has chosen."""

    def __init__(self, study: Study, body: Program, assignment: Assignment) -> None:
        plan, axis = study.plan, assignment.axis
        made = plan.axes[axis]
        self.form = Form(sequence=made.sequence_parallel, split=made.all_work, byte_s=made.kept_s_per_byte)
        self.pinned = plan.pins.get("sequence_parallel") is not None
        self.problem = study.store(study.asked).problem(axis, Mesh(**plan.mesh), body, self.form)
        self.reads = reads_of(self.problem)
        self.now = stated(self.problem, assignment)
        self.base = terms_of(self.problem, self.now, self.reads) or Terms()
        self.objective = objective_of(self.problem, self.now)
        self.solver = AxisSolver(self.problem)

    @functools.cached_property
    def never(self) -> dict[str, frozenset[Strategy]]:
        """Where all work is to be split: of what the plan splits the strategies that do not."""
        heavy = [(key, g) for key, g in self.problem.choices.groups.items() if g.op is not None and is_heavy(g.op.target)]
        split = [(key, g) for key, g in heavy if self.form.split and self.now(key).splits_work]
        return {key: frozenset(s for s in g.strategies if not s.splits_work) for key, g in split}

    @property
    def reason(self) -> str:
        """What the choice goes by, in words."""
        if AXES[self.problem.axis].work_first:
            return "splits as much work as can be, then saves communication"
        if self.form.sequence is not None:
            because = "is pinned" if self.pinned else "takes less memory"
            return f"is the fastest that was found with sequence_parallel={str(self.form.sequence).lower()}, which {because}"
        if self.form.byte_s:
            counts = seconds_text(self.form.byte_s * 2**30)
            return f"is the best that was found where memory is short: a GiB that is kept counts as {counts}"
        return "is the fastest that was found" + (" of those that split all work that can be" if self.form.split else "")

    def around(self, group: Group, s: Strategy) -> Around | None:
        """What the axis takes more with this strategy and the rest decided anew; None if there is no such assignment."""
        never = {key: without for key, without in self.never.items() if key != group.key}
        try:
            solution = self.solver.solve(gap=TIE, given=(group.key, s), never=never)
        except (Infeasible, OutOfBudget):
            return None
        after = stated(self.problem, solution.assignment)
        terms = terms_of(self.problem, after, self.reads)
        if terms is None:
            return None
        others = [key for key, g in self.problem.choices.groups.items() if g.op is not None and key != group.key]
        changed = [key for key in others if str(after(key)) != str(self.now(key))]
        more = objective_of(self.problem, after) / self.objective - 1 if self.objective else 0.0
        return Around(change=terms - self.base, dearer=more, forces=_forced(self.problem, changed, self.now, after))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """dearer: by which share of the axis' objective, which has also what parameters, memory and the issuing of operators cost."""

    change: Terms
    dearer: float
    forces: str


def _options(one: _OneAxis, group: Group, chosen: Strategy) -> Iterator[Option]:
    """The chosen strategy first, then the others by what they do to the step."""
    problem, axis, now = one.problem, one.problem.axis, one.now
    here = own_terms(problem, group, chosen, now, one.reads) or Terms()
    yield Option(
        split=_words(axis, group, chosen), layouts=str(chosen), compute_s=here.compute_s, communication_s=here.communication_s,
        memory_bytes=here.memory_bytes, change_s=0.0, verdict="chosen",
    )  # fmt: skip
    found: list[Option] = []
    alone = {s: own_terms(problem, group, s, now, one.reads) for s in group.strategies if s != chosen}
    cheapest = sorted(alone, key=lambda s: math.inf if (own := alone[s]) is None else own.seconds)
    for s in _various(axis, group, cheapest)[:OPTIONS]:
        own, around = alone[s], one.around(group, s)
        more = Terms() if around is None else around.change
        option = Option(
            split=_words(axis, group, s), layouts=str(s), compute_s=None if own is None else own.compute_s,
            communication_s=None if own is None else own.communication_s, memory_bytes=None if own is None else own.memory_bytes,
            change_s=None if around is None else more.seconds, change_compute_s=more.compute_s,
            change_communication_s=more.communication_s, change_memory_bytes=more.memory_bytes,
            forces="" if around is None else around.forces,
            verdict=_verdict(one, None if own is None else own.seconds - here.seconds, around, chosen.splits_work and not s.splits_work),
        )  # fmt: skip
        found.append(option)
    best: dict[str, Option] = {}  # of those that split alike
    for option in sorted(found, key=lambda x: (x.change_s is None, x.change_s or 0.0)):
        alike = option.split == _words(axis, group, chosen)
        named = msgspec.structs.replace(option, split=f"{option.split}; laid otherwise") if alike else option
        best.setdefault(named.split, named)
    yield from best.values()


def _various(axis: str, group: Group, strategies: Sequence[Strategy]) -> list[Strategy]:
    """One of each way to split first, then a second of each, and so on."""
    ways: dict[str, list[Strategy]] = {}
    for s in strategies:
        ways.setdefault(_words(axis, group, s), []).append(s)
    return [s for row in itertools.zip_longest(*ways.values()) for s in row if s is not None]


def _named(group: Group) -> str:
    """'linear of down_proj'."""
    module = (group.op.module if group.op is not None else "").rpartition(".")[2]
    return kind_of(group.key) + (f" of {module}" if module and not module.isdecimal() else "")


def _words(axis: str, group: Group, s: Strategy) -> str:
    return words_of(axis, kind_of(group.key), s, shape_of(s, group.ins, group.outs))


def _verdict(one: _OneAxis, here_s: float | None, around: Around | None, less: bool) -> str:
    """here_s: what the operator takes more beside its neighbours as they are; less: it splits less work."""
    if around is None:
        asked = "" if one.form.sequence is None else f" with sequence_parallel={str(one.form.sequence).lower()}"
        return f"unavailable{asked}: what is beside it cannot be laid so"
    change_s, least_s = around.change.seconds, TIE * one.base.seconds
    if change_s < -least_s:
        return _saves(one, around, less)
    if abs(change_s) <= least_s:
        return "a tie"
    if here_s is not None and here_s < -least_s:
        return "cheaper here, dearer elsewhere"
    return "dearer here" if here_s is None or here_s > least_s else "dearer elsewhere"


def _saves(one: _OneAxis, around: Around, less: bool) -> str:
    """Why a strategy is not chosen though operators and communication would take less with it."""
    work_first = AXES[one.problem.axis].work_first
    if less and (work_first or one.form.split):
        return "less communication, but every rank does the whole work"
    if work_first:
        return "faster by this axis alone; another axis or memory decided"
    if around.dearer < -SOLVED:
        return "faster by itself; memory, stages or a pin decided"
    if around.dearer <= TIE:
        return f"a tie: an axis is decided to within {SOLVED:.1%} of what it costs"
    if one.form.byte_s and around.change.memory_bytes > 0:
        return "faster, but keeps more, and memory is short"
    return "faster in its operators, dearer in parameters, memory or the issuing of operators"


def _forced(problem: AxisProblem, changed: Sequence[str], now: Chosen, after: Chosen) -> str:
    """What else changes, in words: the two that take longest of those that are split otherwise, and how many more; then those whose split
    goes by the same words. Operators that take no time follow the others, and are not said."""
    own = timed(problem)
    seconds = {key: max(group_cost(own, problem.choices.groups[key], s) for s in (now(key), after(key))) for key in changed}
    groups = [problem.choices.groups[key] for key in sorted(changed, key=lambda key: -seconds[key]) if seconds[key] > 0]
    words = {g.key: [_words(problem.axis, g, chosen(g.key)) for chosen in (now, after)] for g in groups}
    other = [g for g in groups if len(set(words[g.key])) > 1]
    listed = list(dict.fromkeys(f"{_named(g)} {_be(words[g.key][1])}" for g in other))
    said = [", ".join(listed[:2])] if listed else []
    said += [f"{len(listed) - 2} more"] if len(listed) > 2 else []
    alike = len(groups) - len(other)
    laid = [f"{counted(alike, 'further operator' if other else 'operator')} to be laid otherwise"] if alike else []
    return ", and ".join([*([" and ".join(said)] if said else []), *laid])


def _be(split: str) -> str:
    return "not to be split" if split.startswith("not split") else f"to be split by {split}"


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
            words = _words(axis, group, s)
            why_ = f"unavailable: {min(sizes)} does not divide into {n} parts"
            found.setdefault(
                words,
                Option(
                    split=words, layouts=str(s), compute_s=None, communication_s=None, memory_bytes=None, change_s=None, verdict=why_
                ),
            )  # fmt: skip
    return list(found.values())


# ----------------------------------------------------------------------------------------------------------------- text
def why_text(answer: Why) -> str:
    parts = [wrapped(f"{answer.question} {answer.matched}")]
    for x in answer.operators:
        chosen = x.options[0] if x.options else None
        heading = f"{x.kind} of {x.module or 'the model'}" + (f" ({x.count} alike)" if x.count > 1 else "")
        heading += f", over {x.axis} {x.n}: {_by(chosen.split) if chosen else ''}"
        goes = f"    over {x.axis} alone all operators take {seconds_text(x.axis_s)}; what is chosen {x.reason}"
        lines = [wrapped(heading), wrapped(goes, "      ")] + ([wrapped(x.source.strip(), "      ", "    ")] if x.source else [])
        rows = [
            (
                o.split.replace(SUM, "") + (" (chosen)" if o is chosen else ""), _amount(o.compute_s), _amount(o.communication_s),
                _bytes(o.memory_bytes), _change(o),
            )
            for o in x.options
        ]  # fmt: skip
        said = ["" if o is chosen else _said(o) for o in x.options]
        parts.append("\n".join([*lines, with_beneath(("split", "compute", "comm.", "memory", "in all"), rows, said)]))
    if answer.operators:
        parts.append(wrapped(LEGEND))
    if answer.others:
        parts.append(answer.others)
    return "\n\n".join(parts)


SUM = " (a sum over ranks)"  # which communication says
LEGEND = (
    "compute, comm., memory: of all alike on one rank, forward and backward of one micro-batch (over dp: of the step), beside what is "
    "around them; communication as if nothing hid it. in all, and the differences beneath: what the operators of the whole model take "
    "more, with the rest decided anew around this choice"
)


def _by(split: str) -> str:
    return split if split.startswith("not split") else f"split by {split}"


def _amount(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)


def _bytes(amount: int | None) -> str:
    return "-" if amount is None else bytes_text(amount)


def _said(option: Option) -> str:
    """The verdict, what the change is made of, and what it forces."""
    parts = [option.verdict]
    if option.change_s:
        terms = (("compute", option.change_compute_s, seconds_text), ("communication", option.change_communication_s, seconds_text),
                 ("memory", float(option.change_memory_bytes), bytes_text))  # fmt: skip
        least = {"memory": 2.0**20}
        said = [
            f"{name} {'+' if amount > 0 else '-'}{text(abs(amount))}" for name, amount, text in terms
            if abs(amount) >= least.get(name, SAID * abs(option.change_s))
        ]  # fmt: skip
        parts += [", ".join(said)] if said else []
    parts += [f"forces {option.forces}"] if option.forces else []
    return "; ".join(parts)


def _change(option: Option) -> str:
    if option.change_s is None or not option.change_s:
        return "-"
    return f"+{seconds_text(option.change_s)}" if option.change_s > 0 else f"-{seconds_text(-option.change_s)}"
