"""Times measured on the live device, the file that keeps them, and what is counted of operators."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from planner_programs import program_of

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.ir import Op, Program, Ref, TensorType, refs
from autopar.measure import Counts, Live, Pricer, count
from autopar.measure.live import Times, cache_folder, call_of
from autopar.measure.workspace import workspace
from autopar.planner import Pins, make_plan
from autopar.planner.resources import check_measure, live_on
from cost_models.cluster import load_cluster
from cost_models.write import cluster_toml

pytestmark = pytest.mark.pure

ONE = {"pp": 1, "dp": 1, "tp": 1}


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may be busy with others."""
    monkeypatch.setattr("autopar.measure.live.LEAST_CPU_SHARE", 0.0)


def f32(*shape: int, grad: bool = True) -> TensorType:
    return TensorType(shape, torch.float32, grad)


def op_of(target: str, *args: object, outputs: int = 1, **kwargs: object) -> Op:
    names = tuple(f"y{k}" for k in range(outputs))
    return Op(target=target, args=args, kwargs=tuple(kwargs.items()), outputs=names, multi=outputs > 1)  # type: ignore[arg-type]


def live(folder: Path, **changes: object) -> Live:
    return Live(**{"device": torch.device("cpu"), "folder": folder, **changes})  # type: ignore[arg-type]


X, W, B = Ref("x"), Ref("w"), Ref("b")
LINEAR = op_of("aten.linear.default", X, W, B)
LINEAR_TYPES = (f32(16, 8), f32(32, 8), f32(32))


# ------------------------------------------------------------------------------------------------------------- the file
def test_times_survive_in_the_file_and_are_not_measured_again(tmp_path: Path) -> None:
    call = call_of(LINEAR, LINEAR_TYPES, (f32(16, 32),))
    first = live(tmp_path)
    found = first.measure({call: 1.0})
    assert first.runs == 1 and found[call][0] > 0 and found[call][1] > 0
    second = live(tmp_path)
    assert second.measure({call: 1.0}) == found
    assert second.runs == 0
    (file,) = tmp_path.iterdir()  # and no scratch file is left
    (key,) = json.loads(file.read_text())["times_s"]
    for part in ("aten.linear.default", "float32[16, 8] grad", "float32[32, 8] grad", f"torch {torch.__version__}", "1 threads"):
        assert part in key
    assert first.key(call) == key


@pytest.mark.parametrize(
    "change",
    [
        {"ins": (f32(16, 8, grad=False), *LINEAR_TYPES[1:])},
        {"ins": (f32(8, 8), *LINEAR_TYPES[1:])},
        {"ins": tuple(dataclasses.replace(t, dtype=torch.float64) for t in LINEAR_TYPES)},
        {"no_grad": True},
        {"args": (X, W)},
    ],
    ids=["grads", "shapes", "dtypes", "no_grad", "arguments"],
)
def test_calls_that_differ_have_keys_of_their_own(tmp_path: Path, change: dict[str, object]) -> None:
    call = call_of(LINEAR, LINEAR_TYPES, (f32(16, 32),))
    measuring = live(tmp_path)
    assert measuring.key(call) != measuring.key(dataclasses.replace(call, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "autopar-times", "version": 99}']
    + [f'{{"format": "autopar-times", "version": 1, "times_s": {x}}}' for x in ("[]", '{"a": [1]}', '{"a": [NaN, 1.0]}', '{"a": [-1, 1]}')],
)
def test_a_damaged_file_is_reported_and_written_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="device.json cannot be used"):
        times = Times(path)
    assert len(times) == 0
    times.add("call", (1.0, 2.0))
    with pytest.warns(UserWarning, match="written anew"):
        times.save()
    assert Times(path).get("call") == (1.0, 2.0)


def test_what_two_processes_measure_is_kept_by_both(tmp_path: Path) -> None:
    one, two = Times(tmp_path / "t.json"), Times(tmp_path / "t.json")
    one.add("a", (1.0, 0.0))
    two.add("b", (2.0, 0.0))
    one.save()
    two.save()
    kept = Times(tmp_path / "t.json")
    assert kept.get("a") == (1.0, 0.0) and kept.get("b") == (2.0, 0.0)


def test_the_file_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "autopar" / "times"


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    measuring = live(tmp_path / "file" / "below")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert measuring.measure({call_of(LINEAR, LINEAR_TYPES, (f32(16, 32),)): 1.0})
    assert any("not kept" in note for note in measuring.notes())


