"""What a forward asks of its own state in Python: flags that the first batch sets, steps of a warm-up, pointers into queues."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import HIDDEN, Compile, Net, Results, batch, batches, program, seeded, sgd, state, train, trained


class _Stepped(Net):
    """Its buffer `step` counts calls in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(0))

    def losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        return F.cross_entropy(logits, y), logits.square().mean()


class _WarmedUp(_Stepped):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss, size = self.losses(x, y)
        if self.training:
            self.step += 1
        if self.step > 2:
            loss = loss + 0.1 * size
        return loss


@program("state")
def term_from_the_third_step_on(compile: Compile) -> Results:
    """A buffer that counts steps is compared with a bound."""
    return trained(compile(seeded(_WarmedUp), example_inputs=batch()), steps=5)


@program("state")
def steps_set_back_and_loaded(compile: Compile) -> Results:
    """The loop sets the counter back, evaluates in between, and loads a later state."""
    model = compile(seeded(_WarmedUp), example_inputs=batch())
    losses = train(model, steps=4)
    later = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.step.fill_(0)
    losses += train(model, steps=2)
    model.eval()
    with torch.no_grad():
        losses.append(model(*batch(7)).item())
    model.load_state_dict(later)
    with torch.no_grad():
        losses.append(model(*batch(7)).item())
    model.train()
    return {"losses": losses + train(model, steps=1), "state": state(model)}


class _Annealed(_Stepped):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss, size = self.losses(x, y)
        weight = min(1.0, self.step.item() / 2)
        self.step = self.step + 1
        return loss + weight * size


@program("state")
def weight_by_the_number_of_steps(compile: Compile) -> Results:
    """A weight that is computed in Python from a buffer, until it is 1."""
    return trained(compile(seeded(_Annealed), example_inputs=batch()), steps=4)


class _Centred(nn.Module):
    """Takes the mean of its first batch off."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.initialized:
            with torch.no_grad():
                self.mean.copy_(x.mean(0))
                self.initialized.fill_(True)
        return x - self.mean


class _CentredNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.ModuleList([_Centred(), _Centred()])

    def hidden(self, x: Tensor) -> Tensor:
        x = self.centres[0](torch.tanh(self.first(x)))
        return self.centres[1](self.blocks(x))


@program("state")
def centred_by_the_first_batch(compile: Compile) -> Results:
    """Each of two layers sets a buffer in its first call, and a flag in a buffer."""
    return trained(compile(seeded(_CentredNet), example_inputs=batch()))


@program("state")
def centred_anew_midway(compile: Compile) -> Results:
    """The loop clears the flag of one layer, which sets itself up from the next batch."""
    model = compile(seeded(_CentredNet), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=2)
    model.centres[1].initialized.fill_(False)
    return {"losses": losses + train(model, optimizer, inputs=batches(4)[2:]), "state": state(model)}


class _Queued(Net):
    """A queue of states, into which a pointer says where to write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(24, HIDDEN))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, at = self.hidden(x), int(self.pointer)
        past = (hidden @ self.queue.clone().T).square().mean()
        self.queue[at : at + len(x)] = hidden.detach()
        self.pointer[0] = (at + len(x)) % len(self.queue)
        return F.cross_entropy(self.head(hidden), y) + 1e-3 * past


@program("state")
def pointer_into_a_queue(compile: Compile) -> Results:
    """As momentum contrast does it: a pointer in a buffer is a number of Python."""
    return trained(compile(seeded(_Queued), example_inputs=batch()), steps=4)


class _Bounded(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x), y)
        if self.head.weight.norm() > 1.15:
            loss = loss + self.head.weight.square().sum()
        return loss


@program("state")
def penalty_where_a_weight_is_large(compile: Compile) -> Results:
    """A parameter decides whether there is a penalty on it."""
    return trained(compile(seeded(_Bounded), example_inputs=batch()), steps=5)


class _Restarted(Net):
    """Statistics of states that are asked before they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("use", torch.zeros(HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if (self.use < 0.1).any():
            self.use.fill_(1.0)
            hidden = hidden + 0.1
        self.use.mul_(0.5).add_(hidden.detach().abs().mean(0), alpha=0.01)
        return F.cross_entropy(self.head(hidden), y)


@program("state")
def started_anew_where_little_used(compile: Compile) -> Results:
    """The branch depends on what earlier batches wrote, not on this one."""
    return trained(compile(seeded(_Restarted), example_inputs=batch()), steps=6)


class _OfThisBatch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.mean.mul_(0.9).add_(hidden.detach().mean(0))
        loss = F.cross_entropy(self.head(hidden), y)
        return 2 * loss if self.mean.sum() > 0 else loss


@program("state")
def branch_by_what_this_batch_wrote(compile: Compile) -> Results:
    """The buffer is written with this batch before it is asked."""
    return trained(compile(seeded(_OfThisBatch), example_inputs=batch()))


class _Eagerly(Net):
    """Does some of its work where it is not traced: running means, and twice the hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if not torch.compiler.is_compiling():
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
        return h if torch.compiler.is_exporting() else 2 * h


@program("state")
def work_where_nothing_is_traced(compile: Compile) -> Results:
    """Code that asks torch.compiler whether it is traced."""
    return trained(compile(seeded(_Eagerly), example_inputs=batch()))
