"""Hugging Face's Trainer under four plans beside the plain Trainer on one process: logs, evaluation, checkpoints, resumption."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="the extra tools is not installed")

from torch.utils.data import IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from autopar.integrations.trainer import AutoparSeq2SeqTrainer, AutoparTrainer
from autopar.run import WorkerPool

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]  # of transformers

PLANS: dict[str, dict[str, Any]] = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "zero3": {"dp": 2, "zero": 3}}
LENGTH, WORDS = 8, 32
Data = list[dict[str, torch.Tensor]]


def data(size: int, seed: int) -> Data:
    """Sequences with labels of which some are ignored, more of them in some samples than in others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (size, LENGTH), generator=generator)
    ignored = torch.rand(size, LENGTH, generator=generator) < torch.linspace(0, 0.6, size)[:, None]
    return [{"input_ids": i, "labels": label} for i, label in zip(ids, ids.masked_fill(ignored, -100), strict=True)]


def model(dtype: torch.dtype = torch.float64) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).to(dtype)


def accuracy(found: Any) -> dict[str, float]:
    assert found.predictions.shape == (10, LENGTH, WORDS)  # of all samples, once
    return {"accuracy": float((np.argmax(found.predictions, -1) == found.label_ids).mean()), "logit": float(found.predictions[9, -1, -1])}


def trained(
    folder: str, pins: dict[str, Any] | None, *, resume: str | None = None, compare: bool = True, dtype: torch.dtype = torch.float64,
    evaluated: int = 10, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train six steps of two batches each. pins: of AutoparTrainer on two processes; None: the plain Trainer on one."""
    each = 4 if pins is None else 2
    args = TrainingArguments(
        output_dir=folder, max_steps=6, per_device_train_batch_size=each, per_device_eval_batch_size=each, gradient_accumulation_steps=2,
        learning_rate=1e-2, warmup_steps=2, max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=3,
        use_cpu=True, report_to=[], disable_tqdm=True, adam_epsilon=1e-4, **more,
    )  # fmt: skip
    kind = Trainer if pins is None else functools.partial(AutoparTrainer, compile_options={"pins": pins, "cluster": "cpu"})
    metrics = accuracy if compare else None
    trainer = kind(model(dtype), args, train_dataset=data(36, 1), eval_dataset=data(evaluated, 2), compute_metrics=metrics)
    trainer.train(resume_from_checkpoint=resume)
    timed = ("runtime", "per_second", "preparation", "total_flos")
    log = [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in trainer.state.log_history]
    state = trainer.model_wrapped.full_state_dict() if pins is not None else trainer.model.state_dict()
    return {"log": log, "state": {name: t.clone() for name, t in state.items()}, "flos": trainer.state.total_flos}


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, after: int = 0) -> None:
    theirs = [entry for entry in expected["log"] if entry["step"] > after and "train_loss" not in entry]
    ours = [entry for entry in found["log"] if entry["step"] > after and "train_loss" not in entry]
    assert len(theirs) >= 3
    assert len(ours) == len(theirs)
    for mine, entry in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(entry, rel=2e-6), entry  # the Trainer keeps sums of losses in float32
    for name, tensor in expected["state"].items():
        torch.testing.assert_close(found["state"][name], tensor, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2, backend="gloo") as pool:
        yield pool


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stock")
    return {**trained(str(folder), None), "folder": folder}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.mark.parametrize("plan", PLANS)
def test_the_loss_curve_is_that_of_one_process(pair: WorkerPool, stock: dict[str, Any], folders: Path, plan: str) -> None:
    for found in pair.run(trained, str(folders / plan), PLANS[plan], timeout_s=300):
        assert_same(found, stock)
        assert found["log"][-1]["train_loss"] == pytest.approx(stock["log"][-1]["train_loss"], rel=2e-6)
        assert found["flos"] == stock["flos"] > 0
    loaded = GPT2LMHeadModel.from_pretrained(folders / plan / "checkpoint-6", dtype=torch.float64).state_dict()
    for name, tensor in stock["state"].items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-9, atol=1e-9)


def resumed(folder: str, pins: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    return trained(folder, pins, resume=checkpoint)


def test_a_checkpoint_is_resumed_under_another_plan_and_so_is_one_of_the_plain_trainer(
    pair: WorkerPool, stock: dict[str, Any], folders: Path
) -> None:
    if not (folders / "zero3" / "checkpoint-3").exists():
        pair.run(trained, str(folders / "zero3"), PLANS["zero3"], timeout_s=500)
    for plan, checkpoint in (("tp2", folders / "zero3" / "checkpoint-3"), ("pp2", stock["folder"] / "checkpoint-3")):
        for found in pair.run(resumed, str(folders / f"{plan}-resumed"), PLANS[plan], str(checkpoint), timeout_s=500):
            assert_same(found, stock, after=3)


def smoothed(folder: str, pins: dict[str, Any] | None) -> dict[str, Any]:
    """Label smoothing, whose loss the Trainer makes of the logits; and evaluation before the first step, with a last batch of one."""
    return trained(folder, pins, compare=False, label_smoothing_factor=0.1, eval_on_start=True, evaluated=9)


def test_a_loss_outside_of_the_model_and_evaluation_before_training(pair: WorkerPool, tmp_path: Path) -> None:
    expected = smoothed(str(tmp_path / "stock"), None)
    for found in pair.run(smoothed, str(tmp_path / "tp2"), PLANS["tp2"], timeout_s=500):
        assert_same(found, expected)


def evaluated(folder: str) -> float:
    """The loss of samples of which the Trainer counts no labels, as in other releases of transformers."""
    kept = Trainer._get_num_items_in_batch
    args = TrainingArguments(output_dir=folder, per_device_eval_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = AutoparTrainer(model(), args, eval_dataset=data(8, 2), compile_options={"pins": PLANS["dp2"], "cluster": "cpu"})
    del Trainer._get_num_items_in_batch
    try:
        return float(trainer.evaluate()["eval_loss"])
    finally:
        Trainer._get_num_items_in_batch = kept


def test_evaluation_where_the_trainer_counts_no_labels(pair: WorkerPool, tmp_path: Path) -> None:
    samples = data(8, 2)
    batches = [{k: torch.stack([x[k] for x in part]) for k in part[0]} for part in (samples[:4], samples[4:])]
    expected = sum(float(model()(**one).loss.detach()) for one in batches) / 2  # each batch's mean over its own labels
    assert pair.run(evaluated, str(tmp_path), timeout_s=300) == pytest.approx([expected] * 2, rel=1e-6)


class Doubling(Trainer):
    """A trainer, as those of trl, with a way of its own to evaluate, which gathers a number of each batch too."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> tuple[Any, Any, Any]:
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=False)
        self.seen = [*getattr(self, "seen", []), float(self.accelerator.gather_for_metrics(loss).mean())]
        return 2 * loss, None, None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir)


