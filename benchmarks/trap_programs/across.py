"""Models whose samples meet within the batch: rolled, sorted, doubled, cut in halves, normalised or summed over it."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import BATCH, CLASSES, HIDDEN, WIDTH, Block, Compile, Net, Results, batch, program, seeded, trained

KIND = "across"
MORE = ("dp2mb2", "dp2tp2")


def _run(compile: Compile, build: Any) -> Results:
    return trained(compile(seeded(build), example_inputs=batch()))


@program(KIND, plans=MORE)
def negatives_by_rolling(compile: Compile) -> Results:
    """The negative of each sample is the one before it."""

    class Rolled(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            anchor, positive = self.hidden(x), self.hidden(x + 0.1 * x.sin())
            return F.triplet_margin_loss(anchor, positive, positive.roll(1, 0)) + super().forward(x, y)

    return _run(compile, Rolled)


@program(KIND, plans=MORE)
def two_views_in_one_batch(compile: Compile) -> Results:
    """SimCLR: both views of the batch go through the model as one batch of twice the size, which is cut in halves again."""

    class Views(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = F.normalize(self.hidden(torch.cat([x, x * 1.1 + 0.05])), dim=1).chunk(2, 0)
            both = torch.cat([a, b])
            scores = (both @ both.T / 0.5).masked_fill(torch.eye(2 * x.shape[0], dtype=torch.bool), -1e9)
            places = torch.arange(x.shape[0])
            return F.cross_entropy(scores, torch.cat([places + x.shape[0], places])) + super().forward(x, y)

    return _run(compile, Views)


@program(KIND, plans=MORE)
def halves_of_the_batch(compile: Compile) -> Results:
    """The second half of the batch is another domain than the first."""

    class Halves(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = self.hidden(x)
            half = x.shape[0] // 2
            apart = (hidden[:half].mean(0) - hidden[half:].mean(0)).square().sum()
            return F.cross_entropy(self.head(hidden[:half]), y[:half]) + 0.1 * apart + 0.01 * hidden[half:].square().mean()

    return _run(compile, Halves)


@program(KIND, plans=MORE)
def every_second_sample(compile: Compile) -> Results:
    """Pairs of neighbours are ranked: the even samples against the odd ones."""

    class Pairs(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            score = self.logits(x)[:, 0]
            return F.margin_ranking_loss(score[::2], score[1::2], torch.ones(x.shape[0] // 2), margin=0.5) + super().forward(x, y)

    return _run(compile, Pairs)


@program(KIND, plans=MORE)
def groups_of_the_batch(compile: Compile) -> Results:
    """Ghost batch norm: statistics of groups of four samples."""

    class Ghost(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            groups = hidden.view(-1, 4, HIDDEN)
            return ((groups - groups.mean(1, keepdim=True)) / (groups.var(1, keepdim=True) + 1e-3).sqrt()).view_as(hidden)

    return _run(compile, Ghost)


@program(KIND, plans=MORE)
def sorted_by_a_feature(compile: Compile) -> Results:
    """Samples are sorted, and weighted by their rank."""

    class Sorted(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            losses = F.cross_entropy(self.logits(x[order]), y[order], reduction="none")
            return (losses * torch.linspace(0.5, 1.5, x.shape[0])).mean() + losses.cumsum(0)[3] * 0.01

    return _run(compile, Sorted)


@program(KIND, plans=MORE)
def log_probabilities_by_index(compile: Compile) -> Results:
    """logp[arange(batch), y], as policy gradients are written."""

    class Picked(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logp = self.logits(x).log_softmax(-1)
            advantage = x[:, 0] - x[:, 0].mean()
            entropy = -(logp.exp() * logp).sum(-1).mean()
            return -(logp[torch.arange(x.shape[0]), y] * advantage).mean() - 0.01 * entropy

    return _run(compile, Picked)


@program(KIND, plans=MORE)
def means_of_classes(compile: Compile) -> Results:
    """Prototypes: the samples of each class are summed by index_add and counted."""

    class Prototypes(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = self.hidden(x)
            sums = torch.zeros(CLASSES, HIDDEN, dtype=hidden.dtype).index_add(0, y, hidden)
            count = F.one_hot(y, CLASSES).sum(0).clamp(min=1)
            centres = sums / count[:, None]
            return F.cross_entropy(-torch.cdist(hidden, centres).square(), y) + 0.01 * count.max() * hidden.mean()

    return _run(compile, Prototypes)


@program(KIND, plans=MORE)
def softmax_over_the_batch(compile: Compile) -> Results:
    """Weights of samples that are a softmax over the batch; columns normalised over it; the largest of each column."""

    class Weighted(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = F.normalize(self.hidden(x), dim=0)
            weights = hidden[:, 0].softmax(0)
            losses = F.cross_entropy(self.head(hidden), y, reduction="none")
            columns = hidden.max(0).values.sum() + hidden.logsumexp(0).mean() + hidden.std(0).mean()
            return (weights * losses).sum() + 0.1 * columns

    return _run(compile, Weighted)


@program(KIND, plans=MORE)
def samples_repeated(compile: Compile) -> Results:
    """Each sample several times, side by side and one batch behind another."""

    class Repeated(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            beside = self.logits(x.repeat_interleave(2, 0) * torch.tensor([1.0, 0.9]).repeat(x.shape[0])[:, None])
            behind = self.logits(x.repeat(2, 1))
            return F.cross_entropy(beside, y.repeat_interleave(2)) + 0.5 * F.cross_entropy(behind, y.repeat(2))

    return _run(compile, Repeated)


@program(KIND, plans=MORE)
def states_that_begin_with_zeros(compile: Compile) -> Results:
    """A GRU cell over the features, from zeros(batch, hidden), and an LSTM."""

    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.lstm = nn.GRUCell(2, HIDDEN), nn.LSTM(2, HIDDEN, batch_first=True)

        def hidden(self, x: Tensor) -> Tensor:
            state = torch.zeros(x.shape[0], HIDDEN, dtype=x.dtype)
            steps = x.view(x.shape[0], -1, 2)
            for k in range(steps.shape[1]):
                state = self.cell(steps[:, k], state)
            return state + self.lstm(steps)[0][:, -1]

    return _run(compile, Recurrent)


@program(KIND, plans=MORE)
def losses_with_counts_of_their_own(compile: Compile) -> Results:
    """batchmean, sums over a length, positive weights, a mean over what a mask leaves."""

    class Several(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(x)
            target = F.one_hot(y, CLASSES).to(logits.dtype)
            soft = F.kl_div(logits.log_softmax(-1), (target + 0.1) / (1 + 0.1 * CLASSES), reduction="batchmean")
            binary = F.binary_cross_entropy_with_logits(logits, target, pos_weight=torch.linspace(1, 2, CLASSES))
            seen = (x[:, 0] > -0.5).to(logits.dtype)
            masked = (F.cross_entropy(logits, y, reduction="none") * seen).sum() / seen.sum().clamp(min=1)
            summed = F.smooth_l1_loss(logits, target, reduction="sum") / len(y)
            spread = (logits[:, 1] + (logits[:, 0] - x[:, 0]).square() / logits[:, 1].exp()).mean() / 2
            near = F.cosine_embedding_loss(logits, target, y.sign() * 2.0 - 1.0)
            return soft + binary + masked + summed + spread + near + F.multi_margin_loss(logits, y) + F.huber_loss(logits, target)

    return _run(compile, Several)


@program(KIND, plans=MORE)
def alignment_by_ctc(compile: Compile) -> Results:
    class Aligned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logp = self.out(torch.tanh(self.inner(x[..., None]))).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((x.shape[0],), WIDTH)
            return F.ctc_loss(logp, torch.stack([y + 1, 4 - y], 1).clamp(1, 4), lengths, torch.full((x.shape[0],), 2), zero_infinity=True)

    return _run(compile, Aligned)


@program(KIND, plans=MORE)
def loss_of_each_sample(compile: Compile) -> Results:
    """The model returns a loss for each sample, and the loop takes the mean of the largest."""

    class Each(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(x), y, reduction="none")

    model = compile(seeded(Each), example_inputs=batch())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for k in range(3):
        each = model(*batch(k))
        loss = each.topk(BATCH // 2).values.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), *each.detach().tolist()]
    return {"losses": losses}


@program(KIND, plans=MORE)
def two_losses(compile: Compile) -> Results:
    """A pair of losses, which the loop weighs."""

    class Two(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            logits = self.logits(x)
            return F.cross_entropy(logits, y), logits.square().mean()

    model = compile(seeded(Two), example_inputs=batch())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for k in range(3):
        first, second = model(*batch(k))
        (first + 0.5 * second).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [first.item(), second.item()]
    return {"losses": losses}


@program(KIND, plans=MORE)
def losses_by_name(compile: Compile) -> Results:
    """Several losses in a dict, none of them called loss, which the loop adds up."""

    class Named(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            logits = self.logits(x)
            return {"class": F.cross_entropy(logits, y), "size": logits.square().mean(), "sign": F.softplus(-logits[:, 0]).sum() / len(y)}

    model = compile(seeded(Named), example_inputs=batch())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for k in range(3):
        found = model(*batch(k))
        sum(found.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [x.item() for x in found.values()]
    return {"losses": losses}


class _Reversed(torch.autograd.Function):
    """A gradient-reversal layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


