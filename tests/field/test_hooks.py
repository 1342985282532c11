"""Hooks that come and go with each call have plain torch's values, and one program serves all calls.

FSDP2 runs such hooks as they are. A compiler that takes each new closure for another program captures at each call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.distributed.twins import world_mesh
from tests.field.trials import assert_equal, full, gradients, on_fsdp2, on_graphshard, on_plain_torch
from tests.ranks import Ranks

WIDTH, STEPS = 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# What one call of the model returns besides its result, given the model, the input and the number of the step.
Call = Callable[[Any, Tensor, int], tuple[Tensor, Iterable[Tensor]]]


def _features_in_a_dict(model: Any, x: Tensor, step: int) -> tuple[Tensor, Iterable[Tensor]]:
    """Feature extraction as in tutorials: a new dict and new closures for each call."""
    found: dict[str, Tensor] = {}

    def saving(name: str) -> Any:
        def save(module: nn.Module, args: Any, output: Tensor) -> None:
            found[name] = output.detach()

        return save

    named = [("up", model.layers[0].up), ("block", model.layers[1]), ("head", model.head)]
    handles = [module.register_forward_hook(saving(name)) for name, module in named]
    result = model(x)
    for handle in handles:
        handle.remove()
    return result, [found[name] for name in sorted(found)]


class Trace(dict[str, Tensor]):
    """A context that retains and edits outputs, as baukit's and TransformerLens's."""

    def __init__(self, model: nn.Module, names: Iterable[str], edit: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.handles = [
            model.get_submodule(name).register_forward_hook(functools.partial(self.retain, name, edit))
            for name in names
        ]

    def retain(self, name: str, edit: Callable[[Tensor], Tensor], module: nn.Module, args: Any, out: Tensor) -> Tensor:
        self[name] = edit(out)
        return self[name]

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _traced(model: Any, x: Tensor, step: int) -> tuple[Tensor, Iterable[Tensor]]:
    """A steering vector that is another tensor for each call, and outputs retained by a context."""
    vector = torch.full((WIDTH,), 0.5 * step)
    with Trace(model, ["layers.0", "layers.1.down"], lambda out: out + vector) as trace:
        result = model(x)
    return result, [out.detach() for out in trace.values()]


class Features:
    """Features by device and name, as timm's `FeatureHooks` collects them."""

    def __init__(self) -> None:
        self.by_device: defaultdict[torch.device, dict[str, Tensor]] = defaultdict(dict)

    def collect(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self.by_device[output.device][name] = output


def _features_of_an_object(model: Any, x: Tensor, step: int) -> tuple[Tensor, Iterable[Tensor]]:
    """Features that are part of the loss: perceptual losses, distillation."""
    features = Features()
    handles = [
        layer.register_forward_hook(functools.partial(features.collect, f"layer {index}"))
        for index, layer in enumerate(model.layers)
    ]
    result = model(x)
    for handle in handles:
        handle.remove()
    (found,) = features.by_device.values()
    return result + sum(output.sum() for output in found.values()), []


def _ablated(model: Any, x: Tensor, step: int) -> tuple[Tensor, Iterable[Tensor]]:
    """Neurons that are left out, by a mask; hooks before a leaf and a unit, with keyword arguments."""
    mask, scale = (torch.arange(6) != step).float(), 0.1 * step + 0.1

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] * scale, *args[1:]), kwargs

    handles = [
        model.layers[0].down.register_forward_pre_hook(lambda module, args: (args[0] * mask,)),
        model.layers[1].register_forward_pre_hook(before, with_kwargs=True),
        model.head.register_forward_hook(lambda module, args, kwargs, out: out * 2, with_kwargs=True, always_call=True),
    ]
    result = model(x)
    for handle in handles:
        handle.remove()
    return result, []


def _patched(model: Any, x: Tensor, step: int) -> tuple[Tensor, Iterable[Tensor]]:
    """Activation patching: a run without gradients is cached, and another run takes from the cache."""
    cache: dict[int, Tensor] = {}
    saves = [lambda module, args, out, index=index: cache.update({index: out}) for index in range(2)]
    handles = [layer.register_forward_hook(save) for layer, save in zip(model.layers, saves)]
    with torch.no_grad():
        model(2 * x)
    for handle in handles:
        handle.remove()
    handle = model.layers[0].register_forward_hook(lambda module, args, out: (out + cache[0]) / 2)
    result = model(x)
    handle.remove()
    return result, [cache[1].clone()]


