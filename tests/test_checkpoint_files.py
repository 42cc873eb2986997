"""The files of checkpoints: what is written in them and read again, clear errors, export and import."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import autopar
from autopar.checkpoint import safetensors_file
from autopar.errors import CheckpointError
from tests.checkpoint_model import adamw, batch, difference, in_a_child, plain, run_cli, saved_in, trained, whole_state

pytestmark = pytest.mark.pure


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return saved_in(tmp_path / "kept")


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

    _, status = os.waitpid(in_a_child(work), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "m.safetensors").stat().st_size > 40_000_000
