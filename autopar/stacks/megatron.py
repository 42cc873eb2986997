"""Megatron-LM: arguments of pretrain_gpt.py and its like (megatron/training/arguments.py)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from autopar.stacks.configuration import Configuration, unpriced_of
from autopar.stacks.files import ShellWords, count, size
from autopar.stacks.stack import Limits, Stack, StackError
from cost_models.recipe import mixed_precision

__all__ = ["MEGATRON"]

# argument -> how many values it takes; others are not of the plan
_TAKES = {
    "--tensor-model-parallel-size": 1, "--pipeline-model-parallel-size": 1, "--context-parallel-size": 1, "--expert-model-parallel-size": 1,
    "--num-layers-per-virtual-pipeline-stage": 1, "--num-virtual-stages-per-pipeline-rank": 1, "--num-layers": 1, "--micro-batch-size": 1,
    "--global-batch-size": 1, "--recompute-granularity": 1, "--recompute-method": 1, "--recompute-num-layers": 1, "--optimizer": 1,
    "--decoder-first-pipeline-num-layers": 1, "--decoder-last-pipeline-num-layers": 1, "--data-parallel-sharding-strategy": 1,
    "--num-distributed-optimizer-instances": 1, "--sequence-parallel": 0, "--use-distributed-optimizer": 0, "--use-megatron-fsdp": 0,
    "--recompute-activations": 0, "--bf16": 0, "--fp16": 0, "--nproc_per_node": 1, "--nproc-per-node": 1, "--nnodes": 1,
}  # fmt: skip
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _write(c: Configuration, cannot: Sequence[str]) -> str:
    words: list[tuple[str, object]] = [("--tensor-model-parallel-size", c.tp), ("--pipeline-model-parallel-size", c.pp)]
    flags: list[str] = []
    if c.micro_batch:
        words.append(("--micro-batch-size", c.micro_batch))
    if c.global_batch:
        words.append(("--global-batch-size", c.global_batch))
    if c.tp > 1 and c.sequence_parallel:
        flags.append("--sequence-parallel")
    if (c.dp or 1) > 1 and c.zero:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        if c.copies > 1:
            words.append(("--num-distributed-optimizer-instances", c.copies))
    elif (c.dp or 1) > 1:
        flags.append("--overlap-grad-reduce")
    if c.recompute == "full" and c.recomputed is None:
        words += [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)]
    elif c.recompute == "full":
        words += [("--recompute-granularity", "full"), ("--recompute-method", "block"), ("--recompute-num-layers", c.recomputed)]
    elif c.recompute == "selective":
        words.append(("--recompute-granularity", "selective"))
    if c.pp > 1 and c.virtual_stages > 1:
        if c.blocks and c.even:
            words.append(("--num-layers-per-virtual-pipeline-stage", c.blocks[0]))
        else:
            words.append(("--num-virtual-stages-per-pipeline-rank", c.virtual_stages))
    flags += {"bf16": ["--bf16"], "fp16": ["--fp16"]}.get(c.precision or "", [])
    if c.optimizer in ("adam", "adamw", "sgd"):
        words.append(("--optimizer", "sgd" if c.optimizer == "sgd" else "adam"))
    gpus = f", for {c.gpus} GPUs (dp={c.dp})" if c.gpus else ""
    lines = [f"# Megatron-LM arguments of an autopar plan{gpus}: append $AUTOPAR_ARGS to those of the model and the data"]
    lines += [f"# cannot express: {' '.join(line.split())}" for line in cannot]
    parts = [*(f"{name} {shlex.quote(str(value))}" for name, value in words), *flags]
    return "\n".join(lines) + "\nAUTOPAR_ARGS=(\n" + "".join(f"    {part}\n" for part in parts) + ")\n"


def _read(words: ShellWords) -> Configuration:
    found: dict[str, str] = {}
    for k, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in _TAKES:
            continue
        if not _TAKES[name]:
            found[name] = "true"
        elif equals:
            found[name] = value
        elif k + 1 < len(words) and not words[k + 1].startswith("--"):
            found[name] = words[k + 1]
    if hidden := [f"{name} {value}" for name, value in found.items() if "$" in value or "`" in value]:
        raise StackError(f"the script works out {', '.join(hidden)} when it runs, and it is not run here: write the values in their place")
    others = {name: size(found.get(name), name) for name in ("--context-parallel-size", "--expert-model-parallel-size")}

    def number(name: str) -> int | None:
        return count(found.get(name), name)

    tp, pp, layers = (number(n) for n in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-layers"))
    tp, pp = tp or 1, pp or 1
    granularity = found.get("--recompute-granularity", "selective" if "--recompute-activations" in found else "none")
    some = number("--recompute-num-layers") if found.get("--recompute-method") == "block" else None
    each, chunks = number("--num-layers-per-virtual-pipeline-stage"), number("--num-virtual-stages-per-pipeline-rank") or 1
    if each and layers and pp > 1:
        if layers % (pp * each):
            fit = [str(n) for n in range(1, layers + 1) if layers % (pp * n) == 0]
            instead = f": --num-layers-per-virtual-pipeline-stage could be {', '.join(fit)}" if fit else ""
            raise StackError(f"--num-layers {layers} is no multiple of {pp} pipeline ranks times {each} layers of a virtual stage{instead}")
        chunks = layers // (pp * each)
    elif each and pp > 1:
        raise StackError("--num-layers-per-virtual-pipeline-stage needs --num-layers beside it, to say how many stages a rank holds")
    zero = int("--use-distributed-optimizer" in found)
    if "--use-megatron-fsdp" in found:
        zero = _SHARDING.get(found.get("--data-parallel-sharding-strategy", "no_shard"), zero)
    instances = number("--num-distributed-optimizer-instances") or 1
    nodes, local = number("--nnodes"), number("--nproc_per_node") or number("--nproc-per-node")
    dp = nodes * local // (tp * pp) or None if nodes and local and nodes * local % (tp * pp) == 0 else None
    said = [f"recompute of {some} layers of each stage: priced as of all"] if some else []
    if granularity == "selective":
        said.append(
            "--recompute-granularity selective runs the core of attention again; priced is what is cheap to make again of each layer"
        )
    return Configuration(
        dp=dp, tp=tp, pp=pp, global_batch=number("--global-batch-size"), micro_batch=number("--micro-batch-size"),
        schedule="interleaved" if chunks > 1 and pp > 1 else "1f1b", virtual_stages=chunks if pp > 1 else 1, zero=zero,
        shard=dp // instances if dp and instances > 1 and dp % instances == 0 else None,
        recompute=granularity if granularity in ("full", "selective") else "none",
        recomputed=some, sequence_parallel="--sequence-parallel" in found if tp > 1 else None,
        precision="bf16" if "--bf16" in found else "fp16" if "--fp16" in found else None,
        optimizer={"adam": "adamw", "sgd": "sgd"}.get(found.get("--optimizer", "adam")), blocks=_blocks(found, layers, pp),
        said=tuple(said), unpriced=unpriced_of(others),
    )  # fmt: skip


def _blocks(found: dict[str, str], layers: int | None, pp: int) -> tuple[int, ...] | None:
    first, last = (count(found.get(f"--decoder-{end}-pipeline-num-layers"), end) for end in ("first", "last"))
    if pp == 1 or not layers or (first is None and last is None):
        return None
    inner = pp - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if left < 0 or (inner == 0) != (left == 0) or (inner and left % inner):
        raise StackError(
            f"--num-layers {layers} does not divide into {pp} stages with {first} layers in the first and {last} in the last one"
        )
    middle = [left // inner] * inner if inner else []
    return (*([first] if first else []), *middle, *([last] if last else []))


MEGATRON = Stack(
    name="megatron", title="Megatron-LM", suffixes=(".sh",),
    limits=Limits(
        zeros=(0, 1), staged_zeros=(0, 1), sequence=(False, True), schedules=("1f1b", "interleaved"), groups=True, some=True,
        recomputes=("none", "full"),
    ),
    # gradients are added into float32 buffers of their own, the optimizer keeps float32 copies (megatron/core/optimizer); with
    # --sequence-parallel gathered activations are gathered again in backward, and in either case a linear layer's collectives there go on
    # beside its products (megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication)
    recipe=lambda itemsize: mixed_precision(
        itemsize, accumulates=True, gradient_copies=1, regathers=True, beside_products=("all_gather", "all_reduce", "reduce_scatter"),
        fuses=True, optimizer_passes=1.0, local_batches=True,
    ),
    write=_write, is_one=lambda value: isinstance(value, ShellWords), read=_read,
    source="megatron/training/arguments.py of NVIDIA/Megatron-LM",
)  # fmt: skip
