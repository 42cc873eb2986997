"""Which block calls share one function of the emitted file, and what that function takes and returns.

Calls share a function if their operators, wiring, constants and result types are equal. Values from outside the span
are numbered in order of first use. Such a value is looked up inside the function, as w[...], if in every call it is the
weight of the same name under the call's own prefix; all others are arguments. What of a block runs again in backward is a
function of its own, which the block's function calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import RenderError
from autopar.ir import Arg, BlockCall, Layout, Lowered, Op, Ref, Span, StageProgram, refs

__all__ = ["BlockFunction", "Call", "agreed_layouts", "block_functions", "relative"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One block call, or a part of one: its operators, the values it takes (in order of first use) and those that are used after it.
    parts: of it that run again in backward, each with its first operator, counted from the call's first."""

    stage: int
    call: BlockCall
    ops: tuple[Op, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    parts: tuple[tuple[int, Call], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFunction:
    """One function for several calls; the first call is the one that is written. arguments: positions in `takes` that are
    passed; the other positions are weights, looked up in the function. parts: the functions of the calls' parts."""

    name: str
    calls: tuple[Call, ...]
    arguments: tuple[int, ...]
    parts: tuple[BlockFunction, ...] = ()

    @property
    def uses_weights(self) -> bool:
        return len(self.arguments) < len(self.calls[0].takes)


def relative(fqn: str, prefix: str) -> str | None:
    """The name of a weight below a prefix ('' is the model itself), of several prefixes ('norms.3, layers.3') behind the number of the one
    that it is below; None if it is below none."""
    if not prefix:
        return fqn
    paths = prefix.split(", ")
    for number, path in enumerate(paths):
        if fqn.startswith(f"{path}."):
            name = fqn.removeprefix(f"{path}.")
            return name if len(paths) == 1 else f"{number}.{name}"
    return None


def block_functions(lowered: Lowered, weights: Mapping[str, str]) -> tuple[BlockFunction, ...]:
    """The functions of all block calls, in order of their first calls. weights: value -> fqn of parameters and buffers.

    Raises RenderError for spans that overlap or lie outside their stage.
    """
    alike: dict[Hashable, list[Call]] = {}
    for stage in lowered.stages:
        for call in _calls(stage):
            alike.setdefault(_key(call, lowered), []).append(call)
    return tuple(_function(f"block_{n}", calls, weights) for n, calls in enumerate(alike.values()))


def _function(name: str, calls: list[Call], weights: Mapping[str, str]) -> BlockFunction:
    parts = tuple(
        _function(f"{name}_again_{n}", [call.parts[n][1] for call in calls], weights) for n in range(len(calls[0].parts))
    )
    return BlockFunction(name=name, calls=tuple(calls), arguments=_arguments(calls, weights), parts=parts)


def agreed_layouts(function: BlockFunction, layouts: Mapping[str, Mapping[str, Layout]]) -> dict[str, dict[str, Layout]]:
    """Axis -> value of the first call -> layout, where the corresponding values of all calls have the same one."""
    made = [[o for op in call.ops for o in op.outputs if o is not None] for call in function.calls]
    agreed: dict[str, dict[str, Layout]] = {}
    for axis, of in layouts.items():
        same = (values for values in zip(*made, strict=True) if len({of.get(v) for v in values}) == 1)
        agreed[axis] = {values[0]: of[values[0]] for values in same if values[0] in of}
    return agreed


def _calls(stage: StageProgram) -> Iterable[Call]:
    free_from = 0
    for call in sorted(stage.calls, key=lambda c: c.span.start):
        if not free_from <= call.span.start < call.span.stop <= len(stage.ops):
            where = f"block call {call.prefix!r} of stage {stage.index}"
            raise RenderError(f"{where} has the span {call.span}, which overlaps another or is out of range")
        free_from = call.span.stop
    kept = set(stage.kept)
    readers: dict[str, set[int]] = {}
    for index, op in enumerate(stage.ops):
        for value in refs(op):
            readers.setdefault(value, set()).add(index)

    def of(call: BlockCall, span: Span, parts: tuple[tuple[int, Call], ...] = ()) -> Call:
        ops = stage.ops[span.start : span.stop]
        made = [o for op in ops for o in op.outputs if o is not None]
        inside = set(made)
        takes = dict.fromkeys(value for op in ops for value in refs(op) if value not in inside)
        gives = [o for o in made if o in kept or any(i not in span for i in readers.get(o, ()))]
        return Call(stage=stage.index, call=call, ops=ops, takes=tuple(takes), gives=tuple(gives), parts=parts)

    for call in sorted(stage.calls, key=lambda c: c.span.start):
        start, parts, free_from = call.span.start, [], 0
        for s in () if call.recomputed_whole else call.recompute:
            if not free_from <= s.start < s.stop <= len(call.span):
                raise RenderError(f"block call {call.prefix!r} of stage {stage.index} runs {s} again, which overlaps or is out of range")
            free_from = s.stop
            parts.append((s.start, of(call, Span(start + s.start, start + s.stop))))
        yield of(call, call.span, tuple(parts))


def _key(call: Call, lowered: Lowered) -> Hashable:
    """Equal for two calls if and only if one function serves both."""
    made = {o: (k, j) for k, op in enumerate(call.ops) for j, o in enumerate(op.outputs) if o is not None}
    taken = {value: n for n, value in enumerate(call.takes)}
    types = lowered.program.types

    def place(arg: Arg) -> Hashable:
        if isinstance(arg, Ref):
            return ("made", made[arg.name]) if arg.name in made else ("taken", taken[arg.name])
        if isinstance(arg, tuple):
            return tuple(map(place, arg))
        return (type(arg), repr(arg))  # 1, 1.0 and True differ; nan equals nan

    def describe(op: Op) -> Hashable:
        results = tuple(None if o is None else str(types.get(o)) for o in op.outputs)
        return (op.target, place(op.args), tuple((k, place(v)) for k, v in op.kwargs), results, op.multi, op.no_grad)

    parts = tuple((start, len(part.ops)) for start, part in call.parts)
    return (call.call.block, tuple(map(describe, call.ops)), tuple(made[value] for value in call.gives), parts)


def _arguments(calls: list[Call], weights: Mapping[str, str]) -> tuple[int, ...]:
    def inner_name(call: Call, position: int) -> str | None:
        fqn = weights.get(call.takes[position])
        return None if fqn is None else relative(fqn, call.call.prefix)

    looked_up = set()
    for position in range(len(calls[0].takes)):
        names = {inner_name(call, position) for call in calls}
        if len(names) == 1 and None not in names:
            looked_up.add(position)
    return tuple(p for p in range(len(calls[0].takes)) if p not in looked_up)
