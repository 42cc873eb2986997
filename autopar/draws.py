"""The same random numbers on both sides of a comparison: what one process draws is recorded, and given to a program as inputs.

No gradient flows through a draw, but for that of a gamma distribution, so that a program which is given the outcome computes what the
one that draws it does. Submodules that run as they are written draw the same where both begin from the same seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture import Captured
from autopar.capture.drawn import functions_replaced
from autopar.capture.repeats import forwards_replaced
from autopar.catalog.rule import draws
from autopar.errors import UnsupportedOp
from autopar.ir import Op, Program, refs
from autopar.planner.moments import given
from autopar.run.outside_draws import from_seed
from autopar.run.region import REGION, Region
from autopar.run.region_modules import Applied, Drawn

__all__ = ["Recorder", "draws_given", "drawn_names", "recording", "with_seeds"]

OUTCOMES = (
    "rand randn randint rand_like randn_like randint_like normal normal_functional bernoulli multinomial uniform exponential cauchy "
    "geometric log_normal random poisson binomial randperm _standard_gamma _sample_dirichlet"
)


class Recorder(TorchDispatchMode):
    """Inside, every outcome of a random operator is kept in `outcomes`, in the order in which they are drawn, and so is what functions
    return that `recorded` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Tensor] = []
        self._apart = 0  # calls that are running of what draws apart

    def recorded(self, function: FunctionType) -> Callable[..., Any]:
        """The function, of which what it returns is an outcome, and not what it draws for that."""

        def call(*args: Any, **kwargs: Any) -> Any:
            module = Drawn(function)
            with self.apart():
                found = module(*args, **kwargs)
            if not self._apart:
                self.outcomes += [t.detach().clone() for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]
            return module.returned[0]

        return call

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, nothing is kept."""
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._apart and str(func).split(".")[1].removesuffix("_") in OUTCOMES.split():
            self.outcomes.append(result.detach().clone())
        return result


@contextlib.contextmanager
def recording(model: nn.Module, captured: Captured) -> Iterator[list[Tensor]]:
    """Inside, a call of the model draws what its program is to be given: the outcomes, in order. What begins from a seed there does here
    too."""
    recorder = Recorder()
    regions = [x for x in dict[str, Any](captured.tensors).values() if isinstance(x, Region)]
    functions = {x.module.function for x in regions if isinstance(x.module, Drawn)}
    calls: Counter[str] = Counter()

    def seeded(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[path] += 1
            with from_seed(_seed_of(path, calls[path])), recorder.apart():
                return forward(*args, **kwargs)

        return run

    paths = {x.path for x in regions if x.seed is not None}
    forwards = {path: seeded(path, model.get_submodule(path).forward) for path in paths}
    drawn = functions_replaced({function: recorder.recorded(function) for function in functions})
    with forwards_replaced(forwards, model), drawn, recorder if drawn_names(captured) else contextlib.nullcontext():
        yield recorder.outcomes


def with_seeds(captured: Captured) -> Captured:
    """The same, whose submodules that draw, and run as they are written, begin from a seed in each call, another for each of them."""
    tensors: dict[str, Any] = dict(captured.tensors)
    calls: Counter[str] = Counter()
    for op in captured.program.ops:
        if (region := _region_of(op, captured)) is None:
            continue
        calls[region.path] += 1
        if draws(op) and not isinstance(region.module, Drawn | Applied):
            tensors[refs(op)[0]] = dataclasses.replace(region, seed=_seed_of(region.path, calls[region.path]))
    return dataclasses.replace(captured, tensors=tensors) if calls else captured


def _seed_of(path: str, call: int) -> int:
    """call: of a submodule, from 1."""
    return zlib.crc32(f"{path}@{call}".encode())


def drawn_names(captured: Captured) -> tuple[str, ...]:
    """The values of a program that are outcomes of random operators, in order. UnsupportedOp if it draws in any other way (a dropout),
    in which the outcome is no result."""
    drawing = [op for op in captured.program.ops if draws(op) and not _begins_from_a_seed(op, captured)]
    told = [op for op in drawing if _gives_what_it_draws(op, captured) and not _differentiated(op, captured.program)]
    other = sorted({op.target for op in drawing if op not in told})
    if other:
        raise UnsupportedOp(
            f"{captured.program.name} draws random numbers inside of {', '.join(other)}; one process and several draw different ones, so "
            "that their losses cannot be compared"
        )
    return tuple(o for op in drawing for o in op.outputs if o is not None)


def _region_of(op: Op, captured: Captured) -> Region | None:
    """What an operator runs as it is written, if it is one that does."""
    region: Any = captured.tensors[refs(op)[0]] if op.target == REGION else None
    return region if isinstance(region, Region) else None


def _begins_from_a_seed(op: Op, captured: Captured) -> bool:
    region = _region_of(op, captured)
    return region is not None and region.seed is not None


def _gives_what_it_draws(op: Op, captured: Captured) -> bool:
    if (region := _region_of(op, captured)) is not None:
        return isinstance(region.module, Drawn)
    return op.target.split(".")[1] in OUTCOMES.split()


def _differentiated(op: Op, program: Program) -> bool:
    if op.target == REGION:
        return any(program.types[o].grad for o in op.outputs if o is not None)
    return op.target.startswith("aten._standard_gamma") and not op.no_grad and any(program.types[v].grad for v in refs(op))


def draws_given(captured: Captured, outcomes: Sequence[Sequence[Tensor]]) -> tuple[Captured, tuple[dict[str, Tensor], ...]]:
    """The program that takes its random numbers as keyword inputs, and these inputs for each step. outcomes: of each step, as recorded
    while the model itself ran. UnsupportedOp if they are not those that the program draws."""
    program = captured.program
    names = drawn_names(captured)
    wanted = [(program.types[v].shape, program.types[v].dtype) for v in names]
    steps = []
    for found in outcomes:
        live = _those_of(wanted, found)
        if live is None:
            raise UnsupportedOp(
                f"{program.name} draws {len(found)} times in its forward, and its graph {len(wanted)} times, and it cannot be told which "
                "are the same; remove draws whose results are not used"
            )
        steps.append(dict(zip(names, live, strict=True)))
    replaced, read = given(program, {v: (v,) for v in names})
    if program.batched is not None:
        of_samples = (v for v in read if program.types[v].shape[:1] == (program.batch_size,))
        replaced = replaced.replace(batched=(*program.batched, *of_samples))
    return dataclasses.replace(captured, program=replaced), tuple({v: step[v] for v in read} for step in steps)


def _those_of(wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], found: Sequence[Tensor]) -> list[Tensor] | None:
    """The outcomes of these shapes and dtypes, in order; None unless each of the others differs from all that are wanted."""
    kinds = set(wanted)
    live = [t for t in found if (tuple(t.shape), t.dtype) in kinds]
    return live if [(tuple(t.shape), t.dtype) for t in live] == list(wanted) else None
