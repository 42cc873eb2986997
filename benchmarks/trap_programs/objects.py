"""Programs that treat the module as an object: autocast around it, caches, copies, files, several of them in one process."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, WIDTH, Compile, Net, Results, batch, batches, program, seeded, sgd, state, train, trained

KIND = "objects"


@program(KIND, plans=("dp2mb2",))
def autocast_around_the_call(compile: Compile) -> Results:
    """torch.autocast("cpu", bfloat16) around the call of a float64 model, which it leaves as it is."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def autocast_around_the_first_call(compile: Compile) -> Results:
    """The same, and the plan is made inside."""
    model = compile(seeded(Net))
    optimizer, losses = sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@functools.lru_cache
def _mask(length: int) -> Tensor:
    return torch.tril(torch.ones(length, length)) == 0


class Attending(nn.Module):
    """A causal layer whose mask is kept by functools.lru_cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)).masked_fill(_mask(x.shape[1]), float("-inf"))
        return self.out(scores.softmax(-1) @ v).square().mean()


@program(KIND)
def mask_in_a_cache(compile: Compile) -> Results:
    """The mask is made in the first forward, whichever that is; the original is called on its own afterwards."""
    _mask.cache_clear()
    original = seeded(Attending)
    model = compile(original, example_inputs=(torch.zeros(12, 6, WIDTH),))
    x = torch.randn(12, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    found = trained(model, inputs=[(x,)] * 2)
    other = Attending()
    other.load_state_dict(found["state"])
    with torch.no_grad():
        return {**found, "other": other(x).item()}


@program(KIND)
def table_in_a_cache_of_a_closure(compile: Compile) -> Results:
    """A table that functools.lru_cache keeps for each scale, by a function that only the model's class knows."""

    @functools.lru_cache
    def table(scale: int) -> Tensor:
        return torch.arange(4.0) * scale

    class Tabled(Net):
        scale = 1

        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x) + table(self.scale)

    original = seeded(Tabled)
    model = compile(original, example_inputs=batch())
    losses = train(model)
    original.scale = 3
    return {"losses": losses + train(model), "table": table(3) + table(1), "state": state(model)}


