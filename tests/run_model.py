"""A small model and its parallel forms, written by hand as an emitted module is written.

Every form is one file for all meshes: collectives over an axis of size 1 are the identity. Shapes: B batch, T positions,
D = 16 channels, V = 32 words.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.run import BufferSpec, InputSpec, Manifest, Mesh, ParamSpec, Stage, Weights, recompute
from autopar.run import collectives as C
from autopar.run import local_ops as L
from cost_models.rests import RESTS

B, T, D, V, LAYERS = 16, 4, 16, 32, 4


# ------------------------------------------------------------------------------------------------------- the original
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(D)
        self.fc = nn.Linear(D, 4 * D)
        self.proj = nn.Linear(4 * D, D)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.proj(F.gelu(self.fc(self.ln(h))))


class Model(nn.Module):
    """Tied embedding and head, a skip connection over all layers, buffers of every kind, a ragged mean over labels."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.wte.weight
        self.frozen = nn.Parameter(torch.randn(D), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.rand(D), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        first = self.wte(input_ids) + self.frozen
        h = first
        for layer in self.layers:
            h = layer(h)
        self.seen += 1
        logits = self.head(self.ln_f(h + first * self.scale))
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def batch(seed: int, size: int = B) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (size, T), generator=generator)
    ignored = torch.rand(size, T, generator=generator) < torch.linspace(0, 0.9, size)[:, None]  # ragged over the ranks
    return {"input_ids": torch.randint(V, (size, T), generator=generator), "labels": labels.masked_fill(ignored, -100)}


# ------------------------------------------------------------------------------------- tensor parallel as Megatron has it
def embed(w: Weights, mesh: Mesh, input_ids: Tensor) -> Tensor:
    return C.all_reduce(L.masked_embedding(input_ids, w["wte.weight"], mesh.tp), mesh.tp) + w["frozen"]


def block(w: Weights, mesh: Mesh, h: Tensor) -> Tensor:
    x = C.copy_to(F.layer_norm(h, (D,), w["ln.weight"], w["ln.bias"]), mesh.tp)
    x = F.gelu(F.linear(x, w["fc.weight"], w["fc.bias"]))
    return h + C.all_reduce(F.linear(x, w["proj.weight"]), mesh.tp) + w["proj.bias"]


