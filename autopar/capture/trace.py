"""The exported graph as a flat list of operators: regions inlined, names fixed, devices and assertions gone. In-place ones remain."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from autopar.capture.effects import operand_returned, packet
from autopar.capture.export import PREFIX, number_name
from autopar.capture.follow import storage_of
from autopar.capture.held import without_ids
from autopar.capture.hooked import Call
from autopar.capture.infer import Meta, meta_of
from autopar.capture.instances import Instances, StandIns
from autopar.capture.memory import OfParameters
from autopar.capture.region_ops import HOOK, is_static
from autopar.capture.regions import Regions
from autopar.capture.source import source_line
from autopar.capture.state import State
from autopar.capture.varying import Numbers
from autopar.errors import CaptureError, DependsOnValues, SparseGradients
from autopar.ir import Arg, Buffer, Input, Op, Param, Ref
from autopar.run.autocast import Autocast
from autopar.run.condition import Condition
from autopar.run.objects import leaf_path
from autopar.run.observed import is_observer
from autopar.run.region import REGION, within
from autopar.run.region_modules import Terms
from autopar.run.varying import NUMBERS

__all__ = ["Names", "Trace", "Traced", "flatten"]

_ASSERTIONS = ("_assert_", "sym_constrain", "_functional_assert", "_functional_sym", "_check")
_CASTS = {"aten.to", "aten._to_copy", "aten.type_as", "aten._autocast_to_full_precision", "aten._autocast_to_reduced_precision"}
_DROPPED_KWARGS = {"device", "layout", "pin_memory", "non_blocking"}
_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.memory_format, type(None))


class Names:
    """Gives names of values that are Python identifiers and unique."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def fresh(self, wish: str) -> str:
        base = wish if wish.isascii() and wish.isidentifier() else "".join(c if c.isalnum() or c == "_" else "_" for c in wish)
        if not base.isidentifier() or keyword.iskeyword(base):
            base = f"v_{base}"
        name, k = base, 1
        while name in self._taken:
            name, k = f"{base}_{k}", k + 1
        self._taken.add(name)
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """One operator as traced. calls: the calls of modules it stands in, outermost first (the second call of a module is
    'path@1'). autocast: what was on where it was traced, which may have changed its precision; () for nothing."""

    op: Op
    calls: tuple[str, ...] = ()
    autocast: tuple[Autocast, ...] = ()

    def with_op(self, op: Op) -> Traced:
        """Another operator in its place."""
        return self if op is self.op else Traced(op=op, calls=self.calls, autocast=self.autocast)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What capture knows before the operators are made functional. storages: the identity of the memory behind each value:
    equal for views of one another. metas: what was traced, of every value (grad only of parameters and inputs). tensors: of
    parameters, buffers and constants. outside: what the code calls a constant that it reads
    from an attribute, a closure, a global. saved_apart: buffers that are the tensor of another, and are in the state_dict where that one is
    not, or the reverse. returned: what the model returns beside the loss, where it was asked for."""

    name: str
    inputs: tuple[Input, ...]
    constant_inputs: tuple[tuple[tuple[str | int, ...], Arg], ...]
    params: tuple[Param, ...]
    buffers: tuple[Buffer, ...]
    saved_apart: tuple[tuple[str, str], ...]
    ops: tuple[Traced, ...]
    loss: str
    returned: tuple[str, ...]
    storages: Mapping[str, int]
    metas: Mapping[str, Meta]
    tensors: Mapping[str, torch.Tensor]
    names: Names
    notes: tuple[str, ...] = ()
    outside: Mapping[str, str] = field(default_factory=dict)

    @property
    def given(self) -> list[str]:
        """The values that no operator makes: inputs, parameters, buffers and constants."""
        return [i.value for i in self.inputs] + [p.value for p in self.params] + [b.value for b in self.buffers]


def flatten(
    model: nn.Module, exported: ExportedProgram, start: State, regions: Regions, stand_ins: StandIns | None = None,
    varying: Numbers | None = None,
) -> Trace:  # fmt: skip
    """The trace of an exported Step of the model. start: what the model held when it was traced. stand_ins: of calls that are one
    operator each in the export; raises NotRepeated if one of them cannot be made from the call that stands for it.
    varying: the numbers that are inputs of the program."""
    return _Flattener(model, exported, start, regions, stand_ins, varying).run()


class _Symbolic:
    """A number that exists only at run time, and the line it comes from."""

    def __init__(self, source: str, module: str) -> None:
        self.source, self.module = source, module

    def error(self) -> CaptureError:
        error = DependsOnValues(
            f"cannot capture a shape or an argument that depends on the values of a tensor\n  at {self.source}\n  what to do: use masking "
            f"or a fixed capacity, so that every shape follows from the shapes of the inputs"
        )
        error.module, error.line = self.module, self.source
        return error


class _Flattener:
    def __init__(
        self, model: nn.Module, exported: ExportedProgram, start: State, regions: Regions, stand_ins: StandIns | None,
        varying: Numbers | None,
    ) -> None:  # fmt: skip
        self.varied = varying.leaves if varying is not None else ()
        self.arguments = varying.paths if varying is not None else {}
        self.model, self.exported, self.regions = model, exported, regions
        self.instances = Instances(stand_ins, self) if stand_ins is not None else None
        self.outside = {storage_of(tensor): path for path, tensor in start.tensors.items() if tensor.layout == torch.strided}
        self.names, self.memory = Names(), OfParameters(type(model).__name__)
        self.ops: list[Traced] = []
        self.storages: dict[str, int] = {}
        self.metas: dict[str, Meta] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.inputs: list[Input] = []
        self.constant_inputs: list[tuple[tuple[str | int, ...], Arg]] = []
        self.constants: list[Buffer] = []
        self.handles: list[Buffer] = []

    def run(self) -> Trace:
        params, buffers, apart = self._state()
        env = self._placeholders()
        results = self._inline(self.exported.graph_module, env, no_grad=False, autocast=())
        if symbolic := next((x for x in results if isinstance(x, _Symbolic)), None):
            raise symbolic.error()
        assert all(isinstance(x, Ref) for x in results), results
        loss, *returned = (x.name for x in results)
        return Trace(
            name=type(self.model).__name__, inputs=tuple(self.inputs), constant_inputs=tuple(self.constant_inputs), params=params,
            buffers=(*buffers, *self.constants, *self.handles), saved_apart=apart, ops=tuple(self.ops), loss=loss,
            returned=tuple(returned), storages=self.storages, metas=self.metas, tensors=self.tensors, names=self.names,
            notes=self.regions.notes(),
            outside={c.value: path for c in self.constants if (path := self.outside.get(storage_of(self.tensors[c.value])))},
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------ the state
    def _state(self) -> tuple[tuple[Param, ...], tuple[Buffer, ...], tuple[tuple[str, str], ...]]:
        self.value_of_fqn: dict[str, str] = {}
        fqns: dict[int, list[str]] = {}
        tensors: dict[int, nn.Parameter] = {}
        for fqn, parameter in self.model.named_parameters(remove_duplicate=False):
            fqns.setdefault(id(parameter), []).append(fqn)
            tensors[id(parameter)] = parameter
        params = []
        for key, (fqn, *aliases) in fqns.items():
            value = self._add_tensor(self.names.fresh(f"p_{fqn}"), tensors[key], tensors[key].requires_grad)
            self.value_of_fqn.update((name, value) for name in (fqn, *aliases))
            self.memory.add(fqn, tensors[key])
            params.append(Param(value=value, fqn=fqn, aliases=tuple(aliases), trainable=tensors[key].requires_grad))
        persistent = set(self.model.state_dict(keep_vars=True))
        first: dict[int, str] = {}
        places: dict[tuple[int, bool], tuple[torch.Tensor, list[str]]] = {}  # one tensor is one buffer under all of its names
        for fqn, buffer in self.model.named_buffers(remove_duplicate=False):
            places.setdefault((id(buffer), fqn in persistent), (buffer, []))[1].append(fqn)
        buffers, apart = [], []
        for buffer, (fqn, *aliases) in places.values():
            self.memory.check(buffer, f"a buffer, {fqn},")
            value = self._add_tensor(self.names.fresh(f"b_{fqn}"), buffer, False)
            self.value_of_fqn |= dict.fromkeys((fqn, *aliases), first.setdefault(id(buffer), value))
            if first[id(buffer)] != value:
                apart.append((value, first[id(buffer)]))
            buffers.append(Buffer(value=value, fqn=fqn, aliases=tuple(aliases), persistent=fqn in persistent))
        return tuple(params), tuple(buffers), tuple(apart)

    def _add_tensor(self, value: str, tensor: torch.Tensor, grad: bool) -> str:
        self.tensors[value] = tensor
        self.metas[value] = meta_of(tensor, grad)
        return value

    def _placeholders(self) -> dict[fx.Node, Any]:
        env: dict[fx.Node, Any] = {}
        paths = iter(_leaf_paths(self.exported))
        given = {leaf_path(path): leaf for path, leaf in pytree.tree_leaves_with_path(self.exported.example_inputs)}
        placeholders = [n for n in self.exported.graph.nodes if n.op == "placeholder"]
        constants = self.exported.constants
        numbers = {number_name(place): place for place in range(len(self.varied))}
        for node, spec in zip(placeholders, self.exported.graph_signature.input_specs, strict=True):
            fqn = (spec.target or "").removeprefix(f"{PREFIX}.")
            if spec.kind is InputKind.USER_INPUT:
                path = next(paths)
                if isinstance(spec.arg, ConstantArgument):
                    env[node] = spec.arg.value
                    if path in self.arguments:
                        continue
                    self.constant_inputs.append((path, self._arg(spec.arg.value)))
                    continue
                value = self.names.fresh(node.name)
                example = given.get(path, node.meta["val"])  # on the meta device the graph's own may want gradients that nobody asked for
                self.metas[value] = meta_of(node.meta["val"], example.requires_grad)
                self.inputs.append(Input(value=value, path=path))
            elif spec.target in numbers:
                place = numbers[spec.target]
                value = self.names.fresh(f"n_{without_ids(self.varied[place].name)}")
                self.metas[value] = meta_of(node.meta["val"], self.varied[place].grad)
                self.inputs.append(Input(value=value, path=(NUMBERS, place)))
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and fqn in self.value_of_fqn:
                value = self.value_of_fqn[fqn]
            elif spec.kind is InputKind.CONSTANT_TENSOR and isinstance(constants.get(spec.target), torch.Tensor):
                self.memory.check(constants[spec.target], "a tensor in a plain attribute")
                value = self._add_tensor(self.names.fresh(f"constant_{len(self.constants)}"), constants[spec.target].detach(), False)
                self.constants.append(Buffer(value=value, fqn=None, persistent=False))
            else:
                raise CaptureError(f"{type(self.model).__name__} holds {spec.target}, a {spec.kind.name.lower()} that no graph can hold")
            self.storages.setdefault(value, storage_of(node.meta["val"]))
            env[node] = Ref(value)
        for value in self.value_of_fqn.values():  # of what the export did not see
            self.storages.setdefault(value, storage_of(self.tensors[value]))
        return env

    # -------------------------------------------------------------------------------------------------- the operators
    def _inline(self, module: fx.GraphModule, env: dict[fx.Node, Any], *, no_grad: bool, autocast: tuple[Autocast, ...]) -> tuple[Any, ...]:
        """Adds the operators of a graph whose placeholders have values in env; the values of its outputs."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                assert node in env, node
            elif node.op == "get_attr":
                env[node] = module.get_submodule(node.target) if _is_submodule(module, node.target) else self._attribute(module, node)
            elif node.op == "output":
                return tuple(env[n] if isinstance(n, fx.Node) else n for n in node.args[0])
            elif node.op == "call_function":
                try:
                    self._call(node, env, no_grad=no_grad, autocast=autocast)
                except CaptureError as error:
                    if error.module is None:
                        error.module, error.line = _module_stack(node)[1], self._source(node)
                    raise
            else:
                raise CaptureError(f"cannot capture {node.op} {node.target}\n  at {self._source(node)}")
        raise AssertionError("a graph without output")

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> Ref:
        self.memory.check(getattr(module, str(node.target)), "a tensor in a plain attribute")
        value = self._add_tensor(self.names.fresh(f"constant_{len(self.constants)}"), getattr(module, str(node.target)).detach(), False)
        self.constants.append(Buffer(value=value, fqn=None, persistent=False))
        self.storages[value] = storage_of(self.tensors[value])
        return Ref(value)

    def _source(self, node: fx.Node) -> str:
        return source_line(node.meta.get("stack_trace") or "")

    def _call(self, node: fx.Node, env: dict[fx.Node, Any], *, no_grad: bool, autocast: tuple[Autocast, ...]) -> None:
        target = node.target
        if target is operator.getitem:
            operands: list[Any] = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
            container, index = operands
            env[node] = container if isinstance(container, _Symbolic) else container[index]
        elif target is torch.ops.autopar_region.call.default:
            self._region_call(node, env, no_grad=no_grad)
        elif target is torch.ops.autopar_region.hook.default:
            self._hook_call(node, env, no_grad=no_grad)
        elif self.instances is not None and isinstance(target, torch._ops.OpOverload) and target.namespace == "autopar_repeat":
            self._repeated(node, target, env, self.instances)
        elif isinstance(target, torch._ops.OpOverload):
            asserts = any(target.name().split("::")[1].startswith(a) for a in _ASSERTIONS)
            nothing = not _gives_tensors(target) or node.meta.get("val") is None  # torch.promote_types; one that failed, as code expects
            if asserts or (not node.users and target._schema.returns and nothing):
                env[node] = None
            else:
                self._operator(node, target, env, no_grad=no_grad, autocast=autocast)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._region(node, env, no_grad=no_grad, autocast=autocast)
        else:
            values = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
            if not node.kwargs and all(isinstance(v, (bool, int, float)) for v in values):
                env[node] = target(*values)  # type: ignore[operator]
            elif symbolic := next((v for v in values if isinstance(v, _Symbolic)), None):
                env[node] = symbolic
            else:
                name = getattr(target, "__name__", str(target))
                raise CaptureError(
                    f"cannot capture {name}\n  at {self._source(node)}\n  what to do: replace torch.vmap, torch.func transforms and "
                    f"Python functions over traced values by batched operators of torch"
                )

    def _region(self, node: fx.Node, env: dict[fx.Node, Any], *, no_grad: bool, autocast: tuple[Autocast, ...]) -> None:
        name = node.target.name()  # type: ignore[union-attr]
        values: list[Any] = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *operands = values
            no_grad = not enabled
        elif name == "wrap_with_autocast":
            device, dtype, enabled, _, body, *operands = values
            here = Autocast.of(device, dtype or torch.get_autocast_dtype(device))
            autocast = (*(a for a in autocast if a.device != device), *((here,) if enabled else ()))
        else:
            raise CaptureError(
                f"cannot capture the control flow operator {name}\n  at {self._source(node)}\n  what to do: compute both branches and "
                f"select with torch.where, or unroll the loop"
            )
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        env[node] = self._inline(body, dict(zip(inner, operands, strict=True)), no_grad=no_grad, autocast=autocast)

    def _repeated(self, node: fx.Node, target: torch._ops.OpOverload, env: dict[fx.Node, Any], instances: Instances) -> None:
        """A call that stands for others, or one that is stood for."""
        path, given = str(node.args[0]), node.args[1]
        operands = [env[n] for n in given if isinstance(n, fx.Node)] if isinstance(given, (list, tuple)) else []
        if target is torch.ops.autopar_repeat.call.default:
            env[node] = instances.call(path, operands, _module_stack(node)[0])
        elif target is torch.ops.autopar_repeat.begin.default:
            instances.begin(path, operands)
        else:
            instances.end(path, operands)

    def _region_call(self, node: fx.Node, env: dict[fx.Node, Any], *, no_grad: bool) -> None:
        """A submodule as one operator: of its handle, the tensors that it is given, its parameters and buffers."""
        key = str(node.args[0])
        call = self.regions.call(key)
        given: Any = node.args[1]
        operands = [env[n] for n in given]
        if symbolic := next((x for x in operands if isinstance(x, _Symbolic)), None):
            raise symbolic.error()
        handle = self._handle(key, call)
        state = tuple(Ref(self.value_of_fqn[within(call.region.path, name)]) for name in call.region.state)
        outputs = []
        for result in node.meta["val"]:
            outputs.append(self.names.fresh(call.region.path.rpartition(".")[2] or "output"))
            self.metas[outputs[-1]] = meta_of(result)
            self.storages[outputs[-1]] = storage_of(result)
        op = Op(
            target=REGION, args=(handle, self._arg(operands), state), kwargs=_described(call, node.meta["val"]), outputs=tuple(outputs),
            multi=True, no_grad=no_grad, module=call.region.path, source=call.line,
        )  # fmt: skip
        self.ops.append(Traced(op=op, calls=_module_stack(node)[0]))
        env[node] = [Ref(o) for o in outputs]

    def _hook_call(self, node: fx.Node, env: dict[fx.Node, Any], *, no_grad: bool) -> None:
        """A hook on an activation: the region that it is, of the activation, for which it stands from there on, and the tensors that the
        hook holds."""
        key = str(node.args[0])
        closed: Any = node.args[2]
        value, *others = operands = [env[n] for n in (node.args[1], *closed)]
        call = self.regions.call(key)
        if symbolic := next((x for x in operands if isinstance(x, _Symbolic)), None):
            raise symbolic.error()
        handle = self._handle(key, call)
        kwargs = _described(call, [node.args[1].meta["val"]])  # type: ignore[union-attr]
        name = self.names.fresh("hooked")
        op = Op(
            target=HOOK, args=(handle, (value, *others), ()), kwargs=kwargs, outputs=(name,), multi=True, no_grad=no_grad, source=call.line
        )  # fmt: skip
        self.ops.append(Traced(op=op, calls=_module_stack(node)[0]))

    def _handle(self, key: str, call: Call) -> Ref:
        """What stands for a region among the tensors."""
        fqn = within(call.region.path, f"region_{key.rpartition('@')[2]}")
        handle = self.names.fresh(f"region_{fqn}")
        self.tensors[handle] = replace(call.region)  # type: ignore[assignment]  # which is asked for what tensors are
        self.metas[handle] = meta_of(torch.empty(0, device="cpu"))
        self.handles.append(Buffer(value=handle, fqn=fqn, persistent=False, region=True))
        return Ref(handle)

    def _operator(
        self, node: fx.Node, target: torch._ops.OpOverload, env: dict[fx.Node, Any], *, no_grad: bool, autocast: tuple[Autocast, ...]
    ) -> None:
        source = self._source(node)
        val = node.meta.get("val")
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)) or target is torch.ops.aten.item.default:
            env[node] = _Symbolic(source, _module_stack(node)[1])
            return
        multi = isinstance(val, (tuple, list))
        results: list[Any] = list(val) if multi else [val]  # type: ignore[arg-type]
        if not all(r is None or isinstance(r, torch.Tensor) for r in results):
            env[node] = _Symbolic(source, _module_stack(node)[1])
            return
        operands = [*node.args, *node.kwargs.values()]
        symbolic = next((s for a in pytree.tree_leaves(operands) if isinstance(a, fx.Node) and isinstance(s := env[a], _Symbolic)), None)
        if symbolic is None and any(not is_static(r) for r in results if r is not None):
            symbolic = _Symbolic(source, _module_stack(node)[1])
        if symbolic is not None:
            if target._schema.is_mutable:
                raise symbolic.error()
            env[node] = symbolic  # which may serve an assertion only; the loss may not depend on it
            return
        if target.name().startswith("aten::as_strided"):
            raise CaptureError(
                f"cannot capture {target}, which reads memory by its place: a value lies otherwise on several ranks\n  at {source}\n"
                f"  what to do: call Tensor.as_strided, index the tensor, or use unfold"
            )
        named = dict(zip((a.name for a in target._schema.arguments), node.args)) | node.kwargs
        if named.get("sparse") is True:
            raise SparseGradients(
                f"cannot capture {target._opname} with sparse=True: the gradients of a parallel module are dense\n  at {source}\n  what to "
                f"do: build the embedding with sparse=False, and give its weight an optimizer of dense gradients (not SparseAdam)"
            )
        if no_grad and (same := operand_returned(node, target, named)) is not None:
            env[node] = env[same]
            return
        args, kwargs = self._arguments(node, named, target, env, results[0])
        name_of_target = str(target) if str(target).startswith("aten.") else f"{target.namespace}.{target._opname}.{target._overloadname}"
        if name_of_target.rpartition(".")[0] in _CASTS:
            name_of_target = "aten.to.dtype"
        calls, module = _module_stack(node)
        if name_of_target == "aten.histc.default" and not self._floating(args[0]):
            env[node] = self._counted_in_float(node, args, no_grad=no_grad)
            return
        outputs: list[str | None] = []
        for i, result in enumerate(results):
            if result is None:
                outputs.append(None)
                continue
            name = self.names.fresh(_getitem_name(node, i) if multi else node.name)
            self.metas[name] = meta_of(result)
            self.storages[name] = storage_of(result)
            outputs.append(name)
        if not results or outputs == [None]:
            outputs = [self.names.fresh(node.name)] if not multi else outputs
        op = Op(
            target=name_of_target, args=args, kwargs=kwargs, outputs=tuple(outputs), multi=multi, no_grad=no_grad, module=module,
            source=source,
        )  # fmt: skip
        self.ops.append(Traced(op=op, calls=calls, autocast=autocast))
        made = [None if o is None else Ref(o) for o in outputs]
        env[node] = made if multi else made[0]

    def _floating(self, arg: Arg) -> bool:
        return isinstance(arg, Ref) and self.metas[arg.name].dtype.is_floating_point

    def _counted_in_float(self, node: fx.Node, args: tuple[Arg, ...], *, no_grad: bool) -> Ref:
        """A histogram of integers, which only some devices have, as the cast of one of floats. Exact below 2**53."""
        calls, module = _module_stack(node)
        wanted: torch.Tensor = node.meta["val"]
        assert isinstance(args[0], Ref), args
        value = args[0]
        steps: tuple[tuple[str, tuple[Arg, ...], Meta], ...] = (
            ("aten.to.dtype", (torch.float64,), replace(self.metas[value.name], dtype=torch.float64)),
            ("aten.histc.default", args[1:], replace(meta_of(wanted), dtype=torch.float64)),
            ("aten.to.dtype", (wanted.dtype,), meta_of(wanted)),
        )
        for target, more, meta in steps:
            name = self.names.fresh(node.name)
            op = Op(target=target, args=(value, *more), outputs=(name,), no_grad=no_grad, module=module, source=self._source(node))
            self.ops.append(Traced(op=op, calls=calls))
            self.metas[name], self.storages[name] = meta, -len(self.ops)  # memory of its own
            value = Ref(name)
        return value

    def _arguments(
        self, node: fx.Node, named: Mapping[str, Any], target: torch._ops.OpOverload, env: dict[fx.Node, Any], result: Any
    ) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """named: all that is given, by the names of the operator's schema."""

        def convert(a: Any) -> Arg:
            return self._arg(fx.map_arg(a, lambda n: env[n]))

        if packet(target) in _CASTS:  # one form for all casts: to.dtype(x, dtype), memory_format if one is asked for
            layout = convert(named.get("memory_format"))
            order = () if layout in (None, torch.preserve_format) else (("memory_format", layout),)
            return (convert(node.args[0]), result.dtype), order
        kwargs = tuple((k, convert(v)) for k, v in node.kwargs.items() if k not in _DROPPED_KWARGS)
        if _is_of_default_dtype(target, named) and result.dtype.is_floating_point and result.dtype != torch.get_default_dtype():
            kwargs = (*(pair for pair in kwargs if pair[0] != "dtype"), ("dtype", result.dtype))  # the forward has set another
        return tuple(convert(a) for a in node.args), kwargs

    def _arg(self, a: Any) -> Arg:
        if isinstance(a, (tuple, list)):
            return tuple(self._arg(x) for x in a)
        if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            constant = a.node.maybe_as_int() if isinstance(a, torch.SymInt) else None
            if constant is None:
                raise CaptureError(f"a size in the graph is not a number but {a}; capture needs static shapes")
            return constant
        if isinstance(a, (Ref, *_CONSTANTS)):
            return a
        raise CaptureError(f"{a!r} ({type(a).__name__}) is an argument that no graph can hold")


