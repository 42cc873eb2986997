"""Operators whose sizes depend on values (`x[mask]`), with what is computed of them until sizes are fixed again: one operator of the
program each, a region, which runs them as they are.

An island is as small as it can be: the operators between those that make such a size and those that give a tensor of a fixed one. It
is worked out on an exported graph, in which it is replaced by the call of a region; so is one in what a `with torch.no_grad()` or
torch.autocast holds, which is a graph of its own.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from autopar import generators
from autopar.capture.around import as_called
from autopar.capture.export import PREFIX
from autopar.capture.given import Inputs
from autopar.capture.island_writes import write_apart
from autopar.capture.region_ops import is_static
from autopar.capture.regions import Regions
from autopar.capture.source import source_line

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["with_islands"]

_CALL = torch.ops.autopar_region.call.default
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)


def with_islands(model: nn.Module, exported: ExportedProgram, inputs: Inputs, regions: Regions) -> bool:
    """Replace the islands of a graph by calls of regions; whether all were. If not, the graph has the operators that it had, but for what
    is written apart. inputs: real ones, which tell what the islands are given."""
    islands: list[tuple[_Part, list[fx.Node]]] = []
    parts = _parts(exported.graph_module)
    for part in parts:
        write_apart(part.graph, _by_values)
        nodes = list(part.graph.nodes)
        own = [x for x in _islands(nodes) if _leaving(x)]  # others serve assertions
        if any(_refused(island, nodes) for island in own):
            return False
        islands += [(part, island) for island in own]
    if not islands:
        return False
    given = dict.fromkeys(x for _, island in islands for x in _given(island))
    values = _values(model, exported, inputs, regions, given)
    if values is None:
        return False
    found: list[tuple[_Part, str, list[fx.Node], list[fx.Node], list[fx.Node]]] = []
    for part, island in islands:
        leaving, entering, path = _leaving(island), _given(island), f"by_values_{len(found)}"
        operands, module = [values[n] for n in entering], _module(island, entering, leaving)
        if not regions.include_graph(path, module, operands, _source(island), no_grad=part.no_grad):
            return False
        found.append((part, path, island, entering, leaving))
    now: dict[fx.Node, fx.Node] = {}
    for part, path, island, entering, leaving in found:
        now |= _replace(part.graph, path, island, [now.get(n, n) for n in entering], leaving)
    for part in parts:
        part.module.recompile()
    return True


@dataclass(frozen=True, slots=True)
class _Part:
    """A graph of operators that run in one mode: the exported one, or what a `with torch.no_grad()` or torch.autocast holds."""

    module: fx.GraphModule
    no_grad: bool

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph


def _parts(module: fx.GraphModule, *, no_grad: bool = False) -> list[_Part]:
    found = [_Part(module, no_grad)]
    for n in module.graph.nodes:
        if (block := _block(n)) is not None:
            body = getattr(module, str(block.body.target))
            found += _parts(body, no_grad=no_grad if block.grad is None else not block.grad)
    return found


@dataclass(frozen=True, slots=True)
class _Block:
    """What a node holds that stands for a `with`. body: the node of its graph. grad: whether gradients are on in it, None if that is as
    around it. autocast: the arguments of torch.autocast."""

    body: fx.Node
    operands: tuple[Any, ...]
    grad: bool | None = None
    autocast: tuple[Any, ...] | None = None

    def mode(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return torch.set_grad_enabled(bool(self.grad))
        device, dtype, enabled, cached = self.autocast
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)


def _block(n: fx.Node) -> _Block | None:
    name = n.target.name() if isinstance(n.target, torch._ops.HigherOrderOperator) else ""
    args: tuple[Any, ...] = n.args
    if name == "wrap_with_set_grad_enabled":
        return _Block(args[1], args[2:], grad=args[0])
    if name == "wrap_with_autocast":
        return _Block(args[4], args[5:], autocast=args[:4])
    return None


def _islands(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """The nodes of each island, in their order. Two whose values go from the one to the other and back are one."""
    import networkx as nx  # takes as long as a tenth of torch, and is seldom needed

    places = {n: k for k, n in enumerate(nodes)}
    flow: nx.DiGraph[fx.Node] = nx.DiGraph()
    flow.add_nodes_from(nodes)
    flow.add_edges_from((n, user) for n in nodes for user in n.users)
    sized: nx.Graph[fx.Node] = nx.Graph()
    for n in nodes:
        if _by_values(n):
            sized.add_node(n)
            sized.add_edges_from((n, user) for user in n.users if user.op != "output")
            several = [user for user in n.users if isinstance(user.meta.get("val"), tuple | list)]  # results, which are taken one by one
            sized.add_edges_from((user, result) for user in several for result in user.users if result.target is operator.getitem)
    found = [set(x) for x in nx.connected_components(sized)]
    while True:
        closed = [x | (_reached(flow, x) & _reached(flow.reverse(copy=False), x)) for x in found]
        meet: nx.Graph[int] = nx.Graph()
        meet.add_nodes_from(range(len(closed)))
        meet.add_edges_from((i, j) for i, x in enumerate(closed) for j, y in enumerate(closed) if i < j and x & y)
        merged = [set().union(*(closed[i] for i in group)) for group in nx.connected_components(meet)]
        if merged == found:
            return [sorted(x, key=places.__getitem__) for x in merged]
        found = merged


def _reached(flow: nx.DiGraph[fx.Node], start: Iterable[fx.Node]) -> set[fx.Node]:
    import networkx as nx

    return set().union(*(nx.descendants(flow, n) for n in start))


def _by_values(n: fx.Node) -> bool:
    """Whether a node gives a number that values decide, or a tensor of such a size."""
    leaves = pytree.tree_leaves(n.meta.get("val"))
    numbers = any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in leaves)
    return numbers or n.target is torch.ops.aten.item.default or any(isinstance(x, Tensor) and not is_static(x) for x in leaves)


def _given(island: list[fx.Node]) -> list[fx.Node]:
    own = set(island)
    return list(dict.fromkeys(a for n in island for a in n.all_input_nodes if a not in own))


def _leaving(island: list[fx.Node]) -> list[fx.Node]:
    own = set(island)
    return [n for n in island if any(user not in own for user in n.users)]


def _refused(island: list[fx.Node], nodes: list[fx.Node]) -> bool:
    """Whether an island cannot run where it is first needed: it writes, or something else does in between; what it is given comes later;
    or it holds what a graph of operators does not."""
    own, places = set(island), {n: k for k, n in enumerate(nodes)}
    needed = [places[user] for n in island for user in n.users if user not in own]
    if not needed or any(places[n] > min(needed) for n in _given(island)):
        return True
    between = nodes[places[island[0]] : min(needed)]
    writes = any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in (*between, *island))
    kinds = any(n.op != "call_function" or isinstance(n.target, torch._ops.HigherOrderOperator) or n.target is _CALL for n in island)
    borders = any(not isinstance(n.meta.get("val"), Tensor) or _by_values(n) for n in (*_given(island), *_leaving(island)))
    return writes or kinds or borders


def _module(island: list[fx.Node], entering: list[fx.Node], leaving: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {n: graph.placeholder(f"x{k}") for k, n in enumerate(entering)}
    for n in island:
        made[n] = graph.node_copy(n, made.__getitem__)
        made[n].meta.clear()
    graph.output(tuple(made[n] for n in leaving))
    return fx.GraphModule({}, graph)


def _replace(
    graph: fx.Graph, path: str, island: list[fx.Node], entering: list[fx.Node], leaving: list[fx.Node]
) -> dict[fx.Node, fx.Node]:  # fmt: skip
    """The node in place of each that leaves the island."""
    own, now = set(island), dict[fx.Node, fx.Node]()
    places = {n: k for k, n in enumerate(graph.nodes)}
    first = min((user for n in leaving for user in n.users if user not in own), key=places.__getitem__)
    with graph.inserting_before(first):
        call = graph.call_function(_CALL, (f"{path}@0", list(entering), len(leaving)))
        call.meta = {key: island[0].meta[key] for key in ("nn_module_stack", "stack_trace") if key in island[0].meta}
        call.meta["val"] = [_like(n.meta["val"]) for n in leaving]
        for k, n in enumerate(leaving):
            item = graph.call_function(operator.getitem, (call, k))
            item.meta = {**call.meta, "val": call.meta["val"][k]}
            n.replace_all_uses_with(item, delete_user_cb=lambda user: user not in own)
            now[n] = item
    for n in reversed(island):
        graph.erase_node(n)
    return now


def _like(val: Tensor) -> Tensor:
    """In memory of its own, as what a region returns."""
    return torch.empty(tuple(val.shape), dtype=val.dtype, device="meta", requires_grad=val.requires_grad)


def _source(island: list[fx.Node]) -> str:
    first = next(n for n in island if _by_values(n))
    return source_line(first.meta.get("stack_trace") or "")


class _Run(fx.Interpreter):
    """Runs a graph, and those that it holds; regions are called as they are. found: the values of the wanted nodes, of all graphs."""

    def __init__(
        self, model: nn.Module, graph: fx.GraphModule, regions: Regions, wanted: Collection[fx.Node], found: dict[fx.Node, Tensor]
    ) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        self._model, self._regions, self._wanted, self.found = model, regions, wanted, found

    def run_node(self, n: fx.Node) -> Any:
        if (block := _block(n)) is not None:
            body: Any = self.map_nodes_to_values(block.body, n)
            operands: Any = self.map_nodes_to_values(block.operands, n)
            with block.mode():
                return _Run(self._model, body, self._regions, self._wanted, self.found).run(*operands)
        if n.target is _CALL:
            args, _ = self.fetch_args_kwargs_from_env(n)
            region = self._regions.call(args[0]).region
            return list(region(args[1], [self._tensors[f"{region.path}.{name}"] for name in region.state]))
        result = super().run_node(n)
        if n in self._wanted:
            self.found[n] = result.detach().clone().requires_grad_(result.requires_grad)
        return result


def _values(
    model: nn.Module, exported: ExportedProgram, inputs: Inputs, regions: Regions, wanted: Iterable[fx.Node]
) -> Mapping[fx.Node, Tensor] | None:
    """What these nodes give on real inputs; None if the graph cannot be run on them."""
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    own = {f"{PREFIX}.{name}": t.detach().clone().requires_grad_(t.requires_grad) for name, t in held}
    leaves = iter(pytree.tree_leaves(inputs))
    args: list[Any] = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            args.append(next(leaves))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            args.append(exported.constants[str(spec.target)].clone())
        else:
            args.append(own.get(str(spec.target)))
    if any(isinstance(x, Tensor) and x.device.type == "meta" for x in args):
        return None
    run = _Run(model, exported.graph_module, regions, set(wanted), {})
    try:
        with torch.enable_grad(), generators.kept(), as_called():
            run.run(*args)
    except _FAILURES:
        return None
    return run.found
