"""Programs of the tools that people train with. Each imports its tool when it runs; without it the program fails on one process, too."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._traps_kit import BATCH, Compile, InDict, Net, Results, batch, program, seeded, state, trained
from benchmarks.trap_programs.training import folder_of_all

KIND = "tools"


def options_of(compile: Compile) -> dict[str, Any] | None:
    """The arguments by which autopar.compile is called; None on one process."""
    return dict(compile.keywords) if isinstance(compile, functools.partial) else None


@program(KIND)
def adapters_of_peft(compile: Compile) -> Results:
    """LoRA by peft: a frozen model with trained low-rank additions; the adapter's own state afterwards."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], init_lora_weights=False, lora_dropout=0.0)
    adapted: Any = get_peft_model(Net(), config)  # type: ignore[arg-type]
    model = compile(adapted, example_inputs=batch())
    results = trained(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    return {**results, "adapter": dict(get_peft_model_state_dict(adapted, state_dict=state(model)))}


class Words(InDict):
    """As Hugging Face's models are called: inputs by name, labels among them, the loss and logits in a dict."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(x, labels)


@program(KIND)
def trainer_of_hugging_face(compile: Compile) -> Results:
    """Accumulation, clipping, a schedule, evaluation with a metric, a checkpoint in the middle and a second run that resumes from it."""
    from transformers import Trainer, TrainingArguments

    from autopar.integrations.trainer import AutoparTrainer

    options = options_of(compile)
    processes = 1 if options is None else options["gpus"]
    data = [{"x": x, "labels": y} for x, y in zip(*batch(1, size=64), strict=True)]
    folder = str(folder_of_all("trainer"))

    def training(**more: Any) -> Any:
        args = TrainingArguments(
            output_dir=folder, max_steps=4, per_device_train_batch_size=8 // processes, gradient_accumulation_steps=2,
            per_device_eval_batch_size=16 // processes, max_grad_norm=0.1, learning_rate=1e-2, warmup_steps=1, logging_steps=1,
            eval_strategy="steps", eval_steps=2, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, **more,
        )  # fmt: skip
        kind = Trainer if options is None else functools.partial(AutoparTrainer, compile_options=options)
        return kind(
            seeded(Words), args, train_dataset=data, eval_dataset=data[:32],
            compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        )  # fmt: skip

    def told(trainer: Any) -> list[dict[str, float]]:
        kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
        return [{k: float(entry[k]) for k in kept if k in entry} for entry in trainer.state.log_history]

    first = training()
    first.train()
    again = training()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    models = [trainer.model if options is None else trainer.model_wrapped for trainer in (first, again)]
    return {"log": told(first), "resumed": told(again), "states": [state(model) for model in models]}


class Preferences(Net):
    """Scores of two samples each [batch, 2, 8]."""

    def forward(self, pairs: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"scores": self.logits(pairs.flatten(0, 1)).mean(-1).view(len(pairs), 2)}


@program(KIND)
def trainer_of_preferences(compile: Compile) -> Results:
    """A subclass of the Trainer with a second argument of its own, a frozen reference that it prepares for evaluation, and a loss of what
    the model returns, as trl's trainers have: mixed with autopar's."""
    from transformers import Trainer, TrainingArguments

    from autopar.integrations.trainer import AutoparTrainer

    class ByPreference(Trainer):
        def __init__(self, model: Any, reference: Any = None, args: Any = None, **options: Any) -> None:
            super().__init__(model=model, args=args, **options)
            self.reference = self.accelerator.prepare_model(reference.requires_grad_(False), evaluation_mode=True)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            found = model(**inputs)["scores"]
            with torch.no_grad():
                reference = self.reference(**inputs)["scores"]
            margin = (found - reference) @ torch.tensor([1.0, -1.0], dtype=found.dtype)
            loss = -torch.nn.functional.logsigmoid(margin).mean()
            return (loss, {"scores": found}) if return_outputs else loss

    class InParallel(AutoparTrainer, ByPreference):
        pass

    options = options_of(compile)
    processes = 1 if options is None else options["gpus"]
    x = batch(1, size=4 * BATCH)[0]
    args = TrainingArguments(
        output_dir=str(folder_of_all("preferences")), max_steps=4, per_device_train_batch_size=BATCH // processes, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    data = [{"pairs": pair} for pair in x.view(-1, 2, x.shape[-1]).repeat(2, 1, 1)]
    more = {} if options is None else {"compile_options": {**options, "outputs": "trained"}}
    trainer = (ByPreference if options is None else InParallel)(
        model=seeded(Preferences), reference=seeded(Preferences), args=args, train_dataset=data, **more
    )
    trainer.train()
    log = [{k: float(entry[k]) for k in ("loss", "grad_norm") if k in entry} for entry in trainer.state.log_history]
    return {"log": log, "state": state(trainer.model if options is None else trainer.model_wrapped)}


@program(KIND)
def accelerated(compile: Compile) -> Results:
    """Accelerate: what is prepared, accumulation, clipping, metrics of a short last batch, and a checkpoint."""
    from accelerate import Accelerator

    from autopar.integrations.accelerate import AutoparAccelerator

    kind = Accelerator if options_of(compile) is None else AutoparAccelerator
    accelerator = kind(gradient_accumulation_steps=2, cpu=True)
    folder = str(folder_of_all("accelerated"))
    loader = DataLoader(TensorDataset(*batch(1, size=4 * BATCH)), batch_size=BATCH)
    short = DataLoader(TensorDataset(*batch(2, size=BATCH + 6)), batch_size=BATCH)
    trained_one = model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, loader, schedule, short = accelerator.prepare(model, optimizer, loader, schedule, short)

    def epoch() -> list[float]:
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        return losses

    losses = epoch()
    accelerator.save_state(folder)
    rate = optimizer.param_groups[0]["lr"]
    before = epoch()
    accelerator.load_state(folder)
    after = epoch()
    with torch.no_grad():
        labels = [accelerator.gather_for_metrics(y) for x, y in short if model(x, y).item() > 0]
    return {"losses": losses, "rate": rate, "before": before, "after": after, "labels": torch.cat(labels), "state": state(trained_one)}


@program(KIND, plans=("one2",))
def lightning_trainer(compile: Compile) -> Results:
    """Lightning: accumulation, clipping, a schedule, validation, a checkpoint, and a second fit that goes on from it."""
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from autopar.integrations.lightning import AutoparStrategy

    options = options_of(compile)

    class Training(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(Net)
            self.seen: list[float] = []

        def training_step(self, given: Any, index: int) -> Any:
            loss = self.net(*given)
            self.seen.append(loss.item())
            return loss

        def validation_step(self, given: Any, index: int) -> None:
            x, y = given
            self.log("val", self.net(x, y))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}

    def fit(epochs: int, path: str | None = None) -> tuple[Any, Any]:
        more = {"gpus": options["gpus"], "cluster": "cpu", "pins": options["pins"]} if options is not None else {}
        strategy: Any = "auto" if options is None else AutoparStrategy("net", **more)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1 if options is None else options["gpus"], strategy=strategy, max_epochs=epochs, logger=False,
            plugins=[] if options is None else [TorchElasticEnvironment()],
            gradient_clip_val=0.1, accumulate_grad_batches=2, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, num_sanity_val_steps=1,
        )  # fmt: skip
        module = Training()
        loaders = [DataLoader(TensorDataset(*batch(k, size=2 * BATCH)), batch_size=BATCH) for k in (1, 2)]
        trainer.fit(module, *loaders, ckpt_path=path)
        return trainer, module

    folder = str(folder_of_all("lightning") / "last.ckpt")
    trainer, module = fit(1)
    trainer.save_checkpoint(folder)
    again, resumed = fit(3, folder)
    values = [float(t.callback_metrics["val"]) for t in (trainer, again)]
    return {"losses": module.seen, "resumed": resumed.seen, "values": values, "state": state(resumed.net)}
