"""What is known of three of many equal layers, taken over for all: the same figures as of walking every layer."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir import Program
from autopar.planner import Pins
from autopar.planner.candidate import candidate_of
from autopar.planner.estimate import Estimator
from autopar.planner.fold import fold
from autopar.planner.partition import UNSOLVED, Partition
from autopar.planner.rank_pieces import RankPieces
from autopar.planner.search import Search
from autopar.planner.space import Choice, Form
from cost_models.cluster import load_cluster
from tests.planner_programs import Tied

pytestmark = pytest.mark.pure


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor, shared: Tensor, seen: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up((x @ shared).masked_fill(seen, 0.0))))


class Shared(nn.Module):
    """Layers that all read one matrix and a mask beside their own, between an embedding and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.shared = nn.Embedding(32, 24), nn.Parameter(torch.eye(24))
        self.layers = nn.ModuleList(Reader() for _ in range(9))

    def forward(self, tokens: Tensor) -> Tensor:
        x, seen = self.embedding(tokens), (tokens > 3).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, self.shared, seen)
        return (x @ self.embedding.weight.T).logsumexp(-1).mean()


class Alternate(nn.Module):
    """Layers of which every second one reads another mask: a period of two, after a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.shared = nn.Embedding(32, 24), nn.Parameter(torch.eye(24))
        self.layers = nn.ModuleList(Reader() for _ in range(11))

    def forward(self, tokens: Tensor) -> Tensor:
        x, masks = self.embedding(tokens), [(tokens > k).unsqueeze(-1) for k in (3, 5, 7)]
        for k, layer in enumerate(self.layers):
            x = layer(x, self.shared, masks[1 + k % 2 if k else 0])
        return (x @ self.embedding.weight.T).logsumexp(-1).mean()


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.mix(self.norm(x)))


class Kinds(nn.Module):
    """Layers of two kinds, in periods of three."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.shared = nn.Embedding(32, 24), nn.Parameter(torch.eye(24))
        self.layers = nn.ModuleList(Other() if k % 3 == 2 else Reader() for k in range(15))

    def forward(self, tokens: Tensor) -> Tensor:
        x, seen = self.embedding(tokens), (tokens > 3).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x) if isinstance(layer, Other) else layer(x, self.shared, seen)
        return (x @ self.embedding.weight.T).logsumexp(-1).mean()


