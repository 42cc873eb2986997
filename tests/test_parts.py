"""Parameters that are held in parts behave as the whole: what people do with them, beside the same on one process. And who holds them:
the original's modules and Parameter objects are the parallel module's."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.capture.as_before import values_as_before
from autopar.run import ParallelModule, WorkerPool, record
from autopar.run.lies import Lies
from autopar.run.part import lies_of, local
from autopar.run.parts import Part
from tests import wrong_models as models

pytestmark = pytest.mark.gloo

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}, "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "micro_batches": 2}, "zero3": {"dp": 2, "zero": 3},
}  # fmt: skip


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = models.batch(16, seed)
    return x.double(), y


def one() -> nn.Module:
    torch.manual_seed(0)
    return models.model().double()


def compiled(pins: dict[str, Any], model: nn.Module | None = None) -> Any:
    return autopar.compile(model or one(), gpus=2, example_inputs=batch(), cluster="cpu", pins=pins)


def stepped(model: Any, **options: Any) -> Any:
    model(*batch()).backward()
    return model


# ----------------------------------------------------------------------------------------------- what is read of parameters
READINGS: dict[str, Callable[[list[Any]], Any]] = {
    "shapes": lambda params: [(tuple(p.shape), p.numel(), p.dim(), len(p), p.stride()) for p in params],
    "norms": lambda params: [p.norm().item() for p in params] + [p.grad.norm(1).item() for p in params],
    "largest": lambda params: [(p.max().item(), p.abs().max().item(), p.grad.min().item()) for p in params],
    "sums": lambda params: [(p.sum().item(), p.detach().mean().item()) for p in params],
    "total norm": lambda params: torch.nn.utils.get_total_norm([p.grad for p in params]).item(),
    "foreach norm": lambda params: [n.item() for n in torch._foreach_norm([p.grad for p in params])],
    "finite": lambda params: [bool(torch.isfinite(p.grad).all()) for p in params],
    "vector": lambda params: torch.nn.utils.parameters_to_vector(params).tolist(),
    "matrices": lambda params: [(p.grad @ p.grad.T).trace().item() for p in params if p.dim() == 2],
    "rows": lambda params: [p.detach()[1].tolist() for p in params if p.dim() == 2],
    "arithmetic": lambda params: [(2 * p.detach() ** 2 - p.grad / 3).sum().item() for p in params],
    "copies": lambda params: [p.detach().clone().tolist() for p in params],
}


def _readings(pins: dict[str, Any] | None) -> dict[str, Any]:
    model = stepped(one() if pins is None else compiled(pins))
    params = list(model.parameters())
    return {name: read(params) for name, read in READINGS.items()}


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_read_is_of_the_whole(pair: WorkerPool, plan: str) -> None:
    expected = _readings(None)
    for found in pair.run(_readings, PLANS[plan], timeout_s=120):
        for name, value in expected.items():
            assert _flat(found[name]) == pytest.approx(_flat(value), rel=1e-12, abs=1e-13), name


def _flat(value: Any) -> list[float]:
    if isinstance(value, (list, tuple)):
        return [x for v in value for x in _flat(v)]
    return [float(value)]


# ----------------------------------------------------------------------------------------------- what is done to them
def _clipped(model: Any) -> None:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert math.isfinite(float(norm))


def _penalty(model: Any) -> None:
    model.zero_grad()
    (model(*batch()) + 0.1 * sum(p.pow(2).sum() for p in model.parameters()) + 0.01 * sum(p.norm() for p in model.parameters())).backward()


def _written(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9).clamp_(-0.2, 0.2).add_(torch.ones(p.shape, dtype=p.dtype), alpha=0.01)
            p.data[0] = 0.25
            p.view(-1)[-1:].fill_(0.5)


def _copied_in(model: Any) -> None:
    whole = {name: torch.full(p.shape, float(k), dtype=p.dtype) for k, (name, p) in enumerate(model.named_parameters())}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(whole[name]) if "weight" in name else setattr(p, "data", whole[name])


def _vector_written(model: Any) -> None:
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector * 2, model.parameters())


def _backed_up(model: Any) -> None:
    backup = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.full(p.shape, 0.3, dtype=p.dtype)
    for name, p in model.named_parameters():
        p.data = backup[name] if "weight" in name else p.data + backup[name]


def _orthogonal(model: Any) -> None:
    torch.manual_seed(7)
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.orthogonal_(p)


def _initialised(model: Any) -> None:
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
        if p.dim() == 2:
            nn.init.eye_(p[:4])


def _with_plain_operands(model: Any) -> None:
    model.zero_grad()
    scales = {name: torch.ones(p.shape, dtype=p.dtype, requires_grad=True) for name, p in model.named_parameters()}
    alpha = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    sum((p * scales[name] * alpha).sum() for name, p in model.named_parameters()).backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.sub_(0.1 * scales[name].grad + 0.01 * alpha.grad)


def _sharpness(model: Any) -> None:
    params = list(model.parameters())
    scale = 0.05 / torch.stack([p.grad.norm() for p in params]).norm()
    moves = [(p.grad * scale).clone() for p in params]
    with torch.no_grad():
        for p, e in zip(params, moves, strict=True):
            p.add_(e)
    model.zero_grad()
    model(*batch(1)).backward()
    with torch.no_grad():
        for p, e in zip(params, moves, strict=True):
            p.sub_(e)


def _hooked(model: Any) -> None:
    model.zero_grad()
    handles = [p.register_hook(lambda g: g / (1 + g.norm())) for p in model.parameters()]
    model(*batch()).backward()
    for handle in handles:
        handle.remove()


def _loaded(model: Any) -> None:
    state = {name: value + 1 for name, value in one().state_dict().items()}
    model.load_state_dict(state)


WRITINGS = {f.__name__.strip("_"): f for f in (
    _clipped, _penalty, _written, _copied_in, _vector_written, _backed_up, _orthogonal, _initialised, _with_plain_operands, _sharpness,
    _hooked, _loaded,
)}  # fmt: skip


def _writings(pins: dict[str, Any] | None, name: str) -> tuple[list[float], dict[str, Tensor]]:
    """What is done once, then a step of SGD, and two losses."""
    model = stepped(one() if pins is None else compiled(pins))
    WRITINGS[name](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    losses = [model(*batch(s)).item() for s in range(2)]
    return losses, model.state_dict() if pins is None else model.full_state_dict()


@pytest.mark.parametrize("name", WRITINGS)
@pytest.mark.parametrize("plan", ["tp", "pp", "zero3"])
def test_what_is_done_is_done_to_the_whole(pair: WorkerPool, plan: str, name: str) -> None:
    losses, state = _writings(None, name)
    for found, parallel in pair.run(_writings, PLANS[plan], name, timeout_s=120):
        assert found == pytest.approx(losses, rel=1e-11)
        for key, value in state.items():
            torch.testing.assert_close(parallel[key], value, rtol=1e-10, atol=1e-12)


# --------------------------------------------------------------------------------------------------------------- optimizers
def _optimizers() -> dict[str, Callable[[Any], Any]]:
    optim: Any = torch.optim
    found: dict[str, Callable[[Any], Any]] = {
        "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "adamw": lambda p: optim.AdamW(p, lr=0.01),
        "adamw foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True), "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
        "rprop": lambda p: optim.Rprop(p), "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
        "lbfgs": lambda p: optim.LBFGS(p, max_iter=3),
    }  # fmt: skip
    return found


def _trained(pins: dict[str, Any] | None, name: str, before: bool) -> tuple[list[float], dict[str, Tensor]]:
    model: Any = one()
    make = _optimizers()[name]
    optimizer = make(model.parameters()) if before else None
    if pins is not None:
        model = compiled(pins, model)
    optimizer = optimizer or make(model.parameters())
    losses = []
    for step in range(3):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = model(*batch(step))
            loss.backward()
            return loss

        if name == "lbfgs":
            losses.append(optimizer.step(closure).item())
        else:
            losses.append(closure().item())
            optimizer.step()
    return losses, model.state_dict() if pins is None else model.full_state_dict()


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("name", list(_optimizers()))
@pytest.mark.parametrize("plan", ["tp", "pp", "zero3"])
def test_optimizers_of_any_kind_made_before_or_after(pair: WorkerPool, plan: str, name: str, before: bool) -> None:
    losses, state = _trained(None, name, before)
    for found, parallel in pair.run(_trained, PLANS[plan], name, before, timeout_s=120):
        assert found == pytest.approx(losses, rel=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(parallel[key], value, rtol=1e-8, atol=1e-10)


def _step_that_raises() -> tuple[bool, bool]:
    model = stepped(compiled({"tp": 2}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def broken() -> Any:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.step(broken)
    model(*batch())
    first = next(iter(model.parameters()))
    return isinstance(first, Part), first.shape == next(iter(one().parameters())).shape


def test_a_step_that_raises_leaves_parts(pair: WorkerPool) -> None:
    assert pair.run(_step_that_raises, timeout_s=60) == [(True, True)] * 2


# ------------------------------------------------------------------------------------------------------------ who holds them
def _same_objects(pins: dict[str, Any]) -> None:
    original = one()
    params, modules = dict(original.named_parameters()), dict(original.named_modules())
    model = compiled(pins, original)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in params.items()}
    for name, module in modules.items():
        if name:
            assert model.get_submodule(name) is module
    model.note = "of the user"
    assert original.note == "of the user"
    expected = one().state_dict()
    original.load_state_dict({name: value * 2 for name, value in expected.items()})  # into the original is into the model
    full = model.full_state_dict()
    assert all(torch.equal(full[name], value * 2) for name, value in expected.items())


def _copies() -> None:
    model = compiled({"tp": 2})
    with pytest.raises(TypeError, match="full_state_dict"):
        pickle.dumps(model)
    split = next(p for p in model.parameters() if p._lies.split)
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"full_state_dict\(\)"):
            refused(split)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(split * 2)


def _kept_for_later(pins: dict[str, Any]) -> None:
    """Deep copies of a state_dict, of an optimizer's and of gradients are what they were, whatever becomes of the model."""
    model = compiled(pins)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(*batch()).backward()
    optimizer.step()
    before = model.full_state_dict()
    kept, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    grads = copy.deepcopy([p.grad for p in model.parameters()])
    norms = [g.norm().item() for g in grads]
    twice = copy.deepcopy({"a": kept, "b": kept})
    assert twice["a"] is twice["b"]
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model(*batch()).backward()
        optimizer.step()
    assert any(not torch.equal(x, before[name]) for name, x in model.full_state_dict().items())
    assert [g.norm().item() for g in grads] == norms
    model.load_state_dict(kept)
    assert all(torch.equal(x, before[name]) for name, x in model.full_state_dict().items())
    optimizer.load_state_dict(states)
    assert all(state["step"] == 1 for state in optimizer.state.values())


