"""Accelerate on a parallel module: `AutoparAccelerator` in the place of `Accelerator`, and the script stays as it was.

Accelerate's own Accelerator gives each process batches of its own, and wraps the model so that gradients are averaged over processes.
Under autopar every rank is called with the global batch, takes its own part, and the loss and gradients are the global ones. So this one
hands each process all of the data, gathers nothing, wraps nothing, and steps a scheduler once a step: what it prepares behaves as with
Accelerate on one process. is_main_process, print, wait_for_everyone and trackers know the real processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, broadcast_object_list, convert_outputs_to_fp32, find_batch_size, recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from autopar.checkpoint import load, save
from autopar.integrations.order import shuffled_alike
from autopar.run.deferred import started
from autopar.run.module import ParallelModule
from autopar.run.stand_in import StandIn

__all__ = ["AutoparAccelerator", "as_it_was", "one_process"]

_OWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class AutoparAccelerator(Accelerator):
    """An Accelerator for a model that autopar.compile has made. Arguments as of Accelerate's.

        accelerator = AutoparAccelerator(gradient_accumulation_steps=2)
        model = autopar.compile(model)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    The batch size of a DataLoader is that of the global batch. save_state and load_state write and read a checkpoint of autopar's, which
    does not depend on the plan. Raises ValueError for FSDP, DeepSpeed, Megatron-LM, TPUs and parallelism of Accelerate's own, and TypeError
    for a model that autopar has not compiled: two tools would divide the same model.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_alone(self)

    # ------------------------------------------------------------------------------------------- as if there were one process
    @property
    def num_processes(self) -> int:
        """1: the number of parts into which data is divided."""
        return 1

    @property
    def dispatch_batches(self) -> bool:
        """False: every process reads its batches itself."""
        return False

    @property
    def split_batches(self) -> bool:
        """False: a batch is what the DataLoader makes."""
        return False

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        """Every process is given all batches, shuffled in the same order."""
        if not self.use_seedable_sampler and self.state.num_processes > 1:
            drawn = shuffled_alike(getattr(data_loader, "sampler", None), lambda seed: broadcast_object_list([seed])[0])
            self._orders().extend([] if drawn is None else [drawn])
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if not (isinstance(prepared, DataLoaderShard) and isinstance(prepared.dataset, IterableDataset)):
            return prepared
        counting = _Counting.__new__(_Counting)
        counting.__dict__.update(prepared.__dict__)
        self._dataloaders[-1] = counting
        return counting

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that goes on by one at each step of the optimizer."""
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, AcceleratedScheduler):
            prepared.split_batches = True  # Accelerate's word for: the batch is not larger for there being more processes
        return prepared

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """The module itself, which is called under autocast where mixed_precision says so. A model in evaluation mode that autopar has not
        compiled, such as a frozen reference, is whole on every process. TypeError for another one."""
        if not isinstance(model, StandIn) and evaluation_mode:
            prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
            self._models.remove(prepared)  # it is no part of what is saved
            return prepared
        if not isinstance(model, StandIn):
            raise TypeError(
                f"AutoparAccelerator was given a {type(model).__name__} that autopar has not compiled: prepare what "
                f"autopar.compile(model, ...) returns. A model that is not trained needs no preparation, or evaluation_mode=True"
            )
        if model not in self._models:
            self._models.append(model)
        if self.native_amp and "forward" not in model.__dict__:
            model.__dict__["forward"] = _under_autocast(model.forward, self)
        return model

    def gather(self, tensor: Any) -> Any:
        """The same: every process has the whole."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same, without what the last batch has beyond the samples that are left. What has no samples stays."""
        state = self.gradient_state
        if not state.end_of_dataloader:
            return input_data
        left = state.remainder
        if isinstance(loader := state.active_dataloader, _Counting):
            left = loader.size or 0
        if left <= 0:
            return input_data
        return input_data[:left] if use_gather_object else recursively_apply(lambda t: t[:left] if t.dim() else t, input_data)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """The same: a call of the model is of all samples on every process."""
        yield inputs

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The same, scaled."""
        return tensor * scale if scale != 1.0 else tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """The same: shapes are those of the global batch on every process."""
        return tensor

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Nothing: processes have the same batches."""
        yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Nothing: gradients of several calls are added up as they are on one process."""
        yield

    # -------------------------------------------------------------------------------------------------------------- state
    def unwrap_model(self, model: Any, *options: Any, **named: Any) -> Any:
        """The model that was compiled. Its parameters are parts: `model.full_parameters()` makes them whole for a while. options: what
        this release of Accelerate takes."""
        if isinstance(model, StandIn):
            return model.original
        return super().unwrap_model(model, *options, **named)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Collective: the state_dict of the original, whole, on the CPU of rank 0; empty on other ranks, as with FSDP."""
        module = started(model) if isinstance(model, StandIn) else model
        if isinstance(module, ParallelModule):
            return module.full_state_dict(rank0_only=True)
        return self.unwrap_model(model).state_dict()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Collective: what was prepared, what was registered for checkpointing, and the generators of rank 0, to a folder. Returns it.
        Hooks for it are given the originals, whole, and their states. Raises as autopar.save."""
        folder = self._folder_to_write(output_dir)
        if hooks := [*self._save_model_state_pre_hook.values()]:
            if self.is_main_process:
                Path(folder).mkdir(parents=True, exist_ok=True)
            self.wait_for_everyone()
            with self._whole(write=False) as models:
                weights = [model.state_dict() for model in models]
                for hook in hooks:
                    hook(models, weights, folder)
            self.wait_for_everyone()
        save(
            folder, self._model(), self._plain_optimizers(), schedulers=[s.state_dict() for s in self._schedulers],
            registered=[o.state_dict() for o in self._custom_objects], generators=_generators(),
            scaler=self.scaler.state_dict() if self.scaler is not None else None,
            orders=[one.get_state() for one in self._orders()],
        )  # fmt: skip
        self.project_configuration.iteration += 1
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Collective: what `save_state` wrote, under this plan or another. Hooks for it are given the originals, whole: what they load is
        the model's. Raises as autopar.load, and ValueError where something else was prepared than was saved."""
        folder = self._folder_to_read(input_dir)
        extra = load(folder, self._model(), self._plain_optimizers())
        if hooks := [*self._load_model_state_pre_hook.values()]:
            with self._whole(write=True) as models:
                for hook in hooks:
                    hook(models, folder)
        for what, here in (("schedulers", self._schedulers), ("registered", self._custom_objects)):
            if len(extra[what]) != len(here):
                raise ValueError(f"the checkpoint has {len(extra[what])} {what} and {len(here)} are prepared here: prepare the same")
            for one, state in zip(here, extra[what], strict=True):
                one.load_state_dict(state)
        if self.scaler is not None and extra["scaler"] is not None:
            self.scaler.load_state_dict(extra["scaler"])
        _set_generators(extra["generators"])
        for one, state in zip(self._orders(), extra.get("orders", []), strict=False):
            one.set_state(state)

    def _orders(self) -> list[torch.Generator]:
        """What samplers of prepared loaders draw from, in the order in which these were prepared."""
        found: list[torch.Generator] = self.__dict__.setdefault("_autopar_orders", [])
        return found

    @contextlib.contextmanager
    def _whole(self, *, write: bool) -> Iterator[list[Any]]:
        """Collective: the originals of the models that are prepared, with whole parameters. write: rank 0's are the models' afterwards."""
        with contextlib.ExitStack() as whole:
            for model in self._models:
                module = started(model)
                whole.enter_context(as_it_was(getattr(model.original, "config", None)))
                if module is not None:
                    whole.enter_context(module.full_parameters(write=write))
            yield [model.original for model in self._models]

    def _model(self) -> StandIn:
        if len(self._models) != 1:
            raise ValueError(f"save_state and load_state are of one model; {len(self._models)} are prepared. Use autopar.save for each")
        return self._models[0]

    def _plain_optimizers(self) -> list[Optimizer]:
        return [getattr(one, "optimizer", one) for one in self._optimizers]

    def _folder_to_write(self, given: str | None) -> str:
        """The given one, or the next of the project's; the oldest of these are removed."""
        if not self.project_configuration.automatic_checkpoint_naming:
            return self._given(given)
        above = Path(self.project_dir, "checkpoints")
        limit = self.project_configuration.total_limit
        folder = above / f"checkpoint_{self.save_iteration}"
        if self.is_main_process:
            for old in _numbered(above)[: -(limit - 1) or None] if limit is not None else ():
                shutil.rmtree(old)
            above.mkdir(parents=True, exist_ok=True)
        is_there = folder.exists()
        self.wait_for_everyone()
        if is_there:
            raise ValueError(f"{folder} is there already: set the project_configuration's iteration to the number to begin with")
        return str(folder)

    def _folder_to_read(self, given: str | None) -> str:
        """The given one, or the last of the project's."""
        if given is not None or not self.project_configuration.automatic_checkpoint_naming:
            return self._given(given)
        above = Path(self.project_dir, "checkpoints")
        if not (found := _numbered(above)):
            raise ValueError(f"there is no checkpoint in {above}")
        return str(found[-1])

    def _given(self, folder: str | None) -> str:
        if folder is None:
            raise ValueError(
                "AutoparAccelerator needs the folder of a checkpoint: save_state(folder), load_state(folder); or "
                "ProjectConfiguration(project_dir, automatic_checkpoint_naming=True)"
            )
        return os.fspath(folder)


