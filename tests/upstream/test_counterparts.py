"""Checks of `counterparts.py`: the tests exist, docstrings name their counterparts, and the manual has the tables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.upstream.counterparts import UPSTREAM, tables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# (PyTorch's test, test here)
PAIRS = {
    (name, test)
    for tests in UPSTREAM.values()
    for name, where in tests.items()
    for test in ([] if isinstance(where, str) else where)
}


def _docstrings(file: Path) -> dict[str, str]:
    """Return the tests of a file with their docstrings."""
    nodes = ast.parse(file.read_text()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name: ast.get_docstring(node) or "" for node in functions}


@pytest.mark.parametrize("test", sorted({test for _, test in PAIRS}))
@pytest.mark.quick_cases(
    "tests/distributed/test_accumulation.py::test_interleaved_microbatches_match_fsdp2",
    "tests/distributed/test_activation.py::test_user_checkpoints_match_fsdp2",
    "tests/distributed/test_collectives.py::test_counts_of_collectives_match_fsdp2",
    "tests/distributed/test_collectives.py::test_frozen_parameters_are_not_reduced",
    "tests/distributed/test_collectives.py::test_world_of_one_launches_no_collectives",
    "tests/distributed/test_containers.py::test_units_take_and_return_containers",
    "tests/distributed/test_counts.py::test_collectives_of_a_step",
    "tests/distributed/test_custom_collectives.py::test_a_hook_sees_reduced_gradients",
    "tests/distributed/test_custom_collectives.py::test_concurrent_reductions",
    "tests/distributed/test_custom_collectives.py::test_settings_before_the_root_is_sharded",
    "tests/distributed/test_custom_collectives.py::test_the_next_call_waits_for_an_event_once",
    "tests/distributed/test_custom_collectives.py::test_wrong_arguments",
    "tests/distributed/test_errors.py::test_compile_rejects",
    "tests/distributed/test_expert_parallel.py::test_with_tensor_parallelism",
    "tests/distributed/test_extensions.py::test_both_parts_are_gathered_and_trained",
    "tests/distributed/test_extensions.py::test_methods_set_on_shards",
    "tests/distributed/test_extensions.py::test_padding_by_the_method",
    "tests/distributed/test_extensions.py::test_replicas",
    "tests/distributed/test_fully_shard.py::test_parameters_that_are_tied_across_units_stay_so",
    "tests/distributed/test_hsdp.py::test_hsdp_equals_fsdp2",
    "tests/distributed/test_init.py::test_conversion_after_compile_equals_fsdp2",
    "tests/distributed/test_init.py::test_deepcopy_is_independent",
    "tests/distributed/test_init.py::test_full_parameters_are_freed",
    "tests/distributed/test_init.py::test_shards_and_buffers_move_to_the_device",
    "tests/distributed/test_offload.py::test_offloaded_training_equals_fsdp2",
    "tests/distributed/test_optimizers.py::test_clip_grad_norm",
    "tests/distributed/test_optimizers.py::test_grad_scaler",
    "tests/distributed/test_optimizers.py::test_optimizer_in_backward",
    "tests/distributed/test_overlap.py::test_compute_overlaps_the_next_gather_and_the_last_reduction",
    "tests/distributed/test_overlap.py::test_peak_memory",
    "tests/distributed/test_overlap.py::test_two_blocks_are_gathered_at_a_time",
    "tests/distributed/test_overlap.py::test_without_resharding_all_blocks_stay_gathered",
    "tests/distributed/test_parameters.py::test_a_submodule_called_directly",
    "tests/distributed/test_parameters.py::test_tied_weights",
    "tests/distributed/test_parity.py::test_reshard_after_forward_equals_fsdp2",
    "tests/distributed/test_parity.py::test_training_equals_fsdp2",
    "tests/distributed/test_pipelines.py::test_a_checkpoint_of_all_stages",
    "tests/distributed/test_pipelines.py::test_rejects_separate_backwards_of_weights",
    "tests/distributed/test_pipelines.py::test_stages_equal_fsdp2",
    "tests/distributed/test_pipelines.py::test_stages_with_a_tensor_axis",
    "tests/distributed/test_scalars.py::test_training_equals_fsdp2_with_vectors_of_one_element",
    "tests/distributed/test_semantics.py::test_blocks_compiled_by_the_user",
    "tests/distributed/test_semantics.py::test_layers_called_again_and_no_inputs",
    "tests/distributed/test_semantics.py::test_parameters_are_dtensors_unless_kept_gathered",
    "tests/distributed/test_semantics.py::test_the_step_after_an_exception_equals_fsdp2",
    "tests/distributed/test_semantics.py::test_wrong_prefetch_lists_do_not_hang",
    "tests/distributed/test_settings.py::test_a_divisor_that_is_not_the_number_of_ranks",
    "tests/distributed/test_settings.py::test_divide_factor_and_forced_sums",
    "tests/distributed/test_settings.py::test_divide_factor_on_two_axes",
    "tests/distributed/test_settings.py::test_gathered_again_among_fewer_ranks",
    "tests/distributed/test_settings.py::test_missing_fsdp2_methods_name_the_alternative",
    "tests/distributed/test_settings.py::test_other_methods_than_forward",
    "tests/distributed/test_settings.py::test_resharding_changes_at_run_time",
    "tests/distributed/test_sharding.py::test_frozen_parameters_of_any_dtype",
    "tests/distributed/test_sharding.py::test_parameters_keep_their_memory_format",
    "tests/distributed/test_sharding.py::test_shard_dims_equal_fsdp2",
    "tests/distributed/test_sharding.py::test_uneven_shards_on_any_dim",
    "tests/distributed/test_shown_parameters.py::test_parameters_kept_by_forward_match_fsdp2",
    "tests/distributed/test_shown_parameters.py::test_unsharded_parameters_match_fsdp2",
    "tests/distributed/test_state.py::test_meta_model_gets_its_values_from_rank_0",
    "tests/distributed/test_tensor_parallel.py::test_a_data_axis_of_one_rank",
    "tests/distributed/test_tensor_parallel.py::test_a_llama_with_sequence_parallelism_matches_fsdp2",
    "tests/distributed/test_tensor_parallel.py::test_meta_init",
    "tests/distributed/test_tensor_parallel.py::test_mlps_match_fsdp2",
    "tests/distributed/test_tensor_parallel.py::test_offloading_parts_inference_and_conversion",
    "tests/distributed/test_tensor_parallel.py::test_options",
    "tests/distributed/test_tensor_parallel.py::test_recomputed_layers",
    "tests/distributed/test_tensor_parallel.py::test_replicas_of_tensor_parallel_ranks",
    "tests/distributed/test_tensor_parallel_errors.py::test_roles",
    "tests/distributed/test_tensor_parallel_errors.py::test_wrong_meshes",
    "tests/distributed/test_tensor_parallel_state.py::test_resume_on_meshes_of_other_shapes",
    "tests/distributed/test_tensor_parallel_state.py::test_state_dicts_and_copies",
    "tests/distributed/test_units.py::test_methods_have_the_scope_of_fsdp2s",
    "tests/distributed/test_units.py::test_prefetched_units",
    "tests/distributed/test_whole_mesh.py::test_matches_fsdp2",
    "tests/distributed/test_whole_mesh.py::test_rejects_another_mesh",
    "tests/distributed/test_whole_mesh.py::test_rejects_placements_on_a_data_axis",
    "tests/distributed/test_whole_mesh.py::test_ways_to_train_and_state",
    "tests/distributed/test_wrong_parameters.py::test_errors_name_the_parameter",
    "tests/distributed/test_wrong_parameters.py::test_meta_parameters_are_listed",
    "tests/pipeline/test_trace.py::test_torch_logs",
    "tests/upstream/test_accumulation.py::test_methods_other_than_forward",
    "tests/upstream/test_accumulation.py::test_microbatches",
    "tests/upstream/test_accumulation.py::test_microbatches_on_replicas",
    "tests/upstream/test_accumulation.py::test_one_forward_one_backward",
    "tests/upstream/test_accumulation.py::test_several_roots_in_a_plain_module",
    "tests/upstream/test_autograd.py::test_a_module_that_forward_does_not_use",
    "tests/upstream/test_autograd.py::test_an_output_that_the_loss_does_not_use",
    "tests/upstream/test_autograd.py::test_optimizers_and_schedules_in_hooks",
    "tests/upstream/test_casts.py::test_checkpoints_recompute_casts",
    "tests/upstream/test_casts.py::test_inputs_of_a_unit_that_are_made_outside",
    "tests/upstream/test_casts.py::test_norms",
    "tests/upstream/test_casts.py::test_one_unit_in_half_precision",
    "tests/upstream/test_chunks.py::test_a_head_that_forward_does_not_call",
    "tests/upstream/test_chunks.py::test_a_head_that_stays_gathered_for_all_chunks",
    "tests/upstream/test_chunks.py::test_a_step_after_forward_raised",
    "tests/upstream/test_chunks.py::test_chunks_of_microbatches",
    "tests/upstream/test_chunks.py::test_two_forwards_that_do_not_call_the_head",
    "tests/upstream/test_comm.py::test_a_world_of_one_divides_only_by_an_explicit_factor",
    "tests/upstream/test_comm.py::test_parameters_of_odd_sizes",
    "tests/upstream/test_comm.py::test_unshard_async",
    "tests/upstream/test_comm.py::test_unshard_before_the_first_call",
    "tests/upstream/test_compile.py::test_eager_backend",
    "tests/upstream/test_compile.py::test_inductor_backend",
    "tests/upstream/test_extensions.py::test_a_tensor_without_elements",
    "tests/upstream/test_extensions.py::test_methods_whose_variables_change",
    "tests/upstream/test_extensions.py::test_several_tensors_and_their_bytes",
    "tests/upstream/test_extensions.py::test_subclasses_from_the_meta_device",
    "tests/upstream/test_frozen.py::test_every_second_layer_frozen_for_some_steps",
    "tests/upstream/test_frozen.py::test_layers_that_are_called_again_without_gradients",
    "tests/upstream/test_frozen.py::test_only_trained_biases_are_reduced",
    "tests/upstream/test_ignore_params.py::test_ddp_around_a_model_that_ignores_parameters",
    "tests/upstream/test_init.py::test_a_group_without_a_root",
    "tests/upstream/test_init.py::test_a_hook_that_averages_over_replicas",
    "tests/upstream/test_init.py::test_a_parameter_that_is_computed_from_shards",
    "tests/upstream/test_init.py::test_a_part_may_be_called_before_the_root_is_sharded",
    "tests/upstream/test_init.py::test_meshes_made_of_process_groups",
    "tests/upstream/test_init.py::test_one_replica_gives_its_values_to_the_others",
    "tests/upstream/test_init.py::test_rejects_a_replicated_part",
    "tests/upstream/test_init.py::test_sharded_and_initialized_from_the_meta_device",
    "tests/upstream/test_memory.py::test_a_deleted_model_frees_its_memory",
    "tests/upstream/test_mixed_precision.py::test_computed_and_reduced_in_low_precision",
    "tests/upstream/test_mixed_precision.py::test_dataclasses_in_dataclasses_between_units",
    "tests/upstream/test_mixed_precision.py::test_microbatches_accumulate_in_float32",
    "tests/upstream/test_mixed_precision.py::test_reduced_in_another_dtype",
    "tests/upstream/test_mixed_precision.py::test_the_reduce_dtype_survives_a_conversion",
    "tests/upstream/test_mixed_precision.py::test_trained_after_a_call_with_everything_frozen",
    "tests/upstream/test_prefetch.py::test_a_backward_for_each_of_two_outputs",
    "tests/upstream/test_prefetch.py::test_layers_are_gathered_one_ahead",
    "tests/upstream/test_prefetch.py::test_manual_reshard_after_forward",
    "tests/upstream/test_prefetch.py::test_modules_in_groups",
    "tests/upstream/test_prefetch.py::test_modules_to_prefetch",
    "tests/upstream/test_prefetch.py::test_modules_to_prefetch_inside_of_checkpoints",
    "tests/upstream/test_state.py::test_a_module_is_sharded_once",
    "tests/upstream/test_state.py::test_class_names_match_fsdp2_and_slices_keep_the_old_class",
    "tests/upstream/test_state.py::test_rejects_containers_without_a_forward",
    "tests/upstream/test_state_dict.py::test_a_cached_state_dict_follows_training",
    "tests/upstream/test_state_dict.py::test_full_values_on_one_rank",
    "tests/upstream/test_state_dict.py::test_parts_of_a_state_are_loaded_into_an_offloaded_model",
    "tests/upstream/test_state_dict.py::test_states_are_the_shards",
    "tests/upstream/test_state_dict.py::test_states_of_replicas_are_the_shards",
    "tests/upstream/test_state_dict.py::test_states_of_tensor_parallel_models",
    "tests/upstream/test_training.py::test_a_root_without_parameters",
    "tests/upstream/test_training.py::test_blocks_are_sharded_as_they_are_made",
    "tests/upstream/test_training.py::test_every_module_of_a_group_casts_its_inputs",
    "tests/upstream/test_training.py::test_groups_of_checkpointed_layers",
    "tests/upstream/test_training.py::test_one_unit_of_any_shape",
    "tests/upstream/test_training.py::test_two_forwards_through_units_in_checkpointed_units",
    "tests/upstream/test_training.py::test_which_parameters_are_registered_after_a_forward",
)
def test_the_counterpart_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in _docstrings(ROOT / file)


def test_docstrings_name_the_counterparts() -> None:
    """Tests in this folder name exactly the tests of PyTorch that they are counterparts of."""
    named = set()
    for file in sorted(HERE.glob("test_*.py")):
        if file != Path(__file__):
            for test, text in _docstrings(file).items():
                found = re.findall(r"`(Test\w+\.test_\w+)`", text)
                assert found, f"{file.name}::{test} names no test of PyTorch"
                named |= {(name, f"tests/upstream/{file.name}::{test}") for name in found}
    assert named == {(name, test) for name, test in PAIRS if test.startswith("tests/upstream/")}


def test_the_manual_has_these_tables() -> None:
    text = (ROOT / "docs" / "evidence" / "upstream.md").read_text()
    assert tables() in text, f"docs/evidence/upstream.md must have\n{tables()}"
