"""What is public: docstrings that say what is raised, and bounds that are said with the remedy."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autopar

pytestmark = pytest.mark.pure


AS = re.compile(r"\b([Aa]s (of|in|the|nn)|([Ii]ts|other)\s+arguments)\b")  # said where it is at home
OF_THE_WHOLE = ("autopar.checkpoint", "autopar.watch", "autopar.integrations.trainer", "autopar.integrations.accelerate",
                "autopar.integrations.lightning")  # fmt: skip


def test_public_docstrings_say_what_is_raised() -> None:
    """Of every public name, and of the public methods of public classes: there is one, and it names each error that the code raises."""
    silent = []
    for title, member in _public():
        doc = inspect.getdoc(member) or ""
        raised = {error for made in _made_by(member) for error in re.findall(r"raise (\w+)\(", inspect.getsource(made))}
        if not doc or not all(error in doc for error in raised):
            silent.append((title, sorted(error for error in raised if error not in doc)))
    assert not silent


def test_public_docstrings_name_every_argument() -> None:
    """With what it is, or where that is said; those whose name is all there is to say (a path, a model) too."""
    silent = []
    for title, member in _public(ours=True):
        doc = inspect.getdoc(member) or ""
        for made in _made_by(member):
            named = [p.name for p in inspect.signature(made).parameters.values() if p.name != "self" and not p.name.startswith("_")]
            missing = [name for name in named if not re.search(rf"\b{name}\b", doc)]
            if missing and not AS.search(doc):
                silent.append((title, missing))
    assert not silent


def _public(*, ours: bool = False) -> Iterator[tuple[str, Any]]:
    """Public names of autopar and of the modules that people import, with the public methods and properties of classes; not what says
    nothing of its own of a method of torch's. ours: no method of another library's class, whose arguments are said there."""
    names = [(name, getattr(autopar, name)) for name in autopar.__all__]
    for place in OF_THE_WHOLE:
        module = importlib.import_module(place)
        names += [(f"{place}.{name}", getattr(module, name)) for name in module.__all__]
    for name, found in names:
        members = [(name, found)]
        if inspect.isclass(found):
            above = {k for base in found.__mro__[1:] if not base.__module__.startswith("autopar") for k in vars(base)}
            own = [(k, m) for k, m in vars(found).items() if not k.startswith("_") and (k not in above or (m.__doc__ and not ours))]
            members += [(f"{name}.{k}", m) for k, m in own]
        for title, member in members:
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(member) or inspect.isclass(member):
                yield title, member


def _made_by(member: Any) -> Iterator[Any]:
    """The functions of ours that run when it is called."""
    for made in (member.__init__, getattr(member, "__post_init__", None)) if inspect.isclass(member) else (member,):
        code = getattr(inspect.unwrap(made), "__code__", None) if made is not None else None
        if code is not None and "autopar" in code.co_filename:
            yield made


def test_the_forms_of_a_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another length each time is another captured program each time. The user hears of it, and those that ran last are kept."""
    monkeypatch.setattr("autopar.run.forms.FORMS", 3)
    monkeypatch.setattr("autopar.run.forms.MANY", 3)
    layer = torch.nn.Linear(4, 4)
    model = autopar.compile(layer, 1, example_inputs=(torch.ones(2, 4),), loss=lambda out: out.square().mean(), cluster="cpu")
    forms, seen = model._forms, list[int]()

    def trained(size: int) -> None:
        x = torch.randn(size, 4)
        loss = model(x)
        torch.testing.assert_close(loss, layer(x).square().mean())
        loss.backward()
        seen.append(forms._captures)

    for size in (2, 3, 4, 2, 3):
        trained(size)
    assert seen == [0, 1, 2, 2, 2]
    with pytest.warns(UserWarning, match=r"captured again 3 times.*pad sequences to a few lengths \(autopar.Padding\)"):
        trained(5)  # in place of 4, which ran before 3
    for size in (2, 3, 5, 4, 2):  # 4 anew, in place of 3; the first is always there
        trained(size)
    assert seen[6:] == [3, 3, 3, 4, 4]
    assert sum(map(len, forms._made.values())) == len(forms._used) == 3


def test_a_number_that_changes_at_every_step_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.run.forms.FORMS", 3)

    class Annealed(torch.nn.Linear):
        beta = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean() + self.beta * self.weight.square().sum()

    layer, x = Annealed(4, 4), torch.randn(2, 4)
    model = autopar.compile(layer, 1, example_inputs=(x,), cluster="cpu")
    for step in range(7):
        model.beta = 0.5**step
        torch.testing.assert_close(model(x), layer(x))
    assert sum(map(len, model._forms._made.values())) == 3
