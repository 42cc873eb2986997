"""Workers of this machine as if each had a machine of its own: a share of the cores, and a network card of a stated rate.

Each worker is in a network namespace of its own, joined to a switch (a bridge in one more namespace) by a pair of virtual cards that send
at most the stated rate (tc's token bucket) either way. That needs Linux, ip and tc, and the rights of root; without a rate there are no
namespaces, and the workers talk over the loopback device. What is made is removed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import LaunchError

__all__ = ["LINKS", "Place", "shaped"]

LINKS: dict[str, float] = {"loopback": 0.0, "10gbit": 1.25e9, "1gbit": 1.25e8, "200mbit": 2.5e7}
"""Name -> bytes a second out of each worker, 0 for no limit."""

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET (sched.h)
_BURST = "256kb"  # what a card sends at once: tc(8) wants at least a tick's worth


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker of so many runs. Called first in each of them, with its rank. name: of its namespace, before its rank."""

    workers: int
    name: str = ""

    def cores(self, rank: int) -> set[int]:
        """Its share of the cores that this process may use; of fewer than there are workers, one that several share."""
        every = sorted(os.sched_getaffinity(0))
        if len(every) < self.workers:
            return {every[rank % len(every)]}
        return set(every[rank * len(every) // self.workers : (rank + 1) * len(every) // self.workers])

    def __call__(self, rank: int) -> None:
        os.sched_setaffinity(0, self.cores(rank))
        if not self.name:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}{rank}", "rb") as namespace:
            if libc.setns(namespace.fileno(), _NEW_NETWORK):
                number = ctypes.get_errno()
                raise OSError(number, f"worker {rank} cannot enter its network namespace: {os.strerror(number)}")
        os.environ["GLOO_SOCKET_IFNAME"] = "card"


@contextlib.contextmanager
def shaped(link: str, workers: int) -> Iterator[Place]:
    """A network of that kind for so many workers. LaunchError where it cannot be made."""
    rate = LINKS[link]
    if not rate:
        yield Place(workers=workers)
        return
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise LaunchError(f"a network of {link} is shaped by {' and '.join(missing)}, which are not here; use --links loopback")
    name = f"ap{os.getpid()}-"
    switch = f"{name}s"
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for rank in range(workers):
            own = f"{name}{rank}"
            _run("ip", "netns", "add", own)
            _run("ip", "-n", switch, "link", "add", f"port{rank}", "type", "veth", "peer", "name", "card", "netns", own)
            _run("ip", "-n", switch, "link", "set", f"port{rank}", "master", "switch", "up")
            _run("ip", "-n", own, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "card")
            for device in ("lo", "card"):
                _run("ip", "-n", own, "link", "set", device, "up")
            for where, device in ((own, "card"), (switch, f"port{rank}")):
                limit = ("rate", f"{rate * 8:.0f}bit", "burst", _BURST, "latency", "50ms")
                _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield Place(workers=workers, name=name)
    finally:
        for made in (*(f"{name}{rank}" for rank in range(workers)), switch):
            subprocess.run(["ip", "netns", "del", made], capture_output=True, check=False)  # it may not have been made


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"{' '.join(command)}: {done.stderr.strip()}; shaping a network needs root: or use --links loopback")