class _Reversal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Reversed.apply(x)


class _Adversarial(Net):
    """A domain classifier behind a gradient-reversal layer."""

    def __init__(self) -> None:
        super().__init__()
        self.domain, self.reversal = nn.Linear(HIDDEN, 2), _Reversal()

    def reverse(self, hidden: Tensor) -> Tensor:
        return self.reversal(hidden)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return F.cross_entropy(self.head(hidden), y) + F.cross_entropy(self.domain(self.reverse(hidden)), y % 2)


@program(KIND, plans=MORE)
def gradient_reversed(compile: Compile) -> Results:
    """The layer is a module that calls an autograd.Function of the user's."""
    return _run(compile, _Adversarial)


@program(KIND, plans=MORE)
def gradient_reversed_by_the_model(compile: Compile) -> Results:
    """The model itself calls the function."""

    class Itself(_Adversarial):
        def reverse(self, hidden: Tensor) -> Tensor:
            return _Reversed.apply(hidden)

    return _run(compile, Itself)


class _Rounded(torch.autograd.Function):
    """Quantised by numpy; the gradient passes inside of the range alone, and the scale learns at half the rate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return scale * torch.from_numpy(numpy.round(4 * x.detach().numpy()) / 4)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1), 0.5 * (grad * x).sum()


@program(KIND, plans=MORE)
def quantised_by_a_function(compile: Compile) -> Results:
    """An autograd function of numpy and a parameter, which the model and its parts call."""

    class Part(Block):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = _Rounded.apply(super().forward(x), torch.ones((), dtype=x.dtype))
            return made

    class Rounding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.scale = nn.Sequential(Part(), Part()), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(_Rounded.apply(self.hidden(x), self.scale)), y)

    return _run(compile, Rounding)


@program(KIND, plans=MORE)
def straight_through(compile: Compile) -> Results:
    """A quantiser with a straight-through gradient, written by detach, and its codebook and commitment losses."""

    class Quantised(Net):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randn(6, HIDDEN) * 0.5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = self.hidden(x)
            near = torch.cdist(hidden, self.codes).argmin(-1)
            codes = self.codes[near]
            loss = (codes - hidden.detach()).square().mean() + 0.25 * (hidden - codes.detach()).square().mean()
            return F.cross_entropy(self.head(hidden + (codes - hidden).detach()), y) + loss

    return _run(compile, Quantised)


@program(KIND, plans=MORE)
def hook_on_an_activation(compile: Compile) -> Results:
    """The gradient of an activation is clamped by a hook that forward registers."""

    class Hooked(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            return hidden

    return _run(compile, Hooked)


class _Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return hidden


@program(KIND, plans=MORE)
def hook_on_the_activation_of_a_part(compile: Compile) -> Results:
    class Hooked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(_Clamped(), _Clamped())

    return _run(compile, Hooked)
