"""`autopar.save`: the state of a model and its optimizer, by all ranks, at once or beside training."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.checkpoint.boxes import Box, boxes_of, whole_box
from autopar.checkpoint.index import Contents
from autopar.checkpoint.optimizers import Optimizers, as_optimizers, groups_and_state
from autopar.checkpoint.planners import Held, write
from autopar.checkpoint.storage import Writer, told
from autopar.checkpoint.subjects import Subject, subject_of
from autopar.checkpoint.values import encode
from autopar.errors import CheckpointError, LaunchError
from autopar.progress import working
from autopar.run import watchdog
from autopar.run.groups import finish_first, released_at_exit
from autopar.run.part import is_part, lies_of, local
from autopar.run.record import CHECKPOINT, SAVING, WAITS, WORKS, doing, entered, saving_beside
from autopar.run.together import done_by_all

__all__ = ["Saving", "finish", "prepared_by_all", "save"]

T = TypeVar("T")
_under_way: list[Saving] = []  # the last asynchronous save


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers = None, *, async_save: bool = False, **extra: Any
) -> Saving | None:
    """Write a checkpoint to the folder `path`, in place of the one that may be there.

    model: what autopar.compile has returned (then all ranks call this together, with a folder that all of them see), or a plain module on
    one process. optimizer: its state is saved too; several, as a list, each with parameters of its own. extra: what else belongs to the
    run, by name: numbers, text, tensors, NumPy arrays, and lists, tuples, sets and dicts of them, such as the state_dict() of a scheduler,
    a GradScaler or a sampler, and torch.get_rng_state(). Rank 0's is kept, and is what load() gives to all ranks.

    Under the original model's names: parameters, persistent buffers and what modules give as get_extra_state(), as in its state_dict();
    the optimizer's states and groups by the names of parameters; and where the random numbers of a parallel module are. Each rank writes
    parts that no other writes. It can be loaded under any other plan and number of processes (`load`), and is data: nothing in it is a
    pickle. What state_dict() leaves out (buffers that are not persistent, attributes) is not in it.

    The checkpoint that was there stays whole until the new one is complete: a process may be killed at any time. async_save: what is saved
    is copied to the memory of the host, and written by a thread while training goes on; result() of what is
    returned waits until it is complete, and raises its error. The next save or load does so too, if nobody has.

    Raises CheckpointError on every rank if it cannot be written on one of them (no room, a folder that is not shared, a value of a kind
    that is not kept); the checkpoint that was there is then as it was.
    """
    with doing(SAVING, CHECKPOINT):
        return _save(Path(path), model, optimizer, async_save, extra)


def _save(folder: Path, model: nn.Module, optimizer: Optimizers, async_save: bool, extra: Mapping[str, Any]) -> Saving | None:
    before = finish()
    subject = subject_of(model, write=True)

    def prepare() -> tuple[dict[str, Held], Contents, str]:
        if before is not None:
            raise before
        return _prepared(folder, subject, as_optimizers(optimizer), extra, staged=async_save)

    held, contents, save_id = prepared_by_all(subject, prepare, "saving")
    writer = Writer(folder, subject.agreed(save_id), subject.rank, _writing_beside if async_save else contextlib.nullcontext)
    if not async_save:
        entered(CHECKPOINT)
        with working(f"saving {folder}"):
            write(writer, held, contents, subject.group)
        return None
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="autopar-save")
    released_at_exit()
    finish_first(_wait)

    def write_beside() -> None:
        try:
            write(writer, held, contents, subject.group)
        finally:
            saving_beside(0)

    saving_beside(WAITS)  # before the thread begins: what must not run beside it looks here
    going = Saving(executor.submit(write_beside), folder)
    executor.shutdown(wait=False)
    _under_way.append(going)
    return going


@contextlib.contextmanager
def _writing_beside() -> Iterator[None]:
    saving_beside(WORKS)
    yield
    saving_beside(WAITS)


class Saving:
    """A save to `folder` that a thread does (future: that). Its error is raised once: by result(), or by the next save or load."""

    def __init__(self, future: Future[None], folder: Path) -> None:
        self._future, self._folder, self._said = future, folder, False

    def __repr__(self) -> str:
        return f"Saving({str(self._folder)!r}, {'done' if self.done() else 'under way'})"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def result(self) -> None:
        """Wait until the checkpoint is complete. Raises CheckpointError if it could not be written."""
        try:
            with doing(SAVING, CHECKPOINT):  # so that an end of other ranks is told from an error of this one
                self._future.result()
        finally:
            self._said = True

    def unsaid(self) -> BaseException | None:
        """Wait; the error that it ended with, if nobody has been told."""
        error = self._future.exception()
        if self._said:
            return None
        self._said = True
        return error


def finish() -> BaseException | None:
    """Wait for an asynchronous save. Returns an error of it that nobody has been told, for all ranks to raise: some may have been."""
    return _under_way.pop().unsaid() if _under_way else None


def _wait() -> None:
    if (error := finish()) is not None and not watchdog.followed():  # another rank has gone, which has been said
        print(f"autopar: a save that was going on has failed: {error}", file=sys.stderr, flush=True)


def prepared_by_all(subject: Subject, make: Callable[[], T], what: str) -> T:
    """make() on this rank; where the subject is on several, an error on one of them is a CheckpointError on all."""
    if subject.group is None:
        return make()
    try:
        return done_by_all(make, same=lambda _: "", what=what)
    except LaunchError as error:
        raise CheckpointError(str(error)) from error


def _prepared(
    folder: Path, subject: Subject, optimizers: tuple[Any, ...], extra: Mapping[str, Any], *, staged: bool
) -> tuple[dict[str, Held], Contents, str]:
    """What this rank holds by key, what is no tensor, and a new name for the save."""
    with told(f"cannot save to {folder}", folder):
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"cannot save to {folder}: it is a file, and a checkpoint is a folder")
    kept = _Kept(subject, staged=staged)
    for name, one in subject.tensors.items():
        kept.add(f"model.{name}", one.shape, one.here, one.boxes)
    groups, state = groups_and_state(optimizers, subject, kept.keep) if optimizers else (None, {})
    contents = Contents(
        names=tuple(subject.tensors),
        tied={alias: one.name for one in subject.tensors.values() for alias in one.aliases},
        groups=groups,
        state=state,
        module_state=_of_rank_0(subject, kept, "module_state", {n: m.get_extra_state() for n, m in subject.module_state.items()}),
        extra=_of_rank_0(subject, kept, "extra", extra),
        stream=subject.stream,
        config=subject.config,
    )
    kept.wait()
    return kept.held, contents, secrets.token_hex(8)


def _of_rank_0(subject: Subject, kept: _Kept, what: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if subject.rank != 0:
        return {}
    return {name: encode(value, f"{what}.{name}", kept.keep_whole) for name, value in values.items()}


class _Kept:
    """The tensors of a checkpoint as this rank holds them. staged: copies on the CPU, which training does not change."""

    def __init__(self, subject: Subject, *, staged: bool) -> None:
        self._subject, self._staged = subject, staged
        self._copying: set[torch.device] = set()
        self.held: dict[str, Held] = {}

    def add(self, key: str, shape: tuple[int, ...], here: Tensor, boxes: tuple[Box, ...]) -> None:
        if self._staged and boxes and self._subject.writes:
            here = self._copied(here.detach())
        self.held[key] = Held(shape=shape, here=here, boxes=boxes if self._subject.writes else ())

    def _copied(self, here: Tensor) -> Tensor:
        """On the CPU. From a GPU to pinned memory, one copy behind another, for which `wait` waits once."""
        if here.device.type != "cuda":
            return here.to("cpu", copy=True)
        host = torch.empty(here.shape, dtype=here.dtype, device="cpu", pin_memory=True)
        host.copy_(here, non_blocking=True)
        self._copying.add(here.device)
        return host

    def wait(self) -> None:
        """All copies are there."""
        for device in self._copying:
            torch.cuda.current_stream(device).synchronize()
        self._copying.clear()

    def keep(self, path: str, tensor: Tensor) -> str:
        """A tensor that all ranks have, or parts of it."""
        if not is_part(tensor):
            return self.keep_whole(path, tensor)
        lies = lies_of(tensor)  # type: ignore[arg-type]
        return self._added(path, tuple(lies.shape), local(tensor), boxes_of(lies.spans()))

    def keep_whole(self, path: str, tensor: Tensor) -> str:
        if is_part(tensor):
            raise CheckpointError(
                f"{path} is a part of {lies_of(tensor).name}, which several ranks hold: "  # type: ignore[arg-type]
                f"give a whole tensor, as full_state_dict() has it"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta" or hasattr(tensor, "device_mesh"):
            what = f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}"
            raise CheckpointError(f"{path} is a tensor that is not plain memory ({what})")
        plain = tensor.detach().as_subclass(Tensor)
        return self._added(path, tuple(plain.shape), plain, whole_box(plain.shape))

    def _added(self, path: str, shape: tuple[int, ...], here: Tensor, boxes: tuple[Box, ...]) -> str:
        key, number = path, 1
        while key in self.held:  # names may have dots in them
            number += 1
            key = f"{path}~{number}"
        self.add(key, shape, here, boxes)
        return key
