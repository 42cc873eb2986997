"""What operators move between a GPU and its memory: every byte of forward and of backward, counted by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir import Arg, Op, Ref, TensorType, refs
from autopar.measure import Counts, Pricer, count
from autopar.measure.traffic import AS_TIMED, BROADCAST, DROPOUT, MASKED, WIDENED
from autopar.planner.price import Ledger
from cost_models.cluster import load_cluster
from cost_models.recipe import AUTOPAR, Recipe

pytestmark = pytest.mark.pure

ROWS, WIDTH, WORDS = 8, 16, 100
N = 2 * ROWS * WIDTH  # bytes of an activation in bfloat16
ON_GPU, ON_HOST = (Pricer(load_cluster(name), {"tp": 1}, None, Recipe(images_as_timed=True)) for name in ("dgx-a100", "cpu"))


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> TensorType:
    return TensorType(shape or (ROWS, WIDTH), dtype, grad)


X, ONE_ROW = tensor(), tensor(WIDTH)
WIDE, WIDE_ROW = tensor(dtype=torch.float32), tensor(WIDTH, dtype=torch.float32)
MASK, IMAGE, LARGE, TWO, EACH = tensor(dtype=torch.bool, grad=False), tensor(2, 2, 4, 4), tensor(2, 2, 8, 8), tensor(2), tensor(2, 1, 3, 3)
HEADS, HALF = tensor(1, 1, 4, 64), tensor(1, 1, 4, 32)
INDICES = tensor(ROWS, dtype=torch.int64, grad=False)


def counted(target: str, ins: tuple[TensorType, ...], out: TensorType = X, *after: Arg, **kwargs: Any) -> Counts:
    """after: arguments behind the operands."""
    args: tuple[Arg, ...] = (*(Ref(f"x{k}") for k in range(len(ins))), *after)
    if "into" in kwargs:  # between operands
        args = (args[0], kwargs.pop("into"), *args[1:])
    if "groups" in kwargs:
        args = (args[0], kwargs.pop("groups"), *args[1:])
    return count(Op(target=f"aten.{target}", args=args, kwargs=tuple(kwargs.items()), outputs=("y",)), ins, (out,), gpu=True)


def moved(counts: Counts) -> tuple[float, float]:
    """In forward and in backward, by a GPU."""
    t = ON_GPU.traffic(counts)
    return t.forward, t.backward if ON_GPU.in_backward(counts) else 0.0


@pytest.mark.parametrize(
    ("counts", "forward", "backward"),
    [
        (counted("gelu.default", (X,)), 2 * N, 3 * N),  # backward: the gradient, what is kept, and what is made
        (counted("relu.default", (X,)), 2 * N, 3 * N),
        (counted("mul.Tensor", (X, X)), 3 * N, 6 * N),  # two kernels of that kind
        (counted("mul.Tensor", (X, tensor(grad=False))), 3 * N, 3 * N),
        (counted("add.Tensor", (X, X)), 3 * N, 0),  # both are given what arrives
        (counted("clone.default", (X,)), 2 * N, 0),
        (counted("sum.default", (X,), tensor(1)), N + 2, 0),
        # a gradient of rows that are added up; numbers of two bytes that meet a row are not read in whole vectors
        (counted("add.Tensor", (X, ONE_ROW)), BROADCAST[0] * (2 * N + 2 * WIDTH), N + 2 * WIDTH),
        (counted("mul.Tensor", (X, ONE_ROW)), BROADCAST[0] * (2 * N + 2 * WIDTH), BROADCAST[1] * (6 * N + 2 * (2 * WIDTH))),
        (counted("mul.Tensor", (WIDE, WIDE_ROW), WIDE), 4 * N + 4 * WIDTH, 12 * N + 2 * (4 * WIDTH)),
        (counted("to.dtype", (X,), tensor(dtype=torch.float32), torch.float32), WIDENED * 3 * N, 3 * N),
        (counted("to.dtype", (tensor(dtype=torch.float32),), X, torch.bfloat16), 3 * N, WIDENED * 3 * N),
        (counted("dropout.default", (X,), X, 0.1, True), DROPOUT * 2 * N + N / 2, 2 * N + N / 2),  # beside a mask of one byte
        (counted("embedding.default", (tensor(WORDS, WIDTH), INDICES)), 2 * N + 8 * ROWS, 16 * N + 2 * WORDS * WIDTH),
        (counted("index_add.default", (tensor(WORDS, WIDTH), INDICES, X), tensor(WORDS, WIDTH), into=0), 4 * WORDS * WIDTH + 13 * N, 2 * N),
        (counted("where.self", (MASK, X, X)), 3 * N + N / 2, 2.2 * (2 * N + N / 2 + 2 * N)),
        (counted("div.Tensor", (X, X)), 3 * N, (2 + 6 + 2 + 2) * N),
        (counted("topk.default", (X,), X, 2), 16 * N, 1.25 * N),
        (counted("group_norm.default", (IMAGE, TWO, TWO), IMAGE, groups=2), 20 * 64, 28 * 64),
        (counted("max_pool2d.default", (IMAGE,), tensor(2, 2, 2, 2), (2, 2)), 12.5 * 64, 40 * 64),
        (counted("upsample_nearest2d.vec", (IMAGE,), LARGE, None, (2.0, 2.0)), 8.7 * 256, 5.6 * 256),
        (counted("conv2d.default", (IMAGE, EACH), IMAGE, None, (1, 1), (1, 1), (1, 1), 2), 2.6 * 9 * 64, 8.5 * 9 * 64),
        (counted("scaled_dot_product_attention.default", (HEADS, HEADS, HEADS), HEADS), 1.3 * 4 * 512, 5.5 * 4 * 512),
        (counted("scaled_dot_product_attention.default", (HALF, HALF, HALF), HALF), 2 * 1.3 * 4 * 256, 2 * 5.5 * 4 * 256),
        (counted("softmax.int", (X,), X, -1), 5.4 * N, 6 * N),
    ],
)  # fmt: skip
def test_every_byte(counts: Counts, forward: float, backward: float) -> None:
    assert moved(counts) == pytest.approx((forward, backward))


def test_nothing_is_moved_in_backward_where_nothing_is_trained() -> None:
    still = tensor(grad=False)
    for target, *after in (("gelu.default",), ("softmax.int", -1), ("add.Tensor",)):
        found = counted(target, (still, still) if target == "add.Tensor" else (still,), still, *after)
        assert moved(found)[1] == 0.0, target
    table = counted("embedding.default", (tensor(WORDS, WIDTH, grad=False), INDICES), still)
    assert moved(table) == (2 * N + 8 * ROWS, 0.0)


def test_kernels_for_channels_that_lie_apart_are_those_of_images_that_lie_so() -> None:
    """Where they lie together, others run, which stream what they read."""
    recipes = Recipe(images_as_timed=True, channels_last=True), Recipe()
    together, older = (Pricer(load_cluster("dgx-a100"), {"tp": 1}, None, recipe) for recipe in recipes)
    pool = counted("max_pool2d.default", (IMAGE,), tensor(2, 2, 2, 2), (2, 2))
    depthwise = counted("conv2d.default", (IMAGE, EACH), IMAGE, None, (1, 1), (1, 1), (1, 1), 2)
    for counts, nbytes in ((pool, 128 + 32), (depthwise, 256 + 36)):
        assert together.traffic(counts).forward == older.traffic(counts).forward == nbytes < ON_GPU.traffic(counts).forward
    assert ON_GPU.class_of(depthwise) == "pointwise" and older.class_of(depthwise) == "other"
    norm = counted("group_norm.default", (IMAGE, TWO, TWO), IMAGE, groups=2)
    assert together.traffic(norm) == ON_GPU.traffic(norm)


def test_part_of_a_kernel_made_of_several_streams() -> None:
    by_row, masked = counted("mul.Tensor", (X, ONE_ROW)), counted("masked_fill.Scalar", (X, MASK), X, 0.0)
    assert moved(by_row.lean()) == (2 * N + 2 * WIDTH, 6 * N + 2 * (2 * WIDTH))
    assert moved(masked.lean()) == pytest.approx(tuple(x / 1.75 for x in moved(masked)))
    assert by_row.lean().moves == by_row.moves._replace(slow=(1.0, 1.0)) if by_row.moves else False
    streams = counted("gelu.default", (X,))
    assert streams.lean() is streams


def test_attention_takes_longer_with_a_mask_and_with_narrow_heads() -> None:
    mask = tensor(1, 1, 4, 4, grad=False)
    plain, masked, narrow = (
        counted("scaled_dot_product_attention.default", ins, ins[0]) for ins in ((HEADS,) * 3, (*(HEADS,) * 3, mask), (HALF,) * 3)
    )
    speeds = [ON_GPU.speed(c, "bfloat16") for c in (plain, masked, narrow)]
    assert speeds == pytest.approx([1.0, 1 / MASKED, 0.5])
    assert ON_HOST.speed(masked, "float32") == ON_HOST.speed(plain, "float32")


def test_parts_of_an_operator_move_their_parts() -> None:
    for counts in (counted("gelu.default", (X,)), counted("dropout.default", (X,), X, 0.1, True), counted("softmax.int", (X,), X, -1)):
        whole = ON_GPU.traffic(counts)
        half = ON_GPU.traffic_of(counts, [N / 2], [N / 2], 2)
        assert half == pytest.approx(tuple(x / 2 for x in whole))


def test_a_host_moves_each_operand_and_result_once_and_in_backward_twice() -> None:
    for counts in (counted("gelu.default", (X,)), counted("softmax.int", (X,), X, -1)):
        t = ON_HOST.traffic(counts)
        assert (t.forward, t.backward) == (2 * N, 4 * N)


def test_local_code_moves_no_less_than_what_it_divides() -> None:
    """The least price of a loss holds for its parts over the vocabulary, too."""
    assert AS_TIMED["cross_entropy_sum_vocab"] == AS_TIMED["cross_entropy_loss"]
    assert AS_TIMED["sync_batch_norm"] == AS_TIMED["batch_norm"]


class Residual(nn.Module):
    """A value that a norm and a sum read, and one that three products read."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        y = self.norm(x)
        return (x + self.q(y) * self.k(y.view(2, -1, WIDTH)).view(ROWS, WIDTH) + self.v(y)).sum()


