"""What the integrations refuse, and that processes with other seeds are given samples in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="the extra tools is not installed")

import autopar
from autopar.errors import CheckpointError
from autopar.run import WorkerPool
from tests.checkpoint_model import adamw, batch, plain

pytestmark = pytest.mark.gloo


def _accelerated(pins: dict[str, Any]) -> dict[str, Any]:
    """Messages of what is refused, and the order of samples, on a process with a seed of its own."""
    from accelerate import Accelerator

    from autopar.integrations.accelerate import AutoparAccelerator, one_process

    rank = torch.distributed.get_rank()
    said = {}

    def refused(name: str, run: Any) -> None:
        try:
            run()
        except (TypeError, ValueError) as error:
            said[name] = str(error)

    model = autopar.compile(plain(layers=2), 2, example_inputs=batch(0), cluster="cpu", pins=pins)
    optimizer = adamw(model)
    refused("stock", lambda: Accelerator(cpu=True).prepare(model))
    accelerator = AutoparAccelerator(cpu=True)
    refused("plain", lambda: accelerator.prepare(nn.Linear(2, 2)))
    prepared: Any = accelerator.prepare(model, optimizer)
    refused("folder", accelerator.save_state)
    other = Accelerator(cpu=True)
    other.state.dynamo_plugin.backend = type(other.state.dynamo_plugin.backend)("INDUCTOR")
    refused("dynamo", lambda: one_process(other))
    other.state.dynamo_plugin.backend = type(other.state.dynamo_plugin.backend)("NO")
    torch.manual_seed(100 + rank)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(32)), batch_size=4, shuffle=True))
    order = [value for _ in range(2) for (part,) in loader for value in part.tolist()]
    with accelerator.split_between_processes([1, 2, 3]) as part:
        said["split"] = str(accelerator.gather_for_metrics(part, use_gather_object=True))
    return {
        "said": said, "order": order, "same": prepared[0] is model, "unwrapped": type(accelerator.unwrap_model(model)).__name__,
        "state": sorted(accelerator.get_state_dict(model)), "count": accelerator.num_processes, "main": accelerator.is_main_process,
    }  # fmt: skip


def test_methods_of_other_releases_are_given_what_they_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from accelerate import Accelerator

    from autopar.integrations.accelerate import AutoparAccelerator

    model = nn.Linear(2, 2)
    monkeypatch.setattr(Accelerator, "unwrap_model", lambda self, model, keep_fp32_wrapper=True: (model, keep_fp32_wrapper))
    accelerator: Any = AutoparAccelerator(cpu=True)
    assert accelerator.unwrap_model(model) == (model, True) and accelerator.unwrap_model(model, False) == (model, False)
    strategies = pytest.importorskip("lightning.pytorch.strategies", reason="the extra tools is not installed")

    from autopar.integrations.lightning import AutoparStrategy

    strategy: Any = AutoparStrategy("model")
    for load, options in ((lambda self, path: path, {}), (lambda self, path, weights_only=None: path, {"weights_only": False})):
        monkeypatch.setattr(strategies.Strategy, "load_checkpoint", load)
        assert strategy.load_checkpoint(tmp_path, **options) == tmp_path


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2, backend="gloo") as pool:
        yield pool


def _kept(folder: str, pins: dict[str, Any]) -> dict[str, Any]:
    """Numbered checkpoints, of which two are kept; what hooks are given and do; samples after a checkpoint, and after loading it."""
    from accelerate.utils import ProjectConfiguration

    from autopar.integrations.accelerate import AutoparAccelerator

    numbered = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator: Any = AutoparAccelerator(cpu=True, project_config=numbered)
    model: Any = autopar.compile(plain(layers=2), 2, example_inputs=batch(0), cluster="cpu", pins=pins)
    torch.manual_seed(11 + torch.distributed.get_rank())
    loader = DataLoader(TensorDataset(torch.arange(16)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    seen = list[Any]()

    def written(models: list[Any], weights: list[Any], to: str) -> None:
        seen.append(("saved", Path(to).name, Path(to).is_dir(), len(models), [*weights[0]] == [*models[0].state_dict()]))
        if accelerator.is_main_process:
            torch.save(models[0].state_dict(), Path(to, "whole.pt"))

    def read(models: list[Any], of: str) -> None:
        state = torch.load(Path(of, "whole.pt"))
        models[0].load_state_dict({name: x + 1 if x.is_floating_point() else x for name, x in state.items()})
        seen.append(("loaded", Path(of).name))

    accelerator.register_save_state_pre_hook(written)
    accelerator.register_load_state_pre_hook(read)
    for number in range(3):
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
    first = sum(p.detach().sum().item() for p in model.parameters())
    then = [value for (part,) in loader for value in part.tolist()]
    accelerator.wait_for_everyone()
    accelerator.load_state()
    again = [value for (part,) in loader for value in part.tolist()]
    grown = sum(p.detach().sum().item() for p in model.parameters()) - first
    kept = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
    return {"seen": seen, "again": again == then, "grown": grown, "kept": kept}


def test_accelerate_numbers_checkpoints_calls_hooks_and_goes_on_with_the_samples(pair: WorkerPool, tmp_path: Path) -> None:
    found = pair.run(_kept, str(tmp_path / "two"), {"dp": 2, "zero": 3}, timeout_s=300)
    numbers = sum(p.numel() for p in plain(layers=2).parameters())
    for one in found:
        assert one["seen"] == [*(("saved", f"checkpoint_{i}", True, 1, True) for i in range(3)), ("loaded", "checkpoint_2")]
        assert one["again"] and one["kept"] == ["checkpoint_1", "checkpoint_2"] and one["grown"] == pytest.approx(numbers, rel=1e-5)


def test_accelerate_beside_its_own_accelerator(pair: WorkerPool) -> None:
    first, second = pair.run(_accelerated, {"dp": 2}, timeout_s=400)
    for found in (first, second):
        assert "cannot be put into DistributedDataParallel" in found["said"]["stock"]
        assert "autopar has not compiled: prepare what autopar.compile" in found["said"]["plain"]
        assert "save_state(folder)" in found["said"]["folder"]
        assert "compile_stages=True" in found["said"]["dynamo"]
        assert found["same"] and found["said"]["split"] == "[1, 2, 3]"
        assert (found["unwrapped"], found["count"]) == ("Model", 1)
        assert sorted(found["order"][:32]) == sorted(found["order"][32:]) == list(range(32))
        assert found["order"][:32] != found["order"][32:]
    assert first["order"] == second["order"]
    assert first["state"] == sorted(plain(layers=2).state_dict())
    assert second["state"] == []
    assert [first["main"], second["main"]] == [True, False]


def _lightning() -> tuple[list[str], list[int]]:
    """Messages, and the order in which a shuffled loader gives samples, on a process with a seed of its own."""
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from autopar.integrations.lightning import AutoparStrategy

    class Training(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)
            self.scale = nn.Parameter(torch.rand(()))
            self.seen: list[int] = []
            self.scales: list[float] = []

        def training_step(self, given: Any, index: int) -> Any:
            (x,) = given
            self.seen += x.int().flatten().tolist()
            self.scales.append(self.scale.item())
            return (self.net(x) * self.scale).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def fit(name: str) -> Any:
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=AutoparStrategy(name, cluster="cpu", pins={"dp": 2}), max_epochs=2, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, plugins=[TorchElasticEnvironment()],
        )  # fmt: skip
        torch.manual_seed(50 + torch.distributed.get_rank())
        module = Training()
        trainer.fit(module, DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=4, shuffle=True))
        return module

    said = []
    try:
        fit("model")
    except AttributeError as error:
        said.append(str(error))
    module = fit("net")
    return [*said, *(f"{x:.12f}" for x in module.scales)], module.seen


def test_lightning_names_what_it_may_compile_and_gives_all_the_same(pair: WorkerPool) -> None:
    pytest.importorskip("lightning", reason="the extra tools is not installed")
    first, second = pair.run(_lightning, timeout_s=400)
    assert first == second  # samples, and what is outside of the compiled submodule, step by step
    said, seen = first
    assert "has no submodule 'model' for AutoparStrategy to compile; it has: net" in said[0]
    assert sorted(seen[:8]) == sorted(seen[8:]) == list(range(8))
    assert len(set(said[1:])) == 4  # it is trained


def _consolidated(folder: str) -> list[Any]:
    """Of a checkpoint as one file, read by Lightning: hyperparameters and parameters, beside those that were trained; what is refused."""
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from autopar.integrations.lightning import AutoparStrategy, consolidate

    class Training(pl.LightningModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
            self.scale = nn.Parameter(torch.rand(()))

        def training_step(self, given: Any, index: int) -> Any:
            (x,) = given
            return (self.net(x) * self.scale.detach() - x).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=1e-3)

    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=AutoparStrategy("net", cluster="cpu", pins={"tp": 2}), max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, plugins=[TorchElasticEnvironment()],
    )  # fmt: skip
    torch.manual_seed(5)
    module = Training(width=6)
    torch.manual_seed(6)
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=4))
    kept = Path(folder)
    trainer.save_checkpoint(kept / "last.ckpt")
    trained = {**module.net.full_state_dict(), "scale": module.scale.detach().clone()}
    if torch.distributed.get_rank() == 1:
        return []
    with pytest.raises(CheckpointError, match="is no checkpoint of AutoparStrategy"):
        consolidate(kept, kept / "file.ckpt")
    consolidate(kept / "last.ckpt", kept / "file.ckpt")
    loaded = Training.load_from_checkpoint(kept / "file.ckpt")
    state = {name.removeprefix("net."): x for name, x in loaded.state_dict().items()}
    assert state.keys() == trained.keys() and sorted(path.name for path in kept.iterdir()) == ["file.ckpt", "last.ckpt"]
    return [loaded.hparams["width"], all(torch.equal(trained[name], x) for name, x in state.items())]


def test_a_checkpoint_of_lightning_becomes_one_file(pair: WorkerPool, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="the extra tools is not installed")
    found, _ = pair.run(_consolidated, str(tmp_path), timeout_s=400)
    assert found == [6, True]


def _adversaries(folder: str | None, resume: bool) -> tuple[list[float], list[str]]:
    """Losses of three steps of a submodule that is compiled and of one that is not, with an optimizer of both and one of the other alone;
    after two steps a checkpoint is written, or was. folder: None on one process, without autopar."""
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from autopar.integrations.lightning import AutoparStrategy

    class Training(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net, self.critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Linear(1, 1)
            self.scale = nn.Parameter(torch.ones(()))
            self.losses: list[float] = []

        def training_step(self, given: Any, index: int) -> None:
            (x,) = given
            first, second = self.optimizers()
            made = self.net(x) * self.scale
            loss = (made - x).square().mean() - 0.01 * self.critic(made).mean()
            self.manual_backward(loss)
            first.step()
            second.zero_grad()
            against = (self.critic(made.detach()) - self.critic(x)).mean() + self.critic.weight.square().sum()
            self.manual_backward(against)
            second.step()
            first.zero_grad()
            self.losses += [loss.item(), against.item()]

        def configure_optimizers(self) -> Any:
            first = torch.optim.AdamW([{"params": self.net.parameters(), "lr": 1e-2}, {"params": [self.scale], "lr": 1e-1}])
            return first, torch.optim.Adam(self.critic.parameters(), lr=1e-2)

    more: dict[str, Any] = {} if folder is None else {
        "devices": 2, "strategy": AutoparStrategy("net", cluster="cpu", pins={"tp": 2}), "plugins": [TorchElasticEnvironment()]
    }  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=3 if resume or folder is None else 2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **more,
    )  # fmt: skip
    torch.manual_seed(5)
    module = Training()
    loader = DataLoader(TensorDataset(torch.arange(4.0)[:, None]), batch_size=4)
    trainer.fit(module, loader, ckpt_path=f"{folder}/last.ckpt" if resume else None)
    if folder is not None and not resume:
        trainer.save_checkpoint(f"{folder}/last.ckpt")
    return module.losses, [type(o).__name__ for o in trainer.optimizers]


@pytest.mark.filterwarnings("ignore")  # of Lightning, on one process
def test_optimizers_over_more_than_what_lightning_compiles_are_saved(pair: WorkerPool, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="the extra tools is not installed")
    expected, kinds = _adversaries(None, False)
    for (before, found), (after, _) in zip(
        pair.run(_adversaries, str(tmp_path), False, timeout_s=400), pair.run(_adversaries, str(tmp_path), True, timeout_s=400), strict=True
    ):
        assert [*before, *after] == pytest.approx(expected, rel=1e-5) and found == kinds and len(before) == 4
