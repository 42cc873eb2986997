"""Graphs of choices that do not fold: one strategy a node, costs on nodes and edges, memory over time. Best choice and proven bound."""

from autopar.planner.graphs.graph import Graph, Use
from autopar.planner.graphs.solve import Found, solve_graph

__all__ = ["Found", "Graph", "Use", "solve_graph"]
