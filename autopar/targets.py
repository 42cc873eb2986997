"""TARGET, the way in which every command names a model: `file.py:name` or `package.module:name`.

The name is a callable without arguments that returns `(model, example_inputs)`: an nn.Module and the global batch, a
tuple of positional or a dict of keyword inputs. A module-level `__getattr__` counts as having every name it answers to.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autopar.errors import AutoparError
from autopar.files import is_file

__all__ = ["ExampleInputs", "TargetError", "did_you_mean", "load_object", "load_target"]

ExampleInputs = tuple[Any, ...] | dict[str, Any]
FORM = "a TARGET is file.py:name or package.module:name, a callable that returns (model, example_inputs)"


class TargetError(AutoparError, ValueError):
    """A TARGET that does not lead to a model and its example inputs."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean a or b?' for what is near to name, else '; there is: ...' where that is short, else ''."""
    known = sorted(set(known))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there is: {', '.join(known)}" if 0 < len(known) <= 12 else ""


def load_target(target: str) -> tuple[nn.Module, ExampleInputs]:
    """The model and the example inputs (the global batch) that a TARGET names.

    Raises TargetError, with what was found and near matches, for every way in which it does not lead there; an error of
    the user's own code is told with its place in that code.
    """
    build = load_object(target)
    if isinstance(build, nn.Module):
        raise TargetError(f"{target} is a model ({type(build).__name__}); needed is a callable that returns (model, example_inputs)")
    if not callable(build):
        raise TargetError(f"{target} is {_a(build)}, not a callable; {FORM}")
    needed = _required_arguments(build)
    if needed:
        raise TargetError(f"{target} takes arguments ({', '.join(needed)}); a TARGET is called without any, so give them defaults")
    return _checked(target, _foreign(f"calling {target}", build))


def load_object(target: str) -> Any:
    """What `file.py:name` or `package.module:name` names, without calling it. TargetError if there is no such thing."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(f"{target!r} has no {'name after' if colon and place else 'file or module before'} a colon; {FORM}")
    module = _file(target, Path(place)) if place.endswith(".py") or "/" in place else _module(target, place)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise TargetError(f"{target}: {place} has no {part!r}{did_you_mean(part, _names(found))}") from error
    return found


def _file(target: str, path: Path) -> ModuleType:
    if not is_file(path):
        folder = path.parent
        try:
            found = folder.is_dir()
        except OSError:  # a name that no folder can have
            found = False
        if not found:
            raise TargetError(f"{target}: there is no folder {folder}")
        raise TargetError(f"{target}: there is no file {path}{did_you_mean(path.name, (p.name for p in folder.glob('*.py')))}")
    path = path.resolve()
    name = f"autopar_target_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{target}: {path} is not a Python file; {FORM}")
    _importable_from(path.parent)  # its neighbours, as when it is run as a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _foreign(f"importing {path}", lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    except TargetError:
        del sys.modules[name]
        raise
    return module


def _module(target: str, name: str) -> ModuleType:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise TargetError(f"{target}: {name!r} is not the name of a module; {FORM}")
    _importable_from(Path.cwd())  # as `python -m` does
    module: ModuleType | None = None
    for count in range(1, len(parts) + 1):  # find_spec imports parents itself, and then their errors are not told from ours
        dotted = ".".join(parts[:count])
        folders = [str(Path.cwd())] if module is None else list(getattr(module, "__path__", []))
        if not folders or importlib.util.find_spec(dotted) is None:
            near = [p.stem for folder in folders for p in Path(folder).glob("*.py")]
            raise TargetError(f"{target}: there is no module {dotted!r}{did_you_mean(parts[count - 1], near)}")
        module = _foreign(f"importing {dotted}", lambda: importlib.import_module(dotted))  # noqa: B023  (called at once)
    assert module is not None
    return module


def _importable_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _names(scope: object) -> list[str]:
    """Public names of a module (of what it defines itself, if that is anything) or class; and strings in its lists, which is how a module
    `__getattr__` knows its own."""
    listed = [v for v in vars(scope).values() if isinstance(v, list | tuple)] if isinstance(scope, ModuleType) else []
    names = [n for n in dir(scope) if not n.startswith("_")]
    own = [n for n in names if isinstance(scope, ModuleType) and getattr(vars(scope).get(n), "__module__", None) == scope.__name__]
    return (own or names) + [s for v in listed for s in v if isinstance(s, str)]


def _foreign(what: str, run: Callable[[], Any]) -> Any:
    """Run the user's code; whatever it raises is the user's to see, with its place, and is an input that we cannot use."""
    try:
        return run()
    except AutoparError:
        raise
    except SystemExit as stop:
        raise TargetError(f"{what} ended the program, by sys.exit({'' if stop.code is None else repr(stop.code)})") from stop
    except Exception as error:
        raise TargetError(f"{what} failed\n{_user_traceback(error)}") from error


def _user_traceback(error: Exception) -> str:
    """The traceback without our own frames and those of the import system."""
    shown = traceback.TracebackException.from_exception(error)
    frames = [f for f in shown.stack if f.filename != __file__ and not f.filename.startswith("<frozen importlib")]
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format(chain=False)).rstrip()


def _required_arguments(build: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: calling it will tell
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _checked(target: str, returned: object) -> tuple[nn.Module, ExampleInputs]:
    if not (isinstance(returned, tuple) and len(returned) == 2):
        found = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else _a(returned)
        raise TargetError(f"{target} returned {found}, not (model, example_inputs); {FORM}")
    model, inputs = returned
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} returned {_a(model)} as the model; needed is a torch.nn.Module")
    if isinstance(inputs, Mapping) and not isinstance(inputs, dict):
        inputs = dict(inputs)  # transformers' BatchEncoding
    if not isinstance(inputs, tuple | dict):
        raise TargetError(
            f"{target} returned {_a(inputs)} as the example inputs; needed is a tuple of positional inputs, such as (x,), "
            "or a dict of keyword inputs"
        )
    if not inputs:
        raise TargetError(f"{target} returned no example inputs; give the model's global batch, with the labels if it computes a loss")
    if isinstance(inputs, dict) and not all(isinstance(k, str) for k in inputs):
        raise TargetError(f"{target} returned example inputs with keys that are not argument names: {list(inputs)}")
    return model, inputs


def _a(thing: object) -> str:
    return "None" if thing is None else f"an object of type {type(thing).__name__}"
