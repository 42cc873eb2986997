"""The adapter to torch.export: one call of the model to its scalar loss, as an exported graph, or a CaptureError that says why not."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from unittest import mock

import numpy
import torch
from torch import fx, nn
from torch._export import verifier
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor

from autopar.capture.answers import Answers, Leaf, Tape, given_by
from autopar.capture.applied import Function, applied_by, backward_hooks_told, hooks_told, traced_as_kept
from autopar.capture.around import as_called
from autopar.capture.attributes import Attributes
from autopar.capture.cumulative import weighed_by_tensors
from autopar.capture.follow import Ask, AtTheBorder, Registries, follow, storage_of
from autopar.capture.held import Opaque
from autopar.capture.hidden import Hidden
from autopar.capture.infer import states_of_lstms
from autopar.capture.numbers import Numbers, Standing, TracedArray
from autopar.capture.source import in_library, module_of, running_frame
from autopar.capture.state import State
from autopar.capture.varying import Followed, refuse_kept
from autopar.capture.varying import Numbers as NumbersGiven
from autopar.capture.without_data import values
from autopar.errors import CaptureError, NoLoss, NumbersChange, OtherGradients
from autopar.run.hooks import of_all_modules
from autopar.run.outputs import Returned, check_seen, dicts_given, found_in, taken_apart, written_into
from autopar.run.varying import NONE as NONE_VARIES
from autopar.run.varying import Varied, as_tensor

__all__ = [
    "FAILURES", "HOOK", "PREFIX", "End", "Step", "as_exported", "each_output", "export", "left_at", "loss_of", "number_name",
    "objective_of", "own_gradients", "quiet",
]  # fmt: skip

HOOK = "the hook "  # begins the name of one
PREFIX = "model"  # the name of the user's model inside Step
# What the tracing of arbitrary code may end with; torch.export's own errors derive from these.
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class End:
    """How a traced call ended. state: what the model held. returns: what it returned, in words; "" for what is the loss. returned: its
    structure, where its tensors are outputs too. around_loss: its structure where they are not; None if that is not known. answers: what
    it asked of the model's state. shows: a line that prints or logs a tensor; "" if there is none. numbers: the places at which it left a
    number, or an array, that is made of a tensor; arrays: those of arrays. modes: the modules whose training mode it set to another.
    varied: the numbers that it took as inputs. assigned: the names of the buffers that are other tensors after it."""

    state: State
    returns: str
    returned: Returned | None
    answers: Answers
    shows: str = ""
    numbers: frozenset[str] = frozenset()
    arrays: frozenset[str] = frozenset()
    modes: tuple[tuple[nn.Module, bool], ...] = ()
    around_loss: Returned | None = None
    varied: Varied = NONE_VARIES
    assigned: frozenset[str] = frozenset()


class Step(nn.Module):
    """The user's model followed by its loss, as it is traced: forward returns a scalar tensor and has the signature of the model's
    forward. Buffers that the forward assigns anew are written in place instead (see `follow`).

    The loss is what the model returns if that is a scalar tensor, else its `.loss`, `["loss"]` or first element if that is one,
    else loss(output). With outputs (None: if there is no loss): a tuple of the loss and the other tensors that the model returns. A model
    that returns no loss ends in the sum of its outputs: the user makes a loss of them.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, start: State, ends: list[End],
        *, ask: Ask, attributes: Attributes, outputs: bool | None = False, hidden: Hidden | None = None, answers: bool = True,
        sizes: bool = True, leaves: Sequence[str] = (), inputs: Any = ((), {}), numbers: bool = False, varying: NumbersGiven | None = None,
    ) -> None:  # fmt: skip
        """start: what the model holds now. ends: takes how each call ends (torch.export sets attributes of modules back). ask: as of
        AtTheBorder. attributes: of the model's tensors. hidden: what is hidden of the model while it is exported. answers: what its state
        alone decides is told; sizes: also where it is a size. leaves: the places at which a call leaves a tensor, or a number of one, that
        is one of its outputs too. inputs: those of the call, with their values. numbers: those that they alone decide are told. varying:
        numbers and tensors that are inputs of the program: buffers of this module, `number_name` each."""
        super().__init__()
        hidden = hidden or Hidden(())
        self.model = model
        self.training = model.training
        real: dict[Leaf, torch.Tensor] = dict((*model.named_parameters(), *model.named_buffers(), *given_by(inputs).items()))
        real |= values()
        self.tape = tape = Tape(real if answers else {}, sizes=sizes, numbers=numbers)
        self.border = AtTheBorder(model, ask, tape, varies=bool(varying))
        for place, (leaf, value) in enumerate(zip(varying.leaves, varying.values(), strict=True) if varying else ()):
            self.register_buffer(number_name(place), as_tensor(value).detach().clone().requires_grad_(leaf.grad), persistent=False)

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            with hidden.shown():
                return run(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            with torch._C.DisableTorchFunction():  # looking at tensors is nothing to trace, and dear where it is
                registries = Registries(model)
                tape.begin(model, (args, kwargs))
                given = dicts_given(args, kwargs)
            varies: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            followed: Followed | None = None
            if varying:
                with torch._C.DisableTorchFunction():
                    tensors = [self.get_buffer(number_name(place)) for place in range(len(varying.leaves))]
                    followed = Followed(varying, tensors, self.border.numbers)
                    args, kwargs = followed.given(args, kwargs)
                    given, varies = dicts_given(args, kwargs), followed.standing()
            try:
                border = self.border.looking()
                with attributes.told(), hidden.watched(), traced_as_kept(), border, varies, as_called((args, kwargs)) as said:
                    try:
                        output = model(*args, **kwargs)
                    except Standing as error:
                        self._may_vary(error, start)
                        raise
                    left = left_at(leaves, model, loss, start, self.border.numbers)
                    result, own = objective_of(output, loss, outputs, left)
                others: tuple[torch.Tensor, ...] = ()
                returned = None
                with torch._C.DisableTorchFunction():
                    returns = "" if _is_scalar(output) or loss not in (None, each_output) else _describe(output)
                    around_loss = None
                    containers: set[int] = set()
                    if outputs or not own or returns:
                        containers = {id(one.holder) for one in start.held if isinstance(one.holder, list | dict)}
                    number_of = self.border.numbers.made_of
                    if outputs or not own:
                        returned, others = taken_apart(output, result, own_loss=own, held=containers, number_of=number_of)
                        returned = replace(returned, into=written_into(output, given))
                        self._check_leaves(others)
                    elif returns:
                        with contextlib.suppress(CaptureError):  # what the program need not give
                            around_loss, inside = taken_apart(output, result, held=containers, all_of_it=False, number_of=number_of)
                            like = tuple((_known_shape(x), x.dtype) for x in inside)
                            around_loss = replace(around_loss, names=tuple(map(str, range(len(inside)))), like=like)
                    shows = self.border.shows if said else ""
                    varied = followed.ended() if followed is not None else NONE_VARIES
                    end = State.take(model, loss, start)
                    if followed is not None:
                        refuse_kept(output, end)
                    numbers = frozenset(path for path, leaf in end.leaves.items() if self.border.numbers.follows(_number(leaf)))
                    arrays = frozenset(path for path in numbers if type(_number(end.leaves[path])) is TracedArray)
                    modes = registries.modes()
                    assigned = registries.assigned()
                    others_now = frozenset(a.name for a in assigned if storage_of(a.new) != storage_of(a.old))
                    ends.append(End(end, returns, returned, tape.answers(), shows, numbers, arrays, modes, around_loss, varied, others_now))
                    kept = (result, *others, *left, *(a.new for a in assigned), *end.tensors.values())
                    tape.use(kept, "the end of the forward")
                follow(assigned)
            finally:
                registries.restore()
            for _, holds in self.border.asked:
                result = result * holds
            return (result, *others, *left)

        self.forward = forward

    def _may_vary(self, error: Standing, start: State) -> None:
        """NumbersChange if what stands for a number that is made of tensors is left where a number was: as an input of the program, that
        may be computed with."""
        with torch._C.DisableTorchFunction():
            changes = start.changes(State.take(self.model, None, start))
        if found := [c.path for c in changes if type(c.before) in (int, float) and self.border.numbers.is_standing(c.after)]:
            raise NumbersChange(f"{_cannot(self.model)}: {error}", found) from error

    def _check_leaves(self, returned: Sequence[torch.Tensor]) -> None:
        """CaptureError where one of these is a leaf of the forward's own: by it the caller would differentiate."""
        for leaf, line in self.border.leaves:
            if any(x is leaf for x in returned):
                raise CaptureError(
                    f"{_cannot(self.model)}: it returns a tensor that its forward makes require a gradient, by which nothing outside of it "
                    f"can be differentiated\n  at {line}\n  what to do: let the input require a gradient before the call "
                    f"(x = x.requires_grad_()), and differentiate by that"
                )


def number_name(place: int) -> str:
    """The name of the buffer of a Step that is a number that varies, by its place among them."""
    return f"number_{place}"


def _known_shape(x: torch.Tensor) -> tuple[int, ...]:
    """Its shape; of a size that depends on values 1."""
    return tuple(n if type(n) is int else 1 for n in x.shape)


def left_at(
    paths: Sequence[str], model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, start: State,
    numbers: Numbers | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The tensors that a call of the model has left at some places; of a number one of one element, of an array one with its memory.
    CaptureError if there is none at one of them. start: before it. numbers: those of a trace."""
    if not paths:
        return ()
    with torch._C.DisableTorchFunction():
        now = State.take(model, loss, start)
    found = [_tensor_of(now.object_at(path), numbers) for path in paths]
    if missing := [path for path, tensor in zip(paths, found, strict=True) if tensor is None]:
        raise CaptureError(f"{type(model).__name__} leaves a tensor in {missing[0]} in some calls, and not in others")
    return tuple(tensor for tensor in found if tensor is not None)


def _tensor_of(value: Any, numbers: Numbers | None) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if numbers is not None:
        return numbers.tensor_of(value)
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value)
    return as_tensor(value) if type(value) in (int, float) else None


def _number(leaf: object) -> Any:
    return leaf.value if isinstance(leaf, Opaque) else leaf


def objective_of(
    output: Any, loss: Callable[[Any], torch.Tensor] | None, outputs: bool | None, left: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, bool]:
    """The scalar that a program ends in, and whether it is the loss. Without one, and if outputs is not False: the sum of all outputs,
    whose gradients are those of any loss that is made of them, with other cotangents. left: further outputs, of which no gradient goes
    through some."""
    try:
        if loss is each_output:
            each_output(output)
        return loss_of(output, loss), True
    except NoLoss:
        ends = (*found_in(output), *(x for x in left if x.requires_grad))
        tensors = (x for x in ends if isinstance(x, torch.Tensor) and x.dtype.is_floating_point)
        sums = [x.sum() for x in tensors] if outputs is not False else []
        if not sums:
            if outputs is not False:
                check_seen(output)
            raise
        return functools.reduce(torch.add, sums), False


def each_output(output: Any) -> NoReturn:
    """In the place of a loss: none of the outputs is it, and the user makes one of all of them."""
    raise NoLoss(f"no loss is made of {_describe(output)}: each of its tensors is trained")


def loss_of(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    candidates = [output]
    with contextlib.suppress(AttributeError, LookupError):  # of a dict whose items are attributes too
        candidates.append(output.loss)
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    found = next((c for c in candidates if _is_scalar(c)), None)
    if found is None and loss is not None:
        found = loss(output)
        if not _is_scalar(found):
            raise CaptureError(f"loss= returned {_describe(found)}; it must return a floating tensor of shape [] to differentiate")
    if found is None:
        raise NoLoss(
            f"no loss to capture: the forward returned {_describe(output)}, not a scalar tensor nor anything with one as .loss, "
            f"['loss'] or first element. Give the model its labels, or pass loss=fn so that fn(output) is the scalar loss"
        )
    return found


def _is_scalar(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 0 and x.dtype.is_floating_point


def _describe(x: object) -> str:
    if isinstance(x, torch.Tensor):
        return f"a {str(x.dtype).removeprefix('torch.')} tensor of shape {list(x.shape)}"
    if isinstance(x, Mapping):
        return f"{type(x).__name__} with keys {list(x)}"
    return f"{type(x).__name__} of {len(x)} elements" if isinstance(x, (tuple, list)) else type(x).__name__


def export(step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Hidden) -> ExportedProgram:
    """torch.export of one call, in its training form (operators as the user called them, in-place ones included). hidden: what it need not
    see of the model."""
    _refuse_hooks(step.model)
    printed = io.StringIO()  # where torch.export fails it prints the graph so far
    try:
        with warnings.catch_warnings(), torch.enable_grad(), contextlib.redirect_stderr(printed), quiet(), hidden.hiding(), _no_more():
            warnings.simplefilter("ignore")  # of the tracing, about the user's model; the user's own run shows them
            with _themselves(), weighed_by_tensors(), states_of_lstms(), _constants_of_regions():
                exported = torch.export.export(step, args, dict(kwargs), strict=False)
    except FAILURES as e:
        if line := step.border.differentiates:
            raise OtherGradients(f"{_cannot(step.model)}\n  at {line}: it asks for gradients inside of the forward") from e
        raise _failed(step, e) from e
    sys.stderr.write(printed.getvalue())
    return _without_vmap(exported)


@contextlib.contextmanager
def _themselves() -> Iterator[None]:
    """Inside, the code of a model that has a module under two names sees its modules themselves: torch's tracer would show it others in
    their place, of types of its own, to keep the names apart. (The tracer is private; there is no other way.)"""
    tracer = proxy_tensor._ModuleStackTracer
    shows = vars(tracer)["getattr"]
    tracer.getattr = proxy_tensor.PythonKeyTracer.getattr  # type: ignore[method-assign]
    try:
        yield
    finally:
        tracer.getattr = shows  # type: ignore[method-assign]


class _Line:
    """In the place of torch's `CapturedTraceback`: of the calls that lead to an operator the user's own forward alone, by its line, which
    is all that is asked for. Torch notes all of them for each operator, with their source."""

    @staticmethod
    def extract() -> _Line:
        return _Line()

    def summary(self) -> traceback.StackSummary:
        frame = running_frame("forward")
        calls = [] if frame is None else [traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, "forward", line="")]
        return traceback.StackSummary.from_list(calls)


@contextlib.contextmanager
def _no_more() -> Iterator[None]:
    """Inside, torch does no more for a graph than is asked of it: operators note their `_Line` and the fake tensors they give, and a graph
    becomes code when it is called, which none is. (The names are private, and are a quarter of the time of an export; there is no other
    way.)"""
    with mock.patch.object(fx.proxy, "CapturedTraceback", _Line), mock.patch.object(proxy_tensor, "_extract_tensor_metadata", _nothing):
        with _use_lazy_graph_module(True):
            yield


def _nothing(value: object) -> None:
    """Of a fake tensor: it is noted itself."""


@contextlib.contextmanager
def _constants_of_regions() -> Iterator[None]:
    """Inside, torch's check of a graph passes constants over that are no tensors, where a region (of autocast) is given them: what indexes
    in a vmap is described by one. (The check is private; there is no other way.)"""
    check = verifier._check_val

    def checked(node: fx.Node) -> None:
        if node.op != "placeholder" or "val" in node.meta:
            check(node)

    verifier._check_val = checked
    try:
        yield
    finally:
        verifier._check_val = check


def _without_vmap(exported: ExportedProgram) -> ExportedProgram:
    """Regions of torch.vmap (masks made from a function of positions) are replaced by the batched operators they stand for."""
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    names = (getattr(n.target, "__module__", "") for graph in graphs for n in graph.nodes if n.op == "call_function")
    if not any(str(name).startswith("torch._functorch") for name in names):
        return exported
    batched = exported.run_decompositions({})
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in batched.graph_signature.output_specs):
        raise CaptureError("a forward that uses torch.vmap also changes buffers\n  what to do: replace torch.vmap by batched operators")
    return batched


@contextlib.contextmanager
def as_exported() -> Iterator[None]:
    """Inside, code that asks torch.compiler whether it is exported is told that it is. (The flags are private; there is no other way.)"""
    flags = {name: getattr(torch.compiler, name) for name in ("_is_compiling_flag", "_is_exporting_flag")}
    try:
        for name in flags:
            setattr(torch.compiler, name, True)
        yield
    finally:
        for name, before in flags.items():
            setattr(torch.compiler, name, before)


def _refuse_hooks(model: nn.Module) -> None:
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    hooked += [name or "the model" for name, m in model.named_modules() if m._backward_hooks and not m._is_full_backward_hook]
    of_all = of_all_modules()
    hooked += ["all modules"] if of_all["_backward_hooks"] or of_all["_backward_pre_hooks"] else []
    if hooked:
        raise CaptureError(
            f"{type(model).__name__} has gradient hooks on {', '.join(hooked[:5])}, which a captured graph does not run\n  what to do: "
            f"remove them, and register them on the parameters of the parallel module"
        )


@contextlib.contextmanager
def own_gradients() -> Iterator[list[str]]:
    """Collects the names of the custom autograd functions and tensor hooks that run inside: a graph of operators does not show
    what they make of gradients."""
    used: list[str] = []

    def noted(cls: Function, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        used.append(cls.__qualname__)
        return apply(*args, **kwargs)

    def told(of: object, *hooks: Any) -> None:
        used.extend(f"{HOOK}{getattr(hook, '__qualname__', hook)}" for hook in hooks)

    with applied_by(noted), hooks_told(told), backward_hooks_told(lambda of, hooks: told(of, *hooks)):
        yield used


_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._subclasses.fake_tensor")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch's tracers do not log: their failures are raised as well, and a CaptureError explains them."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before):
            logger.disabled = disabled


def _failed(step: Step, error: BaseException) -> CaptureError:
    failed = CaptureError(_explain(step.model, error))
    failed.asks_inputs = step.tape.untold
    return failed


def _explain(model: nn.Module, error: BaseException) -> str:
    what = _cannot(model)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not in_library(f.filename)]
    if frames:
        what += f"\n  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return f"{what}\n  {reason}\n  what to do: {_remedy(error)}"


def _cannot(model: nn.Module) -> str:
    return f"cannot capture {type(model).__name__}"


def _transforms(error: BaseException) -> bool:
    """Whether an error came from inside of a transform of torch.func."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.endswith(os.path.join("torch", "_functorch", "eager_transforms.py")) for name in files)


def _remedy(error: BaseException) -> str:
    text = f"{type(error).__name__} {error}"
    ran = [module_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(isinstance(m, nn.RNNBase) for m in ran) and "must be tuple of ints" in text:
        return (
            "how a packed sequence is cut depends on the lengths, which are values of a tensor: let a submodule pack, call the recurrent "
            "layer, and return a tensor of fixed shape (h[-1], or what pad_packed_sequence gives with total_length=); it runs as it is "
            "written"
        )
    if "DataDependent" in text or "data-dependent" in text or "unbacked" in text.lower():
        return (
            "the line above lets values of a tensor decide what runs or which shape results, which one graph cannot hold; use "
            "torch.where or masking, a fixed capacity, or a Python number known before the call"
        )
    if "vmap" in text or "functorch" in text or _transforms(error):
        return (
            "replace torch.vmap or torch.func transforms in the forward by batched operators, and gradients by torch.autograd.grad(..., "
            "create_graph=True) in a submodule, which then runs as it is written"
        )
    if "process group has not been initialized" in text or "group cannot be None" in text:
        return (
            "every rank computes with the global batch, as one process: leave collectives, ranks and their number out of the forward, or "
            "ask torch.distributed.is_initialized() before, which is False in it"
        )
    if "sparse" in text.lower():
        return "a program is of dense tensors: let the model hold and take these (.to_dense()), or indices and values"
    if "deepcopy" in text or "numpy" in text.lower():
        return "keep the forward in torch: no numpy and no copies of tensors by Python on the way to the loss"
    return (
        "check that model(*args, **kwargs) runs on the example inputs; if it does, the line above is what torch.export cannot trace: "
        "rewrite it with torch operators, or set the model's option that avoids it (another attention or expert implementation)"
    )