def _described(call: Call, results: Sequence[torch.Tensor]) -> tuple[tuple[str, Arg], ...]:
    """What the operator of a region says of it. results: as traced."""
    dtypes = tuple(str(r.dtype).removeprefix("torch.") for r in results)
    return (
        ("shapes", tuple(tuple(r.shape) for r in results)), ("dtypes", dtypes), ("grads", tuple(r.requires_grad for r in call.results)),
        ("rows", call.rows), ("flops", call.flops), ("saved", call.saved), ("draws", call.draws), ("linear", call.region.linear),
        *((("terms", True),) if isinstance(call.region.module, Terms) and call.rows else ()),
        *((("observes", True),) if is_observer(call.region) else ()),
        *((("counts", True),) if isinstance(call.region.module, Condition) and call.region.module.counts else ()),
    )  # fmt: skip


def _leaf_paths(exported: ExportedProgram) -> list[tuple[str | int, ...]]:
    """The path of every leaf of the example inputs, in the order of the graph's user inputs."""
    spec = exported.call_spec.in_spec
    assert spec is not None
    indices = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths: list[tuple[str | int, ...]] = [()] * spec.num_leaves
    for path, index in pytree.tree_leaves_with_path(indices):
        paths[index] = leaf_path(path)
    return paths


def _is_submodule(module: fx.GraphModule, target: object) -> bool:
    return str(target) in dict(module.named_modules())


