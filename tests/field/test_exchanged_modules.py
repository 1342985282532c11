"""Modules exchanged after sharding train as in plain torch, with the optimizer state of parameters that stay."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import ArgumentError, ParameterError, UnsupportedError
from tests.distributed.twins import world_mesh
from tests.field.trials import assert_equal, full, gradients, parameters
from tests.ranks import Ranks

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """A language model of two blocks."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


Change = Callable[[Any], None]


def _new_head(model: Any) -> None:
    """A classifier's head for another task."""
    model.head = nn.Linear(WIDTH, 3)


def _vocabulary(model: Any) -> None:
    """A vocabulary that grows by hand, rows copied from `full_tensor()`."""
    for name in ("embed", "head"):
        old = model.get_submodule(name)
        new = nn.Embedding(7, WIDTH) if name == "embed" else nn.Linear(WIDTH, 7, bias=False)
        with torch.no_grad():
            new.weight[:5] = full(old.weight)
        setattr(model, name, new)


def _vocabulary_unsharded(model: Any) -> None:
    """A vocabulary that grows by hand, rows copied from what `unshard()` shows."""
    if isinstance(model, FSDPModule):
        model.unshard()
    _vocabulary(model)


def _fewer_layers(model: Any) -> None:
    """The first layer is dropped, so that the second has another name."""
    del model.layers[0]


def _more_layers(model: Any) -> None:
    """A stack that grows, as in progressive training; the new layer is a copy of values."""
    model.layers.append(Block())


class Adapted(nn.Module):
    """A LoRA layer as libraries write them: the frozen layer, and two small matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def _adapters(model: Any) -> None:
    """LoRA added after some steps of full training."""
    for layer in model.layers:
        layer.up = Adapted(layer.up)


def _moved(model: Any) -> None:
    """A parameter is registered under another name, and a scale is added to a layer that stays."""
    model.head.kernel = model.head.weight
    del model.head.weight
    model.head.gain = nn.Parameter(torch.full((WIDTH,), 0.5))
    model.head.forward = lambda x: nn.functional.linear(x * model.head.gain, model.head.kernel)


def _tied(model: Any) -> None:
    """The head is tied to the embedding, which it was not."""
    model.head.weight = model.embed.weight


def _untied(model: Any) -> None:
    """A tied head gets its own values."""
    model.head.weight = nn.Parameter(full(model.head.weight))


CHANGES: dict[str, Change] = {
    change.__name__.removeprefix("_"): change
    for change in (
        _new_head,
        _vocabulary,
        _vocabulary_unsharded,
        _fewer_layers,
        _more_layers,
        _adapters,
        _moved,
        _tied,
        _untied,
    )
}


def _optimizer(model: nn.Module, old: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    """Build an optimizer as a user does after a change: with the state of parameters that were there."""
    made = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.01)
    if old is not None:
        kept = [param for param in model.parameters() if param in old.state]
        made.state.update((p, old.state[p]) for p in kept if old.state[p]["exp_avg"].shape == p.shape)
    return made


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor | None]:
    for step in range(2):
        loss = model(torch.arange(5)[None] + 0 * step).square().mean()
        loss.backward()
        yield loss.detach()
        yield from gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    yield from parameters(model)
    for param in model.parameters():
        yield optimizer.state[param].get("exp_avg") if param in optimizer.state else None


def _run(model: nn.Module, change: Change, rebuild: Callable[[nn.Module], object]) -> list[Tensor | None]:
    optimizer = _optimizer(model)
    seen = [*_steps(model, optimizer)]
    torch.manual_seed(1)
    change(model)
    rebuild(model)
    return [each if each is None else full(each) for each in (*seen, *_steps(model, _optimizer(model, optimizer)))]


def _net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(tied=name == "untied")


def _compiled(name: str, **options: Any) -> Any:
    return graphshard.compile(_net(name), world_mesh(), **{"backend": "eager", **options})


def _sharded(name: str) -> Any:
    model = _net(name)
    for layer in model.layers:
        graphshard.fully_shard(layer, mesh=world_mesh())
    return graphshard.fully_shard(model, mesh=world_mesh(), backend="eager")


def _rebuilt(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        expected = _run(_net(name), CHANGES[name], lambda model: None)
        for make in (_compiled, _sharded):
            model = make(name)
            assert_equal(_run(model, CHANGES[name], graphshard.rebuild), expected)
            assert all(isinstance(param, DTensor) for param in model.parameters())
            units = [isinstance(layer, FSDPModule) for layer in model.layers]
            assert all(units if make is _compiled else units[:1])
            assert len(graphshard.programs(model)) == 1  # of the changed model


@pytest.mark.parametrize(
    "names",
    [
        ["vocabulary", "adapters"],
        ["vocabulary_unsharded", "new_head", "fewer_layers", "more_layers", "moved", "tied", "untied"],
    ],
    ids=["some", "others"],
)
@pytest.mark.quick_cases("some")
def test_a_changed_model_is_rebuilt(ranks: Ranks, names: list[str]) -> None:
    ranks(2).run(_rebuilt, names)


def _rebuilt_elsewhere(rank: int, world_size: int, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for name in ("vocabulary", "adapters"):
        expected = _run(_net(name), CHANGES[name], lambda model: None)
        model = graphshard.compile(_net(name), mesh, backend="eager", **options)
        assert_equal(_run(model, CHANGES[name], graphshard.rebuild), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 2), {}), ((2,), {"offload_policy": CPUOffloadPolicy(pin_memory=False)})],
    ids=["HSDP", "offloaded"],
)
def test_a_changed_model_is_rebuilt_on_other_meshes(
    ranks: Ranks, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    ranks(torch.Size(shape).numel()).run(_rebuilt_elsewhere, shape, options)


def _stepped(model: nn.Module, step: Callable[[Tensor], Any]) -> list[Tensor | None]:
    for _ in range(2):
        step(torch.arange(5)[None])
    return [full(param) for param in model.parameters()]


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    if isinstance(model, FSDPModule):
        return graphshard.compile_step(model, optimizer)

    def step(tokens: Tensor) -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _compiled_steps(rank: int, world_size: int) -> None:
    found = []
    for model in (Loss(), graphshard.compile(Loss(), world_mesh(), backend="eager")):
        optimizer = _optimizer(model)
        seen = _stepped(model, _step_of(model, optimizer))
        torch.manual_seed(1)
        model.head = nn.Linear(WIDTH, 3)
        if isinstance(model, FSDPModule):
            graphshard.rebuild(model)
        seen += _stepped(model, _step_of(model, _optimizer(model, optimizer)))
        found.append(seen)
    assert_equal(found[1], found[0])


class Loss(Net):
    """Returns a loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).square().mean()


