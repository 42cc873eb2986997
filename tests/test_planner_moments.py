"""Micro-batches and stages compute what the whole program computes: every legal cut is run, operator by operator, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture, run_op, run_program
from autopar.ir import Lowered, Program, Span, refs
from autopar.planner.moments import NotSplittable, derived_from_inputs, split_into_moments
from autopar.planner.stages import cut_stages, legal_cuts, segments_of
from tests.planner_programs import captured_of, program_of

pytestmark = pytest.mark.pure


def _leaves(program: Program, name: str) -> dict[str, Tensor]:
    """Fresh parameters and buffers, and the whole batch. What is drawn from here on is the same each time."""
    captured, inputs = captured_of(name, exact=True)
    torch.manual_seed(1)
    values = {v: t.detach().clone() for v, t in captured.tensors.items()}
    for p in program.params:
        values[p.value].requires_grad_(p.trainable)
    return values | {x.value: inputs[str(x.path[0])] for x in program.inputs if x.path}


def _whole(program: Program, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    values = _leaves(program, name)
    loss = run_program(program, values)
    loss.backward()
    return loss.detach(), {p.value: values[p.value].grad for p in program.params}


def _in_parts(lowered: Lowered, program: Program, name: str, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The prologue once, then every micro-batch through every stage; a stage sees leaves, what the prologue made and what it
    receives, and nothing else."""
    values = _leaves(program, name)
    lies = lowered.program.layouts.get("time", {})
    for op in lowered.prologue:
        values.update((o, t) for o, t in zip(op.outputs, run_op(op, values), strict=True) if o is not None)
    total = torch.zeros((), dtype=torch.float64)
    inputs = {x.value for x in program.inputs} | set(lowered.prologue_outputs)
    for k in range(count):
        here = {v: t for v, t in values.items() if v not in inputs}
        for v in inputs:
            x = lies.get(v)
            here[v] = values[v].chunk(count, x.dim)[k] if x is not None and x.is_shard else values[v]
        sent: dict[str, Tensor] = {}
        for stage in lowered.stages:
            env = here | {v: sent[v] for v in stage.receives}
            for op in stage.ops:
                env.update((o, t) for o, t in zip(op.outputs, run_op(op, env), strict=True) if o is not None)
            sent = {v: env[v] for v in stage.sends}
        (loss,) = sent.values()
        total = total + loss.detach()
        loss.backward()
    return total, {p.value: values[p.value].grad for p in program.params}


