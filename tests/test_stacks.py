"""Configurations of other training softwares: written, read back, accepted by their own parsers where these are installed."""

import argparse
import importlib.util
import json
import shlex
import sys
import tomllib
import types
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path

import pytest
import yaml
from explain_cases import study_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_programs import captured_of

from autopar.cli.stacks import planner_of
from autopar.errors import Infeasible, PlanError
from autopar.planner import Pins
from autopar.report.explanation import explanation_of
from autopar.stacks import STACKS, Configuration, StackError, configuration_of, pins_of, read, stack_of
from autopar.stacks.files import parsed
from autopar.stacks.stack import beyond, pins_within
from autopar.stacks.today import compared, compared_json, compared_text
from cost_models.recipe import Recipe

pytestmark = pytest.mark.pure

SUFFIX = {name: stack.suffixes[0] for name, stack in STACKS.items()}
# What the softwares' own sources name (their files stand in each stack's `source`).
TORCHTITAN_KEYS = {
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "tensor_parallel_degree",
        "pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size", "module_fqns_per_model_part",
    },
    "training": {"local_batch_size", "global_batch_size", "dtype", "mixed_precision_param"},
    "optimizer": {"name"},
    "activation_checkpoint": {"mode", "selective_ac_option"},
}  # fmt: skip
DEEPSPEED_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", "tensor_parallel",
    "pipeline", "bf16", "fp16", "optimizer", "cannot express",
}  # fmt: skip


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
@settings(max_examples=25, deadline=None)
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


CASES = [
    Configuration(
        dp=8, micro_batch=2, micro_batches=2, global_batch=32, zero=zero, shard=shard, tp=tp, recompute=recompute, precision=precision,
        sequence_parallel=False if tp > 1 else None, optimizer="adamw",
    )
    for zero, shard, tp in ((0, None, 1), (2, None, 1), (3, None, 2), (3, 4, 1))
    for recompute, precision in (("none", "bf16"), ("full", "fp32"))
]  # fmt: skip


@pytest.mark.parametrize("c", CASES, ids=range(len(CASES)))
def test_accelerate_reads_its_yaml(c, tmp_path, monkeypatch):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    from accelerate import ParallelismConfig
    from accelerate.commands.launch import launch_command_parser

    path = tmp_path / "accelerate.yaml"
    path.write_text(STACKS["accelerate"].text(c))
    config = config_args.ClusterConfig.from_yaml_file(str(path))
    assert config.num_processes == c.gpus
    known = {action.dest for action in launch_command_parser()._actions}
    for key in (*config.fsdp_config, *config.parallelism_config):
        assert key in known, key
    if config.parallelism_config:
        sizes = {k.removeprefix("parallelism_config_"): v for k, v in config.parallelism_config.items()}
        made = ParallelismConfig(**sizes)
        assert made.total_size == c.gpus and made.tp_size == c.tp and made.data_parallel_size == c.dp
        assert made.dp_replicate_size == c.copies
    if c.zero:
        assert config.fsdp_config["fsdp_reshard_after_forward"] is (c.zero == 3)


@pytest.mark.parametrize("c", CASES, ids=range(len(CASES)))
def test_transformers_takes_its_fields(c, tmp_path):
    distributed = pytest.importorskip("transformers.distributed")
    from transformers import TrainingArguments

    found = json.loads(STACKS["transformers"].text(c))
    own = found["distributed_config"]
    names = {f.name for f in fields(distributed.DistributedConfig)}
    if "dp_replicate_size" in names:  # transformers before has fewer
        assert set(own) <= names
        made = distributed.DistributedConfig(**own)
        assert made.tp_size == c.tp and (made.dp_size == c.dp if c.zero else True)
    arguments = found["training_arguments"]
    assert set(arguments) <= {f.name for f in fields(TrainingArguments)}


