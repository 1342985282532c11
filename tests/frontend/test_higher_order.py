"""Higher-order operators stay one node, with the results of plain torch."""

from __future__ import annotations

import copy
import io
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.codec.program_format import program_from_json, program_to_json
from graphshard.cost.costs import Costs
from graphshard.cost.flops import flop_of
from graphshard.cost.profile import load_profile
from graphshard.errors import CaptureError
from graphshard.frontend.capture import capture
from graphshard.ir.printer import print_program
from graphshard.ir.subgraph import HIGHER_ORDER, is_higher_order, subgraphs_of
from graphshard.lower.regions import outline
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import Pipeline, run_pass
from tests.distributed.twins import assert_same, fsdp2, grads_of, local, world_mesh
from tests.ranks import FakeWorld, Ranks

LENGTH = 16


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class _Cond(_Layers):
    """Parameters in both branches, one of which runs."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return torch.cond(y.sum() > 0, lambda y: self.b(y).tanh(), lambda y: self.a(y) - 1, (y,)).pow(2).sum()


class _WhileLoop(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5), (torch.tensor(0), self.a(x)))
        return self.b(y).pow(2).sum()


class _Scan(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        last, all_of_them = scan(lambda c, y: ((c * 0.9 + self.b(y)).tanh(), c * y), torch.zeros_like(y[0]), y, dim=0)
        return last.pow(2).sum() + all_of_them.sum()


class _Map(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return map_rows(lambda row: self.b(row).tanh(), self.a(x)).pow(2).sum()


class _Block(_Layers):
    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).tanh())


class _Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).sum()


class _Checkpoint(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        region = checkpoint(lambda x: F.dropout(self.a(x).tanh(), 0.3), x, use_reentrant=False)
        return self.b(region).pow(2).sum()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.slopes = nn.Parameter(torch.tensor([0.1, -0.2]))

    def attend(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 6, 4).transpose(1, 2).chunk(3, dim=1)
        attended = flex_attention(q, k, v, **options)
        assert isinstance(attended, Tensor)
        return self.out(attended.transpose(1, 2).flatten(2)).pow(2).sum() + self.slopes.sum()


class _ScoreMod(_Attention):
    """The scores depend on a parameter, which has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, score_mod=lambda score, b, h, i, j: score + self.slopes[h] * (i - j))


class _MaskMade(_Attention):
    """The mask depends on an input."""

    def forward(self, x: Tensor) -> Tensor:
        documents = (x[0, :, 0] > 0).cumsum(0)
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]), None, None, LENGTH, LENGTH, device="cpu"
        )
        return self.attend(x, block_mask=mask)


class _MaskGiven(_Attention):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return self.attend(x, block_mask=mask)


MODELS: dict[str, tuple[type[nn.Module], str]] = {
    "cond": (_Cond, "cond"),
    "while_loop": (_WhileLoop, "while_loop"),
    "scan": (_Scan, "scan"),
    "map": (_Map, "map_impl"),
    "nested_compile_region": (_Regions, "invoke_subgraph"),
    "checkpoint": (_Checkpoint, ""),
    "score_mod": (_ScoreMod, "flex_attention"),
    "mask made": (_MaskMade, "flex_attention"),
    "mask given": (_MaskGiven, "flex_attention"),
}
ATTENTIONS = ("score_mod", "mask made", "mask given")


def _inputs(name: str, step: int) -> tuple[Any, ...]:
    x = torch.randn(2, LENGTH, 8, generator=torch.Generator().manual_seed(step))
    if name != "mask given":
        return (x,)
    return x, create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")


def _pair(name: str, backend: str) -> tuple[nn.Module, nn.Module]:
    """Return plain torch's model, sharded by FSDP2 if there are several ranks, and graphshard's."""
    warnings.filterwarnings("ignore", message="(?s).*flex_attention called without torch.compile")
    torch.manual_seed(0)
    plain = MODELS[name][0]()
    ours = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend=backend)
    return fsdp2(plain, world_mesh()), ours


def _any_device(*_: Tensor) -> None:
    """Let attention be differentiated on a CPU: torch rejects it although its operators support it."""


def _train(rank: int, world_size: int, name: str) -> list[Any]:
    """Train both, including attention, which torch only runs forward on a CPU."""
    pair = _pair(name, "eager")
    with mock.patch.object(flex, "_validate_device", _any_device):
        for step in range(3):
            found = []
            for model in pair:
                torch.manual_seed(step)
                model.zero_grad()
                loss = model(*_inputs(name, step + 10 * rank))
                loss.backward()
                found.append({"loss": loss.detach(), **{n: local(g) for n, g in grads_of(model).items()}})
            assert_same(found[1], found[0], f"step {step}")
    (program,) = graphshard.programs(pair[1])
    called = set()
    for region in program.regions.values():
        called |= {node.target for node in region.module.graph.nodes if is_higher_order(node)}
        assert all(f"\n{each}:  # argument of a call\n" in region.text for each in subgraphs_of(region.module.graph))
    return sorted(each for each, operator in HIGHER_ORDER.items() if operator in called)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick_cases("scan", "map", "nested_compile_region", "checkpoint", "score_mod", "mask given")
