"""The options that commands share, and from their text to values. Raises UsageError for what makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from autopar.cli.application import UsageError
from autopar.files import check_writable, is_file
from cost_models.cluster import MOST_GPUS

if TYPE_CHECKING:
    from autopar.planner import Pins

Target = Annotated[str, typer.Argument(help="file.py:name or package.module:name, a callable that returns (model, example_inputs)")]
Gpus = Annotated[int, typer.Option("--gpus", help="number of GPUs (workers on this machine for verify)")]
Cluster = Annotated[str, typer.Option("--cluster", help="a catalogued cluster, or a FILE.toml; auto: this machine's devices")]
Memory = Annotated[str | None, typer.Option("--memory", help="memory of one GPU that a plan may use, such as 80GiB")]
PinList = Annotated[list[str] | None, typer.Option("--pin", help="fix a choice, such as tp=2; may be given many times")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="its states are priced: adamw, adam, sgd, ...")]
Precision = Annotated[str, typer.Option("--precision", help="fp32, bf16, ...")]
ReduceDtype = Annotated[str | None, typer.Option("--reduce-dtype", help="of gradients as they are sent (default: as parameters rest)")]
Loss = Annotated[str | None, typer.Option("--loss", help="file.py:name of fn(output) -> scalar, for a model that computes no loss")]
TimeLimit = Annotated[float | None, typer.Option("--time-limit", help="seconds; then the best plan so far, and what was left is said")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="every table and figure")]
Json = Annotated[bool, typer.Option("--json", help="the last line of standard output is one JSON object")]


def check_gpus(gpus: int) -> None:
    if gpus < 1:
        raise UsageError(f"--gpus must be 1 or more, not {gpus}")
    if gpus > MOST_GPUS:
        raise UsageError(f"--gpus must be {MOST_GPUS:,} or less, not {gpus:,}")


def check_device(device: str | None) -> None:
    if device not in (None, "cuda", "cpu"):
        raise UsageError(f"--device must be cuda or cpu, not {device!r}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--device cuda needs a GPU, and torch sees none on this machine")


def check_time_limit(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UsageError(f"--time-limit must be a positive number of seconds, not {seconds:g}")


def memory_of(text: str | None) -> int | None:
    from autopar.planner.resources import parse_memory

    try:
        return parse_memory(text)
    except ValueError as error:
        raise UsageError(f"--memory: {error}") from error


def loss_of(target: str | None) -> Any:
    from autopar.targets import load_object

    if target is None:
        return None
    loss = load_object(target)
    if not callable(loss):
        raise UsageError(f"--loss {target} is of type {type(loss).__name__}; needed is a function of the model's output")
    return loss


def pins_of(texts: list[str] | None) -> Pins | None:
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


def readable(path: Path) -> Path:
    if not is_file(path):
        from autopar.targets import did_you_mean

        known = [p.name for p in path.parent.glob("*.json")] if len(str(path)) < 1000 and path.parent.is_dir() else []
        raise UsageError(f"there is no plan file {path}{did_you_mean(path.name, known)}")
    return path


def writable(path: Path | None) -> None:
    """Said before the plan is made, not after."""
    if path is not None:
        check_writable(path)
