"""Counterparts of PyTorch's tests of training steps: collectives and their order, groups, microbatches, replicas."""

from __future__ import annotations

from collections.abc import Mapping

from tests.upstream.of_values import GPU, IDENTITY, Counterparts

_HERE, _RANKS = "tests/upstream/", "tests/distributed/"

_OPERATOR = "newer than torch 2.13: FSDP2's own operator for packing"

OF_STEPS: Mapping[str, Counterparts] = {
    "test_fully_shard_comm.py": {
        "TestFullyShardCollectiveOps.test_all_gather_fp32": (f"{_HERE}test_comm.py::test_parameters_of_odd_sizes",),
        "TestFullyShardCollectiveOps.test_reduce_scatter_fp32": (f"{_HERE}test_comm.py::test_parameters_of_odd_sizes",),
        "TestFullyShardCollectiveOps.test_reduce_scatter_fp16": (f"{_HERE}test_comm.py::test_parameters_of_odd_sizes",),
        "TestFullyShardChunkCatMixedDtype.test_numerics": _OPERATOR,
        "TestFullyShardChunkCatMixedDtype.test_kernels": _OPERATOR,
        "TestFullyShardCommunication.test_fully_shard_communication_count": (
            f"{_RANKS}test_collectives.py::test_counts_of_collectives_match_fsdp2",
            f"{_RANKS}test_settings.py::test_gathered_again_among_fewer_ranks",
        ),
        "TestFullyShardCommunication.test_manual_reshard_with_reshard_after_forward_false": (
            f"{_HERE}test_prefetch.py::test_manual_reshard_after_forward",
        ),
        "TestFullyShardCommunication.test_set_reduce_scatter_divide_factor": (
            f"{_RANKS}test_settings.py::test_divide_factor_and_forced_sums",
            f"{_RANKS}test_settings.py::test_divide_factor_on_two_axes",
            f"{_RANKS}test_settings.py::test_a_divisor_that_is_not_the_number_of_ranks",
        ),
        "TestFullyShardCommunication.test_set_reduce_scatter_max_input_buffers": (
            f"{_RANKS}test_custom_collectives.py::test_concurrent_reductions",
        ),
        "TestFullyShardCommunication.test_reduce_scatter_max_input_buffers_resolves_to_max": (
            f"{_RANKS}test_custom_collectives.py::test_settings_before_the_root_is_sharded",
        ),
        "TestFullyShardCommunication.test_set_reduce_scatter_max_input_buffers_validation": (
            f"{_RANKS}test_custom_collectives.py::test_wrong_arguments",
        ),
        "TestFullyShardCommunication.test_set_reshard_after_forward": (
            f"{_RANKS}test_settings.py::test_resharding_changes_at_run_time",
            f"{_RANKS}test_units.py::test_methods_have_the_scope_of_fsdp2s",
        ),
        "TestFullyShardPrefetch.test_fully_shard_backward_prefetch": (
            f"{_HERE}test_prefetch.py::test_layers_are_gathered_one_ahead",
            f"{_HERE}test_prefetch.py::test_a_backward_for_each_of_two_outputs",
        ),
        "TestFullyShardPrefetch.test_set_modules_to_forward_prefetch": (
            f"{_HERE}test_prefetch.py::test_modules_to_prefetch",
            f"{_RANKS}test_units.py::test_prefetched_units",
        ),
        "TestFullyShardPrefetch.test_set_modules_to_backward_prefetch": (
            f"{_HERE}test_prefetch.py::test_modules_to_prefetch",
            f"{_RANKS}test_units.py::test_prefetched_units",
        ),
        "TestFullyShardPrefetch.test_set_modules_to_backward_prefetch_inside_ac": (
            f"{_HERE}test_prefetch.py::test_modules_to_prefetch_inside_of_checkpoints",
        ),
        "TestFullyShardPrefetch.test_fully_shard_multi_module_backward_prefetch": (
            f"{_HERE}test_prefetch.py::test_modules_in_groups",
        ),
        "TestFullyShardPrefetch.test_fully_shard_multi_module_unused_module": (
            f"{_HERE}test_prefetch.py::test_modules_in_groups",
        ),
        "TestFullyShardPrefetch.test_backward_misprefetch": (
            f"{_HERE}test_prefetch.py::test_modules_to_prefetch",
            f"{_RANKS}test_semantics.py::test_wrong_prefetch_lists_do_not_hang",
        ),
        "TestFullyShardUnshardMultiProcess.test_unshard_async": (f"{_HERE}test_comm.py::test_unshard_async",),
        "TestFullyShardUnshardMultiThread.test_unshard_no_param_group": (
            f"{_HERE}test_comm.py::test_unshard_before_the_first_call",
        ),
        "TestFullyShardUnshardMultiThread.test_unshard_without_lazy_init": (
            f"{_HERE}test_comm.py::test_unshard_before_the_first_call",
        ),
        "TestFullyShardAllocFromPG.test_fully_shard_alloc_from_pg": GPU,
        "TestFullyShardAllocFromPG.test_exception_when_used_together_with_comm_hooks": (
            f"{_RANKS}test_settings.py::test_missing_fsdp2_methods_name_the_alternative",
        ),
        "TestFullyShardSymmMem.test_fully_shard_symm_mem": GPU,
        "TestFullyShardForceSumReduction.test_fully_shard_force_sum_reduce_scatter": GPU,
        "TestFullyShardForceSumReduction.test_fully_shard_force_sum_both_reductions": GPU,
        "TestFullyShardReduceOpWorldSize1.test_singleton_copy_division": (
            f"{_HERE}test_comm.py::test_a_world_of_one_divides_only_by_an_explicit_factor",
        ),
        "TestFullyShardReduceOpWorldSize1.test_size1_reduceop": (
            f"{_HERE}test_comm.py::test_a_world_of_one_divides_only_by_an_explicit_factor",
        ),
    },
    "test_fully_shard_training.py": {
        "TestFullyShardForwardInputs.test_root_move_forward_input_to_device": (
            f"{_HERE}test_training.py::test_a_root_without_parameters",
        ),
        "TestFullyShardForwardInputs.test_root_no_forward_inputs": (
            f"{_RANKS}test_semantics.py::test_layers_called_again_and_no_inputs",
        ),
        "TestFullyShardRegisteredParams.test_param_registration_after_forward": (
            f"{_HERE}test_training.py::test_which_parameters_are_registered_after_a_forward",
            f"{_RANKS}test_shown_parameters.py::test_parameters_kept_by_forward_match_fsdp2",
        ),
        "TestFullyShardRegisteredParams.test_param_registration_after_backward": (
            f"{_RANKS}test_semantics.py::test_parameters_are_dtensors_unless_kept_gathered",
            f"{_RANKS}test_shown_parameters.py::test_unsharded_parameters_match_fsdp2",
        ),
        "TestFullyShardRegisteredParams.test_modules_to_run_forward_empty_for_single_module": IDENTITY,
        "TestFullyShardCastAfterInit.test_to_float64_after_init": (
            f"{_RANKS}test_init.py::test_conversion_after_compile_equals_fsdp2",
        ),
        "TestFullyShard1DTrainingCore.test_train_parity_single_group_shard_dim0": (
            f"{_HERE}test_training.py::test_one_unit_of_any_shape",
        ),
        "TestFullyShard1DTrainingCore.test_train_parity_single_group_shard_largest_dim": (
            f"{_HERE}test_training.py::test_one_unit_of_any_shape",
        ),
        "TestFullyShard1DTrainingCore.test_train_parity_multi_group": (
            f"{_RANKS}test_parity.py::test_training_equals_fsdp2",
            f"{_RANKS}test_parity.py::test_reshard_after_forward_equals_fsdp2",
            f"{_RANKS}test_settings.py::test_gathered_again_among_fewer_ranks",
        ),
        "TestFullyShard1DTrainingCore.test_train_parity_multi_group_cpu_offload_eager": (
            f"{_RANKS}test_offload.py::test_offloaded_training_equals_fsdp2",
        ),
        "TestFullyShard1DTrainingCore.test_train_parity_multi_group_unshard_async_op": (
            f"{_HERE}test_training.py::test_one_unit_of_any_shape",
        ),
        "TestFullyShard1DTrainingCore.test_non_root_forward_backward": (
            f"{_RANKS}test_parameters.py::test_a_submodule_called_directly",
        ),
        "TestFullyShard1DTrainingCore.test_multi_forward_module": (
            f"{_RANKS}test_semantics.py::test_layers_called_again_and_no_inputs",
        ),
        "TestFullyShard1DTrainingCore.test_explicit_prefetching": (f"{_RANKS}test_units.py::test_prefetched_units",),
        "TestFullyShard1DTrainingCore.test_post_optim_event": (
            f"{_RANKS}test_custom_collectives.py::test_the_next_call_waits_for_an_event_once",
        ),
        "TestFullyShard1DTrainingCompose.test_train_parity_with_activation_checkpointing": (
            f"{_HERE}test_training.py::test_groups_of_checkpointed_layers",
            f"{_RANKS}test_activation.py::test_user_checkpoints_match_fsdp2",
        ),
        "TestFullyShard1DTrainingCompose.test_partial_group_forward_then_standalone": (
            f"{_HERE}test_chunks.py::test_a_head_that_forward_does_not_call",
        ),
        "TestFullyShard1DTrainingCompose.test_grouped_module_cast_forward_inputs": (
            f"{_HERE}test_training.py::test_every_module_of_a_group_casts_its_inputs",
        ),
        "TestFullyShard1DTrainingCompose.test_partial_group_forward_grad_accum_chunked": (
            f"{_HERE}test_chunks.py::test_chunks_of_microbatches",
        ),
        "TestFullyShard1DTrainingCompose.test_partial_group_reshard_toggle": (
            f"{_HERE}test_chunks.py::test_a_head_that_stays_gathered_for_all_chunks",
        ),
        "TestFullyShard1DTrainingCompose.test_reset_iter_state_after_exception": (
            f"{_HERE}test_chunks.py::test_a_step_after_forward_raised",
            f"{_RANKS}test_semantics.py::test_the_step_after_an_exception_equals_fsdp2",
        ),
        "TestFullyShard1DTrainingCompose.test_double_forward_with_nested_fsdp_and_checkpoint": (
            f"{_HERE}test_training.py::test_two_forwards_through_units_in_checkpointed_units",
        ),
        "TestFullyShard1DTrainingCompose.test_double_partial_forward_then_backward": (
            f"{_HERE}test_chunks.py::test_two_forwards_that_do_not_call_the_head",
        ),
        "TestFullyShardShardPlacementFnMultiProcess.test_train_parity_shard_placement_fn_shard_largest_dim": (
            f"{_RANKS}test_sharding.py::test_shard_dims_equal_fsdp2",
        ),
        "TestFullyShardShardPlacementFnMultiThread.test_shard_placement_fn_contiguous_params_grads": (
            f"{_RANKS}test_sharding.py::test_shard_dims_equal_fsdp2",
        ),
        "TestFullyShardSharedParams.test_train_parity_with_shared_params": (
            f"{_HERE}test_training.py::test_groups_of_checkpointed_layers",
            f"{_RANKS}test_parameters.py::test_tied_weights",
        ),
        "TestFullyShardSharedParams.test_train_shared_params_uneven_shard": (
            f"{_HERE}test_training.py::test_groups_of_checkpointed_layers",
        ),
        "TestFullyShardSharedParams.test_shared_params_separate_fsdp_groups_error": (
            f"{_RANKS}test_fully_shard.py::test_parameters_that_are_tied_across_units_stay_so",
        ),
        "TestFullyShardSharedParams.test_layer_by_layer_shard_no_false_positive": (
            f"{_HERE}test_training.py::test_blocks_are_sharded_as_they_are_made",
        ),
        "TestFullyShardGradientAccumulation.test_gradient_accumulation": (
            f"{_HERE}test_accumulation.py::test_microbatches",
            f"{_HERE}test_accumulation.py::test_microbatches_on_replicas",
            f"{_RANKS}test_counts.py::test_collectives_of_a_step",
        ),
        "TestFullyShardGradientAccumulation.test_1f1b_microbatching": (
            f"{_HERE}test_accumulation.py::test_one_forward_one_backward",
            f"{_RANKS}test_accumulation.py::test_interleaved_microbatches_match_fsdp2",
        ),
        "TestFullyShardNDTraining.test_2d_mlp_with_nd_mesh": (
            f"{_RANKS}test_tensor_parallel.py::test_mlps_match_fsdp2",
        ),
        "TestFullyShardNDTraining.test_shard_placement_fn_tp_ep": (
            f"{_RANKS}test_expert_parallel.py::test_with_tensor_parallelism",
        ),
        "TestFullyShardHSDP3DTraining.test_3d_mlp_with_nd_mesh": (
            f"{_RANKS}test_tensor_parallel.py::test_replicas_of_tensor_parallel_ranks",
        ),
        "TestFullyShardHSDPTraining.test_train_parity_hsdp": (
            f"{_HERE}test_accumulation.py::test_microbatches_on_replicas",
            f"{_RANKS}test_hsdp.py::test_hsdp_equals_fsdp2",
        ),
        "TestFullyShardCustomForwardMethod.test_register_fsdp_forward_method": (
            f"{_HERE}test_accumulation.py::test_methods_other_than_forward",
            f"{_RANKS}test_settings.py::test_other_methods_than_forward",
        ),
        "TestFullyShardShareCommContext.test_share_comm_context": (
            f"{_HERE}test_accumulation.py::test_several_roots_in_a_plain_module",
        ),
        "TestFullyShardWorldSize1.test_train_parity_single_worldsize1": (
            f"{_RANKS}test_collectives.py::test_world_of_one_launches_no_collectives",
        ),
        "TestFullyShardCudaGraph.test_two_layer_fully_shard_cudagraph": GPU,
    },
}
