"""Lowered program + manifest -> the source of the emitted file."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from autopar.errors import RenderError
from autopar.ir import Layout, Lowered, StageProgram, refs
from autopar.render.blocks import BlockFunction, Call, agreed_layouts, block_functions
from autopar.render.calls import makes_new_tensor
from autopar.render.check import check_source
from autopar.render.functions import MARK, Facts, Function, Item, dtype_name
from autopar.render.literals import INDENT, WIDTH, Code, literal, statement, string
from autopar.render.names import comment_text, identifier, short
from autopar.render.pieces import Wanted, wanted_names
from autopar.run.manifest import BufferSpec, InputSpec, Manifest, OutputSpec, ParamSpec
from cost_models.rests import rest_of

__all__ = ["manifest_source", "render", "render_linked"]

IMPORTS = """\
import torch
import torch.nn.functional as F

from autopar.run import BufferSpec, InputSpec, Manifest, {specs}ParamSpec, Stage, recompute
from autopar.run import collectives as C
from autopar.run import local_ops as L
"""


def render(lowered: Lowered, manifest: Manifest) -> str:
    """The source of the emitted file: one file for all ranks, a class for each stage, a function for each distinct block.

    The same arguments give the same text. Raises RenderError if the program cannot be written, or if what was written
    does not pass `check_source`.
    """
    return render_linked(lowered, manifest)[0]


def render_linked(lowered: Lowered, manifest: Manifest) -> tuple[str, dict[int, str]]:
    """The source, and the operator that is written at a line (counted from 1), where one begins. A block's function stands for the
    operators of its first instance."""
    pairs = [line.partition(MARK) for line in _text(_Writer(lowered, manifest)).split("\n")]
    source = "\n".join(line for line, _, _ in pairs)
    check_source(source, stages=len(lowered.stages))
    return source, {k: json.loads(name) for k, (_, _, name) in enumerate(pairs, start=1) if name}


def _text(writer: _Writer) -> str:
    lowered, manifest = writer.lowered, writer.manifest
    parts = [writer.header(), IMPORTS.format(specs="OutputSpec, " if manifest.outputs else ""), manifest_source(writer.manifest)]
    parts += [writer.block(function) for function in writer.blocks]
    if lowered.prologue_outputs:  # of its operators, or constants that are cut over time
        parts.append(writer.prologue())
    parts += [writer.stage(stage) for stage in lowered.stages]
    parts.append("\n".join(_tuple("STAGES", tuple(f"Stage{stage.index}" for stage in lowered.stages), depth=0)) + "\n")
    first, *rest = parts
    return "\n".join((first, *rest[:2])) + "".join(f"\n\n{part}" for part in rest[2:])


# --------------------------------------------------------------------------------------------------------- manifest
def manifest_source(manifest: Manifest) -> str:
    """The statement MANIFEST = Manifest(...), all literals, fields at their defaults left out."""
    lines = ["MANIFEST = Manifest("]
    for name, value in _fields(manifest):
        if isinstance(value, tuple) and value and isinstance(value[0], ParamSpec | BufferSpec | InputSpec | OutputSpec):
            lines.append(f"{INDENT}{name}=(")
            for spec in value:
                lines += _entry(2, "", Code(f"{type(spec).__name__}(", tuple(f"{k}={literal(v)}" for k, v in _fields(spec)), ")"))
            lines.append(f"{INDENT}),")
        elif isinstance(value, Mapping):
            lines += _entry(1, f"{name}=", Code("{", tuple(f"{literal(k)}: {literal(v)}" for k, v in value.items()), "}"))
        elif isinstance(value, tuple) and len(value) > 1:
            lines += _entry(1, f"{name}=", Code("(", tuple(map(literal, value)), ")"))
        else:
            lines += _entry(1, f"{name}=", Code(literal(value)))
    return "\n".join((*lines, ")")) + "\n"


def _with_plain_names(manifest: Manifest) -> Manifest:
    """The manifest in which the names of inputs can stand as keywords of the stages; their paths say what they are to the user."""
    taken: set[str] = set()
    specs = []
    for spec in manifest.inputs:
        specs.append(dataclasses.replace(spec, name=_fresh(spec.name, taken)))
    return dataclasses.replace(manifest, inputs=tuple(specs))


def _fresh(text: str, taken: set[str]) -> str:
    """A plain identifier made of text that is not taken yet; it is from now on."""
    name, n = identifier(text), 1
    while name in taken:
        n += 1
        name = f"{identifier(text)}_{n}"
    taken.add(name)
    return name


def _fields(record: Manifest | ParamSpec | BufferSpec | InputSpec | OutputSpec) -> Iterable[tuple[str, object]]:
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if value != default or type(value) is not type(default):
            yield f.name, value


def _entry(depth: int, start: str, code: Code) -> list[str]:
    """`start code,` on one line, or its items on lines of their own."""
    pad = INDENT * depth
    line = f"{pad}{start}{code},"
    if len(line) <= WIDTH or not code.items:
        return [line]
    return [f"{pad}{start}{code.head}", *(f"{pad}{INDENT}{item}," for item in code.items), f"{pad}{code.tail},"]


# ---------------------------------------------------------------------------------------------------------- program
class _Writer:
    """What all functions of one file share."""

    def __init__(self, lowered: Lowered, manifest: Manifest) -> None:
        program = lowered.program
        self.lowered, self.manifest = lowered, _with_plain_names(manifest)
        self.weights = {p.value: p.fqn for p in program.params} | {b.value: b.fqn or b.value for b in program.buffers}
        named = {p.value: p.fqn for p in program.params} | {b.value: b.fqn for b in program.buffers if b.fqn is not None}
        self.blocks = block_functions(lowered, named)
        self.function_of = {(c.stage, c.call.span.start): (f, c) for f in self.blocks for c in f.calls}
        self.usual = self._usual_dtype()
        self.facts = Facts(
            types=program.types, layouts=self._layouts(), axes=dict(manifest.mesh), usual=self.usual, wanted=self._wanted(), marked=True
        )
        self.inputs = self._inputs()
        prologue = self._prologue_keywords()
        self.keywords = self.inputs | prologue
        unknown = [v for v in self.manifest.prologue if v not in prologue]
        if unknown:
            raise RenderError(f"the manifest lists {unknown}, which the prologue does not make")
        over_time = {prologue[v]: text for v, text in self.manifest.prologue.items()}
        self.manifest = dataclasses.replace(self.manifest, prologue=over_time)

    def _layouts(self) -> dict[str, dict[str, Layout]]:
        """The program's layouts. A transition is on one axis: on the others its result lies as its operand does."""
        layouts = {axis: dict(of) for axis, of in self.lowered.program.layouts.items()}
        for op in (*self.lowered.prologue, *(op for stage in self.lowered.stages for op in stage.ops)):
            moved = refs(op)
            if op.target.startswith("autopar.C.") and moved:
                for axis, of in layouts.items():
                    if axis != op.kwarg("axis") and moved[0] in of:
                        of.setdefault(op.name, of[moved[0]])
        return layouts

    def _wanted(self) -> dict[str, Wanted]:
        found = wanted_names(self.lowered.prologue, self.lowered.prologue_outputs)
        for stage in self.lowered.stages:
            found |= wanted_names(stage.ops, stage.kept, self.weights)
        return found

    def _usual_dtype(self) -> str:
        types = self.lowered.program.types
        found = Counter(
            dtype_name(types[o]) for s in self.lowered.stages for op in s.ops for o in op.outputs if o is not None and o in types
        )
        return min(found, key=lambda d: (-found[d], d), default="float32")

    def _inputs(self) -> dict[str, str]:
        """Value of each tensor of the batch -> the keyword under which the stages are given it."""
        by_path = {spec.path: spec.name for spec in self.manifest.inputs}
        missing = [i.path for i in self.lowered.program.inputs if i.path not in by_path]
        if missing:
            raise RenderError(f"the manifest does not name the inputs {missing} of the program, only {list(by_path)}")
        return {i.value: by_path[i.path] for i in self.lowered.program.inputs}

    def _prologue_keywords(self) -> dict[str, str]:
        """Value that the prologue hands to the stages -> its keyword, different from those of the inputs."""
        taken = set(self.inputs.values())
        wanted = self.facts.wanted
        return {v: _fresh(wanted[v].name if v in wanted else v, taken) for v in self.lowered.prologue_outputs}

    def header(self) -> str:
        m = self.manifest
        mesh = " x ".join(f"{axis} {size}" for axis, size in m.mesh.items())
        model, schedule = ("".join(c for c in comment_text(text) if c not in '"\\') for text in (m.model, m.schedule))
        batches = f"{m.micro_batches} micro-batch{'es' if m.micro_batches != 1 else ''} ({schedule})"
        what = f"{model}: {mesh}, {batches}, ZeRO {rest_of(m.rest).zero}"
        return (
            f'"""{what}. Generated by autopar.\n\n'
            "Every rank runs this file. The comment behind a statement is its result on one rank, for one micro-batch: shape,\n"
            f"dtype (unless {self.usual}), and its layout on each axis of the mesh: S(d) sharded on dim d, R replicated for\n"
            "different work, I replicated for the same work, P partial (the ranks hold terms of a sum).\n"
            '"""\n'
        )

    # ------------------------------------------------------------------------------------------------------- blocks
    def block(self, function: BlockFunction) -> str:
        """The function, behind those of its parts."""
        first = function.calls[0]
        facts = dataclasses.replace(self.facts, layouts=agreed_layouts(function, self.facts.layouts))
        writer = Function(facts, self.weights, prefix=first.call.prefix)
        arguments = [writer.argument(first.takes[p]) for p in function.arguments]
        items: list[Item] = []
        done = 0
        for part, (start, call) in zip(function.parts, first.parts, strict=True):
            items += map(Item.of, first.ops[done:start])
            items.append(self._item(part, call, "w", again=True))
            done = start + len(call.ops)
        body = writer.write([*items, *map(Item.of, first.ops[done:])], first.gives)
        prefixes = list(dict.fromkeys(comment_text(c.call.prefix) for c in function.calls))
        before = "".join(f"{self.block(part)}\n\n" for part in function.parts)
        signature = _definition(function.name, ("w", "mesh", *arguments), depth=0)
        results = tuple(map(writer.source, first.gives))
        returned = _returned(results, depth=1) if results else []
        return before + "\n".join((*_wrapped(prefixes), *signature, *(body or [f"{INDENT}pass"]), *returned)) + "\n"

    def _call_item(self, function: BlockFunction, call: Call) -> Item:
        prefix = call.call.prefix
        return self._item(function, call, f"w.at({string(prefix)})" if prefix else "w", again=call.call.recomputed_whole)

    def _item(self, function: BlockFunction, call: Call, weights: str, *, again: bool) -> Item:
        """A call of a block's function. weights: the expression that it is given as w; again: it runs again in backward."""
        takes = tuple(call.takes[p] for p in function.arguments)

        def code(source: Callable[[str], str]) -> Code:
            arguments = (weights, "mesh", *map(source, takes))
            if again:
                return Code("recompute(", (function.name, *arguments), ")")
            return Code(f"{function.name}(", arguments, ")")

        return Item(takes=takes, gives=call.gives, code=code)

    # ------------------------------------------------------------------------------------------------------- stages
    def stage(self, stage: StageProgram) -> str:
        items = self._items(stage)
        used = {value for item in items for value in item.takes} | set(stage.kept)
        writer = Function(self.facts, self.weights, depth=2)
        keywords = self._take_keywords(writer, [v for v in self.keywords if v in used and v not in stage.receives])
        received = [writer.argument(value) for value in stage.receives]
        body = writer.write(items, stage.kept)
        if stage.mutations and not writer.ends_in_no_grad:
            body.append(f"{INDENT * 2}with torch.no_grad():")
        body += self._mutations(stage, writer)
        lines = [
            f"class Stage{stage.index}(Stage):",
            *self._described(stage),
            *self._crossing("receives", stage.receives),
            *self._crossing("sends", stage.sends),
            *(self._crossing("outputs", stage.outputs) if stage.outputs else ()),
            "",
            *_definition("forward", ("self", *received, *keywords), depth=1),
            f"{INDENT * 2}w, mesh = self.weights, self.mesh",
            *body,
            *_returned(tuple(map(writer.source, (*stage.sends, *stage.outputs))), depth=2, always_tuple=True),
        ]
        return "\n".join(lines) + "\n"

    def _mutations(self, stage: StageProgram, writer: Function) -> list[str]:
        """The buffers take their new values. One that may share memory with a buffer is copied before any buffer changes."""
        buffers = {b.value for b in self.lowered.program.buffers}
        makers = {o: op for op in stage.ops for o in op.outputs if o is not None}
        copies, changes = [], []
        for buffer, value in stage.mutations:
            if buffer not in buffers:
                raise RenderError(f"stage {stage.index} changes {buffer!r}, which is no buffer")
            source = writer.source(value)
            if value not in makers or not makes_new_tensor(makers[value]):
                name = writer.names.hold(f"{value} copied", short(value))
                copies += statement(name, Code(f"{source}.clone()"), depth=3)
                source = name
            changes += statement("", Code(f"w[{string(self.weights[buffer])}].copy_({source})"), depth=3)
        return [*copies, *changes]

    def _items(self, stage: StageProgram) -> list[Item]:
        items: list[Item] = []
        index = 0
        while index < len(stage.ops):
            if (stage.index, index) in self.function_of:
                function, call = self.function_of[stage.index, index]
                items.append(self._call_item(function, call))
                index = call.call.span.stop
            else:
                items.append(Item.of(stage.ops[index]))
                index += 1
        return items

    def _take_keywords(self, writer: Function, values: Iterable[str]) -> tuple[str, ...]:
        """The end of the parameter list: keyword-only, and whatever else the runtime offers."""
        keywords = [writer.argument(v, self.keywords[v]) for v in values]
        return (*(("*",) if keywords else ()), *keywords, "**unused")

    def _described(self, stage: StageProgram) -> list[str]:
        calls = [c.prefix for c in stage.calls]
        if not calls:
            return []
        ends = comment_text(calls[0] if len(calls) == 1 else f"{calls[0]} to {calls[-1]}")
        return [f"{INDENT}# {len(calls)} block{'s' if len(calls) > 1 else ''}: {ends}"]

    def _crossing(self, name: str, values: Sequence[str]) -> list[str]:
        types = self.lowered.program.types
        missing = [v for v in values if v not in types]
        if missing:
            raise RenderError(f"values between stages have no type: {missing}")
        entries = tuple(literal((types[v].shape, dtype_name(types[v]))) for v in values)
        return _tuple(name, entries, depth=1)

    # ----------------------------------------------------------------------------------------------------- prologue
    def prologue(self) -> str:
        lowered = self.lowered
        facts = dataclasses.replace(self.facts, types={**self.facts.types, **lowered.prologue_types})
        writer = Function(facts, self.weights)
        used = {value for op in lowered.prologue for value in refs(op)} | set(lowered.prologue_outputs)
        keywords = self._take_keywords(writer, [v for v in self.inputs if v in used])
        body = writer.write([Item.of(op) for op in lowered.prologue], lowered.prologue_outputs)
        entries = tuple(f"{string(self.keywords[v])}: {writer.source(v)}" for v in lowered.prologue_outputs)
        signature = _definition("prologue", ("w", "mesh", *keywords), depth=0)
        note = "# once a step, before the micro-batches: what they need of the whole batch"
        returned = _with_return(Code("{", entries, "}"), 1)
        return "\n".join((note, *signature, *body, *returned)) + "\n"


