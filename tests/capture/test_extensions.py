"""What of FSDP2's protocol cannot be kept is an error that names parameter, class and remedy; no ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import graphshard
from tests.distributed.extended import Net, Rounded, even, pair, pairs_follow, patch_shards, rounded, widened
from tests.ranks import FakeWorld

X = torch.ones(2, 8)


def _patched(
    pre: Any = rounded, post: Any = widened, make: Callable[[], nn.Module] = even, **options: Any
) -> nn.Module:
    """A net on one of two ranks whose shards have these methods."""
    model = graphshard.compile(make(), init_device_mesh("cpu", (2,)), backend="eager", **options)
    patch_shards(model, pre, post)
    return model


def _draws(self: Any, mesh: Any) -> Any:
    return ((self + torch.rand_like(self)).to(torch.bfloat16),), None


def _scales(self: Any, mesh: Any) -> Any:
    return ((self / self.abs().amax()).to(torch.bfloat16),), None


def _writes(self: Any, mesh: Any) -> Any:
    return (self.add_(1).to(torch.bfloat16),), None


def _broadcasts(self: Any, mesh: Any) -> Any:
    largest = self.abs().amax()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
    return ((self / largest).to(torch.bfloat16),), None


def _counts(self: Any, mesh: Any) -> Any:
    _COUNTED.append(mesh.size())
    return (self,), None


_COUNTED: list[int] = []


def _returns_a_tensor(self: Any, mesh: Any) -> Any:
    return self.to(torch.bfloat16), None


def _takes_two(self: Any, mesh: Any, size: Any) -> Any:
    return (self,), None


def _sends_more(self: Any, mesh: Any) -> Any:
    return (self.to(torch.bfloat16), self.new_ones(1)), None


def _fails(self: Any, mesh: Any) -> Any:
    return (self[:, 1000],), None


def _makes_one(self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    return gathered[0].float()


def _transposes(self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    return gathered[0].t(), gathered


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ({"pre": _draws}, r"aten.rand_like.default draws random numbers, and FSDP2 draws them at each.*set them as an"),
        (
            {"pre": _writes},
            r"fsdp_pre_all_gather of parameter blocks.0.0.weight writes to its shard. Keep what",
        ),
        ({"pre": _broadcasts}, r"communicates by c10d.allreduce_.*Only functional all-reduces over the mesh"),
        ({"pre": _counts}, r"it changes a variable that it reads, .*Change it between the calls of the model"),
        (
            {"pre": _returns_a_tensor},
            r"blocks.0.0.weight \(Tensor\): it must return a tuple of tensors, and metadata",
        ),
        ({"pre": _takes_two}, r"it takes neither \(mesh\) nor \(mesh, outer_size, outer_stride, module, mp_policy\)"),
        ({"pre": _fails}, r"IndexError.*test_extensions.py:\d+: return \(self\[:, 1000\],\), None"),
        ({"post": _makes_one}, r"fsdp_post_all_gather of parameter .*must return the parameter and the tensors"),
        ({"post": _transposes}, r"returns a tensor of shape \[8, 16\].*the parameter has shape \[16, 8\]"),
        ({"pre": _scales, "make": lambda: Net(dim=3)}, r"6 rows|3 rows are uneven over 2 ranks, and aten.amax.default"),
        (
            {"shard_placement_fn": lambda param: Shard(param.dim() - 1), "make": lambda: Net(dim=3)},
            r"\(Tensor\): the parameter is sharded along dim 1, whose size 3 the number of ranks, 2, must divide",
        ),
        (
            {"shard_placement_fn": lambda param: Shard(param.dim() - 1), "pre": _sends_more},
            r"must have as many elements as the shard, 64, and a tensor has 1. Shard along dim 0",
        ),
    ],
)
def test_what_methods_cannot_do(fake_world: FakeWorld, methods: dict[str, Any], text: str) -> None:
    fake_world(2)
    model = _patched(**methods)
    with pytest.raises(graphshard.CaptureError) as caught:
        model(torch.ones(2, 3) if "make" in methods else X)
    assert re.search(text, str(caught.value)), str(caught.value)


def test_one_method_is_not_enough(fake_world: FakeWorld) -> None:
    fake_world(2)
    for name, other in (("fsdp_pre_all_gather", "post"), ("fsdp_post_all_gather", "pre")):
        model = _patched()
        for param in model.parameters():
            param._local_tensor.__dict__.pop(name, None)
        with pytest.raises(graphshard.CaptureError, match=rf"{name} of parameter blocks.0.0.weight \(Tensor\): "):
            model(X)
        assert other in str(model.blocks[0][0].weight._local_tensor.__dict__)


def test_a_method_of_something_else(fake_world: FakeWorld) -> None:
    fake_world(2)
    model = _patched()
    shard = model.blocks[0][0].weight._local_tensor
    shard.fsdp_pre_all_gather = lambda mesh: ((shard.to(torch.bfloat16),), None)
    with pytest.raises(graphshard.CaptureError, match=r"no method of it. Set function.__get__\(param._local_tensor\)"):
        model(X)


def test_a_class_that_forgets_the_protocol(fake_world: FakeWorld) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    with pairs_follow():
        model = graphshard.compile(even(pair), mesh, backend="eager")
        model(X)
    with pytest.raises(graphshard.CaptureError, match=r"blocks.0.0.weight \(TwoTensor\): there is none"):
        model(X)


def test_without_a_mesh(fake_world: FakeWorld, tmp_path: Any) -> None:
    model, text = even(Rounded), r"blocks.0.0.weight \(Rounded\) decides in fsdp_pre_all_gather what is gathered"
    with pytest.raises(graphshard.CaptureError, match=text):
        graphshard.explain(model, (2,), example_inputs=(X,), hardware="h100")
    with pytest.raises(graphshard.CaptureError, match=text):
        graphshard.export(model, (2,), tmp_path / "net.gshard", example_inputs=(X,))


def _reduces(self: Any, mesh: Any) -> Any:
    largest = all_reduce(self.abs().amax(), "max", mesh)
    return ((self / largest).to(torch.bfloat16), largest), None


def _multiplied(self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    values, largest = gathered
    whole = values.to(param_dtype) * largest[0]
    return whole, (whole,)


class One(nn.Module):
    """A product behind which a weight is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.sin(), self.weight)


