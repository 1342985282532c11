"""Code of FX graphs and torch's logs: boxed calls, lazy code, and source that is not kept for tracebacks."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator

from torch import nn
from torch._logging import getArtifactLogger, trace_structured
from torch.fx import Graph, GraphModule, graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen

__all__ = ["forget_sources", "recompiles_log", "trace_structured", "uncompiled", "use_boxed_calls"]

# Prints with `TORCH_LOGS=recompiles`: torch gives its handlers to loggers under "torch" only.
recompiles_log = getArtifactLogger("torch.graphshard", "recompiles")


def use_boxed_calls(graph: Graph) -> None:
    """Generate code that takes one list of inputs and clears it, so that inputs can be freed early."""
    graph.set_codegen(_BoxedCodeGen())


def uncompiled(root: nn.Module, graph: Graph) -> GraphModule:
    """Return a module of a graph whose code is generated when it is first read or called."""
    return _LazyGraphModule(root, graph)


@contextlib.contextmanager
def forget_sources() -> Iterator[None]:
    """Remove the source of graphs that torch.fx compiles in the block, which it keeps forever for tracebacks.

    A GraphModule holds its code, and executors keep their source while they live.
    """
    known = set(graph_module._loader.eval_cache)
    try:
        yield
    finally:
        for name in set(graph_module._loader.eval_cache) - known:
            graph_module._loader.eval_cache.pop(name, None)
            linecache.cache.pop(name, None)
