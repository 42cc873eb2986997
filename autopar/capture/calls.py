"""The user's model itself, called twice in a row on the example inputs: its losses, gradients and buffers after each call, and what
else its code changed.

Of what a call changes, four kinds are no obstacle. What the second call leaves as the first made it is a cache. A tensor under an
attribute of a module that every call replaces, and that no call reads before it does so, is an output of the call, and is listed. To a
number that is counted and not read the parallel module adds too. Random generators of Python and numpy may be drawn from as long as the
draws do not reach the loss. All else that goes on changing is state that a graph does not have, and is refused.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.answers import NONE, Answers
from autopar.capture.appended import appended_between, only_appended_to
from autopar.capture.around import as_called
from autopar.capture.counted import counts_between, not_read, only_added_to
from autopar.capture.export import FAILURES, left_at, objective_of
from autopar.capture.follow import storage_of
from autopar.capture.held import ABSENT, Opaque, Shape, same
from autopar.capture.left import Left, left_by, of_a_module
from autopar.capture.made import in_the_state, made_of
from autopar.capture.numbers import numbers_like
from autopar.capture.once import Followed, kept_by_what_happens_once, numbers_kept, numbers_once, refuse_once, said_once
from autopar.capture.said import Said, heard
from autopar.capture.source import first_line
from autopar.capture.standing import around, begin_anew, is_in
from autopar.capture.state import Change, State
from autopar.capture.varying import Numbers
from autopar.errors import CaptureError, NumbersChange, TensorsChange
from autopar.run.outputs import Returned, dicts_given, taken_apart, written_into
from autopar.run.outside_draws import from_seed
from autopar.run.part import is_part
from autopar.run.varying import NONE as NONE_VARIES
from autopar.run.varying import Kind, Number, Varied

__all__ = [
    "Call", "Calls", "call_twice", "copied", "differentiated", "gradients_of", "left_as_it_was", "refuse_changing",
    "values_as_before",
]  # fmt: skip

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call. gradients: of the asked parameters, in their order. of_inputs: of the inputs that require one, in the order of their
    leaves. scaled: both, of the loss multiplied by a number. buffers: by name, after it, with the frozen parameters that it writes to.
    returned: the tensors that the model returned beside the loss, where they were asked for. numbers: that it was given, of those that
    vary."""

    loss: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]
    of_inputs: tuple[torch.Tensor | None, ...]
    scaled: Mapping[float, tuple[torch.Tensor | None, ...]]
    buffers: Mapping[str, torch.Tensor]
    returned: tuple[torch.Tensor, ...] = ()
    numbers: tuple[Number | torch.Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """calls: in order. settled: what the first call changed and the second left. written: what each call replaces by a new tensor
    and none reads before that. counted: numbers to which each call adds, lists to which it appends, and numbers that it makes of tensors,
    which none reads. left: what a call leaves of all these. set_back: the buffers that were given their first values again before the
    second call, so that it was answered as the first was (numbers are, too). made: those of `settled` that are buffers of the state_dict,
    by name. said: what each prints and logs. by_hooks: where hooks leave something in backward, which no call reads."""

    calls: tuple[Call, ...]
    settled: tuple[Change, ...]
    written: tuple[str, ...]
    counted: tuple[str, ...]
    left: Left
    set_back: frozenset[str] = frozenset()
    made: Mapping[str, torch.Tensor] = field(default_factory=dict)
    said: tuple[Sequence[Said], ...] = ((), ())
    by_hooks: frozenset[str] = frozenset()


def copied(inputs: Inputs) -> Inputs:
    """The inputs with every tensor cloned: a forward may write to them. Those that require a gradient are leaves that do, each for itself;
    of others that are one tensor the clones are one too, of which a forward may ask."""
    clones: dict[int, torch.Tensor] = {}

    def clone(t: torch.Tensor) -> torch.Tensor:
        if t.requires_grad:
            return _clone(t).requires_grad_()
        if id(t) not in clones:
            clones[id(t)] = _clone(t)
        return clones[id(t)]

    made: Inputs = pytree.tree_map_only(torch.Tensor, clone, inputs)
    return made


def apart(inputs: Inputs) -> Inputs:
    """The inputs, of which none is the same tensor as one before it: in another call they may be two."""
    seen: set[int] = set()

    def one(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in seen:
            seen.add(id(t))
            return t
        return _clone(t).requires_grad_(t.requires_grad)

    made: Inputs = pytree.tree_map_only(torch.Tensor, one, inputs)
    return made


def _clone(t: torch.Tensor) -> torch.Tensor:
    """That lies in memory as the tensor does, unless entries of it are at one place."""
    made = t.detach().clone()
    steps = sorted((stride, n) for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1)
    one_place_each = all(step >= n * least for (least, n), (step, _) in zip(((1, 1), *steps), steps, strict=False))
    if made.stride() == t.stride() or t.device.type == "meta" or not one_place_each:
        return made
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(made)


def differentiated(inputs: Inputs) -> list[torch.Tensor]:
    """The inputs that require a gradient, in the order of their leaves."""
    return [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]


def call_twice(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State, parameters: tuple[torch.Tensor, ...] = (),
    *, traced: tuple[Change, ...] = (), reseed: bool = True, compare: bool = False, outputs: bool = False,
    frozen: Mapping[str, torch.Tensor] | None = None, scales: tuple[float, ...] = (), answers: Answers = NONE,
    leaves: Sequence[str] = (), appended: Sequence[list[Any]] = (), numbers: Collection[str] = (), arrays: Collection[str] = (),
    returned: Returned | None = None, varied: Varied = NONE_VARIES, varying: Numbers | None = None, hooked: bool = False,
    anew: Collection[str] = (),
) -> Calls:  # fmt: skip
    """Calls the model twice, and leaves everything as it was. start: a State of it now. traced: what the trace of a call changed. compare:
    gradients are taken, of `parameters` and of the inputs that require one. outputs: what else the model returns is kept too. reseed:
    Python and numpy draw as they do for the program that is compared; else as the caller has set them. frozen: the frozen parameters to
    which the program writes, by name. scales: by which the loss is multiplied for further gradients. answers: what the trace was told of
    the model's state: the second call is told the same. leaves: places of which the tensors that a call leaves there are outputs too.
    appended: lists to which each call appends, and which are empty before. numbers: the places at which the trace left a number that is
    made of a tensor, or an array; arrays: those of arrays. returned: what the trace returned. varied: the numbers that were inputs of the
    trace; varying: gives them. hooked: hooks run in backward, as they do in the program: what they leave is in none of the states. anew:
    attributes and closures in which the second call finds again what the first did.

    Raises Appended for other such lists, CaptureError if the model goes on changing what is neither buffer nor cache, or writes to its
    inputs or to other parameters.
    """
    frozen = frozen or {}
    calls, states, writes, into, said = list[Call](), [start], [_writes(model)], list[frozenset[str]](), list[Sequence[Said]]()
    first_values = _copies(_held(model, frozen, answers.names))
    set_back, by_hooks = frozenset[str](), frozenset[str]()
    moved_before = {name: p for name, p in model.named_parameters() if name in answers.written_names}
    with _as_before(model, start, (*frozen.values(), *moved_before.values())):
        for number in (0, 1):
            for items in appended:
                items.clear()
            if number and answers.changed_of(model):
                set_back = _set_back(_held(model, frozen, answers.names), first_values)
            given = copied(inputs)
            if number and anew:
                begin_anew(start, states[1], anew)
            now = varying.detached() if varying else ()
            if number and varying and varied.changed(now):
                now = varying.set_back(calls[0].numbers)
            made = _made(states) if number else {}
            watch = _Reads(made.values()) if made else contextlib.nullcontext()
            moving = _Writes(frozen) if frozen else contextlib.nullcontext()
            scaled = {}
            own_errors = functools.partial(_own_errors, model, number, _attached(*states) if number else None)
            for scale in scales if compare else ():
                with own_errors(), left_as_it_was(model, loss), from_seed(number, outside=reseed):
                    scaled[scale] = _scaled(model, loss, inputs, start, parameters, scale, outputs=outputs, leaves=leaves)
            with own_errors(), torch.enable_grad(), from_seed(number, outside=reseed):
                wanted = (*parameters, *differentiated(given)) if compare else ()
                dicts = dicts_given(*given)
                before, versions = _marks(given), {name: p._version for name, p in model.named_parameters()}
                with watch, moving, as_called(given) as heard:
                    said.append(heard)
                    output = model(*given[0], **given[1])
                    left_there = left_at(leaves, model, loss, start)
                    result, own = objective_of(output, loss, outputs, left_there)
                after = State.take(model, loss, start) if hooked else None
                with _plain_as_before(after) if after is not None else contextlib.nullcontext():
                    found = gradients_of(result, wanted)
                    by_hooks |= after.grown_in(State.take(model, loss, start)) if after is not None else frozenset()
            _check_inputs(given, before, written_into(output, dicts) if outputs else None)
            _check_parameters(model, versions, {*frozen, *moved_before})
            buffers = _copies({**dict(model.named_buffers(remove_duplicate=False)), **frozen})
            n = len(parameters)
            others = taken_apart(output, result, own_loss=own, number_of=numbers_like(returned))[1] if outputs else ()
            others = tuple(t.detach().clone() for t in (*others, *left_there))
            call = Call(
                loss=result.detach(), gradients=found[:n], of_inputs=found[n:], scaled=scaled, buffers=buffers, returned=others,
                numbers=now,
            )  # fmt: skip
            calls.append(call)
            states.append(State.take(model, loss, start) if after is None else after)
            writes.append(_writes(model))
            into.append(moving.names() if isinstance(moving, _Writes) else frozenset())
        if by_hooks:
            _refuse_read(model, loss, inputs, start, calls[1], parameters, by_hooks, reseed=reseed, outputs=outputs, leaves=leaves)
        read = {path for path, t in made.items() if watch.has_read(t)} if isinstance(watch, _Reads) else set()
        _, first, second = states
        moved = {c.path: c for c in first.changes(second)}
        followed = _moved_as_traced(type(model).__name__, varied, calls, (first, second), numbers)
        if followed and varying:
            _moved_as_differentiated(model, loss, inputs, varied, varying.set_back(calls[0].numbers))
        moved = {path: change for path, change in moved.items() if path not in followed}
        settled = tuple(c for c in start.changes(first) if not (c.path in moved or c.path in followed or is_in(c.path, anew)))

        def further() -> Any:
            begin_anew(start, second, anew)
            if varying:
                varying.detached()
            return _called(model, loss, inputs)

        counts = [count for count in counts_between(start, first, second, traced) if count.path not in {*followed, *numbers}]
        if counts:
            whole = [c for c in counts if type(c.seen[1]) is int]
            tried = (counts, whole) if whole != counts else (counts,)
            counts = next((x for some in tried if (x := only_added_to(some, further))), [])
        for count in counts:
            del moved[count.path]
        grown = [one for one in appended_between(start, first, second) if not any(one.items is items for items in appended)]
        if lists := only_appended_to(grown, further):
            raise lists
        paths = frozenset(held.path for held in first.held if any(held.holder is items for items in appended))
        vary = {x.place.path for x in varied.leaves if x.place is not None}
        made_of_tensors = {path for path in numbers if _is_in(path, paths) or path in vary}
        taken = functools.partial(State.take, model, loss, start)
        made_of_tensors |= not_read({*numbers} - made_of_tensors, second, further, taken)
        by_themselves = {path for path, change in moved.items() if change.of_numbers} - {*numbers}  # the time; draws
        unread = by_themselves - {path for path in by_themselves if _is_in(path, paths)}
        if unread == not_read(unread, second, further, taken):
            made_of_tensors |= by_themselves
        refuse_once(type(model).__name__, kept_by_what_happens_once(vary & {*numbers}, numbers, settled, start))
        kept_numbers = [path for path in numbers_kept(traced, numbers, start) if path not in made_of_tensors and not is_in(path, anew)]
        if kept_numbers:
            text = f"each call of {type(model).__name__} makes a number of values of tensors, and reads it in the next: {kept_numbers[0]}"
            text += "\n  what to do: keep it in a tensor registered as a buffer (register_buffer)"
            once = numbers_once(settled, traced, start)
            raise NumbersChange(said_once(type(model).__name__, once) if once else text, kept_numbers)
        moved = {path: change for path, change in moved.items() if path not in made_of_tensors}
        moved |= {c.path: c for c in settled if c.path in arrays and c.path not in made_of_tensors}
        stand = {leaf.name for leaf in varied.leaves if isinstance(leaf.kind, Kind)}
        written = refuse_changing(type(model).__name__, list(moved.values()), read - stand, start=start, first=first)
        at_once = frozenset(c.path for c in settled)
        left = left_by(
            start, first, second, written, traced, counts, paths, numbers={*numbers, *by_themselves}, moved=followed, once=at_once
        )  # fmt: skip
        made_here = made_of(settled, in_the_state(model))
    once = [c.path for c in settled if isinstance(c.after, torch.Tensor)]
    once += [name for name, was in writes[0].items() if writes[1][name] != was and writes[1][name] == writes[2][name]]
    once += [name for name in frozen if name in into[0] and name not in into[1]]
    computed = _computed(model, loss, inputs, start, once, calls[0], frozen)
    kept = [c for c in settled if c.path not in made_of_tensors]
    refuse_once(type(model).__name__, [*numbers_once(kept, traced, start), *computed])
    return Calls(
        calls=tuple(calls), settled=settled, written=written, left=left,
        counted=(*(c.path for c in counts), *paths, *made_of_tensors, *(x.place.path for x in varied.leaves if x.place is not None)),
        set_back=set_back, made=made_here, said=tuple(said), by_hooks=by_hooks,
    )  # fmt: skip


def _refuse_read(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State, second: Call,
    parameters: tuple[torch.Tensor, ...], by_hooks: Collection[str], *, reseed: bool, outputs: bool, leaves: Sequence[str],
) -> None:  # fmt: skip
    """CaptureError if a second call computes otherwise after a backward that has left what hooks leave. second: a call after one that did
    not."""
    with _as_before(model, start):
        for number in (0, 1):
            given = copied(inputs)
            with _own_errors(model, number), torch.enable_grad(), from_seed(number, outside=reseed), as_called(given):
                output = model(*given[0], **given[1])
                result, _ = objective_of(output, loss, outputs, left_at(leaves, model, loss, start))
                found = gradients_of(result, (*parameters, *differentiated(given)))
    expected = (second.loss, *second.gradients, *second.of_inputs)
    pairs = zip((result.detach(), *found), expected, strict=True)
    if not all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs):
        raise CaptureError(
            f"what hooks of {type(model).__name__} leave in backward ({', '.join(sorted(by_hooks)[:3])}) is read by the next call, or by "
            f"these hooks for its gradients\n  what to do: let the loop read it, and give it to the call"
        )


def _moved_as_traced(
    name: str, varied: Varied, calls: Sequence[Call], states: Sequence[State], numbers: Collection[str]
) -> frozenset[str]:
    """The places at which calls leave numbers that follow from those that vary. CaptureError if these are other ones than the trace says.
    states: after each call. numbers: the places of those that follow from tensors too."""
    for place, of in varied.moved:
        for call, state in zip(calls, states, strict=True):
            if not same(state.leaves.get(place.path, ABSENT), of(call.numbers)):  # type: ignore[arg-type]
                raise CaptureError(f"each call of {name} leaves in {place.path} a number that does not follow from numbers alone")
    moved = frozenset(place.path for place, _ in varied.moved)
    others = (x.place.path for x in varied.leaves if x.place is not None and not isinstance(x.kind, Kind))
    stay = [path for path in others if path not in moved | {*numbers}]
    for path in stay:
        if any(not same(before.leaves.get(path, ABSENT), state.leaves.get(path, ABSENT)) for before, state in pairwise(states)):
            raise CaptureError(f"each call of {name} leaves in {path} another number than its trace")
    return moved


def _moved_as_differentiated(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, varied: Varied, values: Sequence[Number]
) -> None:
    """CaptureError if backward changes numbers too: hooks may, and what is checkpointed runs again in it."""
    _called(model, loss, inputs)
    for place, of in varied.moved:
        if not same(place.now(), of(values)):
            raise CaptureError(f"backward through {type(model).__name__} changes {place.path}, too")


def _is_in(path: str, lists: Collection[str]) -> bool:
    """Whether a place is in one of these lists."""
    return any(path.startswith(f"{name}[") for name in lists)


def _scaled(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State, parameters: tuple[torch.Tensor, ...],
    scale: float, *, outputs: bool, leaves: Sequence[str],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients of the loss times a number, in a call of its own: a backward that is the model's own may free what it needs."""
    given = copied(inputs)
    wanted = *parameters, *differentiated(given)
    with torch.enable_grad(), as_called(given):
        output = model(*given[0], **given[1])
        result, _ = objective_of(output, loss, outputs, left_at(leaves, model, loss, start))
    return gradients_of(result, wanted, scale)


def gradients_of(loss: torch.Tensor, wanted: Sequence[torch.Tensor], scale: float | None = None) -> tuple[torch.Tensor | None, ...]:
    """scale: the loss is multiplied by it."""
    if not wanted or not loss.requires_grad:
        return (None,) * len(wanted)
    with heard(), warnings.catch_warnings():  # what hooks say
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of the first module, whose inputs are data
        return torch.autograd.grad(loss, wanted, None if scale is None else torch.full_like(loss, scale), allow_unused=True)


def _called(model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs) -> Any:
    """What the model returns in a further call, which is differentiated too: its hooks run, and what is checkpointed runs again."""
    given = copied(inputs)
    wanted = *(p for p in model.parameters() if p.requires_grad), *differentiated(given)
    with torch.enable_grad(), from_seed(1), as_called(given, checkpointed=True):
        output = model(*given[0], **given[1])
        result, _ = objective_of(output, loss, None)
        gradients_of(result, wanted)
    return output


def _writes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of each buffer, which tensor it is, and how often it was written to."""
    return {name: (id(b), b._version if not b.is_inference() else 0) for name, b in model.named_buffers(remove_duplicate=False)}


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def _held(model: nn.Module, frozen: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Those of these names that a call may change."""
    held = {**dict(model.named_buffers(remove_duplicate=False)), **frozen}
    return {name: held[name] for name in names if name in held}


def _set_back(held: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Give them these values; those that had others."""
    changed = frozenset(name for name, t in held.items() if not torch.equal(t, values[name]))
    with torch.no_grad():
        for name in changed:
            held[name].detach().copy_(values[name])
    return changed


def _computed(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State, paths: list[str], call: Call,
    frozen: Mapping[str, torch.Tensor],
) -> list[str]:  # fmt: skip
    """Which of some tensors, made by the first call and kept by the second, hold what it computes from inputs, from parameters that train
    or from buffers that change."""
    if not paths:
        return []
    with _as_before(model, start, frozen.values()):
        given = copied(inputs)
        held = {**dict(model.named_buffers(remove_duplicate=False)), **frozen}
        others = {name: b for name, b in held.items() if name not in paths}
        moving = [b for name, b in others.items() if not b.is_meta and not torch.equal(b, call.buffers[name])]
        watch = Followed([*pytree.tree_leaves(given), *(p for p in model.parameters() if p.requires_grad), *moving])
        with torch.enable_grad(), from_seed(0), watch, as_called(given):
            model(*given[0], **given[1])
        made = {**dict(model.named_buffers(remove_duplicate=False)), **frozen, **State.take(model, loss, start).tensors}
        return [path for path in paths if watch.has(made.get(path))]


def refuse_changing(
    name: str, changes: list[Change], read: Collection[str], *, given: bool = True, start: State | None = None,
    first: State | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """The paths at which each call puts a new tensor that no call reads. CaptureError if anything else is among the changes. given: the
    parallel module can give what is put there; else it is as if it were read, but in attributes. start, first: before the first call and
    after it, to say what there was."""
    written, wrong = [], []
    for change in changes:
        if (given or of_a_module(change.path)) and _is_output(change) and change.path not in read:
            written.append(change.path)
        else:
            wrong.append(change)
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        said = (
            f"each call of {name} changes {'; '.join(map(str, wrong[:3]))}{more}: state that is not in a buffer, which a graph does not "
            f"have\n  what to do: {_remedy(wrong, start)}"
        )
        if all(change.of_numbers for change in wrong):
            raise NumbersChange(said, [change.path for change in wrong])
        tensors = [change.path for change in wrong if isinstance(change.before, torch.Tensor)]
        if tensors and start is not None and first is not None:
            raise _tensors_change(said, tensors, start, first)
        raise TensorsChange(said, tensors) if tensors else CaptureError(said)
    return tuple(written)


def _tensors_change(said: str, paths: Sequence[str], start: State, first: State, *, attached: bool = False) -> TensorsChange:
    """start, first: before the first call and after it."""
    begun = [path for path in paths if not isinstance(start.leaves.get(path), torch.Tensor)]
    return TensorsChange(said, paths, begun=around(first, begun), attached=attached)


def _attached(start: State, first: State, *_: State) -> Callable[[str], TensorsChange] | None:
    """What a second call fails with that goes back through a first one, whose tensors stand in attributes; None where there are none."""
    paths = [c.path for c in start.changes(first) if isinstance(c.after, torch.Tensor) and c.after.grad_fn is not None]
    return (lambda said: _tensors_change(said, paths, start, first, attached=True)) if paths else None


def _remedy(changes: Sequence[Change], start: State | None) -> str:
    """What to do about state that goes on changing. start: as of `refuse_changing`."""
    if any(isinstance(c.before, Shape) and isinstance(c.after, Shape) and c.before.size != c.after.size for c in changes):
        return "return what is kept there (with outputs='all'), and let the loop keep it"
    registered = "registered as a buffer (register_buffer; buffers are followed when the forward assigns or changes them)"
    tensors = [change.path for change in changes if isinstance(change.before, torch.Tensor)]
    if any(path.endswith("]") for path in tensors):
        return f"keep each tensor in an attribute of its own, {registered}"
    if start is not None and any(not isinstance(start.leaves.get(path), torch.Tensor) for path in tensors):
        return f"let it begin with a tensor of its shape, {registered}; or call the model once before compiling it"
    return f"keep it in a tensor {registered}, or change it outside of the forward: let the loop set it before the call"


def _is_output(change: Change) -> bool:
    before, after = change.before, change.after
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before is not after
    return isinstance(before, Opaque) and isinstance(after, Opaque) and type(before.value) is type(after.value)


def _made(states: list[State]) -> dict[str, torch.Tensor]:
    """The tensors that the first call put somewhere."""
    start, first = states
    known = {storage_of(t) for t in start.tensors.values() if t.layout == torch.strided}
    changed = {c.path for c in start.changes(first)}
    return {path: t for path, t in first.tensors.items() if path in changed and storage_of(t) not in known}


class _Reads(TorchDispatchMode):
    """Notes which of some tensors the operators inside read, views of them included."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._watched = {storage_of(t) for t in tensors}
        self._read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.layout == torch.strided and storage_of(x) in self._watched:
                self._read.add(storage_of(x))
        return func(*args, **(kwargs or {}))

    def has_read(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._read


class _Writes(TorchDispatchMode):
    """Notes which of some parameters the operators inside write to, through .data too, which counts no version."""

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._params, self._before = params, {name: storage_of(p) for name, p in params.items()}
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            arguments = func._schema.arguments
            given = {a.name: x for a, x in zip(arguments, args)} | dict(kwargs)
            into = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
            self._written |= {storage_of(x) for x in pytree.tree_leaves(into) if isinstance(x, torch.Tensor)}
        return func(*args, **kwargs)

    def names(self) -> frozenset[str]:
        """Those written to, and those that were given other memory."""
        now = {name: storage_of(p) for name, p in self._params.items()}
        return frozenset(name for name, was in self._before.items() if was in self._written or now[name] != was)


# ------------------------------------------------------------------------------------------------------------- the inputs
def _marks(inputs: Inputs) -> list[tuple[str, Any, object]]:
    return [(pytree.keystr(path), leaf, _mark(leaf)) for path, leaf in pytree.tree_leaves_with_path(inputs)]


def _mark(leaf: object) -> object:
    return (leaf._version, leaf.shape, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else None


def _check_inputs(inputs: Inputs, before: list[tuple[str, Any, object]], into: tuple[int | str, tuple[object, ...]] | None) -> None:
    """into: the dict that the forward writes to and returns, and the keys."""
    now = {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(inputs)}
    changed = [path for path, leaf, mark in before if now.get(path, ABSENT) is not leaf or _mark(leaf) != mark]
    changed += [path for path in now if path not in {p for p, _, _ in before}]
    if into is not None and not any(_mark(leaf) != mark for _, leaf, mark in before):
        place, keys = into
        returned = tuple(f"[{int(isinstance(place, str))}][{place!r}][{key!r}]" for key in keys)
        changed = [path for path in changed if not path.startswith(returned)]
    if changed:
        raise CaptureError(
            f"the forward changes its inputs: at {', '.join(changed[:3])} of (args, kwargs)\n  what to do: let it work on a copy "
            f"(x = x.clone(), batch = dict(batch)); a dict that it is given and returns may be written to where outputs='all' or 'trained'"
        )


def _check_parameters(model: nn.Module, before: Mapping[str, int], written: Collection[str]) -> None:
    """before: how often each had been written to."""
    found = [name for name, p in model.named_parameters() if name not in written and p._version != before.get(name, p._version)]
    if found:
        raise CaptureError(
            f"the forward of {type(model).__name__} writes to {', '.join(found[:3])}, and a trace of it does not\n  what to do: let it do "
            f"so whether it is traced or not, or change parameters after optimizer.step()"
        )


# --------------------------------------------------------------------------------------------------- as it was before
@contextlib.contextmanager
def left_as_it_was(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None = None, params: Iterable[torch.Tensor] | None = None
) -> Iterator[None]:
    """Inside, the model's own forward may run; afterwards its buffers, attributes, and what its code keeps elsewhere are as before, and
    its parameters. params: those to which it may write, if that is known."""
    with _as_before(model, State.take(model, loss), model.parameters() if params is None else params):
        yield


@contextlib.contextmanager
def _as_before(model: nn.Module, start: State, params: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Everything is as before afterwards: registries, the values of buffers and plain tensors, all that the State shows. params: those to
    which the forward may write. Parameters of a parallel module, to which a hook of the loop may lead, are none that it writes to: to
    compare one all ranks would have to gather it."""
    buffers = [(b, b.detach().clone()) for b in (*model.buffers(), *params)]
    try:
        with _plain_as_before(start):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:  # all of them: batch norm writes without raising their versions
                buffer.detach().copy_(value)


@contextlib.contextmanager
def _plain_as_before(start: State) -> Iterator[None]:
    """All that the State shows is as before afterwards; parameters and buffers are as they are."""
    with values_as_before(start.tensors.values()):
        try:
            yield
        finally:
            start.restore()


@contextlib.contextmanager
def values_as_before(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """What is written to these tensors inside is undone afterwards; parts, and tensors of inference mode, are as they are."""
    before = [(t, t._version, t.detach().clone()) for t in tensors if not (t.is_inference() or is_part(t))]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in before:
                if tensor._version != version or (tensor.layout == torch.strided and not tensor.is_meta and not tensor.equal(value)):
                    tensor.detach().copy_(value)


@contextlib.contextmanager
def _own_errors(model: nn.Module, number: int, attached: Callable[[str], TensorsChange] | None = None) -> Iterator[None]:
    """attached: makes the error of a call that goes back through the one before."""
    try:
        yield
    except FAILURES as e:
        which = "" if number == 0 else ", called a second time,"
        remedy = "check that model(*args, **kwargs) and backward() run on the example inputs, twice in a row"
        if goes_back := "backward through the graph a second time" in str(e):
            remedy = "detach what the forward keeps for the next call: self.ema = 0.9 * self.ema + x.detach()"
        error: Callable[[str], CaptureError] = attached if goes_back and attached is not None else CaptureError
        raise error(f"{type(model).__name__} itself{which} fails: {first_line(e)}\n  what to do: {remedy}") from e
