"""A priced run, reduced to what the constants of a GPU and of a training software change: its form, which is data.

Every figure in seconds that these constants change is one of three kinds: an operator's demand (arithmetic and memory traffic at the
peak rates, of which constants say how much is reached), a count of launches by the host, or seconds of links, which are affine in the
software's constants. Which pieces make up which stage of which rank, and what overlaps with what, is kept beside them. `Fitted` of
_fitted.py evaluates many forms at once for other constants; at those of the catalogue a form gives the planner's own figures.
Of parameters that rest in the dtype in which they are used: of others, casts are missing, and there is no form.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from autopar.ir import refs
from autopar.measure import Pricer
from autopar.measure.costs import dtype_of
from autopar.planner.candidate import most_held_bytes
from autopar.planner.estimate import Estimator
from autopar.planner.interval import seconds_by_kind
from autopar.planner.modes import run_again
from autopar.planner.overlap import beside
from autopar.planner.partition import Partition
from autopar.planner.plan import MemoryPlan
from autopar.planner.price import Ledger
from autopar.planner.prologue import prologue_parts_s
from benchmarks._predict import Figures, Prediction, predictions
from benchmarks._runs import Run, Skip
from cost_models import compute
from cost_models.compute import demand
from cost_models.recipe import Recipe
from cost_models.uncertainty import interval

__all__ = ["SOFTWARE_S", "Asked", "Form", "Forms", "Refused", "figures_of", "forms_of", "keep", "kept", "key_of"]

SOFTWARE_S = ("between_nodes_s", "contended_step_s", "contended_hop_s")
"""What a software's collectives take beyond the links: fields of Recipe."""

Demand = tuple[str, float, float, str, float]
Asked = tuple[str, float, float, str, float, float]

VARIED_S = 1e-3  # by which a constant is changed, to see what is affine in it


class Pass(msgspec.Struct, kw_only=True, array_like=True):
    """A piece's operators in one direction. ops: (compute class or '', seconds at peak, of writing its result, memory class, seconds at
    peak, how many). links, host: numbers of affine figures: the device's seconds in collectives, as if nothing hid them, and the host's for
    everything. hidden: of those that products hide (the number of a collective's figure, the products beside it)."""

    ops: list[Asked]
    links: int
    host: int
    hidden: list[tuple[int, list[Asked]]] = []


class Part(msgspec.Struct, kw_only=True, array_like=True):
    """A piece. gathers: affine figures of what is gathered for its forward, and for its backward; scatters: of what is reduced beside its
    backward, overlapped or not."""

    forward: Pass
    backward: Pass
    gathers: tuple[int, int]
    scatters: int


class OnRank(msgspec.Struct, kw_only=True, array_like=True):
    """A pipeline rank, what is done once a step: (how many, affine figure of each), and its update."""

    stages: list[int]
    reduced: list[tuple[int, int]]
    gathers: list[tuple[int, int]]
    last: int
    ends: int
    numel: int
    item: int
    tensors: int


class Refused(msgspec.Struct, kw_only=True, tag=True):
    """A run that the planner cannot price, and why."""

    key: str
    reason: str


class Form(msgspec.Struct, kw_only=True, tag=True):
    """figures: seconds of each affine figure without launches and software; slopes: name -> its change by a second of that constant.
    stages: (part, again or -1, how often) of each; again: passes that run again. memory: terms in bytes of the stage whose memory the
    source states, and of the fullest; shown: which stages these are; held: of each stage, the bytes of gathers that an allocator holds at
    most (cost_models.memory.held_gathers); step_time_s, spread: the prediction, and how far it may be off; seconds: the step by what it
    depends on (autopar.planner.interval)."""

    key: str
    gpu: str
    schedule: str
    micro_batches: int
    hop: int
    prologue: int
    prologue_host: int
    overlaps_reduction: bool
    overlaps_gathers: bool
    optimizer: dict[str, float | str | None]
    parts: list[Part]
    again: list[Pass]
    stages: list[list[tuple[int, int, int]]]
    ranks: list[OnRank]
    figures: list[float]
    slopes: dict[str, list[float]]
    step_time_s: float
    spread: float
    seconds: dict[str, float]
    memory: dict[str, int]
    fullest: dict[str, int]
    shown: tuple[int, int]
    held: list[float]


