"""Programs after which the model computes something else than when it was compiled: other numbers, hooks, modes, branches, masks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from benchmarks._traps_kit import HIDDEN, WIDTH, Block, Compile, Net, Results, batch, batches, program, seeded, sgd, state, train, trained

KIND = "recapture"


class Scaled(Net):
    """Its residual branches have a factor, which is 1 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + self.scale * (block(h) - h)
        return h * self.scale


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def scale_annealed_from_one(compile: Compile) -> Results:
    """A factor that multiplied nothing at capture, since it was 1.0, is 0.7 and then 0.4."""
    model = compile(seeded(Scaled), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for scale in (1.0, 0.7, 0.4, 1.0):
        model.scale = scale
        losses += train(model, optimizer, steps=2)
    return {"losses": losses, "state": state(model)}


class NormedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class NormedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(NormedBlock() for _ in range(4)))


@program(KIND)
def some_norms_frozen_midway(compile: Compile) -> Results:
    """Two of four batch norms are put into eval() midway, then all of them, then they train again."""
    model = compile(seeded(NormedNet), example_inputs=batch())
    optimizer, losses = sgd(model), train(model, None, steps=1)
    for frozen in ((1, 3), (0, 1, 2, 3), ()):
        for k, block in enumerate(model.blocks):
            block.norm.train(k not in frozen)
        losses += train(model, optimizer, steps=2)
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def hook_that_scales_after_compile(compile: Compile) -> Results:
    """A forward hook on one of the blocks is registered midway, and removed later."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), train(model, None, steps=1)
    handle = model.blocks[0].register_forward_hook(lambda module, args, out: 0.5 * out)
    losses += train(model, optimizer, steps=2)
    handle.remove()
    losses += train(model, optimizer, steps=1)
    model.blocks[1].up.register_forward_pre_hook(lambda module, args: (args[0].clamp(max=0.5),))
    losses += train(model, optimizer, steps=2)
    return {"losses": losses, "state": state(model)}


class Branched(Net):
    """A gate may follow its blocks, and one of them may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.gated, self.skipped = False, -1

    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for k, block in enumerate(self.blocks):
            if k != self.skipped:
                h = block(h)
        return torch.sigmoid(h) * h if self.gated else h


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def flag_switches_a_branch(compile: Compile) -> Results:
    """A gate without parameters is switched on, a layer is left out, both."""
    model = compile(seeded(Branched), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for gated, skipped in ((False, -1), (True, -1), (False, 1), (True, 2), (False, -1)):
        model.gated, model.skipped = gated, skipped
        losses += train(model, optimizer, steps=2)
    return {"losses": losses, "state": state(model)}


class WithAdapters(Net):
    """Each block has an adapter, which is not used at first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(AdaptedBlock() for _ in range(4)))


class AdaptedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(HIDDEN, HIDDEN)
        self.adapted = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.adapter(torch.tanh(y)) if self.adapted else y


@program(KIND, plans=("dp2mb2", "dp2tp2"))
def unused_layers_switched_on(compile: Compile) -> Results:
    """Layers with parameters that no operator read at capture are used later."""
    model = compile(seeded(WithAdapters), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=2)
    for k in (3, 0):
        model.blocks[k].adapted = True
        losses += train(model, optimizer, steps=2)
    for block in model.blocks:
        block.adapted = True
    losses += train(model, optimizer, steps=2)
    return {"losses": losses, "state": state(model)}


class Attending(nn.Module):
    """Layers of attention, causal in training; in evaluation an optional mask of the keys is used too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)}) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor, keys: Tensor | None = None) -> Tensor:
        n, length, _ = x.shape
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if not self.training and keys is not None:
            mask = mask & keys[:, None, None, :]
        for layer in self.layers:
            q, k, v = layer["qkv"](x).view(n, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + layer["out"](mixed.transpose(1, 2).reshape(n, length, WIDTH))
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def sequences(size: int, length: int, index: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(200 + index)
    return torch.randn(size, length, WIDTH, generator=generator), torch.randint(4, (size, length), generator=generator)


@program(KIND, plans=("dp2tp2",))
def another_mask_in_evaluation(compile: Compile) -> Results:
    """Evaluation with another batch size, another length, and a mask that training has not."""
    model: Any = compile(seeded(Attending), example_inputs=sequences(12, 6))
    losses = train(model, inputs=[sequences(12, 6, k) for k in range(2)])
    model.eval()
    x, y = sequences(4, 8)
    keys = torch.arange(8)[None] < torch.tensor([8, 5, 3, 6])[:, None]
    with torch.no_grad():
        evaluated = [model(x, y).item(), model(x, y, keys=keys).item()]
    model.train()
    return {"losses": losses, "evaluated": evaluated, **trained(model, inputs=[sequences(12, 6, 9)])}


@program(KIND)
def loss_weight_switched_on(compile: Compile) -> Results:
    """A penalty on the hidden values has the weight 0 at first, and is left out by the code; later it counts."""

    class Penalised(Net):
        weight = 0.0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.hidden(x)
            loss = F.cross_entropy(self.head(h), y)
            return loss + self.weight * h.square().mean() if self.weight else loss

    model = compile(seeded(Penalised), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k, given in enumerate(batches(4)):
        model.weight = 0.0 if k < 2 else 0.1 * k
        losses += train(model, optimizer, inputs=[given])
    return {"losses": losses, "state": state(model)}


class Masked(Net):
    """Its hidden values are masked once there is a mask, its classes weighted once there are weights, and its head may have no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)
        self.register_parameter("scale", None)
        self.criterion = nn.CrossEntropyLoss()
        self.head = nn.Linear(HIDDEN, 4, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        h = h if self.mask is None else h * self.mask
        return h if self.scale is None else h * self.scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self.logits(x), y)


@program(KIND, plans=("dp2tp2",))
def weights_of_classes_given_later(compile: Compile) -> Results:
    """`criterion.weight = tensor`, a buffer that was None at capture, then other weights, then None."""
    model = compile(seeded(Masked), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for weight in (None, torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, 1.0, 1.0, 1.0]), None):
        model.criterion.weight = weight
        losses += train(model, optimizer, steps=2)
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def mask_given_and_taken_away(compile: Compile) -> Results:
    """A mask in a buffer that was None at capture, which is None again later."""
    model = compile(seeded(Masked), example_inputs=batch())
    optimizer, losses = sgd(model), train(model, None, steps=1)
    model.mask = torch.arange(HIDDEN) % 2.0
    losses += train(model, optimizer, steps=2)
    model.mask = None
    losses += train(model, optimizer, steps=2)
    return {"losses": losses, "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def mask_taken_away(compile: Compile) -> Results:
    """A mask in a buffer that was there at capture is set to None, and given again."""
    built = seeded(Masked)
    built.mask = torch.arange(HIDDEN) % 2.0
    model = compile(built, example_inputs=batch())
    optimizer, losses = sgd(model), train(model, None, steps=1)
    model.mask = None
    losses += train(model, optimizer, steps=2)
    model.mask = torch.arange(HIDDEN) % 3.0
    losses += train(model, optimizer, steps=2)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def bias_given_later(compile: Compile) -> Results:
    """A parameter stands where there was None at capture, and the optimizer is told of it."""
    model = compile(seeded(Masked), example_inputs=batch())
    optimizer, losses = sgd(model), train(model, None, steps=1)
    model.head.bias = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [model.head.bias]})
    losses += train(model, optimizer, steps=2)
    return {"losses": losses}


class AsksForGradients(Net):
    """Computes something else where no gradients are wanted."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h * 0.5 if torch.is_grad_enabled() else h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss + 1 if torch.is_inference_mode_enabled() else loss


@program(KIND, plans=("dp2tp2",))
def branch_of_the_grad_mode(compile: Compile) -> Results:
    """torch.is_grad_enabled() in the model's forward, called in turns with gradients and without."""
    model = compile(seeded(AsksForGradients), example_inputs=batch())
    losses = train(model, None, steps=2)
    for k in range(2):
        with torch.no_grad():
            losses.append(model(*batch(k)).item())
        with torch.inference_mode():
            losses.append(model(*batch(k)).item())
        losses += train(model, None, steps=1)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def hook_of_all_modules(compile: Compile) -> Results:
    """torch's hooks of all modules, which change what some give, registered midway and removed."""

    def halve(module: nn.Module, args: Any, out: Any) -> Any:
        return 0.5 * out if isinstance(module, nn.Linear) and module.out_features == HIDDEN else None

    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = sgd(model), train(model, None, steps=1)
    handle = nn.modules.module.register_module_forward_hook(halve)
    try:
        losses += train(model, optimizer, steps=2)
    finally:
        handle.remove()
    losses += train(model, optimizer, steps=1)
    return {"losses": losses, "state": state(model)}


@program(KIND)
def default_dtype_changed(compile: Compile) -> Results:
    """torch.set_default_dtype after compiling: the forward rounds what it makes."""

    class Making(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return super().hidden(x) * torch.full((), 1 / 3).double()

    model, given = compile(seeded(Making), example_inputs=batch()), batches()
    losses = train(model, inputs=given)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        losses += train(model, inputs=given)
    finally:
        torch.set_default_dtype(before)
    return {"losses": losses + train(model, inputs=given), "state": state(model)}


@program(KIND)
def environment_that_the_forward_reads(compile: Compile) -> Results:
    """os.environ in the model's forward, changed between the steps."""

    class Reading(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * float(os.environ.get("A_SCALE_OF_A_TRAP", "1"))

    model = compile(seeded(Reading), example_inputs=batch())
    losses = train(model)
    os.environ["A_SCALE_OF_A_TRAP"] = "0.5"
    losses += train(model)
    del os.environ["A_SCALE_OF_A_TRAP"]
    return {"losses": losses, "later": train(model), "state": state(model)}


@program(KIND)
def weights_cached_around_a_call(compile: Compile) -> Results:
    """torch.nn.utils.parametrize.cached() around a call that uses a weight with spectral norm twice."""

    class Spectral(Net):
        def __init__(self) -> None:
            super().__init__()
            self.twice = parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN))

        def hidden(self, x: Tensor) -> Tensor:
            return self.twice(torch.tanh(self.twice(super().hidden(x))))

    model = compile(seeded(Spectral), example_inputs=batch())
    losses = []
    for given in batches():
        with parametrize.cached():
            losses.append(model(*given).item())
    return {"losses": losses}


@program(KIND)
def branch_of_what_requires_a_gradient(compile: Compile) -> Results:
    """The forward asks an activation for requires_grad and grad_fn, in turns with and without gradients, in both modes."""

    class Asks(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.hidden(x)
            loss = F.cross_entropy(self.head(h), y)
            if h.requires_grad:
                loss = loss * 2
            return loss if h.grad_fn is None else loss + 1

    model = compile(seeded(Asks), example_inputs=batch())
    losses = []
    for index in range(4):
        losses += train(model, inputs=[batch(index)])
        model.train(index % 2 == 0)
        with torch.no_grad():
            losses.append(model(*batch(index)).item())
    return {"losses": losses, "state": state(model)}
