"""Programs that use what forward returns: dicts, tuples, records, metrics, the outputs of Hugging Face models, generation."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._transformers import load_transformers
from benchmarks._traps_kit import (
    Compile,
    InDict,
    Logits,
    Net,
    Results,
    batch,
    batches,
    loss_loop,
    program,
    seeded,
    sgd,
    state,
    stepped,
    trained,
)

KIND = "outputs"


class InTuple(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        return F.cross_entropy(logits, y), (logits.argmax(1) == y).double().mean()


Pair = namedtuple("Pair", ["loss", "logits"])  # noqa: PYI024


class InPair(Net):
    def forward(self, x: Tensor, y: Tensor) -> Pair:
        logits = self.logits(x)
        return Pair(F.cross_entropy(logits, y), logits)


@dataclass
class Record:
    loss: Tensor
    logits: Tensor


class InRecord(Net):
    def forward(self, x: Tensor, y: Tensor) -> Record:
        logits = self.logits(x)
        return Record(F.cross_entropy(logits, y), logits)


class Attributes(dict[str, Any]):
    """Its items are attributes too."""

    __getattr__ = dict.__getitem__


class SameAttributes(dict[str, Any]):
    """Its attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class InOwnDict(Net):
    kind: type[dict[str, Any]] = Attributes

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.hidden(x)
        logits = self.head(h)
        loss = {} if y is None else {"loss": F.cross_entropy(logits, y)}
        return self.kind(logits=logits, levels=self.kind(first=h, both=[h, 2 * h]), **loss)


class InSameDict(InOwnDict):
    kind = SameAttributes


@program(KIND)
def loss_in_a_dict(compile: Compile) -> Results:
    model = compile(seeded(InDict), example_inputs=batch())
    return {"losses": loss_loop(model, lambda out: out["loss"]), "state": state(model)}


@program(KIND, plans=("dp2mb2",))
def logits_in_a_dict(compile: Compile) -> Results:
    """out["logits"] is read for a metric."""
    model = compile(seeded(InDict), example_inputs=batch())
    losses = loss_loop(model, lambda out: out["loss"])
    return {"losses": losses, "logits": model(*batch())["logits"].detach()}


@program(KIND, remedy_of="logits_in_a_dict", plans=("dp2mb2", "dp2tp2"))
def logits_in_a_dict_asked_for(compile: Compile) -> Results:
    """The same with outputs="all"."""
    model = compile(seeded(InDict), example_inputs=batch(), outputs="all")
    losses = loss_loop(model, lambda out: out["loss"])
    return {"losses": losses, "logits": model(*batch())["logits"].detach()}


@program(KIND)
def loss_and_accuracy(compile: Compile) -> Results:
    """loss, accuracy = model(x, y) in training."""
    model = compile(seeded(InTuple), example_inputs=batch())
    optimizer, found = sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        loss, accuracy = model(*given)
        loss.backward()
        optimizer.step()
        found.append([loss.item(), accuracy.item()])
    return {"found": found, "state": state(model)}


@program(KIND, remedy_of="loss_and_accuracy", plans=("dp2mb2", "dp2tp2"))
def loss_and_accuracy_asked_for(compile: Compile) -> Results:
    """The same with outputs="all"."""
    model = compile(seeded(InTuple), example_inputs=batch(), outputs="all")
    optimizer, found = sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        loss, accuracy = model(*given)
        loss.backward()
        optimizer.step()
        found.append([loss.item(), accuracy.item()])
    return {"found": found, "state": state(model)}


@program(KIND)
def loss_of_a_named_tuple(compile: Compile) -> Results:
    model = compile(seeded(InPair), example_inputs=batch())
    return {"losses": loss_loop(model, lambda out: out.loss), "state": state(model)}


@program(KIND)
def loss_of_a_dataclass(compile: Compile) -> Results:
    model = compile(seeded(InRecord), example_inputs=batch())
    return {"losses": loss_loop(model, lambda out: out.loss), "state": state(model)}


def _of_an_own_dict(compile: Compile, model: type[InOwnDict]) -> Results:
    compiled = compile(seeded(model), example_inputs=(batch()[0],))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = compiled(x)
        assert type(out) is type(out.levels) is model.kind and out.logits is out["logits"]
        return F.cross_entropy(out.logits, y) + out.levels["both"][1].square().mean()

    return {"losses": stepped(compiled, loss_of), "state": state(compiled)}


