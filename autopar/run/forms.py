"""Which form of a module runs for a call: there is one for each mode of its submodules, each torch.autocast around the call, each shape
of its inputs, and each choice of parameters that train otherwise than planned, captured at the first such call and again where something
that was frozen at capture has changed."""

from __future__ import annotations

import functools
import inspect
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError, LaunchError, NoLoss
from autopar.run import record, state, watchdog
from autopar.run.autocast import Autocast
from autopar.run.form import Anew, Form
from autopar.run.grad_mode import with_gradients
from autopar.run.inputs import Path, Shapes, Structure, arguments_of, as_example, given_as, structure_of
from autopar.run.lies import Lies
from autopar.run.manifest import Manifest
from autopar.run.region import regions_of
from autopar.run.varying import AsPlaced, Number, Varying

__all__ = ["Another", "Call", "Forms"]

# The mode of each module, what autocast is on, each input's shape or its value, how they are put together, and which parameters train
# otherwise than planned; and what is asked for beyond what it was compiled for.
Key = tuple[bytes, tuple[Autocast, ...], Shapes, Structure, tuple[str, ...], str]
Another = Callable[[Any, str, str, Varying], Anew]
FORMS = 64  # that a module keeps: each holds a captured program
GROWN = 3  # programs of calls without gradients whose states have other sizes, after which no other one is made
MANY = 16  # of which its user hears: it is some value that changes at every step, or sequences of every length


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of the module. args, kwargs: those of the original. given: both, as the user gave them. modes: of the module and each of
    its submodules, whether it trains. otherwise: the parameters that require a gradient and did not when the model was compiled, or do
    not and did, if that may matter. compared: all ranks compare how they are called. outputs: 'all' where the original may compute what
    cannot run as planned. autocast: what is on around it. asked: of what the original returns, more than it was compiled for:
    'all': all of it is computed; 'trained': and the user makes the loss of it. stood: numbers that stood in attributes when it began, by
    their places."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    given: tuple[tuple[object, ...], dict[str, object]]
    modes: bytes
    otherwise: tuple[str, ...]
    compared: bool
    outputs: str
    autocast: tuple[Autocast, ...]
    asked: str = ""
    stood: dict[str, Any] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        return bool(self.modes[0])

    def numbers(self, form: Form) -> tuple[Number, ...]:
        """Those that are inputs of what runs."""
        argument = functools.partial(form.batch.argument, self.args, self.kwargs)
        return form.varied.values(argument, self._stood) if form.varied.leaves else ()

    def _stood(self, place: AsPlaced) -> Any:
        found = self.stood.get(place.path)
        if found is None:
            found = place.now()
            if isinstance(found, int | float | Tensor):  # else the place is another one: of a container as it stood for another form
                self.stood[place.path] = found
        return found


