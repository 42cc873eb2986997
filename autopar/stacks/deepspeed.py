"""DeepSpeed: its JSON (deepspeed/runtime/config.py, zero/config.py, tensor_parallel/config.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.stacks.configuration import Configuration
from autopar.stacks.files import count, mapping_of, size
from autopar.stacks.stack import Limits, Stack, StackError
from cost_models.recipe import mixed_precision

__all__ = ["DEEPSPEED"]

_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad"}


def _write(c: Configuration, cannot: Sequence[str]) -> str:
    zero: dict[str, Any] = {"stage": c.zero, "overlap_comm": True, "contiguous_gradients": True}
    found: dict[str, Any] = {}
    if c.global_batch:
        found["train_batch_size"] = c.global_batch
    if c.micro_batch:
        found["train_micro_batch_size_per_gpu"] = c.micro_batch
    if c.micro_batches:
        found["gradient_accumulation_steps"] = c.micro_batches
    found["zero_optimization"] = zero
    if c.tp > 1:
        found["tensor_parallel"] = {"autotp_size": c.tp}
    if c.pp > 1:
        found["pipeline"] = {"stages": c.pp, "partition": "uniform"}
    found |= {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}.get(c.precision or "", {})
    if c.optimizer in _OPTIMIZERS:
        found["optimizer"] = {"type": _OPTIMIZERS[c.optimizer]}
    lines = list(cannot)
    if c.recompute != "none":
        lines.append("recompute: it is the model's to ask for, such as model.gradient_checkpointing_enable()")
    if c.pp > 1:
        lines.append("pipeline stages in this file: deepspeed.pipe.PipelineModule is given their number and partition_method='uniform'")
    if lines:
        found["cannot express"] = lines
    return json.dumps(found, indent=2) + "\n"


def _read(data: Mapping[str, Any]) -> Configuration:
    zero, tp = mapping_of(data.get("zero_optimization"), "zero_optimization"), mapping_of(data.get("tensor_parallel"), "tensor_parallel")
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise StackError(f"zero_optimization.stage must be 0, 1, 2 or 3, not {stage!r}")
    said = [
        f"{name}: priced without"
        for name in ("offload_param", "offload_optimizer")
        if mapping_of(zero.get(name), name).get("device", "none") != "none"
    ]
    tp_size = size(tp.get("autotp_size") or None, "tensor_parallel.autotp_size")
    pp = size(
        mapping_of(data.get("pipeline"), "pipeline").get("stages") if isinstance(data.get("pipeline"), Mapping) else None, "pipeline.stages"
    )
    enabled = [name for name in ("bf16", "fp16") if mapping_of(data.get(name), name).get("enabled") is True]
    total, micro, steps = (
        count(data.get(name), name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    dp = total // (micro * steps) if total and micro and steps and total % (micro * steps) == 0 else None
    optimizer = str(mapping_of(data.get("optimizer"), "optimizer").get("type", "AdamW")).lower()
    if not any(str(line).startswith("recompute") for line in data.get("cannot express") or ()):
        said.append("recompute is the model's to ask for, and is not in this file: priced without")
    groups = count(zero.get("mics_shard_size"), "mics_shard_size")  # of DeepSpeed before 0.19
    if size(zero.get("zero_hpz_partition_size") or None, "zero_hpz_partition_size") > 1:
        said.append("a second copy of the parameters in each node (zero_hpz_partition_size): priced without")
    return Configuration(
        dp=dp, tp=tp_size, pp=pp, global_batch=total, micro_batch=micro, micro_batches=steps, zero=stage,
        shard=groups if stage == 3 and groups and groups > 1 else None, sequence_parallel=False if tp_size > 1 else None,
        precision=enabled[0] if enabled else "fp32", optimizer=optimizer if optimizer in _OPTIMIZERS else None, said=tuple(said),
    )  # fmt: skip


DEEPSPEED = Stack(
    name="deepspeed", title="DeepSpeed", suffixes=(".json",),
    limits=Limits(zeros=(0, 1, 2, 3), staged_zeros=(0, 1), sequence=(False,), schedules=("1f1b",)),
    # buckets of 5e8 elements (zero/config.py: reduce_bucket_size), a float32 copy in the optimizer, FusedAdam
    recipe=lambda itemsize: mixed_precision(itemsize, bucket_bytes=500_000_000 * itemsize, optimizer_passes=1.0, local_batches=True),
    write=_write,
    is_one=lambda v: isinstance(v, Mapping) and bool({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & set(v)),
    read=_read, source="deepspeed/runtime/config.py, 0.19",
)  # fmt: skip
