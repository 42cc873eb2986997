"""Objects of libraries that bring together what each rank has seen, where each rank sees all samples."""

from __future__ import annotations

import sys
import warnings

from autopar.run.instances import instances

__all__ = ["Metrics"]

_KINDS = {  # where a class is: its name, and the attribute that says whether it does so ("": it always does)
    "torchmetrics.metric": ("Metric", "sync_on_compute"),
    "ignite.metrics.metric": ("Metric", ""),
    "fastai.learner": ("Learner", ""),
}
_LOOKS = 2  # calls in training and in evaluation, before which the process is looked through
_SHOWN = 4


class Metrics:
    """Warns once, on rank 0, of those that the process holds when a module is called. ranks: which are given the same samples."""

    def __init__(self, ranks: int, *, rank: int) -> None:
        self._ranks = ranks
        self._looks = dict.fromkeys((True, False), _LOOKS if ranks > 1 and rank == 0 else 0)

    def look(self, training: bool) -> None:
        """Before a call, in training or in evaluation."""
        if self._looks[training]:
            self._looks[training] -= 1
            if names := _brought_together():
                self._looks = dict.fromkeys(self._looks, 0)
                _warn(names, self._ranks)


def _brought_together() -> list[str]:
    """Their classes."""
    names = set()
    for module, (name, says) in _KINDS.items():
        kind = getattr(sys.modules.get(module), name, None)
        found = instances(kind) if kind is not None else []
        names |= {type(x).__name__ for x in found if not says or getattr(x, says, False)}
    return sorted(names)


def _warn(names: list[str], ranks: int) -> None:
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    warnings.warn(
        f"{listed}: objects that bring together what each of the {ranks} ranks has seen, and each is given the whole batch: sums, counts, "
        f"matrices and lists of predictions are {ranks} times as large as on one process, or a part of that; means and ratios are right\n"
        f"  what to do: make metrics of torchmetrics with sync_on_compute=False; else compute in the loop, of what the model returns, or "
        f"compile with local_batch=True, and give each data-parallel rank its own samples (autopar.sampler)",
        stacklevel=2,
    )
