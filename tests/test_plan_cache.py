"""The plan cache: hits, misses on every part of the question, damage, several processes at once."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import autopar
from autopar import plan_cache, planning
from autopar.capture import Captured, capture
from autopar.compiler import plan_of
from autopar.errors import Infeasible
from autopar.planner import Plan

pytestmark = pytest.mark.pure


class Small(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.second(self.first(x).relu()), y)


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.two(self.one(x).relu()), y)


def captured(model: nn.Module | None = None, samples: int = 8, dtype: torch.dtype = torch.float32) -> Captured:
    inputs = (torch.randn(samples, 8, dtype=dtype), torch.randint(4, (samples,)))
    return capture((model or Small()).to(dtype), inputs)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """One entry for every search that ran."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    done: list[int] = []
    real = planning.make_plan

    def counted(*args: object, **wanted: object) -> Plan:
        done.append(1)
        return real(*args, **wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "make_plan", counted)
    return done


def entry(folder: Path) -> Path:
    [found] = (folder / "plans").glob("*.plan")
    return found


def ask(program: Captured | None = None, gpus: int = 2, **wanted: object) -> Plan:
    return plan_of(program or captured(), gpus, **{"cluster": "dgx-a100", **wanted})


def test_the_same_question_is_searched_once(searches: list[int], tmp_path: Path) -> None:
    first = ask()
    anew = captured(Small())
    start = time.process_time()
    again = ask(anew)
    assert time.process_time() - start < 1, "after capture"
    assert again.to_json() == first.to_json() and len(searches) == 1
    inputs = (torch.randn(8, 8), torch.randint(4, (8,)))
    assert autopar.plan(Small(), 2, example_inputs=inputs, cluster="dgx-a100").to_json() == first.to_json()
    assert len(searches) == 1


def test_what_a_clock_has_cut_short_is_not_kept(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    real, short = planning.make_plan, {"unexplored": 3}
    monkeypatch.setattr(planning, "make_plan", lambda *a, **k: msgspec.structs.replace(real(*a, **k), searched=short))
    for _ in range(2):
        assert ask(time_limit=5.0).searched == short
    assert len(searches) == 2
    short.clear()
    for _ in range(2):
        ask(time_limit=5.0)
    ask()
    assert len(searches) == 3, "one that it did not reach is the same as without it"


@pytest.mark.parametrize(
    "changed",
    [{"gpus": 4}, {"cluster": "dgx-h100"}, {"memory": "20GiB"}, {"optimizer": "sgd"}, {"precision": "bf16"}, {"pins": {"dp": 2}}],
    ids=str,
)
def test_another_wish_is_another_question(searches: list[int], changed: dict[str, object]) -> None:
    ask()
    ask(**changed)  # type: ignore[arg-type]
    assert len(searches) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: captured(Small(32)),
        lambda: captured(Renamed()),
        lambda: captured(samples=16),
        lambda: captured(dtype=torch.float64),
    ],
    ids=["width", "names", "batch", "dtype"],
)
def test_another_program_is_another_question(searches: list[int], make: Callable[[], Captured]) -> None:
    ask()
    ask(make())
    assert len(searches) == 2


def test_another_version_is_another_question(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    program = captured()
    ask(program)
    for part in ("torch", "highspy", "networkx"):
        monkeypatch.setattr(plan_cache, "_version", lambda name, part=part: f"{name} {'9' if name == part else '1'}")
        before = len(searches)
        ask(program)
        assert len(searches) == before + 1, part
    monkeypatch.setattr(plan_cache, "_own_source", lambda: "changed")
    before = len(searches)
    ask(program)
    assert len(searches) == before + 1


def test_another_rule_is_another_question(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ask()
    monkeypatch.setitem(plan_cache.RULES, "toy.operator", next(iter(plan_cache.RULES.values())))
    ask()
    assert len(searches) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "a digit", "not text"])
def test_a_damaged_entry_is_made_anew_and_said(searches: list[int], tmp_path: Path, damage: str) -> None:
    program = captured()
    first = ask(program)
    path = entry(tmp_path)
    data = path.read_bytes()
    place = data.rindex(b'"step_time_s": ') + len(b'"step_time_s": ')
    flipped = data[:place] + (b"1" if data[place : place + 1] != b"1" else b"2") + data[place + 1 :]
    path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "a digit": flipped, "not text": b"\xff\x80"}[damage])
    again = ask(program)
    assert len(searches) == 2
    assert "planned anew: the plan that was kept was damaged" in again.notes
    assert path.read_bytes().partition(b"\n")[2] != data and ask(program).notes == first.notes and len(searches) == 2


