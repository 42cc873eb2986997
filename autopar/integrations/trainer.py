"""Hugging Face's Trainer on a parallel module: `AutoparTrainer` in the place of `Trainer`, `AutoparSeq2SeqTrainer` in that of
`Seq2SeqTrainer`, under torchrun.

The Trainer goes on as it does on one process: each process reads the global batch, and the model takes its part of it. What it logs, the
norm of gradients that it clips, evaluation and schedules are those of one process with the whole batch, up to rounding.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Trainer

from autopar.checkpoint import load, save
from autopar.errors import CheckpointError
from autopar.generation import generate
from autopar.integrations.accelerate import AutoparAccelerator, as_it_was, one_process
from autopar.parallel import compile as parallel
from autopar.run.deferred import DeferredModule, started, world_size
from autopar.run.module import ParallelModule
from autopar.run.stand_in import StandIn
from autopar.run.together import done_by_all

__all__ = ["AutoparSeq2SeqTrainer", "AutoparTrainer"]

FOLDER = "autopar"  # of a checkpoint of the Trainer's: the parts of parameters and optimizer states


class AutoparTrainer(Trainer):
    """A Trainer that trains its model in parallel as autopar plans it.

        trainer = AutoparTrainer(model, args, train_dataset=..., compile_options={"pins": {"tp": 2}})
        trainer.train()

    Started by torchrun, with all other arguments as of `Trainer`. compile_options: arguments of autopar.compile. As everywhere in
    Hugging Face, the global batch is per_device_train_batch_size times the number of processes, whatever the plan, and so it is in
    evaluation. The plan is made on the first batch.

    A checkpoint has what the Trainer writes, with `model.safetensors` for `from_pretrained`, and a folder `autopar` with parameters and
    optimizer states in parts, from which training is resumed under any plan and number of processes. A checkpoint of the plain Trainer is
    resumed as well.

    outputs='all' among the options is set where compute_metrics is given, and by a `predict` before training: the logits are then whole on
    every process.
    `trainer.model` is the original; what autopar made of it is `trainer.model_wrapped`. Raises ValueError for arguments by which something
    else would divide, trace or recompute the model, with the remedy.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *more: Any, compile_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._compile_options = dict(compile_options or {})
        self._compiled: ParallelModule | DeferredModule | None = None
        generates = bool(getattr(args, "predict_with_generate", False))
        if generates and not isinstance(self, Seq2SeqTrainer):
            raise ValueError(
                "TrainingArguments(predict_with_generate=True) is for a trainer that generates: use AutoparSeq2SeqTrainer, which takes the "
                "same arguments, in the place of AutoparTrainer"
            )
        if more:
            super().__init__(model, _of_global_batches(args), *more, **options)
        else:  # a trainer of trl, mixed in, has another second argument
            super().__init__(model, args=_of_global_batches(args), **options)
        if self.compute_metrics is not None and not generates:  # else they are given what is generated
            self._compile_options.setdefault("outputs", "all")

    # ------------------------------------------------------------------------------------------------------------- training
    def create_accelerator_and_postprocess(self) -> None:
        """Collects and divides nothing: every process has all of the data."""
        super().create_accelerator_and_postprocess()
        self.accelerator: AutoparAccelerator = one_process(self.accelerator)
        by_object = bool(getattr(self.args, "eval_use_gather_object", False))
        self.gather_function = functools.partial(self.accelerator.gather_for_metrics, use_gather_object=by_object)

    def store_flos(self) -> None:
        """Those of one process: each counts the global batch."""
        self.state.total_flos += self.current_flos  # type: ignore[has-type]
        self.current_flos = 0

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of one step of the optimizer."""
        return int(self._train_batch_size) * int(args.gradient_accumulation_steps)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: each process is given its part of the model when it is compiled."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None) -> nn.Module:
        """The parallel module."""
        if self._compiled is None or self._compiled.original is not self.model:
            self._compiled = parallel(self.model, **self._compile_options)
        return self.accelerator.prepare_model(self._compiled)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. For samples with labels it needs outputs='all', which is set if the model is not compiled yet; where it was
        compiled to return its loss alone the original makes them, with a warning."""
        if self._compiled is None:
            self._compile_options.setdefault("outputs", "all")
        return super().predict(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None, **more: Any
    ) -> tuple[Any, Any, Any]:
        """As the Trainer's; where only the loss is wanted no other output is asked for. What does not fit the plan is computed with
        whole parameters, with a warning."""
        labelled = len(self.label_names) > 0 and all(inputs.get(name) is not None for name in self.label_names)
        module = self._started()
        own_loss = self.label_smoother is None and self.compute_loss_func is None and type(self).compute_loss is Trainer.compute_loss
        asks_for_all = labelled and own_loss and not prediction_loss_only
        if module is not None and asks_for_all and self._compile_options.get("outputs", "loss") == "loss":
            warnings.warn(
                "predictions for samples with labels are made by the original, with whole parameters on every process: with "
                "AutoparTrainer(..., compile_options={'outputs': 'all'}) they are made as planned",
                stacklevel=2,
            )
            with module.full_parameters(write=False):
                return super().prediction_step(self.model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **more)
        with module.by_the_original_where_unplanned() if module is not None else contextlib.nullcontext():
            other = self.label_smoother is not None or self.compute_loss_func is not None or _has_its_own(self, "prediction_step")
            if not prediction_loss_only or not labelled or other:
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **more)
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                counts = getattr(self, "_get_num_items_in_batch", None)  # which not every release of transformers gives in evaluation
                given = {} if counts is None else {"num_items_in_batch": counts([inputs], self.args.device)}
                loss = self.compute_loss(model, inputs, **given)
            return loss.detach().mean(), None, None

    # ---------------------------------------------------------------------------------------------------------- checkpoints
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Collective: whole tensors for `from_pretrained`, which process 0 gathers one by one and writes."""
        module = self._started()
        if module is not None and _has_its_own(self, "_save"):  # which may not take the state that it is given
            with module.full_parameters(write=False):
                done_by_all(lambda: self._write(output_dir, None), same=lambda _: "", what="save_model")
        else:
            self._write(output_dir, module.full_state_dict(rank0_only=True) if module is not None else None)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write(self, output_dir: str | None, state: Any) -> None:
        if self.args.should_save:
            with as_it_was(getattr(self.model, "config", None)):
                self._save(output_dir or self.args.output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)
        save(Path(output_dir, FOLDER), self._standing(), self._plain_optimizer(), scheduler=self.lr_scheduler.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, FOLDER).is_dir():
            with _alone(self.args):  # which is read to the CPU, not to one of many devices
                super()._load_optimizer_and_scheduler(checkpoint)
            return
        extra = load(Path(checkpoint, FOLDER), self._standing(), self._plain_optimizer())
        self.lr_scheduler.load_state_dict(extra["scheduler"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Parameters in parts are read together with the optimizer's states, when there is one."""
        if not Path(resume_from_checkpoint, FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint, FOLDER)
        if folder.is_dir():
            load(folder, self._standing())
        else:
            super()._load_best_model()

    def _save_rng_state(self, output_dir: str) -> None:
        """Of process 0: processes draw alike, and their number may be another next time."""
        if self.args.should_save:
            with _alone(self.args):
                super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _alone(self.args):
            super()._load_rng_state(checkpoint)

    def _standing(self) -> StandIn:
        if self._compiled is None:
            raise CheckpointError("there is nothing to save or load yet: the model is compiled when training begins")
        return self._compiled

    def _started(self) -> ParallelModule | None:
        return None if self._compiled is None else started(self._compiled)

    def _plain_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)


