"""What no program can be of, in a model and its inputs, refused before there is a trace."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from autopar.capture.given import Inputs
from autopar.errors import CaptureError
from autopar.run.inputs import not_dense
from autopar.run.objects import leaf_path
from autopar.run.parametrized import is_kept

__all__ = ["check_inputs", "check_tensors"]


def check_inputs(model: nn.Module, inputs: Inputs) -> None:
    """CaptureError for parameters without a shape yet, modules of TorchScript, and inputs that a program is not given."""
    if lazy := [name for name, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]:
        raise CaptureError(
            f"{', '.join(lazy[:3])}{' and others' if len(lazy) > 3 else ''} of {type(model).__name__} get a shape in the first call\n"
            f"  what to do: call the model once on a batch before compiling it"
        )
    _check_modules(model)
    _check_leaves(type(model).__name__, inputs)


def check_tensors(model: nn.Module) -> None:
    """CaptureError for parameters and buffers that are not dense, for a buffer that is trained, and for weights that are kept as they were
    computed."""
    if is_kept() and any(map(parametrize.is_parametrized, model.modules())):
        raise CaptureError(
            f"{type(model).__name__} is captured inside of torch.nn.utils.parametrize.cached(), which keeps what its weights are computed "
            f"to\n  what to do: call it outside: the plan says what is kept"
        )
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        _check_dense(type(model).__name__, fqn, tensor)
    _check_buffers(model)


def _check_leaves(name: str, inputs: Inputs) -> None:
    for path, leaf in pytree.tree_leaves_with_path(inputs):
        if not (leaf is None or isinstance(leaf, torch.Tensor) or type(leaf) in (bool, int, str) or isinstance(leaf, float)):
            raise CaptureError(
                f"input {'.'.join(map(str, leaf_path(path)))} of {name} is a {type(leaf).__name__}, and a program is given tensors, "
                f"numbers, strings, and tuples, lists and dicts of these\n  what to do: give the model what stands in it (mode.value, "
                f"vars(options), torch.as_tensor(array)), or keep it in an attribute of the model, which is watched"
            )
        if isinstance(leaf, torch.Tensor):
            _check_dense(name, f"input {'.'.join(map(str, leaf_path(path)))}", leaf)


def _check_modules(model: nn.Module) -> None:
    """CaptureError for modules of TorchScript, whose parameters are not Python's."""
    if scripted := [name or "itself" for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]:
        raise CaptureError(
            f"{scripted[0]} of {type(model).__name__} is a module of TorchScript, into which a graph does not look\n  what to do: give the "
            f"model the module that torch.jit.script was given; functions of TorchScript may stay"
        )


def _check_buffers(model: nn.Module) -> None:
    """CaptureError for a buffer that is trained: gradients are of parameters and of inputs."""
    if trained := [name for name, buffer in model.named_buffers() if buffer.requires_grad and buffer.is_leaf]:
        raise CaptureError(
            f"the buffer {trained[0]} of {type(model).__name__} requires a gradient, which a program has of parameters and inputs alone\n"
            f"  what to do: make it a parameter (nn.Parameter), or register it detached"
        )


def _check_dense(name: str, what: str, tensor: torch.Tensor) -> None:
    if lies := not_dense(tensor):
        raise CaptureError(f"{what} of {name} is a {lies[0]} tensor, and a program is of dense ones\n  what to do: {lies[1]}")
