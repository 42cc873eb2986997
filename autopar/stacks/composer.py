"""Composer, as llm-foundry's YAML: fsdp_config, batch sizes, precision (composer.Trainer; llmfoundry TrainConfig)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from autopar.stacks.configuration import Configuration
from autopar.stacks.files import count, mapping_of
from autopar.stacks.stack import Limits, Stack
from cost_models.recipe import WHOLE, mixed_precision

__all__ = ["COMPOSER"]

_STRATEGIES = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
_PRECISIONS = {"bf16": "amp_bf16", "fp16": "amp_fp16", "fp32": "fp32"}


def _write(c: Configuration, cannot: Sequence[str]) -> str:
    lines = list(cannot)
    strategy = _STRATEGIES.get(c.zero, "SHARD_GRAD_OP")
    if c.copies > 1 and c.zero in (2, 3):
        strategy = "HYBRID_SHARD" if c.zero == 3 else "_HYBRID_SHARD_ZERO2"
        lines.append(f"{c.shard} ranks of a group in this file: {strategy} has the GPUs of a node in one")
    found: dict[str, Any] = {"fsdp_config": {
        "sharding_strategy": strategy, "mixed_precision": "DEFAULT", "activation_checkpointing": c.recompute != "none",
        "activation_checkpointing_reentrant": False,
    }}  # fmt: skip
    if c.global_batch:
        found["global_train_batch_size"] = c.global_batch
    if c.micro_batch:
        found["device_train_microbatch_size"] = c.micro_batch
    if c.precision in _PRECISIONS:
        found["precision"] = _PRECISIONS[c.precision]
    head = [f"# of an autopar plan{f', for {c.gpus} GPUs' if c.gpus else ''}", *(f"# cannot express: {' '.join(x.split())}" for x in lines)]
    return "\n".join(head) + "\n" + yaml.safe_dump(found, sort_keys=False)


def _read(data: Mapping[str, Any]) -> Configuration:
    fsdp = mapping_of(data.get("fsdp_config"), "fsdp_config")
    strategy = str(fsdp.get("sharding_strategy", "FULL_SHARD")).upper() if fsdp else "NO_SHARD"
    zero = 0 if strategy == "NO_SHARD" else 2 if strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") else 3
    said = ["parts over the GPUs of a node each: priced over all data-parallel ranks"] if "HYBRID" in strategy else []
    return Configuration(
        global_batch=count(data.get("global_train_batch_size"), "global_train_batch_size"),
        micro_batch=count(data.get("device_train_microbatch_size"), "device_train_microbatch_size"), zero=zero,
        recompute="full" if fsdp.get("activation_checkpointing") is True else "none",
        precision={v: k for k, v in _PRECISIONS.items()}.get(str(data.get("precision", "amp_bf16"))), optimizer="adamw", said=tuple(said),
    )  # fmt: skip


COMPOSER = Stack(
    name="composer", title="Composer", suffixes=(".yaml", ".yml"),
    limits=Limits(zeros=(0, 2, 3), sequence=(), groups=True),
    recipe=lambda itemsize: mixed_precision(itemsize, unit_bytes=WHOLE, optimizer_passes=1.0, local_batches=True),  # FSDP: a block at once
    write=_write,
    is_one=lambda v: isinstance(v, Mapping) and bool({"device_train_microbatch_size", "global_train_batch_size", "max_duration"} & set(v)),
    read=_read, source="composer.Trainer, llmfoundry/utils/config_utils.py of mosaicml/llm-foundry",
)  # fmt: skip
