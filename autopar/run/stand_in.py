"""A module that stands for the user's: what is set on it is set on the original, it cannot be pickled, and it is no other tool's to take
apart: torch.compile runs it as it is, and what would trace it or reduce its gradients a second time is refused."""

from __future__ import annotations

import contextlib
import functools
import html
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from autopar.run import hooks
from autopar.run.methods import CallsOfMethods
from autopar.run.outputs import Inner
from autopar.run.part import Part, PartTensor
from autopar.run.unread import Loss, Unread
from autopar.run.views import Gathered

__all__ = ["StandIn", "has_state_of_its_own", "runs_as_it_is"]

# What Python looks for in the class: of a container (nn.Sequential) its parts are taken by number, counted and gone through.
_OF_CONTAINERS = ("__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__")
# What a class may have its own of, which says what state the model has, and which parameters.
_ITS_STATE = ("state_dict", "load_state_dict", "get_extra_state", "_save_to_state_dict", "_load_from_state_dict")
_ITS_OWN = (
    *_ITS_STATE, "set_extra_state", "parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children",
    "get_parameter", "get_buffer", "get_submodule", "zero_grad", "requires_grad_", "train", "eval", "compile",
)  # fmt: skip
_FOR_USERS = ("train_step", "profile", "clip_grad_norm_", "no_sync")  # of a parallel module, which a class may have its own of as well
_OF_ITSELF = ("device", "manifest", "mesh", "plan", "source")  # what a parallel module says of itself


def runs_as_it_is(holder: type, name: str, *, compiler: bool = False) -> None:
    """torch.compile neither traces a function of a class nor what it calls, from now on. compiler: its front end is imported for that,
    which takes a second. Else nothing is done where it is not there: then nothing can be compiled yet, and capture imports it."""
    function = vars(holder).get(name) or getattr(holder, name)
    plain = getattr(function, "__func__", function)
    if (compiler or "torch._dynamo" in sys.modules) and plain not in _DONE:
        _leave_parts_alone()
        made = torch.compiler.disable(plain, reason="autopar runs its emitted stages and their communication itself")
        _DONE.add(made)
        setattr(holder, name, staticmethod(made) if isinstance(function, staticmethod) else made)


_DONE: set[Any] = set()


def has_state_of_its_own(model: nn.Module) -> bool:
    """Whether the state_dict of a model may be other than its parameters and persistent buffers under their names."""
    return any(any(vars(m)[table] for table in hooks.OF_STATE) or _overridden(type(m), _ITS_STATE) for m in model.modules())


def _overridden(kind: type, names: Iterable[str]) -> list[str]:
    """Which of these methods a class has its own of. Torch's own classes keep the state that nn.Module would."""
    methods = {name: getattr(kind, name, None) for name in names}
    return [name for name, own in methods.items() if callable(own) and not str(getattr(own, "__module__", "")).startswith("torch.")]


def _has_its_own(model: nn.Module, name: str) -> bool:
    return name in model.__dict__ or any(name in vars(kind) for kind in type(model).__mro__ if kind not in nn.Module.__mro__)


@functools.cache
def _leave_parts_alone() -> None:
    """Nor the functions of this package that torch calls itself: hooks, and the torch functions of parts, whose shapes are not those of
    their memory. What a compiled function of the user's (an optimizer's) does with parts breaks its graph, and runs as it is written."""
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")
    trace_rules.add("autopar.run")
    config: Any = importlib.import_module("torch._dynamo.config")
    config.nontraceable_tensor_subclasses = {*config.nontraceable_tensor_subclasses, Gathered, Inner, Loss, Part, PartTensor, Unread}


@functools.cache
def _watch_wrappers() -> None:
    """Before rank 0's parameters are compared with those of other ranks and written to all."""
    register_module_module_registration_hook(_into_a_wrapper)


