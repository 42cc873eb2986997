"""Configurations of other training softwares: written, read back, and the plans that each software can run."""

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.planner import Pins
from autopar.stacks import STACKS, Configuration, StackError, pins_of, read, stack_of
from autopar.stacks.files import parsed
from autopar.stacks.stack import beyond, pins_within
from cost_models.recipe import Recipe

pytestmark = pytest.mark.pure

SUFFIX = {name: stack.suffixes[0] for name, stack in STACKS.items()}


@st.composite
def configurations(draw, name):
    """What a software can run."""
    limits = STACKS[name].limits
    tp = draw(st.sampled_from([1, 2, 4])) if limits.sequence else 1
    pp = draw(st.sampled_from([1, 2, 4])) if limits.schedules else 1
    dp = draw(st.sampled_from([1, 2, 4, 8]))
    zeros = (limits.staged_zeros if pp > 1 else limits.zeros) if dp > 1 else (0,)
    if limits.plain_alone and tp * pp > 1:
        zeros = tuple(z for z in zeros if z) or (0,)
    zero = draw(st.sampled_from(zeros))
    schedule = draw(st.sampled_from(limits.schedules)) if pp > 1 else "1f1b"
    chunks = 2 if schedule == "interleaved" else 1
    micro, count = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    blocks = (3,) * (pp * chunks) if pp > 1 else None
    groups = limits.groups and dp > 2 and zero == 3 and name not in ("composer", "megatron")
    return Configuration(
        dp=dp, tp=tp, pp=pp, global_batch=dp * micro * count, micro_batch=micro, micro_batches=count, schedule=schedule,
        virtual_stages=chunks, zero=zero, shard=draw(st.sampled_from([None, 2])) if groups else None,
        recompute=draw(st.sampled_from(limits.recomputes)), sequence_parallel=draw(st.sampled_from(limits.sequence)) if tp > 1 else None,
        precision=draw(st.sampled_from(["bf16", "fp32"])), optimizer="adamw", blocks=blocks,
    )  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
@settings(max_examples=25)
@given(data=st.data())
def test_what_is_written_is_read_back(name, data, tmp_path_factory):
    c = data.draw(configurations(name))
    stack = STACKS[name]
    assert beyond(c, stack) == ()
    path = tmp_path_factory.mktemp("stack") / f"run{SUFFIX[name]}"
    text = stack.text(c)
    if name == "megatron":
        layers = sum(c.blocks or (12,))
        text += f'torchrun --nproc_per_node {c.gpus} --nnodes=1 pretrain_gpt.py --num-layers {layers} "${{AUTOPAR_ARGS[@]}}"\n'
    path.write_text(text)
    found_stack, found = read(path)
    assert found_stack is stack
    gpus, batch = c.gpus, c.global_batch
    beside_the_file = name == "deepspeed" or (name == "accelerate" and c.tp == 1 and not (c.zero and c.dp > 1))
    said = {"recompute": "none"} if beside_the_file else {}  # it is the script's to ask for, which the file says
    ours, theirs = pins_of(replace(c, **said), gpus, batch), pins_of(found, gpus, batch)
    same = ["dp", "tp", "pp", "zero", "shard", "recompute", "schedule", "virtual_stages"]
    same += [] if name in ("deepspeed",) else ["sequence_parallel"]
    assert [(n, getattr(ours, n)) for n in same] == [(n, getattr(theirs, n)) for n in same]
    if name not in ("accelerate",):  # whose file has no batch
        assert ours.micro_batch == theirs.micro_batch
        assert found.precision in (c.precision, None) or name == "megatron"


def test_uneven_stages_and_hybrid_sharding_go_where_they_can():
    c = Configuration(dp=4, pp=4, micro_batch=1, micro_batches=8, global_batch=32, zero=1, blocks=(7, 9, 9, 7))
    assert "stages of 7, 9, 9, 7 layers: it makes stages alike" in beyond(c, STACKS["megatron"])
    table = tomllib.loads(STACKS["torchtitan"].text(replace(c, zero=2)))["parallelism"]
    parts = table["module_fqns_per_model_part"]
    assert [sum(n.startswith("layers.") for n in part) for part in parts] == [7, 9, 9, 7]
    assert parts[0][0] == "tok_embeddings" and parts[-1][-1] == "output"
    hybrid = Configuration(dp=8, zero=3, shard=4, micro_batch=1, micro_batches=1, global_batch=8)
    found = tomllib.loads(STACKS["torchtitan"].text(hybrid))["parallelism"]
    assert (found["data_parallel_replicate_degree"], found["data_parallel_shard_degree"]) == (2, 4)
    assert any("hybrid" in line for line in beyond(replace(hybrid, zero=1), STACKS["nanotron"]))


