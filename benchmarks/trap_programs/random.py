"""Programs that draw random numbers. What is drawn need not be what one process draws, but what is said of it must be true."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, Compile, Net, Results, batch, program, seeded, sgd, train, trained

KIND = "random"
MORE = ("dp2mb2", "dp2tp2")


@program(KIND, plans=MORE)
def random_draws_that_do_not_matter(compile: Compile) -> Results:
    """Noise is drawn in forward and multiplied by nothing: it must be captured, and must not matter."""

    class Noisy(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            return hidden + 0.0 * torch.randn_like(hidden) + 0.0 * torch.rand(x.shape[0], HIDDEN)

    return trained(compile(seeded(Noisy), example_inputs=batch()))


@program(KIND, plans=MORE)
def random_draws_differ_from_step_to_step(compile: Compile) -> Results:
    """Noise in the loss: two calls with the same batch differ, as on one process."""

    class Noisy(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x), y)

    model = compile(seeded(Noisy), example_inputs=batch())
    losses = [model(*batch()).item() for _ in range(3)]
    return {"different": len(set(losses)) == 3, "near": max(losses) - min(losses) < 1.0}


class Dropping(Net):
    """With two dropouts in a row of their own, whose masks come out beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        ones = torch.ones_like(hidden)
        first, second = self.one(ones), self.two(ones)
        return {"loss": F.cross_entropy(self.head(hidden * first * second), y), "first": first, "second": second}


@program(KIND, plans=MORE)
def masks_of_dropout(compile: Compile) -> Results:
    """Every sample has a mask of its own, each dropout and each step another; a half is dropped, the rest is doubled."""
    model = compile(seeded(Dropping), example_inputs=batch(), outputs="all")
    found = [model(*batch()) for _ in range(3)]
    masks = [out[k].detach() for out in found for k in ("first", "second")]
    rows = torch.cat(masks)
    share = (rows > 0).double().mean().item()
    return {
        "different": len({tuple(row.tolist()) for row in rows}) == len(rows), "values": sorted(set(rows.flatten().tolist())),
        "half": 0.4 < share < 0.6, "shape": list(masks[0].shape),
    }  # fmt: skip


class Dropped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(super().hidden(x))


@program(KIND, plans=MORE)
def seed_before_each_call(compile: Compile) -> Results:
    """The same seed before two calls gives the same loss, another seed another one."""
    model = compile(seeded(Dropped), example_inputs=batch())
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(*batch()).item())
    return {"same": losses[0] == losses[1], "other": losses[0] != losses[2]}


@program(KIND)
def seed_at_the_start(compile: Compile) -> Results:
    """The whole program twice with the same seed, and once with another."""
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(train(compile(Dropped(), example_inputs=batch()), steps=2))
    return {"same": found[0] == found[1], "other": found[0] != found[2]}


@program(KIND)
def dropout_is_off_in_evaluation(compile: Compile) -> Results:
    model = compile(seeded(Dropped), example_inputs=batch())
    model.eval()
    with torch.no_grad():
        return {"losses": [model(*batch()).item() for _ in range(2)]}


@program(KIND)
def dropout_of_a_part_switched_off(compile: Compile) -> Results:
    """model.drop.eval() in training mode leaves nothing to chance."""
    model = compile(seeded(Dropped), example_inputs=batch())
    model.drop.eval()
    return trained(model)


@program(KIND)
def draws_of_the_user(compile: Compile) -> Results:
    """Numbers that the user draws after compile and between steps are those that one process draws."""
    torch.manual_seed(3)
    model = compile(Net(), example_inputs=batch())
    drawn: list[Any] = [torch.rand(2)]
    train(model, steps=1)
    drawn.append(torch.rand(2))
    return {"drawn": drawn, **trained(model, sgd(model))}


@program(KIND)
def batches_drawn_in_the_loop(compile: Compile) -> Results:
    """Noisy labels and inputs drawn in the loop, after a compile that plans on the first call."""
    torch.manual_seed(3)
    model = compile(Net())
    return trained(model, inputs=[(torch.randn(12, 8), torch.randint(4, (12,))) for _ in range(3)])


@program(KIND, plans=MORE)
def crop_at_a_random_place(compile: Compile) -> Results:
    """A random shift of a constant input: where it falls does not matter."""

    class Shifted(Net):
        def hidden(self, x: Tensor) -> Tensor:
            places = (torch.arange(HIDDEN) + torch.randint(HIDDEN, (1,))) % HIDDEN
            return super().hidden(x).sum(1, keepdim=True) * torch.ones(HIDDEN)[places]

    return trained(compile(seeded(Shifted), example_inputs=batch()))


