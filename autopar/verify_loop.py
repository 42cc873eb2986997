"""`autopar verify --loop`: the user's own training loop, with the plain model on one process and with the compiled one on workers.

The loop is a function of the model that returns numbers: a list of losses, or a dict of numbers, tensors and lists of them. Both
sides run in float64 without dropout, as in `autopar.verify`; each rank must return what the one process returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import lift_to_float64, to_float64
from autopar.compare import leaves, worst_leaf
from autopar.dropout import without_dropout
from autopar.errors import VerificationError
from autopar.parallel import compile as compile_
from autopar.planner import Pins, Plan
from autopar.reference import as_float64
from autopar.rounding import RUNS, is_as_far, move
from autopar.run import WorkerPool
from autopar.targets import load_object, load_target
from autopar.verify import TOLERANCE

__all__ = ["LoopReport", "verify_loop"]

FLOOR = 1e-6  # numbers below it are compared as if they were this large


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopReport:
    """The worst relative error of any number that the loop returns on any rank, and its place; infinite where one is missing or no
    number of the same kind. numbers: how many were compared on each rank. rounding: where the error is over the tolerance, the largest
    one of the original model in the same loop, its weights moved by their last bit."""

    plan: Plan
    error: float
    at: str
    numbers: int
    rounding: float | None = None

    @property
    def ok(self) -> bool:
        return self.error < TOLERANCE

    @property
    def within_rounding(self) -> bool:
        """The error is over the tolerance, and rounding alone moves the original about as far: nothing can be told from it."""
        return not self.ok and self.rounding is not None and is_as_far(self.error, self.rounding)


def verify_loop(
    target: str,
    loop: str,
    gpus: int,
    *,
    pins: Pins | Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    loss: str | None = None,
    cluster: str = "cpu",
    memory: int | str | None = None,
    pool: WorkerPool | None = None,
    timeout_s: float | None = None,
    device: str | None = None,
) -> LoopReport:
    """target, loop, loss: as on the command line (file.py:name), since the workers load them too. device: of the workers, as in `verify`.
    Raises TargetError, LaunchError, and VerificationError where the loop returns nothing that can be compared."""
    with _in_float64():
        expected = _run(loop, _plain(target, loss))
    options = {"pins": pins, "plan": plan, "cluster": cluster, "memory": memory}
    with contextlib.nullcontext(pool) if pool is not None else WorkerPool(gpus, device=device) as workers:
        ranks = workers.run(_on_rank, target, loop, loss, gpus, options, timeout_s=timeout_s)
    errors = [(*worst_leaf(found, expected, floor=FLOOR), rank) for rank, (found, _) in enumerate(ranks)]
    error, at, rank = max(errors, key=lambda e: e[0])
    decided, numbers = Plan.from_json(ranks[0][1]), len(list(leaves(expected)))
    report = LoopReport(plan=decided, error=error, at=f"{at} on rank {rank}" if error else "", numbers=numbers)
    return report if report.ok else replace(report, rounding=_rounding(target, loop, loss, expected))


def _rounding(target: str, loop: str, loss: str | None, expected: Any) -> float | None:
    """None if the loop fails with weights that are moved."""
    found = []
    for k in range(RUNS):
        with _in_float64():
            model = _plain(target, loss)
            move(model, torch.Generator().manual_seed(k))
            try:
                found.append(worst_leaf(_run(loop, model), expected, floor=FLOOR)[0])
            except Exception:  # noqa: BLE001  (whatever a user's loop raises)
                return None
    return max(found)


def _on_rank(target: str, loop: str, loss: str | None, gpus: int, options: Mapping[str, Any]) -> tuple[Any, bytes]:
    """What the loop returns in this worker, and the plan."""
    torch.set_default_dtype(torch.float32)
    with _in_float64():
        model, inputs = load_target(target)
        module = compile_(
            to_float64(model), gpus, example_inputs=as_float64(inputs), loss=load_object(loss) if loss else None, **options
        )
        found = _run(loop, module)
    return found, module.plan.to_json()


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    torch.manual_seed(0)  # the model's weights and the loop's batches are the same on all
    with lift_to_float64(), without_dropout():
        yield


def _plain(target: str, loss: str | None) -> nn.Module:
    """The original model; as the compiled one it returns the loss, where that is given apart."""
    model = to_float64(load_target(target)[0])
    if loss is not None:
        forward, apart = model.forward, load_object(loss)
        model.forward = lambda *args, **kwargs: apart(forward(*args, **kwargs))
    return model


def _run(loop: str, model: nn.Module) -> Any:
    """What the loop returns, with tensors as they are, detached and whole."""
    train: Callable[[nn.Module], Any] = load_object(loop)
    torch.manual_seed(0)
    found = pytree.tree_map_only(Tensor, _whole, train(model))
    if not any(isinstance(value, (int, float, Tensor)) for path, value in leaves(found) if not path.startswith("len(")):
        raise VerificationError(
            f"{loop} returned {type(found).__name__} without any number; a loop for `verify` returns what is to be compared, such as "
            f"its losses: return [loss.item(), ...] or a dict of numbers"
        )
    return found


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()
