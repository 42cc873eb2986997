"""Programs that read what the model's forward leaves in attributes and containers: sizes, names, auxiliary losses, activations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import CLASSES, WIDTH, Block, Compile, Logits, Results, batch, batches, program, seeded, sgd, state, stepped

KIND = "left"


def _with_more(compile: Compile, model: nn.Module, more: Any) -> Results:
    """Cross entropy, and what `more(model)` makes of what the forward has left."""
    made = compile(model, example_inputs=(batch()[0],))
    return {"losses": stepped(made, lambda x, y: F.cross_entropy(made(x), y) + more(made)), "state": state(made)}


class Filled(Logits):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.clear()
        h = self.hidden(x)
        self.losses.append(h.square().mean())
        return self.head(h)


@program(KIND)
def losses_in_a_list_that_is_filled(compile: Compile) -> Results:
    """`self.losses.clear(); self.losses.append(aux)`: the sum of an empty list is 0."""
    return _with_more(compile, seeded(Filled), lambda model: sum(model.losses))


@program(KIND)
def losses_in_a_list_emptied_by_the_loop(compile: Compile) -> Results:
    """The same, emptied after every step too."""
    made = compile(seeded(Filled), example_inputs=(batch()[0],))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(made(x), y) + sum(made.losses)
        made.losses.clear()
        return found

    return {"losses": stepped(made, loss), "state": state(made)}


@program(KIND)
def losses_in_a_list_of_the_loop(compile: Compile) -> Results:
    """The loop gives the model a new list for each step."""
    made = compile(seeded(Filled), example_inputs=(batch()[0],))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        made.losses = found = []
        return F.cross_entropy(made(x), y) + sum(found)

    return {"losses": stepped(made, loss), "state": state(made)}


class Routed(Block):
    """Leaves its load in a list of its own, made anew by each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.loads = [torch.softmax(self.up(x), -1).mean(0)]
        return super().forward(x)


@program(KIND)
def loads_of_blocks(compile: Compile) -> Results:
    """A list that each call makes, in each of several blocks; it is not there before the first call."""
    model = seeded(Logits)
    model.blocks = nn.Sequential(Routed(), Routed())
    return _with_more(compile, model, lambda made: sum(load.square().sum() for block in made.blocks for load in block.loads))


class ByName(Logits):
    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        self.losses["aux"] = h.square().mean()
        return self.head(h)


@program(KIND)
def losses_in_a_dict_that_is_filled(compile: Compile) -> Results:
    return _with_more(compile, seeded(ByName), lambda model: sum(model.losses.values()))


@dataclass
class Moments:
    mean: Tensor | None = None
    count: int = 0


