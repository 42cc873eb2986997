"""What people do in a training loop, each as an action of a script of `_mixed`: it goes on from where the one before it left off."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks._mixed_models import CLASSES, Critic, Design, Mixed, sample
from benchmarks._traps_kit import Compile, gradients, state
from benchmarks.trap_programs.training import folder_of_all

__all__ = ["ACTIONS", "OPTIMIZERS", "Run"]

BATCH, EPS = 12, 1e-4


@dataclass
class Run:
    """A script as it runs. found: what is compared, in order."""

    design: Design
    compile: Compile
    make: str  # of OPTIMIZERS
    model: Any = None
    optimizer: Any = None
    schedule: Any = None
    critic: Any = None
    of_critic: Any = None
    average: dict[str, Tensor] = field(default_factory=dict)
    at: int = 0  # batches that were given
    found: list[Any] = field(default_factory=list)

    def compiled(self, seed: int) -> Any:
        torch.manual_seed(seed)
        x, y = sample(self.design, 0, BATCH)
        given = (x,) if self.design.form == "logits" else (x, y)
        return self.compile(Mixed(self.design), example_inputs=given, outputs=self.design.outputs)

    def begin(self) -> None:
        self.model = self.compiled(0)
        self.optimize()

    def optimize(self, rate: float = 1.0) -> None:
        self.optimizer = OPTIMIZERS[self.make](self.model, rate)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)

    def next(self, size: int = BATCH) -> tuple[Tensor, Tensor]:
        self.at += 1
        return sample(self.design, self.at, size)

    def loss(self, x: Tensor, y: Tensor, **more: Any) -> Tensor:
        """As the script makes it of what a call returns. more: for a model that makes its loss itself."""
        form = self.design.form
        made = self.model(x) if form == "logits" else self.model(x, y, **more)
        if form == "logits":
            return F.cross_entropy(made, y)
        if form == "loss" or isinstance(made, Tensor):
            return made
        return made["loss"] if form == "dict" else made[0]

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        form = self.design.form
        if form in ("logits", "loss"):
            return self.model(x)
        made = self.model(x, y)
        return made["logits"] if form == "dict" else made[1]

    def descend(self, loss_of: Callable[[], Tensor]) -> None:
        """A step of the optimizer along the gradients of a loss."""
        self.optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        self.optimizer.step()
        self.found.append(loss.item())

    def backward(self, size: int = BATCH, divided: float = 1.0) -> None:
        loss = self.loss(*self.next(size))
        (loss / divided).backward()
        self.found.append(loss.item())


def _parts(model: Any, rate: float) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.02 * rate},
    ]


# eps: gradients that are zero but for rounding must not be made large by it.
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda model, rate: torch.optim.SGD(model.parameters(), lr=0.1 * rate),
    "momentum": lambda model, rate: torch.optim.SGD(model.parameters(), lr=0.05 * rate, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda model, rate: torch.optim.AdamW(model.parameters(), lr=0.01 * rate, eps=EPS),
    "groups": lambda model, rate: torch.optim.AdamW(_parts(model, rate), lr=0.01 * rate, eps=EPS),
    "trainable": lambda model, rate: torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=0.01 * rate, eps=EPS, amsgrad=True
    ),
    "rmsprop": lambda model, rate: torch.optim.RMSprop(model.parameters(), lr=0.01 * rate, eps=EPS),
    "adagrad": lambda model, rate: torch.optim.Adagrad(model.parameters(), lr=0.05 * rate, eps=EPS),
}


ACTIONS: dict[str, Callable[[Run], object]] = {}


def action(do: Callable[[Run], object]) -> Callable[[Run], object]:
    ACTIONS[do.__name__] = do
    return do


@action
def step(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward()
    run.optimizer.step()


@action
def steps(run: Run) -> None:
    for _ in range(2):
        step(run)


@action
def accumulated(run: Run) -> None:
    run.optimizer.zero_grad()
    for _ in range(3):
        run.backward(divided=3)
    run.optimizer.step()


@action
def clipped(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward()
    run.found.append(float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)))
    run.optimizer.step()


@action
def clipped_by_value(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    run.backward()
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.01)
    run.optimizer.step()


@action
def short_batch(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward(size=7)
    run.optimizer.step()


@action
def small_batch(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward(size=4)
    run.optimizer.step()


@action
def evaluated(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.found.append(run.loss(*sample(run.design, 50, BATCH)).item())
    run.model.train()


@action
def predicted(run: Run) -> None:
    run.model.eval()
    with torch.inference_mode():
        run.found.append(run.logits(*sample(run.design, 51, 8)).argmax(-1).tolist())
    run.model.train()


@action
def evaluated_in_training_mode(run: Run) -> None:
    with torch.no_grad():
        run.found.append(run.loss(*run.next()).item())


@action
def logits_beside_the_loss(run: Run) -> None:
    """Accuracy of the batch that is trained on, where the call returns both."""
    if run.design.form in ("loss", "logits") or run.design.outputs == "loss":
        step(run)
        return
    x, y = run.next()
    run.optimizer.zero_grad()
    made = run.model(x, y)
    loss, logits = (made["loss"], made["logits"]) if run.design.form == "dict" else made
    loss.backward()
    run.optimizer.step()
    run.found.append([loss.item(), (logits.argmax(-1) == y).double().mean().item(), logits.detach().clone()])


@action
def gradients_read(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward()
    run.found.append(gradients(run.model))
    run.optimizer.step()


@action
def gradients_changed(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward()
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5).add_(p.detach(), alpha=0.01)
    run.optimizer.step()


@action
def gradients_left(run: Run) -> None:
    """A backward pass without a step, whose gradients stay."""
    run.backward()


@action
def gradients_dropped(run: Run) -> None:
    run.backward()
    run.model.zero_grad()


@action
def scheduled(run: Run) -> None:
    run.schedule.step()
    run.found.append([group["lr"] for group in run.optimizer.param_groups])


@action
def rate_set(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


@action
def middle_frozen(run: Run) -> None:
    run.model.middle.requires_grad_(not run.model.middle.weight.requires_grad)


@action
def first_unfrozen(run: Run) -> None:
    run.model.first.requires_grad_(True)


@action
def only_the_head(run: Run) -> None:
    """Everything else is frozen for a step."""
    named = [(p, p.requires_grad) for p in run.model.parameters()]
    run.model.requires_grad_(False)
    run.model.head.requires_grad_(True)
    step(run)
    for p, before in named:
        p.requires_grad_(before)


@action
def another_optimizer(run: Run) -> None:
    run.optimize(0.5)


@action
def head_drawn_anew(run: Run) -> None:
    torch.manual_seed(77 + run.at)
    run.model.head.reset_parameters()


@action
def weights_clamped(run: Run) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.clamp_(-0.3, 0.3)


@action
def weight_scaled(run: Run) -> None:
    with torch.no_grad():
        run.model.middle.weight.mul_(0.9)


@action
def row_zeroed(run: Run) -> None:
    with torch.no_grad():
        run.model.head.weight[1] = 0.0


@action
def norms_read(run: Run) -> None:
    run.found.append({n: p.detach().norm().item() for n, p in run.model.named_parameters()})


@action
def state_read(run: Run) -> None:
    run.found.append(state(run.model))


@action
def saved_and_loaded(run: Run) -> None:
    """Into a new model, with its optimizer."""
    folder = folder_of_all("mixed")
    autopar.save(folder, run.model, run.optimizer, step=run.at)
    trains = [p.requires_grad for p in run.model.parameters()]
    kept = run.model.scale
    run.model = run.compiled(5)
    for p, grad in zip(run.model.parameters(), trains, strict=True):
        p.requires_grad_(grad)
    run.model.scale = kept
    run.optimize()
    run.found.append(autopar.load(folder, run.model, run.optimizer)["step"])
    if not torch.distributed.is_initialized():
        shutil.rmtree(folder)


@action
def best_put_back(run: Run) -> None:
    """The state before two steps is loaded again."""
    kept = state(run.model)
    steps(run)
    run.model.load_state_dict(kept)


@action
def averaged(run: Run) -> None:
    """An exponential average of the whole state, by name."""
    for name, t in state(run.model).items():
        if t.dtype.is_floating_point:
            run.average[name] = t if name not in run.average else run.average[name].lerp(t, 0.3)
    run.found.append({n: t.norm().item() for n, t in run.average.items()})


@action
def average_in_place(run: Run) -> None:
    """Parameters are moved towards what they were before a step."""
    kept = [p.detach().clone() for p in run.model.parameters()]
    step(run)
    with torch.no_grad():
        for p, before in zip(run.model.parameters(), kept, strict=True):
            p.lerp_(before, 0.5)


@action
def copied(run: Run) -> None:
    """A deep copy goes on, with an optimizer of its own."""
    run.model = copy.deepcopy(run.model)
    run.optimize()


@action
def penalty(run: Run) -> None:
    run.descend(lambda: run.loss(*run.next()) + 1e-3 * sum(p.square().sum() for p in run.model.parameters()))


@action
def two_losses(run: Run) -> None:
    """One backward pass of two calls."""
    run.descend(lambda: run.loss(*run.next()) + 0.5 * run.loss(*run.next(size=8)))


@action
def loss_twice(run: Run) -> None:
    run.optimizer.zero_grad()
    loss = run.loss(*run.next())
    loss.backward(retain_graph=True)
    (0.1 * loss).backward()
    run.found.append(loss.item())
    run.optimizer.step()


@action
def skipped(run: Run) -> None:
    """A step that is left out since its loss is not below a bound."""
    run.optimizer.zero_grad()
    loss = run.loss(*run.next())
    loss.backward()
    if loss.item() < 1.3:
        run.optimizer.step()
    run.found.append(loss.item())


@action
def adversarial(run: Run) -> None:
    """A step against the gradient of the input, where the input has one."""
    if run.design.body == "text":
        step(run)
        return
    x, y = run.next()
    x.requires_grad_(True)
    (grad,) = torch.autograd.grad(run.loss(x, y), x)
    run.optimizer.zero_grad()
    loss = run.loss((x + 0.1 * grad.sign()).detach(), y)
    loss.backward()
    run.optimizer.step()
    run.found.append([loss.item(), grad.norm().item()])


@action
def hooked(run: Run) -> None:
    """A hook on a layer writes down what it sees for one step, where outputs are asked for."""
    if run.design.outputs == "loss":
        step(run)
        return
    seen: list[Tensor] = []
    handle = run.model.middle.register_forward_hook(lambda layer, given, made: seen.append(made.detach().square().mean()))
    step(run)
    handle.remove()
    run.found.append([x.item() for x in seen])


@action
def hooked_gradient(run: Run) -> None:
    handle = run.model.head.weight.register_hook(lambda grad: 2 * grad)
    step(run)
    handle.remove()


@action
def scale_set(run: Run) -> None:
    run.model.scale = 0.5 + 0.1 * (run.at % 3)


@action
def attributes_read(run: Run) -> None:
    """What calls have left."""
    if "kept" in run.design.extras and hasattr(run.model, "last"):
        run.found.append(run.model.last.detach().clone())
    if "listed" in run.design.extras:
        run.found.append(list(run.model.seen))
    if "counter" in run.design.extras:
        run.found.append(run.model.steps.item())


@action
def in_evaluation_mode(run: Run) -> None:
    """A step with norms as in evaluation."""
    run.model.eval()
    step(run)
    run.model.train()


@action
def norm_in_evaluation_mode(run: Run) -> None:
    run.model.norm.eval()
    step(run)


@action
def closure(run: Run) -> None:
    given = run.next()

    def of() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(*given)
        loss.backward()
        return loss

    run.found.append(run.optimizer.step(of).item())


@action
def scaled_loss(run: Run) -> None:
    """A fixed loss scale, taken out of the gradients by hand."""
    run.optimizer.zero_grad()
    loss = run.loss(*run.next())
    (loss * 128).backward()
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.div_(128)
    run.optimizer.step()
    run.found.append(loss.item())


@action
def layer_rate(run: Run) -> None:
    """The head's parameters get a group of their own."""
    head = {id(p) for p in run.model.head.parameters()}
    rest = [p for p in run.model.parameters() if id(p) not in head and p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": list(run.model.head.parameters()), "lr": 0.03}]
    run.optimizer = torch.optim.Adam(groups, lr=0.01, eps=EPS)
    run.schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)


