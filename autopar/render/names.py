"""Names of the emitted file: every identifier in it that stems from user data is made here."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

__all__ = ["RESERVED", "Names", "comment_text", "identifier", "is_plain", "short"]

IMPORTED = frozenset({"torch", "F", "C", "L", "Manifest", "ParamSpec", "BufferSpec", "InputSpec", "Stage", "recompute"})
OWN = frozenset({"MANIFEST", "STAGES", "prologue", "self", "mesh", "w", "unused", "_"})
RESERVED = IMPORTED | OWN | frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | frozenset(dir(builtins))

_FUNCTION = re.compile(r"(block_\d+|Stage\d+)\Z")
_LONGEST = 32  # characters of a local name; of longer ones the last parts are kept


def is_plain(text: str) -> bool:
    """Whether a name of the user's can stand in the emitted file as it is: an ASCII identifier that means nothing else there."""
    return text.isascii() and text.isidentifier() and text not in RESERVED and not _FUNCTION.match(text) and not text.startswith("__")


def identifier(text: str) -> str:
    """A plain identifier made of any text: 'h.0.attn' -> 'h_0_attn', 'in' -> 'in_', '' -> 'x'."""
    if is_plain(text):
        return text
    name = re.sub(r"[^0-9A-Za-z]+", "_", text).strip("_") or "x"
    if name[0].isdigit():
        name = f"x_{name}"
    return name if is_plain(name) else f"{name}_"


def short(value: str, prefix: str = "") -> str:
    """The local name to try for a value: without the module path in front, numbers of instances and excess length.

    'transformer_h_3_ln_1' with the prefix 'transformer.h.3' -> 'ln'; 'add_12' -> 'add'.
    """
    name = identifier(value)
    start = f"{identifier(prefix)}_" if prefix else ""
    if start and name.startswith(start) and len(name) > len(start):
        name = name.removeprefix(start)
    parts = [p for p in name.split("_") if p and not p.isdigit()] or ["x"]
    while len(parts) > 1 and len("_".join(parts)) > _LONGEST:
        parts.pop(0)
    return identifier("_".join(parts)[-_LONGEST:])


def comment_text(text: str) -> str:
    """Text of the user's that may stand in a comment: one line, nothing but printable characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


class Names:
    """Local names of one function. A name is used again once its value is dead, which also frees the tensor."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._holders: dict[str, str | None] = dict.fromkeys(taken, "")  # name -> value that it holds, None: free

    def hold(self, value: str, base: str) -> str:
        """A free name for the value: base, or base_2, base_3, ..."""
        name, n = base, 1
        while self._holders.get(name) is not None:
            n += 1
            name = f"{base}_{n}"
        self._holders[name] = value
        return name

    def available(self, name: str) -> bool:
        """Whether nothing that is alive has this name."""
        return self._holders.get(name) is None

    def release(self, name: str) -> None:
        """The value of this name is dead: the name may be given again."""
        self._holders[name] = None

    def is_free(self, name: str) -> bool:
        """Whether the name holds a dead value."""
        return name in self._holders and self._holders[name] is None

    def forget(self, name: str) -> None:
        """The name was deleted in the emitted function."""
        self._holders.pop(name)
