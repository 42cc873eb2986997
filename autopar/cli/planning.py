"""Commands about plans, which run nothing: plan, explain, diff."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli import explaining, views
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
    ReduceDtype,
    Target,
    TimeLimit,
    Verbose,
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
    from autopar.explain import Study
    from autopar.planner import Pins, Plan


class Format(enum.StrEnum):
    TEXT = "text"
    JSON = "json"
    HTML = "html"
    SVG = "svg"
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
    reduce_dtype: ReduceDtype = None,
    loss: Loss = None,
    time_limit: TimeLimit = None,
    plan_out: Annotated[Path | None, typer.Option("-o", help="write the plan to this file")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="the same; with --export the file of what is exported")] = None,
    export: Annotated[str | None, typer.Option("--export", help="as the configuration of torchtitan, megatron, deepspeed, ...")] = None,
    software: Annotated[str | None, typer.Option("--for", help="the best plan that this software can run: megatron, ...")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make a plan, write it to a file and say what it is. Needs no GPU."""
    from autopar.cli.stacks import check_stacks, exported
    from autopar.report.text import plan_json, plan_text, show

    check_stacks(export, software)
    exported_to, out = (out, plan_out) if export is not None else (None, plan_out or out)
    writable(out)
    writable(exported_to)
    with answers_only(as_json or export is not None):
        made = plan_of(
            target, gpus, cluster=cluster, memory=memory, pins=pins_of(pin), optimizer=optimizer, precision=precision,
            reduce_dtype=reduce_dtype, loss=loss, time_limit=time_limit, stack=software,
        )  # fmt: skip
        if out is not None:
            made.save(out)
    written = {"written": str(out)} if out is not None else {}
    if export is not None:
        exported(made, export, exported_to, as_json, {**plan_json(made), **written})
    elif as_json:
        answer({**plan_json(made), **written})
    else:
        show(plan_text(made, verbose=verbose))
        if out is not None:
            print(f"\nwritten to {out}")


@app.command()
def explain(
    target: Annotated[str | None, typer.Argument(help="a TARGET (file.py:name or package.module:name), or a plan.json")] = None,
    more: Annotated[list[str] | None, typer.Argument(help="further changes of --what-if, NAME=VALUE", metavar="[CHANGE]...")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="number of GPUs; a plan file states its own")] = None,
    cluster: Cluster = "auto",
    memory: Memory = None,
    pin: PinList = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    reduce_dtype: ReduceDtype = None,
    loss: Loss = None,
    time_limit: TimeLimit = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="explain this plan of the TARGET instead of making one")] = None,
    why: Annotated[list[str] | None, typer.Option("--why", help="why this module, parameter or operator is split as it is")] = None,
    why_not: Annotated[list[str] | None, typer.Option("--why-not", help="what these pins would cost, such as tp=8,pp=1")] = None,
    what_if: Annotated[
        list[str] | None, typer.Option("--what-if", help="what would change: memory=40GiB gpus=128 batch= cluster= link.inter=25GB/s")
    ] = None,
    alternatives: Annotated[
        bool, typer.Option("--alternatives/--no-alternatives", help="plan families of plans and what would relieve the limits (a TARGET)")
    ] = True,
    form: Annotated[Format, typer.Option("--format", help="text, json, html, svg (timeline and memory) or perfetto")] = Format.TEXT,
    out: Annotated[Path | None, typer.Option("--out", help="write the explanation to this file instead")] = None,
    config: Annotated[Path | None, typer.Option("--from", help="price what runs today: megatron.sh, config.toml, ds.json, a YAML")] = None,
    measured: Annotated[Path | None, typer.Option("--measured", help="beside a run that model.profile(...).save(FILE) wrote")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as --format json")] = False,
    show_schema: Annotated[bool, typer.Option("--schema", help="the JSON schema of what --format json gives under `explanation`")] = False,
    verbose: Verbose = False,
) -> None:
    """Say what a plan is: what was chosen and why, what it costs, what limits it, and what would be otherwise."""
    if show_schema:
        from autopar.report.explanation import schema

        print(json_line(schema()))
        return
    if target is None:
        raise UsageError("TARGET is missing: file.py:name, package.module:name, or a plan.json")
    if config is not None:
        from autopar.cli.stacks import explain_from

        if pin:
            raise UsageError("--from and --pin exclude each other: a configuration states every choice")
        _alone("--from", why=why, why_not=why_not, what_if=what_if, plan=plan_file, measured=measured, reduce_dtype=reduce_dtype)
        if more:
            raise UsageError(f"{more[0]} is one argument too many; changes of a question come after --what-if")
        as_json = as_json or form is Format.JSON
        if form not in (Format.TEXT, Format.JSON):
            raise UsageError(f"--from answers as text or json, not as {form}")
        explain_from(
            config, target, gpus, out=out, as_json=as_json, cluster=cluster, memory=memory, optimizer=optimizer, precision=precision,
            loss=loss, time_limit=time_limit,
        )  # fmt: skip
        return

    form = Format.JSON if as_json and form is Format.TEXT else form
    if more and not what_if:
        raise UsageError(f"{more[0]} is one argument too many; changes of a question come after --what-if")
    questions = {"why": why or [], "why_not": why_not or [], "what_if": [*(what_if or []), *(more or [])]}
    if form in (Format.HTML, Format.SVG, Format.PERFETTO):
        _alone(f"--format {form.value}", why=why, why_not=why_not, what_if=what_if, measured=None if form is Format.HTML else measured)
    if measured is not None:
        _alone("--measured", why=why, why_not=why_not, what_if=what_if)
    writable(out)
    options = {
        "cluster": cluster, "memory": memory, "optimizer": optimizer, "precision": precision, "reduce_dtype": reduce_dtype, "loss": loss,
    }  # fmt: skip
    with answers_only(form is not Format.TEXT):
        made, study = explained(target, gpus, pins=pin, time_limit=time_limit, plan_file=plan_file, questions=questions, **options)
        if form in (Format.HTML, Format.SVG, Format.PERFETTO):
            view = views.view_of(form.value, made, study, alternatives=alternatives, measured=measured)
        elif study is not None and any(questions.values()):
            value, text = explaining.answered(made, study, questions)
        elif form is Format.TEXT and out is None and measured is None:
            explaining.tell(made, study, alternatives=alternatives, verbose=verbose)
            return
        else:
            value, text = explaining.whole(made, study, alternatives=alternatives, verbose=verbose)
        if measured is not None and form in (Format.TEXT, Format.JSON):
            value, text = views.with_measured(value, made, measured)
    if form in (Format.HTML, Format.SVG, Format.PERFETTO):
        views.give(view, out, as_json)
    else:
        _give(value, text, form, out)