@pytest.mark.parametrize("name", ["mlp", "attention", "expanded", "places", "skips", "stack"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_legal_cut_computes_the_whole(name: str, count: int) -> None:
    program = captured_of(name, exact=True)[0].program
    loss, gradients = _whole(program, name)
    moments = split_into_moments(program, count)
    cuts = legal_cuts(moments.body)
    assert cuts.crossing
    positions = list(cuts.crossing)
    some = positions if name != "stack" else positions[:: 1 + 2 * count]
    for cut in [(), *((p,) for p in some), tuple(positions[:: max(1, len(positions) // 3)][:3])]:
        lowered = cut_stages(moments, moments.body, cut, {})
        assert len(lowered.stages) == len(cut) + 1
        total, found = _in_parts(lowered, program, name, count)
        torch.testing.assert_close(total, loss, rtol=1e-12, atol=1e-12)
        for v, g in gradients.items():
            torch.testing.assert_close(found[v], g, rtol=1e-10, atol=1e-12, msg=lambda m, v=v, cut=cut: f"{v} cut at {cut}: {m}")


@pytest.mark.parametrize("name", ["mlp", "attention", "skips", "stack", "tied", "normed", "balanced"])
def test_what_crosses_a_cut_has_a_gradient(name: str) -> None:
    """And it is no leaf, nothing that derives from inputs alone, and all that later operators need of earlier ones."""
    program = program_of(name)
    derived = derived_from_inputs(program)
    leaves = {x.value for x in (*program.inputs, *program.params, *program.buffers)}
    made = [{o for op in program.ops[:k] for o in op.outputs} for k in range(len(program.ops) + 1)]
    for position, values in legal_cuts(program).crossing.items():
        assert all(program.types[v].grad for v in values)
        needed = {r for op in program.ops[position:] for r in refs(op)} & made[position]
        assert set(values) == needed - derived - leaves
        assert len(set(values)) == len(values)


def test_an_integer_of_differentiable_values_forbids_a_cut() -> None:
    program = program_of("skips")
    position = {op.target: k for k, op in enumerate(program.ops)}
    made, used = position["aten.argmax.default"], position["aten.remainder.Scalar"]
    crossing = legal_cuts(program).crossing
    assert not [p for p in crossing if made < p <= used]
    with pytest.raises(Exception, match="cannot be cut before operator"):
        cut_stages(split_into_moments(program, 1), program, (used,), {})


def test_losses_over_labelled_tokens_are_counted_in_the_prologue() -> None:
    """The number of labels that count differs from micro-batch to micro-batch: it is that of the whole step in all of them."""
    program = program_of("stack")
    moments = split_into_moments(program, 4)
    assert moments.prologue and moments.prologue_outputs
    derived = derived_from_inputs(program)
    assert all(o in derived for op in moments.prologue for o in op.outputs)
    assert all(moments.prologue_types[v] == program.types[v] for v in moments.prologue_outputs)
    assert moments.body.batch_size == (program.batch_size or 0) // 4
    assert not any(op.target.startswith("autopar.C.") for op in moments.body.ops)


def test_what_sizes_decide_is_made_for_each_micro_batch() -> None:
    """A mask that is expanded over the samples takes the memory of those of one micro-batch, and a token is repeated for these."""
    moments = split_into_moments(program_of("expanded"), 4)
    assert not moments.prologue_outputs
    made = {op.target: moments.body.types[op.name].shape for op in moments.body.ops}
    assert made["aten.where.ScalarOther"] == (1, 4, 8, 8) and made["aten.repeat.default"] == (1, 1, 16)


@pytest.mark.parametrize(
    "name,count,reason",
    [
        ("normed", 2, "'norm.running_mean' from the statistics of the whole batch"),
        ("spectral", 2, r"'layer.parametrizations.weight.0._u' once for all of the batch"),
        ("balanced", 2, r"aten.mul.Tensor \(operands P, P over the micro-batches\) mixes samples at .*balance ="),
        ("mlp", 3, "the batch of 8 a rank does not divide into 3 micro-batches"),
    ],
)
def test_what_is_no_sum_over_samples_is_not_split(name: str, count: int, reason: str) -> None:
    with pytest.raises(NotSplittable, match=reason):
        split_into_moments(program_of(name), count)


def test_one_micro_batch_is_the_program_itself() -> None:
    for name in ("normed", "balanced", "stack"):
        moments = split_into_moments(program_of(name), 1)
        assert moments.body is program_of(name) and not moments.prologue


def test_derived_values_are_made_on_every_stage_that_reads_them() -> None:
    program = program_of("stack")
    first = program.blocks[0].spans[2].start
    lowered = cut_stages(split_into_moments(program, 1), program, (first,), {})
    assert lowered.stages[1].receives == lowered.stages[0].sends and len(lowered.stages[0].sends) == 1
    for stage in lowered.stages:
        assert "aten.cos.default" in [op.target for op in stage.ops]


def test_a_tied_parameter_stands_on_both_stages() -> None:
    program = program_of("stack")
    (tied,) = [p.value for p in program.params if p.aliases]
    lowered = cut_stages(split_into_moments(program, 2), split_into_moments(program, 2).body, (12,), {})
    readers = [any(tied in refs(op) for op in stage.ops) for stage in lowered.stages]
    assert readers == [True, True] and tied not in lowered.stages[0].sends


@pytest.mark.parametrize("wanted", [1, 2, 4, 8])
def test_segments_cover_the_program_between_legal_cuts(wanted: int) -> None:
    program = program_of("stack")
    cuts = legal_cuts(program)
    segments = segments_of(program, cuts, wanted).segments
    assert [s.span.start for s in segments[1:]] == [s.span.stop for s in segments[:-1]]
    assert segments[0].span.start == 0 and segments[-1].span.stop == len(program.ops)
    assert len(segments) >= wanted and all(s.span.start in cuts.crossing for s in segments[1:])


def test_blocks_that_are_cut_are_no_calls_and_others_are() -> None:
    program = program_of("stack")
    block = program.blocks[0]
    every = (Span(0, len(block.spans[0])),)
    whole = cut_stages(split_into_moments(program, 1), program, (), {(0, 1): every, (0, 3): every})
    assert [(c.instance, c.recomputed_whole) for c in whole.stages[0].calls] == [(0, False), (1, True), (2, False), (3, True)]
    inside = block.spans[1].start + 2
    cut = cut_stages(split_into_moments(program, 1), program, (inside,), {})
    assert [[c.instance for c in stage.calls] for stage in cut.stages] == [[0], [2, 3]]


@pytest.mark.parametrize("loss", [F.binary_cross_entropy_with_logits, F.mse_loss, F.soft_margin_loss])
def test_labels_that_are_the_same_for_all_are_made_for_each_sample(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As of a discriminator, of which all samples are true."""

    class Discriminator(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return loss(super().forward(x), torch.ones(len(x), 1)) + F.cosine_embedding_loss(x * self.weight, x, torch.ones(len(x)))

    moments = split_into_moments(capture(Discriminator(6, 1), (torch.randn(8, 6),)).program, 4)
    assert not moments.prologue
    assert [op.args[0] for op in moments.body.ops if op.target == "aten.ones.default"] == [(2, 1), (2,)]