def key_of(run: Run) -> str:
    """What a form depends on beside the program's own code."""
    gpu = dataclasses.replace(run.cluster.gpu, fractions=(), launch_s=0.0, sources=())
    text = json.dumps([sorted(run.row.items()), repr(run.recipe), repr(run.pins), repr(dataclasses.replace(run.cluster, gpu=gpu))])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class _Figures:
    """Numbers, by the order in which they come."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, seconds: float) -> int:
        self.values.append(seconds)
        return len(self.values) - 1


class Forms:
    """Makes forms of predictions; prices of one rank's program are shared."""

    def __init__(self) -> None:
        self._ledgers: dict[tuple[object, ...], tuple[Ledger, Ledger]] = {}

    def of(self, p: Prediction) -> Form:
        if any(x.is_cast for x in p.candidate.estimator.params.values()):
            raise NotImplementedError("parameters that are cast where they are used have no form")
        e, part = p.candidate.estimator, p.candidate.part
        nothing: dict[str, Any] = dict.fromkeys(SOFTWARE_S, 0.0)
        plain = dataclasses.replace(e.recipe, launches=1.0, **nothing)
        form, figures = _read(self._varied(e, plain, 0.0), part)
        slopes = {}
        varied: dict[str, tuple[Recipe, float]] = {"launch_s": (plain, VARIED_S)}
        if p.run.gpus > p.run.cluster.gpus_per_node:  # inside a node these constants are of nothing
            varied |= {name: (dataclasses.replace(plain, **{**nothing, name: VARIED_S}), 0.0) for name in SOFTWARE_S}
        for name, (other, launch_s) in varied.items():
            values = _read(self._varied(e, other, launch_s), part)[1]
            slopes[name] = [(b - a) / VARIED_S for a, b in zip(figures, values, strict=True)]
        memories = [s.memory for s in p.candidate.stages]
        fullest = max(range(len(memories)), key=lambda s: memories[s].total_bytes)
        own = [m.total_bytes - m.framework_context_bytes for m in memories]
        shown = 0 if p.run.first_stage else max(range(len(own)), key=lambda s: own[s])
        bounds = pairwise((0, *part.cuts, len(e.segments)))
        held = [most_held_bytes(e, e.span(i, j), e.flow.in_flight[s]) for s, (i, j) in enumerate(bounds)]
        return msgspec.structs.replace(
            form, key=key_of(p.run), gpu=p.run.cluster.gpu.name, figures=figures, slopes=slopes, step_time_s=p.step_time_s,
            spread=p.spread, seconds=seconds_by_kind(p.candidate), memory=msgspec.to_builtins(memories[shown]),
            fullest=msgspec.to_builtins(memories[fullest]), shown=(shown, fullest), held=held,
        )  # fmt: skip

    def _varied(self, e: Estimator, recipe: Recipe, launch_s: float) -> Estimator:
        """Under a recipe and with a time of the host's for each launch."""
        cluster = dataclasses.replace(e.cluster, gpu=dataclasses.replace(e.cluster.gpu, launch_s=launch_s))
        pricer = Pricer(cluster, e.rank.mesh.sizes(), None, recipe)
        key = (id(e.rank.ledger), recipe, launch_s, pricer.contended)
        if key not in self._ledgers:
            self._ledgers[key] = e.rank.ledger, e.rank.ledger.repriced(pricer)
        rank = dataclasses.replace(e.rank, ledger=self._ledgers[key][1])
        return dataclasses.replace(e, rank=rank, cluster=cluster, recipe=recipe, pricer=pricer)