# ------------------------------------------------------------------------------------------------------------ measuring
def test_a_failure_is_flagged_and_never_kept(tmp_path: Path) -> None:
    wrong = call_of(op_of("aten.mm.default", X, W), (f32(4, 5), f32(6, 7)), (f32(4, 7),))
    right = call_of(LINEAR, LINEAR_TYPES, (f32(16, 32),))
    measuring = live(tmp_path)
    assert set(measuring.measure({wrong: 1.0, right: 1.0})) == {right}
    (note,) = measuring.notes()
    assert "aten.mm.default" in note and "RuntimeError" in note and "estimated instead" in note
    assert live(tmp_path).times.get(measuring.key(wrong)) is None
    again = live(tmp_path)
    again.measure({wrong: 1.0})
    assert again.runs == 1  # tried again by another plan, but not by the same
    again.measure({wrong: 1.0})
    assert again.runs == 1


def test_times_taken_beside_other_work_are_used_but_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.measure.live.LEAST_CPU_SHARE", math.inf)
    call = call_of(LINEAR, LINEAR_TYPES, (f32(16, 32),))
    measuring = live(tmp_path)
    assert set(measuring.measure({call: 1.0})) == {call}
    assert measuring.measure({call: 1.0}) and measuring.runs == 1
    assert any("other processes" in note for note in measuring.notes())
    assert live(tmp_path).times.get(measuring.key(call)) is None


def test_short_calls_and_those_beyond_the_budget_keep_their_estimates(tmp_path: Path) -> None:
    call = call_of(LINEAR, LINEAR_TYPES, (f32(16, 32),))
    other = dataclasses.replace(call, ins=(f32(64, 8), *LINEAR_TYPES[1:]))
    assert set(live(tmp_path).measure({call: 1.0, other: 1e-6})) == {call}
    late = live(tmp_path / "late", budget_s=0.0)
    assert late.measure({call: 1.0}) == {} and late.runs == 0
    assert "budget of 0 s was spent" in late.notes()[0]


def test_integers_are_indices_in_range_and_the_generator_is_left_alone(tmp_path: Path) -> None:
    ids = TensorType((6, 5), torch.int64)
    lookup = call_of(op_of("aten.embedding.default", W, X), (f32(11, 4), ids), (f32(6, 5, 4),))
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    measuring = live(tmp_path)
    assert set(measuring.measure({lookup: 1.0})) == {lookup} and not measuring.notes()
    assert torch.equal(before, torch.get_rng_state()) and torch.get_num_threads() == threads


def test_without_gradients_there_is_no_backward(tmp_path: Path) -> None:
    call = call_of(LINEAR, tuple(dataclasses.replace(t, grad=False) for t in LINEAR_TYPES), (f32(16, 32, grad=False),))
    assert live(tmp_path).measure({call: 1.0})[call][1] == 0.0


def test_workers_beyond_the_cores_are_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.measure.live.cores", lambda: 2)
    call = call_of(LINEAR, LINEAR_TYPES, (f32(16, 32),))
    alone, many = live(tmp_path, workers=2), live(tmp_path, workers=6)
    one, three = alone.measure({call: 1.0})[call], many.measure({call: 1.0})[call]
    assert three == pytest.approx((3 * one[0], 3 * one[1])) and many.runs == 0
    assert "times 3 for 6 workers on 2 cores" in many.name and "times" not in alone.name


