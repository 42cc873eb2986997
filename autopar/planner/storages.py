"""The storages of one rank's program: who makes, keeps and last reads each. A view is what it views."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from autopar.ir import Op, Program, Span, refs
from autopar.measure.costs import GATHER
from autopar.measure.workspace import Workspace, workspace

__all__ = ["Storages", "Store", "gathered_from", "span_of"]


class Store(dict[str, int]):
    """Storages by name, and their bytes in all."""

    def __init__(self, items: Mapping[str, int] | None = None) -> None:
        super().__init__(items or ())
        self.total = sum(self.values())

    def put(self, items: Mapping[str, int]) -> None:
        for name, nbytes in items.items():
            self.total += nbytes - self.get(name, 0)
            self[name] = nbytes

    def drop(self, name: str) -> None:
        self.total -= self.pop(name, 0)


class Storages:
    """By the program's values and operators. gpu: whether it runs on one. regathers: activations that are gathered are kept as the shards
    that they are gathered from, and gathered again in backward."""

    def __init__(self, program: Program, *, gpu: bool = False, regathers: bool = False) -> None:
        self.program, self.gpu = program, gpu
        self._kept_as = gathered_from(program) if regathers else {}
        self._resting = {x.value for x in program.leaves}
        self._root: dict[str, str] = {v: v for v in self._resting}
        self._bytes: dict[str, int] = {}
        self.work: list[Workspace] = []
        self.saved: list[dict[str, int]] = []
        self.trains: list[bool] = []  # whether a gradient passes through an operator
        self.outputs: list[tuple[str, ...]] = []
        self.fresh: list[tuple[str, ...]] = []  # the storages that an operator makes
        strides: dict[str, tuple[int, ...]] = {}
        for v in self._resting:
            strides[v] = _contiguous(program.types[v].shape)
        for op in program.ops:
            self._take(op, strides)
        self._line_end = _line_ends(program.ops)
        self._let_go: dict[Span, dict[int, list[str]]] = {}
        self._entering: dict[Span, dict[str, int]] = {}
        self._made: dict[Span, frozenset[str]] = {}
        params = {p.value for p in program.params}
        # the parameters that each operator reads in forward, and those that it needs again in backward
        self.read = [[r for r in dict.fromkeys(refs(op)) if r in params] for op in program.ops]
        self.read_again = [
            [r for r in dict.fromkeys(refs(op)[i] for i in w.saved_inputs) if r in params]
            for op, w in zip(program.ops, self.work, strict=True)
        ]

    def _take(self, op: Op, strides: dict[str, tuple[int, ...]]) -> None:
        types, operands = self.program.types, refs(op)
        results = tuple(o for o in op.outputs if o is not None)
        ins, outs = tuple(types[r] for r in operands), tuple(types[o] for o in results)
        w = workspace(op, ins, tuple(strides[r] for r in operands), outs, self.gpu)
        made = [k for k, o in enumerate(op.outputs) if o is not None]
        for o, k in zip(results, made, strict=True):
            fresh = w.results[k] if k < len(w.results) else 0
            strides[o] = w.strides[k] if k < len(w.strides) else _contiguous(types[o].shape)
            self._root[o] = o if fresh or not operands else self._root[operands[0]]
            if self._root[o] == o:
                self._bytes[o] = fresh
        saves: dict[str, int] = {}
        self.trains.append(not op.no_grad and any(types[o].grad for o in results))
        if self.trains[-1]:
            names = [self._kept_as.get(operands[k], operands[k]) for k in w.saved_inputs] + [op.outputs[k] for k in w.saved_outputs]
            saves = {self._root[v]: self._bytes[self._root[v]] for v in names if v is not None and self._root[v] not in self._resting}
            if w.saved_other:
                saves[f"{op.name}#"] = w.saved_other
        self.work.append(w)
        self.saved.append(saves)
        self.outputs.append(results)
        self.fresh.append(tuple(o for o in results if self._root[o] == o))

    def crossing(self, values: Collection[str]) -> dict[str, int]:
        """The storages of values between stages."""
        return {self._root[v]: self._size(v) for v in values if self._root[v] not in self._resting}

    def kept(self, span: Span, recomputed: Sequence[Span] = (), others: Mapping[str, int] | None = None) -> Store:
        """The storages that the operators of a span keep between forward and backward, behind these others. recomputed: the parts of it
        that run again in backward, which keep what enters them alone."""
        held, again = Store(others), span_of(recomputed)
        for k in self.indices(span):
            if k not in again:
                held.put(self.saved[k])
        for s in recomputed:
            held.put(self.entering(s))
        return held

    def kept_outside(self, span: Span) -> Collection[str]:
        """The storages that operators outside of a span keep."""
        return {x for k, saved in enumerate(self.saved) if k not in span for x in saved}

    def keeps(self, k: int) -> bool:
        """Whether operator k keeps anything for backward, a parameter perhaps."""
        return bool(self.saved[k] or (self.trains[k] and self.work[k].saved_inputs))

    def keeps_operands_alone(self, k: int) -> bool:
        """Whether what operator k keeps is there before it runs: an operator of torch notes its operands first."""
        w = self.work[k]
        return self.program.ops[k].target.startswith("aten.") and not w.saved_outputs and not w.saved_other

    def _size(self, value: str) -> int:
        return self._bytes.get(self._root[value], self.program.types[value].nbytes)

    def entering(self, span: Span) -> Mapping[str, int]:
        """The storages that a span reads and does not make."""
        if span not in self._entering:
            ops = self.program.ops
            inside = {o for k in self.indices(span) for o in self.outputs[k]}
            read = dict.fromkeys(r for k in self.indices(span) for r in refs(ops[k]) if r not in inside)
            self._entering[span] = {self._root[r]: self._size(r) for r in read if self._root[r] not in self._resting}
        return self._entering[span]

    def made(self, span: Span) -> frozenset[str]:
        """The storages that a span makes, or views."""
        if span not in self._made:
            self._made[span] = frozenset(self._root[o] for k in self.indices(span) for o in self.outputs[k])
        return self._made[span]

    def let_go(self, span: Span) -> Mapping[int, Sequence[str]]:
        """Of a forward pass over a span: operator -> the storages made in it that are let go of after it, unless something keeps them."""
        if span not in self._let_go:
            last: dict[str, int] = {}
            for k in self.indices(span):
                for v in (*refs(self.program.ops[k]), *self.outputs[k]):
                    last[self._root[v]] = self._line_end[k]
            found: dict[int, list[str]] = {}
            for k in self.indices(span):
                for r in self.fresh[k]:
                    found.setdefault(last[r], []).append(r)
            self._let_go[span] = found
        return self._let_go[span]

    @staticmethod
    def indices(span: Span) -> range:
        """Of its operators."""
        return range(span.start, span.stop)


def gathered_from(program: Program) -> dict[str, str]:
    """Gathered activation -> the shard that it was gathered from, which is kept where it is gathered again in backward."""
    params = {p.value for p in program.params}
    gathers = [op for op in program.ops if op.target == GATHER and refs(op)[0] not in params]
    return {op.name: refs(op)[0] for op in gathers}


def span_of(spans: Sequence[Span]) -> dict[int, Span]:
    """Operator -> the span that it stands in."""
    return {k: span for span in spans for k in range(span.start, span.stop)}


def _line_ends(ops: Sequence[Op]) -> list[int]:
    """For each operator the last one of the same line of the user's: after it the emitted code lets go of what it has read.
    Operators without a line belong to the one that they stand in."""
    ends, place = [0] * len(ops), ("", "")
    start = 0
    for k, op in enumerate(ops):
        here = (op.module, op.source)
        if here not in (place, ("", "")):
            ends[start:k] = [k - 1] * (k - start)
            start, place = k, here
    ends[start:] = [len(ops) - 1] * (len(ops) - start)
    return ends


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()
