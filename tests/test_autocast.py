"""torch.autocast around the call and inside of the model, and models that compute in a lower precision than they rest in: under every
plan the same casts as on one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.ir import refs
from autopar.run import WorkerPool
from autopar.run.part import local
from autopar.run.region import REGION

WIDTH, CLASSES, STEPS = 32, 5, 3
PLANS = {
    "dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "zero3": {"dp": 2, "zero": 3}, "dp2mb2": {"dp": 2, "micro_batches": 2},
    "pp2mb2": {"pp": 2, "micro_batches": 2},
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


class Inside(Net):
    """Autocast for the blocks alone, and within it a part without."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
            with torch.autocast("cpu", enabled=False):
                x = x.to(self.head.weight.dtype) @ self.head.weight.t() + self.head.bias
        return F.cross_entropy(x, y)


class Mixed(Net):
    """Operators of every kind: cast down, cast up, the widest of its operands, composed ones."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = (block(x) for block in self.blocks)
        h = torch.einsum("ij,kj->ik", first, self.head.weight)
        h = torch.cat([h, self.head(second)], 1).softmax(-1)
        h = h @ torch.cat([h, h[:4]], 0).t() if h.shape[0] < 4 else h
        return F.cross_entropy(h, y) + F.mse_loss(first, second) + (first * second).sum(-1).log1p().mean() * 0.0


LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
MODELS = {"net": Net, "inside": Inside, "mixed": Mixed}


def batches(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randn(8, WIDTH, generator=g).to(dtype), torch.randint(CLASSES, (8,), generator=g)


def autocast(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()


def trained(
    make: type[nn.Module], pins: dict[str, int] | None, around: bool, dtype: torch.dtype = torch.float32, first: bool = False,
    precision: str = "fp32",
) -> Any:  # fmt: skip
    """Losses, the gradients of the first step, the parameters after the last, and a loss without autocast. first: the plan is made on
    the first call."""
    torch.manual_seed(0)
    model: Any = make().to(dtype)
    if pins is not None:
        given = {} if first else {"example_inputs": next(batches(dtype))}
        model = autopar.compile(model, gpus=2, cluster="cpu", pins=pins, precision=precision, **given)
    elif precision != "fp32":
        cast_where_used(model, LOWER[precision])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], {}
    for x, y in batches(dtype):
        optimizer.zero_grad()
        with autocast(around):
            loss = model(x, y)
        loss.backward()
        if not gradients:
            grads = {n: p.grad.clone() for n, p in model.named_parameters()} if pins is None else model.full_gradients()
            gradients = {n: g.double() for n, g in grads.items()}
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model(*next(batches(dtype))).item())
    state = model.state_dict() if pins is None else model.full_state_dict()
    return losses, gradients, {n: t.double() for n, t in state.items()}, {str(p.dtype) for p in model.parameters()}


def cast_where_used(model: nn.Module, dtype: torch.dtype) -> None:
    forward = model.forward

    def lower(x: Tensor, y: Tensor) -> Tensor:
        own = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        with mock.patch.object(model, "forward", forward):
            found: Tensor = torch.func.functional_call(model, own, (x.to(dtype), y))
        return found

    model.forward = lower


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all tensors as one vector."""
    difference = sum(float((found[n] - t).square().sum()) for n, t in exact.items())
    return float((difference / sum(float(t.square().sum()) for t in exact.values())) ** 0.5)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.pure
def test_casts_are_operators_of_the_program() -> None:
    """Linear has its three operands lower, the loss its input higher, what is in between runs as it is given. Parameters are cast for it
    by whoever runs it: no operator reads them as they rest."""
    x, y = next(batches(torch.float32))
    with autocast(True):
        captured = capture(Net(), (x, y))
        assert torch.is_autocast_enabled("cpu")
    program = captured.program
    linear = next(op for op in program.ops if op.target == "aten.linear.default")
    made = {o: op for op in program.ops for o in op.outputs}
    assert [program.types[name].dtype for name in refs(linear)] == [torch.bfloat16] * 3
    params = {p.value: p for p in program.params}
    assert made[refs(linear)[0]].target == "aten.to.dtype"
    assert [params[name].rests for name in refs(linear)[1:]] == [torch.float32] * 2
    gelu = next(op for op in program.ops if op.target == "aten.gelu.default")
    assert [program.types[name].dtype for name in refs(gelu)] == [torch.bfloat16]
    assert program.types[program.loss].dtype == torch.float32
    assert not any(op.target == "aten.to.dtype" and not params.keys().isdisjoint(refs(op)) for op in program.ops)


