"""Meshes, parameters and models that tensor parallelism with sharding rejects; no ranks are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard.errors import ArgumentError, CaptureError, UnsupportedError
from graphshard.frontend._eager_operators import OperatorWatch
from graphshard.ir.mesh import Axis, Mesh
from graphshard.options.mesh_axes import data_and_tensor
from tests.distributed.tensor_parallel import Mlps, mlps
from tests.ranks import FakeWorld

if not hasattr(fsdp, "DataParallelMeshDims"):
    pytest.skip("torch 2.11 has no DataParallelMeshDims", allow_module_level=True)
DataParallelMeshDims = fsdp.DataParallelMeshDims


def _mesh(*names: str) -> DeviceMesh:
    sizes = {1: (4,), 2: (2, 2), 3: (2, 2, 1), 4: (2, 2, 1, 1)}[len(names)]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


# --- roles of axes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "dims", "data", "tensor"),
    [
        (("dp", "tp"), None, ("dp",), "tp"),
        (("tp", "dp"), None, ("dp",), "tp"),
        (("fsdp", "tensor"), None, ("fsdp",), "tensor"),
        (("replicate", "shard", "tp"), None, ("replicate", "shard"), "tp"),
        (("dp", "fsdp", "tp"), None, ("dp", "fsdp"), "tp"),
        (("x", "y"), {"shard": "x"}, ("x",), "y"),
        (("x", "y"), {"shard": ("y",)}, ("y",), "x"),
        (("x", "y", "z"), {"replicate": "x", "shard": "z"}, ("x", "z"), "y"),
        (("x", "y"), {"replicate": "x", "shard": "y"}, ("x", "y"), None),
        (("nodes", "gpus"), None, ("nodes", "gpus"), None),
        (("dp",), None, ("dp",), None),
        (("dp", "cp"), None, ("dp_cp",), None),
        (("cp",), None, ("cp",), None),
        (("dp", "cp", "tp"), None, ("dp_cp",), "tp"),
        (("dp_replicate", "dp_shard", "cp", "tp"), None, ("dp_replicate", "dp_shard_cp"), "tp"),
        (("replicate", "cp"), None, ("replicate", "cp"), None),
        (("x", "y", "z"), {"shard": ("x", "y")}, ("x_y",), "z"),
        (("x", "y", "z"), {"replicate": ("x", "y"), "shard": "z"}, ("x_y", "z"), None),
        (("x", "y"), {"replicate": "x"}, ("x", "x/1"), "y"),
        (("x", "y"), {"replicate": ("x", "y")}, ("x_y", "x_y/1"), None),
        (("fsdp",), {"replicate": "fsdp"}, ("fsdp", "fsdp/1"), None),
    ],
    ids=str,
)
def test_roles(fake_world: FakeWorld, names: Any, dims: Any, data: tuple[str, ...], tensor: str | None) -> None:
    """By name, or by argument; two axes with unknown names are data axes, as in FSDP2."""
    fake_world(4)
    found, other = data_and_tensor(_mesh(*names), dims and DataParallelMeshDims(**dims))
    assert found.mesh_dim_names == data
    assert (other.mesh_dim_names if other is not None else None) == ((tensor,) if tensor else None)


def test_the_tensor_axis_is_innermost() -> None:
    mesh = Mesh.of_shape((2, 4)).with_tensor("tp", 2)
    assert mesh.grid == (Axis("replicate", 2, "replicate"), Axis("shard", 4, "shard"), Axis("tp", 2, "tensor"))
    assert mesh.tensors == (Axis("tp", 2, "tensor"),)
    assert mesh.with_regather(2).grid == Mesh.of_shape((2, 4)).with_regather(2).with_tensor("tp", 2).grid == mesh.grid
    assert (mesh.size, mesh.distance(mesh.shard)) == (16, 2)


WRONG_MESHES: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "unknown name": (
        ("x", "tp"),
        None,
        r"^mesh \('x', 'tp'\): the name of the axis 'x' does not say what it is for\. Data axes are 'dp', 'data', .*, "
        r"tensor axes 'tp', 'tensor', 'tensor_parallel'\. Rename it, pass the data axes alone, .* dp_mesh_dims=Data",
    ),
    "other kinds": (("dp", "pp"), None, r"the name of the axis 'pp' does not say what it is for"),
    "no data axis": (("tp",), None, r"^mesh \('tp',\) must have one data axis .* or two .*, and has none\.$"),
    "three data axes": (("dp", "replicate", "shard", "tp"), None, r"has 'dp', 'replicate', 'shard'\.$"),
    "exchanged": (("shard", "replicate", "tp"), None, r"the outer one replicates and the inner one shards\. Exchange"),
    "replicas only": (
        ("replicate", "tp"),
        None,
        r"no axis to shard over, as 'replicate' replicates\. Add one; of size 1 .* Or say that nothing is sharded: "
        r"dp_mesh_dims=DataParallelMeshDims\(replicate='replicate'\)\.$",
    ),
    "axis missing": (
        ("x", "y"),
        DataParallelMeshDims(shard="z"),
        r"^dp_mesh_dims: mesh has no axis 'z'\. It has 'x', 'y'\.$",
    ),
    "used twice": (
        ("x", "y"),
        DataParallelMeshDims(shard="x", replicate="x"),
        r"^dp_mesh_dims: the axis 'x' is used twice\. Give ",
    ),
    "no axis named": (
        ("x", "y"),
        DataParallelMeshDims(shard=()),
        r"^dp_mesh_dims names no axis\. Name those to shard over, to replicate over, or both",
    ),
    "context outside": (("cp", "dp"), None, r"replicate are outermost, .* as in \('dp', 'cp'\)\.$"),
    "tensor axes outside of two": (("tp", "y", "x"), DataParallelMeshDims(shard=("x", "y")), r"\('x', 'y', 'tp'\)\.$"),
    "no dims": (
        ("x", "y"),
        3,
        r"^dp_mesh_dims must be a torch\.distributed\.fsdp\.DataParallelMeshDims such as .*, got 3",
    ),
}


@pytest.mark.parametrize("name", WRONG_MESHES)
def test_wrong_meshes(fake_world: FakeWorld, name: str) -> None:
    """An axis of an unknown role is an error that lists the choices."""
    fake_world(4)
    names, dims, message = WRONG_MESHES[name]
    for run in (graphshard.compile, graphshard.fully_shard):
        with pytest.raises((ArgumentError, UnsupportedError), match=message):
            run(Mlps(), mesh=_mesh(*names), dp_mesh_dims=dims)


# --- parameters ---------------------------------------------------------------------------------------------------


def _on_another_mesh() -> nn.Module:
    return mlps(init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "a"))["tp"])


def _on_the_data_axis() -> nn.Module:
    return mlps(_mesh("dp", "tp")["dp"])


def _on_two_meshes() -> nn.Module:
    mesh = _mesh("dp", "tp")
    model = mlps(mesh["tp"])
    parallelize_module(model, init_device_mesh("cpu", (4,), mesh_dim_names=("b",)), {"head": RowwiseParallel()})
    return model


def _partial() -> nn.Module:
    model = Mlps()
    value = DTensor.from_local(torch.ones(5), _mesh("dp", "tp")["tp"], [Partial()])
    model.head.bias = nn.Parameter(value)
    return model


def _strided() -> nn.Module:
    model = Mlps()
    value = distribute_tensor(torch.ones(5, 8), _mesh("dp", "tp")["tp"], [Replicate()])
    model.head.weight = nn.Parameter(
        DTensor.from_local(value.to_local().t().contiguous().t(), value.device_mesh, [Replicate()])
    )
    return model


class _Own(torch.Tensor):
    """A subclass whose operators may behave differently."""

    __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl


def _of_a_subclass() -> nn.Module:
    model, mesh = Mlps(), _mesh("dp", "tp")["tp"]
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(5, 8), mesh, [Replicate()]))
    model.head.weight._local_tensor = torch.ones(5, 8).as_subclass(_Own)
    return model


def _on_the_whole_mesh() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model = Mlps()
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(4, 8), mesh, [Shard(0), Replicate()]))
    return model


def _sharded() -> nn.Module:
    return fully_shard(Mlps(), mesh=_mesh("dp", "tp")["dp"])


WRONG_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "not parallelized": (
        Mlps,
        r"^mesh has a tensor axis, 'tp', and no parameter of Mlps is distributed over it\. Call .*parallelize_module",
    ),
    "another mesh": (
        _on_another_mesh,
        r"^parameter layers\.0\.up\.weight is distributed over DeviceMesh.*tensor axis is",
    ),
    "the data axis": (_on_the_data_axis, r"^parameter layers\.0\.up\.weight is a DTensor already \(fully_shard or"),
    "two meshes": (
        _on_two_meshes,
        r"^parameter head\.weight is distributed over .*, and parameter layers\.0\.up\.weig",
    ),
    "partial sums": (_partial, r"^parameter head\.bias is placed as P.*\(sum\) on the tensor axis\. Use Shard or"),
    "a subclass": (
        _of_a_subclass,
        r"^parameter head\.weight is a DTensor of a _Own, a tensor subclass\. Distribute",
    ),
    "the whole mesh": (
        _on_the_whole_mesh,
        r"^parameter head\.weight is a DTensor on the data axes, too, of .* where they are not the outermost\. Order",
    ),
    "strides": (_strided, r"^parameter head\.weight has pieces that are not contiguous on the tensor axis\. Make it"),
    "sharded": (_sharded, r"^mesh has a tensor axis, 'tp', and no parameter of Mlps is distributed over it\."),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_wrong_parameters(fake_world: FakeWorld, name: str) -> None:
    fake_world(4)
    make, message = WRONG_MODELS[name]
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        graphshard.compile(make(), _mesh("dp", "tp"))


def test_data_axes_of_another_mesh(fake_world: FakeWorld) -> None:
    """`fully_shard` takes only the data mesh: both must be parts of one mesh."""
    fake_world(4)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "b"))["b"]
    message = (
        r"^parameter layers\.0\.up\.weight is distributed over .*, which is not another axis of the mesh that .*Take"
    )
    with pytest.raises(ArgumentError, match=message):
        graphshard.fully_shard(mlps(_mesh("dp", "tp")["tp"]), mesh=other)


# --- models, and features without support for a tensor axis ---------------------------------------------------------


class _Sums(Mlps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.all_reduce(x.detach(), "sum", self.mesh)


def test_a_group_outside_of_the_mesh_is_an_axis(fake_world: FakeWorld) -> None:
    """`tests/field/test_local_tensors.py` trains such models."""
    fake_world(4)
    model = _Sums()
    model.mesh = DeviceMesh("cpu", [0, 3])
    graphshard.compile(model, _mesh("dp", "tp")["dp"], backend="eager")
    model(torch.randn(2, 8))
    (program,) = graphshard.programs(model)
    assert [(axis.size, axis.role) for axis in program.mesh.axes] == [(2, "shard"), (2, "tensor")]


class _Communicates(Mlps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.broadcast(x.detach(), 0, self.mesh)


def test_rejects_collectives_that_it_cannot_name(fake_world: FakeWorld) -> None:
    fake_world(4)
    mesh = _mesh("dp", "tp")
    model = _Communicates()
    model.mesh = mesh["tp"]
    parallelize_module(model.layers[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    graphshard.compile(model, mesh, backend="eager", fullgraph=True)
    message = r"It communicates by _c10d_functional\.broadcast.* Use an all-reduce, an all-gather, a reduce-scatter or"
    with pytest.raises(CaptureError, match=message):
        model(torch.randn(2, 8))


class _Writes(Mlps):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].up.weight.mul_(2)
        return super().forward(x)


def test_rejects_writes_to_a_distributed_parameter(fake_world: FakeWorld) -> None:
    fake_world(4)
    mesh = _mesh("dp", "tp")
    model = _Writes()
    parallelize_module(model.layers[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    graphshard.compile(model, mesh, backend="eager")
    with pytest.raises(
        CaptureError,
        match=r"it writes parameter layers\.0\.up\.weight \(aten\.mul_\.Tensor\)\. Write it outside of forward",
    ):
        model(torch.randn(2, 8))


def test_random_numbers_for_a_dtensor_on_a_gpu(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor sets the generator's state around each operator on a GPU; here the mesh pretends to have one."""
    fake_world(4)
    value = DTensor.from_local(torch.ones(4), _mesh("dp", "tp")["tp"], [Replicate()])
    monkeypatch.setattr(DeviceMesh, "device_type", "cuda")
    with OperatorWatch({}), pytest.raises(CaptureError, match=r"aten\.(native_dropout|bernoulli)"):
        torch.nn.functional.dropout(value)