class Forms:
    """The forms of a module. first: as it was compiled, in these modes and under this autocast, with these example inputs (None: it is as
    if they were all apart). original: the user's model, if there is one. another: makes the form for other inputs or other modes, from
    the inputs, from what has changed, in words, from what is asked for, as of a call, and from the numbers that calls have otherwise; None:
    there is no other than the first. whole: collective, a parameter or buffer by its name."""

    def __init__(
        self, first: Form, *, modes: bytes, autocast: tuple[Autocast, ...], original: nn.Module | None, another: Another | None,
        whole: Callable[[str], Tensor], example: Any = None,
    ) -> None:  # fmt: skip
        self.first = first
        self._whole = whole
        self.another = another
        self.autocast = autocast
        self._original = original
        self._used: dict[Form, None] = {first: None}  # the one that ran last comes last
        self._captures = 0
        self._seconds = 0.0  # that they took
        self._by_the_original: set[Key] = set()
        self._numbers: dict[Key, int] = {}
        self._varying = first.varied.of_all  # numbers that calls have had otherwise than others, and which programs take as inputs
        self._fixed = Varying()  # those of which it is another program for each
        self._signature: tuple[object, inspect.Signature] | None = None  # of a function
        self._is_structured = example is not None  # else it is not known of the first form
        beside: Shapes = ()
        structure: Structure | None = ()
        if example is not None:
            args, kwargs = arguments_of(example)
            beside, structure = self._asked_of(*given_as(example)), self._structure(args, kwargs)
        self._made: dict[Key, list[Form]] = {(modes, autocast, first.batch.expected + beside, structure or (), (), ""): [first]}

    def of(self, call: Call) -> Form | None:
        """What runs for a call: in another mode than captured, for other inputs, or where something that was frozen at capture has
        changed, another form of the same decisions, where autopar.compile has left the means to make one. None if the original itself
        must, for all its outputs. Raises ValueError, CaptureError."""
        first = self.first
        mesh, manifest = first.mesh, first.manifest
        structure = self._structure(call.args, call.kwargs)
        if structure is None:
            return first  # which says what is missing or not known
        if call.otherwise and self.another is None:
            raise ValueError(
                f"parameter {call.otherwise[0]} did not require a gradient when the model was compiled, so that none was planned for it. "
                f"Unfreeze it before the model is compiled, and freeze what compile returned (requires_grad_(False)), which may be undone "
                f"at any time"
            )
        given = self._of_any_number(first.batch.shapes(call.args, call.kwargs)) + self._asked_of(*call.given)
        key = call.modes, (around := call.autocast), given, structure, call.otherwise, call.asked
        if mesh.talks:
            record.given(self._number(key))
        if call.compared:
            mesh.check_equal(
                key, "the shapes of the inputs, the training mode, torch.autocast around the call, or what is frozen,", shown=_shown(key),
                remedy="All ranks must be called alike. A last batch that does not divide is filled by autopar.Padding(..., "
                "batch_size=...), or left out (drop_last=True)",
            )
        changed = None
        moved = frozenset[str]()
        for place, form in enumerate(self._made.get(key, [])):
            if (changed := self.changed(form, call)) is None:
                self._decides(key, again=False, place=place)
                self._runs(form)
                return form
            moved = form.guards.moved if form.guards is not None else moved
        if self.another is not None:
            if not torch.is_grad_enabled() and (key in self._by_the_original or self._grow(key, call)):
                self._by_the_original.add(key)
                self._decides(key, again=False)
                return None
            self._decides(key, again=True, why=changed or "it is called with other inputs or in another mode than before, or others train")
            inputs = as_example(*first.batch.whole(call.args, call.kwargs), given=call.given)
            start = time.perf_counter()
            varying = self._varies(key, moved)
            try:
                anew = self.another(inputs, changed or "", call.asked, varying)
            except (CaptureError, ValueError) as why:
                if torch.is_grad_enabled():
                    raise
                if not isinstance(why, NoLoss):
                    warnings.warn(f"the original computes this call, with whole parameters on every rank: {why}", stacklevel=2)
                elif call.outputs != "all":
                    raise NoLoss(f"{why}. Or compile with outputs='all': then a call under torch.no_grad() needs no loss") from why
                self._by_the_original.add(key)
                return None
            with with_gradients():
                device, manifest = first.outputs.device, anew.emitted.MANIFEST
                constants = self._constants_of(manifest, anew.tensors) | regions_of(manifest, anew.tensors, device)
            form = Form(
                anew.emitted, constants, mesh, device, local_batch=first.batch.local, guards=anew.guards,
                returned=anew.returned, around_loss=anew.around_loss, forward_only=anew.forward_only,
            )  # fmt: skip
            self._captures, self._seconds = self._captures + 1, self._seconds + time.perf_counter() - start
            if self._captures == MANY and mesh.rank == 0:
                warnings.warn(self._many(changed), stacklevel=2)
            self._note(varying, form)
            self._keep((*key[:2], self._of_any_number(given), *key[3:]), form)
            self._runs(form)
            return form
        if around != self.autocast:
            was, now = (", ".join(map(str, x)) or "no autocast" for x in (self.autocast, around))
            raise ValueError(f"{manifest.model} was captured inside of {was} and called inside of {now}. Call it as it was captured")
        if changed is not None:
            raise ValueError(f"{manifest.model} is not what was compiled: {changed}. Compile it again")
        if call.training != manifest.training and manifest.mode_dependent:
            modes = {True: "training", False: "evaluation"}
            raise ValueError(
                f"{manifest.model} was captured in {modes[manifest.training]} mode and is called in {modes[call.training]} "
                f"mode, in which it computes something else ({', '.join(manifest.mode_dependent)}). Load full_state_dict() into the "
                f"original model to evaluate it, or compile it in that mode"
            )
        return first

    def _grow(self, key: Key, call: Call) -> bool:
        """Whether what calls without gradients keep for the next one is of another size in each, as keys and values of what has been
        generated are: every one would be captured."""
        forms = [form for form in self._made.get(key, []) if form.varied.leaves and form.varied.of_other_sizes(call.numbers(form))]
        if len(forms) < GROWN:
            return False
        warnings.warn(
            f"the original computes such calls from now on, with whole parameters on every rank: what {self.first.manifest.model} keeps "
            f"from one to the next ({forms[0].varied.leaves[0].name}) is of another size in each",
            stacklevel=2,
        )
        return True

    def changed(self, form: Form, call: Call) -> str | None:
        """Collective: what has changed since a call of what its form froze, in words."""
        if form.forward_only and torch.is_grad_enabled():
            return "it was called without gradients"
        if form.guards is None:
            return None
        said = form.guards.changed(self._whole, functools.partial(self._input, call, {}))
        return form.varied.changed(call.numbers(form)) if said is None and form.varied.leaves else said

    def _of_any_number(self, given: Shapes) -> Shapes:
        """The inputs of a call, without the values of those that programs take as inputs."""
        arguments = self._varying.arguments
        if not arguments:
            return given
        return tuple((path, _kind(what) if path in arguments and isinstance(what, str) else what) for path, what in given)

    def _varies(self, key: Key, moved: frozenset[str]) -> Varying:
        """The numbers that what is captured for a call takes as inputs: those that others had otherwise. moved: where numbers have changed
        since the last one."""
        apart = (numbers for other in self._made if (numbers := _numbers_apart(key, other)))
        arguments = self._varying.arguments | (next(apart, frozenset[Path]()) - self._fixed.arguments)
        return Varying(arguments & {path for path, _ in key[2]}, self._varying.places | (moved - self._fixed.places))

    def _note(self, varying: Varying, form: Form) -> None:
        """varying: numbers that a form was to take as inputs. Those that it does not, or of which it asks what exactly they are, others
        need not."""
        taken, exactly = form.varied.of_all, form.varied.fixed
        arguments, places = taken.arguments - exactly.arguments, taken.places - exactly.places
        self._fixed = Varying(self._fixed.arguments | (varying.arguments - arguments), self._fixed.places | (varying.places - places))
        self._varying = Varying(
            (self._varying.arguments | arguments) - self._fixed.arguments, (self._varying.places | places) - self._fixed.places
        )

    def _input(self, call: Call, known: dict[Path, Tensor], path: Path) -> Tensor:
        """Collective, where each rank is given its own part: an input of a call, of the global batch. known: those that were asked for."""
        if not known:
            known |= self.first.batch.by_path(*self.first.batch.whole(call.args, call.kwargs))
        return known[self.first.batch.named(path)]

    def _asked_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes:
        """What the model's code may ask of the tensors of a call, beside their shapes."""
        guards = self.first.guards
        if guards is None or not any(guards.asks):
            return ()
        same, asks = guards.asks
        return self.first.batch.beside(args, kwargs, same=same, asks=asks)

    def _runs(self, form: Form) -> None:
        """Note which form ran last."""
        self._used.pop(form, None)
        self._used[form] = None

    def _keep(self, key: Key, form: Form) -> None:
        """Beside the first and those that ran last. All ranks are called alike, and let go of the same."""
        while len(self._used) >= FORMS:
            oldest = next(one for one in self._used if one is not self.first)
            del self._used[oldest]
            self._made = {k: left for k, forms in self._made.items() if (left := [one for one in forms if one is not oldest])}
        self._made.setdefault(key, []).append(form)

    def _many(self, changed: str | None) -> str:
        """That the model is captured very often, and what to do."""
        last = f" (the last change: {changed})" if changed else ""
        return (
            f"{self.first.manifest.model} was captured again {self._captures} times, for other inputs, modes or values each time, which "
            f"took {self._seconds:.3g} s. It goes on so, and keeps the {FORMS} programs that ran last. To be faster, give what changes at "
            f"every step as a tensor: an input, or a buffer{last}; and pad sequences to a few lengths (autopar.Padding)"
        )

    def _decides(self, key: Key, *, again: bool, place: int = 0, why: str = "") -> None:
        """Note what the call runs, and whether it captures the model again, for other ranks to read. LaunchError where others are called
        otherwise: collectives of other sizes would mix what they bring together, or wait for ever. place: of the form among those that
        differ in what their forward asks alone."""
        watch, mesh = watchdog.current(), self.first.mesh
        if watch is None or not mesh.talks:
            return
        mine = record.decided(self._number(key) ^ place << 1, again=again)
        if not again:
            if (other := watch.apart(mine)) is not None:
                first, second = sorted((mesh.rank, other))
                raise LaunchError(
                    f"ranks {first} and {second} are called with inputs of different shapes, or in different modes (training, "
                    f"torch.no_grad()). All ranks must be called alike: do an evaluation on all of them, of which rank 0 prints the "
                    f"result; fill a last batch that does not divide by autopar.Padding(..., batch_size=...), or leave it out "
                    f"(drop_last=True)"
                )
            return
        record.entered(record.AGREEMENT, mesh.everyone.name)
        other = watch.differing(mine)
        record.left()
        if other is not None:
            raise LaunchError(
                f"rank {mesh.rank} has to capture {self.first.manifest.model} again ({why}), and rank {other} does not, or for another "
                f"reason. What a model computes must change on all ranks alike: make the change, and give inputs of the same shapes, in "
                f"the same call on every rank, or keep what changes in a buffer or an input"
            )

    def _number(self, key: Key) -> int:
        """For a key, and whether gradients are on: the same on every rank."""
        known = self._numbers
        if key not in known:
            if len(known) > FORMS:
                known.clear()
            known[key] = zlib.crc32(repr(key).encode())
        return known[key] ^ torch.is_grad_enabled()

    def _structure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Structure | None:
        """How the arguments of a call are put together; None if the original's forward cannot be called so."""
        if self.another is None or self._original is None:
            return ()
        forward = self._original.forward
        function = getattr(forward, "__func__", forward)  # a bound method is another object each time
        if self._signature is None or self._signature[0] is not function:
            self._signature = function, inspect.signature(forward)
        try:
            bound = self._signature[1].bind(*args, **kwargs)
        except TypeError:
            return None
        guards = self.first.guards
        return structure_of(bound, guards.reads if guards is not None else lambda _: False) if self._is_structured else ()

    def _constants_of(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mesh, device = self.first.mesh, self.first.outputs.device
        specs = [spec for spec in manifest.buffers if spec.constant and not spec.region]
        found = ((spec, Lies(spec, mesh), full) for spec, full in state.distribute(specs, tensors, mesh, device))
        return {spec.name: lies.cut(full).clone() for spec, lies, full in found if lies.holds}


def _numbers_apart(key: Key, other: Key) -> frozenset[Path]:
    """The arguments in which two calls differ, if in nothing else but numbers of the same kinds."""
    _, _, given, _, _, _ = key
    _, _, before, _, _, _ = other
    if (*key[:2], *key[3:]) != (*other[:2], *other[3:]) or [path for path, _ in given] != [path for path, _ in before]:
        return frozenset()
    differ = [(path, a, b) for (path, a), (_, b) in zip(given, before, strict=True) if a != b]
    numbers = all(isinstance(a, str) and isinstance(b, str) and _kind(a) == _kind(b) in _KINDS for _, a, b in differ)
    return frozenset(path for path, _, _ in differ) if numbers else frozenset()


_KINDS = ("int", "float")


def _kind(what: str) -> str:
    """The type of an argument that is no tensor, of its words."""
    return what.partition(" ")[0]


def _shown(key: Key) -> str:
    """A key, for people."""
    modes, around, shapes, _, otherwise, _ = key
    given = ", ".join(f"{'.'.join(map(str, path))} {shape if isinstance(shape, str) else _of_a_tensor(*shape)}" for path, shape in shapes)
    mode = "training" if all(modes) else "evaluation" if not any(modes) else f"evaluation of {modes.count(0)} of {len(modes)} modules"
    more = f" and {len(otherwise) - 1} more" if otherwise[1:] else ""
    trained = f", {otherwise[0]}{more} frozen or not otherwise than planned" if otherwise else ""
    return f"{given or 'no inputs'}, in {mode} mode{''.join(f', inside of {one}' for one in around)}{trained}"


def _of_a_tensor(dtype: torch.dtype, shape: tuple[int, ...], grad: bool) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{', with a gradient' if grad else ''}"
