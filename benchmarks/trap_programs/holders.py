"""Programs in which something held the parameters before the model was compiled: an optimizer, the original, a reference."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._traps_kit import Compile, Logits, Net, Results, batch, batches, program, samples, seeded, sgd, state, train, trained

KIND = "holders"


@program(KIND)
def optimizer_before_compile(compile: Compile) -> Results:
    """The optimizer is made from the original's parameters."""
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(compile(model, example_inputs=batch()), optimizer)


@program(KIND)
def optimizer_before_compile_planned_later(compile: Compile) -> Results:
    """The same, and the plan is made on the first call."""
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(compile(model), optimizer)


@program(KIND)
def optimizer_before_the_first_call(compile: Compile) -> Results:
    """The optimizer is made between compile and the first call."""
    model = compile(seeded(Net))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program(KIND)
def groups_before_compile(compile: Compile) -> Results:
    """Groups with and without weight decay, by the number of dims, and a scheduler, all before compile."""
    model = seeded(Net)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return trained(compile(model, example_inputs=batch()), optimizer, before_step=scheduler.step)


@program(KIND)
def groups_after_compile(compile: Compile) -> Results:
    """The same groups from the compiled module, by names and dims."""
    model = compile(seeded(Net), example_inputs=batch())
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("weight") and p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]
    return trained(model, torch.optim.AdamW(groups, lr=1e-2))


@program(KIND)
def two_optimizers_before_compile(compile: Compile) -> Results:
    """One for the head, one for the rest."""
    model = seeded(Net)
    head = torch.optim.SGD(model.head.parameters(), lr=0.2)
    rest = torch.optim.AdamW([*model.first.parameters(), *model.blocks.parameters()], lr=1e-2)
    compiled = compile(model, example_inputs=batch())
    return trained(compiled, head, before_step=lambda: (rest.step(), rest.zero_grad()))


@program(KIND)
def original_used_after_training(compile: Compile) -> Results:
    """The model that was given to compile is evaluated by its own forward."""
    original = seeded(Net)
    losses = train(compile(original, example_inputs=batch()))
    with torch.no_grad():
        return {"losses": losses, "evaluated": original(*batch(9)).item()}


@program(KIND, remedy_of="original_used_after_training")
def a_copy_used_after_training(compile: Compile) -> Results:
    """The trained state is loaded into a model of the same class."""
    model = compile(seeded(Net), example_inputs=batch())
    losses = train(model)
    other = Net()
    other.load_state_dict(state(model))
    with torch.no_grad():
        return {"losses": losses, "evaluated": other(*batch(9)).item()}


@program(KIND)
def original_saved_after_training(compile: Compile) -> Results:
    """original.state_dict() after training, loaded into another model."""
    original = seeded(Net)
    losses = train(compile(original, example_inputs=batch()))
    other = Net()
    other.load_state_dict(copy.deepcopy(original.state_dict()))
    return {"losses": losses, "state": state(other)}


@program(KIND)
def original_loaded_after_compile(compile: Compile) -> Results:
    """A checkpoint is loaded into the original after compile, before training."""
    original = seeded(Net)
    model = compile(original, example_inputs=batch())
    torch.manual_seed(1)
    original.load_state_dict(Net().state_dict())
    return trained(model)


@program(KIND, remedy_of="original_loaded_after_compile")
def module_loaded_after_compile(compile: Compile) -> Results:
    """The checkpoint is loaded into the compiled module, by the original's keys."""
    model = compile(seeded(Net), example_inputs=batch())
    torch.manual_seed(1)
    model.load_state_dict(Net().state_dict())
    return trained(model)


@program(KIND)
def original_loaded_before_the_first_call(compile: Compile) -> Results:
    """A checkpoint is loaded into the original after a compile that has not planned yet."""
    original = seeded(Net)
    model = compile(original)
    torch.manual_seed(1)
    original.load_state_dict(Net().state_dict())
    return trained(model)


@program(KIND)
def original_changed_after_compile(compile: Compile) -> Results:
    """The original's head is set to zero after compile."""
    original = seeded(Net)
    model = compile(original, example_inputs=batch())
    with torch.no_grad():
        original.head.weight.zero_()
    return trained(model)


@program(KIND)
def reference_to_a_weight(compile: Compile) -> Results:
    """A weight is remembered before compile and its norm is logged during training."""
    original = seeded(Net)
    weight = original.head.weight
    model = compile(original, example_inputs=batch())
    optimizer, losses, norms = sgd(model), [], []
    for given in batches():
        losses += train(model, optimizer, inputs=[given])
        norms.append(weight.detach().norm().item())
    return {"losses": losses, "norms": norms}


