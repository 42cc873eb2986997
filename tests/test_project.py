"""The project's own arrangements: the layering of the packages, the benchmarks' runner."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import networkx
import pytest

pytestmark = pytest.mark.pure
ROOT = Path(__file__).parent.parent


def modules() -> dict[str, Path]:
    """The two packages' modules by name."""
    paths = (path for package in ("autopar", "cost_models") for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def needs(node: ast.AST, known: Collection[str]) -> Iterator[str]:
    """The modules among these that code imports, wherever it does, but for what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in known)
        elif isinstance(child, ast.ImportFrom) and child.module:
            inner = (f"{child.module}.{alias.name}" for alias in child.names)
            yield from (name if name in known else child.module for name in inner if name in known or child.module in known)
        yield from needs(child, known)


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


def test_no_modules_need_one_another_in_a_circle() -> None:
    known = modules()
    graph = networkx.DiGraph()
    for name, path in known.items():
        graph.add_edges_from((name, other) for other in needs(ast.parse(path.read_text(encoding="utf-8")), known) if other != name)
    assert graph.number_of_edges() > 1000, "imports are found"
    assert [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1] == []


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