def test_collectives_of_workers_that_share_cores_are_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the machine, where processes copy; what a network carries to other machines takes as long as it did."""
    monkeypatch.setattr("autopar.measure.live.cores", lambda: 2)
    cluster = load_cluster("cpu")
    apart = dataclasses.replace(cluster, gpus_per_node=1, nodes=4)
    for where, times in ((cluster, 2.0), (apart, 1.0)):
        alone, shared = (Pricer(where, {**ONE, "dp": 4}, live(tmp_path, workers=n)) for n in (2, 4))
        assert shared.collective_s("all_reduce", 2**20, "dp") == pytest.approx(times * alone.collective_s("all_reduce", 2**20, "dp"))
        assert shared.joint_s("all_reduce", 2**20, ("dp",)) == pytest.approx(times * alone.joint_s("all_reduce", 2**20, ("dp",)))


# -------------------------------------------------------------------------------------------------------------- pricing
def test_equal_calls_are_measured_once_and_views_and_transitions_never(tmp_path: Path) -> None:
    program = program_of("stack")
    measuring = live(tmp_path)
    costs = Pricer(load_cluster("cpu"), ONE, measuring).program(program)
    priced = [op for op in program.ops if costs.ops[op.name].counts.op_class != "view"]
    distinct = {call_of(op, *_types(program, op)) for op in priced}
    assert 0 < measuring.runs <= len(distinct) < len(priced)
    for op in program.ops:
        cost = costs.ops[op.name]
        assert math.isfinite(cost.forward_s) and (cost.measured or not cost.provenance.startswith("measured"))
        if cost.counts.op_class == "view":
            assert cost.provenance == "free" and cost.forward_s == cost.backward_s == 0.0
    linears = [costs.ops[op.name] for op in program.ops if op.target == "aten.linear.default"]
    assert all(c.measured and c.provenance.startswith("measured on ") for c in linears)
    assert 0 < costs.measured_share <= 1 and f"{100 * costs.measured_share:.0f}% of the time" in costs.provenance


def test_estimates_say_what_they_rest_on() -> None:
    program = program_of("mlp")
    costs = Pricer(load_cluster("dgx-a100"), ONE).program(program)
    linear = next(costs.ops[op.name] for op in program.ops if op.target == "aten.linear.default")
    assert linear.provenance.startswith("roofline (") and "datasheet" in linear.provenance and not linear.measured
    assert costs.measured_share == 0 and costs.provenance.startswith("roofline of a100")


def test_a_plan_says_how_much_of_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program, cluster = program_of("pair"), load_cluster("cpu")
    assert make_plan(program, 2, cluster, pins=Pins(dp=2)).provenance.startswith("roofline of cpu")
    plan = make_plan(program, 2, cluster, pins=Pins(dp=2), measure="live")
    assert "% of the time of operators measured on " in plan.provenance and "links of cpu" in plan.provenance
    assert any("were then measured" in note for note in plan.notes)
    assert list(tmp_path.glob("autopar/times/*.json"))


def test_only_this_machine_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_measure("live", load_cluster("cpu"))
    check_measure("roofline", load_cluster("dgx-a100"))
    with pytest.raises(PlanError, match="cannot be measured here"):
        check_measure("live", load_cluster("dgx-a100"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    check_measure("live", load_cluster("dgx-h100"))
    with pytest.raises(PlanError, match="H100"):
        check_measure("live", load_cluster("dgx-a100"))
    with pytest.raises(ValueError, match="roofline"):
        check_measure("rooflin", load_cluster("cpu"))


def test_a_described_cpu_is_one_under_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster file states its device in place, so that the device has the file's name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = load_cluster("cpu")
    (tmp_path / "mine.toml").write_text(cluster_toml(known), encoding="utf-8")
    mine = load_cluster(tmp_path / "mine.toml")
    assert mine.gpu.name == "mine.gpu" and mine.gpu.host and not load_cluster("dgx-a100").gpu.host
    check_measure("live", mine)
    assert live_on(mine, 2).device.type == "cpu"
    program = program_of("pair")
    assert "operators measured on " in make_plan(program, 2, mine, pins=Pins(dp=2), measure="live").provenance
    rms = op_of("aten.rms_norm.default", X, (8,), W, 1e-6)
    types = {"x": f32(16, 8), "w": f32(8), "y0": f32(16, 8)}
    normed = Program(name="normed", inputs=(), params=(), buffers=(), ops=(rms,), loss="y0", types=types)
    kept = {c.name: Pricer(c, ONE).op(normed.ops[0], normed).counts for c in (known, mine, load_cluster("dgx-a100"))}
    assert kept["mine"] == kept["cpu"] != kept["dgx-a100"]  # composed of others here, one kernel there
    assert kept["dgx-a100"].saved_other_bytes <= 2 * 4 * 16


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (1, 1, 5), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("affine", [0, 1, 2])
def test_rows_are_counted_as_if_all_were_run(shape: tuple[int, ...], affine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layer norm one row is run on fake tensors, whatever its last dims are."""
    counting = importlib.import_module("autopar.measure.count")
    for dims, dtype, grad in itertools.product(range(1, len(shape) + 1), (torch.float32, torch.bfloat16), (True, False)):
        x, row = TensorType(shape=shape, dtype=dtype, grad=grad), TensorType(shape=shape[-dims:], dtype=dtype, grad=True)
        params = (*(Ref(n) for n in "wb"[:affine]), *[None] * (2 - affine))
        op, ins = op_of("aten.layer_norm.default", X, shape[-dims:], *params, 1e-5), (x, *[row] * affine)
        for outs in ((dataclasses.replace(x, grad=grad or affine > 0),), ()):  # as a bound asks, which knows of no results
            found = []
            for rows in (counting._ROW_BY_ROW, {}):
                monkeypatch.setattr(counting, "_ROW_BY_ROW", rows)
                counting._count.cache_clear()
                counting._KNOWN.clear()
                found.append(count(op, ins, outs))
            assert found[0] == found[1]


