"""What a plan is, as data: the tree that text, JSON, HTML and notebooks show. `schema` in it is the version of its form.

    Explanation = verdict summary axes* choices* blocks* stages* time* limits* reliefs* families* operators* notes*

Everything but reliefs and families comes from the plan alone (its `account`), so that a plan file is explained without its model; these
two are plans that were made to be compared (autopar.explain). Names are the user's own: module paths, parameters. Fields are only added
within a version; what is removed or changes its meaning makes a new one. `autopar explain --schema` prints the JSON schema.
"""

from __future__ import annotations

from typing import Any

import msgspec

from autopar.axes import AXES, BATCH, LAYERS, TIME, axes_over
from autopar.planner.account import BUBBLE, LAUNCHES, collectives, generic
from autopar.planner.plan import Plan, parse_strategy
from autopar.planner.plan_account import BlockAccount
from autopar.planner.words import axis_words, choice_words
from autopar.report.limits import Limit, idle_axes, limits_of
from autopar.report.strategies import splits_of, undivided_words, without_a_name
from autopar.report.units import count_text, in_one_unit, in_own_unit, seconds_text
from autopar.report.words import MEMORY_TERMS, counted, rest_words, scale_text, share_text
from autopar.stacks.table import stack_of
from cost_models.rests import rest_of

__all__ = [
    "HOWS", "SCHEMA", "AxisView", "BlockView", "Choice", "Explanation", "Family", "Limit", "OperatorView", "Relief", "StageView", "Summary",
    "TimePart", "cut_short", "explanation_of", "in_words", "mesh_words", "schema",
]  # fmt: skip

SCHEMA = 1
HOWS = {"not split": "replicated", "no rule": "replicated for want of a rule", "probed": "probed", "refused": "refused"}  # in words
WAITING = "waiting for the host"  # what is left of issuing operators beside what the GPUs do meanwhile
UNSPLIT = "micro-batches: not split, because "  # how planner.store begins to say so


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the verdict. step_interval_s: of 80%; mfu: FLOPs of the model over what the GPUs could do in a step, None where it is
    not known; fullest: the pipeline rank whose memory is the fullest; bound_s: no plan of the space is faster, 0 where none is known."""

    step_time_s: float
    step_interval_s: tuple[float, float]
    work_per_s: float
    work_unit: str
    mfu: float | None
    gpu_seconds_per_step: float
    memory_bytes: int
    memory_interval_bytes: tuple[float, float]
    memory_limit_bytes: int
    fullest: int
    bound_s: float
    gap: float


class AxisView(msgspec.Struct, frozen=True, kw_only=True):
    """One axis of the mesh, outermost first. per_node: how many neighbours on it share a node; every: ranks between neighbours."""

    name: str
    title: str
    size: int
    every: int
    per_node: int
    place: str


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was decided: 'micro-batches', '8 of 2 samples each'."""

    name: str
    value: str


