"""Models on the meta device: rank 0 alone has the data, or it is loaded once every rank has its parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture, program_hash
from autopar.errors import CaptureError
from autopar.run import WorkerPool
from autopar.run.part import local

PLANS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "zero3": {"dp": 2, "zero": 3}}


class Net(nn.Module):
    """Tokens through a table that is the output layer too, a batch norm, and buffers: one that is in no checkpoint, one that is asked for,
    one that counts."""

    pos: Tensor
    scale: Tensor
    doubles: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(32, 16), nn.BatchNorm1d(16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 32, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("pos", torch.arange(8))
        self.register_buffer("scale", torch.linspace(1, 2, 16), persistent=False)
        self.register_buffer("doubles", torch.ones((), dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.table(x) * self.scale + self.table(self.pos[None].expand(len(x), -1))
        if self.doubles:
            h = 2 * h
        self.calls += 1
        h = self.norm(h.flatten(0, 1)).view(len(x), 8, 16)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return F.cross_entropy(self.out(h).flatten(0, 1), y.flatten())


class Plain(nn.Module):
    """Without buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.tanh(self.up(x))), y)


class Adapted(Plain):
    """A frozen layer with an addition of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.low, self.high = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.tanh(self.up(x) + self.high(self.low(x)))), y)


class ByDevice(Plain):
    """Asks on what device it is, and computes the same in another way there."""

    differs = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.up.weight.device.type == "meta":
            x = x.mul(2).div(2 + self.differs)
        return super().forward(x, y)


class Otherwise(ByDevice):
    """The same, but that it is not the same there."""

    differs = True


class WithTable(Plain):
    """With a tensor in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.ones(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + self.bias, y)


def batch(index: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(index)
    return torch.randint(0, 32, (size, 8), generator=g), torch.randint(0, 32, (size, 8), generator=g)


def floats() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, generator=g).double(), torch.randn(8, 8, generator=g).double()


@contextlib.contextmanager
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def built(kind: type[nn.Module] = Net, *, meta: bool = False, buffers: bool = False) -> Any:
    """The model in float64. meta: without data; buffers: which its buffers have."""
    torch.manual_seed(0)
    with float64():
        model: nn.Module = kind()
        if not meta:
            return model
        with torch.device("meta"):
            bare: nn.Module = kind()
    for path, module in bare.named_modules() if buffers else ():
        module._buffers.update(model.get_submodule(path)._buffers)
    return bare


