"""Attributes that forward reads and writes match FSDP2: values, gradients and attributes are equal."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard.torch_compat.torch_ops import pytree
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks

Do = Callable[[nn.Module], Any]


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    names: tuple[str, ...] = ("tanh",)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.drop(self.lin(x)))


class Net(nn.Module):
    """Two units with a test's function `body(self, x)` between them."""

    kind = "add"

    def __init__(self, body: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part() for _ in range(2))
        self.body = body
        self.register_buffer("ran", torch.zeros(4))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.body(self, self.layers[0](x))).square().mean()


def _left(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of the model's modules, except parameters and methods."""
    skipped = {"training", "body", "forward", "_graphshard"}
    found = {}
    for name, module in model.named_modules():
        values = {k: v for k, v in vars(module).items() if k not in skipped and not k.startswith("_")}
        for key, value in {**values, **dict(module._buffers)}.items():
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                if isinstance(leaf, (Tensor, int, float, str, type(None))):
                    found[f"{name}.{key}{pytree.keystr(path)}"] = leaf.detach() if isinstance(leaf, Tensor) else leaf
    return found


def _steps(rank: int, world_size: int, make: Callable[[], nn.Module], between: list[Do], loss: Do | None) -> list[str]:
    """Run a training step on both after each change; return the reasons of captures."""
    torch.manual_seed(0)
    pair = twins(make(), world_mesh())
    for number, change in enumerate([lambda model: None, *between]):
        found = []
        for model in pair:
            change(model)
            model.zero_grad()
            torch.manual_seed(rank)
            out = model(rows(10 * number + rank))
            total = out if loss is None else out + loss(model)
            total.backward()
            found.append({"out": out.detach(), "grad_fn": out.grad_fn is not None, **_left(model)})
        assert_same(*found, f"step {number}")
        assert_same(*map(grads_of, pair), f"gradients of step {number}")
    return [program.reason for program in graphshard.programs(pair[0])]


def _nothing(model: Any) -> None:
    pass


# --- reads -------------------------------------------------------------------------------------------------------


def _scaled(self: Any, x: Tensor) -> Tensor:
    x = x * self.scale * self.config.scale
    return x.tanh() if self.config.names == ("tanh",) else x


def _plain_net() -> Net:
    return Net(_scaled, scale=1.0, config=Config())


def _set(path: str, value: Any) -> Do:
    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        target: Any = model
        for part in filter(None, owner.split(".")):
            target = target[int(part)] if part.isdigit() else getattr(target, part)
        setattr(target, name, value.clone() if isinstance(value, Tensor) else value)

    return change


def _halved(x: Tensor) -> Tensor:
    return x / 2


def _kinds(self: Any, x: Tensor) -> Tensor:
    return x + 1 if self.kind == "add" else x * 3


CHANGES = {
    "a number": ("scale", 3.0, 1.0, "Net.scale was 1.0 and is 3.0"),
    "a dropout": ("layers.0.drop.p", 0.0, 0.1, "Net.layers.0.drop.p was 0.1 and is 0.0"),
    "a field": ("config.scale", 5.0, 2.0, "Net.config.scale was 2.0 and is 5.0"),
    "a tuple": ("config.names", ("sin",), ("tanh",), "Net.config.names was ('tanh',) and is ('sin',)"),
}


def _switches(rank: int, world_size: int, path: str, new: Any, old: Any, make: Any = _plain_net) -> list[str]:
    return _steps(rank, world_size, make, [_nothing, _set(path, new), _set(path, old), _set(path, new)], None)


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.quick_cases("a dropout")
def test_a_changed_attribute_takes_effect_and_changing_back_reuses_the_program(ranks: Ranks, case: str) -> None:
    path, new, old, reason = CHANGES[case]
    for reasons in ranks(2).run(_switches, path, new, old):
        assert reasons == ["first call", reason]


@pytest.mark.slow
def test_guards_hold_after_a_json_round_trip(ranks: Ranks) -> None:
    """The second rank reads programs from JSON, which has descriptions instead of objects."""
    path, new, old, reason = CHANGES["a field"]
    assert ranks(2).run(_switches, path, new, old) == [["first call", reason]] * 2


def _structure(rank: int, world_size: int) -> list[str]:
    changes = [
        _set("layers.0.act", nn.Tanh()),
        _set("layers.1.forward", _halved),
        _set("ran", torch.ones(2, 4)),
        lambda model: delattr(model.layers[1], "forward"),
        _set("layers.0.act", nn.GELU()),
        _set("kind", "mul"),
    ]
    return _steps(rank, world_size, lambda: Net(_kinds), changes, None)


def test_replaced_modules_forwards_buffers_and_class_attributes(ranks: Ranks) -> None:
    for reasons in ranks(2).run(_structure):
        assert reasons == [
            "first call",
            "Net.layers.0.act was a ReLU and is a Tanh",
            "layers.1.forward was replaced",
            "Net.layers.0.act was a Tanh and is a GELU",
            "Net.kind was added",
        ]


# --- tensors -----------------------------------------------------------------------------------------------------


def _with_tensors(self: Any, x: Tensor) -> Tensor:
    self.count.add_(1)
    return x * self.freqs + self.table["k"][0] + self.ran


def _tensors(rank: int, world_size: int) -> list[str]:
    def make() -> Net:
        table = {"k": [torch.ones(4), 1]}
        return Net(_with_tensors, freqs=torch.arange(4.0), table=table, count=torch.zeros(()))

    changes = [
        _set("freqs", torch.ones(4)),
        lambda model: model.freqs.mul_(3),
        lambda model: model.table.update(k=[torch.full((4,), 2.0), 1]),
        _set("freqs", torch.ones(5, 4)),
    ]
    return _steps(rank, world_size, make, changes, None)


@pytest.mark.slow
def test_tensors_in_attributes_are_read_at_every_call(ranks: Ranks) -> None:
    for reasons in ranks(2).run(_tensors):
        assert reasons == ["first call", "tensor 'Net.freqs' rank mismatch. expected 1, actual 2"]


def _with_gradient(rank: int, world_size: int) -> int:
    def make() -> Net:
        return Net(lambda self, x: x * self.weight, weight=torch.full((4,), 2.0, requires_grad=True))

    torch.manual_seed(0)
    pair = twins(make(), world_mesh())
    for model in pair:
        torch.manual_seed(rank)
        for _ in range(2):
            model(rows(rank)).backward()
    assert_same(*({"grad": model.weight.grad} for model in pair), "attribute")
    assert_same(*map(grads_of, pair), "parameters")
    return len(graphshard.programs(pair[0]))


def test_a_tensor_in_an_attribute_receives_its_gradient(ranks: Ranks) -> None:
    assert ranks(2).run(_with_gradient) == [1, 1]


# --- writes ------------------------------------------------------------------------------------------------------


def _counting(self: Any, x: Tensor) -> Tensor:
    self.step += 1
    self.seen["n"] += x.shape[0]
    self.share = self.step / 8
    return x * 2 if self.step < 3 else x


def _router(self: Any, x: Tensor) -> Tensor:
    self.aux = None
    self.aux = x.square().mean() + (0 if self.aux is None else self.aux)
    self.ran = 0.9 * self.ran + 0.1 * x.detach().mean(0)
    self.last = {"x": x.detach(), "pair": (x.detach() * 2, "text")}
    self.history.append(x.detach().mean())
    self.losses = []
    self.losses.append(self.aux * 2)
    return x


WRITES = {
    "counters": (lambda: Net(_counting, step=0, seen={"n": 0}), None, 3),
    "tensors": (lambda: Net(_router, history=[]), lambda model: model.aux + model.losses[0], 1),
}


def _writes(rank: int, world_size: int, case: str) -> list[str]:
    make, loss, _ = WRITES[case]
    return _steps(rank, world_size, make, [_nothing] * 4, loss)


@pytest.mark.parametrize("case", WRITES)
@pytest.mark.slow
def test_attributes_written_by_forward(ranks: Ranks, case: str) -> None:
    for reasons in ranks(2).run(_writes, case):
        assert len(reasons) == WRITES[case][2], reasons


# --- hooks, closures, globals ------------------------------------------------------------------------------------

SEEN: list[Tensor] = []
FACTOR = 2.0


class _Keeps:
    """A hook that is a method of an object."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.calls = 0

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.outputs.append(out.detach())
        self.calls += 1


def _hooks(rank: int, world_size: int) -> list[str]:
    """Forward hooks that change tensors, keep them and count; added before capture, after it, and removed."""
    torch.manual_seed(0)
    pair = twins(Net(lambda self, x: x), world_mesh())
    kept = [_watched(model) for model in pair]
    handles: list[Any] = []
    for number in range(4):
        found = []
        for model, (keeps, outputs, count, remember) in zip(pair, kept):
            if number == 1:
                handles.append(model.layers[1].register_forward_pre_hook(remember))
            if number == 3:
                handles.pop(0).remove()
            model.zero_grad()
            torch.manual_seed(rank)
            out = model(rows(10 * number + rank))
            out.backward()
            lists = {f"{i}": tensor for i, tensor in enumerate((*keeps.outputs, *outputs))}
            found.append({"out": out.detach(), "calls": keeps.calls, "count": count["n"], **lists})
        assert_same(*found, f"call {number}")
        assert_same(*map(grads_of, pair), f"gradients of call {number}")
    return [program.reason for program in graphshard.programs(pair[0])]


def _watched(model: nn.Module) -> tuple[_Keeps, list[Tensor], dict[str, int], Callable[..., None]]:
    """Add hooks that double and that record; return the records, and a hook to add later."""
    outputs: list[Tensor] = []
    keeps, count = _Keeps(), {"n": 0}

    def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * 2

    def remember(module: nn.Module, args: Any) -> None:
        outputs.append(args[0].detach())
        count["n"] += 1

    model.layers[0].lin.register_forward_hook(double)
    model.layers[0].register_forward_hook(keeps.hook)
    return keeps, outputs, count, remember


@pytest.mark.slow
def test_forward_hooks_of_submodules_run_at_every_call(ranks: Ranks) -> None:
    for reasons in ranks(2).run(_hooks):
        assert len(reasons) == 4  # two lists grow
        assert reasons[0] == "first call"


def _backward_hooks(rank: int, world_size: int) -> list[str]:
    def halve(module: nn.Module, grads: Any, outs: Any) -> Any:
        return tuple(grad / 2 for grad in grads)

    def triple(module: nn.Module, outs: Any) -> Any:
        return tuple(out * 3 for out in outs)

    def hook(model: nn.Module) -> None:
        model.layers[0].register_full_backward_pre_hook(triple)

    def make() -> nn.Module:
        model = Net(lambda self, x: x)
        model.layers[1].lin.register_full_backward_hook(halve)
        return model

    return _steps(rank, world_size, make, [hook], None)


@pytest.mark.slow
def test_backward_hooks_of_submodules_change_gradients(ranks: Ranks) -> None:
    """Python runs forward, and each layer is a program."""
    for reasons in ranks(2).run(_backward_hooks):
        assert set(reasons) == {"first call"}


def _backward_effect(rank: int, world_size: int) -> None:
    def spy(module: Any, grads: Any, outs: Any) -> None:
        module.norm = outs[0].norm()
        module.norms.append(module.norm)

    pair = twins(Net(lambda self, x: x), world_mesh())
    for model in pair:
        model.layers[0].norms = []
        model.layers[0].register_full_backward_hook(spy)
        torch.manual_seed(rank)
        for _ in range(2):
            model(rows(rank)).backward()
    norms = [dict(enumerate(model.layers[0].norms)) for model in pair]
    assert len(norms[0]) == 2
    assert_same(*norms, "what the hook keeps")


@pytest.mark.slow
def test_attributes_written_by_backward_hooks(ranks: Ranks) -> None:
    ranks(2).run(_backward_effect)


def _with_globals(self: Any, x: Tensor) -> Tensor:
    SEEN.append(x.detach().sum())
    return x * FACTOR


def _globals(rank: int, world_size: int) -> tuple[int, list[str]]:
    def change(model: nn.Module) -> None:
        globals()["FACTOR"] = 3.0

    reasons = _steps(rank, world_size, lambda: Net(_with_globals), [_nothing, change], None)
    both = [float(t) for t in SEEN]
    globals().update(FACTOR=2.0)
    SEEN.clear()
    assert both[::2] == both[1::2]
    return len(both), reasons


@pytest.mark.slow
def test_forward_reads_and_writes_globals(ranks: Ranks) -> None:
    for number, reasons in ranks(2).run(_globals):
        assert number == 6
        assert reasons[0] == "first call"
        assert len(reasons) == 2  # a global list grows, and the number changes


def _entrances(rank: int, world_size: int) -> list[int]:
    """A replaced forward and a hook run however the module is called."""
    torch.manual_seed(0)
    model = Net(lambda self, x: x)
    plain = copy.deepcopy(model.eval())
    ours = graphshard.compile(model, world_mesh(), backend="eager")
    x = rows(rank)
    expected = _replace(plain.layers[0])(x)
    _replace(ours.layers[0])
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.layers[0](x), expected)
    assert torch.equal(copy.deepcopy(ours)(x), plain(x))
    assert torch.equal(copy.deepcopy(ours).layers[0](x), expected)
    del ours.layers[0].forward, plain.layers[0].forward
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.layers[0](x), plain.layers[0](x))
    return [len(graphshard.programs(ours))]


def _replace(part: Any) -> Any:
    """Replace forward with a function that uses the module's parameters, and add a hook."""
    part.forward = types.MethodType(lambda self, x: self.lin(x) * 5, part)
    part.lin.register_forward_hook(lambda module, args, out: out + 1)
    return part


@pytest.mark.filterwarnings("error")
def test_every_entry_point_runs_hooks_and_replaced_forwards(ranks: Ranks) -> None:
    ranks(2).run(_entrances)
