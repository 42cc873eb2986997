"""The border of capture: what a model's code does besides computing, and what it takes from outside of the model, is followed or
refused."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from autopar import generators
from autopar.capture.answers import NONE, Answers
from autopar.capture.around import as_called
from autopar.capture.as_before import values_as_before
from autopar.capture.attributes import Asked, Attributes
from autopar.capture.calls import Call, Calls, call_twice
from autopar.capture.changing import refuse_changing
from autopar.capture.draws import OTHER_DRAWS, drawn_outside
from autopar.capture.export import FAILURES, HOOK, End, Step, as_exported, export, objective_of, own_gradients
from autopar.capture.given import Inputs, copied
from autopar.capture.held import ABSENT, REGISTERED, Opaque, child, describe
from autopar.capture.hidden import Hidden
from autopar.capture.left import Left, is_read
from autopar.capture.reach import LruCache
from autopar.capture.region_ops import asked
from autopar.capture.regions import Regions
from autopar.capture.state import Change, State
from autopar.capture.trace import Trace, flatten
from autopar.capture.varying import Numbers
from autopar.errors import AutoparError, CaptureError, DrawsOutside
from autopar.run import outside_draws
from autopar.run.outputs import Returned
from autopar.run.plain import plainly
from autopar.run.varying import NONE as NONE_VARIES
from autopar.run.varying import Varied

__all__ = ["Stopped", "TracedCall", "check_border", "observed", "traced"]

Loss = Callable[[Any], torch.Tensor] | None


class Stopped(Exception):
    """The model's forward ends with an exception of the user's, and has left something. Nothing else is tried then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCall:
    """The traced call of a model. changes: what it changed outside of registries. own_gradients: custom autograd functions and hooks
    that ran. drawn: the generators other than torch's that it drew from. answers: what it asked of the model's state. shows: a line that
    prints or logs a tensor; "" if there is none. attributes: what it asked for of parameters and buffers. numbers: the places at which it
    left a number, or an array, that is made of a tensor; arrays: those of arrays. modes: the modules whose training mode it set to
    another. around_loss, varied, assigned: as of End."""

    exported: ExportedProgram
    changes: tuple[Change, ...]
    own_gradients: tuple[str, ...]
    drawn: tuple[str, ...]
    returns: str = ""
    returned: Returned | None = None
    answers: Answers = NONE
    shows: str = ""
    attributes: tuple[Asked, ...] = ()
    numbers: frozenset[str] = frozenset()
    arrays: frozenset[str] = frozenset()
    modes: tuple[tuple[nn.Module, bool], ...] = ()
    around_loss: Returned | None = None
    varied: Varied = NONE_VARIES
    assigned: frozenset[str] = frozenset()

    @property
    def hooks(self) -> list[str]:
        return [name for name in self.own_gradients if name.startswith(HOOK)]


