"""Where torch keeps the hooks of modules: of one in tables of its own, of all in tables of torch's."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module

__all__ = ["OF_CALLS", "OF_STATE", "of_all_modules", "of_calls", "of_gradients"]

OF_CALLS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_STATE = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def of_all_modules() -> dict[str, dict[int, Any]]:
    """Those that torch calls for every module (torch.nn.modules.module.register_module_forward_hook and its like), by table."""
    return {table: getattr(module, f"_global{table}", {}) for table in OF_CALLS}


def of_calls(of: nn.Module) -> list[Any]:
    """Those of one module that torch calls around its forward and its backward."""
    return [hook for table in OF_CALLS for hook in getattr(of, table).values()]


def of_gradients(of: nn.Module) -> list[Any]:
    """Those of one module that torch calls in its backward."""
    return [*of._backward_pre_hooks.values(), *of._backward_hooks.values()]
