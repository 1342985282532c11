"""Inputs and results of unusual kinds: one program for all calls of a kind, with the numbers of plain torch."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import importlib
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.utils.rnn import pack_sequence, pad_sequence

import graphshard
from graphshard.errors import ArtifactError, InputError
from graphshard.frontend.inputs import moved_to
from graphshard.torch_compat.torch_ops import pytree
from tests.distributed.twins import world_mesh
from tests.field.trials import assert_equal, full, gradients, on_fsdp2, on_graphshard, on_plain_torch, parameters
from tests.ranks import Ranks

_FOUR = 4


class _Net(nn.Module):
    """Two units between code that reads the inputs and makes the result."""

    def __init__(self, read: Callable[..., Tensor], give: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.read, self.give = read, give
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = self.stem(self.read(*args, **kwargs))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.give(x)


class _Case(NamedTuple):
    """Inputs of a kind, the number of programs that four steps take, and what reads the loss from a result."""

    make: Callable[[int], Any]
    read: Callable[..., Tensor]
    programs: int = 1
    give: Callable[[Tensor], Any] = lambda y: y
    result: Callable[[Any], Tensor] = lambda y: y


class _Batch:
    """A batch as collate functions make them."""

    def __init__(self, x: Tensor, tag: Any = None) -> None:
        self.x, self.tag = x, tag

    @property
    def twice(self) -> Tensor:
        return self.x * 2


class _Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Store:
    """Attributes that `__getattr__` finds in a dict, as in PyG's `Data` and in transformers' `BatchEncoding`."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._values[name]


class _AttributeDict(dict[str, Any]):
    """A dict with attributes for keys, as in easydict and in detectron2's configurations."""

    __getattr__ = dict.__getitem__


@dataclasses.dataclass(frozen=True)
class _Frozen:
    x: Tensor
    tag: str = "a"
    inner: _Batch | None = None


@attrs.define
class _Attrs:
    x: Tensor


class _Named(NamedTuple):
    x: Tensor
    tag: str = "a"


def _encoding(**values: Tensor) -> Any:
    return importlib.import_module("transformers").BatchEncoding(values)


def _rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)))


def _complex(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), dtype=torch.complex64)


def _parts(x: Tensor) -> Tensor:
    return x.real * 2 + x.imag


def _write(batch: Any) -> Tensor:
    batch.hidden = batch.x * 2
    return batch.hidden


def _edges(batch: Any) -> Tensor:
    """Send messages along edges, after loops of nodes to themselves were removed, as PyG's convolutions do."""
    kept = batch.edges[:, batch.edges[0] != batch.edges[1]]
    return batch.x.new_zeros(batch.x.shape).index_add(0, kept[1], batch.x[kept[0]]) + batch.x


def _graph(step: int) -> Any:
    nodes = 3 + step
    return types.SimpleNamespace(x=_rows(nodes, 4), edges=torch.randint(0, nodes, (2, 5 + 2 * step)))


def _documents(step: int) -> Any:
    document = torch.arange(16) // (3 + step)
    return create_block_mask(lambda b, h, q, k: (document[q] == document[k]) & (q >= k), None, None, 16, 16, "cpu")