class Looped(nn.Module):
    """Lists of modules, of which a loop takes one each and adds up what several experts give, so that no call holds a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norms = nn.Embedding(32, 24), nn.ModuleList(nn.LayerNorm(24) for _ in range(9))
        self.experts: Any = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(2)) for _ in range(9)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, experts in zip(self.norms, self.experts, strict=True):
            h = norm(x)
            x = x + sum(expert(h) for expert in experts)
        return (x @ self.embedding.weight.T).logsumexp(-1).mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "tied": lambda: (Tied(vocabulary=64, width=32, layers=9), {k: torch.randint(0, 64, (16, 8)) for k in ("input_ids", "labels")}),
    "shared": lambda: (Shared(), {"tokens": torch.randint(0, 32, (16, 8))}),
    "alternate": lambda: (Alternate(), {"tokens": torch.randint(0, 32, (16, 8))}),
    "kinds": lambda: (Kinds(), {"tokens": torch.randint(0, 32, (16, 8))}),
    "looped": lambda: (Looped(), {"tokens": torch.randint(0, 32, (16, 8))}),
}
PINS: list[dict[str, Any]] = [
    {"dp": 2, "pp": 2, "micro_batches": 4, "zero": 1}, {"pp": 2, "virtual_stages": 2, "micro_batches": 4, "tp": 2},
    {"dp": 2, "pp": 2, "virtual_stages": 2, "micro_batches": 4, "zero": 2}, {"dp": 4, "micro_batches": 2, "zero": 3},
    {"pp": 4, "micro_batches": 8}, {"dp": 2, "pp": 2, "micro_batches": 4, "zero": 3},
]  # fmt: skip


@functools.cache
def program_of(name: str) -> Program:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return capture(model, inputs).program


def searched(name: str, **pins: Any) -> Search:
    gpus = pins.get("dp", 1) * pins.get("tp", 1) * pins.get("pp", 1)
    return Search(
        program=program_of(name), gpus=gpus, cluster=load_cluster("dgx-a100"), memory_limit_bytes=2**36, optimizer="adamw",
        precision="fp32", pins=Pins(**pins),
    )  # fmt: skip


def whole_of(search: Search, choice: Choice) -> Estimator | str:
    return search.estimator(search.known.whole(choice.mesh, choice.micro_batches, search.batch_size, search.recipe, choice.form), choice)


def walked(e: Estimator) -> Estimator:
    return dataclasses.replace(e, folded=None, rank=dataclasses.replace(e.rank, folded=None))


@pytest.mark.parametrize(("name", "period", "times"), [("tied", 1, 7), ("shared", 1, 7), ("alternate", 2, 3), ("kinds", 3, 3)])
def test_periods_of_layers_are_folded(name: str, period: int, times: int) -> None:
    """The second of them stands for all but the first and the last; of a period longer than one layer, as a whole."""
    whole = program_of(name)
    few = fold(whole)
    (repeat,) = few.repeats
    layers = sum(len(b.spans) for b in few.blocks)
    assert repeat.times == times and sum(len(b.spans) for b in whole.blocks) - layers == period * (times - 1)
    assert len(few.ops) + (times - 1) * len(repeat.span) == len(whole.ops)
    again = fold(few)
    assert again is few, "nothing is left to fold"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pins", PINS, ids=str)
def test_a_choice_costs_what_walking_every_layer_says(name: str, pins: dict[str, Any]) -> None:
    search, rng, compared, alike = searched(name, **pins), random.Random(0), 0, set[object]()
    for choice in search.space.choices():
        e = whole_of(search, choice)
        if isinstance(e, str):
            continue
        own = walked(e)
        if e.folded is None:
            continue
        assert e.plain == own.plain and e.kept == own.kept and e.seconds() == own.seconds() and e.more == own.more
        for each in (own, e.folded):
            assert each.all_params == each.params_of(each.own(0, len(each.segments))) == e.all_params, "each copy's own, and what all read"
        for _ in range(4):
            cuts = tuple(sorted(rng.sample(range(1, len(e.segments)), choice.mesh.over("layers") * choice.chunks - 1)))
            once = rng.random() < 0.5  # whether pieces of one place have one mode
            modes = tuple(0 if once else rng.randrange(len(p.modes)) for p in e.pieces)
            part = Partition(cuts=cuts, modes=modes, outcome=UNSOLVED)
            first, second = candidate_of(e, part), candidate_of(own, part)
            assert first.stages == second.stages
            assert (first.step_time_s, first.compute_s, first.bubble_s) == (second.step_time_s, second.compute_s, second.bubble_s)
            bounds = (0, *cuts, len(e.segments))
            alike |= {x for i, j in zip(bounds, bounds[1:], strict=False) if (x := e.alike(i, j, modes[i:j])) is not None}
            compared += 1
    assert compared
    assert alike, "stages of which one is worked out for others, also where parameters are gathered"


def test_pieces_of_the_folded_program_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not worked out again; nor are the passes of stages that are alike."""
    search = searched("tied", pp=4, micro_batches=8)
    made: list[int] = []
    make = RankPieces._made

    def counted(self: RankPieces, *, passes: bool) -> Any:
        made.append(len(self.rank.program.ops))
        return make(self, passes=passes)

    monkeypatch.setattr(RankPieces, "_made", counted)
    plan = search.best()
    assert plan.mesh["pp"] == 4 and made and max(made) < len(program_of("tied").ops)


def test_a_rank_for_another_split_is_not_taken_for_the_folded_one() -> None:
    """Splits into micro-batches of one size share their folded rank; the one of the plan is made for its own."""
    search = searched("tied", pp=2, dp=2, zero=1)
    for choice in search.space.choices():
        rank = search.known.whole(choice.mesh, choice.micro_batches, search.batch_size, search.recipe, choice.form)
        if not isinstance(rank, str) and rank.folded is not None:
            assert rank.folded.made_for == rank.made_for == (2, choice.micro_batches)
            assert rank.folded.micro_batches == rank.micro_batches and rank.folded.mesh == rank.mesh


def test_what_a_choice_was_drafted_with_serves_where_the_plan_has_the_same_assignment() -> None:
    search, taken, left = searched("tied", tp=2, dp=2), 0, 0
    for choice in search.space.choices():
        whole = search.known.whole(choice.mesh, choice.micro_batches, search.batch_size, search.recipe, choice.form)
        assert not isinstance(whole, str)
        for form in (choice.form, Form(sequence=True), Form(sequence=False)):
            other = dataclasses.replace(choice, form=form)
            drafted = search.estimator(search.known.rank(choice.mesh, choice.micro_batches, search.batch_size, search.recipe, form), other)
            assert isinstance(drafted, Estimator)
            e = search.estimator(whole, choice, drafted=drafted)
            assert isinstance(e, Estimator) and whole.folded is not None
            same = drafted.rank.inner == whole.folded.inner and drafted.rank.made_for == whole.made_for
            assert (e.folded is drafted) == same and e.plain == walked(e).plain
            taken, left = taken + same, left + (not same)
    assert taken and left
