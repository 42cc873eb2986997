"""Plans that were made before, kept on disk: the same question is answered without a search.

    key     the captured program with its names and dtypes, GPUs, cluster, memory, optimizer, precision, pins; the versions of torch, the
            solver and Python; autopar's own source, the operators that have rules, the tables of what a plan is made of
    entry   a file KEY.plan: the sha256 of the rest in the first line, then the plan as in any plan file

An entry is read, parsed and validated like any plan file, and checked against the program and its rules; it is never executed. One that
is damaged or does not fit is made anew, which the plan's notes say. Processes that ask the same at the same time plan once: the first
holds a lock, the others wait for it and read what it wrote. Where the folder cannot be used, plans are made and not kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from autopar.axes import AXES
from autopar.capture import program_hash
from autopar.catalog.rule import RULES
from autopar.debug import said
from autopar.errors import PlanError
from autopar.ir import Program
from autopar.planner import Pins, Plan, lower
from autopar.planner.modes import RECOMPUTES
from cost_models.cluster import Cluster
from cost_models.pipeline import SCHEDULES
from cost_models.pools import POOLS
from cost_models.rests import RESTS

fcntl: Any = None  # no such locks: several processes may plan the same, each for itself
with contextlib.suppress(ImportError):
    fcntl = importlib.import_module("fcntl")

__all__ = ["cache_folder", "decisive", "identity", "planned_once"]

OFF = ("", "0", "off", "no", "false")
PACKAGES = ("torch", "highspy", "pulp", "networkx", "numpy", "msgspec")
LOCKS = 256  # files that processes wait at; questions with the same first digits wait for each other


def cache_folder() -> Path | None:
    """$AUTOPAR_CACHE, by default $XDG_CACHE_HOME/autopar/plans or ~/.cache/autopar/plans; None where AUTOPAR_CACHE says off."""
    stated = os.environ.get("AUTOPAR_CACHE")
    if stated is not None:
        return None if stated.strip().lower() in OFF else Path(stated).expanduser() / "plans"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar" / "plans"


def planned_once(
    program: Program, wishes: Mapping[str, object], make: Callable[[], Plan], *, kept: Callable[[Plan], bool] = lambda plan: True
) -> Plan:
    """make(), or what it returned when the same was asked before. wishes: everything beside the program that decides the plan, as data
    whose repr states it. kept: whether a plan is, which one that a clock has cut short is not. Raises what make raises, which is not
    kept."""
    folder = cache_folder()
    if folder is None:
        return make()
    computes = program_hash(program)
    key = _digest(identity(program, computes), repr(sorted(wishes.items())), *versions())
    entry = folder / f"{key}.plan"
    found, reason = _read(entry, program, computes)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        said(1, lambda: f"autopar: the plan is not kept, {folder} cannot be made: {reason}")
        return make()
    with _locked(folder / f"{int(key[:8], 16) % LOCKS:03}.lock"):
        found, reason = _read(entry, program, computes)  # by whoever had the lock before
        if found is not None:
            return found
        made = make()
        if kept(made):
            _write(entry, made)
    if reason:
        return msgspec.structs.replace(made, notes=[*made.notes, f"planned anew: the plan that was kept {reason}"])
    return made


def decisive(
    gpus: int, cluster: Cluster, memory_limit_bytes: int | None, optimizer: str, precision: str, pins: Pins | None,
    reduce_dtype: str | None = None,
) -> dict[str, object]:  # fmt: skip
    """Everything beside the program that decides a plan, as `planned_once` takes it."""
    return {
        "gpus": gpus, "cluster": cluster, "memory_limit_bytes": memory_limit_bytes, "optimizer": optimizer, "precision": precision,
        "pins": pins, "reduce_dtype": reduce_dtype,
    }  # fmt: skip


def identity(program: Program, computes: str = "") -> str:
    """sha256 of all of a captured program that a plan is made from or names: what it computes (`program_hash`), its names, dtypes, blocks
    and where its operators stand in the user's code. computes: its hash, if that is known."""
    own = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
    own |= {name: sorted(value.items()) for name, value in own.items() if isinstance(value, Mapping)}
    return _digest(computes or program_hash(program), repr(own))


def versions() -> tuple[str, ...]:
    """Of all that makes a plan."""
    tables: tuple[Iterable[str], ...] = (RULES, AXES, SCHEDULES, RESTS, RECOMPUTES, POOLS)
    known = _digest(*(name for table in tables for name in (*sorted(table), "")))
    return (platform.python_version(), *map(_version, PACKAGES), _own_source(), known)


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


@functools.cache
def _own_source() -> str:
    """sha256 of autopar's and cost_models' files: a change of either may change any plan, whatever the version says."""
    found = hashlib.sha256()
    root = Path(__file__).parent
    for package in (root, root.parent / "cost_models"):
        for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".toml")):
            found.update(f"{path.relative_to(root.parent)}\0".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------- entries
def _read(entry: Path, program: Program, computes: str) -> tuple[Plan | None, str]:
    """The plan of an entry, or why it is none ('' where there is no entry)."""
    try:
        data = entry.read_bytes()
    except FileNotFoundError:
        return None, ""
    except OSError as e:
        return None, f"cannot be read ({e.strerror or e})"
    checksum, _, text = data.partition(b"\n")
    if checksum.decode(errors="replace") != hashlib.sha256(text).hexdigest():
        return None, "was damaged"
    try:
        plan = Plan.from_json(text, str(entry))
        if plan.program_hash != computes:
            raise PlanError("it is for another program")
        lower(program, plan)
    except PlanError as e:
        return None, f"does not hold any more ({e})"
    said(1, lambda: f"autopar: the plan is {entry}")
    return plan, ""


def _write(entry: Path, plan: Plan) -> None:
    """Whole or not at all, whoever reads or writes at the same time."""
    text = plan.to_json()
    try:
        handle, scratch = tempfile.mkstemp(dir=entry.parent, prefix=f"{entry.stem[:16]}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
            os.replace(scratch, entry)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        said(1, lambda: f"autopar: the plan is not kept in {entry.parent}: {reason}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, no other process is. Where the file system has no locks, there is none."""
    if fcntl is None:
        yield
        return
    try:
        lock = path.open("ab")
    except OSError:
        yield
        return
    with lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
