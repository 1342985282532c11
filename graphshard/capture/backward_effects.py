"""What code that runs in backward leaves behind cannot be repeated: the compiled backward has no such code.

layer.register_full_backward_hook(lambda module, grads, outs: norms.append(outs[0].norm()))       an error
x.register_hook(lambda grad: grad * 2)                                                             captured
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from graphshard.capture.changes import KINDS, Node, attributes_of
from graphshard.capture.hooks import users_hooks
from graphshard.capture.untraceable import Located, is_users
from graphshard.capture.witness import is_container
from graphshard.ir.state import MISSING, Place


@contextlib.contextmanager
def no_effects_of_backward(module: nn.Module, label: str) -> Iterator[None]:
    """In the block a forward and its backward are traced; the forward's own effects are undone already.

    Raises, at the end:
        Located: an attribute, or a variable of a hook, is not as it was. It is put back.
    """
    nodes = list(_nodes(module))
    yield
    changed = [place for node in nodes for place in _changed(node)]
    for node in nodes:
        node.restore()
    if changed:
        raise Located(
            f"graphshard cannot capture {label}.forward: when it is differentiated, a hook or the backward of a "
            f"torch.autograd.Function changes {changed[0]}, which would happen once, while it is captured. Hooks of "
            "parameters (register_post_accumulate_grad_hook) run at every step; so do those of the compiled module "
            "itself, and code after loss.backward()."
        )


def _nodes(root: nn.Module) -> Iterator[Node]:
    """Modules, their hooks, and the lists and dicts that these hold."""
    for name, module in root.named_modules():
        yield from _with_containers(Node.of(module, Place(name), attributes_of(module)))
        for place, hook in users_hooks(module, Place(name)) if name else ():
            function = getattr(hook, "__func__", hook)
            if isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename):
                yield from _with_containers(Node.of_variables(function, place))


def _with_containers(node: Node) -> Iterator[Node]:
    yield node
    for name, value in node.content.items():
        if is_container(value) and not isinstance(value, (tuple, frozenset)) and not str(name).startswith("_"):
            yield Node.of(value, node.step(name), value)


def _changed(node: Node) -> Iterator[Place]:
    now, before = _named(node.now()), _named(node.content)
    for kind in KINDS if node.is_module else ():
        for name in dict.fromkeys((*node.before[kind], *now[kind])):
            if now[kind].get(name, MISSING) is not node.before[kind].get(name, MISSING):
                yield node.step(name)
    for name in dict.fromkeys((*before, *now)):
        if now.get(name, MISSING) is not before.get(name, MISSING):
            yield node.place if node.has_items else node.step(name)


def _named(contents: Any) -> dict[Any, Any]:
    """Contents by name; items of a list by number, of a set by themselves."""
    if isinstance(contents, dict):
        return contents
    return {item: item for item in contents} if isinstance(contents, set) else dict(enumerate(contents))