def traced(
    model: nn.Module, loss: Loss, inputs: Inputs, start: State, *, outputs: bool | None = False, hidden: Hidden | None = None,
    answers: bool = True, sizes: bool = True, leaves: Sequence[str] = (), numbers: bool = False, varying: Numbers | None = None,
) -> TracedCall:  # fmt: skip
    """torch.export of one call, after which everything is as before: attributes, globals, and caches of functions. outputs: of all
    that the model returns; None: if it returns no loss. hidden: what need not be seen of the model. answers: what its state alone decides
    may be asked for; sizes: also where it is a size. leaves, numbers, varying: as of Step."""
    hidden = hidden or Hidden(())
    ends: list[End] = []
    random = generators.states()
    # torch.export knows the values of plain tensors of one element, and writes to these themselves where the forward does
    of_one = [t for t in start.tensors.values() if t.numel() == 1 and not t.is_meta]
    attributes = Attributes(model, start.reached.names)
    step = Step(
        model, loss, start, ends, ask=asked, attributes=attributes, outputs=outputs, hidden=hidden, answers=answers, sizes=sizes,
        leaves=leaves, inputs=inputs, numbers=numbers, varying=varying,
    )  # fmt: skip
    try:
        with values_as_before(of_one), own_gradients() as unseen, drawn_outside() as drawn:
            exported = export(step, *inputs, hidden)
        changes = tuple(c for c in start.changes(ends[-1].state) if not (_stands_in(c) or _stands_still(c, start)))
        if not generators.same(random):  # a trace draws nothing
            raise CaptureError(
                f"the forward of {type(model).__name__} sets the seed of torch's generator, so that every call draws the same numbers\n"
                f"  what to do: set it before training; keep numbers that do not change in a buffer"
            )
    except Exception as error:
        if isinstance(error, (AutoparError, *FAILURES)):
            raise
        with torch._C.DisableTorchFunction():
            left = [c for c in start.changes(State.take(model, loss, start)) if not _stands_in(c)]
        if left:
            raise Stopped(
                f"the forward of {type(model).__name__} ends with {type(error).__name__}, and has changed {left[0]} before, which a graph "
                f"does not\n  what to do: let it return; or call the original, inside of `with model.full_parameters():` (model.original)"
            ) from error
        raise
    finally:
        step.tape.forget()
        generators.restore(random)
        start.restore()
        _clear_traced(start.reached.caches)
    return TracedCall(
        exported=exported, changes=changes, own_gradients=tuple(unseen), drawn=tuple(drawn), returns=ends[-1].returns,
        returned=ends[-1].returned, answers=ends[-1].answers, shows=ends[-1].shows, attributes=attributes.asked,
        numbers=ends[-1].numbers, arrays=ends[-1].arrays, modes=ends[-1].modes, around_loss=ends[-1].around_loss, varied=ends[-1].varied,
        assigned=ends[-1].assigned,
    )  # fmt: skip


def _stands_in(change: Change) -> bool:
    """Whether the change is that of a region's forward for the time of the trace."""
    return bool(getattr(getattr(change.after, "value", change.after), "stands_in", False))


def _stands_still(change: Change, start: State) -> bool:
    """Whether an attribute holds the parameter or buffer that it held, for which another tensor stood in the registry for the time of the
    trace."""
    if change.before is not REGISTERED:
        return False
    for held in start.held:
        items = held.items
        pairs = items.items() if isinstance(items, dict) else enumerate(items) if isinstance(items, tuple) else ()
        if any(value is change.after and child(held, key) == change.path for key, value in pairs):
            return True
    return False


def _clear_traced(caches: list[Any]) -> None:
    """Empties the function caches that kept a tensor without data: of a trace, or on the meta device."""
    for cache in caches:
        if isinstance(cache, LruCache) and _keeps_no_data(gc.get_referents(cache), 3):
            cache.cache_clear()


_PLAIN = frozenset({str, int, float, bool, set, frozenset, object, type(None), type, FunctionType, ModuleType})  # not looked into


def _keeps_no_data(values: Iterable[Any], depth: int) -> bool:
    for value in values:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or value.is_meta):
            return True
        if not depth:
            continue
        inside: Iterable[Any] = ()
        if isinstance(value, (tuple, list, dict)):
            inside = value.values() if isinstance(value, dict) else value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = (getattr(value, f.name, None) for f in dataclasses.fields(value))
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            inside = vars(value).values()
        if _keeps_no_data(list(inside), depth - 1):
            return True
    return False


