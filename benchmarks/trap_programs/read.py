"""Programs that read what a model returns beside its loss, compiled as they are: metrics in training, predictions in evaluation."""

from __future__ import annotations

import io
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    BATCH,
    CLASSES,
    HIDDEN,
    Compile,
    InDict,
    Net,
    Normed,
    Results,
    batch,
    batches,
    gradients,
    program,
    seeded,
    sgd,
    state,
)

KIND = "read"
MORE = ("hybrid3", "dp2mb2", "dp2tp2")


class NormedInDict(Normed, InDict):
    """Statistics of batches, which a call is not to add twice."""


class Counting(NormedInDict):
    """Counts its calls, and says how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = 0, list[int]()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.sizes.append(x.shape[0])
        self.seen += x.shape[0]
        return super().forward(x, y)


def accuracy(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(-1) == y).double().mean())


@program(KIND, plans=MORE)
def accuracy_of_each_batch(compile: Compile) -> Results:
    model = compile(seeded(InDict), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for x, y in batches(4):
        optimizer.zero_grad()
        out = model(x, y)
        out["loss"].backward()
        found += [out["loss"].item(), accuracy(out["logits"], y), out["logits"].detach().norm().item()]
        optimizer.step()
    return {"found": found, "state": state(model)}


@program(KIND)
def accuracy_before_backward(compile: Compile) -> Results:
    """Between the call and its backward pass."""
    model = compile(seeded(NormedInDict), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for x, y in batches(3):
        optimizer.zero_grad()
        out = model(x, y)
        found += [accuracy(out["logits"], y), out["logits"].std().item()]
        out["loss"].backward()
        optimizer.step()
    return {"found": found, "gradients": gradients(model), "state": state(model)}


@program(KIND)
def loss_scaled_in_place_and_read(compile: Compile) -> Results:
    """Of several batches for a step; the metric is read without gradients, and trained by nobody."""
    model = compile(seeded(NormedInDict), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            x, y = batch(2 * step + part)
            out = model(x, y)
            loss = out["loss"]
            loss /= 2
            loss.backward()
            with torch.inference_mode():
                found += [loss.item(), accuracy(out["logits"], y), out["logits"].norm().item()]
        optimizer.step()
    return {"found": found, "state": state(model)}


class Codes(InDict):
    """Entries that move towards what they are taken for, and a number of calls that the loss is weighed by."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("entries", torch.linspace(-1, 1, 6 * HIDDEN).view(6, HIDDEN))
        self.register_buffer("warmth", torch.zeros(()))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        entries = self.entries.clone()
        nearest = (torch.cdist(h, entries) * -9).softmax(-1)
        with torch.no_grad():
            self.warmth += 0.25
            self.entries.copy_(0.9 * self.entries + 0.1 * (nearest.T @ h) / nearest.sum(0)[:, None])
        return h + self.warmth * (nearest @ entries)


@program(KIND)
def codes_that_move(compile: Compile) -> Results:
    """Buffers that a call computes of, and changes."""
    model = compile(seeded(Codes), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for x, y in batches(3):
        optimizer.zero_grad()
        out = model(x, y)
        found += [accuracy(out["logits"], y), out["logits"].norm().item(), out["loss"].item()]
        out["loss"].backward()
        optimizer.step()
    return {"found": found, "state": state(model)}


@program(KIND)
def step_compiled_by_torch_reads(compile: Compile) -> Results:
    model = compile(seeded(InDict), example_inputs=batch())
    optimizer = sgd(model)

    @torch.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x, y)
        return out["loss"], (out["logits"].argmax(-1) == y).double().mean()

    found = []
    for given in batches(3):
        optimizer.zero_grad()
        loss, right = step(*given)
        loss.backward()
        optimizer.step()
        found += [loss.item(), right.item()]
    return {"found": found, "state": state(model)}


