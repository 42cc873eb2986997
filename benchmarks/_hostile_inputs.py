"""Bad inputs of every kind, drawn from a seed: mutations of valid ones, and what people and attackers type."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

__all__ = [
    "NUMBERS", "TEXTS", "changes", "command", "configuration", "confined", "environment", "module", "mutated_bytes", "mutated_json",
    "mutated_text", "name", "numbers", "pins", "target_source",
]  # fmt: skip

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**70), 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"),
    float("-inf"), True, False, None,
)  # fmt: skip
CANARY = "__import__('os').system('touch executed')"
TEXTS = (
    "", " ", "x", "0", "-1", "1e999", "nan", "None", "null", "true", "..", "../../x", "/", "/etc/passwd", "/dev/null", "~", "$HOME", "`id`",
    "a" * 300, "b" * 5000, "\u00e9\u4e2d\U0001f4a5", "\u202e", "\udcff", "a\nb", "\t", "{}", "[]", "%s%n", "{0}", "'; --", CANARY,
    "${jndi:x}", "[bold]x[/bold]", "--", "-", "=", ":", "::", "a:b:c", "tp=2", "S(0)", "R", "float128", "autopar", "torch:nn", "os:system",
)  # fmt: skip
WHOLE_NUMBERS = (
    "0", "-1", "1", "2", "3", "4", "8", "999999999999", "1.5", "two", "", "0x10", "1_0", "\u0663", "1e3", " 2", "2 ", "\u00b2", "9" * 400,
    "9" * 5000,
)  # fmt: skip
MEMORIES = ("-1GiB", "1KiB", "0", "1e3GiB", "80 gib", "1.5.2GiB", "\u0663GiB", "1GiB", "80GiB", f"{'9' * 400}GiB", f"0.{'0' * 400}1B")
PINS = (
    "tp", "dp", "pp", "zero", "shard", "blocks", "schedule", "recompute", "micro_batch", "micro_batches", "virtual_stages", "even_stages",
    "sequence_parallel", "axes", "no",
)  # fmt: skip
PINNED = ("gpipe", "1f1b", "interleaved", "none", "full", "selective", "auto", "true", "false", "1,1", "2,2", "0,2", ",", "1,,1")
SOFTWARES = ("torchtitan", "megatron", "deepspeed", "accelerate", "transformers", "nanotron", "composer", "megatrom", "DeepSpeed")
ALONE = ("--json", "--schema", "--no-alternatives", "-v", "-h")  # options without a value
_ABOUT_A_PLAN = (
    "--gpus", "--cluster", "--memory", "--pin", "--optimizer", "--precision", "--reduce-dtype", "--loss", "--time-limit", "--json",
)  # fmt: skip
OWN = {  # the options of each command
    "plan": (*_ABOUT_A_PLAN, "-o", "--out", "--for", "--export", "-v"),
    "explain": (
        *_ABOUT_A_PLAN, "--plan", "--why", "--why-not", "--what-if", "--from", "--measured", "--format", "--out", "--no-alternatives",
        "--schema", "--why", "--why-not", "--what-if", "--from", "--measured", "-v",
    ),
    "sweep": (*_ABOUT_A_PLAN, "--batch", "--gpus", "--memory"), "fit": (*_ABOUT_A_PLAN, "--most"),
    "verify": ("--gpus", "--plan", "--cluster", "--memory", "--pin", "--loss", "--steps", "--loop", "--json"), "diff": ("-v", "--json"),
    "export": ("-o", "--prefix", "--json"), "import": ("-o", "--json"), "profile": ("-o", "--cluster", "--json"),
    "demo": ("--steps", "--out", "--pin", "--json"), "doctor": ("--json",),
}  # fmt: skip
PRECISIONS = ("fp32", "bf16", "fp16", "fp64", "int8", "bfloat16")


def value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(6 if depth < 3 else 4)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice(TEXTS).encode("utf-8", "replace").decode()
    if kind == 4:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {str(draw.choice(TEXTS))[:40].encode("utf-8", "replace").decode(): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def mutated_json(draw: random.Random, tree: Any) -> bytes:
    """A JSON document with a few of its nodes replaced, removed, moved or doubled; or, of half of them, with other values of the same
    types, which a check of types lets pass."""
    tree = json.loads(json.dumps(tree))
    if draw.random() < 0.5:
        for _ in range(draw.choice((1, 1, 2))):
            _turn(draw, tree)
        return json.dumps(tree).encode()
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        parent: Any = None
        key: Any = None
        node = tree
        while isinstance(node, dict | list) and node and (parent is None or draw.random() < 0.75):
            parent, key = node, draw.choice(list(node) if isinstance(node, dict) else list(range(len(node))))
            node = node[key]
        if parent is None:
            return json.dumps(value(draw)).encode()
        how = draw.randrange(6)
        if how == 0:
            del parent[key]
        elif how == 1 and isinstance(parent, list):
            parent.insert(key, node)
        elif how == 2 and isinstance(parent, dict):
            parent[draw.choice((*parent, "extra", *TEXTS[:10]))] = node
        elif how == 3 and isinstance(node, int | float) and not isinstance(node, bool):
            parent[key] = draw.choice((node + 1, node - 1, -node, node * 2, node / 2, float(node), str(node)))
        elif how == 4 and isinstance(node, str) and node:
            parent[key] = mutated_text(draw, node)
        else:
            parent[key] = value(draw)
    text = json.dumps(tree)
    return mutated_bytes(draw, text.encode()) if draw.random() < 0.1 else text.encode()


def _turn(draw: random.Random, tree: Any) -> None:
    """One value becomes another of its type; a list loses, doubles or swaps something; of a mapping two values are swapped, or one goes."""
    nodes = list(_nodes(tree))
    if not nodes:
        return
    parent, key = draw.choice(nodes)
    node = parent[key]
    alike = [p[k] for p, k in nodes if type(p[k]) is type(node)]
    if isinstance(node, bool):
        parent[key] = not node
    elif isinstance(node, int):
        parent[key] = draw.choice((0, 1, 2, 3, 4, 7, node + 1, node - 1, 2 * node, 10**9, -node, *alike))
    elif isinstance(node, float):
        parent[key] = draw.choice((0.0, 1.0, node / 2, 2 * node, 1e300, 1e-300, *alike))
    elif isinstance(node, str):
        parent[key] = draw.choice((*alike, *alike, "", "x", draw.choice(TEXTS).encode("utf-8", "replace").decode()))
    elif isinstance(node, list) and node:
        at, how = draw.randrange(len(node)), draw.randrange(4)
        if how == 0:
            del node[at]
        elif how == 1:
            node.insert(at, draw.choice(node))
        elif how == 2:
            other = draw.randrange(len(node))
            node[at], node[other] = node[other], node[at]
        else:
            node.clear()
    elif isinstance(node, dict) and node:
        one, other = draw.choice(list(node)), draw.choice(list(node))
        if one == other:
            del node[one]
        else:
            node[one], node[other] = node[other], node[one]


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(what holds it, key) of every value in a document."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _nodes(tree[key])


def mutated_bytes(draw: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(found) + 1)
        how = draw.randrange(5)
        if how == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif how == 1:
            del found[at : at + draw.choice((1, 8, 1000))]
        elif how == 2:
            found[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 4, 64))))
        elif how == 3:
            del found[at:]
        else:
            found[at:at] = found[at : at + draw.choice((4, 64))]
    return bytes(found)


def mutated_text(draw: random.Random, text: str) -> str:
    how = draw.randrange(5)
    at = draw.randrange(len(text) + 1)
    if how == 0:
        return text[:at] + draw.choice(TEXTS).encode("utf-8", "replace").decode() + text[at:]
    if how == 1:
        return text[:at] + text[at + draw.choice((1, 3)) :]
    if how == 2:
        return text[:at] + draw.choice(string.printable) + text[at + 1 :]
    if how == 3:
        return text.swapcase()
    return text + text


def mutated_lines(draw: random.Random, text: str, otherwise: Callable[[str, int], str]) -> bytes:
    """A file by lines: removed, doubled, moved, with bytes changed; or said otherwise, by a function of it and a number."""
    lines = text.splitlines()
    for _ in range(draw.choice((1, 1, 2, 4))):
        if not lines:
            break
        at, how = draw.randrange(len(lines)), draw.randrange(6)
        if how == 0:
            del lines[at]
        elif how == 1:
            lines.insert(at, lines[draw.randrange(len(lines))])
        elif how == 2:
            lines[at] = mutated_text(draw, lines[at])
        else:
            lines[at] = otherwise(lines[at], how)
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutated_bytes(draw, data) if draw.random() < 0.1 else data


def mutated_toml(draw: random.Random, text: str) -> bytes:
    """A cluster file, by lines: also what stands behind an equals sign is replaced."""
    numbers = ("0", "-1", "1e308", "1e-320", "nan", "inf", "-inf", "true", '"1"', "[]", "{}", "9" * 30, "0x7f", "1979-05-27")

    def otherwise(line: str, how: int) -> str:
        before, equals, rest = line.partition("value = " if "value = " in line else "=")
        return f"{before}{equals}{draw.choice(numbers)}{rest[rest.find(',') :] if ',' in rest and how > 3 else ''}"

    return mutated_lines(draw, text, otherwise)


def target_source(draw: random.Random) -> str:
    """A file for a TARGET, whose `build` does what it should not."""
    bodies = (
        "return 1", "return None", "return M()", "return M(), ()", "return M(), []", "return (M(), {1: 2})", "return (M(), {'x': 1}, 2)",
        "return M, (1,)", "raise ValueError('no')", "raise KeyError", "raise SystemExit(3)", "import sys; sys.exit()", "sys.exit('no')",
        "return build()", "raise MemoryError", "raise StopIteration", "yield 1", "assert False", "1 / 0", "import nothing_of_that_name",
        "return M(), (torch.zeros(2),)", "return M(), {'x': 'text'}", "return M(), {'y': torch.zeros(2, 4)}",
        "return M(), (torch.zeros(2, 4, dtype=torch.int64),)",        "return M(), (torch.zeros(2, 5),)",
        "return Bad(), (torch.zeros(2, 4),)",
        "return Exits(), (torch.zeros(2, 4),)",
        "print('out'); return M(), 3",
        "raise Warning('w')",
        "raise type('Odd', (Exception,), {'__str__': lambda s: 1 / 0})()", "raise UnicodeDecodeError('a', b'', 0, 1, 'x')",
        "return M(), (None,)", "return M(), (M(),)", "return Nothing(), (torch.zeros(2, 4),)",
    )  # fmt: skip
    tops = (
        "import nothing_at_all", "raise ValueError", "raise SystemExit(0)", "x = ", "build = 3", "def build(a): pass", "\0", "\u00e9 = 1",
    )  # fmt: skip
    top = draw.choice(("",) * 5 + tops)
    return (
        "import sys, torch\nfrom torch import nn\n"
        "class M(nn.Linear):\n    def __init__(self): super().__init__(4, 4)\n"
        "    def forward(self, x): return super().forward(x).square().mean()\n"
        "class Bad(M):\n    def forward(self, x): raise RuntimeError('on purpose')\n"
        "class Exits(M):\n    def forward(self, x): sys.exit(0)\n"
        "class Nothing(M):\n    def forward(self, x): return 'text'\n"
        f"def build():\n    {draw.choice(bodies)}\n{top}\n"
    )


def name(draw: random.Random) -> str:
    """The name of a file or folder."""
    known = (*TEXTS, "plan.json", "file.toml", "a b", "out", ".", "-o", "con", "x" * 255)
    return "/".join(draw.choice(known) for _ in range(draw.choice((1, 1, 2, 3))))


def confined(text: str, folder: str) -> str:
    """A name that leads nowhere but below this folder or the present one, or to a device that swallows what is written."""
    if text == "/dev/null" or (text.startswith(f"{folder}/") and ".." not in text):
        return text
    return text.replace("/etc/passwd", "etc").replace("..", ".").lstrip("/") or "."


def environment(draw: random.Random) -> dict[str, str]:
    names = ("AUTOPAR_TIMEOUT", "AUTOPAR_DEBUG", "AUTOPAR_MEASURE", "AUTOPAR_CACHE", "WORLD_SIZE", "LOCAL_RANK", "XDG_CACHE_HOME")
    found = {draw.choice(names): draw.choice((*TEXTS, *WHOLE_NUMBERS)) for _ in range(draw.choice((1, 1, 2)))}
    return {key: text.replace("\udcff", "\xff") for key, text in found.items()}


def pins(draw: random.Random) -> str:
    """Pins as --why-not takes them."""
    return draw.choice((",", ",", " ", ", ", "")).join(_pin(draw) for _ in range(draw.choice((1, 1, 2, 3))))


def _pin(draw: random.Random) -> str:
    said = draw.choice((*WHOLE_NUMBERS, *"1122", *PINNED, draw.choice(TEXTS)))
    return f"{draw.choice((*PINS, *PINS, draw.choice(TEXTS)))}{draw.choice(('=',) * 12 + (' = ', '==', ''))}{said}"


def changes(draw: random.Random) -> list[str]:
    """Changes as --what-if takes them."""
    values: dict[str, Callable[[], str]] = {
        "memory": lambda: draw.choice((*MEMORIES, *TEXTS)), "gpus": lambda: draw.choice(WHOLE_NUMBERS),
        "batch": lambda: draw.choice(WHOLE_NUMBERS), "cluster": lambda: draw.choice(("cpu", "dgx-h100", "p3.16xlarge", "x.toml", *TEXTS)),
        "optimizer": lambda: draw.choice(("adam", "sgd", "adagrad", *TEXTS)), "link.inter": lambda: _rate(draw),
        "link.intra": lambda: _rate(draw), "link.none": lambda: _rate(draw),
        "tp": lambda: draw.choice(WHOLE_NUMBERS), "schedule": lambda: draw.choice(PINNED),
        "zero": lambda: draw.choice("0123"), "pp": lambda: draw.choice("12"), draw.choice(TEXTS): lambda: draw.choice(TEXTS),
    }  # fmt: skip
    found = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        key = draw.choice(list(values))
        found.append(f"{key}{draw.choice(('=',) * 15 + (' =', ''))}{values[key]()}")
    return found


def _rate(draw: random.Random) -> str:
    unit = draw.choice(("GB/s", "Gb/s", "GiB/s", "Tbps", "B/s", "bit/s", "", "GB", "furlongs"))
    stated = (f"{draw.choice(WHOLE_NUMBERS)}{unit}", f"x{draw.choice(WHOLE_NUMBERS)}")
    return draw.choice((*stated, "x0", "x0.001", "1e3GB/s", draw.choice(TEXTS)))


def numbers(draw: random.Random) -> str:
    """A list of numbers, as `sweep` takes them."""
    known = WHOLE_NUMBERS if draw.random() < 0.5 else ("1", "2", "3", "4", "8", "64", "999999999999")
    return draw.choice((",", ",", ", ", ",,", " ", ";")).join(draw.choice(known) for _ in range(draw.choice((1, 1, 2, 3))))


def module(draw: random.Random) -> str:
    """What --why is asked about."""
    return draw.choice(("a", "b", "a.weight", "b.bias", "relu", "linear", "*", "a.*", "(", "[", "a.weight.grad", *TEXTS))


def configuration(draw: random.Random, text: str, suffix: str) -> bytes:
    """A configuration of another training software: of its values, or of its lines and words, some replaced, lost or doubled."""
    if suffix == ".json" and draw.random() < 0.7:
        return mutated_json(draw, json.loads(text))
    if suffix in (".yaml", ".yml") and draw.random() < 0.5:
        return mutated_json(draw, yaml.safe_load(text))  # what is JSON is YAML
    odd = ("[1, 2]", "{a: 1}", '"text"', "true", "null", "nan", "1979-05-27", "&a [*a]", "!!python/name:os.system")

    def otherwise(line: str, how: int) -> str:
        separator = next((x for x in (" = ", ": ", " ") if x in line.strip()), " ")
        return f"{line.rpartition(separator)[0]}{separator}{draw.choice((*WHOLE_NUMBERS, *TEXTS, *odd))}"

    return mutated_lines(draw, text, otherwise)


def command(draw: random.Random, valid: dict[str, list[list[str]]], targets: list[str], files: list[str]) -> list[str]:
    """Arguments of a command line. valid: by command, arguments that are right but for what is changed or added here; every command of
    which a right form would run for long gets something wrong. files: that are there, of every kind."""
    which = draw.choice((*valid, *valid, draw.choice(TEXTS)))
    given = list(draw.choice(valid.get(which, [[]])))
    options: dict[str, Callable[[], str]] = {
        "--gpus": lambda: draw.choice((*WHOLE_NUMBERS, numbers(draw))),
        "--cluster": lambda: draw.choice((*TEXTS, "dgx-h101", "cpu ", "x.toml", "cpu,dgx-h100")),
        "--memory": lambda: draw.choice((*TEXTS, *MEMORIES)),
        "--pin": lambda: _pin(draw),
        "--optimizer": lambda: draw.choice(TEXTS), "--precision": lambda: draw.choice((*TEXTS, *PRECISIONS)),
        "--reduce-dtype": lambda: draw.choice((*TEXTS, *PRECISIONS)),
        "--loss": lambda: draw.choice((*TEXTS, *targets)),
        "-o": lambda: name(draw), "--out": lambda: name(draw),
        "--format": lambda: draw.choice((*TEXTS, "html", "json", "svg", "perfetto", "text")),
        "--steps": lambda: draw.choice(WHOLE_NUMBERS), "--plan": lambda: draw.choice((name(draw), *files)),
        "--loop": lambda: draw.choice((*TEXTS, *targets)), "--prefix": lambda: draw.choice(TEXTS),
        "--why": lambda: module(draw), "--why-not": lambda: pins(draw), "--what-if": lambda: draw.choice(changes(draw)),
        "--from": lambda: draw.choice((name(draw), *files)), "--measured": lambda: draw.choice((name(draw), *files)),
        "--export": lambda: draw.choice((*SOFTWARES, *TEXTS)), "--for": lambda: draw.choice((*SOFTWARES, *TEXTS)),
        "--time-limit": lambda: draw.choice((*WHOLE_NUMBERS, "nan", "inf", "1e-9")), "--batch": lambda: numbers(draw),
        "--most": lambda: draw.choice(WHOLE_NUMBERS),
        "--no": lambda: "x", **dict.fromkeys(ALONE, lambda: ""),
    }  # fmt: skip
    own = OWN.get(which, ()) if draw.random() < 0.9 else ()
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        option = draw.choice([*own] or [*options])
        text = options[option]()
        given += [option] if option in ALONE else [option, text]
    if draw.random() < 0.2 and given:
        given[draw.randrange(len(given))] = draw.choice((*TEXTS, *targets, name(draw)))
    if draw.random() < 0.15 and given:
        del given[draw.randrange(len(given))]
    if which in ("profile", "demo", "verify", "doctor"):
        given += ["--gpus", draw.choice(("0", "-3", "x"))]
    return [which, *given]


def valid_files(folder: Path) -> list[Path]:
    """All files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
