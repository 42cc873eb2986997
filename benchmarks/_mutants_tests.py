"""Runs pytest again and again, each time in a process forked from this one, which has imported much but nothing that is tested.

    python benchmarks/_mutants_tests.py MODULE ...

It reads lines of {"arguments": [...], "limit_s": ...} and writes lines of {"code": ..., "output": ..., "cpu_s": ...}. code: pytest's,
None beyond the limit (all processes of the run are ended then). It is run as a file, so that its own package is not imported.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

POLL_S = 0.02


def run(arguments: list[str], limit_s: float | None) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        pid = os.fork()
        if pid == 0:
            _tested(arguments, output.fileno())
        deadline = None if limit_s is None else time.monotonic() + limit_s
        code: int | None = None
        while True:
            done, status, used = os.wait4(pid, 0 if deadline is None else os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                break
            if deadline is not None and time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)  # its workers too
                _, _, used = os.wait4(pid, 0)
                break
            time.sleep(POLL_S)
        output.seek(0)
        return {"code": code, "output": output.read(), "cpu_s": used.ru_utime + used.ru_stime}


def _tested(arguments: list[str], output: int) -> None:
    """In the child, which ends here."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 3
    try:
        import pytest

        code = int(pytest.main(arguments))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    sys.path[0] = os.getcwd()  # not the folder of this file
    for name in (*sys.argv[1:], "pytest"):
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(run(request["arguments"], request["limit_s"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
