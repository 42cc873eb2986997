"""Using a parallel module: batches, checkpoints, memory of gathered weights, random numbers, and what it refuses."""

from __future__ import annotations

import dataclasses
import gc
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.errors import LaunchError
from autopar.run import InputSpec, Manifest, Mesh, ParallelModule, ParamSpec, Stage, WorkerPool
from autopar.run import buckets as buckets_module
from autopar.run import weights as weights_module
from autopar.run.gathered import Dropped, GatheredWhereUsed
from tests.run_model import Model, batch, emitted, tensors

pytestmark = pytest.mark.gloo


def _model(**form: Any) -> ParallelModule:
    return ParallelModule(emitted(**form), tensors(Model().double()))


# ------------------------------------------------------------------------------------------------------------ in one process
def test_inputs_by_position_and_by_name_are_the_same() -> None:
    model, given = _model(), batch(0)
    losses = [model(**given), model(given["input_ids"], given["labels"]), model(given["input_ids"], labels=given["labels"])]
    assert len({loss.item() for loss in losses}) == 1


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Any]], type[Exception], str]] = {
    "missing": (lambda b: {"input_ids": b["input_ids"]}, TypeError, "needs inputs that the call does not give: 'labels'"),
    "unknown": (lambda b: {**b, "mask": b["labels"]}, TypeError, "captured without input 'mask'; its inputs are: 'input_ids', 'labels'"),
    "dtype": (lambda b: {**b, "labels": b["labels"].int()}, TypeError, "input 'labels' must be int64"),
    "not_a_tensor": (lambda b: {**b, "labels": 3}, TypeError, "input 'labels' must be a tensor; got int"),
    "shape": (lambda b: {**b, "labels": b["labels"][:, :2]}, ValueError, r"'labels' must have shape \(16, 4\); got \(16, 2\)\.$"),
    "batch_size": (lambda b: {k: v[:8] for k, v in b.items()}, ValueError, "planned for batches of this size"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_batches_are_refused_by_name(case: str) -> None:
    change, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        _model()(**change(batch(0)))


def test_an_input_given_twice_or_too_many_are_refused() -> None:
    model, given = _model(), batch(0)
    with pytest.raises(TypeError, match="'input_ids' is given twice"):
        model(given["input_ids"], **given)
    with pytest.raises(TypeError, match="takes 2 positional inputs; the call gives 3"):
        model(given["input_ids"], given["labels"], 1)


def test_constants_of_capture_may_be_given_again_but_not_changed() -> None:
    form = emitted()
    form.MANIFEST = _changed(form.MANIFEST, constant_inputs=((("use_cache",), False),))
    model = ParallelModule(form, tensors(Model().double()))
    model(**batch(0), use_cache=False, past=None)
    with pytest.raises(ValueError, match="'use_cache' was False when the model was captured, and is fixed; got True"):
        model(**batch(0), use_cache=True)


def test_nested_inputs_are_found_by_path() -> None:
    form = emitted()
    specs = tuple(InputSpec(name=s.name, path=("pair", i), shape=s.shape, dtype=s.dtype) for i, s in enumerate(form.MANIFEST.inputs))
    form.MANIFEST = _changed(form.MANIFEST, inputs=specs, positional=("pair",))
    model = ParallelModule(form, tensors(Model().double()))
    given = batch(0)
    assert model((given["input_ids"], given["labels"])).item() == _model_like(model)(**given).item()
    with pytest.raises(TypeError, match=re.escape("'pair'[1]")):
        model((given["input_ids"],))


def _changed(manifest: Manifest, **changes: Any) -> Manifest:
    return dataclasses.replace(manifest, **changes)


def _model_like(model: ParallelModule) -> ParallelModule:
    other = _model()
    other.load_full_state_dict(model.full_state_dict())
    other._buffers["scale"].copy_(model._buffers["scale"])
    return other


def test_tensors_that_do_not_fit_the_plan_are_refused_all_at_once() -> None:
    given = tensors(Model())  # float32
    del given["frozen"]
    with pytest.raises(ValueError, match=r"wte.weight must be float64\[32, 16\] and is float32\[32, 16\]; frozen is missing"):
        ParallelModule(emitted(), given)


def test_without_a_group_it_says_how_to_launch() -> None:
    with pytest.raises(LaunchError, match=r"4 processes \(pp=1 x dp=2 x tp=2\)(.|\n)*torchrun --standalone --nproc-per-node=4"):
        _model(dp=2, tp=2)


def test_backward_twice_says_what_to_do() -> None:
    loss = _model()(**batch(0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the model again"):
        loss.backward()


def test_gradients_by_autograd_grad_and_of_two_losses() -> None:
    model = _model()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad and n != "unused"}
    once = torch.autograd.grad(model(**batch(0)), list(named.values()))
    (model(**batch(0)) + 2 * model(**batch(0))).backward()
    for grad, param in zip(once, named.values(), strict=True):
        assert param.grad is not None
        assert torch.allclose(3 * grad, param.grad, rtol=1e-12)


def test_the_users_random_numbers_are_left_alone() -> None:
    model = _model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model.train_step(batch(0))
    assert torch.equal(torch.rand(3), expected)


def test_attributes_do_not_hide_the_users_names() -> None:
    class Scale(Stage):
        def forward(self, *, x: Tensor) -> tuple[Tensor]:
            return ((x * self.weights["mesh.weight"] * self.weights["device"]).sum(),)

    form = SimpleNamespace(
        MANIFEST=Manifest(
            model="Scale",
            mesh={},
            micro_batches=1,
            schedule="1f1b",
            rest="zero0",
            params=tuple(ParamSpec(name=name, shape=(3,), dtype="float32") for name in ("mesh.weight", "device")),
            buffers=(),
            inputs=(InputSpec(name="x", path=(0,), shape=(3,), dtype="float32"),),
        ),
        STAGES=(Scale,),
    )
    model = ParallelModule(form, {"mesh.weight": torch.ones(3), "device": torch.full((3,), 2.0)})
    model(torch.ones(3)).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert set(found) == {"mesh.weight", "device"}
    assert all(torch.equal(found[name], torch.full((3,), value)) for name, value in (("mesh.weight", 2.0), ("device", 1.0)))
    assert isinstance(model.mesh, Mesh)
    assert set(model.full_state_dict()) == set(found)


# ---------------------------------------------------------------------------------------------------------- in four processes
def _of_two_dtypes() -> None:
    """A unit of ZeRO-3 whose parameters are of two dtypes."""

    class Scale(Stage):
        def forward(self, *, x: Tensor) -> tuple[Tensor]:
            w = self.weights
            x = x * w["a"].double() * w["b"]
            return ((x * w["a"].double() * w["c"].double()).sum() + w["alone"].sum(),)

    n = dist.get_world_size()
    dtypes = {"a": "float32", "b": "float64", "c": "float32", "alone": "float64"}  # the last one's gradient is one number, expanded
    parts = {"layouts": {"dp": "R"}, "zero_dim": 0, "rest": "zero3"}
    units = {"a": 0, "b": 0, "c": 0, "alone": None}
    form = SimpleNamespace(
        MANIFEST=Manifest(
            model="Scale", mesh={"dp": n}, micro_batches=1, schedule="1f1b", rest="zero3", buffers=(),
            params=tuple(ParamSpec(name=name, shape=(2 * n,), dtype=dtype, unit=units[name], **parts) for name, dtype in dtypes.items()),
            inputs=(InputSpec(name="x", path=(0,), shape=(n, 2 * n), dtype="float64", layouts={"dp": "S(0)"}),),
        ),
        STAGES=(Scale,),
    )  # fmt: skip
    full = {name: torch.arange(2.0 * n, dtype=getattr(torch, dtype)) + k for k, (name, dtype) in enumerate(dtypes.items())}
    model = ParallelModule(form, full)
    gathered: list[int] = []
    gather = buckets_module.Bucket.gather
    buckets_module.Bucket.gather = lambda self, casts: (gathered.append(len(self.held)), gather(self, casts))[1]  # type: ignore[method-assign]
    try:
        x = torch.arange(2.0 * n * n, dtype=torch.float64).reshape(n, 2 * n)
        for _ in range(2):  # the second step gathers ahead
            gathered.clear()
            model.zero_grad()
            model(x).backward()
            assert gathered == [2, 1, 1, 2, 1]  # a bucket for each dtype, the one alone, and the first unit again in backward
    finally:
        buckets_module.Bucket.gather = gather  # type: ignore[method-assign]
    a, b, c = (full[name].double() for name in "abc")
    over = x.sum(0)
    expected = {"a": 2 * a * b * c * over, "b": a * a * c * over, "c": a * a * b * over, "alone": torch.full_like(a, n)}
    for name, grad in model.full_gradients().items():
        assert grad.dtype == full[name].dtype
        torch.testing.assert_close(grad.double(), expected[name], rtol=1e-6, atol=0)


def test_a_unit_may_be_of_two_dtypes(workers: WorkerPool) -> None:
    workers.run(_of_two_dtypes, timeout_s=60)


def _round_trip(form: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = _model(**form)
    torch.manual_seed(1)
    other = Model().double()
    other.seen.fill_(7)
    rank = dist.get_rank()
    model.load_full_state_dict(other.state_dict() if rank == 0 else None)
    expected = other.state_dict()
    full = model.full_state_dict()
    assert full.keys() == expected.keys()
    assert all(torch.equal(full[name], expected[name]) for name in expected)
    only = model.full_state_dict(rank0_only=True)
    assert set(only) == (set(expected) if rank == 0 else set())
    local = {k: v + 1 for k, v in model.state_dict().items()}
    model.load_state_dict(local, strict=True)
    assert all(torch.equal(v, local[k]) for k, v in model.state_dict().items())
    for bad, text in (({"nothing": torch.ones(1)}, "nothing"), ({"frozen": torch.ones(1)}, "frozen must be float64")):
        with pytest.raises(ValueError, match=text):
            model.load_full_state_dict({**expected, **bad} if rank == 0 else None)


@pytest.mark.parametrize("form", [{"pp": 2, "dp": 2, "zero": 1}, {"dp": 2, "tp": 2, "zero": 3}], ids=str)
def test_state_of_the_original_goes_in_and_comes_out(workers: WorkerPool, form: dict[str, Any]) -> None:
    workers.run(_round_trip, form, timeout_s=60)


def _local_batch() -> None:
    rank = dist.get_rank()
    whole = _model(dp=2, tp=2)
    local = ParallelModule(emitted(dp=2, tp=2), whole.full_state_dict() | {"scale": whole._buffers["scale"]}, local_batch=True)
    given = batch(0)
    part = {k: v.chunk(2)[rank // 2] for k, v in given.items()}
    assert whole(**given).item() == local(**part).item()
    with pytest.raises(ValueError, match=r"must have shape \(8, 4\); got \(16, 4\)\. .*the part of one data-parallel rank"):
        local(**given)
    checked = ParallelModule(emitted(dp=2, tp=2), tensors(Model().double()), debug=True)
    checked(**given)
    other = {**given, "labels": given["labels"] + (1 if rank == 3 else 0)}
    with pytest.raises(LaunchError, match="input 'labels' differs between rank 0 and rank 3"):
        checked(**other)


def test_local_batches_and_the_check_of_global_ones(workers: WorkerPool) -> None:
    workers.run(_local_batch, timeout_s=60)


NORMS = (float("inf"), float("-inf"), 0.0, 0.5)


def _unusual_norms() -> list[tuple[float, float]]:
    found = []
    for norm_type in NORMS:
        torch.manual_seed(0)
        model = _model(dp=2, tp=2, zero=1)
        torch.manual_seed(0)
        reference = Model().double()
        model.train_step(batch(0))
        reference(**batch(0)).backward()
        theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0, norm_type)
        found.append((float(model.clip_grad_norm_(1.0, norm_type)), float(theirs)))
    return found


def test_unusual_norms(workers: WorkerPool) -> None:
    for of_rank in workers.run(_unusual_norms, timeout_s=60):
        for norm_type, (ours, theirs) in zip(NORMS, of_rank, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12), norm_type


def _alive(seen: list[StorageWeakRef], bound: int = 0) -> int:
    """How many are alive; gloo's thread lets go of a finished collective a moment after it is done."""
    deadline = time.monotonic() + 1
    while (alive := sum(not ref.expired() for ref in seen)) > bound and time.monotonic() < deadline:
        time.sleep(0.001)
    return alive


def _gathered_and_freed(recomputed: bool, units: bool) -> None:
    """With ZeRO-3 no more than one unit of gathered weights lives at a time, and none after backward."""
    seen: list[StorageWeakRef] = []
    finish = buckets_module.Gathering.finish

    def watched(self: Any) -> dict[str, Tensor]:
        found = finish(self)
        used = 6 if recomputed and not units else 2  # by the block that runs again, or the operator, whose unit this was
        assert _alive(seen, used) <= used
        seen.extend(StorageWeakRef(full.untyped_storage()) for full in found.values())
        return found

    buckets_module.Gathering.finish = watched  # type: ignore[method-assign]
    try:
        model = _model(dp=4, zero=3, recomputed=recomputed, units=units)
        gc.disable()  # freed by counting references alone
        for _ in range(2):  # the second step gathers ahead
            seen.clear()
            loss = model(**batch(0))
            forward = len(seen)
            # 24 parameters of blocks, 2 of the last norm, the tied one twice, the frozen one once, or whenever the tied one is
            assert forward == (30 if units else 29)
            assert _alive(seen, 2) <= 2
            loss.backward()
            assert len(seen) > forward
            assert _alive(seen) == 0
    finally:
        gc.enable()
        buckets_module.Gathering.finish = finish  # type: ignore[method-assign]


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_gathered_weights_are_freed_after_use(workers: WorkerPool, recomputed: bool, units: bool) -> None:
    workers.run(_gathered_and_freed, recomputed, units, timeout_s=60)


def _another_order() -> None:
    """What is gathered ahead is a guess: a step that goes another way than the last one is as correct."""
    torch.manual_seed(0)
    model = _model(dp=4, zero=3)
    model.train_step(batch(0))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    order = list(model._orders[True])
    for wrong in (order[::-1], order[:3], order + order, [order[0]] * 50):
        model.zero_grad()
        model._orders[True] = wrong
        with torch.no_grad():
            model(**batch(1))
        model.train_step(batch(0))
        assert model._orders[True] == order
        assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters() if p.grad is not None)


def test_two_uses_of_a_gathered_weight_in_one_unit_add_up() -> None:
    """One after the other, before anything of another unit: both are in what is reduced, as soon as all that train have one; a later one
    is reduced by itself."""
    reduced: list[dict[str, Tensor]] = []

    def reduce(grads: dict[str, Tensor]) -> SimpleNamespace:
        reduced.append({name: grad.clone() for name, grad in grads.items()})  # later ones are added in place
        return SimpleNamespace(finish=lambda: grads)

    held = {name: SimpleNamespace(reduced_by_pass=True, trains=name != "frozen") for name in ("w", "frozen", "v")}
    bucket = SimpleNamespace(reduce=reduce, held=held.values())
    units = SimpleNamespace(held=held, unit_of=dict.fromkeys(held, 0), buckets=[[bucket]])
    step = GatheredWhereUsed(units, {}, {})  # type: ignore[arg-type]
    for name, grad in (("w", 1.0), ("w", 2.0), ("v", 4.0), ("w", 8.0)):
        step._reduce(name, torch.full((3,), grad))
    found = step.close()
    assert [{k: t[0].item() for k, t in grads.items()} for grads in reduced] == [{"w": 3.0, "v": 4.0}, {"w": 8.0}]
    assert {k: t.tolist() for k, t in found.items()} == {"w": [11.0] * 3, "v": [4.0] * 3}


def test_a_gathered_weight_that_changes_before_backward_is_refused() -> None:
    part = torch.zeros(2)
    used = GatheredWhereUsed(SimpleNamespace(buckets=[]), {}, {})  # type: ignore[arg-type]
    used._gather = lambda name: torch.ones(2)  # type: ignore[method-assign]
    used.read("w", part.detach())
    saved = Dropped("w", part._version, (2,), (1,), 0)
    assert used._unpack(saved).tolist() == [1.0, 1.0]
    part.add_(1)
    with pytest.raises(RuntimeError, match="w was changed between the forward and the backward pass"):
        used._unpack(saved)


def test_gathering_ahead_is_a_guess(workers: WorkerPool) -> None:
    workers.run(_another_order, timeout_s=60)


def _order_of_events() -> list[str]:
    """What happens in backward: 'grad' for the arrival of a leaf's gradient, 'reduce' for the start of a reduction."""
    torch.manual_seed(0)
    model = _model(dp=4)
    model.__dict__["_buckets"] = buckets_module.make_buckets(model._tree.held.values(), model.mesh, size_bytes=10_000)
    events: list[str] = []
    reduce, start = buckets_module.Bucket.reduce, weights_module.Step._start_reductions

    def reduced(self: Any, grads: Any) -> Any:
        events.append("reduce")
        return reduce(self, grads)

    def arrived(self: Any, **kwargs: Any) -> None:
        events.append("grad")
        start(self, **kwargs)

    buckets_module.Bucket.reduce, weights_module.Step._start_reductions = reduced, arrived  # type: ignore[method-assign]
    try:
        model(**batch(0)).backward()
    finally:
        buckets_module.Bucket.reduce, weights_module.Step._start_reductions = reduce, start  # type: ignore[method-assign]
    return events


def test_reductions_start_during_the_backward_pass(workers: WorkerPool) -> None:
    events = workers.run(_order_of_events, timeout_s=60)
    assert all(e == events[0] for e in events)
    assert events[0].index("reduce") < 10  # of about thirty gradients
    assert events[0].count("reduce") >= 4
