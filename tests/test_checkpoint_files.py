"""The files of checkpoints: what is written in them, what survives a kill, what damaged and hostile ones do, and safetensors."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import pickle
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import autopar
from autopar import cli
from autopar.checkpoint import safetensors_file
from autopar.checkpoint.boxes import boxes_of, not_a_tiling
from autopar.checkpoint.planners import shared_out
from autopar.checkpoint.values import decode, encode
from autopar.errors import CheckpointError
from autopar.run.lies import Lies
from autopar.run.manifest import ParamSpec
from autopar.run.slices import cut, cut_spans
from tests.checkpoint_model import adamw, batch, difference, plain, trained, whole_state

pytestmark = pytest.mark.pure


def run_cli(*args: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in args])
    return int(stop.value.code or 0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = plain()
    optimizer = adamw(model)
    trained(model, optimizer, range(2))
    autopar.save(tmp_path / "kept", model, optimizer, step=2)
    return tmp_path / "kept"


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


# -------------------------------------------------------------------------------------------------------------- one process
def test_a_plain_model_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    model = plain()
    optimizer = adamw(model)
    trained(model, optimizer, range(2))
    autopar.save(tmp_path / "a", model, optimizer, note="x")
    losses = trained(model, optimizer, range(2, 4))
    again = plain(seed=5)
    second = adamw(again, other_way_round=True)
    assert autopar.load(tmp_path / "a", again, second) == {"note": "x"}
    assert trained(again, second, range(2, 4)) == losses
    assert difference(whole_state(again), whole_state(model)) == 0
    assert again.head.weight is again.wte.weight
    assert [g["lr"] for g in second.param_groups] == [2e-2, 1e-2]


def test_a_second_save_replaces_the_first_and_leaves_nothing_else(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    for step in range(3):
        with torch.no_grad():
            model.weight.fill_(step)
        (tmp_path / "notes.txt").write_text("mine")
        autopar.save(tmp_path, model, step=step)
        assert len(list(tmp_path.iterdir())) == 3
    assert autopar.load(tmp_path, model) == {"step": 2}


def test_while_an_asynchronous_save_goes_on_training_does_not_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = safetensors_file._write_data
    monkeypatch.setattr(safetensors_file, "_write_data", lambda *args: (time.sleep(0.01), write(*args))[1])
    model = plain()
    optimizer = adamw(model)
    trained(model, optimizer, range(2))
    before = whole_state(model)
    saving = autopar.save(tmp_path / "a", model, optimizer, async_save=True)
    assert saving is not None and not saving.done()
    losses = trained(model, optimizer, range(2, 4))
    saving.result()
    again = plain(seed=5)
    second = adamw(again)
    autopar.load(tmp_path / "a", again, second)
    assert difference(whole_state(again), before) == 0
    assert trained(again, second, range(2, 4)) == losses


def test_what_fails_after_the_index_is_in_its_place_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    autopar.save(tmp_path, model, step=0)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "not allowed")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        autopar.save(tmp_path, model, step=1)
    assert autopar.load(tmp_path, model) == {"step": 1}
    autopar.save(tmp_path, model, step=2)
    assert len(list(tmp_path.iterdir())) == 2


def test_an_error_of_an_asynchronous_save_is_raised_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    autopar.save(tmp_path / "file" / "below", nn.Linear(2, 2), async_save=True)
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        autopar.save(tmp_path / "b", nn.Linear(2, 2))
    autopar.save(tmp_path / "b", nn.Linear(2, 2))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=3),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2)),
}


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        return loss

    losses: list[float] = []
    for step in steps:  # noqa: B007  (the closure reads it)
        optimizer.step(closure)
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_every_kind_come_back(name: str, tmp_path: Path) -> None:
    model, again = plain(layers=1), plain(layers=1, seed=3)
    optimizer, second = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](again.parameters())
    _steps(model, optimizer, range(3))
    autopar.save(tmp_path / "a", model, optimizer)
    autopar.load(tmp_path / "a", again, second)
    assert _steps(model, optimizer, range(3, 5)) == _steps(again, second, range(3, 5))


def test_a_state_keeps_a_dtype_of_its_own(tmp_path: Path) -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    optimizer.state[model.weight]["momentum_buffer"] = torch.rand(4, 4)
    autopar.save(tmp_path / "a", model, optimizer)
    second = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    autopar.load(tmp_path / "a", model, second)
    assert torch.equal(second.state[model.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])


class Counting(nn.Linear):
    """State beside tensors, and every dtype that is rare."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 0
        for dtype in (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128):
            self.register_buffer(f"a_{str(dtype).removeprefix('torch.')}", torch.ones(2, 3, dtype=torch.uint8).to(dtype))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(2.5))

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_extra_state_of_modules_and_rare_dtypes_come_back(tmp_path: Path) -> None:
    model, again = Counting(), Counting()
    model.count = 3
    with torch.no_grad():
        for b in model.buffers():
            b.copy_(torch.arange(b.numel()).reshape(b.shape))
    autopar.save(tmp_path / "a", model)
    autopar.load(tmp_path / "a", again)
    assert again.count == 3
    for (name, one), (_, other) in zip(model.named_buffers(), again.named_buffers(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.to(torch.complex128), other.to(torch.complex128)), name


# ------------------------------------------------------------------------------------------------------------------- killed
def _children(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


def _filled(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(number)
            optimizer.state[p]["momentum_buffer"].fill_(number)


def _killed_at(step: int, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save, and end with SIGKILL at a step of it: whatever it opens, writes, syncs, renames or removes is one."""
    done = 0

    def count(event: str, args: Any) -> None:
        nonlocal done
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "written", "fsync"):
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (function(*args), count(name, ()))[0]

    safetensors_file._write_data = counted("written", safetensors_file._write_data)  # type: ignore[assignment]
    os.fsync = counted("fsync", os.fsync)
    sys.addaudithook(count)
    autopar.save(folder, model, optimizer, number=step)
    os._exit(0)


def test_a_kill_at_any_step_of_a_save_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    _filled(model, optimizer, 0)
    autopar.save(tmp_path / "a", model, optimizer, number=0)
    seen, step, status = [0], 0, 1
    while status != 0:
        step += 1
        _filled(model, optimizer, step)
        _, waited = os.waitpid(_children(lambda: _killed_at(step, tmp_path / "a", model, optimizer)), 0)  # noqa: B023
        status = os.waitstatus_to_exitcode(waited)
        assert status in (0, -signal.SIGKILL)
        seen.append(autopar.load(tmp_path / "a", model, optimizer)["number"])
        assert seen[-1] in (step, seen[-2])  # this save, or the one before
        assert all((p == seen[-1]).all() and (optimizer.state[p]["momentum_buffer"] == seen[-1]).all() for p in model.parameters())
    assert step > 15 and len(set(seen)) > 2  # killed before the index was in its place, and after
    assert len(list((tmp_path / "a").iterdir())) == 2  # what dead saves have left is gone


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """A process saves over and over; it is killed from outside while it does."""
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(2, 24)).sum().backward()
    optimizer.step()
    draw = random.Random(0)

    def over_and_over(first: int) -> None:
        for number in range(first, first + 1_000_000):
            _filled(model, optimizer, number)
            autopar.save(tmp_path / "a", model, optimizer, number=number)
            os.write(says, b".")

    for kill in range(12):
        hears, says = os.pipe()
        pid = _children(lambda kill=kill: over_and_over(1_000_000 * kill))
        for _ in range(draw.randint(1, 3)):
            os.read(hears, 1)
        time.sleep(draw.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(hears)
        os.close(says)
        number = autopar.load(tmp_path / "a", model, optimizer)["number"]
        assert number // 1_000_000 == kill
        assert all((p == number).all() and (optimizer.state[p]["momentum_buffer"] == number).all() for p in model.parameters())


def test_without_room_the_checkpoint_before_stays(tmp_path: Path) -> None:
    """A limit of the kernel on the size of files, in a process of its own."""

    def work() -> None:
        model = nn.Linear(100, 100)
        with torch.no_grad():
            model.weight.fill_(1)
        autopar.save(tmp_path / "a", model)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with torch.no_grad():
            model.weight.fill_(2)
        try:
            autopar.save(tmp_path / "a", model)
        except CheckpointError as error:
            (tmp_path / "said").write_text(str(error))
            os._exit(0)

    _, status = os.waitpid(_children(work), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "MiB are free there). The checkpoint that was there before, if there was one, is as it was" in (tmp_path / "said").read_text()
    model = nn.Linear(100, 100)
    autopar.load(tmp_path / "a", model)
    assert (model.weight == 1).all()
    assert len(list((tmp_path / "a").iterdir())) == 2


# ------------------------------------------------------------------------------------------------------------ clear errors
def test_what_does_not_fit_is_said_and_nothing_is_written(saved: Path) -> None:
    cases: dict[str, tuple[nn.Module, str]] = {
        "fewer layers": (plain(layers=3), r"not of this Model: it has layers\.3\.fc\.bias, .* and 4 more, which the model has not"),
        "more layers": (plain(layers=5), r"it has no layers\.4\..* and 4 more"),
        "another model": (nn.Linear(2, 2), r"not of this Linear: it has no weight, bias; it has calls, .*, which the model has not"),
        "less precise": (plain().float(), r"wte\.weight is float64 there and float32 in the model, which would lose digits"),
    }
    for name, (model, text) in cases.items():
        before = whole_state(model)
        with pytest.raises(CheckpointError, match=text):
            autopar.load(saved, model)
        assert difference(whole_state(model), before) == 0, name
    other = plain()
    other.ln_f = nn.LayerNorm(8)
    with pytest.raises(CheckpointError, match=r"ln_f\.weight has shape \(16,\) there and \(8,\) in the model"):
        autopar.load(saved, other)


def test_another_optimizer_is_refused(saved: Path, tmp_path: Path) -> None:
    model = plain()
    with pytest.raises(CheckpointError, match=r"other parameters than the one that was saved: the checkpoint also has .* and 31 more"):
        autopar.load(saved, model, torch.optim.AdamW([model.wte.weight]))
    with pytest.raises(CheckpointError, match="has no state of frozen"):
        autopar.load(saved, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match=r"are in one group now \(number 0\), and were saved with different options \(lr: "):
        autopar.load(saved, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    with pytest.raises(CheckpointError, match="is not one of Model"):
        autopar.save(tmp_path / "b", model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    autopar.save(tmp_path / "b", model)
    with pytest.raises(CheckpointError, match="has no optimizer"):
        autopar.load(tmp_path / "b", model, adamw(model))


def test_tensors_that_were_apart_do_not_become_one_in_silence(tmp_path: Path) -> None:
    apart = plain(layers=1)
    apart.head.weight = nn.Parameter(apart.wte.weight.detach().clone())
    autopar.save(tmp_path / "same", apart)
    with torch.no_grad():
        apart.head.weight.mul_(2)
    autopar.save(tmp_path / "other", apart)
    tied = plain(layers=1, seed=2)
    autopar.load(tmp_path / "same", tied)
    with pytest.raises(CheckpointError, match=r"different values for model\.wte\.weight and model\.head\.weight, which are one tensor"):
        autopar.load(tmp_path / "other", tied)
    autopar.save(tmp_path / "tied", tied)
    autopar.load(tmp_path / "tied", apart)  # the reverse is nothing special
    assert torch.equal(apart.head.weight, apart.wte.weight) and apart.head.weight is not apart.wte.weight


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / f"data-{'0' * 16}-00000.safetensors").write_text("x")
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "pretrained" / "model-00001-of-00002.safetensors").write_text("x")
    cases = {"none": "it is not there", "file": "it is a file", "empty": "has no checkpoint", "begun": "is not complete"}
    cases |= {"pretrained": "has no checkpoint.*autopar import makes one of the safetensors files"}
    for name, text in cases.items():
        with pytest.raises(CheckpointError, match=text):
            autopar.load(tmp_path / name, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="it is a file, and a checkpoint is a folder"):
        autopar.save(tmp_path / "file", nn.Linear(2, 2))


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


# -------------------------------------------------------------------------------------------------------- export and import
def test_export_and_import(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("export", saved, "-o", tmp_path / "model.safetensors", "--json") == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["written"] == [str(tmp_path / "model.safetensors")] and answer["tensors"] == len(plain().state_dict())
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    trained(expected := plain(), adamw(expected), range(2))
    assert difference(found, whole_state(expected)) == 0
    plain(seed=3).load_state_dict(found, strict=True)
    assert run_cli("import", tmp_path / "model.safetensors", "-o", tmp_path / "again") == 0
    model = plain(seed=4)
    autopar.load(tmp_path / "again", model)
    assert difference(whole_state(model), whole_state(expected)) == 0
    assert run_cli("export", tmp_path / "nothing", "-o", tmp_path / "x.safetensors") == 2
    assert run_cli("import", tmp_path / "nothing", "-o", tmp_path / "x") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "kept", "model.safetensors"]


def test_a_model_of_hugging_face_is_exported_for_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    autopar.save(tmp_path / "a", model)
    assert run_cli("export", tmp_path / "a", "-o", tmp_path / "hf") == 0
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert difference(whole_state(found), whole_state(model)) == 0
    found.save_pretrained(tmp_path / "parts", max_shard_size="2KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert run_cli("import", tmp_path / "parts", "-o", tmp_path / "b") == 0
    again = transformers.GPT2LMHeadModel(config)
    autopar.load(tmp_path / "b", again)
    assert difference(whole_state(again), whole_state(model)) == 0


def test_export_has_one_tensor_in_memory(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(40)))  # 40 MB in tensors of 1 MB
    autopar.save(tmp_path / "a", model)
    del model

    def work() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        from autopar.checkpoint.exchange import export_model, import_model

        export_model(tmp_path / "a", tmp_path / "m.safetensors")
        import_model(tmp_path / "m.safetensors", tmp_path / "b")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
        os._exit(0 if grown < 16_000 else 3)

    _, status = os.waitpid(_children(work), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "m.safetensors").stat().st_size > 40_000_000


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
