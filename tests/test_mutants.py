"""The benchmark of changes of meaning: each can still be made, in a copy alone, and what a test says of it is what is counted."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import mutants as benchmark
from benchmarks.mutants import ROOT, Copy, Mutant, Outcome, Stale, mutants

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("mutant", mutants(), ids=lambda m: m.name)
def test_a_change_can_be_made_and_its_tests_are_there(mutant: Mutant) -> None:
    before = (ROOT / mutant.file).read_text(encoding="utf-8")
    ast.parse(mutant.applied_to(before))
    assert mutant.breaks and mutant.tests and mutant.file.startswith(("autopar/", "cost_models/"))
    for place in mutant.tests:
        file, *of = place.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not of or f"def {of[0].partition('[')[0]}(" in text, place


def test_there_are_enough_changes_of_every_part() -> None:
    names = [m.name for m in mutants()]
    assert len(names) >= 67
    for part in ("planner", "memory", "cost", "catalog", "capture", "run", "verify", "store"):
        assert sum(name.startswith(f"{part}-") for name in names) >= 5, part


def toy(old: str, new: str) -> Mutant:
    return Mutant(name="toy", file="toy.py", old=old, new=new, breaks="", tests=("tests/test_toy.py",))


@pytest.mark.parametrize("old", ["return c", "a + b + c"])
def test_a_change_whose_place_is_gone_or_not_the_only_one_is_stale(old: str) -> None:
    with pytest.raises(Stale, match="toy: .* is [02] times in toy.py, not once"):
        toy(old, "").applied_to("def add(a, b):\n    return c\n    return c\n")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    """Of a toy project."""
    source = tmp_path_factory.mktemp("source")
    (source / "toy.py").write_text("def add(a, b):\n    return a + b\n\n\ndef wait(a):\n    while a < 0:\n        pass\n    return a\n")
    (source / "tests").mkdir()
    (source / "tests" / "test_toy.py").write_text("import toy\n\n\ndef test_add():\n    assert toy.add(2, 2) == 4 == toy.wait(4)\n")
    (source / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    made = Copy(source, tmp_path_factory.mktemp("copy"), ("toy.py", "tests", "pyproject.toml"), preloaded=())
    yield made
    made.close()


def test_killed_survived_hung_and_stale(copy: Copy) -> None:
    found = [
        copy.judge(toy(old, new), limit_s)
        for old, new, limit_s in (
            ("a + b", "a - b", None), ("a + b", "a * b", None), ("a < 0", "a > 0", 0.5), ("a ++ b", "a - b", None),
        )
    ]  # fmt: skip
    assert [o.outcome for o in found] == ["killed", "survived", "hung", "stale"], "2 * 2 is 2 + 2"
    assert found[0].by == "tests/test_toy.py::test_add"
    assert (copy.folder / "toy.py").read_text().startswith("def add(a, b):\n    return a + b\n"), "undone"
    with pytest.raises(RuntimeError, match="pytest does not run tests/test_none.py"):
        copy.judge(Mutant(name="none", file="toy.py", old="a + b", new="a - b", breaks="", tests=("tests/test_none.py",)))


def test_what_is_known_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = mutants()
    results = tmp_path / "results.jsonl"
    judged: list[str] = []

    def judge(self: object, mutant: Mutant, limit_s: float | None = None) -> Outcome:
        judged.append(mutant.name)
        return Outcome(name=mutant.name, key=mutant.key, outcome="killed" if mutant == first else "survived")

    monkeypatch.setattr(Copy, "__init__", lambda *_: None)
    monkeypatch.setattr(Copy, "close", lambda _: None)
    monkeypatch.setattr(Copy, "judge", judge)
    options = ["--names", f"{first.name},{second.name}", "--results", str(results), "--no-baseline"]
    for redo, again in (("", [first.name, second.name]), ("", []), ("survived", [second.name])):
        judged.clear()
        assert benchmark.main([*options, "--redo", redo]) == 1
        assert judged == again
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["mutants"], said["killed"], said["survived"], said["share"]) == (2, 1, 1, 0.5)
    assert said["names"]["survived"] == [second.name]
    assert benchmark.main(["--names", first.name, "--results", str(results), "--no-baseline"]) == 0
    assert benchmark.main(["--names", "nothing-of-this-name"]) == 2
    assert benchmark.main(["--list"]) == 0