def _into_a_wrapper(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        for inner in submodule.modules():
            if isinstance(inner, StandIn):
                inner._refuse_wrapping()
        for param in submodule.parameters():  # of a list of these alone, too
            if isinstance(param, Part):
                raise TypeError(
                    f"{param._lies.name} is a parameter of a parallel module, which reduces its gradient itself, and each rank may hold a "
                    f"part of it: DistributedDataParallel would write rank 0's memory to all. Leave it out"
                )


def _with_methods(kind: Any, names: Iterable[str], forward: inspect.Signature) -> type:
    """The class with these methods of the original's, and a forward of which code is told that it has the arguments of the original's."""

    def of_the_original(name: str) -> Any:
        def method(self: StandIn, *args: Any, **kwargs: Any) -> Any:
            with self._methods.under_way():
                found = getattr(self.original, name)(*args, **kwargs)
            return self if found is self.original else found

        return method

    def as_it_runs(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    as_it_runs.__signature__ = forward.replace(parameters=[itself, *forward.parameters.values()])  # type: ignore[attr-defined]
    methods = {"forward": as_it_runs, **{name: of_the_original(name) for name in names}}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


class StandIn(nn.Module):
    """original: the user's model, kept out of the registries; None where there is none."""

    original: nn.Module | None
    _methods: CallsOfMethods

    def __init__(self, *, compiler: bool = False) -> None:
        """compiler: as in `runs_as_it_is`."""
        super().__init__()
        runs_as_it_is(type(self), "forward", compiler=compiler)
        _watch_wrappers()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            self._refuse(
                "traced or exported: what it runs is one rank's part. Inside of `with model.full_parameters():` the original "
                "(model.original) is whole: trace or export that"
            )
        if DistributedDataParallel._active_ddp_module is not None:
            self._refuse_wrapping()
        methods = self.__dict__.get("_methods")
        if methods is not None and methods.caught:  # the original is captured, and runs where it must, as it is
            with methods.let_through():
                return self(*args, **kwargs)
        if any(hooks.of_all_modules().values()) and not any(map(self.__dict__.get, hooks.OF_CALLS)):
            return self.forward(*args, **kwargs)  # the hooks of all modules are in what it runs
        return super().__call__(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("original")
        known = name in self.__dict__ or hasattr(type(self), name)
        if original is None or (known and not (name in _OF_ITSELF and _has_its_own(original, name))):
            super().__setattr__(name, value)
        else:
            setattr(original, name, value)

    def __delattr__(self, name: str) -> None:
        original = self.__dict__.get("original")
        if original is None or name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(original, name)

    def _stands_for(self, original: nn.Module) -> None:
        """From now on this is the original's; of a container it is one, and it has the state that the original's class and hooks say."""
        self.__dict__["original"] = original
        self.__dict__["_methods"] = CallsOfMethods(original, self, self._runs_calls_of_methods)
        self.__dict__.update((name, original.__dict__[name]) for name in hooks.OF_STATE)
        kind: Any = type(self)
        of_container = [name for name in _OF_CONTAINERS if hasattr(type(original), name)]
        found = (*of_container, *_overridden(type(original), (*_ITS_OWN, *_FOR_USERS)))
        if both := [name for name in _OF_ITSELF[1:] if _has_its_own(original, name)]:
            names = ", ".join(both)
            warnings.warn(
                f"{type(original).__name__} has attributes that a parallel module has too ({names}): read from what is compiled they are "
                f"autopar's. Those of the model are model.original.{both[0]}; what is set is set on the model",
                stacklevel=2,
            )
        self.__class__ = _with_methods(kind, found, inspect.signature(original.forward))

    def _runs_calls_of_methods(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this runs a call of the original, with gradients, that one of its methods makes."""
        raise NotImplementedError

    def _of_original(self, name: str) -> Any:
        """An attribute of the original. What a method calls the original for, this runs."""
        return self._methods.watched(getattr(self.original, name))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As of DistributedDataParallel, for loops that add up the gradients of several calls: nothing. They are reduced in every call, and
        those of several calls are added up as they are on one process."""
        yield

    def _repr_html_(self) -> str:
        """In a notebook: the plan, where there is one."""
        plan = self.__dict__.get("plan") or getattr(self.__dict__.get("compiled"), "plan", None)
        if plan is None:
            return f"<pre>{html.escape(repr(self))}</pre>"
        shown: str = plan._repr_html_()
        return shown

    def __copy__(self) -> NoReturn:
        self._refuse("copied with the parameters of this one: call copy.deepcopy(model), which makes one with its own")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse_copy("pickled")

    def __prepare_scriptable__(self) -> NoReturn:
        """torch.jit.script asks for what it shall script."""
        self._refuse(
            "scripted: what it runs is one rank's part. Inside of `with model.full_parameters():` the original (model.original) is whole: "
            "script that"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        """torch.nn.DataParallel asks for what it shall run on each of several GPUs of one process."""
        self._refuse("replicated by DataParallel: it runs on one GPU of each process. Use it as it is")

    def _refuse_copy(self, what: str) -> NoReturn:
        self._refuse(
            f"{what}: it is part of a group of processes. Save full_state_dict(), which loads into the original model, and compile that "
            "again"
        )

    def _refuse_wrapping(self) -> NoReturn:
        self._refuse(
            "put into DistributedDataParallel: it reduces its gradients itself, and ranks may hold different parameters. Use it as it is, "
            "and wrap only the modules around it"
        )

    def _refuse(self, what: str) -> NoReturn:
        name = type(self.original).__name__ if self.original is not None else "module"
        raise TypeError(f"a parallel {name} cannot be {what}")
