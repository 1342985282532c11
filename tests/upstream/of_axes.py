"""Counterparts of PyTorch's tests of FSDP2 with tensor parallelism and pipelines."""

from __future__ import annotations

from collections.abc import Mapping

from tests.upstream.of_values import Counterparts

_TENSOR, _STATE = "tests/distributed/test_tensor_parallel.py::", "tests/distributed/test_tensor_parallel_state.py::"
_STAGES = "tests/distributed/test_pipelines.py::"
_WHOLE, _SPMD = "tests/distributed/test_whole_mesh.py::", "TestFullyShardDTensor."
_ERRORS = "tests/distributed/test_tensor_parallel_errors.py::"
_2D, _OLD = "TestFullyShard2DTraining.", "FSDP1, DDP or `replicate` instead of FSDP2"

OF_AXES: Mapping[str, Counterparts] = {
    "test_fully_shard_dtensor.py": {
        f"{_SPMD}test_dtensor_train_parity": (f"{_WHOLE}test_matches_fsdp2", f"{_ERRORS}test_wrong_meshes"),
        f"{_SPMD}test_sharded_param_correctness_1d": (f"{_WHOLE}test_matches_fsdp2",),
        f"{_SPMD}test_fsdp_tp_dtensor_sharded_params": (f"{_WHOLE}test_matches_fsdp2",),
        f"{_SPMD}test_reduce_scatter_unused_dtensor_param": (
            "newer than torch 2.13: `set_reduce_scatter_unused_params`, by which parameters without gradients get zeros"
        ),
        f"{_SPMD}test_validation_non_replicate_dp_placement": (f"{_WHOLE}test_rejects_placements_on_a_data_axis",),
        f"{_SPMD}test_validation_invalid_dim_names": (f"{_ERRORS}test_wrong_meshes",),
        f"{_SPMD}test_validation_mesh_mismatch": (f"{_WHOLE}test_rejects_another_mesh",),
        f"{_SPMD}test_validation_at_least_one_required": (f"{_ERRORS}test_wrong_meshes",),
        f"{_SPMD}test_validation_spmd_mesh_non_dtensor_params": (f"{_ERRORS}test_roles",),
        f"{_SPMD}test_validation_reshard_after_forward_int_spmd": (f"{_WHOLE}test_ways_to_train_and_state",),
    },
    "test_composability/test_2d_composability.py": {
        f"{_2D}test_train_parity_2d_mlp": (
            f"{_TENSOR}test_mlps_match_fsdp2",
            f"{_TENSOR}test_recomputed_layers",
            f"{_TENSOR}test_options",
        ),
        f"{_2D}test_train_parity_2d_transformer": (
            f"{_TENSOR}test_a_llama_with_sequence_parallelism_matches_fsdp2",
            f"{_TENSOR}test_options",
        ),
        f"{_2D}test_tp_with_fsdp_offloading": (
            f"{_TENSOR}test_a_data_axis_of_one_rank",
            f"{_TENSOR}test_offloading_parts_inference_and_conversion",
        ),
        f"{_2D}test_train_parity_2d_transformer_checkpoint_resume": (f"{_STATE}test_resume_on_meshes_of_other_shapes",),
        "TestFullyShard2DStateDict.test_fully_shard_tp_2d_set_full_state_dict": (
            f"{_STATE}test_state_dicts_and_copies",
        ),
        "Test2dFSDP1ParallelIntegration.test_2d_ddp_integration_functionality": _OLD,
        "TestNew2dParallelTraining.test_2d_fsdp_state_enable_extension": _OLD,
        "TestNew2dParallelTraining.test_2d_e2e_training_default": _OLD,
        "TestNew2dParallelTraining.test_2d_e2e_training_use_orig_params": _OLD,
        "TestNew2dParallelTraining.test_2d_e2e_training_not_use_orig_params": _OLD,
        "TestNew2dParallelStateDict.test_fsdp_2d_extension": _OLD,
        "TestNew2dParallelStateDict.test_2d_state_dict": _OLD,
        "TestNew2dParallelStateDict.test_2d_load_state_dict": _OLD,
        "TestNew2dParallelStateDict.test_2d_optim_state_dict": _OLD,
        "TestNew2dParallelStateDict.test_fsdp1_tp_2d_set_full_state_dict": _OLD,
    },
    "test_composability/test_pp_composability.py": {
        "ComposabilityTest.test_pp_and_dcp": (f"{_STAGES}test_a_checkpoint_of_all_stages",),
        "ComposabilityTest.test_3d_with_tp_dp_pp": (
            f"{_STAGES}test_stages_equal_fsdp2",
            f"{_STAGES}test_stages_with_a_tensor_axis",
            f"{_STAGES}test_rejects_separate_backwards_of_weights",
        ),
        "ComposabilityTest.test_replicate_pp": _OLD,
        "ComposabilityTest.test_replicate_pp_grads": _OLD,
    },
}