@action
def another_length(run: Run) -> None:
    """Sequences of nine, once."""
    x, y = sample(run.design, 200 + run.at, BATCH, 9)
    run.descend(lambda: run.loss(x, y))


@action
def plain_copy(run: Run) -> None:
    """What was trained is loaded into the plain class, which predicts."""
    plain = Mixed(run.design)
    plain.load_state_dict(state(run.model))
    plain.scale = run.model.scale
    plain.eval()
    with torch.no_grad():
        run.found.append(plain(sample(run.design, 52, BATCH)[0]))


@action
def optimizer_state_moved(run: Run) -> None:
    """Another optimizer of the same kind takes the state of the one before."""
    kept = run.optimizer.state_dict()
    run.optimize()
    run.optimizer.load_state_dict(kept)


@action
def optimizer_state_read(run: Run) -> None:
    for p in run.model.head.parameters():
        held = run.optimizer.state.get(p, {})
        run.found.append({k: float(v.detach().double().norm()) for k, v in held.items() if isinstance(v, Tensor)})


@action
def updated_by_hand(run: Run) -> None:
    """Without an optimizer, by torch.autograd.grad."""
    trained = [p for p in run.model.parameters() if p.requires_grad]
    loss = run.loss(*run.next())
    grads = torch.autograd.grad(loss, trained, allow_unused=True)
    with torch.no_grad():
        for p, grad in zip(trained, grads, strict=True):
            if grad is not None:
                p.sub_(0.05 * grad)
    run.found.append(loss.item())


