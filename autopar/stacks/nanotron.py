"""nanotron: the YAML of run_train.py: parallelism, tokens, optimizer, model.dtype (nanotron/config)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from autopar.stacks.configuration import Configuration, unpriced_of
from autopar.stacks.files import count, mapping_of, size
from autopar.stacks.stack import Limits, Stack, StackError
from cost_models.recipe import NANOTRON, mixed_precision

__all__ = ["NANOTRON_STACK"]

_ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _write(c: Configuration, cannot: Sequence[str]) -> str:
    found: dict[str, Any] = {
        "parallelism": {
            "dp": c.dp or 1, "pp": c.pp, "tp": c.tp, "pp_engine": _ENGINES.get(c.schedule, "1f1b"),
            "tp_mode": "REDUCE_SCATTER" if c.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": bool(c.sequence_parallel), "recompute_layer": c.recompute != "none",
            "expert_parallel_size": 1, "context_parallel_size": 1,
        },
        "tokens": {"batch_accumulation_per_replica": c.micro_batches or 1} | ({"micro_batch_size": c.micro_batch} if c.micro_batch else {}),
        "optimizer": {"zero_stage": min(c.zero, 1), "accumulate_grad_in_fp32": True},
    }  # fmt: skip
    if c.precision in _DTYPES:
        found["model"] = {"dtype": _DTYPES[c.precision]}
    lines = [*cannot, *(["where stages are cut: it places blocks by what they cost"] if c.pp > 1 else [])]
    head = [
        "# of an autopar plan; merge it with the rest of the run's configuration",
        *(f"# cannot express: {' '.join(x.split())}" for x in lines),
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(found, sort_keys=False)


def _read(data: Mapping[str, Any]) -> Configuration:
    own, tokens, optimizer, model = (mapping_of(data.get(name), name) for name in ("parallelism", "tokens", "optimizer", "model"))
    others = {f"parallelism.{name}:": size(own.get(name), name) for name in ("context_parallel_size", "expert_parallel_size")}
    tp, pp = size(own.get("tp"), "parallelism.tp"), size(own.get("pp"), "parallelism.pp")
    engine = str(own.get("pp_engine") or "afab").lower()
    if engine not in _ENGINES.values():
        raise StackError(f"parallelism.pp_engine must be 1f1b or afab, not {engine!r}")
    dtype = str(model.get("dtype", "bfloat16"))
    return Configuration(
        dp=count(own.get("dp"), "parallelism.dp"), tp=tp, pp=pp,
        micro_batch=count(tokens.get("micro_batch_size"), "tokens.micro_batch_size"),
        micro_batches=size(tokens.get("batch_accumulation_per_replica"), "tokens.batch_accumulation_per_replica"),
        schedule={v: k for k, v in _ENGINES.items()}[engine] if pp > 1 else "1f1b",
        zero=(count(optimizer.get("zero_stage") or None, "optimizer.zero_stage") or 0),
        recompute="full" if own.get("recompute_layer") is True else "none",
        sequence_parallel=str(own.get("tp_mode") or "ALL_REDUCE").upper() == "REDUCE_SCATTER" if tp > 1 else None,
        precision={v: k for k, v in _DTYPES.items()}.get(dtype), optimizer="adamw", unpriced=unpriced_of(others),
    )  # fmt: skip


NANOTRON_STACK = Stack(
    name="nanotron", title="nanotron", suffixes=(".yaml", ".yml"),
    limits=Limits(zeros=(0, 1), staged_zeros=(0, 1), sequence=(False, True), schedules=("1f1b", "gpipe")),
    recipe=lambda itemsize: mixed_precision(itemsize, NANOTRON, accumulates=True, gradient_copies=1), write=_write,
    is_one=lambda v: isinstance(v, Mapping) and isinstance(v.get("parallelism"), Mapping) and {"dp", "tp", "pp"} <= set(v["parallelism"]),
    read=_read, source="nanotron/config/parallelism_config.py and config.py of huggingface/nanotron",
)  # fmt: skip
