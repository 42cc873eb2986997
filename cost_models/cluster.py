"""The hardware catalogue: gpus/*.toml, links/*.toml and clusters/*.toml read into frozen dataclasses.

One file describes one device. Its stem is its name; `aliases` are further names. Every number is written as
`key_with_unit = { value = ..., source = "kind: where from" }`, the kind being one of KINDS, so that a figure that was derived
from it can say what it rests on. `spread = ...` in it says how far the value may be off (see uncertainty); without it the kind does.
A name that is not known raises UnknownHardware with near matches; nothing falls back.
"""

from __future__ import annotations

import difflib
import math
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.uncertainty import SPREADS, spread_of_kind

__all__ = [
    "KINDS",
    "LINK_TABLES",
    "MOST_GPUS",
    "Cluster",
    "Gpu",
    "HardwareFileError",
    "Link",
    "UnknownHardware",
    "dtype_name",
    "list_clusters",
    "list_gpus",
    "list_links",
    "load_cluster",
    "load_gpu",
    "load_link",
]

CATALOGUE = Path(__file__).parent
KINDS = tuple(SPREADS)  # what a source string begins with

OP_CLASSES = ("matmul", "attention", "conv", "pointwise", "reduction", "gather", "other")
"""Operator classes with an achievable fraction; 'view' costs nothing and needs none."""

VECTOR = "vector"
"""Beside the classes, where it is known: products of matrices on units that do not multiply matrices."""

_DTYPES = {
    "fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16",
    "bf16": "bfloat16", "fp8": "float8", "float8_e4m3fn": "float8", "float8_e5m2": "float8",
    # what has no tensor cores of its own is priced at the rate of its width: complex numbers as their parts, integers as float32
    "complex64": "float32", "complex128": "float64",
    "bool": "float32", "uint8": "float32", "int8": "float32", "int16": "float32", "int32": "float32", "int64": "float32",
}  # fmt: skip
MOST = 1e18  # of any figure in its unit; what is larger is a slip of the hand
MOST_GPUS = 10**6  # that anything is planned for
MOST_SHOWN = 200  # characters of a file in an error
LINK_TABLES = ("slower", "slower_bytes")  # of a link, by kind of collective
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
_RATES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")


class UnknownHardware(ValueError):
    """A GPU, link or cluster that the catalogue does not have; the message lists near matches."""


class HardwareFileError(ValueError):
    """A hardware file that cannot be read: not TOML, a missing or unknown key, a value of the wrong kind or without a source."""


