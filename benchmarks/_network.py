"""What a source says of its network -> the links of a cluster.

"400 Gb/s per GPU" is the rate of each GPU's own card, "1600Gbps/node" that of all cards of a node together, "8 x 200 Gb/s" says both.
A rate alone is a card's where it is that of one InfiniBand port (EDR 100, HDR 200, NDR 400, XDR 800), else the node's.
What a link of that kind takes beyond its rate is the catalogue's: of the machine's own link where it is of the kind that is stated (RoCE is
as InfiniBand), else of the one whose rate is nearest. Where nothing is stated the machine's own links stay.
"""

from __future__ import annotations

import dataclasses
import math
import re

from cost_models import Cluster
from cost_models.cluster import Link, list_links, load_link

__all__ = ["with_network"]

_RATE = re.compile(r"(?:(\d+)\s*[x\u00d7*]\s*(?:[A-Z]+\s*)?)?(\d+(?:\.\d+)?)\s*(G|T)(b|B)")
_EACH = re.compile(r"(?:per|/|a|each)\s*(?:GPU|card|NIC|HCA|port|rail|adapter|accelerator)", re.IGNORECASE)
_NODE = re.compile(r"(?:per|/|a)\s*(?:node|machine|server|host|instance)", re.IGNORECASE)
_INFINIBAND = re.compile(r"InfiniBand|\bIB\b|EDR|HDR|NDR|XDR", re.IGNORECASE)
_KINDS = {  # the beginning of a link's name -> how sources call it; the first that is found
    "infiniband": re.compile(rf"{_INFINIBAND.pattern}|RoCE", re.IGNORECASE),
    "efa": re.compile(r"\bEFA", re.IGNORECASE),
    "omnipath": re.compile(r"Omni-?Path|\bOPA\b", re.IGNORECASE),
    "ethernet": re.compile(r"Ethernet|\bTCP\b|GbE\b", re.IGNORECASE),
}
_PORTS = (100.0, 200.0, 400.0, 800.0)  # Gb/s of InfiniBand EDR, HDR, NDR, XDR


def with_network(cluster: Cluster, text: str) -> Cluster:
    """The cluster whose nodes are linked as a source states."""
    found = _RATE.search(text)
    if found is None:
        return cluster
    count = int(found[1]) if found[1] else None
    gigabits = float(found[2]) * (1000 if found[3] == "T" else 1) * (8 if found[4] == "B" else 1)
    if count is None and (_EACH.search(text) or not _NODE.search(text) and _INFINIBAND.search(text) and gigabits in _PORTS):
        count = cluster.gpus_per_node
    rate = gigabits * 1e9 / 8
    link = _link(cluster.inter, text, rate)
    if count is None:
        count = max(1, round(rate / link.bandwidth_bytes_per_s))
        rate /= count
    return dataclasses.replace(cluster, inter=dataclasses.replace(link, bandwidth_bytes_per_s=rate), links_per_node=count)


def _link(own: Link, text: str, rate: float) -> Link:
    """The link of the kind that a source states. rate: of a card or a node, bytes/s."""
    kind = next((name for name, called in _KINDS.items() if called.search(text)), None)
    if kind is None or own.name.startswith(kind):
        return own
    links = [load_link(name) for name in list_links() if name.startswith(kind)]
    return min(links, key=lambda link: abs(math.log(link.bandwidth_bytes_per_s / rate)))
