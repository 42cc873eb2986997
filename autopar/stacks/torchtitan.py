"""torchtitan: the TOML of its job config ([parallelism], [training], [activation_checkpoint]; torchtitan/config/job_config.py, 0.2), and
the same as the arguments that 0.3 takes in its place (torchtitan/config/configs.py)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.stacks.configuration import Configuration, unpriced_of
from autopar.stacks.files import ShellWords, count, mapping_of, size, toml_text
from autopar.stacks.stack import Limits, Stack, StackError
from cost_models.recipe import WHOLE, mixed_precision

__all__ = ["TORCHTITAN"]

_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}


def _write(c: Configuration, cannot: Sequence[str]) -> str:
    dp = c.dp or 1
    parts = c.parts or 1
    replicate, shard = (c.copies, parts) if c.zero else (dp, 1)
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if c.zero == 3 else "never",
        "tensor_parallel_degree": c.tp, "pipeline_parallel_degree": c.pp,
    }  # fmt: skip
    if c.pp > 1:
        table["pipeline_parallel_schedule"] = _SCHEDULES.get(c.schedule, "1F1B")
        table["pipeline_parallel_microbatch_size"] = c.micro_batch or 1
        if c.blocks:
            table["module_fqns_per_model_part"] = _parts(c.blocks)
    training: dict[str, Any] = {}
    if c.micro_batch:
        training["local_batch_size"] = c.micro_batch * (c.micro_batches or 1) if c.pp > 1 else c.micro_batch
    if c.global_batch:
        training["global_batch_size"] = c.global_batch
    training |= {"dtype": "float32", "mixed_precision_param": "bfloat16" if c.precision == "bf16" else "float32"}
    mode = {"none": "none", "full": "full"}.get(c.recompute, "selective")
    option = {"selective_ac_option": "op"} if mode == "selective" else {}
    optimizer = {"optimizer": {"name": {"adam": "Adam", "adamw": "AdamW"}[c.optimizer]}} if c.optimizer in ("adam", "adamw") else {}
    notes = (
        "of an autopar plan" + (f", for {c.gpus} GPUs" if c.gpus else ""), *(f"cannot express: {' '.join(x.split())}" for x in cannot),
        f"torchtitan 0.3 reads no file but arguments: {_arguments({'parallelism': table, 'training': training})}",
        f"and there the configuration's own function says activation_checkpoint={_FUNCTIONS[mode]}",
    )  # fmt: skip
    tables = {"parallelism": table, "training": training, **optimizer, "activation_checkpoint": {"mode": mode, **option}}
    return toml_text(tables, notes)


_FUNCTIONS = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}


def _arguments(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """As tyro parses them: a list of names with commas, lists of lists one after the other."""
    words = []
    for name, table in tables.items():
        for key, value in table.items():
            values = [",".join(part) for part in value] if isinstance(value, list) else [str(value)]
            words += [f"--{name}.{key}", *values]
    return shlex.join(words)


def _tables(words: ShellWords) -> dict[str, dict[str, Any]]:
    """The arguments of a command line as tables: '--parallelism.tensor_parallel_degree 8', with '=' or without."""
    found: dict[str, dict[str, Any]] = {}
    for k, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        table, dot, key = name.replace("-", "_").partition(".")
        if not word.startswith("--") or not dot or table not in ("parallelism", "training", "activation_checkpoint"):
            continue
        values = [value] if equals else []
        for further in words[k + 1 :] if not equals else ():
            if further.startswith("--"):
                break
            values.append(further)
        if hidden := [x for x in values if "$" in x or "`" in x]:
            raise StackError(f"the script works out {word} {' '.join(hidden)} when it runs, and it is not run here: write the value there")
        if key == "module_fqns_per_model_part":
            found.setdefault(table, {})[key] = [x.split(",") for x in values]
        else:
            found.setdefault(table, {})[key] = values[0] if values else True
    return found


def _parts(blocks: Sequence[int]) -> list[list[str]]:
    """torchtitan's own names of its decoders: tok_embeddings, layers.0 ..., norm, output."""
    found, at = [], 0
    for k, n in enumerate(blocks):
        names = [f"layers.{i}" for i in range(at, at + n)]
        found.append([*(["tok_embeddings"] if k == 0 else []), *names, *(["norm", "output"] if k == len(blocks) - 1 else [])])
        at += n
    return found


