"""What published training scripts do that was wrong, or ended them, when they were first run."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._traps_kit import (
    HIDDEN,
    WIDTH,
    Compile,
    Logits,
    Net,
    Results,
    batch,
    program,
    samples,
    seeded,
    sgd,
    state,
    train,
    trained,
)

KIND = "scripts"


class Recurrent(nn.Module):
    """A language model of whole sequences [length, batch], which is given a state of its cells and gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(20, WIDTH), nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, 20)

    def forward(self, words: Tensor, cells: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found, cells = self.cells(self.words(words), cells)
        return self.head(found).flatten(0, 1), cells


@program(KIND)
def recurrent_of_several_lengths(compile: Compile) -> Results:
    """Truncated backpropagation through time: the state goes from batch to batch, the last one is shorter, evaluation has another width."""
    model, losses = compile(seeded(Recurrent)), []
    text = torch.randint(20, (16, 12), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        for width, training in ((12, True), (6, False)):
            model.train(training)
            cells = (torch.zeros(2, width, WIDTH), torch.zeros(2, width, WIDTH))
            for first in range(0, 15, 6):
                length = min(6, 15 - first)
                words, following = text[first : first + length, :width], text[first + 1 : first + 1 + length, :width]
                with torch.set_grad_enabled(training):
                    found, cells = model(words, tuple(c.detach() for c in cells))
                    loss = nn.functional.cross_entropy(found, following.flatten())
                losses.append(loss.item())
                if training:
                    model.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                    for p in model.parameters():
                        p.data.add_(p.grad, alpha=-1.0)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def weights_by_a_format(compile: Compile) -> Results:
    """Single numbers of weights and gradients are put into text by a format."""
    model = compile(seeded(nn.Linear, WIDTH, 4))
    optimizer = sgd(model)
    model(samples()).square().mean().backward()
    optimizer.step()
    weights = model.weight.view(-1)
    text = [f"{w:.6f}" for w in weights]
    text += [f"{model.weight[0, 1]:+.5f}", f"{model.bias.data[1]:.4e}", f"{model.weight.grad[2, 2]:.6f}"]
    return {"text": text, "state": state(model)}


class _TrainsItself(Logits):
    """Its `train` takes a batch and makes steps; without one it is that of nn.Module. Its `eval` counts."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated = 0

    def train(self, x: Any = True, y: Tensor | None = None, optimizer: Any = None, steps: int = 1) -> Any:  # type: ignore[override]
        if y is None:
            return super().train(x)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self(x), y)
            loss.backward()
            optimizer.step()
        return loss.item()

    def eval(self) -> Any:
        self.evaluated += 1
        return super().eval()


@program(KIND)
def train_takes_a_batch(compile: Compile) -> Results:
    """The model's own `train` and `eval` are other methods than those of nn.Module."""
    model = compile(seeded(_TrainsItself))
    optimizer = sgd(model)
    losses = [model.train(*batch(), optimizer, steps=2)]
    losses += train(lambda x, y: nn.functional.cross_entropy(model(x), y), optimizer)
    losses += [model.train(*batch(1), optimizer)]
    with torch.no_grad():
        found = model.eval()(samples())
    return {"losses": losses, "evaluated": model.evaluated, "mode": model.train().training, "found": found, "state": state(model)}


@program(KIND)
def odd_batch_caught(compile: Compile) -> Results:
    """A short batch that a plan refuses is caught by the loop, on every rank; it goes on with the next one."""
    model, losses = compile(seeded(Logits), example_inputs=(samples(),)), []
    optimizer = sgd(model)
    for index in range(3):
        with contextlib.suppress(ValueError):
            model(samples(index)[:5]).square().mean()
        optimizer.zero_grad()
        loss = model(samples(index)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class _Wrapper(nn.Module):
    """Keeps what it wraps under the name that DistributedDataParallel has for it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@program(KIND)
def unwrapped_where_wrapped(compile: Compile) -> Results:
    """`model.module if hasattr(model, "module") else model`, before the first call and after; and a model that has such an attribute."""
    plain, wrapper = compile(seeded(Logits)), compile(_Wrapper(seeded(Logits)))
    names = [hasattr(plain, "module"), type(wrapper.module).__name__]
    for model in (plain, wrapper):
        losses = train(lambda x, y, model=model: nn.functional.cross_entropy(model(x), y), sgd(model))
    return {"names": names, "after": hasattr(plain, "module"), "losses": losses, "states": [state(plain), state(wrapper)]}


@program(KIND)
def frozen_from_the_beginning(compile: Compile) -> Results:
    """Teachers without gradients: a copy that is frozen before it is called, a model that was frozen before it is compiled; both follow."""
    student = compile(seeded(Logits))
    average = copy.deepcopy(student).eval()
    for p in average.parameters():
        p.requires_grad_(False)
    frozen = compile(seeded(Logits).eval().requires_grad_(False), example_inputs=(samples(),))
    optimizer, losses = sgd(student), []
    for index in range(3):
        with torch.no_grad():
            wanted = average(samples(index))
        wanted = wanted + frozen(samples(index)).sin()
        loss = (student(samples(index)) - wanted - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            for mean, p in zip(average.parameters(), student.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
    asked = [p.requires_grad or p.grad is not None for model in (average, frozen) for p in model.parameters()]
    return {"losses": losses, "asked": asked, "states": [state(m) for m in (student, average, frozen)]}


scale: Any = None


class _Scaled(Logits):
    """Its code reads a name that is a global of this file, too, where a loop over parameters has left one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * self.scale


@program(KIND)
def parameter_left_in_a_global(compile: Compile) -> Results:
    """A loop of the script leaves a parameter of one compiled model under a name that the code of another one reads as an attribute."""
    global scale
    first, second, losses = compile(seeded(Logits)), compile(seeded(_Scaled)), []
    for model in (first, second):
        losses += train(lambda x, y, model=model: nn.functional.cross_entropy(model(x), y), sgd(model))
        for scale in model.parameters():
            scale.data.mul_(0.5)
    scale = None
    return {"losses": losses, "states": [state(first), state(second)]}


class _Centred(Logits):
    """Moves a centre as self-distillation does: the sum over ranks where there are several, by the size of the whole batch."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        found = super().forward(x)
        with torch.no_grad():
            total, ranks = found.sum(0), 1
            if dist.is_available() and dist.is_initialized():
                ranks = dist.get_world_size()
                dist.all_reduce(total)
            self.centre.lerp_(total / (len(x) * ranks), 0.1)
            if ranks > 1:
                self.centre.add_(dist.get_rank())
        return found - self.centre * ranks


class _CentredByValues(_Centred):
    """What decides by values runs as it is written, in a submodule."""

    class Larger(nn.Module):
        def forward(self, found: Tensor) -> Tensor:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            return found * ranks if float(found.sum()) > 0 else found / ranks

    def __init__(self) -> None:
        super().__init__()
        self.larger = self.Larger()

    def forward(self, x: Tensor) -> Tensor:
        return self.larger(super().forward(x))


@program(KIND, plans=("dp2tp2",))
def forward_that_asks_for_ranks(compile: Compile) -> Results:
    """Sums over ranks, their number and the own one, in a graph, in what runs as it is written, and in evaluation of an odd batch."""
    states, losses = [], []
    for kind in (_Centred, _CentredByValues):
        model = compile(seeded(kind))
        losses += train(lambda x, y, model=model: nn.functional.cross_entropy(model(x), y), sgd(model))
        model.eval()
        with torch.no_grad():
            losses.append(model(samples(4)[:6]).square().sum().item())
        states.append(state(model))
    return {"losses": losses, "states": states}


class _Number:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class _Constant(_Number):
    """Computes what its base keeps in a slot."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    @property
    def value(self) -> tuple[float, ...]:  # type: ignore[override]
        return (2.0,)


class _OfNumbers(Logits):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = [_Number(0.5), _Constant()]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        first, second = self.numbers
        return super().forward(x) * first.value * second.value[0]  # type: ignore[index]


@program(KIND)
def property_over_a_slot(compile: Compile) -> Results:
    """An object that the forward reads is of a class that has a property where its base has a slot; the slot of another is changed."""
    model, losses = compile(seeded(_OfNumbers), example_inputs=(samples(),)), []
    optimizer = sgd(model)
    for index in range(3):
        losses += train(lambda x, y: nn.functional.cross_entropy(model(x), y), optimizer, steps=1)
        model.numbers[0].value = 1.0 + index
    return {"losses": losses, "state": state(model)}


def _gate(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a) * torch.sigmoid(b)


class _Gated(Net):
    """Calls a function of TorchScript more often than its executor needs to compile it; the last layer begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mix = torch.jit.script(_gate), nn.Linear(HIDDEN, HIDDEN)
        nn.init.zeros_(self.head.weight)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        for _ in range(4):
            h = self.gate(h, self.mix(h))
        return h


@program(KIND)
def scripted_function_behind_zeros(compile: Compile) -> Results:
    model = seeded(_Gated)
    with torch.no_grad():
        for _ in range(4):
            model(*batch())
    return trained(compile(model, example_inputs=batch()), steps=4)


@program(KIND)
def traced_function(compile: Compile) -> Results:
    """The same, of a trace."""
    model = seeded(_Gated)
    model.gate = torch.jit.trace(_gate, (torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)))
    return trained(compile(model, example_inputs=batch()))


class _Gathering(nn.Module):
    """Contrast over the batches of all ranks, a centre and a codebook's counts that are summed over them, without asking whether there are
    any; its group was noted when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.group = dist.group.WORLD
        self.total = dist.all_reduce
        self.register_buffer("centre", torch.zeros(HIDDEN))
        self.register_buffer("counts", torch.zeros(HIDDEN))

    @torch.no_grad()
    def gathered(self, x: Tensor) -> Tensor:
        parts = [torch.ones_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x, async_op=False)
        return torch.cat(parts)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = (torch.nn.functional.normalize(layer(x), dim=-1) for layer in (self.one, self.other))
        keys = self.gathered(b)
        keys[dist.get_rank() * len(b) : (dist.get_rank() + 1) * len(b)] = b
        with torch.no_grad():
            centre = keys.sum(0)
            dist.all_reduce(centre, group=self.group)
            self.centre.mul_(0.9).add_(centre / (len(keys) * dist.get_world_size(self.group)), alpha=0.1)
            hits = torch.zeros(HIDDEN, dtype=x.dtype).index_add_(0, (a - self.centre).argmax(-1), torch.ones(len(a), dtype=x.dtype))
            self.total(hits)
            dist.broadcast(hits, src=0)
            self.counts += hits
        target = torch.arange(len(x)) + len(x) * dist.get_rank()
        return torch.nn.functional.cross_entropy((a - self.centre) @ keys.T / 0.2, target)


@contextlib.contextmanager
def _world_of_one() -> Any:
    """Where there is no group, as on one process, one of this process: the model asks for it."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@program(KIND, plans=("dp2tp2",))
def collectives_that_are_not_asked_before(compile: Compile) -> Results:
    with _world_of_one():
        model = compile(seeded(_Gathering), example_inputs=batch())
        losses = train(model, steps=4)
        model.eval()
        with torch.no_grad():
            losses.append(model(*batch(9, size=5)).item())
        return {"losses": losses, "state": state(model)}


class _OfAllRanks(torch.autograd.Function):
    """VICReg's: gathers in forward, sums the gradients of all ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = torch.stack(gradients)
        dist.all_reduce(total)
        return total[dist.get_rank()]


of_all_ranks = _OfAllRanks.apply


class _Decorrelated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.cat(_OfAllRanks.apply(torch.tanh(self.one(x))))
        z = self.other(h - h.mean(0))
        covariance = z.T @ z / len(z)
        return (covariance - torch.eye(HIDDEN, dtype=z.dtype)).square().mean()


@program(KIND, plans=("dp2tp2",))
def gathered_by_a_function_of_its_own(compile: Compile) -> Results:
    with _world_of_one():
        return trained(compile(seeded(_Decorrelated), example_inputs=batch()), steps=4)


class _DecorrelatedByName(_Decorrelated):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.other(torch.cat(of_all_ranks(torch.tanh(self.one(x)))))
        covariance = z.T @ z / len(z)
        return (covariance - torch.eye(HIDDEN, dtype=z.dtype)).square().mean()


@program(KIND)
def gathered_by_a_function_under_another_name(compile: Compile) -> Results:
    with _world_of_one():
        return trained(compile(seeded(_DecorrelatedByName), example_inputs=batch()), steps=4)


class _Strict(Net):
    """Refuses a batch whose labels are not as many as its samples."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if len(x) != len(y):
            raise ValueError(f"{len(x)} samples, {len(y)} labels")
        return super().forward(x, y)


@program(KIND)
def bad_batches_that_the_loop_skips(compile: Compile) -> Results:
    """By the exception that the forward raises, or torch does."""
    strict, loose, skipped = compile(seeded(_Strict)), compile(seeded(Net)), list[str]()
    losses = []
    for k in range(4):
        x, y = batch(k)
        for model, kind in ((strict, ValueError), (loose, RuntimeError)):
            optimizer = sgd(model)
            try:
                loss = model(x[:, : WIDTH - 1] if k == 2 and model is loose else x, y[:-1] if k == 1 and model is strict else y)
            except kind as error:
                skipped.append(f"{k} {type(error).__name__} {str(error)[:20]}")
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "skipped": skipped, "state": [state(strict), state(loose)]}