TITAN_CASES = [
    *CASES,
    Configuration(dp=4, tp=2, pp=2, zero=3, micro_batch=1, micro_batches=4, global_batch=16, sequence_parallel=True, precision="bf16",
                  optimizer="adamw", recompute="selective", blocks=(3, 5)),
    Configuration(dp=2, pp=2, zero=2, micro_batch=1, micro_batches=4, global_batch=8, schedule="interleaved", virtual_stages=2,
                  blocks=(2, 2, 2, 2), optimizer="adam"),
]  # fmt: skip


def _without_its_models(name, monkeypatch, reason):
    """A package whose parser is imported alone: its __init__ imports kernels and models, which need what is not on every machine."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(reason)
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, name, package)


@pytest.mark.parametrize("c", TITAN_CASES, ids=range(len(TITAN_CASES)))
def test_torchtitan_parses_its_toml(c, tmp_path, monkeypatch):
    """torchtitan's own ConfigManager; without it the documented keys are checked (test_keys_are_those_that_the_softwares_name)."""
    reason = "torchtitan 0.2, which reads TOML, is not installed (make stacks): its documented keys are checked instead"
    _without_its_models("torchtitan", monkeypatch, reason)
    pytest.importorskip("torchtitan.config.job_config", reason=reason)
    manager = pytest.importorskip("torchtitan.config.manager", reason=reason)
    path = tmp_path / "run.toml"
    path.write_text(STACKS["torchtitan"].text(c))
    found = manager.ConfigManager().parse_args(["--job.config_file", str(path)])
    own = found.parallelism
    assert own.data_parallel_replicate_degree * own.data_parallel_shard_degree == c.dp
    assert (own.tensor_parallel_degree, own.pipeline_parallel_degree) == (c.tp, c.pp)
    assert found.training.global_batch_size == c.global_batch
    assert found.activation_checkpoint.mode == c.recompute
    if c.blocks:
        assert [sum(n.startswith("layers.") for n in part) for part in own.module_fqns_per_model_part] == list(c.blocks)
        assert found.training.local_batch_size == c.micro_batch * c.micro_batches
        assert found.training.local_batch_size % own.pipeline_parallel_microbatch_size == 0


@pytest.mark.parametrize("c", TITAN_CASES, ids=range(len(TITAN_CASES)))
def test_torchtitan_takes_the_arguments_that_its_toml_names(c, tmp_path, monkeypatch):
    """Of 0.3, which has no file: they read back as the same, and tyro parses them into its dataclasses where it is installed."""
    text = STACKS["torchtitan"].text(c)
    (line,) = [line for line in text.splitlines() if "reads no file but arguments" in line]
    script = tmp_path / "run.sh"
    script.write_text("torchrun -m torchtitan.train --module llama3 --config llama3_8b " + line.partition("arguments: ")[2])
    (tmp_path / "run.toml").write_text(text)
    stack, found = read(script)
    assert stack is STACKS["torchtitan"]
    same = ("dp", "tp", "pp", "zero", "shard", "global_batch", "micro_batch", "schedule", "virtual_stages", "blocks", "sequence_parallel")
    assert [getattr(found, n) for n in same] == [getattr(read(tmp_path / "run.toml")[1], n) for n in same]
    _without_its_models("torchtitan", monkeypatch, "torchtitan 0.3 is not installed: its arguments are read back alone")
    configs = pytest.importorskip("torchtitan.config.configs", reason="torchtitan 0.3 is not installed: its arguments are read back alone")
    tyro = pytest.importorskip("tyro", reason="tyro, which torchtitan parses with, is not installed")
    manager = pytest.importorskip("torchtitan.config.manager", reason="torchtitan 0.3 is not installed as a whole")
    manager.ConfigManager.register_tyro_rules(manager.custom_registry)
    kinds = {"parallelism": configs.ParallelismConfig, "training": configs.TrainingConfig}
    made = make_dataclass("Config", [(name, kind, field(default_factory=kind)) for name, kind in kinds.items()])
    parsed_as = tyro.cli(made, args=shlex.split(line.partition("arguments: ")[2]), registry=manager.custom_registry)
    assert parsed_as.parallelism.tensor_parallel_degree == c.tp and parsed_as.training.global_batch_size == c.global_batch