@program(KIND)
def accuracy_now_and_then(compile: Compile) -> Results:
    """Of each third batch; of others nothing is read."""
    model = compile(seeded(NormedInDict), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for step, (x, y) in enumerate(batches(7)):
        optimizer.zero_grad()
        out = model(x, y)
        if step % 3 == 1:
            found.append(out["logits"].detach().square().mean().item())
        out["loss"].backward()
        optimizer.step()
    return {"found": found, "state": state(model)}


@program(KIND)
def counts_of_calls_that_are_read(compile: Compile) -> Results:
    """A number, a list and a buffer that each call of the model adds to."""
    model = compile(seeded(Counting), example_inputs=batch())
    optimizer, found = sgd(model), list[float]()
    for x, y in batches(3):
        optimizer.zero_grad()
        out = model(x, y)
        found += [out["logits"].sum().item(), float(model.calls), float(len(model.sizes))]
        out["loss"].backward()
        optimizer.step()
    return {"found": found, "seen": model.seen.item(), "state": state(model)}


@program(KIND, plans=MORE)
def predictions_of_an_epoch(compile: Compile) -> Results:
    """Read when all batches are through."""
    model = compile(seeded(InDict), example_inputs=batch())
    optimizer, found = sgd(model), list[Tensor]()
    for _ in range(2):
        model.train()
        for x, y in batches(2):
            optimizer.zero_grad()
            model(x, y)["loss"].backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            outputs = [model(*batch(5 + i, size=BATCH if i else 6)) for i in range(3)]
        logits = torch.cat([out["logits"] for out in outputs])
        found += [logits, torch.stack([out["loss"] for out in outputs])]
    return {"found": found, "state": state(model)}


class Parts(NamedTuple):
    loss: Tensor
    logits: Tensor
    hidden: list[Tensor]


class InParts(Net):
    def forward(self, x: Tensor, y: Tensor) -> Parts:
        hidden = [torch.tanh(self.first(x))]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        logits = self.head(hidden[-1])
        return Parts(F.cross_entropy(logits, y), logits, hidden)


@program(KIND)
def hidden_states_of_a_named_tuple(compile: Compile) -> Results:
    model = compile(seeded(InParts), example_inputs=batch())
    optimizer, found = sgd(model), list[Tensor]()
    for given in batches(3):
        optimizer.zero_grad()
        loss, logits, hidden = model(*given)
        found += [logits.detach(), *(h.detach().mean(0) for h in hidden)]
        loss.backward()
        optimizer.step()
    out = model(*batch())
    return {"found": found, "last": out.hidden[-1].detach(), "some": out[1:][0].detach(), "lengths": [len(out), len(out.hidden)]}


@dataclass
class Latent:
    """Fields that have the names of what tensors have."""

    loss: Tensor
    mean: Tensor
    std: Tensor
    data: Tensor


class Variational(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Latent:
        hidden = self.hidden(x)
        mean, std = self.head(hidden), F.softplus(self.spread(hidden))
        loss = F.cross_entropy(mean, y) + 0.1 * (mean.square() + std.square() - 2 * std.log()).mean()
        return Latent(loss, mean, std, x * 2)


@program(KIND)
def fields_named_as_tensors_have_them(compile: Compile) -> Results:
    model = compile(seeded(Variational), example_inputs=batch())
    optimizer, found = sgd(model), list[Tensor]()
    for given in batches(3):
        optimizer.zero_grad()
        out = model(*given)
        out.loss.backward()
        found += [out.mean.detach(), out.std.detach().log(), out.data]
        optimizer.step()
    return {"found": found, "state": state(model)}


class Draws(NamedTuple):
    """The same in a tuple with names, which has a method of a name that tensors have too."""

    loss: Tensor
    mean: Tensor
    data: Tensor

    def norm(self) -> Tensor:
        return self.mean.square().sum() + self.data.sum()


class Attributes(dict[str, Tensor]):
    """A dict whose items are its attributes."""

    __getattr__ = dict.__getitem__


class InDraws(Net):
    def forward(self, x: Tensor, y: Tensor) -> Draws:
        logits = self.logits(x)
        return Draws(F.cross_entropy(logits, y), logits, x.sin())


class InAttributes(Net):
    def forward(self, x: Tensor, y: Tensor) -> Attributes:
        logits = self.logits(x)
        return Attributes(loss=F.cross_entropy(logits, y), mean=logits.mean(0), std=logits.std(0))


@program(KIND)
def fields_of_tuples_and_dicts_named_so(compile: Compile) -> Results:
    first, second = compile(seeded(InDraws), example_inputs=batch()), compile(seeded(InAttributes), example_inputs=batch())
    optimizers, found = (sgd(first), sgd(second)), list[Tensor]()
    for given in batches(2):
        one, other = first(*given), second(*given)
        found += [one.mean.detach(), one.data, one.norm().detach(), one._asdict()["data"], other.mean.detach(), other.std.detach()]
        for optimizer, loss in zip(optimizers, (one.loss, other["loss"]), strict=True):
            optimizer.zero_grad()
            loss.backward()
            found += [loss.data.clone(), loss.detach().mean()]
            optimizer.step()
    return {"found": found, "names": list(one._fields), "state": state(second)}


class InNamespace(Net):
    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        logits = self.logits(x)
        probabilities = logits.softmax(-1)
        return SimpleNamespace(loss=F.cross_entropy(logits, y), beside={"probabilities": probabilities, "best": probabilities.argmax(-1)})


@program(KIND)
def containers_in_a_namespace(compile: Compile) -> Results:
    model = compile(seeded(InNamespace), example_inputs=batch())
    optimizer, found = sgd(model), list[Any]()
    for given in batches(3):
        optimizer.zero_grad()
        out = model(*given)
        out.loss.backward()
        found += [out.beside["probabilities"].detach().max(-1).values, out.beside["best"].tolist(), sorted(out.beside)]
        optimizer.step()
    return {"numbers": [x for x in found if isinstance(x, Tensor)], "texts": [str(x) for x in found if not isinstance(x, Tensor)]}


@program(KIND)
def logits_given_to_another_model(compile: Compile) -> Results:
    """A critic of what the first one says, trained beside it."""
    model = compile(seeded(InDict), example_inputs=batch())
    critic = seeded(nn.Linear, CLASSES, 1)
    optimizer, of_critic, found = sgd(model), sgd(critic), list[float]()
    for x, y in batches(3):
        optimizer.zero_grad()
        out = model(x, y)
        out["loss"].backward()
        score = critic(out["logits"].detach()).square().mean()
        of_critic.zero_grad()
        score.backward()
        of_critic.step()
        optimizer.step()
        found += [out["loss"].item(), score.item()]
    return {"found": found, "critic": critic.weight.detach(), "state": state(model)}


class Scored(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        return F.cross_entropy(logits, y), (logits.argmax(1) == y).double().mean()


@program(KIND)
def metrics_collected_in_a_tensor(compile: Compile) -> Results:
    """Made of a list of scalars."""
    model = compile(seeded(Scored), example_inputs=batch())
    model.eval()
    with torch.no_grad():
        first = model(*batch(4))[1].item()
        found = [model(*given) for given in batches(3)]
    return {"first": first, "metric": torch.tensor([out[1] for out in found]).mean(), "loss": torch.tensor([out[0] for out in found])}


@program(KIND)
def part_of_each_rank_is_read(compile: Compile) -> Results:
    """As where each rank loads its own part of the batch; the sums over all parts."""
    model = compile(seeded(InDict), example_inputs=batch(), local_batch=True)
    rank, ranks = getattr(model, "data_rank", 0), getattr(model, "data_ranks", 1)
    optimizer, found = sgd(model), list[float]()
    for x, y in batches(3):
        own = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
        optimizer.zero_grad()
        out = model(*own)
        right = (out["logits"].argmax(-1) == own[1]).double().sum()
        if ranks > 1:
            torch.distributed.all_reduce(right)
            right = right * ranks / torch.distributed.get_world_size()  # a part is on several ranks of a tensor or pipeline axis
        found += [right.item(), float(out["logits"].shape[0] * ranks)]
        out["loss"].backward()
        optimizer.step()
    return {"found": found, "state": state(model)}


@program(KIND)
def logits_under_autocast(compile: Compile) -> Results:
    """Their dtype, and that they are those of the loss."""
    model = compile(seeded(InDict).float(), example_inputs=tuple(t.float() if t.is_floating_point() else t for t in batch()))
    x, y = batch()
    found = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x.float(), y)
        logits = out["logits"]
        apart = (F.cross_entropy(logits.detach().float(), y) - out["loss"].detach().float()).abs().item()
        found += [str(logits.dtype), str(apart < 1e-5)]
    return {"found": found}


def _texts(logged: list[tuple[Any, ...]]) -> list[str]:
    return [f"{step} {loss:.4f} {best:.3f} {first!r:.11}" for step, loss, best, first in logged]


class Best(Net):
    """Of what it returns last the one before is computed."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.logits(x)
        best = logits.max()
        return {"loss": F.cross_entropy(logits, y), "best": best, "scaled": best * 2}


def _logged(model: Any) -> Results:
    optimizer, found, texts = sgd(model), list[Tensor](), list[str]()
    for step, given in enumerate(batches(3)):
        optimizer.zero_grad()
        out = model(*given)
        out["loss"].backward()
        texts += _texts([(step, out["loss"], out["best"], out["scaled"])])
        saved = io.BytesIO()
        torch.save({key: value.detach() for key, value in out.items()} | {"as it is": out["best"]}, saved)
        saved.seek(0)
        found += torch.load(saved, weights_only=True).values()
        optimizer.step()
    return {"texts": texts, "found": [x.detach() for x in found], "state": state(model)}


@program(KIND)
def metrics_in_texts_and_files(compile: Compile) -> Results:
    return _logged(compile(seeded(Best), example_inputs=batch()))


@program(KIND)
def metrics_in_texts_and_files_asked_for(compile: Compile) -> Results:
    """The same with outputs="all"."""
    return _logged(compile(seeded(Best), example_inputs=batch(), outputs="all"))
