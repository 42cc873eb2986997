"""The random numbers that the calls of a module draw: alike on all ranks, others in each call."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

import torch

from autopar.run.mesh import Mesh

__all__ = ["RandomNumbers", "just_seeded", "seed_generators", "seeded"]

_KNOWN = 20_000  # states of the user's generator, two for each call


class RandomNumbers:
    """seed: rank 0's. calls: since it was set. Collective: all ranks make it together."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device  # beside the CPU, whose generators a call may draw from
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.seed: int = mesh.agree(torch.initial_seed()) % 2**63
        self.calls = 0

    @property
    def stream(self) -> tuple[int, int]:
        """The seed and the calls since it was set, of the next call."""
        return self.seed, self.calls

    @stream.setter
    def stream(self, stream: tuple[int, int]) -> None:
        self.seed, self.calls = stream
        self._known.clear()

    @contextlib.contextmanager
    def of_a_call(self, *, draws: bool = False) -> Iterator[None]:
        """Generators that are equal on all ranks and differ from call to call. draws: whether the module is known to draw. Then they begin
        anew when the user has called torch.manual_seed, on all ranks alike, and are again those of an earlier call when the user's
        generator is again as it was then (torch.set_rng_state, fork_rng); that generator goes on by one number. Else it is left alone.
        Rank 0's generator says for all what has been done to it: on other ranks the user may have drawn since."""
        if draws:
            here = _state()
            found = self._known.get(here, (torch.initial_seed() % 2**63, 0) if just_seeded() else self.stream)
            self.seed, self.calls = self._mesh.agree_numbers(found)
            self._note(here, self.calls)
            torch.rand((), device="cpu")  # as a draw of the model's own would: one that has just been seeded is told from one that has not
            self._note(_state(), self.calls + 1)
        with seeded((self.seed + 0x9E3779B97F4A7C15 * self.calls) % 2**63, self._device):
            self.calls += 1
            yield

    def _note(self, state: int, calls: int) -> None:
        """A call that begins in this state of the user's generator is this one of the stream."""
        self._known[state] = self.seed, calls
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)


def _state() -> int:
    """Another number for each state of the process's generator."""
    return hash(torch.get_rng_state().numpy().tobytes())


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The generators of the CPU and of the device, if that is a GPU, begin at seed, and go on afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_generators(seed, device)
        yield


def seed_generators(seed: int, device: torch.device) -> None:
    """Let those of the CPU and of the device, if that is a GPU, begin at seed (of other GPUs, in `generators`, no generator is in use)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def just_seeded() -> bool:
    """Whether the process's generator has been seeded, and nothing has been drawn since."""
    return torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(torch.initial_seed()).get_state())
