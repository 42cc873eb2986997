"""Training loops as people write them: schedules, groups by name, averages, checkpoints, parts of batches."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.data import Batches
from benchmarks._traps_kit import BATCH, Compile, Net, Normed, Results, batch, batches, program, seeded, sgd, state, train, trained

KIND = "training"


def folder_of_all(name: str) -> Path:
    """A folder that the processes of one pool of workers see, and no other process."""
    count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return Path(tempfile.gettempdir()) / f"autopar-training-{os.getppid()}-{count}-{name}"


@program(KIND)
def scheduled(compile: Compile) -> Results:
    """A warm-up and a cosine, one after the other, which step after each step of the optimizer."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedules = torch.optim.lr_scheduler
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.CosineAnnealingLR(optimizer, 4)]
    schedule = schedules.SequentialLR(optimizer, parts, milestones=[2])
    rates, losses = [], []
    for given in batches(5):
        losses += train(model, optimizer, inputs=[given])
        rates += schedule.get_last_lr()
        schedule.step()
    return {"losses": losses, "rates": rates, "state": state(model)}


@program(KIND)
def groups_by_name(compile: Compile) -> Results:
    """Weight decay and rates by the names of parameters; OneCycleLR moves the betas of each group too."""
    model = compile(seeded(Net), example_inputs=batch())
    named = dict(model.named_parameters())
    chosen = {"head": [n for n in named if n.startswith("head.")], "bias": [n for n in named if n.endswith(".bias") and "head" not in n]}
    rest = [n for n in named if n not in {*chosen["head"], *chosen["bias"]}]
    optimizer = torch.optim.AdamW(
        [
            {"params": [(n, named[n]) for n in rest], "weight_decay": 0.1},
            {"params": [(n, named[n]) for n in chosen["bias"]], "weight_decay": 0.0},
            {"params": [(n, named[n]) for n in chosen["head"]], "lr": 3e-2},
        ],
        lr=1e-2,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-2, 3e-2], total_steps=5)
    results = trained(model, optimizer, steps=4, before_step=schedule.step)
    return {**results, "groups": [sorted(group["param_names"]) for group in optimizer.param_groups]}


