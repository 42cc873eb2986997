"""Where the ranks of one start find each other under torchrun.

torchrun's agent keeps one store over all its restarts, and torch's process groups write under the same keys after each (torch 2.13,
https://github.com/pytorch/pytorch/issues/135712): ranks that are started again read the addresses of ranks that are dead, and wait or fail.
So rank 0 of each start makes a store of its own, and the agent's only says where: an entry whose store does not answer is of an earlier
start, and is read again.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import time

import torch.distributed as dist

from autopar.errors import LaunchError

__all__ = ["kept_over_restarts", "store_of_this_start"]

_KEY = "autopar/start"
_NONCE = "nonce"
_LIMIT_S = 1800.0  # as process groups wait for their ranks


def kept_over_restarts() -> bool:
    """Whether the store that torchrun names is its agent's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_this_start(rank: int) -> dist.Store:
    """A store that only the ranks of this start write to. LaunchError if rank 0 does not say where it is."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = dist.TCPStore(host, port, None, False, wait_for_workers=False)
    if rank == 0:
        own = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
        nonce = secrets.token_hex(8)
        own.set(_NONCE, nonce)
        agents.set(_KEY, f"{own.port} {nonce}")
        return own
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        if agents.check([_KEY]):
            at, nonce = agents.get(_KEY).decode().split()
            if (found := _answering(host, int(at), nonce)) is not None:
                return found
        time.sleep(0.1)
    raise LaunchError(f"rank 0 has not begun within {_LIMIT_S:.0f} s, and rank {rank} waited for it: see the log of rank 0")


def _answering(host: str, port: int, nonce: str) -> dist.Store | None:
    """The store at an address, if it is there and the one that is meant."""
    try:
        socket.create_connection((host, port), timeout=5).close()
        store = dist.TCPStore(host, port, None, False, timeout=datetime.timedelta(seconds=30), wait_for_workers=False)
        if not store.check([_NONCE]) or store.get(_NONCE).decode() != nonce:
            return None
    except (OSError, RuntimeError):  # of a start that has ended
        return None
    store.set_timeout(datetime.timedelta(seconds=_LIMIT_S))
    return store
