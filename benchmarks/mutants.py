"""Do the tests notice a change of meaning? One-line changes, each applied to a copy of the packages, and the tests that ought to fail.

    python -m benchmarks mutants [--names A,B] [--results FILE.jsonl] [--redo survived] [--limit-s 300] [--no-baseline] [--json] [--list]

The changes are data: benchmarks/data/mutants.toml. The copy is made once and is what the tests import; the checkout is not touched.
First the named tests run on the unchanged copy, where all of them must pass. killed: a test fails; hung: none does within the limit,
which counts as noticed; survived: all pass; stale: the old text is not in the file once, so that nothing was tried. Names may have
wildcards. With --results each outcome is appended to the file as it is found, and what stands there already for the same change and
tests is not done again, except for outcomes in --redo. Exit code 1 if fewer than 95% of the changes are noticed, or one is stale.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data" / "mutants.toml"
COPIED = ("autopar", "cost_models", "benchmarks", "tests", "pyproject.toml", "README.md", "docs", "constraints.txt", "Makefile")
COMPILED = ("autopar", "cost_models", "benchmarks", "tests")
PRELOADED = (  # once for all tests: what they import of others
    "torch", "torch.export", "torch.distributed", "torch.utils.flop_counter", "torch._subclasses.fake_tensor",
    "torch.testing._internal.distributed.fake_pg", "torch.multiprocessing.reductions", "numpy", "networkx", "msgspec",
)  # fmt: skip
OUTCOMES = ("killed", "hung", "survived", "stale")
NOTICED = ("killed", "hung")
SHARE = 0.95


class Stale(ValueError):
    """The old text is not in the file exactly once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change. file: from the root; old: a part of one of its lines, which no other has; new: what stands in its place. breaks: what
    is wrong then. tests: files, or tests in them, that ought to notice."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256("\0".join((self.file, self.old, self.new, *self.tests)).encode()).hexdigest()[:16]

    def applied_to(self, text: str) -> str:
        """The text of the file with the change. Stale if the old text is not in it once."""
        if (found := text.count(self.old)) != 1:
            raise Stale(f"{self.name}: {self.old!r} is {found} times in {self.file}, not once; write the change anew, or remove it")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """by: the test that failed; cpu_s: of the tests."""

    name: str
    key: str
    outcome: str
    by: str = ""
    cpu_s: float = 0.0


def mutants(path: Path = DATA) -> tuple[Mutant, ...]:
    """Those of a file. ValueError if two have one name."""
    found = tuple(
        Mutant(name=name, **{**row, "tests": tuple(row["tests"])}) for name, row in tomllib.loads(path.read_text(encoding="utf-8")).items()
    )
    if broken := [m.name for m in found if "\n" in m.old + m.new or m.old == m.new]:
        raise ValueError(f"{path}: a change is of one line, and is one: {', '.join(broken)}")
    return found


