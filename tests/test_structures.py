"""Which calls are put together alike, so that one captured form runs for them."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from autopar.run.inputs import Structure, arguments_of, as_programs_take, structure_of

pytestmark = pytest.mark.pure
X, Y = torch.zeros(2), torch.ones(2)


def forward(x: Any, y: Any = None, scale: float | None = 2.0, **more: Any) -> None:
    """As a model's."""


def structure(*args: Any, **kwargs: Any) -> Structure:
    return structure_of(inspect.signature(forward).bind(*args, **kwargs), lambda name: name in ("weight", "kind"))


def test_what_is_the_same_call_is_one_structure() -> None:
    assert structure(X, Y) == structure(Y, y=X) == structure(y=Y, x=X) == structure(X, Y, 2.0)
    assert structure(X) == structure(X, None)
    assert structure({"a": X, "b": Y}) == structure({"a": Y, "b": X})
    assert structure(X, scale=3.0) == structure(X, scale=4.0)  # whose values are compared apart


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((X,), {}), ((X,), {"scale": None})),
        (((X,), {}), ((X, []), {})),
        (((X, []), {}), ((X, ()), {})),
        (((X, []), {}), ((X, {}), {})),
        (((X, [Y]), {}), ((X, [Y, None]), {})),
        (((X, [Y, None]), {}), ((X, [None, Y]), {})),
        ((({"a": X, "b": Y},), {}), (({"b": Y, "a": X},), {})),
        ((({"a": X},), {}), (({"a": X, "b": None},), {})),
        ((({"a": X},), {}), ((OrderedDict(a=X),), {})),
        (((X,), {"a": X, "b": Y}), ((X,), {"b": Y, "a": X})),
        (([[X]], {}), (([[[X]]]), {})),
    ],
)
def test_what_code_may_tell_apart_is_another_structure(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert structure(*one[0], **one[1]) != structure(*other[0], **other[1])


def test_an_attribute_of_a_tensor_that_code_reads_is_refused() -> None:
    tensor = torch.zeros(2)
    tensor.number, tensor._weight = 3, 4  # type: ignore[attr-defined]
    assert structure(tensor) == structure(X)
    tensor.weight = 1.0  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="the attribute weight, which its code may read.*give it to the model as an input"):
        structure([tensor])


def test_numbers_of_numpy_become_those_of_python() -> None:
    args, kwargs = as_programs_take((X, [np.int64(3), None]), {"scale": np.float32(0.5), "flag": np.bool_(True)})
    assert args[0] is X and args[1] == [3, None] and type(args[1][0]) is int
    assert kwargs == {"scale": 0.5, "flag": True} and [type(v) for v in kwargs.values()] == [float, bool]
    assert [type(x) for x in arguments_of((np.float64(0.5), {"a": np.int32(1)}))[0][1].values()] == [int]
    assert as_programs_take((X,), {}) == ((X,), {})
