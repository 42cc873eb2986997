"""Several features at once, as a script of months has them: precision, accumulation, clipping, schedules, checkpoints, other batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from benchmarks._traps_kit import BATCH, Compile, Net, Results, batch, batches, gradients, program, seeded, sgd, state, train
from benchmarks.trap_programs.training import Sequences, folder_of_all

KIND = "together"
OTHER = {"dp": 1, "tp": 2}  # of two processes; of four: over both
MANY = ("dp2mb2", "zero2")


def is_parallel(model: Any) -> bool:
    return isinstance(model, autopar.ParallelModule)


def accumulated(
    model: Any, optimizer: Any, given: list[tuple[Tensor, Tensor]], *, count: int = 2, most: float = 0.5,
    step: Callable[[], Any] | None = None,
) -> list[float]:  # fmt: skip
    """Steps of `count` backward passes each, of a loss that is divided by it, with gradients of a norm of at most `most`."""
    found = []
    for at in range(0, len(given), count):
        optimizer.zero_grad(set_to_none=True)
        for one in given[at : at + count]:
            loss = model(*one)
            (loss / count).backward()
            found.append(loss.item())
        found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), most)))
        optimizer.step()
        if step is not None:
            step()
    return found


def groups(model: Any) -> list[dict[str, Any]]:
    """Without decay of biases, as people write it."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 2e-2},
    ]


