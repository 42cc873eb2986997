"""Program x OpCosts x Cluster -> Plan: the search space, the integer programs, the lowered program of a plan."""

from autopar.plan.lower import lower
from autopar.plan.plan import Pins, Plan
from autopar.plan.search import make_plan

__all__ = ["Pins", "Plan", "lower", "make_plan"]