def rewritten(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """An entry with a right checksum and another content."""
    content = msgspec.json.decode(path.read_bytes().partition(b"\n")[2])
    change(content)
    text = msgspec.json.encode(content)
    path.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


@pytest.mark.parametrize(
    "change,reason",
    [
        (lambda c: c.update(version=99), "is a plan of version 99"),
        (lambda c: c.update(format="other"), "is not an autopar plan"),
        (lambda c: c.update(program_hash="0" * 64), "it is for another program"),
        (lambda c: c["axes"]["dp"]["ops"].update(dict.fromkeys(c["axes"]["dp"]["ops"], "S(0) -> S(1)")), "does not hold any more"),
    ],
    ids=["version", "format", "program", "unsound"],
)
def test_an_entry_that_does_not_hold_is_made_anew_and_said(
    searches: list[int], tmp_path: Path, change: Callable[[dict[str, object]], object], reason: str
) -> None:
    program = captured()
    first = ask(program, pins={"dp": 2})
    rewritten(entry(tmp_path), change)
    again = ask(program, pins={"dp": 2})
    assert len(searches) == 2
    assert len(again.notes) == len(first.notes) + 1 and reason in again.notes[-1]


def test_an_infeasible_question_is_asked_again(searches: list[int], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(Infeasible):
            ask(memory="1KiB")
    assert len(searches) == 2 and not list((tmp_path / "plans").glob("*.plan"))


@pytest.mark.parametrize("off", ["off", "0", ""])
def test_it_can_be_switched_off(searches: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, off: str) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", off)
    ask()
    ask()
    assert len(searches) == 2 and not list(tmp_path.iterdir())


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AUTOPAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan_cache.cache_folder() == tmp_path / "autopar" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert plan_cache.cache_folder() == tmp_path / "home" / ".cache" / "autopar" / "plans"


def test_a_folder_that_cannot_be_used_is_no_error(searches: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "file"))
    assert ask().gpus == 2 and len(searches) == 1


def _process(folder: str, go: object, results: object) -> None:
    os.environ["AUTOPAR_CACHE"] = folder
    program = captured()
    real = planning.make_plan

    def counted(*args: object, **wanted: object) -> Plan:
        (Path(folder) / f"search-{os.getpid()}").touch()
        time.sleep(1.0)  # long enough that the others come while it goes on
        return real(*args, **wanted)  # type: ignore[arg-type]

    planning.make_plan = counted
    go.wait()  # type: ignore[attr-defined]
    results.put(ask(program).to_json())  # type: ignore[attr-defined]


def test_processes_that_ask_at_once_plan_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # torch with CUDA has threads that a fork does not survive
    go, results = context.Event(), context.Queue()
    workers = [context.Process(target=_process, args=(str(tmp_path), go, results)) for _ in range(2)]
    for w in workers:
        w.start()
    go.set()
    plans = [results.get(timeout=120) for _ in workers]
    for w in workers:
        w.join(timeout=60)
    assert len(list(tmp_path.glob("search-*"))) == 1
    assert plans[0] == plans[1] == entry(tmp_path).read_bytes().partition(b"\n")[2]
    assert not list((tmp_path / "plans").glob("*.part"))


def test_identity_is_of_all_that_a_plan_names() -> None:
    program = captured().program
    same = plan_cache.identity(program)
    assert plan_cache.identity(captured().program) == same
    op = dataclasses.replace(program.ops[0], source="elsewhere.py:1")
    for changed in (
        program.replace(name="other"),
        program.replace(ops=(op, *program.ops[1:])),
        program.replace(blocks=()) if program.blocks else program.replace(notes=("a note",)),
        program.replace(types={**program.types, program.loss: dataclasses.replace(program.types[program.loss], grad=False)}),
    ):
        assert plan_cache.identity(changed) != same


def test_entries_are_readable_plans_of_the_user_alone(searches: list[int], tmp_path: Path) -> None:
    ask()
    assert stat.S_IMODE(entry(tmp_path).stat().st_mode) & 0o077 == 0
