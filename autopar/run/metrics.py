"""Metrics of libraries that bring together what each rank has seen, where each rank sees all samples."""

from __future__ import annotations

import gc
import sys
import warnings

__all__ = ["Metrics"]

_LIBRARIES = {"torchmetrics.metric": "sync_on_compute", "ignite.metrics.metric": ""}  # where Metric is; what says whether one does so
_LOOKS = 2  # calls in training and in evaluation, before which the process is looked through
_SHOWN = 4


class Metrics:
    """Warns once, on rank 0, of the metrics that the process holds when a module is called. ranks: which are given the same samples."""

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
    """The classes of the metrics that are."""
    kinds = {getattr(sys.modules[name], "Metric", None): says for name, says in _LIBRARIES.items() if name in sys.modules}
    names = set()
    for x in gc.get_objects() if kinds else ():
        for kind, says in kinds.items():
            if kind in type(x).__mro__ and (not says or getattr(x, says, False)):
                names.add(type(x).__name__)
    return sorted(names)


def _warn(names: list[str], ranks: int) -> None:
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    warnings.warn(
        f"metrics ({listed}) bring together what each of the {ranks} ranks has seen, and each is given the whole batch: sums, counts and "
        f"matrices are {ranks} times as large as on one process, means and ratios are not\n  what to do: make metrics of torchmetrics with "
        f"sync_on_compute=False; or compile with local_batch=True, and give each data-parallel rank its own samples (autopar.sampler)",
        stacklevel=2,
    )