class AutoparSeq2SeqTrainer(AutoparTrainer, Seq2SeqTrainer):
    """An AutoparTrainer that generates in evaluation and prediction, as Seq2SeqTrainer does: `predict_with_generate=True` in
    Seq2SeqTrainingArguments. Every process generates for the whole batch, with whole parameters while it does (`autopar.generate`). Its
    arguments and ValueError are those of AutoparTrainer."""

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None, **more: Any
    ) -> tuple[Any, Any, Any]:
        """As the Seq2SeqTrainer's. more: arguments of generate."""
        module, original = self._started(), self.model
        if module is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **more)

        def whole(*args: Any, **kwargs: Any) -> Any:
            del original.__dict__["generate"]
            return generate(module, *args, **kwargs)

        original.__dict__["generate"] = whole  # which the Seq2SeqTrainer calls once, on the model that it was given
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **more)
        finally:
            original.__dict__.pop("generate", None)


def _has_its_own(trainer: AutoparTrainer, method: str) -> bool:
    """Whether a trainer that is mixed in, as one of trl's, has another method than transformers' trainers."""
    kinds = type(trainer).__mro__
    behind = kinds[kinds.index(AutoparTrainer) + 1 :]
    return next(kind for kind in behind if method in vars(kind)) not in (Trainer, Seq2SeqTrainer)


@contextlib.contextmanager
def _alone(args: Any) -> Iterator[None]:
    """Inside, the arguments tell of one process."""
    kind = type(args)
    args.__class__ = type(kind.__name__, (kind,), {"world_size": 1})
    try:
        yield
    finally:
        args.__class__ = kind


def _of_global_batches(args: Any) -> Any:
    """The arguments, with the batch sizes of all processes together. Raises ValueError for what cannot be followed."""
    if args is None:
        raise ValueError("AutoparTrainer needs args: give it TrainingArguments(output_dir, ...)")
    refused = {
        "fsdp": ("divides the model", "drop it: autopar plans sharding (compile_options={'pins': {'zero': 3}})"),
        "deepspeed": ("divides the model", "drop it: autopar plans sharding (compile_options={'pins': {'zero': 3}})"),
        "parallelism_config": ("divides the model", "drop it, and pin dp, tp, pp in compile_options"),
        "torch_compile": ("traces the model", "give compile_options={'compile_stages': True}"),
        "activation_checkpointing": ("recomputes", "drop it: autopar plans recompute (compile_options={'pins': {'recompute': 'full'}})"),
        "gradient_checkpointing": ("recomputes", "drop it: autopar plans recompute (compile_options={'pins': {'recompute': 'full'}})"),
        "auto_find_batch_size": ("changes the batch when one process is out of memory", "give compile_options={'memory': ...}"),
    }
    for name, (does, remedy) in refused.items():
        if getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}=...) {does}, which AutoparTrainer cannot follow; {remedy}")
    if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' gives each process samples of its own; AutoparTrainer gives every process the "
            "global batch. Use another strategy"
        )
    if args.n_gpu > 1:
        raise ValueError(f"one process sees {args.n_gpu} GPUs: start one for each, torchrun --nproc-per-node {args.n_gpu} SCRIPT")
    found = copy.copy(args)
    found.per_device_train_batch_size = args.per_device_train_batch_size * world_size()
    found.per_device_eval_batch_size = args.per_device_eval_batch_size * world_size()
    return found