def observed(
    model: nn.Module, loss: Loss, inputs: Inputs, start: State, found: TracedCall, trainable: tuple[torch.Tensor, ...] | None,
    *, outputs: bool = False, frozen: Mapping[str, torch.Tensor] | None = None, scales: tuple[float, ...] = (), leaves: Sequence[str] = (),
    appended: Sequence[list[Any]] = (), reseed: bool = True, varying: Numbers | None = None, as_written: bool = False,
    anew: frozenset[str] = frozenset(),
) -> Calls | None:  # fmt: skip
    """The model called twice: to be compared with the program, which needs gradients of `trainable`; without these (None: no data, or
    no wish to compare) only where the trace saw that a call changes something. None if there is nothing to see. frozen, scales, leaves,
    appended, reseed, varying, anew: as of `call_twice`. as_written: some of it runs so, with its hooks."""
    if trainable is not None:
        return call_twice(
            model, loss, inputs, start, trainable, traced=found.changes, compare=True, outputs=outputs, frozen=frozen, scales=scales,
            answers=found.answers, leaves=leaves, appended=appended, numbers=found.numbers, arrays=found.arrays,
            reseed=reseed, returned=found.returned, varied=found.varied, varying=varying, hooked=bool(found.hooks) or as_written,
            anew=anew,
        )  # fmt: skip
    if not found.changes:
        return None
    try:
        return call_twice(
            model, loss, inputs, start, traced=found.changes, outputs=outputs, frozen=frozen, answers=found.answers, appended=appended,
            numbers=found.numbers, arrays=found.arrays, returned=found.returned, varied=found.varied, varying=varying, anew=anew,
        )  # fmt: skip
    except CaptureError as e:
        if e.__cause__ is None:
            raise
        kept = [c for c in found.changes if not (isinstance(c.after, torch.Tensor) and c.before in (ABSENT, None))]
        if kept and _sets_up(model, loss, inputs, start, found, outputs=outputs):
            return Calls(calls=(), settled=tuple(kept), written=(), counted=(), left=Left((), frozenset(), {}, ()))
        refuse_changing(type(model).__name__, kept, (), given=False)  # it cannot run without data: what the trace saw must do
        return None


def _sets_up(model: nn.Module, loss: Loss, inputs: Inputs, start: State, found: TracedCall, *, outputs: bool) -> bool:
    """Whether a model that cannot run without data, but as it is exported, changes something in its first call alone, and computes the same
    in the next."""
    try:
        first = traced(model, loss, copied(inputs), start, outputs=outputs)
        with outside_draws.from_seed(0), torch.enable_grad(), as_exported():
            args, kwargs = copied(inputs)
            with as_called((args, kwargs)), contextlib.suppress(*FAILURES):  # it may ask for a value behind what it sets up
                objective_of(model(*args, **kwargs), loss, outputs)
        later = State.take(model, loss, start)
        if [str(c) for c in start.changes(later)] != [str(c) for c in found.changes]:
            return False
        second = traced(model, loss, copied(inputs), later, outputs=outputs)
    except (CaptureError, *FAILURES):
        return False
    finally:
        start.restore()
    return not second.changes and _operators(first) == _operators(second)


def _operators(call: TracedCall) -> list[tuple[str, str, str, str]]:
    return [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in call.exported.graph.nodes]


def check_border(
    model: nn.Module, loss: Loss, inputs: Inputs, start: State, found: TracedCall, trace: Trace, calls: Calls | None, *, checked: bool,
    again: Callable[[], Calls | None],
) -> tuple[str, ...]:  # fmt: skip
    """CaptureError for state that is neither in a buffer nor a cache, and for random numbers that torch did not draw. The paths at
    which each call leaves a tensor. checked: the calls were made on real tensors, and are compared with the program. again: makes them
    once more, where Python and numpy draw as they do outside."""
    if calls is None:
        written: tuple[str, ...] = ()
    else:
        written = calls.written
        _clear_traced(start.reached.caches)
    files: tuple[type, ...] = (io.IOBase,) if checked else ()
    iterators = [(path, x.value) for path, x in start.leaves.items() if isinstance(x, Opaque) and isinstance(x.value, Iterator)]
    for path, value in iterators:
        if (path.rpartition(".")[2] in start.reached.names or " " in path) and not isinstance(value, files):
            raise CaptureError(
                f"{path} is an iterator ({describe(start.leaves[path])}) that does not tell how far it has got: whether calls of "
                f"{trace.name} take from it cannot be seen\n  what to do: let the loop take from it, and give the forward what it took; "
                f"keep no iterator where the forward can reach it"
            )
    if not checked:
        flags = [c for c in found.changes if type(c.before) is type(c.after) in (bool, str) and is_read(c.path, start)]
        if flags:
            raise CaptureError(
                f"the first call of {trace.name} changes {flags[0]}, and whether later calls compute the same cannot be seen without data\n"
                f"  what to do: call the model once before compiling it, or capture with real (not meta) tensors"
            )
    _check_constants(trace, start, set(written))
    if found.drawn:
        _check_draws(model, loss, inputs, start, found, trace, calls if checked else None, again)
    return written