@contextlib.contextmanager
def as_it_was(config: Any) -> Iterator[None]:
    """config: a model's, or None: as before afterwards. Saving writes the dtype and the like to it, and processes whose models differ would
    capture theirs anew."""
    before = dict(vars(config)) if config is not None else {}
    yield
    if config is not None:
        vars(config).clear()
        vars(config).update(before)


def _numbered(above: Path) -> list[Path]:
    """The checkpoints in a folder, in order."""
    found = [path for path in above.glob("checkpoint_*") if path.name.removeprefix("checkpoint_").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint_")))


class _Counting(DataLoaderShard):
    """Of a dataset without a length. size: samples of the batch that was given last."""

    size: int | None = None

    def __iter__(self) -> Iterator[Any]:
        for given in super().__iter__():
            self.size = find_batch_size(given)
            yield given


def one_process(accelerator: Any) -> AutoparAccelerator:
    """`accelerator`, which another tool made, as an AutoparAccelerator: the same object. Raises ValueError as that."""
    _check_alone(accelerator)
    accelerator.__class__ = AutoparAccelerator
    return accelerator


def _check_alone(accelerator: Any) -> None:
    state = accelerator.state
    if accelerator.distributed_type not in _OWN or getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            f"Accelerate is configured for {accelerator.distributed_type.value.lower()}, and autopar divides the model itself. Run "
            f"`accelerate launch --multi_gpu` (or torchrun) with a plain configuration, without FSDP, DeepSpeed and parallelism_config, "
            f"and say to autopar.compile what is decided already (pins=...)"
        )
    if state.dynamo_plugin.backend.value.lower() != "no":
        raise ValueError("Accelerate is configured for torch.compile: give autopar.compile(model, compile_stages=True) instead")


def _under_autocast(forward: Callable[..., Any], accelerator: Any) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return forward(*args, **kwargs)

    functools.update_wrapper(called, forward)
    return convert_outputs_to_fp32(called)


def _generators() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(), "numpy": [kind, keys, position, has_gauss, cached], "python": [version, list(numbers), gauss],
    }  # fmt: skip
    return found


def _set_generators(found: dict[str, Any]) -> None:
    state: Tensor = found["torch"]
    torch.set_rng_state(state.cpu())
    np.random.set_state(tuple(found["numpy"]))
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))