@action
def sharpness(run: Run) -> None:
    """Two passes: the second where the loss of the first rises."""
    given = run.next()
    run.optimizer.zero_grad()
    run.loss(*given).backward()
    moved = [(p, 0.5 * p.grad) for p in run.model.parameters() if p.grad is not None]
    with torch.no_grad():
        for p, way in moved:
            p.add_(way)
    run.optimizer.zero_grad()
    loss = run.loss(*given)
    loss.backward()
    with torch.no_grad():
        for p, way in moved:
            p.sub_(way)
    run.optimizer.step()
    run.found.append(loss.item())


@action
def as_one_vector(run: Run) -> None:
    """All parameters as one vector, which is shrunk and put back."""
    trained = list(run.model.head.parameters())
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(trained)
        run.found.append(vector.norm().item())
        nn.utils.vector_to_parameters(0.95 * vector, trained)


@action
def all_drawn_anew(run: Run) -> None:
    torch.manual_seed(88 + run.at)

    def initialise(layer: nn.Module) -> None:
        if type(layer) is nn.Linear and layer.bias is not None:
            nn.init.normal_(layer.bias, std=0.1)

    run.model.apply(initialise)


@action
def layer_hooked_for_good(run: Run) -> None:
    run.model.middle.register_forward_hook(lambda layer, given, made: 0.9 * made)