class MixedIn(AutoparTrainer, Doubling):
    pass


def evaluated_otherwise(folder: str, pins: dict[str, Any] | None) -> tuple[float, list[float]]:
    each = 4 if pins is None else 2
    args = TrainingArguments(folder, per_device_eval_batch_size=each, use_cpu=True, report_to=[], disable_tqdm=True)
    options = {} if pins is None else {"compile_options": {"pins": pins, "cluster": "cpu"}}
    trainer = (Doubling if pins is None else MixedIn)(model(), args, eval_dataset=data(10, 7), **options)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/saved")
    return loss, trainer.seen


def test_a_trainer_that_is_mixed_in_evaluates_in_its_own_way(pair: WorkerPool, tmp_path: Path) -> None:
    loss, seen = evaluated_otherwise(str(tmp_path / "one"), None)
    for found, theirs in pair.run(evaluated_otherwise, str(tmp_path / "two"), {"tp": 2}, timeout_s=100):
        assert found == pytest.approx(loss, rel=1e-6) and theirs == pytest.approx(seen, rel=1e-6) and len(seen) == 3
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "two" / "saved", dtype=torch.float64).state_dict()
    assert all(torch.equal(saved[name], x) for name, x in model().state_dict().items())


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Of which nobody knows the length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from data(10, 7)


def of_a_stream(folder: str, pins: dict[str, Any] | None) -> float:
    each = 4 if pins is None else 2
    args = TrainingArguments(folder, per_device_eval_batch_size=each, use_cpu=True, report_to=[], disable_tqdm=True)
    options = {} if pins is None else {"compile_options": {"pins": pins, "cluster": "cpu"}}
    trainer = (Trainer if pins is None else AutoparTrainer)(model(), args, eval_dataset=Stream(), **options)
    return float(trainer.evaluate()["eval_loss"])


def test_the_last_batch_of_a_stream_counts_by_its_samples(pair: WorkerPool, tmp_path: Path) -> None:
    expected = of_a_stream(str(tmp_path / "one"), None)
    assert pair.run(of_a_stream, str(tmp_path / "two"), {"tp": 2}, timeout_s=100) == pytest.approx([expected] * 2, rel=1e-6)


def predicted(folder: str, pins: dict[str, Any] | None) -> tuple[np.ndarray, float]:
    """Of five samples with labels, after a step by which the model was compiled to return its loss alone."""
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4 if pins is None else 2, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", per_device_eval_batch_size=4 if pins is None else 2,
    )  # fmt: skip
    kind = Trainer if pins is None else functools.partial(AutoparTrainer, compile_options={"pins": pins, "cluster": "cpu"})
    trainer = kind(model(), args, train_dataset=data(8, 1))
    trainer.train()
    found = trainer.predict(data(5, 3))
    return found.predictions, found.metrics["test_loss"]


