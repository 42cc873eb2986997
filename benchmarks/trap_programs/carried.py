"""Programs whose modules keep tensors from one call to the next in attributes: alone, in tuples, lists, dicts and objects, or None or a
number before the first; and loops that begin anew, detach, or go back through several calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import BATCH, HIDDEN, WIDTH, Compile, Results, gradients, program, seeded, sgd, state

KIND = "carried"
STEPS = 3
MICRO = ("pp2mb2",)


class Recurrent(nn.Module):
    """An LSTM of samples [batch, STEPS, 8], which gives a number for each step and keeps its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.between, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h, self.hidden = self.lstm(x, self.hidden)
        return self.head(torch.relu(self.between(h)))

    def zeros(self, count: int = BATCH) -> None:
        self.hidden = torch.zeros(1, count, HIDDEN), torch.zeros(1, count, HIDDEN)

    def detach(self) -> None:
        self.hidden = tuple(h.detach() for h in self.hidden)


class _Detached(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.detach()
        return result


def sequences(index: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(size, STEPS, WIDTH, generator=generator), torch.randn(size, STEPS, 1, generator=generator)


def _norms(hidden: Any) -> list[float]:
    return [h.detach().norm().item() for h in (hidden if isinstance(hidden, tuple | list) else (hidden,)) if isinstance(h, Tensor)]


def trained_on_sequences(
    model: Any, before: Callable[[int], Any] = lambda k: None, *, steps: int = 4, sizes: tuple[int, ...] = (), kept: str = "hidden"
) -> Results:
    """The usual loop. before: what it does before a call. kept: the attribute that is looked at after it."""
    optimizer, losses, norms = sgd(model), [], []
    for k in range(steps):
        x, y = sequences(k, sizes[k] if sizes else BATCH)
        before(k)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        norms += _norms(getattr(model, kept, None))
    return {"losses": losses, "norms": norms, "state": state(model)}


@program(KIND, plans=MICRO)
def hidden_states_that_the_loop_begins_anew(compile: Compile) -> Results:
    model = compile(seeded(Recurrent))
    return trained_on_sequences(model, lambda _: model.zeros())


@program(KIND, plans=MICRO)
def hidden_states_that_begin_with_none(compile: Compile) -> Results:
    """Set to None before every other batch, and detached before the others."""
    model = compile(seeded(Recurrent))
    return trained_on_sequences(model, lambda k: model.detach() if k % 2 else setattr(model, "hidden", None))


@program(KIND, plans=MICRO)
def hidden_states_that_are_carried_on(compile: Compile) -> Results:
    """Detached by the forward; the loop holds those of all calls."""
    model, held = compile(seeded(_Detached)), list[Any]()
    found = trained_on_sequences(model, lambda _: held.append(model.hidden))
    return {**found, "held": [_norms(hidden) for hidden in (*held[1:], model.hidden)]}


@program(KIND)
def hidden_states_of_batches_of_two_sizes(compile: Compile) -> Results:
    model, sizes = compile(seeded(Recurrent)), (BATCH, BATCH, 6, BATCH)
    return trained_on_sequences(model, lambda k: model.zeros(sizes[k]), sizes=sizes)


@program(KIND)
def hidden_states_of_an_evaluation_between(compile: Compile) -> Results:
    """Begun anew for it, carried from batch to batch, and put back."""
    model = compile(seeded(_Detached))
    first, saved = trained_on_sequences(model, steps=2), model.hidden
    model.eval()
    model.hidden = None
    with torch.no_grad():
        losses = [F.mse_loss(model(x), y).item() for x, y in (sequences(7, 6), sequences(8, 6))]
    model.train()
    model.hidden = saved
    return {"first": first["losses"], "evaluated": losses, **trained_on_sequences(model, steps=2)}


@program(KIND)
def gradients_through_two_calls(compile: Compile) -> Results:
    model = compile(seeded(Recurrent))
    x, y = sequences(0)
    model.zeros()
    loss = F.mse_loss(model(x), y) + F.mse_loss(model(x), y)
    loss.backward()
    return {"loss": loss, "gradients": gradients(model), "norms": _norms(model.hidden)}


@program(KIND)
def states_of_samples_that_are_done(compile: Compile) -> Results:
    """Set to zero in place, as between episodes."""
    model = compile(seeded(_Detached))

    def begun(k: int) -> None:
        for h in model.hidden if k else ():
            h[:, ::2] = 0

    return trained_on_sequences(model, begun)


class _Cell(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs, HIDDEN)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state)
        return self.state


class _Stack(nn.Module):
    """Cells that keep their states themselves, stepped by the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Sequential(_Cell(WIDTH), _Cell(HIDDEN), _Cell(HIDDEN))
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.head(self.cells(x[:, t])) for t in range(x.shape[1])], 1)


@program(KIND)
def cells_that_keep_their_states(compile: Compile) -> Results:
    """Begun anew, or detached, before each batch."""
    model = compile(seeded(_Stack))

    def begun(k: int) -> None:
        for cell in model.cells:
            cell.state = cell.state.detach() if k % 2 else None

    found = trained_on_sequences(model, begun)
    return {**found, "norms": _norms([cell.state for cell in model.cells])}


class _Stepped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_hidden, self.to_output = nn.Linear(WIDTH + HIDDEN, HIDDEN), nn.Linear(WIDTH + HIDDEN, 1)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat((x, self.hidden), 1)
        self.hidden = torch.tanh(self.to_hidden(joined))
        return self.to_output(joined)


@program(KIND)
def steps_that_the_loop_takes(compile: Compile) -> Results:
    """Backward goes through all of them."""
    model, losses = compile(seeded(_Stepped)), []
    optimizer = sgd(model)
    for k in range(3):
        x, y = sequences(k)
        model.hidden = torch.zeros(BATCH, HIDDEN)
        for t in range(STEPS):
            result = model(x[:, t])
        loss = F.mse_loss(result, y[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad / (1 + 10 * x.abs()) ** 2


class _Neuron(nn.Module):
    """Leaks, integrates and fires. Its potential is a number before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.potential: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.potential = self.potential + (x - self.potential) / 2
        spikes = _Spike.apply(self.potential - 0.2)
        self.potential = self.potential * (1 - spikes)
        return spikes


class _Spiking(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), _Neuron(), nn.Linear(HIDDEN, HIDDEN), _Neuron())
        self.head, self.steps = nn.Linear(HIDDEN, 1), steps

    def forward(self, x: Tensor) -> Tensor:
        spikes = sum(self.layers(x.mean(1)) for _ in range(self.steps))
        return self.head(spikes)[:, None].expand(-1, STEPS, -1)

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, _Neuron):
                module.potential = 0.0


