"""What one traced call of the user's model does to its own registries and to tensors outside of the graph.

A buffer that the forward assigns anew (`self.ema = 0.9 * self.ema + x`) is a mutation of the buffer: at the end of the trace the
new value is copied into the old tensor, which the registry gets back. What a graph cannot follow is refused.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.capture.answers import Tape
from autopar.capture.around import asking
from autopar.capture.chances import Chances
from autopar.capture.conditions import Truths, chooses_a_kernel, must_be
from autopar.capture.kept_numbers import is_only_kept
from autopar.capture.known import with_known_values
from autopar.capture.numbers import Numbers, Standing
from autopar.capture.source import in_library, running_line
from autopar.capture.varying import in_torch
from autopar.capture.written_out import WRITTEN_OUT
from autopar.errors import BufferMade, CaptureError, ForeignTensor
from autopar.run.alone import is_collective
from autopar.run.part import is_part, local

__all__ = ["Ask", "AtTheBorder", "Registries", "follow", "storage_of"]


@dataclass(frozen=True, slots=True)
class _Registry:
    prefix: str
    module: nn.Module
    buffers: dict[str, torch.Tensor | None]
    params: dict[str, nn.Parameter | None]
    modules: dict[str, nn.Module | None]
    training: bool
    trained: frozenset[str]  # the names of the parameters that require a gradient


@dataclass(frozen=True, slots=True)
class Assigned:
    """A buffer's name and tensor, and the one that was assigned in its place. shared: that is some buffer too, or a view of one."""

    name: str
    old: torch.Tensor
    new: torch.Tensor
    shared: bool


class Registries:
    """The tensors that the registries of a model hold before a call."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            _Registry(
                f"{name}." if name else "", m, dict(m._buffers), dict(m._parameters), dict(m._modules), m.training, _trained(m)
            )  # fmt: skip
            for name, m in model.named_modules()
        ]
        self._versions = {id(b): b._version for r in self._before for b in r.buffers.values() if b is not None and not b.is_inference()}

    def assigned(self) -> list[Assigned]:
        """What the call assigned to buffers. Raises CaptureError if it changed anything else that is registered."""
        names = Counter(id(b) for r in self._before for b in r.buffers.values() if b is not None)
        assigned: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        olds = {storage_of(b) for r in self._before for b in r.buffers.values() if b is not None}
        for registry in self._before:
            self._check(registry)
            for name, old in registry.buffers.items():
                new = registry.module._buffers.get(name)
                if old is None or new is old:
                    continue
                _check_assigned(f"{registry.prefix}{name}", old, new, names[id(old)])
                self._check_apart(f"{registry.prefix}{name}", new)
                assert new is not None
                assigned.append((f"{registry.prefix}{name}", old, new))
        return [Assigned(name, old, new, shared=storage_of(new) in olds) for name, old, new in assigned]

    def _check_apart(self, name: str, new: torch.Tensor | None) -> None:
        """CaptureError where a buffer is another one from now on, to which the call writes in place, as later ones would to both."""
        if new is None or self._versions.get(id(new), new._version) == new._version:
            return
        for registry in self._before:
            for other, tensor in registry.buffers.items():
                if tensor is new and registry.module._buffers.get(other) is new:
                    raise CaptureError(
                        f"the forward makes one tensor of the buffers {name} and {registry.prefix}{other}, and writes to it in place\n"
                        f"  what to do: put a copy there (clone())"
                    )

    def modes(self) -> tuple[tuple[nn.Module, bool], ...]:
        """The modules whose training mode the call has set to another, and to which."""
        return tuple((r.module, r.module.training) for r in self._before if r.module.training is not r.training)

    def restore(self) -> None:
        """The registries hold the objects that they held."""
        for registry in self._before:
            for now, before in ((registry.module._buffers, registry.buffers), (registry.module._parameters, registry.params)):
                if not _holds(now, before):
                    now.clear()
                    now.update(before)  # type: ignore[arg-type]

    @staticmethod
    def _check(registry: _Registry) -> None:
        module, prefix = registry.module, registry.prefix
        for what, now, before in (("parameter", module._parameters, registry.params), ("module", module._modules, registry.modules)):
            for name in dict.fromkeys((*now, *before)):
                if now.get(name) is not before.get(name):
                    remedy = f"; new values for {prefix}{name}, which is frozen then, are written by {name}.data.copy_(...)"
                    raise CaptureError(
                        f"the forward replaces the {what} {prefix}{name}\n  what to do: do so before compiling the model (where the first "
                        f"call alone does, call the model once), and let the forward compute with what is there"
                        f"{remedy if what == 'parameter' else ''}"
                    )
        for name in _trained(module) ^ registry.trained:
            raise CaptureError(
                f"the forward changes requires_grad of the parameter {prefix}{name}\n  what to do: freeze and unfreeze parameters between "
                f"the calls"
            )


def _check_assigned(path: str, old: torch.Tensor, new: torch.Tensor | None, names: int) -> None:
    found = "nothing" if new is None else f"{_type(new)}"
    if new is None or new.shape != old.shape or new.dtype != old.dtype:
        raise (CaptureError if new is None else BufferMade)(
            f"the forward makes the buffer {path}, which is {_type(old)}, {found}\n  what to do: keep the shape and dtype of a buffer, "
            f"and write where a mask or an index says; where the first call gives it its shape, call the model once before compiling it, "
            f"and give it batches of that size; for a table that grows with the batch, once on the largest one"
        )
    if names > 1:
        raise CaptureError(
            f"the forward assigns the buffer {path}, whose tensor is also another buffer, so that the two part\n  what to do: register "
            f"a tensor for each"
        )


def _type(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _holds(now: Mapping[str, object], before: Mapping[str, object]) -> bool:
    return list(now) == list(before) and all(now[k] is v for k, v in before.items())


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, while they live; of what another module holds in parts, the memory of the part here."""
    return int((local(tensor) if is_part(tensor) else tensor).untyped_storage()._cdata)


