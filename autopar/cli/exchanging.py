"""Commands about checkpoints: export, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.answers import answer
from autopar.cli.application import app
from autopar.cli.options import Json


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


def _say_exchanged(done: Any, as_json: bool) -> None:
    if as_json:
        left = {"left_out": list(done.left)} if done.left else {}
        answer({"written": [str(path) for path in done.written], "tensors": done.tensors, "bytes": done.nbytes, **left})
        return
    print(f"{done.tensors} tensors, {done.nbytes / 2**20:.1f} MiB, written to {' and '.join(map(str, done.written))}")
    for name in done.left:
        print(f"{name} is not in it: it is no tensor that a state_dict has by itself")
