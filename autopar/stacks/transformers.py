"""Transformers: `DistributedConfig` of from_pretrained (transformers/distributed) and the fields of `TrainingArguments`, as one JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.stacks.accelerate import FSDP2
from autopar.stacks.configuration import Configuration, unpriced_of
from autopar.stacks.files import count, mapping_of, size
from autopar.stacks.stack import Stack
from cost_models.recipe import WHOLE, mixed_precision

__all__ = ["TRANSFORMERS"]

_OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd", "adagrad": "adagrad"}


def _write(c: Configuration, cannot: Sequence[str]) -> str:
    dp, lines = c.dp or 1, list(cannot)
    spread = c.zero > 0 or c.tp > 1
    own: dict[str, Any] = {"tp_size": c.tp} | ({"tp_plan": "auto"} if c.tp > 1 else {})
    if spread:
        own |= {"fsdp_size": (c.parts or 1) if c.zero else dp, "dp_replicate_size": c.copies}
        if c.zero == 2:
            own["fsdp_plan"] = {"model.layers.*": "keep_full_weight"}
            lines.append("the names of the model's layers: fsdp_plan says model.layers.*, as most decoders of transformers have them")
    own["fsdp_mixed_precision"] = c.precision == "bf16" and spread
    training: dict[str, Any] = {"gradient_accumulation_steps": c.micro_batches or 1, "gradient_checkpointing": c.recompute != "none"}
    if c.micro_batch:
        training["per_device_train_batch_size"] = c.micro_batch
    training["bf16"], training["fp16"] = c.precision == "bf16" and not spread, c.precision == "fp16" and not spread
    if c.optimizer in _OPTIMIZERS:
        training["optim"] = _OPTIMIZERS[c.optimizer]
    found: dict[str, Any] = {"distributed_config": own, "training_arguments": training}
    if lines:
        found["cannot express"] = lines
    return json.dumps(found, indent=2) + "\n"


def _read(data: Mapping[str, Any]) -> Configuration:
    own = mapping_of(data.get("distributed_config"), "distributed_config")
    training = mapping_of(data.get("training_arguments"), "training_arguments")
    sizes = {name: size(own.get(name), name) for name in ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")}
    keeps = "keep_full_weight" in mapping_of(own.get("fsdp_plan"), "fsdp_plan").values()
    zero = (2 if keeps else 3) if sizes["fsdp_size"] > 1 else 0
    stated = bool({"fsdp_size", "dp_replicate_size"} & set(own))
    half = [name for name in ("bf16", "fp16") if training.get(name) is True]
    return Configuration(
        dp=sizes["fsdp_size"] * sizes["dp_replicate_size"] if stated else None, tp=sizes["tp_size"], pp=sizes["pp_size"], zero=zero,
        shard=sizes["fsdp_size"] if zero and sizes["dp_replicate_size"] > 1 else None,
        micro_batch=count(training.get("per_device_train_batch_size", 8), "per_device_train_batch_size"),
        micro_batches=size(training.get("gradient_accumulation_steps"), "gradient_accumulation_steps"),
        recompute="full" if training.get("gradient_checkpointing") is True else "none",
        sequence_parallel=bool(own.get("enable_sequence_parallel", False)) if sizes["tp_size"] > 1 else None,
        precision="bf16" if own.get("fsdp_mixed_precision") is True else half[0] if half else "fp32",
        optimizer={v: k for k, v in _OPTIMIZERS.items()}.get(str(training.get("optim", "adamw_torch")).removesuffix("_fused"), "adamw"),
        unpriced=unpriced_of({"distributed_config.ep_size": sizes["ep_size"]}),
    )  # fmt: skip


TRANSFORMERS = Stack(
    name="transformers", title="Transformers", suffixes=(".json",), limits=FSDP2,
    recipe=lambda itemsize: mixed_precision(itemsize, unit_bytes=WHOLE, local_batches=True),
    write=_write, is_one=lambda v: isinstance(v, Mapping) and bool({"distributed_config", "training_arguments"} & set(v)), read=_read,
    source="transformers.distributed.DistributedConfig, transformers.TrainingArguments, 5.23",
)  # fmt: skip