def _is_of_default_dtype(target: torch._ops.OpOverload, named: Mapping[str, Any]) -> bool:
    """Whether a call of an operator makes a tensor of no other, in torch's default dtype: torch.ones(3)."""
    arguments = target._schema.arguments
    return (
        named.get("dtype") is None and any(a.name == "dtype" for a in arguments)
        and not any(isinstance(a.type, torch.TensorType) for a in arguments)
    )


def _gives_tensors(target: torch._ops.OpOverload) -> bool:
    return any(isinstance(r.type, (torch.TensorType, torch.ListType, torch.OptionalType)) for r in target._schema.returns)


def _getitem_name(node: fx.Node, index: int) -> str:
    """The name of the node that takes this element, so that a value keeps the name that the graph has for it."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user.name
    return f"{node.name}_{index}"


def _module_stack(node: fx.Node) -> tuple[tuple[str, ...], str]:
    """The calls of modules that a node stands in (without Step itself), and the path of the innermost."""
    calls, module = [], ""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        path = path.partition("@")[0]
        if path == PREFIX or path.startswith(f"{PREFIX}."):
            module = path.removeprefix(PREFIX).removeprefix(".")
            _, at, count = key.partition("@")
            calls.append(f"{module}{at}{count}")
    return tuple(calls), module
