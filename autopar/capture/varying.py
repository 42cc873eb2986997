"""Numbers, and tensors that stand in attributes, that the trace of a call takes as inputs: what stands for them in the model's code, and
what it asks of them.

What stands for a number computes as that does (`1 - beta`, `self.step / 1000`, `math.exp(-k * step)`), and is a tensor of one element
where an operator of torch is given it. All else that code wants of it in Python is its value in this call, and noted: a program holds for
calls that would be told the same. Nothing else can be got from it, since it is no number of Python's.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.held import places
from autopar.capture.numbers import Numbers as OfTensors
from autopar.capture.standing import tensors_at
from autopar.capture.state import State
from autopar.errors import CaptureError, NumbersChange
from autopar.run.objects import leaf_path
from autopar.run.varying import Asked, AsPlaced, Leaf, Number, Path, Varied, Varying, as_tensor, kind_of

__all__ = ["Followed", "Numbers", "as_they_are", "in_torch", "refuse_kept"]

_Of = Callable[[Sequence[Number]], Any]
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Numbers:
    """Those of a capture. paths: of arguments, as the call gives them. values: in this call."""

    def __init__(self, varying: Varying, inputs: _Inputs, names: Sequence[str], state: State, *, trains: bool = True) -> None:
        """names: of the forward's positional parameters. state: of the model; places at which there is no number, and no tensor, are left
        out. trains: gradients go through tensors that require one. CaptureError if an argument is not there, or is no number."""
        leaves: list[tuple[Leaf, Path, Number | Tensor]] = []
        for path, value in pytree.tree_leaves_with_path(inputs):
            first, *rest = found = leaf_path(path)
            named = (names[first], *rest) if isinstance(first, int) and first < len(names) else found
            if named in varying.arguments and type(value) in (int, float):
                leaves.append((Leaf(_text(named), type(value), argument=named), found, value))
        for value, place in places(state.held):
            if place.path in varying.places and type(value) in (int, float) and not place.path.startswith(state.kept):
                leaves.append((Leaf(place.path, type(value), place=place), (), value))
        for tensor, inside in tensors_at(state, varying.places):
            if not inside.path.startswith(state.kept):
                kind = kind_of(tensor if trains else tensor.detach())
                leaves.append((Leaf(inside.path, kind, place=inside), (), tensor))
        self.leaves = tuple(leaf for leaf, _, _ in leaves)
        self.paths = {path: number for number, (_, path, _) in enumerate(leaves) if path}
        if len(self.paths) < len(varying.arguments):
            raise CaptureError("of numbers that calls have otherwise, some are not there")
        self._arguments = {leaf.argument: value for leaf, path, value in leaves if path}

    def __bool__(self) -> bool:
        return bool(self.leaves)

    def follow(self, state: State) -> None:
        """The model is in another state now, in which other objects may hold them."""
        now: dict[str, AsPlaced] = {place.path: place for _, place in places(state.held)}
        moved = (leaf.place and leaf.place.moved(now) for leaf in self.leaves)
        self.leaves = tuple(leaf._replace(place=place or leaf.place) for leaf, place in zip(self.leaves, moved, strict=True))

    def values(self) -> tuple[Any, ...]:
        """What a call that begins now is given."""
        return Varied(leaves=self.leaves).values(self._arguments.__getitem__, lambda place: place.now())

    @contextlib.contextmanager
    def detached(self) -> Iterator[tuple[Any, ...]]:
        """Around a call of the model itself: the same, where tensors do not go back to earlier calls. Those through which gradients go in
        the program are leaves that require one."""
        apart: list[tuple[AsPlaced, Tensor, Tensor]] = []
        for leaf in self.leaves:
            now = None if leaf.place is None else leaf.place.now()
            if leaf.place is not None and isinstance(now, Tensor) and (now.requires_grad or leaf.grad):
                apart.append((leaf.place, now, now.detach().clone().requires_grad_(leaf.grad)))
                leaf.place.put(apart[-1][-1])
        yield tuple(x.detach().clone() if isinstance(x, Tensor) and not x.requires_grad else x for x in self.values())
        for place, before, there in apart:
            if place.now() is there:
                place.put(before)

    def set_back(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Before a call: what stands in attributes is again as in these, which are given back."""
        for leaf, value in zip(self.leaves, values, strict=True):
            if leaf.place is not None:
                leaf.place.put(value)
        return tuple(values)


