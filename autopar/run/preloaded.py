"""What local workers are forked with: imported once for all of them, and out of reach of their garbage collections, which would copy it."""

import highspy  # noqa: F401
import networkx  # noqa: F401
import torch
import torch._dynamo  # noqa: F401  (the first optimizer of a process imports it, in a second and a half)

import autopar.compiler  # noqa: F401
import autopar.run  # noqa: F401
from autopar.collector import freeze

torch.export.export(torch.nn.Identity(), (torch.empty(1, device="meta"),), strict=False)  # which imports as much again
freeze()