@pytest.mark.pure
def test_float64_is_left_alone() -> None:
    """As autocast does."""
    with autocast(True):
        inside = capture(Net().double(), next(batches(torch.float64))).program
    assert inside.ops == capture(Net().double(), next(batches(torch.float64))).program.ops


@pytest.mark.pure
def test_autocast_off_inside_of_a_region_that_is_not_captured() -> None:
    """What runs as it is written runs in the state in which it was called."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

        def forward(self, x: Tensor) -> Tensor:
            rows = (x.sum(-1) > 0).nonzero().flatten()
            return x.index_add(0, rows, (x[rows] @ self.weight).to(x.dtype))

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.counting = Counting()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(self.counting(x), y)

    torch.manual_seed(0)
    with autocast(True):  # compared with the model, call by call
        program = capture(Outer(), next(batches(torch.float32))).program
    assert any(op.target == REGION for op in program.ops)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "around", "plan"),
    [
        *(("net", True, plan) for plan in PLANS), ("inside", False, "tp2"), ("inside", False, "pp2"), ("mixed", True, "tp2"),
        ("mixed", True, "dp2mb2"),
    ],  # fmt: skip
)
def test_errors_are_those_of_one_process(pool: WorkerPool, name: str, around: bool, plan: str) -> None:
    """Beside a float64 run, in which autocast casts nothing."""
    make = MODELS[name]
    _, exact_gradients, exact_state, _ = trained(make, None, around, dtype=torch.float64)
    losses, gradients, state, _ = trained(make, None, around)
    assert error(gradients, exact_gradients) > 1e-4, "nothing was computed in bfloat16"
    for ours, our_gradients, our_state, dtypes in pool.run(trained, make, PLANS[plan], around):
        assert dtypes == {"torch.float32"}
        assert ours == pytest.approx(losses, rel=1e-2)
        assert error(our_gradients, exact_gradients) <= 1.5 * error(gradients, exact_gradients)
        assert error(our_state, exact_state) <= 1.5 * error(state, exact_state)


@pytest.mark.gloo
def test_a_plan_made_inside_of_autocast(pool: WorkerPool) -> None:
    for plan in ("tp2", "pp2"):
        _, exact, _, _ = trained(Net, None, True, dtype=torch.float64)
        _, gradients, _, _ = trained(Net, None, True)
        for _, ours, _, _ in pool.run(trained, Net, PLANS[plan], True, torch.float32, True):
            assert error(ours, exact) <= 1.5 * error(gradients, exact)


# ---------------------------------------------------------------------------------- float32 parameters, a lower precision
class Tied(Net):
    """A parameter that is used twice, a buffer, and an output that another operator widens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.detach().float().mean(0)
        x = self.blocks[0](x) @ self.head.weight.t()
        return super().forward(x @ self.head.weight + self.mean.to(x.dtype), y).float()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("make", "precision", "plan"),
    [
        (Net, "bf16", "dp2"), (Net, "bf16", "tp2"), (Net, "bf16", "pp2mb2"), (Net, "bf16", "zero3"), (Net, "fp16", "dp2mb2"),
        (Net, "fp16", "tp2"), (Tied, "bf16", "dp2"), (Tied, "bf16", "tp2"), (Tied, "bf16", "pp2"),
    ],
)  # fmt: skip
def test_parameters_rest_in_float32_and_compute_lower(pool: WorkerPool, make: type[Net], precision: str, plan: str) -> None:
    _, exact_gradients, exact_state, _ = trained(make, None, False, torch.float64)
    losses, gradients, state, _ = trained(make, None, False, torch.float32, False, precision)
    assert error(gradients, exact_gradients) > 1e-4, "nothing was computed in a lower precision"
    for ours, our_gradients, our_state, dtypes in pool.run(trained, make, PLANS[plan], False, torch.float32, False, precision):
        assert dtypes == {"torch.float32"}
        assert ours == pytest.approx(losses, rel=1e-2)
        assert error(our_gradients, exact_gradients) <= 1.5 * error(gradients, exact_gradients)
        assert error(our_state, exact_state) <= 1.5 * error(state, exact_state)


