"""TorchDynamo: its strict tracer, guards, sources, side effects, errors and settings."""

from __future__ import annotations

from torch._C._dynamo.guards import GlobalStateGuard, dict_version
from torch._dynamo import config as dynamo_config
from torch._dynamo import pgo
from torch._dynamo import source as dynamo_sources
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.bytecode_transformation import create_instruction
from torch._dynamo.convert_frame import GraphCaptureOutput, compile_lock, fullgraph_capture
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.exc import ObservedException, TorchDynamoException, TorchRuntimeError, Unsupported
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState, SubgraphTracer
from torch._dynamo.side_effects import AttributeMutationExisting, SideEffects, ValueMutationExisting
from torch._dynamo.source import FloatTensorSource, RandomValueSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.trace_rules import (
    is_callable_allowed,
    is_callable_disallowed,
    is_leaf_function,
    is_nonstrict_trace_callable,
    is_polyfilled_callable,
)
from torch._dynamo.utils import (
    dynamo_timed,
    get_metrics_context,
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
    proxy_args_kwargs,
)
from torch._dynamo.variables import (
    ConstantVariable,
    ListVariable,
    SkipFunctionVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    UnspecializedNNModuleVariable,
)
from torch._dynamo.variables import builder as variable_builder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable, CheckpointHigherOrderVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable, DebuggingVariable
from torch._guards import ChainedSource, CompileContext, Guard, GuardsSet, Source, compile_context
from torch.export.dynamic_shapes import _combine_args as combine_args
from torch.export.dynamic_shapes import _process_dynamic_shapes as process_dynamic_shapes
from torch.utils._ordered_set import OrderedSet

# Whether a function has been registered to be traced otherwise than its code says.
REGISTERED = (
    *(is_callable_allowed, is_callable_disallowed, is_leaf_function, is_nonstrict_trace_callable),
    is_polyfilled_callable,
)
