"""Mistakes of people who come from FSDP1, FSDP2, DDP or torch.compile, and the errors that help them.

Each function makes one mistake; `expected` is a part of the error's text that says what to do instead.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import graphshard
from tests.distributed.twins import world_mesh

Mistake = Callable[[DeviceMesh], object]
# By the name of the function: the mistake, and what its error says.
MISTAKES: dict[str, tuple[Mistake, str]] = {}
X, Y = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        x = self.head(x)
        return x if y is None else nn.functional.cross_entropy(x, y)


def compiled(mesh: DeviceMesh, model: Any = None, **options: Any) -> Any:
    return graphshard.compile(Net() if model is None else model, mesh, **{"backend": "eager", **options})


def mistake(expected: str) -> Callable[[Mistake], Mistake]:
    """Add a mistake to the table."""

    def add(function: Mistake) -> Mistake:
        MISTAKES[function.__name__] = function, expected
        return function

    return add


# --- the model ----------------------------------------------------------------------------------------------------


@mistake("its submodule 'layers.0' is sharded by FSDP2. Call torch's fully_shard on the model, too")
def compile_after_fsdp2_of_a_part(mesh: DeviceMesh) -> None:
    model = Net()
    fsdp.fully_shard(model.layers[0], mesh=mesh)
    compiled(mesh, model)


@mistake("torch.jit.trace and torch.export cannot trace Net")
def trace_after_compile(mesh: DeviceMesh) -> None:
    torch.jit.trace(compiled(mesh), (X,))


@mistake("Trace the model before compile, or use graphshard.export")
def export_after_compile(mesh: DeviceMesh) -> None:
    torch.export.export(compiled(mesh), (X,))


@mistake("fully_shard has already been applied")
def fsdp2_after_compile(mesh: DeviceMesh) -> None:
    fsdp.fully_shard(compiled(mesh), mesh=mesh)


@mistake("Script the model before compile, or use graphshard.export")
def script_after_compile(mesh: DeviceMesh) -> None:
    torch.jit.script(compiled(mesh))


@mistake("Start a process per rank with torchrun")
def share_memory_after_compile(mesh: DeviceMesh) -> None:
    """torch crashes: the storage of a DTensor is empty."""
    compiled(mesh).share_memory()


@mistake("Call graphshard.rebuild(model) after such a change")
def checkpoint_wrapper_after_compile(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    model(X, Y)


@mistake("Leave torch.compile out; Inductor compiles the model")
def torch_compile_first(mesh: DeviceMesh) -> None:
    compiled(mesh, torch.compile(Net()))


@mistake("Leave torch.jit.script or trace out")
def script(mesh: DeviceMesh) -> None:
    module = nn.Linear(8, 8)
    module.__class__ = torch.jit.ScriptModule  # torch.jit.script warns that it is deprecated
    compiled(mesh, module)


@mistake("got the class Net. Pass Net(...)")
def class_for_model(mesh: DeviceMesh) -> None:
    compiled(mesh, Net)


@mistake("model must be an nn.Module, got function")
def function_for_model(mesh: DeviceMesh) -> None:
    compiled(mesh, lambda x: x)


@mistake("model must be an nn.Module, got list")
def list_for_model(mesh: DeviceMesh) -> None:
    compiled(mesh, [Net()])


@mistake("there is no file 'meta-llama/Llama-3-8B'. Give a module")
def name_for_model(mesh: DeviceMesh) -> None:
    compiled(mesh, "meta-llama/Llama-3-8B")


@mistake("it is already compiled. Compile the root module, once")
def compile_twice(mesh: DeviceMesh) -> None:
    compiled(mesh, compiled(mesh))


@mistake("is a part of a compiled model. Compile the root module, once")
def compile_a_part(mesh: DeviceMesh) -> None:
    compiled(mesh, compiled(mesh).layers[0])


@mistake("its submodule '0' is already compiled")
def compile_around(mesh: DeviceMesh) -> None:
    compiled(mesh, nn.Sequential(compiled(mesh)))


@mistake("Call fully_shard on the inner modules first")
def fully_shard_outside_in(mesh: DeviceMesh) -> None:
    model = Net()
    graphshard.fully_shard(model, mesh=mesh)
    graphshard.fully_shard(model.layers[0], mesh=mesh)


@mistake("Allocate them with model.to_empty(device=...) and initialize or load them")
def meta_model(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Net()
    compiled(mesh, model)(X, Y)


@mistake("Call graphshard outside of it")
def inference_mode(mesh: DeviceMesh) -> None:
    with torch.inference_mode():
        compiled(mesh)


@mistake("The model is the first argument, the mesh the second")
def mesh_for_model(mesh: DeviceMesh) -> None:
    graphshard.compile(mesh, Net())  # type: ignore[arg-type]


# --- the mesh -----------------------------------------------------------------------------------------------------


@mistake("Make one with torch.distributed.device_mesh.init_device_mesh('cuda', (world_size,))")
def number_for_mesh(mesh: DeviceMesh) -> None:
    graphshard.compile(Net(), 2)  # type: ignore[arg-type]


@mistake("mesh must be a torch.distributed DeviceMesh, got a ProcessGroup")
def group_for_mesh(mesh: DeviceMesh) -> None:
    graphshard.compile(Net(), dist.group.WORLD)  # type: ignore[arg-type]


@mistake("mesh must be a torch.distributed DeviceMesh, got 'cpu'")
def device_for_mesh(mesh: DeviceMesh) -> None:
    graphshard.compile(Net(), "cpu")  # type: ignore[arg-type]


@mistake("torch.cuda.is_available() is False here. Use a 'cpu' mesh on this machine")
def gpu_mesh_without_gpu(mesh: DeviceMesh) -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        compiled(DeviceMesh("cuda", [0, 1], _init_backend=False))


@mistake("Start the script with torchrun")
def no_process_group(mesh: DeviceMesh) -> None:
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        graphshard.compile(Net())


@mistake("Pass those axes of it, after naming them with mesh_dim_names")
def mesh_of_three_axes(mesh: DeviceMesh) -> None:
    compiled(init_device_mesh("cpu", (2, 1, 1)))


# --- arguments of other libraries --------------------------------------------------------------------------------

OTHER_ARGUMENTS = {
    "auto_wrap_policy": "units=, by patterns, classes or functions",
    "backward_prefetch": "Prefetching is planned",
    "bucket_cap_mb": "Buckets are planned",
    "cpu_offload": "offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()",
    "device_id": "The mesh has the device",
    "device_mesh": "It is the argument mesh",
    "disable": "Leave out the call of compile",
    "dynamic": "Sizes that change become symbols by themselves",
    "find_unused_parameters": "Parameters without gradients need no setting",
    "forward_prefetch": "Prefetching is planned",
    "limit_all_gathers": "memory_limit= sets the bytes",
    "mixed_precision": "mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy",
    "mode": "backend= is 'inductor' or 'eager'",
    "options": "Set torch._inductor.config",
    "param_dtype": "mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=...)",
    "precision": "mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy",
    "process_group": "DeviceMesh.from_group(group, 'cuda')",
    "sharding_strategy": "SHARD_GRAD_OP is reshard_after_forward=False",
    "sync_module_states": "Load or initialize the model alike on all ranks",
    "use_orig_params": "Parameters always keep their names",
    "backnd": "Did you mean 'backend'",
    "reshard": "Did you mean 'reshard_after_forward'",
}


def _with_argument(name: str) -> Mistake:
    return lambda mesh: compiled(mesh, **{name: True})


MISTAKES |= {f"argument_{name}": (_with_argument(name), text) for name, text in OTHER_ARGUMENTS.items()}

# --- values of options -------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt_unit": ({"units": ["layer.*"]}, "Use names as in named_modules(), such as ['layers', 'layers.0'"),
    "one_class_for_units": ({"units": nn.Linear}, "a sequence of name patterns such as ['layers.*']"),
    "class_without_modules": ({"units": [nn.Conv2d]}, "Net has no submodule of class Conv2d with parameters"),
    "misspelt_hardware": ({"hardware": "h10"}, "graphshard calibrate --out FILE"),
    "backend_of_torch_compile": ({"backend": "aot_eager"}, "backend must be one of 'inductor', 'eager'"),
    "memory_limit_as_text": ({"memory_limit": "70GB"}, "whole number of bytes, such as 70 * 10**9"),
    "memory_limit_as_float": ({"memory_limit": 70e9}, "whole number of bytes, such as 70 * 10**9"),
    "dtype_for_policy": ({"mp_policy": torch.float16}, "such as MixedPrecisionPolicy(param_dtype=torch.float16)"),
    "policy_of_fsdp1": ({"mp_policy": fsdp.MixedPrecision()}, "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
    "text_for_policy": ({"mp_policy": "bf16"}, "got 'bf16'"),
    "offload_as_bool": ({"offload_policy": True}, "a torch.distributed.fsdp.CPUOffloadPolicy or None"),
    "offload_of_fsdp1": ({"offload_policy": fsdp.CPUOffload(True)}, "got CPUOffload"),
    "ignored_by_name": ({"ignored_params": ["head.weight"]}, "Pass the objects in model.parameters()"),
    "strategy_for_reshard": (
        {"reshard_after_forward": fsdp.ShardingStrategy.FULL_SHARD},
        "True, False, None, or a number of ranks",
    ),
    "tensor_for_inputs": ({"example_inputs": X}, "Pass (tensor,)"),
    "dict_for_inputs": ({"example_inputs": {"x": X, "y": Y}}, "Pass it as example_kwargs="),
    "parameter_for_unit": ({"units": ["head.weight"]}, "Use names as in named_modules()"),
    "automatic_without_limit": ({"activation": "auto"}, "Give memory_limit= in bytes"),
}


def _with_options(options: dict[str, Any]) -> Mistake:
    return lambda mesh: compiled(mesh, **options)


MISTAKES |= {name: (_with_options(options), text) for name, (options, text) in OPTIONS.items()}

# --- parameters and optimizers -----------------------------------------------------------------------------------


@mistake("Make it of model.parameters() after graphshard.compile or fully_shard")
def optimizer_before_compile(mesh: DeviceMesh) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(mesh, model)(X, Y).backward()
    optimizer.step()


@mistake("AdamW was made before graphshard replaced the model's parameters by shards")
def optimizer_before_fully_shard(mesh: DeviceMesh) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    graphshard.fully_shard(model, mesh=mesh, backend="eager")
    model(X, Y).backward()
    optimizer.step()


@mistake("trains none of head.weight, head.bias. Make it")
def optimizer_of_some_before_compile(mesh: DeviceMesh) -> None:
    model = Net()
    head = list(model.head.parameters())
    compiled(mesh, model)(X, Y).backward()
    torch.optim.SGD([{"params": model.layers.parameters()}, {"params": head}], lr=0.1).step()


@mistake("is not the model's. Make the optimizer of model.parameters() after graphshard.compile")
def compile_step_of_another_models_optimizer(mesh: DeviceMesh) -> None:
    graphshard.compile_step(compiled(mesh), torch.optim.SGD(Net().parameters(), lr=0.1))


@mistake("got the class AdamW. Make it of model.parameters()")
def class_for_optimizer(mesh: DeviceMesh) -> None:
    graphshard.compile_step(compiled(mesh), torch.optim.AdamW)  # type: ignore[arg-type]


@mistake("model: a SGD is not compiled")
def compile_step_in_wrong_order(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    graphshard.compile_step(torch.optim.SGD(model.parameters(), lr=0.1), model)  # type: ignore[arg-type]


@mistake("the gradient of a parameter of shape [4, 8] is a plain tensor")
def plain_gradient(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    model.head.weight.grad = torch.zeros(4, 8)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@mistake("Load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict")
def optimizer_state_of_plain_model(mesh: DeviceMesh) -> None:
    model, plain = compiled(mesh), Net()
    before = torch.optim.AdamW(plain.parameters())
    plain(X, Y).backward()
    before.step()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(before.state_dict())
    model(X, Y).backward()
    optimizer.step()


@mistake("head.weight: a DTensor was assigned to its .data, which changes nothing")
def dtensor_for_data(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    model.head.weight.data = distribute_tensor(torch.zeros(4, 8), mesh, [Shard(0)])
    model(X, Y)


@mistake("copy instead, within torch.no_grad(): param.copy_(torch.distributed.tensor.distribute_tensor(")
def plain_tensor_for_data(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    model.head.weight.data = torch.zeros(4, 8)
    model(X, Y)


@mistake("parameter head.weight was replaced by a plain tensor. Assign a DTensor")
def plain_parameter(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    model.head.weight = nn.Parameter(torch.zeros(4, 8))
    model(X, Y)


@mistake("parameter extra.weight was added after graphshard.compile")
def parameter_added(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    model.extra = nn.Linear(2, 2)
    model(X, Y)


@mistake("parameter head.weight has shape [4, 9], it had [4, 8]")
def data_of_another_shape(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    model.head.weight.data = distribute_tensor(torch.zeros(4, 9), mesh, [Shard(0)])
    model(X)


@mistake("it is of a model within DistributedDataParallel, which adds 'module.' to names. Nothing was loaded")
def state_dict_of_ddp(mesh: DeviceMesh) -> None:
    compiled(mesh).load_state_dict({f"module.{name}": value for name, value in Net().state_dict().items()})


@mistake("state_dict has 'head._orig_mod.weight' and not 'head.weight': it is of a model within torch.compile")
def state_dict_of_torch_compile(mesh: DeviceMesh) -> None:
    """Without `strict`, torch loads what fits, and says nothing."""
    values = {name.replace("head.", "head._orig_mod."): value for name, value in Net().state_dict().items()}
    compiled(mesh).load_state_dict(values, strict=False)


@mistake("mixed torch.Tensor and DTensor")
def plain_tensor_copied(mesh: DeviceMesh) -> None:
    with torch.no_grad():
        compiled(mesh).head.weight.copy_(torch.zeros(4, 8))


# --- pickling, and what is not there ----------------------------------------------------------------------


@mistake("Save its state_dict(), or use graphshard.checkpoint.save_checkpoint")
def pickled(mesh: DeviceMesh) -> None:
    pickle.dumps(compiled(mesh))


@mistake("Net is compiled by graphshard and cannot be pickled")
def saved_whole(mesh: DeviceMesh) -> None:
    torch.save(compiled(mesh), io.BytesIO())


@mistake("a Net is not compiled. Call graphshard.compile(model, mesh) first")
def programs_of_a_plain_model(mesh: DeviceMesh) -> None:
    graphshard.programs(Net())


@mistake("has no attribute 'compiel'")
def misspelt_function(mesh: DeviceMesh) -> None:
    _ = graphshard.compiel


# --- calls -------------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "missing_argument": ((), {}, "Net.forward() missing a required argument: 'x'"),
    "too_many_arguments": ((X, Y, 3), {}, "Net.forward() too many positional arguments"),
    "misspelt_argument": ((X,), {"targets": Y}, "Net.forward() got an unexpected keyword argument 'targets'"),
    "double_inputs": ((X.double(), Y), {}, "x = layer(x).relu(). Cast one of them"),
    "bfloat16_inputs": ((X.bfloat16(), Y), {}, "must have the same dtype, but got torch.float32 and torch.bfloat16"),
    "wrong_width": ((torch.ones(2, 7), Y), {}, "mat1 and mat2 shapes cannot be multiplied (2x7 and 8x8)"),
    "target_out_of_range": ((X, Y + 9), {}, "Target 9 is out of bounds. at "),
    "float_target": ((X, Y.float()), {}, "Long"),  # the text differs between releases of torch
    "inputs_elsewhere": ((X.to("meta"), Y), {}, "args[0] is on meta, the model's mesh is on cpu. Move it there"),
    "failed_first_call": ((X.double(), Y), {}, "parameters, buffers and attributes are as before"),
    "list_input": (([[1.0] * 8], Y), {}, "must be Tensor, not list"),
}


def _with_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mistake:
    return lambda mesh: compiled(mesh)(*args, **kwargs)


MISTAKES |= {name: (_with_call(args, kwargs), text) for name, (args, kwargs, text) in CALLS.items()}


@mistake("and torch.bfloat16 in the module 1. Cast one of them")
def dtypes_between_modules_of_torch(mesh: DeviceMesh) -> None:
    compiled(mesh, nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)), backend="inductor")(X.bfloat16())


@mistake("Linear.forward() missing a required argument: 'input'")
def missing_argument_of_a_part(mesh: DeviceMesh) -> None:
    compiled(mesh).head()


@mistake("does not require grad and does not have a grad_fn")
def backward_without_gradients(mesh: DeviceMesh) -> None:
    with torch.no_grad():
        loss = compiled(mesh)(X, Y)
    loss.backward()


@mistake("only for scalar outputs")
def backward_of_logits(mesh: DeviceMesh) -> None:
    compiled(mesh)(X).backward()


@mistake("backward through the graph a second time")
def backward_twice(mesh: DeviceMesh) -> None:
    loss = compiled(mesh)(X, Y)
    loss.backward()
    loss.backward()


def made(name: str) -> str:
    """Make a mistake on this rank, and return the error's type and text."""
    torch.manual_seed(0)
    function, _ = MISTAKES[name]
    try:
        function(world_mesh())
    except Exception as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
    return "no error"
