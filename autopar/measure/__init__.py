"""Program x device -> OpCosts: FLOPs, bytes, tensors saved for backward, and time, for every operator."""

from autopar.measure.costs import OpCost, OpCosts, Pricer
from autopar.measure.count import Counts, count

__all__ = ["Counts", "OpCost", "OpCosts", "Pricer", "count"]
