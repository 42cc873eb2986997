"""Hardware and the arithmetic of time and memory: numbers in, seconds and bytes out.

An importable package below autopar: no torch in it, and it never imports autopar.
"""

from cost_models.cluster import Cluster, Gpu, Link, UnknownHardware, list_clusters, load_cluster
from cost_models.collectives import collective_time_s, price_collective
from cost_models.compute import op_time_s
from cost_models.memory import MemoryTerms, stage_memory
from cost_models.pipeline import in_flight, schedule, simulate, step_time_s

__all__ = [
    "Cluster",
    "Gpu",
    "Link",
    "MemoryTerms",
    "UnknownHardware",
    "collective_time_s",
    "in_flight",
    "list_clusters",
    "load_cluster",
    "op_time_s",
    "price_collective",
    "schedule",
    "simulate",
    "stage_memory",
    "step_time_s",
]