@program(KIND)
def outputs_in_a_dict_with_attributes(compile: Compile) -> Results:
    """class AttrDict(dict): __getattr__ = dict.__getitem__"""
    return _of_an_own_dict(compile, InOwnDict)


class InNamespace(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> SimpleNamespace:  # type: ignore[override]
        hidden = self.hidden(x)
        logits = self.head(hidden)
        return SimpleNamespace(loss=None if y is None else F.cross_entropy(logits, y), logits=logits, hidden=[hidden])


@program(KIND)
def outputs_in_a_namespace(compile: Compile) -> Results:
    """types.SimpleNamespace, with a list in it; without labels there is no loss in it."""
    model = compile(seeded(InNamespace), example_inputs=batch(), outputs="all")
    optimizer, found = sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        out = model(*given)
        out.loss.backward()
        optimizer.step()
        found.append((out.loss.item(), out.logits.sum().item(), out.hidden[0].sum().item()))
    with torch.no_grad():
        out = model(batch(5)[0])
    return {"found": found, "loss": out.loss, "logits": out.logits, "state": state(model)}


@program(KIND)
def outputs_in_a_dict_that_is_its_attributes(compile: Compile) -> Results:
    """self.__dict__ = self"""
    return _of_an_own_dict(compile, InSameDict)


@program(KIND, plans=("dp2mb2",))
def loss_in_a_dict_with_attributes(compile: Compile) -> Results:
    """The loss is one of the items, and all of them are asked for."""
    model = compile(seeded(InOwnDict), example_inputs=batch(), outputs="all")
    first = [model(*given).levels.first.detach().clone() for given in batches()]
    return {"losses": loss_loop(model, lambda out: out.loss), "first": first, "state": state(model)}


@program(KIND)
def loss_outside_of_the_model(compile: Compile) -> Results:
    """The plainest loop: logits = model(x); F.cross_entropy(logits, y).backward()."""
    model = compile(seeded(Logits))
    optimizer, losses = sgd(model), []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, remedy_of="loss_outside_of_the_model")
def loss_moved_into_the_model(compile: Compile) -> Results:
    """The same with a small module around it."""

    class WithLoss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.model(x), y)

    return trained(compile(WithLoss(seeded(Logits)), example_inputs=batch()))


@program(KIND)
def backward_through_logits(compile: Compile) -> Results:
    """A second term is made from out["logits"], with outputs="all"."""
    model = compile(seeded(InDict), example_inputs=batch(), outputs="all")
    return {"losses": loss_loop(model, lambda out: out["loss"] + 0.1 * out["logits"].square().mean()), "state": state(model)}


@program(KIND)
def backward_through_all_outputs(compile: Compile) -> Results:
    """The same with outputs="trained"; the loss alone in one step, and evaluation."""
    model = compile(seeded(InDict), example_inputs=batch(), outputs="trained")
    losses = loss_loop(model, lambda out: out["loss"] + 0.1 * out["logits"].square().mean())
    losses += loss_loop(model, lambda out: out["loss"])
    model.eval()
    with torch.no_grad():
        found = model(*batch(4))
    return {"losses": losses, "found": found, "state": state(model)}


