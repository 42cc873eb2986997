"""Bad inputs of every kind, drawn from a seed: mutations of valid ones, and what people and attackers type."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["NUMBERS", "TEXTS", "command", "environment", "mutated_bytes", "mutated_json", "mutated_text", "name", "target_source"]

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
WHOLE_NUMBERS = ("0", "-1", "1", "2", "3", "4", "8", "999999999999", "1.5", "two", "", "0x10", "1_0", "\u0663", "1e3", " 2", "2 ")


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
    """A JSON document with a few of its nodes replaced, removed, moved or doubled."""
    tree = json.loads(json.dumps(tree))
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


def mutated_toml(draw: random.Random, text: str) -> bytes:
    """A cluster file, by lines: what stands behind an equals sign replaced, lines removed, doubled, moved, or bytes changed."""
    lines = text.splitlines()
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(lines))
        how = draw.randrange(6)
        if how == 0:
            del lines[at]
        elif how == 1:
            lines.insert(at, lines[draw.randrange(len(lines))])
        elif how == 2:
            lines[at] = mutated_text(draw, lines[at])
        else:
            numbers = ("0", "-1", "1e308", "1e-320", "nan", "inf", "-inf", "true", '"1"', "[]", "{}", "9" * 30, "0x7f", "1979-05-27")
            before, equals, rest = lines[at].partition("value = " if "value = " in lines[at] else "=")
            lines[at] = f"{before}{equals}{draw.choice(numbers)}{rest[rest.find(',') :] if ',' in rest and how > 3 else ''}"
        if not lines:
            break
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutated_bytes(draw, data) if draw.random() < 0.1 else data


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


def environment(draw: random.Random) -> dict[str, str]:
    names = ("AUTOPAR_TIMEOUT", "AUTOPAR_DEBUG", "AUTOPAR_MEASURE", "AUTOPAR_CACHE", "WORLD_SIZE", "LOCAL_RANK", "XDG_CACHE_HOME")
    found = {draw.choice(names): draw.choice((*TEXTS, *WHOLE_NUMBERS)) for _ in range(draw.choice((1, 1, 2)))}
    return {key: text.replace("\udcff", "\xff") for key, text in found.items()}


def command(draw: random.Random, valid: dict[str, list[str]], targets: list[str]) -> list[str]:
    """Arguments of a command line. valid: by command, arguments that are right but for what is changed or added here; every command of
    which a right form would run for long gets something wrong."""
    which = draw.choice((*valid, *valid, draw.choice(TEXTS)))
    given = list(valid.get(which, ()))
    options: dict[str, Callable[[], str]] = {
        "--gpus": lambda: draw.choice(WHOLE_NUMBERS), "--cluster": lambda: draw.choice((*TEXTS, "dgx-h101", "cpu ", "x.toml")),
        "--memory": lambda: draw.choice((*TEXTS, "-1GiB", "1KiB", "0", "1e3GiB", "80 gib", "1.5.2GiB", "\u0663GiB")),
        "--pin": lambda: f"{draw.choice(('tp', 'dp', 'pp', 'zero', 'shard', 'blocks', 'schedule', 'recompute', 'micro_batch', 'no'))}="
                         f"{draw.choice((*WHOLE_NUMBERS, *TEXTS))}",
        "--optimizer": lambda: draw.choice(TEXTS), "--precision": lambda: draw.choice((*TEXTS, "int8")),
        "--loss": lambda: draw.choice((*TEXTS, *targets)),
        "-o": lambda: name(draw), "--out": lambda: name(draw), "--format": lambda: draw.choice((*TEXTS, "html", "json")),
        "--steps": lambda: draw.choice(WHOLE_NUMBERS), "--plan": lambda: name(draw), "--loop": lambda: draw.choice((*TEXTS, *targets)),
        "--prefix": lambda: draw.choice(TEXTS),
        "--json": lambda: "", "--no": lambda: "x", "-h": lambda: "",
    }  # fmt: skip
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        option = draw.choice(list(options))
        text = options[option]()
        given += [option, text] if text or option not in ("--json", "-h") else [option]
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
