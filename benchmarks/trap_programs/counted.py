"""Programs whose forward counts, keeps sets and histories, and whose modules and buffers have two names."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._traps_kit import HIDDEN, Block, Compile, Net, Results, batch, batches, program, seeded, sgd, state, train, trained

KIND, NAMED = "counted", "names"
SEEN: set[str] = set()
STEPS = 0


class Counting(Net):
    of_all = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.tally, self.shapes = 0, Counter[str](), set[Any]()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        global STEPS
        self.calls += 1
        self.tally["train" if self.training else "eval"] += 1
        Counting.of_all += len(x)
        STEPS = STEPS + 1
        self.shapes.add(tuple(x.shape))
        SEEN.add("train" if self.training else "eval")
        return super().forward(x, y)


def _counts(model: Any) -> list[Any]:
    return [model.calls, dict(model.tally), Counting.of_all, STEPS, sorted(map(str, model.shapes)), sorted(SEEN)]


@program(KIND)
def calls_samples_and_shapes(compile: Compile) -> Results:
    """Counters in an attribute, a Counter, a class and a global, and sets, over batches of two sizes and evaluations."""
    global STEPS
    STEPS, Counting.of_all = 0, 0
    SEEN.clear()
    model = compile(seeded(Counting), example_inputs=batch())
    found = {"losses": train(model, inputs=[batch(0), batch(1, 8), batch(2)]), "first": _counts(model)}
    model.eval()
    with torch.no_grad():
        found["evaluated"] = [model(*batch(k)).item() for k in (3, 4)]
    return {**found, "second": _counts(model), "state": state(model)}


@program(KIND)
def counter_set_back_by_the_loop(compile: Compile) -> Results:
    """The loop sets the counter to 0 at the start of an epoch, and keeps what it is after each step."""
    model = compile(seeded(Counting), example_inputs=batch())
    optimizer, found = sgd(model), []
    for _ in range(2):
        model.calls = 0
        model.shapes.clear()
        for given in batches(2):
            optimizer.zero_grad()
            loss = model(*given)
            loss.backward()
            optimizer.step()
            found.append((loss.item(), model.calls, len(model.shapes)))
    return {"found": found}


@program(KIND)
def counter_that_a_branch_asks(compile: Compile) -> Results:
    """`if self.step > 3`: from the fourth call on it computes something else."""

    class Warming(Net):
        step = 0

        def hidden(self, x: Tensor) -> Tensor:
            self.step += 1
            return super().hidden(x) * (0.5 if self.step > 3 else 1.0)

    return trained(compile(seeded(Warming), example_inputs=batch()), steps=5)


@program(KIND, remedy_of="counter_that_a_branch_asks")
def counter_of_the_loop(compile: Compile) -> Results:
    """The same, where the loop sets the number of the step before each call."""

    class Warming(Net):
        step = 0

        def hidden(self, x: Tensor) -> Tensor:
            return super().hidden(x) * (0.5 if self.step > 3 else 1.0)

    model = compile(seeded(Warming), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for step, given in enumerate(batches(6)):
        model.step = step
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


@program(KIND)
def counter_that_a_hook_multiplies_by(compile: Compile) -> Results:
    """A hook on an activation, which runs in backward, reads the counter."""

    class Hooking(Net):
        calls = 0

        def hidden(self, x: Tensor) -> Tensor:
            self.calls += 1
            hidden = super().hidden(x)
            hidden.register_hook(lambda grad: grad * self.calls)
            return hidden

    return trained(compile(seeded(Hooking), example_inputs=batch()))


@program(KIND)
def counter_in_a_checkpoint(compile: Compile) -> Results:
    """What is checkpointed runs again in backward, and counts twice."""

    class Checkpointing(Net):
        calls = 0

        def body(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.blocks(x)

        def hidden(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.body, torch.tanh(self.first(x)), use_reentrant=False)
            return found

    model = compile(seeded(Checkpointing), example_inputs=batch())
    return {**trained(model), "calls": model.calls}


@program(KIND)
def counters_of_a_copy(compile: Compile) -> Results:
    """A copy of the module counts its own calls from where it was copied."""
    model = compile(seeded(Counting), example_inputs=batch())
    losses = train(model)
    copied = copy.deepcopy(model)
    losses += train(copied, steps=2) + train(model, steps=1)
    return {"losses": losses, "calls": [model.calls, copied.calls], "tally": [dict(model.tally), dict(copied.tally)]}


@program(KIND)
def counter_of_hooks(compile: Compile) -> Results:
    """An object that is a forward hook of every layer counts calls and multiplications, as profilers do."""

    class Profiling:
        def __init__(self) -> None:
            self.calls, self.products = 0, 0

        def __call__(self, layer: Any, given: Any, output: Any) -> None:
            self.calls += 1
            self.products += given[0].shape[0] * layer.in_features * layer.out_features

    profile, model = Profiling(), seeded(Net)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(profile)
    found = dict(trained(compile(model, example_inputs=batch())))
    return {**found, "counts": [profile.calls, profile.products]}


@program(KIND)
def operations_that_a_tool_of_torch_counts(compile: Compile) -> Results:
    """torch's FlopCounterMode is around a step: its hooks on all modules change nothing."""
    model = compile(seeded(Net))
    optimizer, losses = sgd(model), []
    for number in range(4):
        with FlopCounterMode(display=False) if number in (0, 2) else contextlib.nullcontext() as counter:
            losses += train(model, optimizer, steps=1)
        assert counter is None or counter.get_total_flops() > 0
    return {"losses": losses, "state": state(model)}