def _collected_over_steps(model: Any, x: Tensor, step: int) -> tuple[Tensor, Iterable[Tensor]]:
    """A hook that is registered once and appends to lists that grow with each call."""
    if step == 0:
        lists = model.__dict__["collected"] = {"layer": [], "input": []}
        model.layers[0].register_forward_hook(lambda module, args, out: lists["layer"].append(out.detach()))
        model.layers[1].register_forward_pre_hook(lambda module, args: lists["input"].append(args[0].detach()))
    result = model(x)
    lists = model.__dict__["collected"]
    return result, [torch.stack(lists["layer"]), torch.stack(lists["input"])]


def _counted_over_steps(model: Any, x: Tensor, step: int) -> tuple[Tensor, Iterable[Tensor]]:
    """The length of a list that grows decides, and its last entry is read."""
    if step == 0:
        model.__dict__["collected"] = []
        outputs = model.__dict__["collected"]

        def mixing(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            mixed = out + outputs[-1] if outputs else out
            if len(outputs) < 3:
                outputs.append(out.detach())
            return mixed

        model.layers[0].register_forward_hook(mixing)
    return model(x), list(model.__dict__["collected"])


class Enough(Exception):
    """Ends a forward."""


def _stopped(model: Any, x: Tensor, step: int) -> tuple[Tensor, Iterable[Tensor]]:
    """A hook ends the forward where it has what it needs, as baukit's `stop=True`."""
    found: list[Tensor] = []

    def stop(module: nn.Module, args: Any, out: Tensor) -> None:
        found.append(out)
        raise Enough

    handle = model.layers[0].register_forward_hook(stop)
    with torch.no_grad(), pytest.raises(Enough):
        model(x)
    handle.remove()
    return model(x), found


def _looked_at_once(model: Any, x: Tensor, step: int) -> tuple[Tensor, Iterable[Tensor]]:
    """Hooks for debugging in the first call only, which split the model: a print of a value, a full backward hook."""
    handles = []
    if step == 0:
        printed: list[float] = []
        handles.append(
            model.layers[0].register_forward_hook(lambda module, args, out: printed.append(out.sum().item()))
        )
        handles.append(model.layers[1].register_full_backward_hook(lambda module, grads, outputs: None))
    result = model(x)
    for handle in handles:
        handle.remove()
    return result, []


# With the number of captures that four steps need. Lists that grow need two: the first call finds them empty. Where
# calls come with and without gradients, or with and without hooks, each kind has a program.
CALLS: dict[str, tuple[Call, int]] = {
    "dict": (_features_in_a_dict, 1),
    "context": (_traced, 1),
    "object": (_features_of_an_object, 1),
    "ablated": (_ablated, 2),  # a float is a symbol from its second value on
    "patched": (_patched, 2),
    "over_steps": (_collected_over_steps, 2),
    "counted": (_counted_over_steps, 4),
    "stopped": (_stopped, 2),
    "once": (_looked_at_once, 2),
}


def _train(call: Call, model: nn.Module) -> list[Tensor | None]:
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor | None]()
    for step in range(STEPS):
        result, others = call(model, torch.full((2, WIDTH), 0.1 * step + 0.1), step)
        loss = result.square().mean()
        loss.backward()
        seen += [loss.detach(), *(other.clone() for other in others), *map(_full, gradients(model))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _full(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else full(grad)


class Captures(logging.Handler):
    """Counts the traces of the whole model, also of those that end in a graph break."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += bool(re.match(r"capture \d+ of Net:", record.getMessage()))


@contextlib.contextmanager
def _counted_captures() -> Iterator[Captures]:
    log, handler = logging.getLogger("graphshard.module.installed_programs"), Captures()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def _trial(rank: int, world_size: int, names: list[str]) -> dict[str, int]:
    captures = {}
    for name in names:
        call, _ = CALLS[name]
        torch.manual_seed(0)
        model = graphshard.compile(Net(), world_mesh(), backend="eager")
        # As with FSDP2, gradients of a unit's input from within the unit are summed before others are added.
        right = on_fsdp2 if name == "object" else on_plain_torch
        with _counted_captures() as counted:
            seen = _train(call, model)
        assert_equal(seen, right(Net, functools.partial(_train, call)))
        captures[name] = counted.count
        last = [program.model for program in graphshard.programs(model)][-1]
        assert last == "Net", name  # not a program of a unit of a split model
    return captures


@pytest.mark.parametrize(
    "names", [["dict", "ablated", "over_steps", "once"], ["context", "object", "patched", "counted", "stopped"]]
)
@pytest.mark.quick_cases("names0")
def test_hooks_that_come_and_go(ranks: Ranks, names: list[str]) -> None:
    captures, others = ranks(2).run(_trial, names)
    assert captures == others == {name: CALLS[name][1] for name in names}


# --- numbers and names that change ------------------------------------------------------------------------------------


class _Ablation:
    """A hook that is an object with a number, as interpretability libraries have."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[..., self.index] = 0
        return out


GLOBAL = 0


def _of_a_global(index: int) -> Any:
    global GLOBAL
    GLOBAL = index
    return lambda module, args, out: out + out[0, GLOBAL]


def _of_heads(index: int) -> Any:
    pairs = [(0, index), (1, 11 - index)]

    def ablate(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        for row, column in pairs:
            out[row, column] *= 0.5
        return out

    return ablate


def _of_a_name(index: int) -> Any:
    found, name = dict[str, Tensor](), f"call {index}"
    return lambda module, args, out: found.update({name: out.detach()})


def _of_a_formatted_name(index: int) -> Any:
    found = dict[str, Tensor]()
    return lambda module, args, out: found.update({f"call {index}": out.detach()})


# Makes the hook for a number, with the number of programs that ten numbers take: two, the first of which has the number
# as a constant. A slice that reaches the end has another length; a name is no part of a program.
NUMBERS: dict[str, tuple[Callable[[int], Any], int]] = {
    "column": (lambda i: lambda module, args, out: out + out[:, i].unsqueeze(-1), 2),
    "from the end, with a new dimension": (lambda i: lambda module, args, out: out + out[..., -1 - i, None], 2),
    "slice": (lambda i: lambda module, args, out: out + out[:, i : i + 2].sum(), 2),
    "slice to the end": (lambda i: lambda module, args, out: out + out[:, i:].sum(), 2),
    "with a tensor": (lambda i: lambda module, args, out: out + out[torch.tensor([1, 0]), None, i], 2),
    "list": (lambda i: lambda module, args, out: out + out[:, [i, 3]].sum(), 2),
    "default": (lambda i: lambda module, args, out, i=i: out + out[0, i], 2),
    "tuple as a default": (lambda i: lambda module, args, out, pair=(1, i): out + out[pair], 2),
    "partial": (lambda i: functools.partial(lambda i, module, args, out: out + out[:, i].sum(), i), 2),
    "object": (_Ablation, 2),
    "global": (_of_a_global, 2),
    "heads": (_of_heads, 2),
    "floats": (lambda i: lambda module, args, out: out * (i / 3), 2),
    "branch": (lambda i: lambda module, args, out: out * 2 if i > 5 else out + out[:, i].sum(), 3),
    "name": (_of_a_name, 1),
    "formatted name": (_of_a_formatted_name, 4),  # one for the first value, and those of the split module
}


def _with_a_number(make: Callable[[int], Any], model: Any) -> list[Tensor | None]:
    seen: list[Tensor | None] = []
    for index in (0, 1, 2, 7, 3, 9, 4, 8, 5, 6):
        handle = model[0].register_forward_hook(make(index))
        loss = model(torch.arange(24.0).view(2, 12) / 24).square().mean()
        handle.remove()
        loss.backward()
        seen.append(loss.detach())
    return [*seen, *map(_full, gradients(model))]


def _numbers(rank: int, world_size: int, names: list[str]) -> dict[str, int]:
    programs = {}
    for name in names:
        made: list[nn.Module] = []

        def build(made: list[nn.Module] = made) -> nn.Module:
            made.append(nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 2)))
            return made[-1]

        train = functools.partial(_with_a_number, NUMBERS[name][0])
        expected = on_plain_torch(build, train)
        assert_equal(on_graphshard(build, train, max_captures=4), expected)
        programs[name] = len(graphshard.programs(made[-1]))
    return programs


_FEW = ["column", "default", "heads", "name"]


@pytest.mark.parametrize("names", [_FEW, [name for name in NUMBERS if name not in _FEW]], ids=["few", "others"])
@pytest.mark.quick_cases("few")
def test_numbers_that_change(ranks: Ranks, names: list[str]) -> None:
    """A program serves all numbers; more names than programs may be kept do not end training."""
    programs, others = ranks(2).run(_numbers, names)
    assert programs == others == {name: NUMBERS[name][1] for name in names}