def _another(pins: dict[str, Any]) -> None:
    """A deep copy of the module has the same plan and values in memory of its own, and follows the first without any exchange."""
    model = stepped(compiled(pins))
    before = model.full_state_dict()
    with torch.no_grad():
        other = copy.deepcopy(model)
    assert other.source == model.source and other.original is not model.original and all(p.grad is None for p in other.parameters())
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lies, "gather", lambda *_: pytest.fail("what lies alike was gathered"))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.add_(1.0)
            q.lerp_(p, 0.5)
    moved = other.full_state_dict()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, before[name] + 1)
        torch.testing.assert_close(moved[name], before[name] + 0.5)


class _Writing(nn.Linear):
    def save_pretrained(self, folder: str) -> None:
        raise OSError(f"{folder} is full")


def _not_written() -> str:
    model = autopar.compile(_Writing(4, 4), gpus=2, example_inputs=(torch.ones(2, 4),), cluster="cpu", pins={"tp": 2}, loss=torch.sum)
    try:
        model.save_pretrained("disk")
    except (OSError, autopar.LaunchError) as error:
        return f"{type(error).__name__}: {error}"
    return "written"


def _added_to_another(pins: dict[str, Any], others: dict[str, Any]) -> None:
    """Parameters of two modules under different plans."""
    model, other = compiled(pins), compiled(others)
    before = model.full_state_dict()
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.mul_(2.0)
            p.add_(q)
            p.data += q.data
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, 5 * before[name])


