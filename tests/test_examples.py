"""The example scripts as people start them, beside the same training on one process."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, DistributedSampler

ROOT = Path(__file__).parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def started(*command: str, cwd: Path) -> subprocess.Popen[str]:
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": paths}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """The last line that each has printed; they must all end well."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, f"{err[:6000]}\n...\n{err[-2000:]}"
        found.append(out.strip().splitlines()[-1] if out.strip() else "")
    return found


def of_the_plain_loop(steps: int) -> list[float]:
    """The same training with the original model and torch alone."""
    loop = example("plain_loop")
    torch.manual_seed(0)
    model, data = loop.LanguageModel().double(), loop.dataset()
    optimizer = torch.optim.AdamW(loop.groups(model), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    losses: list[float] = []
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1)
    while len(losses) < steps:
        sampler.set_epoch(len(losses) // 8)
        for ids, labels in DataLoader(data, batch_size=loop.BATCH, sampler=sampler):
            loss = model(ids, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    return losses[:steps]


@pytest.mark.gloo
def run(*command: str) -> bool:
    """Whether a command ends well."""
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    except OSError:
        return False


@pytest.fixture
def two_hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Two network namespaces with a link between them: of each its name, its address and its interface. None where that is not allowed."""
    names = [f"ap{os.getpid()}{side}" for side in "ab"]
    hosts = [(name, f"10.213.{os.getpid() % 250}.{k + 1}", f"v{name}") for k, name in enumerate(names)]
    try:
        made = all(run("ip", "netns", "add", name) for name in names)
        made = made and run("ip", "link", "add", hosts[0][2], "type", "veth", "peer", "name", hosts[1][2])
        for name, address, link in hosts:
            made = made and run("ip", "link", "set", link, "netns", name)
            made = made and run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            made = made and all(run("ip", "-n", name, "link", "set", one, "up") for one in (link, "lo"))
        yield hosts if made else []
    finally:
        for name in names:
            run("ip", "netns", "del", name)


def agents(hosts: list[tuple[str, str, str]]) -> list[tuple[str, ...]]:
    """The command of an agent in each network namespace, where nothing meets over localhost; of two on this host where there are none."""
    meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint")
    if not hosts:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            return [(*TORCHRUN, *meeting, f"localhost:{free.getsockname()[1]}")] * 2
    found = []
    for number, (name, address, link) in enumerate(hosts):
        within = ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={link}", f"TP_SOCKET_IFNAME={link}")
        here = ("--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", address)
        found.append((*within, *TORCHRUN, *meeting, f"{hosts[0][1]}:29411", *here))
    return found


@pytest.mark.gloo
def test_a_plain_loop_under_torchrun_on_one_and_on_two_nodes(two_hosts: list[tuple[str, str, str]], tmp_path: Path) -> None:
    """Four steps on one node; then the agents of two, which share no network but a link, go on from the checkpoint under another plan."""
    script = str(ROOT / "examples" / "plain_loop.py")
    one = started(*TORCHRUN, "--standalone", "--nproc-per-node", "2", script, "--pin", "tp=2", "--steps", "4", "--checkpoint", "last",
                  cwd=tmp_path)  # fmt: skip
    (text,) = printed([one])
    expected = of_the_plain_loop(10)  # into the second epoch
    assert json.loads(text) == pytest.approx(expected[:4], rel=1e-9)
    train = (script, "--pin", "dp=2", "--steps", "10", "--checkpoint", "last")
    both = [started(*agent, *train, cwd=tmp_path) for agent in agents(two_hosts)]
    (said,) = [line for line in printed(both) if line]  # rank 0 is on one of them
    assert json.loads(said) == pytest.approx(expected[4:], rel=1e-9)


@pytest.mark.gloo
def test_ray_train_runs_the_plain_loop_on_local_workers(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("ray", "pyarrow")):
        pytest.skip("ray.train is not installed: pip install 'autopar[ray]'")
    script = str(ROOT / "examples" / "ray_train.py")
    ray = started(sys.executable, script, "--workers", "2", "--pin", "dp=2", "--steps", "3", "--output", str(tmp_path), cwd=tmp_path)
    (text,) = printed([ray])
    assert float(text) == pytest.approx(of_the_plain_loop(3)[-1], rel=1e-9)


def of_the_accelerated_loop() -> list[float]:
    """The same training with torch alone."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    y, model = x[:, :4].argmax(1), example("accelerated").Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    losses = []
    for index in range(8):
        loss = model(x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8])
        (loss / 2).backward()
        if index % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "package"), [("hf_trainer", "accelerate"), ("accelerated", "accelerate"), ("lightning_module", "lightning")]
)
def test_examples_of_tools(name: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'autopar[tools]'")
    script = str(ROOT / "examples" / f"{name}.py")
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", script)
    if name == "accelerated":
        options = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
        command = (sys.executable, "-m", "accelerate.commands.launch", *options, "--main_process_port", "0", script)
    if name == "lightning_module":  # which starts its processes itself
        command = (sys.executable, script, "--devices", "2")
    run = started(*command, "--pin", "tp=2", cwd=tmp_path)
    (text,) = printed([run])
    if name == "lightning_module":
        found = ast.literal_eval(text)
        assert 0 < found["train_loss"] < 1.4  # below the loss of a guess among four classes
        assert found["val_accuracy"] > 0.3
        assert list((tmp_path / "lightning").rglob("rest.ckpt"))
    elif name == "accelerated":
        assert ast.literal_eval(text) == pytest.approx(of_the_accelerated_loop(), rel=1e-4)  # in float32
        assert list(tmp_path.rglob("checkpoint.json"))
    else:
        losses = ast.literal_eval(text)
        assert losses[-1] < losses[0]
        assert list(tmp_path.rglob("checkpoint.json"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [{"hf_trainer": "hf-trainer", "lightning_module": "lightning"}.get(name, name)]


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "options"), [("lora", ("--pin", "tp=2")), ("averaged", ("--pin", "pp=2", "--backend", "aot_eager"))])
def test_examples_of_what_people_do_with_parameters(name: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    """The script under torchrun, beside its own loop with the original model on one process."""
    if name == "lora" and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed: pip install 'autopar[tools]'")
    adapter = ("--adapter", str(tmp_path / "adapter")) if name == "lora" else ()
    path = str(ROOT / "examples" / f"{name}.py")
    run = started(*TORCHRUN, "--standalone", "--nproc-per-node", "2", path, *options, *adapter, cwd=tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script = example(name)
    if name == "lora":
        plain = script.adapted()
        expected = script.train(plain, 6)
    else:
        torch.manual_seed(0)
        plain = script.LanguageModel().double()
        average = script.AveragedModel(plain, multi_avg_fn=script.get_ema_multi_avg_fn(0.9))
        expected = script.train(plain, average, 4)
    (text,) = printed([run])
    assert json.loads(text) == pytest.approx(expected, rel=1e-9)
    if name == "lora":
        from peft import PeftModel

        torch.manual_seed(0)
        loaded = PeftModel.from_pretrained(script.LanguageModel().double(), tmp_path / "adapter", autocast_adapter_dtype=False)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.pure
def test_templates_for_clusters_start_the_script_as_torchrun_reads_them() -> None:
    batch = (ROOT / "examples" / "slurm.sbatch").read_text(encoding="utf-8")
    checked = subprocess.run(["bash", "-n"], input=batch, capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stderr
    job = yaml.safe_load((ROOT / "examples" / "kubernetes.yaml").read_text(encoding="utf-8"))
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert (job["kind"], container["name"], container["command"][0]) == ("PyTorchJob", "pytorch", "torchrun")
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    options = {word for word in batch.split() if word.startswith("--")}
    known = subprocess.run([*TORCHRUN, "--help"], capture_output=True, text=True, check=True, timeout=120).stdout
    for option in ("--nnodes", "--nproc-per-node", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts"):
        assert option in options
        assert option in known