def loss_of(w: Weights, mesh: Mesh, h: Tensor, first: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    x = C.copy_to(F.layer_norm(h + first * w["scale"], (D,), w["ln_f.weight"], w["ln_f.bias"]), mesh.tp)
    logits = F.linear(x, w["head.weight"])  # S(2)
    total = L.cross_entropy_sum_vocab(logits.flatten(0, 1), labels.flatten(), mesh.tp)
    return C.all_reduce(total / count, mesh.dp)


def prologue(w: object, mesh: Mesh, *, labels: Tensor) -> dict[str, Tensor]:
    return {"count": C.all_reduce((labels != -100).sum(), mesh.dp)}


# ---------------------------------------------------------------------------------------------- the same, over the sequence
def block_sequence(w: Weights, mesh: Mesh, h: Tensor) -> Tensor:
    """h S(1) over tp; the norm and the second bias are R."""
    x = C.all_gather(F.layer_norm(h, (D,), w["ln.weight"], w["ln.bias"]), mesh.tp, 1)
    x = F.gelu(F.linear(x, w["fc.weight"], w["fc.bias"]))
    return h + C.reduce_scatter(F.linear(x, w["proj.weight"]), mesh.tp, 1) + w["proj.bias"]


# -------------------------------------------------------------------------------------------------------------- stages
def stages(pp: int, batch_local: int, *, recomputed: bool, sequence: bool) -> tuple[type[Stage], ...]:
    """One class for each of pp stages, of LAYERS / pp layers each. batch_local: B of one rank and micro-batch."""
    activation = ((batch_local, T, D), "float64")
    each = LAYERS // pp
    run_block = block_sequence if sequence else block

    def made(index: int) -> type[Stage]:
        class OneStage(Stage):
            receives = (activation, activation) if index else ()
            sends = (activation, activation) if index < pp - 1 else (((), "float64"),)

            def forward(self, *received: Tensor, input_ids: Tensor, labels: Tensor, count: Tensor) -> tuple[Tensor, ...]:
                w, mesh = self.weights, self.mesh
                if index == 0:
                    first = embed(w, mesh, input_ids)
                    h = first
                else:
                    h, first = received
                if sequence:
                    h = C.split(h, mesh.tp, 1)
                for i in range(index * each, (index + 1) * each):
                    at = w.at(f"layers.{i}")
                    h = recompute(run_block, at, mesh, h) if recomputed else run_block(at, mesh, h)
                if sequence:
                    h = C.gather(h, mesh.tp, 1)
                if index < pp - 1:
                    return h, first
                w["seen"].add_(1)
                return (loss_of(w, mesh, h, first, labels, count),)

        return OneStage

    return tuple(made(i) for i in range(pp))


def emitted(
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    zero: int = 0,
    shard: int | None = None,
    recomputed: bool = False,
    sequence: bool = False,
    batch_size: int = B,
    units: bool = True,
) -> Any:
    """The emitted module for a mesh. units: ZeRO-3 gathers the parameters of a layer together, else each alone."""
    count = pp * virtual_stages
    of_layer = LAYERS // count
    normed = "R" if sequence else "I"

    def param(name: str, shape: tuple[int, ...], tp_layout: str = "I", **more: Any) -> ParamSpec:
        part = name.split(".")
        layer = int(part[1]) if part[0] == "layers" else -1 if part[0] in ("wte", "frozen") else LAYERS
        stage = min(max(layer, 0) // of_layer, count - 1)
        more.setdefault("stages", (stage,))
        return ParamSpec(
            name=name,
            shape=shape,
            dtype="float64",
            layouts={"dp": "R", "tp": tp_layout},
            zero_dim=(1 if name.endswith("fc.weight") else 0) if zero and name != "unused" else None,
            rest=f"zero{zero}",
            unit=layer + 1 if RESTS[f"zero{zero}"].gathered == "use" and units else None,
            **more,
        )

    tied = param("wte.weight", (V, D), "S(0)", aliases=("head.weight",), stages=(0, count - 1) if count > 1 else (0,))
    params = [tied, param("frozen", (D,), trainable=False), param("unused", (3,))]
    for i in range(LAYERS):
        at = f"layers.{i}"
        params += [param(f"{at}.ln.weight", (D,), normed), param(f"{at}.ln.bias", (D,), normed)]
        params += [param(f"{at}.fc.weight", (4 * D, D), "S(0)"), param(f"{at}.fc.bias", (4 * D,), "S(0)")]
        params += [param(f"{at}.proj.weight", (D, 4 * D), "S(1)"), param(f"{at}.proj.bias", (D,), normed)]
    params += [param("ln_f.weight", (D,)), param("ln_f.bias", (D,))]
    over = {"dp": "S(0)"} | ({"time": "S(0)"} if micro_batches > 1 else {})
    return SimpleNamespace(
        MANIFEST=Manifest(
            model="Model",
            mesh={"pp": pp, "dp": dp, "tp": tp},
            micro_batches=micro_batches,
            schedule=schedule,
            virtual_stages=virtual_stages,
            rest=f"zero{zero}",
            shard=shard,
            params=tuple(params),
            buffers=(
                BufferSpec(name="seen", shape=(), dtype="int64", stages=(count - 1,)),
                BufferSpec(name="scale", shape=(D,), dtype="float64", persistent=False, stages=(count - 1,)),
            ),
            inputs=tuple(
                InputSpec(name=n, path=(n,), shape=(batch_size, T), dtype="int64", layouts=over) for n in ("input_ids", "labels")
            ),
            positional=("input_ids", "labels"),
        ),
        STAGES=stages(count, batch_size // dp // micro_batches, recomputed=recomputed, sequence=sequence),
        prologue=prologue,
    )


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
