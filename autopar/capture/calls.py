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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.answers import NONE, Answers
from autopar.capture.appended import appended_between, only_appended_to
from autopar.capture.around import as_called
from autopar.capture.as_before import as_before, left_as_it_was, plain_as_before
from autopar.capture.changing import attached, begun_with, refuse_changing
from autopar.capture.counted import Count, counts_between, not_read, only_added_to
from autopar.capture.export import FAILURES, left_at, objective_of
from autopar.capture.follow import storage_of
from autopar.capture.given import (
    Inputs,
    check_inputs,
    check_parameters,
    copied,
    differentiated,
    marks,
    other_parameters,
    others,
)
from autopar.capture.held import ABSENT, Order, Shape, is_in, same
from autopar.capture.left import Left, is_read, left_by
from autopar.capture.made import in_the_state, made_of
from autopar.capture.numbers import numbers_like
from autopar.capture.once import Followed, kept_by_what_happens_once, numbers_kept, numbers_once, said_once
from autopar.capture.said import Said, heard
from autopar.capture.source import first_line
from autopar.capture.standing import around, begin_anew
from autopar.capture.state import Change, State
from autopar.capture.varying import Numbers
from autopar.capture.watched import Reads, Writes
from autopar.errors import CaptureError, NumbersChange, TensorsChange
from autopar.run.outputs import Returned, dicts_given, taken_apart, written_into
from autopar.run.outside_draws import from_seed
from autopar.run.varying import NONE as NONE_VARIES
from autopar.run.varying import Kind, Number, Varied

