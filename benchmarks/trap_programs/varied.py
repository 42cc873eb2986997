"""Programs around models of kinds that no other file has: layers that are one, inputs that are not dense, lines of several statements,
losses of one call that go backward one after the other, predictions of trainers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import Dataset

from benchmarks._traps_kit import (
    BATCH,
    HIDDEN,
    Block,
    Compile,
    Logits,
    Net,
    Normed,
    Results,
    batch,
    batches,
    program,
    samples,
    seeded,
    sgd,
    state,
    stepped,
    train,
    trained,
)  # fmt: skip
from benchmarks.trap_programs.tools import options_of
from benchmarks.trap_programs.training import folder_of_all

MODELS, INPUTS, LOSSES = "varied", "inputs", "losses"
WORDS, LENGTH = 20, 6


def tokens(index: int = 0) -> Tensor:
    """Words [batch, 6]; 0 fills what is short."""
    generator = torch.Generator().manual_seed(index)
    long = torch.randint(2, LENGTH + 1, (BATCH, 1), generator=generator)
    return torch.randint(1, WORDS, (BATCH, LENGTH), generator=generator) * (torch.arange(LENGTH) < long)


# ------------------------------------------------------------------------------------------------------------- models
@program(MODELS)
def one_layer_many_times(compile: Compile) -> Results:
    """ALBERT: a ModuleList of one transformer layer three times, with padding, evaluated afterwards."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(HIDDEN, 2, 32, dropout=0.0, batch_first=True)
            self.embed, self.layers, self.head = nn.Embedding(WORDS, HIDDEN), nn.ModuleList([layer] * 3), nn.Linear(HIDDEN, 4)

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            h = self.embed(t)
            for layer in self.layers:
                h = layer(h, src_key_padding_mask=t == 0)
            return F.cross_entropy(self.head(h[:, 0]), y)

    given = [(tokens(k), batch(k)[1]) for k in range(4)]
    model = compile(seeded(Shared), example_inputs=given[0])
    found = dict(trained(model, torch.optim.AdamW(model.parameters(), lr=0.01), inputs=given[:3]))
    model.eval()
    with torch.no_grad():
        found["evaluated"] = model(*given[3]).item()
    return found


@program(MODELS)
def hooks_on_a_layer_of_two_places(compile: Compile) -> Results:
    """A forward hook before compiling by one name of a block, another one afterwards by its other name."""

    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            block = Block()
            self.blocks = nn.Sequential(block, block)

    made = seeded(Twice)
    made.blocks[0].register_forward_hook(lambda part, given, output: output * 0.9)
    model = compile(made, example_inputs=batch())
    losses = train(model)
    hook = model.blocks[1].register_forward_hook(lambda part, given, output: output + 0.1)
    losses += train(model)
    hook.remove()
    return {"losses": losses + train(model), "state": state(model)}


@program(MODELS)
def forced_and_free_decoding_in_turns(compile: Compile) -> Results:
    """A decoder that is given the right words in one step, and its own in the next; several statements stand on one line."""

    class Decoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encode = nn.Embedding(WORDS, 8), nn.GRU(8, HIDDEN, batch_first=True)
            self.cell, self.head, self.forced = nn.GRUCell(8, HIDDEN), nn.Linear(HIDDEN, WORDS), True

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            _, h = self.encode(self.embed(source)); h = h[0]; word = torch.zeros_like(target[:, 0])  # noqa: E702
            losses = []
            for k in range(LENGTH):
                h = self.cell(self.embed(word), h)
                scores = self.head(h)
                losses.append(F.cross_entropy(scores, target[:, k]))
                word = target[:, k] if self.forced else scores.argmax(-1)
            return torch.stack(losses).mean()

    model = compile(seeded(Decoding), example_inputs=(tokens(0), tokens(5)))
    optimizer, losses = sgd(model), []
    for step in range(4):
        model.forced = step % 2 == 0
        losses += train(model, optimizer, inputs=[(tokens(step), tokens(step + 5))])
    return {"losses": losses, "state": state(model)}


@program(MODELS)
def underscores_on_the_left(compile: Compile) -> Results:
    """`_, h = ..., ...`, and an underscore that is used as a name."""

    class Underscored(Net):
        def hidden(self, x: Tensor) -> Tensor:
            _, h = x * 2, torch.tanh(x * 0.5 + 1)
            _ = torch.relu(self.first(h) + 1)
            return self.blocks(_)

    return trained(compile(seeded(Underscored), example_inputs=batch()))


