"""The command line: `autopar explain | plan | verify | diff | export | import | profile | demo | doctor`.

Exit codes: 0 done; 1 a check failed; 2 wrong usage or input; 3 infeasible; 4 the model cannot be captured. With --json
the last line of standard output is one JSON object, also for an error that autopar raises on purpose; everything else
goes to standard error. A bug of ours keeps its traceback.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from autopar.errors import AutoparError
from autopar.files import check_writable, is_file, write_file
from cost_models.cluster import HardwareFileError, UnknownHardware

if TYPE_CHECKING:
    from autopar.planner import Pins, Plan

# What a command needs is imported inside it: `autopar --help` must not wait seconds for torch.

app = typer.Typer(
    name="autopar", help="Finds and runs the best parallel form of a PyTorch model.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


class UsageError(AutoparError, ValueError):
    """An option whose value makes no sense."""


class Format(enum.StrEnum):
    TEXT = "text"
    JSON = "json"
    HTML = "html"
    PERFETTO = "perfetto"


Target = Annotated[str, typer.Argument(help="file.py:name or package.module:name, a callable that returns (model, example_inputs)")]
Gpus = Annotated[int, typer.Option("--gpus", help="number of GPUs (workers on this machine for verify)")]
Cluster = Annotated[str, typer.Option("--cluster", help="a catalogued cluster, or a FILE.toml; auto: this machine's devices")]
Memory = Annotated[str | None, typer.Option("--memory", help="memory of one GPU that a plan may use, such as 80GiB")]
PinList = Annotated[list[str] | None, typer.Option("--pin", help="fix a choice, such as tp=2; may be given many times")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="its states are priced: adamw, adam, sgd, ...")]
Precision = Annotated[str, typer.Option("--precision", help="fp32, bf16, ...")]
Loss = Annotated[str | None, typer.Option("--loss", help="file.py:name of fn(output) -> scalar, for a model that computes no loss")]
TimeLimit = Annotated[float | None, typer.Option("--time-limit", help="seconds; then the best plan so far, and what was left is said")]
Json = Annotated[bool, typer.Option("--json", help="the last line of standard output is one JSON object")]


# --------------------------------------------------------------------------------------------------------- commands
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
    out: Annotated[Path | None, typer.Option("-o", "--out", help="write the plan to this file")] = None,
    as_json: Json = False,
) -> None:
    """Make a plan, write it to a file and say what it is. Needs no GPU."""
    from autopar.report.text import plan_json, plan_text

    _writable(out)
    with _answers_only(as_json):
        made = _plan_of(
            target, gpus, cluster=cluster, memory=memory, pins=_pins(pin), optimizer=optimizer, precision=precision, loss=loss,
            time_limit=time_limit,
        )  # fmt: skip
        if out is not None:
            made.save(out)
    written = {"written": str(out)} if out is not None else {}
    if as_json:
        _answer({**plan_json(made), **written})
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
    as_json: Annotated[bool, typer.Option("--json", help="the same as --format json")] = False,
) -> None:
    """Say what a plan is: what was chosen and why, what it costs, and what limits it."""
    from autopar.report.text import plan_json, plan_text

    if form in (Format.HTML, Format.PERFETTO):
        raise UsageError(f"--format {form} is not available yet; text and json are")
    form = Format.JSON if as_json else form
    _writable(out)
    with _answers_only(form is Format.JSON):
        made = _explained(
            target, gpus, cluster=cluster, memory=memory, pins=pin, optimizer=optimizer, precision=precision, loss=loss,
            time_limit=time_limit,
        )  # fmt: skip
    text = _json_line(plan_json(made)) if form is Format.JSON else plan_text(made)
    if out is None:
        print(text)
        return
    write_file(out, f"{text}\n".encode())
    if form is Format.JSON:
        _answer({"written": str(out)})
    else:
        print(f"written to {out}")


@app.command()
def verify(
    target: Target,
    gpus: Gpus,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="verify this plan instead of making one")] = None,
    cluster: Cluster = "cpu",
    memory: Memory = None,
    pin: PinList = None,
    loss: Loss = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="optimizer steps to compare")] = 3,
    loop: Annotated[str | None, typer.Option("--loop", help="file.py:name of train(model) -> numbers; compare what it returns")] = None,
    as_json: Json = False,
) -> None:
    """Run the plan on local workers in float64 and compare with the single-process model: loss, gradients, parameters, buffers,
    evaluation, other batch sizes, all copies; with --loop what the user's own training loop returns."""
    from autopar.planner import Plan
    from autopar.report.verification import loop_json, loop_text, verification_json, verification_text
    from autopar.targets import load_target
    from autopar.verify import verify as run_verify
    from autopar.verify_loop import verify_loop

    if plan_file is not None and pin:
        raise UsageError("--plan and --pin exclude each other: a plan file states every choice")
    _check_gpus(gpus)
    pins, memory_bytes, loss_fn = _pins(pin), _memory(memory), _loss(loss)
    given = None if plan_file is None else Plan.load(_readable(plan_file))
    if given is not None and given.gpus != gpus:
        raise UsageError(f"{plan_file} is a plan for {given.gpus} GPUs, and --gpus says {gpus}")
    if loop is not None:
        with _answers_only(as_json):
            looped = verify_loop(target, loop, gpus, plan=given, pins=pins, loss=loss, cluster=cluster, memory=memory_bytes)
        if as_json:
            _answer(loop_json(looped))
        else:
            print(loop_text(looped, loop))
        if not looped.ok:
            raise typer.Exit(1)
        return
    with _answers_only(as_json):
        model, example_inputs = load_target(target)
        report = run_verify(
            model, example_inputs, gpus, plan=given, pins=pins, steps=steps, loss=loss_fn, cluster=cluster, memory=memory_bytes
        )
    if as_json:
        _answer(verification_json(report))
    else:
        print(verification_text(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def diff(first: Path, second: Path, as_json: Json = False) -> None:
    """What differs between two plan files."""
    from autopar.planner import Plan
    from autopar.report.diff import diff_text, differences
    from autopar.report.text import plan_json

    first_plan, second_plan = (plan_json(Plan.load(_readable(path))) for path in (first, second))
    found = list(differences(first_plan, second_plan))
    if as_json:
        _answer({"differences": [{"path": path, "first": a, "second": b} for path, a, b in found]})
    else:
        print(diff_text(found, (str(first), str(second))))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="a folder that autopar.save or torch.distributed.checkpoint has written")],
    out: Annotated[Path, typer.Option("-o", "--out", help="a .safetensors file, or a folder for from_pretrained")],
    prefix: Annotated[str | None, typer.Option("--prefix", help="what stands before the model's names (of DDP and FSDP2 alone)")] = None,
    as_json: Json = False,
) -> None:
    """Write the model of a checkpoint as a safetensors file under the original's names. Needs no GPU, and memory for one tensor."""
    from autopar.checkpoint.exchange import export_model

    _say_exchanged(export_model(checkpoint, out, prefix=prefix), as_json)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="a safetensors file, or a folder that from_pretrained reads")],
    out: Annotated[Path, typer.Option("-o", "--out", help="the folder of the checkpoint")],
    as_json: Json = False,
) -> None:
    """Make a checkpoint for autopar.load of a safetensors file. Needs no GPU, and memory for one tensor."""
    from autopar.checkpoint.exchange import import_model

    _say_exchanged(import_model(source, out), as_json)


