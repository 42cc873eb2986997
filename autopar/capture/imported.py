"""Modules that a forward imports when it is first called. What an import registers elsewhere (backends in a table that the forward reads)
is done once in a process, and capture puts back what a call has left: so they are imported before a call is looked at.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch

__all__ = ["with_what_is_imported"]

_IMPORTING = ("<frozen importlib", os.path.dirname(importlib.__file__) + os.sep)
_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)

T = TypeVar("T")


class _Wanted(BaseException):
    """Ends a call that is about to import a module. No error: the user's code must not take it for one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def with_what_is_imported(work: Callable[[], T]) -> T:
    """What `work` returns, which calls a model and leaves all else as it was: begun again after each import of a module that code of the
    model is about to do. A module that cannot be imported is left to the code that asks for it."""
    asked = set[str]()
    while True:
        try:
            with _told(asked, sys._getframe()):
                return work()
        except _Wanted as wanted:
            asked.add(wanted.name)
            with contextlib.suppress(Exception):  # of any code
                importlib.import_module(wanted.name)


@contextlib.contextmanager
def _told(asked: set[str], until: FrameType) -> Iterator[None]:
    """Inside, imports of modules that are none of these end what runs. until: the frame that it is run in."""
    finder = _Finder(asked, until)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing. asked: modules of which it is known. until: the frame above which nothing is looked at; other threads have it not."""

    def __init__(self, asked: set[str], until: FrameType) -> None:
        self.asked, self.until = asked, until

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        name, user = self._outermost(fullname)
        if user is None or user.f_code.co_filename.startswith(_NOT_THE_USERS):
            return
        of = user.f_globals.get("__name__", "").partition(".")[0]
        known = sys.stdlib_module_names
        if of not in known and fullname.partition(".")[0] not in known and name not in self.asked:
            raise _Wanted(name)

    def _outermost(self, name: str) -> tuple[str, FrameType | None]:
        """The module that the outermost import asks for, of those that run, and the code that does; None in another thread."""
        frame: FrameType | None = sys._getframe(2)
        user: FrameType | None = None
        while frame is not None and frame is not self.until:
            if frame.f_code.co_filename.startswith(_IMPORTING):
                wanted, before = frame.f_locals.get("name"), frame.f_back
                if isinstance(wanted, str) and not wanted.startswith("."):
                    name = wanted
                if before is not None and not before.f_code.co_filename.startswith(_IMPORTING):
                    user = before
            frame = frame.f_back
        return name, None if frame is None else user
