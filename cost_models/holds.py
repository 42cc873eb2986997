"""What a rank holds in memory while the passes of a pipelined step run, from the order of its actions (actions.py) and its exchanges."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cost_models.actions import Action, Pass
from cost_models.exchanges import posted
from cost_models.numbered import Numbered

__all__ = ["OnRank", "Situation", "situations"]


class Situation(NamedTuple):
    """What a rank holds while one of its passes runs, by the stages that it holds, in their order. stage: the index among these. held: the
    micro-batches that keep activations for backward, the one of this pass not counted. reduced: whether a backward pass has left
    gradients of the parameters. last: no backward pass of this stage comes after it; done: of the other stages, whether that is so of
    those that ran. after: the pass that comes next."""

    stage: int
    pass_: Pass
    held: tuple[int, ...]
    reduced: tuple[bool, ...]
    last: bool
    done: tuple[bool, ...]
    after: tuple[int, Pass] | None = None

    def covers(self, other: Situation) -> bool:
        """Whether nothing of the other, which is of the same pass, is more."""
        pairs = ((self.held, other.held), (self.reduced, other.reduced), (self.done, other.done))
        return all(all(map(operator.ge, a, b)) for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRank:
    """stages: those that a rank holds, in order. situations: those that no other one of them covers, and that do not lie between two;
    before: the same with each pass that may come next.
    waiting: by stage, the most micro-batches whose activations, and whose gradients, have arrived before they are used. follows: passes
    (index of a stage, 'F' or 'B') that come one after the other."""

    stages: tuple[int, ...]
    situations: tuple[Situation, ...]
    before: tuple[Situation, ...]
    waiting: tuple[tuple[int, int], ...]
    follows: tuple[tuple[tuple[int, Pass], tuple[int, Pass]], ...] = ()


def situations(ranks: Sequence[Sequence[Action]]) -> tuple[OnRank, ...]:
    """What each rank holds."""
    steps = Numbered(ranks)
    return tuple(_on_rank(r, steps, own) for r, own in enumerate(posted(steps)))


def _on_rank(rank: int, steps: Numbered, exchanged: Sequence[tuple[list[int], list[int]]]) -> OnRank:
    of, actions = steps.of, [steps.actions[k] for k in steps.ranks[rank]]
    stages = [s for s, r in enumerate(of) if r == rank]
    index = {s: k for k, s in enumerate(stages)}
    frees: Pass = "W" if any(a.pass_ == "W" for a in actions) else "B"
    left = [sum(a.stage == s and a.pass_ == frees for a in actions) for s in stages]
    held, reduced = [0] * len(stages), [False] * len(stages)
    waiting, most = [[0, 0] for _ in stages], [[0, 0] for _ in stages]
    found: dict[tuple[int, Pass, bool], list[Situation]] = {}
    passes = [(index[a.stage], a.pass_) for a in actions]
    following = [*passes[1:], None]
    for number, action, (_, receives), after in zip(steps.ranks[rank], actions, exchanged, following):
        k, backward = index[action.stage], action.pass_ == "B"
        for m in receives:
            message = steps.actions[m]
            forward = message.pass_ == "F"
            waiting[index[message.stage + 1 if forward else message.stage - 1]][not forward] += 1
        if steps.message[number] >= 0:
            waiting[k][backward] -= 1
        if receives:
            most = [[max(a, b) for a, b in zip(x, y)] for x, y in zip(waiting, most)]
        if action.pass_ == frees:
            held[k] -= 1
            left[k] -= 1
        last = action.pass_ == frees and left[k] == 0
        done = tuple(j != k and n == 0 for j, n in enumerate(left))
        found.setdefault((k, action.pass_, last), []).append(Situation(k, action.pass_, tuple(held), tuple(reduced), last, done, after))
        held[k] += action.pass_ == "F"
        reduced[k] |= action.pass_ == frees
    by_next = ([x for x in every if x.after == after] for every in found.values() for after in dict.fromkeys(x.after for x in every))
    return OnRank(
        stages=tuple(stages),
        situations=tuple(x for every in found.values() for x in _most([x._replace(after=None) for x in every])),
        before=tuple(x for alike in by_next for x in _most(alike)),
        waiting=tuple((f, b) for f, b in most),
        follows=tuple(dict.fromkeys(zip(passes, passes[1:]))),
    )


def _most(every: Sequence[Situation]) -> list[Situation]:
    """Those of one kind of pass that no other one covers."""
    kept: list[Situation] = []
    for one in sorted(_corners(list(dict.fromkeys(every))), key=lambda x: (-sum(x.held), -sum(x.reduced))):
        if not any(other.covers(one) for other in kept):
            kept.append(one)
    return kept


def _corners(every: Sequence[Situation]) -> list[Situation]:
    """Those that do not lie halfway between the one before and the one behind, in the order in which they come: of a straight line, as a
    steady state is, its ends. What a rank holds is linear in the micro-batches of its stages, so that one of the ends holds most."""
    kept = []
    for k, now in enumerate(every):
        if 0 < k < len(every) - 1:
            before, behind = every[k - 1], every[k + 1]
            same = before.reduced == now.reduced == behind.reduced and before.done == now.done == behind.done
            if same and all(a + b == 2 * n for a, b, n in zip(before.held, behind.held, now.held)):
                continue
        kept.append(now)
    return kept