DEEPSPEED_CASES = [
    Configuration(dp=8, tp=tp, pp=pp, micro_batch=2, micro_batches=2, global_batch=32, zero=zero, precision=precision, optimizer="adamw",
                  sequence_parallel=False if tp > 1 else None, recompute="full")
    for zero, tp, pp in ((0, 1, 1), (1, 1, 2), (2, 2, 1), (3, 1, 1)) for precision in ("bf16", "fp16", "fp32")
]  # fmt: skip


@pytest.mark.parametrize("c", DEEPSPEED_CASES, ids=range(len(DEEPSPEED_CASES)))
def test_deepspeed_takes_its_json(c, tmp_path, monkeypatch):
    """DeepSpeed's own config class, as deepspeed.initialize makes it on one of these ranks."""
    config = pytest.importorskip(
        "deepspeed.runtime.config", reason="deepspeed is not installed (make stacks): its documented keys are checked instead"
    )
    monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
    path = tmp_path / "ds.json"
    path.write_text(STACKS["deepspeed"].text(c))

    class Mpu:
        @staticmethod
        def get_data_parallel_world_size():
            return c.dp

    found = config.DeepSpeedConfig(json.loads(path.read_text()), mpu=Mpu)  # given a path, it leaves the file open
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == (32, 2, 2)
    assert int(found.zero_optimization_stage) == c.zero
    assert found.tensor_parallel_config.autotp_size == (c.tp if c.tp > 1 else 0)
    assert (found.bfloat16_config.enabled, found.float16_config.enabled) == (c.precision == "bf16", c.precision == "fp16")
    assert found.pipeline["stages"] == (c.pp if c.pp > 1 else "auto")
    unknown = dict(json.loads(path.read_text()), zero_optimization={"stage": 1, "banana": 1})
    with pytest.raises(ValueError, match="banana"):  # so that a key that is not theirs would be seen
        config.DeepSpeedConfig(unknown, mpu=Mpu)


MEGATRON_CASES = [
    Configuration(dp=4, tp=2, pp=2, micro_batch=1, micro_batches=4, global_batch=16, zero=1, sequence_parallel=True, precision="bf16",
                  optimizer="adamw", recompute=recompute, recomputed=some, blocks=(4, 4))
    for recompute, some in (("none", None), ("full", None), ("full", 2))
] + [
    Configuration(dp=2, tp=2, pp=2, micro_batch=1, micro_batches=4, global_batch=8, zero=0, sequence_parallel=False, precision="fp16",
                  schedule="interleaved", virtual_stages=2, blocks=(2, 2, 2, 2), optimizer="sgd"),
]  # fmt: skip
# As Megatron's own parser has them at commit d98e8a64 (August 2026), some in arguments.py, the others fields of TransformerConfig,
# ModelParallelConfig and TrainingConfig; it parsed what is written for these cases.
MEGATRON_KEYS = {
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size", "--global-batch-size", "--sequence-parallel",
    "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--num-distributed-optimizer-instances",
    "--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank", "--bf16", "--fp16", "--optimizer",
}  # fmt: skip


@pytest.mark.parametrize("c", MEGATRON_CASES, ids=range(len(MEGATRON_CASES)))
def test_megatron_parses_its_arguments(c):
    words = shlex.split(STACKS["megatron"].text(c).partition("AUTOPAR_ARGS=(")[2].rpartition(")")[0], comments=True)
    assert {word for word in words if word.startswith("--")} <= MEGATRON_KEYS
    arguments = pytest.importorskip("megatron.training.arguments", reason="Megatron-LM is no package: its documented names are checked")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found, unknown = parser.parse_known_args(words)
    assert not unknown
    assert (found.tensor_model_parallel_size, found.pipeline_model_parallel_size) == (c.tp, c.pp)
    assert (found.micro_batch_size, found.global_batch_size, found.sequence_parallel) == (1, c.global_batch, bool(c.sequence_parallel))
    assert found.use_distributed_optimizer == bool(c.zero)
    assert found.recompute_granularity == {"none": None, "full": "full"}[c.recompute]


