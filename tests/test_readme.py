"""The example in the README runs as it stands there; the commands, files and benchmarks that it and the pages under docs/ name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import cli

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.gloo
def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (float(x) for x in done.stdout.strip().strip("[]").split(","))
    assert first == second
    assert 0 < first < 2.3  # below the loss of a guess among ten classes


@pytest.mark.pure
def test_the_commands_are_those_of_the_command_line() -> None:
    named = set(re.findall(r"`autopar ([a-z]+)", README.read_text(encoding="utf-8")))
    assert named == {command.name or command.callback.__name__ for command in cli.app.registered_commands}


@pytest.mark.pure
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    linked = {page.parent / name for name in re.findall(r"\]\(([^)#:]+)\)", text)}
    files = {ROOT / name for name in re.findall(r"`((?:autopar|benchmarks|tests|cost_models|examples|docs)/[\w/.]+)`", text)}
    assert not [str(path.relative_to(ROOT)) for path in linked | files if not path.exists()]
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert set(re.findall(r"`autopar ([a-z]+)", text)) <= commands
    assert set(re.findall(r"python -m\s+benchmarks ([a-z_]+)", text)) <= benchmarks_named()


@pytest.mark.pure
def test_the_readme_leads_to_every_page() -> None:
    assert {page.name for page in PAGES[1:]} <= set(re.findall(r"\(docs/(\w+\.md)\)", README.read_text(encoding="utf-8")))


def benchmarks_named() -> set[str]:
    return {path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_")}
