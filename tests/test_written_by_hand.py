"""What people's own modules do and library models seldom: functions that close over parts, checkpointing, complex weights, frozen parts."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture, lift_to_float64, to_float64
from autopar.capture.written_out import WRITTEN_OUT
from autopar.compare import worst
from autopar.compiler import plan_of
from autopar.copies import copied
from autopar.errors import CaptureError
from autopar.ir import Program
from autopar.run import WorkerPool
from autopar.run.checkpointed import without_checkpointing
from autopar.run.region import REGION
from autopar.verify import reference, verify_plan

BATCH, DIM, CLASSES = 8, 8, 4
pure, gloo = pytest.mark.pure, pytest.mark.gloo


class Model(nn.Module):
    """A classifier; subclasses change what stands between its first layer and its last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.between(torch.tanh(self.first(x)))), y)


class Closure(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(DIM, 2 * DIM), "down": nn.Linear(2 * DIM, DIM)})
        inner = self.inner
        self.mlp = lambda h: inner["down"](torch.relu(inner["up"](h)))

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.mlp(h)
        return h + out


class WeightNormed(Model):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.inner = nn.utils.weight_norm(nn.Linear(DIM, DIM))

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.inner(h)
        return out


class Fourier(Model):
    def __init__(self) -> None:
        super().__init__()
        self.modes = nn.Parameter(torch.randn(DIM // 4, DIM // 4, dtype=torch.cfloat))

    def between(self, h: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(h)
        kept = torch.zeros_like(spectrum)
        kept[:, : DIM // 4] = torch.einsum("bi,io->bo", spectrum[:, : DIM // 4], self.modes)
        kept[:, -1] = spectrum[:, -1] * self.modes[0, 0]
        return h + torch.fft.irfft(kept, n=DIM)


class Checkpointed(Model):
    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, h, use_reentrant=self.reentrant)
        return h + out


class CheckpointedNow(Checkpointed):
    reentrant = False


class _RunAgain(torch.autograd.Function):
    """Checkpointing written by hand: it frees what it keeps, so that there is no second backward."""

    @staticmethod
    def forward(ctx: Any, function: Any, *given: Tensor) -> Tensor:
        ctx.function, ctx.given = function, given
        with torch.no_grad():
            found: Tensor = function(given[0])
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x = ctx.given[0].detach().requires_grad_()
        with torch.enable_grad():
            found = ctx.function(x)
        back = torch.autograd.grad(found, (x, *ctx.given[1:]), grad)
        del ctx.given
        return None, *back


class CheckpointedByHand(Checkpointed):
    def between(self, h: Tensor) -> Tensor:
        out: Tensor = _RunAgain.apply(self.inner, h, *self.inner.parameters())
        return h + out


class _RunHalf(_RunAgain):
    """Gives half of the gradients that autograd would."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _RunAgain.backward(ctx, grad / 2)


class HalfByHand(Checkpointed):
    def between(self, h: Tensor) -> Tensor:
        out: Tensor = _RunHalf.apply(self.inner, h, *self.inner.parameters())
        return h + out


class Plain(Checkpointed):
    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.inner(h)
        return h + out


class _Routed(nn.Module):
    """Samples go through one of two layers, by their values, and these run again in backward: no graph holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 2), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        weight, chosen = self.gate(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(-1)
            out[rows] = weight[rows, None] * torch.tanh(checkpoint(expert, h[rows], use_reentrant=True))
        return out


class CheckpointedAsWritten(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Routed()

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.inner(h)
        return h + out


class _Slope(nn.Module):
    """The gradient of a score by each sample, as interatomic potentials have forces and critics a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        score = self.score(x)
        return score.squeeze(-1), torch.autograd.grad(score.sum(), x, create_graph=True)[0]


class Slope(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Slope()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        score, slope = self.inner(x)
        return super().forward(x, y) + F.mse_loss(score, y.to(score.dtype)) + ((slope.norm(dim=1) - 1) ** 2).mean()


class FrozenNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM).eval()

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.norm(h)
        return out


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, DIM, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def calls(program: Program) -> list[str]:
    return [op.target for op in program.ops]


@gloo
@pytest.mark.parametrize("pins", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "zero": 1}], ids=str)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # by torch, of checkpoints in evaluation
@pytest.mark.parametrize("model", [Closure, WeightNormed, Fourier, Checkpointed, CheckpointedAsWritten, Slope, FrozenNorm])
def test_they_train_as_on_one_process(model: type[Model], pins: dict[str, Any], workers: WorkerPool) -> None:
    ref = reference(model(), inputs(), later=True)
    report = verify_plan(ref, plan_of(ref.captured, 4, cluster="cpu", pins=pins), workers, timeout_s=120)
    assert report.ok, report
    assert (report.evaluation is None) == (model is Slope)  # which cannot run without gradients
    assert any("without gradients the model itself fails: RuntimeError" in note for note in report.notes) == (model is Slope)
    assert report.batches is not None


# ------------------------------------------------------------------------------------------------------------------ copies
def _through_a_default(model: Closure) -> Callable[[Tensor], Tensor]:
    def mlp(h: Tensor, down: nn.Module = model.inner["down"], up: nn.Module = model.inner["up"]) -> Tensor:
        out: Tensor = down(torch.relu(up(h)))
        return out

    return mlp


def _through_another_function(model: Closure) -> Callable[[Tensor], Tensor]:
    inner = model.mlp
    return lambda h: inner(h)


@pure
@pytest.mark.parametrize("hold", [lambda m: m.mlp, _through_a_default, _through_another_function])
@pytest.mark.parametrize("within", [lambda f: f, lambda f: [f], lambda f: {"f": (f,)}])
def test_functions_of_a_copy_see_the_copy(hold: Callable[[Closure], Any], within: Callable[[Any], Any]) -> None:
    model = Closure()
    model.held = within(hold(model))
    before, other = model(*inputs()).item(), copied(model)

    def call(m: nn.Module) -> Tensor:
        held: Any = m.held
        while not callable(held):
            held = held["f"] if isinstance(held, dict) else held[0]
        out: Tensor = held(torch.ones(1, DIM))
        return out

    assert torch.equal(call(other), call(model))
    with torch.no_grad():
        other.inner["down"].bias.add_(1.0)
    torch.testing.assert_close(call(other), call(model) + 1.0)
    assert model(*inputs()).item() == before
    assert other(*inputs()).item() != before


@pure
def test_hooks_of_a_copy_see_the_copy() -> None:
    model = Closure()
    last = model.last
    model.first.register_forward_hook(lambda module, given, result: result + last.bias.sum())
    other = copied(model)
    with torch.no_grad():
        other.last.bias.add_(1.0)
    x = torch.ones(1, DIM)
    assert torch.allclose(other.first(x), model.first(x) + CLASSES)


@pure
def test_a_weight_that_a_hook_computes_is_no_obstacle() -> None:
    model = WeightNormed()
    expected = model(*inputs())
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model)
    other = copied(model)
    assert torch.equal(other(*inputs()), expected)
    with torch.no_grad():
        other.inner.weight_g.mul_(2.0)
    assert torch.equal(model(*inputs()), expected)
    assert not torch.equal(other(*inputs()), expected)


@pure
def test_what_cannot_be_copied_is_said() -> None:
    model = Model()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"(?s)cannot be copied.*what to do: keep what cannot be copied"):
        copied(model)


# ---------------------------------------------------------------------------------------------------------- complex numbers
@pure
def test_imaginary_parts_are_compared() -> None:
    expected = {"w": torch.tensor([1.0 + 2.0j, 3.0 - 1.0j])}
    assert worst(expected, expected, floor=1e-6) == (0.0, "")
    error, at = worst({"w": expected["w"] + 1e-3j}, expected, floor=1e-6)
    assert (error, at) == (pytest.approx(1e-3 / abs(3.0 - 1.0j), rel=1e-3), "w")
    assert worst({"w": expected["w"].real}, expected, floor=1e-6)[0] > 0.5


@pure
def test_complex_weights_stay_complex_where_a_model_is_lifted() -> None:
    model = Fourier()
    model.register_buffer("turn", torch.tensor(1j))
    modes, parts = model.modes.detach().clone(), {id(p) for p in model.parameters()}
    with lift_to_float64():
        to_float64(model)
    assert {id(p) for p in model.parameters()} == parts
    assert model.modes.dtype == model.get_buffer("turn").dtype == torch.complex128
    assert model.first.weight.dtype == torch.float64
    assert torch.equal(model.modes.detach().to(torch.complex64), modes)


@pure
def test_writes_into_complex_tensors_are_captured_with_their_gradients() -> None:
    captured = capture(Fourier(), inputs())  # which compares loss and gradients with the model's
    written = [k for k, op in enumerate(captured.program.ops) if "_scatter" in op.target]
    assert len(written) == 2
    for k in written:
        assert not captured.program.types[captured.program.ops[k].outputs[0] or ""].dtype.is_complex


# -------------------------------------------------------------------------------------------------------------- checkpointing
@pure
def test_checkpointed_parts_are_captured_as_what_they_compute() -> None:
    plain = calls(capture(Plain(), inputs()).program)
    assert calls(capture(Checkpointed(), inputs()).program) == plain
    assert calls(capture(CheckpointedNow(), inputs()).program) == plain
    assert calls(capture(CheckpointedByHand(), inputs()).program) == plain


@pure
def test_checkpointing_by_hand_in_float32_is_captured_as_what_it_computes() -> None:
    given = tuple(t.float() if t.is_floating_point() else t for t in inputs())
    assert calls(capture(CheckpointedByHand().float(), given).program) == calls(capture(Plain().float(), given).program)


@pure
def test_a_function_that_runs_again_with_other_gradients_is_not_taken_for_checkpointing() -> None:
    with pytest.raises(CaptureError):
        capture(HalfByHand(), inputs())


@pure
def test_buffers_that_a_checkpointed_part_may_change_twice_are_told_of() -> None:
    class Normed(Model):
        def __init__(self, kept: bool) -> None:
            super().__init__()
            self.norm, self.kept = nn.BatchNorm1d(self.first.out_features), kept

        def part(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.first(x)))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            found = self.part(x) if self.kept else checkpoint(self.part, x, use_reentrant=False)
            return F.cross_entropy(self.last(found), y)

    said = [any("torch.utils.checkpoint" in n for n in capture(Normed(kept), inputs()).program.notes) for kept in (False, True)]
    assert said == [True, False]


@pure
def test_a_checkpointed_part_whose_inputs_need_no_gradient_is_given_none() -> None:
    """As use_reentrant=True has it."""

    class First(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.last(checkpoint(self.first, x, use_reentrant=True)), y)

    model = First()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # by which torch says so
        model(*inputs()).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    program = capture(First(), inputs()).program
    assert without == {"first.weight", "first.bias"}
    first = next(op for op in program.ops if "first" in op.module)
    assert not program.types[first.outputs[0] or ""].grad
    assert program.types[program.loss].grad


@pure
@pytest.mark.parametrize("model", [Checkpointed, CheckpointedNow])
def test_a_checkpointed_part_does_not_run_again_on_other_weights(model: type[Checkpointed]) -> None:
    """A module that runs on given weights has its own ones again when backward begins."""
    own = model()
    given = {name: (p + 0.1).detach().requires_grad_() for name, p in own.named_parameters()}
    expected = torch.autograd.grad(functional_call(Plain(), given, inputs()), list(given.values()))
    apply, generator = torch.utils.checkpoint.CheckpointFunction.apply, torch.utils.checkpoint._checkpoint_without_reentrant_generator
    with without_checkpointing():
        loss = functional_call(own, given, inputs())
    assert torch.utils.checkpoint.CheckpointFunction.apply == apply
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is generator
    for found, wanted in zip(torch.autograd.grad(loss, list(given.values())), expected, strict=True):
        assert torch.equal(found, wanted)


# --------------------------------------------------------------------------------------------------- operators, written out
@pure
@pytest.mark.filterwarnings("ignore:The length of signal is shorter")
@pytest.mark.parametrize("center,normalized,two_sides,complex_samples", list(itertools.product((True, False), repeat=4)))
def test_inverse_transforms_of_frames_are_those_of_torch(center: bool, normalized: bool, two_sides: bool, complex_samples: bool) -> None:
    torch.manual_seed(0)
    compared = 0
    for hop, width, length, batch in itertools.product((None, 3), (None, 12), (None, 50, 70), ((), (3,))):
        window = torch.hann_window(width or 16, dtype=torch.float64) + 0.1
        x = torch.randn(*batch, 64, dtype=torch.complex128 if complex_samples else torch.float64)
        onesided = False if two_sides or complex_samples else None
        spectra = torch.stft(
            x, 16, hop, width, window, center=center, normalized=normalized, onesided=onesided, return_complex=True, pad_mode="constant"
        )
        spectra = spectra + 0.1 * torch.randn_like(spectra)
        options: dict[str, Any] = {
            "hop_length": hop, "win_length": width, "window": window, "center": center, "normalized": normalized, "onesided": onesided,
            "length": length, "return_complex": complex_samples,
        }  # fmt: skip
        try:
            expected = torch.istft(spectra, 16, **options)
        except RuntimeError:  # of windows that add up to zero somewhere
            continue
        torch.testing.assert_close(WRITTEN_OUT[torch.istft](spectra, 16, **options), expected)
        compared += 1
    assert compared >= 6


@pure
@pytest.mark.parametrize("reduction,full", [(r, f) for r in ("none", "sum", "mean") for f in (True, False)])
def test_gaussian_losses_are_those_of_torch(reduction: str, full: bool) -> None:
    torch.manual_seed(0)
    mean, target = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    for shape in ((4, 3), (4,), (4, 1)):
        variances = [torch.rand(shape, dtype=torch.float64) for _ in range(2)]
        variances[0].flatten()[0] = 1e-9  # below eps
        variances[1].copy_(variances[0])
        losses = []
        for function, var in zip((WRITTEN_OUT[F.gaussian_nll_loss], F.gaussian_nll_loss), variances, strict=True):
            losses.append(function(mean, target, var.requires_grad_(), full, 1e-6, reduction))
            losses[-1].sum().backward()
        torch.testing.assert_close(losses[0], losses[1])
        torch.testing.assert_close(variances[0].grad, variances[1].grad)
    assert WRITTEN_OUT[F.gaussian_nll_loss](mean, target, 0.5).equal(F.gaussian_nll_loss(mean, target, 0.5))


@pure
@pytest.mark.parametrize("shapes", [((4, 3), (4, 3)), ((4, 3), (3,)), ((3,), (4, 3)), ((4, 1), (1, 3))])
def test_masked_select_is_that_of_torch(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    values, mask = [torch.randn(shapes[0], dtype=torch.float64) for _ in range(2)], torch.rand(shapes[1]) > 0.4
    values[1].copy_(values[0])
    found = [f(x.requires_grad_(), mask) for f, x in zip((WRITTEN_OUT[torch.masked_select], torch.masked_select), values, strict=True)]
    assert 0 < len(found[0]) < mask.expand(torch.broadcast_shapes(*shapes)).numel()
    for x in found:
        (x * torch.arange(len(x))).sum().backward()
    assert found[0].equal(found[1]) and values[0].grad is not None
    torch.testing.assert_close(values[0].grad, values[1].grad)


@pure
def test_selections_by_one_mask_are_of_one_length() -> None:
    class Hidden(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = x > 0.3
            return F.mse_loss(self.first(x).masked_select(hidden), torch.masked_select(x, hidden)) + F.cross_entropy(self.last(x), y)

    program = capture(Hidden(), (torch.randn(BATCH, DIM), torch.randint(CLASSES, (BATCH,)))).program
    assert [op.target for op in program.ops].count(REGION) == 1


@pure
def test_a_gaussian_loss_asks_for_its_variances_in_every_step() -> None:
    class Uncertain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.variance = nn.Linear(6, 1), nn.Linear(6, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.gaussian_nll_loss(self.mean(x), y, F.softplus(self.variance(x)))

    program = capture(Uncertain(), (torch.randn(BATCH, 6), torch.randn(BATCH, 1))).program
    assert [op.target for op in program.ops].count(REGION) == 1


@pure
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_of_transformers_of_torch_makes_them_no_region(causal: bool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
            return F.mse_loss(self.layers(x, mask if causal else mask.tril(1)), y)

    captured = capture(Masked(), (torch.randn(BATCH, 5, 8), torch.randn(BATCH, 5, 8)))  # which compares the program with the model
    assert not any(op.target == REGION for op in captured.program.ops)


@pure
def test_a_loss_on_samples_made_of_a_spectrum_is_captured() -> None:
    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Linear(9, 9)
            self.register_buffer("window", torch.hann_window(16))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            spectrum = torch.stft(x, 16, 4, window=self.get_buffer("window"), return_complex=True)
            masked = spectrum * torch.sigmoid(self.mask(spectrum.abs().transpose(1, 2))).transpose(1, 2)
            return F.mse_loss(torch.istft(masked, 16, 4, window=self.get_buffer("window"), length=x.size(1)), y)

    program = capture(Masking(), (torch.randn(BATCH, 64), torch.randn(BATCH, 64))).program
    assert not any("istft" in op.target for op in program.ops)


# -------------------------------------------------------------------------------------------------- gradients in a forward
@pure
def test_what_asks_for_gradients_runs_as_it_is_written() -> None:
    grad = torch.autograd.grad
    program = capture(Slope(), inputs()).program
    (region,) = [op for op in program.ops if op.target == REGION]
    assert region.module == "inner"
    assert region.kwarg("rows") == (0,)
    assert region.kwarg("flops") == 2 * BATCH * (DIM * DIM + DIM) * 2  # of the score, and of its gradient by the samples
    assert torch.autograd.grad is grad


@pure
def test_a_model_that_asks_for_gradients_itself_is_told_what_to_do() -> None:
    class Itself(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            loss = super().forward(x, y)
            return loss + torch.autograd.grad(loss, x, create_graph=True)[0].pow(2).sum()

    with pytest.raises(CaptureError, match=r"(?s)gradients that it asks for.*grad\(loss, x.*call it in a submodule of Itself"):
        capture(Itself(), inputs())
