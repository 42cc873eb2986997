"""Programs whose model has state that its forward changes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks._traps_kit import HIDDEN, WIDTH, Compile, Net, Normed, Results, batch, program, seeded, sgd, state, train, trained

KIND = "state"


@program(KIND, plans=("dp2mb2",))
def buffer_assigned(compile: Compile) -> Results:
    """A running mean of the inputs, assigned anew in each forward and used in it."""

    class Centred(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def logits(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            return super().logits(x - self.mean)

    model = compile(seeded(Centred), example_inputs=batch())
    return {**trained(model), "mean": model.mean.clone()}


@program(KIND)
def buffer_assigned_in_a_submodule(compile: Compile) -> Results:
    """The same in a part of the model, under no_grad, planned on the first call."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.ones(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.largest = torch.maximum(self.largest * 0.99, x.abs().amax(0))
            return x / self.largest

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def hidden(self, x: Tensor) -> Tensor:
            return self.scale(super().hidden(x))

    model = compile(seeded(Scaled))
    return trained(model)


@program(KIND, plans=("dp2mb2",))
def counter_in_a_buffer(compile: Compile) -> Results:
    """Warm-up inside of forward, by a counter of steps."""

    class Warm(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(x, y) * (self.steps / 10).clamp(max=1.0)

    model = compile(seeded(Warm), example_inputs=batch())
    return {**trained(model), "steps": model.steps.clone()}


@program(KIND)
def buffer_that_is_not_saved(compile: Compile) -> Results:
    """A buffer with persistent=False, changed in place."""

    class Hidden(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH), persistent=False)

        def logits(self, x: Tensor) -> Tensor:
            self.seen.add_(x.detach().sum(0))
            return super().logits(x) + 0.01 * self.seen.sum()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.logits(x).square().mean() + F.cross_entropy(self.logits(x), y)

    return trained(compile(seeded(Hidden), example_inputs=batch()))


@program(KIND)
def tensor_attribute(compile: Compile) -> Results:
    """A running value that is no buffer but a plain attribute."""

    class Running(Net):
        def __init__(self) -> None:
            super().__init__()
            self.running = torch.zeros(())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().forward(x, y)
            self.running = 0.5 * self.running + 0.5 * loss.detach()
            return loss - 0.1 * self.running * x.mean()

    model = compile(seeded(Running), example_inputs=batch())
    return {**trained(model), "running": model.running.clone()}


@program(KIND)
def number_that_forward_counts(compile: Compile) -> Results:
    """A temperature that falls with the calls, counted in a Python number."""

    class Cooling(Net):
        calls = 0

        def logits(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().logits(x) * self.calls

    return trained(compile(seeded(Cooling), example_inputs=batch()))


@program(KIND)
def list_that_forward_appends_to(compile: Compile) -> Results:
    """A history of mean activations, of which the last is used."""

    class Remembering(Net):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[Tensor] = []

        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            if self.history:
                hidden = hidden + 0.1 * self.history[-1]
            self.history.append(hidden.mean(0).detach())
            return hidden

    return trained(compile(seeded(Remembering), example_inputs=batch()))


@program(KIND)
def list_of_metrics(compile: Compile) -> Results:
    """A list that forward only appends to, read by the user after training."""

    class Logging(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[Tensor] = []

        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            self.log.append(hidden.detach().square().mean())
            return hidden

    model = compile(seeded(Logging), example_inputs=batch())
    return {**trained(model), "log": [t.item() for t in model.log]}


@program(KIND)
def dict_as_a_cache(compile: Compile) -> Results:
    """What one forward leaves in a dict, the next one reads."""

    class Caching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, Tensor] = {}

        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            before = self.cache.get("mean", torch.zeros(HIDDEN))
            self.cache["mean"] = hidden.detach().mean(0)
            return hidden - 0.5 * before

    return trained(compile(seeded(Caching)))


@program(KIND)
def batch_norm(compile: Compile) -> Results:
    """Running statistics after training."""
    model = compile(seeded(Normed), example_inputs=batch())
    return trained(model)


@program(KIND)
def queue_of_keys(compile: Compile) -> Results:
    """Contrastive learning with a queue: the oldest rows give way to the newest."""

    class Contrast(Net):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(7)
            self.register_buffer("queue", torch.randn(24, HIDDEN, generator=generator))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            query = F.normalize(self.hidden(x), dim=1)
            key = query.detach().roll(1, 0)
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.T], dim=1) / 0.2
            self.queue = torch.cat([self.queue[x.shape[0] :], key])
            return F.cross_entropy(logits, torch.zeros_like(y)) + F.cross_entropy(self.head(query), y)

    return trained(compile(seeded(Contrast), example_inputs=batch()))