# Fields of ParallelismArgs, TokensArgs, OptimizerArgs and ModelArgs in nanotron/config at commit 2411b022 (April 2026).
NANOTRON_KEYS = {
    "parallelism": {
        "dp", "pp", "tp", "pp_engine", "tp_mode", "tp_linear_async_communication", "recompute_layer", "moe_layer_recompute",
        "tp_recompute_allgather", "expert_parallel_size", "context_parallel_size",
    },
    "tokens": {"micro_batch_size", "batch_accumulation_per_replica"}, "optimizer": {"zero_stage", "accumulate_grad_in_fp32"},
    "model": {"dtype"},
}  # fmt: skip
FOUNDRY_KEYS = {"fsdp_config", "global_train_batch_size", "device_train_microbatch_size", "precision"}


def test_nanotron_and_composer_have_these_keys(monkeypatch):
    for c in CASES:
        nano = yaml.safe_load(STACKS["nanotron"].text(replace(c, zero=min(c.zero, 1), shard=None)))
        assert all(set(own) <= NANOTRON_KEYS[name] for name, own in nano.items())
        assert nano["parallelism"]["tp_mode"] in ("ALL_REDUCE", "REDUCE_SCATTER")
        assert nano["parallelism"]["pp_engine"] in ("1f1b", "afab")
        own = yaml.safe_load(STACKS["composer"].text(c))
        assert set(own) <= FOUNDRY_KEYS
    spec = importlib.util.find_spec("composer")
    if spec is None:
        pytest.skip("Composer is not installed: its documented keys are checked")
    alone = importlib.util.spec_from_file_location("composer_parallelism", Path(spec.origin).parent / "utils" / "parallelism.py")
    parallelism = importlib.util.module_from_spec(alone)
    monkeypatch.setitem(sys.modules, alone.name, parallelism)
    alone.loader.exec_module(parallelism)
    known = {f.name for f in fields(parallelism.FSDPConfig)}
    assert all(set(yaml.safe_load(STACKS["composer"].text(c))["fsdp_config"]) <= known for c in CASES)


# The rest of a nanotron run, beside what is exported.
NANOTRON_RUN = {
    "general": {"project": "p", "run": "r", "ignore_sanity_checks": True},
    "model": {
        "init_method": {"std": 0.02},
        "model_config": {"is_llama_config": True, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128},
    },
    "tokenizer": {"tokenizer_name_or_path": "none"},
    "optimizer": {
        "weight_decay": 0.0, "clip_grad": 1.0, "learning_rate_scheduler": {"learning_rate": 1e-4, "lr_warmup_style": "linear"},
        "optimizer_factory": {
            "name": "adamW", "adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95, "torch_adam_is_fused": True,
        },
    },
    "tokens": {"sequence_length": 32, "train_steps": 4, "micro_batch_size": 1},
}  # fmt: skip
NANOTRON_CASES = [
    *(replace(c, zero=min(c.zero, 1), shard=None) for c in CASES),
    *(
        Configuration(dp=2, tp=2, pp=2, zero=zero, micro_batch=1, micro_batches=4, global_batch=8, schedule=schedule,
                      sequence_parallel=sequence, precision="bf16", optimizer="adamw", recompute=recompute)
        for zero, schedule, sequence, recompute in ((0, "1f1b", False, "none"), (1, "gpipe", True, "full"))
    ),
]  # fmt: skip


