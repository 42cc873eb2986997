"""The example in the README runs as it stands there, and the commands it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import cli

README = Path(__file__).parent.parent / "README.md"


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
