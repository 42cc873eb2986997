"""Models as people parallelise them by hand with torch's own engines: DDP, FSDP2, tensor parallel after Megatron's manner, GPipe.

Each engine takes a small model of `measured` and its global batch, on all workers, and returns what a step computes and the parameters that
this worker's optimizer updates; None where nobody would write that plan by hand for that model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks._decoders import Decoder
from benchmarks._small import Mlp

__all__ = ["ENGINES", "ByHand"]

Batch = dict[str, Tensor]
COLUMNS = ("query", "key", "value", "up", "linear1")  # split by outputs, and what follows by inputs
ROWS = ("out", "down", "linear2")


@dataclass(frozen=True, slots=True)
class ByHand:
    """compute: forward and backward of a step. parameters: of this worker."""

    compute: Callable[[], object]
    parameters: Iterable[nn.Parameter]


def _part(batch: Batch) -> Batch:
    """This worker's samples."""
    return {name: value.chunk(dist.get_world_size())[dist.get_rank()].contiguous() for name, value in batch.items()}


def _of_module(module: nn.Module, batch: Batch) -> ByHand:
    return ByHand(lambda: module(**batch).backward(), module.parameters())


def _mixes_samples(model: nn.Module) -> bool:
    """Batch norm over each worker's samples is another model; SyncBatchNorm has no kernel for CPUs."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def ddp(model: nn.Module, batch: Batch) -> ByHand | None:
    if _mixes_samples(model):
        return None
    return _of_module(DistributedDataParallel(model), _part(batch))


def fsdp2(model: nn.Module, batch: Batch) -> ByHand | None:
    if _mixes_samples(model):
        return None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)][:1]:
        for layer in child.children():
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _of_module(model, _part(batch))


def megatron(model: nn.Module, batch: Batch) -> ByHand | None:
    """The matrices of a layer by columns and by rows in turns; those of a chain of single ones by columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = dict[str, ParallelStyle]()
    if isinstance(model, Mlp):
        styles = {f"layers.{k}": ColwiseParallel(output_layouts=Replicate()) for k in range(len(model.layers))}
    elif isinstance(dims := getattr(model, "d", None), Decoder) and dims.kv_heads % dist.get_world_size() == 0:
        ranks = dist.get_world_size()
        own = replace(dims, hidden=dims.hidden // ranks, heads=dims.heads // ranks, kv_heads=dims.kv_heads // ranks)
        for module in model.modules():
            if hasattr(module, "query"):
                module.d = own  # type: ignore[assignment]  # each rank has its part of the heads
        last = {name: name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        styles = {name: ColwiseParallel() for name, end in last.items() if end in COLUMNS}
        styles |= {name: RowwiseParallel() for name, end in last.items() if end in ROWS}
    if not styles:
        return None
    return _of_module(parallelize_module(model, mesh, styles), batch)


def gpipe(model: nn.Module, batch: Batch) -> ByHand | None:
    """Stages of equally many layers, as many micro-batches as twice the stages."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == stages - 1
    layers = list(getattr(model, "layers", ())) if isinstance(model, Mlp) or isinstance(getattr(model, "d", None), Decoder) else []
    count, (given, target) = 2 * stages, batch.values()
    if len(layers) < stages or given.shape[0] % count:
        return None
    mine = layers[rank * len(layers) // stages : (rank + 1) * len(layers) // stages]
    part: nn.Module = _Chain(mine) if isinstance(model, Mlp) else _Layers(model, mine, first, last)
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    runner = ScheduleGPipe(stage, count, loss_fn=F.mse_loss if isinstance(model, Mlp) else _cross_entropy)

    def compute() -> None:
        runner.step(*((given,) if first else ()), target=target if last else None, return_outputs=False)

    return ByHand(compute, part.parameters())


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _Chain(nn.Module):
    """Some layers of an Mlp."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


class _Layers(nn.Module):
    """Some layers of a decoder, with what comes before the first or after the last of them."""

    def __init__(self, model: nn.Module, layers: list[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        self.tokens, self.positions = (model.get_submodule(name) if first else None for name in ("tokens", "positions"))
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = (model.get_submodule(name) if last else None for name in ("norm", "head"))

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x, None)
        return self.head(self.norm(x)).float() if self.norm is not None and self.head is not None else x


ENGINES: dict[str, Callable[[nn.Module, Batch], ByHand | None]] = {"ddp": ddp, "fsdp2": fsdp2, "megatron": megatron, "gpipe": gpipe}