CASES = {
    # Views. FFTs, rotary embeddings and `.mH` return lazy conjugates; data loaders slice, expand and transpose.
    "conjugate": _Case(lambda step: _complex().conj() if step % 2 else _complex(), _parts),
    "negative": _Case(lambda step: _complex().conj().imag, lambda x: x * 2),
    "conjugate of an expanded tensor": _Case(lambda step: _complex(1, 4).expand(3, 4).conj(), _parts),
    "conjugate in an object": _Case(lambda step: _Batch(_complex().mT.conj().mT), lambda batch: _parts(batch.x)),
    "expanded": _Case(lambda step: _rows(1, 4).expand(3, 4), lambda x: x * 2),
    "transposed": _Case(lambda step: _rows(4, 3).t(), lambda x: x * 2),
    "windows that overlap": _Case(lambda step: _rows(10, 4).unfold(0, 3, 2).mT, lambda x: x.sum(0)),
    # Arrays of numpy, as gym environments and collate functions give them.
    "array": _Case(lambda step: np.full((3 + step, 4), step, np.float32), torch.as_tensor, programs=2),
    "array in a dict": _Case(lambda step: {"x": np.full((3, 4), step, np.float32)}, lambda d: torch.from_numpy(d["x"])),
    "array that forward ignores": _Case(lambda step: _Batch(_rows(), np.array(["a"] * step)), lambda batch: batch.x),
    # Lists: a program for each length, which later calls of that length use.
    "list": _Case(lambda step: [_rows(2, 4)] * (1 + step % 2), torch.cat, programs=2),
    "list to pad": _Case(
        lambda step: [_rows(2 + i, 4) for i in range(2 + step % 2)], lambda xs: pad_sequence(xs).sum(0), programs=2
    ),
    "texts": _Case(lambda step: _Batch(_rows(), [f"row {i}" for i in range(step)]), lambda batch: batch.x),
    # Objects.
    "object": _Case(lambda step: _Batch(_rows(), f"batch {step}"), lambda batch: batch.x + batch.twice),
    "object, other sizes": _Case(lambda step: _Batch(_rows(3 + step, 4)), lambda batch: batch.x, programs=2),
    "object that forward writes to": _Case(lambda step: _Batch(_rows()), _write),
    "objects in a list": _Case(lambda step: [_Batch(_rows()), _Slots(_rows())], lambda pair: pair[0].x + pair[1].x),
    "slots": _Case(lambda step: _Slots(_rows()), lambda batch: batch.x),
    "getattr": _Case(lambda step: _Store(x=_rows()), lambda batch: batch.x),
    "namespace": _Case(lambda step: types.SimpleNamespace(x=_rows()), lambda batch: batch.x),
    "dict with attributes": _Case(lambda step: _AttributeDict(x=_rows()), lambda batch: batch["x"]),
    "dataclass": _Case(
        lambda step: _Frozen(_rows(3 + step, 4), inner=_Batch(_rows(3 + step, 4))),
        lambda batch: batch.x + batch.inner.x,
        programs=2,
    ),
    "named tuple": _Case(lambda step: [_Named(_rows())], lambda batch: batch[0].x),
    "attrs": _Case(lambda step: _Attrs(_rows()), lambda batch: batch.x),
    "UserDict": _Case(lambda step: collections.UserDict(x=_rows()), lambda batch: batch["x"]),
    "BatchEncoding": _Case(
        lambda step: _encoding(x=_rows(3 + step, 4)), lambda batch: batch.x + batch["x"], programs=2
    ),
    "packed sequence": _Case(lambda step: pack_sequence([_rows(3, 4), _rows(2, 4)]), lambda packed: packed.data),
    "function": _Case(lambda step: lambda x: x * 2, lambda function: function(torch.ones(3, 4))),
    "graph, other nodes and edges": _Case(_graph, _edges, programs=2),
    "BlockMask": _Case(_documents, lambda mask: mask.kv_num_blocks.float().mean() + torch.ones(3, 4)),
    # Inputs that are not traced: Python runs forward, with the gather of the root and a program for each unit.
    "sparse": _Case(
        lambda step: _Batch(_rows(), torch.eye(3).to_sparse()), lambda batch: torch.sparse.mm(batch.tag, batch.x), 3
    ),
    "generator": _Case(lambda step: (_rows() for _ in range(2)), sum, programs=3),
    "set of tensors": _Case(lambda step: {_rows()}, sum, programs=3),
    # Results.
    "result in a dataclass": _Case(lambda step: _rows(), lambda x: x, give=_Frozen, result=lambda y: y.x),
    "result in an object": _Case(lambda step: _rows(), lambda x: x, give=_Batch, result=lambda y: y.x),
    "result in an attrs object": _Case(lambda step: _rows(), lambda x: x, give=_Attrs, result=lambda y: y.x),
    "result in a BatchEncoding": _Case(
        lambda step: _rows(), lambda x: x, give=lambda y: _encoding(y=y), result=lambda y: y["y"]
    ),
    "result in a function": _Case(
        lambda step: _rows(), lambda x: x, give=lambda y: lambda factor: y * factor, result=lambda y: y(2)
    ),
}


def _steps(case: _Case) -> Callable[[nn.Module], list[Tensor | None]]:
    def train(model: nn.Module) -> list[Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[Tensor | None] = []
        for step in range(_FOUR):
            loss = case.result(model(case.make(step))).square().mean()
            loss.backward()
            found += [loss, *(grad if grad is None else full(grad) for grad in gradients(model))]
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *parameters(model)]

    return train


def _builder(make: Callable[[], nn.Module]) -> tuple[Callable[[], nn.Module], list[nn.Module]]:
    """Return a function that makes a module, and the list of the modules that it has made."""
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(make())
        return made[-1]

    return build, made


