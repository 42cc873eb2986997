"""Parameters that rest in a higher precision than they are used in: they are cast once a step, gathered in the lower dtype, and their
gradients are summed and brought together in the dtype that is stated."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import autopar
from autopar.capture import capture
from autopar.cli import app
from autopar.compiler import emit, plan_of
from autopar.errors import PlanError
from autopar.planner import Pins
from autopar.planner.candidate import Draft
from autopar.planner.price import param_bytes, zero_dims
from autopar.planner.search import Search
from autopar.render import load
from autopar.run import WorkerPool, comm
from autopar.run.part import local
from cost_models.cluster import load_cluster
from cost_models.rests import RESTS

WIDTH = 16
PLANS: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2}, "zero1": {"dp": 2, "zero": 1}, "zero2": {"dp": 2, "zero": 2}, "zero3": {"dp": 2, "zero": 3}, "tp2": {"tp": 2},
    "pp2": {"pp": 2, "micro_batches": 2},
}  # fmt: skip


class Net(nn.Module):
    """Tied ends, so that one parameter is used twice; a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = F.gelu(self.second(x)) @ self.first.weight
        return F.mse_loss(x, y, reduction="sum") / y.numel()


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=g), torch.randn(8, WIDTH, generator=g)


def compiled(pins: dict[str, int], **wishes: Any) -> Any:
    torch.manual_seed(0)
    return autopar.compile(Net(), gpus=2, cluster="cpu", pins=pins, example_inputs=batch(), precision="bf16", **wishes)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


