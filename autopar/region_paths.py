"""On which ways gradients come to the values of a program: by operators alone, or past submodules that run as they are written.

Such a submodule may give no gradient to what it is given: where no sample is positive, its loss is a zero that depends on nothing. What
is upstream of it has no gradient then (None, not zeros), and an optimizer leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from autopar.ir import Program, Ref, refs
from autopar.run.region import REGION

__all__ = ["Flow", "Paths", "paths_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Of one region. direct: a gradient comes to its results past no other region. operands: of each of the tensors that it is given, the
    values that no operator makes and the regions, by handle, from which operators alone lead there."""

    direct: bool
    operands: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """flows: of each region, by its handle. past_regions: the values that no operator makes to which gradients come past regions alone."""

    flows: dict[str, Flow] = field(default_factory=dict)
    past_regions: frozenset[str] = frozenset()


def paths_of(program: Program) -> Paths:
    """The ways of the gradients of the loss and of the outputs."""
    regions = [op for op in program.ops if op.target == REGION]
    if not regions:
        return Paths()
    makers = {o: op for op in program.ops for o in op.outputs if o is not None}

    def upstream(starts: Iterable[str]) -> tuple[set[str], set[str]]:
        """What leads to these by operators alone: values that no operator makes, and handles of regions."""
        leaves, handles, seen = set(), set(), set[str]()
        left = [name for name in starts if program.types[name].grad]
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            op = makers.get(name)
            if op is None:
                leaves.add(name)
            elif op.target == REGION:
                handles.add(_handle(op.args))
            else:
                left += [r for r in refs(op) if program.types[r].grad]
        return leaves, handles

    by_operators, direct = upstream((program.loss, *program.outputs))
    flows, past = {}, set[str]()
    for op in regions:
        operands = [upstream([name]) for name in _names(op.args[1])]
        flows[_handle(op.args)] = Flow(
            direct=_handle(op.args) in direct, operands=tuple((tuple(sorted(a)), tuple(sorted(b))) for a, b in operands)
        )
        past.update(*(leaves for leaves, _ in operands), _names(op.args[2]))
    return Paths(flows=flows, past_regions=frozenset(past - by_operators))


def _handle(args: tuple[object, ...]) -> str:
    assert isinstance(args[0], Ref), args
    return args[0].name


def _names(operands: object) -> Iterator[str]:
    assert isinstance(operands, tuple), operands
    for x in operands:
        assert isinstance(x, Ref), operands
        yield x.name
