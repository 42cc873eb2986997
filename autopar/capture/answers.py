"""What a forward asks of its own state in Python: `if self.step > 100`, `int(self.pointer)`, `if not self.initialized`; and whether
something is true of its inputs: `if mask.all()`.

The answer follows from numbers, sizes, and buffers and parameters as they are when a call begins, and from nothing else. So the trace is
given it, the program holds for that answer, and before every call it is asked again: where it is another, the model is captured again. Of
inputs that is so for masks, indices and lengths, not for what is floating; for few questions; and for numbers (`int(lengths.max())`), which
may be others in every call, only where the model is not to be captured without. Not so where the value depends on what is computed of
inputs with parameters, or on random numbers: it is refused.

What a forward writes to its trained parameters, of the state alone and before it uses them (`with torch.no_grad(): weight.clamp_(...)`), is
written before a call: the trace finds it done.

    Tape      while a model is traced: what is computed of its state and its inputs alone, in order
    Answers   what was asked, and what it takes to ask again
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autopar import generators
from autopar.capture.around import asking
from autopar.capture.source import running_line
from autopar.errors import CaptureError
from autopar.run import dispatch_modes
from autopar.run.objects import key_name

__all__ = ["NONE", "Answers", "Given", "Leaf", "Tape", "Whole", "given_by", "listed"]

Path = tuple[str | int, ...]  # of a leaf of (args, kwargs)
Leaf = str | Path  # of the state, by its name; of the inputs, by its path
Whole = Callable[[str], Tensor]  # a parameter or buffer by its name, as it is now: whole, on any device
Given = Callable[[Path], Tensor]  # an input of a call: of the global batch

LARGEST = 1 << 28  # elements of a tensor that is computed to ask for a value
_ASKS = frozenset(
    {"__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal", "is_nonzero", "item", "tolist"}
)  # the names of functions that give a value to Python
_MAKES = frozenset({
    "arange", "as_tensor", "eye", "full", "linspace", "ones", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"
})  # of numbers alone
_LIKE: Mapping[str, int | None] = {
    "full_like": None, "new_full": None, "new_ones": 1, "new_zeros": 0, "ones_like": 1, "zeros_like": 0
}  # of the sizes of another tensor, and this number; None: the last that they are given
_TRUTHS = frozenset({"__bool__", "__contains__", "allclose", "equal", "is_nonzero"})  # of these, those that say whether something is true
_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})  # dtypes of inputs that may be asked
MOST = 1 << 20  # elements of values that a trace is given
QUESTIONS = 16  # of the inputs: each may double the programs that batches need
FEW = 16  # of a tensor that is said by its elements
_UNNOTED = ("norm", "fused", "fake_quant")  # in names of functions that may write without saying so
_MODULES = os.path.dirname(nn.modules.__file__) + os.sep


@dataclass(frozen=True, slots=True)
class _Made:
    """Stands for the tensor that a step of a tape makes, or for one of the state."""

    index: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One function that was called of the state alone. reads, writes: the memory of what it is given, and of what it makes or writes to."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    results: Sequence[int | None]
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Called:
    """A function that is being called. ours: what it is given that has memory of the state, by that, and how often it was written to.
    noted: it is given nothing else that a trace makes."""

    func: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    ours: Mapping[int, tuple[Tensor, int]]
    noted: bool


@dataclass(frozen=True, slots=True)
class _Question:
    """Asked after so many steps of the tape. line: of the user's source. of_inputs: they decide the answer, too."""

    after: int
    func: Callable[..., Any]
    args: Any
    answer: object
    line: str
    of_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Answers:
    """What was asked of a model's state. names: of the parameters and buffers that decide it, with the dtypes in which it was asked.
    writes: the trained parameters that a call writes to before it uses them, among `leaves`. of_inputs: what was asked of the inputs,
    some of whose leaves are paths: `paths` has their dtypes, and the devices on which they were."""

    names: Mapping[str, torch.dtype] = field(default_factory=dict)
    leaves: Mapping[int, Leaf] = field(default_factory=dict)
    steps: tuple[_Step, ...] = ()
    questions: tuple[_Question, ...] = ()
    writes: tuple[int, ...] = ()
    paths: Mapping[Path, tuple[torch.dtype, torch.device]] = field(default_factory=dict)
    of_inputs: Answers | None = None

    @property
    def written_names(self) -> frozenset[str]:
        """Of the parameters that a call writes to."""
        return frozenset(str(self.leaves[number]) for number in self.writes)

    @property
    def said_of_inputs(self) -> tuple[str, ...]:
        """What was asked of the inputs, and the answers, in words."""
        return tuple(f"{q.line} ({q.answer})" for q in self.of_inputs.questions) if self.of_inputs is not None else ()

    def written(self, whole: Whole) -> dict[str, Tensor]:
        """What a call writes to parameters, by name; those that it leaves as they are, bit by bit, are not among them."""
        if not self.writes:
            return {}
        with torch.no_grad():
            before = {number: whole(str(name)).detach() for number, name in self.leaves.items()}
            values: dict[int, Any] = {number: t.clone() for number, t in before.items()}
            for step in self.steps:
                _run(step, values)
            return {str(self.leaves[k]): values[k] for k in self.writes if not torch.equal(values[k], before[k])}

    def changed(self, whole: Whole, given: Given | None = None) -> str | None:
        """The first answer that is another now, in words; None if all are as they were. given: the inputs of the call; without it what was
        asked of inputs is not asked again."""
        if self.questions:
            with torch.no_grad():
                values: dict[int, Any] = {k: self._now(leaf, whole, given) for k, leaf in self.leaves.items()}
                for found, question in zip(_asked(self.steps, self.questions, values), self.questions, strict=True):
                    if found != question.answer and not (found != found and question.answer != question.answer):
                        listed = ", ".join([*(f"its input {path[-1]!r}" for path in self.paths), *self.names])
                        return f"what the forward asks of {listed} ({question.line}): from {question.answer!r} to {found!r}"
        return self.of_inputs.changed(whole, given) if self.of_inputs is not None and given is not None else None

    def _now(self, leaf: Leaf, whole: Whole, given: Given | None) -> Tensor:
        """A copy of it, for a question of inputs where these were."""
        if isinstance(leaf, str):
            device = next((device for _, device in self.paths.values()), None)
            return whole(leaf).detach().to(device=device, dtype=self.names[leaf], copy=True)
        assert given is not None, leaf
        dtype, device = self.paths[leaf]
        return given(leaf).detach().to(device=device, dtype=dtype, copy=True)

    def changed_of(self, model: nn.Module) -> str | None:
        """The same of a model that holds its parameters and buffers whole, for a call with the same inputs."""
        held = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
        return self.changed(held.__getitem__)


