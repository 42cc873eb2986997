"""The machine that a plan is for: a named cluster, a file, or this one."""

from __future__ import annotations

import re

import torch

from autopar.errors import PlanError
from cost_models.cluster import Cluster, load_cluster

__all__ = ["choose_cluster", "parse_memory"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

# What torch.cuda.get_device_name() contains -> the cluster of such GPUs; the first that fits is taken.
_BY_DEVICE = (
    ("H200", "dgx-h200"), ("H100", "dgx-h100"), ("B200", "dgx-b200"), ("A100", "dgx-a100"), ("V100", "p3.16xlarge"), ("L40S", "l40s-8x"),
    ("4090", "rtx4090-8x"), ("MI300", "mi300x-8x"), ("MI250", "mi250x-8x"),
)  # fmt: skip


def choose_cluster(name: str, gpus: int) -> Cluster:
    """The cluster of that name or file; 'auto': this machine's. Raises UnknownHardware (a ValueError) for unknown names, and
    PlanError where the cluster has fewer GPUs than asked for, or this machine's GPU is not in the catalogue."""
    cluster = load_cluster(_this_machine() if name == "auto" else name)
    if cluster.nodes is not None and cluster.nodes * cluster.gpus_per_node < gpus:
        raise PlanError(f"{gpus} GPUs were asked for, but the cluster {cluster.name} has {cluster.nodes * cluster.gpus_per_node}")
    return cluster


def _this_machine() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    device = torch.cuda.get_device_name()
    for mark, cluster in _BY_DEVICE:
        if mark in device:
            return cluster
    raise PlanError(f"this machine's GPU, {device!r}, is not in the catalogue; name a cluster, or describe it in a TOML file")


def parse_memory(memory: int | str | None) -> int | None:
    """Bytes of '80GiB', '24 GB', 1024 or None. ValueError for anything else."""
    if memory is None or (isinstance(memory, int) and not isinstance(memory, bool) and memory > 0):
        return memory
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"memory must be a positive number of bytes or text like '80GiB', not {memory!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])
