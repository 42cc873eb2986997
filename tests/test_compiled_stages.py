"""torch.compile of what emitted modules compute between their collectives: what is in a part, how often it is compiled, its results."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.render.compiled import PART, check_backend, in_parts
from autopar.run import WorkerPool
from tests.checkpoint_model import Block, D, V, adamw, batch, difference, trained, whole_state

SOURCE = '''
import torch

def block_0(w, mesh, h, mask):
    a = torch.tanh(h)
    b = a * w["scale"]
    del a
    c = C.all_reduce(b, mesh.tp)
    b = c + h
    d = b.reshape(4, 4)
    del c, h
    w["seen"].add_(1)
    e = torch.relu_(d)
    f = w["gate"](e)
    g = L.masked(f, mesh.tp)
    i = torch.arange(4, device=mesh.device)
    j = i + d
    k, m = torch.split(j, 2)
    n = torch.neg(k, out=m)
    return n, b

class Stage0(Stage):
    def forward(self, *, x, **unused):
        w, mesh = self.weights, self.mesh
        y = x + 1
        z = y * 2
        h, _ = recompute(block_0, w.at("0"), mesh, z, y)
        del y, z
        return (h,)
'''


@pytest.mark.pure
def test_parts_are_what_only_computes() -> None:
    tree = in_parts(ast.parse(SOURCE))
    functions = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [name for name in functions if PART in name] == ["block_0_part_0", "block_0_part_1", "block_0_part_2", "Stage0_part_0"]
    assert functions["block_0_part_0"].splitlines() == [
        "def block_0_part_0(h, given_0):", "    a = torch.tanh(h)", "    b = a * given_0", "    return (b,)",
    ]  # fmt: skip
    assert "arange(4, device=given_0)" in functions["block_0_part_2"]
    (stage,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert functions["block_0"].splitlines() == [
        "def block_0(w, mesh, h, mask):",
        "    b, = block_0_part_0(h, w['scale'])",
        "    c = C.all_reduce(b, mesh.tp)",
        "    b, d = block_0_part_1(c, h)",
        "    del c, h",
        "    w['seen'].add_(1)",
        "    e = torch.relu_(d)",
        "    f = w['gate'](e)",
        "    g = L.masked(f, mesh.tp)",
        "    k, m = block_0_part_2(d, mesh.device)",
        "    n = torch.neg(k, out=m)",
        "    return (n, b)",
    ]
    assert "y, z = Stage0_part_0(x)" in ast.unparse(stage)
    assert "del y, z" in ast.unparse(stage)


@pytest.mark.pure
def test_backends_by_name() -> None:
    assert [check_backend(given) for given in (True, False, "aot_eager")] == ["inductor", None, "aot_eager"]
    with pytest.raises(ValueError, match=r"compile_stages='inductr': torch.compile has no such backend; it has .*inductor"):
        check_backend("inductr")
    with pytest.raises(TypeError, match="compile_stages must be True, False or the name of a backend; got int"):
        check_backend(3)  # type: ignore[arg-type]


class Decoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.wte(ids)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).view(-1, V), labels.view(-1))


def decoder(layers: int = 2) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers).double()


def _graphs(layers: int) -> int:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = autopar.compile(decoder(layers), 1, example_inputs=batch(0), cluster="cpu", compile_stages="aot_eager")
    model(*batch(0)).backward()
    model(*batch(1)).backward()
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.pure
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch's own front end
def test_a_block_of_many_layers_is_compiled_once() -> None:
    assert _graphs(2) == _graphs(4) > 1


# ------------------------------------------------------------------------------------------------------------- it is right
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "micro_batches": 2, "recompute": "selective"},
    "tp2": {"tp": 2, "recompute": "full"},
    "pp2": {"pp": 2, "micro_batches": 4, "schedule": "1f1b", "recompute": "full"},
    "zero3": {"dp": 2, "zero": 3, "recompute": "full"},
}


def training(pins: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    return _trained(autopar.compile(decoder(), 2, example_inputs=batch(0), cluster="cpu", pins=pins, compile_stages="aot_eager"))


def _trained(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps, evaluation, and a step more."""
    optimizer = adamw(model)
    losses = trained(model, optimizer, range(2))
    model.eval()
    with torch.no_grad():
        losses.append(model(*batch(7)).item())
    model.train()
    losses += trained(model, optimizer, range(2, 3))
    return losses, whole_state(model)


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2, backend="gloo") as pool:
        yield pool


@pytest.mark.gloo
@pytest.mark.parametrize("plan", PLANS)
def test_it_trains_as_on_one_process(pair: WorkerPool, plan: str) -> None:
    losses, state = _trained(decoder())
    for found, whole in pair.run(training, PLANS[plan], timeout_s=500):
        assert found == pytest.approx(losses, rel=1e-11)
        assert difference(whole, state) < 1e-11