@program(MODELS)
def paths_through_all_labels(compile: Compile) -> Results:
    """A conditional random field over an LSTM: logsumexp step by step, and scores gathered by labels."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encode = nn.Embedding(WORDS, 8), nn.LSTM(8, 8, batch_first=True, bidirectional=True)
            self.emit, self.moves = nn.Linear(16, 5), nn.Parameter(torch.zeros(5, 5))

        def forward(self, t: Tensor, labels: Tensor) -> Tensor:
            emitted = self.emit(self.encode(self.embed(t))[0])
            total, score = emitted[:, 0], emitted[:, 0].gather(1, labels[:, :1]).squeeze(1)
            for k in range(1, LENGTH):
                total = torch.logsumexp(total[:, :, None] + self.moves, 1) + emitted[:, k]
                score = score + emitted[:, k].gather(1, labels[:, k : k + 1]).squeeze(1) + self.moves[labels[:, k - 1], labels[:, k]]
            return (torch.logsumexp(total, 1) - score).mean()

    given = [(tokens(k), tokens(k) % 5) for k in range(3)]
    return trained(compile(seeded(Field), example_inputs=given[0]), inputs=given)


@program(MODELS)
def likelihood_of_a_process(compile: Compile) -> Results:
    """A Gaussian process over features: a kernel of every sample with every other, its Cholesky factor, and its determinant."""

    class Process(Net):
        def __init__(self) -> None:
            super().__init__()
            self.length, self.noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.hidden(x)
            kernel = (-0.5 * torch.cdist(h, h).square() / self.length.exp()).exp() + self.noise.exp() * torch.eye(len(x))
            factor, target = torch.linalg.cholesky(kernel), y.to(x.dtype)[:, None] - 1.5
            return 0.5 * (target * torch.cholesky_solve(target, factor)).sum() + factor.diagonal().log().sum()

    return trained(compile(seeded(Process), example_inputs=batch()))


@program(MODELS)
def weights_made_by_a_network(compile: Compile) -> Results:
    """A hypernetwork makes the first layer's weight of a learned code, and the head is called with its weights shifted."""

    class Made(Net):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.make = nn.Parameter(torch.randn(4)), nn.Linear(4, HIDDEN * 8)

        def logits(self, x: Tensor) -> Tensor:
            h = self.blocks(torch.tanh(F.linear(x, self.make(self.code).view(HIDDEN, 8))))
            shifted = {name: p - 0.1 * torch.sign(p.detach()) for name, p in self.head.named_parameters()}
            found: Tensor = torch.func.functional_call(self.head, shifted, (h,))
            return found

    return trained(compile(seeded(Made), example_inputs=batch()))


@program(MODELS)
def average_that_is_a_copy_of_the_module(compile: Compile) -> Results:
    """deepcopy of what compile returned, whose parameters and statistics follow, and which is evaluated."""
    model = compile(seeded(Normed), example_inputs=batch())
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer, losses = sgd(model), []
    for given in batches(3):
        losses += train(model, optimizer, inputs=[given])
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.1)
            for kept, now in zip(average.buffers(), model.buffers(), strict=True):
                kept.copy_(now)
            losses.append(average(*batch(9)).item())
    return {"losses": losses, "average": state(average)}


# ------------------------------------------------------------------------------------------------------------- inputs
class Aggregating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adjacency, self.layer = torch.eye(BATCH).roll(1, 0), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(torch.mm(self.adjacency, x)), y)


@program(MODELS)
def neighbours_by_a_sparse_matrix(compile: Compile) -> Results:
    """A graph's adjacency in a plain attribute, as a sparse tensor."""
    model = seeded(Aggregating)
    model.adjacency = model.adjacency.to_sparse()
    return trained(compile(model, example_inputs=batch()))


@program(MODELS, remedy_of="neighbours_by_a_sparse_matrix")
def neighbours_by_a_dense_matrix(compile: Compile) -> Results:
    """The same, dense."""
    return trained(compile(seeded(Aggregating), example_inputs=batch()))


