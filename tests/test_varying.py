"""Numbers that calls have otherwise than one another, and which programs take as inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.held import places
from autopar.capture.interpret import run_whole_program
from autopar.capture.numbers import Numbers as OfTensors
from autopar.capture.state import State
from autopar.capture.varying import Followed, Numbers, in_torch
from autopar.errors import CaptureError, LaunchError
from autopar.reference import reference
from autopar.run import WorkerPool
from autopar.run.varying import NUMBERS, Varying, as_tensor
from benchmarks._traps_run import Judge
from tests.in_turn import in_turn

ALL_WAYS = "own_steps_anneal"
OURS = in_turn("varying", ("tp2",), ("pp2",), without=(ALL_WAYS,)) | {ALL_WAYS: ("tp2", "pp2", "zero3", "dp2mb2", "dp2tp2")}


@pytest.mark.gloo
@pytest.mark.parametrize("name", OURS)
def test_they_are_those_of_one_process(name: str, judge: Judge) -> None:
    assert judge.not_right(name, OURS[name]) == []


class Told(nn.Module):
    """Computes a loss of a tensor and a number by a function of these."""

    def __init__(self, of: Callable[[Tensor, Any], Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.of = of
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 12, dtype=dtype).reshape(3, 4))

    def forward(self, x: Tensor, number: Any) -> Tensor:
        return self.of(x * self.weight, number).sum()


def given(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1.0, 2.0, 12, dtype=dtype).reshape(3, 4)


def program_of(model: nn.Module, x: Tensor, number: float) -> Any:
    return capture(model, (x, number), varying=Varying(arguments=frozenset({("number",)})))


def losses(model: nn.Module, captured: Any, x: Tensor, number: float) -> tuple[Tensor, Tensor]:
    """The program's and the model's."""
    (taken,) = (i.value for i in captured.program.inputs if i.path[0] == NUMBERS)
    (other,) = (i.value for i in captured.program.inputs if i.path[0] != NUMBERS)
    values = {p.value: captured.tensors[p.value] for p in (*captured.program.params, *captured.program.buffers)}
    return run_whole_program(captured.program, {**values, taken: as_tensor(number), other: x})[0], model(x, number)


SAME: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "product": lambda x, n: x * n,
    "product from the left": lambda x, n: n * x,
    "sum": lambda x, n: x + n + (n + x),
    "difference": lambda x, n: (x - n) * (n - x) + torch.sub(x, n),
    "quotient": lambda x, n: x / n + n / (x.square() + 1.0),
    "in place": lambda x, n: x.clone().mul_(n).add_(n).sub_(n / 3).div_(2 * n),
    "comparison": lambda x, n: x * ((x > n).to(x.dtype) + (n >= x).to(x.dtype) * 2 + (x == n).to(x.dtype)),
    "choice": lambda x, n: torch.where(x > 0, x, n),
    "interpolation": lambda x, n: torch.lerp(x, x.square(), n),
    "scaled sum": lambda x, n: torch.add(x, x.square(), alpha=1 - n) + x.sub(x.exp(), alpha=n),
    "as a tensor": lambda x, n: x * torch.tensor(n) + torch.as_tensor(n, dtype=x.dtype),
    "powers": lambda x, n: x * n**2 + x * 0.9**n,
    "functions of math": lambda x, n: x * math.exp(-n) + x * math.cos(math.pi * n) * math.sqrt(n) + math.log(n) + math.tanh(math.sin(n)),
    "signs": lambda x, n: x * -n + abs(n - 1) + (+n),
    "bounds": lambda x, n: x * min(1.0, n) + max(n, 0.01) * x.square(),
}  # fmt: skip


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SAME)
def test_the_program_of_one_number_computes_with_another(name: str, dtype: torch.dtype) -> None:
    model, x = Told(SAME[name], dtype), given(dtype)
    captured = program_of(model, x, 0.3)
    (leaf,) = captured.guards.varied.leaves
    for number in (0.3, 0.7, 0.123456789):
        if captured.guards.varied.changed((number,)) is None:
            found, expected = losses(model, captured, x, number)
            assert found.dtype == expected.dtype
            assert torch.allclose(found, expected, rtol=16 * torch.finfo(dtype).eps, atol=0.0)
    assert leaf.kind is float and captured.guards.varied.changed((1,)) is not None


WHOLE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "quotients": lambda x, n: x * (n // 3) + x * (n % 3) + x * (n / 3) + n * n,
    "of whole tensors": lambda x, n: x + (x.detach() > 0).long() * n + ((x.detach() > 0).long() * n / 7).to(x.dtype),
    "float of whole tensors": lambda x, n: x + ((x.detach() > 0).long() * (n * 0.1)).to(x.dtype),
    "schedule": lambda x, n: x * (1 + math.cos(math.pi * n / 10)) * 0.9**n / (n + 1) ** 0.5,
}  # fmt: skip


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_stay_whole(name: str, dtype: torch.dtype) -> None:
    model, x = Told(WHOLE[name], dtype), given(dtype)
    captured = program_of(model, x, 4)
    assert captured.guards.varied.leaves[0].kind is int and not captured.guards.varied.asked
    for number in (4, 7, 1, 0, 1000):
        found, expected = losses(model, captured, x, number)
        assert found.dtype == expected.dtype
        assert torch.allclose(found, expected, rtol=16 * torch.finfo(dtype).eps, atol=0.0)


ASKED: dict[str, tuple[Callable[[Tensor, Any], Tensor], tuple[float, ...], tuple[float, ...]]] = {
    # what is computed, numbers for which the program of 2.0 holds, numbers for which it does not
    "branch": (lambda x, n: x * n if n > 1.5 else x, (1.6, 9.0), (1.5, -3.0)),
    "truth": (lambda x, n: x * n if n else x, (1.0, -1.0), (0.0,)),
    "whole part": (lambda x, n: x[: int(n)] * n, (2.5, 2.999), (1.9, 3.0)),
    "rounded": (lambda x, n: x * round(n), (2.2, 1.8), (2.6,)),
    "range": (lambda x, n: sum((x for _ in range(math.floor(n))), x), (2.9,), (3.0, 1.5)),
    "text": (lambda x, n: x if f"{n:.1f}" == "2.0" else -x, (2.0,), (2.01, 3.0)),
    "key": (lambda x, n: x * {2.0: 1.0, 3.0: 5.0}[n], (2.0,), (3.0,)),
    "membership": (lambda x, n: x * n if n in (2.0, 3.0) else x, (2.0,), (3.0, 4.0)),
    "most": (lambda x, n: x.clamp(max=n), (2.0,), (1.0,)),
    "power of a tensor": (lambda x, n: (x.square() + 1.0) ** n, (2.0,), (3.0,)),
    "quotient of a number": (lambda x, n: x * (1 / (n - 1.0)), (2.5, 0.5), (1.0,)),
    "its own method": (lambda x, n: x * n if n.is_integer() else x, (2.0,), (3.0,)),
}  # fmt: skip


@pytest.mark.pure
@pytest.mark.parametrize("name", ASKED)
def test_a_program_holds_for_what_its_code_was_told(name: str) -> None:
    of, same, others = ASKED[name]
    model, x = Told(of), given()
    captured = program_of(model, x, 2.0)
    varied = captured.guards.varied
    assert varied.asked
    for number in (2.0, *same):
        assert varied.changed((number,)) is None
        found, expected = losses(model, captured, x, number)
        assert torch.allclose(found, expected, rtol=1e-14, atol=0.0)
    for number in others:
        assert "number" in str(varied.changed((number,)))


@pytest.mark.pure
def test_what_is_asked_exactly_is_told() -> None:
    exactly = program_of(Told(lambda x, n: x.clamp(max=n)), given(), 2.0).guards.varied
    partly = program_of(Told(lambda x, n: x * n if n > 1 else x), given(), 2.0).guards.varied
    assert exactly.fixed.arguments == {("number",)} and not partly.fixed.arguments


@pytest.mark.pure
@pytest.mark.parametrize("of", [lambda x, n: x * n if type(n) is float else x, lambda x, n: x if n is given else x * n.real])
def test_types_are_those_of_numbers(of: Callable[[Tensor, Any], Tensor]) -> None:
    """Where code asks for a number's very type it goes another way in the trace, and is not captured so."""
    model, x = Told(of), given()
    try:
        captured = program_of(model, x, 2.0)
    except CaptureError:
        return
    for number in (2.0, 3.0):
        if captured.guards.varied.changed((number,)) is None:
            found, expected = losses(model, captured, x, number)
            assert torch.equal(found, expected)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 4), 1.0

    def forward(self, x: Tensor, y: Tensor, beta: float = 0.0, *, rounds: int = 1) -> Tensor:
        logits = self.layer(x) * self.scale
        for _ in range(rounds):
            logits = torch.tanh(logits)
        return F.cross_entropy(logits, y) + min(beta, 0.5) * logits.square().mean()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8), torch.randint(4, (6,))


