"""What an operator rule is, and the registry of all of them.

A rule is a function from an `OpView` to the strategies of that operator on ONE mesh axis, or one line of data in the
named-dims notation (`dims.Dims`, which is such a function). The framework adds what holds for every deterministic
operator: all inputs I -> outputs I, and all inputs R -> outputs R (its backward is linear, so that partial gradients
of the outputs give partial gradients of the inputs). It also drops what does not divide, so rules need not check that.
An operator without a rule has these, and what `probe` finds out by running it.

Local arguments: an operator whose arguments name sizes (view, expand, split ...) or counts (groups of a convolution)
also has a localizer, which rewrites those arguments to the sizes of one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.catalog.probe import Probed, probed
from autopar.catalog.schema import bind, parameters, tensor_refs
from autopar.ir import Arg, I, Layout, Op, P, R, Strategy, TensorType, call_text

__all__ = [
    "LOCALIZERS", "LOCAL_CODE", "RULES", "LocalCode", "Localizer", "OpView", "Rule", "dims_of", "draws", "is_random", "local_code",
    "localized", "localizes", "over_axes", "register", "rule_of", "set_args", "strategies_of", "summable",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpView:
    """What a rule sees: the operator, the types of its tensor operands (in the order of refs(op)) and results, the number
    of ranks on the axis, and the group counts to consider for S(dim, groups) (always 1, more where a view made them)."""

    op: Op
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    n: int
    groups: frozenset[int] = frozenset({1})

    def args(self) -> dict[str, Arg]:
        return bind(self.op)

    def tensors(self) -> dict[str, int | None]:
        return tensor_refs(self.op)

    def strategy(self, ins: Iterable[Layout], outs: Iterable[Layout], *, local: str | None = None, collective: bool = False) -> Strategy:
        return Strategy(inputs=tuple(ins), outputs=tuple(outs), local=local, collective=collective)

    def splits(self, size: int) -> Iterable[int]:
        """The group counts with which a dim of this size can be sharded."""
        return (g for g in sorted(self.groups) if size > 0 and size % (g * self.n) == 0)


Rule = Callable[[OpView], Iterable[Strategy]]
LocalCode = Callable[[Op, OpView, Strategy, str], tuple[Op, ...]]
Localizer = Callable[[Op, OpView, Strategy], Op]
RULES: dict[str, Rule] = {}
LOCALIZERS: dict[str, Localizer] = {}
LOCAL_CODE: dict[str, LocalCode] = {}


def register(names: str, rule: Rule) -> None:
    """Claim operators for a rule; names: packets ('aten.add') or overloads ('aten.add.Tensor'), separated by blanks."""
    for name in names.split():
        if name in RULES:
            raise ValueError(f"two rules for {name}")
        RULES[name] = rule
    _KNOWN.clear()


def localizes(names: str) -> Callable[[Localizer], Localizer]:
    """Register the function that rewrites arguments of these operators to local sizes."""

    def decorate(fn: Localizer) -> Localizer:
        for name in names.split():
            LOCALIZERS[name] = fn
        return fn

    return decorate


def local_code(name: str) -> Callable[[LocalCode], LocalCode]:
    """Register the code that a strategy names as `local`: a function of (op, view, strategy, axis) that returns the
    operators that stand on a rank in its place; the last of them makes the outputs of the one that it replaces."""

    def decorate(fn: LocalCode) -> LocalCode:
        LOCAL_CODE[name] = fn
        return fn

    return decorate


def localized(view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    """The operators that a rank runs for this operator under this strategy."""
    if strategy.local is not None:
        other = dataclasses.replace(view.op, by_rows=None)  # what was found holds for the operator itself
        return LOCAL_CODE[strategy.local](other, view, strategy, axis)
    localizer = localizer_of(view.op.target)
    return (localizer(view.op, view, strategy) if localizer is not None else view.op,)


def rule_of(target: str) -> Rule | None:
    return RULES.get(target) or RULES.get(target.rpartition(".")[0])


def localizer_of(target: str) -> Localizer | None:
    return LOCALIZERS.get(target) or LOCALIZERS.get(target.rpartition(".")[0])


def strategies_of(view: OpView) -> tuple[Strategy, ...]:
    """All strategies of an operator on an axis of view.n ranks, the trivial ones first. Those that do not divide, that
    make a partial value of a type that cannot be summed, or that a rule states twice are left out. Computed once for each
    distinct operator, whatever its values are called."""
    key = (call_text(view.op), view.ins, view.outs, view.n, view.groups)
    if key not in _KNOWN:
        _KNOWN[key] = _strategies_of(view)
    return _KNOWN[key]


_KNOWN: dict[object, tuple[Strategy, ...]] = {}


def _strategies_of(view: OpView) -> tuple[Strategy, ...]:
    rule, random = rule_of(view.op.target), draws(view.op)
    found = Probed() if rule is not None or random else probed(view.op, view.ins, view.outs, view.n)
    replicated = (I, R) if found.additive and view.op.kwarg("linear") is not False else (I,)  # a region's own backward may not be
    trivial = [
        view.strategy([layout] * len(view.ins), [layout] * len(view.outs), local=SAME_DRAW if random and layout == R else None)
        for layout in replicated
    ]
    stated = [*(rule(view) if rule is not None else found.strategies), *([view.op.by_rows] if view.op.by_rows is not None else [])]
    seen: dict[Strategy, None] = {}
    for s in (*trivial, *stated):
        assert len(s.inputs) == len(view.ins) and len(s.outputs) == len(view.outs), (view.op, s)
        pairs = [*zip(s.inputs, view.ins, strict=True), *zip(s.outputs, view.outs, strict=True)]
        if all(layout.divides(t.shape, view.n) and not (layout == P and not summable(t)) for layout, t in pairs):
            seen[s] = None
    return tuple(seen)


def summable(t: TensorType) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex or t.dtype.itemsize >= 4


RANDOM = (
    "dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout bernoulli rand randn randint rand_like randn_like "
    "randint_like normal normal_functional multinomial uniform exponential cauchy geometric log_normal random poisson binomial randperm "
    "_standard_gamma _sample_dirichlet rrelu"
)
_RANDOM = frozenset(RANDOM.split())
SAME_DRAW = "same_draw"  # the operator as it is: the ranks draw the same, but moments would not


@local_code(SAME_DRAW)
def _same_draw(op: Op, view: OpView, strategy: Strategy, axis: str) -> tuple[Op, ...]:
    return (op,)


def is_random(target: str) -> bool:
    """Whether the operator draws random numbers, unless it is told that it is not training."""
    return target.split(".")[1] in _RANDOM


def draws(op: Op) -> bool:
    """Whether this call draws random numbers: always, or for a dropout that is part of it (attention, recurrent layers)."""
    call = call_text(op)
    if call not in _DRAWS:
        _DRAWS[call] = _draws(op)
    return _DRAWS[call]


_DRAWS: dict[str, bool] = {}


def _draws(op: Op) -> bool:
    if op.target in ("autopar.L.dropout", "autopar.L.draw"):
        return True
    if op.target == "autopar.L.region":
        return bool(op.kwarg("draws"))
    bound = bind(op)
    if is_random(op.target):
        return op.target.split(".")[1] != "rrelu" or bool(bound["training"])
    return bool((bound.get("dropout_p") or bound.get("dropout")) and bound.get("train", True))


def over_axes(op: Op, axis: str) -> Arg:
    """The axes of local code that a further axis is laid over: a name, or a tuple of names, outermost first."""
    before = op.kwarg("axis")
    return axis if before is None else (*(before if isinstance(before, tuple) else (before,)), axis)


def dims_of(arg: Arg) -> tuple[int, ...]:
    """An argument that is a dim, or several of them. TypeError if it is anything else."""
    dims = arg if isinstance(arg, tuple) else (arg,)
    if not all(isinstance(d, int) for d in dims):
        raise TypeError(f"{arg!r} names no dims")
    return tuple(d for d in dims if isinstance(d, int))


def set_args(op: Op, **changes: Arg) -> Op:
    """The operator with some arguments changed, given by parameter name."""
    names = [p.name for p in parameters(op.target)]
    args = list(op.args)
    kwargs = dict(op.kwargs)
    for name, value in changes.items():
        index = names.index(name)
        if index < len(args):
            args[index] = value
        else:
            kwargs[name] = value
    return dataclasses.replace(op, args=tuple(args), kwargs=tuple(kwargs.items()))
