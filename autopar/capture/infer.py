"""Types of values, asked of torch itself: each distinct operator call runs once on fake tensors, gradients included."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import _decomp as decomposed
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.interpret import run_op
from autopar.capture.source import first_line
from autopar.errors import CaptureError
from autopar.ir import Op, Ref, TensorType, call_text, map_refs, refs
from autopar.run.autocast import ambient

__all__ = ["Inference", "Meta", "meta_of", "states_of_lstms"]


@dataclass(frozen=True, slots=True)
class Meta:
    """What operators can see of a tensor beside its data. grad: autograd differentiates through it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype, self.grad)

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride)):
            if size == 0:
                return True
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def meta_of(tensor: torch.Tensor, grad: bool = False) -> Meta:
    return Meta(tuple(tensor.shape), tensor.stride(), tensor.dtype, grad)


@contextlib.contextmanager
def states_of_lstms() -> Iterator[None]:
    """Inside, the last states of an LSTM of fake tensors have the shapes of its first ones: torch 2.11 gives those that are trained a
    dim of 1 more. (The function is private; there is no other way.)"""
    layer = decomposed.decompositions.one_layer_lstm

    def shaped(x: torch.Tensor, first: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        made, last = layer(x, first, *args, **kwargs)
        return made, tuple(b.reshape(a.shape) for a, b in zip(first, last, strict=True))

    with mock.patch.object(decomposed.decompositions, "one_layer_lstm", shaped):
        yield


_OF_TORCH: dict[object, tuple[Meta | None, ...]] = {}  # of torch's own operators, for all models of this process
_MOST = 1 << 14


class Inference:
    """infer(op, metas): the Meta of every output of an operator, None for outputs that it does not have.

    Equal calls on equal Metas are run once, so that the layers of a deep model cost what one layer costs; those of torch's own operators
    once in a process.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._known: dict[object, tuple[Meta | None, ...]] = {}
        self._of_same: dict[object, tuple[Meta | None, ...]] = {}  # by the identities of the Metas, which take less to compare
        self._kept: list[Meta] = []  # so that no others have these identities

    def __call__(self, op: Op, metas: Mapping[str, Meta]) -> tuple[Meta | None, ...]:
        order: dict[str, int] = {}  # equal arguments stay equal: x * x is not x * y for autograd
        places = tuple([order.setdefault(name, len(order)) for name in refs(op)])
        given = [metas[n] for n in order]
        same = (call_text(op), places, tuple(map(id, given)), op.no_grad, len(op.outputs))
        found = self._of_same.get(same)
        if found is None:
            key = (call_text(op), places, tuple(given), op.no_grad, len(op.outputs))
            if key not in self._known:
                self._known[key] = self._once(key, map_refs(op, lambda name: Ref(str(order[name]))), given)
            found = self._of_same[same] = self._known[key]
            self._kept += given
        return found

    def _once(self, key: object, op: Op, given: list[Meta]) -> tuple[Meta | None, ...]:
        if not op.target.startswith("aten."):  # operators of others may be defined anew
            return self._run(op, given)
        anywhere = key, torch.get_default_dtype(), ambient()
        if anywhere not in _OF_TORCH:
            if len(_OF_TORCH) >= _MOST:
                _OF_TORCH.clear()
            _OF_TORCH[anywhere] = self._run(op, given)
        return _OF_TORCH[anywhere]

    def _run(self, op: Op, metas: list[Meta]) -> tuple[Meta | None, ...]:
        with self._mode, torch.enable_grad(), states_of_lstms():
            env = {
                str(i): torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="cpu").requires_grad_(m.grad)
                for i, m in enumerate(metas)
            }
            try:
                results = run_op(op, env, torch.device("cpu"))
            except ValueError:
                if op.target != "aten.view.default":
                    raise
                # the strides of what a kernel of attention gives are others on fake tensors than it has
                results = run_op(dataclasses.replace(op, target="aten.reshape.default"), env, torch.device("cpu"))
            except RuntimeError as e:
                if "not implemented" not in str(e):
                    raise
                kinds = ", ".join(f"{str(m.dtype).removeprefix('torch.')}{list(m.shape)}" for m in metas)
                raise CaptureError(
                    f"cannot capture {op.target} of {kinds}, for which the CPU has no kernel: {first_line(e)}\n  at {op.source}\n"
                    f"  what to do: cast its operands to a dtype that every device has (float for histograms), or use another operator"
                ) from e
            return tuple(None if r is None else meta_of(r, r.requires_grad) for r in results)
