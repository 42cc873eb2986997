"""The random numbers that the calls of a module draw: alike on all ranks, others in each call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autopar.run.mesh import Mesh

__all__ = ["RandomNumbers", "just_seeded", "seed_generators", "seeded"]


class RandomNumbers:
    """seed: rank 0's. calls: since it was set. Collective: all ranks make it together."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device  # beside the CPU, whose generators a call may draw from
        self.seed: int = mesh.agree(torch.initial_seed())
        self.calls = 0

    @contextlib.contextmanager
    def of_a_call(self, *, draws: bool = False) -> Iterator[None]:
        """Generators that are equal on all ranks and differ from call to call. draws: whether the module is known to draw. Then they begin
        anew when the user has called torch.manual_seed, on all ranks alike, and the user's generator goes on by one number; else it is
        left alone. Rank 0's generator says for all whether it has just been seeded: on other ranks the user may have drawn since."""
        if draws:
            seed = self._mesh.agree_number(torch.initial_seed() if just_seeded() else None)
            if seed is not None:
                self.seed, self.calls = seed, 0
            torch.rand(())  # as a draw of the model's own would: a generator that has just been seeded is told from one that has not
        with seeded((self.seed + 0x9E3779B97F4A7C15 * self.calls) % 2**63, self._device):
            self.calls += 1
            yield


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The generators of the CPU and of the device, if that is a GPU, begin at seed, and go on afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_generators(seed, device)
        yield


def seed_generators(seed: int, device: torch.device) -> None:
    """Let those of the CPU and of the device, if that is a GPU, begin at seed. torch.manual_seed would write down a stack for each kind of
    device that there may be, at each call (torch 2.13)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def just_seeded() -> bool:
    """Whether the process's generator has been seeded, and nothing has been drawn since."""
    return torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(torch.initial_seed()).get_state())
