"""A cluster as one TOML file that load_cluster reads: its GPU and its links are tables in place."""

from __future__ import annotations

import json
from typing import Any

from cost_models.cluster import Cluster, Gpu, Link

__all__ = ["cluster_toml", "figures"]

_RATE, _FRACTION, _RINGS = "peak_flops_per_s.", "achievable_fraction.", "rings_by_ranks."


def figures(item: Cluster | Gpu | Link) -> dict[str, dict[str, Any]]:
    """Every number of a device and its source: {'launch_s': {'value': 5e-5, 'source': 'fitted: ...'}}; those of a table within it
    as 'peak_flops_per_s.float32'. A cluster's GPU and links are not among them."""
    spreads = dict(item.spreads)
    return {
        key: {"value": _value(item, key), "source": source} | ({"spread": spreads[key]} if key in spreads else {})
        for key, source in item.sources
        if key != "title"
    }


def _value(item: Cluster | Gpu | Link, key: str) -> float:
    table, _, name = key.rpartition(".")
    if not table:
        return getattr(item, name)
    if isinstance(item, Gpu):
        return dict(item.rates if key.startswith(_RATE) else item.fractions)[name]
    if isinstance(item, Link):
        return dict(getattr(item, table))[name]
    assert isinstance(item, Cluster) and key.startswith(_RINGS), key
    return dict(item.rings_by_ranks)[int(name)]


def cluster_toml(cluster: Cluster) -> str:
    """The text of a file from which load_cluster makes this cluster (under the file's name)."""
    lines = [*_device(cluster, "")]
    for name, part in (("gpu", cluster.gpu), ("intra", cluster.intra), ("inter", cluster.inter)):
        lines += ["", f"[{name}]", *_device(part, f"{name}.")]
    return "\n".join(lines) + "\n"


def _device(item: Cluster | Gpu | Link, prefix: str) -> list[str]:
    """The lines of one device: its own values, then its tables."""
    lines = [f"title = {_text(dict(item.sources)['title'])}"]
    if isinstance(item, Link):
        lines.append(f"switched = {'true' if item.switched else 'false'}")
    if isinstance(item, Gpu) and item.host:
        lines.append("host = true")
    tables: dict[str, list[str]] = {}
    for key, figure in figures(item).items():
        table, _, name = key.rpartition(".")
        spread = f", spread = {figure['spread']!r}" if "spread" in figure else ""
        line = f"{name} = {{ value = {figure['value']!r}, source = {_text(figure['source'])}{spread} }}"
        (tables.setdefault(table, []) if table else lines).append(line)
    for table, inner in tables.items():
        lines += ["", f"[{prefix}{table}]", *inner]
    return lines


def _text(text: str) -> str:
    """A TOML basic string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
