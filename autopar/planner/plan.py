"""The plan: everything that was decided, and what it is predicted to cost. It is data, saved as JSON and validated when
read; it is never executed. A plan names operators by their value names, and the program it was made for by its hash."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from autopar.axes import AXES, BATCH, LAYERS
from autopar.errors import PlanError
from autopar.files import in_line, write_file
from autopar.ir import Layout, Strategy
from autopar.planner.modes import RECOMPUTES
from autopar.planner.plan_account import Account, Count, Positive, Seconds
from autopar.report.words import counted
from autopar.run.dtypes import PRECISIONS
from cost_models.pipeline import SCHEDULES, flow
from cost_models.rests import RESTS, rest_of
from cost_models.uncertainty import CENTRAL, interval, memory_spread_bytes

__all__ = [
    "SHOWN", "AxisPlan", "BlockMode", "MemoryPlan", "Pins", "Plan", "StagePlan", "parse_strategy",
]  # fmt: skip

SHOWN: dict[str, Callable[[Plan], str]] = {}
"""How a plan is written for a person, as 'text' and as 'html': what knows how (autopar.report) enters it, since it knows plans."""

FORMAT = "autopar-plan"
VERSION = 5

ABSURD = 1000.0  # times a whole, beyond which a part of it is no figure of ours
ALIKE = 1e-6  # relative, to which figures of a file that follow from others must agree: sums of floats differ in their last digits
MOST_MICRO_BATCHES = 10**5  # that a file may state: a schedule is laid out action by action
Spread = Annotated[float, msgspec.Meta(ge=0, le=10)]
_NAMED = {"pp", "dp", "tp"}  # the mesh axes that are pins of their own


class Pins(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user decides; None leaves it to the solver. dp, tp, pp: sizes of the mesh axes. micro_batch: samples of one
    micro-batch on one rank; micro_batches: how many a step has (of the two, give one). schedule: 'gpipe', '1f1b' or 'interleaved'. zero:
    how parameters, gradients and optimizer states rest over the data axis (cost_models.rests): 0 whole, 1 states in parts, 2 gradients too,
    3 parameters too. shard: over how many neighbouring data-parallel ranks the parts of one parameter lie; with fewer than dp (hybrid
    sharding) the other groups hold the same parts. None leaves the choice between all of them and those of a node to the solver; other
    numbers are taken only where they are pinned.
    recompute: 'none', 'selective', 'full' or 'auto'. sequence_parallel: with the tp axis' matrices cut (Megatron's form), whether the
    activations between them are cut too, over the sequence (True), or whole on every rank (False); None leaves the form to the solver.
    virtual_stages: how many stages each pipeline rank holds; several with the schedule 'interleaved' (stage s is on rank s mod pp).
    blocks: how many instances of repeated blocks (layers) each stage has, pp x virtual_stages of them. even_stages: each stage has as
    many of them as the others (True); None, False: stages are cut where that is fastest. axes: sizes of mesh axes beside
    these three. Raises PlanError for values that make no sense or exclude each other."""

    dp: Positive | None = None
    tp: Positive | None = None
    pp: Positive | None = None
    micro_batch: Positive | None = None
    micro_batches: Positive | None = None
    schedule: str | None = None
    zero: int | None = None
    shard: Positive | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None
    virtual_stages: Positive | None = None
    blocks: tuple[int, ...] | None = None
    even_stages: bool | None = None
    axes: dict[str, int] | None = None

    def of_axis(self, axis: str) -> int | None:
        """The size of a mesh axis, if it is pinned."""
        found: int | None = getattr(self, axis) if axis in _NAMED else (self.axes or {}).get(axis)
        return found

    def with_axis(self, axis: str, n: int | None) -> Pins:
        """The same with another size of this axis. n: ranks; None: with the axis free."""
        if axis in _NAMED:
            return msgspec.structs.replace(self, **{axis: n})
        others = {k: v for k, v in (self.axes or {}).items() if k != axis}
        return msgspec.structs.replace(self, axes=others | ({} if n is None else {axis: n}) or None)

    def __post_init__(self) -> None:
        if unknown := set(self.axes or ()) - (set(AXES) - _NAMED):
            raise PlanError(f"there is no mesh axis {sorted(unknown)[0]!r} to pin; there are {', '.join(AXES)}")
        for name, value in (self.axes or {}).items():
            _positive(name, value)
        for name in ("dp", "tp", "pp", "micro_batch", "micro_batches", "virtual_stages", "shard"):
            _positive(name, getattr(self, name))
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise PlanError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, not {self.schedule!r}")
        stages = sorted({row.zero for row in RESTS.values()})
        if self.zero is not None and self.zero not in stages:
            raise PlanError(f"zero must be one of {', '.join(map(str, stages))}, not {self.zero!r}")
        if self.zero == 0 and self.shard not in (None, 1):
            raise PlanError(f"zero=0 leaves every parameter whole, and shard={self.shard} cuts it into parts: pin zero=1, 2 or 3 with it")
        if self.recompute is not None and self.recompute not in (*RECOMPUTES, "auto"):
            raise PlanError(f"recompute must be {', '.join(map(repr, RECOMPUTES))} or 'auto', not {self.recompute!r}")
        several = [row.name for row in SCHEDULES.values() if row.several]
        if (self.virtual_stages or 1) > 1 and self.schedule not in (None, *several):
            raise PlanError(f"{self.schedule} has one stage on each rank: virtual_stages={self.virtual_stages} needs schedule={several[0]}")
        if self.virtual_stages == 1 and self.schedule in several:
            raise PlanError(f"schedule={self.schedule} has several stages on each rank, and virtual_stages=1 only one: pin schedule=1f1b")
        if self.pp == 1 and ((self.virtual_stages or 1) > 1 or self.schedule in several):
            raise PlanError("several stages on each rank (virtual_stages) need several pipeline ranks, and pp=1 is pinned")
        if self.blocks is not None:
            listed = self.blocks if isinstance(self.blocks, tuple | list) else ()
            if not listed or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in listed):
                raise PlanError(f"the pin blocks must be whole numbers, one for each stage, not {self.blocks!r}")
            msgspec.structs.force_setattr(self, "blocks", tuple(self.blocks))
        each = self.virtual_stages or 1
        if self.blocks is not None and (len(self.blocks) % each or self.pp not in (None, len(self.blocks) // each)):
            on_each = f" with {each} stages on each rank" if each > 1 else ""
            raise PlanError(f"the pin blocks is for {len(self.blocks)} stages, the pin pp for {self.pp}{on_each}")
        if self.blocks is not None and self.schedule in several and self.virtual_stages is None:
            raise PlanError(f"pin virtual_stages with blocks and schedule={self.schedule}: blocks has one number for each stage")
        if self.even_stages and self.blocks is not None and len(set(self.blocks)) > 1:
            listed_blocks = ", ".join(map(str, self.blocks))
            raise PlanError(f"even_stages asks for stages alike, and blocks for stages of {listed_blocks}: pin one of them")
        if self.micro_batch is not None and self.micro_batches is not None:
            raise PlanError("pin micro_batch or micro_batches, not both")


def _positive(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise PlanError(f"the pin {name} must be a positive whole number, not {value!r}")


class AxisPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One axis of n ranks: operator -> strategy, leaf -> layout, as text. Operators of a repeated block are named once, by
    the first instance. What was asked of it (planner.space.Form): sequence_parallel, as in Pins; all_work: every heavy operator that can be
    split is; kept_s_per_byte: what each byte that a micro-batch keeps counts as."""

    n: Positive
    ops: dict[str, str]
    leaves: dict[str, str]
    sequence_parallel: bool | None = None
    all_work: bool = False
    kept_s_per_byte: Seconds = 0.0


class BlockMode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run a block: what runs again in backward, as spans [first, behind) of the operators of an instance on one rank, in their
    order. operators: names of what runs again in the first instance that does, for people to read."""

    name: str
    block: Count
    spans: list[tuple[int, int]]
    operators: list[str] = []


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted bytes on one rank of a stage, by term (cost_models.memory), at the moment of a step at which they are most.
    beyond_bytes: by how much the upper end of the interval at another moment is above that at this one."""

    parameters_bytes: Count
    gradients_bytes: Count
    optimizer_states_bytes: Count
    saved_activations_bytes: Count
    batch_bytes: Count
    largest_temporary_bytes: Count
    communication_buffers_bytes: Count
    framework_context_bytes: Count
    allocator_slack_bytes: Count
    beyond_bytes: Count = 0

    @property
    def terms(self) -> dict[str, int]:
        """Term -> bytes."""
        return {name.removesuffix("_bytes"): getattr(self, name) for name in self.__struct_fields__ if name != "beyond_bytes"}

    @property
    def total_bytes(self) -> int:
        return sum(self.terms.values())

    @property
    def upper_bytes(self) -> int:
        """The upper end of the interval: what must fit."""
        return math.ceil(self.interval_bytes[1])

    @property
    def interval_bytes(self) -> tuple[float, float]:
        """The interval of 80% about the total (cost_models.uncertainty)."""
        off = CENTRAL * memory_spread_bytes(self.terms)
        return max(0.0, self.total_bytes - off), self.total_bytes + off + self.beyond_bytes


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pipeline stage. memory: of one of its ranks, with all the stages that the rank holds. first_op: where it begins. blocks:
    instances of repeated blocks in it, by module path; recomputed: those of them that are recomputed whole; selective: those of which a
    part is. forward_s, backward_s: of one micro-batch. issued_s: what a host takes to issue both to its device, which computes and
    communicates meanwhile; 0 where the host is the device, and in plans of before. split_flops, flops: of one micro-batch on one rank;
    split: share of the model's FLOPs that the tp axis divides."""

    first_op: str
    blocks: list[str]
    recomputed: list[str]
    selective: list[str] = []
    forward_s: Seconds
    backward_s: Seconds
    communication_s: Seconds
    issued_s: Seconds = 0.0
    flops: Seconds
    memory: MemoryPlan
    parameters: Count
    micro_batches_in_flight: Count


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole plan. step_time_s = compute_s + bubble_s + gradient_sync_s + optimizer_s (+ the communication inside compute). objective_s,
    bound_s, gap: of the search: no plan of its space (see planner.search) is faster than bound_s, and gap is the share of objective_s that
    it is below. objective_s is the step time of the fastest plan found; this one may be a simpler one that the predictions cannot tell from
    it, which `tie` then says (planner.ties). rest: a row of cost_models.rests; shard: over how many data-parallel ranks the parts of a
    parameter lie. virtual_stages: how many stages each pipeline rank holds. searched: how many choices there were, were priced, and were
    left. recompute: (block, instance, index of one of `modes`) of what runs again in part or whole. split_share: share of FLOPs that tp
    really divides. reduce_dtype: in which gradients are brought together over ranks (a name as of `precision`), None for that in which
    parameters rest. seconds_by_kind: the step by what its seconds depend on (planner.interval); step_spread: the relative standard
    deviation of the step. software: that runs it, if it is another than autopar's own, by its name in autopar.stacks; bound: pins that
    follow from that, and are not the user's. account: what the figures are made of; None in plans of before. operators: the
    place in the program of each operator that the plan names (planner.names); empty in plans of before."""

    model: str
    program_hash: str
    gpus: Positive
    cluster: str
    memory_limit_bytes: Count
    optimizer: str
    precision: str
    reduce_dtype: str | None = None
    global_batch: Count
    samples_unit: str
    mesh: dict[str, int]
    micro_batches: Positive
    schedule: str
    virtual_stages: Positive
    rest: str
    shard: Positive
    cuts: list[int]
    recompute: list[tuple[int, int, int]]
    modes: list[BlockMode]
    stages: list[StagePlan]
    axes: dict[str, AxisPlan]
    zero_dims: dict[str, int]
    step_time_s: Seconds
    compute_s: Seconds
    bubble_s: Seconds
    gradient_sync_s: Seconds
    optimizer_s: Seconds
    objective_s: Seconds
    bound_s: Seconds
    gap: float
    tie: str = ""
    work_per_step: Seconds
    tensor_split_share: float
    provenance: str
    notes: list[str]
    limits: list[str]
    alternatives: list[str] = []
    pins: dict[str, Any] = {}
    software: str = ""
    bound: list[str] = []
    seconds_by_kind: dict[str, Seconds] = {}
    step_spread: Spread = 0.0
    planning_s: dict[str, float] = {}
    searched: dict[str, int] = {}
    account: Account | None = None
    operators: dict[str, Count] = {}
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        """The axes from the outermost inwards, as ranks are numbered, also where they come from a file, which sorts its keys."""
        order = list(AXES)
        axes = sorted(self.mesh, key=lambda axis: order.index(axis) if axis in order else len(order))
        msgspec.structs.force_setattr(self, "mesh", {axis: self.mesh[axis] for axis in axes})

    def __str__(self) -> str:
        """The verdict of `autopar explain`."""
        return SHOWN["text"](self) if "text" in SHOWN else repr(self)

    def __repr__(self) -> str:
        mesh = " ".join(f"{axis}={n}" for axis, n in self.mesh.items())
        where = f"{counted(self.gpus, 'GPU')} of {self.cluster}"
        return f"<Plan of {self.model} on {where}: {mesh} {self.rest}, {self.step_time_s:.4g} s a step>"

    def _repr_html_(self) -> str:
        """In a notebook."""
        return SHOWN["html"](self) if "html" in SHOWN else html.escape(repr(self))

    @property
    def zero(self) -> int:
        """The stage of ZeRO, as the pins count them."""
        return rest_of(self.rest).zero

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return flow(self.schedule, self.mesh[LAYERS], self.micro_batches, self.virtual_stages).rank_of

    @property
    def memory_bytes(self) -> list[int]:
        """Predicted peak bytes on one rank, for each stage."""
        return [s.memory.total_bytes for s in self.stages]

    @property
    def step_time_interval_s(self) -> tuple[float, float]:
        """The interval of 80% about the step time (cost_models.uncertainty)."""
        return interval(self.step_time_s, self.step_spread)

    @property
    def tokens_or_samples_per_s(self) -> float:
        """Tokens (sequence models) or samples of the global batch per second, over all GPUs."""
        return self.work_per_step / self.step_time_s if self.step_time_s else 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON to the file `path`, atomically. OutputError if that cannot be done."""
        write_file(path, self.to_json())

    def to_json(self) -> bytes:
        """As in the file."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1) + b"\n"

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read the file `path` and validate. PlanError if it is missing, no plan, of another version, or inconsistent;
        TypeError for what is no path."""
        given: object = path
        if not isinstance(given, str | os.PathLike):
            kind = type(given).__name__
            raise TypeError(f"a plan is an autopar.Plan or the path of its file, not a {kind}; pins= says what a plan must have")
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as e:  # a name that no file can have
            raise PlanError(f"cannot read plan {os.fspath(path)!r}: {getattr(e, 'strerror', None) or e}") from e
        return Plan.from_json(data, os.fspath(path))

    @staticmethod
    def from_json(data: bytes, name: str = "<plan>") -> Plan:
        """The inverse of `to_json`, validated. data: JSON; name: of the file, for errors. Raises PlanError, as `load`."""
        try:
            head = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise PlanError(f"{name} is not JSON: {in_line(e)}") from e
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise PlanError(f"{name} is not an autopar plan (it has no format: {FORMAT!r})")
        if head.get("version") != VERSION:
            found = in_line(repr(head.get("version")))
            raise PlanError(f"{name} is a plan of version {found}; this autopar reads version {VERSION}. Plan again.")
        try:
            plan = msgspec.convert(head, Plan)
        except msgspec.ValidationError as e:
            raise PlanError(f"{name} is a damaged plan: {in_line(e)}") from e
        plan.check(name)
        return plan

    def check(self, name: str = "<plan>") -> None:
        """Consistency that types cannot say. name: of the file, for errors. PlanError."""
        if set(self.mesh) != set(AXES) or math.prod(self.mesh.values()) != self.gpus or min(self.mesh.values()) < 1:
            raise PlanError(f"{name}: the mesh {self.mesh} is not one of {self.gpus} GPUs")
        if not self.model.isprintable() or not self.cluster.isprintable():
            raise PlanError(f"{name}: the names of its model and cluster, {self.model!r} and {self.cluster!r}, are to be plain text")
        ranks = self.mesh[LAYERS]
        count = ranks * self.virtual_stages
        if len(self.stages) != count or len(self.cuts) != count - 1 or sorted(self.cuts) != self.cuts:
            each = f" with {self.virtual_stages} stages on each" if self.virtual_stages > 1 else ""
            raise PlanError(f"{name}: {len(self.stages)} stages and cuts {self.cuts} for {ranks} pipeline ranks{each}")
        if any(seconds > ABSURD * self.step_time_s for seconds in self.seconds_by_kind.values()):
            raise PlanError(f"{name}: a part of its step takes longer than the step of {self.step_time_s:g} s")
        self._check_figures(name)
        if self.reduce_dtype not in (None, *PRECISIONS):
            raise PlanError(f"{name}: reduce_dtype {self.reduce_dtype!r} is not one of {', '.join(PRECISIONS)}")
        if self.schedule not in SCHEDULES or self.rest not in RESTS:
            raise PlanError(f"{name}: unknown schedule {self.schedule!r} or rest {self.rest!r}")
        if self.virtual_stages > 1 and (ranks == 1 or not SCHEDULES[self.schedule].several):
            raise PlanError(f"{name}: {self.schedule} over {ranks} pipeline ranks has one stage on each, not {self.virtual_stages}")
        if self.shard not in RESTS[self.rest].shards(self.mesh[BATCH], self.shard, self.shard):
            raise PlanError(f"{name}: {self.rest} cannot lie over {self.shard} of {self.mesh[BATCH]} data-parallel ranks")
        for block, instance, mode in self.recompute:
            if not (0 <= mode < len(self.modes) and self.modes[mode].block == block and instance >= 0):
                raise PlanError(f"{name}: instance {instance} of block {block} has a mode {mode} that is not among the block's modes")
        for m in self.modes:
            places = [x for span in m.spans for x in span]
            if not m.spans or places[0] < 0 or any(a >= b for a, b in m.spans) or places != sorted(places):
                raise PlanError(f"{name}: the spans {m.spans} of mode {m.name!r} are not in order, or empty")
        if self.account is not None:
            self._check_account(name, self.account)
        for axis in self.axes.values():
            for text in axis.leaves.values():
                _parsed(name, Layout.parse, text)
            for text in axis.ops.values():
                _parsed(name, parse_strategy, text)

    def _check_figures(self, name: str) -> None:
        """What follows from other fields: the step from its terms, the gap from objective and bound, micro-batches from the batch."""
        terms_s = self.compute_s + self.bubble_s + self.gradient_sync_s + self.optimizer_s
        if not math.isclose(terms_s, self.step_time_s, rel_tol=ALIKE):
            raise PlanError(f"{name}: the terms of a step come to {terms_s:g} s, and the step is {self.step_time_s:g} s")
        if not self.bound_s <= self.objective_s <= self.step_time_s * (1 + ALIKE):
            ordered = f"bound {self.bound_s:g} s, objective {self.objective_s:g} s, step {self.step_time_s:g} s"
            raise PlanError(f"{name}: {ordered} are not in this order")
        gap = (self.objective_s - self.bound_s) / self.objective_s if self.objective_s else 0.0
        if not math.isclose(gap, self.gap, abs_tol=ALIKE):
            raise PlanError(f"{name}: the gap is {self.gap:g}, and by objective and bound it is {gap:g}")
        count, ranks = self.micro_batches, self.mesh[BATCH]
        if self.global_batch % ranks:  # each of them has all of it
            ranks = 1
        if count > MOST_MICRO_BATCHES or (count > 1 and (not self.global_batch or self.global_batch % (ranks * count))):
            divided = f"{count} micro-batches on each of {self.mesh[BATCH]} data-parallel ranks"
            raise PlanError(f"{name}: a global batch of {self.global_batch} does not divide into {divided}")

    def _check_account(self, name: str, account: Account) -> None:
        if any(block.repeated and not block.paths for block in account.blocks):
            raise PlanError(f"{name}: the account has a repeated block without an instance")
        for idle in account.idle:
            if idle.axis not in AXES:
                raise PlanError(f"{name}: the account names a mesh axis {idle.axis!r}; there are {', '.join(AXES)}")
            if idle.undivided:
                _parsed(name, parse_strategy, idle.undivided)


def _parsed(name: str, parse: Any, text: str) -> None:
    try:
        parse(text)
    except ValueError as e:
        raise PlanError(f"{name}: {e}") from e


def parse_strategy(text: str) -> Strategy:
    """The inverse of str(Strategy), without `collective` (which the rule knows). ValueError if it is none."""
    body, _, local = text.partition(" [")
    ins, arrow, outs = body.partition("->")
    if not arrow or (local and not local.endswith("]")):
        raise ValueError(f"not a strategy: {text!r}")
    return Strategy(
        inputs=tuple(Layout.parse(x) for x in ins.split()),
        outputs=tuple(Layout.parse(x) for x in outs.split()),
        local=local[:-1] or None if local else None,
    )
