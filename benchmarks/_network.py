"""What a source says of its network -> the links of a cluster.

"400 Gb/s per GPU" is the rate of each GPU's own card, "1600Gbps/node" that of all cards of a node together, "8 x 200 Gb/s" says both.
A rate alone is a card's where it is that of one InfiniBand port (EDR 100, HDR 200, NDR 400, XDR 800), else the node's.
Where nothing is stated the machine's own links stay.
"""

from __future__ import annotations

import dataclasses
import re

from cost_models import Cluster

__all__ = ["with_network"]

_RATE = re.compile(r"(?:(\d+)\s*[x\u00d7*]\s*(?:[A-Z]+\s*)?)?(\d+(?:\.\d+)?)\s*(G|T)(b|B)")
_EACH = re.compile(r"(?:per|/|a|each)\s*(?:GPU|card|NIC|HCA|port|rail|adapter|accelerator)", re.IGNORECASE)
_NODE = re.compile(r"(?:per|/|a)\s*(?:node|machine|server|host|instance)", re.IGNORECASE)
_INFINIBAND = re.compile(r"InfiniBand|\bIB\b|EDR|HDR|NDR|XDR", re.IGNORECASE)
_PORTS = (100.0, 200.0, 400.0, 800.0)  # Gb/s of InfiniBand EDR, HDR, NDR, XDR


def with_network(cluster: Cluster, text: str) -> Cluster:
    """The cluster whose node has as many links of its kind as make up the rate that a source states."""
    found = _RATE.search(text)
    if found is None:
        return cluster
    count = int(found[1]) if found[1] else None
    gigabits = float(found[2]) * (1000 if found[3] == "T" else 1) * (8 if found[4] == "B" else 1)
    if count is None:
        each = bool(_EACH.search(text)) or not _NODE.search(text) and bool(_INFINIBAND.search(text)) and gigabits in _PORTS
        count = cluster.gpus_per_node if each else 1
    links = round(count * gigabits * 1e9 / 8 / cluster.inter.bandwidth_bytes_per_s)
    return dataclasses.replace(cluster, links_per_node=max(1, links))
