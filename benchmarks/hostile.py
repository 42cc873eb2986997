"""Generated bad inputs: command lines, cluster files, plan files, targets, names, environments, checkpoints. Counts what comes of them.

Each input is drawn from a seed of its own (--only N runs one again), by mutating a valid input or from lists of what people and attackers
type, and is given to the command line or to the function that reads it, in this process. What may come of it is a result or an error that
autopar raises on purpose. Anything else is counted: a traceback, a hang (more than a minute of CPU time, or ten minutes of any), a crash of
the process, a program or connection that was started, a file that was written outside of where the output was to go.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import _hostile_inputs as inputs

__all__ = ["main"]

CPU_S, WALL_S = 60, 600
KINDS = ("command", "cluster", "plan", "target", "name", "environment", "checkpoint")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks hostile")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="one JSON line for each input that was answered badly")
    parser.add_argument("--only", type=int, help="the number of one input, which is shown")
    options = parser.parse_args(argv)
    numbers = range(options.inputs) if options.only is None else range(options.only, options.only + 1)
    home = Path(tempfile.mkdtemp(prefix="autopar-hostile-"))
    found: list[dict[str, Any]] = []
    try:
        at = numbers.start
        while at < numbers.stop:  # in processes of their own, since an input may end one
            report = home / "report"
            report.write_bytes(b"")
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    _Runner(home, options.seed, report).run(range(at, numbers.stop))
                    code = 0
                finally:
                    if code:
                        traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(code)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            lines = [json.loads(line) for line in report.read_text().splitlines()]
            if status == 1 and not lines:
                raise RuntimeError("the inputs could not be prepared")
            found += lines
            at += len(lines)
            if status and at < numbers.stop:
                found.append({"number": at, "kind": "?", "came": "crash", "text": f"the process ended with {status}"})
                at += 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return _told(found, options.results, show=options.only is not None)


def _told(found: list[dict[str, Any]], results: Path | None, *, show: bool) -> int:
    bad = [one for one in found if one["came"] not in ("result", "error")]
    if results is not None:
        results.write_text("".join(json.dumps(one) + "\n" for one in bad))
    for one in found if show else bad[:20]:
        print(json.dumps(one, indent=1) if show else f"{one['number']} ({one['kind']}): {one['came']}: {one['text'][-600:]}")
    came = ("result", "error", "traceback", "hang", "crash", "started", "written outside")
    print(f"{'':<12}" + "".join(f"{name:>17}" for name in came))
    for kind in (*KINDS, "?"):
        counts = Counter(one["came"] for one in found if one["kind"] == kind)
        if counts:
            print(f"{kind:<12}" + "".join(f"{counts[name]:>17}" for name in came))
    total = Counter(one["came"] for one in found)
    print(json.dumps({"inputs": len(found), **{name.replace(" ", "_"): total[name] for name in came}}))
    return int(bool(bad))


class _Hang(BaseException):
    """The input has taken too long."""


class _Runner:
    """Runs inputs in a folder of its own, of which `out` is where output may go."""

    def __init__(self, home: Path, seed: int, report: Path) -> None:
        self._home, self._seed, self._report = home / "work", seed, report
        self._seen: list[str] = []
        self._watching = False
        self._prepare()

    def _prepare(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        self._home.mkdir()
        os.chdir(self._home)
        os.environ.update(HOME=str(self._home / "home"), AUTOPAR_CACHE="off", XDG_CACHE_HOME=str(self._home / "home" / "cache"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._home / "out")
        for folder in ("home", "out", "given"):
            (self._home / folder).mkdir()
        import torch
        import torch.distributed.checkpoint as dcp
        from torch import nn

        import autopar
        from autopar.capture import capture
        from cost_models.cluster import CATALOGUE, load_cluster
        from cost_models.write import cluster_toml

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.b(self.a(x).relu()).square().mean()

        self._model = Net()
        batch = (torch.randn(8, 4),)
        self._captured = capture(self._model, batch)
        self._plans = []
        for pins in ({"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "micro_batches": 2}):
            plan = autopar.plan(self._model, 2, example_inputs=batch, cluster="cpu", pins=pins)
            self._plans.append(json.loads(plan.to_json()))
        plan.save(self._home / "given" / "plan.json")
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._model(*batch).backward()
        self._optimizer.step()
        autopar.save(self._home / "given" / "checkpoint", self._model, self._optimizer, step=3, text="x", rng=torch.get_rng_state())
        dcp.save({"model": self._model.state_dict(), "step": 3}, checkpoint_id=self._home / "given" / "foreign", no_dist=True)
        self._clusters = [path.read_text() for path in sorted((CATALOGUE / "clusters").glob("*.toml"))]
        self._clusters += [cluster_toml(load_cluster(name)) for name in ("cpu", "dgx-h100", "p3.16xlarge")] * 3  # all in one text
        sys.addaudithook(self._audit)

    # ------------------------------------------------------------------------------------------------------------- watching
    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "pty.spawn"):
            self._seen.append(f"started: {event} {args!r}"[:300])
        elif event == "open" and isinstance(args[0], str | bytes) and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self._wrote(args[0])
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"):
            self._wrote(args[1] if event in ("os.rename", "os.symlink", "os.link") else args[0])

    def _wrote(self, path: object) -> None:
        where = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        if not where.startswith((f"{self._out}{os.sep}", "/dev/null", "/proc/self/")) and where != self._out:
            self._seen.append(f"written outside: {where}"[:300])

    # -------------------------------------------------------------------------------------------------------------- running
    def run(self, numbers: range) -> None:
        signal.signal(signal.SIGPROF, _too_long)
        signal.signal(signal.SIGALRM, _too_long)
        with self._report.open("a") as report:
            for number in numbers:
                report.write(json.dumps({"number": number, **self._one(number)}) + "\n")
                report.flush()

    def _one(self, number: int) -> dict[str, Any]:
        draw = random.Random(f"{self._seed} {number}")
        kind = KINDS[number % len(KINDS)]
        out = self._home / "out"
        shutil.rmtree(out)
        out.mkdir()
        self._out, self._seen = str(out), []
        before, modules, paths = dict(os.environ), set(sys.modules), list(sys.path)
        came, text = "result", ""
        what, do = getattr(self, f"_{kind}")(draw, out)
        try:
            with _limits(), warnings.catch_warnings(), self._watched():
                warnings.simplefilter("ignore")
                do()
        except _Hang:
            came, text = "hang", traceback.format_exc()
        except _expected() as error:
            came, text = "error", f"{type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001  (whatever it is, it is counted)
            came, text = "traceback", traceback.format_exc()
        finally:
            self._watching = False
            os.environ.clear()
            os.environ.update(before)
            sys.path[:] = paths
            os.chdir(self._home)
            for name in set(sys.modules) - modules:
                if name.startswith("autopar_target_"):
                    del sys.modules[name]
        if came in ("result", "error") and self._seen:
            came, text = self._seen[0].partition(":")[0], self._seen[0]
        if (self._home / "executed").exists():
            came, text = "started", "a text of the input was run"
        return {"kind": kind, "came": came, "text": text.encode("utf-8", "replace").decode()[-2000:], "what": repr(what)[:1000]}

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    # ------------------------------------------------------------------------------------------------- the kinds of inputs
    def _command(self, draw: random.Random, out: Path) -> tuple[object, Callable[[], None]]:
        from autopar import cli

        source = out / "model.py"
        source.write_text(inputs.target_source(draw), errors="replace")
        given = str(self._home / "given")
        target = f"{source}:build"
        valid = {
            "plan": [target, "--gpus", "2", "--cluster", "cpu"], "explain": [f"{given}/plan.json"], "verify": [target],
            "diff": [f"{given}/plan.json", f"{given}/plan.json"], "export": [f"{given}/checkpoint", "-o", str(out / "m.safetensors")],
            "import": [f"{given}/checkpoint", "-o", str(out / "c")], "profile": [], "demo": [], "doctor": [],
        }  # fmt: skip
        arguments = inputs.command(draw, valid, [target, f"{source}:none", "math:pi", "math:sqrt"])
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

    def _cluster(self, draw: random.Random, out: Path) -> tuple[object, Callable[[], None]]:
        from autopar.compiler import plan_of

        data = inputs.mutated_toml(draw, draw.choice(self._clusters))
        path = out / "cluster.toml"
        path.write_bytes(data)
        return data, lambda: _ignored(plan_of(self._captured, 2, cluster=str(path)))

    def _plan(self, draw: random.Random, out: Path) -> tuple[object, Callable[[], None]]:
        from autopar.compiler import emit
        from autopar.planner import Plan
        from autopar.report.diff import diff_text, differences
        from autopar.report.text import plan_json, plan_text

        data = inputs.mutated_json(draw, draw.choice(self._plans))
        path = out / "plan.json"
        path.write_bytes(data)

        def do() -> None:
            plan = Plan.load(path)
            plan_text(plan)
            diff_text(list(differences(plan_json(plan), plan_json(plan))), ("a", "b"))
            plan.save(path)
            emit(self._captured, plan)

        return data, do

    def _target(self, draw: random.Random, out: Path) -> tuple[object, Callable[[], None]]:
        from autopar.targets import load_target

        source = inputs.target_source(draw)
        path = out / "model.py"
        path.write_text(source, errors="replace")
        place = draw.choice((str(path), str(path), str(path), inputs.name(draw), "model", draw.choice(inputs.TEXTS)))
        target = f"{place}:{draw.choice(('build', 'build', 'build', 'M', 'none', draw.choice(inputs.TEXTS)))}"
        os.chdir(out)
        return target, lambda: _ignored(load_target(target))

    def _name(self, draw: random.Random, out: Path) -> tuple[object, Callable[[], None]]:
        import autopar
        from autopar.checkpoint.exchange import export_model, import_model
        from autopar.planner import Plan

        text = inputs.name(draw).replace("/etc/passwd", "etc").lstrip("/") or "."
        where = f"{out}/{text.replace('..', '.')}"
        checkpoint = self._home / "given" / "checkpoint"
        plan = Plan.load(self._home / "given" / "plan.json")
        how: dict[str, Callable[[], Any]] = {
            "load a plan": lambda: Plan.load(where), "save a plan": lambda: plan.save(where),
            "save": lambda: autopar.save(where, self._model), "load": lambda: autopar.load(where, self._model),
            "export to": lambda: export_model(checkpoint, where), "export of": lambda: export_model(where, out / "m.safetensors"),
            "import of": lambda: import_model(where, out / "c"), "import to": lambda: import_model(out / "none.safetensors", where),
        }  # fmt: skip
        which = draw.choice(list(how))
        return (which, text), lambda: _ignored(how[which]())

    def _environment(self, draw: random.Random, out: Path) -> tuple[object, Callable[[], None]]:
        import autopar
        from autopar.debug import said
        from autopar.plan_cache import cache_folder
        from autopar.run.deferred import world_size
        from autopar.run.watchdog import timeout_s

        given = inputs.environment(draw)
        os.chdir(out)

        def do() -> None:
            os.environ.update(given)
            said(5, lambda: "")
            timeout_s()
            cache_folder()
            world_size()
            if draw.random() < 0.1:
                autopar.compile(self._model, 2)

        return given, do

    def _checkpoint(self, draw: random.Random, out: Path) -> tuple[object, Callable[[], None]]:
        import torch

        import autopar
        from autopar.checkpoint.exchange import export_model

        folder = out / "checkpoint"
        shutil.copytree(self._home / "given" / "checkpoint", folder)
        if draw.random() < 0.25:
            return self._foreign(draw, folder)
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
        model = type(self._model)()
        optimizer = torch.optim.AdamW(model.parameters()) if draw.random() < 0.5 else None

        def do() -> None:
            if draw.random() < 0.3:
                export_model(folder, out / "m.safetensors")
            else:
                autopar.load(folder, model, optimizer)

        return how, do


    def _foreign(self, draw: random.Random, folder: Path) -> tuple[object, Callable[[], None]]:
        """A checkpoint of torch.distributed.checkpoint."""
        import autopar

        shutil.rmtree(folder)
        shutil.copytree(self._home / "given" / "foreign", folder)
        path = draw.choice(inputs.valid_files(folder))
        path.write_bytes(inputs.mutated_bytes(draw, path.read_bytes()))
        model = type(self._model)()
        return path.name, lambda: _ignored(autopar.load(folder, model))


class _Said(Exception):
    """A command has ended with a code for an error, and said why."""


class _Pickled:
    """Runs a program where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def _expected() -> tuple[type[BaseException], ...]:
    from autopar.errors import AutoparError
    from cost_models.cluster import HardwareFileError, UnknownHardware

    return (AutoparError, HardwareFileError, UnknownHardware, _Said)


def _ignored(_: object) -> None:
    """What was returned is looked at by nobody."""


def _too_long(*_: object) -> None:
    raise _Hang


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
