"""Inside of `as_one_process` torch.distributed is that of one process, whoever asks and by whatever name; outside it is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.run import WorkerPool
from autopar.run.alone import as_one_process, written

pytestmark = pytest.mark.gloo


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (grad,) = gradients
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


def _moved() -> dict[str, Any]:
    """What collectives of both kinds of groups give of the rank's own number plus one."""
    own, everyone = torch.tensor([dist.get_rank() + 1.0]), dist.group.WORLD
    found: dict[str, Any] = {}
    with as_one_process():
        for kind, group in (("default", None), ("held", everyone)):
            total, sent = own.clone(), own.clone()
            parts = [torch.zeros(1) for _ in range(dist.get_world_size(group))]
            joined, part, mixed = torch.zeros(1), torch.zeros(1), torch.zeros(1)
            dist.all_reduce(total, group=group)
            dist.broadcast(sent, src=0, group=group)
            dist.all_gather(parts, own, group=group, async_op=True).wait()
            dist.all_gather_into_tensor(joined, own, group=group)
            dist.reduce_scatter_tensor(part, own, group=group)
            dist.all_to_all_single(mixed, own, group=group)
            dist.barrier(group=group)
            found[kind] = [x.item() for x in (total, sent, *parts, joined, part, mixed)], dist.get_rank(group)
        found["asked"] = dist.is_initialized()
        leaf = own.clone().requires_grad_()
        inside = Summed.apply(leaf)
    (inside * own).sum().backward()  # outside, where the group is that of all ranks again
    found["gradient"], leaf.grad = leaf.grad.item(), None
    (Summed.apply(leaf).sum() * own).sum().backward()
    found["outside"] = leaf.grad.item()
    after = own.clone()
    dist.all_reduce(after)
    found["after"] = after.item(), dist.get_world_size(), dist.is_initialized()
    return found


def test_collectives_give_what_they_are_given(pair: WorkerPool) -> None:
    for rank, found in enumerate(pair.run(_moved, timeout_s=60)):
        assert found["default"] == found["held"] == ([rank + 1.0] * 6, 0)
        assert found["asked"] is False
        assert found["gradient"] == rank + 1.0
        assert found["outside"] == 1.5  # the mean of 1 and 2
        assert found["after"] == (3.0, 2, True)


def test_without_a_group_there_is_one_of_one_process() -> None:
    with as_one_process():
        x = torch.ones(2)
        dist.all_reduce(x)
        assert (dist.get_rank(), dist.get_world_size(), dist.is_initialized(), x.tolist()) == (0, 1, False, [1.0, 1.0])
    with pytest.raises(ValueError, match="not been initialized"):
        dist.get_rank()


def test_a_function_is_known_as_it_was_written() -> None:
    applied = list[type]()
    with as_one_process():
        out = Summed.apply(torch.ones(1, requires_grad=True))
        applied.append(type(out.grad_fn))
    assert applied[0].__name__ == "SummedBackward" and written(Summed) is Summed
