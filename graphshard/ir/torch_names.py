"""Private names of torch that the frontend uses, with the releases that have them.

Torch may move or rename them in any release. The package checks the table when it is imported, so a name that is gone
is one error that names the release, and not an `AttributeError` in the middle of a trace.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from graphshard.ir.errors import UnsupportedError


class Releases(NamedTuple):
    """First and last release that is known to have a name; later ones are tried."""

    first: str
    last: str


_ALL = Releases("2.11", "2.14")

# By module; a dot leads to an attribute or a field of a class.
NAMES: dict[str, dict[str, Releases]] = {
    "torch._C": {"DispatchKey": _ALL},
    "torch._C._dynamo.guards": {"dict_version": _ALL},
    "torch._dynamo.convert_frame": {
        "compile_lock": _ALL,
        "fullgraph_capture": _ALL,
        "CaptureOutput.graph_capture_output": _ALL,
        "CaptureOutput.backend_input": _ALL,
        "GraphCaptureOutput.build_guards": _ALL,
        "GraphCaptureOutput.bytecode": _ALL,
        "GraphCaptureOutput.closure": _ALL,
        "GraphCaptureOutput.f_globals": _ALL,
        "GraphCaptureOutput.import_sources": _ALL,
        "GraphCaptureOutput.output_graph": _ALL,
        "GraphCaptureOutput.traced_code": _ALL,
    },
    "torch._dynamo.output_graph": {
        "OutputGraphCommon.guards": _ALL,
        "OutputGraphCommon._guards": _ALL,
        "OutputGraphCommon.input_source_to_sizes_strides": _ALL,
        "ExportMetaData.graph_input_idx_to_local_source": _ALL,
        "SubgraphTracer.create_proxy": _ALL,
    },
    "torch._dynamo.guards": {"CheckFunctionManager": _ALL},
    "torch._dynamo.pgo": {"CodeState": _ALL, "_CODE_STATE": _ALL},
    "torch._dynamo.side_effects": {
        "AttributeMutationExisting": _ALL,
        "SideEffects.mutation": _ALL,
        "SideEffects.store_attr": _ALL,
        "ValueMutationExisting": _ALL,
    },
    "torch._dynamo.source": {"FloatTensorSource": _ALL, "RandomValueSource": _ALL},
    "torch._dynamo.variables": {"TensorVariable.as_proxy": _ALL},
    "torch._dynamo.variables.higher_order_ops": {
        "AutogradFunctionApplyVariable.call_function": _ALL,
        "CheckpointHigherOrderVariable.call_function": _ALL,
    },
    "torch._dynamo.variables.misc": {"DebuggingVariable.call_function": _ALL},
    "torch._dynamo.utils": {
        "dynamo_timed": _ALL,
        "get_metrics_context": _ALL,
        "numpy_method_wrapper": _ALL,
        "numpy_operator_wrapper": _ALL,
        "numpy_to_tensor_wrapper": _ALL,
    },
    "torch._dynamo.exc": {"ObservedException": _ALL, "TorchDynamoException": _ALL, "TorchRuntimeError": _ALL},
    "torch._functorch._aot_autograd.descriptors": {
        "AOTInput": _ALL,
        "AOTOutput": _ALL,
        "GradAOTOutput": _ALL,
        "InputMutationAOTOutput": _ALL,
        "PlainAOTInput": _ALL,
        "PlainAOTOutput": _ALL,
        "TangentAOTInput": _ALL,
    },
    "torch._functorch.aot_autograd": {"aot_export_joint_with_descriptors": _ALL},
    "torch._guards": {
        "ChainedSource.base": _ALL,
        "Guard": _ALL,
        "Guard.create_fn": _ALL,
        "Guard.create_fn_name": _ALL,
        "Guard.originating_source": _ALL,
        "Guard.user_stack": _ALL,
        "GuardsSet": _ALL,
        "Source.name": _ALL,
        "TracingContext": _ALL,
        "tracing": _ALL,
    },
    "torch._subclasses.fake_tensor": {
        "DataDependentOutputException": _ALL,
        "DynamicOutputShapeException": _ALL,
        "UnsupportedOperatorException": _ALL,
    },
    "torch.export.dynamic_shapes": {"_combine_args": _ALL, "_process_dynamic_shapes": _ALL},
    "torch.utils._ordered_set": {"OrderedSet": _ALL},
}


def check_names(names: Mapping[str, Mapping[str, Releases]] = NAMES) -> None:
    """Check that torch has the names.

    Raises:
        UnsupportedError: some are gone.
    """
    missing = list(missing_names(names))
    if missing:
        known = "; ".join(f"{name} (torch {first} to {last})" for name, (first, last) in missing)
        raise UnsupportedError(
            f"graphshard.frontend: torch {torch.__version__} does not have {known}. Install a release of torch that "
            "has all of them."
        )


def missing_names(names: Mapping[str, Mapping[str, Releases]]) -> Iterator[tuple[str, Releases]]:
    """Yield the names that torch does not have, with the releases that do."""
    for module, inside in names.items():
        try:
            home: Any = importlib.import_module(module)
        except ImportError:
            yield from ((f"{module}.{name}", releases) for name, releases in inside.items())
            continue
        for name, releases in inside.items():
            if not _has(home, name):
                yield f"{module}.{name}", releases


def _has(home: Any, name: str) -> bool:
    owner, _, field = name.rpartition(".")
    found = getattr(home, owner, None) if owner else home
    fields = getattr(found, "__dataclass_fields__", {})
    return hasattr(found, field) or field in fields
