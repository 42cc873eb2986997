"""What is public: docstrings that say what is raised, and bounds that are said with the remedy."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import autopar

pytestmark = pytest.mark.pure


def test_public_docstrings_say_what_is_raised() -> None:
    """Of every public name, and of the public methods of public classes: there is one, and it names each error that the code raises."""
    silent = []
    for name in autopar.__all__:
        found = getattr(autopar, name)
        members = [(name, found)]
        if inspect.isclass(found):
            members += [(f"{name}.{k}", m) for k, m in vars(found).items() if not k.startswith("_")]
        for title, member in members:
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not (inspect.isfunction(member) or inspect.isclass(member)):
                continue
            doc = inspect.getdoc(member) or ""
            source = inspect.getsource(member.__init__ if inspect.isclass(member) else member) if _is_ours(member) else ""
            raised = set(re.findall(r"raise (\w+)\(", source))
            if not doc or not all(error in doc for error in raised):
                silent.append((title, sorted(error for error in raised if error not in doc)))
    assert not silent


def _is_ours(member: Any) -> bool:
    code = getattr(member.__init__ if inspect.isclass(member) else member, "__code__", None)
    return code is not None and "autopar" in code.co_filename


def test_the_forms_of_a_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another length each time is another captured program each time, until that is an error that says what to do."""
    monkeypatch.setattr("autopar.run.module.FORMS", 3)
    layer = torch.nn.Linear(4, 4)
    model = autopar.compile(layer, 1, example_inputs=(torch.ones(2, 4),), loss=lambda out: out.square().mean(), cluster="cpu")
    for size in (2, 3, 4, 2, 3):
        model(torch.ones(size, 4)).backward()
    with pytest.raises(ValueError, match=r"has been captured 3 times.*pad sequences to a few lengths \(autopar.Padding\)"):
        model(torch.ones(5, 4))
    model(torch.ones(4, 4)).backward()
