"""Run a benchmark by name: `python -m benchmarks NAME [options]`; `--list` names them.

A benchmark is a module of this package whose docstring's first line says what it measures, with a function
`main(argv: list[str]) -> int`: it prints a table and, as the last line of standard output, one JSON object, and returns
the exit code. Nothing is registered anywhere: a file put into this folder is a benchmark.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
USAGE = "usage: python -m benchmarks NAME [options] | --list"


def names() -> list[str]:
    """The benchmarks' names, sorted; files that begin with an underscore are not benchmarks."""
    return sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))


def summary(name: str) -> str:
    """The first line of a benchmark's docstring, read without importing it (importing torch takes seconds)."""
    doc = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
    return doc.splitlines()[0] if doc else "(no description)"


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "--list"):
        if not argv or argv[0] != "--list":
            print(USAGE)
        width = max(map(len, names()), default=0)
        for name in names():
            print(f"{name:<{width}}  {summary(name)}")
        return 0 if argv else 2
    name, *options = argv
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`python -m benchmarks --list` names them"
        print(f"there is no benchmark {name!r}; {hint}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"benchmarks.{name}").main(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