@pytest.mark.parametrize("shape", [(1, 6), (4, 6), (3, 6, 5), (2, 6, 2, 3)], ids=str)
@pytest.mark.parametrize(("affine", "of"), [(0, 3), (1, 3), (2, 3), (2, 1), (2, 6)])
def test_samples_are_counted_as_if_all_were_run(shape: tuple[int, ...], affine: int, of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of group norm one sample is run on fake tensors."""
    counting = importlib.import_module("autopar.measure.count")
    for dtype, grad in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        x, row = TensorType(shape=shape, dtype=dtype, grad=grad), TensorType(shape=shape[1:2], dtype=dtype, grad=True)
        params = (*(Ref(n) for n in "wb"[:affine]), *[None] * (2 - affine))
        op, ins = op_of("aten.group_norm.default", X, of, *params, 1e-5), (x, *[row] * affine)
        found = []
        for rows in (counting._ROW_BY_ROW, {}):
            monkeypatch.setattr(counting, "_ROW_BY_ROW", rows)
            counting._count.cache_clear()
            counting._KNOWN.clear()
            found.append(count(op, ins, (dataclasses.replace(x, grad=grad or affine > 0),)))
        assert found[0] == found[1]


@pytest.mark.parametrize("split", [False, True])
def test_attention_with_dropout_keeps_no_scores_on_a_gpu(split: bool) -> None:
    """The kernels of a GPU draw again in backward; on a CPU, and in float64, it is composed of products, a softmax and a dropout."""
    def op(p: float) -> Op:
        if split:
            kwargs = (("axis", "tp"), ("dropout_p", p), ("is_causal", True))
            return Op(target="autopar.L.attention", args=(*map(Ref, "qkv"), None), kwargs=kwargs, outputs=("y",))
        return op_of("aten.scaled_dot_product_attention.default", *map(Ref, "qkv"), None, p, True)

    def kept(p: float, gpu: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[object, ...]:
        t = TensorType(shape=(2, 4, 64, 16), dtype=dtype, grad=True)
        strides = torch.empty(t.shape, device="meta").stride()
        c, w = count(op(p), (t,) * 3, (t,), gpu), workspace(op(p), (t,) * 3, (strides,) * 3, (t,), gpu)
        return c.saved_inputs, c.saved_outputs, c.saved_other_bytes, w.saved_inputs, w.saved_outputs, w.saved_other, w.forward, w.backward

    scores = 2 * 4 * 64 * 64
    assert kept(0.1, True) == kept(0.0, True)
    assert kept(0.1, True)[2] < scores < kept(0.1, False)[2]
    assert kept(0.1, True, torch.float64) == kept(0.1, False, torch.float64) != kept(0.0, True, torch.float64)


def test_a_profile_of_a_gpu_names_the_device_that_it_may_be_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    known = load_cluster("dgx-a100")
    gpu = dataclasses.replace(known.gpu, name="out.gpu", sources=(("title", "NVIDIA Some GPU"),))
    profiled = dataclasses.replace(known, gpu=gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Some GPU")
    check_measure("live", profiled)
    with pytest.raises(PlanError, match="Some GPU"):
        check_measure("live", known)  # a device that the catalogue does not know is not every device
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    with pytest.raises(PlanError, match="H100"):
        check_measure("live", profiled)


def _types(program: Program, op: Op) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    return tuple(program.types[r] for r in refs(op)), tuple(program.types[o] for o in op.outputs if o is not None)


# ------------------------------------------------------------------------------------------------------ counts, by hand
def test_counts_of_linear() -> None:
    c = count(LINEAR, LINEAR_TYPES, (f32(16, 32),))
    assert c.op_class == "matmul"
    assert (c.flops, c.backward_flops) == (2 * 16 * 8 * 32, 2 * 2 * 16 * 8 * 32)  # x w^T; then dy w and dy^T x
    assert (c.bytes_read, c.bytes_written) == (4 * (16 * 8 + 32 * 8 + 32), 4 * 16 * 32)
    assert (c.saved_inputs, c.saved_outputs, c.saved_other_bytes) == ((0, 1), (), 0)


def test_counts_of_a_linear_whose_input_needs_no_gradient() -> None:
    c = count(LINEAR, (f32(16, 8, grad=False), *LINEAR_TYPES[1:]), (f32(16, 32),))
    assert c.backward_flops == 2 * 16 * 8 * 32  # only dy^T x
    assert c.saved_inputs == (0,)


def test_counts_of_attention() -> None:
    q = f32(2, 3, 8, 4)
    c = count(op_of("aten.scaled_dot_product_attention.default", X, W, B), (q, q, q), (q,))
    assert c.op_class == "attention"
    forward = 2 * 2 * 2 * 3 * 8 * 8 * 4  # q k^T and its product with v: 2 b h s s d each
    assert (c.flops, c.backward_flops) == (forward, 2.5 * forward)
    assert set(c.saved_inputs) == {0, 1, 2}


def bf16(*shape: int) -> TensorType:
    return TensorType(shape, torch.bfloat16, True)


@pytest.mark.parametrize(
    "local, a, b, out, sorted_rows",
    [
        (False, bf16(48, 16), bf16(4, 16, 32), bf16(48, 32), True),
        (True, bf16(48, 16), bf16(4, 16, 32), bf16(48, 32), True),
        (False, bf16(4, 12, 16), bf16(4, 16, 32), bf16(4, 12, 32), False),
        (False, bf16(4, 48, 16), bf16(16, 32), bf16(48, 32), True),
        (False, bf16(48, 16), bf16(16, 32), bf16(4, 48, 32), True),
    ],
)
def test_a_row_of_a_grouped_product_meets_the_matrix_of_its_group(
    local: bool, a: TensorType, b: TensorType, out: TensorType, sorted_rows: bool
) -> None:
    ends = (TensorType((4,), torch.int32),) if sorted_rows else ()
    args = (X, W, *[Ref("ends") for _ in ends])
    own = {"axis": "dp", "operator": "aten._grouped_mm.default"} if local else {}
    found = count(op_of("autopar.L.grouped_rows" if local else "aten._grouped_mm.default", *args, **own), (a, b, *ends), (out,))
    assert (found.op_class, found.flops, found.backward_flops) == ("matmul", 2 * 48 * 16 * 32, 4 * 48 * 16 * 32)
    assert set(found.saved_inputs) >= {0, 1}


@pytest.mark.parametrize("kind, gates", [(torch.nn.LSTM, 4), (torch.nn.GRU, 3)])
def test_a_step_of_a_recurrent_network_meets_every_matrix(kind: type[torch.nn.Module], gates: int) -> None:
    class Read(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(8, 16, num_layers=2, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[0].square().mean()

    program = capture(Read(), (torch.randn(5, 12, 8),), check=False).program
    (op,) = [op for op in program.ops if op.target.endswith(".input")]
    weights = gates * 16 * (2 * (8 + 16) + 2 * (32 + 16))
    assert count(op, *_types(program, op)).flops == 2 * 5 * 12 * weights


def test_counts_of_layer_norm() -> None:
    x = f32(16, 8)
    c = count(op_of("aten.layer_norm.default", X, (8,), W, B, 1e-5), (x, f32(8), f32(8)), (x,))
    assert c.op_class == "reduction" and c.flops == 0
    assert (c.bytes_read, c.bytes_written) == (4 * (16 * 8 + 8 + 8), 4 * 16 * 8)
    assert {0, 1} <= set(c.saved_inputs) and not c.saved_outputs
    assert c.saved_other_bytes == 2 * 4 * 16  # mean and reciprocal deviation of each row


def test_counts_of_convolution() -> None:
    x, w, y = f32(2, 3, 6, 6), f32(8, 3, 3, 3), f32(2, 8, 6, 6)
    c = count(op_of("aten.conv2d.default", X, W, None, (1, 1), (1, 1)), (x, w), (y,))
    forward = 2 * y.numel * 3 * 3 * 3
    assert (c.op_class, c.flops, c.backward_flops) == ("conv", forward, 2 * forward)
    assert (c.saved_inputs, c.saved_other_bytes) == ((0, 1), 0)


def test_counts_of_views_are_nothing() -> None:
    c = count(op_of("aten.view.default", X, (8, 16)), (f32(16, 8),), (f32(8, 16),))
    assert c == Counts(op_class="view", flops=0.0, backward_flops=0.0, bytes_read=0, bytes_written=0)