class BlockView(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of block, or what lies between. name: module path, with '*' for the number of an instance; splits: axis -> what is split.
    Seconds and bytes as in planner.plan.BlockAccount: of one of them and one micro-batch."""

    name: str
    paths: list[str]
    count: int
    repeated: bool
    splits: dict[str, list[str]]
    recompute: str
    forward_s: float
    backward_s: float
    again_s: float
    communication_s: float
    kept_bytes: int
    rest_bytes: int
    parameters: int


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline rank. stages: that it holds; memory: term -> bytes at its fullest moment."""

    rank: int
    stages: list[int]
    blocks: list[str]
    forward_s: float
    backward_s: float
    micro_batches_in_flight: int
    memory: dict[str, int]
    memory_bytes: int


class TimePart(msgspec.Struct, frozen=True, kw_only=True):
    """What a step is spent on, of the busiest pipeline rank; all of them add up to the step."""

    kind: str
    seconds: float
    share: float


class Relief(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the question, and the best plan that was found under it. step_time_s None: none fits, and why. speedup: of what is done
    in a second; per: of what it is, where a step is no longer the same work."""

    change: str
    step_time_s: float | None
    speedup: float | None
    plan: str
    why: str = ""
    per: str = ""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan of a family that people use. pins: what makes it one. step_time_s None: it was refused, and why. chosen: it is the
    plan that is explained."""

    name: str
    pins: dict[str, Any]
    step_time_s: float | None
    memory_bytes: int | None
    plan: str
    why: str = ""
    chosen: bool = False


class OperatorView(msgspec.Struct, frozen=True, kw_only=True):
    """Operators of a kind that are not as one may think. how: 'not split' over an axis, though they compute; 'refused': to be split over an
    axis, since what it would divide does not divide; 'probed': they have no rule, and running them in parts has shown how they may be
    split; 'no rule': they have none, and run whole. (None is ever padded.) seconds: in a micro-batch, 0 where that is not known; share: of
    the step, on each rank. why: in words."""

    how: str
    axis: str
    kind: str
    count: int
    modules: list[str]
    seconds: float
    why: str = ""
    share: float = 0.0


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The whole. plan: what was chosen in a few words, as families and reliefs have it."""

    schema: int
    model: str
    gpus: int
    gpu: str
    cluster: str
    nodes: int
    verdict: str
    summary: Summary
    axes: list[AxisView]
    choices: list[Choice]
    blocks: list[BlockView]
    stages: list[StageView]
    time: list[TimePart]
    limits: list[Limit]
    reliefs: list[Relief]
    families: list[Family]
    operators: list[OperatorView]
    notes: list[str]
    considered: list[str]
    figures_are: str
    depends_on: dict[str, float]
    plan: str


def schema() -> dict[str, Any]:
    """The JSON schema of an Explanation."""
    return msgspec.json.schema(Explanation)


def explanation_of(plan: Plan, *, reliefs: tuple[Relief, ...] = (), families: tuple[Family, ...] = ()) -> Explanation:
    account = plan.account
    per_node = account.gpus_per_node if account else plan.gpus
    operators = _operators(plan)
    return Explanation(
        schema=SCHEMA,
        model=plan.model,
        gpus=plan.gpus,
        gpu=account.gpu if account else plan.cluster,
        cluster=plan.cluster,
        nodes=-(-plan.gpus // per_node),
        verdict=verdict_of(plan),
        summary=summary_of(plan),
        axes=_axes(plan),
        choices=_choices(plan),
        blocks=_blocks(plan),
        stages=[_stage(plan, rank) for rank in range(plan.mesh[LAYERS])],
        time=time_of(plan),
        limits=limits_of(plan),
        reliefs=list(reliefs),
        families=list(families),
        operators=operators,
        notes=[note for note in plan.notes if not (account and note.startswith(("replicated over", "without a rule", UNSPLIT)))],
        considered=plan.alternatives,
        figures_are=plan.provenance,
        depends_on=dict(sorted(plan.seconds_by_kind.items(), key=lambda item: -item[1])),
        plan=in_words(plan),
    )


# -------------------------------------------------------------------------------------------------------------- verdict
def verdict_of(plan: Plan) -> str:
    """One sentence: what runs where, what it costs, how good it is."""
    made = summary_of(plan)
    gpu = plan.account.gpu if plan.account else plan.cluster
    low, high = made.step_interval_s
    interval = f" ({scale_text(low, high)})" if plan.step_spread else ""
    mfu = f", {share_text(made.mfu)} MFU" if made.mfu else ""
    parts = [
        f"{plan.model} on {plan.gpus} x {gpu}: {mesh_words(plan)}" + (f", {rest_of(plan.rest).short}" if plan.mesh[BATCH] > 1 else ""),
        f"{seconds_text(made.step_time_s)} a step{interval}, {count_text(made.work_per_s)} {made.work_unit}/s{mfu}",
        f"{used_text(made.memory_bytes, plan.memory_limit_bytes)} on the fullest GPU",
        _proven(plan),
    ]
    return "; ".join(parts)


def used_text(used: int, limit: int) -> str:
    """'61.2 of 80 GiB'; in units of their own where little is used."""
    own = " ".join(in_own_unit(used))
    if not limit:
        return own
    (first, second), unit = in_one_unit(used, limit)
    return f"{first if used >= limit / 1000 else own} of {second} {unit}"


def cut_short(plan: Plan) -> str:
    """What is not known of a plan whose search was not taken to its end; empty for the others."""
    if not plan.searched.get("unexplored", 0):
        return ""
    if not plan.bound_s:
        return "the search was cut short: how much faster another plan could be is not known"
    return f"the search was cut short: another plan may be faster by up to {max(plan.gap, 0.0):.1%}"


def _proven(plan: Plan) -> str:
    if said := cut_short(plan):
        return said
    if not plan.bound_s:
        return "how much faster another plan could be is not known"
    faster = 1 - plan.bound_s / plan.step_time_s if plan.step_time_s else 0.0
    tied = "; the fastest is less simple, and the predictions cannot tell which is faster" if plan.tie else ""
    if faster < 5e-4:
        return "no plan of the space is faster" + tied
    return f"no plan of the space is faster by more than {faster:.1%}{tied}"


def mesh_words(plan: Plan) -> str:
    """'tp 8 inside the node, dp 8 across nodes, no pipeline'. Axes as axis_words says them."""
    if plan.gpus == 1:
        return "one GPU, nothing is split"
    found = []
    for x in [x for x in reversed(_axes(plan)) if x.size > 1]:
        idle = " (it splits nothing)" if x.name in idle_axes(plan) else ""
        found.append(f"{axis_words(x.name, x.size)}{f' {x.place}' if x.place else ''}{idle}")
    return ", ".join([*found, *(["no pipeline"] if plan.mesh[LAYERS] == 1 else [])])


def in_words(plan: Plan) -> str:
    """'tp 8, dp 8, ZeRO-1, 4 micro-batches, recompute 12 of 32' (blocks)."""
    again = sum(len(s.recomputed) + len(s.selective) for s in plan.stages)
    blocks = sum(len(s.blocks) for s in plan.stages)
    words = choice_words(plan.mesh, rest_of(plan.rest), plan.shard, plan.micro_batches, plan.virtual_stages)
    idle = "".join(f", {axis} splits nothing" for axis in idle_axes(plan))
    return words + idle + (f", recompute {'all' if again == blocks else f'{again} of {blocks}'}" if again else "")


def summary_of(plan: Plan) -> Summary:
    account, step_s = plan.account, plan.step_time_s
    could = account.peak_flops_per_s * plan.gpus * step_s if account else 0.0
    fullest = max(range(len(plan.stages)), key=lambda s: plan.stages[s].memory.total_bytes)
    memory = plan.stages[fullest].memory
    low, high = memory.interval_bytes
    return Summary(
        step_time_s=step_s, step_interval_s=plan.step_time_interval_s, work_per_s=plan.tokens_or_samples_per_s, work_unit=plan.samples_unit,
        mfu=account.flops / could if account and could else None, gpu_seconds_per_step=step_s * plan.gpus, memory_bytes=memory.total_bytes,
        memory_interval_bytes=(low, high), memory_limit_bytes=plan.memory_limit_bytes, fullest=plan.rank_of[fullest], bound_s=plan.bound_s,
        gap=plan.gap,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the mesh
def _axes(plan: Plan) -> list[AxisView]:
    """Outermost first, as ranks are numbered."""
    found, every = list[AxisView](), 1
    node = plan.account.gpus_per_node if plan.account else 0
    for axis in reversed(list(plan.mesh)):
        size = plan.mesh[axis]
        per_node = plan.account.per_node.get(axis, 1) if plan.account else 0
        found.append(
            AxisView(
                name=axis, title=AXES[axis].title, size=size, every=every, per_node=per_node,
                place=_place(size, per_node) if size > 1 and node and plan.gpus > node else "",
            )
        )  # fmt: skip
        every *= size
    return found[::-1]


def _place(size: int, per_node: int) -> str:
    if per_node >= size:
        return "inside the node"
    return "across nodes" if per_node == 1 else f"over {-(-size // per_node)} nodes"


def _choices(plan: Plan) -> list[Choice]:
    ranks = plan.mesh[BATCH]
    samples = plan.global_batch // ranks // plan.micro_batches if plan.global_batch else 0
    stages = plan.mesh[LAYERS]
    found = [("micro-batches", f"{plan.micro_batches}" + (f", of {counted(samples, 'sample')} each on a rank" if samples else ""))]
    if stages > 1:
        several = f", {plan.virtual_stages} stages on each rank" if plan.virtual_stages > 1 else ""
        found.append(("schedule", f"{plan.schedule}{several}"))
    if ranks > 1:
        found.append(("sharding", rest_words(plan.rest, ranks, plan.shard)))
    blocks = sum(len(s.blocks) for s in plan.stages)
    whole, part = (sum(len(x) for x in each) for each in (([s.recomputed for s in plan.stages]), ([s.selective for s in plan.stages])))
    again = [f"{n} of {counted(blocks, 'block')} {how}" for n, how in ((whole, "whole"), (part, "in part")) if n]
    found.append(("recompute", ", ".join(again) or "none"))
    if own := [f"{name}={value}" for name, value in sorted(plan.pins.items()) if name not in plan.bound]:
        found.append(("pinned", ", ".join(own)))
    if plan.software:
        found.append(("for", f"{stack_of(plan.software).title}, priced as that runs it"))
    return [Choice(name=name, value=value) for name, value in found]


# ---------------------------------------------------------------------------------------------------- blocks and stages
def _blocks(plan: Plan) -> list[BlockView]:
    return [
        BlockView(
            name=_name(block), paths=block.paths, count=len(block.paths) if block.repeated else 1, repeated=block.repeated,
            splits={axis: words for axis in plan.axes if (words := _splits(plan, axis, block))}, recompute=block.recompute,
            forward_s=block.forward_s, backward_s=block.backward_s, again_s=block.again_s, communication_s=block.communication_s,
            kept_bytes=block.kept_bytes, rest_bytes=block.rest_bytes, parameters=block.parameters,
        )
        for block in (plan.account.blocks if plan.account else ())
    ]  # fmt: skip


def _name(block: BlockAccount) -> str:
    if block.repeated:
        return generic(block.paths[0]) or "the model's own forward"
    return ", ".join(block.paths[:3]) + (", ..." if len(block.paths) > 3 else "") or "the model's own forward"


def _splits(plan: Plan, axis: str, block: BlockAccount) -> list[str]:
    """What the axis splits of these modules, the most frequent first."""
    made = plan.axes[axis]
    if made.n == 1 or plan.account is None:
        return []
    names = {name for path in block.paths for name in generic(path).split(", ")}
    inside = {op: text for op, text in made.ops.items() if _within(generic(plan.account.modules.get(op, "")), names)}
    found = splits_of(axis, msgspec.structs.replace(made, ops=inside), plan.account.shapes)
    said = list(dict.fromkeys(s.split for s in found if not s.split.startswith("not split")))
    return [words for words in said if not without_a_name(words)] or said  # what has no name of its own follows what has one


def _within(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names if name)


def _stage(plan: Plan, rank: int) -> StageView:
    held = [s for s, r in enumerate(plan.rank_of) if r == rank]
    stages = [plan.stages[s] for s in held]
    memory = stages[0].memory
    return StageView(
        rank=rank, stages=held, blocks=[path for s in stages for path in s.blocks], forward_s=sum(s.forward_s for s in stages),
        backward_s=sum(s.backward_s for s in stages), micro_batches_in_flight=max(s.micro_batches_in_flight for s in stages),
        memory={title: getattr(memory, f"{term}_bytes") for term, title in MEMORY_TERMS.items()}, memory_bytes=memory.total_bytes,
    )  # fmt: skip


def _operators(plan: Plan) -> list[OperatorView]:
    """What an axis does not split, what it cannot, what has no rule, and batches that cannot be split into micro-batches."""
    if plan.account is None:
        return []
    found, of_step = list[OperatorView](), plan.micro_batches / (plan.step_time_s or 1.0)
    for x in plan.account.idle:
        why = ""
        if x.undivided:
            words = undivided_words(x.axis, x.kind.removeprefix("aten.").partition(".")[0], parse_strategy(x.undivided), x.size)
            why = f"{words} among {plan.mesh[x.axis]} ranks"
        how = "refused" if why else "not split"
        found.append(
            OperatorView(
                how=how, axis=x.axis, kind=x.kind, count=x.count, modules=x.modules, seconds=x.seconds, why=why, share=x.seconds * of_step
            )
        )  # fmt: skip
    for note in plan.notes:
        if note.startswith(UNSPLIT):
            why = note.removeprefix(UNSPLIT)
            found.append(OperatorView(how="refused", axis=TIME, kind="micro-batches", count=1, modules=[], seconds=0.0, why=why))
    for u in plan.account.unruled:
        why = "running them in parts gives the whole's results, so that they are split by samples" if u.probed else "they run whole"
        how = "probed" if u.probed else "no rule"
        found.append(OperatorView(how=how, axis="", kind=u.kind, count=u.count, modules=u.modules, seconds=0.0, why=why))
    return found


# ----------------------------------------------------------------------------------------------------------------- time
def time_of(plan: Plan) -> list[TimePart]:
    """By the plan's account; of a plan of before, by the terms of its step."""
    seconds = plan.account.seconds if plan.account else _terms(plan)
    total = plan.step_time_s or 1.0
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    return [TimePart(kind=WAITING if kind == LAUNCHES else kind, seconds=s, share=s / total) for kind, s in parts]


def _terms(plan: Plan) -> dict[str, float]:
    found = {"compute": plan.compute_s, BUBBLE: plan.bubble_s, collectives(BATCH): plan.gradient_sync_s, "optimizer": plan.optimizer_s}
    inner = [row.name for row in axes_over("operators") if plan.mesh[row.name] > 1]
    if inner:
        moved = plan.micro_batches * max(
            sum(s.communication_s for s, r in zip(plan.stages, plan.rank_of, strict=True) if r == rank) for rank in range(plan.mesh[LAYERS])
        )
        found |= {"compute": max(0.0, plan.compute_s - moved), collectives("+".join(inner)): min(moved, plan.compute_s)}
    return {kind: s for kind, s in found.items() if s}
