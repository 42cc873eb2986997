"""The passes of capture, in the order in which they run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.answers import NONE, Answers
from autopar.capture.appended import Appended, emptied
from autopar.capture.applied import keeping_what_runs_again
from autopar.capture.around import as_not_traced, capturing, check_told, said_otherwise
from autopar.capture.aside import sparse_buffers_aside
from autopar.capture.assembled import program_of, with_flows
from autopar.capture.autocast import with_casts
from autopar.capture.border import TracedCall, check_border, observed, traced
from autopar.capture.calls import Calls, Inputs, apart, copied, of_a_module, refuse_changing
from autopar.capture.casts import cast_before_use
from autopar.capture.causal import with_known_masks
from autopar.capture.check import check_program, trainable_tensors
from autopar.capture.compute import explained, with_casts_of
from autopar.capture.drawn import Drawing, drawing
from autopar.capture.export import FAILURES
from autopar.capture.fewer import TooMuchWork, captured_and_compared
from autopar.capture.flops import work_of
from autopar.capture.functionalize import functionalize
from autopar.capture.guards import Guards
from autopar.capture.held import ABSENT
from autopar.capture.hidden import Hidden, Seen, can_be_hidden
from autopar.capture.hooked import refuse_left
from autopar.capture.imported import with_what_is_imported
from autopar.capture.infer import Inference
from autopar.capture.instances import NotRepeated, StandIns
from autopar.capture.islands import with_islands
from autopar.capture.labels import labels_in_rows
from autopar.capture.made import holding
from autopar.capture.normalise import (
    as_reshapes,
    drops_randomness,
    normalise,
    remove_dead,
    split_label_means,
    with_copies_returned,
    with_old_values,
)  # fmt: skip
from autopar.capture.order import in_one_order
from autopar.capture.own_gradients import OwnGradients, other_backward, own_gradients, runs_again
from autopar.capture.picked import with_picks_of_samples
from autopar.capture.refused import check_inputs, check_tensors
from autopar.capture.regions import Regions
from autopar.capture.repeats import Repeated, repeated
from autopar.capture.said import sayings_of
from autopar.capture.shaped import as_a_call_leaves_it
from autopar.capture.state import Change, State
from autopar.capture.trace import Trace, flatten
from autopar.capture.varying import Numbers
from autopar.capture.without_data import on_meta
from autopar.collector import held_back
from autopar.errors import (
    BufferMade,
    CaptureError,
    DependsOnValues,
    DrawsOutside,
    NoLoss,
    NotAsWritten,
    NumbersChange,
    OtherGradients,
    SparseGradients,
)
from autopar.ir import Buffer, Input, Param, Program, refs
from autopar.run.asked import OF_GRADIENTS
from autopar.run.autocast import Autocast
from autopar.run.checkpointed import functions_called
from autopar.run.grad_mode import buffers_without_gradients
from autopar.run.inputs import Arguments, arguments_of, check_attributes, given_as, positional_names
from autopar.run.key_values import without_key_value_cache
from autopar.run.objects import leaf_path
from autopar.run.outputs import Returned
from autopar.run.precision import computing_in, inputs_in
from autopar.run.region import REGION, Region
from autopar.run.region_modules import Applied
from autopar.run.varying import NO_NUMBERS, Varying

__all__ = ["Captured", "capture"]

SCALES = (2.0**-24, 2.0**24)  # of the loss, where gradients are not autograd's own: a bound on them may cut off none of the example's


@dataclass(frozen=True)
class Captured:
    """A program, and the tensor (possibly on meta) of each of its parameters, buffers and constants by value name.

    training: the model's mode when it was captured. guards: what capture froze, to be asked whether it is still so. written:
    attributes in which each forward of the original leaves a tensor; the program does not. defaults: the parameters of the
    forward that the example call left to their defaults, with these: the program has them frozen too. returns: what the model's
    forward returns, in words; '' for the loss alone. returned: the same with everything in it, where it was asked for. around_loss: its
    structure, where it was not; None if that is not known. autocast: what of torch.autocast was on around the call; the casts that it
    makes are in the program. answers: what the forward asked of the model's own parameters and buffers, for which the program holds. given:
    places at which the program could give the tensors that a call leaves.
    made: buffers of the state_dict that the first call makes, by name, where the program does not hold them.
    """

    program: Program
    tensors: Mapping[str, torch.Tensor]
    training: bool = True
    guards: Guards | None = None
    written: tuple[str, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()
    returns: str = ""
    returned: Returned | None = None
    autocast: tuple[Autocast, ...] = ()
    answers: Answers = NONE
    given: tuple[str, ...] = ()
    made: Mapping[str, torch.Tensor] = field(default_factory=dict)
    around_loss: Returned | None = None


def capture(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Arguments,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    check: bool = True,
    outputs: bool | None = False,
    dtype: torch.dtype | None = None,
    written: Collection[str] = (),
    trains: bool = True,
    sizes: bool = True,
    data: bool = True,
    beside: Callable[[Arguments], Captured] | None = None,
    varying: Varying = NO_NUMBERS,
) -> Captured:
    """The model's forward pass to its scalar loss as a Program, in the model's present mode (train or eval).

    example_inputs: a tuple of positional or a mapping of keyword inputs of one call, the global batch; shapes are frozen to theirs. The
    model may lie on the meta device; of its inputs only shapes and dtypes are taken then. loss: loss(output) gives the scalar loss where
    the forward does not return one. check: run model and program twice in a row on the inputs and compare loss, gradients and buffers (not
    on meta; on fewer samples where one device has no memory for all, or they are much to compute, which a note says). outputs: the tensors
    that the model returns
    beside the loss are in the program too; None: if it returns no loss, for the user to make one of them. dtype: what float32 parameters
    and inputs are cast to where they are used (`run.precision`); None: nothing is cast. written: names of frozen parameters that other
    calls write to: buffers, like those that this call writes to. trains: the loss must require a gradient; else, as in a call under
    torch.no_grad() that uses what is frozen alone, it may do without. sizes: the values of buffers may decide sizes (`h[:, self.mask]`),
    for which the program holds then; else what they decide runs as it is written. data: without it the model is captured as if all of it
    were on the meta device. beside: gives of inputs another program of the model, which is compared too. varying: numbers
    that the program takes as inputs; those that each call changes are among them in any case. The model is left as it was.
    Raises CaptureError with the line of the model's source and what to do, NoLoss if there is no loss.
    """
    arguments = arguments_of(example_inputs)
    with sparse_buffers_aside(model), on_meta(model, arguments, any_model=not data) as of, buffers_without_gradients(model):
        how: dict[str, Any] = {"outputs": outputs, "dtype": dtype, "written": written, "trains": trains, "sizes": sizes, "beside": beside}
        how["varying"] = varying
        found = with_what_is_imported(
            lambda: _captured_and_checked(model, _beside(model, arguments), check, loss=loss, asked_of=given_as(example_inputs), **how)
        )
        return dataclasses.replace(found, tensors={v: of.get(id(t), t) for v, t in found.tensors.items()}) if of else found


def _captured_and_checked(
    model: nn.Module, example: Inputs, check: bool, *, loss: Callable[[Any], torch.Tensor] | None, dtype: torch.dtype | None,
    varying: Varying, **how: Any,
) -> Captured:  # fmt: skip
    """example: where the model lies. how: as in `capture`, and as of `_captured`."""
    changing = set(varying.places)

    def at_once(example: Inputs, **more: Any) -> Captured:
        with as_not_traced() as traced:
            try:
                return _captured(model, example, loss, dtype=dtype, varying=varying._replace(places=frozenset(changing)), **how, **more)
            except (Appended, BufferMade, DrawsOutside, NoLoss, NumbersChange, OtherGradients, SparseGradients):
                raise
            except CaptureError:
                if not traced.asked:
                    raise
        now = varying._replace(places=frozenset(changing))
        return _captured(model, example, loss, dtype=dtype, varying=now, **how, **more)  # what it does where it is traced

    appended: list[list[Any]] = []

    def once(example: Inputs, **more: Any) -> Captured:
        try:
            with emptied(appended):
                found = at_once(example, appended=tuple(appended), **more)
        except Appended as error:
            appended.extend(error.lists)
            return once(example, **more)
        except NumbersChange as error:
            before, new = set(changing), set(error.places) - changing
            if not new:
                raise
            changing.update(new)
            try:
                return once(example, **more)
            except CaptureError as other:
                changing.clear()
                changing.update(before)
                raise error from other
        except BufferMade as error:
            begun = functools.partial(once, example, **more)
            return as_a_call_leaves_it(model, loss, inputs_in(dtype, example), begun, dtype=dtype, error=error)
        if not found.made:
            return found
        with holding(model, found.made):
            return at_once(example, **more)

    def captured(example: Inputs, most: float) -> Captured:
        try:
            return captured_with_what_is_left(example, most)
        except OtherGradients:
            with computing_in(dtype, model):
                again = runs_again(model, loss, copied(inputs_in(dtype, example)))
            if again:
                with contextlib.suppress(OtherGradients), keeping_what_runs_again(again):
                    return captured_with_what_is_left(example, most)
            with computing_in(dtype, model):
                own = own_gradients(model, loss, copied(inputs_in(dtype, example)))
            if not (own.modules or own.functions or own.hooks or own.whole):
                raise
            return once(example, most=most, as_written=own)
        except DrawsOutside as error:
            try:
                with computing_in(dtype, model):
                    drawn = drawing(model, loss, inputs_in(dtype, example))
                return once(example, most=most, drawn=drawn)
            except (CaptureError, *FAILURES) as other:  # of the model too, which may be too large
                raise DrawsOutside(f"{error}{other}" if isinstance(other, NotAsWritten) else str(error)) from other

    def captured_with_what_is_left(example: Inputs, most: float) -> Captured:
        found = once(example, most=most)
        return once(example, most=most, places=found.given) if found.given else found

    if not check:
        return captured(example, 0.0)
    found, notes = captured_and_compared(captured, example, _alike)
    return dataclasses.replace(found, program=found.program.replace(notes=(*found.program.notes, *notes))) if notes else found


def _alike(one: Captured, other: Captured) -> bool:
    return [op.target for op in one.program.ops] == [op.target for op in other.program.ops]


def _captured(
    model: nn.Module, example: Inputs, loss: Callable[[Any], torch.Tensor] | None, *, most: float, outputs: bool | None,
    dtype: torch.dtype | None, written: Collection[str], trains: bool, sizes: bool, as_written: OwnGradients | None = None,
    places: tuple[str, ...] = (), beside: Callable[[Arguments], Captured] | None = None, asked_of: Inputs,
    appended: tuple[list[Any], ...] = (), varying: Varying = NO_NUMBERS, drawn: Drawing | None = None,
) -> Captured:  # fmt: skip
    """What `capture` gives. most: how much work a pass may be that is compared with the model; 0: none is, TooMuchWork if it is more.
    as_written: what runs as it is written. places: those of which the program gives the tensors that a call leaves there; without them,
    those that it could give are in `given`. beside: as of `capture`. asked_of: the example as the user gave it. appended: lists to which
    calls append, and which are empty. varying: as of `capture`. drawn: what draws
    numbers of Python and numpy, and runs as it is written."""
    args, kwargs = example
    check_inputs(model, example)
    infer = Inference()
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
            numbers = Numbers(varying, inputs, positional_names(model), start)
            found, trace = _traced(
                model, loss, inputs, start, outputs=outputs, as_written=as_written, leaves=places, sizes=sizes, varying=numbers, drawn=drawn
            )
            checkpointed = functions_called() - checkpointed
            trace, mutations = functionalize(with_casts(trace, infer), infer, written)
            trace, mutations = in_one_order(trace, mutations)
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
            if as_written is None and found.own_gradients and trains and not trace.metas[trace.loss].type.grad:
                raise OtherGradients(f"gradients of {trace.name} go through {found.own_gradients[0]} alone, as it is written")
            program = program_of(as_reshapes(trace), mutations, trains=trains)
            trace = with_flows(trace, program)
        names = trace.returned[: len(trace.returned) - len(places)]
        returned = None if found.returned is None else dataclasses.replace(found.returned, names=names)
        _check_written(program, found.answers, dtype)
        check_told(program, told)
        real = all(t.device.type != "meta" for t in (*trace.tensors.values(), *_tensors(inputs)))
        if real and 0 < most < (work := work_of(program)):
            raise TooMuchWork(work)
        trainable = trainable_tensors(program, trace.tensors) if most and real else None
        compared = None if trainable is None else tuple(trainable.values())
        if as_written is None and trainable is not None and found.hooks:
            raise OtherGradients(f"{program.name} registers {found.hooks[0]} on an activation in its forward")
        modules = [x.module for x in dict[str, Any](trace.tensors).values() if isinstance(x, Region)]
        as_regions = {m.function for m in modules if isinstance(m, Applied)}
        unseen = [name for name in dict.fromkeys(found.own_gradients) if name not in {f.__qualname__ for f in as_regions}]
        if as_written is None and (trainable is not None or not real) and found.own_gradients:
            if function := other_backward(model, loss, copied(inputs), as_regions):
                raise OtherGradients(f"{function} has another backward than autograd's in the forward of {program.name}")
        scales = SCALES if found.own_gradients else ()
        outside: dict[str, Any] = {"outputs": found.returned is not None, "frozen": frozen, "leaves": places, "appended": appended}
        outside["varying"] = numbers
        watched = functools.partial(observed, model, loss, inputs, start, found, compared, **outside)
        calls = watched(scales=scales)
        again = functools.partial(watched, reseed=False)
        left = check_border(model, loss, inputs, start, found, trace, calls, checked=trainable is not None, again=again)
        refuse_left(dict[str, Any](trace.tensors).values(), left)
        if trainable is not None and calls is not None:
            checked = program.replace(ops=tuple(t.op for t in whole.ops)) if drops_randomness(whole, trace) else program
            leaves = {p.value: originals[p.value].detach().requires_grad_(p.trainable) for p in program.params}
            check_program(
                checked, calls, dict(trace.tensors) | leaves, _inputs_by_value(program.inputs, *copied(given)), trace.returned, dtype=dtype,
                answers=found.answers, returned=returned,
            )  # fmt: skip
            if beside is not None:
                named = {p.fqn: leaves[p.value] for p in program.params}
                named |= {b.fqn: trace.tensors[b.value] for b in program.buffers if b.fqn is not None}
                _check_other(beside(Arguments(args, kwargs)), calls, named, copied(given), dtype)
        elif unseen and (real or found.hooks or as_written is not None):
            remedy = "capture with check=True" if real else "build the model with data, not on the meta device"
            raise CaptureError(
                f"the forward of {program.name} computes gradients of its own ({', '.join(unseen)}), which a "
                f"graph of operators does not show\n  what to do: {remedy}, so that they are compared"
            )
    could = _given(program.name, found, left, calls)
    left_out = tuple(path for path in left if path not in places)
    if left_out:
        listed = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
        program = program.replace(notes=(*program.notes, f"the forward leaves tensors in {listed}; the parallel module does not"))
    guards.read(found.attributes)
    guards.set_modes(found.modes)
    guards.vary(found.varied)
    if calls is not None:
        guards.follow((*left, *calls.counted), calls.settled, calls.left)
        guards.said(sayings_of(program, found.shows, () if calls is None else calls.said))
    guards.answered(found.answers)
    if asked_of_inputs := found.answers.said_of_inputs:
        said = f"the batch chooses, at {'; '.join(asked_of_inputs)}: one of another answer is captured when it first comes"
        program = program.replace(notes=(*program.notes, said))
    ours = trace.returned[len(trace.returned) - len(places) :] if places else ()
    guards.given(dict(zip(places, ours, strict=True)), found.numbers)
    if around.asked or not (trains or trace.metas[trace.loss].type.grad):
        guards.ask_for(around.mode)
    moved = [b.fqn for b in program.buffers if b.mutated and b.fqn is not None]
    if checkpointed and moved:
        listed = f"{', '.join(moved[:2])}{' and others' if len(moved) > 2 else ''}"
        said = "torch.utils.checkpoint: on one process its function runs again in backward, and what it does to buffers is done twice"
        program = program.replace(notes=(*program.notes, f"{said}; here it is done once ({listed} change in a call)"))
    if program.outputs:
        nbytes = sum(program.types[v].nbytes for v in program.outputs)
        said = f"outputs: {len(program.outputs)} tensors beside the loss, {nbytes} bytes in all, are whole on every rank after a call"
        program = program.replace(notes=(*program.notes, f"{said}, which neither the time nor the memory of the plan counts"))
        if found.returned is not None and not found.returned.own_loss:
            program = program.replace(own_loss=False)
    returned = None if returned is None else dataclasses.replace(returned, inner=_inner(program))
    return Captured(
        program, dict(trace.tensors), model.training, guards, left_out, _defaults(model, args, kwargs), found.returns, returned,
        around.autocast, found.answers, () if places else could, {} if calls is None else calls.made,
        found.around_loss,
    )  # fmt: skip


def _check_other(
    other: Captured, calls: Calls, named: Mapping[str, torch.Tensor], given: Inputs, dtype: torch.dtype | None
) -> None:
    """CaptureError if another program of the model does not compute what the model computed. named: the model's tensors."""
    program = other.program
    leaves: tuple[Param | Buffer, ...] = (*program.params, *program.buffers)
    tensors = {x.value: other.tensors[x.value] if x.fqn is None else named[x.fqn] for x in leaves}
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors.values()):
        return  # where it is run, it is said
    alone = dataclasses.replace(calls, calls=tuple(dataclasses.replace(call, returned=()) for call in calls.calls))
    check_program(program, alone, tensors, _inputs_by_value(program.inputs, *given), dtype=dtype, answers=other.answers)


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


