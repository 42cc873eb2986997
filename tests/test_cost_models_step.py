"""Launches, overlapped communication, the optimizer: bounds and the cases that can be worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.cluster import load_gpu
from cost_models.compute import kernel_time_s
from cost_models.step import exposed_gathers_s, exposed_reduction_s, launched_s, optimizer_time_s

pytestmark = pytest.mark.pure

seconds = st.floats(0, 10, allow_subnormal=False)
lists = st.lists(seconds, max_size=12)


@given(lists, seconds)
def test_launches_lie_between_perfect_overlap_and_none(kernels: list[float], launch: float) -> None:
    time_s = launched_s(kernels, launch)
    assert max(sum(kernels), len(kernels) * launch) <= time_s * (1 + 1e-9)
    assert time_s <= (launch + sum(max(launch, kernel) for kernel in kernels)) * (1 + 1e-9)


def test_the_host_runs_ahead_during_long_kernels() -> None:
    assert launched_s([10, 1, 1, 1], 2) == 2 + 10 + 3
    assert launched_s([1, 1, 1], 2) == 3 * 2 + 1
    assert launched_s([], 2) == 0


@given(lists, seconds)
def test_reduction_is_hidden_as_far_as_there_is_backward(buckets: list[float], backward: float) -> None:
    exposed_s = exposed_reduction_s(buckets, backward)
    assert exposed_s >= (max(buckets[-1], sum(buckets) - backward) if buckets else 0) * (1 - 1e-9) - 1e-9
    assert exposed_s <= sum(buckets) * (1 + 1e-9) + 1e-9


def test_more_buckets_hide_more() -> None:
    assert [exposed_reduction_s([8 / n] * n, 100) for n in (1, 2, 8)] == pytest.approx([8, 4, 1])
    assert exposed_reduction_s([8] * 4, 8) == pytest.approx(2 + 32 - 8)


@given(st.lists(st.tuples(st.integers(1, 5), seconds), min_size=1, max_size=5), seconds)
def test_equal_collectives_in_a_row_are_those_one_by_one(runs: list[tuple[int, float]], pass_s: float) -> None:
    counts, each = [n for n, _ in runs], [s for _, s in runs]
    every = [s for n, s in runs for _ in range(n)]
    done_s = gathered_s = computed_s = 0.0
    for k, bucket_s in enumerate(every):
        done_s = max(done_s, pass_s * (k + 1) / len(every)) + bucket_s
        gathered_s += bucket_s
        computed_s = max(computed_s, gathered_s) + pass_s / len(every)
    assert exposed_reduction_s(each, pass_s, counts) == pytest.approx(max(0.0, done_s - pass_s), rel=1e-9, abs=1e-9)
    assert exposed_reduction_s(each, pass_s, counts) == pytest.approx(exposed_reduction_s(every, pass_s), rel=1e-9, abs=1e-9)
    exposed_s = exposed_gathers_s(each, pass_s, counts)
    assert exposed_s == pytest.approx(computed_s - pass_s, rel=1e-9, abs=1e-9)
    assert every[0] - 1e-9 <= exposed_s <= sum(every) * (1 + 1e-9) + 1e-9


def test_optimizer_traffic() -> None:
    """AdamW in float32 moves 28 bytes a parameter: gradient read, parameter and two states read and written."""
    gpu = load_gpu("a100")
    n = 1e9
    expected_s = 28 * n / (gpu.memory_bandwidth_bytes_per_s * gpu.fraction("pointwise"))
    assert optimizer_time_s(trainable_params=n, gpu=gpu) == pytest.approx(gpu.launch_s + expected_s, rel=1e-6)
    assert optimizer_time_s(trainable_params=n, gpu=gpu, optimizer="none") == 0
    assert optimizer_time_s(trainable_params=10, gpu=gpu, tensors=6400) > 99 * gpu.launch_s
    with pytest.raises(ValueError, match="'lion' is not one of"):
        optimizer_time_s(trainable_params=n, gpu=gpu, optimizer="lion")


def test_products_on_vector_units_reach_what_was_timed_of_them() -> None:
    """In float32, and in bfloat16 on a V100, which has no units for it; tensor cores keep their own share, and so does all else."""
    for name, on_vectors, on_matrices in (("h100-sxm", "float32", "bfloat16"), ("v100-32gb", "bfloat16", "float16")):
        gpu, flops = load_gpu(name), 1e15
        assert gpu.vector_fraction is not None
        for dtype, share in ((on_vectors, gpu.vector_fraction), (on_matrices, gpu.fraction("matmul"))):
            assert kernel_time_s("matmul", flops, 0.0, dtype, gpu) == pytest.approx(flops / gpu.peak_flops_per_s(dtype) / share)
        for op_class in ("attention", "conv"):
            rate = "tf32" if op_class == "conv" and gpu.has_rate("tf32") else "float32"
            expected = flops / gpu.peak_flops_per_s(rate) / gpu.fraction(op_class)
            assert kernel_time_s(op_class, flops, 0.0, "float32", gpu) == pytest.approx(expected)
    unknown = load_gpu("mi300x")
    assert unknown.vector_fraction is None
    expected = 1e15 / unknown.peak_flops_per_s("float32") / unknown.fraction("matmul")
    assert kernel_time_s("matmul", 1e15, 0.0, "float32", unknown) == pytest.approx(expected), "where it is not known"