@app.command()
def profile(
    out: Annotated[Path, typer.Option("-o", "--out", help="the cluster file to write")] = Path("cluster.toml"),
    gpus: Annotated[int | None, typer.Option("--gpus", help="workers; default: one for each GPU, without GPUs for each core")] = None,
    cluster: Annotated[str, typer.Option("--cluster", help="what it says holds where nothing can be measured")] = "auto",
    as_json: Json = False,
) -> None:
    """Measure this machine's devices and links (about a minute), and write them as a cluster file for --cluster."""
    from autopar.measure.profile import default_workers, save
    from autopar.measure.profile import profile as measured
    from autopar.planner.resources import choose_cluster
    from autopar.report.profile import print_profile, profile_json, progress

    workers = default_workers() if gpus is None else gpus
    _check_gpus(workers)
    _writable(out)
    with _answers_only(as_json), progress() as say:
        found = measured(choose_cluster(cluster, 1), workers, say=say)
    save(found, out)
    if as_json:
        _answer({"written": str(out), **profile_json(found)})
    else:
        print_profile(found)
        print(f"written to {out}")


@app.command()
def demo(
    gpus: Annotated[int, typer.Option("--gpus", help="number of local workers")] = 4,
    steps: Annotated[int, typer.Option("--steps", min=2, help="training steps")] = 20,
    out: Annotated[Path, typer.Option("--out", help="folder for the plan, the emitted module and the curves")] = Path("autopar-demo"),
    pin: PinList = None,
    as_json: Json = False,
) -> None:
    """Plan and train a small GPT-2 on this machine, beside the same model on one process."""
    _check_gpus(gpus)
    from autopar.demo import run_demo

    with _answers_only(as_json):
        result = run_demo(gpus=gpus, steps=steps, folder=out, pins=_pins(pin))
    if as_json:
        _answer(result.to_json())
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Whether this machine has what autopar needs; exit code 1 if something is missing."""
    from autopar.report.doctor import checks, checks_text

    with _answers_only(as_json):
        found = checks()
    failed = [check.name for check in found if check.failed]
    if as_json:
        _answer({"ok": not failed, "checks": [{"name": c.name, "state": c.state, "found": c.found} for c in found]})
    else:
        print(checks_text(found))
        print(f"\nmissing: {', '.join(failed)}" if failed else "\nall that is needed is there")
    if failed:
        raise typer.Exit(1)


def _say_exchanged(done: Any, as_json: bool) -> None:
    if as_json:
        left = {"left_out": list(done.left)} if done.left else {}
        _answer({"written": [str(path) for path in done.written], "tensors": done.tensors, "bytes": done.nbytes, **left})
        return
    print(f"{done.tensors} tensors, {done.nbytes / 2**20:.1f} MiB, written to {' and '.join(map(str, done.written))}")
    for name in done.left:
        print(f"{name} is not in it: it is no tensor that a state_dict has by itself")


# ------------------------------------------------------------------------------------------------ options to values
def _plan_of(
    target: str, gpus: int, *, cluster: str, memory: str | None, pins: Pins | None, optimizer: str, precision: str, loss: str | None,
    time_limit: float | None,
) -> Plan:  # fmt: skip
    from autopar import plan
    from autopar.targets import load_target

    _check_gpus(gpus)
    _check_time_limit(time_limit)
    memory_bytes, loss_fn = _memory(memory), _loss(loss)
    model, example_inputs = load_target(target)
    return plan(
        model, gpus, example_inputs=example_inputs, loss=loss_fn, cluster=cluster, memory=memory_bytes, optimizer=optimizer,
        precision=precision, pins=pins, time_limit=time_limit,
    )  # fmt: skip


def _explained(target: str, gpus: int | None, *, pins: list[str] | None, time_limit: float | None, **options: Any) -> Plan:
    """The plan in a file, or the plan made for a TARGET."""
    from autopar.planner import Plan

    if ":" not in target and (target.endswith(".json") or is_file(target)):
        loaded = Plan.load(_readable(Path(target)))
        if gpus not in (None, loaded.gpus):
            raise UsageError(f"{target} is a plan for {loaded.gpus} GPUs, and --gpus says {gpus}")
        if pins:
            raise UsageError(f"{target} is a plan, in which every choice is made; --pin is for a TARGET")
        if time_limit is not None:
            raise UsageError(f"{target} is a plan, and nothing is searched; --time-limit is for a TARGET")
        return loaded
    if gpus is None:
        raise UsageError("--gpus N is missing: for how many GPUs is the plan to be?")
    return _plan_of(target, gpus, pins=_pins(pins), time_limit=time_limit, **options)


def _check_gpus(gpus: int) -> None:
    if gpus < 1:
        raise UsageError(f"--gpus must be 1 or more, not {gpus}")


def _check_time_limit(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UsageError(f"--time-limit must be a positive number of seconds, not {seconds:g}")


def _memory(text: str | None) -> int | None:
    from autopar.planner.resources import parse_memory

    try:
        return parse_memory(text)
    except ValueError as error:
        raise UsageError(f"--memory: {error}") from error


def _loss(target: str | None) -> Any:
    from autopar.targets import load_object

    if target is None:
        return None
    loss = load_object(target)
    if not callable(loss):
        raise UsageError(f"--loss {target} is of type {type(loss).__name__}; needed is a function of the model's output")
    return loss


def _pins(texts: list[str] | None) -> Pins | None:
    """['tp=2', 'schedule=1f1b', 'blocks=2,2'] to Pins(tp=2, schedule='1f1b', blocks=(2, 2)); None if there are none."""
    from autopar.axes import AXES
    from autopar.planner import Pins
    from autopar.targets import did_you_mean

    values: dict[str, str | list[str]] = {}
    known = [name for name in dict.fromkeys((*Pins.__struct_fields__, *AXES)) if name != "axes"]
    for text in texts or ():
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise UsageError(f"--pin {text!r} is not NAME=VALUE, such as --pin tp=2")
        if name not in known:
            raise UsageError(f"--pin {text}: there is no pin {name!r}{did_you_mean(name, known)}")
        if name in values:
            raise UsageError(f"--pin {name} is given twice: {values[name]} and {value}")
        values[name] = value.split(",") if name == "blocks" else value
    try:
        own = {name: value for name, value in values.items() if name in Pins.__struct_fields__}
        others = {name: value for name, value in values.items() if name not in own}
        return msgspec.convert({**own, **({"axes": others} if others else {})}, Pins, strict=False) if values else None
    except msgspec.ValidationError as error:
        raise UsageError(f"--pin {' --pin '.join(texts or ())}: {error}") from error


def _readable(path: Path) -> Path:
    if not is_file(path):
        from autopar.targets import did_you_mean

        known = [p.name for p in path.parent.glob("*.json")] if len(str(path)) < 1000 and path.parent.is_dir() else []
        raise UsageError(f"there is no plan file {path}{did_you_mean(path.name, known)}")
    return path


def _writable(path: Path | None) -> None:
    """Said before the plan is made, not after."""
    if path is not None:
        check_writable(path)


# ---------------------------------------------------------------------------------------------------------- answers
@contextlib.contextmanager
def _answers_only(as_json: bool) -> Iterator[None]:
    """While standard output is for the answer alone, what the model and the passes print goes to standard error. The user's code, which
    is run inside, does not decide the exit code."""
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            yield
    except SystemExit as stop:
        raise UsageError(f"the model's own code ended the program, by sys.exit({'' if stop.code is None else repr(stop.code)})") from stop


def _answer(value: dict[str, Any]) -> None:
    print(_json_line(value), flush=True)


def _json_line(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()  # json.dumps would write NaN, which is not JSON


def main(argv: list[str] | None = None) -> None:
    """Run the command line; raises SystemExit with the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    as_json = not {"--json", "json", "--format=json"}.isdisjoint(arguments)
    try:
        app(args=arguments)
    except (AutoparError, HardwareFileError, UnknownHardware) as error:
        code = error.exit_code if isinstance(error, AutoparError) else UsageError.exit_code
        print(f"autopar: {error}", file=sys.stderr, flush=True)
        if as_json:
            _answer({"error": type(error).__name__, "message": str(error), "exit_code": code})
        raise SystemExit(code) from error
    except SystemExit as stop:
        if as_json and stop.code == UsageError.exit_code:  # typer has said on standard error what is wrong
            _answer({"error": "UsageError", "message": "wrong usage, see standard error", "exit_code": stop.code})
        raise


if __name__ == "__main__":
    main()