class Followed:
    """The numbers and tensors in one trace. tensors: that the trace has for them, of one element for a number. of_tensors: the numbers that
    it makes of tensors, to which those belong that are computed of both."""

    def __init__(self, numbers: Numbers, tensors: Sequence[Tensor], of_tensors: OfTensors) -> None:
        self._numbers, self.values, self.of_tensors = numbers, numbers.values(), of_tensors
        self.asked: dict[str, Asked] = {}
        self._stand = [
            tensor if isinstance(value, Tensor) else _Varies(self, value, operator.itemgetter(k), leaf.name, _gives(tensor))
            for k, (leaf, value, tensor) in enumerate(zip(numbers.leaves, self.values, tensors, strict=True))
        ]

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
        """The arguments of the call, with what stands for numbers in their places."""
        if not self._numbers.paths:
            return args, kwargs

        def at(path: Sequence[Any], leaf: Any) -> Any:
            number = self._numbers.paths.get(leaf_path(path))
            return leaf if number is None else self._stand[number]

        found: _Inputs = pytree.tree_map_with_path(at, (args, kwargs))
        return found

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Inside, they stand in attributes, and functions of `math` go through what is computed of them."""
        for leaf, stand in zip(self._numbers.leaves, self._stand, strict=True):
            if leaf.place is not None:
                leaf.place.put(stand)
        functions = {name: getattr(math, name) for name in _OF_MATH}
        try:
            for name in functions:
                setattr(math, name, _of_math(name))
            yield
        finally:
            for name, function in functions.items():
                setattr(math, name, function)

    def ended(self) -> Varied:
        """The call is over: numbers stand again where it has left others, and the tensors that it has left alone."""
        moved = []
        for leaf, stand, began in zip(self._numbers.leaves, self._stand, self.values, strict=True):
            place = leaf.place
            if place is None:
                continue
            now = place.now()
            if isinstance(stand, Tensor):
                if now is stand:
                    place.put(began)
            elif type(now) is _Varies and not now.known:
                place.put(self.of_tensors.standing(now))
            elif type(now) in (_Varies, int, float) and not self.of_tensors.is_standing(now):
                value, of = (now.value, now.of) if type(now) is _Varies else (now, lambda _, now=now: now)
                place.put(value)
                if now is not stand:
                    moved.append((place, of))
        return Varied(leaves=self._numbers.leaves, asked=tuple(self.asked.values()), moved=tuple(moved))

    def told(self, text: str, of: _Of) -> Any:
        """What it is in this call, which is noted."""
        answer = of(self.values)
        self.asked.setdefault(text, Asked(text, of, answer))
        return answer


def refuse_kept(output: Any, state: State) -> None:
    """What stands for a number is among what a call returned, or left where no such number was: CaptureError; NumbersChange if that is
    the place of another number."""
    left = [(path, getattr(x, "value", x)) for path, x in state.leaves.items()]
    if kept := [path for path, x in left if type(x) is _Varies and x.known]:
        raise NumbersChange(f"the forward keeps in {kept[0]} a number that calls have otherwise, or one that it computes of it", kept)
    if any(type(x) is _Varies for x in pytree.tree_leaves(output)):
        raise CaptureError("the forward returns a number that calls have otherwise, or one that it computes of it")


def as_they_are(given: Any) -> Any:
    """Arguments of what runs as it is written, which is given the values of numbers: a program holds for these."""
    return pytree.tree_map(lambda x: x.now() if type(x) is _Varies else x, given)


def _gives(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _unknown(_: Sequence[Number]) -> NoReturn:
    raise RuntimeError("a number that is made of tensors decides what runs, which no graph holds")


# ----------------------------------------------------------------------------------------------------------- what stands for one
_STEPS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "floordiv": operator.floordiv,
    "mod": operator.mod, "pow": operator.pow,
}  # fmt: skip
_COMPARISONS: Mapping[str, str] = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_TENSORS: Mapping[str, Callable[[Any, Any], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "pow": torch.pow, "mod": torch.remainder,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
}  # fmt: skip
_OF_MATH: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh,
}  # fmt: skip
_WHOLE = 2**53  # whole numbers below it are computed alike by all


class _Varies:
    """Stands for a number. value: that of this call; known: whether it is known, as it is not of a number that is computed of tensors
    too: value is one of its kind then. of: computes it of all that vary. text: for people. made: the tensor, when it is wanted."""

    def __init__(self, followed: Followed, value: Number, of: _Of, text: str, make: Callable[[], Tensor], *, known: bool = True) -> None:
        self.followed, self.value, self.of, self.text, self._make, self.known = followed, value, of, text, make, known
        self._made: Tensor | None = None
        if not known:
            followed.of_tensors.hold(self, self.tensor())

    @staticmethod
    def of_tensor(followed: Followed, number: Any) -> Any:
        """What stands for a number that the trace makes of tensors; NotImplemented for anything else."""
        tensor = followed.of_tensors.tensor_of(number)
        if tensor is None:
            return NotImplemented
        value = 1 if type(number) in (int, torch.SymInt) else 1.0
        return _Varies(followed, value, _unknown, "a number made of a tensor", lambda: tensor, known=False)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func, args, kwargs = _without(func, args, kwargs or {})
        return func(*args, **kwargs)

    def tensor(self) -> Tensor:
        """Of one element, int64 or float64, as the graph computes it."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def now(self, text: str = "", function: Callable[[Any], Any] = lambda x: x) -> Any:
        """Its value, or what a function gives of it, for which the program holds then."""
        if not self.known:
            _unknown(())
        return self.followed.told(text or self.text, lambda values: function(self.of(values)))

    def combined(self, step: str, other: Any, *, reflected: bool = False) -> Any:
        if self._is_of_tensors(other):
            other = _Varies.of_tensor(self.followed, other)
            if other is NotImplemented:
                _unknown(())
        operands = (other, self) if reflected else (self, other)
        if isinstance(other, Tensor):
            if step == "truediv" and not reflected:  # as torch divides a number by a tensor
                return _TENSORS["mul"](other.reciprocal(), self)
            return _TENSORS[step](*operands)
        if type(other) not in (int, float, bool, _Varies):
            return NotImplemented
        function = _STEPS[step]
        values: list[Any] = [x.value if type(x) is _Varies else x for x in operands]
        first, second = ((x.of if type(x) is _Varies else lambda _, x=x: x) for x in operands)
        text = " ".join((_in_brackets(operands[0]), _SIGNS[step], _in_brackets(operands[1])))

        def of(numbers: Sequence[Number]) -> Any:
            return function(first(numbers), second(numbers))

        value = function(*values)  # which may raise, as the original does
        whole = type(value) is int
        known = all(x.known for x in operands if type(x) is _Varies)
        if not _can_be_traced(step, values, value):
            return self.followed.told(text, of)
        if step in ("truediv", "floordiv", "mod") and type(operands[1]) is _Varies and operands[1].known:
            operands[1].now(f"{operands[1].text} == 0", lambda x: x == 0)

        def make() -> Tensor:
            made = [_operand(x, whole=whole) for x in operands]
            if step == "truediv" and not isinstance(made[0], Tensor):  # not by the reciprocal, which is rounded
                made[0] = as_tensor(made[0])
            found: Tensor = function(*made)
            return found

        return _Varies(self.followed, value, of, text, make, known=known)

    def by(self, text: str, function: Callable[[Any], Any], of_tensor: Callable[[Tensor], Tensor]) -> Any:
        """A function of one number, and of a tensor."""
        value = function(self.value)
        if type(value) not in (int, float):
            return self.now(text, function)
        kind = torch.int64 if type(value) is int else torch.float64
        return _Varies(
            self.followed, value, lambda numbers: function(self.of(numbers)), text, lambda: of_tensor(self.tensor().to(kind)),
            known=self.known,
        )  # fmt: skip

    def compared(self, name: str, other: Any) -> Any:
        if isinstance(other, Tensor):
            return getattr(torch, name)(other, self) if name in ("eq", "ne") else getattr(torch, _MIRRORED[name])(other, self)
        function = getattr(operator, name)
        if self._is_of_tensors(other) or not self.known:
            _unknown(())
        if type(other) is not _Varies:
            if type(other) not in (int, float, bool):
                return NotImplemented
            return self.now(f"{self.text} {_COMPARISONS[name]} {other!r}", lambda x: function(x, other))
        text = f"{self.text} {_COMPARISONS[name]} {other.text}"
        return self.followed.told(text, lambda values: function(self.of(values), other.of(values)))

    def _is_of_tensors(self, other: Any) -> bool:
        return isinstance(other, torch.SymInt | torch.SymFloat) or self.followed.of_tensors.is_standing(other)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(type(self.value), name):
            raise AttributeError(f"{type(self.value).__name__!r} object has no attribute {name!r}")
        return getattr(self.now(), name)

    def __neg__(self) -> Any:
        return self.by(f"-{_in_brackets(self)}", operator.neg, torch.neg)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self.by(f"abs({self.text})", abs, torch.abs)

    def __bool__(self) -> bool:
        return bool(self.now(f"bool({self.text})", bool))

    def __int__(self) -> int:
        return int(self.now(f"int({self.text})", int))

    __trunc__ = __int__

    def __round__(self, digits: Any = None) -> Any:
        return self.now(f"round({self.text}, {digits})", lambda x: round(x, digits))

    def __floor__(self) -> Any:
        return self.now(f"floor({self.text})", math.floor)

    def __ceil__(self) -> Any:
        return self.now(f"ceil({self.text})", math.ceil)

    def __copy__(self) -> _Varies:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Varies:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"cannot pickle {self.text} in a trace")

    def __float__(self) -> float:
        return float(self.now())

    def __complex__(self) -> complex:
        return complex(self.now())

    def __index__(self) -> int:
        return operator.index(self.now())

    def __hash__(self) -> int:
        return hash(self.now())

    def __repr__(self) -> str:
        return repr(self.now())

    def __str__(self) -> str:
        return str(self.now())

    def __format__(self, spec: str) -> str:
        return format(self.now(), spec)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
