"""What code may ask of a tensor that it is given, beside its values, its dtype and its shape: whether it is a leaf, how it lies in memory,
how often it was written to. The model is captured on a copy, of which most of these are other than of the user's tensor.

So code is told what the user's tensor says (`capture.around`), and where that is not what a copy says, another form of the module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from autopar.run.grad_mode import as_called
from autopar.run.part import is_part
from autopar.run.plain import plainly

__all__ = ["NAMES", "OF_GRADIENTS", "QUESTIONS", "kinds_of", "said_of", "several_at_once", "transformed"]


def _lies(t: Tensor) -> str:
    least, expected = 1, []
    for n in reversed(t.shape):
        expected.append(least)
        least *= n
    return "" if t.is_contiguous() and t.stride() == tuple(reversed(expected)) else f"with strides {t.stride()}"


def _of_others(t: Tensor) -> str:
    held = t.untyped_storage().nbytes()
    return "" if held == t.numel() * t.element_size() else f"in a storage of {held} bytes"


def _wants_gradients(t: Tensor) -> str:
    return "requires a gradient" if t.requires_grad and not as_called().grad else ""


def _said_if(asks: Callable[[Tensor], object], words: str) -> Callable[[Tensor], str]:
    return lambda t: words if asks(t) else ""


# By the name of an attribute or method of a tensor: what is said, in words, if it is not what a new tensor says that is a copy of it.
QUESTIONS: Mapping[str, Callable[[Tensor], str]] = {
    "_backward_hooks": _said_if(lambda t: t._backward_hooks, "with hooks"),
    "_base": _said_if(lambda t: t._is_view(), "a view"),
    "_is_view": _said_if(lambda t: t._is_view(), "a view"),
    "_version": lambda t: f"written to {t._version} times" if not t.is_inference() and t._version else "",
    "grad": _said_if(lambda t: t.is_leaf and t.grad is not None, "with a gradient of its own"),
    "grad_fn": lambda t: "" if t.grad_fn is None else f"made by {t.grad_fn.name()}",
    "is_conj": _said_if(Tensor.is_conj, "conjugated when it is read"),
    "is_contiguous": _lies,
    "is_inference": _said_if(Tensor.is_inference, "made in inference mode"),
    "is_leaf": _said_if(lambda t: not t.is_leaf, "no leaf"),
    "is_neg": _said_if(Tensor.is_neg, "negated when it is read"),
    "is_pinned": _said_if(Tensor.is_pinned, "in pinned memory"),
    "is_shared": _said_if(lambda t: not t.is_cuda and t.is_shared(), "in shared memory"),
    "output_nr": lambda t: f"output {t.output_nr}" if t.output_nr else "",
    "requires_grad": _wants_gradients,
    "retains_grad": _said_if(lambda t: t.retains_grad, "which retains its gradient"),
    "storage": _of_others,
    "storage_offset": lambda t: f"at {t.storage_offset()} of its storage" if t.storage_offset() else "",
    "stride": _lies,
    "untyped_storage": _of_others,
}
NAMES = frozenset(QUESTIONS)
OF_GRADIENTS = ("requires_grad", "grad_fn", "is_leaf")  # which of these say of what a model computes whether it has a gradient


def said_of(tensor: Tensor, names: Collection[str]) -> tuple[str, ...]:
    """What a tensor says of itself that a copy does not say, in words. names: of `QUESTIONS`, those that are asked."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return ()
    if is_part(tensor):  # which is a leaf and lies as its shape says, as a copy does
        names = {"grad"} & set(names)
    with plainly():
        return tuple(dict.fromkeys(said for name in sorted(names) if (said := QUESTIONS[name](tensor))))


def transformed(tensor: Tensor) -> str:
    """Which transform of functions a tensor stands in, that a program does not go through; "" if there is none."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "torch.func (vmap, jvp, jacfwd)"
    return "forward-mode differentiation" if forward_ad.unpack_dual(tensor).tangent is not None else ""


def check_not_transformed(model: str, tensors: Iterable[Tensor]) -> None:
    """ValueError for a call inside of such a transform."""
    for inside in filter(None, map(transformed, tensors)):
        raise ValueError(
            f"{model} is called inside of {inside}, which its program does not go through. Call it outside; or call its original "
            f"(model.original) inside of `with model.full_parameters():`"
        )


def several_at_once(gradient: Tensor) -> bool:
    """Whether a gradient stands for many, as of torch.autograd.grad(..., is_grads_batched=True)."""
    return bool(transformed(gradient)) or torch._C._dispatch_keys(gradient).has(torch._C._dispatch_key_parse("Batched"))


def kinds_of(tensor: Tensor) -> tuple[str, ...]:
    """The names of the classes that a tensor is of, beside torch.Tensor: Parameter, Buffer, a class of the user's."""
    names = [cls.__name__ for cls in type(tensor).__mro__ if issubclass(cls, Tensor) and cls is not Tensor]
    return tuple(dict.fromkeys([*names, *(kind.__name__ for kind in (nn.Parameter, nn.Buffer) if isinstance(tensor, kind))]))
