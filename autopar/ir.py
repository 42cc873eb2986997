"""The data that passes hand on, and its grammar.

    Program  = name inputs* params* buffers* ops* loss types blocks*
    Input    = value path type-of-leaf            a tensor leaf of the user's batch
    Param    = value fqn aliases trainable        one parameter, tied names are aliases
    Buffer   = value fqn persistent               a buffer, or a constant lifted by capture (fqn None)
    Op       = target args kwargs outputs         one call; its operands are Refs to values
    Arg      = Ref | None | bool | int | float | complex | str | torch.dtype | torch.memory_format | (Arg, ...)
    Block    = spans prefixes                     a repeated subgraph: one [start, stop) of ops for each instance
    Layout   = S(dim, groups) | R | I | P | L     how one value lies over ONE mesh axis
    Strategy = inputs* outputs* local             one way to run one operator over ONE mesh axis

Every pass returns a new value; nothing here is changed after it is made. A *value* is a name (str) in `Program.types`.
Lowered (stages of operators for one rank and one micro-batch) is what is rendered.
A program that was sharded over an axis is again a Program: its types are those of one rank, and transitions between
layouts stand in it as operators of their own (targets `autopar.*`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

__all__ = [
    "Arg", "Block", "BlockCall", "Buffer", "I", "Input", "Kind", "L", "Layout", "Lowered", "Op", "P", "Param", "Program",
    "R", "Ref", "S", "Span", "StageProgram", "Strategy", "TensorType", "call_text", "map_refs", "nameless", "refs", "rename_refs",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ layouts
class Kind(enum.Enum):
    """The layouts of a value on one mesh axis, and the layout of its gradient."""

    SHARD = "S"  # different slices; gradient S
    REPLICATE = "R"  # the same value, used for different work; gradient P
    INVARIANT = "I"  # the same value, used for the same work; gradient I
    PARTIAL = "P"  # terms of a sum; gradient the same on every rank
    LOCAL = "L"  # rows that each rank has sorted by itself; gradient L


@dataclass(frozen=True, slots=True)
class Layout:
    """How one value lies over one mesh axis.

    `S(dim, groups)`: dimension `dim`, seen as `groups` equal consecutive segments, is cut so that every rank holds its
    slice of each segment. groups=1 is the ordinary shard; groups=3 is how a fused q|k|v dimension is cut by heads.

    `L`: the rows (dim 0) that come from a rank's own rows, in the order into which the rank has sorted them, and positions among them. It
    is no slice of the whole value, and there is no transition from or to it: operators take and give it that work on rows
    one by one, between the sort and what undoes it (`Op.by_rows`).
    """

    kind: Kind
    dim: int = -1
    groups: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((ord(self.kind.value), self.dim, self.groups)))
        if (self.kind in (Kind.SHARD, Kind.LOCAL)) != (self.dim >= 0) or (self.kind is Kind.LOCAL and self.dim > 0):
            raise ValueError(f"only S has a dim, which is never negative, and L the first: {self.kind} dim={self.dim}")
        if self.groups < 1 or (self.groups != 1 and self.kind is not Kind.SHARD):
            raise ValueError(f"groups must be positive, and 1 unless sharded: {self.groups}")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Layout) and (self.kind, self.dim, self.groups) == (other.kind, other.dim, other.groups)

    @property
    def is_shard(self) -> bool:
        """Whether a rank has a part of the value: S and L."""
        return self.dim >= 0

    def __str__(self) -> str:
        if self.kind is not Kind.SHARD:
            return self.kind.value
        return f"S({self.dim})" if self.groups == 1 else f"S({self.dim}/{self.groups})"

    __repr__ = __str__

    @staticmethod
    @functools.lru_cache
    def parse(text: str) -> Layout:
        """The inverse of str(): 'R', 'I', 'P', 'L', 'S(1)', 'S(1/3)'. ValueError if it is none of these."""
        if text == "L":
            return L
        if text in ("R", "I", "P"):
            return Layout(Kind(text))
        if text.startswith("S(") and text.endswith(")"):
            dim, _, groups = text[2:-1].partition("/")
            if dim.isdecimal() and (groups.isdecimal() or not groups):
                return S(int(dim), int(groups or 1))
        raise ValueError(f"not a layout: {text!r}")

    def divides(self, shape: tuple[int, ...], n: int) -> bool:
        """Whether a tensor of this global shape can lie so over n ranks."""
        if not self.is_shard:
            return True
        return self.dim < len(shape) and shape[self.dim] % (self.groups * n) == 0 and shape[self.dim] > 0

    def local_shape(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        """The shape on one of n ranks of a tensor with this global shape."""
        if not self.is_shard:
            return shape
        assert self.divides(shape, n), (self, shape, n)
        return (*shape[: self.dim], shape[self.dim] // n, *shape[self.dim + 1 :])


R = Layout(Kind.REPLICATE)
I = Layout(Kind.INVARIANT)  # noqa: E741  (the name that DESIGN and the literature use)
P = Layout(Kind.PARTIAL)
L = Layout(Kind.LOCAL, 0)


@functools.cache
def S(dim: int, groups: int = 1) -> Layout:  # noqa: N802
    """Sharded on dim (see Layout)."""
    return Layout(Kind.SHARD, dim, groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One way to run one operator over one mesh axis.

    inputs: a layout for every Ref of the operator, in the order of `refs(op)`; outputs: one for every output.
    local: the name of the code that replaces the operator on a rank, or None if the operator itself runs on its local
    tensors (see `catalog.rules`). collective: this local code communicates, so that the axis cannot be one of time.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    local: str | None = None
    collective: bool = False

    def __str__(self) -> str:
        arrow = f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"
        return f"{arrow} [{self.local}]" if self.local else arrow

    @property
    def splits_work(self) -> bool:
        """True if every rank does a part of the work, False if all do the same."""
        return any(x.is_shard for x in (*self.inputs, *self.outputs))


# ------------------------------------------------------------------------------------------------------------ program
@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


type_of_scalar = None | bool | int | float | complex | str | torch.dtype | torch.memory_format
Arg = Ref | type_of_scalar | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a value; `grad`: the loss is differentiated through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False
    numel: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numel = math.prod(self.shape)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "nbytes", numel * self.dtype.itemsize)
        object.__setattr__(self, "_hash", hash((self.shape, self.dtype, self.grad)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One call of an operator.

    target: 'aten.linear.default' (namespace.name.overload) or an operator of autopar's own ('autopar.all_gather').
    outputs: the names of its results, used or not; None for an optional result that it does not have. multi: it returns a
    tuple or list (of which `outputs` are the elements), even if of one element. no_grad: it runs with gradients off.
    module: the user's module path it comes from ('transformer.h.0.attn'). source: 'file.py:12: the line of code'.
    by_rows: a strategy of this call beside those of its rule, from what capture has found around it (capture/routing.py).
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[str | None, ...]
    multi: bool = False
    no_grad: bool = False
    module: str = ""
    source: str = ""
    by_rows: Strategy | None = None
    _refs: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _nameless: Op | None = field(init=False, repr=False, compare=False, default=None)
    _call_text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        found: list[str] = []
        _collect(self.args, found)
        for _, value in self.kwargs:
            if isinstance(value, (Ref, tuple)):
                _collect((value,), found)
        object.__setattr__(self, "_refs", tuple(found))

    @property
    def name(self) -> str:
        """The operator's own name: that of its first used result; unique in the program (every op has a used result
        or an effect, and an op that has only an effect has its name as its single output)."""
        first = self.outputs[0]
        return first if first is not None else next(o for o in self.outputs if o is not None)

    def kwarg(self, name: str, default: Arg = None) -> Arg:
        return next((v for k, v in self.kwargs if k == name), default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A tensor leaf of the batch. path: how to reach it: ('input_ids',) in keyword inputs, (0,) in positional ones,
    longer where the user nests; (): the prologue makes it (see Lowered). Non-tensor leaves are constants of the program
    (`Program.constant_inputs`)."""

    value: str
    path: tuple[str | int, ...]
    layouts: tuple[tuple[str, Layout], ...] = ()  # over the axes that the program was sharded over


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """A parameter as the program uses it. aliases: the further names of a tied parameter. rests: the dtype in which it rests, in which its
    gradient is summed, if the program reads it in a lower one (that of its type): it is cast before it is used, once a step or whenever it
    is gathered. None: it is used as it rests. agreed: the axes whose ranks all compute its whole gradient, by operators that do not give
    the same bits each time (autopar.catalog.determinism), so that its mean over them is taken."""

    value: str
    fqn: str
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    rests: torch.dtype | None = None
    layouts: tuple[tuple[str, Layout], ...] = ()
    agreed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A buffer (fqn is its name in the model) or a constant tensor that capture lifted (fqn None). region: it stands for a submodule
    that an operator runs (see capture/regions.py), and has no data. parameter: in the model it is a frozen parameter, which the forward
    writes to. assigned: the forward puts another tensor in its place. aliases: its further names there."""

    value: str
    fqn: str | None
    persistent: bool = True
    mutated: bool = False
    assigned: bool = False
    region: bool = False
    parameter: bool = False
    aliases: tuple[str, ...] = ()
    layouts: tuple[tuple[str, Layout], ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Operators [start, stop) of a program."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A repeated subgraph: instances have equal operators, wiring, shapes and constants (but for rates between 0 and 1), and operator k of
    one corresponds to operator k of every other. prefixes: the module path of each instance, or several ('norms.3, layers.3')."""

    spans: tuple[Span, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Operators of a folded program that stand for so many equal parts of the whole one, which follow one another (see planner.fold)."""

    span: Span
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A model's forward pass to its scalar loss, in topological order.

    types: shape and dtype of every value. mutations: (buffer value, value that it becomes at the end of the forward).
    outputs: what the user is given beside the loss, as it was when the model returned it (empty unless asked for). own_loss: False if
    the user makes the loss of the outputs; `loss` is then their sum, and backward begins when all micro-batches have gone forward.
    constant_inputs: (path, value) of the non-tensor leaves of the batch, which the graph has frozen.
    batch_size: the size of dim 0 of the batch, which data parallelism splits (None: nothing to split). batched: the inputs
    that have it there (None: all whose dim 0 has that size).
    one_stage: why it is not cut into stages: ''; what hooks leave on one rank, say, others would not have.
    layouts: for a sharded program, axis -> value -> Layout; empty for a captured one. repeats: of a folded program, in order; else empty.
    """

    name: str
    inputs: tuple[Input, ...]
    params: tuple[Param, ...]
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    loss: str
    types: Mapping[str, TensorType]
    mutations: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    own_loss: bool = True
    blocks: tuple[Block, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    constant_inputs: tuple[tuple[tuple[str | int, ...], Arg], ...] = ()
    batch_size: int | None = None
    batched: tuple[str, ...] | None = None
    one_stage: str = ""
    layouts: Mapping[str, Mapping[str, Layout]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def leaves(self) -> tuple[Input | Param | Buffer, ...]:
        return (*self.inputs, *self.params, *self.buffers)

    @property
    def written_parameters(self) -> tuple[str, ...]:
        """The frozen parameters of the model that its forward writes to, by name."""
        return tuple(b.fqn for b in self.buffers if b.parameter and b.fqn is not None)

    def replace(self, **changes: object) -> Program:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def refs(op: Op) -> tuple[str, ...]:
    """The values that an operator reads, in the order of its arguments (args, then kwargs, depth first)."""
    return op._refs


def _collect(args: tuple[object, ...], found: list[str]) -> None:
    for arg in args:
        if isinstance(arg, Ref):
            found.append(arg.name)
        elif isinstance(arg, tuple):
            _collect(arg, found)


def map_refs(op: Op, rename: Callable[[str], Arg], *, outputs: tuple[str | None, ...] | None = None, module: str | None = None) -> Op:
    """The operator with each Ref replaced by rename(its value), in the order of refs(op); the operator itself if nothing changes. outputs,
    module: others than its own."""
    renamed = [rename(name) for name in op._refs]
    names = tuple([x.name for x in renamed if x.__class__ is Ref])
    own = outputs is None and module is None
    if own and names == op._refs:
        return op
    operands = iter(renamed)

    def sub(arg: Arg) -> Arg:
        if arg.__class__ is Ref:
            return next(operands)
        return tuple([sub(x) for x in arg]) if arg.__class__ is tuple else arg

    args, kwargs = tuple([sub(x) for x in op.args]), tuple([(k, sub(v)) for k, v in op.kwargs])
    outputs, module = op.outputs if outputs is None else outputs, op.module if module is None else module
    if len(names) != len(renamed):
        return dataclasses.replace(op, args=args, kwargs=kwargs, outputs=outputs, module=module)
    made = Op(
        target=op.target, args=args, kwargs=kwargs, outputs=outputs, multi=op.multi, no_grad=op.no_grad, module=module, source=op.source,
        by_rows=op.by_rows,
    )  # fmt: skip
    object.__setattr__(made, "_call_text", op._call_text)
    if own:
        object.__setattr__(made, "_nameless", op._nameless)
    return made


def rename_refs(op: Op, names: Mapping[str, str]) -> Op:
    """The operator that reads other values in the place of those that are named; the operator itself if it reads none of them."""
    return op if names.keys().isdisjoint(op._refs) else map_refs(op, lambda name: Ref(names.get(name, name)))


def nameless(op: Op) -> Op:
    """The operator with its operands called x0, x1 and so on, in the order of refs(op): what it does, whatever it is given."""
    if op._nameless is None:
        numbered = iter(range(len(op._refs)))
        object.__setattr__(op, "_nameless", map_refs(op, lambda _: Ref(f"x{next(numbered)}")))
    assert op._nameless is not None
    return op._nameless


def call_text(op: Op) -> str:
    """The nameless operator's target and arguments as a text: those of 1, 1.0 and True differ, though these are equal."""
    if not op._call_text:
        plain = nameless(op)
        what = (plain.target, plain.args, plain.kwargs) + (() if op.by_rows is None else (str(op.by_rows),))
        object.__setattr__(op, "_call_text", sys.intern(repr(what)))
    return op._call_text


# ------------------------------------------------------------------------------------------------------------ lowered
@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCall:
    """Operators [span) of a stage are instance `instance` of block `block` (an index of `Program.blocks` of the lowered
    program); all calls of one block have corresponding operators. recompute: the spans of its operators, counted from its first, that keep
    only what enters them for backward and run again there."""

    span: Span
    block: int
    instance: int
    prefix: str
    recompute: tuple[Span, ...] = ()

    @property
    def recomputed_whole(self) -> bool:
        return self.recompute == (Span(0, len(self.span)),)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProgram:
    """What the ranks of one pipeline stage run for one micro-batch. receives and sends: values, in order; the last stage
    sends the loss alone. Cheap operators that several stages need stand in each of them. mutations: of this stage's
    buffers, at the end of the forward. effects of operators (batch norm's running statistics) need none. outputs: those of
    the program's that this stage makes."""

    index: int
    ops: tuple[Op, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    calls: tuple[BlockCall, ...] = ()
    mutations: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """The values that something reads after the last operator."""
        return (*self.sends, *self.outputs, *(value for _, value in self.mutations))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """A program cut, sharded and ready to be written. types: of one rank and one micro-batch (except of the values that
    the prologue alone makes: those are of one rank and the whole step). prologue: operators on the inputs that run once a
    step, before the micro-batches; prologue_outputs: its values that the stages read."""

    program: Program
    stages: tuple[StageProgram, ...]
    prologue: tuple[Op, ...] = ()
    prologue_outputs: tuple[str, ...] = ()
    prologue_types: Mapping[str, TensorType] = field(default_factory=dict)
