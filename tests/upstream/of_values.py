"""Counterparts of PyTorch's tests of gathered, cast, differentiated and stored values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

# By class and test: the tests here, or the reason why there is none.
Counterparts: TypeAlias = Mapping[str, tuple[str, ...] | str]

_EXTENSIONS = "tests/distributed/test_extensions.py::"
_HERE = "tests/upstream/"
_THREADS = "TestFullyShardAllGatherExtensionsMultiThread."
_TRAINING, _CASTS = "TestFullyShardMixedPrecisionTraining.", "TestFullyShardMixedPrecisionCasts."
_STATES = "TestFullyShardStateDictMultiProcess."

GPU = "needs GPUs: it measures kernels on streams or reads NCCL's log"
TENSOR_PARALLEL = "tensor parallelism, whose tests are in `tests/distributed/test_tensor_parallel.py`"
_LAYOUTS = "newer than torch 2.13: `AllGatherInput`, and FSDP2's own functions for it"
IDENTITY = "FSDP2's own state objects, which a compiled module does not have"

OF_VALUES: Mapping[str, Counterparts] = {
    "test_fully_shard_extensions.py": {
        "TestFullyShardAllGatherExtensionsMultiProcess.test_all_gather_extensions_train_parity": (
            f"{_EXTENSIONS}test_both_parts_are_gathered_and_trained",
        ),
        f"{_THREADS}test_all_gather_extensions_end_to_end": (
            f"{_HERE}test_extensions.py::test_subclasses_from_the_meta_device",
        ),
        f"{_THREADS}test_all_gather_extensions_monkey_patch": (f"{_EXTENSIONS}test_methods_set_on_shards",),
        f"{_THREADS}test_all_gather_extension_outer_size_stride": (f"{_EXTENSIONS}test_padding_by_the_method",),
        f"{_THREADS}test_all_gather_extension_hsdp_mesh": (f"{_EXTENSIONS}test_replicas",),
        f"{_THREADS}test_all_gather_extension_single_rank_payloads": (
            f"{_HERE}test_extensions.py::test_several_tensors_and_their_bytes",
        ),
        f"{_THREADS}test_all_gather_extension_zero_size_trailing_dim": (
            f"{_HERE}test_extensions.py::test_a_tensor_without_elements",
        ),
        f"{_THREADS}test_all_gather_extension_errors_name_param": (
            f"{_HERE}test_extensions.py::test_methods_whose_variables_change",
        ),
        f"{_THREADS}test_all_gather_extension_smaller_payload": (
            f"{_HERE}test_extensions.py::test_methods_whose_variables_change",
        ),
        f"{_THREADS}test_release_all_gather_outputs_after_post_all_gather": (
            "newer than torch 2.13: a method that lets FSDP2 free buffers, which programs free by themselves"
        ),
        f"{_THREADS}test_all_gather_input_layouts": _LAYOUTS,
        "TestAllGatherInputValidation.test_dim_out_of_range": _LAYOUTS,
        "TestAllGatherInputValidation.test_output_layouts": _LAYOUTS,
        "TestAllGatherInputValidation.test_payload_count_change": _LAYOUTS,
        "TestAllGatherInputValidation.test_records_keep_size_and_dtype": _LAYOUTS,
        "TestAllGatherInputValidation.test_tensor_inputs_shrink_or_become_byte_views": _LAYOUTS,
        "TestAllGatherInputValidation.test_shard_dim_tensor_inputs_keep_rows": _LAYOUTS,
        "TestAllGatherInputValidation.test_uneven_tensor_inputs_keep_padded_size": _LAYOUTS,
        "TestDefaultAllGatherOutputFn.test_smaller_payload_fills_prefix": _LAYOUTS,
        "TestDefaultAllGatherOutputFn.test_byte_buffer_reassembles_typed_rows": _LAYOUTS,
    },
    "test_fully_shard_autograd.py": {
        "TestFullyShardAutograd.test_unused_forward_output": (
            f"{_HERE}test_autograd.py::test_an_output_that_the_loss_does_not_use",
        ),
        "TestFullyShardAutograd.test_unused_forward_module": (
            f"{_HERE}test_autograd.py::test_a_module_that_forward_does_not_use",
        ),
        "TestFullyShardAutograd.test_nontensor_activations": (
            "tests/distributed/test_containers.py::test_units_take_and_return_containers",
        ),
        "TestFullyShardPostAccGradHookMultiThread.test_post_acc_grad_hook_runs": (
            "tests/distributed/test_optimizers.py::test_optimizer_in_backward",
        ),
        "TestFullyShardPostAccGradHookMultiProcess.test_post_acc_grad_hook_optim_parity": (
            f"{_HERE}test_autograd.py::test_optimizers_and_schedules_in_hooks",
        ),
    },
    "test_fully_shard_state.py": {
        "TestFullyShardState.test_fully_shard_state": IDENTITY,
        "TestFullyShardState.test_fully_shard_reapply": (f"{_HERE}test_state.py::test_a_module_is_sharded_once",),
        "TestFullyShardState.test_fully_shard_cls": (
            f"{_HERE}test_state.py::test_class_names_match_fsdp2_and_slices_keep_the_old_class",
        ),
        "TestFullyShardState.test_fully_shard_unsupported_module_cls": (
            f"{_HERE}test_state.py::test_rejects_containers_without_a_forward",
        ),
        "TestFullyShardState.test_fully_shard_deepcopy": (
            "tests/distributed/test_init.py::test_deepcopy_is_independent",
        ),
        "TestFullyShardState.test_sharded_param_storage": "newer than torch 2.13: private methods that free shards",
    },
    "test_fully_shard_mixed_precision.py": {
        f"{_TRAINING}test_compute_dtype": (
            f"{_HERE}test_mixed_precision.py::test_computed_and_reduced_in_low_precision",
        ),
        f"{_TRAINING}test_reduce_dtype": (f"{_HERE}test_mixed_precision.py::test_reduced_in_another_dtype",),
        f"{_TRAINING}test_reduce_dtype_after_frozen_first_forward": (
            f"{_HERE}test_mixed_precision.py::test_trained_after_a_call_with_everything_frozen",
        ),
        f"{_TRAINING}test_grad_acc_with_reduce_dtype": (
            f"{_HERE}test_mixed_precision.py::test_microbatches_accumulate_in_float32",
        ),
        f"{_TRAINING}test_structured_input_output": (
            f"{_HERE}test_mixed_precision.py::test_dataclasses_in_dataclasses_between_units",
            "tests/distributed/test_containers.py::test_units_take_and_return_containers",
        ),
        "TestFullyShardMixedPrecisionJVP.test_no_warmup_jvp_reshard_after_forward_false": (
            "tests/field/test_collectives_and_transforms.py::test_transforms_of_a_model",
        ),
        f"{_CASTS}test_float16_on_one_submodule": (f"{_HERE}test_casts.py::test_one_unit_in_half_precision",),
        f"{_CASTS}test_submodules_with_external_inputs": (
            f"{_HERE}test_casts.py::test_inputs_of_a_unit_that_are_made_outside",
        ),
        f"{_CASTS}test_checkpoint_recompute_casts_forward_inputs": (
            f"{_HERE}test_casts.py::test_checkpoints_recompute_casts",
        ),
        f"{_CASTS}test_checkpoint_recompute_casts_outputs": (
            f"{_HERE}test_casts.py::test_checkpoints_recompute_casts",
        ),
        f"{_CASTS}test_norm_modules_bf16": (f"{_HERE}test_casts.py::test_norms",),
        f"{_CASTS}test_norm_modules_fp16": (f"{_HERE}test_casts.py::test_norms",),
        f"{_CASTS}test_clamp_reduce_dtype": (
            f"{_HERE}test_mixed_precision.py::test_the_reduce_dtype_survives_a_conversion",
        ),
    },
    "test_fully_shard_state_dict.py": {
        f"{_STATES}test_dp_state_dict_save_load": (
            f"{_HERE}test_state_dict.py::test_states_are_the_shards",
            f"{_HERE}test_state_dict.py::test_states_of_replicas_are_the_shards",
        ),
        f"{_STATES}test_cached_state_dict": (f"{_HERE}test_state_dict.py::test_a_cached_state_dict_follows_training",),
        f"{_STATES}test_dp_state_dict_cpu_offload": (
            f"{_HERE}test_state_dict.py::test_parts_of_a_state_are_loaded_into_an_offloaded_model",
        ),
        f"{_STATES}test_2d_state_dict_correctness": (
            f"{_HERE}test_state_dict.py::test_states_of_tensor_parallel_models",
        ),
        f"{_STATES}test_dp_tp_state_dict_save_load": (
            f"{_HERE}test_state_dict.py::test_states_of_tensor_parallel_models",
        ),
        f"{_STATES}test_hsdp_tp_state_dict_save_load": (
            f"{_HERE}test_state_dict.py::test_states_of_tensor_parallel_models",
        ),
        "TestFullyShardStateDictMultiThread.test_rank0_offload_full_state_dict": (
            f"{_HERE}test_state_dict.py::test_full_values_on_one_rank",
        ),
    },
}