class Statistics:
    def __init__(self) -> None:
        self.size, self.calls, self.scale = 0, 0, 1.0


class Noting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.statistics, self.seen = Statistics(), {"sizes": set[int](), "last": 0}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.statistics.size = len(x)
        self.statistics.calls += 1
        sizes: Any = self.seen["sizes"]
        sizes.add(len(x))
        self.seen["last"] = len(x)
        return super().forward(x * self.statistics.scale, y)


@program("left")
def in_an_object_put_in_the_place_of_another(compile: Compile) -> Results:
    """Each epoch begins with a new object for statistics, and a new dict with a set; in the third a setting in it is another."""
    model, found = compile(seeded(Noting), example_inputs=batch()), []
    for epoch in range(4):
        model.statistics, model.seen = Statistics(), {"sizes": set(), "last": 0}
        model.statistics.scale = 2.0 if epoch == 2 else 1.0
        losses = train(model, steps=2)
        found.append((losses, model.statistics.size, model.statistics.calls, sorted(model.seen["sizes"]), model.seen["last"]))
    return {"found": found}


@program("left")
def sets_made_anew(compile: Compile) -> Results:
    """Sets and a list that each call makes, which the loop changes afterwards, over batches of two sizes."""

    class Making(Net):
        def __init__(self) -> None:
            super().__init__()
            self.sizes, self.now, self.pair = frozenset[int](), set[Any](), list[Any]()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.sizes = self.sizes | {len(x)}
            self.now, self.pair = {len(x), "samples"}, [len(x), {"width": x.shape[1]}]
            return super().forward(x, y)

    model, found = compile(seeded(Making), example_inputs=batch()), []
    for given in (batch(0), batch(1, 8), batch(2), batch(3)):
        train(model, inputs=[given])
        found.append((sorted(model.sizes), sorted(map(str, model.now)), copy.deepcopy(model.pair)))
        model.now.add("loop")
        model.pair[1]["width"] = 0
    return {"found": found, "state": state(model)}


