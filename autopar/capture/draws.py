"""The generators of Python and numpy while the user's own code runs: which were drawn from, and other draws, to see whether they matter."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from autopar.run import outside_draws

__all__ = ["OTHER_DRAWS", "drawn_outside"]


@contextlib.contextmanager
def drawn_outside() -> Iterator[list[str]]:
    """Holds, after it, the generators other than torch's that the code inside drew from; their states are as before."""
    drawn: list[str] = []
    with outside_draws.kept():
        before = outside_draws.states()
        yield drawn
        drawn += [name for name, a, b in zip(("random", "numpy.random"), before, outside_draws.states()) if a != b]


LOWEST, HIGHEST = 0, 0x12DD9BB3  # words of the state of a Mersenne twister, which gives 0 and 2^32 - 1 of them
OTHER_DRAWS = tuple((*(word,) * 500, *range(1, 125)) for word in (LOWEST, HIGHEST))  # then others: loops that wait for a number end
OTHER_DRAWS += tuple((*random.Random(seed).getstate()[1][1:624], 0) for seed in range(101, 109))  # their first words are all the same

