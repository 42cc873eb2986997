"""Among plans that the predictions cannot tell apart, the simplest.

    difference   seconds of one plan beyond those of another, by what they depend on (interval.seconds_by_kind): common terms cancel
    uncertainty  of the difference: each kind's, by the spread of its constant and of the account, taken to be independent
    tie          the difference is within its uncertainty (80%), and within REACH of the step
    simplest     fewest axes, then the lowest ZeRO stage, no recompute, fewest micro-batches

A plan that is slower in everything is no tie, however little slower: its difference is as certain as its sign. (Where a profile has
measured each kind of collective for itself, their errors are not common.) What the search had priced when it found the fastest plan is
looked through, the simplest first, as far as the budgets here reach. The bound of a search, its gap and its objective are of the fastest
plan; the plan says what simplicity costs beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from autopar.axes import BATCH
from autopar.planner.candidate import Candidate, Draft
from autopar.planner.interval import INSIDE, links_of, seconds_by_kind, spread_of_kind
from autopar.planner.space import Choice, Form
from cost_models.cluster import Cluster
from cost_models.uncertainty import ACCOUNT, CENTRAL

__all__ = ["ORDER", "REACH", "Tie", "Waiting", "difference_spread_s", "simplest"]

ORDER = "fewest axes, lowest ZeRO stage, no recompute, fewest micro-batches"
REACH = 0.03  # of the fastest step: what is slower by more is never called as good
DRAFTS = 24  # choices whose stages are cut to see whether they tie
EXACT = 2  # choices that are priced as they will run

Simplicity = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tie:
    """chosen: simpler than the fastest, and not known to be slower. spread_s: the standard deviation of their difference."""

    fastest: Candidate
    chosen: Candidate
    spread_s: float

    @property
    def difference_s(self) -> float:
        return self.chosen.step_time_s - self.fastest.step_time_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A choice that the search left behind. exact: as it will run, if that is known. draft: of a limit in seconds, its stages if a step of
    them may be faster; price: as it will run, None if it does not fit."""

    choice: Choice
    least_s: float
    exact: Candidate | None
    draft: Callable[[float], object]
    price: Callable[[], Candidate | None]


def difference_spread_s(a: Candidate | Draft, b: Candidate | Draft, cluster: Cluster) -> float:
    """The standard deviation of how much longer a step of one takes than one of the other."""
    one, other = _terms(a, cluster), _terms(b, cluster)
    return math.hypot(*(
        (one.get(term, 0.0) - other.get(term, 0.0)) * math.hypot(ACCOUNT, spread_of_kind(term[0], cluster))
        for term in {**one, **other}
    ))  # fmt: skip


def _terms(c: Candidate | Draft, cluster: Cluster) -> dict[tuple[str, str], float]:
    """Seconds of a step by what they depend on, and by which collectives, where the kinds of these were measured each for itself:
    all-reduces and what parameters in parts take have no error in common then."""
    e, links = c.estimator, links_of(c.estimator, BATCH)
    found = {(kind, ""): s for kind, s in seconds_by_kind(c).items()}
    if (cluster.intra if links == INSIDE else cluster.inter).slower and (sync_s := e.times(c.part).sync_s) > 0:
        found[links, ""] -= sync_s
        found[links, "whole" if e.rest.gathered == "never" else "in parts"] = sync_s
    return found


def simplest(fastest: Candidate, waiting: Iterable[Waiting], cluster: Cluster) -> Tie | None:
    """The simplest of what ties with the fastest, None if that is the fastest itself."""
    limit_s, mine = fastest.step_time_s * (1 + REACH), _simplicity(fastest)
    able = [w for w in waiting if w.least_s <= limit_s and _least_simple(w.choice) < mine]
    able.sort(key=lambda w: (_least_simple(w.choice), w.least_s, w.choice.simplicity))
    drafts, priced = DRAFTS, EXACT
    tried = set[Choice]()  # whose fastest form was priced
    for _, group in groupby(able, key=lambda w: _least_simple(w.choice)[:2]):
        ties: list[Tie] = []
        for w in group:
            found = w.exact
            if found is None:
                if not drafts or not priced:
                    break
                formless = dataclasses.replace(w.choice, form=Form())
                if formless in tried:
                    continue
                drafts -= 1
                draft = w.draft(limit_s)
                if not isinstance(draft, Draft) or draft.times.step_s > limit_s or not _ties(draft, draft.times.step_s, fastest, cluster):
                    continue
                priced -= 1
                tried.add(formless)
                found = w.price()
            if found is None or found.step_time_s > limit_s or _simplicity(found) >= mine:
                continue
            if _ties(found, found.step_time_s, fastest, cluster):
                ties.append(Tie(fastest=fastest, chosen=found, spread_s=difference_spread_s(found, fastest, cluster)))
        if ties:
            return min(ties, key=lambda t: (_simplicity(t.chosen), t.chosen.step_time_s))
    return None


def _ties(one: Candidate | Draft, step_s: float, fastest: Candidate, cluster: Cluster) -> bool:
    return step_s - fastest.step_time_s <= CENTRAL * difference_spread_s(one, fastest, cluster)


def _simplicity(c: Candidate) -> Simplicity:
    return _axes(c.mesh.sizes()), c.rest.zero, int(bool(c.part.recomputed)), c.rank.micro_batches


def _least_simple(choice: Choice) -> Simplicity:
    """At best: nothing of it may have to run again."""
    return _axes(choice.mesh.sizes()), choice.rest.zero, 0, choice.micro_batches


def _axes(mesh: dict[str, int]) -> int:
    return sum(n > 1 for n in mesh.values())
