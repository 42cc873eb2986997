"""Lightning on a parallel module: Trainer(strategy=AutoparStrategy("model")).

The LightningModule keeps its submodule, which autopar has compiled, and everything goes on as with Lightning on one device: each process
is given every batch (the batch size of a DataLoader is that of the global batch), and losses, metrics and gradients are the global ones on
every process. What of the LightningModule is not in that submodule is whole on every process, and the same.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from safetensors.torch import load_file
from torch import Tensor, nn

from autopar.checkpoint import load, save
from autopar.checkpoint.exchange import export_model
from autopar.errors import CheckpointError
from autopar.integrations.order import shuffled_alike
from autopar.parallel import compile as parallel
from autopar.run.stand_in import StandIn

__all__ = ["AutoparStrategy", "consolidate"]

FOLDER, REST = "autopar", "rest.ckpt"  # of a checkpoint: what is in parts, and what Lightning keeps beside it
SUBMODULE = "autopar_submodule"  # in the latter, the name of what was compiled


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str], *, weights_only: bool = True) -> None:
    """Write the model of a checkpoint folder of AutoparStrategy, and what Lightning keeps beside it (hyperparameters, loops, callbacks), as
    one file, which `LightningModule.load_from_checkpoint` reads; optimizer states stay in the folder. Needs memory for the whole model.

    weights_only: as of torch.load, by which what Lightning wrote is read; False lets it run code. Raises CheckpointError where the folder
    is no such checkpoint.
    """
    source, target = Path(folder), Path(file)
    if not (source / FOLDER).is_dir() or not (source / REST).is_file():
        raise CheckpointError(f"{source} is no checkpoint of AutoparStrategy, which is a folder with {FOLDER} and {REST}")
    try:
        found: dict[str, Any] = torch.load(source / REST, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source / REST} holds objects that run code when they are read: consolidate(..., weights_only=False) if you trust it"
        ) from error
    prefix = found.pop(SUBMODULE, "model")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
        export_model(source / FOLDER, whole := Path(beside, "model.safetensors"))
        found["state_dict"] = {**found["state_dict"], **{f"{prefix}.{name}": x for name, x in load_file(whole).items()}}
        torch.save(found, part := Path(beside, target.name))
        part.replace(target)


def _put_back(optimizer: Any, part: Any) -> None:
    """What was loaded for some of an optimizer's parameters is its own."""
    optimizer.state.update(part.state)
    for group, found in zip(optimizer.param_groups, part.param_groups, strict=True):
        if found["params"]:
            group.update((name, value) for name, value in found.items() if name != "params")