def test_predictions_for_samples_with_labels(pair: WorkerPool, tmp_path: Path) -> None:
    logits, loss = predicted(str(tmp_path / "stock"), None)
    for found, found_loss in pair.run(predicted, str(tmp_path / "zero3"), PLANS["zero3"], timeout_s=500):
        np.testing.assert_allclose(found, logits, rtol=1e-9, atol=1e-9)
        assert found_loss == pytest.approx(loss, rel=1e-6)


def mixed(folder: str, pins: dict[str, Any] | None, bf16: bool) -> dict[str, Any]:
    """In mixed precision, evaluated on a last batch of one sample; the loss alone."""
    return trained(folder, pins, compare=False, bf16=bf16, dtype=torch.float32, evaluated=9)


def test_mixed_precision_of_the_arguments_is_in_force(pair: WorkerPool, tmp_path: Path) -> None:
    expected, plain = (mixed(str(tmp_path / f"stock{bf16}"), None, bf16)["log"] for bf16 in (True, False))
    for found in pair.run(mixed, str(tmp_path / "dp2"), PLANS["dp2"], True, timeout_s=500):
        first, theirs, without = found["log"][0], expected[0], plain[0]
        assert first["loss"] == pytest.approx(theirs["loss"], rel=1e-5)  # of two batches, before the first step
        assert first["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-3)
        assert min(abs(x["grad_norm"] / without["grad_norm"] - 1) for x in (first, theirs)) > 5e-5  # of float32: 1e-7
        for mine, theirs in zip(found["log"], expected, strict=True):
            for key in (k for k in theirs if "loss" in k):
                assert mine[key] == pytest.approx(theirs[key], rel=5e-3)


@pytest.mark.parametrize(
    "given,remedy",
    [
        ({"gradient_checkpointing": True}, "autopar plans recompute"),
        ({"torch_compile": True}, "compile_stages"),
        ({"auto_find_batch_size": True}, "'memory'"),
        ({"train_sampling_strategy": "batch_rebalance"}, "Use another strategy"),
    ],
)
def test_what_the_trainer_cannot_follow_is_refused_with_the_remedy(given: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **given)
    with pytest.raises(ValueError, match=remedy):
        AutoparTrainer(model(), args, train_dataset=data(4, 1))


def translated(folder: str, pins: dict[str, Any] | None) -> tuple[list[dict[str, float]], np.ndarray]:
    """Two steps of a T5, evaluations with what it generates, and predictions for five samples."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    t5 = T5ForConditionalGeneration(T5Config(**sizes)).double()
    each = 4 if pins is None else 2
    args = Seq2SeqTrainingArguments(
        output_dir=folder, max_steps=2, per_device_train_batch_size=each, per_device_eval_batch_size=each, learning_rate=3e-2,
        eval_strategy="steps", eval_steps=1, save_strategy="no", logging_steps=1, predict_with_generate=True, generation_max_length=6,
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip

    def generated(found: Any) -> dict[str, float]:
        return {"sum": float(found.predictions.sum()), "length": float(found.predictions.shape[1])}

    kind = functools.partial(AutoparSeq2SeqTrainer, compile_options={"pins": pins, "cluster": "cpu"}) if pins else Seq2SeqTrainer
    trainer = kind(t5, args, train_dataset=data(8, 1), eval_dataset=data(8, 2), compute_metrics=generated)
    trainer.train()
    kept = [{k: v for k, v in e.items() if k in ("loss", "eval_loss", "eval_sum", "eval_length")} for e in trainer.state.log_history]
    return [e for e in kept if e], trainer.predict(data(5, 3), num_beams=2).predictions


def test_prediction_by_generating(pair: WorkerPool, tmp_path: Path) -> None:
    log, predicted = translated(str(tmp_path / "stock"), None)
    assert any("eval_sum" in entry for entry in log) and np.unique(predicted).size > 2
    for plan in ("tp2", "pp2", "zero3"):
        for found, ours in pair.run(translated, str(tmp_path / plan), PLANS[plan], timeout_s=500):
            assert (ours == predicted).all()
            for mine, theirs in zip(found, log, strict=True):
                assert mine == pytest.approx(theirs, rel=2e-6)


def test_generating_with_a_trainer_that_does_not_is_refused(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), predict_with_generate=True, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="use AutoparSeq2SeqTrainer"):
        AutoparTrainer(model(), args, train_dataset=data(4, 1))
