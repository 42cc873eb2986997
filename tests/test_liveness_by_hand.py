"""The peak of a stage's memory, beside one that is added up on paper from what autograd keeps and makes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.ir import Input, Op, Param, Program, R, Ref, Span, TensorType
from autopar.planner.activity import Activity
from autopar.planner.liveness import Liveness, Moment
from autopar.planner.price import param_bytes, zero_dims
from autopar.planner.stages import recomputable
from cost_models.recipe import Recipe
from cost_models.rests import RESTS
from tests.planner_programs import program_of
from tests.test_planner_recipe import priced

pytestmark = pytest.mark.pure

KIB = 1024
LOSS = 4  # bytes of a scalar, and of its gradient


def op(target: str, *args: Any, out: str, line: int, **kwargs: Any) -> Op:
    """An operator on a line of its own: what it reads last is let go after it."""
    named = tuple(Ref(a) if isinstance(a, str) else a for a in args)
    return Op(target=target, args=named, kwargs=tuple(kwargs.items()), outputs=(out,), module="m", source=f"m.py:{line}")


def made(ops: tuple[Op, ...], params: tuple[str, ...], shapes: dict[str, tuple[int, ...]]) -> Program:
    types = {v: TensorType(shape, torch.float32, v != "x") for v, shape in shapes.items()}
    return Program(
        name="m", inputs=(Input(value="x", path=("x",)),), params=tuple(Param(value=p, fqn=p) for p in params), buffers=(), ops=ops,
        loss="loss", types=types,
    )  # fmt: skip


def chain(batch: int, outer: int, inner: int, *, view: bool = False) -> Program:
    """x [batch, outer] -> h [batch, inner] -> a = relu(h) -> y [batch, outer] -> their sum. view: y is seen as a vector before that."""
    ops = [
        op("aten.linear.default", "x", "up", out="h", line=1), op("aten.relu.default", "h", out="a", line=2),
        op("aten.linear.default", "a", "down", out="y", line=3),
    ]  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "x": (batch, outer), "up": (inner, outer), "down": (outer, inner), "h": (batch, inner), "a": (batch, inner), "y": (batch, outer),
        "v": (batch * outer,), "loss": (),
    }  # fmt: skip
    if view:
        ops.append(op("aten.view.default", "y", (batch * outer,), out="v", line=4))
    ops.append(op("aten.sum.default", "v" if view else "y", out="loss", line=5))
    return made(tuple(ops), ("up", "down"), shapes if view else {k: s for k, s in shapes.items() if k != "v"})


def peak(program: Program, **changes: Any) -> Moment:
    whole = {p.value: program.types[p.value].nbytes for p in program.params}
    plain: dict[str, Any] = {
        "span": Span(0, len(program.ops)), "recomputed": (), "sends": ("loss",), "receives": (), "in_flight": 1, "micro_batches": 1,
        "gradients": {v: (n, n) for v, n in whole.items()}, "reduced": (), "scattered": (), "at_once": (), "where_used": {}, "units": {},
        "bucket_bytes": 0,
    }  # fmt: skip
    activity = Activity(**{**plain, **changes})
    return max(Liveness(program).peaks(activity), key=lambda x: x.counted(accumulates=activity.accumulates))


# 64 rows of 8, 1024 wide inside: activations are large and weights small
WIDE, HIDDEN, WEIGHT = chain(64, 8, 1024), 256 * KIB, 32 * KIB
# 1 row of 256, 256 wide inside: weights are all there is
NARROW, MATRIX, ROW = chain(1, 256, 256), 256 * KIB, KIB


def test_backward_of_a_chain() -> None:
    """Most is alive in the backward of relu: what it kept, the gradient that comes, the gradient that it makes, and that of `down`."""
    assert peak(WIDE) == Moment(saved=HIDDEN + LOSS, temporary=2 * HIDDEN, gradients=WEIGHT)


def test_backward_of_a_product() -> None:
    """In that of the first one, if nothing is kept but an operand that rests: the gradient of `down`, and that which is made of `up`."""
    found = peak(NARROW)
    assert found.total == MATRIX + MATRIX + LOSS + ROW  # of h, which came
    assert found.gradients == MATRIX and found.temporary == MATRIX + ROW


def test_forward_of_a_gather() -> None:
    """Parts of dim 1 arrive one behind the other, 2 x [64, 512], and are joined to [64, 1024]: the whole is there twice."""
    ops = op("autopar.C.all_gather", "w", out="g", line=1, axis="tp", dim=1), op("aten.sum.default", "g", out="loss", line=2)
    program = made(ops, ("w",), {"x": (1,), "w": (64, 512), "g": (64, 1024), "loss": ()})
    assert peak(program) == Moment(temporary=2 * 64 * 1024 * 4)


def test_a_view_is_what_it_views() -> None:
    assert peak(chain(64, 8, 1024, view=True)).total == peak(WIDE).total
    ops = (
        op("aten.linear.default", "x", "up", out="h", line=1), op("aten.view.default", "h", (64 * 1024,), out="v", line=2),
        op("aten.pow.Tensor_Scalar", "v", 2, out="y", line=3), op("aten.sum.default", "y", out="loss", line=4),
    )  # fmt: skip
    shapes = {"x": (64, 8), "up": (1024, 8), "h": (64, 1024), "v": (64 * 1024,), "y": (64 * 1024,), "loss": ()}
    assert dict(Liveness(made(ops, ("up",), shapes)).kept(Span(0, 4))) == {"h": HIDDEN}, "the square keeps v"
    flat = chain(4096, 256, 1, view=True)  # y is nearly all: in forward it is there once, seen in two ways
    assert peak(flat).total < 1.2 * 4096 * 256 * 4


def test_buckets() -> None:
    """All gradients wait in one bucket, which is a copy of them; or in one each: then at its end the second is copied alone."""
    together = peak(NARROW, reduced=("up", "down"), bucket_bytes=2**20)
    assert (together.gradients, together.communication, together.temporary) == (2 * MATRIX, 2 * MATRIX, 0)
    alone = peak(NARROW, reduced=("up", "down"), bucket_bytes=MATRIX)
    assert (alone.gradients, alone.communication) == (2 * MATRIX, MATRIX)
    assert alone.total <= 3 * MATRIX + ROW
    quarters = dict.fromkeys(("up", "down"), (MATRIX, MATRIX // 4))
    in_parts = peak(NARROW, reduced=("up", "down"), scattered=("up", "down"), bucket_bytes=2**20, gradients=quarters)
    assert (in_parts.gradients, in_parts.communication) == (2 * MATRIX + 2 * MATRIX // 4, 2 * MATRIX)


def test_buckets_in_another_dtype() -> None:
    """The copy is half as large, and takes the place of the gradients; at the end all are float32 again, beside the last copy."""
    sent = dict.fromkeys(("up", "down"), MATRIX // 2)
    together = peak(NARROW, reduced=("up", "down"), bucket_bytes=2**20, sent=sent)
    assert (together.gradients, together.communication) == (2 * MATRIX, MATRIX)
    alone = peak(NARROW, reduced=("up", "down"), bucket_bytes=MATRIX, sent=sent)  # the first is sent: half of it is left
    assert (alone.gradients, alone.communication) == (2 * MATRIX, MATRIX // 2)
    quarters = dict.fromkeys(("up", "down"), (MATRIX, MATRIX // 4))
    parts = peak(NARROW, reduced=("up", "down"), scattered=("up", "down"), bucket_bytes=2**20, gradients=quarters, sent=sent)
    assert (parts.gradients, parts.communication) == (2 * MATRIX + 2 * MATRIX // 8, MATRIX)


def test_a_bucket_of_groups_goes_when_the_next_one_comes() -> None:
    """Of the first bucket its part is left, where that is summed over the groups; else the bucket too, until the end."""
    wide = chain(1, 256, 1024)
    large = 4 * MATRIX
    quarters = dict.fromkeys(("up", "down"), (large, large // 4))
    asked: dict[str, Any] = {"reduced": ("up", "down"), "scattered": ("up", "down"), "bucket_bytes": large, "gradients": quarters}
    kept, gone = peak(wide, **asked), peak(wide, **asked, summed=("up", "down"))
    assert kept.gradients == large + large // 4 + large + large // 4 and kept.communication == large
    assert gone.gradients == large // 4 + large + large // 4 and gone.communication == large


@pytest.mark.parametrize(("in_flight", "micro_batches"), [(1, 1), (2, 2), (3, 3), (2, 8), (3, 8)])
def test_micro_batches(in_flight: int, micro_batches: int) -> None:
    """The others in flight keep what one keeps, the result of relu and its loss. In the backward of the first one the gradient of `down` is
    there. In that of a later one both are, and a new one of `down` is added to it: it is a part of what backward makes."""
    kept = HIDDEN + LOSS
    found = peak(WIDE, in_flight=in_flight, micro_batches=micro_batches)
    first = (in_flight - 1) * kept + kept + 2 * HIDDEN + WEIGHT
    others = in_flight - 1 if micro_batches > in_flight else in_flight - 2
    later = others * kept + kept + 2 * HIDDEN + 2 * WEIGHT if micro_batches > 1 else 0
    assert found.total == max(first, later)
    if micro_batches > 1:  # of weights, most is there in the backward of `down`: relu's result, and the gradients of it and of the loss
        assert peak(NARROW, in_flight=1, micro_batches=micro_batches).total == 3 * MATRIX + 2 * ROW + 2 * LOSS


def test_what_runs_again_is_made_again() -> None:
    """Of the first three operators nothing is kept but x, which rests. While their backward runs, what they keep is there again."""
    again = (Span(0, 3),)
    found = peak(WIDE, recomputed=again)
    y = 64 * 8 * 4
    held = Liveness(WIDE).kept(Span(0, len(WIDE.ops)), again)
    assert dict(held) == {}, "x is counted elsewhere"
    assert found.total == HIDDEN + LOSS + 2 * HIDDEN + WEIGHT, "no more than without"
    assert found.total - y < 4 * HIDDEN
    behind = (Span(1, 3),)  # relu and the second product: h is kept
    assert dict(Liveness(WIDE).kept(Span(0, len(WIDE.ops)), behind)) == {"h": HIDDEN}
    assert peak(WIDE, recomputed=behind).total == HIDDEN + HIDDEN + LOSS + 2 * HIDDEN + WEIGHT, "and h beside it"
    flights = peak(WIDE, recomputed=behind, in_flight=3, micro_batches=3)
    assert flights.saved == 2 * (HIDDEN + LOSS) + 2 * HIDDEN + LOSS


def test_what_crosses_between_stages_is_held() -> None:
    """The second half: h comes in, and nothing but the result of relu is kept; the first half: it goes out, and nothing is kept."""
    second = peak(WIDE, span=Span(1, 4), receives=("h",), gradients={"down": (WEIGHT, WEIGHT)})
    assert second == Moment(saved=2 * HIDDEN + LOSS, temporary=2 * HIDDEN, gradients=WEIGHT)
    first = peak(WIDE, span=Span(0, 1), sends=("h",), gradients={"up": (WEIGHT, WEIGHT)})
    assert first == Moment(saved=HIDDEN, temporary=HIDDEN + WEIGHT)
    assert peak(WIDE, span=Span(0, 1), sends=("h",), in_flight=2, micro_batches=4, gradients={"up": (WEIGHT, WEIGHT)}).total == (
        2 * HIDDEN + HIDDEN + 2 * WEIGHT
    )


# ------------------------------------------------------------------------------------------------------ of a whole plan
class Chain(nn.Module):
    def __init__(self, outer: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(outer, inner, bias=False), nn.Linear(inner, outer, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.up(x))
        y = self.down(a)
        return y.sum()


PLAIN = Recipe(allocator_slack=0.0, optimizer_passes=1.0)


def test_the_memory_of_a_stage() -> None:
    """With AdamW: the parameters, two states of each, x as it is given, and the peak of backward, term by term."""
    program = capture(Chain(8, 1024), (torch.ones(64, 8),)).program
    memory = priced(PLAIN, program).stages[0].memory
    assert (memory.parameters_bytes, memory.batch_bytes) == (2 * WEIGHT, 64 * 8 * 4)
    assert memory.optimizer_states_bytes == 4 * WEIGHT
    assert (memory.saved_activations_bytes, memory.gradients_bytes) == (HIDDEN + LOSS, WEIGHT)
    assert memory.largest_temporary_bytes == 2 * HIDDEN
    assert memory.total_bytes == 6 * WEIGHT + 64 * 8 * 4 + HIDDEN + LOSS + WEIGHT + 2 * HIDDEN
    pair = priced(PLAIN, program, dp=2)  # of half the rows; at the end of backward two weights wait in a bucket
    half = pair.stages[0].memory
    assert half.total_bytes == 6 * WEIGHT + 64 * 8 * 4 + HIDDEN // 2 + LOSS + WEIGHT + HIDDEN
    assert half.communication_buffers_bytes == 0


def test_a_tied_weight_counts_once() -> None:
    """An embedding of 32 x 16 that is also the last layer: where it is read first."""
    found = priced(PLAIN, program_of("tied"))
    numbers = 32 * 16
    assert sum(p.rest_bytes for p in found.estimator.pieces) == numbers * 4 * 3  # itself and two states
    assert sum(p.gradient_bytes for p in found.estimator.pieces) == numbers * 4
    two = priced(PLAIN, program_of("stack"), pp=2, micro_batches=2)
    layers = 4 * (2 * 4 * 16 * 16 + 4 * 16 + 16 + 2 * 16)
    assert sum(s.parameters for s in two.stages) == layers + 2 * numbers, "on both stages that read it"
    one = priced(PLAIN, program_of("stack"))
    assert one.stages[0].parameters == layers + numbers
    assert one.stages[0].memory.optimizer_states_bytes == 8 * (layers + numbers)


def test_what_cannot_be_cut_rests_whole() -> None:
    """Over 4 ranks: [6, 8] along its second dim, [3] not at all."""
    types = {"w": TensorType((6, 8), torch.float32, True), "b": TensorType((3,), torch.float32, True)}
    params = tuple(Param(value=v, fqn=v, layouts=(("dp", R),)) for v in types)
    program = Program(name="m", inputs=(), params=params, buffers=(), ops=(), loss="w", types=types)
    zero2, zero3 = RESTS["zero2"], RESTS["zero3"]
    dims = zero_dims(program, 4, zero2)
    assert dims == zero_dims(program, 4, zero3) == {"w": 1}
    alone = program.replace(params=tuple(dataclasses.replace(p, layouts=()) for p in params))
    assert zero_dims(alone, 4, zero2) == dims, "a program that stands for one of the ranks"
    assert zero_dims(alone.replace(layouts={"dp": {}}), 4, zero2) == {}, "all ranks use it for the same work"
    frozen = alone.replace(params=tuple(dataclasses.replace(p, trainable=False) for p in alone.params), layouts={"dp": {}})
    assert (zero_dims(frozen, 4, zero2), zero_dims(frozen, 4, zero3)) == ({}, dims), "what does not train is gathered where it is used"
    found = param_bytes(program, dims, 4)
    assert (found["w"].resting_bytes, found["w"].local_bytes, found["w"].resting_numel) == (48, 192, 12)
    assert (found["b"].resting_bytes, found["b"].local_bytes, found["b"].resting_numel) == (12, 12, 3)
    assert not found["b"].in_parts


def test_what_changes_a_buffer_does_not_run_again() -> None:
    program = program_of("normed")
    convolution, counted, norm, *_ = (o.target for o in program.ops)
    assert "conv" in convolution and "add" in counted and "batch_norm" in norm
    assert [recomputable(program, Span(k, k + 1)) for k in range(5)] == [True, False, False, True, True]