@program(INPUTS)
def nested_tensors_later(compile: Compile) -> Results:
    """Behind dense batches one that is nested."""

    class Padding(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return super().hidden(x.to_padded_tensor(0.0).mean(1) if x.is_nested else x)

    nested = torch.nested.nested_tensor([torch.ones(2, 8)] * BATCH)
    return trained(compile(seeded(Padding), example_inputs=batch()), inputs=[batch(0), (nested, batch(1)[1])])


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.LSTM(8, HIDDEN, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, (h, _) = self.encode(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
        return h[-1]


class Reading(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.embed, self.pack, self.apart = nn.Embedding(WORDS, 8), Packing(), apart
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(HIDDEN, 4)

    def forward(self, t: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        x = self.drop(self.embed(t))
        if self.apart:
            h = self.pack(x, lengths)
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            h = self.pack.encode(packed)[1][0][-1]
        return F.cross_entropy(self.head(self.drop(h)), y)


def _read(compile: Compile, apart: bool) -> Results:
    """Trained in evaluation mode, in which nothing is drawn."""
    given = [(tokens(k), (tokens(k) > 0).sum(1), batch(k)[1]) for k in range(3)]
    return trained(compile(seeded(Reading, apart).eval(), example_inputs=given[0]), inputs=given)


@program(MODELS)
def packed_between_dropouts(compile: Compile) -> Results:
    """The model's own forward drops out, packs, calls its LSTM, and drops out again."""
    return _read(compile, apart=False)


@program(MODELS, remedy_of="packed_between_dropouts")
def packed_in_a_part_between_dropouts(compile: Compile) -> Results:
    """The same, where a part packs."""
    return _read(compile, apart=True)


# ------------------------------------------------------------------------------------------------------------- losses
class Both(Logits):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = self.hidden(x)
        return self.head(h), h


@program(LOSSES)
def backward_of_each_loss_of_one_call(compile: Compile) -> Results:
    """Two losses of what one call returns, of which each goes backward by itself, the first with retain_graph."""
    model = compile(seeded(Both), example_inputs=(samples(),))
    optimizer, losses = sgd(model), []
    for x, y in batches():
        optimizer.zero_grad()
        logits, h = model(x)
        one, two = F.cross_entropy(logits, y), 0.1 * h.square().mean()
        one.backward(retain_graph=True)
        two.backward()
        optimizer.step()
        losses += [one.item(), two.item()]
    return {"losses": losses, "state": state(model)}


@program(LOSSES, remedy_of="backward_of_each_loss_of_one_call")
def backward_of_the_sum_of_the_losses(compile: Compile) -> Results:
    """The same, of their sum."""
    model = compile(seeded(Both), example_inputs=(samples(),))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits, h = model(x)
        return F.cross_entropy(logits, y) + 0.1 * h.square().mean()

    return {"losses": stepped(model, loss), "state": state(model)}


class Sharp(nn.Module):
    """The loss of each sample, and the squared norm of its gradient by the logits."""

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, y, reduction="none")
        (grad,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
        return losses + 0.1 * grad.square().sum(1)


class Sharpened(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sharp = Sharp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.sharp(self.logits(x), y).mean()


@program(LOSSES)
def gradients_of_each_sample_in_the_loss(compile: Compile) -> Results:
    """The model's own forward asks for gradients by the logits, and makes the loss of them."""

    class Own(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.logits(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            (grad,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
            return (losses + 0.1 * grad.square().sum(1)).mean()

    return trained(compile(seeded(Own), example_inputs=batch()))


@program(LOSSES, remedy_of="gradients_of_each_sample_in_the_loss")
def gradients_of_each_sample_in_a_part(compile: Compile) -> Results:
    """The same, where a part asks for them."""
    return trained(compile(seeded(Sharpened), example_inputs=batch()))


# ------------------------------------------------------------------------------------------------------------- trainers
class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.x, self.y = batch(3, count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Labelled(Net):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.logits(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


@program("tools")
def predictions_of_a_trainer(compile: Compile) -> Results:
    """Trainer.predict for samples with labels, behind training by the loss alone; and of another trainer, before any training."""
    from transformers import Trainer, TrainingArguments

    from autopar.integrations.trainer import AutoparTrainer

    options = options_of(compile)
    each = BATCH // (1 if options is None else int(options["gpus"]))
    args = TrainingArguments(
        str(folder_of_all("predictions")), per_device_train_batch_size=each, per_device_eval_batch_size=each, max_steps=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip

    def trainer() -> Any:
        made = {"model": seeded(Labelled), "args": args, "train_dataset": Samples(3 * BATCH)}
        return Trainer(**made) if options is None else AutoparTrainer(**made, compile_options=options)

    behind, before = trainer(), trainer()
    behind.train()
    found = [one.predict(Samples(2 * BATCH)) for one in (behind, before)]
    return {"logits": [torch.tensor(np.asarray(f.predictions)) for f in found], "losses": [f.metrics["test_loss"] for f in found]}
