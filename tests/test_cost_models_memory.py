"""The memory arithmetic: each term by hand on one model, ZeRO stages, monotony, refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import MemoryTerms, stage_memory
from cost_models.memory import OPTIMIZERS, held_gathers
from cost_models.rests import RESTS, rest_of

pytestmark = pytest.mark.pure
N = 1_000_000


def test_mixed_precision_adam_takes_sixteen_bytes_a_parameter() -> None:
    """bfloat16 parameters and gradients, fp32 master copy and two states (Rajbhandari et al. 2020, section 3.1)."""
    terms = stage_memory(
        param_bytes=2 * N, trainable_params=N, grad_itemsize=2, master_itemsize=4, optimizer="adam", activation_bytes_per_micro_batch=0
    )
    assert (terms.parameters, terms.gradients, terms.optimizer_states) == (2 * N, 2 * N, 12 * N)
    assert terms.total_bytes == 16 * N


@pytest.mark.parametrize(
    "name,expected",
    [("zero0", (4 * N, 4 * N, 8 * N)), ("zero1", (4 * N, 4 * N, 2 * N)), ("zero2", (4 * N, N, 2 * N)), ("zero3", (N, N, 2 * N))],
)
def test_zero_stages(name: str, expected: tuple[int, int, int]) -> None:
    terms = stage_memory(param_bytes=4 * N, trainable_params=N, rest=rest_of(name), shards=4, activation_bytes_per_micro_batch=0)
    assert (terms.parameters, terms.gradients, terms.optimizer_states) == expected


def test_every_term_has_its_field() -> None:
    terms = stage_memory(
        param_bytes=400,
        trainable_params=50,
        buffer_bytes=7,
        batch_bytes=5.5,
        optimizer="sgd_momentum",
        activation_bytes_per_micro_batch=1000,
        boundary_bytes_per_micro_batch=10,
        micro_batches_in_flight=3,
        largest_temporary_bytes=500,
        bucket_bytes=25,
        gathered_param_bytes=40,
        framework_context_bytes=900,
        allocator_slack_fraction=0.1,
    )
    assert terms == MemoryTerms(
        parameters=407,
        gradients=200,
        optimizer_states=200,
        saved_activations=3030,
        batch=6,
        largest_temporary=500,
        communication_buffers=65,
        framework_context=900,
        allocator_slack=441,
    )
    assert terms.allocated_bytes == 4408
    assert terms.total_bytes == 4408 + 900 + 441


def test_optimizers() -> None:
    states = {
        name: stage_memory(param_bytes=4 * N, trainable_params=N, optimizer=name, activation_bytes_per_micro_batch=0).optimizer_states
        for name in OPTIMIZERS
    }
    assert states == {"none": 0, "sgd": 0, "sgd_momentum": 4 * N, "adam": 8 * N, "adamw": 8 * N}
    offloaded = stage_memory(param_bytes=4 * N, trainable_params=N, offload_optimizer=True, activation_bytes_per_micro_batch=0)
    assert offloaded.optimizer_states == 0 and offloaded.gradients == 4 * N


@given(st.integers(0, 10**10), st.integers(1, 64), st.integers(0, 2), st.integers(0, 64), st.integers(0, 10**9))
def test_more_sharding_never_takes_more(params: int, shards: int, zero: int, flight: int, activation: int) -> None:
    rows = [row for row in RESTS.values() if row.over == "all"]

    def total(**change: Any) -> int:
        arguments = {"rest": rows[zero], "shards": shards, "micro_batches_in_flight": flight} | change
        return stage_memory(
            param_bytes=2 * params, trainable_params=params, activation_bytes_per_micro_batch=activation, **arguments
        ).total_bytes

    assert total(rest=rows[zero + 1]) <= total() <= total(micro_batches_in_flight=flight + 1)
    assert total(shards=shards + 1) <= total()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"optimizer": "adagradd"}, "optimizer 'adagradd'"),
        ({"shards": 0}, "shards must be"),
        ({"bucket_bytes": -1}, "bucket_bytes"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_memory(**{"param_bytes": 4, "trainable_params": 1, "activation_bytes_per_micro_batch": 0} | change)


def test_gathers_are_held_for_a_pass_and_more_where_passes_alternate() -> None:
    assert held_gathers(0.5, 100, 1, 8) == 50
    assert held_gathers(0.5, 100, 4, 4) == 50
    assert held_gathers(0.5, 100, 4, 5) == 50 * 2.5
    assert held_gathers(0.5, 100, 4, 5, ahead=False) == 0, "a host that does not run ahead is given the same blocks again"
    nothing = {"param_bytes": 0, "trainable_params": 0, "activation_bytes_per_micro_batch": 100}
    terms = stage_memory(**nothing, allocator_slack_fraction=0.1, held_bytes=7)
    assert terms.allocator_slack == 17
    with pytest.raises(ValueError, match="negative"):
        stage_memory(**nothing, held_bytes=-1)
