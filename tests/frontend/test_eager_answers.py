"""transformers models are traced as in eager mode: no mask, no repeated heads, and eager mode's bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from transformers import LlamaConfig, LlamaForCausalLM

from graphshard.guards.value_branches import eager_answers

TOKENS = torch.arange(12).view(2, 6)


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def _compiled(graphs: list[GraphModule], backend: str = "aot_eager") -> Any:
    """Compile the whole model; collect the graphs that Dynamo creates."""
    torch._dynamo.reset()
    make = torch._dynamo.lookup_backend(backend)

    def compiler(graph: GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make(graph, inputs)

    return torch.compile(_llama(), fullgraph=True, backend=compiler)


def _step(model: Any, **given: Any) -> list[torch.Tensor]:
    found = model(input_ids=TOKENS, labels=TOKENS, use_cache=False, **given)
    found.loss.backward()
    return [found.loss, found.logits, *(param.grad for param in model.parameters())]


def _attention(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _reset_compiler() -> None:
    """Reset compiled functions: other tests reach the recompile limit of functions of transformers."""
    torch.compiler.reset()


@pytest.mark.slow
def test_llama_is_traced_as_in_eager_mode() -> None:
    graphs: list[GraphModule] = []
    with eager_answers():
        found = _step(_compiled(graphs))
    (graph,) = graphs
    assert [node.kwargs["attn_mask"] for node in _attention(graph)] == [None, None]
    assert all(node.kwargs["is_causal"] and node.kwargs["enable_gqa"] for node in _attention(graph))
    assert all(map(torch.equal, found, _step(_llama())))


@pytest.mark.parametrize("within", [False, True], ids=["never", "before"])
@pytest.mark.slow
def test_other_users_of_torch_compile_are_not_affected(within: bool) -> None:
    """Also after graphshard has traced."""
    graphs: list[GraphModule] = []
    with eager_answers() if within else contextlib.nullcontext():
        pass
    _step(_compiled(graphs))
    assert all(node.kwargs["attn_mask"] is not None for node in _attention(graphs[0]))


def test_rejects_packed_sequences() -> None:
    """The program is for rows of one sequence each; it accepts other positions that count up."""
    graphs: list[GraphModule] = []
    rows, packed = torch.arange(6).repeat(2, 1), torch.tensor([0, 1, 2, 0, 1, 2]).repeat(2, 1)
    with eager_answers():
        model = _compiled(graphs)
        for positions in (rows, rows + 3):
            expected = _step(_llama(), position_ids=positions)
            model.zero_grad()
            assert all(map(torch.equal, _step(model, position_ids=positions), expected))
        with pytest.raises(RuntimeError, match=r"several sequences in a row.*Pass an attention_mask of four dims"):
            _step(model, position_ids=packed)
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_mask_that_is_given_is_used() -> None:
    graphs: list[GraphModule] = []
    mask = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    with eager_answers():
        found = _step(_compiled(graphs), attention_mask=mask)
    assert all(map(torch.equal, found, _step(_llama(), attention_mask=mask)))
    assert all(node.kwargs["attn_mask"] is not None for node in _attention(graphs[0]))
