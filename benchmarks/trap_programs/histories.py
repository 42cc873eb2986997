"""Programs whose modules keep histories: several tensors in a list or dict, of which a call replaces some, and copies of their weights."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import CLASSES, HIDDEN, Compile, Net, Results, batch, batches, program, seeded, sgd, state, trained

KIND = "carried"


def _trained(model: Any, *more: Any, steps: int = 6) -> Results:
    """The usual loop. more: further arguments of a call, in turns."""
    return trained(model, inputs=[(*given, more[k % len(more)]) if more else given for k, given in enumerate(batches(steps))])


def _set_before(set_: Callable[[int], Any], steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches, before each of which the loop sets something."""
    for k, given in enumerate(batches(steps)):
        set_(k)
        yield given


class _Keeping(Net):
    """Adds what it keeps to its hidden features."""

    kept: Any

    def forward(self, x: Tensor, y: Tensor, task: str = "a") -> Tensor:
        h = torch.tanh(self.first(x)) + 0.3 * self._of_before()
        self._keep(h.detach().mean(0), task)
        return F.cross_entropy(self.head(self.blocks(h)), y)

    def _of_before(self) -> Tensor:
        raise NotImplementedError

    def _keep(self, now: Tensor, task: str) -> None:
        raise NotImplementedError


class _Shifted(_Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(HIDDEN), torch.ones(HIDDEN)]

    def _of_before(self) -> Tensor:
        found: Tensor = self.kept[0]
        return found

    def _keep(self, now: Tensor, task: str) -> None:
        self.kept[0] = self.kept[1]
        self.kept[1] = now


@program(KIND)
def a_history_that_is_shifted(compile: Compile) -> Results:
    """The mean of the call before the last, of a list of two."""
    model = compile(seeded(_Shifted), example_inputs=batch())
    found = _trained(model)
    return {**found, "kept": [t.norm().item() for t in model.kept]}


class _Popped(_Shifted):
    def _keep(self, now: Tensor, task: str) -> None:
        self.kept.pop(0)
        self.kept.append(now)


@program(KIND)
def a_history_that_is_popped(compile: Compile) -> Results:
    """The same by pop and append."""
    model = compile(seeded(_Popped), example_inputs=batch())
    found = _trained(model)
    return {**found, "kept": [t.norm().item() for t in model.kept]}


class _InADeque(_Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = deque([torch.zeros(HIDDEN), torch.ones(HIDDEN), torch.ones(HIDDEN)], maxlen=3)

    def _of_before(self) -> Tensor:
        return torch.stack([*self.kept]).mean(0)

    def _keep(self, now: Tensor, task: str) -> None:
        self.kept.append(now)


@program(KIND)
def a_history_in_a_full_deque(compile: Compile) -> Results:
    model = compile(seeded(_InADeque), example_inputs=batch())
    found = _trained(model)
    return {**found, "kept": [t.norm().item() for t in model.kept], "most": model.kept.maxlen}


class _OfTasks(_Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"a": torch.zeros(HIDDEN), "b": torch.ones(HIDDEN)}

    def _of_before(self) -> Tensor:
        found: Tensor = self.kept["a"] - self.kept["b"]
        return found

    def _keep(self, now: Tensor, task: str) -> None:
        self.kept[task] = now


@program(KIND)
def a_state_of_each_task_in_a_dict(compile: Compile) -> Results:
    """Calls read all of them, and replace the one of their task."""
    model = compile(seeded(_OfTasks), example_inputs=(*batch(), "a"))
    found = _trained(model, "a", "b", "b")
    return {**found, "kept": [model.kept[task].norm().item() for task in "ab"]}


class _OfTasksInAList(_OfTasks):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(HIDDEN), torch.ones(HIDDEN)]

    def _of_before(self) -> Tensor:
        found: Tensor = self.kept[0] - self.kept[1]
        return found

    def _keep(self, now: Tensor, task: str) -> None:
        self.kept["ab".index(task)] = now


@program(KIND)
def a_state_of_each_task_in_a_list(compile: Compile) -> Results:
    model = compile(seeded(_OfTasksInAList), example_inputs=(*batch(), "a"))
    found = _trained(model, "a", "b", "b")
    return {**found, "kept": [t.norm().item() for t in model.kept]}


@program(KIND)
def a_state_beside_one_that_the_loop_sets(compile: Compile) -> Results:
    """The forward replaces one tensor of a dict, and the loop another."""
    model = compile(seeded(_OfTasks), example_inputs=batch())
    return trained(model, inputs=_set_before(lambda k: model.kept.update(b=torch.full((HIDDEN,), 0.5 * k)), 4))


class _AsTheyCome(_OfTasks):
    def __init__(self) -> None:
        super().__init__()
        self.kept = defaultdict(lambda: torch.zeros(HIDDEN))


@program(KIND)
def a_state_of_each_task_as_it_comes(compile: Compile) -> Results:
    """In a defaultdict."""
    model = compile(seeded(_AsTheyCome), example_inputs=(*batch(), "a"))
    found = _trained(model, "a", "b", "b")
    return {**found, "kept": [model.kept[task].norm().item() for task in "ab"]}


