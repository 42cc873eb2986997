"""Rows of published training runs -> what the planner needs to price them: a model, pins, a recipe, a cluster.

One CSV has a row for each run, of the columns in COLUMNS (others are ignored); an empty cell means that its source does not state it.
What cannot be rebuilt raises Skip with the reason. Facts that a software's own sources state and a table leaves out (whether its
attention is fused, whether it overlaps the reduction of gradients) are in SOFTWARE, by the name of the source; a source that is not
there is taken for current practice.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from autopar.planner import Pins
from benchmarks import _cnns as cnn
from benchmarks._decoders import Decoder, decoder
from benchmarks._network import with_network
from cost_models import Cluster, UnknownHardware, load_cluster
from cost_models.cluster import Gpu, load_gpu
from cost_models.recipe import LAUNCHES, NANOTRON, WHOLE, Recipe

__all__ = ["COLUMNS", "DATA", "Run", "Skip", "Software", "load", "read"]

DATA = Path(__file__).parent / "data" / "runs"
COLUMNS = (
    "source", "model", "family", "n_layers", "hidden", "n_heads", "n_kv_heads", "ffn", "vocab", "tied_emb", "seq_len", "gpu",
    "n_gpus", "gpus_per_node", "inter_link", "global_batch", "micro_batch", "grad_accum", "dp", "tp", "pp", "vpp", "cp", "ep",
    "seq_parallel", "sharding", "act_ckpt", "precision", "extra", "step_time_s", "peak_mem", "peak_mem_unit", "peak_mem_kind",
    "status", "flags",
)  # fmt: skip


class Skip(ValueError):
    """A row that cannot be rebuilt; the message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """What a training software does that its tables do not say. fused_attention: scores are never in memory. fused_loss: nor are logits in
    float32. dropout: its default.
    stages: of equal numbers of layers, or filled one after the other until each has its share of the parameters of layers and head.
    compiled: a step is one program that no interpreter issues operator by operator. recipe: how it carries a plan out, as far as its rows
    do not state it."""

    fused_attention: bool = True
    fused_loss: bool = False
    dropout: float = 0.0
    stages: Literal["layers", "parameters"] = "layers"
    compiled: bool = False
    recipe: Recipe = Recipe(optimizer_passes=1.0, local_batches=True, launches=LAUNCHES)


CURRENT = Software()
OPTIMIZERS = {"": "", "adafactor": "sgd"}
"""As a row states it -> as it is priced ('' for the usual one). Adafactor keeps of a matrix's second moments a number for each row and
column, and no first ones (Shazeer and Stern 2018, sections 3 and 9): next to nothing, as plain SGD does."""
MXNET = "MXNet"
MICRO_BATCHES = "micro-batches"
# Megatron-LM and Megatron-DeepSpeed before flash attention: scores in memory, dropout 0.1, one reduction after backward; kernels of its
# own for scale, mask and softmax, bias and GELU, dropout and sum (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
# on GPU Clusters", section 4.2)
MEGATRON = Software(
    fused_attention=False,
    dropout=0.1,
    recipe=dataclasses.replace(CURRENT.recipe, overlaps_reduction=False, bucket_bytes=WHOLE, fuses=True),
)

SOFTWARE: dict[str, Software] = {
    # torch 1.13 and 2.0: FlashAttention in Triton, over which the second version is 1.3 to 2.5 times as fast (Dao 2023, section 4.1);
    # flash-attn's cross-entropy (loss_fn: fused_crossentropy, the default of its MPT); FSDP gathers a block at once
    "llm-foundry": Software(fused_loss=True, recipe=dataclasses.replace(CURRENT.recipe, attention_speed=0.55, unit_bytes=WHOLE)),
    # nanotron places pipeline blocks by their cost
    "ultrascale": Software(
        stages="parameters",
        recipe=NANOTRON,
    ),
    "vtrain": MEGATRON,
    "megatron-deepspeed": MEGATRON,
    "megatron-2020": MEGATRON,
    "megatron-gpt3": MEGATRON,
    "megatron-seqpar": dataclasses.replace(MEGATRON, recipe=dataclasses.replace(MEGATRON.recipe, regathers=True)),
    # XLA of 2021: scores in memory; gradients are reduced tensor by tensor where they are made, without overlap. Which of cuDNN's
    # algorithms its autotuner found room for is not known: those that need no memory are taken
    "alpa": Software(
        fused_attention=False,
        compiled=True,
        recipe=dataclasses.replace(CURRENT.recipe, overlaps_reduction=False, fuses=True, winograd=False, launches=1.0),
    ),
    # Megatron-LM 1.1.5 under DeepSpeed's engine, which had ZeRO-3 beside tensor parallelism (microsoft/DeepSpeedExamples,
    # Megatron-LM-v1.1.5-ZeRO3): its own kernels are there on demand alone, and its scripts do not ask for them (--bias-gelu-fusion, ...).
    # The engine's defaults are reduction without overlap, in buckets of 5e8 numbers (deepspeed.ai, "DeepSpeed Configuration JSON":
    # overlap_comm, reduce_bucket_size)
    "deepspeed-zero": dataclasses.replace(MEGATRON, recipe=dataclasses.replace(MEGATRON.recipe, fuses=False, bucket_bytes=10**9)),
}