def _trained(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, p in module._parameters.items() if p is not None and p.requires_grad)


Ask = Callable[[torch.Tensor, bool, str, torch.Tensor | None], torch.Tensor]
_READS_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_READS_GRAD_FN = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_MAKES_NUMBERS = {torch.Tensor.__float__: float, torch.Tensor.__int__: int}
_READS_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_READS_DATA, _SETS_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]


def follow(assigned: Sequence[Assigned]) -> None:
    """Copies what was assigned to buffers into the tensors that they were."""
    if not assigned:
        return  # a change of the gradient mode, even of nothing, would have torch.export split the graph
    with torch.no_grad():
        values = [a.new.clone() if a.shared else a.new for a in assigned]  # buffers may be swapped
        for a, value in zip(assigned, values, strict=True):
            a.old.copy_(value)


_OF_TARGETS = (F.cross_entropy, F.nll_loss)


def _check_sizes(input: torch.Tensor, target: torch.Tensor, **_: object) -> None:  # noqa: A002  (the name of the argument)
    """A loss wants as many targets as inputs. Where values decide how many there are, loss(out[mask], y[mask]), torch 2.11 asks a trace,
    which cannot know; torch 2.13 does not ask."""
    sizes = input.shape[:1] + target.shape[:1]
    if len(sizes) == 2 and all(isinstance(size, torch.SymInt) for size in sizes):
        torch._check(sizes[0] == sizes[1])


_VIEWS = (torch.Tensor.view, torch.Tensor.view_as)