def test_rejects_features_without_tensor_axis_support(fake_world: FakeWorld, tmp_path: Any) -> None:
    """Rejected with a remedy: it would shard over the tensor axis, or lose it."""
    fake_world(4)
    mesh, x = _mesh("dp", "tp"), torch.randn(2, 8)
    with pytest.raises(
        ArgumentError, match=r"^mesh \{'dp': 2, 'tp': 2\}: .* is made for them by parallelize=, a functi"
    ):
        graphshard.explain(Mlps(), {"dp": 2, "tp": 2}, example_inputs=(x,), hardware="h100")
    refused = r"^mesh must have data axes only, got \('dp', 'tp'\): 'tp' is none\..* give parallelize=, a function of"
    with pytest.raises(ArgumentError, match=refused):
        graphshard.export(Mlps(), {"dp": 2, "tp": 2}, tmp_path / "x.gshard", example_inputs=(x,))
    graphshard.export(Mlps(), (2, 2), tmp_path / "x.gshard", example_inputs=(x,), backend="eager")
    with pytest.raises(
        ArgumentError, match=r"^mesh has a tensor axis, 'tp', and no parameter of Mlps is distributed ov"
    ):
        graphshard.load(tmp_path / "x.gshard", Mlps(), mesh)
    for run in (graphshard.explain, graphshard.export):
        path = () if run is graphshard.explain else (tmp_path / "y.gshard",)
        with pytest.raises(ArgumentError, match=r"is a DTensor already .*Pass the plain module, and to cut it along a"):
            run(mlps(mesh["tp"]), (2,), *path, example_inputs=(x,))
    odd = parallelize_module(nn.Sequential(nn.Linear(8, 5)), mesh["tp"], {"0": ColwiseParallel()})
    graphshard.compile(odd, mesh, backend="eager", memory_limit=1 << 30, example_inputs=(x,))
    (program,) = graphshard.programs(odd)
    assert program.plan.prediction.peak_bytes <= 1 << 30