@program(KIND)
def teacher_inside_of_the_model(compile: Compile) -> Results:
    """Forward moves a frozen teacher towards the student before it asks it."""

    class Distilled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(WIDTH, HIDDEN).requires_grad_(False)
            self.teacher.load_state_dict(self.first.state_dict())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                for old, new in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
            return super().forward(x, y) + F.mse_loss(torch.tanh(self.first(x)), torch.tanh(self.teacher(x)) * 0.9)

    return trained(compile(seeded(Distilled), example_inputs=batch()))


@program(KIND)
def spectral_norm(compile: Compile) -> Results:
    """A parametrisation that changes buffers of its own in each forward."""

    class Spectral(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = parametrizations.spectral_norm(self.head)

    return trained(compile(seeded(Spectral), example_inputs=batch()))


class Keeping(Net):
    """Keeps a counter beside its tensors, leaves a part out of its state_dict and trains the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


@program(KIND)
def state_of_its_own_in_the_root(compile: Compile) -> Results:
    """get_extra_state of the model itself is in its state_dict, and comes back with load_state_dict and full_state_dict."""
    built = seeded(Keeping)
    built.seen = 3
    model = compile(built, example_inputs=batch())
    kept = model.state_dict()
    whole = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    fresh = Keeping()
    fresh.load_state_dict(whole)
    found = {"in it": kept["_extra_state"], "names": sorted(whole), "fresh": fresh.seen}
    model.seen = 0
    model.load_state_dict(kept)
    return {**found, "again": built.seen, "losses": train(model)}


class Overriding(Net):
    """Gives the names of its head a prefix in its state_dict, and no frozen parameters."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return {f"model.{name}": value for name, value in found.items() if not name.startswith("blocks.0")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name.removeprefix("model."): value for name, value in state_dict.items()}, strict=False)

    def parameters(self, recurse: bool = True) -> Any:
        return (p for name, p in self.named_parameters(recurse=recurse) if not name.startswith("first"))


@program(KIND)
def methods_of_the_root_overridden(compile: Compile) -> Results:
    """state_dict, load_state_dict and parameters of the model's own class."""
    model = compile(seeded(Overriding), example_inputs=batch())
    first = {name: value.clone() for name, value in model.state_dict().items()}
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = {"names": sorted(state(model)), "count": len(list(model.parameters())), "losses": losses}
    model.load_state_dict(first)
    return {**found, "loss": model(*batch()).item(), "state": state(model)}


@program(KIND)
def hooks_on_the_state_dict(compile: Compile) -> Results:
    """Hooks that rename keys when the state is taken and when it is loaded, of the root and of a part, before and after compiling."""

    def taken(module: Any, found: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [k for k in found if k.startswith(f"{prefix}head")]:
            found[key.replace("head", "classifier")] = found.pop(key)

    def given(module: Any, found: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [k for k in found if k.startswith(f"{prefix}classifier")]:
            found[key.replace("classifier", "head")] = found.pop(key)

    loaded: list[str] = []
    built = seeded(Net)
    built.register_state_dict_post_hook(taken)
    built.register_load_state_dict_pre_hook(given)
    model = compile(built, example_inputs=batch())
    model.register_load_state_dict_post_hook(lambda module, keys: loaded.append("done"))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    losses = train(model)
    names = sorted(state(model))
    model.load_state_dict(first)
    return {"names": names, "losses": losses, "loaded": loaded, "again": model(*batch()).item(), "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def original_called_in_training_mode(compile: Compile) -> Results:
    """The user's own module, called beside what compile returned, moves its running statistics too."""
    built = seeded(Normed)
    model = compile(built, example_inputs=batch())
    losses = train(model)
    with torch.no_grad():
        losses += [built(*batch(k)).item() for k in (5, 6)]
    return {"losses": losses, "later": train(model), "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def buffer_of_two_names(compile: Compile) -> Results:
    """One running mean that two modules have: both names have it in the state_dict."""

    class Shared(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(HIDDEN))
            self.blocks[1].register_buffer("mean", self.mean)

        def hidden(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(dim=0), alpha=0.1)
            h = self.blocks(h - self.mean)
            return h - self.blocks[1].mean

    model = compile(seeded(Shared), example_inputs=batch())
    losses = train(model)
    return {"losses": losses, "sums": [b.sum().item() for b in model.buffers()], "state": state(model), "now": dict(model.state_dict())}


class TwoViews(nn.Module):
    """One encoder, with batch norms and a running centre, is called for two views of a sample."""

    def __init__(self, with_loss: bool = True) -> None:
        super().__init__()
        self.with_loss = with_loss
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())
        self.predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.register_buffer("centre", torch.full((32,), 0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        one = self.encoder(x)
        p = self.predictor(one * self.centre)  # which backward needs as it was
        self.centre = 0.9 * self.centre + 0.1 * one.detach().mean(dim=0)
        two = self.encoder(0.5 * x + 0.1) * (1.0 + self.centre)
        self.centre = 0.8 * self.centre + 0.2 * two.detach().mean(dim=0)
        self.calls += 1
        found = p, self.predictor(two), one, two
        return similarity(*found) if self.with_loss else found


def similarity(p: Tensor, q: Tensor, one: Tensor, two: Tensor) -> Tensor:
    return -F.cosine_similarity(p, two.detach(), dim=-1).mean() - F.cosine_similarity(q, one.detach(), dim=-1).mean()


@program(KIND, plans=("dp2tp2", "hybrid3"))
def two_views_through_one_encoder(compile: Compile) -> Results:
    """The loss is the model's; afterwards it is evaluated with its running statistics."""
    model = compile(seeded(TwoViews), example_inputs=batch()[:1])
    losses = train(model, steps=4, inputs=[batch(k)[:1] for k in range(4)])
    model.eval()
    with torch.no_grad():
        return {"losses": losses, "evaluated": model(batch(9)[0]).item(), "state": state(model)}


@program(KIND, plans=("dp2tp2", "hybrid3"))
def two_views_and_a_loss_outside(compile: Compile) -> Results:
    """The same, where backward comes after all of forward."""
    model = compile(seeded(TwoViews, with_loss=False), example_inputs=batch()[:1])
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for k in range(4):
        optimizer.zero_grad()
        loss = similarity(*model(batch(k)[0]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class MovingTarget(nn.Module):
    """The target of its encoder is in buffers, which the forward moves towards the encoder's weights: in a pipeline two stages read them,
    and the last one writes them. Gradients go through the target too."""

    def __init__(self, with_loss: bool = True) -> None:
        super().__init__()
        self.with_loss = with_loss
        self.encoder = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        self.predictor = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        for k in (0, 2):
            self.register_buffer(f"target{k}", self.encoder[k].weight.detach().clone())

    def compared(self, x: Tensor, y: Tensor) -> Tensor:
        encoded = self.encoder(x)
        target = F.linear(torch.tanh(F.linear(y + encoded, self.target0)), self.target2)
        return -F.cosine_similarity(self.predictor(encoded), target, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.compared(x, x + 0.1)
        found = found + self.compared(0.5 * x, x)
        with torch.no_grad():
            for k in (0, 2):
                setattr(self, f"target{k}", 0.9 * getattr(self, f"target{k}") + 0.1 * self.encoder[k].weight)
        return found.mean() if self.with_loss else found


@program(KIND, plans=("dp2tp2", "hybrid3"))
def target_moved_by_the_forward(compile: Compile) -> Results:
    model = compile(seeded(MovingTarget), example_inputs=batch()[:1])
    return trained(model, sgd(model, 0.3), inputs=[batch(k)[:1] for k in range(5)])


@program(KIND, plans=("dp2tp2", "hybrid3"))
def target_moved_and_a_loss_outside(compile: Compile) -> Results:
    """The same, where backward comes after the target has moved."""
    model = compile(seeded(MovingTarget, with_loss=False), example_inputs=batch()[:1])
    optimizer, losses = sgd(model, 0.3), []
    for k in range(5):
        optimizer.zero_grad()
        loss = model(batch(k)[0]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}