def test_matches_plain_torch(ranks: Ranks, name: str) -> None:
    """One program serves all steps and contains the operator as a node."""
    (called,) = ranks(1).run(_train, name)
    assert MODELS[name][1] in (called or [""])


@pytest.mark.parametrize("name", ["cond", "score_mod", "nested_compile_region"])
@pytest.mark.slow
def test_matches_fsdp2(ranks: Ranks, name: str) -> None:
    """Ranks may take different branches: parameters of both branches are gathered before."""
    first, second = ranks(2).run(_train, name)
    assert first == second


def _compile(rank: int, world_size: int, name: str) -> None:
    plain, ours = _pair(name, "inductor")
    training = name not in ATTENTIONS
    with warnings.catch_warnings(), torch.set_grad_enabled(training):
        warnings.filterwarnings("error", message="Inductor cannot compile")
        for step in range(2):
            found = []
            for model in (plain, ours):
                torch.manual_seed(step)
                model.zero_grad()
                loss = model(*_inputs(name, step))
                if training:
                    loss.backward()
                found.append([loss.detach(), *(local(g) for g in grads_of(model).values() if g is not None)])
            torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_inductor_compiles_them(ranks: Ranks, name: str) -> None:
    """Attention only runs forward, because Inductor has no CPU backward for it."""
    if name == "mask given" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("its Inductor has no attention of a tensor to itself for CPUs")
    ranks(1).run(_compile, name)


def _stages(rank: int, world_size: int, name: str) -> list[float]:
    """Load the captured program from a file, run all passes on it, and return its costs."""
    _, ours = _pair(name, "eager")
    texts = []

    def captured(*args: Any, **kwargs: Any) -> Any:
        program = capture(*args, **kwargs)
        texts.append((print_program(program), program_to_json(replace(program, trace=None))))
        return program

    with (
        mock.patch("graphshard.module.tracer.capture_call", captured),
        mock.patch.object(flex, "_validate_device", _any_device),
    ):
        ours(*_inputs(name, 0))
    (program,) = graphshard.programs(ours)
    ((text, file),) = texts
    again = program_from_json(file)
    assert print_program(again) == text
    for step in Pipeline():
        run_pass(step, again, Observer("each"))
    outline(again)
    assert again.regions.keys() == program.regions.keys()
    calls = [node for region in program.regions.values() for node in region.module.graph.nodes if is_higher_order(node)]
    costs = Costs(load_profile("h100"))
    return [*(float(costs.compute([call])) for call in calls), float(sum(flop_of(calls).values()))]


@pytest.mark.parametrize("name", ["cond", "map", "score_mod"])
@pytest.mark.quick_cases("cond", "score_mod")
def test_files_and_costs(ranks: Ranks, name: str) -> None:
    """A file holds the subgraphs, programs verify after each pass, and subgraphs have a cost."""
    (costs,) = ranks(1).run(_stages, name)
    assert len(costs) == 3  # forward, backward, and FLOP count
    assert all(cost > 0 for cost in costs)


def _exported(rank: int, world_size: int, name: str) -> None:
    plain, ours = _pair(name, "eager")
    ours(*_inputs(name, 0))
    buffer = io.BytesIO()
    torch.export.save(graphshard.programs(ours)[0].exported, buffer)
    buffer.seek(0)
    again = graphshard.compile(torch.export.load(buffer), world_mesh(), backend="eager").to_empty(device="cpu")
    again.load_state_dict(ours.state_dict())
    found = []
    for model in (plain, again):
        result = model(*_inputs(name, 1))
        (loss,) = result if isinstance(result, list) else (result,)  # results of the graph, without the bytecode
        loss.backward()
        found.append({"loss": loss.detach(), **{n: local(g) for n, g in grads_of(model).items()}})
    assert_same(found[1], found[0], "a step")


@pytest.mark.parametrize("name", ["cond", "scan", "nested_compile_region"])
@pytest.mark.quick_cases("cond")
def test_an_exported_program_contains_them(ranks: Ranks, name: str) -> None:
    """torch saves it, and it trains with the same bits."""
    ranks(1).run(_exported, name)


class _Dropout(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: F.dropout(self.a(x)), lambda x: self.b(x), (x,)).sum()


class _Table(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return map_rows(lambda row: self.a(row) * torch.tensor([0.5] * 8), x).sum()


ERRORS = {
    "dropout": (_Dropout, r"cond draws by aten\.\S+, and .*pass them as an operand"),
    "tensor": (_Table, r"map_impl is given holds a tensor of shape \[8\]\. .*register it as a buffer"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_rejects_unsupported_operators(fake_world: FakeWorld, name: str) -> None:
    """The error names operator and remedy; without fullgraph Python runs the operator with a warning."""
    fake_world(2)
    model, message = ERRORS[name]
    ours = graphshard.compile(model(), world_mesh(), backend="eager", fullgraph=True)
    with pytest.raises(CaptureError, match=message):
        ours(torch.randn(2, LENGTH, 8))
