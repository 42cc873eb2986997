"""Six questions in each of which one known constraint binds; models on the meta device, so that nothing is allocated."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.explain import Asked, Study
from autopar.ir import Program
from autopar.planner import Pins
from cost_models.cluster import Cluster, load_cluster, load_link

__all__ = ["CASES", "masked", "program_of", "study_of"]

GIB = 2**30


class Block(nn.Module):
    """fused: attention is one operator, which gives other bits each time."""

    def __init__(self, width: int, heads: int, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.fused else torch.softmax(q @ k.transpose(2, 3), -1) @ v
        x = x + self.out(h.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, fused: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, fused) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@functools.cache
def program_of(width: int, layers: int, heads: int, batch: int, length: int, vocabulary: int = 8192, *, fused: bool = True) -> Program:
    with torch.device("meta"):
        model = Gpt(width, layers, heads, vocabulary, fused).to(torch.bfloat16)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    program = capture(model, {"input_ids": ids, "labels": ids}).program
    _RECAPTURES[id(program)] = lambda other: program_of(width, layers, heads, other, length, vocabulary, fused=fused)
    return program


_RECAPTURES: dict[int, Callable[[int], Program]] = {}  # of programs that are kept


def study_of(program: Program, gpus: int, cluster: str | Cluster = "dgx-h100", **asked: object) -> Study:
    described = load_cluster(cluster) if isinstance(cluster, str) else cluster
    question = Asked(gpus=gpus, cluster=described, optimizer="adamw", precision="bf16", batch=program.batch_size, **asked)  # type: ignore[arg-type]
    return Study(program=program, asked=question, recapture=_RECAPTURES.get(id(program)))


def _slow_link() -> Cluster:
    return dataclasses.replace(load_cluster("dgx-h100"), inter=load_link("ethernet-10"), links_per_node=1)


CASES: dict[str, Callable[[], Study]] = {
    "memory": lambda: study_of(program_of(4096, 4, 32, 32, 2048), 8, memory_limit_bytes=7 * GIB),
    "network": lambda: study_of(program_of(2048, 2, 16, 64, 1024), 16, _slow_link(), pins=Pins(dp=16, zero=0)),
    "heads": lambda: study_of(program_of(2048, 2, 4, 8, 2044), 8, pins=Pins(tp=8)),  # nor do the queries divide
    "batch": lambda: study_of(program_of(4096, 4, 32, 2, 2048), 16, pins=Pins(pp=4)),
    "launches": lambda: study_of(program_of(64, 2, 4, 8, 32, 256, fused=False), 2),
    "nothing": lambda: study_of(program_of(4096, 2, 32, 64, 4096), 8, pins=Pins(dp=8)),
}

_FIGURE = re.compile(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?(?:[kMBT]\b|%)?(?: (?:GiB|MiB|KiB|TiB|B|ms|us|s)\b)?")


def masked(text: str) -> str:
    """The text without its figures, bars and columns: a better price is no other explanation."""
    lines = [re.sub(r"[#.]{3,}", "|", line) for line in text.splitlines() if not re.fullmatch(r"[ -]+", line)]
    words = " ".join(re.sub(r"\s+", " ", _FIGURE.sub("~", line)) if line else "\n" for line in lines)
    return re.sub(r" *\n *", "\n\n", words).strip() + "\n"
