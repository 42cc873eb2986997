"""Commands that make many plans of one capture: sweep, fit."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.answers import answer, answers_only, json_line
from autopar.cli.application import UsageError, app
from autopar.cli.options import Json, Loss, Memory, Optimizer, PinList, Precision, ReduceDtype, Target, memory_of, pins_of, writable
from autopar.cli.studies import open_study
from autopar.stopping import stopped_by_user


class SweepFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"
    HTML = "html"
    SVG = "svg"


Clusters = Annotated[str, typer.Option("--cluster", help="catalogued clusters or FILEs.toml, comma-separated")]


@app.command()
def sweep(
    target: Target,
    gpus: Annotated[str, typer.Option("--gpus", help="numbers of GPUs, comma-separated, such as 8,16,32")],
    memory: Annotated[str | None, typer.Option("--memory", help="memories of one GPU, comma-separated, such as 24GiB,80GiB")] = None,
    cluster: Clusters = "auto",
    batch: Annotated[str | None, typer.Option("--batch", help="global batches, comma-separated; by default the TARGET's")] = None,
    pin: PinList = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    reduce_dtype: ReduceDtype = None,
    loss: Loss = None,
    form: Annotated[SweepFormat, typer.Option("--format", help="text, json, html or svg (the charts)")] = SweepFormat.TEXT,
    out: Annotated[Path | None, typer.Option("--out", help="write it to this file instead")] = None,
    as_json: Json = False,
) -> None:
    """Plan one model for many numbers of GPUs, memories, clusters and batches: a table, a picture, and where scaling stops paying."""
    import msgspec

    from autopar.cli.views import give
    from autopar.explain.sweep import sweep as swept
    from autopar.planner.resources import choose_cluster
    from autopar.report.sweep import sweep_text
    from autopar.report.text import show

    form = SweepFormat.JSON if as_json and form is SweepFormat.TEXT else form
    writable(out)
    counts = numbers_of("--gpus", gpus)
    memories = [memory_of(text) for text in _listed("--memory", memory)] if memory is not None else [None]
    clusters = [choose_cluster(name) for name in _listed("--cluster", cluster)]
    batches: list[int | None] = [*numbers_of("--batch", batch)] if batch is not None else [None]
    with answers_only(form is not SweepFormat.TEXT):
        first = clusters[0].name if cluster == "auto" else _listed("--cluster", cluster)[0]
        study = open_study(
            target, 1, cluster=first, pins=pins_of(pin), optimizer=optimizer, precision=precision, reduce_dtype=reduce_dtype, loss=loss
        )  # fmt: skip
        with stopped_by_user() as study.stop:
            found = swept(study, counts, memories, clusters, batches)
    if form in (SweepFormat.HTML, SweepFormat.SVG):
        from autopar.report.page import svg_of_sweep, sweep_page

        give((sweep_page if form is SweepFormat.HTML else svg_of_sweep)(found).encode(), out, as_json)
    elif out is not None:
        said = json_line(msgspec.to_builtins(found)) if form is SweepFormat.JSON else sweep_text(found)
        give(f"{said}\n".encode(), out, as_json or form is SweepFormat.JSON)
    elif form is SweepFormat.JSON:
        answer(msgspec.to_builtins(found))
    else:
        show(sweep_text(found))
    if found.cheapest is None:
        print(f"autopar: {found.model} fits in none of these; the answer says of each why", file=sys.stderr)
        raise typer.Exit(3)


@app.command()
def fit(
    target: Target,
    cluster: Annotated[str, typer.Option("--cluster", help="a catalogued cluster, or a FILE.toml; auto: this machine's devices")] = "auto",
    memory: Memory = None,
    pin: PinList = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    reduce_dtype: ReduceDtype = None,
    loss: Loss = None,
    most: Annotated[int | None, typer.Option("--most", min=1, help="no more GPUs than these")] = None,
    as_json: Json = False,
) -> None:
    """The fewest GPUs that a model fits on, and the plan on them."""
    import msgspec

    from autopar.explain.fit import fit as fewest
    from autopar.explain.fit import fit_text
    from autopar.report.text import plan_json, show

    with answers_only(as_json):
        study = open_study(
            target, 1, cluster=cluster, memory=memory, pins=pins_of(pin), optimizer=optimizer, precision=precision,
            reduce_dtype=reduce_dtype, loss=loss,
        )  # fmt: skip
        with stopped_by_user() as study.stop:
            found, plan = fewest(study, most)
    if as_json:
        answer({**plan_json(plan), **msgspec.to_builtins(found)})
    else:
        show(fit_text(found))


def _listed(option: str, text: str) -> list[str]:
    found = [x.strip() for x in text.split(",") if x.strip()]
    if not found:
        raise UsageError(f"{option} {text!r} lists nothing")
    return found


def numbers_of(option: str, text: str) -> list[int]:
    from autopar.planner.resources import whole_number

    found: dict[int, None] = {}
    for x in _listed(option, text):
        number = whole_number(x)
        if number is None:
            raise UsageError(f"{option} {text[:100]}: {x[:100]!r} is no positive whole number")
        found[number] = None
    return list(found)