@program(KIND, plans=MORE)
def generator_set_back(compile: Compile) -> Results:
    """torch.set_rng_state, fork_rng around a call and a forked manual_seed replay what dropout draws; the draws of the user go on."""
    model = compile(seeded(Dropping), example_inputs=batch(), outputs="all")
    torch.manual_seed(5)
    model(*batch())
    kept = torch.get_rng_state()
    first = model(*batch())["first"]
    second = model(*batch())["first"]
    torch.set_rng_state(kept)
    again = model(*batch())["first"]
    with torch.random.fork_rng(devices=[]):
        one = model(*batch())["first"]
    other = model(*batch())["first"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        seeded_once = model(*batch())["first"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        seeded_twice = model(*batch())["first"]
    after = model(*batch())["first"]
    return {
        "replayed": torch.equal(first, again), "differ": not torch.equal(first, second), "forked": torch.equal(one, other),
        "as the second": torch.equal(one, second), "seeded": torch.equal(seeded_once, seeded_twice),
        "goes on": not torch.equal(after, other) and not torch.equal(after, seeded_once),
    }  # fmt: skip


@program(KIND, plans=MORE)
def own_draws_between_calls(compile: Compile) -> Results:
    """A generator set back after own draws: the masks are those of before, as are the numbers that are drawn between the calls."""
    model = compile(seeded(Dropping), example_inputs=batch(), outputs="all")
    model(*batch())
    torch.manual_seed(3)
    torch.rand(2)
    kept = torch.get_rng_state()
    masks = [model(*batch())["first"], torch.rand(3), model(*batch())["second"], torch.rand(3)]
    torch.set_rng_state(kept)
    again = [model(*batch())["first"], torch.rand(3), model(*batch())["second"], torch.rand(3)]
    return {"same": [torch.equal(a, b) for a, b in zip(masks, again, strict=True)]}


class Skipping(Net):
    """A call that is chosen elsewhere counts half."""

    def __init__(self, chosen: Callable[[], bool]) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y) * (0.5 if self.chosen() else 1.0)


def _seldom(generator: numpy.random.Generator) -> bool:
    return bool(generator.random() < 0.15)


def _stepped(model: Any, before: Callable[[], object] = lambda: None) -> Results:
    """Of a dozen steps, of which one of the last is chosen."""
    optimizer, losses = sgd(model), []
    for step in range(12):
        before()
        losses += train(model, optimizer, inputs=[batch(step)])
    return {"losses": losses}


def _drawn_late() -> numpy.random.Generator:
    """A generator that seldom draws a low number, and none in its first calls."""
    drawn = ((seed, numpy.random.default_rng(seed).random(12) < 0.15) for seed in itertools.count())
    return numpy.random.default_rng(next(seed for seed, low in drawn if not low[:8].any() and low[8:].any()))


@program(KIND)
def own_generator_of_numpy(compile: Compile) -> Results:
    """The forward draws from it, and seldom takes another way: what capture sees is not what comes."""
    generator = _drawn_late()
    return _stepped(compile(seeded(Skipping, lambda: _seldom(generator)), example_inputs=batch()))


@program(KIND, remedy_of="own_generator_of_numpy")
def own_generator_that_the_loop_draws_from(compile: Compile) -> Results:
    generator, drawn = _drawn_late(), {"low": False}
    model = compile(seeded(Skipping, lambda: drawn["low"]), example_inputs=batch())
    return _stepped(model, lambda: drawn.update(low=_seldom(generator)))


@program(KIND)
def pattern_of_steps(compile: Compile) -> Results:
    """Every ninth call is another: an iterator that goes round says which."""
    return _stepped(compile(seeded(Skipping, itertools.cycle([False] * 8 + [True]).__next__), example_inputs=batch()))


@program(KIND)
def pattern_of_a_generator(compile: Compile) -> Results:
    def pattern() -> Iterator[bool]:
        while True:
            yield from [False] * 8 + [True]

    steps = pattern()
    return _stepped(compile(seeded(Skipping, lambda: next(steps)), example_inputs=batch()))


@program(KIND, remedy_of="pattern_of_steps")
def pattern_that_the_loop_goes_through(compile: Compile) -> Results:
    steps, now = itertools.cycle([False] * 8 + [True]), {"chosen": False}
    model = compile(seeded(Skipping, lambda: now["chosen"]), example_inputs=batch())
    return _stepped(model, lambda: now.update(chosen=next(steps)))
