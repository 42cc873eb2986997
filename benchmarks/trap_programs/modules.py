"""Programs that use the tree of modules: modes, hooks, submodules, freezing, adding, replacing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import (
    HIDDEN,
    WIDTH,
    Block,
    Compile,
    Net,
    Results,
    batch,
    batches,
    gradients,
    program,
    seeded,
    sgd,
    state,
    train,
    trained,
)  # fmt: skip

KIND = "modules"


class Normed(Net):
    """With batch norm and a dropout that leaves nothing to chance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.drop = nn.Dropout(1.0)

    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.norm(super().hidden(x))
        return hidden + self.drop(hidden)


@program(KIND)
def part_in_evaluation_before_compile(compile: Compile) -> Results:
    """Batch norm is frozen: norm.eval() before compile, then model.train() is never called."""
    model = seeded(Normed)
    model.norm.eval()
    return trained(compile(model, example_inputs=batch()))


@program(KIND)
def part_in_evaluation_after_compile(compile: Compile) -> Results:
    """model.norm.eval() after the first step."""
    model = compile(seeded(Normed), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=1)
    model.norm.eval()
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND)
def all_norms_in_evaluation(compile: Compile) -> Results:
    """The usual loop over modules() with isinstance(m, BatchNorm1d), after model.train()."""
    model = compile(seeded(Normed), example_inputs=batch())
    model.train()
    found = 0
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.eval()
            found += 1
    return {"found": found, **trained(model)}


@program(KIND)
def train_and_evaluate_in_turns(compile: Compile) -> Results:
    """An epoch, model.eval() under no_grad, model.train(), an epoch."""
    model = compile(seeded(Normed), example_inputs=batch())
    optimizer, losses, evaluated = sgd(model), [], []
    for _ in range(2):
        model.train()
        losses += train(model, optimizer, steps=2)
        model.eval()
        with torch.no_grad():
            evaluated.append(model(*batch(9)).item())
    return {"losses": losses, "evaluated": evaluated, "training": model.training, "state": state(model)}


@program(KIND)
def forward_hook_before_compile(compile: Compile) -> Results:
    """A hook that changes a part's output."""
    model = seeded(Net)
    model.first.register_forward_hook(lambda module, args, output: output * 2)
    return trained(compile(model, example_inputs=batch()))


@program(KIND)
def forward_hook_after_compile(compile: Compile) -> Results:
    """The same, registered on the compiled module's part."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=1)
    model.first.register_forward_hook(lambda module, args, output: output * 2)
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND)
def activations_collected_by_a_hook(compile: Compile) -> Results:
    """A hook that writes the mean activation into a list of the user."""
    model = compile(seeded(Net), example_inputs=batch())
    seen: list[float] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.detach().mean().item()))
    return {**trained(model), "seen": seen}


@program(KIND)
def hook_on_the_whole_model(compile: Compile) -> Results:
    """A forward pre-hook on what compile returned, which scales the inputs."""
    model = compile(seeded(Net), example_inputs=batch())
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5, args[1]))
    return trained(model)


@program(KIND)
def gradient_hook_on_a_weight(compile: Compile) -> Results:
    """weight.register_hook that halves the gradient, after compile."""
    model = compile(seeded(Net), example_inputs=batch())
    model.head.weight.register_hook(lambda grad: grad * 0.5)
    return trained(model)


@program(KIND)
def backward_hook_on_a_part(compile: Compile) -> Results:
    """register_full_backward_hook on a block, after compile."""
    model = compile(seeded(Net), example_inputs=batch())
    model.blocks[0].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))
    return trained(model)


@program(KIND)
def init_applied_before_compile(compile: Compile) -> Results:
    model = seeded(Net)
    model.apply(_constant)
    return trained(compile(model, example_inputs=batch()))


@program(KIND)
def init_applied_after_compile(compile: Compile) -> Results:
    """.apply of an initialisation that depends on the whole weight's shape."""
    model = compile(seeded(Net), example_inputs=batch())
    model.apply(_constant)
    return trained(model)


@program(KIND)
def applied_between_a_call_and_its_backward(compile: Compile) -> Results:
    """As virtual adversarial training switches the statistics of BatchNorm: what is applied writes nothing."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch(step))
        model.apply(lambda module: setattr(module, "seen", True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def apply_freezes_layers(compile: Compile) -> Results:
    """By requires_grad_ of each module that is asked for, after a step."""
    model = compile(seeded(Net), example_inputs=batch())
    before = trained(model)
    model.apply(lambda module: module.requires_grad_(False) if isinstance(module, nn.LayerNorm | nn.Embedding) else None)
    first = next(m for m in model.modules() if isinstance(m, nn.Linear))
    first.apply(lambda module: module.requires_grad_(False))
    return {"before": before, "after": trained(model), "trains": [p.requires_grad for p in model.parameters()]}


@program(KIND)
def apply_clips_gradients(compile: Compile) -> Results:
    """Each layer's own, between backward and the step; and those of biases are dropped."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []

    def clip(module: nn.Module) -> None:
        for name, p in module.named_parameters(recurse=False):
            if p.grad is not None and p.dim() > 1:
                p.grad.clamp_(-1e-3, 1e-3)
            elif name == "bias":
                p.grad = None

    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        model.apply(clip)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program(KIND)
