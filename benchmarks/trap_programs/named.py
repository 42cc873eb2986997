"""Programs whose model has a module under two names, beside what no graph holds and with buffers; generators of the user's; values that
several samples share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    BATCH,
    HIDDEN,
    WIDTH,
    Compile,
    Logits,
    Net,
    Results,
    batch,
    batches,
    program,
    seeded,
    sgd,
    state,
    train,
    trained,
)  # fmt: skip

NAMED = "named"


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004  # type: ignore[override]
        return grad * 0.5


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(self.layer(x))


class Twice(Net):
    """One block has two names, and is used by both."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.part = self.blocks[0], Quantised()

    def hidden(self, x: Tensor) -> Tensor:
        return self.part(self.again(super().hidden(x)))


@program(NAMED, plans=("one2",))
def function_beside_a_part_of_two_names(compile: Compile) -> Results:
    """A part applies an autograd function of the user's; another part has two names."""
    return trained(compile(seeded(Twice), example_inputs=batch()))


@program(NAMED)
def function_in_and_outside_of_a_part(compile: Compile) -> Results:
    """The model's own forward applies the function too."""

    class Both(Twice):
        def hidden(self, x: Tensor) -> Tensor:
            return Rounded.apply(super().hidden(x))

    return trained(compile(seeded(Both), example_inputs=batch()))


@program(NAMED)
def function_in_a_part_of_two_names(compile: Compile) -> Results:
    """The part that applies it is the one that has several names, one of them in a list."""

    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.part = self.same = Quantised()
            self.parts = nn.ModuleList([self.part, nn.Tanh()])

        def hidden(self, x: Tensor) -> Tensor:
            h = self.same(self.part(super().hidden(x)))
            for part in self.parts:
                h = part(h)
            return h

    return trained(compile(seeded(Listed), example_inputs=batch()))


@program(NAMED)
def hook_and_function_beside_a_part_of_two_names(compile: Compile) -> Results:
    """The model hooks an activation between two uses of the part with the function."""

    class Hooked(Twice):
        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            if h.requires_grad:
                h.register_hook(lambda grad: grad * 3)
            return h + self.part(h)

    return trained(compile(seeded(Hooked), example_inputs=batch()))


@program(NAMED)
def part_that_no_graph_holds_has_another(compile: Compile) -> Results:
    """Blocks of the model are inside of parts that go through numpy."""

    class Centred(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) - torch.from_numpy(x.detach().numpy().mean(-1, keepdims=True).copy())

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.all = Centred(self.blocks[1]), Centred(self.blocks)

        def hidden(self, x: Tensor) -> Tensor:
            return self.all(self.one(super().hidden(x)))

    return trained(compile(seeded(Holding), example_inputs=batch()))


class Averaging(nn.Module):
    """Assigns a running mean, and counts its uses in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("uses", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        if self.training:
            self.uses += 1
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - 0.1 * self.mean


@program(NAMED, plans=("dp2tp2",))
def running_mean_under_two_names(compile: Compile) -> Results:
    """The part that changes buffers of its own has two names, of which the forward uses both; evaluated, saved and loaded again."""

    class Named(Net):
        def __init__(self) -> None:
            super().__init__()
            self.part = Averaging()
            self.parts = nn.ModuleDict({"same": self.part, "other": Averaging()})

        def hidden(self, x: Tensor) -> Tensor:
            return self.parts["other"](self.parts["same"](self.part(super().hidden(x))))

    model = compile(seeded(Named), example_inputs=batch())
    found = dict(trained(model))
    kept = state(model)
    model.load_state_dict({name: 0.5 * value for name, value in kept.items()})
    model.eval()
    with torch.no_grad():
        found["evaluated"] = model(*batch(3)).item()
    return {**found, "halved": state(model)}


@program(NAMED, plans=("dp2tp2",))
def batch_norm_under_two_names(compile: Compile) -> Results:
    """A head of a layer and a batch norm that two branches share, put into evaluation and frozen midway by one of its names."""

    class Named(Net):
        def __init__(self) -> None:
            super().__init__()
            self.left = self.right = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False), nn.BatchNorm1d(HIDDEN))

        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            return self.left(h) + self.right(torch.tanh(h))

    model = compile(seeded(Named), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, inputs=[batch()])
    model.right.requires_grad_(False).eval()
    losses += train(model, optimizer, inputs=[batch(1)])
    model.left.requires_grad_(True).train()
    losses += train(model, optimizer, inputs=[batch(2)])
    return {"losses": losses, "state": state(model)}


# -------------------------------------------------------------------------------------------------- generators
@program(NAMED)
def generator_for_a_method(compile: Compile) -> Results:
    """The model holds a generator, with which a method of it draws samples; the forward does not use it."""

    class Sampling(Net):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        @torch.no_grad()
        def sample(self, count: int) -> Tensor:
            return self.logits(torch.randn(count, WIDTH, generator=self.generator))

    model = compile(seeded(Sampling), example_inputs=batch())
    optimizer, found = sgd(model), []
    for given in batches():
        found += [*train(model, optimizer, inputs=[given]), model.sample(4)]
    return {"found": found, "state": state(model)}


@program(NAMED)
def generator_in_the_forward(compile: Compile) -> Results:
    """Noise from a generator of the model's own."""

    class Noisy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            return h + 0.1 * torch.randn(h.shape, generator=self.generator, dtype=h.dtype)

    return trained(compile(seeded(Noisy), example_inputs=batch()))