def captures(module: Any) -> int:
    found: int = module._forms._captures
    return found


@pytest.mark.pure
def test_numbers_that_change_do_not_capture_again() -> None:
    """Once where the first one changes, and once where what the code asks of it is answered otherwise."""
    model = Annealed()
    module = autopar.compile(model, gpus=1, example_inputs=(*batch(), 0.0))
    for step in range(10):
        x, y = batch()
        assert torch.allclose(module(x, y, step / 10), F.cross_entropy(
            torch.tanh(model.layer(x)), y) + min(step / 10, 0.5) * torch.tanh(model.layer(x)).square().mean(), rtol=1e-5,
        )  # fmt: skip
    assert captures(module) == 2
    for step in range(10):
        model.scale = 1.0 + step / 10
        module(*batch(), 0.1)
    assert captures(module) <= 4
    before = captures(module)
    for step in range(6):
        module(*batch(), *([step / 20] if step % 2 else []))  # or left to its default
    assert captures(module) <= before + 1
    before = captures(module)
    for rounds in (1, 2, 3, 1, 2, 3, 4):
        module(*batch(), 0.1, rounds=rounds)
    assert captures(module) <= before + 4  # one for each number of rounds


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(8, 4), 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.step += 1
        return F.cross_entropy(self.layer(x), y) * (1 + self.step / 10)


