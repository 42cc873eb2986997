"""No two modules need one another: what stands below does not know what stands above it."""

from __future__ import annotations

import ast
from pathlib import Path

import networkx
import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parent.parent


def _modules() -> dict[str, Path]:
    """Module -> its file, of the packages that are installed and of the benchmarks."""
    files = [path for package in ("autopar", "cost_models", "benchmarks") for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def _imported(tree: ast.AST, module: str, known: dict[str, Path]) -> set[str]:
    """What a file imports of these modules, anywhere in it: in functions too, and for annotations alone (TYPE_CHECKING), since a reader
    needs both files then as well."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{module} imports relative to itself"
            found |= {inner if (inner := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
    return (found & set(known)) - {module}


def test_no_modules_need_one_another() -> None:
    known = _modules()
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    graph.add_nodes_from(known)
    for module, path in known.items():
        graph.add_edges_from((module, other) for other in _imported(ast.parse(path.read_text()), module, known))
    assert {"autopar.planner.search", "cost_models.pipeline", "benchmarks.published"} <= set(graph) and graph.number_of_edges() > 500
    together = [sorted(component) for component in networkx.strongly_connected_components(graph) if len(component) > 1]
    assert not together, f"these modules import one another: {together}"


def test_imports_for_annotations_and_in_functions_count() -> None:
    known = {"a": Path("a.py"), "a.b": Path("a/b.py"), "c": Path("c.py")}
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import b\ndef f():\n    import c\n"
    assert _imported(ast.parse(source), "a", known) == {"a.b", "c"}
