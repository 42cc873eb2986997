"""What a forward does besides computing is followed exactly, or refused with its name and a remedy, whether the model has data or not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture, run_program
from autopar.capture.as_before import left_as_it_was
from autopar.capture.state import State
from autopar.errors import CaptureError
from tests.stateful_models import BATCH, DIM, MASKS, SEEN, Model, build, equal, snapshot

pytestmark = pytest.mark.pure


def test_tables_of_a_module_that_held_nothing_are_empty_again() -> None:
    """Those that nothing watches too: hooks of what a module saves, names of its buffers that are not saved."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    start = State.take(model)
    tables = [name for name in vars(model[1]) if isinstance(vars(model[1])[name], (dict, set)) and not vars(model[1])[name]]
    assert len(tables) > 8
    for name in tables:
        table = vars(model[1])[name]
        table.add("mean") if isinstance(table, set) else table.update({0: print})
    start.restore()
    assert all(not vars(model[1])[name] for name in tables)


# ------------------------------------------------------------------------------------------------ buffers that are followed
def average(m: Any, x: Tensor) -> Tensor:
    m.ema = 0.9 * m.ema + 0.1 * x.mean(0)
    return m.linear(x) - m.ema


def average_of_activations(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.ema = 0.9 * m.ema + 0.1 * h.mean(0).detach()
    return h * m.ema


def average_that_the_loss_does_not_use(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.ema = 0.9 * m.ema + h.mean(0)  # which keeps the graph; no gradient flows through it
    return h


def old_value_in_the_loss(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x) * m.ema.view(-1, 2).flatten() + m.ema * m.other
    m.ema = 0.9 * m.ema + h.detach().mean(0)
    m.other = m.other * 1.5
    return h


def queue(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    keys = m.table_of_keys.clone().detach()
    m.table_of_keys = torch.cat([h.detach(), m.table_of_keys[:-BATCH]])
    return h @ keys.T


def data_assigned(m: Any, x: Tensor) -> Tensor:
    m.ema.data = 0.9 * m.ema.data + x.mean(0)
    return m.linear(x) * m.ema


def data_written(m: Any, x: Tensor) -> Tensor:
    m.ema.data.mul_(0.9).add_(m.linear(x).data.mean(0))
    return m.linear(x) * m.ema


def counter(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.steps = m.steps + 1
    return m.linear(x) / m.steps


def registered_again(m: Any, x: Tensor) -> Tensor:
    m.register_buffer("ema", m.ema + x.mean(0))
    return m.linear(x) - m.ema


def swapped(m: Any, x: Tensor) -> Tensor:
    m.ema, m.other = m.other, m.ema + x.mean(0)
    return m.linear(x) * m.ema


def rotated_view(m: Any, x: Tensor) -> Tensor:
    old = m.ema
    m.ema = m.other.view(2, 3).t().reshape(-1)
    m.other = old.view(3, 2).t().reshape(-1) + x.mean(0)
    return m.linear(x) * m.ema


def in_a_submodule_twice(m: Any, x: Tensor) -> Tensor:
    return m.inner(m.inner(m.linear(x)))


def assigned_then_written(m: Any, x: Tensor) -> Tensor:
    m.ema = m.ema + x.mean(0)
    m.ema.mul_(2)
    m.other.add_(m.ema)
    return m.linear(x) * m.other


FOLLOWED = [
    average, average_of_activations, average_that_the_loss_does_not_use, old_value_in_the_loss, queue, data_assigned, data_written,
    counter, registered_again, swapped, rotated_view, in_a_submodule_twice, assigned_then_written,
]  # fmt: skip


def run_three_times(captured: Captured, model: Model, batches: list[Tensor]) -> None:
    """The program and the model go through the same losses and buffers, from batch to batch."""
    program = captured.program
    values = {k: v.detach().clone() for k, v in captured.tensors.items()}
    for x in batches:
        values[program.inputs[0].value] = x
        found = run_program(program, values)
        torch.testing.assert_close(found, model(x).detach(), rtol=1e-5, atol=1e-6)
        for buffer in program.buffers:
            if buffer.fqn is not None:
                torch.testing.assert_close(values[buffer.value], model.get_buffer(buffer.fqn).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fn", FOLLOWED, ids=lambda f: f.__name__)
def test_buffers_that_the_forward_assigns_are_mutated(fn: Callable[..., Tensor]) -> None:
    model, inputs = build(fn)
    before, objects = snapshot(model), [id(b) for b in model.buffers()]
    captured = capture(model, inputs)
    assert captured.program.mutations
    assert equal(before, snapshot(model))
    assert objects == [id(b) for b in model.buffers()]
    assert captured.guards is not None and captured.guards.changed() is None
    with torch.no_grad():
        run_three_times(captured, model, [torch.randn(BATCH, DIM) for _ in range(3)])


@pytest.mark.parametrize("fn", FOLLOWED, ids=lambda f: f.__name__)
def test_without_data_the_program_is_the_same(fn: Callable[..., Tensor]) -> None:
    real, meta = (capture(*build(fn, device)).program for device in ("cpu", "meta"))
    assert real.mutations == meta.mutations and real.ops == meta.ops


# -------------------------------------------------------------------------------------------------- what is no obstacle
def mask_made_once(m: Any, x: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = torch.ones(DIM, DIM, device=x.device).tril()
    return m.linear(x) @ m.cache


def masks_by_size(m: Any, x: Tensor) -> Tensor:
    if DIM not in MASKS:
        MASKS[DIM] = torch.arange(DIM, dtype=torch.float32, device=x.device)
    return m.linear(x) * MASKS[DIM]


def lazy_buffer(m: Any, x: Tensor) -> Tensor:
    if m.lazy is None:
        m.lazy = torch.arange(DIM, dtype=torch.float32, device=x.device)
    return m.linear(x) * m.lazy


def size_remembered(m: Any, x: Tensor) -> Tensor:
    m.count = max(m.count, x.shape[0])
    return m.linear(x)


def activations_left(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.cache = [h, {"mean": h.mean()}]
    return h + m.cache[1]["mean"]


def list_made_anew(m: Any, x: Tensor) -> Tensor:
    m.history = []
    for _ in range(2):
        m.history.append(m.linear(x))
    return sum(m.history)  # type: ignore[return-value]


def draw_without_effect(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * 2 if random.random() < 0.0 else m.linear(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("fn", [mask_made_once, masks_by_size, lazy_buffer, size_remembered, draw_without_effect], ids=lambda f: f.__name__)
def test_caches_are_no_state(fn: Callable[..., Tensor], device: str) -> None:
    MASKS.clear()
    model, inputs = build(fn, device)
    before = snapshot(model)
    captured = capture(model, inputs)
    assert equal(before, snapshot(model)) and not captured.written
    assert captured.guards is not None and captured.guards.changed() is None
    assert model.lazy is None
    if device == "cpu":
        model(*inputs)  # what the forward itself writes is not watched
        assert captured.guards.changed() is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("fn", [activations_left, list_made_anew], ids=lambda f: f.__name__)
def test_tensors_that_each_call_leaves_are_named(fn: Callable[..., Tensor], device: str) -> None:
    model, inputs = build(fn, device)
    before = snapshot(model)
    captured = capture(model, inputs)
    assert equal(before, snapshot(model))
    assert captured.written and all(path.startswith(("cache", "history")) for path in captured.written)
    assert any("the forward leaves tensors in" in note for note in captured.program.notes)


@functools.lru_cache
def causal(n: int, device: str = "cpu") -> Tensor:
    return torch.ones(n, n, device=device).tril()


@functools.cache
def tables(n: int, device: str = "cpu") -> tuple[dict[str, Tensor], int]:
    return {"sin": torch.arange(n, device=device).sin()}, n


def cached_functions(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) @ causal(DIM, x.device.type) + tables(DIM, x.device.type)[0]["sin"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_function_caches_keep_no_tensor_without_data(device: str) -> None:
    for function in (causal, tables):
        function.cache_clear()
    captured = capture(*build(cached_functions, device))
    assert type(causal(DIM, device)) is Tensor
    assert type(tables(DIM, device)[0]["sin"]) is Tensor
    assert device == "meta" or torch.equal(tables(DIM, "cpu")[0]["sin"], torch.arange(DIM).sin())
    assert captured.program.mutations == ()
    again = capture(*build(cached_functions))  # with real tensors in the caches
    with torch.no_grad():
        model, (x,) = build(cached_functions)
        values = {**capture(model, (x,)).tensors, again.program.inputs[0].value: x}
        torch.testing.assert_close(run_program(capture(model, (x,)).program, values), model(x))


@dataclass(frozen=True)
class Table:
    values: Tensor


def in_a_closure() -> tuple[nn.Module, Callable[[int], Table]]:
    @functools.lru_cache
    def table(n: int) -> Table:
        return Table(torch.arange(n).sin())

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) + table(DIM).values).square().mean()

    return Cached(), table


def in_an_attribute() -> tuple[nn.Module, Callable[[int], Table]]:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = nn.Linear(DIM, DIM), functools.cache(lambda n: Table(torch.arange(n).sin()))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) + self.table(DIM).values).square().mean()

    model = Cached()
    return model, model.table


@pytest.mark.parametrize("made", [in_a_closure, in_an_attribute])
def test_function_caches_are_found_where_no_global_names_them(made: Callable[[], tuple[nn.Module, Callable[[int], Table]]]) -> None:
    model, table = made()
    x = torch.randn(4, DIM)
    captured = capture(model, (x,))
    assert type(table(DIM).values) is Tensor
    with torch.no_grad():
        found = run_program(captured.program, {**captured.tensors, captured.program.inputs[0].value: x})
        torch.testing.assert_close(found, model(x))


def test_weight_norm_and_spectral_norm_of_both_kinds() -> None:
    """Their pre-forward hooks assign the weight anew."""
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(DIM, DIM))
    model = nn.Sequential(
        old, nn.utils.spectral_norm(nn.Linear(DIM, DIM)), nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM)),
    )  # fmt: skip
    captured = capture(model, (torch.randn(BATCH, DIM),), loss=torch.sum)
    assert captured.guards is not None and captured.guards.changed() is None
    assert len(captured.program.mutations) >= 2


def test_forward_hooks_run_in_the_trace_if_they_only_compute() -> None:
    model, inputs = build(lambda m, x: m.linear(x))
    plain = capture(model, inputs).program
    handle = model.linear.register_forward_hook(lambda m, args, out: out * 2)
    assert len(capture(model, inputs).program.ops) == len(plain.ops) + 1
    handle.remove()
    calls: list[int] = []
    model.linear.register_forward_hook(lambda m, args, out: calls.append(1))
    guards = capture(model, inputs).guards
    assert guards is not None and calls == []
    guards.leave({})
    assert calls == [1]


# ------------------------------------------------------------------------------------------------------------- losses
def test_a_loss_over_a_list_of_parameters_is_that_over_the_models() -> None:
    model = nn.Linear(DIM, DIM)
    params, x = list(model.parameters()), (torch.randn(BATCH, DIM),)
    held = capture(model, x, loss=lambda out: out.sum() + sum(p.pow(2).sum() for p in params))
    own = capture(model, x, loss=lambda out: out.sum() + sum(p.pow(2).sum() for p in model.parameters()))
    assert [op.target for op in held.program.ops] == [op.target for op in own.program.ops]
    assert {"pow"} <= {op.target.split(".")[1] for op in held.program.ops}


@pytest.mark.parametrize("outside", [nn.Parameter(torch.ones(DIM)), torch.ones(DIM, requires_grad=True)], ids=["parameter", "tensor"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_with_gradients_that_are_not_the_models_are_refused(outside: Tensor, device: str) -> None:
    model, inputs = build(lambda m, x: m.linear(x), device)
    weights = outside.detach().to(device).requires_grad_()
    weights = nn.Parameter(weights) if isinstance(outside, nn.Parameter) else weights
    with pytest.raises(CaptureError, match="requires a gradient|a parameter(.|\n)*not the model's"):
        capture(nn.Linear(DIM, DIM, device=device), inputs, loss=lambda out: (out * weights).sum())
    model.history = [weights]
    model.fn = lambda m, x: m.linear(x) * m.history[0]
    with pytest.raises(CaptureError, match="requires a gradient|a parameter(.|\n)*not the model's"):
        capture(model, inputs)


def test_a_frozen_teacher_is_a_constant() -> None:
    teacher = nn.Linear(DIM, DIM)

    def distilled(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return m.linear(x) - target

    model, inputs = build(distilled)
    captured = capture(model, inputs)
    assert captured.guards is not None and captured.guards.changed() is None
    with torch.no_grad():
        teacher.weight.mul_(2)
    assert "teacher" in str(captured.guards.changed())


def test_a_loss_that_keeps_state_is_refused() -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, out: Tensor) -> Tensor:
            self.scale = 0.9 * self.scale + 0.1 * out.detach().abs().mean()
            return out.sum() / self.scale

    with pytest.raises(CaptureError, match=r"loss\.scale"):
        capture(nn.Linear(DIM, DIM), (torch.randn(BATCH, DIM),), loss=Averaged())


# --------------------------------------------------------------------------------------------------- arguments and numbers
class Variadic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, *parts: Tensor, scale: float = 2.0, bias: float = 1.0) -> Tensor:
        return sum(self.linear(p).sum() for p in parts) * scale + bias  # type: ignore[return-value]


def test_star_args_and_defaults() -> None:
    captured = capture(Variadic(), (torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)))
    assert [i.path for i in captured.program.inputs] == [(0,), (1,)]
    assert dict(captured.defaults) == {"scale": 2.0, "bias": 1.0}


def complex_numbers(m: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(m.linear(x).view(BATCH, -1, 2).contiguous())
    y = torch.view_as_complex(torch.stack([x[:, :3], x[:, 3:]], -1))
    return torch.view_as_real((z * y.conj()).conj() * torch.fft.fft(z).conj()).flatten(1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_conjugated_complex_tensors(device: str) -> None:
    capture(*build(complex_numbers, device))


def conjugated_constant(m: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(m.linear(x).view(BATCH, -1, 2).contiguous())
    return torch.view_as_real(z * m.cache).flatten(1)


def test_a_conjugated_constant() -> None:
    model, inputs = build(conjugated_constant)
    model.cache = torch.randn(3, dtype=torch.complex64).conj()
    captured = capture(model, inputs)
    assert captured.guards is not None and captured.guards.changed() is None


def scalar_that_is_asserted(m: Any, x: Tensor) -> Tensor:
    limit = int(x.abs().max()) + 1
    torch._check(limit > 0)
    return m.linear(x) * torch.clamp(x, max=limit)


def test_values_that_become_numbers_are_refused_as_such() -> None:
    with pytest.raises(CaptureError, match="what to do:"):
        capture(*build(scalar_that_is_asserted))


def test_a_forward_of_the_users_own_can_be_undone() -> None:
    """As verify=True does, which runs the original once."""

    def everything(m: Any, x: Tensor) -> Tensor:
        m.ema, m.count, m.cache = m.ema + 1, m.count + 1, x
        m.history.append(2.0)
        m.plain.add_(1)
        m.other.mul_(3)
        SEEN.append(1)
        return m.linear(x)

    model, (x,) = build(everything)
    before, objects = snapshot(model), [id(b) for b in model.buffers()]
    with left_as_it_was(model):
        model(x)
        assert not equal(before, snapshot(model))
    assert equal(before, snapshot(model))
    assert objects == [id(b) for b in model.buffers()] and model.cache is None


def test_a_gradient_that_the_forward_reads_is_refused() -> None:
    class Reading(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).sum() * (1.0 if self.weight.grad is None else 2.0)

    with pytest.raises(CaptureError, match=r"(?s)reads the gradient of a parameter.*self.weight.grad is None"):
        capture(Reading(DIM, DIM), (torch.randn(BATCH, DIM),))


def test_modes_that_the_forward_sets_are_left_by_a_call() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.inner.eval()
        return m.linear(nn.functional.dropout(x, 0.5, training=m.inner.training))

    model, inputs = build(forward)
    found = capture(model, inputs)
    assert model.inner.training and "aten.dropout.default" not in {op.target for op in found.program.ops}
    assert found.guards is not None
    found.guards.leave({})
    assert not model.inner.training and model.training and model.linear.training
