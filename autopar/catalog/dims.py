"""Operator rules in one line: the notation of einsum, with marks.

    linear: "b* i, o i, +o -> b* o"

One term for each tensor parameter of the operator (absent optional ones are skipped), one for each result. `b*` stands
for any number of dims; `i!` is a dim that may not be split; `+` before a term is an operand that is added: where the
split makes the result partial, it must be partial too. Splitting a name over an axis of n ranks gives a strategy:
operands and results that have the name are S on that dim, operands without it R, results without it P (it was
contracted). linear: the terms in which the operator is linear, through which P passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from autopar.catalog.rule import OpView
from autopar.ir import Layout, P, R, S, Strategy, TensorType

__all__ = ["Dims", "Term", "carried", "parse_terms", "split_names"]


@dataclass(frozen=True, slots=True)
class Term:
    names: tuple[str, ...]
    starred: int = -1  # index of the name that stands for any number of dims
    fixed: frozenset[str] = frozenset()
    added: bool = False

    def bind(self, ndim: int) -> tuple[str, ...] | None:
        """One name for each dim of a tensor of ndim dims; None if it does not fit."""
        if self.starred < 0:
            return self.names if len(self.names) == ndim else None
        extra = ndim - (len(self.names) - 1)
        if extra < 0:
            return None
        pack = tuple(f"{self.names[self.starred]}.{k}" for k in range(extra))
        return (*self.names[: self.starred], *pack, *self.names[self.starred + 1 :])


def parse_terms(text: str) -> tuple[Term, ...]:
    terms = []
    for part in text.split(","):
        words = part.strip().removeprefix("+").split()
        starred = next((i for i, w in enumerate(words) if w.rstrip("!").endswith("*")), -1)
        names = tuple(w.rstrip("!").rstrip("*") for w in words)
        fixed = frozenset(w.rstrip("!").rstrip("*") for w in words if w.endswith("!"))
        terms.append(Term(names, starred, fixed, part.strip().startswith("+")))
    return tuple(terms)


@dataclass(frozen=True)
class Dims:
    """A rule stated in one line (see the module)."""

    line: str
    linear: tuple[int, ...] = field(default=())

    @cached_property
    def terms(self) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        left, right = self.line.split("->")
        return parse_terms(left), parse_terms(right)

    def __call__(self, view: OpView) -> Iterable[Strategy]:
        left, right = self.terms
        present = [(t, i) for t, i in zip(left, view.tensors().values(), strict=False) if i is not None]
        if len(present) != len(view.ins) or len(right) != len(view.outs):
            return
        operands: list[tuple[str, ...]] = [()] * len(view.ins)
        added = [False] * len(view.ins)
        for term, index in present:
            names = term.bind(len(view.ins[index].shape))
            if names is None:
                return
            operands[index], added[index] = names, term.added
        results = [t.bind(len(o.shape)) for t, o in zip(right, view.outs, strict=True)]
        if any(r is None for r in results):
            return
        fixed = {name for t in (*left, *right) for name in t.fixed}
        is_fixed = lambda name: name in fixed or name.partition(".")[0] in fixed  # noqa: E731
        yield from split_names(view, operands, [r for r in results if r is not None], added, is_fixed)
        for k in self.linear:
            where = next((i for t, i in present if t is left[k]), None)
            if where is not None:
                yield view.strategy([P if i == where or added[i] else R for i in range(len(view.ins))], [P] * len(view.outs))


def split_names(
    view: OpView,
    operands: list[tuple[str, ...]],
    results: list[tuple[str, ...]],
    added: list[bool],
    is_fixed: Callable[[str], bool] = lambda name: False,
) -> Iterable[Strategy]:
    """The strategies of splitting each name in turn. Names whose sizes differ (broadcast dims of size 1) are R where 1."""
    sizes: dict[str, int] = {}
    for names, t in [*zip(operands, view.ins, strict=True), *zip(results, view.outs, strict=True)]:
        for name, size in zip(names, t.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    for name, size in sizes.items():
        if is_fixed(name):
            continue
        terms = [*zip(operands, view.ins, strict=True), *zip(results, view.outs, strict=True)]
        if any(not _fits(name, size, names, t) for names, t in terms):
            continue
        if any(names.count(name) > 1 for names in (*operands, *results)):
            continue  # a diagonal
        if any(name in names and t.shape[names.index(name)] != size for names, t in zip(results, view.outs, strict=True)):
            continue
        contracted = [name not in names for names in results]
        for g in view.splits(size):
            ins: list[Layout] = []
            for names, t, plus in zip(operands, view.ins, added, strict=True):
                has = name in names and t.shape[names.index(name)] == size
                ins.append(S(names.index(name), g) if has else P if plus and any(contracted) else R)
            outs = [P if c else S(names.index(name), g) for names, c in zip(results, contracted, strict=True)]
            if any(x.is_shard for x in ins):
                yield view.strategy(ins, outs)


def carried(view: OpView, dims: Iterable[int]) -> Iterable[Strategy]:
    """Split each of these dims of the first operand, which every result has at the same place and in the same order; the
    other operands are R."""
    for d in dims:
        for g in view.splits(view.ins[0].shape[d]):
            yield view.strategy([S(d, g), *[R] * (len(view.ins) - 1)], [S(d, g)] * len(view.outs))


def _fits(name: str, size: int, names: tuple[str, ...], t: TensorType) -> bool:
    return name not in names or t.shape[names.index(name)] in (1, size)
