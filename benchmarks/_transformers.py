"""Importing transformers where torchvision is missing or broken."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

__all__ = ["load_transformers"]


def load_transformers() -> Any:
    """The package. It would fail on a torchvision that is built for another torch, and is fine without one. Nothing is downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    return importlib.import_module("transformers")