@pytest.mark.pure
def test_batch_norms_stay_in_float32() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(self.norm(x), y)

    program = capture(Normed(), next(batches(torch.float32)), dtype=torch.bfloat16).program
    norm = next(op for op in program.ops if "batch_norm" in op.target)
    read = [program.types[name].dtype for name in refs(norm)]
    assert read == [torch.bfloat16, *[torch.float32] * 4], "the input alone is lower"


@pytest.mark.pure
def test_a_model_that_cannot_compute_lower_is_told_of_autocast() -> None:
    class Strict(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x @ self.table, y)

    with pytest.raises(CaptureError, match="if it is that which fails, call the model inside of torch.autocast"):
        capture(Strict(), next(batches(torch.float32)), dtype=torch.bfloat16)


def sums_in_float32(pins: dict[str, int]) -> Tensor:
    """The gradient of a bias: 1 of the first half of the batch, 2**-10 of the second, which bfloat16 cannot add."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return ((x + self.bias) * x).sum()

    model = autopar.compile(
        Biased(), gpus=2, cluster="cpu", pins=pins, precision="bf16", example_inputs=(torch.ones(2, 4),),
    )  # fmt: skip
    model(torch.stack([torch.ones(4), torch.full((4,), 2.0**-10)])).backward()
    gradient: Tensor = model.full_gradients()["bias"]
    return gradient


@pytest.mark.gloo
def test_gradients_are_added_in_float32(pool: WorkerPool) -> None:
    for pins in ({"dp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "zero": 1}):
        for found in pool.run(sums_in_float32, pins):
            assert found.dtype == torch.float32
            assert torch.equal(found, torch.full((4,), 1.0 + 2.0**-10)), pins


def scaled(pins: dict[str, int], overflow_on: int) -> tuple[float, bool, bool]:
    """Under a GradScaler one step of which the gradient of one stage, or of one rank's part, overflows. The scale after it, whether the
    parameters stayed as they were, and whether they move in the next."""
    torch.manual_seed(0)
    x, y = next(batches(torch.float32))
    model: Any = autopar.compile(Net(), gpus=2, cluster="cpu", pins=pins, precision="fp16", example_inputs=(x, y))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = model.full_state_dict()
    scaler.scale(model(x, y)).backward()
    held = [local(p.grad) for p in model.parameters() if p.grad is not None]
    for k, grad in enumerate(g for g in held if g.numel()):
        if torch.distributed.get_rank() == overflow_on and k == 0:
            grad.view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    stayed = all(torch.equal(t, before[n]) for n, t in model.full_state_dict().items())
    optimizer.zero_grad()
    scaler.scale(model(x, y)).backward()
    scaler.step(optimizer)
    moved = not all(torch.equal(t, before[n]) for n, t in model.full_state_dict().items())
    return scaler.get_scale(), stayed, moved


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: WorkerPool, pins: dict[str, int]) -> None:
    assert pool.run(scaled, pins, 1) == [(128.0, True, True)] * 2


class _MasksByFunctions(nn.Module):
    """As transformers 4 makes masks: by a vmap of a function of positions, which indexes the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        def seen(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & padding[row, key]

        places = torch.arange(x.shape[1])
        with TransformGetItemToIndex():
            over = torch.vmap(seen, (None, None, 0))
            mask = torch.vmap(torch.vmap(over, (None, 0, None)), (0, None, None))(torch.arange(len(x)), places, places)
        h = self.linear(x)
        scores = (h @ h.transpose(1, 2)).masked_fill(~mask, -10.0)
        return (scores.softmax(-1) @ h).float().square().mean()


@pytest.mark.pure
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("lower", [False, True])
def test_a_vmap_inside_of_autocast(lower: bool) -> None:
    torch.manual_seed(0)
    model, x, padding = _MasksByFunctions(), torch.randn(4, 6, 8), torch.rand(4, 6) < 0.7
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        program = capture(model, (x, padding)).program  # which compares loss and gradients
    products = [op for op in program.ops if op.target in ("aten.matmul.default", "aten.linear.default")]
    assert {program.types[op.outputs[0] or ""].dtype for op in products} == {torch.bfloat16 if lower else torch.float32}


@pytest.mark.pure
def test_the_autocast_of_the_device_of_a_tensor_on_the_meta_device() -> None:
    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(device_type=x.device.type, enabled=False):
                return self.linear(x).square().mean()

    with torch.device("meta"):
        assert any(op.target == "aten.linear.default" for op in capture(Exact(), (torch.randn(2, 4),)).program.ops)
    with pytest.raises(RuntimeError):
        torch.autocast(device_type="meta", enabled=False)
