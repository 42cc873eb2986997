"""What the programs of `traps` are written with: the registry, small models, batches, a training loop, and what is recorded.

A program is an ordinary training script as a function of `compile`. On one process `compile` gives the model itself back; on the
workers it is autopar.compile with the pins of a plan. What it returns, numbers and tensors by name, must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "BATCH", "Block", "Compile", "InDict", "Net", "Normed", "PROGRAMS", "Program", "Results", "batch", "batches", "gradients", "loss_loop",
    "program", "seeded", "sgd", "state", "stepped", "train", "trained",
]  # fmt: skip

BATCH, WIDTH, HIDDEN, CLASSES = 12, 8, 16, 4
Results = Mapping[str, Any]
Compile = Callable[..., Any]
Run = Callable[[Compile], Results]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """kind: the class in the table. plans: those that it is run under besides the usual ones. remedy_of: the program of which this is
    the form that autopar's documentation recommends."""

    name: str
    kind: str
    run: Run
    remedy_of: str = ""
    plans: tuple[str, ...] = ()


PROGRAMS: dict[str, Program] = {}


def program(kind: str, *, remedy_of: str = "", plans: tuple[str, ...] = ()) -> Callable[[Run], Run]:
    """Enter a function into the table under its own name."""

    def enter(run: Run) -> Run:
        assert run.__name__ not in PROGRAMS, f"two programs are named {run.__name__}"
        PROGRAMS[run.__name__] = Program(name=run.__name__, kind=kind, run=run, remedy_of=remedy_of, plans=plans)
        return run

    return enter


class Block(nn.Module):
    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A classifier of samples [batch, 8] in 4 classes, which returns its loss. Its parts can be changed by subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(HIDDEN, CLASSES)

    def hidden(self, x: Tensor) -> Tensor:
        return self.blocks(torch.tanh(self.first(x)))

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.logits(x), y)


class Logits(Net):
    """Returns logits [batch, 4]; the loss is given apart."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.logits(x)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(super().hidden(x))


class InDict(Net):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.logits(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def seeded(build: Callable[..., nn.Module], *args: Any, **options: Any) -> Any:
    """A model with the same first weights on every process."""
    torch.manual_seed(0)
    return build(*args, **options)


def batch(index: int = 0, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Samples [size, 8] and their classes."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


def samples(index: int = 0) -> Tensor:
    """A batch without its classes."""
    return batch(index)[0]


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [batch(i) for i in range(count)]


def sgd(model: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(
    model: Any, optimizer: torch.optim.Optimizer | None = None, *, steps: int = 3, inputs: Iterable[tuple[Any, ...]] | None = None,
    before_step: Callable[[], Any] | None = None,
) -> list[float]:  # fmt: skip
    """The usual loop; the losses. before_step: called between backward and the optimizer's step."""
    optimizer = optimizer or sgd(model)
    losses = []
    for given in inputs if inputs is not None else batches(steps):
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        if before_step is not None:
            before_step()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state(model: Any) -> dict[str, Tensor]:
    """The whole state_dict, under the original names."""
    whole = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def gradients(model: Any) -> dict[str, Tensor]:
    """The whole gradients, of parameters that have one other than zero."""
    whole = model.full_gradients() if hasattr(model, "full_gradients") else {n: p.grad for n, p in model.named_parameters()}
    return {n: g.detach().clone() for n, g in whole.items() if g is not None and bool(g.any())}


def trained(model: Any, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Results:
    """Losses of the usual loop and the state after it; options as in `train`."""
    return {"losses": train(model, optimizer, **options), "state": state(model)}


def stepped(model: Any, loss_of: Callable[..., Tensor], optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """The losses of the usual loop, where loss_of makes the loss of a batch."""
    optimizer, losses = optimizer or sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        loss = loss_of(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loss_loop(model: Any, take: Any) -> list[float]:
    """The usual loop, where the loss has to be taken from what forward returns."""
    return stepped(model, lambda *given: take(model(*given)))
