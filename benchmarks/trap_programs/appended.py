"""What a forward and its hooks write down for the loop: lists that grow, activations, losses on the way, numbers to be logged."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks._traps_kit import (
    HIDDEN,
    Compile,
    Logits,
    Net,
    Normed,
    Results,
    batch,
    batches,
    program,
    samples,
    seeded,
    sgd,
    state,
    train,
    trained,
)

KIND = "appended"
MORE = ("dp2tp2",)


class Logging(Net):
    """Keeps means of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        self.log.append(h.detach().square().mean(0))
        return h


def _sums(tensors: list[Tensor]) -> list[float]:
    return [t.detach().double().sum().item() for t in tensors]


@program(KIND, plans=MORE)
def list_that_grows(compile: Compile) -> Results:
    model = compile(seeded(Logging), example_inputs=batch(), outputs="all")
    return {**trained(model), "log": _sums(model.log)}


@program(KIND, plans=MORE)
def list_that_the_loop_empties(compile: Compile) -> Results:
    """Emptied after each step, replaced by another one once, evaluated in between, and begun before compile."""
    model = seeded(Logging)
    model(*batch(8))
    model = compile(model, example_inputs=batch(), outputs="all")
    optimizer, losses, seen = sgd(model), [], []
    for step, given in enumerate(batches(4)):
        losses += train(model, optimizer, inputs=[given])
        with torch.no_grad():
            model(*batch(9))
        seen.append(_sums(model.log))
        if step == 1:
            model.log = []
        else:
            model.log.clear()
    return {"losses": losses, "seen": torch.tensor([x for some in seen for x in some]), "sizes": [len(some) for some in seen]}


@program(KIND, plans=MORE)
def features_collected_by_hooks(compile: Compile) -> Results:
    """A list of the loop, to which hooks on two layers append, with their names."""
    features: list[tuple[str, Tensor]] = []
    model = seeded(Net)
    for name in ("first", "blocks.1"):
        part = model.get_submodule(name)
        part.register_forward_hook(lambda module, args, output, name=name: features.append((name, output.detach())))
    model = compile(model, example_inputs=batch())
    losses = train(model)
    return {"losses": losses, "names": [n for n, _ in features].count("first"), "features": _sums([t for _, t in features])}


class Aside(Logits):
    """Appends a loss of its own to a list, for the loop to add."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        self.losses += [0.1 * h.square().mean()]
        self.losses.extend([0.01 * h.abs().mean()])
        return h


@program(KIND, plans=MORE)
def losses_on_the_way(compile: Compile) -> Results:
    model = compile(seeded(Aside), example_inputs=(samples(),))
    optimizer, losses = sgd(model), []
    for x, y in batches(4):
        loss = F.cross_entropy(model(x), y) + sum(model.losses)
        model.losses.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def numbers_collected_by_a_hook(compile: Compile) -> Results:
    """Registered after compile, as `.item()`."""
    model = compile(seeded(Net), example_inputs=batch())
    seen: list[float] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.detach().mean().item()))
    return {**trained(model), "seen": seen}


class Measured(Normed):
    """Keeps its loss, its accuracy and the count of its hits as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.history, self.figures = 0.0, [], dict[str, Any]()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.logits(x)
        hits = logits.argmax(1) == y
        loss = F.cross_entropy(logits, y)
        self.accuracy = float(hits.to(logits.dtype).mean())
        self.history.append(loss.item())
        self.figures["hits"] = hits.sum().item()
        return loss


@program(KIND, plans=MORE)
def figures_kept_as_numbers(compile: Compile) -> Results:
    model = compile(seeded(Measured), example_inputs=batch(), outputs="all")
    optimizer, found = sgd(model), []
    for given in [*batches(3), batch(5, size=7)]:
        found += train(model, optimizer, inputs=[given])
        found += [model.accuracy, model.figures["hits"]]
    return {"found": found, "history": model.history, "kinds": [type(x).__name__ == "int" for x in model.figures.values()]}


class Dropping(Net):
    """A number that is another in each call of the same batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.shown: list[float] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        loss = super().forward(x, y) * (1 + 0.1 * self.calls)
        self.shown.append(loss.item())
        self.last = loss.item()
        return loss


@program(KIND, plans=MORE)
def numbers_of_each_call(compile: Compile) -> Results:
    model = compile(seeded(Dropping), example_inputs=batch(), outputs="all")
    return {"losses": train(model), "shown": model.shown, "last": model.last}


class Reading(Net):
    """What is appended is read in the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = [torch.zeros(HIDDEN)]

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        self.seen.append(h.detach().mean(0))
        return h + 0.1 * self.seen[-2]


@program(KIND)
def list_of_which_the_last_is_used(compile: Compile) -> Results:
    return trained(compile(seeded(Reading), example_inputs=batch(), outputs="all"))