def dtype_name(dtype: str) -> str:
    """The catalogue's name of a dtype: 'torch.bfloat16' and 'bf16' are 'bfloat16'. Integers are priced as float32."""
    short = dtype.removeprefix("torch.")
    name = _DTYPES.get(short, short)
    if name not in _RATES:
        raise ValueError(f"dtype {dtype!r} has no rate; known are {', '.join(sorted({*_RATES, *_DTYPES}))}")
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator as one process sees it (a GCD of an MI250X, a worker's core of a CPU).

    rates: peak FLOP/s by dtype, dense. fractions: what share of the binding peak (FLOP/s or bytes/s) an operator class
    reaches when it is large; VECTOR: products of matrices of that of the vector units. launch_s: what the host needs to launch
    one operator of a model that is trained in eager mode (Python, autograd's bookkeeping, dispatch). context_bytes: device memory that the
    framework takes before the first tensor (context, library handles, code). host: a CPU, so that kernels run where they are issued.
    shared_by: how many processes take turns on it; rates and launch_s are those of one that has it for itself.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_s: float
    context_bytes: int
    rates: tuple[tuple[str, float], ...]
    fractions: tuple[tuple[str, float], ...]
    host: bool = False
    shared_by: float = 1.0
    sources: tuple[tuple[str, str], ...] = ()
    spreads: tuple[tuple[str, float], ...] = ()

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak FLOP/s of a dtype ('bfloat16', 'torch.float32', 'tf32'). Raises ValueError where the file states none."""
        name = dtype_name(dtype)
        for rate, flops_per_s in self.rates:
            if rate == name:
                return flops_per_s
        raise ValueError(f"{self.name} states no peak rate for {dtype!r}; it has {', '.join(rate for rate, _ in self.rates)}")

    def has_rate(self, dtype: str) -> bool:
        return any(rate == dtype_name(dtype) for rate, _ in self.rates)

    def fraction(self, op_class: str) -> float:
        """The achievable share of the binding peak for a large operator of the class."""
        for name, value in self.fractions:
            if name == op_class:
                return value
        raise ValueError(f"operator class {op_class!r} is not one of {', '.join(('view', *OP_CLASSES))}")

    @property
    def vector_fraction(self) -> float | None:
        """The achievable share of the vector units' peak for a large product of matrices; None where only that of products is known."""
        return dict(self.fractions).get(VECTOR)

    def source(self, key: str) -> str:
        """Where a value comes from, e.g. source('memory_bytes') or source('peak_flops_per_s.bfloat16')."""
        return dict(self.sources)[key]

    def spread(self, key: str) -> float:
        """The relative standard deviation of a value: its own, else that of how it came to be known."""
        return _spread(self, key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One link, one direction, and what a collective library gets out of it.

    bandwidth_bytes_per_s: of one link or port, one direction, the signalling rate. achievable_fraction: what collectives get of
    it for large messages. Two protocols: `simple` moves bulk data; `low_latency` carries a flag beside each word, so that it
    needs no synchronisation but reaches only low_latency_fraction of the rate. start_*: once per collective; hop_*: per step.
    peer_s: issuing a transfer to one more peer. in_switch_fraction: where the switch itself reduces (NVLS), the share of the
    rate at which it does; 0 where it cannot. switched: any pair gets the
    full rate; otherwise the wires are point to point. host_share: the share of a collective's seconds in which it keeps the host's cores
    busy, which counts where these compute too (`Gpu.host`). slower: kind of collective -> how many times longer than by the best of the
    known algorithms a library takes that has another one for it; slower_bytes: the same of the time that its bytes take, where that is
    known apart from its latencies.
    """

    name: str
    bandwidth_bytes_per_s: float
    achievable_fraction: float
    low_latency_fraction: float
    start_simple_s: float
    start_low_latency_s: float
    hop_simple_s: float
    hop_low_latency_s: float
    peer_s: float
    in_switch_fraction: float
    switched: bool
    host_share: float = 0.0
    slower: tuple[tuple[str, float], ...] = ()
    slower_bytes: tuple[tuple[str, float], ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    spreads: tuple[tuple[str, float], ...] = ()

    def source(self, key: str) -> str:
        return dict(self.sources)[key]

    def spread(self, key: str) -> float:
        """As Gpu.spread."""
        return _spread(self, key)


def _spread(item: Gpu | Link, key: str) -> float:
    stated = dict(item.spreads)
    return stated[key] if key in stated else spread_of_kind(item.source(key))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes of equal GPUs in two levels: `intra` inside a node, `inter` between nodes.

    nodes: how many there are, None = as many as a plan needs. links_per_gpu: intra links out of one GPU; links_per_node: inter
    links out of one node. rings_by_ranks: for point-to-point wires, (k, rings): how many link-disjoint directed rings pass the
    node's first k GPUs; fractions stand for what is measured where no ring exists.
    """

    name: str
    gpu: Gpu
    gpus_per_node: int
    nodes: int | None
    intra: Link
    inter: Link
    links_per_gpu: int
    links_per_node: int
    rings_by_ranks: tuple[tuple[int, float], ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    spreads: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for field in ("gpus_per_node", "links_per_gpu", "links_per_node"):
            if getattr(self, field) < 1:
                raise HardwareFileError(f"cluster {self.name}: {field} must be at least 1, found {getattr(self, field)}")
        if self.nodes is not None and self.nodes < 1:
            raise HardwareFileError(f"cluster {self.name}: nodes must be at least 1 or left out, found {self.nodes}")

    @property
    def gpu_count(self) -> int | None:
        """GPUs in all, None when the number of nodes is open."""
        return None if self.nodes is None else self.nodes * self.gpus_per_node

    @property
    def gpu_bandwidth_bytes_per_s(self) -> float:
        """Signalling rate out of one GPU over all its intra-node links, one direction."""
        return self.intra.bandwidth_bytes_per_s * self.links_per_gpu

    @property
    def node_bandwidth_bytes_per_s(self) -> float:
        """Signalling rate out of one node over all its inter-node links, one direction."""
        return self.inter.bandwidth_bytes_per_s * self.links_per_node

    def nodes_for(self, gpus: int) -> int:
        """Nodes that `gpus` GPUs occupy; the last may be partly filled. Raises ValueError if the cluster has fewer."""
        if gpus < 1:
            raise ValueError(f"a plan needs at least one GPU, found {gpus}")
        if self.gpu_count is not None and gpus > self.gpu_count:
            raise ValueError(f"cluster {self.name} has {self.gpu_count} GPUs, {gpus} were asked for")
        return math.ceil(gpus / self.gpus_per_node)


# --- reading -------------------------------------------------------------------------------------------------------------------


class _Table:
    """One TOML table being read: hands out values, collects their sources, and refuses what it does not know."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix, self.seen = data, where, prefix, set[str]()
        self.sources: list[tuple[str, str]] = []
        self.spreads: list[tuple[str, float]] = []

    def fail(self, key: str, problem: str) -> HardwareFileError:
        return HardwareFileError(f"{self.where}: {self.prefix}{key} {problem}")

    def plain(self, key: str, kind: type, default: Any = None, *, required: bool = True) -> Any:
        self.seen.add(key)
        if key not in self.data:
            if required:
                raise self.fail(key, f"is missing (a {kind.__name__})")
            return default
        value = self.data[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(key, f"must be a {kind.__name__}, found {_shown(value)}")
        return value

    def number(self, key: str, *, least: float = 0.0, most: float = MOST) -> float:
        """The value of `key = { value = number, source = "kind: text" }`, which may also state its spread."""
        entry = self.plain(key, dict)
        value, source, spread = entry.get("value"), entry.get("source"), entry.get("spread", 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise self.fail(key, f"needs a number as its `value`, found {_shown(value)}")
        if not least <= value <= most:
            raise self.fail(key, f"must lie between {least:g} and {most:g}, found {_shown(value)}")
        if not isinstance(source, str) or not source.startswith(tuple(f"{kind}: " for kind in KINDS)):
            raise self.fail(key, f"needs a `source` that begins with one of {', '.join(KINDS)} and a colon, found {_shown(source)}")
        if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 <= spread <= 1:
            raise self.fail(key, f"has a `spread` that is no share of its value between 0 and 1: {_shown(spread)}")
        if extra := set(entry) - {"value", "source", "spread"}:
            raise self.fail(key, f"has unknown parts {_listed(extra)}")
        self.sources.append((self.prefix + key, source))
        if "spread" in entry:
            self.spreads.append((self.prefix + key, float(spread)))
        return float(value)

    def count(self, key: str) -> int:
        """As `number`, of what comes in whole pieces: 1 to MOST_GPUS."""
        value = self.number(key, least=1, most=MOST_GPUS)
        if not value.is_integer():
            raise self.fail(key, f"must be a whole number, found {value:g}")
        return int(value)

    def sub(self, key: str) -> _Table:
        return _Table(self.plain(key, dict), self.where, f"{self.prefix}{key}.")

    def done(self) -> None:
        if extra := set(self.data) - self.seen:
            raise self.fail(_listed(extra), "is not known here; " + _near(min(extra), self.seen))


def _shown(value: object) -> str:
    """A value of a file in an error: on one line, and not long."""
    try:
        text = repr(value)
    except ValueError:  # of more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def _listed(names: Iterable[str]) -> str:
    """Names of a file in an error, as `_shown`."""
    text = ", ".join(map(_printable, sorted(names)))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _near(name: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    near = difflib.get_close_matches(name.lower(), names, n=4, cutoff=0.4)
    near += [n for n in names if n not in near and (name.lower() in n or n in name.lower())][: 4 - len(near)]
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)}"


def _gpu(table: _Table, name: str) -> Gpu:
    table.plain("aliases", list, required=False)
    title = table.plain("title", str, name, required=False)
    rates, fractions = table.sub("peak_flops_per_s"), table.sub("achievable_fraction")
    gpu = Gpu(
        name=name,
        memory_bytes=int(table.number("memory_bytes", least=1)),
        memory_bandwidth_bytes_per_s=table.number("memory_bandwidth_bytes_per_s", least=1),
        launch_s=table.number("launch_s"),
        context_bytes=int(table.number("context_bytes")),
        rates=tuple((dtype, rates.number(dtype, least=1)) for dtype in _RATES if dtype in rates.data),
        fractions=tuple((op, fractions.number(op, least=1e-3, most=1)) for op in (*OP_CLASSES, *({VECTOR} & fractions.data.keys()))),
        host=table.plain("host", bool, False, required=False),
        shared_by=table.number("shared_by", least=1) if "shared_by" in table.data else 1.0,
        sources=(("title", title), *table.sources, *rates.sources, *fractions.sources),
        spreads=(*table.spreads, *rates.spreads, *fractions.spreads),
    )
    for part in (table, rates, fractions):
        part.done()
    if not gpu.has_rate("float32"):
        raise table.fail("peak_flops_per_s.float32", "is missing: integers and unreduced operators are priced by it")
    return gpu


def _link(table: _Table, name: str) -> Link:
    table.plain("aliases", list, required=False)
    title = table.plain("title", str, name, required=False)
    switched = table.plain("switched", bool)
    numbers = {
        "bandwidth_bytes_per_s": table.number("bandwidth_bytes_per_s", least=1),
        **{f: table.number(f, least=1e-3, most=1) for f in ("achievable_fraction", "low_latency_fraction")},
        **{f: table.number(f) for f in ("start_simple_s", "start_low_latency_s", "hop_simple_s", "hop_low_latency_s", "peer_s")},
        "in_switch_fraction": table.number("in_switch_fraction", most=1),
        "host_share": table.number("host_share", most=1) if "host_share" in table.data else 0.0,
    }
    factors = {f: _Table(table.plain(f, dict, {}, required=False), table.where, f"{f}.") for f in LINK_TABLES}
    slower = {f: tuple((kind, of.number(kind, least=1e-3)) for kind in _COLLECTIVES if kind in of.data) for f, of in factors.items()}
    parts = (table, *factors.values())
    for part in parts:
        part.done()
    return Link(
        name=name, switched=switched, sources=(("title", title), *(x for part in parts for x in part.sources)),
        spreads=tuple(x for part in parts for x in part.spreads), slower=slower["slower"], slower_bytes=slower["slower_bytes"], **numbers,
    )  # fmt: skip


def _cluster(table: _Table, name: str, folder: Path) -> Cluster:
    table.plain("aliases", list, required=False)
    title = table.plain("title", str, name, required=False)

    def part(key: str, of_table: Any, of_name: Any) -> Any:
        """`key` is a name in the catalogue, a file beside this one, or a table in place."""
        value = table.data.get(key)
        table.seen.add(key)
        if isinstance(value, dict):
            return of_table(_Table(value, f"{table.where}, [{key}]"), f"{name}.{key}")
        if isinstance(value, str):
            return of_name(folder / value if value.endswith(".toml") else value)
        raise table.fail(key, f"must be a name of the catalogue, a TOML file or a table, found {_shown(value)}")

    rings = table.plain("rings_by_ranks", dict, {}, required=False)
    ring_table = _Table(rings, table.where, "rings_by_ranks.")
    if bad := [key for key in rings if not key.isdecimal() or len(key) > len(str(MOST_GPUS))]:
        raise table.fail("rings_by_ranks", f"has keys that are not numbers of ranks: {_listed(bad)}")
    cluster = Cluster(
        name=name,
        gpu=part("gpu", _gpu, load_gpu),
        gpus_per_node=table.count("gpus_per_node"),
        nodes=table.count("nodes") if "nodes" in table.data else None,
        intra=part("intra", _link, load_link),
        inter=part("inter", _link, load_link),
        links_per_gpu=table.count("links_per_gpu"),
        links_per_node=table.count("links_per_node"),
        rings_by_ranks=tuple(sorted((int(key), ring_table.number(key, least=1e-3)) for key in rings)),
        sources=(("title", title), *table.sources, *ring_table.sources),
        spreads=(*table.spreads, *ring_table.spreads),
    )
    table.done()
    return cluster


def _no_file(path: Path) -> str:
    """Why nothing can be read at a path; '' if it is a file."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # or a name that no file can have
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if stat.S_ISREG(mode):
        return ""
    return f"is {'a folder' if stat.S_ISDIR(mode) else 'a device, a pipe or a socket'}, and a TOML file is needed"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise HardwareFileError(f"{path} is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise HardwareFileError(f"{path} is not UTF-8 text: {error}") from error
    except RecursionError as error:
        raise HardwareFileError(f"{path} is nested too deeply") from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise HardwareFileError(f"{path} has a number of thousands of digits") from error
    except OSError as error:
        raise HardwareFileError(f"{path} cannot be read: {error.strerror or error}") from error


def _index(kind: str) -> dict[str, Path]:
    """Name or alias -> file of one folder of the catalogue. Two files that claim one name are an error."""
    found: dict[str, Path] = {}
    for path in sorted((CATALOGUE / kind).glob("*.toml")):
        aliases = _read(path).get("aliases", [])
        for name in (path.stem, *aliases):
            if found.setdefault(str(name).lower(), path) != path:
                raise HardwareFileError(f"{path} and {found[name]} both claim the name {name!r}")
    return found


def _find(kind: str, name: str | Path) -> tuple[dict[str, Any], str, Path]:
    """(data, name, file) of a catalogue name or of a path (anything that ends in .toml or has a separator)."""
    text = str(name)
    if isinstance(name, Path) or text.endswith(".toml") or "/" in text:
        path = Path(name)
        if problem := _no_file(path):
            raise UnknownHardware(f"{kind.removesuffix('s')} file {_printable(text)} {problem}")
    elif text.lower() in _names(kind):
        path = CATALOGUE / kind / f"{text.lower()}.toml"
    else:
        index = _index(kind)
        if text.lower() not in index:
            raise UnknownHardware(f"there is no {kind.removesuffix('s')} {_shown(text)} in the catalogue; {_near(text, index)}")
        path = index[text.lower()]
    return _read(path), path.stem, path


def load_gpu(name: str | Path) -> Gpu:
    """A GPU by catalogue name ('h100-sxm'), alias ('h100') or TOML file. Raises UnknownHardware, HardwareFileError."""
    data, stem, path = _find("gpus", name)
    return _gpu(_Table(data, _printable(str(path))), stem)


def load_link(name: str | Path) -> Link:
    """A link by catalogue name, alias or TOML file. Raises UnknownHardware, HardwareFileError."""
    data, stem, path = _find("links", name)
    return _link(_Table(data, _printable(str(path))), stem)


def load_cluster(name: str | Path) -> Cluster:
    """A cluster by catalogue name, alias or TOML file ('p4d', 'h100-8x', 'my-cluster.toml').

    In a file, `gpu`, `intra` and `inter` are names of the catalogue, TOML files beside it, or tables in place.
    Raises UnknownHardware (with near matches) and HardwareFileError.
    """
    data, stem, path = _find("clusters", name)
    return _cluster(_Table(data, _printable(str(path))), stem, path.parent)


def _names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (CATALOGUE / kind).glob("*.toml")))


def list_clusters() -> tuple[str, ...]:
    """Names of the catalogue's clusters, without aliases."""
    return _names("clusters")


def list_gpus() -> tuple[str, ...]:
    """Names of the catalogue's GPUs, without aliases."""
    return _names("gpus")


def list_links() -> tuple[str, ...]:
    """Names of the catalogue's links, without aliases."""
    return _names("links")
