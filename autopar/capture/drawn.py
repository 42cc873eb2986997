"""Random numbers that a model draws from the generators of Python and numpy: the functions that draw them run as they are written, and so
do submodules that draw them in their own code."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.around import as_called
from autopar.capture.as_before import left_as_it_was
from autopar.capture.export import objective_of
from autopar.capture.given import Inputs, copied
from autopar.capture.own_gradients import below
from autopar.capture.source import frame_line, in_library, module_of, paths_of
from autopar.run import outside_draws
from autopar.run.outside_draws import from_seed
from autopar.run.region_modules import Drawn

__all__ = ["Array", "Drawing", "as_returned", "drawing", "functions_replaced"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """modules: the outermost submodules whose own code draws, and a line of each that does ('file.py:12: the code'). functions: those that
    modules outside of these call, and which draw."""

    modules: Mapping[str, str]
    functions: frozenset[FunctionType]


def drawing(model: nn.Module, loss: Callable[[Any], Tensor] | None, inputs: Inputs) -> Drawing:
    """What draws in a call of the model, which is left as it was."""
    paths = paths_of(model)
    modules: dict[str, str] = {}
    functions: set[tuple[str, FunctionType]] = set()

    def note(drew: FrameType, line: int) -> None:
        frame: FrameType | None = drew
        between = list[FrameType]()  # the code of the module, and what draws
        while frame is not None and id(module_of(frame)) not in paths:
            between.append(frame)
            frame = frame.f_back
        if frame is None:
            return
        path = paths[id(module_of(frame))]
        function = next((found for outer in reversed(between) if (found := _function_of(outer)) is not None), None)
        if function is None:
            modules.setdefault(path, frame_line(frame, line if frame is drew else frame.f_lineno))
        else:
            functions.add((path, function))

    given = copied(inputs)
    with left_as_it_was(model, loss), torch.enable_grad(), from_seed(0), as_called(given), _draws_told(note):
        objective_of(model(*given[0], **given[1]), loss, None)
    outermost = {path: line for path, line in modules.items() if not below(path, modules)}
    outside = frozenset(function for path, function in functions if path not in outermost and not below(path, outermost))
    return Drawing(modules=outermost, functions=outside)


@contextlib.contextmanager
def _draws_told(tell: Callable[[FrameType, int], None]) -> Iterator[None]:
    """Inside, `tell` is given the frame, and its line, of each function that has drawn, itself or by functions of a library."""
    before = outside_draws.states()
    lines: dict[FrameType, int] = {}  # at which each that runs was last seen

    def watch(frame: FrameType, event: str, _: object) -> Any:
        nonlocal before
        if in_library(frame.f_code.co_filename) or frame.f_code.co_filename in _DRAW:
            return None
        now = outside_draws.states()
        if now != before:
            before, by = now, frame.f_back if event == "call" else frame
            while by is not None and by not in lines:  # of a library, through which it calls
                by = by.f_back
            if by is not None:
                tell(by, lines[by])
        lines[frame] = frame.f_lineno
        if event == "return":
            del lines[frame]
        return watch

    traced = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(traced)
        lines.clear()


_DRAW = frozenset({random.__file__})


def _function_of(frame: FrameType) -> FunctionType | None:
    """The function of the user's, or of a library's, that runs in a frame, if it is one of a module of Python's."""
    code = frame.f_code
    found = frame.f_globals.get(code.co_name)
    if in_library(code.co_filename) or not isinstance(found, FunctionType) or found.__code__ is not code:
        return None
    return found if sys.modules.get(found.__module__) is not None and not found.__closure__ else None


@contextlib.contextmanager
def functions_replaced(stand_ins: Mapping[FunctionType, Callable[..., Any]]) -> Iterator[None]:
    """Inside, in this thread, other functions are called by the names that these have in any module of Python's, and torch makes tensors of
    what `as_returned` gives."""
    if not stand_ins:
        yield
        return
    spaces = [space for module in list(sys.modules.values()) if isinstance(space := getattr(module, "__dict__", None), dict)]
    spaces += [function.__globals__ for function in stand_ins]  # of a script that a worker runs again, its module has copies
    named = ((s, name, x) for s in {id(s): s for s in spaces}.values() for name, x in list(s.items()))
    places = [(space, name, x) for space, name, x in named if type(x) is FunctionType and x in stand_ins]
    makers = {name: getattr(torch, name) for name in ("tensor", "as_tensor", "from_numpy")}
    for space, name, function in places:
        space[name] = _here(stand_ins[function], function)
    for name, make in makers.items():
        setattr(torch, name, _making(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)
        for space, name, function in places:
            space[name] = function


def _here(stand_in: Callable[..., Any], function: FunctionType) -> Callable[..., Any]:
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if threading.get_ident() == thread else function)(*args, **kwargs)

    call.stands_in = True  # type: ignore[attr-defined]
    return call


def _making(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, Array):
            return make(data, *args, **kwargs)
        dtype, device = (kwargs.get(name, args[k] if len(args) > k else None) for k, name in enumerate(("dtype", "device")))
        return data.tensor.to(device=device, dtype=dtype)

    return made


class Array:
    """What stands for an array of numpy in a trace: a tensor can be made of it, and nothing else."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def as_returned(module: nn.Module, structure: Any, tensors: Sequence[Tensor]) -> Any:
    """What a trace of a call is given: these tensors in the places of those of its structure, and what stands for arrays and floats where a
    function that draws has returned such."""
    places = module.places if isinstance(module, Drawn) else (Tensor,) * len(tensors)
    given = iter(zip(places, tensors, strict=True))
    leaves, spec = pytree.tree_flatten(structure)

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        place, tensor = next(given)
        return tensor if issubclass(place, Tensor | float) else Array(tensor)

    return pytree.tree_unflatten([leaf(x) for x in leaves], spec)


