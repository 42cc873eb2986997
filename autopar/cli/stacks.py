"""Plans as other softwares' configurations, and what these cost: --export, --for, --from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.answers import answer, answers_only
from autopar.cli.application import UsageError
from autopar.cli.options import writable
from autopar.files import write_file

if TYPE_CHECKING:
    from autopar.explain import Study
    from autopar.planner import Pins, Plan
    from autopar.stacks import Stack
    from autopar.stacks.today import Planner

__all__ = ["check_stacks", "explain_from", "exported", "planner_of"]


def check_stacks(*names: str | None) -> None:
    """StackError for a software that is not known, before a model is captured."""
    if any(name is not None for name in names):
        from autopar.stacks import stack_of

        for name in filter(None, names):
            stack_of(name)


def exported(plan: Plan, name: str, out: Path | None, as_json: bool, said: dict[str, Any]) -> None:
    """Say or write a plan as a configuration of this software; said: of the plan, for the answer in JSON."""
    from autopar.stacks import configuration_of, stack_of
    from autopar.stacks.stack import beyond

    stack, configuration = stack_of(name), configuration_of(plan)
    text = stack.text(configuration)
    if out is not None:
        write_file(out, text.encode())
    if as_json:
        written = {"written": str(out)} if out is not None else {}
        answer({**said, "export": {"stack": name, "text": text, "cannot_express": list(beyond(configuration, stack)), **written}})
    elif out is not None:
        print(f"written to {out}")
    else:
        print(text, end="")


def explain_from(
    config: Path, target: str, gpus: int | None, *, out: Path | None, as_json: bool, cluster: str, memory: str | None, optimizer: str,
    precision: str, loss: str | None, time_limit: float | None,
) -> None:  # fmt: skip
    """Price what a configuration says, and what would be better."""
    from autopar.cli.studies import open_study
    from autopar.stacks import read
    from autopar.stacks.today import compared, compared_json, compared_text
    from autopar.stopping import stopped_by_user

    writable(out)
    stack, configuration = read(config)
    count = gpus or configuration.gpus
    if count is None:
        raise UsageError(f"{config} does not say how many data-parallel ranks there are: give --gpus N")
    with answers_only(as_json):
        study = open_study(
            target, count, cluster=cluster, memory=memory, loss=loss, time_limit=time_limit,
            optimizer=optimizer if configuration.optimizer is None else configuration.optimizer,
            precision=precision if configuration.precision is None else configuration.precision,
        )  # fmt: skip

        with stopped_by_user() as study.stop:
            found = compared(stack, configuration, count, study.program.batch_size, planner_of(study), study.stop)
    said = compared_json(found)
    if out is not None:
        from autopar.cli.answers import json_line

        write_file(out, f"{json_line(said) if as_json else compared_text(found)}\n".encode())
        said = {"written": str(out)}
    if as_json:
        answer(said)
    else:
        print(f"written to {out}" if out is not None else compared_text(found))


def planner_of(study: Study) -> Planner:
    """Of a model the plans that `stacks.today` compares, or what says why there is none."""
    from autopar.explain import Refused

    def planner(pins: Pins, gpus: int, batch: int | None, software: Stack | None, configured: bool) -> Plan | Callable[[], str]:
        name = None if software is None else software.name
        asked = dataclasses.replace(study.asked, pins=pins, gpus=gpus, batch=batch, stack=name, configured=configured)
        found = study.solve(asked)
        return (lambda: str(found.error)) if isinstance(found, Refused) else found

    return planner
