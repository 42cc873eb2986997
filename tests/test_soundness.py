"""Zero unsound strategies: every claim of every operator rule is executed (see soundness_harness)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from soundness_harness import Tally, case_of, op_db, op_db_cases

from autopar.catalog.rule import OpView, register
from autopar.ir import P, R, S

pytestmark = pytest.mark.pure

# Operators of every kind that op_db's samples must have executed with a shard.
CORE = """
aten.linear.default aten.matmul.default aten.bmm.default aten.mm.default aten.addmm.default aten.einsum.default
aten.add.Tensor aten.mul.Tensor aten.div.Tensor aten.where.self aten.gelu.default aten.silu.default aten.relu.default
aten.view.default aten.reshape.default aten.permute.default aten.transpose.int aten.unsqueeze.default aten.expand.default
aten.cat.default aten.stack.default aten.select.int aten.slice.Tensor aten.chunk.default aten.split.Tensor aten.unbind.int
aten.softmax.int aten.log_softmax.int aten.sum.dim_IntList aten.mean.dim aten.amax.default aten.cumsum.default aten.var.correction
aten.layer_norm.default aten.rms_norm.default aten.group_norm.default aten.instance_norm.default aten.batch_norm.default
aten.conv1d.default aten.conv2d.default aten.conv3d.default aten.conv_transpose2d.input aten.max_pool2d.default aten.avg_pool2d.default
aten.adaptive_avg_pool2d.default aten.pad.default aten.pixel_shuffle.default aten.upsample_bilinear2d.vec
aten.scaled_dot_product_attention.default
""".split()


def test_op_db() -> None:
    """Over PyTorch's operator samples, with its sizes changed to ones that divide."""
    tally = Tally()
    for info in op_db(divisible=True):
        for case in op_db_cases(info, limit=6):
            tally.run(case)
    print(tally.table())
    assert not tally.failures, "\n".join(tally.failures)
    idle = [name for name in CORE if tally.counts.get(name, [0, 0])[1] == 0]
    assert not idle, f"no strategy with a shard was executed for: {idle}"