def _check_constants(trace: Trace, start: State, written: set[str]) -> None:
    """A tensor that each call replaces must not be what the program holds as a constant."""
    constants = {_storage(trace.tensors[b.value]) for b in trace.buffers if b.fqn is None}
    kept = [path for path, tensor in start.tensors.items() if path in written and _storage(tensor) in constants]
    if kept:
        refuse_changing(trace.name, [Change(path, start.leaves[path], ABSENT) for path in kept], (), given=False)


def _storage(tensor: torch.Tensor) -> int:
    with plainly():  # what the loop has made of parts may stand where each call puts a tensor
        return int(tensor.untyped_storage()._cdata)


def _same_constants(a: Trace, b: Trace) -> bool:
    """Whether the constants are equal. Of two without data, those are that an attribute or a closure holds, not those made in the call."""
    pairs = [(x.value, a.tensors[x.value], b.tensors[y.value]) for x, y in zip(a.buffers, b.buffers, strict=True) if x.fqn is None]
    return all(name in a.outside if x.is_meta or y.is_meta else torch.equal(x, y) for name, x, y in pairs)


def _values(call: Call) -> tuple[torch.Tensor | None, ...]:
    """What is compared of two calls. A last layer of zeros hides what is before it from the loss, and not from its gradient."""
    return (call.loss, *call.returned, *call.gradients)


def _same_value(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()) or not a.numel():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()), equal_nan=True)


def _check_draws(
    model: nn.Module, loss: Loss, inputs: Inputs, start: State, found: TracedCall, trace: Trace, calls: Calls | None,
    again: Callable[[], Calls | None],
) -> None:  # fmt: skip
    """Numbers drawn from Python or numpy are frozen in the program: other numbers must make no difference. again: as of `check_border`."""
    outputs = found.returned is not None
    none = Regions(model, loss, inputs)  # which need data
    plain: Trace | None = None

    def differs(words: tuple[int, ...]) -> bool:
        nonlocal plain
        if calls is not None:
            with outside_draws.from_seed(words):
                others = again()
            assert others is not None
            pairs = zip(others.calls, calls.calls, strict=True)
            return not all(all(map(_same_value, _values(one), _values(other))) for one, other in pairs)
        if plain is None:  # each call by itself, where `found` has one for many
            plain = flatten(model, traced(model, loss, copied(inputs), start, outputs=outputs).exported, start, none)
        with outside_draws.from_seed(words):
            drawn = flatten(model, traced(model, loss, copied(inputs), start, outputs=outputs).exported, start, none)
        return [t.op for t in plain.ops] != [t.op for t in drawn.ops] or not _same_constants(plain, drawn)

    if any(map(differs, OTHER_DRAWS if calls is not None else OTHER_DRAWS[:3])):
        raise DrawsOutside(
            f"what {trace.name} computes depends on random numbers drawn from {' and '.join(found.drawn)}, which a graph holds as they "
            f"were when it was traced\n  what to do: draw them with torch, and let torch.where choose by them; or draw them in a "
            f"function of a file, which returns a tensor or an array of a fixed shape, or in a submodule: these run as they are written"
            f"; or before the call, and give it a tensor of them; or set the probability to zero"
        )
