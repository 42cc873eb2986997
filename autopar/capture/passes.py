"""The passes of capture, in the order in which they run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.answers import Answers
from autopar.capture.around import capturing, check_told, said_otherwise
from autopar.capture.as_before import left_as_it_was
from autopar.capture.assembled import program_of, with_flows
from autopar.capture.autocast import with_casts
from autopar.capture.border import TracedCall, check_border, observed
from autopar.capture.calls import Calls
from autopar.capture.captured import Captured
from autopar.capture.casts import cast_before_use
from autopar.capture.causal import with_known_masks
from autopar.capture.changing import refuse_changing
from autopar.capture.check import check_program, trainable_tensors
from autopar.capture.compute import explained, with_casts_of
from autopar.capture.drawn import Drawing
from autopar.capture.export import HOOK
from autopar.capture.fewer import TooMuchWork
from autopar.capture.flops import work_of
from autopar.capture.functionalize import functionalize
from autopar.capture.given import Inputs, apart, copied
from autopar.capture.guards import Guards
from autopar.capture.held import ABSENT, is_in
from autopar.capture.hooked import refuse_left
from autopar.capture.infer import Inference
from autopar.capture.left import of_a_module
from autopar.capture.normalise import (
    as_reshapes,
    drops_randomness,
    normalise,
    remove_dead,
    split_label_means,
    with_copies_returned,
    with_old_values,
)  # fmt: skip
from autopar.capture.order import detached_at_once, in_one_order
from autopar.capture.own_gradients import OwnGradients, other_backward
from autopar.capture.picked import with_picks_of_samples
from autopar.capture.refused import check_inputs, check_tensors
from autopar.capture.said import heard, sayings_of
from autopar.capture.state import Change, State
from autopar.capture.trace import Trace
from autopar.capture.traced import trace_of
from autopar.capture.varying import Numbers
from autopar.collector import held_back
from autopar.errors import CaptureError, OtherGradients
from autopar.ir import Buffer, Input, Param, Program, refs
from autopar.run.asked import OF_GRADIENTS
from autopar.run.checkpointed import functions_called
from autopar.run.inputs import Arguments, check_attributes, positional_names
from autopar.run.key_values import without_key_value_cache
from autopar.run.objects import leaf_path
from autopar.run.observed import is_observer
from autopar.run.precision import computing_in, inputs_in
from autopar.run.region import REGION, Region
from autopar.run.region_modules import Applied
from autopar.run.varying import NO_NUMBERS, Varying

__all__ = ["captured_by"]

SCALES = (2.0**-24, 2.0**24)  # of the loss, where gradients are not autograd's own: a bound on them may cut off none of the example's


@dataclass(frozen=True, slots=True)
class _Passed:
    """A program, the trace that it was made of, and that before dead operators were removed. originals: parameters as they rest, by value.
    frozen: parameters that the forward writes to, by name."""

    program: Program
    trace: Trace
    whole: Trace
    originals: Mapping[str, torch.Tensor]
    frozen: Mapping[str, torch.Tensor]

    def leaves(self) -> dict[str, torch.Tensor]:
        """The parameters, to be differentiated by, by value: other tensors each time."""
        return {p.value: self.originals[p.value].detach().requires_grad_(p.trainable) for p in self.program.params}


def captured_by(
    model: nn.Module, example: Inputs, loss: Callable[[Any], torch.Tensor] | None, *, most: float, outputs: bool | None,
    dtype: torch.dtype | None, written: Collection[str], trains: bool, sizes: bool, as_written: OwnGradients | None = None,
    places: tuple[str, ...] = (), beside: Callable[[Arguments], Captured] | None = None, asked_of: Inputs,
    appended: tuple[list[Any], ...] = (), varying: Varying = NO_NUMBERS, drawn: Drawing | None = None, anew: frozenset[str] = frozenset(),
) -> Captured:  # fmt: skip
    """What `capture` gives. most: how much work a pass may be that is compared with the model; 0: none is, TooMuchWork if it is more.
    as_written: what runs as it is written. places: those of which the program gives the tensors that a call leaves there; without them,
    those that it could give are in `given`. beside: as of `capture`. asked_of: the example as the user gave it. appended: lists to which
    calls append, and which are empty. varying: as of `capture`. drawn: what draws numbers of
    Python and numpy, and runs as it is written. anew: attributes and closures that the program reads as they are now, though calls leave
    tensors there."""
    args, kwargs = example
    check_inputs(model, example)
    with held_back():
        before = State.take(model, loss)
        check_tensors(model)
        guards = Guards.take(model, loss, before)
        for leaf in _tensors(asked_of):
            check_attributes(leaf, guards.reads)
    asks_which_are_one, asks = guards.asks
    given = (args, kwargs) if asks_which_are_one else apart((args, kwargs))
    inputs = inputs_in(dtype, given)
    with without_key_value_cache(model), capturing() as around, explained(dtype), computing_in(dtype, model) as at_rest:
        if any(map(guards.reads, OF_GRADIENTS)):
            around.ask_activations()
        around.given = told = said_otherwise(asked_of, asks)
        with held_back():
            start = State.take(model, loss, before)
            checkpointed = functions_called()
            numbers = Numbers(varying, inputs, positional_names(model), start, trains=trains)
            found, trace = trace_of(
                model, loss, inputs, start, outputs=outputs, as_written=as_written, leaves=places, sizes=sizes, varying=numbers, drawn=drawn
            )
            checkpointed = functions_called() - checkpointed
            passed = _passed(model, found, trace, given, at_rest, written=written, trains=trains, as_written=as_written is not None)
        program, trace = passed.program, passed.trace
        names = trace.returned[: len(trace.returned) - len(places)]
        returned = None if found.returned is None else dataclasses.replace(found.returned, names=names)
        _check_written(program, found.answers, dtype)
        check_told(program, told)
        real = all(t.device.type != "meta" for t in (*trace.tensors.values(), *_tensors(inputs)))
        if real and 0 < most < (work := work_of(program)):
            raise TooMuchWork(work)
        trainable = trainable_tensors(program, trace.tensors) if most and real else None
        if as_written is None and trainable is not None and found.hooks:
            raise OtherGradients(f"{program.name} registers {found.hooks[0]} on an activation in its forward")
        functions = _functions_as_written(trace)
        if as_written is None and (trainable is not None or not real) and found.own_gradients:
            if function := other_backward(model, loss, copied(inputs), functions):
                raise OtherGradients(f"{function} has another backward than autograd's in the forward of {program.name}")
        outside: dict[str, Any] = {"outputs": found.returned is not None, "frozen": passed.frozen, "leaves": places, "appended": appended}
        outside |= {"varying": numbers, "anew": anew}
        compared = None if trainable is None else tuple(trainable.values())
        outside["as_written"] = as_written is not None
        watched = functools.partial(observed, model, loss, inputs, start, found, compared, **outside)
        calls = watched(scales=SCALES if _changes_gradients(found, trace) else ())
        again = functools.partial(watched, reseed=False)
        left = check_border(model, loss, inputs, start, found, trace, calls, checked=trainable is not None, again=again)
        refuse_left(dict[str, Any](trace.tensors).values(), left)
        if trainable is not None and calls is not None:
            with left_as_it_was(model, loss) if found.hooks or as_written is not None else contextlib.nullcontext(), heard():
                _compare(passed, calls, copied(given), dtype=dtype, answers=found.answers, returned=returned)
            if beside is not None:
                _compare_other(beside(Arguments(args, kwargs)), passed, calls, copied(given), dtype)
        elif real or found.hooks or as_written is not None:
            _refuse_own_gradients(program.name, found, functions, real=real)
    could = _given(program.name, found, left, calls, anew | found.varied.around)
    left_out = tuple(path for path in left if path not in places)
    guards.read(found.attributes)
    guards.set_modes(found.modes)
    guards.vary(found.varied)
    if calls is not None:
        changed = (path for path in (*left, *calls.counted, *calls.by_hooks) if not is_in(path, anew))
        guards.follow(changed, calls.settled, calls.left)
        guards.said(sayings_of(program, found.shows, calls.said))
    guards.answered(found.answers)
    ours = trace.returned[len(trace.returned) - len(places) :] if places else ()
    guards.given(dict(zip(places, ours, strict=True)), found.numbers, found.arrays)
    if around.asked or not (trains or trace.metas[trace.loss].type.grad):
        guards.ask_for(around.mode)
    program = program.replace(notes=(*program.notes, *_notes(program, found, left_out, twice=checkpointed > 0)))
    if calls is not None and calls.by_hooks:
        program = program.replace(one_stage=_one_stage(_regions(trace), calls.by_hooks))
    if program.outputs and found.returned is not None and not found.returned.own_loss:
        program = program.replace(own_loss=False)
    returned = None if returned is None else dataclasses.replace(returned, inner=_inner(program))
    return Captured(
        program, dict(trace.tensors), model.training, guards, left_out, _defaults(model, args, kwargs), found.returns, returned,
        around.autocast, found.answers, () if places else could, {} if calls is None else calls.made,
        found.around_loss,
    )  # fmt: skip


def _passed(
    model: nn.Module, found: TracedCall, trace: Trace, given: Inputs, at_rest: Mapping[int, torch.Tensor], *, written: Collection[str],
    trains: bool, as_written: bool,
) -> _Passed:  # fmt: skip
    """given: the inputs. at_rest: parameters in a lower dtype than they rest in, by their ids. The others as of `capture`."""
    infer = Inference()
    trace, mutations = functionalize(with_casts(trace, infer), infer, written)
    trace, mutations = in_one_order(detached_at_once(trace), mutations)
    trace = with_picks_of_samples(with_known_masks(trace))
    frozen = {b.fqn: trace.tensors[b.value] for b in trace.buffers if b.parameter and b.fqn is not None}
    _check_precision(model, at_rest, frozen)
    trace = split_label_means(trace)
    trace, renamed = normalise(trace, infer)
    mutations = tuple((buffer, renamed.get(value, value)) for buffer, value in mutations)
    trace, mutations = with_copies_returned(trace, mutations, infer)
    trace = with_old_values(trace, {buffer for buffer, _ in mutations}, renamed)
    originals = {p.value: at_rest.get(id(trace.tensors[p.value]), trace.tensors[p.value]) for p in trace.params}
    trace, mutations = with_casts_of(trace, mutations, originals | _inputs_by_value(trace.inputs, *given))
    trace = cast_before_use(trace, {trace.loss, *trace.returned, *(value for pair in mutations for value in pair)})
    whole, trace = trace, remove_dead(trace, tuple(value for _, value in mutations))
    if not as_written and found.own_gradients and trains and not trace.metas[trace.loss].type.grad:
        raise OtherGradients(f"gradients of {trace.name} go through {found.own_gradients[0]} alone, as it is written")
    program = program_of(as_reshapes(trace), mutations, trains=trains)
    program = program.replace(buffers=tuple(dataclasses.replace(b, assigned=b.fqn in found.assigned) for b in program.buffers))
    return _Passed(program, with_flows(trace, program), whole, originals, frozen)


def _compare(passed: _Passed, calls: Calls, given: Inputs, **how: Any) -> None:
    """CaptureError if the program does not compute what the model computed. how: as of `check_program`."""
    program, trace = passed.program, passed.trace
    checked = program.replace(ops=tuple(t.op for t in passed.whole.ops)) if drops_randomness(passed.whole, trace) else program
    tensors = dict(trace.tensors) | passed.leaves()
    check_program(checked, calls, tensors, _inputs_by_value(program.inputs, *given), trace.returned, **how)


def _compare_other(other: Captured, passed: _Passed, calls: Calls, given: Inputs, dtype: torch.dtype | None) -> None:
    """CaptureError if another program of the model does not compute what the model computed."""
    own = passed.leaves()
    named = {p.fqn: own[p.value] for p in passed.program.params}
    named |= {b.fqn: passed.trace.tensors[b.value] for b in passed.program.buffers if b.fqn is not None}
    program = other.program
    leaves: tuple[Param | Buffer, ...] = (*program.params, *program.buffers)
    tensors = {x.value: other.tensors[x.value] if x.fqn is None else named[x.fqn] for x in leaves}
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors.values()):
        return  # where it is run, it is said
    alone = dataclasses.replace(calls, calls=tuple(dataclasses.replace(call, returned=()) for call in calls.calls))
    check_program(program, alone, tensors, _inputs_by_value(program.inputs, *given), dtype=dtype, answers=other.answers)


def _functions_as_written(trace: Trace) -> set[Any]:
    """The autograd functions whose calls are regions."""
    return {region.module.function for region in _regions(trace) if isinstance(region.module, Applied)}


def _regions(trace: Trace) -> list[Region]:
    return [x for x in dict[str, Any](trace.tensors).values() if isinstance(x, Region)]


def _changes_gradients(found: TracedCall, trace: Trace) -> bool:
    """Whether code of the user's may give other gradients than autograd: hooks that look at them alone do not."""
    others = [name for name in found.own_gradients if not name.startswith(HOOK)]
    regions = _regions(trace)
    return bool(others) or (bool(found.own_gradients) and not (regions and all(map(is_observer, regions))))