@pytest.mark.slow
def test_a_changed_model_gets_a_new_step(ranks: Ranks) -> None:
    """`compile_step` of the model before the change is for its parameters; another one goes on with their state."""
    ranks(2).run(_compiled_steps)


class Encodes(Net):
    """Has a method that is called by itself."""

    def encode(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(self.embed(tokens), self.layers[0].up.weight)


def _keep_methods(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain, tokens = Encodes(), torch.arange(5)
    model, parts = copy.deepcopy(plain), nn.Sequential(copy.deepcopy(plain))
    graphshard.compile(model, world_mesh(), backend="eager")
    graphshard.register_forward_method(model, "encode")
    before = model.forward
    model.forward = lambda given: before(given) * 2  # type: ignore[method-assign, assignment]
    assert_equal([model(tokens)], [plain(tokens) * 2])
    plain.head = nn.Linear(WIDTH, 3)
    model.head = copy.deepcopy(plain.head)
    graphshard.rebuild(model)
    assert_equal([model(tokens), model.encode(tokens)], [plain(tokens) * 2, plain.encode(tokens)])
    inner: Any = graphshard.fully_shard(parts[0], mesh=world_mesh(), backend="eager")
    graphshard.register_forward_method(inner, "encode")
    graphshard.fully_shard(parts, mesh=world_mesh(), backend="eager")
    assert_equal([inner.encode(tokens)], [plain.encode(tokens)])


def test_registered_methods_and_replaced_forwards_stay(ranks: Ranks) -> None:
    ranks(2).run(_keep_methods)


def _resize(model: Any) -> None:
    """Change a parameter's data, as `resize_token_embeddings` of transformers does."""
    for layer in (model.embed, model.head):
        rows = torch.zeros(7, WIDTH)
        rows[:5] = layer.weight.data
        layer.weight.data = rows


def _write(model: Any) -> None:
    model.layers[0].up.weight.data.mul_(2)
    model.layers[1].requires_grad_(False)


def _both(model: Any) -> None:
    _resize(model)
    _write(model)


def _in_block(rank: int, world_size: int) -> None:
    expected = _run(_net(""), _both, lambda model: None)

    def change(model: Any) -> None:
        up, flags = model.layers[0].up.weight, [isinstance(p, DTensor) for p in model.parameters()]
        with graphshard.unsharded(model):
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            _both(model)
        assert model.layers[0].up.weight is up
        assert [isinstance(p, DTensor) for p in model.parameters()] == flags

    model = _compiled("")
    model.set_gradient_divide_factor(2.0)  # of two ranks
    model.layers[0].set_reshard_after_forward(False)
    assert_equal(_run(model, change, lambda model: None), expected)
    params = graphshard.programs(model)[0].params
    assert params["norm.weight"].divide_factor == 2
    assert not params["layers.0.up.weight"].reshard
    assert params["layers.1.up.weight"].reshard


def test_full_parameters_are_changed_in_a_block(ranks: Ranks) -> None:
    ranks(2).run(_in_block)


# --- fully_shard on the new part, as with FSDP2 -------------------------------------------------------------------


def _joined(rank: int, world_size: int) -> None:
    def sharded_head(model: Any) -> None:
        _new_head(model)
        graphshard.fully_shard(model.head, mesh=world_mesh())

    def sharded_layer(model: Any) -> None:
        _more_layers(model)
        graphshard.fully_shard(model.layers[-1], mesh=world_mesh())

    for make, change, plain, part in (
        (_compiled, sharded_head, _new_head, "head"),
        (_sharded, sharded_layer, _more_layers, "layers.2"),
    ):
        expected = _run(_net(""), plain, lambda model: None)
        model = make("")
        assert_equal(_run(model, change, lambda model: None), expected)
        (program,) = graphshard.programs(model)
        assert part in program.params.units
        assert isinstance(model.get_submodule(part), FSDPModule)


def test_sharding_the_new_part_is_enough(ranks: Ranks) -> None:
    ranks(2).run(_joined)


# --- errors -------------------------------------------------------------------------------------------------------


def _errors(rank: int, world_size: int) -> None:
    model, tokens = _compiled(""), torch.arange(5)[None]
    expected = full(model(tokens))
    head = model.head
    model.head = nn.Linear(WIDTH, 3)
    with pytest.raises(ParameterError, match=r"module head, .* was exchanged .* Call graphshard.rebuild\(model\)"):
        model(tokens)
    model.extra = nn.LazyLinear(3)
    with pytest.raises(ArgumentError, match=r"extra.weight of LazyLinear has no shape yet"):
        graphshard.rebuild(model)
    del model.extra
    model.head = head
    assert torch.equal(full(model(tokens)), expected)
    assert len(graphshard.programs(model)) == 1  # the model is as before

    model.unshard()
    model.embed.weight.data = torch.zeros(7, WIDTH)
    with pytest.raises(UnsupportedError, match=r"embed.weight was given data of another shape.*graphshard.unsharded"):
        model(tokens)
    assert torch.equal(full(model(tokens)), expected)

    model.head = nn.Linear(WIDTH, 5)
    graphshard.rebuild(model)
    model.head = head  # of the model before, put back
    graphshard.rebuild(nn.Sequential(model))
    assert torch.equal(full(model(tokens)), expected)
    with pytest.raises(ArgumentError, match=r"has 2 compiled models in it"):
        graphshard.rebuild(nn.ModuleList([model, _compiled("")]))
    with pytest.raises(ArgumentError, match=r"is not compiled"):
        graphshard.rebuild(nn.Linear(2, 2))


def test_errors_name_the_module_and_the_remedy(ranks: Ranks) -> None:
    ranks(2).run(_errors)


# --- checkpoints --------------------------------------------------------------------------------------------------


def _saved(rank: int, world_size: int, folder: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": {"layers.*": policy}, "units": ["layers.*"]}
    model = _compiled("", **options)
    optimizer = _optimizer(model)
    [*_steps(model, optimizer)]
    _new_head(model)
    _fewer_layers(model)
    graphshard.rebuild(model)
    optimizer = _optimizer(model, optimizer)
    [*_steps(model, optimizer)]
    parts = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), parts)), checkpoint_id=folder)
    expected = [full(each) if each is not None else each for each in _steps(model, optimizer)]

    changed = Net()
    _new_head(changed)
    _fewer_layers(changed)
    fresh = graphshard.compile(
        changed, world_mesh(), backend="eager", mp_policy={"layers.*": policy}, units=["layers.*"]
    )
    optimizer = _optimizer(fresh)
    state = dict(zip(("model", "optimizer"), get_state_dict(fresh, optimizer)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(fresh, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_equal([full(each) if each is not None else each for each in _steps(fresh, optimizer)], expected)


def test_checkpoints_of_a_rebuilt_model(ranks: Ranks, tmp_path: Path) -> None:
    """Options stay, with patterns of units that still match."""
    ranks(2).run(_saved, str(tmp_path))


# --- libraries ----------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """A tiny model of transformers whose call takes tokens."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=5,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def _library(rank: int, world_size: int, name: str) -> None:
    def resize(model: Any) -> None:
        with graphshard.unsharded(model) if isinstance(model, FSDPModule) else contextlib.nullcontext():
            model.model.resize_token_embeddings(7, mean_resizing=False)

    def adapters(model: Any) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False), model)

    tied = name == "tied"
    change = adapters if name == "lora" else resize
    torch.manual_seed(0)
    expected = _run(Language(tied=tied), change, lambda model: None)
    torch.manual_seed(0)
    model = graphshard.compile(Language(tied=tied), world_mesh(), backend="eager")
    assert_equal(_run(model, change, graphshard.rebuild if name == "lora" else lambda model: None), expected)
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("name", ["tied", "untied", "lora"])
@pytest.mark.quick_cases("lora")
def test_transformers_and_peft(ranks: Ranks, name: str) -> None:
    """`resize_token_embeddings`, and LoRA by peft after some steps of full training."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    ranks(2).run(_library, name)
