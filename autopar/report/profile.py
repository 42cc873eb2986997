"""What `autopar profile` says: its progress, tables of what was measured, and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autopar.measure.profile import Profile
from autopar.report.units import bytes_text, count_text, seconds_text
from cost_models.collectives import KINDS
from cost_models.write import figures

__all__ = ["print_profile", "profile_json", "progress"]


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar while it is open: the function takes what is being measured, how many parts are done, and of how many."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def profile_json(found: Profile) -> dict[str, Any]:
    """Every value with its source, and how well the fits do."""
    cluster = found.cluster
    return {
        "title": dict(cluster.sources)["title"],
        "workers": found.workers,
        "cluster": figures(cluster),
        "gpu": figures(cluster.gpu),
        "intra": figures(cluster.intra),
        "inter": figures(cluster.inter),
        "operators": len(found.operators),
        "collectives": len(found.collectives),
        "gpu_error": found.gpu_error,
        "link_error": found.link_error,
        "notes": list(found.notes),
    }


def print_profile(found: Profile) -> None:
    """What was measured; of what is assumed only how much it is."""
    cluster, console = found.cluster, Console()
    console.print(dict(cluster.sources)["title"], markup=False)
    values = Table("value", "", "how", box=SIMPLE)
    assumed = 0
    for name, part in (("gpu", cluster.gpu), ("intra", cluster.intra), ("inter", cluster.inter), ("", cluster)):
        for key, figure in figures(part).items():
            how = str(figure["source"]).partition(":")[0]
            assumed += how == "assumed"
            if how != "assumed":
                values.add_row(f"{name}.{key}".removeprefix("."), _amount(key, figure["value"]), how)
    console.print(values)
    console.print(f"{assumed} values are assumed, as in the catalogue; the file says which")
    if found.link_error is not None:
        sizes = sorted({t.nbytes for t in found.collectives})
        times = Table("collective", *(bytes_text(nbytes).replace(".00", "") for nbytes in sizes), box=None, padding=(0, 1, 0, 0))
        for ranks, k in sorted({(t.ranks, KINDS.index(t.kind)) for t in found.collectives}):
            of_size = {t.nbytes: t.measured_s for t in found.collectives if (t.ranks, t.kind) == (ranks, KINDS[k])}
            times.add_row(f"{KINDS[k]} of {ranks}", *(seconds_text(of_size[nbytes]) for nbytes in sizes))
        times.columns[0].no_wrap = True
        console.print(times)
    errors = {"operators": found.gpu_error, "collectives": found.link_error}
    for what, error in errors.items():
        if error is not None:
            console.print(f"{what}: fitted times are a factor of {math.exp(error):.2f} from the measured, on average")
    for note in found.notes:
        console.print(note, markup=False)


def _amount(key: str, value: float) -> str:
    if key.startswith("peak_flops_per_s."):
        return f"{count_text(value).replace('B', 'G')}FLOP/s"
    if key.endswith("_bytes_per_s"):
        return f"{count_text(value).replace('B', 'G')}B/s"
    return bytes_text(value) if key.endswith("_bytes") else seconds_text(value) if key.endswith("_s") else f"{value:.3g}"
