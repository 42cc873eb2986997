"""What `autopar explain` says: about a plan, as it is found out; or in answer to questions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.explain import Study
    from autopar.planner import Plan
    from autopar.report.explanation import Explanation

__all__ = ["answered", "explanations", "tell", "whole"]

MORE = "-v: every table; --why MODULE, --why-not tp=8,pp=1, --what-if gpus=128: further questions"
ENDED = "ended by Ctrl-C: not everything that is tried beside the plan was tried"


def explanations(plan: Plan, study: Study | None, *, alternatives: bool) -> Iterator[Explanation]:
    """Of the plan alone, then with what would relieve its limits, then with the families of plans, each of which is planned. Ctrl-C
    leaves out what is not planned yet."""
    import msgspec

    from autopar.planner.answer import ended_by_user
    from autopar.report.explanation import explanation_of

    found = explanation_of(plan)
    if study is None or not alternatives or ended_by_user(plan):
        yield found
        return
    from autopar.explain.families import families_of
    from autopar.explain.reliefs import reliefs_of

    with _ended_by_user(study):  # from the first word on: nobody who reads it presses Ctrl-C in vain
        yield found
        yield (found := msgspec.structs.replace(found, reliefs=reliefs_of(study)))
        found = msgspec.structs.replace(found, families=families_of(study))
        yield msgspec.structs.replace(found, notes=[*found.notes, ENDED]) if study.stop() else found


def whole(plan: Plan, study: Study | None, *, alternatives: bool, verbose: bool) -> tuple[dict[str, Any], str]:
    """All about the plan, as JSON and as text."""
    from autopar.report.tables import tables_text
    from autopar.report.text import document, explanation_text

    *_, found = explanations(plan, study, alternatives=alternatives)
    text = explanation_text(found, "" if verbose else MORE)
    return document(plan, found), f"{text}\n\n{tables_text(plan)}" if verbose else text


def tell(plan: Plan, study: Study | None, *, alternatives: bool, verbose: bool) -> None:
    """The same text to standard output, each part as soon as it is known."""
    from autopar.report.tables import tables_text
    from autopar.report.text import families_text, first_text, last_text, reliefs_text, show

    said = [first_text, reliefs_text, families_text]
    for found in explanations(plan, study, alternatives=alternatives):
        text = said.pop(0)(found)
        if text:
            show(text if said else f"\n{text}", verdict=len(said) == 2)
    rest = [families_text(found)] if len(said) == 2 else []
    for text in (*rest, last_text(found, "" if verbose else MORE), tables_text(plan) if verbose else ""):
        if text:
            show(f"\n{text}", verdict=False)


def answered(plan: Plan, study: Study, questions: dict[str, list[str]]) -> tuple[dict[str, Any], str]:
    """What was asked, as JSON and as text."""
    import msgspec

    from autopar.explain.asking import answer_text, what_if, why_not
    from autopar.explain.why import why, why_text
    from autopar.report.explanation import explanation_of
    from autopar.report.text import document

    value = document(plan, explanation_of(plan))
    texts: list[str] = []
    with _ended_by_user(study):
        if questions["why"]:
            answers = [why(study, name) for name in questions["why"]]
            value["why"], texts = msgspec.to_builtins(answers), [*texts, *map(why_text, answers)]
        if questions["why_not"]:
            given = [why_not(study, text) for text in questions["why_not"]]
            value["why_not"] = msgspec.to_builtins(given)
            texts += [answer_text(x, name) for x, name in zip(given, questions["why_not"], strict=True)]
        if questions["what_if"]:
            one = what_if(study, questions["what_if"])
            value["what_if"], texts = msgspec.to_builtins(one), [*texts, answer_text(one, "then")]
    return value, "\n\n".join(texts)


@contextlib.contextmanager
def _ended_by_user(study: Study) -> Iterator[None]:
    """Inside, Ctrl-C ends the search of the moment with its best, and what would be tried after it."""
    from autopar.stopping import stopped_by_user

    with stopped_by_user() as study.stop:
        yield
