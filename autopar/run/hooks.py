"""Where torch keeps the hooks of modules: of one in tables of its own, of all in tables of torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module
from torch.utils.module_tracker import ModuleTracker

__all__ = ["OF_CALLS", "OF_STATE", "of_all_modules", "of_calls", "of_gradients", "tables", "without_followers"]

OF_CALLS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_STATE = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def of_all_modules() -> dict[str, dict[int, Any]]:
    """Those that torch calls for every module (torch.nn.modules.module.register_module_forward_hook and its like), by table, but for those
    of torch's own tools (FlopCounterMode and its like), which follow what runs and change nothing."""
    return {table: {key: hook for key, hook in found.items() if not _follows(hook)} for table, found in tables().items()}


def tables() -> dict[str, dict[int, Any]]:
    """Torch's own."""
    return {table: getattr(module, f"_global{table}", {}) for table in OF_CALLS}


def _follows(hook: object) -> bool:
    of = getattr(hook, "__self__", None)
    return isinstance(of, ModuleTracker) or (type(of).__module__.startswith("torch.") and not isinstance(of, nn.Module))


@contextlib.contextmanager
def without_followers() -> Iterator[None]:
    """Inside, torch's own tools do not follow which module runs."""
    before = {name: dict(table) for name, table in tables().items() if any(map(_follows, table.values()))}
    try:
        for name in before:
            for key in [key for key, hook in before[name].items() if _follows(hook)]:
                del tables()[name][key]
        yield
    finally:
        for name, table in before.items():
            now = dict(tables()[name])
            tables()[name].clear()
            tables()[name].update({key: hook for key, hook in table.items() if key in now or _follows(hook)} | now)


def of_calls(of: nn.Module) -> list[Any]:
    """Those of one module that torch calls around its forward and its backward."""
    return [hook for table in OF_CALLS for hook in getattr(of, table).values()]


def of_gradients(of: nn.Module) -> list[Any]:
    """Those of one module that torch calls in its backward."""
    return [*of._backward_pre_hooks.values(), *of._backward_hooks.values()]
