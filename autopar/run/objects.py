"""Objects that hold a batch: instances of dataclasses and namespaces. What they hold is given to a program as the items of a dict are.

torch's trees have to know a class before they look into its objects. One that is seen in a batch is made known, as
`torch.export.register_dataclass` does; what was known before stays as its author has it. An object is put together again without its
`__init__`, from all the attributes that it had.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["is_tuple", "key_name", "leaf_path", "make_known", "parts_of", "tuple_of"]

_Names = tuple[Any, tuple[str, ...]]


def make_known(tree: object) -> None:
    """To torch's trees: the classes of the objects in a batch."""
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, (list, tuple)):
        for value in tree:
            make_known(value)
        return
    if _holds_a_batch(tree) and type(tree) not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            type(tree), _apart, _together, flatten_with_keys_fn=_apart_by_name,
            serialized_type_name=f"{type(tree).__module__}.{type(tree).__qualname__}",
        )  # fmt: skip
    for _, child in parts_of(tree):
        make_known(child)


def parts_of(value: object) -> Iterator[tuple[Any, object]]:
    """What an object of a class that torch's trees know holds, by name; nothing of any other value."""
    if type(value) in pytree.SUPPORTED_NODES:
        found, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
        yield from ((key_name(path[0]), child) for path, child in found if path)


def key_name(key: Any) -> Any:
    """What a step of a path in a tree is called: a key, a position, or a name."""
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))


def _holds_a_batch(value: object) -> bool:
    plain = dataclasses.is_dataclass(value) and not isinstance(value, (type, Tensor, nn.Module))
    return plain or type(value) is types.SimpleNamespace


def _held(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    found = {f.name: getattr(value, f.name) for f in fields if hasattr(value, f.name)}
    return found | getattr(value, "__dict__", {})


def _apart(value: Any) -> tuple[list[Any], _Names]:
    held = _held(value)
    return list(held.values()), (type(value), tuple(held))


def _apart_by_name(value: Any) -> tuple[list[tuple[Any, Any]], _Names]:
    held = _held(value)
    return [(pytree.GetAttrKey(name), x) for name, x in held.items()], (type(value), tuple(held))


def _together(items: Any, names: _Names) -> Any:
    cls, held = names
    made: Any = cls.__new__(cls)
    for name, value in zip(held, items, strict=True):
        object.__setattr__(made, name, value)
    return made


def leaf_path(path: Sequence[Any]) -> tuple[str | int, ...]:
    """The path of a leaf of (args, kwargs): positional leaves start with their position, keyword ones with their name."""
    return tuple(map(key_name, path[1:]))


def is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Whether it is a tuple, named or not, and nothing else."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(type(value), "_fields"))


def tuple_of(like: tuple[Any, ...], items: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple of the same type, as `is_tuple` has it."""
    return tuple(items) if type(like) is tuple else type(like)(*items)
