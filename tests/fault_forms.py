"""Training scripts in which something goes wrong, run by several ranks each: `python fault_forms.py`.

Each line of standard input asks for one: a JSON object of its form, a folder of its own and its environment. The answer is one line: a JSON
object of the exit code of each rank, what each wrote to its standard error, in one text, and its steps; or of the code with which the
script ended without an answer. The ranks are forked from one process that has imported everything, go on as scripts of their own, and end
as interpreters end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from run_model import Model, batch, emitted, tensors  # noqa: E402

import autopar  # noqa: E402
import autopar.checkpoint  # noqa: E402, F401
import autopar.run.preloaded  # noqa: E402, F401  (once, not in each rank)
from autopar.checkpoint import saving  # noqa: E402
from autopar.run import ParallelModule, watchdog  # noqa: E402


def asked() -> tuple[str, str]:
    """In a process of its own for each line: the form and the folder. The process that reads the lines never returns."""
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            request = json.loads(line)
            os.environ.update(request["environment"])
            return request["form"], request["folder"]
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            print(json.dumps({"ended": code}), flush=True)
    os._exit(0)


FORM, FOLDER = asked()
with socket.socket() as free:
    free.bind(("localhost", 0))
    PORT = free.getsockname()[1]
RANKS = 4 if FORM == "raises, of four" else 2


def in_no_hurry() -> None:
    time.sleep(1000)


def start() -> int | None:
    """In a rank, its number; None in the process that has seen all of them end."""
    read, write = os.pipe()
    out, told = os.pipe()
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            os.dup2(write, 2)
            os.dup2(told, 3)
            return rank
        pids.append(pid)
    os.close(write)
    os.close(told)
    text, steps, sent = b"", b"", False
    codes: dict[int, int] = {}
    ends = {read, out}
    while ends:
        for end in select.select(list(ends), [], [])[0]:
            data = os.read(end, 65536)
            text, steps = (text + data, steps) if end == read else (text, steps + data)
            if not data:
                ends.discard(end)
        if FORM in ("asked to leave", "asked, of no loop that asks") and not sent and b"step 3 of rank 1" in steps:
            os.kill(pids[1], signal.SIGTERM)
            sent = True
    for rank, pid in enumerate(pids):
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps({"codes": [codes[rank] for rank in range(RANKS)], "text": text.decode(), "steps": steps.decode()}), flush=True)
    return None


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kind = torch.nn.Linear(4, 4), "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean() * {"a": 1.0, "b": 2.0, "c": 3.0}[self.kind]


def other_shapes(rank: int) -> None:
    """Both sizes are known on both ranks, when the ranks are given one each. Every collective of a step is of as many elements for both
    sizes; without steps in between, two of the ranks' collectives of other kinds would meet."""
    model = autopar.compile(Plain(), gpus=2, example_inputs=(torch.ones(8, 4),), cluster="cpu", pins={"dp": 2})
    for step, size in enumerate((8, 4, 8, 4, 8, 4, 8 if rank == 0 else 4)):
        if FORM == "other shapes":
            with torch.no_grad():
                model(torch.ones(size, 4))
        loss = model(torch.ones(size, 4))
        loss.backward()
        os.write(3, f"step {step} of rank {rank}\n".encode())


def called_once_more(rank: int) -> None:
    """By rank 0, with the batch that all are given next; to evaluate it, or with gradients."""
    model = autopar.compile(Plain(), gpus=2, example_inputs=(torch.ones(8, 4),), cluster="cpu", pins={"dp": 2})
    for step in range(8):
        if rank == 0 and step == 5:
            with torch.set_grad_enabled(FORM.endswith("with gradients")):
                model(torch.ones(8, 4))
        model(torch.ones(8, 4)).backward()
        os.write(3, f"step {step} of rank {rank}\n".encode())


