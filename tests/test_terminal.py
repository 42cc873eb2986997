"""On a terminal, for which a pseudo-terminal stands: a bar that says what is found so far, and Ctrl-C that ends with the best plan.

The answer goes to a file, as behind `>`: a pseudo-terminal has lost, on a busy machine, what was written last."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.report.text import show

pytestmark = pytest.mark.pure

PATIENCE_S = 280  # for what the other side says; a loaded machine is slow
MODEL = '''
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(24))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def build():
    with torch.device("meta"):
        return Net(), (torch.empty(256, 128, 512),)
'''
# the same command line, in which every choice of the search waits for as long as a large model's would, and longer where one is first found
SLOW = """
import sys, time
from autopar.planner import search
wait, own, own_found, long = float(sys.argv.pop(1)), search.Search._pieces, search.found_so_far, set()
def slow(self, *args):
    time.sleep(wait)
    return own(self, *args)
def found(so_far):
    own_found(so_far)
    of = so_far().split()[2]
    if "best so far" in so_far() and of not in long:
        long.add(of)
        time.sleep(60 * min(wait, 0.1))
search.Search._pieces, search.found_so_far = slow, found
from autopar.cli import main
main(sys.argv[1:])
"""


LAST = "<nothing comes behind this>"


class Terminal:
    """A program whose input and errors are a terminal of 100 columns, and whose output is a file."""

    def __init__(self, folder: Path, wait_s: float, *words: str) -> None:
        (folder / "net.py").write_text(MODEL)
        self._errors, self._output = "", folder / "output"
        self.master, self.slave = pty.openpty()  # ours stays open: what is written last can be lost where a terminal is closed
        env = {**os.environ, "AUTOPAR_CACHE": "off", "COLUMNS": "100", "LINES": "40", "TERM": "xterm", "PYTHONUNBUFFERED": "1"}
        env.pop("RANK", None)
        # what is started in the background ignores the signal
        with self._output.open("wb") as output:
            self.program = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(SLOW), str(wait_s), *words], stdin=self.slave, stdout=output,
                stderr=self.slave, cwd=folder, env=env, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )  # fmt: skip

    @property
    def said(self) -> str:
        """The errors, and behind them the output."""
        return self._errors + self._output.read_text(errors="replace")

    def until(self, seen: Callable[[str], object]) -> bool:
        """Read until the text is as it should be, or the program has ended."""
        end = time.monotonic() + PATIENCE_S
        while not seen(self.said):
            if time.monotonic() > end:
                return False
            ended = self.program.poll() is not None
            ready, _, _ = select.select([self.master], [], [], 0.2)
            if ready:
                self._errors += os.read(self.master, 65536).decode(errors="replace")
            elif ended:
                return False
        return True

    def ended(self) -> int:
        """Wait until the program ends, and read all that it has written: a busy machine hands that over later."""
        self.until(lambda _: False)
        code = self.program.wait(timeout=60)
        os.write(self.slave, LAST.encode())
        while LAST not in self._errors:
            self._errors += os.read(self.master, 65536).decode(errors="replace")
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.program.kill()
        self.program.wait(timeout=60)
        os.close(self.master)
        os.close(self.slave)


def _plain(text: str) -> str:
    """Without colours and ends of lines."""
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split())


def test_a_bar_says_what_was_found_so_far_and_ctrl_c_ends_with_it(tmp_path: Path) -> None:
    with Terminal(tmp_path, 0.3, "plan", "net.py:build", "--gpus", "64", "--cluster", "dgx-h100") as terminal:
        assert terminal.until(lambda said: re.search(r"best so far [0-9.,]+ ms", _plain(said))), terminal.said[-2000:]
        shown = _plain(terminal.said)
        assert re.search(r"autopar: \S.*\d:\d\d:\d\d", shown), "a bar with what is done and for how long"
        assert re.search(r"\d+ of \d+ choices priced", shown)
        os.kill(terminal.program.pid, signal.SIGINT)
        code = terminal.ended()
        said = _plain(terminal.said)
        assert code == 0, said[-3000:]
        assert "Traceback" not in said
        assert "the best plan so far is the answer" in said
        assert re.search(r"the search was cut short: another plan may be faster by up to [0-9.]+%", said), said[-3000:]
        assert "an interrupt from the keyboard" in said


def test_the_second_ctrl_c_ends_the_program_without_a_traceback(tmp_path: Path) -> None:
    with Terminal(tmp_path, 5.0, "plan", "net.py:build", "--gpus", "64", "--cluster", "dgx-h100") as terminal:
        assert terminal.until(lambda said: "choices priced" in _plain(said)), terminal.said[-2000:]
        os.kill(terminal.program.pid, signal.SIGINT)
        assert terminal.until(lambda said: "Ctrl-C again ends the program" in _plain(said)), terminal.said[-2000:]
        os.kill(terminal.program.pid, signal.SIGINT)
        code = terminal.ended()
        assert code not in (0, None)
        assert "Traceback" not in terminal.said


def test_explain_says_the_verdict_before_what_is_tried_beside_it_and_ctrl_c_leaves_that_out(tmp_path: Path) -> None:
    words = ("explain", "net.py:build", "--gpus", "8", "--cluster", "dgx-h100", "--pin", "dp=8")
    with Terminal(tmp_path, 0.5, *words) as terminal:
        assert terminal.until(lambda said: "what limits it" in _plain(said)), terminal.said[-2000:]
        assert "families of plans" not in terminal.said
        os.kill(terminal.program.pid, signal.SIGINT)
        assert terminal.ended() == 0
        said = _plain(terminal.said)
        assert "Traceback" not in said and "figures roofline of" in said
        assert "ended by Ctrl-C" in said


CUT = r"the search was cut short: another plan may be faster by up to [0-9.]+%"
SCRIPT = (
    "torchrun --nproc_per_node=8 --nnodes 2 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 256 "
    "--use-distributed-optimizer\n"
)


@pytest.mark.parametrize(
    ("wait_s", "words", "at", "says"),
    [
        # in the search for the plan that is asked about: what it is compared with may not be the best, which is said
        (0.1, ["explain", "--gpus", "64", "--why-not", "tp=8"], r"best so far", [r"why not tp=8\?", f"chosen: {CUT}"]),
        (0.1, ["sweep", "--gpus", "64,128"], r"planning 64 GPUs[^a-z]+\d+ of \d+ choices priced, best so far",
         [f"64 GPUs of dgx-h100 .*: {CUT}", r"128 - .* not tried: ended by Ctrl-C", "the most of these that there is a plan for"]),
        (0.6, ["fit"], r"planning 1 GPU[^a-z]+\d+ of \d+ choices priced", [r"fits on 1 GPU of dgx-h100: Net on 1 x h100-sxm"]),
        (0.1, ["explain", "--from", "run.sh"], r"planning 16 GPUs[^a-z]+\d+ of \d+ choices priced, best so far",
         ["Megatron-LM, as it is configured", f"best for Megatron-LM: {CUT}", "ended by Ctrl-C: not all was tried"]),
    ],
    ids=["why-not", "sweep", "fit", "from"],
)  # fmt: skip
def test_ctrl_c_ends_a_question_with_what_is_known(tmp_path: Path, wait_s: float, words: list[str], at: str, says: list[str]) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    command, *options = words
    with Terminal(tmp_path, wait_s, command, "net.py:build", "--cluster", "dgx-h100", *options) as terminal:
        assert terminal.until(lambda said: re.search(at, _plain(said))), terminal.said[-2000:]
        os.kill(terminal.program.pid, signal.SIGINT)
        assert terminal.ended() == 0
        said = _plain(terminal.said)
        assert "Traceback" not in said and "the best plan so far is the answer" in said
        assert all(re.search(one, said) for one in says), said[-3000:]


def test_an_answer_on_a_terminal_is_the_same_words_with_headings_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = "why not tp=8?\ntp=8: 14.2 ms a step\n\nwhat changed  chosen  tp=8\n  mesh        dp 32   ### 4.9"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", shown := Tty())
    show(text)
    words = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert words == f"{text}\n"
    assert "\x1b[1mwhy not tp=8?\x1b[0m" in shown.getvalue() and "\x1b[36m###\x1b[0m" in shown.getvalue()
