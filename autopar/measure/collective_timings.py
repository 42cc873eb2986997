"""What `autopar profile` runs on a worker: collectives among the workers.

Each function here runs on every worker of a pool. On CPUs a collective is timed as a step has it, between two pieces of work: by itself it
would be several times faster, because a core that waits is quick to take what arrives, and one that computes is not.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.measure.timings import Run, firsts, repeated, wait
from autopar.run import comm
from autopar.run.groups import group_of
from autopar.run.launch import default_device
from autopar.run.mesh import Axis
from cost_models.collectives import Kind

__all__ = ["Collectives", "collective_times"]

SAMPLE_S, MOST = 3e-3, 50  # a sample is of as many collectives as take about so long
LEAST_S = 1e-6  # of a collective, where clocks differ by more
WORK_S, WORK_SIDE = 1e-3, 192  # between two of them, products of so many rows and columns

def collective_times(kind: Kind, nbytes: Sequence[int], ranks: int, shared_by: float = 1.0) -> list[Collectives]:
    """A collective among the first `ranks` workers as this one sees it, by size; nbytes: the full buffers, as collective_time_s counts
    them. shared_by: workers that take turns on a core. Every worker must call it; those that take no part return nothing."""
    axis = _axis(ranks)
    if dist.get_rank() >= ranks:
        return []
    work = _work() if default_device().type == "cpu" else _no_work
    return [_samples(_collective(kind, size, axis), work, axis, shared_by) for size in nbytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """seconds: of each repeat. cpu_s, wall_s: of this worker's process and by the clock, over all of them; without the work between."""

    seconds: tuple[float, ...]
    cpu_s: float
    wall_s: float


@functools.cache
def _axis(ranks: int) -> Axis:
    """The first `ranks` workers. Made once: a group is costly, and every worker must make it."""
    members = tuple(range(ranks))
    return Axis(name="profile", size=ranks, rank=dist.get_rank(), ranks=members, held=group_of(members))


def _collective(kind: Kind, nbytes: int, axis: Axis) -> Run:
    device, n = default_device(), axis.size
    each = max(1, nbytes // 4 // n)  # elements of a rank's part
    whole, part = torch.zeros(each * n, device=device), torch.zeros(each, device=device)
    if kind == "all_reduce":
        return lambda: comm.all_reduce_(whole, axis)
    if kind == "all_gather":
        return lambda: comm.gather_flat(whole, part, axis).wait()
    if kind == "reduce_scatter":
        return lambda: comm.scatter_flat(part, whole, axis).wait()
    if kind == "all_to_all":
        blocks = torch.zeros(n, max(1, each // n), device=device)
        return lambda: comm.all_to_all(blocks, axis)
    if kind == "broadcast":
        return lambda: comm.broadcast_(whole, 0, axis)
    turns = itertools.cycle((0, 1))

    def message() -> None:
        op = dist.isend if next(turns) == axis.rank else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(op, whole, axis.ranks[1 - axis.rank], axis.group)]):
            work.wait()

    return message


def _no_work() -> None:
    pass


def _work() -> Run:
    """What takes this worker's thread WORK_S."""
    x = torch.rand(WORK_SIDE, WORK_SIDE)
    for _ in range(8):
        start = time.thread_time()
        torch.mm(x, x)
        took_s = time.thread_time() - start
    count = max(1, round(WORK_S / took_s))

    def work() -> None:
        for _ in range(count):
            torch.mm(x, x)

    return work


def _samples(run: Run, work: Run, axis: Axis, shared_by: float) -> Collectives:
    """All ranks take the same number of samples, which they settle by the slowest of them in each of the first runs."""
    device = default_device()
    token = torch.zeros(1, device=device)
    clock = time.thread_time if shared_by == 1 else time.perf_counter  # of a shared core, others' work in between counts for nothing
    cpu_s = wall_s = 0.0

    def sample(loops: int) -> float:
        nonlocal cpu_s, wall_s
        comm.all_reduce_(token, axis)  # all ranks begin together
        wait(device)
        start, cpu, worked_s, worked_cpu_s = time.perf_counter(), time.process_time(), 0.0, 0.0
        for _ in range(loops):
            began, began_cpu = clock(), time.thread_time()
            work()
            worked_s, worked_cpu_s = worked_s + clock() - began, worked_cpu_s + time.thread_time() - began_cpu
            run()
        wait(device)
        took_s = max(LEAST_S * loops, time.perf_counter() - start - worked_s)
        wall_s, cpu_s = wall_s + took_s, cpu_s + max(0.0, time.process_time() - cpu - worked_cpu_s)
        return took_s / loops

    def slowest(seconds: float) -> float:
        of_all = torch.tensor([seconds], dtype=torch.float64, device=device)
        comm.all_reduce_(of_all, axis, dist.ReduceOp.MAX)
        return of_all.item()

    single = firsts(sample, slowest)
    seconds = repeated(sample, single, min(map(slowest, single)), SAMPLE_S, MOST)
    return Collectives(seconds=tuple(seconds), cpu_s=cpu_s, wall_s=wall_s)
