"""Checkpoints written under each of six plans and loaded under each: the next step is that of a run that was not interrupted."""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import MultiStepLR

import autopar
from autopar.checkpoint import CheckpointReader, safetensors_file
from autopar.checkpoint.safetensors_file import read_header
from autopar.errors import CheckpointError, LaunchError
from autopar.run import ParallelModule, WorkerPool, watchdog
from tests.checkpoint_model import PLANS, Emitted, adamw, batch, built, difference, emitted, plain, trained, whole_state
from tests.run_model import Model as Small
from tests.run_model import emitted as small
from tests.run_model import tensors

pytestmark = pytest.mark.gloo

SAVED, MORE = range(2), range(2, 3)


_made: dict[str, Emitted] = {}
_models: dict[str, Any] = {}  # of a worker, one for each plan


@pytest.fixture(scope="module")
def four(workers: WorkerPool) -> WorkerPool:
    """Four workers that have the modules of all plans, which are compiled once."""
    made = {plan: emitted(gpus, pins) for plan, (gpus, pins) in PLANS.items()}
    made["dropout"] = emitted(4, {"dp": 4}, layers=1, dropout=0.5)
    made |= {f"two layers, {plan}": emitted(*PLANS[plan], layers=2) for plan in ("dp2tp2", "pp2dp2zero3")}
    _made.update(made)
    workers.run(_take, made)
    return workers


def _take(made: dict[str, Emitted]) -> None:
    _made.update(made)


def _compiled(plan: str) -> Any:
    if plan not in _models:
        _models[plan] = built(_made[plan], plain(layers=2 if plan.startswith("two") else 4))
    return _models[plan]


def _saved(plan: str, folder: str) -> list[float]:
    """Train two steps, save, train on."""
    model = _compiled(plan)
    model.load_full_state_dict(whole_state(plain()))
    optimizer = adamw(model)
    scheduler = MultiStepLR(optimizer, [1, 3])
    losses = trained(model, optimizer, SAVED, scheduler)
    autopar.save(f"{folder}/{plan}", model, optimizer, scheduler=scheduler.state_dict(), step=2, rng=torch.get_rng_state())
    return losses + trained(model, optimizer, MORE, scheduler)


def _loaded(plan: str, folder: str, names: list[str]) -> dict[str, Any]:
    """Load each checkpoint over whatever the model has become, and train on."""
    model = _compiled(plan)
    found = {}
    for number, name in enumerate(names):
        optimizer = adamw(model, other_way_round=number % 2 == 1)
        if number == 1:
            trained(model, optimizer, range(9, 10))  # the optimizer has states of its own, to be replaced
        scheduler = MultiStepLR(optimizer, [1, 3])
        extra = autopar.load(f"{folder}/{name}", model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        torch.set_rng_state(extra["rng"])
        losses = trained(model, optimizer, MORE, scheduler)
        found[name] = {"losses": losses, "state": whole_state(model), "step": extra["step"]}
    return found


def _uninterrupted() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = plain()
    optimizer = adamw(model)
    scheduler = MultiStepLR(optimizer, [1, 3])
    return trained(model, optimizer, range(3), scheduler), whole_state(model)


def test_all_pairs_of_six_plans(four: WorkerPool, tmp_path: Path) -> None:
    expected, state = _uninterrupted()
    for plan, (gpus, _) in PLANS.items():
        ranks = [_saved(plan, str(tmp_path))] if gpus == 1 else four.run(_saved, plan, str(tmp_path), timeout_s=300)
        for losses in ranks:
            assert losses == pytest.approx(expected, rel=1e-12), plan
    for plan, (gpus, _) in PLANS.items():
        args = (plan, str(tmp_path), list(PLANS))
        for rank, found in enumerate([_loaded(*args)] if gpus == 1 else four.run(_loaded, *args, timeout_s=300)):
            for source, one in found.items():
                assert one["losses"] == pytest.approx(expected[2:], rel=1e-12), f"{source} -> {plan}, rank {rank}"
                assert difference(one["state"], state) < 1e-12, f"{source} -> {plan}, rank {rank}"
                assert one["step"] == 2


# ------------------------------------------------------------------------------------------------- what is written, and by whom
def _held_of(folder: str) -> None:
    model = _compiled("dp2tp2")
    autopar.save(folder, model, adamw(model), async_save=True).result()


def test_each_part_is_written_once_and_by_all_ranks(four: WorkerPool, tmp_path: Path) -> None:
    four.run(_held_of, str(tmp_path / "a"), timeout_s=300)
    files = sorted((tmp_path / "a").glob("data-*.safetensors"))
    headers = [read_header(file)[0] for file in files]
    names = [name for header in headers for name in header]
    assert len(files) == 4 and len(names) == len(set(names))
    assert any(re.search(r"qkv.weight\[0:8,0:16\]", name) for name in names)  # half of the queries: a box of its own
    sizes = [sum(entry.nbytes for entry in header.values()) for header in headers]
    whole = sum(t.numel() * t.element_size() for t in dict.fromkeys(plain().state_dict(keep_vars=True).values()))
    assert sum(sizes) == whole
    assert max(sizes) < 1.2 * min(sizes)


# ------------------------------------------------------------------------------------------------------------------ optimizers
def _two(params: list[Any]) -> list[torch.optim.Optimizer]:
    small, large = [p for p in params if p.dim() < 2], [p for p in params if p.dim() > 1]
    return [torch.optim.Adam(small, lr=1e-2, eps=1e-5), torch.optim.SGD(large, lr=0.1, momentum=0.9)]


OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-5, amsgrad=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2),
    "two": _two,
}


