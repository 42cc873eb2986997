"""One operator as one Python expression."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache

from autopar.catalog.schema import Parameter, parameters
from autopar.errors import RenderError
from autopar.ir import Arg, Op, Ref, TensorType, refs
from autopar.render.forms import FORMS, REDUCTION
from autopar.render.literals import Code, literal
from autopar.run.region import REGION

__all__ = ["call", "generic_call", "makes_new_tensor"]

RefCode = Callable[[str], str]
DEVICE = "mesh.device"
LAST = 2**63 - 1  # the `end` of an open slice
IGNORED = frozenset({"cudnn_enable", "cudnn_enabled", "pin_memory", "layout", "non_blocking"})  # do not change a value
OPERATORS: Mapping[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.MatMult: "@",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=", ast.USub: "-", ast.Invert: "~",
}  # fmt: skip
AUTOPAR_MODULES = ("C", "L")


class NoForm(Exception):
    """The readable form does not apply to these arguments (never leaves this module)."""


def call(op: Op, ref: RefCode, types: Mapping[str, TensorType], axes: Mapping[str, int]) -> Code:
    """The expression that computes an operator: readable where the table has a form for it, else generic.

    ref: the source of a value. types: of the operands where known. axes: of the mesh. Raises RenderError.
    """
    if op.target.startswith("autopar."):
        return _autopar_call(op, ref, axes)
    if op.target not in FORMS and op.target not in SUBSCRIPTS:
        return generic_call(op, ref)
    arguments = _Arguments(op, ref, types)
    try:
        if op.target in SUBSCRIPTS:
            return Code(SUBSCRIPTS[op.target](arguments))
        return _fill(_parsed(FORMS[op.target]), arguments)
    except NoForm:
        return generic_call(op, ref)


def generic_call(op: Op, ref: RefCode) -> Code:
    """torch.ops.NAMESPACE.NAME.OVERLOAD(...): right for every operator; without a known schema the arguments stand as they are."""
    head = f"torch.ops.{op.target}("
    if not all(part.isidentifier() for part in op.target.split(".")) or op.target.count(".") != 2:
        raise RenderError(f"not the name of an operator: {op.target!r} (expected 'namespace.name.overload')")
    try:
        given = _Arguments(op, ref, {})
    except KeyError:
        keywords = [f"{_keyword(k)}={literal(v, ref)}" for k, v in op.kwargs]
        return Code(head, (*(literal(a, ref) for a in op.args), *keywords), ")")
    positional: list[tuple[str, bool]] = []
    keywords = []
    for p in given.parameters:
        if p.kwarg_only:
            if not given.at_default(p.name):
                keywords.append(f"{_keyword(p.name)}={given.text(p.name)}")
        else:
            positional.append((given.text(p.name), given.at_default(p.name)))
    return Code(head, (*_without_trailing_defaults(positional), *keywords), ")")


def makes_new_tensor(op: Op) -> bool:
    """Whether the result certainly shares no memory with an operand: that of arithmetic and comparisons."""
    return op.target in FORMS and isinstance(_parsed(FORMS[op.target]), ast.BinOp | ast.UnaryOp | ast.Compare)


def _keyword(name: str) -> str:
    if not name.isidentifier():
        raise RenderError(f"not a keyword argument: {name!r}")
    return name


def _without_trailing_defaults(items: list[tuple[str, bool]]) -> list[str]:
    while items and items[-1][1]:
        items = items[:-1]
    return [text for text, _ in items]


def _autopar_call(op: Op, ref: RefCode, axes: Mapping[str, int]) -> Code:
    """'autopar.C.all_gather' -> C.all_gather(x, mesh.tp, dim=1): the axis stands behind the tensors, then come scalars."""
    parts = op.target.split(".")
    if len(parts) != 3 or parts[1] not in AUTOPAR_MODULES or not parts[2].isidentifier() or parts[2].startswith("_"):
        raise RenderError(f"not an operator of autopar.run: {op.target!r} (expected 'autopar.C.name' or 'autopar.L.name')")
    axis = op.kwarg("axis")
    tensors = max((i + 1 for i, a in enumerate(op.args) if a is None or refs(Op(target="", args=(a,), outputs=()))), default=0)
    items = [literal(a, ref) for a in op.args]
    if axis is not None:
        names = axis if isinstance(axis, tuple) else (axis,)
        if any(name not in axes for name in names):
            raise RenderError(f"{op.target} over {axis!r}, which is no axis of the mesh ({', '.join(axes)})")
        meshes = [f"mesh.{name}" for name in names]
        items.insert(tensors, meshes[0] if len(meshes) == 1 else f"({', '.join(meshes)})")
    told = ("shapes", "grads") if op.target == REGION else tuple(k for k, _ in op.kwargs if k != "axis")
    items += [f"{_keyword(k)}={literal(v, ref)}" for k, v in op.kwargs if k in told]
    return Code(f"{parts[1]}.{parts[2]}(", tuple(items), ")")


class _Arguments:
    """An operator's arguments by parameter name. KeyError for an unknown operator, RenderError for arguments that do not fit."""

    def __init__(self, op: Op, ref: RefCode, types: Mapping[str, TensorType]) -> None:
        self.parameters = parameters(op.target)
        self.types = types
        self._ref = ref
        self._by_name = {p.name: p for p in self.parameters}
        positional = [p.name for p in self.parameters if not p.kwarg_only]
        self.given: dict[str, Arg] = dict(zip(positional, op.args, strict=False))
        self.given.update(op.kwargs)
        unknown = [k for k, _ in op.kwargs if k not in self._by_name]
        missing = [p.name for p in self.parameters if not p.has_default and p.name not in self.given]
        if unknown or missing or len(op.args) > len(positional):
            raise RenderError(f"arguments do not fit {op.target}: {op.args} {dict(op.kwargs)} (unknown {unknown}, missing {missing})")
        self._creates = not any(p.is_tensor or p.is_list for p in self.parameters)

    def parameter(self, name: str) -> Parameter:
        return self._by_name[name]

    def value(self, name: str) -> Arg:
        return self.given[name] if name in self.given else self._by_name[name].default

    def at_default(self, name: str) -> bool:
        """Whether leaving the argument out means the same. A factory's device never is: it is that of the mesh."""
        p, value = self._by_name[name], self.value(name)
        if name == "device":
            return value is None and not self._creates
        if name == "pin_memory":
            return not value
        return p.has_default and _same(value, p.default)

    def text(self, name: str) -> str:
        if name == "device" and not self.at_default(name):
            return DEVICE
        return literal(self.value(name), self._ref)

    def is_ref(self, name: str) -> bool:
        return isinstance(self.value(name), Ref)

    def type_of(self, arg: Arg) -> TensorType:
        if not isinstance(arg, Ref) or arg.name not in self.types:
            raise NoForm
        return self.types[arg.name]