@pytest.mark.parametrize("c", NANOTRON_CASES, ids=range(len(NANOTRON_CASES)))
def test_nanotron_parses_its_yaml(c):
    """nanotron's own strict parser, of its repository: the package 0.4 cannot be imported, since its modules import one another in a
    circle."""
    reason = "nanotron is not there from its repository: its documented keys are checked instead"
    config = pytest.importorskip("nanotron.config", reason=reason, exc_type=ImportError)
    own = yaml.safe_load(STACKS["nanotron"].text(c))
    merged = {name: {**NANOTRON_RUN.get(name, {}), **own.get(name, {})} for name in {**NANOTRON_RUN, **own}}
    found = config.get_config_from_dict(merged)
    assert (found.parallelism.dp, found.parallelism.tp, found.parallelism.pp) == (c.dp, c.tp, c.pp)
    assert found.parallelism.tp_mode.name == ("REDUCE_SCATTER" if c.sequence_parallel else "ALL_REDUCE")
    engine = "AllForwardAllBackwardPipelineEngine" if c.schedule == "gpipe" else "OneForwardOneBackwardPipelineEngine"
    assert type(found.parallelism.pp_engine).__name__ == engine
    assert found.parallelism.recompute_layer == (c.recompute != "none")
    assert found.optimizer.zero_stage == c.zero
    assert (found.tokens.micro_batch_size, found.tokens.batch_accumulation_per_replica) == (c.micro_batch, c.micro_batches)
    assert str(found.model.dtype) == f"torch.{'bfloat16' if c.precision == 'bf16' else 'float32'}"


@pytest.mark.parametrize("c", [*CASES, Configuration(dp=2, tp=2, pp=2, zero=2, micro_batch=1, micro_batches=4, sequence_parallel=True)])
def test_keys_are_those_that_the_softwares_name(c):
    table = tomllib.loads(STACKS["torchtitan"].text(c))
    assert all(set(found) <= TORCHTITAN_KEYS[name] for name, found in table.items())
    found = json.loads(STACKS["deepspeed"].text(c))
    assert set(found) <= DEEPSPEED_KEYS
    if c.global_batch:
        assert found["train_batch_size"] == found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * c.dp
    nano = yaml.safe_load(STACKS["nanotron"].text(c))
    assert nano["parallelism"]["dp"] * nano["parallelism"]["tp"] * nano["parallelism"]["pp"] == c.gpus


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


# ------------------------------------------------------------------------------------------------ refusals and their remedies
def study(gpus=4, memory=None, **asked):
    return study_of(captured_of("deep")[0].program, gpus, memory_limit_bytes=memory, **asked)


def needs(plan):
    """Bytes that a GPU must have for a plan."""
    return max(stage.memory.upper_bytes for stage in plan.stages)


@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("megatron", {"zero": 3}), ("megatron", {"schedule": "gpipe", "zero": 2}), ("composer", {"tp": 2}), ("accelerate", {"pp": 2}),
        ("deepspeed", {"pp": 2, "zero": 3}), ("deepspeed", {"recompute": "selective"}),
        ("torchtitan", {"tp": 2, "sequence_parallel": False}),
    ],
)  # fmt: skip
def test_a_pin_that_a_software_does_not_have_is_refused_with_one_that_does(name, pins):
    """Each remedy that is said is planned here, by the same software."""
    found = study(pins=Pins(**pins), stack=name)
    with pytest.raises(Infeasible, match="cannot run a plan with the pins|no mesh|no plan fits") as refused:
        _ = found.plan
    (said,) = [line for line in str(refused.value).splitlines() if line.startswith("Tried, and each would do: ")]
    *changes, elsewhere = said.partition(": ")[2].removesuffix(".").split("; ")
    assert changes and elsewhere.startswith("autopar itself")
    for change in changes:
        own = dict(pins)
        for part in change.split(" with "):
            pin, equals, value = part.removesuffix(" not pinned").partition("=")
            assert pin in pins
            own.pop(pin)
            own |= {pin: {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)} if equals else {}
        plan = study(pins=Pins(**own), stack=name).plan
        assert not beyond(configuration_of(plan), STACKS[name])
    names = {stack.title: key for key, stack in STACKS.items()} | {"autopar itself": None}
    for title in elsewhere.removesuffix(" in its place").split(", "):
        assert study(pins=Pins(**pins), stack=names[title]).plan.gpus == 4