@program(KIND)
def spiking_neurons(compile: Compile) -> Results:
    model = compile(seeded(_Spiking, 3))
    return trained_on_sequences(model, lambda _: model.reset())


@program(KIND)
def spiking_neurons_that_the_loop_steps(compile: Compile) -> Results:
    model, losses = compile(seeded(_Spiking, 1)), []
    optimizer = sgd(model)
    for k in range(2):
        x, y = sequences(k)
        loss = F.mse_loss(sum(model(x) for _ in range(3)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        model.reset()
    return {"losses": losses, "state": state(model)}


class _Memory(nn.Module):
    """Attends to what it has kept of earlier segments, which is nothing before the first, and then grows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.layers = nn.ModuleList(nn.MultiheadAttention(HIDDEN, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 1)
        self.memories: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h, kept = self.first(x), []
        for k, layer in enumerate(self.layers):
            seen = torch.cat((self.memories[k], h), 1) if self.memories else h
            kept.append(seen[:, -5:].detach())
            h = h + layer(h, seen, seen, need_weights=False)[0]
        self.memories = kept
        return self.head(h)


@program(KIND)
def memories_of_segments(compile: Compile) -> Results:
    return trained_on_sequences(compile(seeded(_Memory)), kept="memories")


class _Pair(NamedTuple):
    h: Tensor
    c: Tensor


@dataclasses.dataclass
class _State:
    h: Tensor | None = None
    c: Tensor | None = None


class _InATuple(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        h, found = self.lstm(x, self.hidden)
        self.hidden = _Pair(*(t.detach() for t in found))
        return self.head(torch.relu(self.between(h)))


class _InAnObject(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = _State()

    def forward(self, x: Tensor) -> Tensor:
        h, found = self.lstm(x, None if self.hidden.h is None else (self.hidden.h, self.hidden.c))
        self.hidden = _State(*(t.detach() for t in found))
        return self.head(torch.relu(self.between(h)))


class _InADict(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h, found = self.lstm(x, (self.kept["h"], self.kept["c"]) if self.kept else None)
        self.kept["h"], self.kept["c"] = (t.detach() for t in found)
        return self.head(torch.relu(self.between(h)))


@program(KIND)
def hidden_states_in_a_named_tuple(compile: Compile) -> Results:
    model = compile(seeded(_InATuple))
    return {**trained_on_sequences(model), "h": model.hidden.h.norm().item()}


@program(KIND)
def hidden_states_in_an_object(compile: Compile) -> Results:
    model = compile(seeded(_InAnObject))
    return {**trained_on_sequences(model), "h": model.hidden.h.norm().item()}


@program(KIND)
def hidden_states_in_a_dict(compile: Compile) -> Results:
    """Cleared between batches."""
    model = compile(seeded(_InADict))
    found = trained_on_sequences(model, lambda k: model.kept.clear() if k == 2 else None)
    return {**found, "h": model.kept["h"].norm().item()}


class _Marked(_Detached):
    """Says in a flag that it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.zeros(len(x))
            self.begun = True
        return super().forward(x)


@program(KIND)
def hidden_states_that_a_flag_begins(compile: Compile) -> Results:
    model = compile(seeded(_Marked))
    return trained_on_sequences(model, lambda k: setattr(model, "begun", False) if k == 2 else None)


class _Masked(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(BATCH, STEPS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.between(self.lstm(x)[0])) * self.mask)


@program(KIND, plans=MICRO)
def a_mask_that_the_loop_sets(compile: Compile) -> Results:
    """Another tensor for each batch."""
    model = compile(seeded(_Masked))
    return trained_on_sequences(model, lambda k: setattr(model, "mask", (sequences(k)[1] > 0).float()))


class Cached(nn.Module):
    """Attends to all that it was given in an evaluation, whose keys it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.key, self.query = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head, self.cache = nn.Linear(HIDDEN, 1), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        keys = self.key(h)
        if not self.training:
            keys = torch.cat((self.cache["keys"], keys), 1) if self.cache else keys
            self.cache["keys"] = keys
        return self.head(torch.softmax(self.query(h) @ keys.transpose(1, 2), -1) @ keys)


@program(KIND)
def keys_that_an_evaluation_keeps(compile: Compile) -> Results:
    """More with each call, and none after it."""
    model, found = compile(seeded(Cached)), []
    for _ in range(2):
        losses = trained_on_sequences(model, steps=2)["losses"]
        model.eval()
        with torch.no_grad():
            found += [model(sequences(7 + t)[0]).norm().item() for t in range(6)]
        found += [*losses, model.cache["keys"].norm().item(), model.cache["keys"].shape[1]]
        model.cache.clear()
        model.train()
    return {"found": found, "state": state(model)}