def _same(a: object, b: object) -> bool:
    """Equality that tells 1 from True and from 1.0."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


# ------------------------------------------------------------------------------------------------------- the forms
@cache
def _parsed(form: str) -> ast.expr:
    return ast.parse(form, mode="eval").body


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _fill(form: ast.expr, arguments: _Arguments) -> Code:
    """The form with the operator's arguments in it; NoForm if it cannot say what they say."""
    named = _names(form)
    for p in arguments.parameters:
        if p.name not in named and p.name not in IGNORED and not arguments.at_default(p.name):
            raise NoForm
    if isinstance(form, ast.BinOp):
        return Code(_infix(form.left, form.op, form.right, arguments))
    if isinstance(form, ast.Compare):
        return Code(_infix(form.left, form.ops[0], form.comparators[0], arguments))
    if any(p.is_tensor and not (arguments.is_ref(p.name) or arguments.value(p.name) is None) for p in arguments.parameters):
        raise NoForm  # a number in a tensor's place is only understood by operators
    if isinstance(form, ast.UnaryOp):
        return Code(f"{OPERATORS[type(form.op)]}{_tensor(form.operand, arguments)}")
    assert isinstance(form, ast.Call), ast.dump(form)
    positional: list[tuple[str, bool]] = []
    for a in form.args:
        name, default, text = _argument(a, arguments)
        positional += [(t, default) for t in text]
    items = _without_trailing_defaults(positional)
    for k in form.keywords:
        name, default, text = _argument(k.value, arguments)
        if not default:
            items.append(f"{k.arg}={text[0]}")
    return Code(f"{_callee(form.func, arguments)}(", tuple(items), ")")


