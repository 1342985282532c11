"""A model with everything that an artifact must carry, and helpers that export it and corrupt the file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from graphshard.utils.archive import read_archive, write_archive

TOKENS, WIDTH = 10, 6
LAYER = "layers.1"


class Layer(nn.Module):
    """A residual layer with dropout, and a buffer that counts its calls."""

    calls: Tensor

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.p = p
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + F.dropout(torch.tanh(self.linear(self.norm(x))), self.p, self.training)


class Net(nn.Module):
    """A small language model with tied embeddings, loss and logits as outputs, and a constant made in forward."""

    def __init__(self, width: int = WIDTH, p: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(Layer(width, p) for _ in range(2))
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.embed(tokens) * torch.tensor([1.0, 0.5, 0.25])[:, None]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if targets is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class Small(nn.Module):
    """A model with as few regions as possible, for tests that compile them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().square().mean()


def hf_llama() -> nn.Module:
    """Return a small Llama of transformers, which has a config and a generation config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, **sizes))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of one rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(TOKENS, (2, 2, 3), generator=generator)
    return tokens, targets


def export_net(
    path: Path, mesh: Any = ((1,), (2,), (4,)), calls: Sequence[graphshard.Call] = (), **options: Any
) -> Path:
    """Export the model from the meta device; by default for training, inference, its last layer and more."""
    with torch.device("meta"):
        model = Net()
    everything = [
        graphshard.Call(batch(), gradients=[(1,), (0, 1)]),
        graphshard.Call(batch()[:1], training=False, grad=False),
        graphshard.Call((torch.zeros(2, 3, WIDTH),), entry=LAYER),
    ]
    return graphshard.export(model, mesh, path, calls=calls or everything, backend="eager", **options)


@contextlib.contextmanager
def nothing_is_compiled() -> Iterator[None]:
    """Fail on any planning or compiling, including C++ compilers, while the block runs. Tracing is allowed."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something is planned or compiled")

    compiling = (
        "graphshard.module.tracer.run_pipeline",
        "graphshard.module.tracer.finish_template",
        "graphshard.module.program_compiler.lower",
        "graphshard.torch_compat.aot_autograd.min_cut_rematerialization_partition",
        "torch._functorch.partitioners.min_cut_rematerialization_partition",
        "subprocess.Popen",
        "os.system",
    )
    loaded = "torch._inductor.compile_fx" in sys.modules
    with contextlib.ExitStack() as stack:
        for name in compiling:
            stack.enter_context(mock.patch(name, refuse))
        stack.enter_context(mock.patch.dict(os.environ, {"PATH": "/nowhere", "CXX": "", "CC": ""}))
        yield
    # An earlier test of this process may have imported it.
    assert loaded or "torch._inductor.compile_fx" not in sys.modules


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> Path:
    """Copy a file with other facts or members and matching checksums."""
    archive = read_archive(path)
    facts = json.loads(json.dumps(archive.facts))
    members = dict(archive.members)
    change(facts, members)
    copy = path.with_name(f"changed-{path.name}")
    write_archive(copy, facts, members)
    return copy


if __name__ == "__main__":  # exports in a separate process
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "net":
        export_net(path)
    elif what == "microbatches":
        steps = [graphshard.Call(batch(), gradients=[(1,)]), graphshard.Call((torch.zeros(2, 3, WIDTH),), entry=LAYER)]
        export_net(path, [(1,), (2,), (2, 2), (2, 1), (1, 2)], steps, accumulate=True)
    elif what == "llama":
        text = torch.zeros(2, 8, dtype=torch.int64)
        given = {"example_kwargs": {"input_ids": text, "labels": text}, "device": "cpu", "backend": "eager"}
        graphshard.export(hf_llama(), 1, path, **given)
    elif what == "regathered":
        export_net(path, (4,), [graphshard.Call(batch())], reshard_after_forward=2)
    else:
        with torch.device("meta"):
            small = Small()
        given = {"example_inputs": (torch.randn(2, 8),), "threads": 1, "device": "cpu", "accumulate": True}
        graphshard.export(small, [(1,), (2,)], path, **given)