def apply_collects_groups(compile: Compile) -> Results:
    """The parameters of groups of an optimizer, and a rate that is an attribute of each."""
    model = compile(seeded(Net), example_inputs=batch())
    decays, others = list[nn.Parameter](), list[nn.Parameter]()

    def collect(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            (decays if p.dim() > 1 else others).append(p)
            p.rate = 0.1 if isinstance(module, nn.Linear) else 0.05  # type: ignore[attr-defined]

    model.apply(collect)
    groups = [{"params": [p], "lr": p.rate, "weight_decay": 0.1 if k == 0 else 0.0} for k, of in enumerate((decays, others)) for p in of]  # type: ignore[attr-defined]
    optimizer, losses = torch.optim.SGD(groups), []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


def _constant(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            rows, columns = module.weight.shape
            module.weight.copy_(torch.linspace(-1, 1, rows * columns).view(rows, columns) / columns**0.5)
            module.bias.zero_()


@program(KIND)
def groups_by_the_kind_of_module(compile: Compile) -> Results:
    """Weight decay for the weights of Linear only, found by isinstance over named_modules()."""

    class Layered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)

        def hidden(self, x: Tensor) -> Tensor:
            return self.norm(super().hidden(x))

    model = compile(seeded(Layered), example_inputs=batch())
    decayed = [m.weight for _, m in model.named_modules() if isinstance(m, nn.Linear)]
    chosen = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    return {"decayed": len(decayed), **trained(model, optimizer)}


@program(KIND)
def names_of_modules(compile: Compile) -> Results:
    """Names and classes of all parts, and of the parameters."""
    model = compile(seeded(Net), example_inputs=batch())
    train(model, steps=1)
    names = sorted(f"{n}: {type(m).__name__}" for n, m in model.named_modules() if n)
    return {"modules": names, "parameters": [n for n, _ in model.named_parameters()], "head": type(model.head).__name__}


@program(KIND)
def attribute_and_method_of_the_model(compile: Compile) -> Results:
    """A number, a property and a method of the original's class, called on what compile returned."""

    class Described(Net):
        classes = 4

        @property
        def width(self) -> int:
            return self.first.out_features

        def describe(self) -> str:
            return f"{self.classes} classes, {len(self.blocks)} blocks"

    model = compile(seeded(Described), example_inputs=batch())
    train(model, steps=1)
    return {"classes": model.classes, "width": model.width, "text": model.describe()}


@program(KIND)
def part_called_by_itself(compile: Compile) -> Results:
    """model.first(x) and model.logits(x) under no_grad after training."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    with torch.no_grad():
        return {"losses": losses, "first": model.first(batch()[0]), "logits": model.logits(batch()[0])}


@program(KIND)
def frozen_before_compile(compile: Compile) -> Results:
    model = seeded(Net)
    model.first.requires_grad_(False)
    return trained(compile(model, example_inputs=batch()))


@program(KIND, plans=("dp2mb2",))
def frozen_midway(compile: Compile) -> Results:
    """A part is frozen after the first steps: its weights stay, the others go on."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=2)
    for p in model.first.parameters():
        p.requires_grad_(False)
    return {"losses": losses + train(model, optimizer), "state": state(model), "gradients": gradients(model)}


@program(KIND, plans=("dp2mb2",))
def thawed_midway(compile: Compile) -> Results:
    """Only the head is trained at first, then everything."""
    model = seeded(Net)
    for n, p in model.named_parameters():
        p.requires_grad_(n.startswith("head"))
    model = compile(model, example_inputs=batch())
    losses = train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), steps=2)
    for p in model.parameters():
        p.requires_grad_(True)
    return {"losses": losses + train(model, sgd(model)), "state": state(model)}


