"""Hugging Face's Trainer in parallel: torchrun --nproc-per-node 2 examples/hf_trainer.py --pin tp=2

A small GPT-2 learns to count. `AutoparTrainer` stands where `Trainer` did; everything else is as it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from autopar.integrations.trainer import AutoparTrainer

LENGTH, WORDS = 16, 64


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from somewhere."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) + (self.first + index) * 7) % WORDS
        return {"input_ids": ids, "labels": ids}


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The losses of the steps of the optimizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pin", action="append", default=[], help="what is decided already, such as tp=2; may be repeated")
    parser.add_argument("--output", default="hf-trainer")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(argv)
    pins = {name: int(value) for name, value in (pin.split("=") for pin in options.pin)}

    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    args = TrainingArguments(
        output_dir=options.output, max_steps=options.steps, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3, save_steps=3, report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = AutoparTrainer(
        model, args, train_dataset=Counting(256), eval_dataset=Counting(16, first=300), compile_options={"pins": pins}
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(losses)
    return losses


if __name__ == "__main__":
    main()