NONE = Answers()


def _asked(steps: Iterable[_Step], questions: Sequence[_Question], values: dict[int, Any]) -> Iterator[object]:
    """The answers, one after the other. values: of the state, which is written to."""
    pending, done = list(steps), 0
    for question in questions:
        while done < question.after:
            _run(pending[done], values)
            done += 1
        args = pytree.tree_map_only(_Made, lambda made: values[made.index], question.args)
        yield question.func(*args)


def _run(step: _Step, values: dict[int, Any]) -> None:
    args, kwargs = pytree.tree_map_only(_Made, lambda made: values[made.index], (step.args, step.kwargs))
    results = pytree.tree_leaves(step.func(*args, **kwargs))
    if step.results:
        values.update((index, x) for index, x in zip(step.results, results, strict=True) if index is not None)


class Tape:
    """What the code inside of a trace computes of a model's parameters and buffers alone, or of inputs that are no floating numbers, and
    buffers. real: these, with their values, by name or path."""

    def __init__(self, real: Mapping[Leaf, Tensor], *, sizes: bool = True, numbers: bool = False) -> None:
        """sizes: whether the state may decide some; numbers and sizes of inputs may in any case. numbers: those that inputs alone decide
        are told. untold: one was asked for, and was not."""
        self._state_decides, self._numbers = sizes, numbers
        self.untold = False
        self._real = {leaf: t for leaf, t in real.items() if t.layout == torch.strided and not t.is_meta and t.numel() <= LARGEST}
        self._known: dict[int, tuple[Tensor, int]] = {}  # by the id of a traced tensor: it, which is kept alive, and its number
        self._memory: set[int] = set()  # of these
        self._lost: set[int] = set()  # memory that something else has been written to
        self._leaves: dict[int, tuple[Leaf, torch.dtype, int]] = {}
        self._inputs: set[int] = set()  # memory of inputs, and what is written of them
        self._parameters: set[int] = set()  # the same of parameters, frozen ones too
        self._steps: list[_Step] = []
        self._questions: list[_Question] = []
        self._of: dict[int, frozenset[int]] = {}  # by number: the memory that it is computed of
        self._used: set[int] = set()  # memory that decides what the trace computes of other things too
        self._stale: set[int] = set()  # numbers of what was computed of a parameter before it was written to
        self._trained: dict[int, int] = {}  # by the memory of a trained parameter: its number
        self._written: dict[int, None] = {}  # numbers of those that are written to

    def begin(self, model: nn.Module, inputs: Any) -> None:
        """The model as it is traced, before its forward. inputs: those of the call, (args, kwargs)."""
        held = (*model.named_buffers(), *model.named_parameters())
        for name, t in held:
            if name in self._real and _traced(t):
                number = self._add(t)
                self._leaves[number] = name, t.dtype, _memory(t)
                if isinstance(t, nn.Parameter):
                    self._parameters.add(_memory(t))
                if isinstance(t, nn.Parameter) and t.requires_grad:
                    self._trained[_memory(t)] = number
        for path, t in given_by(inputs).items():
            if path in self._real and _traced(t) and t.dtype in _WHOLE and _memory(t) not in self._memory:
                self._leaves[self._add(t)] = path, t.dtype, _memory(t)
                self._inputs.add(_memory(t))

    def knows(self, x: Tensor) -> bool:
        """Whether a traced tensor is of the state, or made of it alone."""
        number = self._number(x)
        return number is not None and not self._is_of_inputs([number])

    def moves(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether a function that is about to be called writes to a trained parameter what the state alone decides, before the parameter is
        used: it is not to be called, since the parameter holds that already."""
        target = args[0] if args else None
        number = self._trained.get(_memory(target)) if isinstance(target, Tensor) and _traced(target) else None
        if number is None or not isinstance(target, Tensor) or not _may_write(getattr(func, "__name__", ""), kwargs) or "out" in kwargs:
            return False
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        numbers = [self._number(x) for x in given if _traced(x)]
        off = not (target.requires_grad and torch._C.is_grad_enabled())
        if not off or None in numbers or _memory(target) in self._used or not self._stale.isdisjoint(numbers):
            return False
        if self._is_of_inputs(numbers):
            return False
        memory = _memory(target)
        made, named = self._of_tape((args, dict(kwargs)))
        reads = frozenset(_memory(x) for x in given if _traced(x))
        self._steps.append(_Step(func, made, named, (), reads, frozenset({memory})))
        self._stale |= {k for t, k in self._known.values() if memory in self._of[k] and _memory(t) != memory}
        self._written[number] = None
        return True

    def before(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> _Called | None:
        """A function is about to be called; None if the state has nothing to do with it."""
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = getattr(func, "__name__", "")
        if not given and name not in _MAKES:
            return None
        fake = [x for x in given if _traced(x)]
        ours = {m: x for x in fake if (m := _memory(x)) in self._memory}
        if given and not ours and (fake or _may_write(name, kwargs)):
            return _filled(name, args, kwargs) if len(given) == 1 and name in _LIKE else None
        numbers = [self._number(x) for x in fake]
        noted = None not in numbers and not (self._is_of_inputs(numbers) and self._touches(numbers, self._parameters))
        noted = noted and (len(fake) == len(given) or not _may_write(name, kwargs))  # a constant would be written to
        if not noted:
            self.use(fake)
        return _Called(func, args, kwargs, {m: (x, x._version) for m, x in ours.items()}, noted)

    def after(self, call: _Called | None, result: Any) -> None:
        """It was called, which is noted if it is of the state alone."""
        if call is None:
            return
        written = {m for m, (x, version) in call.ours.items() if x._version != version}
        if call.noted:
            if written:  # it lasts
                self.use(pytree.tree_leaves((call.args, call.kwargs)))
            self._note(call, result, written)
        else:
            unnoted = any(x in getattr(call.func, "__name__", "") for x in _UNNOTED)
            self._lost |= set(call.ours) if unnoted else written

    def answer(self, func: Callable[..., Any], args: Any) -> tuple[object] | None:
        """What a function that asks for a value gives, if the state alone decides it, or inputs and buffers alone."""
        given = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        fake = [x for x in given if _traced(x)]
        numbers = [self._number(x) for x in fake]
        name = getattr(func, "__name__", "")
        if name not in _ASKS or not fake or None in numbers:
            return None
        if asking(2).f_code.co_filename.startswith(_MODULES):  # of torch, which ask for what changes in every call
            return None
        of_inputs = self._is_of_inputs(numbers)
        if of_inputs and not self._may_ask_inputs(name, given):
            return None
        question = _Question(len(self._steps), func, self._of_tape(args), None, running_line(), of_inputs)
        found = self._found(asked := self._with_steps([question]))
        if found is None:
            return None
        if asked.leaves:  # else it is the same in every call
            self._questions.append(dataclasses.replace(question, answer=found))
        return (found,)

    def _may_ask_inputs(self, name: str, given: Sequence[Tensor]) -> bool:
        """Whether what is asked of inputs is told: not too often, and numbers if nothing else helps."""
        if sum(q.of_inputs for q in self._questions) >= QUESTIONS:
            return False
        is_truth = name in _TRUTHS or (name == "item" and given[0].dtype == torch.bool)
        self.untold |= not (is_truth or self._numbers)
        return is_truth or self._numbers

    def values(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> tuple[Any] | None:
        """What a function gives of tensors that the state alone decides: tensors that have values. None if it is given others, or what is
        trained, or where that cannot be told or is large."""
        given = [x for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor)]
        if not given or any(_traced(x) and not self.knows(x) for x in given):
            return None
        question = _Question(len(self._steps), _Call(func), self._of_tape((args, dict(kwargs))), None, running_line())
        asked = self._with_steps([question])
        if asked.leaves and not (self._state_decides and self._trained.keys().isdisjoint(self._at(asked))):
            return None
        found = self._found(asked)
        if found is None or sum(x.numel() for x in pytree.tree_leaves(found) if isinstance(x, Tensor)) > MOST:
            return None
        if asked.leaves:
            with dispatch_modes.none():
                said = _said(found)
            self._questions.append(_Question(question.after, _Call(func, says=True), question.args, said, question.line))
        return (found,)

    def forget(self) -> None:
        """The trace has ended: nothing is asked any more, and the values are let go of."""
        self._real.clear()

    def answers(self) -> Answers:
        """All that was asked."""
        of_state, of_inputs = ([q for q in self._questions if q.of_inputs is kind] for kind in (False, True))
        found = self._with_steps(of_state, self._written) if of_state or self._written else NONE
        return dataclasses.replace(found, of_inputs=self._with_steps(of_inputs)) if of_inputs else found

    def use(self, given: Iterable[object], line: str | None = None) -> None:
        """What is computed of the state is used with other things, or lasts. CaptureError if a parameter was written to since. line: of the
        user's source; None: the one that runs."""
        tensors = [x for x in given if isinstance(x, Tensor) and _traced(x)]
        numbers = [self._known[id(x)][1] for x in tensors if id(x) in self._known]
        self._used |= frozenset().union(*(self._of[k] for k in numbers)) | {_memory(x) for x in tensors}
        if not self._stale.isdisjoint(numbers):
            at = running_line() if line is None else line
            raise CaptureError(
                f"the forward writes to a parameter, and uses or keeps what it computed of it before\n  at {at}\n  what to do: change "
                f"parameters after optimizer.step(), or compute with what the parameter is then"
            )

    # ---------------------------------------------------------------------------------------------------------- private
    def _with_steps(self, asked: Sequence[_Question], written: Iterable[int] = ()) -> Answers:
        """Questions and what is written, with no more steps than it takes."""
        written = frozenset(written)
        made = {m.index for q in asked for m in pytree.tree_leaves(q.args) if isinstance(m, _Made)}
        made |= written
        memory = {_memory(t) for t, number in self._known.values() if number in made}
        kept: list[int] = []
        for place in range(len(self._steps) if written else max(q.after for q in asked))[::-1]:
            if self._steps[place].writes & memory:
                kept.append(place)
                memory |= self._steps[place].reads
        kept.reverse()
        questions = tuple(dataclasses.replace(q, after=sum(p < q.after for p in kept)) for q in asked)
        leaves = {number: (name, dtype) for number, (name, dtype, at) in self._leaves.items() if at in memory}
        return Answers(
            names={leaf: dtype for leaf, dtype in leaves.values() if isinstance(leaf, str)},
            leaves={number: leaf for number, (leaf, _) in leaves.items()},
            steps=tuple(self._steps[place] for place in kept), questions=questions, writes=tuple(written),
            paths={leaf: (dtype, self._real[leaf].device) for leaf, dtype in leaves.values() if not isinstance(leaf, str)},
        )  # fmt: skip

    def _is_of_inputs(self, numbers: Iterable[int | None]) -> bool:
        """Whether inputs decide one of these."""
        return self._touches(numbers, self._inputs)

    def _touches(self, numbers: Iterable[int | None], memory: set[int]) -> bool:
        return any(not memory.isdisjoint(self._of[k]) for k in numbers if k is not None)

    def _at(self, asked: Answers) -> set[int]:
        """The memory of the state that decides answers."""
        return {self._leaves[number][2] for number in asked.leaves}

    def _add(self, t: Tensor) -> int:
        number = self._known[id(t)][1] if id(t) in self._known else len(self._known)
        self._known[id(t)] = t, number
        self._of.setdefault(number, frozenset({_memory(t)}))
        self._memory.add(_memory(t))
        return number

    def _number(self, x: Tensor) -> int | None:
        """Of a traced tensor that the state alone decides."""
        found = self._known.get(id(x))
        return None if found is None or _memory(x) in self._lost else found[1]

    def _of_tape(self, tree: Any) -> Any:
        """Arguments as they are asked again: on the CPU what would have no values."""
        tree = pytree.tree_map_only(Tensor, lambda x: _Made(self._known[id(x)][1]) if _traced(x) else x, tree)
        return pytree.tree_map_only(torch.device, lambda x: torch.device("cpu") if x.type == "meta" else x, tree)

    def _note(self, call: _Called, result: Any, written: set[int]) -> None:
        args, kwargs = self._of_tape((call.args, dict(call.kwargs)))
        made = [x if isinstance(x, Tensor) and _traced(x) else None for x in pytree.tree_leaves(result)]
        if all(x is None for x in made) and not written:
            return
        if any(x is not None and not (_is_of_numbers(x.shape) and x.numel() <= LARGEST) for x in made):
            self._lost |= written
            return
        if call.func is _fill and made[0] is not None:
            args = self._of_tape((list(made[0].shape), *args, made[0].dtype, made[0].device))
        results = [None if x is None else self._add(x) for x in made]
        given = [self._known[id(x)][1] for x in pytree.tree_leaves((call.args, call.kwargs)) if id(x) in self._known]
        of = frozenset().union(*(self._of[k] for k in given))
        for origin in (self._inputs, self._parameters):
            if not of.isdisjoint(origin):
                origin |= written
        for k in (k for k in results if k is not None):
            self._of[k] |= of
            if not self._stale.isdisjoint(given):
                self._stale.add(k)
        writes = frozenset(written | {_memory(x) for x in made if x is not None})
        self._steps.append(_Step(call.func, args, kwargs, results, frozenset(call.ours), writes))

    def _found(self, asked: Answers) -> object:
        """The answer to a question; None where it cannot be told, or draws random numbers."""
        before = generators.states()
        with dispatch_modes.none(), torch.no_grad():
            real = self._real.__getitem__
            values: dict[int, Any] = {number: asked._now(leaf, real, real) for number, leaf in asked.leaves.items()}
            try:
                (found,) = _asked(asked.steps, asked.questions, values)
            except (RuntimeError, ValueError, TypeError, LookupError):  # the trace raises what the code would
                return None
            finally:
                drawn = not generators.same(before)
                generators.restore(before)
        return None if drawn else found


def given_by(inputs: Any) -> dict[Path, Tensor]:
    """The tensors of a call, (args, kwargs), by their paths."""
    leaves = pytree.tree_leaves_with_path(inputs)
    return {tuple(map(key_name, path[1:])): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def listed(t: Tensor) -> Any:
    """Its elements as Python's numbers, while something else is traced."""
    with dispatch_modes.none():
        return t.tolist()


def _filled(name: str, args: Any, kwargs: Mapping[str, Any]) -> _Called | None:
    """A function that makes a tensor of one number, of the sizes of a tensor that is not of the state."""
    value = _LIKE[name] if _LIKE[name] is not None else kwargs.get("fill_value", args[-1])
    return _Called(_fill, (value,), {}, {}, True) if isinstance(value, int | float) else None


def _fill(shape: list[int], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class _Call:
    """Calls a function with these arguments. says: what it gives in a form that is compared."""

    func: Callable[..., Any]
    says: bool = False

    def __call__(self, args: Any, kwargs: Any) -> Any:
        found = self.func(*args, **kwargs)
        return _said(found) if self.says else found


def _said(values: Any) -> str:
    """Equal for values that are equal, and short."""
    said = []
    for x in pytree.tree_leaves(values):
        few = not isinstance(x, Tensor) or x.numel() <= FEW
        said.append(str(x.tolist() if isinstance(x, Tensor) else x) if few else f"{list(x.shape)}, {_digest(x)}")
    return "; ".join(said)


def _digest(t: Tensor) -> str:
    return hashlib.sha256(t.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _traced(x: Tensor) -> bool:
    """Whether a tensor is one of a trace, or has no values otherwise; not one of torch.vmap, which has no memory of its own."""
    return isinstance(x, FakeTensor) or (x.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(x))


def _is_of_numbers(shape: Iterable[object]) -> bool:
    """Whether values decide no size of it."""
    return all(isinstance(size, int) for size in shape)


def _may_write(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this name may write to what it is given."""
    return "out" in kwargs or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _memory(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
