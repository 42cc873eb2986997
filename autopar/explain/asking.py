"""Why not, what if: the same model planned with something changed, beside the plan that is explained."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from autopar.explain.changes import pairs_of, parsed_pins, with_changes, with_pins
from autopar.explain.study import SHORT, Asked, Refused, Study
from autopar.report.columns import wrapped
from autopar.report.compare import Comparison, compare, comparison_text

__all__ = ["Answer", "answer_text", "what_if", "why_not"]


ALONE = "no plan fits the constraints:"  # which the verdict has said, where one reason follows


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """question: as it was asked; feasible: whether there is such a plan; verdict: the answer; remedy: where there is none, what is in
    its way and what would do, each tried; comparison: with the plan that is explained."""

    question: str
    feasible: bool
    verdict: str
    remedy: str = ""
    comparison: Comparison | None = None


def why_not(study: Study, text: str) -> Answer:
    """'tp=8,pp=1' -> the best plan with these pins, term by term beside the chosen one."""
    pins = parsed_pins(pairs_of([text], "--why-not"), "--why-not")
    return _answered(study, with_pins(study.asked, pins), text, f"why not {text}?")


def what_if(study: Study, texts: Sequence[str]) -> Answer:
    """['memory=40GiB', 'gpus=128'] -> the best plan under these changes."""
    asked, said = with_changes(study.asked, pairs_of(texts, "--what-if"))
    return _answered(study, asked, "then", f"what if: {'; '.join(said)}?")


def _answered(study: Study, asked: Asked, name: str, question: str) -> Answer:
    found = study.solve(asked)
    if isinstance(found, Refused):
        why = "it does not fit" if found.why.startswith(SHORT) else found.why  # by how much the remedy says, which looks further
        return Answer(question=question, feasible=False, verdict=f"there is no such plan: {why}", remedy=str(found.error))
    comparison = compare(study.plan, found, ("chosen", name))
    verdict = comparison.verdict
    if comparison.equal or not (comparison.changes or comparison.details):
        as_fast = abs(found.step_time_s - study.plan.step_time_s) <= 1e-6 * study.plan.step_time_s
        verdict = f"{name} is what was chosen" if as_fast else f"the same decisions are the best then; {verdict}"
    return Answer(question=question, feasible=True, verdict=verdict, comparison=comparison)


def answer_text(answer: Answer, name: str) -> str:
    lines = [wrapped(answer.question)]
    if answer.comparison is None:
        said = answer.verdict.partition(": ")[2]
        remedy = [line.removeprefix("no plan fits the constraints. ") for line in answer.remedy.splitlines()]
        if remedy[:2] == [ALONE, f"  - {said}"]:
            del remedy[:2]
        remedy = [line for line in remedy if line != said]
        return "\n".join([*lines, wrapped(answer.verdict), *(["", *map(_folded, remedy)] if remedy else [])])
    body = comparison_text(answer.comparison, ("chosen", name))
    return "\n".join([*lines, wrapped(answer.verdict), "", body.partition("\n\n")[2]])


def _folded(line: str) -> str:
    return wrapped(line, "    " if line.startswith("  -") else "")