def _read(data: Mapping[str, Any] | ShellWords) -> Configuration:
    data = _tables(data) if isinstance(data, ShellWords) else data
    parallelism, training = mapping_of(data.get("parallelism"), "[parallelism]"), mapping_of(data.get("training"), "[training]")
    recompute = mapping_of(data.get("activation_checkpoint"), "[activation_checkpoint]")
    degrees = [f"{kind}_parallel_degree" for kind in ("context", "expert")]
    unpriced = unpriced_of({f"{name} =": size(parallelism.get(name), name) for name in degrees})
    tp, pp = (size(parallelism.get(f"{kind}_parallel_degree"), f"{kind}_parallel_degree") for kind in ("tensor", "pipeline"))
    replicate = size(parallelism.get("data_parallel_replicate_degree"), "data_parallel_replicate_degree")
    shard = count(parallelism.get("data_parallel_shard_degree", -1), "data_parallel_shard_degree")
    reshard = str(parallelism.get("fsdp_reshard_after_forward", "default"))
    keeps = reshard == "never" or (reshard == "default" and pp > 1)  # torchtitan does not free parameters between micro-batches then
    zero = 0 if shard == 1 else 2 if keeps else 3
    schedule = {v.lower(): k for k, v in _SCHEDULES.items()}.get(str(parallelism.get("pipeline_parallel_schedule", "1F1B")).lower())
    if schedule is None and pp > 1:
        stated = str(parallelism["pipeline_parallel_schedule"])[:100]
        unpriced = unpriced or (f"pipeline_parallel_schedule = {stated!r}", "pipeline_parallel_schedule = '1F1B'")
    parts, blocks, chunks = parallelism.get("module_fqns_per_model_part"), None, 1
    if isinstance(parts, list) and parts and pp > 1:
        blocks = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts if isinstance(part, list))
        chunks = max(1, len(blocks) // pp)
    if schedule == "interleaved" and chunks == 1:
        chunks = 2  # torchtitan's default for schedules of several stages
    local = count(training.get("local_batch_size", 8), "local_batch_size")
    micro = size(parallelism.get("pipeline_parallel_microbatch_size"), "pipeline_parallel_microbatch_size") if pp > 1 else local
    mode = str(recompute.get("mode", "selective"))
    said = [] if mode != "memory_budget" else ["a memory budget of recompute: priced as what is cheap to make again"]
    if str(training.get("enable_cpu_offload", False)).lower() == "true":
        said.append("offload to the CPU: priced without")
    total = count(training.get("global_batch_size", -1), "global_batch_size")
    dp = None if shard is None else replicate * shard
    return Configuration(
        dp=dp, tp=tp, pp=pp, global_batch=total if total else local * dp if local and dp else None, micro_batch=micro,
        schedule=schedule if schedule and pp > 1 else "1f1b", virtual_stages=chunks if pp > 1 else 1, zero=zero,
        shard=shard if replicate > 1 and zero else None, recompute={"none": "none", "full": "full"}.get(mode, "selective"),
        sequence_parallel=str(parallelism.get("enable_sequence_parallel", True)).lower() != "false" if tp > 1 else None,
        precision="bf16" if training.get("mixed_precision_param", "bfloat16") == "bfloat16" else "fp32",
        optimizer=str(mapping_of(data.get("optimizer"), "[optimizer]").get("name", "AdamW")).lower(), blocks=blocks, said=tuple(said),
        unpriced=unpriced,
    )  # fmt: skip


def _is_one(value: Any) -> bool:
    if isinstance(value, ShellWords):
        return any(word.startswith(("--parallelism.", "--training.")) for word in value)
    return isinstance(value, Mapping) and bool({"parallelism", "activation_checkpoint"} & set(value)) and "tokens" not in value


TORCHTITAN = Stack(
    name="torchtitan", title="torchtitan", suffixes=(".toml", ".sh"),
    limits=Limits(
        zeros=(0, 2, 3), staged_zeros=(0, 2, 3), plain_alone=True, sequence=(True,), schedules=("1f1b", "gpipe", "interleaved"), even=False,
        groups=True, recomputes=("none", "full"),
    ),
    # fully_shard of each block; its AdamW is fused by default
    recipe=lambda itemsize: mixed_precision(itemsize, unit_bytes=WHOLE, optimizer_passes=1.0, local_batches=True),
    write=_write, is_one=_is_one, read=_read,
    source="torchtitan/config/job_config.py of pytorch/torchtitan, 0.2; torchtitan/config/configs.py, 0.3",
)  # fmt: skip