COMPILED_LAUNCH_S = 4e-6
"""Of a host that launches kernels from compiled code: 3.8 us each (NVIDIA, "Getting started with CUDA graphs", 2019)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One row, rebuilt. key: what its captured program depends on (all rows of one key share one). micro_batch: samples, at most where
    their number is the planner's to choose. measured: step_time_s and memory_bytes (None where the source does not print them).
    first_stage: the memory is that of rank 0. chosen: what its source does not state, and the planner chooses; '' for nothing."""

    row: Mapping[str, str]
    number: int
    key: tuple[object, ...]
    dims: Decoder | cnn.Cnn
    dtype: torch.dtype
    image: int
    gpus: int
    global_batch: int
    micro_batch: int
    pins: Pins
    recipe: Recipe
    optimizer: str
    cluster: Cluster
    step_time_s: float | None
    memory_bytes: float | None
    first_stage: bool
    failed: bool
    flagged: str
    chosen: str = ""

    @property
    def group(self) -> tuple[str, str, str, int, int]:
        """(source, model, sequence length, GPUs, global batch): runs that differ in nothing but the plan."""
        return self.row["source"], self.row["model"], self.row["seq_len"], self.gpus, self.global_batch

    @property
    def software(self) -> str:
        """What carried it out: its source, and the framework where a source has several."""
        return f"{self.row['source']} ({MXNET})" if MXNET in self.row["extra"] else self.row["source"]

    @property
    def compiled(self) -> bool:
        return SOFTWARE.get(self.row["source"], CURRENT).compiled

    @property
    def parallelism(self) -> str:
        zero = f" zero{self.pins.zero}" if self.pins.zero else ""
        split = f"pp{self.pins.pp}" if self.pins.dp is None else f"dp{self.pins.dp} tp{self.pins.tp} pp{self.pins.pp}{zero}"
        return f"{split} mb{self.micro_batch if self.pins.micro_batches else '?'}"


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file. Raises Skip if it lacks columns."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
        if missing:
            raise Skip(f"{path.name} lacks the columns {', '.join(missing)}")
        return [{k: (v or "").strip() for k, v in row.items() if k is not None} for row in reader]


