"""The command line: `autopar plan | explain | sweep | fit | diff | verify | export | import | profile | demo | doctor`.

Exit codes: 0 done; 1 a check failed; 2 wrong usage or input; 3 infeasible; 4 the model cannot be captured. With --json
the last line of standard output is one JSON object, also for an error that autopar raises on purpose; everything else
goes to standard error. A bug of ours keeps its traceback.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from autopar.cli import checking, exchanging, planning, sweeping  # noqa: F401  they register their commands
from autopar.cli.answers import answer, folded
from autopar.cli.application import UsageError, app
from autopar.errors import AutoparError, Infeasible
from cost_models.cluster import HardwareFileError, UnknownHardware

__all__ = ["UsageError", "app", "main"]


def main(argv: list[str] | None = None) -> None:
    """Run the command line; raises SystemExit with the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    as_json = not {"--json", "json", "--format=json"}.isdisjoint(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files that are no text; a terminal with few characters
    try:
        app(args=arguments)
    except (AutoparError, HardwareFileError, UnknownHardware) as error:
        code = error.exit_code if isinstance(error, AutoparError) else UsageError.exit_code
        more = error.more if isinstance(error, Infeasible) else ()
        text = f"autopar: {error}{_rest(more, verbose=not {'-v', '--verbose'}.isdisjoint(arguments))}"
        long = isinstance(error, Infeasible) or sys.stderr.isatty()  # else what is said in a line can be found in a log
        print(folded(text) if long else text, file=sys.stderr, flush=True)
        if as_json:
            answer({"error": type(error).__name__, "message": str(error), "exit_code": code, **({"more": [*more]} if more else {})})
        raise SystemExit(code) from error
    except SystemExit as stop:
        if as_json and stop.code == UsageError.exit_code:  # typer has said on standard error what is wrong
            answer({"error": "UsageError", "message": "wrong usage, see standard error", "exit_code": stop.code})
        raise


def _rest(lines: Sequence[str], *, verbose: bool) -> str:
    """What else was refused, or how many."""
    if not lines or verbose:
        return "".join(f"\n{line}" for line in lines)
    return f"\n{len(lines)} more reason{'s' * (len(lines) > 1)}: autopar plan -v lists them"
