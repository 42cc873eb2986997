"""Sizes, dtypes and orders of calls that ordinary programs have and small models of tests have not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._traps_kit import (
    BATCH,
    CLASSES,
    HIDDEN,
    WIDTH,
    Compile,
    Net,
    Normed,
    Results,
    batch,
    batches,
    program,
    seeded,
    sgd,
    state,
    stepped,
    train,
    trained,
)

KIND = "edges"
MORE = ("dp2mb2", "dp2tp2", "hybrid3")


@program(KIND, plans=MORE)
def odd_sizes(compile: Compile) -> Results:
    """Nothing but the batch can be divided by two."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner, self.out = nn.Embedding(5, 7), nn.Linear(WIDTH + 7, 9), nn.Linear(9, 5)
            self.norm, self.scale = nn.LayerNorm(9), nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5]))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.norm(torch.tanh(self.inner(torch.cat([x, self.table(y)], -1))))
            return F.cross_entropy(self.out(h) * self.scale, y)

    model = compile(seeded(Odd), example_inputs=batch())
    results = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return {**results, "norms": [p.norm().item() for p in model.parameters()], "rows": model.inner.weight.sum(0).tolist()}


@program(KIND, plans=MORE)
def numbers_as_parameters(compile: Compile) -> Results:
    """CLIP's temperature, a parameter without dims, which is clamped after each step, and a gate of one element."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale, self.gate = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(1))

        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x) * self.log_scale.exp() * torch.sigmoid(self.gate)

    model = compile(seeded(Scaled), example_inputs=batch())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=5e-2), []
    for given in batches(4):
        losses += train(model, optimizer, inputs=[given])
        with torch.no_grad():
            model.log_scale.clamp_(0.9, 1.05)
        losses.append(model.log_scale.item())
        losses.append(model.gate.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def channels_last(compile: Compile) -> Results:
    """A convolutional model and its images in channels_last, with squeeze and excitation."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
            self.norm, self.squeeze, self.out = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = F.relu(self.norm(self.a(x)))
            h = self.b(h) * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(h, 1)))
            return F.cross_entropy(self.out(F.max_pool2d(h, 2).mean((2, 3))), y)

    def images(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(BATCH, 2, 6, 6, generator=generator).to(memory_format=torch.channels_last), batch(index)[1]

    model = compile(seeded(Images).to(memory_format=torch.channels_last), example_inputs=images(0))
    return trained(model, inputs=[images(k) for k in range(3)])


@program(KIND, plans=MORE)
def complex_weights(compile: Compile) -> Results:
    """A spectral layer with complex parameters, under Adam."""

    class Spectral(Net):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(HIDDEN // 2 + 1, dtype=torch.complex128) * 0.5)

        def hidden(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(super().hidden(x)) * self.filter, n=HIDDEN)

    model = compile(seeded(Spectral), example_inputs=batch())
    results = trained(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    return {**results, "norm": model.filter.abs().sum().item()}


@program(KIND, plans=MORE)
def parameters_of_two_dtypes(compile: Compile) -> Results:
    """The head in float32, the rest in float64: norms and clipping over both."""

    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head.float()

        def logits(self, x: Tensor) -> Tensor:
            return self.head(self.hidden(x).float()).double()

    model, norms = compile(seeded(Mixed), example_inputs=batch()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def clip() -> None:
        norms.append(round(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)), 5))

    losses = [round(x, 5) for x in train(model, optimizer, before_step=clip)]
    return {"losses": losses, "norms": norms, "dtypes": [str(p.dtype) for p in model.parameters()]}


@program(KIND, plans=MORE)
def cleared_between_forward_and_backward(compile: Compile) -> Results:
    """zero_grad stands between the call and backward."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for given in batches(4):
        loss = model(*given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def backward_in_the_other_order(compile: Compile) -> Results:
    """Three calls, whose losses go backward last one first, one of them weighted, one of them never."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k in range(3):
        found = [model(*batch(3 * k + j)) for j in range(3)]
        found[2].backward()
        (0.5 * found[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [x.item() for x in found]
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def weight_used_outside_too(compile: Compile) -> Results:
    """The model returns hidden states, and the loop multiplies them by a weight of the model's."""

    class Hidden(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.hidden(x) + self.head(self.hidden(x)).sum(-1, keepdim=True)

    model = compile(seeded(Hidden), example_inputs=(batch()[0],))
    losses = stepped(model, lambda x, y: F.cross_entropy(model(x) @ model.head.weight.T + model.head.bias, y))
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def statistics_taken_anew(compile: Compile) -> Results:
    """update_bn of torch.optim.swa_utils, over a loader, and an evaluation."""

    class Encoder(Normed):
        def forward(self, x: Tensor) -> Any:
            return self.logits(x)

    model = compile(seeded(Encoder), example_inputs=(batch()[0],))
    losses = stepped(model, lambda x, y: F.cross_entropy(model(x), y))
    update_bn(DataLoader(TensorDataset(torch.cat([x for x, _ in batches()])), batch_size=BATCH), model)
    model.eval()
    with torch.no_grad():
        losses.append(model(batch(5)[0]).square().sum().item())
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=MORE)
def gradients_that_are_not_finite(compile: Compile) -> Results:
    """One sample overflows: the step is left out where the norm is not finite, on all ranks alike."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses, skipped = sgd(model), [], []
    for k, (x, y) in enumerate(batches(4)):
        x = x.clone()
        if k == 1:
            x[-1, 0] = float("inf")
        loss = model(x, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        skipped.append(not bool(torch.isfinite(norm)))
        if not skipped[-1]:
            optimizer.step()
            losses.append(loss.item())
        optimizer.zero_grad()
    return {"losses": losses, "skipped": skipped, "state": state(model)}


class Finite(Net):
    """Raises where activations are not finite, or too large."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if not torch.isfinite(hidden).all():
            raise RuntimeError("activations are not finite")
        assert not (x.abs() > 50).any(), "an input is too large"
        return F.cross_entropy(self.logits(x), y)


@program(KIND, plans=(*MORE, "dp2mb2"))
def batches_skipped_that_are_not_finite(compile: Compile) -> Results:
    """The loop skips what the forward raises for: one sample of the first or of the last half of a batch is not finite, or too large."""
    model = compile(seeded(Finite))
    optimizer, losses, skipped = sgd(model), [], []
    for k, (x, y) in enumerate((*batches(), *batches())):
        if k in (1, 2, 4):
            x = x.clone()
            x[0 if k == 1 else -1, 0] = float("nan") if k < 4 else 100.0
        optimizer.zero_grad()
        try:
            loss = model(x, y)
        except (RuntimeError, AssertionError):
            skipped.append(float(k))
            continue
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "skipped": skipped, "state": state(model)}
