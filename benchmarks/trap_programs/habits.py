"""What scripts do beside the plain loop: frozen networks, copies that are put back, files that others read, targets that follow, hooks."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    BATCH,
    CLASSES,
    HIDDEN,
    WIDTH,
    Compile,
    Logits,
    Net,
    Normed,
    Results,
    batch,
    batches,
    gradients,
    program,
    samples,
    seeded,
    sgd,
    state,
    stepped,
    train,
    trained,
)
from benchmarks.trap_programs.training import folder_of_all

KIND = "habits"


class Features(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.hidden(x)


# ----------------------------------------------------------------------------------------------------------- frozen networks
@program(KIND)
def frozen_network_as_a_loss(compile: Compile) -> Results:
    """A perceptual loss: a frozen network is asked for the features of what a plain generator makes, and of the target, gradients on."""
    network = compile(seeded(Features), example_inputs=(samples(),))
    network.requires_grad_(False)
    generator = seeded(nn.Linear, WIDTH, WIDTH)
    losses = stepped(generator, lambda x, y: F.l1_loss(network(generator(x)), network(x)), sgd(generator))
    return {"losses": losses, "generator": state(generator), "features": network(samples(4)) - 1}


@program(KIND)
def critic_frozen_for_the_generator(compile: Compile) -> Results:
    """Both players are compiled; the critic returns a score and features, and takes no gradients while the generator is trained."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = F.leaky_relu(self.first(x), 0.2)
            return self.last(features), features

    generator = compile(seeded(nn.Sequential, nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)), example_inputs=(samples(),))
    critic = compile(seeded(Critic), example_inputs=(samples(),))
    one, two = (torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.5, 0.99)) for m in (generator, critic))
    losses = []
    for k in range(3):
        noise, real = samples(k + 7), samples(k)
        two.zero_grad()
        loss = F.softplus(-critic(real)[0]).mean() + F.softplus(critic(generator(noise).detach())[0]).mean()
        loss.backward()
        two.step()
        critic.requires_grad_(False)
        one.zero_grad()
        score, made = critic(generator(noise))
        matched = F.softplus(-score).mean() + F.l1_loss(made.mean(0), critic(real)[1].mean(0))
        matched.backward()
        one.step()
        critic.requires_grad_(True)
        losses.append((loss.item(), matched.item()))
    return {"losses": losses, "generator": state(generator), "critic": state(critic)}


@program(KIND)
def loss_apart_of_a_frozen_model(compile: Compile) -> Results:
    """loss= gives the loss also where nothing trains, and after everything trains again."""
    model = compile(seeded(Features), loss=lambda h: h.square().mean(), example_inputs=(samples(),))
    optimizer = sgd(model)
    losses = train(model, optimizer, inputs=[(samples(k),) for k in range(2)])
    model.requires_grad_(False)
    losses.append(model(samples(3)).item())
    model.requires_grad_(True)
    return {"losses": losses + train(model, optimizer, inputs=[(samples(4),)]), "state": state(model)}