def rebuilt(row: Mapping[str, str], number: int) -> Run:
    """A row as a Run. Skip where it does not say enough, or asks for what plans cannot express. What one dimension is missing of is the
    planner's to choose: how the GPUs are divided between data and tensor parallel, or how many micro-batches there are."""
    software = SOFTWARE.get(row["source"], CURRENT)
    for column, what in (("cp", "context parallelism"), ("ep", "expert parallelism")):
        if _int(row, column, 1) != 1:
            raise Skip(f"{what} cannot be planned yet")
    if "offload" in row["sharding"].lower():
        raise Skip("offload of optimizer states to the host cannot be planned yet")
    gpus, batch = _need(row, "n_gpus"), _need(row, "global_batch")
    dp, tp, pp, micro, count, chosen = _layout(row, gpus, batch)
    dtype = _dtype(row["precision"])
    dims, image = _dims(row, software)
    each = _int(row, "vpp", 1)
    if each > 1 and pp == 1:
        raise Skip("several stages on each rank, and no pipeline")
    zero = 0 if dp == 1 else None if dp is None else _zero(row["sharding"])
    pins = Pins(
        dp=dp, tp=tp, pp=pp, micro_batches=count, zero=zero, shard=dp if zero else None,
        recompute=_recompute(row["act_ckpt"]), schedule="interleaved" if each > 1 else "1f1b", virtual_stages=each if each > 1 else None,
        sequence_parallel=None if tp in (None, 1) else _int(row, "seq_parallel", 0) == 1, blocks=_blocks(dims, pp * each, software),
    )  # fmt: skip
    memory = _float(row, "peak_mem") if chosen != MICRO_BATCHES else None  # it depends on them
    unit = next((size for mark, size in _UNITS.items() if row["peak_mem_unit"].lower().startswith(mark)), None)
    if memory and unit is None:
        raise Skip(f"the unit of memory {row['peak_mem_unit']!r} is not known")
    cluster = _cluster(row)
    if software.compiled:
        cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, launch_s=COMPILED_LAUNCH_S))
    context = cluster.gpu.context_bytes if "with the framework's context" in row["peak_mem_kind"] else 0
    step = _float(row, "step_time_s")
    if row["status"] == "ok" and step is None and memory is None:
        raise Skip("neither a step time nor a memory figure is printed")
    return Run(
        row=row, number=number, dims=dims, dtype=dtype,
        key=(dims, dtype, image, micro if image else 0, row["gpu"], row["gpus_per_node"], row["inter_link"]),
        image=image, gpus=gpus, global_batch=batch, micro_batch=micro, pins=pins, recipe=_recipe(row, software, dtype),
        optimizer=_optimizer(row, dims), cluster=cluster, step_time_s=step,
        memory_bytes=memory * unit - context if memory and unit else None,
        first_stage="rank 0" in row["peak_mem_kind"] or "first" in row["peak_mem_kind"], failed=row["status"] != "ok",
        flagged=_doubts(row["flags"]), chosen=chosen,
    )  # fmt: skip


