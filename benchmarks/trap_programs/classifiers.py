"""Classifiers of transformers, and the loops that train them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks._transformers import load_transformers
from benchmarks._traps_kit import Compile, Results, program, seeded, sgd
from benchmarks.trap_programs.read import accuracy

KIND = "read"


def _classifier(**options: Any) -> Any:
    transformers = load_transformers()
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3, **options,
    )  # fmt: skip
    return seeded(transformers.BertForSequenceClassification, config)


def _sentences(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(32, (8, 10), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(3, (8,), generator=generator)}


@program(KIND)
def hidden_states_of_hugging_face(compile: Compile) -> Results:
    """Hooks of its own, set in the first call, take them."""
    model = compile(_classifier(output_hidden_states=True), example_inputs=_sentences(0))
    optimizer, found = sgd(model), list[Tensor]()
    for index in range(2):
        model.train()
        optimizer.zero_grad()
        outputs = model(**_sentences(index))
        found += [h.detach().mean(1) for h in outputs.hidden_states]
        outputs.loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found += [h[:, 0] for h in model(**_sentences(index + 3)).hidden_states]
    return {"found": found, "count": len(found)}


@program(KIND)
def hugging_face_classifier(compile: Compile) -> Results:
    """The usual loop: metrics of training batches, then predictions with and without labels."""
    model = compile(_classifier(), example_inputs=_sentences(0))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), list[Any]()
    for index in range(3):
        given = _sentences(index)
        optimizer.zero_grad()
        outputs = model(**given)
        outputs.loss.backward()
        found += [outputs.loss.item(), accuracy(outputs.logits, given["labels"])]
        optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = model(**_sentences(7))
        predictions = outputs.logits.argmax(dim=-1)
        labelled = {k: v for k, v in _sentences(8).items() if k != "labels"}
        found += [outputs["loss"].item(), outputs[1].sum().item(), model(**labelled).logits.std().item()]
    return {"found": found, "predictions": predictions, "names": [float(len(name)) for name in outputs.keys()]}  # noqa: SIM118


@program(KIND)
def predictions_behind_the_step(compile: Compile) -> Results:
    """Metrics of a batch last, as many loops have them, with a schedule."""
    model = compile(_classifier(), example_inputs=_sentences(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    right, total = 0, 0.0
    for index in range(3):
        given = _sentences(index)
        outputs = model(**given)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        right += (outputs.logits.argmax(dim=-1) == given["labels"]).sum().item()
        total += outputs.loss.item() * len(given["labels"])
    return {"right": right, "total": total}
