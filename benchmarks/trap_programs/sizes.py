"""Sizes that depend on values, in the model's own forward and in its parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import BATCH, CLASSES, HIDDEN, WIDTH, Block, Compile, Net, Results, batch, program, seeded, trained

KIND = "sizes"
MORE = ("dp2mb2", "dp2tp2", "hybrid3")


def _results(compile: Compile, model: type[nn.Module], given: tuple[Tensor, ...] = (), **options: Any) -> Results:
    compiled = compile(seeded(model), example_inputs=given or batch())
    return trained(compiled, torch.optim.AdamW(compiled.parameters(), lr=1e-2, weight_decay=0.1), **options)


@program(KIND, plans=MORE)
def loss_of_chosen_samples(compile: Compile) -> Results:
    """loss(logits[mask], y[mask]): the classes decide which samples count, another number in each batch."""

    class Masked(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mask = y != 1
            return F.cross_entropy(self.logits(x)[mask], y[mask])

    return _results(compile, Masked)


@program(KIND, plans=MORE)
def loss_of_chosen_places(compile: Compile) -> Results:
    """Reconstruction of the entries that a mask hides, as masked_select has it."""

    class Hidden(Net):
        def __init__(self) -> None:
            super().__init__()
            self.back = nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = x > 0.3
            out = self.back(self.hidden(x.masked_fill(hidden, 0.0)))
            return F.mse_loss(out.masked_select(hidden), x.masked_select(hidden)) + F.cross_entropy(self.logits(x), y)

    return _results(compile, Hidden)


@program(KIND, plans=MORE)
def routed_by_the_model_itself(compile: Compile) -> Results:
    """Each sample goes through the expert that its class names; in some batches there is an expert that none goes to."""

    class Routed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(CLASSES))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.hidden(x)
            out = torch.zeros_like(h)
            for k, expert in enumerate(self.experts):
                rows = (y == k).nonzero().squeeze(-1)
                out = out.index_add(0, rows, expert(h[rows]))
            return F.cross_entropy(self.head(out), y)

    x, y = batch()
    rounds = [batch(1), (batch(2)[0], batch(2)[1].clamp(max=1)), (batch(3)[0], torch.full((BATCH,), 3))]
    return _results(compile, Routed, (x, y), inputs=rounds)


@program(KIND, plans=MORE)
def means_of_classes_that_are_there(compile: Compile) -> Results:
    """Prototypes of the classes that torch.unique finds in the batch, and the distance of each sample to its own."""

    class Prototypes(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.hidden(x)
            classes, of_sample = torch.unique(y, return_inverse=True)
            sums = torch.zeros(classes.numel(), HIDDEN, dtype=h.dtype).index_add(0, of_sample, h)
            counts = torch.zeros(classes.numel(), dtype=h.dtype).index_add(0, of_sample, torch.ones_like(h[:, 0]))
            own = (sums / counts[:, None])[of_sample]
            return F.cross_entropy(self.head(h), y) + 0.1 * (h - own).pow(2).sum(1).mean()

    return _results(compile, Prototypes)


class _Chosen(nn.Module):
    """A layer whose weight it is given, for the rows with a positive first entry."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(-1)
        return x.index_add(0, rows, x[rows] @ weight)


@program(KIND, plans=MORE)
def a_weight_is_given_to_a_part(compile: Compile) -> Results:
    """The part that chooses rows has no weight of its own: the model gives it one that nothing else reads."""

    class Given(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)
            self.chosen = _Chosen()

        def hidden(self, x: Tensor) -> Tensor:
            return self.chosen(super().hidden(x), self.weight)

    return _results(compile, Given)


class _Nearest(nn.Module):
    """Adds to some rows the nearest row of a table that it holds without being its parent, and through which no gradient goes."""

    def __init__(self, table: nn.Linear) -> None:
        super().__init__()
        self.held = [table]

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(-1)
        if len(rows) == 0:
            return x
        table = self.held[0].weight.detach()
        return x.index_add(0, rows, 0.5 * table[(x[rows] @ table.t()).argmax(-1)])


@program(KIND, plans=MORE)
def a_part_holds_another_in_a_list(compile: Compile) -> Results:
    """The part that chooses rows reads the weight of another one, which is trained, and is in a list so that it is not registered twice."""

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.nearest = _Nearest(self.head)

        def hidden(self, x: Tensor) -> Tensor:
            return self.nearest(super().hidden(x))

    return _results(compile, Holding)


@program(KIND, plans=MORE)
def another_part_is_held_in_a_list(compile: Compile) -> Results:
    """The same without sizes that depend on values."""

    class Near(nn.Module):
        def __init__(self, table: nn.Linear) -> None:
            super().__init__()
            self.held = [table]

        def forward(self, x: Tensor) -> Tensor:
            table = self.held[0].weight.detach()
            return x + 0.5 * table[(x @ table.t()).argmax(-1)]

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.nearest = Near(self.head)

        def hidden(self, x: Tensor) -> Tensor:
            return self.nearest(super().hidden(x))

    return _results(compile, Holding)


