"""All programs of `traps`: importing this enters them into the table."""

import importlib
import pkgutil

from benchmarks import trap_programs
from benchmarks._traps_kit import PROGRAMS

__all__ = ["PROGRAMS"]

for _module in pkgutil.iter_modules(trap_programs.__path__, f"{trap_programs.__name__}."):
    importlib.import_module(_module.name)