def _one_stage(regions: Sequence[Region], by_hooks: Collection[str]) -> str:
    """As of Program, of what hooks leave: those that only look are told on all ranks."""
    hooks = [region.name for region in regions if not is_observer(region)]
    return f"{hooks[0]} leaves {min(by_hooks)} in backward, which the ranks of one stage alone would have" if hooks else ""


def _refuse_own_gradients(name: str, found: TracedCall, functions: Collection[Any], *, real: bool) -> None:
    """CaptureError if gradients of the model's own are in the trace, which nothing compares. name: of the program. functions: those whose
    calls are regions. real: whether the model has data."""
    unseen = [function for function in dict.fromkeys(found.own_gradients) if function not in {f.__qualname__ for f in functions}]
    if unseen:
        remedy = "capture with check=True" if real else "build the model with data, not on the meta device"
        raise CaptureError(
            f"the forward of {name} computes gradients of its own ({', '.join(unseen)}), which a "
            f"graph of operators does not show\n  what to do: {remedy}, so that they are compared"
        )


def _notes(program: Program, found: TracedCall, left_out: Sequence[str], *, twice: bool) -> Iterator[str]:
    """What explain says of the capture. left_out: where the forward leaves tensors that the program does not give. twice: whether functions
    of torch.utils.checkpoint ran."""
    if left_out:
        listed = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
        yield f"the forward leaves tensors in {listed}; the parallel module does not"
    if asked_of_inputs := found.answers.said_of_inputs:
        yield f"the batch chooses, at {'; '.join(asked_of_inputs)}: one of another answer is captured when it first comes"
    moved = [b.fqn for b in program.buffers if b.mutated and b.fqn is not None]
    if twice and moved:
        listed = f"{', '.join(moved[:2])}{' and others' if len(moved) > 2 else ''}"
        said = "torch.utils.checkpoint: on one process its function runs again in backward, and what it does to buffers is done twice"
        yield f"{said}; here it is done once ({listed} change in a call)"
    if program.outputs:
        nbytes = sum(program.types[v].nbytes for v in program.outputs)
        said = f"outputs: {len(program.outputs)} tensors beside the loss, {nbytes} bytes in all, are whole on every rank after a call"
        yield f"{said}, which neither the time nor the memory of the plan counts"


