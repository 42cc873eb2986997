"""The machine that a plan is for: a named cluster, a file, or this one."""

from __future__ import annotations

import re

import torch

from autopar.errors import PlanError
from autopar.measure import Live
from autopar.planner.wishes import check_name
from autopar.run.launch import default_device
from cost_models.cluster import Cluster, Gpu, load_cluster

__all__ = ["MEASURES", "check_measure", "choose_cluster", "live_on", "parse_memory", "usable_bytes", "whole_number"]

MOST = 10**15  # samples or bytes; more of them are a slip of the hand
MEASURES = ("roofline", "live")  # estimated from the cluster's description, or measured on this machine

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

# What torch.cuda.get_device_name() contains -> the cluster of such GPUs; the first that fits is taken.
_BY_DEVICE = (
    ("H200", "dgx-h200"), ("H100", "dgx-h100"), ("B200", "dgx-b200"), ("A100", "dgx-a100"), ("V100", "p3.16xlarge"), ("L40S", "l40s-8x"),
    ("4090", "rtx4090-8x"), ("MI300", "mi300x-8x"), ("MI250", "mi250x-8x"),
)  # fmt: skip


def choose_cluster(name: str) -> Cluster:
    """The cluster of that name or file; 'auto': this machine's. Raises UnknownHardware (a ValueError) for unknown names, and
    PlanError where this machine's GPU is not in the catalogue."""
    return load_cluster(_this_machine() if name == "auto" else name)


def _this_machine() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    device = torch.cuda.get_device_name()
    for mark, cluster in _BY_DEVICE:
        if mark in device:
            return cluster
    raise PlanError(f"this machine's GPU, {device!r}, is not in the catalogue; name a cluster, or describe it in a TOML file")


def usable_bytes(gpu: Gpu) -> int:
    """What a plan may fill of a device's memory, at the upper end of its interval, where the user states no limit."""
    return int(gpu.memory_bytes)


def check_measure(measure: str, cluster: Cluster) -> None:
    """ValueError for an unknown way to come by times; PlanError if they are to be measured here for a cluster of other devices."""
    check_name("way to come by times", measure, MEASURES)
    if measure == "roofline" or cluster.gpu.host:
        return
    if not torch.cuda.is_available():
        raise PlanError(f"times of {cluster.gpu.name} cannot be measured here, there is no GPU; leave them estimated (roofline)")
    device = torch.cuda.get_device_name()
    stated = f"{cluster.gpu.name} {dict(cluster.gpu.sources).get('title', '')}".lower()  # a profile's title is the device's own name
    if not any(mark.lower() in stated for mark in (device, *(mark for mark, _ in _BY_DEVICE if mark in device))):
        raise PlanError(f"times of {cluster.gpu.name} cannot be measured on this machine's {device}; leave them estimated (roofline)")


def live_on(cluster: Cluster, workers: int) -> Live:
    """Measures on this machine's device of that cluster. workers: the processes that will run, all on this machine if it has no GPU."""
    return Live(device=torch.device("cpu") if cluster.gpu.host else default_device(), workers=workers)


def parse_memory(memory: int | str | None) -> int | None:
    """Bytes of '80GiB', '24 GB', 1024 or None. ValueError for anything else, and for a text that is a small number without a unit."""
    if memory is None or (isinstance(memory, int) and not isinstance(memory, bool) and 0 < memory < MOST):
        return memory
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    amount = float(found[1]) * _UNITS.get(found[2].upper(), 0) if found is not None else 0.0
    if not 1 <= amount < MOST:
        raise ValueError(f"memory must be a positive number of bytes or text like '80GiB', not {repr(memory)[:100]}")
    if found is not None and not found[2] and amount < _UNITS["MIB"]:
        raise ValueError(f"{found[1]} bytes of memory hold nothing: a unit is missing, such as '{found[1]}GiB'")
    return int(amount)


def whole_number(text: str) -> int | None:
    """'8' -> 8. None for what is no whole number from 1 to MOST."""
    found = int(text) if text.isdecimal() and len(text) <= len(str(MOST)) else 0
    return found if 1 <= found <= MOST else None
