"""What a part of a tensor gives together with those of the other ranks: sums of powers, largest values, the whole. Each is collective.

x: the memory of the part, a plain tensor; lies: how the whole lies over the ranks. A part of which there are copies counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.run import comm
from autopar.run import function_names as F
from autopar.run.alike import done_by_every_rank
from autopar.run.collectives import moved
from autopar.run.lies import Lies
from autopar.run.part import AnyPart, in_graph, is_part, lies_of, local, part_like
from autopar.run.plain import plainly

__all__ = ["Power", "Root", "Whole", "any_of", "extreme", "norms", "reduced"]


class Power(torch.autograd.Function):
    """A part -> the sum of |x|^p over the whole (p = 0: of x itself), on every rank; every copy has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lies: Lies, p: float) -> Tensor:
        ctx.p, ctx.lies = p, lies
        ctx.save_for_backward(x)
        return _over_ranks(x.sum() if p == 0 else x.abs().pow(p).sum(), lies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        lies = ctx.lies
        grad = moved(grad, lambda g: _over_ranks(g, lies))  # each rank uses it for its part
        if ctx.p == 0:
            return grad.to(x.dtype).expand_as(x), None, None
        return grad * ctx.p * x.abs().pow(ctx.p - 1) * x.sgn(), None, None


def _over_ranks(own: Tensor, lies: Lies) -> Tensor:
    """The sum of what each part gives."""
    if not lies.split:
        return own
    done_by_every_rank("sum up", lies.name)
    return comm.all_reduce(own if lies.counts else torch.zeros_like(own), lies.mesh.everyone)


class Root(torch.autograd.Function):
    """s -> s^(1/p), with gradient 0 at 0, as norms have."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, p: float) -> Tensor:
        root = s.pow(1 / p)
        ctx.p = p
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (root,) = ctx.saved_tensors
        slope = root.pow(1 - ctx.p) / ctx.p
        return torch.where(root == 0, torch.zeros_like(root), grad * slope), None


def extreme(x: Tensor, lies: Lies, *, largest: bool) -> Tensor:
    """The largest or smallest element of the whole, without autograd; not a number if one of them is."""
    sign = 1 if largest else -1
    found = (sign * x).max() if x.numel() else torch.full((), -math.inf, dtype=x.dtype, device=x.device)
    if lies.split:  # not a number counts as the largest: reduced beside it, since backends may drop it
        done_by_every_rank("take the largest of", lies.name)
        pair = torch.stack([found.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), found.isnan().to(x.dtype)])
        comm.all_reduce_(pair, lies.mesh.everyone, torch.distributed.ReduceOp.MAX)
        found = torch.where(pair[1] > 0, torch.full_like(pair[0], math.nan), pair[0])
    return sign * found


def any_of(x: Tensor, lies: Lies) -> Tensor:
    """Whether an element of the whole is true."""
    flag = x.any().to(torch.float32).reshape(())
    if lies.split:
        done_by_every_rank("ask for any of", lies.name)
        comm.all_reduce_(flag, lies.mesh.everyone, torch.distributed.ReduceOp.MAX)
    return flag.bool()


class Whole(torch.autograd.Function):
    """A part -> the whole on every rank, used by all for the same work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lies: Lies) -> Tensor:
        ctx.lies = lies
        return lies.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        lies = ctx.lies
        if lies.outside is not None:
            lies.outside.check(lies.name, grad)
        return moved(grad, lies.gather, forward=lambda g: lies.cut(g).contiguous()), None


def reduced(name: str, x: AnyPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of all elements to one number; NotImplemented for any other reduction."""
    lies = x._lies
    kwargs = {k: v for k, v in kwargs.items() if v is not None and v is not False}
    if name in F.NORMS:
        given = [*args, *(kwargs[k] for k in ("p", "ord") if k in kwargs)]
        order = given[0] if given else 2
        order = 2 if order in (None, "fro") and (name != "linalg_norm" or order is None) else order
        plain = len(given) <= 1 and not set(kwargs) - {"p", "ord"} and isinstance(order, (int, float)) and x.is_floating_point()
        if not plain or (name == "linalg_norm" and given and len(lies.shape) > 1):
            return NotImplemented
        if order in (math.inf, -math.inf):
            return reduced("max" if order > 0 else "min", part_like(in_graph(x).abs(), lies), (), {})
        if order <= 0:
            return NotImplemented
        return Root.apply(Power.apply(_wide(x), lies, float(order)), float(order)).to(x.dtype)
    if args or kwargs:
        return NotImplemented
    if name in ("sum", "mean") and (x.is_floating_point() or name == "sum"):
        total = Power.apply(_wide(x), lies, 0.0)
        total = total / lies.shape.numel() if name == "mean" else total
        return total.to(x.dtype) if x.is_floating_point() else total
    with plainly():
        through_autograd = torch.is_grad_enabled() and x.requires_grad
    if name in F.LARGEST and not through_autograd and x.is_floating_point():
        return extreme(local(x), lies, largest=F.LARGEST[name] is max)
    if name in ("any", "all"):
        true = local(x).bool()
        return any_of(true, lies) if name == "any" else ~any_of(~true, lies)
    return NotImplemented


def norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """The tensors, with the norms of parts, scalars of their dtypes, in the place of these, without autograd: by one collective for all,
    in whatever order the ranks have them. Parts of which that cannot be found so stay as they are."""
    if not 0 < order < math.inf:
        return list(tensors)
    alone = [x for x in tensors if is_part(x) and x.is_floating_point()]
    sums = {id(x): torch.linalg.vector_norm(local(x), order, dtype=torch.promote_types(x.dtype, torch.float32)).pow(order) for x in alone}
    split: list[Any] = sorted((x for x in alone if lies_of(x).split), key=lambda x: lies_of(x).name)  # type: ignore[arg-type]
    for mesh in {id(x._lies.mesh): x._lies.mesh for x in split}.values():
        together = [x for x in split if x._lies.mesh is mesh]
        first, *others = [x._lies.name for x in together]
        done_by_every_rank("sum up", f"{first} and {len(others)} more" if others else first, of=" ".join(others))
        vector = torch.stack([(sums[id(x)] if x._lies.counts else torch.zeros_like(sums[id(x)])).double() for x in together])
        comm.all_reduce_(vector, mesh.everyone)
        sums |= {id(x): s for x, s in zip(together, vector.unbind(0), strict=True)}
    return [sums[id(x)].pow(1 / order).to(x.dtype) if id(x) in sums else x for x in tensors]


def _wide(x: AnyPart) -> Tensor:
    """In a dtype in which sums are made, as torch makes them."""
    own = in_graph(x)
    if own.dtype in (torch.float16, torch.bfloat16):
        return own.float()
    return own if own.dtype.is_floating_point or own.dtype.is_complex else own.long()