def test_the_program(fake_world: FakeWorld) -> None:
    """Both methods are in it, where the parameter is needed; a bfloat16 tensor and a number travel as bytes."""
    fake_world(2)
    model = graphshard.compile(One(), init_device_mesh("cpu", (2,)), backend="eager")
    shard = model.weight._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = _reduces.__get__(shard), _multiplied.__get__(shard)
    with torch.no_grad():
        model(X)
    (program,) = graphshard.programs(model)
    captured, inserted = (re.sub(r"(?m) +# .*$", "", stage.text) for stage in program.history[:2])
    assert_expected_inline(
        captured,
        """\
forward:
  %0: f32[2, 8] = part:weight[0]
  %1: f32[2, 8] = input:0
  %2: f32[2, 8] = sin(%1)
  %3: f32[2, 8] = abs(%0)
  %4: f32[] = amax(%3)
  %5: f32[] = reduced(%4, max, shard)
  %6: f32[2, 8] = div.Tensor(%0, %5)
  %7: bf16[2, 8] = _to_copy(%6, dtype=bf16)
  %8: (bf16[4, 8], f32[2]) = join([%7, %5], 2, weight)
  %9: f32[2] = getitem(%8, 1)
  %10: f32[] = select.int(%9, 0, 0)
  %11: bf16[4, 8] = getitem(%8, 0)
  %12: f32[4, 8] = _to_copy(%11, dtype=f32)
  %13: f32[4, 8] = mul.Tensor(%12, %10)
  %14: f32[8, 4] = t(%13)
  %15: f32[2, 4] = mm(%2, %14)
  return %15 as output:0
""",
    )
    before = captured[: captured.index("  %8: ")]
    assert inserted.startswith(before)
    assert_expected_inline(
        inserted.removeprefix(before),
        """\
  %16: f32[1] = reshape(%5, [1])
  %17: bf16[16] = reshape(%7, [-1])
  %18: u8[32] = view.dtype(%17, u8)
  %19: f32[1] = reshape(%16, [-1])
  %20: u8[4] = view.dtype(%19, u8)
  %21: u8[36] = cat([%18, %20])
* %22: u8[72] = all_gather_into_tensor(%21, 2, shard)
  %23: u8[72] = wait_tensor(%22)
  %24: u8[2, 36] = view(%23, [2, 36])
  %25: u8[2, 32] = slice.Tensor(%24, 1, 0, 32)
  %26: u8[2, 32] = clone(%25, memory_format=torch.contiguous_format)
  %27: bf16[2, 16] = view.dtype(%26, bf16)
  %28: bf16[4, 8] = view(%27, [4, 8])
  %29: u8[2, 4] = slice.Tensor(%24, 1, 32, 36)
  %30: u8[2, 4] = clone(%29, memory_format=torch.contiguous_format)
  %31: f32[2, 1] = view.dtype(%30, f32)
  %32: f32[2] = view(%31, [2])
  %10: f32[] = select.int(%32, 0, 0)
  %12: f32[4, 8] = _to_copy(%28, dtype=f32)
  %13: f32[4, 8] = mul.Tensor(%12, %10)
  %14: f32[8, 4] = t(%13)
  %15: f32[2, 4] = mm(%2, %14)
  return %15 as output:0
""",
    )
    (row,) = program.params
    assert row.sent_bytes("gather") == 2 * (2 * 8 * 2 + 4)
    assert row.sent_dtype("gather") == torch.uint8


def test_subclasses_are_no_inputs(fake_world: FakeWorld) -> None:
    fake_world(2)
    model = graphshard.compile(even(), init_device_mesh("cpu", (2,)), backend="eager")
    with pytest.raises(
        graphshard.InputError, match=r"input args\[0\] is a TwoTensor, a tensor subclass with operators"
    ):
        model(pair(X))


def test_results_of_a_dynamic_size(fake_world: FakeWorld) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    with pairs_follow():
        model = graphshard.compile(even(pair), mesh, backend="eager", dynamic_shapes=({0: torch.export.Dim("n")},))
        with pytest.raises(graphshard.CaptureError, match="returns a TwoTensor, a tensor subclass, of a dynamic size"):
            model(torch.ones(4, 8))
