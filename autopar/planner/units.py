"""Units: the parameters that are gathered together, of those that are gathered where they are used, and what that keeps in memory.

The runtime has one unit gathered at a time, from its first use until another one is used, and the next one of the step on its way;
gradients wait for the others of their unit (autopar/run/gathered.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autopar.ir import Program, refs

__all__ = ["Units", "Waiting", "gather_units"]


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
    forward the first one of backward). A unit of several parameters is copied out of what it is gathered into.

    forward, backward: operator -> bytes. unit_of: value -> unit; members: unit -> how many parameters. size: value -> bytes;
    uses: (operator, the parameters that it uses), in the order of each pass.
    """

    def __init__(
        self,
        size: Mapping[str, int],
        unit_of: Mapping[str, int],
        forward: Sequence[tuple[int, Sequence[str]]],
        backward: Sequence[tuple[int, Sequence[str]]],
    ) -> None:
        self.unit_of = unit_of
        self.members = Counter(unit_of[v] for v in size)
        self._size: Counter[int] = Counter()
        for v, nbytes in size.items():
            self._size[unit_of[v]] += nbytes
        runs: list[int] = []  # the units in the order of the step
        at: list[tuple[int, bool]] = []  # of each operator: the run that it belongs to, and whether it begins it
        for _, used in (*forward, *backward):
            before = len(runs)
            for unit in (unit_of[v] for v in used):
                if not runs or runs[-1] != unit:
                    runs.append(unit)
            at.append((len(runs) - 1, len(runs) > before))
        found = [self._bytes(runs, run, begins) for run, begins in at]
        self.forward = dict(zip((k for k, _ in forward), found[: len(forward)], strict=True))
        self.backward = dict(zip((k for k, _ in backward), found[len(forward) :], strict=True))

    def _bytes(self, runs: Sequence[int], run: int, begins: bool) -> int:
        if run < 0:
            return 0
        unit = runs[run]
        ahead = self._size[runs[run + 1]] if run + 1 < len(runs) else 0
        copied = self._size[unit] if begins and self.members[unit] > 1 else 0
        return self._size[unit] + max(ahead, copied)


class Waiting:
    """The gradients of a unit that are there, while those of its other parameters are not."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._there: dict[str, tuple[int, int]] = {}

    @property
    def bytes(self) -> int:
        return sum(made for made, _ in self._there.values())

    def add(self, value: str, made: int, scattered: int) -> Iterator[tuple[int, int, int]]:
        """made: bytes of a gradient; scattered: of the part of it that stays here. Yields for each reduction that starts now the bytes
        of the gradients beside the buffer that they are copied to, of that buffer, and of the parts that are scattered here."""
        unit_of, members = self._units.unit_of, self._units.members
        if any(unit_of[v] != unit_of[value] for v in self._there):
            yield self._start()
        self._there[value] = made, scattered
        if len(self._there) == members[unit_of[value]]:
            yield self._start()

    def _start(self) -> tuple[int, int, int]:
        made, copied, scattered = self.bytes, len(self._there) > 1, sum(x for _, x in self._there.values())
        self._there = {}
        return (made if copied else 0), made, scattered