# --------------------------------------------------------------------------------------------------- what goes over the wires
def sent(pins: dict[str, int], reduce_dtype: str | None) -> tuple[dict[str, list[str]], dict[str, int], set[str]]:
    """The dtypes of what a step gathers, reduce-scatters and all-reduces (of more than a scalar), the numbers gathered, and the dtypes of
    gradients."""
    model = compiled(pins, reduce_dtype=reduce_dtype)
    dtypes: dict[str, list[str]] = {"gathered": [], "scattered": [], "reduced": []}
    numbers: Counter[str] = Counter()

    def noting(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if args[kind == "gathered"].numel() > 1:  # what a rank gives
                dtypes[kind].append(str(args[0].dtype))
                numbers[kind] += args[0].numel()
            return call(*args, **kwargs)

        return noted

    def step() -> None:
        model.zero_grad()
        model(*batch()).backward()

    for _ in range(3):  # the first calls compare what they are given
        step()
    with (
        mock.patch.object(comm, "_INTO", noting("gathered", comm._INTO)),
        mock.patch.object(comm, "_SCATTER", noting("scattered", comm._SCATTER)),
        mock.patch.object(torch.distributed, "all_reduce", noting("reduced", torch.distributed.all_reduce)),
    ):
        step()
    held = {str(local(p.grad).dtype) for p in model.parameters() if p.grad is not None}
    return {kind: sorted(set(found)) for kind, found in dtypes.items()}, dict(numbers), held


@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["dp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("reduce_dtype", "expected"), [(None, "torch.float32"), ("bf16", "torch.bfloat16")])
def test_what_is_sent_has_the_dtypes_that_are_stated(pool: WorkerPool, plan: str, reduce_dtype: str | None, expected: str) -> None:
    parameters = sum(p.numel() for p in Net().parameters())
    for found, numbers, gradients in pool.run(sent, PLANS[plan], reduce_dtype):
        assert gradients == {"torch.float32"}
        assert found["gathered"] == (["torch.bfloat16"] if plan != "dp2" else []), found
        assert found["scattered"] + found["reduced"] == [expected], found
        gathers = {"dp2": 0, "zero3": 2}.get(plan, 1)
        assert numbers.get("gathered", 0) <= gathers * 2 * parameters


# ------------------------------------------------------------------------------------------------------------ once a step
class CastsDown(TorchDispatchMode):
    """How often tensors of each shape are cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and found.dtype == torch.bfloat16 and args[0].dtype == torch.float32:
            self.found[tuple(args[0].shape)] += 1
        return found


def casts(pins: dict[str, int]) -> Counter[tuple[int, ...]]:
    model = compiled(pins)
    with CastsDown() as noted:
        model(*batch()).backward()
    return noted.found


@pytest.mark.gloo
def test_a_parameter_that_is_whole_is_cast_once_a_step(pool: WorkerPool) -> None:
    """However many micro-batches there are, and however often it is read."""
    for found in pool.run(casts, {"dp": 2, "micro_batches": 4}):
        assert (found[WIDTH, WIDTH], found[WIDTH,]) == (2, 4), found


# ---------------------------------------------------------------------------------------------------------------- exactness
def sums(pins: dict[str, int], reduce_dtype: str | None, micro_batches: int) -> Tensor:
    """The gradient of a bias that is read twice: each micro-batch of each rank adds 2**-12 to it, one of them 1, and the second read 2**-10
    of that. bfloat16 cannot add any two of these."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return ((x + self.bias) * x + (x + self.bias) * (x * 2.0**-10)).sum()

    x = torch.full((2 * micro_batches, 4), 2.0**-12)
    x[0] = 1.0
    model = autopar.compile(
        Biased(), gpus=2, cluster="cpu", pins={**pins, "micro_batches": micro_batches}, precision="bf16", reduce_dtype=reduce_dtype,
        example_inputs=(torch.ones_like(x),),
    )  # fmt: skip
    model(x).backward()
    gradient: Tensor = model.full_gradients()["bias"]
    return gradient


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [{"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_gradients_are_added_in_float32_over_uses_micro_batches_and_ranks(pool: WorkerPool, pins: dict[str, int]) -> None:
    for count in (1, 4):
        exact = torch.full((4,), (1 + (2 * count - 1) * 2.0**-12) * (1 + 2.0**-10))
        for found in pool.run(sums, pins, None, count):
            assert found.dtype == torch.float32
            assert torch.allclose(found, exact, rtol=2.0**-22, atol=0), (found, exact)
        for found in pool.run(sums, pins, "bf16", count):
            assert found.dtype == torch.float32
            assert not torch.allclose(found, exact, rtol=2.0**-14, atol=0), "nothing was sent in bfloat16"
            assert torch.allclose(found, exact, rtol=2.0**-6, atol=0)


def gradients(pins: dict[str, int] | None, dtype: torch.dtype, reduce_dtype: str | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = Net().to(dtype)
    given = tuple(t.to(dtype) for t in batch())
    if pins is not None:
        model = autopar.compile(
            model, gpus=2, cluster="cpu", pins=pins, example_inputs=given, precision="bf16", reduce_dtype=reduce_dtype
        )
        model(*given).backward()
        return {n: g.double() for n, g in model.full_gradients().items()}
    if dtype == torch.float32:
        lower = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
        torch.func.functional_call(model, lower, tuple(t.bfloat16() for t in given)).backward()
    else:
        model(*given).backward()
    return {n: p.grad.double() for n, p in model.named_parameters()}


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return float(sum((found[n] - t).square().sum() for n, t in exact.items()) / sum(t.square().sum() for t in exact.values())) ** 0.5


@pytest.mark.gloo
@pytest.mark.parametrize("plan", PLANS)
def test_errors_are_those_of_one_process(pool: WorkerPool, plan: str) -> None:
    exact, alone = gradients(None, torch.float64, None), gradients(None, torch.float32, None)
    assert error(alone, exact) > 1e-4, "nothing was computed in bfloat16"
    for reduce_dtype in (None, "bf16"):
        for found in pool.run(gradients, PLANS[plan], torch.float32, reduce_dtype):
            assert error(found, exact) <= 1.5 * error(alone, exact), reduce_dtype


# ------------------------------------------------------------------------------------------------------------- what is planned
@pytest.mark.pure
def test_a_parameter_that_is_also_read_as_it_rests_is_cast_where_it_is_read() -> None:
    class Both(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(F.linear(x.bfloat16(), self.first.weight.bfloat16()).float() + self.first.weight.sum(), y)

    class Stopped(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                lower = self.first.weight.bfloat16()
            return F.mse_loss(F.linear(x.bfloat16(), lower).float() + self.second(x), y)

    class Returned(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            lower = self.first.weight.bfloat16()
            return F.mse_loss(F.linear(x.bfloat16(), lower).float(), y), lower

    class Widened(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(x.double() @ self.first.weight.double(), y.double())

    class Cast(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(F.linear(x.bfloat16(), self.first.weight.bfloat16()).float(), y)

    for kind, outputs in ((Both, False), (Stopped, False), (Returned, True), (Widened, False)):
        program = capture(kind(), batch(), outputs=outputs).program
        assert [p.fqn for p in program.params if p.rests is not None] == [], kind
    program = capture(Cast(), batch()).program
    assert [(p.fqn, p.rests) for p in program.params if p.rests is not None] == [("first.weight", torch.float32)]
    assert program.types[next(p.value for p in program.params if p.rests is not None)].dtype == torch.bfloat16


@pytest.mark.pure
def test_the_account_of_bytes() -> None:
    """As it is used, 2 bytes a number; at rest, with gradient and states, 4."""
    program = capture(Net(), batch(), dtype=torch.bfloat16).program
    dims = zero_dims(plan_rank(program), 2, RESTS["zero3"])
    found = param_bytes(plan_rank(program), dims, 2)
    for p in program.params:
        one = found[p.value]
        assert (one.local_bytes, one.itemsize, one.is_cast) == (2 * one.numel, 4, True)
        assert one.resting_bytes == 4 * one.resting_numel
        assert one.in_parts == (p.fqn in dims)


def plan_rank(program: Any) -> Any:
    """As a program that was laid over dp: its parameters are used for different work."""
    from autopar.ir import R

    return program.replace(params=tuple(_with(p, layouts=(("dp", R),)) for p in program.params))


def _with(p: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(p, **changes)


@pytest.mark.pure
def test_the_prices_of_what_is_sent() -> None:
    wide = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    given = (torch.empty(8192, 2048, device="meta"),)

    def priced(zero: int, precision: str, reduce_dtype: str | None = None, lower: bool = False) -> autopar.Plan:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
        model, inputs = (model.bfloat16(), (given[0].bfloat16(),)) if lower else (model, given)
        return autopar.plan(
            model, 8, example_inputs=inputs, loss=loss, cluster="dgx-h100", pins={"dp": 8, "zero": zero}, precision=precision,
            reduce_dtype=reduce_dtype,
        )  # fmt: skip

    def loss(out: Tensor) -> Tensor:
        return out.float().square().mean()

    assert sum(p.numel() for p in wide.parameters()) == 4 * 2048**2
    kept, lower, own = priced(0, "bf16"), priced(0, "bf16", "bf16"), priced(0, "bf16", lower=True)
    assert kept.gradient_sync_s > 1.2 * lower.gradient_sync_s, "gradients travel in float32 unless another dtype is asked for"
    assert lower.gradient_sync_s == pytest.approx(own.gradient_sync_s, rel=1e-9)
    for zero in (1, 3):
        full, cast = priced(zero, "fp32"), priced(zero, "bf16", "bf16")
        built = priced(zero, "bf16", lower=True)
        assert cast.step_time_s < full.step_time_s
        times_s = [p.step_time_s - p.optimizer_s for p in (built, cast, full)]
        assert times_s[0] <= times_s[1] < times_s[2], "the same but for casts is sent as by a model that was built in bfloat16"
    states = kept.stages[0].memory.optimizer_states_bytes
    assert states == 2 * 4 * 4 * 2048**2 == 2 * own.stages[0].memory.optimizer_states_bytes
    assert kept.stages[0].memory.parameters_bytes >= (4 + 2) * 4 * 2048**2, "beside what rests there is the copy that is used"


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


@pytest.mark.pure
@pytest.mark.parametrize("reduce_dtype", [None, "bf16"])
def test_bounds_are_below_the_prices_of_what_is_cast(reduce_dtype: str | None) -> None:
    """Of seconds and of bytes, of choices drawn at random."""
    program = capture(Deep(), (torch.randn(32, 64),), dtype=torch.bfloat16).program
    assert all(p.rests == torch.float32 for p in program.params)
    search = Search(
        program=program, gpus=8, cluster=load_cluster("dgx-a100"), memory_limit_bytes=2**40, optimizer="adamw", precision="bf16",
        reduce_dtype=reduce_dtype, pins=Pins(),
    )  # fmt: skip
    every, compared = list(search.space.choices()), 0
    for choice in random.Random(0).sample(every, min(40, len(every))):
        rank = search.known.rank(choice.mesh, choice.micro_batches, search.batch_size, search.recipe, choice.form)
        estimator = search.estimator(rank, choice)
        draft = None if isinstance(estimator, str) else search.draft(choice, estimator)
        if isinstance(draft, Draft) and not isinstance(estimator, str):
            assert 0 < search._least.step_s(choice, search.batch_size) <= estimator.least_s() * (1 + 1e-9), choice
            assert estimator.least_s() <= draft.bound_s * (1 + 1e-9) and draft.bound_s <= draft.times.step_s * (1 + 1e-9), choice
            assert 0 < search._least.bytes(choice) <= estimator.least_bytes * (1 + 1e-9), choice
            compared += 1
    assert compared > 10


@pytest.mark.pure
def test_reduce_dtype_is_in_the_plan_file(tmp_path: Path) -> None:
    wanted = {"example_inputs": batch(), "cluster": "cpu", "pins": {"dp": 2}}
    plan = autopar.plan(Net(), 2, precision="bf16", reduce_dtype="bf16", **wanted)  # type: ignore[arg-type]
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.reduce_dtype == "bf16" and "gradients are brought together over ranks in bfloat16" in loaded.notes
    program = capture(Net(), batch(), dtype=torch.bfloat16)
    assert load(emit(program, loaded)).MANIFEST.reduce_dtype == "bfloat16"
    text = (tmp_path / "plan.json").read_text().replace('"reduce_dtype": "bf16"', '"reduce_dtype": "bf17"')
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(PlanError, match="reduce_dtype 'bf17' is not one of fp32, bf16"):
        autopar.Plan.load(tmp_path / "wrong.json")
    with pytest.raises(PlanError, match="the plan is for a reduce_dtype of 'bf16', and 'fp32' was asked for"):
        autopar.compile(Net(), 2, example_inputs=batch(), plan=loaded, precision="bf16", reduce_dtype="fp32")
    with pytest.raises(PlanError, match="the plan is for precision='bf16', and precision='fp32' was asked for"):
        autopar.compile(Net(), 2, example_inputs=batch(), plan=loaded)
    with pytest.raises(ValueError, match="there is no reduce_dtype 'bf61'; did you mean bf16"):
        autopar.plan(Net(), 2, precision="bf16", reduce_dtype="bf61", **wanted)  # type: ignore[arg-type]


@pytest.mark.pure
def test_reduce_dtype_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = nn.Linear(8, 8)\n    def forward(self, x):\n        return self.a(x).square().mean()\n\n"
        "def build():\n    return Net(), (torch.ones(4, 8),)\n"
    )
    out = tmp_path / "plan.json"
    options = ["--gpus", "2", "--cluster", "cpu", "--pin", "dp=2", "--precision", "bf16", "--reduce-dtype", "bf16", "-o", str(out)]
    found = CliRunner().invoke(app, ["plan", f"{tmp_path / 'net.py'}:build", *options])
    assert found.exit_code == 0, found.output
    assert autopar.Plan.load(out).reduce_dtype == "bf16"


def pure(reduce_dtype: str | None) -> tuple[Tensor, Tensor]:
    """The gradient of a model that was built in bfloat16."""
    torch.manual_seed(0)
    given = tuple(t.bfloat16() for t in batch())
    model = autopar.compile(Net().bfloat16(), gpus=2, cluster="cpu", pins={"dp": 2}, example_inputs=given, reduce_dtype=reduce_dtype)
    summed: list[torch.dtype] = []

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        summed.append(tensor.dtype)
        return call(tensor, *args, **kwargs)

    for _ in range(4):
        model.zero_grad()
        loss = model(*given)
    call = torch.distributed.all_reduce
    with mock.patch.object(torch.distributed, "all_reduce", noted):
        loss.backward()
    return model.full_gradients()["first.weight"], torch.tensor([d == torch.float32 for d in summed])


@pytest.mark.gloo
def test_a_model_that_is_built_in_bfloat16_reduces_in_it_unless_asked(pool: WorkerPool) -> None:
    for gradient, in_float32 in pool.run(pure, None):
        assert gradient.dtype == torch.bfloat16 and not in_float32.any() and len(in_float32)
    for gradient, in_float32 in pool.run(pure, "fp32"):
        assert gradient.dtype == torch.bfloat16 and in_float32.all() and len(in_float32)


# ------------------------------------------------------------------------------------------------------------------- memory
@functools.cache
def gpt2(length: int) -> tuple[Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    given = transformers.GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, n_layer=4, n_embd=512, n_head=8, n_positions=64, vocab_size=4000
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(given)
    ids = torch.zeros(8, length, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    return capture(model, inputs, dtype=torch.bfloat16), inputs


MEMORY: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "micro_batches": 1},
    "dp4 zero1": {"dp": 4, "zero": 1, "micro_batches": 2},
    "dp4 zero2": {"dp": 4, "zero": 2, "micro_batches": 2},
    "dp2 tp2 zero3": {"dp": 2, "tp": 2, "zero": 3, "micro_batches": 1},
    "pp2 dp2 zero3": {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 4},
    "dp2 recompute": {"dp": 2, "zero": 0, "micro_batches": 1, "recompute": "full"},
}


REDUCED: dict[str, dict[str, Any]] = {
    "dp2 of two": {"dp": 2, "zero": 0, "micro_batches": 2},
    "dp4 zero1": {"dp": 4, "zero": 1, "micro_batches": 1},
    "dp4 zero1 in groups, of one": {"dp": 4, "zero": 1, "shard": 2, "micro_batches": 1},
    "dp4 zero2": {"dp": 4, "zero": 2, "micro_batches": 2},
    "dp4 zero3": {"dp": 4, "zero": 3, "micro_batches": 2},
    "pp2 dp2 zero1": {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 4},
}


@pytest.mark.fake
@pytest.mark.parametrize(
    ("name", "reduce_dtype"), [*((name, None) for name in MEMORY), *((name, "bf16") for name in REDUCED)]
)
def test_predicted_memory_is_what_a_step_allocates(fake_group: Callable[..., None], name: str, reduce_dtype: str | None) -> None:
    from autopar.measure.track import step_memory

    captured, inputs = gpt2(64)
    pins = {"recompute": "none", **(MEMORY if reduce_dtype is None else REDUCED)[name]}
    pins |= {"schedule": "1f1b"} if "pp" in pins else {}  # one stage on each rank
    gpus = pins.get("pp", 1) * pins.get("dp", 1) * pins.get("tp", 1)
    decided = plan_of(captured, gpus, cluster="dgx-h100", pins=pins, precision="bf16", reduce_dtype=reduce_dtype)
    given = {k: (tuple(v.shape), v.dtype) for k, v in inputs.items()}
    for stage, planned in enumerate(decided.stages):
        fake_group(gpus, rank=stage * gpus // decided.mesh["pp"])
        found = step_memory(load(emit(captured, decided)), given, optimizer=functools.partial(torch.optim.AdamW, foreach=True))
        with contextlib.suppress(ValueError):
            torch.distributed.destroy_process_group()
        memory = planned.memory
        predicted = memory.total_bytes - memory.framework_context_bytes - memory.allocator_slack_bytes
        assert predicted == pytest.approx(found.peak_bytes, rel=0.03), (stage, memory, found)


@pytest.mark.fake
def test_sums_over_ranks_inside_of_a_stage_are_in_float32(fake_group: Callable[..., None]) -> None:
    """Where the ranks of an axis gather a parameter for different work, its gradient is summed as it rests."""
    captured, _ = gpt2(64)
    found = []
    for tp, zero in itertools.product((2, 4), (0,)):
        source = emit(captured, plan_of(captured, tp, cluster="dgx-h100", pins={"tp": tp, "zero": zero}, precision="bf16"))
        found += [line.strip() for line in source.splitlines() if "(w[" in line and ("C.all_gather" in line or "C.copy_to" in line)]
    assert all("sums=torch.float32" in line for line in found), found