def _whole_for_a_while(pins: dict[str, Any]) -> None:
    model = compiled(pins)
    with model.full_parameters():
        for p in model.parameters():
            assert type(p) is nn.Parameter
            with torch.no_grad():
                p.add_(1.0 + dist.get_rank())  # rank 0's is what counts
    expected = one().state_dict()
    full = model.full_state_dict()
    assert all(torch.equal(full[name], value + 1) for name, value in expected.items())
    model.apply(lambda m: nn.init.constant_(m.weight, 0.5) if isinstance(m, nn.Linear) else None)
    linear = [name for name, m in one().named_modules() if isinstance(m, nn.Linear)]
    assert all((model.full_state_dict()[f"{name}.weight"] == 0.5).all() for name in linear)


def _put_in_whole() -> None:
    model = compiled({"tp": 2})
    name, p = next((n, p) for n, p in model.named_parameters() if p.dim() == 2)
    with model.full_parameters():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(torch.full(p.shape, 0.5, dtype=p.dtype)))
    assert (model.full_state_dict()[name] == 0.5).all()
    with pytest.raises(ValueError, match="by an object from outside"), model.full_parameters(), torch.no_grad():
        p.zero_()
    with pytest.raises(ValueError, match="would be lost"), model.full_parameters(write=False), model.full_parameters():
        pass
    with model.full_parameters():
        whole = dict(model.named_parameters())[name]
        whole.requires_grad_(False)
        whole.rate = 0.1
    assert not p.requires_grad
    assert p.rate == 0.1
    p.requires_grad_(True)
    with pytest.raises(ValueError, match="a hook was registered on"), model.full_parameters():
        dict(model.named_parameters())[name].register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=f"{name} was compiled in torch.float64 and cannot become torch.float16"):
        model.load_state_dict({name: torch.zeros(p.shape, dtype=torch.float16)}, strict=False, assign=True)
    model.apply(lambda m: m.requires_grad_(False))
    assert not any(q.requires_grad for q in model.parameters())
    model.apply(lambda m: m.requires_grad_(True))
    assert all(q.requires_grad for q in model.parameters())
    with model.full_parameters():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step()
    with pytest.raises(ValueError, match="an optimizer was given .* inside of full_parameters"):
        optimizer.step()