# -------------------------------------------------------------------------------------------------------- copies and files
@program(KIND)
def rates_tried_and_put_back(compile: Compile) -> Results:
    """A finder of learning rates: deep copies of both state_dicts before anything has run, wild steps, and back."""
    model = compile(seeded(Normed), example_inputs=batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    tried = []
    for k in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 10**k
        tried += train(model, optimizer, inputs=[batch(k)])
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return {"tried": tried, **trained(model, optimizer)}


@program(KIND)
def teacher_by_loading(compile: Compile) -> Results:
    """A mean teacher of one module: its averages are loaded for a pass without gradients, then the student's weights again."""
    model = compile(seeded(Logits), example_inputs=(samples(),))
    optimizer, losses = sgd(model), []
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for x, y in batches():
        student = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        with torch.no_grad():
            target = model(x).softmax(-1)
        model.load_state_dict(student)
        loss = F.mse_loss(model(x + 0.1).softmax(-1), target) + F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, value in model.state_dict().items():
            average[name].mul_(0.9).add_(value, alpha=0.1)
    return {"losses": losses, "average": average, "state": state(model)}


@program(KIND)
def whole_state_by_place(compile: Compile) -> Results:
    """The values of two state_dicts go side by side, as averages of copies are often written."""
    net = seeded(Normed)
    average = copy.deepcopy(net)
    model = compile(net, example_inputs=batch())
    losses = train(model)
    whole = state(model)
    with torch.no_grad():
        for mean, value in zip(average.state_dict().values(), whole.values(), strict=True):
            mean.copy_((mean + value) / 2 if mean.is_floating_point() else value)
    return {"losses": losses, "names": list(whole), "average": state(average)}


@program(KIND)
def state_as_safetensors(compile: Compile) -> Results:
    """safetensors reads memory by its address and the shape."""
    from safetensors.torch import load, save

    model = compile(seeded(Net), example_inputs=batch())
    return {"losses": train(model), "state": load(save(dict(model.state_dict())))}


@program(KIND, remedy_of="state_as_safetensors")
def whole_state_as_safetensors(compile: Compile) -> Results:
    """Of whole tensors, on every rank."""
    from safetensors.torch import load, save

    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    whole = load(save({name: value.contiguous() for name, value in model.state_dict().items()}))
    return {"losses": losses, "state": whole, "again": load(save(state(model)))}


@program(KIND)
def written_by_save_pretrained(compile: Compile) -> Results:
    """model.save_pretrained, of a model with a tied head, and from_pretrained of what it wrote."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    original = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)).double()
    ids = torch.randint(40, (BATCH, 6), generator=torch.Generator().manual_seed(3))
    model: Any = compile(original, example_inputs={"input_ids": ids})
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    folder = str(folder_of_all("pretrained"))
    model.save_pretrained(folder)
    return {"read": state(GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)), "state": state(model)}


# ------------------------------------------------------------------------------------------------------ batches and outputs
class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@program(KIND)
def batch_in_a_named_tuple(compile: Compile) -> Results:
    """Planned on the first call."""

    class Paired(Net):
        def forward(self, given: Pair) -> Tensor:  # type: ignore[override]
            return super().forward(given.x, given.y)

    return trained(compile(seeded(Paired)), inputs=[(Pair(*given),) for given in batches()])


@program(KIND, plans=("dp2tp2",))
def returns_its_temperature(compile: Compile) -> Results:
    """As CLIP is trained: two sets of features and exp(scale), and the contrast over the whole batch outside."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.scale = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Parameter(torch.tensor(2.0))

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return F.normalize(self.one(a), dim=-1), F.normalize(self.two(b), dim=-1), self.scale.exp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        one, two, scale = model(x, x.flip(1))
        scores, places = scale * one @ two.T, torch.arange(len(x))
        return (F.cross_entropy(scores, places) + F.cross_entropy(scores.T, places)) / 2

    model = compile(seeded(Towers), example_inputs=(samples(), samples(1)))
    losses = stepped(model, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with torch.no_grad():
        model.scale.clamp_(0, math.log(7))
    return {"losses": losses, "state": state(model)}


@program(KIND)
def returns_what_it_holds(compile: Compile) -> Results:
    """Among the outputs are a weight, a buffer, the input, rows of a bias, a view of another output, and that output twice."""

    class Open(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.arange(float(CLASSES)))

        def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
            logits = self.logits(x)
            rows = self.head.bias.expand(len(x), -1)
            return {"logits": logits, "weight": self.head.weight, "shift": self.shift, "x": x, "rows": rows, "view": logits[:, :2],
                    "best": logits.argmax(-1), "none": None, "count": 3, "twice": logits}  # fmt: skip

    best = []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        best.append((out["best"].tolist(), out["none"], out["count"]))
        loss = F.cross_entropy(out["logits"] + out["rows"] + 0.1 * out["shift"], y) + 0.1 * out["weight"].square().sum()
        return loss + out["view"].square().mean() + 0.1 * (out["x"] * out["x"]).mean() + 0.01 * out["twice"].mean()

    model = compile(seeded(Open), example_inputs=(samples(),))
    return {"losses": stepped(model, loss_of), "best": best, "state": state(model)}


@program(KIND)
def losses_in_training_and_predictions_later(compile: Compile) -> Results:
    """As detectors are: a dict of losses in training, a list with a dict for each sample in evaluation."""

    class Detector(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:  # type: ignore[override]
            hidden = self.hidden(x)
            logits = self.head(hidden)
            if self.training:
                assert y is not None
                return {"classes": F.cross_entropy(logits, y), "boxes": hidden.square().mean()}
            return [{"label": one.argmax(), "score": one.softmax(-1).max()} for one in logits]

    model = compile(seeded(Detector), example_inputs=batch())
    losses = stepped(model, lambda x, y: sum(model(x, y).values(), torch.zeros(())))
    model.eval()
    with torch.no_grad():
        found = model(samples(3))
    return {"losses": losses, "found": found, "state": state(model)}


@program(KIND)
def batch_that_raises(compile: Compile) -> Results:
    """A sample file of another width: the loop catches what the call raises, and goes on."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k, (x, y) in enumerate(batches(4)):
        try:
            loss = model(x[:, :5] if k == 1 else x, y)
        except Exception:  # noqa: BLE001  (a capture fails with an error of its own)
            losses.append(0.0)
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


# ------------------------------------------------------------------------------------------------------- hooks and gradients
class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, HIDDEN)
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, CLASSES)])

    def forward(self, x: Tensor, y: Tensor, k: int) -> Tensor:
        return F.cross_entropy(self.heads[k](torch.tanh(self.body(x))), y)


@program(KIND, plans=("one",))
def hook_of_a_weight_without_a_gradient(compile: Compile) -> Results:
    """Every weight has a hook that bounds its gradient; the heads are used in turns."""
    model = compile(seeded(TwoHeads), example_inputs=(*batch(), 0))
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.01, 0.01) / (1 + grad.norm()))
    inputs = [(*given, k % 2) for k, given in enumerate(batches(4))]
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), inputs=inputs)


@program(KIND)
def gradients_by_autograd_with_hooks(compile: Compile) -> Results:
    """torch.autograd.grad where weights have hooks, which see the norm of the whole gradient."""
    model = compile(seeded(Net), example_inputs=batch())
    weights = [model.first.weight, model.blocks[0].up.weight, model.head.bias]
    norms: list[list[float]] = [[] for _ in weights]

    def halved(norm: list[float], grad: Tensor) -> Tensor:
        norm.append(grad.norm().item())
        return grad * 0.5

    for norm, weight in zip(norms, weights, strict=True):
        weight.register_hook(functools.partial(halved, norm))
    found = torch.autograd.grad(model(*batch()), weights)
    model(*batch()).backward()
    return {"gradients": found, "norms": norms, "later": gradients(model)}


@program(KIND)
def embedding_of_two_models(compile: Compile) -> Results:
    """Two compiled models have one embedding."""

    class Tower(nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.embedding, self.head = embedding, nn.Linear(WIDTH, classes)

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embedding(ids).mean(1)), y)

    embedding = seeded(nn.Embedding, 20, WIDTH)
    ids = torch.randint(20, (BATCH, 5), generator=torch.Generator().manual_seed(3))
    one, two = (compile(Tower(classes), example_inputs=(ids, batch()[1])) for classes in (4, 6))
    optimizer, losses = torch.optim.SGD({*one.parameters(), *two.parameters()}, lr=0.1), []
    for _, y in batches():
        optimizer.zero_grad()
        loss = one(ids, y) + two(ids, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "one": state(one), "two": state(two)}


@program(KIND)
def jacobian_in_the_loss(compile: Compile) -> Results:
    """A contractive autoencoder by torch.func.jacrev and torch.vmap."""

    class Contractive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.encoder(x))

        def forward(self, x: Tensor) -> Tensor:
            slopes = torch.vmap(torch.func.jacrev(self.encode))(x)
            return F.mse_loss(self.decoder(self.encode(x)), x) + 0.01 * slopes.square().sum((1, 2)).mean()

    return trained(compile(seeded(Contractive), example_inputs=(samples(),)), inputs=[(samples(k),) for k in range(3)])


@program(KIND)
def slope_penalty_in_a_part(compile: Compile) -> Results:
    """R1: the square of the input's gradient, differentiated again, in a module of its own that holds the network too."""

    class Penalty(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(self.network(x).sum(), x, create_graph=True)
            return slope.square().sum(1).mean()

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Softplus(), nn.Linear(HIDDEN, CLASSES))
            self.penalty = Penalty(self.network)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.network(x), y) + 0.1 * self.penalty(x)

    return trained(compile(seeded(Critic), example_inputs=batch()))
