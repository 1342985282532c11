"""Private names of torch that graphshard uses: the imports of each door, and attributes that imports do not show.

`python -m graphshard.torch_compat` prints the names that the installed release lacks. `frontend/` checks the tracer's
when it is imported, so that a missing name is one error with the release, not an `AttributeError` during a trace.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from graphshard.errors import UnsupportedError

# Releases of torch that the tests ran with.
TESTED = "2.11 to 2.15"
DOORS = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem != "names")
# Attributes of objects that any package of graphshard reads, by the path of the object.
ATTRIBUTES = {
    "torch.Tensor": "_backward_hooks _post_accumulate_grad_hooks _version",
    "torch.UntypedStorage": "_cdata",
    "torch.autograd.profiler": "_is_profiler_enabled",
    "torch.distributed.tensor.DTensor": "_local_tensor _spec",
    "torch.library.Library": "_destroy",
    "torch.nn.Module": (
        "_apply _backward_hooks _buffers _load_state_dict_post_hooks _load_state_dict_pre_hooks _modules _parameters"
    ),
    "torch.nn.modules.module": (
        "_global_backward_hooks _global_backward_pre_hooks _global_forward_hooks _global_forward_pre_hooks"
    ),
    "torch.ops.aten.add.Tensor": "_dispatch_cache _name _op_dk _opname _overloadname _schema",
    "torch.optim.Optimizer": "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
}
# Attributes of what a door imports.
_OF_DOORS = {
    "autograd_state": {"torch.autograd.forward_ad": "_current_level"},
    "dtensor": {
        "torch.distributed.device_mesh.DeviceMesh": "_concatenate _flatten _get_root_mesh _unflatten",
        "torch.distributed._symmetric_memory": "get_mem_pool rendezvous set_backend",
        "torch.distributed.ProcessGroup": "_get_backend",
        "torch.distributed.distributed_c10d": "_get_default_store _world",
    },
    "dynamo": {
        "torch._dynamo.convert_frame.CaptureOutput": "backend_input graph_capture_output",
        "torch._dynamo.convert_frame.GraphCaptureOutput": (
            "build_guards bytecode closure f_globals import_sources output_graph traced_code"
        ),
        "torch._dynamo.guards": "CheckFunctionManager",
        "torch._dynamo.output_graph.ExportMetaData": "graph_input_idx_to_local_source",
        "torch._dynamo.output_graph.OutputGraphCommon": "_guards guards input_source_to_sizes_strides",
        "torch._dynamo.output_graph.SubgraphTracer": "create_proxy",
        "torch._dynamo.pgo": "CodeState _CODE_STATE",
        "torch._dynamo.side_effects.SideEffects": "mutation store_attr track_mutable",
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase": "inline_user_function_return",
        "torch._dynamo.utils": "is_int_specialization_case",
        "torch._dynamo.variables.SkipFunctionVariable": "call_function",
        "torch._dynamo.variables.TensorVariable": "as_proxy method_attr_grad_fn",
        "torch._dynamo.variables.TorchInGraphFunctionVariable": "call_function",
        "torch._dynamo.variables.builder": "VariableBuilder is_int_specialization_case",
        "torch._dynamo.variables.higher_order_ops.AutogradFunctionApplyVariable": "call_function",
        "torch._dynamo.variables.higher_order_ops.CheckpointHigherOrderVariable": "call_function",
        "torch._dynamo.variables.misc.AutogradFunctionVariable": "call_method",
        "torch._dynamo.variables.misc.DebuggingVariable": "call_function",
        "torch._guards.ChainedSource": "base",
        "torch._guards.Guard": "create_fn create_fn_name originating_source user_stack",
        "torch._guards.Source": "name",
    },
    "fsdp2": {"torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": "_orig_size sharded_param"},
    "torch_ops": {"torch.fx.graph_module._loader": "eval_cache"},
}
# Names that only some of the tested releases have, or only builds for CUDA; the doors do without them.
OPTIONAL = frozenset(
    {
        "torch._C._StaticCudaLauncher",
        "torch._C._StaticCudaLauncher._launch_kernel",
        "torch._C._StaticCudaLauncher._load_kernel",
        "torch._C._cuda_clearCublasWorkspaces",
        "torch._C._cuda_getCurrentRawStream",
        "torch.distributed.fsdp._fully_shard._fsdp_common.ShardPlacementResult",  # from 2.12 on
    }
)
_PRIVATE = re.compile(r"torch\.(?!ops\.)([\w.]+\.)?_[A-Za-z][\w.]*")


def check_names(*doors: str) -> None:
    """Check that torch has the names of some doors; raise UnsupportedError with those that are missing."""
    if missing := list(missing_names(*doors)):
        raise UnsupportedError(
            f"torch {torch.__version__} does not have {'; '.join(missing)}. Install a release of torch from {TESTED}."
        )


def missing_names(*doors: str) -> Iterator[str]:
    """Yield the names of some doors that the installed torch does not have."""
    for door in doors:
        names = {*imported_by(Path(__file__).with_name(f"{door}.py")), *_paths(_OF_DOORS.get(door, {}))}
        yield from sorted(name for name in names - OPTIONAL if not _exists(name))


def missing_attributes() -> list[str]:
    """Return the attributes that the installed torch does not have."""
    return [path for path in _paths(ATTRIBUTES) if not _exists(path)]


def imported_by(path: Path) -> Iterator[str]:
    """Yield the names of torch with a private part that a file imports, or reads as `torch.a._b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            found = [each.name for each in node.names]
        elif isinstance(node, ast.Attribute):
            found = [ast.unparse(node)]
        yield from filter(_PRIVATE.fullmatch, found)  # operators are public, whatever their names are


def _paths(attributes: dict[str, str]) -> Iterator[str]:
    return (f"{owner}.{name}" for owner, names in attributes.items() for name in names.split())


def _exists(path: str) -> bool:
    """Return whether torch has a name: a module, an attribute, or an attribute that a class declares."""
    owner, _, name = path.rpartition(".")
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        try:
            kinds = getattr(pkgutil.resolve_name(owner), "__mro__", ())
        except (ImportError, AttributeError):
            return False
        return any(name in getattr(kind, "__annotations__", {}) for kind in kinds)
    return True
