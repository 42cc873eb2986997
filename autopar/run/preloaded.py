"""What local workers are forked with: imported once for all of them, and out of reach of their garbage collections, which would copy it."""

import gc

import torch._dynamo  # noqa: F401  (the first optimizer of a process imports it, in a second and a half)

import autopar.run  # noqa: F401

gc.collect()
gc.freeze()