for _step in _STEPS:
    setattr(_Varies, f"__{_step}__", lambda self, other, step=_step: self.combined(step, other))
    setattr(_Varies, f"__r{_step}__", lambda self, other, step=_step: self.combined(step, other, reflected=True))
for _name in _COMPARISONS:
    setattr(_Varies, f"__{_name}__", lambda self, other, name=_name: self.compared(name, other))
for _name in ("lshift", "rshift", "and", "or", "xor"):  # of whole numbers, which are sizes and flags
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(_Varies, f"__{_name}__", lambda self, other, function=_function: function(self.now(), other))
    setattr(_Varies, f"__r{_name}__", lambda self, other, function=_function: function(other, self.now()))


def _operand(x: Any, *, whole: bool) -> Any:
    """A tensor of what stands for a number, or a number; int if all are whole, else float."""
    if type(x) is not _Varies:
        return int(x) if whole else float(x)
    return x.tensor() if whole else x.tensor().to(torch.float64)


def _can_be_traced(step: str, values: Sequence[Number], value: Any) -> bool:
    """Whether torch computes the same of tensors, also where the numbers are others of their kinds."""
    if type(value) not in (int, float):
        return False
    if type(value) is int:
        return step != "pow" and abs(value) < _WHOLE
    return step not in ("floordiv", "mod") and (step != "pow" or values[0] > 0)