def _definition(name: str, parameters: tuple[str, ...], depth: int) -> list[str]:
    """The lines of `def name(parameters):`."""
    pad = INDENT * depth
    line = f"{pad}def {name}({', '.join(parameters)}):"
    if len(line) <= WIDTH:
        return [line]
    comma = "" if parameters[-1].startswith("**") else ","
    return [f"{pad}def {name}(", *(f"{pad}{INDENT}{p}," for p in parameters[:-1]), f"{pad}{INDENT}{parameters[-1]}{comma}", f"{pad}):"]


def _tuple(name: str, entries: tuple[str, ...], depth: int) -> list[str]:
    """name = (entry, ...)"""
    lines = statement(name, Code("(", entries, ",)" if len(entries) == 1 else ")"), depth=depth)
    return lines if len(lines) == 1 else statement(name, Code("(", entries, ")"), depth=depth)


def _returned(results: tuple[str, ...], depth: int, always_tuple: bool = False) -> list[str]:
    if len(results) == 1:
        return [f"{INDENT * depth}return ({results[0]},)" if always_tuple else f"{INDENT * depth}return {results[0]}"]
    line = f"{INDENT * depth}return {', '.join(results) or '()'}"
    return [line] if len(line) <= WIDTH else _with_return(Code("(", results, ")"), depth)


def _with_return(code: Code, depth: int) -> list[str]:
    first, *rest = statement("", code, depth=depth)
    pad = INDENT * depth
    return [f"{pad}return {first.removeprefix(pad)}", *rest] if len(first) + len("return ") <= WIDTH else [
        f"{pad}return {code.head}", *(f"{pad}{INDENT}{item}," for item in code.items), f"{pad}{code.tail}"
    ]  # fmt: skip


def _wrapped(words: Sequence[str]) -> list[str]:
    """A comment that lists words, wrapped."""
    lines, line = [], "#"
    for n, word in enumerate(words):
        piece = f" {word}{',' if n < len(words) - 1 else ''}"
        if len(line) + len(piece) > WIDTH and line != "#":
            lines.append(line)
            line = "#"
        line += piece[:WIDTH]
    return [*lines, line] if line.strip("# ") else lines
