"""Functions of TorchScript run as the Python that they were made from, where torch keeps it, as it does for its own tracer: what their
executor has compiled after a few calls is one operator with a backward of its own, into which a graph does not look."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from autopar.errors import CaptureError

__all__ = ["as_python"]


@contextlib.contextmanager
def as_python() -> Iterator[None]:
    """Inside, they run so. CaptureError for one of which torch keeps no Python."""
    function = torch.jit.ScriptFunction
    with mock.patch.object(function, "__call__", _run(function.__call__)):
        yield


def _run(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(script: Any, *args: Any, **kwargs: Any) -> Any:
        source = getattr(script, "_torchdynamo_inline", None)
        if source is None:
            raise CaptureError(
                f"{script.name} is a function of TorchScript without the Python that it was made from, into "
                f"which a graph does not look\n  what to do: call the Python function, or script it (torch.jit.script)"
            )
        return source(*args, **kwargs)

    return run
