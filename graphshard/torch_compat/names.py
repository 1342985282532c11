"""Private names of torch that graphshard uses, by the module of this package that imports them.

torch may move or rename a private name in any release. `python -m graphshard.torch_compat` prints the names that the
installed release does not have, and `frontend/` checks the names of the tracer when it is imported, so that a missing
name is one error with the release instead of an `AttributeError` during a trace.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from graphshard.errors import UnsupportedError


class Releases(NamedTuple):
    """First and last release of torch in which a name was found."""

    first: str
    last: str


# All releases that the tests ran with.
TESTED = Releases("2.11", "2.15")

# Names by door (a module of this package) and by module of torch. A dot leads to an attribute of a class; the door
# "attributes" lists attributes of objects that any package of graphshard reads.
NAMES: dict[str, dict[str, str]] = {
    "aot_autograd": {
        "torch": "_mirror_autograd_meta_to",
        "torch._decomp": "decompositions get_decompositions",
        "torch._functorch": "config",
        "torch._functorch._aot_autograd.descriptors": (
            "AOTInput AOTOutput GradAOTOutput InputMutationAOTOutput PlainAOTInput PlainAOTOutput TangentAOTInput"
        ),
        "torch._functorch.aot_autograd": "aot_export_joint_with_descriptors",
        "torch._functorch.partitioners": "min_cut_rematerialization_partition",
        "torch._guards": "TracingContext tracing",
        "torch._inductor": "config",
        "torch._prims.rng_prims": "run_and_save_rng_state run_with_rng_state",
        "torch.utils._python_dispatch": "_disable_current_modes _get_current_dispatch_mode_stack _pop_mode _push_mode",
        "torch.utils.checkpoint": "_CachedTorchDispatchMode _CachingTorchDispatchMode",
    },
    "attributes": {
        "torch": "Tensor._backward_hooks Tensor._post_accumulate_grad_hooks Tensor._version UntypedStorage._cdata",
        "torch.distributed.tensor": "DTensor._local_tensor DTensor._spec",
        "torch.library": "Library._destroy",
        "torch.nn": "Module._apply Module._backward_hooks Module._buffers Module._modules Module._parameters",
        "torch.nn.modules.module": (
            "_global_backward_hooks _global_backward_pre_hooks _global_forward_hooks _global_forward_pre_hooks"
        ),
        "torch.ops.aten.add.Tensor": "_dispatch_cache _name _op_dk _opname _overloadname _schema",
        "torch.optim": "Optimizer._optimizer_step_post_hooks Optimizer._optimizer_step_pre_hooks",
        "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    },
    "autograd_state": {
        "torch._C": "_DisableAutocast _current_graph_task_id _will_engine_execute_node",
        "torch._C._autograd": "_get_current_graph_task_keep_graph _top_saved_tensors_default_hooks",
        "torch._C._functorch": (
            "get_dynamic_layer_stack_depth maybe_current_level pop_dynamic_layer_stack_and_undo_to_depth"
        ),
        "torch.autograd.forward_ad": "_current_level",
        "torch.autograd.profiler": "_is_profiler_enabled",
        "torch.overrides": "_get_current_function_mode_stack",
        "torch.utils._device": "DeviceContext",
        "torch.utils._python_dispatch": "_disable_current_modes",
    },
    "checkpoint_files": {
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
    },
    "cuda": {
        "torch._C": "_accelerator_getAccelerator _select_conv_backend",
    },
    "dtensor": {
        "torch._C._distributed_c10d": "_register_work",
        "torch.distributed._composable.contract": "REGISTRY_KEY RegistryItem STATE_KEY",
        "torch.distributed.device_mesh": (
            "DeviceMesh._concatenate DeviceMesh._flatten DeviceMesh._get_root_mesh DeviceMesh._unflatten"
        ),
        "torch.distributed.distributed_c10d": "_get_default_store _resolve_process_group _world",
        "torch.distributed.tensor": "_random",
        "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta",
        "torch.distributed.tensor.debug": "_clear_sharding_prop_cache",
        "torch.distributed.tensor.placement_types": "_StridedShard",
        "torch.testing._internal.distributed.fake_pg": "FakeStore",
    },
    "dynamo": {
        "torch._C._dynamo.guards": "dict_version",
        "torch._dynamo": "config pgo",
        "torch._dynamo.convert_frame": (
            "CaptureOutput.backend_input CaptureOutput.graph_capture_output GraphCaptureOutput.build_guards "
            "GraphCaptureOutput.bytecode GraphCaptureOutput.closure GraphCaptureOutput.f_globals "
            "GraphCaptureOutput.import_sources GraphCaptureOutput.output_graph GraphCaptureOutput.traced_code "
            "compile_lock fullgraph_capture"
        ),
        "torch._dynamo.device_interface": "CudaInterface",
        "torch._dynamo.exc": "ObservedException TorchDynamoException TorchRuntimeError",
        "torch._dynamo.guards": "CheckFunctionManager",
        "torch._dynamo.output_graph": (
            "ExportMetaData.graph_input_idx_to_local_source OutputGraphCommon._guards OutputGraphCommon.guards "
            "OutputGraphCommon.input_source_to_sizes_strides SubgraphTracer SubgraphTracer.create_proxy"
        ),
        "torch._dynamo.pgo": "CodeState _CODE_STATE",
        "torch._dynamo.side_effects": (
            "AttributeMutationExisting SideEffects SideEffects.mutation SideEffects.store_attr ValueMutationExisting"
        ),
        "torch._dynamo.source": "FloatTensorSource RandomValueSource",
        "torch._dynamo.utils": (
            "dynamo_timed get_metrics_context numpy_method_wrapper numpy_operator_wrapper numpy_to_tensor_wrapper"
        ),
        "torch._dynamo.variables": "TensorVariable TensorVariable.as_proxy",
        "torch._dynamo.variables.higher_order_ops": (
            "AutogradFunctionApplyVariable AutogradFunctionApplyVariable.call_function "
            "CheckpointHigherOrderVariable CheckpointHigherOrderVariable.call_function"
        ),
        "torch._dynamo.variables.misc": "DebuggingVariable DebuggingVariable.call_function",
        "torch._guards": (
            "ChainedSource ChainedSource.base Guard Guard.create_fn Guard.create_fn_name Guard.originating_source "
            "Guard.user_stack GuardsSet Source Source.name TracingContext tracing"
        ),
        "torch.export.dynamic_shapes": "_combine_args _process_dynamic_shapes",
        "torch.utils._ordered_set": "OrderedSet",
    },
    "fake_tensors": {
        "torch": "_from_functional_tensor _functionalize_commit_update _functionalize_replace _sync",
        "torch._C._functorch": "is_functorch_wrapped_tensor",
        "torch._subclasses": "FakeTensor FakeTensorMode fake_tensor",
        "torch._subclasses.fake_impls": "op_implementations_dict",
        "torch._subclasses.fake_tensor": (
            "DataDependentOutputException DynamicOutputShapeException UnsupportedOperatorException"
        ),
        "torch._subclasses.functional_tensor": "FunctionalTensor",
    },
    "fx_code": {
        "torch._logging": "getArtifactLogger trace_structured",
        "torch.fx._lazy_graph_module": "_LazyGraphModule",
        "torch.fx.graph": "_BoxedCodeGen",
        "torch.fx.graph_module": "_loader.eval_cache",
    },
    "inductor_compiler": {
        "torch._higher_order_ops.triton_kernel_wrap": "kernel_side_table triton_kernel_wrapper_mutation",
        "torch._inductor": "async_compile codecache",
        "torch._inductor.codecache": "CppPythonBindingsCodeCache FxGraphCache PyCodeCache get_lock_dir",
        "torch._inductor.compile_fx": "compile_fx_inner get_cpp_wrapper_config",
        "torch._inductor.cpp_builder": "get_cpp_compiler is_gcc",
        "torch._inductor.decomposition": "decompositions select_decomp_table",
        "torch._inductor.dependencies": "Dep MemoryDep WeakDep",
        "torch._inductor.ir": "MultiOutput TensorBox",
        "torch._inductor.lowering": "lowerings",
        "torch._inductor.mkldnn_ir": "LinearUnary",
        "torch._inductor.output_code": "CompiledFxGraph",
        "torch._inductor.package": "package_aoti",
        "torch._inductor.runtime": "triton_compat",
        "torch._inductor.scheduler": "BaseSchedulerNode ExternKernelSchedulerNode NopKernelSchedulerNode Scheduler",
        "torch._inductor.select_algorithm": "extern_kernels",
        "torch._inductor.triton_bundler": "TritonBundler",
        "torch._inductor.utils": "get_dtype_size sympy_product",
        "torch._inductor.virtualized": "V",
    },
    "inductor_settings": {
        "torch._C._aoti": "AOTIModelPackageLoader",
        "torch._C._dynamo.guards": "_torchinductor_pyobject_tensor_data_ptr",
        "torch._functorch": "config",
        "torch._inductor": "config cpu_vec_isa",
        "torch._inductor.cpu_vec_isa": "VecISA",
        "torch._inductor.runtime.cache_dir_utils": "cache_dir",
    },
    "torch_ops": {
        "torch": (
            "Tensor._make_subclass Tensor._make_wrapper_subclass _assert_async _foreach_copy_ _foreach_mul "
            "_foreach_norm"
        ),
        "torch._C": "DispatchKey _dispatch_get_all_op_names _set_grad_enabled",
        "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket",
        "torch._prims_common": (
            "compute_elementwise_output_strides make_channels_last_strides_for make_contiguous_strides_for "
            "suggest_memory_format"
        ),
        "torch.distributed.utils": "_apply_to_tensors",
        "torch.library": "_impls",
        "torch.utils": "_pytree",
        "torch.utils._python_dispatch": "TorchDispatchMode",
    },
    "symbolic_sizes": {
        "torch._dynamo.source": "ConstantSource",
        "torch.fx.experimental.symbolic_shapes": "_constrain_range_for_size",
        "torch.utils._sympy.interp": "sympy_interp",
        "torch.utils._sympy.numbers": "int_oo",
        "torch.utils._sympy.reference": "PythonReferenceAnalysis",
    },
}

# Names that only some of the tested releases have, or only builds for CUDA; the doors do without them.
OPTIONAL: dict[str, Releases] = {
    "torch._C._StaticCudaLauncher": TESTED,  # builds for CUDA
    "torch._C._StaticCudaLauncher._launch_kernel": TESTED,
    "torch._C._StaticCudaLauncher._load_kernel": TESTED,
    "torch._C._cuda_clearCublasWorkspaces": TESTED,  # builds for CUDA
    "torch._C._cuda_getCurrentRawStream": TESTED,  # builds for CUDA
    "torch.distributed.fsdp._fully_shard._fsdp_common.ShardPlacementResult": Releases("2.12", "2.15"),
}


def check_names(*doors: str, names: Mapping[str, Mapping[str, str]] = NAMES) -> None:
    """Check that torch has the names of some doors; of all by default.

    Raises:
        UnsupportedError: some are missing.
    """
    if missing := list(missing_names(*doors, names=names)):
        raise UnsupportedError(
            f"torch {torch.__version__} does not have {'; '.join(missing)}. Install a release of torch from "
            f"{TESTED.first} to {TESTED.last}."
        )


def missing_names(*doors: str, names: Mapping[str, Mapping[str, str]] = NAMES) -> Iterator[str]:
    """Yield the names of some doors, or of all, that the installed torch does not have."""
    for door in doors or names:
        for module, inside in names[door].items():
            yield from (f"{module}.{name}" for name in inside.split() if not _has(module, name))


def _has(module: str, name: str) -> bool:
    """Return whether a module, or an object at this path, has an attribute, or its class declares one."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        try:
            found = operator.attrgetter(module.removeprefix("torch."))(torch)
        except AttributeError:
            return False
    *owners, last = name.split(".")
    for owner in owners:
        found = getattr(found, owner, None)
    if hasattr(found, last) or any(
        last in getattr(kind, "__annotations__", {}) for kind in getattr(found, "__mro__", ())
    ):
        return True
    try:  # a module that the package does not import itself
        importlib.import_module(".".join([module, *owners, last]))
    except ImportError:
        return False
    return True
