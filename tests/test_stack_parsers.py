"""What is written for other training softwares is taken by their own parsers where these are installed, and has the keys that they name."""

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

from autopar.stacks import STACKS, Configuration, read

pytestmark = pytest.mark.pure

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