def load(paths: Iterable[Path], limit: int | None = None) -> tuple[list[Run], Counter[str], int]:
    """(runs that can be rebuilt, reasons for those that cannot, rows in all). Skip if a file is no table of runs."""
    runs, skipped, total = list[Run](), Counter[str](), 0
    for path in paths:
        rows = list(enumerate(read(path), 2))  # as an editor numbers the lines
        if limit is not None and limit < len(rows):
            rows = [rows[k * len(rows) // limit] for k in range(limit)]
        total += len(rows)
        for number, row in rows:
            try:
                runs.append(rebuilt(row, number))
            except Skip as reason:
                skipped[str(reason)] += 1
    return runs, skipped, total


def model_of(dims: Decoder | cnn.Cnn, dtype: torch.dtype, image: int, batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model on the meta device with inputs of that batch. image: their side, of a convolutional network."""
    if isinstance(dims, Decoder):
        ids = torch.zeros(batch, dims.length, dtype=torch.long, device="meta")
        return decoder(dims, dtype), {"ids": ids, "labels": ids}
    with torch.device("meta"):
        model = dims.build().to(dtype).train()
        images = torch.zeros(batch, 3, image, image, dtype=dtype)
        return model, {"images": images, "labels": torch.zeros(batch, dtype=torch.long)}


# ------------------------------------------------------------------------------------------------------------- cells
def _float(row: Mapping[str, str], name: str) -> float | None:
    text = row.get(name, "")
    try:
        return float(text) if text else None
    except ValueError as e:
        raise Skip(f"{name} is no number") from e


def _int(row: Mapping[str, str], name: str, default: int) -> int:
    value = _float(row, name)
    return default if value is None else int(value)


def _need(row: Mapping[str, str], name: str) -> int:
    value = _float(row, name)
    if value is None or value < 1:
        raise Skip(f"{name} is not stated")
    return int(value)


def _layout(row: Mapping[str, str], gpus: int, batch: int) -> tuple[int | None, int | None, int, int, int | None, str]:
    """(dp, tp, pp, samples of a micro-batch on a rank, how many micro-batches, what is the planner's to choose)."""
    pp, micro, count = _need(row, "pp"), _int(row, "micro_batch", 0), _int(row, "grad_accum", 0)
    if not row["dp"] and not row["tp"] and gpus > pp:
        if not _chosen_by_a_solver(row["sharding"]):
            raise Skip("dp is not stated")
        if gpus % pp or batch % _need(row, "grad_accum"):
            raise Skip("the global batch does not divide into the micro-batches")
        return None, None, pp, batch // count, count, "data and tensor parallel"
    dp, tp = (1, 1) if not row["dp"] and not row["tp"] else (_need(row, "dp"), _need(row, "tp"))
    if dp * tp * pp != gpus:
        raise Skip("dp x tp x pp is not the number of GPUs")
    if not micro and not count and not batch % dp and row["family"].lower() != "cnn":  # batch norm is each micro-batch's own
        return dp, tp, pp, batch // dp, None, MICRO_BATCHES
    micro = micro or batch // dp // _need(row, "grad_accum")
    if micro < 1 or batch % (dp * micro):
        raise Skip("the global batch does not divide into the micro-batches")
    return dp, tp, pp, micro, batch // dp // micro, ""


def _chosen_by_a_solver(sharding: str) -> bool:
    """Whether how the GPUs are divided was chosen by the run's own software."""
    return sharding.lower().startswith("auto")


def _doubts(flags: str) -> str:
    """What makes a row doubtful: remarks on other columns than those compared do not."""
    harmless = ("printed MFU", "config appears", "second row for same", "GA not stated", "did not run")
    return "; ".join(part for part in (p.strip() for p in flags.split(";")) if part and not part.startswith(harmless))


def _dtype(text: str) -> torch.dtype:
    low = text.lower()
    if "fp8" in low:
        raise Skip("fp8 cannot be planned yet")
    for mark, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", torch.float32), ("fp32", torch.float32)):
        if mark in low:
            return dtype
    raise Skip("the precision is not stated" if not text else f"the precision {text!r} is not known")


def _zero(text: str) -> int:
    low = text.lower()
    if low in ("", "none", "ddp") or "zero-0" in low:
        return 0
    if "zero-1" in low or "distributed optimizer" in low:
        return 1
    if "zero-2" in low:
        return 2
    if "full_shard" in low or "zero-3" in low:
        return 3
    raise Skip(f"the sharding {text!r} cannot be planned")


def _recompute(text: str) -> str:
    low = text.lower()
    if low.startswith("full"):
        return "full"
    if low.startswith("none"):
        return "none"
    raise Skip("what runs again selectively is not stated" if "selective" in low else "recomputation is not stated")


def _recipe(row: Mapping[str, str], software: Software, dtype: torch.dtype) -> Recipe:
    text = row["precision"].lower()
    half = dtype != torch.float32
    summed = 4 if half and ("fp32 grad" in text or "amp" in text) else None
    compiled = row.get("compile", "").lower() not in ("", "0", "no", "none", "false", "eager")
    # MXNet's networks of these tables add and rectify within the kernels of its batch norm, and keep channels last, in half precision
    # alone (--fuse-bn-relu, --fuse-bn-add-relu, --conv-layout NHWC in MxNet/Classification/RN50v1.5/runner of the same repository)
    by_mxnet = MXNET in row["extra"] and half
    recipe = dataclasses.replace(
        software.recipe, fuses=software.recipe.fuses or compiled or by_mxnet, channels_last="nhwc" in text or by_mxnet
    )  # fmt: skip
    if "no gradient bucketing" in row["extra"]:
        recipe = dataclasses.replace(recipe, bucket_bytes=WHOLE, overlaps_reduction=False)
    return dataclasses.replace(
        recipe, gradient_itemsize=summed, accumulates="grad accum" in text, gradient_copies=1 if "grad accum" in text else 0,
        master_itemsize=4 if half and "pure" not in text else 0, state_itemsize=4 if half and "pure" not in text else None,
    )  # fmt: skip


def _dims(row: Mapping[str, str], software: Software) -> tuple[Decoder | cnn.Cnn, int]:
    family = row["family"].lower()
    if family == "cnn":
        described = cnn.described(row["model"], extra=row["extra"], source=row["source"])
        if described is None:
            raise Skip(f"the network {row['model']!r} is not one of those that can be rebuilt")
        return described, cnn.image_of(row["model"], extra=row["extra"])
    if not family.startswith(("gpt", "llama", "moe")):
        raise Skip(f"the family {row['family']!r} is not known")
    llama = family.startswith("llama")
    experts = _experts(row) if "moe" in family else 0
    heads = _need(row, "n_heads")
    if _need(row, "hidden") % heads or heads % _int(row, "n_kv_heads", heads):
        raise Skip("the heads do not divide the hidden size, or one another")
    dims = Decoder(
        layers=_need(row, "n_layers"), hidden=_need(row, "hidden"), heads=heads, kv_heads=_int(row, "n_kv_heads", heads),
        ffn=_need(row, "ffn"), vocabulary=_need(row, "vocab"), length=_need(row, "seq_len"), tied=_int(row, "tied_emb", 0) == 1,
        gated=llama, norm="rms" if llama else "layer", bias=not (llama or "mpt" in family), positions="rotary" if llama else "learned",
        fused_attention=software.fused_attention or "flash" in row["extra"].lower(), dropout=software.dropout, experts=experts,
        fused_loss=software.fused_loss,
    )  # fmt: skip
    return dims, 0


def _stated(row: Mapping[str, str]) -> dict[str, str]:
    """What a row says besides, as name=value."""
    return dict(part.strip().split("=") for part in row["extra"].split(";") if part.count("=") == 1)


def _optimizer(row: Mapping[str, str], dims: Decoder | cnn.Cnn) -> str:
    name = _stated(row).get("optimizer", "").lower()
    if name not in OPTIMIZERS:
        raise Skip(f"the optimizer {name!r} is not known")
    return OPTIMIZERS[name] or ("adamw" if isinstance(dims, Decoder) else "sgd_momentum")


def _experts(row: Mapping[str, str]) -> int:
    """Of each second layer, whose tokens are grouped by sample."""
    stated = _stated(row)
    if "every second layer" not in row["extra"] or not stated.get("experts", "").isdigit():
        raise Skip("how many experts there are in which layers is not stated")
    if stated.get("expert_group", row["seq_len"]) != row["seq_len"].partition(".")[0]:
        raise Skip("experts whose tokens are grouped otherwise than by sample are not rebuilt")
    return int(stated["experts"])


_UNITS = {"mib": 2.0**20, "gib": 2.0**30, "mb": 1e6, "gb": 1e9}
_CLUSTERS = {
    "H100": "dgx-h100", "H200": "dgx-h200", "B200": "dgx-b200", "A100": "dgx-a100", "V100": "p3.16xlarge", "L40S": "l40s-8x",
    "4090": "rtx4090-8x", "MI300": "mi300x-8x", "MI250": "mi250x-8x",
}  # fmt: skip


@functools.lru_cache
def _cluster_of(gpu: str, per_node: int, inter: str) -> Cluster:
    if "EFA" in inter and "H100" in gpu:
        name = "p5"
    elif "EFA" in inter and "A100" in gpu:
        name = "p4de" if "80" in gpu else "p4d"
    elif "V100" in gpu and per_node == 16:
        name = "dgx-2"
    else:
        name = next((c for mark, c in _CLUSTERS.items() if mark in gpu), "")
    if not name:
        raise Skip(f"the GPU {gpu!r} is not in the catalogue")
    cluster = load_cluster(name)
    return with_network(dataclasses.replace(cluster, gpu=_board(cluster.gpu, gpu)), inter)


def _board(usual: Gpu, text: str) -> Gpu:
    """The board of a chip that has the memory that a source states; the machine's usual one where it states none, or one that is not in
    the catalogue."""
    stated = re.search(r"(\d+)\s*GB", text)
    chip, _, size = usual.name.rpartition("-")
    if stated is None or "not stated" in text or not size.endswith("gb") or size == f"{stated[1]}gb":
        return usual
    try:
        return load_gpu(f"{chip}-{stated[1]}gb")
    except UnknownHardware:
        return usual


def _blocks(dims: Decoder | cnn.Cnn, pp: int, software: Software) -> tuple[int, ...] | None:
    """Layers of each stage, as the software divides them."""
    if not isinstance(dims, Decoder) or pp == 1:
        return None
    if software.stages == "layers":
        return tuple((s + 1) * dims.layers // pp - s * dims.layers // pp for s in range(pp))
    layer = 2 * dims.hidden * (dims.hidden + dims.hidden // dims.heads * dims.kv_heads) + (3 if dims.gated else 2) * dims.ffn * dims.hidden
    total = dims.layers * layer + dims.vocabulary * dims.hidden
    counts, done, stage = [0] * pp, 0, 0
    for _ in range(dims.layers):
        counts[stage] += 1
        done += layer
        stage += done * pp > total * (stage + 1) and stage < pp - 1
    for s in range(pp - 1):  # a plan has no stage without layers but the last, which has the head
        if not counts[s]:
            fullest = max(k for k in range(s) if counts[k] == max(counts[:s]))
            counts[fullest], counts[s] = counts[fullest] - 1, 1
    return tuple(counts)


def _cluster(row: Mapping[str, str]) -> Cluster:
    return _cluster_of(row["gpu"], _int(row, "gpus_per_node", 8), row["inter_link"])
