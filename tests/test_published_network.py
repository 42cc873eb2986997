"""What sources say of their networks, and the links that a node has by it."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks._network import with_network
from cost_models import load_cluster
from cost_models.cluster import load_link

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    "text,gigabits",
    [
        ("InfiniBand 400Gb/s per GPU", 8 * 400),
        ("RoCE, 400 Gbps/GPU", 8 * 400),
        ("200 Gb/s per NIC, one a GPU", 8 * 200),
        ("InfiniBand 800 Gb/s per node", 800),
        ("1600Gbps/node RoCE", 1600),
        ("3.2 Tb/s per node", 3200),
        ("8 x 200 Gb/s HDR InfiniBand", 1600),
        ("4x HDR 200Gb/s", 800),
        ("50 GB/s per GPU", 8 * 400),
        ("InfiniBand NDR 400 Gb/s", 8 * 400),  # a port's rate
        ("InfiniBand 1600 Gb/s", 1600),  # no port has it
        ("RoCE 800 Gb/s", 800),
        ("Ethernet 25 Gb/s", 25),  # less than a link of the machine's own
        ("2x 100 Gb/s Ethernet", 200),
    ],
)
def test_rates_of_a_node(text: str, gigabits: float) -> None:
    found = with_network(load_cluster("dgx-a100"), text)
    assert found.node_bandwidth_bytes_per_s == gigabits * 1e9 / 8


@pytest.mark.parametrize(
    "text,links,link",
    [
        ("InfiniBand 800 Gb/s per node", 4, "infiniband-200"),  # the machine's own
        ("1600Gbps/node RoCE", 8, "infiniband-200"),
        ("Ethernet 25 Gb/s", 1, "ethernet-25"),
        ("100 Gb/s Ethernet per GPU", 8, "ethernet-100"),
        ("EFA 400 Gb/s per node", 4, "efa-100"),
        ("800 Gb/s per node", 4, "infiniband-200"),
    ],
)
def test_kinds_of_links(text: str, links: int, link: str) -> None:
    found = with_network(load_cluster("dgx-a100"), text)
    assert (found.links_per_node, found.inter) == (links, load_link(link))


def test_a_rate_of_each_gpu_is_that_of_the_gpus_that_a_node_has() -> None:
    of_four = dataclasses.replace(load_cluster("dgx-a100"), gpus_per_node=4)
    assert with_network(of_four, "200 Gb/s per GPU").links_per_node == 4


@pytest.mark.parametrize("text", ["", "not stated", "EFA (AWS; rate not stated)", "InfiniBand"])
def test_what_is_not_stated_is_the_machines_own(text: str) -> None:
    assert with_network(load_cluster("dgx-a100"), text) == load_cluster("dgx-a100")