class Counted(_Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"count": 0, "mean": torch.zeros(HIDDEN)}

    def _of_before(self) -> Tensor:
        found: Tensor = self.kept["mean"]
        return found

    def _keep(self, now: Tensor, task: str) -> None:
        self.kept["count"] += 1
        self.kept["mean"] = self.kept["mean"] + (now - self.kept["mean"]) / self.kept["count"]


@program(KIND)
def a_mean_beside_its_count(compile: Compile) -> Results:
    """The mean of all calls in a dict with how many there were."""
    model = compile(seeded(Counted), example_inputs=batch())
    found = _trained(model)
    return {**found, "kept": [model.kept["count"], model.kept["mean"].norm().item()]}


class _Switched(_OfTasks):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"on": True, "mean": torch.zeros(HIDDEN)}

    def _of_before(self) -> Tensor:
        found: Tensor = self.kept["mean"]
        return found if self.kept["on"] else 0.5 * found

    def _keep(self, now: Tensor, task: str) -> None:
        self.kept["mean"] = now


@program(KIND)
def a_mean_beside_a_flag_of_the_loop(compile: Compile) -> Results:
    model = compile(seeded(_Switched), example_inputs=batch())
    return trained(model, inputs=_set_before(lambda k: model.kept.update(on=k not in (2, 3)), 5))


class _Anchored(nn.Module):
    """Is drawn back to the weights that its first call has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = Net(), nn.Linear(CLASSES, CLASSES)
        self.anchor: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net.logits(x)
        if self.anchor is None:
            self.anchor = self.last.weight.detach().clone()
        return F.cross_entropy(self.last(logits), y) + (self.last.weight - self.anchor).square().sum()


@program(KIND)
def an_anchor_of_the_first_weights(compile: Compile) -> Results:
    """A penalty on the distance from a copy of a weight that the first call makes."""
    model = compile(seeded(_Anchored), example_inputs=batch())
    found = _trained(model, steps=4)
    return {**found, "anchor": model.anchor.norm().item()}


class _Moving(_Anchored):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.last(self.net.logits(x)), y)
        if self.anchor is not None:
            loss = loss + (self.last.weight - self.anchor).square().sum()
        self.anchor = self.last.weight.detach().clone()
        return loss


@program(KIND)
def an_anchor_of_the_weights_before(compile: Compile) -> Results:
    """The same, of a copy that every call makes."""
    model = compile(seeded(_Moving))
    found = _trained(model, steps=4)
    return {**found, "anchor": model.anchor.norm().item()}


class _Returning(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.logits(x), self.head.weight.detach().clone()


@program(KIND)
def copies_of_weights_that_the_loop_keeps(compile: Compile) -> Results:
    """The forward returns a copy of a weight, and the loop looks at it after the optimizer's step."""
    model = compile(seeded(_Returning), example_inputs=batch()[:1])
    optimizer, norms = sgd(model), []
    for x, y in batches(3):
        optimizer.zero_grad()
        logits, weight = model(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        norms.append(weight.norm().item())
    return {"norms": norms, "state": state(model)}


class _Losses(nn.Module):
    """Sets losses of its parts, which are numbers before the first call, and adds them to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = Net(), nn.Linear(CLASSES, CLASSES)
        self.losses: dict[str, Any] = {"task": 0, "size": 0.0}
        self.smooth: Any = 0.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.smooth = 0.0
        logits = self.net.logits(x)
        for t in (logits, logits * 2):
            self.smooth = self.smooth + 0.01 * t.square().mean()
        self.losses["size"] = logits.abs().mean()
        self.losses["task"] = F.cross_entropy(self.last(logits), y)
        total: Tensor = self.losses["task"] + 0.1 * self.losses["size"] + self.smooth
        return total


@program(KIND)
def losses_that_begin_as_numbers(compile: Compile) -> Results:
    """The loop reads them after each call."""
    model = compile(seeded(_Losses), example_inputs=batch())
    optimizer, losses, parts = sgd(model), [], []
    for given in batches(3):
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        losses.append(loss.item())
        parts += [float(model.losses["task"]), float(model.losses["size"]), float(model.smooth)]
        optimizer.step()
    return {"losses": losses, "parts": parts, "state": state(model)}


class _TwoNames(Net):
    """One tensor is two buffers, and a third is expanded."""

    def __init__(self) -> None:
        super().__init__()
        mean = torch.zeros(HIDDEN)
        self.register_buffer("mean", mean)
        self.register_buffer("center", mean)
        self.register_buffer("scale", torch.full((1, 1), 0.5).expand(1, HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.scale - self.center.clone()
        if self.training:
            self.mean.add_(0.1 * h.detach().mean(0))
        return F.cross_entropy(self.head(self.blocks(h)), y)


@program(KIND)
def buffers_that_are_one_tensor_of_a_module(compile: Compile) -> Results:
    """With evaluations between the steps, for which the model is captured again."""
    model = compile(seeded(_TwoNames), example_inputs=batch())
    found = [_trained(model, steps=2)["losses"]]
    for mode in (False, True):
        model.train(mode)
        with torch.no_grad():
            found.append([model(*batch(3)).item()])
    model.train()
    return {"found": found, **_trained(model, steps=2), "one": model.mean.norm().item() == model.center.norm().item()}
