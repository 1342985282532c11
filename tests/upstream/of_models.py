"""Counterparts of PyTorch's tests of sharding, freezing, compiling and freeing a model, and of its surroundings."""

from __future__ import annotations

from collections.abc import Mapping

from tests.upstream.of_values import GPU, IDENTITY, TENSOR_PARALLEL, Counterparts

_HERE, _RANKS = "tests/upstream/", "tests/distributed/"

_BREAKS = "graph breaks, at which a module is split; PyTorch skips it, too"
_HOOKS = "FSDP2's hooks under torch.compile and compiled autograd; a compiled model has none"
_OLD_NAME = "FSDP2's former import path"

OF_MODELS: Mapping[str, Counterparts] = {
    "test_fully_shard_init.py": {
        "TestFullyShardDeviceTensor.test_move_states_to_device_tensor": (
            f"{_RANKS}test_init.py::test_shards_and_buffers_move_to_the_device",
        ),
        "TestFullyShardDeviceTensor.test_move_states_to_device_ignored_param_device": (
            f"{_RANKS}test_init.py::test_shards_and_buffers_move_to_the_device",
        ),
        "TestFullyShardDeviceDTensor.test_move_states_to_device_dtensor_valid": TENSOR_PARALLEL,
        "TestFullyShardDeviceDTensor.test_move_states_to_device_dtensor_invalid": TENSOR_PARALLEL,
        "TestFullyShardMeshArg.test_invalid_mesh_ndim": (f"{_RANKS}test_errors.py::test_compile_rejects",),
        "TestFullyShardMeshArg.test_2d_mesh_without_mesh_dim_names": (f"{_RANKS}test_errors.py::test_compile_rejects",),
        "TestFullyShardManagedModulesAndStates.test_managed_modules_single": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardManagedModulesAndStates.test_managed_modules_nested": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardManagedModulesAndStates.test_managed_modules_nested_fully_shard_and_replicate": (
            f"{_HERE}test_init.py::test_rejects_a_replicated_part",
        ),
        "TestFullyShardManagedModulesAndStates.test_managed_modules_duplicate": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardManagedModulesAndStates.test_managed_modules_list_of_mlps": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardManagedModulesAndStates.test_managed_states_shared_params_and_buffers": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardManagedModulesAndStates.test_managed_states_nested_fully_shard": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardManagedModulesAndStates.test_managed_states_list_of_mlps": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardParamModuleInfos.test_get_param_module_infos_shared_params": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardParamModuleInfos.test_get_param_module_infos_duplicates": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardParamModuleInfos.test_get_param_module_infos_list_of_mlps": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardShardedParameterTensor.test_shard_tensor_parameters": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
            f"{_RANKS}test_sharding.py::test_uneven_shards_on_any_dim",
        ),
        "TestFullyShardShardedParameterTensor.test_raise_scalar_parameter": (
            f"{_RANKS}test_scalars.py::test_training_equals_fsdp2_with_vectors_of_one_element",
        ),
        "TestFullyShardShardedParameterTensor.test_raise_noncontiguous_parameter": (
            f"{_RANKS}test_sharding.py::test_parameters_keep_their_memory_format",
        ),
        "TestFullyShardShardedParameterDTensor.test_shard_dtensor_parameters": (
            f"{_RANKS}test_tensor_parallel.py::test_mlps_match_fsdp2",
        ),
        "TestFullyShardLazyInit.test_fully_shard_is_root": IDENTITY,
        "TestFullyShardLazyInit.test_fully_shard_module_and_param_fqns": (
            f"{_HERE}test_init.py::test_parameters_belong_to_the_innermost_unit",
        ),
        "TestFullyShardLazyInit.test_fully_shard_double_lazy_init": (
            f"{_HERE}test_init.py::test_a_part_may_be_called_before_the_root_is_sharded",
        ),
        "TestFullyShardLazyInit.test_fully_shard_multi_module_root": (
            f"{_HERE}test_init.py::test_a_group_without_a_root",
        ),
        "TestFullyShardLazyInit.test_reset_sharded_param_in_lazy_init": (
            f"{_HERE}test_init.py::test_a_parameter_that_is_computed_from_shards",
        ),
        "TestFullyShardMetaDeviceInit.test_meta_device_1d_init": (
            f"{_HERE}test_init.py::test_sharded_and_initialized_from_the_meta_device",
        ),
        "TestFullyShardMetaDeviceInit.test_meta_device_2d_init": (f"{_RANKS}test_tensor_parallel.py::test_meta_init",),
        "TestFullyShardMetaDeviceInit.test_invalid_meta_device_init": (
            f"{_RANKS}test_wrong_parameters.py::test_meta_parameters_are_listed",
        ),
        "TestFullyShardMetaDeviceInit.test_rank0_broadcast_meta_device_init": (
            f"{_RANKS}test_state.py::test_meta_model_gets_its_values_from_rank_0",
        ),
        "TestFullyShardProcessGroupInit.test_1d_process_group_init": (
            f"{_HERE}test_init.py::test_meshes_made_of_process_groups",
        ),
        "TestFullyShardProcessGroupInit.test_2d_process_group_init": (
            f"{_HERE}test_init.py::test_meshes_made_of_process_groups",
        ),
        "TestFullyShardHSDPBroadcast.test_hsdp_broadcast_across_replicas": (
            f"{_HERE}test_init.py::test_one_replica_gives_its_values_to_the_others",
        ),
        "TestHSDPWithCustomHook.test_custom_hook_custom_stream": (
            f"{_RANKS}test_custom_collectives.py::test_wrong_arguments",
            f"{_RANKS}test_custom_collectives.py::test_a_hook_sees_reduced_gradients",
        ),
        "TestHSDPWithCustomHook.test_custom_hsdp_all_reduce_hook": (
            f"{_HERE}test_init.py::test_a_hook_that_averages_over_replicas",
        ),
        "TestFullyShardShardPlacementFn.test_init_1d_transformer_shard_largest_dim": (
            f"{_RANKS}test_sharding.py::test_shard_dims_equal_fsdp2",
            f"{_RANKS}test_sharding.py::test_uneven_shards_on_any_dim",
        ),
        "TestFullyShardShardPlacementFn.test_init_1d_transformer_shard_dim_neg1": (
            f"{_RANKS}test_sharding.py::test_shard_dims_equal_fsdp2",
            f"{_RANKS}test_sharding.py::test_uneven_shards_on_any_dim",
        ),
        "TestFullyShardShardPlacementFn.test_init_2d_transformer_shard_diff_dim": (
            f"{_RANKS}test_tensor_parallel.py::test_options",
        ),
        "TestFullyShardShardPlacementFn.test_init_1d_uneven_shard_largest_dim": (
            f"{_RANKS}test_sharding.py::test_uneven_shards_on_any_dim",
        ),
        "TestFullyShardShardPlacementFn.test_invalid_shard_dim": (
            f"{_RANKS}test_wrong_parameters.py::test_errors_name_the_parameter",
        ),
        "TestFullyShardOldImport.test_old_import_training": _OLD_NAME,
        "TestFullyShardMixedDtypeParam.test_mixed_dtypes_no_grad_param": (
            f"{_RANKS}test_sharding.py::test_frozen_parameters_of_any_dtype",
        ),
    },
    "test_fully_shard_frozen.py": {
        "TestFullyShardFrozen.test_train_mixed_requires_grad_per_group": (
            f"{_HERE}test_frozen.py::test_only_trained_biases_are_reduced",
            f"{_RANKS}test_collectives.py::test_frozen_parameters_are_not_reduced",
        ),
        "TestFullyShardFrozen.test_train_mixed_requires_grad_across_groups": (
            f"{_HERE}test_frozen.py::test_every_second_layer_frozen_for_some_steps",
        ),
        "TestFullyShardFrozen.test_multi_forward_mixed_requires_grad": (
            f"{_HERE}test_frozen.py::test_layers_that_are_called_again_without_gradients",
        ),
    },
    "test_fully_shard_clip_grad_norm_.py": {
        "TestClipGradNormWorldSize2.test_clip_grad_norm_1d": (f"{_RANKS}test_optimizers.py::test_clip_grad_norm",),
        "TestClipGradNormWorldSize4.test_clip_grad_norm_2d": (
            f"{_RANKS}test_tensor_parallel.py::test_mlps_match_fsdp2",
        ),
    },
    "test_fully_shard_ignore_params.py": {
        "TestFullyShardIgnoreParams.test_ddp_A_fsdp_B_ddp_C": (
            f"{_HERE}test_ignore_params.py::test_ddp_around_a_model_that_ignores_parameters",
        ),
    },
    "test_fully_shard_logging.py": {
        "LoggingTests.test_fsdp_logging": ("tests/pipeline/test_trace.py::test_torch_logs",),
    },
    "test_fully_shard_memory.py": {
        "TestFullyShardMemory.test_fully_shard_training_memory": (
            f"{_RANKS}test_overlap.py::test_peak_memory",
            f"{_RANKS}test_overlap.py::test_two_blocks_are_gathered_at_a_time",
            f"{_RANKS}test_overlap.py::test_without_resharding_all_blocks_stay_gathered",
            f"{_RANKS}test_init.py::test_full_parameters_are_freed",
        ),
        "TestFullyShardMemory.test_fully_shard_del_memory": (
            f"{_HERE}test_memory.py::test_a_deleted_model_frees_its_memory",
        ),
    },
    "test_fully_shard_overlap.py": {
        "TestFullyShardOverlap.test_fully_shard_training_overlap": (
            f"{_RANKS}test_overlap.py::test_compute_overlaps_the_next_gather_and_the_last_reduction",
        ),
        "TestFullyShardOverlap.test_fully_shard_post_optim_event_overlap": GPU,
    },
    "test_fully_shard_grad_scaler.py": {
        "TestFullyShardGradientScaler.test_gradient_scaler": (f"{_RANKS}test_optimizers.py::test_grad_scaler",),
    },
    "test_fully_shard_compile.py": {
        "TestFullyShardCompileCompute.test_disable_compiling_hooks": _HOOKS,
        "TestFullyShardCompile.test_dynamo_trace_use_training_state": _HOOKS,
        "TestFullyShardCompile.test_trace_fsdp_copy_": _HOOKS,
        "TestFullyShardCompile.test_compiled_autograd_ctx": _HOOKS,
        "TestFullyShardCompile.test_simple_mlp_fullgraph_backend_aot_eager": (
            f"{_HERE}test_compile.py::test_eager_backend",
        ),
        "TestFullyShardCompile.test_simple_mlp_fullgraph_backend_aot_eager_decomp_partition": (
            f"{_HERE}test_compile.py::test_eager_backend",
        ),
        "TestFullyShardCompile.test_simple_mlp_fullgraph_backend_inductor": (
            f"{_HERE}test_compile.py::test_inductor_backend",
        ),
        "TestFullyShardCompile.test_nested_fully_shard_backend_aot_eager": (
            f"{_HERE}test_compile.py::test_eager_backend",
        ),
        "TestFullyShardCompile.test_nested_fully_shard_backend_aot_eager_decomp_partition": (
            f"{_HERE}test_compile.py::test_eager_backend",
        ),
        "TestFullyShardCompile.test_nested_fully_shard_backend_inductor_fullgraph_True": (
            f"{_HERE}test_compile.py::test_inductor_backend",
        ),
        "TestFullyShardCompile.test_nested_fully_shard_backend_inductor_fullgraph_True_graph_partition": (
            f"{_HERE}test_compile.py::test_inductor_backend",
        ),
        "TestFullyShardCompile.test_nested_fully_shard_backend_inductor_fullgraph_False": _BREAKS,
        "TestFullyShardCompile.test_transformer_backend_aot_eager": (f"{_HERE}test_compile.py::test_eager_backend",),
        "TestFullyShardCompile.test_transformer_backend_aot_eager_decomp_partition": (
            f"{_HERE}test_compile.py::test_eager_backend",
        ),
        "TestFullyShardCompile.test_transformer_backend_inductor_fullgraph_True": (
            f"{_HERE}test_compile.py::test_inductor_backend",
        ),
        "TestFullyShardCompile.test_transformer_backend_inductor_fullgraph_True_graph_partition": (
            f"{_HERE}test_compile.py::test_inductor_backend",
        ),
        "TestFullyShardCompile.test_transformer_backend_inductor_fullgraph_False": _BREAKS,
        "TestFullyShardCompile.test_dynamo_recompiles_on_fsdp_layers": (
            f"{_RANKS}test_semantics.py::test_blocks_compiled_by_the_user",
        ),
    },
}