class AutoparStrategy(DDPStrategy):
    """Trains one submodule of a LightningModule in parallel as autopar plans it.

        trainer = Trainer(accelerator="gpu", devices=8, strategy=AutoparStrategy("model", pins={"tp": 2}))

    module: the name of the submodule (an attribute, or a path with dots) that training_step calls; it returns its loss, or what the loss is
    made of. The other arguments are those of autopar.compile, which plans it on the first batch; timeout, process_group_backend,
    start_method and checkpoint_io are those of DDPStrategy. A submodule that the LightningModule has compiled itself is taken as it is.

    A checkpoint is a folder: parameters and optimizer states of the submodule in parts, for any plan and number of processes, and what
    Lightning keeps beside; `consolidate` makes one file of it. Checkpoints of Lightning's own are loaded as well. Metrics of torchmetrics
    are not added up over processes, each of which has all samples. Raises AttributeError if there is no such submodule; the rest as
    autopar.compile.
    """

    strategy_name = "autopar"
    model: Any  # as in DDPStrategy

    def __init__(
        self, module: str = "model", *, timeout: Any = None, process_group_backend: str | None = None, start_method: Any = "popen",
        checkpoint_io: Any = None, **compile_options: Any,
    ) -> None:  # fmt: skip
        options = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            process_group_backend=process_group_backend, start_method=start_method, checkpoint_io=checkpoint_io, **options
        )  # fmt: skip
        self._name, self._compile_options = module, compile_options
        self._folder: Path | None = None  # of the checkpoint that is being loaded

    # ------------------------------------------------------------------------------------------------------------------ set up
    def setup(self, trainer: Any) -> None:
        """The submodule is compiled; optimizers are made of its parameters."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # every process is given every batch
        self.model = self.precision_plugin.convert_module(self.model)
        self._compile()
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _compile(self) -> None:
        root = self._root
        try:
            module = root.get_submodule(self._name)
        except AttributeError as error:
            raise AttributeError(
                f"{type(root).__name__} has no submodule {self._name!r} for AutoparStrategy to compile; it has: "
                f"{', '.join(name for name, _ in root.named_children())}"
            ) from error
        if not isinstance(module, StandIn):
            path, _, name = self._name.rpartition(".")
            setattr(root.get_submodule(path), name, parallel(module, **self._compile_options))

    @property
    def _root(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _parallel(self) -> StandIn:
        module = self._root.get_submodule(self._name)
        assert isinstance(module, StandIn)
        return module

    def _others(self) -> Iterable[nn.Module]:
        """The modules that are not in the submodule."""
        inside = {id(m) for m in self._parallel.modules()}
        return (m for m in self._root.modules() if id(m) not in inside)

    def model_to_device(self) -> None:
        """What is not compiled: to the device, with the values of process 0."""
        for module in self._others():
            for tensors in (module._parameters, module._buffers):
                for tensor in filter(None.__ne__, tensors.values()):
                    assert tensor is not None
                    tensor.data = tensor.data.to(self.root_device)
                    if dist.is_initialized():
                        dist.broadcast(tensor.data, src=0)
            if hasattr(module, "sync_on_compute") and hasattr(module, "_to_sync"):  # of torchmetrics
                module.sync_on_compute = module._to_sync = module.dist_sync_on_step = False  # type: ignore[assignment]
                module.to(self.root_device)

    def teardown(self) -> None:
        """The model stays where it is: parts on their devices."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ----------------------------------------------------------------------------------------- every process has all samples
    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All samples."""
        return {"num_replicas": 1, "rank": 0}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Shuffled in the same order on every process."""
        shuffled_alike(getattr(dataloader, "sampler", None), self.broadcast)
        return dataloader

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The same: values are global ones."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The same: every process has the whole."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Of the real processes: whether all of them, or any, say so."""
        if not dist.is_initialized():
            return decision
        counted = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(counted)
        return int(counted) == dist.get_world_size() if all else int(counted) > 0

    # -------------------------------------------------------------------------------------------------------------- checkpoints
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: into the parallel module."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What is not in the submodule."""
        prefix = f"{self._name}."
        others = {id(t): t for m in self._others() for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
        whole: dict[str, Tensor] = {**dict(self._root.named_parameters()), **dict(self._root.named_buffers())}
        return {name: t.detach() for name, t in whole.items() if not name.startswith(prefix) and id(t) in others}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Of parameters that are not in the submodule; of those that are it is saved in parts."""
        outside = self._part_of(getattr(optimizer, "_optimizer", optimizer), inside=False)
        return {} if outside is None else outside.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Collective: to the folder `filepath`; a file of that name, which Lightning wrote by itself, is there until it is done, as
        `filepath`.before. Raises CheckpointError."""
        folder = Path(filepath)
        before = folder.with_name(f"{folder.name}.before")
        if self.is_global_zero:
            if folder.is_file():
                folder.replace(before)
            folder.mkdir(parents=True, exist_ok=True)
        self.barrier()
        save(folder / FOLDER, self._parallel, list(self._of_the_submodule().values()))
        if self.is_global_zero:
            checkpoint[SUBMODULE] = self._name
            self.checkpoint_io.save_checkpoint(checkpoint, folder / REST, storage_options=storage_options)
            before.unlink(missing_ok=True)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, *options: Any, **named: Any) -> dict[str, Any]:
        """What Lightning keeps; the parts are read when they are asked for. options: what this release of Lightning gives. Raises
        CheckpointError then."""
        folder = Path(os.fspath(checkpoint_path))
        self._folder = folder / FOLDER if (folder / FOLDER).is_dir() else None
        path = folder / REST if self._folder is not None else checkpoint_path
        found: dict[str, Any] = super().load_checkpoint(path, *options, **named)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Collective."""
        if self._folder is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        load(self._folder, self._parallel)
        named: dict[str, Tensor] = {**dict(self._root.named_parameters()), **dict(self._root.named_buffers())}
        with torch.no_grad():
            for name, value in checkpoint["state_dict"].items():
                named[name].copy_(value)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective."""
        if self._folder is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        inside = self._of_the_submodule()
        load(self._folder, self._parallel, list(inside.values()))
        for optimizer, part in inside.items():
            _put_back(optimizer, part)
        for optimizer, state in zip(self._plain_optimizers(), checkpoint["optimizer_states"], strict=True):
            if state and (outside := self._part_of(optimizer, inside=False)) is not None:
                outside.load_state_dict(state)
                _put_back(optimizer, outside)

    def _of_the_submodule(self) -> dict[Any, Any]:
        """The optimizers that step on parameters in the submodule -> the same of these alone."""
        parts = {optimizer: self._part_of(optimizer, inside=True) for optimizer in self._plain_optimizers()}
        return {optimizer: part for optimizer, part in parts.items() if part is not None}

    def _part_of(self, optimizer: Any, *, inside: bool) -> Any:
        """An optimizer as one of its parameters that are in the submodule, or of the others; None if there are none."""
        own = set(map(id, self._parallel.parameters()))
        part = copy.copy(optimizer)
        part.param_groups = [{**group, "params": [p for p in group["params"] if (id(p) in own) is inside]} for group in part.param_groups]
        params = [p for group in part.param_groups for p in group["params"]]
        part.state = defaultdict(dict, {p: optimizer.state[p] for p in params if p in optimizer.state})
        return part if params else None

    def _plain_optimizers(self) -> list[Any]:
        return [getattr(one, "_optimizer", one) for one in self.optimizers]