def _alone(option: str, **others: object) -> None:
    """UsageError where an option is given beside one that would leave it out."""
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    if given:
        raise UsageError(f"{option} and {given[0]} exclude each other: ask for one after the other")


def _give(value: dict[str, Any], text: str, form: Format, out: Path | None) -> None:
    """The answer to standard output, or to a file."""
    from autopar.report.text import show

    if out is None:
        if form is Format.JSON:
            answer(value)
        else:
            show(text)
        return
    write_file(out, f"{json_line(value) if form is Format.JSON else text}\n".encode())
    if form is Format.JSON:
        answer({"written": str(out)})
    else:
        print(f"written to {out}")


@app.command()
def diff(first: Path, second: Path, as_json: Json = False, verbose: Verbose = False) -> None:
    """What differs between two plan files: decisions in words, costs, details."""
    import msgspec

    from autopar.planner import Plan
    from autopar.planner.names import named_alike
    from autopar.report.compare import compare, comparison_text
    from autopar.report.diff import diff_text, differences
    from autopar.report.text import plan_json, show

    plans = [Plan.load(readable(path)) for path in (first, second)]
    plans[1] = named_alike(*plans)
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    found = compare(plans[0], plans[1], names)
    raw = list(differences(plan_json(plans[0]), plan_json(plans[1])))
    if as_json:
        listed = [{"path": path, "first": a, "second": b} for path, a, b in raw]
        answer({**msgspec.to_builtins(found), "differences": [] if found.equal else listed})
        return
    show(comparison_text(found, names, most=len(found.details) if verbose else 12))
    if verbose and not found.equal:
        print(f"\nevery field\n{diff_text(raw, names)}")


def plan_of(
    target: str, gpus: int, *, cluster: str, memory: str | None, pins: Pins | None, optimizer: str, precision: str,
    reduce_dtype: str | None, loss: str | None, time_limit: float | None, stack: str | None = None,
) -> Plan:  # fmt: skip
    from autopar import plan
    from autopar.targets import load_target

    check_gpus(gpus)
    check_time_limit(time_limit)
    memory_bytes, loss_fn = memory_of(memory), loss_of(loss)
    model, example_inputs = load_target(target)
    return plan(
        model, gpus, example_inputs=example_inputs, loss=loss_fn, cluster=cluster, memory=memory_bytes, optimizer=optimizer,
        precision=precision, reduce_dtype=reduce_dtype, pins=pins, time_limit=time_limit, stack=stack,
    )  # fmt: skip


def explained(
    target: str, gpus: int | None, *, pins: list[str] | None, time_limit: float | None, plan_file: Path | None,
    questions: dict[str, list[str]], **options: Any,
) -> tuple[Plan, Study | None]:  # fmt: skip
    """The plan in a file, or the plan made for a TARGET with what can be asked further."""
    from autopar.planner import Plan

    if ":" not in target and (target.endswith(".json") or is_file(target)):
        loaded = Plan.load(readable(Path(target)))
        if gpus not in (None, loaded.gpus):
            raise UsageError(f"{target} is a plan for {loaded.gpus} GPUs, and --gpus says {gpus}: leave it out, or plan anew")
        if pins:
            raise UsageError(f"{target} is a plan, in which every choice is made; --pin is for a TARGET")
        if time_limit is not None:
            raise UsageError(f"{target} is a plan, and nothing is searched; --time-limit is for a TARGET")
        if plan_file is not None:
            raise UsageError(f"{target} is a plan, and so is {plan_file}; --plan is for a TARGET")
        stated = {
            "memory": loaded.memory_limit_bytes, "optimizer": loaded.optimizer, "precision": loaded.precision, "cluster": loaded.cluster,
            "reduce_dtype": loaded.reduce_dtype,
        }  # fmt: skip
        usual = {"cluster": "auto", "optimizer": "adamw", "precision": "fp32"}
        for name, value in options.items():
            known = memory_of(value) if name == "memory" and value is not None else value
            if value not in (None, usual.get(name)) and known != stated.get(name):
                raise UsageError(
                    f"{target} is a plan, which is shown as it is, and --{name.replace('_', '-')} says {value}: leave it out, or plan anew"
                )
        for name, asked in questions.items():
            if asked:
                option = f"--{name.replace('_', '-')} {asked[0]}"
                raise UsageError(
                    f"{option} makes other plans, which needs the model beside {target}:\n"
                    f"    autopar explain TARGET --plan {target} {option} --cluster {loaded.cluster}"
                )
        return loaded, None
    from autopar.cli.studies import study_of

    study = study_of(target, gpus, pins=pins_of(pins), time_limit=time_limit, plan_file=plan_file, **options)
    return study.plan, study
