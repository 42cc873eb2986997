"""The application that commands register at. What a command needs is imported inside it: `autopar --help` must not wait for torch."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from autopar.errors import AutoparError

__all__ = ["UsageError", "app"]

app = typer.Typer(
    name="autopar", help="Finds and runs the best parallel form of a PyTorch model.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


class UsageError(AutoparError, ValueError):
    """An option whose value makes no sense."""


def _said(wanted: bool) -> None:
    if wanted:
        print(f"autopar {metadata.version('autopar')}, torch {metadata.version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _of_all(
    version: bool = typer.Option(False, "--version", callback=_said, is_eager=True, help="Print the versions of autopar and torch."),
) -> None:
    """Finds and runs the best parallel form of a PyTorch model."""
