"""autopar: an auto-parallelization compiler for PyTorch. `autopar.compile(model, gpus=8)`, and the training loop stays as it was.

Names are loaded when they are first used, so that an emitted module, which imports autopar.run, does not load the planner.
"""

from __future__ import annotations

import importlib
from typing import Any

from autopar.collector import held_back

_HOME = {
    "compile": "parallel", "plan": "planning", "generate": "generation", "sampler": "data",
    "Padding": "data", "StepLine": "watch", "batches": "data", "load": "checkpoint", "save": "checkpoint",
    "interrupted": "run.interrupted",
    "Pins": "planner", "Plan": "report.notebook", "ParallelModule": "run", "launch": "run",
    "AutoparError": "errors", "CaptureError": "errors", "CheckpointError": "errors", "Infeasible": "errors", "LaunchError": "errors",
    "PlanError": "errors", "RenderError": "errors", "SettingError": "errors", "UnsupportedOp": "errors",
    "VerificationError": "errors",
}  # fmt: skip
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"autopar has no {name!r}; it has {', '.join(__all__)}")
    with held_back():  # torch makes a quarter of a million objects, and they stay
        value = getattr(importlib.import_module(f"autopar.{_HOME[name]}"), name)
    globals()[name] = value
    return value