def _check_written(program: Program, answers: Answers, dtype: torch.dtype | None) -> None:
    """CaptureError if parameters that a call writes to before it uses them are cast, or are used by what runs as it is written."""
    values = {p.value for p in program.params if p.fqn in answers.written_names}
    as_written = any(op.target == REGION and not values.isdisjoint(refs(op)) for op in program.ops)
    if values and (dtype is not None or as_written):
        why = "is used by what runs as it is written" if as_written else "is cast to a lower dtype where it is used"
        raise CaptureError(
            f"the forward of {program.name} writes to {', '.join(sorted(answers.written_names))}, which {why}\n  what to do: change "
            f"parameters after optimizer.step()"
        )


def _inner(program: Program) -> frozenset[str]:
    """The outputs of which others, or the loss of the model's own, are computed in a way that gradients go."""
    ends = set(program.outputs)
    of: dict[str, frozenset[str]] = {}  # value -> the outputs that it is computed of
    inner = set[str]()
    for op in program.ops:
        found = frozenset().union(*(of.get(r, frozenset()) for r in refs(op))) if not op.no_grad else frozenset[str]()
        for o in op.outputs:
            if o is not None and program.types[o].grad:
                of[o] = found | ({o} if o in ends else set())
                inner |= found if o in ends or (program.own_loss and o == program.loss) else set()
    return frozenset(inner)


