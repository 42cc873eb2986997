"""Plans as other training softwares' configurations, and back: one file a software, one row each in STACKS."""

from autopar.stacks.configuration import Configuration, configuration_of, pins_of
from autopar.stacks.stack import Stack, StackError
from autopar.stacks.table import STACKS, read, stack_of

__all__ = ["STACKS", "Configuration", "Stack", "StackError", "configuration_of", "pins_of", "read", "stack_of"]
