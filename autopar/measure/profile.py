"""`autopar profile`: the live machine as a cluster, each value measured or fitted to what was measured.

Peak rates and the memory's bandwidth are the best that was seen, times of launch medians; the fractions of the peaks
that operators achieve are then fitted to the medians of all operators, and the constants of the link to those of all collectives
(`cost_models.fit`). What one machine cannot show, such as the link between nodes, keeps the value of a catalogued cluster,
with a source that says so.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from autopar.capture import capture
from autopar.errors import LaunchError
from autopar.files import write_file
from autopar.measure.collective_timings import collective_times
from autopar.measure.costs import Pricer
from autopar.measure.layer_timings import launch_times, layer_times
from autopar.measure.layer_timings import made as layer_made
from autopar.measure.live import LEAST_CPU_SHARE, cores
from autopar.measure.timings import DTYPES, Machine, Timed, machine, operator_times
from autopar.run.launch import WorkerPool
from cost_models.cluster import LINK_TABLES, VECTOR, Cluster, Gpu, Link
from cost_models.collectives import KINDS
from cost_models.fit import LINK_CONSTANTS, CollectiveTime, fit_gpu, fit_link, link_loss, port_bytes, rescaled, slower_kinds
from cost_models.write import cluster_toml

__all__ = ["Profile", "Sizes", "default_workers", "profile", "save"]

MIB = 2**20
MOST_WORKERS = 8  # by default, on a machine without GPUs
FITTED_DTYPES = {"cpu": ("float64", "float32"), "cuda": ("float32", "tf32", "float16", "bfloat16")}  # whose products are priced closely
MEMORY_CLASSES = ("pointwise", "reduction", "gather")
LINK_FITTED = (*LINK_CONSTANTS, "peer_s")
LEAST_SHARE = 0.1  # of what operators of a layer take by themselves, they take among others at least
KINDS_AND_LINK = 2  # rounds in which factors of kinds and constants of the link are fitted in turn
SCALES = tuple(2.0**k for k in range(-6, 7))  # of the catalogue's latencies: the best of them is where the search begins

D = TypeVar("D", Cluster, Gpu, Link)
Values = Mapping[str, tuple[float, str]]  # a key of a hardware file -> value, source


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """largest: side of the largest matrix product; operators of other classes shrink with it below 1024. nbytes: buffers of
    collectives."""

    largest: int = 16384
    nbytes: tuple[int, ...] = (2**10, 2**12, 2**15, 2**18, 2**21, 2**24, 2**26)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """cluster: the machine as measured. operators, collectives: what was timed. gpu_error, link_error: mean |log(predicted /
    measured)| after the fit, the second None without a link. notes: what could not be measured, and what disturbed."""

    cluster: Cluster
    machine: Machine
    workers: int
    operators: tuple[Timed, ...]
    collectives: tuple[CollectiveTime, ...]
    gpu_error: float
    link_error: float | None
    notes: tuple[str, ...]


def default_workers() -> int:
    """As many as there are GPUs; on CPUs, as there are cores, from 2 to MOST_WORKERS."""
    return torch.cuda.device_count() if torch.cuda.is_available() else min(MOST_WORKERS, max(2, cores()))


def profile(
    base: Cluster, workers: int, *, sizes: Sizes | None = None, say: Callable[[str, int, int], None] | None = None,
    enter: Callable[[int], None] | None = None,
) -> Profile:  # fmt: skip
    """Measure this machine. base: a catalogued cluster, whose values stand where nothing can be measured; workers: processes, each
    with a GPU of its own if there are any. say(what, done, of): called before each part. enter: as WorkerPool's.

    Raises LaunchError for more workers than there are GPUs, or than the base cluster holds on one node.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = gpus or base.gpus_per_node
    if not 1 <= workers <= most:
        limit = f"this machine has {gpus} GPUs" if gpus else f"{base.name} has room for {most}"
        raise LaunchError(f"a profile with {workers} workers was asked for, but {limit}: --gpus {most} measures with as many as there are")
    sizes, say = sizes or Sizes(), say or (lambda *_: None)
    with WorkerPool(workers, enter=enter) as pool:
        say("starting workers", 0, 1)
        found = pool.run(machine)[0]
        kernels = [("matmul", dtype) for dtype in DTYPES if dtype != "tf32" or found.tf32]
        half = "bfloat16" if found.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
        main = half if found.device == "cuda" else "float32"
        own = ("layer", "image", "depthwise") if found.device == "cpu" else ()  # whose libraries are slower at these than at square ones
        kernels += [(op_class, main) for op_class in ("attention", "conv", *own)] + [(op_class, "float32") for op_class in MEMORY_CLASSES]
        groups = sorted({2, workers}) if workers > 1 else []
        links = [(kind, ranks) for ranks in groups for kind in KINDS if kind != "p2p" or ranks == 2]
        total = len(kernels) + len(links) + 3

        shared_by = max(1.0, workers / cores()) if found.device == "cpu" else 1.0
        say("launch", 1, total)
        launches_s = pool.run(launch_times)[0]
        say("layers", 2, total)
        by_worker = pool.run(layer_times) if found.device == "cpu" else [{}]
        layers_s = {name: statistics.median(each[name] for each in by_worker) for name in by_worker[0]}
        operators: list[Timed] = []
        notes: list[str] = []
        for k, (op_class, dtype) in enumerate(kernels, 3):
            say(f"{op_class} in {dtype}", k, total)
            timed, reason = pool.run(operator_times, op_class, dtype, sizes.largest)[0]
            operators += timed
            notes += [f"not measured, assumed instead: {reason}"] if reason else []
        collectives: list[CollectiveTime] = []
        best = 0.0  # bytes/s out of one rank
        cpu_s = wall_s = 0.0  # of the largest buffers
        for k, (kind, ranks) in enumerate(links, 3 + len(kernels)):
            say(f"{kind} of {ranks}", k, total)
            by_rank = pool.run(collective_times, kind, sizes.nbytes, ranks, shared_by)[:ranks]
            for j, nbytes in enumerate(sizes.nbytes):
                repeats = [max(each) for each in zip(*(times[j].seconds for times in by_rank), strict=True)]
                collectives.append(CollectiveTime(kind=kind, nbytes=nbytes, ranks=ranks, measured_s=statistics.median(repeats)))
                best = max(best, port_bytes(kind, nbytes, ranks) / min(repeats))
                if nbytes == max(sizes.nbytes) and kind in ("all_reduce", "all_gather", "reduce_scatter"):
                    cpu_s += sum(times[j].cpu_s for times in by_rank)
                    wall_s += sum(times[j].wall_s for times in by_rank)
    say("fitting", total, total)
    here = f"torch {found.torch}, {found.name}"
    share = shared_by * statistics.median(t.cpu_share for t in operators)
    if found.device == "cpu" and share < LEAST_CPU_SHARE:
        here += " beside other work"
        notes.append(f"other processes took {1 - share:.0%} of a worker's core, which slows collectives: measure again when it is idle")
    gpu, gpu_error = _gpu(base.gpu, found, workers, launches_s, operators, here)
    if layers_s:
        gpu = _among_others(dataclasses.replace(base, gpu=gpu), layers_s, here)
    per_node: Values = {"gpus_per_node": (gpus, f"measured: devices that torch {found.torch} finds")} if gpus else {}
    cluster = _stated(dataclasses.replace(base, gpu=gpu, inter=_stated(base.inter, {})), per_node)
    host_share = min(1.0, cluster.gpu.shared_by * cpu_s / wall_s) if wall_s and cluster.gpu.host else 0.0
    intra, link_error = _link(cluster, collectives, best, here, found.backend, host_share)
    title = f"Profile of {found.name}: {workers} workers, {found.backend}, torch {found.torch}"
    cluster = _titled(dataclasses.replace(cluster, intra=intra), title)
    return Profile(
        cluster=cluster, machine=found, workers=workers, operators=tuple(operators), collectives=tuple(collectives),
        gpu_error=gpu_error, link_error=link_error, notes=tuple(notes),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- devices
def _gpu(
    base: Gpu, found: Machine, workers: int, launches_s: tuple[float, float], operators: Sequence[Timed], here: str
) -> tuple[Gpu, float]:
    """The device with all that was measured of it, and the error that is left. launches_s: as of launch_times."""
    shared = "" if found.device == "cuda" else f"main memory, shared by {workers} workers; "
    values: dict[str, tuple[float, str]] = {
        "memory_bytes": (found.memory_bytes // (1 if found.device == "cuda" else workers), f"measured: {shared}{here}"),
        "launch_s": (launches_s[0], f"measured: an operator of a tiny transformer layer, forward or backward, {here}"),
    }
    if found.device == "cpu" and workers > cores():
        values["shared_by"] = (workers / cores(), f"measured: {workers} workers on {cores()} cores, {here}")
    if found.context_bytes:
        what = "used beside the allocator's, by whomever" if found.device == "cuda" else "resident set of a worker that has imported torch"
        values["context_bytes"] = (found.context_bytes, f"measured: {what}, {here}")
    streams = {t.what: t.timing.bytes_moved / t.best_s for t in operators if t.timing.op_class == "pointwise"}
    if streams:
        fastest = max(streams, key=streams.__getitem__)
        values["memory_bandwidth_bytes_per_s"] = (streams[fastest], f"measured: best of pointwise operators, {fastest}, {here}")
    for dtype in DTYPES:
        products = [t for t in operators if (t.kind, t.timing.dtype) == ("matmul", dtype)]
        products = products[-2:]  # small ones may be faster where there is no blocked kernel
        if found.device == "cpu":  # where convolutions may be faster than products
            products += [t for t in operators if (t.timing.op_class, t.timing.dtype) == ("conv", dtype)]
        rates = {t.what: t.timing.flops / t.best_s for t in products}
        if rates:
            fastest = max(rates, key=rates.__getitem__)
            values[f"peak_flops_per_s.{dtype}"] = (rates[fastest], f"measured: best of the largest, {fastest}, {here}")
            if dtype == "float32" and base.vector_fraction is not None:
                share = statistics.mean(rates.values()) / rates[fastest]
                values[f"achievable_fraction.{VECTOR}"] = (share, f"measured: the largest float32 products over their best, {here}")
    layers = any(t.kind == "layer" for t in operators)  # products as models have them: square ones are left out then

    def is_close(t: Timed) -> bool:
        own = t.kind == "layer" if layers else t.timing.dtype in FITTED_DTYPES[found.device]
        return own or t.timing.op_class != "matmul"

    close = [t.timing for t in operators if is_close(t)]
    gpu, error = fit_gpu(dataclasses.replace(_stated(base, values), launch_s=launches_s[1]), close)  # they were timed one by one
    fractions = dict(gpu.fractions)
    by_class = Counter(t.op_class for t in close)
    for op_class, count in by_class.items():
        values[f"achievable_fraction.{op_class}"] = (fractions[op_class], f"fitted: to {count} operators, {here}")
    return dataclasses.replace(_titled(_stated(base, values), found.name), host=found.device == "cpu"), error


def _among_others(cluster: Cluster, layers_s: Mapping[str, float], here: str) -> Gpu:
    """The device with fractions at which whole layers take as long as was measured: one factor for convolutions, of the layers that have
    them, and one for all other operators. layers_s: as of layer_times."""
    gpu, programs = cluster.gpu, {}
    for name in layers_s:
        layer, x = layer_made(name)
        programs[name] = capture(layer, {"x": x}).program
    for convolves in (False, True):
        pricer = Pricer(dataclasses.replace(cluster, gpu=dataclasses.replace(gpu, shared_by=1.0)), {})
        log_factors = []
        for name, program in programs.items():
            seconds = {True: 0.0, False: 0.0}  # of convolutions, of others
            for cost in pricer.program(program).ops.values():
                seconds[cost.counts.op_class == "conv"] += cost.forward_s + cost.backward_s
            if (seconds[True] > 0) == convolves:
                alone_s, rest_s = seconds[convolves], seconds[not convolves]
                log_factors.append(math.log(max(LEAST_SHARE * alone_s, layers_s[name] - rest_s) / alone_s))
        factor = math.exp(statistics.mean(log_factors))
        fractions, sources = dict(gpu.fractions), dict(gpu.sources)
        for op_class in fractions:
            if (op_class == "conv") == convolves:
                fractions[op_class] = min(1.0, fractions[op_class] / factor)
                key = f"achievable_fraction.{op_class}"
                sources[key] = f"{sources.get(key, 'assumed')}; among others, as {len(log_factors)} layers show it"
        gpu = dataclasses.replace(gpu, fractions=tuple(fractions.items()), sources=tuple(sources.items()))
    return gpu


def _link(
    cluster: Cluster, times: Sequence[CollectiveTime], best: float, here: str, backend: str, host_share: float = 0.0
) -> tuple[Link, float | None]:
    """The link inside the node, fitted to collectives, and the error that is left. best: bytes/s out of one rank that were seen.
    host_share: 0 where devices compute."""
    base = cluster.intra
    if not times:
        return _stated(base, {}), None
    values: dict[str, tuple[float, str]] = {}
    seen = best / cluster.links_per_gpu
    if base.bandwidth_bytes_per_s < seen or not base.source("bandwidth_bytes_per_s").startswith("datasheet: "):
        values["bandwidth_bytes_per_s"] = (seen, f"measured: best of all collectives and sizes, {backend}, {here}")
    start = _stated(base, values)
    loss = link_loss([(dataclasses.replace(cluster, intra=start), times)], base.name)
    start = min((rescaled(start, factor) for factor in SCALES), key=loss)
    if host_share:
        source = f"measured: CPU seconds of all workers in collectives on the largest buffers, {backend}, {here}"
        values["host_share"] = (host_share, source)
    link, error = fit_link(start, loss, LINK_FITTED)
    if cluster.gpu.host:  # whose library has other algorithms than those of GPUs
        for _ in range(KINDS_AND_LINK):
            link, error = fit_link(slower_kinds(link, cluster, times), loss, LINK_FITTED)
    ranks = " and ".join(map(str, sorted({t.ranks for t in times})))
    source = f"fitted: to {len(times)} times of collectives among {ranks} workers, {backend}, {here}"
    for name in LINK_FITTED:
        if (value := getattr(link, name)) != getattr(base, name):
            only_scaled = value == getattr(start, name)
            values[name] = (value, source + (" (scaled with the other latencies; the times say no more of it)" if only_scaled else ""))
    values |= {f"{table}.{kind}": (factor, source) for table in LINK_TABLES for kind, factor in getattr(link, table)}
    return _titled(_stated(base, values), f"{backend} among {ranks} workers of this machine"), error


def _stated(item: D, values: Values) -> D:
    """The device with these values by the keys of its file; what is not among them is assumed to be as in the catalogue."""
    sources = {key: values[key][1] if key in values else f"assumed: as the catalogue's {item.name} ({old})" for key, old in item.sources}
    sources |= {key: source for key, (_, source) in values.items()}
    sources["title"] = dict(item.sources)["title"]
    changes: dict[str, Any] = {key: value for key, (value, _) in values.items() if "." not in key}
    if isinstance(item, Link):
        for table in LINK_TABLES:
            own = ((key.removeprefix(f"{table}."), value) for key, (value, _) in values.items() if key.startswith(f"{table}."))
            changes[table] = tuple(own)
    if isinstance(item, Gpu):
        for field, table in (("rates", "peak_flops_per_s."), ("fractions", "achievable_fraction.")):
            stated = {key.removeprefix(table): value for key, (value, _) in values.items() if key.startswith(table)}
            changes[field] = tuple((dict(getattr(item, field)) | stated).items())
    spreads = tuple((key, spread) for key, spread in item.spreads if key not in values)
    return dataclasses.replace(item, sources=tuple(sources.items()), spreads=spreads, **changes)


def _titled(item: D, title: str) -> D:
    return dataclasses.replace(item, sources=tuple((dict(item.sources) | {"title": title}).items()))


# ---------------------------------------------------------------------------------------------------------------- output
def save(found: Profile, path: Path) -> None:
    """Write the cluster file, atomically. OutputError where that cannot be done."""
    write_file(path, cluster_toml(found.cluster).encode())