class Copy:
    """A copy of the packages and their tests, in which one change at a time is made."""

    def __init__(self, source: Path, folder: Path, names: Sequence[str] = COPIED, preloaded: Sequence[str] = PRELOADED) -> None:
        self.folder = folder
        for name in names:
            if (source / name).is_dir():
                shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source / name, folder / name)
        self.environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "AUTOPAR_CACHE": "off"}
        # bytecode that is found by the hash of its source: a change of equal length within a second is no other file to its time stamp
        compiled = [n for n in COMPILED if (folder / n).is_dir()]
        self._python("-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *compiled)
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"
        for package in ("autopar", "cost_models"):
            if (folder / package).is_dir():
                path = self._python("-c", f"import importlib.util as u; print(u.find_spec({package!r}).origin)").strip()
                assert Path(path).is_relative_to(folder), f"the tests would run {path}, not the copy"
        server = [sys.executable, str(Path(__file__).parent / "_mutants_tests.py"), *preloaded]
        self._tests = subprocess.Popen(
            server, cwd=folder, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _python(self, *arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.folder, env=self.environment, check=True, capture_output=True, text=True).stdout

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the copy has the change. Stale if it cannot be made."""
        path = self.folder / mutant.file
        before = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied_to(before), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")

    def run(self, tests: Sequence[str], *options: str, limit_s: float | None) -> tuple[int | None, str, float]:
        """pytest's exit code, None beyond the limit; what it printed; and seconds of CPU."""
        arguments = ["-q", "--tb=short", "-rfE", "-p", "no:cacheprovider", "-n0", *options, *tests]
        assert self._tests.stdin is not None and self._tests.stdout is not None
        self._tests.stdin.write(json.dumps({"arguments": arguments, "limit_s": limit_s}) + "\n")
        self._tests.stdin.flush()
        answer = json.loads(self._tests.stdout.readline())
        return answer["code"], answer["output"], answer["cpu_s"]

    def close(self) -> None:
        self._tests.communicate()

    def judge(self, mutant: Mutant, limit_s: float | None = None) -> Outcome:
        """RuntimeError where pytest runs no tests."""
        try:
            with self.changed(mutant):
                code, output, cpu_s = self.run(mutant.tests, "-x", limit_s=limit_s)
        except Stale:
            return Outcome(name=mutant.name, key=mutant.key, outcome="stale")
        by = _failed(output)
        if code not in (None, 0) and not by:
            raise RuntimeError(f"{mutant.name}: pytest does not run {' '.join(mutant.tests)} (its exit code is {code})\n{output}")
        outcome = "hung" if code is None else "survived" if code == 0 else "killed"
        return Outcome(name=mutant.name, key=mutant.key, outcome=outcome, by=by, cpu_s=round(cpu_s, 1))


def _failed(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[1] if found else ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--names", default="", help="comma-separated changes; wildcards")
    parser.add_argument("--results", type=Path, help="JSON lines: outcomes are appended, and those in it are not done again")
    parser.add_argument("--redo", type=lambda s: tuple(filter(None, s.split(","))), default=(), help="outcomes in --results to do again")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for the tests of one change; ends those that hang")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without any change first")
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    parser.add_argument("--list", action="store_true", help="name the changes and run nothing")
    args = parser.parse_args(argv)
    every = {m.name: m for m in mutants()}
    chosen: dict[str, Mutant] = {}
    for wish in [w for w in args.names.split(",") if w] or ["*"]:
        if not (matched := fnmatch.filter(every, wish)):
            print(f"there is no change {wish!r}; --list names them", file=sys.stderr)
            return 2
        chosen |= {name: every[name] for name in matched}
    if args.list:
        print("\n".join(f"{m.name:<48} {m.breaks}" for m in chosen.values()))
        return 0
    out = sys.stderr if args.json else sys.stdout
    known = {o.name: o for o in _read(args.results) if o.outcome not in args.redo and o.name in chosen and o.key == chosen[o.name].key}
    left = [m for m in chosen.values() if m.name not in known]
    outcomes = dict(known)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        with contextlib.closing(Copy(ROOT, Path(folder))) as copy:
            if left and not args.no_baseline:
                tests = sorted({t for m in left for t in m.tests})
                code, output, cpu_s = copy.run(tests, limit_s=None)
                if code != 0:
                    print(f"tests fail without any change:\n{output}", file=sys.stderr)
                    return 2
                print(f"without any change the tests pass in {cpu_s:.0f} s of CPU", file=out, flush=True)
            for count, mutant in enumerate(left, 1):
                found = outcomes[mutant.name] = copy.judge(mutant, args.limit_s)
                if args.results is not None:
                    with args.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(found)) + "\n")
                said = f"{found.outcome:<8} {mutant.name:<48} {found.cpu_s:5.1f} s  {found.by.removeprefix('tests/')}"
                print(f"[{count}/{len(left)}] {said}", file=out, flush=True)
    counts = Counter(o.outcome for o in outcomes.values())
    share = sum(counts[o] for o in NOTICED) / len(chosen)
    for outcome in OUTCOMES[2:]:
        for name in (o.name for o in outcomes.values() if o.outcome == outcome):
            print(f"{outcome}: {name}: {every[name].file}: {every[name].breaks}", file=out)
    print(f"{100 * share:.1f}% of {len(chosen)} changes are noticed", file=out)
    record = {
        "mutants": len(chosen), **{o: counts[o] for o in OUTCOMES}, "share": round(share, 4),
        "cpu_s": round(sum(o.cpu_s for o in outcomes.values()), 1),
        "names": {o: sorted(n for n, x in outcomes.items() if x.outcome == o) for o in OUTCOMES[2:]},
    }  # fmt: skip
    print(json.dumps(record))
    return 0 if share >= SHARE and not counts["stale"] else 1


def _read(path: Path | None) -> list[Outcome]:
    if path is None or not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