class InObjects(Logits):
    def __init__(self) -> None:
        super().__init__()
        self.moments, self.stats, self.seen, self.recent = Moments(), None, SimpleNamespace(), deque(maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        self.moments.mean, self.moments.count = h.mean(), len(x)
        self.seen.norm = h.norm()
        self.stats = (h.mean(1), h.var(1))
        self.recent.append(h)
        self.late = Moments(h.mean(), 3)
        return self.head(h)


@program(KIND)
def pair_of_statistics(compile: Compile) -> Results:
    """`self.stats = (mean, variance)`, None before the first call."""
    return _with_more(compile, seeded(InObjects), lambda model: model.stats[0].square().mean())


@program(KIND)
def in_an_object_of_the_user(compile: Compile) -> Results:
    return _with_more(compile, seeded(InObjects), lambda model: model.moments.mean if model.moments.mean is not None else 0)


@program(KIND)
def in_an_object_that_each_call_makes(compile: Compile) -> Results:
    return _with_more(compile, seeded(InObjects), lambda model: getattr(model, "late", Moments()).mean or 0)


@program(KIND)
def in_a_namespace(compile: Compile) -> Results:
    return _with_more(compile, seeded(InObjects), lambda model: getattr(model.seen, "norm", 0))


@program(KIND)
def in_a_queue(compile: Compile) -> Results:
    return _with_more(compile, seeded(InObjects), lambda model: sum(h.mean() for h in model.recent))


@program(KIND)
def counts_beside_tensors(compile: Compile) -> Results:
    """A number beside a tensor in an object is what the forward has set."""
    made = compile(seeded(InObjects), example_inputs=(batch()[0],))
    losses = stepped(made, lambda x, y: F.cross_entropy(made(x), y) * made.moments.count)
    return {"losses": losses, "count": made.moments.count, "state": state(made)}


class Sized(Logits):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.shape, self.task, self.info = 0, None, "none", {"width": 0}

    def forward(self, x: Tensor, task: str = "a") -> Tensor:
        self.n, self.shape, self.task = x.shape[0], x.shape, task
        self.info["width"] = x.shape[1]
        self.halves = [len(x) // 2, {"task": task}]
        return self.head(self.hidden(x)) * (2 if task == "b" else 1)


@program(KIND)
def sizes_and_names_left(compile: Compile) -> Results:
    """Plain values that each call sets, by its sizes and by the name of the task, in turns."""
    made = compile(seeded(Sized), example_inputs=(batch()[0], "a"))
    optimizer, seen, losses = sgd(made), [], []
    for i, (task, size) in enumerate([("a", 12), ("b", 12), ("a", 24), ("a", 12), ("b", 12), ("b", 24), ("a", 24)]):
        x, y = batch(i, size)
        optimizer.zero_grad()
        loss = F.cross_entropy(made(x, task), y, reduction="sum") / made.n
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        names = [float(made.task == "b"), float(made.halves[1]["task"] == "b")]
        seen.append([made.n, *made.shape, made.info["width"], made.halves[0], *names])
    return {"losses": losses, "seen": seen, "state": state(made)}


class Measured(Logits):
    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.hidden(x))
        self.share = out.argmax(1).eq(0).to(out.dtype).mean().item()
        return out


@program(KIND)
def number_computed_from_the_batch(compile: Compile) -> Results:
    """`self.share = ....item()`: equal in two calls with one batch, and another for the next."""
    made = compile(seeded(Measured), example_inputs=(batch()[0],))
    shares: list[float] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(made(x), y)
        shares.append(made.share * 1.0)
        return found

    return {"losses": stepped(made, loss), "shares": shares, "state": state(made)}


class Lazy(Logits):
    """Makes a table by the first call, and says so by a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.table = False, None

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.table, self.ready = torch.linspace(0.5, 1.0, WIDTH, dtype=x.dtype), True
        self.n = len(x)
        return self.head(self.hidden(x * self.table))


@program(KIND)
def table_made_once(compile: Compile) -> Results:
    """A cache and its flag, for batches of two sizes and for evaluation; a size is left beside them."""
    made = compile(seeded(Lazy), example_inputs=(batch()[0],))
    losses = stepped(made, lambda x, y: F.cross_entropy(made(x), y, reduction="sum") / made.n)
    x, y = batch(5, 24)
    losses.append((F.cross_entropy(made(x), y, reduction="sum") / made.n).item())
    made.eval()
    with torch.no_grad():
        losses.append(made(x).mean().item())
    return {"losses": losses, "n": made.n, "state": state(made)}


class FirstOnly(Logits):
    """Normalises by what it finds in its first batch, once."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean(0).detach()
        return self.head(self.hidden(x - self.mean))


@program(KIND)
def mean_of_the_first_batch(compile: Compile) -> Results:
    """What is computed from the first batch stays, and is no cache of what each batch would give."""
    made = compile(seeded(FirstOnly), example_inputs=(batch()[0],))
    return {"losses": stepped(made, lambda x, y: F.cross_entropy(made(x), y)), "state": state(made)}


@program(KIND, remedy_of="mean_of_the_first_batch")
def mean_of_a_batch_before(compile: Compile) -> Results:
    """The same of a model that has seen a batch before it is compiled."""
    model = seeded(FirstOnly)
    with torch.no_grad():
        model(batch(9)[0])
    made = compile(model, example_inputs=(batch()[0],))
    return {"losses": stepped(made, lambda x, y: F.cross_entropy(made(x), y)), "state": state(made)}


class ByFirstStep(Logits):
    """kind: what is found by the first call and kept."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.found, self.scale, self.norm = kind, False, 1.0, None
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not self.found:
            self.found = True
            if self.kind == "buffer":
                self.shift.copy_(x.mean(0))
            elif self.kind == "assigned":
                self.shift = x.mean(0)
            elif self.kind == "number":
                self.scale = x.std().item()
            elif self.kind == "weights":
                self.norm = self.first.weight.norm().detach()
        h = self.hidden((x - self.shift) / self.scale)
        return self.head(h if self.norm is None else h / self.norm)


def _by_first_step(compile: Compile, kind: str) -> Results:
    made = compile(seeded(ByFirstStep, kind), example_inputs=(batch()[0],))
    return {"losses": stepped(made, lambda x, y: F.cross_entropy(made(x), y)), "state": state(made)}


@program(KIND)
def buffer_of_the_first_batch(compile: Compile) -> Results:
    return _by_first_step(compile, "buffer")


@program(KIND)
def buffer_assigned_by_the_first_batch(compile: Compile) -> Results:
    return _by_first_step(compile, "assigned")


@program(KIND)
def scale_of_the_first_batch(compile: Compile) -> Results:
    return _by_first_step(compile, "number")


@program(KIND)
def norm_of_the_first_weights(compile: Compile) -> Results:
    return _by_first_step(compile, "weights")


@program(KIND)
def attention_beside_the_model(compile: Compile) -> Results:
    """A tensor under an attribute, looked at after evaluation of another size, which is captured later."""
    model = seeded(InObjects)
    made = compile(model, example_inputs=(batch()[0],))
    losses = stepped(made, lambda x, y: F.cross_entropy(made(x), y))
    made.eval()
    with torch.no_grad():
        made(batch(3, 24)[0])
    return {"losses": losses, "late": made.late.mean * torch.ones(CLASSES), "batches": len(batches())}


@program(KIND)
def penalty_left_on_a_layer_of_torch(compile: Compile) -> Results:
    """A hook leaves the mean square of an activation on a layer of torch's own."""

    def keep(layer: Any, given: Any, made: Tensor) -> None:
        layer.size = made.square().mean()

    model = seeded(Logits)
    model.blocks[0].up.register_forward_hook(keep)
    return _with_more(compile, model, lambda made: 0.1 * made.blocks[0].up.size)


@program(KIND)
def numbers_left_on_a_layer_of_torch(compile: Compile) -> Results:
    """A hook adds to a list on a layer of torch's own in each call."""
    model = seeded(Logits)
    model.head.means = []
    model.head.register_forward_hook(lambda layer, given, made: layer.means.append(made.detach().mean()))
    return _with_more(compile, model, lambda made: 0.1 * len(made.head.means))
