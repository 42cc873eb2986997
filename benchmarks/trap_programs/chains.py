"""Calls that are chained, batches of other kinds, and what models keep of all samples that they have seen."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    BATCH,
    CLASSES,
    HIDDEN,
    WIDTH,
    Block,
    Compile,
    Net,
    Results,
    batch,
    batches,
    program,
    seeded,
    sgd,
    state,
    stepped,
    train,
    trained,
)  # fmt: skip

KIND = "chains"
MORE = ("dp2mb2", "dp2tp2")


class _Encoder(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


def _steps(model: Any, loss_of: Any, optimizer: Any = None) -> Results:
    return {"losses": stepped(model, loss_of, optimizer), "state": state(model)}


@program(KIND, plans=MORE)
def siamese(compile: Compile) -> Results:
    """An encoder without a loss is called twice before backward."""
    model = compile(seeded(_Encoder), example_inputs=(batch()[0],))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        apart = (model(x) - model(x.flip(0))).square().sum(-1)
        same = (y == y.flip(0)).to(apart.dtype)
        return (same * apart + (1 - same) * F.relu(1 - apart)).mean()

    return _steps(model, loss)


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.block, self.out = nn.Linear(WIDTH + HIDDEN, HIDDEN), Block(), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.block(self.inner(torch.cat([x, h], -1))))
        return self.out(h), h


@program(KIND, plans=MORE)
def unrolled_by_the_user(compile: Compile) -> Results:
    """A cell is called three times, each time with the state that it has returned: backward goes through all of them."""
    model = compile(seeded(_Cell), example_inputs=(batch()[0], torch.zeros(BATCH, HIDDEN)))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        h, total = torch.zeros(BATCH, HIDDEN), torch.zeros(())
        for _ in range(3):
            logits, h = model(x, h)
            total = total + F.cross_entropy(logits, y)
        return total / 3

    return _steps(model, loss)


@program(KIND, plans=MORE)
def truncated(compile: Compile) -> Results:
    """The state of one step, detached, is an input of the next one."""
    model = compile(seeded(_Cell), example_inputs=(batch()[0], torch.zeros(BATCH, HIDDEN)))
    kept = [torch.zeros(BATCH, HIDDEN)]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits, h = model(x, kept[-1])
        kept.append(h.detach())
        return F.cross_entropy(logits, y)

    return _steps(model, loss) | {"last": kept[-1]}


@program(KIND, plans=MORE)
def counted_as_gradients_arrive(compile: Compile) -> Results:
    """A hook on each parameter notes the norm of the gradient that it has in the end."""
    model, norms = compile(seeded(Net), example_inputs=batch()), {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: norms.setdefault(name, []).append(p.grad.norm().item()))
    return {**trained(model), "norms": dict(sorted(norms.items()))}


@program(KIND, plans=MORE)
def nothing_among_the_outputs(compile: Compile) -> Results:
    class Sparse(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            logits = self.logits(x)
            return {"loss": F.cross_entropy(logits, y), "cache": None, "logits": logits, "name": "net", "sizes": (len(x), None)}

    model = compile(seeded(Sparse), example_inputs=batch(), outputs="all")
    optimizer, found = sgd(model), []
    for given in batches():
        out = model(*given)
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [out["loss"].item(), out["cache"], out["name"], *out["sizes"], out["logits"].argmax(-1).tolist()]
    return {"found": found}


@dataclass
class Batch:
    x: Tensor
    y: Tensor


@program(KIND, plans=MORE)
def batch_in_an_object(compile: Compile) -> Results:
    """A batch is an object with tensors as attributes."""

    class OfObjects(Net):
        def forward(self, given: Batch) -> Tensor:
            return super().forward(given.x, given.y)

    model = compile(seeded(OfObjects), example_inputs=(Batch(*batch()),))
    return trained(model, inputs=[(Batch(*given),) for given in batches()])


@program(KIND, plans=MORE)
def labels_of_another_dtype_later(compile: Compile) -> Results:
    """uint8 labels, and samples in float32, behind batches of int64 and float64."""

    class Casts(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x.to(self.head.weight.dtype), y.long())

    given = [(x.float(), y.to(torch.uint8)) if k else (x, y) for k, (x, y) in enumerate(batches())]
    return trained(compile(seeded(Casts), example_inputs=batch()), inputs=given)


@program(KIND, plans=MORE)
def one_tensor_given_twice(compile: Compile) -> Results:
    """The same tensor as input and as target, and a view of it."""

    class Auto(Net):
        def forward(self, x: Tensor, target: Tensor, part: Tensor) -> Tensor:
            return F.mse_loss(self.logits(x), target[:, :CLASSES]) + 0.1 * (self.hidden(x)[:, 0] * part).mean()

    given = [(x, x, x[:, 1]) for x, _ in batches()]
    return trained(compile(seeded(Auto), example_inputs=given[0]), inputs=given)


@program(KIND, plans=MORE)
def one_tensor_in_some_calls(compile: Compile) -> Results:
    """The forward asks whether both inputs are one tensor, and whether the first is contiguous; some calls give it so, and others not."""

    class Asks(Net):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            z = self.logits(a) if a.is_contiguous() else self.logits(a * 2.0)
            return z.square().mean() if a is b else (z - self.logits(b)).square().mean()

    given = [(x, x if k % 2 else batch(9)[0]) for k, (x, _) in enumerate(batches(4))]
    given += [(a.t().contiguous().t(), b) for a, b in given[:2]]
    return trained(compile(seeded(Asks), example_inputs=given[0]), inputs=given)


@program(KIND, plans=MORE)
def queue_that_the_loop_fills(compile: Compile) -> Results:
    """The forward asks how much there is in a queue, and whether an event is set, of a thread beside the loop."""
    waiting, late = queue.Queue[int](), threading.Event()

    class Watching(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            loss = super().forward(x, y) * (1.0 + waiting.qsize())
            return loss * 2.0 if late.is_set() else loss

    model, losses = compile(seeded(Watching), example_inputs=batch()), []
    optimizer = sgd(model)
    for k, given in enumerate(batches(4)):
        waiting.put(k) if k == 1 else late.set() if k == 3 else None
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def texts_beside_tensors(compile: Compile) -> Results:
    """Each batch has texts of its own, which the model is given and does not read."""

    class Texts(Net):
        def forward(self, x: Tensor, y: Tensor, texts: list[str]) -> Tensor:
            return super().forward(x, y)

    model = compile(seeded(Texts), example_inputs=(*batch(), [f"0 {k}" for k in range(BATCH)]))
    return trained(model, inputs=[(*given, [f"{step} {k}" for k in range(BATCH)]) for step, given in enumerate(batches())])


class _Codes(nn.Module):
    """A codebook that is an exponential average of the samples nearest to each code (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, HIDDEN) * 0.5)
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        near = F.one_hot(torch.cdist(h, self.codes).argmin(-1), 5).to(h.dtype)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(near.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(near.T @ h, alpha=0.1)
                total = self.counts.sum()
                self.codes.copy_(self.sums / ((self.counts + 1e-5) / (total + 5e-5) * total)[:, None])
        chosen = near @ self.codes
        return h + (chosen - h).detach(), (h - chosen.detach()).square().mean()


@program(KIND, plans=MORE)
def codes_that_follow_the_samples(compile: Compile) -> Results:
    class Coded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.book = _Codes()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            codes, commitment = self.book(self.hidden(x))
            return F.cross_entropy(self.head(codes), y) + 0.25 * commitment

    return trained(compile(seeded(Coded), example_inputs=batch()))


@program(KIND, plans=MORE)
def centre_of_a_teacher(compile: Compile) -> Results:
    """DINO: the teacher's outputs are centred by their running mean, and sharpened; Sinkhorn's iterations over the batch."""

    class Dino(Net):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
            self.register_buffer("centre", torch.zeros(1, CLASSES))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            student = self.logits(x) / 0.1
            with torch.no_grad():
                teacher = self.teacher(x)
                soft = ((teacher - self.centre) / 0.4).softmax(-1)
                even = (teacher / 0.5).exp().T
                even = even / even.sum()
                for _ in range(3):
                    even = even / even.sum(1, keepdim=True) / CLASSES
                    even = even / even.sum(0, keepdim=True) / x.shape[0]
                even = (even * x.shape[0]).T
                self.centre = self.centre * 0.9 + teacher.mean(0, keepdim=True) * 0.1
            return -((soft + even) * student.log_softmax(-1)).sum(-1).mean()

    return trained(compile(seeded(Dino), example_inputs=batch()))


@program(KIND, plans=MORE)
def norms_of_several_kinds(compile: Compile) -> Results:
    """BatchNorm without a weight, InstanceNorm that tracks, GroupNorm, PReLU, evaluated after training."""

    class Norms(Net):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.BatchNorm1d(HIDDEN, affine=False)
            self.each = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
            self.groups, self.slope = nn.GroupNorm(4, HIDDEN), nn.PReLU(HIDDEN)

        def hidden(self, x: Tensor) -> Tensor:
            h = self.slope(self.groups(self.all(super().hidden(x))))
            return self.each(h.view(-1, 4, HIDDEN // 4)).flatten(1)

    model = compile(seeded(Norms), example_inputs=batch())
    losses = train(model)
    model.eval()
    with torch.no_grad():
        losses.append(model(*batch(5)).item())
    model.train()
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND)
def parts_of_a_sequence(compile: Compile) -> Results:
    """The model is an nn.Sequential, whose parts are counted, taken by number, and gone through."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), Block(), nn.Linear(HIDDEN, CLASSES))

    model = compile(seeded(build), example_inputs=(batch()[0],))
    optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.01}, {"params": model[3].parameters(), "lr": 0.1}], lr=0.05)
    found = _steps(model, lambda x, y: F.cross_entropy(model(x), y), optimizer)
    norms = [p.norm().item() for layer in model for p in layer.parameters()]
    same = model.get_parameter("0.weight") is model[0].weight and model.get_submodule("2") is model[2]
    return {**found, "norms": norms, "length": len(model), "same": same, "kinds": [type(m).__name__ for m in model.children()]}


@program(KIND)
def forward_by_its_name(compile: Compile) -> Results:
    model = compile(seeded(Net), example_inputs=batch())
    return {"losses": stepped(model, model.forward)}


@program(KIND)
def weights_assigned_by_loading(compile: Compile) -> Results:
    """load_state_dict(assign=True, strict=False), with a key that the model has not."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    torch.manual_seed(5)
    other = Net().state_dict()
    model.load_state_dict({**other, "unknown": torch.zeros(1)}, strict=False, assign=True)
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND)
def batches_of_one_sample(compile: Compile) -> Results:
    """As many batches of one sample as there are samples, behind whole ones."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    x, y = batch(7)
    return {"losses": losses + train(model, inputs=[(x[:1], y[:1]), (x[1:2], y[1:2])])}


@program(KIND)
def deterministic_by_wish(compile: Compile) -> Results:
    torch.use_deterministic_algorithms(True)
    try:
        return trained(compile(seeded(Net), example_inputs=batch()))
    finally:
        torch.use_deterministic_algorithms(False)
