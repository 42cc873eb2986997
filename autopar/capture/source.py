"""Lines of the user's source: where a traced value or a running call comes from."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
from types import FrameType

import torch
from torch import nn

__all__ = ["first_line", "frame_line", "in_library", "module_of", "paths_of", "running_frame", "running_line", "source_line"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = tuple(os.path.join(os.path.dirname(os.path.dirname(__file__)), name) + os.sep for name in ("capture", "run"))
_FRAME = re.compile(r'File "(.*)", line (\d+), in .*')


def in_library(path: str) -> bool:
    return path.startswith((_TORCH, *_OWN, "<")) or f"{os.sep}contextlib.py" in path


@functools.cache
def source_line(stack_trace: str) -> str:
    """'file.py:12: the code' of the innermost line of a stack trace that is not torch's; '' if there is none."""
    for frame in reversed(_FRAME.findall(stack_trace)):
        path, line = frame
        if not in_library(path):
            return _text(path, int(line))
    return ""


def running_line() -> str:
    """The same of the code that is running now."""
    frame = running_frame()
    return "" if frame is None else frame_line(frame, frame.f_lineno)


def running_frame(name: str | None = None) -> FrameType | None:
    """The innermost running call of a function that is not torch's; name: of one of this name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and ((name is not None and frame.f_code.co_name != name) or in_library(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame


def frame_line(frame: FrameType, line: int) -> str:
    """The same of a line of the code that runs in a frame."""
    return _text(frame.f_code.co_filename, line)


def module_of(frame: FrameType) -> nn.Module | None:
    """The module whose method runs in a frame: what its author calls self."""
    owner = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    return owner if isinstance(owner, nn.Module) else None


def paths_of(model: nn.Module) -> dict[int, str]:
    """The paths of a model's modules, by their ids; the first one of a module that has several."""
    return {id(module): path for path, module in model.named_modules()}


def _text(path: str, line: int) -> str:
    return f"{os.path.basename(path)}:{line}: {linecache.getline(path, line).strip()}".rstrip(": ")


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return f"{type(error).__name__}: {next((line for line in str(error).splitlines() if line.strip()), '')}"