@program(KIND)
def tied_weights(compile: Compile) -> Results:
    """A weight used in two places, and an optimizer made before compile."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 16)
            self.middle = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
            self.out = nn.Linear(16, 10, bias=False)
            self.out.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = self.out(self.middle(self.table(ids)))
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    torch.manual_seed(3)
    ids = [(torch.randint(10, (12, 6)),) for _ in range(3)]
    model = seeded(Tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(compile(model, example_inputs=ids[0]), optimizer, inputs=ids)


@program(KIND)
def optimizer_resumed(compile: Compile) -> Results:
    """The optimizer's state_dict goes into a new optimizer midway."""
    model = compile(seeded(Net), example_inputs=batch())
    first = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, first)
    second = torch.optim.AdamW(model.parameters(), lr=1e-2)
    second.load_state_dict(first.state_dict())
    return {"losses": losses + train(model, second), "state": state(model)}


@program(KIND)
def compiled_after_some_steps(compile: Compile) -> Results:
    """The model and its optimizer have trained on one process before compile."""
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer)
    return {"losses": losses, **trained(compile(model, example_inputs=batch()), optimizer)}


@program(KIND)
def parameter_added_to_the_optimizer_later(compile: Compile) -> Results:
    """add_param_group with the head's parameters after two steps."""
    model = compile(seeded(Net), example_inputs=batch())
    optimizer = torch.optim.SGD([*model.first.parameters(), *model.blocks.parameters()], lr=0.1)
    losses = train(model, optimizer, steps=2)
    model.zero_grad()
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.2})
    return {"losses": losses + train(model, optimizer), "state": state(model)}


@program(KIND)
def hooks_that_hold_the_model(compile: Compile) -> Results:
    """As summaries and profilers of models register them: on every layer, with the whole model in their closures, for one call."""
    model = compile(seeded(Logits), example_inputs=batch()[:1])
    losses = train(lambda x, y: F.cross_entropy(model(x), y), sgd(model), steps=2)
    sizes: list[tuple[int, ...]] = []

    def registered(layer: nn.Module) -> Any:
        def hook(_: nn.Module, given: Any, returned: Tensor) -> None:
            if layer is not model and model is not None:
                sizes.append(tuple(returned.shape))

        return layer.register_forward_hook(hook)

    handles = [registered(layer) for layer in model.modules() if not list(layer.children())]
    with torch.no_grad():
        model(samples(5))
    for handle in handles:
        handle.remove()
    losses += train(lambda x, y: F.cross_entropy(model(x), y), sgd(model), steps=2)
    return {"losses": losses, "sizes": sizes, "state": state(model)}


class Scaled(nn.Module):
    """Reads parameters that are registered from a list, and from a dict of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scales = Net(), []
        for k in range(2):
            scale = nn.Parameter(torch.full((8,), 1.0 + k))
            self.scales.append(scale)
            setattr(self, f"scale_{k}", scale)
        self.tables = {"first": (self.net.first.bias, "bias")}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x * self.scales[0] + self.scales[1], y) + self.tables["first"][0].square().mean()


def _looked_at_again(compile: Compile, build: Callable[[], nn.Module]) -> Results:
    """With evaluations of another size, for which the model is looked at once more."""
    model = compile(seeded(build), example_inputs=batch())
    optimizer = sgd(model)
    losses = train(model, optimizer, steps=2)
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            losses.append(model(*(t[:6] for t in batch())).item())
        model.train()
        losses += train(model, optimizer, steps=2)
        model.scales = list(model.scales)  # equal, in another object
    optimizer.zero_grad()
    forms = vars(model).get("_forms")  # of the parallel module
    return {
        "losses": losses, "state": state(model), "held": [model.scales[k] is getattr(model, f"scale_{k}") for k in range(2)],
        "once": forms is None or forms._captures == 1,
    }  # fmt: skip


@program(KIND)
def parameters_in_a_list_too(compile: Compile) -> Results:
    return _looked_at_again(compile, Scaled)


class Kept:
    def __init__(self, scale: nn.Parameter) -> None:
        self.scale = scale


TABLE: dict[str, nn.Parameter] = {}


class ScaledFromElsewhere(Scaled):
    """Reads them from objects, a closure, a partial function, the default of another, a set, a reference, a global."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.scales
        self.kept, self.options = [Kept(first)], SimpleNamespace(pair=(first, second))
        self.get, self.given = lambda: second, functools.partial(torch.add, first)
        self.default, self.all, self.second = lambda x, by=second: x * by, {first, second}, weakref.ref(second)
        TABLE.update(first=first)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x * self.kept[0].scale + self.options.pair[1] + self.get()
        h = self.default(self.given(h)) * TABLE["first"] - self.second()
        return self.net(h, y) + sum(scale.square().mean() for scale in self.all)


@program(KIND)
def parameters_in_other_objects_too(compile: Compile) -> Results:
    return _looked_at_again(compile, ScaledFromElsewhere)
