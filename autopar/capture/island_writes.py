"""Writes of what has sizes that depend on values (`h[torch.where(mask)] = 0`, `out.index_add_(0, chosen, ...)`), in an exported graph: what
is written is computed by an operator of its own, which can be in an island, and then copied, which needs no such size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.inplace import functional_form
from autopar.capture.interpret import resolve

__all__ = ["write_apart"]

_COPY = torch.ops.aten.copy_.default


def write_apart(graph: fx.Graph, by_values: Callable[[fx.Node], bool]) -> None:
    """Rewrite the operators of a graph that write to their first operand, where they read what sizes by values have, or write to it.
    by_values: of a node."""
    for n in list(graph.nodes):
        if not _writes_to_the_first(n) or not any(map(by_values, n.all_input_nodes)):
            continue
        written = n.args[0]
        if by_values(written):
            _in_place_of(graph, n, written)
        else:
            _copied(graph, n, written)


def _writes_to_the_first(n: fx.Node) -> bool:
    if not isinstance(n.target, torch._ops.OpOverload) or n.target is _COPY or not n.args or not isinstance(n.args[0], fx.Node):
        return False
    arguments = n.target._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return written == [arguments[0]] and isinstance(n.args[0].meta.get("val"), Tensor)


def _functional(graph: fx.Graph, n: fx.Node) -> fx.Node | None:
    """What a node writes, by an operator in front of it that writes nothing; None if there is no such operator."""
    assert isinstance(n.target, torch._ops.OpOverload), n
    form = functional_form(str(n.target))
    if form is None:
        return None
    target, order = form
    args = tuple(n.args[k] for k in order if k < len(n.args))
    with graph.inserting_before(n):
        made = graph.call_function(resolve(target), args, dict(n.kwargs))
    made.meta = dict(n.meta)
    return made


def _copied(graph: fx.Graph, n: fx.Node, written: fx.Node) -> None:
    """A write to a tensor of a fixed size."""
    if (made := _functional(graph, n)) is None:
        return
    val, given = n.meta["val"], [x.meta.get("val") for x in n.all_input_nodes]
    grad = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(given))
    made.meta["val"] = torch.empty(tuple(val.shape), dtype=val.dtype, device="meta", requires_grad=grad)
    with graph.inserting_before(n):
        copy = graph.call_function(_COPY, (written, made))
    copy.meta = dict(n.meta)
    n.replace_all_uses_with(copy)
    graph.erase_node(n)


def _in_place_of(graph: fx.Graph, n: fx.Node, written: fx.Node) -> None:
    """A write to a tensor that an operator has just made, which nothing else reads from then on."""
    later = set(_after(n))
    own = isinstance(written.target, torch._ops.OpOverload) and all(r.alias_info is None for r in written.target._schema.returns)
    if own and later.isdisjoint(written.users) and (made := _functional(graph, n)) is not None:
        n.replace_all_uses_with(made)
        graph.erase_node(n)


def _after(n: fx.Node) -> list[fx.Node]:
    found, node = [], n.next
    while node.op != "root":
        found.append(node)
        node = node.next
    return found
