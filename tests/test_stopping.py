"""Ctrl-C while a plan is searched."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planner_programs import captured_of

from autopar import plan_cache
from autopar.planner import make_plan
from autopar.planning import wishes
from autopar.report.explanation import explanation_of
from autopar.stopping import stopped_by_user
from cost_models.cluster import load_cluster

pytestmark = pytest.mark.pure


def test_a_search_that_is_stopped_has_its_best_with_an_honest_gap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    captured, _ = captured_of("pair")
    cluster = load_cluster("dgx-h100")
    whole = make_plan(captured.program, 8, cluster)
    stopped = make_plan(captured.program, 8, cluster, stop=lambda: True)
    assert stopped.searched["unexplored"] > 0 and any("interrupt from the keyboard" in note for note in stopped.notes)
    assert stopped.bound_s <= whole.step_time_s <= stopped.step_time_s
    assert "cut short" in explanation_of(stopped).verdict
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr("autopar.planning.stopped_by_user", _pressed)
    made = wishes(8, cluster="dgx-h100")(captured)
    assert made.searched["unexplored"] > 0 and not list((tmp_path / "plans").glob("*.plan")), "it is not kept"
    assert plan_cache.cache_folder() == tmp_path / "plans"


class Locked(io.StringIO):
    """An error stream that is written to under a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def write(self, text: str) -> int:
        with self.lock:
            return super().write(text)


def test_ctrl_c_is_noted_while_the_stream_is_locked_that_would_say_it(monkeypatch: pytest.MonkeyPatch, sigint: None) -> None:
    """As by what draws a bar at that moment, in the same thread."""
    stream = Locked()
    monkeypatch.setattr(sys, "stderr", stream)
    with stopped_by_user() as stop:
        with stream.lock:
            signal.raise_signal(signal.SIGINT)
            assert stop()
    assert "the best plan so far is the answer" in stream.getvalue()


class _pressed:  # noqa: N801  (it stands for a function)
    def __enter__(self) -> Any:
        return lambda: True

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def sigint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program that handles Ctrl-C as Python does."""
    monkeypatch.delenv("RANK", raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_is_noted_and_the_second_one_ends(capsys: pytest.CaptureFixture[str], sigint: None) -> None:
    with stopped_by_user() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "the best plan so far is the answer" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(_handler_inside()))
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler], "another thread changes no handler"


def _handler_inside() -> object:
    with stopped_by_user():
        return signal.getsignal(signal.SIGINT)
