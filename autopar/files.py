"""Files that commands write: whole or not at all, and never in place of a device, a pipe or a socket."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from pathlib import Path

from autopar.errors import AutoparError

__all__ = ["OutputError", "check_writable", "in_line", "is_file", "write_file"]

MOST_SAID = 300  # characters of a file in an error


class OutputError(AutoparError, OSError):
    """A file that cannot be written; what was there is as it was."""


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file; a name that no file can have is none."""
    try:
        return Path(path).is_file()
    except OSError:
        return False


def in_line(found: object) -> str:
    """What stands in a file, or what another package says of it, as a part of an error: on one line, printable and not long."""
    text = " ".join(str(found).split())
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}..."


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Where a file of this name would be written: what a symbolic link leads to. OutputError if it cannot be."""
    try:
        target = Path(os.path.realpath(path))
        folder = target.parent
        if target.is_dir() or not folder.is_dir():
            raise OutputError(f"cannot write {path}: {'it is a folder' if target.is_dir() else f'there is no folder {folder}'}")
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            raise OutputError(f"cannot write {path}: it is a device, a pipe or a socket, and what is written is a file")
        if not os.access(folder, os.W_OK):
            raise OutputError(f"cannot write {path}: the folder {folder} is not writable")
    except OutputError:
        raise
    except (OSError, ValueError) as error:  # a name that no file can have
        raise OutputError(f"cannot write {str(path)[:200]!r}: {getattr(error, 'strerror', None) or error}") from error
    return target


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, in one step in place of the one that may be there. OutputError if that cannot be done; nothing is left then."""
    target = check_writable(path)
    part = target.with_name(f".autopar-{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(data)
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    except OSError as error:
        room = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            with contextlib.suppress(OSError):
                room = f" ({shutil.disk_usage(target.parent).free / 2**20:.1f} MiB are free there, {len(data) / 2**20:.1f} MiB are needed)"
        raise OutputError(f"cannot write {path}: {error.strerror or error}{room}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
