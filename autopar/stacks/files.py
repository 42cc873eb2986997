"""Configuration files of other softwares as values. They are parsed, and nothing in them is run: a shell script's words are split as the
shell would, its own literal assignments are put in the place of its variables, and what only a shell can work out is left as it stands."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from autopar.files import in_line
from autopar.stacks.stack import StackError

__all__ = ["ShellWords", "count", "mapping_of", "parsed", "size", "toml_text"]

MOST_BYTES = 4 * 2**20  # of a configuration; what is larger is none
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNED = re.compile(rf"(?:export\s+|local\s+|readonly\s+)?({_NAME})=(.*)", re.DOTALL)
_VARIABLE = re.compile(rf"\$\{{({_NAME})(?::?[-=]([^}}]*))?\}}|\$({_NAME})")


class ShellWords(list[str]):
    """The words of a shell script's commands, in order."""


def parsed(path: Path) -> Any:
    """A file as the values in it, by its suffix: .toml, .json, .yaml, .yml; anything else is a shell script. StackError."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise StackError(f"cannot read the configuration {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MOST_BYTES:
        raise StackError(f"{path} has {len(data):,} bytes; a configuration has {MOST_BYTES:,} at most")
    try:
        text = data.decode()
        match path.suffix.lower():
            case ".toml":
                return _with_numbers(tomllib.loads(text))
            case ".json":
                return json.loads(text)
            case ".yaml" | ".yml":
                _check_aliases(text, path)
                return _with_numbers(yaml.safe_load(text))
            case _:
                return _shell(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise StackError(f"{path} cannot be parsed: {in_line(error)}") from error


def _with_numbers(found: Any) -> Any:
    """The values of a file. ValueError for a number in hexadecimal that Python does not write in decimals, as an error about it would."""
    left, seen = [found], set[int]()  # aliases: a list may be in itself
    while left:
        value = left.pop()
        if isinstance(value, int):
            str(value)
        elif isinstance(value, dict | list) and id(value) not in seen:
            seen.add(id(value))
            left += [*value, *value.values()] if isinstance(value, dict) else value
    return found


def _check_aliases(text: str, path: Path) -> None:
    """A few aliases of aliases make a value that fills the memory."""
    if sum(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)) > 100:
        raise StackError(f"{path} has more than 100 aliases (*name); write its values out")


def _shell(text: str) -> ShellWords:
    values: dict[str, str] = {}
    words = ShellWords()
    lexer = shlex.shlex(text.replace("\\\r\n", " ").replace("\\\n", " "), posix=True, punctuation_chars="();&|")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    for word in lexer:
        if set(word) <= set("();&|"):
            continue
        assigned = None if word.startswith("-") else _ASSIGNED.fullmatch(word)
        if assigned is None:
            filled = _filled(word, values)
            words += _split(filled) if filled != word else [filled]  # such as $ARGS
            continue
        filled = _filled(assigned[2], values)
        if "$(" not in filled and "`" not in filled:
            values[assigned[1]] = filled
        if "--" in filled:  # arguments that are kept in a variable
            words += _split(filled)
    return words


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is not closed
        return text.split()


def _filled(word: str, values: Mapping[str, str]) -> str:
    for _ in range(8):
        after = _VARIABLE.sub(lambda m: values.get(m[1] or m[3], m[2] if m[2] is not None else m[0])[:10_000], word)
        if after == word or len(after) > 100_000:
            break
        word = after
    return word


def mapping_of(value: object, where: str) -> Mapping[str, Any]:
    """A table of a file; empty if it is not there. StackError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise StackError(f"{where} must be a table of names and values, not {type(value).__name__}")
    return value


def count(value: object, where: str) -> int | None:
    """A whole number of one or more; None if it is not stated ('auto', -1). StackError."""
    if value in (None, "auto", -1, "-1"):
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value)) > 12:
            raise ValueError
        number = int(value)
    except ValueError:
        raise StackError(f"{where} must be a whole number, not {str(value)[:100]!r}") from None
    if number < 1:
        raise StackError(f"{where} must be 1 or more, not {number}")
    return number


def size(value: object, where: str) -> int:
    """The same, one if it is not stated."""
    return count(value, where) or 1


def toml_text(tables: Mapping[str, Mapping[str, Any]], notes: tuple[str, ...] = ()) -> str:
    """Tables of strings, numbers, booleans and lists of them, which TOML writes as JSON does."""
    lines = [f"# {note}" for note in notes]
    for name, table in tables.items():
        lines += ["", f"[{name}]"] + [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines).lstrip("\n") + "\n"