@pytest.mark.parametrize("name", STACKS)
def test_what_cannot_be_expressed_is_said_in_the_text_itself(name):
    c = Configuration(
        dp=4, tp=2, pp=2, micro_batch=1, micro_batches=4, global_batch=16, zero=2, recompute="selective", sequence_parallel=True,
        schedule="gpipe", said=("something of autopar's own\nover two lines",),
    )  # fmt: skip
    cannot = beyond(c, STACKS[name])
    assert any("something" in line for line in cannot)
    assert any(line.startswith("recompute=selective") for line in cannot)
    text = STACKS[name].text(c)
    if SUFFIX[name] == ".json":
        assert set(cannot) <= set(json.loads(text)["cannot express"])
    else:
        comments = [line for line in text.splitlines() if line.startswith("# cannot express: ")]
        assert {" ".join(line.split()) for line in cannot} <= {line.removeprefix("# cannot express: ") for line in comments}


SCRIPT = r"""
#!/bin/bash
# a script as people have it
export TP=${TP:-4}
PP=2
MBS=1; GBS=64
NODES=$(wc -l < hosts)          # only a shell knows
GPT_ARGS="--num-layers 32 --hidden-size 4096"
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP}   # within the node
    --pipeline-model-parallel-size $PP
    --num-layers-per-virtual-pipeline-stage 4
    --sequence-parallel
)
touch /tmp/autopar-was-run; rm -rf "$HOME/nothing"
torchrun --nproc_per_node=8 --nnodes 2 pretrain_gpt.py $GPT_ARGS \
    ${MODEL_PARALLEL_ARGS[@]} --micro-batch-size $MBS --global-batch-size=$GBS \
    --use-distributed-optimizer --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""


def test_a_shell_script_is_read_and_not_run(tmp_path):
    path, mark = tmp_path / "megatron.sh", tmp_path / "autopar-was-run"
    path.write_text(SCRIPT.replace("/tmp/autopar-was-run", str(mark)))
    stack, c = read(path)
    assert stack.name == "megatron" and not mark.exists()
    assert (c.dp, c.tp, c.pp, c.virtual_stages, c.zero, c.sequence_parallel) == (2, 4, 2, 4, 1, True)
    assert (c.micro_batch, c.global_batch, c.recompute, c.precision) == (1, 64, "full", "bf16")
    assert pins_of(c, 16, 64) == Pins(
        dp=2, tp=4, pp=2, micro_batch=1, schedule="interleaved", virtual_stages=4, zero=1, recompute="full", sequence_parallel=True,
        even_stages=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "suffix", "says"),
    [
        ("--tensor-model-parallel-size $(nproc)", ".sh", "not run here"),
        ("--tensor-model-parallel-size banana", ".sh", "whole number"),
        ("echo 'open", ".sh", "cannot be parsed"),
        ("{", ".json", "cannot be parsed"),
        ('{"a": 1}', ".json", "no configuration of"),
        ('{"zero_optimization": {"stage": 7}}', ".json", "must be 0, 1, 2 or 3"),
        ('{"zero_optimization": 3}', ".json", "table of names and values"),
        ('{"train_batch_size": -4}', ".json", "1 or more"),
        ("[parallelism]\ntensor_parallel_degree = 'x'", ".toml", "whole number"),
        ("!!python/object/apply:os.system [touch x]", ".yaml", "cannot be parsed"),
        ("distributed_type: DEEPSPEED", ".yaml", "its own"),
        ("parallelism: {dp: 1, tp: 1, pp: 1, pp_engine: zigzag}", ".yaml", "1f1b or afab"),
        ("a: &a [x, x]\nb: [" + ", ".join(["*a"] * 200) + "]", ".yaml", "aliases"),
        ("[" * 100_000, ".json", "cannot be parsed"),
        (f"[parallelism]\ntensor_parallel_degree = 0x{'f' * 9000}", ".toml", "cannot be parsed: Exceeds the limit"),
        (f"parallelism: {{dp: 0x{'f' * 9000}, tp: &a [*a]}}", ".yaml", "cannot be parsed: Exceeds the limit"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_said(text, suffix, says, tmp_path):
    path = tmp_path / f"run{suffix}"
    path.write_text(text)
    if says == "its own":
        says = "own configuration"
    with pytest.raises(StackError, match=says):
        read(path)


def test_a_missing_or_huge_file_is_said(tmp_path):
    with pytest.raises(StackError, match="cannot read"):
        parsed(tmp_path / "none.toml")
    (tmp_path / "huge.json").write_text(" " * (5 * 2**20))
    with pytest.raises(StackError, match="at most"):
        parsed(tmp_path / "huge.json")


def test_pins_of_another_size_or_batch_are_refused():
    c = Configuration(dp=2, tp=2, pp=2, micro_batch=1, global_batch=8)
    with pytest.raises(PlanError, match="not for 16"):
        pins_of(c, 16, 8)
    with pytest.raises(PlanError, match="global batch of 8"):
        pins_of(c, 8, 12)
    assert pins_of(replace(c, dp=None, global_batch=None), 16, 12).dp == 4


@pytest.mark.parametrize("name", STACKS)
def test_the_spaces_of_a_software_hold_what_it_can_run_and_no_more(name):
    stack = STACKS[name]
    spaces = list(pins_within(stack, Pins()))
    assert {p.zero for p in spaces} == set(stack.limits.zeros)
    assert len(spaces) == len(set(map(repr, spaces)))
    for p in spaces:
        assert p.recompute in stack.limits.recomputes
        assert stack.limits.schedules or p.pp == 1
        assert stack.limits.sequence or p.tp == 1
        assert p.tp == 1 or p.sequence_parallel in stack.limits.sequence
        assert bool(p.even_stages) == (stack.limits.even and bool(stack.limits.schedules))


def test_pins_that_a_software_does_not_have_are_refused_with_what_it_has():
    with pytest.raises(StackError, match=r"zero=3.*ZeRO stages 0, 1"):
        list(pins_within(STACKS["megatron"], Pins(zero=3)))
    with pytest.raises(StackError, match="schedule=gpipe"):
        list(pins_within(STACKS["megatron"], Pins(schedule="gpipe")))
    assert all(p.tp == 2 for p in pins_within(STACKS["megatron"], Pins(tp=2)))
    with pytest.raises(StackError, match="megatron"):
        stack_of("megatrn")


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_masters_and_sums_in_float32_are_of_low_precision_alone(itemsize):
    for stack in STACKS.values():
        recipe = stack.recipe(itemsize)
        assert isinstance(recipe, Recipe)
        assert (recipe.master_itemsize, recipe.gradient_itemsize) == ((4, 4) if itemsize == 2 else (0, None))


def test_names_in_a_shell_are_quoted():
    c = Configuration(dp=1, said=("$(touch x)\n$(touch y)",))
    text = STACKS["megatron"].text(c)
    assert all(line.startswith("#") for line in text.splitlines() if "touch" in line)
    assert "touch" not in " ".join(shlex.split(text, comments=True))


def test_every_software_is_named_once_and_says_where_its_keys_are_from():
    assert all(stack.name == name and stack.source for name, stack in STACKS.items())
    assert {Path(f"x{s}").suffix for stack in STACKS.values() for s in stack.suffixes} <= {".sh", ".toml", ".json", ".yaml", ".yml"}


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ("--tensor-model-parallel-size 1 --context-parallel-size 2", ".sh"),
        ("[parallelism]\ncontext_parallel_degree = 2", ".toml"),
        ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'ZBVZeroBubble'", ".toml"),
        ("parallelism: {dp: 1, tp: 1, pp: 1, expert_parallel_size: 2}", ".yaml"),
        ('{"distributed_config": {"ep_size": 2}}', ".json"),
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_cp_size: 2}", ".yaml"),
    ],
)
def test_what_no_plan_can_have_is_read_with_what_could_be_priced(text, suffix, tmp_path):
    path = tmp_path / f"run{suffix}"
    path.write_text(text)
    found = read(path)[1]
    assert found.unpriced is not None and "2" not in found.unpriced[1]
