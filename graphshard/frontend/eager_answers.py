"""Answers of libraries that ask whether they are traced, as eager mode has them.

transformers makes an explicit attention mask where it is told that it is traced. Its eager code makes none, and
gradients differ in the last bit. So its questions are answered as in eager mode while graphshard traces, through
`torch.compiler.substitute_in_graph`; other uses of `torch.compile` hear the truth.

    is_tracing, is_torchdynamo_exporting     no
    fast_all, _ignore_bidirectional_mask     whether a mask has padding: a branch on values (`value_branches.py`)
    find_packed_sequence_indices             whether rows are one sequence each: another one
    warn_if_padding_and_no_attention_mask    nothing: values decide over a warning

`is_torchdynamo_compiling` keeps its answer: with another one transformers sets context variables, which Dynamo cannot
trace. It decides over warnings, and over the layout of queries of one token.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphshard.frontend.value_branches import answering, decide

# A method of models of transformers.
WARNING = "warn_if_padding_and_no_attention_mask"
_PACKED = (
    "position_ids have several sequences in a row, or no longer have. Pass an attention_mask of four dims that keeps "
    "the sequences apart."
)
_PADDING = "a mask has padding, or no longer has. Pass a mask of four dims to be independent of its values."

_open = [0]


@contextlib.contextmanager
def eager_answers(answers: Sequence[bool] | None = ()) -> Iterator[list[bool]]:
    """Answer as eager mode does while the block is open; yield the answers to questions about values.

    Args:
        answers: that are known to such questions, in their order; None leaves them to Dynamo.
    """
    for name, substitute in (
        ("transformers.utils.import_utils", _substitute_questions),
        ("transformers.masking_utils", _substitute_masks),
    ):
        if name in sys.modules:
            substitute(sys.modules[name])
    _open[0] += 1
    try:
        with answering(answers) as given:
            yield given
    finally:
        _open[0] -= 1


@functools.cache
def _substitute_questions(questions: Any) -> None:
    torch.compiler.assume_constant_result(_is_asked_by_graphshard)
    if hasattr(questions, "is_tracing"):

        @torch.compiler.substitute_in_graph(questions.is_tracing)
        def is_tracing(tensor: Any = None) -> bool:
            return not _is_asked_by_graphshard()

    if hasattr(questions, "is_torchdynamo_exporting"):

        @torch.compiler.substitute_in_graph(questions.is_torchdynamo_exporting)
        def is_torchdynamo_exporting() -> bool:
            return not _is_asked_by_graphshard() and torch.compiler.is_exporting()


@functools.cache
def _substitute_masks(masks: Any) -> None:
    torch.compiler.assume_constant_result(_is_asked_by_graphshard)
    if hasattr(masks, "fast_all"):
        fast_all_traced = _copy(masks.fast_all)

        @torch.compiler.substitute_in_graph(masks.fast_all)
        def fast_all(tensor: torch.Tensor) -> Any:
            holds = fast_all_traced(tensor)
            return decide(holds, False, _PADDING) if _is_asked_by_graphshard() else holds

    if hasattr(masks, "_ignore_bidirectional_mask_sdpa"):
        ignore_traced = _copy(masks._ignore_bidirectional_mask_sdpa)

        @torch.compiler.substitute_in_graph(masks._ignore_bidirectional_mask_sdpa)
        def _ignore_bidirectional_mask_sdpa(
            padding_mask: torch.Tensor | None, kv_length: int, local_attention_size: int | None = None
        ) -> Any:
            if padding_mask is None or not _is_asked_by_graphshard():
                return ignore_traced(padding_mask, kv_length, local_attention_size)
            without = ignore_traced(None, kv_length, local_attention_size)
            return without and decide(padding_mask.all(), False, _PADDING)

    if hasattr(masks, "find_packed_sequence_indices"):
        find_traced = _copy(masks.find_packed_sequence_indices)

        @torch.compiler.substitute_in_graph(masks.find_packed_sequence_indices)
        def find_packed_sequence_indices(position_ids: torch.Tensor) -> Any:
            if not _is_asked_by_graphshard():
                return find_traced(position_ids)
            first = position_ids[:, :1] - 1
            packed = (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)
            return None if decide((packed[:, -1] == 0).all(), True, _PACKED) else packed


def without_warnings(module: nn.Module) -> None:
    """Let models of transformers not look for padding that no mask is given for; in a block of `as_written`.

    They do to warn, and values of tensors decide. Guards leave the attribute out.
    """
    for each in module.modules():
        if hasattr(type(each), WARNING):
            each.__dict__[WARNING] = _no_warning


def _no_warning(input_ids: Any, attention_mask: Any) -> None:
    """Do not warn."""


def _copy(function: Any) -> Any:
    """Return a function that is the same and is not substituted."""
    code = function.__code__
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


def _is_asked_by_graphshard() -> bool:
    return _open[0] > 0