def _trained(model: Any, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of steps and of an evaluation, with batches of other sizes, and the state after them."""
    losses = []
    for index, size in enumerate((16, 16, 8, 12, 16)):
        if index == 2:
            model.eval()
            with torch.no_grad():
                losses.append(model(*batch(index, size)).item())
            model.train()
            continue
        optimizer.zero_grad()
        loss = model(*batch(index, size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.full_state_dict() if isinstance(model, autopar.ParallelModule) else model.state_dict())


def _compiled(model: nn.Module, pins: dict[str, Any], *, deferred: bool = False, **more: Any) -> Any:
    inputs = None if deferred else more.pop("example_inputs", batch())
    return autopar.compile(model, 2, example_inputs=inputs, cluster="cpu", pins=pins, **more)


def _alike(found: tuple[list[float], dict[str, Tensor]]) -> bool:
    plain = built()
    losses, state = _trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    same = found[1].keys() == state.keys() and all(torch.allclose(found[1][n], state[n], rtol=1e-9, atol=1e-12) for n in state)
    return same and found[0] == pytest.approx(losses, rel=1e-12)


def _rank_0_has_it(pins: dict[str, Any], deferred: bool) -> bool:
    """The optimizer is made of the model's parameters before they have memory."""
    model = built(meta=dist.get_rank() > 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return _alike(_trained(_compiled(model, pins, deferred=deferred), optimizer))


@pytest.mark.gloo
@pytest.mark.parametrize("deferred", [False, True], ids=["planned at once", "planned in the first call"])
@pytest.mark.parametrize("plan", PLANS)
def test_one_rank_has_the_data(pair: WorkerPool, plan: str, deferred: bool) -> None:
    assert pair.run(_rank_0_has_it, PLANS[plan], deferred, timeout_s=120) == [True, True]


def _loaded(pins: dict[str, Any], how: str, folder: str) -> bool:
    model = _compiled(built(meta=True, buffers=True), pins)
    assert "the captured program was not compared with the model, which had no data" in model.plan.notes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if how == "state_dict":
        model.load_state_dict(built().state_dict())
    elif how == "full_state_dict":
        model.load_full_state_dict(built().state_dict() if dist.get_rank() == 0 else None)
    elif how == "written":
        with model.full_parameters(), torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(built().get_parameter(name))
    else:
        autopar.load(folder, model)
    return _alike(_trained(model, optimizer))


@pytest.mark.gloo
@pytest.mark.parametrize(("plan", "how"), [
    ("tp2", "state_dict"), ("zero3", "state_dict"), ("pp2", "full_state_dict"), ("zero3", "full_state_dict"), ("tp2", "written"),
    ("zero3", "a checkpoint"), ("pp2", "a checkpoint"),
])  # fmt: skip
def test_the_data_is_loaded_into_the_parts(pair: WorkerPool, plan: str, how: str, tmp_path: Path) -> None:
    autopar.save(tmp_path / "first", built())
    assert pair.run(_loaded, PLANS[plan], how, str(tmp_path / "first"), timeout_s=120) == [True, True]


def _adapters_alone(pins: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Of a model whose frozen weights are loaded later, adapters have data from the beginning, and an optimizer."""
    whole, model = built(Adapted), built(Adapted, meta=True)
    model.low, model.high = built(Adapted).low, built(Adapted).high
    found: list[list[float]] = []
    for one in (whole, model):
        optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2)
        if one is model:
            one = _compiled(model, pins, example_inputs=floats())
            one.load_state_dict({n: t for n, t in whole.state_dict().items() if n.startswith(("up", "down"))}, strict=False)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = one(*floats())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    return found[0], found[1]


@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["tp2", "zero3"])
def test_some_parameters_have_data(pair: WorkerPool, plan: str) -> None:
    for expected, found in pair.run(_adapters_alone, PLANS[plan], timeout_s=60):
        assert found == pytest.approx(expected, rel=1e-12)


def _by_device(kind: type[nn.Module], pins: dict[str, Any]) -> list[float] | str:
    model = built(kind, meta=dist.get_rank() > 0)
    try:
        made = _compiled(model, pins, example_inputs=floats())
    except (autopar.CaptureError, autopar.LaunchError) as error:
        return f"{type(error).__name__}: {error}"
    optimizer, losses = torch.optim.SGD(made.parameters(), lr=0.1), []
    for size in (8, 8, 4):
        optimizer.zero_grad()
        loss = made(*(t[:size] for t in floats()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["tp2", "zero3"])
def test_code_that_asks_for_the_device_is_captured_alike(pair: WorkerPool, plan: str) -> None:
    """What ranks without data capture, rank 0 has compared with the model."""
    plain, losses = built(ByDevice), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for size in (8, 8, 4):
        optimizer.zero_grad()
        loss = plain(*(t[:size] for t in floats()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found in pair.run(_by_device, ByDevice, PLANS[plan], timeout_s=60):
        assert found == pytest.approx(losses, rel=1e-12)
    first, second = pair.run(_by_device, Otherwise, PLANS[plan], timeout_s=60)
    assert first.startswith("CaptureError: the captured program's loss is ")
    assert second.startswith("LaunchError: capture failed on rank 0: CaptureError: the captured program's loss is ")


def _without() -> tuple[str, str, bool, bool, list[str]]:
    """What is said of tensors without values, and of buffers alone; whether there is a loss then; and whether rank 1 holds half of it."""
    model = _compiled(built(meta=True, buffers=True), {"dp": 2, "zero": 3})
    said = []
    for _ in range(2):
        with pytest.raises(ValueError, match="had no values when it was compiled") as error:
            model(*batch())
        said.append(str(error.value))
        with torch.no_grad():
            for name, p in built().named_parameters():
                if name != "layers.2.bias" or len(said) > 1:
                    model.get_parameter(name).copy_(p)
    finite = bool(model(*batch()).isfinite())
    half = local(model.table.weight).numel() * 2 == model.table.weight.numel()
    with model.captured_at_home():
        where = sorted({p.device.type for p in model.original.parameters()})
    return said[0], said[1], finite, half, where


@pytest.mark.gloo
def test_what_has_no_values_is_named(pair: WorkerPool) -> None:
    for first, second, finite, half, where in pair.run(_without, timeout_s=60):
        assert first.startswith("layers.0.bias, layers.0.weight, layers.1.bias and 6 more of Net had no values")
        assert second.startswith("layers.2.bias of Net had no values") and "autopar.load" in second
        assert finite and half and where == ["meta"], "no rank has the whole for another capture"


def _refused() -> list[str]:
    def said(kind: type[nn.Module], **more: Any) -> str:
        try:
            autopar.compile(built(kind, meta=True), 2, example_inputs=floats(), cluster="cpu", pins={"tp": 2}, **more)
        except (ValueError, autopar.CaptureError, autopar.VerificationError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    return [said(WithTable), said(Plain, verify=True), said(Plain)]


@pytest.mark.gloo
def test_what_cannot_do_without_data_is_refused(pair: WorkerPool) -> None:
    for constant, verified, neither in pair.run(_refused, timeout_s=60):
        assert constant.startswith("ValueError: the forward computes with a tensor [8] that is neither a parameter nor a buffer")
        assert verified.startswith("VerificationError: verify=True compares the loss with the original's, which has no data")
        assert neither == "nothing was raised"


def _compiled_twice() -> list[float]:
    model = built(Plain, meta=True)
    losses = []
    for pins in ({"tp": 2}, {"dp": 2, "zero": 3}):
        made = _compiled(model, pins, example_inputs=floats())
        if not losses:
            made.load_state_dict(built(Plain).state_dict())
        losses.append(made(*floats()).item())
    return losses


@pytest.mark.gloo
def test_a_model_that_got_its_data_may_be_compiled_again(pair: WorkerPool) -> None:
    expected = built(Plain)(*floats()).item()
    for found in pair.run(_compiled_twice, timeout_s=60):
        assert found == pytest.approx([expected, expected], rel=1e-12)


@pytest.mark.pure
def test_the_program_is_that_of_the_model_with_data() -> None:
    model = built(meta=True, buffers=True)
    buffers = dict(model.named_buffers())
    found = capture(model, batch())
    assert program_hash(found.program) == program_hash(capture(built(), batch()).program)
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert all(b is buffers[name] for name, b in model.named_buffers()), "they are the model's own again"
    held = {b.fqn: found.tensors[b.value] for b in found.program.buffers if b.fqn is not None}
    assert all(held[name] is buffers[name] for name in held), "with their values"
    with torch.no_grad():
        model.doubles.fill_(False)
    assert len(capture(model, batch()).program.ops) < len(found.program.ops), "what a buffer decides is known by its value"
    assert found.guards is not None and "doubles" in str(found.guards.changed())


def _with_a_part_of_torchscript() -> str:
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(8)), nn.Linear(8, 4))
    with pytest.raises(CaptureError) as error:
        autopar.compile(model, 2, example_inputs=(torch.randn(4, 8),), cluster="cpu")
    return str(error.value)


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_buffers_of_torchscript_are_asked_for_like_others(pair: WorkerPool) -> None:
    assert all("is a module of TorchScript" in said for said in pair.run(_with_a_part_of_torchscript, timeout_s=120))