__all__ = ["Call", "Calls", "call_twice", "gradients_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call. gradients: of the asked parameters, in their order. of_inputs: of the inputs that require one, in the order of their
    leaves. scaled: both, of the loss multiplied by a number. buffers: by name, after it, with the frozen parameters that it writes to.
    returned: the tensors that the model returned beside the loss, where they were asked for. numbers: that it was given, of those that
    vary. otherwise: of inputs and parameters that are `otherwise`."""

    loss: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]
    of_inputs: tuple[torch.Tensor | None, ...]
    scaled: Mapping[float, tuple[torch.Tensor | None, ...]]
    buffers: Mapping[str, torch.Tensor]
    returned: tuple[torch.Tensor, ...] = ()
    numbers: tuple[Number | torch.Tensor, ...] = ()
    otherwise: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """calls: in order. settled: what the first call changed and the second left. written: what each call replaces by a new tensor
    and none reads before that. counted: numbers to which each call adds, lists to which it appends, and numbers that it makes of tensors,
    which none reads. left: what a call leaves of all these. set_back: the buffers that were given their first values again before the
    second call, so that it was answered as the first was (numbers are, too). made: those of `settled` that are buffers of the state_dict,
    by name. said: what each prints and logs. by_hooks: where hooks leave something in backward, which no call reads. made_of_tensors: those
    of `counted` that are numbers which it makes of tensors, or that change by themselves. once: where code may read what the first call
    alone changes."""

    calls: tuple[Call, ...]
    settled: tuple[Change, ...]
    written: tuple[str, ...]
    counted: tuple[str, ...]
    left: Left
    set_back: frozenset[str] = frozenset()
    made: Mapping[str, torch.Tensor] = field(default_factory=dict)
    said: tuple[Sequence[Said], ...] = ((), ())
    by_hooks: frozenset[str] = frozenset()
    made_of_tensors: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()


def call_twice(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State, parameters: tuple[torch.Tensor, ...] = (),
    **how: Any,
) -> Calls:  # fmt: skip
    """Calls the model twice, and leaves everything as it was. start: a State of it now. parameters, how: as of `_InARow`.

    Raises Appended for lists to which calls append and that are not known to, CaptureError if the model goes on changing what is neither
    buffer nor cache, or writes to its inputs or to other parameters.
    """
    return _InARow(model, loss, inputs, start, parameters, **how).twice()


class _InARow:
    """The model, called again and again. traced: what the trace of a call changed. compare: gradients are taken, of `parameters` and of the
    inputs that require one. outputs: what else the model returns is kept too. reseed: Python and numpy draw as they do for the program that
    is compared; else as the caller has set them. frozen: the frozen parameters to which the program writes, by name. scales: by which the
    loss is multiplied for further gradients. answers: what the trace was told of the model's state: the second call is told the same.
    leaves: places of which the tensors that a call leaves there are outputs too. appended: lists to which each call appends, and which are
    empty before. numbers: the places at which the trace left a number that is made of a tensor, or an array; arrays: those of arrays.
    returned: what the trace returned. varied: the numbers and tensors that were inputs of the trace; varying: gives them. hooked: hooks run
    in backward, as they do in the program: what they leave is in none of the states. anew: attributes and closures in which the second call
    finds again what the first did."""

    def __init__(
        self, model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State,
        parameters: tuple[torch.Tensor, ...], *, traced: tuple[Change, ...] = (), reseed: bool = True, compare: bool = False,
        outputs: bool = False, frozen: Mapping[str, torch.Tensor] | None = None, scales: tuple[float, ...] = (), answers: Answers = NONE,
        leaves: Sequence[str] = (), appended: Sequence[list[Any]] = (), numbers: Collection[str] = (), arrays: Collection[str] = (),
        returned: Returned | None = None, varied: Varied = NONE_VARIES, varying: Numbers | None = None, hooked: bool = False,
        anew: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.model, self.loss, self.inputs, self.start, self.parameters = model, loss, inputs, start, parameters
        self.name = type(model).__name__
        self.traced, self.reseed, self.compare, self.outputs, self.frozen = traced, reseed, compare, outputs, frozen or {}
        self.scales, self.answers, self.leaves, self.appended = scales, answers, leaves, appended
        self.numbers, self.arrays, self.returned, self.varied, self.varying = {*numbers}, arrays, returned, varied, varying
        self.hooked, self.anew = hooked, anew
        self.moved_before = {name: p for name, p in model.named_parameters() if name in answers.written_names}
        self.calls = list[Call]()
        self.states = [start]  # before the first call, and after each
        self.writes = [_writes(model)]
        self.into = list[frozenset[str]]()  # the frozen parameters to which each wrote
        self.said = list[Sequence[Said]]()
        self.set_back = self.by_hooks = frozenset[str]()
        self.made: dict[str, torch.Tensor] = {}  # what the first call put somewhere
        self.read = frozenset[str]()  # what of that the second one read
        # what the first one has changed of what code may read: it may compute otherwise from now on, in a way that does not show where the
        # same is computed of the same (a running mean that begins with the first one), so that the second has other inputs and parameters
        self.once = list[Change]()
        self.otherwise = False

    def twice(self) -> Calls:
        first_values = _copies(self._held())
        watched = self.start.of_what_is_read(self.model, self.loss) if self.compare else None
        with as_before(self.model, self.start, (*self.frozen.values(), *self.moved_before.values())):
            self._call()
            self.made = _made(self.states)
            if watched is not None:
                self.once = watched.changes(State.take(self.model, self.loss, watched))
            self.otherwise = not self.answers.written_names and not all(is_in(c.path, self.anew) for c in self.once)
            if self.answers.changed_of(self.model):
                self.set_back = _set_back(self._held(), first_values)
            self._call()
            if self.by_hooks:
                self._refuse_read()
            found = self._looked_at()
        self._refuse_once(found)
        return found

    @contextlib.contextmanager
    def _given(self, number: int) -> Iterator[Inputs]:
        """Around a call: what it is given."""
        given = copied(self.inputs)
        if not (number and self.otherwise):
            yield given
            return
        with other_parameters(p for name, p in self.model.named_parameters() if name not in self.frozen):
            yield others(given)

    def _held(self) -> dict[str, torch.Tensor]:
        """What the trace was told of that a call may change."""
        return _held(self.model, self.frozen, self.answers.names)

    @contextlib.contextmanager
    def _begun(self) -> Iterator[tuple[Any, ...]]:
        """Around a call: what is to stand where it begins. Gives the numbers and tensors that vary."""
        for items in self.appended:
            items.clear()
        if len(self.states) > 1:
            begin_anew(self.start, self.states[-1], self.anew)
        if self.varying is None:
            yield ()
            return
        self.varying.follow(self.states[-1])
        if self.calls and self.varied.changed(self.varying.values()):
            self.varying.set_back(self.calls[0].numbers)
        with self.varying.detached() as now:
            yield now

    def _call(self) -> None:
        model, number = self.model, len(self.calls)
        own_errors = functools.partial(_own_errors, model, number, attached(*self.states) if number else None)
        with self._begun() as now, self._given(number) as given:
            stand = [t for t in now if isinstance(t, torch.Tensor) and t.requires_grad]
            watch = Reads(self.made.values()) if number else contextlib.nullcontext()
            moving = Writes(self.frozen) if self.frozen else contextlib.nullcontext()
            scaled = {}
            for scale in self.scales if self.compare else ():
                with own_errors(), left_as_it_was(model, self.loss), from_seed(number, outside=self.reseed):
                    scaled[scale] = self._scaled(scale, copied(given), stand)
            with own_errors(), torch.enable_grad(), from_seed(number, outside=self.reseed):
                wanted = (*self.parameters, *differentiated(given), *stand) if self.compare else ()
                dicts = dicts_given(*given)
                before, versions = marks(given), {name: p._version for name, p in model.named_parameters()}
                with watch, moving, as_called(given) as heard:
                    self.said.append(heard)
                    output, result, own, left_there = self._output(given)
                after = State.take(model, self.loss, self.start) if self.hooked else None
                with plain_as_before(after) if after is not None else contextlib.nullcontext():
                    found = gradients_of(result, wanted)
                    self.by_hooks |= after.grown_in(State.take(model, self.loss, self.start)) if after is not None else frozenset()
        check_inputs(given, before, written_into(output, dicts) if self.outputs else None)
        check_parameters(model, versions, {*self.frozen, *self.moved_before})
        n = len(self.parameters)
        others = taken_apart(output, result, own_loss=own, number_of=numbers_like(self.returned))[1] if self.outputs else ()
        self.calls.append(
            Call(
                loss=result.detach(), gradients=found[:n], of_inputs=found[n:], scaled=scaled, numbers=now,
                otherwise=bool(number and self.otherwise),
                buffers=_copies({**dict(model.named_buffers(remove_duplicate=False)), **self.frozen}),
                returned=tuple(t.detach().clone() for t in (*others, *left_there)),
            )
        )  # fmt: skip
        self.states.append(State.take(model, self.loss, self.start) if after is None else after)
        self.writes.append(_writes(model))
        self.into.append(moving.names() if isinstance(moving, Writes) else frozenset())
        if isinstance(watch, Reads):
            self.read = frozenset(path for path, t in self.made.items() if watch.has_read(t))

    def _output(self, given: Inputs) -> tuple[Any, torch.Tensor, bool, tuple[torch.Tensor, ...]]:
        """What a call returns, the scalar that is differentiated, whether that is the loss, and what the call leaves at `leaves`."""
        output = self.model(*given[0], **given[1])
        left_there = left_at(self.leaves, self.model, self.loss, self.start)
        return output, *objective_of(output, self.loss, self.outputs, left_there), left_there

    def _scaled(self, scale: float, given: Inputs, stand: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the loss times a number, in a call of its own: a backward that is the model's own may free what it needs."""
        with torch.enable_grad(), as_called(given):
            _, result, _, _ = self._output(given)
        return gradients_of(result, (*self.parameters, *differentiated(given), *stand), scale)

    def _again(self) -> Any:
        """What the model returns in a further call, which is differentiated too: its hooks run, and what is checkpointed runs again."""
        with self._begun():
            given = copied(self.inputs)
            wanted = *(p for p in self.model.parameters() if p.requires_grad), *differentiated(given)
            with torch.enable_grad(), from_seed(1), as_called(given, checkpointed=True):
                output = self.model(*given[0], **given[1])
                result, _ = objective_of(output, self.loss, None)
                gradients_of(result, wanted)
            return output

    # ------------------------------------------------------------------------------------------ what two calls have changed
    def _looked_at(self) -> Calls:
        """What of that is a cache, an output or a count; CaptureError for the rest."""
        start, first, second = self.states
        moved = {c.path: c for c in first.changes(second)}
        followed = self._moved_as_traced()
        moved = {path: change for path, change in moved.items() if path not in followed}
        settled = tuple(c for c in start.changes(first) if not (c.path in moved or c.path in followed or is_in(c.path, self.anew)))
        counts = self._counts(followed)
        for count in counts:
            del moved[count.path]
        grown = [one for one in appended_between(start, first, second) if not any(one.items is items for items in self.appended)]
        if lists := only_appended_to(grown, self._again):
            raise lists
        paths = frozenset(held.path for held in first.held if any(held.holder is items for items in self.appended))
        made_of_tensors, by_themselves = self._unread_numbers(moved, paths)
        self._refuse_numbers(made_of_tensors, settled)
        moved = {path: change for path, change in moved.items() if path not in made_of_tensors}
        moved |= {c.path: c for c in settled if c.path in self.arrays and c.path not in made_of_tensors}
        read = self.read - {leaf.name for leaf in self.varied.leaves if isinstance(leaf.kind, Kind)}
        written = refuse_changing(self.name, list(moved.values()), read, start=start, first=first)
        at_once = frozenset(c.path for c in settled)
        left = left_by(
            start, first, second, written, self.traced, counts, paths, numbers=self.numbers | by_themselves, moved=followed, once=at_once
        )  # fmt: skip
        own = (c for c in self.once if not isinstance(c.after, Order | Shape))  # of what a container holds, its items tell
        if lost := [c for c in own if is_in(c.path, self.anew) and not left.leaves_in(c.path)]:
            raise CaptureError(f"each call of {self.name} changes {lost[0]}, which the parallel module does not")
        return Calls(
            calls=tuple(self.calls), settled=settled, written=written, left=left,
            counted=(*(c.path for c in counts), *paths, *made_of_tensors, *self.varied.of_all.places), made_of_tensors=made_of_tensors,
            once=around(first, [c.path for c in self.once]) if self.otherwise else frozenset(),
            set_back=self.set_back, made=made_of(settled, in_the_state(self.model)), said=tuple(self.said), by_hooks=self.by_hooks,
        )  # fmt: skip

    def _moved_as_traced(self) -> frozenset[str]:
        """The places at which calls leave numbers that follow from those that vary. CaptureError if these are other ones than the trace
        says, or if backward changes them too."""
        moved = frozenset(place.path for place, _ in self.varied.moved)
        for place, of in self.varied.moved:
            for call, state in zip(self.calls, self.states[1:], strict=True):
                if not same(state.leaves.get(place.path, ABSENT), of(call.numbers)):  # type: ignore[arg-type]
                    raise CaptureError(f"each call of {self.name} leaves in {place.path} a number that does not follow from numbers alone")
        others = (x.place.path for x in self.varied.leaves if x.place is not None and not isinstance(x.kind, Kind))
        for path in (path for path in others if path not in moved | self.numbers):
            after = (state.leaves.get(path, ABSENT) for state in self.states[1:])
            if any(not same(a, b) for a, b in pairwise(after)):
                raise CaptureError(f"each call of {self.name} leaves in {path} another number than its trace")
        if moved and self.varying is not None:  # hooks may change them, and what is checkpointed runs again
            values = self.varying.set_back(self.calls[0].numbers)
            self._again()
            for place, of in self.varied.moved:
                if not same(place.now(), of(values)):
                    raise CaptureError(f"backward through {self.name} changes {place.path}, too")
        return moved

    def _counts(self, followed: Collection[str]) -> list[Count]:
        """The numbers to which each call adds, and which none reads."""
        start, first, second = self.states
        found = [count for count in counts_between(start, first, second, self.traced) if count.path not in {*followed, *self.numbers}]
        whole = [c for c in found if type(c.seen[1]) is int]
        tried = (found, whole) if whole != found else (found,)
        return next((x for some in tried if some and (x := only_added_to(some, self._again))), [])

    def _unread_numbers(self, moved: Mapping[str, Change], lists: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """The numbers that each call leaves and none reads: all, which it makes of tensors or that change by themselves, and the latter:
        the time, draws, texts. lists: the paths of those to which calls append."""
        vary = self.varied.of_all.places
        made = frozenset(path for path in self.numbers if is_in(path, lists) or path in vary)
        taken = functools.partial(State.take, self.model, self.loss, self.start)
        made |= not_read(self.numbers - made, self.states[-1], self._again, taken)
        by_themselves = frozenset(path for path, change in moved.items() if change.of_numbers) - self.numbers
        unread = frozenset(path for path in by_themselves if not is_in(path, lists))
        if unread != not_read(unread, self.states[-1], self._again, taken):
            by_themselves = frozenset()
        by_themselves |= {c.path for c in moved.values() if type(c.before) is type(c.after) is str and not is_read(c.path, self.start)}
        return made | by_themselves, by_themselves

    def _refuse_numbers(self, made_of_tensors: Collection[str], settled: Sequence[Change]) -> None:
        """NumbersChange for numbers that calls make of tensors, and that the next one reads otherwise than the program."""
        vary = self.varied.of_all.places
        if computed := kept_by_what_happens_once(vary & self.numbers, self.numbers, settled, self.start):
            raise self._once(computed)
        kept = numbers_kept(self.traced, self.numbers, self.start)
        if kept := [path for path in kept if path not in made_of_tensors and not is_in(path, self.anew)]:
            text = f"each call of {self.name} makes a number of values of tensors, and reads it in the next: {kept[0]}"
            text += "\n  what to do: keep it in a tensor registered as a buffer (register_buffer)"
            once = numbers_once(settled, self.traced, self.start)
            raise self._once(once, kept) if once else NumbersChange(text, kept)

    def _refuse_once(self, found: Calls) -> None:
        """NumbersChange for what the first call computes of values, and later ones keep."""
        writes, (first, second) = self.writes, self.into
        once = [c.path for c in found.settled if isinstance(c.after, torch.Tensor)]
        once += [name for name, was in writes[0].items() if writes[1][name] != was and writes[1][name] == writes[2][name]]
        once += [name for name in self.frozen if name in first and name not in second]
        computed = _computed(self.model, self.loss, self.inputs, self.start, once, self.calls[0], self.frozen)
        kept = [c for c in found.settled if c.path not in found.made_of_tensors]
        if refused := [*numbers_once(kept, self.traced, self.start), *computed]:
            raise self._once(refused)

    def _once(self, paths: Sequence[str], kept: Sequence[str] = ()) -> NumbersChange:
        """What is raised of what the first call alone computes at some places. kept: those of numbers that others read."""
        return NumbersChange(said_once(self.name, paths), kept, **begun_with((*paths, *kept), self.start, self.states[1]))

    def _refuse_read(self) -> None:
        """CaptureError if a second call computes otherwise after a backward that has left what hooks leave: those before did not."""
        with as_before(self.model, self.start):
            for number in (0, 1):
                with self._begun() as now, self._given(number) as given, _own_errors(self.model, number), torch.enable_grad():
                    stand = [t for t in now if isinstance(t, torch.Tensor) and t.requires_grad]
                    with from_seed(number, outside=self.reseed), as_called(given):
                        _, result, _, _ = self._output(given)
                        found = gradients_of(result, (*self.parameters, *differentiated(given), *stand))
        second = self.calls[1]
        pairs = zip((result.detach(), *found), (second.loss, *second.gradients, *second.of_inputs), strict=True)
        if not all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs):
            raise CaptureError(
                f"what hooks of {self.name} leave in backward ({', '.join(sorted(self.by_hooks)[:3])}) is read by the next call, or by "
                f"these hooks for its gradients\n  what to do: let the loop read it, and give it to the call"
            )


def gradients_of(loss: torch.Tensor, wanted: Sequence[torch.Tensor], scale: float | None = None) -> tuple[torch.Tensor | None, ...]:
    """scale: the loss is multiplied by it."""
    if not wanted or not loss.requires_grad:
        return (None,) * len(wanted)
    with heard(), warnings.catch_warnings():  # what hooks say
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of the first module, whose inputs are data
        return torch.autograd.grad(loss, wanted, None if scale is None else torch.full_like(loss, scale), allow_unused=True)


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
    with as_before(model, start, frozen.values()):
        given = copied(inputs)
        held = {**dict(model.named_buffers(remove_duplicate=False)), **frozen}
        others = {name: b for name, b in held.items() if name not in paths}
        moving = [b for name, b in others.items() if not b.is_meta and not torch.equal(b, call.buffers[name])]
        watch = Followed([*pytree.tree_leaves(given), *(p for p in model.parameters() if p.requires_grad), *moving])
        with torch.enable_grad(), from_seed(0), watch, as_called(given):
            model(*given[0], **given[1])
        made = {**dict(model.named_buffers(remove_duplicate=False)), **frozen, **State.take(model, loss, start).tensors}
        return [path for path in paths if watch.has(made.get(path))]


def _made(states: list[State]) -> dict[str, torch.Tensor]:
    """The tensors that the first call put somewhere."""
    start, first = states
    known = {storage_of(t) for t in start.tensors.values() if t.layout == torch.strided}
    changed = {c.path for c in start.changes(first)}
    return {path: t for path, t in first.tensors.items() if path in changed and storage_of(t) not in known}


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