def _read(e: Estimator, part: Partition) -> tuple[Form, list[float]]:
    """The form, and its affine figures at the prices of the estimator."""
    found, exchange, ledger = _Figures(), e.exchange, e.rank.ledger
    parts, numbers, again, again_of = list[Part](), dict[int, int](), list[Pass](), dict[tuple[int, int], int]()
    for n, segment in enumerate(e.segments.segments):
        same = segment.block if segment.block >= 0 else ~n
        if same in numbers:
            continue
        numbers[same] = len(parts)
        inside = range(segment.span.start, segment.span.stop)
        own = e.read(segment.span)
        units = e.gathered([(v, 0) for v in own])
        parts.append(
            Part(
                forward=_pass(e, ledger, inside, 0, found), backward=_pass(e, ledger, inside, 1, found, after=own),
                gathers=(
                    found.add(sum(exchange.unit_s(n) for n, _ in units.values())),
                    found.add(sum(exchange.unit_s(n, scattered=sent) for n, sent in units.values())),
                ),
                scatters=found.add(exchange.scatter_s(e.params_of([(v, 0) for v in own]))),
            )
        )  # fmt: skip
    bounds, stages, hop_s = (0, *part.cuts, len(e.segments)), [], 0.0
    for s, (i, j) in enumerate(pairwise(bounds)):
        counts: dict[tuple[int, int], int] = {}
        for k in range(i, j):
            segment, mode = e.segments[k], part.modes[k]
            number = numbers[segment.block if segment.block >= 0 else ~e.segments.order[k]]
            if (number, mode) not in again_of:
                spans = [run_again(ledger, ledger.liveness, span) for span in e.again(k, mode)]
                again_of[number, mode] = len(again) if spans else -1
                if len(spans) > 1:  # what the host issues is compared by span
                    raise NotImplementedError("several spans of a block that run again")
                again += [_pass(e, ledger, range(x.start, x.stop), 0, found) for x in spans]
            key = number, again_of[number, mode]
            counts[key] = counts.get(key, 0) + 1
        stages.append([(number, way, count) for (number, way), count in counts.items()])
        sent = sum(e.rank.program.types[v].nbytes for v in e.rank.cuts.crossing.get(e.segments[i].span.start, ())) if s else 0
        hop_s = max(hop_s, e.pricer.collective_s("p2p", sent, "pp") if sent else 0.0)
    ranks = []
    for r in range(e.flow.ranks):
        held = e.flow.stages_of(r)
        own_of_rank = list(dict.fromkeys(x for s in held for x in e.own(bounds[s], bounds[s + 1])))
        params = e.params_of(own_of_rank)
        once, trained = exchange.once(params), [(p, n) for p, n in params.items() if p.trainable]
        numel = sum(n * p.resting_numel for p, n in trained)
        ranks.append(
            OnRank(
                stages=held, reduced=[(n, found.add(s)) for n, s in once.reduced], gathers=[(n, found.add(s)) for n, s in once.gathers],
                last=found.add(once.last_s), ends=found.add(e._ends_s(bounds[held[0]], bounds[held[0] + 1])), numel=numel,
                item=round(sum(n * p.resting_bytes for p, n in trained) / numel) if numel else 0,
                tensors=max(1, sum(n for _, n in trained)),
            )
        )  # fmt: skip
    rules, (device_s, host_s) = e.recipe, prologue_parts_s(e.rank, e.pricer)
    form = Form(
        key="", gpu="", schedule=e.flow.schedule, micro_batches=e.rank.micro_batches, hop=found.add(hop_s),
        prologue=found.add(device_s), prologue_host=found.add(host_s),
        overlaps_reduction=rules.overlaps_reduction, overlaps_gathers=rules.overlaps_gathers,
        optimizer={
            "optimizer": e.optimizer, "grad_itemsize": rules.gradient_itemsize, "state_itemsize": rules.state_itemsize,
            "master_itemsize": rules.master_itemsize, "passes": rules.optimizer_passes,
        },
        parts=parts, again=again, stages=stages, ranks=ranks, figures=[], slopes={}, step_time_s=0.0, spread=0.0, memory={}, fullest={},
        seconds={}, shown=(0, 0), held=[],
    )  # fmt: skip
    return form, found.values