def _given(name: str, found: TracedCall, left: Collection[str], calls: Calls | None, stands: Collection[str]) -> tuple[str, ...]:
    """Of the places at which a call leaves a tensor, or a number made of one, those of which the program gives it: all that it can, or,
    of a call that computes the loss alone, what stands in no attribute, is added to what calls before have left, or is read by the next.
    What else stands in one is computed when it is read. CaptureError if one that is no attribute is not among them: something else reads
    there. name: of the model. left: of tensors. stands: the attributes and closures that calls read before."""
    numbers = sorted(found.numbers & calls.left.left_out) if calls is not None else []
    appended = calls.left.appended if calls is not None else frozenset()
    made = [c.path for c in found.changes if c.path in left and isinstance(c.after, torch.Tensor)]
    if found.returned is None:
        made = [path for path in made if path in appended or not of_a_module(path) or is_in(path, stands)]
    given = (*made, *numbers)
    if lost := [path for path in dict.fromkeys((*left, *appended)) if not (path in given or of_a_module(path))]:
        changes = [c for c in found.changes if c.path in lost]
        changes = changes or [Change(lost[0], ABSENT, "what it computes")]
        refuse_changing(name, changes, (), given=False)
    return given


def _check_precision(model: nn.Module, at_rest: Mapping[int, torch.Tensor], frozen: Mapping[str, torch.Tensor]) -> None:
    """at_rest: of parameters in a lower dtype than they rest in, by their ids. frozen: those that the forward writes to."""
    for name, tensor in frozen.items():
        original = at_rest.get(id(tensor))
        if original is not None and original.dtype != tensor.dtype:
            raise CaptureError(
                f"the forward of {type(model).__name__} changes the frozen parameter {name}, which rests in {original.dtype}, and computes "
                f"in {tensor.dtype}: what it adds would be rounded away\n  what to do: change it after optimizer.step(), or compile with "
                f"precision='fp32' and call the model inside of torch.autocast(dtype={tensor.dtype})"
            )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _defaults(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    signature = inspect.signature(model.forward)
    given = signature.bind(*args, **kwargs).arguments
    return tuple((n, p.default) for n, p in signature.parameters.items() if n not in given and p.default is not p.empty)


def _inputs_by_value(inputs: tuple[Input, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """In the order of their leaves."""
    values = {i.path: i.value for i in inputs}
    leaves = ((leaf_path(path), leaf) for path, leaf in pytree.tree_leaves_with_path((args, kwargs)))
    return {values[path]: leaf for path, leaf in leaves if path in values}
