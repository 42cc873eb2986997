"""What a forward prints and logs is said by the calls of the program, and not while the model is captured."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import TextIO

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.said import Logged, Sayings, Written, heard
from autopar.errors import CaptureError

pytestmark = pytest.mark.pure

_LOG = logging.getLogger("test.said")


class Talks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.seen:
            print("hello")
            self.seen = True
        print("samples:", len(x))
        _LOG.warning("%d samples", len(x))
        return self.layer(x).sum()


class Shows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        print(f"mean: {x.mean(0)}")
        return self.layer(x).sum()


def test_calls_say_what_the_first_and_later_ones_say(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    guards = capture(Talks(), (torch.randn(4, 3),)).guards
    assert guards is not None
    assert capsys.readouterr().out == "" and not [r for r in caplog.records if r.name == _LOG.name]
    for said in ("hello\nsamples: 4\n", "samples: 4\n", "samples: 4\n"):
        caplog.clear()
        guards.leave({})
        assert capsys.readouterr().out == said
        assert caplog.messages == ["4 samples"]


def test_values_that_are_printed_are_refused() -> None:
    with pytest.raises(CaptureError, match="prints or logs a tensor"):
        capture(Shows(), (torch.randn(4, 3),))


def test_other_threads_are_not_heard(capsys: pytest.CaptureFixture[str]) -> None:
    with heard() as said:
        print("a", end="")
        print("b")
        _LOG.warning("c")
        thread = threading.Thread(target=print, args=("d",))
        thread.start()
        thread.join()
    assert capsys.readouterr().out == "d\n"
    assert said[0] == Written("ab\n")
    assert isinstance(said[1], Logged) and (said[1].logger, said[1].message) == ("test.said", "c")


class Notes(nn.Module):
    """Writes to a file that is open."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self.layer, self.file = nn.Linear(3, 2), file

    def forward(self, x: Tensor) -> Tensor:
        self.file.write("called")
        return self.layer(x).sum()


def test_a_file_that_is_open_is_watched(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as file, pytest.raises(CaptureError, match="from file at 12 to file at 18"):
        capture(Notes(file), (torch.randn(4, 3),))


class Errs(nn.Module):
    """Writes to standard error, and asks how often its weight was written to."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(3, 2), asks

    def forward(self, x: Tensor) -> Tensor:
        print("to", file=sys.stderr)
        return self.layer(x).sum() * (2 if self.asks and self.layer.weight._version > 1 else 1)


def test_standard_error_is_heard_too(capsys: pytest.CaptureFixture[str]) -> None:
    guards = capture(Errs(False), (torch.randn(4, 3),)).guards
    assert guards is not None and capsys.readouterr().err == ""
    guards.leave({})
    assert capsys.readouterr().err == "to\n"


def test_versions_of_weights_are_refused() -> None:
    with pytest.raises(CaptureError, match="how often one of its own parameters or buffers was written to"):
        capture(Errs(True), (torch.randn(4, 3),))


def test_sayings_begin_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    sayings = Sayings([Written("1")], [Written("2")])
    for _ in range(3):
        sayings.again()
    assert capsys.readouterr().out == "122"


class Files(nn.Module):
    """Its calls are written to a file."""

    def __init__(self, path: Path, by_path: bool) -> None:
        super().__init__()
        self.layer, self.path, self.by_path = nn.Linear(3, 2), path, by_path

    def forward(self, x: Tensor) -> Tensor:
        if self.by_path:
            self.path.write_text("called")
        else:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("called")
        return self.layer(x).sum()


@pytest.mark.parametrize("by_path", [True, False])
def test_files_that_a_forward_writes_are_refused(tmp_path: Path, by_path: bool) -> None:
    with pytest.raises(CaptureError, match="writes to a file"):
        capture(Files(tmp_path / "log", by_path), (torch.randn(4, 3),))
    assert not (tmp_path / "log").exists()
