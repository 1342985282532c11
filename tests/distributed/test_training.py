"""A compiled model behaves like the original module: modes, shapes, meta device, autograd."""

from __future__ import annotations

import copy
import enum
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import graphshard
from graphshard.errors import MaterializationError
from tests.distributed.test_parity import MODELS
from tests.distributed.twins import (
    assert_same,
    example_llama,
    grads_of,
    params_of,
    twins,
    world_mesh,
)
from tests.ranks import Ranks


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class _Net(nn.Module):
    """Batch norm and dropout in two blocks of odd width, so shards are uneven."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.stem = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(_Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)  # for dropout
    return model(x).square().mean()


def _input(rank: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rank))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


def _full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- programs -----------------------------------------------------------------------------------------------


def _modes(rank: int, world_size: int) -> list[str]:
    pair = twins(_Net(), world_mesh())
    x = _input(rank)

    def compare(when: str) -> None:
        losses = [_loss(model, x) for model in pair]
        assert_same({"loss": losses[0]}, {"loss": losses[1]}, when)
        assert losses[0].requires_grad == losses[1].requires_grad == torch.is_grad_enabled()
        if losses[0].requires_grad:
            for loss in losses:
                loss.backward()
            assert_same(*map(grads_of, pair), when)
        assert_same(*map(_buffers, pair), when)

    for _ in range(2):  # the second time, no program is new
        for training in (True, False):
            for model in pair:
                model.train(training)
            compare(f"{training=}")
            with torch.no_grad():
                compare(f"{training=} without gradients")
    programs = graphshard.programs(pair[0])
    assert [program.backward is None for program in programs] == [False, True, False, True]
    return [program.reason for program in programs]


@pytest.mark.slow
def test_each_mode_has_a_program(ranks: Ranks) -> None:
    """train(), eval() and no_grad(), with dropout's random numbers and batch norm's statistics as in FSDP2."""
    assert ranks(2).run(_modes)[0] == [
        "first call",
        "gradients are off",
        "train() or eval() was called",
        "gradients are off",
    ]


def _kinds_of_calls(rank: int, world_size: int) -> tuple[list[str], list[int]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("graphshard.module.installed_programs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = graphshard.compile(_Net(), world_mesh(), backend="eager", max_captures=2)
    counts = []
    for kind in ("train", "evaluate", "train", "infer", "train", "evaluate"):
        model.train(kind == "train")
        with torch.set_grad_enabled(kind != "infer"):
            _loss(model, _input(rank))
        counts.append(len(graphshard.programs(model)))
    logger.removeHandler(handler)
    return messages, counts


@pytest.mark.slow
def test_beyond_the_limit_the_least_recently_used_program_is_evicted(ranks: Ranks) -> None:
    for logged, counts in ranks(2).run(_kinds_of_calls):
        assert counts == [1, 2, 2, 2, 2, 2]
        assert logged == [
            "capture 0 of _Net: first call",
            "capture 1 of _Net: train() or eval() was called",
            "capture 2 of _Net: gradients are off",
            "evicted _Net-1, the least recently used program",
            "_Net has more than max_captures=2 programs: from now on the least recently used one is evicted, and "
            "captured again when a call needs it. The last capture: gradients are off. Raise max_captures in "
            "graphshard.compile to keep more.",
            "capture 3 of _Net: train() or eval() was called",
            "evicted _Net-2, the least recently used program",
        ]


def _ahead(rank: int, world_size: int) -> None:
    model = graphshard.compile(_Net(), world_mesh(), backend="eager", example_inputs=(torch.empty(5, 4),))
    (program,) = graphshard.programs(model)
    assert program.backward is not None
    assert program.reason == "first call"
    _loss(model, _input(rank)).backward()
    assert graphshard.programs(model) == [program]
    keyword = graphshard.compile(_Net(), world_mesh(), backend="eager", example_kwargs={"x": torch.empty(5, 4)})
    keyword(x=_input(rank)).sum().backward()
    assert len(graphshard.programs(keyword)) == 1


@pytest.mark.slow
def test_example_inputs_compile_before_the_first_call(ranks: Ranks) -> None:
    ranks(2).run(_ahead)


class _Constants(nn.Module):
    """Inputs that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, option: Any) -> Tensor:
        return x * self.weight * (2 if option == CONSTANTS[0] else 3)


class _Color(enum.Enum):
    RED = 1


