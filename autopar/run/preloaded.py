"""What local workers are forked with: imported once for all of them, and out of reach of their garbage collections, which would copy it.

Nothing is run: what began threads, or looked for a GPU, would not live in what is forked.
"""

import contextlib
import importlib

import highspy  # noqa: F401
import networkx  # noqa: F401
import torch._dynamo  # noqa: F401  (the first optimizer of a process imports it, in a second and a half)

import autopar.parallel  # noqa: F401
import autopar.run  # noqa: F401
from autopar.collector import freeze

with contextlib.suppress(ImportError):  # private: torch.export imports it when it is first called
    importlib.import_module("torch.export._trace")
freeze()
