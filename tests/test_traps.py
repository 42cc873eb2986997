"""A few of the programs of `python -m benchmarks traps`, and whether their judge notices what it is there for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import CaptureError, LaunchError, RenderError
from autopar.run.inputs import micro_batch
from benchmarks import traps
from benchmarks._traps import PROGRAMS
from benchmarks._traps_run import PLANS, USUAL, Judge, Outcome, _described, _stopped, differences, run_program
from tests.in_turn import one_for

PROGRAMS_HERE = (
    "a_copy_used_after_training", "accumulated_by_the_user", "adversarial_inputs", "attention_looked_at", "attribute_written_through_data",
    "backend_imported_by_the_first_call", "bad_batches_that_the_loop_skips", "batch_in_a_dataclass", "batch_norm",
    "batch_norm_under_two_names", "bound_that_lets_gradients_through", "branch_of_who_compiles_by_another_name",
    "buffer_becomes_the_last_batch", "buffer_that_a_schedule_holds", "buffers_become_one_another", "buffers_become_what_is_drawn",
    "centred_anew_midway", "checkpoint_around_first_calls", "checkpoint_around_the_whole", "clipped_norm",
    "dataclasses_in_lists_of_a_dataclass", "dict_in_another_order", "dict_that_is_given_again", "dict_that_is_given_is_written_to",
    "experts_by_sizes_taken_into_python", "figures_of_states", "flag_on_a_weight_read_as_written", "flag_switches_a_branch",
    "forward_that_asks_for_ranks", "frozen_codes_moved_by_the_batch", "frozen_midway", "frozen_network_as_a_loss", "function_given_a_layer",
    "function_that_gives_a_tower_nothing", "fused_layers", "gain_given_to_a_weight_later", "gathered_by_a_function_under_another_name",
    "generator_set_back", "grad_scaler", "gradients_averaged_by_hand", "gradients_averaged_in_other_ways",
    "gradients_by_autograd_with_hooks", "gradients_looked_at_before_backward", "heads_trained_in_turns",
    "hook_of_a_weight_without_a_gradient", "hook_that_scales_after_compile", "hooks_in_a_loop_and_one_by_a_setting",
    "hooks_of_several_gradients", "hooks_on_weights_before_the_first_call", "input_that_is_a_leaf", "keywords_beside_any_number_of_tensors",
    "label_smoothing_with_ignored_labels", "labels_of_another_dtype_later", "lamb", "low_rank_adapters", "methods_of_the_root_overridden",
    "momentum_contrast", "noise_in_new_tensors_of_its_size", "none_in_place_of_a_default", "object_of_which_there_is_one",
    "one_tensor_in_the_example_alone", "optimizer_before_compile", "optimizer_of_an_operator_that_writes",
    "optimizer_whose_step_is_compiled_as_one_graph", "original_called_in_training_mode", "outputs_in_a_dict_with_attributes",
    "own_weight_as_an_input", "padding_pooled_in_evaluation", "parameter_left_in_a_global", "parameter_that_a_function_gives_no_gradient",
    "parameters_in_a_list_too", "parameters_in_other_objects_too", "parametrised_in_each_call", "part_that_has_a_layer_under_two_names",
    "parts_of_a_sequence", "pattern_that_the_loop_goes_through", "penalty_left_on_a_layer_of_torch", "pointer_into_a_queue",
    "property_over_a_slot", "pruned_in_turns_with_all_that_is_left", "rate_behind_a_descriptor", "rewound_to_what_was_kept",
    "rows_bounded_by_the_layer", "samples_repeated", "settings_of_a_parametrised_layer", "settings_on_a_layer_of_torch",
    "sizes_and_names_left", "sizes_that_are_printed", "some_norms_frozen_midway", "states_of_a_number", "states_returned_and_used",
    "steps_in_hooks_of_what_has_a_gradient", "steps_set_back_and_loaded", "table_made_once", "target_moved_by_the_forward",
    "targets_as_an_input", "tower_that_the_loss_uses_too", "tower_without_positives", "train_takes_a_batch",
    "tried_before_it_is_done_otherwise", "two_backward_passes_past_a_batch_norm", "two_models_in_turns", "unused_layers_switched_on",
    "unwrapped_where_wrapped", "weights_drawn_anew", "weights_without_elements", "whole_state_by_place", "width_of_another_base_midway",
    "work_where_nothing_is_traced", "written_by_save_pretrained", "zero_that_is_given_a_gradient",
)  # fmt: skip
UNDER = {  # those under which a mistake showed
    "heads_trained_in_turns": ("pp2",), "parameters_in_a_list_too": ("zero3",), "parameters_in_other_objects_too": ("zero3", "pp2"),
    "states_of_a_number": ("tp2", "pp2"), "target_moved_by_the_forward": ("tp2", "pp2"),
}  # fmt: skip


@pytest.mark.gloo
@pytest.mark.parametrize("name", PROGRAMS_HERE)
def test_ordinary_programs_are_right(name: str, judge: Judge) -> None:
    """Under one plan each, or those under which a mistake showed; the benchmark `traps` runs them under all."""
    assert judge.not_right(name, UNDER.get(name) or (one_for(name, "tp2", "pp2"),)) == []


@pytest.mark.gloo
def test_no_rank_compares_parameters_that_a_hook_leads_to(judge: Judge) -> None:
    assert judge.not_right("hooks_that_hold_the_model", ("pp2",)) == []


@pytest.mark.gloo
def test_parts_of_ranks_that_use_nothing(judge: Judge) -> None:
    assert judge.not_right("second_of_two_results_used", ("dp2",)) == []


@pytest.mark.pure
def test_every_program_of_the_table_can_be_found() -> None:
    assert set(PROGRAMS_HERE) <= set(PROGRAMS)
    assert len(PROGRAMS) >= 60
    assert len({p.kind for p in PROGRAMS.values()}) >= 9
    for program in PROGRAMS.values():
        assert set(program.plans) <= set(PLANS) - set(USUAL), program.name
        assert program.remedy_of in ("", *PROGRAMS), program.name


@pytest.mark.pure
def test_the_judge_notices_another_number() -> None:
    expected = run_program("batch_norm", None)
    assert differences(run_program("batch_norm", None), expected) == []
    assert len(expected["losses"]) == 3
    assert expected["state"]["norm.num_batches_tracked"] == 3

    def changed(**parts: Any) -> list[str]:
        return differences({**expected, **parts}, expected)

    first, *others = expected["losses"]
    assert len(changed(losses=[first * (1 + 1e-8), *others])) == 1
    assert changed(losses=[first * (1 + 1e-12), *others]) == []
    assert len(changed(losses=[float("nan"), *others])) == 1
    assert len(changed(losses=[first, others[0]])) == 2  # one is missing, and how many there are is another
    state = expected["state"]
    for name, tensor in state.items():
        moved = tensor + (1 if tensor.dtype == torch.long else 1e-8)
        assert len(changed(state={**state, name: moved})) == 1, name
    assert len(changed(state={n: t for n, t in state.items() if n != "head.bias"})) == 1
    turning = torch.tensor([1 + 1j], dtype=torch.complex128)
    assert differences({"x": turning * (1 + 1e-12j)}, {"x": turning}) == [] != differences({"x": turning * (1 + 1e-8j)}, {"x": turning})
    assert len(changed(more=1)) == 1
    rounded = torch.tensor(3.0, dtype=torch.float32)
    second = torch.nextafter(following := torch.nextafter(rounded, torch.tensor(4.0)), torch.tensor(4.0))
    assert differences({"x": following}, {"x": rounded}) == [] != differences({"x": second}, {"x": rounded})


def described(error: Exception) -> dict[str, Any]:
    with pytest.raises(type(error)) as caught:
        raise error
    return _described(caught.value)


@pytest.mark.pure
def test_a_refusal_is_an_error_on_purpose_that_says_what_to_do() -> None:
    assert described(CaptureError("cannot be captured"))["on_purpose"]
    assert not described(RenderError("a defect"))["on_purpose"]
    assert not described(LaunchError("a worker died; use another"))["on_purpose"]
    assert not described(TypeError("use x instead"))["on_purpose"]  # raised by the user's own code
    with pytest.raises(TypeError) as caught:
        micro_batch(None, None, 0, 2)  # type: ignore[arg-type]  # an error inside of autopar that nobody meant
    assert not _described(caught.value)["on_purpose"]


@pytest.mark.pure
def test_what_stopped_a_worker_reaches_the_table() -> None:
    told = json.dumps({"kind": "ValueError", "text": "use {a}", "where": "", "on_purpose": True})
    assert _stopped(LaunchError(f"run_program failed on rank 1 of 2: Stopped: {told}\nTraceback ...")) == json.loads(told)
    hung = _stopped(LaunchError("run_program did not end within 60 s on ranks [1] of 2"))
    assert (hung["kind"], hung["on_purpose"]) == ("hang or crash", False)


@pytest.mark.pure
def test_the_table_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    about = {"name": "clipped_norm", "kind": "parts"}
    found = [Outcome(plan=p, outcome="refused", reason="RuntimeError: use clip_grad_norm_ of the module", **about) for p in ("tp2", "pp2")]
    results.write_text("".join(json.dumps(o.record()) + "\n" for o in found))
    assert traps.main(["--names", "clipped_norm", "--plans", "tp2,pp2", "--results", str(results)]) == 0
    said = capsys.readouterr().out
    assert "clipped_norm_by_the_module: not run" in said
    assert json.loads(said.splitlines()[-1])["refused"] == 2

    results.write_text(json.dumps(Outcome(plan="tp2", outcome="wrong", reason="losses[1] is 1.0, not 2.0", **about).record()) + "\n")
    assert traps.main(["--names", "clipped_norm", "--plans", "tp2", "--results", str(results)]) == 1
    assert "wrong clipped_norm (tp2): losses[1] is 1.0, not 2.0" in capsys.readouterr().out
    assert traps.main(["--names", "clipped_nrom"]) == 2
    assert "did you mean clipped_norm" in capsys.readouterr().err
    assert traps.main(["--plans", "tp3"]) == 2


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["norm_on_rank_0_alone_and_then_on_all", "norm_on_rank_0_alone"])
def test_what_one_rank_reads_alone_is_refused(name: str, judge: Judge) -> None:
    (found,) = judge.outcomes(name, ("zero3",))
    assert found.outcome == "refused" and "which all ranks do together" in found.reason


@pytest.mark.gloo
def test_gradients_by_the_edges_of_parts_are_refused(judge: Judge) -> None:
    (found,) = judge.outcomes("gradients_by_their_edges", ("tp2",))
    assert found.outcome == "refused" and "instead of its gradient edge" in found.reason


@pytest.mark.gloo
def test_a_shuffle_that_is_another_on_one_rank_is_refused(judge: Judge) -> None:
    for found in judge.outcomes("shuffled_otherwise_after_a_sample", ("dp2", "pp2")):
        assert found.outcome == "refused" and "ranks 0 and 1 were given different batches" in found.reason


@pytest.mark.gloo
def test_losses_that_ranks_make_otherwise_are_refused(judge: Judge) -> None:
    for found in judge.outcomes("targets_drawn_by_each_rank", ("dp2", "pp2")):
        assert found.outcome == "refused" and "ranks 0 and 1 have made different losses" in found.reason


@pytest.mark.gloo
@pytest.mark.parametrize(
    "name", ["step_left_out_by_rank_1", "learning_rate_of_rank_0_alone", "weights_shaken_by_each_rank", "loss_scaled_by_each_rank"]
)
def test_what_ranks_write_otherwise_is_refused(name: str, judge: Judge) -> None:
    (found,) = judge.outcomes(name, ("dp2",))
    assert found.outcome == "refused" and "not equally often" in found.reason
