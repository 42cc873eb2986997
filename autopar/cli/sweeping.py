"""Commands that make many plans of one capture: sweep, fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.answers import answer, answers_only
from autopar.cli.application import UsageError, app
from autopar.cli.options import Json, Loss, Memory, Optimizer, PinList, Precision, ReduceDtype, Target, memory_of, pins_of

if TYPE_CHECKING:
    from autopar.explain import Study

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
    as_json: Json = False,
) -> None:
    """Plan one model for many numbers of GPUs, memories, clusters and batches: a table, a picture, and where scaling stops paying."""
    import msgspec

    from autopar.explain.sweep import sweep as swept
    from autopar.explain.sweep import sweep_text
    from autopar.planner.resources import choose_cluster
    from autopar.report.text import show

    counts = _numbers("--gpus", gpus)
    memories = [memory_of(text) for text in _listed("--memory", memory)] if memory is not None else [None]
    clusters = [choose_cluster(name, 1) for name in _listed("--cluster", cluster)]
    batches: list[int | None] = [*_numbers("--batch", batch)] if batch is not None else [None]
    with answers_only(as_json):
        first = clusters[0].name if cluster == "auto" else _listed("--cluster", cluster)[0]
        study = _study(target, first, pin, optimizer, precision, reduce_dtype, loss)
        found = swept(study, counts, memories, clusters, batches)
    if as_json:
        answer(msgspec.to_builtins(found))
    else:
        show(sweep_text(found))
    if found.cheapest is None:
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

    limit = memory_of(memory)
    with answers_only(as_json):
        study = _study(target, cluster, pin, optimizer, precision, reduce_dtype, loss, limit)
        found, plan = fewest(study, most)
    if as_json:
        answer({**plan_json(plan), **msgspec.to_builtins(found)})
    else:
        show(fit_text(found))


def _study(
    target: str, cluster: str, pin: list[str] | None, optimizer: str, precision: str, reduce_dtype: str | None, loss: str | None,
    limit: int | None = None,
) -> Study:  # fmt: skip
    """What can be asked of a TARGET, with no plan of its own."""
    from autopar.cli.studies import captured_of
    from autopar.explain import Asked, Study
    from autopar.planner import Pins
    from autopar.planner.resources import choose_cluster
    from autopar.planner.wishes import PRECISIONS, check_name
    from cost_models.memory import OPTIMIZERS

    check_name("optimizer", optimizer, OPTIMIZERS)
    if reduce_dtype is not None:
        check_name("reduce_dtype", reduce_dtype, PRECISIONS)
    described, pins = choose_cluster(cluster, 1), pins_of(pin) or Pins()
    captured, of_batch = captured_of(target, precision, loss)
    program = captured.program
    asked = Asked(
        gpus=1, cluster=described, optimizer=optimizer, precision=precision, reduce_dtype=reduce_dtype, memory_limit_bytes=limit, pins=pins,
        batch=program.batch_size,
    )  # fmt: skip
    return Study(program=program, asked=asked, recapture=of_batch)


def _listed(option: str, text: str) -> list[str]:
    found = [x.strip() for x in text.split(",") if x.strip()]
    if not found:
        raise UsageError(f"{option} {text!r} lists nothing")
    return found


def _numbers(option: str, text: str) -> list[int]:
    found = _listed(option, text)
    for x in found:
        if not x.isdecimal() or int(x) < 1:
            raise UsageError(f"{option} {text}: {x!r} is no positive whole number")
    return list(dict.fromkeys(map(int, found)))
