"""Checkpoints that are damaged or hostile: refused, and nothing of theirs is run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import autopar
from autopar.errors import CheckpointError
from tests.checkpoint_model import adamw, plain, run_cli, saved_in, trained

pytestmark = pytest.mark.pure


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return saved_in(tmp_path / "kept")


# ------------------------------------------------------------------------------------------------------- damaged and hostile
def _edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "checkpoint.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def _first(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["model.wte.weight"]


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda i: i.update(format="x"),
    "a later version": lambda i: i.update(version=2),
    "a file elsewhere": lambda i: i["files"][0].__setitem__(0, "../../etc/passwd"),
    "a file of another size": lambda i: i["files"][0].__setitem__(1, 3),
    "a file too much": lambda i: i["files"].append([f"data-{'0' * 16}-00007.safetensors", 8]),
    "no such dtype": lambda i: _first(i).update(dtype="save"),
    "another dtype": lambda i: _first(i).update(dtype="float32"),
    "a huge shape": lambda i: _first(i).update(shape=[2**40, 2**40]),
    "a negative shape": lambda i: _first(i).update(shape=[-1, 16]),
    "no chunks": lambda i: _first(i).update(chunks=[]),
    "the same chunk twice": lambda i: _first(i).update(chunks=_first(i)["chunks"] * 2),
    "data outside of the file": lambda i: _first(i)["chunks"][0].__setitem__(1, 10**9),
    "a file that there is not": lambda i: _first(i)["chunks"][0].__setitem__(0, 5),
    "other data": lambda i: _first(i)["chunks"][0].__setitem__(1, 1024),
    "no tensors": lambda i: i.update(tensors={}),
    "tensors of another kind": lambda i: i.update(tensors=[]),
    "tied to nothing": lambda i: i["contents"].update(tied={"head.weight": "nothing"}),
    "a value that calls": lambda i: i["contents"]["extra"].update(step={"!": "call", "v": "os.system"}),
    "a dtype that is code": lambda i: i["contents"]["extra"].update(step={"!": "dtype", "v": "load"}),
    "a scalar that is code": lambda i: i["contents"]["extra"].update(step={"!": "scalar", "dtype": "object", "v": 1}),
    "a tensor that is not there": lambda i: i["contents"]["extra"].update(step={"!": "tensor", "v": "model.nothing"}),
    "a state that is not there": lambda i: i["contents"]["state"]["wte.weight"].update(x={"!": "tensor", "v": "nothing"}),
    "groups without names": lambda i: i["contents"]["groups"][0].pop("params"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index_is_refused(saved: Path, name: str) -> None:
    _edited(saved, DAMAGE[name])
    model = plain()
    with pytest.raises(CheckpointError):
        autopar.load(saved, model, adamw(model))


def test_noise_in_the_index_or_in_the_data_is_refused(saved: Path) -> None:
    text = (saved / "checkpoint.json").read_bytes()
    (data,) = saved.glob("data-*")
    draw = random.Random(1)
    for _ in range(80):
        noisy = bytearray(text)
        for _ in range(draw.randint(1, 20)):
            noisy[draw.randrange(len(noisy))] = draw.randrange(256)
        (saved / "checkpoint.json").write_bytes(noisy)
        model = plain()
        with contextlib.suppress(CheckpointError):  # a changed digit may be of a number that nobody checks
            autopar.load(saved, model, adamw(model))
    (saved / "checkpoint.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match="is not the index of a checkpoint, or is damaged"):
        autopar.load(saved, plain())
    (saved / "checkpoint.json").write_bytes(text)
    flipped = bytearray(data.read_bytes())
    flipped[-1000] ^= 1
    data.write_bytes(flipped)
    model = plain()
    with pytest.raises(CheckpointError, match="is damaged: .* are not those that were written. Model is half loaded now"):
        autopar.load(saved, model, adamw(model))
    data.write_bytes(flipped[:-10])
    with pytest.raises(CheckpointError, match=r"is not complete: data-.* has \d+ bytes instead of"):
        autopar.load(saved, model)
    data.unlink()
    with pytest.raises(CheckpointError, match="is not complete: .* is not there"):
        autopar.load(saved, model)


# ----------------------------------------------------------------------------------- of torch.distributed.checkpoint itself
@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def foreign(tmp_path: Path, alone: None) -> Path:
    model = plain()
    optimizer = adamw(model)
    trained(model, optimizer, range(2))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": of_model, "optim": of_optimizer}, "step": 2, "rng": torch.get_rng_state()}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def test_a_checkpoint_of_dcp_is_loaded_and_exported(foreign: Path, tmp_path: Path) -> None:
    expected = plain()
    trained(expected, first := adamw(expected), range(2))
    losses = trained(expected, first, range(2, 4))
    model = plain(seed=4)
    optimizer = adamw(model, other_way_round=True)
    extra = autopar.load(foreign, model, optimizer)
    assert extra["step"] == 2 and extra["rng"].dtype == torch.uint8
    assert trained(model, optimizer, range(2, 4)) == losses
    assert run_cli("export", foreign, "-o", tmp_path / "m.safetensors") == 0
    plain(seed=9).load_state_dict(safetensors.torch.load_file(tmp_path / "m.safetensors"), strict=True)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickles_in_a_checkpoint_are_not_run(foreign: Path, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    index = (foreign / ".metadata").read_bytes()
    good = pickle.loads(index)
    attacks: list[Any] = [Bomb(mark), {"state_dict_metadata": Bomb(mark)}]
    for where in ("planner_data", "storage_data", "storage_meta"):
        one = pickle.loads(index)
        setattr(one, where, Bomb(mark))
        attacks.append(one)
    for attack in attacks:
        (foreign / ".metadata").write_bytes(pickle.dumps(attack))
        with pytest.raises(CheckpointError, match=r"it names posix\.mkdir, which is not of such an index: what it would do is not done"):
            autopar.load(foreign, plain())
    for text in (b"cos\nsystem\n(S'mkdir x'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"ctorch\nload\n(S'x'\ntR.", b"garbage", b""):
        (foreign / ".metadata").write_bytes(text)
        with pytest.raises(CheckpointError):
            autopar.load(foreign, plain())
    for info in good.storage_data.values():
        info.relative_path = f"../{foreign.name}/{info.relative_path}"
    (foreign / ".metadata").write_bytes(pickle.dumps(good))
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        autopar.load(foreign, plain())
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:.* is not read")
def test_noise_in_a_checkpoint_of_dcp_is_refused(tmp_path: Path, alone: None) -> None:
    model, foreign = nn.Linear(4, 3), tmp_path / "dcp"
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=foreign)
    draw = random.Random(1)
    said = 0
    for name in (".metadata", "__0_0.distcp"):
        good = (foreign / name).read_bytes()
        for _ in range(60):
            noisy = bytearray(good[: draw.randrange(len(good))] if draw.random() < 0.2 else good)
            for _ in range(draw.choice([1, 5, 20])):
                noisy[draw.randrange(len(noisy))] = draw.randrange(256)
            (foreign / name).write_bytes(noisy)
            try:
                autopar.load(foreign, model, torch.optim.AdamW(model.parameters()))
            except CheckpointError:
                said += 1
        (foreign / name).write_bytes(good)
    assert said > 60


def test_values_of_dcp_that_are_code_are_not_run(tmp_path: Path, alone: None) -> None:
    mark = tmp_path / "executed"
    model = nn.Linear(2, 2)
    dcp.save({"model": model.state_dict(), "mine": [Bomb(mark)]}, checkpoint_id=tmp_path / "dcp")
    with contextlib.suppress(FileExistsError):
        with pytest.warns(UserWarning, match="mine is not read: it holds what only running it would give"):
            assert autopar.load(tmp_path / "dcp", model) == {}
    assert not mark.exists()


# -------------------------------------------------------------------------------------------------------------- safetensors
@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{", 0),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4),
        (b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
        (b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8),
        (b'{"x":{"dtype":"PICKLE","shape":[1],"data_offsets":[0,4]}}', 4),
        (b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', 4),
        (b'{"x":{"dtype":"F32","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,4]}}', 4),
        (b'{"x":{"dtype":"F32","shape":[99999999999999999999999999],"data_offsets":[0,4]}}', 4),
        (b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 8),
        (b"[" * 5000, 0),
    ],
)
def test_safetensors_files_that_lie_are_refused(header: bytes, data: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))
    assert run_cli("import", path, "-o", tmp_path / "out") == 2
    for wrong in (b"", b"\xff" * 8, (10**17).to_bytes(8, "little")):
        path.write_bytes(wrong)
        assert run_cli("import", path, "-o", tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()
