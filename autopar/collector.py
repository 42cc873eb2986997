"""Python's collector of cycles, held back where many objects are made that stay: it would look through all of them again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["freeze", "held_back"]

_frozen = False  # by `freeze`, whose objects stay frozen


def freeze() -> None:
    """Takes what there is out of reach of collections, for as long as the process lives."""
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = True


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Inside, nothing is collected, unless somebody asks for it; afterwards as before. What was made inside counts as old then: the next
    collection of young objects would look through all of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not (_frozen or gc.get_freeze_count()):  # else these would be let go of; to count many takes long
                gc.freeze()
                gc.unfreeze()
            gc.enable()
