"""Whether this machine has what autopar needs, and what it has besides: `autopar doctor`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import distributed as dist

from autopar.report.units import bytes_text, table
from autopar.run.launch import default_device
from cost_models.cluster import (
    HardwareFileError,
    UnknownHardware,
    list_clusters,
    list_gpus,
    list_links,
    load_cluster,
    load_gpu,
    load_link,
)

__all__ = ["Check", "checks", "checks_text"]

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at. state: 'ok', 'missing' (autopar needs it) or 'none' (it can do without)."""

    name: str
    state: str
    found: str
    remedy: str = ""

    @property
    def failed(self) -> bool:
        return self.state == "missing"


def checks() -> tuple[Check, ...]:
    """Look at everything; nothing is changed (a process group of one rank is started and ended)."""
    return (_python(), _torch(), _gloo(), *_gpus(), _solver(), _cores(), _catalogue(), _transformers())


def checks_text(found: tuple[Check, ...]) -> str:
    return table(("what", "state", "found"), [(c.name, c.state, c.found + (f"; {c.remedy}" if c.remedy else "")) for c in found], indent="")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Check(name="python", state="missing", found=version, remedy="3.11 or newer is needed")
    return Check(name="python", state="ok", found=f"{version} at {sys.executable}")


def _torch() -> Check:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        return Check(name="torch", state="missing", found=str(torch.__version__), remedy="2.11 or newer is needed")
    return Check(name="torch", state="ok", found=str(torch.__version__))


def _gloo() -> Check:
    remedy = "workers on the CPU (verify, demo) need a torch that was built with it"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Check(name="gloo", state="missing", found="not in this build of torch", remedy=remedy)
    if dist.is_initialized():
        return Check(name="gloo", state="ok", found="in this build of torch")
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device="cpu"))
    except RuntimeError as error:
        return Check(name="gloo", state="missing", found=f"does not start: {str(error).splitlines()[0]}", remedy=remedy)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return Check(name="gloo", state="ok", found="starts and reduces")


def _gpus() -> tuple[Check, ...]:
    if not torch.cuda.is_available():
        built = f"torch was built for CUDA {torch.version.cuda}, but sees no device" if torch.version.cuda else "torch is a CPU build"
        return (Check(name="GPUs", state="none", found=f"{built}; planning needs none, and workers run on the CPU"),)
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    named = ", ".join(f"{d.name} {bytes_text(d.total_memory)}" for d in devices)
    if not dist.is_nccl_available():
        return (
            Check(name="GPUs", state="ok", found=named),
            Check(name="NCCL", state="missing", found="not in this build of torch", remedy="GPUs talk to each other through it"),
        )
    return (Check(name="GPUs", state="ok", found=named), _nccl(len(devices)))


def _nccl(devices: int) -> Check:
    """What NCCL sees: its version, whether it starts on this process's GPU and reduces, which GPUs reach each other directly, and what the
    environment tells it."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    device = default_device()
    own = torch.device("cuda", torch.cuda.current_device()) if device.type == "cpu" else device
    if not dist.is_initialized():
        try:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=own)
            ones = torch.ones(1, device=own)
            dist.all_reduce(ones)
            torch.cuda.synchronize(own)
        except RuntimeError as error:
            found = f"{version} does not start on {own}: {str(error).splitlines()[0]}"
            return Check(name="NCCL", state="missing", found=found, remedy="run with NCCL_DEBUG=INFO, which says why")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    reach = f"{direct} of {len(pairs)} pairs of GPUs reach each other directly" if pairs else "one GPU, so no peers"
    told = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "TORCH_NCCL_"))}
    settings = ", ".join(f"{name}={value}" for name, value in told.items()) or "no NCCL_ variables are set"
    return Check(name="NCCL", state="ok", found=f"{version} starts and reduces on {own}; {reach}; {settings}")


def _solver() -> Check:
    import pulp

    program = pulp.LpProblem("doctor", pulp.LpMaximize)
    x = pulp.LpVariable("x", lowBound=0, upBound=10, cat="Integer")
    program += x
    program += 3 * x <= 20
    for name, make in (("HiGHS", pulp.HiGHS), ("CBC", pulp.PULP_CBC_CMD)):
        solver = make(msg=False)
        if solver.available():
            status = program.solve(solver)
            if pulp.LpStatus[status] == "Optimal" and x.value() == 6:
                return Check(name="solver", state="ok", found=f"{name} through pulp {metadata.version('pulp')}")
    return Check(name="solver", state="missing", found="neither HiGHS nor CBC answers", remedy="pip install highspy pulp")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Check(name="cores, memory", state="ok", found=f"{cores} cores, {bytes_text(memory)}")


def _catalogue() -> Check:
    kinds = (("clusters", list_clusters, load_cluster), ("gpus", list_gpus, load_gpu), ("links", list_links, load_link))
    counts = []
    for kind, names, load in kinds:
        try:
            counts.append(f"{len([load(name) for name in names()])} {kind}")
        except (HardwareFileError, UnknownHardware) as error:
            return Check(name="cost models", state="missing", found=str(error), remedy="reinstall autopar, or mend the file")
        if not names():
            return Check(name="cost models", state="missing", found=f"no {kind}", remedy="reinstall autopar")
    return Check(name="cost models", state="ok", found=", ".join(counts))


def _transformers() -> Check:
    try:
        return Check(name="transformers", state="ok", found=metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        return Check(name="transformers", state="none", found="not installed; only `autopar demo` uses it")