def _pass(e: Estimator, ledger: Ledger, span: Iterable[int], way: int, found: _Figures, after: Collection[str] = ()) -> Pass:
    """way: 0 forward, 1 backward. after: parameters whose gradients have come then."""
    program = ledger.program
    asked = Counter[Demand]()
    hidden = list[tuple[int, list[Asked]]]()
    links_s, host_s = 0.0, e.beside(after)[2 + way]
    if nbytes := e.added_bytes(after):
        asked[_asked_by(demand("pointwise", 0.0, nbytes, "float32", e.cluster.gpu))] += 1
    for k in span:
        op, cost = program.ops[k], ledger.costs[k]
        host_s += cost.host_s[way]
        seconds = (cost.forward_s, cost.backward_s)[way]
        if op.target.startswith("autopar.C."):
            links_s += seconds
            if way == 1 and cost.hidden_s:
                links_s += cost.hidden_s
                products = [(*x, n / 2) for x, n in Counter(x for r in ledger.products[k] for x in _asked(e, ledger, r, 1)).items()]
                hidden += [(found.add(s), products) for s in beside(op, program, e.pricer)]
            continue
        ins = tuple(program.types[r] for r in refs(op))
        outs = tuple(program.types[o] for o in op.outputs if o is not None)
        dtype = dtype_of(outs, ins)
        if way == 1 and (op.no_grad or not any(t.grad for t in outs)):
            continue
        links_s += seconds - e.pricer.counted_s(cost.counts, dtype)[way]
        asked.update(_asked(e, ledger, k, way))
    return Pass(ops=[(*x, float(n)) for x, n in asked.items()], links=found.add(links_s), host=found.add(host_s), hidden=hidden)


def _asked(e: Estimator, ledger: Ledger, k: int, way: int) -> Iterator[Demand]:
    """What an operator asks of the device, kernel by kernel."""
    op, counts, types = ledger.program.ops[k], ledger.costs[k].counts, ledger.program.types
    dtype = dtype_of(tuple(types[o] for o in op.outputs if o is not None), tuple(types[r] for r in refs(op)))
    for kernel in (*e.pricer.work(counts, dtype), (), ())[way]:
        yield _asked_by(demand(kernel.op_class, kernel.flops, kernel.nbytes, dtype, e.cluster.gpu, kernel.written))


def _asked_by(d: compute.Demand) -> Demand:
    return d.compute_class or "", d.compute_s, d.written_s, d.memory_class, d.memory_s


def figures_of(
    run: Run, form: Form, step_time_s: float | None = None, memory: MemoryPlan | None = None, full: MemoryPlan | None = None,
    spread: float | None = None,
) -> Figures:  # fmt: skip
    """The prediction, or another one of the step and its spread, of memory, and of that of the fullest stage, by the same form."""
    shown = msgspec.structs.replace(memory or msgspec.convert(form.memory, MemoryPlan), framework_context_bytes=0)
    fullest = full or msgspec.convert(form.fullest, MemoryPlan)
    step_s, off = form.step_time_s if step_time_s is None else step_time_s, form.spread if spread is None else spread
    return Figures(
        run=run, step_time_s=step_s, memory_bytes=shown.total_bytes, fullest_bytes=fullest.total_bytes,
        fullest_interval_bytes=fullest.interval_bytes, step_interval_s=interval(step_s, off),
        memory_interval_bytes=shown.interval_bytes, spread=off,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- a file
def kept(path: Path) -> Iterator[Form | Refused]:
    """The forms of a file of one form a line."""
    if path.exists():
        decoder = msgspec.json.Decoder(Form | Refused)
        with path.open("rb") as file:
            for line in file:
                yield decoder.decode(line)


def keep(path: Path, form: Form | Refused) -> None:
    """Adds a form to a file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(form) + b"\n")


def forms_of(
    runs: Sequence[Run], path: Path | None = None, say: Callable[[int, int], None] = lambda done, of: None
) -> Iterator[tuple[Run, Form | Refused]]:
    """The form of each run, in order, when all are priced. path: of forms that are taken from there, and added to it. say(done, of): called
    before each that is priced anew."""
    known = {form.key: form for form in kept(path)} if path is not None else {}
    new = [run for run in runs if key_of(run) not in known]
    forms, program = Forms(), None
    for count, (run, found) in enumerate(predictions(new), 1):
        say(count, len(new))
        if run.key != program:
            forms, program = Forms(), run.key
        form = Refused(key=key_of(run), reason=str(found)) if isinstance(found, Skip) else forms.of(found)
        known[form.key] = form
        if path is not None:
            keep(path, form)
    yield from ((run, known[key_of(run)]) for run in runs)