def _stepped(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    for step in steps:
        loss = model(*batch(step))
        loss.backward()
        for one in several:
            one.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def _each_optimizer(plan: str | None, folder: str, *, load: bool) -> dict[str, list[float]]:
    found = {}
    for name, make in OPTIMIZERS.items():
        model = plain(layers=2) if plan is None else _compiled(f"two layers, {plan}")
        if plan is not None:
            model.load_full_state_dict(whole_state(plain(layers=2)))
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        if load:
            autopar.load(f"{folder}/{name}", model, optimizer)
        else:
            _stepped(model, optimizer, range(1))
            autopar.save(f"{folder}/{name}", model, optimizer)
        found[name] = _stepped(model, optimizer, range(1, 3))
    return found


def test_states_of_every_kind_move_between_plans(four: WorkerPool, tmp_path: Path) -> None:
    """Compared with the run that was saved: Adafactor makes the rounding of gradients that are zero as large as any."""
    expected = {"1": _each_optimizer(None, str(tmp_path / "1"), load=False)}
    save, load = functools.partial(_each_optimizer, load=False), functools.partial(_each_optimizer, load=True)
    expected["dp2tp2"] = four.run(save, "dp2tp2", str(tmp_path / "dp2tp2"), timeout_s=300)[0]
    found = {
        ("1", "pp2dp2zero3"): four.run(load, "pp2dp2zero3", str(tmp_path / "1"), timeout_s=300),
        ("dp2tp2", "pp2dp2zero3"): four.run(load, "pp2dp2zero3", str(tmp_path / "dp2tp2"), timeout_s=300),
        ("dp2tp2", "1"): [_each_optimizer(None, str(tmp_path / "dp2tp2"), load=True)],
    }
    for (source, plan), ranks in found.items():
        for of_rank in ranks:
            for name, losses in of_rank.items():
                tolerance = 1e-8 if name == "adafactor" else 1e-12
                assert losses == pytest.approx(expected[source][name], rel=tolerance), f"{name}, {source} -> {plan}"


# ------------------------------------------------------------------------------------------------------------- loss scaling
def _scaled(plan: str | None, folder: str, *, load: bool) -> list[tuple[float, float, int]]:
    """(loss, scale after it, steps of the optimizer that were taken) of steps 2 to 6, after two of which the second overflows; saved or
    loaded between. The scale has grown once by then, was halved, and grows again in the middle of what comes after."""
    model = plain(layers=2) if plan is None else _compiled(f"two layers, {plan}")
    if plan is not None:
        model.load_full_state_dict(whole_state(plain(layers=2)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0 if not load else 1.0, growth_interval=3)
    found = []
    for step in range(2, 7) if load else range(7):
        if step == 2 and load:
            extra = autopar.load(folder, model, optimizer)
            scaler.load_state_dict(extra["scaler"])
        elif step == 2:
            autopar.save(folder, model, optimizer, scaler=scaler.state_dict())
        loss = model(*batch(step))
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        taken = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
        found.append((loss.item(), scaler.get_scale(), max(taken, default=0)))
    return found[-5:]


def test_a_gradient_scaler_goes_on_under_another_plan(four: WorkerPool, tmp_path: Path) -> None:
    """The scale, how long it has been so, and that the step which overflowed was not taken."""
    expected = _scaled(None, str(tmp_path / "1"), load=False)
    assert [scale for _, scale, _ in expected] == [32.0, 32.0, 64.0, 64.0, 64.0] and expected[-1][2] == 6
    load = functools.partial(_scaled, load=True)
    for of_rank in four.run(functools.partial(_scaled, load=False), "dp2tp2", str(tmp_path / "dp2tp2"), timeout_s=300):
        assert _close(of_rank, expected)
    for source, plan in (("1", "pp2dp2zero3"), ("dp2tp2", "pp2dp2zero3"), ("1", "dp2tp2")):
        for of_rank in four.run(load, plan, str(tmp_path / source), timeout_s=300):
            assert _close(of_rank, expected), f"{source} -> {plan}"
    assert _close(_scaled(None, str(tmp_path / "dp2tp2"), load=True), expected)


def _close(found: list[tuple[float, float, int]], expected: list[tuple[float, float, int]]) -> bool:
    losses, theirs = ([x[0] for x in one] for one in (found, expected))
    return [x[1:] for x in found] == [x[1:] for x in expected] and losses == pytest.approx(theirs, rel=1e-12)


# -------------------------------------------------------------------------------------------------------------- random numbers
def _dropped(folder: str, *, deferred: bool) -> tuple[list[float], ...]:
    """The losses after a save; those after its load with the generator as it came; those with another seed set after the load."""
    torch.manual_seed(11)

    def made(*, deferred: bool = deferred) -> Any:
        model = plain(layers=1, dropout=0.5)
        return autopar.compile(model, gpus=4, cluster="cpu", pins={"dp": 4}) if deferred else built(_made["dropout"], model)

    model = made(deferred=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    trained(model, optimizer, range(2))
    autopar.save(folder, model, optimizer)
    expected = trained(model, optimizer, range(2, 4))
    found = []
    for seed in (None,) if deferred else (None, 3):
        again = made()
        second = torch.optim.SGD(again.parameters(), lr=0.1)
        torch.manual_seed(7)
        autopar.load(folder, again, second)
        if seed is not None:
            torch.manual_seed(seed)
        found.append(trained(again, second, range(2, 4)))
    return expected, *found


@pytest.mark.parametrize("deferred", [False, True])
def test_dropout_goes_on_where_it_was(four: WorkerPool, tmp_path: Path, deferred: bool) -> None:
    for found in four.run(functools.partial(_dropped, deferred=deferred), str(tmp_path / "a"), timeout_s=300):
        assert [one == found[0] for one in found] == ([True, True] if deferred else [True, True, False])


def _before_the_first_call(folder: str) -> bool:
    """A module that is not planned yet has whole parameters on every rank: rank 0's are saved."""
    torch.manual_seed(dist.get_rank())
    model = plain(seed=dist.get_rank())
    deferred = autopar.compile(model, gpus=4, cluster="cpu")
    autopar.save(folder, deferred, adamw(model), rank=dist.get_rank())
    again = plain(seed=9)
    extra = autopar.load(folder, autopar.compile(again, gpus=4, cluster="cpu"), adamw(again))
    return extra == {"rank": 0} and difference(whole_state(again), whole_state(plain(seed=0))) == 0


def test_before_the_first_call_the_model_is_whole(four: WorkerPool, tmp_path: Path) -> None:
    assert all(four.run(_before_the_first_call, str(tmp_path / "a"), timeout_s=300))
    assert len(list((tmp_path / "a").iterdir())) == 2


# --------------------------------------------------------------------------------------------------- what other engines have saved
def _by_engine(engine: str, folder: str) -> None:
    """Train two steps with torch's own engine on 4 ranks, and save as its documentation says."""
    model = plain()
    wrapped: Any = model
    if engine == "fsdp2":
        mesh = init_device_mesh("cpu", (4,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model)
    rank = dist.get_rank()
    for step in range(2):
        ids, labels = batch(step)
        wrapped(ids[2 * rank : 2 * rank + 2], labels[2 * rank : 2 * rank + 2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    of_model, of_optimizer = get_state_dict(wrapped, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=folder)


def _after(plan: str | None, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = plain(seed=1) if plan is None else _compiled(plan)
    optimizer = adamw(model)
    autopar.load(folder, model, optimizer)
    with torch.no_grad():
        for name, buffer in model.named_buffers():  # which each rank of an engine has made of its own samples
            if name == "mean":
                buffer.zero_()
    return trained(model, optimizer, MORE), whole_state(model)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_what_ddp_and_fsdp2_have_saved_is_loaded_under_any_plan(four: WorkerPool, tmp_path: Path, engine: str) -> None:
    four.run(_by_engine, engine, str(tmp_path / "a"), timeout_s=300)
    expected, state = _after(None, str(tmp_path / "a"))
    for plan in ("dp2tp2", "pp2dp2zero3"):
        for losses, found in four.run(_after, plan, str(tmp_path / "a"), timeout_s=300):
            assert losses == pytest.approx(expected, rel=1e-12)
            assert difference(found, state) < 1e-12


def _into_fsdp2(folder: str) -> float:
    """One of ours, into a model that FSDP2 has cut."""
    model = plain(seed=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(CheckpointError, match="is a DTensor: load it by torch.distributed.checkpoint"):
        autopar.load(folder, model)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, storage_reader=CheckpointReader(folder))
    set_model_state_dict(model, state["model"])
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
    return difference(whole, whole_state(plain(seed=6)))


def test_fsdp2_loads_ours(four: WorkerPool, tmp_path: Path) -> None:
    autopar.save(tmp_path / "a", plain(seed=6))
    assert four.run(_into_fsdp2, str(tmp_path / "a"), timeout_s=300) == [0.0] * 4


# ------------------------------------------------------------------------------------------------------------------- failures
def _fails(folder: str) -> list[str]:
    """What each of several wrong saves and loads says on this rank; and what is left at the end."""
    model = _compiled("dp2tp2")
    rank = model.mesh.rank
    model.load_full_state_dict(whole_state(plain(seed=3)))
    autopar.save(folder, model, note="the first")
    said = []

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def attempt(run: Callable[[], Any]) -> None:
        with pytest.raises(CheckpointError) as error:
            run()
        said.append(str(error.value))

    written = safetensors_file._write_data
    if rank == 2:
        safetensors_file._write_data = full
    attempt(lambda: autopar.save(folder, model))
    attempt(lambda: autopar.save(folder, model, async_save=True).result())
    watch = watchdog.current()
    assert watch is not None and watch.own.seen().beside == 0, "no save is noted as under way"
    safetensors_file._write_data = written
    attempt(lambda: autopar.save(folder, model, note=object()))
    attempt(lambda: autopar.load(folder if rank != 1 else folder + "/elsewhere", model))
    attempt(lambda: autopar.save(folder, plain()))
    attempt(lambda: autopar.save(folder, model.original))
    model.mesh.agree(0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert autopar.load(folder, model) == {"note": "the first"}
    assert difference(whole_state(model), whole_state(plain(seed=3))) == 0
    assert len(os.listdir(folder)) == 5
    return said


def test_a_failure_on_one_rank_is_an_error_on_all_and_leaves_the_checkpoint(four: WorkerPool, tmp_path: Path) -> None:
    for rank, said in enumerate(four.run(_fails, str(tmp_path / "a"), timeout_s=300)):
        assert "the save failed on rank 2: cannot write" in said[0] and "No space left on device" in said[0]
        assert "the save failed on rank 2: cannot write" in said[1]
        assert "extra.note is of type object, which a checkpoint does not keep" in said[2]
        assert ("rank 1" if rank != 1 else "elsewhere: it is not there") in said[3]
        assert "plain module in a group of 4 processes" in said[4]
        assert "give what autopar.compile has returned" in said[5] or "plain module in a group" in said[5]


def _dies(folder: str, moment: str) -> None:
    """Rank 1 is killed while a second checkpoint is saved."""
    model = ParallelModule(small(dp=2), tensors(Small().double()))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(2)
    if model.mesh.rank == (1 if moment == "data" else 0):
        where, name = {"data": (safetensors_file, "_write_data"), "index": (os, "replace")}[moment]
        setattr(where, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    autopar.save(folder, model, number=2)


def _saves(folder: str) -> None:
    model = ParallelModule(small(dp=2), tensors(Small().double()))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
    autopar.save(folder, model, number=1)


def test_a_rank_that_is_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    model = Small().double()
    with WorkerPool(2) as pool:
        pool.run(_saves, str(tmp_path / "a"), timeout_s=300)
        for moment in ("data", "index"):
            with pytest.raises(LaunchError, match="rank"):
                pool.run(_dies, str(tmp_path / "a"), moment, timeout_s=300)
            assert autopar.load(tmp_path / "a", model) == {"number": 1}
            assert all((p == 1).all() for p in model.parameters())