class _NearestOfOne(nn.Module):
    """The same with a view of the weight that it was given when it was made."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table.detach()

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(-1)
        return x.index_add(0, rows, 0.5 * self.table[(x[rows] @ self.table.t()).argmax(-1)])


@program(KIND, plans=MORE)
def a_part_holds_a_view_of_a_weight(compile: Compile) -> Results:
    """It sees each step of the optimizer, since the memory is one."""

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.nearest = _NearestOfOne(self.head.weight)

        def hidden(self, x: Tensor) -> Tensor:
            return self.nearest(super().hidden(x))

    return _results(compile, Holding)


@program(KIND, plans=MORE)
def the_model_holds_a_view_of_a_weight(compile: Compile) -> Results:
    """The same in a plain attribute of the model, without sizes that depend on values."""

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = self.head.weight.detach()

        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            return h + 0.5 * self.table[(h @ self.table.t()).argmax(-1)]

    return _results(compile, Holding)


@program(KIND, plans=MORE)
def last_of_the_marked_places(compile: Compile) -> Results:
    """As sequence classifiers have it: the hidden value at the last marked place of each sequence, by a mask and a view."""

    class Marked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, WIDTH)

        def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
            h = self.hidden(self.embed(tokens))
            ends = h[tokens == 9, :].view(tokens.size(0), -1, HIDDEN)[:, -1]
            return F.cross_entropy(self.head(ends), y)

    generator = torch.Generator().manual_seed(5)
    rounds = []
    for k in range(3):
        tokens = torch.randint(0, 9, (BATCH, 6), generator=generator)
        tokens[:, k] = tokens[:, 5] = 9
        rounds.append((tokens, torch.randint(CLASSES, (BATCH,), generator=generator)))
    return _results(compile, Marked, rounds[0], inputs=rounds)


@program(KIND, plans=MORE)
def written_at_chosen_places(compile: Compile) -> Results:
    """Rows that a condition finds are set, others are changed in place, also through a view, and what is read of them before stays."""

    class Writing(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.hidden(x)
            before = h.sum(1)
            h[torch.where(y == 0)] = 0.0
            h[(y == 1).nonzero().squeeze(1)] *= 2.0
            h[:, :4][torch.where(y == 2)[0]] += 0.5
            return F.cross_entropy(self.head(h), y) + 0.1 * (before * h.sum(1)).mean()

    return _results(compile, Writing)


@program(KIND, plans=MORE)
def experts_added_in_place(compile: Compile) -> Results:
    """Each expert takes the samples that chose it, and adds what it makes of them to a sum in place; and the hardest of the others."""

    class Mixed(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.hidden(x)
            weights, chosen = self.head(h).softmax(-1).topk(2, -1)
            out = torch.zeros_like(h)
            for expert in range(CLASSES):
                sample, place = torch.where(chosen == expert)
                out.index_add_(0, sample, self.blocks[expert % 2](h[sample]) * weights[sample, place, None])
            losses = F.cross_entropy(self.head(out + h), y, reduction="none")
            return losses.mean() + losses[y != 0].topk(2).values.mean()

    return _results(compile, Mixed)


class Counting(nn.Linear):
    """Sorts samples by the expert that they choose, and returns how many each has, as Python's numbers."""

    def forward(self, h: Tensor) -> Any:
        chosen = super().forward(h).argmax(-1)
        return chosen.argsort(stable=True), torch.bincount(chosen, minlength=self.out_features).tolist()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Counting(HIDDEN, 3), nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        order, counts = self.router(h)
        parts = [torch.tanh(expert(part)) for expert, part in zip(self.experts, h[order].split(counts), strict=True)]
        return torch.zeros_like(h).index_add(0, order, torch.cat(parts))


@program(KIND, plans=MORE)
def experts_split_by_counts(compile: Compile) -> Results:
    """A router gives the numbers of samples of each expert, by which the part around it splits; they are others in every batch."""

    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mixture = Experts()

        def hidden(self, x: Tensor) -> Tensor:
            return self.mixture(super().hidden(x))

    return _results(compile, Mixed)


@program(KIND, plans=("dp2tp2",))
def experts_by_sizes_taken_into_python(compile: Compile) -> Results:
    """Samples in the order of their experts, cut by `counts.tolist()` in the model's own forward, and added up where they came from."""

    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(HIDDEN, 3), nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            scores = self.gate(h)
            gates = scores * (scores > 0)
            expert, sample = torch.nonzero(gates.T, as_tuple=True)
            parts = torch.split(h[sample], (gates > 0).sum(0).tolist(), dim=0)
            made = torch.cat([torch.tanh(layer(part)) for layer, part in zip(self.experts, parts, strict=True)], 0)
            return h + torch.zeros_like(h).index_add(0, sample, made * gates[sample, expert].unsqueeze(1))

    return _results(compile, Sparse)