def _gpt() -> Any:
    t = load_transformers()
    config = t.GPT2Config(
        vocab_size=24, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return t.GPT2LMHeadModel(config).train()


def _text(index: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 24, (12, 8), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids}


def _train_gpt(model: Any) -> list[Tensor]:
    """Losses in float32, to which transformers rounds logits."""
    optimizer, losses = sgd(model), []
    for i in range(2):
        optimizer.zero_grad()
        loss = model(**_text(i)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@program(KIND)
def hugging_face_loss(compile: Compile) -> Results:
    """model(**batch).loss in training."""
    model = compile(_gpt())
    return {"losses": _train_gpt(model), "state": state(model)}


@program(KIND)
def hugging_face_logits(compile: Compile) -> Results:
    """model(**batch).logits under no_grad, after training."""
    model = compile(_gpt(), example_inputs=_text())
    losses = _train_gpt(model)
    with torch.no_grad():
        return {"losses": losses, "logits": model(**_text(5)).logits}


@program(KIND, remedy_of="hugging_face_logits")
def hugging_face_logits_asked_for(compile: Compile) -> Results:
    """The same with outputs="all"."""
    model = compile(_gpt(), example_inputs=_text(), outputs="all")
    losses = _train_gpt(model)
    with torch.no_grad():
        return {"losses": losses, "logits": model(**_text(5)).logits}


@program(KIND)
def hugging_face_generate(compile: Compile) -> Results:
    """model.generate(ids) after training."""
    model = compile(_gpt(), example_inputs=_text())
    losses = _train_gpt(model)
    return {"losses": losses, "tokens": model.generate(_text()["input_ids"][:2, :4], max_new_tokens=4, do_sample=False)}


@program(KIND, remedy_of="hugging_face_generate")
def hugging_face_generate_by_autopar(compile: Compile) -> Results:
    """autopar.generate(model, ids), where there is one."""
    import autopar

    model = compile(_gpt(), example_inputs=_text())
    losses = _train_gpt(model)
    prompt, options = _text()["input_ids"][:2, :4], {"max_new_tokens": 4, "do_sample": False}
    own = hasattr(model, "full_state_dict")
    return {"losses": losses, "tokens": autopar.generate(model, prompt, **options) if own else model.generate(prompt, **options)}


@program(KIND)
def number_of_the_loss(compile: Compile) -> Results:
    """float(loss), loss.item(), f"{loss:.3f}", loss.detach(), loss.shape, loss.requires_grad, comparison with a number."""
    model = compile(seeded(Net), example_inputs=batch())
    loss = model(*batch())
    found = {"float": float(loss), "text": f"{loss:.6f}", "detached": loss.detach(), "shape": list(loss.shape), "grad": loss.requires_grad}
    return {**found, "above": bool(loss > 1.0), "stacked": torch.stack([loss.detach(), loss.detach()])}


class Encoder(Net):
    """Writes to the dict of features that it is given, and returns it, as sentence encoders do."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        features["tokens"] = self.hidden(features["x"])
        features["embedding"] = F.normalize(self.head(features["tokens"]), dim=-1)
        features["count"] = features["count"] + 1
        return features


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> list[float]:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [loss.item()]


def _features(index: int) -> dict[str, Tensor]:
    x, y = batch(index)
    return {"x": x, "count": y}


@program(KIND, plans=("dp2tp2",))
def dict_that_is_given_is_written_to(compile: Compile) -> Results:
    """Two texts of a pair are encoded by two calls; the loop reads the dicts that it gave, which are those that are returned."""
    model = compile(seeded(Encoder), example_inputs=(_features(0),), outputs="trained")
    optimizer, losses, found = sgd(model), list[float](), list[Any]()
    for k in range(3):
        one, other = _features(k), _features(k + 3)
        returned, _ = model(one), model(other)
        scores = one["embedding"] @ other["embedding"].T
        loss = F.cross_entropy(8 * scores, torch.arange(len(scores))) + other["tokens"].square().mean()
        losses += _step(optimizer, loss)
        found.append([returned is one, sorted(one), one["x"].equal(batch(k)[0]), int((one["count"] - batch(k)[1]).sum())])
    return {"losses": losses, "found": found, "state": state(model)}


@program(KIND)
def dict_that_is_given_again(compile: Compile) -> Results:
    """The dict that a call has written to is given to the next one."""
    model = compile(seeded(Encoder), example_inputs=(_features(0),), outputs="trained")
    optimizer, losses, given = sgd(model), list[float](), _features(0)
    for _ in range(3):
        loss = model({k: v.detach() for k, v in model(given).items()})["embedding"][:, 0].square().mean() + given["tokens"].mean()
        losses += _step(optimizer, loss)
        given = {k: v.detach() for k, v in given.items()}
    return {"losses": losses, "count": given["count"], "state": state(model)}


@program(KIND)
def calls_without_labels_between_losses_of_all_outputs(compile: Compile) -> Results:
    """Gradients come to the logits beside the loss, and to those of a call that has none: in a dataclass."""

    @dataclass
    class Output:
        loss: Tensor | None
        logits: Tensor

    class Semi(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Output:
            logits = self.logits(x)
            return Output(None if y is None else F.cross_entropy(logits, y), logits)

    model = compile(seeded(Semi))
    optimizer, losses = sgd(model), []
    for x, y in batches():
        for labels in (y, None):
            optimizer.zero_grad()
            out = model(x, y) if labels is not None else model(x)
            loss = 0.1 * out.logits.square().mean() + (out.loss if labels is not None else 0.0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "state": state(model)}