def _viewed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A view, of which code may try whether there is one (`try: x.view(...) except RuntimeError: x.reshape(...)`): for tensors without
    data torch raises ValueError."""
    try:
        return func(*args, **kwargs)
    except ValueError as error:
        raise RuntimeError(f"view size is not compatible with input tensor's size and stride: {error}") from error


class AtTheBorder(TorchFunctionMode):
    """What a trace would not see or get wrong, of the torch functions that the code inside calls.

    Tensors that require a gradient and are not the model's as the trace knows it are refused: a graph holds such a tensor as a
    constant. `.data` is traced as what it does: a detached alias, and a write to it. differentiates: a line that asks for gradients; "" if
    there is none. asked: of each condition on a value that can only raise its line, and what tells that it holds. shows: a line that makes
    text of a tensor's values; "" if there is none. numbers: that were made of tensors. leaves: what was made to require a gradient, and the
    lines that did.
    """

    def __init__(self, model: nn.Module, ask: Ask, tape: Tape, *, varies: bool = False) -> None:
        """model: before it is traced. ask: has a program ask for a value in every step. tape: tells what the state alone
        decides. varies: numbers are inputs of the program."""
        super().__init__()
        self._varies = varies
        self._model, self._names = model, {id(p): name for name, p in model.named_parameters()}
        self._ask, self._tape = ask, tape
        self.differentiates = self.shows = ""
        self.asked: list[tuple[str, torch.Tensor]] = []
        self.numbers = Numbers()
        self.leaves: list[tuple[torch.Tensor, str]] = []
        self._truths, self._chances = Truths(), Chances()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, it looks at what is called, and at lines that make text of a number of the trace, or keep one as `float(x.item())`."""

        def noted(own: Callable[..., str]) -> Callable[..., str]:
            def text(number: Any, *spec: str) -> str:
                if not in_library(sys._getframe(1).f_code.co_filename):
                    self.shows = self.shows or running_line()
                    if any(spec):
                        return format(1 if isinstance(number, torch.SymInt) else 1.0, *spec)
                return own(number, *spec)

            return text

        def kept(own: Callable[..., Any], kind: type[int] | type[float]) -> Callable[..., Any]:
            def made(number: Any) -> Any:
                of = self.numbers.tensor_of(number) if is_only_kept(sys._getframe(1), kind) else None
                return own(number) if of is None else self.numbers.stands_for(kind, of)

            return made

        with self, contextlib.ExitStack() as stack:
            for kind in (torch.SymFloat, torch.SymInt, torch.SymBool):
                for name in ("__repr__", "__str__", "__format__"):
                    stack.enter_context(mock.patch.object(kind, name, noted(getattr(kind, name))))
            stack.enter_context(mock.patch.object(torch.SymFloat, "__float__", kept(torch.SymFloat.__float__, float)))
            stack.enter_context(mock.patch.object(torch.SymInt, "__int__", kept(torch.SymInt.__int__, int)))
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = self._traced(args), {k: self._traced(x) for k, x in kwargs.items()} if kwargs else {}
        if self._varies:
            func, args, kwargs = in_torch(func, args, kwargs)
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            self.shows = running_line()
        if func is torch.autograd.grad:
            self.differentiates = running_line()
        if func == _READS_GRAD and isinstance(args[0], nn.Parameter) and not in_library(asking(1).f_code.co_filename):
            raise CaptureError(
                f"the forward reads the gradient of a parameter, {_type(args[0])}, which a graph holds as it was when it was traced\n"
                f"  at {running_line()}\n  what to do: keep what it needs of gradients in a buffer, which is written after backward()"
            )
        if func == _READS_VERSION and (isinstance(args[0], nn.Parameter) or self._tape.knows(args[0])):
            raise CaptureError(
                f"the forward asks how often one of its own parameters or buffers was written to (._version), which a graph holds as it "
                f"was when it was traced\n  at {running_line()}\n  what to do: count steps in a buffer"
            )
        if func == _READS_GRAD_FN and re.search(r"\.register_(pre)?hook\b", running_line()):
            raise CaptureError(
                f"a hook on what autograd records of an activation, which no graph holds\n  at {running_line()}\n  what to do: register it "
                f"on the activation instead (Tensor.register_hook)"
            )
        if (certain := self._chances.answer(func, args)) is not None:
            return certain
        by_item = func is torch.Tensor.item and args[0].dtype == torch.bool
        if (func is torch.Tensor.__bool__ or by_item) and isinstance(args[0], FakeTensor):
            frame = asking(1)
            if chooses_a_kernel(frame):
                return False
            if (expected := must_be(frame, by_item=by_item)) is not None:
                of = self._truths.elements(args[0], expected)
                self.asked.append((running_line(), self._ask(args[0], expected, running_line(), of)))
                return expected
        if (known := self._tape.answer(func, args)) is not None:
            return known[0]
        if func is torch.Tensor.numpy and isinstance(args[0], FakeTensor) and not (args[0].requires_grad or kwargs):
            return self.numbers.array(args[0])
        if (kind := _MAKES_NUMBERS.get(func)) is not None and isinstance(args[0], FakeTensor) and is_only_kept(asking(1), kind):
            return self.numbers.stands_for(kind, args[0])  # where a call of the model leaves another number
        if self.numbers.stand and any(map(self.numbers.is_standing, pytree.tree_leaves((args, kwargs)))):
            raise Standing("a number that float() or int() has made of a tensor is computed with, which no graph holds: take .item()")
        if func == _READS_DATA and isinstance(args[0], FakeTensor):
            return self._alias(args[0])
        if func == _SETS_DATA and isinstance(args[0], FakeTensor) and _type(args[0]) == _type(args[1]):
            with torch.no_grad():
                alias = self._alias(args[0])
                if self._tape.moves(torch.Tensor.copy_, (alias, args[1]), {}):
                    return None
                call = self._tape.before(torch.Tensor.copy_, (alias, args[1]), {})
                self._tape.after(call, alias.copy_(args[1]))
            return None
        if is_collective(func):
            return self._alone(func, args, kwargs)
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            raise CaptureError(
                f"the forward draws from a generator of its own, which no graph holds\n  at {running_line()}\n  what to do: leave it out: "
                f"torch's own generator, which torch.manual_seed seeds, draws alike on replicas and otherwise on other shards; or draw "
                f"before the call and give the model the numbers as an input; what is the same in every call is made once, as a buffer"
            )
        if not getattr(func, "__name__", "").startswith("__get"):
            for x in pytree.tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) and x.requires_grad:
                    self._refuse(x)
        if func in WRITTEN_OUT:
            with self:  # what they ask is asked as the user's own code would
                written_out = WRITTEN_OUT[func](*args, **kwargs)
            if written_out is not NotImplemented:
                return written_out
        if (call_of_values := with_known_values(self._tape, func, args, kwargs)) is not None:
            with self:
                return call_of_values()
        if self._tape.moves(func, args, kwargs):
            return args[0]
        if func in _OF_TARGETS:
            _check_sizes(*args[:2], **kwargs)
        call = self._tape.before(func, args, kwargs)
        result = func(*args, **kwargs) if func not in _VIEWS else _viewed(func, args, kwargs)
        self._tape.after(call, result)
        if func is torch.Tensor.requires_grad_ and isinstance(result, FakeTensor) and result.requires_grad:
            self.leaves.append((result, running_line()))
        if func is torch.Tensor.item and isinstance(result, torch.SymFloat | torch.SymInt):
            self.numbers.note(result, args[0], torch.float64 if isinstance(result, torch.SymFloat) else torch.int64)
        self._chances.note(func, args, kwargs, result)
        if not kwargs:
            self._truths.note(func, args, result)
        return result

    def _alone(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A collective, as of one process: torch's own trace would take it for an operator over all ranks."""
        call = self._tape.before(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        self._tape.after(None if call is None else replace(call, noted=False), result)
        return result

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        call = self._tape.before(torch.Tensor.detach, (tensor,), {})
        alias = tensor.detach()
        self._tape.after(call, alias)
        return alias

    def _traced(self, given: Any) -> Any:
        """What a function is given, in which a parameter of the model that a list or a closure holds is what stands for it in the trace."""
        if type(given) in (tuple, list) and any(id(x) in self._names or type(x) in (tuple, list) for x in given):
            return type(given)(self._traced(x) for x in given)
        if id(given) not in self._names:
            return given
        path, _, name = self._names[id(given)].rpartition(".")
        return self._model.get_submodule(path)._parameters.get(name, given)

    def _refuse(self, tensor: torch.Tensor) -> None:
        if torch._C._functorch.is_gradtrackingtensor(tensor):
            raise CaptureError(
                f"torch.func is asked for gradients inside of the forward, which no graph holds\n  at {running_line()}\n  what to do: ask "
                f"torch.autograd.grad(..., create_graph=True) for them in a submodule, which then runs as it is written"
            )
        if id(tensor) in self._names:
            raise CaptureError(
                f"the code uses the parameter {self._names[id(tensor)]} by another way than the model's own attributes: it would be a "
                f"constant\n  at {running_line()}\n  what to do: reach it through the model inside the function, as with "
                f"model.parameters() or model.get_parameter(...)"
            )
        if torch.is_grad_enabled():
            kind = "a parameter" if isinstance(tensor, nn.Parameter) else "a tensor that requires a gradient"
            raise ForeignTensor(
                f"the code uses {kind} {_type(tensor)} that is not the model's: it would be a constant, and get no gradient\n"
                f"  at {running_line()}\n  what to do: register it as a parameter of the model, or detach it if it is constant",
                tensor,
            )
