"""Run -> predicted step time and memory, by the planner itself with every knob pinned; identical captures are shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from msgspec import structs

from autopar.capture import capture
from autopar.ir import Program
from autopar.measure import Pricer
from autopar.planner import Pins
from autopar.planner.candidate import Candidate
from autopar.planner.estimate import Times
from autopar.planner.interval import seconds_by_kind, spread_of
from autopar.planner.price import Ledger
from autopar.planner.search import Search
from benchmarks._cnns import Cnn
from benchmarks._decoders import Decoder
from benchmarks._runs import Run, Skip, model_of
from cost_models import Cluster
from cost_models.recipe import Recipe
from cost_models.uncertainty import interval

__all__ = ["ANY_MEMORY", "Figures", "Prediction", "predictions", "repriced", "search_of"]

CAPTURED = 64  # programs that are kept: a table has rows of a model on one kind of GPU after those on another
ANY_MEMORY = 2**50  # rows that ran are priced even where they would not fit by our account


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What is predicted of one run. memory_bytes: of the fullest stage, or of the first where the source states that, without the
    framework's own;
    step_interval_s, memory_interval_bytes: of 80%; spread: of the step."""

    run: Run
    step_time_s: float
    memory_bytes: float
    fullest_bytes: float
    fullest_interval_bytes: tuple[float, float]
    step_interval_s: tuple[float, float]
    memory_interval_bytes: tuple[float, float]
    spread: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction(Figures):
    """With the plan that it is of."""

    candidate: Candidate


def predictions(runs: Iterable[Run]) -> Iterator[tuple[Run, Prediction | Skip]]:
    """The prediction of each run, or why there is none; runs of one captured program one after the other."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.key, run.optimizer), []).append(run)
    for group in groups.values():
        try:
            search = search_of(group)
        except Skip as reason:
            yield from ((run, reason) for run in group)
            continue
        for run in sorted(group, key=lambda r: (r.pins.tp or 1, r.micro_batch, r.pins.pp or 1)):
            yield run, _predict(run, search)


def search_of(group: list[Run]) -> Search:
    """A search of the program that all runs of a group share, captured with a batch that every micro-batch divides."""
    first = group[0]
    batch = first.micro_batch if first.image else 4 * math.lcm(*{run.micro_batch for run in group})  # batch norm is each rank's own
    return Search(
        program=_captured(first.dims, first.dtype, first.image, batch), gpus=first.gpus, cluster=first.cluster,
        memory_limit_bytes=ANY_MEMORY, optimizer=first.optimizer, precision="fp32", pins=Pins(), recipe=first.recipe,
    )  # fmt: skip


@lru_cache(maxsize=CAPTURED)
def _captured(dims: Decoder | Cnn, dtype: torch.dtype, image: int, batch: int) -> Program:
    return capture(*model_of(dims, dtype, image, batch)).program


def _predict(run: Run, shared: Search) -> Prediction | Skip:
    search = shared.other(gpus=run.gpus, pins=run.pins, batch_size=run.global_batch, recipe=run.recipe, memory_limit_bytes=ANY_MEMORY)
    found = list(search.candidates())
    if not found:
        return Skip("the planner refuses it: " + next(iter(search.refused), "no mesh"))
    best = min(found, key=lambda c: c.step_time_s)
    stages = [s.memory for s in best.stages]
    own = [structs.replace(m, framework_context_bytes=0) for m in stages]
    fullest = max(stages, key=lambda m: m.total_bytes)
    shown = own[0] if run.first_stage else max(own, key=lambda m: m.total_bytes)
    spread = spread_of(seconds_by_kind(best), run.cluster)
    return Prediction(
        run=run, step_time_s=best.step_time_s, memory_bytes=shown.total_bytes, fullest_bytes=fullest.total_bytes,
        fullest_interval_bytes=fullest.interval_bytes,
        candidate=best, step_interval_s=interval(best.step_time_s, spread),
        memory_interval_bytes=shown.interval_bytes, spread=spread,
    )  # fmt: skip


def repriced(
    found: Sequence[Prediction], cluster: Callable[[Cluster], Cluster], recipe: Callable[[Recipe], Recipe] = lambda recipe: recipe
) -> Iterator[Times]:
    """The times of the same plans on changed hardware or under a changed recipe, in order."""
    clusters: dict[int, Cluster] = {}
    ledgers: dict[tuple[object, ...], Ledger] = {}
    for p in found:
        estimator = p.candidate.estimator
        changed = clusters.setdefault(id(estimator.cluster), cluster(estimator.cluster))
        rules = recipe(estimator.recipe)
        pricer = Pricer(changed, estimator.rank.mesh.sizes(), None, rules)
        key = (id(estimator.rank.ledger), id(changed), rules, pricer.contended)
        if key not in ledgers:
            ledgers[key] = estimator.rank.ledger.repriced(pricer)
        rank = replace(estimator.rank, ledger=ledgers[key])
        fresh = replace(estimator, rank=rank, cluster=changed, recipe=rules, pricer=pricer)
        yield fresh.times(p.candidate.part)