@program("left")
def set_that_forward_takes_from(compile: Compile) -> Results:
    """`self.todo.discard(...)` in the forward; the loop adds what was taken, and something else."""

    class Taking(Net):
        def __init__(self) -> None:
            super().__init__()
            self.todo = {"first", "second"}

        def hidden(self, x: Tensor) -> Tensor:
            self.todo.discard("first")
            return super().hidden(x)

    model, found = compile(seeded(Taking), example_inputs=batch()), []
    for step in range(3):
        train(model, steps=1)
        found.append(sorted(model.todo))
        model.todo |= {"first", f"step {step}"}
    return {"found": found, "state": state(model)}


class Sorting(Net):
    """Goes through its parts by their types; two of them are one."""

    FACTORS = {Block: 0.9, nn.Tanh: 1.1}

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.parts = nn.ModuleList([block, nn.Tanh(), Block(), block])

    def hidden(self, x: Tensor) -> Tensor:
        x = super().hidden(x)
        for part in self.parts:
            x = part(x) * self.FACTORS[type(part)]
        return x if type(self.parts[0]) is type(self.parts[2]) else 0 * x


@program(NAMED)
def types_of_parts_of_which_two_are_one(compile: Compile) -> Results:
    """The forward goes by `type(part)`, and one part has two places."""
    return trained(compile(seeded(Sorting), example_inputs=batch()))


@program(NAMED, plans=("dp2tp2",))
def statistics_of_two_norms_in_one(compile: Compile) -> Results:
    """Two batch norms have one running mean and variance, which both move in each step; evaluated afterwards."""

    class Joined(Net):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.BatchNorm1d(HIDDEN), nn.BatchNorm1d(HIDDEN)
            self.two.running_mean, self.two.running_var = self.one.running_mean, self.one.running_var

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(super().hidden(x))))

    model = compile(seeded(Joined), example_inputs=batch())
    found = dict(trained(model))
    model.eval()
    with torch.no_grad():
        found["evaluated"] = F.relu(model(*batch(3))).item()
    return found


@program(NAMED)
def one_of_two_buffers_is_given_its_own(compile: Compile) -> Results:
    """A buffer that two modules have, of which one is given another tensor after compiling."""

    class Shifted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(HIDDEN))
            self.blocks.register_buffer("shift", self.shift)

        def hidden(self, x: Tensor) -> Tensor:
            return super().hidden(x) * self.shift + self.blocks.shift

    model = compile(seeded(Shifted), example_inputs=batch())
    first = train(model)
    model.blocks.shift = torch.zeros(HIDDEN)
    return {"first": first, "second": train(model)}


@program("rules", plans=("one2", "dp2mb2"))
def spectral_norms_of_convolutions(compile: Compile) -> Results:
    """A critic whose convolutions and head have spectral norm: each step moves the vectors once, not once for each micro-batch."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.utils.parametrizations.spectral_norm
            self.layers = nn.Sequential(norm(nn.Conv2d(1, 4, 3, padding=1)), nn.LeakyReLU(0.2), nn.Flatten(), norm(nn.Linear(32, 1)))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.binary_cross_entropy_with_logits(self.layers(x.view(-1, 1, 2, 4)).squeeze(1), (y > 1).to(x.dtype))

    return trained(compile(seeded(Critic), example_inputs=batch()))


@program(KIND, plans=("dp2mb2",))
def counts_down_and_in_fractions(compile: Compile) -> Results:
    """Steps that are left, and a time that is no whole number; the loop sets them back midway, and stops where none are left."""

    class Leaving(Net):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.epoch = 4, 0.0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.left -= 1
            self.epoch += 0.1
            return super().forward(x, y)

    model = compile(seeded(Leaving), example_inputs=batch())
    optimizer, losses, seen = sgd(model), [], []
    for given in batches(8):
        if model.left == 2 and len(seen) == 2:
            model.left, model.epoch = 5, 1.0
        if not model.left:
            break
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen.append([model.left, model.epoch])
    return {"losses": losses, "seen": seen, "state": state(model)}
