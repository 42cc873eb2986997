"""Models of Hugging Face without the caches of keys and values that they make for generating."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["without_key_value_cache"]


@contextlib.contextmanager
def without_key_value_cache(model: nn.Module) -> Iterator[None]:
    """Inside, Hugging Face configs have use_cache=False."""
    configs = list({id(c): c for m in model.modules() for c in _configs(getattr(m, "config", None))}.values())
    caching = [c for c in configs if c.use_cache]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _configs(config: object, depth: int = 3) -> Iterator[Any]:
    """A config object that can switch a key-value cache on, and those it contains."""
    if config is None or depth == 0 or not hasattr(config, "__dict__"):
        return
    if isinstance(getattr(config, "use_cache", None), bool):
        yield config
    for value in list(vars(config).values()):
        if hasattr(value, "__dict__") and type(value).__name__.endswith("Config"):
            yield from _configs(value, depth - 1)
