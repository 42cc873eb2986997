"""Kill -9 of a rank at random moments: what is lost, how long the others take to end, what they say.

Each start of the job trains under one of several plans (one of them on a single process), loads the last checkpoint and saves after
every step. One of its ranks kills itself at a drawn moment of a drawn phase: forward, backward, the optimizer's step, while saving (at once
or beside training), or between. It is then started again, under another plan. The losses at the end are compared with those of the
original model that nobody interrupted. A count of zero is wanted of all but the kills; a moment that a run does not reach is drawn again.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch._dynamo  # noqa: F401  (which the first optimizer imports: once, not in each rank)
from torch import Tensor

import autopar.checkpoint  # noqa: F401
from benchmarks._faults_job import PHASES, PLANS, Job, Kill, emitted, noting_cost, reference, run_rank

__all__ = ["main"]

LIMIT_S = 60.0  # for the others to end; what is printed is how long they took
TOLERANCE = 1e-10
_SAYS = {
    "forward": "forward", "backward": "backward", "optimizer": "the optimizer's step", "saving": "saving a checkpoint",
    "between": "outside of the model",
}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = Path(tempfile.mkdtemp(prefix="autopar-faults-"))
    rank: _Rank | None = None
    try:
        code = _run(options.kills, random.Random(options.seed), folder)
    except _Rank as forked:
        rank = forked
    if rank is not None:  # and ends as an interpreter ends
        run_rank(rank.job, rank.rank, rank.made)
        return 0
    shutil.rmtree(folder)
    return code


def _in_a_child(what: object, path: Path) -> None:
    """Backward must not run in the process that ranks are forked from."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            path.write_bytes(pickle.dumps(what()))  # type: ignore[operator]
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("the job could not be prepared")


def _cost_of_noting(folder: Path) -> tuple[float, float]:
    other = os.fork()
    if other == 0:
        try:
            noting_cost(folder / "store-noting", 1)
        finally:
            os._exit(0)
    _in_a_child(lambda: noting_cost(folder / "store-noting", 0), folder / "noting")
    os.waitpid(other, 0)
    found: tuple[float, float] = pickle.loads((folder / "noting").read_bytes())
    return found


