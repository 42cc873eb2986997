"""The hardware catalogue: every file loads with sources, unknown names say what is near, a new device is one new file."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pulp
import pytest

from cost_models import cluster as catalogue
from cost_models.cluster import (
    KINDS,
    HardwareFileError,
    UnknownHardware,
    list_clusters,
    list_gpus,
    list_links,
    load_cluster,
    load_gpu,
    load_link,
)
from cost_models.compute import OP_CLASSES, op_time_s

pytestmark = pytest.mark.pure
FOLDER = Path(catalogue.__file__).parent


@pytest.mark.parametrize("load,names", [(load_gpu, list_gpus()), (load_link, list_links()), (load_cluster, list_clusters())])
def test_every_file_loads_and_every_value_has_a_source(load, names) -> None:
    assert names
    for name in names:
        item = load(name)
        assert item.name == name
        numbers = [(key, source) for key, source in item.sources if key != "title"]
        assert len(numbers) >= 3
        for key, source in numbers:
            kind, _, rest = source.partition(": ")
            assert kind in KINDS and len(rest) > 5, (name, key, source)
        hash(item)


def test_names_and_aliases_are_unique_and_resolve() -> None:
    for kind, load in (("gpus", load_gpu), ("links", load_link), ("clusters", load_cluster)):
        for alias, path in catalogue._index(kind).items():
            assert load(alias).name == path.stem


@pytest.mark.parametrize(
    "name",
    ["p3.16xlarge", "p4d", "p4de", "p5", "dgx-a100", "dgx-h100", "DGX-H100", "h100-8x", "a100-8x", "pcie-box", "laptop", "cpu"],
)
def test_expected_clusters(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.gpu.memory_bytes > 2**30
    assert cluster.gpu.peak_flops_per_s("torch.bfloat16") > 0
    assert cluster.gpu_bandwidth_bytes_per_s > 0 and cluster.node_bandwidth_bytes_per_s > 0


@pytest.mark.parametrize(
    "load,name,near",
    [
        (load_cluster, "h100x8", "h100-8x"),
        (load_cluster, "dgx-a10", "dgx-a100"),
        (load_gpu, "a100-80", "a100-80gb"),
        (load_link, "nvlink", "nvlink2"),
    ],
)
def test_unknown_names_list_near_matches(load, name: str, near: str) -> None:
    with pytest.raises(UnknownHardware, match=near) as raised:
        load(name)
    assert isinstance(raised.value, ValueError) and name in str(raised.value)


def test_unlike_anything_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UnknownHardware, match="known are .*dgx-h100"):
        load_cluster("zzzzzz")
    with pytest.raises(UnknownHardware, match="does not exist"):
        load_cluster(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    "old,new,message",
    [
        ('gpu = "a100-40gb"', 'gpu = "a100-41gb"', "a100-40gb"),
        ('gpu = "a100-40gb"', "gpu = 3", "gpu must be a name"),
        ('gpu = "a100-40gb"', "gpu = ", "not valid TOML"),
        ("gpus_per_node = { value = 8,", "gpus_per_node = { value = 0,", "between 1 and"),
        ("gpus_per_node = { value = 8,", "gpus_per_node = { value = 2.5,", "must be a whole number, found 2.5"),
        ("gpus_per_node = { value = 8,", "gpus_per_node = { value = nan,", "needs a number as its `value`, found nan"),
        ("gpus_per_node = { value = 8,", f"gpus_per_node = {{ value = 1{'0' * 400},", "must lie between"),
        ("gpus_per_node = { value = 8,", f"gpus_per_node = {{ value = 1{'0' * 5000},", "a number of thousands of digits"),
        ("gpus_per_node = {", f"gpus_per_node = 0x{'f' * 9000}\nx = {{", "must be a dict, found a number of thousands of digits"),
        ('gpu = "a100-40gb"', f'gpu = "a100-40gb"\n"{"k" * 9000}" = 1', r"kkk\.\.\. is not known"),
        ('gpu = "a100-40gb"', 'gpu = "a100-40gb"\n"a\\n\\u001b[31m" = 1', r"'a\\n\\x1b\[31m' is not known"),
        ("gpus_per_node = { value = 8,", 'gpus_per_node = { value = "8",', "needs a number"),
        ("gpus_per_node = { value = 8,", "gpus_per_node = { value = 1e308,", "must lie between"),
        ("gpus_per_node = {", "gpu_per_node = {", "gpus_per_node is missing"),
        ("switch", "switch", ""),
        ('source = "datasheet: AWS EC2 instance type p4d.24xlarge" }', 'source = "somewhere" }', "needs a `source`"),
        ('aliases = ["p4d.24xlarge"', 'colour = "red"\naliases = ["p4d.24xlarge"', "colour is not known"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (FOLDER / "clusters" / "p4d.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    if not message:
        assert load_cluster(path).name == "mine"
        return
    with pytest.raises((HardwareFileError, UnknownHardware), match=message) as raised:
        load_cluster(path)
    assert "mine.toml" in str(raised.value) or message == "a100-40gb" or "mine" in str(raised.value)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    said = {"folder.toml": "is a folder", "loop.toml": "symbolic links", "pipe.toml": "is a device", "a\nb.toml": r"a\\nb.toml' does not"}
    for name, message in said.items():
        with pytest.raises(UnknownHardware, match=message):
            load_cluster(tmp_path / name)


def test_a_file_that_may_not_be_read_is_no_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(UnknownHardware, match=r"mine\.toml cannot be read: Permission denied"):
        load_cluster(tmp_path / "mine.toml")


def test_a_cluster_file_may_hold_or_name_its_own_parts(tmp_path: Path) -> None:
    (tmp_path / "my-gpu.toml").write_text((FOLDER / "gpus" / "l40s.toml").read_text(encoding="utf-8"), encoding="utf-8")
    link = (FOLDER / "links" / "pcie3-x16.toml").read_text(encoding="utf-8")
    (tmp_path / "own.toml").write_text(
        'gpu = "my-gpu.toml"\ninter = "ethernet-10"\n'
        'gpus_per_node = { value = 3, source = "measured: here" }\nnodes = { value = 1, source = "measured: here" }\n'
        'links_per_gpu = { value = 1, source = "measured: here" }\nlinks_per_node = { value = 1, source = "measured: here" }\n[intra]\n'
        + link,
        encoding="utf-8",
    )
    cluster = load_cluster(str(tmp_path / "own.toml"))
    assert (cluster.gpu.name, cluster.gpus_per_node, cluster.gpu_count) == ("my-gpu", 3, 3)
    assert cluster.intra.bandwidth_bytes_per_s == load_link("pcie3-x16").bandwidth_bytes_per_s


def test_a_toy_device_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("gpus", "links", "clusters"):
        shutil.copytree(FOLDER / kind, tmp_path / kind)
    toy = (FOLDER / "gpus" / "l40s.toml").read_text(encoding="utf-8").replace('"l40s-48gb"', '"toy-48gb"')
    (tmp_path / "gpus" / "toy.toml").write_text(toy, encoding="utf-8")
    monkeypatch.setattr(catalogue, "CATALOGUE", tmp_path)
    assert "toy" in list_gpus()
    assert load_gpu("toy-48gb").name == "toy"
    with pytest.raises(UnknownHardware, match="did you mean toy"):
        load_gpu("toyy")


def test_uneven_and_odd_counts_are_legal() -> None:
    p4d = load_cluster("p4d")
    assert [p4d.nodes_for(n) for n in (1, 3, 8, 9, 20)] == [1, 1, 1, 2, 3]
    with pytest.raises(ValueError, match="has 2 GPUs, 3 were asked"):
        load_cluster("laptop").nodes_for(3)


@pytest.mark.parametrize("name", list_gpus())
def test_operator_times(name: str) -> None:
    """Views are free, nothing is under the launch floor, time grows with work, small products are no more efficient than large ones."""
    gpu = load_gpu(name)
    assert op_time_s("view", 0, 1e9, "float32", gpu) == 0
    for op_class in OP_CLASSES:
        times = [op_time_s(op_class, 10.0**k, 10.0**k, "float32", gpu) for k in range(13)]
        assert times == sorted(times) and times[0] >= gpu.launch_s
    n_small, n_large = 256, 8192
    rates = [2 * n**3 / op_time_s("matmul", 2 * n**3, 3 * n * n * 2, "float16", gpu) for n in (n_small, n_large)]
    assert rates[0] <= rates[1] < gpu.peak_flops_per_s("float16")


def test_operator_errors() -> None:
    gpu = load_gpu("a100")
    with pytest.raises(ValueError, match="operator class 'matmull'"):
        op_time_s("matmull", 1, 1, "float32", gpu)
    with pytest.raises(ValueError, match="dtype 'float7'"):
        op_time_s("matmul", 1, 1, "float7", gpu)
    with pytest.raises(ValueError, match="no peak rate for 'tf32'"):
        load_gpu("cpu").peak_flops_per_s("tf32")


# NVLinks between the GPUs of a DGX-1 with V100 (white paper, figure 4)
CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def test_rings_of_the_hybrid_cube_mesh_are_counted() -> None:
    """The catalogue's ring counts are the most link-disjoint directed rings; five GPUs have none and carry a measured figure."""
    links = {**CUBE_MESH, **{(b, a): count for (a, b), count in CUBE_MESH.items()}}
    for ranks, stated in load_cluster("p3.16xlarge").rings_by_ranks:
        rings = [[*zip((0, *order), (*order, 0))] for order in itertools.permutations(range(1, ranks))]
        rings = [ring for ring in rings if links.keys() >= set(ring)]
        if not rings:
            assert ranks == 5
            continue
        problem = pulp.LpProblem("rings", pulp.LpMaximize)
        counts = [pulp.LpVariable(f"ring_{i}", 0, cat="Integer") for i in range(len(rings))]
        problem += pulp.lpSum(counts)
        for link, capacity in links.items():
            problem += pulp.lpSum(count for count, ring in zip(counts, rings) if link in ring) <= capacity
        problem.solve(pulp.HiGHS(msg=False, timeLimit=10))
        assert pulp.value(problem.objective) == stated
