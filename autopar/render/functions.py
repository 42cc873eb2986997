"""The body of one emitted function: operators and block calls as statements with comments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import RenderError
from autopar.ir import Layout, Op, TensorType, refs
from autopar.render.blocks import relative
from autopar.render.calls import call
from autopar.render.literals import INDENT, WIDTH, Code, filled, statement, string
from autopar.render.names import Names, comment_text, short
from autopar.render.pieces import Piece, Wanted, pieces, without_directory

__all__ = ["MARK", "Facts", "Function", "Item"]

MARK = "\x1f"  # stands in no source: literals escape it
BIG = 4  # a dead local of at least 1/BIG of the largest one's bytes is deleted, so that it does not outlive its last use


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What comments and expressions need to know. usual: the dtype that comments leave out. axes: the mesh, axis -> size.
    wanted: the user's own names of values. marked: the first line of each statement ends in MARK and the name of its operator."""

    types: Mapping[str, TensorType]
    layouts: Mapping[str, Mapping[str, Layout]]
    axes: Mapping[str, int]
    usual: str
    wanted: Mapping[str, Wanted] = field(default_factory=dict)
    marked: bool = False

    def comment(self, value: str) -> str:
        """'(4, 16, 64) bfloat16 dp=S(0) tp=I': shape on one rank, dtype if unusual, layout on each axis of more than one rank."""
        parts = []
        if value in self.types:
            t = self.types[value]
            parts.append(str(t.shape))
            if dtype_name(t) != self.usual:
                parts.append(dtype_name(t))
        for axis, size in self.axes.items():
            if size > 1 and value in self.layouts.get(axis, {}):
                parts.append(f"{axis}={self.layouts[axis][value]}")
        return " ".join(parts)


def dtype_name(t: TensorType) -> str:
    return str(t.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One statement to be: an operator, or a block call (op None) with the source of its expression."""

    takes: tuple[str, ...]
    gives: tuple[str | None, ...]
    op: Op | None = None
    code: Callable[[Callable[[str], str]], Code] | None = None
    unpack: bool = False  # the expression is a tuple of the results, even of one

    @staticmethod
    def of(op: Op) -> Item:
        return Item(takes=refs(op), gives=op.outputs, op=op, unpack=op.multi or len(op.outputs) > 1)


class Function:
    """Writes one function. `weights`: value -> fqn of what is looked up in w; `prefix`: the path that w stands at."""

    def __init__(self, facts: Facts, weights: Mapping[str, str], prefix: str = "", depth: int = 1, taken: Sequence[str] = ()) -> None:
        self.facts, self.weights, self.prefix, self.depth = facts, weights, prefix, depth
        self.names = Names(taken)
        self.local: dict[str, str] = {}  # value -> its local name
        self.arguments: set[str] = set()
        self.ends_in_no_grad = False  # the last line written stands under `with torch.no_grad():`

    def argument(self, value: str, name: str = "") -> str:
        """Take a value as an argument; its name in the signature (`name`, where that is not free to choose)."""
        self.arguments.add(value)
        wanted = self.facts.wanted.get(value)
        self.local[value] = self.names.hold(value, name or (wanted.name if wanted is not None else short(value, self.prefix)))
        return self.local[value]

    def source(self, value: str) -> str:
        """The expression that reads a value."""
        if value in self.local:
            return self.local[value]
        if value in self.weights:
            name = relative(self.weights[value], self.prefix)
            assert name is not None, (value, self.prefix)
            return f"w[{string(name)}]"
        raise RenderError(f"{value!r} is read before it is made")

    # ------------------------------------------------------------------------------------------------------ writing
    def write(self, items: Sequence[Item], keep: Sequence[str]) -> list[str]:
        """The lines of all statements in order; `keep`: values that must stay readable after them."""
        last = {value: index for index, item in enumerate(items) for value in item.takes}
        last.update(dict.fromkeys(keep, len(items)))
        biggest = max((self._nbytes(v) for item in items for v in item.gives if v is not None), default=0)
        lines: list[str] = []
        before = Piece(start=0, stop=0)
        for piece in pieces([item.op for item in items]):
            depth = self.depth + int(piece.no_grad)
            if piece.no_grad and not before.no_grad:
                lines.append(f"{INDENT * self.depth}with torch.no_grad():")
            lines += self._heading(before, piece, depth)
            dead: list[str] = []  # values made in this function that have their last use in this piece
            for index in range(piece.start, piece.stop):
                item = items[index]
                code = self._code(item)
                for value in dict.fromkeys(item.takes):
                    if last[value] == index and value in self.local:
                        self.names.release(self.local[value])
                        dead += [value] if value not in self.arguments else []
                comment = "; ".join(dict.fromkeys(filter(None, (self.facts.comment(v) for v in item.gives if v is not None))))
                written = statement(self._targets(item, last), code, comment, depth)
                if self.facts.marked and item.op is not None:
                    written[0] += f"{MARK}{json.dumps(item.op.name)}"  # a name may hold an end of a line
                lines += written
            big = {self.local[v] for v in dead if self._nbytes(v) * BIG >= biggest > 0}
            stale = [name for name in dict.fromkeys(self.local[v] for v in dead) if name in big and self.names.is_free(name)]
            if stale and piece.stop < len(items):
                lines += [f"{INDENT * depth}del {line.strip().rstrip(',')}" for line in filled(stale, depth + 1)]
                for name in stale:
                    self.names.forget(name)
            before = piece
        self.ends_in_no_grad = before.no_grad
        return lines

    def _code(self, item: Item) -> Code:
        if item.op is None:
            assert item.code is not None
            return item.code(self.source)
        try:
            return call(item.op, self.source, self.facts.types, self.facts.axes)
        except RenderError as error:
            where = f" ({item.op.source})" if item.op.source else ""
            raise RenderError(f"writing {item.op.target} -> {item.op.outputs}{where}: {error}") from error

    def _targets(self, item: Item, last: Mapping[str, int]) -> str:
        names = []
        for value in item.gives:
            if value is None or value not in last:
                names.append("_")
                continue
            wanted = self.facts.wanted.get(value)
            by_user = wanted is not None and (not wanted.on_the_way or self.names.available(wanted.name))
            base = wanted.name if wanted is not None and by_user else short(value, self.prefix)
            self.local[value] = self.names.hold(value, base)
            names.append(self.local[value])
        if all(n == "_" for n in names):
            return ""
        return f"({names[0]},)" if item.unpack and len(names) == 1 else ", ".join(names)

    def _heading(self, before: Piece, piece: Piece, depth: int) -> list[str]:
        """The comment above a piece: the module's path and the user's line, each if it is another than before."""
        within = None if ", " in self.prefix else relative(piece.module, self.prefix)
        path = "" if piece.module in (before.module, self.prefix) else within or piece.module
        line = "" if piece.source == before.source else without_directory(piece.source)
        text = "  ".join(filter(None, map(comment_text, (path, line))))
        room = WIDTH - len(INDENT * depth) - 2
        return [f"{INDENT * depth}# {text if len(text) <= room else text[: room - 3] + '...'}"] if text else []

    def _nbytes(self, value: str) -> int:
        return self.facts.types[value].nbytes if value in self.facts.types else 0
