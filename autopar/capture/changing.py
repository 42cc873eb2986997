"""What calls of a model go on changing: what the parallel module can leave, and what is refused, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from autopar.capture.held import Opaque, Shape, is_in
from autopar.capture.left import is_read, of_a_module
from autopar.capture.standing import around
from autopar.capture.state import Change, State
from autopar.errors import CaptureError, NumbersChange, TensorsChange

__all__ = ["attached", "begun_with", "of_earlier_calls", "refuse_changing", "tensors_change"]


def refuse_changing(
    name: str, changes: list[Change], read: Collection[str], *, given: bool = True, start: State | None = None,
    first: State | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """The paths at which each call puts a new tensor that no call reads. CaptureError if anything else is among the changes. given: the
    parallel module can give what is put there; else it is as if it were read, but in attributes. start, first: before the first call and
    after it, to say what there was."""
    written, wrong = [], []
    for change in changes:
        if (given or of_a_module(change.path)) and _is_output(change) and change.path not in read:
            written.append(change.path)
        else:
            wrong.append(change)
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        said = (
            f"each call of {name} changes {'; '.join(map(str, wrong[:3]))}{more}: state that is not in a buffer, which a graph does not "
            f"have\n  what to do: {_remedy(wrong, start)}"
        )
        if all(change.of_numbers for change in wrong):
            raise NumbersChange(said, [change.path for change in wrong])
        tensors = [change.path for change in wrong if isinstance(change.before, torch.Tensor)]
        if tensors and start is not None and first is not None:
            raise tensors_change(said, tensors, start, first)
        raise TensorsChange(said, tensors) if tensors else CaptureError(said)
    return tuple(written)


def tensors_change(said: str, paths: Sequence[str], start: State, first: State, *, attached: bool = False) -> TensorsChange:
    """What is raised of tensors that calls leave at some places. start, first: before the first call and after it."""
    attached = attached or any(t.grad_fn is not None for path, t in first.tensors.items() if path in paths)
    return TensorsChange(said, paths, attached=attached, **begun_with(paths, start, first))


def begun_with(paths: Iterable[str], start: State, first: State) -> dict[str, frozenset[str]]:
    """What a program reads that holds for what stands now at some places at which calls leave something else: `begun` and `marks` of
    StateChanges. start, first: as of `tensors_change`."""
    begun = [path for path in paths if not isinstance(start.leaves.get(path), torch.Tensor)]
    marks = [c.path for c in start.changes(first) if isinstance(c.after, bool | str) and is_read(c.path, start)]
    return {"begun": around(first, begun), "marks": around(first, marks)}


def attached(start: State, first: State, *_: State) -> Callable[[str], TensorsChange] | None:
    """What a second call fails with that goes back through a first one, whose tensors stand in attributes; None where there are none."""
    paths = [c.path for c in start.changes(first) if isinstance(c.after, torch.Tensor) and c.after.grad_fn is not None]
    return (lambda said: tensors_change(said, paths, start, first, attached=True)) if paths else None


def _remedy(changes: Sequence[Change], start: State | None) -> str:
    """What to do about state that goes on changing. start: as of `refuse_changing`."""
    if any(isinstance(c.before, Shape) and isinstance(c.after, Shape) and c.before.size != c.after.size for c in changes):
        return "return what is kept there (with outputs='all'), and let the loop keep it"
    registered = "registered as a buffer (register_buffer; buffers are followed when the forward assigns or changes them)"
    tensors = [change.path for change in changes if isinstance(change.before, torch.Tensor)]
    if any(path.endswith("]") for path in tensors):
        return f"keep each tensor in an attribute of its own, {registered}"
    if start is not None and any(not isinstance(start.leaves.get(path), torch.Tensor) for path in tensors):
        return f"let it begin with a tensor of its shape, {registered}; or call the model once before compiling it"
    return f"keep it in a tensor {registered}, or change it outside of the forward: let the loop set it before the call"


def _is_output(change: Change) -> bool:
    before, after = change.before, change.after
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before is not after
    return isinstance(before, Opaque) and isinstance(after, Opaque) and type(before.value) is type(after.value)


def of_earlier_calls(state: State, tensor: object) -> list[str]:
    """The places at which an earlier call has left a tensor through which gradients go, if this is one of them, and what is around it."""
    left = {path: t for path, t in state.tensors.items() if t.grad_fn is not None}
    there = around(state, [path for path, t in left.items() if t is tensor])
    return [path for path in left if is_in(path, there)]
