"""The project's own arrangements: the layering of the packages, the benchmarks' runner."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure
ROOT = Path(__file__).parent.parent


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, wherever in the file it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_cost_models_know_neither_torch_nor_autopar() -> None:
    for path in (ROOT / "cost_models").rglob("*.py"):
        assert not imported(path) & {"torch", "autopar"}, path


def test_what_emitted_modules_import_does_not_import_the_planner() -> None:
    code = "import sys, autopar.run; print([m for m in sys.modules if m.startswith(('autopar.planner', 'autopar.capture', 'pulp'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("argv,code,text", [(["--list"], 0, ""), (["no_such"], 2, "there is no benchmark 'no_such'"), ([], 2, "usage:")])
def test_benchmarks_runner(argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.__main__ import main

    assert main(argv) == code
    captured = capsys.readouterr()
    assert text in captured.out + captured.err


def test_every_benchmark_has_a_description() -> None:
    from benchmarks.__main__ import names, summary

    assert [name for name in names() if summary(name) == "(no description)"] == []