CONSTANTS = [1, 2.5, True, "text", None, 1j, b"bytes", torch.float64, torch.device("cpu"), _Color.RED]


def _constants(rank: int, world_size: int) -> list[str]:
    model = graphshard.compile(_Constants(), world_mesh(), backend="eager", max_captures=len(CONSTANTS))
    failed = []
    for option in CONSTANTS:
        try:
            result = model(_input(rank), option)
        except graphshard.GraphshardError as error:
            failed.append(f"{option!r}: {error}")
        else:
            factor = 2 if option == CONSTANTS[0] else 3
            assert torch.equal(result, _input(rank) * factor), option
    return failed


def test_inputs_other_than_tensors(ranks: Ranks) -> None:
    """Constant numbers, strings and other objects are part of a program's signature."""
    assert ranks(2).run(_constants)[0] == []


# --- identity -------------------------------------------------------------------------------------------------


def _identity(rank: int, world_size: int) -> None:
    plain = _Net()
    model = copy.deepcopy(plain)
    assert graphshard.compile(model, world_mesh(), backend="eager") is model
    assert isinstance(model, _Net)
    assert type(model).__name__ == "FSDP_Net"
    assert type(model).__module__ == _Net.__module__
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(model, names)()] == [name for name, _ in getattr(plain, names)()]
    assert all(isinstance(model.get_submodule(name), type(sub)) for name, sub in plain.named_modules())
    for name, param in model.named_parameters():
        assert isinstance(param, nn.Parameter)
        assert isinstance(param.data, DTensor)
        assert param.placements == (Shard(0),)
        assert torch.equal(param.full_tensor(), plain.get_parameter(name)), name
    assert_same(_buffers(model), _buffers(plain), "buffers")


def test_module_keeps_its_identity(ranks: Ranks) -> None:
    """The object, its class, names and placements stay."""
    ranks(3).run(_identity)


def _accumulation(rank: int, world_size: int) -> None:
    pair = twins(_Net(), world_mesh())
    for model in pair:
        for seed in range(3):
            _loss(model, _input(rank + seed), seed).backward()
    assert_same(*map(grads_of, pair), "accumulated gradients")


def test_gradients_accumulate_as_in_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_accumulation)


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.layer, self.group, self.rms = nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms(self.group(self.layer(self.stem(x))))


def _norms(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
        pair = twins(_Norms(), world_mesh(), mp_policy=policy)
        outputs = []
        for model in pair:
            outputs.append(model(_input(rank)))
            outputs[-1].square().sum().backward()
        assert torch.equal(*outputs)
        assert_same(*map(grads_of, pair), f"{dtype}")


@pytest.mark.slow
def test_norms_in_low_precision(ranks: Ranks) -> None:
    ranks(2).run(_norms)


# --- meta device --------------------------------------------------------------------------------------------


def _meta(rank: int, world_size: int, ahead: bool) -> str:
    plain, batch = example_llama()
    torch.manual_seed(7)
    plain.init_weights()
    real = graphshard.compile(plain, world_mesh(), backend="eager")
    with torch.device("meta"):
        model, _ = example_llama()
    inputs = batch()
    graphshard.compile(model, world_mesh(), backend="eager", example_kwargs=inputs if ahead else None)
    assert all(param.is_meta for param in model.parameters())
    error = ""
    try:
        model(**inputs)
    except MaterializationError as caught:
        error = str(caught)
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    model.init_weights()
    assert_same(params_of(model), params_of(real), "parameters")
    assert_same(_buffers(model), _buffers(real), "buffers")
    for net in (model, real):
        net(**inputs).backward()
    assert_same(grads_of(model), grads_of(real), "gradients")
    return error


@pytest.mark.parametrize("ahead", [False, True], ids=["at-first-call", "ahead"])
@pytest.mark.slow
def test_meta_device(ranks: Ranks, ahead: bool) -> None:
    """Compile, to_empty, and init equals init and compile. A call in between is an error."""
    for error in ranks(3).run(_meta, ahead):
        assert error == (
            "25 parameters or buffers of Llama are on the meta device: embed.weight, "
            "layers.0.attention_norm.weight, layers.0.attention.wq.weight, layers.0.attention.wk.weight, "
            "layers.0.attention.wv.weight and 20 more. Allocate them with model.to_empty(device=...) and "
            "initialize or load them before the first call."
        )


# --- autograd -----------------------------------------------------------------------------------------------


def _input_gradients(rank: int, world_size: int) -> None:
    pair = twins(_Net(), world_mesh())
    leaves = [_input(rank).requires_grad_() for _ in pair]
    for model, leaf in zip(pair, leaves):
        _loss(model, leaf).backward()
        _loss(model, leaf * 2).backward()
    assert_same({"input": leaves[0].grad}, {"input": leaves[1].grad}, "gradients")
    assert_same(*map(grads_of, pair), "gradients")


@pytest.mark.slow
def test_inputs_get_gradients(ranks: Ranks) -> None:
    ranks(2).run(_input_gradients)


def _logits(rank: int, world_size: int) -> None:
    model, batch = MODELS["hf-gpt2"](layers=1)
    pair = twins(model, world_mesh())
    inputs = batch()
    for used in ("loss", "logits", "both", "loss"):
        for model in pair:
            model.zero_grad()
            torch.manual_seed(0)
            output = model(**inputs)
            loss = output.loss if used != "logits" else 0.0
            (loss + (output.logits.square().mean() if used != "loss" else 0.0)).backward()
        assert_same(*map(grads_of, pair), used)
    assert len(graphshard.programs(pair[0])) == 1


@pytest.mark.slow
def test_outputs_other_than_the_loss_can_be_differentiated(ranks: Ranks) -> None:
    """Backward is compiled for the loss only, and again for the logits when they get a gradient."""
    ranks(2).run(_logits)


def _retained(rank: int, world_size: int) -> str:
    plain = _Net()
    model = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="eager")
    x = _input(0)
    losses = [_loss(net, x) for net in (plain, model)]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(_full(model.get_parameter(name).grad), param.grad, msg=name)
    try:
        losses[1].backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_graph_can_be_retained(ranks: Ranks) -> None:
    assert "Trying to backward through the graph a second time" in ranks(2).run(_retained)[0]


