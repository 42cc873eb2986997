"""A training script as people write it for torchrun: `torchrun ... torchrun_job.py FOLDER STEPS WHAT`. WHAT: what happens to it."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist

import autopar
from benchmarks._faults_job import Model, batch, optimizer_of

folder, steps, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
path = os.path.join(folder, "last")
model = autopar.compile(Model(), example_inputs=batch(0), cluster="cpu")
optimizer = optimizer_of(model)
losses: list[float] = []
if os.path.exists(f"{path}/checkpoint.json"):
    losses = autopar.load(path, model, optimizer)["losses"]
ranks = dist.get_world_size() if dist.is_initialized() else 1
rank = dist.get_rank() if dist.is_initialized() else 0
os.write(1, f"rank {rank} of {ranks} from {len(losses)}\n".encode())
for step in range(len(losses), steps):
    loss = model(*batch(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if what == "killed" and step == 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    autopar.save(path, model, optimizer, losses=losses)
    os.write(1, f"saved {len(losses)} by {rank}, process {os.getpid()}\n".encode())
    if what == "asked" and autopar.interrupted():
        os.write(1, f"left after {len(losses)}\n".encode())
        break
    if what == "slow" and ranks == 2:
        time.sleep(0.5)
if rank == 0:
    os.write(1, ("losses " + " ".join(map(repr, losses)) + "\n").encode())
