"""Commands that run or measure on this machine: verify, profile, demo, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.answers import answer, answers_only
from autopar.cli.application import app
from autopar.cli.options import (
    Cluster,
    Gpus,
    Json,
    Loss,
    Memory,
    PinList,
    Target,
    check_device,
    check_gpus,
    loss_of,
    memory_of,
    pins_of,
    writable,
)


@app.command()
def verify(
    target: Target,
    gpus: Gpus,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="verify this plan instead of making one")] = None,
    cluster: Cluster = "cpu",
    memory: Memory = None,
    pin: PinList = None,
    loss: Loss = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="optimizer steps to compare")] = 3,
    loop: Annotated[str | None, typer.Option("--loop", help="file.py:name of train(model) -> numbers; compare what it returns")] = None,
    device: Annotated[str | None, typer.Option("--device", help="of the workers: cuda, whose GPUs they may share, or cpu")] = None,
    as_json: Json = False,
) -> None:
    """Run the plan on local workers in float64 and compare with the single-process model: loss, gradients, parameters, buffers,
    evaluation, other batch sizes, all copies; with --loop what the user's own training loop returns."""
    from autopar.cli.studies import given_plan
    from autopar.report.verification import loop_json, loop_text, verification_json, verification_text
    from autopar.targets import load_target
    from autopar.verify import verify as run_verify
    from autopar.verify_loop import verify_loop

    check_gpus(gpus)
    check_device(device)
    pins, memory_bytes, loss_fn = pins_of(pin), memory_of(memory), loss_of(loss)
    given = given_plan(plan_file, gpus, pin)
    if loop is not None:
        with answers_only(as_json):
            looped = verify_loop(target, loop, gpus, plan=given, pins=pins, loss=loss, cluster=cluster, memory=memory_bytes, device=device)
        if as_json:
            answer(loop_json(looped))
        else:
            print(loop_text(looped, loop))
        if not looped.ok:
            raise typer.Exit(1)
        return
    with answers_only(as_json):
        model, example_inputs = load_target(target)
        report = run_verify(
            model, example_inputs, gpus, plan=given, pins=pins, steps=steps, loss=loss_fn, cluster=cluster, memory=memory_bytes,
            device=device,
        )  # fmt: skip
    if as_json:
        answer(verification_json(report))
    else:
        print(verification_text(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def profile(
    out: Annotated[Path, typer.Option("-o", "--out", help="the cluster file to write")] = Path("cluster.toml"),
    gpus: Annotated[int | None, typer.Option("--gpus", help="workers; default: one for each GPU, without GPUs for each core")] = None,
    cluster: Annotated[str, typer.Option("--cluster", help="what it says holds where nothing can be measured")] = "auto",
    as_json: Json = False,
) -> None:
    """Measure this machine's devices and links (about a minute), and write them as a cluster file for --cluster."""
    from autopar.measure.profile import default_workers, save
    from autopar.measure.profile import profile as measured
    from autopar.planner.resources import choose_cluster
    from autopar.report.profile import print_profile, profile_json, progress

    workers = default_workers() if gpus is None else gpus
    check_gpus(workers)
    writable(out)
    with answers_only(as_json), progress() as say:
        found = measured(choose_cluster(cluster), workers, say=say)
    save(found, out)
    if as_json:
        answer({"written": str(out), **profile_json(found)})
    else:
        print_profile(found)
        print(f"written to {out}")


@app.command()
def demo(
    gpus: Annotated[int, typer.Option("--gpus", help="number of local workers")] = 4,
    steps: Annotated[int, typer.Option("--steps", min=2, help="training steps")] = 20,
    out: Annotated[Path, typer.Option("--out", help="folder for the plan, the emitted module and the curves")] = Path("autopar-demo"),
    pin: PinList = None,
    as_json: Json = False,
) -> None:
    """Plan and train a small GPT-2 on this machine, beside the same model on one process."""
    check_gpus(gpus)
    from autopar.demo import run_demo

    with answers_only(as_json):
        result = run_demo(gpus=gpus, steps=steps, folder=out, pins=pins_of(pin))
    if as_json:
        answer(result.to_json())
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Whether this machine has what autopar needs; exit code 1 if something is missing."""
    from autopar.report.doctor import checks, checks_text

    with answers_only(as_json):
        found = checks()
    failed = [check.name for check in found if check.failed]
    if as_json:
        answer({"ok": not failed, "checks": [{"name": c.name, "state": c.state, "found": c.found} for c in found]})
    else:
        print(checks_text(found))
        print(f"\nmissing: {', '.join(failed)}" if failed else "\nall that is needed is there")
    if failed:
        raise typer.Exit(1)
