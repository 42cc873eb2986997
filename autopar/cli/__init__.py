"""The command line: `autopar plan | explain | sweep | fit | diff | verify | export | import | profile | demo | doctor`.

Exit codes: 0 done; 1 a check failed; 2 wrong usage or input; 3 infeasible; 4 the model cannot be captured. With --json
the last line of standard output is one JSON object, also for an error that autopar raises on purpose; everything else
goes to standard error. A bug of ours keeps its traceback.
"""

from __future__ import annotations

import sys

from autopar.cli import checking, exchanging, planning, sweeping  # noqa: F401  they register their commands
from autopar.cli.answers import answer
from autopar.cli.application import UsageError, app
from autopar.errors import AutoparError
from cost_models.cluster import HardwareFileError, UnknownHardware

__all__ = ["UsageError", "app", "main"]


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
            answer({"error": type(error).__name__, "message": str(error), "exit_code": code})
        raise SystemExit(code) from error
    except SystemExit as stop:
        if as_json and stop.code == UsageError.exit_code:  # typer has said on standard error what is wrong
            answer({"error": "UsageError", "message": "wrong usage, see standard error", "exit_code": stop.code})
        raise
