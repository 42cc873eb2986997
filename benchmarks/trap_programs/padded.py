"""nn.TransformerEncoder over padded sequences: in evaluation torch takes another way, which leaves zeros where padding is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks._traps_kit import Compile, Results, program, seeded, sgd, train, trained


class _Encoder(nn.Module):
    """Words [batch, length], where 0 is padding -> their classes [batch, length, 4]."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16) if normed else None)
        self.head = nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words), src_key_padding_mask=words == 0))


class _Pooled(_Encoder):
    """The loss of the mean over all positions, of padding too."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words).mean(1).square().mean()


def _words(index: int, *, at_the_end: bool = True) -> Tensor:
    found = torch.randint(1, 20, (12, 6), generator=torch.Generator().manual_seed(index))
    found[::2, 4:] = 0
    return found if at_the_end else found.flip(1)


@program("evaluation")
def padding_pooled_in_evaluation(compile: Compile) -> Results:
    """Evaluated without gradients, with them, and with padding in front."""
    model = compile(seeded(_Pooled, True), example_inputs=(_words(0),))
    losses = train(model, inputs=[(_words(index),) for index in range(2)])
    model.eval()
    with torch.no_grad():
        losses += [model(_words(5)).item(), model(_words(6, at_the_end=False)).item()]
    with torch.inference_mode():
        losses.append(model(_words(7)).item())
    return {"losses": [*losses, model(_words(5)).item()]}


@program("evaluation")
def predictions_where_padding_is(compile: Compile) -> Results:
    """All logits are looked at, of an encoder without a last norm."""
    model = compile(seeded(_Encoder, False), example_inputs=(_words(0),))
    optimizer = sgd(model)
    for index in range(2):
        optimizer.zero_grad()
        model(_words(index)).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return {"logits": model(_words(5)), "others": model(_words(6, at_the_end=False))}


class _OnTop(nn.Module):
    """A head that is trained on an encoder that is not, which is in evaluation mode always. within: under no_grad in the forward."""

    def __init__(self, *, within: bool) -> None:
        super().__init__()
        self.encoder, self.top, self.within = _Encoder(True), nn.Linear(4, 4), within
        self.encoder.requires_grad_(within)

    def train(self, mode: bool = True) -> _OnTop:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, words: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.within):
            found = self.encoder(words).mean(1)
        return self.top(found).square().mean()


@program("evaluation")
def padding_of_a_frozen_encoder(compile: Compile) -> Results:
    model = compile(seeded(_OnTop, within=False).train(), example_inputs=(_words(0),))
    return trained(model, inputs=[(_words(index),) for index in range(3)])


@program("evaluation")
def padding_of_an_encoder_without_gradients(compile: Compile) -> Results:
    model = compile(seeded(_OnTop, within=True).train(), example_inputs=(_words(0),))
    return trained(model, inputs=[(_words(index),) for index in range(3)])
