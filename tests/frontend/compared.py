"""Train a small net eagerly and compiled, step by step, and report differences."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.torch_compat.torch_ops import pytree

STEPS = 4
_NOT_COMPARED = {*vars(nn.Module()), "forward"} - {"training"}


class Net(nn.Module):
    """Base of the nets in the tables: inputs of a step, and changes between steps."""

    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(self.width, self.width)

    @classmethod
    def reset(cls) -> None:
        """Set globals of the case to their initial values."""

    def inputs(self, step: int) -> tuple[Any, ...]:
        """Return the arguments of a step."""
        return (batch(step),)

    def change(self, step: int) -> None:
        """Change something before a step."""

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Return a context in which a step runs."""
        yield

    def loss(self, result: Any) -> Tensor:
        """Return the value to differentiate."""
        leaves = [leaf for leaf in pytree.tree_leaves(_plain(result)) if isinstance(leaf, Tensor)]
        return sum((leaf.float().square().sum() for leaf in leaves if leaf.requires_grad), torch.zeros(()))


def batch(step: int, rows: int = 3, width: int = 4) -> Tensor:
    """Return an input."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def verdict(net: type[Net], mesh: DeviceMesh, **options: Any) -> str:
    """Return "equal", or the difference, or the error."""
    torch.manual_seed(0)
    net.reset()
    plain = net()
    twin = copy.deepcopy(plain)
    expected = trained(plain, plain)
    net.reset()
    try:
        model = graphshard.compile(twin, mesh, backend="eager", **options)
    except graphshard.GraphshardError as error:
        return f"error: {error}"
    found = trained(twin, model)
    for step, (want, got) in enumerate(zip(expected, found)):
        for name in sorted({*want, *got} - {"failed"}, key=lambda name: (name != "raised", name)):
            if not _same(want.get(name), got.get(name)):
                if name == "raised" and "graphshard" in str(got.get("failed", "")):
                    return f"error: {got['raised']}"
                return f"step {step}: {name} is {_text(got.get(name))} and not {_text(want.get(name))}"
    return "equal"


def trained(module: Any, model: Any) -> list[dict[str, Any]]:
    """Return the observable state after each step, by name.

    Args:
        module: receives the changes; for a compiled model it is the model itself.
    """
    torch.manual_seed(1)
    random.seed(1)
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.set_grad_enabled(True)
        now: dict[str, Any] = {}
        seen.append(now)
        model.change(step)
        args = model.inputs(step)
        written = io.StringIO()
        try:
            with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(written):
                warnings.simplefilter("always")
                with model.around(step):
                    result = model(*args)
                    loss = model.loss(result)
                    if loss.requires_grad:
                        loss.backward()
            now["printed"], now["warned"] = written.getvalue(), [str(each.message) for each in warned]
            now["loss"] = loss.detach().clone()
            leaves, structure = pytree.tree_flatten(_plain(result))
            now["result"] = [_value(leaf) for leaf in leaves]
            now["structure"] = str(structure)
            now["identities"] = _identities([*leaves, *pytree.tree_leaves(_plain(args))])
            now["arguments"] = [_value(leaf) for leaf in pytree.tree_leaves(_plain(args))]
            now["gradients of inputs"] = [
                leaf.grad for leaf in pytree.tree_leaves(_plain(args)) if isinstance(leaf, Tensor) and leaf.is_leaf
            ]
        except Exception as error:
            now["raised"] = f"{type(error).__name__}: {error}"
            now["failed"] = f"{type(error).__module__}"
        for name, param in model.named_parameters():
            now[f"gradient of {name}"] = _value(param.grad)
        for name, tensor in model.state_dict().items():
            now[f"state {name}"] = _value(tensor)
        for path, part in model.named_modules():
            for name, value in vars(part).items():
                if name not in _NOT_COMPARED and not name.startswith("_graphshard") and not _is_hidden(value):
                    now[f"attribute {path}.{name}"] = [_value(leaf) for leaf in pytree.tree_leaves(_plain(value))]
        now["generator"] = torch.get_rng_state().clone()
        now["random"] = random.getstate()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _plain(value: Any) -> Any:
    """Convert dataclasses and similar objects to dicts."""
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, (type, dict)):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def _is_hidden(value: Any) -> bool:
    return any(
        not isinstance(leaf, (Tensor, int, float, str, complex, type(None), bytes))
        for leaf in pytree.tree_leaves(_plain(value))
    )


def _value(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        leaf = leaf.to_local()
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _identities(leaves: list[Any]) -> list[int]:
    """Return for each tensor the index of the first identical object."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [next(place for place, other in enumerate(tensors) if other is tensor) for tensor in tensors]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.stride() == other.stride()
            and torch.equal(one.nan_to_num(nan=1e9), other.nan_to_num(nan=1e9))
            and (not one.is_floating_point() or torch.equal(one.signbit() & (one == 0), other.signbit() & (other == 0)))
        )
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return repr(one) == repr(other)
    return type(one) is type(other) and bool(one == other)


def _text(value: Any) -> str:
    return " ".join(str(value).split())[:400]
