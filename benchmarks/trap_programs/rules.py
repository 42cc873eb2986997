"""Programs whose models use operators and shapes that rules and micro-batches have to get right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import BATCH, HIDDEN, WIDTH, Compile, Net, Results, batch, batches, program, seeded, trained

KIND = "rules"
MORE = ("dp2mb2", "dp2tp2")


def _run(compile: Compile, model: type[nn.Module], inputs: list[tuple[Tensor, ...]] | None = None) -> Results:
    given = batches() if inputs is None else inputs
    return trained(compile(seeded(model), example_inputs=given[0]), inputs=given)


@program(KIND, plans=MORE)
def expand_as(compile: Compile) -> Results:
    class Expanded(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            return hidden + hidden.mean(1, keepdim=True).expand_as(hidden) * self.first.bias.expand_as(hidden)

    return _run(compile, Expanded)


@program(KIND, plans=MORE)
def view_as_and_type_as(compile: Compile) -> Results:
    class Viewed(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            halves = hidden.view(x.shape[0], 2, HIDDEN // 2)
            return halves.flip(1).contiguous().view_as(hidden).type_as(hidden) + hidden.reshape_as(hidden)

    return _run(compile, Viewed)


class _Tokens(nn.Module):
    """A small language model of [batch, length] tokens; smoothing, and labels of -100 that do not count."""

    smoothing, vocabulary = 0.1, 10

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.vocabulary, HIDDEN)
        self.middle = nn.Sequential(nn.Linear(HIDDEN, 32), nn.Tanh(), nn.Linear(32, HIDDEN))
        self.out = nn.Linear(HIDDEN, self.vocabulary)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(self.table(ids) + self.middle(self.table(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=self.smoothing)


def _text(length: int, *, ignored: bool) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        ids = torch.randint(10, (BATCH, length), generator=generator)
        drop = torch.rand(BATCH, length, generator=generator) < torch.linspace(0.9, 0.0, BATCH)[:, None]
        found.append((ids, ids.masked_fill(drop, -100) if ignored else ids))
    return found


@program(KIND, plans=MORE)
def label_smoothing(compile: Compile) -> Results:
    return _run(compile, _Tokens, _text(6, ignored=False))


@program(KIND, plans=MORE)
def label_smoothing_with_ignored_labels(compile: Compile) -> Results:
    """No two ranks or micro-batches count the same number of labels."""
    return _run(compile, _Tokens, _text(6, ignored=True))


@program(KIND, plans=MORE)
def ignored_labels_with_class_weights(compile: Compile) -> Results:
    class Weighted(_Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.linspace(0.5, 2.0, self.vocabulary))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.out(self.table(ids)).transpose(1, 2), labels, weight=self.weight)

    return _run(compile, Weighted, _text(6, ignored=True))


class _Mixing(nn.Module):
    """Mixes along the sequence: a [length, length] weight, a causal mask, a table of positions."""

    def __init__(self, length: int = BATCH) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(length, length) * 0.2)
        self.inner, self.out = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.positions = nn.Parameter(torch.randn(length, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("st,bth->bsh", self.mix.tril(), x + self.positions)
        scores = (mixed @ x.transpose(1, 2)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e9)
        return self.out(torch.tanh(self.inner(scores.softmax(-1) @ mixed))).square().mean()


@program(KIND, plans=MORE)
def batch_as_long_as_the_sequence(compile: Compile) -> Results:
    """12 samples of length 12."""
    generator = torch.Generator().manual_seed(0)
    return _run(compile, _Mixing, [(torch.randn(BATCH, BATCH, WIDTH, generator=generator),) for _ in range(3)])


@program(KIND, plans=MORE)
def batch_as_large_as_the_width(compile: Compile) -> Results:
    """16 samples, and layers of 16 units whose weight is used transposed."""

    class Square(Net):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.2)

        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            return hidden @ self.square + hidden @ self.square.T

    return _run(compile, Square, [batch(i, size=HIDDEN) for i in range(3)])


@program(KIND, plans=MORE)
def term_of_parameters_alone(compile: Compile) -> Results:
    """An orthogonality penalty that depends on no input."""

    class Penalised(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            gram = self.first.weight.T @ self.first.weight
            return super().forward(x, y) + 0.05 * (gram - torch.eye(WIDTH)).square().sum() + 1e-3 * self.head.weight.norm()

    return _run(compile, Penalised)


@program(KIND, plans=MORE)
def statistics_over_the_batch(compile: Compile) -> Results:
    """A decorrelation loss over the whole batch's covariance."""

    class Decorrelated(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = self.hidden(x)
            centred = hidden - hidden.mean(0)
            covariance = centred.T @ centred / (x.shape[0] - 1)
            return F.cross_entropy(self.head(hidden), y) + 0.1 * (covariance - torch.diag(torch.diagonal(covariance))).square().mean()

    return _run(compile, Decorrelated)


@program(KIND, plans=MORE)
def contrast_within_the_batch(compile: Compile) -> Results:
    """Every sample against every other: logits [batch, batch] and targets arange(batch)."""

    class Contrast(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = F.normalize(self.hidden(x), dim=1), F.normalize(self.first(x), dim=1)
            targets = torch.arange(x.shape[0])
            return F.cross_entropy(a @ b.T / 0.5, targets) + F.cross_entropy(b @ a.T / 0.5, targets) + super().forward(x, y)

    return _run(compile, Contrast)


@program(KIND, plans=MORE)
def samples_mixed(compile: Compile) -> Results:
    """Mixup with the batch reversed, in forward."""

    class Mixed(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(0.7 * x + 0.3 * x.flip(0))
            return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y.flip(0))

    return _run(compile, Mixed)


@program(KIND, plans=MORE)
def hardest_samples(compile: Compile) -> Results:
    """The loss is the mean of the six largest losses of the batch."""

    class Hardest(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(x), y, reduction="none").topk(6).values.mean()

    return _run(compile, Hardest)


@program(KIND, plans=MORE)
def changed_in_place(compile: Compile) -> Results:
    """Slices of activations are written to, and divided with floor_divide_ where no gradient is."""

    class InPlace(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x).clone()
            hidden[:, ::2] *= 0.5
            hidden[:, 1] = hidden[:, 2].relu()
            return hidden.add_(1.0).clamp_(-2.0, 2.0)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            doubled = y * 2
            doubled.floor_divide_(2)
            return super().forward(x, doubled)

    return _run(compile, InPlace)


@program(KIND, plans=MORE)
def written_by_a_mask(compile: Compile) -> Results:
    """Rows chosen by a mask are set to a number, others are raised."""

    class Masked(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x).clone()
            hidden[x[:, 0] > 1] = 0.25
            return torch.where((x[:, 1] > 0)[:, None], hidden + 0.1, hidden)

    return _run(compile, Masked)


@program(KIND, plans=MORE)
def embedding_with_a_bound(compile: Compile) -> Results:
    """nn.Embedding(max_norm=...) changes its weight in forward."""

    class Bounded(_Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(self.vocabulary, HIDDEN, max_norm=1.0)

    return _run(compile, Bounded, _text(6, ignored=False))


@program(KIND, plans=MORE)
def lower_precision_inside(compile: Compile) -> Results:
    """A softmax that is asked for in float64 by name, and sums with a dtype."""

    class Casting(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            weights = F.softmax(hidden, dim=-1, dtype=torch.float64).to(hidden.dtype)
            return hidden * weights / torch.sum(weights.square(), -1, keepdim=True, dtype=torch.float64)

    return _run(compile, Casting)
