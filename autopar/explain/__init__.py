"""Questions about a plan, answered by other plans of the same capture: why, why not, what if, how many GPUs."""

from autopar.explain.study import Asked, Refused, Study

__all__ = ["Asked", "Refused", "Study"]
