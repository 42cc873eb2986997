"""The model as a tree of its modules with their operators: what each operator is split along, what it takes, how many alike there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir import Program
from autopar.measure.costs import OpCost
from autopar.planner.account import generic
from autopar.planner.plan import Plan, parse_strategy
from autopar.report.strategies import kind_of, words_of

__all__ = ["Leaf", "Node", "tree_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """An operator. splits: axis -> (what is split, or '' for nothing; the strategy). Seconds of one micro-batch on one rank, None where
    they are not known."""

    name: str
    kind: str
    splits: Mapping[str, tuple[str, str]]
    forward_s: float | None = None
    backward_s: float | None = None
    communication_s: float | None = None
    source: str = ""

    @property
    def colour(self) -> str:
        """Of the innermost axis that splits it."""
        split = [axis for axis, (words, _) in self.splits.items() if words]
        return split[-1] if split else "none"


@dataclass(kw_only=True, slots=True)
class Node:
    """A module. count: instances that are alike, of which one is shown."""

    name: str
    path: str
    count: int = 1
    modules: dict[str, Node] = field(default_factory=dict)
    operators: list[Leaf] = field(default_factory=list)

    @property
    def leaves(self) -> int:
        return len(self.operators) + sum(node.leaves for node in self.modules.values())

    @property
    def seconds(self) -> float:
        """Of one of them, without what lies hidden."""
        own = sum((leaf.forward_s or 0.0) + (leaf.backward_s or 0.0) for leaf in self.operators)
        return own + sum(node.seconds * node.count for node in self.modules.values())

    @property
    def colours(self) -> dict[str, float]:
        """Colour -> the share of its operators that have it."""
        counts: dict[str, float] = {}
        self._count(counts)
        total = sum(counts.values()) or 1.0
        return {name: n / total for name, n in counts.items()}

    def _count(self, counts: dict[str, float]) -> None:
        for leaf in self.operators:
            counts[leaf.colour] = counts.get(leaf.colour, 0.0) + 1
        for node in self.modules.values():
            node._count(counts)


def tree_of(plan: Plan, program: Program | None = None, costs: Mapping[str, OpCost] | None = None) -> Node:
    """From the plan alone, or with what the captured program and the prices of its operators say beside it."""
    axes = {axis: made for axis, made in plan.axes.items() if made.n > 1}
    words = {axis: _words(plan, axis) for axis in axes}
    modules = dict(plan.account.modules) if plan.account else {}
    sources: dict[str, str] = {}
    names = dict.fromkeys(name for made in axes.values() for name in made.ops)
    if program is not None:
        later = {k for block in program.blocks for span in block.spans[1:] for k in range(span.start, span.stop)}
        shown = [op for k, op in enumerate(program.ops) if k not in later]
        modules |= {op.name: op.module for op in shown if op.module}
        sources = {op.name: op.source for op in shown}
        names = dict.fromkeys(op.name for op in shown)
    counts = _counts(plan)
    root = Node(name=plan.model, path="")
    for name in names:
        node = root
        path = modules.get(name, "")
        for k, part in enumerate(path.split(".") if path else ()):
            here = ".".join(path.split(".")[: k + 1])
            if here not in node.modules:
                node.modules[here] = Node(name=part, path=generic(here), count=counts.get(generic(here), 1))
            node = node.modules[here]
        cost = (costs or {}).get(name)
        node.operators.append(
            Leaf(
                name=name, kind=kind_of(name), splits={axis: words[axis].get(name, ("", "")) for axis in axes},
                forward_s=cost.forward_s if cost else None, backward_s=cost.backward_s if cost else None,
                communication_s=cost.communication_s if cost else None, source=sources.get(name, ""),
            )
        )  # fmt: skip
    return root


def _words(plan: Plan, axis: str) -> dict[str, tuple[str, str]]:
    """Operator -> what the axis splits of it, and the strategy."""
    shapes = plan.account.shapes if plan.account else {}
    found = {}
    for name, text in plan.axes[axis].ops.items():
        said = words_of(axis, kind_of(name), parse_strategy(text), shapes.get(name, ()))
        found[name] = ("" if said.startswith("not split") else said, text)
    return found


def _counts(plan: Plan) -> dict[str, int]:
    """Generic path of a repeated block -> how many there are."""
    found: dict[str, int] = {}
    for block in plan.account.blocks if plan.account else ():
        for path in generic(block.paths[0]).split(", ") if block.repeated else ():
            if "*" in path:
                found[path] = found.get(path, 0) + len(block.paths)
    return found
