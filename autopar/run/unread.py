"""What a call gives where the original returns more than its loss, and the loss alone was asked for: a tensor, the loss, with all that the
original returns around it. The other tensors are computed when they are read.

The call is run forward once more for that, with all that it returns, as it was: the same inputs, parameters and random numbers. Who reads
once reads again: later calls in the same mode compute all of it at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError
from autopar.run import comm, record
from autopar.run.again import Remembered
from autopar.run.alike import done_by_every_rank
from autopar.run.autocast import under, without
from autopar.run.backward import Backward
from autopar.run.form import Form
from autopar.run.forms import Call, Forms
from autopar.run.grad_mode import with_gradients
from autopar.run.outputs import Returned
from autopar.run.plain import is_size, plainly, users_level
from autopar.run.reading import Kind, Reading, Unreadable
from autopar.run.schedule import Made
from autopar.run.twice import Twice
from autopar.run.weights import Weights, buffers_kept

__all__ = ["Everything", "Loss", "Past", "Unread", "around", "as_returned", "left_at", "once_more"]

Begun = Callable[[Form, Mapping[str, Tensor], Sequence[tuple[str, nn.Parameter]], Mapping[str, Tensor]], Backward]
_OF_TENSORS = frozenset(dir(Tensor))


# ---------------------------------------------------------------------------------------------------- what a call gives
class Loss(Tensor):
    """The global loss, a scalar, and what the original returns around it (None: that is not known, and reading it raises). `.loss`,
    `["loss"]` and `[0]` are the loss, as a plain tensor, where the original's result has no other meaning for them. A tensor that is asked
    for by its name or place is read; what is unpacked or gone through may not be wanted, and is read when it is used."""

    _autopar_returns: str
    _autopar_plain: Tensor
    _autopar_all: Any
    _autopar_own: frozenset[str]  # attributes of the original's result that tensors have too

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As of the plain tensor; where the original's tuple of losses was given to autograd, of all in it."""
        kwargs = kwargs or {}
        if func in (torch.autograd.backward, torch.autograd.grad) and args:
            args = tuple(x for given in args[0] for x in _losses(given)), *args[1:]
        args, kwargs = pytree.tree_map_only(cls, lambda x: x._autopar_plain, (args, kwargs), is_leaf=is_size)
        return func(*args, **kwargs)

    @property
    def loss(self) -> Tensor:
        """The loss itself, or what the loop has put in its place."""
        held = self._autopar_all.get("loss") if isinstance(self._autopar_all, Mapping) else getattr(self._autopar_all, "loss", None)
        return held if isinstance(held, Tensor) else self._autopar_plain

    @loss.setter
    def loss(self, value: Any) -> None:
        self._known(".loss").loss = value

    def __getattribute__(self, name: str) -> Any:
        known = object.__getattribute__(self, "__dict__")
        if name in known.get("_autopar_own", ()):
            return _read(getattr(known["_autopar_all"], name))
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_autopar")) or (name.startswith("_") and not hasattr(self._autopar_all, name)):
            raise AttributeError(name)
        return _read(getattr(self._known(f".{name}"), name))

    def __getitem__(self, index: Any) -> Any:
        is_loss = isinstance(index, (str, int)) and index in ("loss", 0)
        if self._autopar_all is None and is_loss:
            return self._autopar_plain
        try:
            return _read(self._known(f"[{index!r}]")[index])
        except (LookupError, TypeError):
            if is_loss:
                return self._autopar_plain
            raise

    def __setitem__(self, index: Any, value: Any) -> None:
        self._known(f"[{index!r}]")[index] = value

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        return self[name] if name in self._known(".get") else default

    def keys(self) -> Any:
        """As of a dict."""
        return self._known(".keys").keys()

    def values(self) -> Any:
        """As of a dict."""
        return self._known(".values").values()

    def items(self) -> Any:
        """As of a dict."""
        return self._known(".items").items()

    def __contains__(self, name: object) -> bool:
        return name in self._known("its elements")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._known("its elements"))

    def __len__(self) -> int:
        return len(self._known("its elements"))

    def __format__(self, spec: str) -> str:
        return self._autopar_plain.__format__(spec)

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        return self._autopar_plain.__repr__(**how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved, it is the loss alone."""
        return self._autopar_plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._autopar_plain.__deepcopy__(memo)

    def _known(self, what: str) -> Any:
        if self._autopar_all is None:
            raise AttributeError(
                f"the original returns {self._autopar_returns}; the parallel module returns its loss alone, and not {what}. With "
                f"autopar.compile(model, ..., outputs='all') a call returns all of it"
            )
        return self._autopar_all


def as_returned(loss: Tensor, returns: str, result: Any = None) -> Tensor:
    """The loss as a call returns it. returns: what the original returns, in words; '' for the loss itself. result: all of that, with the
    loss in it."""
    if result is loss or (not returns and result is None):
        return loss
    found = loss.as_subclass(Loss)
    found._autopar_returns, found._autopar_plain, found._autopar_all = returns, loss, result
    own = _OF_TENSORS & getattr(result, "__dict__", {}).keys()
    if isinstance(result, dict) and type(result) is not dict:  # whose items may be attributes
        own |= {key for key in _OF_TENSORS & result.keys() if getattr(result, key, None) is result[key]}
    kind: Any = type(result)
    found._autopar_own = _own_names(kind) | own
    return found


def _losses(given: Any) -> Sequence[Any]:
    """What autograd was given, in a program whose model returns several losses in a tuple or list: these."""
    returned = given._autopar_all if type(given) is Loss else None
    if not isinstance(returned, tuple | list) or len(returned) < 2:
        return (given,)
    with plainly():
        are_losses = all(isinstance(x, Tensor) and x.dim() == 0 and x.dtype.is_floating_point for x in returned)
    return [_read(x) for x in returned] if are_losses else (given,)


@functools.cache
def _own_names(kind: type) -> frozenset[str]:
    """The attributes of a class that tensors have too."""
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set[str]()
    return frozenset(name for name in _OF_TENSORS & {*dir(kind), *fields} if not name.startswith("_"))


class Unread(Tensor):
    """Stands where the original returns a tensor that was not computed. Whatever is asked of it is asked of that tensor, which is computed
    then: collectively, on all ranks."""

    _tensor: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, cls.read, (args, kwargs or {}), is_leaf=is_size)
        return func(*args, **kwargs)

    def read(self) -> Tensor:
        """The tensor itself."""
        return self._tensor()


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, Unread) else value


def around(loss: Tensor, returned: Returned | None, everything: Reading[Everything] | None) -> Any:
    """What the original returns, with what stands for its tensors. everything: gives these when one is read; None: that cannot be."""
    if returned is None or everything is None:
        return None

    def unread(place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Unread:
        found = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Unread)  # torch.tensor, which asks for no torch function, fails
        found._tensor = lambda: everything().returned[place]
        return found

    with plainly():
        tensors = {name: unread(place, *like) for place, (name, like) in enumerate(zip(returned.names, returned.like, strict=True))}
    return returned.put_together(loss, tensors)


# ------------------------------------------------------------------------------------------------------- the call once more
@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """A call of which the loss alone was computed. call: how the module was called; remembered: of what; returns: what the original
    returns, in words; number: of the call; loss: as it was given to the user; came_to: a copy of it; before: buffers that it has changed
    and computes of, as they were; grad, inference: whether gradients and inference mode were on."""

    call: Call
    remembered: Remembered
    returns: str
    number: int
    loss: Tensor
    came_to: Tensor
    before: Mapping[str, Tensor]
    grad: bool
    inference: bool

    @property
    def kind(self) -> Kind:
        """The calls that are read as this one is."""
        return self.call.training, self.grad

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.remembered.form.manifest.model

    @property
    def left(self) -> frozenset[str]:
        """The places at which the original leaves tensors."""
        guards = self.remembered.form.guards
        return guards.leaves if guards is not None else frozenset()

    def refuse(self, why: object, *, at_once: bool = True) -> NoReturn:
        """Unreadable: what the call did not compute cannot be computed any more. at_once: it could have been, in the call."""
        remedy = ". With autopar.compile(model, ..., outputs='all') every call computes all of it"
        raise Unreadable(
            f"the original {self.does}; a call computes the loss, and the rest where it is read, by running forward once more. For this "
            f"call that cannot be done: {why}{remedy if at_once else ''}"
        )

    @property
    def does(self) -> str:
        """What the original does beside computing a loss, in words."""
        return f"returns {self.returns}" if self.returns else f"leaves {' and '.join(sorted(self.left)[:2])}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Everything:
    """The tensors that a call returns beside the loss, in their order, and those that it leaves, by their places."""

    returned: Sequence[Tensor]
    left: Mapping[str, Tensor]


def left_at(everything: Callable[[], Everything], path: str) -> Tensor:
    """The tensor that a call leaves at a path. RuntimeError where no program gives it."""
    left = everything().left
    if path not in left:
        raise RuntimeError(f"{path}: the original's forward leaves there what no program gives. Return the tensor from forward")
    return left[path]


def once_more(past: Past, forms: Forms, begun: Begun, modes: bytes, why: str, trained: Callable[[Form], None]) -> Everything:
    """Collective: what the call would have returned and left beside the loss; only the loss gives gradients. begun: what is left for
    backward of a form. modes: of the module now. why: more than the loss is wanted, in words. trained: told of the form
    when a gradient comes to more than the loss. Unreadable where what the call was of has changed since."""
    with torch.inference_mode(past.inference), torch.set_grad_enabled(past.grad), under(past.call.autocast):  # as it was called
        return _once_more(past, forms, begun, modes, why, trained)


def _once_more(past: Past, forms: Forms, begun: Begun, modes: bytes, why: str, trained: Callable[[Form], None]) -> Everything:
    call, remembered, mesh = past.call, past.remembered, past.remembered.form.mesh
    done_by_every_rank("compute", f"what call {past.number} of {past.model} computes beside its loss")
    with with_gradients():
        if not (torch.ones(1, requires_grad=True) * 2).requires_grad:  # in torch.tensor([...]), say, autograd is off
            past.refuse("it is read inside of a function of torch that lets nothing else be computed. Give that x.item(), or stack tensors")
    if modes != call.modes or remembered.tree.otherwise != call.otherwise:
        past.refuse("since then the mode of the module has changed, or which parameters train. It is to be read before")
    if not remembered.unchanged():
        past.refuse("since then parameters, buffers or inputs of the call have changed, as by an optimizer's step. It is to be read before")
    if changed := forms.changed(remembered.form, call):
        past.refuse(f"since then there is a change ({changed}). It is to be read before")
    try:
        form = forms.of(dataclasses.replace(call, asked="all", compared=False))
    except CaptureError as error:
        past.refuse(error, at_once=False)
    except ValueError as error:
        past.refuse(error)
    assert form is not None and form.returned is not None, "of everything there is a form, or an error"
    around_loss = remembered.form.around_loss
    if around_loss is not None and (form.returned.spec, len(form.returned.names)) != (around_loss.spec, len(around_loss.names)):
        past.refuse("when it is run once more it returns something else")
    if changes := [name for name in form.reread if name not in past.before]:
        past.refuse(f"it has changed {changes[0]}, of which it computes")
    made: Made = []
    bound = form.batch.bind(call.args, call.kwargs, form.varied, call.numbers(form))
    rest = begun(form, bound, remembered.trainable, past.before)
    with torch.no_grad(), without(), buffers_kept():
        with remembered.run_again([*form.stages.values()], lambda: Weights(rest.step)), torch.no_grad():
            loss = form.run(form.micro_batches(rest.inputs.parts), rest.step, made)
        if mesh.pp.size > 1:
            comm.broadcast_(loss, mesh.pp.ranks[form.manifest.places[-1]], mesh.pp)
        rest.step.finish()
        values = form.outputs.collected(made)
    record.phase(record.OUTSIDE)
    _compare(past, loss)
    if mesh.rank == 0:
        mode = f"{'training' if call.training else 'evaluation'} mode{'' if past.grad else ' without gradients'}"
        warnings.warn(
            f"{past.model} {past.does}, of which more than the loss {why}: that call was run forward a second time, and from now on "
            f"calls in {mode} compute all of it. autopar.compile(model, ..., outputs='all') computes all from the first call on",
            stacklevel=users_level(),
        )
    given = values
    if past.grad and rest.leaves:
        twice = Twice(remembered.under(form, bound), beside=True, before=past.before)
        with torch.enable_grad():
            given = rest.of_outputs_beside(values, twice, functools.partial(trained, form))
    places = {path: form.guards.place(path) for path in past.left} if form.guards is not None else {}
    left = {path: given[name] for path, name in places.items() if name is not None}
    return Everything(returned=[given[name] for name in form.returned.names], left=left)


def _compare(past: Past, loss: Tensor) -> None:
    """Whether the call has come to the same loss."""
    first, again = past.came_to.item(), loss.item()
    tolerance = torch.finfo(loss.dtype).eps ** 0.5
    if not (abs(first - again) <= tolerance * abs(first) or (math.isnan(first) and math.isnan(again)) or first == again):
        past.refuse(f"forward comes to the loss {again!r} when it is run once more, and came to {first!r} before")