@pytest.mark.pure
def test_a_number_of_the_forward_is_an_input_from_the_first_capture_on() -> None:
    model = Counted()
    model.step = 5
    captured = capture(model, batch())
    assert model.step == 5 and [leaf.name for leaf in captured.guards.varied.leaves] == ["step"]
    module = autopar.compile(model, gpus=1, example_inputs=batch())
    assert model.step == 5
    found = []
    for _ in range(4):
        x, y = batch()
        found.append(module(x, y).item() / F.cross_entropy(model.layer(x), y).item())
    assert model.step == 9 and captures(module) == 0
    assert torch.allclose(torch.tensor(found), torch.tensor([1.6, 1.7, 1.8, 1.9]))


@pytest.mark.pure
def test_a_plan_with_such_numbers_is_not_verified_by_itself() -> None:
    with pytest.raises(CaptureError, match=r"changes step(.|\n)*compare your training loop"):
        reference(Counted(), batch())


@pytest.mark.pure
def test_numbers_that_are_not_there_are_no_inputs() -> None:
    guards = capture(Annealed(), (*batch(), 0.5), varying=Varying(places=frozenset({"nowhere"}))).guards
    assert guards is not None and guards.varied.leaves == ()


@pytest.mark.pure
def test_functions_of_torch_in_python_go_on_with_numbers() -> None:
    model = Annealed()
    numbers = Numbers(Varying(arguments=frozenset({("beta",)})), ((*batch(), 0.5), {}), ("x", "y", "beta"), State.take(model, None))
    (_, _, stand), _ = Followed(numbers, [as_tensor(0.5)], OfTensors()).given((*batch(), 0.5), {})
    x = torch.ones(3)
    assert in_torch(F.gumbel_softmax, (x,), {"tau": stand})[0] is F.gumbel_softmax
    func, args, kwargs = in_torch(torch.mul, (x, stand), {})
    assert torch.equal(func(*args, **kwargs), x * 0.5) and isinstance(args[1], Tensor)
    func, args, kwargs = in_torch(torch.clamp, (x,), {"max": stand})
    assert kwargs == {"max": 0.5} and type(kwargs["max"]) is float


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_meet_low_precision_as_scalars_do(dtype: torch.dtype) -> None:
    """Which a product does not round before, and a sum on a CPU does."""
    model, x = Told(lambda x, n: x * n + (x + n) * 2 - (n - x) / n + n / (x + 4), dtype), given(dtype)
    captured = program_of(model, x, 0.3)
    for number in (0.3, 0.1234567, 1 / 3):
        found, expected = losses(model, captured, x, number)
        assert torch.equal(found, expected)


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0


class Set(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(8, 4), Settings()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), y) * self.settings.scale


@pytest.mark.pure
def test_objects_that_hold_numbers_may_be_put_in_the_place_of_others() -> None:
    model = Set()
    module = autopar.compile(model, gpus=1, example_inputs=batch())
    for scale in (1.0, 2.0, 3.0):
        model.settings.scale = scale
        module(*batch())
    assert captures(module) == 1
    model.settings = Settings()
    x, y = batch()
    assert torch.allclose(module(x, y), F.cross_entropy(model.layer(x), y))
    model.settings.scale = 5.0
    assert torch.allclose(module(x, y), 5.0 * F.cross_entropy(model.layer(x), y))
    assert captures(module) == 1


def told_of_another_number() -> str:
    """What a rank is told that sets a number alone."""
    torch.manual_seed(0)
    model = Annealed()
    module = autopar.compile(model, gpus=2, example_inputs=batch(), cluster="cpu", pins={"dp": 2})
    given = batch()
    for scale in (1.0, 2.0, 3.0 + int(torch.distributed.get_rank())):
        model.scale = scale
        try:
            module(*given).backward()
        except LaunchError as error:
            return str(error)
    return "nothing"


@pytest.mark.gloo
def test_a_number_that_one_rank_sets_alone_is_told(pair: WorkerPool) -> None:
    for told in pair.run(told_of_another_number):
        assert "scale is another on rank 0 than on rank 1: what a forward reads is to be set on all ranks alike" in told


class ForKeys(nn.Module):
    """Has a number for each object of a class that says nothing of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rates = nn.Linear(8, 4), {object(): 1.5}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * sum(self.rates.values())


@pytest.mark.pure
def test_numbers_of_objects_have_the_same_names_in_every_process() -> None:
    """In which the objects are elsewhere in memory: the plan that one rank makes is for all of them."""
    models, named = [ForKeys() for _ in range(2)], []
    for model in models:
        (path,) = (place.path for value, place in places(State.take(model, None).held) if value == 1.5)
        program = capture(model, (batch()[0],), varying=Varying(places=frozenset({path}))).program
        named.append([x.value for x in program.inputs])
    assert named[0] == named[1] and len(named[0]) == 2
