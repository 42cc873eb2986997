"""Matrix products: one line each. A contracted name that is split gives partial results."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.catalog.dims import Dims, split_names
from autopar.catalog.rule import OpView, register
from autopar.ir import P, R, Strategy

__all__: list[str] = []

register("aten.linear", Dims("b* i, o i, +o -> b* o", linear=(0,)))
register("aten.mm", Dims("m k, k n -> m n", linear=(0,)))
register("aten.bmm", Dims("b m k, b k n -> b m n", linear=(0,)))
register("aten.mv", Dims("m k, k -> m", linear=(0,)))
register("aten.dot aten.vdot", Dims("k, k -> ", linear=(0,)))
register("aten.outer aten.ger", Dims("m, n -> m n", linear=(0,)))
register("aten.baddbmm", Dims("+b m n, b m k, b k n -> b m n"))
register("aten.addmv", Dims("+m, m k, k -> m"))
register("aten.addr", Dims("+m n, m, n -> m n"))
register("aten.addbmm", Dims("+m n, b m k, b k n -> m n"))
register("aten.bilinear", Dims("b* i, b* j, o i j, +o -> b* o", linear=(0,)))


def matmul(view: OpView) -> Iterable[Strategy]:
    """torch.matmul: vectors, matrices, and batches of them that broadcast against each other."""
    a, b = (len(t.shape) for t in view.ins)
    if a == 0 or b == 0:
        return
    ndim = max(a, b) - 2
    batch = [f"b{k}" for k in range(max(ndim, 0))]
    left = ("k",) if a == 1 else (*batch[ndim - (a - 2) :], "m", "k")
    right = ("k",) if b == 1 else (*batch[ndim - (b - 2) :], "k", "n")
    out = (*batch, *(("m",) if a > 1 else ()), *(("n",) if b > 1 else ()))
    yield from split_names(view, [left, right], [out], [False, False])
    yield view.strategy([P, R], [P])


def addmm(view: OpView) -> Iterable[Strategy]:
    """bias + a @ b; the bias broadcasts, and is added."""
    names = [("m", "n")[2 - len(view.ins[0].shape) :], ("m", "k"), ("k", "n")]
    yield from split_names(view, names, [("m", "n")], [True, False, False])


def einsum(view: OpView) -> Iterable[Strategy]:
    """Every name can be split but one that stands twice within a term. The dims of an ellipsis are broadcast against one another from the
    last one; an equation without an arrow gives these, and the names that stand once, in the order of the alphabet."""
    equation = view.args()["equation"]
    assert isinstance(equation, str)
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(view.ins):
        return
    letters = left.replace(",", "").replace("...", "")
    if not arrow:
        right = ("..." if "..." in left else "") + "".join(x for x in sorted(letters) if letters.count(x) == 1)
    free = [len(t.shape) - len(text.replace("...", "")) for text, t in zip(texts, view.ins, strict=True) if "..." in text]
    broadcast = [f"...{k}" for k in range(max(free, default=0))]

    def named(text: str, ndim: int) -> tuple[str, ...]:
        before, dots, behind = text.partition("...")
        count = ndim - len(before) - len(behind)
        return (*before, *(broadcast[len(broadcast) - count :] if dots else ()), *behind)

    terms = [named(text, len(t.shape)) for text, t in zip(texts, view.ins, strict=True)]
    yield from split_names(view, terms, [named(right, len(view.outs[0].shape))], [False] * len(terms))
    yield view.strategy([P] + [R] * (len(terms) - 1), [P])


def tensordot(view: OpView) -> Iterable[Strategy]:
    """Pairs of dims are contracted; the others of the first operand come before those of the second."""
    args = view.args()
    (left, right), pairs = ([[f"{side}{k}" for k in range(len(t.shape))] for side, t in zip("lr", view.ins, strict=True)]), 0
    for i, j in zip(args["dims_self"], args["dims_other"], strict=True):  # type: ignore[arg-type]
        left[i] = right[j] = f"k{(pairs := pairs + 1)}"  # type: ignore[index]
    out = [name for name in (*left, *right) if not name.startswith("k")]
    yield from split_names(view, [tuple(left), tuple(right)], [tuple(out)], [False, False])
    yield view.strategy([P, R], [P])


register("aten.linalg_cholesky aten.cholesky", Dims("b* m! n! -> b* m! n!"))
register("aten.logdet", Dims("b* m! n! -> b*"))
register("aten.tensordot", tensordot)
register("aten.matmul", matmul)
register("aten.addmm", addmm)
register("aten.einsum", einsum)
