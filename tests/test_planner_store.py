"""What is kept of one program is taken for another one only where it holds for that."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.catalog import strategies_of
from autopar.ir import Program
from autopar.planner.shard import shard, view_of
from autopar.planner.space import Mesh
from autopar.planner.store import Store
from cost_models.cluster import load_cluster
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure


def body_of(store: Store, dp: int, count: int) -> Program:
    moments = store.moments(dp, count)
    assert not isinstance(moments, str), moments
    return moments.body


def test_an_axis_of_a_program_that_is_laid_over_the_data_axis_is_its_own() -> None:
    """Over several data-parallel ranks the mean over labels is a quotient by code of its own, in a program of the same names and as many
    samples: of a choice for the operator of torch nothing is taken over."""
    store = Store(program=program_of("tied"), cluster=load_cluster("dgx-a100"), optimizer="adamw")
    alone, laid = body_of(store, 1, 4), body_of(store, 2, 2)
    assert [op.name for op in alone.ops] == [op.name for op in laid.ops] and alone.batch_size == laid.batch_size
    (mean,) = (a for a, b in zip(alone.ops, laid.ops, strict=True) if a.target != b.target)
    known = store.on_axis("tp", Mesh(tp=2), alone)
    (quotient,) = (s for s in strategies_of(view_of(alone, mean, 2)) if s.local == "quotient_of_sums")
    chosen = dataclasses.replace(known.assignment, ops={**known.assignment.ops, mean.name: quotient})
    ((solved,),) = store._answers.values()
    solved_otherwise = dataclasses.replace(solved, assignment=chosen)
    next(iter(store._answers.values()))[:] = [solved_otherwise]
    assignment = store.on_axis("tp", Mesh(dp=2, tp=2), laid).assignment
    assert all(assignment.ops[op.name] in strategies_of(view_of(laid, op, 2)) for op in laid.ops)
    assert shard(laid, assignment).ops