def _in_brackets(x: Any) -> str:
    text = x.text if type(x) is _Varies else repr(x)
    return f"({text})" if " " in text else text


def _text(path: Path) -> str:
    return f"{path[0]}" + "".join(f"[{part!r}]" for part in path[1:])


def _of_math(name: str) -> Callable[..., Any]:
    function = getattr(math, name)

    def of(x: Any, *more: Any) -> Any:
        return function(x, *more) if more or type(x) is not _Varies else x.by(f"{name}({x.text})", function, _of_floats(name))

    return of


def _of_floats(name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: _OF_MATH[name](x.to(torch.float64))


# ----------------------------------------------------------------------------------------------------------- where torch is given it
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "radd", "rsub", "rmul", "rdiv", "truediv", "rtruediv", "true_divide"})
_ELEMENTWISE = _ARITHMETIC | {
    "iadd", "isub", "imul", "itruediv", "idiv", "subtract", "multiply", "divide", "gt", "ge", "lt", "le", "eq", "ne", "greater",
    "greater_equal", "less", "less_equal", "not_equal", "where", "lerp",
}  # fmt: skip
_ROUNDED_BEFORE = frozenset({"gt", "ge", "lt", "le", "eq", "ne", "where"})  # numbers have the low precision of the tensor
_SUMS = frozenset({"add", "sub", "radd", "rsub"})  # before which a CPU rounds a scalar, too, and a GPU does not
_MAKES = frozenset({"tensor", "as_tensor", "scalar_tensor"})
_REDUCED = (torch.float16, torch.bfloat16)
_IN_TORCH = "torch.nn.functional"


