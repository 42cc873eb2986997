"""What workers of tests and of `traps` are forked with: the programs, transformers, and what every worker of autopar has."""

import contextlib
import importlib

import benchmarks._traps_run  # noqa: F401
from benchmarks._transformers import load_transformers

with contextlib.suppress(ImportError):
    load_transformers()
    importlib.import_module("transformers.modeling_utils")
importlib.import_module("autopar.run.preloaded")  # the last: it takes all that there is out of reach of garbage collections
