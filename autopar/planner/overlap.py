"""Collectives inside stages that products hide in backward, where a training software issues them so (Recipe.beside_products).

A linear layer whose operand is gathered, or whose operand's gradient is a term of a sum over ranks, has two products in backward. The
operand is gathered again while that for its own gradient runs, and this gradient is brought together while that for the weight's runs:
neither product waits for the collective beside it, and each takes half of the layer's backward pass. Layers that read one value are one
product, as softwares that issue collectives so have them. At most what a product takes is hidden, less what the collective takes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.ir import Op, Program, refs
from autopar.measure import OpCost, Pricer

__all__ = ["beside", "products_of", "with_hidden"]

_READ_BY_PRODUCTS = ("autopar.C.all_gather", "autopar.C.copy_to")


def products_of(program: Program, costs: Sequence[OpCost]) -> dict[int, tuple[int, ...]]:
    """Operator that makes the operand of products with trained weights, if these read it or a view of it -> the products."""
    made_by: dict[str, int] = {}
    found: dict[int, list[int]] = {}
    for k, (op, cost) in enumerate(zip(program.ops, costs, strict=True)):
        read = list(dict.fromkeys(made_by[r] for r in refs(op) if r in made_by))
        if op.target in _READ_BY_PRODUCTS:
            made_by |= {o: k for o in op.outputs if o is not None}
        elif cost.counts.op_class == "view" and read:
            made_by |= {o: read[0] for o in op.outputs if o is not None}
        elif cost.counts.op_class == "matmul" and not op.no_grad and all(program.types[r].grad for r in refs(op)):
            for maker in read:
                found.setdefault(maker, []).append(k)
    return {maker: tuple(products) for maker, products in found.items()}


def beside(op: Op, program: Program, pricer: Pricer) -> Iterator[float]:
    """Seconds of each collective of an operator's backward pass that goes on beside a product, as if nothing hid it."""
    ins, outs = (tuple(program.types[v] for v in values) for values in (refs(op), [o for o in op.outputs if o is not None]))
    return (seconds for kind, seconds in pricer.sends(op, ins, outs)[1] if kind in pricer.recipe.beside_products)


def with_hidden(
    program: Program, costs: Sequence[OpCost], products: Mapping[int, tuple[int, ...]], pricer: Pricer
) -> list[OpCost]:  # fmt: skip
    """The costs of a program's operators without what products hide of their collectives."""
    found = list(costs)
    for k, readers in products.items():
        op, cost = program.ops[k], costs[k]
        product_s = sum(costs[r].backward_s for r in readers) / 2
        free = 1 - pricer.taken(str(op.kwarg("axis")))
        hidden_s = free * sum(min(seconds, product_s) for seconds in beside(op, program, pricer))
        found[k] = replace(
            cost, backward_s=cost.backward_s - hidden_s, communication_s=cost.communication_s - hidden_s, hidden_s=hidden_s
        )  # fmt: skip
    return found