class Counting(Net):
    """How much was appended is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        self.seen.append(h.detach().mean(0))
        return h / len(self.seen)


@program(KIND)
def list_of_which_the_length_is_asked(compile: Compile) -> Results:
    return trained(compile(seeded(Counting), example_inputs=batch(), outputs="all"))


class Again(Net):
    """Appends where torch.utils.checkpoint runs it a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def hidden(self, x: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            self.seen.append(h.detach().mean(0))
            return torch.tanh(h)

        return checkpoint(inner, super().hidden(x), use_reentrant=False)


@program(KIND)
def list_in_a_checkpoint(compile: Compile) -> Results:
    model = compile(seeded(Again), example_inputs=batch(), outputs="all")
    return {"losses": train(model), "seen": _sums(model.seen)}


@program(KIND)
def list_under_two_names(compile: Compile) -> Results:
    model = seeded(Logging)
    model.other = model.log
    model = compile(model, example_inputs=batch(), outputs="all")
    losses = train(model)
    return {"losses": losses, "one": model.log is model.other, "log": _sums(model.other)}


FEATURES: list[Tensor] = []


class Global(Net):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        FEATURES.append(h.detach())
        return h


@program(KIND)
def list_of_a_module_of_python(compile: Compile) -> Results:
    FEATURES.clear()
    model = compile(seeded(Global), example_inputs=batch())
    return {"losses": train(model), "features": _sums(FEATURES)}


@program(KIND, plans=MORE)
def lists_that_hooks_make(compile: Compile) -> Results:
    """In dicts of the loop, which empties one of them and replaces the other."""
    model = seeded(Net)
    means: defaultdict[str, list[float]] = defaultdict(list)
    model.features = {}
    for name in ("first", "blocks.0", "blocks.1"):
        part = model.get_submodule(name)
        part.register_forward_hook(lambda module, args, output, name=name: means[name].append(output.detach().mean().item()))
        part.register_forward_hook(lambda module, args, output, name=name: model.features.setdefault(name, []).append(output.detach()))
    model = compile(model, example_inputs=batch())
    optimizer, losses, seen, sizes = sgd(model), [], [], []
    for step, given in enumerate(batches(5)):
        losses += train(model, optimizer, inputs=[given])
        seen += [x for some in means.values() for x in some]
        seen += [x for some in model.features.values() for x in _sums(some)]
        sizes += [(name, len(some)) for name, some in [*means.items(), *model.features.items()]]
        if step in (1, 2):
            means.clear()
            model.features = {}
    return {"losses": losses, "seen": torch.tensor(seen), "sizes": sizes}


@program(KIND, plans=MORE)
def arrays_that_hooks_keep(compile: Compile) -> Results:
    """At the end of a list, under a key, and in an attribute, of batches of two sizes."""
    model = seeded(Net)
    seen: list[Any] = []
    last: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        module.last = output.detach().cpu().numpy()

    model.first.register_forward_hook(lambda module, args, output: seen.append(output.detach().numpy()))
    model.blocks[0].register_forward_hook(lambda module, args, output: last.update(block=output.detach().cpu().numpy()))
    model.blocks[1].register_forward_hook(keep)
    model = compile(model, example_inputs=batch())
    optimizer, found = sgd(model), []
    for given in [*batches(3), batch(5, size=7)]:
        found += train(model, optimizer, inputs=[given])
        found += [float(abs(x).sum()) for x in (last["block"], model.blocks[1].last)]
    shapes = [tuple(x.shape) for x in seen]
    return {"found": found, "sums": [float(abs(x).sum()) for x in seen], "shapes": shapes, "types": {type(x).__name__ for x in seen}}


@program(KIND, plans=MORE)
def activations_of_hooks_in_the_loss(compile: Compile) -> Results:
    """Latest activations, by name, in a dict of the loop, which makes a penalty of one."""
    model = seeded(Net)
    activations: dict[str, Tensor] = {}
    for name in ("first", "blocks.1"):
        part = model.get_submodule(name)
        part.register_forward_hook(lambda module, args, output, name=name: activations.__setitem__(name, output))
    model = compile(model, example_inputs=batch())
    optimizer, losses = sgd(model), []
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = model(x, y) + 0.1 * activations["blocks.1"].square().mean()
        loss.backward()
        optimizer.step()
        losses += [loss.item(), activations["first"].detach().sum().item()]
    return {"losses": losses, "state": state(model)}


class Meter:
    """The mean of what it was given."""

    def __init__(self) -> None:
        self.total, self.count, self.mean = 0.0, 0, 0.0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count
        self.mean = self.total / self.count


class Metered(Net):
    """Counts hits, adds up losses, and weighs the loss by a running mean of it."""

    def __init__(self) -> None:
        super().__init__()
        self.hits, self.running, self.meter, self.figures = 0, 1.0, Meter(), {"loss": 0.0}
        self.right, self.decayed = 0, 0.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.logits(x)
        loss = F.cross_entropy(logits, y)
        self.hits += (logits.argmax(1) == y).sum().item()
        self.running = 0.9 * self.running + 0.1 * loss.item()
        self.meter.update(loss.item(), len(x))
        self.figures["loss"] += loss.item()
        self.right += int((logits.argmax(1) == y).sum())
        self.decayed = 0.5 * self.decayed + float(loss.detach())
        return loss / self.running


@program(KIND, plans=MORE)
def running_numbers_of_the_forward(compile: Compile) -> Results:
    """The loop sets one of them anew."""
    model = compile(seeded(Metered), example_inputs=batch())
    optimizer, found = sgd(model), []
    for step, given in enumerate([*batches(4), batch(5, size=7)]):
        found += train(model, optimizer, inputs=[given])
        found += [model.hits, model.running, model.meter.mean, model.figures["loss"], model.right, model.decayed]
        if step == 1:
            model.hits, model.figures["loss"] = 0, 0.0
    return {"found": found, "kinds": [type(model.hits).__name__, type(model.running).__name__], "state": state(model)}


@program(KIND, plans=MORE)
def running_numbers_of_a_hook(compile: Compile) -> Results:
    """Of Welford's, in variables that a hook closes over; a hook that is wrapped counts itself."""
    model = seeded(Net)
    count, mean, squares = 0, 0.0, 0.0

    def wrapped(function: Any) -> Any:
        @functools.wraps(function)
        def counting(*args: Any) -> Any:
            counting.calls += 1  # type: ignore[attr-defined]
            return function(*args)

        counting.calls = 0  # type: ignore[attr-defined]
        return counting

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal count, mean, squares
        value = output.detach().abs().mean().item()
        count += 1
        before = value - mean
        mean += before / count
        squares += before * (value - mean)

    model.blocks[0].register_forward_hook(hook)
    model.first.forward = forward = wrapped(model.first.forward)
    model = compile(model, example_inputs=batch())
    optimizer, found = sgd(model), []
    for given in batches(4):
        found += [*train(model, optimizer, inputs=[given]), count, mean, squares, forward.calls]
    return {"found": found}


class Row(NamedTuple):
    layer: str
    mean: float


@dataclass
class Entry:
    layer: str
    values: Tensor


class Note:
    def __init__(self, shape: tuple[int, ...], most: float) -> None:
        self.shape, self.most = shape, most


@program(KIND, plans=MORE)
def records_that_hooks_leave(compile: Compile) -> Results:
    model = seeded(Net)
    rows: list[Row] = []
    notes: list[Any] = []
    entries: dict[str, Entry] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        h = output.detach()
        rows.append(Row("first", h.mean().item()))
        notes.append(Note(tuple(h.shape), h.max().item()))
        notes.append(SimpleNamespace(shape=h.shape[1], most=h.min().item()))
        entries["first"] = Entry("first", h.sum(0))
        module.latest = Row("first", h.std().item())

    model.first.register_forward_hook(keep)
    model = compile(model, example_inputs=batch())
    losses = train(model)
    found = [row.mean for row in rows] + [note.most for note in notes] + _sums([entries["first"].values]) + [model.first.latest.mean]
    return {"losses": losses, "found": found, "shapes": [note.shape for note in notes], "kinds": [type(x).__name__ for x in notes]}


class Recent(Net):
    """Keeps the latest losses."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[float] = deque(maxlen=3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x), y)
        self.recent.append(loss.item())
        return loss


@program(KIND, plans=MORE)
def latest_in_a_deque(compile: Compile) -> Results:
    """Of three and of one, also of a batch of another size when they are full."""
    model = seeded(Recent)
    last: deque[Tensor] = deque(maxlen=1)
    model.first.register_forward_hook(lambda module, args, output: last.append(output.detach()))
    model = compile(model, example_inputs=batch())
    optimizer, found, sizes = sgd(model), [], []
    for given in [*batches(4), batch(5, size=7), batch(6, size=7)]:
        found += [*train(model, optimizer, inputs=[given]), sum(model.recent) / len(model.recent), *_sums([last[0]])]
        sizes += [len(model.recent), model.recent.maxlen, len(last), len(last[0])]
    return {"found": found, "sizes": sizes}


class _Judged(Net):
    """Leaves what it has come to in a tuple, of numbers of both kinds and a size."""

    last = (0.0, 0, 0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.logits(x)
        loss = F.cross_entropy(logits, y)
        self.last = loss.item(), (logits.argmax(1) == y).sum().item(), len(x)
        return loss


@program(KIND)
def tuples_of_numbers(compile: Compile) -> Results:
    """In an attribute, a list, a dict and a variable around a hook."""
    model = seeded(_Judged)
    moments: list[tuple[float, float]] = []
    by_name: dict[str, tuple[int, int]] = {}
    newest: tuple[float, float] | None = None

    def noted(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal newest
        moments.append((output.mean().item(), output.std().item()))
        by_name["positive"] = int((output > 0).sum().item()), output.numel()
        newest = output.max().item(), 0.5

    model.blocks[0].register_forward_hook(noted)
    model = compile(model, example_inputs=batch())
    losses, seen = [], []
    for _ in range(3):
        losses += train(model, steps=1)
        seen.append((model.last, by_name["positive"], newest))
    return {"losses": losses, "moments": moments, "seen": seen, "state": state(model)}
