"""What training softwares are told about a run, in one form: made from a plan, written and read by each of them, made into pins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.axes import BATCH, LAYERS
from autopar.errors import PlanError
from autopar.planner.plan import Pins, Plan, parse_strategy
from autopar.report.limits import idle_axes
from autopar.report.words import counted

__all__ = ["NORMS", "Configuration", "Field", "changes", "configuration_of", "pins_of", "unpriced_of"]

NORMS = {"layer_norm", "native_layer_norm", "rms_norm", "pow", "mean", "rsqrt"}  # what stands between the matrices that tp cuts


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """dp, tp, pp: ranks on each mesh axis (dp None: as many as are left). micro_batch: samples of one micro-batch on one data-parallel
    rank; micro_batches: of a step. zero: stage of ZeRO; shard: over how many data-parallel ranks a parameter's parts lie (None: all).
    recompute: 'none', 'selective' (what is cheap to make again) or 'full'; recomputed: of so many blocks of a stage (None: of all).
    blocks: how many layers each stage has (None: as many as the others). None elsewhere: not stated. said: what was read and is not in
    these fields, or what a plan has beside them. unpriced: what was read that no plan can have, and what in its place can be priced."""

    dp: int | None = None
    tp: int = 1
    pp: int = 1
    global_batch: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    schedule: str = "1f1b"
    virtual_stages: int = 1
    zero: int = 0
    shard: int | None = None
    recompute: str = "none"
    recomputed: int | None = None
    sequence_parallel: bool | None = None
    precision: str | None = None
    optimizer: str | None = None
    blocks: tuple[int, ...] | None = None
    said: tuple[str, ...] = ()
    unpriced: tuple[str, str] | None = None

    def ranks_on(self, gpus: int) -> int | None:
        """The data-parallel ranks on so many GPUs; None if it is not one of so many."""
        dp = self.dp or gpus // (self.tp * self.pp)
        return dp if dp and dp * self.tp * self.pp == gpus else None

    def batch_on(self, gpus: int) -> int | None:
        """The global batch on so many GPUs, as far as it is stated."""
        dp = self.ranks_on(gpus)
        of_parts = self.micro_batch * self.micro_batches * dp if self.micro_batch and self.micro_batches and dp else None
        return self.global_batch or of_parts

    @property
    def gpus(self) -> int | None:
        return None if self.dp is None else self.dp * self.tp * self.pp

    @property
    def parts(self) -> int | None:
        """Over how many ranks the parts of a parameter lie."""
        return self.shard if self.shard is not None else self.dp

    @property
    def copies(self) -> int:
        """Groups of data-parallel ranks that hold the same parts."""
        return (self.dp or 1) // self.shard if self.shard and self.zero else 1

    @property
    def even(self) -> bool:
        return self.blocks is None or len(set(self.blocks)) <= 1


Field = str | int | bool | None


def configuration_of(plan: Plan) -> Configuration:
    """Of a plan; what has no field is said."""
    said: list[str] = []
    dp, pp, tp = plan.mesh[BATCH], plan.mesh[LAYERS], plan.mesh.get("tp", 1)
    if others := {axis: n for axis, n in plan.mesh.items() if n > 1 and axis not in (BATCH, LAYERS, "tp")}:
        said.append(f"mesh axes {', '.join(f'{axis}={n}' for axis, n in others.items())}")
    whole = [len(stage.recomputed) for stage in plan.stages]
    part = sum(len(stage.selective) for stage in plan.stages)
    blocks = tuple(len(stage.blocks) for stage in plan.stages)
    recompute, recomputed = "none", None
    if any(whole):
        recompute, recomputed = "full", None if list(blocks) == whole else max(whole)
        if recomputed is not None and len(set(whole)) > 1:
            said.append(f"recompute of {', '.join(map(str, whole))} blocks of the stages: the most is taken for each")
        if part:
            said.append(f"recompute in part of {part} further blocks")
    elif part:
        recompute = "selective"
        operators = sorted({name for mode in plan.modes for name in mode.operators})
        said.append(f"which operators run again ({', '.join(operators)}), in {part} of {sum(blocks)} blocks")
    sequence = _sequence(plan) if tp > 1 else None
    if "tp" in idle_axes(plan):
        fewer = counted(plan.gpus // tp, "GPU")
        said.append(f"that tp {tp} splits nothing in this plan: it does as much on {fewer}, where this software would split what it can")
    elif tp > 1 and plan.pins.get("sequence_parallel") is None:
        said.append("the strategy of each operator over tp, which is autopar's own choice: other softwares split by rules of their own")
    sharded = plan.shard if plan.zero and plan.shard < dp else None
    return Configuration(
        dp=dp, tp=tp, pp=pp, global_batch=plan.global_batch or None, micro_batch=plan.global_batch // (dp * plan.micro_batches) or None,
        micro_batches=plan.micro_batches, schedule=plan.schedule if pp > 1 else "1f1b", virtual_stages=plan.virtual_stages, zero=plan.zero,
        shard=sharded, recompute=recompute, recomputed=recomputed, sequence_parallel=sequence, precision=plan.precision,
        optimizer=plan.optimizer, blocks=blocks if pp > 1 and any(blocks) else None, said=tuple(said),
    )  # fmt: skip


def _sequence(plan: Plan) -> bool:
    """Whether norms and what is about them are split over the sequence by the tp axis."""
    pinned = plan.pins.get("sequence_parallel")
    if pinned is not None:
        return bool(pinned)
    made = plan.axes.get("tp")
    norms = [parse_strategy(text) for name, text in (made.ops if made else {}).items() if re.sub(r"_\d+$", "", name) in NORMS]
    split = [x for x in norms if x.outputs and x.outputs[0].is_shard and x.outputs[0].dim == 1]
    return bool(norms) and 2 * len(split) > len(norms)


def pins_of(configuration: Configuration, gpus: int, batch: int | None) -> Pins:
    """The pins with which autopar prices it on so many GPUs. PlanError if it is not one of so many."""
    c = configuration
    dp = c.ranks_on(gpus)
    if dp is None:
        raise PlanError(
            f"the configuration is for {f'{c.gpus}' if c.gpus else f'a multiple of {c.tp * c.pp}'} GPUs (tp={c.tp}, pp={c.pp}"
            f"{f', dp={c.dp}' if c.dp else ''}), not for {gpus}"
        )
    count, micro = c.micro_batches, c.micro_batch
    stated = c.batch_on(gpus)
    if batch is not None and stated is not None and stated != batch:
        raise PlanError(f"the configuration is for a global batch of {stated} samples, and the example inputs have {batch}")
    if micro is not None:
        count = None
    interleaved = c.pp > 1 and c.virtual_stages > 1
    return Pins(
        dp=dp, tp=c.tp, pp=c.pp, micro_batch=micro, micro_batches=count,
        schedule=("interleaved" if interleaved else c.schedule) if c.pp > 1 else None,
        virtual_stages=c.virtual_stages if interleaved else None,
        zero=c.zero if dp > 1 else None, shard=c.shard if dp > 1 and c.zero else None, recompute=c.recompute,
        sequence_parallel=c.sequence_parallel if c.tp > 1 else None, blocks=c.blocks if c.pp > 1 else None,
        even_stages=True if c.pp > 1 and c.blocks is None else None,
    )  # fmt: skip


def unpriced_of(sizes: Mapping[str, int]) -> tuple[str, str] | None:
    """Context or expert parallelism, of which there are no plans: what states it, and the same with one rank. sizes: by what states it."""
    large = {name: n for name, n in sizes.items() if n > 1}
    stated = ", ".join(f"{name} {n}" for name, n in large.items())
    return (f"context and expert parallelism ({stated})", ", ".join(f"{name} 1" for name in large)) if large else None


_WORDS: Mapping[str, str] = {
    "dp": "data parallel ranks", "tp": "tensor parallel ranks", "pp": "pipeline ranks", "micro_batch": "samples of a micro-batch",
    "micro_batches": "micro-batches", "schedule": "schedule", "virtual_stages": "stages on each rank", "zero": "ZeRO stage",
    "shard": "ranks that share optimizer states", "recompute": "recompute", "sequence_parallel": "sequence parallel",
}  # fmt: skip


def changes(today: Configuration, better: Configuration) -> Iterable[tuple[str, Field, Field]]:
    """(what, today, better) of every choice that differs and means something on its mesh."""
    for name, words in _WORDS.items():
        a, b = getattr(today, name), getattr(better, name)
        if name in ("schedule", "virtual_stages") and today.pp == better.pp == 1:
            continue
        if name == "sequence_parallel" and 1 in (today.tp, better.tp):
            continue
        if name == "shard":
            a, b = (c.parts if c.zero else None for c in (today, better))
        if None not in (a, b) and a != b:
            yield words, a, b