def _given(name: str, found: TracedCall, left: Collection[str], calls: Calls | None) -> tuple[str, ...]:
    """Of the places at which a call leaves a tensor, or a number made of one, those of which the program can give it. CaptureError if one
    that is no attribute is not among them: something else reads there. name: of the model. left: of tensors."""
    numbers = sorted(found.numbers & calls.left.left_out) if calls is not None else []
    made = [c.path for c in found.changes if c.path in left and isinstance(c.after, torch.Tensor)]
    given = (*made, *numbers) if found.returned is not None else ()
    appended = calls.left.appended if calls is not None else frozenset()
    if lost := [path for path in dict.fromkeys((*left, *appended)) if not (path in given or of_a_module(path))]:
        changes = [c for c in found.changes if c.path in lost]
        changes = changes or [Change(lost[0], ABSENT, "what it computes")]
        refuse_changing(name, changes, set(), given=found.returned is not None, outputs_would_do=found.returned is None)
    return given


def _traced(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State, *, outputs: bool | None,
    as_written: OwnGradients | None, leaves: tuple[str, ...] = (), sizes: bool = True, varying: Numbers, drawn: Drawing | None,
) -> tuple[TracedCall, Trace]:  # fmt: skip
    """The trace, in which the smallest submodules around what cannot be exported are one operator each, and those of `as_written` and
    `drawn`; where there is none, the operators whose sizes depend on values; and else the program holds for what inputs have decided."""
    regions = Regions(model, loss, inputs)
    if as_written is not None and as_written.whole:
        if not regions.include_model(as_written.whole):
            raise OtherGradients(f"cannot capture {type(model).__name__} with gradients that it asks for itself{as_written.remedy}")
    elif as_written is not None:
        regions.include_all(as_written)
    elif drawn is not None:
        if not regions.include_drawn(drawn):
            raise NotAsWritten(regions.why_not())
    elif not varying:
        again = repeated(model, loss, inputs, start, outputs=outputs)
        for hides in (True, False) if again.same and not leaves else ():
            with contextlib.suppress(CaptureError, NotRepeated, Seen):  # which the trace of every call explains
                return _with_stand_ins(model, loss, inputs, start, regions, again, outputs=outputs, hides=hides)
    first: CaptureError | None = None
    numbers = False
    while True:
        try:
            with regions.standing_in() as applied:
                found = traced(
                    model, loss, copied(inputs), start, outputs=outputs, sizes=sizes, leaves=leaves, numbers=numbers, varying=varying
                )
            labels_in_rows(found.exported.graph_module)
            trace = flatten(model, found.exported, start, regions, varying=varying)
            if varying and any(isinstance(x, Region) for x in dict[str, Any](trace.tensors).values()):
                raise CaptureError(f"some of {type(model).__name__} runs as it is written, and reads numbers itself")
            first = None  # whose traceback holds this frame, and tensors
            return found, trace
        except (BufferMade, NoLoss, NumbersChange, OtherGradients, SparseGradients):
            raise
        except CaptureError as error:
            if varying:
                raise
            first = first or error
            if regions.include_functions(applied, error) or regions.include_functions_that_draw(error) or regions.include(error):
                continue
            if isinstance(error, DependsOnValues) and with_islands(model, found.exported, inputs, regions):
                return found, flatten(model, found.exported, start, regions)
            if error.asks_inputs and not numbers:
                numbers = True
                continue
            raise CaptureError(f"{first}{regions.why_not(first)}") from first.__cause__


