"""What a forward says while it runs, on standard output and to a logger; what the loop asks a module and its parameters for by torch's own
tools: the arguments of its forward, the nodes that add its gradients up, derivatives in the forward direction."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.modules import module as of_modules

from benchmarks._traps_kit import Compile, Logits, Net, Results, batch, batches, program, samples, seeded, sgd, state, train, trained


class _Talking(Net):
    def __init__(self) -> None:
        super().__init__()
        self.greeted = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.greeted:
            print("the first batch")
            self.greeted = True
        print("samples:", len(x), end="; ")
        return super().forward(x, y)


@program("elsewhere")
def sizes_that_are_printed(compile: Compile) -> Results:
    """In the first call one line more; batches of two sizes."""
    model, out = compile(seeded(_Talking), example_inputs=batch()), io.StringIO()
    with contextlib.redirect_stdout(out):
        losses = train(model, inputs=[batch(0), batch(1), batch(2, 24), batch(3)])
    return {"losses": losses, "out": out.getvalue()}


class _Showing(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        print("mean:", x.mean(0))
        return super().forward(x, y)


@program("elsewhere")
def values_that_are_printed(compile: Compile) -> Results:
    model, out = compile(seeded(_Showing), example_inputs=batch()), io.StringIO()
    with contextlib.redirect_stdout(out):
        losses = train(model)
    return {"losses": losses, "out": out.getvalue()}


_LOG = logging.getLogger("trap.heard")


class _Logging(Net):
    def hidden(self, x: Tensor) -> Tensor:
        _LOG.info("%d samples", len(x))
        return super().hidden(x)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname} {record.getMessage()}")


@program("elsewhere")
def sizes_that_are_logged(compile: Compile) -> Results:
    """The level is raised after two steps."""
    kept = _Kept()
    _LOG.handlers, _LOG.propagate = [kept], False
    _LOG.setLevel(logging.INFO)
    model = compile(seeded(_Logging), example_inputs=batch())
    losses = train(model, steps=2)
    _LOG.setLevel(logging.WARNING)
    return {"losses": losses + train(model, steps=1), "messages": kept.messages}


class _Noting(Net):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("called; ")
        return super().forward(x, y)


@program("elsewhere")
def file_that_is_written(compile: Compile) -> Results:
    """Each call adds a line to a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls"
        model = compile(seeded(_Noting, path), example_inputs=batch())
        return {"losses": train(model), "calls": path.read_text(encoding="utf-8")}


@program("modules")
def arguments_by_their_names(compile: Compile) -> Results:
    """The loop gives the model what its forward has arguments for."""
    model = compile(seeded(Net), example_inputs=batch())
    names = inspect.signature(model.forward).parameters
    optimizer, losses = sgd(model), []
    for x, y in batches():
        given = {"x": x, "y": y, "text": "..."}
        optimizer.zero_grad()
        loss = model(**{name: given[name] for name in names})
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "names": list(names), "state": state(model)}


@program("gradients")
def hooks_of_several_gradients(compile: Compile) -> Results:
    """One hook for the gradients of a part, called when all have come, and one when the first has."""
    model, norms, first = compile(seeded(Net), example_inputs=batch()), list[float](), list[tuple[int, ...]]()

    def together(grads: object) -> None:
        norms.append(sum(g.norm().item() for g in grads))  # type: ignore[attr-defined]

    register_multi_grad_hook(tuple(model.head.parameters()), together)
    register_multi_grad_hook((model.first.weight,), lambda grad: first.append(tuple(grad.shape)), mode="any")
    return {**trained(model), "norms": norms, "first": first}


@program("gradients")
def hooks_of_several_gradients_before_compile(compile: Compile) -> Results:
    """The same, registered before compile, and before the first call of a model that is planned then."""
    model, norms = seeded(Net), list[float]()

    def together(grads: object) -> None:
        norms.append(sum(g.norm().item() for g in grads))  # type: ignore[attr-defined]

    register_multi_grad_hook(tuple(model.head.parameters()), together)
    model = compile(model)
    register_multi_grad_hook((model.first.weight, model.blocks[0].up.bias), together)
    return {**trained(model), "norms": norms}


class _TwoLosses(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.logits(x)
        return F.cross_entropy(logits, y), 0.1 * logits.square().mean()


@program("gradients")
def losses_given_to_autograd_at_once(compile: Compile) -> Results:
    """The tuple that the model returns, to torch.autograd.backward, with weights too, and to torch.autograd.grad."""
    model = compile(seeded(_TwoLosses), example_inputs=batch())
    optimizer, losses = sgd(model), []
    for k, given in enumerate(batches()):
        optimizer.zero_grad()
        both = model(*given)
        if k % 3 == 0:
            torch.autograd.backward(both)
        elif k % 3 == 1:
            torch.autograd.backward(both, (torch.tensor(1.0), torch.tensor(0.5)))
        else:
            params = list(model.parameters())
            for param, grad in zip(params, torch.autograd.grad(both, params), strict=True):
                param.grad = grad
        optimizer.step()
        losses += [x.item() for x in both]
    return {"losses": losses, "state": state(model)}


@program("gradients")
def forward_hook_of_all_modules(compile: Compile) -> Results:
    """It counts the calls of each class while one pass is run."""
    model, calls = compile(seeded(Net), example_inputs=batch()), Counter[str]()
    losses = train(model, steps=2)
    with of_modules.register_module_forward_hook(lambda module, args, output: calls.update([type(module).__name__])):
        losses += train(model, steps=1)
    return {"losses": losses, "calls": sorted(calls.items()), "state": state(model)}


@program("gradients")
def steps_where_gradients_are_added_up(compile: Compile) -> Results:
    """By hooks on the nodes of autograd that add them up, as it was done before there were hooks for that."""
    model, nodes, losses = compile(seeded(Net), example_inputs=batch()), [], []
    for param in model.parameters():
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        optimizer = torch.optim.SGD([param], lr=0.1)

        def stepped(*_: object, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        node.register_hook(stepped)
        nodes.append(node)
    for given in batches():
        loss = model(*given)
        loss.backward()
        losses.append(loss.item())
    return {"losses": losses, "state": state(model)}


@program("gradients")
def gradients_by_their_edges(compile: Compile) -> Results:
    model = compile(seeded(Net), example_inputs=batch())
    edges = [get_gradient_edge(param) for param in model.parameters()]
    loss = model(*batch())
    found = torch.autograd.grad(loss, edges)
    return {"loss": loss.item(), "gradients": found}


@program("gradients")
def slopes_in_a_direction(compile: Compile) -> Results:
    """Forward-mode differentiation, by dual tensors."""
    model = compile(seeded(Logits), example_inputs=(samples(),))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(samples(), torch.ones_like(samples()))))
    return {"logits": found.primal, "slopes": found.tangent}


@program("gradients")
def slopes_by_a_function(compile: Compile) -> Results:
    """The same by torch.func.jvp, and each sample by itself by torch.func.vmap."""
    model = compile(seeded(Logits), example_inputs=(samples(),))
    logits, slopes = torch.func.jvp(model, (samples(),), (torch.ones_like(samples()),))
    return {"logits": logits, "slopes": slopes, "one": torch.func.vmap(lambda x: model(x[None])[0])(samples())}