def _callee(func: ast.expr, arguments: _Arguments) -> str:
    assert isinstance(func, ast.Attribute), ast.dump(func)
    if isinstance(func.value, ast.Name) and func.value.id not in ("torch", "F"):
        return f"{_tensor(func.value, arguments)}.{func.attr}"
    return ast.unparse(func)


def _argument(node: ast.expr, arguments: _Arguments) -> tuple[str, bool, list[str]]:
    """Parameter name, whether it is at its default, and its source (several texts where it is spread)."""
    if isinstance(node, ast.Starred):
        assert isinstance(node.value, ast.Name)
        name = node.value.id
        value = arguments.value(name)
        if not isinstance(value, tuple):
            raise NoForm
        return name, False, [literal(v, arguments._ref) for v in value] or ["()"]
    if isinstance(node, ast.Subscript):
        assert isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Name)
        name = node.slice.id
        value = arguments.value(name)
        if node.value.id == "GIVEN":
            if value is None:
                raise NoForm
            return name, False, [arguments.text(name)]
        if value not in REDUCTION:
            raise NoForm
        return name, arguments.at_default(name), [literal(REDUCTION[value])]  # type: ignore[index]
    assert isinstance(node, ast.Name), ast.dump(node)
    return node.id, arguments.at_default(node.id), [arguments.text(node.id)]


def _tensor(node: ast.expr, arguments: _Arguments) -> str:
    assert isinstance(node, ast.Name)
    if not arguments.is_ref(node.id):
        raise NoForm
    return arguments.text(node.id)


def _infix(left: ast.expr, operator: ast.AST, right: ast.expr, arguments: _Arguments) -> str:
    assert isinstance(left, ast.Name) and isinstance(right, ast.Name)
    texts = []
    for side in (left, right):
        value = arguments.value(side.id)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, Ref) and not number:
            raise NoForm
        if number and side is left and arguments.parameter(side.id).is_tensor:
            raise NoForm  # a number that stands for a tensor promotes otherwise on the left of some operators
        text = arguments.text(side.id)
        texts.append(f"({text})" if side is left and text.startswith("-") else text)  # -2 ** x is -(2 ** x)
    if not any(arguments.is_ref(side.id) for side in (left, right)):
        raise NoForm
    return f"{texts[0]} {OPERATORS[type(operator)]} {texts[1]}"


# ------------------------------------------------------------------------------------------------------- brackets
def _dim_prefix(arguments: _Arguments, dim: Arg) -> str:
    """':, :, ' up to dim, or '..., ' for the last one."""
    if not isinstance(dim, int):
        raise NoForm
    rank = len(arguments.type_of(arguments.value("self")).shape)
    dim = dim + rank if dim < 0 else dim
    if not 0 <= dim < rank:
        raise NoForm
    return "..., " if dim == rank - 1 and dim > 1 else ":, " * dim


def _slice(arguments: _Arguments) -> str:
    start, end, step = (arguments.value(n) for n in ("start", "end", "step"))
    if any(not isinstance(v, int | None) for v in (start, end, step)) or not arguments.is_ref("self"):
        raise NoForm
    bounds = f"{start or ''}:{'' if end is None or end == LAST else end}" + (f":{step}" if step != 1 else "")
    return f"{arguments.text('self')}[{_dim_prefix(arguments, arguments.value('dim'))}{bounds}]"


def _select(arguments: _Arguments) -> str:
    index = arguments.value("index")
    if not isinstance(index, int) or isinstance(index, bool) or not arguments.is_ref("self"):
        raise NoForm
    return f"{arguments.text('self')}[{_dim_prefix(arguments, arguments.value('dim'))}{index}]"


def _index(arguments: _Arguments) -> str:
    """Brackets read a tensor without dims as a number, which would wait for the device: such indices have no form."""
    indices = arguments.value("indices")
    if not isinstance(indices, tuple) or not indices or not arguments.is_ref("self"):
        raise NoForm
    texts = []
    for i in indices:
        if i is not None and not arguments.type_of(i).shape:
            raise NoForm
        texts.append(":" if i is None else literal(i, arguments._ref))
    return f"{arguments.text('self')}[{', '.join(texts)}]"


SUBSCRIPTS: Mapping[str, Callable[[_Arguments], str]] = {
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.index.Tensor": _index,
}
