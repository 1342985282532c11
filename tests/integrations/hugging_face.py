"""Small transformers models, and Accelerate in ranks that stay alive between tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 61


def llama(**changes: Any) -> nn.Module:
    """Build a Llama with equal random weights on all ranks; the odd vocabulary makes shards uneven."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "use_cache": False, **changes}))


def gpt2(**changes: Any) -> nn.Module:
    """Build a GPT-2 with tied embeddings and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False, **changes))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of a tuple output, so that one capture serves all ranks."""
    return model(input_ids=rows, labels=rows, return_dict=False)[0]


def text(rows: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows, 8), generator=torch.Generator().manual_seed(1))


def loader(rows: int = 24, batch: int = 2) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of all ranks' data; Accelerate distributes the batches."""
    return DataLoader(TensorDataset(text(rows)), batch_size=batch)


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Set the environment of a `torchrun` rank, with Accelerate's singletons reset."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ACCELERATE_USE_CPU": "1"}
    reset()
    with mock.patch.dict(os.environ, own):
        try:
            yield
        finally:
            reset()