def test_gradients_of_what_several_read_are_added() -> None:
    program = capture(Residual(), (torch.ones(ROWS, WIDTH),)).program
    whole = 4 * ROWS * WIDTH
    ledger = Ledger(program, Pricer(load_cluster("dgx-a100"), {"tp": 1}, None, AUTOPAR))
    added = {op.target.split(".")[1]: 0 for op in program.ops}
    for op, cost in zip(program.ops, ledger.costs, strict=True):
        added[op.target.split(".")[1]] += cost.counts.added_bytes
    assert {name: n for name, n in added.items() if n} == {"layer_norm": whole, "linear": 2 * whole}
    (norm,) = (k for k, op in enumerate(program.ops) if "layer_norm" in op.target)
    with_it, cost = ledger.costs[norm], Pricer(load_cluster("dgx-a100"), {"tp": 1}, None, AUTOPAR)
    alone = cost.op(program.ops[norm], program, dataclasses.replace(with_it.counts, added_bytes=0))
    gpu = cost.cluster.gpu
    rate = gpu.memory_bandwidth_bytes_per_s * gpu.fraction("pointwise")
    assert with_it.backward_s - alone.backward_s == pytest.approx(3 * whole / rate)
    assert with_it.forward_s == alone.forward_s
    on_host = Ledger(program, Pricer(load_cluster("cpu"), {"tp": 1}, None, AUTOPAR))
    assert not any(c.counts.added_bytes for c in on_host.costs)


def test_a_parameter_that_several_read_is_no_value_whose_gradients_are_added() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(self.one(x)).sum()

    program = capture(Tied(), (torch.ones(ROWS, WIDTH),)).program
    assert [r for op in program.ops for r in refs(op)].count(program.params[0].value) == 2
    ledger = Ledger(program, Pricer(load_cluster("dgx-a100"), {"tp": 1}, None, AUTOPAR))
    assert not any(c.counts.added_bytes for c in ledger.costs)