def _run(kills: int, draw: random.Random, folder: Path) -> int:
    steps = 3 * kills  # more than there can be: each start makes a step or two
    _in_a_child(lambda: ({plan: emitted(plan) for plan in PLANS}, reference(steps)), folder / "prepared")
    made, expected = pickle.loads((folder / "prepared").read_bytes())
    noting = _cost_of_noting(folder)
    counts: Counter[str] = Counter()
    ends: list[float] = []
    phases: Counter[str] = Counter()
    saved, number = 0, 0
    plans = list(PLANS)
    while counts["kills"] < kills:
        plan = plans[number % len(plans)]
        phase = list(PHASES)[(number // len(plans) + number) % len(PHASES)]
        kill = Kill(rank=draw.randrange(PLANS[plan][0]), phase=phase, share=draw.random())
        job = Job(folder=folder, store=folder / f"store-{number}", plan=plan, steps=steps, asynchronous=draw.random() < 0.5, kill=kill)
        number += 1
        found = _start(job, made[plan])
        if not found.killed:
            counts["not reached"] += 1
            print(f"start {number} did not come to it ({plan}, {kill}): from {found.began} to {found.saved}\n{found.text}", flush=True)
            if counts["not reached"] > kills:
                raise RuntimeError("most moments are not reached")
            continue
        counts["kills"] += 1
        phases[phase] += 1
        ends.append(found.seconds)
        counts["hangs"] += found.hung
        if found.began < saved:
            counts["lost"] += 1
            print(f"start {number}: a checkpoint of {saved} steps was complete, and {found.began} were loaded")
        saved = max(saved, found.saved)
        if PLANS[plan][0] > 1:
            wanted = rf"^autopar: rank {kill.rank} of 2 \(process \d+\) was killed, or crashed, .*{_SAYS[phase]}"
            said = [line for line in found.text.splitlines() if line.strip()]
            if len(said) != 1 or not re.match(wanted, said[0]):
                counts["other messages"] += 1
                print(f"start {number} ({plan}, {kill}, {'beside' if job.asynchronous else 'at once'}):\n{found.text}")
    last = Job(folder=folder, store=folder / "store-last", plan="dp2", steps=saved + 3, asynchronous=False, kill=None)
    found = _start(last, made["dp2"])
    error = max((abs(a - b) / abs(b) for a, b in zip(found.losses, expected, strict=False)), default=float("inf"))
    wrong = len(found.losses) != saved + 3 or not error <= TOLERANCE
    ends.sort()
    print(f"{counts['kills']} kills: {', '.join(f'{n} {phase}' for phase, n in phases.items())}; {saved} steps saved on the way")
    print(f"the others ended within {ends[len(ends) // 2]:.2f} s at the median, {ends[-1]:.2f} s at most; hangs: {counts['hangs']}")
    print(f"complete checkpoints lost: {counts['lost']}; messages that do not name the rank and its phase: {counts['other messages']}")
    print(f"a collective is noted in {noting[0] * 1e9:.0f} ns, {noting[0] / noting[1]:.2%} of the smallest one on two ranks (gloo)")
    print(f"losses of the whole run against one that nobody interrupted: largest relative difference {error:.1e}")
    result = {
        "kills": counts["kills"], "phases": dict(phases), "hangs": counts["hangs"], "lost": counts["lost"],
        "other_messages": counts["other messages"], "loss_error": error, "end_s": [ends[len(ends) // 2], ends[-1]],
        "noting_s": noting[0], "noting_share": noting[0] / noting[1],
    }  # fmt: skip
    print(json.dumps(result))
    return int(wrong or bool(counts["hangs"] or counts["lost"] or counts["other messages"]))


class _Found:
    """killed: whether the moment came; seconds: from then until all had ended; began, saved: steps in the checkpoint that was loaded, and
    that was last complete."""

    def __init__(self) -> None:
        self.killed = self.hung = False
        self.seconds, self.began, self.saved = 0.0, 0, 0
        self.text = ""
        self.losses: list[float] = []


def _start(job: Job, made: tuple[str, dict[str, Tensor]]) -> _Found:
    gpus, _ = PLANS[job.plan]
    found = _Found()
    (read, write), (err_read, err_write) = os.pipe(), os.pipe()
    ranks = {}
    for rank in range(gpus):
        child = os.fork()
        if child == 0:
            os.dup2(err_write, 2)
            os.dup2(write, 3)
            for end in {read, write, err_read, err_write} - {3}:
                os.close(end)
            raise _Rank(job, rank, made)
        ranks[child] = rank
    os.close(write)
    os.close(err_write)
    died: float | None = None
    out, err = b"", b""
    began = time.monotonic()
    while ranks:
        for end in select.select([read, err_read], [], [], 0.01)[0]:
            data = os.read(end, 65536)
            out, err = (out + data, err) if end == read else (out, err + data)
        for child in list(ranks):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                rank = ranks.pop(child)
                if os.waitstatus_to_exitcode(status) == -signal.SIGKILL and job.kill is not None and rank == job.kill.rank:
                    found.killed, died = True, time.monotonic()
        now = time.monotonic()
        if ranks and ((died is not None and now - died > LIMIT_S) or now - began > 10 * LIMIT_S):
            found.hung = True
            for child in ranks:
                os.kill(child, signal.SIGKILL)
    found.seconds = time.monotonic() - died if died is not None else 0.0
    for end, kept in ((read, "out"), (err_read, "err")):
        while data := os.read(end, 65536):
            out, err = (out + data, err) if kept == "out" else (out, err + data)
        os.close(end)
    found.text = err.decode(errors="replace")
    for line in out.decode().splitlines():
        what, *numbers = line.split()
        if what == "from":
            found.began = int(numbers[0])
        elif what == "saved":
            found.saved = max(found.saved, int(numbers[0]))
        elif what == "losses":
            found.losses = [float(x) for x in numbers]
    return found


class _Rank(BaseException):
    """Unwinds a forked child to where it is a program of its own."""

    def __init__(self, job: Job, rank: int, made: tuple[str, dict[str, Tensor]]) -> None:
        self.job, self.rank, self.made = job, rank, made