@program(KIND)
def thawed_by_the_original(compile: Compile) -> Results:
    """The same through the original: original.first.requires_grad_(True)."""
    original = seeded(Net)
    original.first.requires_grad_(False)
    model = compile(original, example_inputs=batch())
    losses = train(model, steps=2)
    original.first.requires_grad_(True)
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND)
def frozen_as_a_whole(compile: Compile) -> Results:
    """model.requires_grad_(False) and back again, as for the other player of a game."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=1)
    model.requires_grad_(False)
    frozen = model(*batch(1)).item()
    model.requires_grad_(True)
    return {"losses": losses + train(model, optimizer), "frozen": frozen, "state": state(model)}


@program(KIND)
def parameter_added_after_compile(compile: Compile) -> Results:
    """A new parameter, registered on what compile returned, is trained in the loss outside."""
    model = compile(seeded(Net), example_inputs=batch())
    model.register_parameter("log_scale", nn.Parameter(torch.zeros(())))
    optimizer, losses = sgd(model), []
    for given in batches():
        optimizer.zero_grad()
        loss = model(*given) * torch.exp(-model.log_scale) + model.log_scale
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "scale": model.log_scale.item(), "state": state(model)}


@program(KIND)
def part_replaced_after_compile(compile: Compile) -> Results:
    """model.head = another Linear, as for fine-tuning."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model, steps=2)
    torch.manual_seed(3)
    model.head = nn.Linear(HIDDEN, 4)
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND)
def part_of_the_original_replaced(compile: Compile) -> Results:
    """The same on the original, after compile and before the first call."""
    original = seeded(Net)
    model = compile(original)
    torch.manual_seed(3)
    original.head = nn.Linear(HIDDEN, 4)
    return trained(model)


@program(KIND)
def block_appended_after_compile(compile: Compile) -> Results:
    """Progressive stacking: another block is appended after the first steps."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model, steps=1)
    torch.manual_seed(3)
    model.blocks.append(Block())
    return {"losses": losses + train(model), "state": state(model)}


@program(KIND)
def weights_tied_after_compile(compile: Compile) -> Results:
    """One block's weight becomes another's: model.blocks[1].up.weight = model.blocks[0].up.weight."""
    model = compile(seeded(Net), example_inputs=batch())
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return trained(model)


@program(KIND)
def parametrised_after_compile(compile: Compile) -> Results:
    """A parametrisation registered after compile."""

    class Bounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    model = compile(seeded(Net), example_inputs=batch())
    nn.utils.parametrize.register_parametrization(model.head, "weight", Bounded())
    return trained(model)


@program(KIND)
def weight_given_to_a_parametrised_layer(compile: Compile) -> Results:
    """As torch's parametrizations take it: what they make of it is the memory of the original from then on (set_)."""

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

        def right_inverse(self, x: Tensor) -> Tensor:
            return x / 2

    def build() -> nn.Module:
        net = Net()
        nn.utils.parametrizations.weight_norm(net.first)
        nn.utils.parametrize.register_parametrization(net.head, "weight", Doubled())
        return net

    model = compile(seeded(build), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer)
    model.first.weight = torch.linspace(-1, 1, 128).view(16, 8)
    model.head.weight = model.head.weight.detach() * 0.5
    losses += train(model, optimizer)
    with torch.no_grad():
        model.blocks[0].up.weight.set_(torch.full((32, 16), 0.1))
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND, plans=("dp2tp2",))
def parametrised_in_each_call(compile: Compile) -> Results:
    """The forward registers a low-rank addition to a frozen weight, and takes it away: adapters of the weights of experts do so."""

    class Added(nn.Module):
        def __init__(self, by: Tensor) -> None:
            super().__init__()
            self.by = by

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.by

    class Adapted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.head.requires_grad_(True)
            self.a = nn.Parameter(torch.randn(HIDDEN, 2) * 0.1)
            self.b = nn.Parameter(torch.randn(2, WIDTH) * 0.1)

        def hidden(self, x: Tensor) -> Tensor:
            parametrize, trains = nn.utils.parametrize, self.first.weight.requires_grad
            parametrize.register_parametrization(self.first, "weight", Added(self.a @ self.b))
            self.first.parametrizations.weight.original.requires_grad_(trains)  # type: ignore[operator, union-attr]
            with parametrize.cached():
                found = super().hidden(x)
            parametrize.remove_parametrizations(self.first, "weight", leave_parametrized=False)
            return found

    return trained(compile(seeded(Adapted), example_inputs=batch()))


@program(KIND)
def weight_norm_before_compile(compile: Compile) -> Results:
    model = seeded(Net)
    nn.utils.parametrizations.weight_norm(model.head)
    return trained(compile(model, example_inputs=batch()))


@program(KIND)
def low_rank_adapters(compile: Compile) -> Results:
    """Frozen weights with trained low-rank additions, put in place before compile."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
            self.b = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + F.linear(F.linear(x, self.a), self.b)

    model: Any = seeded(Net)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    model = compile(model, example_inputs=batch())
    return trained(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))


@program(KIND)
def cast_and_moved(compile: Compile) -> Results:
    """model.double(), model.to("cpu"), model.cpu() after compile, which change nothing."""
    model = compile(seeded(Net), example_inputs=batch())
    model = model.double().to("cpu").cpu()
    return trained(model)


@program(KIND)
def gradients_set_to_none(compile: Compile) -> Results:
    """model.zero_grad() in its forms; gradients of both kinds read afterwards."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = []
    for to_none in (True, False, True):
        model(*batch()).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
        model.zero_grad(set_to_none=to_none)
        losses.append(model(*batch()).item())
    return {"losses": losses, "state": state(model)}