def _saved_state() -> None:
    model = stepped(compiled({"tp": 2}))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = optimizer.state_dict()
    shapes = [tuple(s["exp_avg"].shape) for s in state["state"].values()]
    assert shapes == [tuple(p.shape) for p in one().parameters()]
    for kept in (state, copy.deepcopy(state), copy.deepcopy(model.state_dict())):
        with pytest.raises(TypeError, match="full_state_dict"):
            pickle.dumps(kept)
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(state)
    again.step()


def _compiled_twice(pins: dict[str, Any]) -> None:
    original = one()
    first = compiled(pins, original)
    first(*batch()).backward()
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    state = first.full_state_dict()
    second = compiled({"dp": 2}, original)
    again = second.full_state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())
    with pytest.raises(autopar.LaunchError, match="compiled again: use the new one"):
        first(*batch())


def _computed_before_the_first_call(plan: dict[str, Any]) -> None:
    model = autopar.compile(one(), gpus=2, cluster="cpu", pins=plan)
    name, weight = next((n, p) for n, p in model.named_parameters() if p.dim() == 2)
    linear, square = 2 * weight.sum(), weight.square().sum()
    if plan == {"dp": 2}:  # which leaves it where it lies
        (model(*batch()) + linear + square).backward()
        alone = one()
        (alone(*batch()) + 2 * alone.get_parameter(name).sum() + alone.get_parameter(name).square().sum()).backward()
        torch.testing.assert_close(weight.grad, alone.get_parameter(name).grad, rtol=1e-9, atol=1e-12)
        return
    model(*batch()).backward()
    with pytest.raises(RuntimeError, match=f"a gradient of {name} is of what was computed of it before the first call"):
        linear.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()
    (2 * weight.sum() + weight.square().sum()).backward()  # as it is now


def _changed_objects() -> None:
    model = compiled({"tp": 2})
    name = next(name for name, m in model.named_modules() if isinstance(m, nn.Linear))
    parent, _, key = name.rpartition(".")
    owner = model.get_submodule(parent)
    kept = owner._modules[key]
    owner._modules[key] = nn.Linear(kept.in_features, kept.out_features).double()
    with pytest.raises(ValueError, match=f"submodule {name} is another one"):
        model(*batch())
    owner._modules[key] = kept
    weight = kept._parameters["weight"]
    kept._parameters["weight"] = nn.Parameter(torch.zeros_like(local(weight)))
    with pytest.raises(ValueError, match="is another object than when the model was compiled. Write new values into it"):
        model(*batch())
    kept._parameters["weight"] = weight
    others = {name: local(p).detach() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"torch.func.functional_call.* call it of model.original"):
        torch.func.functional_call(model, others, batch())
    with model.full_parameters():
        torch.func.functional_call(model.original, {name: p.detach() for name, p in model.named_parameters()}, batch())


def test_the_originals_modules_and_parameters_are_the_modules_own(pair: WorkerPool) -> None:
    for pins in PLANS.values():
        pair.run(_same_objects, pins, timeout_s=60)


def test_copies_are_refused(pair: WorkerPool) -> None:
    pair.run(_copies, timeout_s=60)


def test_what_rank_0_cannot_write_is_an_error_on_all(pair: WorkerPool) -> None:
    first, second = pair.run(_not_written, timeout_s=60)
    assert first == "OSError: disk is full" and second == "LaunchError: save_pretrained failed on rank 0: OSError: disk is full"


@pytest.mark.parametrize(("one", "other"), [("tp", "zero1"), ("zero1", "tp"), ("pp", "dp"), ("dp", "zero3"), ("pp", "tp")])
def test_parts_that_are_cut_otherwise_are_added_as_wholes(pair: WorkerPool, one: str, other: str) -> None:
    pair.run(_added_to_another, PLANS[one], PLANS[other], timeout_s=60)