@program(NAMED, remedy_of="generator_in_the_forward")
def generator_beside_the_forward(compile: Compile) -> Results:
    """The loop draws the noise, and gives it to the model."""

    class Given(Net):
        def forward(self, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(self.head(self.hidden(x) + 0.1 * noise), y)

    generator = torch.Generator().manual_seed(3)
    inputs = [(*given, torch.randn(BATCH, HIDDEN, generator=generator)) for given in batches()]
    return trained(compile(seeded(Given), example_inputs=inputs[0]), inputs=inputs)


# ------------------------------------------------------------------------------------ values that samples share
@program(NAMED, plans=("dp2mb2",))
def ties_over_the_batch(compile: Compile) -> Results:
    """Rounded values are equal in many samples: extremes, medians, sorting and cumulated ones share or choose their gradients."""

    class Tied(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(x)
            q = logits + ((2 * logits).round() / 2 - logits).detach()
            terms = [
                q.max(0).values.sum(), q.amax(0).sum(), q.amin((0, 1)), q.max(), q.min(), q.median(), q.aminmax().max,
                q.sort(dim=0, stable=True).values[5].mean(), torch.linalg.vector_norm(q, ord=float("inf")), q.cummax(0).values.mean(),
                q.topk(3, dim=0).values.mean(), q.prod(0).mean(), q.flatten().kthvalue(7).values, torch.minimum(q[:6], q[6:]).mean(),
            ]  # fmt: skip
            return F.cross_entropy(logits, y) + 0.1 * torch.stack(terms).sum()

    return trained(compile(seeded(Tied), example_inputs=batch()))


@program(NAMED)
def texts_in_one_row(compile: Compile) -> Results:
    """EmbeddingBag with offsets: the texts of a batch lie behind one another, and the batch is where each begins."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(16, 8, mode="sum"), nn.Linear(8, 4)

        def forward(self, codes: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.bag(codes, offsets)), y)

    def given(index: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        lengths = torch.tensor([4, 8] * (BATCH // 2)).roll(index)
        codes = torch.randint(16, (6 * BATCH,), generator=generator)
        return codes, lengths.cumsum(0) - lengths, torch.randint(4, (BATCH,), generator=generator)

    return trained(compile(seeded(Bag), example_inputs=given(0)), inputs=[given(i) for i in range(3)])


@program(NAMED)
def free_and_forced_in_turns(compile: Compile) -> Results:
    """A decoder in a Python loop with attention over what a GRU has read, forced by the targets or fed by its own choices, in turns."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.reader, self.cell = nn.Embedding(16, 8), nn.GRU(8, 8, batch_first=True), nn.GRUCell(16, 8)
            self.query, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 16)

        def forward(self, x: Tensor, forced: bool = True) -> Tensor:
            memory, last = self.reader(self.codes(x))
            h, code, loss = last[0], torch.zeros(len(x), dtype=torch.long), torch.zeros(())
            for t in range(x.shape[1]):
                weights = torch.einsum("bd,bld->bl", self.query(h), memory).masked_fill(x == 0, float("-inf")).softmax(-1)
                h = self.cell(torch.cat([self.codes(code), torch.einsum("bl,bld->bd", weights, memory)], -1), h)
                logits = self.head(h)
                loss = loss + F.cross_entropy(logits, x[:, t], ignore_index=0)
                code = x[:, t] if forced else logits.argmax(-1)
            return loss / x.shape[1]

    def given(index: int) -> tuple[Tensor, bool]:
        generator = torch.Generator().manual_seed(index)
        lengths = torch.randint(3, 6, (BATCH, 1), generator=generator).index_fill(0, torch.tensor([0]), 5)
        return torch.randint(1, 16, (BATCH, 5), generator=generator) * (torch.arange(5) < lengths), index % 2 == 0

    model = compile(seeded(Translator), example_inputs=given(0))
    return trained(model, torch.optim.Adam(model.parameters(), lr=0.01), inputs=[given(i) for i in range(4)])


@program(NAMED)
def penalty_by_differences(compile: Compile) -> Results:
    """The direction of a virtual adversary by the gradient of an input, and the slope along it by two calls in one backward pass."""
    model = compile(seeded(Logits), example_inputs=(batch()[0],))
    optimizer, losses = sgd(model), []
    for index, (x, y) in enumerate(batches()):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(index))
        way = F.normalize(noise, dim=1).requires_grad_(True)
        before = model(x).softmax(1).detach()
        (grad,) = torch.autograd.grad(F.kl_div(model(x + 0.01 * way).log_softmax(1), before, reduction="batchmean"), way)
        here, there = model(x), model(x + 0.1 * F.normalize(grad, dim=1))
        loss = F.cross_entropy(here, y) + ((here - there) / 0.1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}
