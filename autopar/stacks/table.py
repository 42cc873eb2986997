"""The softwares by name, and which of them a file is of."""

from __future__ import annotations

from pathlib import Path

from autopar.stacks.accelerate import ACCELERATE
from autopar.stacks.composer import COMPOSER
from autopar.stacks.configuration import Configuration
from autopar.stacks.deepspeed import DEEPSPEED
from autopar.stacks.files import parsed
from autopar.stacks.megatron import MEGATRON
from autopar.stacks.nanotron import NANOTRON_STACK
from autopar.stacks.stack import Stack, StackError
from autopar.stacks.torchtitan import TORCHTITAN
from autopar.stacks.transformers import TRANSFORMERS
from autopar.targets import did_you_mean

__all__ = ["STACKS", "read", "stack_of"]

STACKS = {s.name: s for s in (TORCHTITAN, MEGATRON, DEEPSPEED, ACCELERATE, TRANSFORMERS, NANOTRON_STACK, COMPOSER)}


def stack_of(name: str) -> Stack:
    """StackError with near matches if there is none."""
    if name not in STACKS:
        raise StackError(f"there is no training software {name!r} to plan for{did_you_mean(name, STACKS)}; there are {', '.join(STACKS)}")
    return STACKS[name]


def read(path: Path) -> tuple[Stack, Configuration]:
    """The software that a file is of, and what it says. Nothing in it is run. StackError."""
    value = parsed(path)
    found = [stack for stack in STACKS.values() if stack.is_one(value)]
    order = [NANOTRON_STACK, *found] if NANOTRON_STACK in found else found
    if not order:
        raise StackError(
            f"{path} is no configuration of {', '.join(s.title for s in STACKS.values())}: a Megatron script is known by its name "
            f"(.sh), the others by their tables, such as [parallelism], zero_optimization, distributed_type, fsdp_config"
        )
    return order[0], order[0].read(value)