@program(KIND)
def averaged_model_exponential(compile: Compile) -> Results:
    """AveragedModel with an exponential average, of a plain copy that is made before compile and updated from the whole parameters."""
    model: Any = seeded(Net)
    average = AveragedModel(seeded(Net), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model = compile(model, example_inputs=batch())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for given in batches(4):
        losses += train(model, optimizer, inputs=[given])
        average.update_parameters(model)
    with torch.no_grad():
        return {"losses": losses, "evaluated": average(*batch(9)).item(), "average": dict(average.module.state_dict())}


@program(KIND)
def saved_and_resumed(compile: Compile) -> Results:
    """Two steps, autopar.save, a new model and optimizer, autopar.load, two steps more."""
    folder = folder_of_all("resumed")
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = train(model, optimizer, before_step=schedule.step, steps=2)
    autopar.save(folder, model, optimizer, schedule=schedule.state_dict(), step=2)
    torch.manual_seed(77)
    model = compile(Net(), example_inputs=batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    extra = autopar.load(folder, model, optimizer)
    schedule.load_state_dict(extra["schedule"])
    losses += train(model, optimizer, before_step=schedule.step, inputs=batches(4)[extra["step"] :])
    return {"losses": losses, "state": state(model), "rate": optimizer.param_groups[0]["lr"]}


@program(KIND)
def saved_beside_training(compile: Compile) -> Results:
    """autopar.save(async_save=True), after which training goes on; what was saved is as it was then."""
    folder = folder_of_all("beside")
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train(model, optimizer, steps=2)
    saving = autopar.save(folder, model, optimizer, async_save=True)
    losses += train(model, optimizer, steps=2)
    assert saving is not None
    saving.result()
    autopar.load(folder, model, optimizer)
    return {"losses": losses + train(model, optimizer, steps=1), "state": state(model)}


@program(KIND)
def local_parts_of_the_batch(compile: Compile) -> Results:
    """local_batch=True: each data-parallel rank loads its part with autopar.sampler."""
    model = compile(seeded(Net), example_inputs=batch(), local_batch=True)
    data = TensorDataset(*batch(5, size=4 * BATCH))
    if isinstance(model, autopar.ParallelModule):
        sampler, parts = autopar.sampler(data, model, seed=3), model.data_ranks
    else:
        sampler, parts = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=3), 1
    loader = DataLoader(data, batch_size=BATCH // parts, sampler=sampler)
    results = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        results += train(model, inputs=loader)
    return {"losses": results, "state": state(model)}


class Sequences(nn.Module):
    """Words [batch, length] and the next ones; the length is that of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 16)
        self.head = nn.Linear(16, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.mix(self.words(ids))
        h = torch.tanh(h.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None])
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


@program(KIND)
def lengths_that_vary(compile: Compile) -> Results:
    """Sequences of three lengths, in turns."""
    model = compile(seeded(Sequences))
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randint(16, (2, BATCH, length), generator=generator) for length in (6, 10, 6, 8, 10, 8)]
    return trained(model, inputs=[(ids, labels) for ids, labels in inputs])


@program(KIND)
def lengths_in_buckets(compile: Compile) -> Results:
    """Samples of many lengths, padded to two of them with labels that are ignored, and a last batch that is filled; without padding on one
    process."""
    generator = torch.Generator().manual_seed(2)
    lengths = [int(n) for n in torch.randint(3, 9, (2 * BATCH + 5,), generator=generator)]
    data = [tuple(torch.randint(16, (2, n), generator=generator)) for n in lengths]
    model = compile(seeded(Sequences), example_inputs=(torch.zeros(BATCH, 8, dtype=torch.long),) * 2, local_batch=True)
    parts = model.data_ranks if isinstance(model, autopar.ParallelModule) else 1
    options = {"batch_size": BATCH, "lengths": (5, 8), "seed": 4}
    if isinstance(model, autopar.ParallelModule):
        pad = autopar.Padding({0: 0, 1: -100}, lengths=(5, 8), batch_size=BATCH // parts, labels=1)
        return trained(model, inputs=DataLoader(data, batch_sampler=autopar.batches(lengths, model, **options), collate_fn=pad))  # type: ignore[arg-type]
    chosen = Batches(lengths, part=0, parts=1, shuffle=True, drop_last=False, **options)  # type: ignore[arg-type]
    losses, optimizer = [], sgd(model)
    for indices in chosen:
        words = sum(lengths[i] for i in indices)
        optimizer.zero_grad()
        loss = sum(model(*(t[None] for t in data[i])) * (lengths[i] / words) for i in indices)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def stages_compiled(compile: Compile) -> Results:
    """torch.compile of the emitted stages, of a model without and of one with running statistics."""
    made = {kind.__name__: compile(seeded(kind), example_inputs=batch(), compile_stages="aot_eager") for kind in (Net, Normed)}
    return {name: trained(model) for name, model in made.items()}


@program(KIND)
def computes_in_bf16(compile: Compile) -> Results:
    """precision="bf16" of a float32 model: its weights are at most 1.5 times as far from those of float64 as those of a loop that casts by
    hand on one process, and rest in float32."""
    return _near(compile, precision="bf16")


@program(KIND)
def reduces_in_bf16(compile: Compile) -> Results:
    """The same with gradients that are brought together in bfloat16."""
    return _near(compile, precision="bf16", reduce_dtype="bf16")


def _near(compile: Compile, **wishes: str) -> Results:
    given = [(x.float(), y) for x, y in batches(4)]
    exact = seeded(Net)
    train(exact, inputs=batches(4))
    by_hand = seeded(Net).float()
    optimizer = sgd(by_hand)
    for x, y in given:
        low = copy.deepcopy(by_hand).bfloat16()
        low(x.bfloat16(), y).backward()
        for p, q in zip(by_hand.parameters(), low.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad.float()
        optimizer.step()
    model = compile(seeded(Net).float(), example_inputs=given[0], **wishes)
    train(model, inputs=given)

    def error(other: Any) -> float:
        whole = state(other)
        return sum(float((whole[name].double() - t).square().sum()) for name, t in state(exact).items()) ** 0.5

    return {"near": error(model) <= 1.5 * error(by_hand), "dtypes": sorted({str(t.dtype) for t in state(model).values()})}
