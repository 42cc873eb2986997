"""The gradients of activations that a backward pass has made and not used yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.ir import Program

__all__ = ["Arriving"]


class Arriving:
    """The gradients of activations that are there: value -> its storage, and the storages' bytes. Two values may share one. total: of those
    that are there."""

    def __init__(self, storage: Mapping[str, int], nbytes: Sequence[int]) -> None:
        self.storage, self._nbytes = dict(storage), list(nbytes)
        self._values = Counter(self.storage.values())
        self.total = sum(self._nbytes[x] for x in self._values)

    @staticmethod
    def of(values: Sequence[str], program: Program) -> Arriving:
        """One for each of these values."""
        each = dict.fromkeys(values)
        return Arriving({v: k for k, v in enumerate(each)}, [program.types[v].nbytes for v in each])

    def copy(self) -> Arriving:
        return Arriving(self.storage, self._nbytes)

    def add(self, value: str, nbytes: int) -> None:
        """In a storage of its own."""
        self._nbytes.append(nbytes)
        self._put(value, len(self._nbytes) - 1)

    def share(self, value: str, storage: int) -> None:
        """In a storage that was there."""
        self._put(value, storage)

    def drop(self, value: str) -> None:
        storage = self.storage.pop(value)
        self._values[storage] -= 1
        if not self._values[storage]:
            self.total -= self._nbytes[storage]

    def _put(self, value: str, storage: int) -> None:
        self.storage[value] = storage
        self._values[storage] += 1
        if self._values[storage] == 1:
            self.total += self._nbytes[storage]