@program(KIND, plans=MANY)
def a_usual_run(compile: Compile) -> Results:
    """AdamW in groups, accumulation, clipping, warm-up and cosine; evaluation in between on batches of another size; a checkpoint; on."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=6)
    found = accumulated(model, optimizer, batches(4), step=schedule.step)
    model.eval()
    with torch.no_grad():
        found += [float(model(*batch(20 + k, size=2 * BATCH))) for k in range(2)]
    model.train()
    folder = folder_of_all("usual")
    autopar.save(folder, model, optimizer, schedule=schedule.state_dict(), step=2)
    model = compile(Net(), example_inputs=batch())
    optimizer = torch.optim.AdamW(groups(model), lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1.0, 1.0], total_steps=9)
    schedule.load_state_dict(autopar.load(folder, model, optimizer)["schedule"])
    found += accumulated(model, optimizer, batches(8)[4:], step=schedule.step)
    return {"found": found, "state": state(model), "rates": [g["lr"] for g in optimizer.param_groups]}


@program(KIND, plans=MANY)
def a_usual_run_in_bf16(compile: Compile) -> Results:
    """precision="bf16" with accumulation, clipping, momentum and a schedule: at most 1.5 times as far from the weights of float64 as a
    loop on one process that casts by hand."""

    def run(model: Any, low: bool) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        dtype = next(model.parameters()).dtype
        given = [(x.to(dtype), y) for x, y in batches(6)]
        for at in range(0, 6, 2):
            optimizer.zero_grad()
            for x, y in given[at : at + 2]:
                if low:
                    other = copy.deepcopy(model).bfloat16()
                    other.zero_grad()
                    (other(x.bfloat16(), y) / 2).backward()
                    for p, q in zip(model.parameters(), other.parameters(), strict=True):
                        grad = q.grad.to(p.dtype)
                        p.grad = grad if p.grad is None else p.grad + grad
                else:
                    (model(x, y) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
        return state(model)

    exact, by_hand = run(seeded(Net), False), run(seeded(Net).float(), True)
    ours = run(compile(seeded(Net).float(), example_inputs=(batch()[0].float(), batch()[1]), precision="bf16"), False)

    def error(found: dict[str, Tensor]) -> float:
        return sum(float((found[name].double() - t).square().sum()) for name, t in exact.items()) ** 0.5

    return {"near": error(ours) <= 1.5 * error(by_hand), "dtypes": sorted({str(t.dtype) for t in ours.values()})}


@program(KIND, plans=MANY)
def scaled_with_clipping_and_accumulation(compile: Compile) -> Results:
    """GradScaler, two backward passes a step, unscale_ before the norm is clipped; the second step overflows in one of its passes."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        for k in range(2):
            loss = model(*batch(2 * step + k)) / 2
            scaler.scale(loss * (float("inf") if (step, k) == (1, 0) else 1.0)).backward()
            found.append(loss.item())
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(float(norm) if torch.isfinite(norm) else -1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return {"found": found, "state": state(model)}


@program(KIND)
def resumed_under_another_plan_in_bf16(compile: Compile) -> Results:
    """What was saved with precision="bf16" is loaded, bit for bit, under another plan and into the plain model; AdamW's moments too."""
    given = (batch()[0].float(), batch()[1])
    model = compile(seeded(Net).float(), example_inputs=given, precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, inputs=[(x.float(), y) for x, y in batches(3)])
    before, folder = state(model), folder_of_all("in-bf16")
    autopar.save(folder, model, optimizer, step=3)
    other = compile(Net().float(), example_inputs=given, precision="bf16", pins=OTHER)
    theirs = torch.optim.AdamW(other.parameters(), lr=1.0)
    autopar.load(folder, other, theirs)
    same = all(torch.equal(t, before[name]) for name, t in state(other).items())
    back = folder_of_all("in-bf16-again")
    autopar.save(back, other, theirs, step=3)
    plain = Net().float()
    own = torch.optim.AdamW(plain.parameters(), lr=1.0)
    autopar.load(back, plain, own)
    same = same and all(torch.equal(t, before[name]) for name, t in plain.state_dict().items())
    return {"same": same, "step": int(own.state_dict()["state"][0]["step"]), "rate": own.param_groups[0]["lr"]}


@program(KIND)
def local_parts_and_a_last_batch_that_is_short(compile: Compile) -> Results:
    """local_batch=True, drop_last=False, 30 samples in batches of 12: the last one is of 6, which divide."""
    return _in_parts(compile, 30)


@program(KIND)
def local_parts_and_a_last_batch_that_is_uneven(compile: Compile) -> Results:
    """The same of 27 samples: the last batch has 3, of which no rank has as many as another."""
    return _in_parts(compile, 27)


def _in_parts(compile: Compile, count: int) -> Results:
    model = compile(seeded(Net), example_inputs=batch(), local_batch=True)
    data = TensorDataset(*batch(5, size=count))
    part, parts = (model.data_rank, model.data_ranks) if is_parallel(model) else (0, 1)
    loader = DataLoader(data, batch_sampler=[list(range(at, min(at + BATCH, count)))[part::parts] for at in range(0, count, BATCH)])
    return {"losses": train(model, inputs=loader), "state": state(model)}


@program(KIND, plans=MANY)
def another_length_within_an_accumulation(compile: Compile) -> Results:
    """Each backward pass of a step has sequences of another length, so that the module is captured while gradients are there."""
    model = compile(seeded(Sequences))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    given = [tuple(torch.randint(16, (2, BATCH, n), generator=generator)) for n in (6, 10, 8, 6, 10, 8)]
    return {"found": accumulated(model, optimizer, given, count=3), "state": state(model)}  # type: ignore[arg-type]


@program(KIND, plans=MANY)
def evaluated_within_an_accumulation(compile: Compile) -> Results:
    """A call without gradients between two backward passes, whose gradients add up."""
    model = compile(seeded(Net), example_inputs=batch())
    model(*batch()).backward()
    with torch.no_grad():
        between = model(*batch(7)).item()
    model(*batch(1)).backward()
    return {"between": between, "gradients": gradients(model)}


class Two(Net):
    """Two heads, of which an argument says which one is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor, second: bool = False) -> Tensor:
        return F.cross_entropy((self.other if second else self.head)(self.hidden(x)), y)


@program(KIND)
def heads_in_turns_with_momentum(compile: Compile) -> Results:
    """One head after the other: the one that is not used has no gradient, and AdamW must leave it where it is."""
    model = compile(seeded(Two), example_inputs=batch())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), []
    for k in range(4):
        optimizer.zero_grad()
        loss = model(*batch(k), second=k % 2 == 1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.constant_(self.up.weight, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@program(KIND)
def trained_then_frozen_then_adapted(compile: Compile) -> Results:
    """Trained as a whole, saved, frozen, given low-rank adapters, compiled again, trained; the first checkpoint is of what was then."""
    model = compile(seeded(Net), example_inputs=batch())
    losses, folder = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2)), folder_of_all("adapted")
    autopar.save(folder, model)
    original = seeded(Net)
    autopar.load(folder, original)
    original.requires_grad_(False)
    torch.manual_seed(5)
    for block in original.blocks:
        block.up = Adapted(block.up)
    again = compile(original, example_inputs=batch())
    optimizer = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=1e-2)
    losses += train(again, optimizer)
    return {"losses": losses, "state": state(again), "trained": sum(p.numel() for p in again.parameters() if p.requires_grad)}


@program(KIND)
def lowered_on_a_plateau_and_the_best_kept(compile: Compile) -> Results:
    """ReduceLROnPlateau on an evaluation loss; the best weights are kept by state_dict and loaded at the end."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    best, kept, found = float("inf"), {}, []
    for k in range(5):
        found += train(model, optimizer, inputs=[batch(k)])
        model.eval()
        with torch.no_grad():
            loss = model(*batch(30)).item()
        model.train()
        schedule.step(loss)
        found += [loss, optimizer.param_groups[0]["lr"]]
        if loss < best:
            best, kept = loss, state(model)
    (model.load_full_state_dict if is_parallel(model) else model.load_state_dict)(kept)
    return {"found": found, "state": state(model), "next": train(model, optimizer, inputs=[batch(6)])}


@program(KIND)
def a_step_that_is_skipped(compile: Compile) -> Results:
    """A loop that leaves out steps whose norm is too large, and drops their gradients."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, found = sgd(model), []
    for k in range(4):
        loss = model(*batch(k)) * (1e3 if k == 1 else 1.0)
        loss.backward()
        norm = float(model.clip_grad_norm_(1.0)) if is_parallel(model) else float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        found += [loss.item(), norm]
        if norm < 10:
            optimizer.step()
        optimizer.zero_grad()
    return {"found": found, "state": state(model)}


@program(KIND, plans=MANY)
def optimizers_of_parts_with_schedules_of_their_own(compile: Compile) -> Results:
    """The head by SGD, the rest by Adam, each with its schedule, of one backward pass; the head steps every second time."""
    model = compile(seeded(Net), example_inputs=batch())
    named = dict(model.named_parameters())
    head = torch.optim.SGD([p for n, p in named.items() if n.startswith("head")], lr=0.1, momentum=0.9)
    rest = torch.optim.Adam([p for n, p in named.items() if not n.startswith("head")], lr=1e-2)
    schedules = [torch.optim.lr_scheduler.StepLR(head, 2, 0.5), torch.optim.lr_scheduler.LinearLR(rest, 0.5, total_iters=3)]
    losses = []
    for k in range(6):
        loss = model(*batch(k))
        loss.backward()
        rest.step()
        rest.zero_grad()
        if k % 2:
            head.step()
            head.zero_grad()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}
