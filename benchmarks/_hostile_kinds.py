"""What a generated bad input is given to, by kind: the command line, or the function that reads it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import _hostile_inputs as inputs

__all__ = ["KINDS", "Given", "expected"]

Prepared = tuple[object, Callable[[], None]]  # what is shown of an input, and what it is given to

GOOD = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(self.a(x).relu()).square().mean()


def build():
    return Net(), (torch.randn(8, 4),)
"""


class Given:
    """What is right, in a folder: a model and its plans, a run, checkpoints, cluster files, configurations."""

    def __init__(self, folder: Path) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        import autopar
        from autopar.capture import capture
        from autopar.explain import Asked, Study
        from autopar.planner import Pins
        from autopar.stacks import STACKS, configuration_of
        from autopar.targets import load_target
        from cost_models.cluster import CATALOGUE, load_cluster
        from cost_models.write import cluster_toml

        self.folder = folder
        self.target = f"{folder}/good.py:build"
        (folder / "good.py").write_text(GOOD)
        self.model, batch = load_target(self.target)
        self.captured = capture(self.model, batch)
        plans = [
            autopar.plan(self.model, 2, example_inputs=batch, cluster="cpu", pins=pins)
            for pins in ({"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "micro_batches": 2})
        ]
        self.plans = [json.loads(plan.to_json()) for plan in plans]
        plans[-1].save(folder / "plan.json")
        self.run = _run_of(plans[-1])
        (folder / "run.json").write_text(json.dumps(self.run))
        self.plan = plans[-1]
        asked = Asked(gpus=2, cluster=load_cluster("cpu"), optimizer="adamw", precision="fp32", pins=Pins(), batch=8)
        self.study = Study(program=self.captured.program, asked=asked)
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(*batch).backward()
        optimizer.step()
        autopar.save(folder / "checkpoint", self.model, optimizer, step=3, text="x", rng=torch.get_rng_state())
        dcp.save({"model": self.model.state_dict(), "step": 3}, checkpoint_id=folder / "foreign", no_dist=True)
        self.clusters = [path.read_text() for path in sorted((CATALOGUE / "clusters").glob("*.toml"))]
        self.clusters += [cluster_toml(load_cluster(name)) for name in ("cpu", "dgx-h100", "p3.16xlarge")] * 3  # all in one text
        self.configurations: list[tuple[str, str]] = []
        for stack in STACKS.values():
            texts = dict.fromkeys(stack.text(configuration_of(plan)) for plan in plans)
            self.configurations += [(text, stack.suffixes[0]) for text in texts]
            (folder / f"{stack.name}{stack.suffixes[0]}").write_text(next(iter(texts)))

    @property
    def files(self) -> list[str]:
        return [str(path) for path in sorted(self.folder.iterdir()) if path.is_file()]


def _run_of(plan: Any) -> dict[str, Any]:
    """A run as `profile(...).save` writes it."""
    passes = {name: {"count": plan.micro_batches, "seconds": 1e-3} for name in ("forward", "backward")}
    collectives = {"send": {"count": 2, "seconds": 1e-4}}
    ranks = [{"rank": r, "step_s": 4e-3, "passes": passes, "collectives": collectives, "memory_bytes": 2**20} for r in range(plan.gpus)]
    return {
        "program_hash": plan.program_hash, "mesh": plan.mesh, "micro_batches": plan.micro_batches, "schedule": plan.schedule,
        "device": "cpu", "steps_s": [3e-3, 4e-3], "ranks": ranks, "format": "autopar-run", "version": 1,
    }  # fmt: skip


def _command(given: Given, draw: random.Random, out: Path) -> Prepared:
    from autopar import cli

    source = out / "model.py"
    source.write_text(inputs.target_source(draw), errors="replace")
    folder, target, good, on = str(given.folder), f"{source}:build", given.target, ["--gpus", "2", "--cluster", "cpu"]
    plan, run = f"{folder}/plan.json", f"{folder}/run.json"
    quick = ["--no-alternatives"]
    valid: dict[str, list[list[str]]] = {
        "plan": [[target, *on], [good, *on], [good, *on, "--export", "torchtitan"], [good, *on, "--for", "megatron"]],
        "explain": [
            [plan], [plan, "--measured", run], [good, *on, *quick], [good, *on, "--plan", plan, "--why", "a"],
            [good, *on, "--why-not", inputs.pins(draw)], [good, *on, "--what-if", *inputs.changes(draw)],
            [good, "--cluster", "cpu", "--from", draw.choice(given.files)],
        ],
        "sweep": [[good, "--gpus", "1,2", "--cluster", "cpu"]], "fit": [[good, "--cluster", "cpu"]],
        "verify": [[target]], "diff": [[plan, plan]], "export": [[f"{folder}/checkpoint", "-o", str(out / "m.safetensors")]],
        "import": [[f"{folder}/checkpoint", "-o", str(out / "c")]], "profile": [[]], "demo": [[]], "doctor": [[]],
    }  # fmt: skip
    arguments = inputs.command(draw, valid, [target, good, f"{source}:none", "math:pi", "math:sqrt"], given.files)
    for k, option in enumerate(arguments[:-1]):
        if option in ("-o", "--out"):  # what is named is written
            arguments[k + 1] = inputs.confined(arguments[k + 1], str(out))
    os.chdir(out)

    def do() -> None:
        stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
        code: object = 0
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                cli.main(arguments)
            except SystemExit as stop:
                code = stop.code
            stdout.flush()
        if code not in (0, 1, 2, 3, 4, None):
            raise AssertionError(f"exit code {code!r}")
        stderr.seek(0)
        said = stderr.read()
        if code not in (0, None) and not said.strip():
            raise AssertionError(f"exit code {code} and not a word")
        if code not in (0, None):
            raise _Said(said)

    return arguments, do


def _cluster(given: Given, draw: random.Random, out: Path) -> Prepared:
    from autopar.compiler import plan_of

    data = inputs.mutated_toml(draw, draw.choice(given.clusters))
    path = out / "cluster.toml"
    path.write_bytes(data)
    return data, lambda: _ignored(plan_of(given.captured, 2, cluster=str(path)))


def _plan(given: Given, draw: random.Random, out: Path) -> Prepared:
    from autopar.compiler import emit
    from autopar.planner import Plan
    from autopar.report.diff import diff_text, differences
    from autopar.report.explanation import explanation_of
    from autopar.report.page import page_of, svg_of
    from autopar.report.perfetto import perfetto_trace
    from autopar.report.text import document, explanation_text, plan_json, plan_text
    from autopar.stacks import STACKS, configuration_of

    data = inputs.mutated_json(draw, draw.choice(given.plans))
    path = out / "plan.json"
    path.write_bytes(data)
    drawn = draw.random() < 0.2

    def do() -> None:
        plan = Plan.load(path)
        plan_text(plan)
        diff_text(list(differences(plan_json(plan), plan_json(plan))), ("a", "b"))
        explanation = explanation_of(plan)
        explanation_text(explanation)
        msgspec.json.encode(document(plan, explanation))
        configuration = configuration_of(plan)
        for stack in STACKS.values():
            stack.text(configuration)
        perfetto_trace(plan)
        if drawn:
            svg_of(plan)
            page_of(plan, explanation)
        plan.save(path)
        emit(given.captured, plan)

    return data, do


def _target(given: Given, draw: random.Random, out: Path) -> Prepared:
    from autopar.targets import load_target

    source = inputs.target_source(draw)
    path = out / "model.py"
    path.write_text(source, errors="replace")
    place = draw.choice((str(path), str(path), str(path), inputs.name(draw), "model", draw.choice(inputs.TEXTS)))
    target = f"{place}:{draw.choice(('build', 'build', 'build', 'M', 'none', draw.choice(inputs.TEXTS)))}"
    os.chdir(out)
    return target, lambda: _ignored(load_target(target))


def _name(given: Given, draw: random.Random, out: Path) -> Prepared:
    import autopar
    from autopar.checkpoint.exchange import export_model, import_model
    from autopar.planner import Plan

    text = inputs.confined(inputs.name(draw), str(out)).lstrip("/")
    where = f"{out}/{text}"
    checkpoint = given.folder / "checkpoint"
    plan = Plan.load(given.folder / "plan.json")
    how: dict[str, Callable[[], Any]] = {
        "load a plan": lambda: Plan.load(where), "save a plan": lambda: plan.save(where),
        "save": lambda: autopar.save(where, given.model), "load": lambda: autopar.load(where, given.model),
        "export to": lambda: export_model(checkpoint, where), "export of": lambda: export_model(where, out / "m.safetensors"),
        "import of": lambda: import_model(where, out / "c"), "import to": lambda: import_model(out / "none.safetensors", where),
    }  # fmt: skip
    which = draw.choice(list(how))
    return (which, text), lambda: _ignored(how[which]())


def _environment(given: Given, draw: random.Random, out: Path) -> Prepared:
    import autopar
    from autopar.debug import said
    from autopar.plan_cache import cache_folder
    from autopar.run.deferred import world_size
    from autopar.run.watchdog import timeout_s

    variables = inputs.environment(draw)
    os.chdir(out)

    def do() -> None:
        os.environ.update(variables)
        said(5, lambda: "")
        timeout_s()
        cache_folder()
        world_size()
        if draw.random() < 0.1:
            autopar.compile(given.model, 2)

    return variables, do


def _checkpoint(given: Given, draw: random.Random, out: Path) -> Prepared:
    import torch

    import autopar
    from autopar.checkpoint.exchange import export_model

    folder = out / "checkpoint"
    shutil.copytree(given.folder / "checkpoint", folder)
    if draw.random() < 0.25:
        return _foreign(given, draw, folder)
    index, *others = (folder / "checkpoint.json", *folder.glob("data-*"))
    how = draw.randrange(6)
    if how < 3:
        index.write_bytes(inputs.mutated_json(draw, json.loads(index.read_text())))
    elif how == 3:
        index.write_bytes(inputs.mutated_bytes(draw, index.read_bytes()))
    elif how == 4:
        others[0].write_bytes(inputs.mutated_bytes(draw, others[0].read_bytes()))
    else:
        index.unlink()
        (folder / ".metadata").write_bytes(inputs.mutated_bytes(draw, pickle.dumps(_Pickled())))
    model = type(given.model)()
    optimizer = torch.optim.AdamW(model.parameters()) if draw.random() < 0.5 else None

    def do() -> None:
        if draw.random() < 0.3:
            export_model(folder, out / "m.safetensors")
        else:
            autopar.load(folder, model, optimizer)

    return how, do


def _foreign(given: Given, draw: random.Random, folder: Path) -> Prepared:
    """A checkpoint of torch.distributed.checkpoint."""
    import autopar

    shutil.rmtree(folder)
    shutil.copytree(given.folder / "foreign", folder)
    path = draw.choice(inputs.valid_files(folder))
    path.write_bytes(inputs.mutated_bytes(draw, path.read_bytes()))
    model = type(given.model)()
    return path.name, lambda: _ignored(autopar.load(folder, model))


def _question(given: Given, draw: random.Random, out: Path) -> Prepared:
    """--why, --why-not, --what-if, sweep and fit, of a model that is captured already."""
    from autopar.cli.options import memory_of
    from autopar.cli.sweeping import numbers_of
    from autopar.explain.asking import answer_text, what_if, why_not
    from autopar.explain.fit import fit, fit_text
    from autopar.explain.sweep import sweep
    from autopar.explain.why import why, why_text
    from autopar.planner.resources import choose_cluster
    from autopar.report.sweep import sweep_text

    study, which = given.study, draw.choice(("why", "why not", "what if", "what if", "sweep", "fit"))
    text: Any = inputs.module(draw) if which == "why" else inputs.pins(draw) if which == "why not" else inputs.changes(draw)
    if which in ("sweep", "fit"):
        memory = draw.choice((None, *inputs.MEMORIES))
        text = (draw.choice(("1,2,4", inputs.numbers(draw))), memory, draw.choice(("cpu", "dgx-h100", draw.choice(inputs.TEXTS))))

    def do() -> None:
        if which == "why":
            why_text(why(study, text))
        elif which == "why not":
            answer_text(why_not(study, text), text)
        elif which == "what if":
            answer_text(what_if(study, text), "then")
        else:
            counts, limit, cluster = numbers_of("--gpus", text[0]), memory_of(text[1]), choose_cluster(text[2])
            if which == "sweep":
                sweep_text(sweep(study, counts, [limit], [cluster], [None]))
            else:
                fit_text(fit(study, counts[0])[0])

    return (which, text), do


def _configuration(given: Given, draw: random.Random, out: Path) -> Prepared:
    """A configuration of another software, read, priced, written again."""
    from autopar.cli.stacks import planner_of
    from autopar.explain import Study
    from autopar.planner.wishes import check_name
    from autopar.stacks import read
    from autopar.stacks.today import compared, compared_json, compared_text
    from cost_models.memory import OPTIMIZERS

    text, suffix = draw.choice(given.configurations)
    data = inputs.configuration(draw, text, suffix)
    path = out / f"config{draw.choice((suffix,) * 9 + ('.sh', '.json', '.toml', '.yaml', ''))}"
    path.write_bytes(data)
    priced = draw.random() < 0.3

    def do() -> None:
        stack, configuration = read(path)
        stack.text(configuration)
        if not priced:
            return
        asked = dataclasses.replace(
            given.study.asked, optimizer=configuration.optimizer or "adamw", precision=configuration.precision or "fp32"
        )  # fmt: skip
        check_name("optimizer", asked.optimizer, OPTIMIZERS)  # as the command does
        study = Study(program=given.study.program, asked=asked)
        found = compared(stack, configuration, configuration.gpus or 2, study.program.batch_size, planner_of(study))
        compared_text(found)
        compared_json(found)

    return data, do


def _run(given: Given, draw: random.Random, out: Path) -> Prepared:
    """A recorded run, beside its plan."""
    from autopar.measured import Run, compared, compared_json, compared_text

    data = inputs.mutated_json(draw, given.run)
    path = out / "run.json"
    path.write_bytes(data)

    def do() -> None:
        found = compared(given.plan, Run.load(path))
        compared_text(found)
        compared_json(found)

    return data, do


KINDS: dict[str, Callable[[Given, random.Random, Path], Prepared]] = {
    "command": _command, "cluster": _cluster, "plan": _plan, "target": _target, "name": _name, "environment": _environment,
    "checkpoint": _checkpoint, "question": _question, "configuration": _configuration, "run": _run,
}  # fmt: skip


class _Said(Exception):
    """A command has ended with a code for an error, and said why."""


class _Pickled:
    """Runs a program where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def expected() -> tuple[type[BaseException], ...]:
    """What autopar raises on purpose."""
    from autopar.errors import AutoparError
    from cost_models.cluster import HardwareFileError, UnknownHardware

    return (AutoparError, HardwareFileError, UnknownHardware, _Said)


def _ignored(_: object) -> None:
    """What was returned is looked at by nobody."""
