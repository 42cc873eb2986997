"""What is said where nothing fits: the shortage shrinks byte for byte, its parts add up, and each change that is named does."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from autopar.errors import Infeasible
from autopar.explain.sweep import sweep
from autopar.planner import Pins, make_plan
from autopar.planner.search import Search
from autopar.planner.shortfall import BETWEEN, _between, leanest
from cost_models.cluster import Cluster, load_cluster
from tests.explain_cases import study_of
from tests.planner_programs import program_of

pytestmark = pytest.mark.pure
MIB = 2**20


SIZE = r"([\d.]+ (?:[KMG]i)?B)"


def size_of(text: str) -> float:
    """Bytes of '12.34 MiB'."""
    amount, unit = text.split()
    return float(amount) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


def bare() -> Cluster:
    """GPUs that take no memory before the first tensor, so that small programs can fill them."""
    cluster = load_cluster("dgx-a100")
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, context_bytes=0))


def refusal(gpus: int, limit_bytes: int, **pins: Any) -> str:
    with pytest.raises(Infeasible) as raised:
        make_plan(program_of("deep"), gpus, bare(), memory_limit_bytes=limit_bytes, pins=Pins(**pins))
    assert raised.value.exit_code == 3
    head = str(raised.value).splitlines()
    assert len(head) <= 5 and all(line.startswith("  - ") for line in raised.value.more), "the verdict and what would do come first"
    return "\n".join([*head, *raised.value.more])


def tried(text: str) -> list[str]:
    found = re.search(r"Tried, and each would do: (.*)\.", text)
    return found[1].split("; ") if found else []


def applied(change: str, gpus: int, limit_bytes: int, pins: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """GPUs, bytes and pins under a change as it is said."""
    changed = dict(pins)
    for part in change.split(" with "):
        if found := re.fullmatch(r"(\d+) GPUs", part):
            gpus = int(found[1])
        elif found := re.fullmatch(r"(\d+) ([GM])iB a GPU", part):
            limit_bytes = int(found[1]) * (2**30 if found[2] == "G" else MIB)
        elif found := re.fullmatch(r"(\w+) not pinned", part):
            del changed[found[1]]
        else:
            name, value = part.split("=")
            if name == "micro_batch":
                changed.pop("micro_batches", None)
            changed[name] = int(value) if value.isdigit() else value
    return gpus, limit_bytes, changed


CASES: list[tuple[int, int, dict[str, Any], str]] = [
    (4, 12, {"dp": 4, "zero": 0}, "zero=3"),
    (1, 20, {"micro_batches": 1, "recompute": "none"}, "micro_batch=1"),
    (2, 4, {}, "GPUs"),
    (4, 9, {"dp": 4, "zero": 1}, "dp not pinned"),
    (1, 8, {}, "MiB a GPU"),
    (4, 9, {"dp": 4, "zero": 0, "recompute": "none", "micro_batches": 1}, "micro_batch=1 with dp not pinned"),
    (2, 10, {"pp": 2, "schedule": "gpipe", "micro_batches": 12, "recompute": "full"}, "schedule not pinned"),
]


@pytest.mark.parametrize("gpus,mib,pins,expected", CASES, ids=[case[3] for case in CASES])
def test_each_change_that_is_named_does(gpus: int, mib: int, pins: dict[str, Any], expected: str) -> None:
    text = refusal(gpus, mib * MIB, **pins)
    choices = re.findall(r"- memory: (.*?) needs", text)
    assert len(set(choices)) == len(choices) > 0, "each choice once"
    changes = tried(text)
    assert any(expected in change for change in changes), text
    for change in changes:
        count, limit, changed = applied(change, gpus, mib * MIB, pins)
        assert (count, limit, changed) != (gpus, mib * MIB, pins)
        plan = make_plan(program_of("deep"), count, bare(), memory_limit_bytes=limit, pins=Pins(**changed))
        assert max(plan.memory_bytes) <= limit, change
        for part in change.split(" with ") if " with " in change else ():
            assert "short of" in refusal(*applied(part, gpus, mib * MIB, pins)[:2], **applied(part, gpus, mib * MIB, pins)[2]), part


def searched(limit_bytes: int, gpus: int = 2, **pins: Any) -> Search:
    return Search(
        program=program_of("deep"), gpus=gpus, cluster=bare(), memory_limit_bytes=limit_bytes, optimizer="adamw", precision="fp32",
        pins=Pins(**pins),
    )  # fmt: skip


@pytest.mark.parametrize("pins", [{}, {"pp": 2}, {"dp": 2, "zero": 0}], ids=str)
def test_the_need_is_the_same_whatever_there_is_and_its_parts_add_up(pins: dict[str, Any]) -> None:
    found = [leanest(searched(mib * MIB, **pins)) for mib in (1, 2, 3)]
    assert found[0] is not None
    assert all(f is not None and f.needs_bytes == found[0].needs_bytes and f.choice == found[0].choice for f in found)
    assert found[0].memory.total_bytes <= found[0].needs_bytes
    assert 0 <= found[0].stage < found[0].stages == found[0].choice.mesh.pp


def test_the_shortage_shrinks_with_memory_and_ends_where_a_plan_fits() -> None:
    need = leanest(searched(MIB))
    assert need is not None
    shorts = []
    for limit in (MIB, int(need.needs_bytes / 2), int(need.needs_bytes) - 1_000_000):
        text = refusal(2, limit)
        found = re.search(f"the leanest candidate is {SIZE} short", text)
        assert found is not None, text
        shorts.append(size_of(found[1]))
        assert shorts[-1] == pytest.approx(need.needs_bytes - limit, rel=0.01)
    assert shorts == sorted(shorts, reverse=True) and shorts[-1] > 0
    plan = make_plan(program_of("deep"), 2, bare(), memory_limit_bytes=int(need.needs_bytes * 1.1), pins=Pins())
    assert max(plan.memory_bytes) <= need.needs_bytes * 1.1


def test_a_choice_needs_the_same_whatever_there_is_and_lacks_the_rest() -> None:
    """As the lines of the choices say it, of 8 MiB and of 10."""
    said: list[dict[str, tuple[float, ...]]] = []
    for mib in (8, 10):
        search = searched(mib * MIB, dp=2, micro_batches=1)
        assert list(search.candidates()) == []
        form = re.compile(rf"memory: (.*?) needs {SIZE} on .* of {SIZE}, {SIZE} short")
        found = (form.search(line) for line in search.refused)
        said.append({m[1]: tuple(map(size_of, m.groups()[1:])) for m in found if m})
    assert said[0].keys() == said[1].keys() and len(said[0]) > 1
    for less, more in ((said[0][name], said[1][name]) for name in said[0]):
        assert less[0] == pytest.approx(more[0], abs=0.02 * MIB)
        assert all(needs - there == pytest.approx(short, abs=0.02 * MIB) for needs, there, short in (less, more))


def test_the_leanest_is_named_first() -> None:
    lines = [line for line in refusal(2, 2 * MIB).splitlines() if line.startswith("  - memory:")]
    shorts = [size_of(re.search(f"{SIZE} short", line)[1]) for line in lines]  # type: ignore[index]
    assert len(shorts) > 2 and shorts == sorted(shorts)
    choices = [line.partition(" needs ")[0] for line in lines]
    assert len(set(choices)) == len(choices), "a line says which choice it is of"


def test_each_form_of_the_tensor_axis_is_named_and_none_needs_less_than_the_leanest() -> None:
    """Where what rests fits, and activations do not."""
    text = refusal(2, 10 * MIB, tp=2, micro_batches=1, recompute="none")
    lines = dict(re.findall(f"- memory: (.*?) needs {SIZE}", text))
    assert len(lines) > 1 and sum("sequence parallelism" in name or "over tp" in name for name in lines) == len(lines) - 1, text
    found = leanest(searched(10 * MIB, tp=2, micro_batches=1, recompute="none"))
    assert found is not None and found.needs_bytes <= min(map(size_of, lines.values())) * 1.1, "its pieces, and what they share"


def test_the_binding_constraint_is_named_where_pieces_need_more_together() -> None:
    """What every piece of this one keeps at least does not fit into what each needs alone."""
    text = refusal(2, 2 * MIB, tp=2, micro_batches=1)
    assert "The binding constraint is memory" in text and "Tried" in text, text


@pytest.mark.parametrize("few,many,expected", [(1, 2, []), (2, 4, [3]), (16, 32, [*range(17, 32)]), (64, 128, [*range(72, 128, 8)])])
def test_gpus_between_two_numbers(few: int, many: int, expected: list[int]) -> None:
    assert list(_between(few, many, 8)) == expected
    assert len(_between(512, 1024, 8)) <= BETWEEN


def test_pins_that_leave_no_choice_are_no_lack_of_memory() -> None:
    text = refusal(2, MIB, dp=2, tp=2)
    assert "no mesh of 2 GPUs" in text and "memory" not in text


@pytest.mark.parametrize("gpus", [3, 4, 6])
def test_more_gpus_than_the_cluster_has_are_refused_with_what_does(gpus: int) -> None:
    """Each change that is said is planned here: as many GPUs as do, and the cluster of the catalogue that has enough."""
    program, laptop = program_of("deep"), load_cluster("laptop")
    with pytest.raises(Infeasible, match=f"{gpus} GPUs were asked for, but the cluster laptop has 2") as refused:
        make_plan(program, gpus, laptop)
    changes = tried(str(refused.value))
    assert [change.partition(" cpu")[0] for change in changes] == ["2 GPUs", "the cluster"], changes
    assert make_plan(program, 2, laptop).gpus == 2
    assert make_plan(program, gpus, load_cluster("cpu")).gpus == gpus


def test_only_what_does_is_said_of_more_gpus_than_the_cluster_has() -> None:
    """Two do not hold it; four of another cluster would."""
    program, laptop = program_of("deep"), load_cluster("laptop")
    of_two = Search(program=program, gpus=2, cluster=laptop, memory_limit_bytes=1, optimizer="adamw", precision="fp32", pins=Pins())
    short = leanest(of_two)
    assert short is not None
    limit = int(short.needs_bytes) - 1
    with pytest.raises(Infeasible) as refused:
        make_plan(program, 4, laptop, memory_limit_bytes=limit)
    changes = tried(str(refused.value))
    with pytest.raises(Infeasible):
        make_plan(program, 2, laptop, memory_limit_bytes=limit)
    assert changes == ["the cluster cpu"]


def test_a_sweep_in_which_nothing_fits_has_the_remedy_of_what_the_cluster_could_hold() -> None:
    """Not that of more GPUs than there are."""
    study = study_of(program_of("deep"), 2, cluster="laptop", memory_limit_bytes=MIB)
    found = sweep(study, [2, 4], [MIB], [load_cluster("laptop")], [None])
    assert found.cheapest is None and "MiB a GPU" in found.remedy and "were asked for" not in found.remedy
    assert [p.why for p in found.points][1] == "4 GPUs were asked for, but the cluster laptop has 2"