@program(KIND)
def table_cached_in_the_model(compile: Compile) -> Results:
    """A table of positions made in the first forward and kept in an attribute."""

    class Positioned(Net):
        table: Tensor | None = None

        def hidden(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.linspace(0, 1, HIDDEN)
            return super().hidden(x) + self.table

    return trained(compile(seeded(Positioned), example_inputs=batch()))


@program(KIND)
def complex_conjugates(compile: Compile) -> Results:
    """Spectra, conjugated, and their absolute values."""

    class Spectral(Net):
        def hidden(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(super().hidden(x), dim=1)
            return torch.fft.irfft(spectrum * spectrum.conj().roll(1, 1), n=HIDDEN, dim=1) + spectrum.abs().sum(1, keepdim=True)

    return trained(compile(seeded(Spectral), example_inputs=batch()))


@program(KIND)
def star_arguments(compile: Compile) -> Results:
    """forward(self, *args)."""

    class Starred(Net):
        def forward(self, *args: Tensor) -> Tensor:
            return super().forward(*args)

    return trained(compile(seeded(Starred), example_inputs=batch()))


@program(KIND)
def star_keywords(compile: Compile) -> Results:
    """forward(self, x, **labels), called with a name that stands nowhere."""

    class Keyworded(Net):
        def forward(self, x: Tensor, **labels: Tensor) -> Tensor:
            return super().forward(x, labels["targets"])

    model = compile(seeded(Keyworded))
    optimizer, losses = sgd(model), []
    for x, y in batches():
        optimizer.zero_grad()
        loss = model(x, targets=y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def copied(compile: Compile) -> Results:
    """copy.deepcopy of the compiled module; the copy is trained, the first stays."""
    model = compile(seeded(Net), example_inputs=batch())
    other = copy.deepcopy(model)
    losses = train(other)
    return {"losses": losses, "state": state(other), "first": state(model)}


class Agent:
    """What is trained by itself: a model and its optimizer."""

    def __init__(self, model: Any) -> None:
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def learn(self) -> list[float]:
        return train(self.model, self.optimizer)


@program(KIND)
def agents_copied_with_their_optimizers(compile: Compile) -> Results:
    """As population-based training does: a copy goes on at another rate, before and after the first call."""
    first = Agent(compile(seeded(Net)))
    early = copy.deepcopy(first)
    losses = first.learn()
    late = copy.deepcopy(first)
    for group in late.optimizer.param_groups:
        group["lr"] = 0.02
    for agent in (late, early, first):
        losses += agent.learn()
    return {"losses": losses, "states": [state(agent.model) for agent in (first, early, late)]}


@program(KIND)
def gradients_of_a_learner_given_to_its_source(compile: Compile) -> Results:
    """First-order MAML: a copy from before the first call learns, and its gradients are the model's."""
    model = compile(seeded(Net))
    optimizer, losses = sgd(model), []
    for k in range(2):
        learner = copy.deepcopy(model)
        losses += train(learner, steps=2)
        learner.zero_grad()
        learner(*batch(k + 5)).backward()
        for p, q in zip(model.parameters(), learner.parameters(), strict=True):
            p.grad = q.grad.clone() / 2
        optimizer.step()
    return {"losses": losses, "evaluated": model(*batch(9)).item(), "state": state(model)}


@program(KIND)
def states_that_are_assigned(compile: Compile) -> Results:
    """load_state_dict(..., assign=True) of the best state, before an optimizer is made anew: before the first call and after it."""
    model = compile(seeded(Net))
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
    losses = train(model)
    best = copy.deepcopy(model.state_dict())
    losses += train(model)
    model.load_state_dict(best, assign=True)
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND)
def pickled(compile: Compile) -> Results:
    model = compile(seeded(Net), example_inputs=batch())
    train(model, steps=1)
    other = pickle.loads(pickle.dumps(model))
    return {"evaluated": other(*batch(9)).item()}


@program(KIND)
def saved_as_a_whole(compile: Compile) -> Results:
    """torch.save(model), torch.load."""
    model = compile(seeded(Net), example_inputs=batch())
    train(model, steps=1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    return {"evaluated": other(*batch(9)).item()}


@program(KIND)
def state_dict_saved(compile: Compile) -> Results:
    """torch.save(model.state_dict()), loaded into a plain model."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Net()
    other.load_state_dict(torch.load(file))
    return {"losses": losses, "state": state(other)}


@program(KIND, remedy_of="state_dict_saved")
def full_state_dict_saved(compile: Compile) -> Results:
    """The same with full_state_dict(), where there is one."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    file = io.BytesIO()
    torch.save(state(model), file)
    file.seek(0)
    other = Net()
    other.load_state_dict(torch.load(file))
    return {"losses": losses, "state": state(other)}


@program(KIND)
def loaded_by_the_original_keys(compile: Compile) -> Results:
    """model.load_state_dict of a plain model's state midway, and what it says of unknown and missing keys."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model, steps=2)
    torch.manual_seed(1)
    other = Net().state_dict()
    model.load_state_dict(other)
    partial = {**{n: t for n, t in other.items() if n != "head.bias"}, "extra": torch.zeros(1)}
    problems = model.load_state_dict(partial, strict=False)
    found = {"missing": list(problems.missing_keys), "unexpected": list(problems.unexpected_keys)}
    return {"losses": losses + train(model), **found, "state": state(model)}


@program(KIND)
def best_state_kept_and_restored(compile: Compile) -> Results:
    """Early stopping: a deep copy of state_dict() is kept and loaded again after worse steps."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=2)
    best = copy.deepcopy(model.state_dict())
    losses += train(model, optimizer, steps=2)
    model.load_state_dict(best)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def two_models_in_turns(compile: Compile) -> Results:
    """Two compiled models trained in turns, with dropout off."""
    torch.manual_seed(0)
    first, second = compile(Net(), example_inputs=batch()), compile(Net(), example_inputs=batch())
    one, two, losses = sgd(first), sgd(second, lr=0.05), []
    for given in batches():
        losses += train(first, one, inputs=[given]) + train(second, two, inputs=[given])
    return {"losses": losses, "first": state(first), "second": state(second)}


@program(KIND)
def student_and_compiled_teacher(compile: Compile) -> Results:
    """The teacher's loss under no_grad weighs the student's."""
    torch.manual_seed(0)
    teacher, student = compile(Net(), example_inputs=batch()), compile(Net(), example_inputs=batch())
    optimizer, losses = sgd(student), []
    for given in batches():
        with torch.no_grad():
            reference = teacher(*given)
        optimizer.zero_grad()
        loss = student(*given) * reference
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "student": state(student), "teacher": state(teacher)}


@program(KIND)
def compiled_twice(compile: Compile) -> Results:
    """The same model is compiled again after training, which goes on from where it was."""
    original = seeded(Net)
    losses = train(compile(original, example_inputs=batch()), steps=2)
    again = compile(original, example_inputs=batch())
    return {"losses": losses, **trained(again)}


@program(KIND)
def what_is_compiled_is_compiled(compile: Compile) -> Results:
    """compile(compile(model))."""
    model = compile(compile(seeded(Net), example_inputs=batch()), example_inputs=batch())
    return trained(model)


@program(KIND)
def part_of_a_larger_module(compile: Compile) -> Results:
    """The compiled module is a part of an ordinary one, which has a parameter of its own."""

    class Outer(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.inner(x * self.scale, y)

    model = Outer(compile(seeded(Net), example_inputs=batch()))
    losses = train(model)
    return {"losses": losses, "scale": model.scale.detach().clone(), "state": state(model.inner)}


@program(KIND)
def compiled_by_torch(compile: Compile) -> Results:
    """torch.compile(backend="eager") around what compile returned."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(torch.compile(model, backend="eager"), sgd(model))
    return {"losses": losses, "state": state(model)}


@program(KIND)
def printed(compile: Compile) -> Results:
    """print(model) names the parts."""
    model = compile(seeded(Net), example_inputs=batch())
    train(model, steps=1)
    text = repr(model)
    return {"named": [name for name in ("first", "blocks", "head", "Linear(in_features=8, out_features=16, bias=True)") if name in text]}


@program(KIND)
def functional_call(compile: Compile) -> Results:
    """torch.func.functional_call with other values of the parameters."""
    model = compile(seeded(Net), example_inputs=batch())
    halved = {n: p.detach() * 0.5 for n, p in model.named_parameters()}
    with torch.no_grad():
        return {"loss": torch.func.functional_call(model, halved, batch()).item(), "own": model(*batch()).item()}


@program(KIND)
def checkpointed_by_the_user(compile: Compile) -> Results:
    """torch.utils.checkpoint inside of forward."""

    class Checkpointed(Net):
        def hidden(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(x), y)

    return trained(compile(seeded(Checkpointed), example_inputs=batch()))