def _with_stand_ins(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] | None, inputs: Inputs, start: State, regions: Regions, again: Repeated,
    *, outputs: bool | None, hides: bool,
) -> tuple[TracedCall, Trace]:  # fmt: skip
    """The trace, for which of calls that do the same one is traced. NotRepeated if they do not in the export. hides: the state of the
    others is hidden from it."""
    stand_ins = StandIns(model, again.same)
    unused = [m for path in again.same for m in model.get_submodule(path).modules()]
    if hides and not can_be_hidden(model, unused):
        raise NotRepeated("what is stood for shares memory with others")
    hidden = Hidden(unused if hides else ())
    with stand_ins.standing_in():
        found = traced(model, loss, copied(inputs), start, outputs=outputs, hidden=hidden, answers=False)  # one call is told for all
    if hidden.seen:
        raise Seen
    if found.attributes:
        raise NotRepeated("attributes of the tensors of what is stood for are read")
    if found.modes:
        raise NotRepeated("what is stood for may set training modes")
    if found.own_gradients or [str(c) for c in found.changes] != [str(c) for c in again.changes]:
        raise NotRepeated("what is stood for changes something")
    labels_in_rows(found.exported.graph_module)
    return found, flatten(model, found.exported, start, regions, stand_ins)


def _beside(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs where the model lies, as the parallel module takes them from anywhere; on meta if any of it does. What is one tensor there
    is one here."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    meta = {d for d in devices if d.type == "meta"}
    if len(meta or devices) != 1:
        return inputs
    (device,) = meta or devices
    known: dict[int, torch.Tensor] = {}

    def moved(t: torch.Tensor) -> torch.Tensor:
        if t.device == device or t.is_meta:
            return t
        if id(t) not in known:
            known[id(t)] = t.detach().to(device).requires_grad_(t.requires_grad)
        return known[id(t)]

    found: Inputs = pytree.tree_map_only(torch.Tensor, moved, inputs)
    return found


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