def _trial(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        case = CASES[name]
        build, nets = _builder(functools.partial(_Net, case.read, case.give))
        expected = on_plain_torch(build, _steps(case))
        # FSDP2 finds the results to differentiate in tuples, dicts and dataclasses only.
        if not name.startswith("result"):
            assert_equal(on_fsdp2(build, _steps(case)), expected)
        assert_equal(on_graphshard(build, _steps(case)), expected)
        number = len(graphshard.programs(nets[-1]))
        assert number == case.programs, f"{name}: {number} programs"


_QUICK = ["conjugate", "array", "object, other sizes", "UserDict", "graph, other nodes and edges", "sparse"]
_SLOW = [name for name in CASES if name not in _QUICK]


@pytest.mark.parametrize(
    "names", [pytest.param(_QUICK, id="quick"), *(pytest.param(_SLOW[i::4], id=str(i)) for i in range(4))]
)
@pytest.mark.quick_cases("quick")
def test_kinds(ranks: Ranks, names: list[str]) -> None:
    ranks(2).run(_trial, names)


# --- parameters as inputs -------------------------------------------------------------------------------------------


def _optimize(model: nn.Module) -> list[Tensor | None]:
    """Train a prompt with the model, then alone, by an optimizer that calls the model several times in a step."""
    prompt, found = nn.Parameter(_rows()), []
    optimizer = torch.optim.Adam([prompt, *model.parameters()], lr=0.1)
    for _ in range(3):
        loss = model(prompt).square().mean()
        loss.backward()
        found += [loss.detach(), full(prompt.grad)]
        optimizer.step()
        optimizer.zero_grad()
    model.requires_grad_(False)
    search = torch.optim.LBFGS([prompt], lr=0.1, max_iter=3)

    def closure() -> Tensor:
        search.zero_grad()
        loss: Tensor = model(prompt).square().mean()
        loss.backward()
        return loss

    return [*found, search.step(closure), prompt, *parameters(model)]


def _prompts(rank: int, world_size: int) -> None:
    build, nets = _builder(lambda: _Net(lambda x: x * 2))
    expected = on_plain_torch(build, _optimize)
    assert_equal(on_fsdp2(build, _optimize), expected)
    assert_equal(on_graphshard(build, _optimize), expected)
    assert len(graphshard.programs(nets[-1])) == 2  # with trained and with frozen parameters


def test_parameter_that_is_optimized(ranks: Ranks) -> None:
    """As in prompt tuning, textual inversion and latent optimization."""
    ranks(2).run(_prompts)


# --- nested tensors ---------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Attention over sequences of other lengths, which are an input, or are made of values and offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        if offsets is not None:
            x = torch.nested.nested_tensor_from_jagged(x, offsets)
        heads = self.layers[0](x).unflatten(-1, [2, 2]).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        result: Tensor = self.layers[1](mixed)
        return result


def _attend(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    for length in (3, 5, 4):
        values, offsets = _rows(2 + length, 4), torch.tensor([0, 2, 2 + length])
        given = torch.nested.nested_tensor([values[:2], values[2:]], layout=torch.jagged)
        for result in (model(values, offsets), model(given)):
            result.values().square().sum().backward()
            found.append(result.values())
    return [*found, *(param.grad for param in model.parameters() if param.grad is not None)]


def _jagged(rank: int, world_size: int) -> None:
    build, nets = _builder(_Attention)
    expected = on_plain_torch(build, _attend)
    assert_equal(on_fsdp2(build, _attend), expected)
    assert_equal(on_graphshard(build, _attend), expected)
    assert len(graphshard.programs(nets[-1])) == 2  # they gather the parameters of a unit
    whole = graphshard.compile(_Attention(), world_mesh(), backend="eager", fullgraph=True)
    with pytest.raises(InputError, match=r"an input is a nested tensor, .* Pass x\.values\(\) and x\.offsets\(\), and"):
        whole(torch.nested.nested_tensor([_rows(2, 4), _rows(3, 4)], layout=torch.jagged))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_attention_over_nested_tensors(ranks: Ranks) -> None:
    ranks(2).run(_jagged)


# --- memory ---------------------------------------------------------------------------------------------------------


def _held(rank: int, world_size: int) -> None:
    model = graphshard.compile(_Net(lambda batch: batch["x"]), world_mesh(), backend="eager")
    held = []
    for _ in range(3):
        x = _rows()
        held.append(weakref.ref(x))
        model({"x": x}).sum().backward()
        del x
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_inputs_are_not_kept(ranks: Ranks) -> None:
    ranks(2).run(_held)


LISTS: dict[str, tuple[Callable[[nn.Module, list[Tensor]], Any], int]] = {
    "concatenated": (lambda net, items: net(torch.cat(items)).sum(), 2),
    "one by one": (lambda net, items: sum(net(x).sum() for x in items), 2),
}


def _lists(rank: int, world_size: int, name: str) -> int:
    torch.manual_seed(0)
    plain = _Net(lambda x: x)
    model = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="eager")
    for length in (1, 4, 2, 3, 5):
        items = [_rows(3, 4) for _ in range(length)]
        for net in (plain, model):
            LISTS[name][0](net, items).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(full(ours.grad), theirs.grad)
    return len(graphshard.programs(model))


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_many_lengths(ranks: Ranks, name: str) -> None:
    """What the documentation advises instead of a program for each length."""
    assert ranks(2).run(_lists, name) == [LISTS[name][1]] * 2


def _written(rank: int, world_size: int) -> None:
    model = graphshard.compile(_Net(lambda x: _parts(x.mul_(2))), world_mesh(), backend="eager")
    x = _complex()
    with pytest.raises(InputError, match=r"args\[0\] of _Net is a conjugate .*writes to it\. Pass args\[0\]\.resolve"):
        model(x.conj())
    x = _complex()
    expected = x.conj().resolve_conj() * 2
    given = x.conj().resolve_conj()
    model(given).sum().backward()
    assert torch.equal(given, expected)


def test_writes_to_a_conjugate(ranks: Ranks) -> None:
    """A program reads a copy of the conjugate, to which a write would be lost."""
    ranks(2).run(_written)


def test_devices() -> None:
    """Tensors in dicts of any class are moved to the mesh's device, as by FSDP2; those in other objects stay."""
    given = [_AttributeDict(x=_rows(), n=1), _Batch(_rows())]
    leaves, structure = pytree.tree_flatten((tuple(given), {}))
    moved = moved_to(torch.device("meta"), leaves, structure)
    assert type(moved[0]) is _AttributeDict
    assert moved[0].x.is_meta
    assert not given[0].x.is_meta
    assert moved[1] is given[1]
    assert not given[1].x.is_meta


@pytest.mark.parametrize("make", [_Batch, lambda x: _Store(x=x), _Frozen])
def test_explain_objects_on_absent_gpus(make: Callable[[Tensor], Any], tmp_path: Path) -> None:
    """Tensors in objects are on the GPU, too; a file holds none."""
    given: dict[str, Any] = {"example_inputs": (make(_rows()),), "device": "cuda"}
    assert graphshard.explain(_Net(lambda batch: batch.x * 2), (2,), **given).flop > 0
    with pytest.raises(ArtifactError, match=r"which no file can hold\. Pass tensors, numbers and strings, in dicts"):
        graphshard.export(_Net(lambda batch: batch.x * 2), (2,), tmp_path / "model.gshard", **given)


# --- libraries ------------------------------------------------------------------------------------------------------


class _Convolutions(nn.Module):
    """Convolutions as units, on batches of graphs, and a mean of the nodes of each graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        library = importlib.import_module("torch_geometric.nn")
        convolution = getattr(library, kind)
        self.layers = nn.ModuleList([convolution(4, 8), convolution(8, 4)])
        self.pool = library.global_mean_pool

    def forward(self, batch: Any) -> Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edge_index).relu()
        pooled: Tensor = self.pool(x, batch.batch)
        return pooled


def _graphs(step: int) -> Any:
    data = importlib.import_module("torch_geometric.data")

    def graph(nodes: int) -> Any:
        return data.Data(x=_rows(nodes, 4), edge_index=torch.randint(0, nodes, (2, 2 * nodes)))

    return data.Batch.from_data_list([graph(3 + step + i) for i in range(2 + step)])


def _geometric(rank: int, world_size: int, kind: str) -> None:
    train = _steps(_Case(_graphs, lambda x: x))
    build, nets = _builder(lambda: _Convolutions(kind))
    expected = on_plain_torch(build, train)
    assert_equal(on_fsdp2(build, train), expected)
    assert_equal(on_graphshard(build, train), expected)
    assert len(graphshard.programs(nets[-1])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GCNConv", "GATConv", "SAGEConv"])
def test_batches_of_graphs(ranks: Ranks, kind: str) -> None:
    """PyG's `Batch`, with other numbers of graphs, nodes and edges in each call; GCN and GAT add self-loops."""
    pytest.importorskip("torch_geometric")
    ranks(2).run(_geometric, kind)


def _tensordict(rank: int, world_size: int) -> None:
    library = importlib.import_module("tensordict")

    def make(step: int) -> Any:
        return library.TensorDict({"x": _rows(3 + step, 4)}, batch_size=[3 + step])

    def write(given: Any) -> Any:
        given["z"] = given["x"] * 2
        return given["z"]

    train = _steps(_Case(make, lambda x: x))
    build, nets = _builder(lambda: _Net(write))
    expected = on_plain_torch(build, train)
    assert_equal(on_fsdp2(build, train), expected)
    assert_equal(on_graphshard(build, train), expected)
    assert len(graphshard.programs(nets[-1])) == 2


@pytest.mark.slow
def test_tensordict(ranks: Ranks) -> None:
    """As in torchrl, where modules read from a `TensorDict` and write their results into it."""
    pytest.importorskip("tensordict")
    ranks(2).run(_tensordict)
