"""A model whose source changes between launches, and launches in one process that import it again."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.module import tracer
from graphshard.store.cache_directory import OF_TRACES

HELPER = """
FACTOR = 2.0
TABLE = {"a": 1.0, "b": [2.0, 3.0]}

def scaled(x):
    return inner(x) * FACTOR

def inner(x):
    return x + TABLE["b"][0]

def unused(x):
    return x
"""
MODEL = """
import functools
import os

import torch
import torch.nn.functional as F
from torch import nn

import cached_helper
from cached_helper import scaled

SCALE = 1.5

class Config:
    slope = 0.25
    def __init__(self):
        self.width = 4
        self.bias = True
        self.options = {"power": 2}

class Meter:
    offset = 0.125
    def __call__(self, x):
        return x + self.offset

def made(value):
    def apply(x):
        return x * value
    return apply

def clipped(x, most=1000.0):
    return x.clamp(max=most)

@functools.lru_cache
def constant(n):
    return n + cached_helper.FACTOR

class Net(nn.Module):
    depth = 2
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.lin = nn.Linear(config.width, config.width, bias=config.bias)
        self.register_buffer("mask", torch.ones(4))
        self.meter = Meter()
        self.apply_ = made(3.0)
        self.table = torch.arange(4.0)

    def forward(self, x):
        for _ in range(self.depth):
            x = F.gelu(self.lin(x))
        x = scaled(x) * SCALE * self.mask
        x = clipped(self.apply_(self.meter(x))) ** self.config.options["power"]
        x = x + constant(1) + self.config.slope + self.table
        if os.environ.get("CACHED_NET", "") == "more":
            x = x * 2
        return (x * 1.0).sum()
"""


@dataclass
class Launches:
    """Successive launches of a job.

    Attributes:
        folder: directory of the sources.
        cache: directory of the cache.
        compiled: whether the last launch compiled.
    """

    folder: Path
    cache: Path
    mesh: DeviceMesh
    compiled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.write("cached_helper", HELPER)
        self.write("cached_model", MODEL)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        """Change the source of a module."""
        path = self.folder / f"{name}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def run(
        self,
        prepare: Callable[[Any, nn.Module], None] = lambda module, model: None,
        *,
        x: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """Import the model, compile it and run a step: the loss and the gradients."""
        for name in ("cached_model", "cached_helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        with self.importing():
            module = importlib.import_module("cached_model")
        torch.manual_seed(0)
        model = module.Net(module.Config())
        prepare(module, model)
        x = torch.linspace(-1, 1, 8).view(2, 4) if x is None else x
        with mock.patch.object(tracer, "run_pipeline", wraps=tracer.run_pipeline) as passes, self.importing():
            options = {"backend": "eager", "cache": self.cache, **options}
            graphshard.compile(model, self.mesh, **options)
            loss = model(x)
            loss.backward()
        self.compiled = passes.called
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        return loss.detach(), grads

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Make the current sources importable."""
        path = [str(self.folder), *sys.path]
        with mock.patch.object(sys, "path", path), mock.patch.object(sys, "dont_write_bytecode", True):
            yield

    def files(self) -> list[str]:
        """Return the names of the files of programs."""
        names = sorted(os.listdir(self.cache)) if self.cache.exists() else []
        return [name for name in names if not name.endswith(OF_TRACES)]


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> str:
    """Return the cache's log messages from a level on."""
    return "\n".join(
        r.getMessage() for r in caplog.records if r.name.startswith("graphshard.cache") and r.levelno >= level
    )
