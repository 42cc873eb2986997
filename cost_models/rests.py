"""How parameters, their gradients and the optimizer's states rest over the data-parallel ranks, as data: ZeRO and hybrid sharding.

A row of RESTS says which of the three are in parts all through a step, and over which ranks (Rajbhandari et al. 2020, "ZeRO", section 5;
hybrid: Zhao et al. 2023, "PyTorch FSDP", section 3.2.2). Everything else follows from the row: how often parameters are gathered, when
gradients are brought together, what a rank holds and updates. The optimizer steps on parts, so that between steps a parameter is in parts
wherever its states are. A new kind is one entry of RESTS.

    row       parameters   gradients   states   over
    zero0     whole        whole       whole
    zero1     whole        whole       parts    all data-parallel ranks
    zero2     whole        parts       parts    all
    zero3     parts        parts       parts    all
    hybrid1   whole        whole       parts    those of a node; its copies on other nodes are the same
    hybrid2   whole        parts       parts    those of a node
    hybrid3   parts        parts       parts    those of a node

A parameter that does not train has no gradient and no states: it is whole, or where parameters are in parts all through a step in parts,
as by FSDP.

Dtypes are not here: they are the training software's, see `recipe`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["RESTS", "WHOLE", "Rest", "rest_of"]

Over = Literal["all", "node"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """One row. name: in plans and manifests. zero: the number by which it is pinned. title: in reports. parameters, gradients, states:
    whether each is in parts all through the step. over: the ranks that share the parts of one parameter: all data-parallel ranks, or
    groups of neighbours (those of a node, unless a plan states their number), each of which has all parts."""

    name: str
    zero: int
    title: str
    parameters: bool = False
    gradients: bool = False
    states: bool = False
    over: Over = "all"

    def __post_init__(self) -> None:
        if (self.parameters or self.gradients) and not self.states:
            raise ValueError(f"{self.name}: the optimizer steps on parts of what is in parts, so its states must be in parts too")

    @property
    def short(self) -> str:
        """In a word: 'ZeRO-1', 'ZeRO-3 within groups', 'no ZeRO'."""
        return f"ZeRO-{self.zero}{' within groups' if self.over == 'node' else ''}" if self.states else "no ZeRO"

    @property
    def gathered(self) -> Literal["never", "step", "use"]:
        """How often a parameter is made whole: once a step, or where it is used and then dropped."""
        return "never" if not self.states else "use" if self.parameters else "step"

    @property
    def reduced(self) -> Literal["step", "pass"]:
        """When gradients of all ranks are brought together: after the last micro-batch of a step, or in the backward pass of each."""
        return "pass" if self.gradients else "step"

    def shards(self, dp: int, node: int, pinned: int | None = None) -> Iterator[int]:
        """Over how many of dp data-parallel ranks the parts of a parameter may lie; 1: there are none. node: how many of them are
        neighbours in one node. pinned: only so many."""
        found = 1
        if self.states:
            group = max(n for n in range(1, dp + 1) if dp % n == 0 and n <= max(1, node)) if pinned is None else pinned
            found = dp if self.over == "all" else group
            if not 1 < found <= dp or dp % found or (self.over == "node" and found == dp):
                return
        if pinned in (None, found):
            yield found


RESTS: dict[str, Rest] = {
    row.name: row
    for row in (
        Rest(name="zero0", zero=0, title="whole on every data-parallel rank"),
        Rest(name="zero1", zero=1, title="ZeRO-1: optimizer states in parts", states=True),
        Rest(name="zero2", zero=2, title="ZeRO-2: gradients and optimizer states in parts", states=True, gradients=True),
        Rest(
            name="zero3", zero=3, title="ZeRO-3: parameters, gradients and optimizer states in parts, gathered where used",
            states=True, gradients=True, parameters=True,
        ),
        Rest(name="hybrid1", zero=1, title="ZeRO-1 within groups", states=True, over="node"),
        Rest(name="hybrid2", zero=2, title="ZeRO-2 within groups", states=True, gradients=True, over="node"),
        Rest(
            name="hybrid3", zero=3, title="ZeRO-3 within groups (hybrid sharding)", states=True, gradients=True, parameters=True,
            over="node",
        ),
    )
}  # fmt: skip

WHOLE = RESTS["zero0"]


def rest_of(name: str) -> Rest:
    """The row of that name. ValueError if there is none."""
    if name not in RESTS:
        raise ValueError(f"{name!r} is not one of {', '.join(RESTS)}")
    return RESTS[name]