@action
def input_hooked(run: Run) -> None:
    handle = run.model.head.register_forward_pre_hook(lambda layer, given: (given[0].clamp(-0.5, 0.5),))
    step(run)
    handle.remove()


@action
def wrong_batch(run: Run) -> None:
    """A batch that the first layer does not take, which the loop survives; where it takes any, nothing."""
    x, y = run.next()
    if run.design.body == "text":
        return
    try:
        run.loss(x[..., :5], y)
    except Exception:  # noqa: BLE001  (whatever it is)
        run.found.append("refused")


@action
def backward_to_the_head(run: Run) -> None:
    run.optimizer.zero_grad()
    loss = run.loss(*run.next())
    loss.backward(inputs=[p for p in run.model.head.parameters() if p.requires_grad])
    run.optimizer.step()
    run.found.append(loss.item())


@action
def gradients_set_to_none(run: Run) -> None:
    """Those of the first layer, before the step."""
    run.optimizer.zero_grad()
    run.backward()
    for p in run.model.first.parameters():
        p.grad = None
    run.optimizer.step()


@action
def gradient_row_zeroed(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward()
    if run.model.head.weight.grad is not None:
        run.model.head.weight.grad[2] = 0.0
    run.optimizer.step()


@action
def weight_assigned(run: Run) -> None:
    run.model.head.weight.data = torch.linspace(-0.3, 0.3, run.model.head.weight.numel()).view(run.model.head.weight.shape)


@action
def state_changed_and_loaded(run: Run) -> None:
    run.model.load_state_dict({n: 0.9 * t if t.dtype.is_floating_point else t for n, t in state(run.model).items()})


@action
def head_loaded_alone(run: Run) -> None:
    kept = {n: t + 0.01 for n, t in state(run.model).items() if n.startswith("head.")}
    run.found.append(sorted(run.model.load_state_dict(kept, strict=False).unexpected_keys))


@action
def hidden_by_its_method(run: Run) -> None:
    """Features of a batch, without gradients."""
    run.model.eval()
    with torch.no_grad():
        run.found.append(run.model.hidden(sample(run.design, 53, BATCH)[0]))
    run.model.train()


@action
def layer_by_itself(run: Run) -> None:
    with torch.no_grad():
        run.found.append(run.model.head(torch.ones(3, run.model.head.in_features)))


@action
def same_batch_again(run: Run) -> None:
    """Three steps on one batch."""
    given = run.next()
    for _ in range(3):
        run.descend(lambda: run.loss(*given))


@action
def loss_scaled_by_autograd(run: Run) -> None:
    """backward(gradient=...)."""
    run.optimizer.zero_grad()
    loss = run.loss(*run.next())
    loss.backward(torch.tensor(0.25))
    run.optimizer.step()
    run.found.append(loss.item())


@action
def weights_of_samples_in_the_loss(run: Run) -> None:
    """Of a model that returns logits: a loss of each sample, weighted. Of any other: the loss to a power."""
    run.optimizer.zero_grad()
    x, y = run.next()
    if run.design.form == "logits":
        loss = (F.cross_entropy(run.model(x), y, reduction="none") * torch.linspace(0.5, 1.5, len(y))).mean()
    else:
        loss = run.loss(x, y) ** 1.5
    loss.backward()
    run.optimizer.step()
    run.found.append(loss.item())


@action
def norms_updated(run: Run) -> None:
    """Calls in training mode without gradients, for statistics alone."""
    with torch.no_grad():
        for _ in range(2):
            run.loss(*run.next())


@action
def smoothed(run: Run) -> None:
    """A number among the arguments, another in each call."""
    for k in range(2):
        x, y = run.next()
        run.descend(functools.partial(run.loss, x, y, smoothing=0.05 * (k + run.at % 3)))


@action
def weighted(run: Run) -> None:
    """A tensor that other calls do not give."""
    run.descend(lambda: run.loss(*run.next(), weights=torch.linspace(0.5, 1.5, BATCH)))


@action
def against_a_critic(run: Run) -> None:
    """Two models and their optimizers in turns, where the call returns logits."""
    if run.design.form != "logits":
        step(run)
        return
    if run.critic is None:
        torch.manual_seed(3)
        run.critic = run.compile(Critic(), example_inputs=(torch.zeros(BATCH, CLASSES),), outputs="trained")
        run.of_critic = torch.optim.Adam(run.critic.parameters(), lr=0.01, eps=EPS)
    x, y = run.next()
    real = 4.0 * F.one_hot(y, CLASSES).to(torch.get_default_dtype())
    made = run.model(x)
    run.of_critic.zero_grad()
    judged = F.softplus(-run.critic(real)).mean() + F.softplus(run.critic(made.detach())).mean()
    judged.backward()
    run.of_critic.step()
    run.optimizer.zero_grad()
    loss = F.cross_entropy(made, y) + 0.1 * F.softplus(-run.critic(made)).mean()
    loss.backward()
    run.optimizer.step()
    run.found.append([judged.item(), loss.item(), state(run.critic)])


@action
def distilled(run: Run) -> None:
    """Towards a plain copy of what the model was at the beginning, which every rank has whole."""
    torch.manual_seed(0)
    teacher = Mixed(run.design).eval()
    x, y = run.next()
    with torch.no_grad():
        taught = teacher(x).softmax(-1)
    run.optimizer.zero_grad()
    made = run.model(x) if run.design.form == "logits" else None
    loss = run.loss(x, y) if made is None else F.cross_entropy(made, taught)
    loss.backward()
    run.optimizer.step()
    run.found.append(loss.item())


@action
def mixed_up(run: Run) -> None:
    """Inputs of two samples in one."""
    if run.design.body == "text":
        step(run)
        return
    x, y = run.next()
    run.optimizer.zero_grad()
    loss = 0.7 * run.loss(0.7 * x + 0.3 * x.flip(0), y)
    loss = loss + 0.3 * run.loss(0.7 * x + 0.3 * x.flip(0), y.flip(0))
    loss.backward()
    run.optimizer.step()
    run.found.append(loss.item())