class _Outputs(nn.Module):
    """Outputs of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        z = F.linear(x, self.weight) * scale
        return {
            "value": z + y,
            "view": z[0],
            "index": z.argmax(-1),
            "detached": z.detach() + 1,
            "from frozen": y.detach() * self.frozen,
            "input": x,
            "constants": (z.shape[0], None, "text", scale),
        }


def _outputs(rank: int, world_size: int) -> None:
    plain = _Outputs()
    model = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="eager")
    for grad, input_grad in ((True, False), (True, True), (False, False)):
        x = torch.randn(5, 4, requires_grad=input_grad)
        with torch.set_grad_enabled(grad):
            # The same tensor twice still counts as two inputs.
            ours, expected = model(x, x, scale=2.0), plain(x, x, scale=2.0)
        assert_same(ours, expected, f"{grad=} {input_grad=}")
        for name, value in ours.items():
            if isinstance(value, Tensor):
                assert value.requires_grad == expected[name].requires_grad, f"{name}, {grad=} {input_grad=}"
        if grad:
            grads = [torch.autograd.grad(out["value"].sum(), x) if input_grad else () for out in (ours, expected)]
            torch.testing.assert_close(*grads)
            other = torch.randn(5, 4)  # the program has not merged the two inputs
            assert_same(model(x, other), plain(x, other), "different inputs")
    assert len(graphshard.programs(model)) == 5


def test_outputs_and_their_flags(ranks: Ranks) -> None:
    ranks(2).run(_outputs)


def _own_shapes(rank: int, world_size: int) -> None:
    pair = twins(_Net(), world_mesh())
    for rows in (4 + rank, 4):
        for model in pair:
            model.zero_grad()
            _loss(model, _input(rank, rows)).backward()
        assert_same(*map(grads_of, pair), f"{rows} rows")


@pytest.mark.slow
def test_ranks_may_have_inputs_of_different_shapes(ranks: Ranks) -> None:
    """For example the last batch of an epoch: the communication is the same, although the programs differ."""
    ranks(2).run(_own_shapes)


def _unused(rank: int, world_size: int) -> None:
    plain = _Net()
    plain.blocks[1].extra = nn.Linear(3, 3)
    pair = twins(plain, world_mesh())
    for model in pair:
        _loss(model, _input(rank)).backward()
    assert_same(*map(grads_of, pair), "gradients")
    assert pair[0].blocks[1].extra.weight.grad is None


@pytest.mark.slow
def test_unused_parameters_get_no_gradient(ranks: Ranks) -> None:
    ranks(2).run(_unused)
