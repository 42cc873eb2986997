"""What a checkpoint holds of a tensor on each rank, and the values beside the tensors."""

from __future__ import annotations

import collections
import itertools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.checkpoint.boxes import boxes_of, not_a_tiling
from autopar.checkpoint.planners import shared_out
from autopar.checkpoint.values import decode, encode
from autopar.errors import CheckpointError
from autopar.run.lies import Lies
from autopar.run.manifest import ParamSpec
from autopar.run.slices import cut, cut_spans

pytestmark = pytest.mark.pure


# ------------------------------------------------------------------------------------------------------------------ layouts
@pytest.mark.parametrize("seed", range(30))
def test_boxes_of_a_part_are_what_is_cut_from_the_whole(seed: int) -> None:
    """Tensor parallel slices, in groups too, and slices of these over data parallel ranks along any dim."""
    draw = random.Random(seed)
    n, groups, shards = draw.choice([1, 2, 3]), draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    dim, zero = draw.randrange(2), draw.randrange(2)
    shape = [12 * draw.randint(1, 2), 12]
    shape[dim] = 12 * n * groups * shards
    whole = torch.arange(math.prod(shape)).reshape(shape)
    rectangles = []
    for rank in range(n):
        for shard in range(shards):
            local = cut(cut(whole, n, dim, groups, rank), shards, zero, 1, shard)
            spans: list[Any] = [((0, size),) for size in shape]
            spans[dim] = cut_spans(spans[dim], n, groups, rank)
            spans[zero] = cut_spans(spans[zero], shards, 1, shard)
            for box in boxes_of(spans):
                at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(box.of(local), whole[at])
                rectangles.append((box.offsets, box.sizes))
    assert not_a_tiling(shape, rectangles) is None
    assert not_a_tiling(shape, rectangles[1:]) is not None or len(rectangles) == 1


@pytest.mark.parametrize("seed", range(40))
def test_spans_are_what_a_rank_holds(seed: int) -> None:
    """Of every rank of a mesh: tensor parallel layouts with groups, slices at rest over some data parallel ranks, pipeline stages."""
    draw = random.Random(seed)
    tp, shard, replica, groups, dim, zero = (draw.choice(of) for of in ((1, 2, 3), (1, 2), (1, 2), (1, 3), (0, 1), (None, 0, 1)))
    shape = [2 * tp * groups * shard, 2 * tp * groups * shard]
    whole = torch.arange(math.prod(shape)).reshape(shape)
    spec = ParamSpec(name="w", shape=tuple(shape), dtype="int64", layouts={"tp": f"S({dim}/{groups})"}, zero_dim=zero, stages=(1,))
    rectangles: dict[Any, int] = {}
    for at in itertools.product(range(2), range(tp), range(shard), range(replica)):
        sizes = dict(zip(("pp", "tp", "shard", "replica"), ((2, at[0]), (tp, at[1]), (shard, at[2]), (replica, at[3])), strict=True))
        axes = {name: SimpleNamespace(size=size, rank=rank) for name, (size, rank) in sizes.items()}
        axes["dp"] = SimpleNamespace(size=shard * replica, rank=at[3] * shard + at[2])
        lies = Lies(spec, SimpleNamespace(**axes, axis=axes.__getitem__, pp_ranks=tuple, device="cpu"))  # type: ignore[arg-type]
        local = lies.cut(whole)
        boxes = boxes_of(lies.spans())
        assert sum(math.prod(box.sizes) for box in boxes) == local.numel()
        for box in boxes:
            place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(box.of(local), whole[place])
            rectangles[box.offsets, box.sizes] = rectangles.get((box.offsets, box.sizes), 0) + 1
    assert not_a_tiling(shape, rectangles) is None
    assert set(rectangles.values()) == {replica * (shard if zero is None else 1)}


def test_what_does_not_cover_a_tensor_once_is_found() -> None:
    good = [((0, 0), (2, 4)), ((2, 0), (2, 4))]
    assert not_a_tiling((4, 4), good) is None
    for wrong in (good[:1], [*good, good[0]], [((0, 0), (2, 4)), ((1, 0), (3, 4))], [((0, 0), (2, 4)), ((2, 0), (2, 3))], []):
        assert not_a_tiling((4, 4), wrong) is not None
    assert not_a_tiling((), [((), ())]) is None
    assert not_a_tiling((), []) is not None
    assert not_a_tiling((0, 3), []) is None


def test_copies_are_written_once_and_all_ranks_write_about_the_same() -> None:
    def item(name: str, row: int, rows: int) -> Any:
        data = SimpleNamespace(chunk=SimpleNamespace(sizes=(rows, 8)), properties=SimpleNamespace(dtype=torch.float32))
        return SimpleNamespace(index=(name, row), tensor_data=data)

    # of 4 ranks, 0 and 2 hold the first half of the cut tensors, 1 and 3 the other; all hold the whole ones
    proposed = [[item("cut", 4 * (rank % 2), 4), *(item(f"whole{k}", 0, 8) for k in range(6))] for rank in range(4)]
    own = shared_out(proposed)
    written = [one.index for of_rank in own for one in of_rank]
    assert sorted(written) == sorted({one.index for of_rank in proposed for one in of_rank})
    loads = [sum(math.prod(one.tensor_data.chunk.sizes) for one in of_rank) for of_rank in own]
    assert max(loads) - min(loads) <= 64


# ------------------------------------------------------------------------------------------------------------------- values
VALUES: dict[str, Any] = {
    "numbers": [0, -1, 2**70, True, None, 0.1, math.inf, -math.inf, 1e-320, 3 + 4j],
    "texts": ["", "ü\n\0", b"\x00\xff"],
    "containers": [(1, (2,)), {1, 2}, frozenset({"a"}), {1: "a", (2, 3): None}, {"!": 1}, collections.deque([1, 2], maxlen=3), []],
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter({3: 2, 7: 1}),
    "torch": [torch.float16, torch.Size((2, 3))],
    "python random": random.Random(3).getstate(),
    "scaler": torch.amp.GradScaler("cpu").state_dict(),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name: str) -> None:
    text = json.dumps(encode(VALUES[name], name, lambda path, tensor: path), allow_nan=False)
    found = decode(json.loads(text), lambda key: torch.empty(0))
    assert found == VALUES[name] and repr(found) == repr(VALUES[name])


def test_tensors_and_arrays_within_values_come_back() -> None:
    kept: dict[str, Tensor] = {}

    def keep(path: str, tensor: Tensor) -> str:
        kept[path] = tensor.clone()
        return path

    value = {"rng": torch.get_rng_state(), "numpy": np.random.RandomState(1).get_state(), "x": [np.float32(0.1), np.bool_(True)]}  # noqa: NPY002
    found = decode(encode(value, "extra", keep), kept.__getitem__)
    assert torch.equal(found["rng"], value["rng"])
    assert all(np.array_equal(a, b) for a, b in zip(found["numpy"], value["numpy"], strict=True))
    assert found["numpy"][1].dtype == np.uint32
    assert [type(x) for x in found["x"]] == [np.float32, np.bool_]
    assert math.isnan(decode(encode(math.nan, "x", keep), kept.__getitem__))


@pytest.mark.parametrize("value", [object(), print, nn.Linear(2, 2), {"a": [Path("x")]}, collections.defaultdict(list)])
def test_values_of_other_kinds_are_refused_by_name(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extra\.mine.* is of type .*, which a checkpoint does not keep: give"):
        autopar.save(tmp_path / "x", nn.Linear(2, 2), mine=value)
    assert not list(tmp_path.rglob("*.json"))