def captured_again(rank: int) -> None:
    """What capture has frozen changes on all ranks, then on one alone; or one alone is given a size that is not known."""
    model = autopar.compile(Plain(), gpus=2, example_inputs=(torch.ones(8, 4),), cluster="cpu", pins={"dp": 2})
    for step in range(6):
        if step == 4:
            model.original.kind = "b"
        loss = model(torch.ones(8, 4))
        loss.backward()
        os.write(3, f"step {step} of rank {rank}\n".encode())
    if rank == 1 and FORM.startswith("changed on one rank"):
        model.original.kind = "c"
    model(torch.ones(16 if rank == 1 and FORM.startswith("another size") else 8, 4)).backward()


def saved_by_one(rank: int) -> None:
    """One rank alone saves; or the thread of one rank's save ends without a word."""
    model = ParallelModule(emitted(dp=2), tensors(Model().double()), device="cpu")
    if FORM == "saved by one rank" and rank == 0:
        autopar.save(os.path.join(FOLDER, "alone"), model)
    elif FORM != "saved by one rank":
        if rank == 1:
            saving.write = lambda *_: None
        saved = autopar.save(os.path.join(FOLDER, "beside"), model, async_save=True)
        assert saved is not None
        if rank == 0:
            saved.result()
    in_no_hurry()


class Looked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.table(ids)))).square().mean()


def left_out(rank: int) -> None:
    """The loop leaves out a batch that has a number of no row: in the half of one rank, in the halves of both, or for one stage alone."""
    pins = {"pp": 2, "micro_batches": 2} if FORM.endswith("stage") else {"dp": 2}
    whole, model = Looked(), autopar.compile(Looked(), gpus=2, example_inputs=(torch.arange(8),), cluster="cpu", pins=pins)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    for step in range(8):
        ids = (torch.arange(8) + step) % 8
        if step == 5:
            ids[-1] = 9
            if FORM.endswith("all ranks"):
                ids[0] = 9
        losses = []
        for m, optimizer in zip((whole, model), optimizers, strict=True):
            try:
                loss = m(ids)
            except IndexError:
                os.write(3, f"left out {step} by rank {rank}\n".encode())
                if m is model and FORM.endswith("something else"):
                    in_no_hurry()
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if losses:
            assert abs(losses[0] - losses[1]) < 1e-6, losses
            os.write(3, f"step {step} of rank {rank}\n".encode())


def train(rank: int) -> None:
    if FORM.endswith("machine"):  # ranks that do not see each other's records, and meet by an address
        own = Path(FOLDER, f"machine-{rank}")
        own.mkdir()
        watchdog._folder = lambda token: own
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(PORT))
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    else:
        store = dist.FileStore(os.path.join(FOLDER, "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    if FORM.startswith("other shapes"):
        return other_shapes(rank)
    if FORM.startswith(("changed on one rank", "another size on one rank")):
        return captured_again(rank)
    if FORM.startswith("called once more"):
        return called_once_more(rank)
    if FORM.startswith("left out"):
        return left_out(rank)
    if FORM.startswith("saved"):
        return saved_by_one(rank)
    sizes = {"tp": 2} if FORM == "waits in forward" else {"dp": RANKS}
    model = ParallelModule(emitted(**sizes), tensors(Model().double()), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2000 if FORM.startswith("asked") else 5):
        if rank == 1 and step == 3:
            if FORM.startswith("raises"):
                raise ValueError("on purpose")
            if FORM == "exits":
                sys.exit(0)
            if FORM.startswith("waits"):
                in_no_hurry()
            if FORM in ("killed while the other computes", "killed on another machine"):
                if FORM.endswith("machine"):
                    time.sleep(2)  # its last words go over the network from time to time
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == 3 and FORM == "killed while the other computes":
            in_no_hurry()
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(3, f"step {step} of rank {rank}\n".encode())
        if FORM == "asked to leave" and autopar.interrupted():
            autopar.save(os.path.join(FOLDER, "left"), model, optimizer, step=step + 1)
            os.write(3, f"left after {step + 1}\n".encode())
            break


number = start()
if number is not None:
    train(number)
