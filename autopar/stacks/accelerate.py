"""Accelerate: the YAML that `accelerate launch --config_file` reads: fsdp_config and parallelism_config (accelerate/commands/launch.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from autopar.stacks.configuration import Configuration, unpriced_of
from autopar.stacks.files import count, mapping_of, size
from autopar.stacks.stack import Limits, Stack, StackError
from cost_models.recipe import WHOLE, mixed_precision

__all__ = ["ACCELERATE", "FSDP2"]

_STRATEGIES = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2}
FSDP2 = Limits(zeros=(0, 2, 3), plain_alone=True, sequence=(False,), groups=True)


def _write(c: Configuration, cannot: Sequence[str]) -> str:
    dp, lines = c.dp or 1, list(cannot)
    precision = {"bf16": "bf16", "fp16": "fp16"}.get(c.precision or "", "no")
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": precision,
        "num_processes": dp * c.tp,
    }
    if (c.zero == 0 or dp == 1) and c.tp == 1:
        found["distributed_type"] = "MULTI_GPU" if dp > 1 else "NO"
        if c.recompute != "none":
            lines.append("recompute without FSDP in this file: call model.gradient_checkpointing_enable()")
    else:
        found["distributed_type"] = "FSDP"
        found["fsdp_config"] = {
            "fsdp_version": 2, "fsdp_reshard_after_forward": c.zero == 3, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": c.recompute != "none", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }  # fmt: skip
        found["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": c.copies, "parallelism_config_dp_shard_size": (c.parts or 1) if c.zero else dp,
            "parallelism_config_tp_size": c.tp, "parallelism_config_cp_size": 1,
        }  # fmt: skip
    if c.pp > 1:
        lines.append(f"{c.gpus} GPUs: this is for {dp * c.tp}, and the plan's figures do not hold for it; plan with --for accelerate")
    if (c.micro_batches or 1) > 1:
        lines.append(f"{c.micro_batches} micro-batches in this file: Accelerator(gradient_accumulation_steps={c.micro_batches})")
    head = [f"# of an autopar plan; a loader's batch size is {c.micro_batch} on each process" if c.micro_batch else "# of an autopar plan"]
    return "\n".join([*head, *(f"# cannot express: {' '.join(x.split())}" for x in lines)]) + "\n" + yaml.safe_dump(found, sort_keys=False)


def _read(data: Mapping[str, Any]) -> Configuration:
    fsdp = mapping_of(data.get("fsdp_config"), "fsdp_config")
    own = mapping_of(data.get("parallelism_config"), "parallelism_config")
    kind = str(data.get("distributed_type", "NO"))
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise StackError(f"distributed_type: {kind}: give --from that software's own configuration instead")
    sizes = {k.removeprefix("parallelism_config_"): size(v, k) for k, v in own.items() if str(k).endswith("_size")}
    others = {f"parallelism_config_{name}:": sizes.get(name, 1) for name in ("cp_size", "sp_size")}
    tp, processes = sizes.get("tp_size", 1), count(data.get("num_processes"), "num_processes")
    replicate = sizes.get("dp_replicate_size", 1)
    dp = replicate * sizes.get("dp_shard_size", 1) if own else processes
    zero, groups = 0, False
    if kind == "FSDP" and (dp or 2) > 1:
        strategy = str(fsdp.get("fsdp_sharding_strategy", "")).lower()
        reshard = fsdp.get("fsdp_reshard_after_forward", True)
        named = strategy or (str(reshard).lower() if not isinstance(reshard, bool) else "")
        zero = _STRATEGIES.get(named, 3 if str(reshard).lower() != "false" else 2)
        groups = named.startswith("hybrid") or replicate > 1
    said = ["parameters on the CPU (fsdp_offload_params): priced without"] if fsdp.get("fsdp_offload_params") is True else []
    if groups and replicate == 1:
        said.append("parts over the GPUs of a node each (HYBRID_SHARD): priced over all data-parallel ranks")
    precision = str(data.get("mixed_precision", "no"))
    steps = count(data.get("gradient_accumulation_steps"), "gradient_accumulation_steps")
    return Configuration(
        dp=dp, tp=tp, zero=zero, shard=sizes.get("dp_shard_size") if replicate > 1 and zero else None, micro_batches=steps or 1,
        recompute="full" if fsdp.get("fsdp_activation_checkpointing") is True else "none", sequence_parallel=False if tp > 1 else None,
        precision=precision if precision in ("bf16", "fp16") else "fp32", said=tuple(said), unpriced=unpriced_of(others),
    )  # fmt: skip


ACCELERATE = Stack(
    name="accelerate", title="Accelerate", suffixes=(".yaml", ".yml"), limits=FSDP2,
    # fully_shard of each block; torch.optim's foreach kernels
    recipe=lambda itemsize: mixed_precision(itemsize, unit_bytes=WHOLE, local_batches=True),
    write=_write, is_one=lambda v: isinstance(v, Mapping) and bool({"distributed_type", "compute_environment"} & set(v)), read=_read,
    source="accelerate.commands.config.config_args.ClusterConfig, accelerate.ParallelismConfig, 1.15",
)  # fmt: skip