def test_a_leaner_pin_is_one_that_the_software_has():
    """Megatron-LM has ZeRO-1 and no ZeRO-3, which would be leaner."""
    asked = {"pins": Pins(dp=4, zero=0), "stack": "megatron"}
    leanest = needs(study(**{**asked, "pins": Pins(dp=4, zero=1, recompute="full", micro_batch=1)}).plan)
    assert leanest < needs(study(**{**asked, "pins": Pins(dp=4, zero=0, recompute="full", micro_batch=1)}).plan)
    with pytest.raises(Infeasible, match="zero=1") as refused:
        _ = study(memory=leanest, **asked).plan
    assert "zero=3" not in str(refused.value)


CONFIGURED = Configuration(dp=4, micro_batch=3, micro_batches=1, global_batch=12, zero=0, precision="bf16", optimizer="adamw")


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "deepspeed", "accelerate"])
def test_a_configuration_that_does_not_fit_has_changes_that_do(name):
    """What is said of each change is what the planner says of it, and none needs more than there is."""
    stack, ample = STACKS[name], study()
    leanest = replace(CONFIGURED, micro_batch=1, micro_batches=3, zero=max(stack.limits.zeros), recompute="full")
    limit = needs(planner_of(ample)(pins_of(leanest, 4, 12), 4, 12, stack, True)) + 1024
    found = compared(stack, CONFIGURED, 4, 12, planner_of(study(memory=limit)))
    assert isinstance(found.today, str) and "GiB a GPU" in found.today or "MiB a GPU" in found.today
    assert found.remedies
    for remedy in found.remedies:
        assert needs(remedy.plan) <= limit and not beyond(configuration_of(remedy.plan), stack)
        assert remedy.plan.global_batch == 12
    text = compared_text(found)
    assert all(remedy.change.partition(" (")[0] in " ".join(text.split()) for remedy in found.remedies)
    assert [x["change"] for x in compared_json(found)["remedies"]] == [x.change for x in found.remedies]


def test_a_configuration_of_another_size_or_batch_is_refused_with_what_was_priced():
    priced = planner_of(study())
    with pytest.raises(PlanError, match="not for 4") as refused:
        compared(STACKS["megatron"], replace(CONFIGURED, dp=2, micro_batch=3, micro_batches=2), 4, 12, priced)
    assert "--gpus 2: " in str(refused.value) and "data parallel ranks 2 -> 4" in str(refused.value)
    with pytest.raises(PlanError, match="global batch of 24") as refused:
        compared(STACKS["megatron"], replace(CONFIGURED, global_batch=24, micro_batches=None), 4, 12, priced)
    assert "a global batch of 12 samples in the configuration: " in str(refused.value)
    with pytest.raises(StackError, match="cannot be priced yet") as refused:
        compared(STACKS["megatron"], replace(CONFIGURED, unpriced=("context parallelism", "--context-parallel-size 1")), 4, 12, priced)
    assert "--context-parallel-size 1: " in str(refused.value)


def test_a_configuration_of_another_size_that_does_not_fit_either_has_both_changes():
    stack, wrong = STACKS["megatron"], replace(CONFIGURED, dp=2, micro_batch=6)
    leanest = replace(wrong, micro_batch=1, micro_batches=6, zero=1, recompute="full")
    limit = needs(planner_of(study())(pins_of(leanest, 2, 12), 2, 12, stack, True)) + 1024
    with pytest.raises(PlanError, match="not for 4") as refused:
        compared(stack, wrong, 4, 12, planner_of(study(memory=limit)))
    assert "--gpus 2, and " in str(refused.value) or "4 GPUs" in str(refused.value) or "2 -> 4" in str(refused.value)


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


def test_a_plan_says_for_which_software_it_is_and_pins_of_the_user_alone():
    """Two softwares with the same limits have plans of their own, also where one was kept."""
    for name in ("accelerate", "transformers", "accelerate"):
        plan = study(pins=Pins(dp=4), stack=name).plan
        said = {choice.name: choice.value for choice in explanation_of(plan).choices}
        assert (plan.software, said["pinned"], said["for"].partition(",")[0]) == (name, "dp=4", STACKS[name].title)
    assert "for" not in {choice.name for choice in explanation_of(study().plan).choices}