def in_torch(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """A call of a torch function that may be given what stands for numbers, with tensors or values in its place. Functions of torch that
    are written in Python go on with it."""
    if not any(type(x) is _Varies for x in pytree.tree_leaves((args, dict(kwargs)))):
        return func, args, kwargs
    if isinstance(func, FunctionType) and func.__module__ == _IN_TORCH:
        return func, args, kwargs
    return _without(func, args, kwargs)


def _without(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    own = getattr(func, "__name__", "")
    name, in_place = own.strip("_"), own.endswith("_") and not own.endswith("__")
    numbers = [x for x in args if type(x) is _Varies]
    if name in _MAKES and args and type(args[0]) is _Varies and len(args) == 1 and kwargs.keys() <= {"dtype", "device"}:
        kind = kwargs.get("dtype") or (torch.int64 if type(args[0].value) is int else torch.get_default_dtype())
        made = args[0].tensor().to(kind)
        device = kwargs.get("device")
        return (lambda: made if device is None else made.to(device)), (), {}
    tensors = [x for x in (args[1:] if name == "where" else args) if isinstance(x, Tensor)]
    kind = torch.result_type(tensors[0], numbers[0].value) if tensors and numbers else None
    counts = {"where": (1, 3), "lerp": (2, 3)}.get(name, (1, 2))
    known = name in _ELEMENTWISE and not kwargs and len(numbers) == 1 and (len(tensors), len(args)) == counts
    rounded = name in _ROUNDED_BEFORE or (name in _SUMS and bool(tensors) and tensors[0].device.type == "cpu")
    if known and kind in _REDUCED and name in _ARITHMETIC and not in_place and not rounded:  # computed as a scalar is, in float32
        wide = [x.tensor().to(torch.float32) if type(x) is _Varies else x.to(torch.float32) for x in args]
        return (lambda *operands: func(*operands).to(kind)), tuple(wide), {}
    if known and (kind not in _REDUCED or (rounded and not in_place)):
        return func, tuple(x.tensor().to(kind) if type(x) is _Varies else x for x in args), kwargs
    scales = kwargs.get("alpha")
    if name in ("add", "sub") and kwargs.keys() == {"alpha"} and type(scales) is _Varies and not numbers and len(tensors) == len(args) == 2:
        kind = torch.result_type(tensors[1], scales.value)
        if kind not in _REDUCED:
            return func, (args[0], torch.mul(args[1], scales.tensor().to(kind))), {}
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(lambda x: x.now() if type(x) is _Varies else x, (args, dict(kwargs)))
    return func, *found