@pytest.mark.parametrize("plan", PLANS)
def test_a_deep_copy_is_another_parallel_module(pair: WorkerPool, plan: str) -> None:
    pair.run(_another, PLANS[plan], timeout_s=60)


@pytest.mark.parametrize("plan", PLANS)
def test_deep_copies_of_parts_are_loaded_again(pair: WorkerPool, plan: str) -> None:
    pair.run(_kept_for_later, PLANS[plan], timeout_s=60)


@pytest.mark.parametrize("plan", ["tp", "pp", "zero3"])
def test_whole_for_a_while_and_compiled_again(pair: WorkerPool, plan: str) -> None:
    pair.run(_whole_for_a_while, PLANS[plan], timeout_s=60)
    pair.run(_compiled_twice, PLANS[plan], timeout_s=90)


def test_what_is_put_into_whole_parameters(pair: WorkerPool) -> None:
    pair.run(_put_in_whole, timeout_s=60)


def test_the_state_of_an_optimizer_is_of_parts(pair: WorkerPool) -> None:
    pair.run(_saved_state, timeout_s=60)


def _one_process() -> list[float]:
    model = autopar.compile(one(), gpus=1, example_inputs=batch(), cluster="cpu")
    first = model(*batch())
    model.second.weight.data = torch.zeros_like(model.second.weight)
    found = [model(*batch()).item()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        model.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()
    return found


def test_in_one_process_parameters_are_the_originals(pair: WorkerPool) -> None:
    expected = one()
    expected.second.weight.data = torch.zeros_like(expected.second.weight)
    assert _one_process() == pytest.approx([expected(*batch()).item()], rel=1e-12)


def test_objects_that_are_replaced_are_refused(pair: WorkerPool) -> None:
    pair.run(_changed_objects, timeout_s=60)


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_what_was_computed_before_the_first_call_gives_parts_no_gradients(pair: WorkerPool, plan: dict[str, Any]) -> None:
    pair.run(_computed_before_the_first_call, plan, timeout_s=60)


def test_one_process_has_plain_parameters() -> None:
    model = autopar.compile(one(), gpus=1, example_inputs=batch(), cluster="cpu")
    assert isinstance(model, ParallelModule)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def deep_copies() -> list[str]:
    """What of a deep copy is not the tensor that was copied. The model has many tensors, so that memory is used again."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(12)), nn.Linear(6, 1)).double()
    parallel = autopar.compile(model, gpus=2, example_inputs=(torch.randn(4, 6).double(),), cluster="cpu", pins={"dp": 2}, loss=torch.sum)
    expected = {name: tensor.clone() for name, tensor in parallel.full_state_dict().items()}
    wrong = []
    for source in (parallel.state_dict(), dict(parallel.named_parameters())):
        for name, tensor in copy.deepcopy(source).items():
            if type(tensor) not in (Tensor, nn.Parameter) or not torch.equal(tensor, expected[name]):
                wrong.append(name)
    return wrong


def test_deep_copies_of_what_is_whole(pair: WorkerPool) -> None:
    assert pair.run(deep_copies) == [[], []]


def _read_by_memory() -> list[str]:
    model = autopar.compile(one(), gpus=2, cluster="cpu", pins={"tp": 2}, example_inputs=batch())
    weight = next(p for p in model.parameters() if lies_of(p).split and p.dim() == 2).detach()
    arriving = torch.ones(weight.shape, dtype=weight.dtype, requires_grad=True)
    reads = (
        torch.vmap(torch.sum), torch.func.grad(torch.sum), torch.jit.trace(torch.sum, torch.ones(2)), torch.utils.dlpack.to_dlpack,
        lambda w: torch.autograd.grad(2 * w.requires_grad_(), w, arriving, create_graph=True),
    )  # fmt: skip
    told = []
    for read in reads:
        with pytest.raises(TypeError) as raised:
            read(weight)
        told.append(str(raised.value))
    return told


def test_what_takes_the_memory_of_a_part_for_the_whole_is_refused(pair: WorkerPool) -> None:
    for told in pair.run(_read_by_memory):
        assert [("held in parts" in text, "full_parameters" in text) for text in told] == [(True, True)] * 5


def _collectives_of_a_look() -> list[int]:
    """To put values back, and to note which have been there."""
    params = list(compiled(PLANS["zero3"]).parameters())
    begun = record.count()
    with values_as_before(params):
        looked = record.count()
    return [looked - begun, record.count() - looked]


def test_parts_are_not_gathered_to_be_put_back(pair: WorkerPool) -> None:
    assert pair.run(_collectives_of_a_look) == [[0, 0], [0, 0]]
