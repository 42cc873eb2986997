"""Units: the parameters that are gathered together, of those that are gathered where they are used, and what that keeps in memory.

The runtime has one unit gathered at a time, from its first use until another one is used, and the next one of the step on its way;
gradients wait for the others of their unit (autopar/run/gathered.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

from autopar.ir import Program, Span, refs

__all__ = ["Key", "Units", "Waiting", "gather_units"]

Key = tuple[int, str]  # a pass: the index of a stage among those of a rank, and 'F' or 'B'


def gather_units(program: Program, parts: Mapping[str, int], unit_bytes: int) -> dict[str, int]:
    """Parameter (value) -> its unit: what is gathered together. A unit is of one block instance, or of what stands between two,
    by the parameters' first readers, and of unit_bytes at most unless one parameter is larger. program: of one rank; parts: value ->
    bytes as it is used, of the parameters that rest in parts."""
    spans = ((b, i, span) for b, block in enumerate(program.blocks) for i, span in enumerate(block.spans))
    place = {k: (b, i) for b, i, span in spans for k in range(span.start, span.stop)}
    found: dict[str, int] = {}
    unit, size, here = -1, 0, None
    for k, op in enumerate(program.ops):
        for r in refs(op):
            if r in found or r not in parts:
                continue
            if unit < 0 or place.get(k) != here or size + parts[r] > unit_bytes:
                unit, size, here = unit + 1, 0, place.get(k)
            found[r] = unit
            size += parts[r]
    return found


class Units:
    """Bytes of gathered parameters while an operator runs: the unit in use, and the next one, which is gathered ahead (at the end of
    a pass the first one of what follows). A unit of several parameters is copied out of what it is gathered into.

    forward, backward: operator -> bytes. unit_of: value -> unit; members: unit -> how many parameters; gradients: unit -> how many of them
    have one. size: value -> bytes; trained: which of these have a gradient;
    passes: of each pass of a rank, (operator, the parameters that it uses) in order; follows: the passes that may come after each.
    """

    def __init__(
        self,
        size: Mapping[str, int],
        trained: Collection[str],
        unit_of: Mapping[str, int],
        passes: Mapping[Key, Sequence[tuple[int, Sequence[str]]]],
        follows: Collection[tuple[Key, Key]],
    ) -> None:
        self.unit_of, self._passes = unit_of, passes
        self.members = Counter(unit_of[v] for v in size)
        self.gradients = Counter(unit_of[v] for v in size if v in trained)
        self._size: Counter[int] = Counter()
        for v, nbytes in size.items():
            self._size[unit_of[v]] += nbytes
        self._runs = {key: self._in_order(uses) for key, uses in passes.items()}
        self._after = {key: [b for a, b in follows if a == key] for key in passes}
        before = {key: [a for a, b in follows if b == key] for key in passes}
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        for key, uses in passes.items():
            runs, last = self._runs[key], [self._runs[p][-1:] for p in before[key]]
            goes_on = bool(last) and all(unit == runs[:1] for unit in last)
            there = max((self._bytes(p, len(self._runs[p]) - 1, begins=False) for p in before[key] if self._runs[p]), default=0)
            found = self.forward if key[1] == "F" else self.backward
            run, between = -1, there  # between: bytes while no other unit begins
            for k, used in uses:
                if not used:
                    found[k] = between
                    continue
                first = run
                for unit in (unit_of[v] for v in used):
                    run += run < 0 or runs[run] != unit
                between = self._bytes(key, run, begins=False)
                found[k] = self._bytes(key, run, begins=True) if run > first and not (goes_on and run == 0) else between

    def alike(self, span: Span) -> Hashable:
        """Equal for stages of operators that are alike whose passes cannot tell these units apart: the bytes while each operator runs, and
        which of the parameters that it uses are one, or of one unit, and of how many."""
        parameters: dict[str, int] = {}
        units: dict[int, int] = {}
        used = [
            (
                k - span.start, parameters.setdefault(v, len(parameters)), units.setdefault(u := self.unit_of[v], len(units)),
                self.members[u], self.gradients[u],
            )
            for uses in self._passes.values() for k, values in uses if span.start <= k < span.stop for v in values
        ]  # fmt: skip
        each = range(span.start, span.stop)
        return tuple(used), *(tuple([found.get(k, 0) for k in each]) for found in (self.forward, self.backward))

    def _in_order(self, uses: Sequence[tuple[int, Sequence[str]]]) -> list[int]:
        """The units of a pass in the order in which they are in use."""
        runs: list[int] = []
        for unit in (self.unit_of[v] for _, used in uses for v in used):
            if runs[-1:] != [unit]:
                runs.append(unit)
        return runs

    def _bytes(self, key: Key, run: int, *, begins: bool) -> int:
        runs = self._runs[key]
        unit = runs[run]
        if run + 1 < len(runs):
            ahead = self._size[runs[run + 1]]
        else:
            others = [next((u for u in self._runs[p] if u != unit), None) for p in self._after[key]]
            ahead = max((self._size[u] for u in others if u is not None), default=0)
        copied = self._size[unit] if begins and self.members[unit] > 1 else 0
        return self._size[unit] + max(ahead, copied)


class Waiting:
    """The gradients of a unit that are there, while those of its other parameters are not."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._there: dict[str, tuple[int, int, int]] = {}

    @property
    def bytes(self) -> int:
        return sum(made for made, _, _ in self._there.values())

    def add(self, value: str, made: int, sent: int, scattered: int) -> Iterator[tuple[int, int, int]]:
        """made: bytes of a gradient; sent: as it is sent; scattered: of the part of it that stays here. Yields for each reduction that
        starts now the bytes of the gradients beside the buffer that they are copied to, of that buffer, and of the parts that are
        scattered here."""
        unit_of, gradients = self._units.unit_of, self._units.gradients
        if any(unit_of[v] != unit_of[value] for v in self._there):
            yield self._start()
        self._there[value] = made, sent, scattered
        if len(self._there) == gradients[unit_of[value]]:
            yield self._start()

    def _start(self) -> tuple[int, int, int]:
        made, sent, scattered = (sum(x) for x in zip(*self._there.values(), strict=True))
        copied = len(self._there) > 1 or sent != made
        self._there = {}
        return (made if copied else 0), sent, scattered
