"""Program x OpCosts x Cluster -> Plan: the search space, the integer programs, the lowered program of a plan."""

from autopar.planner.complete import complete
from autopar.planner.lower import lower
from autopar.planner.plan import Pins, Plan
from autopar.planner.search import make_plan

__all__ = ["Pins", "Plan", "complete", "lower", "make_plan"]
