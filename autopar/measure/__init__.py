"""Program x device -> OpCosts: FLOPs, bytes, tensors saved for backward, and time, for every operator."""

from autopar.measure.costs import OpCost, OpCosts, Pricer
from autopar.measure.count import Counts, count
from autopar.measure.live import Live

__all__ = ["Counts", "Live", "OpCost", "OpCosts", "Pricer", "count"]
