"""Commands about plans, which run nothing: plan, explain, diff."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.answers import answer, answers_only, json_line
from autopar.cli.application import UsageError, app
from autopar.cli.options import (
    Cluster,
    Gpus,
    Json,
    Loss,
    Memory,
    Optimizer,
    PinList,
    Precision,
    Target,
    TimeLimit,
    check_gpus,
    check_time_limit,
    loss_of,
    memory_of,
    pins_of,
    readable,
    writable,
)
from autopar.files import is_file, write_file

if TYPE_CHECKING:
    from autopar.planner import Pins, Plan


class Format(enum.StrEnum):
    TEXT = "text"
    JSON = "json"
    HTML = "html"
    PERFETTO = "perfetto"


@app.command()
def plan(
    target: Target,
    gpus: Gpus,
    cluster: Cluster = "auto",
    memory: Memory = None,
    pin: PinList = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    loss: Loss = None,
    time_limit: TimeLimit = None,
    plan_out: Annotated[Path | None, typer.Option("-o", help="write the plan to this file")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="the same; with --export the file of what is exported")] = None,
    export: Annotated[str | None, typer.Option("--export", help="as the configuration of torchtitan, megatron, deepspeed, ...")] = None,
    software: Annotated[str | None, typer.Option("--for", help="the best plan that this software can run: megatron, ...")] = None,
    as_json: Json = False,
) -> None:
    """Make a plan, write it to a file and say what it is. Needs no GPU."""
    from autopar.cli.stacks import check_stacks, exported
    from autopar.report.text import plan_json, plan_text

    check_stacks(export, software)
    exported_to, out = (out, plan_out) if export is not None else (None, plan_out or out)
    writable(out)
    writable(exported_to)
    with answers_only(as_json or export is not None):
        made = plan_of(
            target, gpus, cluster=cluster, memory=memory, pins=pins_of(pin), optimizer=optimizer, precision=precision, loss=loss,
            time_limit=time_limit, stack=software,
        )  # fmt: skip
        if out is not None:
            made.save(out)
    written = {"written": str(out)} if out is not None else {}
    if export is not None:
        exported(made, export, exported_to, as_json, {**plan_json(made), **written})
    elif as_json:
        answer({**plan_json(made), **written})
    else:
        print(plan_text(made))
        if out is not None:
            print(f"\nwritten to {out}")


@app.command()
def explain(
    target: Annotated[str, typer.Argument(help="a TARGET (file.py:name or package.module:name), or a plan.json")],
    gpus: Annotated[int | None, typer.Option("--gpus", help="number of GPUs; a plan file states its own")] = None,
    cluster: Cluster = "auto",
    memory: Memory = None,
    pin: PinList = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    loss: Loss = None,
    time_limit: TimeLimit = None,
    form: Annotated[Format, typer.Option("--format", help="text or json")] = Format.TEXT,
    out: Annotated[Path | None, typer.Option("--out", help="write the explanation to this file instead")] = None,
    config: Annotated[Path | None, typer.Option("--from", help="price what runs today: megatron.sh, config.toml, ds.json, a YAML")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as --format json")] = False,
) -> None:
    """Say what a plan is: what was chosen and why, what it costs, and what limits it."""
    from autopar.report.text import plan_json, plan_text

    if config is not None:
        from autopar.cli.stacks import explain_from

        if pin:
            raise UsageError("--from and --pin exclude each other: a configuration states every choice")
        as_json = as_json or form is Format.JSON
        if form not in (Format.TEXT, Format.JSON):
            raise UsageError(f"--from answers as text or json, not as {form}")
        explain_from(
            config, target, gpus, out=out, as_json=as_json, cluster=cluster, memory=memory, optimizer=optimizer, precision=precision,
            loss=loss, time_limit=time_limit,
        )  # fmt: skip
        return

    if form in (Format.HTML, Format.PERFETTO):
        raise UsageError(f"--format {form} is not available yet; text and json are")
    form = Format.JSON if as_json else form
    writable(out)
    with answers_only(form is Format.JSON):
        made = explained(
            target, gpus, cluster=cluster, memory=memory, pins=pin, optimizer=optimizer, precision=precision, loss=loss,
            time_limit=time_limit,
        )  # fmt: skip
    text = json_line(plan_json(made)) if form is Format.JSON else plan_text(made)
    if out is None:
        print(text)
        return
    write_file(out, f"{text}\n".encode())
    if form is Format.JSON:
        answer({"written": str(out)})
    else:
        print(f"written to {out}")


@app.command()
def diff(first: Path, second: Path, as_json: Json = False) -> None:
    """What differs between two plan files."""
    from autopar.planner import Plan
    from autopar.report.diff import diff_text, differences
    from autopar.report.text import plan_json

    first_plan, second_plan = (plan_json(Plan.load(readable(path))) for path in (first, second))
    found = list(differences(first_plan, second_plan))
    if as_json:
        answer({"differences": [{"path": path, "first": a, "second": b} for path, a, b in found]})
    else:
        print(diff_text(found, (str(first), str(second))))


def plan_of(
    target: str, gpus: int, *, cluster: str, memory: str | None, pins: Pins | None, optimizer: str, precision: str, loss: str | None,
    time_limit: float | None, stack: str | None = None,
) -> Plan:  # fmt: skip
    from autopar import plan
    from autopar.targets import load_target

    check_gpus(gpus)
    check_time_limit(time_limit)
    memory_bytes, loss_fn = memory_of(memory), loss_of(loss)
    model, example_inputs = load_target(target)
    return plan(
        model, gpus, example_inputs=example_inputs, loss=loss_fn, cluster=cluster, memory=memory_bytes, optimizer=optimizer,
        precision=precision, pins=pins, time_limit=time_limit, stack=stack,
    )  # fmt: skip


def explained(target: str, gpus: int | None, *, pins: list[str] | None, time_limit: float | None, **options: Any) -> Plan:
    """The plan in a file, or the plan made for a TARGET."""
    from autopar.planner import Plan

    if ":" not in target and (target.endswith(".json") or is_file(target)):
        loaded = Plan.load(readable(Path(target)))
        if gpus not in (None, loaded.gpus):
            raise UsageError(f"{target} is a plan for {loaded.gpus} GPUs, and --gpus says {gpus}")
        if pins:
            raise UsageError(f"{target} is a plan, in which every choice is made; --pin is for a TARGET")
        if time_limit is not None:
            raise UsageError(f"{target} is a plan, and nothing is searched; --time-limit is for a TARGET")
        return loaded
    if gpus is None:
        raise UsageError("--gpus N is missing: for how many GPUs is the plan to be?")
    return plan_of(target, gpus, pins=pins_of(pins), time_limit=time_limit, **options)
